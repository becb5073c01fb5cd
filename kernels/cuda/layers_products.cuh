// Of the kernel of all layers: products with packed weights, and the choice of experts (`step_layers.cuh`).
#pragma once

#include "layers_block.cuh"

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::multiply(int l, int which) {
    const BlockShare& mine = share(shape_of(p, l, which));
    const int spans = mine.spans, units = mine.units, stages = mine.stages;
    const bool norm = which == QKV || which == GATED;
    const uint32_t stamp = stamp0 + l * PHASES + (which == QKV ? 1 : which + 2);
    const uint32_t barrier = sent + (which & 1) * 8, parity = phase >> 1 & 1;
    phase++;
    // The way through units warp, warp + WARPS, ...: a record each.
    int unit = warp, stage = warp / TEAM;
    int tile = quotient(mine.span + warp, spans), span = mine.span + warp - tile * spans;
    const int tile_step = keep(quotient(WARPS, spans)), span_step = keep(WARPS - tile_step * spans);
    RingPlace at = next;
    at.step(stage, p.depth);
    const uint32_t row = keep(shared_address(digits(which)));
    const RecordKind kind = kind_of(p, l, which);
    bool waited = false;
    auto wait_digits = [&] {
        if (waited) return;
        SharedInputs::wait(barrier, parity);
        waited = true;
        lap(phase_of(which), 0);
    };
    if (norm && warp == WARPS - 1) {   // which has the fewest records
        wait_digits();
        float square = 0.f;
        for (int s = lane; s < p.hidden / 64; s += 32) square += digits(which)[s / 4].slots[s % 4].z;
        square = warp_sum(square);
        if (lane == 0) factor() = rsqrtf(square / p.hidden + p.eps);
    }
    float y[2] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < mine.tiles; chunk += WARPS) {
        const int end = min(chunk + WARPS, mine.tiles);
        float* const buffer = sums() + turn * (WARPS * WARPS * 16);
        turn ^= 1;
        const uint32_t to = shared_address(buffer) + (warp * 16 + lane / 4 + lane % 4 * 8) * 4 - chunk * (WARPS * 64);
        auto add_records = [&](auto scheme) {
            using T = decltype(scheme);
            constexpr uint32_t CODES = T::STAGES * T::STAGE;
            Products<T> products(kind.groups, lane);
#pragma unroll 1
            while (unit < units && tile < end) {
                ring.wait(at);
                const uint32_t from = ring.at(at), place = warp % TEAM;
                products.add(
                    y, from + place * CODES, from + TEAM * CODES + place * kind.meta_bytes, row + span * uint32_t(sizeof(SpanDigits)),
                    wait_digits, [&] { ring.leave(at, 1, lane); });
                const int before = tile;
                unit += WARPS, stage += TEAMS, span += span_step, tile += tile_step;
                if (span >= spans) span -= spans, tile++;
                at.step(TEAMS, p.depth);
                if (tile != before || unit >= units) {
                    // Lane (g, t) ends with row g + 8 t, for t < 2.
                    float v = (lane & 1 ? y[1] : y[0]) + __shfl_xor_sync(~0u, lane & 1 ? y[0] : y[1], 1);
                    v += __shfl_xor_sync(~0u, v, 2);
                    if (lane % 4 < 2) store_shared_4(to + before * (WARPS * 64), __float_as_uint(v));
                    y[0] = y[1] = 0.f;
                }
            }
        };
        if constexpr (!MIX) {
            add_records(S());
        } else {
            switch (kind.scheme) {
            case 0: add_records(int4_int_64_scales8()); break;
            case 1: add_records(int4_int_32_scales8()); break;
            case 2: add_records(int5_int_64_scales8()); break;
            case 3: add_records(int5_int_32_scales8()); break;
            case 4: add_records(int6_sym_64_scales8()); break;
            case 5: add_records(int6_sym_32_scales8()); break;
            default: with_block_scheme(kind.scheme - 6, add_records);
            }
        }
        // A warp a tile, two lanes an output, each with the sums of every other warp.
        const int i = chunk + warp, output = (mine.tile + i) * 16 + lane % 16;
        const int first = max(0, i * spans - mine.span), count = min((i + 1) * spans - mine.span, units) - first;
        const int skip = WARPS - first % WARPS;
        sync_layers();
        float v = 0.f;
        if (i < end) {
            const float* const from = buffer + warp * (WARPS * 16) + lane;
#pragma unroll
            for (int k = 0; k < WARPS / 2; k++) {
                int nth = lane / 16 + 2 * k + skip;   // of warp lane / 16 + 2k among those that have records of the tile
                if (nth >= WARPS) nth -= WARPS;
                if (nth < count) v += from[k * 32];
            }
        }
        v += __shfl_xor_sync(~0u, v, 16);
        if (norm) v *= factor();
        const float up = __shfl_down_sync(~0u, v, 8);
        if (i < end && lane < 16) {
            if (which == QKV) {
                store_stamped(p.qkv + output, v, stamp);
            } else if (which == GATED) {
                const float weight = EXPERTS ? route().weight[quotient(mine.tile + i, p.up_tiles)] : 1.f;
                if (lane < 8) store_stamped(p.gated + (mine.tile + i) * 8 + lane, __fdividef(v, 1.f + __expf(-v)) * up * weight, stamp);
            } else {
                store_part(which / 2, i == 0 ? mine.part : 0, output, v, stamp);
            }
        }
    }
    wait_digits();
    // Stages of which this warp has nothing.
#pragma unroll 1
    for (; stage < stages; stage += TEAMS) {
        ring.wait(at);
        ring.leave(at, 1, lane);
        at.step(TEAMS, p.depth);
    }
    lap(phase_of(which), 1);
    next.skip(stages, p.depth);
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::choose(int l) {
    const uint32_t stamp = stamp_before(l, GATED);
    // As in `DeltaColumns`.
    const int warp = keep(threadIdx.x) / 32, lane = keep(threadIdx.x) % 32;
    const int first = first_scored(blockIdx.x), count = first_scored(blockIdx.x + 1) - first;
    const int each = count > 0 ? quotient(WARPS, count) : 1, row = quotient(warp, each);   // warps of a row
    float* const parts = sums() + turn * (WARPS * WARPS * 16);
    turn ^= 1;
    auto wait = [&] { SharedInputs::wait(sent + (GATED & 1) * 8, phase >> 1 & 1); };
    if (row < count) {
        float sum[1];
        multiply_halves<!MIX>(sum, p.layer[l].router + size_t(first + row) * p.hidden, 0, digits(GATED), p.hidden, (warp - row * each) * 32 + lane, each * 32, wait);
        const float all = warp_sum(sum[0]);
        if (lane == 0) parts[warp] = all;
    }
    sync_layers();
    if (warp == 0) {
        wait();
        float square = 0.f, sum = 0.f;
#pragma unroll 1
        for (int s = lane; s < p.hidden / 64; s += 32) square += digits(GATED)[s / 4].slots[s % 4].z;
#pragma unroll 4
        for (int i = 0; i < each; i++)
            if (lane < count) sum += parts[lane * each + i];
        square = warp_sum(square);
        if (lane < count) store_stamped(p.scores + first + lane, sum * p.layer[l].router_scale * rsqrtf(square / p.hidden + p.eps), stamp);
    }
    if (warp == WARPS - 1) {   // which has the fewest records
        if (p.experts <= 8 * 32 + 1) choose_route<8>(p, p.layer[l].places, route(), stamp, lane);
        else choose_route<MOST_EXPERTS / 32>(p, p.layer[l].places, route(), stamp, lane);
        if (lane == 0) arrive_times(shared_address(shared) + ROUTED, 1);
    }
}
