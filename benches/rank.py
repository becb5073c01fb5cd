#!/usr/bin/env python3
"""Ranks the demo model, or another, in the formats that nq writes and reads: one page, one record.

    benches/rank.py OUT [--nq target/release/nq] [--source demo] [--windows 16] [--only NAME ...] [--activations auto]
    benches/rank.py OUT --llama DIR --calib TEXT       also llama.cpp's types, with an importance matrix of TEXT
    benches/rank.py OUT --floats FOLDER                also FP8 and NVFP4 of the source in FOLDER (small_floats.py)
    benches/rank.py OUT --more FILE ...                also files that are there, such as EXL3 of benches/trellis/exl3.py
    benches/rank.py OUT --agree TEXT --llama DIR ...   llama-perplexity's KL divergence beside nq's, of the GGUF files
    benches/rank.py OUT --quick                        a few formats, rounded to nearest, one window: tries this script in seconds

Makes the files in OUT/files (those that are there already are taken as they are), ranks them with `nq rank`, and writes
OUT/ranking.html, OUT/ranking.json, OUT/record.json and OUT/ranking.csv, one line a file. Fails if the page lacks a file or the
frontier is not what the figures say. --agree writes OUT/agreement.csv: llama-perplexity runs each file as it does (activations
rounded to 8 bits) and with the same weights expanded to F32, nq with activations in f32, both in windows of 512 whose second
half is scored.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
from pathlib import Path

# Name: how `nq quantize` makes it.
MADE = {
    "int8": ["--bits", "8"],
    "int4-rtn": ["--bits", "4", "--simple", "--method", "rtn"],
    "int4-gptq": ["--bits", "4", "--simple", "--method", "gptq"],
    "mix-3": ["--bits", "3"],
    "mix-4": ["--bits", "4"],
    "mix-5": ["--bits", "5"],
    "mix-6": ["--bits", "6"],
    "trellis-2": ["--bits", "2", "--trellis"],
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
QUICK = ["int8", "mix-4", "gptq", "gguf-4"]
FLOATS = ["fp8-block", "fp8-row", "nvfp4"]
TYPES = """IQ2_XXS IQ2_XS IQ2_S IQ2_M Q2_K IQ3_XXS IQ3_XS IQ3_S IQ3_M Q3_K_S Q3_K_M Q3_K_L IQ4_XS IQ4_NL Q4_0 Q4_1 Q4_K_S
Q4_K_M Q5_0 Q5_1 Q5_K_S Q5_K_M Q6_K Q8_0 MXFP4""".split()
COLUMNS = """protocol,file,format,bytes,body,embedding_and_head,bits_per_weight,activations,frontier,kld,kld_se,median,p99,p99_se,p999,
same_top1,ln_ppl_ratio,prose,code,mathematics,languages,chat,same_32,same_300,mean_equal,calls_valid,calls_same,held_valid,
held_same""".replace("\n", "").split(",")


def said(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr.strip()[-2000:]}")
    return done.stdout


class Files:
    """Makes the files that are not there yet."""

    def __init__(self, args):
        self.args, self.home = args, args.out / "files"
        self.home.mkdir(parents=True, exist_ok=True)

    def quantized(self, name):
        out = self.home / (f"{name}.gguf" if name.startswith("gguf") else name)
        if not out.exists():
            how = [*MADE[name], *(["--method", "rtn"] if self.args.quick else [])]
            said(self.args.nq, "quantize", self.args.source, *how, "--no-measure", "--out", out)
        return out

    def floats(self, kind):
        out = self.home / kind
        if not out.exists():
            said(sys.executable, Path(__file__).with_name("small_floats.py"), self.args.floats, out, kind)
        return out

    def source(self):
        out = self.args.out / "source.gguf"
        if not out.exists():
            said(self.args.nq, "convert", self.args.source, out, "--format", "gguf", "--type", "f32")
        return out

    def llama(self, program, *args):
        return said(self.args.llama / program, *args)

    def unseen(self):
        """How llama-quantize writes the MTP layer, which no text passes, so that the matrix lacks it."""
        config = Path(self.args.source) / "config.json"
        settings = json.loads(config.read_text()) if config.exists() else {}
        settings = settings.get("text_config", settings)
        layers = settings.get("mtp_num_hidden_layers", 0)
        return ["--tensor-type", f"blk\\.{settings['num_hidden_layers']}\\.=q8_0"] if layers else []

    def typed(self, kind):
        out, matrix = self.home / f"{kind}.gguf", self.args.out / "matrix.gguf"
        if not matrix.exists():
            self.llama("llama-imatrix", "-m", self.source(), "-f", self.args.calib, "-o", matrix, "-c", 512, "-t", 2)
        if not out.exists():
            # No type is MXFP4 in all layers of a dense model.
            how = ["--tensor-type", "blk=mxfp4", self.source(), out, "Q8_0"] if kind == "MXFP4" else [self.source(), out, kind]
            self.llama("llama-quantize", "--imatrix", matrix, *self.unseen(), *how)
        return out

    def all(self):
        made = [self.quantized(name) for name in self.args.only]
        made += [self.floats(kind) for kind in FLOATS if self.args.floats]
        return made + self.args.more + [self.typed(kind) for kind in self.args.types if self.args.llama]


def rank(args, made):
    out = args.out
    ranked = said(args.nq, "rank", args.source, *made, "--windows", args.windows, "--activations", args.activations, "--json",
                  "--report", out / "ranking.html", "--record", out / "record.json")
    (out / "ranking.json").write_text(ranked)
    ranking = json.loads(ranked)
    with (out / "ranking.csv").open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
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
            lines.writerow(row + ["" if value is None else f"{value:.4g}" for value in measured])
    check(ranking, (out / "ranking.html").read_text(), (out / "record.json").read_text())


def check(ranking, page, record):
    """The page shows all files and their frontier; the record can be sent."""
    files = ranking["files"]
    size = lambda f: (f["bytes"], f["text"]["kld"]["mean"])
    beats = lambda a, b: a != b and all(x <= y for x, y in zip(a, b))
    for f in files:
        best = not any(beats(size(other), size(f)) for other in files)
        assert best == f["frontier"], f"{f['name']} is marked wrongly"
        assert ("* " if best else "") + f["name"] in page, f"the page lacks {f['name']}"
    assert page.count("<svg") == 1, "the page lacks its plot"
    sent = json.loads(record)
    assert len(sent["models"]) == len(files) + 1 == len(sent["quality"]) + 1
    assert all(len(file["sha256"]) == 64 for model in sent["models"] for file in model["files"])
    assert len(record) < 65_536 or len(files) > 25, "longer than an issue may be"


def agree(args, files):
    """llama-perplexity's figures beside nq's."""
    window = ["--protocol", "llama", "--ctx", 512, "--text", args.agree, "--against", args.source, "--json"]
    logits, expanded = args.out / "logits", args.out / "expanded.gguf"
    # Its repacked weights crash on CPUs with AMX (IQ2_XXS, llama.cpp of llama-cpp-python 0.3.36).
    judge = ["-c", 512, "-t", 2, "--no-repack", "-f", args.agree, "--kl-divergence-base", logits]
    files.llama("llama-perplexity", "-m", files.source(), *judge)

    def by_llama(path):
        done = subprocess.run([str(p) for p in [args.llama / "llama-perplexity", "-m", path, *judge, "--kl-divergence"]],
                              capture_output=True, text=True)
        found = re.search(r"Mean +KLD: +([0-9.e-]+) ± +([0-9.e-]+)", done.stdout + done.stderr)
        if not found:
            sys.exit(f"llama-perplexity prints no KL divergence of {path}: {done.stderr[-2000:]}")
        return found.groups()

    with (args.out / "agreement.csv").open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow("file,llama_as_run,llama_as_run_se,llama_f32,llama_f32_se,nq_f32,nq_as_run".split(","))
        for path in [files.source(), *(files.typed(kind) for kind in args.types)]:
            whole = path == files.source()
            if not whole:
                expanded.unlink(missing_ok=True)
                files.llama("llama-quantize", "--allow-requantize", path, expanded, "F32")
            run, exact = by_llama(path), by_llama(path if whole else expanded)
            kld = lambda how: json.loads(said(args.nq, "eval", path, *window, "--activations", how))[0]["kld"]["mean"]
            lines.writerow([path.stem, *run, *exact, f"{kld('f32'):.6g}", f"{kld('auto'):.6g}"])
            file.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nq", default="target/release/nq")
    parser.add_argument("--source", default="demo")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--only", nargs="*", choices=MADE, default=list(MADE))
    parser.add_argument("--quick", action="store_true", help="few formats, by rtn, and one window")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--floats", type=Path, metavar="FOLDER", help="the source as a folder of safetensors")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--calib", type=Path, metavar="TEXT", help="text of the importance matrix")
    parser.add_argument("--more", nargs="*", type=Path, default=[], metavar="FILE", help="further files of the source")
    parser.add_argument("--types", nargs="*", choices=TYPES, default=TYPES)
    parser.add_argument("--agree", type=Path, metavar="TEXT")
    args = parser.parse_args()
    if args.quick:
        args.only, args.windows = QUICK, 1
    if args.llama and not args.calib or args.agree and not args.llama:
        parser.error("--llama needs --calib, and --agree needs --llama")
    files = Files(args)
    if args.agree:
        agree(args, files)
    else:
        rank(args, files.all())


if __name__ == "__main__":
    main()
