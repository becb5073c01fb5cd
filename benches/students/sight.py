#!/usr/bin/env python3
"""Trains a small hybrid that sees (Qwen3_5ForConditionalGeneration) on pictures that it draws, to measure quantization on.

    benches/students/sight.py --text books.txt --out /tmp/sight --minutes 7.5

Needs torch, transformers (5.17 or later), tokenizers, safetensors and Pillow. Pictures of 192 x 64 pixels show a word, a number, a
rectangle of one colour, or dots to be counted, in Pillow's own font; a question asks for it and the answer is spelled in
characters, so that words which were never shown can be read. Heads have the published sizes (64 in the tower, 256 for attention,
128 for DeltaNets). A tenth of the text's words is held out: no picture of training shows them.

What a picture shows is drawn once as a mask; a step gives it a place and colours of its own, so that no picture is seen twice. Two
things that only training needs make the model read within minutes: the tower's rows are also asked which letter stands where and
which of the answer it is, and a step on a GPU is recorded once and replayed.

Training stops by the clock, and the folder is always written: config.json, model.safetensors in bf16, a tokenizer of bytes with
a chat template, preprocessor_config.json; and as `held-out.jsonl` and `learned.jsonl` chats with pictures, of which the first
are to be measured on and the second to calibrate on. Then the folder is read with transformers, whose logits must be those of
what was trained; if they are not, the exit status is 1. Without a GPU, the result is fit only for trying the script.
"""

import time

START = time.monotonic()  # before torch is imported, which takes seconds

import argparse
import functools
import json
import math
import random
import re
import string
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

WIDTH, HEIGHT, PATCH, MERGE = 192, 64, 16, 2
MARGIN = 3  # pixels around what a picture shows
GRID = (1, HEIGHT // PATCH, WIDTH // PATCH)
PATCHES = GRID[1] * GRID[2]
ROWS = PATCHES // MERGE**2  # of a picture in the text model
CHARACTERS = string.ascii_lowercase + string.digits
LONGEST = 7  # characters of an answer that is drawn
SLOT = 8  # pixels of a picture's width in which at most one character has its middle
QUESTIONS = {"word": "Which word?", "number": "Which number?", "colour": "Which colour?", "count": "How many dots?"}
KINDS = random.Random(0).sample(["word"] * 12 + ["number"] * 4 + ["colour"] * 2 + ["count"] * 2, 20)  # mixed
COLOURS = {"red": (210, 30, 30), "green": (30, 150, 40), "blue": (40, 60, 210), "yellow": (235, 215, 40), "orange": (240, 140, 20),
           "purple": (130, 40, 160), "brown": (120, 75, 40), "gray": (128, 128, 128)}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# How Qwen2's tokenizer cuts texts, as GGUF files must name it; it changes nothing here.
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ANSWER = LONGEST + 1  # tokens at most, with the last
TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'text' %}{{- part.text }}{%- else %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
FINISH = 18  # seconds kept for measuring, writing and checking
# Without / with a GPU: masks drawn before training, pictures of a step.
SIZES = {"cpu": (4_000, 16), "cuda": (240_000, 512)}


def tokenizer():
    """Of bytes, and what Qwen's chats are made of."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), bytes_])
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def special_ids(tokens):
    """What a config says of the tokens around images."""
    words = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokens.token_to_id(f"<|{word}|>") for name, word in words.items()}


def configuration(tokens, args):
    return Qwen3_5Config(
        text_config=dict(
            vocab_size=tokens.get_vocab_size() + -tokens.get_vocab_size() % 64, hidden_size=args.size, intermediate_size=2 * args.size,
            num_hidden_layers=args.layers, layer_types=["linear_attention", "full_attention"] * (args.layers // 2),
            num_attention_heads=2, num_key_value_heads=1, head_dim=256, linear_num_key_heads=1,
            linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=4096,
            tie_word_embeddings=True, eos_token_id=tokens.token_to_id("<|im_end|>"), pad_token_id=None, bos_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                             "mrope_section": [11, 11, 10], "mrope_interleaved": True}),
        vision_config=dict(
            depth=args.depth, hidden_size=args.tower, intermediate_size=4 * args.tower, num_heads=args.tower // 64, patch_size=PATCH,
            temporal_patch_size=2, spatial_merge_size=MERGE, num_position_embeddings=256, out_hidden_size=args.size),
        tie_word_embeddings=True,
        **special_ids(tokens),
    )


def read_words(files, seed):
    """Words to learn from, and those held out."""
    words = sorted({word for file in files for word in re.findall(rf"\b[a-z]{{3,{LONGEST}}}\b", file.read_text())})
    random.Random(seed).shuffle(words)
    cut = len(words) // 10
    return words[cut:], words[:cut]


@functools.cache
def font(size):
    return ImageFont.load_default(size)


@dataclass
class Drawn:
    """What a picture shows: a mask [HEIGHT, WIDTH] whose upper left corner it fills, its width and height, and the middle of each
    of its characters from the left."""

    kind: str
    answer: str
    mask: np.ndarray
    size: tuple[int, int]
    middles: list[int]


def draw(kind, answer, rng):
    image = Image.new("L", (WIDTH, HEIGHT))
    canvas = ImageDraw.Draw(image)
    middles = []
    if kind == "colour":
        size = rng.randrange(20, 57), rng.randrange(16, 33)
        canvas.rectangle((0, 0, size[0] - 1, size[1] - 1), fill=255)
    elif kind == "count":
        radius, size = rng.randrange(4, 7), (132, 56)
        for place in rng.sample(range(18), int(answer)):
            x, y = 12 + place % 6 * 21 + rng.randrange(-3, 4), 9 + place // 6 * 19 + rng.randrange(-2, 3)
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    else:
        height = rng.randrange(28, 39)
        while (box := font(height).getbbox(answer))[2] - box[0] > WIDTH - 2 * MARGIN:
            height -= 1
        size = box[2] - box[0], box[3] - box[1]
        canvas.text((-box[0], -box[1]), answer, fill=255, font=font(height))
        edges = [font(height).getlength(answer[:i]) - box[0] for i in range(len(answer) + 1)]
        middles = [int(left + right) // 2 for left, right in zip(edges, edges[1:])]
    return Drawn(kind, answer, np.asarray(image), size, middles)


def drawings(job):
    """`count` of them; words are from `words` or, if `spell`, often letters by chance that none of `never` is."""
    seed, count, words, never, spell = job
    rng, made = random.Random(seed), []
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        if kind == "word":
            answer = rng.choice(words)
            while spell and rng.random() < 0.6:
                answer = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randrange(1, LONGEST + 1)))
                if answer not in never:
                    break
        elif kind == "number":
            answer = "".join(rng.choice(string.digits) for _ in range(rng.randrange(1, LONGEST)))
        else:
            answer = rng.choice(sorted(COLOURS)) if kind == "colour" else str(rng.randrange(1, 7))
        made.append(draw(kind, answer, rng))
    return made


class Pictures:
    """What pictures show, on a device, and their chats as tokens."""

    def __init__(self, made, tokens, device):
        self.kinds, self.answers = [d.kind for d in made], [d.answer for d in made]
        image = "<|vision_start|>" + "<|image_pad|>" * ROWS + "<|vision_end|>"
        asking = {kind: tokens.encode(f"<|im_start|>user\n{image}{question}<|im_end|>\n<|im_start|>assistant\n").ids
                  for kind, question in QUESTIONS.items()}
        spelled, end = {c: tokens.token_to_id(c) for c in CHARACTERS}, tokens.encode("<|im_end|>\n").ids
        length = max(map(len, asking.values())) + ANSWER + 1
        ids = np.zeros((len(made), length), np.int64)
        asked = np.zeros((len(made), length), bool)  # tokens of answers
        letters = np.zeros((len(made), LONGEST), np.int64)  # characters that are drawn, counted from 1
        middles = np.zeros((len(made), LONGEST), np.int64)
        colours = np.zeros((len(made), 3), np.int64)
        for row, drawn in enumerate(made):
            before, answer = asking[drawn.kind], [spelled[c] for c in drawn.answer] + end
            ids[row, : len(before) + len(answer)] = before + answer
            asked[row, len(before) : len(before) + len(answer) - 1] = True
            count = len(drawn.middles)
            letters[row, :count] = [CHARACTERS.index(c) + 1 for c in drawn.answer[:count]]
            middles[row, :count] = drawn.middles
            colours[row] = COLOURS.get(drawn.answer, (-1, -1, -1))
        on_device = lambda x: torch.from_numpy(x).to(device)
        self.ids, self.asked, self.letters, self.middles, self.colours = map(on_device, (ids, asked, letters, middles, colours))
        self.masks = on_device(np.stack([d.mask for d in made]))
        self.room = on_device(np.array([(WIDTH - d.size[0], HEIGHT - d.size[1]) for d in made])) - 2 * MARGIN

    def paint(self, chosen, generator=None):
        """Pictures [chosen, HEIGHT, WIDTH, 3] of `chosen` drawings in new places and colours; and for each slot of their width
        the letter in it and that letter's place in the answer, both counted from 1, or 0."""
        count, device = len(chosen), chosen.device
        random_below = lambda limit, *shape: (torch.rand(shape, generator=generator, device=device) * limit).long()
        x, y = (MARGIN + random_below(self.room[chosen] + 1, count, 2)).unbind(1)
        rows = (torch.arange(HEIGHT, device=device) - y[:, None]) % HEIGHT
        columns = (torch.arange(WIDTH, device=device) - x[:, None]) % WIDTH
        mask = self.masks[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        # Two colours that differ enough to read one on the other, and colours that have a name on a light one.
        dark, light, named = random_below(90, count, 3), 165 + random_below(91, count, 3), self.colours[chosen]
        swapped, has_name = torch.rand((count, 1), generator=generator, device=device) < 0.3, named[:, :1] >= 0
        near = (named + random_below(29, count, 3) - 14).clamp(0, 255)
        ink = torch.where(has_name, near, torch.where(swapped, light, dark))[:, None, None].float()
        back = torch.where(swapped & ~has_name, dark, light)[:, None, None].float()
        pixels = (back + (ink - back) * (mask[..., None].float() / 255)).round().byte()

        letters, slots = self.letters[chosen], (self.middles[chosen] + x[:, None]) // SLOT
        slots = slots.where(letters > 0, WIDTH // SLOT)  # behind the last
        empty = torch.zeros((count, WIDTH // SLOT + 1), dtype=torch.long, device=device)
        places = torch.arange(1, LONGEST + 1, device=device).expand_as(letters)
        there = torch.stack([empty.scatter(1, slots, letters), empty.scatter(1, slots, places)], -1)[:, :-1]
        return pixels, there


def patches(pixels):
    """What the published processor makes of pictures of this size: [pictures patches, 3 2 16 16]."""
    count, (_, h, w) = len(pixels), GRID
    x = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    x = x.view(count, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return x.reshape(count * PATCHES, 3, 1, PATCH, PATCH).expand(-1, -1, 2, -1, -1).flatten(1)


def attention_apart(module, q, k, v, scaling, **_):
    """Attention within each picture, all pictures in one product: transformers would take them one after the other."""
    q, k, v = (x[0].unflatten(1, (-1, PATCHES)).transpose(0, 1) for x in (q, k, v))
    made = F.scaled_dot_product_attention(q, k, v, scale=scaling)  # [pictures, heads, patches, dim]
    return made.transpose(1, 2).flatten(0, 1)[None], None


def convolution(x, weight, bias, activation, **_):
    """transformers' `causal_conv1d_fn`, as a sum: the gradient of a convolution by channels is slow."""
    taps = weight.shape[1]
    x = F.pad(x, (taps - 1, 0))
    y = sum(x[..., i : x.shape[-1] - taps + 1 + i] * weight[:, i, None].to(x.dtype) for i in range(taps))
    return F.silu(y)


def delta_rule(q, k, v, g, beta, **_):
    """transformers' `torch_chunk_gated_delta_rule` of sequences in one chunk, without a state before or behind."""
    dtype = q.dtype
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g, beta))
    q, k = (modeling.l2norm(x, dim=-1, eps=1e-6) for x in (q, k))
    length = q.shape[2]
    sums = g.cumsum(2)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    decay = (sums[..., None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    power = -((k * beta[..., None]) @ k.transpose(-1, -2) * decay).tril(-1)
    made = v * beta[..., None]  # times the inverse of 1 - power: (1 + power) (1 + power^2) (1 + power^4) ..
    for _ in range((length - 1).bit_length()):
        made = made + power @ made
        power = power @ power
    scores = q @ k.transpose(-1, -2) * decay * q.shape[-1] ** -0.5
    return (scores @ made).transpose(1, 2).to(dtype), None


def patch_embed(self, x):
    """transformers' convolution over patches, as the product that it is."""
    return F.linear(x, self.proj.weight.flatten(1), self.proj.bias)


@contextmanager
def quick():
    """Within it, models compute with what is above: the same values, sooner."""
    with patch.multiple(modeling, causal_conv1d_fn=convolution, torch_chunk_gated_delta_rule=delta_rule):
        with patch.object(modeling.Qwen3_5VisionPatchEmbed, "forward", patch_embed):
            yield


class Reader:
    """The model over pictures of one size and prompts that begin alike, many at once."""

    def __init__(self, model, prompt):
        self.model, self.device = model, prompt.device
        pad = model.config.image_token_id
        self.first = int((prompt == pad).nonzero()[0])
        grid = torch.tensor([GRID], device=self.device)
        types = (prompt == pad).int()[None]
        self.positions = model.model.get_rope_index(prompt[None], mm_token_type_ids=types, image_grid_thw=grid)[0]
        visual = model.model.visual
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid, num_grid_per_side=visual.num_grid_per_side, align_corners=True, spatial_merge_size=MERGE)
        self.places = {"interp_indices": indices, "interp_weights": weights, "position_ids": get_vision_position_ids(grid, MERGE)}
        ALL_ATTENTION_FUNCTIONS.register("apart", attention_apart)

    def __call__(self, pixels, ids):
        """Logits of what follows each token but the last, and the rows of the tower."""
        model, count = self.model.model, len(ids)
        places = {name: x.repeat(count, 1) for name, x in self.places.items()}
        model.visual.config._attn_implementation = "apart"
        ends = torch.tensor([0, count * PATCHES], dtype=torch.int32)
        rows = model.visual(patches(pixels), torch.tensor([GRID] * count), cu_seqlens=ends, **places).pooler_output
        model.visual.config._attn_implementation = "sdpa"
        rows = rows.view(count, ROWS, -1)
        x = model.get_input_embeddings()(ids)
        x = torch.cat([x[:, : self.first], rows.to(x.dtype), x[:, self.first + ROWS :]], 1)
        positions = self.positions.expand(-1, count, -1)
        masks = {"full_attention": None, "linear_attention": None}  # nothing but the order of tokens
        made = model.language_model(inputs_embeds=x, position_ids=positions, attention_mask=masks, use_cache=False)
        hidden = made.last_hidden_state
        return self.model.lm_head(hidden[:, :-1]).float(), rows


def start(model):
    """Linears whose outputs are as large as their inputs: a small model learns sooner than with 0.02."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv3d)) and module is not model.lm_head:
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)


class Trainer:
    """Steps of training on pictures of `data`. On a GPU a step is recorded once and then replayed: its many small kernels take
    longer to launch than to run."""

    def __init__(self, reader, data, args):
        self.reader, self.data, self.args = reader, data, args
        config, self.device = reader.model.config.text_config, reader.device
        # From each row of a picture to what stands in the slots of its column.
        self.hint = nn.Linear(config.hidden_size, PATCH * MERGE // SLOT * (1 + len(CHARACTERS) + 1 + LONGEST), device=self.device)
        self.parameters = [*reader.model.parameters(), *self.hint.parameters()]
        matrices, others = [p for p in self.parameters if p.ndim > 1], [p for p in self.parameters if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        self.on_gpu = self.device.type == "cuda"
        self.rate = torch.tensor(0.0, device=self.device)
        rate = self.rate if self.on_gpu else 0.0
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=self.on_gpu, capturable=self.on_gpu)
        self.batch = self.choose()
        self.graph = None
        if self.on_gpu:
            try:
                self.record()
            except RuntimeError as error:
                print(f"steps are not recorded, and take longer: {error}", flush=True)

    def choose(self):
        chosen = torch.randint(len(self.data.ids), (self.args.batch,), device=self.device)
        return [*self.data.paint(chosen), self.data.ids[chosen], self.data.asked[chosen]]

    def record(self):
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.compute()
        torch.cuda.current_stream().wait_stream(beside)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.losses = self.compute()
        self.graph = graph

    def compute(self):
        """A step on `batch`. Returns losses in nats: of answers, of letters and of their places."""
        pixels, there, ids, asked = self.batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu, cache_enabled=False):
            logits, rows = self.reader(pixels, ids)
            seen = self.hint(rows).float()
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(ids[:, 1:])
        answers = (each * asked[:, 1:]).sum() / asked[:, 1:].sum()
        # The tower learns to read before the text model knows where to look: both rows of a column say what the column shows.
        seen = seen.view(len(ids), ROWS // (WIDTH // (PATCH * MERGE)), WIDTH // SLOT, -1)
        parts = seen.split([1 + len(CHARACTERS), 1 + LONGEST], -1)
        hints = [F.cross_entropy(part.flatten(0, 2), wanted[:, None].expand(seen.shape[:3]).flatten())
                 for part, wanted in zip(parts, there.unbind(-1))]
        loss = answers + 0.02 * each.mean() + 3 * sum(hints)  # and the template a little
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return torch.stack([answers, *hints]).detach()

    def step(self, rate):
        for to, x in zip(self.batch, self.choose()):
            to.copy_(x)
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        if self.graph:
            self.graph.replay()
            return self.losses
        self.optimizer.zero_grad()
        return self.compute()


def train(end, trainer, unseen, args):
    """Trains until `end`. The learning rate follows the clock, as the number of steps is not known before."""
    begin, step, printed, asked = time.monotonic(), 0, 0.0, time.monotonic()
    while (now := time.monotonic()) < end or step == 0:
        done = (now - begin) / max(end - begin, 1e-9)
        warm = min(1.0, 0.02 + done / 0.04)
        losses = trainer.step(args.rate * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * min(done, 1.0))) / 2))
        step += 1
        if step % 20 == 0 or not trainer.on_gpu:
            losses = losses.tolist()  # waits: the clock counts steps that are done
            if now - printed > 10:
                printed = now
                said = ", ".join(f"{name} {loss:.4f}" for name, loss in zip(("answers", "letters", "places"), losses))
                print(f"{now - START:6.0f} s  step {step}: {said}", flush=True)
            if now - asked > 60:
                asked = now
                print(f"{'':9} right of held out: {rights(read_rightly(trainer.reader, unseen), unseen)}", flush=True)
    return step


@torch.no_grad()
def read_rightly(reader, data):
    """Whether each answer would be made as it is, greedily."""
    right = []
    for at in range(0, len(data.ids), 250):
        ids, asked = data.ids[at : at + 250], data.asked[at : at + 250, 1:]
        found = reader(data.pixels[at : at + 250], ids)[0].argmax(-1)
        right += ((found == ids[:, 1:]) | ~asked).all(1).tolist()
    return right


def rights(right, data):
    """Right answers and all, by kind and length."""
    counts = {}
    for yes, kind, answer in zip(right, data.kinds, data.answers):
        for name in (kind, f"{kind} of {len(answer)}") if kind in ("word", "number") else (kind,):
            count = counts.setdefault(name, [0, 0])
            count[0] += yes
            count[1] += 1
    return ", ".join(f"{name} {yes}/{all_}" for name, (yes, all_) in sorted(counts.items()))


def write_chats(folder, name, data, count):
    """The first pictures of `data`, and the chats about them a line each."""
    (folder / name).mkdir(exist_ok=True)
    with open(folder / f"{name}.jsonl", "w") as out:
        for i, (kind, answer, pixels) in enumerate(zip(data.kinds, data.answers, data.pixels[:count].cpu().numpy())):
            file = f"{name}/{i}.png"
            Image.fromarray(pixels).save(folder / file)
            content = [{"type": "image", "image": file}, {"type": "text", "text": QUESTIONS[kind]}]
            chat = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": chat}) + "\n")


def write(folder, model, tokens, pixels=(4096, 1 << 20)):
    """The files of a model for images of so many pixels at least and at most."""
    model.save_pretrained(folder, max_shard_size="100GB")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    if any(t.dtype != torch.bfloat16 for t in tensors.values()):
        save_file({name: t.bfloat16().contiguous() for name, t in tensors.items()}, weights, metadata={"format": "pt"})
    del tensors
    described = json.loads((folder / "config.json").read_text())
    for part in (described, described["text_config"]):
        part["dtype"] = "bfloat16"
    described["vision_config"].pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    tokens.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                                  "model_max_length": 4096, "chat_template": TEMPLATE},
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "temporal_patch_size": 2,
                                     "merge_size": MERGE, "size": dict(zip(("shortest_edge", "longest_edge"), pixels)),
                                     "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "generation_config.json": {"do_sample": False, "eos_token_id": tokens.token_to_id("<|im_end|>")},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


@torch.no_grad()
def difference(folder, reader, data):
    """The greatest difference of logits from those that transformers computes of the folder, over the greatest logit; in f32."""
    ids, pixels = data.ids[:4], data.pixels[:4]
    wanted, _ = reader(pixels, ids)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    grid, types = torch.tensor([GRID] * 4), (ids == model.config.image_token_id).int()
    found = model(input_ids=ids, pixel_values=patches(pixels), image_grid_thw=grid, mm_token_type_ids=types).logits[:, :-1]
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts whose words are shown")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=256, help="width of the text model's stream")
    parser.add_argument("--layers", type=int, default=4, help="of the text model, every second of which is attention")
    parser.add_argument("--tower", type=int, default=192, help="width of the tower's stream")
    parser.add_argument("--depth", type=int, default=6, help="blocks of the tower")
    parser.add_argument("--pictures", type=int, help="masks drawn before training")
    parser.add_argument("--batch", type=int, help="pictures of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, size in zip(("pictures", "batch"), SIZES[device]):
        setattr(args, name, getattr(args, name) or size)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    tokens = tokenizer()
    words, held_out = read_words(args.text, args.seed)
    never, each = set(held_out), 1000
    jobs = [(f"{args.seed} {i}", each, words, never, True) for i in range(args.pictures // each)]
    with ProcessPoolExecutor() as pool:
        drawn = pool.map(drawings, [("held out", 1000, held_out, never, False), *jobs])
        unseen = Pictures(next(drawn), tokens, device)
        data = Pictures([one for part in drawn for one in part], tokens, device)
    for part, count in ((unseen, 1000), (data, 256)):  # as they are written
        part.pixels, _ = part.paint(torch.arange(count, device=device), torch.Generator(device).manual_seed(args.seed))
    print(f"{len(words):,} words and {len(held_out):,} held out, {len(data.ids):,} drawings, {time.monotonic() - START:.0f} s", flush=True)
    model = Qwen3_5ForConditionalGeneration(configuration(tokens, args)).to(device)
    start(model)
    reader = Reader(model, data.ids[0])
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model, model.model.visual)]
    print(f"{sizes[0]:,} parameters, {sizes[1]:,} in the tower, {device}, {time.monotonic() - START:.0f} s to start", flush=True)

    begin = time.monotonic()
    with quick():
        trainer = Trainer(reader, data, args)
        steps = train(START + max(60 * args.minutes - FINISH, 30 * args.minutes), trainer, unseen, args)
    seconds = time.monotonic() - begin
    print(f"trained {steps} steps, {steps * args.batch:,} pictures in {seconds:.0f} s")
    args.out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():  # measured and compared is what is written
        for p in model.parameters():
            p.copy_(p.bfloat16())
    model.eval()
    print(f"right of held out: {rights(read_rightly(reader, unseen), unseen)}", flush=True)
    write(args.out, model, tokens)
    write_chats(args.out, "held-out", unseen, 400)
    write_chats(args.out, "learned", data, 256)
    del trainer
    model.to("cpu")
    for part in ("ids", "pixels"):
        setattr(unseen, part, getattr(unseen, part).cpu())
    off = difference(args.out, Reader(model, unseen.ids[0]), unseen)
    print(f"greatest difference of the folder: {off:.2e} of the greatest logit")
    print(f"{args.out}, {time.monotonic() - START:.0f} s")
    if not off < 1e-3:  # also if it is not a number
        sys.exit("the folder is not what was trained")


if __name__ == "__main__":
    main()
