// Of the kernel of all layers: inputs and products of weights in trellis codes (`step_layers.cuh`).
#pragma once

#include "layers_block.cuh"

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::gather_blocks(int l, int which) {
    const uint32_t barrier = sent + (which & 1) * 8, stamp = stamp_before(l, which);
    const bool norm = which == QKV || which == GATED, octagon = which != END && is_octagon(p, l, which);
    const int blocks = (which == OUT || which == DOWN ? p.shape[which].spans * TILE : p.hidden) / BLOCK;
    const int first = first_slot(blocks, sharer), end = first_slot(blocks, sharer + 1);
    if (!CLUSTERED) sync_layers();   // as in `gather`
    const SharedInputs inputs(digits(which), barrier, p.digits[which & 1], stamp);
    if (which != END) inputs.expect(blocks * block_words(octagon) * 4);
#pragma unroll 1
    for (int b = first + warp, i = 0; b < end; b += WARPS, i++) {
        float4* const own = reinterpret_cast<float4*>(shared + p.at.x) + (b - first) * 32 + lane;
        const int at = b * BLOCK + 2 * lane;   // of two values, and two 64 further
        float4 v;
        // Requested before the wait for values, and only looked at after it.
        __half2 scales[2];
        if (which != END) {
#pragma unroll
            for (int j = 0; j < 2; j++)
                scales[j] = __ldg(reinterpret_cast<const __half2*>(scales_of(p, l, which) + p.shape[which].tiles * STRIP + at + 64 * j));
        }
        if (which == OUT) {
            v = joined(join(2 * b, stamp, attention().sources), join(2 * b + 1, stamp, attention().sources));
        } else if (which == DOWN) {
            const int rows = p.shape[GATED].tiles * STRIP;
            const uint64_t* const from = p.gated + 2 * b * STRIP + 2 * lane;
            float4 gate = {}, up = {};
            add_strip_parts_of_two(from, rows, strip_parts(GATED, 2 * b), strip_parts(GATED, 2 * b + 1), stamp, gate, up);
            v = make_float4(quick_silu(gate.x) * up.x, quick_silu(gate.y) * up.y, quick_silu(gate.z) * up.z, quick_silu(gate.w) * up.w);
        } else {
            if (l == 0 && which == QKV) {
                v = joined(__ldcg(reinterpret_cast<const float2*>(p.x + at)), __ldcg(reinterpret_cast<const float2*>(p.x + at + 64)));
            } else {
                const int of = which == GATED ? 0 : 1;
                v = add_strip_parts<64>(p.parts[of] + at, p.hidden, strip_parts(of == 0 ? OUT : DOWN, b), stamp, *own);
            }
            *own = v;
        }
        __syncwarp();
        if (which == END) {
            *reinterpret_cast<float2*>(p.x + at) = make_float2(v.x, v.y);
            *reinterpret_cast<float2*>(p.x + at + 64) = make_float2(v.z, v.w);
            continue;
        }
        float4 factor = joined(__half22float2(scales[0]), __half22float2(scales[1]));
        if (norm) {
            float4 f = joined(gain[0], gain[1]);
            const float* const gains = p.layer[l].gains[which / 2] + at;
            if (i > 0) f = joined(__ldg(reinterpret_cast<const float2*>(gains)), __ldg(reinterpret_cast<const float2*>(gains + 64)));
            factor.x *= f.x, factor.y *= f.y, factor.z *= f.z, factor.w *= f.w;
        }
        const float square = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;   // of x; not needed where there is no norm
        float turned[4] = {v.x * factor.x, v.y * factor.y, v.z * factor.z, v.w * factor.w};
        transform(turned);
        if (octagon) put_block<true>(inputs, b, turned, square, lane);
        else put_block<false>(inputs, b, turned, square, lane);
    }
    if (which != END) inputs.template receive<WARPS * 32>(blocks * block_words(octagon), lane);
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::prefetch_scales(int l, int which, const BlockShare& mine) const {
    const __half* const rows = scales_of(p, l, which);
    for (int i = threadIdx.x; i < mine.tiles * 2; i += WARPS * 32) prefetch_line(rows + mine.tile * STRIP + i * 64);
    const int next = (which + 1) % 4, next_layer = which == DOWN ? l + 1 : l;
    if (next_layer == p.layers) return;
    const int blocks = p.shape[next].spans * TILE / BLOCK, first = first_slot(blocks, sharer), end = first_slot(blocks, sharer + 1);
    const __half* const inputs = scales_of(p, next_layer, next) + p.shape[next].tiles * STRIP;
    for (int i = first * 2 + threadIdx.x; i < end * 2; i += WARPS * 32) prefetch_line(inputs + i * 64);
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::multiply_strips(int l, int which) {
    const BlockShare& mine = share(which);
    const bool norm = which == QKV || which == GATED;
    const uint32_t stamp = stamp0 + l * PHASES + (which == QKV ? 1 : which + 2);
    const uint32_t barrier = sent + (which & 1) * 8, parity = phase >> 1 & 1;
    phase++;
    int unit = warp, stage = warp / TEAM, tile = quotient(mine.span + warp, mine.spans);
    tile = mine.span + warp - tile * mine.spans;   // of its strip
    RingPlace at = next;
    at.step(stage, p.depth);
    const RecordKind kind = kind_of(p, l, which);
    const uint32_t row = keep(shared_address(digits(which)));
    prefetch_scales(l, which, mine);
    bool waited = false;
    auto wait_digits = [&] {
        if (!waited) SharedInputs::wait(barrier, parity);
        waited = true;
    };
    if (norm && warp == WARPS - 1) {   // which has the fewest records
        wait_digits();
        const int words = block_words(kind.scheme >= CODES_OF_SUM);
        float square = 0.f;
        for (int b = lane; b < p.hidden / BLOCK; b += 32) square += __uint_as_float(load_shared_4(row + ((b + 1) * words - 2) * 4));
        square = warp_sum(square);
        if (lane == 0) factor() = rsqrtf(square / p.hidden + p.eps);
    }
    // Strips whose sums meet together: a thread ends with one output of one of them.
    constexpr int TOGETHER = WARPS * 32 / STRIP;
    float* const all_sums = sums();   // [TOGETHER][WARPS][STRIP]
    static_assert(TOGETHER * STRIP <= 2 * WARPS * 16);
#pragma unroll 1
    for (int first = 0; first < mine.tiles; first += TOGETHER) {
        if (first > 0) sync_layers();   // those before have been read
        const int last = min(first + TOGETHER, mine.tiles), ends_with = first + int(threadIdx.x) / STRIP, output = threadIdx.x % STRIP;
        __half scale = __half();   // requested long before it is needed
        if (ends_with < last) scale = __ldg(scales_of(p, l, which) + (mine.tile + ends_with) * STRIP + output);
#pragma unroll 1
        for (int strip = first; strip < last; strip++) {
            const int end = min((strip + 1) * mine.spans - mine.span, mine.units);   // of its units
            StripSums all;
            with_code(kind.scheme, [&](auto code) {
                using C = decltype(code);
                StripUnits<C> units(all, lane);
#pragma unroll 1
                while (unit < end) {
                    ring.wait(at);
                    units.add(ring.at(at) + warp % TEAM * C::UNIT, row, tile, wait_digits, [&] { ring.leave(at, 1, lane); });
                    unit += WARPS, stage += TEAMS, tile += WARPS;
                    while (tile >= mine.spans) tile -= mine.spans;
                    at.step(TEAMS, p.depth);
                }
                units.end();
            });
            all.store(shared_address(all_sums + ((strip - first) * WARPS + warp) * STRIP), lane);
        }
        sync_layers();
        if (ends_with >= last) continue;
        const float* const from = all_sums + (ends_with - first) * (WARPS * STRIP) + output;
        float v = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) v += from[w * STRIP];
        v *= __half2float(scale) * (norm ? factor() * (1.f / 128.f) : 1.f / 128.f);
        const int part = ends_with == 0 ? mine.part : 0, rows = p.shape[which].tiles * STRIP;
        uint64_t* const to = which == QKV ? p.qkv : which == GATED ? p.gated : p.parts[which / 2];
        store_stamped(to + size_t(part) * rows + (mine.tile + ends_with) * STRIP + output, v, stamp);
    }
    wait_digits();
    // Stages of which this warp has nothing.
#pragma unroll 1
    for (; stage < mine.stages; stage += TEAMS) {
        ring.wait(at);
        ring.leave(at, 1, lane);
        at.step(TEAMS, p.depth);
    }
    next.skip(mine.stages, p.depth);
}
