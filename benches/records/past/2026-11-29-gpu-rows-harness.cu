#include "step_layers_rows.cuh"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
using S4 = int4_int_64;
constexpr int THREADS = 13 * 32;
extern "C" __global__ __cluster_dims__(8, 1, 1) __launch_bounds__(THREADS, 1) void one_dense(const __grid_constant__ LayersArgs p) { step_layers<S4, false, false, false>(p); }
extern "C" __global__ __cluster_dims__(8, 1, 1) __launch_bounds__(THREADS, 1) void one_hybrid(const __grid_constant__ LayersArgs p) { step_layers<S4, true, false, false>(p); }
extern "C" __global__ __cluster_dims__(8, 1, 1) __launch_bounds__(THREADS, 1) void rows_dense(const __grid_constant__ LayersArgs p) { step_layers_rows<S4, false>(p); }
extern "C" __global__ __cluster_dims__(8, 1, 1) __launch_bounds__(THREADS, 1) void rows_hybrid(const __grid_constant__ LayersArgs p) { step_layers_rows<S4, true>(p); }
#define CK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s:%d %s\n", #x, __LINE__, cudaGetErrorString(e)); exit(2); } } while (0)
__device__ uint32_t hash(uint64_t i, uint32_t seed) { uint64_t z = i * 0x9E3779B97F4A7C15ull + seed * 0xBF58476D1CE4E5B9ull; z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull; z = (z ^ z >> 27) * 0x94D049BB133111EBull; return uint32_t(z >> 32); }
__global__ void fill_bits(uint32_t* p, size_t n, uint32_t seed) { for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = hash(i, seed); }
__global__ void fill_f(float* p, size_t n, uint32_t seed, float a, float b) { for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = a + (b - a) * (hash(i, seed) >> 8) / 16777216.f; }
__global__ void fill_h(__half* p, size_t n, uint32_t seed, float a, float b) { for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) p[i] = __float2half(a + (b - a) * (hash(i, seed) >> 8) / 16777216.f); }
__global__ void fill_meta(uint8_t* p, size_t records, uint32_t seed, float usual) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < records * 160; i += size_t(gridDim.x) * blockDim.x) {
        const size_t r = i / 160; const int b = i % 160;
        if (b < 128) { if (b % 2 == 0) *(__half*)(p + i) = __float2half(usual * (.5f + (hash(i, seed) >> 8) / 16777216.f)); }
        else p[i] = 0x77 + (hash(i, seed) & 0x11);
    }
}
uint32_t seed = 1;
std::vector<std::pair<uint8_t*, size_t>> changed;
template <class T> T* raw(size_t n) { void* p; CK(cudaMalloc(&p, (n * sizeof(T) + 255) / 256 * 256)); CK(cudaMemset(p, 0, n * sizeof(T))); return (T*)p; }
float* floats(size_t n, float a, float b) { float* p = raw<float>(n); fill_f<<<1024, 256>>>(p, n, seed++, a, b); return p; }
__half* halves(size_t n, float a, float b) { __half* p = raw<__half>(n); fill_h<<<1024, 256>>>(p, n, seed++, a, b); return p; }
template <class T> T* changes(T* p, size_t n) { changed.push_back({(uint8_t*)p, n * sizeof(T)}); return p; }
std::vector<uint8_t*> save() { std::vector<uint8_t*> v; for (auto [p, n] : changed) { uint8_t* c; CK(cudaMalloc(&c, n)); CK(cudaMemcpy(c, p, n, cudaMemcpyDeviceToDevice)); v.push_back(c); } return v; }
void restore(const std::vector<uint8_t*>& v) { for (size_t i = 0; i < v.size(); i++) CK(cudaMemcpy(changed[i].first, v[i], changed[i].second, cudaMemcpyDeviceToDevice)); }
void drop(std::vector<uint8_t*>& v) { for (auto p : v) cudaFree(p); v.clear(); }
struct Shape { const char* name; bool hybrid; int hidden, heads, kv, inter, key_heads, value_heads, layers, window; };
int up(int a, int b) { return (a + b - 1) / b * b; }
template <class K> void launch(K* kernel, int blocks, int bytes, const LayersArgs& a) {
    cudaLaunchConfig_t c = {}; c.gridDim = blocks; c.blockDim = THREADS; c.dynamicSmemBytes = bytes;
    cudaLaunchAttribute at[2]; at[0].id = cudaLaunchAttributeClusterDimension; at[0].val.clusterDim = {8, 1, 1};
    (void)at; void* args[] = {(void*)&a};
    cudaError_t e = cudaLaunchKernel((const void*)kernel, dim3(blocks), dim3(THREADS), args, bytes, 0);
    if (e != cudaSuccess) { cudaFuncAttributes f; cudaFuncGetAttributes(&f, kernel); printf("launch: %s, args %zu, bytes %d, static %zu, local %zu, regs %d, max threads %d\n", cudaGetErrorString(e), sizeof(LayersArgs), bytes, f.sharedSizeBytes, f.localSizeBytes, f.numRegs, f.maxThreadsPerBlock); exit(3); }
}
template <class K> int most(K* kernel, int bytes) {
    CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchConfig_t c = {}; c.gridDim = 128; c.blockDim = THREADS; c.dynamicSmemBytes = bytes;
    cudaLaunchAttribute at[1]; at[0].id = cudaLaunchAttributeClusterDimension; at[0].val.clusterDim = {8, 1, 1}; c.attrs = at; c.numAttrs = 1;
    int n; CK(cudaOccupancyMaxActiveClusters(&n, kernel, &c)); return n * 8;
}
template <bool HYBRID> int test(const Shape& s, int piece, int layers, bool keeps, bool times) {
    constexpr int DIM = HYBRID ? 256 : 128; const int SLOTS = 5, PAGES = 32, TURN = HYBRID ? 32 : 64;
    auto one = HYBRID ? one_hybrid : one_dense; auto rows = HYBRID ? rows_hybrid : rows_dense;
    changed.clear(); seed = 1;
    const int width = s.heads * DIM, group = s.heads / s.kv, qrows = (s.heads * (HYBRID ? 2 : 1) + 2 * s.kv) * DIM;
    const int channels = HYBRID ? (2 * s.key_heads + s.value_heads) * 128 : 0, drows = HYBRID ? channels + s.value_heads * 128 : 0;
    static LayersArgs a, b; memset(&a, 0, sizeof a);
    float* gain = floats(s.hidden, .7f, 1.3f), *qg = floats(DIM, .7f, 1.3f);
    const int dims[5][2] = {{qrows, s.hidden}, {s.hidden, width}, {2 * s.inter, s.hidden}, {s.hidden, s.inter}, {drows, s.hidden}};
    std::vector<std::vector<void*>> frees;
    for (int l = 0; l < layers; l++) {
        LayerArgs& L = a.layer[l]; const bool rec = HYBRID && l % 4 != 3;
        for (int w = 0; w < 4; w++) {
            const int* d = dims[w == 0 && rec ? 4 : w]; const size_t records = size_t(d[0] / 16) * (d[1] / 256);
            uint8_t* codes = raw<uint8_t>(records * 2048), *meta = raw<uint8_t>(records * 160);
            fill_bits<<<2048, 256>>>((uint32_t*)codes, records * 512, seed++); fill_meta<<<2048, 256>>>(meta, records, seed++, 16 / 4.6f / sqrtf(d[1]) / 16 * .5f);
            L.codes[w] = codes, L.meta[w] = meta, L.kind[w] = {0, 4, 160, 2048};
        }
        L.gains[0] = L.gains[1] = gain, L.router_scale = 1, L.recurrent = rec;
        if (rec) {
            LayerRecurrence& R = L.recurrence; size_t m = size_t(SLOTS) * s.value_heads * MATRIX, in = size_t(SLOTS) * INPUTS * channels, k = size_t(SLOTS) * s.value_heads * KEPT;
            R.delta = {floats(channels * 4, -.5f, .5f), floats(s.value_heads, -2, 0), floats(s.value_heads, -1, 1), floats(128, .7f, 1.3f), changes(floats(m, -.2f, .2f), m), changes(floats(in, -1, 1), in), s.key_heads, s.value_heads, 0, 1e-6f};
            R.rates = halves(size_t(2) * s.value_heads * s.hidden, -100, 100); R.scale = .001f; R.kept = keeps ? changes(floats(k, .1f, .5f), k) : nullptr;
        } else {
            size_t n = size_t(PAGES) * s.kv * PAGE * DIM; L.attention = {}; L.attention.vectors.gains[0] = L.attention.vectors.gains[1] = qg;
            L.attention.keys = changes(halves(n, -1, 1), n), L.attention.values = changes(halves(n, -1, 1), n);
        }
    }
    for (int i = 0; i < 5; i++) a.shape[i] = {dims[i][0] / 16, dims[i][1] / 256};
    a.qkv_row = std::max(qrows, drows);
    auto words = [](size_t n) { return raw<uint64_t>(n); };
    a.qkv = words(size_t(4) * a.qkv_row), a.attended = words(size_t(4) * MOST_SOURCES * s.heads * (DIM + 2)), a.gated = words(4 * s.inter), a.scores = words(16);
    for (auto& p : a.parts) p = words(4 * MOST_PARTS * s.hidden);
    for (auto& d : a.digits) d = words(16);
    uint32_t first = 1; a.epoch = raw<uint32_t>(1); CK(cudaMemcpy(a.epoch, &first, 4, cudaMemcpyHostToDevice));
    float2* turn = (float2*)floats(size_t(8192) * TURN * 2, -1, 1); a.cos_sin = turn;
    // slot 0..3: 8 pages each; slot 0 has depth for 1024 positions
    std::vector<uint32_t> tables(SLOTS * 8, 0); for (int i = 0; i < 32; i++) tables[i] = 31 - i;
    uint32_t* t = raw<uint32_t>(tables.size()); CK(cudaMemcpy(t, tables.data(), tables.size() * 4, cudaMemcpyHostToDevice)); a.tables = t; a.table_len = 8;
    Step* step = raw<Step>(8); a.step = step; float* x = raw<float>(4 * s.hidden); a.x = x;
    a.lost = raw<uint32_t>(1); a.times = words(16); a.ranks = 1; a.layers = layers, a.hidden = s.hidden, a.heads = s.heads, a.kv_heads = s.kv, a.group = group;
    a.key_heads = std::max(s.key_heads, 1), a.value_heads = std::max(s.value_heads, 1), a.chosen = 1, a.up_tiles = s.inter / 8, a.down_spans = s.inter / 256, a.eps = 1e-6f, a.stage = std::max(8832, 8320), a.idle = 4;
    b = a;
    const int room = 227 << 10, spans = s.hidden / 256, inner = std::max(width, s.inter) / 256;
    int end = up(1024 + s.hidden / 8, 128); auto take = [&](int n) { int r = end; end += up(n, 128); return r; };
    a.at.digits[0] = take(spans * 576), a.at.digits[1] = take(inner * 576), a.at.x = take(up(s.hidden / 64, 8) / 8 * 256), a.at.sums = take(18432), a.at.queries = take((group + 1) * 4 * DIM), a.at.ring = take(0);
    a.depth = std::min((room - end) / a.stage, 32), a.window = std::min(s.window, a.depth - DIM / 32); int bytes1 = end + a.depth * a.stage;
    end = up(1024 + s.hidden / 8, 128); b.piece = std::max(piece, spans), b.digits_row = up(b.piece * 576, 128) + 32;
    for (int& d : b.at.digits) d = take(4 * b.digits_row);
    b.at.sums = take(2 * STEP_TILES * 4 * 12 * 64), b.at.queries = take(std::max(group * 4 * DIM + 16 * DIM, int(sizeof(DeltaRowsRoom)))), b.at.ring = take(0);
    b.depth = std::min((room - end) / b.stage, 32), b.most_window = s.window; b.window = std::min(s.window, b.depth - std::max(DIM / 32, 5)); int bytes2 = end + b.depth * b.stage;
    const int m1 = most(one, bytes1), m2 = most(rows, bytes2), blocks = std::min(m1, m2);
    printf("%s, %d layers, piece %d: blocks %d %d, one: depth %d window %d; rows: depth %d window %d\n", s.name, layers, b.piece, m1, m2, a.depth, a.window, b.depth, b.window); fflush(stdout);
    if (b.window < 1) return 1;
    CK(cudaDeviceSynchronize());
    std::vector<float> host(4 * s.hidden);
    auto start = [&](int slot, int pos) { std::vector<float> v(s.hidden); uint32_t h = slot * 7919 + pos * 104729 + 17; for (auto& e : v) { h = h * 1664525 + 1013904223; e = (h >> 8) / 8388608.f - 1; } return v; };
    auto run = [&](bool many, const std::vector<Step>& st) {
        std::vector<float> in; for (auto& q : st) { auto v = start(q.slot, q.position); in.insert(in.end(), v.begin(), v.end()); }
        CK(cudaMemcpy(x, in.data(), in.size() * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(step, st.data(), st.size() * sizeof(Step), cudaMemcpyHostToDevice));
        if (many) { b.rows = st.size(); launch(rows, blocks, bytes2, b); } else launch(one, blocks, bytes1, a);
        CK(cudaDeviceSynchronize()); std::vector<float> out(in.size()); CK(cudaMemcpy(out.data(), x, out.size() * 4, cudaMemcpyDeviceToHost)); return out;
    };
    int bad = 0;
    auto compare = [&](const char* what, const std::vector<std::pair<int, std::pair<int, int>>>& runs) {   // slot, position, rows
        auto before = save(); std::vector<Step> st; std::vector<float> want, after; std::vector<std::vector<float>> next;
        for (auto [slot, pr] : runs) for (int i = 0; i < pr.second; i++) {
            Step q = {pr.first + i, slot, 0, 0, 0, 0}; auto r = run(false, {q}); want.insert(want.end(), r.begin(), r.end()); st.push_back(q);
            auto mid = save(); next.push_back(run(false, {Step{pr.first + i + 1, slot, 0, 0, 0, 0}})); restore(mid); drop(mid);
        }
        restore(before); auto got = run(true, st); int wrong = 0, nan = 0; for (size_t i = 0; i < got.size(); i++) wrong += memcmp(&got[i], &want[i], 4) != 0, nan += !(got[i] == got[i]);
        auto now = save(); int later = 0, row = 0;
        for (auto [slot, pr] : runs) for (int i = 0; i < pr.second; i++, row++) {
            const bool checks = HYBRID && keeps && pr.second > 1; if (!checks && i + 1 < pr.second) continue;
            auto r = run(false, {Step{pr.first + i + 1, slot, 0, 0, checks ? i + 1 : 0, 0}}); later += r != next[row]; restore(now);
        }
        if (wrong + nan + later) { printf("  %s: %d of %zu values differ, %d NaN, first %g; later steps that differ: %d\n", what, wrong, got.size(), nan, got[0], later); fflush(stdout); } bad += wrong + nan + later;
        restore(before); drop(before); drop(now);
    };
    compare("one", {{0, {5, 1}}}); compare("two of one", {{0, {70, 2}}}); compare("four of one", {{1, {126, 4}}}); compare("four of one at 900", {{0, {893, 4}}});
    compare("sequences", {{0, {5, 1}}, {2, {130, 1}}, {1, {0, 1}}, {3, {700, 1}}}); compare("mixed", {{2, {127, 3}}, {0, {0, 1}}}); compare("start", {{3, {0, 4}}});
    if (times) {
        cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
        for (int pos : {80, 900}) for (int n : {0, 1, 2, 4, 14}) {
            std::vector<Step> st; for (int i = 0; i < std::max(n % 10, 1); i++) st.push_back({n > 10 ? pos : pos + i, n > 10 ? i : 0, 0, 0, 0, 0});
            run(n > 0, st); float best = 1e9;
            for (int rep = 0; rep < 5; rep++) {
                cudaEventRecord(e0); for (int i = 0; i < 8; i++) n > 0 ? launch(rows, blocks, bytes2, b) : launch(one, blocks, bytes1, a);
                cudaEventRecord(e1); CK(cudaEventSynchronize(e1)); float ms; cudaEventElapsedTime(&ms, e0, e1); best = std::min(best, ms / 8);
            }
            printf(" %d/%s%d:%.3f", pos, n == 0 ? "one" : n > 10 ? "seq" : "run", std::max(n % 10, 1), best);
#ifdef ROWS_TIMES
            if (n > 0) { CK(cudaMemset(b.times, 0, 128)); launch(rows, blocks, bytes2, b); CK(cudaDeviceSynchronize()); uint64_t t[8]; CK(cudaMemcpy(t, b.times, 64, cudaMemcpyDeviceToHost)); printf("["); for (int i = 0; i < 8; i++) printf("%.1f ", t[i] / 1.98e3 / layers); printf("]\n"); }
#endif
            fflush(stdout);
        }
    }
    return bad;
}
int main(int argc, char** argv) {
    const int which = atoi(argv[1]), piece = atoi(argv[2]), layers = atoi(argv[3]); const bool times = argc > 4 && atoi(argv[4]);
    const int window = argc > 5 ? atoi(argv[5]) : 0;
    Shape shapes[] = {{"small dense", false, 1024, 16, 8, 3072, 0, 0, 28, 3}, {"8B", false, 4096, 32, 8, 12288, 0, 0, 36, 5}, {"small hybrid", true, 1024, 8, 2, 3584, 16, 16, 24, 3}, {"27B", true, 5120, 24, 4, 17408, 16, 48, 64, 5}, {"9B", true, 4096, 16, 4, 12288, 16, 32, 32, 5}};
    Shape s = shapes[which]; if (window) s.window = window;
    const int bad = s.hybrid ? test<true>(s, piece, layers, true, times) : test<false>(s, piece, layers, false, times);
    printf("%s\n", bad ? "WRONG" : "right"); return bad != 0;
}
