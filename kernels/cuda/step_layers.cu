// Instances of `step_layers.cuh`: step_layers_<scheme>, step_layers_mix; before the scheme stands hybrid, experts or both
// where layers have these; behind it, timed where the time is taken, of usual weights alone.
#include "step_layers.cuh"

constexpr int THREADS = (LAYERS_WARPS + Copies::WARPS) * 32;

#define INSTANCE(name, scheme, hybrid, experts, timed)                                                     \
    extern "C" __global__ __launch_bounds__(THREADS, 1) void name(const __grid_constant__ LayersArgs p) { \
        step_layers<scheme, hybrid, experts, timed>(p);                                                    \
    }
#define LAYERS(name, scheme, timed)                                         \
    INSTANCE(step_layers_##name, scheme, false, false, timed)               \
    INSTANCE(step_layers_hybrid_##name, scheme, true, false, timed)         \
    INSTANCE(step_layers_experts_##name, scheme, false, true, timed)        \
    INSTANCE(step_layers_hybrid_experts_##name, scheme, true, true, timed)

LAYERS(int4_sym_64, int4_sym_64, false)
LAYERS(int4_int_64, int4_int_64, false)
LAYERS(int4_offset_64, int4_offset_64, false)
LAYERS(mix, void, false)
LAYERS(int4_int_64_timed, int4_int_64, true)
LAYERS(mix_timed, void, true)
