#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <vector>
#include <random>
#include <algorithm>
#include <ucontext.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <stddef.h>
#include <type_traits>
#define DEVICE_ static inline
static char emu_shared[1 << 20] __attribute__((aligned(1024)));
static char* emu_dynamic = emu_shared + (1 << 18);
struct Fiber { ucontext_t c; uint3 tid; size_t used; bool done; std::vector<char> stack; };
static std::vector<Fiber> fibers; static Fiber* cur; static ucontext_t main_c;
static uint3 e_block; static dim3 e_grid, e_dim;
#define threadIdx (cur->tid)
#define blockIdx e_block
#define gridDim e_grid
#define blockDim e_dim
#undef __grid_constant__
static void yield_() { swapcontext(&cur->c, &main_c); }
struct Bar { int count = 0, gen = 0; void wait(int n) { int my = gen; if (++count == n) { count = 0; gen++; } else while (gen == my) yield_(); } };
static Bar bars[64], warps_bar[64]; static uint32_t slots[64][32][16];
static char* emu_alloc(size_t n) { char* p = emu_shared + cur->used; cur->used += (n + 15) / 16 * 16; if (cur->used > (1 << 18)) abort(); return p; }
static int lane_() { return cur->tid.x % 32; } static int warp_() { return cur->tid.x / 32; }
static void emu_bar(int id, int n) { bars[id].wait(n); }
static void __syncwarp(unsigned = ~0u) { warps_bar[warp_()].wait(32); }
static void __syncthreads() { bars[40].wait(e_dim.x); }
static int e_and; static int __syncthreads_and(int p) { if (cur->tid.x == 0) e_and = 1; __syncthreads(); if (!p) e_and = 0; __syncthreads(); int r = e_and; __syncthreads(); return r; }
template <class T> static T shfl(T v, int from) { static_assert(sizeof(T) == 4); memcpy(slots[warp_()][lane_()], &v, 4); __syncwarp(); T r; memcpy(&r, slots[warp_()][from], 4); __syncwarp(); return r; }
template <class T> static T __shfl_xor_sync(unsigned, T v, int m) { return shfl(v, lane_() ^ m); }
template <class T> static T __shfl_sync(unsigned, T v, int m) { return shfl(v, m); }
template <class T> static T __shfl_down_sync(unsigned, T v, int m) { return shfl(v, std::min(lane_() + m, 31)); }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) { uint64_t v = a | uint64_t(b) << 32; uint32_t r = 0; for (int i = 0; i < 4; i++) r |= uint32_t(v >> (s >> 4 * i & 7) * 8 & 255) << 8 * i; return r; }
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcg(const T* p) { return *p; }
static float expf_e(float x) { return std::exp(x); }
#define __expf expf_e
static float fdiv_e(float a, float b) { return a / b; }
#define __fdividef fdiv_e
static __half2 hfma2_e(__half2 a, __half2 b, __half2 c) { float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c); return __floats2half2_rn(float(double(x.x) * y.x + z.x), float(double(x.y) * y.y + z.y)); }
#define __hfma2 hfma2_e
static float rsqrtf_(float x) { return 1 / std::sqrt(x); }
#define rsqrtf rsqrtf_
static int __float_as_int(float v) { int r; memcpy(&r, &v, 4); return r; } static uint32_t __float_as_uint(float v) { uint32_t r; memcpy(&r, &v, 4); return r; }
static float __int_as_float(int v) { float r; memcpy(&r, &v, 4); return r; } static float __uint_as_float(uint32_t v) { float r; memcpy(&r, &v, 4); return r; }
static int __float2int_rn(float v) { return int(std::nearbyint(v)); }
using std::min; using std::max; using std::isfinite;
static void emu_mma32(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    uint32_t* s = slots[warp_()][lane_()]; s[0] = a0, s[1] = a1, s[2] = a2, s[3] = a3, s[4] = b0, s[5] = b1; __syncwarp();
    int g = lane_() / 4, t = lane_() % 4;
    for (int i = 0; i < 4; i++) { int row = i / 2, col = 2 * t + i % 2; for (int k = 0; k < 32; k++) {
        uint32_t a = slots[warp_()][g * 4 + k % 16 / 4][row + k / 16 * 2] >> k % 4 * 8 & 255; int8_t b = slots[warp_()][col * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8; d[i] += int(a) * b; } }
    __syncwarp(); }
static float h_at(uint32_t w, int i) { __half_raw r; r.x = w >> 16 * i; return __half2float(__half(r)); }
static void emu_mma16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    uint32_t* s = slots[warp_()][lane_()]; s[0] = a0, s[1] = a1, s[2] = a2, s[3] = a3, s[4] = b0, s[5] = b1; __syncwarp();
    int g = lane_() / 4, t = lane_() % 4;
    for (int i = 0; i < 4; i++) { int row = i / 2, col = 2 * t + i % 2; double v = d[i]; for (int k = 0; k < 16; k++)
        v += double(h_at(slots[warp_()][g * 4 + k % 8 / 2][row + k / 8 * 2], k % 2)) * h_at(slots[warp_()][col * 4 + k % 8 / 2][4 + k / 8], k % 2); d[i] = v; }
    __syncwarp(); }
static uint4 emu_ldmatrix(const void* p) { memcpy(slots[warp_()][lane_()], &p, 8); __syncwarp(); uint32_t r[4];
    for (int m = 0; m < 4; m++) { const char* q; memcpy(&q, slots[warp_()][m * 8 + lane_() / 4], 8); memcpy(r + m, q + lane_() % 4 * 4, 4); } __syncwarp(); return make_uint4(r[0], r[1], r[2], r[3]); }
#undef __launch_bounds__
#include "emu_kernels_fixed.inc"

template <class F> static void launch(dim3 grid, int threads, F f) {
    static F* fn; fn = &f; e_grid = grid; e_dim = dim3(threads);
    for (unsigned y = 0; y < grid.y; y++) for (unsigned x = 0; x < grid.x; x++) {
        e_block = {x, y, 0}; memset(emu_shared, 0xee, sizeof emu_shared);
        if (fibers.size() < size_t(threads)) fibers.resize(threads);
        for (auto& b : bars) b = Bar(); for (auto& b : warps_bar) b = Bar();
        for (int i = 0; i < threads; i++) { Fiber& q = fibers[i]; q.tid = {unsigned(i), 0, 0}; q.used = 0; q.done = false; q.stack.resize(1 << 16); getcontext(&q.c); q.c.uc_stack.ss_sp = q.stack.data(); q.c.uc_stack.ss_size = q.stack.size(); q.c.uc_link = &main_c;
            makecontext(&q.c, (void (*)())(+[] { (*fn)(); cur->done = true; }), 0); }
        for (bool any = true; any;) { any = false; for (int i = 0; i < threads; i++) if (!fibers[i].done) { any = true; cur = &fibers[i]; swapcontext(&main_c, &cur->c); } }
    }
}

// A random record matrix, written by the documented layout, and its values.
struct W { std::vector<uint8_t> codes, meta; std::vector<float> v; int rows, inputs, tiles, spans, groups, meta_bytes; PackedWeight p; };
template <class S> static W make(int rows, int inputs, int groups, std::mt19937& r) {
    W w; w.rows = rows, w.inputs = inputs, w.tiles = (rows + 15) / 16, w.spans = (inputs + 255) / 256, w.groups = groups;
    const int zb = S::ZERO == INT ? (S::BITS == 4 ? 8 : 16) : S::ZERO == OFFSET ? 32 : 0;
    w.meta_bytes = ((S::TWO_LEVEL ? 32 + groups * (16 + zb) : groups * (32 + zb)) + 15) / 16 * 16;
    w.codes.assign(size_t(w.tiles) * w.spans * S::BITS * 512 + 64, 0); w.meta.assign(size_t(w.tiles) * w.spans * w.meta_bytes + 64, 0);
    w.v.assign(size_t(rows) * inputs, 0);
    std::vector<float> factors(w.tiles * 16);
    for (auto& f : factors) f = __half2float(__float2half_rn(1e-4f + 1e-6f * (r() % 1000)));
    for (int tile = 0; tile < w.tiles; tile++) for (int span = 0; span < w.spans; span++) {
        uint8_t* c = w.codes.data() + (size_t(tile) * w.spans + span) * S::BITS * 512; uint8_t* m = w.meta.data() + (size_t(tile) * w.spans + span) * w.meta_bytes;
        for (int row = 0; row < 16; row++) { int g = row % 8, u = row / 8; bool there = tile * 16 + row < rows;
            std::vector<float> sc(groups), ze(groups);
            uint8_t* scales = m + S::ROWS; uint8_t* z = scales + groups * 8 * S::SCALE;
            float f = there ? factors[tile * 16 + row] : 0; __half fh = __float2half_rn(f);
            if (S::TWO_LEVEL) memcpy(m + (g * 2 + u) * 2, &fh, 2);
            for (int G = 0; G < groups; G++) { int at = G * 8 + g; int small = r() & 255; __half h;
                if (S::TWO_LEVEL) { scales[at * 2 + u] = small; h = __float2half_rn(f * (small - (S::ZERO == SYM ? 128 : 0))); }
                else { h = __float2half_rn(there ? 0.003f + 1e-5f * small : 0); memcpy(scales + (at * 2 + u) * 2, &h, 2); }
                sc[G] = __half2float(h); int zp = r() & ((1 << S::BITS) - 1);
                if (S::ZERO == SYM) zp = 1 << (S::BITS - 1); else if (S::BITS == 4) z[at] |= zp << 4 * u; else z[at * 2 + u] = zp;
                ze[G] = zp; }
            for (int k = 0; k < 256; k++) { int q = r() & ((1 << S::BITS) - 1); bool in = span * 256 + k < inputs; if (!in || !there) q = 0;
                int ch = k / 32, t = k % 32 / 8, i = k % 8, lane = g * 4 + t;
                if (S::BITS == 8) c[(ch * 32 + lane) * 16 + i / 4 * 8 + u * 4 + i % 4] = q;
                else { uint8_t* unit = c + ch / 2 * S::BITS * 128; const int order[4] = {0, 2, 1, 3}; int j = ch % 2 * 2 + u, byte = order[i % 4];
                    unit[lane * 16 + j * 4 + byte] |= (q & 15) << 4 * (i / 4);
                    for (int x = 0; x < S::BITS - 4; x++) { int bit = (2 * j + i / 4) * (S::BITS - 4) + x; unit[512 + (lane * (S::BITS - 4) + bit / 8) * 4 + byte] |= (q >> (4 + x) & 1) << bit % 8; } }
                if (in && there) w.v[size_t(tile * 16 + row) * inputs + span * 256 + k] = sc[k * groups / 256] * (q - ze[k * groups / 256]); }
        } }
    w.p = {w.codes.data(), w.meta.data(), rows, inputs, w.spans, S::BITS, S::ZERO, S::TWO_LEVEL, groups, w.meta_bytes, 1.f};
    return w;
}
static int bad = 0;
static void report(const char* what, const std::vector<double>& e, const std::vector<float>& y, double tol) {
    double a = 0, b = 0; for (size_t i = 0; i < e.size(); i++) a += (e[i] - y[i]) * (e[i] - y[i]), b += e[i] * e[i];
    bool ok = a / b < tol; if (!ok) bad++; printf("  %-22s %.2e %s\n", what, a / b, ok ? "ok" : "WRONG"); }
template <class S> static void check(const char* name, int groups, int rows = 40, int inputs = 1000) {
    std::mt19937 r(7); W w = make<S>(rows, inputs, groups, r); printf("%s, %d groups\n", name, groups);
    long wrong = 0; for (int i = 0; i < rows; i++) for (int k = 0; k < inputs; k++) wrong += element(w.p, i, k) != w.v[size_t(i) * inputs + k];
    if (wrong) bad++; printf("  element: %ld differ\n", wrong);
    const int M = 11, padded = w.spans * 256; std::vector<float> x(M * inputs); std::normal_distribution<float> n; for (auto& v : x) v = n(r);
    std::vector<__half> half(M * padded, __float2half_rn(0)); std::vector<double> full(M * rows), fromhalf(M * rows);
    for (int m = 0; m < M; m++) for (int k = 0; k < inputs; k++) half[m * padded + operand_index(k)] = __float2half_rn(x[m * inputs + k]);
    for (int m = 0; m < M; m++) for (int i = 0; i < rows; i++) for (int k = 0; k < inputs; k++) { double v = w.v[size_t(i) * inputs + k]; full[m * rows + i] += v * x[m * inputs + k]; fromhalf[m * rows + i] += v * __half2float(__float2half_rn(x[m * inputs + k])); }
    std::vector<double> one(full.begin(), full.begin() + rows);
    for (int depth : {0, 1, 3}) for (int split : {1, 3}) {
        std::vector<float> y(rows + 8, 0); GemvArgs a{}; a.codes = (const uint4*)w.codes.data(), a.meta = w.meta.data(), a.x = x.data(), a.out = y.data(), a.inputs = inputs, a.rows = rows, a.tiles = w.tiles, a.spans = w.spans, a.groups = groups, a.meta_bytes = w.meta_bytes, a.split = split, a.inverse = (256 + split - 1) / split, a.depth = depth, a.scale = 1;
        if (depth) launch(dim3(2), 512, [&] { gemv<S, ADD, 16, 0>(a); }); else launch(dim3(2), 512, [&] { gemv<S, ADD, 16, 2>(a); });
        char t[64]; snprintf(t, 64, "gemv depth %d split %d", depth, split); report(t, one, y, 2e-8); }
    for (int split : {1, 3}) {
        std::vector<char> cols(size_t(2) * w.spans * 4 * sizeof(DigitColumns) + 64); char* at = (char*)((uintptr_t(cols.data()) + 31) & ~uintptr_t(31));
        ColumnsArgs ca{}; ca.x = x.data(), ca.columns = at, ca.inputs = inputs, ca.spans = w.spans; launch(dim3(M), 512, [&] { columns<S::ORDER>(ca); });
        std::vector<float> y(M * rows, 0); GemvBatchArgs b{}; b.codes = w.codes.data(), b.meta = w.meta.data(), b.columns = at, b.out = y.data(), b.m = M, b.rows = rows, b.tiles = w.tiles, b.spans = w.spans, b.groups = groups, b.meta_bytes = w.meta_bytes, b.split = split, b.inverse = (256 + split - 1) / split, b.depth = 3, b.scale = 1;
        launch(dim3(1), 256, [&] { gemv_batch<S, 2, 8, 4>(b); }); report("gemv_batch", full, y, 2e-8); }
    { std::vector<float> y(M * rows, 0); GemmArgs g{}; g.codes = (const uint4*)w.codes.data(), g.meta = w.meta.data(), g.x = half.data(), g.y = y.data(), g.m = M, g.rows = rows, g.tiles = w.tiles, g.spans = w.spans, g.groups = groups, g.meta_bytes = w.meta_bytes, g.scale = 1, g.parts = 1;
      launch(dim3((w.tiles + 3) / 4, 1), 128, [&] { Gemm<S, 2, 1, 4, 1, 4>::run(g); }); report("gemm", fromhalf, y, 1e-11); }
    // The operands of the rounding products.
    long off = 0; for (int step = 0; step < w.spans * 4; step++) for (int lane = 0; lane < 32; lane++) for (int j = 0; j < 4; j++) {
        Dequant<S, true> d; const uint8_t* rec = w.codes.data() + size_t(step / 4) * S::BITS * 512; d.load(w.meta.data() + size_t(step / 4) * w.meta_bytes, groups, step, j, lane / 4); uint32_t a[4];
        d.product(a, Dequant<S, true>::unit((const uint4*)(rec + step % 4 * S::BITS * 128) + lane, j, lane), j);
        for (int i = 0; i < 4; i++) for (int e = 0; e < 2; e++) { int row = lane / 4 + i % 2 * 8, k = step * 64 + j / 2 * 32 + lane % 4 * 8 + j % 2 * 4 + i / 2 * 2 + e; if (k < inputs) { float v = w.v[size_t(row) * inputs + k]; off += h_at(a[i], e) != __half2float(__float2half_rn(v)); } } }
    if (off) bad++; printf("  operands: %ld differ\n", off);
}
int main() {
    check<int4_int_64>("int4_int_64", 4); check<int8_sym_32>("int8_sym_32", 8);
    for (int G : {4, 2, 1}) { check<int4_int_64_scales8>("int4_int_64_scales8", G); check<int5_int_64_scales8>("int5_int_64_scales8", G); check<int6_sym_64_scales8>("int6_sym_64_scales8", G); }
    check<int4_int_32_scales8>("int4_int_32_scales8", 8); check<int5_int_32_scales8>("int5_int_32_scales8", 8); check<int6_sym_32_scales8>("int6_sym_32_scales8", 8);
    printf(bad ? "%d WRONG\n" : "all right\n", bad); return bad != 0;
}
