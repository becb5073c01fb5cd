// Instances of `step_cluster.cuh`: step_attend_int4_<zero>_64_<query heads of a key head>,
// step_gated_int4_<zero>_64, and step_collect.
#include "step_cluster.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr int WARPS = 8;

// Two blocks fit on a multiprocessor: the next kernel's weights are on their way while one runs.
#define HALF(name, group, zero)                                                                                  \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 2) void name(const __grid_constant__ ClusterArgs p) {    \
        cluster_half<group, zero, WARPS>(p);                                                                     \
    }

HALF(step_attend_int4_sym_64_2, 2, SYM)
HALF(step_attend_int4_int_64_2, 2, INT)
HALF(step_attend_int4_offset_64_2, 2, OFFSET)
HALF(step_attend_int4_sym_64_4, 4, SYM)
HALF(step_attend_int4_int_64_4, 4, INT)
HALF(step_attend_int4_offset_64_4, 4, OFFSET)
HALF(step_gated_int4_sym_64, 0, SYM)
HALF(step_gated_int4_int_64, 0, INT)
HALF(step_gated_int4_offset_64, 0, OFFSET)

extern "C" __global__ __launch_bounds__(1024) void step_collect(const __grid_constant__ CollectArgs p) { cluster_collect(p); }

#endif
