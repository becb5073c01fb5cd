// Many rows of activations times a packed weight, on Hopper's warpgroup products: `gemm.cuh`'s
// product, with weights rounded to FP16 once (`dequant.cuh`, SCALED).
//
// Block: WR warpgroups that multiply, each 64 weight rows by N rows of x, and one warp that
// copies. Weights are the left operand, made from codes straight in registers; x is the right
// one, in shared memory. Stages of 64 inputs of x, codes and scales come through a ring; `full`
// says that a stage is there, `empty` that every warp has done with it.
//
// A warpgroup is held up while its products run, so it makes its next operand while the others
// multiply; they take turns, as they would else all multiply, and all prepare, at once.
//
// Where that makes too few blocks (split-k), a cluster of `parts` blocks shares each tile: every block takes a
// part of the inputs, leaves its sums in its shared memory, and adds up those of a part of the rows of
// x in the order of the parts.
//
// Grid (parts * m / N, rows / (64 WR)): blocks that share weights are neighbours.
// Bytes: codes once per N rows of x, x once per 64 WR weight rows.
#pragma once

#include "dequant.cuh"
#include "gemm.cuh"
#include "wgmma.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL

struct WgmmaArgs {
    TensorMap x;       // FP16 [m][inputs], boxes [N][64]
    TensorMap codes;   // words [tiles][..], boxes [4 WR] of 64 inputs
    TensorMap meta;    // words [tiles][..], boxes [4 WR] of a record
    GemmArgs p;
};

// One for all schemes of an instance.
template <int STAGES>
DEVICE uint64_t* wgmma_barriers() {
    __shared__ uint64_t barriers[2 * STAGES];
    return barriers;
}

template <class S, int N, int WR, int STAGES>
struct WgmmaGemm {
    static constexpr int BITS = S::BITS, SLOT = S::SLOT;
    using Operand = Dequant<S, true>;
    static constexpr int TILES = WR * 4;
    static constexpr int THREADS = WR * 128 + 32;
    static constexpr int X_BYTES = N * 128;
    static constexpr int CODE_BYTES = BITS * 128;                     // of a tile
    static constexpr int CODE_WORDS = BITS == 16 ? 256 : BITS * 32;    // of a tile, as the map counts
    static constexpr int META_BYTES = (S::META + 15) / 16 * 16;
    static constexpr int STAGE = (X_BYTES + TILES * (CODE_BYTES + META_BYTES) + 1023) / 1024 * 1024;
    // Half a warpgroup's rows of output for every row of x, padded against bank conflicts.
    static constexpr int OUT_ROW = 80;
    static constexpr int OUT_BYTES = N * OUT_ROW;

    uint8_t* stages;
    uint64_t *full, *empty;
    const WgmmaArgs& args;
    int part;                // of the cluster's blocks
    int m0, m_end;           // first row of x, and that after the last
    int expert_tile;         // of the weight: the first of the expert; 0 without experts
    int first_step, steps;   // of 64 inputs: even

    DEVICE WgmmaGemm(uint8_t* stages, uint64_t* full, uint64_t* empty, const WgmmaArgs& args)
        : stages(stages), full(full), empty(empty), args(args) {
        const int parts = WR == 1 ? args.p.parts : 1, pairs = args.p.spans * 2;
        part = blockIdx.x % parts;
        const ExpertRows rows = block_rows(args.p, blockIdx.x / parts, N);
        m0 = rows.first, m_end = rows.end, expert_tile = rows.expert * args.p.tiles;
        first_step = part * pairs / parts * 2;
        steps = (part + 1) * pairs / parts * 2 - first_step;
    }

    DEVICE uint8_t* stage(int i) const { return stages + i % STAGES * STAGE; }

    static DEVICE void run(const WgmmaArgs& args) {
        extern __shared__ uint8_t raw[];
        uint64_t* const full = wgmma_barriers<STAGES>();
        uint64_t* const empty = full + STAGES;
        // The copy engine's swizzle goes by address.
        uint8_t* const stages = raw + (1024 - shared_address(raw) % 1024) % 1024;
        WgmmaGemm self{stages, full, empty, args};
        if (self.m0 == self.m_end) return;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) {
                barrier_init(full + i, 1);
                barrier_init(empty + i, WR * 4);
            }
            barrier_fence();
        }
        __syncthreads();
        if (threadIdx.x / 32 == WR * 4)
            self.copy();
        else
            self.multiply(stages + STAGES * STAGE);
    }

    // The copying warp.
    DEVICE void copy() const {
        const GemmArgs& p = args.p;
        const int tile0 = expert_tile + blockIdx.y * TILES;
        if (threadIdx.x % 32 != 0) return;
        const int bytes = X_BYTES + TILES * (CODE_BYTES + (BITS == 16 ? 0 : p.meta_bytes));
        for (int step = 0; step < steps; step++) {
            uint8_t* const to = stage(step);
            uint64_t* const done = full + step % STAGES;
            if (step >= STAGES) barrier_wait(empty + step % STAGES, step / STAGES - 1 & 1);
            barrier_expect(done, bytes);
            const int at = first_step + step;
            copy_tile(to, args.x, at * 64, m0, done);
            copy_tile(to + X_BYTES, args.codes, at * CODE_WORDS, tile0, done);
            if (BITS != 16) copy_tile(to + X_BYTES + TILES * CODE_BYTES, args.meta, at / 4 * (p.meta_bytes / 4), tile0, done);
        }
    }

    // The left operand of step `step`, when it is there.
    DEVICE void prepare(uint32_t (&a)[4][4], int step, int tile, int lane) const {
        barrier_wait(full + step % STAGES, step / STAGES & 1);
        const uint8_t* const codes = stage(step) + X_BYTES;
        const uint8_t* const mine = codes + tile * CODE_BYTES;
        const uint8_t* const meta = codes + TILES * CODE_BYTES + tile * args.p.meta_bytes;
        Operand of;
        LevelTables<S> levels;
        levels.load(meta);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j == 0 || (SLOT != 64 && j == 2)) of.load(meta, args.p.groups, first_step + step, j, lane / 4, lane % 4);
            of.product(a[j], Operand::unit(mine, j, lane), levels, j);
        }
        // Here, and not somewhere among the products.
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
    }

    // Queues the products of a step, in turn with the other warpgroups.
    DEVICE void issue(float (&sums)[N / 2], const uint32_t (&a)[4][4], int step, int group, bool last) const {
        const uint64_t x = right_operand(stage(step));
        if (WR > 1) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++) Wgmma<N>::multiply(sums, a[j], x + 2 * j);
        products_commit();
        // Nobody waits for the last turn of all.
        if (WR > 1 && !(last && group == WR - 1)) asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % WR) : "memory");
    }

    // A warpgroup.
    DEVICE void multiply(uint8_t* out) const {
        const int lane = threadIdx.x % 32, tile = threadIdx.x / 32, group = threadIdx.x / 128;
        if (WR > 1 && group == WR - 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
        float sums[N / 2] = {};
        uint32_t a[2][4][4];
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
            prepare(a[0], step, tile, lane);
            issue(sums, a[0], step, group, false);
            products_wait<1>();
            barrier_arrive_if(empty + (step + STAGES - 1) % STAGES, lane == 0 && step > 0);
            prepare(a[1], step + 1, tile, lane);
            issue(sums, a[1], step + 1, group, step + 2 == steps);
            products_wait<1>();
            barrier_arrive_if(empty + step % STAGES, lane == 0);
        }
        products_wait<0>();
        if (WR > 1 || args.p.parts == 1)
            finish<1>(sums, out, group, tile, lane);
        else if (args.p.parts == 2)
            finish<2>(sums, out, group, tile, lane);
        else
            finish<4>(sums, out, group, tile, lane);
    }

    // What becomes of the sums of a tile of which there are so many parts.
    template <int PARTS>
    DEVICE void finish(const float (&sums)[N / 2], uint8_t* out, int group, int tile, int lane) const {
        constexpr int COUNT = N / 2 / PARTS;
        const int first = part * (N / PARTS);   // of the rows of x that this block adds up
        float own[COUNT];
        if (PARTS > 1) {
            add_parts<PARTS>(sums, own);
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k++) own[k] = sums[k];
        }
        if (args.p.epilogue == GEMM_SILU)
            store_silu<COUNT>(own, out + group * OUT_BYTES, tile, lane, first);
        else
            store<COUNT>(own, tile, lane, first);
        // The others may still read what this block left.
        if (PARTS > 1) cluster_wait();
    }

    // The sums of this block's share of the rows over all parts; ends with an arrival.
    template <int PARTS, int COUNT = N / 2 / PARTS>
    DEVICE void add_parts(const float (&sums)[N / 2], float (&own)[COUNT]) const {
        static_assert(WR > 1 || STAGES * STAGE >= 128 * N / 2 * 4, "sums lie where stages were");
        float* const left = reinterpret_cast<float*>(stages) + threadIdx.x;
        // All warps have done with the stages.
        asm volatile("bar.sync 15, %0;" ::"n"(WR * 128) : "memory");
#pragma unroll
        for (int k = 0; k < N / 2; k++) left[k * 128] = sums[k];
        cluster_arrive();
        cluster_wait();
        // All are on their way before the first is waited for: another block is far.
        float theirs[PARTS][COUNT];
#pragma unroll
        for (int r = 0; r < PARTS; r++) {
            const uint32_t from = cluster_address(left, r) + part * COUNT * 512;
#pragma unroll
            for (int k = 0; k < COUNT; k++) theirs[r][k] = load_cluster(from + k * 512);
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            own[k] = theirs[0][k];
#pragma unroll
            for (int r = 1; r < PARTS; r++) own[k] += theirs[r][k];
        }
        cluster_arrive();
    }

    // Rows `first` .. of this block's rows of x.
    template <int COUNT>
    DEVICE void store(const float (&sums)[COUNT], int tile, int lane, int first) const {
        const GemmArgs& p = args.p;
        const int row = (blockIdx.y * TILES + tile) * 16 + lane / 4, m1 = m0 + first + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COUNT / 4; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int m = m1 + n * 8 + i % 2, r = row + i / 2 * 8;
                if (m >= m_end || r >= p.rows) continue;
                float* const y = p.y + size_t(m) * p.rows + r;
                const float v = sums[n * 4 + i] * p.scale;
                // Nobody else adds here: the order is given. An addition in L2 need not be waited for.
                if (p.epilogue == GEMM_ADD) atomicAdd(y, v);
                else *y = v;
            }
        }
    }

    // silu(gate) * up of this warpgroup's 32 pairs for rows `first` .. of this block's rows of x,
    // gathered in `out`: 64 bytes for a row.
    template <int COUNT>
    DEVICE void store_silu(const float (&sums)[COUNT], uint8_t* out, int tile, int lane, int first) const {
        const GemmArgs& p = args.p;
        const int t = lane % 4, within = operand_index(tile % 4 * 8 + lane / 4);
#pragma unroll
        for (int n = 0; n < COUNT / 4; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float gate = sums[n * 4 + i] * p.scale, up = sums[n * 4 + 2 + i] * p.scale;
                const float v = __fdividef(gate, 1.f + __expf(-gate)) * up;
                reinterpret_cast<__half*>(out + (n * 8 + 2 * t + i) * OUT_ROW)[within] = __float2half_rn(clamp_half(v));
            }
        }
        asm volatile("bar.sync %0, 128;" ::"r"(1 + WR + tile / 4) : "memory");
        const int pair = (blockIdx.y * TILES + tile / 4 * 4) * 8;   // the first of the 32
        for (int i = threadIdx.x % 128; i < COUNT * 8; i += 128) {
            const int m = m0 + first + i / 4;
            if (m < m_end && pair < p.padded)
                reinterpret_cast<uint4*>(p.half + size_t(m) * p.padded + pair)[i % 4] =
                    *reinterpret_cast<const uint4*>(out + i / 4 * OUT_ROW + i % 4 * 16);
        }
    }
};

#endif
