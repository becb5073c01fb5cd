// Of the kernel of all layers: how blocks gather the inputs of a product (`step_layers.cuh`).
#pragma once

#include "layers_block.cuh"

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::prepare() {
    if (threadIdx.x < (HYBRID ? PRODUCTS : PRODUCTS - 1))
        reinterpret_cast<BlockShare*>(shared + SHARES)[threadIdx.x] = BlockShare(p.shape[threadIdx.x], deals_records(threadIdx.x), blockIdx.x, gridDim.x);
    if (threadIdx.x == 32) *reinterpret_cast<AttentionShare*>(shared + ATTENTION) = attention_share(p);
    if (HYBRID && threadIdx.x == 64) *reinterpret_cast<DeltaShare*>(shared + DELTA) = DeltaShare::of(step_of(p), p, blockIdx.x, gridDim.x);
    if constexpr (TRELLIS) {
#pragma unroll 1
        for (int which = QKV, first = 0; which <= DOWN; first += p.shape[which++].tiles)
            for (int i = threadIdx.x; i < p.shape[which].tiles; i += WARPS * 32)
                shared[COUNTS + first + i] = BlockShare::parts(p.shape[which], i, gridDim.x);
    } else {
        const int tiles = p.hidden / 16;
        for (int i = threadIdx.x; i < 2 * tiles; i += WARPS * 32)
            shared[COUNTS + i] = BlockShare::parts(p.shape[i < tiles ? OUT : DOWN], i % tiles, gridDim.x);
    }
    request_gain(p.layer[0].gains[0]);
    sync_layers();
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::request_gain(const float* from) {
    const int slots = p.hidden / 64;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // Of trellis codes the two slots of a block.
        const int s = TRELLIS ? (first_slot(slots / 2, sharer) + warp) * 2 + i : first_slot(slots, sharer) + warp + i * WARPS;
        const int end = TRELLIS ? first_slot(slots / 2, sharer + 1) * 2 : first_slot(slots, sharer + 1);
        if (s < end) gain[i] = __ldg(reinterpret_cast<const float2*>(from + s * 64) + lane);
    }
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE float2 LayersBlock<S, HYBRID, EXPERTS, TIMED>::sum_parts(int of, int s, uint32_t stamp, float2 v) const {
    const int count = parts_of(of, s * 4 + lane / 8);
    const uint64_t* const from = p.parts[of] + s * 64 + lane * 2;
    if (p.ranks > 1) return add_far_parts(p, from, p.ranks * count, stamp, v);
    uint4 w[MOST_PARTS];
    bool there;
    do {
        there = true;
#pragma unroll
        for (int i = 0; i < MOST_PARTS; i++) {
            w[i] = make_uint4(0, stamp, 0, stamp);
            if (i < count) w[i] = load_stamped(from + i * p.hidden);
        }
#pragma unroll
        for (int i = 0; i < MOST_PARTS; i++) there = there && has(w[i], stamp);
    } while (!there);
#pragma unroll
    for (int i = 0; i < MOST_PARTS; i++) v.x += values_of(w[i]).x, v.y += values_of(w[i]).y;
    return v;
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE float2 LayersBlock<S, HYBRID, EXPERTS, TIMED>::join(int s, uint32_t stamp, int sources) const {
    constexpr int AT_ONCE = 4;
    const int width = p.heads * DIM, stride = width + 2 * p.heads, head = s / (DIM / 64);
    const uint64_t* const from = p.attended + s * 64 + lane * 2;
    const uint64_t* const tops = p.attended + min(lane, sources - 1) * stride + width + head * 2;
    const uint64_t* const gates = p.qkv + Of::gate(head) * DIM + s % (DIM / 64) * 64 + lane * 2;
    uint4 top, w[AT_ONCE], gate = make_uint4(0, stamp - 1, 0, stamp - 1);
    auto load = [&](int base) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            w[i] = make_uint4(0, stamp, 0, stamp);
            if (base + i < sources) w[i] = load_stamped(from + (base + i) * stride);
        }
    };
    do {
        top = load_stamped(tops);
        if (Of::GATED) gate = load_stamped(gates);
        load(0);
    } while (!__all_sync(~0u, has(top, stamp) && has(gate, stamp - 1)));
    float share = 1.f, all = values_of(top).y;
    if (sources > 1) {
        const float peak = warp_max(values_of(top).x);
        share = exp2f(values_of(top).x - peak);
        all = warp_sum(lane < sources ? share * values_of(top).y : 0.f);
    }
    share = __fdividef(share, all);
    float2 v = make_float2(0.f, 0.f);
#pragma unroll 1
    for (int base = 0; base < sources; base += AT_ONCE) {
        if (base > 0) load(base);
        while (!__all_sync(~0u, has(w[0], stamp) && has(w[1], stamp) && has(w[2], stamp) && has(w[3], stamp))) load(base);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float f = __shfl_sync(~0u, share, base + i);
            v.x = fmaf(f, values_of(w[i]).x, v.x), v.y = fmaf(f, values_of(w[i]).y, v.y);
        }
    }
    if (Of::GATED) v.x *= quick_sigmoid(values_of(gate).x), v.y *= quick_sigmoid(values_of(gate).y);
    return v;
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::gather(int l, int which) {
    const uint32_t barrier = sent + (which & 1) * 8, stamp = stamp_before(l, which);
    const bool norm = which == QKV || which == GATED;
    const int slots = which == OUT || which == DOWN ? p.shape[which].spans * 4 : p.hidden / 64;
    const int slot0 = first_slot(slots, sharer), slot1 = first_slot(slots, sharer + 1);
    if (!CLUSTERED) sync_layers();   // all have read the inputs of the last product, which these replace
    const SharedInputs inputs(digits(which), barrier, p.digits[which & 1], stamp);
    if (which != END) inputs.expect(slots * (128 + 16));
    constexpr int AHEAD = 4;   // slots whose values are requested together
    uint4 ahead[AHEAD];
#pragma unroll 1
    for (int s = slot0 + warp, i = 0; s < slot1; s += WARPS, i++) {
        float2* const own = reinterpret_cast<float2*>(shared + p.at.x) + (s - slot0) * 32 + lane;
        float2 v;
        if (which == OUT) {
            v = recurs(p, l) ? join_recurrence(p, p.layer[l].recurrence, s, stamp, lane) : join(s, stamp, attention().sources);
        } else if (which == DOWN) {
            const uint64_t* const from = p.gated + s * 64 + lane * 2;
            if (i % AHEAD == 0) {
#pragma unroll
                for (int j = 0; j < AHEAD; j++)
                    if (s + j * WARPS < slot1) ahead[j] = load_stamped(from + j * WARPS * 64);
            }
            uint4 w = ahead[0];
#pragma unroll
            for (int j = 1; j < AHEAD; j++) ahead[j - 1] = ahead[j];
            while (!has(w, stamp)) w = load_stamped(from);
            v = values_of(w);
        } else {
            v = l == 0 && which == QKV ? __ldcg(reinterpret_cast<const float2*>(p.x + s * 64) + lane)
                                       : sum_parts(which == GATED ? 0 : 1, s, stamp, *own);
            *own = v;
        }
        __syncwarp();
        if (which == END) {
            reinterpret_cast<float2*>(p.x + s * 64)[lane] = v;
            continue;
        }
        float2 scaled = v;
        if (norm) {
            float2 f = gain[0];
            gain[0] = gain[1];
            if (i > 1) f = __ldg(reinterpret_cast<const float2*>(p.layer[l].gains[which / 2] + s * 64) + lane);
            scaled.x *= f.x, scaled.y *= f.y;
        }
        float square = v.x * v.x + v.y * v.y;   // of x; not needed where there is no norm
        const SlotDigits<!MIX> d(scaled, lane, square);
        const uint32_t span = s / 4 * SPAN_WORDS;
        inputs.put(span + s % 4 * 32 + SlotDigits<!MIX>::index(lane), d.word);
        inputs.put(span + (offsetof(SpanDigits, slots) / 4 + s % 4 * 4), make_float4(d.scale, d.sum, square, d.second), lane);
    }
    if (which != END) inputs.template receive<WARPS * 32>(slots / 4 * SPAN_WORDS, lane);
}
