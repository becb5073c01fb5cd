// All layers of a decode step of one row, by one kernel.
//
// For each layer:
//   qkv       = qkv norm(x)
//   attended  = attention(qkv)
//   x        += o attended
//   gated     = silu(gate norm(x)) * (up norm(x))
//   x        += down gated
//
// A block runs on each multiprocessor, in clusters; all run at once. The tiles of qkv and of gate and
// up, and the records of o and down, are dealt evenly to all blocks. A tile of the latter may so have
// up to MOST_PARTS parts, which whoever reads x adds up in order. Attention has a block for each key
// head and share of the positions.
//
// Weights never wait for values: one warp of each block requests the records of all products in turn,
// as long as its ring has room and at most `window` stages are on their way. More than the memory's
// latency needs would only delay what blocks send each other.
//
// What blocks send each other lies in global memory as words that hold a stamp beside each value. A
// reader waits for the stamps: there is no barrier over the grid. No two phases of a step have the same
// stamp, and the epoch tells steps apart. One buffer for each kind of value is enough: whoever
// writes into it has read what all blocks wrote since they last read it.
//
// Each block of a cluster gathers its share of a product's inputs, makes digits of them (`products.cuh`)
// and sends these to all blocks of the cluster.
//
// Stages of the ring hold a record for each warp of a team; the teams take stages in turn. The warps'
// sums of a tile meet in shared memory, where they are added in the order of the warps.
//
// INT4 codes with a scale for 64 inputs or more, keys and values in FP16.
//
// Bytes: codes + scales + zeros once; keys and values once; for each cluster 8 a value of x, qkv and gated.
#pragma once

#include "exchange.cuh"
#include "products.cuh"
#include "rows.cuh"

constexpr int LAYERS_WARPS = 12;    // that multiply
constexpr int TEAM = 4;             // warps that share a stage
constexpr int ATTEND_WARPS = 8;
constexpr int MOST_SOURCES = 8;     // blocks among which the positions of a head are dealt
constexpr int MOST_PARTS = 4;       // of a tile of x
constexpr int MOST_RING = 32;       // stages
constexpr int MOST_LAYERS = 64;
constexpr int POSITIONS = 32;       // that a block attends to at a time
constexpr int CLUSTER = 8;          // blocks
constexpr int PHASES = 5;           // of a layer, that leave stamped values
constexpr int STAMPS = 512;         // of a step

enum LayerProduct { QKV = 0, OUT = 1, GATED = 2, DOWN = 3, END = 4 };

struct LayerArgs {
    const uint8_t* codes[4];   // records [tiles][spans] of each product
    const uint8_t* meta[4];
    const float* gains[2];     // [hidden], of the norms before qkv and before gate and up
    const float* q_gain;       // [128]
    const float* k_gain;
    void* keys;                // as of `Cache`, in FP16
    void* values;
};

struct ProductShape {
    int tiles;
    int spans;
};

// Where things lie in shared memory, in bytes.
struct LayersRoom {
    int digits[2];   // PairedDigits [spans], of qkv or gate and up; of o or down
    int x;           // float [inputs of x that the block gathers]
    int sums;        // float [2][LAYERS_WARPS tiles][LAYERS_WARPS][16]; attention: [2][GROUP][128], [GROUP][32]
    int queries;     // float [GROUP + 2][128]: queries, the new key and value
    int ring;        // [depth] stages
};

struct LayersArgs {
    float* x;                // [hidden]
    uint64_t* qkv;           // [(heads + 2 kv_heads) * 128]
    uint64_t* attended;      // [MOST_SOURCES][heads * 128 and heads * 2]: sums of values; greatest scores, weights
    uint64_t* gated;         // [intermediate]
    uint64_t* parts[2];      // [MOST_PARTS][hidden], of o and of down
    uint32_t* epoch;         // of the step, from 1 on
    const float2* cos_sin;   // [positions][64]
    const uint32_t* tables;  // as of `Cache`
    const Step* step;
    uint64_t* times;         // TIMED: [PHASES][2]: nanoseconds that block 0 waited for the inputs of qkv, attention, o,
                             // gate and up, and down, and worked on them
    LayersRoom at;
    ProductShape shape[4];
    int table_len;
    int layers;
    int hidden;              // a multiple of 256, as the inputs of all products
    int heads;
    int kv_heads;
    int groups;              // scale groups of a span
    int meta_bytes;          // of a record
    int depth;               // stages of the ring, more than LAYERS_WARPS / TEAM, at most MOST_RING
    int window;              // stages requested and not there yet, at most
    float eps;
    LayerArgs layer[MOST_LAYERS];
};

#if __CUDA_ARCH__ >= 900

// a / b of small numbers.
DEVICE int quotient(int a, int b) { return int(__fdividef(float(a) + 0.5f, float(b))); }

// Sums each of N values over the warp; lane l gets value l * N / 32.
template <int BIT = 16, int N>
DEVICE float sum_each(const float (&v)[N], int lane) {
    if constexpr (N == 1) {
        float all = v[0];
#pragma unroll
        for (int bit = BIT; bit > 0; bit /= 2) all += __shfl_xor_sync(~0u, all, bit);
        return all;
    } else {
        float half[N / 2];
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            const float keep = lane & BIT ? v[k + N / 2] : v[k], give = lane & BIT ? v[k] : v[k + N / 2];
            half[k] = keep + __shfl_xor_sync(~0u, give, BIT);
        }
        return sum_each<BIT / 2>(half, lane);
    }
}

DEVICE float warp_max(float v) {
    const int i = __float_as_int(v), most = __reduce_max_sync(~0u, i ^ (i >> 31 & 0x7fffffff));
    return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

// The records of a product that a block has.
struct BlockShare {
    int spans;         // of a tile
    int begin, units;  // the first record, and how many
    int tile, span;    // of the first one
    int tiles;         // that they lie in
    int stages;
    int part;          // of the block's first tile: which one it has

    DEVICE BlockShare(const ProductShape& w, int which, uint32_t block, uint32_t blocks) : spans(w.spans) {
        // What is dealt: records, or tiles.
        const bool records = which == OUT || which == DOWN;
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

// What attention a block does, of the heads of key head `kv`: to positions from `start` to before `end`,
// the `source`-th share of them, where this is less than `sources`.
struct AttentionShare {
    int position, slot;   // of the new token
    int kv, source, sources, start, end;

    DEVICE AttentionShare(const Step& step, int kv_heads, int block, int blocks)
        : position(step.position), slot(step.slot), kv(block % kv_heads), source(block / kv_heads) {
        const int length = position + 1, most = min(MOST_SOURCES, blocks / kv_heads);
        const int each = ((length + most - 1) / most + POSITIONS - 1) / POSITIONS * POSITIONS;
        sources = (length + each - 1) / each;
        start = source * each, end = min(start + each, length);
    }
};

// A place in the ring.
struct RingPlace {
    int slot;
    uint32_t parity;
    DEVICE void step(int n, int depth) {
        slot += n;
        if (slot >= depth) slot -= depth, parity ^= 1;
    }
};

// GROUP: query heads of a key head. TIMED: block 0 tells how long it waited and worked; only then, because
// it makes the loop over records longer.
template <int GROUP, int ZERO, bool TIMED>
struct LayersBlock {
    using S = Scheme<4, ZERO, 64>;
    static constexpr int WARPS = LAYERS_WARPS, TEAMS = WARPS / TEAM;
    static constexpr uint32_t CODES = 2048, STAGE = TEAM * (CODES + S::META);
    // Offsets in shared memory.
    static constexpr int FACTOR = 16, FULL = 64, EMPTY = FULL + MOST_RING * 8, SHARES = EMPTY + MOST_RING * 8;
    static constexpr int TIMES = SHARES + 4 * sizeof(BlockShare), ATTENTION = TIMES + (2 * PHASES + 1) * 8, COUNTS = 1024;
    static_assert(ATTENTION + sizeof(AttentionShare) <= COUNTS);

    const LayersArgs& p;
    uint8_t* const shared;
    const int warp, lane, rank;
    const uint32_t sent;          // two barriers: what was sent of products before and after attention or the gate
    const uint32_t full, empty;   // barriers of the ring
    const uint32_t ring;
    const uint32_t stamp0;
    RingPlace next;               // the first stage of the next product
    int phase = 0;                // counts products
    int turn = 0;                 // of the two buffers of sums
    float2 gain[2];               // of the next norm: for the first two slots that this warp gathers

    DEVICE LayersBlock(const LayersArgs& p, uint8_t* shared, int warp, int lane, uint32_t epoch)
        : p(p), shared(shared), warp(warp), lane(lane), rank(cluster_rank()), sent(shared_address(shared)),
          full(sent + FULL), empty(sent + EMPTY), ring(keep(shared_address(shared + p.at.ring))), stamp0(epoch * STAMPS), next{0, 0} {}

    static DEVICE void sync() { sync_some<1, WARPS * 32>(); }
    static DEVICE void sync_attending() { sync_some<2, ATTEND_WARPS * 32>(); }

    const DEVICE BlockShare& share(int which) const { return reinterpret_cast<const BlockShare*>(shared + SHARES)[which]; }
    const DEVICE AttentionShare& attention() const { return *reinterpret_cast<const AttentionShare*>(shared + ATTENTION); }
    DEVICE float* sums() const { return reinterpret_cast<float*>(shared + p.at.sums); }
    DEVICE PairedDigits* digits(int which) const { return reinterpret_cast<PairedDigits*>(shared + p.at.digits[which & 1]); }
    DEVICE float& factor() const { return *reinterpret_cast<float*>(shared + FACTOR); }
    // The first of this block's share of `slots` slots of 64 inputs, if it is `rank`-th of its cluster.
    static DEVICE int first_slot(int slots, int rank) { return rank * slots / CLUSTER; }
    // The stamp of what a product of layer l reads.
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

    // Requests the weights of all products: the work of one warp.
    static DEVICE void request_weights(const LayersArgs& p, uint8_t* shared, int lane) {
        const uint32_t full = shared_address(shared) + FULL, empty = full + MOST_RING * 8, ring = shared_address(shared + p.at.ring);
        RingPlace at{0, 1}, behind{0, 0};
        int n = 0;
        const uint8_t *codes = p.layer[0].codes[0], *meta = p.layer[0].meta[0];
#pragma unroll 1
        for (int i = 0; i < p.layers * 4; i++) {
            const BlockShare mine(p.shape[i % 4], i % 4, blockIdx.x, gridDim.x);
            codes += size_t(mine.begin) * CODES, meta += size_t(mine.begin) * p.meta_bytes;
            // Those of the next product, early.
            const LayerArgs& after = p.layer[min((i + 1) / 4, p.layers - 1)];
            const uint8_t *next_codes = after.codes[(i + 1) % 4], *next_meta = after.meta[(i + 1) % 4];
#pragma unroll 1
            for (int left = mine.units; left > 0; left -= TEAM) {
                if (n >= p.depth) barrier_wait_at(empty + at.slot * 8, at.parity);
                if (n >= p.window) {
                    barrier_wait_at(full + behind.slot * 8, behind.parity);
                    behind.step(1, p.depth);
                }
                const int records = min(left, TEAM);
                if (elect()) {
                    const uint32_t to = ring + at.slot * STAGE, barrier = full + at.slot * 8;
                    barrier_expect_at(barrier, records * (CODES + p.meta_bytes));
                    copy_bulk_at(to, codes, records * CODES, barrier);
                    copy_bulk_at(to + TEAM * CODES, meta, records * p.meta_bytes, barrier);
                }
                codes += TEAM * CODES, meta += TEAM * p.meta_bytes, n++;
                at.step(1, p.depth);
            }
            codes = next_codes, meta = next_meta;
        }
    }

    // What all products and layers share.
    DEVICE void prepare() {
        if (threadIdx.x < 4) reinterpret_cast<BlockShare*>(shared + SHARES)[threadIdx.x] = BlockShare(p.shape[threadIdx.x], threadIdx.x, blockIdx.x, gridDim.x);
        if (threadIdx.x == 32) {
            const Step step = {__ldcg(&p.step->position), __ldcg(&p.step->slot), 0, 0};
            *reinterpret_cast<AttentionShare*>(shared + ATTENTION) = AttentionShare(step, p.kv_heads, blockIdx.x, gridDim.x);
        }
        const int tiles = p.hidden / 16;
        for (int i = threadIdx.x; i < 2 * tiles; i += WARPS * 32) {
            shared[COUNTS + i] = BlockShare::parts(p.shape[i < tiles ? OUT : DOWN], i % tiles, gridDim.x);
        }
        request_gain(p.layer[0].gains[0]);
        sync();
    }

    DEVICE void request_gain(const float* from) {
        const int slots = p.hidden / 64;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int s = first_slot(slots, rank) + warp + i * WARPS;
            if (s < first_slot(slots, rank + 1)) gain[i] = __ldg(reinterpret_cast<const float2*>(from + s * 64) + lane);
        }
    }

    // The sum of the parts of slot s of x that o (0) or down (1) left.
    DEVICE float2 sum_parts(int of, int s, uint32_t stamp, float2 v) const {
        const int count = shared[COUNTS + of * (p.hidden / 16) + s * 4 + lane / 8];
        const uint64_t* const from = p.parts[of] + s * 64 + lane * 2;
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

    // Slot s of what attention makes, of all sources.
    DEVICE float2 join(int s, uint32_t stamp, int sources) const {
        constexpr int AT_ONCE = 4;
        const int width = p.heads * HEAD_DIM, stride = width + 2 * p.heads;
        const uint64_t* const from = p.attended + s * 64 + lane * 2;
        const uint64_t* const tops = p.attended + min(lane, sources - 1) * stride + width + s / 2 * 2;
        uint4 top, w[AT_ONCE];
        auto load = [&](int base) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                w[i] = make_uint4(0, stamp, 0, stamp);
                if (base + i < sources) w[i] = load_stamped(from + (base + i) * stride);
            }
        };
        do top = load_stamped(tops), load(0);
        while (!__all_sync(~0u, has(top, stamp)));
        const float peak = warp_max(values_of(top).x);
        float share = exp2f(values_of(top).x - peak);
        share = __fdividef(share, warp_sum(lane < sources ? share * values_of(top).y : 0.f));
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
        return v;
    }

    // This block's share of the inputs of a product of layer l, to all blocks of the cluster. END: of the
    // last x, to memory.
    DEVICE void gather(int l, int which) {
        const uint32_t barrier = sent + (which & 1) * 8, stamp = stamp_before(l, which);
        const bool norm = which == QKV || which == GATED;
        const int slots = which == OUT || which == DOWN ? p.shape[which].spans * 4 : p.hidden / 64;
        const int slot0 = first_slot(slots, rank), slot1 = first_slot(slots, rank + 1);
        if (threadIdx.x == 0 && which != END) barrier_expect_at(barrier, slots * (128 + 16));
        constexpr int AHEAD = 4;   // slots whose values are requested together
        uint4 ahead[AHEAD];
#pragma unroll 1
        for (int s = slot0 + warp, i = 0; s < slot1; s += WARPS, i++) {
            float2* const own = reinterpret_cast<float2*>(shared + p.at.x) + (s - slot0) * 32 + lane;
            float2 v;
            if (which == OUT) {
                v = join(s, stamp, attention().sources);
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
                if (blockIdx.x < CLUSTER) reinterpret_cast<float2*>(p.x + s * 64)[lane] = v;
                continue;
            }
            float2 scaled = v;
            if (norm) {
                float2 f = gain[0];
                gain[0] = gain[1];
                if (i > 1) f = __ldg(reinterpret_cast<const float2*>(p.layer[l].gains[which / 2] + s * 64) + lane);
                scaled.x *= f.x, scaled.y *= f.y;
            }
            const SlotDigits d(scaled, lane);
            PairedDigits& to = digits(which)[s / 4];
            const uint32_t word = shared_address(to.words) + (s % 4 * 32 + SlotDigits::index(lane)) * 4 - barrier;
#pragma unroll
            for (int b = 0; b < CLUSTER; b++) {
                const uint32_t there = map_rank(barrier, b);
                send_4(there + word, d.word, there);
            }
            const float square = norm ? warp_sum(v.x * v.x + v.y * v.y) : 0.f;
            if (lane < CLUSTER) {
                const uint32_t there = map_rank(barrier, lane);
                send_16(there + shared_address(&to.slots[s % 4]) - barrier, make_float4(d.scale, d.sum, square, 0.f), there);
            }
        }
    }

    // This block's share of a product of layer l.
    DEVICE void multiply(int l, int which) {
        const BlockShare& mine = share(which);
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
        Products<S> products(p.groups, lane);
        bool waited = false;
        auto wait_digits = [&] {
            if (waited) return;
            wait_sent(barrier, parity);
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
#pragma unroll 1
            while (unit < units && tile < end) {
                barrier_wait_at(full + at.slot * 8, at.parity);
                __syncwarp();
                const uint32_t from = ring + at.slot * STAGE, place = warp % TEAM;
                products.add(
                    y, from + place * CODES, from + TEAM * CODES + place * p.meta_bytes, row + span * uint32_t(sizeof(PairedDigits)), wait_digits,
                    [&] {
                        __syncwarp();
                        if (lane == 0) arrive(empty + at.slot * 8);
                    });
                const int before = tile;
                unit += WARPS, stage += TEAMS, span += span_step, tile += tile_step;
                if (span >= spans) span -= spans, tile++;
                at.step(TEAMS, p.depth);
                if (tile != before || unit >= units) {
                    // Lane (g, t) ends with row g + 8 t, for t < 2.
                    float v = (lane & 1 ? y[1] : y[0]) + __shfl_xor_sync(~0u, lane & 1 ? y[0] : y[1], 1);
                    v += __shfl_xor_sync(~0u, v, 2);
                    if (lane % 4 < 2) store_shared_4(to + before * (WARPS * 64), v);
                    y[0] = y[1] = 0.f;
                }
            }
            // A warp a tile, two lanes an output, each with the sums of every other warp.
            const int i = chunk + warp, output = (mine.tile + i) * 16 + lane % 16;
            const int first = max(0, i * spans - mine.span), count = min((i + 1) * spans - mine.span, units) - first;
            const int skip = WARPS - first % WARPS;
            sync();
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
                    if (lane < 8) store_stamped(p.gated + (mine.tile + i) * 8 + lane, __fdividef(v, 1.f + __expf(-v)) * up, stamp);
                } else {
                    store_stamped(p.parts[which / 2] + (i == 0 ? mine.part : 0) * p.hidden + output, v, stamp);
                }
            }
        }
        wait_digits();
        // Stages of which this warp has nothing.
#pragma unroll 1
        for (; stage < stages; stage += TEAMS) {
            barrier_wait_at(full + at.slot * 8, at.parity);
            if (lane == 0) arrive(empty + at.slot * 8);
            at.step(TEAMS, p.depth);
        }
        lap(phase_of(which), 1);
        next.slot += stages;
        while (next.slot >= p.depth) next.slot -= p.depth, next.parity ^= 1;
    }

    // This block's share of the attention of layer l.
    DEVICE void attend(int l) const {
        constexpr int KEYS = POSITIONS / ATTEND_WARPS, EIGHTS = POSITIONS / 8 / (ATTEND_WARPS / 4);
        constexpr int PADDED = GROUP <= 2 ? GROUP : GROUP <= 4 ? 4 : 8;   // a power of two
        const uint32_t stamp = stamp0 + l * PHASES + 1;
        const AttentionShare& mine = attention();
        const int position = mine.position, slot = mine.slot, kv = mine.kv, source = mine.source, start = mine.start, end = mine.end;
        const LayerArgs& layer = p.layer[l];
        const Cache cache = {layer.keys, layer.values, nullptr, nullptr, p.tables, p.kv_heads, p.table_len};
        float* const queries = reinterpret_cast<float*>(shared + p.at.queries);
        float* const scratch = sums();                                          // [2][GROUP][128]
        float* const scores = scratch + ATTEND_WARPS / 4 * GROUP * HEAD_DIM;    // [GROUP][32]
        const int dim = threadIdx.x % HEAD_DIM;
        uint2 keys[KEYS];        // of positions warp + ATTEND_WARPS i: dims 4 lane and on
        uint4 values[EIGHTS];    // of `dim`: positions 8 (warp / 4 + ATTEND_WARPS / 4 i) and on
        auto fetch = [&](int base) {
            const size_t head = cache.head(cache.page(slot, base), kv);
            const __half* k = static_cast<const __half*>(cache.keys) + (head * PAGE + base % PAGE + warp) * HEAD_DIM;
            const __half* v = static_cast<const __half*>(cache.values) + (head * HEAD_DIM + dim) * PAGE + base % PAGE;
#pragma unroll
            for (int i = 0; i < KEYS; i++) keys[i] = __ldcg(reinterpret_cast<const uint2*>(k + i * ATTEND_WARPS * HEAD_DIM) + lane);
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) values[i] = __ldcg(reinterpret_cast<const uint4*>(v) + warp / 4 + i * (ATTEND_WARPS / 4));
        };
        fetch(start);
        const uint32_t newest_page = cache.page(slot, position);
        // Queries, and if the new position is among those here, its key and value.
#pragma unroll 1
        for (int job = warp; job < GROUP + (position < end ? 2 : 0); job += ATTEND_WARPS) {
            const float4* const angles = reinterpret_cast<const float4*>(p.cos_sin + size_t(position) * 64) + lane % 16 * 2;
            const float4 c0 = __ldg(angles), c1 = __ldg(angles + 1);
            const float4 f = __ldg(reinterpret_cast<const float4*>(job < GROUP ? layer.q_gain : layer.k_gain) + lane);
            const int head = job < GROUP ? kv * GROUP + job : p.heads + (job - GROUP) * p.kv_heads + kv;
            const uint64_t* const from = p.qkv + head * HEAD_DIM + lane * 4;
            uint4 a, b;
            do a = load_stamped(from), b = load_stamped(from + 2);
            while (!has(a, stamp) || !has(b, stamp));
            __syncwarp();
            lap(1, 0);
            float4 v = make_float4(values_of(a).x, values_of(a).y, values_of(b).x, values_of(b).y);
            if (job <= GROUP) v = norm_rope(v, f, c0, c1, p.eps, lane);
            if (job < GROUP) {
                const float s = 1.4426950408889634f * 0.08838834764831845f;   // exp2 instead of exp; 1 / sqrt(128)
                v.x *= s, v.y *= s, v.z *= s, v.w *= s;
            } else {
                const Kept kept = round_row<false>(v);
                store_row<false>(cache, job - GROUP, cache.head(newest_page, kv), position % PAGE, kept, lane);
                const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&kept.half.x)), y = __half22float2(*reinterpret_cast<const __half2*>(&kept.half.y));
                v = make_float4(x.x, x.y, y.x, y.y);
            }
            reinterpret_cast<float4*>(queries)[job * 32 + lane] = v;
        }
        sync_attending();
        float top[GROUP], weight[GROUP], out[GROUP];   // weight: this lane's
#pragma unroll
        for (int h = 0; h < GROUP; h++) top[h] = -INFINITY, weight[h] = out[h] = 0.f;
#pragma unroll 1
        for (int base = start; base < end; base += POSITIONS) {
            float dots[KEYS * PADDED];
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&keys[i].x)), b = __half22float2(*reinterpret_cast<const __half2*>(&keys[i].y));
                float4 key = make_float4(a.x, a.y, b.x, b.y);
                if (base + warp + i * ATTEND_WARPS == position) key = reinterpret_cast<const float4*>(queries)[GROUP * 32 + lane];
#pragma unroll
                for (int h = 0; h < PADDED; h++) {
                    float dot = 0.f;
                    if (h < GROUP) {
                        const float4 q = reinterpret_cast<const float4*>(queries)[h * 32 + lane];
                        dot = q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w;
                    }
                    dots[i * PADDED + h] = dot;
                }
            }
            const float dot = sum_each(dots, lane);
            constexpr int EACH = 32 / (KEYS * PADDED);   // lanes that have the same
            const int which = lane / EACH, h = which % PADDED;
            if (lane % EACH == 0 && h < GROUP) scores[h * POSITIONS + warp + which / PADDED * ATTEND_WARPS] = dot;
            sync_attending();
            uint4 now[EIGHTS];
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) now[i] = values[i];
            if (base + POSITIONS < end) fetch(base + POSITIONS);
            float chance[GROUP];
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                const float score = base + lane < end ? scores[h * POSITIONS + lane] : -INFINITY;
                const float peak = fmaxf(top[h], warp_max(score)), shrink = exp2f(top[h] - peak);
                chance[h] = exp2f(score - peak);
                weight[h] = fmaf(weight[h], shrink, chance[h]);
                out[h] *= shrink;
                top[h] = peak;
            }
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                const int from = 8 * (warp / 4 + i * (ATTEND_WARPS / 4));
                const __half2* const pairs = reinterpret_cast<const __half2*>(now + i);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 v = __half22float2(pairs[j]);
                    const int at = from + 2 * j;
                    if (base + at == position) v.x = queries[(GROUP + 1) * HEAD_DIM + dim];
                    if (base + at + 1 == position) v.y = queries[(GROUP + 1) * HEAD_DIM + dim];
#pragma unroll
                    for (int h = 0; h < GROUP; h++) {
                        out[h] = fmaf(__shfl_sync(~0u, chance[h], at), v.x, out[h]);
                        out[h] = fmaf(__shfl_sync(~0u, chance[h], at + 1), v.y, out[h]);
                    }
                }
            }
            if (base + POSITIONS < end) sync_attending();   // the scores are read
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) scratch[(warp / 4 * GROUP + h) * HEAD_DIM + dim] = out[h];
        sync_attending();
        const int width = p.heads * HEAD_DIM;
        uint64_t* const to = p.attended + source * (width + 2 * p.heads);
        for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += ATTEND_WARPS * 32) {
            float v = 0.f;
#pragma unroll
            for (int k = 0; k < ATTEND_WARPS / 4; k++) v += scratch[k * GROUP * HEAD_DIM + i];
            store_stamped(to + kv * GROUP * HEAD_DIM + i, v, stamp + 1);
        }
        if (warp == ATTEND_WARPS - 1) {
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                const float all = warp_sum(weight[h]);
                if (lane < 2) store_stamped(to + width + (kv * GROUP + h) * 2 + lane, lane == 0 ? top[h] : all, stamp + 1);
            }
        }
        sync_attending();   // the scratch memory is read
        lap(1, 1);
    }

    DEVICE void run() {
        prepare();
        const bool attends = attention().source < attention().sources;
        lap(0, 0, true);
#pragma unroll 1
        for (int l = 0; l < p.layers; l++) {
#pragma unroll 1
            for (int which = QKV; which <= DOWN; which++) {
                gather(l, which);
                if (which == OUT) request_gain(p.layer[l].gains[1]);
                if (which == DOWN && l + 1 < p.layers) request_gain(p.layer[l + 1].gains[0]);
                multiply(l, which);
                if (which == QKV && attends) {
                    // Attention takes the memory of the sums, which the other warps may still read. They do
                    // not write there before it has ended: the digits that they wait for come in part from
                    // warps that attend.
                    if (share(QKV).tiles > ATTEND_WARPS) sync();
                    if (warp < ATTEND_WARPS) attend(l);
                }
            }
        }
        if (blockIdx.x < CLUSTER) gather(p.layers, END);
        if (TIMED && blockIdx.x == 0 && threadIdx.x == 0)
            for (int i = 0; i < 2 * PHASES; i++) p.times[i] = reinterpret_cast<const uint64_t*>(shared + TIMES)[i];
    }
};

template <int GROUP, int ZERO, bool TIMED>
DEVICE void step_layers(const LayersArgs& p) {
    using Block = LayersBlock<GROUP, ZERO, TIMED>;
    uint8_t* const shared = dynamic_shared();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t barriers = shared_address(shared);
    if (threadIdx.x < 2) init_barrier(barriers + threadIdx.x * 8, 1);
    if (warp == Block::WARPS && lane < p.depth) {
        init_barrier(barriers + Block::FULL + lane * 8, 1);
        init_barrier(barriers + Block::EMPTY + lane * 8, TEAM);
    }
    barrier_fence();
    __syncwarp();
    cluster_arrive();
    if (warp == Block::WARPS) {
        Block::request_weights(p, shared, lane);
        cluster_wait();
        return;
    }
    cluster_wait();   // all barriers of the cluster are there
    wait_for_predecessor();
    release_successor();   // no kernel of this step overtakes one of the step before
    Block block(p, shared, warp, lane, __ldcg(p.epoch));
    block.run();
    // Block 0 has the last x: all blocks have read the epoch.
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.epoch += 1;
}
#endif
