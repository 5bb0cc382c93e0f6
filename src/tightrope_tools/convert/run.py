"""The function `convert`: plan, write next to the target, verify, rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from tightrope import __version__
from tightrope._errors import public

from ..place import placed_file, placed_folder
from ._detect import weigh
from ._fail import basis, fail, pairing_name
from .checkpoint import RECORD, Checkpoint, load_json, open_checkpoint
from .marking import marked
from .model import Model, Stated, describe, read_model
from .plan import Plan, make_plan
from .rewrite import Change, rewrite
from .target import check_target
from .tensors import Weights
from .verify import Copied, Verified, verify

# Largest number of layers whose weights are compared with the stated pairing before a conversion.
_LOOKED_AT = 16

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
    marked: str | None
    verified: Verified | None = None
    notes: tuple[str, ...] = field(default=())
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
    force: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    report: Report | None = None,
) -> Conversion:
    """Rewrite the query and key projections of a checkpoint for the other pairing of channels.

    The rows of projection weights and biases, of query and key norms, and of per-row scales are
    reordered; all other tensors are copied unchanged. A record states the new pairing: for a
    folder, in a file beside the weights; for a single file, in its safetensors metadata or zip
    comment. If the family's code reads the pairing from a key of config.json, that key is set as
    well. Converting back removes the record and gives the original files of weights. Memory does
    not grow with the checkpoint. ``out`` appears only once it is complete.

    Args:
        checkpoint: a safetensors or torch file, an index of shards, or a folder with one of these.
        out: path of the result: a file for a file, a folder for a folder.
        to: ``"half"`` (channel i with i + rotary_dim / 2, like Llama in transformers) or
            ``"interleaved"`` (neighbours, like GPT-J and Meta's Llama).
        stated: facts that the checkpoint's configuration does not state.
        force: replace an older result.
        dry_run: report what would change and write nothing.
        verify: check on random activations that scores are unchanged, before ``out`` appears. This
            shows that the rows moved as they should if the checkpoint had the pairing ``source``, not
            that it had.
        report: called with the fraction done and a short text.

    Returns:
        The changed and unchanged tensors, and notes for using the result.

    Raises:
        ValueError: the checkpoint is of an unknown kind, damaged, quantised, or partly outside its folder;
            a layer lacks the projections that others have; a projection has another number of rows than the
            stated heads, or a layout that is not supported; its pairing is unknown, contradicted by its
            weights, or already ``to``; ``out`` exists; or scores differ. ``out`` stays as it was.
        OSError: files cannot be read or written; partial output is removed.
    """
    if to not in ("half", "interleaved"):
        fail(f"to must be 'half' or 'interleaved' but got {to!r}")
    interleaved = to == "interleaved"
    found = open_checkpoint(Path(checkpoint))
    model = read_model(found, stated or Stated())
    target = Path(out)
    _check_apart(found, target)
    if model.interleaved == interleaved:
        fail(
            f"the checkpoint is already {to} ({basis(model.who, model.assumed)}); --from overrides that"
        )
    plan = make_plan(found, model, every_layer=True)
    given = stated is not None and stated.source is not None
    warnings = _check_weights(plan, model, given)
    files = _result_files(found, model, to)
    check_target(target, folder=found.folder is not None, force=force, writes={*files, RECORD})
    made = replace(_conversion(found, target, model, plan, interleaved, files), warnings=warnings)
    if dry_run:
        return made
    work = _Work(found, model, plan, interleaved, verify, report or (lambda *_: None))
    if found.folder is None:
        with placed_file(target, force) as stream:
            shift = work.one(found.files[0], stream)
            stream.flush()
            proof = work.prove({found.files[0].path: Copied(Path(stream.name), shift)})
    else:
        with placed_folder(target, force) as folder:
            proof = work.folder(folder, made)
    return replace(made, verified=proof, written=True)


def _check_weights(plan: Plan, model: Model, given: bool) -> tuple[str, ...]:
    """Return doubts about the stated pairing; refuse weights that contradict what no user stated."""
    found = weigh(plan, model, layers=_LOOKED_AT)
    whence = basis(found.who, found.assumed)
    if found.pairing is None:
        return (f"the weights do not show their pairing: {found.stated} is only {whence}",)
    if not found.contradicts:
        return ()
    odds = f"by chance at most once in {1.0 / max(found.chance, 1e-99):.0e} cases"
    if given:
        return (f"the weights show {found.pairing}, not {found.stated} ({odds})",)
    fail(
        f"the checkpoint is {found.stated} ({whence}) but its weights show {found.pairing} ({odds}): pass "
        "--from"
    )


def _check_apart(found: Checkpoint, target: Path) -> None:
    """Refuse a target that is the source, lies inside it, or contains it."""
    real = target.resolve()
    sources = [found.path.resolve(), *(weights.path.resolve() for weights in found.files)]
    for source in sources:
        if real == source or (target.exists() and source.exists() and target.samefile(source)):
            fail(f"OUT must differ from the checkpoint but both are {target}")
    home = found.home.resolve()
    if found.folder is not None and (real.is_relative_to(home) or home.is_relative_to(real)):
        fail(f"OUT must not lie inside the checkpoint's folder or contain it but is {target}")


def _result_files(found: Checkpoint, model: Model, to: str) -> tuple[str, ...]:
    if found.folder is None:
        return (found.path.name,)
    weights = [str(each.path.relative_to(found.folder)) for each in found.files]
    index = [found.index.name] if found.index is not None else []
    record = [] if _is_way_back(found.folder, model, to) else [RECORD]
    return (*weights, *map(str, found.others), *index, *record)


def _is_way_back(folder: Path, model: Model, to: str) -> bool:
    """True if the result restores the pairing of the original, which had no record."""
    if not (folder / RECORD).is_file():
        return False
    record = load_json(folder / RECORD)
    source = None if model.interleaved is None else pairing_name(model.interleaved)
    return record.get("pairing") == source and record.get("was") == to


def _conversion(
    found: Checkpoint,
    target: Path,
    model: Model,
    plan: Plan,
    interleaved: bool,
    files: tuple[str, ...],
) -> Conversion:
    mark = model.mark if found.folder is not None and "config.json" in files else None
    to = pairing_name(interleaved)
    notes = []
    if mark is None and model.native != interleaved:
        other = "neighbours" if interleaved else "channel i with i + rotary_dim / 2"
        call = f"RopeSpec(…, interleaved={interleaved})"
        if found.folder is not None and {"config.json", "params.json"} & set(files):
            call = f'RopeSpec.from_config("{target}", interleaved={interleaved})'
        lacks = "the result has no config.json to state the pairing"
        if model.mark is None:
            lacks = f"no key of {model.name} states the pairing"
        notes.append(f"{lacks}: rotate the result by {call}, which pairs {other}")
    if plan.still:
        notes.append(f"layers without RoPE stay as they are: {', '.join(map(str, plan.still))}")
    return Conversion(
        str(found.path),
        str(target),
        pairing_name(not interleaved),
        to,
        model.who,
        describe(model),
        tuple(dict.fromkeys(change.entry.name for change in plan.changes)),
        plan.left,
        plan.still,
        (target.name,) if found.folder is None else files,
        dict(found.ignored),
        found.nbytes,
        mark,
        notes=tuple(notes),
        assumed=model.assumed,
    )


@dataclass(frozen=True)
class _Work:
    """A conversion in progress."""

    found: Checkpoint
    model: Model
    plan: Plan
    interleaved: bool
    verify: bool
    report: Report
    done: list[int] = field(default_factory=lambda: [0])

    def one(self, weights: Weights, stream: IO[bytes]) -> int:
        """Write one file of weights; return by how many bytes its tensors begin later than before."""
        total = max(self.found.nbytes, 1)
        share = 0.8 if self.verify else 1.0

        def progress(count: int) -> None:
            self.done[0] += count
            self.report(share * self.done[0] / total, f"writing {weights.path.name}")

        return rewrite(
            weights,
            self._changes(weights),
            self.interleaved,
            stream,
            progress,
            record=self.found.folder is None,
        )

    def _changes(self, weights: Weights) -> list[Change]:
        return [change for change in self.plan.changes if change.entry.file == weights.path]

    def prove(self, copies: dict[Path, Copied]) -> Verified | None:
        """Verify the copies if requested."""
        if not self.verify:
            return None
        return verify(
            self.plan.changes,
            copies,
            self.model,
            self.interleaved,
            lambda fraction: self.report(0.8 + 0.2 * fraction, "comparing scores"),
        )

    def folder(self, folder: Path, made: Conversion) -> Verified | None:
        """Fill a folder: the weights, the other files, and last the index, configuration and record."""
        source = self.found.folder
        if source is None:
            fail("there is no folder to fill")
        copies = {}
        for weights in self.found.files:
            path = folder / weights.path.relative_to(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x+b") as stream:
                shift = self.one(weights, stream)
                _finish(stream)
            copies[weights.path] = Copied(path, shift)
        proof = self.prove(copies)
        last = ["config.json"]
        if self.found.index is not None:
            last.insert(0, self.found.index.name)
        for name in map(str, self.found.others):
            if name not in last:
                _copy(source / name, folder / name)
        if self.found.index is not None:
            _copy(self.found.index, folder / self.found.index.name)
        if Path("config.json") in self.found.others:
            text = (source / "config.json").read_text(encoding="utf-8")
            if made.marked is not None:
                text = marked(text, self.model.at, made.marked, self.interleaved)
            _write(folder / "config.json", text)
        if RECORD in made.files:
            _write(folder / RECORD, json.dumps(_record(made, proof), indent=2) + "\n")
        return proof


def _record(made: Conversion, proof: Verified | None) -> dict[str, object]:
    return {
        "pairing": made.to,
        "was": made.source,
        "by": f"tightrope {__version__}",
        "model": made.model,
        "files": list(made.files),
        "changed": list(made.changed),
        "verified": None if proof is None else vars(proof),
    }


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as reading, open(target, "xb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
        _finish(writing)


def _write(target: Path, text: str) -> None:
    with open(target, "x", encoding="utf-8", newline="") as writing:
        writing.write(text)
        _finish(writing)


def _finish(stream: object) -> None:
    """Flush a written file to the disk."""
    stream.flush()  # type: ignore[attr-defined]
    os.fsync(stream.fileno())  # type: ignore[attr-defined]
