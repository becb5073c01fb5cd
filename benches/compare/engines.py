#!/usr/bin/env python3
"""Runs engines on what nq exports and writes which of them load it.

    python benches/compare/engines.py --nq target/release/nq --python VENV/bin/python

Exports the demo model in every scheme of compressed-tensors, GPTQ and AWQ, loads each folder in the
transformers that VENV has (GPTQ and AWQ where GPTQModel is installed beside it), and compares the
perplexity of 512 tokens with `nq eval --activations f32`. A folder loads if it has that perplexity
within 0.1 %. The rows go to formats/src/export/engines.csv, those of the same engine replaced; rows
of engines that this script does not run (vLLM) are written by hand and kept. Not part of CI: the
packages take some 5 GB.
"""

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benches/records"
TABLE = ROOT / "formats/src/export/engines.csv"
TOKENS = 512
FORMATS = {
    "compressed-tensors": [(4, "sym"), (4, "asym"), (8, "sym"), (8, "asym")],
    "gptq": [(4, "sym"), (4, "asym"), (8, "sym"), (8, "asym")],
    "awq": [(4, "asym")],
}
TITLES = {"compressed-tensors": "compressed-tensors", "gptq": "GPTQ", "awq": "AWQ"}


def versions():
    """Runs in the venv: name and version of the engine for each format it can load."""
    from importlib.metadata import PackageNotFoundError, version

    def find(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    short = lambda v: ".".join(v.split(".")[:2])
    base = f"transformers {short(find('transformers'))}"
    engines = {}
    if found := find("compressed-tensors"):
        engines["compressed-tensors"] = f"{base} with compressed-tensors {short(found)}"
    if found := find("gptqmodel"):
        engines["gptq"] = engines["awq"] = f"{base} with GPTQModel {short(found)}"
    return engines


def perplexity(folder, text):
    """Runs in the venv: perplexity of the first tokens of a text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(Path(text).read_text())["input_ids"][:TOKENS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([ids])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:]).exp().item()


def in_venv(python, *args):
    """Calls a function of this file in the venv; its result, or the last line of its error."""
    run = subprocess.run([python, __file__, *map(str, args)], capture_output=True, text=True)
    lines = run.stdout.strip().splitlines()
    if run.returncode == 0 and lines:
        return json.loads(lines[-1]), None
    errors = [line for line in run.stderr.strip().splitlines() if "Error" in line]
    return None, (errors or ["no result"])[-1].strip().replace("\n", " ")


def measure(nq, python, home):
    """Rows of all exports that the venv has an engine for."""
    env = {**os.environ, "NQ_HOME": str(home)}
    text = home / "text.txt"
    text.write_text((ROOT / "assets/demo-eval.txt").read_text()[:6000])

    def call(*args):
        done = subprocess.run([nq, *map(str, args)], env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"nq {' '.join(map(str, args))}: {done.stderr}")
        return done.stdout

    engines, error = in_venv(python, "--versions")
    if error:
        sys.exit(f"{python}: {error}")
    quantize = ["--method", "rtn", "--eval-tokens", 256, "--head-bits", 16, "--device", "cpu"]
    for format, schemes in FORMATS.items():
        for bits, zeros in schemes if format in engines else []:
            source, out = home / f"{bits}-{zeros}", home / f"{format}-{bits}-{zeros}"
            if not source.exists():
                flags = ["--bits", bits, f"--{zeros}", "--group-size", 128, "--out", source]
                call("quantize", "demo", *quantize, *flags)
            call("convert", source, out, "--format", format, "--requantize")
            window = ["--protocol", "hf", "--ctx", TOKENS, "--windows", 1, "--text", text]
            report = call("eval", out, *window, "--activations", "f32", "--json", "--device", "cpu")
            ours = json.loads(report)[0]["ppl"]
            theirs, why = in_venv(python, "--perplexity", out, text)
            if theirs is not None and abs(theirs / ours - 1) > 1e-3:
                why = f"its perplexity is {theirs:.4f} and nq's {ours:.4f}"
            print(engines[format], format, bits, zeros, ours, theirs, why, file=sys.stderr)
            yield [TITLES[format], bits, zeros, engines[format], "no" if why else "yes",
                   datetime.date.today().isoformat(), why or ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nq", default="nq")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--versions", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--perplexity", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.versions:
        return print(json.dumps(versions()))
    if args.perplexity:
        return print(json.dumps(perplexity(*args.perplexity)))
    with tempfile.TemporaryDirectory() as home:
        new = list(measure(args.nq, args.python, Path(home)))
    head, *old = list(csv.reader(TABLE.read_text().splitlines(), quoting=csv.QUOTE_NONE))
    measured = {(row[0], row[3]) for row in new}
    old = [[*row[:6], ",".join(row[6:])] for row in old]
    kept = [row for row in old if (row[0], row[3]) not in measured]
    # A reason in words, written by hand, stays as long as the row says no.
    words = {tuple(row[:5]): row[6] for row in old}
    for row in new:
        row[6] = words.get(tuple(map(str, row[:5])), row[6])
    rows = sorted([list(map(str, row)) for row in kept + new], key=lambda r: (r[0], r[3], r[1:3]))
    TABLE.write_text("".join(",".join(row) + "\n" for row in [head, *rows]))


if __name__ == "__main__":
    main()
