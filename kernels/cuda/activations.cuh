// A row of activations as the right operand of tensor-core products, in shared memory.
//
// Kernels hand each other plain f32 rows; every block that multiplies one prepares it itself.
// A warp prepares a span of 256 inputs: lane c holds inputs 8c .. 8c+7 ("cell" c).
//
// For integer codes a value is split into two signed bytes: v = round(x / s) = 256 hi + lo, one
// scale s for 64 inputs, such that the greatest |v| is 32,512. Against the greatest of its 64
// inputs a value is off by 2^-16 at most: FP16 would round it to 2^-12 of itself.
//
//   Digits  uint4 [4 slots of 64 inputs][hi, lo][4 t]: the operand of lane (g, t) = (2 slot +
//           digit, t) in the order that the codes have (`weights.cuh`); of each slot its scale s and
//           s times the sum of v; s times the sum of v over each 32 inputs; zeros, the operand of
//           the lanes of other slots
//
// For FP16 weights it is split into two FP16 parts of x / 16: 22 bits of significand, and room
// up to 1,048,000.
//
//   Halves  uint4 [8 chunks of 32 inputs][hi, lo][4 t]: 8t .. 8t+7
#pragma once

#include "common.cuh"

struct Digits {
    uint4 words[32];
    float2 slots[4];   // scale, and the sum of the values
    float sums[8];
    uint4 zeros;
};

struct Halves {
    uint4 words[64];
};

constexpr float HALVES_SCALE = 0.0625f;

// Byte `b` of each of four words.
template <int B>
DEVICE uint32_t gather_bytes(int x, int y, int z, int w) {
    constexpr uint32_t PAIR = B | (B + 4) << 4;
    return __byte_perm(__byte_perm(x, y, PAIR), __byte_perm(z, w, PAIR), 0x5410);
}

// A lane's cell as digits: inputs 0..3 and 4..7, in the byte order of codes of BITS bits.
struct CellDigits {
    uint32_t high[2], low[2];
    float scale;   // of the slot
    int sum;       // of the values of the 32 inputs around the cell, over the scale: few lanes want it,
                   // and those convert it
};

template <int BITS>
DEVICE CellDigits digits_of(const float (&v)[8]) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
    // Where all are tiny the reciprocal stays finite, and the digits zero.
    const float scale = most * (1.f / 32512.f), inverse = most > 1e-30f ? 32512.f / most : 0.f;
    int d[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        d[i] = __float2int_rn(v[i] * inverse);
        sum += d[i];
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    // int4 holds inputs 0, 1, 2, 3 in bytes 0, 2, 1, 3.
    constexpr int SECOND = BITS == 4 ? 2 : 1, THIRD = 3 - SECOND;
    CellDigits cell;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int *e = d + 4 * h;
        cell.low[h] = gather_bytes<0>(e[0], e[SECOND], e[THIRD], e[3]);
        // The low byte counts as signed: what it takes too much, the high one gets back.
        cell.high[h] = gather_bytes<1>(e[0] + 128, e[SECOND] + 128, e[THIRD] + 128, e[3] + 128);
    }
    cell.scale = scale;
    cell.sum = sum;
    return cell;
}

// Fills `to` from this lane's cell `v`. BITS: of the codes that it will meet.
template <int BITS>
DEVICE void prepare(Digits& to, const float (&v)[8], int lane) {
    const CellDigits cell = digits_of<BITS>(v);
    // int4: {chunk 0 inputs 0..3, chunk 1 inputs 0..3, chunk 0 inputs 4..7, chunk 1 inputs 4..7}
    // int8: {chunk 0 inputs 0..3, chunk 0 inputs 4..7, chunk 1 ...}
    const int slot = lane / 8, chunk = lane / 4 % 2, t = lane % 4;
    uint32_t* const words = reinterpret_cast<uint32_t*>(to.words + slot * 8 + t);
    const int first = BITS == 4 ? chunk : 2 * chunk, second = BITS == 4 ? 2 + chunk : 2 * chunk + 1;
    words[first] = cell.high[0];
    words[second] = cell.high[1];
    words[16 + first] = cell.low[0];
    words[16 + second] = cell.low[1];
    const int sum = cell.sum + __shfl_xor_sync(~0u, cell.sum, 4);
    if (lane % 8 == 0) to.slots[slot] = make_float2(cell.scale, cell.scale * float(sum));
    if (lane % 4 == 0) to.sums[lane / 4] = cell.scale * float(cell.sum);
    if (lane == 0) to.zeros = make_uint4(0, 0, 0, 0);
}

// A lane's cell as FP16: high parts, and what they lost.
struct CellHalves {
    uint4 high, low;
};

DEVICE CellHalves halves_of(const float (&v)[8]) {
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = clamp_half(v[2 * i] * HALVES_SCALE), y = clamp_half(v[2 * i + 1] * HALVES_SCALE);
        const __half2 h = __float22half2_rn(make_float2(x, y));
        const float2 f = __half22float2(h);
        hi[i] = half2_bits(h);
        lo[i] = half2_bits(__float22half2_rn(make_float2(x - f.x, y - f.y)));
    }
    return {make_uint4(hi[0], hi[1], hi[2], hi[3]), make_uint4(lo[0], lo[1], lo[2], lo[3])};
}

template <int BITS>
DEVICE void prepare(Halves& to, const float (&v)[8], int lane) {
    const CellHalves cell = halves_of(v);
    uint4* const words = to.words + lane / 4 * 8 + lane % 4;
    words[0] = cell.high;
    words[4] = cell.low;
}
