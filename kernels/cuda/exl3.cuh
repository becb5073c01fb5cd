// Weights in EXL3's codes (`formats/src/exl3.rs`): what their kernels share.
//
// A state is the last 16 bits of a stream, to which a value adds BITS. Its product with a multiplier, plus an addend, gives a value
// in FP16: the sum of two halves, masked from the product, or of its bytes, centred and scaled. Products are
// those of `mma_16816`, whose left operand values are.
//
// Layout: strips of 128 rows, of these tiles of 32 inputs, each with 16 tiles of the file, of 16 inputs and 16 outputs. Of one of
// these a lane has a chunk of eight values: (g = lane / 4, t = lane % 4) has row g of inputs 2t, 2t + 1, 2t + 8, 2t + 9, then row
// g + 8 of these. The stream of a lane is its chunks, `8 part + m` of inputs `16 part ..` and rows `16 m ..`, and its words lie
// as those of other trellis codes (`trellis.cuh`). But a chunk continues that of the lane before, not the chunk before it:
// the file's tile is one sequence, cyclic, through all lanes.
//
// Rows of x lie as for octagons, in two FP16 parts (`RowHalves`). Outputs are transformed before they are scaled: a strip is a
// block of that transform.
#pragma once

#include "trellis.cuh"

template <int BITS_>
struct Exl3 {
    static constexpr bool OCTAGON = true;   // rows of x lie as for them
    static constexpr int BITS = BITS_;
    static constexpr int WIDTH = 1;
    static constexpr int WORDS = SEQUENCE * BITS / 32;
    static constexpr int UNIT = WORDS * 32 * 4;
    static constexpr int PARTS = 2;

    // For `trellis_rows.cuh`.
    using Sum = float;
    using Digits = RowHalves;
    static constexpr float UNIT_VALUE = 1.f;
    static constexpr bool PLAIN_GATE = true;   // gate and up, and experts, differ in scales of inputs; the former often in bits
    static DEVICE float joined(float high, float low) { return high + low; }

    // Transforms the outputs of a strip: a warp takes a row of x after the other.
    template <int GROUP, int WARPS>
    static DEVICE void finish(float* held) {
        const int lane = threadIdx.x % 32;
        __syncthreads();
        for (int row = threadIdx.x / 32; row < GROUP; row += WARPS) {
            float* const outputs = held + row / 4 * 512 + lane * 4 + row % 4;
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = outputs[i * 128];
            transform(v);
#pragma unroll
            for (int i = 0; i < 4; i++) outputs[i * 128] = v[i];
        }
        __syncthreads();
    }
};

using exl3_2 = Exl3<2>;
using exl3_3 = Exl3<3>;
using exl3_4 = Exl3<4>;
using exl3_5 = Exl3<5>;
using exl3_6 = Exl3<6>;
using exl3_7 = Exl3<7>;
using exl3_8 = Exl3<8>;

// Calls KERNELS for every number of bits.
#define EXL3_BITS(KERNELS) KERNELS(2) KERNELS(3) KERNELS(4) KERNELS(5) KERNELS(6) KERNELS(7) KERNELS(8)

// The values of two states. BYTES: they are sums of bytes.
template <bool BYTES>
DEVICE uint32_t exl3_values(uint32_t first, uint32_t second, uint32_t multiplier, uint32_t addend) {
    uint32_t a = first * multiplier, b = second * multiplier;
    if constexpr (BYTES) {
        // The sum counts up the last place of 1,024, then it is scaled and centred with one rounding.
        const uint32_t sums = __byte_perm(__dp4a(a, 0x01010101u, 0x6400u), __dp4a(b, 0x01010101u, 0x6400u), 0x5410);
        const uint32_t factor = 0x1eee1eee, offset = 0xc931c931;
        auto halves = [](const uint32_t& bits) { return *reinterpret_cast<const __half2*>(&bits); };
        return half2_bits(__hfma2(halves(sums), halves(factor), halves(offset)));
    } else {
        a = ((a + addend) & 0x8fff8fffu) ^ 0x3b603b60u, b = ((b + addend) & 0x8fff8fffu) ^ 0x3b603b60u;
        const uint32_t low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
        return half2_bits(__hadd2(*reinterpret_cast<const __half2*>(&low), *reinterpret_cast<const __half2*>(&high)));
    }
}

// What chunks `m` of both parts continue: the last bits of those of the lane before, 16 of each part.
template <class C>
DEVICE uint32_t exl3_before(const uint32_t (&words)[C::WORDS], int m) {
    constexpr int CHUNK = 8 * C::BITS;
    const uint32_t last = state_before<C>(words, (m + 1) * CHUNK) | state_before<C>(words, (m + 9) * CHUNK) << 16;
    return __shfl_sync(~0u, last, (threadIdx.x + 31) % 32);
}

// The values of chunk `8 part + m` as the left operand of `mma_16816`. `before`: of chunks `m`.
template <class C, bool BYTES>
DEVICE void exl3_chunk(uint32_t (&a)[4], const uint32_t (&words)[C::WORDS], int part, int m, uint32_t before, uint32_t multiplier, uint32_t addend) {
    const int from = (8 * part + m) * 8 * C::BITS;
    // The chunk's first 16 bits behind those before it.
    const uint32_t both = __byte_perm(state_before<C>(words, from + 16), before, part ? 0x7610 : 0x5410);
    uint32_t states[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int end = (j + 1) * C::BITS;
        states[j] = end < 16 ? both >> (16 - end) & 0xffff : state_before<C>(words, from + end);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int j = i / 2 * 2 + i % 2 * 4;   // a0 .. a3: row g, row g + 8, then their inputs 8 further
        a[i] = exl3_values<BYTES>(states[j], states[j + 1], multiplier, addend);
    }
}
