#!/usr/bin/env python3
"""Runs the tests for GPUs on one of compute capability 9.0, once for each GPU that it imitates, and prints a table.

    kernels/cuda/tests/imitate.py [--gpus LIST] [--kernels FOLDER] [--binaries FOLDER] [TEST ...]
    kernels/cuda/tests/imitate.py --collect FOLDER

TEST: parts of the names of tests, all of them by default. Without --binaries, cargo builds the tests. --collect puts
them stripped into a folder, as --binaries takes them: so they can be run where there is no cargo, in a copy of the
repository at the same path. Kernels that are not in --kernels or are of other sources are compiled there, by nvcc
(NVCC names it). `native` in the list stands for the GPU as it is.
"""

import argparse
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "kernels/prebuilt/build"
PACKAGES = {"nq-cuda": "kernels/cuda", "nq-load": "runtime/load", "nq-quantize": "quantize", "nq-llm": "."}
# Programs of tests for GPUs, and in each the part of a name that all these tests have.
TESTS = {"integration": "cuda::", "cuda_alone": ""}
# Tests whose ranks share the GPU: the kernels of other tests would keep them waiting for each other too long.
RANKS = "cuda::ranks"
NATIVE = "native"


def compiled():
    """Builds the tests with cargo; returns the program of each by its name, PACKAGE-TEST."""
    command = ["cargo", "test", "--no-run", "--locked", "--features", "imitate", "--message-format", "json"]
    command += [word for package in PACKAGES for word in ("-p", package)]
    command += [word for test in TESTS for word in ("--test", test)]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    built = [made for made in map(json.loads, lines) if made.get("executable") and made["target"]["kind"] == ["test"]]
    packages = {folder: name for name, folder in PACKAGES.items()}
    folders = [os.path.relpath(Path(made["manifest_path"]).parent, ROOT) for made in built]
    return {
        f"{packages[folder]}-{made['target']['name']}": Path(made["executable"])
        for folder, made in zip(folders, built)
    }


def demo():
    """Unpacks the demo model's weights, as builds do, for programs that were built elsewhere."""
    for packed in (ROOT / "assets/packed").glob("*.xz"):
        whole = ROOT / "assets/demo" / packed.stem
        if not whole.exists():
            whole.write_bytes(lzma.decompress(packed.read_bytes()))


def kernels(folder):
    """Compiles the kernels for imitation, unless `folder` has those of the sources here."""
    files = sorted(f for f in (ROOT / "kernels/cuda").iterdir() if f.suffix in (".cu", ".cuh"))
    here = [f"source {hashlib.sha256(f.read_bytes()).hexdigest()} {f.name}" for f in files]
    manifest = folder / "manifest"
    lines = manifest.read_text().splitlines() if manifest.exists() else []
    if [line for line in lines if line.startswith("source ")] != here:
        subprocess.run([BUILD, "--imitate", "--out", folder], check=True)


def run(name, program, gpu, folder, names):
    """Runs a program of tests; returns what the table says, and the names of tests that failed."""
    package = next(p for p in PACKAGES if name.startswith(p))
    names = names or [TESTS[name.removeprefix(f"{package}-")]]
    # Ranks of a model that share a GPU wait for each other's kernels, which must be loaded before, and no two of whose streams may
    # lie in one queue of the GPU.
    env = {**os.environ, "NQ_REQUIRE_CUDA": "1", "CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    env.pop("NQ_IMITATE", None)
    if gpu != NATIVE:
        env["NQ_IMITATE"] = f"{gpu}:{folder}"
    turns = [[*names, "--skip", RANKS], [RANKS, "--test-threads=1"]]
    passed, lost, failed = 0, 0, set()
    for words in turns if names == [TESTS["integration"]] else [names]:
        done = subprocess.run(
            [program, *words], cwd=ROOT / PACKAGES[package], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        failed |= set(re.findall(r"^test (\S+) \.\.\. FAILED$", done.stdout, re.M))
        total = re.search(r"^test result: .* (\d+) passed; (\d+) failed", done.stdout, re.M)
        if total is None:
            sys.stdout.write(done.stdout)
            return f"ended by {done.returncode}", ["(all)"]
        if done.returncode != 0:
            sys.stdout.write(done.stdout)
        passed, lost = passed + int(total[1]), lost + int(total[2])
    failed = sorted(failed)
    return f"{lost} of {passed + lost} fail" if lost else f"{passed} pass", failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="8.0,8.6,8.9,12.0")
    parser.add_argument("--kernels", type=Path, default=ROOT / "target/imitate")
    parser.add_argument("--binaries", type=Path)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    if options.collect:
        options.collect.mkdir(parents=True, exist_ok=True)
        for name, program in compiled().items():
            subprocess.run(["strip", "-o", options.collect / name, program], check=True)
        return 0
    folder = options.kernels.resolve()
    kernels(folder)
    demo()
    programs = compiled() if options.binaries is None else {p.name: p.resolve() for p in options.binaries.iterdir()}
    gpus = options.gpus.split(",")
    table, failures = {}, []
    for gpu in gpus:
        for name, program in sorted(programs.items()):
            said, failed = run(name, program, gpu, folder, options.tests)
            table[name, gpu] = said
            failures += [f"{gpu}: {name}: {test}" for test in failed]
            print(f"{gpu}: {name}: {said}", flush=True)
    print("\n| |", " | ".join(f"imitates {gpu}" if gpu != NATIVE else "as it is" for gpu in gpus), "|")
    print("|---" * (len(gpus) + 1) + "|")
    for name in sorted(programs):
        print("|", name, "|", " | ".join(table[name, gpu] for gpu in gpus), "|")
    print(*["", *failures], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
