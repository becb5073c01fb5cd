// The end of a decode step: chooses each sequence's next token from its logits, hands it to the
// host and looks its embedding up. A block a sequence.
//
// The order of mask, biases, penalties, temperature, top-k, top-p, min-p and the draw is that of the
// host's sampler: of equal logits the lowest id is the better one, and the draw inverts the cumulative
// distribution in id order at u = the upper 53 bits of the first two words of Philox block
// (seed, stream, position).
//
// `candidates` lists what may be chosen. A short list one warp sorts and draws from. Otherwise there
// are lists of the best few of each range of tokens: above the greatest threshold of any range they
// are complete together, and nearly always they hold all that top-k, top-p and min-p keep. Where no
// list does (a flat distribution with top-p alone), thresholds are found by radix selection over all
// logits. Sums are in fixed point or in a fixed order, so a seed always gives one token.
//
// Log-probabilities, where they are asked for, are those of the logits as they are: the best of
// GROUPS groups of tokens bound the best of all, so two passes over the logits find sum and best.
//
// Bytes: logits once (greedily only the best of each block of the head), twice more for
// log-probabilities; the embedding's row.
#include "rows.cuh"
#include "shortlist.cuh"
#include "weights.cuh"

struct AdvanceArgs {
    const float* logits;      // [m][vocab]
    const float2* best;       // [m][blocks], of the head
    const Sampling* sampling; // [m]
    Adjustments adjust;
    Step* step;               // [m]
    uint32_t* ring;           // [m][ring_size], read by the host
    Logprobs* logprobs;       // [m][ring_size], likewise, beside tokens whose `Sampling` asks for them
    const Range* ranges;      // [m][RANGES], of `candidates`; null: best tokens are wanted, or no list
    Shortlist* shortlists;    // [m], likewise
    PackedWeight embedding;
    float* x;                 // [m][inputs]
    const uint32_t* ids;      // [vocab]: tokens by the numbers of their logits; null: the same numbers
    int blocks;
    int vocab;
    int ring_size;            // a power of two
    int idle;                 // slot of rows that nobody sits in
    int positions;            // of a sequence: the last is kept
};

constexpr int THREADS = 1024;
constexpr int LIST = 4096;
constexpr int EACH = LIST / THREADS;   // keys of the lists that a thread holds
// Tokens that are looked at first where top-k does not say how many matter: most of any nucleus.
constexpr int NARROW = 256;
// Instead of a token.
constexpr uint32_t NOT_FINITE = 0xfffffffe;
constexpr uint32_t NONE_ALLOWED = 0xfffffffd;
// Groups whose best bound the best of all: MOST_LOGPROBS of them hold at most a list's tokens.
constexpr int GROUPS = 2 * THREADS;

struct Shared {
    unsigned long long list[LIST];   // keys: logit, then lower ids first
    unsigned long long histogram[256];
    double part[32];
    unsigned long long top[32];
    unsigned long long left;
    double rest;
    int count;
    int chosen;
    uint32_t threshold;
    bool bad;
};

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

// The least `found` of any thread or, where none found anything, the greatest `last`; -1 is nothing.
DEVICE int least(Shared& s, int found, int last) {
    constexpr int UNFOUND = 1 << 30;
    __syncthreads();
    if (threadIdx.x == 0) s.chosen = UNFOUND;
    __syncthreads();
    const int mine = __reduce_min_sync(~0u, found >= 0 ? found : last >= 0 ? UNFOUND - last : UNFOUND);
    if (threadIdx.x % 32 == 0 && mine < UNFOUND) atomicMin(&s.chosen, mine);
    __syncthreads();
    return s.chosen > UNFOUND / 2 ? UNFOUND - s.chosen : s.chosen;
}

// The block as a team of `draw_sorted`: element e is thread e / EACH's e % EACH-th.
struct BlockTeam {
    Shared& s;

    DEVICE int at(int i) const { return int(threadIdx.x) * EACH + i; }

    // The first `n` keys; the others are zero.
    DEVICE void sort(unsigned long long (&key)[EACH], int n) const {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; i++) s.list[at(i)] = key[i];
        ::sort(s.list, power_of_two(n));
        load(key, n);
    }

    DEVICE void load(unsigned long long (&key)[EACH], int n) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) key[i] = at(i) < n ? s.list[at(i)] : 0;
    }

    DEVICE double scan(double (&v)[EACH]) const {
        double sum = 0.0, all;
#pragma unroll
        for (int i = 0; i < EACH; i++) sum += v[i];
        double before = block_scan(sum, s, all);
#pragma unroll
        for (int i = 0; i < EACH; i++) v[i] = before += v[i];
        return all;
    }

    template <class F>
    DEVICE int first(int most, F test) const {
        int found = -1;
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--)
            if (at(i) < most && test(i)) found = at(i);
        return least(s, found, most);
    }

    DEVICE unsigned long long element(const unsigned long long (&)[EACH], int e) const { return s.list[e]; }
};

// Draws in id order: `walk` visits this thread's tokens, which follow on those of the thread before,
// with their weights, until a visit returns false.
template <class Walk>
DEVICE int draw_in_order(Shared& s, double u, Walk walk) {
    double sum = 0.0, all;
    walk([&](int, double w) { sum += w; return true; });
    double before = block_scan(sum, s, all);
    int found = -1, last = -1;
    walk([&](int i, double w) {
        if (w > 0.0) last = i;
        before += w;
        if (before > u * all) found = i;
        return found < 0;
    });
    // Rounding may leave u past the last sum.
    return least(s, found, last);
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
DEVICE int draw_from_all(const Logits& logits, Shared& s, int vocab, float peak, double u) {
    const Sampling& how = logits.how;
    const float scale = 1.f / how.temperature;
    // Kept: keys above `cut`, and of those equal to it the first `ties` by id.
    uint32_t cut = 0;
    unsigned long long ties = ~0ull;
    if (limits_k(how, vocab)) {
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
    if (cut <= EXCLUDED) cut = EXCLUDED, ties = 0;
    // Consecutive ids a thread: ties are counted, then weights summed, in id order.
    const int per = (vocab + THREADS - 1) / THREADS;
    const int begin = min(int(threadIdx.x) * per, vocab), end = min(begin + per, vocab);
    double equal = 0.0, all;
    for (int i = begin; i < end; i++) equal += ordered(logits.get(i)) == cut;
    const double first_tied = block_scan(equal, s, all);
    return draw_in_order(s, u, [&](auto&& visit) {
        double tied = first_tied;
        for (int i = begin; i < end; i++) {
            const float x = logits.get(i);
            const uint32_t k = ordered(x);
            const bool kept = k > cut || (k == cut && tied < double(ties));
            tied += k == cut;
            if (kept && !visit(i, double(__expf((x - peak) * scale)))) break;
        }
    });
}

// Draws from all tokens, unfiltered: ranges lie in id order, so their sums say which holds the
// token.
DEVICE int draw_unfiltered(const Range* ranges, int vocab, const Logits& logits, Shared& s, float peak, double u) {
    const float scale = 1.f / logits.how.temperature;
    const int r = threadIdx.x;
    double weight = 0.0, all;
    if (r < RANGES) weight = double(__ldcg(&ranges[r].sum)) * double(__expf((__ldcg(&ranges[r].peak) - peak) * scale));
    const double before = block_scan(weight, s, all);
    const bool any = weight > 0.0;
    const int range = least(s, any && before + weight > u * all ? r : -1, any ? r : -1);
    // The range's own sum was rounded: what counts is the share of it that u leaves.
    if (r == range) s.rest = (u * all - before) / weight;
    __syncthreads();
    const double rest = s.rest;
    const int per = (vocab + RANGES - 1) / RANGES, each = (per + THREADS - 1) / THREADS;
    const int start = range * per, stop = min(start + per, vocab);
    const int begin = min(start + int(threadIdx.x) * each, stop), end = min(begin + each, stop);
    return draw_in_order(s, rest, [&](auto&& visit) {
        for (int i = begin; i < end; i++)
            if (!visit(i, double(__expf((logits.get(i) - peak) * scale)))) break;
    });
}

// What the lists of the ranges say: this thread's keys, zero where it has none, and above which
// they are complete together.
struct Listed {
    unsigned long long mine[EACH] = {};
    unsigned long long top = 0;   // of all threads
    uint32_t complete = 0;
    int count = 0;                // of all threads
    bool bad = false;             // a logit is not a number

    DEVICE void read(const Range* ranges, Shared& s) {
        auto larger = [](unsigned long long a, unsigned long long b) { return a > b ? a : b; };
        const int r = threadIdx.x;
        if (r < RANGES) {
            bad = __ldcg(&ranges[r].count) < 0;
            complete = __ldcg(&ranges[r].threshold);
        }
        bad = __syncthreads_or(bad);
        complete = uint32_t(block_reduce(static_cast<unsigned long long>(complete), s.top, 0ull, larger));
        complete = max(complete, EXCLUDED + 1);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = i * THREADS + threadIdx.x, range = at / RANGE_LIST;
            if (at % RANGE_LIST < __ldcg(&ranges[range].count)) {
                const unsigned long long key = __ldcg(&ranges[range].list[at % RANGE_LIST]);
                if (key >> 32 >= complete) mine[i] = key;
            }
            top = larger(top, mine[i]);
            count += __syncthreads_count(mine[i] != 0);
        }
        top = block_reduce(top, s.top, 0ull, larger);
    }
};

// Draws from what the ranges list; -1 if other tokens matter.
DEVICE int draw_from_ranges(const Sampling& how, const Listed& listed, const Range* ranges, Shared& s, int vocab, float peak, double u) {
    if (listed.count == 0) return -1;
    double total = 0.0;
    if (threadIdx.x < RANGES) {
        const Range& r = ranges[threadIdx.x];
        total = double(__ldcg(&r.sum)) * double(__expf((__ldcg(&r.peak) - peak) * (1.f / how.temperature)));
    }
    total = block_sum(total, s);
    const BlockTeam team{s};
    auto draw_from = [&](uint32_t threshold) {
        list_from(listed.mine, threshold, s);
        unsigned long long key[EACH];
        team.load(key, s.count);
        return draw_sorted(team, how, limits_k(how, vocab), key, s.count, threshold, total, u, peak);
    };
    // Few are sorted first, all that are listed only where those do not suffice.
    const int want = limits_k(how, vocab) ? how.top_k : NARROW;
    const uint32_t from = narrow(listed.mine, listed.count, want, listed.complete, uint32_t(listed.top >> 32));
    const int token = draw_from(from);
    return token >= 0 || from == listed.complete ? token : draw_from(listed.complete);
}

// The token to choose; NOT_FINITE if a logit is not, NONE_ALLOWED if mask and biases leave none.
DEVICE uint32_t choose(const AdvanceArgs& p, int row, const Sampling& how, double u, Shared& s) {
    const Logits logits(p.logits, p.adjust, row, p.vocab, how);
    const Range* const ranges = p.ranges ? p.ranges + row * RANGES : nullptr;
    const bool greedy = is_greedy(how);
    const bool few = ranges && shortlist_rank(how, p.vocab, p.blocks) > 0;
    if (few) {
        if (threadIdx.x < 32) {
            const Choice choice = choose_from_few(how, p.vocab, p.shortlists[row], ranges, u);
            if (threadIdx.x == 0) s.chosen = choice.token, s.bad = choice.bad;
        }
        __syncthreads();
        if (s.bad) return NOT_FINITE;
        if (s.chosen >= 0) return s.chosen;
        __syncthreads();
    }
    Listed listed;
    // Of a short list that top-k makes there are no ranges beside it, nor of the best token alone.
    const bool has_ranges = ranges && !(few && limits_k(how, p.vocab)) && !(greedy && !how.adjusts);
    if (has_ranges) listed.read(ranges, s);
    auto larger = [](unsigned long long a, unsigned long long b) { return a > b ? a : b; };
    // Many equal logits may leave the lists empty.
    if (!has_ranges && !how.adjusts) {
        for (int i = threadIdx.x; i < p.blocks; i += THREADS) {
            const float2 b = __ldcg(p.best + row * p.blocks + i);
            listed.top = larger(listed.top, key_of(b.x, __float_as_int(b.y)));
        }
        listed.top = block_reduce(listed.top, s.top, 0ull, larger);
    } else if (listed.count == 0) {
        for (int i = threadIdx.x; i < p.vocab; i += THREADS) {
            const float x = logits.get(i);
            listed.bad |= isnan(x);
            listed.top = larger(listed.top, key_of(x, i));
        }
        listed.top = block_reduce(listed.top, s.top, 0ull, larger);
    }
    const float peak = unordered(uint32_t(listed.top >> 32));
    if (__syncthreads_or(listed.bad)) return NOT_FINITE;
    if (peak == -INFINITY && how.adjusts & (BIASED | MASKED)) return NONE_ALLOWED;
    if (!isfinite(peak)) return NOT_FINITE;
    if (greedy) return ~uint32_t(listed.top);
    if (has_ranges && !is_filtered(how, p.vocab)) return draw_unfiltered(ranges, p.vocab, logits, s, peak, u);
    const int token = has_ranges ? draw_from_ranges(how, listed, ranges, s, p.vocab, peak, u) : -1;
    return token >= 0 ? token : draw_from_all(logits, s, p.vocab, peak, u);
}

// Writes the log-probabilities of `token` and of the `most` best ones; false if a logit is not finite.
DEVICE bool report(const float* logits, int vocab, int token, int most, Logprobs& to, Shared& s) {
    __syncthreads();
    for (int g = threadIdx.x; g < GROUPS; g += THREADS) {
        unsigned long long best = 0;
        for (int i = g; i < vocab; i += GROUPS) best = max(best, key_of(__ldcg(logits + i), i));
        s.list[g] = best;
    }
    sort(s.list, GROUPS);
    const float peak = unordered(uint32_t(s.list[0] >> 32));
    // As many tokens reach it as groups do, or more.
    unsigned long long bound = static_cast<unsigned long long>(EXCLUDED + 1) << 32;
    if (most > 0) bound = max(bound, s.list[most - 1]);
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    double sum = 0.0;
    for (int i = threadIdx.x; i < vocab; i += THREADS) {
        const float x = __ldcg(logits + i);
        sum += double(__expf(x - peak));
        const unsigned long long key = key_of(x, i);
        if (most > 0 && key >= bound) s.list[atomicAdd(&s.count, 1)] = key;
    }
    sum = block_sum(sum, s);
    if (!isfinite(peak) || !isfinite(sum)) return false;
    const int listed = s.count, n = min(most, listed), size = power_of_two(listed);
    for (int i = listed + threadIdx.x; i < size; i += THREADS) s.list[i] = 0;
    sort(s.list, size);
    const double whole = double(peak) + double(logf(float(sum)));
    if (threadIdx.x < n) {
        const unsigned long long key = s.list[threadIdx.x];
        to.ids[threadIdx.x] = int(~uint32_t(key));
        to.values[threadIdx.x] = float(double(unordered(uint32_t(key >> 32))) - whole);
    }
    if (threadIdx.x == 0) {
        to.chosen = float(double(__ldcg(logits + token)) - whole);
        to.count = n;
    }
    // Before the token is.
    __threadfence_system();
    __syncthreads();
    return true;
}

extern "C" __global__ __launch_bounds__(THREADS) void advance(const __grid_constant__ AdvanceArgs p) {
    extern __shared__ uint4 dynamic_shared[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
    launch_dependents();
    // Written before the step was queued, and by the step before: its first product lets nothing
    // overtake that.
    const int row = blockIdx.x;
    const Sampling how = p.sampling[row];
    const Step step = p.step[row];
    const unsigned long long position = (static_cast<unsigned long long>(how.position[1]) << 32 | how.position[0]) + step.drawn;
    uint32_t w0, w1;
    philox(how.seed, position, how.stream, w0, w1);
    const double u = double(static_cast<unsigned long long>(w0) << 21 | w1 >> 11) * 0x1p-53;
    const int place = row * p.ring_size + (step.drawn & (p.ring_size - 1));
    wait_for_prerequisites();

    uint32_t chosen = choose(p, row, how, u, s);
    // Where the lists do not belong to the logits; tokens are followed to memory.
    if (chosen < NONE_ALLOWED && chosen >= uint32_t(p.vocab)) chosen = NOT_FINITE;
    if (how.logprobs > 0 && chosen < NONE_ALLOWED) {
        const int most = min(how.logprobs - 1, MOST_LOGPROBS);
        if (!report(p.logits + size_t(row) * p.vocab, p.vocab, chosen, most, p.logprobs[place], s)) chosen = NOT_FINITE;
    }
    const uint32_t number = chosen < NONE_ALLOWED ? chosen : 0;
    const uint32_t token = p.ids ? p.ids[number] : number;
    if (threadIdx.x == 0) {
        if (how.adjusts & PENALIZED) {
            uint16_t* const seen = p.adjust.seen + size_t(row) * p.vocab + number;
            const uint16_t state = __ldcg(seen);
            if ((state & MOST_COUNTED) < MOST_COUNTED) *seen = state + 1;
        }
        Step now = step;
        // Nobody's row stays where it is, as does one at the end of its sequence's room.
        if (step.slot != p.idle && step.position + 1 < p.positions) now.position++;
        now.drawn++;
        now.behind = 0;
        now.token = token;
        p.step[row] = now;
        p.ring[place] = chosen < NONE_ALLOWED ? token : chosen;
        __threadfence_system();
    }
    for (int k = threadIdx.x; k < p.embedding.inputs; k += THREADS)
        p.x[size_t(row) * p.embedding.inputs + k] = element(p.embedding, int(token), k);
}
