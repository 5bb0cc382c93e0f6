"""The text output of `tightrope inspect`."""

import math

from rich.console import Console
from rich.text import Text

from ..inspect import Comparison, Inspection, PairRow, PartReport
from ..inspect._compare import LOST, NOTICED, Difference, PartComparison
from ..inspect.exactness import EXACT, FLOAT32, MEANING, WORDS
from ..text import printable
from ._tables import facts, titled

_SHOWN = 14


def print_inspection(console: Console, found: Inspection, *, every: bool) -> None:
    """Print the report on one configuration."""
    _line(console, found.name, style="bold")
    _line(console, found.form)
    for part in found.parts:
        console.print()
        _print_part(console, part, every=every)
    for without in found.without:
        console.print()
        _line(console, f"{without.name}: {without.why_not}")


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print how two configurations and their angles differ."""
    one, other = comparison.one, comparison.other
    names = [
        (mark, printable(f"{each.name} ({each.form})")) for mark, each in zip("AB", (one, other))
    ]
    console.print(facts(names))
    for part in comparison.parts:
        console.print()
        _print_part_comparison(console, part)
    if comparison.unmatched:
        _line(console, f"Only in one of them: {', '.join(comparison.unmatched)}.")
    for mark, each in (("A", one), ("B", other)):
        for note in each.warnings:
            _bullet(console, f"warning, {mark}", note.text, style="bold yellow")
    console.print()
    _line(console, "Alike." if comparison.alike else "They differ.", style="bold")


# --- one configuration ----------------------------------------------------------------------------


def _print_part(console: Console, part: PartReport, *, every: bool) -> None:
    if part.name:
        layers = "" if part.part.layers is None else f" ({part.part.layers} layers)"
        _line(console, f"{part.name}{layers}", style="bold")
    fields = titled("Fields")
    fields.add_column("field", no_wrap=True)
    fields.add_column("value", overflow="fold", max_width=28)
    fields.add_column("source", overflow="fold")
    for each in part.part.fields:
        fields.add_row(printable(each.name), Text(_value(each.value)), Text(printable(each.source)))
    if part.part.context is not None:
        key, length = part.part.context
        fields.add_row("context", f"{length:,}", Text(printable(key)))
    console.print(fields)
    scales = [f"attention scaling {part.attention_scaling:.6g} on rotated channels"]
    if part.softmax_scaling != 1.0:
        scales.append(f"softmax scale times {part.softmax_scaling:.6g}, in the model")
    _line(console, "; ".join(scales) + ".")
    console.print()
    _print_pairs(console, part, every=every)
    console.print()
    _print_exactness(console, part)
    if part.notes:
        console.print()
    for note in part.notes:
        kind, style = ("warning", "bold yellow") if note.warning else ("note", "bold")
        _bullet(console, kind, note.text, style=style)


def _print_pairs(console: Console, part: PartReport, *, every: bool) -> None:
    pairs = part.pairs
    if not pairs:
        _line(console, "No channel rotates.")
        return
    shown = list(pairs) if every else _chosen(pairs)
    count = f"{len(pairs)} pairs" if len(shown) == len(pairs) else f"{len(shown)} of {len(pairs)}"
    more = "" if len(shown) == len(pairs) else "; --all shows every one"
    table = titled(f"Pairs ({count}{more})")
    scaled = part.spec.scaling is not None
    columns = ["pair", "channels"]
    columns += ["axis"] if any(pair.axis is not None for pair in shown) else []
    columns += ["head"] if any(pair.head is not None for pair in shown) else []
    columns += ["wavelength"]
    columns += ["unscaled", "scaling"] if scaled else []
    if part.context is not None:
        columns.append(f"turns in {part.context:,}")
    if part.trained is not None and part.trained != part.context:
        columns.append(f"in {part.trained:,}, unscaled" if scaled else f"in {part.trained:,}")
    for column in columns:
        table.add_column(column, justify="right")
    for pair in shown:
        cells = {
            "pair": str(pair.index),
            "channels": f"{pair.channels[0]}, {pair.channels[1]}",
            "axis": str(pair.axis),
            "head": str(pair.head),
            "wavelength": _wavelength(pair.wavelength),
            "unscaled": _wavelength(pair.unscaled),
            "scaling": pair.effect,
        }
        row = [cells[column] for column in columns if column in cells]
        row += [_turns(pair.turns)] if part.context is not None else []
        if len(row) < len(columns):
            row.append(_turns(pair.turns_trained))
        table.add_row(*row)
    console.print(table)


def _chosen(pairs: tuple[PairRow, ...]) -> list[PairRow]:
    """Choose the pairs to show: the first, the last, both sides of each change, some in between.

    A change is where scaling begins or ends, or where pairs no longer complete a turn. If there are
    more than three changes of one kind, those of this kind are not considered.
    """
    if len(pairs) <= _SHOWN:
        return list(pairs)
    keep = {0, len(pairs) - 1}
    for marks in (
        [_kind(pair) for pair in pairs],
        [pair.turns is not None and pair.turns < 1 for pair in pairs],
    ):
        changes = [i for i in range(1, len(pairs)) if marks[i] != marks[i - 1]]
        if len(changes) <= 3:
            keep |= {i for change in changes for i in (change - 1, change)}
    steps = _SHOWN - len(keep)
    if steps > 0:
        keep |= {round(i * (len(pairs) - 1) / (steps + 1)) for i in range(1, steps + 1)}
    return [pairs[index] for index in sorted(keep)]


def _kind(pair: PairRow) -> str:
    if pair.effect in ("kept", "stopped"):
        return pair.effect
    return f"{pair.slower:.9g}" if float(pair.slower).is_integer() else "between"


def _print_exactness(console: Console, part: PartReport) -> None:
    exactness = part.exactness
    table = titled("Largest error of a cosine or sine, by how angles are computed")
    table.add_column("angles", overflow="fold")
    for length in exactness.lengths:
        table.add_column(f"to {length:,}", justify="right")
    for method in exactness.methods:
        name = Text(method.name, style="bold" if method.name == WORDS else "")
        name.append(f"\n{MEANING[method.name]}", style="dim")
        table.add_row(name, *(f"{error:.1e}" for error in method.errors))
    console.print(table)
    plain = exactness.method(FLOAT32).reach
    _line(
        console,
        f"Largest exact context: {EXACT:,} positions with phase words; with float32 angles "
        f"{_reach(plain['bfloat16'])} within bfloat16 rounding, {_reach(plain['float16'])} within "
        "float16 rounding.",
    )
    if part.spec.axis_count > 1:
        _line(console, "These errors are at positions whose coordinates are all equal.")


def _reach(reach: int) -> str:
    if reach >= EXACT:
        return f"{EXACT:,}"
    step = 10 ** max(len(str(reach)) - 2, 0)
    return f"{'about ' if reach > step else ''}{reach // step * step:,}"


# --- two configurations ---------------------------------------------------------------------------


def _print_part_comparison(console: Console, part: PartComparison) -> None:
    names = {part.one.name, part.other.name}
    if names != {""}:
        title = part.one.name if len(names) == 1 else f"A {part.one.name} | B {part.other.name}"
        _line(console, title, style="bold")
    if part.differences:
        table = titled("Fields that differ")
        table.add_column("field", no_wrap=True)
        table.add_column("A", overflow="fold")
        table.add_column("B", overflow="fold")
        for each in part.differences:
            table.add_row(each.field, *_sides(each))
        console.print(table)
    for reason in part.why:
        _bullet(console, "differs", f"{reason}.", style="bold")
    if not part.why:
        text = "Every angle is the same" + (" nevertheless." if part.differences else ".")
        _line(console, text)
    apart = part.disagreement
    if apart is None:
        _line(console, "Their angles cannot be compared pair by pair.")
    elif apart.largest:
        _bullet(
            console,
            "angles",
            f"disagree by up to {apart.largest:.4g} rad over {apart.context:,} positions (pair "
            f"{apart.pair}, position {apart.position:,}); by {NOTICED} rad {_from(apart.noticed)}, "
            f"by {LOST:g} rad {_from(apart.lost)}.",
            style="bold",
        )


def _from(position: int | None) -> str:
    return "nowhere" if position is None else f"from position {position:,}"


def _sides(difference: Difference) -> list[Text]:
    cells = []
    for each in (difference.one, difference.other):
        cell = Text("-" if each.value is None else _value(each.value))
        if each.source:
            cell.append(f"\n{printable(each.source)}", style="dim")
        cells.append(cell)
    return cells


# --- formatting -----------------------------------------------------------------------------------


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style))


def _bullet(console: Console, name: str, text: str, *, style: str) -> None:
    console.print(facts([(name, text)], style))


def _value(value: object) -> str:
    if isinstance(value, list | tuple) and len(value) > 6:
        return f"[{value[0]}, {value[1]}, … {len(value) - 3} more …, {value[-1]}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return printable(str(value))


def _wavelength(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _turns(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.1 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
