#!/usr/bin/env python3
"""Times of images: the towers of 27B on a GPU and of 0.8B on two CPU cores beside llama.cpp's, and the tokens of others while
images are encoded.

    benches/images.py --nq target/release/nq --mtmd llama.cpp/build/bin/llama-mtmd-cli --folder /dev/shm --record images.csv

Needs torch with a GPU, transformers (5.17 or later), tokenizers, safetensors and Pillow. Models have random weights in bf16: the
tower of the published shape (27 blocks of 1,152, 16 heads of 72) beside text layers of 27B's, and 0.8B's (12 blocks of 768). What
is measured:

- `nq bench --image` of 512, 1024 and 2048 pixels a side: pixels, tower and prompt until the first token;
- llama.cpp's time for the same images by the same weights, as `nq convert --format gguf` writes them;
- 0.8B's tower with an image of 512 pixels a side on two CPU cores, by both;
- the first token behind an image with two numbers of 4-bit text layers, and by them with all 64 of 27B;
- the time between tokens of one chat, alone, beside 16 prompts of 1,024 tokens, and beside 16 images of 1024 and of 2048 pixels.
"""

import argparse
import base64
import csv
import io
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

sys.path.append(str(Path(__file__).resolve().parent / "students"))
import sight  # the files beside weights

DEMO = Path(__file__).resolve().parents[1] / "assets/demo"
SIDES = (512, 1024, 2048)
OTHERS = 16


# Of text layers, and of the tower.
LARGE = (dict(hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48),
         dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16))
SMALL = (dict(hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16),
         dict(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12))
LAYERS = 64  # of 27B


def write(folder, layers, shape=LARGE):
    """A folder with a published tower and as many of its text layers, at random."""
    if (folder / "config.json").exists():
        return folder
    tokens = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    config = Qwen3_5Config(
        text_config=dict(
            vocab_size=tokens.get_vocab_size(), num_hidden_layers=layers, head_dim=256, linear_num_key_heads=16, **shape[0],
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), linear_key_head_dim=128, linear_value_head_dim=128,
            max_position_embeddings=32768, tie_word_embeddings=False, eos_token_id=tokens.token_to_id("<|im_end|>"), pad_token_id=None, bos_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                             "mrope_section": [11, 11, 10], "mrope_interleaved": True}),
        vision_config=dict(patch_size=16, temporal_patch_size=2, spatial_merge_size=2, num_position_embeddings=2304,
                           out_hidden_size=shape[0]["hidden_size"], **shape[1]),
        tie_word_embeddings=False, **sight.special_ids(tokens))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3_5ForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    sight.write(folder, model, tokens, pixels=(65_536, 16_777_216))
    del model
    torch.cuda.empty_cache()
    return folder


def picture(side, number):
    """A picture like no other, as a PNG file."""
    x = torch.arange(side, dtype=torch.float64)
    waves = torch.sin(x * (number + 1) / 97)[:, None] * torch.cos(x * (number + 2) / 61)
    levels = ((waves + 1) * 127).to(torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(levels).convert("RGB").save(file, "PNG")
    return file.getvalue()


def towers(nq, model, what, sides, rows, flags=("--device", "cuda")):
    for side in sides:
        command = [nq, "bench", model, "--no-chat", "-p", "64", "-n", "16", "--json", "--image", f"{side}x{side}", *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stderr, flush=True)
            continue
        image = json.loads(done.stdout)[-1]["image"]
        rows.append({"what": f"nq, {what}, {side} x {side}", **{key: image[key] for key in sorted(image) if key.endswith("_ms")}})
        print(rows[-1], flush=True)


def first_token(few, many, rows):
    """What the first token behind an image takes with all layers, by rows with 4 and with 16."""
    times = {key: [next((row[key] for row in rows if row["what"] == name), None) for name in (few, many)] for key in ("prompt_ms", "first_token_ms")}
    if None not in times["prompt_ms"]:
        layer = (times["prompt_ms"][1] - times["prompt_ms"][0]) / 12
        first = times["first_token_ms"][1] + layer * (LAYERS - 16)
        rows.append({"what": f"{many}, computed for {LAYERS} layers", "first_token_ms": first, "prompt_ms": times["prompt_ms"][1] + layer * (LAYERS - 16)})
        print(rows[-1], flush=True)


def mtmd(nq, cli, model, folder, what, sides, rows, flags=("-ngl", "99"), before=()):
    folder = folder / model.name.replace("tower", "gguf")
    folder.mkdir(exist_ok=True)
    text = folder / "text.gguf"
    subprocess.run([nq, "convert", "--format", "gguf", "--force", model, text], check=True)
    (tower,) = folder.glob("*mmproj*.gguf")
    for side in sides:
        file = folder / f"{side}.png"
        file.write_bytes(picture(side, 0))
        command = [*before, cli, "-m", text, "--mmproj", tower, "--image", file, "-p", "a", "-n", "1", *flags]
        command += ["--image-max-tokens", "4096", "-c", "8192", "--jinja"]
        times = []
        for _ in range(3):  # the first also warms up
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            times += re.findall(r"encoded in (\d+) ms", done.stdout)
        if not times:
            print(done.stdout[-2000:], flush=True)
        rows.append({"what": f"llama.cpp, {what}, {side} x {side}", "encoding_ms": min(map(int, times), default="")})
        print(rows[-1], flush=True)


class Server:
    def __init__(self, nq, model):
        command = [nq, "serve", model, "--device", "cuda", "--port", "0", "--bits", "4", "--ctx", "8192"]
        command += ["--parallel", "32", "--draft", "none"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for line in self.process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                self.address = found[1]
                break
        else:
            sys.exit("the server has not started")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def post(self, content, tokens, stream=False):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, "stream": stream}
        address, kind = f"{self.address}/v1/chat/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), kind)
        return urllib.request.urlopen(request, timeout=300)

    def gaps(self, others):
        """Milliseconds between tokens of a chat while `others` are asked at once and answered."""
        times, done = [], threading.Event()

        def chat():
            while not done.is_set():
                with self.post("Go on.", 2000, stream=True) as answer:
                    last = None
                    for line in answer:
                        if not line.startswith(b"data: {"):
                            continue
                        now = time.perf_counter()
                        if last:
                            times.append((now, 1e3 * (now - last)))
                        last = now
                        if done.is_set():
                            break

        reader = threading.Thread(target=chat)
        reader.start()
        time.sleep(1)
        begin = time.perf_counter()
        if others:
            asking = [threading.Thread(target=lambda o=o: self.post(o, 1).read()) for o in others]
            [t.start() for t in asking]
            [t.join() for t in asking]
        else:
            time.sleep(4)
        end = time.perf_counter()
        done.set()
        reader.join()
        found = sorted(gap for at, gap in times if begin <= at <= end)
        share = lambda q: round(found[min(int(q * len(found)), len(found) - 1)], 2) if found else ""
        return {"seconds": round(end - begin, 2), "gaps": len(found), "p50_ms": share(0.5), "p90_ms": share(0.9), "p99_ms": share(0.99), "most_ms": share(1)}


def beside(nq, model, rows):
    server = Server(nq, model)
    try:
        def image(side, number):
            url = "data:image/png;base64," + base64.b64encode(picture(side, number)).decode()
            return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]

        server.gaps([image(1024, 999)])  # loads the tower
        cases = {
            "alone": [],
            "beside 16 prompts": ["".join(chr(97 + (i * j) % 26) for j in range(1024)) for i in range(1, OTHERS + 1)],
            "beside 16 images of 1024": [image(1024, i) for i in range(OTHERS)],
            "beside 16 images of 2048": [image(2048, 100 + i) for i in range(OTHERS)],
        }
        for name, others in cases.items():
            rows.append({"what": name, **server.gaps(others)})
            print(rows[-1], flush=True)
    finally:
        server.process.terminate()
        server.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nq", type=Path, required=True)
    parser.add_argument("--mtmd", type=Path, help="llama.cpp's llama-mtmd-cli")
    parser.add_argument("--folder", type=Path, required=True, help="where models are written: 25 GB")
    parser.add_argument("--record", type=Path, help="a CSV file to write")
    args = parser.parse_args()
    rows = []
    few = write(args.folder / "tower-27", 4)
    towers(args.nq, few, "4 layers", SIDES, rows)
    if args.mtmd:
        mtmd(args.nq, args.mtmd, few, args.folder, "27B", SIDES, rows)
    cores, little = ("taskset", "-c", "0,1"), write(args.folder / "tower-12", 4, SMALL)
    on_cpu = ("--device", "cpu", "--threads", "2")
    towers(args.nq, little, "0.8B on two cores", SIDES[:1], rows, on_cpu)
    if args.mtmd:
        mtmd(args.nq, args.mtmd, little, args.folder, "0.8B on two cores", SIDES[:1], rows, ("-ngl", "0", "--no-mmproj-offload", "-t", "2"), cores)
    many = write(args.folder / "tower-27-text-16", 16)
    in_4_bits = ("--device", "cuda", "--bits", "4")
    towers(args.nq, few, "4 layers in 4 bits", SIDES[1:2], rows, in_4_bits)
    towers(args.nq, many, "16 layers in 4 bits", SIDES[1:2], rows, in_4_bits)
    first_token(f"nq, 4 layers in 4 bits, {SIDES[1]} x {SIDES[1]}", f"nq, 16 layers in 4 bits, {SIDES[1]} x {SIDES[1]}", rows)
    beside(args.nq, many, rows)
    if args.record:
        with open(args.record, "w", newline="") as out:
            writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
