#!/usr/bin/env python3
"""Runs kernels whose blocks wait for each other, and those of towers and of trellis codes, on the host: no GPU is needed.

    kernels/cuda/tests/host/run.py [FOLDER]      FOLDER: where sources and program are made

Headers and kernels are those of kernels/cuda, compiled by a C++ compiler, except for `common.cuh` and `exchange.cuh`,
which have stand-ins here: all PTX is in them. It needs the headers of the CUDA toolkit: of NQ_NVCC_VENV (a virtual
environment with pip's packages), CUDA_HOME, or /usr/local/cuda.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[1]
HEADERS = ["places.cuh", "weights.cuh", "dequant.cuh", "rows.cuh", "delta_state.cuh", "products.cuh", "choose.cuh"]
HEADERS += ["activations.cuh", "trellis.cuh", "trellis_inputs.cu", "trellis_rows.cuh", "trellis_rows.cu", "trellis_expand.cu", "trellis_search.cuh", "tower.cuh", "tower.cu"]
HEADERS += ["spans.cuh", "hyper.cu", "indexer.cu"]
HEADERS += ["exl3.cuh", "exl3_rows.cuh", "exl3_rows.cu", "exl3_expand.cu", "gather.cu"]
HEADERS += ["layers_cluster.cuh", "layers.cuh", "layers_attention.cuh", "layers_halves.cuh", "layers_delta.cuh", "layers_experts.cuh", "layers_trellis.cuh"]
HEADERS += ["layers_block.cuh", "layers_inputs.cuh", "layers_products.cuh", "layers_requests.cuh", "layers_strips.cuh", "step_layers.cuh"]
STAND_INS = ["common.cuh", "exchange.cuh"]
# Blocks in clusters, and blocks alone (`layers_cluster.cuh`).
DEVICES = {"9.0": ["-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL=1"], "8.0": ["-D__CUDA_ARCH__=800"]}
# What is the same for both is tested once.
SOURCES = {"9.0": ["operands", "gather", "streams", "tower", "trellis", "exl3", "trellis_search", "step_layers", "step_layers_ranks"], "8.0": ["step_layers", "step_layers_ranks"]}


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
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[3] / "target/host-kernels")
    folder.mkdir(parents=True, exist_ok=True)
    for source in [*(CUDA / h for h in HEADERS), *(HERE / s for s in STAND_INS)]:
        shutil.copy(source, folder)
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O2", "-w", "-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-D__NV_NO_HOST_COMPILER_CHECK", f"-I{folder}", f"-I{include()}"]

    def test(name):
        """What the test says, and whether it passes. Each compiler takes minutes of one core."""
        source, device = name
        program = folder / f"{source}_{device}"
        build = [compiler, *flags, *DEVICES[device], HERE / f"{source}.cpp", "-o", program]
        for command in build, [program]:
            done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode:
                return done.stdout, False
        return done.stdout, True

    names = [(source, device) for device in DEVICES for source in SOURCES[device]]
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, (said, passes) in zip(names, pool.map(test, names)):
            print(said, end="", flush=True)
            if not passes:
                failed.append(" for ".join(name))
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
