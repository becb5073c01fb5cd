"""Rows of benches/records, and how figures are written."""

import csv
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


def whole(value):
    return f"{round(float(value)):,}"


def percent(share, digits=1):
    return f"{100 * float(share):.{digits}f} %"


def table(header, lines, right=True):
    """A table, its first column to the left and the others to the right or left."""
    rule = "|---|" + ("---:|" if right else "---|") * (len(header) - 1)
    return ["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(l) + " |" for l in lines)]
