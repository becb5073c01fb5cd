// Instances of `gemm_wgmma.cuh`: gemm_<scheme>_<weight rows>x<rows of x> of a block.
// Only for sm_90a.
#include "gemm_wgmma.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

#define GEMM(name, scheme, n, wr, blocks)                                                                           \
    extern "C" __global__ __launch_bounds__(wr * 128 + 32, blocks) void name(const __grid_constant__ WgmmaArgs p) { \
        WgmmaGemm<scheme, n, wr, 4>::run(p);                                                                        \
    }

#define GEMM_BLOCKS(name, n, wr, blocks)                                                                             \
    extern "C" __global__ __launch_bounds__(wr * 128 + 32, blocks) void name(const __grid_constant__ WgmmaArgs p) { \
        with_block_scheme(p.p.scheme, [&](auto scheme) { WgmmaGemm<decltype(scheme), n, wr, 4>::run(p); });          \
    }

#define SIZES(scheme)                               \
    GEMM(gemm_##scheme##_64x64, scheme, 64, 1, 3)   \
    GEMM(gemm_##scheme##_64x128, scheme, 128, 1, 2) \
    GEMM(gemm_##scheme##_192x128, scheme, 128, 3, 1)

INTEGER_SCHEMES(SIZES)
GEMM_BLOCKS(gemm_blocks_64x64, 64, 1, 3)
GEMM_BLOCKS(gemm_blocks_64x128, 128, 1, 2)
GEMM_BLOCKS(gemm_blocks_192x128, 128, 3, 1)
SIZES(fp16)

#endif
