// Attention of the new tokens of a step: per-head RMSNorm of q and k, rotary embedding, append to
// the cache, softmax over the positions so far, split over blocks.
//
//   out[h] = softmax(rope(norm(q[h])) . K[h / G] / sqrt(DIM)) V[h / G],  G = heads / kv_heads <= 8
//
// Keys and values lie in pages (`Cache`): a pass of a block covers one page, or half of one of wide heads, for which
// it has half of the warps.
//
// Grid (kv_heads, splits of the longest context, rows). A row is one token. With ROWS > 1 rows that
// follow one another may be a run: consecutive positions of one sequence, up to ROWS of them. What
// the rows of a run append, the cache has only after the kernel: a block computes the new keys and
// values up to its own row itself, and stores those of its own row. Of wide heads, of which a block has half of the
// warps, that would take longer than the rest: `append` has appended a run's keys and values before this kernel.
//
// A block serves the G query heads of
// one key/value head over its split of the positions, 128 (of wide heads 64) at a time: warp w computes the scores of
// 32 of them, then, once the weights of all are in shared memory, its share of the dims of the output
// over all of them. Of int8 there is room for two passes: one is fetched while the other is read.
// Both products run on tensor cores: scores[head, position] with q as the left operand,
// out[head, dim] with the softmax weights. Rows 0..7 of the left operand hold a head's values
// rounded to FP16 and rows 8..15 what that rounding lost, so q and the weights keep about 22
// bits. Keys and values of earlier positions are requested before the predecessor, which
// computes the new token's q, k and v, has ended. Where positions are split the last block of
// a head (counted in `arrived`) joins the partial results, in the order of the splits: a warp
// weighs the parts of a query head, then each thread sums four dims of one, over all parts.
// With SHARED, pages in front are left to `attention_shared.cu`, which ran before: its partial
// results are joined too.
//
// Bytes: 4 DIM (int8: 2 DIM + 4) per position and key/value head.
#pragma once

#include "columns.cuh"
#include "rows.cuh"

struct AttentionArgs {
    const float* qkv;       // [m][HeadsOf<DIM>::width][DIM]
    HeadVectors vectors;
    const float2* cos_sin;  // [positions][HeadsOf<DIM>::ROTARY_DIMS / 2]
    Cache cache;            // of this layer
    const Step* step;       // [m]: position of the new token, and its slot
    float* out;             // [m][heads][DIM]
    __half* half;           // unless null, instead: [m][padded] in FP16, in operand order
    uint8_t* columns;       // unless null, instead: DigitColumns [m / column_rows, rounded up][heads * DIM / 64]
    float4* partial;        // [m][heads][parts][DIM / 4]: sums
    float2* tops;           // [m][heads][parts]: greatest score, weight
    int* arrived;           // [m][kv_heads], zero between launches
    const int* shared;      // [m], with SHARED: pages in front that `attention_shared` reads
    int parts;              // this kernel's, then those of `attention_shared`
    int shared_splits;      // of the latter, at most
    int heads;
    int padded;
    int column_rows;        // of a group of columns: 8 or 4
    int nibbles;            // columns meet codes in the order of those of 4 bits
    float eps;
    int holds_dependents;   // dependents are launched only after the end of the prerequisites
    int appended;           // of wide heads: rows may be runs, whose keys and values the kernel in front appends
};

constexpr int WARP_POSITIONS = 32;
// Positions beyond which a context is split, as joining the parts costs more than some passes; and of a
// part, at least.
constexpr int LEAST_SPLIT = 256;
constexpr int LEAST_PART = PAGE;
// Parts of a context, at most.
constexpr int MOST_SPLITS = 64;
// Query heads of a key/value head, at most.
constexpr int MOST_HEADS = 8;
// Rows of one sequence, at most.
constexpr int MOST_RUN = 16;
// Pages that each of `splits` parts of `pages` has, the last of them fewer.
DEVICE int shared_each(int pages, int splits) { return (pages + splits - 1) / splits; }

// How a block splits its work.
template <int DIM>
struct AttentionBlock {
    static constexpr int WARPS = 4 * 128 / DIM;
    static constexpr int POSITIONS = WARPS * WARP_POSITIONS;   // that a pass covers
    static constexpr int TILES = DIM / 8 / WARPS;              // 8-dim tiles of a warp's part of the output
    static_assert(PAGE % POSITIONS == 0, "a pass is in one page");
};

template <bool INT8, int WARPS>
struct ScalesShared {};
template <int WARPS>
struct ScalesShared<true, WARPS> {
    uint4 scales[2][WARPS][2][4];   // of each buffer, of a warp's keys and values
};

// Queries, new keys and values of a run as they come: together, if there is room for them, or one by one.
template <int ROWS, int DIM>
constexpr bool TOGETHER = ROWS > 1 && DIM == 128 && !SMALL_BLOCKS;
template <int ROWS, bool>
struct JobsShared {};
template <int ROWS>
struct JobsShared<ROWS, true> {
    Head<128> jobs[8 + 2 * ROWS][32];
};

template <bool INT8, int ROWS, int DIM>
struct AttentionShared : ScalesShared<INT8, AttentionBlock<DIM>::WARPS>, JobsShared<ROWS, TOGETHER<ROWS, DIM>> {
    static constexpr int WARPS = AttentionBlock<DIM>::WARPS, TILES = AttentionBlock<DIM>::TILES;
    static constexpr int BUFFERS = INT8 ? 2 : 1;
    static constexpr int EACH = INT8 ? 16 : 8;                              // elements that a lane loads at once
    static constexpr int KEY_LOADS = DIM / (4 * EACH);                      // of four lanes for a vector
    static constexpr int VALUE_LOADS = AttentionBlock<DIM>::POSITIONS / (4 * EACH);   // for a dim of a pass's positions
    // Private to lanes: of each 8 positions of a warp, and of each 8 of its dims.
    uint4 keys[BUFFERS][WARPS][4][KEY_LOADS][32];
    uint4 values[BUFFERS][WARPS][VALUE_LOADS][TILES][32];
    uint4 weights[WARPS][2][32];       // left operands: high and low parts
    uint4 q[2][8][DIM / 8];            // high and low parts, [head][DIM] FP16
    uint4 fresh[2][ROWS][DIM / EACH];  // new keys and values: codes or FP16
    __half fresh_scale[2][ROWS];
    float top[WARPS][8];
    float sum[WARPS][8];
    float share[MOST_HEADS][MOST_SPLITS];       // of the parts in a head's result
    bool last;
};
// What the launcher asks for.
template <bool INT8, int ROWS, int DIM, int BYTES>
constexpr bool TAKES = sizeof(AttentionShared<INT8, ROWS, DIM>) == BYTES;
static_assert(TAKES<false, 1, 128, 76560> && TAKES<true, 1, 128, 77328>);
constexpr int JOBS = SMALL_BLOCKS ? 0 : 20480;
static_assert(TAKES<false, MOST_RUN, 128, 84304 + JOBS> && TAKES<true, MOST_RUN, 128, 81232 + JOBS>);
static_assert(TAKES<false, 1, 256, 78992> && TAKES<true, 1, 256, 78992>);

// What turns and scales the heads of a step's queries and keys: no kernel of this step writes it.
template <int DIM>
struct HeadTurns {
    const float4* angles;   // of the row's turn, its row of the rotary table; those of the positions in front lie in front
    Turn<DIM> turn;
    HeadGain<DIM> q_gain, k_gain;

    DEVICE HeadTurns(const AttentionArgs& p, int row, int lane)
        : angles(Turn<DIM>::of(p.cos_sin + size_t(row) * (HeadsOf<DIM>::ROTARY_DIMS / 2), lane)),
          turn(angles), q_gain(p.vectors.gains[0], lane), k_gain(p.vectors.gains[1], lane) {}
};

// A block's part of a row's attention, in the order in which it runs: `request` of the first pass, `take_heads`, a `pass`
// for every 128 (64) positions, then `store_all`, or `leave_part` and, in the last block of a head, `join`.
template <bool INT8, int ROWS, bool SHARED, int DIM>
struct SplitAttention {
    using Of = HeadsOf<DIM>;
    using Shared = AttentionShared<INT8, ROWS, DIM>;
    static constexpr int BYTES = INT8 ? 1 : 2;
    static constexpr int WARPS = Shared::WARPS, DIM_TILES = Shared::TILES, POSITIONS = AttentionBlock<DIM>::POSITIONS;
    static constexpr int EACH = Shared::EACH, EIGHTS = EACH / 8, LOADS = Shared::KEY_LOADS, VALUE_LOADS = Shared::VALUE_LOADS;
    static constexpr int BUFFERS = Shared::BUFFERS;
    static constexpr int PARTS = Head<DIM>::PARTS;

    const AttentionArgs& p;
    Shared& sm;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int kv = blockIdx.x, sequence = blockIdx.z, heads = p.heads / p.cache.kv_heads;
    int position, slot;
    int shift;         // asked for with these two: a load behind them would be waited for once more
    int shared;        // pages in front that `attention_shared` reads
    int splits;        // parts of the positions that this kernel reads
    int start, end;    // positions of this block's part
    // Rows of the run in front of this one; of their positions and this one those from `fresh_from`
    // on lie in this block's part.
    int fresh_from, fresh_rows;
    int appended_from; // positions up to this row's that the kernel in front appends
    const float* qkv;  // of this row
    int head0;         // of all sequences' query heads
    float top = -INFINITY, total = 0.f;    // of head g, over all warps
    float out[DIM_TILES][4] = {};          // dims 32 warp + 8n + 2t, + 1: of high and of low parts

    DEVICE SplitAttention(const AttentionArgs& p, Shared& sm) : p(p), sm(sm) {
        position = __ldcg(&p.step[sequence].position);
        slot = __ldcg(&p.step[sequence].slot);
        shift = __ldcg(&p.step[sequence].shift);
        shared = SHARED ? min(__ldcg(p.shared + sequence), position / PAGE) : 0;
        const int length = position + 1 - shared * PAGE;   // what this kernel reads
        const int most = length <= LEAST_SPLIT ? 1 : min((length + LEAST_PART - 1) / LEAST_PART, int(gridDim.y));
        const int share = ((length + most - 1) / most + PAGE - 1) / PAGE * PAGE;
        splits = (length + share - 1) / share;
        start = shared * PAGE + blockIdx.y * share;
        end = min(start + share, position + 1);
        qkv = p.qkv + size_t(sequence) * Of::width(p.heads, p.cache.kv_heads) * DIM;
        head0 = sequence * p.heads + kv * heads;
    }

    DEVICE void find_run() {
        int before = 0;
        if (ROWS > 1 || (DIM != HEAD_DIM && p.appended)) {
            bool same = false;
            if (lane < MOST_RUN - 1 && lane < sequence) {
                const Step* const at = p.step + sequence - 1 - lane;
                same = __ldcg(&at->slot) == slot && __ldcg(&at->position) == position - 1 - lane;
            }
            before = __ffs(~__ballot_sync(~0u, same)) - 1;
        }
        appended_from = position - before;
        fresh_from = max(start, ROWS > 1 ? position - before : position), fresh_rows = max(end - fresh_from, 0);
    }

    // Keys of this warp's 32 positions: column n of product j is position
    // base + 32 warp + 8 (n / 2) + 2j + n % 2, so that lane (g, t) ends with the scores of
    // positions 8t .. 8t+7. Load i holds dims EACH (4i + t) and on.
    // Values: dims 32 warp + 8n + g, positions base + EACH (4c + t) and on.
    DEVICE void request(int base, uint32_t page, int buffer) {
        const size_t head = p.cache.head(page, kv);
        const int at = base % PAGE;   // zero where a pass covers a page
        const size_t row0 = head * PAGE + (POSITIONS < PAGE ? at : 0);
        if (base + 32 * warp < end) {
            const int8_t* from = static_cast<const int8_t*>(p.cache.keys) + (row0 + 32 * warp + 8 * (g / 2) + g % 2) * DIM * BYTES + t * 16;
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) copy_async(&sm.keys[buffer][warp][j][i][lane], from + i * 64);
                from += 2 * DIM * BYTES;
            }
            if constexpr (INT8) {
                const __half* scales = lane < 4 ? p.cache.key_scales : p.cache.value_scales;
                if (lane < 8) copy_async(&sm.scales[buffer][warp][lane / 4][t], scales + row0 + 32 * warp + 8 * t);
            }
        }
        copy_commit();
        const int there = (end - base + 31) / 32 * 32;   // positions that the cache has
        const int8_t* from = static_cast<const int8_t*>(p.cache.values) + ((head * DIM + 8 * DIM_TILES * warp + g) * PAGE + (POSITIONS < PAGE ? at : 0)) * BYTES + t * 16;
#pragma unroll 1
        for (int c = 0; c < VALUE_LOADS && EACH * 4 * c < there; c++) {
            if (EACH * (4 * c + t) < there) {
#pragma unroll
                for (int n = 0; n < DIM_TILES; n++)
                    copy_async(&sm.values[buffer][warp][c][n][lane], from + 8 * n * PAGE * BYTES);
            }
            from += 64;
        }
        copy_commit();
    }

    // Jobs 0 .. heads - 1: queries; then the new key and the new value of each row of the run.
    DEVICE Head<DIM> load_job(int job) const {
        const int which = (job - heads) % 2;
        const int head = job < heads ? Of::query(kv * heads + job) : Of::key(p.heads, which * p.cache.kv_heads + kv);
        // Rows in front of this one lie in front of it in `qkv`.
        const int back = job < heads ? 0 : position - fresh_from - (job - heads) / 2;
        return Head<DIM>::load(qkv + (head - back * Of::width(p.heads, p.cache.kv_heads)) * DIM, lane);
    }
    DEVICE void keep_query(int job, Head<DIM> v, const HeadTurns<DIM>& turns) {
        v = add_bias(v, p.vectors, 0, kv * heads + job, lane);
        v = turn_head(v, turns.q_gain, turns.turn, p.eps, lane);
        constexpr float s = Of::SCALE;
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            const float4 x = v.part[j];
            uint2 hi, lo;
            split_pair(x.x * s, x.y * s, hi.x, lo.x);
            split_pair(x.z * s, x.w * s, hi.y, lo.y);
            reinterpret_cast<uint2*>(sm.q[0][job])[j * 32 + lane] = hi;
            reinterpret_cast<uint2*>(sm.q[1][job])[j * 32 + lane] = lo;
        }
    }
    DEVICE void keep_job(int job, Head<DIM> v, const HeadTurns<DIM>& turns, uint32_t newest_page) {
        if (job < heads) return keep_query(job, v, turns);
        const int which = (job - heads) % 2, r = (job - heads) / 2, pos = fresh_from + r;
        v = add_bias(v, p.vectors, 1 + which, kv, lane);
        if (which == 0) {
            const float4* const angles = turns.angles - (position - pos) * (Of::ROTARY_DIMS / 4);
            v = ROWS == 1 ? turn_head(v, turns.k_gain, turns.turn, p.eps, lane) : turn_head(v, turns.k_gain, Turn<DIM>(angles), p.eps, lane);
        }
        const Kept<DIM> kept = round_row<INT8>(v);
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            if constexpr (INT8) reinterpret_cast<char4*>(sm.fresh[which][r])[j * 32 + lane] = kept.code[j];
            else reinterpret_cast<uint2*>(sm.fresh[which][r])[j * 32 + lane] = kept.half[j];
        }
        if (INT8 && lane == 0) sm.fresh_scale[which][r] = kept.scale;
        if (pos == position) store_row<INT8>(p.cache, which, p.cache.head(newest_page, kv), position % PAGE, kept, lane);
    }
    // Those of many rows are requested together, and wait in shared memory: the code for each once
    // stays short, as every step reads it anew.
    DEVICE void take_heads(const HeadTurns<DIM>& turns, uint32_t newest_page) {
        constexpr int ROUNDS = (8 + 2 * ROWS + WARPS - 1) / WARPS;
        const int jobs = heads + 2 * fresh_rows;
        if constexpr (ROWS > 1 && !TOGETHER<ROWS, DIM>) {
            Head<DIM> next[2];   // two jobs come while one is done
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (warp + i * WARPS < jobs) next[i] = load_job(warp + i * WARPS);
#pragma unroll 1
            for (int job = warp; job < jobs; job += WARPS) {
                const Head<DIM> v = next[0];
                next[0] = next[1];
                if (job + 2 * WARPS < jobs) next[1] = load_job(job + 2 * WARPS);
                keep_job(job, v, turns, newest_page);
            }
        } else {
            Head<DIM> fresh[ROUNDS];
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                if (warp + i * WARPS < jobs) fresh[i] = load_job(warp + i * WARPS);
            if constexpr (ROWS == 1) {
#pragma unroll
                for (int i = 0; i < ROUNDS; i++)
                    if (warp + i * WARPS < jobs) keep_job(warp + i * WARPS, fresh[i], turns, newest_page);
            } else {
#pragma unroll
                for (int i = 0; i < ROUNDS; i++)
                    if (warp + i * WARPS < jobs) sm.jobs[warp + i * WARPS][lane] = fresh[i];
#pragma unroll 1
                for (int job = warp; job < jobs; job += WARPS) keep_job(job, sm.jobs[job][lane], turns, newest_page);   // the lane's own
            }
        }
        __syncthreads();
    }

    // What a warp's 32 positions of a pass come to, for head g and positions 8t .. 8t+7.
    struct Scores {
        float score[8];
        float value_scale[8];   // of int8
        float peak = -INFINITY;
    };
    // Puts what the run's rows have among positions `from` .. `to` in the place of what was loaded: the new keys and
    // values are not yet readable from the cache.
    DEVICE void put_new_keys(int buffer, int mine, int from, int to) {
#pragma unroll 1
        for (int pos = max(from, mine); pos < min(to, mine + WARP_POSITIONS); pos++) {
            const int at = pos - mine;
            if (at / 8 == g / 2 && at % 2 == g % 2) {
#pragma unroll
                for (int i = 0; i < LOADS; i++)
                    sm.keys[buffer][warp][at % 8 / 2][i][lane] = sm.fresh[0][pos - fresh_from][4 * i + t];
            }
        }
    }
    DEVICE void put_new_values(int buffer, int base, int from, int to) {
#pragma unroll 1
        for (int pos = from; pos < to; pos++) {
            const int newest_at = pos - base;
            if (newest_at % (4 * EACH) / EACH != t) continue;
#pragma unroll
            for (int n = 0; n < DIM_TILES; n++) {
                uint4* const place = &sm.values[buffer][warp][newest_at / (4 * EACH)][n][lane];
                const int at = newest_at % EACH, dim = 8 * (DIM_TILES * warp + n) + g;
                const uint4* const fresh = sm.fresh[1][pos - fresh_from];
                if constexpr (INT8)
                    reinterpret_cast<int8_t*>(place)[at] = reinterpret_cast<const int8_t*>(fresh)[dim];
                else
                    reinterpret_cast<__half*>(place)[at] = reinterpret_cast<const __half*>(fresh)[dim];
            }
        }
    }
    // The scores of this warp's positions, which begin at `mine`.
    DEVICE void score(Scores& of, int buffer, int mine) {
        float s[4][4] = {};
#pragma unroll 1
        for (int i = 0; i < LOADS; i++) {
            uint4 hi[EIGHTS], lo[EIGHTS];
#pragma unroll
            for (int h = 0; h < EIGHTS; h++) {
                hi[h] = sm.q[0][g][EIGHTS * (4 * i + t) + h];
                lo[h] = sm.q[1][g][EIGHTS * (4 * i + t) + h];
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 loaded = sm.keys[buffer][warp][j][i][lane];
#pragma unroll
                for (int h = 0; h < EIGHTS; h++) {
                    const uint4 w = eight_of<INT8>(loaded, h);
                    mma_16816(s[j], hi[h].x, lo[h].x, hi[h].y, lo[h].y, w.x, w.y);
                    mma_16816(s[j], hi[h].z, lo[h].z, hi[h].w, lo[h].w, w.z, w.w);
                }
            }
        }
        uint4 key_scales, value_scales;   // of positions 8t .. 8t+7
        if constexpr (INT8) {
            key_scales = sm.scales[buffer][warp][0][t];
            value_scales = sm.scales[buffer][warp][1][t];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float v = s[i / 2][i % 2] + s[i / 2][i % 2 + 2];
            const int pos = mine + 8 * t + i;
            if constexpr (INT8) {
                const bool fresh = pos >= fresh_from && pos < end;
                const int r = fresh ? pos - fresh_from : 0;
                v *= __half2float(fresh ? sm.fresh_scale[0][r] : reinterpret_cast<const __half*>(&key_scales)[i]);
                of.value_scale[i] = __half2float(fresh ? sm.fresh_scale[1][r] : reinterpret_cast<const __half*>(&value_scales)[i]);
            }
            of.score[i] = pos < end ? v : -INFINITY;
            of.peak = fmaxf(of.peak, of.score[i]);
        }
        of.peak = fmaxf(of.peak, __shfl_xor_sync(~0u, of.peak, 1));
        of.peak = fmaxf(of.peak, __shfl_xor_sync(~0u, of.peak, 2));
    }
    // The softmax weights of this warp's positions, to shared memory; their sum.
    DEVICE float weigh(const Scores& of) {
        uint32_t hi[4], lo[4];
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float a = exp2f(of.score[2 * i] - top), b = exp2f(of.score[2 * i + 1] - top);
            sum += a + b;
            if constexpr (INT8) a *= of.value_scale[2 * i], b *= of.value_scale[2 * i + 1];
            split_pair(a, b, hi[i], lo[i]);
        }
        sm.weights[warp][0][lane] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        sm.weights[warp][1][lane] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        return sum;
    }
    // Adds the values of a pass's positions, by their weights, to this warp's dims.
    DEVICE void add_values(int buffer, int base) {
#pragma unroll 2
        for (int c = 0; c < VALUE_LOADS && EACH * 4 * c < end - base; c++) {
            uint4 hi[EIGHTS], lo[EIGHTS];
#pragma unroll
            for (int h = 0; h < EIGHTS; h++) {
                const int eight = EIGHTS * (4 * c + t) + h;   // of the block's positions
                hi[h] = sm.weights[eight / 4][0][4 * g + eight % 4];
                lo[h] = sm.weights[eight / 4][1][4 * g + eight % 4];
            }
#pragma unroll
            for (int n = 0; n < DIM_TILES; n++) {
                const uint4 loaded = sm.values[buffer][warp][c][n][lane];
#pragma unroll
                for (int h = 0; h < EIGHTS; h++) {
                    const uint4 w = eight_of<INT8>(loaded, h);
                    mma_16816(out[n], hi[h].x, lo[h].x, hi[h].y, lo[h].y, w.x, w.y);
                    mma_16816(out[n], hi[h].z, lo[h].z, hi[h].w, lo[h].w, w.z, w.w);
                }
            }
        }
    }
    // Positions from `base` on, as many as a pass covers.
    DEVICE void pass(int base, int buffer) {
        const int mine = base + 32 * warp;   // this warp's positions
        // New rows among this pass's positions.
        const int new_from = max(fresh_from, base), new_end = min(end, base + POSITIONS);
        const bool last = base + POSITIONS >= end;
        const uint32_t next_page = last ? 0 : p.cache.page(slot, base + POSITIONS);
        if constexpr (BUFFERS == 2) {
            if (!last) {
                request(base + POSITIONS, next_page, buffer ^ 1);
            } else {
                copy_commit();
                copy_commit();
            }
        }
        copy_wait<2 * BUFFERS - 1>();
        if (INT8) __syncwarp();   // scales are other lanes' copies
        Scores scores;
        if (mine < end) {
            put_new_keys(buffer, mine, new_from, new_end);
            score(scores, buffer, mine);
        }
        if (t == 0) sm.top[warp][g] = scores.peak;
        __syncthreads();
        float peak = top;
#pragma unroll
        for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, sm.top[w][g]);
        const float shrink = exp2f(top - peak);   // top = -inf at first: 0
        top = peak;
        float sum = 0.f;
        if (mine < end) {
            sum = weigh(scores);
        } else if (EIGHTS > 1) {
            // A load of values may reach into these positions.
            sm.weights[warp][0][lane] = sm.weights[warp][1][lane] = make_uint4(0, 0, 0, 0);
        }
        if (t == 0) sm.sum[warp][g] = sum;
        copy_wait<2 * BUFFERS - 2>();
        put_new_values(buffer, base, new_from, new_end);
        __syncthreads();
        total *= shrink;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sm.sum[w][g];
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) out[n][i] *= shrink;
        add_values(buffer, base);
        if (!last) {
            if constexpr (BUFFERS == 1) request(base + POSITIONS, next_page, 0);
            __syncthreads();   // the weights are read
        }
    }

    // The gate of output `dim` of all this block's heads, and those that follow.
    DEVICE const float* gates_at(int dim) const { return qkv + Of::gate(kv * heads + dim / DIM) * DIM + dim % DIM; }
    // Two outputs, the first of which is `dim`, of all this block's heads.
    DEVICE void store_half(int dim, float x, float y) const {
        *reinterpret_cast<__half2*>(p.half + size_t(sequence) * p.padded + operand_index(kv * heads * DIM + dim)) =
            __float22half2_rn(make_float2(clamp_half(x), clamp_half(y)));
    }
    // 128 outputs, the `part`-th of all this block's heads, four a lane, by a warp.
    DEVICE void store_columns(int part, float4 v) const {
        const int rows = p.column_rows, at = ((sequence / rows * p.heads + kv * heads) * PARTS + part) * 2;
        put_four(p.columns + size_t(at) * (rows == 8 ? sizeof(DigitColumns<8>) : sizeof(DigitColumns<4>)), rows, sequence % rows, p.nibbles, v, lane);
    }
    DEVICE float* outputs() const { return p.out + size_t(head0) * DIM; }

    // Parts of a head that are joined: this kernel's, and those of `attention_shared`.
    DEVICE int parts() const { return shared == 0 ? splits : splits + (shared - 1) / shared_each(shared, p.shared_splits) + 1; }
    // Where the j-th of them lies.
    DEVICE int part_at(int j) const { return SHARED && j >= splits ? int(gridDim.y) + j - splits : j; }

    // The outputs of heads that this block has read all positions of.
    DEVICE void store_all() {
        const float inv = 1.f / total;
        float* const staged = reinterpret_cast<float*>(sm.keys);   // [heads][DIM], for columns: keys have been read
#pragma unroll
        for (int n = 0; n < DIM_TILES; n++) {
            const int dim = g * DIM + 8 * (DIM_TILES * warp + n) + 2 * t;
            float2 v = make_float2((out[n][0] + out[n][2]) * inv, (out[n][1] + out[n][3]) * inv);
            if constexpr (Of::GATED) {
                if (g < heads) {
                    const float2 gate = __ldcg(reinterpret_cast<const float2*>(gates_at(dim)));
                    v.x *= sigmoid(gate.x), v.y *= sigmoid(gate.y);
                }
            }
            if (g < heads && p.half != nullptr)
                store_half(dim, v.x, v.y);
            else if (g < heads)
                *reinterpret_cast<float2*>((p.columns != nullptr ? staged : outputs()) + dim) = v;
        }
        if (p.columns == nullptr) return;
        __syncthreads();
        for (int part = warp; part < heads * PARTS; part += WARPS) store_columns(part, reinterpret_cast<const float4*>(staged)[part * 32 + lane]);
    }

    // Leaves this block's part for the last block of the head; true if that is this one.
    DEVICE bool leave_part() {
        if (g < heads) {
            float2* part = reinterpret_cast<float2*>(p.partial + (size_t(head0 + g) * p.parts + blockIdx.y) * (DIM / 4));
#pragma unroll
            for (int n = 0; n < DIM_TILES; n++)
                __stcg(part + 4 * (DIM_TILES * warp + n) + t, make_float2(out[n][0] + out[n][2], out[n][1] + out[n][3]));
            if (warp == 0 && t == 0) __stcg(p.tops + size_t(head0 + g) * p.parts + blockIdx.y, make_float2(top, total));
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            int* arrived = p.arrived + sequence * p.cache.kv_heads + kv;
            sm.last = atomicAdd(arrived, 1) == splits - 1;
            if (sm.last) *arrived = 0;
        }
        __syncthreads();
        return sm.last;
    }

    // Each part's share in a head's result, a head at a time by a warp, which asks for those of all its heads first.
    DEVICE void weigh_parts(int joined) {
        constexpr int EACH = MOST_SPLITS / 32, HEADS = MOST_HEADS / WARPS;
        float2 part[HEADS][EACH];
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            const int head = warp + n * WARPS;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int j = 32 * i + lane;
                const bool there = head < heads && j < joined;
                part[n][i] = there ? __ldcg(p.tops + size_t(head0 + head) * p.parts + part_at(j)) : make_float2(-INFINITY, 0.f);
            }
        }
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            if (warp + n * WARPS >= heads) break;
            float peak = -INFINITY, sum = 0.f;
#pragma unroll
            for (int i = 0; i < EACH; i++) peak = fmaxf(peak, part[n][i].x);
#pragma unroll
            for (int m = 16; m > 0; m >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, m));
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                part[n][i].x = exp2f(part[n][i].x - peak);
                sum = fmaf(part[n][i].x, part[n][i].y, sum);
            }
            const float inv = 1.f / warp_sum(sum);
#pragma unroll
            for (int i = 0; i < EACH; i++) sm.share[warp + n * WARPS][32 * i + lane] = part[n][i].x * inv;
        }
        __syncthreads();
    }
    // The outputs of this block's heads, from all parts.
    DEVICE void join(int joined) {
        __threadfence();
        weigh_parts(joined);
        const float4* const partial = p.partial + size_t(head0) * p.parts * (DIM / 4);
        for (int i = threadIdx.x; i < heads * (DIM / 4); i += WARPS * 32) {
            const int head = i / (DIM / 4);
            const float4* from = partial + size_t(head) * p.parts * (DIM / 4) + i % (DIM / 4);
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
            constexpr int AT_ONCE = 8;   // parts that are on their way together
#pragma unroll 1
            for (int first = 0; first < joined; first += AT_ONCE) {
                float4 part[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
                    if (first + j < joined) part[j] = __ldcg(from + part_at(first + j) * (DIM / 4));
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    if (first + j >= joined) break;
                    const float f = sm.share[head][first + j];
                    v.x = fmaf(f, part[j].x, v.x), v.y = fmaf(f, part[j].y, v.y);
                    v.z = fmaf(f, part[j].z, v.z), v.w = fmaf(f, part[j].w, v.w);
                }
            }
            if constexpr (Of::GATED) {
                const float4 gate = __ldcg(reinterpret_cast<const float4*>(gates_at(4 * i)));
                v.x *= sigmoid(gate.x), v.y *= sigmoid(gate.y), v.z *= sigmoid(gate.z), v.w *= sigmoid(gate.w);
            }
            if (p.half != nullptr) {
                store_half(4 * i, v.x, v.y);
                store_half(4 * i + 2, v.z, v.w);
            } else if (p.columns != nullptr) {
                store_columns(i / 32, v);
            } else {
                reinterpret_cast<float4*>(outputs())[i] = v;
            }
        }
    }
};

template <bool INT8, int ROWS, bool SHARED, int DIM = HEAD_DIM>
DEVICE void attention_decode(const AttentionArgs& p) {
    using Block = SplitAttention<INT8, ROWS, SHARED, DIM>;
    extern __shared__ uint4 dynamic_shared[];
    if (!p.holds_dependents) launch_dependents();
    Block block(p, *reinterpret_cast<typename Block::Shared*>(dynamic_shared));
    if (blockIdx.y >= block.splits) return;   // block 0 of the head has work: the kernel ends after its prerequisites
    block.find_run();
    const uint32_t newest_page = p.cache.page(block.slot, block.position);
    const uint32_t first_page = p.cache.page(block.slot, block.start);
    const bool follows_append = DIM != HEAD_DIM && block.appended_from < min(block.start + Block::POSITIONS, block.position);
    if (!follows_append) block.request(block.start, first_page, 0);
    const HeadTurns<DIM> turns(p, block.position + block.shift, block.lane);

    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();
    if (follows_append) block.request(block.start, first_page, 0);
    block.take_heads(turns, newest_page);
    int buffer = 0;
#pragma unroll 1
    for (int base = block.start; base < block.end; base += Block::POSITIONS) {
        block.pass(base, buffer);
        buffer ^= Block::BUFFERS - 1;
    }
    const int joined = block.parts();
    if (joined == 1) return block.store_all();
    if (block.leave_part()) block.join(joined);
}
