// Many rows of activations times a packed weight, on tensor cores.
//
//   y[m][r] = sum_k w[r][k] * x[m][k],  x in FP16, sums in f32
//
// Codes become FP16 integers q - z exactly; products of one slot (64 inputs, 32 for groups of
// 32) are summed apart and enter y times their scale, so weights are not rounded. Offsets
// (w = s q + o) are the exception: s q + o is rounded to FP16 once.
//
// Block: WR x WC warps; a warp computes RT tiles of 16 weight rows times NT x 8 rows of x, the
// weights as left operand. Stages of 64 inputs of x and codes come through STAGES buffers of
// shared memory. x is row-major [m][spans * 256]: 16 bytes are the operand of one lane for 32
// inputs, as packed codes are ordered that way (`weights.cuh`).
//
// Grid (rows / (WR RT 16), m / (WC NT 8)).
// Bytes: codes once per column of blocks, x once per row of blocks.
#pragma once

#include "activations.cuh"
#include "weights.cuh"

enum GemmEpilogue { GEMM_STORE = 0, GEMM_ADD = 1, GEMM_SILU = 2 };

struct GemmArgs {
    const uint4* codes;
    const uint8_t* meta;
    const __half* x;     // [m][spans * SPAN], zero past `inputs`
    float* y;            // STORE, ADD: [m][rows]
    __half* half;        // SILU: [m][padded] of rows / 2 values
    int m;
    int rows;
    int tiles;
    int spans;
    int groups;
    int meta_bytes;
    int padded;
    int epilogue;
    float scale;
};

// FP16 left operand of one chunk of 32 inputs: two products.
template <int BITS, int ZERO>
struct Operand {
    uint32_t a[2][4];

    // w0, w1: words of rows g, g + 8 (int4), or the 16-byte words of the chunk. For integers
    // `zero` holds the FP16 pairs to subtract: {row g, row g + 8}; for offsets `zero` is the
    // offset and `scale` the scale.
    DEVICE void int4(uint32_t w0, uint32_t w1, const __half2 (&zero)[2], const __half2 (&scale)[2]) {
        constexpr uint32_t LO = 0x000f000f, HI = 0x00f000f0, ONE = 0x64006400;
        const __half2 sixteenth = __half2half2(__ushort_as_half(0x2c00));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t w = i ? w1 : w0, s = w >> 8;
            a[0][i] = finish(mask_or<LO, ONE>(w), i, false, zero, scale, sixteenth);
            a[0][i + 2] = finish(mask_or<LO, ONE>(s), i, false, zero, scale, sixteenth);
            a[1][i] = finish(mask_or<HI, ONE>(w), i, true, zero, scale, sixteenth);
            a[1][i + 2] = finish(mask_or<HI, ONE>(s), i, true, zero, scale, sixteenth);
        }
    }

    DEVICE void int8(uint4 w, const __half2 (&zero)[2], const __half2 (&scale)[2]) {
        constexpr uint32_t ONE = 0x64646464;
        const __half2 unused = __half2half2(__ushort_as_half(0));
        const uint32_t word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                a[j][i] = finish(__byte_perm(word[2 * j + i], ONE, 0x4140), i, false, zero, scale, unused);
                a[j][i + 2] = finish(__byte_perm(word[2 * j + i], ONE, 0x4342), i, false, zero, scale, unused);
            }
    }

    // 1024 + q (high nibbles: 1024 + 16 q) to q - z, or to s q + o.
    DEVICE uint32_t finish(uint32_t h, int row, bool high, const __half2 (&zero)[2], const __half2 (&scale)[2],
                           __half2 sixteenth) {
        __half2 v = *reinterpret_cast<__half2*>(&h);
        const __half2 base = __half2half2(__ushort_as_half(0x6400));        // 1024
        const __half2 minus64 = __half2half2(__ushort_as_half(0xd400));     // -64
        if constexpr (ZERO == OFFSET) {
            v = high ? __hfma2(v, sixteenth, minus64) : __hsub2(v, base);   // exact
            return half2_bits(__hfma2(v, scale[row], zero[row]));
        } else {
            // zero = 1024 + z; with high nibbles 64 + z: both exact.
            if (!high) return half2_bits(__hsub2(v, zero[row]));
            const __half2 z = __hsub2(__hsub2(base, zero[row]), __half2half2(__ushort_as_half(0x5400)));   // -z - 64
            return half2_bits(__hfma2(v, sixteenth, z));
        }
    }
};

template <int BITS, int ZERO, int SLOT, int NT, int RT, int WR, int WC, int STAGES>
struct Gemm {
    static constexpr int WARPS = WR * WC;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BN = WC * NT * 8;
    static constexpr int BT = WR * RT;                       // tiles of a block
    static constexpr int X_WORDS = BN * 8;                   // 16-byte words of a stage: 128 B a row
    static constexpr int W_WORDS = BT * BITS * 8;            // 64 inputs of 16 rows: BITS * 128 B
    static constexpr int SHARED = STAGES * (X_WORDS + W_WORDS) * 16;
    static constexpr bool EXACT = BITS != 16 && ZERO != OFFSET;   // scales applied to sums

    static DEVICE void run(const GemmArgs& p) {
        extern __shared__ uint4 shared[];
        uint4* const xs = shared;
        uint4* const ws = shared + STAGES * X_WORDS;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int wr = warp % WR, wc = warp / WR;
        const int tile0 = blockIdx.x * BT, m0 = blockIdx.y * BN;
        const int steps = p.spans * 4;                       // of 64 inputs
        const size_t row_words = size_t(p.spans) * SPAN / 8;

        auto request = [&](int step) {
            if (step < steps) {
                uint4* const x = xs + step % STAGES * X_WORDS;
                for (int i = threadIdx.x; i < X_WORDS; i += THREADS) {
                    // Rows past m repeat the last: their sums are not stored. Word u of row r
                    // stands at u ^ 4 (r % 2): lanes of two rows then read distinct banks.
                    const int r = i / 8, u = i % 8;
                    const uint4* from = reinterpret_cast<const uint4*>(p.x) + size_t(min(m0 + r, p.m - 1)) * row_words + step * 8 + u;
                    copy_async(x + r * 8 + (u ^ (r % 2 * 4)), from);
                }
                uint4* const w = ws + step % STAGES * W_WORDS;
                for (int i = threadIdx.x; i < W_WORDS; i += THREADS) {
                    const int tile = min(tile0 + i / (BITS * 8), p.tiles - 1);
                    copy_async(w + i, p.codes + (size_t(tile) * p.spans * 4 + step) * (BITS * 8) + i % (BITS * 8));
                }
            }
            copy_commit();
        };

        float acc[RT][NT][4] = {};
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) request(s);

        for (int step = 0; step < steps; step++) {
            // Scales of this step's slots: 64 inputs are one slot, or two of 32.
            constexpr int SLOTS = SLOT == 32 ? 2 : 1;
            __half2 scale[RT][SLOTS][2], zero[RT][SLOTS][2];
            if constexpr (BITS != 16) {
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    const int tile = min(tile0 + wr * RT + r, p.tiles - 1);
                    const uint8_t* meta = p.meta + (size_t(tile) * p.spans + step / 4) * p.meta_bytes;
                    const uint8_t* z = meta + p.groups * 32;
#pragma unroll
                    for (int s = 0; s < SLOTS; s++) {
                        const int at = (SLOT == 32 ? step % 4 * 2 + s : step % 4 * p.groups >> 2) * 8 + g;
                        const __half2 both = __ldg(reinterpret_cast<const __half2*>(meta) + at);
                        scale[r][s][0] = __low2half2(both), scale[r][s][1] = __high2half2(both);
                        if constexpr (ZERO == OFFSET) {
                            const __half2 o = __ldg(reinterpret_cast<const __half2*>(z) + at);
                            zero[r][s][0] = __low2half2(o), zero[r][s][1] = __high2half2(o);
                        } else {
                            int z0 = BITS == 4 ? 8 : 128, z1 = z0;
                            if constexpr (ZERO == INT && BITS == 4) z0 = __ldg(z + at) & 15, z1 = __ldg(z + at) >> 4;
                            if constexpr (ZERO == INT && BITS == 8) z0 = __ldg(z + at * 2), z1 = __ldg(z + at * 2 + 1);
                            zero[r][s][0] = __half2half2(__int2half_rn(1024 + z0));
                            zero[r][s][1] = __half2half2(__int2half_rn(1024 + z1));
                        }
                    }
                }
            }
            copy_wait<STAGES - 2>();
            __syncthreads();
            request(step + STAGES - 1);
            const uint4* const x = xs + step % STAGES * X_WORDS + (wc * NT * 8 + g) * 8;
            const uint4* const w = ws + step % STAGES * W_WORDS + wr * RT * BITS * 8 + lane;

            float part[EXACT ? RT : 1][EXACT ? NT : 1][4] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int s = SLOT == 32 ? c : 0;
                Operand<BITS, ZERO> op[RT];
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    if constexpr (BITS == 4) {
                        const uint2 v = reinterpret_cast<const uint2*>(w + r * 32)[c];
                        op[r].int4(v.x, v.y, zero[r][s], scale[r][s]);
                    } else if constexpr (BITS == 8) {
                        op[r].int8(w[r * 64 + c * 32], zero[r][s], scale[r][s]);
                    } else {
                        const uint4 a = w[r * 128 + c * 64], b = w[r * 128 + c * 64 + 32];
                        op[r].a[0][0] = a.x, op[r].a[0][1] = a.y, op[r].a[0][2] = a.z, op[r].a[0][3] = a.w;
                        op[r].a[1][0] = b.x, op[r].a[1][1] = b.y, op[r].a[1][2] = b.z, op[r].a[1][3] = b.w;
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const uint4 b = x[n * 64 + ((c * 4 + t) ^ (g % 2 * 4))];
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        float(&sum)[4] = EXACT ? part[EXACT ? r : 0][EXACT ? n : 0] : acc[r][n];
                        mma_16816(sum, op[r].a[0][0], op[r].a[0][1], op[r].a[0][2], op[r].a[0][3], b.x, b.y);
                        mma_16816(sum, op[r].a[1][0], op[r].a[1][1], op[r].a[1][2], op[r].a[1][3], b.z, b.w);
                    }
                }
                if (EXACT && (SLOT == 32 || c == 1)) {
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        const float s0 = __low2float(scale[r][s][0]), s1 = __low2float(scale[r][s][1]);
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            float(&from)[4] = part[EXACT ? r : 0][EXACT ? n : 0];
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                acc[r][n][i] = fmaf(i < 2 ? s0 : s1, from[i], acc[r][n][i]);
                                from[i] = 0.f;
                            }
                        }
                    }
                }
            }
        }
        copy_wait<0>();

#pragma unroll
        for (int r = 0; r < RT; r++) {
            const int tile = tile0 + wr * RT + r;
            if (tile >= p.tiles) continue;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int m = m0 + (wc * NT + n) * 8 + 2 * t + i;
                    if (m >= p.m) continue;
                    const float low = acc[r][n][i] * p.scale, high = acc[r][n][i + 2] * p.scale;
                    const int row = tile * 16 + g;
                    if (p.epilogue == GEMM_SILU) {
                        const float v = __fdividef(low, 1.f + __expf(-low)) * high;
                        p.half[size_t(m) * p.padded + tile * 8 + g] = __float2half_rn(clamp_half(v));
                    } else {
                        float* const y = p.y + size_t(m) * p.rows + row;
                        if (row < p.rows) *y = p.epilogue == GEMM_ADD ? *y + low : low;
                        if (row + 8 < p.rows) y[8] = p.epilogue == GEMM_ADD ? y[8] + high : high;
                    }
                }
            }
        }
    }
};
