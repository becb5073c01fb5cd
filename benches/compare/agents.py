#!/usr/bin/env python3
"""An agent's conversations (benches/agent_load.py) with nq, with nq without its prefix cache, and with llama-server.

    benches/compare/agents.py MODEL.gguf --nq target/release/nq --llama build/bin/llama-server [--scale 0.1] \\
        [--device cuda] > record.csv

All servers run the same GGUF file, which `nq synth qwen3.5-0.8b FOLDER` and `nq convert FOLDER MODEL.gguf --format gguf
--type q4_0 --requantize` make, one after the other, with two slots; one conversation, and two at once. Rows are those of
agent_load.py behind the run's name; a table goes to standard error: tokens of prompts, those computed, medians of first
tokens, wall time, and the most memory that the server held beside files, or that was in use on the GPU.
"""

import argparse
import csv
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

LOAD = Path(__file__).resolve().parents[1] / "agent_load.py"
# The longest prompt, in tokens at --scale 1 and without what templates add, of one conversation and of two.
LONGEST = {1: 39_000, 2: 48_000}


def servers(args):
    """(name, conversations at once, command for a port) of each run."""
    def context(n):
        return 128 * -(-int(LONGEST[n] * args.scale + 1000) // 128)

    def nq(n, *flags):
        return lambda port: [args.nq, "serve", args.gguf, "--served-name", "demo", "--device", args.device, "--port", port,
                             "--parallel", 2, "--ctx", context(n), *flags]

    def llama(n):
        device = ["-t", os.cpu_count()] if args.device == "cpu" else ["-ngl", 99, "-fa", "on"]
        return lambda port: [args.llama, "-m", args.gguf, *device, "-np", 2, "-c", 2 * context(n), "--chat-template", "chatml",
                             "--host", "127.0.0.1", "--port", port]

    return [("nq", 1, nq(1)), ("llama-server", 1, llama(1)), ("nq without cache", 1, nq(1, "--no-prefix-cache")),
            ("nq", 2, nq(2)), ("llama-server", 2, llama(2))]


def held(pid, device):
    """MiB of memory of a process that are not of files; on a GPU those in use there, by whomever."""
    if device != "cpu":
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return max(int(line) for line in subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(lines.get(key, "0 kB").split()[0]) for key in ("RssAnon", "RssShmem")) // 1024


def ready(url, server):
    """Waits until the server answers."""
    begun = time.monotonic()
    while time.monotonic() - begun < 300:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            if urllib.request.urlopen(url + "/health", timeout=5).status == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server is not ready after five minutes")


def ask(url, text):
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()


def measure(command, conversations, scale, device):
    """The rows of a load, and the most memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, most, done = f"http://127.0.0.1:{port}", [0], threading.Event()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen([str(part) for part in command(port)], stdout=log, stderr=log)

        def watch():
            while not done.wait(0.25):
                most[0] = max(most[0], held(server.pid, device))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            ready(url, server)
            # What a server does at its first use (kernels, graphs) belongs to no conversation.
            for text in ("z" * 600, "y" * 40):
                ask(url, text)
            load = [sys.executable, LOAD, url, "--scale", str(scale), "--conversations", str(conversations)]
            told = subprocess.run(load, stdout=subprocess.PIPE, text=True, check=True).stdout
        finally:
            done.set()
            watcher.join()
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    return list(csv.DictReader(told.splitlines())), most[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("--nq", required=True)
    parser.add_argument("--llama", required=True)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    out = None
    print(f"{'run':16} {'at once':>7} {'prompt':>8} {'computed':>9} {'first token':>12} {'wall':>9} {'held':>10}", file=sys.stderr)
    for name, n, command in servers(args):
        rows, memory = measure(command, n, args.scale, args.device)
        *each, last = rows
        prompt, cached = int(last["prompt_tokens"]), int(last["cached_tokens"])
        first = statistics.median(float(row["first_token_s"]) for row in each)
        print(f"{name:16} {n:7} {prompt:8} {prompt - cached:9} {first:10.3f} s {float(last['total_s']):7.2f} s {memory:6} MiB",
              file=sys.stderr)
        for row in rows:
            row = {"run": f"{name} x {n}", **row}
            if out is None:
                out = csv.DictWriter(sys.stdout, row, lineterminator="\n")
                out.writeheader()
            out.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
