// The packed layout of every weight on the device, and how a warp multiplies it.
//
// A weight [rows, inputs] is cut into tiles of 16 rows and spans of 256 inputs (both padded).
// Record (tile, span), tile-major, holds the codes of 16 x 256 weights in the order in which
// the lanes of a warp feed them to `mma_16816` as its left operand. Lane (g, t) owns rows g
// and g + 8 and, of each chunk of 32 inputs, inputs 8t .. 8t+7: two products, the first over
// inputs 8t .. 8t+3, the second over 8t+4 .. 8t+7 of the four lanes t.
//
//   int4   2048 B: unit u of 64 inputs is 512 B, 16 B a lane = {row g, row g+8} x 2 chunks;
//          a word holds inputs 0,1,2,3 in its low and 4,5,6,7 in its high nibbles of bytes
//          0,2,1,3
//   int5   2560 B: unit u is 640 B: the lowest four bits as in int4, then 4 B a lane: the fifth
//          bits, those of the low nibbles of word j in bits 2j of the bytes, of the high in 2j + 1
//   int6   3072 B: unit u is 768 B: likewise, then 8 B a lane: the upper two bits of chunk c in
//          word c, those of the low nibbles of row g in bits 0 and 1 of the bytes, of the high in
//          2 and 3, of row g + 8 in 4 .. 7
//   int8   4096 B: chunk c is 512 B, 16 B a lane = {g, g+8} inputs 0..3, {g, g+8} inputs 4..7
//   fp16   8192 B: product j is 512 B, 16 B a lane = a0, a1, a2, a3 of `mma_16816`
//
// A slot is 64 inputs (32 for groups of 32): the span of inputs that share a scale and that
// share one column pair of the right operand, see `gemv.cuh`.
//
// Scales and zero-points of record (tile, span), G groups in a span (8, 4, 2; 1 if groups are
// wider), padded to 16 bytes:
//   f16 scales    [G][8 g][2]: rows g, g + 8
//     or, in two levels, f16 [8 g][2] of the rows, then bytes [G][8 g][2] that they are multiplied
//     by and rounded to f16; of symmetric weights less 128
//   int4 zeros    [G][8 g] bytes: low nibble row g, high nibble row g + 8
//   int5 .. int8  [G][8 g][2] bytes
//   f16 offsets   [G][8 g][2]
#pragma once

#include "common.cuh"

enum Zero { SYM = 0, INT = 1, OFFSET = 2 };

// What a step's product becomes: see `gemv.cuh`.
enum Epilogue { STORE = 0, ADD = 1, SILU = 2, HEAD = 3 };

constexpr int SPAN = 256;

// How weights are packed: bits of a code, `Zero`, inputs of a slot, and whether scales are in two
// levels.
template <int BITS_, int ZERO_, int SLOT_, bool TWO_LEVEL_ = false>
struct Scheme {
    static constexpr int BITS = BITS_, ZERO = ZERO_, SLOT = SLOT_;
    static constexpr bool TWO_LEVEL = TWO_LEVEL_;
    static constexpr int ORDER = BITS < 8 ? 4 : BITS;          // codes lie in the order of those of so many bits
    static constexpr int STAGES = BITS < 8 ? 1 : BITS / 4;     // a span streams in so many stages
    static constexpr int STAGE = SPAN * 2 * BITS / STAGES;     // bytes of codes
    static constexpr int UNIT = STAGE / 4;                     // four of them
    // Bytes of a record's scales of rows; of the scales and zero-points of a group's two rows.
    static constexpr int ROWS = TWO_LEVEL ? 32 : 0;
    static constexpr int SCALE = TWO_LEVEL ? 2 : 4;
    static constexpr int ZERO_BYTES = ZERO == OFFSET ? 4 : BITS == 4 ? 1 : 2;
    // Most bytes of scales and zero-points of one record.
    static constexpr int META = BITS == 16 ? 0 : ROWS + SPAN / SLOT * 8 * (SCALE + (ZERO == SYM ? 0 : ZERO_BYTES));
    static constexpr int MIDDLE = 1 << (BITS - 1);             // the zero-point of symmetric weights
};

using int4_sym_64 = Scheme<4, SYM, 64>;
using int4_int_64 = Scheme<4, INT, 64>;
using int4_offset_64 = Scheme<4, OFFSET, 64>;
using int4_sym_32 = Scheme<4, SYM, 32>;
using int4_int_32 = Scheme<4, INT, 32>;
using int4_offset_32 = Scheme<4, OFFSET, 32>;
using int8_sym_64 = Scheme<8, SYM, 64>;
using int8_int_64 = Scheme<8, INT, 64>;
using int8_offset_64 = Scheme<8, OFFSET, 64>;
using int8_sym_32 = Scheme<8, SYM, 32>;
using int8_int_32 = Scheme<8, INT, 32>;
using int8_offset_32 = Scheme<8, OFFSET, 32>;
using int4_int_64_scales8 = Scheme<4, INT, 64, true>;
using int4_int_32_scales8 = Scheme<4, INT, 32, true>;
using int5_int_64_scales8 = Scheme<5, INT, 64, true>;
using int5_int_32_scales8 = Scheme<5, INT, 32, true>;
using int6_sym_64_scales8 = Scheme<6, SYM, 64, true>;
using int6_sym_32_scales8 = Scheme<6, SYM, 32, true>;
using fp16 = Scheme<16, SYM, 64>;

// Calls KERNELS for the schemes of integer codes.
#define INTEGER_SCHEMES(KERNELS) \
    KERNELS(int4_sym_64)         \
    KERNELS(int4_int_64)         \
    KERNELS(int4_offset_64)      \
    KERNELS(int4_sym_32)         \
    KERNELS(int4_int_32)         \
    KERNELS(int4_offset_32)      \
    KERNELS(int8_sym_64)         \
    KERNELS(int8_int_64)         \
    KERNELS(int8_offset_64)      \
    KERNELS(int8_sym_32)         \
    KERNELS(int8_int_32)         \
    KERNELS(int8_offset_32)      \
    KERNELS(int4_int_64_scales8) \
    KERNELS(int4_int_32_scales8) \
    KERNELS(int5_int_64_scales8) \
    KERNELS(int5_int_32_scales8) \
    KERNELS(int6_sym_64_scales8) \
    KERNELS(int6_sym_32_scales8)

// What a lane has of a unit: 16 bytes, and of codes of 5 and 6 bits words of the bits above four.
template <int WIDTH>
struct UpperBits {
    uint32_t upper[WIDTH];
};
template <>
struct UpperBits<0> {};
template <int BITS>
struct Unit : UpperBits<BITS == 5 || BITS == 6 ? BITS - 4 : 0> {
    static constexpr int WIDTH = BITS == 5 || BITS == 6 ? BITS - 4 : 0;   // of upper bits, and their words
    static constexpr int AT = 512;                                        // their place in a unit
    uint4 words;

    DEVICE void load_upper(const void* from) {
        if constexpr (WIDTH == 1) this->upper[0] = *static_cast<const uint32_t*>(from);
        if constexpr (WIDTH == 2) {
            const uint2 v = *static_cast<const uint2*>(from);
            this->upper[0] = v.x, this->upper[1] = v.y;
        }
    }
    DEVICE void load_upper_shared(uint32_t from) {
        if constexpr (WIDTH == 1) this->upper[0] = load_shared_4(from);
        if constexpr (WIDTH == 2) {
            const uint2 v = load_shared_8(from);
            this->upper[0] = v.x, this->upper[1] = v.y;
        }
    }
    DEVICE void load_upper_stream(const uint8_t* from) {
        if constexpr (WIDTH == 1) this->upper[0] = load_stream_4(from);
        if constexpr (WIDTH == 2) {
            const uint2 v = load_stream_8(from);
            this->upper[0] = v.x, this->upper[1] = v.y;
        }
    }

    // Of codes below 8 bits, four as bytes: those of the low (0) or high (1) nibbles of word j.
    DEVICE uint32_t bytes(int j, int high) const {
        const uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
        const uint32_t low = (high ? word >> 4 : word) & 0x0f0f0f0f;
        if constexpr (WIDTH == 0) return low;
        else {
            constexpr int PER_BYTE = 8 / WIDTH;
            const int n = 2 * j + high, shift = 4 - n % PER_BYTE * WIDTH;
            const uint32_t of = this->upper[n / PER_BYTE];
            return ((shift < 0 ? of >> -shift : of << shift) & (WIDTH == 1 ? 0x10101010 : 0x30303030)) | low;
        }
    }
};

// The scales of rows g and g + 8, as two f16 in one word: those of the rows times two bytes,
// rounded once.
template <class S>
DEVICE uint32_t scale_products(uint32_t of_rows, uint32_t bytes) {
    // In [1024, 2048) the last bit of FP16 stands for 1.
    uint32_t h = __byte_perm(bytes, 0x64646464, 0x4140);
    const __half2 zero = __half2half2(__ushort_as_half(S::ZERO == SYM ? 0x6480 : 0x6400));
    return half2_bits(__hmul2(__hsub2(*reinterpret_cast<__half2*>(&h), zero), *reinterpret_cast<__half2*>(&of_rows)));
}

// Scales and zero-points of one group of a tile for one lane: rows g and g + 8.
template <class S>
struct GroupMeta {
    uint32_t scale;
    uint32_t zero;

    // Of group `group` from a record of `groups`.
    DEVICE void load(const uint8_t* record, int groups, int group, int g) {
        if constexpr (S::BITS != 16) {
            load_scale(record, group, g);
            load_zero(record, groups, group, g);
        }
    }
    DEVICE void load_scale(const uint8_t* record, int group, int g) {
        const int at = group * 8 + g;
        if constexpr (S::TWO_LEVEL)
            scale = scale_products<S>(reinterpret_cast<const uint32_t*>(record)[g], reinterpret_cast<const uint16_t*>(record + S::ROWS)[at]);
        else
            scale = reinterpret_cast<const uint32_t*>(record)[at];
    }
    DEVICE void load_zero(const uint8_t* record, int groups, int group, int g) {
        const int at = group * 8 + g;
        const uint8_t* z = record + S::ROWS + groups * (8 * S::SCALE);
        if constexpr (S::ZERO == OFFSET) zero = reinterpret_cast<const uint32_t*>(z)[at];
        if constexpr (S::ZERO == INT && S::BITS == 4) zero = z[at];
        if constexpr (S::ZERO == INT && S::BITS > 4) zero = reinterpret_cast<const uint16_t*>(z)[at];
    }

    // By addresses in shared memory: of the scale, and of the rows' scales; of the zero-point.
    DEVICE void load_scale_shared(uint32_t at, uint32_t rows_at) {
        if constexpr (S::TWO_LEVEL)
            scale = scale_products<S>(load_shared_4(rows_at), load_shared_2(at));
        else
            scale = load_shared_4(at);
    }
    DEVICE void load_zero_shared(uint32_t at) {
        if constexpr (S::ZERO == OFFSET) zero = load_shared_4(at);
        if constexpr (S::ZERO == INT && S::BITS == 4) zero = load_shared_1(at);
        if constexpr (S::ZERO == INT && S::BITS > 4) zero = load_shared_2(at);
    }

    DEVICE float2 scales() const {
        return __half22float2(*reinterpret_cast<const __half2*>(&scale));
    }

    // Zero-points, or offsets.
    DEVICE float2 zeros() const {
        if constexpr (S::ZERO == SYM) return make_float2(S::MIDDLE, S::MIDDLE);
        if constexpr (S::ZERO == OFFSET) return __half22float2(*reinterpret_cast<const __half2*>(&zero));
        if constexpr (S::ZERO == INT && S::BITS == 4) return make_float2(zero & 15, zero >> 4);
        return make_float2(zero & 255, zero >> 8);
    }
};

// The group of slot t (and, with slots of 32, of slot t + 4).
template <class S>
struct Meta {
    static constexpr int N = S::SLOT == 32 ? 2 : 1;
    GroupMeta<S> of[N];

    // From a record.
    DEVICE void load(const uint8_t* record, int groups, int g, int t) {
#pragma unroll
        for (int i = 0; i < N; i++) of[i].load(record, groups, S::SLOT == 32 ? t + 4 * i : t * groups >> 2, g);
    }

    DEVICE float2 scales(int i) const { return of[i].scales(); }
    DEVICE float2 zeros(int i) const { return of[i].zeros(); }
};

// Where in a record in shared memory lane (g, t) finds its scales and zero-points.
template <class S>
struct MetaAt {
    uint32_t scale, zero, rows;
    // With slots of 32 the lane's second group is that after the next three.
    static constexpr uint32_t SECOND = 4 * 8;

    DEVICE MetaAt(int groups, int g, int t) {
        const uint32_t at = (S::SLOT == 32 ? t : t * groups >> 2) * 8 + g;
        scale = keep(S::ROWS + at * S::SCALE), zero = keep(S::ROWS + groups * (8 * S::SCALE) + at * S::ZERO_BYTES);
        rows = g * 4;
    }

    DEVICE void load(Meta<S>& to, uint32_t record) const {
        if constexpr (S::BITS != 16) {
#pragma unroll
            for (int i = 0; i < Meta<S>::N; i++) {
                to.of[i].load_scale_shared(record + scale + i * SECOND * S::SCALE, record + rows);
                to.of[i].load_zero_shared(record + zero + i * SECOND * S::ZERO_BYTES);
            }
        }
    }
};

// A packed weight, for kernels that read single elements.
struct PackedWeight {
    const uint8_t* codes;
    const uint8_t* meta;
    int rows;
    int inputs;
    int spans;
    int bits;
    int16_t zero;     // Zero
    int16_t two_level;
    int groups;       // of a span
    int meta_bytes;   // of a record
    float scale;      // of 16-bit weights
};

// Element [row][k], in f32: exactly s * q + o with one rounding.
DEVICE float element(const PackedWeight& w, int row, int k) {
    const size_t record = size_t(row / 16) * w.spans + k / SPAN;
    const int g = row % 8, upper = row % 16 / 8, c = k % SPAN / 32, t = k % 32 / 8, i = k % 8;
    const int lane = g * 4 + t;
    const uint8_t* codes = w.codes + record * (w.bits * 512);
    if (w.bits == 16) {
        const __half* h = reinterpret_cast<const __half*>(codes + ((2 * c + i / 4) * 32 + lane) * 16);
        return __half2float(h[i % 4 / 2 * 4 + upper * 2 + i % 2]) * w.scale;
    }
    float q;
    if (w.bits == 8) {
        q = codes[(c * 32 + lane) * 16 + i / 4 * 8 + upper * 4 + i % 4];
    } else {
        const uint8_t* unit = codes + c / 2 * (w.bits * 128);
        const int j = c % 2 * 2 + upper, byte = i % 2 * 2 + i % 4 / 2, width = w.bits - 4;
        q = unit[lane * 16 + j * 4 + byte] >> (i / 4 * 4) & 15;
        if (width > 0) {
            const int bit = (2 * j + i / 4) * width;   // of the bytes `byte` of the words
            q += (unit[512 + (lane * width + bit / 8) * 4 + byte] >> bit % 8 & (1 << width) - 1) << 4;
        }
    }
    const uint8_t* meta = w.meta + record * w.meta_bytes;
    const int at = (k % SPAN * w.groups / SPAN) * 8 + g;
    const __half* halves = reinterpret_cast<const __half*>(meta);
    float s = __half2float(halves[(w.two_level ? g : at) * 2 + upper]);
    if (w.two_level) {
        meta += 32;
        const float product = s * float(meta[at * 2 + upper] - (w.zero == SYM ? 128 : 0));   // exact
        s = __half2float(__float2half_rn(product));
    }
    const uint8_t* z = meta + w.groups * (w.two_level ? 16 : 32);
    if (w.zero == OFFSET) return fmaf(s, q, __half2float(reinterpret_cast<const __half*>(z)[at * 2 + upper]));
    if (w.zero == SYM) return s * (q - float(1 << w.bits - 1));
    return s * (q - (w.bits == 4 ? float(z[at] >> (4 * upper) & 15) : float(z[at * 2 + upper])));
}
