// One row of activations times a packed weight: the kernels of a decode step.
//
//   y[r] = sum_k w[r][k] * x[k]      (x / rms(x) * gain where x is to be normalized)
//
// A warp computes 16 rows on tensor cores with the weights as the left operand: codes as they
// are, as unsigned bytes, in integers; FP16 weights in FP16. The right operand has eight columns
// for one row of x, so each pair of columns takes one of the four slots of a span: column 2j
// holds the high parts of slot j and column 2j+1 the low parts (`activations.cuh`), both zero
// outside slot j. Lane (g, t) so ends with the sums of slot t of rows g and g + 8 alone: it needs
// one scale and one zero-point of each. Four-bit codes are multiplied where they stand, in pairs.
//
// Epilogues:
//   STORE  out[r] = y, of normalized x
//   ADD    out[r] += y, of plain x
//   SILU   tile i holds 8 rows of gate and 8 of up: out[.] = silu(gate) * up, of normalized x
//   HEAD   as STORE, and the greatest of each block
//
// A block has consecutive tiles. Their records are dealt evenly to its warps, in order, so that a
// warp has spans of one tile or of several. It leaves the sums of each tile in shared memory, where
// they are added in the order of the warps once all have ended.
//
// Weights are requested before the end of the predecessor is awaited, through a ring of `depth`
// stages in shared memory, private to a warp. A stage is filled again once the next has come (of a
// ring of one, once it has been multiplied): filled right after it was read, nothing would order the
// copy behind the reads. Two blocks fit on an SM: while one streams, the next kernel's fills its rings.
//
// Bytes: codes + scales + zeros once; x once per block (from L2).
#pragma once

#include "products.cuh"
#include "ring.cuh"

struct GemvArgs {
    const uint8_t* codes;  // records [tiles][spans]
    const uint8_t* meta;   // records [tiles][spans]
    const float* x;        // [inputs]
    const float* gain;     // of RMSNorm, [inputs]; unused by ADD
    float* out;            // [rows]; SILU: [rows / 2]
    float2* best;          // HEAD: [gridDim], the greatest logit and its row (as bits)
    int inputs;            // a multiple of 8
    int rows;
    int tiles;
    int spans;
    int groups;            // scale groups of a span
    int meta_bytes;        // of a record
    int depth;             // of the ring, at most MOST_DEPTH
    float eps;
    float scale;           // of the product
    int late;              // release the successor only after the predecessor's end
};

template <int BITS>
using PreparedRow = std::conditional_t<BITS == 16, Halves, Digits>;

// How the records of a scheme pass through a ring.
template <class S>
struct Passage {
    static constexpr int PARTS = S::BITS == 16 ? 4 : 1;                   // stages of a record
    static constexpr int RECORDS = S::BITS < 8 && S::SLOT == 64 ? 2 : 1;  // of a stage, at most
    static constexpr int CODES = SPAN * 2 * S::BITS;                      // bytes of a record's
    using WeightRing = Ring<CODES * RECORDS / PARTS, S::META * RECORDS, 1>;
};

// Where the records of a product lie: those of a packed weight, one behind the other.
struct Plain {
    static constexpr bool RUNS = false;   // the records of a tile lie in several runs
    const int spans;

    DEVICE explicit Plain(const GemvArgs& p) : spans(p.spans) {}
    // Records of a run.
    DEVICE int run() const { return spans; }
    DEVICE size_t record(int tile, int span) const { return size_t(tile * spans + span); }
    // What the outputs of a tile are multiplied by.
    DEVICE float weight(int) const { return 1.f; }
};

// Which tiles a block has, and which of their stages a warp. The records of a stage are of one run.
template <int WARPS, int RECORDS>
struct Deal {
    int tile, tiles;         // the first one, and how many
    int of_run, of_tile;     // stages of a run and of a tile
    int stages;

    DEVICE Deal(const GemvArgs& p, int run, bool runs) : tile(blockIdx.x * p.tiles / gridDim.x), of_run((run + RECORDS - 1) / RECORDS) {
        tiles = (blockIdx.x + 1) * p.tiles / gridDim.x - tile;
        of_tile = runs ? p.spans / run * of_run : of_run;
        stages = tiles * of_tile;
    }
    // The first stage of a warp, counted from the block's.
    DEVICE int begin(int warp) const { return stages <= WARPS ? min(warp, stages) : warp * stages / WARPS; }
    // The warp that has a stage. Those between the first and the last of a tile have others of it.
    DEVICE int owner(int stage) const { return stages <= WARPS ? stage : ((stage + 1) * WARPS - 1) / stages; }
};

// A warp's way through its stages: where it stands, and how many are left.
template <int RECORDS, bool RUNS>
struct Walk {
    int tile, span;   // `tile` is counted from the block's first
    int at;           // in the run
    int left;

    template <int WARPS>
    DEVICE Walk(const Deal<WARPS, RECORDS>& deal, int run, int warp) {
        const int begin = deal.begin(warp), in_tile = begin % deal.of_tile, in_run = RUNS ? in_tile % deal.of_run : in_tile;
        tile = begin / deal.of_tile, at = in_run * RECORDS, span = RUNS ? in_tile / deal.of_run * run + at : at;
        left = deal.begin(warp + 1) - begin;
    }
    // Records of the next stage.
    DEVICE int records(int run) const { return RECORDS == 1 ? 1 : min(RECORDS, run - (RUNS ? at : span)); }
    // True at the end of a tile.
    DEVICE bool step(int run, int spans) {
        const int n = RUNS ? records(run) : RECORDS;
        left--, span += n;
        if (RUNS && (at += n) == run) at = 0;
        if (span < spans) return false;
        span = 0, tile++;
        return true;
    }
};

// A block's share of a product. `source` tells where its records lie; `wait` returns when x can be read.
template <class S, int EPI, int WARPS, class Source, class Wait>
DEVICE void multiply(const GemvArgs& p, const Source& source, Wait&& wait) {
    constexpr int BITS = S::BITS, ZERO = S::ZERO, SLOT = S::SLOT;
    constexpr bool NORM = EPI != ADD;
    using Pass = Passage<S>;
    using WeightRing = typename Pass::WeightRing;
    using Row = PreparedRow<BITS>;
    constexpr int N = Pass::RECORDS, PARTS = Pass::PARTS;

    extern __shared__ __align__(128) uint4 shared[];
    __shared__ uint64_t barriers[WARPS][MOST_DEPTH];
    __shared__ float squares[WARPS];
    __shared__ float2 tops[EPI == HEAD ? WARPS : 1];
    // Known to be the same for the whole warp: addresses that follow from it cost less.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    Row* const row = reinterpret_cast<Row*>(shared + WARPS * p.depth * WeightRing::STAGE_WORDS);
    float* const sums = reinterpret_cast<float*>(row + p.spans);   // [tiles + WARPS][16]

    const int run = source.run();
    const Deal<WARPS, N> deal(p, run, Source::RUNS);
    Walk<N, Source::RUNS> at(deal, run, warp), ahead = at;
    int ahead_part = 0;
    WeightRing ring(shared + warp * p.depth * WeightRing::STAGE_WORDS, barriers[warp], p.depth);
    auto request = [&] {
        const int n = ahead.records(run);
        const bool any = ahead.left > 0;
        const size_t record = any || !Source::RUNS ? source.record(deal.tile + ahead.tile, ahead.span) : 0;
        ring.request(p.codes + record * Pass::CODES + ahead_part * (Pass::CODES / PARTS), n * (Pass::CODES / PARTS),
                     p.meta + record * p.meta_bytes, BITS == 16 ? 0 : n * p.meta_bytes, any);
        if (PARTS == 1 || ++ahead_part == PARTS) ahead.step(run, p.spans), ahead_part = 0;
    };
#pragma unroll 1
    for (int i = 0; i < p.depth; i++) request();

    // x to shared memory.
    constexpr int BATCH = NORM ? 2 : 4;   // spans at a time
    float4 gain[BATCH][2];
    auto request_gain = [&](int at) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int k = (at + i * WARPS) * SPAN + 8 * lane;
            if (NORM && at + i * WARPS < p.spans && k < p.inputs) {
                gain[i][0] = __ldg(reinterpret_cast<const float4*>(p.gain + k));
                gain[i][1] = __ldg(reinterpret_cast<const float4*>(p.gain + k) + 1);
            }
        }
    };
    request_gain(warp);
    // What the thread's first output is made of.
    const int outputs = deal.tiles * 16, mine = threadIdx.x / 16 * deal.of_tile;
    const int owner = threadIdx.x < outputs ? deal.owner(mine) : 0;
    const int last_owner = threadIdx.x < outputs ? deal.owner(mine + deal.of_tile - 1) : -1;

    wait();

    float residual = 0.f;
    if (EPI == ADD && threadIdx.x < outputs && deal.tile * 16 + threadIdx.x < p.rows) residual = __ldcg(p.out + deal.tile * 16 + threadIdx.x);
    float square = 0.f;
#pragma unroll 1
    for (int at = warp; at < p.spans; at += WARPS * BATCH) {
        float4 from[BATCH][2];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int k = (at + i * WARPS) * SPAN + 8 * lane;
            const bool there = at + i * WARPS < p.spans && k < p.inputs;
            from[i][0] = there ? __ldcg(reinterpret_cast<const float4*>(p.x + k)) : make_float4(0.f, 0.f, 0.f, 0.f);
            from[i][1] = there ? __ldcg(reinterpret_cast<const float4*>(p.x + k) + 1) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (at + i * WARPS >= p.spans) break;
            float v[8] = {from[i][0].x, from[i][0].y, from[i][0].z, from[i][0].w,
                          from[i][1].x, from[i][1].y, from[i][1].z, from[i][1].w};
            if constexpr (NORM) {
#pragma unroll
                for (int j = 0; j < 8; j++) square = fmaf(v[j], v[j], square);
                const bool there = (at + i * WARPS) * SPAN + 8 * lane < p.inputs;
                const float f[8] = {gain[i][0].x, gain[i][0].y, gain[i][0].z, gain[i][0].w,
                                    gain[i][1].x, gain[i][1].y, gain[i][1].z, gain[i][1].w};
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = there ? v[j] * f[j] : 0.f;
            }
            prepare<S::ORDER, S::PAIRED>(row[at + i * WARPS], v, lane);
        }
        request_gain(at + WARPS * BATCH);
    }
    if constexpr (NORM) {
        square = warp_sum(square);
        if (lane == 0) squares[warp] = square;
    }
    __syncthreads();

    const uint32_t row_at = keep(shared_address(row));
    uint32_t here = row_at + at.span * uint32_t(sizeof(Row));   // x of the next record
    float y[2] = {};                                            // rows g, g + 8 of the current tile
    bool again = false;                                         // the stage before this one may be filled again
    auto refill = [&] {
        if (again) request();
        again = p.depth > 1;
    };
    auto read = [&] {
        const uint32_t from = ring.wait_at();
        __syncwarp();
        return from;
    };
    // Of a ring of one.
    auto fill_at_once = [&] {
        if (p.depth == 1) {
            __syncwarp();
            request();
        }
    };
    // Leaves the sums of a tile, or of the part of it that the warp has.
    auto finish = [&](int tile) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            y[j] += __shfl_xor_sync(~0u, y[j], 1);
            y[j] += __shfl_xor_sync(~0u, y[j], 2);
            if (t == 0) sums[(tile + warp) * 16 + j * 8 + g] = y[j];
            y[j] = 0.f;
        }
    };

    if constexpr (BITS == 16) {
        uint4 x[PARTS][2] = {};   // zero where the lane's slot is another part
        float halves[2][4] = {};  // sums of first and second products
#pragma unroll 1
        while (at.left > 0) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const uint32_t from = read() + lane * 16;
                const uint32_t b = here + ((g & 1) * 4 + t) * 16;
                uint4 codes[4];
#pragma unroll
                for (int j = 0; j < 4; j++) codes[j] = load_shared_16(from + j * 512);
#pragma unroll
                for (int c = 0; c < 2; c++) load_shared_16_if(x[part][c], g / 2, part, b + (2 * part + c) * 128);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint4 v = codes[2 * c], w = codes[2 * c + 1], k = x[part][c];
                    mma_16816(halves[0], v.x, v.y, v.z, v.w, k.x, k.y);
                    mma_16816(halves[1], w.x, w.y, w.z, w.w, k.z, k.w);
                }
                refill();
                fill_at_once();
            }
            const int tile = at.tile;
            here += sizeof(Row);
            if (at.step(run, p.spans) || at.left == 0) {
#pragma unroll
                for (int j = 0; j < 2; j++) y[j] = halves[0][2 * j] + halves[0][2 * j + 1] + (halves[1][2 * j] + halves[1][2 * j + 1]);
#pragma unroll
                for (int j = 0; j < 4; j++) halves[0][j] = halves[1][j] = 0.f;
                finish(tile);
                here = row_at;
            }
        }
    } else {
        Products<S, N, Digits> products(p.groups, p.meta_bytes, lane);
#pragma unroll 1
        while (at.left > 0) {
            const int tile = at.tile, n = at.records(run);
            const uint32_t from = read();
            products.add(y, from, from + N * Pass::CODES, here, n, refill);
            fill_at_once();
            here += (Source::RUNS ? n : N) * uint32_t(sizeof(Digits));
            if (at.step(run, p.spans) || at.left == 0) {
                finish(tile);
                here = row_at;
            }
        }
    }
    __syncthreads();

    float factor = BITS == 16 ? p.scale / HALVES_SCALE : p.scale;
    if constexpr (NORM) {
        float all = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) all += squares[i];
        factor *= rsqrtf(all / p.inputs + p.eps);
    }
    float best = -INFINITY;
    int best_row = 0;
#pragma unroll 1
    for (int base = 0; base < outputs; base += WARPS * 32) {
        const int i = base + threadIdx.x, r = deal.tile * 16 + i;
        const bool there = i < outputs && r < p.rows;
        int from = owner, last = last_owner;
        if (base > 0 && there) from = deal.owner(i / 16 * deal.of_tile), last = deal.owner((i / 16 + 1) * deal.of_tile - 1);
        float v = 0.f;
        if (there)
            for (int w = from; w <= last; w++) v += sums[(i / 16 + w) * 16 + i % 16];
        v *= factor;
        if constexpr (EPI == SILU) {
            const float up = __shfl_down_sync(~0u, v, 8);
            if (there && i % 16 < 8) p.out[r / 16 * 8 + i % 16] = __fdividef(v, 1.f + __expf(-v)) * up * source.weight(r / 16);
        } else if (there) {
            if (EPI == ADD) v += base == 0 ? residual : __ldcg(p.out + r);
            p.out[r] = v;
            if (EPI == HEAD && v > best) best = v, best_row = r;
        }
    }

    if constexpr (EPI == HEAD) {
        // Lowest row among equals: every comparison prefers the smaller index.
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) {
            const float o = __shfl_xor_sync(~0u, best, m);
            const int r = __shfl_xor_sync(~0u, best_row, m);
            if (o > best || (o == best && r < best_row)) best = o, best_row = r;
        }
        if (lane == 0) tops[warp] = make_float2(best, __int_as_float(best_row));
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < WARPS; i++) {
                const float o = tops[i].x;
                const int r = __float_as_int(tops[i].y);
                if (o > best || (o == best && r < best_row)) best = o, best_row = r;
            }
            p.best[blockIdx.x] = make_float2(best, __int_as_float(best_row));
        }
    }
}

// A whole product: the kernels of `gemv.cu`.
template <class S, int EPI, int WARPS>
DEVICE void gemv(const GemvArgs& p) {
    if (!p.late) release_successor();
    multiply<S, EPI, WARPS>(p, Plain(p), [&] {
        wait_for_predecessor();
        if (p.late) release_successor();
    });
}
