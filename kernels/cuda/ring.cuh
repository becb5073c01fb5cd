// How weights stream into shared memory: a ring of stages private to a warp, filled by bulk copies
// (before sm_90 by asynchronous ones).
#pragma once

#include "common.cuh"

constexpr int MOST_DEPTH = 8;

// A warp's ring of stages: CODES bytes of codes, META of scales and zero-points. A stage may be
// filled again LAG stages after it has been read.
template <int CODES, int META, int LAG = 0>
struct Ring {
    static constexpr int STAGE = CODES + META;
    static constexpr int STAGE_WORDS = STAGE / 16;
    const uint4* stages;
    const int depth;
    // Addresses in shared memory: of the ring, and of the stages that are filled and read next.
    const uint32_t first, end;
    uint32_t write, read;
#if __CUDA_ARCH__ >= 900
    // Of barriers.
    const uint32_t full;
    uint32_t write_full, read_full, parity = 0;
#endif

    DEVICE Ring(uint4* stages, uint64_t* barriers, int depth)
        : stages(stages), depth(depth), first(keep(shared_address(stages))), end(first + depth * STAGE), write(first), read(first)
#if __CUDA_ARCH__ >= 900
          ,
          full(keep(shared_address(barriers))), write_full(full), read_full(full)
#endif
    {
#if __CUDA_ARCH__ >= 900
        if (depth > 0) {
            if (threadIdx.x % 32 < depth) barrier_init(barriers + threadIdx.x % 32);
            barrier_fence();
            __syncwarp();
        }
#endif
    }

    // Requests the next stage, at most CODES and META bytes; with nothing left to request, nothing.
    // `meta_bytes` may be 0. The warp is converged.
    DEVICE void request(const uint8_t* codes, uint32_t code_bytes, const uint8_t* meta, uint32_t meta_bytes, bool any) {
#if __CUDA_ARCH__ >= 900
        if (!any) return;
        if (elect()) {
            barrier_expect(write_full, code_bytes + meta_bytes);
            copy_bulk_stream(write, codes, code_bytes, write_full);
            if (META > 0 && meta_bytes > 0) copy_bulk_stream(write + CODES, meta, meta_bytes, write_full);
        }
        write_full += 8;
#else
        const uint32_t lane = threadIdx.x % 32;
        uint8_t* const to = reinterpret_cast<uint8_t*>(const_cast<uint4*>(stages)) + (write - first);
        if (any) {
            for (uint32_t i = lane * 16; i < code_bytes; i += 512) copy_async(to + i, codes + i);
            for (uint32_t i = lane * 16; i < meta_bytes; i += 512) copy_async(to + CODES + i, meta + i);
        }
        copy_commit();
        if (!any) return;
#endif
        write += STAGE;
        if (write == end) {
            write = first;
#if __CUDA_ARCH__ >= 900
            write_full = full;
#endif
        }
    }

    // The oldest stage, when it is there.
    DEVICE const uint4* wait() {
        const uint32_t stage = wait_at();
        return stages + (stage - first) / 16;
    }

    // Its address.
    DEVICE uint32_t wait_at() {
        const uint32_t stage = read;
#if __CUDA_ARCH__ >= 900
        barrier_wait(read_full, parity);
        read_full += 8;
#else
        // Copies that may still be under way: those of the stages behind this one.
        switch (depth - LAG) {
            case 0: case 1: copy_wait<0>(); break;
            case 2: copy_wait<1>(); break;
            case 3: copy_wait<2>(); break;
            default: copy_wait<3>(); break;
        }
        __syncwarp();
#endif
        read += STAGE;
        if (read == end) {
            read = first;
#if __CUDA_ARCH__ >= 900
            read_full = full, parity ^= 1;
#endif
        }
        return stage;
    }
};
