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
    StreamSpan spans[MOST_STREAM_SPANS];
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
    const StreamSpan& span = p.spans[blockIdx.y];
    if (channel >= p.channels) return;
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
