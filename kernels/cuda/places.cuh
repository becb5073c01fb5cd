// Where the experts of a mixture are that do not all have room on the GPU: some of them in its memory, and all in
// page-locked memory of the host, which kernels read over PCIe as they do their own. A table says where each one is read,
// so that what a kernel computes does not depend on it, and no step waits for the host.
#pragma once

#include "common.cuh"

struct ExpertPlaces {
    const uint64_t* at;   // [experts], addresses of what each expert has, or null: all are one stack in the GPU's memory
    uint32_t* counts;     // [experts]: how many rows have chosen each, for the host
    uint32_t codes[2];    // where in an expert the codes of gate and up begin, and those of down, in bytes
    uint32_t meta[2];     // and their scales and zero-points
};
