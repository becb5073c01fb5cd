#!/usr/bin/env python3
"""nq serve beside llama-server on this CPU, seen by one client: a dated record.

    benches/compare/serve.py --nq target/release/nq --client target/release/examples/load_client --llama DIR

DIR holds `llama-server`. Both serve random weights of one of Qwen3's shapes, which `nq synth` makes: nq its
INT4 (RTN, groups of 64), llama-server the Q4_0 that `nq convert` writes, on as many threads. The servers take
turns, each started anew, and are asked by `serve/examples/load_client.rs`: prompts of random token ids, all
different. A row a turn and a number of clients; the last rows are medians, and what nq makes of llama-server's
tokens per second in the turns. Run it on a machine that does nothing else. With --work DIR the models are kept
there and found again.
"""

import argparse
import csv
import datetime
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from speed import RECORDS, machine, output

FIGURES = ["tok_s", "first_ms_p50", "first_ms_p99", "gap_ms_p50", "gap_ms_p99"]
ENGINES = ["nq", "llama-server"]


def prepare(nq, preset, folder):
    """Folders and files of the two engines' models."""
    dense, models = folder / "dense", (folder / "int4", folder / "q4_0.gguf")
    if not all(m.exists() for m in models):
        output([nq, "synth", f"qwen3-{preset}", dense])
        output([nq, "quantize", dense, "--bits", 4, "--simple", "--out", models[0], "--method", "rtn", "--eval-tokens", 256,
                "--device", "cpu"])
        output([nq, "convert", dense, models[1], "--format", "gguf", "--type", "q4_0", "--requantize"])
    return dict(zip(ENGINES, models))


def command(args, engine, model, port):
    clients = max(args.clients)
    ctx = 128 * -(-(args.sizes[0] + args.sizes[1] + 1) // 128)
    if engine == "nq":
        return [args.nq, "serve", model, "--device", "cpu", "--threads", args.threads, "--port", port,
                "--parallel", clients, "--ctx", ctx]
    return [args.llama / "llama-server", "-m", model, "-t", args.threads, "-tb", args.threads, "--port", port,
            "--host", "127.0.0.1", "-np", clients, "-c", clients * ctx]


def wait(url, server, seconds=300):
    """Until the server answers that it is ready."""
    for _ in range(4 * seconds):
        if server.poll() is not None:
            sys.exit(f"the server ended: {server.args}")
        try:
            if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
                return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.25)
    sys.exit(f"{url} is not ready after {seconds} s")


def measure(args, engine, model):
    """The client's rows about one server."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tempfile.TemporaryFile()
    server = subprocess.Popen([str(c) for c in command(args, engine, model, port)], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait(url, server)
        ask = [args.client, url, "--in", args.sizes[0], "--vocab", args.vocab]
        output(ask + ["--out", 8, "--clients", 1, "--each", 1])
        clients = ",".join(map(str, args.clients))
        told = output(ask + ["--out", args.sizes[1], "--clients", clients, "--each", args.each])
        return list(csv.DictReader(told.splitlines()))
    finally:
        server.terminate()
        server.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nq", default="nq", help="the program")
    parser.add_argument("--client", type=Path, required=True, help="serve/examples/load_client.rs, built")
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama-server")
    parser.add_argument("--preset", default="0.6b", help="a shape of Qwen3")
    parser.add_argument("--threads", type=int, default=2, help="of either server")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="requests at once")
    parser.add_argument("--each", type=int, default=2, help="requests of a client")
    parser.add_argument("--sizes", type=int, nargs=2, default=[512, 128], help="tokens of prompt and answer")
    parser.add_argument("--vocab", type=int, default=151643, help="token ids of prompts are below")
    parser.add_argument("--repeats", type=int, default=3, help="turns of both")
    parser.add_argument("--work", type=Path, help="folder for the models")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder for the record")
    args = parser.parse_args()
    temporary = tempfile.TemporaryDirectory() if args.work is None else None
    models = prepare(args.nq, args.preset, args.work or Path(temporary.name))
    rows = []
    for turn in range(args.repeats):
        for engine in ENGINES if turn % 2 == 0 else ENGINES[::-1]:
            for row in measure(args, engine, models[engine]):
                rows.append({"engine": engine, "turn": turn + 1, **{k: v for k, v in row.items() if k != "long_first_ms"}})
                print(rows[-1], file=sys.stderr)
    def of(engine, n, key):
        return [float(r[key]) for r in rows if r["engine"] == engine and r["clients"] == str(n)]

    for n in args.clients:
        for engine in ENGINES:
            medians = {k: f"{statistics.median(of(engine, n, k)):.2f}" for k in FIGURES}
            rows.append({"engine": engine, "turn": "median", "in": args.sizes[0], "out": args.sizes[1], "clients": n} | medians)
    ratios = {n: [f"{a / b:.2f}" for a, b in zip(of("nq", n, "tok_s"), of("llama-server", n, "tok_s"))]
              for n in args.clients}
    today = datetime.date.today().isoformat()
    path = args.out / f"{today}-compare-serve-cpu.csv"
    with open(path, "w", newline="") as file:
        version = output([args.nq, "--version"]).strip()
        file.write(f"# {today}, {machine('cpu')}, {args.threads} threads; random weights of qwen3-{args.preset}; {version}\n")
        for n, found in ratios.items():
            file.write(f"# tok_s of nq / llama-server with {n} clients, by turn: {', '.join(found)}\n")
        out = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    for n, found in ratios.items():
        print(f"{n} clients: nq / llama-server {', '.join(found)}")
    print(path)


if __name__ == "__main__":
    main()
