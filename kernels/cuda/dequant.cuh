// The left operand of tensor-core products, from packed codes (`weights.cuh`).
//
// Codes become FP16 integers q - z exactly. SCALED: they are then multiplied by their scale and
// rounded to FP16 once (by 2^-12 of themselves at most; scales too small for normal FP16 numbers
// lose nothing, as their products are multiples of 2^-24). Not SCALED: the scale, one for each
// slot of inputs, enters the sums. Offsets (w = s q + o) are always rounded once.
#pragma once

#include "weights.cuh"

// The scales and zero-points of a group's rows g and g + 8 as they stand in a record: `group` waits for them.
template <class S>
struct RawMeta {
    uint32_t scale, rows, zero;   // rows: of two levels, the scales of the rows
    uint32_t zero_rows;           // and their offsets

    DEVICE void load(const uint8_t* record, int groups, int group, int g) {
        if constexpr (S::BITS != 16) {
            const int at = group * 8 + g;
            if constexpr (S::ZERO == OFFSET && S::TWO_LEVEL) {
                zero_rows = reinterpret_cast<const uint32_t*>(record)[8 + g];
                zero = reinterpret_cast<const uint16_t*>(record + S::ROWS + groups * (8 * S::SCALE))[group / S::PER_ZERO * 8 + g];
            } else {
                GroupMeta<S> of;
                of.load_zero(record, groups, group, g);
                zero = of.zero;
            }
            if constexpr (S::TWO_LEVEL) {
                rows = reinterpret_cast<const uint32_t*>(record)[g];
                scale = reinterpret_cast<const uint16_t*>(record + S::ROWS)[at];
            } else {
                scale = reinterpret_cast<const uint32_t*>(record + S::ROWS)[at];
            }
        }
    }
    DEVICE GroupMeta<S> group() const {
        GroupMeta<S> of;
        of.zero = zero;
        if constexpr (S::ZERO == OFFSET && S::TWO_LEVEL) of.zero = scale_products<false>(zero_rows, zero);
        if constexpr (S::TWO_LEVEL) of.scale = scale_products<GroupMeta<S>::SIGNED>(rows, scale);
        else of.scale = scale;
        return of;
    }
};

template <class S, bool SCALED>
struct Dequant {
    static constexpr int BITS = S::BITS, ZERO = S::ZERO, SLOT = S::SLOT;
    static constexpr bool EXACT = BITS != 16 && ZERO != OFFSET && !SCALED;   // scales enter the sums

    // Of rows g and g + 8, each twice.
    __half2 scale[2];
    __half2 zero[2];   // 1024 + z, or offsets
    __half2 high[2];   // -64 - z: for the high nibbles, which become 64 + q

    // The group of the inputs that a lane (g, t) has of product j (16 inputs) of step `step` (64 inputs).
    static DEVICE int group_of(int groups, int step, int j, int t) {
        return SLOT == 64 ? step % 4 * groups >> 2 : SLOT == 32 ? step % 4 * 2 + j / 2 : step % 4 * 4 + j / 2 * 2 + t / 2;
    }
    // From the record's scales.
    DEVICE void load(const uint8_t* meta, int groups, int step, int j, int g, int t) {
        if constexpr (BITS != 16) {
            const int at = group_of(groups, step, j, t);
            GroupMeta<S> group;
            group.load_zero(meta, groups, at, g);
            group.load_scale(meta, at, g);
            set(group);
        }
    }

    DEVICE void set(const GroupMeta<S>& group) {
        if constexpr (BITS != 16) {
            const __half2 both = *reinterpret_cast<const __half2*>(&group.scale);
            scale[0] = __low2half2(both), scale[1] = __high2half2(both);
            if constexpr (ZERO == OFFSET) {
                const __half2 o = *reinterpret_cast<const __half2*>(&group.zero);
                zero[0] = __low2half2(o), zero[1] = __high2half2(o);
            } else {
                constexpr int ONE_ROW = BITS == 4 ? 15 : 255;
                const uint32_t of[2] = {ZERO == SYM ? S::MIDDLE : group.zero & ONE_ROW, ZERO == SYM ? S::MIDDLE : group.zero >> (BITS == 4 ? 4 : 8)};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    // In [1024, 2048) the last bit of FP16 stands for 1, in [64, 128) for 1 / 16.
                    zero[i] = __half2half2(__ushort_as_half(0x6400 | of[i]));
                    high[i] = __half2half2(__ushort_as_half(0xd400 | of[i] << 4));
                }
            }
        }
    }

    // What a lane has of the unit that holds product j of a step whose codes are at `codes`.
    static DEVICE Unit<S> unit(const uint8_t* codes, int j, int lane) {
        Unit<S> unit;
        unit.load(codes + j / (16 / S::ORDER) * 512, lane);
        return unit;
    }

    // Product j from its unit.
    DEVICE void product(uint32_t (&a)[4], const Unit<S>& unit, const LevelTables<S>& levels, int j) const {
        const uint32_t word[4] = {unit.word(0), unit.word(1), unit.word(2), unit.word(3)};
        if constexpr (S::TABLE) {
            constexpr uint32_t ONE = 0x64646464;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t codes = levels.bytes(unit, 2 * (j / 2) + i, j % 2) ^ 0x80808080;   // 128 + level
                a[i] = from_low(__byte_perm(codes, ONE, 0x4240), i);
                a[i + 2] = from_low(__byte_perm(codes, ONE, 0x4341), i);
            }
        } else if constexpr (BITS == 4) {
            constexpr uint32_t LO = 0x000f000f, HI = 0x00f000f0, ONE = 0x64006400;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t w = word[2 * (j / 2) + i], s = w >> 8;
                a[i] = j % 2 ? from_high(mask_or<HI, ONE>(w), i) : from_low(mask_or<LO, ONE>(w), i);
                a[i + 2] = j % 2 ? from_high(mask_or<HI, ONE>(s), i) : from_low(mask_or<LO, ONE>(s), i);
            }
        } else if constexpr (S::ORDER == 4) {
            constexpr uint32_t ONE = 0x64646464;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t codes = unit.bytes(2 * (j / 2) + i, j % 2);
                a[i] = from_low(__byte_perm(codes, ONE, 0x4240), i);
                a[i + 2] = from_low(__byte_perm(codes, ONE, 0x4341), i);
            }
        } else if constexpr (BITS == 8) {
            constexpr uint32_t ONE = 0x64646464;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                a[i] = from_low(__byte_perm(word[2 * (j % 2) + i], ONE, 0x4140), i);
                a[i + 2] = from_low(__byte_perm(word[2 * (j % 2) + i], ONE, 0x4342), i);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = word[i];
        }
    }

    // 1024 + q of row g (0) or g + 8 (1) to its weight.
    DEVICE uint32_t from_low(uint32_t h, int row) const {
        const __half2 v = *reinterpret_cast<__half2*>(&h);
        if constexpr (ZERO == OFFSET) {
            const __half2 q = __hsub2(v, __half2half2(__ushort_as_half(0x6400 + (S::CENTRED ? S::MIDDLE : 0))));   // 1024
            return half2_bits(__hfma2(q, scale[row], zero[row]));
        }
        const __half2 d = __hsub2(v, zero[row]);
        return half2_bits(SCALED ? __hmul2(d, scale[row]) : d);
    }

    // As above, from 1024 + 16 q.
    DEVICE uint32_t from_high(uint32_t h, int row) const {
        const __half2 v = *reinterpret_cast<__half2*>(&h), sixteenth = __half2half2(__ushort_as_half(0x2c00));
        if constexpr (ZERO == OFFSET) {
            const __half2 q = __hfma2(v, sixteenth, __half2half2(__ushort_as_half(0xd400)));   // -64
            return half2_bits(__hfma2(q, scale[row], zero[row]));
        }
        const __half2 d = __hfma2(v, sixteenth, high[row]);
        return half2_bits(SCALED ? __hmul2(d, scale[row]) : d);
    }
};
