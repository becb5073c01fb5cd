// Instances of `step_layers.cuh`: step_layers_int4_<zero>_64_<query heads of a key head>, and those that take the
// time, ..._timed.
#include "step_layers.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr int THREADS = LAYERS_WARPS * 32 + 32;

#define LAYERS(name, group, zero, timed)                                                                   \
    extern "C" __global__ __launch_bounds__(THREADS, 1) void name(const __grid_constant__ LayersArgs p) { \
        step_layers<group, zero, timed>(p);                                                                \
    }
#define GROUP(group, zero, ZERO)                                        \
    LAYERS(step_layers_int4_##zero##_64_##group, group, ZERO, false)    \
    LAYERS(step_layers_int4_##zero##_64_##group##_timed, group, ZERO, true)
#define GROUPS(zero, ZERO) \
    GROUP(2, zero, ZERO)   \
    GROUP(4, zero, ZERO)   \
    GROUP(5, zero, ZERO)   \
    GROUP(8, zero, ZERO)

GROUPS(sym, SYM)
GROUPS(int, INT)
GROUPS(offset, OFFSET)

#endif
