#!/usr/bin/env python3
"""README's recording of nq, an animated SVG, made by running the commands it shows.

    docs/recording.py PROGRAM            fails if docs/recording.svg shows what the program does not say
    docs/recording.py PROGRAM --write    records anew; PROGRAM must be a release build on an idle machine

Each command runs in a pseudo-terminal; pyte (pip install pyte) turns what it writes into screens, and every line of
a screen becomes a text that is visible while it was there. Work is shown faster than it ran, which the picture says, and
waits in which nothing changes are shortened. The check runs the commands again and compares the last screen line by line:
words exactly, numbers within a few percent unless they are times. A CPU with other instructions rounds otherwise and
samples other text: of what is measured on that text only the mean divergence is compared, of the answer its beginning.
"""

import fcntl
import html
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/recording.svg"
COMMANDS = [
    "nq quantize demo --bits 4",
    'nq chat demo-int4 --seed 2 -p "Tell me about the film The Silent River (1931)."',
]
COLUMNS, ROWS = 100, 19
TYPING = 0.035  # seconds for a letter of a command
FASTER = 3      # the commands' time over that shown
PAUSE = 0.7     # the longest wait that is shown
FRAME = 0.2     # screens that change faster are left out
HOLD = 1.2      # seconds after a command's end
POSTER = 2.0    # seconds for which the last screen is shown first, as it is where nothing moves

CELL, LINE, FONT, MARGIN, BAR = 7.8, 16, 13, 14, 20
COLOURS = {"default": "#d6dde6", "green": "#7ee787", "cyan": "#76d9e6", "red": "#ff8f85", "brown": "#e3c46d",
           "blue": "#84b8ff", "magenta": "#d2a8ff", "black": "#8b949e", "white": "#f0f4f8"}


def run(command, folder, program):
    """Runs a command in a terminal of the recording's size; yields the seconds since its beginning and its output."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", command], environment(folder, program))
    began = time.monotonic()
    while True:
        select.select([terminal], [], [])
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the end of a terminal
            break
        if not piece:
            break
        yield time.monotonic() - began, piece
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{command}: failed")


def environment(folder, program):
    """Nothing of the user's, and the program by its name."""
    (Path(folder) / "bin").mkdir(exist_ok=True)
    link = Path(folder) / "bin/nq"
    if not link.exists():
        link.symlink_to(program)
    return {"PATH": f"{link.parent}:{os.environ['PATH']}", "HOME": folder, "NQ_HOME": folder, "HF_HUB_OFFLINE": "1",
            "TERM": "xterm-256color", "LANG": "C.UTF-8"}


def record(program):
    """Screens and the seconds at which each appears: a screen is a list of lines, a line a list of runs of cells (first
    column, colour, bold, text)."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames, clock = [], 0.0

    def look():
        shown = [runs(screen.buffer[y]) for y in range(ROWS)]
        if not frames or frames[-1][1] != shown:
            if frames and clock - frames[-1][0] < FRAME and len(frames) > 1:
                frames[-1] = (frames[-1][0], shown)
            else:
                frames.append((clock, shown))

    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            stream.feed(b"\x1b[32m$\x1b[0m ")
            look()
            clock += PAUSE
            for letter in command:
                stream.feed(letter.encode())
                clock += TYPING
                look()
            clock += PAUSE
            stream.feed(b"\r\n")
            before = 0.0
            for at, piece in run(command, folder, program):
                clock += min((at - before) / FASTER, PAUSE)
                before = at
                stream.feed(piece)
                look()
            clock += FRAME
            look()
            clock += HOLD
            if screen.cursor.x:
                stream.feed(b"\r\n")
            stream.feed(b"\r\n")
    # The last prompt's line is empty.
    return frames, clock


def runs(line):
    """The runs of equal cells of a line, without what is blank at its end."""
    found = []
    for x in range(COLUMNS):
        cell = line[x]
        colour = "black" if cell.fg in ("brightblack",) else cell.fg
        kind = (COLOURS.get(colour, COLOURS["default"]), cell.bold)
        if found and tuple(found[-1][1:3]) == kind:
            found[-1][3] += cell.data
        else:
            found.append([x, *kind, cell.data])
    while found and not found[-1][3].strip():
        found.pop()
    if found:
        found[-1][3] = found[-1][3].rstrip()
    return [tuple(run) for run in found]


def text(line):
    """A line's letters."""
    shown = ""
    for x, _, _, letters in line:
        shown = shown.ljust(x) + letters
    return shown


def draw(frames, end):
    """The SVG of screens: each line is there while its screen's are, those of the last screen from then on."""
    width, height = int(2 * MARGIN + COLUMNS * CELL), BAR + 2 * MARGIN + ROWS * LINE
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,\'DejaVu Sans Mono\',\'Liberation Mono\',monospace" '
        f'font-size="{FONT}">',
        "<title>nq quantizes its demo model and answers a question with the result</title>",
        # Lines of the last screen are visible without animations too.
        "<style>text{white-space:pre}@keyframes f{from,to{visibility:hidden}}@keyframes t{from,to{visibility:visible}}"
        ".f{animation:f}.t{visibility:hidden;animation:t}@media(prefers-reduced-motion){.f,.t{animation:none}}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#12161c" stroke="#3a424d"/>',
        f'<text x="{width - MARGIN}" y="{BAR / 2 + 7:g}" text-anchor="end" font-size="11" fill="#8b949e">shown {FASTER} times as fast</text>',
        *(f'<circle cx="{MARGIN + 6 + 18 * i}" cy="{BAR / 2 + 3}" r="5" fill="#3a424d"/>' for i in range(3)),
    ]
    shown = {}  # by row: the line and when it came
    for at, lines in [*frames, (end, None)]:
        for y in range(ROWS):
            line, since = shown.get(y, ([], 0.0))
            now = None if lines is None else lines[y]
            if now == line:
                continue
            if line:
                last = now is None
                # Lines of the last screen are visible first, then hidden until they come; the others are visible for a while.
                lasts, delay = (since, POSTER) if last else (at - since, POSTER + since)
                time = f"animation-duration:{lasts:.2f}s;animation-delay:{delay:.2f}s"
                for x, colour, bold, letters in line:
                    out.append(
                        f'<text class="{"f" if last else "t"}" style="{time}" x="{MARGIN + x * CELL:g}" '
                        f'y="{BAR + MARGIN + 12 + y * LINE}" fill="{colour}"{" font-weight=" + chr(34) + "bold" + chr(34) if bold else ""} '
                        f'textLength="{len(letters) * CELL:g}">{html.escape(letters, quote=False)}</text>'
                    )
            shown[y] = (now, at)
    return "\n".join([*out, "</svg>", ""])


def last_screen(picture):
    """The lines of a recording's last screen, without those that are empty."""
    found = {}
    for x, y, letters in re.findall(r'<text class="f"[^>]* x="([\d.]+)" y="(\d+)"[^>]*>([^<]*)</text>', picture):
        column = round((float(x) - MARGIN) / CELL)
        found[int(y)] = found.get(int(y), "").ljust(column) + html.unescape(letters)
    return [found[y] for y in sorted(found)]


def unwrapped(lines):
    """Lines of a screen, with those that were too long for it in one piece."""
    whole, full = [], False
    for line in lines:
        whole[-1:] = [whole[-1] + line] if full else [*whole[-1:], line]
        full = len(line) >= COLUMNS - 1  # a blank in the last column is not among a line's letters
    return whole


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
# Lines about times and memory, which no two runs have alike.
TIMES = re.compile(r"(nq: (memory|time)|took|mostly)\b")
# A line about sampled text: how many of its numbers two texts have alike (not those of single tokens), and within what
# share.
SAMPLED = {"KL divergence": (1, 0.3), "same best token": (1, 0.1), "perplexity": (0, 0), "noise floor": (0, 0)}
# What is above it may have scrolled away.
FIRST, CHAT = "size ", "$ nq chat"


def same(old, new):
    """True if two lines say the same, apart from times and from what other instruction sets round otherwise."""
    if TIMES.match(old) and TIMES.match(new):
        return True
    alike, share = next((v for label, v in SAMPLED.items() if old.startswith(label)), (None, 0.1))
    figures = list(zip(map(float, NUMBER.findall(old)), map(float, NUMBER.findall(new))))[:alike]
    return NUMBER.sub("#", old) == NUMBER.sub("#", new) and all(abs(a - b) <= share * max(a, b) for a, b in figures)


def compare(old, new):
    """The first difference between two last screens in words, or None."""
    parts = []
    for lines in map(unwrapped, (old, new)):
        size = next((i for i, line in enumerate(lines) if line.startswith(FIRST)), None)
        chat = next((i for i, line in enumerate(lines) if line.startswith(CHAT)), None)
        if size is None or chat is None or chat + 1 == len(lines):
            return f"expected lines that begin with {FIRST!r} and {CHAT!r}, and an answer"
        parts.append((lines[size:chat + 1], lines[chat + 1].split()[:5]))
    (said, answer), (says, answers) = parts
    if len(said) != len(says):
        return f"{len(said)} lines before the answer, now {len(says)}"
    differ = next(((a, b) for a, b in zip(said, says) if not same(a, b)), None)
    if differ or answer != answers:
        return "\n  now ".join(differ or map(" ".join, (answer, answers)))
    return None


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    program, write = Path(sys.argv[1]).resolve(), "--write" in sys.argv[2:]
    frames, end = record(program)
    if write:
        PICTURE.write_text(draw(frames, end))
        print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes, {len(frames)} screens, {end:.1f} s")
        return
    new = [line for line in map(text, frames[-1][1]) if line]
    if differ := compare(last_screen(PICTURE.read_text()), new):
        raise SystemExit(f"{PICTURE.relative_to(ROOT)} shows what {program} does not say: --write records anew\n      {differ}")


if __name__ == "__main__":
    main()
