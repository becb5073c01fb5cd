#!/usr/bin/env python3
"""Requests that are made to cost a server more than they are worth, beside a client that behaves.

    python3 benches/attack/attack.py target/release/nq [MODEL] [--seconds 20]

Starts `nq serve MODEL --ctx 1024 --parallel 8` and prints, for each kind of attack, the latency of the good
client's requests (another address, 16 tokens each) and the server's resident memory before, at its peak and 5 s
after. Exits with 1 if a good client's p99 is 1 s or more, if memory afterwards is more than 1.2 times that before,
or if an answer was missing or another than without an attack.
"""

import argparse
import http.client
import json
import multiprocessing
import socket
import subprocess
import sys
import threading
import time

HEAD = (
    "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    "Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
)
QUESTION = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 16, "temperature": 0}


def chat(*texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"messages": messages, "max_tokens": 4}).encode()


def attacks():
    """(name, path, body, clients at once, bytes of the body that are sent)"""
    ids = b"[" + b"1," * 3_900_000 + b"1]"
    spread = chat("<|im_end|>", *["x" * 1900] * 4094)
    quoted = chat("<|im_end|>" * 200_000)
    words = json.dumps({"prompt": "a " * 4_000_000}).encode()
    word = json.dumps({"prompt": "a" * 8_000_000}).encode()
    objects = b'{"messages":[' + b'{"a":0},' * 990_000 + b"0]}"
    lists = b'{"messages":[' + b"[]," * 2_700_000 + b"0]}"
    asked = "/v1/chat/completions"
    yield "one quoted control token in 4,095 messages", asked, spread, 16, None
    yield "200,000 quoted control tokens", asked, quoted, 8, None
    yield "a chat of 4 million words", asked, chat("a " * 4_000_000), 8, None
    yield "/tokenize of 4 million words", "/tokenize", words, 8, None
    yield "/tokenize of one word", "/tokenize", word, 8, None
    yield "990,000 objects", asked, objects, 8, None
    yield "2.7 million lists", asked, lists, 8, None
    yield "3.9 million token ids, n 16", "/v1/completions", b'{"prompt":' + ids + b',"n":16}', 8, None
    yield "uploads that stop", asked, b" " * 8_388_000, 300, 8_380_000
    yield "bodies that do not come", asked, b" " * 1000, 700, 1
    yield "connections that say nothing", asked, b"", 700, 0


class Server:
    def __init__(self, program, model):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [program, "serve", model, "--ctx", "1024", "--parallel", "8", "--queue", "16"]
        self.process = subprocess.Popen(command + ["--port", str(self.port)], stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server does not answer")

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            line = next(line for line in status if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def ask(self):
        """A good client's answer and its seconds."""
        start = time.time()
        source = ("127.0.0.2", 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120, source_address=source)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION), {"Content-Type": "application/json"})
            answer = json.load(connection.getresponse())
            text = answer["choices"][0]["message"]["content"]
        except (OSError, ValueError, KeyError, http.client.HTTPException) as why:
            text = repr(why)
        finally:
            connection.close()
        return text, time.time() - start


def attacker(port, path, body, sent, until):
    while time.time() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as stream:
                stream.settimeout(max(0.1, until - time.time()))
                request = HEAD.format(path=path, length=len(body)).encode() + body[:sent]
                stream.sendall(request if sent != 0 else b"")
                # Until the server answers or closes, or the client has no more patience.
                stream.recv(100)
        except OSError:
            time.sleep(0.05)


def attack(clients, *request):
    """As many clients at once, in a process of their own: they must not slow the good client's own program down."""
    threads = [threading.Thread(target=attacker, args=request) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    server = Server(args.program, args.model)
    failed = False
    try:
        # Memory that a server takes for its first requests is no attacker's.
        for _ in range(20):
            expected, _ = server.ask()
        print(f"{'attack':44} good answers     p50     p99  memory MB: before    peak   after")
        for name, path, body, clients, sent in attacks():
            before = peak = server.memory()
            until = time.time() + args.seconds
            request = (clients, server.port, path, body, sent, until)
            attackers = multiprocessing.Process(target=attack, args=request, daemon=True)
            attackers.start()
            times, wrong = [], 0
            while time.time() < until:
                text, seconds = server.ask()
                times.append(seconds)
                wrong += text != expected
                peak = max(peak, server.memory())
                time.sleep(0.1)
            attackers.join(10)
            attackers.kill()
            time.sleep(5)
            after = server.memory()
            p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
            bad = wrong > 0 or p99 >= 1 or after > 1.2 * before
            failed |= bad
            counts = f"{len(times) - wrong} of {len(times)}"
            print(
                f"{name:44} {counts:>12} {p50:6.2f}s {p99:6.2f}s {before:18.0f} {peak:7.0f} {after:7.0f}"
                + (" FAILED" if bad else ""),
                flush=True,
            )
    finally:
        server.process.terminate()
        server.process.wait(30)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
