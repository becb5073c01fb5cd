// The recurrence of a step (`delta.cuh`). Rows go through one by one: S^T k and S^T q are summed together before S
// changes, as o = g S^T q + (k . q) d. What does not depend on S is computed for several rows of a sequence at once:
// before (`StepInputs`), and after it, the outputs; rows in turn would each wait for memory and for the whole block.
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
    int sigmoid;         // gates are sigmoid(z), not silu(z)
};

constexpr int STEP_WARPS = DELTA_DIM / 8;
// Rows of a sequence that are prepared together.
constexpr int STEP_ROWS_AT_ONCE = 8;

// What a row's recurrence takes besides its vectors: decay, beta, what k and q are multiplied by, and their product then.
struct StepFactors {
    float2 gates;
    float k_scale, q_scale, product;
};

// Of rows that are prepared together, what their recurrence takes.
struct StepInputs {
    float mixed[STEP_ROWS_AT_ONCE][3][DELTA_DIM];              // q, k, v, behind the convolution
    float rate_sums[STEP_ROWS_AT_ONCE][STEP_WARPS][3];         // of a warp: squares of x, products with b's row and a's
    float squares[STEP_ROWS_AT_ONCE][8];                       // of q's four warps, then k's
    StepFactors factors[STEP_ROWS_AT_ONCE];
    float outputs[STEP_ROWS_AT_ONCE][DELTA_DIM];
};

// Adds, of four inputs, their squares, and their products with the rows of b and of a.
DEVICE void add_products(float (&sums)[3], float4 x, float4 gain, uint2 b, uint2 a) {
    sums[0] += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    const uint2 rows[2] = {b, a};
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&rows[w].x)), second = __half22float2(*reinterpret_cast<const __half2*>(&rows[w].y));
        sums[1 + w] += x.x * gain.x * first.x + x.y * gain.y * first.y + x.z * gain.z * second.x + x.w * gain.w * second.y;
    }
}

// Sums over the warp, of R rows. Lanes share the rows among them, so that an exchange serves half of those that are left:
// lane l ends with row l / (32 / R), in sums[0]. Each sum has the order of a butterfly over all lanes.
template <int R>
DEVICE void add_lanes(float (&sums)[R][3], int lane) {
    int m = 16;
#pragma unroll
    for (int half = R / 2; half > 0; half /= 2, m /= 2) {
        const bool upper = lane & m;
#pragma unroll
        for (int r = 0; r < half; r++) {
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const float away = upper ? sums[r][i] : sums[r + half][i], kept = upper ? sums[r + half][i] : sums[r][i];
                sums[r][i] = kept + __shfl_xor_sync(~0u, away, m);
            }
        }
    }
#pragma unroll
    for (; m > 0; m /= 2) {
#pragma unroll
        for (int i = 0; i < 3; i++) sums[0][i] += __shfl_xor_sync(~0u, sums[0][i], m);
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

// The projections of rates that a block's threads have in shared memory: each the fours of inputs that it multiplies.
struct RateRows {
    float4* gains;
    uint2* rows[2];   // of b, of a
    int fours;

    DEVICE RateRows(void* shared, int hidden) : gains(static_cast<float4*>(shared)), rows{reinterpret_cast<uint2*>(gains + hidden / 4), reinterpret_cast<uint2*>(gains + hidden / 4) + hidden / 4}, fours(hidden / 4) {}

    DEVICE void request(const DeltaStepArgs& p, int h) const {
        for (int k = threadIdx.x; k < fours; k += STEP_WARPS * 32) {
            copy_async(gains + k, p.gain + 4 * k);
#pragma unroll
            for (int i = 0; i < 2; i++) copy_async<8>(rows[i] + k, p.rates + (size_t(i) * p.layer.value_heads + h) * p.hidden + 4 * k);
        }
        copy_commit();
    }
    // The inputs of R rows from `row` on, of which those before `row + count` are the step's, that a thread multiplies first: one
    // row's are asked for as far ahead as four rows' are together.
    template <int R>
    struct Ahead {
        static constexpr int TURNS = 4 / R;
        float4 x[TURNS][R];

        DEVICE void request(const DeltaStepArgs& p, int turn, int k, int row, int count) {
#pragma unroll
            for (int r = 0; r < R; r++)
                x[turn][r] = r < count && k < p.hidden / 4 ? __ldcg(reinterpret_cast<const float4*>(p.x + size_t(row + r) * p.hidden) + k) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        DEVICE void request(const DeltaStepArgs& p, int row, int count) {
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) request(p, turn, threadIdx.x + turn * STEP_WARPS * 32, row, count);
        }
    };
    // The sums of a warp, of rows whose first inputs are in `ahead`.
    template <int R>
    DEVICE void multiply(const DeltaStepArgs& p, Ahead<R>& ahead, int row, int count, float (*to)[STEP_WARPS][3], int warp, int lane) const {
        constexpr int THREADS = STEP_WARPS * 32;
        float sums[R][3] = {};
        copy_wait<0>();
#pragma unroll 1
        for (int first = threadIdx.x; first < fours; first += Ahead<R>::TURNS * THREADS) {
#pragma unroll
            for (int turn = 0; turn < Ahead<R>::TURNS; turn++) {
                const int k = first + turn * THREADS;
                if (k >= fours) break;
                float4 x[R];
#pragma unroll
                for (int r = 0; r < R; r++) x[r] = ahead.x[turn][r];
                ahead.request(p, turn, k + Ahead<R>::TURNS * THREADS, row, count);
                const float4 gain = gains[k];
                const uint2 b = rows[0][k], a = rows[1][k];
#pragma unroll
                for (int r = 0; r < R; r++) add_products(sums[r], x[r], gain, b, a);
            }
        }
        add_lanes(sums, lane);
        if (lane % (32 / R) == 0) {
#pragma unroll
            for (int i = 0; i < 3; i++) to[lane / (32 / R)][warp][i] = sums[0][i];
        }
    }
};

// The factors of row r of those that are prepared together, which is row `row` of the step, by a warp.
DEVICE StepFactors factors_of(const DeltaStepArgs& p, const StepInputs& inputs, int r, int row, int h, int lane) {
    float2 gates;
    if (p.rates != nullptr) {
        float sums[3];
#pragma unroll
        for (int i = 0; i < 3; i++) sums[i] = inputs.rate_sums[r][lane % STEP_WARPS][i];
#pragma unroll
        for (int m = STEP_WARPS / 2; m > 0; m >>= 1) {
#pragma unroll
            for (int i = 0; i < 3; i++) sums[i] += __shfl_xor_sync(~0u, sums[i], m);
        }
        const float scale = p.scale * rsqrtf(sums[0] / p.hidden + p.layer.eps);
        gates = p.layer.gates(sums[1] * scale, sums[2] * scale, h);
    } else {
        gates = p.layer.gates(p.ba + size_t(row) * 2 * p.layer.value_heads, h);
    }
    const float(&squares)[8] = inputs.squares[r];
    const float q_scale = QUERY_LENGTH * rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + UNIT_EPS);
    const float k_scale = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + UNIT_EPS);
    const float4 q = reinterpret_cast<const float4*>(inputs.mixed[r][0])[lane], k = reinterpret_cast<const float4*>(inputs.mixed[r][1])[lane];
    const float product = warp_sum(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w) * q_scale * k_scale;
    return {make_float2(expf(gates.x), gates.y), k_scale, q_scale, product};
}

// A run of a block's rows, and what its threads have of it.
struct StepRun {
    const DeltaStepArgs& p;
    StepInputs& inputs;
    const RateRows& rates;
    StateColumns state;
    float* kept;         // null unless rows may be taken back
    int row0, position, slot, h, warp, lane;
    // Of the first three groups of four warps a thread has a channel of q, k, v.
    int which, value, channel;
    bool keeps;          // the channel's inputs
    float4 taps;
    float window[CONV - 1];

    // Feeds the state rows `first` to before `first + count`, at most R.
    template <int R>
    DEVICE void feed(int first, int count) {
        const DeltaLayer& layer = p.layer;
        const float* const qkvz = p.qkvz + size_t(row0 + first) * layer.stride();
        constexpr int PRODUCTS = R == 1 ? 1 : 4;   // rows whose products with `rates` are summed together
        RateRows::Ahead<PRODUCTS> ahead;
        if (p.rates != nullptr) ahead.request(p, row0 + first, count);
        float4 z;
        if (warp < count) z = __ldcg(reinterpret_cast<const float4*>(qkvz + warp * layer.stride() + layer.channels() + h * DELTA_DIM) + lane);
        if (which < 3) {
            float in[R];
#pragma unroll
            for (int r = 0; r < R; r++)
                if (r < count) in[r] = __ldcg(qkvz + r * layer.stride() + channel);
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (r >= count) break;
                const float y = silu(fmaf(in[r], taps.w, fmaf(window[2], taps.z, fmaf(window[1], taps.y, window[0] * taps.x))));
                window[0] = window[1], window[1] = window[2], window[2] = in[r];
                if (keeps) layer.input(slot, position + first + r)[channel] = in[r];
                inputs.mixed[r][which][value] = y;
                if (which < 2) {
                    const float sum = warp_sum(y * y);
                    if (lane == 0) inputs.squares[r][warp] = sum;
                }
                if (kept != nullptr && which > 0) kept[(first + r) * KEPT_ROW + (which - 1) * DELTA_DIM + value] = y;
            }
        }
        if (p.rates != nullptr) {
#pragma unroll 1
            for (int r = 0; r < count; r += PRODUCTS) {
                if (r > 0) ahead.request(p, row0 + first + r, count - r);
                rates.multiply(p, ahead, row0 + first + r, count - r, inputs.rate_sums + r, warp, lane);
            }
        }
        __syncthreads();
        // One row's factors each warp finds for itself: another meeting of all would take longer.
        const int prepared = R == 1 ? 0 : warp;
        StepFactors by;
        if (prepared < count) by = factors_of(p, inputs, prepared, row0 + first + prepared, h, lane);
        if (R > 1) {
            if (prepared < count && lane == 0) inputs.factors[prepared] = by;
            __syncthreads();
        }
#pragma unroll 1
        for (int r = 0; r < count; r++) {
            if (R > 1) by = inputs.factors[r];
            const float2 v = reinterpret_cast<const float2*>(inputs.mixed[r][2])[warp * 4 + lane / 8];
            const float2 o = state.feed<false>(inputs.mixed[r][1], inputs.mixed[r][0], make_float2(by.k_scale, by.q_scale), by.product, v, by.gates, lane);
            if (lane % 8 == 0) reinterpret_cast<float2*>(inputs.outputs[r])[warp * 4 + lane / 8] = o;
            if (kept != nullptr && threadIdx.x == 0)
                *reinterpret_cast<float4*>(kept + (first + r) * KEPT_ROW + 2 * DELTA_DIM) = make_float4(by.gates.x, by.gates.y, by.k_scale, 0.f);
        }
        __syncthreads();
        if (warp < count) {
            const float4 norm = __ldg(reinterpret_cast<const float4*>(layer.norm) + lane);
            const float4 o = reinterpret_cast<const float4*>(inputs.outputs[warp])[lane];
            const float4 y = p.sigmoid ? sigmoid_output(o, z, norm, layer.eps) : gate_output(o, z, norm, layer.eps);
            store_output(p, row0 + first + warp, h, y, lane);
        }
    }
};

extern "C" __global__ __launch_bounds__(STEP_WARPS * 32) void delta_step(const __grid_constant__ DeltaStepArgs p) {
    __shared__ __align__(16) StepInputs inputs;
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

    const RateRows rates(dynamic_shared, p.hidden);
    if (p.rates != nullptr) rates.request(p, h);
    const bool is_used = slot != p.idle;
    float* const kept = p.kept == nullptr || !is_used ? nullptr : p.kept + (size_t(slot) * layer.value_heads + h) * KEPT;
    const int behind = kept == nullptr ? 0 : __ldcg(&p.step[row0].behind);
    const bool checks = rows > 1 && kept != nullptr;
    const int which = threadIdx.x / DELTA_DIM, value = threadIdx.x % DELTA_DIM, key_head = layer.key_head(h);
    StepRun run = {p, inputs, rates, {}, checks ? kept : nullptr, row0, position, slot, h, warp, lane, which, value};
    StateColumns& state = run.state;
    if (position == 0) state.clear();
    else state.load(layer.matrix(slot, h), warp, lane);
    run.channel = which == 2 ? 2 * layer.keys() + h * DELTA_DIM + value : which * layer.keys() + key_head * DELTA_DIM + value;
    run.keeps = (which == 2 || layer.first_of_key(h)) && is_used;
    if (which < 3) {
        run.taps = __ldg(reinterpret_cast<const float4*>(layer.conv) + run.channel);
#pragma unroll
        for (int j = 1; j < CONV; j++) run.window[CONV - 1 - j] = position >= j ? __ldcg(layer.input(slot, position - j) + run.channel) : 0.f;
    }

    if (behind > 0) {
        feed_again(state, kept, behind, warp, lane);
        __syncthreads();   // before rows of this step are kept in their place
    }

    wait_for_prerequisites();
    if (p.holds_dependents) launch_dependents();
    if (checks && (behind > 0 || position == 0)) state.store(layer.matrix(slot, h), warp, lane);
    if (rows == 1) {
        run.feed<1>(0, 1);
    } else {
#pragma unroll 1
        for (int first = 0; first < rows; first += STEP_ROWS_AT_ONCE) run.feed<STEP_ROWS_AT_ONCE>(first, min(rows - first, STEP_ROWS_AT_ONCE));
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
