"""The text output of `tightrope inspect`."""

import math

from ..inspect import Comparison, Field, Inspection, Note, PairRow, PartReport
from ..inspect._compare import LOST, NOTICED, PartComparison
from ..inspect.exactness import EXACT, FLOAT32, MEANING
from ._output import show, show_table

_SHOWN = 14


def show_inspection(found: Inspection, *, every: bool) -> None:
    """Print the report on one configuration."""
    show(found.name, "bold")
    show(found.form)
    for part in found.parts:
        show()
        _show_part(part, every=every)
    for without in found.without:
        show()
        show(f"{without.name}: {without.why_not}")


def show_comparison(comparison: Comparison) -> None:
    """Print how two configurations and their angles differ."""
    both = {"A": comparison.one, "B": comparison.other}
    show_table([(mark, f"{each.name} ({each.form})") for mark, each in both.items()])
    for part in comparison.parts:
        show()
        _show_part_comparison(part)
    if comparison.unmatched:
        show(f"Only in one of them: {', '.join(comparison.unmatched)}.")
    for mark, each in both.items():
        for note in each.warnings:
            _show_note(note, f", {mark}")
    show()
    show("Alike." if comparison.alike else "They differ.", "bold")


# --- one configuration ----------------------------------------------------------------------------


def _show_part(part: PartReport, *, every: bool) -> None:
    if part.name:
        layers = "" if part.part.layers is None else f" ({part.part.layers} layers)"
        show(f"{part.name}{layers}", "bold")
    fields = [(each.name, _value(each.value), each.source) for each in part.part.fields]
    if part.part.context is not None:
        key, length = part.part.context
        fields.append(("context", f"{length:,}", key))
    show("Fields", "bold")
    show_table(fields, ("field", "value", "source"))
    scales = [f"attention scaling {part.attention_scaling:.6g} on rotated channels"]
    if part.softmax_scaling != 1.0:
        scales.append(f"softmax scale times {part.softmax_scaling:.6g}, in the model")
    show("; ".join(scales) + ".")
    show()
    _show_pairs(part, every=every)
    show()
    _show_exactness(part)
    if part.notes:
        show()
    for note in part.notes:
        _show_note(note)


def _show_note(note: Note, mark: str = "") -> None:
    if note.warning:
        show_table([(f"warning{mark}", note.text)], style="warning")
    else:
        show_table([("note", note.text)])


def _show_pairs(part: PartReport, *, every: bool) -> None:
    pairs = part.pairs
    if not pairs:
        show("No channel rotates.")
        return
    shown = list(pairs) if every else _chosen(pairs)
    whole = len(shown) == len(pairs)
    count = (
        f"{len(pairs)} pairs" if whole else f"{len(shown)} of {len(pairs)}; --all shows every one"
    )
    scaled = part.spec.scaling is not None
    columns = {
        "pair": [str(pair.index) for pair in shown],
        "channels": [f"{pair.channels[0]}, {pair.channels[1]}" for pair in shown],
    }
    if any(pair.axis is not None for pair in shown):
        columns["axis"] = [str(pair.axis) for pair in shown]
    if any(pair.head is not None for pair in shown):
        columns["head"] = [str(pair.head) for pair in shown]
    columns["wavelength"] = [_wavelength(pair.wavelength) for pair in shown]
    if scaled:
        columns["unscaled"] = [_wavelength(pair.unscaled) for pair in shown]
        columns["scaling"] = [pair.effect for pair in shown]
    if part.context is not None:
        columns[f"turns in {part.context:,}"] = [_turns(pair.turns) for pair in shown]
    if part.trained is not None and part.trained != part.context:
        heading = f"in {part.trained:,}, unscaled" if scaled else f"in {part.trained:,}"
        columns[heading] = [_turns(pair.turns_trained) for pair in shown]
    show(f"Pairs ({count})", "bold")
    show_table(list(zip(*columns.values(), strict=True)), list(columns), left=0)


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


def _show_exactness(part: PartReport) -> None:
    exactness = part.exactness
    rows = [
        (f"{method.name}\n{MEANING[method.name]}", *(f"{error:.1e}" for error in method.errors))
        for method in exactness.methods
    ]
    header = ["angles", *(f"to {length:,}" for length in exactness.lengths)]
    show("Largest error of a cosine or sine, by how angles are computed", "bold")
    show_table(rows, header, left=1, style="")
    plain = exactness.method(FLOAT32).reach
    show(
        f"Largest exact context: {EXACT:,} positions with phase words; with float32 angles "
        f"{_reach(plain['bfloat16'])} within bfloat16 rounding, {_reach(plain['float16'])} within "
        "float16 rounding."
    )
    if part.spec.axis_count > 1:
        show("These errors are at positions whose coordinates are all equal.")


def _reach(reach: int) -> str:
    if reach >= EXACT:
        return f"{EXACT:,}"
    step = 10 ** max(len(str(reach)) - 2, 0)
    return f"{'about ' if reach > step else ''}{reach // step * step:,}"


# --- two configurations ---------------------------------------------------------------------------


def _show_part_comparison(part: PartComparison) -> None:
    names = {part.one.name, part.other.name}
    if names != {""}:
        title = part.one.name if len(names) == 1 else f"A {part.one.name} | B {part.other.name}"
        show(title, "bold")
    if part.differences:
        show("Fields that differ", "bold")
        rows = [(each.field, _side(each.one), _side(each.other)) for each in part.differences]
        show_table(rows, ("field", "A", "B"))
    for reason in part.why:
        show_table([("differs", f"{reason}.")])
    if not part.why:
        show("Every angle is the same" + (" nevertheless." if part.differences else "."))
    apart = part.disagreement
    if apart is None:
        show("Their angles cannot be compared pair by pair.")
    elif apart.largest:
        text = (
            f"disagree by up to {apart.largest:.4g} rad over {apart.context:,} positions (pair "
            f"{apart.pair}, position {apart.position:,}); by {NOTICED} rad {_from(apart.noticed)}, "
            f"by {LOST:g} rad {_from(apart.lost)}."
        )
        show_table([("angles", text)])


def _from(position: int | None) -> str:
    return "nowhere" if position is None else f"from position {position:,}"


def _side(field: Field) -> str:
    value = "-" if field.value is None else _value(field.value)
    return f"{value}\n{field.source}" if field.source else value


# --- formatting -----------------------------------------------------------------------------------


def _value(value: object) -> str:
    if isinstance(value, list | tuple) and len(value) > 6:
        return f"[{value[0]}, {value[1]}, … {len(value) - 3} more …, {value[-1]}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return str(value)


def _wavelength(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _turns(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if value < 0.1 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
