// The best path of each sequence through a bitshift trellis, on a GPU; the same search as viterbi.c, which see.
// (nvcc -O3 -arch=sm_90 -shared -Xcompiler -fPIC)
//
// A block of 1,024 threads searches SIDE sequences at a time, which share the loads of values (L2 holds the table of
// all states). A thread has the tails thread + 1,024 i, or, where there are fewer tails, a part of the branches of one.
// Costs of tails lie in shared memory, [tails][SIDE], twice; the best branches of all steps in global memory.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

constexpr int THREADS = 1024;

template <int SIDE>
struct Best {
    float cost[SIDE];
    int branch[SIDE];
};

template <int V, int SIDE>
__device__ Best<SIDE> branches_of(int tail, int begin, int end, int tails, int step_bits, const __half *values, const float (&x)[SIDE][V],
                                  const float *cost) {
    Best<SIDE> best;
    for (int q = 0; q < SIDE; q++) best.cost[q] = 3e38f, best.branch[q] = 0;
#pragma unroll 4
    for (int h = begin; h < end; h++) {
        const int state = h * tails + tail;
        float v[V], square = 0;
        if constexpr (V == 2) {
            const float2 both = __half22float2(reinterpret_cast<const __half2 *>(values)[state]);
            v[0] = both.x, v[1] = both.y;
        } else {
            for (int k = 0; k < V; k++) v[k] = __half2float(values[state * V + k]);
        }
        for (int k = 0; k < V; k++) square = fmaf(v[k], v[k], square);
        const float *before = cost + (state >> step_bits) * SIDE;
        for (int q = 0; q < SIDE; q++) {
            float c = before[q] + square; // the square of x is the same for all states, and left out
            for (int k = 0; k < V; k++) c = fmaf(x[q][k], v[k], c);
            if (c < best.cost[q]) best.cost[q] = c, best.branch[q] = h;
        }
    }
    return best;
}

template <int V, int SIDE>
__global__ void __launch_bounds__(THREADS, 1)
    search(int state_bits, int step_bits, const __half *values, int steps, int count, int cyclic, const float *x, uint32_t *states, uint16_t *back) {
    const int drop = state_bits - step_bits, tails = 1 << drop, branches = 1 << step_bits, thread = threadIdx.x;
    extern __shared__ __align__(16) float shared[];
    float *cost = shared, *next = shared + tails * SIDE;
    float *part_cost = shared + 2 * tails * SIDE; // where threads share a tail: [THREADS][SIDE]
    int *part_branch = reinterpret_cast<int *>(part_cost + THREADS * SIDE);
    __shared__ int seam[SIDE];
    back += (size_t)blockIdx.x * steps * tails * SIDE;
    for (int s = blockIdx.x * SIDE; s < count; s += gridDim.x * SIDE) {
        for (int pass = !cyclic; pass < 2; pass++) {
            const int first = pass ? 0 : steps / 2;
            for (int i = thread; i < tails * SIDE; i += THREADS) cost[i] = !pass || !cyclic || seam[i % SIDE] == i / SIDE ? 0.0f : 1e30f;
            __syncthreads();
            for (int n = 0; n < steps; n++) {
                const int at = (first + n) % steps;
                float minus_two_x[SIDE][V];
                for (int q = 0; q < SIDE; q++)
                    for (int k = 0; k < V; k++)
                        minus_two_x[q][k] = s + q < count ? -2.0f * x[((size_t)(s + q) * steps + at) * V + k] : 0.0f;
                uint16_t *here = back + (size_t)n * tails * SIDE;
                if (tails >= THREADS) {
                    for (int tail = thread; tail < tails; tail += THREADS) {
                        const auto best = branches_of<V, SIDE>(tail, 0, branches, tails, step_bits, values, minus_two_x, cost);
                        for (int q = 0; q < SIDE; q++) next[tail * SIDE + q] = best.cost[q], here[tail * SIDE + q] = best.branch[q];
                    }
                } else {
                    const int parts = min(THREADS / tails, branches), of_part = branches / parts, begin = thread / tails * of_part;
                    if (begin < branches) {
                        const auto best = branches_of<V, SIDE>(thread % tails, begin, begin + of_part, tails, step_bits, values, minus_two_x, cost);
                        for (int q = 0; q < SIDE; q++) part_cost[thread * SIDE + q] = best.cost[q], part_branch[thread * SIDE + q] = best.branch[q];
                    }
                    __syncthreads();
                    for (int i = thread; i < tails * SIDE; i += THREADS) {
                        int from = i;
                        for (int p = 1; p < parts; p++)
                            if (part_cost[p * tails * SIDE + i] < part_cost[from]) from = p * tails * SIDE + i;
                        next[i] = part_cost[from], here[i] = part_branch[from];
                    }
                }
                __syncthreads();
                float *swap = cost;
                cost = next, next = swap;
            }
            const int q = thread / 32, lane = thread % 32;
            if (q < SIDE) {
                int tail = lane < tails ? lane : 0;
                for (int j = lane; j < tails; j += 32)
                    if (cost[j * SIDE + q] < cost[tail * SIDE + q]) tail = j;
                for (int o = 16; o; o /= 2) {
                    const int other = __shfl_xor_sync(~0u, tail, o);
                    const float a = cost[other * SIDE + q], b = cost[tail * SIDE + q];
                    if (a < b || (a == b && other < tail)) tail = other;
                }
                if (pass && cyclic) tail = seam[q];
                if (lane == 0) {
                    for (int n = steps - 1; n >= 0; n--) {
                        const uint32_t state = (uint32_t)back[((size_t)n * tails + tail) * SIDE + q] << drop | tail;
                        if (pass) {
                            if (s + q < count) states[(size_t)(s + q) * steps + n] = state;
                        } else if ((first + n) % steps == steps - 1) {
                            seam[q] = tail;
                        }
                        tail = state >> step_bits;
                    }
                }
            }
            __syncthreads();
        }
    }
}

template <int V, int SIDE>
static int launch(int state_bits, int step_bits, const void *values, int steps, int count, int cyclic, const void *x, void *states, void *back, int grid,
                  cudaStream_t stream) {
    const int tails = 1 << (state_bits - step_bits);
    const int bytes = 2 * tails * SIDE * 4 + (tails < THREADS ? THREADS * SIDE * 8 : 0);
    cudaFuncSetAttribute(search<V, SIDE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    search<V, SIDE><<<grid, THREADS, bytes, stream>>>(state_bits, step_bits, (const __half *)values, steps, count, cyclic, (const float *)x, (uint32_t *)states,
                                                      (uint16_t *)back);
    return cudaGetLastError();
}

// Returns a CUDA error. `back` holds grid * steps * tails * side numbers of 16 bits.
extern "C" int search_cuda(int state_bits, int step_bits, int width, int side, const void *values, int steps, int count, int cyclic, const void *x,
                           void *states, void *back, int grid, void *stream) {
#define CASE(V, SIDE) \
    if (width == V && side == SIDE) \
        return launch<V, SIDE>(state_bits, step_bits, values, steps, count, cyclic, x, states, back, grid, (cudaStream_t)stream);
    CASE(1, 1) CASE(1, 2) CASE(1, 4) CASE(1, 8) CASE(2, 1) CASE(2, 2) CASE(2, 4) CASE(2, 8) CASE(4, 4)
    return cudaErrorInvalidValue;
}
