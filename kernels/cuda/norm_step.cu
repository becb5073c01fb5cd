// RMSNorm of a decode step's rows, as the right operand of `gemm_step.cuh`, after adding a product.
//
//   x[m][k] += parts[0][m][k] + parts[1][m][k] + ..
//   half[m][k] = x[m][k] / rms(x[m]) * gain[k], in FP16 and operand order, zero past `width`
//
// Grid (cluster size, m): the blocks of a cluster share a row; few registers and little shared
// memory, so that blocks of the products before and after stand beside it on the same SM.
// Bytes: x and its parts once, from L2.
#include "wgmma.cuh"

struct NormStepArgs {
    float* x;            // [m][width]
    const float* parts;  // [count][m][width], the sums of `gemm_step` (split-k)
    const float* gain;   // [width]
    __half* half;        // [m][padded]
    int count;           // of parts
    int width;           // a multiple of 4
    int padded;
    float eps;
    int holds_dependents; // dependents are launched only after the end of the prerequisites
};

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr int THREADS = 128;
constexpr int MOST_CLUSTER = 4;

// Dynamic shared memory: `padded` / cluster size floats, rounded up to whole vectors of all blocks.
extern "C" __global__ __launch_bounds__(THREADS, 8) void norm_step(const __grid_constant__ NormStepArgs p) {
    extern __shared__ float4 row[];   // the gain, then the weighted row: a thread meets its own only
    __shared__ float part[THREADS / 32], squares[MOST_CLUSTER];
    const int lane = threadIdx.x % 32, blocks = gridDim.x, m = blockIdx.y;
    const int all = p.padded / 4, there = p.width / 4;   // vectors
    const int begin = blockIdx.x * all / blocks, end = (blockIdx.x + 1) * all / blocks;
    float4* const x = reinterpret_cast<float4*>(p.x + size_t(m) * p.width);
    const float4* const parts = reinterpret_cast<const float4*>(p.parts) + size_t(m) * there;
    const size_t stride = size_t(gridDim.y) * there;
    if (blocks > 1) cluster_arrive();
    if (!p.holds_dependents) launch_dependents();
    for (int i = begin + threadIdx.x; i < end; i += THREADS) {
        if (i < there) copy_async(row + i - begin, p.gain + 4 * i);
        else row[i - begin] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    copy_commit();
    copy_wait<0>();
    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();

    float sum = 0.f;
#pragma unroll 2
    for (int i = begin + threadIdx.x; i < min(end, there); i += THREADS) {
        float4 v = __ldcg(x + i);
        for (int first = 0; first < p.count; first += 4) {
            float4 add[4];   // requested together
#pragma unroll
            for (int s = 0; s < 4; s++)
                add[s] = first + s < p.count ? __ldcg(parts + (first + s) * stride + i) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int s = 0; s < 4; s++) v.x += add[s].x, v.y += add[s].y, v.z += add[s].z, v.w += add[s].w;
        }
        if (p.count > 0) x[i] = v;
        const float4 g = row[i - begin];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        row[i - begin] = make_float4(v.x * g.x, v.y * g.y, v.z * g.z, v.w * g.w);
    }
    sum = warp_sum(sum);
    if (lane == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = warp_sum(lane < THREADS / 32 ? part[lane] : 0.f);
    if (blocks > 1) {
        cluster_wait();   // all have begun
        if (threadIdx.x < blocks) store_cluster(squares + blockIdx.x, threadIdx.x, sum);
        __syncwarp();
        cluster_arrive();
        cluster_wait();
        sum = 0.f;
        for (int i = 0; i < blocks; i++) sum += squares[i];
    }
    const float r = rsqrtf(sum / p.width + p.eps);
    __half* const to = p.half + size_t(m) * p.padded;
    for (int i = begin + threadIdx.x; i < end; i += THREADS) {
        const float4 v = row[i - begin];
        const __half2 first = __float22half2_rn(make_float2(clamp_half(v.x * r), clamp_half(v.y * r)));
        const __half2 second = __float22half2_rn(make_float2(clamp_half(v.z * r), clamp_half(v.w * r)));
        *reinterpret_cast<__half2*>(to + operand_index(4 * i)) = first;
        *reinterpret_cast<__half2*>(to + operand_index(4 * i + 2)) = second;
    }
}

#endif
