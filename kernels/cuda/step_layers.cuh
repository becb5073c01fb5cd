// All layers of a decode step of one row, by one kernel.
//
// For each layer:
//   qkv       = qkv norm(x)
//   attended  = attention(qkv), or the recurrence of a gated DeltaNet
//   x        += o attended
//   gated     = silu(gate norm(x)) * (up norm(x)), of an MLP or of the experts that a router chooses
//   x        += down gated
//
// A block runs on each multiprocessor, on 9.0 in clusters; all run at once. The tiles of qkv and of gate and
// up, and the records of o and down, are dealt evenly to all blocks. A tile of the latter may so have
// up to MOST_PARTS parts, which whoever reads x adds up in order. Attention has a block for each key
// head and share of the pages (`layers_attention.cuh`), a recurrence one for each value head and share of its columns
// (`layers_delta.cuh`). The records of experts are requested when they are chosen (`layers_experts.cuh`).
//
// What comes from memory never waits for values: warps of each block that do nothing else request the records of all
// products in turn, and behind those of qkv the pages of keys and values, as long as its ring has room and at most
// `window` stages are on their way. More than the memory's latency needs would only delay what blocks send
// each other.
//
// What blocks send each other lies in global memory as words that hold a stamp beside each value. A
// reader waits for the stamps: there is no barrier over the grid. No two phases of a step have the same
// stamp, and the epoch tells steps apart. One buffer for each kind of value is enough: whoever
// writes into it has read what all blocks wrote since they last read it.
//
// Several GPUs, called ranks, may each have a part of every layer: some of the heads and of the rows of gate and up, and the
// inputs of o and down that come of these. Each rank stores its parts of x at all ranks, which add them in the same order, so that
// x is the same everywhere, bit for bit. All have the same number of blocks, on which the order of sums depends. One buffer for
// the parts of o and one for those of down are enough here too. A block that writes parts of o has got x with the parts of down
// of every block of every rank, and each block wrote those after it had read the parts of o before. The same holds for down. The
// first parts of down in a step follow parts of o from all ranks, each from a kernel that began when its rank had ended the step
// before. A rank that waits too long for another one goes on with what is there, and tells the host.
//
// Each block of a cluster gathers its share of a product's inputs, makes digits of them (`products.cuh`)
// and sends these to all blocks of the cluster; without clusters, of the grid (`layers_cluster.cuh`).
//
// Stages of the ring hold a record for each warp of a team; the teams take stages in turn. The warps'
// sums of a tile meet in shared memory, where they are added in the order of the warps.
//
// Weights: INT4 with a scale for 64 inputs or more, a mix, or trellis codes (`layers_trellis.cuh`).
//
// Bytes: codes + scales + zeros once; keys and values once; states read and written; for each cluster 8 a value of x, qkv and gated;
// without clusters, that once, and for each block 4.5 a value. To each other rank 8 a value of each part.
#pragma once

#include "layers_attention.cuh"
#include "layers_delta.cuh"
#include "layers_experts.cuh"
#include "layers_trellis.cuh"

// The records of a product that a block has.
struct BlockShare {
    int spans;         // of a tile
    int begin, units;  // the first record, and how many
    int tile, span;    // of the first one
    int tiles;         // that they lie in
    int stages;
    int part;          // of the block's first tile: which one it has

    // What is dealt: records, or tiles.
    DEVICE BlockShare(const ProductShape& w, bool records, uint32_t block, uint32_t blocks) : spans(w.spans) {
        const uint32_t all = records ? w.tiles * w.spans : w.tiles, each = records ? 1 : w.spans;
        begin = block * all / blocks * each, units = (block + 1) * all / blocks * each - begin;
        tile = begin / spans, span = begin - tile * spans;
        tiles = (span + units + spans - 1) / spans;
        stages = (units + TEAM - 1) / TEAM;
        part = block - owner(tile * spans, w, blocks);
    }
    // Which block has record r, where these are dealt.
    static DEVICE uint32_t owner(uint32_t r, const ProductShape& w, uint32_t blocks) { return ((r + 1) * blocks - 1) / uint32_t(w.tiles * w.spans); }
    // Blocks that have records of a tile.
    static DEVICE uint32_t parts(const ProductShape& w, uint32_t tile, uint32_t blocks) {
        return owner((tile + 1) * w.spans - 1, w, blocks) - owner(tile * w.spans, w, blocks) + 1;
    }
};

// v with `count` parts of x that all ranks left.
OUT_OF_LINE float2 add_far_parts(const LayersArgs& p, const uint64_t* from, int count, uint32_t stamp, float2 v) {
    Patience patience;
#pragma unroll 1
    for (; count > 0; count -= MOST_PARTS, from += MOST_PARTS * p.hidden) {
        uint4 w[MOST_PARTS];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < MOST_PARTS; i++) {
                w[i] = make_uint4(0, stamp, 0, stamp);
                if (i < count) w[i] = load_far(from + i * p.hidden);
            }
#pragma unroll
            for (int i = 0; i < MOST_PARTS; i++) there = there && has(w[i], stamp);
        } while (!there && !patience.ends(p.lost));
#pragma unroll
        for (int i = 0; i < MOST_PARTS; i++) v.x += values_of(w[i]).x, v.y += values_of(w[i]).y;
    }
    return v;
}

// Leaves a value of a part at all ranks.
OUT_OF_LINE void store_far_part(const LayersArgs& p, int of, int part, int output, float v, uint32_t stamp) {
    const int at = (of * p.ranks * MOST_PARTS + part) * p.hidden + output;
#pragma unroll 1
    for (int r = 0; r < p.ranks; r++) store_far(p.peers[r] + at, v, stamp);
}

// S: the scheme of all weights; or void: of a mix, in which each weight of each layer has its own, of codes of 4
// to 6 bits with scales in two levels; or `trellis_codes`. HYBRID: attention has wide heads with gates, and layers may have a recurrence in
// its place. EXPERTS: layers have mixtures in place of MLPs. TIMED: block 0 tells how long it waited and worked; only then, because it makes the loop over records
// longer.
template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
struct LayersBlock {
    static constexpr bool MIX = std::is_void_v<S>, TRELLIS = std::is_same_v<S, trellis_codes>;
    static_assert(!TRELLIS || !(HYBRID || EXPERTS || TIMED), "not written");
    static constexpr int DIM = HYBRID ? WIDE_HEAD_DIM : HEAD_DIM;
    using Of = HeadsOf<DIM>;
    static constexpr int WARPS = LAYERS_WARPS;
    // Offsets in shared memory.
    static constexpr int FACTOR = 16, ROUTED = 24, FULL = 64, EMPTY = FULL + MOST_RING * 8, SHARES = EMPTY + MOST_RING * 8;
    static constexpr int TIMES = SHARES + PRODUCTS * sizeof(BlockShare), ATTENTION = TIMES + (2 * PHASES + 1) * 8;
    static constexpr int DELTA = ATTENTION + sizeof(AttentionShare), ROUTE = DELTA + sizeof(DeltaShare), COUNTS = 1024;
    static_assert(TIMES % 8 == 0 && ROUTE + sizeof(Route) <= COUNTS);
    static_assert(sizeof(AttentionRoom) <= 2 * WARPS * WARPS * 16 * 4);   // which the sums of products take

    const LayersArgs& p;
    uint8_t* const shared;
    const int warp, lane, sharer;
    const uint32_t sent;          // two barriers: what was sent of products before and after attention or the gate
    const Ring ring;
    const uint32_t stamp0;
    RingPlace next;               // the first stage of the next product
    int phase = 0;                // counts products
    int turn = 0;                 // of the two buffers of sums
    float2 gain[2];               // of the next norm: for the first two slots that this warp gathers

    DEVICE LayersBlock(const LayersArgs& p, uint8_t* shared, int warp, int lane, uint32_t epoch)
        : p(p), shared(shared), warp(warp), lane(lane), sharer(rank_of_sharer()), sent(shared_address(shared)),
          ring(ring_of(p, shared)), stamp0(epoch * STAMPS), next{0, 0} {}

    static DEVICE Ring ring_of(const LayersArgs& p, uint8_t* shared) {
        const uint32_t at = shared_address(shared);
        return {at + FULL, at + EMPTY, keep(at + p.at.ring), uint32_t(p.stage), p.depth};
    }

    const DEVICE BlockShare& share(int which) const { return reinterpret_cast<const BlockShare*>(shared + SHARES)[which]; }
    const DEVICE AttentionShare& attention() const { return *reinterpret_cast<const AttentionShare*>(shared + ATTENTION); }
    const DEVICE DeltaShare& delta() const { return *reinterpret_cast<const DeltaShare*>(shared + DELTA); }
    DEVICE Route& route() const { return *reinterpret_cast<Route*>(shared + ROUTE); }
    static DEVICE bool recurs(const LayersArgs& p, int l) { return HYBRID && p.layer[l].recurrent; }
    // Whose shape a product of layer l has.
    static DEVICE int shape_of(const LayersArgs& p, int l, int which) { return which == QKV && recurs(p, l) ? INPUTS_OF_DELTA : which; }
    DEVICE float* sums() const { return reinterpret_cast<float*>(shared + p.at.sums); }
    DEVICE SpanDigits* digits(int which) const { return reinterpret_cast<SpanDigits*>(shared + p.at.digits[which & 1]); }
    DEVICE float& factor() const { return *reinterpret_cast<float*>(shared + FACTOR); }
    // The first of a block's share of `slots` slots of 64 inputs, if it is `sharer`-th of those that share the work.
    static DEVICE int first_slot(int slots, int sharer) { return sharer * slots / sharers(); }
    // The stamp of what a product of layer l reads.
    static DEVICE bool deals_records(int which) { return TRELLIS || which == OUT || which == DOWN; }
    DEVICE uint32_t stamp_before(int l, int which) const { return stamp0 + l * PHASES + (which == QKV || which == END ? 0 : which + 1); }

    // Counts the time since the last call, or begins to count.
    DEVICE void lap(int phase, int worked, bool begin = false) const {
        if (!TIMED || threadIdx.x > 0) return;
        uint64_t* const times = reinterpret_cast<uint64_t*>(shared + TIMES);
        const uint64_t now = nanoseconds();
        if (begin) for (int i = 0; i < 2 * PHASES; i++) times[i] = 0;
        else times[phase * 2 + worked] += now - times[2 * PHASES];
        times[2 * PHASES] = now;
    }
    static DEVICE int phase_of(int which) { return which == QKV ? 0 : which + 1; }

    // Requests the weights of all products, and the keys and values that the block attends to: the work of
    // warps that do nothing else.
    static DEVICE void request(const LayersArgs& p, uint8_t* shared, int lane) {
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
                wait_for_predecessor();
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

    // Requests a block's share of gate and up, or of down, of the chosen experts.
    static DEVICE void request_experts(const LayersArgs& p, uint8_t* shared, Requests& requests, const BlockShare& mine, int i, int lane) {
        const LayerArgs& layer = p.layer[i / 4];
        const Route& route = *reinterpret_cast<const Route*>(shared + ROUTE);
        const RecordKind kind = kind_of(p, i / 4, i % 4);
#pragma unroll 1
        for (int done = 0; done < mine.units; done += TEAM) {
            const int records = min(mine.units - done, TEAM);
            const uint32_t record = expert_record(p, route, i % 4 == DOWN, mine.begin + done + min(lane, records - 1));   // a lane's
            const uint32_t bytes = records * (kind.codes_bytes + kind.meta_bytes);
            auto copy = [&](const Copies& copies, uint32_t to, int nth, uint32_t first, int count) {
                copies.copy<true>(to + nth * kind.codes_bytes, layer.codes[i % 4] + size_t(first) * kind.codes_bytes, count * kind.codes_bytes);
                copies.copy<true>(to + TEAM * kind.codes_bytes + nth * kind.meta_bytes, layer.meta[i % 4] + size_t(first) * kind.meta_bytes, count * kind.meta_bytes);
            };
            if constexpr (CLUSTERED) {
                // The first of neighbours requests them all.
                const uint32_t before = __shfl_up_sync(~0u, record, 1);
                const bool starts = lane == 0 || record != before + 1;
                const uint32_t behind = __ballot_sync(~0u, starts || lane >= records) >> lane >> 1;
                requests.wait();
                const uint32_t to = requests.at(), barrier = requests.barrier();
                if (lane == 0) Copies::expect(barrier, bytes);
                __syncwarp();
                if (starts && lane < records) copy({barrier}, to, lane, record, __ffs(behind));
                __syncwarp();
                requests.next();
            } else {
                requests.fill(bytes, [&](uint32_t to, const Copies& copies) {
                    for (int r = 0; r < records; r++) copy(copies, to, r, __shfl_sync(~0u, record, r), 1);
                });
            }
        }
    }

    static DEVICE RecordKind kind_of(const LayersArgs& p, int l, int which) { return MIX || TRELLIS ? p.layer[l].kind[which] : p.layer[0].kind[0]; }

    static DEVICE Step step_of(const LayersArgs& p) { return {__ldcg(&p.step->position), __ldcg(&p.step->slot), 0, 0, __ldcg(&p.step->behind)}; }
    static DEVICE AttentionShare attention_share(const LayersArgs& p) { return AttentionShare::of(step_of(p), p.kv_heads, blockIdx.x, gridDim.x); }

    // What all products and layers share.
    DEVICE void prepare() {
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

    DEVICE void request_gain(const float* from) {
        const int slots = p.hidden / 64;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Of trellis codes the two slots of a block.
            const int s = TRELLIS ? (first_slot(slots / 2, sharer) + warp) * 2 + i : first_slot(slots, sharer) + warp + i * WARPS;
            const int end = TRELLIS ? first_slot(slots / 2, sharer + 1) * 2 : first_slot(slots, sharer + 1);
            if (s < end) gain[i] = __ldg(reinterpret_cast<const float2*>(from + s * 64) + lane);
        }
    }

    // Parts that a tile of o (0) or down (1) has on each rank.
    DEVICE int parts_of(int of, int tile) const { return shared[COUNTS + of * (p.hidden / 16) + tile]; }

    // Slot s of x, which was v, with the parts that o (0) or down (1) left: of all ranks, in their order.
    DEVICE float2 sum_parts(int of, int s, uint32_t stamp, float2 v) const {
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

    // Value `output` of a part of o (0) or down (1), to all ranks.
    DEVICE void store_part(int of, int part, int output, float v, uint32_t stamp) const {
        if (p.ranks > 1) return store_far_part(p, of, part + p.rank * parts_of(of, output / 16), output, v, stamp);
        store_stamped(p.parts[of] + part * p.hidden + output, v, stamp);
    }

    // Slot s of what attention makes, of all sources.
    DEVICE float2 join(int s, uint32_t stamp, int sources) const {
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

    // This block's share of the inputs of a product of layer l, to all that share the work. END: of the
    // last x, to memory.
    DEVICE void gather(int l, int which) {
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

    // Parts that strip `strip` of a product in trellis codes has.
    DEVICE int strip_parts(int which, int strip) const {
        for (int i = QKV; i < which; i++) strip += p.shape[i].tiles;
        return shared[COUNTS + strip];
    }
    static DEVICE float4 joined(float2 a, float2 b) { return make_float4(a.x, a.y, b.x, b.y); }
    // Scales of rows, and behind them those of inputs.
    static DEVICE const __half* scales_of(const LayersArgs& p, int l, int which) { return reinterpret_cast<const __half*>(p.layer[l].meta[which]); }
    static DEVICE bool is_octagon(const LayersArgs& p, int l, int which) { return kind_of(p, l, which).scheme >= CODES_OF_SUM; }

    // As `gather`, where weights are in trellis codes.
    DEVICE void gather_blocks(int l, int which) {
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

    // Asks for what ends of this block's strips, and its share of the next product's inputs, will need.
    DEVICE void prefetch_scales(int l, int which, const BlockShare& mine) const {
        const __half* const rows = scales_of(p, l, which);
        for (int i = threadIdx.x; i < mine.tiles * 2; i += WARPS * 32) prefetch_line(rows + mine.tile * STRIP + i * 64);
        const int next = (which + 1) % 4, next_layer = which == DOWN ? l + 1 : l;
        if (next_layer == p.layers) return;
        const int blocks = p.shape[next].spans * TILE / BLOCK, first = first_slot(blocks, sharer), end = first_slot(blocks, sharer + 1);
        const __half* const inputs = scales_of(p, next_layer, next) + p.shape[next].tiles * STRIP;
        for (int i = first * 2 + threadIdx.x; i < end * 2; i += WARPS * 32) prefetch_line(inputs + i * 64);
    }

    // As `multiply`, of weights in trellis codes.
    DEVICE void multiply_strips(int l, int which) {
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

    // The experts that this block scores.
    DEVICE int first_scored(uint32_t block) const { return block * p.experts / gridDim.x; }

    // Asks for the rows of the router that this block multiplies.
    DEVICE void prefetch_router(int l) const {
        const int first = first_scored(blockIdx.x), lines = (first_scored(blockIdx.x + 1) - first) * (p.hidden / 64);
        for (int i = threadIdx.x; i < lines; i += WARPS * 32) prefetch_line(p.layer[l].router + size_t(first) * p.hidden + i * 64);
    }

    // Chooses the experts of layer l, whose first product's inputs are on their way.
    DEVICE void choose(int l) {
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
            if (p.experts <= 8 * 32 + 1) choose_route<8>(p, route(), stamp, lane);
            else choose_route<MOST_EXPERTS / 32>(p, route(), stamp, lane);
            if (lane == 0) arrive_times(shared_address(shared) + ROUTED, 1);
        }
    }

    // This block's share of a product of layer l.
    DEVICE void multiply(int l, int which) {
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
                default: add_records(int6_sym_32_scales8());
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

    // This block's share of the attention of layer l.
    template <bool INT8>
    DEVICE void attend(int l) {
        using Attention = PageAttention<INT8, DIM>;
        const LayerAttention& layer = p.layer[l].attention;
        const AttentionShare& mine = attention();
        const uint32_t stamp = stamp0 + l * PHASES + 1;
        uint8_t* const queries = shared + p.at.queries;
        // Queries, and if the new position is here, its key and value: a warp each.
        static_assert(MOST_GROUP + 2 <= WARPS);
        const int group = p.group;
        if (warp < group + (mine.newest() ? 2 : 0)) {
            const Turn<DIM> turn(Turn<DIM>::of(p.cos_sin + size_t(mine.position) * (Of::ROTATED / 2), lane));
            // Queries, a key or a value, and which head of them.
            const int kind = max(0, warp - group + 1), of_kind = kind == 0 ? mine.kv * group + warp : mine.kv;
            const HeadGain<DIM> gain(layer.vectors.gains[min(kind, 1)], lane);
            const size_t newest = size_t(__ldcg(p.tables + size_t(mine.slot) * p.table_len + mine.position / PAGE)) * p.kv_heads + mine.kv;
            const int head = kind == 0 ? Of::query(of_kind) : Of::key(p.heads, (kind - 1) * p.kv_heads + of_kind);
            const uint64_t* const from = p.qkv + head * DIM + lane * 4;
            Head<DIM> v;
            if constexpr (TRELLIS) {
                static_assert(DIM == STRIP);
                v.part[0] = add_strip_parts<2>(from, p.shape[QKV].tiles * STRIP, strip_parts(QKV, head), stamp, {});
            } else
#pragma unroll
            for (int j = 0; j < Head<DIM>::PARTS; j++) {
                uint4 a, b;
                do a = load_stamped(from + j * 128), b = load_stamped(from + j * 128 + 2);
                while (!has(a, stamp) || !has(b, stamp));
                v.part[j] = make_float4(values_of(a).x, values_of(a).y, values_of(b).x, values_of(b).y);
            }
            __syncwarp();
            lap(1, 0);
            v = add_bias(v, layer.vectors, kind, of_kind, lane);
            Attention::prepare(p, layer, mine, newest, warp, v, gain, turn, queries, lane);
        }
        sync_layers();   // and the sums of qkv, whose memory attention takes, are read
        uint64_t* const to = p.attended + mine.source * (p.heads * (DIM + 2));
        if (warp < ATTEND_WARPS)
            Attention::attend(p, ring, next, mine, shared_address(queries), *reinterpret_cast<AttentionRoom*>(sums()), to, stamp + 1, warp, lane);
        sync_layers();   // those that do not attend have not seen the stages pass (`Ring::wait`)
        next.skip(Attention::stages(mine), ring.depth);
        lap(1, 1);
    }

    // A recurrence of layer l. It has the memory that attention has for queries.
    DEVICE DeltaColumns<!MIX> recurrence(int l) {
        return {p, p.layer[l].recurrence, delta(), *reinterpret_cast<DeltaRoom*>(shared + p.at.queries)};
    }

    DEVICE void run() {
        prepare();
        const bool attends = attention().pages > 0, has_columns = HYBRID && delta().any();
        lap(0, 0, true);
#pragma unroll 1
        for (int l = 0; l < p.layers; l++) {
#pragma unroll 1
            for (int which = QKV; which <= DOWN; which++) {
                if constexpr (TRELLIS) gather_blocks(l, which);
                else gather(l, which);
                const bool recurrent = which == QKV && recurs(p, l);
                if (recurrent && has_columns) recurrence(l).prefetch();
                if (EXPERTS && which == GATED) choose(l);
                if (which == OUT) request_gain(p.layer[l].gains[1]);
                if (which == DOWN && l + 1 < p.layers) request_gain(p.layer[l + 1].gains[0]);
                if constexpr (TRELLIS) multiply_strips(l, which);
                else multiply(l, which);
                if (EXPERTS && which == QKV) prefetch_router(l);
                // Attention takes the memory of the sums. The next product writes there only after it has ended:
                // it needs digits that come in part from it.
                if (recurrent) {
                    if (has_columns) recurrence(l).run(digits(QKV), factor(), stamp0 + l * PHASES + 1, [&] { lap(1, 0); });
                    lap(1, 1);
                } else if (which == QKV && attends) {
                    if constexpr (HYBRID) attend<false>(l);
                    else if (p.layer[l].attention.key_scales != nullptr) attend<true>(l);
                    else attend<false>(l);
                }
            }
        }
        if (!CLUSTERED || blockIdx.x < CLUSTER) {
            if constexpr (TRELLIS) gather_blocks(p.layers, END);
            else gather(p.layers, END);
        }
        if (TIMED && blockIdx.x == 0 && threadIdx.x == 0)
            for (int i = 0; i < 2 * PHASES; i++) p.times[i] = reinterpret_cast<const uint64_t*>(shared + TIMES)[i];
    }
};

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void step_layers(const LayersArgs& p) {
    using Block = LayersBlock<S, HYBRID, EXPERTS, TIMED>;
    uint8_t* const shared = dynamic_shared();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t barriers = shared_address(shared);
    if (threadIdx.x < 2) init_barrier(barriers + threadIdx.x * 8, SharedInputs::ARRIVALS);
    if (threadIdx.x == 2) init_barrier(barriers + Block::ROUTED, 1);
    if (warp == Block::WARPS && lane < p.depth) {
        init_barrier(barriers + Block::FULL + lane * 8, Copies::ARRIVALS);
        init_barrier(barriers + Block::EMPTY + lane * 8, TEAM);
    }
    barrier_fence();
    __syncwarp();
    meet_begin();
    if (warp >= Block::WARPS) {
        Block::request(p, shared, lane);
        meet_end();
        return;
    }
    meet_end();   // all barriers of the cluster are there
    wait_for_predecessor();
    release_successor();   // no kernel of this step overtakes one of the step before
    Block block(p, shared, warp, lane, __ldcg(p.epoch));
    block.run();
    // Block 0 has the last x: all blocks have read the epoch.
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.epoch += 1;
}
