// Instances of `experts.cuh`: experts_<scheme>, and those for products of few stages, ..._short.
#include "experts.cuh"

constexpr int WARPS = 16;

#define EXPERTS(name, scheme, ahead)                                                                          \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name(const __grid_constant__ ExpertsArgs a) { \
        __shared__ Meeting<WARPS> meeting;                                                                    \
        __shared__ __align__(16) Chosen chosen;                                                               \
        if (a.product.epilogue == SILU) experts<scheme, SILU, WARPS, ahead>(a, meeting, chosen);              \
        else experts<scheme, ADD, WARPS, ahead>(a, meeting, chosen);                                          \
    }

#define EXPERTS_BLOCKS(name, ahead)                                                                           \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name(const __grid_constant__ ExpertsArgs a) { \
        __shared__ Meeting<WARPS> meeting;                                                                    \
        __shared__ __align__(16) Chosen chosen;                                                               \
        with_block_scheme(a.product.scheme, [&](auto scheme) {                                                \
            using S = decltype(scheme);                                                                       \
            if (a.product.epilogue == SILU) experts<S, SILU, WARPS, ahead>(a, meeting, chosen);               \
            else experts<S, ADD, WARPS, ahead>(a, meeting, chosen);                                           \
        });                                                                                                   \
    }

#define BOTH(scheme)                     \
    EXPERTS(experts_##scheme, scheme, 0) \
    EXPERTS(experts_##scheme##_short, scheme, 2)

INTEGER_SCHEMES(BOTH)
EXPERTS_BLOCKS(experts_blocks, 0)
EXPERTS_BLOCKS(experts_blocks_short, 2)
EXPERTS(experts_fp16, fp16, 0)
