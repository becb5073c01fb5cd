// Rows of weights in FP16 times the digits of a product's inputs (`products.cuh`), by the kernel of all layers
// (`step_layers.cuh`): of products with so few rows that no records are made of them.
#pragma once

#include "products.cuh"

// Sixteen inputs of a product in digits (`SpanDigits`): values 8t .. 8t+7 of both halves of a slot, less the slot's scale.
template <bool PAIRED>
DEVICE void sixteen_of(float (&v)[2][8], const SpanDigits& from, int slot, int t) {
    const uint4 high = from.words[slot * 8 + t], low = from.words[slot * 8 + 4 + t];
    const uint32_t highs[2][2] = {{high.x, PAIRED ? high.z : high.y}, {PAIRED ? high.y : high.z, high.w}};
    const uint32_t lows[2][2] = {{low.x, PAIRED ? low.z : low.y}, {PAIRED ? low.y : low.z, low.w}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int upper = 1; upper >= 0; upper--) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Bytes are those of values 0, 2, 1, 3.
                const int shift = (i % 2 * 2 + i / 2) * 8;
                const int digits = int8_t(highs[half][upper] >> shift) * 256 + int8_t(lows[half][upper] >> shift);
                v[half][upper * 4 + i] = float(digits);
                if (PAIRED && !upper) v[half][i] += v[half][4 + i] * 0.0625f;
            }
        }
    }
}

// A thread's share of the products of rows `from`, `from` + `stride` and so on with the inputs: it is the `nth` of
// `threads`, of which each takes sixteen inputs in turn.
template <bool PAIRED, int ROWS>
DEVICE void multiply_halves(float (&sums)[ROWS], const __half* from, size_t stride, const SpanDigits* digits, int inputs, int nth, int threads) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.f;
#pragma unroll 1
    for (int i = nth; i < inputs / 16; i += threads) {
        const int slot = i / 4, t = i % 4;
        uint4 rows[ROWS][2];   // [row][half of the slot]
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) rows[r][half] = __ldg(reinterpret_cast<const uint4*>(from + r * stride + slot * 64 + half * 32 + t * 8));
        float x[2][8], products[ROWS] = {};
        sixteen_of<PAIRED>(x, digits[slot / 4], slot % 4, t);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t words[4] = {rows[r][half].x, rows[r][half].y, rows[r][half].z, rows[r][half].w};
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float2 w = __half22float2(*reinterpret_cast<const __half2*>(&words[k]));
                    products[r] = fmaf(x[half][2 * k], w.x, fmaf(x[half][2 * k + 1], w.y, products[r]));
                }
            }
        // Paired, scales are in sixteenths.
        const float scale = digits[slot / 4].slots[slot % 4].x * (PAIRED ? 16.f : 1.f);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[r] = fmaf(products[r], scale, sums[r]);
    }
}
