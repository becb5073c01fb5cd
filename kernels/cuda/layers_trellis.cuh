// Products with weights in trellis codes (`trellis.cuh`) in the kernel of all layers (`step_layers.cuh`).
//
// Their records are units: a strip of 128 rows by a tile of 32 inputs. Strips are too coarse to be dealt to blocks, so units of
// all products are, and the outputs of all products have parts, which their readers add up in the order of blocks.
//
// Inputs are transformed and become digits 128 at a time, each 128 with a step of their own:
//
//   y[row] = row scale / 128 * sum over 128 inputs of step * (S - 127.5 * sum of digits),   S = sum of bytes of states * digits
//
// A warp's units use the eight columns of `mma_16832` in turn, a pair of columns (the two digits) each, so that lanes (g, t) have
// the sums of unit t of four. Only then do integers become floats.
#pragma once

#include "layers.cuh"
#include "trellis.cuh"

// Stands for the scheme of all weights: each is in its own code.
struct trellis_codes {};

constexpr int MOST_STRIP_PARTS = 16;   // of a strip
constexpr int CODES_OF_SUM = 1;        // which come first in the order of `with_code`; octagons follow

// 128 inputs in digits, in words of 4 bytes: of each tile
//   octagon   uint2 [2 parts of 16 inputs][hi, lo][4 t]: digits of pairs t and 4 + t of the part
//   sum       uint2 [hi, lo][4 t]: bytes of inputs t, 4 + t, .. 28 + t
// and at the end float4: the step, 127.5 steps times the sum of all digits, the sum of squares of x, 0.
template <bool OCTAGON>
struct BlockDigits {
    static constexpr int OF_TILE = OCTAGON ? 32 : 16, STEP = BLOCK / TILE * OF_TILE, WORDS = STEP + 4;
};
DEVICE int block_words(bool octagon) { return octagon ? BlockDigits<true>::WORDS : BlockDigits<false>::WORDS; }

// Sends the digits of block `block` to those that share the inputs. Lane l has transformed values 2l, 2l + 1 and 64 + 2l, 65 + 2l; `square`
// is its part of the sum of squares.
template <bool OCTAGON, class Inputs>
DEVICE void put_block(const Inputs& inputs, int block, const float (&v)[4], float square, int lane) {
    using Of = BlockDigits<OCTAGON>;
    const uint32_t at = block * Of::WORDS;
    const float most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(greatest_of<OCTAGON>(0.f, v))));
    square = warp_sum(square);
    RowDigits digits(most);
    if constexpr (OCTAGON) {
        // A lane has words (half of the block, digit), and its bits say: 0 and 1: t; 2: the first or second pair; 3: the part; 4: the tile of the half.
        // Four lanes exchange words, so that each has those of both pairs of t and t + 1, of one half and digit.
        uint32_t w[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) digits.pair(v[2 * h], v[2 * h + 1], w[h][0], w[h][1]);
        const bool odd = lane & 1, second = lane & 4;
        uint32_t pairs[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t got = __shfl_xor_sync(~0u, second ? w[h][0] : w[h][1], 4);
            pairs[h][0] = second ? got : w[h][0], pairs[h][1] = second ? w[h][1] : got;
        }
        uint32_t got[2];
#pragma unroll
        for (int i = 0; i < 2; i++) got[i] = __shfl_xor_sync(~0u, odd ? pairs[0][i] : pairs[1][i], 1);
        const uint4 four = odd ? make_uint4(got[0], got[1], pairs[1][0], pairs[1][1]) : make_uint4(pairs[0][0], pairs[0][1], got[0], got[1]);
        inputs.put(at + ((lane & 1) * 2 + lane / 16) * Of::OF_TILE + lane / 8 % 2 * 16 + (lane / 4 % 2 * 2 + lane / 2 % 2) * 4, four);
    } else {
        // Bit 0 of a lane is the upper one of t, bits 1 to 3 say which byte, bit 4 the tile of the half. Bytes are (half, lower bit of t).
        uint32_t w[2];
        digits.split({digits.round(v[0]), digits.round(v[1]), digits.round(v[2]), digits.round(v[3])}, w[0], w[1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            w[i] = __byte_perm(w[i], __shfl_xor_sync(~0u, w[i], 2), lane & 2 ? 0x3715 : 0x6240);
            w[i] = __byte_perm(w[i], __shfl_xor_sync(~0u, w[i], 4), lane & 4 ? 0x3276 : 0x5410);
            const int t = (lane & 1) * 2 + lane / 2 % 2;
            inputs.put(at + (lane / 4 % 2 * 2 + lane / 16) * Of::OF_TILE + i * 8 + t * 2 + lane / 8 % 2, w[i]);
        }
    }
    const float step = most * (1.f / 32000.f), sum = float(__reduce_add_sync(~0u, digits.sum));
    inputs.put(at + Of::STEP, make_float4(step, 127.5f * step * (OCTAGON ? sum : 4.f * sum), square, 0.f), lane);
}

// The sum of `count` parts of four values, two of them at `from` and two APART further, added to v.
template <int APART>
DEVICE float4 add_strip_parts(const uint64_t* from, size_t stride, int count, uint32_t stamp, float4 v) {
    constexpr int AT_ONCE = 4;
#pragma unroll 1
    for (; count > 0; count -= AT_ONCE, from += AT_ONCE * stride) {
        uint4 w[AT_ONCE][2];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    w[i][j] = make_uint4(0, stamp, 0, stamp);
                    if (i < count) w[i][j] = load_stamped(from + i * stride + j * APART);
                }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) there = there && has(w[i][0], stamp) && has(w[i][1], stamp);
        } while (!there);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float2 a = values_of(w[i][0]), b = values_of(w[i][1]);
            v.x += a.x, v.y += a.y, v.z += b.x, v.w += b.y;
        }
    }
    return v;
}

// Likewise of two strips, of which the other lies STRIP behind this one.
DEVICE void add_strip_parts_of_two(const uint64_t* from, size_t stride, int count, int other, uint32_t stamp, float4& v, float4& u) {
    constexpr int AT_ONCE = 3;
#pragma unroll 1
    for (int done = 0; done < max(count, other); done += AT_ONCE, from += AT_ONCE * stride) {
        uint4 w[AT_ONCE][4];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    w[i][j] = make_uint4(0, stamp, 0, stamp);
                    if (done + i < (j < 2 ? count : other)) w[i][j] = load_stamped(from + i * stride + j / 2 * STRIP + j % 2 * 64);
                }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) there = there && has(w[i][j], stamp);
        } while (!there);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float2 a = values_of(w[i][0]), b = values_of(w[i][1]), c = values_of(w[i][2]), d = values_of(w[i][3]);
            v.x += a.x, v.y += a.y, v.z += b.x, v.w += b.y;
            u.x += c.x, u.y += c.y, u.z += d.x, u.w += d.y;
        }
    }
}

// A warp's sums of a strip: of rows 16 m + g (+ 8).
struct StripSums {
    float y[8][2] = {};
    float mean = 0.f;        // what comes off all of them

    // Adds those of the lanes t, and leaves the strip's at `to`.
    DEVICE void store(uint32_t to, int lane) {
        const int g = lane / 4;
        const bool low = !(lane & 1), first = !(lane & 2);
        float half[4][2], quarter[2][2];
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) half[m][h] = (low ? y[m][h] : y[m + 4][h]) + __shfl_xor_sync(~0u, low ? y[m + 4][h] : y[m][h], 1);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) quarter[m][h] = (first ? half[m][h] : half[m + 2][h]) + __shfl_xor_sync(~0u, first ? half[m + 2][h] : half[m][h], 2);
        const int m0 = (low ? 0 : 4) + (first ? 0 : 2);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) store_shared_4(to + (16 * (m0 + m) + g + 8 * h) * 4, __float_as_uint(quarter[m][h] - mean));
    }
};

// A warp's units of a strip, four of which are integers until they are added to its sums.
template <class C>
struct StripUnits {
    using Digits = BlockDigits<C::OCTAGON>;
    StripSums& sums;
    const int lane;
    int c[8][4] = {};
    float step = 0.f;   // of the lane's unit
    int column = 0;     // of the next unit

    DEVICE StripUnits(StripSums& sums, int lane) : sums(sums), lane(lane) {}

    // The unit whose words lie at `from`, of tile `tile` of the inputs whose digits lie at `row`. Calls `digits` before the digits are read, and `done`
    // when the words have been.
    template <class BeforeDigits, class Done>
    DEVICE void add(uint32_t from, uint32_t row, int tile, BeforeDigits&& digits, Done&& done) {
        constexpr int RUNS = C::WORDS / 4;
        uint32_t words[C::WORDS];
#pragma unroll
        for (int i = 0; i < RUNS; i++) {
            const uint4 w = load_shared_16(from + lane * 16 + i * 512);
            words[4 * i] = w.x, words[4 * i + 1] = w.y, words[4 * i + 2] = w.z, words[4 * i + 3] = w.w;
        }
        if constexpr (C::WORDS % 4 == 2) {
            const uint2 w = load_shared_8(from + RUNS * 512 + lane * 8);
            words[4 * RUNS] = w.x, words[4 * RUNS + 1] = w.y;
        }
        digits();
        done();
        const uint32_t block = row + tile / 4 * (Digits::WORDS * 4), at = block + tile % 4 * (Digits::OF_TILE * 4) + lane % 8 * 8;
        const bool mine = lane / 8 == column;
        uint2 x[C::OCTAGON ? 2 : 1] = {};
        if (mine) {
#pragma unroll
            for (int i = 0; i < (C::OCTAGON ? 2 : 1); i++) x[i] = load_shared_8(at + i * 64);
        }
        const uint2 of_block = load_shared_8(block + Digits::STEP * 4);
        if (lane % 4 == column) step = __uint_as_float(of_block.x);
        if (tile % 4 == 0) sums.mean += __uint_as_float(of_block.y);
#pragma unroll
        for (int part = 0; part < C::PARTS; part++) {
            uint2 b;
            if constexpr (C::OCTAGON) {
                b = x[part];
            } else {
                const uint32_t four = part < 2 ? x[0].x : x[0].y;
                b.x = __byte_perm(four, 0, part % 2 ? 0x2222 : 0x0000), b.y = __byte_perm(four, 0, part % 2 ? 0x3333 : 0x1111);
            }
#pragma unroll
            for (int m = 0; m < 8; m++) {
                uint32_t a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = state_before<C>(words, ((part * 8 + m) * 4 + i + 1) * C::BITS) * C::MULTIPLIER;
                mma_16832(c[m], a[0], a[1], a[2], a[3], b.x, b.y);
            }
        }
        if (++column == 4) end();
    }
    // Adds what are integers yet.
    DEVICE void end() {
        if (column == 0) return;
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) sums.y[m][h] = fmaf(step, float(c[m][2 * h] * 256 + c[m][2 * h + 1]), sums.y[m][h]);
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][i] = 0;
        column = 0, step = 0.f;
    }
};

// Calls `act` with the code of number `code`: those that nq chooses from by default.
constexpr int LAYER_CODES = 7;
template <class Act>
DEVICE void with_code(int code, Act&& act) {
    switch (code) {
    case 0: act(sum6()); break;
    case 1: act(octagon4()); break;
    case 2: act(octagon5()); break;
    case 3: act(octagon6()); break;
    case 4: act(octagon7()); break;
    case 5: act(octagon8()); break;
    default: act(octagon10());
    }
}
