// Instances of `step_layers.cuh`: step_layers_<scheme>, step_layers_mix; before the scheme stands hybrid, experts or both
// where layers have these; behind it, timed where the time is taken.
#include "step_layers.cuh"

constexpr int THREADS = (LAYERS_WARPS + Copies::WARPS) * 32;

#define INSTANCE(name, scheme, hybrid, experts, timed)                                                     \
    extern "C" __global__ __launch_bounds__(THREADS, 1) void name(const __grid_constant__ LayersArgs p) { \
        step_layers<scheme, hybrid, experts, timed>(p);                                                    \
    }
#define TWO(name, scheme, hybrid, experts)                          \
    INSTANCE(step_layers_##name, scheme, hybrid, experts, false)    \
    INSTANCE(step_layers_##name##_timed, scheme, hybrid, experts, true)
#define LAYERS(name, scheme)                      \
    TWO(name, scheme, false, false)               \
    TWO(hybrid_##name, scheme, true, false)       \
    TWO(experts_##name, scheme, false, true)      \
    TWO(hybrid_experts_##name, scheme, true, true)

LAYERS(int4_sym_64, int4_sym_64)
LAYERS(int4_int_64, int4_int_64)
LAYERS(int4_offset_64, int4_offset_64)
LAYERS(mix, void)
