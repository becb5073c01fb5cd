// Instances of `experts.cuh`: experts_<scheme>_<up or down>.
#include "experts.cuh"

constexpr int WARPS = 8;
// As in `gemv.cu`.
constexpr int THREADS = WARPS * 32 + 48;

#define EXPERTS(name, scheme, epilogue)                                                                    \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void name(const __grid_constant__ ExpertsArgs a) { \
        experts<scheme, epilogue, WARPS>(a);                                                               \
    }

#define HALVES(scheme)                           \
    EXPERTS(experts_##scheme##_up, scheme, SILU) \
    EXPERTS(experts_##scheme##_down, scheme, ADD)

INTEGER_SCHEMES(HALVES)
HALVES(fp16)
