"""Records of conversions: each names the tensors that it changed, and states the pairing of these alone.

A folder has the record in a file beside its weights, a single file in its metadata.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tightrope.config.files import Record, load

from .files import Checkpoint, fail, shown
from .model import Model, pairing_name
from .plan import Change, Plan


def known(checkpoint: Checkpoint) -> list[Record]:
    """Return the conversions that are recorded of a checkpoint, in its files of weights and beside them.

    Raises:
        ValueError: the record is not one.
    """
    found = [one for each in checkpoint.files.values() for one in each]
    path, file = checkpoint.home / Record.file, checkpoint.path.name
    values = load(path) if path.is_file() else {}
    if values and (checkpoint.folder or file in (values.get("files") or [])):
        found += Record.listed(values.get("conversions"), Record.file)
    return found


def settled(checkpoint: Checkpoint, model: Model, plan: Plan, records: list[Record]) -> Model:
    """Return the model with the pairing that records state of the planned tensors, if no user states it.

    Raises:
        ValueError: records disagree, are about a part of the tensors, about other rows of them, or about tensors that
            the checkpoint does not have, perhaps because they were renamed.
    """
    if model.stated.source is not None:
        return model
    names = {change.entry.name for change in plan.changes}
    lost = {name for record in records for name in record.tensors} - {*plan.left, *names}
    told = {name: _told(name, records) for name in names}
    stated = [pair for each in told.values() for pair in each.items()]
    if lost and not stated and checkpoint.folder is not None:
        fail(
            f"the tensors of a conversion record must be in the checkpoint but {shown(sorted(lost))} are not, perhaps "
            f"because they were renamed: pass --from, or remove {records[0].where} if it is about other weights"
        )
    if not stated:
        return model
    bare = sorted(name for name, each in told.items() if not each)
    if bare or len({interleaved for _, interleaved in stated}) > 1:
        parts = [f"{where}: {pairing_name(pairing)}" for where, pairing in sorted({*stated})]
        parts += [f"nothing about {shown(bare, 1)}"] * bool(bare)
        fail(
            f"conversion records must agree but state {', '.join(parts)}: pass --from if all have one pairing"
        )
    for change in plan.changes:
        for record in records:
            if change.entry.name in record.tensors and not _same_rows(record, change):
                fail(
                    f"{record.where} must be about the rows of {change.entry.name} that would move but states others: "
                    "state the slice, heads and packing of that conversion, or pass --from"
                )
    first = next(record for record in records if record.tensors & names)
    return replace(model, interleaved=first.interleaved, who=first.source, assumed=False)


def _told(name: str, records: list[Record]) -> dict[str, bool]:
    """Return what records state of a tensor: file of the record -> whether the tensor is interleaved."""
    return {record.where: record.interleaved for record in records if name in record.tensors}


def _same_rows(record: Record, change: Change) -> bool:
    """True if a record is about the rows of a tensor that a change moves."""
    rows = next(rows for rows in record.values["rows"] if change.entry.name in rows["tensors"])
    same: bool = _rows(change) == {key: rows.get(key) for key in ("width", "first_rows")}
    return same


def _rows(change: Change) -> dict[str, Any]:
    return {"width": change.width, "first_rows": [*change.queries, *change.keys]}


def after(model: Model, plan: Plan, records: list[Record], to: str) -> list[dict[str, Any]]:
    """Return the records after a conversion, as they are stored: those of other tensors, and its own.

    It has none of tensors that get back the order of rows that they had before.
    """
    names = {change.entry.name for change in plan.changes}
    made = []
    for record in records:
        parts = [
            {**rows, "tensors": {k: n for k, n in rows["tensors"].items() if k not in names}}
            for rows in record.values["rows"]
        ]
        if rows := [each for each in parts if each["tensors"]]:
            made.append({**record.values, "rows": rows})
    own: dict[str, dict[str, Any]] = {}
    for change in plan.changes:
        back = any(
            change.entry.name in record.tensors
            and record.values.get("was") == to
            and _same_rows(record, change)
            for record in records
        )
        spec = model.of(change.layer)
        if spec is not None and not back:
            one = {"slice": Record.slice_of(spec), **_rows(change), "tensors": {}}
            own.setdefault(str(one), one)["tensors"][change.entry.name] = change.layer
    if own:
        values = {
            "pairing": to,
            "was": pairing_name(to != "interleaved"),
            "model": model.name,
            # Of a part of a section, no section is known.
            "section": None if model.at is None or plan.partial else ".".join(model.at),
            "prefixes": sorted({change.prefix for change in plan.changes}),
            "left": [],
            "rows": [*own.values()],
        }
        made.append(values)
    return made
