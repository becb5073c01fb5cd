// One row of activations times a packed weight: the kernels of a decode step.
//
//   y[r] = sum_k w[r][k] * x[k]      (times 1 / rms where x is a normalized row, see below)
//
// A warp computes 16 rows by `mma_16816` with the weights as the left operand. The right
// operand has eight columns for one row of x, so each pair of columns takes one of the four
// slots of a span: column 2j holds the high parts of slot j and column 2j+1 the low parts, both
// zero outside slot j. Lane (g, t) so ends with the sums of slot t of rows g and g + 8 alone: it
// needs one scale and one zero-point of each.
//
// Epilogues:
//   STORE  out[r] = y / rms
//   ADD    residual[r] += y; the new residual times `gain` is split for the next kernel, with
//          its squares: RMSNorm is the gain here and the division there
//   SILU   tile i holds 8 rows of gate and 8 of up; split silu(gate / rms) * up / rms
//   HEAD   out[r] = y / rms, and the greatest of each block
//
// `split` warps share a tile: warp `part` multiplies spans part, part + split, ...; their sums
// meet in shared memory in fixed order. Blocks are persistent: G = WARPS / split tiles at a
// time, block b takes tiles b*G .. b*G + G - 1, then on by gridDim * G.
//
// Codes, scales and zero-points come through a ring of DEPTH stages of 2 KiB of codes in
// shared memory, private to a warp; the first stages are requested before the end of the
// predecessor is awaited.
//
// Bytes: codes + scales + zeros once; x once per block (from L2).
#pragma once

#include "activations.cuh"
#include "weights.cuh"

enum Epilogue { STORE = 0, ADD = 1, SILU = 2, HEAD = 3 };

struct GemvArgs {
    const uint4* codes;    // records [tiles][spans]
    const uint8_t* meta;   // records [tiles][spans]
    SplitRow x;
    SplitRow next;         // ADD: [rows] split; SILU: [rows / 2]
    float* out;            // STORE, HEAD: [rows]; ADD: the residual [rows]
    const float* gain;     // ADD: of the next RMSNorm, [rows]
    float2* best;          // HEAD: [gridDim], the greatest logit and its row (as bits)
    int inputs;
    int rows;
    int tiles;
    int spans;
    int groups;            // scale groups of a span
    int meta_bytes;        // of a record
    int split;             // at most WARPS and spans
    int inverse;           // 256 / split, rounded up: warp * inverse / 256 = warp / split
    float eps;
    float scale;           // of the product
    int late;              // release the successor only after the predecessor's end
};

// What the mantissa trick of `Accumulator` adds over a slot; symmetric zero-points included.
template <int BITS, int ZERO>
DEVICE float surplus(float low, float high) {
    if constexpr (BITS == 4) return (ZERO == SYM ? 1032.f : 1024.f) * low + (ZERO == SYM ? 72.f : 64.f) * high;
    if constexpr (BITS == 8) return (ZERO == SYM ? 1152.f : 1024.f) * (low + high);
    return 0.f;
}

template <int BITS, int ZERO, int SLOT, int EPI, int WARPS, int DEPTH>
DEVICE void gemv(const GemvArgs& p) {
    constexpr bool NORM = EPI != ADD;
    constexpr int SLOTS = SPAN / SLOT;             // slots of a span: 4 or 8
    constexpr int STAGES = LOADS<BITS> / 4;        // stages of a span
    constexpr int CODE_WORDS = LOADS<BITS> * 32;   // 16-byte words of a record
    constexpr int STAGE_WORDS = (2048 + MOST_META<BITS, ZERO, SLOT>) / 16;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int split = p.split;
    const int group = warp * p.inverse >> 8, part = warp - group * split, groups = WARPS * p.inverse >> 8;

    extern __shared__ uint4 shared[];
    uint4* const ring = shared + warp * DEPTH * STAGE_WORDS;                 // [DEPTH][codes, meta]
    uint4* const xs = shared + WARPS * DEPTH * STAGE_WORDS;                  // [spans][8 chunks][hi, lo][4 t]
    float2* const slots = reinterpret_cast<float2*>(xs + p.spans * 64);      // [spans][SLOTS] {surplus, sum}
    __shared__ float red[2][WARPS][16];
    __shared__ float squares[WARPS];

    if (!p.late) release_successor();

    const int step = gridDim.x * groups;
    const int first = group < groups ? blockIdx.x * groups + group : p.tiles;

    // The stages this warp will multiply, in order: (tile, span, stage of the span).
    int next_tile = first, next_span = part, next_stage = 0, next_slot = 0;
    auto request = [&]() {
        if (next_tile < p.tiles) {
            size_t record = size_t(next_tile) * p.spans + next_span;
            const uint4* src = p.codes + record * CODE_WORDS + next_stage * 128 + lane;
            uint4* to = ring + next_slot * STAGE_WORDS + lane;
#pragma unroll
            for (int i = 0; i < 4; i++) copy_async(to + i * 32, src + i * 32);
            if ((SLOT == 32 || next_stage == STAGES - 1) && lane < p.meta_bytes / 16)
                copy_async(to + 128, reinterpret_cast<const uint4*>(p.meta + record * p.meta_bytes) + lane);
            next_slot = next_slot + 1 == DEPTH ? 0 : next_slot + 1;
            if (++next_stage == STAGES) {
                next_stage = 0;
                next_span += split;
                if (next_span >= p.spans) {
                    next_span = part;
                    next_tile += step;
                }
            }
        }
        copy_commit();
    };
#pragma unroll 1
    for (int d = 0; d < DEPTH; d++) request();

    wait_for_predecessor();
    if (p.late) release_successor();

    // x to shared memory: with one group, the spans of a warp by itself; otherwise all by all.
    float square = 0.f;
    const int sharers = groups == 1 ? split : WARPS;
    constexpr int BATCH = 3;
#pragma unroll 1
    for (int at = warp < sharers ? warp : p.spans; at < p.spans; at += sharers * BATCH) {
        uint4 v[BATCH][2];
        float4 s[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int span = at + i * sharers;
            if (span < p.spans) {
                v[i][0] = __ldcg(p.x.parts + span * 64 + lane);
                v[i][1] = __ldcg(p.x.parts + span * 64 + lane + 32);
                s[i] = __ldcg(p.x.sums + span * 32 + lane);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int span = at + i * sharers;
            if (span < p.spans) {
                xs[span * 64 + lane] = v[i][0];
                xs[span * 64 + lane + 32] = v[i][1];
                if (NORM) square += s[i].z;
                if constexpr (BITS != 16) {
#pragma unroll
                    for (int m = 1; m < SLOT / 8; m <<= 1) {
                        s[i].x += __shfl_xor_sync(~0u, s[i].x, m);
                        s[i].y += __shfl_xor_sync(~0u, s[i].y, m);
                    }
                    if (lane % (SLOT / 8) == 0)
                        slots[span * SLOTS + lane / (SLOT / 8)] =
                            make_float2(surplus<BITS, ZERO>(s[i].x, s[i].y), s[i].x + s[i].y);
                }
            }
        }
    }
    if constexpr (NORM) {
        square = warp_sum(square);
        if (lane == 0) squares[warp] = square;
    }
    if (groups == 1)
        __syncwarp();
    else
        __syncthreads();

    float y0 = 0.f, y1 = 0.f;   // rows g, g + 8 of the current tile
    float factor = 0.f;         // of the product; known after the first barrier
    float best = -INFINITY;
    int best_row = 0, parity = 0;
    float residual = 0.f, gain = 0.f;   // of row lane % 16, requested while the tile is multiplied
    const uint4 zero4 = make_uint4(0, 0, 0, 0);

    auto fold = [&](float a0, float a1, const Meta<BITS, ZERO, SLOT>& m, int half, int span) {
        if constexpr (BITS == 16) {
            y0 += a0;
            y1 += a1;
        } else {
            float2 s = slots[span * SLOTS + half * 4 + t];
            float2 sc = m.scales(half);
            a0 -= s.x;
            a1 -= s.x;
            if constexpr (ZERO == OFFSET) {
                float2 o = m.zeros(half);
                y0 += sc.x * a0 + o.x * s.y;
                y1 += sc.y * a1 + o.y * s.y;
            } else {
                if constexpr (ZERO == INT) {
                    float2 z = m.zeros(half);
                    a0 -= z.x * s.y;
                    a1 -= z.y * s.y;
                }
                y0 = fmaf(sc.x, a0, y0);
                y1 = fmaf(sc.y, a1, y1);
            }
        }
    };

    // Ends a tile: sums over slots, then over the warps that share it, then the epilogue.
    auto finish = [&](int tile) {
        y0 += __shfl_xor_sync(~0u, y0, 1);
        y1 += __shfl_xor_sync(~0u, y1, 1);
        y0 += __shfl_xor_sync(~0u, y0, 2);
        y1 += __shfl_xor_sync(~0u, y1, 2);
        if (t == 0) {
            red[parity][warp][g] = y0;
            red[parity][warp][g + 8] = y1;
        }
        y0 = y1 = 0.f;
        if (split == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(split * 32) : "memory");
        if (part == 0) {
            float v = 0.f;
#pragma unroll
            for (int j = 0; j < WARPS; j += 2)
                if (j + lane / 16 < split) v += red[parity][warp + j + lane / 16][lane % 16];
            if (factor == 0.f) {
                factor = p.scale;
                if constexpr (NORM) factor *= rsqrtf(warp_sum(lane < sharers ? squares[lane] : 0.f) / p.inputs + p.eps);
            }
            v = (v + __shfl_xor_sync(~0u, v, 16)) * factor;
            const int row = tile * 16 + lane % 16;
            if constexpr (EPI == SILU) {
                float up = __shfl_down_sync(~0u, v, 8);
                v = __fdividef(v, 1.f + __expf(-v)) * up;
                store_cell(p.next, tile, lane % 8, v, 0.f, lane < 8 && tile * 16 < p.rows);
            } else if constexpr (EPI == ADD) {
                v = row < p.rows ? v + residual : 0.f;
                store_cell(p.next, row / 8, lane % 8, v * gain, v * v, lane < 16 && row / 8 * 8 < p.rows);
                if (lane < 16 && row < p.rows) p.out[row] = v;
            } else if (lane < 16 && row < p.rows) {
                p.out[row] = v;
                if constexpr (EPI == HEAD) {
                    if (v > best) best = v, best_row = row;
                }
            }
        }
        parity ^= 1;
    };

    int slot = 0;
#pragma unroll 1
    for (int tile = first; tile < p.tiles; tile += step) {
        if constexpr (EPI == ADD) {
            const int row = tile * 16 + lane % 16;
            if (part == 0) {
                residual = row < p.rows ? __ldcg(p.out + row) : 0.f;
                gain = row < p.rows ? __ldg(p.gain + row) : 0.f;
            }
        }
#pragma unroll 1
        for (int span = part; span < p.spans; span += split) {
            Accumulator<BITS> acc, acc2;
            const uint4* b = xs + span * 64 + (g & 1) * 4 + t;   // 8 chunks of 8 words
#pragma unroll
            for (int stage = 0; stage < STAGES; stage++) {
                copy_wait<DEPTH - 1>();
                __syncwarp();
                const uint4* from = ring + slot * STAGE_WORDS;
                uint4 w[4];
#pragma unroll
                for (int i = 0; i < 4; i++) w[i] = from[i * 32 + lane];
                Meta<BITS, ZERO, SLOT> m;
                if (SLOT == 32 || stage == STAGES - 1) m.load(reinterpret_cast<const uint8_t*>(from + 128), p.groups, g, t);
                __syncwarp();
                request();
                slot = slot + 1 == DEPTH ? 0 : slot + 1;
                if constexpr (BITS == 4) {
#pragma unroll
                    for (int c = 0; c < 8; c++) {
                        uint4 x = g / 2 == (SLOT == 64 ? c / 2 : c % 4) ? b[c * 8] : zero4;
                        (c < 4 ? acc : acc2).int4(c % 2 ? w[c / 2].z : w[c / 2].x, c % 2 ? w[c / 2].w : w[c / 2].y, x);
                    }
                    if constexpr (SLOT == 32) {
                        fold(acc.first(), acc.second(), m, 0, span);
                        fold(acc2.first(), acc2.second(), m, 1, span);
                    }
                } else if constexpr (BITS == 8) {
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        uint4 x = g / 2 == (SLOT == 64 ? 2 * stage + c / 2 : c) ? b[(4 * stage + c) * 8] : zero4;
                        (SLOT == 64 && c % 2 ? acc2 : acc).int8(w[c], x);
                    }
                    if constexpr (SLOT == 32) {
                        fold(acc.first(), acc.second(), m, stage, span);
                        acc = Accumulator<BITS>();
                    }
                } else {
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        uint4 x = g / 2 == stage ? b[(2 * stage + c) * 8] : zero4;
                        (c ? acc2 : acc).fp16(w[2 * c], w[2 * c + 1], x);
                    }
                }
                if (SLOT == 64 && stage == STAGES - 1)
                    fold(acc.first() + acc2.first(), acc.second() + acc2.second(), m, 0, span);
            }
        }
        finish(tile);
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
            red[0][warp][0] = best;
            red[0][warp][1] = __int_as_float(best_row);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < WARPS; i++) {
                float o = red[0][i][0];
                int r = __float_as_int(red[0][i][1]);
                if (o > best || (o == best && r < best_row)) best = o, best_row = r;
            }
            p.best[blockIdx.x] = make_float2(best, __int_as_float(best_row));
        }
    }
}
