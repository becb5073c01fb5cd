// Plain kernels, one operation each, in f32: the oracle of the fused ones on the device and the
// baseline of `--kernels reference`. Rows of activations are f32, row-major.
#include "activations.cuh"
#include "append.cuh"
#include "rows.cuh"
#include "weights.cuh"

// y[m][r] (+)= sum_k w[r][k] x[m][k]. Grid (rows / 8, m / 8); a warp takes one r and eight m.
struct LinearReferenceArgs {
    PackedWeight w;
    const float* x;   // [m][inputs]
    float* y;         // [m][rows]
    int m;
    int add;
};

extern "C" __global__ void linear_reference(const __grid_constant__ LinearReferenceArgs p) {
    const int r = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int m0 = blockIdx.y * 8, n = min(8, p.m - m0);
    if (r >= p.w.rows) return;
    float sum[8] = {};
    for (int k = lane; k < p.w.inputs; k += 32) {
        const float w = element(p.w, r, k);
        for (int i = 0; i < n; i++) sum[i] = fmaf(w, p.x[size_t(m0 + i) * p.w.inputs + k], sum[i]);
    }
    for (int i = 0; i < n; i++) {
        const float y = warp_sum(sum[i]);
        float* to = p.y + size_t(m0 + i) * p.w.rows + r;
        if (lane == 0) *to = p.add ? *to + y : y;
    }
}

// x[m] = row tokens[m] of the embedding. Grid (m).
struct EmbedArgs {
    PackedWeight w;
    const uint32_t* tokens;
    float* x;   // [m][inputs]
};

extern "C" __global__ void embed(const __grid_constant__ EmbedArgs p) {
    const int m = blockIdx.x;
    for (int k = threadIdx.x; k < p.w.inputs; k += blockDim.x)
        p.x[size_t(m) * p.w.inputs + k] = element(p.w, int(p.tokens[m]), k);
}

// y[m] = x[rows[m]] / rms * gain, or x[rows[m]] itself, of a width that is a multiple of 4. Grid (m).
struct NormArgs {
    const float* x;      // [.][width]
    const int* rows;     // null: row m
    const float* gain;   // [width]; null: no norm
    float* y;            // [m][width], or null
    __half* half;        // [m][padded] in operand order, zero past `width`, or null
    int width;
    int padded;
    float eps;
};

extern "C" __global__ void rms_norm(const __grid_constant__ NormArgs p) {
    __shared__ float part[32];
    const int m = blockIdx.x, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const float* x = p.x + size_t(p.rows ? p.rows[m] : m) * p.width;
    float sum = 0.f;
    for (int k = threadIdx.x * 4; k < p.width; k += blockDim.x * 4) {
        const float4 v = *reinterpret_cast<const float4*>(x + k);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = warp_sum(sum);
    if (lane == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = warp_sum(lane < warps ? part[lane] : 0.f);
    const float r = p.gain ? rsqrtf(sum / p.width + p.eps) : 1.f;
    for (int k = threadIdx.x * 4; k < p.padded; k += blockDim.x * 4) {
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (k < p.width) {
            const float4 gain = p.gain ? *reinterpret_cast<const float4*>(p.gain + k) : make_float4(1.f, 1.f, 1.f, 1.f);
            v = *reinterpret_cast<const float4*>(x + k);
            v.x *= r * gain.x, v.y *= r * gain.y, v.z *= r * gain.z, v.w *= r * gain.w;
            if (p.y) *reinterpret_cast<float4*>(p.y + size_t(m) * p.width + k) = v;
        }
        if (p.half) {
            __half* const to = p.half + size_t(m) * p.padded;
            const __half2 first = __float22half2_rn(make_float2(clamp_half(v.x), clamp_half(v.y)));
            const __half2 second = __float22half2_rn(make_float2(clamp_half(v.z), clamp_half(v.w)));
            *reinterpret_cast<__half2*>(to + operand_index(k)) = first;
            *reinterpret_cast<__half2*>(to + operand_index(k + 2)) = second;
        }
    }
}

// `append.cuh`.
extern "C" __global__ void append_fp16(const __grid_constant__ AppendArgs p) { append<false, HEAD_DIM>(p); }
extern "C" __global__ void append_int8(const __grid_constant__ AppendArgs p) { append<true, HEAD_DIM>(p); }
extern "C" __global__ void append_wide_fp16(const __grid_constant__ AppendArgs p) { append<false, WIDE_HEAD_DIM>(p); }
extern "C" __global__ void append_wide_int8(const __grid_constant__ AppendArgs p) { append<true, WIDE_HEAD_DIM>(p); }

// out[m][h] = softmax(q . K / sqrt(128)) V over positions 0 .. position of the row. Grid
// (m, heads), four warps a block; a warp takes every fourth position.
struct AttendArgs {
    const float* qkv;   // [m][(heads + 2 kv_heads) * 128], queries normalized and rotated
    const Row* rows;
    Cache cache;
    float* out;         // [m][heads * 128]
    int heads;
};

extern "C" __global__ void attention_reference(const __grid_constant__ AttendArgs p) {
    __shared__ float part[4][HEAD_DIM + 2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.y;
    const Row row = p.rows[blockIdx.x];
    const Cache& c = p.cache;
    const float4 q = reinterpret_cast<const float4*>(
        p.qkv + (size_t(blockIdx.x) * (p.heads + 2 * c.kv_heads) + h) * HEAD_DIM)[lane];
    float top = -INFINITY, total = 0.f, acc[4] = {};
    for (int pos = warp; pos <= row.position; pos += 4) {
        const size_t kv = c.head(c.page(row.slot, pos), h / (p.heads / c.kv_heads));
        const size_t at = kv * PAGE + pos % PAGE;
        float k[4], v[4];
        for (int i = 0; i < 4; i++) {
            const size_t ka = at * HEAD_DIM + 4 * lane + i;
            const size_t va = (kv * HEAD_DIM + 4 * lane + i) * PAGE + pos % PAGE;
            if (c.key_scales) {
                k[i] = static_cast<const int8_t*>(c.keys)[ka] * __half2float(c.key_scales[at]);
                v[i] = static_cast<const int8_t*>(c.values)[va] * __half2float(c.value_scales[at]);
            } else {
                k[i] = __half2float(static_cast<const __half*>(c.keys)[ka]);
                v[i] = __half2float(static_cast<const __half*>(c.values)[va]);
            }
        }
        const float s = warp_sum(q.x * k[0] + q.y * k[1] + q.z * k[2] + q.w * k[3]) * 0.08838834764831845f;
        const float raised = fmaxf(top, s), shrink = expf(top - raised), w = expf(s - raised);
        top = raised;
        total = fmaf(total, shrink, w);
        for (int i = 0; i < 4; i++) acc[i] = fmaf(acc[i], shrink, w * v[i]);
    }
    for (int i = 0; i < 4; i++) part[warp][4 * lane + i] = acc[i];
    if (lane == 0) part[warp][HEAD_DIM] = top, part[warp][HEAD_DIM + 1] = total;
    __syncthreads();
    float peak = -INFINITY, weight = 0.f, value = 0.f;
    for (int w = 0; w < 4; w++) peak = fmaxf(peak, part[w][HEAD_DIM]);
    for (int w = 0; w < 4; w++) {
        const float f = expf(part[w][HEAD_DIM] - peak);
        weight = fmaf(f, part[w][HEAD_DIM + 1], weight);
        value = fmaf(f, part[w][threadIdx.x], value);
    }
    p.out[(size_t(blockIdx.x) * p.heads + h) * HEAD_DIM + threadIdx.x] = value / weight;
}

// y[m][i] = silu(gate) * up, where x[m] holds tiles of eight gates and eight ups. Grid (m).
struct SiluArgs {
    const float* x;   // [m][2 * width]
    float* y;         // [m][width], or null
    __half* half;     // [m][padded] in operand order, zero past `width`, or null
    int width;
    int padded;
};

extern "C" __global__ void silu_mul(const __grid_constant__ SiluArgs p) {
    const size_t m = blockIdx.x;
    for (int i = threadIdx.x; i < p.padded; i += blockDim.x) {
        float v = 0.f;
        if (i < p.width) {
            const float* x = p.x + m * 2 * p.width + i / 8 * 16 + i % 8;
            v = x[0] / (1.f + expf(-x[0])) * x[8];
            if (p.y) p.y[m * p.width + i] = v;
        }
        if (p.half) p.half[m * p.padded + operand_index(i)] = __float2half_rn(clamp_half(v));
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
    wait_for_prerequisites();
    const float scale = sigmoid(__ldcg(p.scores + m));
    for (int k = threadIdx.x; k < p.width; k += blockDim.x) {
        if (p.full != nullptr) p.full[m * p.width + k] = __ldcg(p.full + m * p.width + k) * scale;
        if (p.half != nullptr) p.half[m * p.width + k] = __float2half_rn(__half2float(__ldcg(p.half + m * p.width + k)) * scale);
    }
}

// What a step begins with: the embeddings of its tokens. Grid (inputs / 256, m).
struct EmbedStepArgs {
    PackedWeight w;
    const Step* step;  // [m]
    float* x;          // [m][inputs]
};

extern "C" __global__ void embed_step(const __grid_constant__ EmbedStepArgs p) {
    launch_dependents();
    wait_for_prerequisites();
    const int k = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (k < p.w.inputs) p.x[size_t(row) * p.w.inputs + k] = element(p.w, int(__ldcg(&p.step[row].token)), k);
}

// Reads all of x once, to see how fast memory can be read.
struct ReadArgs {
    const uint4* x;
    uint32_t* out;
    size_t words;
};

// Something to read: memory of one value could be faster than weights are.
extern "C" __global__ void fill_all(const __grid_constant__ ReadArgs p) {
    uint4* const x = const_cast<uint4*>(p.x);
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < p.words; i += size_t(gridDim.x) * blockDim.x) {
        uint32_t h = uint32_t(i) * 0x9e3779b9u;
        h = (h ^ h >> 15) * 0x85ebca6bu;
        h ^= h >> 13;
        x[i] = make_uint4(h, h * 0xc2b2ae35u, h * 0x27d4eb2fu, h * 0x165667b1u);
    }
}

extern "C" __global__ void read_all(const __grid_constant__ ReadArgs p) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    uint32_t sum = 0;
#pragma unroll 8
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < p.words; i += step) {
        const uint4 v = load_stream(p.x + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9e3779b9u) *p.out = sum;   // so that the reads are not dropped
}
