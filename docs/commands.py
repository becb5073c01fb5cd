#!/usr/bin/env python3
"""Runs the commands that README and docs show.

    docs/commands.py            all but the tests
    docs/commands.py --tests    README's command for the tests

README's block after `<!-- first -->` installs the program and uses it; it is run first, in the repository, with a
new folder as home and as the place of installed programs. The other blocks marked `sh` are run in order in that
folder, with that program. A block after `<!-- not run: REASON -->` (a download, a GPU, a build) is checked instead:
by bash for its syntax, and for flags that the program does not know. `nq serve` runs in the background
until its block ends.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<mark>not run: [^>]*|first|tests) -->\n)?```sh\n(?P<text>.*?)```", re.S)


def blocks(page):
    """Line, mark or None, and text of each block."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start("text")) + 1, found["mark"], found["text"]


def marked(mark):
    """Line and text of README's one block with a mark."""
    found = [(line, text) for line, of, text in blocks(PAGES[0]) if of == mark]
    if len(found) != 1:
        raise SystemExit(f"README.md: {len(found)} blocks after <!-- {mark} -->, expected one")
    return found[0]


def fail(page, line, why):
    raise SystemExit(f"{page.relative_to(ROOT)}:{line}: {why}")


def check(page, line, text, env):
    """Fails if bash or nq would not understand a block."""
    parsed = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    if parsed.returncode:
        fail(page, line, parsed.stderr)
    for command in re.split(r"[\n;|&]+", text.replace("\\\n", " ")):
        words = shlex.split(command, comments=True)
        if not words or words[0] != "nq":
            continue
        given = {w.split("=")[0] for w in words if w.startswith("--")}
        name = next((w for w in words[1:] if not w.startswith("-")), None)
        help = subprocess.run(["nq", name, "--help"], env=env, capture_output=True, text=True)
        if help.returncode:
            fail(page, line, f"nq has no command {name}")
        for flag in given:
            if not re.search(rf"{flag}\b", help.stdout):
                fail(page, line, f"nq {name} has no flag {flag}")


def wait_for_server(page, line, server):
    for _ in range(600):
        if server.poll() is not None:
            fail(page, line, f"nq serve ended with {server.returncode}")
        try:
            urllib.request.urlopen("http://127.0.0.1:8080/health", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    fail(page, line, "nq serve does not answer")


def run(page, line, text, env, folder):
    """Runs a block; servers end with it."""
    servers, rest = [], []
    for command in text.replace("\\\n", " ").splitlines():
        if command.startswith("nq serve"):
            servers.append(subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=env,
                                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
            wait_for_server(page, line, servers[-1])
        else:
            rest.append(command)
    began = time.monotonic()
    try:
        done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", "\n".join(rest)], cwd=folder, env=env,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800)
    finally:
        for server in servers:
            server.terminate()
            server.wait(60)
    if done.returncode:
        fail(page, line, f"exit code {done.returncode}\n{text}{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"ran      {page.relative_to(ROOT)}:{line} in {time.monotonic() - began:.0f} s", flush=True)


def main():
    if sys.argv[1:] == ["--tests"]:
        _, text = marked("tests")
        raise SystemExit(subprocess.run(["bash", "-e", "-c", text], cwd=ROOT).returncode)
    real_home = Path.home()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        env = {
            "CARGO_HOME": str(real_home / ".cargo"),
            "RUSTUP_HOME": str(real_home / ".rustup"),
            **os.environ,
            "CARGO_INSTALL_ROOT": str(folder),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "NQ_HOME": str(folder / "models"),
            "HF_HUB_OFFLINE": "1",
        }
        run(PAGES[0], *marked("first"), env, ROOT)
        for page in PAGES:
            for line, mark, text in blocks(page):
                if mark in ("first", "tests"):
                    continue
                if mark:
                    check(page, line, text, env)
                    print(f"checked  {page.relative_to(ROOT)}:{line} ({mark.removeprefix('not run: ')})", flush=True)
                else:
                    run(page, line, text, env, folder)
        for command in examples(env):
            # A file that is there from a page's command would be refused.
            fresh = Path(tempfile.mkdtemp(dir=folder))
            run(ROOT / "src/cli.rs", 0, command + "\n", env, fresh)


def examples(env):
    """Commands of the help that need nothing but the demo model, and its quantized copy which is there."""
    listed = subprocess.run(["nq", "--help"], env=env, capture_output=True, text=True).stdout
    names = re.findall(r"^  (\w+) ", listed.split("Commands:")[1].split("Options:")[0], re.M)
    for name in names:
        help = subprocess.run(["nq", name, "--help"], env=env, capture_output=True, text=True).stdout
        for line in help.partition("Examples:\n")[2].splitlines():
            words = shlex.split(line.strip())
            files = [w for w in words if re.search(r"\.(txt|npy|jsonl)$|^\./|/", w)]
            models = [w for w in words if w.startswith("demo")]
            if words[:1] == ["nq"] and models and not files and words[1] not in ("rm", "quantize") and len(words) > 3:
                yield line.strip()


if __name__ == "__main__":
    main()
