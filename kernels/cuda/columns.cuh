// Several rows of activations as the right operand of tensor-core products, in device memory:
// what `columns.cu` makes and `gemv_batch.cuh` multiplies. Rows are the columns of the operand,
// eight at a time; their values are split as in `activations.cuh`.
//
// [groups of 8 rows][slots of 64 inputs] of
//   DigitColumns  for integer codes
//   HalfColumns   for FP16 weights
// A lane (g, t) of `mma` finds row g's inputs 8t .. 8t+7 of both chunks of 32 in word 4g + t.
#pragma once

#include "activations.cuh"

struct DigitColumns {
    uint4 words[2][32];   // [hi, lo]: {chunk 0 inputs 0..3, 4..7, chunk 1 inputs 0..3, 4..7}
    float scales[8];
    float sums[2][8];     // of each chunk
};

struct HalfColumns {
    uint4 words[2][2][32];   // [chunk][hi, lo]
};

// Lane c's cell (inputs 8c .. 8c+7 of a span) of row `row` of its group, from slot `to` of the
// span on.
template <int BITS>
DEVICE void put_cell(DigitColumns* to, int row, const float (&v)[8], int lane) {
    const CellDigits cell = digits_of<BITS>(v);
    const int chunk = lane / 4 % 2, t = lane % 4;
    // Each lane of a pair that shares words takes one digit.
    const uint32_t first = __shfl_xor_sync(~0u, chunk ? cell.high[0] : cell.low[0], 4);
    const uint32_t second = __shfl_xor_sync(~0u, chunk ? cell.high[1] : cell.low[1], 4);
    DigitColumns& slot = to[lane / 8];
    slot.words[chunk][row * 4 + t] = chunk ? make_uint4(first, second, cell.low[0], cell.low[1])
                                           : make_uint4(cell.high[0], cell.high[1], first, second);
    if (lane % 8 == 0) slot.scales[row] = cell.scale;
    if (t == 0) slot.sums[chunk][row] = cell.scale * float(cell.sum);
}

template <int BITS>
DEVICE void put_cell(HalfColumns* to, int row, const float (&v)[8], int lane) {
    const CellHalves cell = halves_of(v);
    uint4(&words)[2][32] = to[lane / 8].words[lane / 4 % 2];
    words[0][row * 4 + lane % 4] = cell.high;
    words[1][row * 4 + lane % 4] = cell.low;
}
