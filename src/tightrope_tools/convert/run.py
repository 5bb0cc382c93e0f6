"""The function `convert`: plan, copy beside the target, reorder rows in the copy, verify, rename."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from tightrope import __version__
from tightrope._errors import public
from tightrope.config import keys
from tightrope.config.files import NAMES, Record

from ..place import placed
from ._detect import weigh
from .files import (
    Checkpoint,
    Entry,
    fail,
    header_with,
    open_checkpoint,
    read_header,
    shown,
)
from .model import Model, Stated, basis, describe, pairing_name, read_model
from .plan import Change, Plan, make_plan
from .record import beside, entry, kept, known, left_apart, section_of, settled
from .verify import Verified, verify as compare

# Largest number of layers whose weights are compared with the stated pairing before a conversion.
_LOOKED_AT = 16
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
        nbytes: the size of the files of weights, in bytes.
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
    nbytes: int
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
    is set as well. Converting back removes the record of what is undone, and gives the original files of weights. Memory does not grow with the checkpoint.
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
    found = open_checkpoint(Path(checkpoint))
    model, records = read_model(found, stated or Stated()), known(found)
    target = Path(out)
    _check_target(found, target)
    plan = make_plan(found, model, every_layer=True)
    model = settled(found, model, plan, records)
    if model.interleaved is None:
        fail(
            f"the pairing of the checkpoint must be known, and {model.who} does not state it: pass --from, after "
            "`tightrope detect`"
        )
    if model.interleaved == interleaved:
        _refuse_done(model, records, to)
    warnings = _check_weights(plan, model)
    new = entry(model, plan, records, to, pairing_name(not interleaved))
    here = records if found.folder is None else beside(found)
    listed = kept(here, model, plan, interleaved) + ([] if new is None else [new])
    made = _conversion(found, target, model, plan, interleaved, listed)
    made = replace(made, warnings=warnings)
    if dry_run:
        return made
    free = shutil.disk_usage(target.parent).free
    if free < made.disk:
        why = f"the result needs {made.disk:,} bytes but the disk has {free:,} bytes free"
        raise OSError(errno.ENOSPC, why, str(target))
    report = report or (lambda *_: None)
    with placed(target) as result:
        stored = {
            path: listed if found.folder is None else kept(each, model, plan, interleaved)
            for path, each in found.files.items()
        }
        copies = _copy(found, made, stored, result, report, 0.8 if verify else 1.0)
        _reorder(plan.changes, copies, interleaved)
        proof = None
        if verify:
            proof = compare(plan.changes, copies, model, interleaved, report)
        if new is not None:
            new["verified"] = None if proof is None else vars(proof)
        if found.folder is not None:
            _mark(result, made, model, interleaved, listed)
    return replace(made, verified=proof, written=True)


def _refuse_done(model: Model, records: list[Record], to: str) -> NoReturn:
    """Refuse a conversion to the pairing that the tensors have, and name sections that were converted."""
    other = "half" if to == "interleaved" else "interleaved"
    text = f"the checkpoint is already {to} ({basis(model.who, model.assumed)}); if it is not, pass --from {other}"
    own = section_of(model)
    every = {record.section for record in records if record.values["pairing"] == other}
    rest = {section for section in every if section is not None and section != own}
    if rest:
        text += f"; for another part of it, which a record states to be {other}, pass --section {min(rest) or repr('')}"
    fail(text)


def _check_target(found: Checkpoint, target: Path) -> None:
    if not target.name:
        fail(f"OUT must have a name but got {str(target)!r}")
    if not target.parent.is_dir():
        fail(f"OUT must be in an existing folder but {target.parent} does not exist")
    if os.path.lexists(target):
        fail(f"OUT must not exist yet but {target} does: remove it, or choose another name")
    if found.folder is not None and target.resolve().is_relative_to(found.folder.resolve()):
        fail(f"OUT must not lie inside the checkpoint's folder but is {target}")


def _check_weights(plan: Plan, model: Model) -> tuple[str, ...]:
    """Return doubts about the stated pairing; refuse weights that contradict what no user stated."""
    found = weigh(plan, model, layers=_LOOKED_AT)
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


def _conversion(
    found: Checkpoint,
    target: Path,
    model: Model,
    plan: Plan,
    interleaved: bool,
    listed: list[dict[str, Any]],
) -> Conversion:
    to, source = pairing_name(interleaved), pairing_name(not interleaved)
    files = [target.name]
    if found.folder is not None:
        files = [path.relative_to(found.folder).as_posix() for path in found.files]
        files += found.others
        files += [Record.file] * bool(listed)
    left = left_apart(model, plan, known(found), to)
    # A key states one pairing for all layers.
    mark = model.mark if "config.json" in found.others and not left else None
    weights = sum(path.stat().st_size for path in found.files)
    disk = weights + sum((found.home / name).stat().st_size for name in found.others)
    notes = []
    if mark is None and model.native != interleaved:
        other = "neighbours" if interleaved else "channel i with i + rotary_dim / 2"
        lacks = "the result has no config.json to state the pairing"
        if model.mark is None:
            lacks = f"no key of {model.name} states the pairing"
        if left:
            lacks = f"projections under other prefixes stay {source} ({shown(sorted(left), 1)})"
        call = _call(found, target, model, interleaved)
        whole = f"{section_of(model)} of the result" if model.at else "the result"
        what = "those that changed" if left else whole
        notes.append(
            f"{lacks}: rotate {what} by {call}, which pairs {other}; in transformers as docs/convert.md shows"
        )
    if plan.still:
        notes.append(f"layers without RoPE stay as they are: {', '.join(map(str, plan.still))}")
    return Conversion(
        str(found.path),
        str(target),
        source,
        to,
        model.who,
        describe(model),
        tuple(change.entry.name for change in plan.changes),
        plan.left,
        plan.still,
        tuple(files),
        found.ignored or {},
        weights,
        disk,
        mark,
        notes=tuple(notes),
        assumed=model.assumed,
    )


def _call(found: Checkpoint, target: Path, model: Model, interleaved: bool) -> str:
    """The call that makes the spec of the converted tensors from the configuration that was read."""
    config, pairing = model.stated.config, f"interleaved={interleaved}"
    if model.at is None or (config is None and not {*NAMES} & {*found.others}):
        return f"RopeSpec(…, {pairing})"
    where = "config"
    if config is None or isinstance(config, str | os.PathLike):
        where = f'"{target if config is None else os.fspath(config)}"'
    section = [f"section={'.'.join(model.at)!r}"] * bool(model.at)
    return f"RopeSpec.from_config({', '.join([where, *section, pairing, *model.more])})"


# --- the result -----------------------------------------------------------------------------------


def _copy(
    found: Checkpoint,
    made: Conversion,
    stored: Mapping[Path, list[dict[str, Any]]],
    result: Path,
    report: Report,
    share: float,
) -> dict[str, Entry]:
    """Copy the files, with the records to store in those of weights; return the tensors of the copy by name."""
    done = 0
    copies: dict[str, Entry] = {}
    pairs = dict.fromkeys(found.files, result)
    if found.folder is not None:
        pairs = {found.folder / name: result / name for name in made.files if name != Record.file}
    for source, target in pairs.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as reading, open(target, "xb") as writing:
            if stored.get(source) or found.files.get(source):
                header = reading.read(int.from_bytes(reading.read(8), "little"))
                header = header_with(header, stored[source])
                writing.write(len(header).to_bytes(8, "little") + header)
            while part := reading.read(_BUFFER):
                writing.write(part)
                done += len(part)
                report(share * min(done / max(made.disk, 1), 1.0), f"writing {source.name}")
        if source in found.files:
            copies |= {entry.name: entry for entry in read_header(target)[0]}
    return copies


def _reorder(changes: Iterable[Change], copies: dict[str, Entry], interleaved: bool) -> None:
    """Reorder rows of the copy in place; memory holds one head."""
    for change in changes:
        entry = copies[change.entry.name]
        unit = entry.nbytes // change.units
        size = change.width * unit
        order = [source_row(row, change.width, interleaved) for row in range(change.width)]
        with open(entry.file, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
            for start in (*change.queries, *change.keys):
                begin = entry.offset + start * unit
                rows = view[begin : begin + size]
                moved = (rows[n * unit : (n + 1) * unit] for n in order)
                view[begin : begin + size] = b"".join(moved)
            view.flush()


def source_row(row: int, width: int, interleaved: bool) -> int:
    """Return which of a head's ``width`` rotated rows moves to place ``row``.

    Args:
        interleaved: whether the rows become interleaved; otherwise they become half.

    >>> [source_row(row, 6, True) for row in range(6)]
    [0, 3, 1, 4, 2, 5]
    >>> [source_row(row, 6, False) for row in range(6)]
    [0, 2, 4, 1, 3, 5]
    """
    half = width // 2
    if interleaved:
        return row // 2 + row % 2 * half
    return 2 * row if row < half else 2 * (row - half) + 1


def _mark(
    folder: Path, made: Conversion, model: Model, interleaved: bool, listed: list[dict[str, Any]]
) -> None:
    """State the pairing in the configuration, if its family's code reads it there, and in a record."""
    if made.marked is not None:
        path = folder / "config.json"
        text = marked(path.read_bytes().decode(), model.at or (), made.marked, interleaved)
        path.write_bytes(text.encode())
    if Record.file in made.files:
        by = f"tightrope {__version__}"
        record = {"by": by, "files": made.files, "conversions": listed}
        (folder / Record.file).write_bytes(f"{json.dumps(record, indent=2)}\n".encode())


def marked(text: str, at: tuple[str, ...], key: str, interleaved: bool) -> str:
    """Return a configuration that states the pairing. If possible, only the bytes of the key change.

    Args:
        text: a JSON object.
        at: the keys that lead to the section.
        key: a key of :data:`tightrope.config.keys.PAIRING`.
        interleaved: the pairing to state.

    >>> marked('{"rope_interleave": true}', (), "rope_interleave", False)
    '{"rope_interleave": false}'
    """
    value = interleaved == keys.PAIRING[key]
    wanted = json.loads(text)
    section = wanted
    for name in at:
        if not isinstance(section.get(name), dict):
            fail(
                f"config.json must have the section {'.'.join(at)} of the given configuration but has not"
            )
        section = section[name]
    if section.get(key) is value:
        return text
    section[key] = value
    literal = "true" if value else "false"
    attempts = [re.sub(rf'("{key}"\s*:\s*)(?:true|false|null)', rf"\g<1>{literal}", text)]
    if not at:
        attempts.append(re.sub(r"\A(\s*\{)(\s*)", rf'\g<1>\g<2>"{key}": {literal},\g<2>', text))
    for attempt in attempts:
        try:
            if json.loads(attempt) == wanted:
                return attempt
        except ValueError:
            continue
    return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
