// How blocks of the kernel of all layers (`step_layers.cuh`) share the work on a product's inputs, and how their rings are
// filled.
//
// On 9.0 the blocks of a cluster share the work: each prepares some inputs and sends them to shared memory of all; bulk copies
// fill the rings. On other devices all blocks of the grid share it, through words with stamps in global memory, and
// asynchronous copies of 16 bytes fill the rings: 8.x has no clusters, and the 99 KiB of shared memory of 8.6, 8.9 and 12.x are
// too little for inputs that others send while one still reads the last ones. 10.x could do as 9.0 does, but that would be code
// that nothing here runs.
#pragma once

#include "exchange.cuh"
#include "products.cuh"

constexpr int SPAN_WORDS = sizeof(SpanDigits) / 4;

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr bool CLUSTERED = true;
constexpr int CLUSTER = 8;   // blocks

DEVICE void meet_begin() { cluster_arrive(); }
DEVICE void meet_end() { cluster_wait(); }
// Blocks that share the work, and which of them this is.
DEVICE int sharers() { return CLUSTER; }
DEVICE int rank_of_sharer() { return cluster_rank(); }

// The inputs of a product, in shared memory of all blocks that share the work on them.
struct SharedInputs {
    static constexpr int ARRIVALS = 1;
    const uint32_t at, barrier;   // SpanDigits, and what opens when all are there

    DEVICE SharedInputs(const SpanDigits* digits, uint32_t barrier, uint64_t*, uint32_t) : at(shared_address(digits)), barrier(barrier) {}

    DEVICE void expect(uint32_t bytes) const {
        if (threadIdx.x == 0) barrier_expect_at(barrier, bytes);
    }
    DEVICE void put(uint32_t word, uint32_t v) const {
        const uint32_t behind = at + word * 4 - barrier;
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            const uint32_t there = map_rank(barrier, b);
            send_4(there + behind, v, there);
        }
    }
    // Four words of each lane.
    DEVICE void put(uint32_t word, uint4 v) const {
        const uint32_t behind = at + word * 4 - barrier;
        const float4 values = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            const uint32_t there = map_rank(barrier, b);
            send_16(there + behind, values, there);
        }
    }
    // Four words that all lanes of a warp have.
    DEVICE void put(uint32_t word, float4 v, int lane) const {
        if (lane >= CLUSTER) return;
        const uint32_t there = map_rank(barrier, lane);
        send_16(there + (at + word * 4 - barrier), v, there);
    }
    // Brings what others put, of so many words.
    template <int THREADS>
    DEVICE void receive(int, int) const {}
    static DEVICE void wait(uint32_t barrier, uint32_t parity) { wait_sent(barrier, parity); }
};

// Copies to shared memory, after which a barrier opens.
struct Copies {
    static constexpr int WARPS = 1;      // that ask for copies
    static constexpr int ARRIVALS = 1;   // at the barrier
    const uint32_t barrier;

    // Asks for the copies that `make` makes, of `bytes` in all. All of the warps call it.
    template <class Make>
    static DEVICE void request(uint32_t barrier, uint32_t bytes, Make&& make) {
        if (!elect()) return;
        barrier_expect_at(barrier, bytes);
        make(Copies{barrier});
    }
    static DEVICE void expect(uint32_t barrier, uint32_t bytes) { barrier_expect_at(barrier, bytes); }
    // ONCE: of data that is not read again soon.
    template <bool ONCE>
    DEVICE void copy(uint32_t to, const uint8_t* from, uint32_t bytes) const { copy_bulk_at<ONCE>(to, from, bytes, barrier); }
};

#else

constexpr bool CLUSTERED = false;
constexpr int CLUSTER = 1;

DEVICE void meet_begin() { __syncthreads(); }
DEVICE void meet_end() {}
DEVICE int sharers() { return gridDim.x; }
DEVICE int rank_of_sharer() { return blockIdx.x; }

struct SharedInputs {
    static constexpr int ARRIVALS = LAYERS_WARPS;
    const uint32_t at, barrier;
    uint64_t* const words;   // in global memory
    const uint32_t stamp;

    DEVICE SharedInputs(const SpanDigits* digits, uint32_t barrier, uint64_t* words, uint32_t stamp)
        : at(shared_address(digits)), barrier(barrier), words(words), stamp(stamp) {}

    DEVICE void expect(uint32_t) const {}
    DEVICE void put(uint32_t word, uint32_t v) const { store_stamped(words + word, __uint_as_float(v), stamp); }
    DEVICE void put(uint32_t word, uint4 v) const {
        store_stamped_two(words + word, make_float2(__uint_as_float(v.x), __uint_as_float(v.y)), stamp);
        store_stamped_two(words + word + 2, make_float2(__uint_as_float(v.z), __uint_as_float(v.w)), stamp);
    }
    DEVICE void put(uint32_t word, float4 v, int lane) const {
        if (lane < 4) store_stamped(words + word + lane, lane == 0 ? v.x : lane == 1 ? v.y : lane == 2 ? v.z : v.w, stamp);
    }
    // By all threads. They read words that others write later only after these have come: every block has a share of every
    // product, and so whoever writes the next inputs has waited for all who read these.
    template <int THREADS>
    DEVICE void receive(int count, int lane) const {
        constexpr int MANY = 3;   // pairs of words that a thread asks for at once
#pragma unroll 1
        for (int first = threadIdx.x; first < count / 2; first += THREADS * MANY) {
            uint4 w[MANY];
            bool there;
#pragma unroll
            for (int i = 0; i < MANY; i++) w[i] = make_uint4(0, stamp, 0, stamp);
#pragma unroll
            for (int i = 0; i < MANY; i++)
                if (first + i * THREADS < count / 2) w[i] = load_stamped(words + (first + i * THREADS) * 2);
            do {
                there = true;
#pragma unroll
                for (int i = 0; i < MANY; i++) {
                    if (has(w[i], stamp)) continue;
                    there = false;
                    w[i] = load_stamped(words + (first + i * THREADS) * 2);
                }
            } while (!there);
#pragma unroll
            for (int i = 0; i < MANY; i++)
                if (first + i * THREADS < count / 2) store_shared_8(at + (first + i * THREADS) * 8, make_uint2(w[i].x, w[i].z));
        }
        __syncwarp();
        if (lane == 0) arrive_times(barrier, 1);
    }
    static DEVICE void wait(uint32_t barrier, uint32_t parity) { barrier_wait_at(barrier, parity); }
};

struct Copies {
    // One warp does not issue as many copies as the memory delivers.
    static constexpr int WARPS = 4;
    static constexpr int ARRIVALS = WARPS * 32;
    const uint32_t thread;   // of these warps, which are whole fours behind the others

    template <class Make>
    static DEVICE void request(uint32_t barrier, uint32_t, Make&& make) {
        make(Copies{threadIdx.x % ARRIVALS});
        copies_arrive(barrier);
    }
    static DEVICE void expect(uint32_t, uint32_t) {}
    template <bool ONCE>
    DEVICE void copy(uint32_t to, const uint8_t* from, uint32_t bytes) const {
#pragma unroll 4
        for (uint32_t i = thread * 16; i < bytes; i += ARRIVALS * 16) copy_async_at(to + i, from + i);
    }
};

#endif
