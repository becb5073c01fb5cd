// Half a layer of a decode step of one row, by clusters of blocks: one for each key head.
//
//   ATTEND  parts[c] = o[:, heads of c] attention(qkv[heads of c] norm(x))
//   GATED   parts[c] = down[:, share of c] (silu(gate[share of c] norm(x)) * (up[share of c] norm(x)))
//
// x is the sum of what the kernel in front left: the parts of its clusters, and its own x. Each block
// of a cluster adds up its columns of x, makes digits of them (`activations.cuh`) and sends these to
// all blocks of the cluster. So go the rows of the first product that a block has, and what attention
// makes of its positions. INT4 codes, a scale for 64 inputs or more; products as in `gemv.cuh`.
//
// Parts go from kernel to kernel as words that hold a stamp beside each value. A reader waits for
// stamps, not for the end of the kernel in front; no two kernels of a step have the same, and the
// epoch tells steps apart. A block starts after all blocks of the kernel in front have started, so whoever
// waits for stamps waits for blocks that run. Two buffers are enough: a block writes its parts when it
// has read all of the kernel in front, whose blocks had read all of the one before that.
//
// Weights are requested at once, as many as a warp's ring takes, in the order of both products. The
// records of a product that a block has are dealt evenly to its warps, which leave the sums of a tile
// in shared memory; they are added in the order of the warps.
//
// Bytes: codes + scales + zeros once; keys and values once; of x and parts 8 a value and cluster.
#pragma once

#include <stddef.h>

#include "activations.cuh"
#include "rows.cuh"
#include "weights.cuh"

#ifndef STEP_SLEEP
#define STEP_SLEEP 1
#endif
#ifndef STEP_CHUNK
#define STEP_CHUNK 2
#endif

struct ClusterWeight {
    const uint8_t* codes;   // records [tiles][spans]
    const uint8_t* meta;
    int spans;
    int groups;
    int meta_bytes;
};

// Where things lie in shared memory, in bytes.
struct ClusterRoom {
    int digits;     // ClusterDigits [spans of hidden]
    int digits2;    // ClusterDigits [spans that the second product's inputs lie in]
    int values;     // float [outputs of the first product]
    int sums;       // float [tiles][warps of a tile][16], of either product
    int rings;      // [warps][depth] stages
    int queries;    // ATTEND: float [group + 2][128]: queries, the new key and value
    int sources;    // float [MOST_SOURCES][group * 128 + 8]: sums of values, greatest scores, weights
    int scratch;    // float [4][group][128], [group][32]; float4 [96]: gains of q and k, angles
};

struct ClusterArgs {
    ClusterWeight first, second;
    const float* x;          // [hidden]: of a step's first kernel, which waits for the kernel in front; or null
    const uint4* in;         // [clusters_in + 1][hidden / 2]: two values, each with a stamp; the last part is x
    uint4* out;
    const uint32_t* epoch;   // of the step
    const float* gain;       // [hidden]
    float eps;
    int hidden;              // a multiple of 256
    int index;               // of this kernel in its step, from 1 on
    int log_blocks;          // of a cluster
    int clusters;            // of this kernel: ATTEND: key heads
    int clusters_in;         // of the kernel in front
    int slots2;              // 64 inputs each, of the second product; dealt to the clusters
    int depth;               // of the rings, at most MOST_CLUSTER_DEPTH
    int sample;              // look at a word of each part before all are read, again and again
    ClusterRoom at;
    const float* q_gain;     // ATTEND: [128]
    const float* k_gain;
    const float2* cos_sin;   // [positions][64]
    Cache cache;             // of this layer, in FP16
    const Step* step;
    int heads;
};

struct CollectArgs {
    const uint4* in;   // as of `ClusterArgs`
    float* x;          // [hidden]
    uint32_t* epoch;
    int hidden;
    int index;
    int clusters_in;
};

enum ClusterKind { ATTEND = 0, GATED = 1 };

#ifdef STEP_TRACE
__device__ long long step_trace[160][128][16];
#define MARK(i) do { if (threadIdx.x == 0) { step_trace[p.index][blockIdx.x][i] = clock64(); } } while (0)
#define MARK_TIME(i) do { if (threadIdx.x == 0) { long long v; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)); step_trace[p.index][blockIdx.x][i] = v; } } while (0)
#else
#define MARK(i)
#define MARK_TIME(i)
#endif

constexpr int MOST_SOURCES = 8;         // blocks among which positions are dealt
constexpr int MOST_CLUSTER_DEPTH = 7;
constexpr int CHUNK = 32;               // positions that a block attends to at a time

// Digits of 256 inputs, and of each 64: their scale, their sum, and the sum of squares of x.
struct ClusterDigits {
    uint4 words[32];
    float4 slots[4];
};

#if __CUDA_ARCH__ >= 900

DEVICE int cluster_rank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// Where `at` of this block's shared memory is in that of the cluster's block `rank`.
DEVICE uint32_t map_rank(uint32_t at, int rank) {
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
    return r;
}
// To shared memory of a block of the cluster; counted by a barrier there.
DEVICE void send_4(uint32_t to, uint32_t v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(barrier) : "memory");
}
DEVICE void send_16(uint32_t to, float4 v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
}
DEVICE void wait_sent(uint32_t b) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(b) : "memory");
}
DEVICE void wait_copied(uint32_t b, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(b), "r"(parity) : "memory");
}
DEVICE void expect(uint32_t b, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEVICE void copy_stage(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
DEVICE uint4 load_stamped(const uint4* p) {
    uint64_t a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    return make_uint4(uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32));
}
DEVICE uint64_t stamped(float v, uint32_t stamp) { return uint64_t(stamp) << 32 | __float_as_uint(v); }

// The sum of the parts that the kernel in front left of two columns, when all are there: x, then
// those of the clusters in order.
DEVICE float2 sum_parts(const uint4* in, int clusters, int pair, int pairs, uint32_t stamp) {
    constexpr int AT_ONCE = 9;
    float2 v = make_float2(0.f, 0.f);
#pragma unroll 1
    for (int base = -1; base < clusters; base += AT_ONCE) {
        uint4 w[AT_ONCE];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int part = base + i < 0 ? clusters : base + i;
                w[i] = make_uint4(0, stamp, 0, stamp);
                if (base + i < clusters) w[i] = load_stamped(in + part * pairs + pair);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) there = there && w[i].y == stamp && w[i].w == stamp;
        } while (!there);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) v.x += __uint_as_float(w[i].x), v.y += __uint_as_float(w[i].z);
    }
    return v;
}

// Waits until the parts of column pair `pair` are there, with few reads: a lane a part.
DEVICE void await_parts(const uint4* in, int clusters, int pair, int pairs, uint32_t stamp, int lane) {
    const uint4* const from = in + min(lane, clusters) * pairs + pair;
    while (!__all_sync(~0u, load_stamped(from).y == stamp)) {
    }
}

// a / b of small numbers.
DEVICE int quotient(int a, int b) { return int(__fdividef(float(a) + 0.5f, float(b))); }

// The records of a product that a block multiplies, `spans` of each tile, dealt to its warps in order.
template <int WARPS>
struct Deal {
    int spans, records, most;   // most: warps that have records of a tile, at most
    DEVICE Deal(int tiles, int spans)
        : spans(spans), records(tiles * spans), most(records <= WARPS ? spans : quotient(WARPS, tiles) + 2) {}
    DEVICE int begin(int warp) const { return records <= WARPS ? min(warp, records) : warp * records / WARPS; }
    // The warp that has record r.
    DEVICE int owner(int r) const { return records <= WARPS ? r : quotient((r + 1) * WARPS - 1, records); }
    // Warps that have records of a tile.
    DEVICE int owners(int tile) const { return owner(tile * spans + spans - 1) - owner(tile * spans) + 1; }
};

// A warp's way through its records: up to STEP_CHUNK at a time, of one tile.
struct Walk {
    int spans, left, tile, span;
    // Where warp `warp` starts, in one word; its place among those that have records of its first tile last.
    template <int WARPS>
    static DEVICE uint32_t packed(const Deal<WARPS>& d, int warp) {
        const int begin = d.begin(warp), tile = quotient(begin, d.spans);
        return keep((d.begin(warp + 1) - begin) << 16 | tile << 10 | (begin - tile * d.spans) << 4 | (warp - d.owner(tile * d.spans)));
    }
    DEVICE void start(uint32_t packed, int of) { spans = of, left = packed >> 16, tile = packed >> 10 & 63, span = packed >> 4 & 63; }
    DEVICE int n() const { return STEP_CHUNK == 1 ? 1 : min(STEP_CHUNK, min(left, spans - span)); }
    DEVICE void step(int n) {
        left -= n, span += n;
        if (span == spans) span = 0, tile++;
    }
};

// 64 values as digits: lane l has values 2l and 2l + 1, and gets a word of the operand.
struct SlotDigits {
    uint32_t word;
    float scale, sum;

    DEVICE SlotDigits(float2 v, int lane) {
        const float most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(fabsf(v.x), fabsf(v.y)))));
        const float inverse = most > 1e-30f ? __fdividef(32512.f, most) : 0.f;
        const int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
        const uint32_t low = (a & 255) | (b & 255) << 16;
        const uint32_t high = ((a + 128) >> 8 & 255) | ((b + 128) >> 8 & 255) << 16;
        const uint32_t got = __shfl_xor_sync(~0u, lane % 2 ? high : low, 1);
        word = lane % 2 ? got | low << 8 : high | got << 8;
        scale = most * (1.f / 32512.f);
        sum = scale * float(__reduce_add_sync(~0u, a + b));
    }
    // Which of the slot's words.
    static DEVICE int index(int lane) {
        const int m = lane / 2;
        return (lane % 2 * 4 + m % 8 / 2) * 4 + m % 2 * 2 + m / 8;
    }
    // Stores them as slot `s` of a row.
    DEVICE void store(ClusterDigits* row, int s, int lane) const {
        reinterpret_cast<uint32_t*>(row[s / 4].words)[s % 4 * 32 + index(lane)] = word;
        if (lane == 0) row[s / 4].slots[s % 4] = make_float4(scale, sum, 0.f, 0.f);
    }
};

// Sums each of N values over the warp; lane l gets value l * N / 32.
template <int N>
DEVICE float sum_each(float (&v)[N], int lane) {
    int bit = 16;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, bit /= 2) {
#pragma unroll
        for (int k = 0; k < n; k++) {
            const float keep = lane & bit ? v[k + n] : v[k], give = lane & bit ? v[k] : v[k + n];
            v[k] = keep + __shfl_xor_sync(~0u, give, bit);
        }
    }
#pragma unroll
    for (; bit > 0; bit /= 2) v[0] += __shfl_xor_sync(~0u, v[0], bit);
    return v[0];
}

DEVICE float warp_max(float v) {
    const int i = __float_as_int(v), most = __reduce_max_sync(~0u, i ^ (i >> 31 & 0x7fffffff));
    return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

// A block's part in the attention of its cluster's heads: to its positions.
template <int GROUP, int WARPS>
struct Attend {
    static constexpr int KEYS = CHUNK / WARPS, EIGHTS = CHUNK / 8 / (WARPS / 4), STRIDE = GROUP * HEAD_DIM + 8;
    const ClusterArgs& p;
    const int cluster, warp, lane;
    int position, slot, sources, start, end;
    uint32_t newest_page;
    uint2 keys[KEYS];        // of positions warp + WARPS i of a chunk: dims 4 lane and on
    uint4 values[EIGHTS];    // of dim threadIdx.x % 128: positions 8 (warp / 4 + WARPS / 4 i) and on
    float4* turn;            // in shared memory: gains of q and k, angles

    DEVICE Attend(const ClusterArgs& p, uint8_t* shared, int cluster, int rank, int warp, int lane)
        : p(p), cluster(cluster), warp(warp), lane(lane) {
        position = __ldcg(&p.step->position), slot = __ldcg(&p.step->slot);
        const int length = position + 1;
        const int share = ((length + MOST_SOURCES - 1) / MOST_SOURCES + CHUNK - 1) / CHUNK * CHUNK;
        sources = quotient(length + share - 1, share);
        start = min(rank * share, length), end = min(start + share, length);
        turn = reinterpret_cast<float4*>(shared + p.at.scratch + (4 * HEAD_DIM + 32) * GROUP * 4);
        if (start < end) {
            fetch(start);
            newest_page = p.cache.page(slot, position);
            const float* from = warp == 0 ? p.q_gain : warp == 1 ? p.k_gain : reinterpret_cast<const float*>(p.cos_sin + size_t(position) * 64);
            if (warp < 3) copy_async(turn + threadIdx.x, from + lane * 4);
        }
        copy_commit();
    }

    // Requests the chunk of positions from `base` on.
    DEVICE void fetch(int base) {
        const size_t head = p.cache.head(p.cache.page(slot, base), cluster);
        const __half* k = static_cast<const __half*>(p.cache.keys) + (head * PAGE + base % PAGE + warp) * HEAD_DIM;
        const __half* v = static_cast<const __half*>(p.cache.values) + (head * HEAD_DIM + threadIdx.x % HEAD_DIM) * PAGE + base % PAGE;
#pragma unroll
        for (int i = 0; i < KEYS; i++) keys[i] = __ldcg(reinterpret_cast<const uint2*>(k + i * WARPS * HEAD_DIM) + lane);
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) values[i] = __ldcg(reinterpret_cast<const uint4*>(v) + warp / 4 + i * (WARPS / 4));
    }

    // Of `rows`, the cluster's queries, key and value, to `sources` of all blocks.
    DEVICE void run(uint8_t* shared, const float* rows, uint32_t barrier, int rank, int log_blocks) {
        float* const queries = reinterpret_cast<float*>(shared + p.at.queries);
        float* const scratch = reinterpret_cast<float*>(shared + p.at.scratch);
        float* const scores = scratch + 4 * GROUP * HEAD_DIM;
        if (start >= end) return;
        if (warp < GROUP + (position < end ? 2 : 0)) {
            float4 v = reinterpret_cast<const float4*>(rows)[warp * 32 + lane];
            if (warp <= GROUP) v = norm_rope(v, turn[warp < GROUP ? lane : 32 + lane], turn[64 + lane % 16 * 2], turn[65 + lane % 16 * 2], p.eps, lane);
            if (warp < GROUP) {
                const float s = 1.4426950408889634f * 0.08838834764831845f;   // exp2 instead of exp; 1 / sqrt(128)
                v.x *= s, v.y *= s, v.z *= s, v.w *= s;
            } else {
                const Kept kept = round_row<false>(v);
                store_row<false>(p.cache, warp - GROUP, p.cache.head(newest_page, cluster), position % PAGE, kept, lane);
                const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&kept.half.x)), b = __half22float2(*reinterpret_cast<const __half2*>(&kept.half.y));
                v = make_float4(a.x, a.y, b.x, b.y);
            }
            reinterpret_cast<float4*>(queries)[warp * 32 + lane] = v;
        }
        __syncthreads();
        float top[GROUP], weight[GROUP], out[GROUP];   // weight: this lane's
#pragma unroll
        for (int h = 0; h < GROUP; h++) top[h] = -INFINITY, weight[h] = out[h] = 0.f;
#pragma unroll 1
        for (int base = start; base < end; base += CHUNK) {
            float dots[KEYS * GROUP];
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&keys[i].x)), b = __half22float2(*reinterpret_cast<const __half2*>(&keys[i].y));
                float4 key = make_float4(a.x, a.y, b.x, b.y);
                if (base + warp + i * WARPS == position) key = reinterpret_cast<const float4*>(queries)[GROUP * 32 + lane];
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    const float4 q = reinterpret_cast<const float4*>(queries)[h * 32 + lane];
                    dots[i * GROUP + h] = q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w;
                }
            }
            const float dot = sum_each(dots, lane);
            constexpr int EACH = 32 / (KEYS * GROUP);   // lanes that have the same
            const int which = lane / EACH;
            if (lane % EACH == 0) scores[which % GROUP * CHUNK + warp + which / GROUP * WARPS] = dot;
            __syncthreads();
            uint4 now[EIGHTS];
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) now[i] = values[i];
            if (base + CHUNK < end) fetch(base + CHUNK);
            float chance[GROUP];
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                const float score = base + lane < end ? scores[h * CHUNK + lane] : -INFINITY;
                const float peak = fmaxf(top[h], warp_max(score)), shrink = exp2f(top[h] - peak);
                chance[h] = exp2f(score - peak);
                weight[h] = fmaf(weight[h], shrink, chance[h]);
                out[h] *= shrink;
                top[h] = peak;
            }
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                const int from = 8 * (warp / 4 + i * (WARPS / 4));
                const __half2* const pairs = reinterpret_cast<const __half2*>(now + i);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 v = __half22float2(pairs[j]);
                    const int at = from + 2 * j;
                    if (base + at == position) v.x = queries[(GROUP + 1) * HEAD_DIM + threadIdx.x % HEAD_DIM];
                    if (base + at + 1 == position) v.y = queries[(GROUP + 1) * HEAD_DIM + threadIdx.x % HEAD_DIM];
#pragma unroll
                    for (int h = 0; h < GROUP; h++) {
                        out[h] = fmaf(__shfl_sync(~0u, chance[h], at), v.x, out[h]);
                        out[h] = fmaf(__shfl_sync(~0u, chance[h], at + 1), v.y, out[h]);
                    }
                }
            }
            if (base + CHUNK < end) __syncthreads();   // the scores are read
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) scratch[(warp / 4 * GROUP + h) * HEAD_DIM + threadIdx.x % HEAD_DIM] = out[h];
        __syncthreads();
        const uint32_t to = shared_address(shared + p.at.sources) + rank * STRIDE * 4 - barrier;
        if (warp < GROUP) {
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < WARPS / 4; i++) {
                const float4 a = reinterpret_cast<const float4*>(scratch)[(i * GROUP + warp) * 32 + lane];
                v.x += a.x, v.y += a.y, v.z += a.z, v.w += a.w;
            }
#pragma unroll 1
            for (int b = 0; b < 1 << log_blocks; b++) {
                const uint32_t there = map_rank(barrier, b);
                send_16(there + to + (warp * 32 + lane) * 16, v, there);
            }
        } else if (warp == GROUP) {
            static_assert(GROUP <= 4);
            float tops[4] = {}, weights[4] = {};
#pragma unroll
            for (int h = 0; h < GROUP; h++) tops[h] = top[h], weights[h] = warp_sum(weight[h]);
            if (lane < 1 << log_blocks) {
                const uint32_t there = map_rank(barrier, lane);
                send_16(there + to + GROUP * HEAD_DIM * 4, make_float4(tops[0], tops[1], tops[2], tops[3]), there);
                send_16(there + to + GROUP * HEAD_DIM * 4 + 16, make_float4(weights[0], weights[1], weights[2], weights[3]), there);
            }
        }
    }

    // Two values of 64, slot s of the cluster's heads, from all sources.
    DEVICE float2 join(const uint8_t* shared, int s) const {
        const float* from = reinterpret_cast<const float*>(shared + p.at.sources);
        float top[MOST_SOURCES], peak = -INFINITY, all = 0.f;
#pragma unroll
        for (int i = 0; i < MOST_SOURCES; i++) {
            top[i] = i < sources ? from[i * STRIDE + GROUP * HEAD_DIM + s / 2] : -INFINITY;
            peak = fmaxf(peak, top[i]);
        }
        float2 v = make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < MOST_SOURCES; i++) {
            if (i >= sources) break;
            const float f = exp2f(top[i] - peak);
            const float2 a = reinterpret_cast<const float2*>(from + i * STRIDE + s * 64)[lane];
            all = fmaf(f, from[i * STRIDE + GROUP * HEAD_DIM + 4 + s / 2], all);
            v.x = fmaf(f, a.x, v.x), v.y = fmaf(f, a.y, v.y);
        }
        const float inv = __fdividef(1.f, all);
        return make_float2(v.x * inv, v.y * inv);
    }
};

struct None {
    template <class... A>
    DEVICE None(A&&...) {}
};

// GROUP: query heads of a key head; 0: GATED.
template <int GROUP, int ZERO, int WARPS>
DEVICE void cluster_half(const ClusterArgs& p) {
    constexpr int KIND = GROUP == 0 ? GATED : ATTEND, TILE = KIND == ATTEND ? 16 : 8;   // outputs of a tile of the first product
    using Weights = Scheme<4, ZERO, 64>;
    constexpr uint32_t STAGE = STEP_CHUNK * (Weights::STAGE + Weights::META);
    extern __shared__ uint4 dynamic_shared[];
    uint8_t* const shared = reinterpret_cast<uint8_t*>(dynamic_shared);
    MARK(0);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int log_blocks = p.log_blocks, blocks = 1 << log_blocks;
    const int rank = cluster_rank(), cluster = blockIdx.x >> log_blocks;
    // In the first KiB of shared memory: barriers of what is sent, the factor of the norm, zeros, barriers of the rings.
    const uint32_t hops = shared_address(shared), full = hops + 64 + warp * MOST_CLUSTER_DEPTH * 8;
    float* const factor = reinterpret_cast<float*>(shared + 32);
    const uint32_t zeros = hops + 48;
    ClusterDigits* const digits = reinterpret_cast<ClusterDigits*>(shared + p.at.digits);
    ClusterDigits* const digits2 = reinterpret_cast<ClusterDigits*>(shared + p.at.digits2);
    float* const values = reinterpret_cast<float*>(shared + p.at.values);
    float* const sums = reinterpret_cast<float*>(shared + p.at.sums);

    if (threadIdx.x < 3) barrier_init(reinterpret_cast<uint64_t*>(shared) + threadIdx.x);
    if (lane < p.depth) barrier_init(reinterpret_cast<uint64_t*>(shared + 64) + warp * MOST_CLUSTER_DEPTH + lane);
    if (threadIdx.x < 4) reinterpret_cast<uint32_t*>(shared + 48)[threadIdx.x] = 0;
    barrier_fence();
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (p.x == nullptr) release_successor();

    // This cluster's inputs of the second product; this block's tiles of both.
    const int slot0 = quotient(cluster * p.slots2, p.clusters), slots2 = quotient((cluster + 1) * p.slots2, p.clusters) - slot0;
    const int span0 = slot0 / 4, shift = slot0 % 4, spans2 = (shift + slots2 + 3) / 4;
    const int all = KIND == ATTEND ? 8 * (GROUP + 2) : 8 * slots2;   // tiles of the first product, the cluster's
    const int tile = rank * all >> log_blocks, tiles = ((rank + 1) * all >> log_blocks) - tile;
    const int all2 = p.hidden / 16, tile2 = rank * all2 >> log_blocks, tiles2 = ((rank + 1) * all2 >> log_blocks) - tile2;
    const Deal<WARPS> deal1(tiles, p.first.spans), deal2(tiles2, spans2);

    // Weights: stages of up to STEP_CHUNK records, first their codes.
    const uint32_t ring = keep(shared_address(shared + p.at.rings) + warp * p.depth * STAGE);
    int write = 0, read = 0, product = 0;   // product: that of the next request
    uint32_t parity = 0;
    const uint32_t start1 = Walk::packed(deal1, warp), start2 = Walk::packed(deal2, warp);
    Walk ahead;
    ahead.start(start1, p.first.spans);
    auto request = [&] {
        if (ahead.left == 0) {
            if (product == 1) return;
            product = 1;
            ahead.start(start2, spans2);
            if (ahead.left == 0) return;
        }
        const int n = ahead.n();
        const ClusterWeight& w = product == 0 ? p.first : p.second;
        int row = ahead.tile + (product == 0 ? tile : tile2);
        if (product == 0) {
            const int q = 8 * GROUP;
            if (KIND == GATED) row += 8 * slot0;
            else row = row < q ? cluster * q + row : (p.heads + (row - q) / 8 * p.clusters + cluster) * 8 + row % 8;
        }
        const int record = row * w.spans + ahead.span + (product == 0 ? 0 : span0);
        if (lane == 0) {
            const uint32_t to = ring + write * STAGE, barrier = full + write * 8;
            uint64_t policy;
            asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            expect(barrier, n * (2048 + w.meta_bytes));
            copy_stage(to, w.codes + size_t(record) * 2048, n * 2048, barrier, policy);
            copy_stage(to + STEP_CHUNK * 2048, w.meta + size_t(record) * w.meta_bytes, n * w.meta_bytes, barrier, policy);
        }
        write = write + 1 == p.depth ? 0 : write + 1;
        ahead.step(n);
    };
    // A stage is filled again when the next one has come, unless all fits.
    const int count = deal1.begin(warp + 1) - deal1.begin(warp) + deal2.begin(warp + 1) - deal2.begin(warp);
#pragma unroll 1
    for (int i = count > p.depth; i < p.depth; i++) request();

    if (p.x != nullptr) {
        wait_for_predecessor();
        release_successor();
    }
    const uint32_t stamp = __ldcg(p.epoch) * 256 + p.index;
    std::conditional_t<KIND == ATTEND, Attend<GROUP == 0 ? 1 : GROUP, WARPS>, None> attend(p, shared, cluster, rank, warp, lane);
    const int slots = p.hidden / 64;
    if (threadIdx.x == 0) {
        expect(hops, slots * 144);
        expect(hops + 8, all * TILE * 4);
        if constexpr (KIND == ATTEND) expect(hops + 16, attend.sources * attend.STRIDE * 4);
    }
    for (int i = threadIdx.x; i < spans2 * int(sizeof(ClusterDigits) / 16); i += WARPS * 32) reinterpret_cast<uint4*>(digits2)[i] = make_uint4(0, 0, 0, 0);
    // A thread ends one output of each product, at most.
    const int thread = threadIdx.x, rows1 = tiles * TILE, rows2 = tiles2 * 16;
    const int owners1 = thread < rows1 ? deal1.owners(thread / TILE) : 0, owners2 = thread < rows2 ? deal2.owners(thread / 16) : 0;

    MARK(1);
    // This block's columns of x, for all blocks.
    const int slot_end = (rank + 1) * slots >> log_blocks;
    bool met = false;
#pragma unroll 1
    for (int s = (rank * slots >> log_blocks) + warp; s < slot_end; s += WARPS) {
        const float2 gain = __ldg(reinterpret_cast<const float2*>(p.gain) + s * 32 + lane);
        const int pair = s * 32 + lane, pairs = p.hidden / 2;
        if (p.sample && p.x == nullptr) await_parts(p.in, p.clusters_in, s * 32, pairs, stamp - 1, lane);
        const float2 v = p.x != nullptr ? __ldcg(reinterpret_cast<const float2*>(p.x) + pair) : sum_parts(p.in, p.clusters_in, pair, pairs, stamp - 1);
        __syncwarp();
        MARK(2); MARK_TIME(14);
        if (cluster == 0) {
            uint64_t* const to = reinterpret_cast<uint64_t*>(p.out + p.clusters * pairs + pair);
            asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(stamped(v.x, stamp)), "l"(stamped(v.y, stamp)) : "memory");
        }
        const SlotDigits d(make_float2(v.x * gain.x, v.y * gain.y), lane);
        if (!met) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");   // all have begun
        met = true;
        const uint32_t word = shared_address(digits[s / 4].words) + (s % 4 * 32 + SlotDigits::index(lane)) * 4 - hops;
#pragma unroll 1
        for (int b = 0; b < blocks; b++) {
            const uint32_t there = map_rank(hops, b);
            send_4(there + word, d.word, there);
        }
        const float square = warp_sum(v.x * v.x + v.y * v.y);
        if (lane < blocks) {
            const uint32_t there = map_rank(hops, lane);
            send_16(there + shared_address(&digits[s / 4].slots[s % 4]) - hops, make_float4(d.scale, d.sum, square, 0.f), there);
        }
    }
    if (!met) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    MARK(3);
    if constexpr (KIND == ATTEND) copy_wait<0>();   // seen by all behind the block's next barrier
    // One warp looks for what is sent. The others sleep at the block's barrier: they would take turns from
    // the kernel that they wait for.
    auto await_sent = [&](uint32_t barrier) {
#if STEP_SLEEP
        if (warp == WARPS - 1) wait_sent(barrier);
        __syncthreads();
#else
        wait_sent(barrier);
#endif
    };
    await_sent(hops);
    MARK(4);
    if (warp == WARPS - 1) {   // which has the fewest records
        float square = 0.f;
        for (int s = lane; s < slots; s += 32) square += digits[s / 4].slots[s % 4].z;
        square = warp_sum(square);
        if (lane == 0) *factor = rsqrtf(square / p.hidden + p.eps);
    }

#pragma unroll 1
    for (int which = 0; which < 2; which++) {
        const ClusterDigits* const row = which == 0 ? digits : digits2;
        const uint32_t row_at = shared_address(row);
        const MetaAt<Weights> meta_at(which == 0 ? p.first.groups : p.second.groups, g, t);
        const int meta_bytes = which == 0 ? p.first.meta_bytes : p.second.meta_bytes;
        const uint32_t start = which == 0 ? start1 : start2;
        const int most = which == 0 ? deal1.most : deal2.most;
        Walk at;
        at.start(start, which == 0 ? p.first.spans : spans2);
        int place = start & 15;
        float y[2] = {};
#pragma unroll 1
        while (at.left > 0) {
            const int n = at.n(), here_tile = at.tile;
            const uint32_t from = ring + read * STAGE;
            wait_copied(full + read * 8, parity);
            if (++read == p.depth) read = 0, parity ^= 1;
            __syncwarp();
            request();   // to the stage before this one
            uint32_t here = row_at + at.span * uint32_t(sizeof(ClusterDigits));
#pragma unroll
            for (int i = 0; i < STEP_CHUNK; i++) {
                if (i >= n) break;
                uint4 codes[4];
                Meta<Weights> meta;
#pragma unroll
                for (int j = 0; j < 4; j++) codes[j] = load_shared_16(from + i * 2048 + lane * 16 + j * 512);
                meta_at.load(meta, from + STEP_CHUNK * 2048 + i * meta_bytes);
                int low[4] = {}, high[4] = {};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint4 x = load_shared_16(g / 2 == j ? here + lane * 16 : zeros);
                    constexpr uint32_t LOW = 0x0f0f0f0f, HIGH = 0xf0f0f0f0;
                    const uint4 v = codes[j];
                    mma_16832(low, v.x & LOW, v.y & LOW, v.z & LOW, v.w & LOW, x.x, x.y);
                    mma_16832(high, v.x & HIGH, v.y & HIGH, v.z & HIGH, v.w & HIGH, x.z, x.w);
                }
                const uint2 slot = load_shared_8(here + uint32_t(offsetof(ClusterDigits, slots)) + t * 16);
                const float s = __uint_as_float(slot.x), sum = __uint_as_float(slot.y);
                const float2 sc = meta.scales(0), z = meta.zeros(0);
                auto sum_of = [&](int i) { return float(low[2 * i] * 256 + low[2 * i + 1] + ((high[2 * i] * 256 + high[2 * i + 1]) >> 4)); };
                if constexpr (ZERO == OFFSET) {
                    y[0] += sc.x * (s * sum_of(0)) + z.x * sum;
                    y[1] += sc.y * (s * sum_of(1)) + z.y * sum;
                } else {
                    y[0] = fmaf(sc.x, fmaf(s, sum_of(0), -z.x * sum), y[0]);
                    y[1] = fmaf(sc.y, fmaf(s, sum_of(1), -z.y * sum), y[1]);
                }
                here += uint32_t(sizeof(ClusterDigits));
            }
            at.step(n);
            if (at.span == 0 || at.left == 0) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    y[j] += __shfl_xor_sync(~0u, y[j], 1);
                    y[j] += __shfl_xor_sync(~0u, y[j], 2);
                    if (t == 0) sums[(here_tile * most + place) * 16 + j * 8 + g] = y[j];
                    y[j] = 0.f;
                }
                place = 0;
            }
        }
        __syncthreads();
        MARK(which == 0 ? 5 : 11);
        // The sums of one output over the warps, in their order; of GATED's first product also those of 8 rows below.
        const int each = which == 0 ? TILE : 16;
        const float* const from = sums + thread / each * (most * 16) + thread % each;
        float v = 0.f, below = 0.f;
        const int owners = which == 0 ? owners1 : owners2;
#pragma unroll 1
        for (int w = 0; w < owners; w += 4) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[i] = w + i < owners ? from[(w + i) * 16] : 0.f;
                if (KIND == GATED) b[i] = w + i < owners ? from[(w + i) * 16 + 8] : 0.f;   // not used of the second product
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v += a[i];
                if (KIND == GATED) below += b[i];
            }
        }
        if (which == 1) {
            uint64_t* const to = reinterpret_cast<uint64_t*>(p.out) + size_t(cluster) * p.hidden + tile2 * 16 + thread;
            if (thread < rows2) asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(stamped(v, stamp)) : "memory");
            break;
        }
        if (thread < rows1) {
            v *= *factor;
            if (KIND == GATED) v = __fdividef(v, 1.f + __expf(-v)) * (below * *factor);
            const uint32_t to = shared_address(values + tile * TILE + thread) - (hops + 8);
#pragma unroll 1
            for (int b = 0; b < blocks; b++) {
                const uint32_t there = map_rank(hops + 8, b);
                send_4(there + to, __float_as_uint(v), there);
            }
        }
        MARK(6);
        await_sent(hops + 8);
        MARK(7);
        if constexpr (KIND == ATTEND) {
            attend.run(shared, values, hops + 16, rank, log_blocks);
            MARK(8);
            await_sent(hops + 16);
            MARK(9);
        }
#pragma unroll 1
        for (int s = warp; s < slots2; s += WARPS) {
            float2 v;
            if constexpr (KIND == ATTEND) v = attend.join(shared, s);
            else v = reinterpret_cast<const float2*>(values + s * 64)[lane];
            SlotDigits(v, lane).store(digits2, shift + s, lane);
        }
        __syncthreads();
        MARK(10);
    }
    MARK(12); MARK_TIME(15);
    if (p.x == nullptr) wait_for_predecessor();   // the end of this kernel is that of all in front of it
}

// The parts that a step's last kernel left become x; one block.
DEVICE void cluster_collect(const CollectArgs& p) {
    release_successor();
    const uint32_t stamp = __ldcg(p.epoch) * 256 + p.index - 1;
    const int pairs = p.hidden / 2;
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) reinterpret_cast<float2*>(p.x)[pair] = sum_parts(p.in, p.clusters_in, pair, pairs, stamp);
    wait_for_predecessor();
    __syncthreads();
    if (threadIdx.x == 0) *p.epoch += 1;
}
#endif
