// Attention of the new tokens of a step: per-head RMSNorm of q and k, rotary embedding, append to
// the cache, softmax over the positions so far, split over blocks.
//
//   out[h] = softmax(rope(norm(q[h])) . K[h / G] / sqrt(128)) V[h / G],  G = heads / kv_heads <= 8
//
// Keys and values lie in pages (`Cache`): a pass of a block covers one page.
//
// Grid (kv_heads, splits of the longest context, rows). A row is one token. With ROWS > 1 rows that
// follow one another may be a run: consecutive positions of one sequence, up to ROWS of them. What
// the rows of a run append, the cache has only after the kernel: a block computes the new keys and
// values up to its own row itself, and stores those of its own row.
//
// A block serves the G query heads of
// one key/value head over its split of the positions, 128 at a time: warp w computes the scores of
// 32 of them, then, once the weights of all are in shared memory, dims 32w .. 32w+31 of the output
// over all of them. Of int8 there is room for two passes: one is fetched while the other is read.
// Both products run on tensor cores: scores[head, position] with q as the left operand,
// out[head, dim] with the softmax weights. Rows 0..7 of the left operand hold a head's values
// rounded to FP16 and rows 8..15 what that rounding lost, so q and the weights keep about 22
// bits. Keys and values of earlier positions are requested before the predecessor, which
// computes the new token's q, k and v, has ended. Where positions are split the last block of
// a head (counted in `arrived`) joins the partial results, in the order of the splits: a warp
// weighs the parts of a query head, then each thread sums four dims of one, over all parts.
// With SHARED, pages in front are left to `attention_shared.cu`, which ran before: its partial
// results are joined too.
//
// Bytes: 2 x 256 (int8: 2 x 130) per position and key/value head.
#pragma once

#include "columns.cuh"
#include "rows.cuh"

struct AttentionArgs {
    const float* qkv;       // [m][(heads + 2 kv_heads) * 128]
    HeadVectors vectors;
    const float2* cos_sin;  // [positions][64]
    Cache cache;            // of this layer
    const Step* step;       // [m]: position of the new token, and its slot
    float* out;             // [m][heads * 128]
    __half* half;           // unless null, instead: [m][padded] in FP16, in operand order
    uint8_t* columns;       // unless null, instead: DigitColumns [m / column_rows, rounded up][heads * 2]
    float4* partial;        // [m][heads][parts][32]: sums
    float2* tops;           // [m][heads][parts]: greatest score, weight
    int* arrived;           // [m][kv_heads], zero between launches
    const int* shared;      // [m], with SHARED: pages in front that `attention_shared` reads
    int parts;              // this kernel's, then those of `attention_shared`
    int shared_splits;      // of the latter, at most
    int heads;
    int padded;
    int column_rows;        // of a group of columns: 8 or 4
    int nibbles;            // columns meet codes in the order of those of 4 bits
    float eps;
    int late;               // release the successor only after the predecessor's end
};

constexpr int ATTENTION_WARPS = 4;
constexpr int WARP_POSITIONS = 32;
// Positions that one pass of a block covers.
constexpr int BLOCK_POSITIONS = ATTENTION_WARPS * WARP_POSITIONS;
static_assert(BLOCK_POSITIONS == PAGE, "a pass covers a page");
// Positions beyond which a context is split, as joining the parts costs more than some passes; and of a
// part, at least.
constexpr int LEAST_SPLIT = 256;
constexpr int LEAST_PART = PAGE;
// Parts of a context, at most.
constexpr int MOST_SPLITS = 64;
// Rows of one sequence, at most.
constexpr int MOST_RUN = 16;
// Pages that each of `splits` parts of `pages` has, the last of them fewer.
DEVICE int shared_each(int pages, int splits) { return (pages + splits - 1) / splits; }

// 8-dim tiles of a warp's part of the output.
constexpr int DIM_TILES = HEAD_DIM / 8 / ATTENTION_WARPS;

template <bool INT8>
struct ScalesShared {};
template <>
struct ScalesShared<true> {
    uint4 scales[2][ATTENTION_WARPS][2][4];   // of each buffer, of a warp's keys and values
};

template <int ROWS>
struct JobsShared {
    float4 jobs[8 + 2 * ROWS][32];   // queries, new keys and values, as they come
};
template <>
struct JobsShared<1> {};

template <bool INT8, int ROWS>
struct AttentionShared : ScalesShared<INT8>, JobsShared<ROWS> {
    static constexpr int BUFFERS = INT8 ? 2 : 1;
    // Private to lanes: of each 8 positions of a warp, and of each 8 of its dims.
    uint4 keys[BUFFERS][ATTENTION_WARPS][4][INT8 ? 2 : 4][32];
    uint4 values[BUFFERS][ATTENTION_WARPS][INT8 ? 2 : 4][DIM_TILES][32];
    uint4 weights[ATTENTION_WARPS][2][32];              // left operands: high and low parts
    uint4 q[2][8][16];                                  // high and low parts, [head][128] FP16
    uint4 fresh[2][ROWS][INT8 ? 8 : 16];                // new keys and values: codes or FP16
    __half fresh_scale[2][ROWS];
    float top[ATTENTION_WARPS][8];
    float sum[ATTENTION_WARPS][8];
    float share[8][MOST_SPLITS];                        // of the parts in a head's result
    bool last;
};
// What the launcher asks for.
static_assert(sizeof(AttentionShared<false, 1>) == 76560 && sizeof(AttentionShared<true, 1>) == 77328);
static_assert(sizeof(AttentionShared<false, MOST_RUN>) == 84304 + 20480 && sizeof(AttentionShared<true, MOST_RUN>) == 81232 + 20480);

template <bool INT8, int ROWS, bool SHARED>
DEVICE void attention_decode(const AttentionArgs& p) {
    constexpr float LOG2E = 1.4426950408889634f;
    constexpr int BYTES = INT8 ? 1 : 2;
    constexpr int EACH = 16 / BYTES;               // elements that a lane loads at once
    constexpr int EIGHTS = EACH / 8;
    constexpr int LOADS = HEAD_DIM / (4 * EACH);   // of four lanes for a vector
    constexpr int BUFFERS = AttentionShared<INT8, ROWS>::BUFFERS;
    extern __shared__ uint4 dynamic_shared[];
    AttentionShared<INT8, ROWS>& sm = *reinterpret_cast<AttentionShared<INT8, ROWS>*>(dynamic_shared);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int kv = blockIdx.x, heads = p.heads / p.cache.kv_heads;
    const int sequence = blockIdx.z;

    if (!p.late) release_successor();
    const int position = __ldcg(&p.step[sequence].position);
    const int slot = __ldcg(&p.step[sequence].slot);
    const int shared = SHARED ? min(__ldcg(p.shared + sequence), position / PAGE) : 0;
    const int length = position + 1 - shared * PAGE;   // what this kernel reads
    const int most = length <= LEAST_SPLIT ? 1 : min((length + LEAST_PART - 1) / LEAST_PART, int(gridDim.y));
    const int share = ((length + most - 1) / most + PAGE - 1) / PAGE * PAGE;
    const int splits = (length + share - 1) / share;
    if (blockIdx.y >= splits) return;   // block 0 of the head has work: the kernel ends after its predecessor
    const int start = shared * PAGE + blockIdx.y * share;
    const int end = min(start + share, position + 1);
    // Rows of the run in front of this one; of their positions and this one those from `fresh_from`
    // on lie in this block's split.
    int before = 0;
    if constexpr (ROWS > 1) {
        bool same = false;
        if (lane < ROWS - 1 && lane < sequence) {
            const Step* const at = p.step + sequence - 1 - lane;
            same = __ldcg(&at->slot) == slot && __ldcg(&at->position) == position - 1 - lane;
        }
        before = __ffs(~__ballot_sync(~0u, same)) - 1;
    }
    const int fresh_from = max(start, position - before), fresh_rows = max(end - fresh_from, 0);

    // Keys of this warp's 32 positions: column n of product j is position
    // base + 32 warp + 8 (n / 2) + 2j + n % 2, so that lane (g, t) ends with the scores of
    // positions 8t .. 8t+7. Load i holds dims EACH (4i + t) and on.
    // Values: dims 32 warp + 8n + g, positions base + EACH (4c + t) and on.
    auto request = [&](int base, uint32_t page, int buffer) {
        const size_t row0 = p.cache.head(page, kv) * PAGE;
        if (base + 32 * warp < end) {
            const int8_t* from = static_cast<const int8_t*>(p.cache.keys) + (row0 + 32 * warp + 8 * (g / 2) + g % 2) * HEAD_DIM * BYTES + t * 16;
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) copy_async(&sm.keys[buffer][warp][j][i][lane], from + i * 64);
                from += 2 * 128 * BYTES;
            }
            if constexpr (INT8) {
                const __half* scales = lane < 4 ? p.cache.key_scales : p.cache.value_scales;
                if (lane < 8) copy_async(&sm.scales[buffer][warp][lane / 4][t], scales + row0 + 32 * warp + 8 * t);
            }
        }
        copy_commit();
        const int there = (end - base + 31) / 32 * 32;   // positions that the cache has
        const int8_t* from = static_cast<const int8_t*>(p.cache.values) + (row0 * HEAD_DIM + (8 * DIM_TILES * warp + g) * PAGE) * BYTES + t * 16;
#pragma unroll 1
        for (int c = 0; c < LOADS && EACH * 4 * c < there; c++) {
            if (EACH * (4 * c + t) < there) {
#pragma unroll
                for (int n = 0; n < DIM_TILES; n++)
                    copy_async(&sm.values[buffer][warp][c][n][lane], from + 8 * n * PAGE * BYTES);
            }
            from += 64;
        }
        copy_commit();
    };
    const uint32_t newest_page = p.cache.page(slot, position);
    request(start, p.cache.page(slot, start), 0);
    // What else no kernel of this step writes.
    const float4* angles = reinterpret_cast<const float4*>(p.cos_sin + size_t(position) * 64) + (lane % 16) * 2;
    const float4 c0 = __ldg(angles), c1 = __ldg(angles + 1);
    const HeadGain q_gain(p.vectors.gains[0], lane), k_gain(p.vectors.gains[1], lane);

    wait_for_predecessor();
    if (p.late) release_successor();
    const float* const qkv = p.qkv + size_t(sequence) * (p.heads + 2 * p.cache.kv_heads) * HEAD_DIM;
    const int head0 = sequence * p.heads + kv * heads;   // of all sequences' query heads

    // Jobs 0 .. heads - 1: queries; then the new key and the new value of each row of the run. Those
    // of many rows are requested together, and wait in shared memory: the code for each once
    // stays short, as every step reads it anew.
    constexpr int ROUNDS = (8 + 2 * ROWS + ATTENTION_WARPS - 1) / ATTENTION_WARPS;
    const int jobs = heads + 2 * fresh_rows;
    float4 fresh[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int job = warp + i * ATTENTION_WARPS, which = (job - heads) % 2;
        if (job >= jobs) break;
        const int head = job < heads ? kv * heads + job : p.heads + which * p.cache.kv_heads + kv;
        // Rows in front of this one lie in front of it in `qkv`.
        const int back = job < heads ? 0 : position - fresh_from - (job - heads) / 2;
        fresh[i] = __ldcg(reinterpret_cast<const float4*>(qkv + (head - back * (p.heads + 2 * p.cache.kv_heads)) * HEAD_DIM) + lane);
    }
    auto keep_job = [&](int job, float4 v) {
        if (job < heads) {
            v = add_bias(v, p.vectors, 0, kv * heads + job, lane);
            v = turn_head(v, q_gain, c0, c1, p.eps, lane);
            const float s = LOG2E * 0.08838834764831845f;   // exp2 instead of exp; 1 / sqrt(128)
            uint2 hi, lo;
            split_pair(v.x * s, v.y * s, hi.x, lo.x);
            split_pair(v.z * s, v.w * s, hi.y, lo.y);
            reinterpret_cast<uint2*>(sm.q[0][job])[lane] = hi;
            reinterpret_cast<uint2*>(sm.q[1][job])[lane] = lo;
            return;
        }
        const int which = (job - heads) % 2, r = (job - heads) / 2, pos = fresh_from + r;
        v = add_bias(v, p.vectors, 1 + which, kv, lane);
        if (which == 0) {
            const float4* const turn = angles - (position - pos) * 32;
            v = ROWS == 1 ? turn_head(v, k_gain, c0, c1, p.eps, lane)
                          : turn_head(v, k_gain, __ldg(turn), __ldg(turn + 1), p.eps, lane);
        }
        const Kept kept = round_row<INT8>(v);
        if constexpr (INT8) {
            reinterpret_cast<char4*>(sm.fresh[which][r])[lane] = kept.code;
            if (lane == 0) sm.fresh_scale[which][r] = kept.scale;
        } else {
            reinterpret_cast<uint2*>(sm.fresh[which][r])[lane] = kept.half;
        }
        if (pos == position) store_row<INT8>(p.cache, which, p.cache.head(newest_page, kv), position % PAGE, kept, lane);
    };
    if constexpr (ROWS == 1) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const int job = warp + i * ATTENTION_WARPS;
            if (job >= jobs) break;
            keep_job(job, fresh[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            if (warp + i * ATTENTION_WARPS < jobs) sm.jobs[warp + i * ATTENTION_WARPS][lane] = fresh[i];
#pragma unroll 1
        for (int job = warp; job < jobs; job += ATTENTION_WARPS) keep_job(job, sm.jobs[job][lane]);   // the lane's own
    }
    __syncthreads();

    float top = -INFINITY, total = 0.f;    // of head g, over all warps
    float out[DIM_TILES][4] = {};          // dims 32 warp + 8n + 2t, + 1: of high and of low parts
    int buffer = 0;

#pragma unroll 1
    for (int base = start; base < end; base += BLOCK_POSITIONS) {
        const int mine = base + 32 * warp;          // this warp's positions
        // New rows among this pass's positions.
        const int new_from = max(fresh_from, base), new_end = min(end, base + BLOCK_POSITIONS);
        float score[8];
        float value_scale[8];
        float peak = -INFINITY;
        const uint32_t next_page = base + BLOCK_POSITIONS < end ? p.cache.page(slot, base + BLOCK_POSITIONS) : 0;
        if constexpr (BUFFERS == 2) {
            if (base + BLOCK_POSITIONS < end) {
                request(base + BLOCK_POSITIONS, next_page, buffer ^ 1);
            } else {
                copy_commit();
                copy_commit();
            }
        }
        copy_wait<2 * BUFFERS - 1>();
        if (INT8) __syncwarp();   // scales are other lanes' copies
        if (mine < end) {
            // The new keys are not yet readable from the cache.
#pragma unroll 1
            for (int pos = max(new_from, mine); pos < min(new_end, mine + WARP_POSITIONS); pos++) {
                const int at = pos - mine;
                if (at / 8 == g / 2 && at % 2 == g % 2) {
#pragma unroll
                    for (int i = 0; i < LOADS; i++)
                        sm.keys[buffer][warp][at % 8 / 2][i][lane] = sm.fresh[0][pos - fresh_from][4 * i + t];
                }
            }
            float s[4][4] = {};
#pragma unroll 1
            for (int i = 0; i < LOADS; i++) {
                uint4 hi[EIGHTS], lo[EIGHTS];
#pragma unroll
                for (int h = 0; h < EIGHTS; h++) {
                    hi[h] = sm.q[0][g][EIGHTS * (4 * i + t) + h];
                    lo[h] = sm.q[1][g][EIGHTS * (4 * i + t) + h];
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint4 loaded = sm.keys[buffer][warp][j][i][lane];
#pragma unroll
                    for (int h = 0; h < EIGHTS; h++) {
                        const uint4 w = eight_of<INT8>(loaded, h);
                        mma_16816(s[j], hi[h].x, lo[h].x, hi[h].y, lo[h].y, w.x, w.y);
                        mma_16816(s[j], hi[h].z, lo[h].z, hi[h].w, lo[h].w, w.z, w.w);
                    }
                }
            }
            uint4 key_scales, value_scales;   // of positions 8t .. 8t+7
            if constexpr (INT8) {
                key_scales = sm.scales[buffer][warp][0][t];
                value_scales = sm.scales[buffer][warp][1][t];
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float v = s[i / 2][i % 2] + s[i / 2][i % 2 + 2];
                const int pos = mine + 8 * t + i;
                if constexpr (INT8) {
                    const bool fresh = pos >= fresh_from && pos < end;
                    const int r = fresh ? pos - fresh_from : 0;
                    v *= __half2float(fresh ? sm.fresh_scale[0][r] : reinterpret_cast<const __half*>(&key_scales)[i]);
                    value_scale[i] = __half2float(fresh ? sm.fresh_scale[1][r] : reinterpret_cast<const __half*>(&value_scales)[i]);
                }
                score[i] = pos < end ? v : -INFINITY;
                peak = fmaxf(peak, score[i]);
            }
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        }
        if (t == 0) sm.top[warp][g] = peak;
        __syncthreads();
        peak = top;
#pragma unroll
        for (int w = 0; w < ATTENTION_WARPS; w++) peak = fmaxf(peak, sm.top[w][g]);
        const float shrink = exp2f(top - peak);   // top = -inf at first: 0
        top = peak;
        float sum = 0.f;
        if (mine < end) {
            uint32_t hi[4], lo[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float a = exp2f(score[2 * i] - top), b = exp2f(score[2 * i + 1] - top);
                sum += a + b;
                if constexpr (INT8) a *= value_scale[2 * i], b *= value_scale[2 * i + 1];
                split_pair(a, b, hi[i], lo[i]);
            }
            sm.weights[warp][0][lane] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
            sm.weights[warp][1][lane] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        } else if (EIGHTS > 1) {
            // A load of values may reach into these positions.
            sm.weights[warp][0][lane] = sm.weights[warp][1][lane] = make_uint4(0, 0, 0, 0);
        }
        if (t == 0) sm.sum[warp][g] = sum;
        copy_wait<2 * BUFFERS - 2>();
#pragma unroll 1
        for (int pos = new_from; pos < new_end; pos++) {
            const int newest_at = pos - base;
            if (newest_at % (4 * EACH) / EACH != t) continue;
#pragma unroll
            for (int n = 0; n < DIM_TILES; n++) {
                uint4* const to = &sm.values[buffer][warp][newest_at / (4 * EACH)][n][lane];
                const int at = newest_at % EACH, dim = 8 * (DIM_TILES * warp + n) + g;
                const uint4* const from = sm.fresh[1][pos - fresh_from];
                if constexpr (INT8)
                    reinterpret_cast<int8_t*>(to)[at] = reinterpret_cast<const int8_t*>(from)[dim];
                else
                    reinterpret_cast<__half*>(to)[at] = reinterpret_cast<const __half*>(from)[dim];
            }
        }
        __syncthreads();
        total *= shrink;
#pragma unroll
        for (int w = 0; w < ATTENTION_WARPS; w++) total += sm.sum[w][g];
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) out[n][i] *= shrink;
#pragma unroll 2
        for (int c = 0; c < LOADS && EACH * 4 * c < end - base; c++) {
            uint4 hi[EIGHTS], lo[EIGHTS];
#pragma unroll
            for (int h = 0; h < EIGHTS; h++) {
                const int eight = EIGHTS * (4 * c + t) + h;   // of the block's positions
                hi[h] = sm.weights[eight / 4][0][4 * g + eight % 4];
                lo[h] = sm.weights[eight / 4][1][4 * g + eight % 4];
            }
#pragma unroll
            for (int n = 0; n < DIM_TILES; n++) {
                const uint4 loaded = sm.values[buffer][warp][c][n][lane];
#pragma unroll
                for (int h = 0; h < EIGHTS; h++) {
                    const uint4 w = eight_of<INT8>(loaded, h);
                    mma_16816(out[n], hi[h].x, lo[h].x, hi[h].y, lo[h].y, w.x, w.y);
                    mma_16816(out[n], hi[h].z, lo[h].z, hi[h].w, lo[h].w, w.z, w.w);
                }
            }
        }
        if (base + BLOCK_POSITIONS < end) {
            if constexpr (BUFFERS == 1) request(base + BLOCK_POSITIONS, next_page, 0);
            __syncthreads();   // the weights are read
        }
        buffer ^= BUFFERS - 1;
    }

    float* const to = p.out + size_t(head0) * HEAD_DIM;
    __half* const half = p.half + size_t(sequence) * p.padded;
    // Two outputs, the first of which is `dim`, of all this block's heads.
    auto store_half = [&](int dim, float x, float y) {
        *reinterpret_cast<__half2*>(half + operand_index(kv * heads * HEAD_DIM + dim)) =
            __float22half2_rn(make_float2(clamp_half(x), clamp_half(y)));
    };
    // All outputs of a head, four a lane, by a warp.
    auto store_columns = [&](int head, float4 v) {
        const int rows = p.column_rows, slot = (sequence / rows * p.heads + kv * heads + head) * 2;
        put_four(p.columns + size_t(slot) * (rows == 8 ? sizeof(DigitColumns<8>) : sizeof(DigitColumns<4>)), rows, sequence % rows, p.nibbles, v, lane);
    };
    const int joined = shared == 0 ? splits : splits + (shared - 1) / shared_each(shared, p.shared_splits) + 1;
    if (joined == 1) {
        const float inv = 1.f / total;
        float* const outputs = reinterpret_cast<float*>(sm.keys);   // [heads][128], for columns: keys have been read
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++) {
            const int dim = g * HEAD_DIM + 8 * (DIM_TILES * warp + n) + 2 * t;
            const float2 v = make_float2((out[n][0] + out[n][2]) * inv, (out[n][1] + out[n][3]) * inv);
            if (g < heads && p.half != nullptr)
                store_half(dim, v.x, v.y);
            else if (g < heads)
                *reinterpret_cast<float2*>((p.columns != nullptr ? outputs : to) + dim) = v;
        }
        if (p.columns == nullptr) return;
        __syncthreads();
        for (int head = warp; head < heads; head += ATTENTION_WARPS) store_columns(head, reinterpret_cast<const float4*>(outputs)[head * 32 + lane]);
        return;
    }
    const float4* const parts = p.partial + size_t(head0) * p.parts * (HEAD_DIM / 4);
    // Where the j-th part to be joined lies.
    auto part_at = [&](int j) { return SHARED && j >= splits ? int(gridDim.y) + j - splits : j; };
    if (g < heads) {
        float2* part = reinterpret_cast<float2*>(p.partial + (size_t(head0 + g) * p.parts + blockIdx.y) * (HEAD_DIM / 4));
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++)
            __stcg(part + 4 * (DIM_TILES * warp + n) + t, make_float2(out[n][0] + out[n][2], out[n][1] + out[n][3]));
        if (warp == 0 && t == 0) __stcg(p.tops + size_t(head0 + g) * p.parts + blockIdx.y, make_float2(top, total));
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* arrived = p.arrived + sequence * p.cache.kv_heads + kv;
        sm.last = atomicAdd(arrived, 1) == splits - 1;
        if (sm.last) *arrived = 0;
    }
    __syncthreads();
    if (!sm.last) return;
    __threadfence();
    for (int head = warp; head < heads; head += ATTENTION_WARPS) {
        constexpr int EACH = MOST_SPLITS / 32;
        float2 part[EACH];
        float peak = -INFINITY, sum = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int j = 32 * i + lane;
            part[i] = j < joined ? __ldcg(p.tops + size_t(head0 + head) * p.parts + part_at(j)) : make_float2(-INFINITY, 0.f);
            peak = fmaxf(peak, part[i].x);
        }
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, m));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            part[i].x = exp2f(part[i].x - peak);
            sum = fmaf(part[i].x, part[i].y, sum);
        }
        const float inv = 1.f / warp_sum(sum);
#pragma unroll
        for (int i = 0; i < EACH; i++) sm.share[head][32 * i + lane] = part[i].x * inv;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * (HEAD_DIM / 4); i += ATTENTION_WARPS * 32) {
        const int head = i / (HEAD_DIM / 4);
        const float4* from = parts + size_t(head) * p.parts * (HEAD_DIM / 4) + i % (HEAD_DIM / 4);
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 16
        for (int j = 0; j < joined; j++) {
            const float4 part = __ldcg(from + part_at(j) * (HEAD_DIM / 4));
            const float f = sm.share[head][j];
            v.x = fmaf(f, part.x, v.x), v.y = fmaf(f, part.y, v.y);
            v.z = fmaf(f, part.z, v.z), v.w = fmaf(f, part.w, v.w);
        }
        if (p.half != nullptr) {
            store_half(4 * i, v.x, v.y);
            store_half(4 * i + 2, v.z, v.w);
        } else if (p.columns != nullptr) {
            store_columns(head, v);
        } else {
            reinterpret_cast<float4*>(to)[i] = v;
        }
    }
}
