#!/usr/bin/env python3
"""Writes a GGUF file of a published model's shape with random weights, which llama.cpp and nq read alike.

    benches/compare/random_gguf.py MODEL TYPE LAYERS FILE

MODEL is a key of MODELS; TYPE is Q4_K_M, whose mix of types follows llama.cpp, or a type of BLOCKS for all Linears. Only
the first LAYERS layers are written. Codes are random bytes, and scales are small, so that activations stay finite. The
head is in Q6_K (with types of fewer than 4 bits in Q5_K), and the embedding in Q4_K.
"""

import struct
import sys

import numpy

# Number of the type, values and bytes of a block, and where its f16 factors stand with what they are.
BLOCKS = {
    "F32": (0, 1, 4, {}),
    "Q2_K": (10, 256, 84, {80: 1e-3, 82: 1e-3}),
    "Q3_K": (11, 256, 110, {108: 2e-4}),
    "Q4_K": (12, 256, 144, {0: 1e-4, 2: 5e-4}),
    "Q5_K": (13, 256, 176, {0: 5e-5, 2: 5e-4}),
    "Q6_K": (14, 256, 210, {208: 1.5e-5}),
    "IQ2_XXS": (16, 256, 66, {0: 4e-4}),
    "IQ3_XXS": (18, 256, 98, {0: 2e-4}),
    "IQ4_XS": (23, 256, 136, {0: 2e-5}),
}
# Architecture, all layers, hidden, MLP (or an expert's), heads, key heads, width of a head, vocabulary, experts; of hybrids
# the value heads.
MODELS = {
    "0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 0, 0),
    "8b": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 0, 0),
    "27b": ("qwen35", 64, 5120, 17408, 24, 4, 256, 248320, 0, 48),
    "30b-a3b": ("qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, 128, 0),
    "35b-a3b": ("qwen35moe", 40, 2048, 512, 16, 2, 256, 248320, 256, 32),
}
KEY_HEADS, STATE = 16, 128  # of a recurrence


def string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(v):
    """A value of a key, with its type."""
    if isinstance(v, bool):
        return struct.pack("<IB", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + string(v)
    if isinstance(v[0], int):
        return struct.pack("<IIQ", 9, 5, len(v)) + numpy.array(v, "<i4").tobytes()
    return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(string, v))


def vocabulary(n):
    """The letters of all bytes, one pair of them, and made-up words."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b if b in plain else 256 + [b for b in range(256) if b not in plain].index(b)) for b in range(256)]
    words = [f"w{i}" for i in range(n - 260)]
    return [*letters, "\u0120t", *words, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def keys(model, layers):
    arch, _, hidden, mlp, heads, kv, dim, vocab, experts, values = MODELS[model]
    own = {
        "block_count": layers, "context_length": 40960, "embedding_length": hidden, "feed_forward_length": mlp,
        "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": dim, "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7 if values else 1e6,
    }
    if experts:
        own |= {"expert_count": experts, "expert_used_count": 8, "expert_feed_forward_length": mlp}
    if values:
        own |= {
            "ssm.conv_kernel": 4, "ssm.state_size": STATE, "ssm.group_count": KEY_HEADS, "ssm.time_step_rank": values,
            "ssm.inner_size": values * STATE, "full_attention_interval": 4, "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
        }
        if experts:
            own["expert_shared_feed_forward_length"] = mlp
    tokens = vocabulary(vocab)
    all = {"general.architecture": arch, "general.name": f"random {model}", "general.quantization_version": 2, "general.file_type": 15}
    all |= {f"{arch}.{key}": v for key, v in own.items()}
    return all | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen35" if values else "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (vocab - 3) + [3] * 3, "tokenizer.ggml.merges": ["\u0120 t"],
        "tokenizer.ggml.eos_token_id": vocab - 1, "tokenizer.ggml.padding_token_id": vocab - 3, "tokenizer.ggml.add_bos_token": False,
    }


def tensors(model, mix, layers):
    """Names, types and shapes `[rows, inputs]` or `[experts, rows, inputs]`."""
    _, _, hidden, mlp, heads, kv, dim, vocab, experts, values = MODELS[model]
    main = "Q4_K" if mix == "Q4_K_M" else mix
    few = main in ("Q2_K", "IQ2_XXS", "IQ3_XXS", "Q3_K")
    yield "token_embd", "Q4_K", (vocab, hidden)
    yield "output_norm", "F32", (hidden,)
    yield "output", "Q5_K" if few else "Q6_K", (vocab, hidden)
    for i in range(layers):
        more = mix == "Q4_K_M" and (i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2)
        wide = "Q6_K" if more else main
        name = f"blk.{i}.{{}}".format
        yield name("attn_norm"), "F32", (hidden,)
        yield name("post_attention_norm" if values else "ffn_norm"), "F32", (hidden,)
        if values and (i + 1) % 4:
            inner = values * STATE
            yield name("attn_qkv"), "Q5_K" if mix == "Q4_K_M" else main, (2 * KEY_HEADS * STATE + inner, hidden)
            yield name("attn_gate"), main, (inner, hidden)
            yield name("ssm_conv1d"), "F32", (2 * KEY_HEADS * STATE + inner, 4)
            yield f"blk.{i}.ssm_dt.bias", "F32", (values,)
            yield f"blk.{i}.ssm_a", "F32", (values,)
            yield name("ssm_alpha"), "F32", (values, hidden)
            yield name("ssm_beta"), "F32", (values, hidden)
            yield name("ssm_norm"), "F32", (STATE,)
            yield name("ssm_out"), main, (hidden, inner)
        else:
            yield name("attn_q"), main, (heads * dim * (2 if values else 1), hidden)
            yield name("attn_k"), main, (kv * dim, hidden)
            yield name("attn_v"), wide, (kv * dim, hidden)
            yield name("attn_output"), main, (hidden, heads * dim)
            yield name("attn_q_norm"), "F32", (dim,)
            yield name("attn_k_norm"), "F32", (dim,)
        if not experts:
            yield name("ffn_gate"), main, (mlp, hidden)
            yield name("ffn_up"), main, (mlp, hidden)
            yield name("ffn_down"), wide, (hidden, mlp)
            continue
        yield name("ffn_gate_inp"), "F32", (experts, hidden)
        yield name("ffn_gate_exps"), main, (experts, mlp, hidden)
        yield name("ffn_up_exps"), main, (experts, mlp, hidden)
        yield name("ffn_down_exps"), wide, (experts, hidden, mlp)
        if values:
            yield name("ffn_gate_inp_shexp"), "F32", (hidden,)
            yield name("ffn_gate_shexp"), main, (mlp, hidden)
            yield name("ffn_up_shexp"), main, (mlp, hidden)
            yield name("ffn_down_shexp"), wide, (hidden, mlp)


def floats(name, shape, random):
    """Norms near 1, decays below 0, the rest small."""
    small = random.standard_normal(shape, "f4")
    if "norm" in name:
        return 1 + small / 10
    return -numpy.exp(small / 2) if name.endswith("ssm_a") else small / 50


def main(model, mix, layers, path):
    random = numpy.random.default_rng(1)
    all, infos, offset = [], b"", 0
    for name, kind, shape in tensors(model, mix, int(layers)):
        number, values, size, _ = BLOCKS[kind]
        name += "" if name.endswith((".bias", "ssm_a")) else ".weight"
        count = int(numpy.prod(shape))
        infos += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        infos += struct.pack("<IQ", number, offset)
        all.append((name, kind, shape, count // values))
        offset += -(-count // values * size // 32) * 32
    told = keys(model, int(layers))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(all), len(told)) + b"".join(string(k) + value(v) for k, v in told.items()) + infos
    pool = random.bytes(1 << 24)
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for name, kind, shape, blocks in all:
            _, _, size, factors = BLOCKS[kind]
            if kind == "F32":
                data = floats(name, shape, random).tobytes()
                file.write(data + bytes(-len(data) % 32))
                continue
            most = len(pool) // size
            first = random.integers(len(pool) - most * size + 1)
            some = numpy.frombuffer(pool, "u1", most * size, first).reshape(most, size).copy()
            for at, factor in factors.items():
                some[:, at : at + 2] = numpy.frombuffer(numpy.float16(factor).tobytes(), "u1")
            some = some.tobytes()
            for at in range(0, blocks, most):
                file.write(memoryview(some)[: min(most, blocks - at) * size])
            file.write(bytes(-blocks * size % 32))


if __name__ == "__main__":
    main(*sys.argv[1:])
