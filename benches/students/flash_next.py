#!/usr/bin/env python3
"""Trains a small model of Qwen3.8-Flash-Next's kind (Qwen4ExpForCausalLM) on texts, to measure quantization on.

    benches/students/flash_next.py train --text books.txt /usr/lib/python3.11 --out /tmp/flash --minutes 6.6
    benches/students/flash_next.py measure /tmp/flash --budgets 32 128 4096

Needs torch, tokenizers and safetensors; `measure` needs transformers 5.24 too. Every fourth layer is attention, in
which an indexer chooses blocks of 4 positions; all layers are mixtures of experts; the residual has four streams; the
second layer reads a table of n-grams. Heads have the published sizes. Windows are 4,096 tokens of running text in the
demo's tokenizer, 32 times the indexer's budget. A folder given as a text is its Python sources, in an order drawn from
the seed, with <|endoftext|> between them. The last 16,384 tokens of each text are held out.

No gradient reaches an indexer through its choice. It learns to give each block the share of attention that the block
gets; attention sees everything at first, and in the last two fifths of the time only what was chosen. Half of the
windows repeat stretches of their own, so that something far back is worth choosing.

Training stops by the clock, and the folder is always written: config.json, model.safetensors in bf16 as transformers
saves it, the demo's tokenizer, held-out.txt, and recalled.txt, which is the same text with stretches repeated. How much
is learned depends on the machine's speed, so that a run cannot be repeated exactly; without a GPU the windows are short
and the result is fit only for trying the script.
"""

import time

START = time.monotonic()  # before torch is imported, which takes seconds

import argparse
import json
import math
import random
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from train import Mlp, linear, rotate

CONTEXT, CHUNK = 4096, 64
HELD_OUT = 4 * CONTEXT  # tokens of each text
BALANCE = 0.001  # weight of the load-balancing loss, as in the published models
DENSE = 0.6  # share of the time in which attention sees everything
REPEATED, REPEATS, STRETCH = 0.5, 6, (32, 256)  # windows with repeats, repeats in each, tokens of a repeat
FINISH = 20  # seconds kept for measuring and writing
# Without / with a GPU: tokens of a window, windows per step.
SIZES = {"cpu": (256, 2), "cuda": (CONTEXT, 4)}
ENDOFTEXT = "<|endoftext|>"
GAMMA, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1  # of splitmix64


def configuration(demo, end, size, layers, budget):
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "vocab_size": demo["vocab_size"],
        "hidden_size": size,
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (n + 1) % 4 else "full_attention" for n in range(layers)],
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "output_gate_type": "sigmoid",
        "eos_token_id": end,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "hc_count": 4,
        "hc_lowrank": 32,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": budget,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],  # counted from 1
        "ple_embed_dim": 256,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 16000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 8,
        "seed": 1234,
    }


def narrowed(x):
    """In the type of products, where training has a narrower one for these: most of its time goes to memory."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Norm(nn.Module):
    """RMS norms, side by side, of so many streams; their weights are kept less one."""

    def __init__(self, size, eps, streams=1):
        super().__init__()
        self.weight, self.eps, self.streams = nn.Parameter(torch.zeros(streams * size)), eps, streams

    def forward(self, x):
        x = F.rms_norm(x.float().unflatten(-1, (self.streams, -1)), (x.shape[-1] // self.streams,), eps=self.eps)
        return narrowed(x.flatten(-2) * (1 + self.weight))


def convolve(x, weight, dilation=1):
    """A causal convolution of each channel, as a sum of shifted rows."""
    taps, weight = weight.shape[-1], weight.to(x.dtype)
    padded = F.pad(x, (0, 0, (taps - 1) * dilation, 0))
    return sum(padded[:, j * dilation : j * dilation + x.shape[1]] * weight[:, 0, j] for j in range(taps))


class Read(nn.Module):
    """What a block reads of the streams, and how much of what it gives goes to each."""

    def __init__(self, c, inject=True):
        super().__init__()
        self.count, width = c["hc_count"], c["hc_count"] * c["hidden_size"]
        self.hc_norm = Norm(c["hidden_size"], c["rms_norm_eps"], self.count)
        self.input_mix_weight_down = linear(width, c["hc_lowrank"])
        self.input_mix_weight_up = linear(c["hc_lowrank"], width)
        self.block_inject_weight = linear(width, self.count) if inject else None

    def forward(self, streams):
        normed = self.hc_norm(streams)
        gate = self.input_mix_weight_up(F.silu(self.input_mix_weight_down(normed) / self.count)).sigmoid()
        x = (gate * normed).unflatten(-1, (self.count, -1)).mean(-2)
        if self.block_inject_weight is None:
            return x
        return x, 2 * (self.block_inject_weight(normed).float() / self.count).sigmoid()


def blocks(x, size):
    """The square blocks on the diagonal of matrices."""
    count = x.shape[-1] // size
    return x.unflatten(-1, (count, size)).unflatten(-3, (count, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


class UnitInverse(torch.autograd.Function):
    """The inverse of unit lower triangular matrices, from what they have below the diagonal.

    Blocks of 16 are inverted by powers. Powers of larger ones would lose all digits where keys are alike, so that they
    are put together from their quarters.
    """

    @staticmethod
    def forward(ctx, below):
        tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        size = 16
        power = blocks(below, size)
        x = torch.eye(size, device=below.device) - power
        for _ in range(3):
            power = power @ power
            x = x + x @ power
        while size < below.shape[-1]:
            first, second = x[..., 0::2, :, :], x[..., 1::2, :, :]
            quarter = -second @ blocks(below, 2 * size)[..., size:, :size] @ first
            upper = torch.cat([first, torch.zeros_like(first)], -1)
            x, size = torch.cat([upper, torch.cat([quarter, second], -1)], -2), 2 * size
        x = x.squeeze(-3)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -(x.mT @ grad @ x.mT).tril(-1)


def delta_rule(q, k, v, g, beta):
    """The gated delta rule over chunks, of which only the states are computed one after another."""
    length = q.shape[1]
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)))
    pad = -length % CHUNK
    if pad:
        q, k, v, g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g, beta))
    q, k, v, g, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, g, beta))
    total = g.cumsum(-2)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total - total.mT).masked_fill(~seen, -math.inf).exp()
    inverse = UnitInverse.apply((beta * k @ k.mT * decay).tril(-1))
    values, keys = inverse @ (beta * v), inverse @ (beta * k * total.exp())
    last = total[..., -1:, :]
    out = (k * (last - total).exp()).mT
    step = last.exp() * torch.eye(k.shape[-1], device=k.device) - out @ keys
    states, state = [], torch.zeros_like(step[:, :, 0]).flatten(0, 1)
    # A tensor's parts are taken all at once: the gradient of each taken alone would be of the whole tensor's size.
    for a, b in zip(step.flatten(0, 1).unbind(1), (out @ values).flatten(0, 1).unbind(1)):
        states.append(state)
        state = torch.baddbmm(b, a, state)
    states = torch.stack(states, 1).unflatten(0, q.shape[:2])
    new = values - keys @ states
    found = q * total.exp() @ states + (q @ k.mT * decay) @ new
    return found.flatten(2, 3)[:, :, :length].transpose(1, 2)


class Delta(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim, hidden = c["linear_key_head_dim"], c["hidden_size"]
        self.key_heads, self.heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        values = self.heads * self.dim
        channels = 2 * self.key_heads * self.dim + values
        self.in_proj_qkv, self.in_proj_z = linear(hidden, channels), linear(hidden, values)
        self.in_proj_a, self.in_proj_b = linear(hidden, self.heads), linear(hidden, self.heads)
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.randn(channels, 1, c["linear_conv_kernel_dim"]) / 2)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        # Rates of decay from a thousandth to a tenth, so that states last for tens to thousands of tokens.
        rates = torch.empty(self.heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(rates.expm1().log())
        self.norm = nn.Module()
        self.norm.weight, self.eps = nn.Parameter(torch.ones(self.dim)), c["rms_norm_eps"]
        self.out_proj = linear(values, hidden)

    def forward(self, x):
        mixed = F.silu(convolve(self.in_proj_qkv(x), self.conv1d.weight)).unflatten(-1, (-1, self.dim))
        q, k, v = mixed.split([self.key_heads, self.key_heads, self.heads], 2)
        q, k = q.float(), k.float()
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        q, k = (y.repeat_interleave(self.heads // self.key_heads, 2) for y in (q * self.dim**-0.5, k))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = self.in_proj_b(x).float().sigmoid()
        with torch.autocast(x.device.type, enabled=False):
            found = delta_rule(q, k, v, g, beta)
        found = F.rms_norm(found, (self.dim,), eps=self.eps) * self.norm.weight
        return self.out_proj(found.flatten(2) * self.in_proj_z(x).float().sigmoid())


def turn(x, rope):
    """Rotates the first of a head's dimensions."""
    turned = rope.shape[-1]
    return torch.cat([rotate(x[..., :turned].float(), rope), x[..., turned:].float()], -1)


class Indexer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim, self.heads, self.block = c["indexer_head_dim"], c["indexer_n_heads"], c["indexer_compress_ratio"]
        self.index_qk_proj = linear(c["hidden_size"], (self.heads + 1) * self.dim)
        self.q_layernorm, self.k_layernorm = (Norm(self.dim, c["rms_norm_eps"]) for _ in "12")

    def forward(self, x, rope):
        """A score of each whole block for each row."""
        q, k = self.index_qk_proj(x).split([self.heads * self.dim, self.dim], -1)
        q = turn(self.q_layernorm(q.unflatten(-1, (-1, self.dim))).transpose(1, 2), rope)
        whole = x.shape[1] // self.block * self.block
        k = k[:, :whole].float().unflatten(1, (-1, self.block)).mean(2)
        k = turn(self.k_layernorm(k), rope[:, :whole : self.block])
        return F.relu(q @ k.unsqueeze(1).mT).float().sum(1) * self.dim**-0.5


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim, self.heads, hidden = c["head_dim"], c["num_attention_heads"], c["hidden_size"]
        keys, queries = c["num_key_value_heads"] * self.dim, self.heads * self.dim
        self.q_proj, self.o_proj = linear(hidden, 2 * queries), linear(queries, hidden)
        self.k_proj, self.v_proj = linear(hidden, keys), linear(hidden, keys)
        self.q_norm, self.k_norm = (Norm(self.dim, c["rms_norm_eps"]) for _ in "12")
        self.indexer = Indexer(c)
        self.budget, self.distance = None, None

    def forward(self, x, rope):
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k, v = (p(x).unflatten(-1, (-1, self.dim)) for p in (self.k_proj, self.v_proj))
        q, k = (turn(norm(y).transpose(1, 2), rope).to(v.dtype) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        k, v = (y.repeat_interleave(self.heads // y.shape[1], 1) for y in (k, v.transpose(1, 2)))
        # What the indexer learns from is not to change what it reads.
        scores = self.indexer(x.detach(), rope)
        length, block, count = x.shape[1], self.indexer.block, scores.shape[-1]
        row = torch.arange(length, device=x.device).unsqueeze(1)
        column = torch.arange(length, device=x.device)
        open_to = torch.arange(count, device=x.device) < (row + 1) // block  # the row itself may end its block
        seen = column <= row
        if self.budget is not None and self.budget // block < count:
            masked = scores.detach().masked_fill(~open_to, -1)  # below every score
            # Of blocks that score alike the first are taken.
            best = masked.sort(dim=-1, descending=True, stable=True).indices[..., : self.budget // block]
            open_to = torch.zeros_like(masked, dtype=torch.bool).scatter(-1, best, True) & open_to
            spread = F.pad(open_to.repeat_interleave(block, -1), (0, length - count * block))
            seen = (seen & (spread | (column >= (row + 1) // block * block))).unsqueeze(1)
        logits = (q @ k.mT).float() * self.dim**-0.5
        p = logits.masked_fill(~seen, -math.inf).softmax(-1)
        if self.training:
            share = p.detach().mean(1)[..., : count * block].unflatten(-1, (-1, block)).sum(-1) * open_to
            share = share / share.sum(-1, keepdim=True).clamp_min(1e-6)
            logs = scores.masked_fill(~open_to, -1e4).log_softmax(-1)
            self.distance = F.kl_div(logs, share, reduction="sum") / len(x) / length
        out = (p.to(v.dtype) @ v).transpose(1, 2) * gate.sigmoid()
        return self.o_proj(out.flatten(2))


def split_mix(value):
    value = (value + GAMMA) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def primes(first, count):
    found = []
    while len(found) < count:
        if all(first % n for n in range(2, math.isqrt(first) + 1)):
            found.append(first)
        first += 1
    return found


class Table(nn.Module):
    """The table of n-grams; `rows` tells which of its rows belong to each token."""

    def __init__(self, c):
        super().__init__()
        self.end, self.per_length, self.longest = c["eos_token_id"], c["heads_per_ngram"], c["ngram_size"]
        heads = (self.longest - 1) * self.per_length
        sizes = primes(c["ngram_vocab_size_base"], heads)
        most = max(1, ((1 << 63) - 1) // c["vocab_size"] // 2)
        factors = [2 * (split_mix((c["seed"] + GAMMA * (n + 1)) & WORD) % most) + 1 for n in range(self.longest)]
        self.register_buffer("layer_multipliers", torch.tensor(factors))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(sizes))
        self.register_buffer("ngram_heads_offsets", torch.tensor([sum(sizes[:n]) for n in range(heads)]))
        multiple = c["make_ngram_vocab_size_divisible_by"]
        self.weight = nn.Parameter(torch.randn(-(-sum(sizes) // multiple) * multiple, c["ple_embed_dim"] // heads) / 10)

    def rows(self, ids):
        place = torch.arange(ids.shape[1], device=ids.device)
        ends = torch.where(ids == self.end, place, -1).cummax(1).values
        before = F.pad(ends[:, :-1], (1, 0), value=-1)  # the last end in front of each token
        mixed, rows = ids * self.layer_multipliers[0], []
        for back in range(1, self.longest):
            shifted = F.pad(ids, (back, 0), value=self.end)[:, : ids.shape[1]]
            shifted = shifted.where(place - back > before, self.end)
            mixed = mixed ^ (shifted * self.layer_multipliers[back])
            heads = slice((back - 1) * self.per_length, back * self.per_length)
            rows.append(mixed.unsqueeze(-1) % self.ngram_heads_vocab_sizes[heads] + self.ngram_heads_offsets[heads])
        return torch.cat(rows, -1)

    def forward(self, ids):
        rows = self.rows(ids)
        return self.weight.index_select(0, rows.flatten()).view(*ids.shape, -1)


class Ngrams(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.size, self.count, eps = c["hidden_size"], c["hc_count"], c["rms_norm_eps"]
        width, self.dilation = self.size * self.count, c["ngram_size"]
        self.ple_embedding = Table(c)
        self.key_proj, self.value_proj = linear(c["ple_embed_dim"], width), linear(c["ple_embed_dim"], self.size)
        self.norm_key, self.norm_query, self.norm_conv = (Norm(self.size, eps, self.count) for _ in "123")
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.zeros(width, 1, c["ple_conv_kernel_size"]))

    def forward(self, streams, ids):
        rows = self.ple_embedding(ids)
        k, q = self.norm_key(self.key_proj(rows)), self.norm_query(streams)
        s = (k * q).unflatten(-1, (self.count, -1)).sum(-1, keepdim=True) * self.size**-0.5
        s = s.sign() * s.abs().clamp_min(1e-6).sqrt()
        given = (s.sigmoid() * self.value_proj(rows).float().unsqueeze(-2)).flatten(-2)
        return given + F.silu(convolve(self.norm_conv(given), self.conv1d.weight, self.dilation))


class Mixture(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.routed = Mlp(c)
        shared = {"hidden_size": c["hidden_size"], "intermediate_size": c["shared_expert_intermediate_size"]}
        self.shared_expert, self.shared_expert_gate = Mlp(shared), linear(c["hidden_size"], 1)

    def forward(self, x):
        return self.routed(x) + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


class Layer(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.linear_attn = Delta(c) if c["layer_types"][n] == "linear_attention" else None
        self.self_attn = None if self.linear_attn else Attention(c)
        self.ple = Ngrams(c) if n + 1 in c["ple_layer_ids"] else None
        self.mlp = Mixture(c)
        self.attn_hyper_connection, self.mlp_hyper_connection = Read(c), Read(c)

    def forward(self, streams, ids, rope):
        if self.ple:
            streams = streams + self.ple(streams, ids)
        x, inject = self.attn_hyper_connection(streams)
        x = self.linear_attn(x) if self.linear_attn else self.self_attn(x, rope)
        streams = streams + (x.unsqueeze(-2) * inject.unsqueeze(-1)).flatten(-2)
        x, inject = self.mlp_hyper_connection(streams)
        return streams + (self.mlp(x).unsqueeze(-2) * inject.unsqueeze(-1)).flatten(-2)


class FlashNext(nn.Module):
    """Parameters are named as published, but for the experts' and the table's."""

    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, n) for n in range(c["num_hidden_layers"]))
        self.hyper_connection_mixer = Read(c, inject=False)
        self.lm_head = linear(c["hidden_size"], c["vocab_size"])
        r = c["rope_parameters"]
        turned = int(c["head_dim"] * r["partial_rotary_factor"])
        turns = r["rope_theta"] ** (-torch.arange(0, turned, 2).float() / turned)
        angles = torch.outer(torch.arange(c["max_position_embeddings"]).float(), turns).repeat(1, 2)
        self.register_buffer("rope", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        for name, module in self.layers.named_modules():
            if name.endswith(("o_proj", "out_proj", "down_proj", "value_proj")):
                nn.init.normal_(module.weight, std=0.3 * module.in_features**-0.5)

    def attend(self, budget):
        """Makes attention see so many positions, or all of them."""
        for layer in self.layers:
            if layer.self_attn:
                layer.self_attn.budget = budget

    def forward(self, ids):
        streams = self.embed_tokens.weight.index_select(0, ids.flatten()).view(*ids.shape, -1)
        streams = streams.repeat(1, 1, self.config["hc_count"])
        for layer in self.layers:
            streams = layer(streams, ids, self.rope[:, : ids.shape[1]])
        return self.lm_head(self.hyper_connection_mixer(streams))


def cross_entropy(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def read_texts(paths, tokenizer, seed, held_out):
    """Tokens to learn from, and those held out, text by text."""
    tokenizer, learned, kept = Tokenizer.from_file(str(tokenizer)), [], []
    end = tokenizer.token_to_id(ENDOFTEXT)
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        random.Random(seed).shuffle(files)
        pieces = [file.read_text(errors="replace") for file in files]
        ids = [i for piece in tokenizer.encode_batch(pieces) for i in (*piece.ids, end)]
        learned.append(torch.tensor(ids[:-held_out], dtype=torch.int32))
        kept.append(torch.tensor(ids[-held_out:]))
    return torch.cat(learned), torch.cat(kept)


def repeat(ids, share):
    """Windows of which such a share have later tokens replaced by stretches of earlier ones."""
    rows, length = ids.shape
    place = torch.arange(length, device=ids.device)
    number = lambda least, most: (torch.rand(rows, 1, device=ids.device) * (most - least) + least).long()
    chosen = torch.rand(rows, 1, device=ids.device) < share
    longest = min(STRETCH[1], length // 4)
    for _ in range(REPEATS):
        size = number(min(STRETCH[0], longest // 2), longest) * chosen
        to = number(length // 4, length - longest)
        back = number(longest, to)
        source = torch.where((place >= to) & (place < to + size), place - back, place)
        ids = ids.gather(1, source.clamp_min(0))
    return ids


class Training:
    """Steps on batches of one size. On a GPU a step is one CUDA graph, since its many kernels are small."""

    def __init__(self, model, args, device):
        self.model, self.device, self.graph = model, device, None
        self.ids = torch.zeros(args.batch, args.length, dtype=torch.long, device=device)
        matrix = lambda name, p: p.ndim == 2 and "embed" not in name
        decayed = [p for name, p in model.named_parameters() if matrix(name, p)]
        others = [p for name, p in model.named_parameters() if not matrix(name, p)]
        self.rate = torch.zeros((), device=device)
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        graph = device == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=graph, capturable=graph)

    def once(self):
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            loss = cross_entropy(self.model, self.ids)
        attentions = [layer.self_attn for layer in self.model.layers if layer.self_attn]
        distance = sum(a.distance for a in attentions) / len(attentions)
        balance = sum(layer.mlp.routed.balance for layer in self.model.layers)
        (loss + distance + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return torch.stack([loss, distance]).detach()

    def attend(self, budget):
        self.model.attend(budget)
        self.graph = None
        if self.device != "cuda":
            return
        rate = self.rate.clone()
        self.rate.zero_()  # the first steps only make what a graph needs
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.optimizer.zero_grad()
                self.once()
        torch.cuda.current_stream().wait_stream(aside)
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.losses = self.once()
        self.rate.copy_(rate)

    def step(self, ids, rate):
        self.ids.copy_(ids)
        self.rate.fill_(rate)
        if self.graph:
            self.graph.replay()
        else:
            self.optimizer.zero_grad()
            self.losses = self.once()


def train(end, model, ids, args, device):
    """Trains until `end`. The learning rate follows the clock, as the number of steps is not known before."""
    training, ids = Training(model, args, device), ids.to(device)
    begin, step, printed, sparse = time.monotonic(), 0, 0.0, False
    windows = torch.arange(args.length, device=device)
    training.ids.copy_(ids[windows])
    training.attend(None)
    while (now := time.monotonic()) < end or step == 0:
        done = (now - begin) / max(end - begin, 1e-9)
        if done > DENSE and not sparse:
            training.attend(args.budget)
            sparse = True
        rate = args.rate * min(1.0, 0.02 + done / 0.03) * (0.02 + 0.98 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
        starts = torch.randint(len(ids) - args.length + 1, (args.batch, 1), device=device)
        training.step(repeat(ids[starts + windows].long(), REPEATED), rate)
        step += 1
        if step % 8 == 0 and device == "cuda":
            torch.cuda.synchronize()  # the clock is to count steps that were done
        if now - printed > 10:
            printed = now
            loss, distance = training.losses.tolist()
            print(f"{now - START:6.0f} s  step {step}: {loss:.4f}, of indexers {distance:.4f}", flush=True)
    return step


@torch.no_grad()
def perplexity(model, ids, length, budget):
    """Over whole windows, one by one."""
    device = model.lm_head.weight.device
    model.attend(budget)
    windows = ids[: len(ids) // length * length].view(-1, 1, length)
    return math.exp(sum(cross_entropy(model, window.to(device)).item() for window in windows) / len(windows))


def write(folder, demo, model):
    """The folder as transformers saves it."""
    c, tensors = model.config, {}
    for name, t in model.state_dict().items():
        t = t.cpu() if t.dtype == torch.int64 else t.bfloat16().cpu()
        prefix, _, kind = name.partition(".mlp.routed.")
        if name.endswith(".ple.ple_embedding.weight"):
            parts = t.chunk(c["split_ngram_parts"])
            stem = f"model.{name.removesuffix('weight')}ngram_embedding.shard_"
            tensors |= {f"{stem}{n}.weight": part.clone() for n, part in enumerate(parts)}
        elif kind == "gate.weight":
            tensors[f"model.{prefix}.mlp.gate.weight"] = t
        elif kind == "down_proj.weight":
            parts = t.unflatten(1, (c["num_experts"], -1)).transpose(0, 1)
            tensors[f"model.{prefix}.mlp.experts.down_proj"] = parts.contiguous()
        elif kind == "gate_proj.weight":
            up = model.get_parameter(name.replace("gate_proj", "up_proj")).bfloat16().cpu()
            parts = [m.unflatten(0, (c["num_experts"], -1)) for m in (t, up)]
            tensors[f"model.{prefix}.mlp.experts.gate_up_proj"] = torch.cat(parts, 1)
        elif not kind:
            tensors[name if name.startswith("lm_head") else f"model.{name}"] = t
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(c, indent=2, sort_keys=True) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo / name, folder / name)


def read(folder):
    """The model of a folder that `write` wrote."""
    model = FlashNext(json.loads((folder / "config.json").read_text()))
    found = {name.removeprefix("model."): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors = {}
    for name in model.state_dict():
        prefix, _, kind = name.partition(".mlp.routed.")
        if name.endswith(".ple.ple_embedding.weight"):
            stem = f"{name.removesuffix('weight')}ngram_embedding.shard_"
            parts = range(model.config["split_ngram_parts"])
            tensors[name] = torch.cat([found[f"{stem}{n}.weight"] for n in parts])
        elif kind == "gate.weight":
            tensors[name] = found[f"{prefix}.mlp.gate.weight"]
        elif kind == "down_proj.weight":
            tensors[name] = found[f"{prefix}.mlp.experts.down_proj"].transpose(0, 1).flatten(1)
        elif kind:
            half = found[f"{prefix}.mlp.experts.gate_up_proj"].chunk(2, 1)[kind == "up_proj.weight"]
            tensors[name] = half.flatten(0, 1)
        else:
            tensors[name] = found[name]
    model.load_state_dict(tensors)
    return model.float().eval()


def trained(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, size in zip(("length", "batch"), SIZES[device]):
        setattr(args, name, getattr(args, name) or size)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True

    demo = json.loads((args.demo / "config.json").read_text())
    end = Tokenizer.from_file(str(args.demo / "tokenizer.json")).token_to_id(ENDOFTEXT)
    model = FlashNext(configuration(demo, end, args.size, args.layers, args.budget)).to(device)
    learned, held_out = read_texts(args.text, args.demo / "tokenizer.json", args.seed, args.held_out)
    table = sum(p.numel() for name, p in model.named_parameters() if name.endswith("ple_embedding.weight"))
    total = sum(p.numel() for p in model.parameters())
    print(f"{total:,} parameters, {table:,} of them in the table, {len(learned):,} tokens, {device}, "
          f"{time.monotonic() - START:.0f} s to start", flush=True)

    begin = time.monotonic()
    steps = train(START + max(60 * args.minutes - FINISH, 30 * args.minutes), model, learned, args, device)
    seconds, tokens = time.monotonic() - begin, steps * args.batch * args.length
    print(f"trained {steps} steps, {tokens:,} tokens in {seconds:.0f} s, {tokens / seconds:,.0f}/s", flush=True)
    with torch.no_grad():  # measured is what is written
        for p in model.parameters():
            p.copy_(p.bfloat16())
    model.eval()
    write(args.out, args.demo, model)
    recalled = repeat(held_out[: len(held_out) // args.length * args.length].view(-1, args.length), 1.0).flatten()
    for name, ids in (("held-out", held_out), ("recalled", recalled)):
        text = Tokenizer.from_file(str(args.demo / "tokenizer.json")).decode(ids.tolist(), skip_special_tokens=False)
        (args.out / f"{name}.txt").write_text(text)
    torch.backends.cuda.matmul.allow_tf32 = False
    counts = learned.bincount(minlength=demo["vocab_size"]).double() + 1
    alone = (counts / counts.sum()).log()[held_out].neg().mean().exp().item()
    print(f"held out, {len(held_out):,} tokens: perplexity of the frequencies of tokens {alone:.1f}")
    for name, ids in (("held-out", held_out), ("recalled", recalled)):
        for budget in (args.budget // 4, args.budget, 4 * args.budget, None):
            found = perplexity(model, ids, args.length, budget)
            print(f"{name}, {'all' if budget is None else budget} positions: perplexity {found:.6f}", flush=True)
    print(f"{args.out}, {time.monotonic() - START:.0f} s")


@contextmanager
def first_of_equals():
    """Makes indexers of transformers take the first of blocks that score alike, which topk does not promise."""
    topk = torch.Tensor.topk

    def chosen(x, count, dim=-1):
        if dim != 0:
            return topk(x, count, dim=dim)
        found = x.sort(dim=0, descending=True, stable=True)
        return torch.return_types.topk((found.values[:count], found.indices[:count]))

    with patch.object(torch.Tensor, "topk", chosen):
        yield


@torch.no_grad()
def measured(args):
    """Perplexities by transformers, in windows as `nq eval` cuts them, and by this script for other budgets."""
    from transformers import AutoModelForCausalLM

    model = read(args.folder)
    theirs = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="eager").eval()
    text = (args.text or args.folder / "held-out.txt").read_text()
    ids = torch.tensor(Tokenizer.from_file(str(args.folder / "tokenizer.json")).encode(text).ids)
    windows = ids[: len(ids) // args.length * args.length].view(-1, 1, args.length)[: args.windows]
    model.attend(model.config["indexer_budget"])
    loss, differences = 0.0, []
    for n, window in enumerate(windows):
        with first_of_equals():
            wanted = theirs(window, use_cache=False).logits
        logs = wanted[:, :-1].double().log_softmax(-1)
        loss += F.nll_loss(logs.flatten(0, 1), window[:, 1:].flatten()).item()
        differences.append((model(window) - wanted)[0].abs().amax(-1) / wanted.abs().max())
        found = torch.cat(differences)
        # Where two blocks score nearly alike, the order of sums decides which of them is chosen.
        print(f"{n + 1} windows of {args.length}: {math.exp(loss / (n + 1)):.9f} by transformers; this script's logits "
              f"differ by {found.median():.1e} of the greatest in the median, at most {found.max():.1e}, and by more "
              f"than 1e-5 in {(found > 1e-5).sum()} of {len(found)} rows", flush=True)
    for budget in args.budgets:
        found = perplexity(model, windows.flatten(), args.length, budget)
        print(f"{budget} positions: perplexity {found:.6f} by this script", flush=True)
    if not torch.cat(differences).median() < 1e-5:  # also if it is not a number
        sys.exit("transformers computes another model")


def main():
    whole = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = whole.add_subparsers(dest="command", required=True)
    parser = commands.add_parser("train", help="train and write a folder")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts or folders of sources to learn from")
    parser.add_argument("--demo", type=Path, default=Path("assets/demo"), help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=7, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=256, help="width of a stream")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--budget", type=int, default=128, help="positions that indexers choose")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="tokens of each text that are held out")
    parser.add_argument("--length", type=int, help="tokens of a window")
    parser.add_argument("--batch", type=int, help="windows per step")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.set_defaults(run=trained)
    parser = commands.add_parser("measure", help="compare a folder's perplexity with transformers'")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, help="a text [default: the folder's held-out.txt]")
    parser.add_argument("--length", type=int, default=CONTEXT, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="most windows")
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="other budgets to measure")
    parser.set_defaults(run=measured)
    args = whole.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
