#!/usr/bin/env python3
"""Tables, pictures and numbers of README and docs, made from benches/records.

    docs/figures.py            fails where a table, a picture or a number in a sentence differs from the records
    docs/figures.py --write    makes them anew, and docs/lab/claims.md, which lists what holds each claim

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`; NAME is a function below. PICTURES names the
pictures. A number in a sentence stands before `<!--= NAME -->`; prose.py has its names, and checks how pages are written.
To show a newer measurement, put its rows into benches/records and name the file in the function.
"""

import re
import sys

import claims
import prose
from pictures import EXL3, first_picture, ladder_picture
from records import ROOT, percent, row, rows, sent_lines, table, whole

CLAIMED = "claims.md"
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != CLAIMED)]

PRESETS = ["0.6b", "1.7b", "4b", "8b", "14b", "32b"]


# Quality of the demo model. What is the default comes first after the source.
QUALITY = [
    ("source, bf16", "2026-11-21-methods.csv", {"method": "source"}),
    ("INT8 g128 (`--bits 8`)", "2026-11-21-methods.csv", {"method": "gptq", "scheme": "int8 g128 symmetric"}),
    ("4 bits, mixed (`--bits 4`)", "2026-11-22-mixes.csv", {"command": "--bits 4"}),
    ("bits chosen for 8.58 MB (`--target-size`)", "2026-11-22-mixes.csv", {"command": "--target-size 8580000B"}),
    ("bits chosen for 11.55 MB", "2026-11-22-mixes.csv", {"command": "--target-size 11.55MB --eval-tokens 4096"}),
    ("INT4 g64 (`--bits 4 --simple`)", "2026-11-21-methods.csv", {"method": "gptq", "tensor_bytes": "8502784"}),
    ("bits chosen for 8.58 MB, tuned on an H200", "2026-11-23-gpu-tuning.csv", {"steps": "600", "tensor_bytes": "8579072"}),
    ("bits chosen for 10.16 MB, tuned on an H200", "2026-11-23-gpu-tuning.csv", {"steps": "600", "tensor_bytes": "10158592"}),
    ("bits chosen for 8.58 MB, tuned for 20 minutes on two CPU cores", "2026-11-23-cpu-tuning-by-step.csv", {"steps": "600"}),
]


def quality():
    lines = []
    for label, file, wanted in QUALITY:
        r = row(file, **wanted)
        kld = r.get("mean_kld") or r.get("books") or r["kld_700k"]
        ppl = r.get("perplexity") or r.get("ppl_books")
        same = r.get("same_top1") or r.get("same_top1_books")
        lines.append([
            label,
            f"{int(r['tensor_bytes']) / 1e6:.2f} MB",
            "0" if float(kld) == 0 else f"{float(kld):.5f}" if float(kld) < 0.001 else f"{float(kld):.4f}",
            f"{float(ppl):.2f}" if ppl else "not measured",
            percent(same) if same else "not measured",
        ])
    return table(["demo model", "size", "mean KLD", "perplexity", "same best token"], lines)


LADDER = "2026-11-23-compare-quality.csv"


MIXTURE_LADDER = "2026-11-23-mixture-quality.csv"


def rungs(file, wiki):
    """llama.cpp's types, and nq's files of the same size, in the order of their sizes."""
    lines = []
    for r in rows(file, maker="llama.cpp"):
        size = r["tensor_bytes"]
        ours = {o["maker"]: o for o in rows(file) if f"--target-size {size}B" in o["how"]}
        cell = lambda o, text: f"{float(o[text]):.4f}" if o else ""
        lines.append([
            f"{int(size) / 1e6:.2f} MB", r["how"], cell(r, "books_kld"), cell(ours["nq"], "books_kld"),
            cell(ours.get("nq gguf"), "books_kld"),
            *([cell(r, "wiki_kld"), cell(ours["nq"], "wiki_kld")] if wiki else []),
        ])
    head = ["size", "llama.cpp", "KLD", "nq", "nq, as GGUF"]
    return table(head + (["llama.cpp on WikiText", "nq on WikiText"] if wiki else []), lines)


# README's kinds of files: name, what makes it, its row of quality, and its speed.
def files():
    mix, simple = (whole(one_row("8b", weights)["tok_s"]) for weights in ["mix", "simple"])
    trellis = whole(row("2026-11-27-trellis-layers.csv", model="qwen3-8b", bits="4")["3"])
    theirs = {e: whole(row(GPU_OTHERS, engine=e, model="8b")["1"]) for e in ["vLLM", "llama.cpp"]}
    lines = []
    for name, file, wanted, speed in [
        ("**nq `--bits 4`**, the default", "2026-11-22-mixes.csv", {"command": "--bits 4"}, mix),
        ("**nq `--trellis`**", "2026-11-26-trellis-files.csv", {"flags": "(4 bits)"}, f"{trellis} ¹"),
        ("nq `--bits 4 --simple`", "2026-11-21-methods.csv", {"method": "gptq", "tensor_bytes": "8502784"}, simple),
        ("llama.cpp `Q4_K_S`", "2026-11-26-compare-quality.csv", {"how": "Q4_K_S"}, None),
        ("llama.cpp `Q4_K_M`", "2026-11-26-compare-quality.csv", {"how": "Q4_K_M"}, None),
        ("EXL3, 4 bits", EXL3, {"table": "6"}, None),
        ("llama.cpp `Q4_0`", None, {}, theirs["llama.cpp"]),
        ("vLLM 0.26, GPTQ 4 bits", None, {}, theirs["vLLM"]),
    ]:
        r = row(file, **wanted) if file else {}
        size = r.get("tensor_bytes") or r.get("bytes")
        kld = next((r[k] for k in ["kld_700k", "kld_f32", "mean_kld", "books_kld", "kld"] if r.get(k)), None)
        lines.append([name, f"{int(size) / 1e6:.2f} MB" if size else "–", f"{float(kld):.4f}" if kld else "–", speed or "–"])
    return [*table(["kind of file", "demo model", "its KL divergence", "8B, tokens a second"], lines), "",
            "¹ of a file with one width of codes in all layers (`--simple`)."]


GGUF = "2026-11-30-gpu-gguf.csv"
# Parameters of Qwen3 8B, and those that a token reads: all but the embedding.
PARAMETERS, READ = 8_190_735_360, 8_190_735_360 - 151_936 * 4096


def kinds():
    """Bits and speed of kinds of files on a GPU, beside llama.cpp."""
    lines = []
    speed = lambda kind, engine: float(row(GGUF, model="8b", type=kind, engine=engine, test="tg128")["tok_s"])
    for kind in ["Q6_K", "Q5_K", "Q4_K_M", "IQ4_XS", "Q3_K", "IQ3_XXS", "IQ2_XXS"]:
        r = row(GGUF, model="8b", type=kind, engine="nq", test="tg128")
        held, stored = 8 * int(r["bytes_per_token"]) / READ, 8 * int(r["file_bytes"]) / PARAMETERS
        ours, theirs = speed(kind, "nq"), speed(kind, "llama.cpp")
        lines.append([f"GGUF `{kind}`", f"{stored:.2f}", f"{held:.2f}", whole(ours), f"{whole(theirs)} ({ours / theirs:.2f} x)"])
    for name, codes in [("EXL3, 4 bits", "exl3 4 bits"), ("nq `--trellis --simple`, 4 bits", "trellis 4 bits")]:
        r = row(GPU_EXL3, codes=codes, test="tg128")
        held = f"{8 * int(r['bytes_per_token']) / READ:.2f}"
        lines.append([name, held, held, whole(r["tok_s"]), "–"])
    return table(["kind of file", "bits a weight", "bits on a GPU", "nq, tokens a second", "llama.cpp"], lines)


GPU_EXL3 = "2026-11-30-gpu-exl3.csv"


def gguf_models():
    """Q4_K_M of several shapes beside llama.cpp."""
    lines = []
    for model, name in [("8b", "8B"), ("27b", "27B, 16 of 64 layers"), ("30b-a3b", "30B-A3B, 12 of 48"), ("35b-a3b", "35B-A3B, 8 of 40")]:
        cells = []
        for test, batch in [("tg128", "1"), ("pp512", "1"), ("tg64", "16")]:
            ours, theirs = (float(row(GGUF, model=model, type="Q4_K_M", engine=e, test=test, batch=batch)["tok_s"]) for e in ["nq", "llama.cpp"])
            cells.append(f"{whole(ours)} : {whole(theirs)} ({ours / theirs:.2f} x)")
        lines.append([name, *cells])
    return table(["Q4_K_M, tok/s, nq : llama.cpp", "one sequence", "prompts of 512", "16 sequences"], lines)


def exl3():
    lines = []
    for r in rows(EXL3):
        mb = [f"{int(r[k]) / 1e6:.2f} MB" for k in ["bytes", "bytes_once"]]
        lines.append([r["layers"], r["table"], *mb, r["kld"]])
    return table(["layers' bits", "embedding's and head's", "size", "with one table", "KLD"], lines)


def ladder():
    return rungs(LADDER, wiki=True)


def mixture_ladder():
    return rungs(MIXTURE_LADDER, wiki=False)


def hybrid_ladder():
    file, lines = "2026-11-26-hybrid-kquants.csv", []
    shown = lambda r: [f"{int(r['tensor_bytes']) / 1e6:.2f} MB", f"{float(r['kld']):.6f}"]
    for model in ["trained", "begun"]:
        # Each of nq's files stands behind the one whose size it keeps.
        for theirs, ours in zip(*(rows(file, model=model, maker=m) for m in ["llama.cpp", "nq"]), strict=True):
            less = percent(1 - float(ours["kld"]) / float(theirs["kld"]), 0)
            lines.append([model, theirs["how"], *shown(theirs), *shown(ours), less])
    return table(["hybrid", "llama.cpp", "size", "KLD", "nq", "KLD", "less by"], lines)


def methods():
    names = [
        ("rtn", "rtn"), ("rtn with `--clip`", "rtn --clip"), ("awq", "awq"), ("gptq", "gptq"),
        ("awq-gptq", "awq-gptq group by group"),
    ]
    lines = []
    for label, name in names:
        cells = [label]
        for scheme in ["g64 asymmetric", "g128 symmetric"]:
            r = rows("2026-11-21-methods.csv", method=name, scheme=scheme)[0]
            cells.append(f"{float(r['mean_kld']):.4f}, {float(r['perplexity']):.2f}")
        lines.append(cells)
    return table(["method", "INT4 g64, zero-points", "INT4 g128, no zero-points"], lines)


def variants():
    shown = [("head untied by a copy", "untied"), ("one layer of five dropped", "dropped"), ("outlier channels, 32 times the others", "outliers")]
    methods = ["rtn", "rtn --clip", "awq", "gptq"]
    get = lambda v, m: f"{float(row('2026-11-21-variants.csv', variant=v, method=m)['mean_kld']):.4f}"
    return table(["variant", *methods], [[label, *(get(v, m) for m in methods)] for label, v in shown])


def activations():
    file = "2026-11-21-cpu-activations.csv"
    def kld(weights, name):
        found = [r for r in rows(file, weights=weights) if r["activations"].startswith(name) or f"{name} (auto)" in r["activations"]]
        return f"{float(found[0]['kld_mean']):.2g}".replace("e-0", "e-") if found else ""
    shown = [("int8-g16", "int8 g16"), ("int8-g32", "int8 g32"), ("int8-g64", "int8 g64"), ("int8-g128", "int8 g128"), ("int16", "int16 g128")]
    lines = [[f"`{flag}`", kld("INT4", name), kld("INT8", name)] for flag, name in shown]
    lines.append(["`auto`", kld("INT4", "auto"), kld("INT8", "int16 g128")])
    return table(["`--activations`", "INT4 file", "INT8 file"], lines)


def tuning():
    file = "2026-11-23-gpu-tuning-variants.csv"
    lines = []
    for steps, codes in [("600", "0.00125"), ("600", "0.0025"), ("600", "0.0049"), ("1500", "0.0014"), ("2400", "0.0011")]:
        r = row(file, start="mix", steps=steps, codes=codes, other="")
        lines.append([whole(steps), codes, *(f"{float(r[text]):.4f}" for text in ["held_out", "books", "wiki"])])
    return table(["steps", "rate of codes", "sampled text", "books", "WikiText"], lines)


def gpu_quantize():
    file = "2026-11-22-gpu-quantize.csv"
    shown = [
        ("0.6B, gptq", row(file, model="0.6b", flags="a later build")),
        ("0.6B, auto (311 steps)", rows(file, model="0.6b")[3]),
        ("8B, gptq, `--device-memory 12GB`", row(file, model="8b", flags="--device-memory 12GB")),
        ("8B, auto (259 steps)", rows(file, model="8b")[1]),
    ]
    gb = lambda b: f"{int(b) / 1e9:.2f} GB"
    lines = [[label, whole(r["seconds"]), whole(r["layers"]), gb(r["estimate_bytes"]), gb(r["peak_bytes"])] for label, r in shown]
    mixture = row("2026-11-23-gpu-quantize.csv", model="30b-a3b")
    lines.append(["30B-A3B, gptq", whole(mixture["seconds"]), whole(mixture["layers"]), gb(mixture["estimated_device_bytes"]), gb(mixture["peak_device_bytes"])])
    return table(["shape, method", "seconds", "of which quantizing layers", "GPU memory, estimated", "at the peak"], lines)


def recipe():
    """Whole runs of `nq quantize` with the defaults, or nearly."""
    gb = lambda b: f"{float(b) / 1e9:.1f} GB"
    minutes = lambda s: f"{float(s) / 60:.1f}" if float(s) < 600 else f"{float(s) / 60:.0f}"
    # The record's last row, whose columns are its own: seconds in all and the peak of memory follow those of four stages.
    seconds, peak = list(rows("2026-11-26-cpu-quantize.csv", model="0.6b")[-1].values())[5:7]
    small = row("2026-11-23-gpu-quantize.csv", model="0.6b", flags="")
    eight = row("2026-11-22-gpu-quantize.csv", model="8b", flags="--device-memory 12GB")
    mixture = row("2026-11-23-gpu-quantize.csv", model="30b-a3b")
    trellis = {r["what"]: r["seconds"] for r in rows("2026-11-26-trellis-gptq-8b.csv")}
    lines = [
        ["0.6B", "two CPU cores (Zen 4)", minutes(seconds), "", gb(peak), gb(small["tensor_bytes"])],
        ["0.6B", "H200", minutes(small["seconds"]), gb(small["peak_device_bytes"]), gb(small["peak_rss_bytes"]), gb(small["tensor_bytes"])],
        ["8B, `--device-memory 12GB`", "H200", minutes(eight["seconds"]), gb(eight["peak_bytes"]), "", ""],
        ["8B, `--trellis`", "H200", minutes(trellis["all"]), gb(trellis["peak of GPU memory"]), gb(trellis["peak of host memory"]),
         gb(trellis["tensor bytes"])],
        ["30B-A3B", "H200", minutes(mixture["seconds"]), gb(mixture["peak_device_bytes"]), gb(mixture["peak_rss_bytes"]),
         gb(mixture["tensor_bytes"])],
    ]
    for name in ["27B", "35B-A3B"]:
        r = {r["what"]: r[f"{name} seconds"] for r in rows("2026-11-26-gpu-gptq-27b.csv")}
        lines.append([f"Qwen3.5-{name}", "H200", minutes(r["all"]), gb(r["peak of GPU memory"]), gb(r["peak of host memory"]),
                      gb(r["tensor bytes"])])
    return table(["model", "device", "minutes", "GPU memory", "memory", "file"], lines)


# Planned by the program, for any card: a test of nq-quantize writes it.
CARDS = "docs/cards.csv"
# Bytes of a card that its driver takes, and that stay free.
TAKEN = 0.8e9


def longest(model, file, cards, gib):
    """The longest context that fits so many cards of so much memory, with keys and values in 16 and in 8 bits."""
    found = []
    for kv in ["f16", "int8"]:
        fit = 0
        for r in rows(CARDS, model=model, file=file, kv=kv):
            weights, kept, buffers, table_bytes = (int(r[k]) for k in ["weights", "keys_and_values", "buffers", "embedding"])
            # Cards that share layers have buffers and the embedding each, and layers cannot be divided.
            needed = weights + kept + cards * buffers + (cards > 1) * (table_bytes + 0.03 * weights)
            if needed <= cards * (gib * 2**30 - TAKEN):
                fit = max(fit, int(r["context"]) // 1024)
        found.append(f"{fit}k" if fit else "–")
    return found[0] if found[0] == found[1] else " / ".join(found)


def cards_of(file, cards=1, sizes=(8, 12, 16, 24, 32, 48, 80)):
    models = dict.fromkeys(r["model"] for r in rows(CARDS))
    lines = []
    for model in models:
        r = rows(CARDS, model=model, file=file, kv="f16")[0]
        lines.append([f"`{model}`", f"{int(r['weights']) / 1e9:.1f} GB", *(longest(model, file, cards, gib) for gib in sizes)])
    few = "" if cards == 1 else f"{cards} x "
    return table([f"`{file}`", "weights", *(f"{few}{gib} GB" for gib in sizes)], lines)


def cards_4():
    return cards_of("--bits 4")


def cards_3():
    return cards_of("--trellis --bits 3", sizes=(8, 12, 16, 24, 32))


def cards_8():
    return cards_of("--bits 8", sizes=(12, 16, 24, 32, 48, 80))


def cards_two():
    return cards_of("--bits 4", cards=2, sizes=(12, 16, 24, 32))


GPU_PAGES = "2026-11-22-gpu-pages.csv"
DECODE = "2026-11-22-gpu-decode.csv"
LAYERS = "2026-11-24-gpu-layers.csv"   # of one sequence in INT4 or the mix
FEW = "2026-11-24-gpu-batches.csv"   # of up to eight sequences
SIXTEEN = "2026-11-25-gpu-batches.csv"   # of sixteen
GPU_OTHERS = "2026-11-22-gpu-against-others.csv"


def one_row(model, weights, kv="16", depth="16"):
    """nq's decode of one sequence, all layers by one kernel."""
    return row(LAYERS, preset=model, weights=weights, kv=kv, depth=depth)


def batch(model, sequences):
    """nq's INT4 decode of several sequences."""
    depth = "512" if sequences > 16 else "16"
    if sequences == 1:
        return whole(one_row(model, "simple")["tok_s"])
    if sequences <= 8:
        return whole(row(FEW, variant="few, prepared", preset=model, depth=depth, batch=str(sequences))["tok_s"])
    if sequences == 16:
        return whole(row(SIXTEEN, variant="rows, n 128", preset=model)["tok_s"])
    r = row(GPU_PAGES, preset=model, kv="16", test="tg128", depth=depth, batch=str(sequences))
    return whole(r["tok_s"])


def gpu_peers():
    lines = []
    for model, name in [("0.6b", "0.6B"), ("8b", "8B")]:
        peers = {e: row(GPU_OTHERS, engine=e, model=model) for e in ["vLLM", "llama.cpp"]}
        for sequences in [1, 16, 64]:
            lines.append([f"Qwen3-{name}, {sequences} sequence{'s' if sequences > 1 else ''}", batch(model, sequences),
                          *(whole(p[str(sequences)]) for p in peers.values())])
    return table(["one H200, decode, total tok/s", "nq INT4", "vLLM 0.26 GPTQ INT4", "llama.cpp Q4_0"], lines)


MIXTURE = "2026-11-23-gpu-mixture.csv"


def gpu_mixture():
    lines = []
    for label, test, sequences in [("prompt of 512 tokens", "pp512", 1), ("decode, 1 sequence", "tg", 1),
                                   *((f"decode, {n} sequences", "tg", n) for n in [8, 16, 64])]:
        found = [row(MIXTURE, engine=e, experts_on_cpu="0", test=test, sequences=str(sequences)) for e in ["nq", "llama.cpp"]]
        lines.append([label, *(whole(r["tok_s"]) for r in found)])
    return table(["Qwen3-30B-A3B, one H200, total tok/s", "nq INT4", "llama.cpp Q4_0"], lines)


def cpu_experts():
    lines = []
    for layers in [0, 24, 48]:
        of = {r["test"]: whole(r["tok_s"]) for r in rows(MIXTURE, engine="nq", experts_on_cpu=str(layers), sequences="1")}
        lines.append([f"{layers} of 48", of["tg"]])
    return table(["layers with experts on 16 CPU cores (`--cpu-experts`)", "decode, tok/s"], lines)


TWO_MEMORIES, LARGER = "2026-11-30-gpu-experts.csv", "2026-12-01-gpu-experts.csv"


def bank_experts():
    lines = []
    measured = rows(TWO_MEMORIES) + rows(LARGER)
    for decode in (r for r in measured if r["limit_tok_s"] and r["test"].startswith("tg") and r["case"] in BANK_CASES):
        prompts = [whole(r["tok_s"]) for r in measured if r["case"] == decode["case"] and r["test"].startswith("pp")]
        layers, all_layers = decode["layers"], decode["of_layers"]
        cut = "" if layers == all_layers else f", {layers} of {all_layers} layers"
        lines.append([
            f"{BANK_CASES[decode['case']]}{cut}, {decode['rooms']} of {decode['experts']}", percent(decode["found"]), whole(decode["tok_s"]),
            f"{whole(decode['limit_tok_s'])} ({percent(decode['of_limit'], 0)})", whole(decode["desktop_limit"]), *prompts,
        ])
    head = ["experts of each layer on the card", "choices that found theirs there", "decode, tok/s", "memory and bus allow (reached)",
            "a desktop allows, computed", "prompt of 2,048, tok/s"]
    return table(head, lines)


BANK_CASES = {"30b-half": "30B-A3B", "30b-quarter": "30B-A3B", "35b-half": "35B-A3B", "35b-quarter": "35B-A3B",
              "122b": "122B-A10B", "235b": "235B-A22B"}  # fmt: skip


def bank_peers():
    lines = []
    for case, share in [("half", "half"), ("few", "few or none")]:
        there = rows(TWO_MEMORIES, case=case)
        def rates(test):
            ours, theirs = (next(float(r["tok_s"]) for r in there if r["test"] == test and ("llama" in r["rooms"]) == peer) for peer in (False, True))
            return f"{ours:,.0f} and {theirs:,.0f} ({ours / theirs:.1f} x)"
        decode = next(r for r in there if r["test"] == "tg64")
        lines.append([f"{share} ({decode['rooms']} of {decode['experts']})", rates("pp2048"), rates("tg64"), percent(decode["found"])])
    head = ["experts on the card (nq's rooms)", "prompt of 2,048: nq and llama.cpp", "decode", "choices that nq found there"]
    return table(head, lines)


CPU_OTHERS = "2026-11-21-cpu-against-others.csv"


def cpu_rows(model, run, tests):
    lines = []
    for label, weights, peer, test in tests:
        ours = rows(CPU_OTHERS, run=run, model=model, engine="nq", weights=weights, test=test)[0]
        def theirs(engine):
            found = [r for r in rows(CPU_OTHERS, run=run, model=model, engine=engine, weights=peer)
                     if r["test"] == test or test.startswith("tg") and r["test"].startswith("tg") and "depth" not in r["test"] + test]
            return f"{float(found[0]['tok_s']):.0f}" if found else ""
        candle = "" if "depth" in test or test == "pp512" else theirs("candle")
        lines.append([f"{label}, {weights}", f"{float(ours['tok_s']):.0f}", theirs("llama.cpp"), candle])
    return lines


def cpu_peers():
    lines = cpu_rows("qwen3-0.6b", "4", [
        ("decode", "INT4", "Q4_0", "tg64"), ("decode", "INT8", "Q8_0", "tg64"),
        ("prefill of 128", "INT4", "Q4_K_M", "pp128"),
    ])
    return table(["two Zen 4 cores, Qwen3-0.6B, tok/s", "nq", "llama.cpp", "candle"], lines)


def cpu():
    lines = [["Qwen3-0.6B: " + l[0], *l[1:]] for l in cpu_rows("qwen3-0.6b", "4", [
        ("decode", "INT4", "Q4_0", "tg64"), ("decode", "INT8", "Q8_0", "tg64"),
        ("prefill of 128", "INT4", "Q4_K_M", "pp128"), ("prefill of 512", "INT4", "Q4_K_M", "pp512"),
        ("prefill of 128", "INT8", "Q8_0", "pp128"),
        ("decode at depth 3,584", "INT4", "Q4_0", "tg32 at depth 3584"),
        ("prefill of 256 at that depth", "INT4", "Q4_0", "pp256 at depth 3584"),
    ])]
    lines += [["Qwen3-1.7B: " + l[0], *l[1:]] for l in cpu_rows("qwen3-1.7b", "3", [
        ("decode", "INT4", "Q4_0", "tg32"), ("decode", "INT8", "Q8_0", "tg32"),
        ("prefill of 128", "INT4", "Q4_K_M", "pp128"), ("prefill of 512", "INT4", "Q4_K_M", "pp512"),
        ("prefill of 128", "INT8", "Q8_0", "pp128"),
    ])]
    return table(["two Zen 4 cores, tok/s", "nq", "llama.cpp", "candle"], lines)


def gpu_speed():
    file = "2026-11-21-gpu-speed.csv"
    lines = []
    for preset in PRESETS:
        cells, prefill = [preset.upper()], []
        for weights in ["mix", "simple"]:
            r = one_row(preset, weights)
            cells.append(f"{whole(r['tok_s'])} ({percent(r['share'], 0)})")
        for bits in ["4", "8", "16"]:
            one = {"preset": preset, "bits": bits, "kv": "16", "depth": "16", "batch": "1", "kernels": "fused"}
            if bits != "4":
                newer = [r for r in rows(DECODE, test="tg128", batch="1") if (r["preset"], r["bits"]) == (preset, bits)]
                r = newer[0] if newer else row(file, test="tg128", **one)
                cells.append(f"{whole(r['tok_s'])} ({percent(r['bandwidth_share'], 0)})")
            if (preset, bits) != ("32b", "16"):
                prefill.append(whole(row(file, test="pp512", **one)["tok_s"]))
        lines.append([*cells, " / ".join(prefill)])
    return table(["Qwen3", "mix", "INT4", "INT8", "FP16", "prefill of 512, INT4 / INT8 / FP16"], lines)


def gpu_depth():
    lines = []
    for label, weights, kv in [("INT4", "simple", "16"), ("INT4, 8-bit KV cache", "simple", "8"), ("mix", "mix", "16")]:
        speeds = [float(one_row("8b", weights, kv, depth)["tok_s"]) for depth in DEPTHS]
        lines.append([label, *(f"{whole(v)}" + ("" if v is speeds[0] else f" ({percent(v / speeds[0], 0)})") for v in speeds)])
    return table(["Qwen3-8B, tok/s at a depth of", *(f"{int(d):,}" for d in DEPTHS)], lines)


DEPTHS = ["16", "1100", "8192", "32640"]


def gpu_batch():
    sizes = [1, 4, 8, 16, 32, 64]
    lines = [[m.upper(), *(batch(m, n) for n in sizes)] for m in ["0.6b", "8b"]]
    return table(["Qwen3, INT4", *map(str, sizes)], lines)


def serve_load():
    file = "2026-11-22-serve-load.csv"
    lines = []
    for model, run, tokens in [("0.6b", "2", "512"), ("8b", "3", "16"), ("8b", "3", "512")]:
        find = lambda engine, run, n: next(r for r in rows(file, engine=engine, run=run, model=model, clients=str(n)) if r["in"] == tokens)
        ours = [find("nq", run, n) for n in [1, 16, 64]]
        theirs = [find("llama-server", "2", n) for n in [1, 16, 64]]
        lines.append([
            f"{model.upper()}, {tokens}", *(whole(r["tok_s"]) for r in ours),
            f"{whole(ours[-1]['first_ms_p50'])} / {float(ours[-1]['gap_ms_p50']):.1f} ms",
            " / ".join(whole(r["tok_s"]) for r in theirs),
        ])
    return table(["Qwen3, tokens in", "1 client", "16", "64", "first token / between tokens at 64", "llama-server, 1 / 16 / 64"], lines)


def drafts():
    gpu, cpu = "2026-11-25-gpu-drafts.csv", "2026-11-23-cpu-drafts.csv"
    lines = []
    for name, found in [("Qwen3-8B, H200", rows(gpu, variant="rows", model="8b", draft="ngram")),
                        ("Qwen3-0.6B, two cores", rows(cpu, preset="0.6b"))]:
        for what, text in [("an edit, 60 % copied", " 0.6"), ("an edit, 80 % copied", " 0.8"), ("prose", "prose")]:
            # Of each text the latest measurement.
            of = list({r["text"]: r for r in found if text in r["text"]}.values())
            if not of:
                continue
            speeds = [f"{float(r['tok_s_without']):.0f} / {float(r['tok_s_with']):.0f}" for r in of]
            lines.append([f"{name}: {what}", ", ".join(speeds), ", ".join(f"{float(r['speed_up']):.2f}" for r in of)])
    return table(["drafts from the text", "tok/s without / with", "ratio"], lines)


def fields(file, name):
    """The fields of a report and their meaning, from the structure that is written as JSON."""
    text = (ROOT / file).read_text()
    body = re.search(rf"pub(?:\(crate\))? struct {name} {{\n(.*?)\n}}", text, re.S)[1]
    lines, doc, flat = [], [], False
    for line in map(str.strip, body.splitlines()):
        renamed = re.search(r'rename = "(\w+)"', line)
        if line.startswith("///"):
            doc.append(line[3:].strip())
        elif line.startswith("#["):
            flat = flat or "flatten" in line
            key = renamed[1] if renamed else None
            if key:
                doc.append(f"\0{key}")
        elif line.startswith("pub ") or line.startswith("pub(crate) "):
            key = next((d[1:] for d in doc if d.startswith("\0")), line.split()[1].rstrip(":"))
            meaning = " ".join(d for d in doc if not d.startswith("\0")).replace("|", "\\|")
            meaning = re.sub(r"\[(`[^`]+`)\]", r"\1", meaning)
            if not flat:
                lines.append([f"`{key}`", meaning])
            doc, flat = [], False
    return table(["field", "meaning"], lines, right=False)


def json_quantize():
    return fields("quantize/src/report.rs", "QuantizeReport")


def json_eval():
    return fields("evals/src/report.rs", "EvalReport")


def json_comparison():
    return fields("evals/src/report.rs", "Comparison")


def json_errors():
    return fields("evals/src/spread.rs", "StandardErrors")


def json_depth():
    return fields("evals/src/depth.rs", "DepthBucket")


def json_depth_comparison():
    return fields("evals/src/depth.rs", "DepthComparison")


def json_bench():
    return fields("evals/src/report.rs", "BenchRow")


def json_experts():
    return fields("evals/src/report.rs", "ExpertsRow")


def json_fit():
    return fields("src/fit.rs", "FileRow")


def ranking(record):
    lines = []
    for r in rows(record):
        lines.append([
            ("* " if r["frontier"] == "1" else "") + f"`{r['file']}`", r["format"], f"{int(r['bytes']) / 1e6:.2f} MB",
            f"{float(r['kld']):.4f} ± {float(r['kld_se']):.4f}", percent(r["same_top1"]),
            percent(r["same_32"], 0),
        ])
    return table(["file", "format", "size", "KLD", "same best token", "answers"], lines)


def ranked():
    return ranking("2026-11-29-rank-demo.csv")


def ranked_hybrid():
    return ranking("2026-11-30-rank-hybrid.csv")


def agreeing(record):
    lines = []
    for r in rows(record):
        differs = float(r["nq_f32"]) / float(r["llama_f32"]) - 1 if float(r["llama_f32"]) > 1e-5 else None
        lines.append([
            r["file"], *(f"{float(r[column]):.5f}" for column in ("llama_as_run", "llama_f32", "nq_f32")),
            "" if differs is None else f"{100 * differs:+.1f} %",
        ])
    return table(["file", "llama.cpp as it runs", "llama.cpp in F32", "nq in f32", "difference in F32"], lines)


def agreement():
    return agreeing("2026-11-29-rank-agreement.csv")


def agreement_hybrid():
    return agreeing("2026-11-30-rank-agreement-hybrid.csv")


def exllamav3():
    lines = []
    for r in rows("2026-11-30-exllamav3-agreement.csv"):
        figures = [f"{float(r['exllamav3']):.5f} ± {float(r['exllamav3_se']):.5f}", f"{float(r['nq_f32']):.5f}"]
        differs = f"{100 * (float(r['ratio']) - 1):+.1f} %"
        lines.append([r["model"], f"`{r['file']}`", *figures, differs, f"{float(r['floor']):.6f}"])
    return table(["model", "file", "exllamav3", "nq in f32", "difference", "exllamav3's floor"], lines)


def sent():
    lines = sent_lines()
    return table(["model", "codes", "size", "figure", "protocol", "on", "nq"], lines) if lines else ["None has been sent yet."]


def json_record():
    return fields("evals/src/record.rs", "Record")


# Made by claims.py, of all pages.
CLAIMS = ROOT / "docs/lab" / CLAIMED
# Pictures by their file, from the repository's root.
PICTURES = {"docs/first.svg": first_picture, "docs/lab/ladder.svg": ladder_picture}


def main():
    write = "--write" in sys.argv[1:]
    block = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.S)
    differ, used, faults, tables, tied = [], set(), [], [], []
    for page in PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text()
        def table_of(m):
            lines, read = claims.using(globals()[m[2]])
            tables.append((name, m[2], read))
            return m[1] + "\n".join(lines) + "\n" + m[3]
        made = prose.tied(block.sub(table_of, text), name)
        for value in sorted(prose.names(text)):
            tied.append((name, value, *claims.using(prose.VALUES[value])))
        used |= prose.names(text)
        wrong = [*prose.faults(made, readme=name == "README.md"), *prose.dead_links(page)]
        faults += [f"{name}:{fault}" for fault in wrong]
        if made != text:
            differ.append(name)
            if write:
                page.write_text(made)
    for name, make in PICTURES.items():
        file = ROOT / name
        if not file.exists() or file.read_text() != make():
            differ.append(name)
            if write:
                file.write_text(make())
    faults += prose.sizes()
    faults += claims.faults({str(p.relative_to(ROOT)): p.read_text() for p in PAGES})
    if write or not CLAIMS.exists() or CLAIMS.read_text() != claims.page(tables, tied):
        differ.append(str(CLAIMS.relative_to(ROOT)))
        if write:
            CLAIMS.write_text(claims.page(tables, tied))
    faults += [f"docs/prose.py: no page uses {name}" for name in sorted(prose.VALUES.keys() - used)]
    if differ and not write:
        faults.append(f"figures differ from benches/records in {', '.join(differ)}: docs/figures.py --write")
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
