// Instances of `gemv.cuh`: gemv_<scheme>, and those for products of few stages, ..._short.
#include "gemv.cuh"

constexpr int WARPS = 16;
// Caps registers so that a block of the attention kernel fits beside one: what follows it then
// requests its weights while it runs. Codes of 5 and 6 bits would spill.
template <class S>
constexpr int CAP = S::BITS == 5 || S::BITS == 6 ? WARPS * 32 : 608;

// A kernel chooses its epilogue when it begins: chosen in its loops, that took 1 to 20 % of its time.
#define GEMV(name, scheme, ahead, threads)                                                              \
    extern "C" __global__ __launch_bounds__(threads, 1) void name(const __grid_constant__ GemvArgs p) { \
        __shared__ Meeting<WARPS> meeting;                                                              \
        if (p.epilogue == ADD) gemv<scheme, ADD, WARPS, ahead>(p, meeting);                             \
        else if (p.epilogue == SILU) gemv<scheme, SILU, WARPS, ahead>(p, meeting);                      \
        else if (ahead > 0 || p.epilogue == STORE) gemv<scheme, STORE, WARPS, ahead>(p, meeting);       \
        else if constexpr (ahead == 0) gemv<scheme, HEAD, WARPS, 0>(p, meeting);                        \
    }

#define BOTH(scheme)                           \
    GEMV(gemv_##scheme, scheme, 0, WARPS * 32) \
    GEMV(gemv_##scheme##_short, scheme, 2, CAP<scheme>)

INTEGER_SCHEMES(BOTH)
GEMV(gemv_fp16, fp16, 0, WARPS * 32)
