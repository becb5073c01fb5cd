// Collective operations of the ranks of a model: GPUs that each have a part of every layer (Shoeybi et al.,
// arXiv 1909.08053), or some of the layers.
//
//   all_reduce   x[i] += v_0[i] + v_1[i] + ..      v_r[i] = parts[0][i] + parts[1][i] + .. of rank r
//   all_gather   to[row][c] = from_r[row][c - first_r]    of the rank r that has column c
//
// on all ranks in the same order, so that the results are the same on all of them, bit for bit.
//
// Each rank writes its values into a ring of every other rank's inbox, and reads its own inbox. A value says itself that it
// has come: the last bit of its mantissa, which is not sent, tells the laps around the ring apart. All values of a lap are
// written, so what lies in a place before is always of the lap before.
//
// A ring has room for two calls. Whoever writes for call n + 2 has read what all ranks wrote for call n + 1, which they did
// after they had read everything of call n. So in every call each rank sends something to each other one. Places are counted on
// the device, because one CUDA graph serves many calls; all ranks make the same calls.
//
// A rank waits a limited time for the others: then it gives up for good, and tells the host.
//
// Bytes: of all_reduce, parts and x once; of all_gather, all values once; 4 a value to each other rank.
#include "sampling.cuh"

constexpr int MOST_RANKS = 8;
// How long a rank waits for another, in nanoseconds.
constexpr uint64_t PATIENCE = 20'000'000'000;

constexpr int THREADS = 256;
// Blocks on a multiprocessor, which all wait for blocks of other ranks at the same time.
constexpr int BLOCKS_EACH = 2;
// Vectors that a thread sends before it waits for the first of them.
constexpr int AHEAD = 4;

// What a rank keeps between calls.
struct RankTurn {
    uint32_t done;   // blocks of this call
    uint32_t lost;   // set once it has given up
    uint32_t at[MOST_RANKS];   // vectors that each rank has sent to each other one so far, modulo two laps
};

// A rank and its ways to the others. Vectors are of four values.
struct RankArgs {
    uint4* inbox;               // [ranks][ring]
    uint4* out[MOST_RANKS];     // the inboxes of all ranks
    RankTurn* turn;
    uint32_t* lost;             // for the host
    int ring;                   // at least twice the vectors that a rank sends in a call
    int rank;
    int ranks;
};

struct AllReduceArgs {
    RankArgs ranks;
    float* x;                 // [n]
    float* parts;             // [count][n]
    int n;                    // a multiple of 4
    int count;
    int clear;                // set parts to zero
};

struct AllGatherArgs {
    RankArgs ranks;
    const float* from;        // [rows][this rank's columns]
    float* to;                // [rows][width]
    float2* best;             // [rows][segments], the greatest value of a segment and its column (as bits), the first of equals; or null
    int rows;
    int width;                // a multiple of 4
    int segments;             // parts of a row
    int first[MOST_RANKS];    // column of each rank, a multiple of 4
    int columns[MOST_RANKS];  // a multiple of 4
};

DEVICE void store_vector(uint4* to, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint4 load_vector(const uint4* p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

DEVICE void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }
DEVICE float sent(float v) { return __uint_as_float(__float_as_uint(v) & ~1u); }
// The values as other ranks get them.
DEVICE float4 sent(float4 v) { return make_float4(sent(v.x), sent(v.y), sent(v.z), sent(v.w)); }

// A place of a ring, and the bit of the values of this lap.
struct Place {
    uint32_t at, lap;

    DEVICE Place(uint32_t passed, int ring) : at(passed), lap(1) {
        if (at >= 2 * uint32_t(ring)) at -= 2 * ring;
        if (at >= uint32_t(ring)) at -= ring, lap = 0;
    }
    DEVICE bool has(const uint4& v) const { return (v.x & 1) == lap && (v.y & 1) == lap && (v.z & 1) == lap && (v.w & 1) == lap; }
};

// A call of a rank. Blocks are counted when they have read where it begins, and the last one moves all ranks' places
// on when it ends.
struct Call {
    const RankArgs& p;
    uint32_t before = 0;
    bool lost = false;

    DEVICE explicit Call(const RankArgs& p) : p(p) {}

    // Where rank `r` is; of a call, to be asked before `begin`.
    DEVICE uint32_t at(int r) const { return __ldcg(&p.turn->at[r]); }
    DEVICE void begin() {
        lost = __ldcg(&p.turn->lost) != 0;
        __syncthreads();
        if (threadIdx.x == 0) before = atomicAdd(&p.turn->done, 1u);
    }
    // Ends a call in which rank r sends so many vectors.
    template <class F>
    DEVICE void end(F vectors) const {
        if (threadIdx.x > 0 || before + 1 < gridDim.x) return;
        p.turn->done = 0;
#pragma unroll 1
        for (int r = 0; r < p.ranks; r++) p.turn->at[r] = (__ldcg(&p.turn->at[r]) + vectors(r)) % (2 * uint32_t(p.ring));
    }

    // Sends a vector to all other ranks, as the one that is `passed` in all.
    DEVICE void send(uint32_t passed, const float4& v) const {
        const Place place(passed, p.ring);
        const auto word = [&](float x) { return (__float_as_uint(x) & ~1u) | place.lap; };
        const uint4 words = make_uint4(word(v.x), word(v.y), word(v.z), word(v.w));
#pragma unroll 1
        for (int r = 0; r < p.ranks; r++)
            if (r != p.rank) store_vector(p.out[r] + size_t(p.rank) * p.ring + place.at, words);
    }
    // N vectors that rank `r` sends, those that are asked for.
    template <int N>
    DEVICE void receive(int r, const uint32_t (&passed)[N], const bool (&wanted)[N], float4 (&to)[N]) {
        const uint4* const ring = p.inbox + size_t(r) * p.ring;
        uint4 v[N] = {};
#pragma unroll
        for (int u = 0; u < N; u++)
            if (wanted[u]) v[u] = load_vector(ring + Place(passed[u], p.ring).at);
#pragma unroll
        for (int u = 0; u < N; u++) {
            const Place place(passed[u], p.ring);
            uint64_t since = 0;
#pragma unroll 1
            for (uint32_t tries = 1; wanted[u] && !place.has(v[u]) && !lost; tries++) {
                v[u] = load_vector(ring + place.at);
                if (tries % 1024 > 0) continue;
                const uint64_t now = nanoseconds();
                if (since == 0) since = now;
                if (now - since > PATIENCE) give_up();
            }
            to[u] = sent(make_float4(__uint_as_float(v[u].x), __uint_as_float(v[u].y), __uint_as_float(v[u].z), __uint_as_float(v[u].w)));
        }
    }
    DEVICE void give_up() {
        lost = true;
        p.turn->lost = 1;
        *p.lost = 1;
        __threadfence_system();
    }
};

// Adds to x what all ranks have.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_EACH) void all_reduce(const __grid_constant__ AllReduceArgs p) {
    launch_dependents();
    wait_for_prerequisites();
    Call call(p.ranks);
    const int n = p.n / 4, step = gridDim.x * THREADS;
    const auto index = [&](int begin, int u) { return begin + u * step; };
    const auto load = [&](int begin, float4 (&own)[AHEAD]) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            own[u] = {};
            const int i = index(begin, u);
            if (i >= n) continue;
#pragma unroll 1
            for (int j = 0; j < p.count; j++) {
                float4* const part = reinterpret_cast<float4*>(p.parts) + size_t(j) * n + i;
                add(own[u], __ldcg(part));
                if (p.clear) *part = {};
            }
            own[u] = sent(own[u]);
        }
    };
    // All ranks have sent the same.
    const uint32_t at = call.at(0);
    const auto send = [&](int begin, const float4 (&own)[AHEAD]) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (index(begin, u) < n) call.send(at + index(begin, u), own[u]);
    };
    const int first = blockIdx.x * THREADS + threadIdx.x;
    float4 own[AHEAD], next[AHEAD];
    load(first, own);
    call.begin();
    send(first, own);
#pragma unroll 1
    for (int begin = first; begin < n; begin += AHEAD * step) {
        load(begin + AHEAD * step, next);
        send(begin + AHEAD * step, next);
        float4 sum[AHEAD] = {}, x[AHEAD];
        uint32_t passed[AHEAD];
        bool there[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int i = index(begin, u);
            passed[u] = at + i, there[u] = i < n;
            if (there[u]) x[u] = __ldcg(reinterpret_cast<const float4*>(p.x) + i);
        }
#pragma unroll 1
        for (int r = 0; r < p.ranks.ranks; r++) {
            float4 v[AHEAD];
            if (r == p.ranks.rank) {
#pragma unroll
                for (int u = 0; u < AHEAD; u++) add(sum[u], own[u]);
            } else {
                call.receive(r, passed, there, v);
#pragma unroll
                for (int u = 0; u < AHEAD; u++) add(sum[u], v[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (there[u]) add(x[u], sum[u]), reinterpret_cast<float4*>(p.x)[index(begin, u)] = x[u];
            own[u] = next[u];
        }
    }
    call.end([&](int) { return uint32_t(n); });
}

// Gives all ranks the columns of each. A rank that has none sends one vector.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_EACH) void all_gather(const __grid_constant__ AllGatherArgs p) {
    __shared__ uint32_t at[MOST_RANKS];
    __shared__ unsigned long long bests[THREADS / 32];
    launch_dependents();
    wait_for_prerequisites();
    Call call(p.ranks);
    if (threadIdx.x < p.ranks.ranks) at[threadIdx.x] = call.at(threadIdx.x);
    call.begin();
    const int own = p.ranks.rank, own_columns = p.columns[own] / 4, width = p.width / 4;
    const int each = (width + p.segments - 1) / p.segments, items = p.rows * p.segments;
    const float4* const from = reinterpret_cast<const float4*>(p.from);
    // Vector of column c in what rank r sends.
    const auto index = [&](int row, int c, int r) { return row * (p.columns[r] / 4) + c - p.first[r] / 4; };

    if (own_columns == 0 && blockIdx.x == 0 && threadIdx.x == 0) call.send(at[own], {});
#pragma unroll 1
    for (int s = blockIdx.x; s < items && own_columns > 0; s += gridDim.x) {
        const int row = s / p.segments, begin = s % p.segments * each, first = p.first[own] / 4;
        const int end = min(min(begin + each, width), first + own_columns);
#pragma unroll 1
        for (int c = max(begin, first) + threadIdx.x; c < end; c += THREADS) {
            const int i = index(row, c, own);
            call.send(at[own] + i, __ldcg(from + i));
        }
    }
    const auto receive = [&](int r, int i) {
        float4 v[1];
        call.receive<1>(r, {at[r] + i}, {true}, v);
        return v[0];
    };
#pragma unroll 1
    for (int s = blockIdx.x; s < items; s += gridDim.x) {
        const int row = s / p.segments, begin = s % p.segments * each, end = min(begin + each, width);
        unsigned long long best = 0;
#pragma unroll 1
        for (int c = begin + threadIdx.x; c < end; c += THREADS) {
            int r = 0;
#pragma unroll 1
            while (r < p.ranks.ranks && (4 * c < p.first[r] || 4 * c >= p.first[r] + p.columns[r])) r++;
            if (r == p.ranks.ranks) continue;
            const int i = index(row, c, r);
            const float4 v = r == own ? sent(__ldcg(from + i)) : receive(r, i);
            reinterpret_cast<float4*>(p.to)[size_t(row) * width + c] = v;
            // What is not a number is never the greatest.
            const auto key = [](float x, int column) { return key_of(fmaxf(x, -INFINITY), column); };
            best = max(max(best, max(key(v.x, 4 * c), key(v.y, 4 * c + 1))), max(key(v.z, 4 * c + 2), key(v.w, 4 * c + 3)));
        }
        if (p.best == nullptr) continue;
#pragma unroll
        for (int o = 16; o > 0; o /= 2) best = max(best, __shfl_xor_sync(~0u, best, o));
        if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < THREADS / 32; w++) best = max(best, bests[w]);
            p.best[s] = make_float2(unordered(uint32_t(best >> 32)), __int_as_float(int(~uint32_t(best))));
        }
        __syncthreads();
    }
    if (blockIdx.x == 0 && threadIdx.x < p.ranks.ranks && threadIdx.x != own && p.columns[threadIdx.x] == 0) receive(threadIdx.x, 0);
    call.end([&](int r) { return uint32_t(p.columns[r] == 0 ? 1 : p.rows * (p.columns[r] / 4)); });
}
