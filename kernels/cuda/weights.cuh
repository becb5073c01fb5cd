// The packed layout of every weight on the device, and how a warp multiplies it.
//
// A weight [rows, inputs] is cut into tiles of 16 rows and spans of 256 inputs (both padded).
// Record (tile, span), tile-major, holds the codes of 16 x 256 weights in the order in which
// the lanes of a warp feed them to `mma_16816` as its left operand. Lane (g, t) owns rows g
// and g + 8 and, of each chunk of 32 inputs, inputs 8t .. 8t+7: two products, the first over
// inputs 8t .. 8t+3, the second over 8t+4 .. 8t+7 of the four lanes t.
//
//   int2   1024 B: unit u of 64 inputs is 256 B, 8 B a lane: the codes of word j of int4 in word j / 2, those of the
//          low nibbles in bits 4 (j % 2) of the bytes, of the high in 4 (j % 2) + 2
//   int3   1536 B: unit u of 64 inputs is 384 B: 8 B a lane with the lowest two bits, then 4 B a lane with the
//          third; words of 8 codes j in the order of int4, whose nth nibble of inputs 0,2,1,3,4,6,5,7 has the lowest
//          bits of word j in bits 2 (j % 2) of nibble n of word j / 2, and the third in bit j of nibble n
//   int4   2048 B: unit u of 64 inputs is 512 B, 16 B a lane = {row g, row g+8} x 2 chunks;
//          a word holds inputs 0,1,2,3 in its low and 4,5,6,7 in its high nibbles of bytes
//          0,2,1,3; with a table of levels a word's nibbles are inputs 0,2,1,3,4,6,5,7
//   int5   2560 B: unit u is 640 B: the lowest four bits as in int4, then 4 B a lane: the fifth
//          bits, those of the low nibbles of word j in bits 2j of the bytes, of the high in 2j + 1
//   int6   3072 B: unit u is 768 B: likewise, then 8 B a lane: the upper two bits of chunk c in
//          word c, those of the low nibbles of row g in bits 0 and 1 of the bytes, of the high in
//          2 and 3, of row g + 8 in 4 .. 7
//   int8   4096 B: in slots of 16 unit u is 1024 B: likewise, then 16 B a lane: the upper four bits of the low
//          nibbles of word j in the low nibbles of word j, of the high in the high ones; elsewhere chunk c is 512 B, 16 B a lane = {g, g+8} inputs 0..3, {g, g+8} inputs 4..7
//   fp16   8192 B: product j is 512 B, 16 B a lane = a0, a1, a2, a3 of `mma_16816`
//
// A slot is 64 inputs (32 for groups of 32, 16 for groups of 16): the span of inputs that share a
// scale and that share one column pair of the right operand, see `gemv.cuh`. Codes in slots of 16
// count from the midpoint, whether there are offsets or not, and these are those of 32 inputs.
// Codes with a table stand for signed bytes, which `levels` looks up: of the rows of a tile the first eight
// and the last eight may be of weights with different tables.
//
// Scales and zero-points of record (tile, span), G groups in a span (16, 8, 4, 2; 1 if groups are
// wider), padded to 16 bytes:
//   f16 scales    [G][8 g][2]: rows g, g + 8
//     or, in two levels, f16 [8 g][2] of the rows, then bytes [G][8 g][2] that they are multiplied
//     by and rounded to f16; of codes that count from the midpoint less 128
//   the table of rows g and that of rows g + 8, [2][2^bits] bytes, before the scales of groups
//   int4 zeros    [G][8 g] bytes: low nibble row g, high nibble row g + 8
//   int5 .. int8  [G][8 g][2] bytes
//   f16 offsets   [G][8 g][2]
//     or, in two levels, bytes [G or 8][8 g][2], for f16 [8 g][2] of the rows behind those of scales
#pragma once

#include "common.cuh"

enum Zero { SYM = 0, INT = 1, OFFSET = 2 };

// What a step's product becomes: see `gemv.cuh`.
enum Epilogue { STORE = 0, ADD = 1, SILU = 2, HEAD = 3 };

constexpr int SPAN = 256;

// How weights are packed: bits of a code, `Zero`, inputs of a slot, whether scales are in two
// levels, and whether codes have a table of levels.
template <int BITS_, int ZERO_, int SLOT_, bool TWO_LEVEL_ = false, bool TABLE_ = false>
struct Scheme {
    static constexpr int BITS = BITS_, ZERO = ZERO_, SLOT = SLOT_;
    static constexpr bool TWO_LEVEL = TWO_LEVEL_, TABLE = TABLE_;
    static constexpr int ORDER = BITS < 8 || SLOT == 16 ? 4 : BITS;   // codes lie in the order of those of so many bits
    static constexpr int STAGES = ORDER / 4;                   // a span streams in so many stages
    static constexpr int STAGE = SPAN * 2 * BITS / STAGES;     // bytes of codes
    static constexpr int UNIT = STAGE / 4;                     // four of them
    static constexpr bool CENTRED = SLOT == 16 || TABLE;       // operands are signed: codes less the midpoint, or levels
    static constexpr int PASSES = 64 / SLOT;                   // each over four slots of a span
    // Bytes of a record's scales and offsets of rows, and behind these, where they end, of tables; of the scales and
    // zero-points of a group's two rows.
    static constexpr int TABLES_AT = !TWO_LEVEL ? 0 : ZERO == OFFSET ? 64 : 32;
    static constexpr int ROWS = TABLES_AT + (TABLE ? 2 << BITS : 0);
    static constexpr int SCALE = TWO_LEVEL ? 2 : 4;
    static constexpr int ZERO_BYTES = ZERO == OFFSET ? (TWO_LEVEL ? 2 : 4) : BITS == 4 ? 1 : 2;
    static constexpr int PARTS = SLOT == 16 ? 2 : 1;           // of a chunk of 32 inputs: those of one scale
    static constexpr int PER_ZERO = SLOT == 16 && BITS == 6 ? 2 : 1;   // groups of scales
    static constexpr bool SUMS = ZERO == OFFSET && SLOT == 16 && PER_ZERO == 1;   // of 16 inputs are wanted for offsets
    // Most bytes of scales and zero-points of one record.
    static constexpr int META = BITS == 16 ? 0 : ROWS + SPAN / SLOT * 8 * (SCALE + (ZERO == SYM ? 0 : ZERO_BYTES / PER_ZERO));
    static constexpr int MIDDLE = TABLE ? 128 : BITS == 2 ? 0 : 1 << (BITS - 1);   // the zero-point of symmetric weights
};

using int4_sym_64 = Scheme<4, SYM, 64>;
using int4_int_64 = Scheme<4, INT, 64>;
using int4_offset_64 = Scheme<4, OFFSET, 64>;
using int4_sym_32 = Scheme<4, SYM, 32>;
using int4_int_32 = Scheme<4, INT, 32>;
using int4_offset_32 = Scheme<4, OFFSET, 32>;
using int8_sym_64 = Scheme<8, SYM, 64>;
using int8_int_64 = Scheme<8, INT, 64>;
using int8_sym_32 = Scheme<8, SYM, 32>;
using int8_int_32 = Scheme<8, INT, 32>;
using int8_offset_32 = Scheme<8, OFFSET, 32>;
using int4_int_64_scales8 = Scheme<4, INT, 64, true>;
using int4_int_32_scales8 = Scheme<4, INT, 32, true>;
using int5_int_64_scales8 = Scheme<5, INT, 64, true>;
using int5_int_32_scales8 = Scheme<5, INT, 32, true>;
using int6_sym_64_scales8 = Scheme<6, SYM, 64, true>;
using int6_sym_32_scales8 = Scheme<6, SYM, 32, true>;
using int4_offset_32_scales8 = Scheme<4, OFFSET, 32, true>;
using int5_offset_32_scales8 = Scheme<5, OFFSET, 32, true>;
using int6_sym_16_scales8 = Scheme<6, SYM, 16, true>;
using int6_offset_16_scales8 = Scheme<6, OFFSET, 16, true>;
using levels3_16_scales8 = Scheme<3, SYM, 16, true, true>;
using levels4_32_scales8 = Scheme<4, SYM, 32, true, true>;
using levels4_16 = Scheme<4, SYM, 16, false, true>;
using int2_offset_16_scales8 = Scheme<2, OFFSET, 16, true>;
using int8_offset_16_scales8 = Scheme<8, OFFSET, 16, true>;
using fp16 = Scheme<16, SYM, 64>;

// Calls `run` with the scheme of this number among those of GGUF's blocks, which are instances together: of Q4_K; Q5_K;
// Q3_K, IQ2 and IQ1; Q6_K; parts of several K types; IQ4_XS and IQ3; levels with any f16 as scale (IQ4_NL, FP4); Q2_K;
// and parts of any of these with scales in two levels.
constexpr int BLOCK_SCHEMES = 9;
template <class Run>
DEVICE void with_block_scheme(int number, Run&& run) {
    switch (number) {
    case 0: return run(int4_offset_32_scales8());
    case 1: return run(int5_offset_32_scales8());
    case 2: return run(levels3_16_scales8());
    case 3: return run(int6_sym_16_scales8());
    case 4: return run(int6_offset_16_scales8());
    case 5: return run(levels4_32_scales8());
    case 6: return run(levels4_16());
    case 7: return run(int2_offset_16_scales8());
    default: return run(int8_offset_16_scales8());
    }
}

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
    KERNELS(int8_sym_32)         \
    KERNELS(int8_int_32)         \
    KERNELS(int8_offset_32)      \
    KERNELS(int4_int_64_scales8) \
    KERNELS(int4_int_32_scales8) \
    KERNELS(int5_int_64_scales8) \
    KERNELS(int5_int_32_scales8) \
    KERNELS(int6_sym_64_scales8) \
    KERNELS(int6_sym_32_scales8)

// Words of what a lane has of a unit above the first four bits (of codes of 3 bits: above two).
template <int WIDTH>
struct UpperBits {
    uint32_t upper[WIDTH];
};
template <>
struct UpperBits<0> {};
template <class S>
constexpr int UPPER_BITS = S::BITS == 3 ? 1 : S::ORDER == 4 && S::BITS > 4 ? S::BITS - 4 : 0;
template <class S>
struct Unit : UpperBits<UPPER_BITS<S>> {
    static constexpr int BITS = S::BITS, WIDTH = UPPER_BITS<S>;   // WIDTH: of upper bits, and their words
    static constexpr int LANE = BITS < 4 ? 8 : 16;    // bytes of a lane
    static constexpr int AT = 32 * LANE;              // place of the upper bits in a unit
    std::conditional_t<BITS < 4, uint2, uint4> words;

    // From the unit at `from`.
    DEVICE void load(const void* from, int lane) {
        const uint8_t* const unit = static_cast<const uint8_t*>(from);
        words = reinterpret_cast<const decltype(words)*>(unit)[lane];
        if constexpr (WIDTH == 1) this->upper[0] = reinterpret_cast<const uint32_t*>(unit + AT)[lane];
        if constexpr (WIDTH == 2) set_upper(reinterpret_cast<const uint2*>(unit + AT)[lane]);
        if constexpr (WIDTH == 4) set_upper(reinterpret_cast<const uint4*>(unit + AT)[lane]);
    }
    // By an address in shared memory: `from` that of this lane's words, `upper` that of its upper bits.
    DEVICE void load_shared(uint32_t from, uint32_t upper) {
        if constexpr (BITS < 4) words = load_shared_8(from);
        else words = load_shared_16(from);
        if constexpr (WIDTH == 1) this->upper[0] = load_shared_4(upper);
        if constexpr (WIDTH == 2) set_upper(load_shared_8(upper));
        if constexpr (WIDTH == 4) set_upper(load_shared_16(upper));
    }
    DEVICE void load_stream(const uint8_t* unit, int lane) {
        if constexpr (BITS < 4) words = load_stream_8(unit + lane * LANE);
        else words = ::load_stream(unit + lane * LANE);
        if constexpr (WIDTH == 1) this->upper[0] = load_stream_4(unit + AT + lane * 4);
        if constexpr (WIDTH == 2) set_upper(load_stream_8(unit + AT + lane * 8));
        if constexpr (WIDTH == 4) set_upper(::load_stream(unit + AT + lane * 16));
    }
    DEVICE void set_upper(const uint2& v) {
        if constexpr (WIDTH == 2) this->upper[0] = v.x, this->upper[1] = v.y;
    }
    DEVICE void set_upper(const uint4& v) {
        if constexpr (WIDTH == 4) this->upper[0] = v.x, this->upper[1] = v.y, this->upper[2] = v.z, this->upper[3] = v.w;
    }

    // Word j of eight codes of 4 bits or more: the lowest four bits of each.
    DEVICE uint32_t word(int j) const {
        if constexpr (BITS < 4) return 0;
        else return j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
    }
    // Four codes as bytes, not of 3 bits: those of the low (0) or high (1) nibbles of word j.
    DEVICE uint32_t bytes(int j, int high) const {
        if constexpr (BITS == 2) return (j / 2 ? words.y : words.x) >> (j % 2 * 4 + high * 2) & 0x03030303;
        const uint32_t low = (high ? word(j) >> 4 : word(j)) & 0x0f0f0f0f;
        if constexpr (WIDTH == 0) return low;
        else {
            constexpr int PER_BYTE = 8 / WIDTH;
            constexpr uint32_t MASK = WIDTH == 1 ? 0x10101010 : WIDTH == 2 ? 0x30303030 : 0xf0f0f0f0;
            const int n = 2 * j + high, shift = 4 - n % PER_BYTE * WIDTH;
            const uint32_t of = this->upper[n / PER_BYTE];
            return ((shift < 0 ? of >> -shift : of << shift) & MASK) | low;
        }
    }
    // As `bytes`, of 4, 6 and 8 bits: signed, 16, 4 or 1 times what a code is more than the midpoint. Of 2 bits as they are.
    DEVICE uint32_t signed_bytes(int j, int high) const {
        if constexpr (BITS == 4) {
            return (high ? word(j) : word(j) << 4) & 0xf0f0f0f0 ^ 0x80808080;
        } else if constexpr (BITS == 6) {
            const uint32_t low = (high ? word(j) >> 2 : word(j) << 2) & 0x3c3c3c3c;
            const int n = 2 * j + high;
            return ((this->upper[n / 4] << (6 - n % 4 * 2) & 0xc0c0c0c0) | low) ^ 0x80808080;
        } else {
            return BITS == 2 ? bytes(j, high) : bytes(j, high) ^ 0x80808080;
        }
    }
    // Word j of eight codes that index a table, a nibble each: of 3 bits put together.
    DEVICE uint32_t indices(int j) const {
        if constexpr (BITS == 3) {
            const uint32_t low = (j / 2 ? words.y : words.x) >> j % 2 * 2, third = j < 2 ? this->upper[0] << (2 - j) : this->upper[0] >> (j - 2);
            return low & 0x33333333 | third & 0x44444444;
        } else {
            return word(j);
        }
    }
};

// The tables of rows g and g + 8.
template <class S, bool TABLE = S::TABLE>
struct LevelTables {
    DEVICE void load(const uint8_t*) {}
    DEVICE void load_shared(uint32_t) {}
    DEVICE uint32_t bytes(const Unit<S>& unit, int j, int high) const { return unit.signed_bytes(j, high); }
};
template <class S>
struct LevelTables<S, true> {
    static constexpr int WORDS = (2 << S::BITS) / 4;
    uint32_t tables[WORDS];

    // From a record.
    DEVICE void load(const uint8_t* record) {
#pragma unroll
        for (int i = 0; i < WORDS / 4; i++) set(i, reinterpret_cast<const uint4*>(record + S::TABLES_AT)[i]);
    }
    // By its address in shared memory.
    DEVICE void load_shared(uint32_t record) {
#pragma unroll
        for (int i = 0; i < WORDS / 4; i++) set(i, load_shared_16(record + S::TABLES_AT + i * 16));
    }
    DEVICE void set(int i, const uint4& v) { tables[4 * i] = v.x, tables[4 * i + 1] = v.y, tables[4 * i + 2] = v.z, tables[4 * i + 3] = v.w; }

    // The levels of four codes of a unit, in the order of `Unit::bytes`.
    DEVICE uint32_t bytes(const Unit<S>& unit, int j, int high) const {
        const uint32_t* const table = tables + j % 2 * (WORDS / 2);
        const uint32_t word = unit.indices(j);
        if constexpr (S::BITS == 3) {
            return permute(table[0], table[1], high ? word >> 16 : word);
        } else {
            // The three lower bits choose in both halves of the table, the fourth which of the two.
            const uint32_t within = word & 0x77777777, half = word >> 1 & 0x44444444 | 0x32103210;
            const uint32_t at = high ? within >> 16 : within;
            return permute(permute(table[0], table[1], at), permute(table[2], table[3], at), high ? half >> 16 : half);
        }
    }
};

// The left operand of chunk c of a unit, of 32 inputs: codes, and where operands are signed levels, or a multiple of what
// codes are more than the midpoint.
template <class S>
DEVICE void chunk_operand(uint32_t (&a)[4], const Unit<S>& unit, const LevelTables<S>& levels, int c) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (S::CENTRED) a[i] = levels.bytes(unit, 2 * c + i % 2, i / 2);
        else a[i] = unit.bytes(2 * c + i % 2, i / 2);
    }
}
template <class S>
constexpr float OPERAND_UNIT = S::CENTRED && !S::TABLE && S::BITS > 2 ? 1.f / (256 >> S::BITS) : 1.f;

// Adds the product of such an operand.
template <class S>
DEVICE void multiply_operand(int (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (S::CENTRED) mma_signed_16832(sums, a[0], a[1], a[2], a[3], b0, b1);
    else mma_16832(sums, a[0], a[1], a[2], a[3], b0, b1);
}

// Adds the sums of the right operand.
DEVICE void multiply_ones(int (&sums)[4], uint32_t b0, uint32_t b1) {
    constexpr uint32_t ONES = 0x01010101;
    mma_signed_16832(sums, ONES, ONES, ONES, ONES, b0, b1);
}
// The same, apart: those of lanes t < 2 to rows g, of the others to rows g + 8.
DEVICE void multiply_halves_of_ones(int (&sums)[4], int t, uint32_t b0, uint32_t b1) {
    const uint32_t first = t < 2 ? 0x01010101 : 0, second = t < 2 ? 0 : 0x01010101;
    mma_signed_16832(sums, first, second, first, second, b0, b1);
}

// The scales of rows g and g + 8, as two f16 in one word: those of the rows times two bytes,
// rounded once. SIGNED: times what these are more than 128.
template <bool SIGNED>
DEVICE uint32_t scale_products(uint32_t of_rows, uint32_t bytes) {
    // In [1024, 2048) the last bit of FP16 stands for 1.
    uint32_t h = __byte_perm(bytes, 0x64646464, 0x4140);
    const __half2 zero = __half2half2(__ushort_as_half(SIGNED ? 0x6480 : 0x6400));
    return half2_bits(__hmul2(__hsub2(*reinterpret_cast<__half2*>(&h), zero), *reinterpret_cast<__half2*>(&of_rows)));
}

// Scales and zero-points of one group of a tile for one lane: rows g and g + 8.
template <class S>
struct GroupMeta {
    static constexpr bool SIGNED = S::ZERO == SYM || S::CENTRED;   // scales
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
            scale = scale_products<SIGNED>(reinterpret_cast<const uint32_t*>(record)[g], reinterpret_cast<const uint16_t*>(record + S::ROWS)[at]);
        else
            scale = reinterpret_cast<const uint32_t*>(record + S::ROWS)[at];
    }
    DEVICE void load_zero(const uint8_t* record, int groups, int group, int g) {
        const int at = group / S::PER_ZERO * 8 + g;
        const uint8_t* z = record + S::ROWS + groups * (8 * S::SCALE);
        if constexpr (S::ZERO == OFFSET && S::TWO_LEVEL)
            zero = scale_products<false>(reinterpret_cast<const uint32_t*>(record)[8 + g], reinterpret_cast<const uint16_t*>(z)[at]);
        if constexpr (S::ZERO == OFFSET && !S::TWO_LEVEL) zero = reinterpret_cast<const uint32_t*>(z)[at];
        if constexpr (S::ZERO == INT && S::BITS == 4) zero = z[at];
        if constexpr (S::ZERO == INT && S::BITS > 4) zero = reinterpret_cast<const uint16_t*>(z)[at];
    }

    // By addresses in shared memory: of the scale or zero-point, and of the rows' scales.
    DEVICE void load_scale_shared(uint32_t at, uint32_t rows_at) {
        if constexpr (S::TWO_LEVEL)
            scale = scale_products<SIGNED>(load_shared_4(rows_at), load_shared_2(at));
        else
            scale = load_shared_4(at);
    }
    DEVICE void load_zero_shared(uint32_t at, uint32_t rows_at) {
        if constexpr (S::ZERO == OFFSET && S::TWO_LEVEL) zero = scale_products<false>(load_shared_4(rows_at + 32), load_shared_2(at));
        if constexpr (S::ZERO == OFFSET && !S::TWO_LEVEL) zero = load_shared_4(at);
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

// The groups of slots t, t + 4 and so on.
template <class S>
struct Meta {
    static constexpr int N = S::PASSES;
    GroupMeta<S> of[N];
    LevelTables<S> levels;

    // From a record.
    DEVICE void load(const uint8_t* record, int groups, int g, int t) {
#pragma unroll
        for (int i = 0; i < N; i++) of[i].load(record, groups, N > 1 ? t + 4 * i : t * groups >> 2, g);
        levels.load(record);
    }

    DEVICE float2 scales(int i) const { return of[i].scales(); }
    DEVICE float2 zeros(int i) const { return of[i].zeros(); }
};

// Where in a record in shared memory lane (g, t) finds its scales and zero-points.
template <class S>
struct MetaAt {
    uint32_t scale, zero, rows;
    // With several slots the lane's next group is that after three others.
    static constexpr uint32_t SECOND = 4 * 8;

    DEVICE MetaAt(int groups, int g, int t) {
        const uint32_t group = S::PASSES > 1 ? t : t * groups >> 2;
        scale = keep(S::ROWS + (group * 8 + g) * S::SCALE);
        zero = keep(S::ROWS + groups * (8 * S::SCALE) + (group / S::PER_ZERO * 8 + g) * S::ZERO_BYTES);
        rows = g * 4;
    }

    DEVICE void load(Meta<S>& to, uint32_t record) const {
        if constexpr (S::BITS != 16) {
#pragma unroll
            for (int i = 0; i < Meta<S>::N; i++) {
                to.of[i].load_scale_shared(record + scale + i * SECOND * S::SCALE, record + rows);
                to.of[i].load_zero_shared(record + zero + i * (SECOND / S::PER_ZERO) * S::ZERO_BYTES, record + rows);
            }
            to.levels.load_shared(record);
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
    uint8_t two_level;
    uint8_t table;    // of levels
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
    const int j = c % 2 * 2 + upper, byte = i % 2 * 2 + i % 4 / 2, nibble = i / 4 * 4 + byte;
    const uint8_t* unit = codes + c / 2 * (w.bits * 128);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(unit);
    float q;
    if (w.bits == 8 && w.groups < 16) {
        q = codes[(c * 32 + lane) * 16 + i / 4 * 8 + upper * 4 + i % 4];
    } else if (w.bits == 2) {
        q = unit[lane * 8 + j / 2 * 4 + byte] >> (j % 2 * 4 + i / 4 * 2) & 3;
    } else if (w.bits == 3) {
        q = (words[lane * 2 + j / 2] >> (4 * nibble + j % 2 * 2) & 3) + (words[64 + lane] >> (4 * nibble + j) & 1) * 4;
    } else if (w.table) {
        q = words[lane * 4 + j] >> 4 * nibble & 15;
    } else {
        const int width = w.bits - 4;
        q = unit[lane * 16 + j * 4 + byte] >> (i / 4 * 4) & 15;
        if (width > 0) {
            const int bit = (2 * j + i / 4) * width;   // of the bytes `byte` of the words
            q += (unit[512 + (lane * width + bit / 8) * 4 + byte] >> bit % 8 & (1 << width) - 1) << 4;
        }
    }
    const uint8_t* meta = w.meta + record * w.meta_bytes;
    const int at = (k % SPAN * w.groups / SPAN) * 8 + g;
    const bool centred = w.groups == 16;
    const __half* halves = reinterpret_cast<const __half*>(meta);
    if (w.two_level) meta += w.zero == OFFSET ? 64 : 32;
    const int8_t* const levels = reinterpret_cast<const int8_t*>(meta) + (upper << w.bits);
    if (w.table) meta += 2 << w.bits;
    float s;
    if (w.two_level) {
        const float product = __half2float(halves[g * 2 + upper]) * float(meta[at * 2 + upper] - (w.zero == SYM || centred ? 128 : 0));   // exact
        s = __half2float(__float2half_rn(product));
    } else {
        s = __half2float(reinterpret_cast<const __half*>(meta)[at * 2 + upper]);
    }
    if (w.table) return s * float(levels[int(q)]);
    const uint8_t* z = meta + w.groups * (w.two_level ? 16 : 32);
    if (w.zero == OFFSET && w.two_level) {
        const int byte = z[(centred && w.bits == 6 ? at / 16 * 8 + g : at) * 2 + upper];
        const float o = __half2float(__float2half_rn(__half2float(halves[16 + g * 2 + upper]) * float(byte)));
        return fmaf(s, centred && w.bits > 2 ? q - float(1 << w.bits - 1) : q, o);
    }
    if (w.zero == OFFSET) return fmaf(s, q, __half2float(reinterpret_cast<const __half*>(z)[at * 2 + upper]));
    if (w.zero == SYM) return s * (q - float(1 << w.bits - 1));
    return s * (q - (w.bits == 4 ? float(z[at] >> (4 * upper) & 15) : float(z[at * 2 + upper])));
}
