// Stands for `common.cuh` of kernels/cuda on the host: each thread is a fiber, which runs until it has to
// wait for others, so that kernels whose blocks wait for each other run too. Slow, and meant for small
// shapes.
//
// Shared memory of all blocks is one array. An address in it is an offset; the rank of another block of
// the cluster stands above bit 24, plus one. Asynchronous copies to it are made no sooner than they are waited for.
//
// A launch may be of several kernels side by side, as on several GPUs: `this_kernel` tells which one a thread is in.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
#define DEVICE inline
using std::max;
using std::min;

constexpr size_t SHARED_BYTES = 256 << 10;   // of a block
constexpr int WARPS_OF_BLOCK = 32;           // at most
constexpr int BLOCKS_OF_CLUSTER = 8;
constexpr size_t MOST_ROUNDS = 60000;        // of all threads, in one launch: a multiple of what the tests need

[[noreturn]] inline void fail(const char* what);

// Threads.
struct Fiber {
    ucontext_t context;   // where it begins
    jmp_buf at;           // where it waits: a jump is much faster than a change of contexts
    bool begun, done;
    unsigned thread, block;
    std::vector<std::vector<std::function<void()>>> copies{1};   // groups that it has not waited for; the last is open
};
struct Meeting {   // of threads that wait for each other
    int count = 0;
    uint64_t turn = 0;
};
struct Index {
    unsigned x, y, z;
};
inline std::vector<Fiber> fibers;
inline int current;   // the fiber that runs
inline jmp_buf scheduler;
// Blocks in the first dimension of a grid, and all of one kernel.
inline unsigned columns_of_grid, blocks_of_grid, threads_of_block;
inline std::map<uint64_t, Meeting> meetings;

#define threadIdx (Index{fibers[current].thread, 0, 0})
#define blockIdx (Index{this_block() % columns_of_grid, this_block() % blocks_of_grid / columns_of_grid, 0})
#define gridDim (Index{columns_of_grid, blocks_of_grid / columns_of_grid, 1})
inline unsigned this_block() { return fibers[current].block; }   // among those of all kernels
inline unsigned this_kernel() { return this_block() / blocks_of_grid; }

inline void yield() {
    if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}
// Lets a fiber run until it waits.
inline __attribute__((noinline)) void resume(int i) {
    current = i;
    if (_setjmp(scheduler) != 0) return;
    if (fibers[i].begun) _longjmp(fibers[i].at, 1);
    fibers[i].begun = true;
    setcontext(&fibers[i].context);
}
inline void meet(uint64_t where, int threads) {
    Meeting& m = meetings[where];
    const uint64_t turn = m.turn;
    if (++m.count == threads) {
        m.count = 0, m.turn++;
    } else {
        while (m.turn == turn) yield();
    }
}
inline int warp_of_grid() { return this_block() * WARPS_OF_BLOCK + threadIdx.x / 32; }
inline void __syncwarp() { meet(warp_of_grid(), 32); }
// A named barrier of a block; one of a cluster.
inline void meet_block(int name, int threads) { meet(uint64_t(1) << 32 | this_block() << 4 | name, threads); }
inline void __syncthreads() { meet_block(0, threads_of_block); }
inline bool __syncthreads_and(bool vote) {
    static std::map<unsigned, bool> votes;
    bool& all = votes[this_block()];
    __syncthreads();
    all = true;
    __syncthreads();
    all &= vote;
    __syncthreads();
    return all;
}
inline void meet_kernel() { meet(uint64_t(3) << 32 | this_kernel(), blocks_of_grid * threads_of_block); }
inline void meet_cluster() { meet(uint64_t(2) << 32 | this_block() / BLOCKS_OF_CLUSTER, BLOCKS_OF_CLUSTER * threads_of_block); }

[[noreturn]] inline void fail(const char* what) {
    printf("block %u, thread %u: %s\n", this_block(), threadIdx.x, what);
    exit(1);
}

// Runs kernels of one shape. With a `seed`, warps take turns in random order, and of several kernels one is slow.
struct Grid {
    unsigned x, y;
    Grid(unsigned x, unsigned y = 1) : x(x), y(y) {}
};
inline void launch(Grid grid, unsigned threads, unsigned seed, const std::function<void()>& kernel, unsigned kernels = 1);

// Exchange between the lanes of a warp.
inline std::vector<std::array<uint64_t, 32>> exchanged;
template <class T>
T lane_value(T v, int lane) {
    auto& all = exchanged[warp_of_grid()];
    uint64_t raw = 0;
    memcpy(&raw, &v, sizeof v);
    all[threadIdx.x % 32] = raw;
    __syncwarp();
    memcpy(&v, &all[lane & 31], sizeof v);
    __syncwarp();
    return v;
}
template <class T>
T __shfl_sync(unsigned, T v, int lane) { return lane_value(v, lane); }
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask) { return lane_value(v, threadIdx.x % 32 ^ mask); }
template <class T>
T __shfl_down_sync(unsigned, T v, int by) {
    const int lane = threadIdx.x % 32;
    return lane_value(v, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int by) {
    const int lane = threadIdx.x % 32;
    return lane_value(v, lane >= by ? lane - by : lane);
}
template <class T, class F>
T reduced(T v, F&& join) {
    for (int mask = 1; mask < 32; mask *= 2) v = join(v, __shfl_xor_sync(~0u, v, mask));
    return v;
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) { return reduced(v, [](unsigned a, unsigned b) { return max(a, b); }); }
inline unsigned __reduce_min_sync(unsigned, unsigned v) { return reduced(v, [](unsigned a, unsigned b) { return min(a, b); }); }
inline int __reduce_max_sync(unsigned, int v) { return reduced(v, [](int a, int b) { return max(a, b); }); }
inline int __reduce_add_sync(unsigned, int v) { return reduced(v, [](int a, int b) { return a + b; }); }
inline bool __any_sync(unsigned, bool v) { return reduced(int(v), [](int a, int b) { return a | b; }); }
inline bool __all_sync(unsigned, bool v) { return reduced(int(v), [](int a, int b) { return a & b; }); }
inline unsigned __ballot_sync(unsigned, bool v) { return reduced(unsigned(v) << threadIdx.x % 32, [](unsigned a, unsigned b) { return a | b; }); }
#define __ffs __builtin_ffs
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* to, unsigned v) { return std::exchange(*to, *to + v); }
DEVICE float warp_sum(float v) {
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// Arithmetic.
inline uint32_t bits_of(float v) {
    uint32_t r;
    memcpy(&r, &v, 4);
    return r;
}
inline float float_of(uint32_t v) {
    float r;
    memcpy(&r, &v, 4);
    return r;
}
inline int nearest(float v) { return int(nearbyintf(v)); }
inline float quick_exp(float v) { return expf(v); }
inline float quick_exp2(float v) { return exp2f(v); }
inline float inverse_root(float v) { return 1.f / sqrtf(v); }
inline float divided(float a, float b) { return a / b; }
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
inline uint32_t funnel_shifted(uint32_t low, uint32_t high, int by) { return uint32_t((uint64_t(high) << 32 | low) >> (by & 31)); }
inline uint32_t dot(uint32_t a, uint32_t b, uint32_t sum) {
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
    return sum;
}
#define __funnelshift_r funnel_shifted
#define __dp4a dot
#define __float_as_uint bits_of
#define __float_as_int(v) int(bits_of(v))
#define __uint_as_float float_of
#define __int_as_float(v) float_of(uint32_t(v))
#define __float2int_rn nearest
#define __expf quick_exp
#define rsqrtf inverse_root
#define __fdividef divided
#define __byte_perm permuted
#define permute permuted
template <uint32_t MASK, uint32_t BITS>
uint32_t mask_or(uint32_t a) {
    return (a & MASK) | BITS;
}
// Sums as wide as these round once, but for ties that no test has.
inline __half2 fused(__half2 a, __half2 b, __half2 c) {
    const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
    return __floats2half2_rn(float(double(x.x) * y.x + z.x), float(double(x.y) * y.y + z.y));
}
#define __hfma2 fused
DEVICE uint32_t half2_bits(__half2 h) {
    uint32_t r;
    memcpy(&r, &h, 4);
    return r;
}
DEVICE int operand_index(int k) { return (k & ~31) | (k >> 2 & 1) << 4 | (k >> 1 & 1) << 3 | (k >> 3 & 3) << 1 | (k & 1); }
DEVICE float clamp_half(float v) { return v < -65504.f ? -65504.f : v > 65504.f ? 65504.f : v; }

// Memory.
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
void __stcg(T* p, T v) { *p = v; }
inline uint8_t* shared_memory;   // of all blocks
inline uint8_t* own_shared() { return shared_memory + this_block() * SHARED_BYTES; }
inline unsigned block_at(uint32_t at) { return at >> 24 ? this_block() / BLOCKS_OF_CLUSTER * BLOCKS_OF_CLUSTER + (at >> 24) - 1 : this_block(); }
inline void* at_shared(uint32_t at, unsigned alignment) {
    if (at % alignment != 0 || (at & 0xffffff) >= SHARED_BYTES) fail("an address of shared memory");
    return shared_memory + block_at(at) * SHARED_BYTES + (at & 0xffffff);
}
DEVICE uint32_t shared_address(const void* p) {
    const intptr_t at = static_cast<const uint8_t*>(p) - own_shared();
    if (at < 0 || at >= intptr_t(SHARED_BYTES)) fail("not in the block's shared memory");
    return uint32_t(at);
}
DEVICE uint32_t keep(uint32_t v) { return v; }
template <class T>
T load_shared(uint32_t at) {
    T v;
    memcpy(&v, at_shared(at, sizeof v), sizeof v);
    return v;
}
DEVICE uint4 load_shared_16(uint32_t at) { return load_shared<uint4>(at); }
DEVICE uint2 load_shared_8(uint32_t at) { return load_shared<uint2>(at); }
DEVICE uint32_t load_shared_4(uint32_t at) { return load_shared<uint32_t>(at); }
DEVICE uint32_t load_shared_2(uint32_t at) { return load_shared<uint16_t>(at); }
DEVICE uint32_t load_shared_1(uint32_t at) { return load_shared<uint8_t>(at); }
DEVICE void load_shared_16_if(uint4& v, int which, int mine, uint32_t at) {
    if (which == mine) v = load_shared_16(at);
}
DEVICE void load_shared_8_if(uint4& v, int which, int mine, uint32_t at) {
    if (which != mine) return;
    const uint2 w = load_shared_8(at);
    v.x = w.x, v.y = w.y;
}
// Matrices of 8 x 8: see `common.cuh` for what lanes give and get.
inline uint4 load_matrices(uint32_t row, bool turned) {
    uint32_t words[4];
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const int a = lane / 4, b = lane % 4 * 2;
        uint32_t values[2] = {};
        for (int r = 0; r < 8; r++) {
            const uint32_t at = lane_value(row, 8 * i + r);
            for (int e = 0; e < 2; e++)
                if (turned ? r == b + e : r == a) values[e] = load_shared_2(at + 2 * (turned ? a : b + e));
        }
        words[i] = values[0] | values[1] << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
DEVICE uint4 load_matrices_at(uint32_t row) { return load_matrices(row, false); }
DEVICE uint4 load_turned_matrices_at(uint32_t row) { return load_matrices(row, true); }
DEVICE uint4 load_stream(const void* p) { return *static_cast<const uint4*>(p); }
DEVICE uint2 load_stream_8(const void* p) { return *static_cast<const uint2*>(p); }
DEVICE uint32_t load_stream_4(const void* p) { return *static_cast<const uint32_t*>(p); }
template <int BYTES = 16>
void copy_async(void* to, const void* from) {
    if (intptr_t(to) % BYTES != 0 || intptr_t(from) % BYTES != 0) fail("a copy that is not aligned");
    shared_address(to);
    fibers[current].copies.back().push_back([=] { memcpy(to, from, BYTES); });
}
DEVICE void copy_commit() { fibers[current].copies.emplace_back(); }
template <int N>
void copy_wait() {
    auto& groups = fibers[current].copies;
    for (; groups.size() > N + 1; groups.erase(groups.begin()))
        for (auto& copy : groups.front()) copy();
}

// Barriers of shared memory: a phase ends when all have arrived and all bytes have come.
struct Barrier {
    int arrivals = 0, missing = 0;
    int64_t bytes = 0;   // may come before they are expected
    uint64_t phase = 0;
};
inline std::map<uint64_t, Barrier> barriers;
inline Barrier& barrier_at(uint32_t at) { return barriers[uint64_t(block_at(at)) << 32 | (at & 0xffffff)]; }
inline void settle(Barrier& b) {
    if (b.missing == 0 && b.bytes == 0) b.phase++, b.missing = b.arrivals;
}
inline void arrive_at(Barrier& b) {
    if (b.missing == 0) fail("more arrivals than a barrier has");
    b.missing--;
    settle(b);
}
inline void bytes_came(uint32_t barrier, uint32_t bytes) {
    Barrier& b = barrier_at(barrier);
    b.bytes -= bytes;
    settle(b);
}
inline void wait_for(uint32_t barrier, uint32_t parity) {
    while ((barrier_at(barrier).phase & 1) == parity) yield();
}
DEVICE void barrier_fence() {}
DEVICE void launch_dependents() {}
DEVICE void wait_for_prerequisites() {}

// Products on tensor cores: see `common.cuh` for what lanes hold.
inline std::vector<std::array<std::array<uint32_t, 6>, 32>> operands;
template <bool SIGNED = false>
DEVICE void mma_16832(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    auto& all = operands[warp_of_grid()];
    const int lane = threadIdx.x % 32;
    all[lane] = {a0, a1, a2, a3, b0, b1};
    __syncwarp();
    auto byte = [](uint32_t word, int k) { return word >> 8 * (k % 4) & 255; };
    auto left = [&](int row, int k) {
        const int v = byte(all[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2], k);
        return SIGNED ? int(int8_t(v)) : v;
    };
    auto right = [&](int k, int column) { return int(int8_t(byte(all[column * 4 + k % 16 / 4][4 + k / 16], k))); };
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 32; k++) d[i] += left(lane / 4 + i / 2 * 8, k) * right(k, lane % 4 * 2 + i % 2);
    __syncwarp();
}
DEVICE void mma_signed_16832(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    mma_16832<true>(d, a0, a1, a2, a3, b0, b1);
}

DEVICE void mma_16816(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    auto& all = operands[warp_of_grid()];
    const int lane = threadIdx.x % 32;
    all[lane] = {a0, a1, a2, a3, b0, b1};
    __syncwarp();
    auto half = [](uint32_t word, int k) {
        __half2 pair;
        memcpy(&pair, &word, 4);
        return k % 2 ? __high2float(pair) : __low2float(pair);
    };
    auto left = [&](int row, int k) { return half(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k); };
    auto right = [&](int k, int column) { return half(all[column * 4 + k % 8 / 2][4 + k / 8], k); };
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) d[i] += left(lane / 4 + i / 2 * 8, k) * right(k, lane % 4 * 2 + i % 2);
    __syncwarp();
}

inline const std::function<void()>* running;
inline void begin() {
    (*running)();
    fibers[current].done = true;
    yield();
}
inline void launch(Grid grid, unsigned threads, unsigned seed, const std::function<void()>& kernel, unsigned kernels) {
    constexpr size_t STACK = 48 << 10;
    static std::vector<char*> stacks;
    const unsigned blocks = grid.x * grid.y * kernels;
    running = &kernel, columns_of_grid = grid.x, blocks_of_grid = grid.x * grid.y, threads_of_block = threads;
    const size_t count = size_t(blocks) * threads;
    while (stacks.size() < count) stacks.push_back(static_cast<char*>(malloc(STACK)));
    free(shared_memory);
    shared_memory = static_cast<uint8_t*>(aligned_alloc(128, blocks * SHARED_BYTES));
    memset(shared_memory, 0xff, blocks * SHARED_BYTES);
    meetings.clear(), barriers.clear();
    exchanged.resize(blocks * WARPS_OF_BLOCK), operands.resize(blocks * WARPS_OF_BLOCK);
    fibers.assign(count, Fiber());
    for (size_t i = 0; i < count; i++) {
        Fiber& f = fibers[i];
        f.thread = i % threads, f.block = i / threads;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks[i], f.context.uc_stack.ss_size = STACK;
        makecontext(&f.context, begin, 0);
    }
    std::vector<size_t> warps(count / 32);
    for (size_t w = 0; w < warps.size(); w++) warps[w] = w;
    uint32_t state = seed;
    auto random = [&] { return (state = state * 1664525 + 1013904223) >> 8; };
    size_t rounds = 0;
    for (size_t left = count; left > 0; rounds++) {
        if (rounds > MOST_ROUNDS) {
            printf("%zu threads still wait after %zu rounds\n", left, rounds);
            exit(1);
        }
        if (seed > 0)
            for (int i = 0; i < 40; i++) std::swap(warps[random() % warps.size()], warps[random() % warps.size()]);
        for (size_t w : warps) {
            const bool slow = kernels > 1 && w * 32 / threads / blocks_of_grid == seed % kernels;
            if (seed > 0 && random() % 8 < (slow ? 5 : 2)) continue;   // this one is slow
            for (size_t i = w * 32; i < w * 32 + 32; i++) {
                if (fibers[i].done) continue;
                resume(int(i));
                left -= fibers[i].done;
            }
        }
    }
}
