#!/usr/bin/env python3
"""Random load on `nq serve` for as long as is asked for, and what is left of it afterwards.

    benches/endurance.py target/release/nq --minutes 30 [--hybrid] [--device cuda --model FOLDER --draft mtp] > record.csv

Clients of all kinds at once: whole answers, streams, two answers to a prompt, schemas, readers that
hang up or read slowly, bodies that are wrong or break off, more than the queue holds. Each answer
must come whole or end with an error. A row a minute says what the process holds; after the last, all
pages must be there for as many full contexts as are served at once, and threads, descriptors and
memory must be those of an early minute. With --hybrid the model has recurrences and random weights, with --mixture experts
of which --gpu-memory may hold a part; --model serves another one, with the demo's tokenizer.
"""

import argparse
import array
import collections
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

CHAT = "/v1/chat/completions"
PARALLEL, CTX, PAGE = 6, 1024, 128
SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "year": {"type": "integer"}},
    "required": ["good", "year"],
    "additionalProperties": False,
}

counts = collections.Counter()
broken = []


def note(what):
    counts[what] += 1


def body(rng):
    text = f"Tell me about the film number {rng.randrange(40)}. " * rng.choice([1, 1, 4, 20, 45])
    asked = {
        "model": rng.choice(["demo", "demo", "demo", "other"]),
        "messages": [{"role": "user", "content": text}],
        "max_tokens": rng.choice([1, 10, 60, 300]),
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.7,
        "seed": rng.randrange(1000),
    }
    if rng.random() < 0.15:
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
    if rng.random() < 0.1:
        asked |= {"logprobs": True, "top_logprobs": 3}
    return asked


def judge(status, text, asked):
    """Whole, or ended with an error: anything else is broken."""
    try:
        if status != 200:
            assert json.loads(text)["error"]["message"] and status in (400, 404, 408, 413, 429, 503, 504), status
            return note(f"status_{status}")
        if not asked["stream"]:
            assert all(c["finish_reason"] for c in json.loads(text)["choices"])
            return note("whole")
        last = [line[6:] for line in text.splitlines() if line.startswith("data: ")][-1]
        if last == "[DONE]":
            return note("whole")
        assert json.loads(last)["error"]["message"]
        note("ended_with_error")
    except Exception as e:
        broken.append(f"{e!r}: {status} {text[-300:]!r}")
        note("broken")


def ask(address, asked, path=CHAT):
    connection = http.client.HTTPConnection(*address, timeout=120)
    connection.request("POST", path, json.dumps(asked), {"content-type": "application/json"})
    response = connection.getresponse()
    judge(response.status, response.read().decode(), asked)
    connection.close()


def raw(address, asked):
    data = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def hang_up(address, asked, rng):
    with socket.create_connection(address) as s:
        s.sendall(raw(address, asked))
        s.settimeout(rng.choice([0.001, 0.05, 0.5, 2]))
        try:
            s.recv(rng.randrange(1, 4000))
        except TimeoutError:
            pass
    note("hung_up")


def read_slowly(address, asked, rng):
    asked["stream"] = True
    with socket.create_connection(address) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.sendall(raw(address, asked))
        for _ in range(rng.randrange(40)):
            if not s.recv(64):
                break
            time.sleep(0.05)
    note("read_slowly")


def break_off(address, asked, rng):
    data = raw(address, asked)
    with socket.create_connection(address) as s:
        s.sendall(data[: rng.randrange(len(data))])
    note("broke_off")


def bad(address, rng):
    text = rng.choice(["{", "[]", '{"messages": 3}', '{"messages": [], "n": 99}', '"' * 1000, "[" * 5000])
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("POST", CHAT, text, {"content-type": "application/json"})
    judge(connection.getresponse().status, '{"error": {"message": "read"}}', {})
    connection.close()


def client(address, seed, end):
    rng = random.Random(seed)
    while time.time() < end:
        asked, kind = body(rng), rng.random()
        try:
            if kind < 0.6:
                ask(address, asked)
            elif kind < 0.75:
                hang_up(address, asked, rng)
            elif kind < 0.83:
                read_slowly(address, asked, rng)
            elif kind < 0.9:
                break_off(address, asked, rng)
            elif kind < 0.97:
                bad(address, rng)
            else:
                time.sleep(rng.random() * 3)
        except OSError as e:
            broken.append(f"{asked['stream']} {kind:.2f} {e!r}")
            note("broken")


def metrics(address):
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r'^nq_(\w+)\{model_name="demo"\} (\d+)$', text, re.M)
    return {name: int(value) for name, value in found}


def holds(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    value = lambda name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1])
    return value("VmRSS") / 1024, value("Threads"), len(os.listdir(f"/proc/{pid}/fd"))


def gpu_mib(device):
    """Memory of the first GPU that is taken, by whomever."""
    if not device.startswith("cuda"):
        return ""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def fill(address):
    """As many whole contexts at once as are served: all pages are needed."""
    def one(i):
        prompt = [1000 + i] * (CTX - 8)
        asked = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": False}
        ask(address, asked, "/v1/completions")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(PARALLEL)]
    [t.start() for t in threads]
    [t.join() for t in threads]


def hybrid(folder, demo):
    """A small model with recurrences in three of four layers, random weights and the demo's tokenizer."""
    hidden, mlp, heads, kv_heads, d, key_heads, value_heads, dim, vocab = 128, 256, 4, 2, 32, 2, 4, 32, 4096
    keys, values = key_heads * dim, value_heads * dim
    config = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": d, "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
        "partial_rotary_factor": 0.25, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "eos_token_id": json.loads((demo / "config.json").read_text())["eos_token_id"], "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": dim, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads, "linear_value_head_dim": dim, "torch_dtype": "float32",
    }
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(4):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in {
            "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "mlp.gate_proj": [mlp, hidden],
            "mlp.up_proj": [mlp, hidden], "mlp.down_proj": [hidden, mlp],
        }.items()}
        if i == 3:
            shapes |= {f"model.layers.{i}.self_attn.{name}.weight": shape for name, shape in {
                "q_proj": [2 * heads * d, hidden], "k_proj": [kv_heads * d, hidden], "v_proj": [kv_heads * d, hidden],
                "o_proj": [hidden, heads * d], "q_norm": [d], "k_norm": [d],
            }.items()}
        else:
            shapes |= {f"model.layers.{i}.linear_attn.{name}": shape for name, shape in {
                "in_proj_qkv.weight": [2 * keys + values, hidden], "in_proj_z.weight": [values, hidden],
                "in_proj_b.weight": [value_heads, hidden], "in_proj_a.weight": [value_heads, hidden],
                "conv1d.weight": [2 * keys + values, 1, 4], "A_log": [value_heads], "dt_bias": [value_heads],
                "norm.weight": [dim], "out_proj.weight": [hidden, values],
            }.items()}
    rng = random.Random(1)
    scale = lambda shape: 0.1 if len(shape) == 1 else shape[-1] ** -0.5
    values = lambda shape, n: array.array("f", (rng.gauss(0, scale(shape)) for _ in range(n))).tobytes()
    write(folder, demo, config, shapes, "F32", values)


def mixture(folder, demo):
    """A mixture with experts of about a megabyte in 4 bits, random weights and the demo's tokenizer."""
    hidden, width, experts, heads, kv_heads, d, vocab, layers = 1024, 768, 24, 8, 2, 128, 4096, 4
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": width, "moe_intermediate_size": width, "num_experts": experts, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": d, "vocab_size": vocab,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "eos_token_id": json.loads((demo / "config.json").read_text())["eos_token_id"], "torch_dtype": "bfloat16",
    }
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(layers):
        each = {
            "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [d], "self_attn.k_norm": [d],
            "self_attn.q_proj": [heads * d, hidden], "self_attn.k_proj": [kv_heads * d, hidden],
            "self_attn.v_proj": [kv_heads * d, hidden], "self_attn.o_proj": [hidden, heads * d], "mlp.gate": [experts, hidden],
        }  # fmt: skip
        for e in range(experts):
            each |= {f"mlp.experts.{e}.{name}_proj": [width, hidden] for name in ["gate", "up"]}
            each[f"mlp.experts.{e}.down_proj"] = [hidden, width]
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in each.items()}
    # BF16 between 1/128 and 1/32, of both signs: the high byte is 3C or BC.
    sign = bytes(0x3C | (i & 1) << 7 for i in range(256))

    def values(shape, n):
        data = bytearray(2 * n)
        data[0::2], data[1::2] = os.urandom(n), os.urandom(n).translate(sign)
        return bytes(data)

    write(folder, demo, config, shapes, "BF16", values)


def write(folder, demo, config, shapes, dtype, values):
    """A model of these shapes with the demo's tokenizer; `values` makes the bytes of so many."""
    header, blocks, at = {}, [], 0
    for name, shape in shapes.items():
        count = 1
        for n in shape:
            count *= n
        blocks.append(values(shape, count))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(blocks[-1])]}
        at += len(blocks[-1])
    head = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"".join(blocks))
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
        shutil.copy(demo / name, folder / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nq")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--hybrid", action="store_true", help="a model with recurrences instead of the demo")
    parser.add_argument("--mixture", action="store_true", help="a mixture of experts, in 4 bits, instead of the demo")
    parser.add_argument("--gpu-memory", help="--gpu-memory of the server: with too little for all experts, they move")
    parser.add_argument("--model", type=pathlib.Path, help="folder of another model instead of the demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draft", help="--draft of the server")
    options = parser.parse_args()
    demo = pathlib.Path(__file__).parent.parent / "assets/demo"
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as made:
        served, other = "demo", demo
        flags = ["--draft", options.draft] if options.draft else []
        flags += ["--bits", "4"] if options.mixture else []
        flags += ["--gpu-memory", options.gpu_memory] if options.gpu_memory else []
        if options.model:
            served = other = pathlib.Path(made) / "demo"
            shutil.copytree(options.model, served)  # the folder gives the name
        elif options.hybrid or options.mixture:
            served = pathlib.Path(made) / "demo"
            served.mkdir()
            (hybrid if options.hybrid else mixture)(served, demo)
        # A model in two memories takes all that it may of the GPU's.
        second = [] if options.mixture else ["--model", f"other={other}"]
        server = subprocess.Popen(
            [options.nq, "serve", str(served), *second, "--device", options.device, "--threads", "1",
             *flags, "--port", "0", "--parallel", str(PARALLEL), "--queue", "12", "--ctx", str(CTX),
             "--timeout", "60", "--cache-dir", cache, "--cache-size", "200MB", "--json"],
            stdout=subprocess.PIPE, text=True,
        )
        try:
            run(options, server)
        finally:
            server.terminate()
            assert server.wait(60) == 0
            print("# the server ended in good order", flush=True)


def run(options, server):
    said = json.loads(server.stdout.readline())
    host, port = said["url"].removeprefix("http://").split(":")
    address = (host, int(port))
    begun = time.time()
    end = begun + 60 * options.minutes
    threads = [threading.Thread(target=client, args=(address, seed, end)) for seed in range(options.clients)]
    [t.start() for t in threads]
    kinds = ["whole", "ended_with_error", "hung_up", "read_slowly", "broke_off", "status_400", "status_429", "status_503", "status_504", "broken"]
    print("minute,rss_mib,gpu_mib,threads,descriptors,pages_free,kept_tokens,preemptions," + ",".join(kinds), flush=True)

    def row():
        rss, alive, open_files = holds(server.pid)
        seen = metrics(address)
        figures = [seen["kv_pages_free"], seen["prefix_cache_tokens"], seen["num_preemptions_total"]]
        figures = [f"{(time.time() - begun) / 60:.1f}", f"{rss:.1f}", gpu_mib(options.device), alive, open_files, *figures, *[counts[k] for k in kinds]]
        print(",".join(map(str, figures)), flush=True)
        return rss, alive, open_files

    early = None
    while time.time() < end:
        time.sleep(min(60, 12 * options.minutes, max(1, end - time.time())))
        now = row()
        early = early or (now if time.time() - begun > min(300, 20 * options.minutes) else None)
    [t.join() for t in threads]
    time.sleep(15)
    assert (metrics(address)["num_requests_running"], metrics(address)["num_requests_waiting"]) == (0, 0)
    fill(address)
    time.sleep(15)
    # What is kept now are those contexts, which have no page in common.
    seen = metrics(address)
    there = seen["kv_pages_free"] * PAGE + seen["prefix_cache_tokens"]
    assert there > (seen["kv_pages"] - 1) * PAGE, f"pages are missing: {seen}"
    rss, alive, open_files = row()
    print(f"# kinds: {dict(counts)}")
    for line in broken[:20]:
        print(f"# broken: {line}")
    assert not broken and counts["whole"] > 0
    if early:
        assert alive <= early[1] and open_files <= early[2] and rss < early[0] * 1.25, (early, rss, alive, open_files)
    print("# all pages were there, and nothing else was left", flush=True)


if __name__ == "__main__":
    sys.exit(main())
