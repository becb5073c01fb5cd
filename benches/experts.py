#!/usr/bin/env python3
"""Mixtures whose experts do not all have room on the GPU: `nq bench` beside what memory and bus allow, and llama.cpp.

    benches/experts.py target/release/nq OUT.csv [--cases 30b-half ...]
    benches/experts.py target/release/nq OUT.csv --llama DIR [--cases few half]

Weights are random, and so are the tokens that decoding draws. `--alike` gives all tokens a share of their embedding, so
that a layer's router chooses some experts again and again; each case has the share with which about as many choices find
their expert as published runs report for such a cache (SOURCES). nq counts what they found. The limit is the time that
memory and bus alone take for one token:

    t = (every token's weights) / memory + max((chosen and found) / memory, (chosen and not found) / bus)

Of a prompt, it is the time that the bus takes to bring each expert without room once. Of a preset that is cut to some of its layers, `whole_tok_s` is computed: the time of the layers is scaled, that of
the head is not. With --llama, a GGUF file of the shape of 30B-A3B with 12 layers (blocks of Q4_K) is read by nq and by
`llama-bench` in DIR, with the experts of as many layers on the CPU as nq has no rooms for. Needs numpy then.
"""

import argparse
import csv
import datetime
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

# Found by caches of so many of the experts: /docs/lab/performance.md names where they were published.
SOURCES = {
    "30b-half": "40 to 50 % cached: 90 to 95 %", "30b-quarter": "25 % cached: 75 to 80 %",
    "35b-half": "half cached: 82 %", "35b-quarter": "20 to 29 % cached: 56 to 65 %",
    "122b": "as 35B-A3B", "235b": "as 30B-A3B",
}  # fmt: skip
# preset, of all layers so many, share in common, memory, prompt tokens, decoded tokens
CASES = {
    "30b-half": ("qwen3-30b-a3b", 48, 48, 0.5, "10.7GB", 2048, 256),
    "30b-quarter": ("qwen3-30b-a3b", 48, 48, 0.5, "6.8GB", 2048, 256),
    "30b-long": ("qwen3-30b-a3b", 48, 48, 0.5, "8GB", 8192, 0),
    "35b-half": ("qwen3.5-35b-a3b", 40, 40, 0.2, "13.2GB", 2048, 256),
    "35b-quarter": ("qwen3.5-35b-a3b", 40, 40, 0.2, "8.9GB", 2048, 256),
    "122b": ("qwen3.5-122b-a10b", 48, 24, 0.2, "13GB", 2048, 192),
    "235b": ("qwen3-235b-a22b", 94, 24, 0.5, "14GB", 2048, 192),
}  # fmt: skip
COLUMNS = [
    "case", "preset", "layers", "of_layers", "alike", "gpu_memory", "rooms", "experts", "test", "tok_s", "tok_s_std",
    "p50_ms", "p99_ms", "found", "found_least", "found_most", "moved", "bus_mb_token", "bus_gb_s", "limit_tok_s",
    "of_limit", "whole_tok_s", "desktop_limit", "published",
]  # fmt: skip
# The GGUF file: hidden size, width of an expert, experts, chosen, heads, of keys, their size, vocabulary, layers.
HIDDEN, WIDTH, EXPERTS, CHOSEN, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 2048, 768, 128, 8, 32, 4, 128, 151936, 12
# nq's memory, and the layers of which llama.cpp has the experts on the CPU.
BESIDE = {"few": ("2.9GB", LAYERS), "half": ("4.7GB", LAYERS // 2)}


def bench(nq, flags):
    """The rows of `nq bench`, each prompt's with the time that the bus needs for all experts without room, and (rooms,
    experts) of each layer."""
    command = [nq, "bench", *map(str, flags), "--no-chat", "--repeats", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(" ".join(command), done.stderr, sep="\n", file=sys.stderr, flush=True)
    said = re.search(r"(\d+) of (\d+) experts of each layer .*? all \(([\d.]+) GB\) .*? at (\d+) GB/s", done.stderr)
    if not done.stdout or not said:
        print("nothing measured", file=sys.stderr)
        return [], None
    rooms, experts, size, bus = map(float, said.groups())
    rows = json.loads(done.stdout)
    for row in rows:
        if row["test"].startswith("pp"):
            row["experts"]["limit_tok_s"] = int(row["test"][2:]) / (size * (1 - rooms / experts) / bus)
    return rows, (int(rooms), int(experts))


def row_of(measured, rooms, **more):
    experts = measured.get("experts") or {}
    limit = experts.get("limit_tok_s")
    layers = experts.get("found_by_layer") or [0]
    figures = {
        "tok_s": measured["tok_s"], "tok_s_std": measured["tok_s_std"], "p50_ms": measured["ms_per_token_p50"],
        "p99_ms": measured["ms_per_token_p99"], "found": experts.get("found"), "found_least": min(layers),
        "found_most": max(layers), "moved": experts.get("moved"), "bus_gb_s": experts.get("bus_gb_s"),
        "bus_mb_token": experts.get("bus_bytes_per_token", 0) / 1e6, "limit_tok_s": limit,
        "of_limit": limit and measured["tok_s"] / limit, "desktop_limit": desktop(measured),
    }  # fmt: skip
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    return {"test": measured["test"], "rooms": rooms[0], "experts": rooms[1], **rounded, **more}


def desktop(measured):
    """Computed, not measured: the limit of a desktop with PCIe 4.0 x16 (25 GB/s) and a card that reads 1 TB/s, if it finds as
    many experts there."""
    experts = measured.get("experts")
    if not measured["test"].startswith("tg") or not experts or experts["found"] == 1:
        return ""
    missed = experts["bus_bytes_per_token"]
    chosen = missed / (1 - experts["found"])
    seconds = (measured["bytes_per_token"] - chosen) / 1e12 + max((chosen - missed) / 1e12, missed / 25e9)
    return 1 / seconds


def whole(measured, layers, of_layers):
    """Tokens per second of all layers, if those of `layers` took the measured time and a head is read once."""
    seconds = 1 / measured["tok_s"]
    head = 0.3e9 / (1e9 * measured["machine_gb_s"])
    return 1 / (head + (seconds - head) * of_layers / layers)


def presets(nq, cases, out):
    for case in cases:
        preset, of_layers, layers, alike, memory, prompt, decoded = CASES[case]
        cut = ["--layers", layers] if layers < of_layers else []
        flags = ["--preset", preset, *cut, "--bits", 4, "--simple", "--alike", alike, "--gpu-memory", memory, "-p", prompt, "-n", decoded]
        rows, rooms = bench(nq, flags)
        for r in rows:
            computed = f"{whole(r, layers, of_layers):.4g}" if cut else ""
            out(row_of(r, rooms, case=case, preset=preset, layers=layers, of_layers=of_layers, alike=alike,
                       gpu_memory=memory, whole_tok_s=computed, published=SOURCES.get(case, "")))


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def write_gguf(path):
    """Random blocks of Q4_K in the shape of 30B-A3B: all layers have the same, at places of their own in the file.
    Embeddings have half of their variance in common."""
    import numpy as np

    rng = np.random.default_rng(1)
    u32, f32 = lambda v: struct.pack("<II", 4, v), lambda v: struct.pack("<If", 6, v)
    tokens = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    tokens += [f"<{i:x}>" for i in range(len(tokens), VOCAB)]
    strings = lambda all: struct.pack("<IIQ", 9, 8, len(all)) + b"".join(map(text, all))
    arch = "qwen3moe"
    fields = {
        "general.architecture": struct.pack("<I", 8) + text(arch), f"{arch}.block_count": u32(LAYERS),
        f"{arch}.context_length": u32(40960), f"{arch}.embedding_length": u32(HIDDEN),
        f"{arch}.feed_forward_length": u32(6144), f"{arch}.expert_feed_forward_length": u32(WIDTH),
        f"{arch}.expert_count": u32(EXPERTS), f"{arch}.expert_used_count": u32(CHOSEN),
        f"{arch}.attention.head_count": u32(HEADS), f"{arch}.attention.head_count_kv": u32(KV_HEADS),
        f"{arch}.attention.key_length": u32(DIM), f"{arch}.attention.value_length": u32(DIM),
        f"{arch}.attention.layer_norm_rms_epsilon": f32(1e-6), f"{arch}.rope.freq_base": f32(1e6),
        "tokenizer.ggml.model": struct.pack("<I", 8) + text("gpt2"), "tokenizer.ggml.pre": struct.pack("<I", 8) + text("qwen2"),
        "tokenizer.ggml.tokens": strings(tokens), "tokenizer.ggml.merges": strings([]),
        "tokenizer.ggml.token_type": struct.pack("<IIQ", 9, 5, VOCAB) + np.ones(VOCAB, "<i4").tobytes(),
        "tokenizer.ggml.eos_token_id": u32(VOCAB - 1), "tokenizer.ggml.bos_token_id": u32(VOCAB - 2),
    }  # fmt: skip

    def blocks(count):
        data = rng.integers(0, 256, (count, 144), dtype=np.uint8)
        data[:, :4] = np.frombuffer(np.array([1e-4, 7.5e-4], "<f2").tobytes(), np.uint8)
        return data.tobytes()

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32) * 0.02

    each = normal(8192, HIDDEN)
    # So long that they decide what routers choose, as with --alike.
    embedding = np.resize((1000 * (each + each[:1]) / 2**0.5).astype("<f2"), (VOCAB, HIDDEN))
    made = {}

    def matrix(rows, inputs, copies=1):
        """In Q4_K, of `copies` stacked ones."""
        shape = (rows, inputs, copies)
        if shape not in made:
            made[shape] = blocks(rows * inputs * copies // 256)
        return ([inputs, rows] + [copies] * (copies > 1), 12, made[shape])

    vector = lambda n: ([n], 0, np.ones(n, "<f4").tobytes())
    tensors = {
        "token_embd.weight": ([HIDDEN, VOCAB], 1, embedding.tobytes()), "output_norm.weight": vector(HIDDEN),
        "output.weight": matrix(VOCAB, HIDDEN),
    }  # fmt: skip
    for i in range(LAYERS):
        layer = {
            "attn_norm": vector(HIDDEN), "ffn_norm": vector(HIDDEN), "attn_q_norm": vector(DIM), "attn_k_norm": vector(DIM),
            "attn_q": matrix(HEADS * DIM, HIDDEN), "attn_k": matrix(KV_HEADS * DIM, HIDDEN), "attn_v": matrix(KV_HEADS * DIM, HIDDEN),
            "attn_output": matrix(HIDDEN, HEADS * DIM), "ffn_gate_inp": ([HIDDEN, EXPERTS], 0, normal(EXPERTS, HIDDEN).tobytes()),
            "ffn_gate_exps": matrix(WIDTH, HIDDEN, EXPERTS), "ffn_up_exps": matrix(WIDTH, HIDDEN, EXPERTS),
            "ffn_down_exps": matrix(HIDDEN, WIDTH, EXPERTS),
        }  # fmt: skip
        tensors |= {f"blk.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    head = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), len(fields))
    head += b"".join(text(key) + value for key, value in fields.items())
    at = 0
    for name, (dims, kind, data) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)
        at += -(-len(data) // 32) * 32
    with open(path, "wb") as file:
        file.write(head + b"\0" * (-len(head) % 32))
        for _, _, data in tensors.values():
            file.write(data)
            file.write(b"\0" * (-len(data) % 32))


def beside(nq, llama, cases, out, keep):
    with tempfile.TemporaryDirectory(dir=keep) as folder:
        path = Path(folder) / "experts.gguf"
        write_gguf(path)
        for case in cases:
            memory, on_cpu = BESIDE[case]
            rows, rooms = bench(nq, [path, "--draw", "--gpu-memory", memory, "-p", 2048, "-n", 64])
            same = {"case": case, "preset": "GGUF Q4_K", "layers": LAYERS, "of_layers": LAYERS}
            for r in rows:
                out(row_of(r, rooms, gpu_memory=memory, **same))
            command = [llama / "llama-bench", "-m", path, "-ngl", "99", "-ncmoe", on_cpu, "-fa", "1", "-p", "2048", "-n", "64", "-r", "2", "-o", "json"]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            print(done.stderr[-2000:], file=sys.stderr, flush=True)
            for r in json.loads(done.stdout or "[]"):
                test = f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}"
                out({"test": test, "rooms": f"llama.cpp -ncmoe {on_cpu}", "tok_s": round(r["avg_ts"], 1), "tok_s_std": round(r["stddev_ts"], 1), **same})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nq")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--llama", type=Path, help="folder of llama-bench")
    parser.add_argument("--folder", help="where the GGUF file is for the time [default: that of temporary files]")
    args = parser.parse_args()
    named = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max",
                            "--format=csv,noheader"], capture_output=True, text=True)  # fmt: skip
    with open(args.out, "w", newline="", encoding="utf-8") as file:
        file.write(f"# {datetime.date.today()}, {named.stdout.strip()}; benches/experts.py, medians of 2\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()

        def out(row):
            writer.writerow(row)
            file.flush()

        if args.llama:
            beside(args.nq, args.llama, args.cases or BESIDE, out, args.folder)
        else:
            presets(args.nq, args.cases or CASES, out)


if __name__ == "__main__":
    sys.exit(main())
