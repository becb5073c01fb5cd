// A small value from the host to device memory, in order with the stream's other work: it travels
// in the launch's arguments, so that the host need not keep it.
#include "common.cuh"

constexpr int MOST_WORDS = 80;

struct PutArgs {
    uint32_t* to;
    int words;
    uint32_t value[MOST_WORDS];
};

extern "C" __global__ __launch_bounds__(MOST_WORDS) void put(const __grid_constant__ PutArgs p) {
    if (threadIdx.x < p.words) p.to[threadIdx.x] = p.value[threadIdx.x];
}
