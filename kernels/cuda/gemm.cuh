// Many rows of activations times a packed weight, on tensor cores.
//
//   y[m][r] = sum_k w[r][k] * x[m][k],  x in FP16, sums in f32
//
// Codes become FP16 integers q - z exactly; products of one slot (64 inputs, 32 for groups of
// 32) are summed apart and enter y times their scale, so weights are not rounded (but for
// offsets, see `dequant.cuh`).
//
// Block: WR x WC warps; a warp computes RT tiles of 16 weight rows times NT x 8 rows of x, the
// weights as left operand. Stages of 64 inputs of x and codes come through STAGES buffers of
// shared memory. x is row-major [m][spans * 256], its inputs in the order of the products
// (`operand_index`).
//
// Of a mixture (`of_experts` not null), rows of x are sorted by the expert that multiplies them, and
// the weight is the stack of all experts, `tiles` each: a block takes the rows and the expert of one
// `ExpertRows`.
//
// Grid (rows / (WR RT 16), m / (WC NT 8)).
// Bytes: codes once per column of blocks, x once per row of blocks.
#pragma once

#include "activations.cuh"
#include "dequant.cuh"

enum GemmEpilogue { GEMM_STORE = 0, GEMM_ADD = 1, GEMM_SILU = 2 };

// Rows of x for an expert, `first` .. `end`: as many as a block takes at most. None where they are equal.
struct ExpertRows {
    int expert;
    int first;
    int end;
    int unused;
};

struct GemmArgs {
    const uint4* codes;
    const uint8_t* meta;
    const __half* x;     // [m][spans * SPAN] in operand order, zero past `inputs`
    float* y;            // STORE, ADD: [m][rows]
    __half* half;        // SILU: [m][padded] of rows / 2 values, in operand order
    const ExpertRows* of_experts;   // of a mixture: what each block of rows of x takes; or null
    int m;
    int rows;
    int tiles;
    int spans;
    int groups;
    int meta_bytes;
    int padded;
    int epilogue;
    float scale;
    int parts;           // `gemm_wgmma.cuh`: blocks that share a tile
};

// What a block of `count` rows of x, the `index`-th, takes.
DEVICE ExpertRows block_rows(const GemmArgs& p, int index, int count) {
    if (p.of_experts == nullptr) return {0, index * count, p.m, 0};
    const int4 v = __ldg(reinterpret_cast<const int4*>(p.of_experts) + index);
    return {v.x, v.y, v.z, 0};
}

template <class S, int NT, int RT, int WR, int WC, int STAGES>
struct Gemm {
    static constexpr int BITS = S::BITS, SLOT = S::SLOT;
    static constexpr int WARPS = WR * WC;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BN = WC * NT * 8;
    static constexpr int BT = WR * RT;                       // tiles of a block
    static constexpr int X_WORDS = BN * 8;                   // 16-byte words of a stage: 128 B a row
    static constexpr int W_WORDS = BT * BITS * 8;            // 64 inputs of 16 rows: BITS * 128 B
    static constexpr int SHARED = STAGES * (X_WORDS + W_WORDS) * 16;
    using Operand = Dequant<S, false>;
    static constexpr bool EXACT = Operand::EXACT;

    static DEVICE void run(const GemmArgs& p) {
        extern __shared__ uint4 shared[];
        uint4* const xs = shared;
        uint4* const ws = shared + STAGES * X_WORDS;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int wr = warp % WR, wc = warp / WR;
        const int tile0 = blockIdx.x * BT;
        const ExpertRows block = block_rows(p, blockIdx.y, BN);
        const int m0 = block.first;
        if (m0 == block.end) return;
        // Of the expert's records.
        const size_t first_record = size_t(block.expert) * p.tiles * p.spans;
        const int steps = p.spans * 4;                       // of 64 inputs
        const size_t row_words = size_t(p.spans) * SPAN / 8;

        auto request = [&](int step) {
            if (step < steps) {
                uint4* const x = xs + step % STAGES * X_WORDS;
                for (int i = threadIdx.x; i < X_WORDS; i += THREADS) {
                    // Rows past m repeat the last: their sums are not stored. Word u of row r
                    // stands at u ^ (r % 8): a matrix of eight rows then meets all banks.
                    const int r = i / 8, u = i % 8;
                    const uint4* from = reinterpret_cast<const uint4*>(p.x) + size_t(min(m0 + r, block.end - 1)) * row_words + step * 8 + u;
                    copy_async(x + r * 8 + (u ^ r % 8), from);
                }
                uint4* const w = ws + step % STAGES * W_WORDS;
                for (int i = threadIdx.x; i < W_WORDS; i += THREADS) {
                    const int tile = min(tile0 + i / (BITS * 8), p.tiles - 1);
                    copy_async(w + i, p.codes + ((first_record + size_t(tile) * p.spans) * 4 + step) * (BITS * 8) + i % (BITS * 8));
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
            Operand of[RT][SLOTS];
#pragma unroll
            for (int r = 0; r < RT; r++) {
                const int tile = min(tile0 + wr * RT + r, p.tiles - 1);
                const uint8_t* meta = p.meta + (first_record + size_t(tile) * p.spans + step / 4) * p.meta_bytes;
#pragma unroll
                for (int s = 0; s < SLOTS; s++) of[r][s].load(meta, p.groups, step, 2 * s, g);
            }
            copy_wait<STAGES - 2>();
            __syncthreads();
            request(step + STAGES - 1);
            const uint4* const x = xs + step % STAGES * X_WORDS + (wc * NT * 8 + lane % 8) * 8;
            const uint4* const w = ws + step % STAGES * W_WORDS + wr * RT * BITS * 8 + lane;

            float part[EXACT ? RT : 1][EXACT ? NT : 1][4] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int s = SLOT == 32 ? c : 0;
                uint32_t a[RT][2][4];
#pragma unroll
                for (int r = 0; r < RT; r++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        of[r][s].product(a[r][i], Operand::unit(w + r * BITS * 8, 2 * c + i, lane), 2 * c + i);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const uint4 b = load_matrices(x + n * 64 + ((c * 4 + lane / 8) ^ lane % 8));
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        float(&sum)[4] = EXACT ? part[EXACT ? r : 0][EXACT ? n : 0] : acc[r][n];
                        mma_16816(sum, a[r][0][0], a[r][0][1], a[r][0][2], a[r][0][3], b.x, b.y);
                        mma_16816(sum, a[r][1][0], a[r][1][1], a[r][1][2], a[r][1][3], b.z, b.w);
                    }
                }
                if (EXACT && (SLOT == 32 || c == 1)) {
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        const float s0 = __low2float(of[r][s].scale[0]), s1 = __low2float(of[r][s].scale[1]);
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
                    if (m >= block.end) continue;
                    const float low = acc[r][n][i] * p.scale, high = acc[r][n][i + 2] * p.scale;
                    const int row = tile * 16 + g;
                    if (p.epilogue == GEMM_SILU) {
                        const float v = __fdividef(low, 1.f + __expf(-low)) * high;
                        p.half[size_t(m) * p.padded + operand_index(tile * 8 + g)] = __float2half_rn(clamp_half(v));
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
