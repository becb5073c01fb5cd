#!/usr/bin/env python3
"""exllamav3's KL divergence of EXL3 files beside nq's, on the same text.

    benches/trellis/exllamav3_agreement.py SOURCE TEXT FOLDER... [--bytes 100000] [--nq target/release/nq] > agreement.csv

SOURCE is the unquantized model, FOLDERs its EXL3 files. Windows of 512 tokens of the first bytes of TEXT, of which the
second half is scored. exllamav3 runs source and files as it does (weights and inputs in f16), nq both in f32. The floor is
the divergence of the source in exllamav3 from the source in transformers, in f32. exllamav3 1.6.5 looks for the tensors of
text models of Qwen3.5 where whole models have them, so that it gets copies with these names. Needs a GPU, exllamav3,
transformers, safetensors.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from exllamav3 import Config, Model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

WINDOW = 512
SCORED = slice(WINDOW // 2, WINDOW - 1)


def renamed(folder, scratch):
    """The folder as exllamav3 reads it."""
    if json.loads((folder / "config.json").read_text())["architectures"] != ["Qwen3_5ForCausalLM"]:
        return folder
    copy = Path(scratch) / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    for part in folder.glob("*.safetensors"):
        whole = lambda name: f"model.language_{name}" if name.startswith("model.") else name
        save_file({whole(name): tensor for name, tensor in load_file(part).items()}, copy / part.name)
    return copy


def by_exllamav3(folder, windows):
    """Log-probabilities of the scored positions of each window, [windows, positions, vocabulary] in f32."""
    config = Config.from_directory(str(folder))
    model = Model.from_config(config)
    model.load(device="cuda:0", progressbar=False)
    forward = lambda window: model.forward(window[None], {"attn_mode": "flash_attn_nc"})[0, SCORED, :config.vocab_size]
    found = torch.stack([forward(window).float().log_softmax(-1).cpu() for window in windows])
    model.unload()
    return found


def by_transformers(folder, windows):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()
    return torch.stack([model(window[None].to("cuda")).logits[0, SCORED].log_softmax(-1).cpu() for window in windows])


def divergence(reference, found):
    """Mean KL divergence, its standard error over tokens, and the share of the same best token."""
    klds, same = [], 0
    for p, q in zip(reference.double(), found.double()):
        klds.append((p.exp() * (p - q)).sum(-1))
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
    klds = torch.cat(klds)
    return klds.mean().item(), (klds.std() / len(klds) ** 0.5).item(), same / len(klds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--bytes", type=int, default=100_000)
    parser.add_argument("--nq", default="target/release/nq")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    text = args.text.read_bytes()[: args.bytes].decode(errors="ignore")
    ids = torch.tensor(Tokenizer.from_file(str(args.source / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    scratch = tempfile.TemporaryDirectory()
    source = by_exllamav3(renamed(args.source, scratch.name), windows)
    floor = divergence(by_transformers(args.source, windows), source)
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow("file,tokens,exllamav3,exllamav3_se,exllamav3_same_top1,nq_f32,nq_same_top1,ratio,floor".split(","))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        for folder in args.folders:
            mean, error, same = divergence(source, by_exllamav3(renamed(folder, scratch.name), windows))
            command = [args.nq, "eval", folder, "--against", args.source, "--protocol", "llama", "--ctx", WINDOW, "--text",
                       file.name, "--activations", "f32", "--json"]
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"nq eval {folder}: {done.stderr.strip()}")
            nq = json.loads(done.stdout)[0]
            assert nq["tokens"] == len(windows) * (SCORED.stop - SCORED.start), "nq scored other tokens"
            figures = [mean, error, same, nq["kld"]["mean"], nq["same_top1"], mean / nq["kld"]["mean"], floor[0]]
            lines.writerow([folder.name, nq["tokens"], *(f"{value:.5g}" for value in figures)])


if __name__ == "__main__":
    with torch.inference_mode():
        main()
