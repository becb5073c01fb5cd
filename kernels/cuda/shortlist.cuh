// The choice from a list of the best tokens (`sampling.cuh`), by one warp in registers where it is
// short.
#pragma once

#include "sampling.cuh"

// Element e of N a lane is lane e % 32's e / 32-th.

// Sorts, greatest first.
template <int N>
DEVICE void warp_sort(unsigned long long (&key)[N], int lane) {
#pragma unroll 1
    for (int size = 2; size <= 32 * N; size <<= 1) {
#pragma unroll 1
        for (int stride = size / 2; stride >= 32; stride >>= 1) {
            // Both elements are the lane's.
#pragma unroll
            for (int i = 0; i < N; i++) {
#pragma unroll
                for (int j = i + 1; j < N; j++) {
                    if ((i ^ j) * 32 != stride) continue;
                    const bool falling = (i * 32 & size) == 0;
                    const unsigned long long a = key[i], b = key[j];
                    if ((a < b) == falling) key[i] = b, key[j] = a;
                }
            }
        }
#pragma unroll 1
        for (int stride = min(size / 2, 16); stride > 0; stride >>= 1) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const unsigned long long other = __shfl_xor_sync(~0u, key[i], stride);
                const bool falling = ((i * 32 + lane) & size) == 0, first = (lane & stride) == 0;
                if ((key[i] < other) == (falling == first)) key[i] = other;
            }
        }
    }
}

// Sums over the elements up to each; returns that over all.
template <int N>
DEVICE double warp_scan(double (&v)[N], int lane) {
    double before = 0.0;
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll 1
        for (int m = 1; m < 32; m <<= 1) {
            const double o = __shfl_up_sync(~0u, v[i], m);
            if (lane >= m) v[i] += o;
        }
        v[i] += before;
        before = __shfl_sync(~0u, v[i], 31);
    }
    return before;
}

// The first element for which `test(i)` of its lane holds, at most `most`.
template <int N, class F>
DEVICE int first_of(int most, F test) {
    int first = most;
#pragma unroll
    for (int i = N - 1; i >= 0; i--) {
        const unsigned lanes = __ballot_sync(~0u, test(i));
        if (lanes != 0) first = min(most, 32 * i + __ffs(lanes) - 1);
    }
    return first;
}

// A warp as a team of `draw_sorted`.
template <int N>
struct WarpTeam {
    int lane;

    DEVICE int at(int i) const { return 32 * i + lane; }
    DEVICE void sort(unsigned long long (&key)[N], int) const { warp_sort(key, lane); }
    DEVICE double scan(double (&v)[N]) const { return warp_scan(v, lane); }
    template <class F>
    DEVICE int first(int most, F test) const { return first_of<N>(most, test); }
    DEVICE unsigned long long element(const unsigned long long (&key)[N], int e) const {
        unsigned long long found = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const unsigned long long k = __shfl_sync(~0u, key[i], e % 32);
            if (i == e / 32) found = k;
        }
        return found;
    }
};

// Draws from a list of `n` tokens, which holds all whose logit's key is at least `complete`; -1 if
// others matter. The team's threads hold the tokens' keys, zero behind them, `at(i)` being the place
// of the i-th; `total` is the weight of all tokens, of use where top-k limits nothing; `peak` receives
// the greatest logit.
template <class Team, int N>
DEVICE int draw_sorted(const Team& team, const Sampling& how, bool limited, unsigned long long (&key)[N], int n, uint32_t complete,
                       double total, double u, float& peak) {
    const float scale = 1.f / how.temperature;
    const bool whole = complete == EXCLUDED + 1;   // no other token can be drawn
    team.sort(key, n);
    const float top = unordered(uint32_t(team.element(key, 0) >> 32));
    peak = top;
    if (limited) {
        if (n < how.top_k && !whole) return -1;
        n = min(n, how.top_k);
    }
    auto weigh = [&](uint32_t logit) { return double(__expf((unordered(logit) - top) * scale)); };
    double sums[N];
    if (how.top_p < 1.f) {
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = team.at(i) < n ? weigh(uint32_t(key[i] >> 32)) : 0.0;
        const double all = team.scan(sums);
        const double target = double(how.top_p) * (limited ? all : total);
        if (!limited && !whole && all < target) return -1;
        n = team.first(n - 1, [&](int i) { return sums[i] >= target; }) + 1;
    }
    if (how.min_p > 0.f) {
        const float floor = top + how.temperature * __logf(how.min_p);
        if (!limited && how.top_p >= 1.f && floor < unordered(complete)) return -1;
        n = team.first(n, [&](int i) { return team.at(i) > 0 && unordered(uint32_t(key[i] >> 32)) < floor; });
    }
    // By id: the key becomes (~id, logit).
#pragma unroll
    for (int i = 0; i < N; i++) key[i] = team.at(i) < n ? key[i] << 32 | key[i] >> 32 : 0;
    team.sort(key, n);
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = team.at(i) < n ? weigh(uint32_t(key[i])) : 0.0;
    const double all = team.scan(sums);
    // Rounding may leave u past the last sum: then the last token that is kept.
    const int at = team.first(n - 1, [&](int i) { return sums[i] > u * all; });
    return int(~uint32_t(team.element(key, at) >> 32));
}

// What one warp makes of a short list.
struct Choice {
    int token;   // -1: others matter
    bool bad;    // a logit is not finite
};

DEVICE Choice choose_from_few(const Sampling& how, int vocab, Shortlist& list, const Range* ranges, double u) {
    const int lane = threadIdx.x % 32;
    const bool limited = limits_k(how, vocab);
    const int2 state = __ldcg(reinterpret_cast<const int2*>(&list));   // count, bad
    const uint32_t complete = __ldcg(&list.threshold);
    unsigned long long key[SHORT_LIST / 32];
#pragma unroll
    for (int i = 0; i < SHORT_LIST / 32; i++) key[i] = __ldcg(list.list + 32 * i + lane);
    double total = 0.0;
    if (!limited && how.top_p < 1.f) {
        float2 part[RANGES / 32];   // peak, sum
        float most = -INFINITY;
#pragma unroll
        for (int i = 0; i < RANGES / 32; i++) {
            part[i] = __ldcg(reinterpret_cast<const float2*>(ranges + 32 * i + lane));
            most = fmaxf(most, part[i].x);
        }
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
        const float scale = 1.f / how.temperature;
#pragma unroll
        for (int i = 0; i < RANGES / 32; i++)
            if (part[i].x > -INFINITY) total += double(part[i].y) * double(__expf((part[i].x - most) * scale));
#pragma unroll 1
        for (int m = 16; m > 0; m >>= 1) total += __shfl_xor_sync(~0u, total, m);
    }
    const int n = state.x;
#pragma unroll
    for (int i = 0; i < SHORT_LIST / 32; i++)
        if (32 * i + lane >= n) key[i] = 0;
    __syncwarp();
    // For the next step.
    if (lane == 0) list.count = 0, list.bad = 0;
    if (state.y) return {0, true};
    if (n > SHORT_LIST) return {-1, false};
    float peak;
    int token;
    if (n <= 64) {
        unsigned long long few[2] = {key[0], key[1]};
        token = draw_sorted(WarpTeam<2>{lane}, how, limited, few, n, complete, total, u, peak);
    } else {
        token = draw_sorted(WarpTeam<4>{lane}, how, limited, key, n, complete, total, u, peak);
    }
    return {token, !isfinite(peak)};
}
