// Products of warpgroups (four warps) and copies of tiles, as Hopper has them (sm_90a).
#pragma once

#include "exchange.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

// What the copy engine knows of a matrix: `CUtensorMap`.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

// The box of `map` at column x and row y to shared memory, complete on `b`. What lies outside
// the matrix becomes zero, and counts.
DEVICE void copy_tile(void* to, const TensorMap& map, int x, int y, uint64_t* b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(b)) : "memory");
}

DEVICE void barrier_init(uint64_t* b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

// Without a branch: between products, the compiler would serialize them.
DEVICE void barrier_arrive_at(uint32_t b, bool arrive) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(b), "r"(int(arrive)) : "memory");
}
DEVICE void barrier_arrive_if(uint64_t* b, bool arrive) { barrier_arrive_at(shared_address(b), arrive); }

// Products begin after what threads have done to registers; they end in groups, in order.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Fetches what the copy engine must know, before the first copy.
DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Where `of` stands in the shared memory of the cluster's block `rank`.
DEVICE uint32_t cluster_address(const void* of, int rank) {
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(of)), "r"(rank));
    return at;
}
DEVICE float load_cluster(uint32_t at) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
// To where `to` stands, in the shared memory of the cluster's block `rank`.
DEVICE void store_cluster(const float* to, int rank, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address(to, rank)), "f"(v) : "memory");
}

// The right operand: rows of 128 bytes, 16-byte word u of row r at u ^ (r % 8), the rows'
// start a multiple of 1024. 16 inputs further is 2 more.
DEVICE uint64_t right_operand(const void* rows) {
    constexpr uint64_t SWIZZLE_128 = uint64_t(1) << 62, EIGHT_ROWS = uint64_t(1024 / 16) << 32;
    return SWIZZLE_128 | EIGHT_ROWS | uint64_t(1) << 16 | (shared_address(rows) >> 4 & 0x3fff);
}

// d[64][N] += a[64][16] b[16][N] of a warpgroup: FP16 operands, f32 sums. Warp w has rows
// 16w .. 16w + 15 of a and d, laid out as `mma_16816` has them: d[4 n ..] are its columns
// 8n .. 8n + 7. Rows of b in shared memory are columns of the operand.
template <int N>
struct Wgmma;

#define D8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

template <>
struct Wgmma<32> {
    static DEVICE void multiply(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
            "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
            : D8(0), D8(8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<64> {
    static DEVICE void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
            : D8(0), D8(8), D8(16), D8(24)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<72> {
    static DEVICE void multiply(float (&d)[36], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35"
            "}, {%36, %37, %38, %39}, %40, 1, 1, 1, 0;"
            : D8(0), D8(8), D8(16), D8(24), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<128> {
    static DEVICE void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
            : D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

#undef D8

#endif
