"""The demo model in PyTorch: its forward pass in f32, second moments of its products' inputs, KL divergence."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

WINDOW = 512
# The products of a layer by the input they share, in the order of the forward pass.
INPUTS = {"attn": ("q", "k", "v"), "out": ("o",), "mlp": ("gate", "up"), "down": ("down",)}
PLACES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
          "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


class Demo:
    def __init__(self, folder, device):
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        tensors = {}
        for part in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(part)
        tensors = {n.removeprefix("model."): t.to(device, torch.float32) for n, t in tensors.items()}
        self.embedding, self.norm = tensors["embed_tokens.weight"], tensors["norm.weight"]
        self.layers = [{
            **{p: tensors[f"layers.{i}.{place}.weight"] for p, place in PLACES.items()},
            **{n: tensors[f"layers.{i}.{n}.weight"] for n in
               ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")},
        } for i in range(self.config["num_hidden_layers"])]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        half = self.config["head_dim"] // 2
        turns = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(WINDOW, dtype=torch.float64), turns).to(device)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.device = device

    def tokens(self, text):
        """The windows of a text, [windows, WINDOW]."""
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW).to(self.device)

    def normed(self, x, gain):
        return F.rms_norm(x, gain.shape, gain, self.config["rms_norm_eps"])

    def turned(self, x):
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def layer(self, weights, x, see=lambda group, inputs: None):
        """A layer over x [windows, WINDOW, hidden]. `see` is called with the input of each group of products before
        these are computed, and may replace their weights."""
        width = self.config["head_dim"]
        a = self.normed(x, weights["input_layernorm"])
        see("attn", a)
        heads = lambda p: F.linear(a, weights[p]).unflatten(-1, (-1, width)).transpose(1, 2)
        q = self.turned(self.normed(heads("q"), weights["self_attn.q_norm"]))
        k = self.turned(self.normed(heads("k"), weights["self_attn.k_norm"]))
        v = heads("v")
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        see("out", a)
        x = x + F.linear(a, weights["o"])
        a = self.normed(x, weights["post_attention_layernorm"])
        see("mlp", a)
        a = F.silu(F.linear(a, weights["gate"])) * F.linear(a, weights["up"])
        see("down", a)
        return x + F.linear(a, weights["down"])

    def scored(self, layers, windows, head=None):
        """Log-probabilities of the scored half of each window (llama protocol), [windows, 255, vocabulary]."""
        head = self.embedding if head is None else head
        x = head[windows]
        for weights in layers:
            x = self.layer(weights, x)
        x = self.normed(x[:, WINDOW // 2: -1], self.norm)
        return F.linear(x, head).log_softmax(-1)

    def divergence(self, layers, windows, head=None, batch=16):
        """Mean KL divergence from the model's own weights, perplexity, and share of the same first token."""
        total, loss, same, count = 0.0, 0.0, 0, 0
        for at in range(0, len(windows), batch):
            part = windows[at: at + batch]
            want, got = self.scored(self.layers, part), self.scored(layers, part, head)
            total += (want.exp() * (want - got)).sum().item()
            loss -= got.gather(-1, part[:, WINDOW // 2 + 1:, None]).sum().item()
            same += (want.argmax(-1) == got.argmax(-1)).sum().item()
            count += want.shape[0] * want.shape[1]
        return total / count, float(torch.tensor(loss / count).exp()), same / count


if __name__ == "__main__":
    with torch.no_grad():
        demo = Demo(sys.argv[1], "cpu")
        windows = demo.tokens(Path(sys.argv[2]).read_bytes()[:700000].decode(errors="ignore"))
        print(len(windows), demo.divergence(demo.layers, windows[:8]))
