"""Rows of benches/records, and how figures are written."""

import csv
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benches/records"
# The records that were read.
USED = set()


def record(file):
    """The text of a record, or of a table of docs."""
    USED.add(file)
    return (ROOT / file if file.startswith("docs/") else RECORDS / file).read_text()


def rows(file, /, **wanted):
    """Rows of a record, or of a table of docs, whose columns have these values."""
    lines = [l for l in record(file).splitlines() if not l.startswith("#")]
    found = [r for r in csv.DictReader(lines) if all(r[k] == v for k, v in wanted.items())]
    if not found:
        raise SystemExit(f"{file}: no row with {wanted}")
    return found


def row(file, **wanted):
    """The one row of a record whose columns have these values."""
    found = rows(file, **wanted)
    if len(found) != 1:
        raise SystemExit(f"{file}: {len(found)} rows with {wanted}, expected one")
    return found[0]


def sent_lines():
    """A line for each figure of the records that were sent, which are checked."""
    lines = []
    for path in sorted((RECORDS / "sent").glob("*.json")):
        sent = json.loads(record(f"sent/{path.name}"))
        machine, models = sent["machine"], sent["models"]
        on = ", ".join(machine["gpus"]) or machine["cpu"] or "unknown"
        faults = [f"form {sent['form']}"] if sent["form"] != 1 else []
        hashes = [file["sha256"] for model in models for file in model["files"]]
        faults += [f"hash {h}" for h in hashes if not re.fullmatch("[0-9a-f]{64}", h)]
        faults += [f"path {path}" for path in re.findall(r'"(?:/|[A-Z]:\\\\)[^"]*"', json.dumps(sent))]
        quality = sent.get("quality", [])
        faults += ["figures without models"] if quality and len(models) != len(quality) + 1 else []
        if faults:
            raise SystemExit(f"benches/records/sent/{path.name}: {', '.join(faults)}")
        errors = [f["text"]["kld_se"] for f in sent.get("more", {}).get("files", [])]
        figures = [(model, f"KLD {found['kld']['mean']:.4f}" + (f" ± {errors[i]:.4f}" if errors else ""))
                   for i, (model, found) in enumerate(zip(models[1:], quality))]
        for r in sent.get("speed", []):
            spread = f" ± {r['tok_s_std']:.1f}" if r.get("tok_s_std") else ""
            figures.append((models[0], f"{r['test']} {r['tok_s']:.1f}{spread} tok/s"))
        for model, figure in figures:
            size = f"{model['tensor_bytes'] / 1e6:,.2f} MB"
            lines.append([model["name"], model["codes"], size, figure, sent["protocol"].split(",")[0], on, sent["nq"]])
    return lines


def whole(value):
    return f"{round(float(value)):,}"


def percent(share, digits=1):
    return f"{100 * float(share):.{digits}f} %"


def table(header, lines, right=True):
    """A table, its first column to the left and the others to the right or left."""
    rule = "|---|" + ("---:|" if right else "---|") * (len(header) - 1)
    return ["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(l) + " |" for l in lines)]
