#!/usr/bin/env python3
"""Writes a model as EXL3, in exllamav3's code mul1, by this folder's search and rounding.

    cc -O3 -march=native -shared -fPIC benches/trellis/viterbi.c -o viterbi.so
    benches/trellis/exl3.py viterbi.so FOLDER OUT BITS TEXT
    nvcc -O3 -arch=native -shared -Xcompiler -fPIC benches/trellis/viterbi.cu -o viterbi-cuda.so
    benches/trellis/exl3.py viterbi-cuda.so FOLDER OUT BITS TEXT --device cuda

FOLDER is a model that transformers runs, dense or a hybrid: weights of its layers get BITS bits, the head 6, and what has
sides that are no multiples of 128 stays as it is, as do the embedding and the MTP layer. A tied head is stored beside the
embedding, as exllamav3 does. TEXT is what inputs of layers are watched on, each layer behind the rounded ones before it.
The format is that of exllamav3 1.6.5 (formats/src/import/exl3.rs); what exllamav3 does beyond it (scales of inputs, a
search for the best scale of a weight) is left out. Needs torch, transformers, safetensors, tokenizers.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from codes import GpuSearch, Search, check_chain
from rounding import HADAMARD, inverse_factor, rotate, signs

MUL1, TILE, STATE_BITS, HEAD_BITS = 0x83DCD12D, 16, 16, 6
WINDOW, WINDOWS, BATCH = 512, 64, 8


def code_values():
    """What states stand for: sums of the bytes of a product, of variance 1, in f16."""
    product = (np.arange(1 << STATE_BITS, dtype=np.uint64) * MUL1 & 0xFFFFFFFF).astype("<u4").view(np.uint8).reshape(-1, 4)
    factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
    values = ((1024 + product.sum(1, dtype=np.int64)) * factor + offset).astype(np.float16).astype(np.float32)
    return torch.from_numpy(values)[:, None]


# Input and output of each value of a tile, in the order of its sequence: as lanes of a warp hold B of mma.m16n8k16.
LANE, J = np.divmod(np.arange(TILE * TILE), 8)
INPUT, OUTPUT = LANE % 4 * 2 + J % 2 + 8 * (J // 2 % 2), LANE // 4 + 8 * (J // 4)


def packed(states, bits):
    """The 32-bit words of sequences [count, 256]: each state's newest bits, the first ones highest."""
    new = (states[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(new.reshape(len(states), -1).astype(np.uint8), axis=1).view(">u4").astype("<u4").view("<i2")


class Rounding:
    """Rounds weights one after another."""

    def __init__(self, library, device):
        self.values, self.count = code_values().to(device), 0
        self.on_cpu = device == "cpu"
        self.search = (Search if self.on_cpu else GpuSearch)(library)

    def states(self, bits, x):
        if self.on_cpu:
            return torch.from_numpy(self.search(self.values.numpy(), bits, x.numpy()).astype(np.int64))
        return self.search(self.values, bits, x).long()

    def __call__(self, w, h, bits):
        """w [outputs, inputs] with second moments h of its inputs: the tensors of EXL3, and the values they stand for."""
        seed, self.count = self.count, self.count + 1
        rows, columns = w.shape
        left, right = signs(rows, 1000 + seed).to(w), signs(columns, seed).to(w)
        scale = w.square().mean(1, keepdim=True).sqrt().clamp(min=1e-8)
        turned = rotate(rotate(w / scale, right).T.contiguous(), left).T.contiguous()
        gain = turned.square().mean().sqrt()
        turned = turned / gain
        h = rotate(rotate(h, right).T.contiguous(), right)
        u = inverse_factor(h)
        q, tiles = torch.empty_like(turned), []
        for at in range(0, columns, TILE):
            here = slice(at, at + TILE)
            block = turned[:, here].unflatten(0, (-1, TILE))  # [rows / 16, outputs, inputs]
            states = self.states(bits, block[:, OUTPUT, INPUT])
            known = states.cpu().numpy()
            check_chain(known, STATE_BITS, bits)
            back = torch.empty_like(block)
            back[:, OUTPUT, INPUT] = self.values[states, 0]
            q[:, here] = back.flatten(0, 1)
            tiles.append(packed(known, bits))
            error = (turned[:, here] - q[:, here]).double()
            fed = torch.linalg.solve_triangular(u[here, here], u[here, at + TILE:], upper=True)
            turned[:, at + TILE:] -= (error @ fed).float()
        suh, svh = right.half(), (left * scale[:, 0] * gain).half()
        values = rotate(rotate(q.T.contiguous(), torch.ones_like(left), back=True).T.contiguous(), torch.ones_like(right), back=True)
        tensors = {"trellis": torch.from_numpy(np.stack(tiles)), "suh": suh.cpu(), "svh": svh.cpu(),
                   "mul1": torch.tensor(MUL1 - (1 << 32), dtype=torch.int32)}
        return tensors, values * suh.float() * svh.float()[:, None]


class Seen(Exception):
    """The layers before the last one watched are not run."""


def moments(model, linears, windows, last):
    """Second moments of the inputs of `linears`, by name; what follows the module `last` is not run."""
    sums = {name: 0.0 for name in linears}

    def see(name):
        def hook(module, args):
            x = args[0].flatten(0, -2).double()
            sums[name] = sums[name] + x.T @ x
        return hook

    def stop(*_):
        raise Seen

    hooks = [linear.register_forward_pre_hook(see(name)) for name, linear in linears.items()]
    hooks.append(last.register_forward_hook(stop))
    for batch in windows.split(BATCH):
        try:
            model(batch, use_cache=False)
        except Seen:
            pass
    for hook in hooks:
        hook.remove()
    return {name: total / windows.numel() for name, total in sums.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("bits", type=int)
    parser.add_argument("text", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    round_to, device = Rounding(args.library, args.device), args.device
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).to(device).eval()
    ids = Tokenizer.from_file(str(args.folder / "tokenizer.json")).encode(args.text.read_text(errors="ignore"), add_special_tokens=False).ids
    windows = torch.tensor(ids[: min(len(ids) // WINDOW, WINDOWS) * WINDOW], device=device).view(-1, WINDOW)
    tensors = {}
    for part in sorted(args.folder.glob("*.safetensors")):
        tensors |= load_file(part)

    def rounded(name, linear, h, bits):
        made, values = round_to(linear.weight.data, h, bits)
        tensors.update({f"{name}.{kind}": t for kind, t in made.items()})
        tensors.pop(f"{name}.weight", None)
        return values

    for index, layer in enumerate(model.model.layers):
        linears = {f"model.layers.{index}.{name}": m for name, m in layer.named_modules()
                   if isinstance(m, torch.nn.Linear) and not any(side % HADAMARD for side in m.weight.shape)}
        for name, h in moments(model, linears, windows, layer).items():
            linears[name].weight.data = rounded(name, linears[name], h, args.bits)
    # The head's weight may be the embedding's, which stays.
    rounded("lm_head", model.lm_head, moments(model, {"lm_head": model.lm_head}, windows, model.lm_head)["lm_head"], HEAD_BITS)
    shutil.copytree(args.folder, args.out, ignore=shutil.ignore_patterns("*.safetensors*", "*.txt", "README*"))
    save_file({name: t.contiguous() for name, t in tensors.items()}, args.out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((args.out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "version": "1.6.5", "bits": args.bits, "head_bits": HEAD_BITS,
                                     "codebook": "mul1"}
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(args.out)


if __name__ == "__main__":
    with torch.no_grad():
        main()
