#!/usr/bin/env python3
"""Writes an EAGLE-3 head of random bf16 weights, for measuring what drafts cost:

    benches/eagle_head.py qwen3-8b /tmp/head   # then: nq bench --preset qwen3-8b --draft eagle3:/tmp/head ...

Its shape is that of the heads published for the model: one layer as wide as one of the model's, and 32,000 tokens to
draft. Needs numpy.
"""

import json
import sys
from pathlib import Path

import numpy as np

VOCAB, DRAFTED = 151936, 32000
# hidden, intermediate, query heads, key heads
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 16, 8),
    "qwen3-1.7b": (2048, 6144, 16, 8),
    "qwen3-4b": (2560, 9728, 32, 8),
    "qwen3-8b": (4096, 12288, 32, 8),
    "qwen3-14b": (5120, 17408, 40, 8),
    "qwen3-32b": (5120, 25600, 64, 8),
}
HEAD_DIM = 128


def main() -> None:
    hidden, inner, heads, kv_heads = SHAPES[sys.argv[1]]
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    q, kv, layer = heads * HEAD_DIM, kv_heads * HEAD_DIM, "midlayer"
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (DRAFTED, hidden),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTED,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {"d2t": {"dtype": "I64", "shape": [DRAFTED], "data_offsets": [0, 8 * DRAFTED]}}, 8 * DRAFTED
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(7)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write((np.arange(DRAFTED) * 3).astype("<i8").tobytes())
        for shape in shapes.values():
            scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.2
            values = rng.standard_normal(shape, np.float32) * scale + (len(shape) == 1)
            file.write((values.view("<u4") >> 16).astype("<u2").tobytes())


if __name__ == "__main__":
    main()
