// Instances of `attention_decode.cuh`: of rows of different sequences, of runs of rows, and of both
// where `attention_shared` has read the first pages.
#include "attention_decode.cuh"

#define ATTENTION(name, int8, rows, shared)                                                                  \
    extern "C" __global__ __launch_bounds__(128) void name(const __grid_constant__ AttentionArgs p) {        \
        attention_decode<int8, rows, shared>(p);                                                             \
    }

ATTENTION(attention_decode_fp16, false, 1, false)
ATTENTION(attention_decode_int8, true, 1, false)
ATTENTION(attention_run_fp16, false, MOST_RUN, false)
ATTENTION(attention_run_int8, true, MOST_RUN, false)
ATTENTION(attention_rest_fp16, false, 1, true)
ATTENTION(attention_rest_int8, true, 1, true)
ATTENTION(attention_run_rest_fp16, false, MOST_RUN, true)
ATTENTION(attention_run_rest_int8, true, MOST_RUN, true)
