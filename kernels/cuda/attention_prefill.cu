// Attention of many new tokens of one sequence over its cache, which already holds their keys
// and values: an online softmax over tiles of 64 positions (32 of wide heads), both products on tensor cores.
//
//   out[i][h] = softmax(q[i][h] . K / sqrt(DIM)) V over positions 0 .. position0 + i
//
// Queries (normalized, rotated) and softmax weights are rounded to FP16; sums are f32. A block
// of four warps takes 64 queries of one head, a warp 16. Words of keys and values come from
// shared memory in the order that `mma_16816` wants its right operand: column n of score
// product j of a block of 32 positions is position 8 (n / 2) + 2j + n % 2, so that the scores of
// lane (g, t), positions 8t .. 8t+7, are its left operand for the second product.
//
// Grid (queries / 64, heads). Cache as in `attention_decode.cuh`.
// Bytes: 2 x 256 (int8: 2 x 130) per position, for every 64 queries of a head.
#include "rows.cuh"

struct PrefillArgs {
    const float* qkv;   // [rows][HeadsOf<DIM>::width][DIM]
    Cache cache;
    __half* out;        // [rows][padded] in operand order
    int row0;           // of the sequence's first new token
    int count;          // new tokens
    int position0;      // of the first
    int slot;
    int heads;
    int padded;
};

constexpr int QUERIES = 64;

template <bool INT8, int DIM>
struct PrefillShared {
    static constexpr int TILE_POSITIONS = 64 * 128 / DIM;
    static constexpr int WORDS = TILE_POSITIONS * DIM * (INT8 ? 1 : 2) / 16;
    uint4 keys[2][WORDS];      // [position][dims]
    uint4 values[2][WORDS];    // [dim][positions]
    __half key_scales[2][TILE_POSITIONS];
    __half value_scales[2][TILE_POSITIONS];
};

// Queries of rows g and g + 8 of the warp, as left operands: words i hold dims 32i + 8t .. + 7.
template <int DIM>
DEVICE void load_queries(uint32_t (&q)[DIM / 32][2][4], const PrefillArgs& p, const int (&mine)[2], int head, int t) {
    using Of = HeadsOf<DIM>;
    constexpr float SCALE = Of::SCALE;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = p.row0 + min(mine[r], p.count - 1);
        const float* from = p.qkv + (size_t(row) * Of::width(p.heads, p.cache.kv_heads) + Of::query(head)) * DIM + 8 * t;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            const float4 a = *reinterpret_cast<const float4*>(from + 32 * i);
            const float4 b = *reinterpret_cast<const float4*>(from + 32 * i + 4);
            q[i][0][r] = half2_bits(__float22half2_rn(make_float2(a.x * SCALE, a.y * SCALE)));
            q[i][0][r + 2] = half2_bits(__float22half2_rn(make_float2(a.z * SCALE, a.w * SCALE)));
            q[i][1][r] = half2_bits(__float22half2_rn(make_float2(b.x * SCALE, b.y * SCALE)));
            q[i][1][r + 2] = half2_bits(__float22half2_rn(make_float2(b.z * SCALE, b.w * SCALE)));
        }
    }
}

// Adds to s the products of the queries with 32 keys of a tile, its first or second `half`.
template <bool INT8, int DIM>
DEVICE void multiply_keys(float (&s)[4][4], const uint32_t (&q)[DIM / 32][2][4], const uint4* keys, int half, int g, int t) {
    constexpr int BYTES = INT8 ? 1 : 2, KEY_UNITS = DIM / 16 * BYTES;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int r = half * 32 + 8 * (g / 2) + 2 * j + g % 2;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            // 16 bytes hold 8 dims, or of codes those of two lanes.
            const int u = INT8 ? 2 * i + t / 2 : 4 * i + t;
            const int8_t* from = reinterpret_cast<const int8_t*>(&keys[r * KEY_UNITS + (u ^ (r % 2 * (2 * BYTES)))]);
            const uint4 w = load_eight<INT8>(from + (INT8 ? t % 2 * 8 : 0));
            mma_16816(s[j], q[i][0][0], q[i][0][1], q[i][0][2], q[i][0][3], w.x, w.y);
            mma_16816(s[j], q[i][1][0], q[i][1][1], q[i][1][2], q[i][1][3], w.z, w.w);
        }
    }
}

// Adds to `out` the weighted values of the same positions.
template <bool INT8, int DIM>
DEVICE void add_values(float (&out)[DIM / 8][4], const uint32_t (&weight)[2][4], const uint4* values, int half, int g, int t) {
    constexpr int VALUE_UNITS = PrefillShared<INT8, DIM>::TILE_POSITIONS * (INT8 ? 1 : 2) / 16;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        const int d = 8 * n + g, u = INT8 ? half * 2 + t / 2 : half * 4 + t;
        const int8_t* from = reinterpret_cast<const int8_t*>(&values[d * VALUE_UNITS + (u ^ (d % 2 * (VALUE_UNITS / 2)))]);
        const uint4 w = load_eight<INT8>(from + (INT8 ? t % 2 * 8 : 0));
        mma_16816(out[n], weight[0][0], weight[1][0], weight[0][1], weight[1][1], w.x, w.y);
        mma_16816(out[n], weight[0][2], weight[1][2], weight[0][3], weight[1][3], w.z, w.w);
    }
}

// Divides the warp's sums by the sums of weights, of which each lane has a part, and stores them, gated.
template <int DIM>
DEVICE void store_outputs(const PrefillArgs& p, const int (&mine)[2], int head, int t, const float (&out)[DIM / 8][4], float (&total)[2]) {
    using Of = HeadsOf<DIM>;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
        if (mine[r] >= p.count) continue;
        const float inv = 1.f / total[r];
        const int row = p.row0 + mine[r];
        const float* const gates = p.qkv + (size_t(row) * Of::width(p.heads, p.cache.kv_heads) + Of::gate(head)) * DIM + 2 * t;
        __half* const to = p.out + size_t(row) * p.padded;
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
            float2 v = make_float2(out[n][2 * r] * inv, out[n][2 * r + 1] * inv);
            if constexpr (Of::GATED) {
                const float2 gate = *reinterpret_cast<const float2*>(gates + 8 * n);
                v.x *= sigmoid(gate.x), v.y *= sigmoid(gate.y);
            }
            *reinterpret_cast<__half2*>(to + operand_index(head * DIM + 8 * n + 2 * t)) = __float22half2_rn(v);
        }
    }
}

template <bool INT8, int DIM>
DEVICE void prefill(const PrefillArgs& p) {
    using Shared = PrefillShared<INT8, DIM>;
    constexpr int TILE_POSITIONS = Shared::TILE_POSITIONS;
    constexpr int BYTES = INT8 ? 1 : 2;
    constexpr int KEY_UNITS = DIM / 16 * BYTES;                      // 16-byte words of a key
    constexpr int VALUE_UNITS = TILE_POSITIONS * BYTES / 16;  // of a dim's positions
    extern __shared__ uint4 dynamic_shared[];
    Shared& sm = *reinterpret_cast<Shared*>(dynamic_shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, kv = head / (p.heads / p.cache.kv_heads);
    const int query0 = blockIdx.x * QUERIES;
    const int last = p.position0 + min(query0 + QUERIES, p.count) - 1;   // greatest position
    const int tiles = last / TILE_POSITIONS + 1;
    static_assert(PAGE % TILE_POSITIONS == 0, "a tile lies in one page");

    // A thread's copies are of every 128th word of a tile, whose rows have the same parity: it finds them by steps.
    static_assert(Shared::WORDS % 128 == 0 && 128 / KEY_UNITS % 2 == 0 && 128 / VALUE_UNITS % 2 == 0);
    const int key_row = threadIdx.x / KEY_UNITS, dim = threadIdx.x / VALUE_UNITS;
    const int key_to = threadIdx.x ^ (key_row % 2 * (2 * BYTES)), value_to = threadIdx.x ^ (dim % 2 * (VALUE_UNITS / 2));
    const int value_from = dim * PAGE * BYTES + threadIdx.x % VALUE_UNITS * 16;

    // The page of the next tile to request, known a tile ahead.
    uint32_t page = p.cache.page(p.slot, 0);
    auto request = [&](int tile) {
        if (tile < tiles) {
            const int base = tile * TILE_POSITIONS % PAGE, b = tile % 2;   // rows of the page
            const size_t row0 = p.cache.head(page, kv) * PAGE;
            const int8_t* const keys = static_cast<const int8_t*>(p.cache.keys) + (row0 + base) * DIM * BYTES + threadIdx.x * 16;
            const int8_t* const values = static_cast<const int8_t*>(p.cache.values) + (row0 * DIM + base) * BYTES + value_from;
#pragma unroll
            for (int i = 0; i < Shared::WORDS / 128; i++) copy_async(&sm.keys[b][key_to + i * 128], keys + i * 2048);
#pragma unroll
            for (int i = 0; i < Shared::WORDS / 128; i++) copy_async(&sm.values[b][value_to + i * 128], values + i * (128 / VALUE_UNITS * PAGE * BYTES));
            if (INT8 && threadIdx.x < 2 * TILE_POSITIONS / 8) {
                const int which = threadIdx.x / (TILE_POSITIONS / 8), u = threadIdx.x % (TILE_POSITIONS / 8);
                copy_async((which ? sm.value_scales : sm.key_scales)[b] + u * 8,
                           (which ? p.cache.value_scales : p.cache.key_scales) + row0 + base + u * 8);
            }
            if (tile + 1 < tiles) page = p.cache.page(p.slot, (tile + 1) * TILE_POSITIONS);
        }
        copy_commit();
    };
    request(0);

    uint32_t q[DIM / 32][2][4];   // [i][product][a0, a1, a2, a3]
    const int mine[2] = {query0 + warp * 16 + g, query0 + warp * 16 + g + 8};
    load_queries<DIM>(q, p, mine, head, t);

    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};
    float out[DIM / 8][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<0>();
        __syncthreads();
        request(tile + 1);
        const int b = tile % 2;
#pragma unroll 1
        for (int half = 0; half < TILE_POSITIONS / 32; half++) {
            const int base = tile * TILE_POSITIONS + half * 32;
            if (base > last) break;
            float s[4][4] = {};
            multiply_keys<INT8, DIM>(s, q, sm.keys[b], half, g, t);
            // True if all of the warp's queries see all of the positions.
            const bool seen = base + 31 <= p.position0 + query0 + warp * 16;
            uint32_t weight[2][4];   // [row g, row g + 8][pairs of positions]
            float shrink[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int limit = p.position0 + mine[r];   // the last position that this query sees
                float score[8], peak = -INFINITY;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float v = s[i / 2][r * 2 + i % 2];
                    if (INT8) v *= __half2float(sm.key_scales[b][half * 32 + 8 * t + i]);
                    score[i] = v;
                }
                if (!seen) {
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        if (base + 8 * t + i > limit) score[i] = -INFINITY;
                }
#pragma unroll
                for (int i = 0; i < 8; i++) peak = fmaxf(peak, score[i]);
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
                const float raised = fmaxf(top[r], peak);
                // A query that sees nothing yet keeps weight zero.
                const float against = raised == -INFINITY ? 0.f : raised;
                shrink[r] = quick_exp2(top[r] - against);
                top[r] = raised;
                total[r] *= shrink[r];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = quick_exp2(score[2 * i] - against), y = quick_exp2(score[2 * i + 1] - against);
                    total[r] += x + y;
                    if (INT8) {
                        x *= __half2float(sm.value_scales[b][half * 32 + 8 * t + 2 * i]);
                        y *= __half2float(sm.value_scales[b][half * 32 + 8 * t + 2 * i + 1]);
                    }
                    weight[r][i] = half2_bits(__float22half2_rn(make_float2(x, y)));
                }
            }
            // The greatest scores have seldom changed.
            if (__any_sync(~0u, shrink[0] < 1.f || shrink[1] < 1.f)) {
#pragma unroll
                for (int n = 0; n < DIM / 8; n++) {
                    out[n][0] *= shrink[0], out[n][1] *= shrink[0];
                    out[n][2] *= shrink[1], out[n][3] *= shrink[1];
                }
            }
            add_values<INT8, DIM>(out, weight, sm.values[b], half, g, t);
        }
    }

    store_outputs<DIM>(p, mine, head, t, out, total);
}

#define PREFILL(name, int8, dim) \
    extern "C" __global__ __launch_bounds__(128) void name(const __grid_constant__ PrefillArgs p) { prefill<int8, dim>(p); }

PREFILL(attention_prefill_fp16, false, HEAD_DIM)
PREFILL(attention_prefill_int8, true, HEAD_DIM)
PREFILL(attention_prefill_wide_fp16, false, WIDE_HEAD_DIM)
PREFILL(attention_prefill_wide_int8, true, WIDE_HEAD_DIM)
