// Instances of `gemv_rows.cuh`: gemv_rows_<scheme>_<most rows of x>.
#include "gemv_rows.cuh"

#if __CUDA_ARCH__ >= 900

constexpr int WARPS = 12;

#define GEMV_ROWS(scheme, most, rows, groups)                                                                                          \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void gemv_rows_##scheme##_##most(const __grid_constant__ GemvRowsArgs p) { \
        gemv_rows<scheme, rows, groups, WARPS>(p);                                                                                     \
    }
#define GEMV_ROWS_OF(scheme)     \
    GEMV_ROWS(scheme, 4, 4, 1)   \
    GEMV_ROWS(scheme, 8, 8, 1)   \
    GEMV_ROWS(scheme, 16, 8, 2)

INTEGER_SCHEMES(GEMV_ROWS_OF)

#endif
