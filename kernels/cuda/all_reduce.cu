// All-reduce over the ranks of a model: GPUs that each have a part of every layer (Shoeybi et al., arXiv 1909.08053).
//
//   x[i] += v_0[i] + v_1[i] + ..      v_r[i] = parts[0][i] + parts[1][i] + .. of rank r
//
// on all ranks in the same order, so that x stays the same on all of them, bit for bit.
//
// Each rank writes its values into an inbox on every other rank, and reads its own. An inbox has a place for each
// rank, twice: calls take turns. Whoever writes for call n + 2 has read what all ranks wrote for call n + 1, which
// they did after they had read everything of call n. Calls are counted on the device, because one graph serves
// many of them; all ranks make the same calls.
//
// A rank waits a limited time for the others: then it gives up for good, and tells the host.
//
// Bytes: parts and x once; of words 8 a value to each other rank, of rows 4.
#include "common.cuh"

constexpr int MOST_RANKS = 8;
constexpr int THREADS = 256;
// Values of which a rank tells the others together.
constexpr int CHUNK = 4096;
// How long a rank waits for another, in nanoseconds.
constexpr uint64_t PATIENCE = 20'000'000'000;

// What a rank keeps between calls.
struct AllReduceTurn {
    uint32_t calls;   // so far
    uint32_t done;    // blocks of this call
    uint32_t lost;    // set once it has given up
};

struct AllReduceArgs {
    float* x;                 // [n]
    float* parts;             // [count][n]
    void* inbox;              // [2][ranks][most]: words or values
    uint32_t* flags;          // [2][ranks][most / CHUNK rounded up]: the call whose chunk is there; of rows only
    void* out[MOST_RANKS];    // the inboxes of all ranks
    uint32_t* told[MOST_RANKS];   // their flags
    AllReduceTurn* turn;
    uint32_t* lost;           // for the host
    int n;                    // a multiple of 4
    int count;
    int most;                 // a multiple of 4
    int rank;
    int ranks;
    int clear;                // set parts to zero
};

// Values that other GPUs write, and that they read.
DEVICE void store_word(uint64_t* to, float2 v, uint32_t stamp) {
    const uint64_t word = uint64_t(stamp) << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(word | __float_as_uint(v.x)), "l"(word | __float_as_uint(v.y)) : "memory");
}
DEVICE uint4 load_words(const uint64_t* p) {
    uint64_t a, b;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    return make_uint4(uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32));
}
DEVICE void store_flag(uint32_t* to, uint32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory"); }
DEVICE uint32_t load_flag(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// A rank's patience.
struct Waiting {
    const AllReduceArgs& p;
    bool lost;

    DEVICE explicit Waiting(const AllReduceArgs& p) : p(p), lost(__ldcg(&p.turn->lost) != 0) {}

    // Until `there` is true.
    template <class F>
    DEVICE void until(F there) {
        uint64_t begin = 0;
#pragma unroll 1
        for (uint32_t tries = 1; !there() && !lost; tries++) {
            if (tries % 1024 > 0) continue;
            const uint64_t now = nanoseconds();
            if (begin == 0) begin = now;
            if (now - begin < PATIENCE) continue;
            lost = true;
            p.turn->lost = 1;
            *p.lost = 1;
            __threadfence_system();
        }
    }
};

// The number of a call. Blocks are counted when they have read it, and the last one counts the call when it ends.
struct Call {
    uint32_t number, before = 0;

    DEVICE explicit Call(const AllReduceArgs& p) : number(__ldcg(&p.turn->calls) + 1) {
        __syncthreads();
        if (threadIdx.x == 0) before = atomicAdd(&p.turn->done, 1u);
    }
    DEVICE void end(const AllReduceArgs& p) const {
        if (threadIdx.x > 0 || before + 1 < gridDim.x) return;
        p.turn->done = 0;
        p.turn->calls = number;
    }
};

DEVICE void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }
DEVICE void add(float2& to, const float2& v) { to.x += v.x, to.y += v.y; }

// Vector i of this rank's values; V: of two or four.
template <class V>
DEVICE V own_values(const AllReduceArgs& p, int i) {
    V v = {};
#pragma unroll 1
    for (int j = 0; j < p.count; j++) add(v, __ldcg(reinterpret_cast<const V*>(p.parts + size_t(j) * p.n) + i));
    return v;
}
template <class V>
DEVICE void clear_values(const AllReduceArgs& p, int i) {
#pragma unroll 1
    for (int j = 0; j < p.count; j++) reinterpret_cast<V*>(p.parts + size_t(j) * p.n)[i] = V{};
}

// Adds to vector i of x what the ranks have: this one `own`, the others what `of` gives.
template <class V, class F>
DEVICE void add_ranks(const AllReduceArgs& p, int i, V own, F of) {
    V sum = {};
#pragma unroll 1
    for (int r = 0; r < p.ranks; r++) add(sum, r == p.rank ? own : of(r));
    V* const x = reinterpret_cast<V*>(p.x) + i;
    V v = __ldcg(x);
    add(v, sum);
    *x = v;
    if (p.clear) clear_values<V>(p, i);
}

// Few values, as words of a value and the number of the call: nothing else says that they have come. What a warp stores at once
// lies together, 512 bytes: links between GPUs carry longer packets then.
extern "C" __global__ __launch_bounds__(THREADS) void all_reduce_words(const __grid_constant__ AllReduceArgs p) {
    release_successor();
    wait_for_predecessor();
    const Call call(p);
    const size_t half = size_t(call.number & 1) * p.ranks * p.most;
    Waiting waiting(p);
    const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    float2 own = {};
#pragma unroll 1
    for (int i = first; i < p.n / 2; i += step) {
        own = own_values<float2>(p, i);
#pragma unroll 1
        for (int r = 0; r < p.ranks; r++)
            if (r != p.rank) store_word(static_cast<uint64_t*>(p.out[r]) + half + size_t(p.rank) * p.most + 2 * i, own, call.number);
    }
#pragma unroll 1
    for (int i = first; i < p.n / 2; i += step) {
        if (p.n / 2 > step) own = own_values<float2>(p, i);
        add_ranks(p, i, own, [&](int r) {
            const uint64_t* const from = static_cast<const uint64_t*>(p.inbox) + half + size_t(r) * p.most + 2 * i;
            uint4 w;
            waiting.until([&] {
                w = load_words(from);
                return w.y == call.number && w.w == call.number;
            });
            return make_float2(__uint_as_float(w.x), __uint_as_float(w.z));
        });
    }
    call.end(p);
}

// Many values, of which a flag for each chunk says that they have come. A block sends a chunk before it adds the one
// that it has sent before.
extern "C" __global__ __launch_bounds__(THREADS) void all_reduce_rows(const __grid_constant__ AllReduceArgs p) {
    wait_for_predecessor();
    const Call call(p);
    const int most_chunks = (p.most + CHUNK - 1) / CHUNK, chunks = (p.n + CHUNK - 1) / CHUNK;
    const size_t half = size_t(call.number & 1) * p.ranks;
    Waiting waiting(p);
#pragma unroll 1
    for (int c = blockIdx.x; c < chunks + int(gridDim.x); c += gridDim.x) {
        if (c < chunks) {
            const int end = min((c + 1) * CHUNK, p.n) / 4;
#pragma unroll 2
            for (int i = c * (CHUNK / 4) + threadIdx.x; i < end; i += THREADS) {
                const float4 v = own_values<float4>(p, i);
#pragma unroll 1
                for (int r = 0; r < p.ranks; r++)
                    if (r != p.rank) *reinterpret_cast<float4*>(static_cast<float*>(p.out[r]) + (half + p.rank) * p.most + 4 * i) = v;
            }
        }
        __syncthreads();
        const int before = c - int(gridDim.x);
        if (threadIdx.x < p.ranks && threadIdx.x != p.rank) {
            if (c < chunks) {
                __threadfence_system();
                store_flag(p.told[threadIdx.x] + (half + p.rank) * most_chunks + c, call.number);
            }
            if (before >= 0) {
                const uint32_t* const flag = p.flags + (half + threadIdx.x) * most_chunks + before;
                waiting.until([&] { return load_flag(flag) == call.number; });
            }
        }
        __syncthreads();
        if (before < 0) continue;
        const int end = min((before + 1) * CHUNK, p.n) / 4;
#pragma unroll 1
        for (int i = before * (CHUNK / 4) + threadIdx.x; i < end; i += THREADS)
            add_ranks(p, i, own_values<float4>(p, i), [&](int r) {
                const float* const inbox = static_cast<const float*>(p.inbox) + (half + r) * p.most;
                return __ldcv(reinterpret_cast<const float4*>(inbox) + i);
            });
    }
    call.end(p);
}
