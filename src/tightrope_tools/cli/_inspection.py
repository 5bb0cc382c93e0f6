"""The text output of `tightrope inspect`."""

import math
from itertools import groupby

from ..inspect import Comparison, Inspection, Note, PairRow, PartReport
from ..inspect._compare import LOST, NOTICED, PartComparison
from ..inspect.exactness import EXACT, FLOAT32, MEANING
from ..inspect.notes import rounded
from ._output import show, show_table

_SHOWN = 14


def show_inspection(found: Inspection, *, every: bool) -> None:
    """Print the report on one configuration."""
    show(found.name, "bold")
    show(found.form)
    table = [_glance(part) for part in found.parts]
    for each in found.without:
        why = "none rotate" if each.at or each.layers else "not read"
        table.append((why, each.name, "", "", "", "", _runs(each.at), ""))
    show_table(table, _GLANCE)
    for part in found.parts:
        show()
        _show_part(part, every=every)
    for without in found.without:
        show()
        show(f"{without.name}: {without.why_not}")


def show_comparison(comparison: Comparison) -> None:
    """Print how two configurations and their angles differ."""
    both = {"A": comparison.one, "B": comparison.other}
    show("Alike." if comparison.alike else "They differ.", "bold")
    show_table([(mark, f"{each.name} ({each.form})") for mark, each in both.items()])
    for part in comparison.parts:
        show()
        _show_part_comparison(part)
    if comparison.unmatched:
        show(f"Only in one of them: {', '.join(comparison.unmatched)}.")
    for mark, each in both.items():
        for note in each.warnings:
            _show_note(note, f", {mark}")


_GLANCE = ("verdict", "part", "pairs", "base", "scaling", "channels", "layers", "context")


def _glance(part: PartReport) -> tuple[str, ...]:
    """Return the row of a part in the first table: what rotates, by which frequencies, and where."""
    spec, rule = part.spec, part.spec.scaling
    count = sum(note.warning for note in part.notes)
    factor = getattr(rule, "factor", None)
    last = spec.start + spec.rotary_dim - 1
    return (
        f"{count} warning{'s' * (count > 1)}" if count else "ok",
        part.name or "whole model",
        "neighbours" if spec.interleaved else "halves",
        f"{spec.base:,.10g}",
        "none" if rule is None else type(rule).__name__ + (f" {factor:g}" if factor else ""),
        f"{spec.start}–{last} of {spec.head_dim}" if spec.rotary_dim else "none",
        _runs(part.part.at) or "all",
        "" if part.context is None else f"{part.context:,}",
    )


def _runs(numbers: tuple[int, ...]) -> str:
    """Join numbers of layers, with runs as ``4–9``; the first eight, then dots."""
    groups = groupby(enumerate(numbers), lambda each: each[1] - each[0])  # constant within a run
    runs = [[number for _, number in run] for _, run in groups]
    shown = [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:8]]
    return ", ".join([*shown, "…"] if len(runs) > 8 else shown)


# --- one configuration ----------------------------------------------------------------------------


def _show_part(part: PartReport, *, every: bool) -> None:
    if part.name:
        layers = "" if part.part.layers is None else f" ({part.part.layers} layers)"
        show(f"{part.name}{layers}", "bold")
    fields = [(each.name, _value(each.value), each.source) for each in part.fields]
    show("Fields", "bold")
    show_table(fields, ("field", "value", "source"))
    show(f"attention scaling {part.attention_scaling:.6g} on rotated channels.")
    show()
    _show_pairs(part, every=every)
    show()
    _show_exactness(part)
    if part.notes:
        show()
    for note in part.notes:
        _show_note(note)


def _show_note(note: Note, mark: str = "") -> None:
    kind = "warning" if note.warning else "note"
    show(f"{kind}{mark}  {note.text}", kind)


def _show_pairs(part: PartReport, *, every: bool) -> None:
    if not part.pairs:
        show("No channel rotates.")
        return
    shown = part.pairs if every else _chosen(part.pairs)
    count = f"{len(part.pairs)} pairs"
    if len(shown) < len(part.pairs):
        count = f"{len(shown)} of {len(part.pairs)}; --all shows every one"
    rows = [_cells(pair, part) for pair in shown]
    show(f"Pairs ({count})", "bold")
    show_table([list(row.values()) for row in rows], list(rows[0]), align=">")


def _cells(pair: PairRow, part: PartReport) -> dict[str, str]:
    """Return the row of a pair: heading -> text."""
    scaled = part.spec.scaling is not None
    row = {"pair": str(pair.index)}
    if pair.axis is not None:
        row["axis"] = str(pair.axis)
    if pair.head is not None:
        row["head"] = str(pair.head)
    if pair.turns is not None:
        row[f"turns in {part.context:,}"] = _number(pair.turns)
    if pair.turns_trained is not None and part.trained != part.context:
        row[f"{part.trained:,}" + " unscaled" * scaled] = _number(pair.turns_trained)
    if scaled:
        row["scaling"] = pair.effect
    row["wavelength"] = _number(pair.wavelength)
    if scaled:
        row["unscaled"] = _number(pair.unscaled)
    row["channels"] = f"{pair.channels[0]}, {pair.channels[1]}"
    return row


def _chosen(pairs: tuple[PairRow, ...]) -> tuple[PairRow, ...]:
    """Choose the pairs to show: the first, the last, both sides of each change, some in between.

    A change is where scaling begins or ends, or where pairs no longer complete a turn. If there are
    more than five, none is considered.
    """
    if len(pairs) <= _SHOWN:
        return pairs
    marks = [
        ("" if pair.slower % 1 else pair.effect, pair.turns is not None and pair.turns < 1)
        for pair in pairs
    ]
    changes = [i for i in range(1, len(pairs)) if marks[i] != marks[i - 1]]
    keep = {0, len(pairs) - 1}
    if len(changes) <= 5:
        keep |= {i for change in changes for i in (change - 1, change)}
    steps = _SHOWN - len(keep)
    keep |= {round(i * (len(pairs) - 1) / (steps + 1)) for i in range(1, steps + 1)}
    return tuple(pairs[index] for index in sorted(keep))


def _show_exactness(part: PartReport) -> None:
    exactness = part.exactness
    rows = [
        (*(f"{error:.1e}" for error in errors), f"{name}: {MEANING[name]}")
        for name, errors in exactness.errors.items()
    ]
    show("Largest error of a cosine or sine, by how angles are computed", "bold")
    show_table(rows, [*(f"to {length:,}" for length in exactness.lengths), "angles"])
    plain = exactness.reach[FLOAT32]
    show(
        f"Largest exact context: {EXACT:,} positions with phase words; with float32 angles "
        f"{_reach(plain['bfloat16'])} within bfloat16 rounding, {_reach(plain['float16'])} within "
        "float16 rounding."
    )
    if part.spec.axis_count > 1:
        show("These errors are at positions whose coordinates are all equal.")


def _reach(reach: int) -> str:
    return f"{EXACT:,}" if reach >= EXACT else f"about {rounded(reach):,}"


# --- two configurations ---------------------------------------------------------------------------


def _show_part_comparison(part: PartComparison) -> None:
    if part.one or part.other:
        same = part.one == part.other
        show(part.one if same else f"A {part.one} | B {part.other}", "bold")
    if part.differences:
        show("Fields that differ", "bold")
        rows = [
            (each.field, mark, _side(value, source))
            for each in part.differences
            for mark, value, source in (
                ("A", each.one, each.one_source),
                ("B", each.other, each.other_source),
            )
        ]
        show_table(rows, ("field", "", "value and source"))
    for reason in part.why:
        show(f"differs  {reason}.")
    if not part.why:
        show("Every angle is the same" + (" nevertheless." if part.differences else "."))
    apart = part.disagreement
    if apart is None:
        show("Their angles cannot be compared pair by pair.")
    elif apart.largest:
        show(
            f"angles   disagree by up to {apart.largest:.4g} rad over {apart.context:,} positions (pair "
            f"{apart.pair}, position {apart.position:,}); by {NOTICED} rad {_from(apart.noticed)}, "
            f"by {LOST:g} rad {_from(apart.lost)}."
        )


def _from(position: int | None) -> str:
    return "nowhere" if position is None else f"from position {position:,}"


def _side(value: object, source: str) -> str:
    shown = "-" if value is None else _value(value)
    return f"{shown} ({source})" if source else shown


# --- formatting -----------------------------------------------------------------------------------


def _value(value: object) -> str:
    if isinstance(value, list | tuple) and len(value) > 6:
        return f"[{value[0]}, {value[1]}, … {len(value) - 3} more …, {value[-1]}]"
    return str(value)


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
