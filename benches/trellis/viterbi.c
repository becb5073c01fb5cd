// The best path of each sequence through a bitshift trellis, on a CPU with AVX-512 (cc -O3 -march=native -shared -fPIC).
//
// A state is the last L bits read, the newest lowest; a step reads B bits and gives V values. States with the same low
// L - B bits ("tails") have the same successors, so only the least cost of each tail is kept: a step looks at all 2^L
// states, each of which stands for one (tail before, bits read), and keeps for every new tail the best state.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, SIDE = 4 }; // states in a vector; sequences side by side, which share the loads of values

typedef struct {
    int state_bits, step_bits, width, steps;
    const float *values; // [tails / 16][2^B][V][16]: values of state h * tails + tail
} Trellis;

// One pass over `steps` steps beginning at step `first` (cyclically); start: tails before the first step, or null where
// any may be. Leaves costs in cost[SIDE][tails + 16] and the high bits of the best states in back[steps][SIDE][tails].
static void forward(const Trellis *t, const float *x, int first, const int *start, float *cost, float *next, uint16_t *back) {
    const int tails = 1 << (t->state_bits - t->step_bits), branches = 1 << t->step_bits, row = tails + LANES;
    for (int q = 0; q < SIDE; q++)
        for (int j = 0; j < row; j++) cost[q * row + j] = !start || start[q] == j ? 0.0f : 1e30f;
    __m512i spread = _mm512_srli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), t->step_bits);
    if (t->step_bits >= 4) spread = _mm512_setzero_si512();
    for (int n = 0; n < t->steps; n++) {
        const int at = (first + n) % t->steps;
        for (int j = 0; j < tails; j += LANES) {
            const float *v = t->values + (size_t)j * branches * t->width;
            __m512 best[SIDE];
            __m512i arg[SIDE];
            for (int q = 0; q < SIDE; q++) best[q] = _mm512_set1_ps(INFINITY), arg[q] = _mm512_setzero_si512();
            for (int h = 0; h < branches; h++, v += LANES * t->width) {
                const int from = (h * tails + j) >> t->step_bits;
                for (int q = 0; q < SIDE; q++) {
                    __m512 c = _mm512_permutexvar_ps(spread, _mm512_loadu_ps(cost + q * row + from));
                    for (int k = 0; k < t->width; k++) {
                        const float target = x[((size_t)q * t->steps + at) * t->width + k];
                        __m512 d = _mm512_sub_ps(_mm512_set1_ps(target), _mm512_loadu_ps(v + k * LANES));
                        c = _mm512_fmadd_ps(d, d, c);
                    }
                    __mmask16 less = _mm512_cmp_ps_mask(c, best[q], _CMP_LT_OQ);
                    best[q] = _mm512_mask_mov_ps(best[q], less, c);
                    arg[q] = _mm512_mask_mov_epi32(arg[q], less, _mm512_set1_epi32(h));
                }
            }
            for (int q = 0; q < SIDE; q++) {
                _mm512_storeu_ps(next + q * row + j, best[q]);
                _mm256_storeu_si256((__m256i *)(back + ((size_t)n * SIDE + q) * tails + j), _mm512_cvtepi32_epi16(arg[q]));
            }
        }
        float *swap = cost;
        cost = next;
        next = swap;
    }
    if (t->steps % 2) memcpy(next, cost, sizeof(float) * SIDE * row); // the caller reads the first array
}

// x [count][steps][V], count a multiple of 4; states [count][steps]. cyclic: bits before a sequence are its last.
void search(int state_bits, int step_bits, int width, const float *values, int steps, int count, int cyclic, const float *x, uint32_t *states) {
    const Trellis t = {state_bits, step_bits, width, steps, values};
    const int drop = state_bits - step_bits, tails = 1 << drop, row = tails + LANES;
    float *cost = malloc(sizeof(float) * SIDE * row), *next = malloc(sizeof(float) * SIDE * row);
    uint16_t *back = malloc(sizeof(uint16_t) * SIDE * tails * steps);
    for (int s = 0; s < count; s += SIDE) {
        const float *part = x + (size_t)s * steps * width;
        // A first pass from the middle to the middle settles the tail at the seam, a second one keeps to it.
        for (int pass = !cyclic, seam[SIDE]; pass < 2; pass++) {
            const int first = pass ? 0 : steps / 2;
            forward(&t, part, first, pass && cyclic ? seam : NULL, cost, next, back);
            for (int q = 0; q < SIDE; q++) {
                int tail = 0;
                for (int j = 1; j < tails; j++)
                    if (cost[q * row + j] < cost[q * row + tail]) tail = j;
                if (pass && cyclic) tail = seam[q];
                for (int n = steps - 1; n >= 0; n--) {
                    const uint32_t state = (uint32_t)back[((size_t)n * SIDE + q) * tails + tail] << drop | tail;
                    if (pass) states[(size_t)(s + q) * steps + n] = state;
                    else if ((first + n) % steps == steps - 1) seam[q] = tail;
                    tail = state >> step_bits;
                }
            }
        }
    }
    free(cost), free(next), free(back);
}
