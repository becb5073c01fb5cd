// One row of activations as the decode kernels hand it on: split into two FP16 parts.
//
// A value v is stored as hi + lo with hi = fp16(v / 16) and lo = fp16(v / 16 - hi): 22 bits of
// significand, exact to 2^-21 absolutely where v is small, and room up to 1,048,000. The
// kernel that computes a row splits it once; every block that multiplies it only copies it to
// shared memory.
//
//   parts  uint4 [inputs / 32][hi, lo][4]: word t of a chunk of 32 inputs holds 8t .. 8t+7,
//          the right operand of lane (., t) for two `mma_16816`
//   sums   float4 [inputs / 8]: of each eight inputs ("cell") as stored, /16: {inputs 0..3,
//          inputs 4..7, sum of squares before gain and split (RMSNorm only), -}
//
// Both are padded to spans of 256 inputs with zeros, which are never written.
#pragma once

#include "common.cuh"

constexpr float SPLIT_SCALE = 0.0625f;

struct SplitRow {
    uint4* parts;
    float4* sums;
};

// Lane l of eight consecutive lanes holds v = input 8 cell + l. `square` is that lane's share of
// the sum of squares. Inactive cells pass active = false; all lanes of a warp take part.
DEVICE void store_cell(const SplitRow& to, int cell, int l, float v, float square, bool active) {
    float scaled = clamp_half(v * SPLIT_SCALE);
    __half hi = __float2half_rn(scaled);
    __half lo = __float2half_rn(scaled - __half2float(hi));
    float sum = __half2float(hi) + __half2float(lo);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float high = __shfl_down_sync(~0u, sum, 4);
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    square += __shfl_xor_sync(~0u, square, 4);
    if (active) {
        __half* at = reinterpret_cast<__half*>(to.parts + (cell / 4) * 8 + cell % 4) + l;
        at[0] = hi;
        at[32] = lo;
        if (l == 0) to.sums[cell] = make_float4(sum, high, square, 0.f);
    }
}

// Lane t of four consecutive lanes holds inputs 2t and 2t + 1 of the cell; no squares.
DEVICE void store_cell_pairs(const SplitRow& to, int cell, int t, float x, float y, bool active) {
    x = clamp_half(x * SPLIT_SCALE);
    y = clamp_half(y * SPLIT_SCALE);
    __half2 hi = __float22half2_rn(make_float2(x, y));
    float2 h = __half22float2(hi);
    __half2 lo = __float22half2_rn(make_float2(x - h.x, y - h.y));
    float2 l = __half22float2(lo);
    float sum = (h.x + l.x) + (h.y + l.y);
    sum += __shfl_xor_sync(~0u, sum, 1);
    float high = __shfl_down_sync(~0u, sum, 2);
    if (active) {
        uint32_t* at = reinterpret_cast<uint32_t*>(to.parts + (cell / 4) * 8 + cell % 4) + t;
        at[0] = half2_bits(hi);
        at[16] = half2_bits(lo);
        if (t == 0) to.sums[cell] = make_float4(sum, high, 0.f, 0.f);
    }
}
