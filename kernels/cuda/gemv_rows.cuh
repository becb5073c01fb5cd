// Up to 4, 8 or 16 rows of activations times a packed weight of integer codes, for one reading of the weight.
//
//   y[c][r] = factor[c] sum_k w[r][k] x[c][k]
//
// As in `gemv.cuh` the weights are the left operand, codes as they are and in integers. The right one, which
// `columns.cu` has made, lies in shared memory: all of it, or where that is much, in parts, one in each block
// of a cluster, which multiply the same tiles.
//
// The records of a block, tile by tile, are cut into ranges of equal length, one a warp. Where a tile goes on
// in the ranges of further warps, the warp that began it adds their sums, in the order of the warps; if there
// are parts, one of the blocks adds those, in the order of the parts. Weights stream through `ring.cuh`, and
// are requested before the predecessor has ended.
//
// Epilogues as in `gemv_batch.cuh`.
//
// Grid (groups of tiles x parts): as many blocks as run at once.
// Bytes: codes + scales + zeros once; x once a block, from L2.
#pragma once

#include "columns.cuh"
#include "exchange.cuh"
#include "ring.cuh"
#include "weights.cuh"

struct GemvRowsArgs {
    const uint8_t* codes;    // records [tiles][spans]
    const uint8_t* meta;     // records [tiles][spans]
    const void* columns;     // [GROUPS][spans * 4]
    const float* factors;    // [m]; null: 1
    float* out;              // [m][rows]; SILU: [m][rows / 2]
    float2* best;            // HEAD: [m][gridDim], the greatest logit and its row (as bits)
    int m;
    int rows;
    int tiles;
    int spans;
    int groups;              // scale groups of a span
    int meta_bytes;          // of a record
    int parts;               // split-k: parts of the inputs, at most `spans`; blocks of a cluster
    int part_spans;          // most spans of a part
    int depth;               // of the ring, at most MOST_DEPTH
    int epilogue;
    int scheme;              // of `with_block_scheme`
};


#if __CUDA_ARCH__ >= 900

// The sums of a tile that a lane (g, t) has: of each group of 8 rows columns 2t and 2t + 1 of outputs g and g + 8; of
// one of 4 rows column t of both.
template <class S, int ROWS, int GROUPS>
struct RowsProduct {
    static constexpr int BITS = S::BITS, SLOT = S::SLOT, SLOTS = 4 / S::STAGES, PARTS = SLOTS * 64 / SLOT, OUT = ROWS / 2;
    using Columns = DigitColumns<ROWS>;
    float y[GROUPS * OUT];
    // Of each part, or of the first: the others follow.
    static constexpr int PLACES = SLOT == 16 ? 1 : PARTS;
    uint32_t scale_at[PLACES], zero_at[PLACES];
    const int lane, g, t;

    DEVICE RowsProduct(int groups, int lane) : lane(lane), g(lane / 4), t(lane % 4) {
#pragma unroll
        for (int i = 0; i < PLACES; i++) {
            const int group = SLOT != 64 ? i : i * groups >> 2;
            scale_at[i] = keep(S::ROWS + (group * 8 + g) * S::SCALE);
            zero_at[i] = keep(S::ROWS + groups * (8 * S::SCALE) + (group * 8 + g) * S::ZERO_BYTES);
        }
        clear();
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < GROUPS * OUT; i++) y[i] = 0.f;
    }

    // Adds the products of a stage of a record and columns at `x`, those of further groups `group` bytes on. `half`:
    // which of the record's stages it is, of 8 bits.
    DEVICE void add(uint32_t codes, uint32_t meta, uint32_t x, uint32_t group, int groups, int half) {
        Unit<S> u[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t unit = codes + i * S::UNIT;
            u[i].load_shared(unit + lane * Unit<S>::LANE, unit + Unit<S>::AT + lane * (Unit<S>::WIDTH * 4));
        }
        LevelTables<S> levels;
        levels.load_shared(meta);
        GroupMeta<S> of[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            uint32_t scale = scale_at[i % PLACES], zero = zero_at[i % PLACES];
            if (SLOT == 16) scale += i * (8 * S::SCALE), zero += i / S::PER_ZERO * (8 * S::ZERO_BYTES);
            if (S::STAGES == 2 && half) {   // the second two slots of four
                const uint32_t further = SLOT == 32 ? 4 : groups >> 1;
                scale += further * (8 * S::SCALE), zero += further * (8 * S::ZERO_BYTES);
            }
            of[i].load_scale_shared(meta + scale, meta + g * 4);
            of[i].load_zero_shared(meta + zero, meta + g * 4);
        }
        constexpr uint32_t SLOT_BYTES = sizeof(Columns), SCALES = offsetof(Columns, scales), SUMS = offsetof(Columns, sums);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            uint4 b[GROUPS][ROWS / 4];
            float2 xs[GROUPS], sum[GROUPS][2];
#pragma unroll
            for (int q = 0; q < GROUPS; q++) {
                const uint32_t at = x + q * group + s * SLOT_BYTES;
#pragma unroll
                for (int d = 0; d < ROWS / 4; d++) b[q][d] = load_shared_16(at + (d * 32 + lane) * 16);
                if constexpr (ROWS == 8) {
                    xs[q] = as_float2(load_shared_8(at + SCALES + t * 8));
                    sum[q][0] = as_float2(load_shared_8(at + SUMS + t * 8));
                    if (SLOT != 64) sum[q][1] = as_float2(load_shared_8(at + SUMS + 32 + t * 8));
                } else {
                    xs[q].x = __uint_as_float(load_shared_4(at + SCALES + t * 4));
                    sum[q][0].x = __uint_as_float(load_shared_4(at + SUMS + t * 4));
                    if (SLOT != 64) sum[q][1].x = __uint_as_float(load_shared_4(at + SUMS + 16 + t * 4));
                }
                if (SLOT != 64) sum[q][0].x -= sum[q][1].x, sum[q][0].y -= sum[q][1].y;
            }
            int d[GROUPS][ROWS / 4][4] = {};
            auto combined = [](const int (&d)[ROWS / 4][4], int i) {   // high and low digits of output i
                return ROWS == 8 ? d[0][i] * 256 + d[ROWS / 4 - 1][i] : d[0][2 * i] * 256 + d[0][2 * i + 1];
            };
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int totals[GROUPS][ROWS / 4][4] = {};   // of both parts, where `S::SUMS`
                uint32_t a[4];
                if constexpr (S::ORDER == 4) {
                    chunk_operand<S>(a, u[s], levels, c);
                } else {
                    const uint4 v = u[2 * s + c].words;
                    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
                }
#pragma unroll
                for (int part = 0; part < S::PARTS; part++) {   // of the chunk, of one scale
                    const bool mine = S::PARTS == 1 || t / 2 == part;
#pragma unroll
                    for (int q = 0; q < GROUPS; q++)
#pragma unroll
                        for (int i = 0; i < ROWS / 4; i++) {
                            const uint32_t b0 = mine ? c ? b[q][i].z : b[q][i].x : 0, b1 = mine ? c ? b[q][i].w : b[q][i].y : 0;
                            multiply_operand<S>(d[q][i], a, b0, b1);
                            if (S::SUMS && part == 0)
                                multiply_halves_of_ones(totals[q][i], t, c ? b[q][i].z : b[q][i].x, c ? b[q][i].w : b[q][i].y);
                        }
                    if (SLOT == 64 && c == 0) continue;
                    const GroupMeta<S>& m = of[SLOT == 64 ? s : (2 * s + c) * S::PARTS + part];
                    const float2 scale = m.scales(), zero = m.zeros();
#pragma unroll
                    for (int q = 0; q < GROUPS; q++) {
                        const float2 of_sum = sum[q][SLOT != 64 ? c : 0];
#pragma unroll
                        for (int i = 0; i < OUT; i++) {
                            const bool second = ROWS == 8 && i % 2, upper = ROWS == 8 ? i / 2 : i;   // column, output
                            const int v = combined(d[q], i);
                            const float unit = second ? xs[q].y : xs[q].x, x = unit * OPERAND_UNIT<S>;
                            const float total = S::SUMS ? unit * float(combined(totals[q], ROWS == 8 ? 2 * part + i % 2 : part)) : second ? of_sum.y : of_sum.x;
                            const float sc = upper ? scale.y : scale.x, z = upper ? zero.y : zero.x;
                            float& to = y[q * OUT + i];
                            if (S::ZERO == OFFSET && (S::SUMS || part == 0))
                                to += fmaf(sc, float(v) * x, z * total);
                            else if (S::ZERO == OFFSET || S::CENTRED)
                                to = fmaf(sc, float(v) * x, to);
                            else
                                to = fmaf(sc, fmaf(float(v), x, -z * total), to);
                        }
                    }
                    if (SLOT != 64) {
#pragma unroll
                        for (int q = 0; q < GROUPS; q++)
#pragma unroll
                            for (int i = 0; i < ROWS / 4; i++)
#pragma unroll
                                for (int j = 0; j < 4; j++) d[q][i][j] = 0;
                    }
                }
            }
        }
    }

    static DEVICE float2 as_float2(uint2 v) { return make_float2(__uint_as_float(v.x), __uint_as_float(v.y)); }
};

// The better of two logits with their rows (as bits): of equals that of the lower row.
DEVICE float2 better(float2 a, float2 b) {
    return b.x > a.x || (b.x == a.x && __float_as_int(b.y) < __float_as_int(a.y)) ? b : a;
}

// A block's memory of fixed size, one for all schemes of an instance.
template <int ROWS, int WARPS>
struct RowsRoom {
    uint64_t barriers[WARPS][MOST_DEPTH];
    uint64_t x_there;
    float2 tops[WARPS][ROWS];
};
template <int ROWS, int WARPS>
DEVICE RowsRoom<ROWS, WARPS>& rows_room() {
    __shared__ RowsRoom<ROWS, WARPS> room;
    return room;
}

// A block of a cluster: its warps multiply a range each of the records of its tiles and its part of the inputs; the sums of a
// tile meet in the warp that began it, those of the parts in one of the blocks.
template <class S, int ROWS, int GROUPS, int WARPS>
struct GemvRows {
    static constexpr int STAGES = S::STAGES, OUT = ROWS / 2, ALL = GROUPS * OUT;
    using Product = RowsProduct<S, ROWS, GROUPS>;
    using Columns = typename Product::Columns;
    using WeightRing = Ring<S::STAGE, S::META>;
    using Sums = float[ALL];   // of a lane, of a tile
    struct WarpSums {
        float v[32][ALL];
    };

    const GemvRowsArgs& p;
    const int warp, lane, g, t;
    RowsRoom<GROUPS * ROWS, WARPS>& room;
    const int parts, part, cluster, clusters;
    const int first_span, part_spans, n;   // of this part; `n`: its stages of a tile
    const int first_tile, tiles;           // of this block
    const int range, begin, end;           // stages of a warp, from the block's first tile on
    const int begin_tile, begin_stage;
    Columns* const x;
    WarpSums* const met;   // [WARPS], then [tiles that end here][parts]
    // What to request next.
    int ahead, ahead_stage;
    const uint8_t* ahead_codes;
    size_t ahead_record;
    WeightRing ring;
    float factors[GROUPS * ROWS / 4];

    DEVICE GemvRows(const GemvRowsArgs& p, uint4* shared, RowsRoom<GROUPS * ROWS, WARPS>& room)
        : p(p), warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4), room(room), parts(p.parts),
          part(parts == 1 ? 0 : int(cluster_rank())), cluster(blockIdx.x / parts), clusters(gridDim.x / parts), first_span(part * p.spans / parts),
          part_spans((part + 1) * p.spans / parts - first_span), n(part_spans * STAGES), first_tile(cluster * p.tiles / clusters),
          tiles((cluster + 1) * p.tiles / clusters - first_tile), range((tiles * n + WARPS - 1) / WARPS), begin(min(warp * range, tiles * n)),
          end(min(begin + range, tiles * n)), begin_tile(begin / n), begin_stage(begin - begin_tile * n),
          x(reinterpret_cast<Columns*>(shared + WARPS * p.depth * WeightRing::STAGE_WORDS)),
          met(reinterpret_cast<WarpSums*>(x + GROUPS * p.part_spans * 4)), ahead(begin), ahead_stage(begin_stage),
          ahead_codes(p.codes + ((size_t(first_tile + begin_tile) * p.spans + first_span) * STAGES + begin_stage) * S::STAGE),
          ahead_record(size_t(first_tile + begin_tile) * p.spans + first_span),
          ring(shared + warp * p.depth * WeightRing::STAGE_WORDS, room.barriers[warp], p.depth) {}

    // Requests the warp's next stage of weights.
    DEVICE void request() {
        const bool any = ahead < end;
        ring.request(ahead_codes, p.meta + (ahead_record + ahead_stage / STAGES) * p.meta_bytes, p.meta_bytes, any);
        if (!any) return;
        ahead++;
        ahead_codes += S::STAGE;
        if (++ahead_stage == n) {
            ahead_stage = 0;
            ahead_codes += size_t(p.spans - part_spans) * (STAGES * S::STAGE);
            ahead_record += p.spans;
        }
    }

    // The column that factor or value i of a group of columns belongs to.
    DEVICE int column(int q, int i) const { return ROWS == 8 ? 8 * q + 2 * t + i % 2 : t; }

    // Requests the first weights, across the end of the predecessor, and after it this part of x.
    DEVICE void start() {
        if (threadIdx.x == 0) barrier_init(&room.x_there);
        launch_dependents();
#pragma unroll 1
        for (int i = 0; i < p.depth; i++) request();
        if (p.epilogue == HEAD && lane < GROUPS * ROWS) room.tops[warp][lane] = make_float2(-INFINITY, 0.f);
        cluster_arrive();
        wait_for_prerequisites();
        cluster_wait();   // all blocks of the cluster have begun, and see this block's barriers
        if (threadIdx.x == 0) {
            const Columns* const from = static_cast<const Columns*>(p.columns) + first_span * 4;
            barrier_expect(&room.x_there, GROUPS * part_spans * 4 * sizeof(Columns));
#pragma unroll
            for (int q = 0; q < GROUPS; q++)
                copy_bulk(x + q * p.part_spans * 4, from + size_t(q) * p.spans * 4, part_spans * 4 * sizeof(Columns), &room.x_there);
        }
#pragma unroll
        for (int i = 0; i < GROUPS * ROWS / 4; i++) {
            const int c = column(i / 2, i);
            factors[i] = p.factors && c < p.m ? __ldcg(p.factors + c) : 1.f;
        }
    }

    // Ends a tile of columns 8q .. 8q + 7.
    DEVICE void finish_group(int tile, int q, const Sums& y) const {
        float v[OUT];
#pragma unroll
        for (int i = 0; i < OUT; i++) v[i] = y[q * OUT + i] * factors[ROWS == 8 ? 2 * q + i % 2 : 0];
        if (p.epilogue == SILU) {
#pragma unroll
            for (int i = 0; i < OUT / 2; i++) {
                const int c = column(q, i);
                if (c < p.m && tile * 16 + g < p.rows)
                    p.out[size_t(c) * (p.rows / 2) + tile * 8 + g] = __fdividef(v[i], 1.f + __expf(-v[i])) * v[i + OUT / 2];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < OUT; i++) {
            const int c = column(q, i), row = tile * 16 + g + (ROWS == 8 ? i / 2 : i) * 8;
            const bool there = c < p.m && row < p.rows;
            float* const to = p.out + size_t(c) * p.rows + row;
            if (there) *to = p.epilogue == ADD ? v[i] + __ldcg(to) : v[i];
            if (!there) v[i] = -INFINITY;
        }
        if (p.epilogue == HEAD) keep_best(tile, q, v);
    }

    // Keeps the greatest of each column among the rows of a tile.
    DEVICE void keep_best(int tile, int q, const float (&v)[OUT]) const {
#pragma unroll
        for (int i = 0; i < OUT / 2; i++) {
            float2 best = make_float2(v[i], __int_as_float(tile * 16 + g));
            best = better(best, make_float2(v[i + OUT / 2], __int_as_float(tile * 16 + g + 8)));
#pragma unroll
            for (int m = 16; m > 2; m >>= 1)
                best = better(best, make_float2(__shfl_xor_sync(~0u, best.x, m), __shfl_xor_sync(~0u, best.y, m)));
            float2& top = room.tops[warp][column(q, i)];
            if (g == 0) top = better(top, best);
            __syncwarp();
        }
    }

    // Ends a tile.
    DEVICE void finish(int tile, const Sums& y) const {
#pragma unroll
        for (int q = 0; q < GROUPS; q++) finish_group(tile, q, y);
    }

    // Sends a lane's sums to shared memory of a block of the cluster.
    DEVICE static void send_all(uint32_t to, const Sums& y) {
#pragma unroll
        for (int q = 0; q < GROUPS; q++) {
            float v[OUT];
#pragma unroll
            for (int i = 0; i < OUT; i++) v[i] = y[q * OUT + i];
            send(to + q * sizeof v, v);
        }
    }

    // With the sums of all warps: ends a tile of this block, or sends them to the block that does.
    DEVICE void deliver(int tile, const Sums& y) const {
        if (parts == 1) return finish(first_tile + tile, y);
        send_all(map_rank(shared_address(met[WARPS + tile / parts * parts + part].v[lane]), tile % parts), y);
    }

    // Multiplies the warp's range and hands on the sums of its tiles.
    DEVICE void multiply_range() {
        Product product(p.groups, lane);
        const uint32_t x_at = keep(shared_address(x)), group = p.part_spans * uint32_t(4 * sizeof(Columns));
        int stage = begin_stage, tile = begin_tile;
        if (begin < end) barrier_wait(&room.x_there, 0);
#pragma unroll 1
        for (int i = begin; i < end; i++) {
            const uint32_t from = ring.wait_at();
            product.add(from, from + S::STAGE, x_at + stage * uint32_t(4 / STAGES * sizeof(Columns)), group, p.groups, stage % STAGES);
            __syncwarp();
            request();
            if (++stage == n) {
                if (i + 1 - begin >= n)   // begun here
                    deliver(tile, product.y);
                else
                    send_all(shared_address(met[warp].v[lane]), product.y);
                product.clear();
                stage = 0, tile++;
            }
        }
        const bool goes_on = stage > 0, begun = goes_on && end - begin >= stage;
        if (goes_on && !begun) send_all(shared_address(met[warp].v[lane]), product.y);
        __syncthreads();
        if (!begun) return;
        int rest = n - stage;
        for (int w = warp + 1; rest > 0; w++, rest -= range)
#pragma unroll
            for (int i = 0; i < ALL; i++) product.y[i] += met[w].v[lane][i];
        deliver(tile, product.y);
    }

    // Adds up the sums of the parts and ends this block's tiles.
    DEVICE void finish_parts() const {
        cluster_arrive();
        cluster_wait();
        for (int own = warp; own * parts + part < tiles; own += WARPS) {
            float y[ALL] = {};
            for (int q = 0; q < parts; q++)
#pragma unroll
                for (int i = 0; i < ALL; i++) y[i] += met[WARPS + own * parts + q].v[lane][i];
            finish(first_tile + own * parts + part, y);
        }
    }

    // Stores the greatest of each column that the block's warps have found.
    DEVICE void store_best() const {
        __syncthreads();
        if (threadIdx.x >= p.m) return;
        float2 best = room.tops[0][threadIdx.x];
        for (int i = 1; i < WARPS; i++) best = better(best, room.tops[i][threadIdx.x]);
        p.best[size_t(threadIdx.x) * gridDim.x + blockIdx.x] = best;
    }

    DEVICE void run() {
        start();
        multiply_range();
        if (parts > 1) finish_parts();
        if (p.epilogue == HEAD) store_best();
    }
};

template <class S, int ROWS, int GROUPS, int WARPS>
DEVICE void gemv_rows(const GemvRowsArgs& p) {
    extern __shared__ __align__(128) uint4 shared[];
    GemvRows<S, ROWS, GROUPS, WARPS>(p, shared, rows_room<GROUPS * ROWS, WARPS>()).run();
}
#endif
