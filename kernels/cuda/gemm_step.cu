// Instances of `gemm_step.cuh`: gemm_step_<scheme>_<weight rows>x<rows of x> of a block.
// Only for sm_90a.
#include "gemm_step.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

#define GEMM(name, scheme, n, wr)                                                                                 \
    extern "C" __global__ __launch_bounds__(wr * 128 + 32, 1) void name(const __grid_constant__ GemmStepArgs p) { \
        GemmStep<scheme, n, wr>::run(p);                                                                          \
    }

#define HEIGHTS(scheme, n)                           \
    GEMM(gemm_step_##scheme##_64x##n, scheme, n, 1)  \
    GEMM(gemm_step_##scheme##_128x##n, scheme, n, 2) \
    GEMM(gemm_step_##scheme##_192x##n, scheme, n, 3)

#define SIZES(scheme)   \
    HEIGHTS(scheme, 32) \
    HEIGHTS(scheme, 64) \
    GEMM(gemm_step_##scheme##_256x32, scheme, 32, 4)

INTEGER_SCHEMES(SIZES)
SIZES(fp16)

#endif
