// Instances of `attention_decode.cuh`: of rows of different sequences (of wide heads of runs too), of runs of rows, and of both
// where `attention_shared` has read the first pages.
#include "attention_decode.cuh"

#define ATTENTION(name, int8, rows, shared, dim)                                                                              \
    extern "C" __global__ __launch_bounds__(AttentionBlock<dim>::WARPS * 32) void name(const __grid_constant__ AttentionArgs p) { \
        attention_decode<int8, rows, shared, dim>(p);                                                                           \
    }

ATTENTION(attention_decode_fp16, false, 1, false, HEAD_DIM)
ATTENTION(attention_decode_int8, true, 1, false, HEAD_DIM)
ATTENTION(attention_decode_wide_fp16, false, 1, false, WIDE_HEAD_DIM)
ATTENTION(attention_decode_wide_int8, true, 1, false, WIDE_HEAD_DIM)
ATTENTION(attention_run_fp16, false, MOST_RUN, false, HEAD_DIM)
ATTENTION(attention_run_int8, true, MOST_RUN, false, HEAD_DIM)
ATTENTION(attention_rest_fp16, false, 1, true, HEAD_DIM)
ATTENTION(attention_rest_int8, true, 1, true, HEAD_DIM)
ATTENTION(attention_run_rest_fp16, false, MOST_RUN, true, HEAD_DIM)
ATTENTION(attention_run_rest_int8, true, MOST_RUN, true, HEAD_DIM)
