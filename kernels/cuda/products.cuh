// A record of INT4 codes in shared memory times digits of activations, by one warp.
//
// As in `gemv.cuh`, the codes are the left operand of tensor-core products in integers, and each pair of
// columns of the right one takes a slot of 64 inputs: column 2j the high digits of slot j and column
// 2j + 1 the low ones, zero outside slot j. Lane (g, t) ends with the sums of slot t of rows g and g + 8.
//
// A byte of codes holds a low nibble l and a high nibble h, which meet x_l and x_h. Since
// l x_l + h x_h = l (x_l - x_h / 16) + (l + 16 h) x_h / 16, only the low nibbles have to be cut out: the
// digits in place of x_l are those of x_l - x_h / 16.
#pragma once

#include <stddef.h>

#include "weights.cuh"

// The greatest |x| of a slot in digits: that of x_l - x_h / 16 is 32,512 then, which fits two signed
// bytes.
constexpr float MOST_PAIRED = 32512.f / 1.0625f;

// 256 inputs in digits.
struct PairedDigits {
    uint4 words[32];   // [slot][high, low][4 lanes]: operands
    float4 slots[4];   // for each 64 inputs their scale, the sum of their values, and the sum of squares of x
};

// 64 values as digits; lane l has values 2l and 2l + 1, and gets one word of the operand.
struct SlotDigits {
    uint32_t word;
    float scale, sum;

    DEVICE SlotDigits(float2 v, int lane) {
        const float most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(fabsf(v.x), fabsf(v.y)))));
        // Where all are tiny the reciprocal stays finite, and the digits zero.
        const float inverse = most > 1e-30f ? __fdividef(MOST_PAIRED, most) : 0.f;
        int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
        // Values 0..3 of each eight meet low nibbles, values 4..7 high ones.
        const bool upper = lane & 2;
        const int others = __shfl_xor_sync(~0u, (a & 0xffff) | b << 16, 2);
        if (!upper) {
            a = __float2int_rn(fmaf(v.x, inverse, float(int16_t(others)) * -0.0625f));
            b = __float2int_rn(fmaf(v.y, inverse, float(others >> 16) * -0.0625f));
        }
        // The low byte counts as signed: what it takes too much, the high one gets back.
        const uint32_t low = (a & 255) | (b & 255) << 16;
        const uint32_t high = ((a + 128) >> 8 & 255) | ((b + 128) >> 8 & 255) << 16;
        const uint32_t got = __shfl_xor_sync(~0u, lane % 2 ? high : low, 1);
        word = lane % 2 ? got | low << 8 : high | got << 8;
        scale = most * (0.0625f / MOST_PAIRED);
        sum = scale * float(__reduce_add_sync(~0u, (a + b) * (upper ? 17 : 16)));
    }

    // Which of the slot's 32 words a lane has.
    static DEVICE int index(int lane) {
        const int m = lane / 2;
        return (lane % 2 * 4 + m % 8 / 2) * 4 + m % 2 * 2 + m / 8;
    }
};

// S: a scheme of INT4 codes with one scale for 64 inputs or more.
template <class S>
struct Products {
    const MetaAt<S> meta_at;
    const int lane, g, t;
    uint4 x[4] = {};   // the operand of each slot; zero where the lane's slot is another

    DEVICE Products(int groups, int lane) : meta_at(groups, lane / 4, lane % 4), lane(lane), g(lane / 4), t(lane % 4) {}

    // Adds to `y`, of rows g and g + 8, the products of the record whose codes lie at `codes` and whose
    // scales and zero-points at `meta`, and of the digits at `row`. Calls `digits` before the digits are
    // read, and `done` when the record has been.
    template <class BeforeDigits, class Done>
    DEVICE void add(float (&y)[2], uint32_t codes, uint32_t meta, uint32_t row, BeforeDigits&& digits, Done&& done) {
        constexpr uint32_t LOW = 0x0f0f0f0f, SLOTS = offsetof(PairedDigits, slots);
        uint4 w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = load_shared_16(codes + lane * 16 + j * 512);
        Meta<S> m;
        meta_at.load(m, meta);
        digits();
#pragma unroll
        for (int j = 0; j < 4; j++) load_shared_16_if(x[j], g / 2, j, row + lane * 16);
        const uint2 slot = load_shared_8(row + SLOTS + t * 16);
        int low[4] = {}, both[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            mma_16832(low, w[j].x & LOW, w[j].y & LOW, w[j].z & LOW, w[j].w & LOW, x[j].x, x[j].y);
            mma_16832(both, w[j].x, w[j].y, w[j].z, w[j].w, x[j].z, x[j].w);
        }
        done();
        const float scale = __uint_as_float(slot.x), sum = __uint_as_float(slot.y);
        const float2 sc = m.scales(0), z = m.zeros(0);
        // In sixteenths, as `scale` is.
        const float v = float((low[0] * 256 + low[1]) * 16 + (both[0] * 256 + both[1]));
        const float u = float((low[2] * 256 + low[3]) * 16 + (both[2] * 256 + both[3]));
        if constexpr (S::ZERO == OFFSET) {
            y[0] += sc.x * (scale * v) + z.x * sum;
            y[1] += sc.y * (scale * u) + z.y * sum;
        } else {
            y[0] = fmaf(sc.x, fmaf(scale, v, -z.x * sum), y[0]);
            y[1] = fmaf(sc.y, fmaf(scale, u, -z.y * sum), y[1]);
        }
    }
};
