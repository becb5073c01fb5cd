// Instances of `gemv.cuh`: gemv_<scheme>_<epilogue>.
#include "gemv.cuh"

constexpr int WARPS = 8;
// Two blocks fit on an SM, and one of the attention kernel beside them.
constexpr int THREADS = WARPS * 32 + 48;

#define GEMV(name, scheme, epilogue)                                                                    \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void name(const __grid_constant__ GemvArgs p) { \
        gemv<scheme, epilogue, WARPS>(p);                                                               \
    }

#define EPILOGUES(scheme)                    \
    GEMV(gemv_##scheme##_store, scheme, STORE) \
    GEMV(gemv_##scheme##_add, scheme, ADD)     \
    GEMV(gemv_##scheme##_silu, scheme, SILU)   \
    GEMV(gemv_##scheme##_head, scheme, HEAD)

INTEGER_SCHEMES(EPILOGUES)
EPILOGUES(fp16)
