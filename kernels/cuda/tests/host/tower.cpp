// The kernels of a tower on the host, compared with their definition in f64.
#include "tower.cu"

namespace {

using Values = std::vector<double>;

int passed = 0, failed = 0;
void report(bool right, const char* what, int dim) {
    (right ? passed : failed)++;
    if (!right) printf("%s, heads of %d: WRONG\n", what, dim);
}

std::vector<float> numbers(size_t n, float middle = 0) {
    static uint64_t state = 1;
    std::vector<float> all;
    for (size_t i = 0; i < n; i++) all.push_back(middle + float((state = state * 6364136223846793005u + 1442695040888963407u) >> 40) / float(1 << 23) - 1.f);
    return all;
}
bool near(double found, double wanted, double bar) { return fabs(found - wanted) <= bar; }

constexpr int ROWS = 8, COLUMNS = 10, MERGE = 2, M = ROWS * COLUMNS, PATCHES = 128, HEADS = 2, SIDE = 5;
int row_of(int i) { return i / 4 / (COLUMNS / 2) * 2 + i % 4 / 2; }
int column_of(int i) { return i / 4 % (COLUMNS / 2) * 2 + i % 2; }

void check(int dim, int wide) {
    const int width = HEADS * dim, padded = (4 * width + 255) / 256 * 256;
    const auto start = numbers(M * width), bias = numbers(width), table = numbers(SIDE * SIDE * width);
    auto x = start;
    launch(M, 128, 0, [&] { tower_positions({x.data(), bias.data(), table.data(), width, SIDE, ROWS, COLUMNS, MERGE}); });
    bool right = true;
    for (int i = 0; i < M; i++)
        for (int k = 0; k < width; k++) {
            double sum = start[i * width + k] + bias[k];
            const double y = row_of(i) * (SIDE - 1.) / (ROWS - 1), z = column_of(i) * (SIDE - 1.) / (COLUMNS - 1);
            for (int a = 0; a < SIDE; a++)
                for (int b = 0; b < SIDE; b++) sum += std::max(0., 1 - fabs(y - a)) * std::max(0., 1 - fabs(z - b)) * table[(a * SIDE + b) * width + k];
            right &= near(x[i * width + k], sum, 1e-5);
        }
    report(right, "positions", dim);

    const auto added = numbers(width), gain = numbers(width, 1);
    const auto before = x;
    std::vector<__half> half(M / 4 * padded, __float2half(7));
    launch(M / 4, 128, 0, [&] { tower_norm({x.data(), added.data(), gain.data(), bias.data(), half.data(), M, width, width, 4, padded, 1e-6f}); });
    right = true;
    for (int i = 0; i < M; i++) {
        double mean = 0, variance = 0;
        for (int k = 0; k < width; k++) mean += (double(before[i * width + k]) + added[k]) / width;
        for (int k = 0; k < width; k++) variance += pow(double(before[i * width + k]) + added[k] - mean, 2) / width;
        for (int k = 0; k < width; k++) {
            const double v = double(before[i * width + k]) + added[k];
            const double wanted = (v - mean) / sqrt(variance + 1e-6) * gain[k] + bias[k];
            right &= near(x[i * width + k], v, 1e-6);
            right &= near(__half2float(half[i / 4 * padded + operand_index(i % 4 * width + k)]), wanted, fabs(wanted) / 1024 + 1e-5);
        }
        for (int k = 4 * width; k < padded; k++) right &= __half2float(half[i / 4 * padded + operand_index(k)]) == 0;
    }
    report(right, "norms", dim);

    const auto qkv = numbers(M * 3 * width), biases = numbers(3 * width);
    std::vector<float2> turns;
    for (int i = 0; i < COLUMNS; i++)
        for (int j = 0; j < dim / 4; j++) turns.push_back(make_float2(cosf(i / (j + 1.f)), sinf(i / (j + 1.f))));
    std::vector<__half> heads(3 * HEADS * PATCHES * wide, __float2half(7));
    const float scale = 1.4426950408889634f / sqrtf(dim);
    launch(Grid(PATCHES / 64, 3 * HEADS), 256, 0, [&] { tower_heads({qkv.data(), biases.data(), turns.data(), heads.data(), M, PATCHES, HEADS, dim, wide, COLUMNS, MERGE, 0, scale}); });
    right = true;
    for (int h = 0; h < 3 * HEADS; h++)
        for (int i = 0; i < PATCHES; i++)
            for (int d = 0; d < wide; d++) {
                double wanted = 0;
                auto value = [&](int d) { return double(qkv[i * 3 * width + h * dim + d]) + biases[h * dim + d]; };
                if (i < M && d < dim && h >= 2 * HEADS) wanted = value(d);
                if (i < M && d < dim && h < 2 * HEADS) {
                    const int j = d % (dim / 2);
                    const float2 turn = turns[(j < dim / 4 ? row_of(i) : column_of(i)) * (dim / 4) + j % (dim / 4)];
                    wanted = d < dim / 2 ? value(d) * turn.x - value(d + dim / 2) * turn.y : value(d) * turn.x + value(d - dim / 2) * turn.y;
                    if (h < HEADS) wanted *= scale;
                }
                right &= near(__half2float(heads[(size_t(h) * PATCHES + i) * wide + d]), wanted, fabs(wanted) / 1024 + 1e-6);
            }
    report(right, "heads", dim);

    const int dims = wide == 64 ? 64 : 72;
    std::vector<__half> matrices(heads.size(), __float2half(7));
    launch(Grid(PATCHES / 64, 3 * HEADS), 256, 0, [&] { tower_heads({qkv.data(), biases.data(), turns.data(), matrices.data(), M, PATCHES, HEADS, dim, wide, COLUMNS, MERGE, dims, scale}); });
    right = true;
    for (int h = 0; h < 3 * HEADS; h++)
        for (int i = 0; i < PATCHES; i++)
            for (int d = 0; d < wide; d++) {
                const int kind = h / HEADS, tile = i / 64 * 64, key = i % 64;
                if (kind == 2 && d >= dims) continue;
                int at = i * wide + d;
                if (kind == 1) at = tile * wide + d / 8 * 512 + key * 8 + d % 8;
                if (kind == 2) at = tile * dims + key / 8 * 8 * dims + d * 8 + key % 8;
                const size_t plane = size_t(h) * PATCHES * wide;
                right &= __half2float(matrices[plane + at]) == __half2float(heads[plane + i * wide + d]);
            }
    report(right, "heads in matrices", dim);

    const int across = (width + 255) / 256 * 256;
    std::vector<__half> out(M * across, __float2half(7));
    const TowerAttentionArgs args = {heads.data(), out.data(), M, PATCHES, HEADS, dim, across, 0};
    launch(Grid(1, HEADS), 128, 1, [&] { wide == 64 ? tower_attention_64(args) : tower_attention_80(args); });
    right = true;
    auto head = [&](int h, int i, int d) { return double(__half2float(heads[(size_t(h) * PATCHES + i) * wide + d])); };
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < M; i++) {
            Values weights(M);
            double total = 0;
            for (int k = 0; k < M; k++) {
                double score = 0;
                for (int d = 0; d < dim; d++) score += head(h, i, d) * head(HEADS + h, k, d);
                total += weights[k] = exp2(score);
            }
            for (int d = 0; d < dim; d++) {
                double wanted = 0;
                for (int k = 0; k < M; k++) wanted += weights[k] / total * head(2 * HEADS + h, k, d);
                right &= near(__half2float(out[i * across + operand_index(h * dim + d)]), wanted, 1e-3);
            }
        }
    for (int i = 0; i < M; i++)
        for (int k = width; k < across; k++) right &= __half2float(out[i * across + operand_index(k)]) == 0;
    report(right, "attention", dim);

    for (int exact = 0; exact < 2; exact++) {
        launch(M, 256, 0, [&] { tower_gelu({x.data(), bias.data(), out.data(), width, across, exact}); });
        right = true;
        for (int i = 0; i < M; i++)
            for (int k = 0; k < across; k++) {
                const double v = k < width ? double(x[i * width + k]) + bias[k] : 0;
                const double wanted = exact ? v / 2 * (1 + erf(v / sqrt(2.))) : v / 2 * (1 + tanh(sqrt(2 / M_PI) * (v + .044715 * v * v * v)));
                right &= near(__half2float(out[i * across + operand_index(k)]), wanted, fabs(wanted) / 1024 + 1e-6);
            }
        report(right, exact ? "gelu by the error function" : "gelu by tanh", dim);
    }
}

}   // namespace

int main() {
    check(16, 64);
    check(64, 64);
    check(72, 80);
    printf("a tower on the host: %d passed, %d failed\n", passed, failed);
    return failed != 0;
}
