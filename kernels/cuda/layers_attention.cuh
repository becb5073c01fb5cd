// Attention of the kernel of all layers (`step_layers.cuh`): of the query heads of one key head to some pages
// of the sequence, by one block.
//
//   scores[h, position] = turn_head(q[h]) . K[position] / sqrt(DIM)
//   out[h] = sum of exp(scores[h, position]) V[position], with the greatest score and the sum of weights
//
// The pages come through the ring, requested behind the weights of qkv and without a wait for queries.
// Eight warps attend to a page: each to the scores of 16 positions and then, with the weights of
// all, to an eighth of the dims of the output. Products are those of `attention_decode.cuh`: FP16 on tensor
// cores, where queries and weights are pairs of FP16 with about 22 bits.
//
// Of a page there come the keys, in stages of 32 (of wide heads 16), as many as there are; then the values, in stages
// of 32 dims. In int8 a page has four stages: 32 keys, 32 dims of the values, and the scales of 32 keys and values.
// Two warps share a stage; of wide heads one has it alone.
//
// The new key and value are not yet in the cache: the block that has their page writes them there, and
// attends to its copy.
#pragma once

#include "layers.cuh"

constexpr int ATTEND_WARPS = 8;
constexpr int CHUNK = 32;              // positions whose weights are an operand; dims of a stage
constexpr int CHUNKS = PAGE / CHUNK;   // of a page

// The share of a block: pages from `first` on of the heads of key head `kv`, the `source`-th of `sources`
// shares.
struct AttentionShare {
    int position, slot;   // of the new token
    int turn;             // its row of the rotary table
    int kv, source, sources;
    int first, pages;     // none, if there are not as many sources

    static DEVICE AttentionShare of(const Step& step, int kv_heads, int block, int blocks) {
        const int all = step.position / PAGE + 1;
        AttentionShare s;
        s.position = step.position, s.slot = step.slot, s.turn = step.position + step.shift;
        // Consecutive shares go to different clusters.
        const int nth = block % CLUSTER * (blocks / CLUSTER) + block / CLUSTER;
        s.kv = nth % kv_heads, s.source = nth / kv_heads;
        s.sources = min(all, min(MOST_SOURCES, blocks / kv_heads));
        s.first = s.source * all / s.sources;
        s.pages = s.source < s.sources ? (s.source + 1) * all / s.sources - s.first : 0;
        return s;
    }
    // Positions of the i-th page.
    DEVICE int positions(int i) const { return min(position + 1 - (first + i) * PAGE, PAGE); }
    // True if the new position is among those here.
    DEVICE bool newest() const { return pages > 0 && source == sources - 1; }
};

// What warps that attend exchange.
struct AttentionRoom {
    uint4 weights[CHUNKS][2][32];   // left operands of each lane
    float top[ATTEND_WARPS][8];     // of each warp's positions and each head: greatest score, sum of weights
    float sum[ATTEND_WARPS][8];
    float newest[8];                // weight of the new value, of each head
};

template <bool INT8, int DIM>
struct PageAttention {
    static constexpr uint32_t BYTES = INT8 ? 1 : 2, ROW = DIM * BYTES;
    static constexpr int SHARERS = 256 / DIM;                  // warps of a stage
    static constexpr int STAGES = ATTEND_WARPS / SHARERS;      // of the keys of a page, and of its values
    static constexpr int KEYS = PAGE / STAGES;                 // of a stage
    static constexpr uint32_t PART = KEYS * ROW;               // keys, or dims of values, of a stage
    static constexpr uint32_t SCALES = 2 * PART, SCALE_PART = KEYS * 2;   // in a stage of int8, after keys and values
    static constexpr int EACH = 16 / BYTES, EIGHTS = EACH / 8; // elements that a lane loads at once
    static constexpr int KEY_LOADS = DIM / (4 * EACH);         // of four lanes for a vector
    static constexpr int VALUE_LOADS = PAGE / (4 * EACH);      // for a dim of a page
    static constexpr int TILES = DIM / ATTEND_WARPS / 8;
    static constexpr int FOURS = 2 * EIGHTS;
    static_assert(PART == PAGE * CHUNK * BYTES, "stages of keys and of values are as long");
    static_assert(!INT8 || DIM == HEAD_DIM, "int8 of wide heads has other kernels");

    // The new key (0) or value, behind the queries.
    static DEVICE uint32_t fresh_at(int group, int which) { return group * (DIM * 4) + which * (DIM * 2); }

    // Stages that the keys of so many positions of a page lie in.
    static DEVICE int key_stages(int positions) { return (positions + KEYS - 1) / KEYS; }
    // Stages of a page of so many positions.
    static DEVICE int stages(int positions) { return INT8 ? STAGES : key_stages(positions) + STAGES; }
    static DEVICE int stages(const AttentionShare& share) {
        return share.pages == 0 ? 0 : (share.pages - 1) * stages(PAGE) + stages(share.positions(share.pages - 1));
    }

    // Requests the pages of a share, whose numbers the lanes have.
    static DEVICE void request(Requests& requests, const LayerAttention& layer, const AttentionShare& share, uint32_t page_of_lane, int kv_heads) {
#pragma unroll 1
        for (int i = 0; i < share.pages; i++) {
            const size_t head = size_t(__shfl_sync(~0u, page_of_lane, i)) * kv_heads + share.kv;
            const uint8_t* const keys = static_cast<const uint8_t*>(layer.keys) + head * (PAGE * ROW);
            const uint8_t* const values = static_cast<const uint8_t*>(layer.values) + head * (PAGE * ROW);
            const int keyed = key_stages(share.positions(i));
#pragma unroll 1
            for (int k = 0; k < stages(share.positions(i)); k++) {
                requests.fill(INT8 && k < keyed ? 2 * (PART + SCALE_PART) : PART, [&](uint32_t to, const Copies& copies) {
                    if constexpr (INT8) {
                        auto scales = [&](const __half* from) { return reinterpret_cast<const uint8_t*>(from + head * PAGE + k * KEYS); };
                        if (k < keyed) {
                            copies.copy<false>(to, keys + k * PART, PART);
                            copies.copy<false>(to + SCALES, scales(layer.key_scales), SCALE_PART);
                            copies.copy<false>(to + SCALES + SCALE_PART, scales(layer.value_scales), SCALE_PART);
                        }
                        copies.copy<false>(to + PART, values + k * PART, PART);
                    } else {
                        copies.copy<false>(to, k < keyed ? keys + k * PART : values + (k - keyed) * PART, PART);
                    }
                });
            }
        }
    }

    // Prepares what a warp has of the queries, and of the new key and value: head `job` of `qkv`, which its
    // lanes have four elements each of. Writes it to `queries`, and the new ones to the cache, where the
    // position is in head `newest` of all pages' heads.
    static DEVICE void prepare(const LayersArgs& p, const LayerAttention& layer, const AttentionShare& share, size_t newest, int job, Head<DIM> v,
                               const HeadGain<DIM>& gain, const Turn<DIM>& turn, uint8_t* queries, int lane) {
        constexpr int PARTS = Head<DIM>::PARTS;
        const int group = p.group;
        if (job <= group) v = turn_head(v, gain, turn, p.eps, lane);
        if (job < group) {
            constexpr float s = HeadsOf<DIM>::SCALE;
#pragma unroll
            for (int j = 0; j < PARTS; j++) {
                const float4 x = v.part[j];
                // In the order in which lanes (g, t) read: for each load of a vector, its fours, the head, t.
                const int four = j * 32 + lane, load = four / (4 * FOURS), of_load = four % FOURS, t = four / FOURS % 4;
                reinterpret_cast<uint4*>(queries)[((load * FOURS + of_load) * group + job) * 4 + t] = split_four(x.x * s, x.y * s, x.z * s, x.w * s);
            }
            return;
        }
        const int which = job - group;
        const Cache cache = {layer.keys, layer.values, layer.key_scales, layer.value_scales, p.tables, p.kv_heads, p.table_len};
        const Kept<DIM> kept = round_row<INT8>(v);
        uint8_t* const to = queries + fresh_at(group, which);
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            if constexpr (INT8) reinterpret_cast<char4*>(to)[j * 32 + lane] = kept.code[j];
            else reinterpret_cast<uint2*>(to)[j * 32 + lane] = kept.half[j];
        }
        if (INT8 && lane == 0) reinterpret_cast<__half*>(to)[DIM / 2] = kept.scale;
        store_row<INT8>(cache, which, newest, share.position % PAGE, kept, lane);
    }

    // Attends to a share with the first ATTEND_WARPS warps. `queries`: address in shared memory; `next`: the
    // first stage; `to`: where the source's results go.
    static DEVICE void attend(const LayersArgs& p, const Ring& ring, const RingPlace& next, const AttentionShare& share, uint32_t queries,
                              AttentionRoom& room, uint64_t* to, uint32_t stamp, int warp, int lane) {
        const int group = p.group;
        const uint32_t fresh_key = queries + fresh_at(group, 0), fresh_value = queries + fresh_at(group, 1);
        const int g = lane / 4, t = lane % 4, nth = warp / SHARERS, sharer = warp % SHARERS;   // which stage
        const bool mine = g < group;   // others have no head
        const uint32_t q = queries + lane * 16;
        RingPlace page = next;
        float top = -INFINITY, total = 0.f;   // of head g, over all warps
        float out[TILES][4] = {};             // dims first_dim + 8n, + 1: of high and of low parts
        const int first_dim = warp * (8 * TILES) + 2 * t;
        const int of_lane = nth * KEYS + (SHARERS * t + sharer) * 4;   // of the page, the first of four positions
#pragma unroll 1
        for (int i = 0; i < share.pages; i++) {
            const int positions = share.positions(i), keyed = key_stages(positions);
            // Where in the page the new position is, if it is here.
            const int fresh = share.newest() && i == share.pages - 1 ? positions - 1 : -1;
            RingPlace stage = page;
            stage.step(nth, ring.depth);
            float score[4], value_scale[4], peak = -INFINITY;
            if (nth < keyed) {
                ring.wait(stage);
                const uint32_t keys = ring.at(stage);
                // Column n of product j is position 4 (SHARERS (n / 2) + sharer) + 2j + n % 2 of the stage, so that lane
                // (g, t) ends with the scores of four positions. Load k has dims EACH (4k + t) and on. Sums of even and odd eights are apart: products that wait for each
                // other are slow.
                uint32_t columns[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int column = (SHARERS * (g / 2) + sharer) * 4 + 2 * j + g % 2;
                    columns[j] = (nth * KEYS + column == fresh ? fresh_key : keys + column * ROW) + t * 16;
                }
                float s[2][2][4] = {};
#pragma unroll 1
                for (int k = 0; k < KEY_LOADS; k += 2 / EIGHTS) {
                    uint4 a[4] = {}, loaded[2 / EIGHTS][2];
#pragma unroll
                    for (int h = 0; h < 4; h++)
                        if (mine) a[h] = load_shared_16(q + (k * FOURS + h) * (group * 64));
#pragma unroll
                    for (int l = 0; l < 2 / EIGHTS; l++)
#pragma unroll
                        for (int j = 0; j < 2; j++) loaded[l][j] = load_shared_16(columns[j] + (k + l) * 64);
#pragma unroll
                    for (int j = 0; j < 2; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++) multiply(s[e][j], a + 2 * e, eight_of<INT8>(loaded[e / EIGHTS][j], e));
                }
                uint2 key_scales, value_scales;
                if constexpr (INT8) {
                    const uint32_t at = keys + SCALES + (SHARERS * t + sharer) * 8;
                    key_scales = load_shared_8(at), value_scales = load_shared_8(at + SCALE_PART);
                } else {
                    ring.leave(stage, TEAM / SHARERS, lane);
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float v = s[0][k / 2][k % 2] + s[0][k / 2][k % 2 + 2] + (s[1][k / 2][k % 2] + s[1][k / 2][k % 2 + 2]);
                    const int at = of_lane + k;
                    if constexpr (INT8) {
                        float key = __half2float(reinterpret_cast<const __half*>(&key_scales)[k]);
                        value_scale[k] = __half2float(reinterpret_cast<const __half*>(&value_scales)[k]);
                        if (at == fresh) key = fresh_scale(fresh_key), value_scale[k] = fresh_scale(fresh_value);
                        v *= key;
                    }
                    score[k] = at < positions ? v : -INFINITY;
                    peak = fmaxf(peak, score[k]);
                }
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
            }
            if (t == 0) room.top[warp][g] = peak;
            sync_attending();
            peak = top;
#pragma unroll
            for (int k = 0; k < ATTEND_WARPS; k++) peak = fmaxf(peak, room.top[k][g]);
            const float shrink = exp2f(top - peak);   // at first 0
            top = peak;
            float sum = 0.f;
            uint4 weights = make_uint4(0, 0, 0, 0);
            if (nth < keyed) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    score[k] = exp2f(score[k] - top);
                    sum += score[k];
                    if constexpr (INT8) score[k] *= value_scale[k];
                }
                // What the cache has in place of the new value gets no weight.
                const int newest = fresh - of_lane;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (k != newest) continue;
                    room.newest[g] = score[k];
                    score[k] = 0.f;
                }
                weights = split_four(score[0], score[1], score[2], score[3]);
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
            }
            // Also zeros: a load of values reaches into positions that are not there.
            if (mine) room.weights[of_lane / CHUNK][of_lane / 4 % 2][4 * g + of_lane / 8 % 4] = weights;
            if (t == 0) room.sum[warp][g] = sum;
            if constexpr (!INT8) stage.step(keyed, ring.depth);
            ring.wait(stage);
            const uint32_t values = ring.at(stage) + (INT8 ? PART : 0) + sharer * (PART / SHARERS);
            sync_attending();
            total *= shrink;
#pragma unroll
            for (int k = 0; k < ATTEND_WARPS; k++) total += room.sum[k][g];
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) out[n][k] *= shrink;
            if (fresh >= 0) {
                const float weight = room.newest[g];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const float2 v = two_of(INT8 ? load_shared_2(fresh_value + first_dim + 8 * n) : load_shared_4(fresh_value + (first_dim + 8 * n) * 2));
                    out[n][0] = fmaf(weight, v.x, out[n][0]), out[n][1] = fmaf(weight, v.y, out[n][1]);
                }
            }
            const uint32_t row = values + g * PAGE * BYTES + t * 16;   // positions EACH t and on of dims 8n + g
#pragma unroll 1
            for (int c = 0; c < VALUE_LOADS && 4 * EACH * c < positions; c++) {
                uint4 a[FOURS] = {};
#pragma unroll
                for (int h = 0; h < EIGHTS; h++) {
                    const int eight = EIGHTS * (4 * c + t) + h, at = 4 * g + eight % 4;   // of the page's positions
                    if (mine) a[2 * h] = room.weights[eight / 4][0][at], a[2 * h + 1] = room.weights[eight / 4][1][at];
                }
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const uint4 loaded = load_shared_16(row + (8 * n * PAGE) * BYTES + c * 64);
#pragma unroll
                    for (int h = 0; h < EIGHTS; h++) multiply(out[n], a + 2 * h, eight_of<INT8>(loaded, h));
                }
            }
            ring.leave(stage, TEAM / SHARERS, lane);
            page.skip(stages(PAGE), ring.depth);
        }
        if (!mine) return;
        const int head = share.kv * group + g;
#pragma unroll
        for (int n = 0; n < TILES; n++)
            store_stamped_two(to + head * DIM + first_dim + 8 * n, make_float2(out[n][0] + out[n][2], out[n][1] + out[n][3]), stamp);
        if (warp == 0 && t == 0) store_stamped_two(to + (p.heads * DIM + head * 2), make_float2(top, total), stamp);
    }

    // Four values as left operand: rows g have their high parts, rows g + 8 the low ones.
    static DEVICE uint4 split_four(float a, float b, float c, float d) {
        uint4 v;
        split_pair(a, b, v.x, v.y);
        split_pair(c, d, v.z, v.w);
        return v;
    }
    // Products of eight elements of each lane.
    static DEVICE void multiply(float (&sum)[4], const uint4* a, const uint4& b) {
        mma_16816(sum, a[0].x, a[0].y, a[0].z, a[0].w, b.x, b.y);
        mma_16816(sum, a[1].x, a[1].y, a[1].z, a[1].w, b.z, b.w);
    }
    // Two cached elements.
    static DEVICE float2 two_of(uint32_t w) {
        if constexpr (INT8) return make_float2(int8_t(w), int8_t(w >> 8));
        return __half22float2(*reinterpret_cast<const __half2*>(&w));
    }
    static DEVICE float fresh_scale(uint32_t of) { return __half2float(__ushort_as_half(load_shared_2(of + DIM))); }
    static DEVICE void sync_attending() { sync_some(2, ATTEND_WARPS * 32); }
};
