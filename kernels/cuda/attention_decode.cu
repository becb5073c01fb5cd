// Instances of `attention_decode.cuh`.
#include "attention_decode.cuh"

extern "C" __global__ __launch_bounds__(128) void attention_decode_fp16(const __grid_constant__ AttentionArgs p) {
    attention_decode<false>(p);
}

extern "C" __global__ __launch_bounds__(128) void attention_decode_int8(const __grid_constant__ AttentionArgs p) {
    attention_decode<true>(p);
}
