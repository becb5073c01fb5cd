// The recurrence of many rows (`delta.cuh`), which go through in chunks of 16 tokens (the WY form; Yang et al.,
// arXiv 2406.06484). With G the sum of the logarithms of g up to a token of the chunk, S the matrix in front of the
// chunk and
//
//   A[i][j] = beta_i (k_i . k_j) exp(G_i - G_j), j < i         P[i][j] = (q_i . k_j) exp(G_i - G_j), j <= i
//   r_i = beta_i (v_i - exp(G_i) S^T k_i)
//
// the tokens' d are the solution of (I + A) d = r, o_i = exp(G_i) S^T q_i + sum_j P[i][j] d_j, and behind the chunk of
// C tokens S is exp(G_C) S + sum_j exp(G_C - G_j) k_j d_j^T. `delta_chunks` computes (I + A)^-1 and P of all chunks at
// once, and `delta_scan` goes through them in order, its products on tensor cores: in BF16, each operand in two parts
// (three products for one), which keeps 17 bits of it.
#include "delta.cuh"

// As `mma_16816`, in BF16.
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A pair of values rounded to BF16, and what rounding lost of them.
DEVICE uint2 split_bf16(float x, float y) {
    uint2 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.x) : "f"(y), "f"(x));
    const float lost_x = x - __uint_as_float(v.x << 16), lost_y = y - __uint_as_float(v.x & 0xffff0000u);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.y) : "f"(lost_y), "f"(lost_x));
    return v;
}

// N registers of an operand in two parts.
template <int N>
struct Parts {
    uint32_t high[N], low[N];

    DEVICE void set(int i, uint2 pair) { high[i] = pair.x, low[i] = pair.y; }
};

// A left operand of 16 inputs: what a lane holds of two sums that follow one another.
DEVICE Parts<4> left(const float (&first)[4], const float (&second)[4]) {
    Parts<4> a;
    a.set(0, split_bf16(first[0], first[1])), a.set(1, split_bf16(first[2], first[3]));
    a.set(2, split_bf16(second[0], second[1])), a.set(3, split_bf16(second[2], second[3]));
    return a;
}

DEVICE Parts<2> right(uint2 first, uint2 second) {
    Parts<2> b;
    b.set(0, first), b.set(1, second);
    return b;
}

DEVICE void mma_parts(float (&d)[4], const Parts<4>& a, const Parts<2>& b) {
    mma_bf16(d, a.low, b.high);
    mma_bf16(d, a.high, b.low);
    mma_bf16(d, a.high, b.high);
}

// The columns of 16 values, for products on tensor cores. Lane (g, t) has of values g and g + 8 keys 8j + 2t and the
// next, as {g: 2t, 2t + 1, g + 8: 2t, 2t + 1}.
struct StateTile {
    float s[16][4];

    DEVICE void clear() {
#pragma unroll
        for (int j = 0; j < 16; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
    }
    DEVICE void load(const float* matrix, int tile, int lane) {
        const float2* const from = reinterpret_cast<const float2*>(matrix + tile * 2 * OF_EIGHT) + lane;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float2 v = __ldcg(from + j * 32), w = __ldcg(from + OF_EIGHT / 2 + j * 32);
            s[j][0] = v.x, s[j][1] = v.y, s[j][2] = w.x, s[j][3] = w.y;
        }
    }
    DEVICE void store(float* matrix, int tile, int lane) const {
        float2* const to = reinterpret_cast<float2*>(matrix + tile * 2 * OF_EIGHT) + lane;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            __stcg(to + j * 32, make_float2(s[j][0], s[j][1]));
            __stcg(to + OF_EIGHT / 2 + j * 32, make_float2(s[j][2], s[j][3]));
        }
    }
};

// Many rows: the convolution, SiLU, and the lengths of queries and keys. Grid (m / 8, heads of q, k and v); a warp
// takes a head of a row.
struct DeltaConvArgs {
    DeltaLayer layer;
    const float* qkvz;   // [m][stride]
    const Row* rows;     // [m]
    float* mixed;        // [m][channels]; of each two values of q and k, `split_bf16` of them
    int m;
};

extern "C" __global__ void delta_conv(const __grid_constant__ DeltaConvArgs p) {
    const DeltaLayer& layer = p.layer;
    const int m = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    if (m >= p.m) return;
    const Row row = p.rows[m];
    const int channel = head * DELTA_DIM + lane * 4;
    float4 x[CONV];
#pragma unroll
    for (int j = 0; j < CONV; j++) {
        const int back = CONV - 1 - j;
        x[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (row.position < back) continue;
        // Rows in front of a sequence's first new one are among those kept.
        const bool here = m >= back && p.rows[m - back].slot == row.slot && p.rows[m - back].position == row.position - back;
        const float* const from = here ? p.qkvz + size_t(m - back) * layer.stride() : layer.input(row.slot, row.position - back);
        x[j] = *reinterpret_cast<const float4*>(from + channel);
    }
    const float4* const conv = reinterpret_cast<const float4*>(layer.conv) + channel;
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 w = __ldg(conv + i);
        auto of = [&](float4 v) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; };
        y[i] = silu(fmaf(of(x[3]), w.w, fmaf(of(x[2]), w.z, fmaf(of(x[1]), w.y, of(x[0]) * w.x))));
    }
    float* const to = p.mixed + size_t(m) * layer.channels() + channel;
    if (head >= 2 * layer.key_heads) {
        *reinterpret_cast<float4*>(to) = make_float4(y[0], y[1], y[2], y[3]);
        return;
    }
    const float sum = warp_sum(y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3]);
    const float scale = rsqrtf(sum + UNIT_EPS) * (head < layer.key_heads ? QUERY_LENGTH : 1.f);
    const uint2 first = split_bf16(y[0] * scale, y[1] * scale), second = split_bf16(y[2] * scale, y[3] * scale);
    *reinterpret_cast<uint4*>(to) = make_uint4(first.x, first.y, second.x, second.y);
}

// Rows of a sequence among many.
constexpr int MOST_SPANS = 64;
constexpr int CHUNK = 16;

struct DeltaSpan {
    int row;        // its first
    int count;
    int position;   // of the first
    int slot;
    int mark;       // after so many rows the state is also written to `place`; 0: it is not
    int place;
    int chunk;      // the number of its first chunk

    // Chunks in front of the mark end there.
    DEVICE int marked_chunks() const { return (mark + CHUNK - 1) / CHUNK; }
    DEVICE int chunks() const { return marked_chunks() + (count - mark + CHUNK - 1) / CHUNK; }
    // The first row of chunk `i`, and its rows.
    DEVICE int first(int i) const {
        const int before = marked_chunks();
        return i < before ? i * CHUNK : mark + (i - before) * CHUNK;
    }
    DEVICE int rows(int i) const { return min(CHUNK, (i < marked_chunks() ? mark : count) - first(i)); }
};

// What `delta_chunks` computes of a chunk for a value head; rows that a chunk does not have change nothing.
struct ChunkParts {
    float inverse[CHUNK][CHUNK];   // (I + A)^-1, less the diagonal
    float p[CHUNK][CHUNK];
    float grown[CHUNK];            // exp(G_i)
    float beta[CHUNK];
    float left[CHUNK];             // exp(G_C - G_i)
    float all[CHUNK];              // exp(G_C), in each
};

// Many rows: of each chunk what does not depend on the state. Grid (most chunks of a span, key_heads, spans).
struct DeltaChunksArgs {
    DeltaLayer layer;
    const float* mixed;   // [m][channels], of `delta_conv`
    const float* ba;      // [m][2 value_heads]
    ChunkParts* parts;    // [chunks][value_heads]
    DeltaSpan spans[MOST_SPANS];
};

// Words between rows in shared memory, such that lanes (g, t) read two neighbours of eight rows without conflict.
constexpr int ROW_STRIDE = DELTA_DIM + 8;

extern "C" __global__ __launch_bounds__(128) void delta_chunks(const __grid_constant__ DeltaChunksArgs p) {
    __shared__ __align__(16) uint32_t rows[2][CHUNK][ROW_STRIDE];   // k, q, in parts
    __shared__ float products[2][CHUNK][CHUNK + 1];              // of k and q with k
    __shared__ float sums[4][CHUNK];                             // G, of a warp's head
    __shared__ float a[4][CHUNK][CHUNK];
    const DeltaLayer& layer = p.layer;
    const DeltaSpan& span = p.spans[blockIdx.z];
    const int chunk = blockIdx.x, key_head = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (chunk >= span.chunks()) return;
    const int count = span.rows(chunk);
    const size_t row0 = span.row + span.first(chunk);
    const float* const keys = p.mixed + row0 * layer.channels() + layer.keys() + key_head * DELTA_DIM;
#pragma unroll
    for (int i = 0; i < 2 * CHUNK * (DELTA_DIM / 4) / 128; i++) {
        const int of = i * 4 + warp, which = of / CHUNK, r = of % CHUNK;   // a warp takes a row
        const float* const from = keys + size_t(r) * layer.channels() - which * layer.keys();
        const uint4 v = r < count ? *reinterpret_cast<const uint4*>(from + lane * 4) : make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(&rows[which][r][lane * 4]) = v;
    }
    __syncthreads();
    // Warps 0 and 1: eight columns of the products of k each; 2 and 3: of q with k.
    const int which = warp / 2, column0 = warp % 2 * 8;
    float d[4] = {};
#pragma unroll
    for (int j = 0; j < DELTA_DIM / 16; j++) {
        auto pair = [&](int of, int r, int half) { return *reinterpret_cast<const uint2*>(&rows[of][r][16 * j + 8 * half + 2 * t]); };
        Parts<4> upper;
#pragma unroll
        for (int i = 0; i < 4; i++) upper.set(i, pair(which, g + i % 2 * 8, i / 2));
        mma_parts(d, upper, right(pair(0, column0 + g, 0), pair(0, column0 + g, 1)));
    }
#pragma unroll
    for (int c = 0; c < 4; c++) products[which][g + c / 2 * 8][column0 + 2 * t + c % 2] = d[c];
    __syncthreads();
    const int of_key = layer.value_heads / layer.key_heads;
#pragma unroll 1
    for (int i = warp; i < of_key; i += 4) {
        const int h = layer.tiled ? key_head + i * layer.key_heads : key_head * of_key + i;
        ChunkParts& to = p.parts[size_t(span.chunk + chunk) * layer.value_heads + h];
        // Lanes 0 .. 15 have a row each.
        float growth = 0.f, beta = 0.f;
        if (lane < count) {
            const float2 of = layer.gates(p.ba + (row0 + lane) * 2 * layer.value_heads, h);
            growth = of.x, beta = of.y;
        }
#pragma unroll
        for (int m = 1; m < CHUNK; m <<= 1) {
            const float before = __shfl_up_sync(~0u, growth, m);
            if (lane >= m) growth += before;
        }
        const float whole = __shfl_sync(~0u, growth, CHUNK - 1);
        if (lane < CHUNK) {
            sums[warp][lane] = growth;
            to.grown[lane] = expf(growth), to.beta[lane] = beta;
            to.left[lane] = expf(whole - growth), to.all[lane] = expf(whole);
        }
        __syncwarp();
        // Lane l has row l % 16, and every other column.
        const int row = lane % CHUNK;
        const float mine = sums[warp][row], row_beta = __shfl_sync(~0u, beta, row);
#pragma unroll
        for (int c = 0; c < CHUNK / 2; c++) {
            const int column = 2 * c + lane / CHUNK;
            const float fade = column <= row ? expf(mine - sums[warp][column]) : 0.f;
            a[warp][row][column] = column < row ? row_beta * products[0][row][column] * fade : 0.f;
            to.p[row][column] = products[1][row][column] * fade;
        }
        __syncwarp();
        // Lane l has column l % 16 of the inverse: x_i = [i = column] - sum_k A[i][k] x_k.
        float x[CHUNK];
#pragma unroll
        for (int r = 0; r < CHUNK; r++) {
            float sum = r == row ? 1.f : 0.f;
#pragma unroll
            for (int k = 0; k < r; k++) sum = fmaf(-a[warp][r][k], x[k], sum);
            x[r] = sum;
        }
#pragma unroll
        for (int r = 0; r < CHUNK; r++)
            if (lane < CHUNK) to.inverse[r][lane] = r == lane ? 0.f : x[r];
        __syncwarp();
    }
}

// Many rows: the recurrence. A block runs SCAN_WARPS * 16 values of a head of one sequence through all of its chunks.
// Grid (value_heads * parts of a head, spans).
constexpr int SCAN_WARPS = 4;
constexpr int SCAN_VALUES = SCAN_WARPS * 16;
constexpr int SCAN_PARTS = DELTA_DIM / SCAN_VALUES;

struct DeltaScanArgs {
    DeltaLayer layer;
    const float* mixed;        // [m][channels], of `delta_conv`
    const float* qkvz;         // [m][stride]
    const ChunkParts* parts;   // [chunks][value_heads]
    float* out;                // [m][value_heads * 128]
    DeltaSpan spans[MOST_SPANS];
};

struct ScanShared {
    uint32_t rows[2][CHUNK][ROW_STRIDE];   // k, q, in parts
    float v[CHUNK][SCAN_VALUES + 4];
    ChunkParts parts;
};
static_assert(sizeof(ScanShared) % 16 == 0 && 2 * sizeof(ScanShared) <= 48 << 10);

// Adds S^T k to the first half of x, and S^T q to the second, of all tokens of a chunk.
DEVICE void multiply_state(float (&x)[4][4], const StateTile& state, const ScanShared& sm, int g, int t) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const Parts<4> s = left(state.s[2 * j], state.s[2 * j + 1]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint2* const of = reinterpret_cast<const uint2*>(&sm.rows[n / 2][n % 2 * 8 + g][16 * j + 2 * t]);
            mma_parts(x[n], s, right(of[0], of[4]));
        }
    }
}

extern "C" __global__ __launch_bounds__(SCAN_WARPS * 32) void delta_scan(const __grid_constant__ DeltaScanArgs p) {
    __shared__ __align__(16) ScanShared buffers[2];
    const DeltaLayer& layer = p.layer;
    const DeltaSpan& span = p.spans[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int h = blockIdx.x / SCAN_PARTS, part = blockIdx.x % SCAN_PARTS, value0 = h * DELTA_DIM + part * SCAN_VALUES;
    const int key0 = layer.key_head(h) * DELTA_DIM, keys = layer.keys(), heads = layer.value_heads;
    const size_t channels = layer.channels();
    const int chunks = span.chunks();

    auto request = [&](int chunk) {
        ScanShared& to = buffers[chunk % 2];
        const int count = span.rows(chunk);
        const float* const from = p.mixed + (span.row + span.first(chunk)) * channels;
        // A warp takes a row at a time. Rows that are not there are not read: what they do is multiplied by zero, but
        // must be finite.
#pragma unroll
        for (int i = 0; i < CHUNK / SCAN_WARPS; i++) {
            const int r = i * SCAN_WARPS + warp;
            uint32_t* const k = to.rows[0][r] + lane * 4;
            uint32_t* const q = to.rows[1][r] + lane * 4;
            float* const v = to.v[r] + lane * 4;
            if (r < count) {
                const float* const row = from + r * channels + lane * 4;
                copy_async(k, row + keys + key0);
                copy_async(q, row + key0);
                if (lane < SCAN_VALUES / 4) copy_async(v, row + 2 * keys + value0);
            } else {
                const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
                *reinterpret_cast<float4*>(k) = zero, *reinterpret_cast<float4*>(q) = zero;
                if (lane < SCAN_VALUES / 4) *reinterpret_cast<float4*>(v) = zero;
            }
        }
        const float4* const parts = reinterpret_cast<const float4*>(p.parts + size_t(span.chunk + chunk) * heads + h);
        for (int i = threadIdx.x; i < int(sizeof(ChunkParts) / 16); i += SCAN_WARPS * 32) copy_async(reinterpret_cast<float4*>(&to.parts) + i, parts + i);
        copy_commit();
    };
    // Writes the inputs of rows `from` to `end` to those kept at `place`.
    auto keep_inputs = [&](int place, int from, int end) {
        for (int r = from; r < end; r++) {
            const float* const x = p.qkvz + size_t(span.row + r) * layer.stride();
            float* const to = layer.input(place, span.position + r);
            const int value = 2 * keys + value0 + threadIdx.x;
            if (threadIdx.x < SCAN_VALUES) to[value] = x[value];
            const int key = key0 + threadIdx.x;
            static_assert(SCAN_WARPS * 32 == DELTA_DIM, "a thread a channel");
            if (part == 0 && layer.first_of_key(h)) to[key] = x[key], to[keys + key] = x[keys + key];
        }
    };

    request(0);
    StateTile state;
    const int tile = part * SCAN_WARPS + warp;
    if (span.position == 0) state.clear();
    else state.load(layer.matrix(span.slot, h), tile, lane);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        const ScanShared& sm = buffers[chunk % 2];
        copy_wait<0>();
        __syncthreads();   // and the other buffer is read
        if (chunk + 1 < chunks) request(chunk + 1);
        // Lane (g, t) has of all sums values g and g + 8 of the warp's, and of each eight tokens 2t and the next.
        float x[4][4] = {};   // S^T k, then S^T q, of eight tokens each
        multiply_state(x, state, sm, g, t);
        float d[2][4], o[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int token = 8 * n + 2 * t + c % 2;
                const float v = sm.v[token][warp * 16 + g + c / 2 * 8];
                d[n][c] = sm.parts.beta[token] * (v - sm.parts.grown[token] * x[n][c]);
                o[n][c] = sm.parts.grown[token] * x[2 + n][c];
            }
        }
        auto of_tokens = [&](const float (&of)[CHUNK][CHUNK], int n) {
            const float* const v = &of[8 * n + g][2 * t];
            return right(split_bf16(v[0], v[1]), split_bf16(v[8], v[9]));
        };
        Parts<4> r = left(d[0], d[1]);
#pragma unroll
        for (int n = 0; n < 2; n++) mma_parts(d[n], r, of_tokens(sm.parts.inverse, n));
        r = left(d[0], d[1]);
#pragma unroll
        for (int n = 0; n < 2; n++) mma_parts(o[n], r, of_tokens(sm.parts.p, n));
        const int count = span.rows(chunk);
        float* const to = p.out + size_t(span.row + span.first(chunk)) * heads * DELTA_DIM + value0 + warp * 16 + g;
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int token = 8 * n + 2 * t + c % 2;
                if (token < count) to[size_t(token) * heads * DELTA_DIM + c / 2 * 8] = o[n][c];
                d[n][c] *= sm.parts.left[token];
            }
        }
        r = left(d[0], d[1]);
        const float all = sm.parts.all[0];
        const uint32_t halves = g % 2 == 0 ? 0x5410 : 0x7632;
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) state.s[j][c] *= all;
            // Of tokens 2t and the next, and of those eight behind them, key 8j + g: one of a pair of keys.
            auto of_key = [&](int token) {
                const uint2 a = *reinterpret_cast<const uint2*>(&sm.rows[0][token][8 * j + g / 2 * 2]);
                const uint2 b = *reinterpret_cast<const uint2*>(&sm.rows[0][token + 1][8 * j + g / 2 * 2]);
                return make_uint2(__byte_perm(a.x, b.x, halves), __byte_perm(a.y, b.y, halves));
            };
            mma_parts(state.s[j], r, right(of_key(2 * t), of_key(2 * t + 8)));
        }
        if (span.mark > 0 && chunk + 1 == span.marked_chunks()) state.store(layer.matrix(span.place, h), tile, lane);
    }
    state.store(layer.matrix(span.slot, h), tile, lane);
    keep_inputs(span.slot, max(0, span.count - (CONV - 1)), span.count);
    if (span.mark > 0) keep_inputs(span.place, span.mark - (CONV - 1), span.mark);
}

// Many rows: norms and gates of the outputs. Grid (m / 8, value_heads); a warp takes a head of a row.
struct DeltaGateArgs {
    DeltaLayer layer;
    const float* o;      // [m][value_heads * 128]
    const float* qkvz;   // [m][stride]
    float* out;          // [m][value_heads * 128], or null
    __half* half;        // [m][padded] in operand order, or null
    int m;
    int padded;
    int sigmoid;         // gates are sigmoid(z), not silu(z)
};

extern "C" __global__ void delta_gate(const __grid_constant__ DeltaGateArgs p) {
    const DeltaLayer& layer = p.layer;
    const int m = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.y;
    if (m >= p.m) return;
    const int values = layer.value_heads * DELTA_DIM, at = h * DELTA_DIM + lane * 4;
    const float4 o = *reinterpret_cast<const float4*>(p.o + size_t(m) * values + at);
    const float4 z = *reinterpret_cast<const float4*>(p.qkvz + size_t(m) * layer.stride() + layer.channels() + at);
    const float4 norm = __ldg(reinterpret_cast<const float4*>(layer.norm) + lane);
    const float4 y = p.sigmoid ? sigmoid_output(o, z, norm, layer.eps) : gate_output(o, z, norm, layer.eps);
    if (p.out != nullptr) *reinterpret_cast<float4*>(p.out + size_t(m) * values + at) = y;
    if (p.half != nullptr) put_halves(p.half + size_t(m) * p.padded, at, y);
}

// Copies what is kept of a sequence to another place, in all layers. Grid (blocks, layers).
struct CopyStatesArgs {
    float* parts[2];      // [layers][places][words of a place]: matrices, inputs
    int words[2];         // float4s of a place
    int places;
    int from;
    int to;
};

extern "C" __global__ void copy_states(const __grid_constant__ CopyStatesArgs p) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float4* const all = reinterpret_cast<float4*>(p.parts[i]) + size_t(blockIdx.y) * p.places * p.words[i];
        const float4* const from = all + size_t(p.from) * p.words[i];
        float4* const to = all + size_t(p.to) * p.words[i];
        for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < p.words[i]; k += gridDim.x * blockDim.x) to[k] = from[k];
    }
}
