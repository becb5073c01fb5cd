// 17 to 64 rows of activations times a packed weight, for one reading of the weight: the products
// of a decode step of many sequences, on Hopper's warpgroup products.
//
//   y[m][r] = sum_k w[r][k] * x[m][k],  x in FP16, w rounded to FP16 once (`dequant.cuh`,
//   SCALED), sums in f32
//
// Block: WR warpgroups that multiply, each 64 weight rows by N rows of x, and one warp that
// copies. Weights are the left operand, made from codes straight in registers; x is the right
// one, in shared memory. Stages of 128 inputs (half a record) of x and codes come through a ring
// of `depth`, with the scales and zero-points of the record; `full` says that a stage is there,
// `empty` that every warp has done with it. Weights are asked for before the predecessor has
// ended. With so few rows of x, what limits is how fast codes become operands: the inner loop
// keeps addresses in registers and has nothing else in it.
//
// `parts` blocks share the same rows, each a part of the inputs, so that all SMs have work; their
// sums are left apart (PARTS), for the next kernel to add in the order of the parts: results are
// always the same.
//
// Epilogues:
//   PARTS  y[part][m][r]
//   SILU   tile i holds 8 rows of gate and 8 of up: half[m][.] = silu(gate) * up
//   HEAD   as PARTS of one part, and the greatest of each block
//
// Grid (groups of rows taken at once x parts): persistent.
// Bytes: codes, scales and zero-points once, x once per 64 WR weight rows, from L2.
#pragma once

#include "dequant.cuh"
#include "wgmma.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

struct GemmStepArgs {
    TensorMap x;       // FP16 [m][spans * 256] in operand order, boxes [N][64]
    TensorMap codes;   // words [tiles][..], boxes [4 WR] of 128 inputs (FP16: 64)
    TensorMap meta;    // words [tiles][..], boxes [4 WR] of a record
    float* y;          // PARTS: [parts][m][rows]; HEAD: [m][rows]
    __half* half;      // SILU: [m][padded] of rows / 2 values, in operand order
    float2* best;      // HEAD: [m][gridDim], the greatest logit and its row (as bits)
    int m;
    int rows;
    int spans;         // at least `parts`
    int groups;        // scale groups of a span
    int meta_bytes;    // of a record
    int padded;
    int row_groups;    // of 64 WR weight rows
    int depth;         // of the ring, from 2 to MOST_STAGES
    int epilogue;      // PARTS (as STORE), SILU or HEAD of `weights.cuh`
    int parts;         // split-k: parts of the inputs, whose sums are stored apart; SILU, HEAD: 1
    float scale;
    int scheme;        // of `with_block_scheme`
};

constexpr int MOST_STAGES = 16;

// One for all schemes of an instance.
DEVICE uint64_t* step_barriers() {
    __shared__ uint64_t barriers[2 * MOST_STAGES];
    return barriers;
}

template <class S, int N, int WR>
struct GemmStep {
    static constexpr int BITS = S::BITS, SLOT = S::SLOT;
    using Operand = Dequant<S, true>;
    static constexpr int WARPS = WR * 4, TILES = WR * 4;
    static constexpr int X_BYTES = N * 128;                                        // of 64 inputs
    static constexpr int CODE_BOXES = BITS == 16 ? 2 : 1;                          // of a stage
    static constexpr int CODE_BYTES = BITS * 256 / CODE_BOXES;                     // of a tile in a box
    static constexpr int CODE_WORDS = CODE_BYTES / (BITS == 4 ? 4 : 8);            // of a tile in a box, as the map counts
    static constexpr int CODES = 2 * X_BYTES, META = CODES + CODE_BOXES * TILES * CODE_BYTES;   // in a stage
    static constexpr int STAGE = (META + TILES * S::META + 1023) / 1024 * 1024;
    // Sums on their way out: 16 rows of x of a warp's 16 weight rows, padded against bank conflicts.
    static constexpr int OUT_ROW = 20, OUT_BYTES = 16 * OUT_ROW * 4;

    uint8_t* stages;
    uint64_t *full, *empty;
    const GemmStepArgs& p;
    int part, first, taken;   // part of the inputs; first group of rows, and how far the next one is
    int begin, spans;         // spans before this part, and in it

    DEVICE float* out(int warp) const { return reinterpret_cast<float*>(stages + p.depth * STAGE + warp * OUT_BYTES); }
    DEVICE float2* tops() const { return reinterpret_cast<float2*>(stages + p.depth * STAGE + WARPS * OUT_BYTES); }

    static DEVICE void run(const GemmStepArgs& p) {
        extern __shared__ uint8_t raw[];
        uint64_t* const full = step_barriers();
        uint64_t* const empty = full + MOST_STAGES;
        // The copy engine's swizzle goes by address.
        uint8_t* const stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
        const int part = blockIdx.x % p.parts;
        const int begin = part * p.spans / p.parts, end = (part + 1) * p.spans / p.parts;
        const GemmStep self{stages, full, empty, p, part, int(blockIdx.x) / p.parts, int(gridDim.x) / p.parts, begin, end - begin};
        if (threadIdx.x == 0) {
            for (int i = 0; i < p.depth; i++) {
                barrier_init(full + i, 1);
                barrier_init(empty + i, WARPS);
            }
            barrier_fence();
        }
        __syncthreads();
        launch_dependents();
        if (threadIdx.x / 32 == WARPS)
            self.copy();
        else
            self.multiply();
    }

    // The copying warp.
    DEVICE void copy() const {
        if (threadIdx.x % 32 != 0) return;
        struct Cursor {
            int group, stage, slot, parity;   // stage: of the group's
            DEVICE void next(int depth, int stages, int taken) {
                if (++slot == depth) slot = 0, parity ^= 1;
                if (++stage == stages) stage = 0, group += taken;
            }
        };
        const int count = spans * 2;
        auto request_weights = [&](const Cursor& at) {
            uint8_t* const to = stages + at.slot * STAGE;
            uint64_t* const done = full + at.slot;
            const int stage = begin * 2 + at.stage;
            barrier_expect(done, META + (BITS == 16 ? 0 : TILES * p.meta_bytes));
#pragma unroll
            for (int i = 0; i < CODE_BOXES; i++)
                copy_tile(to + CODES + i * TILES * CODE_BYTES, p.codes, (stage * CODE_BOXES + i) * CODE_WORDS, at.group * TILES, done);
            if (BITS != 16) copy_tile(to + META, p.meta, stage / 2 * (p.meta_bytes / 4), at.group * TILES, done);
        };
        auto request_x = [&](const Cursor& at) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                copy_tile(stages + at.slot * STAGE + i * X_BYTES, p.x, ((begin * 2 + at.stage) * 2 + i) * 64, 0, full + at.slot);
        };
        prefetch_map(p.x);
        Cursor at{first, 0, 0, 0}, x = at;
        for (int i = 0; i < p.depth && at.group < p.row_groups; i++) {
            request_weights(at);
            at.next(p.depth, count, taken);
        }
        wait_for_prerequisites();
        for (int i = 0; i < p.depth && x.group < p.row_groups; i++) {
            request_x(x);
            x.next(p.depth, count, taken);
        }
        while (at.group < p.row_groups) {
            barrier_wait(empty + at.slot, at.parity ^ 1);
            request_weights(at);
            request_x(at);
            at.next(p.depth, count, taken);
        }
    }

    // A warpgroup.
    DEVICE void multiply() const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
        if (p.epilogue == HEAD)
            for (int i = lane; i < N; i += 32) tops()[warp * N + i] = make_float2(-INFINITY, 0.f);
        // Where this lane finds, in the ring's first stage, its codes, and of each 64 inputs (32 at
        // first) of the record its scales and zero-points; the right operand; the barriers.
        const uint32_t ring = shared_address(stages);
        const uint32_t codes_at = keep(ring + CODES + warp * CODE_BYTES + lane * Unit<S>::LANE);
        const uint32_t upper_at = ring + CODES + warp * CODE_BYTES + Unit<S>::AT + lane * Unit<S>::WIDTH * 4;
        const uint32_t rows_at = ring + META + warp * p.meta_bytes + g * 4;
        uint32_t scales_at[4], zeros_at[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int group = Operand::group_of(p.groups, k, 0, lane % 4);
            scales_at[k] = keep(ring + META + warp * p.meta_bytes + S::ROWS + (group * 8 + g) * S::SCALE);
            zeros_at[k] = keep(ring + META + warp * p.meta_bytes + S::ROWS + p.groups * (8 * S::SCALE) + (group / S::PER_ZERO * 8 + g) * S::ZERO_BYTES);
        }
        const uint32_t operand = keep(uint32_t(right_operand(stages))), operand_high = uint32_t(right_operand(stages) >> 32);
        const uint32_t full_at = keep(shared_address(full)), empty_at = keep(shared_address(empty)), end = p.depth * 8;

        float sums[N / 2];
        uint32_t a[2][4][4];
        uint32_t stage = 0, slot = 0, parity = 0;   // in bytes of the ring, and of barriers

        // 64 inputs from stage `stage`, the k-th of the record.
        auto step = [&](uint32_t(&a)[4][4], int k) {
            Operand of;
            Unit<S> unit;
            LevelTables<S> levels;
            levels.load_shared(rows_at - g * 4 + stage);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (BITS != 16 && (j == 0 || (SLOT != 64 && j == 2))) {
                    GroupMeta<S> group;
                    group.load_zero_shared(zeros_at[k] + stage + j / 2 * 8 * (S::PARTS / S::PER_ZERO) * S::ZERO_BYTES, rows_at + stage);
                    group.load_scale_shared(scales_at[k] + stage + j / 2 * 8 * S::PARTS * S::SCALE, rows_at + stage);
                    of.set(group);
                }
                if (j % (16 / S::ORDER) == 0) {
                    const uint32_t from = stage + k % 2 * (BITS == 16 ? TILES * CODE_BYTES : CODE_BYTES / 2) + j * S::ORDER / 16 * 512;
                    unit.load_shared(codes_at + from, upper_at + from);
                }
                of.product(a[j], unit, levels, j);
            }
            // Here, and not somewhere among the products.
#pragma unroll
            for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint64_t x;
                asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(operand + stage / 16 + k % 2 * (X_BYTES / 16) + 2 * j), "r"(operand_high));
                Wgmma<N>::multiply(sums, a[j], x);
            }
            products_commit();
            products_wait<1>();
        };
        // Half a record: its stage may be filled again when the products of the next are queued.
        uint32_t done = empty_at;
        auto half = [&](int h, bool any_done) {
            barrier_wait_at(full_at + slot, parity);
            step(a[0], 2 * h);
            barrier_arrive_at(done, lane == 0 && any_done);
            step(a[1], 2 * h + 1);
            done = empty_at + slot;
            slot += 8, stage += STAGE;
            if (slot == end) slot = 0, stage = 0, parity ^= 1;
        };
#pragma unroll 1
        for (int group = first; group < p.row_groups; group += taken) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) sums[i] = 0.f;
#pragma unroll 1
            for (int span = 0; span < spans; span++) {
                half(0, span > 0);
                half(1, true);
            }
            products_wait<0>();
            barrier_arrive_at(done, lane == 0);
            // Earlier readers of what is written now.
            wait_for_prerequisites();
#pragma unroll
            for (int n = 0; n < N; n += 16) {
                const float(&v)[8] = *reinterpret_cast<const float(*)[8]>(sums + n / 2);
                store(v, n, group * TILES + warp, warp, lane);
            }
        }
        if (p.epilogue == HEAD) store_best();
    }

    // Rows n .. n + 15 of x, with weight rows 16 tile ...
    DEVICE void store(const float (&v)[8], int n, int tile, int warp, int lane) const {
        float* const mine = out(warp);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i++) mine[(i / 4 * 8 + lane % 4 * 2 + i % 2) * OUT_ROW + i % 4 / 2 * 8 + lane / 4] = v[i];
        __syncwarp();
        if (p.epilogue == SILU) {
            // Lane: a row of x, four values of eight.
            const int m = n + lane / 2, first = lane % 2 * 4;
            const float4 gate = *reinterpret_cast<const float4*>(mine + lane / 2 * OUT_ROW + first);
            const float4 up = *reinterpret_cast<const float4*>(mine + lane / 2 * OUT_ROW + 8 + first);
            auto silu = [&](float g, float u) { return clamp_half(__fdividef(g * p.scale, 1.f + __expf(-g * p.scale)) * (u * p.scale)); };
            const int at = operand_index(tile * 8 + first);
            if (m >= p.m || at >= p.padded) return;
            __half* const to = p.half + size_t(m) * p.padded + at;
            *reinterpret_cast<__half2*>(to) = __float22half2_rn(make_float2(silu(gate.x, up.x), silu(gate.y, up.y)));
            *reinterpret_cast<__half2*>(to + 8) = __float22half2_rn(make_float2(silu(gate.z, up.z), silu(gate.w, up.w)));
            return;
        }
        // Lane: a row of x, four weight rows.
        const int row = tile * 16 + lane % 4 * 4;
#pragma unroll 1
        for (int i = lane / 4; i < 16; i += 8) {
            const float4 sum = *reinterpret_cast<const float4*>(mine + i * OUT_ROW + lane % 4 * 4);
            const float s[4] = {sum.x * p.scale, sum.y * p.scale, sum.z * p.scale, sum.w * p.scale};
            const int m = n + i;
            float* const to = p.y + (size_t(part) * p.m + m) * p.rows + row;
            if (m < p.m && p.rows % 4 == 0 && row < p.rows) {
                *reinterpret_cast<float4*>(to) = make_float4(s[0], s[1], s[2], s[3]);
            } else if (m < p.m) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (row + j < p.rows) to[j] = s[j];
            }
            if (p.epilogue != HEAD) continue;
            // Of equals the lowest row; four lanes hold one row of x.
            float best = -INFINITY;
            int best_row = row;
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (row + j < p.rows && s[j] > best) best = s[j], best_row = row + j;
#pragma unroll
            for (int k = 1; k < 4; k <<= 1) {
                const float o = __shfl_xor_sync(~0u, best, k);
                const int q = __shfl_xor_sync(~0u, best_row, k);
                if (o > best || (o == best && q < best_row)) best = o, best_row = q;
            }
            float2* const top = tops() + warp * N + m;
            if (lane % 4 == 0 && best > top->x) *top = make_float2(best, __int_as_float(best_row));
        }
    }

    // Of all warps.
    DEVICE void store_best() const {
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
        for (int m = threadIdx.x; m < p.m; m += WARPS * 32) {
            float2 best = tops()[m];
#pragma unroll 1
            for (int i = 1; i < WARPS; i++) {
                const float2 o = tops()[i * N + m];
                if (o.x > best.x || (o.x == best.x && __float_as_int(o.y) < __float_as_int(best.y))) best = o;
            }
            p.best[size_t(m) * gridDim.x + blockIdx.x] = best;
        }
    }
};

#endif
