// How `trellis_rows.cuh` multiplies a unit of a weight in one of EXL3's codes.
#pragma once

#include "exl3.cuh"
#include "trellis_rows.cuh"

template <class C, bool BYTES, int FOURS>
DEVICE void multiply_exl3(float (&sums)[FOURS][8][4], const uint32_t (&words)[C::WORDS], UnitDigits<C, FOURS>& digits, const TrellisRowsArgs& p,
                          const uint8_t* own, bool owns, uint32_t next, int here) {
    uint32_t before[8];
#pragma unroll
    for (int m = 0; m < 8; m++) before[m] = exl3_before<C>(words, m);
#pragma unroll
    for (int part = 0; part < C::PARTS; part++) {
#pragma unroll
        for (int m = 0; m < 8; m++) {
            uint32_t a[4];
            exl3_chunk<C, BYTES>(a, words, part, m, before[m], p.multiplier, p.addend);
#pragma unroll
            for (int j = 0; j < FOURS; j++) mma_16816(sums[j][m], a[0], a[1], a[2], a[3], digits.x[part][j].x, digits.x[part][j].y);
        }
        digits.load(part, p.digits, own, owns, next, here);
    }
}

// See `multiply` of other codes: sums of floats.
template <class C, int FOURS>
DEVICE void multiply(float (&sums)[FOURS][8][4], const uint32_t (&words)[C::WORDS], UnitDigits<C, FOURS>& digits, const TrellisRowsArgs& p,
                     const uint8_t* own, bool owns, uint32_t next, int here) {
    if (p.bytes) multiply_exl3<C, true>(sums, words, digits, p, own, owns, next, here);
    else multiply_exl3<C, false>(sums, words, digits, p, own, owns, next, here);
}
