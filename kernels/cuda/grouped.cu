// The rows of many tokens through a mixture, sorted by expert, so that the weights of an expert are read
// once for all of its rows. Around the products of `gemm.cuh`:
//
//   choose_experts   the experts and weights of each row
//   sort_routes      where each of these routes stands among the sorted rows, and which rows a block of
//                    the products takes
//   gather_rows      sorted[place] = x[row], for the routes of all rows
//   stage_experts    the stacks of a layer's experts, of experts that are not in stacks (`places.cuh`)
//   combine_experts  x[row] += sum over the routes s of row, in order: weight_s * y[place_s]
//
// Which of an expert's rows comes first is left to chance; it has no influence on what a row becomes.
//
// Bytes: gather_rows 2 * (1 + per_token) a value of x, combine_experts 8 + 4 per_token; from L2.
#include "choose.cuh"
#include "gemm.cuh"

struct RoutesArgs {
    const float* scores;    // [m][experts]
    int* chosen;            // [m][per_token]
    float* weights;         // [m][per_token]
    int* places;            // [m][per_token]: of the sorted rows
    ExpertRows* blocks;     // [pieces][most_blocks]: experts are counted from the first of their piece
    int m;
    int experts;
    int per_token;
    int normalized;
    int block_rows;         // rows that a block of the products takes
    int most_blocks;
    int shared;             // all rows go through the last expert
    int of_piece;           // experts of a piece of the stack
    uint32_t* counts;       // [experts], as of `ExpertPlaces`; or null
    int* rows;              // [experts]: how many rows each has; or null
};

struct StageArgs {
    const uint64_t* places;   // [experts], as of `ExpertPlaces`
    const int* rows;          // [experts]; or null: all are copied
    uint4* stacks[4];         // codes and scales of gate and up, codes and scales of down
    uint32_t begin[4];        // of each in an expert, in words of 16 bytes
    uint32_t words[4];        // of an expert
    uint32_t experts;
};

struct GatherArgs {
    const uint4* x;         // [m][words]
    uint4* sorted;          // [m * per_token][words]
    const int* places;
    int words;              // of 16 bytes, of a row
    int per_token;
};

struct CombineArgs {
    const float4* y;        // [m * per_token][width / 4]
    const float* weights;
    const int* places;
    float4* x;              // [m][width / 4]
    int width;
    int per_token;
};

// Grid m.
extern "C" __global__ __launch_bounds__(MOST_EXPERTS) void choose_experts(const __grid_constant__ RoutesArgs p) {
    __shared__ __align__(16) Chosen chosen;
    choose<true>(chosen, p.scores + size_t(blockIdx.x) * p.experts, p.experts, p.per_token, p.normalized, p.shared);
    if (threadIdx.x < p.per_token) {
        p.chosen[blockIdx.x * p.per_token + threadIdx.x] = chosen.expert[threadIdx.x];
        p.weights[blockIdx.x * p.per_token + threadIdx.x] = chosen.weight[threadIdx.x];
    }
}

// Threads of `sort_routes`: one for each expert, of which a shared one may be one more than those that are chosen among.
constexpr int SORT_THREADS = MOST_EXPERTS + 32;

// The sum of the values of all threads before this one's; `total` becomes that of all.
DEVICE int sum_before(int v, int& total) {
    __shared__ int warps[SORT_THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = v;
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) {
        const int o = __shfl_up_sync(~0u, sum, k);
        if (lane >= k) sum += o;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < SORT_THREADS / 32; i++) {
        if (i < warp) before += warps[i];
        total += warps[i];
    }
    return before + sum - v;
}

// One block; thread e has expert e.
extern "C" __global__ __launch_bounds__(SORT_THREADS) void sort_routes(const __grid_constant__ RoutesArgs p) {
    __shared__ int next[SORT_THREADS];         // how many rows an expert has; then where its next one stands
    __shared__ int begins[SORT_THREADS + 1];   // an expert's first block, among those of all
    const int e = threadIdx.x, routes = p.m * p.per_token, own = e / p.of_piece, pieces = (p.experts + p.of_piece - 1) / p.of_piece;
    next[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < routes; i += SORT_THREADS) atomicAdd(next + __ldcg(p.chosen + i), 1);
    __syncthreads();
    if (e < p.experts && p.counts != nullptr) p.counts[e] += next[e];
    if (e < p.experts && p.rows != nullptr) p.rows[e] = next[e];
    const int count = next[e], blocks = (count + p.block_rows - 1) / p.block_rows;
    int total, total_blocks;
    const int first = sum_before(count, total), first_block = sum_before(blocks, total_blocks);
    next[e] = first, begins[e] = first_block;
    if (e == 0) begins[SORT_THREADS] = total_blocks;
    __syncthreads();
    ExpertRows* const list = p.blocks + own * p.most_blocks + first_block - begins[own * p.of_piece];
    for (int i = 0; i < blocks; i++) {
        const int at = first + i * p.block_rows;
        list[i] = {e - own * p.of_piece, at, min(at + p.block_rows, first + count), 0};
    }
    for (int piece = 0; piece < pieces; piece++) {
        const int used = begins[min((piece + 1) * p.of_piece, SORT_THREADS)] - begins[piece * p.of_piece];
        for (int i = used + threadIdx.x; i < p.most_blocks; i += SORT_THREADS) p.blocks[piece * p.most_blocks + i] = {0, 0, 0, 0};
    }
    for (int i = threadIdx.x; i < routes; i += SORT_THREADS) p.places[i] = atomicAdd(next + __ldcg(p.chosen + i), 1);
}

// Grid m.
extern "C" __global__ __launch_bounds__(256) void gather_rows(const __grid_constant__ GatherArgs p) {
    const uint4* const x = p.x + size_t(blockIdx.x) * p.words;
    for (int i = threadIdx.x; i < p.words; i += 256) {
        const uint4 v = __ldcg(x + i);
        for (int s = 0; s < p.per_token; s++) p.sorted[size_t(__ldg(p.places + blockIdx.x * p.per_token + s)) * p.words + i] = v;
    }
}

// Grid (parts that an expert is cut into, experts at once).
extern "C" __global__ __launch_bounds__(256) void stage_experts(const __grid_constant__ StageArgs p) {
    constexpr uint32_t AT_ONCE = 4;   // words of a thread that are on their way
    for (uint32_t e = blockIdx.y; e < p.experts; e += gridDim.y) {
        if (p.rows != nullptr && __ldcg(p.rows + e) == 0) continue;
        const uint4* const expert = reinterpret_cast<const uint4*>(__ldcg(reinterpret_cast<const unsigned long long*>(p.places) + e));
        for (int k = 0; k < 4; k++) {
            const uint4* const from = expert + p.begin[k];
            uint4* const to = p.stacks[k] + size_t(e) * p.words[k];
            for (uint32_t i = blockIdx.x * (256 * AT_ONCE) + threadIdx.x; i < p.words[k]; i += gridDim.x * (256 * AT_ONCE)) {
                uint4 v[AT_ONCE];
#pragma unroll
                for (uint32_t j = 0; j < AT_ONCE; j++)
                    if (i + j * 256 < p.words[k]) v[j] = __ldcg(from + i + j * 256);
#pragma unroll
                for (uint32_t j = 0; j < AT_ONCE; j++)
                    if (i + j * 256 < p.words[k]) to[i + j * 256] = v[j];
            }
        }
    }
}

// Grid m.
extern "C" __global__ __launch_bounds__(256) void combine_experts(const __grid_constant__ CombineArgs p) {
    const int words = p.width / 4;
    float4* const x = p.x + size_t(blockIdx.x) * words;
    for (int i = threadIdx.x; i < words; i += 256) {
        float4 sum = x[i];
        for (int s = 0; s < p.per_token; s++) {
            const int route = blockIdx.x * p.per_token + s;
            const float weight = __ldg(p.weights + route);
            const float4 v = __ldcg(p.y + size_t(__ldg(p.places + route)) * words + i);
            sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y);
            sum.z = fmaf(weight, v.z, sum.z), sum.w = fmaf(weight, v.w, sum.w);
        }
        x[i] = sum;
    }
}
