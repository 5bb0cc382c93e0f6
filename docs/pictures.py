"""Draw the SVG pictures of README.md and docs/: `python docs/pictures.py [folder]`.

`--compute` first measures the errors that error-by-position.svg shows (15 seconds; needs transformers
and mpmath) and writes them to docs/images/error-by-position.json. The rest is drawn from that file and
the library.
"""

import json
import math
import struct
import sys
from decimal import Decimal
from html import escape
from pathlib import Path

from tightrope import frequencies, phase_words
from tightrope.ops.schema import LAYOUTS

IMAGES = Path(__file__).resolve().parent / "images"
ERRORS = IMAGES / "error-by-position.json"
HEAD_DIM, BASE, POSITION = 128, 500_000.0, 1_000_000

INK, MUTED, LINE, WHITE = "#1f2430", "#5b6270", "#c9cdd6", "#ffffff"
BLUE, RED, GREEN, GOLD = "#2f48c4", "#bf3a0a", "#1d7a4c", "#8a5a00"
# The fill of a box, by the colour of its edge.
PALE = {BLUE: "#e3e8fc", RED: "#fdeae1", GREEN: "#e0f3e8", GOLD: "#fbefd2", LINE: "#f1f3f7"}
FONT = "-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


# --- drawing --------------------------------------------------------------------------------------


def card(width, height, title, description, parts):
    """Return an SVG file: the parts on a light card, which is readable on light and dark pages."""
    heads = "".join(
        f'<marker id="a{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 1 10 5 0 9z" fill="{colour}"/></marker>'
        for colour in (MUTED, BLUE, RED, GREEN, GOLD)
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="t d" font-family="{FONT}">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(description)}</desc>',
        f"<defs>{heads}</defs>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="14" fill="{WHITE}" '
        f'stroke="{LINE}"/>',
    ]
    return "\n".join([*lines, *parts, "</svg>\n"])


def text(x, y, words, size=15, fill=INK, anchor="start", font=""):
    """Return lines of text; y is the base line of the first, font "bold", "mono" or both."""
    style = ' font-weight="600"' * ("bold" in font)
    style += ' font-family="ui-monospace, Menlo, monospace"' * ("mono" in font)
    lines = "".join(
        f'<tspan x="{x:g}" dy="{size * 1.35 * (i > 0):g}">{escape(line)}</tspan>'
        for i, line in enumerate(words.split("\n"))
    )
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text {place} xml:space="preserve"{style}>{lines}</text>'


def box(x, y, width, height, words="", edge=LINE, size=15, **style):
    """Return a rounded box with centred lines of text; style is that of :func:`text`."""
    first = y + height / 2 + size * (0.36 - 0.675 * words.count("\n"))
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" '
        f'fill="{PALE.get(edge, WHITE)}" stroke="{edge}"/>'
        + text(x + width / 2, first, words, size, anchor="middle", **style)
    )


def path(data, colour=MUTED, width=1.5, arrow=False, dashed=False):
    """Return an open path, with an arrow head at its end if ``arrow``."""
    style = f' marker-end="url(#a{colour[1:]})"' * arrow + ' stroke-dasharray="5 4"' * dashed
    return f'<path d="{data}" fill="none" stroke="{colour}" stroke-width="{width}"{style}/>'


def arrow(x, y, to, colour=MUTED):
    """Return an arrow that points down."""
    return path(f"M{x} {y}V{to}", colour, arrow=True)


def dot(x, y, radius, fill, stroke="none"):
    """Return a circle."""
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius}" fill="{fill}" stroke="{stroke}"/>'


# --- error-by-position ----------------------------------------------------------------------------


def compute():
    """Measure the errors of cosines and write them to ``ERRORS``."""
    import mpmath
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from tightrope import RopeSpec
    from tightrope.functional import rotate

    exact = mpmath.mp.clone()
    exact.dps = 50
    half = HEAD_DIM // 2
    omegas = [exact.mpf(BASE) ** (-exact.mpf(k) / half) for k in range(half)]
    parameters = {"rope_type": "default", "rope_theta": BASE}
    config = LlamaConfig(head_dim=HEAD_DIM, rope_parameters=parameters)
    module = LlamaRotaryEmbedding(config)
    cast = LlamaRotaryEmbedding(config).to(torch.bfloat16)
    rows = []
    for first in sorted({POSITION, *(2**i for i in range(31)), 2**31 - 256}):
        ids = torch.arange(first, first + min(256, 1 + first // 4))
        truth = [exact.cos(p * omega) for p in ids.tolist() for omega in omegas]
        one = torch.zeros(1, 1, len(ids), HEAD_DIM)
        one[..., :half] = 1.0  # rotated, the first half is the cosines
        row = {"position": first}
        for name, cosines in {
            "bfloat16": cast(one, ids[None])[0][0],
            "float32": module(one, ids[None])[0][0],
            "tightrope": rotate(one, RopeSpec(HEAD_DIM, base=BASE), ids)[0, 0],
        }.items():
            found = cosines[:, :half].flatten().tolist()
            error = max(abs(a - b) for a, b in zip(found, truth, strict=True))
            row[name] = float(f"{float(error):.3g}")
        rows.append(row)
    ERRORS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def error_by_position():
    """Draw the error of cosines by position, for three ways to compute angles."""
    rows = json.loads(ERRORS.read_text(encoding="utf-8"))
    million = next(row for row in rows if row["position"] == POSITION)
    left, right, top, bottom = 88, 764, 178, 570
    lowest, highest = -8, 0.45

    def x(position):
        return round(left + (right - left) * math.log2(position) / 31, 1)

    def y(error):
        return round(bottom - (bottom - top) * (math.log10(error) - lowest) / (highest - lowest), 1)

    def curve(name, colour, width):
        points = [f"{x(row['position'])} {y(row[name])}" for row in rows if row is not million]
        return path("M" + "L".join(points), colour, width)

    # fmt: off
    parts = [
        text(28, 56, "The error of Tightrope's cosines\ndoes not grow with the position", 34, font="bold"),
        text(28, 142, "Largest error of a cosine, head_dim 128, base 500,000", 23, MUTED),
        text((left + right) / 2, bottom + 68, "position of the token", 22, MUTED, "middle"),
    ]
    for power, label in (-8, "10⁻⁸"), (-6, "10⁻⁶"), (-4, "10⁻⁴"), (-2, "10⁻²"), (0, "1"):
        parts.append(path(f"M{left} {y(10.0**power)}H{right}", MUTED if power == lowest else "#e6e8ee", 1))
        parts.append(text(left - 12, y(10.0**power) + 7, label, 22, MUTED, "end"))
    for position, label in (1, "1"), (10**3, "1,000"), (10**6, "1 million"), (10**9, "1 billion"):
        parts.append(path(f"M{x(position)} {bottom}v8", MUTED, 1))
        parts.append(text(x(position), bottom + 34, label, 22, MUTED, "middle"))
    for error, label, below in (2.0**-9, "bfloat16 resolution", -8), (2.0**-25, "float32 resolution", 18):
        parts.append(path(f"M{left} {y(error)}H{right}", MUTED, 1.2, dashed=True))
        parts.append(text(right, y(error) + below, label, 20, MUTED, "end"))
    at = x(POSITION), y(million["float32"])
    parts += [
        curve("bfloat16", RED, 3), curve("float32", GOLD, 3), curve("tightrope", BLUE, 5),
        text(x(2**9.3), y(0.34), "module cast\nto bfloat16", 22, RED, font="bold"),
        text(x(2**13.5), y(1.2e-4), "float32 tables,\nas in transformers:\n10 × position, 10 × error", 22, GOLD, font="bold"),
        dot(*at, 7, GOLD),
        text(at[0] + 14, at[1] + 14, f"{million['float32']:.2f} at 1 million", 20, GOLD),
        text(right, y(1.6e-7), "Tightrope: below 10⁻⁷", 26, BLUE, "end", "bold"),
    ]
    # fmt: on
    about = (
        "The position, from 1 to 2^31, and the largest error of a cosine over 64 pairs and up to 256 "
        "consecutive positions, both logarithmic. Tightrope stays below 10^-7. The float32 tables of "
        f"transformers are off by {million['float32']:.2f} at position 1,000,000, and by 2 from 33 million "
        "on. After module.to(torch.bfloat16) they are off by 0.001 at position 1, by nearly 2 from 2,048 on."
    )
    return card(
        800, 662, "The error of Tightrope's cosines does not grow with the position", about, parts
    )


# --- phase-word -----------------------------------------------------------------------------------


def as_float32(value):
    """Round to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def on_circle(x, y, radius, turn):
    """Return a point of a circle; turns start on the right and go anticlockwise."""
    angle = 2 * math.pi * turn
    return round(x + radius * math.cos(angle), 2), round(y - radius * math.sin(angle), 2)


def dial(x, y, radius, *hands):
    """Return a circle with hands, each (turn, colour)."""
    parts = [
        dot(x, y, radius, PALE[LINE], MUTED),
        path(f"M{x - radius} {y}h{2 * radius}M{x} {y - radius}v{2 * radius}", LINE, 1),
    ]
    for turn, colour in hands:
        parts.append(path("M{} {}L{} {}".format(x, y, *on_circle(x, y, radius, turn)), colour, 3))
    return "".join(parts)


def phase_word():
    """Draw a phase word, its product with a position, and the same product in float32."""
    pair = 1
    omega = frequencies.default(HEAD_DIM, BASE).exact[pair]  # radians, 60 digits
    word = phase_words.host_words(None, None, HEAD_DIM, BASE, None).words[pair] % 2**64
    whole, kept = divmod(POSITION * word, 2**64)
    quarter = (kept + 2**61) >> 62
    rest = 2 * math.pi * (kept - (quarter << 62)) / 2**64
    cosine = ("cos(rest)", "−sin(rest)", "−cos(rest)", "sin(rest)")[quarter % 4]
    exact = POSITION * omega
    stored = as_float32(float(omega))
    product = as_float32(stored * POSITION)
    lost = abs(float(Decimal(product) - exact))
    spacing = 2 ** (24 - math.frexp(product)[1])  # numbers per radian
    x, unit = 302, 2.0**-64
    # fmt: off
    parts = [
        text(28, 40, "A frequency as a 64-bit fraction of a turn", 20, font="bold"),
        dial(140, 204, 84, (word * unit, BLUE)),
        text(214, 222, "0", 14, MUTED, "end"), text(146, 140, "2⁶²", 14, MUTED),
        text(64, 198, "2⁶³", 14, MUTED), text(134, 266, "3 · 2⁶²", 14, MUTED, "end"),
        text(140, 340, "positions 0 to 8: it wraps at 8", 14, MUTED, "middle"),
        text(x, 84, f"pair {pair} turns by {float(omega):.9f} radians = {word * unit:.9f} turn per position"),
        text(x, 116, "phase word", 15, BLUE, font="bold"),
        text(x + 108, 116, f"{word:#018x}", 17, BLUE, font="mono"),
        text(x + 304, 116, "in units of 2⁻⁶⁴ turn", 15, MUTED),
        text(x, 156, f"× position {POSITION:,}, as integers:"),
        box(x, 170, 150, 44, f"{whole:,}", RED, 17, font="mono"),
        box(x + 150, 170, 380, 44, f"{kept:016x}", BLUE, 17, font="mono"),
        text(x + 75, 236, "whole turns:\noverflow, dropped", 15, RED, "middle"),
        text(x + 340, 236, f"the 64 bits that are kept: {kept * unit:.9f} turn", 15, BLUE, "middle"),
        arrow(x + 240, 246, 270), arrow(x + 440, 246, 270),
        box(x + 150, 274, 180, 62, f"upper bits, rounded:\n{quarter} quarter turn"),
        box(x + 350, 274, 180, 62, f"the rest:\n{rest:+.6f} radians"),
        text(x + 240, 360, f"cos = {cosine}", 15, MUTED, "middle"),
        text(x + 440, 360, "polynomials", 15, MUTED, "middle"),
        path("M28 384H832", LINE, 1),
        text(28, 420, f"The angle of position {POSITION:,}", 20, font="bold"),
        dial(140, 536, 84, (kept * unit, BLUE), (product / (2 * math.pi) % 1, RED)),
        text(72, 466, f"{math.degrees(lost):.1f}°", 15, INK, "middle"),
        text(x, 462, "Tightrope", 15, BLUE, font="bold"),
        text(x + 108, 462, f"{360 * kept * unit:.6f}°", 17, BLUE, font="mono"),
        text(x + 260, 462, f"off by at most {POSITION:,} · 2⁻⁶⁵ turn\n= {POSITION * math.pi * unit:.1e} radians", 15, MUTED),
        text(x, 524, "float32", 15, RED, font="bold"),
        text(x + 108, 524, f"{math.degrees(product) % 360:.6f}°", 17, RED, font="mono"),
        text(x + 260, 524, f"off by {lost:.3f} radians = {math.degrees(lost):.1f}°", 15, MUTED),
        text(x, 560, f"inv_freq keeps 24 bits, {stored:.9f}. Its product with the position\n"
             f"is rounded to a multiple of 1/{spacing}: {product:,} radians instead of\n"
             f"{float(exact):,.6f}. Whole turns took the bits that the angle needs."),
    ]
    # fmt: on
    for p in range(9):
        inner, outer = (on_circle(140, 204, radius, p * word * unit) for radius in (84, 101))
        parts += [dot(*inner, 4, BLUE), text(outer[0], outer[1] + 5, str(p), 14, BLUE, "middle")]
    about = (
        f"Pair {pair} of head_dim 128 and base 500,000 has the phase word {word:#018x}. Times 1,000,000, in "
        f"64-bit integers, {whole:,} whole turns overflow, and {kept * unit:.9f} turn is kept. In float32 the "
        f"product is {product:,} instead of {float(exact):,.6f} radians: {lost:.3f} radians off."
    )
    return card(860, 640, "A phase word, and its product with a position", about, parts)


# --- routes ---------------------------------------------------------------------------------------

# fmt: off
ROUTES = [
    ("definition", GOLD, "define", '• use("reference")\n• float64 with f or P\n• forward mode\n• compiling in functorch\n'
     "• exporting to a runtime\n   without the operators\n• a transform other than\n   functionalize, of a\n   call with f or P"),
    ("traced", GREEN, "the registered\noperator", "• compile\n• other exports\n• functionalize"),
    ("autograd", RED, "OutOfPlace.apply", "• other functorch\n   transforms\n• eager code in which\n"
     "   an input requires\n   a gradient"),
    ("kernel", BLUE, "the operator,\nbelow autograd", "• everything else"),
]


def routes():
    """Draw the life of a call, as in docs/design.md."""
    parts = [
        box(28, 28, 290, 42, "rotate_qk(q, k, spec, …)", INK, 17, font="mono"),
        arrow(173, 70, 94), box(28, 98, 640, 60), arrow(173, 158, 182),
        text(42, 134, "1  Build", 17, font="bold"),
        text(134, 123, "all arguments are checked against each other,\nonce, and become a Call"),
        text(654, 134, "ops/build.py", 14, MUTED, "end", "mono"),
        box(28, 186, 804, 292),
        text(42, 215, "2  Route", 17, font="bold"),
        text(134, 215, "the first that applies decides"),
        text(654, 215, "ops/route.py", 14, MUTED, "end", "mono"),
        box(28, 490, 804, 102),
        text(42, 517, "3  Run", 17, font="bold"),
        text(345, 517, "results in new tensors"),
        text(654, 517, "ops/run.py", 14, MUTED, "end", "mono"),
        path("M318 49H727V228", BLUE, arrow=True, dashed=True),
        text(332, 41, "a prepared rotation that was used before skips the first step", 15, BLUE),
        box(28, 624, 196, 104, "plain torch:\nthe definition\nof the operator", GOLD),
        box(240, 624, 592, 104),
        text(254, 652, "tightrope::rotate", 17, font="bold mono"),
        text(818, 652, "the PyTorch dispatcher chooses the backend", 15, MUTED, "end"),
        box(254, 670, 176, 42, "cpu (C++)", MUTED), box(448, 670, 176, 42, "triton (GPUs)", MUTED),
        box(642, 670, 176, 42, "reference (definition)", MUTED),
    ]
    for i, (name, colour, does, when) in enumerate(ROUTES):
        x = 42 + 198 * i
        parts += [
            box(x, 232, 182, 38, name, colour, 17, fill=colour, font="bold"),
            text(x + 4, 294, when),
            arrow(x + 91, 304 + 20 * when.count("\n"), 526, colour),
            box(x, 530, 182, 50, does, colour, font="" if " " in does else "mono"),
            arrow(x + 91, 580, 620, colour),
        ]
        if i:
            parts.append(path(f"M{x - 16} 251H{x - 2}", arrow=True))
    about = (
        "rotate_qk builds a Call, which checks all arguments once. The first route that applies decides: "
        "definition, traced, autograd, kernel. A prepared rotation that was used before skips the first step. "
        "All routes but the definition run the operator, for which the dispatcher chooses a backend."
    )
    return card(860, 756, "The life of a call and its four routes", about, parts)


# --- patch ----------------------------------------------------------------------------------------


def layer(x, ink, does, colour):
    """Return the parts of an attention layer, with the rotation in colour."""
    return [
        box(x, 118, 190, 42, "q_proj, k_proj, v_proj", fill=ink), box(x + 206, 118, 158, 42, "rotary_emb", fill=ink),
        arrow(x + 26, 160, 348), arrow(x + 120, 160, 204), arrow(x + 285, 160, 204),
        text(x + 18, 258, "v", 15, ink, "end"), text(x + 129, 186, "q, k", 15, ink), text(x + 294, 186, "cos, sin", 15, ink),
        box(x + 52, 208, 312, 92, "", colour),
        text(x + 208, 234, "apply_rotary_pos_emb\n(q, k, cos, sin)", 15, INK, "middle", "mono"),
        text(x + 208, 286, does, 16, colour, "middle", "bold"),
        arrow(x + 208, 300, 348), text(x + 217, 329, "q, k", 15, ink),
        box(x, 352, 364, 40, "attention", fill=ink), arrow(x + 182, 392, 414), box(x, 418, 364, 40, "o_proj", fill=ink),
    ]


def patch():
    """Draw an attention layer before and after ``patch``."""
    title = "patch replaces the rotation and nothing else"
    parts = [
        text(28, 42, title, 20, font="bold"),
        text(28, 82, "before", 17, RED, font="bold"), text(468, 82, "after", 17, BLUE, font="bold"),
        path("M104 66H184M344 66H448", BLUE, 2, arrow=True), text(264, 71, "patch(model)", 15, BLUE, "middle", "mono"),
        path("M448 88H344M184 88H104", MUTED, 2, arrow=True), text(264, 93, "unpatch(model)", 15, MUTED, "middle", "mono"),
        text(832, 82, "unchanged: weights, tables, modules", 15, MUTED, "end"),
        *layer(28, INK, "eager torch", RED),
        *layer(468, MUTED, "fused operator, the same bits", BLUE),
        box(28, 486, 804, 92), text(44, 512, "print(report)", 14, MUTED, font="mono"),
        text(44, 537, "1 replaced, 0 left\nreplaced modeling_llama.apply_rotary_pos_emb (same bits): rotate_half on all channels, …",
             14, font="mono"),
    ]
    about = (
        "Before, apply_rotary_pos_emb rotates q and k by cos and sin in eager torch. After patch(model), the "
        "fused operator takes its place, with the same bits; the rest of the layer stays. unpatch(model) goes back."
    )
    return card(860, 606, title, about, parts)


# --- layouts --------------------------------------------------------------------------------------

DIMENSIONS = {
    "b": ("batch", GOLD), "h": ("heads", GREEN), "s": ("sequence", RED), "t": ("tokens", RED), "d": ("dim", BLUE),
}
ROTATED = [  # y, the channels that rotate, distance between the two of a pair, and the text
    (312, range(12), 6, "half", "interleaved=False", "channel i with i + rotary_dim / 2"),
    (400, range(12), 1, "interleaved", "interleaved=True", "neighbours"),
    (502, range(2, 10), 4, "slice", "start=2, rotary_dim=8", "half pairing; the others pass through unchanged"),
]
# fmt: on


def layouts():
    """Draw the layouts, the two pairings and a slice."""
    parts = [
        text(28, 40, "layout: the order of the dimensions, by letters", 20, font="bold"),
        text(
            28,
            246,
            "pairing and slice: the channels of a head that rotate together",
            20,
            font="bold",
        ),
    ]
    for i, name in enumerate(LAYOUTS):
        x, y = 28 + 422 * (i % 2), 64 + 50 * (i // 2)
        parts.append(text(x, y + 24, f'"{name}"', 17, font="bold mono"))
        for j, letter in enumerate(name):
            label, colour = DIMENSIONS[letter]
            parts.append(box(x + 76 + 77 * j, y, 75, 36, label, colour, 14, fill=colour))
    for y, rotating, distance, name, option, meaning in ROTATED:
        for i in range(12):
            edge, fill = (BLUE, BLUE) if i in rotating else (LINE, MUTED)
            parts.append(box(30 + 34 * i, y, 32, 32, str(i), edge, 14, fill=fill))
        for i in rotating[: len(rotating) // 2] if distance > 1 else rotating[::2]:
            a, b = 46 + 34 * i, 46 + 34 * (i + distance)
            rise = y - (18 if distance == 1 else 26 + 8 * (i - rotating[0]))
            parts.append(path(f"M{a} {y}C{a} {rise} {b} {rise} {b} {y}", BLUE))
        parts.append(text(460, y - 6, name, 17, BLUE, font="bold"))
        parts.append(text(460, y + 16, option, font="mono"))
        parts.append(text(460, y + 38, meaning, 15, MUTED))
    about = (
        "The letters of a layout name the dimensions of a tensor in order. Half pairing rotates channel i "
        "with i + rotary_dim / 2, interleaved pairing rotates neighbours. Channels outside of the slice "
        "pass through unchanged."
    )
    return card(860, 566, "Layouts, pairings and a slice", about, parts)


# --- all ------------------------------------------------------------------------------------------


def main(folder):
    """Write all pictures into a folder."""
    for picture in (error_by_position, layouts, patch, phase_word, routes):
        file = folder / f"{picture.__name__.replace('_', '-')}.svg"
        file.write_text(picture(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    if "--compute" in sys.argv:
        sys.argv.remove("--compute")
        compute()
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
