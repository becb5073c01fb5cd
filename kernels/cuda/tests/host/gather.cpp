// The kernels that gather inputs on the host.
#include "gather.cu"

int main() {
    int passed = 0, failed = 0;
    for (const int inputs : {72, 512, 1000}) {
        const int m = 3, padded = (inputs + 255) / 256 * 256;
        std::vector<uint32_t> order(inputs);
        for (int k = 0; k < inputs; k++) order[k] = (k * 7 + 3) % inputs;   // 7 divides no number of inputs here
        std::vector<float> x(m * inputs), gain(inputs), x_to(m * inputs, 7), gain_to(inputs, 7);
        std::vector<__half> half(m * padded), half_to(m * padded, __float2half(7));
        for (int i = 0; i < m * inputs; i++) {
            x[i] = float(i % 1999);
            half[i / inputs * padded + operand_index(i % inputs)] = __float2half(x[i]);
        }
        for (int k = 0; k < inputs; k++) gain[k] = float(-k);
        GatherArgs args = {};
        args.order = order.data(), args.m = m, args.inputs = inputs, args.padded = padded;
        args.x = x.data(), args.x_to = x_to.data(), args.gain = gain.data(), args.gain_to = gain_to.data();
        args.half = half.data(), args.half_to = half_to.data();
        launch(Grid((inputs + GATHER_THREADS - 1) / GATHER_THREADS, m + 1), GATHER_THREADS, 0, [&] { gather(args); });
        launch(m, GATHER_THREADS, 1, [&] { gather_halves(args); });
        bool right = true;
        for (int i = 0; i < m; i++)
            for (int k = 0; k < padded; k++) {
                const float wanted = k < inputs ? x[i * inputs + order[k]] : 0.f;
                right &= __half2float(half_to[i * padded + operand_index(k)]) == wanted;
                right &= k >= inputs || x_to[i * inputs + k] == wanted;
                right &= k >= inputs || gain_to[k] == gain[order[k]];
            }
        (right ? passed : failed)++;
        if (!right) printf("%d gathered inputs: WRONG\n", inputs);
    }
    printf("gathered inputs on the host: %d passed, %d failed\n", passed, failed);
    return failed != 0;
}
