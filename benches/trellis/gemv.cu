// Products of trellis weights with one row of activations, beside INT4 of the same simplicity (nvcc -O3 -arch=sm_90).
//
// y = S H128 (W (H128 s x)): W [rows, columns] in a trellis code of L = 16, s signs of the inputs, S signs and scales of
// the outputs. The four bytes of state * MULTIPLIER + ADDEND are operands of 8-bit products as they are:
//   BYTES4:  a weight is the sum of the bytes, which are multiplied by x four times;
//   OCTAGON: two weights are a linear map of the bytes (b0 + (b1 - b3) / sqrt 2, b2 + (b1 + b3) / sqrt 2), whose
//            transpose is applied to two x instead, once for all rows;
//   WIDE:    two weights are the sums of the bytes of two products of one state.
// x is two digits of 8 bits (16 bits in all), columns 0 and 1 of `mma`'s eight. A lane holds whole sequences: LENGTH
// weights of the rows lane / 4 + 8 i of 128 and of the columns that are its bytes of A in mma.m16n8k32, bits cyclic, the
// first bit the highest of a word. So no lane needs another's bits. A warp has 128 rows and every (warps * parts)-th
// tile of LENGTH / 4 columns; the parts of a row are blocks of a cluster. Kinds: mma, or dp4a with two digits or one.
//
// Bytes moved: rows * columns * K / 8, plus x and y. Limits: rows a multiple of 128, columns of 128.
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>
namespace cg = cooperative_groups;

#define OK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { printf("%s: %s\n", #call, cudaGetErrorString(e)); exit(1); } } while (0)

constexpr uint32_t MULTIPLIER = 0xA72991B9u, SECOND = 0xD89C36B3u, ADDEND = 0x5B06258Eu;
#ifndef LENGTH
#define LENGTH 128
#endif
constexpr int STRIP = 128, TILE = LENGTH / 4; // rows of a warp; columns of a sequence
enum Code { BYTES4 = 1, OCTAGON = 2, WIDE = 3 };
enum Kind { MMA, DP4A_TWO, DP4A_ONE };

__device__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ void mma(int (&c)[4], const uint32_t (&a)[4], const uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

__device__ int dot4(uint32_t u8, uint32_t s8, int c) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(u8), "r"(s8));
    return c;
}

// The Hadamard transform of 128 values over a warp, four a lane, without its factor.
__device__ void hadamard(float (&v)[4]) {
    float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
    const int lane = threadIdx.x % 32;
    for (int o = 1; o < 32; o *= 2)
        for (int i = 0; i < 4; i++) {
            const float other = __shfl_xor_sync(~0u, v[i], o);
            v[i] = lane & o ? other - v[i] : v[i] + other;
        }
}

// x as digits in the order in which lanes read them: [columns / per][lane q][digit][8 bytes], `per` columns a `mma`.
// width 1: V = 1, x four times; 2: V = 2, the octagon's transpose; 0: INT4, bytes are columns. rotated: signs and
// Hadamard first. scale[0]: of the digits; scale[1]: sum of all (hi * 256 + lo), for the codes' offset.
template <int WIDTH>
__global__ void __launch_bounds__(1024) prepare(const float *x, const float *signs, int columns, int rotated, int8_t *digits, float *scale) {
    extern __shared__ float turned[];
    __shared__ float most;
    __shared__ int total;
    let_next_begin();
    wait_for_previous();
    const int thread = threadIdx.x, lane = thread % 32;
    if (thread == 0) most = 0, total = 0;
    __syncthreads();
    float high = 0;
    for (int at = thread * 4; at < columns; at += 4096) {
        const float4 four = *(const float4 *)(x + at);
        float v[4] = {four.x, four.y, four.z, four.w};
        if (rotated) {
            const float4 s = *(const float4 *)(signs + at);
            v[0] *= s.x, v[1] *= s.y, v[2] *= s.z, v[3] *= s.w;
            hadamard(v);
            for (float &e : v) e *= 0.08838834764831845f;
        }
        for (int i = 0; i < 4; i++) turned[at + i] = v[i], high = fmaxf(high, fabsf(v[i]));
    }
    for (int o = 16; o; o /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, o));
    if (lane == 0) atomicMax((int *)&most, __float_as_int(high));
    __syncthreads();
    const float step = most * (WIDTH == 2 ? 1.41421357f : 1.0f) / 32000.0f + 1e-30f, inverse = 1.0f / step;
    int sum = 0;
    auto put = [&](float value, size_t place) { // place: of the high digit; the low one lies 8 bytes after
        const int both = __float2int_rn(value * inverse), low = (int8_t)both;
        digits[place] = (both - low) / 256, digits[place + 8] = low;
        sum += both;
    };
    for (int at = thread; at < columns / 2; at += 1024) {
        const float a = turned[2 * at], b = turned[2 * at + 1];
        if constexpr (WIDTH == 2) { // pair p of 8: lane q = p % 4, register p / 4
            const int tile = at / 8, p = at % 8;
            const size_t place = ((size_t)tile * 4 + p % 4) * 16 + p / 4 * 4;
            put(a, place), put(0.70710678f * (a + b), place + 1), put(b, place + 2), put(0.70710678f * (b - a), place + 3);
        } else if constexpr (WIDTH == 1) { // column c of 8
            for (int i = 0; i < 2; i++) {
                const int c = (2 * at + i) % 8;
                const size_t place = ((size_t)((2 * at + i) / 8) * 4 + c % 4) * 16 + c / 4 * 4;
                for (int k = 0; k < 4; k++) put(i ? b : a, place + k);
            }
        } else { // column c of 32: byte c % 4 of lane c / 4 % 4, register c / 16
            for (int i = 0; i < 2; i++) {
                const int c = (2 * at + i) % 32;
                put(i ? b : a, ((size_t)((2 * at + i) / 32) * 4 + c / 4 % 4) * 16 + c / 16 * 4 + c % 4);
            }
        }
    }
    for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    if (lane == 0) atomicAdd(&total, sum);
    __syncthreads();
    if (thread == 0) scale[0] = step, scale[1] = (float)total;
}

// A sequence's words: 16 bytes of all lanes, then the next 16, then the rest.
template <int WORDS>
__device__ void load(uint32_t (&w)[WORDS], const uint32_t *unit) {
    const int lane = threadIdx.x % 32;
    constexpr int FOURS = WORDS / 4, REST = WORDS % 4;
    for (int i = 0; i < FOURS; i++) {
        const uint4 v = __ldcs((const uint4 *)(unit + i * 128) + lane);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
    const uint32_t *rest = unit + FOURS * 128;
    if constexpr (REST >= 2) {
        const uint2 v = __ldcs((const uint2 *)rest + lane);
        w[4 * FOURS] = v.x, w[4 * FOURS + 1] = v.y;
        rest += 64;
    }
    if constexpr (REST % 2) w[WORDS - 1] = __ldcs(rest + lane);
}

// The 16 bits before bit `end`.
template <int WORDS>
__device__ uint32_t state(const uint32_t (&w)[WORDS], int end) {
    const int word = (end - 1) / 32, shift = 32 * (word + 1) - end;
    if (shift == 8) return __byte_perm(w[word], 0, 0x4421);
    return (shift <= 16 ? w[word] >> shift : __funnelshift_r(w[word], w[(word + WORDS - 1) % WORDS], shift)) & 0xFFFF;
}

// Sums of the warps' and the cluster's parts, the outputs' Hadamard transform, scales; leaves y.
template <bool ROTATED>
__device__ void finish(float *sums, int warps, const float *output_scale, float *y) {
    __shared__ float whole[STRIP];
    cg::cluster_group cluster = cg::this_cluster();
    const int thread = threadIdx.x;
    __syncthreads();
    if (thread < STRIP) {
        float sum = 0;
        for (int i = 0; i < warps; i++) sum += sums[i * STRIP + thread];
        whole[thread] = sum;
    }
    cluster.sync();
    if (cluster.block_rank() == 0 && thread < 32) {
        float v[4] = {};
        for (int r = 0; r < cluster.num_blocks(); r++) {
            const float4 part = *(const float4 *)(cluster.map_shared_rank(whole, r) + 4 * thread);
            v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
        if (ROTATED) hadamard(v);
        const size_t row = (size_t)blockIdx.x / cluster.num_blocks() * STRIP + 4 * thread;
        const float4 s = *(const float4 *)(output_scale + row);
        *(float4 *)(y + row) = make_float4(v[0] * s.x, v[1] * s.y, v[2] * s.z, v[3] * s.w);
    }
    cluster.sync();
}

// Adds the products of a sequence of each lane: 128 rows, TILE columns.
template <int CODE, int B, int KIND, int WORDS>
__device__ void multiply(int (&c)[8][4], const uint32_t (&w)[WORDS], const int8_t *digits) {
    constexpr int PARTS = CODE == OCTAGON ? TILE / 16 : TILE / 8, STATES = CODE == WIDE ? 2 : 4; // of a lane in an mma
    const int lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int8_t *x = digits + (part * 4 + q) * 16;
        uint2 hi = make_uint2(0, 0), lo = hi;
        if (KIND == MMA) {
            if (g < 2) hi = *(const uint2 *)(x + 8 * g); // column g of B: a digit
        } else {
            const uint4 both = *(const uint4 *)x;
            hi = make_uint2(both.x, both.y), lo = make_uint2(both.z, both.w);
        }
#pragma unroll
        for (int m = 0; m < 8; m++) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < STATES; i++) {
                const uint32_t s = state<WORDS>(w, ((part * 8 + m) * STATES + i + 1) * B);
                a[i] = s * MULTIPLIER + ADDEND;
                if (CODE == WIDE) a[i + 2] = s * SECOND + ADDEND;
            }
            if (KIND == MMA) {
                mma(c[m], a, hi);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    c[m][i % 2 * 2] = dot4(a[i], i < 2 ? hi.x : hi.y, c[m][i % 2 * 2]);
                    if (KIND == DP4A_TWO) c[m][i % 2 * 2 + 1] = dot4(a[i], i < 2 ? lo.x : lo.y, c[m][i % 2 * 2 + 1]);
                }
            }
        }
    }
}

template <int CODE, int B, int KIND, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
    gemv(const uint32_t *weights, int columns, const int8_t *digits, const float *scale, const float *output_scale, float *y) {
    constexpr int WORDS = LENGTH / (CODE == BYTES4 ? 1 : 2) * B / 32;
    constexpr int X = TILE / (CODE == OCTAGON ? 16 : 8) * 64; // bytes of digits of a tile
    __shared__ float sums[WARPS * STRIP];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
    const int parts = cg::this_cluster().num_blocks(), strip = blockIdx.x / parts, tiles = columns / TILE;
    const uint32_t *mine = weights + (size_t)strip * tiles * WORDS * 32;
    int tile = blockIdx.x % parts * WARPS + warp;
    const int stride = WARPS * parts;
    let_next_begin();
    uint32_t w[WORDS], later[WORDS];
    if (tile < tiles) load<WORDS>(w, mine + (size_t)tile * WORDS * 32);
    int c[8][4] = {};
    wait_for_previous();
    while (tile < tiles) { // two registers' worth in turns, one on its way while the other is multiplied
        if (tile + stride < tiles) load<WORDS>(later, mine + (size_t)(tile + stride) * WORDS * 32);
        multiply<CODE, B, KIND, WORDS>(c, w, digits + (size_t)tile * X);
        tile += stride;
        if (tile >= tiles) break;
        if (tile + stride < tiles) load<WORDS>(w, mine + (size_t)(tile + stride) * WORDS * 32);
        multiply<CODE, B, KIND, WORDS>(c, later, digits + (size_t)tile * X);
        tile += stride;
    }
    for (int m = 0; m < 8; m++)
        for (int i = 0; i < 2; i++) { // rows g and g + 8
            float sum = 256.0f * c[m][2 * i] + (KIND == DP4A_ONE ? 0.0f : (float)c[m][2 * i + 1]);
            if (KIND != MMA) {
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
            }
            if (q == 0) sums[warp * STRIP + m * 16 + i * 8 + g] = sum * scale[0];
        }
    // Bytes stand for themselves less 127.5: once a row, by the first warp of the cluster.
    if (warp == 0 && blockIdx.x % parts == 0) {
        __syncwarp();
        for (int r = lane; r < STRIP; r += 32) sums[r] -= 127.5f * scale[1] * scale[0];
    }
    finish<true>(sums, WARPS, output_scale, y);
}

// INT4 g128 symmetric: a lane's nibbles of 128 rows and 32 columns are 16-byte loads as above; f16 scales [strip][group][128].
template <int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
    nibbles(const uint32_t *weights, int columns, const int8_t *digits, const float *scale, const float *output_scale, float *y, const __half *scales) {
    __shared__ float sums[WARPS * STRIP];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
    const int parts = cg::this_cluster().num_blocks(), strip = blockIdx.x / parts, groups = columns / 128;
    const int tiles = columns / 32, stride = WARPS * parts; // a unit: 128 rows x 32 columns, 16 words a lane
    const uint32_t *mine = weights + (size_t)strip * tiles * 16 * 32;
    let_next_begin();
    float total[16] = {};
    uint32_t w[16], later[16];
    int tile = blockIdx.x % parts * WARPS + warp;
    if (tile < tiles) load<16>(w, mine + (size_t)tile * 512);
    wait_for_previous();
    for (; tile < tiles; tile += stride) {
        if (tile + stride < tiles) load<16>(later, mine + (size_t)(tile + stride) * 512);
        const int8_t *x = digits + ((size_t)tile * 4 + q) * 16;
        const uint2 b = g < 2 ? *(const uint2 *)(x + 8 * g) : make_uint2(0, 0);
        const __half *s = scales + ((size_t)strip * groups + tile / 4) * 128;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const uint32_t one = w[2 * m], two = w[2 * m + 1];
            const uint32_t a[4] = {one & 0x0F0F0F0F, one >> 4 & 0x0F0F0F0F, two & 0x0F0F0F0F, two >> 4 & 0x0F0F0F0F};
            int c[4] = {};
            mma(c, a, b);
            total[2 * m] += __half2float(s[m * 16 + g]) * (256.0f * c[0] + c[1]);
            total[2 * m + 1] += __half2float(s[m * 16 + g + 8]) * (256.0f * c[2] + c[3]);
        }
        for (int i = 0; i < 16; i++) w[i] = later[i];
    }
    for (int i = 0; i < 16; i++)
        if (q == 0) sums[warp * STRIP + i / 2 * 16 + i % 2 * 8 + g] = total[i] * scale[0];
    finish<false>(sums, WARPS, output_scale, y);
}

__global__ void __launch_bounds__(512) read_all(const uint4 *from, size_t count, uint32_t *out) {
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * 512 + threadIdx.x; i < count; i += (size_t)gridDim.x * 512) {
        const uint4 v = __ldcs(from + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678) *out = sum;
}

static cudaStream_t stream;
static float *d_x, *d_signs, *d_output_scale, *d_y, *d_scale;
static int8_t *d_digits;
static uint8_t *pool;
static __half *d_scales;
constexpr size_t POOL = 512u << 20;

template <class F, class... A>
static void launch(F kernel, int grid, int block, size_t shared, int cluster, A... arguments) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = attributes, config.numAttrs = 2;
    OK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// Microseconds of a call in a graph of `count` calls, the median of 15 replays.
template <class F>
static double timed(int count, F call) {
    cudaGraph_t graph;
    cudaGraphExec_t recorded;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < count; i++) call(i);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&recorded, graph, 0));
    cudaEvent_t begin, end;
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 18; i++) {
        OK(cudaEventRecord(begin, stream));
        OK(cudaGraphLaunch(recorded, stream));
        OK(cudaEventRecord(end, stream));
        OK(cudaEventSynchronize(end));
        float ms;
        OK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) times.push_back(ms);
    }
    OK(cudaGetLastError());
    cudaGraphExecDestroy(recorded), cudaGraphDestroy(graph);
    std::sort(times.begin(), times.end());
    return 1000.0 * times[times.size() / 2] / count;
}

static double bandwidth; // bytes a microsecond

static void report(const char *name, int rows, int columns, double bits, int warps, int parts, double us, double alone, double error) {
    const double bytes = rows * (double)columns * bits / 8;
    printf("%s,%d,%d,%.3f,%d,%d,%.2f,%.2f,%.0f,%.3f,%.2e\n", name, rows, columns, bits, warps, parts, us, alone, bytes / alone / 1e3, bytes / alone / bandwidth, error);
}

// The product of the first matrix in f64 from the words, with x not rounded: checks layout, transforms and scales.
template <int CODE, int B>
static double check(int rows, int columns, const std::vector<float> &x, const std::vector<float> &signs, const std::vector<float> &output_scale) {
    constexpr int V = CODE == BYTES4 ? 1 : 2, WORDS = LENGTH / V * B / 32;
    const int strips = 1, tiles = columns / TILE;
    std::vector<uint32_t> words((size_t)strips * tiles * WORDS * 32);
    OK(cudaMemcpy(words.data(), pool, words.size() * 4, cudaMemcpyDeviceToHost));
    std::vector<float> y(rows);
    OK(cudaMemcpy(y.data(), d_y, rows * 4, cudaMemcpyDeviceToHost));
    auto transform = [](double *v) {
        for (int o = 1; o < 128; o *= 2)
            for (int i = 0; i < 128; i++)
                if (!(i & o)) { const double a = v[i], b = v[i | o]; v[i] = a + b, v[i | o] = a - b; }
    };
    std::vector<double> turned(columns);
    for (int i = 0; i < columns; i++) turned[i] = x[i] * (double)signs[i] / sqrt(128.0);
    for (int i = 0; i < columns; i += 128) transform(&turned[i]);
    double error = 0, square = 0;
    for (int strip = 0; strip < strips; strip++) {
        std::vector<double> out(STRIP, 0.0);
        for (int tile = 0; tile < tiles; tile++)
            for (int lane = 0; lane < 32; lane++) {
                const uint32_t *unit = &words[((size_t)strip * tiles + tile) * WORDS * 32];
                uint32_t w[WORDS];
                for (int i = 0; i < WORDS; i++) {
                    const int fours = WORDS / 4 * 4;
                    if (i < fours) w[i] = unit[i / 4 * 128 + lane * 4 + i % 4];
                    else if (WORDS % 4 >= 2 && i < fours + 2) w[i] = unit[fours * 32 + lane * 2 + i - fours];
                    else w[i] = unit[(WORDS - 1) * 32 + lane];
                }
                auto bit = [&](int i) { i = (i + WORDS * 32) % (WORDS * 32); return w[i / 32] >> (31 - i % 32) & 1; };
                for (int step = 0; step < LENGTH / V; step++) {
                    uint32_t state = 0;
                    for (int i = 0; i < 16; i++) state = state << 1 | bit((step + 1) * B - 16 + i);
                    auto bytes = [&](uint32_t multiplier, double *b) {
                        for (int i = 0; i < 4; i++) b[i] = ((state * multiplier + ADDEND) >> 8 * i & 255) - 127.5;
                        return b[0] + b[1] + b[2] + b[3];
                    };
                    const int g = lane / 4, q = lane % 4, states = CODE == WIDE ? 2 : 4, i = step % states, m = step / states % 8, part = step / states / 8;
                    const int row = m * 16 + i % 2 * 8 + g;
                    double b[4];
                    const double sum = bytes(MULTIPLIER, b);
                    const double *x = &turned[tile * TILE + part * (CODE == OCTAGON ? 16 : 8)];
                    if (CODE == BYTES4) out[row] += sum * x[i / 2 * 4 + q];
                    if (CODE == WIDE) out[row] += sum * x[q] + bytes(SECOND, b) * x[q + 4];
                    if (CODE == OCTAGON) {
                        const double *pair = x + 2 * (i / 2 * 4 + q);
                        out[row] += (b[0] + sqrt(0.5) * (b[1] - b[3])) * pair[0] + (b[2] + sqrt(0.5) * (b[1] + b[3])) * pair[1];
                    }
                }
            }
        transform(out.data());
        for (int i = 0; i < STRIP; i++) {
            const double want = out[i] * output_scale[strip * STRIP + i], d = y[strip * STRIP + i] - want;
            error += d * d, square += want * want;
        }
    }
    return sqrt(error / square);
}

static std::vector<float> h_x, h_signs, h_output_scale;

template <int CODE, int B, int KIND, int WARPS>
static void trellis_case(const char *name, int rows, int columns) {
    constexpr int V = CODE == BYTES4 ? 1 : 2;
    const size_t bytes = (size_t)rows * columns * B / V / 8;
    const int count = std::min<size_t>(24, POOL / bytes);
    double error = -1;
    for (int parts : {1, 2, 4, 8}) {
        if (rows / STRIP * parts < 96 || rows / STRIP * parts > (rows > 50000 ? 1600 : 800)) continue;
        auto product = [&](int i) {
            launch(gemv<CODE, B, KIND, WARPS>, rows / STRIP * parts, WARPS * 32, 0, parts, (const uint32_t *)(pool + i * bytes), columns, (const int8_t *)d_digits,
                   (const float *)d_scale, (const float *)d_output_scale, d_y);
        };
        auto both = [&](int i) {
            launch(prepare<CODE == OCTAGON ? 2 : 1>, 1, 1024, columns * 4, 1, (const float *)d_x, (const float *)d_signs, columns, 1, d_digits, d_scale);
            product(i);
        };
        OK(cudaMemset(d_y, 0xFF, rows * 4));
        both(0);
        OK(cudaStreamSynchronize(stream));
        if (error < 0) error = check<CODE, B>(rows, columns, h_x, h_signs, h_output_scale);
        report(name, rows, columns, (double)B / V, WARPS, parts, timed(count, both), timed(count, product), error);
    }
}

template <int WARPS>
static void int4_case(int rows, int columns) {
    const size_t bytes = (size_t)rows * columns / 2;
    const int count = std::min<size_t>(24, POOL / bytes);
    for (int parts : {1, 2, 4, 8}) {
        if (rows / STRIP * parts < 96 || rows / STRIP * parts > (rows > 50000 ? 1600 : 800)) continue;
        auto product = [&](int i) {
            launch(nibbles<WARPS>, rows / STRIP * parts, WARPS * 32, 0, parts, (const uint32_t *)(pool + i * bytes), columns, (const int8_t *)d_digits,
                   (const float *)d_scale, (const float *)d_output_scale, d_y, (const __half *)d_scales + (size_t)i * rows * columns / 128);
        };
        auto both = [&](int i) {
            launch(prepare<0>, 1, 1024, columns * 4, 1, (const float *)d_x, (const float *)d_signs, columns, 0, d_digits, d_scale);
            product(i);
        };
        report("int4_g128_mma", rows, columns, 4.125, WARPS, parts, timed(count, both), timed(count, product), 0.0);
    }
}

template <int WARPS>
static void all_of(int rows, int columns) {
    int4_case<WARPS>(rows, columns);
#define CASE(CODE, B, KIND) trellis_case<CODE, B, KIND, WARPS>(#CODE "_" #KIND, rows, columns);
    CASE(BYTES4, 2, MMA) CASE(BYTES4, 3, MMA) CASE(BYTES4, 4, MMA) CASE(BYTES4, 5, MMA) CASE(BYTES4, 6, MMA)
    CASE(OCTAGON, 4, MMA) CASE(OCTAGON, 5, MMA) CASE(OCTAGON, 6, MMA) CASE(OCTAGON, 7, MMA) CASE(OCTAGON, 8, MMA) CASE(OCTAGON, 10, MMA)
    CASE(WIDE, 6, MMA) CASE(WIDE, 7, MMA) CASE(WIDE, 8, MMA) CASE(WIDE, 10, MMA)
    CASE(BYTES4, 4, DP4A_TWO) CASE(OCTAGON, 6, DP4A_TWO) CASE(OCTAGON, 8, DP4A_TWO) CASE(OCTAGON, 8, DP4A_ONE)
}

int main() {
    OK(cudaStreamCreate(&stream));
    constexpr int MOST = 98304;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    h_x.resize(MOST), h_signs.resize(MOST), h_output_scale.resize(MOST);
    for (int i = 0; i < MOST; i++) h_x[i] = normal(random), h_signs[i] = random() % 2 ? 1 : -1, h_output_scale[i] = (random() % 2 ? 1 : -1) * (0.5f + random() % 1000 / 1000.0f);
    std::vector<uint32_t> words(POOL / 4);
    for (auto &w : words) w = random();
    std::vector<__half> scales(POOL / 64 + 1024);
    for (auto &s : scales) s = __float2half(0.01f);
    auto put = [](auto **to, const auto &from) {
        OK(cudaMalloc((void **)to, from.size() * sizeof(from[0])));
        OK(cudaMemcpy(*to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice));
    };
    put(&d_x, h_x), put(&d_signs, h_signs), put(&d_output_scale, h_output_scale), put(&d_scales, scales);
    uint32_t *words_there;
    put(&words_there, words);
    pool = (uint8_t *)words_there;
    OK(cudaMalloc(&d_y, MOST * 4));
    OK(cudaMalloc(&d_digits, MOST * 16));
    OK(cudaMalloc(&d_scale, 8));
    for (int blocks : {132 * 4, 132 * 8}) {
        const double us = timed(4, [&](int) { read_all<<<blocks, 512, 0, stream>>>((const uint4 *)pool, POOL / 16, (uint32_t *)d_y); });
        bandwidth = std::max(bandwidth, POOL / us);
    }
    printf("# read bandwidth %.0f GB/s\n", bandwidth / 1e3);
    printf("kernel,rows,columns,bits,warps,parts,us_with_prepare,us,gb_s,share,relative_error\n");
    for (auto [rows, columns] : {std::pair(4096, 4096), std::pair(12288, 4096), std::pair(98304, 4096)}) {
        all_of<8>(rows, columns);
        all_of<16>(rows, columns);
    }
    // The transform of the inputs, apart.
    for (int rotated : {0, 1})
        printf("# prepare of 4096, %s: %.2f us\n", rotated ? "rotated" : "plain", timed(24, [&](int) {
                   launch(prepare<2>, 1, 1024, 4096 * 4, 1, (const float *)d_x, (const float *)d_signs, 4096, rotated, d_digits, d_scale);
               }));
}
