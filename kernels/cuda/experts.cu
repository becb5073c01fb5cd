// Instances of `experts.cuh`: experts_<scheme>_<up or down>, and those for products of
// few stages, ..._short.
#include "experts.cuh"

constexpr int WARPS = 16;

#define EXPERTS(name, scheme, epilogue, ahead)                                                                \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name(const __grid_constant__ ExpertsArgs a) { \
        experts<scheme, epilogue, WARPS, ahead>(a);                                                           \
    }

#define LONG(scheme)                                \
    EXPERTS(experts_##scheme##_up, scheme, SILU, 0) \
    EXPERTS(experts_##scheme##_down, scheme, ADD, 0)

#define SHORT(scheme)                                     \
    LONG(scheme)                                          \
    EXPERTS(experts_##scheme##_up_short, scheme, SILU, 2) \
    EXPERTS(experts_##scheme##_down_short, scheme, ADD, 2)

INTEGER_SCHEMES(SHORT)
LONG(fp16)
