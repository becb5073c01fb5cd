// Mixtures of experts in the kernel of all layers (`step_layers.cuh`): which experts the row goes through, and where
// their records are.
//
// To the products a mixture is an MLP: gate and up have the tiles of one chosen expert after another, down has their
// spans likewise, over what all of them leave, each times its weight. Each block scores some of the experts, and chooses
// among the scores of all: nobody waits for whoever chooses.
#pragma once

#include "choose.cuh"
#include "layers_halves.cuh"
#include "layers.cuh"

#if __CUDA_ARCH__ >= 900

constexpr int KEYS_OF_LANE = MOST_EXPERTS / 32;

// The experts that the row goes through, and their weights.
struct Route {
    int expert[MOST_ROUTE];
    float weight[MOST_ROUTE];
};

// Where record `unit` of a block's share of gate and up, or of down, is among those of all experts.
DEVICE size_t expert_record(const LayersArgs& p, const Route& route, bool down, int unit) {
    const ProductShape& shape = p.shape[down ? DOWN : GATED];
    const int tile = quotient(unit, shape.spans), span = unit - tile * shape.spans;
    if (down) {
        const int nth = quotient(span, p.down_spans);
        return (size_t(route.expert[nth]) * shape.tiles + tile) * p.down_spans + (span - nth * p.down_spans);
    }
    const int nth = quotient(tile, p.up_tiles);
    return (size_t(route.expert[nth]) * p.up_tiles + (tile - nth * p.up_tiles)) * shape.spans + span;
}

// Chooses by all scores, which come with `stamp`, by one warp: as `choose.cuh` does.
DEVICE void choose_route(const LayersArgs& p, Route& route, uint32_t stamp, int lane) {
    const int routed = p.experts - p.shared_expert, wanted = p.chosen - p.shared_expert;
    uint32_t keys[KEYS_OF_LANE];   // of experts 32j + lane; 0: there is none
    bool there, finite;
    uint2 shared = make_uint2(0, stamp);
    do {
        there = finite = true;
#pragma unroll
        for (int j = 0; j < KEYS_OF_LANE; j++) {
            keys[j] = 0;
            if (32 * j >= routed) continue;
            if (32 * j + lane >= routed) continue;
            const uint2 word = load_stamped_one(p.scores + 32 * j + lane);
            there = there && word.y == stamp;
            finite = finite && isfinite(__uint_as_float(word.x));
            keys[j] = ordered(__uint_as_float(word.x));
        }
        if (p.shared_expert) shared = load_stamped_one(p.scores + routed), there = there && shared.y == stamp;
    } while (!__all_sync(~0u, there));
    finite = __all_sync(~0u, finite && isfinite(__uint_as_float(shared.x)));
    float sum = 0.f, own = 0.f;   // of weights; this lane's
    int expert = routed;
    uint32_t most = 0;
    if (!p.normalized) {
        uint32_t top = 0;
#pragma unroll
        for (int j = 0; j < KEYS_OF_LANE; j++) top = max(top, keys[j]);
        top = __reduce_max_sync(~0u, top);
#pragma unroll
        for (int j = 0; j < KEYS_OF_LANE; j++)
            if (keys[j] != 0) sum += __expf(unordered(keys[j]) - unordered(top));
        sum = warp_sum(sum);
    }
#pragma unroll 1
    for (int n = 0; n < wanted; n++) {
        uint32_t best = 0;
#pragma unroll
        for (int j = 0; j < KEYS_OF_LANE; j++) best = max(best, keys[j]);
        const uint32_t top = __reduce_max_sync(~0u, best);
        int first = MOST_EXPERTS;   // of equals the lower number comes first
#pragma unroll
        for (int j = KEYS_OF_LANE - 1; j >= 0; j--)
            if (keys[j] == top) first = 32 * j + lane;
        first = __reduce_min_sync(~0u, unsigned(first));
#pragma unroll
        for (int j = 0; j < KEYS_OF_LANE; j++)
            if (32 * j + lane == first) keys[j] = 0;
        if (n == 0) most = top;
        const float weight = __expf(unordered(top) - unordered(most));
        if (p.normalized) sum += weight;
        if (lane == n) expert = first, own = weight;
    }
    own = __fdividef(own, sum);
    if (lane == wanted) own = sigmoid(__uint_as_float(shared.x));   // the shared one is behind the others
    if (lane < p.chosen) route.expert[lane] = expert, route.weight[lane] = finite ? own : __uint_as_float(0x7fc00000u);
    __syncwarp();
}

#endif
