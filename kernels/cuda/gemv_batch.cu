// Instances of `gemv_batch.cuh`: gemv_batch_<scheme>_<most rows of x>.
#include "gemv_batch.cuh"

constexpr int WARPS = 8;
// Tiles for which a piece of x is held: as many as registers allow.
constexpr int TILES = 4;

#define GEMV_BATCH(scheme)                                                                                                          \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void gemv_batch_##scheme##_8(const __grid_constant__ GemvBatchArgs p) {  \
        gemv_batch<scheme, 1, WARPS, TILES>(p);                                                                                     \
    }                                                                                                                               \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void gemv_batch_##scheme##_16(const __grid_constant__ GemvBatchArgs p) { \
        gemv_batch<scheme, 2, WARPS, TILES>(p);                                                                                     \
    }

#define GEMV_BATCH_BLOCKS(name, groups)                                                                         \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name(const __grid_constant__ GemvBatchArgs p) { \
        with_block_scheme(p.scheme, [&](auto scheme) { gemv_batch<decltype(scheme), groups, WARPS, TILES>(p); }); \
    }

INTEGER_SCHEMES(GEMV_BATCH)
GEMV_BATCH_BLOCKS(gemv_batch_blocks_8, 1)
GEMV_BATCH_BLOCKS(gemv_batch_blocks_16, 2)
GEMV_BATCH(fp16)
