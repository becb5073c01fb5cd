// The left operands that kernels make of packed codes (`dequant.cuh`, and `chunk_operand` of `weights.cuh`), compared with
// the elements that they stand for.
#include "dequant.cuh"

#include <math.h>
#include <stdio.h>
#include <string.h>

namespace {

uint64_t state = 1;
uint32_t bits() { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; }

// A tile of 16 rows and 256 inputs with random codes, scales and zero-points.
template <class S>
struct Record {
    static constexpr int GROUPS = SPAN / S::SLOT;
    alignas(16) uint8_t codes[S::STAGES * S::STAGE];
    alignas(16) uint8_t meta[(S::META + 15) / 16 * 16];

    Record() {
        for (auto& byte : codes) byte = bits();
        for (auto& byte : meta) byte = bits();
        const int rows = S::TABLES_AT / 2, scales = S::TWO_LEVEL ? 0 : GROUPS * 16;
        auto half = [](float most) { return __float2half((bits() % 1000 + 24) * most / 1024); };
        __half* const first = reinterpret_cast<__half*>(meta);
        for (int i = 0; i < rows; i++) first[i] = half(i < 16 ? .003f : -.01f);
        __half* const of_groups = reinterpret_cast<__half*>(meta + S::ROWS);
        for (int i = 0; i < scales; i++) of_groups[i] = half(.05f);
        for (int i = 0; i < scales && S::ZERO == OFFSET; i++) of_groups[scales + i] = half(-.4f);
        // Zero-points within the codes.
        for (int i = S::ROWS + GROUPS * 8 * S::SCALE; S::ZERO == INT && i < int(sizeof(meta)); i++) meta[i] &= S::BITS == 4 ? 0xff : (1 << S::BITS) - 1;
    }

    float at(int row, int k) const {
        return element({codes, meta, 16, SPAN, 1, S::BITS, S::ZERO, S::TWO_LEVEL, S::TABLE, GROUPS, int(sizeof(meta)), 1.f}, row, k);
    }
};

// Adds to `wrong` where a value is not that of the element. `least`: what sums of its parts may lose.
void compare(int& wrong, float found, float expected, float least) {
    if (!(fabsf(found - expected) <= fabsf(expected) / 2000 + least)) wrong++;
}

template <class S>
bool check(const char* name) {
    const Record<S> record;
    const uint8_t* const meta = record.meta;
    LevelTables<S> levels;
    levels.load(meta);
    int halves = 0, bytes = 0;
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int step = 0; step < 4; step++) {
            const uint8_t* const codes = record.codes + step * (S::BITS * 128);
            for (int j = 0; j < 4; j++) {
                using Operand = Dequant<S, true>;
                Operand of;
                of.load(meta, Record<S>::GROUPS, step, j, g, t);
                uint32_t a[4];
                of.product(a, Operand::unit(codes, j, lane), levels, j);
                for (int i = 0; i < 8; i++) {
                    const float found = __half2float(reinterpret_cast<const __half*>(a)[i]);
                    const int k = step * 64 + j / 2 * 32 + t * 8 + j % 2 * 4 + i / 4 * 2 + i % 2;
                    compare(halves, found, record.at(g + i / 2 % 2 * 8, k), S::ZERO == OFFSET ? 1e-3f : 1e-7f);
                }
            }
            if constexpr (S::ORDER == 4) {
                Unit<S> unit;
                unit.load(codes, lane);
                for (int c = 0; c < 2; c++) {
                    uint32_t a[4];
                    chunk_operand<S>(a, unit, levels, c);
                    for (int i = 0; i < 16; i++) {
                        const int byte = i % 4, row = g + i / 4 % 2 * 8, k = step * 64 + c * 32 + t * 8 + i / 8 * 4 + byte % 2 * 2 + byte / 2;
                        const uint8_t code = a[i / 4] >> byte * 8;
                        GroupMeta<S> group;
                        group.load(meta, Record<S>::GROUPS, k / S::SLOT, g);
                        const float2 scale = group.scales(), zero = group.zeros();
                        const float q = S::CENTRED ? float(int8_t(code)) * OPERAND_UNIT<S> : float(code);
                        const float s = i / 4 % 2 ? scale.y : scale.x, z = i / 4 % 2 ? zero.y : zero.x;
                        const float found = S::ZERO == OFFSET ? s * q + z : S::CENTRED ? s * q : s * (q - z);
                        compare(bytes, found, record.at(row, k), 1e-6f);
                    }
                }
            }
        }
    }
    if (halves + bytes > 0) printf("%s: %d values as FP16 and %d as bytes differ\n", name, halves, bytes);
    return halves + bytes == 0;
}

}   // namespace

int main() {
    int passed = 0, all = 0;
#define CHECK(scheme) passed += check<scheme>(#scheme), all++;
    INTEGER_SCHEMES(CHECK)
    for (int i = 0; i < BLOCK_SCHEMES; i++) {
        char name[16];
        snprintf(name, sizeof(name), "blocks %d", i);
        with_block_scheme(i, [&](auto scheme) { passed += check<decltype(scheme)>(name), all++; });
    }
    printf("left operands of %d schemes: %d passed, %d failed\n", all, passed, all - passed);
    return passed != all;
}
