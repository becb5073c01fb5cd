"""Pictures of README and docs, drawn from benches/records."""

import math

from records import row, rows, whole

# All of the picture is of the same 700,000 bytes of books: nq and llama.cpp in f32 on a CPU, EXL3 and what nq tunes on a GPU.
PICTURE = "2026-11-26-compare-quality.csv"
TRELLIS = "2026-11-26-trellis-files.csv"
TUNED = "2026-11-27-trellis-tuned-rates.csv"
EXL3 = "2026-11-26-exl3.csv"


def points(found, size, kld):
    """Sizes in MB and divergences, in the order of the sizes."""
    return sorted((int(r[size]) / 1e6, float(r[kld])) for r in found)


def ladder_picture():
    """KL divergence against size, on a logarithmic scale: nq's integers and trellis codes, llama.cpp's types, EXL3."""
    tuned = [(float(r["tensor_mb"]), float(r["books"])) for r in rows(TUNED, steps="600", rate="0.005", search="5")]
    width, height, left, right, top, bottom = 640, 360, 64, 20, 46, 48
    orange, blue, green, light, grey = "#c2571a", "#1b6fb8", "#2a8a57", "#6fbf4b", "#7a5195"
    integers = points(rows(PICTURE, maker="nq"), "tensor_bytes", "books_kld")
    integers += points((r for r in rows("2026-11-22-mixes.csv") if r["kld_700k"] and "before" not in r["command"]), "tensor_bytes", "kld_700k")
    integers += points(rows("2026-11-21-methods.csv", scheme="int8 g128 symmetric"), "tensor_bytes", "mean_kld")
    theirs = rows(PICTURE, maker="llama.cpp")
    (small,) = rows(EXL3, table="6")
    sizes = range(5, 16)
    # What lies outside of the picture stays in the record.
    wide = [p for p in points(rows(EXL3, table="16"), "bytes", "kld") if p[0] <= sizes[-1] and p[1] <= 0.1]
    series = [
        ("llama.cpp", orange, points(theirs, "tensor_bytes", "books_kld"), 2),
        ("nq", blue, sorted(integers), 2),
        ("nq, trellis codes", green, points(rows(TRELLIS), "tensor_bytes", "kld_f32"), 2),
        ("tuned on a GPU", light, sorted(tuned), 2),
        ("EXL3", grey, wide, 1),
    ]
    x = lambda size: left + (size - sizes[0]) / (sizes[-1] - sizes[0]) * (width - left - right)
    y = lambda kld: top + (math.log10(0.1) - math.log10(kld)) / 3 * (height - top - bottom)
    text = lambda at, down, what, more="": f'<text x="{at:.1f}" y="{down:.1f}"{more}>{what}</text>'
    circle = lambda at, colour, r=3.5, more="": f'<circle cx="{x(at[0]):.1f}" cy="{y(at[1]):.1f}" r="{r}" fill="{colour}"{more}/>'
    note = lambda at, right, down, what, colour, anchor="start": text(
        x(at[0]) + right, y(at[1]) + down, what, f' text-anchor="{anchor}" fill="{colour}" font-size="11"')
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#444">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(left, 20, "The demo model, quantized by nq, llama.cpp and exllamav3 (EXL3)", ' font-size="14" fill="#111"'),
        text(left, 37, "mean KL divergence from the source on books, in nats per token; lower is better"),
    ]
    for kld in [0.1, 0.01, 0.001, 0.0001]:
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{y(kld):.1f}" y2="{y(kld):.1f}" stroke="#ddd"/>')
        out.append(text(left - 8, y(kld) + 4, f"{kld:g}" if kld > 0.0001 else "0.0001", ' text-anchor="end"'))
    for size in sizes:
        out.append(text(x(size), height - bottom + 20, f"{size} MB", ' text-anchor="middle"'))
    # EXL3 with a small table as it is stored, and with its table counted once.
    kld = float(small["kld"])
    stored, once = ((int(small[k]) / 1e6, kld) for k in ["bytes", "bytes_once"])
    out.append(f'<line x1="{x(once[0]):.1f}" x2="{x(stored[0]):.1f}" y1="{y(kld):.1f}" y2="{y(kld):.1f}" stroke="{grey}" stroke-dasharray="3 3"/>')
    for name, colour, line, thick in series:
        path = " ".join(f"{x(size):.1f},{y(kld):.1f}" for size, kld in line)
        dashed = ' stroke-dasharray="6 3"' if name == "EXL3" else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"{dashed}/>')
        out += [circle(p, colour) for p in line]
    for r in theirs:
        at, how = (int(r["tensor_bytes"]) / 1e6, float(r["books_kld"])), r["how"]
        # Two of about the same size stand above each other.
        last = at[0] > 14
        up = 24 if how == "Q4_K_S" else 12 if last else 8
        out.append(note(at, 2 if last else 7, -up, how, orange, "middle" if last else "start"))
    out += [circle(stored, grey), circle(once, "none", 6, f' stroke="{grey}" stroke-width="1.5"')]
    out.append(note(stored, 8, 4, "EXL3, 4 bits, embedding and head in 6", grey))
    out.append(note(stored, 24, 18, "(ring: if its tied table were stored once)", grey))
    out.append(note(wide[0], -8, 4, "EXL3, 3 to 4 bits, embedding and head in 16", grey, "end"))
    at = left
    for name, colour, _, thick in series:
        down = height - 12
        out.append(f'<line x1="{at}" x2="{at + 24}" y1="{down - 4}" y2="{down - 4}" stroke="{colour}" stroke-width="{thick + 1}"/>')
        out.append(text(at + 30, down, name))
        at += 56 + 6 * len(name)
    return "\n".join([*out, "</svg>", ""])


LAYERS = "2026-11-24-gpu-layers.csv"
TRELLIS_SPEED = "2026-11-27-trellis-layers.csv"
OTHERS = "2026-11-22-gpu-against-others.csv"


def first_picture():
    """README's: the speed of files of about 4 bits and what they lose, by the same colours."""
    blue, green, grey = "#1b6fb8", "#2a8a57", "#9aa0a6"
    speed = lambda engine: float(row(OTHERS, engine=engine, model="8b")["1"])
    theirs = lambda how: row(PICTURE, maker="llama.cpp", how=how)
    mix = row("2026-11-22-mixes.csv", command="--bits 4")
    trellis, exl3 = row(TRELLIS, flags="(4 bits)"), row(EXL3, table="6")
    left = [
        ("nq --bits 4", float(row(LAYERS, preset="8b", weights="mix", kv="16", depth="16")["tok_s"]), blue),
        ("nq --trellis", float(row(TRELLIS_SPEED, model="qwen3-8b", bits="4")["3"]), green),
        ("llama.cpp Q4_0", speed("llama.cpp"), grey),
        ("vLLM GPTQ, 4 bits", speed("vLLM"), grey),
    ]
    size = lambda r, key="tensor_bytes": f"{int(r[key]) / 1e6:.2f} MB"
    right = [
        (f"nq --bits 4, {size(mix)}", float(mix["kld_700k"]), blue),
        (f"nq --trellis, {size(trellis)}", float(trellis["kld_f32"]), green),
        (f"llama.cpp Q4_K_M, {size(theirs('Q4_K_M'))}", float(theirs("Q4_K_M")["books_kld"]), grey),
        (f"EXL3, 4 bits, {size(exl3, 'bytes')}", float(exl3["kld"]), grey),
    ]
    width, height, bar, step = 760, 250, 20, 42
    text = lambda at, down, what, more="": f'<text x="{at:.0f}" y="{down:.0f}"{more}>{what}</text>'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#444">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    panels = [
        (16, "Speed: tokens a second, one conversation", "Qwen3-8B's shape, random weights, one H200", left, whole),
        (396, "Loss: KL divergence from the source", "a trained model of 14 million parameters, lower is better", right,
         lambda v: f"{v:.4f}"),
    ]
    for at, title, where, bars, shown in panels:
        out.append(text(at, 24, title, ' font-size="15" fill="#111" font-weight="bold"'))
        out.append(text(at, 43, where))
        most, room = max(value for _, value, _ in bars), 284
        for i, (label, value, colour) in enumerate(bars):
            down = 62 + step * i
            out.append(text(at, down + 12, label, ' fill="#222"'))
            length = room * value / most
            out.append(f'<rect x="{at}" y="{down + 17}" width="{length:.0f}" height="{bar - 6}" rx="2" fill="{colour}"/>')
            out.append(text(at + length + 6, down + 28, shown(value), ' fill="#111" font-weight="bold"'))
    return "\n".join([*out, "</svg>", ""])
