// Instances of `gemm_step.cuh`: gemm_step_<scheme>_<weight rows>x<rows of x> of a block.
// Only for sm_90a.
#include "gemm_step.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

#define GEMM(name, scheme, n, wr)                                                                                 \
    extern "C" __global__ __launch_bounds__(wr * 128 + 32, 1) void name(const __grid_constant__ GemmStepArgs p) { \
        GemmStep<scheme, n, wr>::run(p);                                                                          \
    }

#define GEMM_BLOCKS(name, n, wr)                                                                                  \
    extern "C" __global__ __launch_bounds__(wr * 128 + 32, 1) void name(const __grid_constant__ GemmStepArgs p) { \
        with_block_scheme(p.scheme, [&](auto scheme) { GemmStep<decltype(scheme), n, wr>::run(p); });             \
    }
#define BLOCK_HEIGHTS(n)                          \
    GEMM_BLOCKS(gemm_step_blocks_64x##n, n, 1)    \
    GEMM_BLOCKS(gemm_step_blocks_128x##n, n, 2)   \
    GEMM_BLOCKS(gemm_step_blocks_192x##n, n, 3)

#define HEIGHTS(scheme, n)                           \
    GEMM(gemm_step_##scheme##_64x##n, scheme, n, 1)  \
    GEMM(gemm_step_##scheme##_128x##n, scheme, n, 2) \
    GEMM(gemm_step_##scheme##_192x##n, scheme, n, 3)

#define SIZES(scheme)   \
    HEIGHTS(scheme, 32) \
    HEIGHTS(scheme, 64) \
    GEMM(gemm_step_##scheme##_256x32, scheme, 32, 4)

INTEGER_SCHEMES(SIZES)
BLOCK_HEIGHTS(32)
BLOCK_HEIGHTS(64)
GEMM_BLOCKS(gemm_step_blocks_256x32, 32, 4)
SIZES(fp16)

#endif
