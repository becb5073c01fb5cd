// Up to 4 or 16 rows of x times a weight in one of EXL3's codes: exl3_rows_<bits>_<rows of a group> (`trellis_rows.cuh`).
#include "exl3_rows.cuh"

#define ROWS(bits)                                                                                                                              \
    extern "C" __global__ __launch_bounds__(RowsOf<exl3_##bits, 4>::THREADS, 1) void exl3_rows_##bits##_4(const __grid_constant__ TrellisRowsArgs p) { \
        TrellisRows<exl3_##bits, 4>(p).run();                                                                                                   \
    }                                                                                                                                           \
    extern "C" __global__ __launch_bounds__(RowsOf<exl3_##bits, 16>::THREADS, 1) void exl3_rows_##bits##_16(const __grid_constant__ TrellisRowsArgs p) { \
        TrellisRows<exl3_##bits, 16>(p).run();                                                                                                  \
    }

EXL3_BITS(ROWS)
