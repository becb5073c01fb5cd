// Instances of `gemv_rows.cuh`: gemv_rows_<scheme>_<most rows of x>.
#include "gemv_rows.cuh"

#if __CUDA_ARCH__ >= 900

constexpr int WARPS = 12;

#define GEMV_ROWS(scheme)                                                                                                        \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void gemv_rows_##scheme##_4(const __grid_constant__ GemvRowsArgs p) { \
        gemv_rows<scheme, 4, WARPS>(p);                                                                                          \
    }                                                                                                                            \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void gemv_rows_##scheme##_8(const __grid_constant__ GemvRowsArgs p) { \
        gemv_rows<scheme, 8, WARPS>(p);                                                                                          \
    }

INTEGER_SCHEMES(GEMV_ROWS)

#endif
