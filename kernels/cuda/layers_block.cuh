// Of the kernel of all layers: what a block has, and what it does for each layer (`step_layers.cuh`).
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
    static constexpr int DELTA = ATTENTION + sizeof(AttentionShare), ROUTE = DELTA + sizeof(DeltaShare), COUNTS = 1152;
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
    static DEVICE void request(const LayersArgs& p, uint8_t* shared, int lane);

    // Requests a block's share of gate and up, or of down, of the chosen experts.
    static DEVICE void request_experts(const LayersArgs& p, uint8_t* shared, Requests& requests, const BlockShare& mine, int i, int lane);

    static DEVICE RecordKind kind_of(const LayersArgs& p, int l, int which) { return MIX || TRELLIS ? p.layer[l].kind[which] : p.layer[0].kind[0]; }

    static DEVICE Step step_of(const LayersArgs& p) { return {__ldcg(&p.step->position), __ldcg(&p.step->slot), 0, 0, __ldcg(&p.step->behind), __ldcg(&p.step->shift)}; }
    static DEVICE AttentionShare attention_share(const LayersArgs& p) { return AttentionShare::of(step_of(p), p.kv_heads, blockIdx.x, gridDim.x); }

    // What all products and layers share.
    DEVICE void prepare();

    DEVICE void request_gain(const float* from);

    // Parts that a tile of o (0) or down (1) has on each rank.
    DEVICE int parts_of(int of, int tile) const { return shared[COUNTS + of * (p.hidden / 16) + tile]; }

    // Slot s of x, which was v, with the parts that o (0) or down (1) left: of all ranks, in their order.
    DEVICE float2 sum_parts(int of, int s, uint32_t stamp, float2 v) const;

    // Value `output` of a part of o (0) or down (1), to all ranks.
    DEVICE void store_part(int of, int part, int output, float v, uint32_t stamp) const {
        if (p.ranks > 1) return store_far_part(p, of, part + p.rank * parts_of(of, output / 16), output, v, stamp);
        store_stamped(p.parts[of] + part * p.hidden + output, v, stamp);
    }

    // Slot s of what attention makes, of all sources.
    DEVICE float2 join(int s, uint32_t stamp, int sources) const;

    // This block's share of the inputs of a product of layer l, to all that share the work. END: of the
    // last x, to memory.
    DEVICE void gather(int l, int which);

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
    DEVICE void gather_blocks(int l, int which);

    // Asks for what ends of this block's strips, and its share of the next product's inputs, will need.
    DEVICE void prefetch_scales(int l, int which, const BlockShare& mine) const;

    // As `multiply`, of weights in trellis codes.
    DEVICE void multiply_strips(int l, int which);

    // The experts that this block scores.
    DEVICE int first_scored(uint32_t block) const { return block * p.experts / gridDim.x; }

    // Asks for the rows of the router that this block multiplies.
    DEVICE void prefetch_router(int l) const {
        const int first = first_scored(blockIdx.x), lines = (first_scored(blockIdx.x + 1) - first) * (p.hidden / 64);
        for (int i = threadIdx.x; i < lines; i += WARPS * 32) prefetch_line(p.layer[l].router + size_t(first) * p.hidden + i * 64);
    }

    // Chooses the experts of layer l, whose first product's inputs are on their way.
    DEVICE void choose(int l);

    // This block's share of a product of layer l.
    DEVICE void multiply(int l, int which);

    // This block's share of the attention of layer l.
    template <bool INT8>
    DEVICE void attend(int l);

    // A recurrence of layer l. It has the memory that attention has for queries.
    DEVICE DeltaColumns<!MIX> recurrence(int l) {
        return {p, p.layer[l].recurrence, delta(), *reinterpret_cast<DeltaRoom*>(shared + p.at.queries)};
    }

    DEVICE void run();
};
