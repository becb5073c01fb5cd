// The search for the path of a trellis code that is nearest to a sequence of weights (Viterbi's), as
// quantize/src/trellis/search.rs has it for CPUs.
//
// A block searches SIDE sequences side by side, which share the loads of states' values. States with the same low bits,
// a tail, have the same successors, so a step keeps the least cost of a path to each tail, in shared memory; two tails
// that follow each other have the same predecessors, and a thread looks at the states of both. Where there are fewer
// pairs than threads, neighbours share the states of a pair. Which state was the best is not noted but found again on the
// way back, from the costs before each step.
#pragma once

#include "common.cuh"

constexpr int SEARCH_THREADS = 512;
constexpr int SEQUENCE = 128;   // values of a sequence
constexpr int STRIP = 128;      // rows of a strip
constexpr int TILE = 32;        // columns of a tile, and its sequences
constexpr int STATES = 65536;

struct TrellisSearchArgs {
    const __half* values;   // [STATES][V]
    const float* scales;    // [rows]
    float* columns;         // [rows, n]: the tile's targets, replaced by the values that were found
    uint32_t* words;        // [strips, n / TILE, TILE * words of a sequence]
    float* errors;          // [rows, TILE]: targets less scaled values
    __half* history;        // [blocks][steps][tails][SIDE]: costs before each step, less about the least
    int rows, n;
    int start;              // the tile's first column
    int step_bits;
    int window;             // steps on each side of the seam that settle it
    int groups;             // of SIDE sequences, in all strips
};

// Costs of sequences side by side.
template <int SIDE>
struct alignas(4 * SIDE) Costs {
    float of[SIDE];
};
template <int SIDE>
struct alignas(2 * SIDE) Kept {
    __half of[SIDE];
};

// Values of a state and the next one.
template <int V>
DEVICE void values_of(const __half* values, int state, float (&v)[2][V]) {
    __half2 raw[V];
    if constexpr (V == 2)
        *reinterpret_cast<uint2*>(raw) = __ldg(reinterpret_cast<const uint2*>(values + V * state));
    else
        *reinterpret_cast<uint32_t*>(raw) = __ldg(reinterpret_cast<const uint32_t*>(values + state));
#pragma unroll
    for (int k = 0; k < V; k++) {
        const float2 both = __half22float2(raw[k]);
        v[2 * k / V][2 * k % V] = both.x, v[(2 * k + 1) / V][(2 * k + 1) % V] = both.y;
    }
}

// A value of a state, exactly as formats/src/trellis.rs has it.
template <int V>
DEVICE float value_of(int state, int place) {
    const uint32_t h = uint32_t(state) * (V == 2 ? 0xAD1B72DBu : 0xD17F17D3u);
    auto byte = [h](int i) { return (float(h >> 8 * i & 255) - 127.5f) * (1.f / 128); };
    constexpr float HALF_ROOT = 0.70710678f;
    if (V == 1) return byte(0) + byte(1) + byte(2) + byte(3);
    return place == 0 ? byte(0) + HALF_ROOT * (byte(1) - byte(3)) : byte(2) + HALF_ROOT * (byte(1) + byte(3));
}

// Row of the strip and column of the tile of a lane's value.
template <int V>
DEVICE void place_of(int lane, int value, int& row, int& column) {
    const int step = value / V, i = step % 4;
    row = 16 * (step / 4 % 8) + lane / 4 + 8 * (i % 2);
    column = V * (8 * (step / 32) + 4 * (i / 2) + lane % 4) + value % V;
}

template <int V, int SIDE>
struct TrellisSearch {
    static constexpr int STEPS = SEQUENCE / V;

    const TrellisSearchArgs& p;
    const int tails, branches;
    float* cost;         // [tails][SIDE], before a step
    float* next;         // and after it
    float* x;            // [SIDE][SEQUENCE]: targets in units of the values
    uint16_t* states;    // [SIDE][STEPS]
    uint32_t* least;     // [3][SIDE]: bits of the least costs after the last steps
    int* seam;           // [SIDE]: the tail before the first step
    __half* history;

    DEVICE TrellisSearch(const TrellisSearchArgs& args, uint8_t* shared)
        : p(args), tails(STATES >> args.step_bits), branches(1 << args.step_bits) {
        cost = reinterpret_cast<float*>(shared);
        next = cost + tails * SIDE;
        x = next + tails * SIDE;
        least = reinterpret_cast<uint32_t*>(x + SIDE * SEQUENCE);
        seam = reinterpret_cast<int*>(least + 3 * SIDE);
        states = reinterpret_cast<uint16_t*>(seam + SIDE);
        history = p.history + (long long)blockIdx.x * STEPS * tails * SIDE;
    }

    // A step over all states. `keep` is where costs after it are kept, or null.
    DEVICE void step(int at, int n, __half* keep) {
        // Least costs after the last step, after this one, and after the next, which begin here.
        uint32_t *const known = least + (n + 2) % 3 * SIDE, *const now = least + n % 3 * SIDE, *const later = least + (n + 1) % 3 * SIDE;
        float twice[SIDE][V];
        uint32_t own[SIDE];
#pragma unroll
        for (int q = 0; q < SIDE; q++) {
#pragma unroll
            for (int k = 0; k < V; k++) twice[q][k] = -2.f * x[q * SEQUENCE + V * at + k];
            own[q] = __float_as_uint(INFINITY);
        }
        const int pairs = tails / 2, parts = max(1, SEARCH_THREADS / pairs), part = threadIdx.x % parts;
        for (int pair = threadIdx.x / parts; pair < pairs; pair += SEARCH_THREADS / parts) {
            float best[2][SIDE];
#pragma unroll
            for (int q = 0; q < SIDE; q++) best[0][q] = best[1][q] = INFINITY;
#pragma unroll 4
            for (int state = part * tails + 2 * pair; state < STATES; state += parts * tails) {
                float v[2][V];
                values_of<V>(p.values, state, v);
                const Costs<SIDE> before = reinterpret_cast<const Costs<SIDE>*>(cost)[state >> p.step_bits];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    float norm = v[t][0] * v[t][0];
                    if constexpr (V == 2) norm = fmaf(v[t][1], v[t][1], norm);
#pragma unroll
                    for (int q = 0; q < SIDE; q++) {
                        float c = before.of[q] + norm;
#pragma unroll
                        for (int k = 0; k < V; k++) c = fmaf(twice[q][k], v[t][k], c);
                        best[t][q] = fminf(best[t][q], c);
                    }
                }
            }
            for (int m = 1; m < parts; m *= 2)
#pragma unroll
                for (int q = 0; q < 2 * SIDE; q++) {
                    float& mine = best[q / SIDE][q % SIDE];
                    mine = fminf(mine, __shfl_xor_sync(~0u, mine, m));
                }
            if (part > 0) continue;
#pragma unroll
            for (int t = 0; t < 2; t++) {
                Costs<SIDE> after;
                Kept<SIDE> kept;
#pragma unroll
                for (int q = 0; q < SIDE; q++) {
                    float square = twice[q][0] * twice[q][0];
                    if constexpr (V == 2) square = fmaf(twice[q][1], twice[q][1], square);
                    after.of[q] = fmaxf(fmaf(square, 0.25f, best[t][q]), 0.f);
                    kept.of[q] = __float2half_rn(after.of[q] - __uint_as_float(known[q]));
                    own[q] = min(own[q], __float_as_uint(after.of[q]));
                }
                reinterpret_cast<Costs<SIDE>*>(next)[2 * pair + t] = after;
                if (keep) reinterpret_cast<Kept<SIDE>*>(keep)[2 * pair + t] = kept;
            }
        }
#pragma unroll
        for (int q = 0; q < SIDE; q++) {
            own[q] = __reduce_min_sync(~0u, own[q]);
            if (threadIdx.x % 32 == 0) atomicMin(now + q, own[q]);
        }
        if (threadIdx.x < SIDE) later[threadIdx.x] = __float_as_uint(INFINITY);
        __syncthreads();
        float* const swap = cost;
        cost = next, next = swap;
    }

    // The lane with the least `c`, the first of several; `found` of that lane.
    DEVICE int of_least(float c, int found) {
        const float own = c;
#pragma unroll
        for (int m = 16; m > 0; m /= 2) c = fminf(c, __shfl_xor_sync(~0u, c, m));
        const unsigned lanes = __ballot_sync(~0u, own == c);
        return __shfl_sync(~0u, found, __ffs(lanes) - 1);
    }

    // The best state with this tail at step `at`, by the costs of paths to the tails before; by a warp.
    DEVICE int best_state(int q, int at, int tail, const __half* before) {
        float least = INFINITY;
        int found = tail;
        for (int h = threadIdx.x % 32; h < branches; h += 32) {
            const int state = h * tails + tail;
            float c = __half2float(before[(state >> p.step_bits) * SIDE + q]);
#pragma unroll
            for (int k = 0; k < V; k++) {
                const float off = x[q * SEQUENCE + V * at + k] - __half2float(__ldg(p.values + V * state + k));
                c = fmaf(off, off, c);
            }
            if (c < least) least = c, found = state;
        }
        return of_least(least, found);
    }

    // The tail of the least cost; by a warp.
    DEVICE int best_tail(int q) {
        float least = INFINITY;
        int found = 0;
        for (int tail = threadIdx.x % 32; tail < tails; tail += 32)
            if (cost[tail * SIDE + q] < least) least = cost[tail * SIDE + q], found = tail;
        return of_least(least, found);
    }

    // Searches `count` steps from `first` on, over the seam if need be; with `closed`, the paths from the seam's tail to
    // itself, whose states it leaves. Otherwise it leaves the tail before step 0 of the best path.
    DEVICE void pass(int first, int count, bool closed) {
        for (int i = threadIdx.x; i < tails * SIDE; i += SEARCH_THREADS) {
            cost[i] = closed && i / SIDE != seam[i % SIDE] ? INFINITY : 0.f;
            history[i] = __float2half_rn(cost[i]);
        }
        for (int i = threadIdx.x; i < 3 * SIDE; i += SEARCH_THREADS) least[i] = i / SIDE == 2 ? 0 : __float_as_uint(INFINITY);
        __syncthreads();
        for (int n = 0; n < count; n++)
            step((first + n) % STEPS, n, n + 1 < count ? history + (long long)(n + 1) * tails * SIDE : nullptr);
        const int q = threadIdx.x / 32;
        if (q < SIDE) {
            int tail = closed ? seam[q] : best_tail(q);
            for (int n = count - 1; n >= (closed ? 0 : count / 2); n--) {
                const int at = (first + n) % STEPS;
                const int state = best_state(q, at, tail, history + (long long)n * tails * SIDE);
                if (closed && threadIdx.x % 32 == 0) states[q * STEPS + n] = uint16_t(state);
                tail = state >> p.step_bits;
            }
            if (!closed && threadIdx.x % 32 == 0) seam[q] = tail;
        }
        __syncthreads();
    }

    DEVICE void read(int strip, int lane) {
        for (int i = threadIdx.x; i < SIDE * SEQUENCE; i += SEARCH_THREADS) {
            int row, column;
            place_of<V>(lane + i / SEQUENCE, i % SEQUENCE, row, column);
            row += strip * STRIP;
            // Rows that fill the strip up may be anything; those without a scale are zero.
            const float scale = row < p.rows ? p.scales[row] : 0.f;
            x[i] = scale > 0.f ? p.columns[(long long)row * p.n + p.start + column] / scale : 0.f;
        }
        __syncthreads();
    }

    DEVICE void write(int strip, int lane) {
        const int each = STEPS * p.step_bits / 32, quads = each / 4 * 4;
        uint32_t* const words = p.words + ((long long)strip * (p.n / TILE) + p.start / TILE) * TILE * each;
        for (int i = threadIdx.x; i < SIDE * each; i += SEARCH_THREADS) {
            const int q = i / each, word = i % each, end = 32 * (word + 1);
            uint32_t bits = 0;
            for (int n = 32 * word / p.step_bits; n < STEPS && n * p.step_bits < end; n++) {
                const uint32_t newest = states[q * STEPS + n] & (branches - 1);
                const int left = end - (n + 1) * p.step_bits;
                bits |= left >= 0 ? newest << left : newest >> -left;
            }
            // Runs of four words of each lane, then one of the two that are left.
            const int run = word < quads ? 4 : each % 4;
            words[word / 4 * 4 * TILE + (lane + q) * run + word % 4] = bits;
        }
        for (int i = threadIdx.x; i < SIDE * SEQUENCE; i += SEARCH_THREADS) {
            int row, column;
            place_of<V>(lane + i / SEQUENCE, i % SEQUENCE, row, column);
            row += strip * STRIP;
            if (row >= p.rows) continue;
            float& target = p.columns[(long long)row * p.n + p.start + column];
            const float value = value_of<V>(states[i / V], i % V);
            p.errors[(long long)row * TILE + column] = target - p.scales[row] * value;
            target = value;
        }
        __syncthreads();
    }

    DEVICE void run() {
        for (int group = blockIdx.x; group < p.groups; group += gridDim.x) {
            const int strip = group * SIDE / TILE, lane = group * SIDE % TILE;
            read(strip, lane);
            pass(STEPS - p.window, 2 * p.window, false);
            pass(0, STEPS, true);
            write(strip, lane);
        }
    }
};
