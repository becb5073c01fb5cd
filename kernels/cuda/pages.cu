// Page tables on the device, and copies of pages.
#include "rows.cuh"

// An entry of the tables.
struct PageEntry {
    uint32_t at;     // of all tables' entries
    uint32_t page;
};

constexpr int MOST_ENTRIES = 256;

// By value: the host need not keep them, and the stream orders them with the steps.
struct SetPagesArgs {
    uint32_t* tables;
    int count;
    PageEntry entries[MOST_ENTRIES];
};

extern "C" __global__ __launch_bounds__(MOST_ENTRIES) void set_pages(const __grid_constant__ SetPagesArgs p) {
    if (threadIdx.x < p.count) p.tables[p.entries[threadIdx.x].at] = p.entries[threadIdx.x].page;
}

// Keys, values, scales and keys of blocks of one page to another, in all layers: parts of `words` words of 16 bytes
// a page. Grid (parts of a page, layers). Bytes: twice a page of all layers.
struct CopyPageArgs {
    uint4* part[5];   // keys, values, their scales, keys of an indexer's blocks (null without)
    int words[5];     // of a page of one layer
    int pages;        // of a layer
    uint32_t from;
    uint32_t to;
};

extern "C" __global__ __launch_bounds__(256) void copy_page(const __grid_constant__ CopyPageArgs p) {
    const size_t layer = size_t(blockIdx.y) * p.pages;
    for (int i = 0; i < 5; i++) {
        if (!p.part[i]) continue;
        const uint4* const from = p.part[i] + (layer + p.from) * p.words[i];
        uint4* const to = p.part[i] + (layer + p.to) * p.words[i];
        for (int w = blockIdx.x * 256 + threadIdx.x; w < p.words[i]; w += gridDim.x * 256) to[w] = from[w];
    }
}
