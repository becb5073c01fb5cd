// All layers of a decode step of one row, by one kernel.
//
// For each layer:
//   qkv       = qkv norm(x)
//   attended  = attention(qkv), or the recurrence of a gated DeltaNet
//   x        += o attended
//   gated     = silu(gate norm(x)) * (up norm(x)), of an MLP or of the experts that a router chooses
//   x        += down gated
//
// A block runs on each multiprocessor, on 9.0 in clusters; all run at once. The tiles of qkv and of gate and
// up, and the records of o and down, are dealt evenly to all blocks. A tile of the latter may so have
// up to MOST_PARTS parts, which whoever reads x adds up in order. Attention has a block for each key
// head and share of the pages (`layers_attention.cuh`), a recurrence one for each value head and share of its columns
// (`layers_delta.cuh`). The records of experts are requested when they are chosen (`layers_experts.cuh`).
//
// What comes from memory never waits for values: warps of each block that do nothing else request the records of all
// products in turn, and behind those of qkv the pages of keys and values, as long as its ring has room and at most
// `window` stages are on their way. More than the memory's latency needs would only delay what blocks send
// each other.
//
// What blocks send each other lies in global memory as words that hold a stamp beside each value. A
// reader waits for the stamps: there is no barrier over the grid. No two phases of a step have the same
// stamp, and the epoch tells steps apart. One buffer for each kind of value is enough: whoever
// writes into it has read what all blocks wrote since they last read it.
//
// Several GPUs, called ranks, may each have a part of every layer: some of the heads and of the rows of gate and up, and the
// inputs of o and down that come of these. Each rank stores its parts of x at all ranks, which add them in the same order, so that
// x is the same everywhere, bit for bit. All have the same number of blocks, on which the order of sums depends. One buffer for
// the parts of o and one for those of down are enough here too. A block that writes parts of o has got x with the parts of down
// of every block of every rank, and each block wrote those after it had read the parts of o before. The same holds for down. The
// first parts of down in a step follow parts of o from all ranks, each from a kernel that began when its rank had ended the step
// before. A rank that waits too long for another one goes on with what is there, and tells the host.
//
// Each block of a cluster gathers its share of a product's inputs, makes digits of them (`products.cuh`)
// and sends these to all blocks of the cluster; without clusters, of the grid (`layers_cluster.cuh`).
//
// Stages of the ring hold a record for each warp of a team; the teams take stages in turn. The warps'
// sums of a tile meet in shared memory, where they are added in the order of the warps.
//
// Weights: INT4 with a scale for 64 inputs or more, a mix, or trellis codes (`layers_trellis.cuh`).
//
// Bytes: codes + scales + zeros once; keys and values once; states read and written; for each cluster 8 a value of x, qkv and gated;
// without clusters, that once, and for each block 4.5 a value. To each other rank 8 a value of each part.
#pragma once

#include "layers_inputs.cuh"
#include "layers_products.cuh"
#include "layers_requests.cuh"
#include "layers_strips.cuh"

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
template <bool INT8>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::attend(int l) {
    using Attention = PageAttention<INT8, DIM>;
    const LayerAttention& layer = p.layer[l].attention;
    const AttentionShare& mine = attention();
    const uint32_t stamp = stamp0 + l * PHASES + 1;
    uint8_t* const queries = shared + p.at.queries;
    // Queries, and if the new position is here, its key and value: a warp each.
    static_assert(MOST_GROUP + 2 <= WARPS);
    const int group = p.group;
    if (warp < group + (mine.newest() ? 2 : 0)) {
        const Turn<DIM> turn(Turn<DIM>::of(p.cos_sin + size_t(mine.turn) * (Of::ROTARY_DIMS / 2), lane));
        // Queries, a key or a value, and which head of them.
        const int kind = max(0, warp - group + 1), of_kind = kind == 0 ? mine.kv * group + warp : mine.kv;
        const HeadGain<DIM> gain(layer.vectors.gains[min(kind, 1)], lane);
        const size_t newest = size_t(__ldcg(p.tables + size_t(mine.slot) * p.table_len + mine.position / PAGE)) * p.kv_heads + mine.kv;
        const int head = kind == 0 ? Of::query(of_kind) : Of::key(p.heads, (kind - 1) * p.kv_heads + of_kind);
        const uint64_t* const from = p.qkv + head * DIM + lane * 4;
        Head<DIM> v;
        if constexpr (TRELLIS) {
            static_assert(DIM == STRIP);
            v.part[0] = add_strip_parts<2>(from, p.shape[QKV].tiles * STRIP, strip_parts(QKV, head), stamp, {});
        } else
#pragma unroll
        for (int j = 0; j < Head<DIM>::PARTS; j++) {
            uint4 a, b;
            do a = load_stamped(from + j * 128), b = load_stamped(from + j * 128 + 2);
            while (!has(a, stamp) || !has(b, stamp));
            v.part[j] = make_float4(values_of(a).x, values_of(a).y, values_of(b).x, values_of(b).y);
        }
        __syncwarp();
        lap(1, 0);
        v = add_bias(v, layer.vectors, kind, of_kind, lane);
        Attention::prepare(p, layer, mine, newest, warp, v, gain, turn, queries, lane);
    }
    sync_layers();   // and the sums of qkv, whose memory attention takes, are read
    uint64_t* const to = p.attended + mine.source * (p.heads * (DIM + 2));
    if (warp < ATTEND_WARPS)
        Attention::attend(p, ring, next, mine, shared_address(queries), *reinterpret_cast<AttentionRoom*>(sums()), to, stamp + 1, warp, lane);
    sync_layers();   // those that do not attend have not seen the stages pass (`Ring::wait`)
    next.skip(Attention::stages(mine), ring.depth);
    lap(1, 1);
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void LayersBlock<S, HYBRID, EXPERTS, TIMED>::run() {
    prepare();
    const bool attends = attention().pages > 0, has_columns = HYBRID && delta().any();
    lap(0, 0, true);
#pragma unroll 1
    for (int l = 0; l < p.layers; l++) {
#pragma unroll 1
        for (int which = QKV; which <= DOWN; which++) {
            if constexpr (TRELLIS) gather_blocks(l, which);
            else gather(l, which);
            const bool recurrent = which == QKV && recurs(p, l);
            if (recurrent && has_columns) recurrence(l).prefetch();
            if (EXPERTS && which == GATED) choose(l);
            if (which == OUT) request_gain(p.layer[l].gains[1]);
            if (which == DOWN && l + 1 < p.layers) request_gain(p.layer[l + 1].gains[0]);
            if constexpr (TRELLIS) multiply_strips(l, which);
            else multiply(l, which);
            if (EXPERTS && which == QKV) prefetch_router(l);
            // Attention takes the memory of the sums. The next product writes there only after it has ended:
            // it needs digits that come in part from it.
            if (recurrent) {
                if (has_columns) recurrence(l).run(digits(QKV), factor(), stamp0 + l * PHASES + 1, [&] { lap(1, 0); });
                lap(1, 1);
            } else if (which == QKV && attends) {
                if constexpr (HYBRID) attend<false>(l);
                else if (p.layer[l].attention.key_scales != nullptr) attend<true>(l);
                else attend<false>(l);
            }
        }
    }
    if (!CLUSTERED || blockIdx.x < CLUSTER) {
        if constexpr (TRELLIS) gather_blocks(p.layers, END);
        else gather(p.layers, END);
    }
    if (TIMED && blockIdx.x == 0 && threadIdx.x == 0)
        for (int i = 0; i < 2 * PHASES; i++) p.times[i] = reinterpret_cast<const uint64_t*>(shared + TIMES)[i];
}

template <class S, bool HYBRID, bool EXPERTS, bool TIMED>
DEVICE void step_layers(const LayersArgs& p) {
    using Block = LayersBlock<S, HYBRID, EXPERTS, TIMED>;
    uint8_t* const shared = dynamic_shared();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t barriers = shared_address(shared);
    if (threadIdx.x < 2) init_barrier(barriers + threadIdx.x * 8, SharedInputs::ARRIVALS);
    if (threadIdx.x == 2) init_barrier(barriers + Block::ROUTED, 1);
    if (warp == Block::WARPS && lane < p.depth) {
        init_barrier(barriers + Block::FULL + lane * 8, Copies::ARRIVALS);
        init_barrier(barriers + Block::EMPTY + lane * 8, TEAM);
    }
    barrier_fence();
    __syncwarp();
    meet_begin();
    if (warp >= Block::WARPS) {
        Block::request(p, shared, lane);
        meet_end();
        return;
    }
    meet_end();   // all barriers of the cluster are there
    wait_for_prerequisites();
    launch_dependents();   // no kernel of this step overtakes one of the step before
    Block block(p, shared, warp, lane, __ldcg(p.epoch));
    block.run();
    // Block 0 has the last x: all blocks have read the epoch.
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.epoch += 1;
}
