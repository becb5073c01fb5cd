// What the kernels of a training step share: sums of fixed order over a warp and a block.
#pragma once

#include "common.cuh"

DEVICE float warp_max(float v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

// The same value for every thread of the block. `part` is 32 floats of shared memory.
template <bool MAX>
DEVICE float block_reduce(float v, float* part) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    v = MAX ? warp_max(v) : warp_sum(v);
    __syncthreads();   // `part` may still be read by an earlier reduction
    if (lane == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < warps ? part[lane] : (MAX ? -INFINITY : 0.f);
    return MAX ? warp_max(v) : warp_sum(v);
}
