// Lists the tokens that sampling may choose from, for `advance`.
//
// Where few tokens matter (top-k of up to 64, or a small nucleus) one short list of all of them:
// any token among the best k reaches the k-th greatest of the best of the head's blocks. Where
// many may, or mask, biases or penalties change the order: the vocabulary is cut into ranges, a block each, and
// the best few of each range are listed, with the sum of all weights in it.
//
// Bytes: logits once, from L2.
#include "sampling.cuh"

struct CandidateArgs {
    const float* logits;       // [m][vocab]
    const float2* best;        // [m][blocks], of the head
    const Sampling* sampling;  // [m]
    Adjustments adjust;
    Range* ranges;             // [m][RANGES]
    Shortlist* shortlists;     // [m]
    int vocab;                 // at most RANGES * RANGE_THREADS * RANGE_PER_THREAD
    int blocks;
};

constexpr int WARPS = RANGE_THREADS / 32;

// A thread's tokens of the block's range: `start` + i * RANGE_THREADS + threadIdx.x.
struct Mine {
    float x[RANGE_PER_THREAD];
    uint32_t key[RANGE_PER_THREAD];   // 0: no token
    int start;

    DEVICE unsigned long long listed(int i) const { return key_of(x[i], start + i * RANGE_THREADS + threadIdx.x); }
};

// The `rank`-th greatest of the best of the first blocks, as a key above those of excluded tokens.
DEVICE uint32_t nth_best(const float2* best, int blocks, int rank) {
    __shared__ uint4 keys[RANGE_THREADS / 4];
    __shared__ uint32_t threshold;
    const int n = min(blocks, RANGE_THREADS);
    const uint32_t mine = threadIdx.x < n ? ordered(__ldcg(&best[threadIdx.x].x)) : 0;
    reinterpret_cast<uint32_t*>(keys)[threadIdx.x] = mine;
    if (threadIdx.x == 0) threshold = 0;
    __syncthreads();
    int reached = 0;   // by blocks, this one included
#pragma unroll 4
    for (int i = 0; i < (n + 3) / 4; i++) {
        const uint4 k = keys[i];
        reached += (k.x >= mine) + (k.y >= mine) + (k.z >= mine) + (k.w >= mine);
    }
    const uint32_t most = __reduce_max_sync(~0u, reached >= rank ? mine : 0);
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(&threshold, most);
    __syncthreads();
    return max(threshold, EXCLUDED + 1);
}

// Adds what reaches `threshold` to the list of all.
DEVICE void add_to_shortlist(const Mine& mine, uint32_t threshold, bool bad, Shortlist& to) {
#pragma unroll
    for (int i = 0; i < RANGE_PER_THREAD; i++) {
        if (mine.key[i] == 0 || mine.key[i] < threshold) continue;
        const int at = atomicAdd(&to.count, 1);
        if (at < SHORT_LIST) to.list[at] = mine.listed(i);
    }
    if (threadIdx.x != 0) return;
    if (bad) to.bad = 1;
    if (blockIdx.x == 0) to.threshold = threshold;
}

// Lists the best of the block's range of `n` tokens.
DEVICE void list_range(const Mine& mine, int n, float temperature, bool bad, Range& to) {
    __shared__ uint32_t keys[2][WARPS];
    __shared__ int counts[2][WARPS];
    __shared__ float sums[WARPS];
    __shared__ int listed;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t most = 0, least = ~0u;
#pragma unroll
    for (int i = 0; i < RANGE_PER_THREAD; i++) {
        most = max(most, mine.key[i]);
        if (mine.key[i] > 0) least = min(least, mine.key[i]);
    }
    most = __reduce_max_sync(~0u, most);
    least = __reduce_min_sync(~0u, least);
    if (lane == 0) keys[0][warp] = most, keys[1][warp] = least;
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) most = max(most, keys[0][i]), least = min(least, keys[1][i]);
    const float peak = unordered(most), scale = temperature > 0.f ? 1.f / temperature : 0.f;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < RANGE_PER_THREAD; i++)
        if (mine.key[i] > 0 && peak > -INFINITY) sum += __expf((mine.x[i] - peak) * scale);
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;

    // The least threshold found that at most RANGE_LIST tokens reach: from `low` on too many do.
    uint32_t low = n > RANGE_LIST ? least : 0, high = n > RANGE_LIST ? most + 1 : 0;
    int parity = 0;
#pragma unroll 1
    while (high - low > 1) {
        const uint32_t mid = low + (high - low) / 2;
        int count = 0;
#pragma unroll
        for (int i = 0; i < RANGE_PER_THREAD; i++) count += mine.key[i] >= mid;
        count = __reduce_add_sync(~0u, count);
        if (lane == 0) counts[parity][warp] = count;
        __syncthreads();
        count = 0;
        for (int i = 0; i < WARPS; i++) count += counts[parity][i];
        parity ^= 1;
        if (count > RANGE_LIST) {
            low = mid;
        } else {
            high = mid;
            if (count > RANGE_LIST / 2) break;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RANGE_PER_THREAD; i++)
        if (mine.key[i] > 0 && mine.key[i] >= high) to.list[atomicAdd(&listed, 1)] = mine.listed(i);
    __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0.f;
        for (int i = 0; i < WARPS; i++) all += sums[i];
        to.peak = n > 0 ? peak : -INFINITY;
        to.sum = n > 0 ? all : 0.f;
        to.threshold = high;
        to.count = bad ? -1 : listed;
    }
}

// Grid (RANGES, m).
extern "C" __global__ __launch_bounds__(RANGE_THREADS) void candidates(const __grid_constant__ CandidateArgs p) {
    launch_dependents();
    const int row = blockIdx.y;
    const Sampling how = p.sampling[row];   // written before the step was queued
    const Logits logits(p.logits, p.adjust, row, p.vocab, how);
    const int per = (p.vocab + RANGES - 1) / RANGES, start = blockIdx.x * per, n = max(0, min(per, p.vocab - start));
    const int rank = shortlist_rank(how, p.vocab, p.blocks);
    wait_for_prerequisites();
    // The head has found the best token.
    if (is_greedy(how) && !how.adjusts) return;

    Mine mine;
    mine.start = start;
    bool bad = false;
    auto read = [&](auto get) {
#pragma unroll
        for (int i = 0; i < RANGE_PER_THREAD; i++) {
            const int at = i * RANGE_THREADS + threadIdx.x;
            mine.key[i] = 0;
            if (at < n) {
                mine.x[i] = get(start + at);
                bad |= isnan(mine.x[i]);
                mine.key[i] = ordered(mine.x[i]);
            }
        }
    };
    // Told apart here, so that a thread requests all its logits at once.
    if (how.adjusts) read([&](int i) { return logits.adjusted(i); });
    else read([&](int i) { return __ldcg(logits.logits + i); });
    bad = __syncthreads_or(bad);
    if (rank > 0) add_to_shortlist(mine, nth_best(p.best + size_t(row) * p.blocks, p.blocks, rank), bad, p.shortlists[row]);
    if (rank == 0 || !limits_k(how, p.vocab)) list_range(mine, n, how.temperature, bad, p.ranges[row * RANGES + blockIdx.x]);
}
