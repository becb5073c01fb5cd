// What the kernel of all layers (`step_layers.cuh`) is called with, and the ring in shared memory through
// which what it reads once flows: weights, and keys and values of earlier positions.
#pragma once

#include "delta_state.cuh"
#include "places.cuh"

constexpr int LAYERS_WARPS = 12;    // that multiply

#include "layers_cluster.cuh"

constexpr int TEAM = 4;             // warps that share a stage of weights
constexpr int TEAMS = LAYERS_WARPS / TEAM;
constexpr int MOST_GROUP = 8;       // query heads of a key head
constexpr int MOST_SOURCES = 16;    // blocks among which the pages of a head are dealt
constexpr int MOST_PAGES = 32;      // of a source
constexpr int MOST_PARTS = 4;       // of a tile of x
constexpr int MOST_RING = 32;       // stages
constexpr int MOST_LAYERS = 64;
constexpr int MOST_ROUTE = 16;      // experts that a row goes through
constexpr int PHASES = 5;           // of a layer, that leave stamped values
constexpr int STAMPS = 512;         // of a step
constexpr int MOST_RANKS = 8;       // GPUs that each have a part of every layer

// INPUTS_OF_DELTA: what a layer with a recurrence has in place of QKV. END: behind the last layer.
enum LayerProduct { QKV = 0, OUT = 1, GATED = 2, DOWN = 3, INPUTS_OF_DELTA = 4, END = 5 };
constexpr int PRODUCTS = 5;   // of different shapes

// The records of a weight.
struct RecordKind {
    uint8_t scheme;        // of a mix, in the order of `LayersBlock::multiply`; of trellis codes, of `with_code`
    uint8_t groups;        // scale groups of a span
    uint16_t meta_bytes;
    uint32_t codes_bytes;
};

struct LayerAttention {
    HeadVectors vectors;
    void* keys;                // as of `Cache`
    void* values;
    __half* key_scales;        // null: keys and values are FP16
    __half* value_scales;
};

struct LayerRecurrence {
    DeltaLayer delta;
    const __half* rates;       // [2 value_heads][hidden]
    const float* kept;         // as of `delta_step.cu`; null: no rows are kept
    float scale;               // of the products with `rates`
};

struct LayerArgs {
    const uint8_t* codes[4];   // records [tiles][spans] of each product
    const uint8_t* meta[4];    // of trellis codes: __half [rows], [inputs], their scales
    const float* gains[2];     // [hidden], of the norms before qkv and before gate and up
    RecordKind kind[4];        // of each product
    int recurrent;             // the layer has a recurrence in place of attention
    float router_scale;        // of a mixture: of the products with `router`
    const __half* router;      // [experts][hidden]
    ExpertPlaces places;       // of a mixture
    union {
        LayerAttention attention;
        LayerRecurrence recurrence;
    };
};

// Of trellis codes: strips, and their tiles.
struct ProductShape {
    int tiles;
    int spans;
};

// Where things lie in shared memory, in bytes.
struct LayersRoom {
    int digits[2];   // SpanDigits [spans], or `BlockDigits`, of qkv or gate and up; of o or down. Without clusters both are one
    int x;           // float [inputs of x that the block gathers]
    int sums;        // float [2][LAYERS_WARPS tiles][LAYERS_WARPS][16]; or `AttentionRoom`
    int queries;     // uint4 [group][DIM / 4], left operands; then the new key and value in FP16; or `DeltaRoom`
    int ring;        // [depth] stages
};

struct LayersArgs {
    float* x;                // [hidden]
    uint64_t* qkv;           // [HeadsOf<DIM>::width][DIM]; or `DeltaLayer::stride` values
    uint64_t* attended;      // [MOST_SOURCES][heads * DIM and heads * 2]: sums of values; greatest scores, weights. Or what
                             // the recurrence gives: [value_heads][128]
    uint64_t* gated;         // [intermediate], or [chosen][intermediate of an expert]. Of trellis codes this and `qkv` have parts,
                             // [MOST_STRIP_PARTS][rows], here in strips of gate and of up in turn
    uint64_t* scores;        // [experts]
    uint64_t* parts[2];      // [ranks * MOST_PARTS][hidden], of o and of down: those of a tile one after the other, of rank 0 first. Of
                             // trellis codes [MOST_STRIP_PARTS][hidden]
    uint64_t* digits[2];     // without clusters: the words of inputs, SpanDigits [spans] or `BlockDigits`; of qkv or gate and up; of o or down
    uint32_t* epoch;         // of the step, from 1 on
    const float2* cos_sin;   // [positions][HeadsOf<DIM>::ROTARY_DIMS / 2]
    const uint32_t* tables;  // as of `Cache`
    const Step* step;
    uint64_t* peers[MOST_RANKS];   // `parts` of each rank, those of o and behind them those of down; none of one alone
    uint32_t* lost;          // for the host: becomes 1 when this rank has waited too long for another
    uint64_t* times;         // TIMED: [PHASES][2]: nanoseconds that block 0 waited for the inputs of qkv, attention, o,
                             // gate and up, and down, and worked on them
    LayersRoom at;
    ProductShape shape[PRODUCTS];
    int rank;                // which part of the layers this GPU has
    int ranks;               // at most MOST_RANKS
    int table_len;
    int layers;
    int hidden;              // a multiple of 256, as the inputs of all products
    int heads;
    int kv_heads;
    int group;               // heads / kv_heads, at most MOST_GROUP
    int key_heads;           // of recurrences, if there are any
    int value_heads;
    int tiled;               // as of `DeltaLayer`
    int experts;             // of mixtures, with the shared one behind the others; 0: layers have MLPs
    int chosen;              // experts that a row goes through, at most MOST_ROUTE
    int shared_expert;       // 1 if all rows go through the last one
    int normalized;          // weights are divided by their sum
    int up_tiles;            // of gate and up of an expert
    int down_spans;          // of down of an expert
    int stage;               // bytes of a stage of the ring
    int depth;               // stages of the ring, at most MOST_RING. A warp waits for a stage at most DIM / 32 behind one that it saw (attention): at least
                             // these, besides `window` where bulk copies fill the ring
    int window;              // stages requested and not there yet, at most
    float eps;
    LayerArgs layer[MOST_LAYERS];
};

// How long a rank waits for another.
struct Patience {
    static constexpr uint32_t LOOKS = 256;   // between two at the clock
    static constexpr uint32_t LIMIT = 19;    // in 2^30 nanoseconds
    uint32_t looks = 0, begin = 0;

    // To be asked after each look in vain. True if there is no more waiting: it took too long, here or, as `lost` tells, somewhere
    // else on this GPU.
    DEVICE bool ends(volatile uint32_t* lost) {
        if (++looks % LOOKS > 0) return false;
        const uint32_t now = nanoseconds() >> 30;
        if (looks == LOOKS) begin = now;
        if (now - begin > LIMIT) *lost = 1;
        return *lost != 0;
    }
};

// a / b of small numbers.
DEVICE int quotient(int a, int b) { return int(__fdividef(float(a) + 0.5f, float(b))); }

DEVICE float quick_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
DEVICE float quick_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

DEVICE float warp_max(float v) {
    const int i = __float_as_int(v), most = __reduce_max_sync(~0u, i ^ (i >> 31 & 0x7fffffff));
    return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

DEVICE void sync_layers() { sync_some(1, LAYERS_WARPS * 32); }

// A place in the ring.
struct RingPlace {
    int slot;
    uint32_t parity;
    // n: at most `depth`
    DEVICE void step(int n, int depth) {
        slot += n;
        if (slot >= depth) slot -= depth, parity ^= 1;
    }
    DEVICE void skip(int n, int depth) {
        slot += n;
        while (slot >= depth) slot -= depth, parity ^= 1;
    }
};

// The ring: addresses in shared memory of its stages and their barriers. A stage is empty when it has been
// let go of TEAM times.
struct Ring {
    uint32_t full, empty;   // barriers
    uint32_t stages;
    uint32_t stage;         // bytes of one
    int depth;

    DEVICE uint32_t at(const RingPlace& place) const { return stages + place.slot * stage; }
    // Waits for what was requested, with the whole warp.
    //
    // A barrier tells only even from odd uses of its stage. No more than `window` stages are on their way, so a
    // warp that has seen stage n, or met one that has, knows that those up to n - window are there, and can
    // wait for those up to n - window + depth. Copies of 16 bytes end in order, which makes that n + depth.
    DEVICE void wait(const RingPlace& place) const {
        barrier_wait_at(full + place.slot * 8, place.parity);
        __syncwarp();
    }
    // Lets go of a stage `times` times, when all lanes have read.
    DEVICE void leave(const RingPlace& place, int times, int lane) const {
        __syncwarp();
        if (lane == 0) arrive_times(empty + place.slot * 8, times);
    }
};

// Requests stages one after the other, by one warp.
struct Requests {
    const Ring ring;
    const int window;
    RingPlace place = {0, 1}, behind = {0, 0};
    int n = 0;

    // Waits until the next stage is empty, and no more than `window` stages are on their way.
    DEVICE void wait() {
        if (n >= ring.depth) barrier_wait_at(ring.empty + place.slot * 8, place.parity);
        if (n >= window) {
            barrier_wait_at(ring.full + behind.slot * 8, behind.parity);
            behind.step(1, ring.depth);
        }
    }
    // Requests the next stage, of so many bytes: `make` is called with its address.
    template <class Make>
    DEVICE void fill(uint32_t bytes, Make&& make) {
        wait();
        Copies::request(barrier(), bytes, [&](const Copies& copies) { make(at(), copies); });
        next();
    }
    // Of the next stage.
    DEVICE uint32_t at() const { return ring.at(place); }
    DEVICE uint32_t barrier() const { return ring.full + place.slot * 8; }
    DEVICE void next() {
        n++;
        place.step(1, ring.depth);
    }
};
