// What the kernels of a tower share (`tower.cu`).
#pragma once

#include "exchange.cuh"

// Of a head `TOWER_DIM` values at most.
constexpr int TOWER_QUERIES = 128, TOWER_KEYS = 64, TOWER_DIM = 72;

// Keys and values are those of `tower_heads`; of its queries the scores are logarithms to base 2. Bytes: 4 `wide` for a key
// and value, for all queries of a block.
struct TowerAttentionArgs {
    const __half* heads;   // [3][heads][patches][wide]
    __half* out;           // [m][padded] in operand order
    int m;
    int patches;           // a multiple of 64
    int count;             // of heads
    int dim;
    int padded;
    int first;             // query of the grid's first block
};

// Values k .. k + 3 of a row in operand order; k is a multiple of 4.
DEVICE void store_four(__half* row, int k, float4 v) {
    *reinterpret_cast<__half2*>(row + operand_index(k)) = __float22half2_rn(make_float2(clamp_half(v.x), clamp_half(v.y)));
    *reinterpret_cast<__half2*>(row + operand_index(k + 2)) = __float22half2_rn(make_float2(clamp_half(v.z), clamp_half(v.w)));
}
