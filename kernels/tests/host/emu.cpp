#define __CUDA_ARCH__ 900
#include "experts.cuh"
int andv;
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) { for (int m = 1; m < 32; m *= 2) { uint32_t o = __shfl_xor_sync(~0u, v, m); v = std::max(v, o); } return v; }
inline int __reduce_add_sync(unsigned, int v) { for (int m = 1; m < 32; m *= 2) v += __shfl_xor_sync(~0u, v, m); return v; }
#include "slot.cuh"
Idx blockIdx_, gridDim_; std::vector<Fiber> fibers; int cur; ucontext_t sched; Bar warpbar[64], blockbar; int nthreads; Exch ex[64];
std::map<uint32_t, uint64_t> phases; std::map<uint32_t, int64_t> pending; uint32_t mm[64][32][6];
extern "C" { alignas(128) uint4 shared[524288 / 16]; }
static std::function<void()> body;
static void entry() { body(); fibers[cur].done = true; swapcontext(&fibers[cur].c, &sched); }
static void launch(int blocks, int threads, std::function<void()> f) {
    body = f; nthreads = threads; gridDim_ = {(unsigned)blocks, 1, 1};
    for (int b = 0; b < blocks; b++) {
        blockIdx_ = {(unsigned)b, 0, 0}; for (auto& x : warpbar) x = Bar(); blockbar = Bar(); phases.clear(); pending.clear();
        memset(shared, 0xff, sizeof shared);
        fibers.assign(threads, Fiber());
        static std::vector<char*> stacks; while ((int)stacks.size() < threads) stacks.push_back((char*)malloc(65536));
        for (int i = 0; i < threads; i++) { auto& x = fibers[i]; x.tid = i; x.done = false; getcontext(&x.c); x.c.uc_stack.ss_sp = stacks[i]; x.c.uc_stack.ss_size = 65536; x.c.uc_link = &sched; makecontext(&x.c, entry, 0); }
        int left = threads; long rounds = 0;
        while (left) { for (int i = 0; i < threads; i++) if (!fibers[i].done) { cur = i; swapcontext(&sched, &fibers[i].c); if (fibers[i].done) left--; } if (++rounds > 50000000) { printf("stuck\n"); abort(); } }
    }
}
static uint64_t seed = 1; static uint32_t rnd() { seed = seed * 6364136223846793005ull + 1442695040888963407ull; return seed >> 33; }
static float uni() { return (rnd() & 0xffff) / 65536.f; }
template <class S, int EPI> void test(const char* name, int rows, int inputs, int blocks, int depth, int groups) {
    const int WARPS = 8; const int tiles = (rows + 15) / 16, spans = (inputs + 255) / 256;
    const int meta_bytes = S::BITS == 16 ? 0 : (S::ROWS + groups * (8 * S::SCALE) + (S::ZERO == SYM ? 0 : groups * 8 * S::ZERO_BYTES) + 15) / 16 * 16;
    auto al = [](size_t n) { return (uint8_t*)aligned_alloc(128, (n + 4096) / 128 * 128); };
    size_t records = size_t(tiles) * spans; uint8_t* codes = al(records * S::BITS * 512); uint8_t* meta = al(records * meta_bytes + 16);
    for (size_t i = 0; i < records * S::BITS * 512; i++) codes[i] = rnd() & 255;
    if (S::BITS == 16) for (size_t i = 0; i < records * 4096; i++) ((__half*)codes)[i] = __float2half((uni() - .5f) * .1f);
    else for (size_t r = 0; r < records; r++) {
        uint8_t* m = meta + r * meta_bytes; for (int i = 0; i < meta_bytes; i++) m[i] = rnd() & 255;
        int halves = S::TWO_LEVEL ? 16 : groups * 16; for (int i = 0; i < halves; i++) ((__half*)m)[i] = __float2half(.001f + .01f * uni());
        if (S::ZERO == OFFSET) for (int i = 0; i < groups * 16; i++) ((__half*)(m + S::ROWS + groups * 8 * S::SCALE))[i] = __float2half(uni() - .5f);
        }
    // padded inputs meet zeros
    std::vector<float> x(inputs), gain(inputs), out(rows + 64, 0.5f), before; for (auto& v : x) v = (uni() - .5f) * 4; for (auto& v : gain) v = .5f + uni(); x[3 % inputs] = 20;
    before = out; std::vector<float2> best(blocks);
    PackedWeight w = {codes, meta, rows, inputs, spans, S::BITS, S::ZERO, S::TWO_LEVEL, groups, meta_bytes, .7f};
    GemvArgs p = {}; p.codes = codes; p.meta = meta; p.x = x.data(); p.gain = gain.data(); p.out = out.data(); p.best = best.data(); p.inputs = inputs; p.rows = rows; p.tiles = tiles; p.spans = spans; p.groups = groups; p.meta_bytes = meta_bytes; p.depth = depth; p.eps = 1e-6f; p.scale = S::BITS == 16 ? .7f : 1.f; p.late = 0;
    launch(blocks, WARPS * 32, [&] { gemv<S, EPI, 8>(p); });
    double sq = 0; for (float v : x) sq += double(v) * v; double f = EPI == ADD ? 1 : 1 / sqrt(sq / inputs + 1e-6);
    std::vector<double> y(rows), mag(rows); for (int r = 0; r < rows; r++) for (int k = 0; k < inputs; k++) { double v = double(element(w, r, k)) * x[k] * (EPI == ADD ? 1 : gain[k]) * f; y[r] += v; mag[r] += fabs(v); }
    double worst = 0; int n = EPI == SILU ? rows / 2 : rows;
    for (int i = 0; i < n; i++) {
        double want, m; 
        if (EPI == SILU) { int a = i / 8 * 16 + i % 8; want = y[a] / (1 + exp(-y[a])) * y[a + 8]; m = (mag[a] + 1) * (mag[a + 8] + 1); }
        else if (EPI == ADD) want = y[i] + before[i], m = mag[i] + 1; else want = y[i], m = mag[i];
        { double e = fabs(want - out[i]) / (m + 1e-9); if (!(e <= 1)) { static int c = 0; if (c++ < 6) printf("row %d want %g got %g\n", i, want, out[i]); e = 9; } worst = std::max(worst, e); }
    }
    for (size_t i = n; i < out.size(); i++) if (out[i] != .5f) { printf("wrote beyond\n"); break; }
    if (EPI == HEAD) { float top = -1e30; int at = 0; for (auto& b : best) if (b.x > top) top = b.x, at = __float_as_int(b.y); int want = std::max_element(out.begin(), out.begin() + rows) - out.begin(); if (want != at) printf("best %d wanted %d\n", at, want); }
    printf("%-22s epi %d rows %5d inputs %5d blocks %d depth %d: %.2e %s\n", name, EPI, rows, inputs, blocks, depth, worst, worst < (S::BITS == 16 ? 3e-6 : 6e-5) ? "ok" : "BAD");
    free(codes); free(meta);
}
template <class S> void test_experts(const char* name, int hidden, int width, int count, int per, int blocks, int depth, int groups) {
    const int WARPS = 8; auto al = [](size_t n) { return (uint8_t*)aligned_alloc(128, (n + 4096) / 128 * 128); };
    const int meta_bytes = S::BITS == 16 ? 0 : (S::ROWS + groups * (8 * S::SCALE) + (S::ZERO == SYM ? 0 : groups * 8 * S::ZERO_BYTES) + 15) / 16 * 16;
    auto make = [&](int rows, int inputs) { int tiles = rows / 16, spans = (inputs + 255) / 256; size_t records = size_t(tiles) * spans; uint8_t* codes = al(records * S::BITS * 512); uint8_t* meta = al(records * meta_bytes + 16);
        for (size_t i = 0; i < records * S::BITS * 512; i++) codes[i] = rnd() & 255;
        if (S::BITS == 16) for (size_t i = 0; i < records * 4096; i++) ((__half*)codes)[i] = __float2half((uni() - .5f) * .1f);
        else for (size_t r = 0; r < records; r++) { uint8_t* m = meta + r * meta_bytes; for (int i = 0; i < meta_bytes; i++) m[i] = rnd() & 255; int halves = S::TWO_LEVEL ? 16 : groups * 16; for (int i = 0; i < halves; i++) ((__half*)m)[i] = __float2half(.001f + .01f * uni()); }
        return PackedWeight{codes, meta, rows, inputs, spans, S::BITS, S::ZERO, S::TWO_LEVEL, groups, meta_bytes, 1.f}; };
    PackedWeight up = make(count * 2 * width, hidden), down = make(count * hidden, width);
    std::vector<float> x(hidden), gain(hidden), scores(count), gated(per * width, 9.f), out(hidden); for (auto& v : x) v = uni() - .5f; for (auto& v : gain) v = .5f + uni(); for (auto& v : scores) v = 3 * uni(); for (auto& v : out) v = uni();
    auto before = out;
    ExpertsArgs a = {}; GemvArgs& p = a.product; p.codes = up.codes; p.meta = up.meta; p.x = x.data(); p.gain = gain.data(); p.out = gated.data(); p.inputs = hidden; p.rows = per * 2 * width; p.tiles = per * 2 * width / 16; p.spans = up.spans; p.groups = groups; p.meta_bytes = meta_bytes; p.depth = depth; p.eps = 1e-6; p.scale = 1;
    a.scores = scores.data(); a.experts = count; a.per_token = per; a.part = 2 * width / 16; a.tiles = a.part; a.normalized = 1; a.x_stride = hidden; a.out_stride = per * width;
    launch(blocks, 256, [&] { experts<S, SILU, 8>(a); });
    std::vector<int> order(count); for (int i = 0; i < count; i++) order[i] = i; std::sort(order.begin(), order.end(), [&](int i, int j) { return scores[i] > scores[j]; });
    double ws = 0; for (int s = 0; s < per; s++) ws += exp(scores[order[s]]);
    double sq = 0; for (float v : x) sq += double(v) * v; double f = 1 / sqrt(sq / hidden + 1e-6), worst = 0;
    for (int s = 0; s < per; s++) for (int i = 0; i < width; i++) { double g = 0, u = 0, mg = 0, mu = 0; int row = order[s] * 2 * width + i / 8 * 16 + i % 8; for (int k = 0; k < hidden; k++) { double n = x[k] * gain[k] * f, a = element(up, row, k) * n, b = element(up, row + 8, k) * n; g += a, u += b, mg += fabs(a), mu += fabs(b); } double want = g / (1 + exp(-g)) * u * exp(scores[order[s]]) / ws; double e = fabs(want - gated[s * width + i]) / ((mg + 1) * (mu + 1)); if (!(e < 1)) e = 9; worst = std::max(worst, e); }
    p.codes = down.codes; p.meta = down.meta; p.x = gated.data(); p.out = out.data(); p.inputs = per * width; p.rows = hidden; p.tiles = hidden / 16; p.spans = per * down.spans; a.part = down.spans; a.tiles = hidden / 16; a.x_stride = per * width; a.out_stride = hidden;
    for (auto& v : gated) v = uni() - .5f;
    launch(blocks, 256, [&] { experts<S, ADD, 8>(a); });
    double worst2 = 0; for (int r = 0; r < hidden; r++) { double y = before[r], m = 1; for (int s = 0; s < per; s++) for (int k = 0; k < width; k++) { double v = element(down, order[s] * hidden + r, k) * gated[s * width + k]; y += v, m += fabs(v); } double e = fabs(y - out[r]) / m; if (!(e < 1)) e = 9; worst2 = std::max(worst2, e); }
    printf("experts %-14s hidden %d width %d of %d/%d blocks %d depth %d: %.2e %.2e %s\n", name, hidden, width, per, count, blocks, depth, worst, worst2, worst < 3e-5 && worst2 < 3e-5 ? "ok" : "BAD");
}
#define T(S, ...) test<S, STORE>(#S, __VA_ARGS__); test<S, ADD>(#S, __VA_ARGS__); test<S, SILU>(#S, __VA_ARGS__); test<S, HEAD>(#S, __VA_ARGS__)
static void test_slots() {
    float x[256]; for (auto& v : x) v = (uni() - .5f) * 3; x[70] = -9; static Digits d; static ClusterDigits c;
    launch(1, 32, [&] { int l = threadIdx.x; float v[8]; for (int i = 0; i < 8; i++) v[i] = x[8 * l + i]; prepare<4, true>(d, v, l);
        for (int s = 0; s < 4; s++) SlotDigits(make_float2(x[s * 64 + 2 * l], x[s * 64 + 2 * l + 1]), l).store(&c, s, l); });
    int bad = memcmp(d.words, c.words, 512) != 0; for (int s = 0; s < 4; s++) bad += d.slots[s].x != c.slots[s].x, bad += d.slots[s].y != c.slots[s].y;
    printf("slots of the cluster kernels: %s\n", bad ? "BAD" : "ok");
}
int main() { test_slots();
    test_experts<int4_int_64>("int4", 256, 256, 5, 2, 2, 2, 4); test_experts<int4_int_64>("int4", 512, 768, 8, 4, 3, 2, 4); test_experts<int4_int_64>("int4", 768, 768, 6, 3, 1, 1, 4);
    test_experts<int8_int_64>("int8", 512, 768, 8, 2, 3, 2, 4); test_experts<fp16>("fp16", 512, 768, 8, 2, 3, 4, 1); test_experts<int5_int_32_scales8>("int5", 512, 256, 8, 3, 5, 3, 8);
    T(int4_int_64, 96, 1024, 2, 2, 4);
    T(int4_int_64, 96, 1280, 2, 2, 4);
    T(int4_int_64, 32, 64, 1, 1, 4);
    T(int4_int_64, 320, 2304, 3, 1, 2);
    T(int4_sym_64, 64, 768, 2, 3, 1);
    T(int4_offset_64, 64, 768, 2, 3, 2);
    T(int4_int_64_scales8, 64, 768, 2, 3, 4);
    T(int4_int_32, 64, 768, 2, 3, 8);
    T(int4_int_32_scales8, 64, 768, 2, 3, 8);
    T(int5_int_64_scales8, 64, 768, 2, 3, 4);
    T(int5_int_32_scales8, 64, 768, 2, 3, 8);
    T(int6_sym_64_scales8, 64, 1024, 2, 2, 4);
    T(int6_sym_32_scales8, 64, 768, 2, 3, 8);
    T(int8_int_64, 96, 1280, 2, 2, 4);
    T(int8_int_64, 160, 1280, 2, 1, 4);
    T(int8_sym_64, 96, 512, 2, 2, 4);
    T(int8_offset_32, 96, 512, 2, 2, 8);
    T(int8_int_32, 96, 512, 2, 2, 8);
    T(fp16, 96, 768, 2, 6, 1);
    T(fp16, 96, 768, 2, 1, 1);
    test<int4_int_64, STORE>("rows cut", 40, 520, 3, 2, 4); test<int4_int_64, HEAD>("rows cut", 1000, 520, 2, 2, 4); test<int4_int_64, STORE>("many", 4096 + 16, 256, 1, 2, 4);
}
