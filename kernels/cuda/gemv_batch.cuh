// Up to 16 rows of activations times a packed weight, for one reading of the weight: the products
// of a decode step of several sequences.
//
//   y[c][r] = factor[c] sum_k w[r][k] x[c][k]
//
// As in `gemv.cuh` the weights are the left operand, codes as they are and in integers; the rows
// of x, prepared by `columns.cu`, are the columns of the right one: eight a product, once for the
// high and once for the low parts. High nibbles are shifted down, so that one sum takes both
// halves of a byte. Lane (g, t) gathers rows g and g + 8 of the weight, columns 2t and 2t + 1.
//
// `split` warps share tiles: each multiplies its share of consecutive pieces (of a tile
// 256 inputs of 4 to 6 bits, 128 of 8, 64 of 16). A piece of x comes to registers once for TILES
// tiles, which follow one another (from sm_90 on through shared memory, the next piece while this
// one is multiplied); their sums meet in shared memory in fixed order. Blocks are persistent:
// groups of warps take tiles in turn, WARPS / split groups a block. Weights stream through
// `ring.cuh` and are requested before the end of the predecessor is awaited.
//
// Epilogues:
//   STORE  out[c][r] = y
//   ADD    out[c][r] += y
//   SILU   tile i holds 8 rows of gate and 8 of up: out[c][.] = silu(gate) * up
//   HEAD   as STORE, and the greatest of each block
//
// Bytes: codes + scales + zeros once; x once per TILES tiles of a group, from L2.
#pragma once

#include "columns.cuh"
#include "ring.cuh"
#include "weights.cuh"

struct GemvBatchArgs {
    const uint8_t* codes;    // records [tiles][spans]
    const uint8_t* meta;     // records [tiles][spans]
    const void* columns;     // [NB][spans * 4]
    const float* factors;    // [m]; null: 1
    float* out;              // [m][rows]; SILU: [m][rows / 2]
    float2* best;            // HEAD: [m][gridDim], the greatest logit and its row (as bits)
    int m;
    int rows;
    int tiles;
    int spans;
    int groups;              // scale groups of a span
    int meta_bytes;          // of a record
    int split;               // split-k: warps that share tiles, at most WARPS and pieces
    int inverse;             // 256 / split, rounded up: warp * inverse / 256 = warp / split
    int depth;               // of the ring, at most MOST_DEPTH; 1 only if no warp has more stages
    int epilogue;
    float scale;             // of the product
    int scheme;              // of `with_block_scheme`
};

// Floats of a column of a tile's sums: padded, so that its rows lie in different banks.
constexpr int SUM_STRIDE = 20;

// A block's memory of fixed size, one for all schemes of an instance.
template <int NB, int WARPS>
struct BatchRoom {
    uint64_t barriers[WARPS][MOST_DEPTH];
    float2 tops[WARPS][NB * 8];
    uint64_t arrivals[WARPS];   // of pieces of x
};
template <int NB, int WARPS>
DEVICE BatchRoom<NB, WARPS>& batch_room() {
    __shared__ BatchRoom<NB, WARPS> room;
    return room;
}

// What a warp does: it multiplies its pieces of the tiles that its group takes, TILES at a time, and with the other warps of
// the group ends them.
template <class S, int NB, int WARPS, int TILES>
struct GemvBatch {
    static constexpr int BITS = S::BITS, ZERO = S::ZERO, SLOT = S::SLOT;
    static constexpr int STAGES = S::STAGES;         // pieces of a span
    static constexpr int SLOTS = 4 / STAGES;         // of a piece
    static constexpr int PARTS = SLOTS * 64 / SLOT;  // of a piece: inputs of one scale
    static constexpr int TILE_SUMS = NB * 8 * SUM_STRIDE;
    // From sm_90 on the copy engine brings pieces of x to shared memory.
#if __CUDA_ARCH__ >= 900 && !SMALL_BLOCKS
    static constexpr bool BULK = true;
#else
    static constexpr bool BULK = false;
#endif
    using WeightRing = Ring<S::STAGE, S::META, 1>;
    using Columns = std::conditional_t<BITS == 16, HalfColumns, DigitColumns<8>>;
    static constexpr int PIECE_BYTES = SLOTS * sizeof(Columns);   // of x

    // A piece of x in registers: words [slot][group of rows][hi, lo] (FP16: and chunk), scales and sums of columns 2t and 2t + 1.
    struct Piece {
        uint4 words[SLOTS][NB][BITS == 16 ? 4 : 2];
        float2 scale[SLOTS][NB], sum[SLOTS][NB][SLOT != 64 ? 2 : 1];
    };
    using Sums = float[NB][4];   // of a tile: rows g, g (columns 2t, 2t + 1), g + 8, g + 8

    const GemvBatchArgs& p;
    const int warp, lane, g, t;
    const int split, group, part, groups;
    float* const sums;   // [WARPS][TILES][TILE_SUMS]
    BatchRoom<NB, WARPS>& room;
    uint64_t* const arrival;
    uint8_t* const piece_at;
    const int step, first;          // tiles of the group: `step` apart from `first` on
    const int pieces, begin, end;   // this warp's of a tile
    // What to request next: tile `j` of TILES, `step` apart from `base` on.
    int ahead_base, ahead_piece, ahead_tile, ahead_j = 0;
    WeightRing ring;
    uint32_t arrival_parity = 0;
    bool stage_read = false;   // the ring's stage before the next one may be filled again

    DEVICE GemvBatch(const GemvBatchArgs& p, uint4* shared, BatchRoom<NB, WARPS>& room)
        : p(p), warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4), split(p.split), group(warp * p.inverse >> 8),
          part(warp - group * split), groups(WARPS * p.inverse >> 8),
          sums(reinterpret_cast<float*>(shared + WARPS * p.depth * WeightRing::STAGE_WORDS)), room(room), arrival(room.arrivals + warp),
          piece_at(reinterpret_cast<uint8_t*>(sums + WARPS * TILES * TILE_SUMS) + warp * (NB * PIECE_BYTES)), step(gridDim.x * groups),
          first(group < groups ? blockIdx.x * groups + group : p.tiles), pieces(p.spans * STAGES), begin(part * pieces / split),
          end((part + 1) * pieces / split), ahead_base(first), ahead_piece(begin), ahead_tile(first),
          ring(shared + warp * p.depth * WeightRing::STAGE_WORDS, room.barriers[warp], p.depth) {}

    // Requests the warp's next stage of weights.
    DEVICE void request() {
        const bool any = ahead_tile < p.tiles;
        ring.request(p.codes + (size_t(ahead_tile) * pieces + ahead_piece) * S::STAGE,
                     p.meta + (size_t(ahead_tile) * p.spans + ahead_piece / STAGES) * p.meta_bytes, p.meta_bytes, any);
        if (!any) return;
        ahead_tile += step;
        if (++ahead_j == TILES || ahead_tile >= p.tiles) {
            ahead_j = 0;
            if (++ahead_piece == end) {
                ahead_piece = begin;
                ahead_base += TILES * step;
            }
            ahead_tile = ahead_base;
        }
    }

    DEVICE void request_piece(int piece) {
#if __CUDA_ARCH__ >= 900 && !SMALL_BLOCKS
        if (lane == 0) {
            barrier_expect(arrival, NB * PIECE_BYTES);
#pragma unroll
            for (int n = 0; n < NB; n++)
                copy_bulk(piece_at + n * PIECE_BYTES,
                          static_cast<const uint8_t*>(p.columns) + (size_t(n) * p.spans * 4 + piece * SLOTS) * sizeof(Columns), PIECE_BYTES, arrival);
        }
#endif
    }

    // Loads a piece of x. `again`: the warp has only this one, which is still in shared memory.
    DEVICE void load(Piece& x, int piece, bool again) {
        const uint8_t* columns = piece_at;
        int group_bytes = PIECE_BYTES;
        if constexpr (BULK) {
#if __CUDA_ARCH__ >= 900
            if (!again) {
                barrier_wait(arrival, arrival_parity);
                arrival_parity ^= 1;
            }
#endif
        } else {
            columns = static_cast<const uint8_t*>(p.columns) + size_t(piece) * SLOTS * sizeof(Columns);
            group_bytes = p.spans * 4 * sizeof(Columns);
        }
        auto read = [](const auto* at) {
            if constexpr (BULK) return *at;
            else return __ldcg(at);
        };
#pragma unroll
        for (int s = 0; s < SLOTS; s++)
#pragma unroll
            for (int n = 0; n < NB; n++) {
                const Columns& from = reinterpret_cast<const Columns*>(columns + n * group_bytes)[s];
                const uint4* words = reinterpret_cast<const uint4*>(from.words);
#pragma unroll
                for (int i = 0; i < (BITS == 16 ? 4 : 2); i++) x.words[s][n][i] = read(words + i * 32 + lane);
                if constexpr (BITS != 16) {
                    x.scale[s][n] = read(reinterpret_cast<const float2*>(from.scales) + t);
                    const float2 a = read(reinterpret_cast<const float2*>(from.sums[0]) + t);
                    const float2 b = read(reinterpret_cast<const float2*>(from.sums[1]) + t);
                    x.sum[s][n][0] = SLOT != 64 ? make_float2(a.x - b.x, a.y - b.y) : a;
                    if constexpr (SLOT != 64) x.sum[s][n][1] = b;
                }
            }
    }

    // Adds the products of a stage of FP16 weights: product i % 2 of chunk i / 2.
    DEVICE static void multiply_halves(Sums& y, const Unit<S> (&codes)[4], const Piece& x) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int d = 0; d < 2; d++) {
                    const uint4 b = x.words[0][n][i / 2 * 2 + d];
                    mma_16816(y[n], codes[i].words.x, codes[i].words.y, codes[i].words.z, codes[i].words.w, i % 2 ? b.z : b.x, i % 2 ? b.w : b.y);
                }
    }

    // Adds the products of a stage of codes, slot by slot.
    DEVICE void multiply_codes(Sums& y, const Unit<S> (&codes)[4], const LevelTables<S>& levels, const GroupMeta<S> (&meta)[PARTS], const Piece& x) const {
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            int high[NB][4] = {}, low[NB][4] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) {
                uint32_t a[4];
                if constexpr (S::ORDER == 4) {
                    chunk_operand<S>(a, codes[s], levels, c);
                } else {
                    const uint4 v = codes[2 * s + c].words;
                    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
                }
#pragma unroll
                for (int part = 0; part < S::PARTS; part++) {   // of the chunk, of one scale
                    const bool mine = S::PARTS == 1 || t / 2 == part;
#pragma unroll
                    for (int n = 0; n < NB; n++) {
                        const uint4 h = x.words[s][n][0], l = x.words[s][n][1];
                        multiply_operand<S>(high[n], a, mine ? c ? h.z : h.x : 0, mine ? c ? h.w : h.y : 0);
                        multiply_operand<S>(low[n], a, mine ? c ? l.z : l.x : 0, mine ? c ? l.w : l.y : 0);
                    }
                    if (SLOT == 64 && c == 0) continue;
                    const GroupMeta<S>& m = meta[SLOT == 64 ? s : (2 * s + c) * S::PARTS + part];
#pragma unroll
                    for (int n = 0; n < NB; n++) {
                        const float2 x_scale = x.scale[s][n];
                        float2 x_sum = x.sum[s][n][SLOT != 64 ? c : 0];
                        if (S::SUMS) {   // of the part's inputs
                            const uint4 h = x.words[s][n][0], l = x.words[s][n][1];
                            int total_high[4] = {}, total_low[4] = {};
                            multiply_ones(total_high, mine ? c ? h.z : h.x : 0, mine ? c ? h.w : h.y : 0);
                            multiply_ones(total_low, mine ? c ? l.z : l.x : 0, mine ? c ? l.w : l.y : 0);
                            x_sum.x = float(total_high[0] * 256 + total_low[0]) * x_scale.x;
                            x_sum.y = float(total_high[1] * 256 + total_low[1]) * x_scale.y;
                        }
                        add_scaled(y[n], high[n], low[n], m, x_scale, x_sum, S::SUMS || part == 0);
                    }
                }
            }
        }
    }

    // Adds sums of products of codes and digits times their scales, and clears them. `offsets`: those of the group's minima too.
    DEVICE static void add_scaled(float (&y)[4], int (&high)[4], int (&low)[4], const GroupMeta<S>& m, float2 x_scale, float2 x_sum, bool offsets) {
        const float2 scale = m.scales(), zero = m.zeros();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float product = float(high[i] * 256 + low[i]) * ((i % 2 ? x_scale.y : x_scale.x) * OPERAND_UNIT<S>);
            const float total = i % 2 ? x_sum.y : x_sum.x, sc = i / 2 ? scale.y : scale.x, z = i / 2 ? zero.y : zero.x;
            if (ZERO == OFFSET && offsets)
                y[i] += fmaf(sc, product, z * total);
            else if (ZERO == OFFSET || S::CENTRED)
                y[i] = fmaf(sc, product, y[i]);
            else
                y[i] = fmaf(sc, fmaf(-z, total, product), y[i]);
            high[i] = low[i] = 0;
        }
    }

    // Adds the products of the warp's next stage, of piece `piece`. `then_piece`: once x is in registers the next piece of x may
    // be requested; -1 if there is none.
    DEVICE void multiply(Sums& y, int piece, const Piece& x, int then_piece) {
        const uint4* from = ring.wait();
        // What was read before this wait has arrived in registers: the copy engine may
        // write there. Right after the reads were issued it might overtake them.
        __syncwarp();
        if (stage_read) request();
        stage_read = true;
        if (BULK && then_piece >= 0) request_piece(then_piece);
        Unit<S> codes[4];
        LevelTables<S> levels;
        GroupMeta<S> meta[PARTS];
#pragma unroll
        for (int i = 0; i < 4; i++) codes[i].load(from + i * (S::UNIT / 16), lane);
        levels.load(reinterpret_cast<const uint8_t*>(from + S::STAGE / 16));
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const int at = piece % STAGES * PARTS + i;
            meta[i].load(reinterpret_cast<const uint8_t*>(from + S::STAGE / 16), p.groups, SLOT != 64 ? at : at * p.groups >> 2, g);
        }
        if constexpr (BITS == 16) multiply_halves(y, codes, x);
        else multiply_codes(y, codes, levels, meta, x);
    }

    // Meets the warps that share tiles.
    DEVICE void meet() const {
        if (split == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(split * 32) : "memory");
    }

    // Keeps the greatest of column c, of which 16 lanes hold one row each: of equals the lowest row.
    DEVICE void keep_best(int c, bool leader, float best, int best_row) const {
#pragma unroll
        for (int m = 8; m > 0; m >>= 1) {
            const float o = __shfl_xor_sync(~0u, best, m);
            const int q = __shfl_xor_sync(~0u, best_row, m);
            if (o > best || (o == best && q < best_row)) best = o, best_row = q;
        }
        if (leader && best > room.tops[warp][c].x) room.tops[warp][c] = make_float2(best, __int_as_float(best_row));
        __syncwarp();
    }

    // Ends `count` tiles from `base` on: sums over the warps that share them, then the epilogue.
    DEVICE void finish(int base, int count, const Sums (&y)[TILES]) const {
        if (base != first) meet();   // the sums of earlier tiles are read
        float* const mine = sums + warp * (TILES * TILE_SUMS) + 2 * t * SUM_STRIDE + g;
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) mine[j * TILE_SUMS + (n * 8 + i % 2) * SUM_STRIDE + i / 2 * 8] = y[j][n][i];
        meet();
        const float* const from = sums + (warp - part) * (TILES * TILE_SUMS);
#pragma unroll 1
        for (int e = part * 32 + lane; e < count * NB * 128; e += split * 32) {
            const int r = e % 16, c = e / 16 % (NB * 8), j = e / (NB * 128);
            const int tile = base + j * step, row = tile * 16 + r;
            const bool there = c < p.m && row < p.rows;
            float* const to = p.out + size_t(c) * p.rows + row;
            const float old = p.epilogue == ADD && there ? __ldcg(to) : 0.f;
            float factor = BITS == 16 ? p.scale / HALVES_SCALE : p.scale;
            if (p.factors && c < p.m) factor *= __ldcg(p.factors + c);
            float v = 0.f;
#pragma unroll 4
            for (int w = 0; w < split; w++) v += from[w * (TILES * TILE_SUMS) + j * TILE_SUMS + c * SUM_STRIDE + r];
            v *= factor;
            if (p.epilogue == SILU) {
                const float up = __shfl_down_sync(~0u, v, 8);
                if (r < 8 && there) p.out[size_t(c) * (p.rows / 2) + tile * 8 + r] = __fdividef(v, 1.f + __expf(-v)) * up;
                continue;
            }
            if (there) *to = v + old;
            if (p.epilogue == HEAD) keep_best(c, r == 0, there ? v : -INFINITY, row);
        }
    }

    DEVICE void run() {
#if __CUDA_ARCH__ >= 900 && !SMALL_BLOCKS
        if (lane == 0) barrier_init(arrival);
#endif
        launch_dependents();
#pragma unroll 1
        for (int i = 0; i < p.depth; i++) request();
        if (p.epilogue == HEAD && lane < NB * 8) room.tops[warp][lane] = make_float2(-INFINITY, 0.f);
        wait_for_prerequisites();
        if (BULK && first < p.tiles) request_piece(begin);

        const bool lone = end - begin == 1;   // a lone piece of x stays where it is
#pragma unroll 1
        for (int base = first; base < p.tiles; base += TILES * step) {
            const int count = min(TILES, (p.tiles - base + step - 1) / step);
            Sums y[TILES] = {};
#pragma unroll 1
            for (int piece = begin; piece < end; piece++) {
                Piece x;
                load(x, piece, lone && base != first);
                const int next = piece + 1 < end ? piece + 1 : base + TILES * step < p.tiles ? begin : -1;
#pragma unroll
                for (int j = 0; j < TILES; j++) {
                    if (j >= count) break;
                    multiply(y[j], piece, x, j == 0 && !lone ? next : -1);
                }
            }
            finish(base, count, y);
        }
        if (p.epilogue == HEAD) store_best();
    }

    // Stores the greatest of each column that the block's warps have found.
    DEVICE void store_best() const {
        __syncthreads();
        if (threadIdx.x >= p.m) return;
        float2 best = room.tops[0][threadIdx.x];
        for (int i = 1; i < WARPS; i++) {
            const float2 o = room.tops[i][threadIdx.x];
            if (o.x > best.x || (o.x == best.x && __float_as_int(o.y) < __float_as_int(best.y))) best = o;
        }
        p.best[size_t(threadIdx.x) * gridDim.x + blockIdx.x] = best;
    }
};

template <class S, int NB, int WARPS, int TILES>
DEVICE void gemv_batch(const GemvBatchArgs& p) {
    extern __shared__ __align__(128) uint4 shared[];
    GemvBatch<S, NB, WARPS, TILES>(p, shared, batch_room<NB, WARPS>()).run();
}
