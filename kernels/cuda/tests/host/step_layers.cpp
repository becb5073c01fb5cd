// `step_layers` on the host, compared with the same layers in f64.
#include "layers_model.cuh"

namespace {

template <int GROUP, class S, bool HYBRID = false, bool EXPERTS = false>
bool check(const char* scheme, const Case& c) {
    Model<GROUP, S, HYBRID, EXPERTS> model(c);
    const std::vector<double> expected = model.expected();   // before the new position is in the cache
    const std::vector<float> found = model.run(c.seed);
    const double error = nmse(found, expected);
    // Whatever the order in which warps take turns.
    const std::vector<float> states = model.after;
    const bool same = model.run(c.seed + 1) == found && model.after == states, counted = model.epoch == 5;
    bool apart = true;
    if constexpr (EXPERTS) {
        model.scatter_experts();
        apart = model.run(c.seed + 2) == found && model.counts_choices(1);
    }
    // A code of the new key or value may be the next one, where sums in another order round it up.
    const bool right = error < (c.int8 ? 1e-6 : 1e-7);
    print(scheme, model);
    printf(": NMSE %.1e%s%s%s%s\n", error, right ? "" : ", TOO LARGE", same ? "" : ", NOT THE SAME AGAIN", counted ? "" : ", STEPS ARE NOT COUNTED", apart ? "" : ", NOT THE SAME WITH EXPERTS APART");
    return right && same && counted && apart;
}

}   // namespace

int main() {
    const bool right[] = {
        check<2, int4_int_64>("int", {512, 2, 1024, 8, 2, 70, 4, 7, 3, 0}),
        // A block has more tiles of qkv than warps.
        check<2, int4_int_64>("int", {512, 4, 1024, 8, 1, 40, 4, 7, 3, 1}),
        check<4, int4_sym_64>("sym", {256, 2, 768, 16, 2, 5, 2, 13, 3, 2}),
        check<5, int4_offset_64>("offset", {512, 2, 768, 16, 1, 33, 1, 8, 4, 3}),
        check<8, int4_int_64>("int", {512, 1, 1280, 8, 1, 130, 4, 9, 5, 4}),
        // Sources of several pages: four heads share eight blocks.
        check<2, int4_int_64>("int", {256, 4, 768, 8, 1, 128 * 9 + 37, 4, 11, 3, 5}),
        check<4, int4_int_64>("int", {256, 8, 768, 8, 1, 128 * 3, 4, 8, 4, 6}),
        check<2, int4_int_64>("int", {256, 4, 768, 8, 2, 128 * 5 + 127, 4, 7, 3, 7, true}),
        check<5, int4_sym_64>("sym", {256, 8, 768, 8, 1, 128 * 2 + 3, 4, 12, 3, 8, true}),
        check<2, void>("mix", {512, 2, 768, 8, 2, 70, 4, 7, 3, 9}),
        check<4, void>("mix", {256, 2, 768, 16, 3, 5, 2, 8, 4, 10}),
        // Columns of a head in one block and in several; a first position; rows that states lack.
        check<4, int4_int_64, true>("int", {512, 1, 768, 8, 2, 70, 4, 12, 3, 11, false, 4}),
        check<2, int4_sym_64, true>("sym", {256, 1, 768, 16, 3, 0, 4, 12, 3, 12, false, 2, true}),
        check<8, int4_int_64, true>("int", {256, 1, 768, 16, 2, 300, 4, 12, 4, 13, false, 8}),
        check<2, void, true>("mix", {256, 2, 768, 16, 2, 17, 4, 12, 4, 14, false, 4, false, 3}),
        // All trellis codes; strips with more parts than are read at once, and blocks with several strips.
        check<2, trellis_codes>("trellis", {1024, 4, 2048, 8, 2, 70, 0, 7, 3, 19}),
        check<4, trellis_codes>("trellis", {1024, 2, 1152, 16, 2, 128 * 3 + 5, 0, 8, 4, 20, true}),
        check<4, trellis_codes>("trellis", {1024, 2, 1280, 48, 2, 5, 0, 9, 3, 21}),
        // Mixtures: several rows of the router in a block, and in some none; shared experts.
        check<2, int4_int_64, false, true>("int", {512, 2, 256, 8, 2, 33, 4, 8, 3, 15, false, 0, false, 0, 40, 3}),
        check<4, int4_sym_64, false, true>("sym", {256, 2, 512, 16, 3, 70, 4, 8, 3, 16, false, 0, false, 0, 9, 3, true, false}),
        check<4, int4_int_64, true, true>("int", {256, 1, 256, 16, 2, 20, 4, 12, 4, 17, false, 4, true, 2, 33, 9, true}),
        check<2, void, true, true>("mix", {256, 2, 768, 16, 2, 17, 4, 12, 4, 18, false, 4, false, 0, 6, 2}),
    };
    const int passed = std::count(std::begin(right), std::end(right), true), all = std::size(right);
    printf("kernels on the host: %d passed, %d failed\n", passed, all - passed);
    return passed != all;
}
