// Gated DeltaNet (Yang et al., arXiv 2412.06464). A sequence has a matrix S [128 keys][128 values] per value head.
// A token with query q and key k (of length 1; q is then divided by the root of 128), value v, decay g and beta makes
//
//   S = g S;  d = beta (v - S^T k);  S += k d^T;  o = S^T q
//
// after a causal convolution over the last CONV tokens and SiLU made q, k and v of the products of the layer. The
// output of a head is the RMSNorm of o, times silu(z).
//
// Columns of S, one for each value, do not depend on each other: a warp keeps 16 of them in registers (`StateTile`).
//
// A step feeds its rows one by one: S^T k and S^T q are summed together before S changes, as
// o = g S^T q + (k . q) d. Many rows go through in chunks of 16 tokens (the WY form; Yang et al., arXiv 2406.06484).
// With G the sum of the logarithms of g up to a token of the chunk, S the matrix in front of the chunk and
//
//   A[i][j] = beta_i (k_i . k_j) exp(G_i - G_j), j < i         P[i][j] = (q_i . k_j) exp(G_i - G_j), j <= i
//   r_i = beta_i (v_i - exp(G_i) S^T k_i)
//
// the tokens' d are the solution of (I + A) d = r, o_i = exp(G_i) S^T q_i + sum_j P[i][j] d_j, and behind the chunk of
// C tokens S is exp(G_C) S + sum_j exp(G_C - G_j) k_j d_j^T. `delta_chunks` computes (I + A)^-1 and P of all chunks at
// once, and `delta_scan` goes through them in order, its products on tensor cores: in BF16, each operand in two parts
// (three products for one), which keeps 17 bits of it.
//
// With a matrix are kept the convolution's last inputs, position p in row p % INPUTS.
#include "columns.cuh"
#include "rows.cuh"

constexpr int DELTA_DIM = 128;
constexpr int CONV = 4;
// Rows of one sequence in a step, at most.
constexpr int MOST_DELTA_RUN = 16;
// Of a sequence's inputs of the convolution, those that are kept: while the blocks of a step write the newest, others
// still read the CONV - 1 in front of them.
constexpr int INPUTS = 20;
static_assert(INPUTS >= MOST_DELTA_RUN + CONV - 1);
constexpr int MATRIX = DELTA_DIM * DELTA_DIM;

struct DeltaLayer {
    const float* conv;      // [channels][CONV], that of the current token last
    const float* decay;     // [value_heads]: rates of decay, negated
    const float* dt_bias;   // [value_heads]
    const float* norm;      // [128]
    float* matrices;        // [places][value_heads][MATRIX]
    float* inputs;          // [places][INPUTS][channels]
    int key_heads;
    int value_heads;
    int tiled;              // value head h uses key head h % key_heads; otherwise those of a key head are neighbours
    float eps;

    DEVICE int keys() const { return key_heads * DELTA_DIM; }
    DEVICE int channels() const { return 2 * keys() + value_heads * DELTA_DIM; }
    // Values in a row of products: channels, and z.
    DEVICE int stride() const { return channels() + value_heads * DELTA_DIM; }
    DEVICE int key_head(int h) const { return tiled ? h % key_heads : h / (value_heads / key_heads); }
    // The first value head of its key head: what a key head has once is its work.
    DEVICE bool first_of_key(int h) const { return tiled ? h < key_heads : h % (value_heads / key_heads) == 0; }
    DEVICE float* matrix(int place, int h) const { return matrices + (size_t(place) * value_heads + h) * MATRIX; }
    DEVICE float* input(int place, int position) const { return inputs + (size_t(place) * INPUTS + position % INPUTS) * channels(); }
    // The logarithm of the decay, and beta, of a head, from its `b` and `a`.
    DEVICE float2 gates(float b, float a, int h) const {
        const float x = a + __ldg(dt_bias + h);
        const float step = x > 20.f ? x : log1pf(expf(x));
        return make_float2(__ldg(decay + h) * step, sigmoid(b));
    }
    // From a row's, [2 value_heads].
    DEVICE float2 gates(const float* ba, int h) const { return gates(__ldcg(ba + h), __ldcg(ba + value_heads + h), h); }
};

DEVICE float silu(float x) { return x * sigmoid(x); }
constexpr float UNIT_EPS = 1e-6f;
constexpr float QUERY_LENGTH = 0.08838834764831845f;   // 1 / sqrt(128)

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

// In memory a head's matrix is, for each 8 values, [16 j][32 lanes (g, t)] pairs: of value g keys 8j + 2t and the next.
constexpr int OF_EIGHT = 8 * DELTA_DIM;

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

// The columns of 8 values, for single tokens. Lane (key group a = lane % 8, b = lane / 8) has keys 32i + 4a and the three
// that follow, i < 4, of values 2b and 2b + 1: few reads of k and q serve many values.
struct StateColumns {
    float4 s[4][2];

    static DEVICE size_t place(int eight, int i, int e, int lane) {
        const int a = lane % 8, b = lane / 8;
        return (eight * OF_EIGHT + (4 * i + a / 2) * 64 + (2 * b + e) * 8 + a % 2 * 4) / 4;
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) s[i][0] = s[i][1] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    DEVICE void load(const float* matrix, int eight, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) s[i][e] = __ldcg(reinterpret_cast<const float4*>(matrix) + place(eight, i, e, lane));
    }
    DEVICE void store(float* matrix, int eight, int lane) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) __stcg(reinterpret_cast<float4*>(matrix) + place(eight, i, e, lane), s[i][e]);
    }
    // A token: `k` and `q` [128] in shared memory, to be multiplied by `scale`s; `kq` their product with the scales;
    // `v` of the lane's values, of which it returns o.
    DEVICE float2 feed(const float* k, const float* q, float2 scale, float kq, float2 v, float2 gates, int lane) {
        float sums[2][2][2] = {};   // [of every other i][by key, by query][value]
        float4 key[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            key[i] = reinterpret_cast<const float4*>(k)[i * 8 + lane % 8];
            const float4 by[2] = {key[i], reinterpret_cast<const float4*>(q)[i * 8 + lane % 8]};
#pragma unroll
            for (int w = 0; w < 2; w++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 x = s[i][e];
                    sums[i % 2][w][e] = fmaf(x.w, by[w].w, fmaf(x.z, by[w].z, fmaf(x.y, by[w].y, fmaf(x.x, by[w].x, sums[i % 2][w][e]))));
                }
        }
#pragma unroll
        for (int w = 0; w < 2; w++) {
#pragma unroll
            for (int e = 0; e < 2; e++) sums[0][w][e] += sums[1][w][e];
        }
#pragma unroll
        for (int m = 1; m < 8; m <<= 1) {
#pragma unroll
            for (int w = 0; w < 2; w++)
#pragma unroll
                for (int e = 0; e < 2; e++) sums[0][w][e] += __shfl_xor_sync(~0u, sums[0][w][e], m);
        }
        const float decay = gates.x, beta = gates.y;
        float d[2], o[2];
        const float value[2] = {v.x, v.y};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            d[e] = beta * (value[e] - decay * (sums[0][0][e] * scale.x));
            o[e] = fmaf(kq, d[e], decay * (sums[0][1][e] * scale.y));
            d[e] *= scale.x;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float4& x = s[i][e];
                x.x = fmaf(key[i].x, d[e], decay * x.x), x.y = fmaf(key[i].y, d[e], decay * x.y);
                x.z = fmaf(key[i].z, d[e], decay * x.z), x.w = fmaf(key[i].w, d[e], decay * x.w);
            }
        return make_float2(o[0], o[1]);
    }
};

// RMSNorm of a head's output `o`, times silu(z), by a warp: lane l has values 4l .. 4l+3.
DEVICE float4 gate_output(float4 o, float4 z, float4 norm, float eps) {
    const float r = rsqrtf(warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / DELTA_DIM + eps);
    return make_float4(o.x * r * norm.x * silu(z.x), o.y * r * norm.y * silu(z.y), o.z * r * norm.z * silu(z.z), o.w * r * norm.w * silu(z.w));
}

DEVICE void put_halves(__half* row, int k, float4 v) {
    *reinterpret_cast<__half2*>(row + operand_index(k)) = __float22half2_rn(make_float2(clamp_half(v.x), clamp_half(v.y)));
    *reinterpret_cast<__half2*>(row + operand_index(k + 2)) = __float22half2_rn(make_float2(clamp_half(v.z), clamp_half(v.w)));
}

// The rows of a step: a block runs a value head of one sequence, whose rows may be a run of up to MOST_DELTA_RUN at
// consecutive positions. What it kept of the sequence is requested before the predecessor, which computes the rows'
// products, has ended.
//
// Grid (value_heads, m). Bytes: a matrix read and written per sequence and value head.
struct DeltaStepArgs {
    DeltaLayer layer;
    const float* qkvz;   // [m][stride]
    const float* ba;     // [m][2 value_heads]; null: products of `rates`, which the blocks compute
    const float* x;      // [m][hidden], with `rates`
    const float* gain;   // [hidden], of the norm of x
    const __half* rates; // [2 value_heads][hidden]
    const Step* step;    // [m]
    float* out;          // [m][value_heads * 128]
    __half* half;        // unless null, instead: [m][padded] in FP16, in operand order
    uint8_t* columns;    // unless null, instead: DigitColumns [m / column_rows, rounded up][value_heads * 2]
    int m;
    int padded;
    int column_rows;     // as in `attention_decode.cuh`
    int nibbles;
    int idle;            // the slot of rows whose results nobody uses
    int late;            // release the successor only after the predecessor's end
    int hidden;          // a multiple of 4
    float scale;         // of the products with `rates`
};

constexpr int STEP_WARPS = DELTA_DIM / 8;
// Fours of inputs of `rates` that a thread multiplies, at most.
constexpr int MOST_FOURS = 4;

extern "C" __global__ __launch_bounds__(STEP_WARPS * 32) void delta_step(const __grid_constant__ DeltaStepArgs p) {
    __shared__ __align__(16) float mixed[3][DELTA_DIM];   // q, k, v
    __shared__ float squares[8];                          // of q's four warps, then k's
    __shared__ float2 gates;
    __shared__ float rate_sums[STEP_WARPS][3];            // of a warp: squares of x, products with b's row and a's
    __shared__ __align__(16) float outputs[DELTA_DIM];
    extern __shared__ uint4 dynamic_shared[];
    const DeltaLayer& layer = p.layer;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int h = blockIdx.x, row0 = blockIdx.y;

    if (!p.late) release_successor();
    const int position = __ldcg(&p.step[row0].position), slot = __ldcg(&p.step[row0].slot);
    if (row0 > 0 && __ldcg(&p.step[row0 - 1].slot) == slot && __ldcg(&p.step[row0 - 1].position) == position - 1) return;   // a run's first row runs it
    bool same = false;
    if (lane < MOST_DELTA_RUN - 1 && row0 + 1 + lane < p.m) {
        const Step* const at = p.step + row0 + 1 + lane;
        same = __ldcg(&at->slot) == slot && __ldcg(&at->position) == position + 1 + lane;
    }
    const int rows = __ffs(~__ballot_sync(~0u, same));

    // Rows of `rates` and gains, of each four inputs by the thread that multiplies them.
    const int fours = p.hidden / 4;
    float4* const gains = reinterpret_cast<float4*>(dynamic_shared);
    uint2* const rates[2] = {reinterpret_cast<uint2*>(gains + fours), reinterpret_cast<uint2*>(gains + fours) + fours};
    if (p.rates != nullptr) {
        for (int k = threadIdx.x; k < fours; k += STEP_WARPS * 32) {
            copy_async(gains + k, p.gain + 4 * k);
#pragma unroll
            for (int i = 0; i < 2; i++) copy_async<8>(rates[i] + k, p.rates + (size_t(i) * layer.value_heads + h) * p.hidden + 4 * k);
        }
        copy_commit();
    }
    StateColumns state;
    if (position == 0) state.clear();
    else state.load(layer.matrix(slot, h), warp, lane);
    // Of the first three groups of four warps a thread has a channel.
    const int which = threadIdx.x / DELTA_DIM, of_head = threadIdx.x % DELTA_DIM, key_head = layer.key_head(h);
    const int channel = which == 2 ? 2 * layer.keys() + h * DELTA_DIM + of_head : which * layer.keys() + key_head * DELTA_DIM + of_head;
    const bool convolves = which < 3, is_used = slot != p.idle, keeps = (which == 2 || layer.first_of_key(h)) && is_used;
    float4 taps;
    float window[CONV - 1] = {};
    if (convolves) {
        taps = __ldg(reinterpret_cast<const float4*>(layer.conv) + channel);
#pragma unroll
        for (int j = 1; j < CONV; j++)
            if (position >= j) window[CONV - 1 - j] = __ldcg(layer.input(slot, position - j) + channel);
    }

    wait_for_predecessor();
    if (p.late) release_successor();
#pragma unroll 1
    for (int r = 0; r < rows; r++) {
        const float* const qkvz = p.qkvz + size_t(row0 + r) * layer.stride();
        float4 x[MOST_FOURS];
        if (p.rates != nullptr) {
#pragma unroll
            for (int i = 0; i < MOST_FOURS; i++) {
                const int k = threadIdx.x + i * STEP_WARPS * 32;
                if (k < fours) x[i] = __ldcg(reinterpret_cast<const float4*>(p.x + size_t(row0 + r) * p.hidden) + k);
            }
        }
        float4 z;
        if (warp == 0) z = __ldcg(reinterpret_cast<const float4*>(qkvz + layer.channels() + h * DELTA_DIM) + lane);
        if (convolves) {
            const float in = __ldcg(qkvz + channel);
            const float y = silu(fmaf(in, taps.w, fmaf(window[2], taps.z, fmaf(window[1], taps.y, window[0] * taps.x))));
            window[0] = window[1], window[1] = window[2], window[2] = in;
            if (keeps) layer.input(slot, position + r)[channel] = in;
            mixed[which][of_head] = y;
            if (which < 2) {
                const float sum = warp_sum(y * y);
                if (lane == 0) squares[warp] = sum;
            }
        } else if (of_head == 0 && p.rates == nullptr) {
            const float2 of = layer.gates(p.ba + size_t(row0 + r) * 2 * layer.value_heads, h);
            gates = make_float2(expf(of.x), of.y);
        }
        if (p.rates != nullptr) {
            float sums[3] = {};
            copy_wait<0>();
#pragma unroll
            for (int i = 0; i < MOST_FOURS; i++) {
                const int k = threadIdx.x + i * STEP_WARPS * 32;
                if (k >= fours) break;
                const float4 of = x[i], gain = gains[k];
                sums[0] += of.x * of.x + of.y * of.y + of.z * of.z + of.w * of.w;
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    const uint2 row = rates[w][k];
                    const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&row.x)), second = __half22float2(*reinterpret_cast<const __half2*>(&row.y));
                    sums[1 + w] += of.x * gain.x * first.x + of.y * gain.y * first.y + of.z * gain.z * second.x + of.w * gain.w * second.y;
                }
            }
#pragma unroll
            for (int m = 16; m > 0; m >>= 1) {
#pragma unroll
                for (int i = 0; i < 3; i++) sums[i] += __shfl_xor_sync(~0u, sums[i], m);
            }
            if (lane < 3) rate_sums[warp][lane] = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
        }
        __syncthreads();
        float2 of = gates;
        if (p.rates != nullptr) {
            // Lane l < 16 has the sums of warp l.
            float sums[3];
#pragma unroll
            for (int i = 0; i < 3; i++) sums[i] = rate_sums[lane % STEP_WARPS][i];
#pragma unroll
            for (int m = STEP_WARPS / 2; m > 0; m >>= 1) {
#pragma unroll
                for (int i = 0; i < 3; i++) sums[i] += __shfl_xor_sync(~0u, sums[i], m);
            }
            const float scale = p.scale * rsqrtf(sums[0] / p.hidden + layer.eps);
            of = layer.gates(sums[1] * scale, sums[2] * scale, h);
            of.x = expf(of.x);
        }
        const float q_scale = QUERY_LENGTH * rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + UNIT_EPS);
        const float k_scale = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + UNIT_EPS);
        // Each warp multiplies q and k for itself: another meeting of all would take longer.
        const float4 q = reinterpret_cast<const float4*>(mixed[0])[lane], k = reinterpret_cast<const float4*>(mixed[1])[lane];
        const float kq = warp_sum(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w) * q_scale * k_scale;
        const float2 v = reinterpret_cast<const float2*>(mixed[2])[warp * 4 + lane / 8];
        const float2 o = state.feed(mixed[1], mixed[0], make_float2(k_scale, q_scale), kq, v, of, lane);
        if (lane % 8 == 0) reinterpret_cast<float2*>(outputs)[warp * 4 + lane / 8] = o;
        __syncthreads();
        if (warp == 0) {
            const float4 norm = __ldg(reinterpret_cast<const float4*>(layer.norm) + lane);
            const float4 y = gate_output(reinterpret_cast<const float4*>(outputs)[lane], z, norm, layer.eps);
            const int row = row0 + r, at = h * DELTA_DIM + lane * 4;
            if (p.half != nullptr) {
                put_halves(p.half + size_t(row) * p.padded, at, y);
            } else if (p.columns != nullptr) {
                const int group = p.column_rows, slots = (row / group * layer.value_heads + h) * 2;
                put_four(p.columns + size_t(slots) * (group == 8 ? sizeof(DigitColumns<8>) : sizeof(DigitColumns<4>)), group, row % group, p.nibbles, y, lane);
            } else {
                *reinterpret_cast<float4*>(p.out + size_t(row) * layer.value_heads * DELTA_DIM + at) = y;
            }
        }
    }
    if (is_used) state.store(layer.matrix(slot, h), warp, lane);
}

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
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const Parts<4> s = left(state.s[2 * j], state.s[2 * j + 1]);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint2* const of = reinterpret_cast<const uint2*>(&sm.rows[n / 2][n % 2 * 8 + g][16 * j + 2 * t]);
                mma_parts(x[n], s, right(of[0], of[4]));
            }
        }
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
};

extern "C" __global__ void delta_gate(const __grid_constant__ DeltaGateArgs p) {
    const DeltaLayer& layer = p.layer;
    const int m = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.y;
    if (m >= p.m) return;
    const int values = layer.value_heads * DELTA_DIM, at = h * DELTA_DIM + lane * 4;
    const float4 o = *reinterpret_cast<const float4*>(p.o + size_t(m) * values + at);
    const float4 z = *reinterpret_cast<const float4*>(p.qkvz + size_t(m) * layer.stride() + layer.channels() + at);
    const float4 y = gate_output(o, z, __ldg(reinterpret_cast<const float4*>(layer.norm) + lane), layer.eps);
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

// x[m] *= sigmoid(score[m]): the share of an expert that all rows go through. Grid (m).
struct ScaleRowsArgs {
    const float* scores;   // [m]
    float* full;           // [m][width], or null
    __half* half;          // [m][width], or null
    int width;
};

extern "C" __global__ void scale_rows(const __grid_constant__ ScaleRowsArgs p) {
    const size_t m = blockIdx.x;
    wait_for_predecessor();
    const float scale = sigmoid(__ldcg(p.scores + m));
    for (int k = threadIdx.x; k < p.width; k += blockDim.x) {
        if (p.full != nullptr) p.full[m * p.width + k] = __ldcg(p.full + m * p.width + k) * scale;
        if (p.half != nullptr) p.half[m * p.width + k] = __float2half_rn(__half2float(__ldcg(p.half + m * p.width + k)) * scale);
    }
}
