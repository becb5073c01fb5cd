// A record of codes in shared memory times digits of activations, by one warp.
//
// As in `gemv.cuh`, the codes are the left operand of tensor-core products in integers, and each pair of
// columns of the right one takes a slot of 64 or 32 inputs: column 2j the high digits of slot j and column
// 2j + 1 the low ones, zero outside slot j. Lane (g, t) ends with the sums of slot t of rows g and g + 8. Of
// slots of 32 inputs the first four and the last four of a record come one after the other.
//
// A byte of INT4 codes holds a low nibble l and a high nibble h, which meet x_l and x_h. Since
// l x_l + h x_h = l (x_l - x_h / 16) + (l + 16 h) x_h / 16, only the low nibbles have to be cut out where
// digits are paired: those in place of x_l are those of x_l - x_h / 16. Products of a mix, which has codes of
// other widths too, take plain digits.
#pragma once

#include <stddef.h>

#include "weights.cuh"

// The greatest |x| of a slot in digits. Paired, the greatest of x_l - x_h / 16 is 32,512 then, which fits two
// signed bytes.
template <bool PAIRED>
constexpr float MOST_DIGITS = PAIRED ? 32512.f / 1.0625f : 32512.f;

// 256 inputs in digits.
struct SpanDigits {
    // [slot of 64][high, low][4 lanes]: operands, which are words of low and high nibbles of the first 32 inputs
    // and of the second. Paired: low nibbles of both, then high ones.
    uint4 words[32];
    // For each 64 inputs their scale, the sum of their values, and the sum of squares of x. Plain: the sum of the
    // first 32 values, and at the end that of the second.
    float4 slots[4];
};

// 64 values as digits; lane l has values 2l and 2l + 1, and gets one word of the operand.
template <bool PAIRED>
struct SlotDigits {
    uint32_t word;
    float scale, sum, second = 0.f;   // as in `SpanDigits::slots`

    // `square` becomes its sum over the warp, step by step between others that wait for each other.
    DEVICE SlotDigits(float2 v, int lane, float& square) {
        square += __shfl_xor_sync(~0u, square, 16);
        const float most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(fabsf(v.x), fabsf(v.y)))));
        square += __shfl_xor_sync(~0u, square, 8);
        // Where all are tiny the reciprocal stays finite, and the digits zero.
        const float inverse = most > 1e-30f ? __fdividef(MOST_DIGITS<PAIRED>, most) : 0.f;
        int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
        // Values 0..3 of each eight meet low nibbles, values 4..7 high ones.
        const bool upper = lane & 2;
        square += __shfl_xor_sync(~0u, square, 4);
        if constexpr (PAIRED) {
            const int others = __shfl_xor_sync(~0u, (a & 0xffff) | b << 16, 2);
            if (!upper) {
                a = __float2int_rn(fmaf(v.x, inverse, float(int16_t(others)) * -0.0625f));
                b = __float2int_rn(fmaf(v.y, inverse, float(others >> 16) * -0.0625f));
            }
        }
        square += __shfl_xor_sync(~0u, square, 2);
        // The low byte counts as signed: what it takes too much, the high one gets back.
        const uint32_t low = (a & 255) | (b & 255) << 16;
        const uint32_t high = ((a + 128) >> 8 & 255) | ((b + 128) >> 8 & 255) << 16;
        const uint32_t got = __shfl_xor_sync(~0u, lane % 2 ? high : low, 1);
        square += __shfl_xor_sync(~0u, square, 1);
        word = lane % 2 ? got | low << 8 : high | got << 8;
        if constexpr (PAIRED) {
            scale = most * (0.0625f / MOST_DIGITS<PAIRED>);
            sum = scale * float(__reduce_add_sync(~0u, (a + b) * (upper ? 17 : 16)));
        } else {
            scale = most * (1.f / MOST_DIGITS<PAIRED>);
            const int all = __reduce_add_sync(~0u, a + b), last = __reduce_add_sync(~0u, lane < 16 ? 0 : a + b);
            sum = scale * float(all - last), second = scale * float(last);
        }
    }

    // Which of the slot's 32 words a lane has.
    static DEVICE int index(int lane) {
        const int m = lane / 2, upper = m % 2, chunk = m / 8;
        return (lane % 2 * 4 + m % 8 / 2) * 4 + (PAIRED ? upper * 2 + chunk : chunk * 2 + upper);
    }
};

// Adds to `y`, of rows g and g + 8, the products of records of scheme S and digits.
//
// This one: INT4 codes with a scale for 64 inputs or more, and paired digits.
template <class S, bool PAIRED = !S::TWO_LEVEL && !S::TABLE>
struct Products {
    const MetaAt<S> meta_at;
    const int lane, g, t;
    uint4 x[4] = {};   // the operand of each slot; zero where the lane's slot is another

    DEVICE Products(int groups, int lane) : meta_at(groups, lane / 4, lane % 4), lane(lane), g(lane / 4), t(lane % 4) {}

    // Of the record whose codes lie at `codes` and whose scales and zero-points at `meta`, and of the digits at
    // `row`. Calls `digits` before the digits are read, and `done` when the record has been.
    template <class BeforeDigits, class Done>
    DEVICE void add(float (&y)[2], uint32_t codes, uint32_t meta, uint32_t row, BeforeDigits&& digits, Done&& done) {
        constexpr uint32_t LOW = 0x0f0f0f0f, SLOTS = offsetof(SpanDigits, slots);
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

// Plain digits: codes in the order of INT4, with a scale for 16 inputs or more, in two levels or with a table of levels.
template <class S>
struct Products<S, false> {
    static constexpr int UNIT = 128 * S::BITS;
    const MetaAt<S> meta_at;
    const int lane, g, t;
    uint4 x[4] = {};   // by the lane's slot: its operand; zero in the places of the others

    DEVICE Products(int groups, int lane) : meta_at(groups, lane / 4, lane % 4), lane(lane), g(lane / 4), t(lane % 4) {}

    template <class BeforeDigits, class Done>
    DEVICE void add(float (&y)[2], uint32_t codes, uint32_t meta, uint32_t row, BeforeDigits&& digits, Done&& done) {
        constexpr uint32_t SLOTS = offsetof(SpanDigits, slots);
        Unit<S> w[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            w[j].load_shared(codes + lane * Unit<S>::LANE + j * UNIT, codes + Unit<S>::AT + lane * (Unit<S>::WIDTH * 4) + j * UNIT);
        Meta<S> m;
        meta_at.load(m, meta);
        digits();
#pragma unroll
        for (int half = 0; half < S::PASSES; half++) {
            int low[4] = {}, high[4] = {}, totals[4] = {};
            if constexpr (S::SLOT == 16) {
                // Half g / 2 % 2 of chunk g / 4 of 32 inputs.
                const uint32_t from = row + (2 * half + g % 2) * 64 + t * 16 + g / 4 * 8;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    load_shared_8_if(x[c], t / 2 == g / 2 % 2 ? g / 4 : 2, c, from);
                    uint32_t a[4];
                    chunk_operand<S>(a, w[half], m.levels, c);
                    multiply_operand<S>(low, a, x[c].x, x[c].y);
                }
                if (S::SUMS) multiply_ones(totals, x[0].x | x[1].x, x[0].y | x[1].y);
            } else if constexpr (S::SLOT == 64) {
#pragma unroll
                for (int j = 0; j < 4; j++) load_shared_16_if(x[j], g / 2, j, row + lane * 16);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    multiply(low, w[j], 0, x[j].x, x[j].z);
                    multiply(S::BITS == 4 ? high : low, w[j], 1, x[j].y, x[j].w);
                }
            } else {
                // Slot 4 half + g / 2 of 32 inputs: words of its place among 64, one of low and one of high nibbles.
                const uint32_t from = row + ((2 * half + g / 4) * 2 + g % 2) * 64 + t * 16 + g / 2 % 2 * 8;
#pragma unroll
                for (int j = 0; j < 4; j++) load_shared_8_if(x[j], g / 2, j, from);
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    if constexpr (S::TABLE) {
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            uint32_t a[4];
                            chunk_operand<S>(a, w[2 * half + u], m.levels, c);
                            multiply_operand<S>(low, a, x[2 * u + c].x, x[2 * u + c].y);
                        }
                    } else {
                        multiply(low, w[2 * half + u], 0, x[2 * u].x, x[2 * u + 1].x);
                        multiply(S::BITS == 4 ? high : low, w[2 * half + u], 1, x[2 * u].y, x[2 * u + 1].y);
                    }
                }
            }
            if (half == S::PASSES - 1) done();
            const float4 slot = as_floats(load_shared_16(row + SLOTS + (S::SLOT == 64 ? t : S::SLOT == 32 ? 2 * half + t / 2 : half) * 16));
            const float2 sc = m.scales(half), z = m.zeros(half);
            if constexpr (S::SLOT == 16) {
                const float unit = slot.x * OPERAND_UNIT<S>;
                y[0] = fmaf(sc.x, unit * value(low, high, 0), y[0]);
                y[1] = fmaf(sc.y, unit * value(low, high, 1), y[1]);
                if constexpr (S::ZERO == OFFSET) {   // of 16 inputs, or of 32
                    const float sum = S::SUMS ? slot.x * value(totals, high, 0) : t % 2 ? 0.f : t / 2 ? slot.w : slot.y;
                    y[0] = fmaf(z.x, sum, y[0]), y[1] = fmaf(z.y, sum, y[1]);
                }
            } else {
                const float sum = S::SLOT == 64 ? slot.y + slot.w : t % 2 ? slot.w : slot.y;
                if constexpr (S::TABLE) {
                    y[0] = fmaf(sc.x, slot.x * value(low, high, 0), y[0]);
                    y[1] = fmaf(sc.y, slot.x * value(low, high, 1), y[1]);
                } else if constexpr (S::ZERO == OFFSET) {
                    y[0] += fmaf(sc.x, slot.x * value(low, high, 0), z.x * sum);
                    y[1] += fmaf(sc.y, slot.x * value(low, high, 1), z.y * sum);
                } else {
                    y[0] = fmaf(sc.x, fmaf(slot.x, value(low, high, 0), -z.x * sum), y[0]);
                    y[1] = fmaf(sc.y, fmaf(slot.x, value(low, high, 1), -z.y * sum), y[1]);
                }
            }
        }
    }

    // Codes of low (0) or high (1) nibbles: of INT4 the high ones as they stand, 16 times their value.
    static DEVICE void multiply(int (&sum)[4], const Unit<S>& w, int upper, uint32_t b0, uint32_t b1) {
        if constexpr (S::BITS == 4) {
            const uint32_t mask = upper ? 0xf0f0f0f0 : 0x0f0f0f0f;
            mma_16832(sum, w.words.x & mask, w.words.y & mask, w.words.z & mask, w.words.w & mask, b0, b1);
        } else {
            mma_16832(sum, w.bytes(0, upper), w.bytes(1, upper), w.bytes(2, upper), w.bytes(3, upper), b0, b1);
        }
    }
    static DEVICE float value(const int (&low)[4], const int (&high)[4], int i) {
        const int v = low[2 * i] * 256 + low[2 * i + 1];
        return float(S::BITS == 4 ? v + ((high[2 * i] * 256 + high[2 * i + 1]) >> 4) : v);
    }
    static DEVICE float4 as_floats(const uint4& v) {
        return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
    }
};
