// Attention of a step's rows over pages that several of them begin with, of sequences that share
// them or of one sequence: each page is read once for all of a group's rows (cascade attention).
// `attention_rest` or `attention_run_rest`, behind it, reads what each row has of its own and joins the
// partial results of both.
//
// Grid (kv_heads, splits, groups). A block serves the query heads of one key/value head, of all
// rows of a group (at most 64), over its part of the pages. A warp computes for eight queries, of a
// page: their scores, the softmax weights, the sums of values, in registers. Where the queries are
// few, several warps have the same eight, and each some of a page's positions: their results meet in
// shared memory at the end. Both products run on tensor cores, with the left operand in FP16 and what
// that rounding lost, as in `attention_decode.cuh`. The next page is fetched while one is read.
//
// Bytes: of each page and key/value head 2 x 256 (int8: 2 x 130) per position.
#include "attention_decode.cuh"

// Rows that read the same pages.
constexpr int MOST_GROUP = 32;
struct RowGroup {
    int slot;    // a sequence that has the pages
    int pages;
    int count;   // of rows; none: the group is not used
    int rows[MOST_GROUP];
};

struct SharedArgs {
    const float* qkv;         // [m][(heads + 2 kv_heads) * 128]
    HeadVectors vectors;
    const float2* cos_sin;    // [positions][64]
    Cache cache;              // of this layer
    const Step* step;         // [m]
    const RowGroup* groups;   // the first has rows
    float4* partial;          // [m][heads][parts][32]: sums
    float2* tops;             // [m][heads][parts]: greatest score, weight
    int m;
    int heads;
    int parts;
    int first;                // of the parts, that this kernel fills
    float eps;
};

constexpr int SHARED_WARPS = 8;
constexpr int MOST_QUERIES = 8 * SHARED_WARPS;
constexpr int CHUNKS = PAGE / 32;   // of a page: positions that a warp takes at once

// Of a page and a head; each row's 16-byte units are permuted so that lanes meet no bank twice.
template <bool INT8>
struct PageShared {
    static constexpr int UNITS = HEAD_DIM * (INT8 ? 1 : 2) / 16;   // of a row
    uint4 keys[PAGE][UNITS];          // of a position
    uint4 values[HEAD_DIM][UNITS];    // of a dim
    uint4 scales[2][INT8 ? PAGE / 8 : 1];

    DEVICE static int key_unit(int row, int unit) { return unit ^ (row % 2 * 4); }
    DEVICE static int value_unit(int row, int unit) { return unit ^ (INT8 ? row % 4 * 2 : row % 2 * 4); }
};

template <bool INT8>
struct GroupShared {
    PageShared<INT8> pages[2];
    uint4 q[2][MOST_QUERIES][16];   // high and low parts, [query][128] FP16
};
// What warps leave for those with the same queries, where pages were.
struct SlicesShared {
    float2 out[SHARED_WARPS][HEAD_DIM / 8][32];   // dims 8n + 2t, + 1 of query g
    float2 tops[SHARED_WARPS][8];                 // greatest score, weight
};
static_assert(sizeof(SlicesShared) <= sizeof(PageShared<true>[2]));
// What the launcher asks for.
static_assert(sizeof(GroupShared<false>) == 163904 && sizeof(GroupShared<true>) == 99328);

// A block's part of the pages of a group of rows, in the order in which it runs: `request` of the first page,
// `find_queries`, `take_queries`, `add_page` for each page, and `store`.
template <bool INT8>
struct SharedAttention {
    using Page = PageShared<INT8>;
    static constexpr int THREADS = 32 * SHARED_WARPS;
    static constexpr int UNITS = Page::UNITS;
    static constexpr int EIGHTS = INT8 ? 2 : 1;   // of a unit's elements
    static constexpr int TILES = HEAD_DIM / 8;

    const SharedArgs& p;
    GroupShared<INT8>& sm;
    const RowGroup* const group = p.groups + blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int kv = blockIdx.x, heads = p.heads / p.cache.kv_heads;
    int slot, queries;
    int start, end;         // pages of this block's part
    // Eights of queries, rounded up to a power of two, and the slices of a page's positions; this warp's of both.
    int eights, slices, eight, slice;
    bool works;             // the warp has queries
    // Dims 8 EIGHTS (4i + t) and on of query g, in the order of a lane's loads of keys: high and low parts.
    uint4 hi[4], lo[4];
    float top = -INFINITY, total = 0.f;   // of query g; the lane's part of its weights
    float out[TILES][4] = {};             // dims 8n + 2t, + 1: of high and of low parts

    DEVICE SharedAttention(const SharedArgs& p, GroupShared<INT8>& sm) : p(p), sm(sm) {
        const int pages = __ldcg(&group->pages);
        slot = __ldcg(&group->slot);
        queries = min(__ldcg(&group->count) * heads, MOST_QUERIES);
        const int each = shared_each(pages, gridDim.y);
        start = blockIdx.y * each, end = min(start + each, pages);
    }

    DEVICE void request(uint32_t page, Page& to) {
        const size_t row0 = p.cache.head(page, kv) * PAGE;
        const uint4* const keys = static_cast<const uint4*>(p.cache.keys) + row0 * UNITS;
        const uint4* const values = static_cast<const uint4*>(p.cache.values) + row0 * UNITS;
#pragma unroll
        for (int i = threadIdx.x; i < PAGE * UNITS; i += THREADS)
            copy_async(&to.keys[i / UNITS][Page::key_unit(i / UNITS, i % UNITS)], keys + i);
#pragma unroll
        for (int i = threadIdx.x; i < HEAD_DIM * UNITS; i += THREADS)
            copy_async(&to.values[i / UNITS][Page::value_unit(i / UNITS, i % UNITS)], values + i);
        if (INT8 && threadIdx.x < 2 * PAGE / 8) {
            const int which = threadIdx.x / (PAGE / 8), i = threadIdx.x % (PAGE / 8);
            copy_async(&to.scales[which][i], reinterpret_cast<const uint4*>((which ? p.cache.value_scales : p.cache.key_scales) + row0) + i);
        }
        copy_commit();
    }
    DEVICE uint32_t page_at(int i) const { return i < end ? p.cache.page(slot, i * PAGE) : 0; }

    // What no kernel of this step writes of the warp's queries: where they will be, and how they turn.
    struct Queries {
        const HeadGain<> gain;
        const float4* angles[8];
        const float* from[8];
    };
    DEVICE Queries find_queries() const {
        Queries to = {HeadGain<>(p.vectors.gains[0], lane)};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int query = warp + i * SHARED_WARPS;
            if (query >= queries) break;
            const int row = min(__ldcg(group->rows + query / heads), p.m - 1), head = kv * heads + query % heads;
            const int turn = __ldcg(&p.step[row].position) + __ldcg(&p.step[row].shift);
            to.from[i] = p.qkv + (size_t(row) * (p.heads + 2 * p.cache.kv_heads) + head) * HEAD_DIM;
            to.angles[i] = Turn<>::of(p.cos_sin + size_t(turn) * (HEAD_DIM / 2), lane);
        }
        return to;
    }
    // The warp's queries, all requested together, to shared memory, and from there those of its eight.
    DEVICE void take_queries(const Queries& found) {
        Head<HEAD_DIM> v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (warp + i * SHARED_WARPS >= queries) break;
            v[i] = Head<HEAD_DIM>::load(found.from[i], lane);
        }
        // Rows of the left operand that are no query's are zero.
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int query = warp + i * SHARED_WARPS;
            if (query >= (queries + 7) / 8 * 8) break;
            uint2 high = make_uint2(0, 0), low = high;
            if (query < queries) {
                const Head<HEAD_DIM> biased = add_bias(v[i], p.vectors, 0, kv * heads + query % heads, lane);
                const float4 q = turn_head(biased, found.gain, Turn<>(found.angles[i]), p.eps, lane).part[0];
                constexpr float s = HeadsOf<HEAD_DIM>::SCALE;
                split_pair(q.x * s, q.y * s, high.x, low.x);
                split_pair(q.z * s, q.w * s, high.y, low.y);
            }
            reinterpret_cast<uint2*>(sm.q[0][query])[lane] = high;
            reinterpret_cast<uint2*>(sm.q[1][query])[lane] = low;
        }
        __syncthreads();
        eights = queries > 32 ? 8 : queries > 16 ? 4 : 2, slices = SHARED_WARPS / eights;
        eight = warp % eights, slice = warp / eights;
        works = 8 * eight < queries;
        if (!works) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int unit = EIGHTS * (4 * (i / EIGHTS) + t) + i % EIGHTS;
            hi[i] = sm.q[0][8 * eight + g][unit];
            lo[i] = sm.q[1][8 * eight + g][unit];
        }
    }

    // The weights of 32 positions of a page, high and low parts, and what scales the values; as left operands.
    struct Weights {
        uint32_t high[4], low[4];
    };
    // Column n of product j is position 32b + 8 (n / 2) + 2j + n % 2, so that lane (g, t)
    // ends with the scores of positions 32b + 8t .. + 7.
    DEVICE Weights weigh(const Page& page, int b) {
        float score[8];
        float peak = top;
        float s[4][4] = {};
#pragma unroll
        for (int c = 0; c < 4 / EIGHTS; c++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = 32 * b + 8 * (g / 2) + 2 * j + g % 2;
                const uint4 loaded = page.keys[row][Page::key_unit(row, 4 * c + t)];
#pragma unroll
                for (int h = 0; h < EIGHTS; h++) {
                    const uint4 w = eight_of<INT8>(loaded, h);
                    const uint4 a = hi[EIGHTS * c + h], z = lo[EIGHTS * c + h];
                    mma_16816(s[j], a.x, z.x, a.y, z.y, w.x, w.y);
                    mma_16816(s[j], a.z, z.z, a.w, z.w, w.z, w.w);
                }
            }
        }
        uint4 key_scales, value_scales;
        if constexpr (INT8) key_scales = page.scales[0][4 * b + t], value_scales = page.scales[1][4 * b + t];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            score[k] = s[k / 2][k % 2] + s[k / 2][k % 2 + 2];
            if constexpr (INT8) score[k] *= __half2float(reinterpret_cast<const __half*>(&key_scales)[k]);
            peak = fmaxf(peak, score[k]);
        }
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        if (__any_sync(~0u, peak > top)) {
            const float shrink = exp2f(top - peak);   // top = -inf at first: 0
            top = peak;
            total *= shrink;
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) out[n][k] *= shrink;
        }
        Weights weights;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float x = exp2f(score[2 * k] - top), y = exp2f(score[2 * k + 1] - top);
            total += x + y;
            if constexpr (INT8) {
                x *= __half2float(reinterpret_cast<const __half*>(&value_scales)[2 * k]);
                y *= __half2float(reinterpret_cast<const __half*>(&value_scales)[2 * k + 1]);
            }
            split_pair(x, y, weights.high[k], weights.low[k]);
        }
        return weights;
    }
    DEVICE void add_values(const Page& page, int b, const Weights& weights) {
        const uint32_t* const a = weights.high;
        const uint32_t* const z = weights.low;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int row = 8 * n + g, unit = 4 * b + t;   // the unit of the page's positions
            uint4 w;
            if constexpr (INT8) {
                const uint4* from = &page.values[row][Page::value_unit(row, unit / 2)];
                const uint2 codes = reinterpret_cast<const uint2*>(from)[unit % 2];
                w = bytes_to_halves(codes.x, codes.y);
            } else {
                w = page.values[row][Page::value_unit(row, unit)];
            }
            mma_16816(out[n], a[0], z[0], a[1], z[1], w.x, w.y);
            mma_16816(out[n], a[2], z[2], a[3], z[3], w.z, w.w);
        }
    }
    DEVICE void add_page(const Page& page) {
#pragma unroll 1
        for (int b = slice * CHUNKS / slices; works && b < (slice + 1) * CHUNKS / slices; b++) add_values(page, b, weigh(page, b));
    }

    // Leaves the queries' results, of the slices together, for the kernel that reads the rest.
    DEVICE void store() {
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        SlicesShared& met = *reinterpret_cast<SlicesShared*>(sm.pages);
        if (works && slices > 1) {
#pragma unroll
            for (int n = 0; n < TILES; n++) met.out[warp][n][lane] = make_float2(out[n][0] + out[n][2], out[n][1] + out[n][3]);
            if (t == 0) met.tops[warp][g] = make_float2(top, total);
        }
        __syncthreads();
        const int query = 8 * eight + g;
        const int row = query < queries ? __ldcg(group->rows + query / heads) : p.m;
        if (row >= p.m) return;   // no query, or of a row that this step does not have
        const int head = row * p.heads + kv * heads + query % heads;
        const size_t part = size_t(head) * p.parts + p.first + blockIdx.y;
        float2* const to = reinterpret_cast<float2*>(p.partial + part * (HEAD_DIM / 4));
        if (slices == 1) {
#pragma unroll
            for (int n = 0; n < TILES; n++) __stcg(to + 4 * n + t, make_float2(out[n][0] + out[n][2], out[n][1] + out[n][3]));
        } else {
            join_slices(met, to);
            if (slice > 0) return;
        }
        if (t == 0) __stcg(p.tops + part, make_float2(top, total));
    }
    // Each warp some of the dims, of all slices.
    DEVICE void join_slices(const SlicesShared& met, float2* to) {
        float weights[4] = {};
        float peak = -INFINITY;
        for (int i = 0; i < slices; i++) peak = fmaxf(peak, met.tops[i * eights + eight][g].x);
        total = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= slices) break;
            const float2 met_top = met.tops[i * eights + eight][g];
            weights[i] = exp2f(met_top.x - peak);
            total = fmaf(weights[i], met_top.y, total);
        }
        top = peak;
        for (int n = slice * TILES / slices; n < (slice + 1) * TILES / slices; n++) {
            float2 v = make_float2(0.f, 0.f);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i >= slices) break;
                const float2 part = met.out[i * eights + eight][n][lane];
                v.x = fmaf(weights[i], part.x, v.x), v.y = fmaf(weights[i], part.y, v.y);
            }
            __stcg(to + 4 * n + t, v);
        }
    }
};

template <bool INT8>
DEVICE void attention_shared(const SharedArgs& p) {
    extern __shared__ uint4 dynamic_shared[];
    launch_dependents();
    SharedAttention<INT8> block(p, *reinterpret_cast<GroupShared<INT8>*>(dynamic_shared));
    if (block.queries == 0 || block.start >= block.end) return;   // block 0 of the first group has work: the kernel ends after its prerequisites
    auto& pages = block.sm.pages;
    uint32_t next = block.page_at(block.start + 1);
    block.request(block.page_at(block.start), pages[0]);
    const auto queries = block.find_queries();

    wait_for_prerequisites();
    block.take_queries(queries);
#pragma unroll 1
    for (int i = block.start; i < block.end; i++) {
        if (i + 1 < block.end) {
            block.request(next, pages[(i - block.start + 1) % 2]);
            next = block.page_at(i + 2);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        block.add_page(pages[(i - block.start) % 2]);
        __syncthreads();   // the page is read
    }
    block.store();
}

#define SHARED(name, int8)                                                                                   \
    extern "C" __global__ __launch_bounds__(256) void name(const __grid_constant__ SharedArgs p) {           \
        attention_shared<int8>(p);                                                                           \
    }

SHARED(attention_shared_fp16, false)
SHARED(attention_shared_int8, true)
