#!/usr/bin/env python3
"""Greedy answers of a server, whoever else asks and wherever the prompt comes from: each way must give the same text.

    benches/same_text.py target/release/nq MODEL... [--requests 1000] [--tokens 12] > record.csv

The reference is each prompt alone, one after the other, by a server without cache and drafts. Beside it: 32 clients at
once; prompts that the cache has, alone and for 32 clients; a server that reads them from disk after a restart; and
drafts, with the cache, alone and for 32 clients. Prompts are beginnings that many share, with different ends.
A row a way: how many answers differ, and the tokens that came from the cache or were drafted, without which a way shows
nothing. Exits with 1 if an answer differs.
"""

import argparse
import concurrent.futures
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request

CLIENTS = 32
CACHED = "nq_prefix_cache_hit_tokens_total"
DRAFTED = "nq_spec_decode_num_draft_tokens_total"


def prompts(count):
    """`count` conversations: one of 20 beginnings of up to 300 words, and an end of its own."""
    rng = random.Random(0)
    words = "river film year city house north old small king music book water green light team road".split()

    def some(least, most):
        return " ".join(rng.choices(words, k=rng.randint(least, most)))

    beginnings = [some(1, 300) for _ in range(20)]
    return [f"{rng.choice(beginnings)}. {some(1, 12)} {i}?" for i in range(count)]


class Server:
    def __init__(self, program, model, flags):
        command = [program, "serve", model, "--port", "0", "--json", "--device", "cpu", "--parallel", "16"]
        self.log = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(command + flags, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            sys.exit(f"{model} {flags}: {self.log.read()}")
        self.url = json.loads(line)["url"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def ask(self, prompt, tokens):
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            message = json.load(reply)["choices"][0]["message"]
        return (message.get("reasoning_content") or "", message.get("content") or "")

    def all(self, prompts, tokens, clients):
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens), prompts))

    def count(self, metric):
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(self.url + "/metrics") as reply:
            text = reply.read().decode()
        return round(sum(float(v) for v in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.M)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=12)
    args = parser.parse_args()
    asked, different = prompts(args.requests), 0
    print("model,way,requests,differ,cached_tokens,drafted_tokens,first")
    for model in args.models:
        plain = ["--no-prefix-cache", "--draft", "none"]
        with Server(args.program, model, plain) as server:
            expected = server.all(asked, args.tokens, 1)

        def compare(way, server, found):
            nonlocal different
            wrong = [i for i, (a, b) in enumerate(zip(expected, found)) if a != b]
            different += len(wrong)
            cached, drafted = server.count(CACHED), server.count(DRAFTED)
            print(f"{model},{way},{len(found)},{len(wrong)},{cached},{drafted},{wrong[0] if wrong else ''}", flush=True)

        with Server(args.program, model, plain) as server:
            compare("32 clients", server, server.all(asked, args.tokens, CLIENTS))
        with tempfile.TemporaryDirectory() as folder:
            kept = ["--draft", "none", "--cache-dir", folder]
            with Server(args.program, model, kept) as server:
                compare("cached", server, server.all(asked, args.tokens, 1))
                compare("cached for 32 clients", server, server.all(asked, args.tokens, CLIENTS))
            with Server(args.program, model, kept) as server:
                compare("after a restart", server, server.all(asked, args.tokens, 1))
        with Server(args.program, model, []) as server:
            compare("drafts", server, server.all(asked, args.tokens, 1))
            compare("drafts for 32 clients", server, server.all(asked, args.tokens, CLIENTS))
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
