#!/usr/bin/env python3
"""Trains a small model from the demo model: a mixture of experts, to measure quantization on, or a drafter.

    benches/students/train.py mixture --out /tmp/mixture --minutes 6
    benches/students/train.py draft --out /tmp/draft --minutes 3
    benches/students/train.py eagle --out /tmp/eagle --minutes 3

Needs torch, transformers and safetensors. The mixture (Qwen3MoeForCausalLM) begins as the dense demo model, with each
MLP dealt out to experts; the draft model is one of the demo's layers with its embedding; the EAGLE-3 head (arXiv
2503.01840) reads the demo's residual streams and, unrolled over STEPS tokens, its own. All learn the demo's distribution
of the next token (KL divergence at every position) on text that the demo samples: no other text is used. A third of
the time goes to sampling, the rest to training; both stop by the clock, and the folder is always written: config.json,
model.safetensors in bf16 in the published layout, with one tensor per matrix of an expert, and the demo's tokenizer
and generation_config.json; of a head in its own published layout. Then a model's folder is read with transformers,
whose logits must match; if they do not, the exit status is 1.

How much is learned depends on the machine's speed, so that a run cannot be repeated exactly. An H100 is expected to
sample about 50 million tokens and to train on 150 million or more; without a GPU the batches are small and the
result is fit only for trying the script.
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
from torch import nn

EXPERTS, TOP, WIDTH = 8, 2, 256
BALANCE = 0.001  # weight of the load-balancing loss, as in the published models
HOT = 0.25  # share of sequences sampled above temperature 1, where the demo is less sure
TAPS, STEPS = (1, 3, 5), 4  # of a head: layers after which it reads the stream, and tokens that it learns to draft
FINISH = 40  # seconds kept for measuring, writing and checking
# Without / with a GPU: sequences sampled together, tokens of each, sequences per step of training.
SIZES = {"cpu": (32, 128, 8), "cuda": (4096, 1024, 64)}


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)  # fused only for equal types


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, rope):
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim = c["head_dim"]
        queries, keys = c["num_attention_heads"] * self.dim, c["num_key_value_heads"] * self.dim
        self.q_proj, self.o_proj = linear(c["hidden_size"], queries), linear(queries, c["hidden_size"])
        self.k_proj, self.v_proj = linear(c["hidden_size"], keys), linear(c["hidden_size"], keys)
        self.q_norm, self.k_norm = (Norm(self.dim, c["rms_norm_eps"]) for _ in range(2))

    def forward(self, x, rope, cache, at):
        q, k, v = (p(x).unflatten(-1, (-1, self.dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, rope).to(v.dtype), rotate(k, rope).to(v.dtype)
        if cache is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:  # one position of each sequence; its query heads are as many queries of the head of keys they share
            cache[0][:, :, at : at + 1], cache[1][:, :, at : at + 1] = k, v
            grouped = q.squeeze(2).unflatten(1, (k.shape[1], -1))
            out = F.scaled_dot_product_attention(grouped, cache[0][:, :, : at + 1], cache[1][:, :, : at + 1])
            out = out.flatten(1, 2).unsqueeze(1)
        return self.o_proj(out.flatten(2))


class Mlp(nn.Module):
    """The dense MLP; or, side by side in the same three matrices, those of all experts.

    Each token goes through every expert, and what was not chosen gets weight 0: with few and narrow experts, large
    multiplications beat sorting tokens by expert.
    """

    def __init__(self, c):
        super().__init__()
        self.experts, self.top, hidden = c.get("num_experts"), c.get("num_experts_per_tok"), c["hidden_size"]
        width = self.experts * c["moe_intermediate_size"] if self.experts else c["intermediate_size"]
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)
        if self.experts:
            self.gate = linear(hidden, self.experts)

    def forward(self, x):
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        if not self.experts:
            return self.down_proj(inner)
        with torch.autocast(x.device.type, enabled=False):  # choices in f32, as when the mixture is run
            p = F.linear(x.float(), self.gate.weight).softmax(-1)
        best, chosen = p.topk(self.top)
        weights = torch.zeros_like(p).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        self.share = (weights.detach() > 0).float().mean((0, 1)) / self.top
        self.balance = self.experts * (self.share * p.mean((0, 1))).sum()  # 1 if all are used alike
        inner = inner.unflatten(-1, (self.experts, -1)) * weights.unsqueeze(-1).to(inner.dtype)
        return self.down_proj(inner.flatten(-2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(c["hidden_size"], c["rms_norm_eps"]) for _ in "12")
        self.self_attn, self.mlp = Attention(c), Mlp(c)

    def forward(self, x, *where):
        x = x + self.self_attn(self.input_layernorm(x), *where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """Dense or a mixture, with a tied head; parameters are named as published, but for the experts'."""

    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])
        turns = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2).float() / c["head_dim"])
        angles = torch.outer(torch.arange(c["max_position_embeddings"]).float(), turns).repeat(1, 2)
        # No buffer, so that it stays in f32 when the model is turned into bf16.
        self.rope = torch.stack([angles.cos(), angles.sin()])

    def forward(self, ids, caches=None, at=0, taps=None):
        """Logits; given caches, `ids` are those of position `at` alone. The list `taps` gets the streams at TAPS."""
        self.rope = self.rope.to(ids.device)
        rope = self.rope[:, at : at + ids.shape[1]]
        x = self.embed_tokens(ids)
        for n, layer in enumerate(self.layers):
            x = layer(x, rope, caches and caches[n], at)
            if taps is not None and n + 1 in TAPS:
                taps.append(x)
        return F.linear(self.norm(x), self.embed_tokens.weight)


class Head(nn.Module):
    """An EAGLE-3 head; parameters are named as published."""

    def __init__(self, c, demo):
        super().__init__()
        hidden, eps, self.dim = c["hidden_size"], c["rms_norm_eps"], c["head_dim"]
        queries, keys = c["num_attention_heads"] * self.dim, c["num_key_value_heads"] * self.dim
        self.fc, self.norm, self.lm_head = linear(3 * hidden, hidden), Norm(hidden, eps), linear(hidden, c["vocab_size"])
        layer = self.midlayer = nn.Module()
        layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm = (Norm(hidden, eps) for _ in "123")
        attention = layer.self_attn = nn.Module()
        attention.q_proj, attention.o_proj = linear(2 * hidden, queries), linear(queries, hidden)
        attention.k_proj, attention.v_proj = linear(2 * hidden, keys), linear(2 * hidden, keys)
        layer.mlp = Mlp({k: v for k, v in c.items() if k != "num_experts"})
        with torch.no_grad():
            self.lm_head.weight.copy_(demo.embed_tokens.weight)

    def forward(self, tokens, x, rope):
        """The stream after each row, of tokens' embeddings and the streams before them."""
        layer, a = self.midlayer, self.midlayer.self_attn
        both = torch.cat([layer.input_layernorm(tokens), layer.hidden_norm(x)], -1)
        q, k, v = (p(both).unflatten(-1, (-1, self.dim)).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
        q, k = rotate(q, rope).to(v.dtype), rotate(k, rope).to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + a.o_proj(out)
        return x + layer.mlp(layer.post_attention_layernorm(x))


def unrolled(demo, head, ids):
    """Of each of STEPS drafted tokens: KL divergence of the head's distribution from the demo's, and how often both
    find the same token likeliest, over the positions where it did before."""
    with torch.no_grad():
        taps = []
        wanted = demo(ids, taps=taps).float().log_softmax(-1)
        tokens = demo.embed_tokens(ids)
    x, right, found = head.fc(torch.cat(taps, -1)), None, []
    for step in range(STEPS):
        rows = ids.shape[1] - step - 2  # row i has the token at i + step + 1, and drafts the one after it
        x = head(tokens[:, step + 1 : step + 1 + rows], x[:, :rows], demo.rope[:, :rows])
        logs, target = head.lm_head(head.norm(x)).float().log_softmax(-1), wanted[:, step + 1 : step + 1 + rows]
        kl = F.kl_div(logs, target, reduction="sum", log_target=True) / (len(ids) * rows)
        same = logs.argmax(-1) == target.argmax(-1)
        right = same if right is None else right[:, :rows] & same
        found.append((kl, right.float().mean()))
    return found


def head_config(c):
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    keys += ("max_position_embeddings", "rms_norm_eps", "rope_theta")
    more = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    more |= {"draft_vocab_size": c["vocab_size"], "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return {k: c[k] for k in keys} | more | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)}}


def write_head(folder, config, head):
    tensors = {name: t.bfloat16().cpu().contiguous() for name, t in head.state_dict().items()}
    tensors["d2t"] = torch.zeros(config["vocab_size"], dtype=torch.int64)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head_config(config), indent=2, sort_keys=True) + "\n")


def read_demo(folder):
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    demo = Qwen3(config)
    demo.load_state_dict({name.removeprefix("model."): t.float() for name, t in tensors.items()})
    return config, demo.requires_grad_(False)


def student(config, demo, kind, layers):
    """The config of a student of this kind, and one that begins with the demo's weights."""
    c = {k: v for k, v in config.items() if k != "transformers_version"}
    c |= {"num_hidden_layers": layers, "max_window_layers": layers}
    if kind == "mixture":
        c |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        c |= {"num_experts": EXPERTS, "num_experts_per_tok": TOP, "moe_intermediate_size": WIDTH}
        c |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        c |= {"output_router_logits": False, "router_aux_loss_coef": BALANCE}
    model = Qwen3(c)
    model.embed_tokens.load_state_dict(demo.embed_tokens.state_dict())
    model.norm.load_state_dict(demo.norm.state_dict())
    for layer, n in zip(model.layers, torch.linspace(0, len(demo.layers) - 1, layers).round().int().tolist()):
        if kind == "draft":
            layer.load_state_dict(demo.layers[n].state_dict())
            continue
        mlp = {k: demo.layers[n].mlp.get_parameter(f"{k}.weight") for k in ("gate_proj", "up_proj", "down_proj")}
        neurons = mlp["gate_proj"].shape[0]
        # Every deal of the shuffled neurons gives each to one expert, so that no two experts are alike and none
        # needs noise. An expert's weight is 1/TOP on average: what is dealt out is scaled to pass in full.
        dealt = torch.cat([torch.randperm(neurons) for _ in range(-(-EXPERTS * WIDTH // neurons))])[: EXPERTS * WIDTH]
        rest = {k: v for k, v in demo.layers[n].state_dict().items() if not k.startswith("mlp.")}
        layer.load_state_dict(rest | {
            "mlp.gate.weight": 0.02 * torch.randn(EXPERTS, c["hidden_size"]),
            "mlp.gate_proj.weight": mlp["gate_proj"][dealt],
            "mlp.up_proj.weight": mlp["up_proj"][dealt],
            "mlp.down_proj.weight": TOP * mlp["down_proj"][:, dealt],
        })
    return c, model


@torch.no_grad()
def sample(demo, config, first, temperature, length):
    """Sequences that the demo continues from the tokens `first`, in its own type."""
    rows, weight = len(first), demo.norm.weight
    shape = (2, rows, config["num_key_value_heads"], length, config["head_dim"])
    caches = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in demo.layers]
    ids = first.unsqueeze(1).repeat(1, length)
    for at in range(length - 1):
        logits = demo(ids[:, at : at + 1], caches, at)[:, 0].float()
        p = (logits / temperature.unsqueeze(1)).softmax(-1)
        # The largest of p over exponential noise is a draw from p, with no sum over the vocabulary.
        ids[:, at + 1] = (p / torch.empty_like(p).exponential_()).argmax(-1)
    return ids.short()


def sample_until(end, demo, config, rows, length, device):
    """Sequences for training, and some at temperature 1 to measure on."""
    document, texts = config["bos_token_id"], []
    while not texts or time.monotonic() < end:
        # Documents, as the demo was trained on them. Hot ones begin with any token.
        hot = torch.rand(rows, device=device) < HOT
        first = torch.randint(config["vocab_size"], (rows,), device=device).where(hot, document)
        temperature = torch.where(hot, 1 + 0.4 * torch.rand(rows, device=device), 1.0)
        texts.append(sample(demo, config, first, temperature, length))
        if device == "cuda":
            torch.cuda.synchronize()
        if len(texts) == 1:
            cold = (~hot).nonzero().flatten()[: max(1, rows // 32)]
            held_out = texts[0][cold]
            keep = torch.ones(rows, dtype=torch.bool, device=device)
            keep[cold] = False
            texts[0] = texts[0][keep]
    return torch.cat(texts), held_out


def divergence(demo, model, ids):
    """KL divergence of the model from the demo, in nats per token."""
    with torch.no_grad():
        wanted = demo(ids).float().log_softmax(-1)
    found = model(ids).float().log_softmax(-1)
    return F.kl_div(found, wanted, reduction="sum", log_target=True) / ids.numel(), found, wanted


def train(end, demo, model, texts, args, device):
    """Trains until `end`. The learning rate follows the clock, as the number of steps is not known before."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")
    begin, step, order, printed = time.monotonic(), 0, texts.new_empty(0), 0.0
    while (now := time.monotonic()) < end or step == 0:
        done = (now - begin) / max(end - begin, 1e-9)
        warm = min(1.0, 0.02 + done / 0.03)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
        if len(order) < args.batch:
            order = torch.randperm(len(texts), device=device)
        ids, order = texts[order[: args.batch]].long(), order[args.batch :]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            if isinstance(model, Head):
                kl = loss = sum(kl * 0.8**step for step, (kl, _) in enumerate(unrolled(demo, model, ids)))
            else:
                kl = divergence(demo, model, ids)[0]
                loss = kl + BALANCE * sum(layer.mlp.balance for layer in model.layers if layer.mlp.experts)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if now - printed > 10:
            printed = now
            print(f"{now - START:6.0f} s  step {step}: KL {kl.item():.4f}", flush=True)
    return step


@torch.no_grad()
def measure(demo, model, ids, batch):
    """KL divergence, perplexities of model and demo, how often both find the same token likeliest, and shares of
    tokens by layer and expert."""
    sums, shares = torch.zeros(4, dtype=torch.float64), 0
    for part in ids.split(batch):
        part = part.long()
        kl, *logs = divergence(demo, model, part)
        losses = [F.nll_loss(log[:, :-1].flatten(0, 1), part[:, 1:].flatten()).item() for log in logs]
        same = (logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean().item()
        sums += torch.tensor([kl.item(), *losses, same], dtype=torch.float64) * len(part) / len(ids)
        if model.layers[0].mlp.experts:
            shares += torch.stack([layer.mlp.share for layer in model.layers]).cpu() * len(part) / len(ids)
    return sums[0].item(), sums[1].exp().item(), sums[2].exp().item(), sums[3].item(), shares


def write(folder, demo_folder, config, model):
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.bfloat16().cpu()
        if not config.get("num_experts") or not name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight")):
            tensors[f"model.{name}"] = tensor
            continue
        prefix, kind, _ = name.rsplit(".", 2)
        parts = tensor.split(WIDTH, dim=1 if kind == "down_proj" else 0)
        tensors |= {f"model.{prefix}.experts.{e}.{kind}.weight": part.contiguous() for e, part in enumerate(parts)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo_folder / name, folder / name)


@torch.no_grad()
def difference(folder, model, vocab):
    """The greatest difference of logits from those by transformers, over the greatest logit; both in f32."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(vocab, (2, 48))
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    return ((model.cpu()(ids) - wanted).abs().max() / wanted.abs().max()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("mixture", "draft", "eagle"))
    parser.add_argument("--demo", type=Path, default=Path("assets/demo"), help="folder of the dense model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=6, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="taken evenly from the demo's (default: 5 of a mixture, 1 of a draft)")
    parser.add_argument("--rows", type=int, help="sequences sampled together")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences per step of training")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, size in zip(("rows", "length", "batch"), SIZES[device]):
        setattr(args, name, getattr(args, name) or size)
    torch.manual_seed(args.seed)
    # cuDNN's attention plans anew for each length, and sampling has as many lengths as positions.
    torch.backends.cuda.enable_cudnn_sdp(False)

    config, demo = read_demo(args.demo)
    if args.kind == "eagle":
        c, model = config, Head(config, demo)
    else:
        c, model = student(config, demo, args.kind, args.layers or {"mixture": 5, "draft": 1}[args.kind])
    demo, model = demo.to(device), model.to(device)
    total = sum(p.numel() for p in model.parameters())
    print(f"{total:,} parameters, {device}, {time.monotonic() - START:.0f} s to start", flush=True)

    begin = time.monotonic()
    end = START + max(60 * args.minutes - FINISH, 30 * args.minutes)
    sampler = demo.bfloat16() if device == "cuda" else demo  # in place; its weights are bf16 to begin with
    texts, held_out = sample_until(begin + (end - begin) / 3, sampler, config, args.rows, args.length, device)
    demo = demo.float()
    seconds = time.monotonic() - begin
    print(f"sampled {texts.numel():,} tokens in {seconds:.0f} s, {texts.numel() / seconds:,.0f}/s", flush=True)
    before = None if args.kind == "eagle" else measure(demo, model, held_out, args.batch)

    begin = time.monotonic()
    steps = train(end, demo, model, texts, args, device)
    seconds, tokens = time.monotonic() - begin, steps * args.batch * args.length
    with torch.no_grad():  # measured and compared is what is written
        for p in model.parameters():
            p.copy_(p.bfloat16())
    if args.kind == "eagle":
        write_head(args.out, c, model)
    else:
        write(args.out, args.demo, c, model)
    print(f"trained {steps} steps, {tokens:,} tokens in {seconds:.0f} s, {tokens / seconds:,.0f}/s")

    if args.kind == "eagle":
        with torch.no_grad():
            found = [torch.tensor(unrolled(demo, model, part.long())) for part in held_out.split(args.batch)]
        for step, (kl, right) in enumerate(torch.stack(found).mean(0).tolist()):
            print(f"token {step + 1}: KL {kl:.4f}, the demo's likeliest, as all before it, in {100 * right:.1f} %")
        print(f"{args.out}, {time.monotonic() - START:.0f} s")
        return
    kl, perplexity, of_demo, same, shares = measure(demo, model, held_out, args.batch)
    print(f"held out, {held_out.numel():,} sampled tokens: KL {before[0]:.4f} before, {kl:.4f} after; "
          f"perplexity {perplexity:.3f}, the demo's {of_demo:.3f}; the likeliest token is the demo's in {100 * same:.1f} %")
    for n, share in enumerate(shares if args.kind == "mixture" else []):
        listed = " ".join(f"{s:.3f}" for s in share)
        print(f"layer {n}: share of an expert {share.min():.3f} to {share.max():.3f} ({listed})")
    off = difference(args.out, model, c["vocab_size"])
    print(f"greatest difference from transformers: {off:.2e} of the greatest logit")
    print(f"{args.out}, {time.monotonic() - START:.0f} s")
    if not off < 1e-3:  # also if it is not a number
        sys.exit("the folder is not what was trained")


if __name__ == "__main__":
    main()
