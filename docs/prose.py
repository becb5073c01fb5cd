"""Numbers in the sentences of README and docs, and how these are written.

A number in a sentence that was measured is followed by a comment with a name, `840<!--= decode_8b -->`; VALUES says which
record the name stands for. `docs/figures.py` fails where the number differs from the record, and `--write` corrects it.
README may hold no measurement without such a name.
"""

import math
import re

from records import ROOT, percent, record, row, rows, whole

LAYERS = "2026-11-24-gpu-layers.csv"
TRELLIS_SPEED = "2026-11-27-trellis-layers.csv"
MIXES = "2026-11-22-mixes.csv"
TRELLIS = "2026-11-26-trellis-files.csv"
LADDER = "2026-11-23-compare-quality.csv"
TWO = "2026-11-26-two-gpus.csv"
BUILD = "2026-11-23-build-time.csv"
HEADS = "2026-11-28-draft-heads.csv"
GGUF = "2026-11-30-gpu-gguf.csv"
FIT_GPU = "2026-11-29-fit-gpu.csv"
FIT_BENCH = "2026-11-30-fit-bench.csv"


def layers(model, weights, column="tok_s"):
    return float(row(LAYERS, preset=model, weights=weights, kv="16", depth="16")[column])


def less(ours, theirs):
    """How much less one is than another, as a whole number of percent."""
    return percent(1 - float(ours) / float(theirs), 0).removesuffix(" %")


def kld(how, column="books_kld"):
    return row(LADDER, how=how)[column]


def mb(r):
    return f"{int(r['tensor_bytes']) / 1e6:.2f}"


def built(what):
    """Seconds of a build; the record has several tables."""
    rest = record(BUILD).split(f'"{what}",')[1].split("\n")[0]
    return rest.split(",")[2]


def mtp(model, drafted="3"):
    return row(HEADS, card="h100", model=model, draft_bits="4", drafted=drafted)


def gguf(engine, test, batch="1"):
    return float(row(GGUF, model="8b", type="Q4_K_M", engine=engine, test=test, batch=batch)["tok_s"])


def most_off():
    """Where `nq fit` was off most, in percent, rounded up."""
    rows = [line.split(",") for line in record(FIT_GPU).splitlines() if line[:4] == "qwen"]
    return str(math.ceil(max(abs(float(r[-1])) for r in rows) * 100))


def bench_off(machine):
    """Where `nq fit` was off most beside `nq bench` on a machine, in percent, rounded up."""
    return str(math.ceil(max(abs(float(r["off"])) for r in rows(FIT_BENCH, machine=machine)) * 100))


VALUES = {
    "build_seconds": lambda: built("matrixmultiply: cargo install --path . --locked into an empty folder, two idle cores"),
    # Speed: one sequence on one H200, random weights of the published shapes.
    "slower_06b": lambda: less(layers("0.6b", "mix"), layers("0.6b", "simple")),
    "slower_8b": lambda: less(layers("8b", "mix"), layers("8b", "simple")),
    "trellis_slower_8b": lambda: less(row(TRELLIS_SPEED, model="qwen3-8b", bits="4")["3"], layers("8b", "mix")),
    "two_cards_32b": lambda: row(TWO, model="qwen3-32b", what="decode", version="4")["ratio"],
    "mtp_27b_with": lambda: whole(mtp("qwen3.5-27b")["tok_s_with"]),
    "mtp_27b_without": lambda: whole(mtp("qwen3.5-27b")["tok_s_without"]),
    "gguf_decode": lambda: f"{gguf('nq', 'tg128') / gguf('llama.cpp', 'tg128'):.2f}",
    "gguf_prompt": lambda: f"{gguf('nq', 'pp512') / gguf('llama.cpp', 'pp512'):.2f}",
    "fit_off": most_off,
    "fit_bench_off": lambda: bench_off("one H200"),
    # Quality: the demo model, 300,000 bytes of books, or 700,000.
    "less_q4_k_m": lambda: less(kld("--target-size 8721408B"), kld("Q4_K_M")),
    "less_trellis": lambda: less(row(TRELLIS, flags="--bits 3 --target-size 8580000B")["kld_f32"],
                                 row(MIXES, command="--target-size 8580000B")["kld_700k"]),
    "kld_mix": lambda: f"{float(row(MIXES, command='--bits 4')['kld_700k']):.4f}",
    "mb_mix": lambda: mb(row(MIXES, command="--bits 4")),
    "kld_trellis": lambda: f"{float(row(TRELLIS, flags='(4 bits)')['kld_f32']):.4f}",
    "mb_trellis": lambda: mb(row(TRELLIS, flags="(4 bits)")),
}

TIED = re.compile(r"(\d[\d.,]*)?(<!--=\s*(\w+)\s*-->)")
# What a reader would take for a measurement, in figures or in words.
MEASURED = re.compile(
    r"(?<![\w.,])\d[\d.,]* ?(?:%|MB\b|GB\b|tok/s|tokens a second|seconds|minutes|hours)|(?<![\w.])0\.\d+\b(?!B)|\d[\d.]* times"
    r"|\b(?:two|three|four|five|six|seven|eight|nine|ten)(?: times as|-?fold| minutes| seconds| hours)\b"
)
WIDTH = 120
# Sizes have one unit, powers of 1000: pages have no MiB, and no text of the program but `human_bytes` has a figure
# before a unit, except those of rates. A GPU's shared memory is in KiB, as CUDA's documentation has it.
BINARY = re.compile(r"\b[MGT]iB\b")
FIGURE = re.compile(r"\} ?[kMGT]B\b(?!/)|\b[KMGT]iB\b|\{bytes\}/")
UNITS = {"formats/src/units.rs", "src/flags.rs"}  # writes them; reads those that users write
BARE = re.compile(r"(?<![\w.)\]/\\])\.\d")


def tied(text, page):
    """The text with the numbers that records give."""
    def made(found):
        name = found[3]
        if name not in VALUES:
            raise SystemExit(f"{page}: no value is called {name}")
        if found[1] is None:
            raise SystemExit(f"{page}: no number stands before <!--= {name} -->")
        return VALUES[name]() + found[2]
    return TIED.sub(made, text)


def names(text):
    """The values that a text uses."""
    return {found[3] for found in TIED.finditer(text)}


def sentences(text):
    """Lines of a page that are neither code, nor made tables: number and text."""
    code = made = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            code = not code
        elif line.startswith("<!-- figures:"):
            made = True
        elif line.startswith("<!-- end"):
            made = False
        elif not code and not made:
            yield number, line


def anchors(text):
    """The names by which links reach a page's headings."""
    for line in text.splitlines():
        if line.startswith("#"):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            yield title.replace(" ", "-")


def dead_links(page):
    """Links of a page that lead nowhere: to a file, or a heading, that is not there."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = page.parent / path if path else page
            if not target.exists():
                yield f"{number}: no file {link}"
            elif anchor and anchor not in anchors(target.read_text()):
                yield f"{number}: no heading {link}"


def sizes():
    """Lines of the program that write a size otherwise than by `human_bytes`."""
    for path in sorted(ROOT.rglob("src/**/*.rs")):
        name = str(path.relative_to(ROOT))
        if name in UNITS or name.startswith("target/"):
            continue
        product = path.read_text().split("#[cfg(test)]")[0]
        for number, line in enumerate(product.splitlines(), 1):
            if not line.lstrip().startswith("//") and FIGURE.search(line):
                yield f"{name}:{number}: sizes are written by human_bytes: {line.strip()}"


def faults(text, readme):
    """What is wrong with how a page is written."""
    for number, line in sentences(text):
        plain = re.sub(r"`[^`]*`", "", line)
        visible = re.sub(r"<!--.*?-->|\]\([^)]*\)", "", plain)
        if len(re.sub(r"<!--.*?-->", "", line)) > WIDTH and not line.startswith(("|", "![", "<")):
            yield f"{number}: longer than {WIDTH} characters"
        if BINARY.search(visible):
            yield f"{number}: sizes are in MB and GB"
        if BARE.search(visible):
            yield f"{number}: a number without its leading zero"
        if readme and not line.startswith(("#", "![")):
            untied = TIED.sub("", re.sub(r"\]\([^)]*\)", "", plain))
            for found in MEASURED.finditer(untied):
                yield f"{number}: {found[0]}: measured, but tied to no record"
