#!/usr/bin/env python3
"""Speed of `nq bench` on a GPU, as a record; `docs/figures.py` makes tables of one.

    benches/gpu_speed.py target/release/nq benches/records/DATE-gpu-speed.csv [PRESET ...]

A record is a CSV whose first lines, after `#`, say where and how it was measured. Weights are
random: time does not depend on them, and no download is needed.
"""

import csv
import datetime
import json
import subprocess
import sys

PRESETS = ["0.6b", "1.7b", "4b", "8b", "14b", "32b"]
BITS = [4, 8, 16]
# Where the chat path is measured beside the bare loop.
CHAT = [("0.6b", 4), ("8b", 4)]
# Decoding of several sequences, far into a context, with a smaller cache, and by plain kernels.
MORE = {
    ("0.6b", 4): [["--batch", "4"], ["--batch", "8"], ["--batch", "16"], ["--kernels", "reference"]],
    ("8b", 4): [["--batch", "4"], ["--batch", "8"], ["--batch", "16"], ["--depth", "8192"],
                ["--depth", "8192", "--kv", "8"]],
}  # fmt: skip
COLUMNS = [
    "preset", "bits", "kv", "test", "depth", "batch", "kernels", "tok_s", "tok_s_std", "gb_s",
    "bandwidth_share", "ms_per_token_p50", "ms_per_token_p99", "repeats", "machine_gb_s",
    "bytes_per_token", "streaming_overhead", "measurement_error",
]  # fmt: skip


def driver():
    """Name and driver of the GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def measure(nq, path, presets):
    """Writes the rows of every preset and width to `path`."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(f"# {datetime.date.today()}, one {driver()}; random weights; medians of 5\n")
        file.write("# nq bench --preset qwen3-PRESET --bits BITS --simple --device cuda --depth 16 -p 512 -n 128\n")
        file.write("# (other depths, batches, caches and kernels, as columns say: -p 0 -n 128)\n")
        out = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        for preset in presets:
            for bits in BITS:
                base = [nq, "bench", "--preset", f"qwen3-{preset}", "--bits", str(bits), "--simple", "--device", "cuda", "--json"]
                chat = [] if (preset, bits) in CHAT else ["--no-chat"]
                runs = [["-p", "512", "-n", "128", "--depth", "16", *chat]]
                for flags in MORE.get((preset, bits), []):
                    depth = [] if "--depth" in flags else ["--depth", "16"]
                    runs.append(["-p", "0", "-n", "128", "--no-chat", *depth, *flags])
                for flags in runs:
                    run = subprocess.run(base + flags, capture_output=True, text=True, check=False)
                    if not run.stdout:
                        sys.exit(f"{' '.join(base + flags)}: {run.stderr}")
                    kv = flags[flags.index("--kv") + 1] if "--kv" in flags else "16"
                    for row in json.loads(run.stdout):
                        row = {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}
                        out.writerow({"preset": preset, "kv": kv, **row, "bits": bits})
                    file.flush()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    measure(sys.argv[1], sys.argv[2], sys.argv[3:] or PRESETS)
