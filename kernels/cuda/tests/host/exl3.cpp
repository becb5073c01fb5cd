// Kernels of weights in EXL3's codes on the host, compared with the format's definition (`formats/src/exl3.rs`) in f64.
#include <stdarg.h>

#include "exl3_expand.cu"
#include "exl3_rows.cu"
#include "trellis_inputs.cu"
#include "trellis_values.cuh"

namespace {

using Values = std::vector<double>;

// Random numbers that are the same on every machine.
struct Random {
    uint64_t state = 1;
    uint32_t bits() { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; }
    float between(float least, float most) { return least + (most - least) * float(bits() & 0xffff) / 65536.f; }
} draw;

constexpr int AFTER = 64;   // elements behind an output that nobody may write
template <class T>
struct Guarded {
    std::vector<T> all;
    T before;   // what all elements are at first
    Guarded(size_t n, T before) : all(n + AFTER, before), before(before) {}
    T* data() { return all.data(); }
    bool kept() const { return std::all_of(all.end() - AFTER, all.end(), [&](const T& v) { return memcmp(&v, &before, sizeof v) == 0; }); }
};

int passed = 0, failed = 0;
void report(bool right, const char* format, ...) {
    (right ? passed : failed)++;
    if (right) return;
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf(": WRONG\n");
}

// How values follow from states.
struct Code {
    const char* name;
    uint32_t multiplier, addend;
    bool bytes;
};
const Code CODES[] = {{"3inst", 89226354, 64248484, false}, {"mcg", 0xCBAC1FED, 0, false}, {"mul1", 0x83DCD12D, 0, true}};

double half_of(uint16_t bits) {
    __half h;
    memcpy(&h, &bits, 2);
    return __half2float(h);
}
// To FP16 of a sum that f64 holds.
double rounded(double v) { return __half2float(__float2half_rn(float(v))); }

double value_of(const Code& code, uint16_t state) {
    const uint32_t h = state * code.multiplier + code.addend;
    if (!code.bytes) {
        const uint32_t both = (h & 0x8fff8fff) ^ 0x3b603b60;
        return rounded(half_of(both) + half_of(both >> 16));
    }
    int sum = 1024;
    for (int i = 0; i < 4; i++) sum += h >> 8 * i & 255;
    return rounded(sum * half_of(0x1eee) + half_of(0xc931));
}

template <class C>
struct Weight {
    static constexpr int TILE_BYTES = 32 * C::BITS;   // of the file
    int inputs, strips;
    std::vector<uint4> words;
    std::vector<__half> row_scales, input_scales;
    std::vector<int2> places;
    std::vector<Values> rows;   // [strips * 128][inputs], all transforms and scales but those of inputs included

    Weight(const Code& code, int strips, int tiles) : inputs(tiles * TILE), strips(strips), words(size_t(strips) * tiles * C::UNIT / 16), rows(strips * STRIP, Values(inputs)) {
        for (int i = 0; i < inputs; i++) input_scales.push_back(__float2half(draw.between(.5f, 1.5f) * (draw.bits() % 2 ? 1 : -1)));
        for (int s = 0; s < strips; s++) places.push_back(make_int2(s * STRIP, STRIP));
        for (int r = 0; r < strips * STRIP; r++) row_scales.push_back(__float2half(draw.between(.02f, .03f) * (draw.bits() % 2 ? 1 : -1)));
        uint8_t tile[TILE_BYTES];
        for (int down = 0; down < inputs / 16; down++)
            for (int across = 0; across < strips * 8; across++) {
                for (auto& byte : tile) byte = draw.bits();
                read(code, tile, down, across);
                pack(tile, down, across, tiles);
            }
        for (int s = 0; s < strips; s++)
            for (int k = 0; k < inputs; k++) {
                double column[STRIP];
                for (int r = 0; r < STRIP; r++) column[r] = rows[s * STRIP + r][k];
                transform(column);
                for (int r = 0; r < STRIP; r++) rows[s * STRIP + r][k] = column[r] * __half2float(row_scales[s * STRIP + r]);
            }
    }

    // Bit `i` of a tile: the first is the highest of the first word of 32 bits.
    static int bit(const uint8_t* tile, int i) {
        i = (i + TILE_BYTES * 8) % (TILE_BYTES * 8);
        return tile[i / 32 * 4 + 3 - i % 32 / 8] >> (7 - i % 8) & 1;
    }
    void read(const Code& code, const uint8_t* tile, int down, int across) {
        for (int n = 0; n < 256; n++) {
            uint32_t state = 0;
            for (int i = 0; i < 16; i++) state = state << 1 | bit(tile, (n + 1) * C::BITS - 16 + i);
            const int lane = n / 8, j = n % 8, input = lane % 4 * 2 + j % 2 + j / 2 % 2 * 8, output = lane / 4 + j / 4 * 8;
            rows[across * 16 + output][down * 16 + input] = value_of(code, state);
        }
    }
    // As a device packs it: the bits of a lane's chunk go to its stream.
    void pack(const uint8_t* tile, int down, int across, int tiles) {
        uint32_t* const unit = reinterpret_cast<uint32_t*>(words.data()) + (size_t(across / 8) * tiles + down / 2) * (C::WORDS * 32);
        const int chunk = down % 2 * 8 + across % 8, size = 8 * C::BITS;
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < size; i++) {
                const int at = chunk * size + i, word = at / 32;
                unit[word / 4 * 128 + lane * 4 + word % 4] |= uint32_t(bit(tile, lane * size + i)) << (31 - at % 32);
            }
    }

    Values turned(Values x) const {
        for (int k = 0; k < inputs; k++) x[k] *= __half2float(input_scales[k]);
        for (int k = 0; k < inputs; k += BLOCK) transform(&x[k]);
        return x;
    }
};

enum Source { NORMALIZED, PLAIN, HALVES };

template <class C, int GROUP>
void check_rows(const Code& code, Epilogue epilogue, Source source, int strips, int tiles, int m, unsigned blocks) {
    using Of = RowsOf<C, GROUP>;
    const Weight<C> w(code, strips, tiles);
    const int inputs = w.inputs, padded = (inputs + 255) / 256 * 256, groups = (m + GROUP - 1) / GROUP;
    const int outs = strips * STRIP, out_padded = (outs + 255) / 256 * 256;
    std::vector<float> x(m * inputs), gain(inputs), gate(m * outs);
    std::vector<__half> half(m * padded);
    for (auto& v : gain) v = draw.between(.5f, 2);
    for (auto& v : gate) v = draw.between(-3, 3);
    std::vector<Values> turned;
    for (int i = 0; i < m; i++) {
        Values row(inputs);
        double square = 0;
        for (int k = 0; k < inputs; k++) {
            float& v = x[i * inputs + k] = draw.between(-1, 1) * (i + 1);
            square += double(v) * v;
            const __half h = half[i * padded + operand_index(k)] = __float2half(v);
            row[k] = source == HALVES ? double(__half2float(h)) : double(v);
        }
        for (int k = 0; k < inputs && source == NORMALIZED; k++) row[k] *= gain[k] / sqrt(square / inputs + 1e-6);
        turned.push_back(w.turned(row));
    }
    Guarded<uint2> digits(size_t(groups) * tiles * 2 * Of::FOURS * 32, make_uint2(0x5a5a5a5a, 0xa5a5a5a5));
    Guarded<float2> steps(groups * GROUP, make_float2(NAN, NAN));
    const TrellisInputsArgs inputs_args = {source == HALVES ? nullptr : x.data(), source == HALVES ? half.data() : nullptr,
                                           source == NORMALIZED ? gain.data() : nullptr, w.input_scales.data(), digits.data(), steps.data(),
                                           m, inputs, padded, GROUP, 1e-6f, 0};
    launch(groups * GROUP, INPUTS_WARPS * 32, 0, [&] { trellis_inputs_exl3(inputs_args); });

    std::vector<float> first;   // outputs of the first run, to the bit those of the other
    for (int run = 0; run < 2; run++) {
        Guarded<float> out(size_t(m) * outs, -77.f);
        Guarded<__half> out_half(size_t(m) * out_padded, __float2half(-77.f));
        Guarded<float2> best(m * strips, make_float2(-77, -77));
        Guarded<uint32_t> parts(size_t(groups) * blocks * 2 * Of::OUTPUTS, 0);
        if (epilogue == ADD)
            for (int i = 0; i < m * outs; i++) out.data()[i] = i % 101;
        const bool gated = epilogue == SILU, owns = GROUP == 4 && m == 1 && source != HALVES && run > 0;
        TrellisRowsArgs args = {w.words.data(), w.row_scales.data(), w.places.data(), owns ? nullptr : digits.data(), owns ? nullptr : steps.data(),
                                owns ? x.data() : nullptr, owns && source == NORMALIZED ? gain.data() : nullptr, w.input_scales.data(), out.data(),
                                gated ? out_half.data() : nullptr, epilogue == HEAD ? best.data() : nullptr, parts.data(), gated ? gate.data() : nullptr,
                                m, gated ? 2 * outs : outs, strips, tiles, out_padded, epilogue, 1e-6f, 0, code.bytes, code.multiplier, code.addend};
        launch(Grid(blocks, groups), Of::THREADS, draw.bits() | 1, [&] { TrellisRows<C, GROUP>(args).run(); });

        double error = 0, square = 0;
        bool right = digits.kept() && steps.kept() && out.kept() && out_half.kept() && best.kept() && parts.kept();
        for (uint32_t v : parts.all) right &= v == 0;
        for (int i = 0; i < m; i++)
            for (int s = 0; s < strips; s++) {
                float2 greatest = make_float2(-INFINITY, 0);
                for (int to = s * STRIP; to < (s + 1) * STRIP; to++) {
                    double want = 0;
                    for (int k = 0; k < inputs; k++) want += w.rows[to][k] * turned[i][k];
                    const double g = gate[i * outs + to];
                    if (gated) want *= g / (1 + exp(-g));
                    if (epilogue == ADD) want += (i * outs + to) % 101;
                    const float found = out.data()[i * outs + to];
                    if (gated) right &= __half2float(out_half.data()[i * out_padded + operand_index(to)]) == __half2float(__float2half_rn(found));
                    if (found > greatest.x) greatest = make_float2(found, __int_as_float(to));
                    error += (found - want) * (found - want), square += want * want;
                }
                if (epilogue == HEAD) right &= memcmp(&best.data()[i * strips + s], &greatest, 8) == 0;
            }
        if (run == 0) first = out.all;
        right &= error < square * 1e-11;
        report(right && memcmp(first.data(), out.all.data(), first.size() * 4) == 0,
               "%s of %d bits by %d rows, epilogue %d of source %d: %d strips of %d tiles, m = %d, %u blocks: NMSE %.1e", code.name, C::BITS, GROUP, epilogue,
               source, strips, tiles, m, blocks, error / square);
    }
}

// `half`: of gate and up; -1: a part of a stack that begins at row `from`.
template <class C>
void check_expand(const Code& code, void (*kernel)(const Exl3ExpandArgs), int strips, int tiles, int from, int half) {
    const Weight<C> w(code, strips, tiles);
    const int spans = (tiles + 7) / 8, outs = from + strips * STRIP, records = (half < 0 ? outs : 2 * outs) / 16;
    const uint4 untouched = make_uint4(~0u, ~0u, ~0u, ~0u);
    Guarded<uint4> codes(size_t(records) * spans * 512, untouched);
    const Exl3ExpandArgs args = {reinterpret_cast<const uint32_t*>(w.words.data()), w.row_scales.data(), w.input_scales.data(), codes.data(), strips,
                                 tiles, spans, from, half, code.bytes, code.multiplier, code.addend};
    launch(Grid(2 * spans, strips), EXL3_WARPS * 32, 1, [&] { kernel(args); });
    const PackedWeight packed = {reinterpret_cast<const uint8_t*>(codes.data()), nullptr, records * 16, spans * SPAN, spans, 16, SYM, 0, 0, 1, 0, 1.f};
    int wrong = 0;
    for (int r = 0; r < records * 16; r++) {
        const int row = half < 0 ? r : r / 16 * 8 + r % 8;   // of the stack
        const bool own = row >= from && (half < 0 || r / 8 % 2 == half);
        Values want(spans * SPAN);
        if (own) {
            for (int k = 0; k < w.inputs; k++) want[k] = w.rows[row - from][k];
            for (int k = 0; k < w.inputs; k += BLOCK) transform(&want[k]);
            for (int k = 0; k < w.inputs; k++) want[k] *= __half2float(w.input_scales[k]);
        }
        for (int k = 0; k < spans * SPAN; k++) {
            const double found = element(packed, r, k);
            wrong += own ? !(fabs(found - want[k]) <= fabs(want[k]) / 2047 + 1e-7) : found == found;
        }
    }
    report(wrong == 0 && codes.kept(), "%s of %d bits as FP16, %d strips of %d tiles from %d, half %d: %d values", code.name, C::BITS, strips, tiles, from,
           half, wrong);
}

template <class C>
void check(void (*expand)(const Exl3ExpandArgs), int nth) {
    constexpr Epilogue EPILOGUES[] = {STORE, ADD, SILU, HEAD};
    constexpr int FEW[] = {1, 3, 4, 5}, MANY[] = {5, 16, 17, 33};
    for (int i = 0; i < 3; i++) {
        const Code& code = CODES[i];
        const int tiles = 4 + (nth + i) % 3 * 4, blocks = (nth + i) % 4 == 0 ? 1 : 2 + (nth + i) % 5 * 2;
        check_rows<C, 4>(code, EPILOGUES[(nth + i) % 4], Source((nth + i) % 3), 2, tiles, FEW[(nth / 2 + i) % 4], blocks);
        check_expand<C>(code, expand, 1 + nth % 2, tiles, i * 128, (nth + i) % 3 - 1);
    }
    check_rows<C, 16>(CODES[nth % 3], EPILOGUES[(nth + 1) % 4], Source(nth % 3), 2, 4 + nth % 2 * 8, MANY[nth % 4], 3);
}

}   // namespace

int main() {
    int nth = 0;
#define CHECK(bits) check<exl3_##bits>(exl3_expand_##bits, nth++);
    EXL3_BITS(CHECK)
    // Blocks that begin and end within a strip; a row whose parts each block makes, of more inputs than its threads take at once.
    check_rows<exl3_4, 4>(CODES[1], STORE, NORMALIZED, 3, 72, 1, 5);
    check_rows<exl3_3, 4>(CODES[0], SILU, NORMALIZED, 1, 20, 1, 7);
    check_rows<exl3_6, 4>(CODES[2], HEAD, PLAIN, 5, 4, 1, 2);
    printf("EXL3 on the host: %d passed, %d failed\n", passed, failed);
    return failed != 0;
}
