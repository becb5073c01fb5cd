#!/usr/bin/env python3
"""Compares the time that `nq quantize` says it will take with the time that it takes.

    benches/estimates.py OUT [--nq target/release/nq] [--model demo] [--device cpu] [--threads N]
                         [--runs default awq-gptq target trellis resumed]

Each run is watched on a terminal. Writes OUT/estimates.csv, a line a run: seconds in all; those of the plan (`planned`) and
as its first line rounds them (`first_line`); and at a quarter, a half and three quarters of the run the time that had gone
by and was said to be left. `resumed` is a trellis run that is interrupted after a third of its time and goes on with
--resume: its line is that of the second part. OUT/stages.csv has the seconds of each stage, planned and taken. Needs an
idle machine; start it with taskset for a few cores.
"""

import argparse
import collections
import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = {
    "default": ["--bits", "4"],
    "awq-gptq": ["--bits", "4", "--method", "awq-gptq"],
    "target": ["--bits", "4", "--target-bpw", "5.3"],
    "trellis": ["--trellis"],
    "resumed": ["--trellis"],
}
UNIT = {"second": 1, "minute": 60, "hour": 3600}
SAID = re.compile(r"about (\d+) (second|minute|hour)s?( left)?")


def watched(command, stop_after=None):
    """Runs a command on a terminal: seconds, what it said as (second, seconds said, whether they are left), its report."""
    screen, terminal = pty.openpty()
    begin, said, report = time.monotonic(), [], tempfile.TemporaryFile()
    run = subprocess.Popen([*command, "--json"], stdin=subprocess.DEVNULL, stdout=report, stderr=terminal)
    os.close(terminal)
    stopped = False
    while True:
        try:
            text = os.read(screen, 65536).decode(errors="replace")
        except OSError:  # the program has closed the terminal
            break
        now = time.monotonic() - begin
        for amount, unit, left in SAID.findall(text):
            said.append((now, int(amount) * UNIT[unit], bool(left)))
        if stop_after and not stopped and now > stop_after:
            stopped = True
            run.send_signal(signal.SIGINT)
    os.close(screen)
    code = run.wait()
    if code and not stopped:
        sys.exit(f"{' '.join(command)}: exit status {code}")
    took = time.monotonic() - begin
    report.seek(0)
    return took, said, None if stopped else json.load(report)


def line(took, said):
    first = next(seconds for _, seconds, left in said if not left)
    at = []
    for share in (0.25, 0.5, 0.75):
        lefts = [(when, seconds) for when, seconds, left in said if left and when <= share * took]
        at.append(f"{lefts[-1][0] + lefts[-1][1]:.0f}" if lefts else "")
    return first, at


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nq", default="target/release/nq")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    common = ["--device", args.device] + (["--threads", args.threads] if args.threads else [])
    name = Path(args.model).name
    with (args.out / "estimates.csv").open("w") as lines, (args.out / "stages.csv").open("w") as stages:
        lines = csv.writer(lines, lineterminator="\n")
        stages = csv.writer(stages, lineterminator="\n")
        lines.writerow("model,run,took,planned,first_line,at_25,at_50,at_75".split(","))
        stages.writerow("model,run,stage,planned,took".split(","))
        took_by_trellis = None
        for run in args.runs:
            out = args.out / "file"
            command = [args.nq, "quantize", args.model, *RUNS[run], *common, "--force", "--out", str(out)]
            dry = json.loads(subprocess.run([*command, "--dry-run", "--json"], capture_output=True, check=True).stdout)
            planned = collections.Counter()
            for stage in dry["stages"]:
                planned[stage["name"]] += stage["seconds"]
            if run == "resumed":
                took = took_by_trellis or watched(command)[0]
                watched(command, stop_after=took / 3)
                command.append("--resume")
            took, said, report = watched(command)
            if run == "trellis":
                took_by_trellis = took
            first, at = line(took, said)
            whole = "" if run == "resumed" else f"{sum(planned.values()):.1f}"
            lines.writerow([name, run, f"{took:.1f}", whole, first, *at])
            taken = {stage["name"]: stage["seconds"] for stage in report["stages"]}
            for stage in dict.fromkeys([*planned, *taken]):
                seconds = [f"{x[stage]:.2f}" if stage in x else "" for x in (planned, taken)]
                stages.writerow([name, run, stage, *seconds])


if __name__ == "__main__":
    main()
