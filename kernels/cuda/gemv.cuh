// One row of activations times a packed weight: the kernels of a decode step.
//
//   y[r] = sum_k w[r][k] * x[k]      (x / rms(x) * gain where x is to be normalized)
//
// A warp computes 16 rows on tensor cores with the weights as the left operand: codes as they
// are, as unsigned bytes, in integers; FP16 weights in FP16. The right operand has eight columns
// for one row of x, so each pair of columns takes one of the four slots of a span: column 2j
// holds the high parts of slot j and column 2j+1 the low parts (`activations.cuh`), both zero
// outside slot j. Lane (g, t) so ends with the sums of slot t of rows g and g + 8 alone: it needs
// one scale and one zero-point of each. High nibbles are multiplied where they stand, as 16
// times their value, and summed apart.
//
// Epilogues:
//   STORE  out[r] = y, of normalized x
//   ADD    out[r] += y, of plain x
//   SILU   tile i holds 8 rows of gate and 8 of up: out[.] = silu(gate) * up, of normalized x
//   HEAD   as STORE, and the greatest of each block
//
// `split` warps share a tile: each multiplies its share of consecutive spans, and their sums
// meet in shared memory in fixed order. Blocks are persistent: groups of warps take tiles in
// turn, WARPS / split groups a block.
//
// Weights are requested before the end of the predecessor is awaited. They come one of two ways:
// AHEAD > 0: to registers, AHEAD stages ahead (a stage is 2 KiB of codes a warp, of 5 and 6 bits a span): the shortest
//   way, for products of few stages.
// AHEAD = 0: through a ring of `depth` stages in shared memory, private to a warp, filled by
//   bulk copies: it streams closer to the memory's bandwidth. A stage is filled again once the
//   next has come (of a ring of one, once it has been multiplied): filled right after it was read,
//   nothing would order the copy behind the reads.
// Only one block fits on an SM, or the scheduler would put two of one kernel there while other
// SMs idle.
//
// Bytes: codes + scales + zeros once; x once per block (from L2).
#pragma once

#include <stddef.h>

#include "activations.cuh"
#include "ring.cuh"
#include "weights.cuh"

struct GemvArgs {
    const uint4* codes;    // records [tiles][spans]
    const uint8_t* meta;   // records [tiles][spans]
    const float* x;        // [inputs]
    const float* gain;     // of RMSNorm, [inputs]; unused by ADD; null: x is multiplied as it is
    float* out;            // [rows]; SILU: [rows / 2]
    float2* best;          // HEAD: [gridDim], the greatest logit and its row (as bits)
    int inputs;            // a multiple of 8
    int rows;
    int tiles;
    int spans;
    int groups;            // scale groups of a span
    int meta_bytes;        // of a record
    int split;             // split-k: warps that share a tile, at most WARPS and spans
    int inverse;           // 256 / split, rounded up: warp * inverse / 256 = warp / split
    int depth;             // of the ring, at most MOST_DEPTH
    float eps;
    float scale;           // of the product
    int holds_dependents;  // dependents are launched only after the end of the prerequisites
    int epilogue;
    int scheme;            // of `with_block_scheme`
};

// A stage in registers.
template <class S>
struct Stage {
    Unit<S> codes[4];
    Meta<S> meta;
};

// Sums of a lane: {row g high and low part, row g + 8 high and low part} of its slot.
struct IntegerSums {
    int low[4] = {};    // low nibbles, or bytes
    int high[4] = {};   // high nibbles, times 16

    DEVICE float row(int i) const {
        return float(low[2 * i] * 256 + low[2 * i + 1] + ((high[2 * i] * 256 + high[2 * i + 1]) >> 4));
    }
};

// What of a product a warp multiplies: every `step`-th tile from `first` on, of each of them the
// spans from `begin` to `end`.
struct Share {
    int groups;       // of the block's warps
    int group, part;  // this warp's group, and its part of a tile
    int first, step;
    int begin, end;
};

template <int WARPS>
DEVICE Share share_of(const GemvArgs& p, int warp) {
    Share s;
    s.group = warp * p.inverse >> 8, s.part = warp - s.group * p.split, s.groups = WARPS * p.inverse >> 8;
    s.step = gridDim.x * s.groups;
    s.first = s.group < s.groups ? blockIdx.x * s.groups + s.group : p.tiles;
    s.begin = s.part * p.spans / p.split, s.end = (s.part + 1) * p.spans / p.split;
    return s;
}

// Where the next stage to request stands; past the last tile nothing is requested.
template <class S>
struct Requests {
    static constexpr int STAGES = S::STAGES;   // of a span
    int tile, span, stage;
    const uint8_t* codes;
    const uint8_t* meta;

    DEVICE Requests(const GemvArgs& p, const Share& s) : tile(s.first), span(s.begin), stage(0) {
        const size_t record = size_t(s.first) * p.spans + s.begin;
        codes = reinterpret_cast<const uint8_t*>(p.codes) + record * (STAGES * S::STAGE);
        meta = p.meta + record * p.meta_bytes;
    }

    // True if scales and zero-points come with this stage.
    DEVICE bool has_meta() const { return S::SLOT == 32 || STAGES == 1 || stage == STAGES - 1; }

    DEVICE void advance(const GemvArgs& p, const Share& s) {
        const bool last = STAGES == 1 || stage == STAGES - 1;
        codes += S::STAGE;
        stage = last ? 0 : stage + 1;
        if (last) {
            meta += p.meta_bytes;
            if (++span == s.end) {
                span = s.begin;
                tile += s.step;
                const size_t skip = size_t(s.step) * p.spans - (s.end - s.begin);
                codes += skip * (STAGES * S::STAGE);
                meta += skip * p.meta_bytes;
            }
        }
    }

    // What the outputs of a tile of gate and up are multiplied by, and where they go.
    DEVICE float weight(int) const { return 1.f; }
    DEVICE int place(int tile) const { return tile * 8; }
};

// Where the warps of a block meet, and what their rings wait for.
template <int WARPS>
struct Meeting {
    float red[2][WARPS][16];
    float squares[WARPS];
    uint64_t barriers[WARPS][MOST_DEPTH];
};

template <int BITS>
using PreparedRow = std::conditional_t<BITS == 16, Halves, Digits>;

// Stages in registers, requested AHEAD stages ahead, where `Next` says.
template <class S, int AHEAD, class Next = Requests<S>>
struct RegisterStages {
    const GemvArgs& p;
    const Share& share;
    Next next;
    Stage<S> stages[AHEAD];

    DEVICE RegisterStages(const GemvArgs& p, const Share& share, const Next& next) : p(p), share(share), next(next) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) give(i);
    }

    // The next stage, the i-th modulo AHEAD.
    DEVICE const Stage<S>& take(int i, bool) { return stages[i]; }

    // Requests another in its place.
    DEVICE void give(int i) {
        const int lane = threadIdx.x % 32;
        if (next.tile < p.tiles) {
#pragma unroll
            for (int j = 0; j < 4; j++) stages[i].codes[j].load_stream(next.codes + j * S::UNIT, lane);
            if (next.has_meta()) stages[i].meta.load(next.meta, p.groups, lane / 4, lane % 4);
        }
        next.advance(p, share);
    }
};

// Stages from a ring in shared memory.
template <class S, class Next = Requests<S>>
struct RingStages {
    using WeightRing = Ring<S::STAGE, S::META, 1>;
    const GemvArgs& p;
    const Share& share;
    Next next;
    WeightRing ring;
    Stage<S> now;
    // Of this lane in a stage.
    const MetaAt<S> meta_at;
    const uint32_t codes_at, upper_at;

    DEVICE RingStages(const GemvArgs& p, const Share& share, const Next& next, uint4* stages, uint64_t* barriers)
        : p(p), share(share), next(next), ring(stages, barriers, p.depth),
          meta_at(p.groups, threadIdx.x % 32 / 4, threadIdx.x % 4), codes_at(keep(threadIdx.x % 32 * Unit<S>::LANE)),
          upper_at(Unit<S>::AT + threadIdx.x % 32 * Unit<S>::WIDTH * 4) {
#pragma unroll 1
        for (int i = 0; i < p.depth - lags(); i++) request();
    }

    // A stage is filled again when the next one has come; of a ring of one, when it has been multiplied.
    DEVICE bool lags() const { return p.depth > 1; }

    DEVICE void request() {
        ring.request(next.codes, next.meta, next.has_meta() ? p.meta_bytes : 0, next.tile < p.tiles);
        next.advance(p, share);
    }

    DEVICE const Stage<S>& take(int, bool has_meta) {
        const uint32_t from = ring.wait_at();
        __syncwarp();
        if (lags()) request();   // of the stage before this one
#pragma unroll
        for (int j = 0; j < 4; j++) now.codes[j].load_shared(from + codes_at + j * S::UNIT, from + upper_at + j * S::UNIT);
        if (has_meta) meta_at.load(now.meta, from + S::STAGE);
        return now;
    }

    DEVICE void give(int) {
        __syncwarp();
        if (!lags()) request();
    }
};

// This warp's share of a product. `stages` are requested already; `wait` returns when x can be read.
// `row`: room for x, [spans]. AHEAD: 0, or of `RegisterStages`.
template <class S, int EPI, int WARPS, int AHEAD, class Stages, class Wait>
DEVICE void multiply(const GemvArgs& p, const Share& share, PreparedRow<S::BITS>* row, Meeting<WARPS>& meeting, Stages& stages,
                     Wait&& wait) {
    constexpr int BITS = S::BITS, ZERO = S::ZERO, SLOT = S::SLOT;
    constexpr bool NORM = EPI != ADD;
    constexpr int STAGES = S::STAGES;   // of a span
    constexpr bool RING = AHEAD == 0;
    static_assert(AHEAD % STAGES == 0);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int split = p.split, group = share.group, part = share.part, groups = share.groups;
    const int begin = share.begin, end = share.end, step = share.step;

    // x to shared memory: with one group each warp the spans it multiplies, otherwise all by all.
    constexpr int BATCH = RING ? (NORM ? 2 : 4) : 1;   // spans at a time
    const bool alone = groups == 1;
    const int stride = alone ? 1 : WARPS;
    const int x_begin = alone ? begin : warp, x_end = alone ? (group == 0 ? end : 0) : p.spans;
    float4 gain[BATCH][2];
    auto request_gain = [&](int at) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int k = (at + i * stride) * SPAN + 8 * lane;
            gain[i][0] = gain[i][1] = make_float4(1.f, 1.f, 1.f, 1.f);
            if (NORM && p.gain != nullptr && at + i * stride < x_end && k < p.inputs) {
                gain[i][0] = __ldg(reinterpret_cast<const float4*>(p.gain + k));
                gain[i][1] = __ldg(reinterpret_cast<const float4*>(p.gain + k) + 1);
            }
        }
    };
    request_gain(x_begin);

    wait();

    float square = 0.f;
#pragma unroll 1
    for (int at = x_begin; at < x_end; at += stride * BATCH) {
        float4 from[BATCH][2];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int k = (at + i * stride) * SPAN + 8 * lane;
            const bool there = at + i * stride < x_end && k < p.inputs;
            from[i][0] = there ? __ldcg(reinterpret_cast<const float4*>(p.x + k)) : make_float4(0.f, 0.f, 0.f, 0.f);
            from[i][1] = there ? __ldcg(reinterpret_cast<const float4*>(p.x + k) + 1) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (at + i * stride >= x_end) break;
            float v[8] = {from[i][0].x, from[i][0].y, from[i][0].z, from[i][0].w,
                          from[i][1].x, from[i][1].y, from[i][1].z, from[i][1].w};
            if constexpr (NORM) {
#pragma unroll
                for (int j = 0; j < 8; j++) square = fmaf(v[j], v[j], square);
                const bool there = (at + i * stride) * SPAN + 8 * lane < p.inputs;
                const float f[8] = {gain[i][0].x, gain[i][0].y, gain[i][0].z, gain[i][0].w,
                                    gain[i][1].x, gain[i][1].y, gain[i][1].z, gain[i][1].w};
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = there ? v[j] * f[j] : 0.f;
            }
            prepare<S::ORDER>(row[at + i * stride], v, lane);
        }
        request_gain(at + stride * BATCH);
    }
    if constexpr (NORM) {
        square = warp_sum(square);
        if (lane == 0) meeting.squares[warp] = square;
    }
    if (alone)
        __syncwarp();
    else
        __syncthreads();

    float y[2] = {};            // rows g, g + 8 of the current tile
    float factor = 0.f;         // of the product; known after the first meeting
    float best = -INFINITY;
    int best_row = 0, parity = 0;
    float residual = 0.f;       // of row lane % 16, requested while the tile is multiplied

    // Where this lane finds, in the first span, its slot's scale and its operand of each slot: that of
    // others is zero.
    const uint32_t slot_at = keep(shared_address(row) + uint32_t(offsetof(Digits, slots)) + t * 8);
    uint32_t operand_at[4];
    if constexpr (BITS != 16 && SLOT == 64) {
#pragma unroll
        for (int j = 0; j < 4; j++) operand_at[j] = keep(shared_address(row) + (g / 2 == j ? lane * 16 : uint32_t(offsetof(Digits, zeros))));
    }

    // `totals`: sums of x, where `S::SUMS`.
    auto fold = [&](const IntegerSums& sums, const Meta<S>& m, int half, int span, const IntegerSums& totals = {}) {
        if constexpr (BITS != 16) {
            float s, sum;
            if constexpr (SLOT == 64) {
                const uint2 slot = load_shared_8(slot_at + span * uint32_t(sizeof(Digits)));
                s = __uint_as_float(slot.x), sum = __uint_as_float(slot.y);
            } else if constexpr (SLOT == 32) {
                s = row[span].slots[2 * half + t / 2].x, sum = row[span].sums[4 * half + t];
            } else {
                const float unit = row[span].slots[half].x;
                s = unit * OPERAND_UNIT<S>, sum = S::SUMS ? unit * totals.row(0) : t % 2 ? 0.f : row[span].sums[2 * half + t / 2];
            }
            const float2 sc = m.scales(half), z = m.zeros(half);
            if constexpr (ZERO == OFFSET) {
                y[0] += sc.x * (s * sums.row(0)) + z.x * sum;
                y[1] += sc.y * (s * sums.row(1)) + z.y * sum;
            } else if constexpr (S::CENTRED) {
                y[0] = fmaf(sc.x, s * sums.row(0), y[0]);
                y[1] = fmaf(sc.y, s * sums.row(1), y[1]);
            } else {
                y[0] = fmaf(sc.x, fmaf(s, sums.row(0), -z.x * sum), y[0]);
                y[1] = fmaf(sc.y, fmaf(s, sums.row(1), -z.y * sum), y[1]);
            }
        }
    };

    // Ends a tile: sums over slots, then over the warps that share it, then the epilogue, lane
    // l with row l.
    auto finish = [&](int tile) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            y[j] += __shfl_xor_sync(~0u, y[j], 1);
            y[j] += __shfl_xor_sync(~0u, y[j], 2);
            if (t == 0) meeting.red[parity][warp][j * 8 + g] = y[j];
            y[j] = 0.f;
        }
        if (split == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(split * 32) : "memory");
        if (part == 0) {
            float v = 0.f;
#pragma unroll
            for (int j = 0; j < WARPS; j += 2)
                if (j + lane / 16 < split) v += meeting.red[parity][warp + j + lane / 16][lane % 16];
            v += __shfl_xor_sync(~0u, v, 16);
            if (factor == 0.f) {
                factor = BITS == 16 ? p.scale / HALVES_SCALE : p.scale;
                if (NORM && p.gain != nullptr) {
                    const int sharers = alone ? split : WARPS;
                    factor *= rsqrtf(warp_sum(lane < sharers ? meeting.squares[lane] : 0.f) / p.inputs + p.eps);
                }
            }
            v *= factor;
            const int r = tile * 16 + lane % 16;
            if constexpr (EPI == SILU) {
                const float up = __shfl_down_sync(~0u, v, 8);
                if (lane < 8 && r < p.rows) p.out[stages.next.place(tile) + lane] = __fdividef(v, 1.f + __expf(-v)) * up * stages.next.weight(tile);
            } else if (lane < 16 && r < p.rows) {
                p.out[r] = EPI == ADD ? v + residual : v;
                if constexpr (EPI == HEAD) {
                    if (v > best) best = v, best_row = r;
                }
            }
        }
        parity ^= 1;
    };
    // Requests what the end of a tile adds to.
    auto start = [&](int tile) {
        const int r = tile * 16 + lane % 16;
        if (EPI == ADD && part == 0 && r < p.rows) residual = __ldcg(p.out + r);
    };

    int tile = share.first, span = begin;
    IntegerSums sums, totals;
    float halves[2][4] = {};   // FP16 weights: sums of first and second products
    start(tile);
#pragma unroll 1
    while (tile < p.tiles) {
#pragma unroll
        for (int i = 0; i < (RING ? STAGES : AHEAD); i++) {
            if (!RING && tile >= p.tiles) break;
            const int stage = i % STAGES;
            const Stage<S>& now = stages.take(i, SLOT == 32 || stage == STAGES - 1);
            if constexpr (BITS == 16) {
                const uint4* b = row[span].words + (g & 1) * 4 + t;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint4 x = g / 2 == stage ? b[(2 * stage + c) * 8] : make_uint4(0, 0, 0, 0);
                    const uint4 v = now.codes[2 * c].words, w = now.codes[2 * c + 1].words;
                    mma_16816(halves[0], v.x, v.y, v.z, v.w, x.x, x.y);
                    mma_16816(halves[1], w.x, w.y, w.z, w.w, x.z, x.w);
                }
            } else if constexpr (SLOT == 64) {
#pragma unroll
                for (int j = 0; j < 4 / STAGES; j++) {
                    const uint4 x = load_shared_16(operand_at[stage * (4 / STAGES) + j] + span * uint32_t(sizeof(Digits)));
                    if constexpr (BITS == 4) {
                        constexpr uint32_t LOW = 0x0f0f0f0f, HIGH = 0xf0f0f0f0;
                        const uint4 v = now.codes[j].words;
                        mma_16832(sums.low, v.x & LOW, v.y & LOW, v.z & LOW, v.w & LOW, x.x, x.y);
                        mma_16832(sums.high, v.x & HIGH, v.y & HIGH, v.z & HIGH, v.w & HIGH, x.z, x.w);
                    } else if constexpr (BITS < 8) {
                        const Unit<S>& u = now.codes[j];
                        mma_16832(sums.low, u.bytes(0, 0), u.bytes(1, 0), u.bytes(2, 0), u.bytes(3, 0), x.x, x.y);
                        mma_16832(sums.low, u.bytes(0, 1), u.bytes(1, 1), u.bytes(2, 1), u.bytes(3, 1), x.z, x.w);
                    } else {
                        const uint4 v = now.codes[2 * j].words, w = now.codes[2 * j + 1].words;
                        mma_16832(sums.low, v.x, v.y, v.z, v.w, x.x, x.y);
                        mma_16832(sums.low, w.x, w.y, w.z, w.w, x.z, x.w);
                    }
                }
            } else if constexpr (SLOT == 16) {
                // The halves of two chunks of 32 inputs are four slots.
#pragma unroll
                for (int unit = 0; unit < 4; unit++) {
                    const uint32_t* b = reinterpret_cast<const uint32_t*>(row[span].words + unit * 8 + (g & 1) * 4 + t) + g / 4;
                    const bool mine = t / 2 == g / 2 % 2;
                    const uint32_t x0 = mine ? b[0] : 0, x1 = mine ? b[2] : 0;
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        uint32_t a[4];
                        chunk_operand<S>(a, now.codes[unit], now.meta.levels, c);
                        multiply_operand<S>(sums.low, a, g / 4 == c ? x0 : 0, g / 4 == c ? x1 : 0);
                    }
                    if (S::SUMS) multiply_ones(totals.low, x0, x1);
                    fold(sums, now.meta, unit, span, totals);
                    sums = totals = IntegerSums();
                }
            } else {
                // Four chunks of 32 inputs are four slots.
#pragma unroll
                for (int half = stage; half < 2; half += STAGES) {
                    const uint32_t* b = reinterpret_cast<const uint32_t*>(row[span].words + (2 * half + g / 4) * 8 + (g & 1) * 4 + t);
                    const int at = g / 2 % 2;
                    const uint32_t x0 = BITS < 8 ? b[at] : b[2 * at], x1 = BITS < 8 ? b[2 + at] : b[2 * at + 1];
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const uint32_t b0 = g / 2 == c ? x0 : 0, b1 = g / 2 == c ? x1 : 0;
                        if constexpr (S::ORDER == 4) {
                            uint32_t a[4];
                            chunk_operand<S>(a, now.codes[2 * half + c / 2], now.meta.levels, c % 2);
                            multiply_operand<S>(sums.low, a, b0, b1);
                        } else {
                            const uint4 v = now.codes[c].words;
                            mma_16832(sums.low, v.x, v.y, v.z, v.w, b0, b1);
                        }
                    }
                    fold(sums, now.meta, half, span);
                    sums = IntegerSums();
                }
            }
            if (stage == STAGES - 1 && SLOT == 64 && BITS != 16) {
                fold(sums, now.meta, 0, span);
                sums = IntegerSums();
            }
            stages.give(i);
            if (stage == STAGES - 1 && ++span == end) {
                if constexpr (BITS == 16) {
#pragma unroll
                    for (int j = 0; j < 2; j++) y[j] = halves[0][2 * j] + halves[0][2 * j + 1] + (halves[1][2 * j] + halves[1][2 * j + 1]);
#pragma unroll
                    for (int j = 0; j < 4; j++) halves[0][j] = halves[1][j] = 0.f;
                }
                finish(tile);
                span = begin;
                tile += step;
                start(tile);
            }
        }
    }

    if constexpr (EPI == HEAD) {
        // Lowest row among equals: every comparison prefers the smaller index.
        __syncthreads();
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) {
            float o = __shfl_xor_sync(~0u, best, m);
            int r = __shfl_xor_sync(~0u, best_row, m);
            if (o > best || (o == best && r < best_row)) best = o, best_row = r;
        }
        if (lane == 0) {
            meeting.red[0][warp][0] = best;
            meeting.red[0][warp][1] = __int_as_float(best_row);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < WARPS; i++) {
                float o = meeting.red[0][i][0];
                int r = __float_as_int(meeting.red[0][i][1]);
                if (o > best || (o == best && r < best_row)) best = o, best_row = r;
            }
            p.best[blockIdx.x] = make_float2(best, __int_as_float(best_row));
        }
    }
}

// A whole product: the kernels of `gemv.cu`.
template <class S, int EPI, int WARPS, int AHEAD>
DEVICE void gemv(const GemvArgs& p, Meeting<WARPS>& meeting) {
    using Row = PreparedRow<S::BITS>;
    extern __shared__ __align__(128) uint4 shared[];
    auto wait = [&] {
        wait_for_prerequisites();
        if (p.holds_dependents) launch_dependents();
    };
    if (!p.holds_dependents) launch_dependents();

    if constexpr (AHEAD > 0) {
        const Share share = share_of<WARPS>(p, threadIdx.x / 32);
        RegisterStages<S, AHEAD> stages(p, share, {p, share});
        multiply<S, EPI, WARPS, AHEAD>(p, share, reinterpret_cast<Row*>(shared), meeting, stages, wait);
    } else {
        constexpr int STAGE_WORDS = RingStages<S>::WeightRing::STAGE_WORDS;
        // Known to be the same for the whole warp: addresses that follow from it cost less.
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        const Share share = share_of<WARPS>(p, warp);
        RingStages<S> stages(p, share, {p, share}, shared + warp * p.depth * STAGE_WORDS, meeting.barriers[warp]);
        auto* const row = reinterpret_cast<Row*>(shared + WARPS * p.depth * STAGE_WORDS);
        multiply<S, EPI, WARPS, 0>(p, share, row, meeting, stages, wait);
    }
}
