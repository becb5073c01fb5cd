// Instances of `gemv.cuh`: gemv_<scheme>_<epilogue>, and those for products of few
// stages, ..._short.
#include "gemv.cuh"

constexpr int WARPS = 16;
// Caps registers so that a block of the attention kernel fits beside one: what follows it then
// requests its weights while it runs. Codes of 5 and 6 bits would spill.
template <class S>
constexpr int CAP = S::BITS == 5 || S::BITS == 6 ? WARPS * 32 : 608;

#define GEMV(name, scheme, epilogue, ahead, threads)                                                    \
    extern "C" __global__ __launch_bounds__(threads, 1) void name(const __grid_constant__ GemvArgs p) { \
        gemv<scheme, epilogue, WARPS, ahead>(p);                                                        \
    }

#define EPILOGUES(scheme)                                     \
    GEMV(gemv_##scheme##_store, scheme, STORE, 0, WARPS * 32) \
    GEMV(gemv_##scheme##_add, scheme, ADD, 0, WARPS * 32)     \
    GEMV(gemv_##scheme##_silu, scheme, SILU, 0, WARPS * 32)   \
    GEMV(gemv_##scheme##_head, scheme, HEAD, 0, WARPS * 32)

#define SHORT(scheme)                                                \
    EPILOGUES(scheme)                                                \
    GEMV(gemv_##scheme##_store_short, scheme, STORE, 2, CAP<scheme>) \
    GEMV(gemv_##scheme##_add_short, scheme, ADD, 2, CAP<scheme>)     \
    GEMV(gemv_##scheme##_silu_short, scheme, SILU, 2, CAP<scheme>)

INTEGER_SCHEMES(SHORT)
EPILOGUES(fp16)
