// What choosing a token on the device needs: how, the order of logits, the lists that `candidates`
// makes and `advance` reads, and the numbers drawn.
#pragma once

#include "common.cuh"

// Why logits are not looked at as they are: bits of `Sampling::adjusts`.
constexpr int BIASED = 1;      // the row's biases are added
constexpr int PENALIZED = 2;   // tokens seen are penalized, and counted
constexpr int MASKED = 4;      // tokens whose bit is not set in the row's mask are excluded

// A row's parameters for choosing tokens.
struct Sampling {
    float temperature;      // Divides the logits; 0 takes the best token.
    float top_p;            // Keeps the fewest best tokens that have this probability together; 1 keeps all.
    float min_p;            // Drops tokens below this share of the best one's probability.
    float repetition;       // Divides positive and multiplies negative logits of tokens seen before.
    float frequency;        // Subtracted from a token's logit once per occurrence in the answer.
    float presence;         // Subtracted once from logits of tokens in the answer.
    int top_k;              // Keeps this many best tokens; 0 keeps all.
    int adjusts;            // Changes to the logits: a sum of `BIASED`, `PENALIZED` and `MASKED`.
    int logprobs;           // 0: no log-probabilities; n > 0: those of the chosen token and of the n - 1 best tokens, at most
                            // `MOST_LOGPROBS`.
    uint32_t seed[2];       // Key of the random numbers, low word first.
    uint32_t stream[2];     // Stream of the random numbers, low word first.
    uint32_t position[2];   // Number of tokens before the first sampled one, low word first.
};

// Ranges that `candidates` cuts a vocabulary into.
constexpr int RANGES = 128;
constexpr int RANGE_LIST = 32;        // tokens in a range's list
constexpr int RANGE_THREADS = 256;    // of a range
constexpr int RANGE_PER_THREAD = 8;   // tokens: so up to 262,144 of all

// The best of a range of tokens.
struct Range {
    float peak;
    float sum;            // of exp((x - peak) / temperature)
    uint32_t threshold;   // tokens not listed are below it; 0: all are listed
    int count;            // of the list; -1: a logit is not a number
    unsigned long long list[RANGE_LIST];
};

// The best tokens of all, where few matter: those that reach the `shortlist_rank`-th greatest of
// the best of the head's blocks. So at least as many do, and rarely many more.
constexpr int SHORT_LIST = 128;
constexpr int MOST_RANK = 64;
// Where top-k does not say how many matter: as many as most nuclei have.
constexpr int NUCLEUS_RANK = 48;

struct Shortlist {
    int count;         // that reach the threshold; those past SHORT_LIST are not listed. 0 between steps
    int bad;           // a logit is not a number. 0 between steps
    uint32_t threshold;
    int pad;
    unsigned long long list[SHORT_LIST];
};

DEVICE bool limits_k(const Sampling& how, int vocab) { return how.top_k > 0 && how.top_k < vocab; }
DEVICE bool is_greedy(const Sampling& how) { return how.temperature == 0.f || how.top_k == 1; }
DEVICE bool is_filtered(const Sampling& how, int vocab) {
    return limits_k(how, vocab) || how.top_p < 1.f || how.min_p > 0.f;
}

// 0 if there is no short list: nothing is drawn, all tokens or too many matter, or what is best is
// not what the head found.
DEVICE int shortlist_rank(const Sampling& how, int vocab, int blocks) {
    if (is_greedy(how) || how.adjusts || !is_filtered(how, vocab)) return 0;
    const int rank = limits_k(how, vocab) ? how.top_k : NUCLEUS_RANK;
    return rank <= MOST_RANK && rank <= blocks ? rank : 0;
}

// Order of floats as integers.
DEVICE uint32_t ordered(float f) {
    const uint32_t b = __float_as_uint(f);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
DEVICE float unordered(uint32_t k) {
    return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}
DEVICE unsigned long long key_of(float logit, int id) {
    return static_cast<unsigned long long>(ordered(logit)) << 32 | uint32_t(~id);
}

// Key of a logit that excludes its token: minus infinity's.
constexpr uint32_t EXCLUDED = 0x007fffff;

// Philox4x32-10; the first two words.
DEVICE void philox(const uint32_t (&seed)[2], unsigned long long counter, const uint32_t (&stream)[2], uint32_t& w0, uint32_t& w1) {
    uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = stream[0], c3 = stream[1];
    uint32_t k0 = seed[0], k1 = seed[1];
#pragma unroll 1
    for (int i = 0; i < 10; i++) {
        const uint32_t h0 = __umulhi(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u;
        const uint32_t h1 = __umulhi(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    w0 = c0, w1 = c1;
}

// What changes logits, a row a sequence; read where `Sampling::adjusts` says so.
struct Adjustments {
    const float* bias;      // [m][vocab]
    const uint32_t* mask;   // [m][mask_words(vocab)]: bit i % 32 of word i / 32 is set where token i is allowed
    uint16_t* seen;         // [m][vocab]: IN_PROMPT, below that how often the answer has it
};

constexpr int IN_PROMPT = 1 << 15;
constexpr int MOST_COUNTED = IN_PROMPT - 1;

DEVICE int mask_words(int vocab) { return (vocab + 31) / 32; }

// The logits as the sampler sees them. Each step is rounded as the host's.
struct Logits {
    const float* logits;
    const float* bias;
    const uint32_t* mask;
    const uint16_t* seen;
    const Sampling& how;

    DEVICE Logits(const float* all, const Adjustments& a, int row, int vocab, const Sampling& how)
        : logits(all + size_t(row) * vocab),
          bias(a.bias + size_t(row) * vocab),
          mask(a.mask + size_t(row) * mask_words(vocab)),
          seen(a.seen + size_t(row) * vocab),
          how(how) {}

    DEVICE float get(int i) const { return how.adjusts ? adjusted(i) : __ldcg(logits + i); }

    DEVICE float adjusted(int i) const {
        if (how.adjusts & MASKED && !(__ldcg(mask + i / 32) >> i % 32 & 1)) return -INFINITY;
        float x = __ldcg(logits + i);
        if (how.adjusts & BIASED) x = __fadd_rn(x, __ldcg(bias + i));
        if (!(how.adjusts & PENALIZED)) return x;
        const int state = __ldcg(seen + i);
        if (state == 0) return x;
        x = x > 0.f ? __fdiv_rn(x, how.repetition) : __fmul_rn(x, how.repetition);
        const int count = state & MOST_COUNTED;
        if (count == 0) return x;
        x = __fsub_rn(x, __fmul_rn(how.frequency, float(count)));
        return __fsub_rn(x, how.presence);
    }
};

constexpr int MOST_LOGPROBS = 20;   // of the best tokens, besides that of the chosen one
// Log-probabilities in the model's own distribution, before any change of its logits.
struct Logprobs {
    float chosen;                  // Log-probability of the chosen token.
    int count;                     // Number of best tokens that follow.
    int ids[MOST_LOGPROBS];        // Their ids, best first.
    float values[MOST_LOGPROBS];   // Their log-probabilities.
};
