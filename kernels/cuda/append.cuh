// A prompt's queries, keys and values before attention: biases, per-head RMSNorm and rotary embedding of queries (in
// place) and keys, then keys and values to the cache. Of a step's runs of rows it appends keys and values alone:
// `attention_decode.cuh` reads queries as they were.
//
// Grid (m / 8, heads + 2 kv_heads, of a step 2 kv_heads); a warp takes one row.
#pragma once

#include "rows.cuh"

struct AppendArgs {
    float* qkv;             // [m][HeadsOf<DIM>::width][DIM]
    const Row* rows;        // [m]; null: those of `step`
    const Step* step;       // [m], if `rows` is null
    HeadVectors vectors;
    const float2* cos_sin;  // [positions, then rows of images][HeadsOf<DIM>::ROTARY_DIMS / 2]
    Cache cache;
    int m;
    int heads;
    float eps;
    int first;              // the head that block 0 takes: those of queries come first, then keys, then values

    DEVICE Row row(int m) const { return rows != nullptr ? rows[m] : Row{step[m].position, step[m].slot, step[m].shift}; }
};

constexpr int APPEND_ROWS = 8;

// Values of rows 8i .. 8i + 7 of a page, gathered: the cache has them side by side.
template <bool INT8, int DIM>
DEVICE void store_values(const Cache& c, size_t head, int row, const Kept<DIM>& k, int warp, int lane) {
    constexpr int BYTES = INT8 ? 1 : 2, OF_DIM = APPEND_ROWS * BYTES;
    // A dim's room is left after each four: lanes then write to other banks.
    __shared__ uint4 gathered[DIM * OF_DIM / 16 * 2];
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(gathered);
    auto place = [](int dim) { return dim * OF_DIM + dim / 4 * OF_DIM; };
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        uint8_t* const to = bytes + place(i / 4 * 128 + lane * 4 + i % 4) + warp * BYTES;
        if constexpr (INT8) *to = reinterpret_cast<const uint8_t*>(k.code)[i];
        else *reinterpret_cast<__half*>(to) = reinterpret_cast<const __half*>(k.half)[i];
    }
    if (INT8 && lane == 0) c.value_scales[head * PAGE + row + warp] = k.scale;
    __syncthreads();
    const int dim = threadIdx.x;
    if (dim >= DIM) return;
    uint8_t* const to = static_cast<uint8_t*>(c.values) + ((head * DIM + dim) * PAGE + row) * BYTES;
    using Word = typename std::conditional<INT8, uint2, uint4>::type;
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(bytes + place(dim));
}

template <bool INT8, int DIM>
DEVICE void append(const AppendArgs& p) {
    using Of = HeadsOf<DIM>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int job = p.first + blockIdx.y, width = Of::width(p.heads, p.cache.kv_heads);
    const int m0 = blockIdx.x * APPEND_ROWS, m = min(m0 + warp, p.m - 1);
    const bool mine = m0 + warp < p.m;
    const Row first = p.row(m0), row = p.row(m);
    const int which = job < p.heads ? -1 : (job - p.heads) / p.cache.kv_heads;
    const int of_kind = which < 0 ? job : (job - p.heads) % p.cache.kv_heads;
    const int head = which < 0 ? Of::query(job) : Of::key(p.heads, job - p.heads);
    float* const at = p.qkv + (size_t(m) * width + head) * DIM;
    if (p.step != nullptr) launch_dependents();   // what follows in a prompt reads the cache at once
    wait_for_prerequisites();
    Head<DIM> v = Head<DIM>::load(at, lane);
    v = add_bias(v, p.vectors, which + 1, of_kind, lane);
    if (which < 1) {
        const Turn<DIM> turn(Turn<DIM>::of(p.cos_sin + size_t(row.turn()) * (Of::ROTARY_DIMS / 2), lane));
        const HeadGain<DIM> gain(p.vectors.gains[which + 1], lane);
        v = turn_head(v, gain, turn, p.eps, lane);
    }
    if (which < 0) {
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++)
            if (mine) reinterpret_cast<float4*>(at)[j * 32 + lane] = v.part[j];
        return;
    }
    const size_t kv = p.cache.head(p.cache.page(row.slot, row.position), of_kind);
    const Kept<DIM> kept = round_row<INT8>(v);
    // The same for the whole block, as are the barriers.
    const bool together = mine && first.position % APPEND_ROWS == 0 && row.slot == first.slot && row.position == first.position + warp;
    if (which == 1 && __syncthreads_and(together))
        store_values<INT8, DIM>(p.cache, kv, first.position % PAGE, kept, warp, lane);
    else if (mine)
        store_row<INT8>(p.cache, which, kv, row.position % PAGE, kept, lane);
}
