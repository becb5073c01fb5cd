#!/usr/bin/env python3
"""Writes the demo model as EXL3, in exllamav3's code mul1, by this folder's search and rounding.

    cc -O3 -march=native -shared -fPIC benches/trellis/viterbi.c -o viterbi.so
    benches/trellis/exl3.py viterbi.so DEMO OUT BITS TEXT

Layers get BITS bits, the head 6; the embedding stays as it is, and the head is stored beside it, as exllamav3 does. TEXT is
what inputs of layers are watched on. The format is that of exllamav3 1.6.5 (formats/src/import/exl3.rs); what exllamav3
does beyond it (scales of inputs, a search for the best scale of a weight) is left out. Needs torch, safetensors, tokenizers.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from codes import Search, check_chain
from demo import PLACES, Demo
from quantized import quantized
from rounding import inverse_factor, rotate, signs

MUL1, TILE, STATE_BITS, HEAD_BITS = 0x83DCD12D, 16, 16, 6


def code_values():
    """What states stand for: sums of the bytes of a product, of variance 1, in f16."""
    product = (np.arange(1 << STATE_BITS, dtype=np.uint64) * MUL1 & 0xFFFFFFFF).astype("<u4").view(np.uint8).reshape(-1, 4)
    factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
    return ((1024 + product.sum(1, dtype=np.int64)) * factor + offset).astype(np.float16).astype(np.float32)


# Input and output of each value of a tile, in the order of its sequence: as lanes of a warp hold B of mma.m16n8k16.
LANE, J = np.divmod(np.arange(TILE * TILE), 8)
INPUT, OUTPUT = LANE % 4 * 2 + J % 2 + 8 * (J // 2 % 2), LANE // 4 + 8 * (J // 4)


def packed(states, bits):
    """The 32-bit words of sequences [count, 256]: each state's newest bits, the first ones highest."""
    new = (states[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(new.reshape(len(states), -1).astype(np.uint8), axis=1).view(">u4").astype("<u4").view("<i2")


def rounded(search, w, h, bits, seed):
    """w [outputs, inputs] with second moments h of its inputs: the tensors of EXL3, and the values that they stand for."""
    rows, columns = w.shape
    left, right = signs(rows, 1000 + seed).to(w), signs(columns, seed).to(w)
    scale = w.square().mean(1, keepdim=True).sqrt().clamp(min=1e-8)
    turned = rotate(rotate(w / scale, right).T.contiguous(), left).T.contiguous()
    gain = turned.square().mean().sqrt()
    turned = turned / gain
    h = rotate(rotate(h, right).T.contiguous(), right)
    u, values = inverse_factor(h), code_values()
    q, tiles = torch.empty_like(turned), []
    for at in range(0, columns, TILE):
        here = slice(at, at + TILE)
        block = turned[:, here].unflatten(0, (-1, TILE)).numpy()  # [rows / 16, outputs, inputs]
        states = search(values[:, None], bits, block[:, OUTPUT, INPUT])
        check_chain(states.astype(np.int64), STATE_BITS, bits)
        back = np.empty_like(block)
        back[:, OUTPUT, INPUT] = values[states]
        q[:, here] = torch.from_numpy(back).flatten(0, 1)
        tiles.append(packed(states, bits))
        error = (turned[:, here] - q[:, here]).double()
        fed = torch.linalg.solve_triangular(u[here, here], u[here, at + TILE:], upper=True)
        turned[:, at + TILE:] -= (error @ fed).float()
    suh, svh = right.half(), (left * scale[:, 0] * gain).half()
    values = rotate(rotate(q.T.contiguous(), torch.ones_like(left), back=True).T.contiguous(), torch.ones_like(right), back=True)
    tensors = {"trellis": torch.from_numpy(np.stack(tiles)), "suh": suh, "svh": svh,
               "mul1": torch.tensor(MUL1 - (1 << 32), dtype=torch.int32)}
    return tensors, values * suh.float() * svh.float()[:, None]


def main():
    library, folder, out, bits, text = sys.argv[1:]
    search, bits, out = Search(library), int(bits), Path(out)
    demo = Demo(folder, "cpu")
    windows = demo.tokens(Path(text).read_text(errors="ignore"))[:64]
    tensors = {}

    def choose(index, group, products, w, h):
        found = []
        for part, product in zip(w.split([len(demo.layers[index][p]) for p in products]), products):
            made, values = rounded(search, part, h, bits, len(tensors))
            tensors.update({f"model.layers.{index}.{PLACES[product]}.{kind}": t for kind, t in made.items()})
            found.append(values)
        return torch.cat(found)

    layers = quantized(demo, windows, choose)
    x = demo.embedding[windows]
    for weights in layers:
        x = demo.layer(weights, x)
    x = demo.normed(x, demo.norm).flatten(0, 1).double()
    head, _ = rounded(search, demo.embedding.clone(), x.T @ x / len(x), HEAD_BITS, len(tensors))
    tensors.update({f"lm_head.{kind}": t for kind, t in head.items()})
    tensors["model.embed_tokens.weight"], tensors["model.norm.weight"] = demo.embedding.bfloat16(), demo.norm.bfloat16()
    for index, weights in enumerate(layers):
        for name in set(weights) - set(PLACES):
            tensors[f"model.layers.{index}.{name}.weight"] = weights[name].bfloat16()
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "README*"))
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "version": "1.6.5", "bits": bits, "head_bits": HEAD_BITS, "codebook": "mul1"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(out)


if __name__ == "__main__":
    with torch.no_grad():
        main()
