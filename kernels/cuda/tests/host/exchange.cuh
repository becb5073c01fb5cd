// Stands for `exchange.cuh` of kernels/cuda on the host.
#pragma once

#include "common.cuh"

#define OUT_OF_LINE inline

DEVICE void cluster_arrive() { meet_cluster(); }
DEVICE void cluster_wait() {}
DEVICE uint32_t cluster_rank() { return blockIdx.x % BLOCKS_OF_CLUSTER; }
DEVICE uint32_t map_rank(uint32_t at, int rank) { return uint32_t(rank + 1) << 24 | at; }
DEVICE void send_4(uint32_t to, uint32_t v, uint32_t barrier) {
    memcpy(at_shared(to, 4), &v, 4);
    bytes_came(barrier, 4);
}
DEVICE void send_16(uint32_t to, float4 v, uint32_t barrier) {
    memcpy(at_shared(to, 16), &v, 16);
    bytes_came(barrier, 16);
}
DEVICE void wait_sent(uint32_t barrier, uint32_t parity) { wait_for(barrier, parity); }
DEVICE void init_barrier(uint32_t barrier, uint32_t arrivals) {
    barrier_at(barrier) = {int(arrivals), int(arrivals)};
}
DEVICE void arrive_times(uint32_t barrier, int times) {
    for (int i = 0; i < times; i++) arrive_at(barrier_at(barrier));
}

DEVICE uint4 load_stamped(const uint64_t* p) {
    yield();   // whoever looks again and again lets others write
    return make_uint4(uint32_t(p[0]), uint32_t(p[0] >> 32), uint32_t(p[1]), uint32_t(p[1] >> 32));
}
DEVICE uint2 load_stamped_one(const uint64_t* p) {
    yield();
    return make_uint2(uint32_t(*p), uint32_t(*p >> 32));
}
DEVICE uint4 load_far(const uint64_t* p) { return load_stamped(p); }
DEVICE uint32_t load_relaxed(const uint32_t* p) {
    yield();
    return *p;
}
DEVICE void store_relaxed(uint32_t* to, uint32_t v) { *to = v; }
DEVICE bool has(const uint4& w, uint32_t stamp) { return w.y == stamp && w.w == stamp; }
DEVICE float2 values_of(const uint4& w) { return make_float2(float_of(w.x), float_of(w.z)); }
DEVICE void store_stamped(uint64_t* to, float v, uint32_t stamp) { *to = uint64_t(stamp) << 32 | bits_of(v); }
DEVICE void store_far(uint64_t* to, float v, uint32_t stamp) { store_stamped(to, v, stamp); }
DEVICE void store_stamped_two(uint64_t* to, float2 v, uint32_t stamp) {
    if (intptr_t(to) % 16 != 0) fail("two words that are not aligned");
    store_stamped(to, v.x, stamp), store_stamped(to + 1, v.y, stamp);
}

DEVICE void barrier_wait_at(uint32_t barrier, uint32_t parity) { wait_for(barrier, parity); }
DEVICE void barrier_expect_at(uint32_t barrier, uint32_t bytes) {
    Barrier& b = barrier_at(barrier);
    b.bytes += bytes;
    arrive_at(b);
}
template <bool ONCE>
DEVICE void copy_bulk_at(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
    if (bytes % 16 != 0 || intptr_t(from) % 16 != 0) fail("a bulk copy of other than whole 16 bytes");
    memcpy(at_shared(to, 16), from, bytes);
    bytes_came(barrier, bytes);
}
DEVICE void copy_async_at(uint32_t to, const uint8_t* from) {
    if (intptr_t(from) % 16 != 0) fail("a copy of other than whole 16 bytes");
    memcpy(at_shared(to, 16), from, 16);
}
DEVICE void copies_arrive(uint32_t barrier) { arrive_at(barrier_at(barrier)); }
DEVICE bool elect() {
    __syncwarp();
    return threadIdx.x % 32 == 0;
}
DEVICE void sync_some(int name, int threads) { meet_block(name, threads); }
DEVICE void store_shared_8(uint32_t at, uint2 v) { memcpy(at_shared(at, 8), &v, 8); }
DEVICE void store_shared_4(uint32_t at, uint32_t v) { memcpy(at_shared(at, 4), &v, 4); }
DEVICE void prefetch_line(const void*) {}
// Time passes only while it is looked at.
inline uint64_t now = 0, pace = 0;
DEVICE uint64_t nanoseconds() { return now += pace; }
DEVICE uint8_t* dynamic_shared() { return own_shared(); }
