// Half a layer of a decode step of one row, by clusters: one for each key/value head.
//
//   ATTEND  parts[c] = o[:, heads of c] . attention(qkv[heads of c] . norm(x))
//   GATED   parts[c] = down[:, c's share] . silu(gate[c's share] . norm(x)) * (up[c's share] . norm(x))
//
// x is the sum of the parts that the kernel in front left: those of its clusters, and its own x. Each
// block of a cluster adds up its columns of x, makes digits (`activations.cuh`) of them and gives
// them to all blocks of the cluster. Their rows of the first product go the same way, and what attention
// makes of its positions. Weights are requested at once, in the order of both products.
//
// Parts are handed over as words that carry a stamp beside each value: a reader waits for
// the stamps, not for the end of the kernel in front. No two kernels of a step have the same stamp.
// A block starts after all blocks of the kernel in front have started, so whoever waits for stamps
// waits for blocks that run. Two buffers suffice: whoever writes parts has read those of
// all blocks in front, which had read theirs.
#pragma once

#include "activations.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "weights.cuh"

#ifndef STEP_POLL_ALL
#define STEP_POLL_ALL 1
#endif

struct ClusterWeight {
    const uint8_t* codes;   // records [tiles][spans]
    const uint8_t* meta;
    int spans, groups, meta_bytes;
    int tiles;
};

struct ClusterArgs {
    ClusterWeight first, second;
    const float* x;          // [hidden]: of the first kernel of a step, which waits for the kernel in front; or null
    const uint4* in;         // [clusters + 1][hidden / 2] words: of two values, each with its stamp; the last part is x itself
    uint4* out;
    const uint32_t* epoch;   // of the step
    const float* gain;       // [hidden]
    float eps;
    int hidden;
    int index;               // of this kernel in its step, from 1 on
    int clusters;
    int depth;               // of the rings
    int paced;               // stages of a ring that are requested at first
    // ATTEND
    const float* q_gain;     // [128]
    const float* k_gain;
    const float2* cos_sin;   // [positions][64]
    Cache cache;
    const Step* step;
    int heads;
    int most_parts;          // blocks among which positions are dealt
};

struct CollectArgs {
    const uint4* in;     // as of `ClusterArgs`
    float* x;            // [hidden]
    uint32_t* epoch;
    int hidden;
    int index;
    int clusters;
};

#ifdef STEP_TRACE
__device__ long long step_trace[160][128][16];
#define MARK(i) do { if (threadIdx.x == 0) { step_trace[p.index][blockIdx.x][i] = clock64(); } } while (0)
#define MARK_TIME(i) do { if (threadIdx.x == 0) { long long v; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)); step_trace[p.index][blockIdx.x][i] = v; } } while (0)
#else
#define MARK(i)
#define MARK_TIME(i)
#endif

enum ClusterKind { ATTEND = 0, GATED = 1 };

constexpr int MOST_GROUP = 4;       // query heads of a cluster
constexpr int MOST_ATTEND = 8;      // blocks that have positions
constexpr int TOUCHED = 8;          // tiles of one product that a warp has records of, at most

// Digits of 256 inputs, and of each 64: their scale, their sum, and the sum of squares of x.
struct ClusterDigits {
    uint4 words[32];
    float4 slots[4];
};

struct ClusterLayout {
    int digits, digits2, values, queries, sources, sums, weights, rings, bytes;
};

template <int KIND, int ZERO, int WARPS>
__host__ __device__ inline ClusterLayout cluster_layout(int hidden, int outputs, int group, int cluster, int depth, int slots2) {
    ClusterLayout l;
    int at = 1024;   // barriers
    auto take = [&](int bytes) { int was = at; at += (bytes + 127) / 128 * 128; return was; };
    l.digits = take((hidden + 255) / 256 * int(sizeof(ClusterDigits)));
    l.digits2 = take((slots2 + 6) / 4 * int(sizeof(ClusterDigits)) + 16);
    l.values = take(outputs * 4);
    l.sums = take(WARPS * TOUCHED * 16 * 4);
    l.queries = l.sources = l.weights = at;
    if (KIND == ATTEND) {
        l.queries = take((group + 2) * 128 * 4);
        l.sources = take(MOST_ATTEND * (group * 128 + 2 * MOST_GROUP) * 4);
        l.weights = take(4 * group * 128 * 4 + 32 * group * 4 + 64);
    }
    l.rings = take(WARPS * depth * (2048 + MOST_META<4, ZERO, 64>));
    l.bytes = at;
    return l;
}

#if __CUDA_ARCH__ >= 900

DEVICE uint32_t cluster_rank() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE uint32_t cluster_blocks() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
DEVICE uint32_t map_rank(uint32_t at, int rank) {
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
    return r;
}
DEVICE void send_4(uint32_t to, uint32_t v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(barrier) : "memory");
}
DEVICE void send_16(uint32_t to, uint4 v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}
DEVICE void wait_cluster(uint64_t* b) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(b)) : "memory");
}
DEVICE uint4 load_stamped(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(*reinterpret_cast<uint64_t*>(&v.x)), "=l"(*reinterpret_cast<uint64_t*>(&v.z)) : "l"(p) : "memory");
    return v;
}
DEVICE void store_stamped(uint4* p, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(*reinterpret_cast<uint64_t*>(&v.x)), "l"(*reinterpret_cast<uint64_t*>(&v.z)) : "memory");
}
DEVICE void store_stamped_one(void* p, float v, uint32_t stamp) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(uint64_t(stamp) << 32 | __float_as_uint(v)) : "memory");
}

// The records of a product that a block multiplies: `spans` of each of `tiles` tiles, dealt to its warps in order.
struct Part {
    int tiles, spans;
    int begin, end;   // this warp's
    DEVICE void deal(int t, int s, int warp, int warps) {
        tiles = t, spans = s;
        const int n = t * s;
        begin = warp * n / warps, end = (warp + 1) * n / warps;
    }
    // Who has record r.
    DEVICE int owner(int r, int warps) const { return ((r + 1) * warps - 1) / (tiles * spans); }
};

template <int ZERO>
struct ClusterStage {
    uint4 codes[4];
    Meta<4, ZERO, 64> meta;
};

// One value's digits: two values a lane, inputs 2 lane and 2 lane + 1 of 64. The lane's word of the operand, and
// in all lanes the scale and the sum of the values.
struct SlotDigits {
    uint32_t word;
    float scale, sum;
    static DEVICE int index(int lane) {   // of the word among the slot's 32
        const int m = lane / 2;
        return (lane % 2 * 4 + m % 8 / 2) * 4 + m % 2 * 2 + m / 8;
    }
};
DEVICE SlotDigits slot_digits(float2 v, int lane) {
    const uint32_t top = __reduce_max_sync(~0u, __float_as_uint(fmaxf(fabsf(v.x), fabsf(v.y))));
    const float most = __uint_as_float(top);
    const float inverse = most > 1e-30f ? 32512.f / most : 0.f;
    const int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
    const int sum = __reduce_add_sync(~0u, a + b);
    const uint32_t low = (a & 255) | (b & 255) << 16;
    const uint32_t high = ((a + 128) >> 8 & 255) | ((b + 128) >> 8 & 255) << 16;
    const uint32_t got = __shfl_xor_sync(~0u, lane % 2 ? high : low, 1);
    SlotDigits d;
    d.word = lane % 2 ? got | low << 8 : high | got << 8;
    d.scale = most * (1.f / 32512.f);
    d.sum = d.scale * float(sum);
    return d;
}

template <int KIND, int ZERO, int WARPS>
DEVICE void cluster_half(const ClusterArgs& p) {
    constexpr int THREADS = WARPS * 32;
    constexpr int META = MOST_META<4, ZERO, 64>;
    constexpr float LOG2E = 1.4426950408889634f;
    extern __shared__ uint4 dynamic_shared[];
    uint8_t* const shared = reinterpret_cast<uint8_t*>(dynamic_shared);
    MARK(0);
    MARK_TIME(14);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = cluster_rank(), blocks = cluster_blocks(), cluster = blockIdx.x / blocks;
    const int kv_heads = p.clusters;
    const int group = KIND == ATTEND ? p.heads / kv_heads : 0;

    // What this block multiplies.
    const int tiles = KIND == ATTEND ? 8 * (group + 2) : p.first.tiles / p.clusters;   // of the cluster
    const int outputs = KIND == ATTEND ? tiles * 16 : tiles * 8;
    const int inputs2 = KIND == ATTEND ? group * 128 : outputs;         // of the second product, the cluster's
    const int slots2 = inputs2 / 64, slot0 = cluster * slots2;
    const int span0 = slot0 / 4, shift = slot0 % 4, spans2 = (shift + slots2 + 3) / 4;
    const int tile_begin = rank * tiles / blocks, tile_end = (rank + 1) * tiles / blocks;
    const int tile2_begin = rank * p.second.tiles / blocks, tile2_end = (rank + 1) * p.second.tiles / blocks;
    const ClusterLayout at = cluster_layout<KIND, ZERO, WARPS>(p.hidden, outputs, group, blocks, p.depth, slots2);
    uint64_t* const hops = reinterpret_cast<uint64_t*>(shared);
    uint64_t* const full = reinterpret_cast<uint64_t*>(shared + 64) + warp * 7;   // MOST_DEPTH 7
    ClusterDigits* const digits = reinterpret_cast<ClusterDigits*>(shared + at.digits);
    ClusterDigits* const digits2 = reinterpret_cast<ClusterDigits*>(shared + at.digits2);
    float* const values = reinterpret_cast<float*>(shared + at.values);
    float* const sums = reinterpret_cast<float*>(shared + at.sums);
    uint4* const zeros = reinterpret_cast<uint4*>(shared + 1008);

    Part first, second;
    first.deal(tile_end - tile_begin, p.first.spans, warp, WARPS);
    second.deal(tile2_end - tile2_begin, spans2, warp, WARPS);

    const int slots = p.hidden / 64;
    const int slot_begin = rank * slots / blocks, slot_end = (rank + 1) * slots / blocks;

    if (threadIdx.x < 3) barrier_init(hops + threadIdx.x);
    if (threadIdx.x == 0) *zeros = make_uint4(0, 0, 0, 0);
    barrier_fence();
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (p.x == nullptr) release_successor();

    // Weights.
    using WeightRing = Ring<META, 1>;
    WeightRing ring(reinterpret_cast<uint4*>(shared + at.rings) + warp * p.depth * WeightRing::STAGE_WORDS, full, p.depth);
    const int count1 = first.end - first.begin, total = count1 + second.end - second.begin;
    int next = 0;
    auto request = [&]() {
        if (next < total) {
            const bool is_first = next < count1;
            const int r = is_first ? first.begin + next : second.begin + next - count1;
            const int each = is_first ? first.spans : second.spans;
            const int local = r / each, span = r - local * each;
            const ClusterWeight& w = is_first ? p.first : p.second;
            int tile;
            if (is_first) {
                tile = tile_begin + local;
                if (KIND == ATTEND) {
                    const int q = 8 * group;
                    tile = tile < q ? cluster * q + tile
                                    : (p.heads + (tile - q) / 8 * kv_heads + cluster) * 8 + (tile - q) % 8;
                } else {
                    tile += cluster * tiles;
                }
            } else {
                tile = tile2_begin + local;
            }
            const size_t record = size_t(tile) * w.spans + (is_first ? span : span0 + span);
            ring.request(w.codes + record * 2048, w.meta + record * w.meta_bytes, w.meta_bytes, true);
            next++;
        }
    };
    const int fill = total <= p.depth ? total : p.depth - 1;
#pragma unroll 1
    for (int i = 0; i < fill; i++) request();

    const uint32_t stamp = p.x == nullptr ? __ldcg(p.epoch) * 256 + p.index : 0;

    // Positions of this block, and what it needs of them.
    int position = 0, length = 0, share = 0, sources = 0, start = 0, end = 0;
    uint2 key_ahead[2];
    uint4 value_ahead;
    constexpr int QUARTERS = THREADS / 128;      // threads of a dim
    uint32_t newest_page = 0;
    if (p.x != nullptr) {
        wait_for_predecessor();
        release_successor();
    }
    const uint32_t now = p.x == nullptr ? stamp : __ldcg(p.epoch) * 256 + p.index;
    if (KIND == ATTEND) {
        position = __ldcg(&p.step->position);
        const int slot = __ldcg(&p.step->slot);
        length = position + 1;
        share = ((length + p.most_parts - 1) / p.most_parts + 31) / 32 * 32;
        sources = (length + share - 1) / share;
        start = min(rank * share, length), end = min(start + share, length);
        if (start < end) {
            const uint32_t page = p.cache.page(slot, start);
            const __half* keys = static_cast<const __half*>(p.cache.keys) + (p.cache.head(page, cluster) * PAGE + start % PAGE) * HEAD_DIM;
            const __half* vals = static_cast<const __half*>(p.cache.values) + p.cache.head(page, cluster) * PAGE * HEAD_DIM + start % PAGE;
#pragma unroll
            for (int i = 0; i < 2; i++) key_ahead[i] = __ldcg(reinterpret_cast<const uint2*>(keys + (warp + i * WARPS) % 32 * HEAD_DIM) + lane);
            value_ahead = __ldcg(reinterpret_cast<const uint4*>(vals + threadIdx.x % 128 * PAGE) + threadIdx.x / 128);
            newest_page = p.cache.page(slot, position);
        }
    }
    if (threadIdx.x == 0) {
        barrier_expect(hops, slots * 144);
        barrier_expect(hops + 1, outputs * 4);
        if (KIND == ATTEND) barrier_expect(hops + 2, sources * (group * 128 + 2 * MOST_GROUP) * 4);
    }
    for (int i = threadIdx.x; i < spans2 * int(sizeof(ClusterDigits) / 16); i += THREADS) reinterpret_cast<uint4*>(digits2)[i] = make_uint4(0, 0, 0, 0);

    MARK(1);
    // This block's columns of x, for all blocks.
    bool met = false;
#pragma unroll 1
    for (int s = slot_begin + warp; s < slot_end; s += WARPS) {
        const float2 gain = __ldg(reinterpret_cast<const float2*>(p.gain + s * 64) + lane);
        float2 v;
        const int pair = s * 32 + lane, pairs = p.hidden / 2;
        if (p.x != nullptr) {
            v = __ldcg(reinterpret_cast<const float2*>(p.x) + pair);
        } else {
            const uint32_t want = now - 1;
            constexpr int PARTS = 9;
            uint4 w[PARTS];
            bool there;
#if !STEP_POLL_ALL
            do {
                w[7] = load_stamped(p.in + 7 * pairs + pair);
            } while (!__all_sync(~0u, w[7].y == want && w[7].w == want));
#endif
            do {
                there = true;
#pragma unroll
                for (int i = 0; i < PARTS; i++) w[i] = load_stamped(p.in + i * pairs + pair);
#pragma unroll
                for (int i = 0; i < PARTS; i++) there = there && w[i].y == want && w[i].w == want;
            } while (!__all_sync(~0u, there));
            v = make_float2(__uint_as_float(w[8].x), __uint_as_float(w[8].z));
#pragma unroll
            for (int i = 0; i < 8; i++) v.x += __uint_as_float(w[i].x), v.y += __uint_as_float(w[i].z);
        }
        if (s == slot_begin) MARK(2);
        if (cluster == 0)
            store_stamped(p.out + p.clusters * pairs + pair, make_uint4(__float_as_uint(v.x), now, __float_as_uint(v.y), now));
        const float square = warp_sum(v.x * v.x + v.y * v.y);
        const SlotDigits d = slot_digits(make_float2(v.x * gain.x, v.y * gain.y), lane);
        if (!met) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");   // all have begun
        met = true;
        const uint32_t word = shared_address(digits[s / 4].words) + (s % 4 * 32 + SlotDigits::index(lane)) * 4;
        const uint32_t barrier = shared_address(hops);
#pragma unroll 4
        for (int b = 0; b < blocks; b++) send_4(map_rank(word, b), d.word, map_rank(barrier, b));
        if (lane < blocks)
            send_16(map_rank(shared_address(&digits[s / 4].slots[s % 4]), lane),
                    make_uint4(__float_as_uint(d.scale), __float_as_uint(d.sum), __float_as_uint(square), 0), map_rank(barrier, lane));
    }
    if (!met) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");

    // Where a lane finds its operands in a span.
    auto multiply = [&](const Part& part, const ClusterWeight& w, const ClusterDigits* row) {
        float y[2] = {};
        const MetaAt<4, ZERO, 64> meta_at(w.groups, g, t);
        const uint32_t row_at = shared_address(row), zero_at = shared_address(zeros);
        int tile = part.begin / part.spans, span = part.begin - tile * part.spans, touched = 0;
#pragma unroll 1
        for (int r = part.begin; r < part.end; r++) {
            const uint32_t from = ring.wait_at();
            __syncwarp();
            if (total > p.depth) request();
            ClusterStage<ZERO> stage;
#pragma unroll
            for (int j = 0; j < 4; j++) stage.codes[j] = load_shared_16(from + lane * 16 + j * 512);
            meta_at.load(stage.meta, from + 2048);
            const uint32_t here = row_at + span * uint32_t(sizeof(ClusterDigits));
            int low[4] = {}, high[4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 x = load_shared_16(g / 2 == j ? here + lane * 16 : zero_at);
                constexpr uint32_t LOW = 0x0f0f0f0f, HIGH = 0xf0f0f0f0;
                const uint4 v = stage.codes[j];
                mma_16832(low, v.x & LOW, v.y & LOW, v.z & LOW, v.w & LOW, x.x, x.y);
                mma_16832(high, v.x & HIGH, v.y & HIGH, v.z & HIGH, v.w & HIGH, x.z, x.w);
            }
            const uint2 slot = load_shared_8(here + uint32_t(offsetof(ClusterDigits, slots)) + t * 16);
            const float s = __uint_as_float(slot.x), sum = __uint_as_float(slot.y);
            const float2 sc = stage.meta.scales(0), z = stage.meta.zeros(0);
            auto row_sum = [&](int i) { return float(low[2 * i] * 256 + low[2 * i + 1] + ((high[2 * i] * 256 + high[2 * i + 1]) >> 4)); };
            if constexpr (ZERO == OFFSET) {
                y[0] += sc.x * (s * row_sum(0)) + z.x * sum;
                y[1] += sc.y * (s * row_sum(1)) + z.y * sum;
            } else {
                y[0] = fmaf(sc.x, fmaf(s, row_sum(0), -z.x * sum), y[0]);
                y[1] = fmaf(sc.y, fmaf(s, row_sum(1), -z.y * sum), y[1]);
            }
            if (++span == part.spans || r + 1 == part.end) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    y[j] += __shfl_xor_sync(~0u, y[j], 1);
                    y[j] += __shfl_xor_sync(~0u, y[j], 2);
                    if (t == 0) sums[(warp * TOUCHED + touched) * 16 + j * 8 + g] = y[j];
                    y[j] = 0.f;
                }
                touched++, span = 0;
            }
        }
        __syncthreads();
    };
    // Row `row` of local tile `tile`, after `multiply`: in the order of the warps.
    auto total_of = [&](const Part& part, int tile, int row) {
        const int from = part.owner(tile * part.spans, WARPS), to = part.owner(tile * part.spans + part.spans - 1, WARPS);
        const int n = part.tiles * part.spans;
        float v = 0.f;
        for (int w = from; w <= to; w++) {
            const int begin = w * n / WARPS, end = (w + 1) * n / WARPS;
            if (begin < end) v += sums[(w * TOUCHED + tile - begin / part.spans) * 16 + row];
        }
        return v;
    };

    MARK(3);
    wait_cluster(hops);
    MARK(4);
    multiply(first, p.first, digits);
    MARK(5);
    {
        // 1 / rms, in all warps that end rows.
        const int rows = (tile_end - tile_begin) * (KIND == ATTEND ? 16 : 8);
        const uint32_t barrier = shared_address(hops + 1);
#pragma unroll 1
        for (int base = warp * 32; base < rows; base += THREADS) {
            float square = 0.f;
            for (int s = lane; s < slots; s += 32) square += digits[s / 4].slots[s % 4].z;
            const float factor = rsqrtf(warp_sum(square) / p.hidden + p.eps);
            const int i = base + lane;
            if (i < rows) {
                float v;
                uint32_t to;
                if (KIND == ATTEND) {
                    v = total_of(first, i / 16, i % 16) * factor;
                    to = shared_address(values + tile_begin * 16 + i);
                } else {
                    const float gate = total_of(first, i / 8, i % 8) * factor, up = total_of(first, i / 8, i % 8 + 8) * factor;
                    v = __fdividef(gate, 1.f + __expf(-gate)) * up;
                    to = shared_address(values + tile_begin * 8 + i);
                }
#pragma unroll 4
                for (int b = 0; b < blocks; b++) send_4(map_rank(to, b), __float_as_uint(v), map_rank(barrier, b));
            }
        }
    }
    MARK(6);
    wait_cluster(hops + 1);
    MARK(7);

    if (KIND == ATTEND) {
        float* const queries = reinterpret_cast<float*>(shared + at.queries);
        float* const from = reinterpret_cast<float*>(shared + at.sources);
        float* const quarters = reinterpret_cast<float*>(shared + at.weights);        // [QUARTERS][group][128]
        float* const chances = quarters + 4 * group * 128;                            // [group][32]
        const int stride = group * 128 + 2 * MOST_GROUP;
        if (start < end) {
            const bool newest = position >= start && position < end;
            if (warp < group + 2 && (warp < group || newest)) {
                float4 v = reinterpret_cast<const float4*>(values)[warp * 32 + lane];
                if (warp <= group) {
                    const float4* angles = reinterpret_cast<const float4*>(p.cos_sin + size_t(position) * 64) + (lane % 16) * 2;
                    const float4 gain = __ldg(reinterpret_cast<const float4*>(warp < group ? p.q_gain : p.k_gain) + lane);
                    v = norm_rope(v, gain, __ldg(angles), __ldg(angles + 1), p.eps, lane);
                }
                if (warp < group) {
                    const float s = LOG2E * 0.08838834764831845f;
                    v.x *= s, v.y *= s, v.z *= s, v.w *= s;
                } else {
                    const Kept kept = round_row<false>(v);
                    store_row<false>(p.cache, warp - group, p.cache.head(newest_page, cluster), position % PAGE, kept, lane);
                    const float2 a = __half22float2(reinterpret_cast<const __half2*>(&kept.half)[0]), b = __half22float2(reinterpret_cast<const __half2*>(&kept.half)[1]);
                    v = make_float4(a.x, a.y, b.x, b.y);
                }
                reinterpret_cast<float4*>(queries)[warp * 32 + lane] = v;
            }
            __syncthreads();
            float top[MOST_GROUP], weight[MOST_GROUP], acc[MOST_GROUP];
#pragma unroll
            for (int h = 0; h < MOST_GROUP; h++) top[h] = -INFINITY, weight[h] = 0.f, acc[h] = 0.f;
#pragma unroll 1
            for (int base = start; base < end; base += 32) {
                const uint32_t page = base == start ? 0 : p.cache.page(__ldcg(&p.step->slot), base);
                // Scores: a warp a position.
#pragma unroll
                for (int i = 0; i < 32 / WARPS; i++) {
                    const int j = warp + i * WARPS;
                    if (base + j >= end) continue;
                    uint2 k;
                    if (base == start && i < 2)
                        k = key_ahead[i];
                    else {
                        const uint32_t pg = p.cache.page(__ldcg(&p.step->slot), base);
                        k = __ldcg(reinterpret_cast<const uint2*>(static_cast<const __half*>(p.cache.keys) + (p.cache.head(pg, cluster) * PAGE + base % PAGE + j) * HEAD_DIM) + lane);
                    }
                    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&k.x)), b = __half22float2(*reinterpret_cast<const __half2*>(&k.y));
                    float4 key = make_float4(a.x, a.y, b.x, b.y);
                    if (base + j == position) key = reinterpret_cast<const float4*>(queries)[group * 32 + lane];
                    float dot[MOST_GROUP];
#pragma unroll
                    for (int h = 0; h < MOST_GROUP; h++) {
                        if (h >= group) break;
                        const float4 q = reinterpret_cast<const float4*>(queries)[h * 32 + lane];
                        dot[h] = q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w;
                    }
#pragma unroll
                    for (int m = 16; m > 0; m >>= 1)
#pragma unroll
                        for (int h = 0; h < MOST_GROUP; h++) {
                            if (h >= group) break;
                            dot[h] += __shfl_xor_sync(~0u, dot[h], m);
                        }
#pragma unroll
                    for (int h = 0; h < MOST_GROUP; h++)
                        if (h < group && lane == h) chances[h * 32 + j] = dot[h];
                }
                __syncthreads();
                // Softmax: each warp all by itself.
                const int quarter = threadIdx.x / 128, dim = threadIdx.x % 128;
                float chance[MOST_GROUP];
#pragma unroll
                for (int h = 0; h < MOST_GROUP; h++) {
                    if (h >= group) break;
                    const float score = base + lane < end ? chances[h * 32 + lane] : -INFINITY;
                    float peak = score;
#pragma unroll
                    for (int m = 16; m > 0; m >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, m));
                    peak = fmaxf(peak, top[h]);
                    const float shrink = exp2f(top[h] - peak);
                    chance[h] = exp2f(score - peak);
                    weight[h] = weight[h] * shrink + warp_sum(chance[h]);
                    acc[h] *= shrink;
                    top[h] = peak;
                }
#pragma unroll
                for (int q = 0; q < 4 / QUARTERS; q++) {
                    const int eight = quarter + q * QUARTERS;   // of the 32 positions
                    if (base + eight * 8 >= end) break;
                    uint4 loaded;
                    if (base == start && q == 0)
                        loaded = value_ahead;
                    else {
                        const uint32_t pg = p.cache.page(__ldcg(&p.step->slot), base);
                        loaded = __ldcg(reinterpret_cast<const uint4*>(static_cast<const __half*>(p.cache.values) + (p.cache.head(pg, cluster) * HEAD_DIM + dim) * PAGE + base % PAGE) + eight);
                    }
                    const __half2* pairs = reinterpret_cast<const __half2*>(&loaded);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float2 v = __half22float2(pairs[i]);
                        const int pos = base + eight * 8 + 2 * i;
                        if (pos == position) v.x = queries[(group + 1) * 128 + dim];
                        if (pos + 1 == position) v.y = queries[(group + 1) * 128 + dim];
#pragma unroll
                        for (int h = 0; h < MOST_GROUP; h++) {
                            if (h >= group) break;
                            acc[h] = fmaf(__shfl_sync(~0u, chance[h], eight * 8 + 2 * i), v.x, acc[h]);
                            acc[h] = fmaf(__shfl_sync(~0u, chance[h], eight * 8 + 2 * i + 1), v.y, acc[h]);
                        }
                    }
                }
                if (base + 32 < end) __syncthreads();
            }
#pragma unroll
            for (int h = 0; h < MOST_GROUP; h++)
                if (h < group) quarters[(threadIdx.x / 128 * group + h) * 128 + threadIdx.x % 128] = acc[h];
            __syncthreads();
            const uint32_t barrier = shared_address(hops + 2);
            const uint32_t to = shared_address(from + rank * stride);
            if (warp < group) {
                float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int q = 0; q < QUARTERS; q++) {
                    const float4 a = reinterpret_cast<const float4*>(quarters)[(q * group + warp) * 32 + lane];
                    v.x += a.x, v.y += a.y, v.z += a.z, v.w += a.w;
                }
                const uint4 bits = make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
#pragma unroll 4
                for (int b = 0; b < blocks; b++) send_16(map_rank(to + (warp * 32 + lane) * 16, b), bits, map_rank(barrier, b));
            } else if (warp == group && lane < blocks) {
                static_assert(MOST_GROUP == 4);
                auto bits = [](const float (&f)[4]) { return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])); };
                send_16(map_rank(to + group * 512, lane), bits(top), map_rank(barrier, lane));
                send_16(map_rank(to + group * 512 + 16, lane), bits(weight), map_rank(barrier, lane));
            }
        }
        MARK(8);
        wait_cluster(hops + 2);
        MARK(9);
        for (int s = warp; s < slots2; s += WARPS) {
            const int h = s / 2;
            float peak = -INFINITY, all = 0.f;
            for (int i = 0; i < sources; i++) peak = fmaxf(peak, from[i * stride + group * 128 + h]);
            float2 v = make_float2(0.f, 0.f);
            for (int i = 0; i < sources; i++) {
                const float f = exp2f(from[i * stride + group * 128 + h] - peak);
                const float2 a = reinterpret_cast<const float2*>(from + i * stride + s * 64)[lane];
                all = fmaf(f, from[i * stride + group * 128 + MOST_GROUP + h], all);
                v.x = fmaf(f, a.x, v.x), v.y = fmaf(f, a.y, v.y);
            }
            const float inv = 1.f / all;
            const SlotDigits d = slot_digits(make_float2(v.x * inv, v.y * inv), lane);
            const int to = s + shift;
            reinterpret_cast<uint32_t*>(digits2[to / 4].words)[to % 4 * 32 + SlotDigits::index(lane)] = d.word;
            if (lane == 0) digits2[to / 4].slots[to % 4] = make_float4(d.scale, d.sum, 0.f, 0.f);
        }
    } else {
        for (int s = warp; s < slots2; s += WARPS) {
            const SlotDigits d = slot_digits(reinterpret_cast<const float2*>(values + s * 64)[lane], lane);
            const int to = s + shift;
            reinterpret_cast<uint32_t*>(digits2[to / 4].words)[to % 4 * 32 + SlotDigits::index(lane)] = d.word;
            if (lane == 0) digits2[to / 4].slots[to % 4] = make_float4(d.scale, d.sum, 0.f, 0.f);
        }
    }
    __syncthreads();
    MARK(10);
    multiply(second, p.second, digits2);
    MARK(11);
    const int rows = (tile2_end - tile2_begin) * 16;
    uint64_t* const out = reinterpret_cast<uint64_t*>(p.out) + size_t(cluster) * p.hidden + tile2_begin * 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows; i += THREADS) store_stamped_one(out + i, total_of(second, i / 16, i % 16), now);
    MARK(12);
    MARK_TIME(15);
    if (p.x == nullptr) wait_for_predecessor();   // the end of this kernel is that of all in front
}

// The last parts of a step become x; one block.
DEVICE void cluster_collect(const CollectArgs& p) {
    release_successor();
    const uint32_t want = __ldcg(p.epoch) * 256 + p.index - 1;
    const int pairs = p.hidden / 2;
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        uint4 w[9];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < 9; i++) w[i] = load_stamped(p.in + i * pairs + pair);
#pragma unroll
            for (int i = 0; i < 9; i++) there = there && w[i].y == want && w[i].w == want;
        } while (!there);
        float2 v = make_float2(__uint_as_float(w[8].x), __uint_as_float(w[8].z));
#pragma unroll
        for (int i = 0; i < 8; i++) v.x += __uint_as_float(w[i].x), v.y += __uint_as_float(w[i].z);
        reinterpret_cast<float2*>(p.x)[pair] = v;
    }
    wait_for_predecessor();
    __syncthreads();
    if (threadIdx.x == 0) *p.epoch += 1;
}
#endif
