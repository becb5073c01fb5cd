// Instances of `gemm_step.cuh`: gemm_step_<bits>_<zero>_<slot>_<weight rows>x<rows of x> of a block.
// Only for sm_90a.
#include "gemm_step.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

#define GEMM(name, bits, zero, slot, n, wr)                                                                            \
    extern "C" __global__ __launch_bounds__(wr * 128 + 32, 1) void name(const __grid_constant__ GemmStepArgs p) {      \
        GemmStep<bits, zero, slot, n, wr>::run(p);                                                                     \
    }

#define HEIGHTS(name, bits, zero, slot, n)      \
    GEMM(name##_64x##n, bits, zero, slot, n, 1)  \
    GEMM(name##_128x##n, bits, zero, slot, n, 2) \
    GEMM(name##_192x##n, bits, zero, slot, n, 3)

#define SIZES(name, bits, zero, slot)     \
    HEIGHTS(name, bits, zero, slot, 32)   \
    HEIGHTS(name, bits, zero, slot, 64)   \
    GEMM(name##_256x32, bits, zero, slot, 32, 4)

SIZES(gemm_step_int4_sym_64, 4, SYM, 64)
SIZES(gemm_step_int4_int_64, 4, INT, 64)
SIZES(gemm_step_int4_offset_64, 4, OFFSET, 64)
SIZES(gemm_step_int4_sym_32, 4, SYM, 32)
SIZES(gemm_step_int4_int_32, 4, INT, 32)
SIZES(gemm_step_int4_offset_32, 4, OFFSET, 32)
SIZES(gemm_step_int8_sym_64, 8, SYM, 64)
SIZES(gemm_step_int8_int_64, 8, INT, 64)
SIZES(gemm_step_int8_offset_64, 8, OFFSET, 64)
SIZES(gemm_step_int8_sym_32, 8, SYM, 32)
SIZES(gemm_step_int8_int_32, 8, INT, 32)
SIZES(gemm_step_int8_offset_32, 8, OFFSET, 32)
SIZES(gemm_step_fp16, 16, SYM, 64)

#endif
