// Rows of x for products with weights in trellis codes (`trellis_rows.cu`), and FP16 rows for their FP16 copies.
//
//   x (normalized: x / rms(x) * gain) * scales -> Hadamard transform of each 128 -> X -> digits
//
// A product is one of the bytes of states (`trellis.cuh`), so what weights do to bytes is done to x instead, transposed:
// sum: each x four times; octagon: a pair becomes (x0, (x0 + x1) / sqrt 2, x1, (x1 - x0) / sqrt 2). A value X is split
// into two signed bytes, round(X / step) = 256 hi + lo, where the greatest of the row is 32,000: one step for a row,
// so sums stay integers through all of it.
//
//   digits  uint2 [groups of rows][inputs / 32 tiles][2 parts of 16 inputs (octagon)][group / 4][32 lanes]: lane (g, t) of
//           `mma_16832` has column g, the hi digits (g even) or lo digits (g odd) of row g / 2 of four; x: pair t of the part,
//           y: pair 4 + t. Sum has one for all 32 inputs, whose bytes are inputs t, 4 + t, .. 28 + t: `trellis_rows.cu`
//           repeats them.
//           EXL3 (`exl3.cuh`): as octagons, with two FP16 in place of the four digits of a pair: the values over the step, and
//           what they lack, of a step by which the greatest is 1,024
//   steps   float2 of a row: step / rms, and that times the sum of all digits, which stands for the bytes' mean
//
// `trellis_inputs_<code>`: grid of at least m blocks, one a row, of 512 threads; shared memory of inputs * 5 + 256 bytes, and of
// few rows of a mixture at least a `Chosen`.
// Nothing is written of rows from m on, and nobody reads those. Inputs are a multiple of 128, at most 32,768. The factors of
// x are there before the predecessor's end. Bytes: x, gain, scales once; 2 (octagon: 4) per input written, which stay in L2.
//
// `trellis_turn`: the transform alone, FP16 to FP16; grid m, 256 threads. Bytes: 4 per input, and the scales from L2.
#include "choose.cuh"
#include "trellis.cuh"

struct TrellisInputsArgs {
    const float* x;         // [m][inputs]; or null
    const __half* half;     // [m][padded] in operand order, normalized, if x is null
    const float* gain;      // [inputs], of RMSNorm; null: no norm
    const __half* scales;   // [inputs]; of experts in EXL3's codes: [experts][inputs]
    uint2* digits;
    float2* steps;          // [groups * group]
    int m;
    int inputs;
    int padded;
    int group;              // rows of a group: 4 or 16
    float eps;
    int holds_dependents;   // dependents are launched only after the end of the prerequisites
    const int4* sorted;     // [m / group], `ExpertRows` of `gemm.cuh`: where the rows of each group are in `half`; or null: in order
    // Few rows of a mixture in EXL3's codes: of each row of x, or of each of a row's experts, a row of digits for each expert.
    const float* scores;    // [m / per_token][experts]; or null
    int experts;
    int per_token;
    int normalized;
    int shared;             // all rows go through the last expert
    int of_each;            // x has a row for each of a row's experts: m rows
};

struct TrellisTurnArgs {
    const __half* x;        // [m][padded] in operand order
    const __half* scales;   // [inputs]
    __half* out;            // [m][padded] in operand order, zero past the inputs
    int m;
    int inputs;
    int padded;
};

constexpr int INPUTS_WARPS = 16;

template <bool OCTAGON, class Digits = RowDigits>
DEVICE void trellis_inputs(const TrellisInputsArgs& p) {
    constexpr bool OWN_SCALES = std::is_same_v<Digits, RowHalves>;   // experts have scales of inputs of their own
    // Input k is at k + k / 32 * PAD: the threads of a warp, which take tiles apart, then meet different banks.
    constexpr int PAD = OCTAGON ? 8 : 4;
    float* const row = reinterpret_cast<float*>(dynamic_shared());
    float* const meeting = row + p.inputs / 32 * (32 + PAD);   // [3][INPUTS_WARPS]
    auto pair_at = [&](int k) -> float2& { return *reinterpret_cast<float2*>(row + k + k / 32 * PAD); };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = blockIdx.x;
    if (!p.holds_dependents) launch_dependents();
    if (m >= p.m) return;

    // The row of x, and the scales of its expert. False: there is no such row.
    int from = m;
    const __half* scales = p.scales;
    auto find = [&] {
        int expert = 0;
        if (p.sorted) {
            const int4 of = __ldcg(p.sorted + m / p.group);
            from = of.y + m % p.group, expert = of.x;
            if (from >= of.z) return false;
        }
        if constexpr (OWN_SCALES) {
            if (p.scores) {
                static_assert(INPUTS_WARPS * 32 == MOST_EXPERTS);
                Chosen& chosen = *reinterpret_cast<Chosen*>(row);
                const int token = m / p.per_token;
                choose(chosen, p.scores + size_t(token) * p.experts, p.experts, p.per_token, p.normalized, p.shared);
                expert = chosen.expert[m % p.per_token];
                if (!p.of_each) from = token;
                __syncthreads();   // factors will be where the choice was
            }
            scales += size_t(expert) * p.inputs;
        }
        return true;
    };
    if constexpr (OWN_SCALES) {
        if (p.scores || p.sorted) wait_for_prerequisites();
        if (!find()) return;
    }

    // A lane has two pairs of inputs of a block; their factors wait where their values will be.
    const int first = p.x ? 4 * lane : operand_input(lane), second = p.x ? 2 : 8;
    for (int block = warp * BLOCK; block < p.inputs; block += INPUTS_WARPS * BLOCK) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int k = block + first + i * second;
            float2 f = __half22float2(__ldg(reinterpret_cast<const __half2*>(scales + k)));
            if (p.gain) {
                const float2 g = __ldg(reinterpret_cast<const float2*>(p.gain + k));
                f.x *= g.x, f.y *= g.y;
            }
            pair_at(k) = f;
        }
    }
    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();
    if (!OWN_SCALES && !find()) return;

    float most = 0.f, square = 0.f;
#pragma unroll 2
    for (int block = warp * BLOCK; block < p.inputs; block += INPUTS_WARPS * BLOCK) {
        float v[4];
        if (p.x) {
            const float4 x = __ldcg(reinterpret_cast<const float4*>(p.x + size_t(from) * p.inputs + block) + lane);
            v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        } else {
            load_four(v, __ldcg(reinterpret_cast<const uint2*>(p.half + size_t(from) * p.padded + block) + lane));
        }
        float2 &a = pair_at(block + first), &b = pair_at(block + first + second);
#pragma unroll
        for (int i = 0; i < 4; i++) square = fmaf(v[i], v[i], square);
        v[0] *= a.x, v[1] *= a.y, v[2] *= b.x, v[3] *= b.y;
        transform(v);
        a = make_float2(v[0], v[1]), b = make_float2(v[2], v[3]);
        most = greatest_of<OCTAGON && Digits::TURNED>(most, v);
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    square = warp_sum(square);
    if (lane == 0) meeting[warp] = most, meeting[INPUTS_WARPS + warp] = square;
    __syncthreads();
    most = meeting[lane % INPUTS_WARPS];
#pragma unroll
    for (int o = INPUTS_WARPS / 2; o > 0; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));

    // The norm's factor is that of all values: it goes to the step alone.
    Digits digits(most);
    const int tiles = p.inputs / TILE, fours = p.group / 4, j = m % p.group / 4, column = m % 4 * 2;
    uint2* const to = p.digits + (size_t(m / p.group) * tiles * DIGITS<OCTAGON> * fours + j) * 32 + column * 4;
    for (int item = threadIdx.x; item < p.inputs / (OCTAGON ? 4 : 8); item += INPUTS_WARPS * 32) {
        const int part = item / 4, t = item % 4;   // octagon: of 16 inputs; sum: of 32
        uint2 high, low;
        if constexpr (OCTAGON) {
            const float2 x = pair_at(part * 16 + 2 * t), y = pair_at(part * 16 + 8 + 2 * t);
            digits.pair(x.x, x.y, high.x, low.x);
            digits.pair(y.x, y.y, high.y, low.y);
        } else {
            const float* const x = row + part * (32 + PAD) + t;
            auto round = [&](int k) { return digits.round(x[k]); };
            digits.split({round(0), round(4), round(8), round(12)}, high.x, low.x);
            digits.split({round(16), round(20), round(24), round(28)}, high.y, low.y);
        }
        uint2* const at = to + part * (fours * 32) + t;
        at[0] = high, at[4] = low;
    }
    int* const sums = reinterpret_cast<int*>(meeting + 2 * INPUTS_WARPS);
    int sum = __reduce_add_sync(~0u, digits.sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = __reduce_add_sync(~0u, lane < INPUTS_WARPS ? sums[lane] : 0);
    square = warp_sum(lane < INPUTS_WARPS ? meeting[INPUTS_WARPS + lane] : 0.f);
    if (lane > 0) return;
    p.steps[m] = step_of<OCTAGON, Digits>(most, sum, p.gain, square, p.inputs, p.eps);
}

extern "C" __global__ __launch_bounds__(INPUTS_WARPS * 32) void trellis_inputs_octagon(const __grid_constant__ TrellisInputsArgs p) {
    trellis_inputs<true>(p);
}
extern "C" __global__ __launch_bounds__(INPUTS_WARPS * 32) void trellis_inputs_sum(const __grid_constant__ TrellisInputsArgs p) {
    trellis_inputs<false>(p);
}

extern "C" __global__ __launch_bounds__(INPUTS_WARPS * 32) void trellis_inputs_exl3(const __grid_constant__ TrellisInputsArgs p) {
    trellis_inputs<true, RowHalves>(p);
}

constexpr int TURN_WARPS = 8;

extern "C" __global__ __launch_bounds__(TURN_WARPS * 32) void trellis_turn(const __grid_constant__ TrellisTurnArgs p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t row = size_t(blockIdx.x) * p.padded;
    launch_dependents();
    wait_for_prerequisites();
#pragma unroll 2
    for (int block = warp * BLOCK; block < p.padded; block += TURN_WARPS * BLOCK) {
        uint2 out = make_uint2(0, 0);
        if (block < p.inputs) {
            const __half2* const scales = reinterpret_cast<const __half2*>(p.scales + block + operand_input(lane));
            const float2 a = __half22float2(__ldg(scales)), b = __half22float2(__ldg(scales + 4));
            float v[4];
            load_four(v, __ldcg(reinterpret_cast<const uint2*>(p.x + row + block) + lane));
            v[0] *= a.x, v[1] *= a.y, v[2] *= b.x, v[3] *= b.y;
            transform(v);
            out.x = half2_bits(__float22half2_rn(make_float2(clamp_half(v[0]), clamp_half(v[1]))));
            out.y = half2_bits(__float22half2_rn(make_float2(clamp_half(v[2]), clamp_half(v[3]))));
        }
        reinterpret_cast<uint2*>(p.out + row + block)[lane] = out;
    }
}
