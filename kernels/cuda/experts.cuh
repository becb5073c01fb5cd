// The experts that a row of activations goes through, of a mixture whose stack is packed as one
// weight: expert e has tiles e * tiles .. of gate and up in turns, and of down.
//
//   UP    gated[s][.] = w_s silu(gate_e n) * up_e n,   n = x / rms(x) * gain, e = e_s
//   DOWN  out[.] += sum over s of down_e gated[s]
//
// `gated` has whole spans of each expert, zero behind its values. s counts the experts that the row's scores choose, w_s are their weights (`choose.cuh`). Every block
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
#include "places.cuh"

struct ExpertsArgs {
    GemvArgs product;      // of the first row, over the records of `per_token` experts
    const float* scores;   // [rows][experts]
    int experts;
    int per_token;         // at most MOST_CHOSEN
    int part;              // UP: tiles of an expert; DOWN: spans of one
    int tiles;             // DOWN: tiles of an expert
    int width;             // values of an expert in `gated`: whole spans
    int normalized;
    int x_stride;          // values from a row to the next
    int out_stride;
    int shared;            // all rows go through the last expert
    ExpertPlaces places;
};

// As `Requests`, of the chosen experts' records.
template <class S, int EPI>
struct ExpertRequests {
    static constexpr int STAGES = S::STAGES;
    int tile, span, stage;
    const uint8_t* codes;
    const uint8_t* meta;
    const Chosen& chosen;
    int part, tiles, width;
    bool apart;          // of the experts' records: they are not one stack
    uint32_t in_codes, in_meta;

    DEVICE ExpertRequests(const GemvArgs& p, const Share& s, const Chosen& chosen, const ExpertsArgs& a)
        : tile(s.first), span(s.begin), stage(0), chosen(chosen), part(a.part), tiles(a.tiles), width(a.width), apart(a.places.at != nullptr),
          in_codes(a.places.codes[EPI != SILU]), in_meta(a.places.meta[EPI != SILU]) {
        find(p);
    }

    DEVICE void find(const GemvArgs& p) {
        if (tile >= p.tiles) return;
        const int s = (EPI == SILU ? tile : span) / part;
        const uint8_t *from = reinterpret_cast<const uint8_t*>(p.codes), *scales = p.meta;
        size_t record = 0;   // the first of the expert
        if (apart) {
            const uint8_t* const place = reinterpret_cast<const uint8_t*>(chosen.places()[s]);
            from = place + in_codes, scales = place + in_meta;
        } else {
            record = size_t(chosen.expert[s]) * part * (EPI == SILU ? p.spans : tiles);
        }
        record += EPI == SILU ? (tile - s * part) * p.spans + span : tile * part + (span - s * part);
        codes = from + record * (STAGES * S::STAGE);
        meta = scales + record * p.meta_bytes;
    }

    DEVICE bool has_meta() const { return S::SLOT == 32 || STAGES == 1 || stage == STAGES - 1; }

    DEVICE void advance(const GemvArgs& p, const Share& s) {
        const bool last = STAGES == 1 || stage == STAGES - 1;
        codes += S::STAGE;
        stage = last ? 0 : stage + 1;
        if (last) {
            if (++span == s.end) {
                span = s.begin;
                tile += s.step;
            }
            find(p);
        }
    }

    DEVICE float weight(int tile) const { return chosen.weight[tile / part]; }
    DEVICE int place(int tile) const { return tile / part * width + tile % part * 8; }
};

template <class S, int EPI, int WARPS, int AHEAD>
DEVICE void experts(const ExpertsArgs& a, Meeting<WARPS>& meeting, Chosen& chosen) {
    using Row = PreparedRow<S::BITS>;
    using Next = ExpertRequests<S, EPI>;
    extern __shared__ __align__(128) uint4 shared[];

    // UP lets nothing overtake the kernel that scores: DOWN reads the scores before UP has ended.
    if constexpr (EPI == SILU) wait_for_prerequisites();
    launch_dependents();
    static_assert(WARPS * 32 == MOST_EXPERTS);
    choose<true>(chosen, a.scores + size_t(blockIdx.y) * a.experts, a.experts, a.per_token, a.normalized, a.shared);
    if (a.places.at != nullptr) {
        if (threadIdx.x < a.per_token) {
            const int expert = chosen.expert[threadIdx.x];
            chosen.places()[threadIdx.x] = __ldcg(reinterpret_cast<const unsigned long long*>(a.places.at) + expert);
            if (EPI == SILU && blockIdx.x == 0) atomicAdd(a.places.counts + expert, 1u);
        }
        __syncthreads();
    }

    GemvArgs p = a.product;
    p.x += size_t(blockIdx.y) * a.x_stride;
    p.out += size_t(blockIdx.y) * a.out_stride;
    auto wait = [&] {
        if constexpr (EPI != SILU) wait_for_prerequisites();
    };
    if constexpr (AHEAD > 0) {
        const Share share = share_of<WARPS>(p, threadIdx.x / 32);
        RegisterStages<S, AHEAD, Next> stages(p, share, Next(p, share, chosen, a));
        multiply<S, EPI, WARPS, AHEAD>(p, share, reinterpret_cast<Row*>(shared), meeting, stages, wait);
    } else {
        constexpr int STAGE_WORDS = RingStages<S, Next>::WeightRing::STAGE_WORDS;
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        const Share share = share_of<WARPS>(p, warp);
        RingStages<S, Next> stages(p, share, Next(p, share, chosen, a), shared + warp * p.depth * STAGE_WORDS,
                                                  meeting.barriers[warp]);
        auto* const row = reinterpret_cast<Row*>(shared + WARPS * p.depth * STAGE_WORDS);
        multiply<S, EPI, WARPS, 0>(p, share, row, meeting, stages, wait);
    }
}
