#!/usr/bin/env python3
"""Rounds the layers of a model folder to small floats, as published checkpoints have them.

    benches/small_floats.py SOURCE OUT fp8-block | fp8-row | nvfp4

fp8-block: E4M3 with a scale for 128 x 128 values, as Qwen's FP8 models; fp8-row: compressed-tensors with a scale a row;
nvfp4: compressed-tensors with E2M1 in groups of 16. Rounding is to nearest, from the largest value of each scale.
Needs numpy and ml_dtypes.
"""

import json
import shutil
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

NAMES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def tensors(folder):
    """Names and values of all tensors in the safetensors files of a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, about in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + n for n in about["data_offsets"])
                yield name, np.frombuffer(data[begin:end], NAMES[about["dtype"]]).reshape(about["shape"])


def write(path, parts):
    """A safetensors file of these arrays."""
    kinds = {np.dtype(kind): name for name, kind in NAMES.items()}
    head, at = {}, 0
    for name, array in parts.items():
        head[name] = {"dtype": kinds[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for array in parts.values():
            out.write(array.tobytes())


def fp8(weight, scale):
    return (weight / np.maximum(scale, 1e-30)).astype(ml_dtypes.float8_e4m3fn)


def by_block(name, w):
    tall, wide = (-n % 128 for n in w.shape)
    padded = np.pad(w, ((0, tall), (0, wide)))
    blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = np.abs(blocks).max((1, 3)).astype(np.float32) / 448
    whole = scale.repeat(128, 0).repeat(128, 1)[: w.shape[0], : w.shape[1]]
    return {name: fp8(w, whole), f"{name}_scale_inv": scale}


def by_row(name, w):
    scale = np.abs(w).max(1, keepdims=True).astype(np.float32) / 448
    return {name: fp8(w, scale), f"{name}_scale": scale}


def nvfp4(name, w):
    groups = w.reshape(w.shape[0], -1, 16)
    whole = np.float32(448 * 6 / np.abs(w).max())
    scale = (np.abs(groups).max(2) / 6 * whole).astype(ml_dtypes.float8_e4m3fn)
    held = np.maximum(scale.astype(np.float32), 1e-30)[..., None] / whole
    codes = np.abs(np.abs(groups / held)[..., None] - FP4).argmin(-1).astype(np.uint8)
    codes = (codes | (np.signbit(groups) << 3).astype(np.uint8)).reshape(w.shape)
    return {f"{name}_packed": codes[:, ::2] | codes[:, 1::2] << 4, f"{name}_scale": scale, f"{name}_global_scale": whole.reshape(1)}


def compressed(form, weights):
    weights = {"type": "float", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


KINDS = {
    "fp8-block": (by_block, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "fp8-row": (by_row, compressed("float-quantized", {"num_bits": 8, "strategy": "channel"})),
    "nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16})),
}


def main():
    if len(sys.argv) != 4 or sys.argv[3] not in KINDS:
        sys.exit(__doc__)
    source, out = map(Path, sys.argv[1:3])
    convert, settings = KINDS[sys.argv[3]]
    out.mkdir(parents=True)
    parts = {}
    for name, values in tensors(source):
        is_linear = name.startswith("model.layers.") and values.ndim == 2
        parts |= convert(name, values.astype(np.float32)) if is_linear else {name: values}
    write(out / "model.safetensors", parts)
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}, indent=2))
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]:
        if (source / name).exists():
            shutil.copy(source / name, out / name)


if __name__ == "__main__":
    main()
