// `trellis_search` on the host, compared with the same search in f64.
#include <common.cuh>

// Fibers take turns where they wait: nothing comes in between.
inline void atomicMin(uint32_t* to, uint32_t v) { *to = std::min(*to, v); }

#include "trellis_search.cuh"

namespace {

constexpr double ROOT = 0.70710678118654752;

// The values of a state, as docs/trellis.md has them, 1/128 of sums of bytes.
std::array<double, 2> values(int width, int state) {
    const uint32_t h = uint32_t(state) * (width == 2 ? 0xAD1B72DBu : 0xD17F17D3u);
    double b[4];
    for (int i = 0; i < 4; i++) b[i] = (double(h >> 8 * i & 255) - 127.5) / 128;
    if (width == 1) return {b[0] + b[1] + b[2] + b[3], 0};
    return {b[0] + ROOT * (b[1] - b[3]), b[2] + ROOT * (b[1] + b[3])};
}

struct Case {
    int width, side, step_bits, window;
    double scale;   // of Gaussians' deviation, in units of the code's values
};

// Row and column of a value, as `formats::trellis::place` says.
std::array<int, 2> place(int width, int lane, int step) {
    const int part = step / 32, m = step / 4 % 8, i = step % 4;
    return {16 * m + lane / 4 + 8 * (i % 2), width * (8 * part + 4 * (i / 2) + lane % 4)};
}

// The best path over some steps, all tails or that of a seam being open at its ends; returns its cost.
double best_path(const Case& c, const std::vector<double>& x, int first, int count, int seam, std::vector<int>& states) {
    const int tails = 65536 >> c.step_bits, steps = 128 / c.width;
    std::vector<std::array<double, 2>> table(65536);
    for (int s = 0; s < 65536; s++) table[s] = values(c.width, s);
    std::vector<double> cost(tails, seam < 0 ? 0. : INFINITY), next(tails);
    if (seam >= 0) cost[seam] = 0;
    std::vector<uint16_t> from(size_t(count) * tails);
    for (int n = 0; n < count; n++) {
        const int at = (first + n) % steps;
        std::fill(next.begin(), next.end(), INFINITY);
        for (int s = 0; s < 65536; s++) {
            double to = cost[s >> c.step_bits];
            for (int k = 0; k < c.width; k++) to += (x[at * c.width + k] - table[s][k]) * (x[at * c.width + k] - table[s][k]);
            if (to < next[s % tails]) next[s % tails] = to, from[size_t(n) * tails + s % tails] = uint16_t(s);
        }
        std::swap(cost, next);
    }
    int tail = seam >= 0 ? seam : int(std::min_element(cost.begin(), cost.end()) - cost.begin());
    const double least = cost[tail];
    states.assign(count, 0);
    for (int n = count - 1; n >= 0; n--) {
        states[n] = from[size_t(n) * tails + tail];
        tail = states[n] >> c.step_bits;
    }
    return least;
}

template <int V, int SIDE>
bool check(const Case& c, int groups, int blocks, unsigned seed) {
    // A strip that is not full and the second of two tiles.
    const int rows = 100, n = 64, start = 32, steps = 128 / V, tails = 65536 >> c.step_bits, each = steps * c.step_bits / 32;
    uint32_t random = seed + 1;
    auto uniform = [&] { return ((random = random * 1664525 + 1013904223) >> 8) / 16777216. + 1e-9; };
    std::vector<float> columns(rows * n), scales(rows), errors(rows * 32);
    std::vector<__half> table(65536 * V), history(size_t(blocks) * steps * tails * SIDE);
    std::vector<uint32_t> words(2 * 32 * each, 0xabababab);
    for (int r = 0; r < rows; r++) scales[r] = r == 9 ? 0.f : float(0.01 + 0.001 * r);
    for (int i = 0; i < rows * n; i++) columns[i] = float(scales[i / n] * c.scale * sqrt(-2 * log(uniform())) * cos(6.283185307 * uniform()));
    for (int i = 0; i < 65536 * V; i++) table[i] = __float2half(float(values(V, i / V)[i % V]));
    const std::vector<float> before = columns;
    const TrellisSearchArgs args = {table.data(), scales.data(), columns.data(), words.data(), errors.data(), history.data(), rows, n, start, c.step_bits, c.window, groups};
    launch(blocks, SEARCH_THREADS, seed, [&] { TrellisSearch<V, SIDE>(args, own_shared()).run(); });

    double found = 0, expected = 0, worst = 1, deviation = 0;
    for (int q = 0; q < groups * SIDE; q++) {
        std::vector<uint32_t> own(each);
        for (int w = 0; w < each; w++) {
            const int run = w < each / 4 * 4 ? 4 : each % 4;
            own[w] = words[32 * each + w / 4 * 4 * 32 + q * run + w % 4];
        }
        auto bit = [&](int at) { at = (at + 32 * each) % (32 * each); return own[at / 32] >> (31 - at % 32) & 1; };
        std::vector<double> x(128);
        double cost = 0;
        int seam = 0;
        for (int step = 0; step < steps; step++) {
            int state = 0;
            for (int b = 0; b < 16; b++) state = 2 * state + bit((step + 1) * c.step_bits - 16 + b);
            seam = state % tails;
            for (int k = 0; k < V; k++) {
                const auto [row, column] = place(V, q, step);
                const double v = values(V, state)[k];
                const bool there = row < rows;
                const int at = row * n + start + column + k;
                if (there && scales[row] > 0) x[step * V + k] = before[at] / scales[row];
                cost += (x[step * V + k] - v) * (x[step * V + k] - v);
                if (!there) continue;
                deviation = std::max(deviation, fabs(columns[at] - v));
                deviation = std::max(deviation, fabs(double(errors[row * 32 + column + k]) - (before[at] - scales[row] * columns[at])));
            }
        }
        std::vector<int> states;
        const double least = best_path(c, x, 0, steps, seam, states);
        worst = std::max(worst, std::max(cost / least, least / cost));
        found += cost;
        best_path(c, x, steps - c.window, 2 * c.window, -1, states);
        expected += best_path(c, x, 0, steps, states[c.window - 1] % tails, states);
    }
    // What belongs to other tiles and sequences stays as it was.
    bool untouched = true;
    for (int i = 0; i < 32 * each; i++) untouched &= words[i] == 0xabababab;
    for (int i = 0; i < rows * n; i++) untouched &= i % n >= start || columns[i] == before[i];
    const bool right = worst < 1.001 && fabs(found / expected - 1) < 0.01 && deviation < 1e-6 && untouched;
    printf("trellis_search of %d values, %d side by side, steps of %d bits: squared error %.5f, in f64 %.5f, at most %.5f of the least for its seam, values within %.0e%s%s\n", V, SIDE, c.step_bits,
           found / (128 * groups * SIDE), expected / (128 * groups * SIDE), worst, deviation, untouched ? "" : ", TOUCHED OTHERS", right ? "" : ", WRONG");
    return right;
}

}   // namespace

int main() {
    const bool right[] = {
        check<1, 1>({1, 1, 2, 64, 1.15}, 1, 1, 1),
        check<1, 2>({1, 2, 3, 64, 1.1}, 1, 1, 2),
        check<1, 4>({1, 4, 4, 64, 1.05}, 1, 1, 3),
        check<1, 4>({1, 4, 6, 44, 1.0}, 1, 1, 4),
        check<2, 2>({2, 2, 4, 32, 0.8}, 1, 1, 5),
        check<2, 4>({2, 4, 6, 29, 0.8}, 2, 1, 6),
        check<2, 4>({2, 4, 7, 25, 0.8}, 2, 2, 7),
        check<2, 2>({2, 2, 8, 22, 0.8}, 1, 1, 8),
        check<2, 4>({2, 4, 10, 17, 0.7}, 1, 1, 9),
    };
    const int passed = std::count(std::begin(right), std::end(right), true), all = std::size(right);
    printf("the search on the host: %d passed, %d failed\n", passed, all - passed);
    return passed != all;
}
