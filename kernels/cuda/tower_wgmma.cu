// `tower_attention` by products of warpgroups: each takes 64 queries of a head, and all of a block read the same ring of tiles
// of 64 keys and values. Only for sm_90a.
//
// Keys and values are in core matrices of 8 x 8, a tile's one after another (`TowerHeadsArgs::matrices`): of keys [dim / 8][key][8
// dims], of values [key / 8][dim][8 keys]. Grid (queries / 128, heads).
#include "tower.cuh"
#include "wgmma.cuh"

constexpr int TOWER_GROUPS = TOWER_QUERIES / 64, TOWER_STAGES = 4;

#if __CUDA_ARCH_FEAT_SM90_ALL

// DIM: of a head with its padding; of these, values have DIMS.
template <int DIM, int DIMS>
struct TowerWarpgroups {
    static constexpr int STEPS = DIM / 16, TILES = DIMS / 8, KEY_TILES = TOWER_KEYS / 8;
    static constexpr uint32_t KEYS = TOWER_KEYS * DIM * 2, VALUES = TOWER_KEYS * DIMS * 2, STAGE = KEYS + VALUES;

    // The right operand from `at` on: 8 rows are 128 bytes, 8 inputs further is `next`.
    static DEVICE uint64_t matrices(uint32_t at, uint32_t next) { return uint64_t(128 / 16) << 32 | uint64_t(next / 16) << 16 | (at >> 4 & 0x3fff); }

    static DEVICE void run(const TowerAttentionArgs& p) {
        uint8_t* const shared = dynamic_shared();
        uint64_t* const full = reinterpret_cast<uint64_t*>(shared + TOWER_STAGES * STAGE);
        uint64_t* const empty = full + TOWER_STAGES;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
        const int query0 = p.first + blockIdx.x * 64 * TOWER_GROUPS + warp * 16;
        const int tiles = (p.m + TOWER_KEYS - 1) / TOWER_KEYS;
        const size_t kind = size_t(p.count) * p.patches * DIM;
        const uint8_t* const keys = reinterpret_cast<const uint8_t*>(p.heads + kind + size_t(head) * p.patches * DIM);
        const uint8_t* const values = reinterpret_cast<const uint8_t*>(p.heads + 2 * kind + size_t(head) * p.patches * DIM);
        if (threadIdx.x == 0) {
            for (int i = 0; i < TOWER_STAGES; i++) barrier_init(full + i, 1), barrier_init(empty + i, 4 * TOWER_GROUPS);
            barrier_fence();
        }
        __syncthreads();
        auto request = [&](int tile) {
            const int s = tile % TOWER_STAGES;
            barrier_expect(full + s, STAGE);
            copy_bulk(shared + s * STAGE, keys + size_t(tile) * KEYS, KEYS, full + s);
            copy_bulk(shared + s * STAGE + KEYS, values + size_t(tile) * VALUES, VALUES, full + s);
        };
        if (threadIdx.x == 0)
            for (int i = 0; i < min(tiles, 2); i++) request(i);
        uint32_t q[STEPS][4];
        float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const __half* const from = p.heads + (size_t(head) * p.patches + min(query0 + r * 8 + g, p.m - 1)) * DIM + 2 * t;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                q[k][r] = *reinterpret_cast<const uint32_t*>(from + 16 * k);
                q[k][r + 2] = *reinterpret_cast<const uint32_t*>(from + 16 * k + 8);
            }
        }
        float out[TILES * 4] = {};
        uint32_t w[KEY_TILES][2];
        for (int tile = 0; tile < tiles; tile++) {
            float s[32];
            const int stage = tile % TOWER_STAGES;
            if (warp == 0 && tile + 2 < tiles) {
                if (tile >= 2) barrier_wait(empty + (tile + 2) % TOWER_STAGES, (tile - 2) / TOWER_STAGES & 1);
                if (elect()) request(tile + 2);
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < 32; i++) s[i] = 0.f;
            // Queries change by nothing that ptxas knows: of 12.9 and 13.0, it else forgets that the next tile needs them, too, and
            // gives their registers to weights (of heads of 64 values).
#pragma unroll
            for (int k = 0; k < STEPS; k++) asm volatile("xor.b32 %0, %0, %1;" : "+r"(q[k][0]) : "r"(p.m >> 31));
            barrier_wait(full + stage, tile / TOWER_STAGES & 1);
            const uint32_t keys_at = shared_address(shared) + stage * STAGE;
            products_begin();
#pragma unroll
            for (int k = 0; k < STEPS; k++) Wgmma<64>::multiply(s, q[k], matrices(keys_at + k * 2 * 16 * TOWER_KEYS, 16 * TOWER_KEYS));
            products_commit();
            products_wait<0>();
            if (const int behind = p.m - tile * TOWER_KEYS; behind < TOWER_KEYS) {
#pragma unroll
                for (int i = 0; i < 32; i++)
                    if (8 * (i / 4) + 2 * t + i % 2 >= behind) s[i] = -INFINITY;
            }
            float shrink[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float peak = top[r];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) peak = fmaxf(peak, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
                shrink[r] = quick_exp2(top[r] - peak);
                top[r] = peak;
                float sum = 0.f;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    const float x = quick_exp2(s[4 * n + 2 * r] - peak), y = quick_exp2(s[4 * n + 2 * r + 1] - peak);
                    sum += x + y;
                    w[n][r] = half2_bits(__float22half2_rn(make_float2(x, y)));
                }
                total[r] = total[r] * shrink[r] + sum;
            }
            if (__any_sync(~0u, shrink[0] < 1.f || shrink[1] < 1.f)) {
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    out[4 * n] *= shrink[0], out[4 * n + 1] *= shrink[0];
                    out[4 * n + 2] *= shrink[1], out[4 * n + 3] *= shrink[1];
                }
            }
            products_begin();
            const uint32_t at = keys_at + KEYS;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint32_t a[4] = {w[2 * k][0], w[2 * k][1], w[2 * k + 1][0], w[2 * k + 1][1]};
                Wgmma<DIMS>::multiply(out, a, matrices(at + k * 2 * 16 * DIMS, 16 * DIMS));
            }
            products_commit();
            products_wait<0>();
            // Each warp's own products have ended, not those of its group.
            barrier_arrive_at(shared_address(empty + stage), lane == 0);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = total[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int row = query0 + r * 8 + g;
            if (row >= p.m) continue;
            const float inverse = 1.f / sum;
            __half* const to = p.out + size_t(row) * p.padded;
#pragma unroll
            for (int n = 0; n < TILES; n++)
                if (8 * n + 2 * t < p.dim)
                    *reinterpret_cast<__half2*>(to + operand_index(head * p.dim + 8 * n + 2 * t)) = __float22half2_rn(make_float2(out[4 * n + 2 * r] * inverse, out[4 * n + 2 * r + 1] * inverse));
            if (head < p.count - 1) continue;
            for (int k = p.count * p.dim + 4 * t; k < p.padded; k += 16) store_four(to, k, make_float4(0.f, 0.f, 0.f, 0.f));
        }
    }
};

extern "C" __global__ __launch_bounds__(TOWER_GROUPS * 128, 2) void tower_warpgroups_64(const __grid_constant__ TowerAttentionArgs p) { TowerWarpgroups<64, 64>::run(p); }
extern "C" __global__ __launch_bounds__(TOWER_GROUPS * 128, 2) void tower_warpgroups_80(const __grid_constant__ TowerAttentionArgs p) { TowerWarpgroups<80, 72>::run(p); }

#endif
