// The kernels of residuals of several streams, of tables of n-grams and of indexers on the host, against plain sums.
#include "hyper.cu"
#include "indexer.cu"

int passed = 0, failed = 0;

void check(const char* what, double worst, double most) {
    const bool right = worst <= most;
    (right ? passed : failed)++;
    if (!right) printf("%s: differs by %g\n", what, worst);
}

uint32_t state = 7;
float drawn() {
    state = state * 1664525 + 1013904223;
    return float(int(state >> 8) - (1 << 23)) / (1 << 22);
}
std::vector<float> draw(size_t n, float scale = 1.f) {
    std::vector<float> v(n);
    for (float& x : v) x = drawn() * scale;
    return v;
}
double gate(double x) { return 1 / (1 + exp(-x)); }

void streams() {
    const int m = 3, width = 264, streams = 3, channels = width * streams, padded = 1024, rank = 20;
    const std::vector<float> x = draw(4 * channels), gain = draw(channels);
    const uint32_t rows[m] = {3, 0, 2};
    std::vector<float> n(m * channels, 9.f);
    std::vector<__half> half(m * padded, __float2half(9.f));
    NormStreamsArgs norm = {x.data(), rows, gain.data(), n.data(), half.data(), width, streams, padded, 1e-6f};
    launch(Grid(m, streams), STREAM_THREADS, 1, [&] { norm_streams(norm); });
    double worst = 0, rounded = 0;
    for (int i = 0; i < m; i++)
        for (int k = 0; k < padded; k++) {
            double wanted = 0;
            if (k < channels) {
                const float* of = &x[rows[i] * channels + k / width * width];
                double square = 0;
                for (int j = 0; j < width; j++) square += double(of[j]) * of[j];
                wanted = of[k % width] / sqrt(square / width + 1e-6) * gain[k];
                worst = std::max<double>(worst, fabs(wanted - n[i * channels + k]));
            }
            rounded = std::max<double>(rounded, fabs(wanted - __half2float(half[i * padded + operand_index(k)])));
        }
    check("norms of streams", worst, 1e-5), check("norms of streams in FP16", rounded, 4e-3);

    const std::vector<float> low = draw(2 * m * rank, 4.f), logits = draw(3 * m * streams, 4.f);
    std::vector<float> weights(m * streams);
    std::vector<__half> activated(m * 256, __float2half(9.f));
    ActivateArgs activate = {{low.data(), 2, rank}, {logits.data(), 3, streams}, activated.data(), weights.data(), 256, streams, m};
    launch(m, STREAM_THREADS, 1, [&] { activate_streams(activate); });
    worst = 0;
    for (int i = 0; i < m; i++)
        for (int k = 0; k < 256; k++) {
            const double v = k < rank ? (double(low[i * rank + k]) + low[(m + i) * rank + k]) / streams : 0;
            worst = std::max<double>(worst, fabs(v * gate(v) - __half2float(activated[i * 256 + operand_index(k)])));
            if (k >= streams) continue;
            double sum = 0;
            for (int part = 0; part < 3; part++) sum += logits[(part * m + i) * streams + k];
            worst = std::max<double>(worst, fabs(2 * gate(sum / streams) - weights[i * streams + k]));
        }
    check("what weighs streams", worst, 2e-3);

    const std::vector<float> gates = draw(m * channels, 3.f);
    std::vector<float> y(m * width), added(m * width, 5.f);
    std::vector<__half> read(m * 512, __float2half(9.f));
    MixStreamsArgs mix = {n.data(), gates.data(), y.data(), read.data(), added.data(), width, streams, 512};
    launch(Grid(m, 1), STREAM_THREADS, 1, [&] { mix_streams(mix); });
    worst = rounded = 0;
    for (int i = 0; i < m; i++)
        for (int k = 0; k < 512; k++) {
            double wanted = 0;
            for (int c = 0; c < streams && k < width; c++) {
                const int at = i * channels + c * width + k;
                wanted += gate(gates[at]) * n[at] / streams;
            }
            if (k < width) worst = std::max<double>({worst, fabs(wanted - y[i * width + k]), fabs(added[i * width + k])});
            rounded = std::max<double>(rounded, fabs(wanted - __half2float(read[i * 512 + operand_index(k)])));
        }
    check("what is read of streams", worst, 1e-5), check("what is read of streams in FP16", rounded, 4e-3);

    std::vector<float> to(m * channels), before;
    SpreadArgs spread = {y.data(), to.data(), width, streams};
    launch(Grid(m, streams), STREAM_THREADS, 1, [&] { spread_streams(spread); });
    before = to;
    InjectArgs inject = {y.data(), weights.data(), to.data(), width, streams};
    launch(Grid(m, 2), STREAM_THREADS, 1, [&] { inject_streams(inject); });
    worst = 0;
    for (int i = 0; i < m * channels; i++) {
        const double v = y[i / channels * width + i % width];
        worst = std::max<double>({worst, fabs(before[i] - v), fabs(to[i] - v - weights[i / channels * streams + i % channels / width] * v)});
    }
    check("what streams get", worst, 1e-5);

    const std::vector<float> keys = draw(m * channels), values = draw(m * width);
    GateNgramsArgs gated = {keys.data(), n.data(), values.data(), to.data(), width, streams};
    launch(Grid(m, streams), STREAM_THREADS, 1, [&] { gate_ngrams(gated); });
    worst = 0;
    for (int i = 0; i < m * streams; i++) {
        double s = 0;
        for (int k = 0; k < width; k++) s += double(keys[i * width + k]) * n[i * width + k];
        s /= sqrt(double(width));
        const double g = gate((s < 0 ? -1 : 1) * sqrt(std::max(fabs(s), 1e-6)));
        for (int k = 0; k < width; k++) worst = std::max<double>(worst, fabs(g * values[i / streams * width + k] - to[i * width + k]));
    }
    check("gates of n-grams", worst, 1e-5);
}

// What a block reads of few rows, behind what another has added, with weights of FP16 in records.
void few_rows(int m, int width, int streams, int rank) {
    const int channels = width * streams, spans = (channels + 255) / 256, low_tiles = (rank + 15) / 16, outputs = 16 * (low_tiles + 1);
    const int parts = (spans + LOW_SPANS - 1) / LOW_SPANS, up_spans = (rank + 255) / 256;
    const std::vector<float> x = draw(m * channels), added = draw(m * width), by = draw(m * streams), gain = draw(channels);
    auto packed = [&](const std::vector<float>& w, int rows, int inputs) {
        const int spans = (inputs + 255) / 256;
        std::vector<__half> records(size_t((rows + 15) / 16) * spans * RECORD_WORDS * 8, __float2half(0.f));
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < inputs; k++) {
                const int c = k % 256 / 32, i = k % 8, lane = r % 8 * 4 + k % 32 / 8;
                const size_t record = size_t(r / 16) * spans + k / 256;
                records[record * RECORD_WORDS * 8 + ((2 * c + i / 4) * 32 + lane) * 8 + i % 4 / 2 * 4 + r % 16 / 8 * 2 + i % 2] = __float2half(w[r * inputs + k]);
            }
        return records;
    };
    auto halves = [&](std::vector<float> w) {
        for (float& v : w) v = __half2float(__float2half(v));
        return w;
    };
    const std::vector<float> down = halves(draw(rank * channels, .1f)), inject = halves(draw(streams * channels, .1f)), up = halves(draw(channels * rank));
    const std::vector<__half> down_on = packed(down, rank, channels), inject_on = packed(inject, streams, channels), up_on = packed(up, channels, rank);
    std::vector<float> joined(m * channels), sums(parts * m * outputs), scales(m * streams), y(m * width), zero(m * width, 1.f), weights(m * streams);
    auto words = [](const std::vector<__half>& v) { return reinterpret_cast<const uint4*>(v.data()); };
    ContractLowArgs low = {x.data(), added.data(), by.data(), joined.data(), gain.data(), words(down_on), words(inject_on), sums.data(), scales.data(),
                           m, streams, width, low_tiles, spans, outputs, 1e-6f, 2.f, .5f};
    launch(Grid(low_tiles + 1, parts), LOW_THREADS, 1, [&] { contract_low(low); });
    ContractMixArgs mix = {sums.data(), joined.data(), scales.data(), gain.data(), words(up_on), y.data(), zero.data(), weights.data(),
                           parts, m, streams, width, rank, 16 * low_tiles, outputs, up_spans, .25f};
    launch(Grid(width / 16, 1), streams * 32, 1, [&] { contract_mix(mix); });
    double of_joined = 0, of_weights = 0, of_read = 0;
    for (int i = 0; i < m; i++) {
        std::vector<double> n(channels), mixed(rank), read(width);
        for (int c = 0; c < streams; c++) {
            double square = 0;
            for (int k = 0; k < width; k++) {
                const double v = x[(i * streams + c) * width + k] + double(by[i * streams + c]) * added[i * width + k];
                of_joined = std::max<double>(of_joined, fabs(v - joined[(i * streams + c) * width + k]));
                n[c * width + k] = v, square += v * v;
            }
            for (int k = 0; k < width; k++) n[c * width + k] *= gain[c * width + k] / sqrt(square / width + 1e-6);
        }
        for (int r = 0; r < rank + streams; r++) {
            double sum = 0;
            for (int k = 0; k < channels; k++) sum += n[k] * (r < rank ? 2. * down[r * channels + k] : .5 * inject[(r - rank) * channels + k]) / streams;
            if (r < rank) mixed[r] = sum * gate(sum);
            else of_weights = std::max<double>(of_weights, fabs(2 * gate(sum) - weights[i * streams + r - rank]));
        }
        for (int k = 0; k < channels; k++) {
            double sum = 0;
            for (int r = 0; r < rank; r++) sum += .25 * up[k * rank + r] * mixed[r];
            read[k % width] += gate(sum) * n[k] / streams;
        }
        for (int k = 0; k < width; k++) of_read = std::max<double>(of_read, fabs(read[k] - y[i * width + k]));
    }
    check("streams with what was added", of_joined, 1e-6), check("weights of streams of few rows", of_weights, 4e-3);
    check("what is read of few rows", of_read, 2e-2), check("what blocks add to", *std::max_element(zero.begin(), zero.end()), 0);
}

// Two sequences in pieces, one with a snapshot, against the whole of each at once.
void convolutions() {
    const int channels = 300, taps = 4, dilation = 3, kept_rows = 9, length = 25, places = 4;
    const std::vector<float> w = draw(channels * taps);
    std::vector<float> kept(places * kept_rows * channels, 3.f);
    std::vector<float> all[2] = {draw(length * channels), draw(length * channels)};
    auto wanted = [&](int s, int t, int c) {
        double sum = 0;
        for (int i = 0; i < taps; i++) {
            const int from = t - (taps - 1 - i) * dilation;
            if (from >= 0) sum += double(w[c * taps + i]) * all[s][from * channels + c];
        }
        return sum * gate(sum) + 1.5;
    };
    double worst = 0, states = 0;
    const int ends[] = {2, 3, 14, 24, 25};
    int position = 0;
    for (const int end : ends) {
        const int count = end - position, m = 2 * count;
        ConvolveNgramsArgs args = {};
        std::vector<float> normed, gated(m * channels, .5f), x(m * channels, 1.f);
        for (auto& of : all) normed.insert(normed.end(), of.begin() + position * channels, of.begin() + end * channels);
        args.normed = normed.data(), args.gated = gated.data(), args.taps = w.data(), args.x = x.data();
        args.kept = {kept.data(), kept_rows * channels};
        args.channels = channels, args.count = taps, args.dilation = dilation;
        const int mark = count > 5 ? 4 : 0;
        const StreamSpan spans[2] = {{0, count, position, 2, mark, 3}, {count, count, position, 0, 0, 0}};
        args.spans = spans;
        launch(Grid(2, 2), STREAM_THREADS, 1, [&] { convolve_ngrams(args); });
        for (int i = 0; i < m * channels; i++)
            worst = std::max<double>(worst, fabs(x[i] - wanted(i / channels / count, position + i / channels % count, i % channels)));
        auto compare = [&](int place, int s, int end) {
            for (int i = 0; i < kept_rows * channels; i++) {
                const int t = end - kept_rows + i / channels;
                states = std::max<double>(states, fabs(kept[place * kept_rows * channels + i] - (t < 0 ? 0 : all[s][t * channels + i % channels])));
            }
        };
        compare(2, 0, end), compare(0, 1, end);
        if (mark) compare(3, 0, position + mark);
        position = end;
    }
    check("convolutions in pieces", worst, 1e-5), check("rows that convolutions keep", states, 0);
}

// A sequence in pieces: keys of blocks, scores, what is chosen of them, and attention.
void sparse() {
    const int heads = 5, block = 4, most = 6, length = 150, places = 3, slot = 1, place = 2, q_heads = 6, kv_heads = 2, group = 3, DIM = 256;
    const int table_len = 2, stride = 40, each = PAGE / block;
    const uint32_t tables[2 * table_len] = {0, 0, 2, 1};
    const std::vector<float> q_gain = draw(INDEX_DIM), k_gain = draw(INDEX_DIM);
    std::vector<float> raw = draw(length * (heads + 1) * INDEX_DIM);
    // A block whose keys are those of another's ties with it, but for where they stand: all angles are 0.
    std::vector<float2> turns(256 * 32, make_float2(1.f, 0.f));
    for (int t = 0; t < length; t++)
        if (t / block == 9) std::copy_n(&raw[((t - 16) * (heads + 1) + heads) * INDEX_DIM], INDEX_DIM, &raw[(t * (heads + 1) + heads) * INDEX_DIM]);
    std::vector<float> keys(3 * each * INDEX_DIM, 4.f), kept(places * block * INDEX_DIM, 4.f);
    std::vector<std::vector<double>> block_keys;
    for (int b = 0; b < length / block; b++) {
        std::vector<double> mean(INDEX_DIM);
        double square = 0;
        for (int k = 0; k < INDEX_DIM; k++) {
            for (int i = 0; i < block; i++) mean[k] += raw[((b * block + i) * (heads + 1) + heads) * INDEX_DIM + k] / block;
            square += mean[k] * mean[k];
        }
        for (int k = 0; k < INDEX_DIM; k++) mean[k] *= k_gain[k] / sqrt(square / INDEX_DIM + 1e-6);
        block_keys.push_back(mean);
    }
    std::vector<__half> cache_keys(3 * kv_heads * PAGE * DIM), cache_values(3 * kv_heads * PAGE * DIM);
    for (auto* all : {&cache_keys, &cache_values})
        for (auto& v : *all) v = __float2half(drawn());
    auto page_of = [&](int t) { return tables[slot * table_len + t / PAGE]; };
    const int of_row = (2 * q_heads + 2 * kv_heads) * DIM;
    const std::vector<float> qkv = draw(length * of_row);

    int position = 0, row_count = 0;
    double worst_key = 0, worst_raw = 0, wrong = 0, worst = 0, rounded = 0;
    for (const int end : {1, 3, 9, 70, 71, 72, 73, 150}) {
        const int count = end - position, padded = (q_heads * DIM + 255) / 256 * 256;
        std::vector<Row> rows;
        for (int t = position; t < end; t++) rows.push_back({t, slot, 0});
        std::vector<float> index(raw.begin() + position * (heads + 1) * INDEX_DIM, raw.begin() + end * (heads + 1) * INDEX_DIM);
        IndexArgs args = {};
        args.index = index.data(), args.rows = rows.data(), args.q_gain = q_gain.data(), args.k_gain = k_gain.data(), args.cos_sin = turns.data();
        args.blocks = {keys.data(), tables, table_len, block}, args.kept = {kept.data(), block * INDEX_DIM};
        args.m = count, args.heads = heads, args.eps = 1e-6f;
        const int mark = count >= 5 ? 5 : 0;
        const StreamSpan span = {0, count, position, slot, mark, place};
        args.spans = &span;
        launch(Grid(count, 2), INDEX_THREADS, 1, [&] { index_queries(args); });
        launch(Grid(2, 1), INDEX_THREADS, 1, [&] { index_keys(args); });
        launch(Grid(1, 1), INDEX_THREADS, 1, [&] { keep_index_keys(args); });
        for (int b = 0; b < end / block; b++)
            for (int k = 0; k < INDEX_DIM; k++)
                worst_key = std::max<double>(worst_key, fabs(block_keys[b][k] - keys[(page_of(b * block) * each + b * block % PAGE / block) * INDEX_DIM + k]));
        auto compare = [&](int at, int end) {
            for (int t = std::max(0, end - block); t < end; t++)
                for (int k = 0; k < INDEX_DIM; k++)
                    worst_raw = std::max<double>(worst_raw, fabs(kept[(at * block + t % block) * INDEX_DIM + k] - raw[(t * (heads + 1) + heads) * INDEX_DIM + k]));
        };
        compare(slot, end);
        if (mark) compare(place, position + mark);

        std::vector<float> scores(count * stride, -1.f);
        std::vector<uint32_t> chosen(count * most, 999);
        ScoresArgs of_scores = {index.data(), rows.data(), args.blocks, scores.data(), chosen.data(), heads, most, stride, 0, count};
        launch(Grid(2, (count + SCORED_ROWS - 1) / SCORED_ROWS), INDEX_THREADS, 1, [&] { index_scores(of_scores); });
        launch(count, CHOOSE_THREADS, 1, [&] { choose_blocks(of_scores); });
        const int splits = count < 8 ? 3 : 1;
        std::vector<float> sums(count * kv_heads * splits * group * DIM), out(count * q_heads * DIM);
        std::vector<float2> scales(count * kv_heads * splits * group);
        std::vector<__half> half(count * padded);
        AttendArgs attend = {};
        attend.qkv = qkv.data() + position * of_row, attend.rows = rows.data(), attend.chosen = chosen.data();
        attend.cache.keys = cache_keys.data(), attend.cache.values = cache_values.data(), attend.cache.tables = tables;
        attend.cache.kv_heads = kv_heads, attend.cache.table_len = table_len;
        attend.sums = sums.data(), attend.scales = scales.data(), attend.half = half.data(), attend.out = out.data();
        attend.heads = q_heads, attend.block = block, attend.most = most, attend.splits = splits, attend.count = count, attend.padded = padded;
        launch(Grid(count, kv_heads * splits), ATTEND_THREADS, 1, [&] { attend_blocks(attend); });
        launch(Grid(count, q_heads), ATTEND_THREADS, 1, [&] { join_splits(attend); });

        for (int i = 0; i < count; i++) {
            const int t = position + i, whole = (t + 1) / block;
            std::vector<int> order(whole), positions;
            std::vector<float> of_block(whole);
            for (int b = 0; b < whole; b++) {
                order[b] = b;
                double score = 0;
                const float* key = &keys[(page_of(b * block) * each + b * block % PAGE / block) * INDEX_DIM];
                for (int h = 0; h < heads; h++) {
                    double dot = 0;
                    for (int k = 0; k < INDEX_DIM; k++) dot += double(index[(i * (heads + 1) + h) * INDEX_DIM + k]) * key[k];
                    score += std::max<double>(dot, 0.) / sqrt(128.);
                }
                if (whole > most) worst = std::max<double>(worst, fabs(score - scores[i * stride + b]) / 10), of_block[b] = scores[i * stride + b];
            }
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of_block[a] > of_block[b]; });
            if (whole > most) order.resize(most);
            std::sort(order.begin(), order.end());
            for (size_t b = 0; b < order.size(); b++) {
                if (whole > most && int(chosen[i * most + b]) != order[b]) wrong++;
                for (int k = 0; k < block; k++) positions.push_back(order[b] * block + k);
            }
            row_count += whole > most;
            for (int p = whole * block; p <= t; p++) positions.push_back(p);
            for (int h = 0; h < q_heads; h++) {
                const float* q = &qkv[t * of_row + 2 * h * DIM];
                std::vector<double> sum(DIM);
                double weights = 0;
                for (const int p : positions) {
                    const size_t head = size_t(page_of(p)) * kv_heads + h / group;
                    double dot = 0;
                    for (int k = 0; k < DIM; k++) dot += double(q[k]) * __half2float(cache_keys[(head * PAGE + p % PAGE) * DIM + k]);
                    const double w = exp(dot / 16);
                    weights += w;
                    for (int k = 0; k < DIM; k++) sum[k] += w * __half2float(cache_values[(head * DIM + k) * PAGE + p % PAGE]);
                }
                for (int k = 0; k < DIM; k++) {
                    const double v = sum[k] / weights * gate(q[DIM + k]);
                    worst = std::max<double>(worst, fabs(v - out[(i * q_heads + h) * DIM + k]));
                    rounded = std::max<double>(rounded, fabs(v - __half2float(half[i * padded + operand_index(h * DIM + k)])));
                }
            }
        }
        position = end;
    }
    check("keys of blocks", worst_key, 1e-5), check("keys that sequences keep", worst_raw, 0);
    check("blocks that are chosen", wrong + (row_count < 100), 0);
    check("attention to some blocks", worst, 2e-5), check("attention to some blocks in FP16", rounded, 2e-3);
}

int main() {
    streams();
    few_rows(1, 640, 4, 40), few_rows(3, 16, 4, 24), few_rows(8, 560, 3, 344);
    convolutions();
    sparse();
    printf("several streams, n-grams and indexers on the host: %d passed, %d failed\n", passed, failed);
    return failed != 0;
}
