#!/usr/bin/env python3
"""nq's load client beside guidellm, over one `nq serve`: do both see the same?

    benches/compare/clients.py MODEL --nq target/release/nq --client target/release/examples/load_client \\
        --guidellm VENV/bin/guidellm > record.csv

MODEL should be slow enough, 0.6B for example, that the clients take no time from the server: guidellm needs a core
for 500 tokens a second. Prompts are not kept: guidellm sends the same ones in each of its turns.

Both send prompts of 128 random tokens for 64 tokens to `/v1/completions`, one after the other with the same
number of requests, in turns. guidellm's inter-token latency is the mean of an answer, so it stands beside the
client's `token_ms`; its tokens per second are counted from the first request's start to the last one's end. Run it
on a machine that does nothing else: where others compile, two runs of one client differ by more than the clients.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from speed import machine, output

FIGURES = ["tok_s", "first_ms_p50", "first_ms_p99", "token_ms_p50", "token_ms_p99"]
PROMPT, ANSWER = 128, 64


def by_guidellm(program, model, url, clients, requests):
    backend = {"kind": "openai_http", "target": url, "model": model.name, "request_format": "/v1/completions",
               "extras": {"body": {"temperature": 0.8, "seed": 1}}}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        output([program, "run", "--backend", json.dumps(backend), "--profile", f"kind=concurrent,streams={clients}",
                "--constraint", f"kind=max_requests,count={requests}", "--tokenizer", f"kind=hf_auto,model={model}",
                "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
                "--output", f"kind=json,path={file.name}", "--disable-progress"])
        found = json.loads(Path(file.name).read_text())["benchmarks"][0]
    answers, metrics = found["requests"]["successful"], found["metrics"]
    assert len(answers) == requests, metrics["request_totals"]
    times = [a["info"]["timings"] for a in answers]
    took = max(t["request_end"] for t in times) - min(t["request_start"] for t in times)
    first, token = (metrics[name]["successful"]["percentiles"]
                    for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    tokens = sum(a["output_tokens"] for a in answers)
    return [tokens / took, first["p50"], first["p99"], token["p50"], token["p99"]]


def by_client(program, _, url, clients, requests):
    told = output([program, url, "--in", PROMPT, "--out", ANSWER, "--clients", clients, "--each", requests // clients])
    row = next(csv.DictReader(told.splitlines()))
    return [float(row[name]) for name in FIGURES]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--nq", default="nq", help="the program")
    parser.add_argument("--client", required=True, help="serve/examples/load_client.rs, built")
    parser.add_argument("--guidellm", required=True, help="guidellm 0.8")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8], help="requests at once")
    parser.add_argument("--each", type=int, default=12, help="requests of a client")
    parser.add_argument("--repeats", type=int, default=3, help="turns of both")
    args = parser.parse_args()
    tools = {"guidellm": (by_guidellm, args.guidellm), "load_client": (by_client, args.client)}
    serve = [args.nq, "serve", args.model, "--device", "cpu", "--port", "0", "--no-prefix-cache", "--parallel",
             str(max(args.clients)), "--json"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = json.loads(server.stdout.readline())["url"]
        by_client(args.client, args.model, url, 1, 1)
        print(f"# {machine('cpu')}; nq serve {args.model.name}; {output([args.nq, '--version']).strip()}, "
              f"{output([args.guidellm, '--version']).strip()}; {PROMPT} tokens in, {ANSWER} out")
        print("tool,turn,clients,requests," + ",".join(FIGURES), flush=True)
        rows = []
        for turn in range(args.repeats):
            for clients in args.clients:
                for name in list(tools) if turn % 2 == 0 else list(tools)[::-1]:
                    ask, program = tools[name]
                    figures = ask(program, args.model, url, clients, args.each * clients)
                    rows.append((name, clients, figures))
                    told = [f"{f:.2f}" for f in figures]
                    print(f"{name},{turn + 1},{clients},{args.each * clients}," + ",".join(told), flush=True)
        for clients in args.clients:
            of = {name: zip(*(f for n, c, f in rows if (n, c) == (name, clients))) for name in tools}
            guide, own = ([statistics.median(column) for column in of[name]] for name in tools)
            ratios = [f"{b / a:.3f}" for a, b in zip(guide, own)]
            print(f"load_client / guidellm,medians,{clients},," + ",".join(ratios))
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    sys.exit(main())
