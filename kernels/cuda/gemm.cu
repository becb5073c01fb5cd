// Instances of `gemm.cuh`: gemm_<scheme>_<rows of x that a block takes>.
#include "gemm.cuh"

#define GEMM(name, scheme, nt, rt, wr, wc)                                                                \
    extern "C" __global__ __launch_bounds__(wr * wc * 32) void name(const __grid_constant__ GemmArgs p) { \
        Gemm<scheme, nt, rt, wr, wc, 4>::run(p);                                                          \
    }

#define SIZES(scheme)                            \
    GEMM(gemm_##scheme##_8, scheme, 1, 1, 4, 1)  \
    GEMM(gemm_##scheme##_16, scheme, 2, 1, 4, 1) \
    GEMM(gemm_##scheme##_64, scheme, 8, 1, 4, 1) \
    GEMM(gemm_##scheme##_128, scheme, 8, 2, 4, 2)

INTEGER_SCHEMES(SIZES)
SIZES(fp16)
