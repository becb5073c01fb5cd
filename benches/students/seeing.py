#!/usr/bin/env python3
"""What a model of sight.py reads in transformers and in nq, and what quantizing costs it on pictures.

    benches/students/seeing.py /tmp/sight --nq target/release/nq --record seeing.csv

Needs what sight.py needs, and torchvision. Asks about the pictures of `held-out.jsonl`, greedily: transformers with its own
processor, and nq over its server. Answers are counted by kind, and those that differ from transformers' are listed. Then the
model is quantized in each way of `WAYS`, its answers are counted, and `nq eval` measures its KL divergence from the source on the
same chats.
"""

import argparse
import base64
import csv
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3_5ForConditionalGeneration

# A name, and what `nq quantize` is told.
WAYS = {
    "text 8": ["--bits", "8"],
    "text 8, tower 8": ["--bits", "8", "--vision-bits", "8"],
    "text 4": ["--bits", "4"],
    "text 4, tower 8": ["--bits", "4", "--vision-bits", "8"],
}
ANSWER = 10  # tokens


def chats(folder, count):
    """Question, picture and answer of each."""
    made = []
    for line in (folder / "held-out.jsonl").read_text().splitlines()[:count]:
        user, assistant = json.loads(line)["messages"]
        picture, question = user["content"]
        made.append((question["text"], folder / picture["image"], assistant["content"]))
    return made


@torch.no_grad()
def by_transformers(folder, asked):
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), Qwen2VLImageProcessor.from_pretrained(folder)
    pad = model.config.image_token_id
    answers = []
    for question, picture, _ in asked:
        pixels = processor(images=Image.open(picture), return_tensors="pt")
        grid = pixels["image_grid_thw"]
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        rows = int(grid.prod()) // model.config.vision_config.spatial_merge_size**2
        text = text.replace("<|image_pad|>", "<|image_pad|>" * rows)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        made = model.generate(input_ids=ids, pixel_values=pixels["pixel_values"], image_grid_thw=grid, do_sample=False,
                              mm_token_type_ids=(ids == pad).int(), attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER)
        answers.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def by_nq(nq, model, asked, flags):
    command = [nq, "serve", model, "--port", "0", "--ctx", "256", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if "http://" in line:
                address = re.search(r"http://[\w.:]+\d", line)[0]
                break
        else:
            sys.exit(f"{' '.join(map(str, command))}: " + "".join(said))

        def ask(chat):
            question, picture, _ = chat
            url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": ANSWER}
            kind = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), kind)
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(ask, asked))
    finally:
        server.terminate()
        server.wait()


def rights(asked, answers):
    """Answers that are right and all, by kind."""
    right, all_ = Counter(), Counter()
    for (question, _, wanted), found in zip(asked, answers):
        kind = question.rstrip("?").split()[-1]
        all_[kind] += 1
        right[kind] += found == wanted
    return {kind: f"{right[kind]}/{count}" for kind, count in sorted(all_.items())}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--nq", type=Path, required=True)
    parser.add_argument("--count", type=int, default=400, help="pictures that are asked about")
    parser.add_argument("--device", default="cpu", help="of nq")
    parser.add_argument("--record", type=Path, help="a CSV file to write")
    args = parser.parse_args()
    asked, flags = chats(args.model, args.count), ["--device", args.device]
    rows = []

    def note(name, answers, **more):
        rows.append({"model": name, **rights(asked, answers), **more})
        print(rows[-1], flush=True)

    wanted = by_transformers(args.model, asked)
    note("transformers, f32", wanted)
    found = by_nq(args.nq, args.model, asked, flags)
    differ = [(picture.name, a, b) for (_, picture, _), a, b in zip(asked, wanted, found) if a != b]
    note("nq", found, differ=len(differ))
    for name, a, b in differ:
        print(f"  {name}: transformers {a!r}, nq {b!r}")
    with tempfile.TemporaryDirectory() as folder:
        for name, how in WAYS.items():
            made = Path(folder) / name.replace(" ", "-").replace(",", "")
            quantize = [args.nq, "quantize", args.model, "--out", made, *how, *flags]
            subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            command = [args.nq, "eval", made, "--against", args.model, "--text", args.model / "held-out.jsonl", "--json", *flags]
            report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)[0]
            answers = by_nq(args.nq, made, asked, flags)
            same = sum(a == b for a, b in zip(answers, found))
            note(name, answers, differ=len(found) - same, kld=f"{report['kld']['mean']:.6f}", ppl=f"{report['ppl']:.4f}",
                 ppl_source=f"{report['ppl_ref']:.4f}")
    if args.record:
        with open(args.record, "w", newline="") as out:
            writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
