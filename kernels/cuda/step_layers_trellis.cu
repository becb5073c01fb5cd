// The instance of `step_layers.cuh` for trellis codes.
#include "step_layers.cuh"

constexpr int THREADS = (LAYERS_WARPS + Copies::WARPS) * 32;

extern "C" __global__ __launch_bounds__(THREADS, 1) void step_layers_trellis(const __grid_constant__ LayersArgs p) {
    step_layers<trellis_codes, false, false, false>(p);
}
