// Which experts a row of a mixture goes through, and with which weights: the `per_token` experts of the
// greatest scores, of equal ones those of lower number; weights are the softmax of the scores over all
// experts, divided by the sum of those chosen where `normalized`. A score that is no number makes every
// weight one that is none. Where the last expert is `shared`, all rows go through it, behind those chosen among the
// others, and its weight is the sigmoid of its score.
#pragma once

#include "common.cuh"

constexpr int MOST_EXPERTS = 512;
constexpr int MOST_CHOSEN = 32;
constexpr int COUNTED_EXPERTS = 128;   // most of which each is compared with all others

struct Chosen {
    int expert[MOST_CHOSEN];
    float weight[MOST_CHOSEN];
    uint32_t keys[MOST_EXPERTS];   // of all, while they are chosen from
    // Where those chosen are read, in the place of the keys: of experts that are not one stack.
    DEVICE unsigned long long* places() { return reinterpret_cast<unsigned long long*>(keys); }
    DEVICE const unsigned long long* places() const { return reinterpret_cast<const unsigned long long*>(keys); }
};

// A float as a number of the same order, and back.
DEVICE uint32_t ordered(float v) {
    const uint32_t bits = __float_as_uint(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float unordered(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The experts of the `per_token` greatest keys, one after another: each warp offers its greatest, and the greatest of these
// is taken. Of hundreds of experts that compares far fewer keys than `count_before`.
DEVICE void take_greatest(Chosen& to, uint32_t own, bool there, int per_token) {
    constexpr int WARPS = MOST_EXPERTS / 32;
    static_assert(2 * WARPS <= MOST_CHOSEN, "offers of two rounds fit where weights will be");
    uint32_t* const offers = reinterpret_cast<uint32_t*>(to.weight);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // A number that is none may have the key of no expert: its place in the order is without effect.
    uint32_t key = there ? max(own, 1u) : 0;
    for (int place = 0; place < per_token; place++) {
        uint32_t* const round = offers + place % 2 * WARPS;
        const uint32_t most = __reduce_max_sync(~0u, key);
        if (lane == 0) round[warp] = most;
        __syncthreads();
        const uint32_t offered = lane < WARPS ? round[lane] : 0, greatest = __reduce_max_sync(~0u, offered);
        // Of equals the lower number comes first.
        if (warp != __ffs(__ballot_sync(~0u, offered == greatest)) - 1) continue;
        if (lane != __ffs(__ballot_sync(~0u, key == greatest)) - 1) continue;
        to.expert[place] = threadIdx.x;
        key = 0;
    }
}

// The same by the number of keys before a thread's own.
DEVICE void count_before(Chosen& to, uint32_t own, int experts, int per_token) {
    const int e = threadIdx.x;
    int before[4] = {};
    for (int i = 0; i < experts; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(to.keys + i);
        // Of equals the lower number comes first.
        before[0] += v.x > own || (v.x == own && i < e);
        before[1] += v.y > own || (v.y == own && i + 1 < e);
        before[2] += v.z > own || (v.z == own && i + 2 < e);
        before[3] += v.w > own || (v.w == own && i + 3 < e);
    }
    const int place = before[0] + before[1] + (before[2] + before[3]);
    if (place < per_token) to.expert[place] = e;
}

// A block of MOST_EXPERTS threads chooses the experts of a row, of which there may be MANY.
template <bool MANY = false>
DEVICE void choose(Chosen& to, const float* scores, int experts, int per_token, bool normalized, bool shared) {
    experts -= shared, per_token -= shared;
    const int e = threadIdx.x;
    const bool there = e < experts;
    const float score = there ? __ldcg(scores + e) : 0.f;
    const uint32_t own = ordered(score);
    to.keys[e] = there ? own : 0;   // less than any number's
    const bool finite = __syncthreads_and(isfinite(score));
    if (MANY && experts > COUNTED_EXPERTS) {
        take_greatest(to, own, there, per_token);
    } else if (there) {
        count_before(to, own, experts, per_token);
    }
    __syncthreads();
    if (e < 32) {
        const float most = unordered(to.keys[to.expert[0]]);
        const float weight = e < per_token ? expf(unordered(to.keys[to.expert[e]]) - most) : 0.f;
        float sum = weight;
        if (!normalized) {
            sum = 0.f;
            for (int i = e; i < experts; i += 32) sum += expf(unordered(to.keys[i]) - most);
        }
        sum = warp_sum(sum);
        if (e < per_token) to.weight[e] = finite ? weight / sum : __uint_as_float(0x7fc00000u);
        if (shared && e == 0) {
            const float own = __ldcg(scores + experts);
            to.expert[per_token] = experts;
            to.weight[per_token] = finite && isfinite(own) ? 1.f / (1.f + expf(-own)) : __uint_as_float(0x7fc00000u);
        }
    }
    __syncthreads();
}
