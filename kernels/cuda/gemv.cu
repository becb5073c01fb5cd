// Instances of `gemv.cuh`: gemv_<scheme>, and those for products of few stages, ..._short; blocks are all block schemes.
#include "gemv.cuh"

constexpr int WARPS = 16;
// Caps registers so that a block of the attention kernel fits beside one: what follows it then
// requests its weights while it runs. Codes of 5 and 6 bits would spill.
template <class S>
constexpr int CAP = S::BITS == 5 || S::BITS == 6 ? WARPS * 32 : 608;

// A kernel chooses its epilogue when it begins: chosen in its loops, that took 1 to 20 % of its time.
template <class S, int AHEAD>
DEVICE void run(const GemvArgs& p, Meeting<WARPS>& meeting) {
    if (p.epilogue == ADD) gemv<S, ADD, WARPS, AHEAD>(p, meeting);
    else if (p.epilogue == SILU) gemv<S, SILU, WARPS, AHEAD>(p, meeting);
    else if (AHEAD > 0 || p.epilogue == STORE) gemv<S, STORE, WARPS, AHEAD>(p, meeting);
    else if constexpr (AHEAD == 0) gemv<S, HEAD, WARPS, 0>(p, meeting);
}

#define GEMV(name, scheme, ahead, threads)                                                              \
    extern "C" __global__ __launch_bounds__(threads, 1) void name(const __grid_constant__ GemvArgs p) { \
        __shared__ Meeting<WARPS> meeting;                                                              \
        run<scheme, ahead>(p, meeting);                                                                 \
    }
#define GEMV_BLOCKS(name, ahead)                                                                           \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name(const __grid_constant__ GemvArgs p) { \
        __shared__ Meeting<WARPS> meeting;                                                                 \
        with_block_scheme(p.scheme, [&](auto scheme) { run<decltype(scheme), ahead>(p, meeting); });       \
    }

#define BOTH(scheme)                           \
    GEMV(gemv_##scheme, scheme, 0, WARPS * 32) \
    GEMV(gemv_##scheme##_short, scheme, 2, CAP<scheme>)

INTEGER_SCHEMES(BOTH)
GEMV_BLOCKS(gemv_blocks, 0)
GEMV_BLOCKS(gemv_blocks_short, 2)
GEMV(gemv_fp16, fp16, 0, WARPS * 32)
