// Rounding of a weight [rows, n] to a trellis code, tile after tile of 32 columns: the search for the sequences of a tile
// (`trellis_search.cuh`), and what errors that are fed to later columns and the choice of scales need.
// quantize/src/trellis/round.rs is the same for CPUs.
#include "grad.cuh"
#include "trellis_search.cuh"

#define TRELLIS_SEARCH(name, V, SIDE)                                                                                     \
    extern "C" __global__ void __launch_bounds__(SEARCH_THREADS, 2) name(const __grid_constant__ TrellisSearchArgs p) {   \
        extern __shared__ __align__(16) uint8_t shared[];                                                                 \
        TrellisSearch<V, SIDE>(p, shared).run();                                                                          \
    }
TRELLIS_SEARCH(trellis_search_sum_1, 1, 1)
TRELLIS_SEARCH(trellis_search_sum_2, 1, 2)
TRELLIS_SEARCH(trellis_search_sum_4, 1, 4)
TRELLIS_SEARCH(trellis_search_octagon_2, 2, 2)
TRELLIS_SEARCH(trellis_search_octagon_4, 2, 4)

// errors := errors U_bb^-1, where U_bb is the block of the tile's columns. A warp has a row, a lane a column.
struct TrellisErrorsArgs {
    float* errors;    // [rows, TILE]
    const float* u;   // [n, n], upper triangular
    int rows, n;
    int start, pad;
};

extern "C" __global__ void __launch_bounds__(256) trellis_errors(const __grid_constant__ TrellisErrorsArgs p) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    float* const own = p.errors + (long long)row * TILE + lane;
    float error = *own;
    for (int j = 0; j < TILE; j++) {
        const float u = p.u[(long long)(p.start + j) * p.n + p.start + lane];
        const float divided = __shfl_sync(~0u, error, j) / __shfl_sync(~0u, u, j);
        if (lane == j) error = divided;
        if (lane > j) error -= divided * u;
    }
    *own = error;
}

// Signs and the orthonormal Hadamard transform of each 128 values of the lines of H: of its rows, or of its columns.
// With `diagonal`, that takes the place of H's. Grid: (blocks of a line, lines). `to` may be `from`.
struct TrellisTransformArgs {
    const float* from;       // [n, n]
    float* to;               // [n, n]
    const float* signs;      // [n]
    const float* diagonal;   // [n], or null
    int n, columns;
};

extern "C" __global__ void __launch_bounds__(128) trellis_transform(const __grid_constant__ TrellisTransformArgs p) {
    __shared__ float values[128];
    const int t = threadIdx.x, line = blockIdx.y, i = blockIdx.x * 128 + t;
    const long long at = p.columns ? (long long)i * p.n + line : (long long)line * p.n + i;
    float v = p.diagonal && i == line ? p.diagonal[i] : p.from[at];
    v *= p.signs[i];
    for (int half = 1; half < 128; half *= 2) {
        values[t] = v;
        __syncthreads();
        const float other = values[t ^ half];
        v = t & half ? other - v : v + other;
        __syncthreads();
    }
    p.to[at] = v * 0.088388348f;   // 1 / sqrt 128
}

// dots[row] = (weighted w, weighted values): their quotient is the scale with which the row's values have the least
// error. A block has a row.
struct TrellisDotsArgs {
    const float* weighted;   // [rows, n]: values times H
    const float* w;          // [rows, n]
    const float* values;     // [rows, n]
    double2* dots;           // [rows]
    int n, pad;
};

extern "C" __global__ void __launch_bounds__(256) trellis_dots(const __grid_constant__ TrellisDotsArgs p) {
    __shared__ double2 sums[256];
    const long long row = (long long)blockIdx.x * p.n;
    double2 sum = {0.0, 0.0};
    for (int i = threadIdx.x; i < p.n; i += 256) {
        const double weighted = p.weighted[row + i];
        sum.x += weighted * p.w[row + i], sum.y += weighted * p.values[row + i];
    }
    sums[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        sums[threadIdx.x].x += sums[threadIdx.x + half].x, sums[threadIdx.x].y += sums[threadIdx.x + half].y;
    }
    if (threadIdx.x == 0) p.dots[blockIdx.x] = sums[0];
}
