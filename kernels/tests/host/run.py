#!/usr/bin/env python3
"""Runs kernels whose blocks wait for each other on the host: no GPU is needed.

    kernels/tests/host/run.py [FOLDER]      FOLDER: where sources and program are made

The sources are those of kernels/cuda, compiled by a C++ compiler. `device.h` stands for `common.cuh`, and
HOST below for the functions that consist of PTX. It needs the headers of the CUDA toolkit: of
NQ_NVCC_VENV (a virtual environment with pip's packages), CUDA_HOME, or /usr/local/cuda.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[1] / "cuda"
HEADERS = ["weights.cuh", "rows.cuh", "products.cuh", "step_layers.cuh"]

# Bodies of functions of step_layers.cuh, by the start of their definition.
HOST = {
    "DEVICE uint32_t cluster_rank()": "return blockIdx.x % BLOCKS_OF_CLUSTER;",
    "DEVICE uint32_t map_rank(uint32_t at, int rank)": "return uint32_t(rank + 1) << 24 | at;",
    "DEVICE void send_4(": "memcpy(at_shared(to, 4), &v, 4); bytes_came(barrier, 4);",
    "DEVICE void send_16(": "memcpy(at_shared(to, 16), &v, 16); bytes_came(barrier, 16);",
    "DEVICE void wait_sent(": "wait_for(barrier, parity);",
    "DEVICE void init_barrier(": "Barrier& b = barrier_at(barrier); b.arrivals = b.missing = arrivals;",
    "DEVICE void arrive(": "arrive_at(barrier_at(barrier));",
    "DEVICE uint4 load_stamped(": "yield(); return make_uint4(uint32_t(p[0]), uint32_t(p[0] >> 32), uint32_t(p[1]), uint32_t(p[1] >> 32));",
    "DEVICE void store_stamped(": "*to = stamped(v, stamp);",
    "static DEVICE void sync()": "meet_block(1, WARPS * 32);",
    "static DEVICE void sync_attending()": "meet_block(2, ATTEND_WARPS * 32);",
    "static DEVICE void wait(": "wait_for(barrier, parity);",
    "static DEVICE void expect(": "Barrier& b = barrier_at(barrier); b.bytes += bytes; arrive_at(b);",
    "static DEVICE void copy_stage(": "memcpy(at_shared(to, 16), from, bytes); bytes_came(barrier, bytes);",
    "static DEVICE bool elect()": "__syncwarp(); return threadIdx.x % 32 == 0;",
}
# Other PTX, by regular expressions.
STATEMENTS = {
    r'asm volatile\("mov\.u64 %0, %%globaltimer;" : "=l"\((\w+)\)\);': r"\1 = 0;",
    r'asm volatile\("st\.shared\.f32 \[%0\], %1;" ::"r"\((.*?)\), "f"\((\w+)\) : "memory"\);': r"memcpy(at_shared(\1, 4), &\2, 4);",
    r'asm volatile\("barrier\.cluster\.arrive\.release\.aligned;" ::: "memory"\);': "meet_cluster();",
    r'asm volatile\("barrier\.cluster\.wait\.acquire\.aligned;" ::: "memory"\);': "",
    r"extern __shared__ __align__\(128\) uint4 dynamic_shared\[\];": "",
    r"reinterpret_cast<uint8_t\*>\(dynamic_shared\)": "own_shared()",
    r"#if __CUDA_ARCH__ >= 900": "#if 1",
}


def with_body(source, start, body):
    """`source` with another body of the function whose definition starts so."""
    if source.count(start) != 1:
        sys.exit(f"run.py: step_layers.cuh has {source.count(start)} functions {start}")
    at = source.index("{", source.index(start))
    end, depth = at, 0
    while True:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
        if depth == 0:
            return source[:at] + "{ " + body + " }" + source[end:]


def on_host(source):
    # Braces in the text of PTX would be counted.
    source = re.sub(r'"\{\\n"|"\}\\n"|\{%\d[^}]*\}', lambda m: m[0].replace("{", "").replace("}", ""), source)
    for start, body in HOST.items():
        source = with_body(source, start, body)
    for pattern, text in STATEMENTS.items():
        source, count = re.subn(pattern, text, source)
        if count == 0:
            sys.exit(f"run.py: step_layers.cuh has no {pattern}")
    if "asm" in re.sub(r"//.*", "", source):
        sys.exit("run.py: step_layers.cuh has PTX that has no counterpart here")
    return source


def include():
    """The folder of the toolkit's headers."""
    venv = os.environ.get("NQ_NVCC_VENV")
    folders = sorted(Path(venv).glob("lib/python3*/site-packages/nvidia/cu13/include")) if venv else []
    folders += [Path(f) / "include" for f in [os.environ.get("CUDA_HOME", "/usr/local/cuda")]]
    for folder in folders:
        if (folder / "cuda_fp16.h").exists():
            return folder
    sys.exit(__doc__)


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[2] / "target/host-kernels")
    folder.mkdir(parents=True, exist_ok=True)
    for name in HEADERS:
        text = (CUDA / name).read_text()
        (folder / name).write_text(on_host(text) if name == "step_layers.cuh" else text)
    (folder / "common.cuh").write_text(f'#include <array>\n#include "{HERE / "device.h"}"\n')
    program = folder / "step_layers"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O2", "-w", "-D__NV_NO_HOST_COMPILER_CHECK", "-D__CUDA_ARCH__=900", f"-I{folder}", f"-I{include()}"]
    subprocess.run([compiler, *flags, HERE / "step_layers.cpp", "-o", program], check=True)
    sys.exit(subprocess.run([program], check=False).returncode)


if __name__ == "__main__":
    main()
