#!/usr/bin/env python3
"""Speed of `nq bench` on a GPU: measures it into a record, and makes the README's table of one.

    benches/gpu_speed.py measure target/release/nq benches/records/DATE-gpu-decode.csv [PRESET ...]
    benches/gpu_speed.py table benches/records/DATE-gpu-decode.csv

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
COLUMNS = [
    "preset", "bits", "test", "depth", "batch", "kernels", "tok_s", "tok_s_std", "gb_s",
    "bandwidth_share", "ms_per_token_p50", "ms_per_token_p99", "repeats", "machine_gb_s",
    "bytes_per_token", "streaming_overhead", "measurement_error",
]  # fmt: skip


def driver():
    """Name and driver of the GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def measure(nq, path, presets):
    """Appends the rows of every preset and width to `path`."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(f"# {datetime.date.today()}, one {driver()}; random weights; medians of 5\n")
        file.write("# nq bench --preset qwen3-PRESET --bits BITS --device cuda -p 512 -n 128\n")
        out = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        for preset in presets:
            for bits in BITS:
                command = [nq, "bench", "--preset", f"qwen3-{preset}", "--bits", str(bits),
                           "--device", "cuda", "-p", "512", "-n", "128", "--json"]  # fmt: skip
                if (preset, bits) not in CHAT:
                    command.append("--no-chat")
                run = subprocess.run(command, capture_output=True, text=True, check=False)
                if not run.stdout:
                    sys.exit(f"{' '.join(command)}: {run.stderr}")
                for row in json.loads(run.stdout):
                    row = {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}
                    out.writerow({"preset": preset, **row, "bits": bits})
                file.flush()


def table(path):
    """Prints tokens per second, and the share of the measured bandwidth, as Markdown."""
    with open(path, encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    cells = {(r["preset"], int(r["bits"]), r["test"]): r for r in rows}
    print("| Qwen3 | INT4 tok/s | INT8 tok/s | FP16 tok/s | prefill of 512, INT4 / INT8 / FP16 |")
    print("|---|---:|---:|---:|---:|")
    for preset in PRESETS:
        if (preset, 4, "tg128") not in cells:
            continue
        decode = [cells[preset, b, "tg128"] for b in BITS]
        prefill = [cells.get((preset, b, "pp512")) for b in BITS]
        shown = [f"{float(r['tok_s']):,.0f} ({100 * float(r['bandwidth_share']):.0f} %)" for r in decode]
        fed = " / ".join(f"{float(r['tok_s']):,.0f}" if r else "-" for r in prefill)
        print(f"| {preset.upper()} | {' | '.join(shown)} | {fed} |")


if __name__ == "__main__":
    if len(sys.argv) >= 4 and sys.argv[1] == "measure":
        measure(sys.argv[2], sys.argv[3], sys.argv[4:] or PRESETS)
    elif len(sys.argv) == 3 and sys.argv[1] == "table":
        table(sys.argv[2])
    else:
        sys.exit(__doc__)
