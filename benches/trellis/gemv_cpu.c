// Weights a cycle that one core decodes and multiplies from its L2 cache, with AVX-512 VNNI and VBMI (cc -O3 -march=native).
//
// A lane of 32 bits is a row: 16 rows side by side, words of a row's sequence one after another, the first bit the
// highest of a word. x is one digit of 8 bits, broadcast. Each kernel is compared with the same sums, one by one.
#define _POSIX_C_SOURCE 199309L
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <x86intrin.h>

enum { WORDS = 12 * 512 }; // words of a row: sequences of 12 or 16 words; 16 rows take 393 KB
static const uint32_t MULTIPLIER = 0xAD1B72DB;
static __m512i words[WORDS];
static int32_t x[WORDS * 8]; // four bytes of each state, or of each four weights
static uint8_t table[256];

#define DOT(acc, u8, at) acc = _mm512_dpbusd_epi32(acc, u8, _mm512_set1_epi32(x[at]))
#define HASH(state) _mm512_mullo_epi32(state, multiplier)
#define LOW(v) _mm512_and_si512(v, low)
#define PROLOGUE \
    const __m512i multiplier = _mm512_set1_epi32((int)MULTIPLIER), low = _mm512_set1_epi32(0xFFFF); \
    (void)multiplier, (void)low; \
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a
#define SUM _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d))

static __m512i int4(void) { // eight weights a word
    PROLOGUE;
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int i = 0; i < WORDS; i += 2) {
        DOT(a, _mm512_and_si512(words[i], nibbles), 2 * i);
        DOT(b, _mm512_and_si512(_mm512_srli_epi32(words[i], 4), nibbles), 2 * i + 1);
        DOT(c, _mm512_and_si512(words[i + 1], nibbles), 2 * i + 2);
        DOT(d, _mm512_and_si512(_mm512_srli_epi32(words[i + 1], 4), nibbles), 2 * i + 3);
    }
    return SUM;
}

static __m512i octagon4(void) { // four states a word, eight weights
    PROLOGUE;
    const __m512i two = _mm512_set1_epi32(0x80800201); // bytes 1 and 2, then zeros
    const __m512i shuffle = _mm512_add_epi8(two, _mm512_broadcast_i32x4(_mm_set_epi8(0, 0, 12, 12, 0, 0, 8, 8, 0, 0, 4, 4, 0, 0, 0, 0)));
    for (int s = 0; s < WORDS; s += 16) {
        __m512i before = words[s + 15];
        for (int i = s; i < s + 16; i++) {
            const __m512i w = words[i];
            DOT(a, HASH(LOW(_mm512_shldi_epi32(before, w, 8))), 4 * i);
            DOT(b, HASH(_mm512_srli_epi32(w, 16)), 4 * i + 1);
            DOT(c, HASH(_mm512_shuffle_epi8(w, shuffle)), 4 * i + 2);
            DOT(d, HASH(LOW(w)), 4 * i + 3);
            before = w;
        }
    }
    return SUM;
}

// States that end at bit `END` of three words (96 bits, cyclic in `p`, the word before).
#define STATE(END) \
    LOW((END) % 32 >= 16 ? _mm512_srli_epi32(w[(END) / 32], 32 - (END) % 32) : (END) % 32 == 0 ? w[(END) / 32 - 1] \
        : _mm512_shldi_epi32((END) < 32 ? p : w[(END) / 32 - 1], w[(END) / 32], (END) % 32))

static __m512i octagon3(void) { // sixteen states in three words, 32 weights
    PROLOGUE;
    for (int s = 0, k = 0; s < WORDS; s += 12) {
        __m512i p = words[s + 11];
        for (int i = s; i < s + 12; i += 3, k += 16) {
            const __m512i *w = words + i;
#define FOUR(N) DOT(a, HASH(STATE(6 * N + 6)), k + N); DOT(b, HASH(STATE(6 * N + 12)), k + N + 1); \
                DOT(c, HASH(STATE(6 * N + 18)), k + N + 2); DOT(d, HASH(STATE(6 * N + 24)), k + N + 3)
            FOUR(0); FOUR(4); FOUR(8); FOUR(12);
#undef FOUR
            p = w[2];
        }
    }
    return SUM;
}

static __m512i bytes4_4(void) { // eight states a word, eight weights
    PROLOGUE;
    for (int s = 0; s < WORDS; s += 16) {
        __m512i p = words[s + 15];
        for (int i = s; i < s + 16; i++) {
            const __m512i *w = words + i;
            DOT(a, HASH(STATE(4)), 8 * i), DOT(b, HASH(STATE(8)), 8 * i + 1), DOT(c, HASH(STATE(12)), 8 * i + 2);
            DOT(d, HASH(_mm512_srli_epi32(*w, 16)), 8 * i + 3), DOT(a, HASH(STATE(20)), 8 * i + 4), DOT(b, HASH(STATE(24)), 8 * i + 5);
            DOT(c, HASH(STATE(28)), 8 * i + 6), DOT(d, HASH(STATE(32)), 8 * i + 7);
            p = *w;
        }
    }
    return SUM;
}

static __m512i looked_up(__m512i index, const __m512i *t) {
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), _mm512_permutex2var_epi8(t[0], index, t[1]), _mm512_permutex2var_epi8(t[2], index, t[3]));
}

static __m512i table4(void) { // states of 8 bits: the bytes, and the bytes four bits on
    PROLOGUE;
    __m512i t[4];
    memcpy(t, table, 256);
    for (int s = 0; s < WORDS; s += 16) {
        __m512i p = words[s + 15];
        for (int i = s; i < s + 16; i++) {
            DOT(a, looked_up(words[i], t), 2 * i);
            DOT(b, looked_up(_mm512_shldi_epi32(p, words[i], 28), t), 2 * i + 1);
            p = words[i];
        }
    }
    return SUM;
}

// The sums of row 0, one by one.
static uint32_t word(int i) { return (uint32_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(words[i])); }

static int32_t dot(uint32_t u8, int32_t s8) {
    int32_t sum = 0;
    for (int k = 0; k < 4; k++) sum += (int32_t)(u8 >> 8 * k & 255) * (int8_t)(s8 >> 8 * k);
    return sum;
}

static int32_t plain(int kind, int step, int sequence) { // kind 0: INT4, 1: products, 2: table
    int32_t sum = 0;
    for (int i = 0; kind != 1 && i < WORDS; i++) {
        uint32_t p = word(i % sequence ? i - 1 : i + sequence - 1), w = word(i), one = w & 0x0F0F0F0F, two = w >> 4 & 0x0F0F0F0F;
        if (kind == 2) {
            uint32_t shifted = p << 28 | w >> 4;
            one = two = 0;
            for (int k = 0; k < 32; k += 8) one |= (uint32_t)table[w >> k & 255] << k, two |= (uint32_t)table[shifted >> k & 255] << k;
        }
        sum += dot(one, x[2 * i]) + dot(two, x[2 * i + 1]);
    }
    for (int s = 0, k = 0; kind == 1 && s < WORDS; s += sequence)
        for (int end = step; end <= 32 * sequence; end += step, k++) {
            uint32_t state = 0;
            for (int bit = end - 16; bit < end; bit++) {
                const int at = (bit + 32 * sequence) % (32 * sequence);
                state = state << 1 | (word(s + at / 32) >> (31 - at % 32) & 1);
            }
            sum += dot(state * MULTIPLIER, x[k]);
        }
    return sum;
}

int main(void) {
    srand(1);
    for (int i = 0; i < WORDS * 16; i++) ((uint32_t *)words)[i] = (uint32_t)rand() << 17 ^ (uint32_t)rand() << 5 ^ (uint32_t)rand();
    for (int i = 0; i < WORDS * 8; i++) x[i] = rand() << 16 ^ rand();
    for (int i = 0; i < 256; i++) table[i] = rand();
    const struct { const char *name; __m512i (*run)(void); int bits, kind, step, sequence; } kernels[] = {
        {"int4", int4, 4, 0, 0, 16}, {"octagon, 4 bits", octagon4, 4, 1, 8, 16}, {"octagon, 3 bits", octagon3, 3, 1, 6, 12},
        {"bytes4, 4 bits", bytes4_4, 4, 1, 4, 16}, {"table of 256, 4 bits", table4, 4, 2, 4, 16},
    };
    puts("kernel,bits,weights_a_second_e9,weights_a_reference_cycle,gb_a_second");
    for (int k = 0; k < 5; k++) {
        const __m512i sums = kernels[k].run();
        if (_mm_cvtsi128_si32(_mm512_castsi512_si128(sums)) != plain(kernels[k].kind, kernels[k].step, kernels[k].sequence)) return printf("%s is wrong\n", kernels[k].name), 1;
        double best = 1e9, cycles = 1e18;
        volatile int sink;
        for (int round = 0; round < 400; round++) {
            struct timespec from, to;
            clock_gettime(CLOCK_MONOTONIC, &from);
            const uint64_t begin = __rdtsc();
            for (int i = 0; i < 4; i++) sink = _mm_cvtsi128_si32(_mm512_castsi512_si128(kernels[k].run()));
            const uint64_t end = __rdtsc();
            clock_gettime(CLOCK_MONOTONIC, &to);
            const double seconds = (to.tv_sec - from.tv_sec + 1e-9 * (to.tv_nsec - from.tv_nsec)) / 4;
            if (seconds < best) best = seconds;
            if ((end - begin) / 4.0 < cycles) cycles = (end - begin) / 4.0;
        }
        (void)sink;
        const double weights = 16.0 * 32 * WORDS / kernels[k].bits;
        printf("%s,%d,%.1f,%.1f,%.1f\n", kernels[k].name, kernels[k].bits, weights / best / 1e9, weights / cycles, weights * kernels[k].bits / 8 / best / 1e9);
    }
}
