"""Records of conversions: each names the tensors that it changed, and states the pairing of these alone.

A folder has the record in a file beside its weights, a single file in its metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightrope.config.files import Record, load

from .files import Checkpoint, fail, open_checkpoint, shown
from .model import Model, pairing_name
from .plan import Change, Plan


def known(checkpoint: Checkpoint) -> list[Record]:
    """Return the conversions that are recorded of a checkpoint, in its files of weights and beside them.

    Raises:
        ValueError: the record is not one.
    """
    return [record for each in checkpoint.files.values() for record in each] + beside(checkpoint)


def beside(checkpoint: Checkpoint) -> list[Record]:
    """Return the conversions in the record beside the weights, if it is about these files."""
    return _in_folder(checkpoint.home, None if checkpoint.folder else checkpoint.path.name)


def _in_folder(home: Path, file: str | None = None) -> list[Record]:
    path = home / Record.file
    values = load(path) if path.is_file() else {}
    if not values or file not in (None, *(values.get("files") or [])):
        return []
    return Record.listed(values.get("conversions"), Record.file)


def known_at(home: Path) -> list[Record]:
    """Return the conversions that are recorded in a folder, perhaps one without readable weights.

    Raises:
        ValueError: the record is not one.
    """
    try:
        found = open_checkpoint(home)
    except (OSError, ValueError):
        return _in_folder(home)
    return known(found)


def whence(record: Record) -> str:
    """Name a record as the source of a pairing."""
    return f"the conversion record {'' if record.where == Record.file else 'in '}{record.where}"


def settled(checkpoint: Checkpoint, model: Model, plan: Plan, records: list[Record]) -> Model:
    """Return the model with the pairing that records state of the planned tensors, if no user states it.

    Raises:
        ValueError: records disagree, are about a part of the tensors, about other rows of them, or about tensors that
            the checkpoint does not have, perhaps because they were renamed.
    """
    if model.stated.source is not None:
        return model
    names = {change.entry.name for change in plan.changes}
    about = [record for record in records if names & (record.tensors | record.left)]
    there = {entry.name for entry in checkpoint.entries}
    lost = {name for record in records for name in record.tensors} - there
    if lost and not about and checkpoint.folder is not None:
        fail(
            f"the tensors of a conversion record must be in the checkpoint but {shown(sorted(lost))} are not, perhaps "
            f"because they were renamed: pass --from, or remove {records[0].where} if it is about other weights"
        )
    if not about:
        return model
    stated = {(record.where, _of(record, name)) for record in about for name in names} - {
        (record.where, None) for record in about
    }
    bare = sorted(name for name in names if all(_of(record, name) is None for record in about))
    if bare or len({pairing for _, pairing in stated}) > 1:
        parts = [f"{where}: {pairing_name(bool(pairing))}" for where, pairing in sorted(stated)]
        parts += [f"nothing about {shown(bare, 1)}"] * bool(bare)
        fail(
            f"conversion records must agree but state {', '.join(parts)}: pass --from if all have one pairing"
        )
    for change in plan.changes:
        for record in about:
            if change.entry.name in record.tensors and not _same_rows(record, change):
                fail(
                    f"{record.where} must be about the rows of {change.entry.name} that would move but states others: "
                    "state the slice, heads and packing of that conversion, or pass --from"
                )
    first = _of(about[0], min(names & (about[0].tensors | about[0].left)))
    return replace(model, interleaved=first, who=whence(about[0]), assumed=False)


def _of(record: Record, name: str) -> bool | None:
    """Return whether a record states that a tensor is interleaved; None if it is not about it."""
    if name in record.tensors:
        return record.interleaved
    return not record.interleaved if name in record.left else None


def _same_rows(record: Record, change: Change) -> bool:
    """True if a record is about the rows of a tensor that a change moves."""
    rows = next(rows for rows in record.values["rows"] if change.entry.name in rows["tensors"])
    same: bool = _rows(change) == {key: rows.get(key) for key in ("width", "first_rows")}
    return same


def _rows(change: Change) -> dict[str, Any]:
    return {"width": change.width, "first_rows": [*change.queries, *change.keys]}


def undone(plan: Plan, records: list[Record], to: str) -> set[str]:
    """Return the planned tensors that get back the order of rows that they had before a recorded conversion."""
    return {
        change.entry.name
        for change in plan.changes
        for record in records
        if change.entry.name in record.tensors
        and record.values.get("was") == to != record.values["pairing"]
        and _same_rows(record, change)
    }


def kept(
    records: Iterable[Record], model: Model, plan: Plan, interleaved: bool
) -> list[dict[str, Any]]:
    """Return the conversions that still hold of other tensors than the planned ones, as they are stored."""
    names = {change.entry.name for change in plan.changes}
    made = []
    for record in records:
        rows = [
            {
                **each,
                "tensors": {k: layer for k, layer in each["tensors"].items() if k not in names},
            }
            for each in record.values["rows"]
        ]
        left = set(record.left)
        if (record.section, record.model) == (section_of(model), model.name):
            left = left - names if record.interleaved == interleaved else left | names
        if rows := [each for each in rows if each["tensors"]]:
            made.append({**record.values, "left": sorted(left), "rows": rows})
    return made


def entry(
    model: Model, plan: Plan, records: list[Record], to: str, source: str
) -> dict[str, Any] | None:
    """Return the record of a conversion, as it is stored; None if it undoes others."""
    back = undone(plan, records, to)
    rows: dict[str, dict[str, Any]] = {}
    for change in plan.changes:
        spec = model.of(change.layer)
        if change.entry.name not in back and spec is not None:
            at = Record.slice_of(spec)
            made = {"slice": at, **_rows(change), "tensors": {}}
            rows.setdefault(str(made), made)["tensors"][change.entry.name] = change.layer
    if not rows:
        return None
    return {
        "pairing": to,
        "was": source,
        "model": model.name,
        "section": section_of(model),
        "prefixes": sorted({change.prefix for change in plan.changes}),
        "left": sorted(left_apart(model, plan, records, to)),
        "rows": [*rows.values()],
    }


def left_apart(model: Model, plan: Plan, records: list[Record], to: str) -> set[str]:
    """Return the tensors of the same section that the conversion leaves in the other pairing."""
    if not (model.alone or model.naming.several):
        return set()  # other prefixes are those of other sections
    interleaved = to == "interleaved"
    stated: Mapping[str, bool] = {
        name: bool(_of(record, name))
        for name in plan.apart
        for record in records
        if _of(record, name) is not None
    }
    return {name for name in plan.apart if stated.get(name, not interleaved) != interleaved}


def section_of(model: Model) -> str | None:
    """Return the section of the configuration that describes the model; None without a configuration."""
    return None if model.at is None else ".".join(model.at)
