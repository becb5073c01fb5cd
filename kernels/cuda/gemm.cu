// Instances of `gemm.cuh`: gemm_<bits>_<zero>_<slot>_<rows of x that a block takes>.
#include "gemm.cuh"

#define GEMM(name, bits, zero, slot, nt, rt, wr, wc)                                                        \
    extern "C" __global__ __launch_bounds__(wr * wc * 32) void name(const __grid_constant__ GemmArgs p) {   \
        Gemm<bits, zero, slot, nt, rt, wr, wc, 4>::run(p);                                                  \
    }

#define SIZES(name, bits, zero, slot)                 \
    GEMM(name##_8, bits, zero, slot, 1, 1, 4, 1)      \
    GEMM(name##_16, bits, zero, slot, 2, 1, 4, 1)     \
    GEMM(name##_64, bits, zero, slot, 8, 1, 4, 1)     \
    GEMM(name##_128, bits, zero, slot, 8, 2, 4, 2)

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
