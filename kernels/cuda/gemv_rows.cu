// Instances of `gemv_rows.cuh`: gemv_rows_<scheme>_<most rows of x>.
#include "gemv_rows.cuh"

#if __CUDA_ARCH__ >= 900

constexpr int WARPS = 12;

#define GEMV_ROWS(scheme, most, rows, groups)                                                                                          \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void gemv_rows_##scheme##_##most(const __grid_constant__ GemvRowsArgs p) { \
        gemv_rows<scheme, rows, groups, WARPS>(p);                                                                                     \
    }
#define GEMV_ROWS_BLOCKS(name, rows, groups)                                                                                        \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name(const __grid_constant__ GemvRowsArgs p) {                   \
        with_block_scheme(p.scheme, [&](auto scheme) { gemv_rows<decltype(scheme), rows, groups, WARPS>(p); });                   \
    }
#define GEMV_ROWS_8(scheme) GEMV_ROWS(scheme, 4, 4, 1) GEMV_ROWS(scheme, 8, 8, 1)
#define GEMV_ROWS_16(scheme) GEMV_ROWS(scheme, 16, 8, 2)

// To keep the crates of compiled code small, only Hopper, where they were measured, has all instances; newer devices
// have those for up to eight rows of the schemes that most files are in.
GEMV_ROWS_8(int4_sym_64)
GEMV_ROWS_8(int4_int_64)
GEMV_ROWS_8(int4_offset_64)
GEMV_ROWS_8(int8_sym_64)
GEMV_ROWS_8(int4_int_64_scales8)
GEMV_ROWS_8(int4_int_32_scales8)
GEMV_ROWS_8(int5_int_64_scales8)
GEMV_ROWS_8(int5_int_32_scales8)
GEMV_ROWS_8(int6_sym_64_scales8)
GEMV_ROWS_8(int6_sym_32_scales8)
GEMV_ROWS_BLOCKS(gemv_rows_blocks_4, 4, 1)
GEMV_ROWS_BLOCKS(gemv_rows_blocks_8, 8, 1)

#if __CUDA_ARCH_FEAT_SM90_ALL

GEMV_ROWS_8(int4_sym_32)
GEMV_ROWS_8(int4_int_32)
GEMV_ROWS_8(int4_offset_32)
GEMV_ROWS_8(int8_int_64)
GEMV_ROWS_8(int8_sym_32)
GEMV_ROWS_8(int8_int_32)
GEMV_ROWS_8(int8_offset_32)
INTEGER_SCHEMES(GEMV_ROWS_16)
GEMV_ROWS_BLOCKS(gemv_rows_blocks_16, 8, 2)

#endif

#endif
