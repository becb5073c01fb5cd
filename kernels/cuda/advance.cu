// The end of a decode step: chooses each sequence's next token from its logits, hands it to the
// host and looks its embedding up. A block a sequence.
//
// The order of penalties, temperature, top-k, top-p, min-p and the draw is that of the host's
// sampler: of equal logits the lowest id is the better one, and the draw inverts the cumulative
// distribution in id order at u = the upper 53 bits of the first two words of Philox block
// (seed, stream, position).
//
// `candidates` cuts the vocabulary into ranges, a block each, and lists the best few of each
// range. Above the greatest threshold of any range the lists together are complete, and nearly
// always they hold all that top-k, top-p and min-p keep. Where they do not (a flat distribution
// with top-p alone), thresholds are found by radix selection over all logits. Sums are in fixed
// point or in a fixed order, so a seed always gives one token.
//
// Bytes: logits once (greedily only the best of each block of the head), the embedding's row.
#include "activations.cuh"
#include "weights.cuh"

struct Sampling {
    float temperature;       // 0: the best token
    float top_p;
    float min_p;
    float repetition;
    float presence;
    int top_k;               // 0: all
    int penalties;           // any
    uint32_t seed[2];
    uint32_t stream[2];
    uint32_t position[2];    // tokens before the first sampled one
};

constexpr int RANGES = 128;
constexpr int RANGE_LIST = 32;
constexpr int RANGE_THREADS = 256;
constexpr int RANGE_PER_THREAD = 8;   // so up to 262,144 tokens

// The best of a range of tokens.
struct Range {
    float peak;
    float sum;            // of exp((x - peak) / temperature)
    uint32_t threshold;   // tokens not listed are below it; 0: all are listed
    int count;            // of the list; -1: a logit is not a number
    unsigned long long list[RANGE_LIST];
};

struct AdvanceArgs {
    const float* logits;      // [m][vocab]
    const float2* best;       // [m][blocks], of the head
    const Sampling* sampling; // [m]
    uint8_t* seen;            // [m][vocab]: 0 no, 1 in the prompt, 2 in the answer
    Step* step;               // [m]
    uint32_t* ring;           // [m][ring_size], read by the host
    const Range* ranges;      // [m][RANGES], of `candidates`; null: best tokens are wanted, or no list
    PackedWeight embedding;
    float* x;                 // [m][inputs]
    int blocks;
    int vocab;
    int ring_size;            // a power of two
};

constexpr int THREADS = 1024;
constexpr int LIST = 4096;
constexpr int EACH = LIST / THREADS;   // keys of the lists that a thread holds
// Tokens that are looked at first where top-k does not say how many matter: most of any nucleus.
constexpr int NARROW = 256;
constexpr uint32_t NOT_FINITE = 0xfffffffe;   // instead of a token

struct Shared {
    unsigned long long list[LIST];   // keys: logit, then lower ids first
    unsigned long long histogram[256];
    double part[32];
    unsigned long long top[32];
    unsigned long long left;
    double rest;
    double range_weight;
    int count;
    int chosen;
    uint32_t threshold;
};

// Order of floats as integers.
DEVICE uint32_t ordered(float f) {
    const uint32_t b = __float_as_uint(f);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
DEVICE float unordered(uint32_t k) {
    return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}
DEVICE unsigned long long key_of(float logit, int id) {
    return static_cast<unsigned long long>(ordered(logit)) << 32 | uint32_t(~id);
}

template <class T, class F>
DEVICE T block_reduce(T v, T* part, T none, F combine) {
#pragma unroll 1
    for (int m = 16; m > 0; m >>= 1) v = combine(v, __shfl_xor_sync(~0u, v, m));
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < THREADS / 32 ? part[threadIdx.x % 32] : none;
#pragma unroll 1
    for (int m = 16; m > 0; m >>= 1) v = combine(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

DEVICE double block_sum(double v, Shared& s) {
    return block_reduce(v, s.part, 0.0, [](double a, double b) { return a + b; });
}

// Sum over the threads before this one; `total` over all.
DEVICE double block_scan(double v, Shared& s, double& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double sum = v;
#pragma unroll 1
    for (int m = 1; m < 32; m <<= 1) {
        const double o = __shfl_up_sync(~0u, sum, m);
        if (lane >= m) sum += o;
    }
    __syncthreads();
    if (lane == 31) s.part[warp] = sum;
    __syncthreads();
    double before = 0.0;
    total = 0.0;
    for (int i = 0; i < THREADS / 32; i++) {
        if (i < warp) before += s.part[i];
        total += s.part[i];
    }
    return before + sum - v;
}

// Philox4x32-10; the first two words.
DEVICE void philox(const uint32_t (&seed)[2], unsigned long long counter, const uint32_t (&stream)[2], uint32_t& w0, uint32_t& w1) {
    uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = stream[0], c3 = stream[1];
    uint32_t k0 = seed[0], k1 = seed[1];
#pragma unroll 1
    for (int i = 0; i < 10; i++) {
        const uint32_t h0 = __umulhi(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u;
        const uint32_t h1 = __umulhi(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    w0 = c0, w1 = c1;
}

// The logits as the sampler sees them.
struct Logits {
    const float* logits;
    const uint8_t* seen;
    const Sampling& how;

    DEVICE float get(int i) const {
        float x = __ldcg(logits + i);
        if (how.penalties) {
            const uint8_t state = __ldcg(seen + i);
            if (state) x = x > 0.f ? x / how.repetition : x * how.repetition;
            if (state == 2) x -= how.presence;
        }
        return x;
    }
};

// Sorts the first `n` (a power of two) of the list, greatest first.
DEVICE void sort(unsigned long long* list, int n) {
#pragma unroll 1
    for (int size = 2; size <= n; size <<= 1) {
#pragma unroll 1
        for (int stride = size / 2; stride > 0; stride >>= 1) {
            __syncthreads();
            for (int i = threadIdx.x; i < n / 2; i += THREADS) {
                const int a = 2 * i - (i & (stride - 1)), b = a + stride;
                const unsigned long long x = list[a], y = list[b];
                if ((x < y) == ((a & size) == 0)) list[a] = y, list[b] = x;
            }
        }
    }
    __syncthreads();
}

DEVICE int power_of_two(int n) {
    int p = 1;
    while (p < n) p <<= 1;
    return p;
}

// A threshold that at least `want` of the listed keys reach, and few more where they differ:
// `low` if no more are listed. `mine` are this thread's keys, zero where it has none.
DEVICE uint32_t narrow(const unsigned long long (&mine)[EACH], int listed, int want, uint32_t low, uint32_t top) {
    const int enough = max(2 * want, 64);
    if (listed <= enough) return low;
    uint32_t high = top + 1;   // fewer than `want` reach it
#pragma unroll 1
    while (high - low > 1) {
        const uint32_t mid = low + (high - low) / 2;
        int count = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) count += __syncthreads_count(uint32_t(mine[i] >> 32) >= mid);
        if (count < want) {
            high = mid;
        } else {
            low = mid;
            if (count <= enough) break;
        }
    }
    return low;
}

// Makes the list of all keys from `threshold` up.
DEVICE void list_from(const unsigned long long (&mine)[EACH], uint32_t threshold, Shared& s) {
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (mine[i] != 0 && uint32_t(mine[i] >> 32) >= threshold) s.list[atomicAdd(&s.count, 1)] = mine[i];
    __syncthreads();
}

// Draws from the sorted list, which holds all tokens from `complete` up; false if others matter.
// `peak` is the greatest logit, `total` the weight of all tokens.
DEVICE bool draw_from_list(const Sampling& how, Shared& s, int vocab, float peak, float complete, double total, double u) {
    const float scale = 1.f / how.temperature;
    const bool limits_k = how.top_k > 0 && how.top_k < vocab;
    int n = s.count;
    auto weight = [&](unsigned long long key) { return double(__expf((unordered(uint32_t(key >> 32)) - peak) * scale)); };
    auto pad = [&](int from) {
        const int size = power_of_two(from);
        __syncthreads();
        for (int i = from + threadIdx.x; i < size; i += THREADS) s.list[i] = 0;
        return size;
    };
    sort(s.list, pad(n));
    if (limits_k) {
        if (n < how.top_k) return false;
        n = how.top_k;
    }
    // Four consecutive tokens a thread.
    const int first = threadIdx.x * EACH;
    if (how.top_p < 1.f) {
        double sum = 0.0, all;
        for (int i = first; i < min(first + EACH, n); i++) sum += weight(s.list[i]);
        double before = block_scan(sum, s, all);
        const double target = double(how.top_p) * (limits_k ? all : total);
        if (!limits_k && all < target) return false;
        __syncthreads();
        if (threadIdx.x == 0) s.chosen = n;
        __syncthreads();
        for (int i = first; i < min(first + EACH, n); i++) {
            before += weight(s.list[i]);
            if (before >= target) {
                atomicMin(&s.chosen, i + 1);
                break;
            }
        }
        __syncthreads();
        n = s.chosen;
    }
    if (how.min_p > 0.f) {
        const float floor = peak + how.temperature * __logf(how.min_p);
        if (!limits_k && how.top_p >= 1.f && floor < complete) return false;
        __syncthreads();
        if (threadIdx.x == 0) s.chosen = n;
        __syncthreads();
        for (int i = max(1, int(threadIdx.x)); i < n; i += THREADS)
            if (unordered(uint32_t(s.list[i] >> 32)) < floor) atomicMin(&s.chosen, i);
        __syncthreads();
        n = s.chosen;
    }
    // By id: the key becomes (~id, logit).
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) s.list[i] = s.list[i] << 32 | s.list[i] >> 32;
    sort(s.list, pad(n));
    auto weight_by_id = [&](unsigned long long key) { return double(__expf((unordered(uint32_t(key)) - peak) * scale)); };
    double sum = 0.0, all;
    for (int i = first; i < min(first + EACH, n); i++) sum += weight_by_id(s.list[i]);
    double before = block_scan(sum, s, all);
    __syncthreads();
    if (threadIdx.x == 0) s.chosen = n - 1;
    __syncthreads();
    for (int i = first; i < min(first + EACH, n); i++) {
        before += weight_by_id(s.list[i]);
        if (before > u * all) {
            atomicMin(&s.chosen, i);
            break;
        }
    }
    __syncthreads();
    const int id = int(~uint32_t(s.list[s.chosen] >> 32));
    __syncthreads();
    if (threadIdx.x == 0) s.chosen = id;
    __syncthreads();
    return true;
}

// Adds, over tokens whose key's upper bits equal `prefix` above `shift + 8`, one or their
// weight to the histogram of the next eight bits, and descends to the digit in which the
// `s.left`-th unit (counted from the greatest key) lies.
template <bool MASS>
DEVICE void descend(const Logits& logits, Shared& s, int vocab, uint32_t floor_key, float peak, float scale) {
    uint32_t prefix = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += THREADS) s.histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += THREADS) {
            const float x = logits.get(i);
            const uint32_t k = ordered(x);
            if (k < floor_key || (shift < 24 && k >> (shift + 8) != prefix >> (shift + 8))) continue;
            const unsigned long long unit = MASS ? static_cast<unsigned long long>(double(__expf((x - peak) * scale)) * double(1ull << 40)) : 1ull;
            atomicAdd(&s.histogram[k >> shift & 255], unit);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (digit > 0 && s.histogram[digit] < s.left) s.left -= s.histogram[digit--];
            s.threshold = prefix | uint32_t(digit) << shift;
        }
        __syncthreads();
        prefix = s.threshold;
    }
}

// Draws by radix selection over all logits.
DEVICE void draw_from_all(const Logits& logits, Shared& s, int vocab, float peak, double u) {
    const Sampling& how = logits.how;
    const float scale = 1.f / how.temperature;
    // Kept: keys above `cut`, and of those equal to it the first `ties` by id.
    uint32_t cut = 0;
    unsigned long long ties = ~0ull;
    if (how.top_k > 0 && how.top_k < vocab) {
        __syncthreads();
        if (threadIdx.x == 0) s.left = how.top_k;
        descend<false>(logits, s, vocab, 0, peak, scale);
        cut = s.threshold;
        ties = s.left;
    }
    auto unit = [&](float x) { return static_cast<unsigned long long>(double(__expf((x - peak) * scale)) * double(1ull << 40)); };
    if (how.top_p < 1.f) {
        unsigned long long sum = 0;
        for (int i = threadIdx.x; i < vocab; i += THREADS) {
            const float x = logits.get(i);
            if (ordered(x) > cut) sum += unit(x);
        }
        sum = block_reduce(sum, s.top, 0ull, [](unsigned long long a, unsigned long long b) { return a + b; });
        const unsigned long long tie = unit(unordered(cut));
        if (cut > 0) sum += ties * tie;
        __syncthreads();
        if (threadIdx.x == 0) s.left = max(1ull, static_cast<unsigned long long>(double(how.top_p) * double(sum)));
        descend<true>(logits, s, vocab, cut, peak, scale);
        const uint32_t mass_cut = s.threshold;
        const unsigned long long each = max(1ull, unit(unordered(mass_cut)));
        const unsigned long long more = (s.left + each - 1) / each;
        if (mass_cut > cut || cut == 0) cut = mass_cut, ties = more;
        else ties = min(ties, more);
    }
    if (how.min_p > 0.f) {
        const uint32_t floor = ordered(peak + how.temperature * __logf(how.min_p));
        if (floor > cut) cut = floor, ties = ~0ull;
    }
    // Consecutive ids a thread: ties are counted, then weights summed, in id order.
    const int per = (vocab + THREADS - 1) / THREADS;
    const int begin = min(int(threadIdx.x) * per, vocab), end = min(begin + per, vocab);
    double equal = 0.0, all;
    for (int i = begin; i < end; i++) equal += ordered(logits.get(i)) == cut;
    double tied = block_scan(equal, s, all);
    const double first_tied = tied;
    auto walk = [&](auto&& visit) {
        tied = first_tied;
        for (int i = begin; i < end; i++) {
            const float x = logits.get(i);
            const uint32_t k = ordered(x);
            const bool kept = k > cut || (k == cut && tied < double(ties));
            tied += k == cut;
            if (kept && !visit(i, double(__expf((x - peak) * scale)))) break;
        }
    };
    double sum = 0.0;
    walk([&](int, double w) { sum += w; return true; });
    double before = block_scan(sum, s, all);
    __syncthreads();
    if (threadIdx.x == 0) s.chosen = vocab;
    __syncthreads();
    int last = -1;
    walk([&](int i, double w) {
        last = i;
        before += w;
        if (before > u * all) {
            atomicMin(&s.chosen, i);
            return false;
        }
        return true;
    });
    // Rounding may leave u past the last sum: then the last token that is kept.
    __syncthreads();
    const bool found = s.chosen < vocab;
    __syncthreads();
    if (!found && threadIdx.x == 0) s.chosen = -1;
    __syncthreads();
    if (!found && last >= 0) atomicMax(&s.chosen, last);
    __syncthreads();
}

// Draws from all tokens, unfiltered: ranges lie in id order, so their sums say which holds the
// token.
DEVICE void draw_unfiltered(const Range* ranges, int vocab, const Logits& logits, Shared& s, float peak, double u) {
    const float scale = 1.f / logits.how.temperature;
    const int r = threadIdx.x;
    double weight = 0.0, all;
    if (r < RANGES) weight = double(__ldcg(&ranges[r].sum)) * double(__expf((__ldcg(&ranges[r].peak) - peak) * scale));
    const double before = block_scan(weight, s, all);
    __syncthreads();
    if (threadIdx.x == 0) s.chosen = 2 * RANGES + 1;
    __syncthreads();
    // Rounding may leave u past the last sum: then the last range of any weight.
    if (weight > 0.0) atomicMin(&s.chosen, before + weight > u * all ? r : RANGES + RANGES - r);
    __syncthreads();
    const int range = s.chosen > RANGES ? 2 * RANGES - s.chosen : s.chosen;
    if (r == range) s.rest = u * all - before, s.range_weight = weight;
    __syncthreads();
    const double rest = s.rest, range_weight = s.range_weight;
    const int per = (vocab + RANGES - 1) / RANGES, each = (per + THREADS - 1) / THREADS;
    const int start = range * per, stop = min(start + per, vocab);
    const int begin = min(start + int(threadIdx.x) * each, stop), end = min(begin + each, stop);
    double sum = 0.0;
    for (int i = begin; i < end; i++) sum += double(__expf((logits.get(i) - peak) * scale));
    double total;
    double walked = block_scan(sum, s, total);
    const double target = rest / range_weight * total;   // the range's own sum was rounded
    __syncthreads();
    if (threadIdx.x == 0) s.chosen = stop - 1;
    __syncthreads();
    for (int i = begin; i < end; i++) {
        walked += double(__expf((logits.get(i) - peak) * scale));
        if (walked > target) {
            atomicMin(&s.chosen, i);
            break;
        }
    }
    __syncthreads();
}

struct CandidateArgs {
    const float* logits;       // [m][vocab]
    const Sampling* sampling;  // [m]
    const uint8_t* seen;       // [m][vocab]
    Range* ranges;             // [m][RANGES]
    int vocab;                 // at most RANGES * RANGE_THREADS * RANGE_PER_THREAD
};

// The best of each range of tokens. Grid (RANGES, m).
extern "C" __global__ __launch_bounds__(RANGE_THREADS) void candidates(const __grid_constant__ CandidateArgs p) {
    constexpr int WARPS = RANGE_THREADS / 32;
    __shared__ uint32_t keys[2][WARPS];
    __shared__ int counts[2][WARPS];
    __shared__ float sums[WARPS];
    __shared__ int listed;
    release_successor();
    wait_for_predecessor();
    const int row = blockIdx.y;
    const Sampling how = p.sampling[row];
    const Logits logits{p.logits + size_t(row) * p.vocab, p.seen + size_t(row) * p.vocab, how};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int per = (p.vocab + RANGES - 1) / RANGES, start = blockIdx.x * per, n = max(0, min(per, p.vocab - start));

    float x[RANGE_PER_THREAD];
    uint32_t key[RANGE_PER_THREAD], most = 0, least = ~0u;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < RANGE_PER_THREAD; i++) {
        const int at = i * RANGE_THREADS + threadIdx.x;
        key[i] = 0;
        if (at < n) {
            x[i] = logits.get(start + at);
            bad |= isnan(x[i]);
            key[i] = ordered(x[i]);
            most = max(most, key[i]);
            least = min(least, key[i]);
        }
    }
    most = __reduce_max_sync(~0u, most);
    least = __reduce_min_sync(~0u, least);
    if (lane == 0) keys[0][warp] = most, keys[1][warp] = least;
    if (threadIdx.x == 0) listed = 0;
    bad = __syncthreads_or(bad);
    for (int i = 0; i < WARPS; i++) most = max(most, keys[0][i]), least = min(least, keys[1][i]);
    const float peak = unordered(most), scale = how.temperature > 0.f ? 1.f / how.temperature : 0.f;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < RANGE_PER_THREAD; i++)
        if (key[i] > 0 && peak > -INFINITY) sum += __expf((x[i] - peak) * scale);
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
        for (int i = 0; i < RANGE_PER_THREAD; i++) count += key[i] >= mid;
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
    Range& to = p.ranges[row * RANGES + blockIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RANGE_PER_THREAD; i++)
        if (key[i] > 0 && key[i] >= high)
            to.list[atomicAdd(&listed, 1)] = key_of(x[i], start + i * RANGE_THREADS + threadIdx.x);
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

extern "C" __global__ __launch_bounds__(THREADS) void advance(const __grid_constant__ AdvanceArgs p) {
    extern __shared__ uint4 dynamic_shared[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
    release_successor();
    wait_for_predecessor();
    const int row = blockIdx.x;
    const Sampling how = p.sampling[row];
    const Step step = p.step[row];
    const Logits logits{p.logits + size_t(row) * p.vocab, p.seen + size_t(row) * p.vocab, how};
    const Range* const ranges = p.ranges ? p.ranges + row * RANGES : nullptr;
    const bool greedy = how.temperature == 0.f || how.top_k == 1;

    unsigned long long top = 0, mine[EACH] = {};
    uint32_t complete = 0;   // key from which on the lists are complete
    int listed = 0;
    bool bad = false;
    auto larger = [](unsigned long long a, unsigned long long b) { return a > b ? a : b; };
    if (ranges) {
        const int r = threadIdx.x;
        if (r < RANGES) {
            bad = __ldcg(&ranges[r].count) < 0;
            complete = __ldcg(&ranges[r].threshold);
        }
        bad = __syncthreads_or(bad);
        complete = uint32_t(block_reduce(static_cast<unsigned long long>(complete), s.top, 0ull, larger));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = i * THREADS + threadIdx.x, range = at / RANGE_LIST;
            if (at % RANGE_LIST < __ldcg(&ranges[range].count)) {
                const unsigned long long key = __ldcg(&ranges[range].list[at % RANGE_LIST]);
                if (key >> 32 >= complete) mine[i] = key;
            }
            top = larger(top, mine[i]);
            listed += __syncthreads_count(mine[i] != 0);
        }
        top = block_reduce(top, s.top, 0ull, larger);
    }
    // Many equal logits may leave the lists empty.
    if (!ranges && !how.penalties) {
        for (int i = threadIdx.x; i < p.blocks; i += THREADS) {
            const float2 b = __ldcg(p.best + row * p.blocks + i);
            top = larger(top, key_of(b.x, __float_as_int(b.y)));
        }
        top = block_reduce(top, s.top, 0ull, larger);
    } else if (listed == 0) {
        for (int i = threadIdx.x; i < p.vocab; i += THREADS) {
            const float x = logits.get(i);
            bad |= isnan(x);
            top = larger(top, key_of(x, i));
        }
        top = block_reduce(top, s.top, 0ull, larger);
    }
    const float peak = unordered(uint32_t(top >> 32));
    bad = __syncthreads_or(bad) || !isfinite(peak);
    uint32_t token = ~uint32_t(top);
    if (!greedy && !bad) {
        const unsigned long long position = (static_cast<unsigned long long>(how.position[1]) << 32 | how.position[0]) + step.drawn;
        uint32_t w0, w1;
        philox(how.seed, position, how.stream, w0, w1);
        const double u = double(static_cast<unsigned long long>(w0) << 21 | w1 >> 11) * 0x1p-53;
        const float scale = 1.f / how.temperature;
        const bool filtered = (how.top_k > 0 && how.top_k < p.vocab) || how.top_p < 1.f || how.min_p > 0.f;
        if (ranges && !filtered) {
            draw_unfiltered(ranges, p.vocab, logits, s, peak, u);
        } else {
            bool drawn = false;
            if (listed > 0) {
                double total = 0.0;
                if (threadIdx.x < RANGES) {
                    const Range& r = ranges[threadIdx.x];
                    total = double(__ldcg(&r.sum)) * double(__expf((__ldcg(&r.peak) - peak) * scale));
                }
                total = block_sum(total, s);
                // Few are sorted first, all that are listed only where those do not suffice.
                const int want = how.top_k > 0 && how.top_k < p.vocab ? how.top_k : NARROW;
                uint32_t from = narrow(mine, listed, want, complete, uint32_t(top >> 32));
                list_from(mine, from, s);
                drawn = draw_from_list(how, s, p.vocab, peak, unordered(from), total, u);
                if (!drawn && from > complete) {
                    list_from(mine, complete, s);
                    drawn = draw_from_list(how, s, p.vocab, peak, unordered(complete), total, u);
                }
            }
            if (!drawn) draw_from_all(logits, s, p.vocab, peak, u);
        }
        token = uint32_t(s.chosen);
    }
    if (bad) token = 0;
    if (threadIdx.x == 0) {
        if (how.penalties) p.seen[size_t(row) * p.vocab + token] = 2;
        Step now = step;
        now.position++;
        now.drawn++;
        now.token = token;
        p.step[row] = now;
        p.ring[row * p.ring_size + (step.drawn & (p.ring_size - 1))] = bad ? NOT_FINITE : token;
        __threadfence_system();
    }
    for (int k0 = 0; k0 < p.embedding.inputs; k0 += THREADS) {
        const int k = k0 + threadIdx.x;
        const float v = k < p.embedding.inputs ? element(p.embedding, int(token), k) : 0.f;
        if (k < p.embedding.inputs) p.x[size_t(row) * p.embedding.inputs + k] = v;
    }
}
