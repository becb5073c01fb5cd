// `step_layers` on the host, by ranks that each have a part of every layer, compared with the whole layers.
#include "layers_model.cuh"

namespace {

// The same layers on several ranks, each with a part of every one.
template <int GROUP, class S, bool HYBRID = false, bool EXPERTS = false>
bool check_ranks(const char* scheme, int ranks, const Case& c) {
    using M = Model<GROUP, S, HYBRID, EXPERTS>;
    M whole(c);
    const auto parts = M::split(whole, ranks);
    std::vector<M*> all;
    for (auto& m : parts) all.push_back(m.get());
    const std::vector<double> expected = whole.expected();
    const auto found = M::run(all, c.seed, 1);
    // One rank begins a step while another one still reads what the last one left.
    const auto second = M::run(all, c.seed + 1, 2);
    const double error = nmse(found[0], expected), later = nmse(second[0], whole.run(c.seed, 2));
    bool alike = true, counted = true, lost = false;
    for (int r = 0; r < ranks; r++) alike = alike && found[r] == found[0] && second[r] == second[0], counted = counted && all[r]->epoch == 6, lost = lost || all[r]->lost;
    const bool same = M::run(all, c.seed + 2, 2) == second, right = error < (c.int8 ? 1e-6 : 1e-7) && later < (c.int8 ? 1e-5 : 1e-6);
    print(scheme, whole);
    printf(", %d ranks: NMSE %.1e, after two steps %.1e%s%s%s%s%s\n", ranks, error, later, right ? "" : ", TOO LARGE", alike ? "" : ", RANKS DIFFER",
           same ? "" : ", NOT THE SAME AGAIN", counted ? "" : ", STEPS ARE NOT COUNTED", lost ? ", A RANK IS LOST" : "");
    return right && alike && same && counted && !lost;
}

// A rank whose peer never comes ends all the same, and says so.
bool check_lost() {
    using M = Model<4, int4_int_64, false, false>;
    M whole({256, 2, 1024, 8, 2, 5, 4, 7, 3, 1});
    const auto parts = M::split(whole, 2);
    pace = 8'000'000'000;
    parts[0]->run(1, 2);
    pace = 0;
    const bool told = parts[0]->lost && !parts[1]->lost;
    printf("a rank alone of two: %s\n", told ? "it ends, and tells" : "IT DOES NOT TELL");
    return told;
}

}   // namespace

int main() {
    const bool right[] = {
        // Tiles of one part and of several on each rank; three ranks; a share of a key head's pages.
        check_ranks<4, int4_int_64>("int", 2, {512, 2, 1024, 8, 2, 70, 4, 7, 3, 1}),
        check_ranks<2, int4_sym_64>("sym", 3, {256, 6, 1536, 8, 2, 300, 4, 7, 3, 2}),
        check_ranks<4, int4_offset_64>("offset", 2, {256, 4, 1536, 16, 2, 40, 4, 7, 3, 3, true}),
        check_ranks<2, void>("mix", 2, {256, 4, 1536, 8, 3, 5, 2, 8, 4, 4}),
        check_ranks<4, int4_int_64, true>("int", 2, {256, 2, 1536, 16, 2, 70, 4, 12, 3, 5, false, 4}),
        check_ranks<2, int4_sym_64, true>("sym", 2, {256, 2, 1536, 8, 3, 17, 4, 12, 3, 6, false, 4, true, 2}),
        check_ranks<4, int4_int_64, false, true>("int", 2, {256, 2, 512, 8, 2, 33, 4, 8, 3, 7, false, 0, false, 0, 20, 3, true, false}),
        check_ranks<2, void, true, true>("mix", 3, {256, 3, 768, 16, 2, 17, 4, 12, 4, 8, false, 6, false, 0, 6, 2}),
        check_lost(),
    };
    const int passed = std::count(std::begin(right), std::end(right), true), all = std::size(right);
    printf("ranks on the host: %d passed, %d failed\n", passed, all - passed);
    return passed != all;
}
