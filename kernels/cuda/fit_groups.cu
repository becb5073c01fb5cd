// The scale and zero-point of every group of a weight: the range whose rounding errors, each
// weighted by its input's importance, are least, refitted to its codes by least squares.
//
// w is f32 [rows, ld], of which `columns` from `at` on are cut into groups of `group` (the last
// may be shorter). A warp takes a group and each of its lanes a candidate, over all elements: no
// sums across lanes, and every sum in the order in which the CPU sums it. Products and sums are
// rounded one by one, so that the choice is the CPU's to the bit.
#include "common.cuh"

struct FitGroupsArgs {
    const float* w;        // [rows, ld]
    const float* h;        // importance of columns from `at` on, [columns]; or null: all alike
    float* scales;         // [rows, groups], from group `first` on
    float* zeros;          // [rows, groups]
    long long rows;
    int ld, at, columns;
    int group, groups, first;
    int symmetric;
    int steps;             // ranges tried from 1 down to `least`; 0: the whole range alone
    int power;             // 2 or 3, of an error in the sum
    int refits;
    float least;
    float max_code;
};

struct Params {
    float scale, zero;
};

DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float minus(float a, float b) { return __fsub_rn(a, b); }
DEVICE float over(float a, float b) { return __fdiv_rn(a, b); }

// The nearest scale that an f16 holds, neither zero nor infinite.
DEVICE float storable(float scale) {
    const float v = __half2float(__float2half_rn(fabsf(scale)));
    return copysignf(fminf(fmaxf(v, 5.9604644775390625e-8f), 65504.f), scale);
}

// Rounds a small value to an integer, ties to even.
DEVICE float to_integer(float v) { return minus(plus(v, 12582912.f), 12582912.f); }

DEVICE float clamp_to(float v, float low, float high) {
    v = v > low ? v : low;
    return v < high ? v : high;
}

struct Group {
    const float* w;
    const float* h;
    int n;
    int power;
    float max_code;

    DEVICE float importance(int i) const { return h ? h[i] : 1.f; }

    // One element's weighted error.
    DEVICE float part(Params p, float inverse, float low, float high, int i) const {
        const float v = w[i];
        const float q = to_integer(clamp_to(times(v, inverse), low, high));
        const float e = minus(times(q, p.scale), v);
        float e2 = times(e, e);
        if (power == 3) e2 = times(e2, fabsf(e));
        return times(importance(i), e2);
    }

    // Sum of the weighted errors, in 16 parts as the CPU's lanes have it.
    DEVICE float error(Params p) const {
        const float inverse = over(1.f, p.scale), low = -p.zero, high = minus(max_code, p.zero);
        float sums[16] = {};
        int base = 0;
        for (; base + 16 <= n; base += 16) {
#pragma unroll
            for (int l = 0; l < 16; l++) sums[l] = plus(sums[l], part(p, inverse, low, high, base + l));
        }
#pragma unroll
        for (int l = 0; l < 16; l++)
            if (base + l < n) sums[l] = plus(sums[l], part(p, inverse, low, high, base + l));
        float sum = 0.f;
#pragma unroll
        for (int l = 0; l < 16; l++) sum = plus(sum, sums[l]);
        return sum;
    }

    // The scale that fits the codes of p best.
    DEVICE float refit(Params p) const {
        const float inverse = over(1.f, p.scale), low = -p.zero, high = minus(max_code, p.zero);
        float wq = 0.f, qq = 0.f;
        for (int i = 0; i < n; i++) {
            const float v = w[i];
            const float q = to_integer(clamp_to(times(v, inverse), low, high));
            float weight = importance(i);
            if (power == 3) weight = times(weight, fabsf(minus(times(q, p.scale), v)));
            wq = plus(wq, times(times(weight, v), q));
            qq = plus(qq, times(times(weight, q), q));
        }
        return over(wq, qq);
    }
};

// From `low` to `high`, which include 0, shrunk to `share`.
DEVICE Params whole_range(const FitGroupsArgs& p, float low, float high, float share) {
    if (p.symmetric) {
        const float most = fmaxf(high, -low);
        return {storable(over(times(most, share), over(p.max_code, 2.f))), over(plus(p.max_code, 1.f), 2.f)};
    }
    const float scale = storable(over(times(minus(high, low), share), p.max_code));
    const float zero = rintf(over(times(-low, share), scale));
    return {scale, fminf(fmaxf(zero, 0.f), p.max_code)};
}

// Candidate c; a scale of 0 where there is none.
DEVICE Params candidate(const FitGroupsArgs& p, float low, float high, int c) {
    if (c == 0) return whole_range(p, low, high, 1.f);
    const int kinds = p.symmetric ? 2 : 3, step = (c - 1) / kinds, kind = (c - 1) % kinds;
    const float share = minus(1.f, over(times(minus(1.f, p.least), float(step)), float(p.steps)));
    if (p.symmetric) {
        const float signed_ = high > -low ? high : low, middle = over(plus(p.max_code, 1.f), 2.f);
        const float scale = storable(over(times(-signed_, share), middle));
        return {kind == 0 ? scale : -scale, middle};
    }
    Params range = whole_range(p, low, high, share);
    if (kind == 1) range.zero -= 1.f;
    if (kind == 2) range.zero += 1.f;
    if (range.zero < 0.f || range.zero > p.max_code) range.scale = 0.f;
    return range;
}

extern "C" __global__ void __launch_bounds__(256) fit_groups(const __grid_constant__ FitGroupsArgs p) {
    const int count = (p.columns + p.group - 1) / p.group, lane = threadIdx.x % 32;
    const long long index = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (index >= p.rows * count) return;
    const long long row = index / count;
    const int k = int(index % count);
    const Group group = {p.w + row * p.ld + p.at + k * p.group, p.h ? p.h + k * p.group : nullptr,
                         min(p.group, p.columns - k * p.group), p.power, p.max_code};
    float low = 0.f, high = 0.f;
    for (int i = lane; i < group.n; i += 32) {
        low = fminf(low, group.w[i]);
        high = fmaxf(high, group.w[i]);
    }
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
        low = fminf(low, __shfl_xor_sync(~0u, low, m));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, m));
    }
    Params best = {0.f, over(plus(p.max_code, 1.f), 2.f)};
    if (low != 0.f || high != 0.f) {
        best = whole_range(p, low, high, 1.f);
        if (p.steps > 0) {
            // The first of the least: lanes keep their first, then the lowest number wins.
            float error = INFINITY;
            int place = 0;
            const int candidates = 1 + (p.symmetric ? 2 : 3) * (p.steps + 1);
            for (int c = lane; c < candidates; c += 32) {
                const Params range = candidate(p, low, high, c);
                if (range.scale == 0.f) continue;
                const float e = group.error(range);
                if (e < error) error = e, place = c;
            }
#pragma unroll
            for (int m = 16; m > 0; m >>= 1) {
                const float e = __shfl_xor_sync(~0u, error, m);
                const int c = __shfl_xor_sync(~0u, place, m);
                if (e < error || (e == error && c < place)) error = e, place = c;
            }
            best = candidate(p, low, high, place);
            for (int i = 0; i < p.refits; i++) {
                const float scale = group.refit(best);
                if (!isfinite(scale) || scale == 0.f) break;
                const Params range = {storable(scale), best.zero};
                const float e = group.error(range);
                if (!(e < error)) break;
                best = range, error = e;
            }
        }
    }
    if (lane == 0) {
        const long long to = row * p.groups + p.first + k;
        p.scales[to] = best.scale;
        p.zeros[to] = best.zero;
    }
}
