// What blocks on different multiprocessors send each other: to shared memory of their cluster, or as words
// with a stamp through global memory.
//
// Everything in PTX that `step_layers.cuh` needs beside `common.cuh`: a stand-in of this file runs it on
// the host (`tests/host`).
#pragma once

#include "common.cuh"

// A function that is called: what is done seldom takes no registers of what is done always.
#define OUT_OF_LINE inline __noinline__ __device__

#if __CUDA_ARCH__ >= 900

// A barrier of all threads of a cluster that have not ended, in two halves: what they wrote before
// the first is seen after the second.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE uint32_t cluster_rank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// Where `at` of this block's shared memory is in that of the cluster's block `rank`.
DEVICE uint32_t map_rank(uint32_t at, int rank) {
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
    return r;
}
// To shared memory of a block of the cluster; counted by a barrier there.
DEVICE void send_4(uint32_t to, uint32_t v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(barrier) : "memory");
}
DEVICE void send_16(uint32_t to, float4 v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
}
// To shared memory of a block of the cluster; seen after a barrier of the cluster.
DEVICE void send(uint32_t to, const float (&v)[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
DEVICE void send(uint32_t to, const float (&v)[2]) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v[0]), "f"(v[1]) : "memory");
}
// Until what is sent is there.
DEVICE void wait_sent(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}
// True in one lane of a converged warp. The compiler knows that it is one: operands of bulk copies that
// are the same for the warp need no loop over its lanes.
DEVICE bool elect() {
    uint32_t one;
    asm volatile(
        "{\n"
        ".reg .pred e;\n"
        "elect.sync _|e, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, e;\n"
        "}\n" : "=r"(one));
    return one != 0;
}

DEVICE void arrive_times(uint32_t barrier, int times) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory"); }

#else

DEVICE void arrive_times(uint32_t barrier, int times) {
#pragma unroll 1
    for (int i = 0; i < times; i++) asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}

#endif

DEVICE void init_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Asynchronous copy of 16 bytes to shared memory, past L1.
DEVICE void copy_async_at(uint32_t to, const uint8_t* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Arrives at a barrier, which counts each thread once, when what this thread has copied so far is there.
DEVICE void copies_arrive(uint32_t barrier) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory"); }

// Two values with a stamp each.
DEVICE uint4 load_stamped(const uint64_t* p) {
    uint64_t a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    return make_uint4(uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32));
}
// One value with its stamp.
DEVICE uint2 load_stamped_one(const uint64_t* p) {
    uint64_t a;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(p) : "memory");
    return make_uint2(uint32_t(a), uint32_t(a >> 32));
}
DEVICE bool has(const uint4& w, uint32_t stamp) { return w.y == stamp && w.w == stamp; }
DEVICE float2 values_of(const uint4& w) { return make_float2(__uint_as_float(w.x), __uint_as_float(w.z)); }
DEVICE uint64_t stamped(float v, uint32_t stamp) { return uint64_t(stamp) << 32 | __float_as_uint(v); }
DEVICE void store_stamped(uint64_t* to, float v, uint32_t stamp) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(stamped(v, stamp)) : "memory");
}
DEVICE void store_stamped_two(uint64_t* to, float2 v, uint32_t stamp) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(stamped(v.x, stamp)), "l"(stamped(v.y, stamp)) : "memory");
}

// Likewise from and to other GPUs. Both sides name the system: of accesses that race on purpose, the memory model asks that each
// names a scope with both threads.
DEVICE uint4 load_far(const uint64_t* p) {
    uint64_t a, b;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    return make_uint4(uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32));
}
DEVICE void store_far(uint64_t* to, float v, uint32_t stamp) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(stamped(v, stamp)) : "memory");
}

// Words that say themselves that they have come.
DEVICE uint32_t load_relaxed(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_relaxed(uint32_t* to, uint32_t v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory"); }

// Waits for so many threads of the block, which name the same barrier.
DEVICE void sync_some(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

DEVICE void store_shared_8(uint32_t at, uint2 v) { asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory"); }
DEVICE void store_shared_4(uint32_t at, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

// Brings the 128 bytes around `p` into the cache of all multiprocessors.
DEVICE void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

DEVICE uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// The block's shared memory that the launch asked for.
DEVICE uint8_t* dynamic_shared() {
    extern __shared__ __align__(128) uint4 memory[];
    return reinterpret_cast<uint8_t*>(memory);
}
