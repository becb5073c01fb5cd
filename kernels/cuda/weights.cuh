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
//   int8   4096 B: chunk c is 512 B, 16 B a lane = {g, g+8} inputs 0..3, {g, g+8} inputs 4..7
//   fp16   8192 B: product j is 512 B, 16 B a lane = a0, a1, a2, a3 of `mma_16816`
//
// A slot is 64 inputs (32 for groups of 32): the span of inputs that share a scale and that
// share one column pair of the right operand, see `gemv.cuh`.
//
// Scales and zero-points of record (tile, span), G groups in a span (8, 4, 2; 1 if groups are
// wider), padded to 16 bytes:
//   f16 scales    [G][8 g][2]: rows g, g + 8
//   int4 zeros    [G][8 g] bytes: low nibble row g, high nibble row g + 8
//   int8 zeros    [G][8 g][2] bytes
//   f16 offsets   [G][8 g][2]
#pragma once

#include "common.cuh"

enum Zero { SYM = 0, INT = 1, OFFSET = 2 };

// What a step's product becomes: see `gemv.cuh`.
enum Epilogue { STORE = 0, ADD = 1, SILU = 2, HEAD = 3 };

constexpr int SPAN = 256;

// 16-byte loads of a lane for one span.
template <int BITS>
constexpr int LOADS = BITS;

// Most bytes of scales and zero-points of one record, with slots of SLOT inputs.
template <int BITS, int ZERO, int SLOT>
constexpr int MOST_META =
    BITS == 16 ? 0 : (SPAN / SLOT) * (32 + (ZERO == SYM ? 0 : ZERO == OFFSET ? 32 : BITS == 4 ? 8 : 16));

// Scales and zero-points of one group of a tile for one lane: rows g and g + 8.
template <int BITS, int ZERO>
struct GroupMeta {
    uint32_t scale;
    uint32_t zero;

    // Of group `group` from a record of `groups`.
    DEVICE void load(const uint8_t* record, int groups, int group, int g) {
        if constexpr (BITS != 16) {
            const int at = group * 8 + g;
            scale = reinterpret_cast<const uint32_t*>(record)[at];
            const uint8_t* z = record + groups * 32;
            if constexpr (ZERO == OFFSET) zero = reinterpret_cast<const uint32_t*>(z)[at];
            if constexpr (ZERO == INT && BITS == 4) zero = z[at];
            if constexpr (ZERO == INT && BITS == 8) zero = reinterpret_cast<const uint16_t*>(z)[at];
        }
    }

    DEVICE float2 scales() const {
        return __half22float2(*reinterpret_cast<const __half2*>(&scale));
    }

    // Zero-points, or offsets.
    DEVICE float2 zeros() const {
        if constexpr (ZERO == SYM) return BITS == 4 ? make_float2(8.f, 8.f) : make_float2(128.f, 128.f);
        if constexpr (ZERO == OFFSET) return __half22float2(*reinterpret_cast<const __half2*>(&zero));
        if constexpr (ZERO == INT && BITS == 4) return make_float2(zero & 15, zero >> 4);
        return make_float2(zero & 255, zero >> 8);
    }
};

// The group of slot t (and, with slots of 32, of slot t + 4).
template <int BITS, int ZERO, int SLOT>
struct Meta {
    static constexpr int N = SLOT == 32 ? 2 : 1;
    GroupMeta<BITS, ZERO> of[N];

    // From a record.
    DEVICE void load(const uint8_t* record, int groups, int g, int t) {
#pragma unroll
        for (int i = 0; i < N; i++) of[i].load(record, groups, SLOT == 32 ? t + 4 * i : t * groups >> 2, g);
    }

    DEVICE float2 scales(int i) const { return of[i].scales(); }
    DEVICE float2 zeros(int i) const { return of[i].zeros(); }
};

// Where in a record in shared memory lane (g, t) finds its scales and zero-points.
template <int BITS, int ZERO, int SLOT>
struct MetaAt {
    static constexpr int ZERO_BYTES = ZERO == OFFSET ? 4 : BITS == 4 ? 1 : 2;   // of two rows
    uint32_t scale, zero;
    // With slots of 32 the lane's second group is that after the next three.
    static constexpr uint32_t SECOND = 4 * 8;

    DEVICE MetaAt(int groups, int g, int t) {
        const uint32_t at = (SLOT == 32 ? t : t * groups >> 2) * 8 + g;
        scale = keep(at * 4), zero = keep(groups * 32 + at * ZERO_BYTES);
    }

    DEVICE void load(Meta<BITS, ZERO, SLOT>& to, uint32_t record) const {
        if constexpr (BITS != 16) {
#pragma unroll
            for (int i = 0; i < Meta<BITS, ZERO, SLOT>::N; i++) {
                to.of[i].scale = load_shared_4(record + scale + i * SECOND * 4);
                const uint32_t z = record + zero + i * SECOND * ZERO_BYTES;
                if constexpr (ZERO == OFFSET) to.of[i].zero = load_shared_4(z);
                if constexpr (ZERO == INT && BITS == 4) to.of[i].zero = load_shared_1(z);
                if constexpr (ZERO == INT && BITS == 8) to.of[i].zero = load_shared_2(z);
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
    int zero;         // Zero
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
    if (w.bits == 4) {
        uint32_t word = reinterpret_cast<const uint32_t*>(codes + (c / 2 * 32 + lane) * 16)[c % 2 * 2 + upper];
        q = word >> (i / 4 * 4 + i % 2 * 16 + i % 4 / 2 * 8) & 15;
    } else {
        q = codes[(c * 32 + lane) * 16 + i / 4 * 8 + upper * 4 + i % 4];
    }
    const uint8_t* meta = w.meta + record * w.meta_bytes;
    const int at = (k % SPAN * w.groups / SPAN) * 8 + g;
    const float s = __half2float(reinterpret_cast<const __half*>(meta)[at * 2 + upper]);
    const uint8_t* z = meta + w.groups * 32;
    if (w.zero == OFFSET) return fmaf(s, q, __half2float(reinterpret_cast<const __half*>(z)[at * 2 + upper]));
    if (w.zero == SYM) return s * (q - (w.bits == 4 ? 8.f : 128.f));
    return s * (q - (w.bits == 4 ? float(z[at] >> (4 * upper) & 15) : float(z[at * 2 + upper])));
}
