// The experts that a row of activations goes through, of a mixture whose stack is packed as one
// weight: expert e has tiles e * tiles .. of gate and up in turns, and of down.
//
//   UP    gated[s][.] = w_s silu(gate_e n) * up_e n,   n = x / rms(x) * gain, e = e_s
//   DOWN  out[.] += sum over s of down_e gated[s]
//
// s counts the experts that the row's scores choose, w_s are their weights (`choose.cuh`). Every block
// finds them out for itself, from `scores`: that is sooner than waiting for a kernel that does.
//
// Both are the product of `gemv.cuh`, of a weight whose records lie elsewhere: UP's tiles are those
// of one chosen expert after another, DOWN's spans likewise, over the inputs of all. blockIdx.y is
// the row.
//
// Bytes: codes + scales + zeros of the chosen experts once for each row; x once per block.
#pragma once

#include "choose.cuh"
#include "gemv.cuh"

struct ExpertsArgs {
    GemvArgs product;      // of the first row, over the records of `per_token` experts
    const float* scores;   // [rows][experts]
    int experts;
    int per_token;         // at most MOST_CHOSEN
    int part;              // UP: tiles of an expert; DOWN: spans of one
    int tiles;             // DOWN: tiles of an expert
    int normalized;
    int x_stride;          // values from a row to the next
    int out_stride;
    int unused;
};

// Where the chosen experts' records lie.
template <int EPI>
struct ExpertRecords {
    static constexpr bool RUNS = EPI == ADD;
    const Chosen& chosen;
    const int part, tiles, spans;

    DEVICE ExpertRecords(const ExpertsArgs& a, const Chosen& chosen) : chosen(chosen), part(a.part), tiles(a.tiles), spans(a.product.spans) {}
    DEVICE int run() const { return RUNS ? part : spans; }
    DEVICE size_t record(int tile, int span) const {
        const int s = (RUNS ? span : tile) / part;
        if constexpr (RUNS) return (size_t(chosen.expert[s]) * tiles + tile) * part + (span - s * part);
        return (size_t(chosen.expert[s]) * part + (tile - s * part)) * spans + span;
    }
    DEVICE float weight(int tile) const { return RUNS ? 1.f : chosen.weight[tile / part]; }
};

template <class S, int EPI, int WARPS>
DEVICE void experts(const ExpertsArgs& a) {
    __shared__ __align__(16) Chosen chosen;

    // UP lets nothing overtake the kernel that scores: DOWN reads the scores before UP has ended.
    if constexpr (EPI == SILU) wait_for_predecessor();
    release_successor();
    choose(chosen, a.scores + size_t(blockIdx.y) * a.experts, a.experts, a.per_token, a.normalized);

    GemvArgs p = a.product;
    p.x += size_t(blockIdx.y) * a.x_stride;
    p.out += size_t(blockIdx.y) * a.out_stride;
    multiply<S, EPI, WARPS>(p, ExpertRecords<EPI>(a, chosen), [] {
        if constexpr (EPI != SILU) wait_for_predecessor();
    });
}
