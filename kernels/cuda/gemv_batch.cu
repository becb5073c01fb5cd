// Instances of `gemv_batch.cuh`: gemv_batch_<bits>_<zero>_<slot>_<most rows of x>.
#include "gemv_batch.cuh"

constexpr int WARPS = 8;
// Tiles for which a piece of x is held: as many as registers allow.
constexpr int TILES = 4;

#define GEMV_BATCH(name, bits, zero, slot)                                                                    \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name##_8(const __grid_constant__ GemvBatchArgs p) {  \
        gemv_batch<bits, zero, slot, 1, WARPS, TILES>(p);                                                     \
    }                                                                                                         \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name##_16(const __grid_constant__ GemvBatchArgs p) { \
        gemv_batch<bits, zero, slot, 2, WARPS, TILES>(p);                                                     \
    }

GEMV_BATCH(gemv_batch_int4_sym_64, 4, SYM, 64)
GEMV_BATCH(gemv_batch_int4_int_64, 4, INT, 64)
GEMV_BATCH(gemv_batch_int4_offset_64, 4, OFFSET, 64)
GEMV_BATCH(gemv_batch_int4_sym_32, 4, SYM, 32)
GEMV_BATCH(gemv_batch_int4_int_32, 4, INT, 32)
GEMV_BATCH(gemv_batch_int4_offset_32, 4, OFFSET, 32)
GEMV_BATCH(gemv_batch_int8_sym_64, 8, SYM, 64)
GEMV_BATCH(gemv_batch_int8_int_64, 8, INT, 64)
GEMV_BATCH(gemv_batch_int8_offset_64, 8, OFFSET, 64)
GEMV_BATCH(gemv_batch_int8_sym_32, 8, SYM, 32)
GEMV_BATCH(gemv_batch_int8_int_32, 8, INT, 32)
GEMV_BATCH(gemv_batch_int8_offset_32, 8, OFFSET, 32)
GEMV_BATCH(gemv_batch_fp16, 16, SYM, 64)
