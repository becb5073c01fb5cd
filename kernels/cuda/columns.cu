// Rows of activations, prepared for products of several rows (`columns.cuh`): weighted by the gain of an
// RMSNorm where one follows, whose factors 1 / rms(x) are left to the product.
//
// Grid (m, parts): a block takes a row's spans in turn; with a norm there is one part.
// Bytes: x once; 2.2 (FP16 weights: 4) per value written, which stay in L2.
#include "columns.cuh"
#include "weights.cuh"

struct ColumnsArgs {
    const float* x;      // [m][inputs]
    const float* gain;   // [inputs]; null: no norm
    void* columns;       // [m / ROWS, rounded up][spans * 4]
    float* factors;      // [m], with a norm
    int inputs;          // a multiple of 8
    int spans;
    float eps;
    int holds_dependents; // dependents are launched only after the end of the prerequisites
};

constexpr int WARPS = 16;

template <int BITS, int ROWS>
DEVICE void columns(const ColumnsArgs& p) {
    using Columns = std::conditional_t<BITS == 16, HalfColumns, DigitColumns<ROWS>>;
    __shared__ float squares[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x;
    const float* const x = p.x + size_t(row) * p.inputs;
    Columns* const to = static_cast<Columns*>(p.columns) + size_t(row / ROWS) * p.spans * 4;
    if (!p.holds_dependents) launch_dependents();
    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();

    float square = 0.f;
#pragma unroll 2
    for (int span = blockIdx.y * WARPS + warp; span < p.spans; span += gridDim.y * WARPS) {
        const int k = span * SPAN + 8 * lane;
        const bool there = k < p.inputs;
        float v[8] = {};
        if (there) {
            const float4 a = __ldcg(reinterpret_cast<const float4*>(x + k)), b = __ldcg(reinterpret_cast<const float4*>(x + k) + 1);
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
            v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        }
        if (p.gain && there) {
            const float4 a = __ldg(reinterpret_cast<const float4*>(p.gain + k)), b = __ldg(reinterpret_cast<const float4*>(p.gain + k) + 1);
            const float gain[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                square = fmaf(v[j], v[j], square);
                v[j] *= gain[j];
            }
        }
        put_cell<BITS>(to + span * 4, row % ROWS, v, lane);
    }
    if (!p.gain) return;
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    if (warp == 0) {
        const float sum = warp_sum(lane < WARPS ? squares[lane] : 0.f);
        if (lane == 0) p.factors[row] = rsqrtf(sum / p.inputs + p.eps);
    }
}

#define COLUMNS(bits, name, rows) \
    extern "C" __global__ __launch_bounds__(WARPS * 32) void columns_##name##_##rows(const __grid_constant__ ColumnsArgs p) { columns<bits, rows>(p); }

COLUMNS(4, int4, 8)
COLUMNS(8, int8, 8)
COLUMNS(16, fp16, 8)
COLUMNS(4, int4, 4)
COLUMNS(8, int8, 4)
