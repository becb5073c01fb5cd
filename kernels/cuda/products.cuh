// Records of integer codes in shared memory times digits of activations: see `gemv.cuh` for how the
// operands of tensor-core products are laid out.
#pragma once

#include <stddef.h>

#include "activations.cuh"
#include "weights.cuh"

// Sums of a lane: {row g high and low part, row g + 8 high and low part} of its slot.
template <class S>
struct IntegerSums {
    int first[4] = {}, second[4] = {};   // of inputs 0..3 and 4..7 of each eight

    DEVICE float row(int i) const {
        const int a = 2 * i, b = 2 * i + 1;
        if constexpr (S::PAIRED) return float((first[a] * 256 + first[b]) * 16 + (second[a] * 256 + second[b]));
        return float((first[a] + second[a]) * 256 + (first[b] + second[b]));
    }
};

// Multiplies up to N records of consecutive spans of a tile at a time: their products are
// independent of each other and hide each other's latency. `Row` has the digits of a span.
template <class S, int N, class Row>
struct Products {
    static constexpr int BITS = S::BITS, SLOT = S::SLOT, CODES = SPAN * 2 * BITS;
    const MetaAt<S> meta_at;
    const int meta_bytes, lane, g, t;
    uint4 x[N][4] = {};   // operands of each slot of 64; zero where the lane's slot is another

    DEVICE Products(int groups, int meta_bytes, int lane)
        : meta_at(groups, lane / 4, lane % 4), meta_bytes(meta_bytes), lane(lane), g(lane / 4), t(lane % 4) {}

    // Adds the products of `n` records to `y`, rows g and g + 8: of those whose codes lie at `codes` and
    // scales and zero-points at `meta`, and x at `row`. What lies behind the last record is read
    // and not used. Calls `between` when all is read but the sums are not there yet.
    template <class Between>
    DEVICE void add(float (&y)[2], uint32_t codes_at, uint32_t meta, uint32_t row, int n, Between&& between) {
        constexpr int WORDS = BITS == 8 ? 8 : 4;
        using Codes = std::conditional_t<BITS == 8, uint4[WORDS], Unit<BITS>[WORDS]>;
        constexpr uint32_t STRIDE = sizeof(Row), SLOTS = offsetof(Row, slots), SLOT_BYTES = sizeof(Row::slots) / 4;
        Codes codes[N];
        Meta<S> m[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t from = codes_at + i * CODES;
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                if constexpr (BITS == 8) {
                    codes[i][j] = load_shared_16(from + lane * 16 + j * 512);
                } else {
                    codes[i][j].words = load_shared_16(from + lane * 16 + j * S::UNIT);
                    codes[i][j].load_upper_shared(from + j * S::UNIT + Unit<BITS>::AT + lane * Unit<BITS>::WIDTH * 4);
                }
                if (SLOT == 64 && j < 4) load_shared_16_if(x[i][j], g / 2, j, row + i * STRIDE + lane * 16);
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) meta_at.load(m[i], meta + i * meta_bytes);
        if constexpr (SLOT == 64) {
            uint2 slot[N];
#pragma unroll
            for (int i = 0; i < N; i++) slot[i] = load_shared_8(row + i * STRIDE + SLOTS + t * SLOT_BYTES);
            IntegerSums<S> sums[N];
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const uint4 k = x[i][j];
                    if constexpr (BITS == 8) {
                        const uint4 v = codes[i][2 * j], w = codes[i][2 * j + 1];
                        mma_16832(sums[i].first, v.x, v.y, v.z, v.w, k.x, k.y);
                        mma_16832(sums[i].second, w.x, w.y, w.z, w.w, k.z, k.w);
                    } else if constexpr (S::PAIRED) {
                        constexpr uint32_t LOW = 0x0f0f0f0f;
                        const uint4 v = codes[i][j].words;
                        mma_16832(sums[i].first, v.x & LOW, v.y & LOW, v.z & LOW, v.w & LOW, k.x, k.y);
                        mma_16832(sums[i].second, v.x, v.y, v.z, v.w, k.z, k.w);
                    } else {
                        const Unit<BITS>& u = codes[i][j];
                        mma_16832(sums[i].first, u.bytes(0, 0), u.bytes(1, 0), u.bytes(2, 0), u.bytes(3, 0), k.x, k.y);
                        mma_16832(sums[i].second, u.bytes(0, 1), u.bytes(1, 1), u.bytes(2, 1), u.bytes(3, 1), k.z, k.w);
                    }
                }
            }
            between();
#pragma unroll
            for (int i = 0; i < N; i++)
                if (i == 0 || i < n) fold(y, sums[i], __uint_as_float(slot[i].x), __uint_as_float(slot[i].y), m[i], 0);
        } else {
            static_assert(N == 1);
            // Four chunks of 32 inputs are four slots.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t b = row + ((2 * half + g / 4) * 8 + (g & 1) * 4 + t) * 16;
                const int k = g / 2 % 2;
                const uint32_t x0 = load_shared_4(b + (BITS < 8 ? k : 2 * k) * 4), x1 = load_shared_4(b + (BITS < 8 ? 2 + k : 2 * k + 1) * 4);
                IntegerSums<S> sums;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const uint32_t b0 = g / 2 == c ? x0 : 0, b1 = g / 2 == c ? x1 : 0;
                    auto& to = c % 2 ? sums.second : sums.first;
                    if constexpr (BITS < 8) {
                        const Unit<BITS>& u = codes[0][2 * half + c / 2];
                        const int j = c % 2 * 2;
                        mma_16832(to, u.bytes(j, 0), u.bytes(j + 1, 0), u.bytes(j, 1), u.bytes(j + 1, 1), b0, b1);
                    } else {
                        const uint4 v = codes[0][4 * half + c];
                        mma_16832(to, v.x, v.y, v.z, v.w, b0, b1);
                    }
                }
                const float s = __uint_as_float(load_shared_4(row + SLOTS + (2 * half + t / 2) * SLOT_BYTES));
                fold(y, sums, s, __uint_as_float(load_shared_4(row + uint32_t(offsetof(Digits, sums)) + (4 * half + t) * 4)), m[0], half);
            }
            between();
        }
    }

private:
    DEVICE static void fold(float (&y)[2], const IntegerSums<S>& sums, float s, float sum, const Meta<S>& m, int half) {
        const float2 sc = m.scales(half), z = m.zeros(half);
        if constexpr (S::ZERO == OFFSET) {
            y[0] += sc.x * (s * sums.row(0)) + z.x * sum;
            y[1] += sc.y * (s * sums.row(1)) + z.y * sum;
        } else {
            y[0] = fmaf(sc.x, fmaf(s, sums.row(0), -z.x * sum), y[0]);
            y[1] = fmaf(sc.y, fmaf(s, sums.row(1), -z.y * sum), y[1]);
        }
    }
};
