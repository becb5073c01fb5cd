// What the kernels over many rows share: where each row stands, and the cache.
#pragma once

#include "common.cuh"

constexpr int HEAD_DIM = 128;

// A row of a batch: a token at a position of a sequence.
struct Row {
    int position;
    int slot;
};

// Positions of a page of keys and values.
constexpr int PAGE = 128;

// One layer's keys and values of all sequences, in pages: position p of a sequence is row p % PAGE
// of page tables[slot][p / PAGE]. FP16, or int8 with one f16 scale per head and position
// (`key_scales` not null). Finite everywhere, also past the positions in use. Values have the
// positions of a page side by side.
struct Cache {
    void* keys;               // [pages][kv_heads][PAGE][128]
    void* values;             // [pages][kv_heads][128][PAGE]
    __half* key_scales;       // [pages][kv_heads][PAGE]
    __half* value_scales;
    const uint32_t* tables;   // [slots][table_len], written before the kernels of a step start
    int kv_heads;
    int table_len;

    DEVICE uint32_t page(int slot, int position) const { return __ldcg(tables + size_t(slot) * table_len + position / PAGE); }
    // Which head of all pages' heads.
    DEVICE size_t head(uint32_t page, int kv) const { return size_t(page) * kv_heads + kv; }
};

// What happens to a layer's queries, keys and values before attention: biases are added, then the heads of
// queries and keys are normalized.
struct HeadVectors {
    const float* gains[2];    // [128], of queries and of keys; null: no norm
    const float* biases[3];   // of queries [heads][128], of keys and of values [kv_heads][128]; null: none
};

// Gains of a norm, of which lane l holds elements 4l .. 4l+3.
struct HeadGain {
    float4 w;
    bool norm;   // false: there is no norm

    DEVICE HeadGain(const float* from, int lane) : w(make_float4(1.f, 1.f, 1.f, 1.f)), norm(from != nullptr) {
        if (norm) w = __ldg(reinterpret_cast<const float4*>(from) + lane);
    }
};

// Adds the bias of head `head` of queries (`which` 0), keys (1) or values (2), if they have one.
DEVICE float4 add_bias(float4 v, const HeadVectors& vectors, int which, int head, int lane) {
    const float* const from = vectors.biases[which];
    if (from == nullptr) return v;
    const float4 b = __ldg(reinterpret_cast<const float4*>(from + head * HEAD_DIM) + lane);
    return make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
}

// RMSNorm, if there is one, and rotary embedding of one head by one warp; lane l holds elements 4l .. 4l+3,
// `gain` their gains, `c0` and `c1` the cosines and sines of their pairs.
DEVICE float4 turn_head(float4 v, const HeadGain& gain, float4 c0, float4 c1, float eps, int lane) {
    if (gain.norm) {
        const float4 w = gain.w;
        float r = rsqrtf(warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) / HEAD_DIM + eps);
        v.x *= r * w.x, v.y *= r * w.y, v.z *= r * w.z, v.w *= r * w.w;
    }
    float4 o;   // the other half of each pair
    o.x = __shfl_xor_sync(~0u, v.x, 16);
    o.y = __shfl_xor_sync(~0u, v.y, 16);
    o.z = __shfl_xor_sync(~0u, v.z, 16);
    o.w = __shfl_xor_sync(~0u, v.w, 16);
    float sign = lane < 16 ? -1.f : 1.f;
    return make_float4(v.x * c0.x + sign * o.x * c0.y, v.y * c0.z + sign * o.y * c0.w,
                       v.z * c1.x + sign * o.z * c1.y, v.w * c1.z + sign * o.w * c1.w);
}

// Rounds one head's vector, elements 4l .. 4l+3 in lane l, to codes and a scale.
DEVICE char4 int8_codes(float4 v, __half& scale) {
    float top = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    scale = __float2half_rn(fminf(top / 127.f, 65504.f));
    float f = __half2float(scale), inv = f > 0.f ? 1.f / f : 0.f;
    auto code = [&](float x) { return int(fminf(fmaxf(roundf(x * inv), -127.f), 127.f)); };
    return make_char4(code(v.x), code(v.y), code(v.z), code(v.w));
}

// Rounds a pair to FP16, high part and what rounding lost.
DEVICE void split_pair(float x, float y, uint32_t& hi, uint32_t& lo) {
    __half2 h = __float22half2_rn(make_float2(x, y));
    float2 f = __half22float2(h);
    hi = half2_bits(h);
    lo = half2_bits(__float22half2_rn(make_float2(x - f.x, y - f.y)));
}

// One head's key (`which` 0) or value (1) as it is kept: 8 bytes, or 4 of codes, per lane.
struct Kept {
    uint2 half;
    char4 code;
    __half scale;
};

template <bool INT8>
DEVICE Kept round_row(float4 v) {
    Kept k;
    if constexpr (INT8) {
        k.code = int8_codes(v, k.scale);
    } else {
        // Finite, whatever it is: rows that are not seen are multiplied with zero, also by sequences
        // that get the page later.
        auto finite = [](float x) { return fminf(fmaxf(x, -65504.f), 65504.f); };
        k.half = make_uint2(half2_bits(__float22half2_rn(make_float2(finite(v.x), finite(v.y)))),
                            half2_bits(__float22half2_rn(make_float2(finite(v.z), finite(v.w)))));
    }
    return k;
}

// Stores it as row `row` of a page's head `head` (`Cache::head`).
template <bool INT8>
DEVICE void store_row(const Cache& c, int which, size_t head, int row, const Kept& k, int lane) {
    const size_t at = head * PAGE + row;
    if constexpr (INT8) {
        if (which == 0) {
            static_cast<char4*>(c.keys)[at * 32 + lane] = k.code;
        } else {
            int8_t* to = static_cast<int8_t*>(c.values) + (head * HEAD_DIM + lane * 4) * PAGE + row;
            to[0] = k.code.x, to[PAGE] = k.code.y, to[PAGE * 2] = k.code.z, to[PAGE * 3] = k.code.w;
        }
        if (lane == 0) (which ? c.value_scales : c.key_scales)[at] = k.scale;
    } else if (which == 0) {
        static_cast<uint2*>(c.keys)[at * 32 + lane] = k.half;
    } else {
        const __half* h = reinterpret_cast<const __half*>(&k.half);
        __half* to = static_cast<__half*>(c.values) + (head * HEAD_DIM + lane * 4) * PAGE + row;
        to[0] = h[0], to[PAGE] = h[1], to[PAGE * 2] = h[2], to[PAGE * 3] = h[3];
    }
}

// Two signed bytes (0 and 1, or 2 and 3) as FP16, exactly.
template <int PAIR>
DEVICE uint32_t bytes_to_half2(uint32_t w) {
    uint32_t h = __byte_perm(w ^ 0x80808080u, 0x64646464u, PAIR == 0 ? 0x4140 : 0x4342);
    return half2_bits(__hsub2(*reinterpret_cast<__half2*>(&h), __half2half2(__ushort_as_half(0x6480))));   // 1152
}

// Eight signed bytes as FP16.
DEVICE uint4 bytes_to_halves(uint32_t first, uint32_t second) {
    return make_uint4(bytes_to_half2<0>(first), bytes_to_half2<1>(first), bytes_to_half2<0>(second), bytes_to_half2<1>(second));
}

// Eight cached elements from shared memory as FP16.
template <bool INT8>
DEVICE uint4 load_eight(const int8_t* from) {
    if constexpr (INT8) {
        const uint2 c = *reinterpret_cast<const uint2*>(from);
        return bytes_to_halves(c.x, c.y);
    } else {
        return *reinterpret_cast<const uint4*>(from);
    }
}

// The `h`-th eight of 16 bytes of cached elements as FP16.
template <bool INT8>
DEVICE uint4 eight_of(const uint4& w, int h) {
    if constexpr (INT8) return h == 0 ? bytes_to_halves(w.x, w.y) : bytes_to_halves(w.z, w.w);
    return w;
}
