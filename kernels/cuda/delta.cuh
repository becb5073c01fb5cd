// What kernels of gated DeltaNets (`delta_state.cuh`) hand to products in FP16.
#pragma once

#include "columns.cuh"
#include "delta_state.cuh"

DEVICE void put_halves(__half* row, int k, float4 v) {
    *reinterpret_cast<__half2*>(row + operand_index(k)) = __float22half2_rn(make_float2(clamp_half(v.x), clamp_half(v.y)));
    *reinterpret_cast<__half2*>(row + operand_index(k + 2)) = __float22half2_rn(make_float2(clamp_half(v.z), clamp_half(v.w)));
}
