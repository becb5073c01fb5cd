// C[b] (+)= alpha op(A[b]) op(B[b]) in f32, on tensor cores.
//
// A block makes a 128 x 128 tile of C, eight warps of 64 x 32 each, in steps of 16 of k. f32
// operands are split in TF32 parts: with TERMS = 3, high and low, of which the three larger
// products are summed (Ootomo and Yokota, arXiv 2203.03341); with TERMS = 1 the high part alone.
// Tensor cores cut sums off instead of rounding them, so that with three terms C is off by some
// 2^-27 k (4e-6 measured at k = 528): more than in f32, far less than with one. Tiles stay in
// shared memory as they lie in memory, k-major or not, padded so that no two lanes of a fragment
// share a bank. Where C has few tiles, k is cut into `splits` parts, whose results
// `grad_gemm_sum` adds in their order.
#include "grad.cuh"

constexpr int TILE = 128, STEP = 16;

struct GradGemmArgs {
    const float* a;
    const float* b;
    float* c;
    long long stride_a, stride_b, stride_c;   // between products of the batch
    int m, n, k;
    int lda, ldb, ldc;
    int splits;     // split-k: parts of k; C is then [batch][splits][m][n], contiguous
    int part;       // length of a part, a multiple of 16
    int vector_a;   // rows of A may be read 16 bytes at a time
    int vector_b;
    int accumulate;
    float alpha;
};

// An operand's tile: 128 lines (rows of A or columns of B) by 16 of k.
template <bool K_MAJOR>   // memory runs along the lines, k is the slow dimension
struct Tile {
    static constexpr int STRIDE = K_MAJOR ? TILE + 8 : STEP + 4;
    static constexpr int SIZE = K_MAJOR ? STEP * STRIDE : TILE * STRIDE;

    DEVICE static float at(const float* tile, int line, int k) {
        return K_MAJOR ? tile[k * STRIDE + line] : tile[line * STRIDE + k];
    }

    // The thread's two quads of the tile that starts at (line0, k0).
    DEVICE static void fetch(float4 (&quads)[2], const float* x, int ld, int line0, int lines,
                             int k0, int k_end, bool vector) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = threadIdx.x + 256 * j;
            const int slow = K_MAJOR ? k0 + i / 32 : line0 + i / 4;
            const int fast = K_MAJOR ? line0 + i % 32 * 4 : k0 + i % 4 * 4;
            const int slow_end = K_MAJOR ? k_end : lines, fast_end = K_MAJOR ? lines : k_end;
            float v[4] = {};
            if (slow < slow_end) {
                const float* from = x + (long long)slow * ld + fast;
                if (vector && fast + 3 < fast_end) {
                    const float4 q = *reinterpret_cast<const float4*>(from);
                    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
                } else {
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (fast + e < fast_end) v[e] = from[e];
                }
            }
            quads[j] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }

    DEVICE static void put(float* tile, const float4 (&quads)[2]) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = threadIdx.x + 256 * j;
            float* to = K_MAJOR ? tile + i / 32 * STRIDE + i % 32 * 4 : tile + i / 4 * STRIDE + i % 4 * 4;
            *reinterpret_cast<float4*>(to) = quads[j];
        }
    }
};

DEVICE uint32_t tf32(float v) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
    return r;
}

// d[16, 8] += a[16, 8] b[8, 8]: lane (g = lane / 4, t = lane % 4) holds a[g][t], a[g+8][t],
// a[g][t+4], a[g+8][t+4], b[t][g], b[t+4][g], d[g][2t], d[g][2t+1], d[g+8][2t], d[g+8][2t+1].
DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <int N>
DEVICE void split(const float (&v)[N], uint32_t (&high)[N], uint32_t (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        high[i] = tf32(v[i]);
        low[i] = tf32(v[i] - __uint_as_float(high[i]));
    }
}

template <bool TA, bool TB, int TERMS>
DEVICE void gemm(const GradGemmArgs& p) {
    using TileA = Tile<TA>;
    using TileB = Tile<!TB>;
    __shared__ __align__(16) float sa[2][TileA::SIZE];
    __shared__ __align__(16) float sb[2][TileB::SIZE];
    const int batch = blockIdx.z / p.splits, part = blockIdx.z % p.splits;
    const int m0 = blockIdx.y * TILE, n0 = blockIdx.x * TILE;
    const int k_begin = part * p.part, k_end = min(p.k, k_begin + p.part);
    const float* a = p.a + batch * p.stride_a;
    const float* b = p.b + batch * p.stride_b;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int wm = warp / 4 * 64, wn = warp % 4 * 32;
    float sum[4][4][4] = {};
    float4 qa[2], qb[2];
    TileA::fetch(qa, a, p.lda, m0, p.m, k_begin, k_end, p.vector_a);
    TileB::fetch(qb, b, p.ldb, n0, p.n, k_begin, k_end, p.vector_b);
    TileA::put(sa[0], qa);
    TileB::put(sb[0], qb);
    __syncthreads();
    for (int k0 = k_begin, stage = 0; k0 < k_end; k0 += STEP, stage ^= 1) {
        const bool more = k0 + STEP < k_end;
        if (more) {
            TileA::fetch(qa, a, p.lda, m0, p.m, k0 + STEP, k_end, p.vector_a);
            TileB::fetch(qb, b, p.ldb, n0, p.n, k0 + STEP, k_end, p.vector_b);
        }
#pragma unroll
        for (int kk = 0; kk < STEP; kk += 8) {
            uint32_t high_b[4][2], low_b[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int n = wn + j * 8 + g;
                const float v[2] = {TileB::at(sb[stage], n, kk + t), TileB::at(sb[stage], n, kk + t + 4)};
                split(v, high_b[j], low_b[j]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int m = wm + i * 16 + g;
                const float v[4] = {
                    TileA::at(sa[stage], m, kk + t), TileA::at(sa[stage], m + 8, kk + t),
                    TileA::at(sa[stage], m, kk + t + 4), TileA::at(sa[stage], m + 8, kk + t + 4)};
                uint32_t high_a[4], low_a[4];
                split(v, high_a, low_a);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (TERMS == 3) {
                        mma_tf32(sum[i][j], low_a, high_b[j]);
                        mma_tf32(sum[i][j], high_a, low_b[j]);
                    }
                    mma_tf32(sum[i][j], high_a, high_b[j]);
                }
            }
        }
        if (more) {
            // The other stage was last read before the previous barrier.
            TileA::put(sa[stage ^ 1], qa);
            TileB::put(sb[stage ^ 1], qb);
            __syncthreads();
        }
    }
    const int ldc = p.splits > 1 ? p.n : p.ldc;
    float* c = p.c + (p.splits > 1 ? (long long)blockIdx.z * p.m * p.n : batch * p.stride_c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int m = m0 + wm + i * 16 + g + e / 2 * 8, n = n0 + wn + j * 8 + 2 * t + e % 2;
                if (m < p.m && n < p.n) {
                    float* to = c + (long long)m * ldc + n;
                    const float v = p.alpha * sum[i][j][e];
                    *to = p.accumulate ? *to + v : v;
                }
            }
        }
    }
}

#define GEMM(NAME, TA, TB, TERMS)                                                              \
    extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ GradGemmArgs p) { \
        gemm<TA, TB, TERMS>(p);                                                                \
    }
GEMM(grad_gemm_nn_3, false, false, 3)
GEMM(grad_gemm_nt_3, false, true, 3)
GEMM(grad_gemm_tn_3, true, false, 3)
GEMM(grad_gemm_tt_3, true, true, 3)
GEMM(grad_gemm_nn_1, false, false, 1)
GEMM(grad_gemm_nt_1, false, true, 1)
GEMM(grad_gemm_tn_1, true, false, 1)
GEMM(grad_gemm_tt_1, true, true, 1)

// c[i] (+)= sum over parts of x[part][i]. Grid over i.
struct GradGemmSumArgs {
    const float* x;   // [parts][n]
    float* c;         // [n]
    long long n;
    int parts;
    int accumulate;
};

extern "C" __global__ void grad_gemm_sum(const __grid_constant__ GradGemmSumArgs p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    float sum = p.accumulate ? p.c[i] : 0.f;
    for (int part = 0; part < p.parts; part++) sum += p.x[part * p.n + i];
    p.c[i] = sum;
}
