#!/usr/bin/env python3
"""Speed of nq beside other engines on this machine, in one go: a dated record and a plot.

    benches/compare/speed.py --nq target/release/nq --device cpu --presets 0.6b
    benches/compare/speed.py --nq target/release/nq --device cuda --presets 0.6b 8b --batches 16 64 --llama DIR

llama.cpp is looked for in --llama (a folder with `llama-bench`, or sources that are built there with cmake)
and in PATH; candle is measured where nq was built with the feature `candle`; vLLM is looked for in the
environment of the interpreter --vllm, or of this one. What is absent is named and left out. All run random
weights of the same shape: `nq synth` makes them, `nq convert` the GGUF file, and `nq quantize` the folder of
compressed-tensors that vLLM reads. `tg64` is an answer of 64 tokens, `tg64 x 4` are four at once, with the tokens
per second of all four; candle decodes one. The engines take turns, so that a machine whose speed changes changes
it for all. Rows go to benches/records/DATE-compare-DEVICE.csv, the plot beside them as .svg.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1] / "records"
PROMPT, ANSWER = 512, 64
BATCHES = [4, 16]
COLOURS = {"nq": "#1f5fb4", "llama.cpp": "#d9822b", "candle": "#7a7a7a", "vLLM": "#3c8d5a"}
# Runs in vLLM's environment. A step is a token of an answer after a prompt of one; the first token is left out.
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams

model, (prompt, answer, *batches) = sys.argv[1], map(int, sys.argv[2:])
llm = LLM(model=model, skip_tokenizer_init=True, max_num_seqs=max([1, *batches]), max_model_len=prompt + answer + 2,
          enable_prefix_caching=False, gpu_memory_utilization=0.5)   # on a CPU: of its memory

def seconds(prompt, tokens, sequences=1):
    prompts = [{"prompt_token_ids": [1000 + (i * 37 + s) % 5000 for i in range(prompt)]} for s in range(sequences)]
    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, wanted, use_tqdm=False)
    return time.perf_counter() - start

seconds(prompt, answer + 1)
rates = {f"pp{prompt}": prompt / seconds(prompt, 1)}
for n in [1, *batches]:
    seconds(1, 2, n)
    name = f"tg{answer}" + (f" x {n}" if n > 1 else "")
    rates[name] = n * answer / (seconds(1, answer + 1, n) - seconds(1, 1, n))
print(json.dumps(rates))
"""


def output(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def find_llama(folder, device):
    """The path of llama-bench, built if `folder` holds sources; None if there is none."""
    if folder is None:
        found = shutil.which("llama-bench")
        return Path(found) if found else None
    for place in [folder, folder / "bin", folder / "build/bin"]:
        if (place / "llama-bench").exists():
            return place / "llama-bench"
    if not (folder / "CMakeLists.txt").exists():
        sys.exit(f"{folder} holds neither llama-bench nor sources of llama.cpp")
    cuda = ["-DGGML_CUDA=ON"] if device == "cuda" else []
    output(["cmake", "-S", folder, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", *cuda])
    targets = ["llama-bench", "llama-batched-bench"]
    output(["cmake", "--build", folder / "build", "--target", *targets, "-j", os.cpu_count()])
    return folder / "build/bin/llama-bench"


def named(tokens, sequences):
    """The name of a decode test: tokens of each sequence, and how many are decoded at once."""
    return f"tg{tokens}" + (f" x {sequences}" if sequences > 1 else "")


def nq_rates(nq, model, device, engine, sizes, batches):
    """Tokens per second of prefill and decode by `nq bench`; None if this nq has no such engine."""
    rates = {}
    for batch in [1, *batches] if engine == "nq" else [1]:
        found = nq_bench(nq, model, device, engine, sizes if batch == 1 else [0, sizes[1]], batch)
        if found is None:
            return None
        rates.update({row["test"] if row["test"].startswith("pp") else named(sizes[1], batch): row["tok_s"]
                      for row in found})
    return rates


def nq_bench(nq, model, device, engine, sizes, batch):
    command = [nq, "bench", model, "--device", device, "--engine", engine, "--json", "--no-chat", "--repeats", 1,
               "-p", sizes[0], "-n", sizes[1], "--batch", batch]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode and "without the feature `candle`" in done.stderr:
        return None
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout)
    return found["rows"] if isinstance(found, dict) else found


def llama_rates(bench, model, device, sizes, batches):
    where = ["-m", model, "-ngl", 99 if device == "cuda" else 0]
    if device == "cpu":
        where += ["-t", os.cpu_count()]
    found = json.loads(output([bench, *where, "-o", "json", "-r", 1, "-p", sizes[0], "-n", sizes[1]]))
    rates = {f"pp{r['n_prompt']}" if r["n_prompt"] else named(r["n_gen"], 1): r["avg_ts"] for r in found}
    batched = bench.with_name("llama-batched-bench")
    if batches and not batched.exists():
        print(f"llama.cpp: no llama-batched-bench beside {bench}, batches left out", file=sys.stderr)
    elif batches:
        context = 256 + max(batches) * (sizes[1] + 1)
        command = [batched, *where, "-c", context, "-npp", 1, "-ntg", sizes[1], "-npl", ",".join(map(str, batches)),
                   "--output-format", "jsonl"]
        rows = [json.loads(line) for line in output(command).splitlines() if line.startswith("{")]
        rates.update({named(sizes[1], row["pl"]): row["speed_tg"] for row in rows})
    return rates


def has_vllm(python):
    """True if that interpreter can import vLLM."""
    return subprocess.run([python, "-c", "import vllm"], capture_output=True).returncode == 0


def vllm_rates(python, model, sizes, batches):
    lines = output([python, "-c", VLLM, model, *sizes, *batches]).splitlines()
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))   # it logs there, too


def measure(args, preset, folder, llama):
    """Rows of one shape."""
    dense, quantized, gguf = folder / "dense", folder / "int4", folder / "q4_0.gguf"
    output([args.nq, "synth", f"qwen3-{preset}", dense])
    rtn = ["--method", "rtn", "--eval-tokens", 256, "--device", args.device]
    output([args.nq, "quantize", dense, "--bits", 4, "--simple", "--out", quantized, *rtn])
    output([args.nq, "convert", dense, gguf, "--format", "gguf", "--type", "q4_0", "--requantize"])
    work = [args.sizes, args.batches]
    engines = {"nq": ("INT4 g64", lambda: nq_rates(args.nq, quantized, args.device, "nq", *work))}
    if llama:
        engines["llama.cpp"] = ("Q4_0", lambda: llama_rates(llama, gguf, args.device, *work))
    if args.device == "cpu":
        engines["candle"] = ("Q4_0", lambda: nq_rates(args.nq, gguf, "cpu", "candle", *work))
    if has_vllm(args.vllm):
        packed = folder / "compressed-tensors"
        output([args.nq, "quantize", dense, "--bits", 4, "--format", "compressed-tensors", "--out", packed, *rtn])
        engines["vLLM"] = ("INT4", lambda: vllm_rates(args.vllm, packed, *work))
    else:
        print(f"vLLM: not in the environment of {args.vllm}, left out", file=sys.stderr)
    rates = {}
    for turn in range(args.repeats):
        for engine, (_, run) in list(engines.items()):
            found = run()
            if found is None:
                print(f"{engine}: not in this nq, left out", file=sys.stderr)
                del engines[engine]
                continue
            for test, rate in found.items():
                rates.setdefault((engine, test), []).append(rate)
    for (engine, test), found in sorted(rates.items()):
        yield {"engine": engine, "model": preset, "weights": engines[engine][0], "test": test,
               "tok_s": f"{statistics.median(found):.2f}", "least": f"{min(found):.2f}", "most": f"{max(found):.2f}",
               "repeats": len(found)}


def plot(rows, title):
    """Horizontal bars, a group for each test of a model, each group on a scale of its own."""
    groups = {}
    for row in rows:
        groups.setdefault((row["model"], row["test"]), []).append(row)
    parts, y = [], 34
    for (model, test), group in groups.items():
        most = max(float(r["tok_s"]) for r in group)
        parts.append(f'<text x="8" y="{y}" font-weight="bold">Qwen3-{model.upper()}, {test}, tokens per second</text>')
        for row in group:
            y += 20
            width = 300 * float(row["tok_s"]) / most
            parts.append(
                f'<text x="8" y="{y + 3}">{row["engine"]} {row["weights"]}</text>'
                f'<rect x="150" y="{y - 8}" width="{width:.0f}" height="14" fill="{COLOURS[row["engine"]]}"/>'
                f'<text x="{156 + width:.0f}" y="{y + 3}">{float(row["tok_s"]):,.1f}</text>'
            )
        y += 32
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="540" height="{y}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/><text x="8" y="16">{title}</text>{"".join(parts)}</svg>\n')


def machine(device):
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return "one " + output(query).splitlines()[0]
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [l.split(":")[1].strip() for l in lines if l.startswith("model name")]
    return f"{os.cpu_count()} logical cores of {names[0] if names else platform.processor()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nq", default="nq", help="the program")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--presets", nargs="+", default=["0.6b"], help="shapes of Qwen3")
    parser.add_argument("--llama", type=Path, help="folder of llama-bench, or of llama.cpp's sources")
    parser.add_argument("--vllm", default=sys.executable, help="the Python interpreter that has vLLM")
    parser.add_argument("--repeats", type=int, default=3, help="turns of all engines; medians are written")
    parser.add_argument("--sizes", type=int, nargs=2, default=[PROMPT, ANSWER], help="tokens of prompt and answer")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES,
                        help="numbers of sequences that are also decoded at once, after a prompt of one token")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder for record and plot")
    args = parser.parse_args()
    llama = find_llama(args.llama, args.device)
    if llama is None:
        print("llama.cpp: no llama-bench in PATH and no --llama, left out", file=sys.stderr)
    rows = []
    for preset in args.presets:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(args, preset, Path(folder), llama)
    today = datetime.date.today().isoformat()
    head = f"{today}, {machine(args.device)}; random weights, medians of {args.repeats} turns"
    name = args.out / f"{today}-compare-{args.device}"
    with open(f"{name}.csv", "w", newline="") as file:
        file.write(f"# {head}; {output([args.nq, '--version']).strip()}\n")
        file.write("# benches/compare/speed.py " + " ".join(sys.argv[1:]) + "\n")
        out = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    Path(f"{name}.svg").write_text(plot(rows, head))
    for row in rows:
        print(f"{row['model']:6} {row['test']:7} {row['engine']:10} {row['weights']:9} {row['tok_s']:>12}")
    print(f"{name}.csv, {name}.svg")


if __name__ == "__main__":
    main()
