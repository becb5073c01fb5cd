// A model of random weights for `step_layers` on the host, what its layers make of x in f64, and its parts on several ranks.
#pragma once

#include "step_layers.cuh"
#include "trellis_values.cuh"

#include <memory>

namespace {

// Random numbers that are the same on every machine.
struct Random {
    uint64_t state = 1;
    uint32_t bits() { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; }
    float below(float most) { return most * float(bits() & 0xffff) / 65536.f; }
    float between(float least, float most) { return least + below(most - least); }
} draw;

template <class T>
T* allocate(size_t n) {
    T* const p = static_cast<T*>(aligned_alloc(128, (n * sizeof(T) + 127) / 128 * 128));
    memset(static_cast<void*>(p), 0, n * sizeof(T));
    return p;
}

// A model and what a step of it needs.
struct Case {
    int hidden, kv_heads, intermediate;
    int blocks, layers, position;
    int groups;          // scale groups of a span
    int depth, window;   // of the ring
    unsigned seed;       // of the order in which warps take turns
    bool int8 = false;   // keys and values
    // Of hybrids, whose even layers have recurrences.
    int key_heads = 0;
    bool tiled = false;
    int behind = 0;      // rows that the states lack
    // Of mixtures: `intermediate` is that of an expert.
    int experts = 0;     // with the shared one
    int chosen = 1;
    bool shared = false, normalized = true;
};

// Bits and zero-points of a weight, in the order of `LayersBlock::multiply` those of a mix.
struct Coding {
    int bits, zero, groups, scheme;
    bool two_level, table;
    int scale_bytes() const { return two_level ? 16 : 32; }
    int tables_at() const { return !two_level ? 0 : zero == OFFSET ? 64 : 32; }
    int rows_bytes() const { return tables_at() + (table ? 2 << bits : 0); }
    int offsets() const { return groups == 16 && bits == 6 ? 8 : groups; }   // of rows
    int meta_bytes() const {
        const int zeros = zero == SYM ? 0 : zero == OFFSET ? offsets() * scale_bytes() : groups * (bits == 4 ? 8 : 16);
        return (rows_bytes() + groups * scale_bytes() + zeros + 15) / 16 * 16;
    }
};

template <class S>
Coding coding(int groups, int) {
    return {S::BITS, S::ZERO, groups, 0, false, false};
}
// The nth product of a mix.
template <>
Coding coding<void>(int, int nth) {
    const int scheme = nth * 5 % (6 + BLOCK_SCHEMES), bits = 4 + scheme / 2;
    Coding of = {bits, bits == 6 ? SYM : INT, scheme % 2 ? 8 : 4, scheme, true, false};
    if (scheme >= 6)
        with_block_scheme(scheme - 6, [&](auto block) { of = {block.BITS, block.ZERO, 256 / block.SLOT, scheme, block.TWO_LEVEL, block.TABLE}; });
    return of;
}

// The code of the nth product, in the order of `with_code`.
int code_of(int nth) { return nth * 4 % LAYER_CODES; }

template <int GROUP, class S, bool HYBRID, bool EXPERTS>
struct Model {
    static constexpr bool TRELLIS = std::is_same_v<S, trellis_codes>;
    using Values = std::vector<double>;
    static constexpr int DIM = HYBRID ? 256 : 128, ROTATED = HYBRID ? 64 : 128;
    using Of = HeadsOf<DIM>;
    const Case c;
    const int heads, width;   // of queries
    const int value_heads, channels;   // of recurrences, which have as many values as queries have
    int stage = 8320;         // bytes
    LayersArgs args = {};
    int shapes[5][2];         // rows and inputs of the products
    std::vector<float> x, gain, q_gain, k_gain;
    float* states = nullptr;  // of all layers, and their size
    size_t state_values = 0;
    std::vector<float> after; // those that the last run left
    std::vector<float2> cos_sin;
    std::vector<uint32_t> tables;
    Step step;
    uint32_t epoch = 3, lost = 0;

    explicit Model(const Case& c)
        : c(c), heads(c.kv_heads * GROUP), width(heads * DIM), value_heads(HYBRID ? width / 128 : 0), channels((2 * c.key_heads + value_heads) * 128),
          shapes{{Of::width(heads, c.kv_heads) * DIM, c.hidden}, {c.hidden, width}, {2 * c.chosen * c.intermediate, c.hidden}, {c.hidden, c.chosen * c.intermediate}, {channels + value_heads * 128, c.hidden}},
          x(c.hidden), gain(c.hidden), q_gain(DIM), k_gain(DIM), cos_sin(ROTATED / 2 * (c.position + 1)), tables(c.position / 128 + 1),
          step{c.position, 0, 0, 0, c.behind} {
        if (HYBRID) states = allocate<float>(state_values = c.layers * (size_t(value_heads) * MATRIX + INPUTS * channels));
        for (auto& v : x) v = draw.between(-1, 1);
        for (auto* gains : {&gain, &q_gain, &k_gain})
            for (auto& v : *gains) v = draw.between(.7f, 1.3f);
        for (auto& v : cos_sin) {
            const float angle = draw.below(6);
            v = make_float2(cosf(angle), sinf(angle));
        }
        for (size_t i = 0; i < tables.size(); i++) tables[i] = tables.size() - 1 - i;
        for (int l = 0; l < c.layers; l++) add_layer(args.layer[l], l);
        const int strip_parts = TRELLIS ? 2 * MOST_STRIP_PARTS : 1;   // of gate and of up
        for (int i = 0; i < 5; i++) args.shape[i] = {shapes[i][0] / (TRELLIS ? STRIP : 16), shapes[i][1] / (TRELLIS ? TILE : 256)};
        args.qkv = allocate<uint64_t>(strip_parts * max(shapes[0][0], shapes[4][0]));
        args.key_heads = max(c.key_heads, 1), args.value_heads = max(value_heads, 1), args.tiled = c.tiled;
        args.attended = allocate<uint64_t>(MOST_SOURCES * (width + 2 * heads));
        args.gated = allocate<uint64_t>(strip_parts * c.chosen * c.intermediate), args.scores = allocate<uint64_t>(c.experts);
        args.experts = c.experts, args.chosen = c.chosen, args.shared_expert = c.shared, args.normalized = c.normalized;
        args.up_tiles = c.intermediate / 8, args.down_spans = c.intermediate / 256;
        for (auto& parts : args.parts) parts = allocate<uint64_t>((TRELLIS ? MOST_STRIP_PARTS : MOST_PARTS) * c.hidden);
        args.ranks = 1, args.lost = &lost, args.epoch = &epoch, args.cos_sin = cos_sin.data(), args.tables = tables.data(), args.step = &step;
        args.table_len = tables.size(), args.layers = c.layers, args.hidden = c.hidden, args.heads = heads, args.kv_heads = c.kv_heads, args.group = GROUP;
        // Without clusters, as few stages as keys of a page have, and up to two more, all of them under way.
        args.depth = CLUSTERED ? c.depth : DIM / 32 + c.seed % 3, args.window = CLUSTERED ? c.window : args.depth;
        args.stage = stage, args.eps = 1e-6f;
        lay_out();
    }

    // Takes every other expert out of its stack, and puts the others in another order: `places.cuh`. The stacks are gone.
    void scatter_experts() {
        for (int l = 0; l < c.layers; l++) {
            LayerArgs& layer = args.layer[l];
            uint64_t* const at = allocate<uint64_t>(c.experts);
            layer.places.at = at, layer.places.counts = allocate<uint32_t>(c.experts);
            size_t bytes[2][2], size = 0;   // codes and scales of an expert
            for (int down = 0; down < 2; down++) {
                const int which = down ? DOWN : GATED;
                const size_t records = down ? size_t(c.hidden / 16) * args.down_spans : size_t(args.up_tiles) * (c.hidden / 256);
                bytes[down][0] = records * layer.kind[which].codes_bytes, bytes[down][1] = records * layer.kind[which].meta_bytes;
                layer.places.codes[down] = size, layer.places.meta[down] = size + bytes[down][0];
                size += bytes[down][0] + bytes[down][1];
            }
            uint8_t* const stack = allocate<uint8_t>(size * c.experts);
            for (int e = 0; e < c.experts; e++) {
                uint8_t* const to = e % 2 ? allocate<uint8_t>(size) : stack + (c.experts - 1 - e) * size;
                at[e] = reinterpret_cast<uint64_t>(to);
                for (int down = 0; down < 2; down++) {
                    const int which = down ? DOWN : GATED;
                    memcpy(to + layer.places.codes[down], layer.codes[which] + e * bytes[down][0], bytes[down][0]);
                    memcpy(to + layer.places.meta[down], layer.meta[which] + e * bytes[down][1], bytes[down][1]);
                }
            }
            for (int which : {GATED, DOWN}) layer.codes[which] = layer.meta[which] = nullptr;
        }
    }

    // True if each layer's rows have chosen as many experts as there were in `steps` steps.
    bool counts_choices(int steps) const {
        for (int l = 0; l < c.layers; l++) {
            uint32_t all = 0;
            for (int e = 0; e < c.experts; e++) all += args.layer[l].places.counts[e];
            if (all != uint32_t(steps * c.chosen)) return false;
        }
        return true;
    }

    bool recurs(int l) const { return HYBRID && l % 2 == 0; }
    const int (&shape(int l, int which) const)[2] { return shapes[which == QKV && recurs(l) ? int(INPUTS_OF_DELTA) : which]; }

    const float* values(size_t n, float least, float most) {
        float* const p = allocate<float>(n);
        for (size_t i = 0; i < n; i++) p[i] = draw.between(least, most);
        return p;
    }

    // Vectors of a recurrence, and what it keeps of the sequence.
    void add_recurrence(LayerArgs& layer, int l) {
        LayerRecurrence& to = layer.recurrence;
        __half* const rates = allocate<__half>(2 * value_heads * c.hidden);
        for (int i = 0; i < 2 * value_heads * c.hidden; i++) rates[i] = __float2half(draw.between(-100, 100));
        float* const matrices = states + l * (state_values / c.layers), *const inputs = matrices + value_heads * MATRIX;
        for (int i = 0; i < value_heads * MATRIX; i++) matrices[i] = draw.between(-.2f, .2f);
        for (int i = 0; i < INPUTS * channels; i++) inputs[i] = draw.between(-1, 1);
        layer.recurrent = 1;
        to = {{values(channels * CONV, -.5f, .5f), values(value_heads, -2, 0), values(value_heads, -1, 1), values(128, .7f, 1.3f), matrices, inputs,
               c.key_heads, value_heads, c.tiled, 1e-6f},
              rates, nullptr, .001f};
        if (c.behind > 0) to.kept = values(value_heads * KEPT, .1f, .5f);
    }

    // Product `which` of a layer, in trellis codes.
    void add_codes(LayerArgs& layer, int which, int nth) {
        const int rows = shapes[which][0], inputs = shapes[which][1], code = code_of(nth);
        with_code(code, [&](auto of) {
            using C = decltype(of);
            const size_t bytes = size_t(rows / STRIP) * (inputs / TILE) * C::UNIT;
            uint8_t* const codes = allocate<uint8_t>(bytes);
            for (size_t i = 0; i < bytes; i++) codes[i] = draw.bits();
            layer.codes[which] = codes, layer.kind[which] = {uint8_t(code), 0, 0, uint32_t(C::UNIT)};
            stage = max(stage, TEAM * C::UNIT);
        });
        __half* const scales = allocate<__half>(rows + inputs);
        const float usual = 1 / 1.16f / sqrtf(inputs);
        for (int i = 0; i < rows; i++) scales[i] = __float2half(draw.between(.5f, 1.5f) * usual);
        for (int i = 0; i < inputs; i++) scales[rows + i] = __float2half(draw.between(.5f, 1.5f) * (draw.bits() % 2 ? -1 : 1));
        layer.meta[which] = reinterpret_cast<const uint8_t*>(scales);
    }

    // Product i of layer l.
    void add_weight(LayerArgs& layer, int l, int i) {
        int rows = shape(l, i)[0], inputs = shape(l, i)[1];
        if (EXPERTS && i == GATED) rows = c.experts * 2 * c.intermediate;
        if (EXPERTS && i == DOWN) rows = c.experts * c.hidden, inputs = c.intermediate;
        const Coding of = coding<S>(c.groups, l * 4 + i);
        const int codes_bytes = of.bits * 512, meta_bytes = of.meta_bytes();
        const size_t records = size_t(rows / 16) * (inputs / 256);
        uint8_t* const codes = allocate<uint8_t>(records * codes_bytes);
        uint8_t* const meta = allocate<uint8_t>(records * meta_bytes);
        for (size_t j = 0; j < records * codes_bytes; j++) codes[j] = draw.bits();
        const float usual = 16 / 4.6f / sqrtf(inputs) / (of.table ? 128 : 1 << of.bits);   // scale
        for (size_t r = 0; r < records; r++) {
            uint8_t* at = meta + r * meta_bytes;
            __half* const scales = reinterpret_cast<__half*>(of.two_level ? at : at + of.rows_bytes());
            for (int j = of.tables_at(); j < of.rows_bytes(); j++) at[j] = draw.bits() % 121 - 60;
            for (int j = 0; j < (of.two_level ? 16 : of.groups * 16); j++)
                scales[j] = __float2half(draw.between(.5f, 1.5f) * usual / (of.two_level ? 64 : 1));
            for (int j = 16; j < of.tables_at() / 2; j++) scales[j] = __float2half(draw.between(-1e-4f, 1e-4f));
            at += of.two_level ? of.rows_bytes() : of.rows_bytes() + of.groups * 32;
            for (int j = 0; of.two_level && j < of.groups * 16; j++) *at++ = (of.zero == SYM || of.groups == 16 ? 128 : 0) + 40 + draw.bits() % 48;
            for (int j = 0; of.two_level && of.zero == OFFSET && j < of.offsets() * 16; j++) at[j] = draw.bits() % 64;
            for (int j = 0; !of.two_level && of.zero == OFFSET && j < of.groups * 16; j++) reinterpret_cast<__half*>(at)[j] = __float2half(draw.between(-.005f, .005f));
            for (int j = 0; of.zero == INT && j < of.groups * (of.bits == 4 ? 8 : 16); j++)
                at[j] = of.bits == 4 ? 0x77 + (draw.bits() & 0x11) : (1 << of.bits - 1) - 1 + draw.bits() % 2;
        }
        layer.codes[i] = codes, layer.meta[i] = meta;
        layer.kind[i] = {uint8_t(of.scheme), uint8_t(of.groups), uint16_t(meta_bytes), uint32_t(codes_bytes)};
        stage = max(stage, TEAM * (codes_bytes + meta_bytes));
    }

    void add_layer(LayerArgs& layer, int l) {
        for (int i = 0; i < 4; i++) {
            if constexpr (TRELLIS) add_codes(layer, i, l * 4 + i);
            else add_weight(layer, l, i);
        }
        layer.gains[0] = layer.gains[1] = gain.data();
        if (EXPERTS) {
            __half* const router = allocate<__half>(c.experts * c.hidden);
            for (int i = 0; i < c.experts * c.hidden; i++) router[i] = __float2half(draw.between(-100, 100));
            layer.router = router, layer.router_scale = .001f;
        }
        if (recurs(l)) return add_recurrence(layer, l);
        LayerAttention& to = layer.attention;
        to = {{{q_gain.data(), k_gain.data()}, {}}};
        const size_t rows = tables.size() * c.kv_heads * PAGE, cached = rows * DIM;
        for (void** cache : {&to.keys, &to.values}) {
            if (c.int8) {
                int8_t* const codes = allocate<int8_t>(cached);
                for (size_t i = 0; i < cached; i++) codes[i] = draw.bits() % 255 - 127;
                *cache = codes;
            } else {
                __half* const values = allocate<__half>(cached);
                for (size_t i = 0; i < cached; i++) values[i] = __float2half(draw.between(-1, 1));
                *cache = values;
            }
        }
        if (!c.int8) return;
        for (__half** scales : {&to.key_scales, &to.value_scales}) {
            *scales = allocate<__half>(rows);
            for (size_t i = 0; i < rows; i++) (*scales)[i] = __float2half(draw.between(.5f, 1.f) / 127);
        }
    }

    // As `LayersPlan::room` of `step_layers.rs`.
    void lay_out() {
        int end = (LayersBlock<int4_int_64, false, false, false>::COUNTS + max(c.hidden / 8, TRELLIS ? args.shape[0].tiles + args.shape[1].tiles + args.shape[2].tiles + args.shape[3].tiles : 0) + 127) / 128 * 128;
        auto take = [&](int bytes) {
            const int at = end;
            end += (bytes + 127) / 128 * 128;
            return at;
        };
        auto digits = [](int inputs) { return TRELLIS ? inputs / BLOCK * block_words(true) * 4 : inputs / 256 * int(sizeof(SpanDigits)); };
        const int inner = max(width, c.chosen * c.intermediate);
        args.at.digits[0] = take(digits(CLUSTERED ? c.hidden : max(c.hidden, inner)));
        args.at.digits[1] = CLUSTERED ? take(digits(inner)) : args.at.digits[0];
        const int ranks = CLUSTERED ? CLUSTER : c.blocks;
        const int each = TRELLIS ? BLOCK : 64;   // inputs that a warp gathers together
        args.at.x = take((c.hidden / each + ranks - 1) / ranks * each * 4);
        for (uint64_t*& words : args.digits) words = allocate<uint64_t>(digits(max(c.hidden, inner)) / 4);
        args.at.sums = take(max(2 * LAYERS_WARPS * LAYERS_WARPS * 64, int(sizeof(AttentionRoom))));
        args.at.queries = take((GROUP + 1) * DIM * 4);
        args.at.ring = take(args.depth * stage);
        if (end > int(SHARED_BYTES)) throw "more shared memory than a block has";
    }

    // In trellis codes.
    Values product_of_codes(const LayerArgs& layer, int which, const Values& inputs) const {
        Values turned(inputs), out(shapes[which][0]);
        const __half* const scales = reinterpret_cast<const __half*>(layer.meta[which]);
        for (size_t k = 0; k < turned.size(); k++) turned[k] *= __half2float(scales[out.size() + k]);
        for (size_t k = 0; k < turned.size(); k += BLOCK) transform(&turned[k]);
        const int tiles = inputs.size() / TILE;
        with_code(layer.kind[which].scheme, [&](auto of) {
            using C = decltype(of);
            for (size_t unit = 0; unit < out.size() / STRIP * tiles; unit++) {
                const int row0 = unit / tiles * STRIP, column0 = unit % tiles * TILE;
                each_weight<C>(reinterpret_cast<const uint32_t*>(layer.codes[which] + unit * C::UNIT),
                               [&](int row, int column, double v) { out[row0 + row] += v * turned[column0 + column]; });
            }
        });
        for (size_t r = 0; r < out.size(); r++) out[r] *= __half2float(scales[r]);
        return out;
    }

    // Of all rows, or of those of an expert.
    Values product(int l, int which, const Values& inputs, int expert = -1) const {
        const LayerArgs& layer = args.layer[l];
        if constexpr (TRELLIS) return product_of_codes(layer, which, inputs);
        else return product_of_records(layer, l, which, inputs, expert);
    }
    Values product_of_records(const LayerArgs& layer, int l, int which, const Values& inputs, int expert) const {
        const Coding of = coding<S>(c.groups, l * 4 + which);
        const int all = inputs.size(), some = which == GATED ? 2 * c.intermediate : c.hidden;
        const PackedWeight w = {layer.codes[which], layer.meta[which],  expert < 0 ? shape(l, which)[0] : c.experts * some, all, all / 256, of.bits,
                                int16_t(of.zero),   of.two_level, of.table, of.groups, of.meta_bytes(),  1.f};
        const int first = expert < 0 ? 0 : expert * some;
        Values out(expert < 0 ? w.rows : some);
        for (size_t r = 0; r < out.size(); r++)
            for (int k = 0; k < all; k++) out[r] += double(element(w, first + r, k)) * inputs[k];
        return out;
    }

    Values gated(const Values& both) const {
        Values out(c.intermediate);
        for (int i = 0; i < c.intermediate; i++) {
            const int each = TRELLIS ? STRIP : 8;   // of gate and of up in turn
            const double gate = both[i / each * (2 * each) + i % each], up = both[i / each * (2 * each) + i % each + each];
            out[i] = gate / (1 + exp(-gate)) * up;
        }
        return out;
    }

    // What the mixture of layer l makes of `inputs`.
    Values mixture(int l, const Values& inputs) const {
        const LayerArgs& layer = args.layer[l];
        const int routed = c.experts - c.shared;
        std::vector<std::pair<double, int>> scores;   // the greatest first
        double all = 0, some = 0, own = 0;
        for (int e = 0; e < c.experts; e++) {
            double score = 0;
            for (int i = 0; i < c.hidden; i++) score += inputs[i] * __half2float(layer.router[e * c.hidden + i]) * layer.router_scale;
            if (e < routed) scores.push_back({-score, e}), all += exp(score);
            else own = 1 / (1 + exp(-score));
        }
        std::sort(scores.begin(), scores.end());
        scores.resize(c.chosen - c.shared);
        for (auto& [score, e] : scores) some += exp(-score);
        if (c.shared) scores.push_back({0, routed});
        Values out(c.hidden);
        for (auto& [score, e] : scores) {
            const double weight = e == routed ? own : exp(-score) / (c.normalized ? some : all);
            const Values down = product(l, DOWN, gated(product(l, GATED, inputs, e)), e);
            for (int i = 0; i < c.hidden; i++) out[i] += weight * down[i];
        }
        return out;
    }

    Values normalized(const Values& of) const {
        double square = 0;
        for (double v : of) square += v * v;
        Values out(of);
        for (int i = 0; i < c.hidden; i++) out[i] *= gain[i] / sqrt(square / c.hidden + 1e-6);
        return out;
    }

    // Norm and rotary embedding of a head.
    void turn(double* head, const std::vector<float>& gains) const {
        double square = 0;
        for (int i = 0; i < DIM; i++) square += head[i] * head[i];
        for (int i = 0; i < DIM; i++) head[i] *= gains[i] / sqrt(square / DIM + 1e-6);
        for (int i = 0; i < ROTATED / 2; i++) {
            const float2 angle = cos_sin[c.position * (ROTATED / 2) + i];
            const double a = head[i], b = head[i + ROTATED / 2];
            head[i] = a * angle.x - b * angle.y, head[i + ROTATED / 2] = b * angle.x + a * angle.y;
        }
    }

    // Of key head `kv` at a position: what the cache has, or at the last position the new values.
    double cached(const LayerAttention& layer, bool keys, int kv, int position, int dim, const double* fresh) const {
        if (position == c.position) {
            if (!c.int8) return __half2float(__float2half(float(fresh[dim])));
            double top = 0;
            for (int i = 0; i < DIM; i++) top = max(top, fabs(fresh[i]));
            const float scale = __half2float(__float2half(float(top / 127)));
            return std::clamp(nearbyint(fresh[dim] / scale), -127., 127.) * scale;
        }
        const size_t head = size_t(tables[position / PAGE]) * c.kv_heads + kv;
        const size_t at = keys ? (head * PAGE + position % PAGE) * DIM + dim : (head * DIM + dim) * PAGE + position % PAGE;
        const void* const cache = keys ? layer.keys : layer.values;
        if (!c.int8) return __half2float(static_cast<const __half*>(cache)[at]);
        return static_cast<const int8_t*>(cache)[at] * double(__half2float((keys ? layer.key_scales : layer.value_scales)[head * PAGE + position % PAGE]));
    }

    Values attention(int l, Values qkv) const {
        const LayerAttention& layer = args.layer[l].attention;
        for (int h = 0; h < heads; h++) turn(&qkv[Of::query(h) * DIM], q_gain);
        for (int kv = 0; kv < c.kv_heads; kv++) turn(&qkv[Of::key(heads, kv) * DIM], k_gain);
        Values out(width);
        for (int h = 0; h < heads; h++) {
            const int kv = h / GROUP;
            const double *query = &qkv[Of::query(h) * DIM], *key = &qkv[Of::key(heads, kv) * DIM], *value = &qkv[Of::key(heads, c.kv_heads + kv) * DIM];
            Values scores(c.position + 1);
            double top = -INFINITY, all = 0;
            for (int p = 0; p <= c.position; p++) {
                for (int d = 0; d < DIM; d++) scores[p] += query[d] * cached(layer, true, kv, p, d, key);
                top = max(top, scores[p] /= sqrt(double(DIM)));
            }
            for (double& score : scores) all += score = exp(score - top);
            for (int d = 0; d < DIM; d++) {
                for (int p = 0; p <= c.position; p++) out[h * DIM + d] += scores[p] / all * cached(layer, false, kv, p, d, value);
                if (HYBRID) out[h * DIM + d] /= 1 + exp(-qkv[Of::gate(h) * DIM + d]);
            }
        }
        return out;
    }

    // What the recurrence of layer l adds to the products `qkvz` of the inputs `x`.
    Values recurrence(int l, const Values& x, const Values& qkvz) const {
        const LayerRecurrence& of = args.layer[l].recurrence;
        const DeltaLayer& delta = of.delta;
        auto silu = [](double v) { return v / (1 + exp(-v)); };
        Values mixed(channels), out(width);
        for (int i = 0; i < channels; i++) {
            mixed[i] = delta.conv[i * CONV + CONV - 1] * qkvz[i];
            for (int j = 1; j < CONV; j++)
                if (c.position >= j) mixed[i] += delta.conv[i * CONV + CONV - 1 - j] * delta.input(0, c.position - j)[i];
            mixed[i] = silu(mixed[i]);
        }
        for (int h = 0; h < value_heads; h++) {
            const int key_head = c.tiled ? h % c.key_heads : h / (value_heads / c.key_heads);
            auto unit = [&](int at) {
                Values v(mixed.begin() + at, mixed.begin() + at + 128);
                double square = 1e-6;
                for (double e : v) square += e * e;
                for (double& e : v) e /= sqrt(square);
                return v;
            };
            const Values q = unit(key_head * 128), k = unit((c.key_heads + key_head) * 128);
            std::vector<Values> state(128, Values(128));   // [value][key]
            const float* const matrix = delta.matrix(0, h);
            for (int v = 0; v < 128 && c.position > 0; v++)
                for (int i = 0; i < 128; i++) state[v][i] = matrix[v / 8 * OF_EIGHT + i / 8 * 64 + v % 8 * 8 + i % 8];
            auto feed = [&](Values& s, auto&& key, double value, double decay, double beta) {
                double d = 0;
                for (int i = 0; i < 128; i++) d += (s[i] *= decay) * key(i);
                d = beta * (value - d);
                for (int i = 0; i < 128; i++) s[i] += key(i) * d;
            };
            double b = 0, a = 0;
            for (int i = 0; i < c.hidden; i++) {
                b += x[i] * __half2float(of.rates[h * c.hidden + i]) * of.scale;
                a += x[i] * __half2float(of.rates[(value_heads + h) * c.hidden + i]) * of.scale;
            }
            const double decay = exp(delta.decay[h] * log1p(exp(a + delta.dt_bias[h]))), beta = 1 / (1 + exp(-b));
            double square = 0;
            for (int v = 0; v < 128; v++) {
                for (int r = 0; r < c.behind; r++) {
                    const float* const kept = of.kept + h * KEPT + r * KEPT_ROW;
                    feed(state[v], [&](int i) { return double(kept[i]) * kept[258]; }, kept[128 + v], kept[256], kept[257]);
                }
                feed(state[v], [&](int i) { return k[i]; }, mixed[2 * delta.keys() + h * 128 + v], decay, beta);
                double& o = out[h * 128 + v];
                for (int i = 0; i < 128; i++) o += state[v][i] * q[i] / sqrt(128.);
                square += o * o;
            }
            for (int v = 0; v < 128; v++) out[h * 128 + v] *= delta.norm[v] / sqrt(square / 128 + 1e-6) * silu(qkvz[channels + h * 128 + v]);
        }
        return out;
    }

    Values expected() const {
        Values x(this->x.begin(), this->x.end());
        for (int l = 0; l < c.layers; l++) {
            const Values inputs = normalized(x), qkv = product(l, QKV, inputs);
            const Values o = product(l, OUT, recurs(l) ? recurrence(l, inputs, qkv) : attention(l, qkv));
            for (int i = 0; i < c.hidden; i++) x[i] += o[i];
            const Values down = EXPERTS ? mixture(l, normalized(x)) : product(l, DOWN, gated(product(l, GATED, normalized(x))));
            for (int i = 0; i < c.hidden; i++) x[i] += down[i];
        }
        return x;
    }

    // Runs steps of ranks side by side, each of which begins with what it had at first. Returns the last x of each.
    static std::vector<std::vector<float>> run(const std::vector<Model*>& ranks, unsigned seed, int steps) {
        std::vector<std::vector<float>> out, before;
        for (Model* m : ranks) out.push_back(m->x), before.emplace_back(m->states, m->states + m->state_values);
        for (size_t r = 0; r < ranks.size(); r++) ranks[r]->args.x = out[r].data();
        auto kernel = [&] {
            for (int i = 0; i < steps; i++) {
                if (i > 0) meet_kernel();   // a step begins when that before has ended on its rank, whatever others do
                step_layers<S, HYBRID, EXPERTS, false>(ranks[this_kernel()]->args);
            }
        };
        launch(ranks[0]->c.blocks, (LAYERS_WARPS + Copies::WARPS) * 32, seed, kernel, ranks.size());
        for (size_t r = 0; r < ranks.size(); r++) {
            Model* const m = ranks[r];
            m->after.assign(m->states, m->states + m->state_values);
            std::copy(before[r].begin(), before[r].end(), m->states);
        }
        return out;
    }
    std::vector<float> run(unsigned seed, int steps = 1) { return run({this}, seed, steps)[0]; }

    // The rank-th of `ranks` parts of `whole`, whose case it has with as many times fewer heads and less width.
    void take(const Model& whole, int rank, int ranks) {
        for (auto [to, from] : {std::pair{&x, &whole.x}, {&gain, &whole.gain}, {&q_gain, &whole.q_gain}, {&k_gain, &whole.k_gain}})
            std::copy(from->begin(), from->end(), to->begin());
        std::copy(whole.cos_sin.begin(), whole.cos_sin.end(), cos_sin.begin());
        args.rank = rank, args.ranks = ranks;
        // Where heads are in the whole model.
        auto key = [&](int h) { return rank * c.key_heads + h; };
        auto value = [&](int h) { return c.tiled ? h / c.key_heads * whole.c.key_heads + key(h % c.key_heads) : rank * value_heads + h; };
        auto cached = [&](int h) { return rank * c.kv_heads + h; };
        // The heads of the first product's rows.
        std::vector<int> of_attention(Of::width(heads, c.kv_heads)), of_recurrence;
        for (int h = 0; h < heads; h++) {
            of_attention[Of::query(h)] = Of::query(rank * heads + h);
            if (Of::GATED) of_attention[Of::gate(h)] = Of::gate(rank * heads + h);
        }
        for (int i : {0, 1})
            for (int h = 0; h < c.kv_heads; h++) of_attention[Of::key(heads, i * c.kv_heads + h)] = Of::key(whole.heads, i * whole.c.kv_heads + cached(h));
        for (int i : {0, 1})
            for (int h = 0; h < c.key_heads; h++) of_recurrence.push_back(i * whole.c.key_heads + key(h));
        for (int i : {0, 1})
            for (int h = 0; h < value_heads; h++) of_recurrence.push_back(2 * whole.c.key_heads + i * whole.value_heads + value(h));
        for (int l = 0; l < c.layers; l++) {
            LayerArgs& to = args.layer[l];
            const LayerArgs& from = whole.args.layer[l];
            for (int which = 0; which < 4; which++) {
                const bool rows = which == QKV || which == GATED;
                const int stacks = EXPERTS && which >= GATED ? c.experts : 1, part = EXPERTS && which >= GATED ? c.chosen : 1;
                const int tiles = shape(l, which)[0] / 16 / (which == GATED ? part : 1), spans = shape(l, which)[1] / 256 / (which == DOWN ? part : 1);
                auto place = [&](int stack, int tile, int span) {
                    if (which == QKV) {
                        const int each = (recurs(l) ? 128 : DIM) / 16;
                        tile = (recurs(l) ? of_recurrence : of_attention)[tile / each] * each + tile % each;
                    } else if (which == GATED) {
                        tile += rank * tiles;
                    } else {
                        // A span has two heads of a recurrence.
                        span = which == OUT && recurs(l) ? value(2 * span) / 2 : rank * spans + span;
                    }
                    return (size_t(stack) * tiles * (which == GATED ? ranks : 1) + tile) * spans * (rows ? 1 : ranks) + span;
                };
                for (int i = 0; i < stacks * tiles * spans; i++) {
                    const size_t at = place(i / spans / tiles, i / spans % tiles, i % spans), codes = to.kind[which].codes_bytes, meta = to.kind[which].meta_bytes;
                    copy(to.codes[which] + i * codes, from.codes[which] + at * codes, codes);
                    copy(to.meta[which] + i * meta, from.meta[which] + at * meta, meta);
                }
            }
            if (EXPERTS) copy(to.router, from.router, c.experts * c.hidden);
            if (recurs(l)) {
                const LayerRecurrence &mine = to.recurrence, &all = from.recurrence;
                copy(mine.delta.norm, all.delta.norm, 128);
                for (int h = 0; h < value_heads; h++) {
                    copy(mine.delta.decay + h, all.delta.decay + value(h), 1), copy(mine.delta.dt_bias + h, all.delta.dt_bias + value(h), 1);
                    copy(mine.delta.matrix(0, h), all.delta.matrix(0, value(h)), MATRIX);
                    if (c.behind > 0) copy(mine.kept + h * KEPT, all.kept + value(h) * KEPT, KEPT);
                    for (int i : {0, 1}) copy(mine.rates + (i * value_heads + h) * c.hidden, all.rates + (i * whole.value_heads + value(h)) * c.hidden, c.hidden);
                }
                for (int h = 0; h < channels / 128; h++) {
                    copy(mine.delta.conv + h * 128 * CONV, all.delta.conv + of_recurrence[h] * 128 * CONV, 128 * CONV);
                    for (int i = 0; i < INPUTS; i++) copy(mine.delta.input(0, i) + h * 128, all.delta.input(0, i) + of_recurrence[h] * 128, 128);
                }
                continue;
            }
            const LayerAttention &mine = to.attention, &all = from.attention;
            const size_t bytes = PAGE * DIM * (c.int8 ? 1 : 2);
            for (size_t i = 0; i < tables.size() * c.kv_heads; i++) {
                const size_t head = i / c.kv_heads * whole.c.kv_heads + cached(i % c.kv_heads);
                for (auto [own, other] : {std::pair{mine.keys, all.keys}, {mine.values, all.values}})
                    copy(static_cast<uint8_t*>(own) + i * bytes, static_cast<const uint8_t*>(other) + head * bytes, bytes);
                if (!c.int8) continue;
                for (auto [own, other] : {std::pair{mine.key_scales, all.key_scales}, {mine.value_scales, all.value_scales}})
                    copy(own + i * PAGE, other + head * PAGE, PAGE);
            }
        }
    }
    template <class T>
    static void copy(const T* to, const T* from, size_t n) { std::copy(from, from + n, const_cast<T*>(to)); }

    // The parts of a model, that reach each other.
    static std::vector<std::unique_ptr<Model>> split(const Model& whole, int ranks) {
        std::vector<std::unique_ptr<Model>> all;
        Case c = whole.c;
        c.kv_heads /= ranks, c.intermediate /= ranks, c.key_heads /= ranks;
        const size_t parts = ranks * MOST_PARTS * c.hidden;
        for (int r = 0; r < ranks; r++) {
            all.push_back(std::make_unique<Model>(c));
            all[r]->take(whole, r, ranks);
            uint64_t* const own = allocate<uint64_t>(2 * parts);
            all[r]->args.parts[0] = own, all[r]->args.parts[1] = own + parts;
        }
        for (auto& m : all)
            for (int r = 0; r < ranks; r++) m->args.peers[r] = all[r]->args.parts[0];
        return all;
    }
};

// Mean square of the difference, over that of what is expected.
template <class T>
double nmse(const std::vector<float>& found, const std::vector<T>& expected) {
    double error = 0, square = 0;
    for (size_t i = 0; i < found.size(); i++) {
        error += (found[i] - expected[i]) * (found[i] - expected[i]);
        square += double(expected[i]) * expected[i];
    }
    return error / square;
}

template <class M>
void print(const char* scheme, const M& model) {
    const Case& c = model.c;
    printf("%s%shidden %d, %d key heads of %d, intermediate %d, %s: %d blocks, %d layers, position %d%s", model.states ? "hybrid, " : "", c.experts ? "mixture, " : "",
           c.hidden, c.kv_heads, model.args.group, c.intermediate, scheme, c.blocks, c.layers, c.position, c.int8 ? ", int8" : "");
}

}   // namespace
