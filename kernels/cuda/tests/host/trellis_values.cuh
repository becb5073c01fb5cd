// The weights of trellis codes as FORMAT.md defines them, in f64, bit by bit.
#pragma once

#include "trellis.cuh"

namespace {

// Calls `put` with the row of the strip, the column of the tile, and the value of each weight of a unit, in units of the row's scale.
template <class C, class Put>
void each_weight(const uint32_t* unit, Put&& put) {
    constexpr int ALL = C::WORDS * 32, FOURS = C::WORDS / 4 * 4;
    for (int lane = 0; lane < 32; lane++) {
        auto bit = [&](int i) {
            const int n = (i + ALL) % ALL, w = n / 32;
            const uint32_t word = w < FOURS ? unit[w / 4 * 128 + lane * 4 + w % 4] : unit[FOURS * 32 + lane * (C::WORDS - FOURS) + w - FOURS];
            return word >> (31 - n % 32) & 1;
        };
        for (int step = 0; step < ALL / C::BITS; step++) {
            uint32_t state = 0;
            for (int i = 0; i < 16; i++) state = state << 1 | bit((step + 1) * C::BITS - 16 + i);
            const uint32_t h = state * (C::OCTAGON ? 0xAD1B72DBu : 0xD17F17D3u);
            double b[4];
            for (int i = 0; i < 4; i++) b[i] = ((h >> 8 * i & 255) - 127.5) / 128;
            const int part = step / 32, m = step / 4 % 8, i = step % 4;
            const int row = 16 * m + lane / 4 + 8 * (i % 2), column = C::WIDTH * (8 * part + 4 * (i / 2) + lane % 4);
            if (C::OCTAGON) put(row, column, b[0] + sqrt(.5) * (b[1] - b[3])), put(row, column + 1, b[2] + sqrt(.5) * (b[1] + b[3]));
            else put(row, column, b[0] + b[1] + b[2] + b[3]);
        }
    }
}

// The orthonormal Hadamard transform of 128 values.
void transform(double* v) {
    for (int o = 1; o < BLOCK; o *= 2)
        for (int i = 0; i < BLOCK; i++)
            if (!(i & o)) {
                const double a = v[i], b = v[i + o];
                v[i] = a + b, v[i + o] = a - b;
            }
    for (int i = 0; i < BLOCK; i++) v[i] /= sqrt(128.);
}

}   // namespace
