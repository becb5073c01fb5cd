// Sparse attention by an indexer: each row attends to some of the whole blocks of positions before it, and to the
// positions behind the last whole one.
//
//   key of a block = turn(rmsnorm(mean of the keys of its positions) * gain), at its first position
//   score of a block = sum over heads of max(0, q[h] . key) / sqrt(128)
//   out[h] = sigmoid(gate[h]) * softmax(q[h] . K / sqrt(256)) V over the positions chosen
//
// `index_queries` turns queries, `index_keys` makes the keys of the blocks that become whole and keeps those of the last
// positions, `index_scores` and `choose_blocks` choose the blocks of highest score, of equal ones the first, and
// `attend_blocks` with `join_splits` attends to them. Keys of blocks stay in f32.
#include "exchange.cuh"
#include "spans.cuh"

constexpr int INDEX_DIM = 128;            // width of a head of an indexer
constexpr int INDEX_THREADS = 128;
constexpr int CHOOSE_THREADS = 256;
constexpr int SCORED_ROWS = 8;            // rows of a block of `index_scores`
constexpr int SCORED_BLOCKS = 32;         // blocks of positions of one
constexpr int ATTEND_THREADS = 256;
constexpr int ATTEND_TILE = 32;           // positions at a time
constexpr int MOST_ATTEND_GROUP = 16;     // query heads of a key head

// An indexer's keys of a layer's blocks: [pages][PAGE / block][INDEX_DIM], by the page tables of its keys and values.
struct BlockKeys {
    float* keys;
    const uint32_t* tables;   // [slots][table_len]
    int table_len;
    int block;                // positions of a block

    DEVICE float* key(int slot, int number) const {
        const int first = number * block;
        const uint32_t page = __ldcg(tables + size_t(slot) * table_len + first / PAGE);
        return keys + (size_t(page) * (PAGE / block) + first % PAGE / block) * INDEX_DIM;
    }
};

// RMSNorm and rotary embedding of a head by a warp.
DEVICE float4 turn_index_head(float4 x, const float* gains, const float2* row, float eps, int lane) {
    const float4 gain = __ldg(reinterpret_cast<const float4*>(gains) + lane);
    const Turn<WIDE_HEAD_DIM> turn(Turn<WIDE_HEAD_DIM>::of(row, lane));
    const float r = rsqrtf(warp_sum(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) / INDEX_DIM + eps);
    x.x *= r * gain.x, x.y *= r * gain.y, x.z *= r * gain.z, x.w *= r * gain.w;
    constexpr int HALF = HeadsOf<WIDE_HEAD_DIM>::ROTARY_DIMS / 8;   // lanes that hold one half of the pairs
    float4 o;                                                       // the other half of each pair
    o.x = __shfl_xor_sync(~0u, x.x, HALF);
    o.y = __shfl_xor_sync(~0u, x.y, HALF);
    o.z = __shfl_xor_sync(~0u, x.z, HALF);
    o.w = __shfl_xor_sync(~0u, x.w, HALF);
    const float sign = lane < HALF ? -1.f : 1.f;
    const float4 c0 = turn.first, c1 = turn.second;
    if (lane < 2 * HALF)
        x = make_float4(x.x * c0.x + sign * o.x * c0.y, x.y * c0.z + sign * o.y * c0.w, x.z * c1.x + sign * o.z * c1.y,
                        x.w * c1.z + sign * o.w * c1.w);
    return x;
}

struct IndexArgs {
    float* index;           // [m][heads + 1][INDEX_DIM]: queries, and the key
    const Row* rows;        // [m]
    const float* q_gain;    // [INDEX_DIM]
    const float* k_gain;
    const float2* cos_sin;  // [positions, then rows of images][HeadsOf<WIDE_HEAD_DIM>::ROTARY_DIMS / 2]
    BlockKeys blocks;
    KeptRows kept;          // [places][block][INDEX_DIM], by the remainder of positions
    int m;
    int heads;
    float eps;
    const StreamSpan* spans;
};

// Grid (m, heads / 4); a warp takes a head of a row, in place.
extern "C" __global__ __launch_bounds__(INDEX_THREADS) void index_queries(const __grid_constant__ IndexArgs p) {
    const int lane = threadIdx.x % 32, head = blockIdx.y * (INDEX_THREADS / 32) + threadIdx.x / 32;
    if (head >= p.heads) return;
    float4* const at = reinterpret_cast<float4*>(p.index + (size_t(blockIdx.x) * (p.heads + 1) + head) * INDEX_DIM) + lane;
    const float2* const turn = p.cos_sin + size_t(p.rows[blockIdx.x].turn()) * (HeadsOf<WIDE_HEAD_DIM>::ROTARY_DIMS / 2);
    *at = turn_index_head(*at, p.q_gain, turn, p.eps, lane);
}

// The key of a position of a span, also before its first row.
DEVICE const float* index_key(const IndexArgs& p, const StreamSpan& span, int position) {
    const int r = position - span.position;
    if (r < 0) return p.kept.at(span.slot) + position % p.blocks.block * INDEX_DIM;
    return p.index + (size_t(span.row + r) * (p.heads + 1) + p.heads) * INDEX_DIM;
}

// Grid (parts, spans); a warp takes a block that becomes whole.
extern "C" __global__ __launch_bounds__(INDEX_THREADS) void index_keys(const __grid_constant__ IndexArgs p) {
    constexpr int WARPS = INDEX_THREADS / 32;
    const StreamSpan span = p.spans[blockIdx.y];
    const int lane = threadIdx.x % 32, block = p.blocks.block, end = (span.position + span.count) / block;
    for (int b = span.position / block + blockIdx.x * WARPS + threadIdx.x / 32; b < end; b += gridDim.x * WARPS) {
        float4 mean = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int i = 0; i < block; i++) {
            const float4 v = reinterpret_cast<const float4*>(index_key(p, span, b * block + i))[lane];
            mean.x += v.x, mean.y += v.y, mean.z += v.z, mean.w += v.w;
        }
        mean.x /= block, mean.y /= block, mean.z /= block, mean.w /= block;
        const float2* const turn = p.cos_sin + size_t(b) * block * (HeadsOf<WIDE_HEAD_DIM>::ROTARY_DIMS / 2);
        reinterpret_cast<float4*>(p.blocks.key(span.slot, b))[lane] = turn_index_head(mean, p.k_gain, turn, p.eps, lane);
    }
}

// Keeps the keys of the last positions of each span, once `index_keys` has read those before it. Grid (1, spans).
extern "C" __global__ __launch_bounds__(INDEX_THREADS) void keep_index_keys(const __grid_constant__ IndexArgs p) {
    static_assert(INDEX_THREADS == INDEX_DIM, "a thread a value");
    const StreamSpan span = p.spans[blockIdx.y];
    const int block = p.blocks.block;
    auto keep = [&](int place, int end) {
        for (int i = 0; i < block; i++) {
            const int last = end - 1 - (end - 1 - i + block) % block;   // of this remainder
            if (last >= 0) p.kept.at(place)[i * INDEX_DIM + threadIdx.x] = index_key(p, span, last)[threadIdx.x];
        }
    };
    if (span.mark > 0) keep(span.place, span.position + span.mark);
    keep(span.slot, span.position + span.count);
}

// Scores of the whole blocks before rows `first` .. `first + count` that may not attend to all of them.
struct ScoresArgs {
    const float* index;   // [m][heads + 1][INDEX_DIM]
    const Row* rows;      // [m]
    BlockKeys blocks;
    float* scores;        // [count][stride]
    uint32_t* chosen;     // [m][most]: blocks in order
    int heads;
    int most;             // blocks that a row attends to
    int stride;
    int first;
    int count;
};

// Grid (blocks / 32, rows / 8): four threads take a block, each a quarter of its values, of each 16 the same four.
extern "C" __global__ __launch_bounds__(INDEX_THREADS) void index_scores(const __grid_constant__ ScoresArgs p) {
    static_assert(INDEX_THREADS == 4 * SCORED_BLOCKS, "four threads a block");
    const int part = threadIdx.x % 4, b = blockIdx.x * SCORED_BLOCKS + threadIdx.x / 4;
    float4 key[INDEX_DIM / 16];
    int slot = -1;
    bool there = false;
    for (int i = 0; i < SCORED_ROWS; i++) {
        const int r = blockIdx.y * SCORED_ROWS + i;
        if (r >= p.count) return;
        const Row row = p.rows[p.first + r];
        const int whole = (row.position + 1) / p.blocks.block;
        if (whole <= p.most || int(blockIdx.x) * SCORED_BLOCKS >= whole) continue;
        if (row.slot != slot || !there) {
            slot = row.slot, there = b < whole;
            const float4* const from = reinterpret_cast<const float4*>(p.blocks.key(slot, min(b, whole - 1))) + part;
            for (int j = 0; j < INDEX_DIM / 16; j++) key[j] = from[j * 4];
        }
        float score = 0.f;
        for (int h = 0; h < p.heads; h++) {
            const float4* const q = reinterpret_cast<const float4*>(p.index + (size_t(p.first + r) * (p.heads + 1) + h) * INDEX_DIM) + part;
            float dot = 0.f;
            for (int j = 0; j < INDEX_DIM / 16; j++) {
                const float4 v = q[j * 4];
                dot = fmaf(v.x, key[j].x, fmaf(v.y, key[j].y, fmaf(v.z, key[j].z, fmaf(v.w, key[j].w, dot))));
            }
            dot += __shfl_xor_sync(~0u, dot, 1);
            dot += __shfl_xor_sync(~0u, dot, 2);
            score += fmaxf(dot, 0.f);
        }
        if (part == 0 && b < whole) p.scores[size_t(r) * p.stride + b] = score * 0.08838834764831845f;
    }
}

struct ChooseShared {
    unsigned counts[256];
    int warps[CHOOSE_THREADS / 32];
    unsigned digits, left;   // of the lowest score that is chosen, and how many of those that have it are
};

// The blocks of highest score, by the bits of scores from the first on: they are not negative. Grid `count`.
extern "C" __global__ __launch_bounds__(CHOOSE_THREADS) void choose_blocks(const __grid_constant__ ScoresArgs p) {
    ChooseShared& sm = *reinterpret_cast<ChooseShared*>(dynamic_shared());
    const int whole = (p.rows[p.first + blockIdx.x].position + 1) / p.blocks.block, lane = threadIdx.x % 32;
    if (whole <= p.most) return;
    const float* const scores = p.scores + size_t(blockIdx.x) * p.stride;
    uint32_t* const chosen = p.chosen + size_t(p.first + blockIdx.x) * p.most;
    if (threadIdx.x == 0) sm.digits = 0, sm.left = p.most;
    for (int shift = 24; shift >= 0; shift -= 8) {
        sm.counts[threadIdx.x] = 0;
        __syncthreads();
        const unsigned digits = sm.digits;
        for (int b = threadIdx.x; b < whole; b += CHOOSE_THREADS) {
            const uint32_t bits = __float_as_uint(scores[b]);
            if (shift == 24 || bits >> (shift + 8) == digits) atomicAdd(sm.counts + (bits >> shift & 255), 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned digit = 255, left = sm.left;
            for (; digit > 0 && sm.counts[digit] < left; digit--) left -= sm.counts[digit];
            sm.digits = digits << 8 | digit, sm.left = left;
        }
        __syncthreads();
    }
    const unsigned lowest = sm.digits, ties = sm.left;
    int above = 0, equal = 0;   // of the blocks before these
    for (int b0 = 0; b0 < whole; b0 += CHOOSE_THREADS) {
        const int b = b0 + threadIdx.x;
        const uint32_t bits = b < whole ? __float_as_uint(scores[b]) : 0;
        const bool over = b < whole && bits > lowest, ties_with = b < whole && bits == lowest;
        int sum = int(over) | int(ties_with) << 16;
        const int own = sum;
        for (int k = 1; k < 32; k <<= 1) {
            const int o = __shfl_up_sync(~0u, sum, k);
            if (lane >= k) sum += o;
        }
        __syncthreads();
        if (lane == 31) sm.warps[threadIdx.x / 32] = sum;
        __syncthreads();
        int all = 0;
        for (int w = 0; w < CHOOSE_THREADS / 32; w++) {
            if (w == int(threadIdx.x) / 32) sum += all;
            all += sm.warps[w];
        }
        const int before = sum - own, over_before = above + (before & 0xffff), equal_before = equal + (before >> 16);
        if (over || (ties_with && equal_before < int(ties))) chosen[over_before + min(equal_before, int(ties))] = b;
        above += all & 0xffff, equal += all >> 16;
    }
}

// Attention of rows `first` .. `first + count`, in `splits` parts of the positions.
struct AttendArgs {
    const float* qkv;         // [m][HeadsOf<256>::width][256], queries and keys turned
    const Row* rows;          // [m]
    const uint32_t* chosen;   // [m][most], of rows that do not attend to all positions
    Cache cache;              // in FP16
    float* sums;              // [count][kv_heads][splits][group][256]
    float2* scales;           // [count][kv_heads][splits][group]: the highest score, and the sum of weights
    __half* half;             // [m][padded], in operand order; or null
    float* out;               // [m][heads][256]; or null
    int heads;
    int block;
    int most;
    int splits;
    int first;
    int count;
    int padded;
};

struct AttendShared {
    float q[MOST_ATTEND_GROUP][WIDE_HEAD_DIM];
    float scores[MOST_ATTEND_GROUP][ATTEND_TILE + 1];   // those of a position are in different banks
    float scale[MOST_ATTEND_GROUP];   // of what was summed before this tile
    int positions[ATTEND_TILE];
};

// Grid (count, kv_heads * splits): four positions of a tile a warp for scores, then a value of heads a thread.
extern "C" __global__ __launch_bounds__(ATTEND_THREADS) void attend_blocks(const __grid_constant__ AttendArgs p) {
    using Of = HeadsOf<WIDE_HEAD_DIM>;
    constexpr int DIM = WIDE_HEAD_DIM, OF_WARP = ATTEND_TILE / (ATTEND_THREADS / 32);
    static_assert(ATTEND_THREADS == DIM && OF_WARP == 4, "threads");
    AttendShared& sm = *reinterpret_cast<AttendShared*>(dynamic_shared());
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int kv = blockIdx.y / p.splits, split = blockIdx.y % p.splits, group = p.heads / p.cache.kv_heads;
    const int m = p.first + blockIdx.x;
    const Row row = p.rows[m];
    const int whole = (row.position + 1) / p.block, blocks = min(whole, p.most);
    const int total = blocks * p.block + (row.position + 1) % p.block;
    // Whole tiles for each split.
    const int tiles = (total + ATTEND_TILE - 1) / ATTEND_TILE;
    const int begin = split * tiles / p.splits * ATTEND_TILE, end = min((split + 1) * tiles / p.splits * ATTEND_TILE, total);
    const uint32_t* const chosen = whole > p.most ? p.chosen + size_t(m) * p.most : nullptr;
    const __half* const keys = static_cast<const __half*>(p.cache.keys);
    const __half* const values = static_cast<const __half*>(p.cache.values);
    auto head_of = [&](int position) { return p.cache.head(p.cache.page(row.slot, position), kv); };

    for (int g = 0; g < group; g++)
        sm.q[g][threadIdx.x] = p.qkv[(size_t(m) * Of::width(p.heads, p.cache.kv_heads) + Of::query(kv * group + g)) * DIM + threadIdx.x] * Of::SCALE;
    float acc[MOST_ATTEND_GROUP] = {};
    // Of head `lane`, in the first warp.
    float highest = -INFINITY, weights = 0.f;
    for (int from = begin; from < end; from += ATTEND_TILE) {
        __syncthreads();
        if (threadIdx.x < ATTEND_TILE) {
            const int i = from + threadIdx.x, b = i / p.block;
            sm.positions[threadIdx.x] = i >= end ? -1 : b >= blocks ? whole * p.block + i - blocks * p.block : int(chosen == nullptr ? b : chosen[b]) * p.block + i % p.block;
        }
        __syncthreads();
        float k[OF_WARP][8];
        for (int j = 0; j < OF_WARP; j++) {
            const int position = sm.positions[warp * OF_WARP + j];
            uint4 w = make_uint4(0, 0, 0, 0);
            if (position >= 0) w = reinterpret_cast<const uint4*>(keys + (head_of(position) * PAGE + position % PAGE) * DIM)[lane];
            const __half2* const pairs = reinterpret_cast<const __half2*>(&w);
            for (int i = 0; i < 4; i++) {
                const float2 v = __half22float2(pairs[i]);
                k[j][2 * i] = v.x, k[j][2 * i + 1] = v.y;
            }
        }
        for (int g = 0; g < group; g++) {
            const float4 a = reinterpret_cast<const float4*>(sm.q[g])[2 * lane], b = reinterpret_cast<const float4*>(sm.q[g])[2 * lane + 1];
            for (int j = 0; j < OF_WARP; j++) {
                float dot = a.x * k[j][0] + a.y * k[j][1] + a.z * k[j][2] + a.w * k[j][3];
                dot += b.x * k[j][4] + b.y * k[j][5] + b.z * k[j][6] + b.w * k[j][7];
                dot = warp_sum(dot);
                if (lane == 0) sm.scores[g][warp * OF_WARP + j] = sm.positions[warp * OF_WARP + j] < 0 ? -INFINITY : dot;
            }
        }
        __syncthreads();
        // The first position of a tile is there, so that the highest score is a number.
        if (warp == 0 && lane < group) {
            float top = highest;
            for (int j = 0; j < ATTEND_TILE; j++) top = fmaxf(top, sm.scores[lane][j]);
            const float scale = exp2f(highest - top);
            weights *= scale;
            for (int j = 0; j < ATTEND_TILE; j++) {
                const float w = exp2f(sm.scores[lane][j] - top);
                sm.scores[lane][j] = w;
                weights += w;
            }
            sm.scale[lane] = scale;
            highest = top;
        }
        __syncthreads();
#pragma unroll
        for (int g = 0; g < MOST_ATTEND_GROUP; g++)
            if (g < group) acc[g] *= sm.scale[g];
        for (int j = 0; j < ATTEND_TILE; j += 4) {
            // Four positions that follow one another, of which the last may not be there: values of pages are numbers.
            const int position = sm.positions[j];
            if (position < 0) break;
            const uint2 four = *reinterpret_cast<const uint2*>(values + (head_of(position) * DIM + threadIdx.x) * PAGE + position % PAGE);
            const __half2* const pairs = reinterpret_cast<const __half2*>(&four);
            const float2 v = __half22float2(pairs[0]), w = __half22float2(pairs[1]);
#pragma unroll
            for (int g = 0; g < MOST_ATTEND_GROUP; g++) {
                if (g >= group) continue;
                const float* const s = sm.scores[g] + j;
                acc[g] = fmaf(s[0], v.x, fmaf(s[1], v.y, fmaf(s[2], w.x, fmaf(s[3], w.y, acc[g]))));
            }
        }
    }
    const size_t part = (size_t(blockIdx.x) * p.cache.kv_heads * p.splits + blockIdx.y) * group;
#pragma unroll
    for (int g = 0; g < MOST_ATTEND_GROUP; g++)
        if (g < group) p.sums[(part + g) * DIM + threadIdx.x] = acc[g];
    if (warp == 0 && lane < group) p.scales[part + lane] = make_float2(highest, weights);
}

// Adds up the splits of a head, and multiplies by its gate. Grid (count, heads).
extern "C" __global__ __launch_bounds__(ATTEND_THREADS) void join_splits(const __grid_constant__ AttendArgs p) {
    using Of = HeadsOf<WIDE_HEAD_DIM>;
    const int group = p.heads / p.cache.kv_heads, kv = blockIdx.y / group, g = blockIdx.y % group, dim = threadIdx.x;
    const size_t m = p.first + blockIdx.x;
    auto part = [&](int split) { return ((size_t(blockIdx.x) * p.cache.kv_heads + kv) * p.splits + split) * group + g; };
    float highest = -INFINITY;
    for (int s = 0; s < p.splits; s++) highest = fmaxf(highest, p.scales[part(s)].x);
    float sum = 0.f, weights = 0.f;
    for (int s = 0; s < p.splits; s++) {
        const float2 of_split = p.scales[part(s)];
        if (of_split.y == 0.f) continue;
        const float scale = exp2f(of_split.x - highest);
        sum = fmaf(scale, p.sums[part(s) * WIDE_HEAD_DIM + dim], sum);
        weights = fmaf(scale, of_split.y, weights);
    }
    const float gate = p.qkv[(m * Of::width(p.heads, p.cache.kv_heads) + Of::gate(blockIdx.y)) * WIDE_HEAD_DIM + dim];
    const float v = sum / weights * sigmoid(gate);
    const int k = blockIdx.y * WIDE_HEAD_DIM + dim;
    if (p.out != nullptr) p.out[m * p.heads * WIDE_HEAD_DIM + k] = v;
    if (p.half != nullptr) p.half[m * p.padded + operand_index(k)] = __float2half_rn(clamp_half(v));
}
