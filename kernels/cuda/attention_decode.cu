// Instances of `attention_decode.cuh`: of rows of different sequences, and of runs of rows.
#include "attention_decode.cuh"

#define ATTENTION(name, int8, rows)                                                                          \
    extern "C" __global__ __launch_bounds__(128) void name(const __grid_constant__ AttentionArgs p) {        \
        attention_decode<int8, rows>(p);                                                                     \
    }

ATTENTION(attention_decode_fp16, false, 1)
ATTENTION(attention_decode_int8, true, 1)
ATTENTION(attention_run_fp16, false, MOST_RUN)
ATTENTION(attention_run_int8, true, MOST_RUN)
