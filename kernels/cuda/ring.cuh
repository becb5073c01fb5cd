// How weights stream into shared memory: a ring of stages private to a warp, filled by bulk copies
// (before sm_90 by asynchronous ones).
#pragma once

#include "common.cuh"

constexpr int MOST_DEPTH = 8;
// Stages begin at multiples of so many bytes. At multiples of 128, bulk copies end sooner; with little shared memory, fewer
// stages would fit.
#if __CUDA_ARCH__ >= 900 && !SMALL_BLOCKS
constexpr int STAGE_ALIGN = 128;
#else
constexpr int STAGE_ALIGN = 16;
#endif

// A warp's ring of stages: CODES bytes of codes, META of scales and zero-points. A stage may be
// filled again LAG stages after it has been read.
template <int CODES, int META, int LAG = 0>
struct Ring {
    static constexpr int STAGE_WORDS = (CODES + (META + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN) / 16;
    uint4* stages;
    int depth;
    uint32_t at;
    int write = 0, read = 0;
#if __CUDA_ARCH__ >= 900
    uint64_t* full;
    uint32_t parity = 0;
#endif

    DEVICE Ring(uint4* stages, uint64_t* barriers, int depth) : stages(stages), depth(depth), at(keep(shared_address(stages))) {
#if __CUDA_ARCH__ >= 900
        full = barriers;
        if (depth > 0) {
            if (threadIdx.x % 32 < depth) barrier_init(full + threadIdx.x % 32);
            barrier_fence();
            __syncwarp();
        }
#endif
    }

    // Requests the next stage; with nothing left to request, nothing. `meta_bytes` may be 0.
    DEVICE void request(const uint8_t* codes, const uint8_t* meta, int meta_bytes, bool any) {
        const int lane = threadIdx.x % 32;
        uint4* to = stages + write * STAGE_WORDS;
#if __CUDA_ARCH__ >= 900
        if (any && lane == 0) {
            barrier_expect(full + write, CODES + meta_bytes);
            copy_bulk_stream(to, codes, CODES, full + write);
            if (META > 0 && meta_bytes > 0) copy_bulk_stream(to + CODES / 16, meta, meta_bytes, full + write);
        }
#else
        if (any) {
#pragma unroll
            for (int j = 0; j < CODES / 512; j++) copy_async(to + j * 32 + lane, codes + (j * 32 + lane) * 16);
            if (lane < meta_bytes / 16) copy_async(to + CODES / 16 + lane, meta + lane * 16);
        }
        copy_commit();
#endif
        if (any) write = write + 1 == depth ? 0 : write + 1;
    }

    // The oldest stage, when it is there.
    DEVICE const uint4* wait() {
        const uint4* stage = stages + read * STAGE_WORDS;
        next();
        return stage;
    }

    // Its address.
    DEVICE uint32_t wait_at() {
        const uint32_t stage = at + read * (STAGE_WORDS * 16);
        next();
        return stage;
    }

    DEVICE void next() {
#if __CUDA_ARCH__ >= 900
        barrier_wait(full + read, parity);
        if (++read == depth) read = 0, parity ^= 1;
#else
        // Copies that may still be under way: those of the stages behind this one.
        switch (depth - LAG) {
            case 0: case 1: copy_wait<0>(); break;
            case 2: copy_wait<1>(); break;
            case 3: copy_wait<2>(); break;
            default: copy_wait<3>(); break;
        }
        if (++read == depth) read = 0;
        __syncwarp();
#endif
    }
};
