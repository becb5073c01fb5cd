// Sampling text for training: attention of one new token a sequence, and drawing the next.
#include "grad.cuh"

// out[b][h] = softmax(q . K / sqrt(dim)) V over the first `seen` positions. Grid (heads, batch);
// `seen` floats of shared memory.
struct GradAttendArgs {
    const float* q;        // [batch][heads][dim]
    const float* keys;     // [batch][kv_heads][capacity][dim]
    const float* values;
    float* out;            // [batch][heads][dim]
    int heads, kv_heads, dim, capacity, seen;
    float scale;
};

extern "C" __global__ void grad_attend(const __grid_constant__ GradAttendArgs p) {
    extern __shared__ float scores[];
    __shared__ float part[32];
    const int h = blockIdx.x, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const long long b = blockIdx.y, head = b * p.heads + h;
    const long long plane = (b * p.kv_heads + h / (p.heads / p.kv_heads)) * p.capacity * p.dim;
    const float* q = p.q + head * p.dim;
    float top = -INFINITY;
    for (int t = threadIdx.x / 32; t < p.seen; t += warps) {
        const float* k = p.keys + plane + (long long)t * p.dim;
        float dot = 0.f;
        for (int d = lane; d < p.dim; d += 32) dot = fmaf(q[d], k[d], dot);
        dot = warp_sum(dot) * p.scale;
        if (lane == 0) scores[t] = dot;
        top = fmaxf(top, dot);
    }
    top = block_reduce<true>(top, part);   // its barriers publish the scores, too
    float sum = 0.f;
    for (int t = threadIdx.x; t < p.seen; t += blockDim.x) {
        const float e = expf(scores[t] - top);
        scores[t] = e;
        sum += e;
    }
    const float scale = 1.f / block_reduce<false>(sum, part);
    for (int d = threadIdx.x; d < p.dim; d += blockDim.x) {
        float out = 0.f;
        const float* v = p.values + plane + d;
        for (int t = 0; t < p.seen; t++) out = fmaf(scores[t], v[(long long)t * p.dim], out);
        p.out[head * p.dim + d] = out * scale;
    }
}

// Philox4x32-10 (Salmon et al., SC 2011): the first word of a block.
DEVICE uint32_t philox(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32);
    uint32_t c2 = uint32_t(stream), c3 = uint32_t(stream >> 32);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

// ids[b * stride + offset], if it is all ones, becomes a token drawn from softmax(logits[b]): the
// first at which the sum of probabilities passes a uniform number. Grid (batch), 256 threads,
// each with a run of tokens.
struct GradSampleArgs {
    const float* logits;   // [batch][vocab]
    uint32_t* ids;
    uint64_t seed, stream;
    int vocab, stride, offset, pad;
};

extern "C" __global__ void grad_sample(const __grid_constant__ GradSampleArgs p) {
    __shared__ float part[32];
    __shared__ float sums[256];
    const long long b = blockIdx.x;
    uint32_t* id = p.ids + b * p.stride + p.offset;
    if (*id != 0xFFFFFFFFu) return;
    const float* l = p.logits + b * p.vocab;
    const int run = (p.vocab + 255) / 256, begin = threadIdx.x * run, end = min(p.vocab, begin + run);
    float top = -INFINITY, sum = 0.f;
    for (int i = begin; i < end; i++) top = fmaxf(top, l[i]);
    top = block_reduce<true>(top, part);
    for (int i = begin; i < end; i++) sum += expf(l[i] - top);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float total = 0.f;
    for (int i = 0; i < 256; i++) total += sums[i];
    const uint32_t word = philox(p.seed, p.stream + b, p.offset);
    float left = float(word >> 8) * (1.f / 16777216.f) * total;
    int at = 0;
    while (at < 255 && left >= sums[at] && at * run + run < p.vocab) left -= sums[at++];
    // Rounding may leave a crumb past the last token of a run: then its last likely one.
    uint32_t drawn = at * run;
    for (int i = at * run; i < min(p.vocab, at * run + run); i++) {
        const float e = expf(l[i] - top);
        if (e > 1e-9f) drawn = i;
        left -= e;
        if (left < 0.f) break;
    }
    *id = drawn;
}
