// Instances of `gemm_wgmma.cuh`: gemm_<bits>_<zero>_<slot>_<weight rows>x<rows of x> of a block.
// Only for sm_90a.
#include "gemm_wgmma.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

#define GEMM(name, bits, zero, slot, n, wr, blocks)                                                                \
    extern "C" __global__ __launch_bounds__(wr * 128 + 32, blocks) void name(const __grid_constant__ WgmmaArgs p) { \
        WgmmaGemm<bits, zero, slot, n, wr, 4>::run(p);                                                              \
    }

#define SIZES(name, bits, zero, slot)               \
    GEMM(name##_64x64, bits, zero, slot, 64, 1, 3)  \
    GEMM(name##_64x128, bits, zero, slot, 128, 1, 2) \
    GEMM(name##_192x128, bits, zero, slot, 128, 3, 1)

SIZES(gemm_int4_sym_64, 4, SYM, 64)
SIZES(gemm_int4_int_64, 4, INT, 64)
SIZES(gemm_int4_offset_64, 4, OFFSET, 64)
SIZES(gemm_int4_sym_32, 4, SYM, 32)
SIZES(gemm_int4_int_32, 4, INT, 32)
SIZES(gemm_int4_offset_32, 4, OFFSET, 32)
SIZES(gemm_int8_sym_64, 8, SYM, 64)
SIZES(gemm_int8_int_64, 8, INT, 64)
SIZES(gemm_int8_offset_64, 8, OFFSET, 64)
SIZES(gemm_int8_sym_32, 8, SYM, 32)
SIZES(gemm_int8_int_32, 8, INT, 32)
SIZES(gemm_int8_offset_32, 8, OFFSET, 32)
SIZES(gemm_fp16, 16, SYM, 64)

#endif
