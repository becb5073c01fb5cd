// The recurrence of a step (`delta.cuh`). Rows go through one by one: S^T k and S^T q are summed together before S
// changes, as o = g S^T q + (k . q) d.
//
// Several rows of a sequence may be drafts, of which only the first few turn out to be its text. Then S in memory is
// left as it was in front of them, and k, v and the gates of each row are kept. The step that follows, which reads S
// anyway, feeds it those rows that stayed (`Step::behind`) first.
#include "delta.cuh"

// The rows of a step: a block runs a value head of one sequence, whose rows may be a run of up to MOST_DELTA_RUN at
// consecutive positions. What it kept of the sequence is requested before the predecessor, which computes the rows'
// products, has ended.
//
// Grid (value_heads, m). Bytes: a matrix read and written per sequence and value head.
struct DeltaStepArgs {
    DeltaLayer layer;
    const float* qkvz;   // [m][stride]
    const float* ba;     // [m][2 value_heads]; null: products of `rates`, which the blocks compute
    const float* x;      // [m][hidden], with `rates`
    const float* gain;   // [hidden], of the norm of x
    const __half* rates; // [2 value_heads][hidden]
    const Step* step;    // [m]
    float* out;          // [m][value_heads * 128]
    __half* half;        // unless null, instead: [m][padded] in FP16, in operand order
    uint8_t* columns;    // unless null, instead: DigitColumns [m / column_rows, rounded up][value_heads * 2]
    int m;
    int padded;
    int column_rows;     // as in `attention_decode.cuh`
    int nibbles;
    int idle;            // the slot of rows whose results nobody uses
    int holds_dependents; // dependents are launched only after the end of the prerequisites
    int hidden;          // a multiple of 4
    float scale;         // of the products with `rates`
    float* kept;         // [slots][value_heads][KEPT]; null: states are brought forward by all rows
};

constexpr int STEP_WARPS = DELTA_DIM / 8;
// Fours of inputs of `rates` that a thread multiplies, at most.
constexpr int MOST_FOURS = 4;

// Adds, of four inputs, their squares, and their products with the rows of b and of a.
DEVICE void add_products(float (&sums)[3], float4 x, float4 gain, uint2* const (&rates)[2], int k) {
    sums[0] += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const uint2 row = rates[w][k];
        const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&row.x)), second = __half22float2(*reinterpret_cast<const __half2*>(&row.y));
        sums[1 + w] += x.x * gain.x * first.x + x.y * gain.y * first.y + x.z * gain.z * second.x + x.w * gain.w * second.y;
    }
}

// Sums over the warp.
DEVICE void add_lanes(float (&sums)[3]) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
#pragma unroll
        for (int i = 0; i < 3; i++) sums[i] += __shfl_xor_sync(~0u, sums[i], m);
    }
}

// The sums of all warps, of which lane l < 16 has those of warp l.
DEVICE void add_warps(float (&sums)[3], const float (&of_warps)[STEP_WARPS][3], int lane) {
#pragma unroll
    for (int i = 0; i < 3; i++) sums[i] = of_warps[lane % STEP_WARPS][i];
#pragma unroll
    for (int m = STEP_WARPS / 2; m > 0; m >>= 1) {
#pragma unroll
        for (int i = 0; i < 3; i++) sums[i] += __shfl_xor_sync(~0u, sums[i], m);
    }
}

// Four outputs a lane of head h of a row, by a warp.
DEVICE void store_output(const DeltaStepArgs& p, int row, int h, float4 y, int lane) {
    const int at = h * DELTA_DIM + lane * 4;
    if (p.half != nullptr) {
        put_halves(p.half + size_t(row) * p.padded, at, y);
    } else if (p.columns != nullptr) {
        const int group = p.column_rows, slots = (row / group * p.layer.value_heads + h) * 2;
        put_four(p.columns + size_t(slots) * (group == 8 ? sizeof(DigitColumns<8>) : sizeof(DigitColumns<4>)), group, row % group, p.nibbles, y, lane);
    } else {
        *reinterpret_cast<float4*>(p.out + size_t(row) * p.layer.value_heads * DELTA_DIM + at) = y;
    }
}

extern "C" __global__ __launch_bounds__(STEP_WARPS * 32) void delta_step(const __grid_constant__ DeltaStepArgs p) {
    __shared__ __align__(16) float mixed[3][DELTA_DIM];   // q, k, v
    __shared__ float squares[8];                          // of q's four warps, then k's
    __shared__ float2 gates;
    __shared__ float rate_sums[STEP_WARPS][3];            // of a warp: squares of x, products with b's row and a's
    __shared__ __align__(16) float outputs[DELTA_DIM];
    extern __shared__ uint4 dynamic_shared[];
    const DeltaLayer& layer = p.layer;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int h = blockIdx.x, row0 = blockIdx.y;

    if (!p.holds_dependents) launch_dependents();
    const int position = __ldcg(&p.step[row0].position), slot = __ldcg(&p.step[row0].slot);
    if (row0 > 0 && __ldcg(&p.step[row0 - 1].slot) == slot && __ldcg(&p.step[row0 - 1].position) == position - 1) return;   // a run's first row runs it
    bool same = false;
    if (lane < MOST_DELTA_RUN - 1 && row0 + 1 + lane < p.m) {
        const Step* const at = p.step + row0 + 1 + lane;
        same = __ldcg(&at->slot) == slot && __ldcg(&at->position) == position + 1 + lane;
    }
    const int rows = __ffs(~__ballot_sync(~0u, same));

    // Rows of `rates` and gains, of each four inputs by the thread that multiplies them.
    const int fours = p.hidden / 4;
    float4* const gains = reinterpret_cast<float4*>(dynamic_shared);
    uint2* const rates[2] = {reinterpret_cast<uint2*>(gains + fours), reinterpret_cast<uint2*>(gains + fours) + fours};
    if (p.rates != nullptr) {
        for (int k = threadIdx.x; k < fours; k += STEP_WARPS * 32) {
            copy_async(gains + k, p.gain + 4 * k);
#pragma unroll
            for (int i = 0; i < 2; i++) copy_async<8>(rates[i] + k, p.rates + (size_t(i) * layer.value_heads + h) * p.hidden + 4 * k);
        }
        copy_commit();
    }
    StateColumns state;
    if (position == 0) state.clear();
    else state.load(layer.matrix(slot, h), warp, lane);
    float* const kept = p.kept == nullptr || slot == p.idle ? nullptr : p.kept + (size_t(slot) * layer.value_heads + h) * KEPT;
    const int behind = kept == nullptr ? 0 : __ldcg(&p.step[row0].behind);
    const bool checks = rows > 1 && kept != nullptr;
    // Of the first three groups of four warps a thread has a channel.
    const int which = threadIdx.x / DELTA_DIM, of_head = threadIdx.x % DELTA_DIM, key_head = layer.key_head(h);
    const int channel = which == 2 ? 2 * layer.keys() + h * DELTA_DIM + of_head : which * layer.keys() + key_head * DELTA_DIM + of_head;
    const bool convolves = which < 3, is_used = slot != p.idle, keeps = (which == 2 || layer.first_of_key(h)) && is_used;
    float4 taps;
    float window[CONV - 1] = {};
    if (convolves) {
        taps = __ldg(reinterpret_cast<const float4*>(layer.conv) + channel);
#pragma unroll
        for (int j = 1; j < CONV; j++)
            if (position >= j) window[CONV - 1 - j] = __ldcg(layer.input(slot, position - j) + channel);
    }

    if (behind > 0) {
        feed_again(state, kept, behind, warp, lane);
        __syncthreads();   // before rows of this step are kept in their place
    }

    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();
    if (checks && (behind > 0 || position == 0)) state.store(layer.matrix(slot, h), warp, lane);
#pragma unroll 1
    for (int r = 0; r < rows; r++) {
        const float* const qkvz = p.qkvz + size_t(row0 + r) * layer.stride();
        float4 x[MOST_FOURS];
        if (p.rates != nullptr) {
#pragma unroll
            for (int i = 0; i < MOST_FOURS; i++) {
                const int k = threadIdx.x + i * STEP_WARPS * 32;
                if (k < fours) x[i] = __ldcg(reinterpret_cast<const float4*>(p.x + size_t(row0 + r) * p.hidden) + k);
            }
        }
        float4 z;
        if (warp == 0) z = __ldcg(reinterpret_cast<const float4*>(qkvz + layer.channels() + h * DELTA_DIM) + lane);
        if (convolves) {
            const float in = __ldcg(qkvz + channel);
            const float y = silu(fmaf(in, taps.w, fmaf(window[2], taps.z, fmaf(window[1], taps.y, window[0] * taps.x))));
            window[0] = window[1], window[1] = window[2], window[2] = in;
            if (keeps) layer.input(slot, position + r)[channel] = in;
            mixed[which][of_head] = y;
            if (checks && which > 0) kept[r * KEPT_ROW + (which - 1) * DELTA_DIM + of_head] = y;
            if (which < 2) {
                const float sum = warp_sum(y * y);
                if (lane == 0) squares[warp] = sum;
            }
        } else if (of_head == 0 && p.rates == nullptr) {
            const float2 of = layer.gates(p.ba + size_t(row0 + r) * 2 * layer.value_heads, h);
            gates = make_float2(expf(of.x), of.y);
        }
        if (p.rates != nullptr) {
            float sums[3] = {};
            copy_wait<0>();
#pragma unroll
            for (int i = 0; i < MOST_FOURS; i++) {
                const int k = threadIdx.x + i * STEP_WARPS * 32;
                if (k >= fours) break;
                add_products(sums, x[i], gains[k], rates, k);
            }
            add_lanes(sums);
            if (lane < 3) rate_sums[warp][lane] = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
        }
        __syncthreads();
        float2 of = gates;
        if (p.rates != nullptr) {
            float sums[3];
            add_warps(sums, rate_sums, lane);
            const float scale = p.scale * rsqrtf(sums[0] / p.hidden + layer.eps);
            of = layer.gates(sums[1] * scale, sums[2] * scale, h);
            of.x = expf(of.x);
        }
        const float q_scale = QUERY_LENGTH * rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + UNIT_EPS);
        const float k_scale = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + UNIT_EPS);
        // Each warp multiplies q and k for itself: another meeting of all would take longer.
        const float4 q = reinterpret_cast<const float4*>(mixed[0])[lane], k = reinterpret_cast<const float4*>(mixed[1])[lane];
        const float kq = warp_sum(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w) * q_scale * k_scale;
        const float2 v = reinterpret_cast<const float2*>(mixed[2])[warp * 4 + lane / 8];
        if (checks && threadIdx.x == 0) *reinterpret_cast<float4*>(kept + r * KEPT_ROW + 2 * DELTA_DIM) = make_float4(of.x, of.y, k_scale, 0.f);
        const float2 o = state.feed<false>(mixed[1], mixed[0], make_float2(k_scale, q_scale), kq, v, of, lane);
        if (lane % 8 == 0) reinterpret_cast<float2*>(outputs)[warp * 4 + lane / 8] = o;
        __syncthreads();
        if (warp == 0) {
            const float4 norm = __ldg(reinterpret_cast<const float4*>(layer.norm) + lane);
            const float4 y = gate_output(reinterpret_cast<const float4*>(outputs)[lane], z, norm, layer.eps);
            store_output(p, row0 + r, h, y, lane);
        }
    }
    if (is_used && !checks) state.store(layer.matrix(slot, h), warp, lane);
}

// A sequence's states brought forward by rows that a step kept. Grid (value_heads, layers).
struct DeltaSettleArgs {
    float* matrices;     // [layers][places][value_heads][MATRIX]
    const float* kept;   // [layers][slots][value_heads][KEPT]
    int value_heads;
    int places;
    int slots;
    int slot;            // whose states and kept rows
    int place;           // where the states go
    int count;           // rows, at least one
};

extern "C" __global__ __launch_bounds__(STEP_WARPS * 32) void delta_settle(const __grid_constant__ DeltaSettleArgs p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.x;
    const auto of_layer = [&](int count, int index) { return (size_t(blockIdx.y) * count + index) * p.value_heads + h; };
    StateColumns state;
    state.load(p.matrices + of_layer(p.places, p.slot) * MATRIX, warp, lane);
    feed_again(state, p.kept + of_layer(p.slots, p.slot) * KEPT, p.count, warp, lane);
    state.store(p.matrices + of_layer(p.places, p.place) * MATRIX, warp, lane);
}
