// Up to 4 or 16 rows of x times a weight in a trellis code: trellis_rows_<code>_<rows of a group> (`trellis_rows.cuh`).
#include "trellis_rows.cuh"

#define ROWS(code)                                                                                                                            \
    extern "C" __global__ __launch_bounds__(RowsOf<code, 4>::THREADS, 1) void trellis_rows_##code##_4(const __grid_constant__ TrellisRowsArgs p) { \
        TrellisRows<code, 4>(p).run();                                                                                                        \
    }                                                                                                                                         \
    extern "C" __global__ __launch_bounds__(RowsOf<code, 16>::THREADS, 1) void trellis_rows_##code##_16(const __grid_constant__ TrellisRowsArgs p) { \
        TrellisRows<code, 16>(p).run();                                                                                                       \
    }

TRELLIS_CODES(ROWS)
