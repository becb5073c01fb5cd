// Weights rounded by groups, straight through, and Adam. w = s c with s = f16(scale) and
// c = clamp(round(latent / s), -zero, max - zero), or c = code - zero where codes are fixed.
#include "grad.cuh"

struct GradRoundingArgs {
    const float* latent;      // [groups][group], or null
    const uint8_t* codes;     // [groups][group], or null
    const float* scales;      // [groups]
    const float* zeros;       // [groups]
    const float* dw;          // backward: [groups][group]
    float* w;                 // forward: out; backward: gradient of the latent weights
    float* dscales;           // backward: [groups]
    long long groups;
    int group;
    float max_code;
};

struct Code {
    float code;     // rounded, less the zero-point
    float exact;    // before rounding and clamping
    bool inside;    // not clamped
};

DEVICE Code round_latent(float latent, float scale, float zero, float max_code) {
    if (scale == 0.f) return {0.f, 0.f, false};
    const float v = latent / scale, c = fminf(fmaxf(v, -zero), max_code - zero);
    return {rintf(c), v, c == v};
}

DEVICE float stored(float scale) { return __half2float(__float2half_rn(scale)); }

// A group a warp.
extern "C" __global__ void grad_round(const __grid_constant__ GradRoundingArgs p) {
    const long long g = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (g >= p.groups) return;
    const float s = stored(p.scales[g]), zero = p.zeros[g];
    for (int i = threadIdx.x % 32; i < p.group; i += 32) {
        const long long at = g * p.group + i;
        const float c = p.codes ? float(p.codes[at]) - zero
                                : round_latent(p.latent[at], s, zero, p.max_code).code;
        p.w[at] = s * c;
    }
}

// Adds to both gradients. A group a warp.
extern "C" __global__ void grad_round_grad(const __grid_constant__ GradRoundingArgs p) {
    const long long g = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (g >= p.groups) return;
    const float s = stored(p.scales[g]), zero = p.zeros[g];
    float sum = 0.f;
    for (int i = threadIdx.x % 32; i < p.group; i += 32) {
        const long long at = g * p.group + i;
        const float dw = p.dw[at];
        if (p.codes) {
            sum = fmaf(dw, float(p.codes[at]) - zero, sum);
        } else {
            const Code c = round_latent(p.latent[at], s, zero, p.max_code);
            if (c.inside) p.w[at] += dw;
            sum = fmaf(dw, c.inside ? c.code - c.exact : c.code, sum);
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) p.dscales[g] += sum;
}

// One step of Adam; the gradient becomes zero. One value a thread.
struct GradAdamArgs {
    float* value;
    float* mean;
    float* square;
    float* grad;
    long long n;
    float rate, beta1, beta2, correction1, correction2, epsilon;
};

extern "C" __global__ void grad_adam(const __grid_constant__ GradAdamArgs p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    const float g = p.grad[i];
    const float m = p.beta1 * p.mean[i] + (1.f - p.beta1) * g;
    const float v = p.beta2 * p.square[i] + (1.f - p.beta2) * g * g;
    p.mean[i] = m;
    p.square[i] = v;
    p.value[i] -= p.rate * (m / p.correction1) / (sqrtf(v / p.correction2) + p.epsilon);
    p.grad[i] = 0.f;
}
