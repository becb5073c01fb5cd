// What every kernel here shares: programmatic dependent launch, tensor-core products over
// packed weights, and reductions of fixed order.
//
// Programmatic dependent launch (9.0 and newer): a kernel may start while the one before it in the stream, on which it
// depends, still runs. Before `wait_for_prerequisites` it may read weights, which no kernel writes; everything that
// another kernel writes is read after it, through L2 (`__ldcg`), because a line of this SM's L1 may be older. With
// `launch_dependents` it lets the kernel behind it start. A kernel that does so only after its own wait (arguments call
// this `holds_dependents`) keeps that kernel from overtaking what is in front of both.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

#define DEVICE __device__ __forceinline__

// A block has at most 99 KiB of shared memory. Of 9.0 without what only that has, this is the code that imitates 12.0.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200 || (__CUDA_ARCH__ == 900 && !__CUDA_ARCH_FEAT_SM90_ALL)
#define SMALL_BLOCKS 1
#else
#define SMALL_BLOCKS 0
#endif

// Lets the next kernel of the stream, if it is a programmatic dependent launch, start its blocks as soon as SMs have room.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when every earlier kernel of the stream has finished and its writes are visible.
DEVICE void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16, 8 or 4 bytes that are read once: kept out of L1.
DEVICE uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

DEVICE uint2 load_stream_8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE uint32_t load_stream_4(const void* p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Asynchronous copy of 8 or 16 bytes to shared memory; 16 go past L1.
template <int BYTES = 16>
DEVICE void copy_async(void* to, const void* from) {
    uint32_t address = uint32_t(__cvta_generic_to_shared(to));
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
}
// As `copy_async` of 16 bytes, to an address in shared memory, if `there`.
DEVICE void copy_async_if(bool there, uint32_t to, const void* from) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.s32 p, %2, 0;\n"
        "@p cp.async.cg.shared.global.L2::256B [%0], [%1], 16;\n"
        "}\n" ::"r"(to), "l"(from), "r"(int(there)) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Reads of shared memory by address: in loops it is cheaper to count up than a pointer, which the
// compiler derives anew from the window of its cluster. They stay behind waits for what they read.
DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// A value that the compiler keeps rather than computes again wherever it is used.
DEVICE uint32_t keep(uint32_t v) {
    asm volatile("" : "+r"(v));
    return v;
}

DEVICE uint4 load_shared_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
// Only in lanes where `which` is `mine`; the others keep what they have.
DEVICE void load_shared_16_if(uint4& v, int which, int mine, uint32_t at) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.eq.s32 p, %5, %6;\n"
        "@p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
        "}\n" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "r"(at), "r"(which), "r"(mine));
}
// As `load_shared_16_if`, to the first two words.
DEVICE void load_shared_8_if(uint4& v, int which, int mine, uint32_t at) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.eq.s32 p, %3, %4;\n"
        "@p ld.shared.v2.u32 {%0,%1}, [%2];\n"
        "}\n" : "+r"(v.x), "+r"(v.y) : "r"(at), "r"(which), "r"(mine));
}
DEVICE uint2 load_shared_8(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
DEVICE uint32_t load_shared_4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
DEVICE uint32_t load_shared_2(uint32_t at) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}
DEVICE uint32_t load_shared_1(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// Bulk copies to shared memory that complete on an mbarrier (sm_90 and newer).
#if __CUDA_ARCH__ >= 900
DEVICE void barrier_init(uint64_t* b) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(b)) : "memory");
}
// Makes initialized barriers visible to the copy engine.
DEVICE void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// By address in shared memory, which is cheaper in loops than by pointer.
DEVICE void barrier_wait_at(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void barrier_expect_at(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// `bytes` is a multiple of 16. ONCE: of data that is not read again soon.
template <bool ONCE>
DEVICE void copy_bulk_at(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
    if constexpr (ONCE) {
        uint64_t policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
            "r"(bytes), "r"(barrier), "l"(policy) : "memory");
    } else {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                     "r"(barrier) : "memory");
    }
}

DEVICE void barrier_wait(uint64_t* b, uint32_t parity) { barrier_wait_at(shared_address(b), parity); }
DEVICE void barrier_expect(uint64_t* b, uint32_t bytes) { barrier_expect_at(shared_address(b), bytes); }
DEVICE void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* b) {
    copy_bulk_at<false>(shared_address(to), static_cast<const uint8_t*>(from), bytes, shared_address(b));
}
// Of data that is not read again soon.
DEVICE void copy_bulk_stream(void* to, const void* from, uint32_t bytes, uint64_t* b) {
    copy_bulk_at<true>(shared_address(to), static_cast<const uint8_t*>(from), bytes, shared_address(b));
}
#else
DEVICE void barrier_fence() {}
DEVICE void barrier_wait_at(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}
#endif

// (a & mask) | bits
// Bytes of a and b by the four lowest nibbles of `selector`, which are below 8: `__byte_perm` would clear their highest bits
// first.
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

template <uint32_t MASK, uint32_t BITS>
DEVICE uint32_t mask_or(uint32_t a) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "n"(MASK), "n"(BITS));
    return r;
}

// d[16, 8] += a[16, 16] b[16, 8]: FP16 operands, f32 sums. Lane (g = lane / 4, t = lane % 4)
// holds a0 = a[g][2t..], a1 = a[g+8][2t..], a2 = a[g][2t+8..], a3 = a[g+8][2t+8..],
// b0 = b[2t..][g], b1 = b[2t+8..][g], d = {d[g][2t], d[g][2t+1], d[g+8][2t], d[g+8][2t+1]}.
DEVICE void mma_16816(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                      uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// As `mma_16816` over 32 inputs: unsigned times signed bytes, integer sums. Lane (g, t) holds
// a0 = a[g][4t..], a1 = a[g+8][4t..], a2 = a[g][4t+16..], a3 = a[g+8][4t+16..],
// b0 = b[4t..][g], b1 = b[4t+16..][g].
DEVICE void mma_16832(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// As above, with signed bytes on the left.
DEVICE void mma_signed_16832(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 2^x; what is below the normal numbers becomes zero.
DEVICE float quick_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float warp_sum(float v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// Four 8x8 matrices of FP16: lane l gives the address in shared memory of row l % 8 of matrix l / 8,
// and gets elements 2 (l % 4) and the next of row l / 4 of each.
DEVICE uint4 load_matrices_at(uint32_t row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(row)
                 : "memory");
    return v;
}
// Each turned: rows are columns.
DEVICE uint4 load_turned_matrices_at(uint32_t row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(row)
                 : "memory");
    return v;
}
// Two of them, by the addresses of lanes 0 .. 15.
DEVICE uint4 load_two_matrices_at(uint32_t row) {
    uint4 v = {};
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(row) : "memory");
    return v;
}

// Where input k of a row stands in operand order, in which rows of FP16 activations are kept:
// of each 32 inputs the 16 of one product, then those of the other, in the order in which the
// codes of a packed weight meet them (`weights.cuh`). Pairs of inputs stay together.
DEVICE int operand_index(int k) {
    return (k & ~31) | (k >> 2 & 1) << 4 | (k >> 1 & 1) << 3 | (k >> 3 & 3) << 1 | (k & 1);
}

// Into the range of FP16; what is not a number stays so.
DEVICE float clamp_half(float v) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(-65504.f));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(65504.f));
    return v;
}

DEVICE uint32_t half2_bits(__half2 h) {
    return *reinterpret_cast<uint32_t*>(&h);
}

