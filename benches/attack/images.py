#!/usr/bin/env python3
"""Mutated images and requests with images, to a server whose memory is limited.

    python3 benches/attack/images.py target/release/nq [--requests 2000] [--memory 3000] [--seed 1]

Serves a small model that sees (`tests/clients/scripted.py`) with an address space of so many MB, so that an allocation
that nobody bounded ends it. Prints how requests were answered, and the server's resident memory before, at its peak and
afterwards. Exits with 1 if an answer is no answer or not named, if one is the server's error, if the server ends, if
memory afterwards is more than 1.2 times that before, without the rows of images that the server keeps on purpose, or if
a good request is answered otherwise afterwards, or not within 10 s after clients that sent large images and left.
"""

import argparse
import base64
import collections
import http.client
import json
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/clients"))
import scripted  # noqa: E402

FILES = [p.read_bytes() for p in sorted((ROOT / "pictures/tests/fixtures").iterdir()) if p.suffix in (".png", ".jpg", ".gif", ".webp", ".bmp")]
CLIENTS, TOKENS, LEAVING = 8, 16, 20


def png(width, height, data, depth=8, colour=0):
    chunk = lambda name, body: struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zeros(n):
    """As many zeros, compressed."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(n >> 20)) + packer.compress(bytes(n % (1 << 20))) + packer.flush()


def bombs():
    """Small files that say or hold much."""
    yield png(8191, 8191, zeros(8191 * 8192))
    yield png(8191, 8191, zeros(8191 * (8191 * 8 + 1)), depth=16, colour=6)
    yield png(8192, 8192, zeros(1000))
    yield png(65535, 65535, b"")
    yield png(2**31 - 1, 1, b"")
    yield png(1, 65535, zeros(2 * 65535))
    yield png(64, 64, zeros(50_000_000))
    yield b"BM" + struct.pack("<IIIIIIHHIIIIII", 54, 0, 54, 40, 65535, 65535, 1, 24, 0, 0, 0, 0, 0, 0)
    yield b"BM" + struct.pack("<IIIIIIHHIIIIII", 54, 0, 54, 40, 8000, 8000, 1, 8, 1, 0, 0, 0, 0, 0)
    yield b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0xF7, 0, 0) + bytes(768) + b"\x2c" + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
    yield b"GIF89a" + struct.pack("<HHBBB", 8000, 8000, 0, 0, 0) + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00\x3b"
    yield b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f\xff\xff\xff\x0f" + bytes(16)
    yield b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x44\x00\x02\x11\x01\x03\x11\x01\xff\xd9"
    yield b"\xff\xd8" + b"\xff\xe1\xff\xff" * 200_000


def mutated(draw):
    """An image with a few things changed."""
    data = bytearray(draw.choice(FILES))
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(min(len(data), draw.choice([32, 200, 1 << 20])))
        match draw.randrange(6):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at : at + 4] = draw.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\x00\x00\xff\xff"])
            case 2:
                del data[at : at + draw.randrange(1, 64)]
            case 3:
                data[at:at] = draw.randbytes(draw.randrange(1, 64))
            case 4:
                del data[max(at, 1) :]
            case _:
                other = draw.choice(FILES)
                data[at:] = other[draw.randrange(len(other)) :]
        if not data:
            data = bytearray(b"\x89")
    return bytes(data)


def nonsense(draw):
    """What stands in the place of an image's address."""
    good = "data:image/png;base64," + base64.b64encode(FILES[0]).decode()
    return draw.choice([
        None, 7, [], {}, "", "data:", "data:image/png;base64,", "data:image/png;base64,%%%", "data:,x", good[:-3] + "\n\n=",
        "file:///etc/passwd", "http://127.0.0.1:1/x.png", "http://169.254.169.254/", "https://example.com/\\@a", "ftp://a/b",
        "data:image/svg+xml;base64,PHN2Zy8+", good.replace("data:image/png", "data:" + "x" * 100_000), {"url": {"url": good}},
        [good] * 3, good + "A", "data:image/png;base64," + "A" * 300_000,
    ])


def requests(n, seed):
    """(path, body), in an order of its own; the bombs come first and go to every protocol in turn."""
    draw = random.Random(seed)
    heavy = list(bombs())
    for i in range(n):
        kind = "bytes" if i < len(heavy) else draw.choice(["bytes", "bytes", "bytes", "nonsense", "many"])
        data = heavy[i] if i < len(heavy) else mutated(draw)
        encoded = base64.b64encode(data).decode()
        media = draw.choice(["image/png", "image/jpeg", "text/plain", "", "image/../../etc"])
        url = nonsense(draw) if kind == "nonsense" else f"data:{media};base64,{encoded}"
        count = draw.choice([3, 30, 101]) if kind == "many" else 1
        text = draw.choice(["What is it?", "<|image_pad|>" * 5, "<|vision_start|><|image_pad|><|vision_end|>", ""])
        source = {"type": "base64", "media_type": media, "data": encoded}
        if kind == "nonsense":
            source = draw.choice([{"type": "url", "url": url}, {"type": "base64", "data": url}, {"type": "file", "file_id": url}, url])
        role = draw.choice(["user", "user", "user", "system", "assistant", "tool"])
        open_ai = [{"type": "image_url", "image_url": {"url": url, "detail": draw.choice(["low", "high", "auto", 3])}}] * count
        answer = [{"type": "input_image", "image_url": url}] * count
        claude = [{"type": "image", "source": source}] * count
        result = [{"type": "tool_result", "tool_use_id": "t", "content": claude}]
        bare = [encoded if kind != "nonsense" else url] * count
        yield draw.choice([
            ("/v1/chat/completions", {"messages": [{"role": role, "content": [*open_ai, {"type": "text", "text": text}]}], "max_tokens": 2}),
            ("/v1/responses", {"input": [{"role": "user", "content": [*answer, {"type": "input_text", "text": text}]}], "max_output_tokens": 16}),
            ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": answer}], "max_output_tokens": 16}),
            ("/v1/messages", {"messages": [{"role": "user", "content": [*claude, {"type": "text", "text": text}]}], "max_tokens": 2}),
            ("/v1/messages", {"messages": [{"role": "user", "content": result}], "max_tokens": 2}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": claude}]}),
            ("/api/chat", {"messages": [{"role": role, "content": text, "images": bare}], "stream": False, "options": {"num_predict": 2}}),
            ("/api/generate", {"prompt": text, "images": bare, "stream": False, "options": {"num_predict": 2}}),
            ("/v1/completions", {"prompt": text, "max_tokens": 2}),
        ])


class Server:
    def __init__(self, program, megabytes):
        self.folder = tempfile.TemporaryDirectory()
        model = Path(self.folder.name) / "sees"
        scripted.build(model, scripted.COUNTING, sees=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        limit = megabytes * 1_000_000
        command = [program, "serve", str(model), "--device", "cpu", "--ctx", "2048", "--parallel", "4", "--threads", "2"]
        command += ["--image-tokens", str(TOKENS), "--kv-memory", "64MB", "--port", str(self.port)]
        text = json.loads((model / "config.json").read_text())["text_config"]
        self.image_megabytes = TOKENS * text["hidden_size"] * 4 / 1e6
        self.said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stderr=self.said, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        )
        for _ in range(600):
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert self.process.poll() is None, "the server does not start"
                time.sleep(0.1)

    def memory(self, what="VmRSS"):
        with open(f"/proc/{self.process.pid}/status") as status:
            line = next(line for line in status if line.startswith(what))
        return int(line.split()[1]) * 1024 / 1e6

    def ask(self, path, body):
        """The status and the parsed answer; a reason in place of both if there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, ValueError, http.client.HTTPException) as why:
            return 0, repr(why)
        finally:
            connection.close()

    def leave(self, bomb):
        """A client that sends an image and goes before it is answered."""
        url = "data:image/png;base64," + base64.b64encode(bomb).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        body = json.dumps({"messages": [{"role": "user", "content": parts}]})
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        time.sleep(0.2)
        connection.close()

    def good(self, data=FILES[0]):
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        status, answer = self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "temperature": 0})
        return answer["choices"][0]["message"]["content"] if status == 200 else (status, answer)


def reason(answer):
    """An error's words; None where there are none."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return error if isinstance(error, str) else (error or {}).get("message")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--memory", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    server = Server(args.program, args.memory)
    try:
        # Memory that a server takes for its first requests of each kind is no attacker's.
        for path, body in list(requests(600, args.seed + 1))[len(list(bombs())) :]:
            server.ask(path, body)
        expected, before = server.good(), server.memory()
        todo, lock = requests(args.requests, args.seed), threading.Lock()
        statuses, failed, refused = collections.Counter(), [], collections.Counter()

        def client():
            while True:
                with lock:
                    path, body = next(todo, (None, None))
                if path is None:
                    return
                status, answer = server.ask(path, body)
                # An answer that takes long begins before its error is known.
                words = reason(answer)
                statuses[400 if words and status == 200 else status] += 1
                if not 200 <= status < 500 or status != 200 and not words:
                    failed.append((path, json.dumps(body)[:300], status, str(answer)[:300]))
                elif words:
                    refused[words.split(": ")[-1][:60]] += 1

        begun = time.time()
        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        seconds, alive = time.time() - begun, server.process.poll() is None
        found = server.good() if alive else "the server ended"
        # Another bomb each time, since the rows of one are kept.
        bomb, waited = next(bombs()), 0
        for i in range(LEAVING * alive):
            server.leave(bomb + bytes([i]))
        if alive:
            begun = time.time()
            found = server.good(FILES[0] + b"another")
            waited = time.time() - begun
        time.sleep(2)
        peak, after = (server.memory("VmHWM"), server.memory()) if alive else (0, 0)
        print(f"{sum(statuses.values())} requests in {seconds:.0f} s, by status: {dict(sorted(statuses.items()))}")
        print(f"{len(refused)} different reasons; the commonest: " + "; ".join(f"{n} x {why}" for why, n in refused.most_common(12)))
        kept = statuses[200] * server.image_megabytes
        print(f"memory of {args.memory} MB: {before:.0f} MB before, {peak:.0f} at its peak, {after:.0f} afterwards, "
              f"up to {kept:.0f} of which are rows of images")
        print(f"an image after {LEAVING} clients had sent bombs and left: answered after {waited:.1f} s")
        for path, body, status, answer in failed[:20]:
            print(f"FAILED: {path} {body}: {status} {answer}")
        if not alive:
            server.said.seek(0)
            print(server.said.read()[-2000:].decode(errors="replace"))
        bad = failed or not alive or found != expected or after - kept > 1.2 * before or waited > 10
        print("failed" if bad else f"a good request afterwards: {found!r}, as before")
        return int(bool(bad))
    finally:
        server.process.kill()
        server.process.wait()
        server.folder.cleanup()


if __name__ == "__main__":
    sys.exit(main())
