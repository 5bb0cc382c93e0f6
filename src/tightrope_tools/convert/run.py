"""The function `convert`: plan, copy beside the target, reorder rows in the copy, verify, rename."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightrope import __version__
from tightrope._errors import public
from tightrope.config import keys
from tightrope.config.files import Record

from ..place import placed
from ._detect import weigh
from .files import Checkpoint, Entry, fail, header_with, open_checkpoint, read_header
from .model import Model, Stated, basis, describe, pairing_name, read_model
from .plan import Change, Plan, make_plan
from .record import after, known, settled
from .verify import Verified, verify as compare

_BUFFER = 8 << 20

Report = Callable[[float, str], None]


@dataclass(frozen=True)
class Conversion:
    """The report of a conversion; with ``dry_run``, of the conversion that would be done.

    Attributes:
        checkpoint, out: the paths.
        source, to: the pairings: ``"half"`` or ``"interleaved"``.
        source_from: what states ``source``: a kind of configuration, a record, or the user.
        model: the model in one line.
        changed: names of the tensors whose rows moved.
        left: names of the tensors that kept their bytes.
        layers_without_rope: layers whose projections stay.
        files: the files of the result.
        ignored: files of the folder that are not in the result: name -> reason.
        disk: the size of the result on the disk, in bytes.
        marked: the key of the result's config.json that states the pairing; None if there is none.
        verified: the result of the verification; None without ``verify`` and with ``dry_run``.
        notes: advice for using the result.
        written: whether the result was written.
        assumed: whether ``source`` is only the pairing of the family's code, which no file states.
        warnings: doubts about ``source``: the weights show the other pairing, or none.
    """

    checkpoint: str
    out: str
    source: str
    to: str
    source_from: str
    model: str
    changed: tuple[str, ...]
    left: tuple[str, ...]
    layers_without_rope: tuple[int, ...]
    files: tuple[str, ...]
    ignored: dict[str, str]
    disk: int
    marked: str | None
    verified: Verified | None = None
    notes: tuple[str, ...] = ()
    written: bool = False
    assumed: bool = False
    warnings: tuple[str, ...] = ()


@public("convert")
def convert(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str,
    stated: Stated | None = None,
    dry_run: bool = False,
    verify: bool = False,
    report: Report | None = None,
) -> Conversion:
    """Rewrite the query and key projections of a checkpoint for the other pairing of channels.

    The rows of projection weights and biases, of query and key norms, and of per-row scales are
    reordered; all other tensors are copied unchanged. A record names the changed tensors and states
    their pairing, and that of no others: for a folder, in a file beside the weights; for a single
    file, in its metadata. If the family's code reads the pairing from a key of config.json, that key
    is set as well. Converting back removes the record of what is undone, and gives the original files of
    weights. Memory does not grow with the checkpoint.
    ``out`` appears only once it is complete; until then it is written in the folder `<out>.partial`.

    Args:
        checkpoint: a safetensors file, an index of shards, or a folder with one of these.
        out: path of the result, which must not exist: a file for a file, a folder for a folder.
        to: ``"half"`` (channel i with i + rotary_dim / 2, like Llama in transformers) or
            ``"interleaved"`` (neighbours, like GPT-J and Meta's Llama).
        stated: facts that the checkpoint's configuration does not state.
        dry_run: report what would change and write nothing.
        verify: check on random activations that scores are unchanged, before ``out`` appears. This
            shows that the rows moved as they should if the checkpoint had the pairing that ``source`` of the
            result states, not that it had.
        report: called with the fraction done and a short text.

    Returns:
        The changed and unchanged tensors, and notes for using the result.

    Raises:
        ValueError: the checkpoint is of an unknown kind, damaged, quantised, or partly outside its folder;
            a layer lacks the projections that others have; a projection has another number of rows than the
            stated heads, or a layout that is not supported; its pairing is unknown, contradicted by its
            weights, or already ``to``; ``out`` exists; or scores differ.
        OSError: files cannot be read or written, or the disk has too little space; nothing is left of the result.
    """
    if to not in ("half", "interleaved"):
        fail(f"to must be 'half' or 'interleaved' but got {to!r}")
    interleaved = to == "interleaved"
    found, target = open_checkpoint(Path(checkpoint)), Path(out)
    model, records = read_model(found, stated or Stated()), known(found)
    _check_target(found, target)
    plan = make_plan(found, model, every_layer=True)
    model = settled(found, model, plan, records)
    if model.interleaved is None:
        fail(
            f"the pairing of the checkpoint must be known, and {model.who} does not state it: pass --from, after "
            "`tightrope detect`"
        )
    if model.interleaved == interleaved:
        other = pairing_name(not interleaved)
        hint = f"if it is not, pass --from {other}"
        if any(model.who == record.source for record in records):
            hint = f"--to {other} converts it back"
        fail(
            f"the checkpoint is already {to} ({basis(model.who, model.assumed)}); {hint}, and for another part of it "
            "--section or --prefix"
        )
    warnings = _check_weights(plan, model)
    stored = after(model, plan, records, to)
    made = replace(_conversion(found, target, model, plan), warnings=warnings)
    if found.folder is not None and stored:
        made = replace(made, files=(*made.files, Record.file))
    if dry_run:
        return made
    free = shutil.disk_usage(target.parent).free
    if free < made.disk:
        why = f"the result needs {made.disk:,} bytes but the disk has {free:,} bytes free"
        raise OSError(errno.ENOSPC, why, str(target))
    with placed(target) as result:
        copies = _copy(found, stored, result, report or (lambda *_: None))
        reorder(plan.changes, copies, interleaved)
        proof = compare(plan.changes, copies, interleaved) if verify else None
        if made.marked is not None:
            _mark(result / "config.json", model.at or (), made.marked, interleaved)
        if Record.file in made.files:
            by = f"tightrope {__version__}"
            record = {"by": by, "files": made.files, "conversions": stored}
            (result / Record.file).write_bytes(f"{json.dumps(record, indent=2)}\n".encode())
    return replace(made, verified=proof, written=True)


def _check_target(found: Checkpoint, target: Path) -> None:
    if not target.parent.is_dir():
        fail(f"OUT must be in an existing folder but {target.parent} does not exist")
    if os.path.lexists(target):
        fail(f"OUT must not exist yet but {target} does: remove it, or choose another name")
    if found.folder is not None and target.resolve().is_relative_to(found.folder.resolve()):
        fail(f"OUT must not lie inside the checkpoint's folder but is {target}")


def _check_weights(plan: Plan, model: Model) -> tuple[str, ...]:
    """Return doubts about the stated pairing; refuse weights that contradict what no user stated."""
    found = weigh(plan, model)
    whence = basis(found.who, found.assumed)
    if found.pairing is None:
        return (f"the weights do not show their pairing: {found.stated} is only {whence}",)
    if not found.contradicts:
        return ()
    odds = f"by chance at most once in {1.0 / max(found.chance, 1e-99):.0e} cases"
    if model.stated.source is not None:
        return (f"the weights show {found.pairing}, not {found.stated} ({odds})",)
    fail(
        f"the checkpoint is {found.stated} ({whence}) but its weights show {found.pairing} ({odds}): pass "
        "--from"
    )


def _conversion(found: Checkpoint, target: Path, model: Model, plan: Plan) -> Conversion:
    """Return the report of a conversion that is not done yet."""
    interleaved = not model.interleaved
    # A key states one pairing for all layers of its section.
    mark = model.mark if "config.json" in found.others and not plan.partial else None
    notes = []
    if mark is None and model.native != interleaved:
        part = "the changed tensors" if plan.partial else ".".join(model.at or ()) or "the result"
        pairs = "neighbours" if interleaved else "channel i with i + rotary_dim / 2"
        notes.append(
            f"no key of a configuration states the pairing: rotate {part} by RopeSpec(…, interleaved={interleaved}), "
            f"which pairs {pairs}; docs/convert.md shows how in transformers"
        )
    if plan.still:
        notes.append(f"layers without RoPE stay as they are: {', '.join(map(str, plan.still))}")
    return Conversion(
        checkpoint=str(found.path),
        out=str(target),
        source=pairing_name(not interleaved),
        to=pairing_name(interleaved),
        source_from=model.who,
        model=describe(model),
        changed=tuple(change.entry.name for change in plan.changes),
        left=plan.left,
        layers_without_rope=plan.still,
        files=tuple(goal.as_posix() for goal in _goals(found).values()) or (target.name,),
        ignored=found.ignored,
        disk=sum(
            path.stat().st_size
            for path in (*found.files, *(found.home / name for name in found.others))
        ),
        marked=mark,
        notes=tuple(notes),
        assumed=model.assumed,
    )


# --- the result -----------------------------------------------------------------------------------


def _goals(found: Checkpoint) -> dict[Path, Path]:
    """Return the files of a folder that are copied, with their paths in the result; none for a single file."""
    if found.folder is None:
        return {}
    paths = [*found.files, *(found.folder / name for name in found.others)]
    return {path: path.relative_to(found.folder) for path in paths}


def _copy(
    found: Checkpoint, stored: list[dict[str, Any]], result: Path, report: Report
) -> dict[str, Entry]:
    """Copy the files; only a single file of weights has records in it. Return the tensors of the copy by name."""
    goals = {path: result / goal for path, goal in _goals(found).items()} or {found.path: result}
    for number, (source, goal) in enumerate(goals.items()):
        report(number / len(goals), f"writing {source.name}")
        goal.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as reading, open(goal, "xb") as writing:
            records = [] if found.folder else stored
            if found.files.get(source) or (source in found.files and records):
                header = reading.read(int.from_bytes(reading.read(8), "little"))
                header = header_with(header, records)
                writing.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(reading, writing, _BUFFER)
    report(1.0, "")
    copies = (read_header(goals[path])[0] for path in found.files)
    return {entry.name: entry for entries in copies for entry in entries}


def reorder(changes: Iterable[Change], copies: dict[str, Entry], interleaved: bool) -> None:
    """Reorder rows of the copy in place, through a memory map of one tensor at a time."""
    for change in changes:
        rows = copies[change.entry.name].mapped(change.units, write=True)
        for start in (*change.queries, *change.keys):
            head, half = rows[start : start + change.width], change.width // 2
            pairs = head.view(2, half, -1) if interleaved else head.view(half, 2, -1)
            head.copy_(pairs.transpose(0, 1).reshape(head.shape))


def _mark(path: Path, at: tuple[str, ...], key: str, interleaved: bool) -> None:
    """State the pairing in a configuration, in the form in which transformers writes it."""
    values = json.loads(path.read_text("utf-8"))
    section = values
    for name in at:
        section = section.get(name)
        if not isinstance(section, dict):
            fail(
                f"config.json must have the section {'.'.join(at)} of the given configuration but has not"
            )
    value = interleaved == keys.PAIRING[key]
    if section.get(key) is not value:
        section[key] = value
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
