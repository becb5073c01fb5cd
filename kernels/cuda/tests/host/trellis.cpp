// Kernels of weights in trellis codes on the host, compared with their definition (FORMAT.md) in f64.
#include <stdarg.h>

#include "trellis_expand.cu"
#include "trellis_inputs.cu"
#include "trellis_rows.cu"
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

// A strip's rows.
struct Place {
    int first, count;
};

template <class C>
struct Weight {
    int inputs, strips;
    std::vector<uint4> words;
    std::vector<__half> row_scales, input_scales;
    std::vector<int2> places;
    std::vector<Values> rows;   // [strips * 128][inputs] of T times the row's scale

    Weight(const std::vector<Place>& of, int tiles)
        : inputs(tiles * TILE), strips(of.size()), words(size_t(strips) * tiles * C::UNIT / 16), rows(strips * STRIP, Values(inputs)) {
        for (auto& w : words) w = make_uint4(full(), full(), full(), full());
        for (int i = 0; i < inputs; i++) input_scales.push_back(__float2half(draw.between(.5f, 1.5f) * (draw.bits() % 2 ? 1 : -1)));
        for (int s = 0; s < strips; s++) {
            places.push_back(make_int2(of[s].first, of[s].count));
            for (int r = 0; r < STRIP; r++) row_scales.push_back(__float2half(r < of[s].count ? draw.between(.02f, .03f) : 0.f));
            for (int i = 0; i < tiles; i++) read(s, i, tiles);
        }
        for (size_t r = 0; r < rows.size(); r++)
            for (double& v : rows[r]) v *= __half2float(row_scales[r]);
    }
    static uint32_t full() { return draw.bits() << 16 ^ draw.bits(); }

    void read(int strip, int tile, int tiles) {
        const uint32_t* const unit = reinterpret_cast<const uint32_t*>(words.data()) + (size_t(strip) * tiles + tile) * C::WORDS * 32;
        each_weight<C>(unit, [&](int row, int column, double v) { rows[strip * STRIP + row][tile * TILE + column] = v; });
    }

    Values turned(Values x) const {
        for (int k = 0; k < inputs; k++) x[k] *= __half2float(input_scales[k]);
        for (int k = 0; k < inputs; k += BLOCK) transform(&x[k]);
        return x;
    }
};

enum Source { NORMALIZED, PLAIN, HALVES };

template <class C, int GROUP>
void check_rows(const char* name, Epilogue epilogue, Source source, const std::vector<Place>& places, int tiles, int m, unsigned blocks) {
    using Of = RowsOf<C, GROUP>;
    Weight<C> w(places, tiles);
    const int inputs = w.inputs, padded = (inputs + 255) / 256 * 256, groups = (m + GROUP - 1) / GROUP, each = epilogue == SILU ? 2 : 1;
    const int outs = places.back().first + places.back().count, rows = outs * each, out_padded = (outs + 255) / 256 * 256;
    if (epilogue == HEAD)   // all equal
        for (int r = 0; r < STRIP; r++) {
            w.row_scales[STRIP + r] = __float2half(0.f);
            std::fill(w.rows[STRIP + r].begin(), w.rows[STRIP + r].end(), 0.);
        }

    std::vector<float> x(m * inputs), gain(inputs);
    std::vector<__half> half(m * padded);
    for (auto& v : gain) v = draw.between(.5f, 2);
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

    Guarded<uint2> digits(size_t(groups) * tiles * DIGITS<C::OCTAGON> * Of::FOURS * 32, make_uint2(0x5a5a5a5a, 0xa5a5a5a5));
    Guarded<float2> steps(groups * GROUP, make_float2(NAN, NAN));
    const TrellisInputsArgs inputs_args = {source == HALVES ? nullptr : x.data(), source == HALVES ? half.data() : nullptr,
                                           source == NORMALIZED ? gain.data() : nullptr, w.input_scales.data(), digits.data(), steps.data(),
                                           m, inputs, padded, GROUP, 1e-6f, 0};
    // Blocks of rows that do not exist do nothing.
    launch(groups * GROUP, INPUTS_WARPS * 32, 0, [&] { C::OCTAGON ? trellis_inputs_octagon(inputs_args) : trellis_inputs_sum(inputs_args); });

    std::vector<float> first;   // outputs of the first run, to the bit those of the other
    for (int run = 0; run < 2; run++) {
        Guarded<float> out(size_t(m) * outs, -77.f);
        Guarded<__half> out_half(size_t(m) * out_padded, __float2half(-77.f));
        Guarded<float2> best(m * w.strips, make_float2(-77, -77));
        Guarded<uint32_t> parts(size_t(groups) * blocks * 2 * each * Of::OUTPUTS, 0);
        if (epilogue == ADD)
            for (int i = 0; i < m * outs; i++) out.data()[i] = i % 101;
        const bool floats = epilogue != SILU || source != HALVES, halves = epilogue == SILU && source != PLAIN;
        // The kernel's own digits are those of the other: outputs have the same bits.
        const bool owns = GROUP == 4 && m == 1 && source != HALVES && run > 0;
        const TrellisRowsArgs args = {w.words.data(), w.row_scales.data(), w.places.data(), owns ? nullptr : digits.data(), owns ? nullptr : steps.data(),
                                      owns ? x.data() : nullptr, owns && source == NORMALIZED ? gain.data() : nullptr, w.input_scales.data(),
                                      floats ? out.data() : nullptr,
                                      halves ? out_half.data() : nullptr, epilogue == HEAD ? best.data() : nullptr, parts.data(), nullptr,
                                      m, rows, w.strips, tiles, out_padded, epilogue, 1e-6f, 0};
        launch(Grid(blocks, groups), Of::THREADS, draw.bits() | 1, [&] { TrellisRows<C, GROUP>(args).run(); });

        double error = 0, square = 0;
        bool right = digits.kept() && steps.kept() && out.kept() && out_half.kept() && best.kept() && parts.kept();
        for (uint32_t v : parts.all) right &= v == 0;
        for (int i = 0; i < m; i++)
            for (int s = 0; s < w.strips; s += each) {
                float2 greatest = make_float2(-INFINITY, 0);
                for (int r = 0; r < places[s].count; r++) {
                    auto product = [&](int strip) {
                        double sum = 0;
                        for (int k = 0; k < inputs; k++) sum += w.rows[strip * STRIP + r][k] * turned[i][k];
                        return sum;
                    };
                    const int to = places[s].first + r;
                    double want = product(s);
                    if (epilogue == SILU) want = want / (1 + exp(-want)) * product(s + 1);
                    if (epilogue == ADD) want += (i * outs + to) % 101;
                    float found = out.data()[i * outs + to];
                    if (halves) {
                        const float rounded = __half2float(out_half.data()[i * out_padded + operand_index(to)]);
                        if (floats) right &= rounded == __half2float(__float2half_rn(found));
                        else found = rounded;
                    }
                    if (found > greatest.x) greatest = make_float2(found, __int_as_float(to));
                    error += (found - want) * (found - want), square += want * want;
                }
                if (epilogue == HEAD) right &= memcmp(&best.data()[i * w.strips + s], &greatest, 8) == 0;
            }
        std::vector<float> all = out.all;
        for (__half v : out_half.all) all.push_back(__half2float(v));
        if (run == 0) first = all;
        right &= error < square * (floats ? 1e-8 : 1e-6);
        report(right && memcmp(first.data(), all.data(), first.size() * 4) == 0,
               "%s by %d rows, epilogue %d of source %d: %d strips of %d tiles, m = %d, %u blocks: NMSE %.1e", name, GROUP, epilogue, source, w.strips, tiles,
               m, blocks, error / square);
    }
}

// A mixture: the experts of each row by its scores, one row at a time, or rows sorted by expert.
template <class C, int GROUP>
void check_experts(const char* name, int experts, int per_token, int m, bool owns, bool shared, bool table, unsigned blocks) {
    using Of = RowsOf<C, GROUP>;
    constexpr int WIDTH = 2 * STRIP, HIDDEN = 3 * STRIP;
    // Stacks of all experts: rows of the places are those of each.
    auto stack = [&](int parts, int strips, int tiles) {
        std::vector<Place> places;
        for (int i = 0; i < experts * strips * parts; i++) places.push_back({i / parts % strips * STRIP, STRIP});
        return Weight<C>(places, tiles);
    };
    const Weight<C> up = stack(2, WIDTH / STRIP, HIDDEN / TILE), down = stack(1, HIDDEN / STRIP, WIDTH / TILE);
    const int k = per_token + shared, all = experts, routes = m * k, padded = 512;
    std::vector<float> x(m * HIDDEN), gain(HIDDEN), scores(m * all);
    for (auto& v : gain) v = draw.between(.5f, 2);
    for (auto& v : scores) v = draw.between(-2, 2);
    std::vector<int> chosen(routes);
    std::vector<double> weights(routes);
    std::vector<Values> normed;
    for (int r = 0; r < m; r++) {
        const float* const own = &scores[r * all];
        std::vector<int> order(all - shared);
        for (size_t e = 0; e < order.size(); e++) order[e] = e;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return own[a] > own[b]; });
        double sum = 0, square = 0;
        for (int s = 0; s < per_token; s++) sum += exp(own[order[s]]);
        for (int s = 0; s < per_token; s++) chosen[r * k + s] = order[s], weights[r * k + s] = exp(own[order[s]]) / sum;
        if (shared) chosen[r * k + per_token] = all - 1, weights[r * k + per_token] = 1 / (1 + exp(-own[all - 1]));
        Values row(HIDDEN);
        for (int i = 0; i < HIDDEN; i++) x[r * HIDDEN + i] = draw.between(-1, 1) * (r + 1), square += x[r * HIDDEN + i] * x[r * HIDDEN + i];
        for (int i = 0; i < HIDDEN; i++) row[i] = x[r * HIDDEN + i] * gain[i] / sqrt(square / HIDDEN + 1e-6);
        normed.push_back(up.turned(row));
    }
    auto product = [](const Weight<C>& w, int row, const Values& x) {
        double sum = 0;
        for (int i = 0; i < w.inputs; i++) sum += w.rows[row][i] * x[i];
        return sum;
    };
    // Sorted rows: one block of an expert's rows after the other, with one for nobody behind them.
    std::vector<int4> sorted;
    std::vector<int> place(routes), route_at;
    for (int e = 0; GROUP == 16 && e < all; e++) {
        const int begin = route_at.size();
        for (int i = 0; i < routes; i++)
            if (chosen[i] == e) place[i] = route_at.size(), route_at.push_back(i);
        const int end = route_at.size();
        for (int at = begin; at < end; at += GROUP) sorted.push_back(make_int4(e, at, min(at + GROUP, end), 0));
    }
    if (GROUP == 16) sorted.push_back(make_int4(0, 0, 0, 0));
    else for (int i = 0; i < routes; i++) place[i] = i;
    const unsigned groups = GROUP == 16 ? sorted.size() : routes;

    // What an expert has, where a table leads to: codes and scales of gate and up, then those of down.
    ExpertPlaces at = {};
    std::vector<std::vector<uint4>> apart(all);
    std::vector<uint64_t> addresses(all);
    std::vector<uint32_t> counts(all);
    const size_t of_up = up.words.size() * 16 / all, of_down = down.words.size() * 16 / all, up_scales = 2 * WIDTH * 2, down_scales = HIDDEN * 2;
    for (int e = 0; table && e < all; e++) {
        apart[e].resize((of_up + of_down + up_scales + down_scales) / 16);
        uint8_t* const to = reinterpret_cast<uint8_t*>(apart[e].data());
        memcpy(to, reinterpret_cast<const uint8_t*>(up.words.data()) + e * of_up, of_up);
        memcpy(to + of_up, reinterpret_cast<const uint8_t*>(down.words.data()) + e * of_down, of_down);
        memcpy(to + of_up + of_down, up.row_scales.data() + e * 2 * WIDTH, up_scales);
        memcpy(to + of_up + of_down + up_scales, down.row_scales.data() + e * HIDDEN, down_scales);
        addresses[e] = reinterpret_cast<uint64_t>(to);
    }
    if (table) at = {addresses.data(), counts.data(), {0, uint32_t(of_up)}, {uint32_t(of_up + of_down), uint32_t(of_up + of_down + up_scales)}};

    Guarded<float> gated(routes * WIDTH, -77.f), out(GROUP == 16 ? routes * HIDDEN : m * HIDDEN, 3.f);
    Guarded<__half> gated_half(routes * padded, __float2half(0.f));
    Guarded<uint32_t> parts(size_t(groups) * blocks * 4 * Of::OUTPUTS, 0);
    std::vector<__half> half(routes * padded);
    for (int i = 0; GROUP == 16 && i < routes; i++)
        for (int j = 0; j < HIDDEN; j++) {
            const int r = i / k;
            double square = 0;
            for (int n = 0; n < HIDDEN; n++) square += x[r * HIDDEN + n] * x[r * HIDDEN + n];
            half[place[i] * padded + operand_index(j)] = __float2half(x[r * HIDDEN + j] * gain[j] / sqrt(square / HIDDEN + 1e-6));
        }

    bool right = true;
    for (int down_too = 0; down_too < 2; down_too++) {
        const Weight<C>& w = down_too ? down : up;
        const int inputs = w.inputs, tiles = inputs / TILE, strips = w.strips / all, rows = GROUP == 16 ? int(groups) * GROUP : down_too ? routes : m;
        const bool makes = GROUP == 4 && owns;
        Guarded<uint2> digits(size_t(rows + GROUP) * tiles * DIGITS<C::OCTAGON> * 8, make_uint2(0x5a5a5a5a, 0xa5a5a5a5));
        Guarded<float2> steps(rows + GROUP, make_float2(NAN, NAN));
        const float* const from = down_too ? gated.data() : x.data();
        const TrellisInputsArgs inputs_args = {GROUP == 16 ? nullptr : from, GROUP == 16 ? down_too ? gated_half.data() : half.data() : nullptr,
                                               GROUP == 16 || down_too ? nullptr : gain.data(), w.input_scales.data(), digits.data(), steps.data(), rows, inputs,
                                               GROUP == 16 && down_too ? 256 : padded, GROUP, 1e-6f, 1, GROUP == 16 ? sorted.data() : nullptr};
        if (!makes) launch(rows, INPUTS_WARPS * 32, 0, [&] { C::OCTAGON ? trellis_inputs_octagon(inputs_args) : trellis_inputs_sum(inputs_args); });
        const int epilogue = !down_too ? SILU : GROUP == 16 ? STORE : ADD;
        TrellisRowsArgs args = {w.words.data(), w.row_scales.data(), w.places.data(), makes ? nullptr : digits.data(), makes ? nullptr : steps.data(),
                                makes ? from : nullptr, down_too ? nullptr : gain.data(), w.input_scales.data(), down_too ? out.data() : GROUP == 4 ? gated.data() : nullptr,
                                !down_too && GROUP == 16 ? gated_half.data() : nullptr, nullptr, parts.data(), nullptr, m, down_too ? HIDDEN : 2 * WIDTH, strips, tiles,
                                256, epilogue, 1e-6f, 0};
        args.scores = GROUP == 4 ? scores.data() : nullptr, args.sorted = GROUP == 16 ? sorted.data() : nullptr;
        args.experts_at = at, args.experts = all, args.per_token = k, args.normalized = 1, args.shared = shared;
        // Few rows add up whole strips.
        launch(Grid(down_too && GROUP == 4 ? 3 : blocks, groups), Of::THREADS, draw.bits() | 1, [&] { TrellisRows<C, GROUP>(args).run(); });
        right &= digits.kept() && steps.kept();
    }
    for (uint32_t v : parts.all) right &= v == 0;
    right &= gated.kept() && gated_half.kept() && out.kept() && parts.kept();
    for (int e = 0; table && GROUP == 4 && e < all; e++) right &= counts[e] == uint32_t(std::count(chosen.begin(), chosen.end(), e));
    double error = 0, square = 0;
    for (int r = 0; r < m; r++) {
        Values sum(HIDDEN);
        for (int s = 0; s < k; s++) {
            const int i = r * k + s, e = chosen[i];
            Values row(WIDTH);
            for (int n = 0; n < WIDTH; n++) {
                const int strip = (e * (WIDTH / STRIP) + n / STRIP) * 2;
                const double gate = product(up, strip * STRIP + n % STRIP, normed[r]), value = product(up, (strip + 1) * STRIP + n % STRIP, normed[r]);
                row[n] = gate / (1 + exp(-gate)) * value * (GROUP == 4 ? weights[i] : 1);
            }
            row = down.turned(row);
            for (int n = 0; n < HIDDEN; n++) {
                const double v = product(down, e * HIDDEN + n, row);
                sum[n] += v;
                if (GROUP == 4) continue;
                const double found = out.data()[place[i] * HIDDEN + n];
                error += (found - v) * (found - v), square += v * v;
            }
        }
        for (int n = 0; GROUP == 4 && n < HIDDEN; n++) {
            const double found = out.data()[r * HIDDEN + n] - 3.;
            error += (found - sum[n]) * (found - sum[n]), square += sum[n] * sum[n];
        }
    }
    report(right && error < square * (GROUP == 4 ? 1e-8 : 1e-6), "%d experts of %s by %d rows, %d of a row%s%s%s, m = %d, %u blocks: NMSE %.1e", experts, name, GROUP, k,
           shared ? ", one shared" : "", table ? ", by a table" : "", owns ? ", own digits" : "", m, blocks, error / square);
}

template <class C>
void check_expand(const char* name, void (*kernel)(const TrellisExpandArgs), const std::vector<Place>& places, int tiles, bool silu, int first) {
    const Weight<C> w(places, tiles);
    const int each = silu ? 2 : 1, spans = (tiles + 7) / 8, outs = places.back().first + places.back().count;
    const int from = places[first].first, records = ((outs - from) * each + 15) / 16;
    Guarded<uint4> codes(size_t(records) * spans * 512, make_uint4(~0u, ~0u, ~0u, ~0u));
    const TrellisExpandArgs args = {w.words.data() + size_t(first) * tiles * C::UNIT / 16, w.row_scales.data() + first * STRIP, w.places.data() + first,
                                    codes.data(), w.strips - first, tiles, spans, silu, from};
    launch(Grid(spans, (w.strips - first) / each), EXPAND_WARPS * 32, 1, [&] { kernel(args); });
    const PackedWeight packed = {reinterpret_cast<const uint8_t*>(codes.data()), nullptr, records * 16, spans * SPAN, spans, 16, SYM, 0, 0, 1, 0, 1.f};
    int wrong = 0;
    for (int r = 0; r < records * 16; r++) {
        const int row = silu ? r / 16 * 8 + r % 8 : r, up = silu ? r / 8 % 2 : 0;   // which it is of the outputs
        const Values* values = nullptr;
        for (int s = first; s < w.strips; s += each) {
            const int of = row + from - places[s].first;
            if (of >= 0 && of < places[s].count) values = &w.rows[(s + up) * STRIP + of];
        }
        for (int k = 0; k < spans * SPAN; k++) {
            const double want = values && k < w.inputs ? (*values)[k] : 0;
            wrong += !(fabs(element(packed, r, k) - want) <= fabs(want) / 2047 + 1e-7);
        }
    }
    report(wrong == 0 && codes.kept(), "%s as FP16, %d strips of %d tiles%s: %d values", name, w.strips, tiles, silu ? ", gate and up" : "", wrong);
}

template <class C>
void check_embed(const char* name, void (*kernel)(const TrellisEmbedArgs)) {
    const Weight<C> w({{0, 128}, {128, 128}, {256, 44}}, 12);
    constexpr int M = 5, STRIDE = 3;
    const uint32_t tokens[M * STRIDE] = {0, 9, 9, 299, 9, 9, 131, 9, 9, 200, 9, 9, 7};
    Guarded<float> x(M * w.inputs, NAN);
    const TrellisEmbedArgs args = {reinterpret_cast<const uint32_t*>(w.words.data()), w.row_scales.data(), w.input_scales.data(), tokens, x.data(),
                                   M, w.inputs, w.inputs / TILE, STRIDE};
    launch(M, EXPAND_WARPS * 32, 1, [&] { kernel(args); });
    double error = 0, square = 0;
    for (int i = 0; i < M; i++) {
        Values want = w.rows[tokens[i * STRIDE]];
        for (int k = 0; k < w.inputs; k += BLOCK) transform(&want[k]);
        for (int k = 0; k < w.inputs; k++) {
            const double v = want[k] * __half2float(w.input_scales[k]), d = x.data()[i * w.inputs + k] - v;
            error += d * d, square += v * v;
        }
    }
    report(error < square * 1e-12 && x.kept(), "rows of %s: NMSE %.1e", name, error / square);
}

void check_turn() {
    constexpr int M = 3, INPUTS = 1152, PADDED = 1280;
    const Weight<octagon4> w({{0, 16}}, INPUTS / TILE);
    Guarded<__half> x(M * PADDED, __float2half(0.f)), out(M * PADDED, __float2half(-77.f));
    for (int i = 0; i < M * PADDED; i++)
        if (i % PADDED < INPUTS) x.data()[i] = __float2half(draw.between(-2, 2));
    const TrellisTurnArgs args = {x.data(), w.input_scales.data(), out.data(), M, INPUTS, PADDED};
    launch(M, TURN_WARPS * 32, 1, [&] { trellis_turn(args); });
    int wrong = 0;
    for (int i = 0; i < M; i++) {
        Values row(INPUTS);
        for (int k = 0; k < INPUTS; k++) row[k] = __half2float(x.data()[i * PADDED + operand_index(k)]);
        row = w.turned(row);
        row.resize(PADDED);
        for (int k = 0; k < PADDED; k++) wrong += !(fabs(__half2float(out.data()[i * PADDED + operand_index(k)]) - row[k]) <= fabs(row[k]) / 2047 + 1e-6);
    }
    report(wrong == 0 && out.kept(), "rows turned: %d values", wrong);
}

// Strips of two weights, the first of other than whole strips; gate and up.
const std::vector<Place> FUSED = {{0, 128}, {128, 48}, {176, 100}}, PAIRS = {{0, 128}, {0, 128}, {128, 72}, {128, 72}};

template <class C>
void check(const char* name, void (*expand)(const TrellisExpandArgs), void (*embed)(const TrellisEmbedArgs), int nth) {
    // What all codes share is checked with each in turn.
    constexpr Epilogue EPILOGUES[] = {STORE, ADD, SILU, HEAD};
    constexpr int FEW[] = {1, 3, 4, 5}, MANY[] = {5, 16, 17, 33};
    for (int i = 0; i < 2; i++) {
        const Epilogue few = EPILOGUES[(nth + 2 * i) % 4], many = EPILOGUES[(nth + 2 * i + 1) % 4];
        const int tiles = 4 + (nth + i) % 3 * 8, blocks = (nth + i) % 4 == 0 ? 1 : 2 + (nth + i) % 5 * 3;
        check_rows<C, 4>(name, few, Source((nth + i) % 3), few == SILU ? PAIRS : FUSED, tiles, FEW[(nth / 4 + nth + i) % 4], blocks);
        check_rows<C, 16>(name, many, Source((nth + i + 1) % 3), many == SILU ? PAIRS : FUSED, i ? 4 : 12, MANY[(nth / 4 + nth + 2 * i) % 4], i ? 5 : blocks);
    }
    check_expand<C>(name, expand, FUSED, nth % 2 ? 12 : 8, false, nth % 2);
    check_expand<C>(name, expand, PAIRS, nth % 2 ? 8 : 4, true, nth % 2 * 2);
    check_embed<C>(name, embed);
}

}   // namespace

int main() {
    int nth = 0;
#define CHECK(code) check<code>(#code, trellis_expand_##code, trellis_embed_##code, nth++);
    TRELLIS_CODES(CHECK)
    check_turn();
    check_experts<octagon6, 4>("octagon6", 8, 3, 1, true, false, false, 5);
    check_experts<octagon4, 4>("octagon4", 5, 2, 3, false, true, true, 1);
    check_experts<sum6, 4>("sum6", 5, 2, 2, true, true, false, 4);
    check_experts<sum3, 4>("sum3", 12, 10, 1, false, false, false, 2);
    check_experts<octagon5, 16>("octagon5", 4, 2, 21, false, false, false, 1);
    check_experts<sum2, 16>("sum2", 4, 2, 9, false, true, true, 3);
    // A warp has many units of a strip; a block has many strips; more blocks than units; blocks that begin and end within a strip, and
    // those of a pair that have of one strip only.
    check_rows<octagon8, 4>("octagon8", STORE, NORMALIZED, FUSED, 120, 1, 2);
    check_rows<octagon6, 4>("octagon6", STORE, NORMALIZED, {{0, 128}, {128, 128}, {256, 128}, {384, 128}, {512, 128}, {640, 1}}, 4, 2, 2);
    check_rows<octagon5, 4>("octagon5", ADD, HALVES, FUSED, 4, 4, 17);
    check_rows<octagon8, 4>("octagon8", SILU, PLAIN, PAIRS, 20, 1, 11);
    check_rows<sum3, 16>("sum3", SILU, HALVES, PAIRS, 4, 16, 20);
    check_rows<sum6, 4>("sum6", SILU, NORMALIZED, PAIRS, 4, 3, 3);
    // A row whose digits each block makes: of more blocks of inputs than a block of threads takes at once.
    check_rows<octagon4, 4>("octagon4", STORE, NORMALIZED, FUSED, 16, 1, 5);
    check_rows<sum5, 4>("sum5", ADD, PLAIN, FUSED, 72, 1, 4);
    check_rows<sum2, 4>("sum2", HEAD, NORMALIZED, FUSED, 4, 1, 1);
    check_rows<octagon10, 4>("octagon10", SILU, NORMALIZED, PAIRS, 288, 1, 3);
    printf("trellis codes on the host: %d passed, %d failed\n", passed, failed);
    return failed != 0;
}
