#!/usr/bin/env python3
"""Times of images: the towers of 27B on a GPU and of 0.8B on two CPU cores beside llama.cpp's, and the tokens of others while
images are encoded.

    benches/images.py --nq target/release/nq --mtmd llama.cpp/build/bin/llama-mtmd-cli --folder /dev/shm --record images.csv

Needs torch, to draw weights fast, and a GPU (for `small` neither is needed). Models have random weights in bf16: the tower of the
published shape (27 blocks of 1,152, 16 heads of 72) beside text layers of 27B's, and 0.8B's (12 blocks of 768). What is measured,
all of it or the parts that are named:

- `towers`: `nq bench --image` of 512, 1024 and 2048 pixels a side: pixels, tower and prompt until the first token; and
  llama.cpp's time for the same weights and sizes, as `nq convert --format gguf` writes them;
- `small`: 0.8B's tower with an image of 512 pixels a side on two CPU cores, by both in turn;
- `first`: the first token behind an image of 1024 pixels a side with all of 27B in 4 bits;
- `beside`: the time between tokens of one chat, alone, beside 16 prompts of 1,024 tokens, beside 16 images of 1024 and of 2048
  pixels, by default and with `--max-pause 2`; and beside the encoding of images alone, by a server that takes no second prompt.
"""

import argparse
import base64
import csv
import functools
import json
import math
import multiprocessing
import random
import re
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "assets/demo"
SIDES = (512, 1024, 2048)
OTHERS = 16
PARTS = ("towers", "first", "beside", "small")

# Of text layers, and of the tower.
LARGE = (dict(hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48),
         dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16))
SMALL = (dict(hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16),
         dict(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12))
TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'text' %}{{- part.text }}{%- else %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
KEYS, CONV, HEAD = 16 * 128, 4, 256  # of recurrent layers: values of keys, taps; of attention: values of a head


def shapes(layers, text, tower):
    """Names of tensors, their shapes, and mean and deviation of their values."""
    h, mlp, values = text["hidden_size"], text["intermediate_size"], 128 * text["linear_num_value_heads"]
    queries, kv, heads = text["num_attention_heads"] * HEAD, text["num_key_value_heads"] * HEAD, text["linear_num_value_heads"]
    recurrent = {"in_proj_qkv.weight": (2 * KEYS + values, h), "in_proj_z.weight": (values, h), "in_proj_b.weight": (heads, h),
                 "in_proj_a.weight": (heads, h), "out_proj.weight": (h, values), "conv1d.weight": (2 * KEYS + values, 1, CONV),
                 "A_log": (heads,), "dt_bias": (heads,), "norm.weight": (128,)}
    attention = {"q_proj.weight": (2 * queries, h), "k_proj.weight": (kv, h), "v_proj.weight": (kv, h), "o_proj.weight": (h, queries),
                 "q_norm.weight": (HEAD,), "k_norm.weight": (HEAD,)}
    every = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,), "mlp.gate_proj.weight": (mlp, h),
             "mlp.up_proj.weight": (mlp, h), "mlp.down_proj.weight": (h, mlp)}
    known = {"conv1d.weight": (0, 0.4), "A_log": (0, 1), "dt_bias": (-1, 1), "linear_attn.norm.weight": (1, 0.05)}
    model = {"embed_tokens.weight": (vocabulary(), h), "norm.weight": (h,)}
    for i in range(layers):
        mixer = {f"self_attn.{n}": s for n, s in attention.items()} if i % 4 == 3 else {f"linear_attn.{n}": s for n, s in recurrent.items()}
        model |= {f"layers.{i}.{n}": s for n, s in (mixer | every).items()}
    model = {f"model.language_model.{n}": s for n, s in model.items()} | {"lm_head.weight": (vocabulary(), h)}
    width, wide, merged = tower["hidden_size"], tower["intermediate_size"], 4 * tower["hidden_size"]
    block = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.linear_fc1": (wide, width), "mlp.linear_fc2": (width, wide)}
    linears = {f"blocks.{i}.{n}": s for i in range(tower["depth"]) for n, s in block.items()}
    linears |= {"patch_embed.proj": (width, 3, 2, 16, 16), "merger.linear_fc1": (merged, merged), "merger.linear_fc2": (h, merged)}
    norms = [f"blocks.{i}.norm{n}" for i in range(tower["depth"]) for n in (1, 2)] + ["merger.norm"]
    seeing = {f"{n}.weight": s for n, s in linears.items()} | {f"{n}.bias": s[:1] for n, s in linears.items()}
    seeing |= {f"{n}.{part}": (width,) for n in norms for part in ("weight", "bias")} | {"pos_embed.weight": (2304, width)}
    model |= {f"model.visual.{n}": s for n, s in seeing.items()}
    gain = lambda n: (1, 0.05) if "visual" in n and "norm" in n and n.endswith("weight") else (0, 0.02)
    return {n: (s, next((v for end, v in known.items() if n.endswith(end)), gain(n))) for n, s in model.items()}


def vocabulary():
    return json.loads((DEMO / "config.json").read_text())["vocab_size"]


def drawn(n, mean, deviation):
    """`n` values in bf16, as bytes."""
    try:
        import torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        values = torch.empty(n, dtype=torch.bfloat16, device=device).normal_(mean, deviation)
        return memoryview(values.view(torch.uint8).cpu().numpy())
    except ImportError:
        some = gaussian(mean, deviation)
        return (some * -(-2 * n // len(some)))[: 2 * n]


@functools.cache
def gaussian(mean, deviation):
    return b"".join(struct.pack("<f", random.gauss(mean, deviation))[2:] for _ in range(65521))


def write(folder, layers, shape=LARGE):
    """A folder with a published tower and as many of its text layers, at random."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir()
    text, tower = shape
    tokens = json.loads((DEMO / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16", "tie_word_embeddings": False,
        "text_config": text | {
            "model_type": "qwen3_5_text", "vocab_size": vocabulary(), "num_hidden_layers": layers, "head_dim": HEAD, "hidden_act": "silu",
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": CONV,
            "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 32768,
            "tie_word_embeddings": False, "attention_bias": False, "rope_parameters": rope},
        "vision_config": tower | {
            "model_type": "qwen3_5", "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"], "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "deepstack_visual_indexes": []},
        "image_token_id": ids["<|image_pad|>"], "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }
    pixels = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
              "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    header, end, tensors = {}, 0, shapes(layers, text, tower)
    for name, (dims, _) in tensors.items():
        begin, end = end, end + 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for dims, spread in tensors.values():
            file.write(drawn(math.prod(dims), *spread))
    settings = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE, "model_max_length": 32768}
    stop = {"do_sample": False, "eos_token_id": ids["<|im_end|>"]}
    files = {"tokenizer.json": tokens, "tokenizer_config.json": settings, "preprocessor_config.json": pixels, "generation_config.json": stop}
    for name, content in (files | {"config.json": config}).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return folder


def picture(side, number):
    """A picture like no other, as a PNG file."""
    line = [bytes(3 * [int(127 + 127 * math.sin(x * (number + 1) / 97))])[:3] for x in range(side)]
    row = b"".join(line)
    data = b"".join(b"\0" + row[3 * (7 * y % side):] + row[:3 * (7 * y % side)] for y in range(side))
    chunk = lambda name, body: struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data, 1)) + chunk(b"IEND", b"")


def bench(command, what, rows):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stderr, flush=True)
        return
    image = json.loads(done.stdout)[-1]["image"]
    rows.append({"what": what, **{key: round(image[key], 2) for key in sorted(image) if key.endswith("_ms")}})
    print(rows[-1], flush=True)


def towers(nq, model, what, sides, rows, flags=("--device", "cuda")):
    for side in sides:
        command = [nq, "bench", model, "--no-chat", "-p", "64", "-n", "16", "--json", "--image", f"{side}x{side}", *flags]
        bench(command, f"nq, {what}, {side} x {side}", rows)


def mtmd(nq, cli, model, folder, what, sides, rows, flags=("-ngl", "99"), before=()):
    folder = folder / model.name.replace("tower", "gguf")
    folder.mkdir(exist_ok=True)
    text = folder / "text.gguf"
    if not text.exists():
        subprocess.run([nq, "convert", "--format", "gguf", model, text], check=True)
    (tower,) = folder.glob("*mmproj*.gguf")
    for side in sides:
        command = [*before, cli, "-m", text, "--mmproj", tower, "-p", "a", "-n", "1", *flags]
        command += ["--image-max-tokens", "4096", "-c", "16384", "--jinja"]
        for number in range(3):  # the first also warms up
            file = folder / f"{side}-{number}.png"
            file.write_bytes(picture(side, number))
            command += ["--image", file]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        times = re.findall(r"(?:encoded|encoding done) in (\d+) ms", done.stdout)
        if not times:
            print(done.stdout[-800:], flush=True)
        print(times, flush=True)
        rows.append({"what": f"llama.cpp, {what}, {side} x {side}", "encoding_ms": min(map(int, times), default="")})
        print(rows[-1], flush=True)


class Server:
    def __init__(self, nq, model, parallel, *flags):
        command = [nq, "serve", model, "--device", "cuda", "--port", "0", "--bits", "4", "--ctx", "32768"]
        command += ["--parallel", str(parallel), "--draft", "none", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for line in self.process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                self.address = found[1]
                break
        else:
            sys.exit("the server has not started")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def post(self, body):
        kind = {"Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(f"{self.address}/v1/chat/completions", body, kind), timeout=300)

    def gaps(self, others, seconds=None):
        """Milliseconds between tokens of a chat while `others` are asked at once and until they are answered, or for so long."""
        fork = multiprocessing.get_context("fork")  # requests are made in another process, which does not hold up the reader
        (told, telling), done = fork.Pipe(duplex=False), fork.Event()
        reader = fork.Process(target=self.read, args=(done, telling))
        reader.start()
        told.recv()
        time.sleep(1)
        begin = time.monotonic()
        asking = [threading.Thread(target=lambda o=o: self.post(o).read(), daemon=True) for o in others]
        [t.start() for t in asking]
        if seconds or not others:
            time.sleep(seconds or 4)
        else:
            [t.join() for t in asking]
        end = time.monotonic()
        done.set()
        times = told.recv()
        reader.join()
        found = sorted(gap for at, gap in times if begin <= at <= end)
        share = lambda q: round(found[min(int(q * len(found)), len(found) - 1)], 2) if found else ""
        return {"seconds": round(end - begin, 2), "gaps": len(found), "p50_ms": share(0.5), "p90_ms": share(0.9), "p99_ms": share(0.99), "most_ms": share(1)}

    def read(self, done, telling):
        """Reads chats until it is done, and tells when tokens came, and after how long."""
        times = []
        while not done.is_set():
            with self.post(asked("Go on.", 30000, stream=True)) as answer:
                last = None
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.monotonic()
                    if last:
                        times.append((now, 1e3 * (now - last)))
                    elif not times:
                        telling.send("begun")
                    last = now
                    if done.is_set():
                        break
        telling.send(times)


def asked(content, tokens, stream=False):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, "stream": stream, "ignore_eos": stream}
    return json.dumps(body).encode()


def shown(side, number):
    """A request with a picture."""
    url = "data:image/png;base64," + base64.b64encode(picture(side, number)).decode()
    return asked([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}], 1)


def beside(nq, model, rows):
    prompts = [asked("".join(chr(97 + (i * j) % 26) for j in range(1024)), 1) for i in range(1, OTHERS + 1)]
    images = {side: [shown(side, side + i) for i in range(OTHERS)] for side in SIDES[1:]}
    # Of 2, one is the chat's and one that of a request whose answer does not end: images are encoded, their prompts wait.
    for parallel, *flags in ((32,), (32, "--max-pause", "2"), (2,)):
        server = Server(nq, model, parallel, *flags)
        try:
            server.post(shown(1024, 1)).read()  # loads the tower
            cases = {"alone": ([], None), "beside 16 prompts": (prompts, None)}
            cases |= {f"beside 16 images of {side}": (some, None) for side, some in images.items()}
            if parallel == 2:
                threading.Thread(target=lambda: server.post(asked("On and on.", 30000, stream=True)).read(), daemon=True).start()
                cases = {"two chats alone": ([], 1), "two chats beside the encoding of images of 2048": (images[2048], 2.5)}
            for name, case in cases.items():
                rows.append({"what": " ".join([name, *flags]), **server.gaps(*case)})
                print(rows[-1], flush=True)
        finally:
            server.process.kill()
            server.process.wait()


def small(nq, cli, folder, rows):
    """Both in turn, so that what else a machine does holds for both."""
    model = write(folder / "tower-12", 4, SMALL)
    on_cpu, on_two = ("--device", "cpu", "--threads", "2"), ("-ngl", "0", "--no-mmproj-offload", "-t", "2")
    for _ in range(3):
        towers(nq, model, "0.8B on two cores", SIDES[:1], rows, on_cpu)
        if cli:
            mtmd(nq, cli, model, folder, "0.8B on two cores", SIDES[:1], rows, on_two, ("taskset", "-c", "0,1"))


def first(nq, rows):
    command = [nq, "bench", "--preset", "qwen3.5-27b", "--bits", "4", "--no-chat", "-p", "64", "-n", "16", "--json", "--image", "1024x1024"]
    bench(command, "nq, 27B in 4 bits, 1024 x 1024", rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nq", type=Path, required=True)
    parser.add_argument("--mtmd", type=Path, help="llama.cpp's llama-mtmd-cli")
    parser.add_argument("--folder", type=Path, required=True, help="where models are written: 25 GB")
    parser.add_argument("--record", type=Path, help="a CSV file to write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all by default")
    args = parser.parse_args()
    rows = []
    for part in args.parts:
        match part:
            case "towers":
                few = write(args.folder / "tower-27", 4)
                towers(args.nq, few, "4 layers", SIDES, rows)
                if args.mtmd:
                    mtmd(args.nq, args.mtmd, few, args.folder, "27B", SIDES, rows)
            case "first":
                first(args.nq, rows)
            case "beside":
                beside(args.nq, write(args.folder / "tower-27-text-16", 16), rows)
            case "small":
                small(args.nq, args.mtmd, args.folder, rows)
        if args.record:
            with open(args.record, "w", newline="") as out:
                writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)))
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
