// Gated DeltaNet (Yang et al., arXiv 2412.06464). A sequence has a matrix S [128 keys][128 values] per value head.
// A token with query q and key k (of length 1; q is then divided by the root of 128), value v, decay g and beta makes
//
//   S = g S;  d = beta (v - S^T k);  S += k d^T;  o = S^T q
//
// after a causal convolution over the last CONV tokens and SiLU made q, k and v of the products of the layer. The
// output of a head is the RMSNorm of o, times silu(z). Columns of S, one for each value, do not depend on each other.
//
// With a matrix are kept the convolution's last inputs, position p in row p % INPUTS. `delta_step.cu` has the rows of
// a step, `delta_rows.cu` those of prompts.
#pragma once

#include "columns.cuh"
#include "rows.cuh"

constexpr int DELTA_DIM = 128;
constexpr int CONV = 4;
// Rows of one sequence in a step, at most.
constexpr int MOST_DELTA_RUN = 16;
// Of a sequence's inputs of the convolution, those that are kept: while the blocks of a step write the newest, others
// still read the CONV - 1 in front of them.
constexpr int INPUTS = 20;
static_assert(INPUTS >= MOST_DELTA_RUN + CONV - 1);
constexpr int MATRIX = DELTA_DIM * DELTA_DIM;

struct DeltaLayer {
    const float* conv;      // [channels][CONV], that of the current token last
    const float* decay;     // [value_heads]: rates of decay, negated
    const float* dt_bias;   // [value_heads]
    const float* norm;      // [128]
    float* matrices;        // [places][value_heads][MATRIX]
    float* inputs;          // [places][INPUTS][channels]
    int key_heads;
    int value_heads;
    int tiled;              // value head h uses key head h % key_heads; otherwise those of a key head are neighbours
    float eps;

    DEVICE int keys() const { return key_heads * DELTA_DIM; }
    DEVICE int channels() const { return 2 * keys() + value_heads * DELTA_DIM; }
    // Values in a row of products: channels, and z.
    DEVICE int stride() const { return channels() + value_heads * DELTA_DIM; }
    DEVICE int key_head(int h) const { return tiled ? h % key_heads : h / (value_heads / key_heads); }
    // The first value head of its key head: what a key head has once is its work.
    DEVICE bool first_of_key(int h) const { return tiled ? h < key_heads : h % (value_heads / key_heads) == 0; }
    DEVICE float* matrix(int place, int h) const { return matrices + (size_t(place) * value_heads + h) * MATRIX; }
    DEVICE float* input(int place, int position) const { return inputs + (size_t(place) * INPUTS + position % INPUTS) * channels(); }
    // The logarithm of the decay, and beta, of a head, from its `b` and `a`.
    DEVICE float2 gates(float b, float a, int h) const {
        const float x = a + __ldg(dt_bias + h);
        const float step = x > 20.f ? x : log1pf(expf(x));
        return make_float2(__ldg(decay + h) * step, sigmoid(b));
    }
    // From a row's, [2 value_heads].
    DEVICE float2 gates(const float* ba, int h) const { return gates(__ldcg(ba + h), __ldcg(ba + value_heads + h), h); }
};

DEVICE float silu(float x) { return x * sigmoid(x); }
constexpr float UNIT_EPS = 1e-6f;
constexpr float QUERY_LENGTH = 0.08838834764831845f;   // 1 / sqrt(128)
// In memory a head's matrix is, for each 8 values, [16 j][32 lanes (g, t)] pairs: of value g keys 8j + 2t and the next.
constexpr int OF_EIGHT = 8 * DELTA_DIM;
// RMSNorm of a head's output `o`, times silu(z), by a warp: lane l has values 4l .. 4l+3.
DEVICE float4 gate_output(float4 o, float4 z, float4 norm, float eps) {
    const float r = rsqrtf(warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / DELTA_DIM + eps);
    return make_float4(o.x * r * norm.x * silu(z.x), o.y * r * norm.y * silu(z.y), o.z * r * norm.z * silu(z.z), o.w * r * norm.w * silu(z.w));
}

DEVICE void put_halves(__half* row, int k, float4 v) {
    *reinterpret_cast<__half2*>(row + operand_index(k)) = __float22half2_rn(make_float2(clamp_half(v.x), clamp_half(v.y)));
    *reinterpret_cast<__half2*>(row + operand_index(k + 2)) = __float22half2_rn(make_float2(clamp_half(v.z), clamp_half(v.w)));
}
