#!/usr/bin/env python3
"""Ranks the demo model, or another, in the formats that nq writes: one page, one record.

    benches/rank.py OUT [--nq target/release/nq] [--source demo] [--windows 16] [--only NAME ...] [--activations auto]

Makes the files in OUT/files (those that are there already are taken as they are), ranks them with `nq rank`, and writes
OUT/ranking.html, OUT/ranking.json and OUT/ranking.csv, one line a file.
"""

import argparse
import csv
import json
import subprocess
from pathlib import Path

# Name: how `nq quantize` makes it.
MADE = {
    "int8": ["--bits", "8"],
    "int4-rtn": ["--bits", "4", "--simple", "--method", "rtn"],
    "int4-gptq": ["--bits", "4", "--simple", "--method", "gptq"],
    "mix-4": ["--bits", "4"],
    "mix-3": ["--bits", "3"],
    "mix-5": ["--bits", "5"],
    "mix-6": ["--bits", "6"],
    "trellis-3": ["--bits", "3", "--trellis"],
    "trellis-4": ["--bits", "4", "--trellis"],
    "gptq": ["--bits", "4", "--format", "gptq"],
    "awq": ["--bits", "4", "--format", "awq"],
    "compressed-tensors": ["--bits", "4", "--format", "compressed-tensors"],
    "gguf-4": ["--bits", "4", "--format", "gguf"],
    "gguf-5": ["--bits", "5", "--format", "gguf"],
    "gguf-6": ["--bits", "6", "--format", "gguf"],
    "gguf-8": ["--bits", "8", "--format", "gguf"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nq", default="target/release/nq")
    parser.add_argument("--source", default="demo")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--only", nargs="*", choices=MADE, default=list(MADE))
    parser.add_argument("--activations", default="auto")
    args = parser.parse_args()

    files = args.out / "files"
    files.mkdir(parents=True, exist_ok=True)
    made = []
    for name in args.only:
        path = files / (f"{name}.gguf" if name.startswith("gguf") else name)
        if not path.exists():
            subprocess.run([args.nq, "quantize", args.source, *MADE[name], "--no-measure", "--out", path], check=True)
        made.append(path)
    command = [args.nq, "rank", args.source, *made, "--windows", str(args.windows), "--activations", args.activations]
    report = args.out / "ranking.html"
    output = subprocess.run([*command, "--json", "--report", report], check=True, stdout=subprocess.PIPE)
    (args.out / "ranking.json").write_bytes(output.stdout)

    ranking = json.loads(output.stdout)
    with (args.out / "ranking.csv").open("w", newline="") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(
            "protocol,file,format,bytes,body,embedding_and_head,bits_per_weight,activations,frontier,kld,kld_se,median,"
            "p99,p99_se,p999,same_top1,ln_ppl_ratio,prose,code,mathematics,languages,chat,same_32,same_300,"
            "mean_equal,calls_valid,calls_same,held_valid,held_same".split(",")
        )
        for f in ranking["files"]:
            text, kld, answers, tasks = f["text"], f["text"]["kld"], f["answers"], f.get("tasks")
            row = [ranking["protocol"], f["name"], f["format"], f["bytes"]]
            row += [f["parts"]["body"], f["parts"]["embedding_and_head"], round(f["bits_per_weight"], 3)]
            row += [f["activations"], int(f["frontier"])]
            measured = [kld["mean"], text["errors"]["kld"], kld["median"], kld["p99"], text["kld_errors"]["p99"]]
            measured += [kld["p999"], text["same_top1"], text["ln_ppl_ratio"]]
            measured += [kind["kld"]["mean"] for kind in f["kinds"]]
            measured += [answers["same_32"], answers["same_300"], answers["mean_equal"]]
            shares = [(how, what) for how in ("free", "held") for what in ("valid", "same")]
            measured += [tasks[how][what] if tasks else None for how, what in shares]
            rows.writerow(row + ["" if value is None else f"{value:.4g}" for value in measured])


if __name__ == "__main__":
    main()
