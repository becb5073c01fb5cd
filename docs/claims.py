"""What README and the manual claim, each sentence with the record, the test or the script that holds it.

`docs/figures.py` makes docs/lab/claims.md of this list, of the tables and of the numbers tied to records. It fails where
the words of a claim are no longer on their page, where what holds them is gone or says something else, and where a
sentence of the manual has a measured number that is on no list.
"""

import re

import prose
from records import ROOT, USED, record, row, rows

# Pages whose numbers are versions of programs, or measurements beside their records.
CARD = re.compile(r"(?:8|12|16|24|32|48|80) GB")  # a card by its memory
NO_MANUAL = ("docs/lab/", "docs/agents.md")
MANUAL = "docs/"
README = "README.md"
QUESTIONS = "docs/README.md"


def ratios(*columns):
    """nq's speed by that of others: one sequence of 8B on one H200."""
    ours = float(row("2026-11-24-gpu-layers.csv", preset="8b", weights="simple", kv="16", depth="16")["tok_s"])
    mix = float(row("2026-11-24-gpu-layers.csv", preset="8b", weights="mix", kv="16", depth="16")["tok_s"])
    theirs = [float(row("2026-11-22-gpu-against-others.csv", engine=e, model="8b")["1"]) for e in columns]
    return [r for t in theirs for r in (ours / t, mix / t)]


def wgpu(program, test):
    """Tokens a second of 8B over Vulkan on one H200."""
    return float(row("2026-12-01-wgpu-decode.csv", program=program, shape="8b", test=test)["tok_s"])


def over_vulkan(test):
    """CUDA's speed by that of Vulkan: one sequence of 8B on one H200."""
    cuda = row("2026-11-30-wgpu.csv", program="after", device="cuda", shape="8b", test=test, batch="1")
    return float(cuda["tok_s"]) / wgpu("now", test)


def predictions():
    found = rows("2026-11-21-allocation.csv", losses="calibration", head="gptq")
    return max(abs(1 - float(r["predicted"]) / float(r["held_out"])) for r in found if r["predicted"])


def said():
    """The times of first lines by those that runs took, of the program that was the last for its device."""
    found = rows("2026-11-30-estimates.csv")
    return [float(r["first_line"]) / float(r["took"]) for r in found if r["program"] in ("again", "first layers")]


def calibration(tokens):
    """The mean of two seeds' divergences, with the noise that is the default since, as far as it was measured."""
    file = "2026-11-26-calibration-tokens.csv"
    lines = [l.split(",") for l in record(file).splitlines() if l.startswith(f"{tokens},") and l.count(",") == 7]
    best = [l for l in lines if l[2] == "each"] or [l for l in lines if l[1] == "0.25"]
    return sum(float(l[4]) for l in best[:2]) / 2


def schemas():
    found = rows("2026-11-23-json-schemas.csv")
    found = [r for r in found if r["schemas"].isdigit() and (r["taken"] or "").isdigit()]
    return sum(int(r["taken"]) for r in found) / sum(int(r["schemas"]) for r in found)


# Page, words on it, what holds them (files from the root, `file: name` for a name in it), and what must be true of the record.
CLAIMS = [
    (README, "in 2 to 8 bits each instead of 16", "formats/src/scheme.rs: Bits; kernels/cpu/tests/trellis.rs", None),
    (README, "measures what that costs in quality, and writes the measurement into the file",
     "tests/quantize.rs: a_run_without_measuring_says_so_in_the_file", None),
    (README, "OpenAI's, Anthropic's and Ollama's APIs", "tests/clients/run; serve/tests/ollama.rs", None),
    (README, "It needs neither Python nor the CUDA toolkit", "packaging/try: try_program", None),
    (README, "it runs GPTQ, AWQ, FP8 and GGUF files as they are", "formats/tests/packages.rs: gptq_is_read_as_gptqmodel_reads_it; "
     "tests/format_logits.rs: exact_formats_give_the_same_logits", None),
    (README, "it never falls back to lower quality or speed without saying so",
     "kernels/cpu/tests/linear.rs: schemes_that_are_held_as_others; "
     "quantize/src/methods/tests.rs: gptq_raises_damping_then_falls_back_by_name; "
     "runtime/load/tests/cuda/hybrids.rs: hybrids_that_have_no_kernels_are_refused_by_name", None),
    (README, "two to four times as fast as llama.cpp and vLLM", "benches/records/2026-11-22-gpu-against-others.csv",
     lambda: all(2 <= r < 4.5 for r in ratios("llama.cpp", "vLLM"))),
    (README, "this builds nq, quantizes the demo model and asks the result a question", "docs/commands.py: first", None),
    (README, "It has 14 million parameters", "tests/inspect.rs: 13_900_544", None),
    (README, "Every command has `--help`", "docs/commands.py: \"--help\"", None),
    (README, "`nq quantize MODEL --dry-run` says what a run takes before it begins", "tests/dry_run.rs: a_dry_run_lists_the_stages", None),
    (README, "has twice the divergence", "benches/records/2026-11-22-mixes.csv",
     lambda: 1.8 < float(row("2026-11-21-methods.csv", method="gptq", tensor_bytes="8502784")["mean_kld"])
     / float(row("2026-11-22-mixes.csv", command="--bits 4")["kld_700k"]) < 2.2),
    (README, "were tried on pairs of H200 with NVLink alone", "benches/records/2026-11-26-two-gpus.csv", None),
    (README, "a test that does, such as one of a GPU, prints that it was skipped", "testkit/src/lib.rs: skipped", None),
    ("docs/cards.md", "within 15 %", "src/fit/tests.rs: speeds_of_another_card_are_within_15_percent", None),
    ("docs/cards.md", "nine tenths of the published one", "src/fit/cards.rs: READ: f64 = 0.9", None),
    ("docs/cards.md", "reach 20 tokens a second", "src/fit.rs: ENOUGH: f64 = 20.0", None),
    ("docs/cards.md", "a divergence below 0.001", "src/fit.rs: UNNOTICED: f64 = 1e-3", None),
    ("docs/cards.md", "0.8 GB of the card are left to its driver", "docs/figures.py: TAKEN = 0.8e9", None),
    ("docs/cards.md", "25.8 GB in the unit of all other sizes here", "docs/figures.py: gib * 2**30", lambda: f"{24 * 2**30 / 1e9:.1f}" == "25.8"),
    ("docs/cards.md", "3 % of the weights", "docs/figures.py: 0.03 * weights", None),
    ("docs/cards.md", "by the plan that nq makes before it loads a model", "quantize/tests/cards.rs: the_table_of_cards_is_what_plans_say", None),
    ("docs/chat.md", "the answer is the same as without drafts", "runtime/load/tests/hybrids.rs: answers_with_drafts_are_those_without; runtime/load/tests/eagle.rs: drafts_change_no_answer", None),
    ("docs/cards.md", "a divergence\nbelow 0.03", "src/fit.rs: FAIR: f64 = 0.03", None),
    ("docs/comparing.md", "mean, median, 99 % and 99.9 % with their standard errors", "evals/tests/protocols.rs: comparison_is_the_definition", None),
    ("docs/comparing.md", "rounded to 16 bits, which shifts a mean divergence by less than 0.000001", "evals/src/reference.rs: F16", None),
    ("docs/comparing.md", "is run layer by layer", "tests/rank.rs: a_source_run_layer_by_layer_is_the_source", None),
    ("docs/comparing.md", "16 windows of a model with 150,000 tokens take 5 GB", "evals/src/rank/mod.rs: pub const WINDOWS: usize = 16", None),
    ("docs/comparing.md", "its 99 % quantile", "evals/tests/protocols.rs: comparison_is_the_definition", None),
    ("docs/developing.md", "about 69 MB larger than its base", "benches/records/2026-11-23-build-time.csv", None),
    ("docs/embedding.md", "On a CPU the same command gives the same bits, whatever the number of threads",
     "evals/tests/protocols.rs: the_number_of_threads_changes_nothing", None),
    ("docs/formats.md", "demo model of 8.58 MB (`--target-size 8580000B`) has a mean KL divergence of 0.0171",
     "benches/records/2026-11-22-gguf.csv", lambda: "0.01711" in record("2026-11-22-gguf.csv")),
    ("docs/formats.md", "1 if absent, 0.25 in hybrids", "formats/tests/account.rs", None),
    ("docs/formats.md", "0.1 ln(factor) + 1 if absent", "runtime/load/tests/rope.rs", None),
    ("docs/glossary.md", "about 0.0002 at 8 bits, 0.01 to 0.03 at 4 and 0.03 to 0.07 at 3",
     "benches/records/2026-11-21-methods.csv; benches/records/2026-11-22-mixes.csv; benches/records/2026-11-26-trellis-files.csv", None),
    ("docs/gpu.md", "The rest is refused by name when a model is loaded",
     "runtime/load/tests/wgpu.rs: what_is_not_there_is_refused_by_name; kernels/wgpu/src/tests.rs: what_fails_is_named", None),
    ("docs/gpu.md", "what the adapter binds at once are cut by rows",
     "kernels/wgpu/src/tests/products.rs: weights_are_cut_where_a_binding_ends", None),
    ("docs/gpu.md", "otherwise takes the first of these adapters that is a GPU, not software",
     "runtime/load/src/device.rs: other_gpus_are_taken_where_there_is_no_cuda", None),
    ("docs/gpu.md", "and models that are refused there or have no room run on the CPU then, and nq says why in a line",
     "runtime/load/src/lib.rs: what_an_adapter_refuses_runs_on_the_cpu; "
     "runtime/load/src/device.rs: models_that_need_more_than_an_adapter_runs_stay_on_the_cpu", None),
    ("docs/gpu.md", "random weights have the logits and the 64 greedy tokens of the CPU",
     "runtime/load/tests/wgpu_hybrids.rs: hybrids_are_those_of_the_cpu; "
     "runtime/load/tests/wgpu_mixtures.rs: mixtures_are_those_of_the_cpu", None),
    ("docs/gpu.md", "decodes at 397 tok/s, where llama.cpp over Vulkan decodes the same shape in Q4_0 at 233 and reads prompts 2.7 times as fast",
     "benches/records/2026-12-01-wgpu-decode.csv",
     lambda: [round(wgpu(p, t)) for p, t in (("now", "tg128"), ("llama.cpp Q4_0", "tg128"))] == [397, 233]
     and round(wgpu("llama.cpp Q4_0", "pp512") / wgpu("now", "pp512"), 1) == 2.7),
    ("docs/gpu.md", "decodes more than twice as fast as nq over Vulkan, and reads prompts ten times as fast",
     "benches/records/2026-11-30-wgpu.csv; benches/records/2026-12-01-wgpu-decode.csv",
     lambda: all(least < over_vulkan(test) < least + 1 for test, least in (("tg128", 2), ("pp512", 9)))),
    ("docs/gpu.md", "waits for another for 20 seconds gives up with an error", "kernels/cuda/layers.cuh: LIMIT = 19", None),
    ("docs/gpu.md", "depend on which expert is where, bit for bit",
     "runtime/load/tests/alone/bank.rs: whatever_has_room_computes_the_same", None),
    ("docs/gpu.md", "which experts texts used, but nothing of the texts", "src/heat.rs: what_is_kept_comes_back", None),
    ("docs/hybrids.md", "if 70 % of what the layer drafts is right", "benches/records/2026-11-28-draft-heads.csv", None),
    ("docs/images.md", "in at most 10 seconds, without redirects", "serve/src/images.rs: FETCH_TIME: Duration = Duration::from_secs(10)", None),
    ("docs/images.md", "is kept too (256 MB of the images seen last)", "answers/src/images.rs: kept: 256_000_000", None),
    ("docs/images.md", "A file may have up to 20 MB and 67 million pixels, and one side may be up to 200 times as long as the other",
     "pictures/src/decode.rs: bytes: 20_000_000; pictures/tests/main.rs: limits_are_held_before_decoding", None),
    ("docs/images.md", "within 4 of 255 levels",
     "pictures/tests/main.rs: pictures_are_those_of_the_published_processor", None),
    ("docs/library.md", "several threads may use one model", "python/tests/test_nq.py: thread", None),
    ("docs/offline.md", "It connects only to the hub, to download what you name", "formats/tests/hub.rs: no_hub_is_noticed_fast", None),
    ("docs/quantizing.md", "In eleven runs on two CPU cores and on an H200, what it said was within 30 % of the time that it took",
     "benches/records/2026-11-30-estimates.csv", lambda: len(said()) == 11 and all(abs(1 - ratio) < 0.3 for ratio in said())),
    ("docs/quantizing.md", "is 0.0148 with 32,768 tokens, 0.0150 with 16,384, 0.0155 with 8,192 and 0.0167 with 2,048",
     "benches/records/2026-11-26-calibration-tokens.csv",
     lambda: all(abs(calibration(n) - k) < 6e-5 for n, k in [(32768, 0.0148), (16384, 0.0150), (8192, 0.0155), (2048, 0.0167)])),
    ("docs/quantizing.md", "tokens give 0.0179", "benches/records/2026-11-26-calibration-tokens.csv", None),
    ("docs/quantizing.md", "within 6 % of the KL divergence measured afterwards", "benches/records/2026-11-21-allocation.csv",
     lambda: predictions() < 0.06),
    ("docs/quantizing.md", "continues an interrupted run", "tests/quantize.rs: a_run_killed_in_the_middle_of_layers_resumes_to_the_same_bytes", None),
    ("docs/serving.md", "at most 40 % of free memory, 90 % on a GPU", "serve/src/room.rs: { free / 10 * 9 } else { free / 5 * 2 }", None),
    ("docs/serving.md", "| none, 8GB |", "src/commands/serve: 8GB", None),
    ("docs/serving.md", "the limit of 32 MB holds for what they contain",
     "serve/tests/transport.rs: compressed_bodies_are_decoded_within_the_limit", None),
    ("docs/serving.md", "at most 256 responses and 32 MB per client and 128 MB in all",
     "serve/tests/conversations.rs: responses_are_kept_for_their_client", None),
    ("docs/serving.md", "nq accepts 9 of 10 schemas of JSONSchemaBench", "benches/records/2026-11-23-json-schemas.csv",
     lambda: 0.85 < schemas() < 0.95),
    ("docs/serving.md", "all 844 that the length limit did not cut off were valid", "benches/records/2026-11-23-json-schemas.csv: all 844 answers", None),
    ("docs/serving.md", "draw 3,127 tokens a second together, and 1,775 without this kernel", "benches/records/2026-11-22-serve-load.csv",
     lambda: all(f",{n}," in record("2026-11-22-serve-load.csv") for n in ["3127.2", "1775"])),
    ("docs/serving.md", "14.7 MB for Qwen3-0.6B and 18.9 MB for 8B at 16 bits", "docs/claims.py: page_bytes",
     lambda: (page_bytes(28), page_bytes(36)) == ("14.7", "18.9")),
    ("docs/serving.md", "computes 128 tokens of an 8B model in about 4 ms, in which few disks can read the 18.9 MB",
     "benches/records/2026-11-21-gpu-speed.csv", lambda: 3 < 128e3 / prompts("8b") < 4.5),
    ("docs/serving.md", "two CPU cores take 0.3 s for 128 tokens of 0.6B", "benches/records/2026-11-21-cpu-against-others.csv",
     lambda: abs(128 / cpu_prompts("qwen3-0.6b") - 0.3) < 0.05),
    ("docs/serving.md", "a row of logits has the same bits in all cases", "runtime/load/tests/exact.rs: rows_have_the_bits_of_each_alone", None),
    ("docs/serving.md", "Clients take turns", "serve/tests/engine.rs: clients_take_turns", None),
    ("docs/service.md", "lets running streams finish", "serve/tests/http.rs: a_server_that_is_told_to_end_lets_streams_end", None),
    ("docs/trellis.md", "| `--trellis --bits 3` | 5.84 MB | 0.0662 |", "benches/records/2026-11-26-trellis-files.csv",
     lambda: trellis("--bits 3") == ("5.84", "0.0662")),
    ("docs/trellis.md", "| 8.58 MB | 0.0091 | 0.0150 at 8.58 MB |", "benches/records/2026-11-26-trellis-files.csv",
     lambda: trellis("--bits 3 --target-size 8580000B") == ("8.58", "0.0091")),
    ("docs/trellis.md", "8B took six minutes on an H200", "benches/records/2026-11-26-trellis-gptq-8b.csv",
     lambda: 330 < float(record("2026-11-26-trellis-gptq-8b.csv").split("\nall,")[1].split()[0]) < 390),
    ("docs/trellis.md", "| H200, 8B | 0.7 of the speed | 0.66 | 0.9 |",
     "benches/records/2026-11-27-trellis-layers.csv; benches/records/2026-11-27-gpu-prompts.csv", lambda: decode("qwen3-8b", 0.70)),
    ("docs/trellis.md", "| H200, 0.6B | 0.56 | | 0.85 |",
     "benches/records/2026-11-27-trellis-layers.csv; benches/records/2026-11-27-gpu-prompts.csv", lambda: decode("qwen3-0.6b", 0.56)),
    ("docs/trellis.md", "| CPU with AVX-512 | 0.9 to 1.1 | 0.6 | 0.6 |", "benches/records/2026-11-26-trellis-cpu-kernels.csv", None),
    ("docs/trellis.md", "| CPU with AVX2 | 0.28 | 0.46 | 0.46 |", "benches/records/2026-11-26-trellis-cpu-kernels.csv", None),
    ("docs/tuning.md", "30 seconds on an H200, 20 minutes on two CPU cores",
     "benches/records/2026-11-23-gpu-tuning.csv; benches/records/2026-11-23-cpu-tuning-by-step.csv", None),
    ("docs/tuning.md", "took 60 % off the divergence of 4-bit integers in 77 seconds, and 42 % off that of trellis codes",
     "benches/records/2026-11-30-tuned-hybrid.csv", lambda: (tuned_hybrid("4 bits, --simple"), tuned_hybrid("trellis, 4 bits")) == (60, 42)),
    ("docs/troubleshooting.md", "A file far above 0.1 is damaged or too small", "docs/glossary.md: KL divergence", None),
]


def tuned_hybrid(scheme):
    """Percent that tuning takes off the divergence of gptq, of the trained hybrid."""
    by = {method: float(row("2026-11-30-tuned-hybrid.csv", scheme=scheme, method=method)["kld"]) for method in ("gptq", "auto")}
    return round(100 * (1 - by["auto"] / by["gptq"]))


def prompts(preset):
    """Tokens a second of a prompt of 512 on one H200, in INT4."""
    one = {"preset": preset, "bits": "4", "kv": "16", "depth": "16", "batch": "1", "kernels": "fused"}
    return float(row("2026-11-21-gpu-speed.csv", test="pp512", **one)["tok_s"])


def cpu_prompts(model):
    """Tokens a second of a prompt of 128 on two cores, in INT4."""
    found = rows("2026-11-21-cpu-against-others.csv", run="4", model=model, engine="nq", weights="INT4", test="pp128")
    return float(found[0]["tok_s"])


def page_bytes(layers):
    """Megabytes of a page: 128 positions of keys and values of 8 heads of 128, in 16 bits."""
    return f"{128 * layers * 2 * 8 * 128 * 2 / 1e6:.1f}"


def trellis(flags):
    r = row("2026-11-26-trellis-files.csv", flags=flags)
    return f"{int(r['tensor_bytes']) / 1e6:.2f}", f"{float(r['kld_f32']):.4f}"


def decode(model, share):
    r = row("2026-11-27-trellis-layers.csv", model=model, bits="4")
    return abs(float(r["3"]) / float(r["int4 of 3"]) - share) < 0.01


def plain(text):
    """Text on one line, without the names of records."""
    return " ".join(prose.TIED.sub(lambda m: m[1] or "", text).split())


def held(holders):
    """What is missing of what holds a claim: a file, or a name in it."""
    for holder in holders.split("; "):
        path, _, name = holder.partition(": ")
        path = ROOT / path
        if not path.exists():
            yield f"{holder}: no such file"
        elif name:
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix in (".rs", ".py")]
            if not any(name in p.read_text() for p in files):
                yield f"{holder}: not there"


def faults(pages):
    """Claims that are not on their page or not held, measured numbers of the manual that are on no list, long answers."""
    yield from long_answers(pages)
    for page, words, holders, true in CLAIMS:
        if plain(words) not in plain(pages[page]):
            yield f"{page}: docs/claims.py has words that are not there: {words}"
        yield from held(holders)
        if true and not true():
            yield f"{page}: not what its record says: {words}"
    for page, text in pages.items():
        if not page.startswith(MANUAL) or page.startswith(NO_MANUAL):
            continue
        claimed = " ".join(plain(words) for at, words, _, _ in CLAIMS if at == page)
        for number, line in prose.sentences(text):
            untied = prose.TIED.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))
            for found in prose.MEASURED.finditer(untied) if not line.startswith("#") else []:
                versioned = re.search(r"[A-Z]\w+ " + re.escape(found[0]), untied)
                if found[0] not in claimed and not CARD.fullmatch(found[0]) and not versioned:
                    yield f"{page}:{number}: {found[0]}: measured, but on no list (docs/claims.py)"


# Lines of a screen.
SCREEN = 45


def long_answers(pages):
    """Answers to the questions of docs/README.md that do not fit a screen."""
    for link, _, anchor in re.findall(r"\]\(([\w./]+)(#([\w-]+))?\)", pages[QUESTIONS].split("## ")[0]):
        lines = pages[str((ROOT / "docs" / link).resolve().relative_to(ROOT))].splitlines()
        heads = [i for i, line in enumerate(lines) if line.startswith("#")]
        begin = next(i for i in heads if not anchor or anchor in prose.anchors(lines[i]))
        end = next((i for i in heads if i > begin), len(lines))
        if end - begin > SCREEN:
            yield f"{QUESTIONS}: {link}{'#' if anchor else ''}{anchor} has {end - begin} lines: more than a screen"


def linked(holders):
    """What holds a claim, as links from docs/lab."""
    def one(holder):
        path, _, name = holder.partition(": ")
        return f"[{path}](../../{path})" + (f" (`{name.strip(chr(34))}`)" if name else "")
    return ", ".join(map(one, holders.split("; ")))


def page(tables, tied):
    """docs/lab/claims.md: all claims by page, with the records of `tables` and of numbers `tied` to a name."""
    lines = [
        "# What holds what we say", "",
        "Each claim of README and of the manual, and the record, test or script that holds it. `docs/figures.py` makes this",
        "page and fails where a sentence, a number or what holds it has changed.", "",
        "| page | claim | held by |", "|---|---|---|",
    ]
    link = lambda at: f"[{at}](../../{at})"
    records = lambda names: ", ".join(f"[{n}](../../{n if '/' in n else f'benches/records/{n}'})" for n in sorted(names))
    claims = [(at, words.strip("| ").replace("|", ","), linked(holders)) for at, words, holders, _ in CLAIMS]
    claims += [(at, f"the table `{name}`", records(used) or "[the program's own structures](../figures.py)") for at, name, used in tables]
    claims += [(at, f"{value} (`{name}`)", records(used)) for at, name, value, used in tied]
    order = {at: i for i, at in enumerate(dict.fromkeys(c[0] for c in CLAIMS))}
    for at, words, by in sorted(claims, key=lambda c: (order.get(c[0], len(order)), c[0])):
        lines.append(f"| {link(at)} | {words} | {by} |")
    return "\n".join(lines) + "\n"


def using(make):
    """What `make` returns, and the records that it read."""
    USED.clear()
    made = make()
    return made, set(USED)
