#!/usr/bin/env python3
"""Quality against size, nq beside llama.cpp: a dated record and a plot.

    benches/compare/quality.py --nq target/release/nq --text BOOKS.txt --text WIKI.txt --calib MIX.jsonl --llama DIR

Quantizes a model with llama-quantize (an importance matrix of --calib) to a ladder of types, with nq to the bytes
of each of those files, as a folder and as a GGUF file, and with what nq does by default. `nq eval` measures the KL
divergence of all from the source, in f32 (weights as stored, no rounding of activations), in windows of 512 whose
second half is scored, on the first --text-bytes of each --text. On the first text it measures nq's folders a
second time as they run by default, and llama-perplexity measures the GGUF files as llama.cpp runs them.
Sizes are those of all tensors. Without --llama there are only nq's files.
Rows go to benches/records/DATE-compare-quality.csv, the plot beside them as .svg.
"""

import argparse
import csv
import datetime
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1] / "records"
TYPES = ["Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
USUAL = ["--bits 4 --simple", "--bits 4", "--bits 8"]
SERIES = {
    "llama.cpp": ("#d9822b", "llama.cpp with an importance matrix"),
    "nq gguf": ("#8fb4e3", "nq --format gguf"),
    "nq": ("#1f5fb4", "nq"),
    "nq tuned": ("#3c8d5a", "nq --method auto"),
}
WINDOW = ["--protocol", "llama", "--ctx", 512]


def output(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr.strip()[-2000:]}")
    return done.stdout + done.stderr if Path(str(command[0])).name.startswith("llama") else done.stdout


def plain_text(file):
    """The text of a file, of every document if it is .jsonl."""
    if file.suffix != ".jsonl":
        return file.read_text()
    documents = [json.loads(line) for line in file.read_text().splitlines()]
    return "\n\n".join(d.get("text") or "\n".join(m["content"] for m in d["messages"]) for d in documents)


class Ladder:
    """Makes the files and measures them."""

    def __init__(self, args, home):
        self.args, self.home = args, home
        self.texts = []
        for n, text in enumerate(args.text):
            part = home / f"{n}-{text.name}"
            part.write_bytes(text.read_bytes()[: args.text_bytes])
            self.texts.append(part)
        self.files = []

    def bytes_of(self, file):
        return int(json.loads(output(self.args.nq, "inspect", file, "--json"))["tensor_bytes"])

    def add(self, maker, how, file, start):
        size = self.bytes_of(file)
        self.files.append({"maker": maker, "how": how, "tensor_bytes": size, "seconds": f"{time.time() - start:.1f}",
                           "file": file})
        print(f"{maker:10} {how:40} {size:>12,}", file=sys.stderr)
        return size

    def quantize(self, maker, how):
        out = self.home / f"nq-{len(self.files)}{'.gguf' if maker == 'nq gguf' else ''}"
        kind = ["--format", "gguf"] if maker == "nq gguf" else []
        start = time.time()
        output(self.args.nq, "quantize", self.args.model, *how.split(), *kind, "--device", self.args.device,
               "--out", out, "--force")
        self.add(maker, how, out, start)

    def llama(self, program, *args):
        return output(self.args.llama / program, *args)

    def make(self):
        sizes = {}
        if self.args.llama:
            self.source, matrix, calib = (self.home / name for name in ["f32.gguf", "matrix.gguf", "calib.txt"])
            output(self.args.nq, "convert", self.args.model, self.source, "--format", "gguf", "--type", "f32")
            calib.write_text(plain_text(self.args.calib))
            self.llama("llama-imatrix", "-m", self.source, "-f", calib, "-o", matrix, "-c", 512)
            for kind in TYPES:
                start, out = time.time(), self.home / f"{kind}.gguf"
                self.llama("llama-quantize", "--imatrix", matrix, self.source, out, kind)
                sizes[kind] = self.add("llama.cpp", kind, out, start)
        for how in USUAL:
            self.quantize("nq", how)
        for kind, size in sizes.items():
            bits = "--bits 3 " if kind[1] in "23" else ""
            self.quantize("nq", f"{bits}--target-size {size}B")
            if kind in ["Q4_K_S", "Q5_K_M", "Q6_K"]:
                self.quantize("nq gguf", f"--target-size {size}B")
        for how in self.args.tuned:
            self.quantize("nq tuned", f"--method auto {how}")

    def eval(self, files, text, *flags):
        """Reports of `nq eval`, in the order of the files."""
        paths = [f["file"] for f in files]
        return json.loads(output(self.args.nq, "eval", *paths, "--against", self.args.model, "--text", text, *WINDOW,
                                 "--device", self.args.device, "--json", *flags))

    def measure(self):
        """Adds the figures, and yields after each round: what has been measured is worth keeping."""
        for text in self.texts:
            name = text.stem.split("-", 1)[1].split(".")[0].removesuffix("_")
            for f, found in zip(self.files, self.eval(self.files, text, "--activations", "f32")):
                kld = found["kld"]
                f |= {f"{name}_kld": f"{kld['mean']:.6f}", f"{name}_kld_99": f"{kld['p99']:.4f}",
                      f"{name}_ppl": f"{found['ppl']:.4f}", f"{name}_same_top1": f"{found['same_top1']:.4f}"}
            yield
        folders = [f for f in self.files if f["maker"] in ["nq", "nq tuned"]]
        for f, found in zip(folders, self.eval(folders, self.texts[0])):
            f["as_run_kld"] = f"{found['kld']['mean']:.6f}"
        yield
        ggufs = [f for f in self.files if f not in folders]
        logits = self.home / "logits"
        judge = ["-c", 512, "-f", self.texts[0], "--kl-divergence-base", logits]
        if ggufs:
            self.llama("llama-perplexity", "-m", self.source, *judge)
        for f in ggufs:
            said = self.llama("llama-perplexity", "-m", f["file"], *judge, "--kl-divergence")
            # The mean so far, after the last window: llama-perplexity does not always print its summary.
            if not (found := re.findall(r"^ *\d+ .*?± +\S+ +\S+ ± +\S+ +([0-9.]+) ±", said, re.MULTILINE)):
                sys.exit(f"llama-perplexity prints no KL divergence: {said[-2000:]}")
            f["as_run_kld"] = found[-1]
        yield

    def rows(self):
        return [{k: v for k, v in f.items() if k != "file"} for f in self.files]


def plot(rows, column, title):
    """Divergence, on a logarithmic scale, against megabytes."""
    left, top, width, height = 70, 50, 560, 360
    sizes = [int(r["tensor_bytes"]) / 1e6 for r in rows]
    logs = [math.log10(float(r[column])) for r in rows]
    x0, x1 = math.floor(min(sizes)), math.ceil(max(sizes))
    y0, y1 = math.floor(min(logs)), math.ceil(max(logs))
    at = lambda size, log: (left + width * (size - x0) / (x1 - x0), top + height * (y1 - log) / (y1 - y0))
    parts = [f'<text x="8" y="18">{title}</text>',
             '<text x="8" y="36">mean KL divergence from the source (nats) against the size of all tensors (MB)</text>']
    step = max(1, math.ceil((x1 - x0) / 10))
    for size in range(x0, x1 + 1, step):
        x, _ = at(size, y0)
        parts.append(f'<path d="M{x:.0f} {top}V{top + height}" stroke="#ddd"/>'
                     f'<text x="{x:.0f}" y="{top + height + 16}" text-anchor="middle">{size}</text>')
    for power in range(y0, y1 + 1):
        _, y = at(x0, power)
        parts.append(f'<path d="M{left} {y:.0f}H{left + width}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
    for n, (maker, (colour, label)) in enumerate(SERIES.items()):
        points = sorted((s, l) for s, l, r in zip(sizes, logs, rows) if r["maker"] == maker)
        if not points:
            continue
        found = [at(*p) for p in points]
        # What nq does without a size is a point beside the line, not of it.
        line = sorted((s, l) for s, l, r in zip(sizes, logs, rows) if r["maker"] == maker and r["how"] not in USUAL)
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*p) for p in line))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>' if line else "")
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in found]
        y = top + 16 + 18 * n
        parts.append(f'<rect x="{left + width - 240}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
                     f'<text x="{left + width - 224}" y="{y}">{label}</text>')
    size = f'width="{left + width + 20}" height="{top + height + 30}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n')


def write(name, head, rows):
    """The record and the plot."""
    columns = list(dict.fromkeys(k for r in rows for k in r))
    with open(f"{name}.csv", "w", newline="") as file:
        file.write(f"# {head}; seconds are of quantizing; as_run_kld: without --activations f32, or by llama-perplexity\n")
        out = csv.DictWriter(file, columns, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    first = next(c for c in columns if c.endswith("_kld"))
    Path(f"{name}.svg").write_text(plot(rows, first, head))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nq", default="nq", help="the program")
    parser.add_argument("--model", default="demo", help="the source")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where nq quantizes and measures")
    parser.add_argument("--text", type=Path, action="append", required=True, help="text to measure on; may be repeated")
    parser.add_argument("--text-bytes", type=int, default=700_000, help="bytes read of each text")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--calib", type=Path, help="text of the importance matrix, .txt or .jsonl")
    parser.add_argument("--tuned", action="append", default=[], metavar="FLAGS",
                        help="flags of a file of --method auto, for example '--target-size 8580000B'; may be repeated")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder for record and plot")
    args = parser.parse_args()
    if args.llama and not args.calib:
        parser.error("--llama needs --calib")
    if not args.llama:
        print("llama.cpp: no --llama, left out", file=sys.stderr)
    today = datetime.date.today().isoformat()
    head = f"{today}, {args.model}, {output(args.nq, '--version').strip()}, {args.device}"
    name = args.out / f"{today}-compare-quality"
    with tempfile.TemporaryDirectory() as home:
        ladder = Ladder(args, Path(home))
        ladder.make()
        for _ in ladder.measure():
            write(name, head, ladder.rows())
    print(f"{name}.csv, {name}.svg")


if __name__ == "__main__":
    main()
