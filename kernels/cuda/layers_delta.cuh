// The recurrence of the kernel of all layers (`step_layers.cuh`): of some columns of the matrix of one value head,
// by one block, as `delta_step.cu` computes them.
//
// The blocks of a head compute its query, key and gates each for itself, which costs less than a meeting. They leave
// what the head's matrix gives; whoever reads that normalizes it and multiplies it with silu(z).
#pragma once

#include "layers.cuh"
#include "layers_halves.cuh"

constexpr int EIGHTS_OF_HEAD = DELTA_DIM / 8;

// The share of a block: eights of columns of value head `head`, from `first` to before `end`.
struct DeltaShare {
    int position, slot, behind;   // of the new token
    int head, key_head;
    int first, end;   // none, if there are not as many shares
    bool keeps;       // what the key head has once, for later steps

    static DEVICE DeltaShare of(const Step& step, const LayersArgs& p, int block, int blocks) {
        const int heads = p.value_heads, each = heads / p.key_heads;
        DeltaShare s;
        s.position = step.position, s.slot = step.slot, s.behind = step.behind;
        // Consecutive shares go to different clusters.
        const int nth = block % CLUSTER * (blocks / CLUSTER) + block / CLUSTER, part = nth / heads;
        const int parts = min(EIGHTS_OF_HEAD, blocks / heads);
        s.head = nth % heads;
        s.key_head = p.tiled ? s.head % p.key_heads : s.head / each;
        s.keeps = part == 0 && (p.tiled ? s.head < p.key_heads : s.head % each == 0);
        s.first = part < parts ? part * EIGHTS_OF_HEAD / parts : 0;
        s.end = part < parts ? (part + 1) * EIGHTS_OF_HEAD / parts : 0;
        return s;
    }
    DEVICE bool any() const { return first < end; }
    DEVICE int count() const { return end - first; }
};

// What the warps of a block exchange.
struct DeltaRoom {
    float mixed[3][DELTA_DIM];        // query, key, and the values of the block's columns
    float squares[8];                 // of the query's four warps, then the key's
    float2 rates[LAYERS_WARPS];       // of each warp's inputs: products with the rows of b and a
};

// A recurrence's share of a block, by all warps that multiply.
template <bool PAIRED>
struct DeltaColumns {
    const LayersArgs& p;
    const LayerRecurrence& of;
    const DeltaShare& mine;
    DeltaRoom& room;
    // Kept, so that addresses are computed from them here rather than before all layers, for which registers are too few.
    const int warp = keep(threadIdx.x) / 32, lane = keep(threadIdx.x) % 32;

    // Asks for what does not depend on this step, while others are busy: the columns, and rows of rates.
    DEVICE void prefetch() const {
        const DeltaLayer& delta = of.delta;
        if (mine.position > 0)
            for (int e = mine.first + warp; e < mine.end; e += LAYERS_WARPS) prefetch_line(delta.matrix(mine.slot, mine.head) + e * OF_EIGHT + lane * 32);
        const __half* const rates = of.rates + size_t(mine.head) * p.hidden;
        for (int i = threadIdx.x; i < p.hidden / 64; i += LAYERS_WARPS * 32) prefetch_line(rates + i * 64), prefetch_line(rates + p.value_heads * p.hidden + i * 64);
    }

    // `digits`: the inputs of the layer's first product, of which `factor` makes normalized ones; `waited` is called
    // when these products are there. `factor` is in shared memory, where a block without a share of the product has it
    // only when its warps have met.
    template <class Waited>
    DEVICE void run(const SpanDigits* digits, const float& factor, uint32_t stamp, Waited&& waited) {
        const DeltaLayer& delta = of.delta;
        const int head = mine.head;
        float* const matrix = delta.matrix(mine.slot, head);
        StateColumns state;
        auto load = [&](int eight) {
            if (mine.position == 0) state.clear();
            else if (eight < mine.end) state.load(matrix, eight, lane);
        };
        load(mine.first + warp);
        // A thread has a channel of the query, the key or the block's values.
        const int which = warp / 4, nth = warp % 4 * 32 + lane;
        const bool convolves = which < 2 || nth < mine.count() * 8;
        const int channel = which == 2 ? 2 * delta.keys() + head * DELTA_DIM + mine.first * 8 + nth : which * delta.keys() + mine.key_head * DELTA_DIM + nth;
        float4 taps;
        float window[CONV - 1] = {};
        if (convolves) {
            taps = __ldg(reinterpret_cast<const float4*>(delta.conv) + channel);
#pragma unroll
            for (int j = 1; j < CONV; j++)
                if (mine.position >= j) window[CONV - 1 - j] = __ldcg(delta.input(mine.slot, mine.position - j) + channel);
        }
        float rates[2];
        multiply_halves<PAIRED>(rates, of.rates + size_t(head) * p.hidden, size_t(delta.value_heads) * p.hidden, digits, p.hidden, warp * 32 + lane, LAYERS_WARPS * 32,
                                [] {});
        rates[0] = warp_sum(rates[0]), rates[1] = warp_sum(rates[1]);
        if (lane == 0) room.rates[warp] = make_float2(rates[0], rates[1]);
        float y = 0.f;
        if (convolves) {
            uint2 in;
            do in = load_stamped_one(p.qkv + channel);
            while (in.y != stamp);
            const float x = __uint_as_float(in.x);
            y = quick_silu(fmaf(x, taps.w, fmaf(window[2], taps.z, fmaf(window[1], taps.y, window[0] * taps.x))));
            // What a key head has once, one block keeps.
            if (which == 2 || mine.keeps) delta.input(mine.slot, mine.position)[channel] = x;
            room.mixed[which][nth] = y;
        }
        __syncwarp();
        if (which < 2) {
            const float square = warp_sum(y * y);
            if (lane == 0) room.squares[warp] = square;
        }
        waited();
        sync_layers();
        const float* const squares = room.squares;
        const float q_scale = QUERY_LENGTH * rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + UNIT_EPS);
        const float k_scale = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + UNIT_EPS);
        float b = 0.f, a = 0.f;
#pragma unroll
        for (int w = 0; w < LAYERS_WARPS; w++) b += room.rates[w].x, a += room.rates[w].y;
        float2 gates = delta.gates(b * of.scale * factor, a * of.scale * factor, head);
        gates.x = expf(gates.x);
        const float4 q = reinterpret_cast<const float4*>(room.mixed[0])[lane], k = reinterpret_cast<const float4*>(room.mixed[1])[lane];
        const float kq = warp_sum(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w) * q_scale * k_scale;
#pragma unroll 1
        for (int eight = mine.first + warp; eight < mine.end; eight += LAYERS_WARPS) {
            if (eight >= mine.first + LAYERS_WARPS) load(eight);
            if (mine.behind > 0 && of.kept != nullptr)
                feed_again(state, of.kept + (size_t(mine.slot) * delta.value_heads + head) * KEPT, mine.behind, eight, lane);
            const float2 v = reinterpret_cast<const float2*>(room.mixed[2])[(eight - mine.first) * 4 + lane / 8];
            const float2 o = state.feed<false>(room.mixed[1], room.mixed[0], make_float2(k_scale, q_scale), kq, v, gates, lane);
            if (lane % 8 == 0) store_stamped_two(p.attended + head * DELTA_DIM + eight * 8 + lane / 8 * 2, o, stamp + 1);
            state.store(matrix, eight, lane);
        }
    }
};

// Slot s of what a recurrence makes: normalized over its head, times silu(z). Both halves of a head are read.
DEVICE float2 join_recurrence(const LayersArgs& p, const LayerRecurrence& of, int s, uint32_t stamp, int lane) {
    const uint64_t* const z_at = p.qkv + of.delta.channels() + s * 64 + lane * 2;
    const float2 gain = __ldg(reinterpret_cast<const float2*>(of.delta.norm) + s % 2 * 32 + lane);
    uint4 own, other, z;
    do {
        own = load_stamped(p.attended + s * 64 + lane * 2);
        other = load_stamped(p.attended + (s ^ 1) * 64 + lane * 2);
        z = load_stamped(z_at);
    } while (!__all_sync(~0u, has(own, stamp) && has(other, stamp) && has(z, stamp - 1)));
    const float2 v = values_of(own), u = values_of(other), gate = values_of(z);
    const float r = rsqrtf(warp_sum(v.x * v.x + v.y * v.y + u.x * u.x + u.y * u.y) / DELTA_DIM + of.delta.eps);
    return make_float2(v.x * r * gain.x * quick_silu(gate.x), v.y * r * gain.y * quick_silu(gate.y));
}
