// Instances of `gemm.cuh`: gemm_<scheme>_<rows of x that a block takes>.
#include "gemm.cuh"

// A block has up to `teams` teams of four warps.
#define GEMM(name, scheme, nt, rt, teams, scaled)                                                          \
    extern "C" __global__ __launch_bounds__(teams * 128) void name(const __grid_constant__ GemmArgs p) { \
        Gemm<scheme, nt, rt, 4, teams, scaled>::run(p);                                                       \
    }

#define GEMM_BLOCKS(name, nt, rt, teams, scaled)                                                                       \
    extern "C" __global__ __launch_bounds__(teams * 128) void name(const __grid_constant__ GemmArgs p) {              \
        with_block_scheme(p.scheme, [&](auto scheme) { Gemm<decltype(scheme), nt, rt, 4, teams, scaled>::run(p); }); \
    }

// More rows of x are multiplied by `gemm_wgmma.cu` where that exists.
#if __CUDA_ARCH_FEAT_SM90_ALL
#define SIZES(scheme)                                   \
    GEMM(gemm_##scheme##_8, scheme, 1, 1, 4, false)     \
    GEMM(gemm_##scheme##_16, scheme, 2, 1, 4, false)
#define BLOCK_SIZES(name)                     \
    GEMM_BLOCKS(name##_8, 1, 1, 4, false)     \
    GEMM_BLOCKS(name##_16, 2, 1, 4, false)
#else
#define SIZES(scheme)                                   \
    GEMM(gemm_##scheme##_8, scheme, 1, 1, 4, false)     \
    GEMM(gemm_##scheme##_16, scheme, 2, 1, 4, false)    \
    GEMM(gemm_##scheme##_64, scheme, 8, 1, 4, true)     \
    GEMM(gemm_##scheme##_128, scheme, 16, 2, 2, true)
#define BLOCK_SIZES(name)                     \
    GEMM_BLOCKS(name##_8, 1, 1, 4, false)     \
    GEMM_BLOCKS(name##_16, 2, 1, 4, false)    \
    GEMM_BLOCKS(name##_64, 8, 1, 4, true)     \
    GEMM_BLOCKS(name##_128, 16, 2, 2, true)
#endif

INTEGER_SCHEMES(SIZES)
BLOCK_SIZES(gemm_blocks)
SIZES(fp16)
