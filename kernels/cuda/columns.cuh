// Several rows of activations as the right operand of tensor-core products, in device memory:
// what `columns.cu` makes and `gemv_rows.cuh` and `gemv_batch.cuh` multiply. Their values are split
// in two as in `activations.cuh`. Of eight rows the columns of the operand are their first parts, and
// those of another operand their second parts; of up to four rows the columns are both parts of each.
//
// [groups of rows][slots of 64 inputs] of
//   DigitColumns  for integer codes
//   HalfColumns   for FP16 weights: always of eight rows
// A lane (g, t) of `mma` finds column g's inputs 8t .. 8t+7 of both chunks of 32 in word 4g + t.
#pragma once

#include <stddef.h>

#include "activations.cuh"

template <int ROWS>
struct DigitColumns {
    uint4 words[ROWS / 4][32];   // {chunk 0 inputs 0..3, 4..7, chunk 1 inputs 0..3, 4..7}
    float scales[ROWS];
    float sums[2][ROWS];         // of all inputs, and of those of the second chunk

    // Where inputs 8t .. 8t+7 of a part of a row are.
    DEVICE uint4& at(int row, int part, int t) { return ROWS == 8 ? words[part][row * 4 + t] : words[0][(row * 2 + part) * 4 + t]; }
};

struct HalfColumns {
    uint4 words[2][2][32];   // [chunk][part]
};

// Lane c's cell (inputs 8c .. 8c+7 of a span) of row `row` of its group, from slot `to` of the
// span on.
template <int BITS, int ROWS>
DEVICE void put_cell(DigitColumns<ROWS>* to, int row, const float (&v)[8], int lane) {
    const CellDigits cell = digits_of<BITS>(v);
    const int chunk = lane / 4 % 2, t = lane % 4;
    // Each lane of a pair that shares words takes one digit.
    const uint32_t first = __shfl_xor_sync(~0u, chunk ? cell.high[0] : cell.low[0], 4);
    const uint32_t second = __shfl_xor_sync(~0u, chunk ? cell.high[1] : cell.low[1], 4);
    const int all = cell.sum + __shfl_xor_sync(~0u, cell.sum, 4);
    DigitColumns<ROWS>& slot = to[lane / 8];
    slot.at(row, chunk, t) = chunk ? make_uint4(first, second, cell.low[0], cell.low[1]) : make_uint4(cell.high[0], cell.high[1], first, second);
    if (lane % 8 == 0) slot.scales[row] = cell.scale;
    if (t == 0) slot.sums[chunk][row] = cell.scale * float(chunk ? cell.sum : all);
}

// As `put_cell` for integer codes, of 128 inputs, of which lane l has 4l .. 4l+3: into two slots at `to`, of groups of
// `rows` rows. `nibbles`: codes have the order of those of 4 bits.
DEVICE void put_four(uint8_t* to, int rows, int row, bool nibbles, float4 v, int lane) {
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int m = 1; m < 16; m <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
    const float scale = most * (1.f / 32512.f), inverse = most > 1e-30f ? 32512.f / most : 0.f;
    const int a = __float2int_rn(v.x * inverse), d = __float2int_rn(v.w * inverse);
    int b = __float2int_rn(v.y * inverse), c = __float2int_rn(v.z * inverse);
    int sum = a + b + c + d;
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) sum += __shfl_xor_sync(~0u, sum, m);
    const int all = sum + __shfl_xor_sync(~0u, sum, 8);
    if (nibbles) {
        const int second = c;
        c = b, b = second;
    }
    const int chunk = lane / 8 % 2, t = lane % 8 / 2, group = rows == 8 ? sizeof(DigitColumns<8>) : sizeof(DigitColumns<4>);
    uint8_t* const slot = to + lane / 16 * group;
    const int first = rows == 8 ? row * 4 : row * 8, part = rows == 8 ? 32 : 4;   // as of `DigitColumns::at`
    uint32_t* const words = reinterpret_cast<uint32_t*>(slot) + (first + t) * 4 + chunk * 2 + lane % 2;
    words[0] = gather_bytes<1>(a + 128, b + 128, c + 128, d + 128);
    words[part * 4] = gather_bytes<0>(a, b, c, d);
    float* const scales = reinterpret_cast<float*>(slot + rows * 128);
    if (lane % 16 == 0) scales[row] = scale;
    if (lane % 8 == 0) scales[rows * (1 + chunk) + row] = scale * float(chunk ? sum : all);
}
static_assert(offsetof(DigitColumns<8>, scales) == 8 * 128 && offsetof(DigitColumns<4>, scales) == 4 * 128);

template <int BITS>
DEVICE void put_cell(HalfColumns* to, int row, const float (&v)[8], int lane) {
    const CellHalves cell = halves_of(v);
    uint4(&words)[2][32] = to[lane / 8].words[lane / 4 % 2];
    words[0][row * 4 + lane % 4] = cell.high;
    words[1][row * 4 + lane % 4] = cell.low;
}
