#!/usr/bin/env python3
"""Trains a small hybrid of gated DeltaNets and attention (Qwen3_5ForCausalLM) on texts, to measure quantization on.

    benches/students/hybrid.py --text books.txt --out /tmp/hybrid --minutes 8

Needs torch, transformers (5.2 or later), tokenizers and safetensors. Every fourth layer is attention; heads have the
published sizes (256 for attention, 128 for DeltaNets), and windows are 4,096 tokens of running text in the demo's
tokenizer, so that depth means something. A layer that predicts the token after the next (MTP) learns beside the
trunk, from its hidden states. The last 2 % of each text are held out.

Training stops by the clock, and the folder is always written: config.json, model.safetensors in bf16 in the published
layout with `mtp.*`, and the demo's tokenizer and generation_config.json. Then the folder is read with transformers,
whose logits must be those of what was trained; if they are not, the exit status is 1. How much is learned depends on
the machine's speed, so that a run cannot be repeated exactly; without a GPU the windows are short and the result is
fit only for trying the script.
"""

import time

START = time.monotonic()  # before torch is imported, which takes seconds

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

CONTEXT = 4096
AHEAD = 0.3  # weight of the loss of the token after the next
HELD_OUT = 0.02
FINISH = 40  # seconds kept for measuring, writing and checking
# Without / with a GPU: tokens of a window, windows per step.
SIZES = {"cpu": (256, 2), "cuda": (CONTEXT, 8)}


class Mtp(nn.Module):
    """Predicts the token after the next from the next one and the trunk's hidden states behind its final norm."""

    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (Qwen3_5RMSNorm(size, eps=eps) for _ in "12")
        attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, attention)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, trunk, hidden, following):
        parts = self.pre_fc_norm_embedding(trunk.embed_tokens(following)), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(parts, -1))
        positions = torch.arange(x.shape[1], device=x.device).expand(3, x.shape[0], -1)
        return self.norm(self.layers[0](x, position_embeddings=trunk.rotary_emb(x, positions)))


def configuration(demo, size, layers, width):
    return Qwen3_5TextConfig(
        vocab_size=demo["vocab_size"],
        hidden_size=size,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                         "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        eos_token_id=demo["eos_token_id"],
        mtp_num_hidden_layers=1,
        architectures=["Qwen3_5ForCausalLM"],
    )


def read_texts(files, tokenizer):
    """Tokens to learn from, and those held out."""
    learned, held_out = [], []
    for file in files:
        ids = torch.tensor(Tokenizer.from_file(str(tokenizer)).encode(file.read_text()).ids)
        cut = round(len(ids) * (1 - HELD_OUT))
        learned.append(ids[:cut])
        held_out.append(ids[cut:])
    return torch.cat(learned), torch.cat(held_out)


def losses(model, mtp, ids):
    """Cross-entropy of the next token, and of the one after it, in nats."""
    trunk = model.model
    hidden = trunk(ids, use_cache=False).last_hidden_state
    ahead = mtp(trunk, hidden[:, :-1], ids[:, 1:])
    loss = lambda hidden, ids: F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), ids.flatten())
    return loss(hidden[:, :-1], ids[:, 1:]), loss(ahead[:, :-1], ids[:, 2:])


def train(end, model, mtp, ids, args, device):
    """Trains until `end`. The learning rate follows the clock, as the number of steps is not known before."""
    parameters = [*model.parameters(), *mtp.parameters()]
    # Decay rates and their offsets are no matrices.
    decayed, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")
    begin, step, printed = time.monotonic(), 0, 0.0
    while (now := time.monotonic()) < end or step == 0:
        done = (now - begin) / max(end - begin, 1e-9)
        for group in optimizer.param_groups:
            warm = min(1.0, 0.02 + done / 0.03)
            group["lr"] = args.rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
        starts = torch.randint(len(ids) - args.length + 1, (args.batch, 1))
        batch = ids[starts + torch.arange(args.length)].to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            following, ahead = losses(model, mtp, batch)
        optimizer.zero_grad()
        (following + AHEAD * ahead).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if now - printed > 10:
            printed = now
            print(f"{now - START:6.0f} s  step {step}: {following.item():.4f}, ahead {ahead.item():.4f}", flush=True)
    return step


@torch.no_grad()
def measure(model, mtp, ids, length, device):
    """Perplexities of the next token and of the one after it, over whole windows."""
    windows = ids[: len(ids) // length * length].view(-1, length)
    found = [torch.stack(losses(model, mtp, window[None].to(device))).double().cpu() for window in windows]
    return torch.stack(found).mean(0).exp().tolist(), windows.numel()


def write(folder, demo, config, model, mtp):
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights) | {f"mtp.{name}": t.cpu() for name, t in mtp.state_dict().items()}
    save_file({name: t.bfloat16().contiguous() for name, t in tensors.items()}, weights, metadata={"format": "pt"})
    described = config.to_dict() | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo / name, folder / name)


@torch.no_grad()
def difference(folder, model, vocab):
    """The greatest difference of logits from those of the folder, over the greatest logit; both in f32."""
    ids = torch.randint(vocab, (2, 200))
    wanted = model.cpu().float()(ids).logits
    found = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts to learn from")
    parser.add_argument("--demo", type=Path, default=Path("assets/demo"), help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=8, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=384, help="width of the residual stream")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=640, help="width of the MLPs")
    parser.add_argument("--length", type=int, help="tokens of a window")
    parser.add_argument("--batch", type=int, help="windows per step")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, size in zip(("length", "batch"), SIZES[device]):
        setattr(args, name, getattr(args, name) or size)
    torch.manual_seed(args.seed)

    demo = json.loads((args.demo / "config.json").read_text())
    config = configuration(demo, args.size, args.layers, args.width)
    model, mtp = Qwen3_5ForCausalLM(config).to(device), Mtp(config).to(device)
    learned, held_out = read_texts(args.text, args.demo / "tokenizer.json")
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model, mtp)]
    print(f"{sizes[0]:,} parameters and {sizes[1]:,} of MTP, {len(learned):,} tokens, {device}, "
          f"{time.monotonic() - START:.0f} s to start", flush=True)

    begin = time.monotonic()
    steps = train(START + max(60 * args.minutes - FINISH, 30 * args.minutes), model, mtp, learned, args, device)
    seconds, tokens = time.monotonic() - begin, steps * args.batch * args.length
    print(f"trained {steps} steps, {tokens:,} tokens in {seconds:.0f} s, {tokens / seconds:,.0f}/s")
    with torch.no_grad():  # measured and compared is what is written
        for p in [*model.parameters(), *mtp.parameters()]:
            p.copy_(p.bfloat16())
    (following, ahead), count = measure(model, mtp, held_out, args.length, device)
    print(f"held out, {count:,} tokens in windows of {args.length}: perplexity {following:.6f}, "
          f"of the token after the next {ahead:.3f}")
    write(args.out, args.demo, config, model, mtp)
    (args.out / "held-out.txt").write_text(
        Tokenizer.from_file(str(args.demo / "tokenizer.json")).decode(held_out.tolist(), skip_special_tokens=False))
    off = difference(args.out, model, config.vocab_size)
    print(f"greatest difference of the folder: {off:.2e} of the greatest logit")
    print(f"{args.out}, {time.monotonic() - START:.0f} s")
    if not off < 1e-3:  # also if it is not a number
        sys.exit("the folder is not what was trained")


if __name__ == "__main__":
    main()
