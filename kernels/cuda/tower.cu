// The tower of a model that sees, beside its products, over the m patches of one image. Rows are f32, and what goes
// into a product is FP16 in operand order, zero past a row's values.
//
//   tower_positions   x[i] += bias + what the table of positions has where patch i stands, between its four nearest entries
//   tower_norm        half[i] = LayerNorm(x[i]), once a product's bias has been added to x[i]
//   tower_heads       queries, keys and values with their biases, in FP16, head by head; queries and keys turned by row and column
//   tower_attention   out[i] = softmax(q[i] K) V over all patches
//   tower_gelu        half[i] = gelu(x[i] + bias)
//
// Patches stand in squares of merge x merge, row by row, and within a square row by row. All widths are multiples of 4.
#include "tower.cuh"

// Where a patch of an image of so many columns stands.
DEVICE int2 patch_place(int patch, int columns, int merge) {
    const int square = patch / (merge * merge), within = patch % (merge * merge);
    return make_int2(square / (columns / merge) * merge + within / merge, square % (columns / merge) * merge + within % merge);
}

// Grid (m).
struct TowerPositionsArgs {
    float* x;             // [m][width]
    const float* bias;    // [width]
    const float* table;   // [side][side][width]
    int width;
    int side;
    int rows;             // of the image
    int columns;
    int merge;
};

extern "C" __global__ __launch_bounds__(128) void tower_positions(const __grid_constant__ TowerPositionsArgs p) {
    const int2 place = patch_place(blockIdx.x, p.columns, p.merge);
    // The table's corners are the image's.
    auto scaled = [&](int i, int n) { return float(i) * float(p.side - 1) / float(max(n, 2) - 1); };
    const float y = scaled(place.x, p.rows), z = scaled(place.y, p.columns);
    const int y0 = int(y), z0 = int(z), y1 = min(y0 + 1, p.side - 1), z1 = min(z0 + 1, p.side - 1);
    const float fy = y - float(y0), fz = z - float(z0);
    const float weights[4] = {(1.f - fy) * (1.f - fz), (1.f - fy) * fz, fy * (1.f - fz), fy * fz};
    const int entries[4] = {y0 * p.side + z0, y0 * p.side + z1, y1 * p.side + z0, y1 * p.side + z1};
    float* const x = p.x + size_t(blockIdx.x) * p.width;
    for (int k = threadIdx.x; k < p.width; k += 128) {
        float sum = p.bias[k];
#pragma unroll
        for (int i = 0; i < 4; i++) sum += weights[i] * p.table[size_t(entries[i]) * p.width + k];
        x[k] += sum;
    }
}

// Grid (m / 4); a warp takes one row.
struct TowerNormArgs {
    float* x;             // [m][width]
    const float* added;   // [added_width], for each `added_width` of a row's values; or null
    const float* gain;    // [width]
    const float* bias;    // [width]
    __half* half;         // [m / together][padded]
    int m;
    int width;
    int added_width;
    int together;         // rows that stand side by side
    int padded;
    float eps;
};

extern "C" __global__ __launch_bounds__(128) void tower_norm(const __grid_constant__ TowerNormArgs p) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= p.m) return;
    float* const x = p.x + size_t(row) * p.width;
    float sum = 0.f;
    for (int k = lane * 4; k < p.width; k += 128) {
        float4 v = *reinterpret_cast<float4*>(x + k);
        if (p.added) {
            const float4 b = *reinterpret_cast<const float4*>(p.added + k % p.added_width);
            v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
            *reinterpret_cast<float4*>(x + k) = v;
        }
        sum += v.x + v.y + v.z + v.w;
    }
    const float mean = warp_sum(sum) / p.width;
    float squares = 0.f;
    for (int k = lane * 4; k < p.width; k += 128) {
        const float4 v = *reinterpret_cast<const float4*>(x + k);
        squares += (v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean) + (v.z - mean) * (v.z - mean) + (v.w - mean) * (v.w - mean);
    }
    const float r = rsqrtf(warp_sum(squares) / p.width + p.eps);
    __half* const to = p.half + size_t(row / p.together) * p.padded;
    const int first = row % p.together * p.width;
    for (int k = lane * 4; k < p.width; k += 128) {
        const float4 v = *reinterpret_cast<const float4*>(x + k);
        const float4 gain = *reinterpret_cast<const float4*>(p.gain + k), bias = *reinterpret_cast<const float4*>(p.bias + k);
        store_four(to, first + k, make_float4((v.x - mean) * r * gain.x + bias.x, (v.y - mean) * r * gain.y + bias.y,
                                              (v.z - mean) * r * gain.z + bias.z, (v.w - mean) * r * gain.w + bias.w));
    }
    if (row % p.together < p.together - 1) return;
    for (int k = first + p.width + lane * 4; k < p.padded; k += 128) store_four(to, k, make_float4(0.f, 0.f, 0.f, 0.f));
}

// Grid (patches / 64, 3 heads): a block makes 64 patches of a head of queries, keys or values, which stand together. Rows and dims
// past those of patches and heads are zero.
struct TowerHeadsArgs {
    const float* qkv;      // [m][3][heads][dim]
    const float* bias;     // [3][heads][dim]
    const float2* turns;   // [rows or columns][dim / 4]: cosines and sines
    __half* out;           // [3][heads][patches][wide]: queries times `scale`, keys, values
    int m;
    int patches;           // m rounded up
    int heads;
    int dim;
    int wide;
    int columns;
    int merge;
    int matrices;          // dims of values in core matrices (`tower_wgmma.cu`), or 0
    float scale;
};

extern "C" __global__ __launch_bounds__(256) void tower_heads(const __grid_constant__ TowerHeadsArgs p) {
    float (*const values)[TOWER_DIM + 1] = reinterpret_cast<float (*)[TOWER_DIM + 1]>(dynamic_shared());
    int2* const places = reinterpret_cast<int2*>(values + TOWER_KEYS);
    const int row0 = blockIdx.x * TOWER_KEYS, head = blockIdx.y, kind = head / p.heads, half = p.dim / 2, quarter = p.dim / 4;
    if (threadIdx.x < TOWER_KEYS) places[threadIdx.x] = patch_place(row0 + threadIdx.x, p.columns, p.merge);
    __syncthreads();
    // A thread has a dim of each half of a head, of every so many patches.
    const int j = threadIdx.x % half, step = 256 / half;
    const float scale = kind == 0 ? p.scale : 1.f, first = p.bias[head * p.dim + j], second = p.bias[head * p.dim + half + j];
    for (int row = threadIdx.x / half; row < TOWER_KEYS && int(threadIdx.x) < step * half; row += step) {
        float x = 0.f, y = 0.f;
        if (row0 + row < p.m) {
            const float* const from = p.qkv + (size_t(row0 + row) * 3 * p.heads + head) * p.dim + j;
            const float a = from[0] + first, b = from[half] + second;
            float2 turn = make_float2(1.f, 0.f);
            if (kind < 2) turn = p.turns[(j < quarter ? places[row].x : places[row].y - 1) * quarter + j];
            x = clamp_half((a * turn.x - b * turn.y) * scale), y = clamp_half((b * turn.x + a * turn.y) * scale);
        }
        values[row][j] = x, values[row][half + j] = y;
    }
    __syncthreads();
    const int dims = kind == 2 && p.matrices ? p.matrices : p.wide;
    uint4* const out = reinterpret_cast<uint4*>(p.out + size_t(head) * p.patches * p.wide + size_t(row0) * dims);
    for (int i = threadIdx.x; i < TOWER_KEYS * dims / 8; i += 256) {
        // Eight dims of a patch; of values in matrices, eight patches of a dim.
        int row = i / (dims / 8), d = i % (dims / 8) * 8, down = 0, right = 1;
        if (p.matrices && kind == 1) row = i % TOWER_KEYS, d = i / TOWER_KEYS * 8;
        if (p.matrices && kind == 2) row = i / dims * 8, d = i % dims, down = 1, right = 0;
        uint32_t made[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            auto value = [&](int n) { return d + n * right < p.dim ? values[row + n * down][d + n * right] : 0.f; };
            made[k] = half2_bits(__float22half2_rn(make_float2(value(2 * k), value(2 * k + 1))));
        }
        out[i] = make_uint4(made[0], made[1], made[2], made[3]);
    }
}

// Grid (m).
struct TowerGeluArgs {
    const float* x;      // [m][width]
    const float* bias;   // [width]
    __half* half;        // [m][padded]
    int width;
    int padded;
    int exact;           // by the error function, not by tanh
};

template <bool EXACT>
DEVICE float gelu(float v) {
    if (EXACT) return .5f * v * (1.f + erff(v * .70710678f));
    // (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)).
    return v / (1.f + __expf(-1.5957691f * (v + .044715f * v * v * v)));
}

template <bool EXACT>
DEVICE void gelu_row(const TowerGeluArgs& p) {
    const float* const x = p.x + size_t(blockIdx.x) * p.width;
    __half* const to = p.half + size_t(blockIdx.x) * p.padded;
    for (int k = threadIdx.x * 4; k < p.padded; k += 1024) {
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (k < p.width) {
            v = *reinterpret_cast<const float4*>(x + k);
            const float4 b = *reinterpret_cast<const float4*>(p.bias + k);
            v = make_float4(gelu<EXACT>(v.x + b.x), gelu<EXACT>(v.y + b.y), gelu<EXACT>(v.z + b.z), gelu<EXACT>(v.w + b.w));
        }
        store_four(to, k, v);
    }
}

extern "C" __global__ __launch_bounds__(256) void tower_gelu(const __grid_constant__ TowerGeluArgs p) {
    if (p.exact) gelu_row<true>(p);
    else gelu_row<false>(p);
}

// Grid (queries / 128, heads). A warp takes 32 queries of a head.
// DIM: of a head with its padding; of these, values have DIMS.
template <int DIM, int DIMS>
struct TowerAttention {
    static constexpr int STEPS = DIM / 16, TILES = DIMS / 8, KEY_TILES = TOWER_KEYS / 8;
    // Of a key in shared memory: eight rows of a matrix lie in different banks.
    static constexpr int ROW = DIM * 2 + 16, TILE = TOWER_KEYS * ROW;

    const TowerAttentionArgs& p;
    uint8_t* const shared;   // two tiles of keys, two of values
    const int warp, lane, head, query0;
    uint32_t q[2][STEPS][4];     // of 16 queries each, left operands
    float out[2][TILES][4] = {};
    float top[2][2], total[2][2] = {};   // of rows g and g + 8

    DEVICE explicit TowerAttention(const TowerAttentionArgs& p)
        : p(p), shared(dynamic_shared()), warp(threadIdx.x / 32), lane(threadIdx.x % 32), head(blockIdx.y), query0(p.first + blockIdx.x * TOWER_QUERIES + warp * 32) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const __half* const from = p.heads + (size_t(head) * p.patches + min(query0 + i * 16 + r * 8 + g, p.m - 1)) * DIM + 2 * t;
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    q[i][k][r] = *reinterpret_cast<const uint32_t*>(from + 16 * k);
                    q[i][k][r + 2] = *reinterpret_cast<const uint32_t*>(from + 16 * k + 8);
                }
                top[i][r] = -INFINITY;
            }
        }
    }

    DEVICE void request(int tile) const {
        const size_t kind = size_t(p.count) * p.patches * DIM;
        const __half* const from = p.heads + kind + (size_t(head) * p.patches + tile * TOWER_KEYS) * DIM;
#pragma unroll
        for (int i = 0; i < TOWER_KEYS * DIM / 8 / 128; i++) {
            const int unit = i * 128 + threadIdx.x;
            uint8_t* const to = shared + tile % 2 * TILE + unit / (DIM / 8) * ROW + unit % (DIM / 8) * 16;
            copy_async(to, from + unit * 8);
            copy_async(to + 2 * TILE, from + kind + unit * 8);
        }
    }

    DEVICE void scores(uint32_t keys, float (&s)[2][KEY_TILES][4]) const {
        const uint32_t mine = keys + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
#pragma unroll
            for (int n = 0; n < KEY_TILES; n += 2) {
                const uint4 b = load_matrices_at(mine + n * 8 * ROW + k * 32);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma_16816(s[i][n], q[i][k][0], q[i][k][1], q[i][k][2], q[i][k][3], b.x, b.y);
                    mma_16816(s[i][n + 1], q[i][k][0], q[i][k][1], q[i][k][2], q[i][k][3], b.z, b.w);
                }
            }
        }
    }

    // Makes weights of 16 queries' scores.
    DEVICE void weigh(float (&s)[KEY_TILES][4], float (&out)[TILES][4], float (&top)[2], float (&total)[2]) const {
        float shrink[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float peak = top[r];
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) peak = fmaxf(peak, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
            shrink[r] = quick_exp2(top[r] - peak);
            top[r] = peak;
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                s[n][2 * r] = quick_exp2(s[n][2 * r] - peak), s[n][2 * r + 1] = quick_exp2(s[n][2 * r + 1] - peak);
                sum += s[n][2 * r] + s[n][2 * r + 1];
            }
            total[r] = total[r] * shrink[r] + sum;
        }
        // The greatest scores have seldom changed.
        if (!__any_sync(~0u, shrink[0] < 1.f || shrink[1] < 1.f)) return;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            out[n][0] *= shrink[0], out[n][1] *= shrink[0];
            out[n][2] *= shrink[1], out[n][3] *= shrink[1];
        }
    }

    DEVICE void add_values(uint32_t values, const float (&s)[2][KEY_TILES][4]) {
        const uint32_t mine = values + lane % 16 * ROW + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < KEY_TILES / 2; k++) {
            uint32_t weights[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float* const pair = &s[i][2 * k + e / 2][e % 2 * 2];
                    weights[i][e] = half2_bits(__float22half2_rn(make_float2(pair[0], pair[1])));
                }
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                const uint4 b = load_turned_matrices_at(mine + k * 16 * ROW + n * 16);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma_16816(out[i][n], weights[i][0], weights[i][1], weights[i][2], weights[i][3], b.x, b.y);
                    if (n + 1 < TILES) mma_16816(out[i][n + 1 < TILES ? n + 1 : n], weights[i][0], weights[i][1], weights[i][2], weights[i][3], b.z, b.w);
                }
            }
        }
    }

    DEVICE void store() {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = total[i][r];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                const int row = query0 + i * 16 + r * 8 + g;
                if (row >= p.m) continue;
                const float inverse = 1.f / sum;
                __half* const to = p.out + size_t(row) * p.padded;
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const float2 v = make_float2(out[i][n][2 * r] * inverse, out[i][n][2 * r + 1] * inverse);
                    if (8 * n + 2 * t < p.dim) *reinterpret_cast<__half2*>(to + operand_index(head * p.dim + 8 * n + 2 * t)) = __float22half2_rn(v);
                }
                if (head < p.count - 1) continue;
                for (int k = p.count * p.dim + 4 * t; k < p.padded; k += 16) store_four(to, k, make_float4(0.f, 0.f, 0.f, 0.f));
            }
        }
    }

    DEVICE void run() {
        const int tiles = (p.m + TOWER_KEYS - 1) / TOWER_KEYS;
        request(0);
        copy_commit();
        for (int tile = 0; tile < tiles; tile++) {
            copy_wait<0>();
            __syncthreads();
            if (tile + 1 < tiles) request(tile + 1);
            copy_commit();
            const uint32_t keys = shared_address(shared) + tile % 2 * TILE;
            float s[2][KEY_TILES][4] = {};
            scores(keys, s);
            if (const int behind = p.m - tile * TOWER_KEYS; behind < TOWER_KEYS) {
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (8 * n + lane % 4 * 2 + e % 2 >= behind) s[0][n][e] = s[1][n][e] = -INFINITY;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) weigh(s[i], out[i], top[i], total[i]);
            add_values(keys + 2 * TILE, s);
        }
        store();
    }
};

extern "C" __global__ __launch_bounds__(128, 2) void tower_attention_64(const __grid_constant__ TowerAttentionArgs p) { TowerAttention<64, 64>(p).run(); }
extern "C" __global__ __launch_bounds__(128, 2) void tower_attention_80(const __grid_constant__ TowerAttentionArgs p) { TowerAttention<80, 72>(p).run(); }
