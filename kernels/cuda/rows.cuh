// What the kernels over rows share: where each row stands, and the cache.
//
// Heads have DIM values, 128 or 256, of which lane l of a warp holds 4l .. 4l+3 of each 128 (`Head`).
#pragma once

#include "common.cuh"

constexpr int HEAD_DIM = 128;   // of the kernels that serve no others
constexpr int WIDE_HEAD_DIM = 256;

// Behind the queries of each wide head stand the gates of its output: what the head attended to is multiplied by
// their sigmoid. In heads: those of a row's products, and where queries and keys of these numbers are.
template <int DIM>
struct HeadsOf {
    static constexpr bool GATED = DIM == WIDE_HEAD_DIM;
    static constexpr int ROTARY_DIMS = DIM == WIDE_HEAD_DIM ? 64 : DIM;   // values that the rotary embedding turns
    static constexpr int EACH = GATED ? 2 : 1;
    static DEVICE int width(int heads, int kv_heads) { return heads * EACH + 2 * kv_heads; }
    static DEVICE int query(int head) { return head * EACH; }
    static DEVICE int gate(int head) { return head * EACH + 1; }
    static DEVICE int key(int heads, int kv) { return heads * EACH + kv; }
    // log2(e) / sqrt(DIM): softmax by powers of two.
    static constexpr float SCALE = 1.4426950408889634f * (DIM == WIDE_HEAD_DIM ? 0.0625f : 0.08838834764831845f);
};

// A warp's vector of a head.
template <int DIM>
struct Head {
    static constexpr int PARTS = DIM / 128;
    float4 part[PARTS];

    // Of `DIM` values from `from` on, as another kernel has left them.
    static DEVICE Head load(const float* from, int lane) {
        Head head;
#pragma unroll
        for (int j = 0; j < PARTS; j++) head.part[j] = __ldcg(reinterpret_cast<const float4*>(from) + j * 32 + lane);
        return head;
    }
};

DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// A row of a batch: a token at a position of a sequence.
struct Row {
    int position;   // Position in its sequence.
    int slot;       // Its sequence.
    int shift;      // Its row of the rotary table less its position: behind images it is fewer, in them a row of its own.

    DEVICE int turn() const { return position + shift; }
};

// A row of a decode step. It lies in device memory, so that one CUDA graph serves every step.
struct Step {
    int position;     // Position of the token that is fed.
    int slot;         // Its sequence.
    uint32_t token;   // The token.
    int drawn;        // Number of tokens sampled since the steps were queued.
    int behind;       // Of a sequence's first row: the rows in front of it that an earlier step kept, and that the sequence's
                      // states do not contain yet (`delta_step.cu`).
    int shift;        // Its row of the rotary table less its position.
};

// Positions of a page of keys and values.
constexpr int PAGE = 128;

// One layer's keys and values of all sequences, in pages: position p of a sequence is row p % PAGE
// of page tables[slot][p / PAGE]. FP16, or int8 with one f16 scale per head and position
// (`key_scales` not null). Finite everywhere, also past the positions in use. Values have the
// positions of a page side by side.
struct Cache {
    void* keys;               // [pages][kv_heads][PAGE][DIM]
    void* values;             // [pages][kv_heads][DIM][PAGE]
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
    const float* gains[2];    // [DIM], of queries and of keys; null: no norm
    const float* biases[3];   // of queries [heads][DIM], of keys and of values [kv_heads][DIM]; null: none
};

// A lane's gains of a norm.
template <int DIM = HEAD_DIM>
struct HeadGain {
    Head<DIM> w;
    bool norm;   // false: there is no norm

    DEVICE HeadGain(const float* from, int lane) : norm(from != nullptr) {
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++)
            w.part[j] = norm ? __ldg(reinterpret_cast<const float4*>(from) + j * 32 + lane) : make_float4(1.f, 1.f, 1.f, 1.f);
    }
};

// Adds the bias of head `head` of queries (`which` 0), keys (1) or values (2), if they have one.
template <int DIM = HEAD_DIM>
DEVICE Head<DIM> add_bias(Head<DIM> v, const HeadVectors& vectors, int which, int head, int lane) {
    const float* const from = vectors.biases[which];
    if (from == nullptr) return v;
#pragma unroll
    for (int j = 0; j < Head<DIM>::PARTS; j++) {
        const float4 b = __ldg(reinterpret_cast<const float4*>(from + head * DIM) + j * 32 + lane);
        v.part[j] = make_float4(v.part[j].x + b.x, v.part[j].y + b.y, v.part[j].z + b.z, v.part[j].w + b.w);
    }
    return v;
}

// A lane's cosines and sines: of the pairs of its values of the first 128, where those turn.
template <int DIM = HEAD_DIM>
struct Turn {
    float4 first, second;

    // From the row of a position, [HeadsOf<DIM>::ROTARY_DIMS / 2] pairs.
    static DEVICE const float4* of(const float2* row, int lane) {
        return reinterpret_cast<const float4*>(row) + lane % (HeadsOf<DIM>::ROTARY_DIMS / 8) * 2;
    }
    DEVICE explicit Turn(const float4* at) : first(__ldg(at)), second(__ldg(at + 1)) {}
};

// RMSNorm, if there is one, and rotary embedding of one head by one warp.
template <int DIM = HEAD_DIM>
DEVICE Head<DIM> turn_head(Head<DIM> v, const HeadGain<DIM>& gain, const Turn<DIM>& turn, float eps, int lane) {
    constexpr int HALF = HeadsOf<DIM>::ROTARY_DIMS / 8;   // lanes that hold one half of the pairs
    if (gain.norm) {
        float squares = 0.f;
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++) {
            const float4 x = v.part[j];
            squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
        }
        const float r = rsqrtf(warp_sum(squares) / DIM + eps);
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++) {
            const float4 w = gain.w.part[j];
            float4& x = v.part[j];
            x.x *= r * w.x, x.y *= r * w.y, x.z *= r * w.z, x.w *= r * w.w;
        }
    }
    float4& x = v.part[0];
    float4 o;   // the other half of each pair
    o.x = __shfl_xor_sync(~0u, x.x, HALF);
    o.y = __shfl_xor_sync(~0u, x.y, HALF);
    o.z = __shfl_xor_sync(~0u, x.z, HALF);
    o.w = __shfl_xor_sync(~0u, x.w, HALF);
    const float sign = lane < HALF ? -1.f : 1.f;
    const float4 c0 = turn.first, c1 = turn.second;
    if (lane < 2 * HALF)
        x = make_float4(x.x * c0.x + sign * o.x * c0.y, x.y * c0.z + sign * o.y * c0.w, x.z * c1.x + sign * o.z * c1.y,
                        x.w * c1.z + sign * o.w * c1.w);
    return v;
}

// Rounds a pair to FP16, high part and what rounding lost.
DEVICE void split_pair(float x, float y, uint32_t& hi, uint32_t& lo) {
    __half2 h = __float22half2_rn(make_float2(x, y));
    float2 f = __half22float2(h);
    hi = half2_bits(h);
    lo = half2_bits(__float22half2_rn(make_float2(x - f.x, y - f.y)));
}

// One head's key (`which` 0) or value (1) as it is kept: of each 128 values 8 bytes, or 4 of codes, per lane.
template <int DIM = HEAD_DIM>
struct Kept {
    uint2 half[DIM / 128];
    char4 code[DIM / 128];
    __half scale;
};

// Rounds one head's vector, to codes and a scale if INT8.
template <bool INT8, int DIM = HEAD_DIM>
DEVICE Kept<DIM> round_row(const Head<DIM>& v) {
    Kept<DIM> k;
    if constexpr (INT8) {
        float top = 0.f;
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++) {
            const float4 x = v.part[j];
            top = fmaxf(top, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
        }
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        k.scale = __float2half_rn(fminf(top / 127.f, 65504.f));
        const float f = __half2float(k.scale), inv = f > 0.f ? 1.f / f : 0.f;
        auto code = [&](float x) { return int(fminf(fmaxf(roundf(x * inv), -127.f), 127.f)); };
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++) {
            const float4 x = v.part[j];
            k.code[j] = make_char4(code(x.x), code(x.y), code(x.z), code(x.w));
        }
    } else {
        // Finite, whatever it is: rows that are not seen are multiplied with zero, also by sequences
        // that get the page later.
        auto finite = [](float x) { return fminf(fmaxf(x, -65504.f), 65504.f); };
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++) {
            const float4 x = v.part[j];
            k.half[j] = make_uint2(half2_bits(__float22half2_rn(make_float2(finite(x.x), finite(x.y)))),
                                   half2_bits(__float22half2_rn(make_float2(finite(x.z), finite(x.w)))));
        }
    }
    return k;
}

// Stores it as row `row` of a page's head `head` (`Cache::head`).
template <bool INT8, int DIM = HEAD_DIM>
DEVICE void store_row(const Cache& c, int which, size_t head, int row, const Kept<DIM>& k, int lane) {
    const size_t at = head * PAGE + row;
#pragma unroll
    for (int j = 0; j < Head<DIM>::PARTS; j++) {
        const size_t dim = head * DIM + j * 128 + lane * 4;
        if constexpr (INT8) {
            if (which == 0) {
                static_cast<char4*>(c.keys)[at * (DIM / 4) + j * 32 + lane] = k.code[j];
            } else {
                int8_t* to = static_cast<int8_t*>(c.values) + dim * PAGE + row;
                to[0] = k.code[j].x, to[PAGE] = k.code[j].y, to[PAGE * 2] = k.code[j].z, to[PAGE * 3] = k.code[j].w;
            }
        } else if (which == 0) {
            static_cast<uint2*>(c.keys)[at * (DIM / 4) + j * 32 + lane] = k.half[j];
        } else {
            const __half* h = reinterpret_cast<const __half*>(&k.half[j]);
            __half* to = static_cast<__half*>(c.values) + dim * PAGE + row;
            to[0] = h[0], to[PAGE] = h[1], to[PAGE * 2] = h[2], to[PAGE * 3] = h[3];
        }
    }
    if (INT8 && lane == 0) (which ? c.value_scales : c.key_scales)[at] = k.scale;
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
