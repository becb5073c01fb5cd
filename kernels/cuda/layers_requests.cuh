// Of the kernel of all layers: what its warps that do nothing else request from memory (`step_layers.cuh`).
#pragma once

#include "layers_block.cuh"

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::request(const LayersArgs& p, uint8_t* shared, int lane) {
    Requests requests{ring_of(p, shared), p.window};
    AttentionShare attention;
    uint32_t page = 0;   // the lane-th
    const uint8_t *codes = p.layer[0].codes[0], *meta = p.layer[0].meta[0];
#pragma unroll 1
    for (int i = 0; i < p.layers * 4; i++) {
        const BlockShare mine(p.shape[shape_of(p, i / 4, i % 4)], deals_records(i % 4), blockIdx.x, gridDim.x);
        const RecordKind kind = kind_of(p, i / 4, i % 4);
        codes += size_t(mine.begin) * kind.codes_bytes, meta += size_t(mine.begin) * kind.meta_bytes;
        // Those of the next product, early.
        const LayerArgs& after = p.layer[min((i + 1) / 4, p.layers - 1)];
        const uint8_t *next_codes = after.codes[(i + 1) % 4], *next_meta = after.meta[(i + 1) % 4];
        if (EXPERTS && i % 4 >= GATED) {
            if (i % 4 == GATED) SharedInputs::wait(shared_address(shared) + ROUTED, i / 4 & 1);
            request_experts(p, shared, requests, mine, i, lane);
            codes = next_codes, meta = next_meta;
            continue;
        }
#pragma unroll 1
        for (int left = mine.units; left > 0; left -= TEAM) {
            const int records = min(left, TEAM);
            requests.fill(records * (kind.codes_bytes + kind.meta_bytes), [&](uint32_t to, const Copies& copies) {
                copies.copy<true>(to, codes, records * kind.codes_bytes);
                if (!TRELLIS) copies.copy<true>(to + TEAM * kind.codes_bytes, meta, records * kind.meta_bytes);
            });
            codes += TEAM * kind.codes_bytes, meta += TEAM * kind.meta_bytes;
        }
        codes = next_codes, meta = next_meta;
        if (i % 4 != QKV) continue;
        if (i == 0) {   // the position and the cache are the predecessor's
            wait_for_prerequisites();
            attention = attention_share(p);
            if (lane < attention.pages) page = __ldcg(p.tables + size_t(attention.slot) * p.table_len + attention.first + lane);
        }
        if (recurs(p, i / 4)) continue;
        const LayerAttention& layer = p.layer[i / 4].attention;
        if constexpr (HYBRID)
            PageAttention<false, DIM>::request(requests, layer, attention, page, p.kv_heads);
        else if (layer.key_scales != nullptr)
            PageAttention<true, DIM>::request(requests, layer, attention, page, p.kv_heads);
        else
            PageAttention<false, DIM>::request(requests, layer, attention, page, p.kv_heads);
    }
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::request_experts(const LayersArgs& p, uint8_t* shared, Requests& requests, const BlockShare& mine, int i, int lane) {
    const LayerArgs& layer = p.layer[i / 4];
    const ExpertPlaces& places = layer.places;
    const Route& route = *reinterpret_cast<const Route*>(shared + ROUTE);
    const RecordKind kind = kind_of(p, i / 4, i % 4);
    const bool apart = places.at != nullptr, down = i % 4 == DOWN;
    const uint32_t each = records_of_expert(p, down);
#pragma unroll 1
    for (int done = 0; done < mine.units; done += TEAM) {
        const int records = min(mine.units - done, TEAM);
        const uint32_t bytes = records * (kind.codes_bytes + kind.meta_bytes);
        // A lane's record, and where it is.
        const ExpertRecord own = expert_record(p, down, mine.begin + done + min(lane, records - 1));
        const uint32_t record = route.expert[own.nth] * each + own.within;
        const uint8_t *codes = layer.codes[i % 4] + size_t(record) * kind.codes_bytes, *meta = layer.meta[i % 4] + size_t(record) * kind.meta_bytes;
        if (apart) {
            const uint8_t* const place = reinterpret_cast<const uint8_t*>(route.place[own.nth]);
            codes = place + places.codes[down] + own.within * kind.codes_bytes, meta = place + places.meta[down] + own.within * kind.meta_bytes;
        }
        auto copy = [&](const Copies& copies, uint32_t to, int nth, const uint8_t* codes, const uint8_t* meta, int count) {
            copies.copy<true>(to + nth * kind.codes_bytes, codes, count * kind.codes_bytes);
            copies.copy<true>(to + TEAM * kind.codes_bytes + nth * kind.meta_bytes, meta, count * kind.meta_bytes);
        };
        if constexpr (CLUSTERED) {
            // The first of neighbours requests them all.
            const uint32_t before = __shfl_up_sync(~0u, record, 1);
            const bool starts = lane == 0 || record != before + 1 || (apart && own.within == 0);
            const uint32_t behind = __ballot_sync(~0u, starts || lane >= records) >> lane >> 1;
            requests.wait();
            const uint32_t to = requests.at(), barrier = requests.barrier();
            if (lane == 0) Copies::expect(barrier, bytes);
            __syncwarp();
            if (starts && lane < records) copy({barrier}, to, lane, codes, meta, __ffs(behind));
            __syncwarp();
            requests.next();
        } else {
            const auto address = [](const uint8_t* at) { return reinterpret_cast<unsigned long long>(at); };
            requests.fill(bytes, [&](uint32_t to, const Copies& copies) {
                for (int r = 0; r < records; r++) {
                    const auto from = __shfl_sync(~0u, address(codes), r), scales = __shfl_sync(~0u, address(meta), r);
                    copy(copies, to, r, reinterpret_cast<const uint8_t*>(from), reinterpret_cast<const uint8_t*>(scales), 1);
                }
            });
        }
    }
}
