// Rows of weights in FP16 times the digits of a product's inputs (`products.cuh`), by the kernel of all layers
// (`step_layers.cuh`): of products with so few rows that no records are made of them.
#pragma once

#include "products.cuh"

// Eight inputs of a product in digits (`SpanDigits`): values 8t .. 8t+7 of half `half` of a slot, less the slot's scale.
template <bool PAIRED>
DEVICE void eight_of(float (&v)[8], const SpanDigits& from, int slot, int half, int t) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from.words + slot * 8 + t) + (PAIRED ? half : 2 * half);
#pragma unroll
    for (int upper = 1; upper >= 0; upper--) {
        const uint32_t high = words[upper * (PAIRED ? 2 : 1)], low = words[16 + upper * (PAIRED ? 2 : 1)];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Bytes are those of values 0, 2, 1, 3.
            const int shift = (i % 2 * 2 + i / 2) * 8;
            v[upper * 4 + i] = float(int8_t(high >> shift) * 256 + int8_t(low >> shift));
            if (PAIRED && !upper) v[i] += v[4 + i] * 0.0625f;
        }
    }
}

// A thread's share of the products of rows `from`, `from` + `stride` and so on with the inputs: it is the `nth` of
// `threads`, of which each takes eight inputs in turn. Calls `wait` before the digits are read.
template <bool PAIRED, int ROWS, class BeforeDigits>
DEVICE void multiply_halves(float (&sums)[ROWS], const __half* from, size_t stride, const SpanDigits* digits, int inputs, int nth, int threads,
                            BeforeDigits&& wait) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.f;
#pragma unroll 1
    for (int i = nth; i < inputs / 8; i += threads) {
        const int slot = i / 8;
        uint4 rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) rows[r] = __ldg(reinterpret_cast<const uint4*>(from + r * stride) + i);
        wait();
        float x[8];
        eight_of<PAIRED>(x, digits[slot / 4], slot % 4, i / 4 % 2, i % 4);
        // Paired, scales are in sixteenths.
        const float scale = digits[slot / 4].slots[slot % 4].x * (PAIRED ? 16.f : 1.f);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float sum = 0.f;
            const uint32_t words[4] = {rows[r].x, rows[r].y, rows[r].z, rows[r].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 w = __half22float2(*reinterpret_cast<const __half2*>(&words[k]));
                sum = fmaf(x[2 * k], w.x, fmaf(x[2 * k + 1], w.y, sum));
            }
            sums[r] = fmaf(sum, scale, sums[r]);
        }
    }
}
