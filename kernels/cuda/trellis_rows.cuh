// Up to 4 or 16 rows of x times a weight in a trellis code, or in one of EXL3: trellis_rows_<code>_<rows of a group>,
// exl3_rows_<bits>_<rows of a group>.
//
//   y[row] = row scale / 128 * (step * S - 127.5 * step * sum of digits),   S = sum of bytes of states * digits
//
// The right operand of `mma_16832` has eight columns, the two digits of four rows of x (`trellis_inputs.cu`); its left one is
// made of states (`trellis.cuh`): bits are shifted out, masked, multiplied by a constant. Sums are integers through a
// strip, and there are no scales to apply before its end.
//
// Work: units, tiles of strips, in order, are dealt evenly to the blocks of a group of rows (grid: blocks, groups), however
// strips begin and end; the warps of a block take its units in turn. A unit's words come through a ring in shared memory by
// asynchronous copies, each lane's own to where only it reads them: nothing need be synchronized for that, also
// not at the end of a strip, and first units are requested before the predecessor's end. A place of the ring is
// filled again as soon as its words are in registers. Digits, only of rows that exist, come from L2 to registers: each part
// of them takes the place of the part of the unit before.
//
// One row of x (`x` is not null) needs no other kernel: each block makes all its digits, with its first words on their way. They
// replace x in shared memory, a block of 128 inputs in the order of its tiles, of a tile only what is not zero:
//   uint2 [2 parts of 16 inputs (octagon)][8 lanes]
//
// At the end of a strip the warps' sums become floats and meet in shared memory, added in the order of warps. A strip (of gate
// and up: both) that lies in one block is finished there. Otherwise each block leaves its part in memory, as the complements of
// bits, which are not zero. The block where the strip ends adds them in the order of blocks when it has done all else: it
// looks again at those that are still zero, and leaves zeros. It only waits for blocks of lower numbers, which started
// no later and wait for nobody before they have left their parts.
//
// Experts of a mixture, all of the same shape, lie one after the other, or where a table says (`places.cuh`), and share the
// scales of inputs; those of EXL3 have scales, and so digits, of their own. A group of rows then has the weights of one expert:
//
//   few rows     groups of 4: a row has as many groups as experts, chosen by its scores (`choose.cuh`), each with nothing but
//                that row. SILU: times the weight of the expert, to row `group` of the output, as STORE, EXL3's
//                gate. ADD: x is row `group`. A block has
//                whole strips, and leaves its product in memory; that of the row's last expert adds up what all of them left.
//   sorted rows  groups of 16: `sorted` has the expert, the first row and the end of each, in whose order digits are
//
// Epilogues (rows that do not exist are left out):
//   STORE  out[r] = y
//   ADD    out[r] += y
//   SILU   strips come in pairs, gate and up of the same rows: silu(gate) * up, to `out`, or as FP16 to `half`, or both
//   HEAD   as STORE, and the greatest of each strip
//
// One block of 512 threads (groups of 16 rows: 256, whose lanes have 128 sums each) fits on an SM. Shared memory: `RowsOf::ROW`, up to
// 96 KiB, and 4 bytes an input of a row of x.
// Limits: inputs are a multiple of 128, at most 32,768: 32 bits hold what a warp adds up of them, and the sum of their digits.
// Bytes: codes once for each group of rows; digits once for each strip, from L2.
#pragma once

#include "choose.cuh"
#include "places.cuh"
#include "trellis.cuh"

struct TrellisRowsArgs {
    const uint4* words;         // [experts][strips][tiles][32 * WORDS u32]
    const __half* row_scales;   // [experts][strips][128]
    const int2* places;         // [strips]: output row of the first row (SILU: of the gate's, in rows / 2), and how many exist
    const uint2* digits;        // of `trellis_inputs.cu`; or, and steps, null
    const float2* steps;        // [groups * group]
    const float* x;             // [inputs], of groups of 4 if m is 1; or null
    const float* gain;          // [inputs], of x, of RMSNorm; null: no norm
    const __half* scales;       // [inputs], of x; EXL3: [experts][inputs]
    float* out;                 // [m][rows]; SILU: [m][rows / 2] or null
    __half* half;               // SILU: [m][padded] in operand order, or null
    float2* best;               // HEAD: [m][strips], the greatest logit and its row (as bits), the lowest of equals
    uint32_t* parts;            // [groups][blocks][2][1 strip; SILU: 2][128 * group]: sums of a strip that began in an earlier block, and
                                // of one that ends in a later one; zeros before and after. ADD and few rows of a mixture: [m][strips]
                                // [per_token - 1][128]
    const float* gate;          // EXL3 and SILU: [m][rows / 2], the gate's products; few rows of a mixture: [groups][rows / 2]
    int m;
    int rows;
    int strips;
    int tiles;                  // inputs / 32
    int padded;
    int epilogue;               // Epilogue
    float eps;                  // of RMSNorm
    int holds_dependents;       // dependents are launched only after the end of the prerequisites
    int bytes;                  // EXL3 alone, of its code: values are sums of bytes, not of halves
    uint32_t multiplier;        // likewise
    uint32_t addend;            // likewise
    // Of a mixture.
    const float* scores;        // few rows: [m][experts]; or null
    const int4* sorted;         // sorted rows: [groups], `ExpertRows` of `gemm.cuh`; or null
    ExpertPlaces experts_at;    // or null: they lie one after the other
    int experts;
    int per_token;
    int normalized;
    int shared;                 // all rows go through the last expert
};

constexpr int ROWS_SHARED = 96 << 10;

// What a product by groups of GROUP rows is made of.
template <class C, int GROUP>
struct RowsOf {
    static constexpr int FOURS = GROUP / 4;                  // right operands
    static constexpr int WARPS = GROUP == 4 ? 16 : 8;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int OUTPUTS = STRIP * GROUP;            // of a strip: output o is row o / 4 % 128 of row 4 (o / 512) + o % 4 of x
    static constexpr int EACH = OUTPUTS / THREADS;           // outputs of a thread: thread + i * THREADS
    static constexpr int HALVES = EACH > 1 ? 2 : 1;          // rows of a thread: thread / 4, and 64 further
    static constexpr int PLACES = WARPS / 2;                 // for sums: half of the warps add to those of the others
    static constexpr int CHUNKS = STRIP / 8;                 // rows of a strip that a warp finishes together
    static constexpr int END = (PLACES + 2) * OUTPUTS * 4 + 1024;   // bytes behind the ring
    static constexpr int FIT = (ROWS_SHARED - END) / (WARPS * C::UNIT);
    static constexpr int STAGES = FIT > 4 ? 4 : FIT;         // of the ring
    static constexpr int ROW = STAGES * WARPS * C::UNIT + END;      // where x is in shared memory
    static_assert(STAGES > 0);
    static_assert(CHUNKS * GROUP * 8 <= PLACES * OUTPUTS * 4);
};

// The digits of a unit's tile that a lane has, of rows of x that exist; zeros of others.
template <class C, int FOURS>
struct UnitDigits {
    static constexpr int PARTS = DIGITS<C::OCTAGON>;
    uint2 x[PARTS][FOURS];

    // From byte `at` of all digits, for this lane; `own`: of those that the block has made itself.
    DEVICE void load(int part, const uint2* all, const uint8_t* own, bool owns, uint32_t at, int here) {
        if (owns) {
            if (int(threadIdx.x) % 32 / 8 < here) x[part][0] = *reinterpret_cast<const uint2*>(own + at + part * 64);
            return;
        }
        const uint2* const from = reinterpret_cast<const uint2*>(reinterpret_cast<const uint8_t*>(all) + at);
#pragma unroll
        for (int j = 0; j < FOURS; j++)
            if (4 * j + int(threadIdx.x) % 32 / 8 < here) x[part][j] = __ldcg(from + (part * FOURS + j) * 32);
    }
};

// A row of x in shared memory, whose digits a block makes for itself, as `trellis_inputs.cu` does: the same values in the same order.
template <class C, int WARPS>
struct OwnRow {
    static constexpr bool OCTAGON = C::OCTAGON;
    using Digits = typename C::Digits;
    static constexpr int SUMS = 16 / WARPS;   // of squares of a lane: one for each warp of that kernel
    const TrellisRowsArgs& p;
    const __half* scales;
    const float* values;   // of x
    float* row;
    uint32_t* meeting;   // [WARPS + 16 + WARPS]
    int inputs, warp, lane;

    // The factors of x, where its values will be.
    DEVICE void factors() const {
#pragma unroll 4
        for (int k = warp * BLOCK + 4 * lane; k < inputs; k += WARPS * BLOCK) {
            float f[4];
            load_four(f, __ldg(reinterpret_cast<const uint2*>(scales + k)));
            if (p.gain) {
                const float4 g = __ldg(reinterpret_cast<const float4*>(p.gain + k));
                f[0] *= g.x, f[1] *= g.y, f[2] *= g.z, f[3] *= g.w;
            }
            *reinterpret_cast<float4*>(row + k) = make_float4(f[0], f[1], f[2], f[3]);
        }
    }

    // Ends with a barrier of the block; the step is there after the next.
    DEVICE void digits(float2* step) const {
        constexpr int AHEAD = 4;
        float most = 0.f, squares[SUMS] = {};
#pragma unroll 1
        for (int from = warp * BLOCK + 4 * lane; from < inputs; from += AHEAD * WARPS * BLOCK) {
            float4 x[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (from + i * WARPS * BLOCK < inputs) x[i] = __ldcg(reinterpret_cast<const float4*>(values + from + i * WARPS * BLOCK));
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = from + i * WARPS * BLOCK;
                if (k >= inputs) break;
                float v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
                float4& to = *reinterpret_cast<float4*>(row + k);
                const float4 f = to;
#pragma unroll
                for (int j = 0; j < 4; j++) squares[i % SUMS] = fmaf(v[j], v[j], squares[i % SUMS]);
                v[0] *= f.x, v[1] *= f.y, v[2] *= f.z, v[3] *= f.w;
                transform(v);
                to = make_float4(v[0], v[1], v[2], v[3]);
                most = greatest_of<OCTAGON && Digits::TURNED>(most, v);
            }
        }
        // What is not negative is in the order of its bits.
        uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(most));
#pragma unroll
        for (int i = 0; i < SUMS; i++) squares[i] = warp_sum(squares[i]);
        if (lane == 0) {
            meeting[warp] = bits;
#pragma unroll
            for (int i = 0; i < SUMS; i++) meeting[WARPS + i * WARPS + warp] = __float_as_uint(squares[i]);
        }
        __syncthreads();
        most = __uint_as_float(__reduce_max_sync(~0u, meeting[lane % WARPS]));

        Digits digits(most);
#pragma unroll 1
        for (int k = warp * BLOCK + 4 * lane; k < inputs; k += WARPS * BLOCK) {
            const float4 v = *reinterpret_cast<const float4*>(row + k);
            __syncwarp();   // other lanes' values are replaced
            if constexpr (OCTAGON) {
                // Pairs `q` and the next of 16 inputs: the second component is of pairs 4 .. 7.
                const int q = lane % 4 * 2;
                uint32_t* const to = reinterpret_cast<uint32_t*>(row) + k / 16 * 16 + q % 4 * 2 + q / 4;
                digits.pair(v.x, v.y, to[0], to[8]);
                digits.pair(v.z, v.w, to[2], to[10]);
            } else {
                // The bytes of four lanes, of inputs 4 apart, are a word: of 16 inputs the first component.
                uint8_t* const to = reinterpret_cast<uint8_t*>(row + k / 32 * 32) + lane % 8 / 4 * 4 + lane % 4;
                uint32_t high, low;
                digits.split({digits.round(v.x), digits.round(v.y), digits.round(v.z), digits.round(v.w)}, high, low);
#pragma unroll
                for (int i = 0; i < 4; i++) to[i * 8] = uint8_t(high >> 8 * i), to[32 + i * 8] = uint8_t(low >> 8 * i);
            }
        }
        int* const sums = reinterpret_cast<int*>(meeting + WARPS + 16);
        const int sum = __reduce_add_sync(~0u, digits.sum);
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        if (warp > 0) return;
        const int all = __reduce_add_sync(~0u, lane < WARPS ? sums[lane] : 0);
        const float square = warp_sum(lane < 16 ? __uint_as_float(meeting[WARPS + lane]) : 0.f);
        if (lane == 0) *step = step_of<OCTAGON, Digits>(most, all, p.gain, square, inputs, p.eps);
    }
};

// The sums of a unit's products: of row 16 m + g (+ 8) of the strip, and of row t of the j-th four of x, both digits. Digits are
// replaced by those of the next unit's tile, at `next`, as soon as they are not needed any more.
template <class C, int FOURS>
DEVICE void multiply(int (&sums)[FOURS][8][4], const uint32_t (&words)[C::WORDS], UnitDigits<C, FOURS>& digits, const TrellisRowsArgs& p,
                     const uint8_t* own, bool owns, uint32_t next, int here) {
    const uint2* const all = p.digits;
    UnitDigits<C, FOURS> later = digits;
    if constexpr (!C::OCTAGON) later.load(0, all, own, owns, next, here);
#pragma unroll
    for (int part = 0; part < C::PARTS; part++) {
        uint2 x[FOURS];
#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            if constexpr (C::OCTAGON) {
                x[j] = digits.x[part][j];
            } else {
                const uint32_t four = part < 2 ? digits.x[0][j].x : digits.x[0][j].y;
                x[j].x = __byte_perm(four, 0, part % 2 ? 0x2222 : 0x0000), x[j].y = __byte_perm(four, 0, part % 2 ? 0x3333 : 0x1111);
            }
        }
#pragma unroll
        for (int m = 0; m < 8; m++) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = state_before<C>(words, ((part * 8 + m) * 4 + i + 1) * C::BITS) * C::MULTIPLIER;
#pragma unroll
            for (int j = 0; j < FOURS; j++) mma_16832(sums[j][m], a[0], a[1], a[2], a[3], x[j].x, x[j].y);
        }
        if constexpr (C::OCTAGON) digits.load(part, all, own, owns, next, here);
    }
    if constexpr (!C::OCTAGON) digits = later;
}

// What a group of rows of x is of, for the ends of segments.
struct GroupOf {
    const __half* row_scales;
    const __half* scales;   // of inputs
    int first_row;   // of the output
    int nth;         // few rows of a mixture: of the row's experts
    float weight;    // likewise
};

// A block of a group of rows of x: the units that it takes of strips, the end of each, and its part of the strips that it
// shares with other blocks. A segment is what is finished together: a strip, or with SILU the strips of gate and up.
template <class C, int GROUP>
struct TrellisRows {
    using Sizes = RowsOf<C, GROUP>;
    static constexpr int FOURS = Sizes::FOURS, WARPS = Sizes::WARPS, THREADS = Sizes::THREADS, OUTPUTS = Sizes::OUTPUTS;
    static constexpr int EACH = Sizes::EACH, STAGES = Sizes::STAGES, HALVES = Sizes::HALVES;
    static constexpr int RUNS = C::WORDS / 4;   // copies of 16 bytes for a lane's words of a unit
    using Sums = typename C::Sum[FOURS][8][4];  // of a lane, of a strip

    const TrellisRowsArgs& p;
    const int thread, lane, g, t, warp;
    uint8_t* const shared;
    uint8_t* const ring;
    float* const sums;   // [PLACES][OUTPUTS]
    float* const held;   // [2][OUTPUTS], of finished strips of a segment: a thread meets its own only
    const int group;
    int here;                                         // rows of x that exist
    const int tiles, blocks, number, whole, rest;     // whole: units of each block, of which the first `rest` have one more
    const int begin, count;                           // units of this block
    const uint8_t* words;
    int digits_row;                                   // the first row of the group, among those in digits
    GroupOf* const of;
    const int strips_each;                            // of a segment
    const int first_segment;
    int2* const first_place;
    // Where this lane's digits of the tile of this warp's next unit are. Tiles follow in turn, strip after strip.
    const bool owns;
    const uint32_t tile_digits, digits_step;
    uint8_t* const own;
    float2* const own_step;
    uint32_t* const parts;

    int strip, first;     // the strip of this block's next unit, and where it begins, counted in units from `begin`
    uint32_t digits_at;
    UnitDigits<C, FOURS> x = {};
    int at, stage = 0;    // this warp's next unit, and its place in the ring
    bool segment_begins = true;
    // What the end of a segment needs, requested before it is reached.
    int2 place;
    float2 steps[FOURS];
    __half scales[2][HALVES];
    float residual[EACH];

    DEVICE TrellisRows(const TrellisRowsArgs& p)
        : p(p), thread(threadIdx.x), lane(thread % 32), g(lane / 4), t(lane % 4),
          // Known to be the same for the whole warp: addresses that follow from it cost less.
          warp(__shfl_sync(~0u, thread / 32, 0)), shared(dynamic_shared()), ring(shared + warp * (STAGES * C::UNIT) + lane * 16),
          sums(reinterpret_cast<float*>(shared + WARPS * STAGES * C::UNIT)), held(sums + Sizes::PLACES * OUTPUTS), group(blockIdx.y),
          here(min(p.m - group * GROUP, GROUP)), tiles(p.tiles), blocks(gridDim.x), number(blockIdx.x), whole(p.strips * tiles / blocks),
          rest(p.strips * tiles % blocks), begin(number * whole + min(number, rest)), count(whole + (number < rest)),
          words(reinterpret_cast<const uint8_t*>(p.words)), digits_row(group * GROUP),
          of(reinterpret_cast<GroupOf*>(shared + Sizes::ROW - 16 - 256 - sizeof(GroupOf))), strips_each(p.epilogue == SILU && !C::PLAIN_GATE ? 2 : 1),
          first_segment(begin / tiles / strips_each), first_place(reinterpret_cast<int2*>(shared + Sizes::ROW - 16)), owns(GROUP == 4 && p.x),
          tile_digits(owns ? TILE * 4 : DIGITS<C::OCTAGON> * FOURS * 256), digits_step(WARPS % tiles * tile_digits), own(shared + Sizes::ROW), own_step(reinterpret_cast<float2*>(shared + Sizes::ROW - 8)),
          parts(p.parts + size_t(group) * blocks * (2 * strips_each * OUTPUTS) + thread), strip(begin / tiles), first(strip * tiles - begin),
          at(warp) {}

    // Of output i of this thread: the row of the strip, and the row of x.
    DEVICE int row_of(int i) const { return thread / 4 + i % HALVES * 64; }
    DEVICE int x_of(int i) const { return 4 * (i / HALVES) + t; }
    // Where a block leaves its sums of a segment, which began in that block or in an earlier one.
    DEVICE uint32_t* part_of(int block, bool begun) const { return parts + size_t(2 * block + begun) * (strips_each * OUTPUTS); }

    // Requests the words of a unit, counted from `begin`.
    DEVICE void request(uint8_t* to, int unit) const {
        if (unit < count) {
            const uint8_t* const from = words + size_t(unsigned(unit)) * C::UNIT;
#pragma unroll
            for (int i = 0; i < RUNS; i++) copy_async(to + i * 512, from + i * 512);
            if constexpr (C::WORDS % 4 == 2) copy_async<8>(to + RUNS * 512 - lane * 8, from + RUNS * 512 - lane * 8);
        }
        copy_commit();
    }

    DEVICE uint32_t digits_group() const { return GROUP != 4 ? group : owns ? 0 : digits_row / GROUP; }
    // Few rows of a mixture, gate and up, let nothing overtake the kernel that scores: down reads the scores before they have ended.
    DEVICE bool waits_first() const { return GROUP == 4 && p.scores && p.epilogue == (C::PLAIN_GATE ? STORE : SILU); }
    // The products of a row's experts are added up.
    DEVICE bool adds_experts() const { return GROUP == 4 && p.scores && p.epilogue == ADD; }

    // Finds the weights of this group and its rows: those of one expert, if it is a mixture.
    DEVICE void find(GroupOf& found, int& row_of_x) {
        found = {p.row_scales, p.scales, row_of_x, 0, 1.f};
        int expert = 0;
        if (GROUP == 4 && p.scores) {
            static_assert(GROUP != 4 || THREADS == MOST_EXPERTS);
            Chosen& chosen = *reinterpret_cast<Chosen*>(sums);
            const int row = group / p.per_token;
            found.nth = group - row * p.per_token;
            choose(chosen, p.scores + size_t(row) * p.experts, p.experts, p.per_token, p.normalized, p.shared);
            expert = chosen.expert[found.nth], found.weight = chosen.weight[found.nth];
            __syncthreads();   // sums will be where the choice was
            const bool down = p.epilogue == ADD;
            here = 1, row_of_x = down ? group : row, found.first_row = down ? row : group;
            digits_row = C::PLAIN_GATE ? group : row_of_x;
            if (p.experts_at.counts && p.epilogue == SILU && number == 0 && thread == 0) atomicAdd(p.experts_at.counts + expert, 1u);
        } else if (GROUP != 4 && p.sorted) {
            const int4 rows = __ldcg(p.sorted + group);
            expert = rows.x, found.first_row = rows.y, here = rows.z - rows.y;
        }
        if (p.experts_at.at) {
            const uint8_t* const place = reinterpret_cast<const uint8_t*>(__ldcg(reinterpret_cast<const unsigned long long*>(p.experts_at.at) + expert));
            const int half = p.epilogue != SILU;
            words = place + p.experts_at.codes[half], found.row_scales = reinterpret_cast<const __half*>(place + p.experts_at.meta[half]);
        } else {
            words += size_t(expert) * p.strips * tiles * C::UNIT, found.row_scales += size_t(expert) * p.strips * STRIP;
        }
        if constexpr (C::PLAIN_GATE) found.scales += size_t(expert) * tiles * TILE;
        words += size_t(begin) * C::UNIT + lane * 16;
        digits_at = (digits_group() * tiles + (warp - first) % tiles) * tile_digits + lane * 8 + (owns ? 0 : digits_row % GROUP * 64);
        if (thread == 0) *of = found;
    }

    // Requests the first words and digits, across the end of the predecessor.
    DEVICE void start() {
        if (waits_first()) wait_for_prerequisites();
        if (!p.holds_dependents) launch_dependents();
        GroupOf found;
        int row_of_x = group * GROUP;
        find(found, row_of_x);
        if (here <= 0) return;   // sorted rows: as many groups as there may be
#pragma unroll
        for (int i = 0; i < STAGES; i++) request(ring + i * C::UNIT, warp + i * WARPS);
        if (thread == 0 && count > 0) *first_place = __ldg(p.places + first_segment * strips_each);
        // What ends of strips will need comes from memory meanwhile.
        for (int s = first_segment * strips_each + thread; s * tiles < begin + count; s += THREADS) {
            prefetch_line(p.places + s);
            prefetch_line(found.row_scales + s * STRIP), prefetch_line(found.row_scales + s * STRIP + STRIP / 2);
        }
        uint32_t* const meeting = reinterpret_cast<uint32_t*>(first_place) - 64;
        const OwnRow<C, WARPS> own_row = {p,       found.scales, p.x + size_t(row_of_x) * (tiles * TILE), reinterpret_cast<float*>(own), meeting,
                                          tiles * TILE, warp,    lane};
        if (owns) own_row.factors();

        if (!waits_first()) wait_for_prerequisites();
        if (p.holds_dependents) launch_dependents();
        if (owns) own_row.digits(own_step);
#pragma unroll
        for (int i = 0; i < DIGITS<C::OCTAGON>; i++) x.load(i, p.digits, own, owns, digits_at, here);
    }

    // Adds the products of this warp's units before `stop`.
    DEVICE void multiply_units(Sums& c, int stop) {
#pragma unroll 1
        for (; at < stop; at += WARPS) {
            digits_at += digits_step;
            if (digits_at >= (digits_group() + 1) * tiles * tile_digits) digits_at -= tiles * tile_digits;
            copy_wait<STAGES - 1>();
            uint8_t* const from = ring + stage * C::UNIT;
            uint32_t unit[C::WORDS];
#pragma unroll
            for (int i = 0; i < RUNS; i++) {
                const uint4 w = *reinterpret_cast<const uint4*>(from + i * 512);
                unit[4 * i] = w.x, unit[4 * i + 1] = w.y, unit[4 * i + 2] = w.z, unit[4 * i + 3] = w.w;
            }
            if constexpr (C::WORDS % 4 == 2) {
                const uint2 w = *reinterpret_cast<const uint2*>(from + RUNS * 512 - lane * 8);
                unit[4 * RUNS] = w.x, unit[4 * RUNS + 1] = w.y;
            }
            request(from, at + STAGES * WARPS);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            multiply<C, FOURS>(c, unit, x, p, own, owns, digits_at, here);
        }
    }

    // Requests what the end of a segment needs; its place is known.
    DEVICE void request_end(int segment) {
#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            steps[j] = make_float2(0.f, 0.f);
            if (4 * j + t < here) steps[j] = owns ? *own_step : __ldcg(p.steps + digits_row + 4 * j + t);
        }
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                scales[s][h] = s < strips_each ? __ldg(of->row_scales + size_t(segment * strips_each + s) * STRIP + thread / 4 + 64 * h) : __half();
        if (p.epilogue == ADD) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const bool there = x_of(i) < here && row_of(i) < place.y && !(adds_experts() && of->nth < p.per_token - 1);
                residual[i] = there ? __ldcg(p.out + size_t(of->first_row + x_of(i)) * p.rows + place.x + row_of(i)) : 0.f;
            }
        }
    }

    // Does `act` to each of a lane's sums of a strip and its place, from `mine` on.
    template <class F>
    DEVICE static void each_sum(const Sums& c, float* mine, F&& act) {
#pragma unroll
        for (int j = 0; j < FOURS; j++)
#pragma unroll
            for (int m = 0; m < 8; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) act(mine[j * 512 + m * 64 + h * 32], C::joined(c[j][m][2 * h], c[j][m][2 * h + 1]));
    }

    // Adds up the warps' sums of a strip, which ends here or goes on in another block, and holds them. `whole_segment`: it is the
    // last strip of a segment of which this block has all. `later`: sums of an earlier strip may still be read.
    DEVICE void meet(const Sums& c, bool later, int segment, bool whole_segment) {
        float* const mine = sums + warp % Sizes::PLACES * OUTPUTS + lane;
        if (later) __syncthreads();
        if (warp >= Sizes::PLACES) each_sum(c, mine, [](float& to, float v) { to = v; });
        __syncthreads();
        if (warp < Sizes::PLACES) each_sum(c, mine, [](float& to, float v) { to += v; });
        if (whole_segment) {
            place = __ldg(p.places + segment * strips_each);
            request_end(segment);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int o = thread + i * THREADS;
            float v = sums[o];
#pragma unroll
            for (int w = 1; w < Sizes::PLACES; w++) v += sums[w * OUTPUTS + o];
            held[strip % strips_each * OUTPUTS + o] = v;
        }
    }

    // Leaves the sums of a segment that other blocks have parts of.
    DEVICE void leave(bool begun) const {
        uint32_t* const part = part_of(number, begun);
        for (int s = 0; s < strips_each; s++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (x_of(i) < here) store_relaxed(part + s * OUTPUTS + i * THREADS, ~__float_as_uint(held[s * OUTPUTS + thread + i * THREADS]));
    }

    // Adds up what blocks up to this one left of the first segment, which ends here.
    DEVICE void collect() {
        place = *first_place;
        request_end(first_segment);
        // The first block that has some of it.
        const int start = first_segment * strips_each * tiles, more = rest * (whole + 1);
        const int first_block = start < more ? start / (whole + 1) : rest + (start - more) / whole;
        constexpr int BATCH = GROUP == 4 ? 8 : 3;   // parts that are read at once
#pragma unroll 1
        for (int s = 0; s < strips_each; s++) {
            float totals[EACH] = {};
#pragma unroll 1
            for (int block = first_block; block <= number; block += BATCH) {
                uint32_t found[BATCH][EACH];
                auto each = [&](auto&& act) {
#pragma unroll
                    for (int b = 0; b < BATCH; b++)
#pragma unroll
                        for (int i = 0; i < EACH; i++)
                            if (block + b <= number && x_of(i) < here)
                                act(part_of(block + b, block + b == first_block) + s * OUTPUTS + i * THREADS, found[b][i], totals[i]);
                };
                bool missing;
                do {
                    missing = false;
                    each([&](uint32_t* from, uint32_t& v, float&) { v = load_relaxed(from); });
                    each([&](uint32_t*, uint32_t& v, float&) { missing |= v == 0; });
                } while (missing);
                each([&](uint32_t* from, uint32_t& v, float& total) { store_relaxed(from, 0), total += __uint_as_float(~v); });
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) held[s * OUTPUTS + thread + i * THREADS] = totals[i];
        }
    }

    // The products, where their sums were: what follows then needs nothing that must stay in registers.
    DEVICE void scale() {
        C::template finish<GROUP, WARPS>(held);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int h = i % HALVES, j = i / HALVES;
            const float mean = 127.5f * steps[j].y;
#pragma unroll
            for (int s = 0; s < 2; s++) {
                if (s == strips_each) break;
                float& v = held[s * OUTPUTS + thread + i * THREADS];
                v = __half2float(scales[s][h]) * C::UNIT_VALUE * (steps[j].x * v - mean);
                if (p.epilogue == ADD) v += residual[i];
            }
        }
    }

    // The greatest of a row of x in eight rows of the strip, whose value of output i this lane has: the lowest row of equals.
    DEVICE void keep_best(float2* bests, int i, float best, int best_row) const {
#pragma unroll
        for (int o = 4; o < 32; o *= 2) {
            const float other = __shfl_xor_sync(~0u, best, o);
            const int other_row = __shfl_xor_sync(~0u, best_row, o);
            if (other > best || (other == best && other_row < best_row)) best = other, best_row = other_row;
        }
        if (g == 0) bests[row_of(i) / 8 * GROUP + x_of(i)] = make_float2(best, __int_as_float(best_row));
    }

    // The sum of a row's experts of a strip, in the order of their numbers among the row's, in the block of the last; others leave theirs.
    DEVICE void sum_experts(int segment) const {
        const int others = p.per_token - 1;
        uint32_t* const left = p.parts + (size_t(of->first_row) * p.strips + segment) * others * STRIP + thread / 4;
        float v = t == 0 ? held[thread] : 0.f;
        if (of->nth < others) {
            if (t == 0) store_relaxed(left + of->nth * STRIP, ~__float_as_uint(v));
            return;
        }
#pragma unroll 1
        for (int from = t; from < others; from += 8) {
            const bool two = from + 4 < others;
            uint32_t a, b = ~0u;
            do {
                a = load_relaxed(left + from * STRIP);
                if (two) b = load_relaxed(left + (from + 4) * STRIP);
            } while (a == 0 || b == 0);
            store_relaxed(left + from * STRIP, 0), v += __uint_as_float(~a);
            if (two) store_relaxed(left + (from + 4) * STRIP, 0), v += __uint_as_float(~b);
        }
        v += __shfl_xor_sync(~0u, v, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        if (t == 0 && thread / 4 < place.y) p.out[size_t(of->first_row) * p.rows + place.x + thread / 4] = v;
    }

    DEVICE void store(int segment) const {
        float2* const bests = reinterpret_cast<float2*>(sums);   // [CHUNKS][GROUP]
        if (p.epilogue == HEAD) __syncthreads();   // sums have been read
#pragma unroll 1
        for (int i = 0; i < EACH; i++) {
            const int r = row_of(i), m = of->first_row + x_of(i), to = place.x + r;
            const bool there = x_of(i) < here && r < place.y;
            float v = held[thread + i * THREADS];
            if (p.epilogue == SILU) {
                float up = held[OUTPUTS + thread + i * THREADS];
                if constexpr (C::PLAIN_GATE) up = v, v = there ? __ldcg(p.gate + size_t(m) * (p.rows / 2) + to) : 0.f;
                v = __fdividef(v, 1.f + __expf(-v)) * up;
                if constexpr (GROUP == 4) v *= of->weight;
                if (there && p.out) p.out[size_t(m) * (p.rows / 2) + to] = v;
                if (there && p.half) p.half[size_t(m) * p.padded + operand_index(to)] = __float2half_rn(clamp_half(v));
            } else if (there) {
                p.out[size_t(m) * p.rows + to] = v;
            }
            if (p.epilogue == HEAD) keep_best(bests, i, there ? v : -INFINITY, to);
        }
        if (p.epilogue != HEAD) return;
        __syncthreads();
        if (thread >= here) return;
        float2 best = bests[thread];
        for (int i = 1; i < Sizes::CHUNKS; i++) {
            const float2 other = bests[i * GROUP + thread];
            if (other.x > best.x) best = other;
        }
        p.best[size_t(of->first_row + thread) * p.strips + segment] = best;
    }

    DEVICE void run() {
        start();
        if (here <= 0) return;
        bool owes = false;   // the end of a segment that began in an earlier block
#pragma unroll 1
        for (int done = 0; done < count || owes;) {
            int segment;
            if (done < count) {
                const int stop = min(first + tiles, count);
                Sums c = {};
                multiply_units(c, stop);

                const bool strip_ends = stop == first + tiles;
                const bool segment_ends = stop == count || (strip_ends && strip % strips_each == strips_each - 1);
                segment = strip / strips_each;
                if (segment_begins && strips_each == 2) {
#pragma unroll
                    for (int i = 0; i < EACH; i++) held[thread + i * THREADS] = held[OUTPUTS + thread + i * THREADS] = 0.f;
                }
                segment_begins = segment_ends;
                // Units of the segment in all blocks, and in this one.
                const int from = segment * strips_each * tiles, all = strips_each * tiles, some = begin + stop - max(from, begin);
                meet(c, done > 0, segment, segment_ends && some == all);
                done = stop, strip++, first += tiles;
                if (!segment_ends) continue;
                if (some < all) {
                    leave(begin <= from);
                    owes |= begin > from && begin + done == from + all;
                    continue;
                }
            } else {
                owes = false;
                segment = first_segment;
                collect();
            }
            scale();
            if (adds_experts()) sum_experts(segment);
            else store(segment);
        }
    }
};
