// Weights in trellis codes (docs/trellis.md, FORMAT.md): what their kernels share.
//
// A state is the last 16 bits of a stream; a step shifts BITS new ones in. The bytes of state * MULTIPLIER, less 127.5
// each, give one weight (sum: all four added) or two (octagon: b0 + (b1 - b3) / sqrt 2 and b2 + (b1 + b3) / sqrt 2), in
// units of the row's scale / 128. A sequence of 128 weights is cyclic: the bits before its first step are its last, so it
// is decoded without its neighbours.
//
// Layout: strips of 128 rows, of these tiles of 32 columns, of these 32 sequences, one of each lane of a warp. Lane
// (g = lane / 4, t = lane % 4) has rows g + 8 j; step (part * 8 + m) * 4 + i gives row 16 m + g + 8 (i % 2), column (of an
// octagon: pair of columns) 8 part + 4 (i / 2) + t of the tile. So the four bytes of steps i = 0 .. 3 are registers a0 .. a3
// of `mma_16832`, and no weight is ever formed. The first bit of a sequence is the highest of its first word; words
// lie in runs of four of each lane, then those that are left.
#pragma once

#include "activations.cuh"
#include "exchange.cuh"
#include "weights.cuh"

constexpr int STRIP = 128;   // rows
constexpr int TILE = 32;     // columns
constexpr int SEQUENCE = 128;
constexpr int BLOCK = 128;   // inputs that are transformed together

struct RowDigits;

template <bool OCTAGON_, int BITS_>
struct Trellis {
    static constexpr bool OCTAGON = OCTAGON_;
    static constexpr int BITS = BITS_;                         // of a step
    static constexpr int WIDTH = OCTAGON ? 2 : 1;              // weights of a step
    static constexpr int WORDS = SEQUENCE / WIDTH * BITS / 32; // of a sequence
    static constexpr int UNIT = WORDS * 32 * 4;                // bytes of a tile of a strip
    static constexpr int PARTS = 4 / WIDTH;                    // products of 16 rows and a tile
    static constexpr uint32_t MULTIPLIER = OCTAGON ? 0xAD1B72DBu : 0xD17F17D3u;

    // For `trellis_rows.cuh`.
    using Sum = int;                                     // of products
    using Digits = RowDigits;
    static constexpr float UNIT_VALUE = 1.f / 128.f;     // of sums
    static constexpr bool PLAIN_GATE = false;            // gate and up alternate by strips
    static DEVICE float joined(int high, int low) { return 256.f * float(high) + float(low); }   // of both digits
    template <int GROUP, int WARPS>
    static DEVICE void finish(float*) {}
};

using octagon4 = Trellis<true, 4>;
using octagon5 = Trellis<true, 5>;
using octagon6 = Trellis<true, 6>;
using octagon7 = Trellis<true, 7>;
using octagon8 = Trellis<true, 8>;
using octagon10 = Trellis<true, 10>;
using sum2 = Trellis<false, 2>;
using sum3 = Trellis<false, 3>;
using sum4 = Trellis<false, 4>;
using sum5 = Trellis<false, 5>;
using sum6 = Trellis<false, 6>;

// Calls KERNELS for every code.
#define TRELLIS_CODES(KERNELS) \
    KERNELS(octagon4)          \
    KERNELS(octagon5)          \
    KERNELS(octagon6)          \
    KERNELS(octagon7)          \
    KERNELS(octagon8)          \
    KERNELS(octagon10)         \
    KERNELS(sum2)              \
    KERNELS(sum3)              \
    KERNELS(sum4)              \
    KERNELS(sum5)              \
    KERNELS(sum6)

// Digits of rows of x, the right operand of products (`trellis_inputs.cu` says what they are): of four rows a lane has
// so many `uint2` of a tile.
template <bool OCTAGON>
constexpr int DIGITS = OCTAGON ? 2 : 1;

// The state that ends before bit `end`. All that depends on `end` is known when this is compiled.
template <class C>
DEVICE uint32_t state_before(const uint32_t (&w)[C::WORDS], int end) {
    const int word = (end - 1) / 32, shift = 32 * (word + 1) - end;
    const uint32_t low = w[word], high = w[(word + C::WORDS - 1) % C::WORDS];
    // Steps of 2, 4 or 8 bits end 8 bits apart: one shift moves several states to where they are whole bytes.
    const bool shares = 8 % C::BITS == 0;
    if (shift < 24 && (shares || shift % 8 == 0)) {
        const uint32_t moved = shift % 8 == 0 ? low : __funnelshift_r(low, high, shift % 8);
        return __byte_perm(moved, 0, shift < 8 ? 0x4410 : shift < 16 ? 0x4421 : 0x4432);
    }
    return (shift <= 16 ? low >> shift : __funnelshift_r(low, high, shift)) & 0xffff;
}

// The weights of a state in units of 1/128: bytes become floats of 32768 + byte, which are exact, as is what is
// subtracted.
template <class C>
DEVICE void weights_of(uint32_t state, float (&v)[C::WIDTH]) {
    const uint32_t h = state * C::MULTIPLIER;
    if constexpr (C::OCTAGON) {
        constexpr uint32_t HIGH = 0x47000000;
        constexpr float MEAN = 32768.f + 127.5f, HALF_ROOT = 0.70710678f;
        const float b0 = __uint_as_float(__byte_perm(h, HIGH, 0x7404)), b1 = __uint_as_float(__byte_perm(h, HIGH, 0x7414));
        const float b2 = __uint_as_float(__byte_perm(h, HIGH, 0x7424)), b3 = __uint_as_float(__byte_perm(h, HIGH, 0x7434));
        v[0] = fmaf(HALF_ROOT, b1 - b3, b0 - MEAN);
        v[1] = fmaf(HALF_ROOT, (b1 - MEAN) + (b3 - MEAN), b2 - MEAN);
    } else {
        // The integer is counted up from the bits of 2^23, whose last bit stands for 1.
        v[0] = __uint_as_float(__dp4a(h, 0x01010101u, 0x4b000000u)) - (8388608.f + 510.f);
    }
}

// Where word `word` of a lane is among those of a unit.
template <class C>
DEVICE int word_place(int lane, int word) {
    const int run = word < C::WORDS / 4 * 4 ? 4 : C::WORDS % 4;
    return word / 4 * 128 + lane * run + word % 4;
}

// As `state_before`, of a step known only now. `word(i)` is the i-th.
template <class C, class Word>
DEVICE uint32_t state_after(int step, Word&& word) {
    const int end = (step + 1) * C::BITS, at = (end - 1) / 32;
    return __funnelshift_r(word(at), word(at == 0 ? C::WORDS - 1 : at - 1), -end & 31) & 0xffff;
}

// The orthonormal Hadamard transform of 128 values over a warp, four a lane. Any order of values will do that comes of
// one of the bits of their numbers, such as operand order: the matrix is the same for all of them.
DEVICE void transform(float (&v)[4]) {
    constexpr float NORM = 0.088388348f;   // 1 / sqrt 128
    const int lane = threadIdx.x % 32;
    const float a = (v[0] + v[1]) * NORM, b = (v[0] - v[1]) * NORM, c = (v[2] + v[3]) * NORM, d = (v[2] - v[3]) * NORM;
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const float sign = lane & o ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], o));
    }
}

// Of FP16 values in operand order, the first input of the four that lane `lane` has of a block: it has this one,
// the next, and those 8 further.
DEVICE int operand_input(int lane) {
    return (lane & 24) << 2 | (lane & 1) << 4 | (lane & 2) | (lane & 4);
}

// Four values in operand order, from FP16.
DEVICE void load_four(float (&v)[4], uint2 bits) {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&bits.x)), b = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
}

// The greatest magnitude among X of two pairs of transformed inputs (`trellis_inputs.cu`), and what was found before.
template <bool OCTAGON>
DEVICE float greatest_of(float most, const float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const float x = fabsf(v[i]), y = fabsf(v[i + 1]);
        most = fmaxf(most, fmaxf(x, y));
        if (OCTAGON) most = fmaxf(most, (x + y) * 0.70710678f);
    }
    return most;
}

// Makes digits of values of a row whose greatest X is `most`, and adds them up.
struct RowDigits {
    static constexpr float MOST = 32000.f;   // what that becomes
    static constexpr bool TURNED = true;     // of an octagon: greatest ones are also among sums and differences of pairs
    float inverse;   // of the step; where all are tiny it stays finite, and digits zero
    int sum = 0;

    DEVICE RowDigits(float most) : inverse(most > 1e-30f ? MOST / most : 0.f) {}
    DEVICE int round(float v) const { return __float2int_rn(v * inverse); }
    // The low byte counts as signed: what it takes too much, the high one gets back.
    DEVICE void split(const int (&d)[4], uint32_t& high, uint32_t& low) {
        low = gather_bytes<0>(d[0], d[1], d[2], d[3]);
        high = gather_bytes<1>(d[0] + 128, d[1] + 128, d[2] + 128, d[3] + 128);
        sum += d[0] + d[1] + d[2] + d[3];
    }
    // Of an octagon's pair.
    DEVICE void pair(float x, float y, uint32_t& high, uint32_t& low) {
        constexpr float HALF_ROOT = 0.70710678f;
        split({round(x), round((x + y) * HALF_ROOT), round(y), round((y - x) * HALF_ROOT)}, high, low);
    }
};

// As `RowDigits`, for products of FP16 (`exl3.cuh`): a value is split into two, which have 22 bits of it.
struct RowHalves {
    static constexpr float MOST = 1024.f;
    static constexpr bool TURNED = false;
    float inverse;
    int sum = 0;   // is not needed

    DEVICE RowHalves(float most) : inverse(most > 1e-30f ? MOST / most : 0.f) {}
    DEVICE void pair(float x, float y, uint32_t& high, uint32_t& low) const {
        x *= inverse, y *= inverse;
        const __half2 h = __floats2half2_rn(x, y);
        const float2 f = __half22float2(h);
        high = half2_bits(h), low = half2_bits(__floats2half2_rn(x - f.x, y - f.y));
    }
};

// What `trellis_inputs.cu` says of steps, of the sum of squares of x, if it is to be normalized, and that of digits.
template <bool OCTAGON, class Digits = RowDigits>
DEVICE float2 step_of(float most, int sum, bool normalized, float square, int inputs, float eps) {
    const float step = most * (1.f / Digits::MOST) * (normalized ? rsqrtf(square / inputs + eps) : 1.f);
    return make_float2(step, step * (OCTAGON ? float(sum) : 4.f * float(sum)));
}
