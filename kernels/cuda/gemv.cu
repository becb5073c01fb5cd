// Instances of `gemv.cuh`: gemv_<bits>_<zero>_<slot>_<epilogue>.
#include "gemv.cuh"

constexpr int WARPS = 16;
constexpr int DEPTH = 3;

#define GEMV(name, bits, zero, slot, epilogue)                                                       \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 2) void name(const __grid_constant__ GemvArgs p) { \
        gemv<bits, zero, slot, epilogue, WARPS, DEPTH>(p);                                           \
    }

#define EPILOGUES(name, bits, zero, slot)          \
    GEMV(name##_store, bits, zero, slot, STORE)    \
    GEMV(name##_add, bits, zero, slot, ADD)        \
    GEMV(name##_silu, bits, zero, slot, SILU)      \
    GEMV(name##_head, bits, zero, slot, HEAD)

EPILOGUES(gemv_int4_sym_64, 4, SYM, 64)
EPILOGUES(gemv_int4_int_64, 4, INT, 64)
EPILOGUES(gemv_int4_offset_64, 4, OFFSET, 64)
EPILOGUES(gemv_int4_sym_32, 4, SYM, 32)
EPILOGUES(gemv_int4_int_32, 4, INT, 32)
EPILOGUES(gemv_int4_offset_32, 4, OFFSET, 32)
EPILOGUES(gemv_int8_sym_64, 8, SYM, 64)
EPILOGUES(gemv_int8_int_64, 8, INT, 64)
EPILOGUES(gemv_int8_offset_64, 8, OFFSET, 64)
EPILOGUES(gemv_int8_sym_32, 8, SYM, 32)
EPILOGUES(gemv_int8_int_32, 8, INT, 32)
EPILOGUES(gemv_int8_offset_32, 8, OFFSET, 32)
EPILOGUES(gemv_fp16, 16, SYM, 64)
