#!/usr/bin/env python3
"""An agent's conversation with a server of the chat protocol: how much of its prompts is computed.

    benches/agent_load.py http://127.0.0.1:8080 [--scale 0.25] [--conversations 1] > record.csv

A system prompt with the descriptions of tools (8,000 tokens), then 20 turns: a call of a tool and its result (500 to
3,000 tokens). Three times the result before the last is edited, as users and agents do, and everything behind it is
gone. Every request has the whole conversation so far. A row a request: tokens of the prompt, those of them that the
server had, seconds to the first token and to the end of the answer; the last row has the sums. The lengths are those of
a tokenizer that makes a token of each character, as that of `nq synth` does; --scale shortens all of them. Works with any
server that counts cached tokens in `usage`, llama-server (`timings`) too.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
import urllib.request

SYSTEM, RESULTS, TURNS = 8000, (500, 3000), 20
EDITS = (6, 11, 16)


def words(rng, length):
    """Text of `length` characters."""
    out, all = [], 0
    while all < length:
        out.append("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(2, 9))))
        all += len(out[-1]) + 1
    return " ".join(out)[:length]


def ask(url, model, messages, answer):
    """Tokens of the prompt, cached ones, seconds to the first token and to the end."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": answer,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": True,
    }
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
    begun, first, prompt, cached = time.monotonic(), None, 0, 0
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            # The first event names the role alone.
            choice = (event.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            if first is None and (delta.get("content") or delta.get("reasoning_content") or choice.get("finish_reason")):
                first = time.monotonic() - begun
            if usage := event.get("usage"):
                prompt = usage["prompt_tokens"]
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
            if timings := event.get("timings"):
                cached = timings.get("cache_n", cached)
    end = time.monotonic() - begun
    return prompt, cached, first if first is not None else end, end


def converse(url, model, scale, answer, seed, system, rows):
    rng = random.Random(seed)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": words(rng, int(200 * scale))}]
    for turn in range(TURNS):
        rows.append((seed, turn, *ask(url, model, messages, answer)))
        if turn in EDITS:
            # An earlier result is another now, and what came after it is gone.
            del messages[-2:]
            messages[-1] = {"role": "user", "content": words(rng, int(rng.randrange(*RESULTS) * scale))}
        messages.append({"role": "assistant", "content": words(rng, int(120 * scale))})
        messages.append({"role": "user", "content": words(rng, int(rng.randrange(*RESULTS) * scale))})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--conversations", type=int, default=1, help="at once, with one system prompt")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    args = parser.parse_args()
    system = words(random.Random(0), int(SYSTEM * args.scale))
    rows, begun = [], time.monotonic()
    threads = [
        threading.Thread(target=converse, args=(args.url, args.model, args.scale, args.answer, seed, system, rows))
        for seed in range(1, args.conversations + 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.monotonic() - begun
    if len(rows) != TURNS * args.conversations:
        sys.exit(f"{len(rows)} answers of {TURNS * args.conversations}")
    print("conversation,turn,prompt_tokens,cached_tokens,first_token_s,total_s")
    for row in rows:
        print("{},{},{},{},{:.3f},{:.3f}".format(*row))
    prompt, cached = sum(r[2] for r in rows), sum(r[3] for r in rows)
    first = statistics.median(r[4] for r in rows)
    print(f"all,{len(rows)},{prompt},{cached},{first:.3f},{wall:.3f}")
    print(f"{cached / prompt:.1%} of {prompt} prompt tokens were cached; {wall:.1f} s", file=sys.stderr)


main()
