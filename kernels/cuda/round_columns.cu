// GPTQ's column loop: columns in an order, each rounded to its group's grid, its error made up
// for by those after it.
//
// w is f32 [rows, n] with its columns in the order. `round_columns` takes up to 128 columns from
// `start` on through all rows: a warp owns a row, a lane four of its columns, and the errors go
// from lane to lane; U's block stays in shared memory. What the block leaves to the columns
// behind it is one product of `errors` and U, which `grad_gemm` subtracts.
#include "grad.cuh"

constexpr int COLUMNS = 128, ROWS = 16;

struct RoundColumnsArgs {
    const float* w;          // [rows, n]
    const float* u;          // [n, n], upper triangular
    const uint32_t* order;   // [n]: the column of each place
    const float* scales;     // [rows, groups]
    const float* zeros;      // [rows, groups]
    uint8_t* codes;          // [rows, n], by column
    float* errors;           // [rows, 128]
    int rows, n, group, groups;
    int start, len;
    float max_code;
    int pad;
};

// The code nearest to w, ties to even.
DEVICE float nearest_code(float w, float scale, float zero, float max_code) {
    if (scale == 0.f) return zero;
    return fminf(fmaxf(rintf(w / scale) + zero, 0.f), max_code);
}

extern "C" __global__ void __launch_bounds__(32 * ROWS) round_columns(const __grid_constant__ RoundColumnsArgs p) {
    extern __shared__ __align__(16) float block[];   // [128][128] of U; beyond `len` the identity
    for (int i = threadIdx.x; i < COLUMNS * COLUMNS; i += 32 * ROWS) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        float v = r == c ? 1.f : 0.f;
        if (r <= c && c < p.len) v = p.u[(long long)(p.start + r) * p.n + p.start + c];
        block[i] = v;
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / 32;
    if (row >= p.rows) return;
    float v[4] = {}, scale[4] = {}, zero[4] = {}, error[4], code[4];
    int column[4] = {};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int j = lane + 32 * c;
        if (j >= p.len) continue;
        column[c] = int(p.order[p.start + j]);
        v[c] = p.w[row * p.n + p.start + j];
        const long long g = row * p.groups + column[c] / p.group;
        scale[c] = p.scales[g];
        zero[c] = p.zeros[g];
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        for (int l = 0; l < 32; l++) {
            const int j = 32 * c + l;
            const float* u = block + j * COLUMNS;
            // Every lane rounds what it has; that of lane l counts. Zeros of U below the
            // diagonal leave what was rounded before as it is.
            const float q = nearest_code(v[c], scale[c], zero[c], p.max_code);
            float e = (v[c] - scale[c] * (q - zero[c])) / u[j];
            if (lane == l) error[c] = e, code[c] = q;
            e = __shfl_sync(~0u, e, l);
#pragma unroll
            for (int d = c; d < 4; d++) v[d] -= e * u[lane + 32 * d];
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int j = lane + 32 * c;
        p.errors[row * COLUMNS + j] = error[c];
        if (j < p.len) p.codes[row * p.n + column[c]] = uint8_t(code[c]);
    }
}

// to[row][i] = from[row][order[i]]. Grid: (blocks of columns, rows).
struct PermuteColumnsArgs {
    const float* from;
    const uint32_t* order;
    float* to;
    int n, pad;
};

extern "C" __global__ void permute_columns(const __grid_constant__ PermuteColumnsArgs p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.to[(long long)blockIdx.y * p.n + i] = p.from[(long long)blockIdx.y * p.n + p.order[i]];
}

// e = scale (code - zero) - w. Grid: (blocks of columns, rows).
struct RoundingErrorArgs {
    const float* w;         // [rows, n]
    const uint8_t* codes;   // [rows, n]
    const float* scales;    // [rows, groups]
    const float* zeros;     // [rows, groups]
    float* e;               // [rows, n]
    int n, group, groups, pad;
};

extern "C" __global__ void rounding_error(const __grid_constant__ RoundingErrorArgs p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    const long long at = (long long)blockIdx.y * p.n + i, g = (long long)blockIdx.y * p.groups + i / p.group;
    p.e[at] = p.scales[g] * (float(p.codes[at]) - p.zeros[g]) - p.w[at];
}

// parts[block] = sum of a[i] b[i], in f64, over every gridDim-th run of 256. Their sum is the
// caller's.
struct DotArgs {
    const float* a;
    const float* b;
    double* parts;   // [blocks]
    long long n;
};

extern "C" __global__ void __launch_bounds__(256) dot_parts(const __grid_constant__ DotArgs p) {
    __shared__ double sums[256];
    double sum = 0.0;
    for (long long i = (long long)blockIdx.x * 256 + threadIdx.x; i < p.n; i += (long long)gridDim.x * 256)
        sum += double(p.a[i]) * double(p.b[i]);
    sums[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) p.parts[blockIdx.x] = sums[0];
}

// H[i][j] /= s[i] s[j]. Grid: (blocks of columns, rows).
struct DivideMomentsArgs {
    const float* h;
    const float* s;
    float* to;
    int n, pad;
};

extern "C" __global__ void divide_moments(const __grid_constant__ DivideMomentsArgs p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    const long long at = (long long)blockIdx.y * p.n + i;
    p.to[at] = p.h[at] / (p.s[blockIdx.y] * p.s[i]);
}

// to[i] = H[i][i].
struct DiagonalArgs {
    const float* h;
    float* to;
    int n, pad;
};

extern "C" __global__ void diagonal(const __grid_constant__ DiagonalArgs p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.to[i] = p.h[(long long)i * p.n + i];
}
