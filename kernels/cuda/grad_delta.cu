// The gradient of gated DeltaNets over whole sequences (`delta_state.cuh` has their formulas), for training.
//
// With S = g S0 + k (beta d)^T, d = v - g S0^T k and o = S^T q of a token, the gradient dS at S, which already has that of
// later tokens, gives by the chain rule
//
//   dS += q do^T         dq = S do          du = dS^T k      dk = dS (beta d) - g S0 dd
//   dbeta = du . d       dd = dv = beta du  dS -= k dd^T     dg = sum(dS S0)      dS0 = g dS
//
// which goes from the last token to the first. The states S0 cannot be had backwards. So a first pass keeps that in front
// of every SEGMENT-th token, and what each token writes (d); the backward makes those between them again.
//
// Kernels, in their order: `grad_delta_mix` (queries and keys of their length, values, gates), `grad_delta_scan` (the
// first pass), `grad_delta_outputs` (through the norm and the gate of the output), `grad_delta_back`,
// `grad_delta_unmix` and `grad_delta_unconv` (through lengths, SiLU and the convolution). Sums have a fixed order.
#include "delta_state.cuh"

constexpr int SEGMENT = 16;

struct GradDeltaArgs {
    const float* conv;      // [channels][CONV], that of the current token last
    const float* decay;     // [value_heads]: rates of decay, negated
    const float* dt_bias;   // [value_heads]
    const float* norm;      // [128]
    const float* qkvz;      // [rows][stride]
    const float* ba;        // [rows][2 value_heads]
    const float* dout;      // [rows][values]
    float* dqkvz;           // as qkvz
    float* dba;             // as ba; in between the gates: beta, decay
    float* mixed;           // [rows][channels]: queries and keys of their length, values; then gradients at values, and at what
                            // the convolution gives
    float* scanned;         // [rows][values]: the recurrence's outputs, then gradients at them
    float* deltas;          // [rows][values]: d
    float* by_head;         // [rows][2][values]: gradients at queries and keys, by head of values
    float* lengths;         // [rows][3 key_heads]: what made queries and keys as long as they are, and q . k
    float* states;          // [sequences of a launch][value_heads][segments][MATRIX], in rows of keys
    int key_heads;
    int value_heads;
    int tiled;              // as of `DeltaLayer`
    int rows;
    int seq;                // tokens of a sequence
    int first;              // the sequences of a launch: the first one, and how many
    int sequences;
    float eps;

    DEVICE int keys() const { return key_heads * DELTA_DIM; }
    DEVICE int values() const { return value_heads * DELTA_DIM; }
    DEVICE int channels() const { return 2 * keys() + values(); }
    DEVICE int stride() const { return channels() + values(); }
    DEVICE int key_head(int h) const { return tiled ? h % key_heads : h / (value_heads / key_heads); }
    DEVICE int segments() const { return (seq + SEGMENT - 1) / SEGMENT; }
    // The n-th head of values of a key head.
    DEVICE int value_head(int key, int n) const { return tiled ? n * key_heads + key : key * (value_heads / key_heads) + n; }

    // Four channels of a row after the convolution.
    DEVICE void convolve(float (&y)[4], int row, int channel) const {
        const int t = row % seq;
        y[0] = y[1] = y[2] = y[3] = 0.f;
#pragma unroll
        for (int j = 0; j < CONV; j++) {
            const int back = CONV - 1 - j;
            if (t < back) continue;
            const float4 x = *reinterpret_cast<const float4*>(qkvz + size_t(row - back) * stride() + channel);
            const float v[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++) y[i] = fmaf(v[i], __ldg(conv + (channel + i) * CONV + j), y[i]);
        }
    }
    DEVICE float4* four(float* of_rows, int row, int width, int at) const {
        return reinterpret_cast<float4*>(of_rows + size_t(row) * width + at);
    }
};

DEVICE float silu_slope(float x) {
    const float s = sigmoid(x);
    return s * (1.f + x * (1.f - s));
}

// Grid (rows / 8, key_heads + value_heads); a warp takes a head of a row: query and key, or a value with its gates.
extern "C" __global__ void grad_delta_mix(const __grid_constant__ GradDeltaArgs p) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    if (row >= p.rows) return;
    float y[4];
    if (head >= p.key_heads) {
        const int h = head - p.key_heads, channel = 2 * p.keys() + h * DELTA_DIM + lane * 4;
        p.convolve(y, row, channel);
        *p.four(p.mixed, row, p.channels(), channel) = make_float4(silu(y[0]), silu(y[1]), silu(y[2]), silu(y[3]));
        if (lane == 0) {
            const float* const ba = p.ba + size_t(row) * 2 * p.value_heads;
            float* const gates = p.dba + size_t(row) * 2 * p.value_heads;
            const float x = ba[p.value_heads + h] + __ldg(p.dt_bias + h), step = x > 20.f ? x : log1pf(expf(x));
            gates[h] = sigmoid(ba[h]), gates[p.value_heads + h] = expf(__ldg(p.decay + h) * step);
        }
        return;
    }
    float unit[2][4];
    float* const lengths = p.lengths + size_t(row) * 3 * p.key_heads;
#pragma unroll
    for (int w = 0; w < 2; w++) {   // the query, the key
        const int channel = w * p.keys() + head * DELTA_DIM + lane * 4;
        p.convolve(y, row, channel);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = silu(y[i]), sum = fmaf(y[i], y[i], sum);
        const float scale = rsqrtf(warp_sum(sum) + UNIT_EPS) * (w == 0 ? QUERY_LENGTH : 1.f);
#pragma unroll
        for (int i = 0; i < 4; i++) unit[w][i] = y[i] * scale;
        *p.four(p.mixed, row, p.channels(), channel) = make_float4(unit[w][0], unit[w][1], unit[w][2], unit[w][3]);
        if (lane == 0) lengths[w * p.key_heads + head] = scale;
    }
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) dot = fmaf(unit[0][i], unit[1][i], dot);
    dot = warp_sum(dot);
    if (lane == 0) lengths[2 * p.key_heads + head] = dot;
}

// A block takes a head of values of a sequence. Of its matrix a thread has value `v` of keys `key` .. `key + KEYS`.
constexpr int KEYS = 32;
constexpr int DELTA_THREADS = DELTA_DIM * DELTA_DIM / KEYS;
struct Place {
    int lane, quarter, part, v, key;

    DEVICE Place() {
        const int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        quarter = warp / 4;   // of keys
        part = warp % 4;      // of values
        v = part * 32 + lane;
        key = quarter * KEYS;
    }
};

DEVICE float of_quarters(const float (&part)[4][DELTA_DIM], int v) { return part[0][v] + part[1][v] + part[2][v] + part[3][v]; }

// Grid (value_heads, sequences of the launch).
extern "C" __global__ __launch_bounds__(DELTA_THREADS, 1) void grad_delta_scan(const __grid_constant__ GradDeltaArgs p) {
    __shared__ float unit[2][2][DELTA_DIM];   // [by turns][key, query]
    __shared__ float part[2][4][DELTA_DIM];   // [S^T k, S^T q]
    const Place at;
    const int h = blockIdx.x, key_head = p.key_head(h), tid = threadIdx.x;
    const int row0 = (p.first + blockIdx.y) * p.seq, at_v = h * DELTA_DIM + at.v;
    float* const kept = p.states + (size_t(blockIdx.y) * p.value_heads + h) * p.segments() * MATRIX;
    float s[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) s[i] = 0.f;
    auto load = [&](int t) {
        if (tid >= 2 * DELTA_DIM) return;
        const int w = tid / DELTA_DIM;
        unit[t % 2][w][tid % DELTA_DIM] = p.mixed[size_t(row0 + t) * p.channels() + (w == 0 ? p.keys() : 0) + key_head * DELTA_DIM + tid % DELTA_DIM];
    };
    load(0);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < p.seq; t++) {
        const int row = row0 + t;
        if (t % SEGMENT == 0) {
            float* const to = kept + size_t(t / SEGMENT) * MATRIX + at.key * DELTA_DIM + at.v;
#pragma unroll
            for (int i = 0; i < KEYS; i++) to[i * DELTA_DIM] = s[i];
        }
        if (t + 1 < p.seq) load(t + 1);
        const float beta = p.dba[size_t(row) * 2 * p.value_heads + h], decay = p.dba[size_t(row) * 2 * p.value_heads + p.value_heads + h];
        const float v = p.mixed[size_t(row) * p.channels() + 2 * p.keys() + at_v];
        const float kq = p.lengths[size_t(row) * 3 * p.key_heads + 2 * p.key_heads + key_head];
        const float* const k = unit[t % 2][0] + at.key;
        const float* const q = unit[t % 2][1] + at.key;
        float by_key = 0.f, by_query = 0.f;
#pragma unroll
        for (int i = 0; i < KEYS; i++) by_key = fmaf(s[i], k[i], by_key), by_query = fmaf(s[i], q[i], by_query);
        part[0][at.quarter][at.v] = by_key, part[1][at.quarter][at.v] = by_query;
        __syncthreads();
        const float d = v - decay * of_quarters(part[0], at.v), u = beta * d;
        if (at.quarter == 0) {
            p.deltas[size_t(row) * p.values() + at_v] = d;
            p.scanned[size_t(row) * p.values() + at_v] = fmaf(kq, u, decay * of_quarters(part[1], at.v));
        }
#pragma unroll
        for (int i = 0; i < KEYS; i++) s[i] = fmaf(k[i], u, decay * s[i]);
        __syncthreads();
    }
}

// Grid (rows of the launch / 8, value_heads); a warp takes a head of a row: from the gradient at the gated output to those at z and at
// the recurrence's output.
extern "C" __global__ void grad_delta_outputs(const __grid_constant__ GradDeltaArgs p) {
    const int nth = blockIdx.x * 8 + threadIdx.x / 32, row = p.first * p.seq + nth;
    const int lane = threadIdx.x % 32, at = blockIdx.y * DELTA_DIM + lane * 4;
    if (nth >= p.sequences * p.seq) return;
    float4* const outputs = p.four(p.scanned, row, p.values(), at);
    const float4 o4 = *outputs, dy4 = *reinterpret_cast<const float4*>(p.dout + size_t(row) * p.values() + at);
    const float4 z4 = *reinterpret_cast<const float4*>(p.qkvz + size_t(row) * p.stride() + p.channels() + at);
    const float4 gain4 = __ldg(reinterpret_cast<const float4*>(p.norm) + lane);
    const float o[4] = {o4.x, o4.y, o4.z, o4.w}, dy[4] = {dy4.x, dy4.y, dy4.z, dy4.w};
    const float z[4] = {z4.x, z4.y, z4.z, z4.w}, gain[4] = {gain4.x, gain4.y, gain4.z, gain4.w};
    float square = 0.f, along = 0.f, normed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        normed[i] = dy[i] * gain[i] * silu(z[i]);
        square = fmaf(o[i], o[i], square), along = fmaf(normed[i], o[i], along);
    }
    const float inv = rsqrtf(warp_sum(square) / DELTA_DIM + p.eps);
    along = warp_sum(along) * inv * inv / DELTA_DIM;
    float d[4], dz[4];
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = inv * (normed[i] - o[i] * along), dz[i] = dy[i] * o[i] * inv * gain[i] * silu_slope(z[i]);
    *outputs = make_float4(d[0], d[1], d[2], d[3]);
    *p.four(p.dqkvz, row, p.stride(), p.channels() + at) = make_float4(dz[0], dz[1], dz[2], dz[3]);
}

// The sum over the warp of value `lane` of each lane's 32: at each of five steps a lane hands half of its sums on.
template <int HALF = 16>
DEVICE float sum_own(float (&x)[32], int lane) {
    const bool upper = lane & HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float sent = upper ? x[i] : x[i + HALF];
        x[i] = (upper ? x[i + HALF] : x[i]) + __shfl_xor_sync(~0u, sent, HALF);
    }
    if constexpr (HALF > 1) return sum_own<HALF / 2>(x, lane);
    else return x[0];
}

// What the tokens of a segment have.
struct DeltaSegment {
    float key[SEGMENT][DELTA_DIM], query[SEGMENT][DELTA_DIM], d[SEGMENT][DELTA_DIM], dout[SEGMENT][DELTA_DIM];
    float beta[SEGMENT], decay[SEGMENT];
};

// Grid (value_heads, sequences of the launch).
extern "C" __global__ __launch_bounds__(DELTA_THREADS, 1) void grad_delta_back(const __grid_constant__ GradDeltaArgs p) {
    __shared__ DeltaSegment segment;
    __shared__ float part[4][DELTA_DIM];        // of du, by quarters of keys
    __shared__ float sums[2][4][DELTA_DIM];     // of dq and dk, by parts of values
    __shared__ float of_beta[4], of_output[4], of_decay[DELTA_THREADS / 32];
    const Place at;
    const int h = blockIdx.x, key_head = p.key_head(h), tid = threadIdx.x;
    const int row0 = (p.first + blockIdx.y) * p.seq, at_v = h * DELTA_DIM + at.v;
    const float* const kept = p.states + (size_t(blockIdx.y) * p.value_heads + h) * p.segments() * MATRIX;
    float s[KEYS], ds[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) ds[i] = 0.f;
#pragma unroll 1
    for (int n = p.segments() - 1; n >= 0; n--) {
        const int begin = n * SEGMENT, count = min(SEGMENT, p.seq - begin);
        __syncthreads();   // the segment behind has been read
        for (int i = tid; i < count * DELTA_DIM; i += DELTA_THREADS) {
            const int t = i / DELTA_DIM, j = i % DELTA_DIM;
            const size_t row = row0 + begin + t;
            const float* const units = p.mixed + row * p.channels() + key_head * DELTA_DIM + j;
            segment.query[t][j] = units[0], segment.key[t][j] = units[p.keys()];
            segment.d[t][j] = p.deltas[row * p.values() + h * DELTA_DIM + j];
            segment.dout[t][j] = p.scanned[row * p.values() + h * DELTA_DIM + j];
            if (j == 0) {
                const float* const gates = p.dba + row * 2 * p.value_heads;
                segment.beta[t] = gates[h], segment.decay[t] = gates[p.value_heads + h];
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int t = count - 1; t >= 0; t--) {
            const float* const from = kept + size_t(n) * MATRIX + at.key * DELTA_DIM + at.v;
#pragma unroll
            for (int i = 0; i < KEYS; i++) s[i] = from[i * DELTA_DIM];
#pragma unroll 1
            for (int before = 0; before < t; before++) {
                const float decay = segment.decay[before], u = segment.beta[before] * segment.d[before][at.v];
                const float* const k = segment.key[before] + at.key;
#pragma unroll
                for (int i = 0; i < KEYS; i++) s[i] = fmaf(k[i], u, decay * s[i]);
            }
            const float beta = segment.beta[t], decay = segment.decay[t], d = segment.d[t][at.v], dout = segment.dout[t][at.v];
            const float u = beta * d;
            const float* const k = segment.key[t] + at.key;
            const float* const q = segment.query[t] + at.key;
            float x[KEYS];
#pragma unroll
            for (int i = 0; i < KEYS; i++) x[i] = decay * s[i] * dout;
            const float dq = sum_own(x, at.lane);
            float du = 0.f;
#pragma unroll
            for (int i = 0; i < KEYS; i++) ds[i] = fmaf(q[i], dout, ds[i]), du = fmaf(ds[i], k[i], du);
            part[at.quarter][at.v] = du;
            if (at.quarter == 0) {
                const float sum = warp_sum(u * dout);
                if (at.lane == 0) of_output[at.part] = sum;
            }
            __syncthreads();
            du = of_quarters(part, at.v);
            const float dd = beta * du;
            float dg = 0.f;
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                x[i] = ds[i] * u - decay * s[i] * dd;
                ds[i] = fmaf(-k[i], dd, ds[i]);
                dg = fmaf(ds[i], s[i], dg);
                ds[i] *= decay;
            }
            const float dk = sum_own(x, at.lane);
            sums[0][at.part][at.key + at.lane] = dq, sums[1][at.part][at.key + at.lane] = dk;
            dg = warp_sum(dg);
            if (at.lane == 0) of_decay[tid / 32] = dg;
            const size_t row = row0 + begin + t;
            if (at.quarter == 0) {
                const float sum = warp_sum(du * d);
                if (at.lane == 0) of_beta[at.part] = sum;
                p.mixed[row * p.channels() + 2 * p.keys() + at_v] = dd;
            }
            __syncthreads();
            if (tid < 2 * DELTA_DIM) {
                const int w = tid / DELTA_DIM, j = tid % DELTA_DIM;
                float sum = of_quarters(sums[w], j);
                if (w == 0) sum = fmaf(segment.key[t][j], of_output[0] + of_output[1] + of_output[2] + of_output[3], sum);
                p.by_head[(row * 2 + w) * p.values() + h * DELTA_DIM + j] = sum;
            } else if (tid == 2 * DELTA_DIM) {
                float sum = 0.f;
                for (int i = 0; i < DELTA_THREADS / 32; i++) sum += of_decay[i];
                const float a = p.ba[row * 2 * p.value_heads + p.value_heads + h] + __ldg(p.dt_bias + h);
                float* const to = p.dba + row * 2 * p.value_heads;
                to[h] = (of_beta[0] + of_beta[1] + of_beta[2] + of_beta[3]) * beta * (1.f - beta);
                to[p.value_heads + h] = sum * decay * __ldg(p.decay + h) * sigmoid(a);
            }
        }
    }
}

// Grid (rows / 8, 2 key_heads + value_heads); a warp takes a head of a row: from the gradient at a query, a key or a value
// to that at what the convolution gives.
extern "C" __global__ void grad_delta_unmix(const __grid_constant__ GradDeltaArgs p) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    if (row >= p.rows) return;
    const int channel = head * DELTA_DIM + lane * 4;
    float x[4], g[4] = {};
    p.convolve(x, row, channel);
    float4* const to = p.four(p.mixed, row, p.channels(), channel);
    if (head >= 2 * p.key_heads) {
        const float4 v = *to;
        g[0] = v.x, g[1] = v.y, g[2] = v.z, g[3] = v.w;
    } else {
        const int w = head / p.key_heads, key_head = head % p.key_heads;
        for (int n = 0; n < p.value_heads / p.key_heads; n++) {
            const int h = p.value_head(key_head, n);
            const float4 v = *p.four(p.by_head, row * 2 + w, p.values(), h * DELTA_DIM + lane * 4);
            g[0] += v.x, g[1] += v.y, g[2] += v.z, g[3] += v.w;
        }
        const float scale = p.lengths[size_t(row) * 3 * p.key_heads + head], unit = w == 0 ? scale / QUERY_LENGTH : scale;
        float along = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) along = fmaf(silu(x[i]), g[i], along);
        along = warp_sum(along) * unit * unit;
#pragma unroll
        for (int i = 0; i < 4; i++) g[i] = scale * (g[i] - silu(x[i]) * along);
    }
    *to = make_float4(g[0] * silu_slope(x[0]), g[1] * silu_slope(x[1]), g[2] * silu_slope(x[2]), g[3] * silu_slope(x[3]));
}

// Grid (rows, channels / 128); a thread takes a channel of a row: from gradients at what the convolution gives to that at
// its input.
extern "C" __global__ void grad_delta_unconv(const __grid_constant__ GradDeltaArgs p) {
    const int channel = blockIdx.y * DELTA_DIM + threadIdx.x, row = blockIdx.x, t = row % p.seq;
    float sum = 0.f;
#pragma unroll
    for (int ahead = 0; ahead < CONV; ahead++)
        if (t + ahead < p.seq) sum = fmaf(__ldg(p.conv + channel * CONV + CONV - 1 - ahead), p.mixed[size_t(row + ahead) * p.channels() + channel], sum);
    p.dqkvz[size_t(row) * p.stride() + channel] = sum;
}
