// The factor that GPTQ rounds by: upper triangular U with (P H P^T + d I)^-1 = U^T U, in f64.
//
// P takes input order[i] to place i. With the places reversed, A = L L^T is an ordinary
// Cholesky factorization and U the reversed L^-1. Damped moments of activations have condition
// numbers up to 1e6 and more, for which f32 does not do.
//
// A is [np, np] row-major, np the multiple of 64 that holds n, the identity beyond n. Both
// halves go block by block of 64: the block on the diagonal is factored and inverted
// (`factor_diagonal`), and products of 64 x 64 tiles (`factor_tiles_*`) do the rest. The inverse
// takes the place of L: once the blocks below the diagonal of a column are copied aside, nothing
// needs them where they lie.
#include "common.cuh"

constexpr int SIDE = 64;

extern __shared__ __align__(16) double shared[];

// A from the moments H. An input that was never seen (`dead`) is cut off from the others and
// gets `fill` as its own moment. Each element of the diagonal grows by `noise` times itself, and by
// `damping`. Grid: (blocks of columns, rows).
struct FactorGatherArgs {
    const float* h;          // [n, n]
    const uint32_t* order;   // [n]
    const uint32_t* dead;    // [n], 0 or 1 by input
    double* a;               // [np, np]
    double fill, damping, noise;
    int n, np;
};

extern "C" __global__ void factor_gather(const __grid_constant__ FactorGatherArgs p) {
    const int i = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= p.np) return;
    double v = i == j ? 1.0 : 0.0;
    if (i < p.n && j <= i) {
        const uint32_t x = p.order[p.n - 1 - i], y = p.order[p.n - 1 - j];
        const bool dead = p.dead[x] || p.dead[y];
        v = dead ? (i == j ? p.fill : 0.0) : double(p.h[(long long)x * p.n + y]);
        if (i == j) v += p.noise * v + p.damping;
    }
    p.a[(long long)i * p.np + j] = v;
}

// Factors block k of the diagonal and writes the inverse of its factor. Not positive: `flag`
// becomes 1. One block of 256 threads.
struct FactorDiagonalArgs {
    const double* a;     // [np, np]
    double* inverse;     // [np / 64][64][64]
    uint32_t* flag;
    int np, k;
};

extern "C" __global__ void __launch_bounds__(256) factor_diagonal(const __grid_constant__ FactorDiagonalArgs p) {
    double* l = shared;                      // [64][65]
    double* x = shared + SIDE * (SIDE + 1);  // [64][65]
    auto at = [](int i, int j) { return i * (SIDE + 1) + j; };
    const double* a = p.a + ((long long)p.k * SIDE) * (p.np + 1);
    for (int e = threadIdx.x; e < SIDE * SIDE; e += 256) {
        const int i = e / SIDE, j = e % SIDE;
        l[at(i, j)] = a[(long long)i * p.np + j];
        x[at(i, j)] = i == j ? 1.0 : 0.0;
    }
    for (int j = 0; j < SIDE; j++) {
        __syncthreads();
        const double d = l[at(j, j)];
        const bool positive = d > 0.0 && isfinite(d);
        const double r = positive ? 1.0 / sqrt(d) : 1.0;
        if (!positive && threadIdx.x == 0) *p.flag = 1;
        // Column j below the diagonal, and row j of the inverse, which ends on it.
        const int i = threadIdx.x;
        if (i > j && i < SIDE) l[at(i, j)] *= r;
        if (i >= SIDE && i - SIDE <= j) x[at(j, i - SIDE)] *= r;
        __syncthreads();
        for (int e = threadIdx.x; e < SIDE * SIDE; e += 256) {
            const int row = e / SIDE, col = e % SIDE;
            if (row <= j || col > row) continue;
            if (col > j) l[at(row, col)] -= l[at(row, j)] * l[at(col, j)];
            else x[at(row, col)] -= l[at(row, j)] * x[at(j, col)];
        }
    }
    __syncthreads();
    double* out = p.inverse + (long long)p.k * SIDE * SIDE;
    for (int e = threadIdx.x; e < SIDE * SIDE; e += 256) out[e] = x[at(e / SIDE, e % SIDE)];
}

// C = alpha A op(B) (+ C) by tiles of 64 x 64, sums of 64. Grid: (tiles of columns, tiles of
// rows), or the tiles of the lower triangle counted row by row. A tile of C may be its own A
// (one column of tiles) or its own B (one row of tiles): both are read before it is written.
struct FactorTilesArgs {
    const double* a;   // [tiles * 64, 64]
    const double* b;   // [tiles * 64, 64] if transposed, else [64, tiles * 64]
    double* c;
    double alpha;
    int lda, ldb, ldc;
    int lower;
    int accumulate;
    int pad;
};

template <bool TRANSPOSED>
DEVICE void factor_tiles(const FactorTilesArgs& p) {
    constexpr int LD = SIDE + 2;
    double* a = shared;              // [k][row]
    double* b = shared + SIDE * LD;  // [k][column]
    int row = blockIdx.y, col = blockIdx.x;
    if (p.lower) {
        const long long t = blockIdx.x;
        row = int((sqrt(8.0 * double(t) + 1.0) - 1.0) / 2.0);
        while ((long long)(row + 1) * (row + 2) / 2 <= t) row++;
        while ((long long)row * (row + 1) / 2 > t) row--;
        col = int(t - (long long)row * (row + 1) / 2);
    }
    const double* from_a = p.a + (long long)row * SIDE * p.lda;
    const double* from_b = p.b + (long long)col * SIDE * (TRANSPOSED ? p.ldb : 1);
    for (int e = threadIdx.x; e < SIDE * SIDE; e += 256) {
        const int i = e / SIDE, j = e % SIDE;
        a[j * LD + i] = from_a[(long long)i * p.lda + j];
        b[TRANSPOSED ? j * LD + i : i * LD + j] = from_b[(long long)i * p.ldb + j];
    }
    __syncthreads();
    // Rows 4y.., columns x, x + 16, ..: lanes of a warp read neighbours.
    const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16;
    double sum[4][4] = {};
#pragma unroll 4
    for (int k = 0; k < SIDE; k++) {
        const double2 a0 = *reinterpret_cast<const double2*>(a + k * LD + y);
        const double2 a1 = *reinterpret_cast<const double2*>(a + k * LD + y + 2);
        const double rows[4] = {a0.x, a0.y, a1.x, a1.y};
        double cols[4];
#pragma unroll
        for (int j = 0; j < 4; j++) cols[j] = b[k * LD + x + 16 * j];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sum[i][j] = fma(rows[i], cols[j], sum[i][j]);
    }
    double* c = p.c + (long long)row * SIDE * p.ldc + col * SIDE;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            double* to = c + (long long)(y + i) * p.ldc + x + 16 * j;
            *to = p.accumulate ? fma(p.alpha, sum[i][j], *to) : p.alpha * sum[i][j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) factor_tiles_nn(const __grid_constant__ FactorTilesArgs p) {
    factor_tiles<false>(p);
}
extern "C" __global__ void __launch_bounds__(256) factor_tiles_nt(const __grid_constant__ FactorTilesArgs p) {
    factor_tiles<true>(p);
}

// Copies a column of tiles, 64 wide, to contiguous memory. A row a block of 64 threads.
struct FactorPanelArgs {
    const double* from;
    double* to;
    int ld, pad;
};

extern "C" __global__ void factor_panel(const __grid_constant__ FactorPanelArgs p) {
    p.to[(long long)blockIdx.x * SIDE + threadIdx.x] = p.from[(long long)blockIdx.x * p.ld + threadIdx.x];
}

// U from L^-1: the tiles of the diagonal are apart. A value that is not finite: `flag` becomes 1.
// Grid: (blocks of columns, rows).
struct FactorEmitArgs {
    const double* a;         // [np, np]
    const double* inverse;   // [np / 64][64][64]
    float* u;                // [n, n]
    uint32_t* flag;
    int n, np;
};

extern "C" __global__ void factor_emit(const __grid_constant__ FactorEmitArgs p) {
    const int i = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= p.n) return;
    double v = 0.0;
    if (j >= i) {
        const int row = p.n - 1 - i, col = p.n - 1 - j;
        v = row / SIDE == col / SIDE
                ? p.inverse[((long long)(row / SIDE) * SIDE + row % SIDE) * SIDE + col % SIDE]
                : p.a[(long long)row * p.np + col];
    }
    const float u = float(v);
    if (!isfinite(u)) *p.flag = 1;
    p.u[(long long)i * p.n + j] = u;
}
