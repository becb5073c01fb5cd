// A residual of several streams (hyper-connections), and what tables of n-grams add to it. With x[c] stream c of a row and
// n[c] = rmsnorm(x[c]) * gain[c], a block reads and adds
//
//   low = silu(down n / streams)    gate = sigmoid(up low)    read = mean over c of gate[c] * n[c]
//   x[c] += weight[c] * added       weight = 2 sigmoid(inject n / streams)
//
// whose products are those of other weights. Of a table's rows e, with k[c] = rmsnorm(key[c] e) and q[c] = n[c]:
//
//   g[c] = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) * (value e),   s = k[c] . q[c] / sqrt(width)
//   x[c] += g[c] + silu(sum over taps of w[tap] * rmsnorm(g[c]) of the row (taps - 1 - tap) * dilation before)
//
// Rows of FP16 are in operand order and zero past their width. Widths are multiples of 8. Bytes: each operand once, but for
// the convolution, which reads `taps` rows for one.
#include "exchange.cuh"
#include "spans.cuh"

constexpr int STREAM_THREADS = 256;

DEVICE float silu_of(float x) { return x * sigmoid(x); }

// Two neighbours, the first at an even place, of a row of FP16 in operand order.
DEVICE void put_pair(__half* row, int k, float a, float b) {
    *reinterpret_cast<__half2*>(row + operand_index(k)) = __floats2half2_rn(clamp_half(a), clamp_half(b));
}

// The sum of the values of all threads, by shared memory for one of each warp.
DEVICE float sum_of_block(float v, float* warps) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.f;
    for (int i = 0; i < STREAM_THREADS / 32; i++) sum += warps[i];
    return sum;
}

// Rows of one stream to all of them. Grid (m, streams).
struct SpreadArgs {
    const float* from;   // [m][width]
    float* x;            // [m][streams][width]
    int width;
    int streams;
};

extern "C" __global__ __launch_bounds__(STREAM_THREADS) void spread_streams(const __grid_constant__ SpreadArgs p) {
    const float* const from = p.from + size_t(blockIdx.x) * p.width;
    float* const to = p.x + (size_t(blockIdx.x) * p.streams + blockIdx.y) * p.width;
    for (int k = threadIdx.x; k < p.width; k += STREAM_THREADS) to[k] = from[k];
}

// RMSNorm of each stream, of listed rows or of all. Grid (m, streams).
struct NormStreamsArgs {
    const float* x;         // [rows][streams][width]
    const uint32_t* rows;   // [m], of x; null: the first m
    const float* gain;      // [streams][width]
    float* y;               // [m][streams][width]
    __half* half;           // [m][padded]; or null
    int width;
    int streams;
    int padded;
    float eps;
};

extern "C" __global__ __launch_bounds__(STREAM_THREADS) void norm_streams(const __grid_constant__ NormStreamsArgs p) {
    float* const warps = reinterpret_cast<float*>(dynamic_shared());
    const int m = blockIdx.x, c = blockIdx.y, first = c * p.width;
    const size_t row = p.rows == nullptr ? m : p.rows[m];
    const float* const x = p.x + (row * p.streams + c) * p.width;
    float square = 0.f;
    for (int k = threadIdx.x; k < p.width; k += STREAM_THREADS) square = fmaf(x[k], x[k], square);
    const float r = rsqrtf(sum_of_block(square, warps) / p.width + p.eps);
    float* const y = p.y + (size_t(m) * p.streams + c) * p.width;
    __half* const half = p.half == nullptr ? nullptr : p.half + size_t(m) * p.padded;
    for (int k = 2 * threadIdx.x; k < p.width; k += 2 * STREAM_THREADS) {
        const float a = x[k] * r * p.gain[first + k], b = x[k + 1] * r * p.gain[first + k + 1];
        y[k] = a, y[k + 1] = b;
        if (half != nullptr) put_pair(half, first + k, a, b);
    }
    if (half != nullptr && c == p.streams - 1)
        for (int k = first + p.width + 2 * threadIdx.x; k < p.padded; k += 2 * STREAM_THREADS) put_pair(half, k, 0.f, 0.f);
}

// Sums of a product, in parts of its inputs: [parts][m][width].
struct PartedSums {
    const float* sums;
    int parts;
    int width;

    DEVICE float at(int m, int row, int k) const {
        float sum = 0.f;
        for (int i = 0; i < parts; i++) sum += sums[(size_t(i) * m + row) * width + k];
        return sum;
    }
};

// The input of `up`, and the weights with which streams get what a block adds. Grid m.
struct ActivateArgs {
    PartedSums low;
    PartedSums inject;   // null: a block adds nothing
    __half* half;        // [m][padded]
    float* weights;      // [m][streams]
    int padded;
    int streams;
    int m;
};

extern "C" __global__ __launch_bounds__(STREAM_THREADS) void activate_streams(const __grid_constant__ ActivateArgs p) {
    const int m = blockIdx.x;
    auto value = [&](int k) { return k < p.low.width ? silu_of(p.low.at(p.m, m, k) / p.streams) : 0.f; };
    for (int k = 2 * threadIdx.x; k < p.padded; k += 2 * STREAM_THREADS) put_pair(p.half + size_t(m) * p.padded, k, value(k), value(k + 1));
    if (p.inject.sums != nullptr && int(threadIdx.x) < p.streams)
        p.weights[m * p.streams + threadIdx.x] = 2.f * sigmoid(p.inject.at(p.m, m, threadIdx.x) / p.streams);
}

// What is read of the streams, and zeros where a block will add. Grid (m, padded / 512).
struct MixStreamsArgs {
    const float* n;       // [m][streams][width]
    const float* gates;   // [m][streams][width], before the sigmoid
    float* y;             // [m][width]; or null
    __half* half;         // [m][padded]; or null
    float* added;         // [m][width]; or null
    int width;
    int streams;
    int padded;
};

extern "C" __global__ __launch_bounds__(STREAM_THREADS) void mix_streams(const __grid_constant__ MixStreamsArgs p) {
    const size_t m = blockIdx.x;
    const int k = 2 * (blockIdx.y * STREAM_THREADS + threadIdx.x);
    if (k >= p.padded) return;
    float v[2] = {};
    if (k < p.width) {
        for (int c = 0; c < p.streams; c++) {
            const size_t at = (m * p.streams + c) * p.width + k;
            for (int i = 0; i < 2; i++) v[i] = fmaf(p.n[at + i], sigmoid(p.gates[at + i]), v[i]);
        }
        for (int i = 0; i < 2; i++) {
            v[i] /= p.streams;
            if (p.y != nullptr) p.y[m * p.width + k + i] = v[i];
            if (p.added != nullptr) p.added[m * p.width + k + i] = 0.f;
        }
    }
    if (p.half != nullptr) put_pair(p.half + m * p.padded, k, v[0], v[1]);
}

// Adds what a block has added to each stream. Grid (m, width / 256).
struct InjectArgs {
    const float* added;     // [m][width]
    const float* weights;   // [m][streams]
    float* x;               // [m][streams][width]
    int width;
    int streams;
};

extern "C" __global__ __launch_bounds__(STREAM_THREADS) void inject_streams(const __grid_constant__ InjectArgs p) {
    const size_t m = blockIdx.x;
    const int k = blockIdx.y * STREAM_THREADS + threadIdx.x;
    if (k >= p.width) return;
    const float v = p.added[m * p.width + k];
    for (int c = 0; c < p.streams; c++) {
        float* const x = p.x + (m * p.streams + c) * p.width + k;
        *x = fmaf(p.weights[m * p.streams + c], v, *x);
    }
}

// What a block reads of few rows, by two kernels in the place of the four above and the products between them. Weights are
// FP16, in records of 16 outputs and 256 inputs (`weights.cuh`), and rows are the columns of tensor-core products: so few
// outputs need all multiprocessors for their inputs, and each kernel requests its weights before its predecessor has ended.
constexpr int FEW_STREAM_ROWS = 8;    // columns of a product
constexpr int MOST_STREAMS = 8;       // warps of a block of `contract_mix`
constexpr int LOW_SPANS = 5;          // of 256 inputs, of a block of `contract_low`: one a warp
constexpr int LOW_FOURS = 4;          // values of a stream that a thread of it holds, in fours
constexpr int UP_CHUNKS = 10;         // of 32 inputs, whose weights a warp of `contract_mix` holds
constexpr int RECORD_WORDS = 512;     // of 16 bytes

// The products with `down` and `inject` of the normalized streams, which first get what the block before has added.
struct ContractLowArgs {
    const float* x;         // [m][streams][width]
    const float* added;     // [m][width]; or null: nothing is added
    const float* weights;   // [m][streams], by which it is added
    float* joined;          // [m][streams][width], not x: the streams with what is added; or null
    const float* gain;      // [streams][width]
    const uint4* down;      // records [low_tiles][spans]
    const uint4* inject;    // records [1][spans]; or null
    float* sums;            // [parts][m][outputs]
    float* scales;          // [m][streams], which normalize
    int m;                  // at most FEW_STREAM_ROWS
    int streams;
    int width;              // at most 4 LOW_FOURS values a thread
    int low_tiles;
    int spans;
    int outputs;            // 16 for each tile of down and inject
    float eps;
    float down_scale;
    float inject_scale;
};

constexpr int LOW_THREADS = LOW_SPANS * 32;

struct alignas(16) ContractLowShared {
    float warps[LOW_SPANS];
    float sums[LOW_SPANS][FEW_STREAM_ROWS][16];
};

// Grid (tiles of down and inject, parts of LOW_SPANS spans). Shared memory: as above, then the inputs [m][LOW_SPANS * 256].
extern "C" __global__ __launch_bounds__(LOW_THREADS) void contract_low(const __grid_constant__ ContractLowArgs p) {
    ContractLowShared& sm = *reinterpret_cast<ContractLowShared*>(dynamic_shared());
    __half* const inputs = reinterpret_cast<__half*>(dynamic_shared() + sizeof(ContractLowShared));
    constexpr int OF_PART = LOW_SPANS * 256;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int span = blockIdx.y * LOW_SPANS + warp, begin = blockIdx.y * OF_PART, end = min(begin + OF_PART, p.streams * p.width);
    const bool injects = int(blockIdx.x) >= p.low_tiles, there = span < p.spans, first = blockIdx.x == 0;
    launch_dependents();
    uint4 w[16];
    if (there) {
        const uint4* const record = injects ? p.inject + size_t(span) * RECORD_WORDS : p.down + (size_t(blockIdx.x) * p.spans + span) * RECORD_WORDS;
#pragma unroll
        for (int j = 0; j < 16; j++) w[j] = load_stream(record + j * 32 + lane);
    }
    wait_for_prerequisites();
    for (int m = 0; m < p.m; m++) {
        __half* const row = inputs + m * OF_PART;
        for (int k = end - begin + threadIdx.x; k < OF_PART; k += LOW_THREADS) row[k] = __float2half_rn(0.f);
        for (int c = begin / p.width; c * p.width < end; c++) {
            const size_t at = (size_t(m) * p.streams + c) * p.width;
            const float by = p.added == nullptr ? 0.f : __ldcg(p.weights + m * p.streams + c);
            float4 v[LOW_FOURS];
            float square = 0.f;
#pragma unroll
            for (int i = 0; i < LOW_FOURS; i++) {
                const int k = 4 * (threadIdx.x + i * LOW_THREADS);
                if (k >= p.width) break;
                v[i] = __ldcg(reinterpret_cast<const float4*>(p.x + at + k));
                if (p.added != nullptr) {
                    const float4 a = __ldcg(reinterpret_cast<const float4*>(p.added + size_t(m) * p.width + k));
                    v[i] = make_float4(fmaf(by, a.x, v[i].x), fmaf(by, a.y, v[i].y), fmaf(by, a.z, v[i].z), fmaf(by, a.w, v[i].w));
                }
                square += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
            }
            square = warp_sum(square);
            __syncthreads();
            if (lane == 0) sm.warps[warp] = square;
            __syncthreads();
            float sum = 0.f;
            for (int i = 0; i < LOW_SPANS; i++) sum += sm.warps[i];
            const float r = rsqrtf(sum / p.width + p.eps);
            if (first && threadIdx.x == 0 && c * p.width >= begin) p.scales[m * p.streams + c] = r;
#pragma unroll
            for (int i = 0; i < LOW_FOURS; i++) {
                const int k = 4 * (threadIdx.x + i * LOW_THREADS), input = c * p.width + k;
                if (k >= p.width || input < begin || input >= end) continue;
                if (first && p.joined != nullptr) *reinterpret_cast<float4*>(p.joined + at + k) = v[i];
                const float4 gain = __ldg(reinterpret_cast<const float4*>(p.gain + input));
                __half2* const to = reinterpret_cast<__half2*>(row + input - begin);
                to[0] = __floats2half2_rn(clamp_half(v[i].x * r * gain.x), clamp_half(v[i].y * r * gain.y));
                to[1] = __floats2half2_rn(clamp_half(v[i].z * r * gain.z), clamp_half(v[i].w * r * gain.w));
            }
        }
    }
    __syncthreads();
    float sums[4] = {};
    if (there) {
        const __half* const row = inputs + g * OF_PART + warp * 256 + 8 * t;
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const uint4 x = g < p.m ? *reinterpret_cast<const uint4*>(row + 32 * c) : make_uint4(0, 0, 0, 0);
            mma_16816(sums, w[2 * c].x, w[2 * c].y, w[2 * c].z, w[2 * c].w, x.x, x.y);
            mma_16816(sums, w[2 * c + 1].x, w[2 * c + 1].y, w[2 * c + 1].z, w[2 * c + 1].w, x.z, x.w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sm.sums[warp][2 * t + i % 2][g + i / 2 * 8] = sums[i];
    __syncthreads();
    if (int(threadIdx.x) < 16 * p.m) {
        const int m = threadIdx.x / 16, r = threadIdx.x % 16;
        float sum = 0.f;
        for (int i = 0; i < LOW_SPANS; i++) sum += sm.sums[i][m][r];
        p.sums[(size_t(blockIdx.y) * p.m + m) * p.outputs + blockIdx.x * 16 + r] = sum * (injects ? p.inject_scale : p.down_scale);
    }
}

// What is read of the streams, by gates that are products of `up`; the weights of what the block will add, which is zero.
struct ContractMixArgs {
    const float* sums;      // [parts][m][outputs], of `contract_low`
    const float* x;         // [m][streams][width], what it joined
    const float* scales;    // [m][streams]
    const float* gain;      // [streams][width]
    const uint4* up;        // records [streams * width / 16][spans]
    float* y;               // [m][width]
    float* added;           // [m][width]; or null
    float* weights;         // [m][streams]; or null
    int parts;
    int m;
    int streams;
    int width;              // a multiple of 16
    int rank;
    int low_width;          // rank, padded to 16
    int outputs;
    int spans;
    float scale;
};

// Grid width / 16; a warp takes 16 values of a stream. Shared memory: gates and normalized values, [streams][m][16] each, then
// the inputs [m][rank padded to 32].
extern "C" __global__ __launch_bounds__(MOST_STREAMS * 32) void contract_mix(const __grid_constant__ ContractMixArgs p) {
    const int threads = p.streams * 32, chunks = (p.rank + 31) / 32, each = p.streams * p.m * 16;
    float* const gates = reinterpret_cast<float*>(dynamic_shared());
    float* const normed = gates + each;
    __half* const inputs = reinterpret_cast<__half*>(normed + each);
    const int c = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4* const record = p.up + (size_t(c) * (p.width / 16) + blockIdx.x) * p.spans * RECORD_WORDS;
    launch_dependents();
    uint4 w[2 * UP_CHUNKS];
    auto request = [&](int from) {
#pragma unroll
        for (int j = 0; j < 2 * UP_CHUNKS; j++)
            if (2 * from + j < 2 * chunks) w[j] = load_stream(record + (2 * from + j) * 32 + lane);
    };
    request(0);
    wait_for_prerequisites();
    auto sum_at = [&](int m, int k) {
        float sum = 0.f;
#pragma unroll 4
        for (int i = 0; i < p.parts; i++) sum += __ldcg(p.sums + (size_t(i) * p.m + m) * p.outputs + k);
        return sum / p.streams;
    };
    for (int i = threadIdx.x; i < p.m * chunks * 32; i += threads) {
        const int m = i / (chunks * 32), k = i % (chunks * 32);
        inputs[i] = __float2half_rn(clamp_half(k < p.rank ? silu_of(sum_at(m, k)) : 0.f));
    }
    for (int i = threadIdx.x; i < each; i += threads) {
        const int stream = i / (16 * p.m), m = i / 16 % p.m, k = blockIdx.x * 16 + i % 16;
        const float x = __ldcg(p.x + (size_t(m) * p.streams + stream) * p.width + k);
        normed[i] = x * __ldcg(p.scales + m * p.streams + stream) * __ldg(p.gain + stream * p.width + k);
    }
    if (blockIdx.x == 0 && p.weights != nullptr && int(threadIdx.x) < p.m * p.streams)
        p.weights[threadIdx.x] = 2.f * sigmoid(sum_at(threadIdx.x / p.streams, p.low_width + threadIdx.x % p.streams));
    __syncthreads();
    float sums[4] = {};
    for (int from = 0; from < chunks; from += UP_CHUNKS) {
        if (from > 0) request(from);
#pragma unroll
        for (int j = 0; j < UP_CHUNKS; j++) {
            if (from + j >= chunks) break;
            const uint4 x = g < p.m ? *reinterpret_cast<const uint4*>(inputs + (g * chunks + from + j) * 32 + 8 * t) : make_uint4(0, 0, 0, 0);
            mma_16816(sums, w[2 * j].x, w[2 * j].y, w[2 * j].z, w[2 * j].w, x.x, x.y);
            mma_16816(sums, w[2 * j + 1].x, w[2 * j + 1].y, w[2 * j + 1].z, w[2 * j + 1].w, x.z, x.w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int m = 2 * t + i % 2;
        if (m < p.m) gates[(c * p.m + m) * 16 + g + i / 2 * 8] = sigmoid(sums[i] * p.scale);
    }
    __syncthreads();
    for (int r = threadIdx.x; r < 16 * p.m; r += threads) {
        float v = 0.f;
        for (int i = r; i < each; i += 16 * p.m) v = fmaf(normed[i], gates[i], v);
        const size_t at = size_t(r / 16) * p.width + blockIdx.x * 16 + r % 16;
        p.y[at] = v / p.streams;
        if (p.added != nullptr) p.added[at] = 0.f;
    }
}

// Gates of n-grams' values. Grid (m, streams).
struct GateNgramsArgs {
    const float* keys;      // [m][streams][width], normalized
    const float* queries;   // [m][streams][width], normalized
    const float* values;    // [m][width]
    float* out;             // [m][streams][width]
    int width;
    int streams;
};

extern "C" __global__ __launch_bounds__(STREAM_THREADS) void gate_ngrams(const __grid_constant__ GateNgramsArgs p) {
    float* const warps = reinterpret_cast<float*>(dynamic_shared());
    const size_t row = size_t(blockIdx.x) * p.streams + blockIdx.y, at = row * p.width;
    float dot = 0.f;
    for (int k = threadIdx.x; k < p.width; k += STREAM_THREADS) dot = fmaf(p.keys[at + k], p.queries[at + k], dot);
    const float score = sum_of_block(dot, warps) / sqrtf(float(p.width));
    // The sign of 0 is 0.
    const float root = sqrtf(fmaxf(fabsf(score), 1e-6f)), gate = sigmoid(score > 0.f ? root : score < 0.f ? -root : score);
    const float* const values = p.values + size_t(blockIdx.x) * p.width;
    for (int k = threadIdx.x; k < p.width; k += STREAM_THREADS) p.out[at + k] = gate * values[k];
}

// The convolution of n-grams' values, each channel for itself, behind rows that sequences keep.
struct ConvolveNgramsArgs {
    const float* normed;   // [m][channels]
    const float* gated;    // [m][channels]
    const float* taps;     // [channels][count]
    float* x;              // [m][channels], to which both are added
    KeptRows kept;         // [places][(count - 1) * dilation][channels]
    int channels;
    int count;
    int dilation;
    const StreamSpan* spans;
};

// A channel of row `r` of a span, also of rows before its first.
DEVICE float row_before(const ConvolveNgramsArgs& p, const StreamSpan& span, int r, int channel) {
    if (r >= 0) return p.normed[size_t(span.row + r) * p.channels + channel];
    const int rows = (p.count - 1) * p.dilation;
    return span.position == 0 ? 0.f : p.kept.at(span.slot)[size_t(rows + r) * p.channels + channel];
}

// Grid (channels / 256, spans).
extern "C" __global__ __launch_bounds__(STREAM_THREADS) void convolve_ngrams(const __grid_constant__ ConvolveNgramsArgs p) {
    const int channel = blockIdx.x * STREAM_THREADS + threadIdx.x;
    if (channel >= p.channels) return;
    const StreamSpan span = p.spans[blockIdx.y];
    const float* const taps = p.taps + size_t(channel) * p.count;
    for (int r = 0; r < span.count; r++) {
        float sum = 0.f;
        for (int tap = 0; tap < p.count; tap++) sum = fmaf(taps[tap], row_before(p, span, r - (p.count - 1 - tap) * p.dilation, channel), sum);
        const size_t at = size_t(span.row + r) * p.channels + channel;
        p.x[at] += p.gated[at] + silu_of(sum);
    }
    // What the rows behind will read, of a snapshot first: the sequence's own is overwritten in order, from rows behind.
    const int rows = (p.count - 1) * p.dilation;
    auto keep = [&](int place, int end) {
        float* const to = p.kept.at(place) + channel;
        for (int i = 0; i < rows; i++) to[size_t(i) * p.channels] = row_before(p, span, end - rows + i, channel);
    };
    if (span.mark > 0) keep(span.place, span.mark);
    keep(span.slot, span.count);
}
