// Instances of `gemv.cuh`: gemv_<bits>_<zero>_<slot>_<epilogue>, and those for products of few
// stages, ..._short.
#include "gemv.cuh"

constexpr int WARPS = 16;
// Caps registers so that a block of the attention kernel fits beside one: what follows it then
// requests its weights while it runs.
constexpr int CAP = 608;

#define GEMV(name, bits, zero, slot, epilogue, ahead, threads)                                       \
    extern "C" __global__ __launch_bounds__(threads, 1) void name(const __grid_constant__ GemvArgs p) { \
        gemv<bits, zero, slot, epilogue, WARPS, ahead>(p);                                           \
    }

#define EPILOGUES(name, bits, zero, slot)                       \
    GEMV(name##_store, bits, zero, slot, STORE, 0, WARPS * 32)  \
    GEMV(name##_add, bits, zero, slot, ADD, 0, WARPS * 32)      \
    GEMV(name##_silu, bits, zero, slot, SILU, 0, WARPS * 32)    \
    GEMV(name##_head, bits, zero, slot, HEAD, 0, WARPS * 32)

#define SHORT(name, bits, zero, slot)                           \
    EPILOGUES(name, bits, zero, slot)                           \
    GEMV(name##_store_short, bits, zero, slot, STORE, 2, CAP)   \
    GEMV(name##_add_short, bits, zero, slot, ADD, 2, CAP)       \
    GEMV(name##_silu_short, bits, zero, slot, SILU, 2, CAP)

SHORT(gemv_int4_sym_64, 4, SYM, 64)
SHORT(gemv_int4_int_64, 4, INT, 64)
SHORT(gemv_int4_offset_64, 4, OFFSET, 64)
SHORT(gemv_int4_sym_32, 4, SYM, 32)
SHORT(gemv_int4_int_32, 4, INT, 32)
SHORT(gemv_int4_offset_32, 4, OFFSET, 32)
SHORT(gemv_int8_sym_64, 8, SYM, 64)
SHORT(gemv_int8_int_64, 8, INT, 64)
SHORT(gemv_int8_offset_64, 8, OFFSET, 64)
SHORT(gemv_int8_sym_32, 8, SYM, 32)
SHORT(gemv_int8_int_32, 8, INT, 32)
SHORT(gemv_int8_offset_32, 8, OFFSET, 32)
EPILOGUES(gemv_fp16, 16, SYM, 64)
