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

// The experts that the row goes through, and their weights.
struct Route {
    int expert[MOST_ROUTE];
    float weight[MOST_ROUTE];
    unsigned long long place[MOST_ROUTE];   // where each is read, if they are not one stack
};

// A record of the experts that the row goes through: of which of them, and which of its own.
struct ExpertRecord {
    int nth;
    uint32_t within;
};

// Record `unit` of a block's share of gate and up, or of down.
DEVICE ExpertRecord expert_record(const LayersArgs& p, bool down, int unit) {
    const ProductShape& shape = p.shape[down ? DOWN : GATED];
    const int tile = quotient(unit, shape.spans), span = unit - tile * shape.spans;
    if (down) {
        const int nth = quotient(span, p.down_spans);
        return {nth, uint32_t(tile) * p.down_spans + (span - nth * p.down_spans)};
    }
    const int nth = quotient(tile, p.up_tiles);
    return {nth, uint32_t(tile - nth * p.up_tiles) * shape.spans + span};
}

// Records that an expert has of gate and up, or of down.
DEVICE uint32_t records_of_expert(const LayersArgs& p, bool down) {
    return down ? p.shape[DOWN].tiles * p.down_spans : p.up_tiles * p.shape[GATED].spans;
}

// Chooses by all scores, which come with `stamp`, by one warp: as `choose.cuh` does. There are at most 32 KEYS experts
// to choose from. Block 0 counts what is chosen.
template <int KEYS>
DEVICE void choose_route(const LayersArgs& p, const ExpertPlaces& places, Route& route, uint32_t stamp, int lane) {
    const int routed = p.experts - p.shared_expert, wanted = p.chosen - p.shared_expert;
    uint32_t keys[KEYS];   // of experts 32j + lane; 0: there is none
    uint2 words[KEYS], shared;
    bool there, finite = true;
    do {
        // All at once: no load waits for another.
#pragma unroll
        for (int j = 0; j < KEYS; j++) words[j] = load_stamped_one(p.scores + min(32 * j + lane, routed - 1));
        shared = load_stamped_one(p.scores + p.experts - 1);
        there = shared.y == stamp;
#pragma unroll
        for (int j = 0; j < KEYS; j++) there = there && words[j].y == stamp;
    } while (!__all_sync(~0u, there));
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const float score = __uint_as_float(words[j].x);
        keys[j] = 32 * j + lane < routed ? ordered(score) : 0;
        finite = finite && isfinite(score);
    }
    finite = __all_sync(~0u, finite && isfinite(__uint_as_float(shared.x)));
    // The lane's greatest key, and the first expert that has it.
    uint32_t best;
    int first;
    auto find = [&] {
        best = 0, first = MOST_EXPERTS;
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            if (keys[j] > best) best = keys[j], first = 32 * j + lane;
        }
    };
    find();
    float sum = 0.f, own = 0.f;   // of weights; this lane's
    int expert = routed;
    uint32_t most = __reduce_max_sync(~0u, best);
    if (!p.normalized) {
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            if (keys[j] != 0) sum += __expf(unordered(keys[j]) - unordered(most));
        sum = warp_sum(sum);
    }
#pragma unroll 1
    for (int n = 0; n < wanted; n++) {
        const uint32_t top = __reduce_max_sync(~0u, best);
        const int chosen = __reduce_min_sync(~0u, best == top ? unsigned(first) : MOST_EXPERTS);   // of equals the lower number
        if (first == chosen) {
#pragma unroll
            for (int j = 0; j < KEYS; j++)
                if (32 * j + lane == chosen) keys[j] = 0;
            find();
        }
        if (lane == n) expert = chosen, own = unordered(top) - unordered(most);
    }
    if (lane < wanted) own = __expf(own);
    if (p.normalized) sum = warp_sum(own);
    own = __fdividef(own, sum);
    if (lane == wanted) own = sigmoid(__uint_as_float(shared.x));   // the shared one is behind the others
    if (lane < p.chosen) route.expert[lane] = expert, route.weight[lane] = finite ? own : __uint_as_float(0x7fc00000u);
    if (places.at != nullptr && lane < p.chosen) {
        const int known = min(expert, p.experts - 1);
        route.place[lane] = __ldcg(reinterpret_cast<const unsigned long long*>(places.at) + known);
        if (blockIdx.x == 0) atomicAdd(places.counts + known, 1u);
    }
    __syncwarp();
}
