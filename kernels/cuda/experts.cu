// Instances of `experts.cuh`: experts_<bits>_<zero>_<slot>_<up or down>, and those for products of
// few stages, ..._short.
#include "experts.cuh"

constexpr int WARPS = 16;

#define EXPERTS(name, bits, zero, slot, epilogue, ahead)                                                   \
    extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void name(const __grid_constant__ ExpertsArgs a) { \
        experts<bits, zero, slot, epilogue, WARPS, ahead>(a);                                              \
    }

#define LONG(name, bits, zero, slot)              \
    EXPERTS(name##_up, bits, zero, slot, SILU, 0) \
    EXPERTS(name##_down, bits, zero, slot, ADD, 0)

#define SHORT(name, bits, zero, slot)                   \
    LONG(name, bits, zero, slot)                        \
    EXPERTS(name##_up_short, bits, zero, slot, SILU, 2) \
    EXPERTS(name##_down_short, bits, zero, slot, ADD, 2)

SHORT(experts_int4_sym_64, 4, SYM, 64)
SHORT(experts_int4_int_64, 4, INT, 64)
SHORT(experts_int4_offset_64, 4, OFFSET, 64)
SHORT(experts_int4_sym_32, 4, SYM, 32)
SHORT(experts_int4_int_32, 4, INT, 32)
SHORT(experts_int4_offset_32, 4, OFFSET, 32)
SHORT(experts_int8_sym_64, 8, SYM, 64)
SHORT(experts_int8_int_64, 8, INT, 64)
SHORT(experts_int8_offset_64, 8, OFFSET, 64)
SHORT(experts_int8_sym_32, 8, SYM, 32)
SHORT(experts_int8_int_32, 8, INT, 32)
SHORT(experts_int8_offset_32, 8, OFFSET, 32)
LONG(experts_fp16, 16, SYM, 64)
