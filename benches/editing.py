#!/usr/bin/env python3
"""Makes editing tasks for `nq bench --before BEFORE --text AFTER`: a source file, and the file after some
30 changes, of whose text about SHARE stands in lines that are copied.

    benches/editing.py runtime/src/kv.rs 0.6 /tmp/kv   # writes /tmp/kv-before.txt and /tmp/kv-after.txt

The first 400 lines of the file are the text. Changes are spread evenly; each puts as many new lines, of
words that are in no other, in the place of as many old ones. The same arguments give the same files.
"""

import random
import sys
from pathlib import Path

LINES = 400
CHANGES = 30


def new_line(like: str, rng: random.Random) -> str:
    """A line as long as `like`, with its indentation and signs, of new words."""
    out, word = [], False
    for c in like:
        if not c.isalpha():
            out.append(c)
        elif not word:
            out.append(rng.choice("bcdfghjklmnpqrstvwxz"))
        else:
            out.append(rng.choice("aeiouklmnrst"))
        word = c.isalpha()
    return "".join(out)


def main() -> None:
    path, share, out = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    rng = random.Random(f"{path.name} {share}")
    before = path.read_text().splitlines()[:LINES]
    after, new = list(before), 0
    total = sum(map(len, before))
    step = len(before) / CHANGES
    for change in range(CHANGES):
        first, end = int(change * step), int((change + 1) * step)
        # Characters to renew so far.
        due = (change + 1) / CHANGES * (1 - share) * total
        at = first + rng.randrange(max(1, int((end - first) * share)))
        while new < due and at < end:
            after[at] = new_line(before[at], rng)
            new += len(before[at])
            at += 1
    print(f"{out}: {1 - new / total:.2f} of the text in lines that are copied", file=sys.stderr)
    Path(f"{out}-before.txt").write_text("\n".join(before) + "\n")
    Path(f"{out}-after.txt").write_text("\n".join(after) + "\n")


if __name__ == "__main__":
    main()
