// Weights in trellis codes as numbers.
//
// `trellis_expand_<code>`: T * row scale, without the transform of inputs, as FP16 in the packed layout of `weights.cuh`: the left
// operand of products of many rows, whose x `trellis_turn` transforms. Grid (spans, strips; of gate and up, pairs of strips),
// 256 threads: a warp has a tile of 32 inputs of a strip, or of gate and up. Its weights are those of the rows that
// its lanes have in the packed layout too, but of other columns: four lanes exchange them. Shared memory: WORDS KiB for
// a strip (48 KiB at most), of which a thread reads only its own words. Bytes: codes once; 2 per weight written.
//
// `trellis_embed_<code>`: rows of a weight, transform and scales of inputs included, in f32. Grid m, 256 threads: a warp takes
// blocks of 128 inputs. Bytes: sectors of the row's words; 4 per value written.
#include "trellis.cuh"

struct TrellisExpandArgs {
    const uint4* words;         // [strips][tiles][32 * WORDS u32]
    const __half* row_scales;   // [strips][128]; 0 for rows that do not exist
    const int2* places;         // [strips]: output row of the first row, and how many exist
    uint4* codes;               // records [rows / 16][spans] of 8192 bytes
    int strips;
    int tiles;
    int spans;
    int silu;                   // strips are pairs of gate and up: a record has 8 rows of each
    int first_row;              // output row of the first record (of gate and up: of the first 8 rows)
};

struct TrellisEmbedArgs {
    const uint32_t* words;      // [strips][tiles][32 * WORDS]
    const __half* row_scales;   // [strips][128]
    const __half* scales;       // [inputs]
    const uint32_t* tokens;     // token i is tokens[i * stride]
    float* x;                   // [m][inputs]
    int m;
    int inputs;
    int tiles;
    int stride;
};

constexpr int EXPAND_WARPS = 8;

// Lane t of four has word j for lane j: gives it word i of lane i.
DEVICE void transpose(uint32_t (&v)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int o = 1; o < 4; o *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j & o) continue;
            const uint32_t got = __shfl_xor_sync(~0u, t & o ? v[j] : v[j | o], o);
            if (t & o) v[j] = got;
            else v[j | o] = got;
        }
}

// Weights 8t .. 8t + 7 of row 16 m + 8 half + g of a unit, in pairs. `word(i)`: this lane's.
template <class C, class Word>
DEVICE void load_row(uint32_t (&v)[4], int m, int half, float scale, Word&& word) {
    constexpr int N = 8 / C::WIDTH;
    float f[8];
#pragma unroll
    for (int n = 0; n < N; n++) {
        float w[C::WIDTH];
        weights_of<C>(state_after<C>((n / 2 * 8 + m) * 4 + n % 2 * 2 + half, word), w);
#pragma unroll
        for (int i = 0; i < C::WIDTH; i++) f[n * C::WIDTH + i] = w[i] * scale;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = half2_bits(__float22half2_rn(make_float2(f[2 * i], f[2 * i + 1])));
    // This lane's are columns 2t, 2t + 1 of each 8, or t and 4 + t.
    transpose(v);
    if constexpr (!C::OCTAGON) {
        const uint32_t a = v[0], b = v[1], c = v[2], d = v[3];
        v[0] = __byte_perm(a, b, 0x5410), v[1] = __byte_perm(c, d, 0x5410);
        v[2] = __byte_perm(a, b, 0x7632), v[3] = __byte_perm(c, d, 0x7632);
    }
}

template <class C>
DEVICE void trellis_expand(const TrellisExpandArgs& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const int each = p.silu ? 2 : 1, strip = blockIdx.y * each, tile = blockIdx.x * EXPAND_WARPS + warp;
    uint32_t* const own = reinterpret_cast<uint32_t*>(dynamic_shared()) + warp * (each * C::WORDS * 32) + lane;
    const bool there = tile < p.tiles;
    launch_dependents();
    const int2 place = __ldg(p.places + strip);
    for (int s = 0; there && s < each; s++) {
        const uint32_t* const from = reinterpret_cast<const uint32_t*>(p.words) + (size_t(strip + s) * p.tiles + tile) * (C::WORDS * 32);
        uint32_t* const to = own + s * (C::WORDS * 32);
#pragma unroll
        for (int i = 0; i < C::WORDS / 4; i++) {
            const uint4 w = load_stream(from + i * 128 + lane * 4);
            to[i * 128] = w.x, to[i * 128 + 32] = w.y, to[i * 128 + 64] = w.z, to[i * 128 + 96] = w.w;
        }
        if constexpr (C::WORDS % 4 == 2) {
            constexpr int DONE = C::WORDS / 4 * 128;
            const uint2 w = load_stream_8(from + DONE + lane * 2);
            to[DONE] = w.x, to[DONE + 32] = w.y;
        }
    }
    const __half* const scales = p.row_scales + size_t(strip) * STRIP + g;
    wait_for_prerequisites();   // it may read what is here

    // Record by record: its rows g and g + 8 are those of one strip, or of gate and up.
    const int rows = p.silu ? 8 : 16;
    uint4* to = p.codes + (size_t((place.x - p.first_row) / rows) * p.spans + blockIdx.x) * 512 + warp * 64 + lane;
#pragma unroll 1
    for (int first = 0; first < min(place.y, STRIP); first += rows, to += size_t(p.spans) * 512) {
        uint4 out[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (there) {
            uint32_t v[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int s = p.silu ? i : 0, row = first + (p.silu ? 0 : 8 * i);
                const float scale = __half2float(__ldg(scales + s * STRIP + row)) * (1.f / 128.f);
                load_row<C>(v[i], row / 16, row / 8 % 2, scale, [&](int word) { return own[(s * C::WORDS + word) * 32]; });
            }
            out[0] = make_uint4(v[0][0], v[1][0], v[0][1], v[1][1]);
            out[1] = make_uint4(v[0][2], v[1][2], v[0][3], v[1][3]);
        }
        to[0] = out[0], to[32] = out[1];
    }
}

template <class C>
DEVICE void trellis_embed(const TrellisEmbedArgs& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x;
    launch_dependents();
    wait_for_prerequisites();
    const uint32_t token = __ldcg(p.tokens + size_t(i) * p.stride);
    const int row = token % STRIP;
    const uint32_t* const strip = p.words + size_t(token / STRIP) * p.tiles * (C::WORDS * 32);
    const float scale = __half2float(__ldg(p.row_scales + token)) * (1.f / 128.f);
    for (int block = warp * BLOCK; block < p.inputs; block += EXPAND_WARPS * BLOCK) {
        // A lane has four columns, which are of several of the row's sequences.
        const uint32_t* const unit = strip + size_t(block / TILE + lane / 8) * (C::WORDS * 32);
        float v[4];
#pragma unroll
        for (int j = 0; j < 4 / C::WIDTH; j++) {
            const int column = lane % 8 * (4 / C::WIDTH) + j, n = column / 4;
            const int of = row % 8 * 4 + column % 4, step = (n / 2 * 8 + row / 16) * 4 + n % 2 * 2 + row / 8 % 2;
            float w[C::WIDTH];
            weights_of<C>(state_after<C>(step, [&](int word) { return __ldg(unit + word_place<C>(of, word)); }), w);
#pragma unroll
            for (int e = 0; e < C::WIDTH; e++) v[j * C::WIDTH + e] = w[e] * scale;
        }
        transform(v);
        const __half2* const scales = reinterpret_cast<const __half2*>(p.scales + block) + 2 * lane;
        const float2 a = __half22float2(__ldg(scales)), b = __half22float2(__ldg(scales + 1));
        reinterpret_cast<float4*>(p.x + size_t(i) * p.inputs + block)[lane] = make_float4(v[0] * a.x, v[1] * a.y, v[2] * b.x, v[3] * b.y);
    }
}

#define EXPAND(code)                                                                                                                            \
    extern "C" __global__ __launch_bounds__(EXPAND_WARPS * 32) void trellis_expand_##code(const __grid_constant__ TrellisExpandArgs p) {         \
        trellis_expand<code>(p);                                                                                                                \
    }                                                                                                                                           \
    extern "C" __global__ __launch_bounds__(EXPAND_WARPS * 32) void trellis_embed_##code(const __grid_constant__ TrellisEmbedArgs p) {           \
        trellis_embed<code>(p);                                                                                                                 \
    }

TRELLIS_CODES(EXPAND)
