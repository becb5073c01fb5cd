// Weights in EXL3's codes as numbers: exl3_expand_<bits>.
//
// The whole weight, transforms and scales of inputs and outputs included, as FP16 in the packed layout of `weights.cuh`: the left
// operand of products of many rows, whose x is left as it is. Grid (2 * spans, strips), 256 threads: a block has the 128 by
// 128 values that two transforms mix, each warp 16 inputs of all rows, whose outputs it transforms in registers, then in shared
// memory 16 rows, whose inputs it transforms. Shared memory: 128 rows of `EXPANDED_ROW` floats. Bytes: codes once; 2 per weight written.
#include "exl3.cuh"

struct Exl3ExpandArgs {
    const uint32_t* words;        // [strips][tiles][32 * WORDS]
    const __half* row_scales;     // [strips][128]
    const __half* scales;         // [inputs]; of several experts, whose strips follow each other: [experts][inputs]
    uint4* codes;                 // records [rows / 16][spans] of 8192 bytes
    int strips;                   // of an expert, or of the weight
    int tiles;                    // inputs / 32
    int spans;
    int first_row;                // of the stack, in which the weight's rows follow each other
    int half;                     // -1; or of gate and up, of each of which a record has 8 rows: 0 for gate, 1 for up
    int bytes;                    // of the code: values are sums of bytes, not of halves
    uint32_t multiplier;
    uint32_t addend;
};

constexpr int EXL3_WARPS = 8;
constexpr int EXPANDED_ROW = 132;   // floats of a row in shared memory, padded against bank conflicts

// The values of 16 inputs that a lane has of all rows of a strip: v[input][2 m + half] is row 16 m + 8 half + g of inputs 2t, 2t + 1,
// 2t + 8, 2t + 9.
template <class C, bool BYTES>
DEVICE void expand_values(float (&v)[4][16], const uint32_t (&words)[C::WORDS], int part, uint32_t multiplier, uint32_t addend) {
#pragma unroll
    for (int m = 0; m < 8; m++) {
        uint32_t a[4];
        exl3_chunk<C, BYTES>(a, words, part, m, exl3_before<C>(words, m), multiplier, addend);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&a[i]));
            v[i / 2 * 2][2 * m + i % 2] = f.x, v[i / 2 * 2 + 1][2 * m + i % 2] = f.y;
        }
    }
}

// Transforms them over the rows. It is the same for all codes, and stands once in a kernel.
DEVICE void transform_outputs(float (&v)[4][16]) {
    constexpr float NORM = 0.088388348f;   // 1 / sqrt 128
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int o = 1; o < 16; o *= 2)
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (i & o) continue;
                const float x = v[k][i], y = v[k][i | o];
                v[k][i] = x + y, v[k][i | o] = x - y;
            }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            v[k][i] *= NORM;
#pragma unroll
            for (int o = 4; o < 32; o *= 2) v[k][i] = fmaf(lane & o ? -1.f : 1.f, v[k][i], __shfl_xor_sync(~0u, v[k][i], o));
        }
    }
}

// Writes a warp's 16 rows of the block's 128 inputs, `rows` in shared memory, scaled: as one record, or as halves of two.
DEVICE void write_rows(const Exl3ExpandArgs& p, const float* rows, int row, bool there) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const __half* const row_scales = p.row_scales + blockIdx.y * STRIP + row;
    const float scales[2] = {__half2float(__ldg(row_scales + g)), __half2float(__ldg(row_scales + g + 8))};
    const __half* const input_scales = p.scales + size_t(blockIdx.y / p.strips) * p.tiles * TILE;
    const int first = p.first_row + blockIdx.y * STRIP + row, span = blockIdx.x / 2;
    for (int tile = 0; tile < 4; tile++) {
        const int k = tile * TILE + 8 * t, input = blockIdx.x * BLOCK + k;
        uint32_t v[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 f = *reinterpret_cast<const float2*>(rows + (g + 8 * h) * EXPANDED_ROW + k + 2 * i);
                const float2 s = there ? __half22float2(__ldg(reinterpret_cast<const __half2*>(input_scales + input + 2 * i))) : float2();
                v[h][i] = half2_bits(__floats2half2_rn(f.x * s.x * scales[h], f.y * s.y * scales[h]));
            }
        const int at = (blockIdx.x % 2 * 4 + tile) * 64 + lane;
        if (p.half < 0) {
            uint4* const to = p.codes + (size_t(first / 16) * p.spans + span) * 512 + at;
            to[0] = make_uint4(v[0][0], v[1][0], v[0][1], v[1][1]), to[32] = make_uint4(v[0][2], v[1][2], v[0][3], v[1][3]);
            continue;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t* const to = reinterpret_cast<uint32_t*>(p.codes + (size_t(first / 8 + h) * p.spans + span) * 512 + at) + p.half;
            to[0] = v[h][0], to[2] = v[h][1], to[128] = v[h][2], to[130] = v[h][3];
        }
    }
}

template <class C>
DEVICE void exl3_expand(const Exl3ExpandArgs& p) {
    float* const values = reinterpret_cast<float*>(dynamic_shared());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool there = int(blockIdx.x) * 4 < p.tiles;
    launch_dependents();
    if (there) {
        const int tile = blockIdx.x * 4 + warp / 2;
        const uint32_t* const unit = p.words + (size_t(blockIdx.y) * p.tiles + tile) * (C::WORDS * 32);
        uint32_t words[C::WORDS];
#pragma unroll
        for (int i = 0; i < C::WORDS / 4; i++) {
            const uint4 w = load_stream(unit + i * 128 + lane * 4);
            words[4 * i] = w.x, words[4 * i + 1] = w.y, words[4 * i + 2] = w.z, words[4 * i + 3] = w.w;
        }
        float v[4][16];
        // The part is one of two, so that places of bits are known.
        auto expand = [&](auto bytes) {
            if (warp % 2) expand_values<C, decltype(bytes)::value>(v, words, 1, p.multiplier, p.addend);
            else expand_values<C, decltype(bytes)::value>(v, words, 0, p.multiplier, p.addend);
        };
        if (p.bytes) expand(std::true_type{});
        else expand(std::false_type{});
        transform_outputs(v);
#pragma unroll
        for (int k = 0; k < 4; k += 2)
#pragma unroll
            for (int i = 0; i < 16; i++)
                *reinterpret_cast<float2*>(values + (8 * i + g) * EXPANDED_ROW + warp * 16 + 4 * k + 2 * t) = make_float2(v[k][i], v[k + 1][i]);
    }
    __syncthreads();
    float* const rows = values + warp * 16 * EXPANDED_ROW;
    for (int row = 0; row < 16; row++) {
        float u[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && there; i++) u[i] = rows[row * EXPANDED_ROW + lane + 32 * i];
        transform(u);
#pragma unroll
        for (int i = 0; i < 4; i++) rows[row * EXPANDED_ROW + lane + 32 * i] = u[i];
    }
    __syncwarp();
    wait_for_prerequisites();   // it may read what is here
    write_rows(p, rows, warp * 16, there);
}

#define EXPAND(bits)                                                                                                                            \
    extern "C" __global__ __launch_bounds__(EXL3_WARPS * 32) void exl3_expand_##bits(const __grid_constant__ Exl3ExpandArgs p) {                 \
        exl3_expand<exl3_##bits>(p);                                                                                                            \
    }

EXL3_BITS(EXPAND)
