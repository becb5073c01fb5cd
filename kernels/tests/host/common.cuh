// Host emulation of what gemv.cuh uses.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <ucontext.h>
#include <map>
#include <vector>
#include <functional>
#include <algorithm>
#include <type_traits>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static
#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline
#define DEVICE inline
#define EMU 1
using std::min; using std::max;
struct Idx { unsigned x, y, z; };
extern Idx blockIdx_, gridDim_;
#define blockIdx blockIdx_
#define gridDim gridDim_
struct Fiber { ucontext_t c; char* stack; bool done; unsigned tid; };
extern std::vector<Fiber> fibers; extern int cur; extern ucontext_t sched;
inline Idx tid() { return {fibers[cur].tid, 0, 0}; }
#define threadIdx tid()
inline void yield_() { swapcontext(&fibers[cur].c, &sched); }
struct Bar { int count = 0; uint64_t gen = 0; };
extern Bar warpbar[64], blockbar; extern int nthreads;
inline void bar(Bar& b, int n) { uint64_t g = b.gen; if (++b.count == n) { b.count = 0; b.gen++; } else while (b.gen == g) yield_(); }
inline void __syncwarp() { bar(warpbar[threadIdx.x / 32], 32); }
inline void __syncthreads() { bar(blockbar, nthreads); }
extern int andv; inline bool __syncthreads_and(bool v) { if (threadIdx.x == 0) andv = 1; __syncthreads(); if (!v) andv = 0; __syncthreads(); return andv; }
#define blockDim (Idx{(unsigned)nthreads,1,1})
using std::isfinite;
struct Exch { uint64_t v[32]; };
extern Exch ex[64];
template <class T> T shfl_get(T v, int from) {
    const int w = threadIdx.x / 32, l = threadIdx.x % 32; uint64_t raw = 0; memcpy(&raw, &v, sizeof v);
    ex[w].v[l] = raw; __syncwarp(); T r; memcpy(&r, &ex[w].v[from & 31], sizeof r); __syncwarp(); return r;
}
template <class T> T __shfl_sync(unsigned, T v, int from) { return shfl_get(v, from); }
template <class T> T __shfl_xor_sync(unsigned, T v, int m) { return shfl_get(v, (threadIdx.x % 32) ^ m); }
template <class T> T __shfl_down_sync(unsigned, T v, int m) { int l = threadIdx.x % 32; return shfl_get(v, l + m < 32 ? l + m : l); }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf_(float a) { return expf(a); }
#define __expf __expf_
inline int f2i(float v) { return (int)nearbyintf(v); }
#define __float2int_rn f2i
inline uint32_t fau(float f) { uint32_t r; memcpy(&r, &f, 4); return r; }
inline float uaf(uint32_t f) { float r; memcpy(&r, &f, 4); return r; }
#define __float_as_uint fau
#define __uint_as_float uaf
#define __int_as_float(x) uaf((uint32_t)(x))
#define __float_as_int(x) ((int)fau(x))
inline uint32_t bperm(uint32_t a, uint32_t b, uint32_t s) { uint64_t v = (uint64_t(b) << 32) | a; uint32_t r = 0; for (int i = 0; i < 4; i++) { uint32_t k = s >> (4 * i) & 15; uint32_t y = v >> (8 * (k & 7)) & 255; r |= y << (8 * i); } return r; }
#define __byte_perm bperm
inline float rsqrtf_(float v) { return 1.f / sqrtf(v); }
#define rsqrtf rsqrtf_
DEVICE void release_successor() {}
DEVICE void wait_for_predecessor() {}
extern "C" uint4 shared[];
DEVICE uint32_t shared_address(const void* p) { return uint32_t(intptr_t(p) - intptr_t(shared)); }
inline void* sp(uint32_t a) { return (char*)shared + int32_t(a); }
DEVICE uint32_t keep(uint32_t v) { return v; }
DEVICE uint4 load_shared_16(uint32_t at) { if (at % 16) { printf("misaligned\n"); abort(); } uint4 v; memcpy(&v, sp(at), 16); return v; }
DEVICE void load_shared_16_if(uint4& v, int which, int mine, uint32_t at) { if (which == mine) v = load_shared_16(at); }
DEVICE uint2 load_shared_8(uint32_t at) { uint2 v; memcpy(&v, sp(at), 8); return v; }
DEVICE uint32_t load_shared_4(uint32_t at) { uint32_t v; memcpy(&v, sp(at), 4); return v; }
DEVICE uint32_t load_shared_2(uint32_t at) { uint16_t v; memcpy(&v, sp(at), 2); return v; }
DEVICE uint32_t load_shared_1(uint32_t at) { uint8_t v; memcpy(&v, sp(at), 1); return v; }
DEVICE uint4 load_stream(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
DEVICE uint2 load_stream_8(const void* p) { uint2 v; memcpy(&v, p, 8); return v; }
DEVICE uint32_t load_stream_4(const void* p) { uint32_t v; memcpy(&v, p, 4); return v; }
DEVICE bool elect() { __syncwarp(); return threadIdx.x % 32 == 0; }
extern std::map<uint32_t, uint64_t> phases; extern std::map<uint32_t, int64_t> pending;
DEVICE void barrier_init(uint64_t* b) { phases[shared_address(b)] = 0; pending[shared_address(b)] = 0; }
DEVICE void barrier_fence() {}
DEVICE void barrier_expect(uint32_t b, uint32_t bytes) { if (pending[b]) { printf("expect while pending\n"); abort(); } pending[b] = bytes; }
DEVICE void barrier_wait(uint32_t b, uint32_t parity) { long n = 0; while ((phases[b] & 1) == parity) { yield_(); if (++n > 2000000) { printf("deadlock t%u\n", threadIdx.x); abort(); } } }
DEVICE void copy_bulk_stream(uint32_t to, const void* from, uint32_t bytes, uint32_t b) { if (bytes % 16 || to % 16 || intptr_t(from) % 16) { printf("bulk alignment\n"); abort(); } memcpy(sp(to), from, bytes); if ((pending[b] -= bytes) == 0) phases[b]++; if (pending[b] < 0) { printf("too many bytes\n"); abort(); } }
template <int N = 16> DEVICE void copy_async(void* to, const void* from) { memcpy(to, from, N); }
DEVICE void copy_commit() {}
template <int N> DEVICE void copy_wait() {}
extern uint32_t mm[64][32][6];
DEVICE void mma_16832(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const int w = threadIdx.x / 32, l = threadIdx.x % 32; uint32_t v[6] = {a0, a1, a2, a3, b0, b1}; memcpy(mm[w][l], v, 24); __syncwarp();
    const int g = l / 4, t = l % 4;
    auto A = [&](int r, int k) { int gg = r % 8, reg = (r / 8) + 2 * (k / 16), tt = k % 16 / 4; return int(mm[w][gg * 4 + tt][reg] >> (8 * (k % 4)) & 255); };
    auto B = [&](int k, int n) { int tt = k % 16 / 4; return int(int8_t(mm[w][n * 4 + tt][4 + k / 16] >> (8 * (k % 4)) & 255)); };
    for (int i = 0; i < 4; i++) { int r = g + 8 * (i / 2), n = 2 * t + i % 2; for (int k = 0; k < 32; k++) d[i] += A(r, k) * B(k, n); }
    __syncwarp();
}
DEVICE void mma_16816(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const int w = threadIdx.x / 32, l = threadIdx.x % 32; uint32_t v[6] = {a0, a1, a2, a3, b0, b1}; memcpy(mm[w][l], v, 24); __syncwarp();
    const int g = l / 4, t = l % 4;
    auto H = [&](uint32_t x, int hi) { __half_raw r; r.x = hi ? x >> 16 : x & 0xffff; return __half2float(__half(r)); };
    auto A = [&](int r, int k) { return H(mm[w][(r % 8) * 4 + k % 8 / 2][(r / 8) + 2 * (k / 8)], k % 2); };
    auto B = [&](int k, int n) { return H(mm[w][n * 4 + k % 8 / 2][4 + k / 8], k % 2); };
    for (int i = 0; i < 4; i++) { int r = g + 8 * (i / 2), n = 2 * t + i % 2; for (int k = 0; k < 16; k++) d[i] += A(r, k) * B(k, n); }
    __syncwarp();
}
DEVICE float warp_sum(float v) { for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(~0u, v, m); return v; }
DEVICE float clamp_half(float v) { return v < -65504.f ? -65504.f : v > 65504.f ? 65504.f : v; }
DEVICE uint32_t half2_bits(__half2 h) { uint32_t r; memcpy(&r, &h, 4); return r; }
