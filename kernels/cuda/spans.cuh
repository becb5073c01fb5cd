// The sequences of a pass of a model with several streams, and what of them is also written to another place.
#pragma once

#include "rows.cuh"

// Rows of one sequence. They lie in device memory, so that one CUDA graph serves every step.
struct StreamSpan {
    int row;        // the first
    int count;
    int position;   // of the first
    int slot;
    int mark;       // what is kept of the sequence is also written to `place` as it is after so many rows; 0: it is not
    int place;
};

// What sequences keep beside pages and states of recurrences: [places][words], of which a layer has some.
struct KeptRows {
    float* values;   // those of the layer at place 0
    int words;       // of a place, in all layers

    DEVICE float* at(int place) const { return values + size_t(place) * words; }
};
