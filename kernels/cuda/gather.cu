// Inputs of products in the order of a weight's groups (`g_idx`), for weights that are packed with their inputs sorted.
//
//   x_to[m][k] = x[m][order[k]]      gain_to[k] = gain[order[k]]
//
// `gather`: rows of f32, and the gain of the norm that the product makes of them. Grid (inputs / 256, m + 1): the last
// row is the gain, if there is one. `gather_halves`: rows in FP16 and operand order, zero past `inputs`, a block each, which
// has the row in dynamic shared memory, 2 * padded bytes. Bytes: rows read and written once, from L2.
#include "exchange.cuh"

struct GatherArgs {
    const float* x;          // [m][inputs]
    const __half* half;      // [m][padded], of `gather_halves`
    const float* gain;       // [inputs], or null
    const uint32_t* order;   // [inputs]
    float* x_to;             // as x
    __half* half_to;         // as half
    float* gain_to;          // [inputs]
    int m;
    int inputs;
    int padded;              // a multiple of 256
    int holds_dependents;    // dependents are launched only after the end of the prerequisites
};

constexpr int GATHER_THREADS = 256;

extern "C" __global__ __launch_bounds__(GATHER_THREADS) void gather(const __grid_constant__ GatherArgs p) {
    if (!p.holds_dependents) launch_dependents();
    const int k = blockIdx.x * GATHER_THREADS + threadIdx.x, row = blockIdx.y;
    const bool there = k < p.inputs;
    const uint32_t from = there ? p.order[k] : 0;
    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();
    if (!there) return;
    if (row < p.m) p.x_to[size_t(row) * p.inputs + k] = __ldcg(p.x + size_t(row) * p.inputs + from);
    else p.gain_to[k] = p.gain[from];
}

extern "C" __global__ __launch_bounds__(GATHER_THREADS) void gather_halves(const __grid_constant__ GatherArgs p) {
    uint4* const row_vectors = reinterpret_cast<uint4*>(dynamic_shared());
    if (!p.holds_dependents) launch_dependents();
    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();
    const size_t first = size_t(blockIdx.x) * p.padded;
    const uint4* const from = reinterpret_cast<const uint4*>(p.half + first);
    for (int i = threadIdx.x; i < p.padded / 8; i += GATHER_THREADS) row_vectors[i] = __ldcg(from + i);
    __syncthreads();
    const __half* const row = reinterpret_cast<const __half*>(row_vectors);
    const __half zero = __float2half(0.f);
    // Inputs 2i and 2i + 1 are neighbours in operand order, too.
    for (int k = 2 * threadIdx.x; k < p.padded; k += 2 * GATHER_THREADS) {
        __half2 both;
        both.x = k < p.inputs ? row[operand_index(p.order[k])] : zero;
        both.y = k + 1 < p.inputs ? row[operand_index(p.order[k + 1])] : zero;
        *reinterpret_cast<__half2*>(p.half_to + first + operand_index(k)) = both;
    }
}
