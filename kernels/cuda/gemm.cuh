// Many rows of activations times a packed weight, on tensor cores.
//
//   y[m][r] = sum_k w[r][k] * x[m][k],  x in FP16, sums in f32
//
// Codes become FP16 integers q - z exactly. SCALED: they are then multiplied by their scale and
// rounded to FP16 (`dequant.cuh`). Otherwise products of one slot (64 inputs, 32 for groups of 32)
// are summed apart and enter y times their scale, so weights are not rounded (but for offsets);
// that costs registers and time where a block takes many rows of x.
//
// Block: teams of WR warps, as many as the launch asks for. A team takes its part of the inputs; in the end
// the first adds up the sums of all, in order. A warp computes RT tiles of 16 weight rows times all NT x 8 rows
// of x, the weights as left operand. Stages of 64 inputs of x and codes come through STAGES buffers of a
// team in shared memory. x is row-major [m][spans * 256], its inputs in the order of the products
// (`operand_index`).
//
// A stage is four products of 16 inputs. While one runs, the left operand of the next is made and the right
// one is read, AHEAD pairs of row tiles ahead. Before a stage's last pairs are multiplied, all of it is in
// registers: the team meets there, asks for the stage that takes its place, and makes the first operands
// of the next one.
//
// Of a mixture (`of_experts` not null), rows of x are sorted by the expert that multiplies them, and
// the weight is the stack of all experts, `tiles` each: a block takes the rows and the expert of one
// `ExpertRows`.
//
// Grid (m / (NT 8), rows / (WR RT 16)): blocks that share weights are neighbours.
// Bytes: codes once per column of blocks, x once per row of blocks.
#pragma once

#include "activations.cuh"
#include "dequant.cuh"

enum GemmEpilogue { GEMM_STORE = 0, GEMM_ADD = 1, GEMM_SILU = 2 };

// Rows of x for an expert, `first` .. `end`: as many as a block takes at most. None where they are equal.
struct ExpertRows {
    int expert;
    int first;
    int end;
    int unused;
};

struct GemmArgs {
    const uint4* codes;
    const uint8_t* meta;
    const __half* x;     // [m][spans * SPAN] in operand order, zero past `inputs`
    float* y;            // STORE, ADD: [m][rows]
    __half* half;        // SILU: [m][padded] of rows / 2 values, in operand order
    const ExpertRows* of_experts;   // of a mixture: what each block of rows of x takes; or null
    int m;
    int rows;
    int tiles;
    int spans;
    int groups;
    int meta_bytes;
    int padded;
    int epilogue;
    float scale;
    int parts;           // split-k of `gemm_wgmma.cuh`: blocks that share a tile
    int scheme;          // of `with_block_scheme`
};

// What a block of `count` rows of x, the `index`-th, takes.
DEVICE ExpertRows block_rows(const GemmArgs& p, int index, int count) {
    if (p.of_experts == nullptr) return {0, index * count, p.m, 0};
    const int4 v = __ldg(reinterpret_cast<const int4*>(p.of_experts) + index);
    return {v.x, v.y, v.z, 0};
}

// Shared memory that teams have on a multiprocessor, where blocks have little and elsewhere.
constexpr int SMALL_ROOM = 98304;
constexpr int LARGE_ROOM = 163840;
constexpr int TEAMS_ROOM = SMALL_BLOCKS ? SMALL_ROOM : LARGE_ROOM;

// TEAMS: so many at once have room on a multiprocessor, in one block or several.
template <class S, int NT, int RT, int WR, int TEAMS, bool SCALED>
struct Gemm {
    static constexpr int BITS = S::BITS, SLOT = S::SLOT;
    static constexpr int THREADS = WR * 32;                  // of a team
    static constexpr int BN = NT * 8, BT = WR * RT;          // rows of x and tiles of a block
    static constexpr int X_BYTES = BN * 128;                 // of a stage
    static constexpr int CODE_BYTES = BITS * 128;            // of a tile in a stage
    static constexpr int STAGE = X_BYTES + BT * CODE_BYTES, FIT = TEAMS_ROOM / TEAMS / STAGE;
    static constexpr int STAGES = FIT < 2 ? 2 : FIT > 4 ? 4 : FIT;
    using Operand = Dequant<S, SCALED || SLOT == 16>;   // of which a product takes inputs of two slots
    static constexpr bool EXACT = Operand::EXACT;

    // Copies of a thread for a stage.
    static constexpr int X_COPIES = (X_BYTES + THREADS * 16 - 1) / (THREADS * 16);
    static constexpr int COPIES = X_COPIES + (BT * CODE_BYTES + THREADS * 16 - 1) / (THREADS * 16);

    // Right operands: of two row tiles at once, or of the only one.
    static constexpr int WIDE = NT > 1 ? 2 : 1, PAIRS = NT / WIDE, COUNT = 4 * PAIRS;
    static constexpr int AHEAD = 2, RING = 4;
    // The team meets before this product of a pair; the ring then holds the rest of the stage.
    static constexpr int HELD = PAIRS < RING ? PAIRS : RING, MEETING = COUNT - HELD;
    static_assert(NT % WIDE == 0 && COUNT % RING == 0, "pairs");
    // Before which pair of a product, of `count` from `first` on, the next left operand of tile r is made.
    static constexpr DEVICE int making(int r, int first, int count) {
        const int at = r * (count - 1) / RT + 1;
        return first + (at < count ? at : count - 1);
    }

    // Slots of a stage, and the products of each.
    static constexpr int SLOTS = SLOT == 64 ? 1 : 2, PER_SLOT = 4 / SLOTS;
    // Products that a unit of codes holds.
    static constexpr int PER_UNIT = 16 / S::ORDER;

    using Sums = float[RT][NT][4];
    // A warp's operands: of the product that runs and the next, and of the following pairs of row tiles.
    struct Operands {
        Unit<S> unit[RT];
        Operand dequant[RT];
        LevelTables<S> levels[RT];   // of all records of a tile
        uint32_t left[2][RT][4];
        uint4 right[RING];
        float2 scale[RT];   // of the slot whose sums are kept apart
    };

    const GemmArgs& p;
    const ExpertRows block;
    const int teams, team, thread, wr, lane, g;
    const int tile0, m0;
    const int steps;                     // of 64 inputs: the team's part
    const size_t first_record;
    const int last_row, last_tile;       // that exist, counted from those of this block
    const uint32_t stages, last_stage;
    // What the team asks for next: rows past m repeat the last, their sums are not stored. Word u of
    // row r stands at u ^ (r % 8): a matrix of eight rows then meets all banks.
    const uint8_t* x;
    const uint8_t* codes;
    const uint32_t x_to;
    uint32_t from[COPIES];               // of the thread's copies, in words of 16 bytes
    // With a constant, the compiler would make two additions of each address.
    const uint32_t word_bytes;
    // Scales are read from memory a group of inputs before they are wanted.
    const int same;                      // steps that share scales
    RawMeta<S> raw[RT][SLOTS];
    uint32_t record[RT];
    // Where the lane finds the right operand of its first pair's product 0; product j's differs in bits 5 and 6.
    const uint32_t x_at, w_at;

    DEVICE Gemm(const GemmArgs& p, const ExpertRows& block, int team, int first_span, uint4* shared)
        : p(p), block(block), teams(blockDim.x / THREADS), team(team), thread(threadIdx.x % THREADS), wr(__shfl_sync(~0u, thread / 32, 0)),
          lane(threadIdx.x % 32), g(lane / 4), tile0(blockIdx.y * BT), m0(block.first),
          steps(((team + 1) * p.spans / teams - first_span) * 4), first_record((size_t(block.expert) * p.tiles + tile0) * p.spans + first_span),
          last_row(block.end - 1 - m0), last_tile(p.tiles - 1 - tile0), stages(shared_address(shared) + team * (STAGES * STAGE)),
          last_stage(stages + (STAGES - 1) * STAGE),
          x(reinterpret_cast<const uint8_t*>(p.x) + size_t(m0) * (p.spans * (SPAN * 2)) + first_span * (SPAN * 2)),
          codes(reinterpret_cast<const uint8_t*>(p.codes) + first_record * 4 * CODE_BYTES),
          x_to(keep(thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16)), word_bytes(keep(16)),
          same(SLOT != 64 || BITS == 16 ? 1 : 4 / p.groups), x_at((lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16),
          w_at(keep(X_BYTES + wr * RT * CODE_BYTES + lane * Unit<S>::LANE)) {
        constexpr uint32_t WORDS = CODE_BYTES / 16;
        const uint32_t row_bytes = p.spans * (SPAN * 2);
#pragma unroll
        for (int k = 0; k < COPIES; k++) {
            const uint32_t word = thread + (k < X_COPIES ? k : k - X_COPIES) * THREADS;
            if (k < X_COPIES) from[k] = min(thread / 8 + k * (THREADS / 8), last_row) * (row_bytes / 16) + thread % 8;
            else from[k] = min(int(word / WORDS), last_tile) * (p.spans * 4 * WORDS) + word % WORDS;
            from[k] = keep(from[k]);
        }
#pragma unroll
        for (int r = 0; r < RT; r++) record[r] = keep(min(wr * RT + r, last_tile) * p.spans * p.meta_bytes);
    }

    DEVICE void meet() const { asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(THREADS) : "memory"); }

    // Asks for the team's next stage, to shared memory at `to`.
    DEVICE void request(bool there, uint32_t to) {
#pragma unroll
        for (int k = 0; k < COPIES; k++) {
            const bool is_x = k < X_COPIES;
            const int at = is_x ? k : k - X_COPIES, bytes = is_x ? X_BYTES : BT * CODE_BYTES;
            copy_async_if(there && (bytes % (THREADS * 16) == 0 || thread + at * THREADS < bytes / 16),
                          to + (is_x ? x_to : X_BYTES + thread * 16) + at * (THREADS * 16),
                          (is_x ? x : codes) + uint64_t(from[k]) * word_bytes);
        }
        x += 128, codes += CODE_BYTES;
        copy_commit();
    }

    DEVICE void read_scales(int step, int s) {
        step = max(min(step, steps - 1), 0);
        const int group = Operand::group_of(p.groups, step, s * 2, lane % 4);
        const uint8_t* const meta = p.meta + first_record * p.meta_bytes;
#pragma unroll
        for (int r = 0; r < RT; r++) raw[r][s].load(meta + (record[r] + uint32_t(step) / 4 * p.meta_bytes), p.groups, group, g);
    }

    DEVICE void read_right(uint4& to, uint32_t stage, int k) const {
        const uint32_t at = (stage + x_at ^ k / PAIRS * 32) + k % PAIRS * 2048;
        if constexpr (WIDE == 2) to = load_matrices_at(at);
        else to = load_two_matrices_at(at);
    }

    DEVICE void read_codes(Operands& o, uint32_t stage, int j) const {
#pragma unroll
        for (int r = 0; r < RT; r++) {
            const uint32_t at = stage + w_at + r * CODE_BYTES;
            o.unit[r].load_shared(at + j / PER_UNIT * 512, at + o.unit[r].AT + lane * (o.unit[r].WIDTH * 4 - o.unit[r].LANE));
        }
    }

    // The first operands, when the first stage is there.
    DEVICE void first_operands(Operands& o) {
#pragma unroll
        for (int r = 0; r < RT; r++) o.levels[r].load(p.meta + first_record * p.meta_bytes + record[r]);
        copy_wait<STAGES - 1>();
        meet();
        read_codes(o, stages, 0);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) read_right(o.right[k], stages, k);
#pragma unroll
        for (int r = 0; r < RT; r++) {
            o.dequant[r].set(raw[r][0].group());
            o.dequant[r].product(o.left[0][r], o.unit[r], o.levels[r], 0);
        }
        read_scales(same, 0);
    }

    // Takes the scales of the slot that comes after product j of a step, and asks for those of the slot after it.
    DEVICE void next_scales(Operands& o, int step, int j) {
        const int s = j == 3 ? 0 : SLOTS - 1;
#pragma unroll
        for (int r = 0; r < RT; r++)
            if (EXACT) o.scale[r] = make_float2(__low2float(o.dequant[r].scale[0]), __low2float(o.dequant[r].scale[1]));
        if (SLOT == 64 && (step + 1 & same - 1) != 0) return;
#pragma unroll
        for (int r = 0; r < RT; r++) o.dequant[r].set(raw[r][s].group());
        read_scales(step + (j == 3 ? 1 + same : 1), s);
    }

    // Reads what the pairs after pair k of a step need, of this stage or the next; at MEETING the team meets, after which the
    // stage's place may be filled again.
    DEVICE void read_ahead(Operands& o, int step, int k, uint32_t here, uint32_t next) {
        const int j = k / PAIRS, first = j == 3 ? MEETING % PAIRS : 0;
        if (k == MEETING) {
#pragma unroll
            for (int i = k + AHEAD; i < COUNT; i++) read_right(o.right[i % RING], here, i);
            copy_wait<STAGES - 2>();
            meet();
        }
        if (k % PAIRS == first && (j + 1) % PER_UNIT == 0) read_codes(o, j == 3 ? next : here, (j + 1) % 4);
        if (k % PAIRS == first && (j + 1) % PER_SLOT == 0) next_scales(o, step, j);
        if (k == MEETING) {
            request(step + STAGES < steps, here);
#pragma unroll
            for (int i = COUNT; i < k + AHEAD; i++) read_right(o.right[i % RING], next, i - COUNT);
        }
        if (k < MEETING && k + AHEAD < COUNT) read_right(o.right[(k + AHEAD) % RING], here, k + AHEAD);
        if (k >= MEETING && k + AHEAD >= COUNT) read_right(o.right[(k + AHEAD) % RING], next, k + AHEAD - COUNT);
    }

    // Multiplies the team's part of the inputs.
    DEVICE void multiply(Sums& acc) {
#pragma unroll 1
        for (int s = 0; s < STAGES; s++) request(s < steps, stages + s * STAGE);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) read_scales(0, s);
        Operands o;
        first_operands(o);
        float part[EXACT ? RT : 1][EXACT ? NT : 1][4] = {};
        uint32_t here = stages;   // the stage of this step
        for (int step = 0; step < steps; step++) {
            const uint32_t next = here == last_stage ? stages : here + STAGE;
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                const int j = k / PAIRS, n = k % PAIRS * WIDE;
                const int first = j == 3 ? MEETING % PAIRS : 0, count = j == 3 ? HELD : PAIRS;
                read_ahead(o, step, k, here, next);
                // The left operand of the next product.
#pragma unroll
                for (int r = 0; r < RT; r++)
                    if (k % PAIRS == making(r, first, count)) o.dequant[r].product(o.left[(j + 1) % 2][r], o.unit[r], o.levels[r], (j + 1) % 4);

                const uint4 b = o.right[k % RING];
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    const uint32_t(&a)[4] = o.left[j % 2][r];
#pragma unroll
                    for (int i = 0; i < WIDE; i++) {
                        float(&sum)[4] = EXACT ? part[EXACT ? r : 0][EXACT ? n + i : 0] : acc[r][n + i];
                        mma_16816(sum, a[0], a[1], a[2], a[3], i == 0 ? b.x : b.z, i == 0 ? b.y : b.w);
                    }
                }
                if (EXACT && (k + 1) % (PER_SLOT * PAIRS) == 0) {
#pragma unroll
                    for (int r = 0; r < RT; r++)
#pragma unroll
                        for (int q = 0; q < NT; q++) {
                            float(&slot)[4] = part[EXACT ? r : 0][EXACT ? q : 0];
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                acc[r][q][i] = fmaf(i < 2 ? o.scale[r].x : o.scale[r].y, slot[i], acc[r][q][i]);
                                slot[i] = 0.f;
                            }
                        }
                }
            }
            here = next;
        }
        copy_wait<0>();
    }

    // Adds up the sums of all teams, which then lie where stages were; true for the first team, which has them.
    DEVICE bool add_teams(Sums& acc, uint4* shared) const {
        if (teams == 1) return true;
        __syncthreads();
        float4* const sums = reinterpret_cast<float4*>(shared) + thread;
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                if (team > 0) sums[((team - 1) * RT * NT + r * NT + n) * THREADS] = *reinterpret_cast<float4*>(acc[r][n]);
        __syncthreads();
        if (team > 0) return false;
        for (int q = 1; q < teams; q++)
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float4 v = sums[((q - 1) * RT * NT + r * NT + n) * THREADS];
                    acc[r][n][0] += v.x, acc[r][n][1] += v.y, acc[r][n][2] += v.z, acc[r][n][3] += v.w;
                }
        return true;
    }

    static DEVICE void run(const GemmArgs& p) {
        extern __shared__ __align__(128) uint4 shared[];
        const int team = __shfl_sync(~0u, threadIdx.x / THREADS, 0);
        const ExpertRows block = block_rows(p, blockIdx.x, BN);
        if (block.first == block.end) return;
        Gemm gemm(p, block, team, team * p.spans / int(blockDim.x / THREADS), shared);
        Sums acc = {};
        gemm.multiply(acc);
        if (!gemm.add_teams(acc, shared)) return;
        const int tile0 = gemm.tile0 + gemm.wr * RT;
        if (p.epilogue == GEMM_SILU) store_silu(p, acc, block.end, tile0, block.first);
        else if (p.epilogue == GEMM_ADD) store<true>(p, acc, block.end, tile0, block.first);
        else store<false>(p, acc, block.end, tile0, block.first);
    }

    // A warp's sums, of the tiles from `tile0` and the rows of x from `m0` to `end`.
    template <bool ADD>
    static DEVICE void store(const GemmArgs& p, const float (&acc)[RT][NT][4], int end, int tile0, int m0) {
        const int row = tile0 * 16 + threadIdx.x % 32 / 4;
        m0 += threadIdx.x % 4 * 2;
        float* y = p.y + size_t(m0) * p.rows + row;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool there = m0 + n * 8 + i < end;
#pragma unroll
                for (int k = 0; k < RT * 2; k++) {
                    const float v = acc[k / 2][n][k % 2 * 2 + i] * p.scale;
                    if (there && row + k * 8 < p.rows) {
                        // Nobody else adds here: the order is given. An addition in L2 need not be waited for.
                        if (ADD) atomicAdd(y + k * 8, v);
                        else y[k * 8] = v;
                    }
                }
                y += i == 0 ? p.rows : 7 * size_t(p.rows);
            }
        }
    }

    // As `store`, of silu(gate) * up. Neighbours of the 8 pairs of a tile stand together, and so do
    // those of neighbouring tiles: a lane stores two pairs of each tile for one row of x.
    static DEVICE void store_silu(const GemmArgs& p, const float (&acc)[RT][NT][4], int end, int tile0, int m0) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        if (tile0 >= p.tiles) return;
        __half* to = p.half + size_t(m0 + 2 * t + g % 2) * p.padded + operand_index(tile0 * 8 + g / 2 * 2);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint32_t pairs[RT];
#pragma unroll
            for (int r = 0; r < RT; r++) {
                float v[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float gate = acc[r][n][i] * p.scale, up = acc[r][n][i + 2] * p.scale;
                    v[i] = clamp_half(__fdividef(gate, 1.f + __expf(-gate)) * up);
                }
                const uint32_t own = half2_bits(__floats2half2_rn(v[0], v[1])), other = __shfl_xor_sync(~0u, own, 4);
                pairs[r] = tile0 + r < p.tiles ? __byte_perm(own, other, g % 2 ? 0x3276 : 0x5410) : 0;
            }
            store_if(m0 + n * 8 + 2 * t + g % 2 < end, to, pairs);
            to += p.padded * size_t(8);
        }
    }

    // Not a branch: lanes would have to meet after it.
    static DEVICE void store_if(bool there, __half* to, const uint32_t (&v)[RT]) {
        static_assert(RT <= 2, "words of one store");
        if constexpr (RT == 1)
            asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.u32 [%0], %1;\n}\n" ::"l"(to), "r"(v[0]), "r"(int(there)) : "memory");
        else
            asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p st.global.v2.u32 [%0], {%1, %2};\n}\n" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(int(there)) : "memory");
    }
};
