// Gated DeltaNet (Yang et al., arXiv 2412.06464). A sequence has a matrix S [128 keys][128 values] per value head.
// A token with query q and key k (of length 1; q is then divided by the root of 128), value v, decay g and beta makes
//
//   S = g S;  d = beta (v - S^T k);  S += k d^T;  o = S^T q
//
// after a causal convolution over the last CONV tokens and SiLU made q, k and v of the products of the layer. The
// output of a head is the RMSNorm of o, times silu(z). Columns of S, one for each value, do not depend on each other.
//
// With a matrix are kept the convolution's last inputs, position p in row p % INPUTS. `delta_step.cu` has the rows of
// a step, `layers_delta.cuh` that of the kernel of all layers, `delta_rows.cu` those of prompts.
#pragma once

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
// As `gate_output`, with the sigmoid of z in the place of its SiLU.
DEVICE float4 sigmoid_output(float4 o, float4 z, float4 norm, float eps) {
    const float r = rsqrtf(warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / DELTA_DIM + eps);
    return make_float4(o.x * r * norm.x * sigmoid(z.x), o.y * r * norm.y * sigmoid(z.y), o.z * r * norm.z * sigmoid(z.z), o.w * r * norm.w * sigmoid(z.w));
}

// The columns of 8 values, for single tokens. Lane (key group a = lane % 8, b = lane / 8) has keys 32i + 4a and the three
// that follow, i < 4, of values 2b and 2b + 1: few reads of k and q serve many values.
struct StateColumns {
    float4 s[4][2];

    static DEVICE size_t place(int eight, int i, int e, int lane) {
        const int a = lane % 8, b = lane / 8;
        return (eight * OF_EIGHT + (4 * i + a / 2) * 64 + (2 * b + e) * 8 + a % 2 * 4) / 4;
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) s[i][0] = s[i][1] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    DEVICE void load(const float* matrix, int eight, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) s[i][e] = __ldcg(reinterpret_cast<const float4*>(matrix) + place(eight, i, e, lane));
    }
    DEVICE void store(float* matrix, int eight, int lane) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) __stcg(reinterpret_cast<float4*>(matrix) + place(eight, i, e, lane), s[i][e]);
    }
    // A token: `k` and `q` [128] in shared memory, to be multiplied by `scale`s; `kq` their product with the scales;
    // `v` of the lane's values, of which it returns o. A token that is fed again has its `k` in global memory, and no q.
    template <bool AGAIN>
    DEVICE float2 feed(const float* k, const float* q, float2 scale, float kq, float2 v, float2 gates, int lane) {
        constexpr int SUMS = AGAIN ? 1 : 2;
        float sums[2][2][2] = {};   // [of every other i][by key, by query][value]
        float4 key[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = i * 8 + lane % 8;
            const float4* const keys = reinterpret_cast<const float4*>(k) + at;
            key[i] = AGAIN ? __ldcg(keys) : *keys;
            const float4 by[2] = {key[i], AGAIN ? key[i] : reinterpret_cast<const float4*>(q)[at]};
#pragma unroll
            for (int w = 0; w < SUMS; w++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 x = s[i][e];
                    sums[i % 2][w][e] = fmaf(x.w, by[w].w, fmaf(x.z, by[w].z, fmaf(x.y, by[w].y, fmaf(x.x, by[w].x, sums[i % 2][w][e]))));
                }
        }
#pragma unroll
        for (int w = 0; w < SUMS; w++) {
#pragma unroll
            for (int e = 0; e < 2; e++) sums[0][w][e] += sums[1][w][e];
        }
#pragma unroll
        for (int m = 1; m < 8; m <<= 1) {
#pragma unroll
            for (int w = 0; w < SUMS; w++)
#pragma unroll
                for (int e = 0; e < 2; e++) sums[0][w][e] += __shfl_xor_sync(~0u, sums[0][w][e], m);
        }
        const float decay = gates.x, beta = gates.y;
        float d[2], o[2];
        const float value[2] = {v.x, v.y};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            d[e] = beta * (value[e] - decay * (sums[0][0][e] * scale.x));
            o[e] = fmaf(kq, d[e], decay * (sums[0][1][e] * scale.y));
            d[e] *= scale.x;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float4& x = s[i][e];
                x.x = fmaf(key[i].x, d[e], decay * x.x), x.y = fmaf(key[i].y, d[e], decay * x.y);
                x.z = fmaf(key[i].z, d[e], decay * x.z), x.w = fmaf(key[i].w, d[e], decay * x.w);
            }
        return make_float2(o[0], o[1]);
    }
};

// A row that is kept: k and v after the convolution, then the decay, beta, and what makes k's length 1.
constexpr int KEPT_ROW = 2 * DELTA_DIM + 4;
constexpr int KEPT = MOST_DELTA_RUN * KEPT_ROW;

// Feeds `state` the first `count` rows of `kept` [KEPT] again.
DEVICE void feed_again(StateColumns& state, const float* kept, int count, int warp, int lane) {
#pragma unroll 1
    for (int r = 0; r < count; r++, kept += KEPT_ROW) {
        const float4 gates = __ldcg(reinterpret_cast<const float4*>(kept + 2 * DELTA_DIM));
        const float2 v = __ldcg(reinterpret_cast<const float2*>(kept + DELTA_DIM) + warp * 4 + lane / 8);
        state.feed<true>(kept, nullptr, make_float2(gates.z, 0.f), 0.f, v, make_float2(gates.x, gates.y), lane);
    }
}
