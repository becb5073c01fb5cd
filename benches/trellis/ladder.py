#!/usr/bin/env python3
"""Squared errors of trellis codes on Gaussians, and the KL divergence of the demo model rounded with them.

    gcc -O3 -march=native -shared -fPIC -o viterbi_c.so benches/trellis/viterbi.c
    nvcc -O3 -arch=sm_90 -shared -Xcompiler -fPIC -o viterbi_cu.so benches/trellis/viterbi.cu
    benches/trellis/ladder.py --demo assets/demo --text BOOKS.txt --calibration MIX.jsonl --out FOLDER

Needs PyTorch, safetensors and tokenizers. Runs on a GPU (an H100: about three minutes); `--tiny` runs parts of it
on a CPU at sizes that say nothing, to see that they work. Writes gaussians.csv, demo.csv and encoding.csv.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch

from codes import CODES, GpuSearch, Search, alternating, check_chain
from demo import INPUTS, Demo
from quantized import quantized, relative_error
from rounding import Trellis, by_scalar, by_trellis

# Gains (standard deviation of a code's values over that of the weights) that are tried for each code.
GAINS = {"gauss": (0.96, 1.0, 1.04, 1.08), "bytes4": (0.98, 1.03, 1.08, 1.13), "halves": (0.96, 1.01, 1.06, 1.11),
         "bytes2": (1.1, 1.18, 1.26, 1.34), "octagon": (1.02, 1.09, 1.16, 1.23), "wide": (0.98, 1.03, 1.08, 1.13),
         "bytes1": (1.3, 1.45, 1.6, 1.75), "table": (1.0,)}


class Ladder:
    def __init__(self, args):
        self.tiny, self.out = args.tiny, Path(args.out)
        self.device = "cpu" if args.tiny else "cuda"
        self.search = Search(args.c) if args.tiny else GpuSearch(args.cu)
        self.bits = 12 if args.tiny else 16
        generator = torch.Generator(self.device).manual_seed(5)
        self.gaussians = torch.randn(8192 if args.tiny else 1 << 18, device=self.device, generator=generator)
        self.start = time.time()

    def table(self, name):
        file = open(self.out / name, "a")

        def put(*row):
            print(*row, sep=",", file=file, flush=True)
            print(*row, sep=",", flush=True)

        return put

    def states(self, values, step_bits, x, cyclic=True, **options):
        if self.device == "cpu":
            return torch.from_numpy(self.search(values.numpy(), step_bits, x.numpy(), cyclic).astype("int64"))
        return self.search(values, step_bits, x, cyclic, **options)

    def error(self, values, step_bits, gain=1.0, length=128, cyclic=True, count=None):
        """Mean squared error of Gaussians of variance 1."""
        values = (torch.as_tensor(values).to(self.device) * gain).half().float()
        x = self.gaussians[:count].view(-1, length)
        states = self.states(values, step_bits, x, cyclic)
        check_chain(states.cpu().numpy(), len(values).bit_length() - 1, step_bits, cyclic)
        return (values[states.long()].reshape(x.shape) - x).square().mean().item()

    def best_gain(self, name, values, step_bits, **options):
        return min((self.error(values, step_bits, gain, **options), gain) for gain in GAINS[name])

    def same_as_on_a_cpu(self, library):
        """Both searches find paths of the same cost."""
        for name, bits, step in (("bytes4", 12, 3), ("octagon", 12, 6), ("octagon", 12, 8), ("bytes4", 8, 4)):
            values, x = torch.from_numpy(CODES[name](bits)).half().float(), self.gaussians[:4096].view(-1, 128).cpu()
            costs = []
            on_cpu = torch.from_numpy(Search(library)(values.numpy(), step, x.numpy()).astype("int64"))
            on_gpu = self.search(values.cuda(), step, x.cuda()).cpu().long()
            for states in (on_cpu, on_gpu):
                costs.append((values[states].reshape(x.shape) - x).square().sum(1))
            worst = ((costs[0] - costs[1]).abs() / costs[0]).max().item()
            assert worst < 1e-3, (name, bits, step, worst)
            print("# searches agree:", name, bits, step, f"{worst:.1e}")

    def multipliers(self, name, steps, tries):
        """The multiplier and addend of a code with the least product of errors over `steps`."""
        rng, count = random.Random(11), 2048 if self.tiny else 1 << 16
        gain = GAINS[name][2]
        found = []
        for i in range(tries):
            pair = rng.getrandbits(32) | 1, rng.getrandbits(32) if i % 2 else 0
            if name == "wide":
                pair = (pair[0], rng.getrandbits(32) | 1), pair[1]
            values = CODES[name](self.bits, multiplier=pair[0], addend=pair[1])
            found.append((self.error(values, steps[-1], gain, count=count), pair))
        found.sort()
        finals = []
        for first, pair in found[: max(tries // 20, 1)]:
            values = CODES[name](self.bits, multiplier=pair[0], addend=pair[1])
            score = 1.0
            for step in steps:
                score *= self.error(values, step, gain)
            finals.append((score ** (1 / len(steps)), pair))
        finals.sort()
        print(f"# {name}: of {tries} multipliers best {found[0][0]:.6f}, median {found[len(found) // 2][0]:.6f}; chosen "
              f"{finals[0][1]}", flush=True)
        return dict(zip(("multiplier", "addend"), finals[0][1]))

    def learned(self, state_bits, step_bits, digits=False, rounds=12):
        """A table of values learned on Gaussians, in 8 bits; digits: a sum of one small table for each step in the state."""
        x = torch.randn(1 << 13 if self.tiny else 1 << 19, device=self.device).view(-1, 128)
        values = torch.from_numpy(CODES["bytes4"](state_bits)).to(self.device)
        states = 1 << state_bits
        parts = state_bits // step_bits
        base = 1 << step_bits
        if digits:
            all_states = torch.arange(states, device=self.device)
            columns = torch.cat([torch.nn.functional.one_hot(all_states >> (p * step_bits) & (base - 1), base) for p in range(parts)], 1).double()
            spread = torch.linspace(-2.2, 2.2, base, device=self.device)
            values = sum(spread[torch.randperm(base, device=self.device)][all_states >> (p * step_bits) & (base - 1)] * (1.0 if p == 0 else 0.12)
                         for p in range(parts))[:, None]
        for _ in range(rounds):
            chosen = self.states(values.float(), step_bits, x).long().flatten()
            sums = torch.zeros(states, device=self.device).index_add_(0, chosen, x.flatten())
            counts = torch.bincount(chosen, minlength=states).float()
            if digits:
                gram = columns.T @ (columns * counts.double()[:, None]) + 1e-3 * torch.eye(columns.shape[1], device=self.device)
                values = (columns @ torch.linalg.solve(gram, columns.T @ sums.double()))[:, None].float()
            else:
                values = torch.where(counts > 0, sums / counts.clamp(min=1), values[:, 0])[:, None]
        step = values.abs().max() / 127
        return ((values / step).round() * step).float().cpu().numpy()

    def codes_on_gaussians(self, args):
        put = self.table("gaussians.csv")
        put("code", "state_bits", "values_a_step", "step_bits", "bits", "length", "cyclic", "gain", "squared_error", "bound")
        tries = 4 if self.tiny else args.tries
        self.computed = {}
        if tries:
            for name, steps in (("bytes4", (3, 4, 5)), ("octagon", (4, 6, 8)), ("bytes2", (4, 6, 8)), ("wide", (6, 8))):
                self.computed[name] = self.multipliers(name, steps, tries)
        self.gain = {}

        def case(name, state_bits, step_bits, length=128, cyclic=True, values=None, label=None):
            values = CODES[name](state_bits, **self.computed.get(name, {})) if values is None else values
            width = values.shape[1]
            error, gain = self.best_gain(name, values, step_bits, length=length, cyclic=cyclic)
            bits = step_bits / width
            put(label or name, state_bits, width, step_bits, bits, length, int(cyclic), gain, f"{error:.6f}", f"{4.0 ** -bits:.6f}")
            return error, gain

        full = self.bits
        for name in ("gauss", "bytes4", "halves"):
            for k in (2, 3, 4) if self.tiny else (2, 3, 4, 5, 6):
                self.gain[name, k] = case(name, full, k)[1]
        for name in ("octagon", "bytes2", "wide"):
            for step in (4,) if self.tiny else (4, 5, 6, 7, 8, 10, 12):
                self.gain[name, step] = case(name, full, step)[1]
        if self.tiny:
            case("table", 8, 4, values=self.learned(8, 4, rounds=2), label="table")
            case("table", 8, 4, values=self.learned(8, 4, digits=True, rounds=2), label="digits")
            return
        for first, second in ((2, 3), (3, 4)):
            case("bytes4", 16 + second, first + second, values=alternating(16, first, second, **self.computed.get("bytes4", {})), label="alternating")
        if "codes" not in args.parts:
            return
        wide_gauss = lambda bits: CODES["gauss"](bits, 2)
        for step in (4, 6, 8, 10, 12):
            case("gauss", 16, step, values=wide_gauss(16), label="gauss2")
        for bits in (18, 20):
            for step in (8, 10, 12):
                case("octagon", bits, step)
        for bits in (12, 14):
            for k in (2, 3, 4, 5):
                case("bytes4", bits, k)
            for step in (4, 6, 8):
                case("octagon", bits, step)
        case("bytes1", 16, 8), case("bytes1", 16, 12)
        for length in (32, 64, 256):
            for name, step in (("bytes4", 3), ("bytes4", 4), ("octagon", 6), ("octagon", 8)):
                case(name, 16, step, length=length)
        case("bytes4", 16, 4, length=256, cyclic=False), case("octagon", 16, 8, length=256, cyclic=False)
        for bits in (8, 10, 12):
            for k in (2, 3, 4):
                case("table", bits, k, values=self.learned(bits, k), label="table")
        for bits, k in ((8, 4), (12, 4), (9, 3), (12, 3)):
            case("table", bits, k, values=self.learned(bits, k, digits=True), label="digits")

    def encoding(self):
        """Time of the search alone, on as many weights as fill the device."""
        put = self.table("encoding.csv")
        put("code", "bits", "length", "side", "weights", "seconds", "million_weights_a_second", "seconds_for_7e9")
        for name, width, step in (("bytes4", 1, 3), ("bytes4", 1, 4), ("bytes4", 1, 5), ("octagon", 2, 6), ("octagon", 2, 8)):
            values = torch.from_numpy(CODES[name](16, **self.computed.get(name, {}))).cuda()
            for side in (4, 8):
                x = torch.randn(1 << 19, device="cuda").view(-1, 128)
                try:
                    self.states(values, step, x[:1024], side=side)
                    torch.cuda.synchronize()
                    begin = time.time()
                    self.states(values, step, x, side=side)
                    torch.cuda.synchronize()
                except AssertionError:  # more shared memory than there is
                    continue
                seconds = time.time() - begin
                put(name, step / width, 128, side, x.numel(), f"{seconds:.4f}", f"{x.numel() / seconds / 1e6:.1f}", f"{7e9 * seconds / x.numel():.0f}")

    def trellis(self, name, step, length=128, gain=None, values=None, **options):
        values = CODES[name](self.bits, **self.computed.get(name, {}), **options) if values is None else values
        gain = gain or self.gain.get((name, step), 1.0)
        return Trellis(self.search, values, step, length, gain)

    def demo_ladder(self, args):
        put = self.table("demo.csv")
        put("scheme", "bits", "rotations", "scales", "feedback", "length", "squared_error", "kld", "ppl", "same_top1", "seconds")
        demo = Demo(args.demo, self.device)
        windows = demo.tokens(Path(args.text).read_bytes()[:700000].decode(errors="ignore"))
        text = "\n".join(json.loads(line)["text"] for line in Path(args.calibration).read_text().splitlines())
        calibration = demo.tokens(text)
        if self.tiny:
            windows, calibration = windows[:2], calibration[:2]
        put("reference", 16, "", "", "", "", 0, *[f"{v:.5f}" for v in demo.divergence(demo.layers, windows)], "")

        def case(label, bits, rounding, rotations="inputs", scales="row", feedback=True, length="", calibrate=calibration):
            begin = time.time()
            layers = quantized(demo, calibrate, lambda index, group, products, w, h: rounding(index, group, w, h))
            seconds = time.time() - begin
            error = relative_error(demo, layers)
            put(label, bits, rotations, scales, int(feedback), length, f"{error:.5f}",
                *[f"{v:.5f}" for v in demo.divergence(layers, windows)], f"{seconds:.1f}")

        def scalar(bits, rotations="none", symmetric=True, group=128, feedback=True):
            case(f"int{bits} g{group} {'sym' if symmetric else 'asym'}", bits,
                 lambda i, g, w, h: by_scalar(w, h, bits, group, symmetric, rotations, feedback), rotations, f"group {group}", feedback)

        def coded(name, step, width=1, label=None, rotations="inputs", scales="row", feedback=True, length=128, values=None,
                  calibrate=calibration, **options):
            code = self.trellis(name, step, length, values=values)
            case(label or name, step / width, lambda i, g, w, h: by_trellis(w, h, code, rotations, feedback, scales=scales, **options),
                 rotations, scales, feedback, length, calibrate)

        if self.tiny:
            scalar(4, "both"), coded("bytes4", 4), coded("octagon", 4, 2), coded("bytes4", 4, rotations="none", scales="group")
            return
        if "allocated" in args.parts:
            self.allocated(demo, windows, calibration, put)
        if "main" not in args.parts:
            return
        for name, width, steps in (("bytes4", 1, (2, 3, 4, 5, 6)), ("octagon", 2, (4, 5, 6, 7, 8, 10)), ("wide", 2, (6, 7, 8))):
            for step in steps:
                coded(name, step, width)
        if "ladder" in args.parts:
            self.from_scalar_to_trellis(scalar, coded)
        if "variants" in args.parts:
            self.variants(coded, calibration)

    def from_scalar_to_trellis(self, scalar, coded):
        for bits in (3, 4, 5, 6):
            scalar(bits)
        scalar(4, feedback=False), scalar(4, symmetric=False), scalar(4, symmetric=False, group=64)
        for bits in (3, 4):
            scalar(bits, "inputs"), scalar(bits, "both")
        for rotations, scales in (("none", "row"), ("none", "group"), ("inputs", "row"), ("inputs", "group"), ("both", "row"), ("both", "group")):
            coded("bytes4", 4, rotations=rotations, scales=scales)
        coded("bytes4", 4, feedback=False)

    def variants(self, coded, calibration):
        """What else could be otherwise, at 4 bits."""
        coded("gauss", 4), coded("halves", 4), coded("bytes2", 8, 2)
        coded("table", 4, label="table of 256", values=self.learned(8, 4))
        coded("table", 4, label="table of 4096", values=self.learned(12, 4))
        coded("table", 4, label="digits 12", values=self.learned(12, 4, digits=True))
        for length in (32, 64, 256):
            coded("octagon", 8, 2, length=length), coded("bytes4", 4, length=length)
        coded("octagon", 8, 2, label="octagon, other signs", seed=7), coded("octagon", 8, 2, label="octagon, third signs", seed=8)
        for block in (32, 64):
            coded("octagon", 8, 2, label=f"octagon, blocks of {block}", block=block)
        for damping in (0.001, 0.03, 0.1):
            coded("octagon", 8, 2, label=f"octagon, damping {damping}", damping=damping)
        coded("octagon", 8, 2, label="octagon, a quarter of the calibration", calibrate=calibration[::4])

    def allocated(self, demo, windows, calibration, put):
        """Whole models: bits of each layer's groups and of the head (which is the embedding too) by what rounding each
        alone costs, for a size in bytes."""
        # The better code for each number of bits, or pairs of values up to 5 bits, whose decoders are faster.
        kinds = {f"octagon {step / 2}": (step / 2, "octagon", step) for step in (4, 5, 6, 7, 8, 10)}
        kinds |= {f"bytes4 {bits}": (bits, "bytes4", bits) for bits in (2, 3, 4, 5, 6)}
        codes = {kind: self.trellis(name, step) for kind, (_, name, step) in kinds.items()}
        errors = {kind: self.error(code.values, code.step_bits) for kind, code in codes.items()}
        rate = {kind: bits for kind, (bits, _, _) in kinds.items()}
        pairs = [kind for kind in kinds if kind.startswith("octagon") or kind == "bytes4 6"]
        x, seen = demo.embedding[calibration], {}
        for index, weights in enumerate(demo.layers):
            def see(group, inputs):
                a = inputs.reshape(-1, inputs.shape[-1])
                seen[index, group] = sum(part.T @ part for part in a.double().split(16384)) / len(a)
            x = demo.layer(weights, x, see)
        a = demo.normed(x, demo.norm).reshape(-1, x.shape[-1])
        seen["head"] = sum(part.T @ part for part in a.double().split(16384)) / len(a)
        cost, size = {}, {}
        for key, h in seen.items():
            layers, head = [dict(l) for l in demo.layers], None
            if key == "head":
                head = by_trellis(demo.embedding, h, codes["bytes4 4"], "inputs")
                size[key] = head.numel()
            else:
                for p in INPUTS[key[1]]:
                    layers[key[0]][p] = by_trellis(demo.layers[key[0]][p], h, codes["bytes4 3"], "inputs")
                size[key] = sum(demo.layers[key[0]][p].numel() for p in INPUTS[key[1]])
            cost[key] = demo.divergence(layers, calibration[::4], head)[0] / errors["bytes4 4" if key == "head" else "bytes4 3"]
        other = sum(demo.layers[0][p].shape[0] for ps in INPUTS.values() for p in ps) * len(demo.layers) * 2 + len(demo.embedding) * 2 + 40_000

        def choose(price, among):
            return {key: min(among, key=lambda k: cost[key] * errors[k] + price * size[key] * rate[k]) for key in cost}

        total = lambda chosen: sum(size[key] * rate[k] for key, k in chosen.items()) / 8 + other
        for label, among, budgets in (("pairs", pairs, (6_100_000, 6_800_000, 7_580_000, 8_580_000, 9_350_000)),
                                      ("all", list(kinds), (6_100_000, 7_165_000, 7_580_000, 8_580_000, 9_350_000))):
            for budget in budgets:
                low, high = 1e-14, 1.0
                for _ in range(100):
                    price = (low * high) ** 0.5
                    low, high = (price, high) if total(choose(price, among)) > budget else (low, price)
                chosen = choose(high, among)
                # What is left of the budget goes to what gains most for its bytes.
                while True:
                    better = [(cost[key] * (errors[chosen[key]] - errors[k]) / (size[key] * (rate[k] - rate[chosen[key]])), key, k)
                              for key in chosen for k in among if rate[k] > rate[chosen[key]]
                              and total(chosen) + size[key] * (rate[k] - rate[chosen[key]]) / 8 <= budget]
                    if not better or max(b[0] for b in better) <= 0:
                        break
                    _, key, k = max(better, key=lambda b: b[0])
                    chosen[key] = k
                head = by_trellis(demo.embedding, seen["head"], codes[chosen["head"]], "inputs")
                layers = quantized(demo, calibration, lambda i, g, p, w, h: by_trellis(w, h, codes[chosen[i, g]], "inputs"), head)
                values = demo.divergence(layers, windows, head)
                layer_bits = sum(size[k] * rate[b] for k, b in chosen.items() if k != "head") / sum(v for k, v in size.items() if k != "head")
                put(f"allocated ({label}), {total(chosen):.0f} bytes, head {chosen['head']}", f"{layer_bits:.3f}", "inputs", "row", 1, 128, "",
                    *[f"{v:.5f}" for v in values], "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--c", default="viterbi_c.so", help="viterbi.c, compiled")
    parser.add_argument("--cu", default="viterbi_cu.so", help="viterbi.cu, compiled")
    parser.add_argument("--parts", nargs="*", default=["codes", "encoding", "allocated", "main", "ladder", "variants"], help="what to run")
    parser.add_argument("--tries", type=int, default=0, help="multipliers to try instead of those that codes.py has")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(3)
    torch.backends.cuda.matmul.allow_tf32 = False
    ladder = Ladder(args)
    if not args.tiny:
        ladder.same_as_on_a_cpu(args.c)
    ladder.codes_on_gaussians(args)
    print(f"# {time.time() - ladder.start:.0f} s", flush=True)
    if "encoding" in args.parts and not args.tiny:
        ladder.encoding()
    ladder.demo_ladder(args)
    print(f"# {time.time() - ladder.start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
