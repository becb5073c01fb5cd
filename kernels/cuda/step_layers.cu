// Instances of `step_layers.cuh`: step_layers_<scheme>, step_layers_mix; those of hybrids, step_layers_hybrid_...; and
// those that take the time, ..._timed.
#include "step_layers.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr int THREADS = LAYERS_WARPS * 32 + 32;

#define INSTANCE(name, scheme, hybrid, timed)                                                              \
    extern "C" __global__ __launch_bounds__(THREADS, 1) void name(const __grid_constant__ LayersArgs p) { \
        step_layers<scheme, hybrid, timed>(p);                                                             \
    }
#define LAYERS(name, scheme)                                       \
    INSTANCE(step_layers_##name, scheme, false, false)             \
    INSTANCE(step_layers_##name##_timed, scheme, false, true)      \
    INSTANCE(step_layers_hybrid_##name, scheme, true, false)       \
    INSTANCE(step_layers_hybrid_##name##_timed, scheme, true, true)

LAYERS(int4_sym_64, int4_sym_64)
LAYERS(int4_int_64, int4_int_64)
LAYERS(int4_offset_64, int4_offset_64)
LAYERS(mix, void)

#endif
