"""Compare the spec of a model type of transformers, read from its configuration as a file, with what a model does.

A small model of the type runs once, patched, and its calls of the operator are recorded: the pairing, the channels, the
layer and the angles of each token. The status of a row is:

- equal: every layer rotates by its spec and no other layer rotates; of a model with several parts, the layers of the
  part that a plain call reads;
- refused: `from_config` reads no spec, for the given reason;
- different: a call has another pairing, other channels or other angles;
- not tried: no small model shows the rotation, for the given reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from tightrope import RopeSpec, patch
from tightrope.config import LayerSpecs, families, provenance
from tightrope.ops import schema

from . import rows, small
from .runs import Subject, mapped

# Tables of float32 at small positions.
CLOSE = 2e-4
BACK = "the direction"
SECTIONS = ("rope_parameters", "rope_theta", "rope_scaling")


class Call(NamedTuple):
    """One call of the operator, and what it did.

    Attributes:
        path: the module that called it.
        width: the number of channels of the rotated tensor.
        angles: of the first row: `[tokens][pairs]`.
    """

    path: str
    width: int
    start: int
    interleaved: bool
    angles: list[list[float]]

    @property
    def layer(self) -> int:
        """The last number in the path."""
        return int((re.findall(r"\d+", self.path) or ["0"])[-1])

    @property
    def part(self) -> str:
        """The path without the numbers of layers."""
        return re.sub(r"\d+", "#", self.path)


class _Recorder(TorchDispatchMode):
    """Record the calls of the operator by tables."""

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tightrope" and func.__name__.startswith("rotate"):
            x, _, cos, sin, _, _, packed, *_ = args
            given = schema.options_of(packed)
            source = schema.SOURCES[given.source]
            apart = source == "repeat" or (source == "full" and given.interleaved)
            pairs = cos.shape[-1] // (1 if source == "half" else 2)
            some = slice(None, None, 2) if apart else slice(pairs)
            angles = torch.atan2(sin.double(), cos.double())[0, ..., some]
            # Where each head has a table and one token, heads are the model's tokens.
            angles = angles[:, 0] if angles.shape[1] == 1 else angles[0]
            _, _, path = max(self._modules.parents, key=len).partition(".")
            place = path, x.shape[-1], given.start, given.interleaved
            self.calls.append(Call(*place, angles.tolist()))
        return func(*args, **(kwargs or {}))


def calls_of(subject: Subject) -> list[Call]:
    """Run a small model, patched, and return its calls of the operator, without those of indexers."""
    with (
        patch(subject.model, rounding="once", all_models=True),
        torch.no_grad(),
        ModuleTracker() as modules,
        _Recorder(modules) as recorder,
    ):
        subject.called(**mapped(torch.clone, subject.inputs))
    return [call for call in recorder.calls if "indexer" not in call.path]


def differs(call: Call, spec: RopeSpec) -> str:
    """Return how a call differs from a spec; empty if it does not."""
    if call.interleaved != spec.interleaved:
        return f"the pairing of {call.part}"
    pairs = len(call.angles[0]) if call.angles else 0
    # Some models cut the rotated channels out of a head first.
    whole = call.width == spec.head_dim and call.start == spec.start
    if 2 * pairs != spec.rotary_dim or not (whole or call.width == spec.rotary_dim):
        return f"the channels of {call.part}"
    owners = [0] * pairs if spec.axes is None else [axis for axis, _, _ in spec.axes.pairs]
    width = len(set(owners))
    omega = [float(one) for one in spec.frequencies(1).exact]
    # The first token may be one of a class, with angles of its own.
    found: list[float] = []
    for token, angles in enumerate(call.angles[1:14], 1):
        for axis in sorted(set(owners)):
            own = [(omega[k], angles[k]) for k, owner in enumerate(owners) if owner == axis]
            place = _coordinate(own)
            if place is None:
                return f"the angles of token {token} in {call.part}"
            found.append(place)
    # The column, the last coordinate, is the one that changes from patch to patch of a row.
    places = [found[at : at + width] for at in range(0, len(found), width)]
    for one, later in pairwise(places) if width > 1 else ():
        changed = [axis for axis in range(width) if abs(one[axis] - later[axis]) > 1e-3]
        if len(changed) == 1 and changed != [width - 1]:
            return f"the order of the coordinates of {call.part}"
    # Positions in a text do not decrease. One step back is that of a model whose positions start again.
    back = sum(later < one for one, later in pairwise(found))
    if width == 1 and pairs > 1 and back > 1:  # one pair alone has no order of turns
        return f"{BACK} of {call.part}"
    return ""


def _coordinate(pairs: list[tuple[float, float]]) -> float | None:
    """Return the coordinate that rotates every pair (frequency, angle), the nearest to 0; None if there is none."""
    first, angle = max(pairs)
    for turns in sorted(range(-200, 201), key=abs):
        at = (angle + math.tau * turns) / (first or 1.0)
        if all(abs(math.remainder(at * omega - other, math.tau)) < CLOSE for omega, other in pairs):
            return at
    return None


def compared(specs: RopeSpec | LayerSpecs | None, calls: list[Call]) -> str:
    """Return how the calls of one part of a model differ from its specs; empty if they do not."""
    seen, back = set(), {}
    for call in calls:
        spec = specs.of(call.layer) if isinstance(specs, LayerSpecs) else specs
        if spec is None:
            return f"layer {call.layer} of {call.part} rotates"
        why = differs(call, spec)
        if why and not why.startswith(BACK):
            return why
        if why:
            back[call.layer] = why
        else:
            seen.add(call.layer)
    # Others also rotate what attention returns, backwards.
    if alone := [why for layer, why in back.items() if layer not in seen]:
        return alone[0]
    layers = specs.layers if isinstance(specs, LayerSpecs) else None
    for layer in range(len(layers or ())):
        if specs.of(layer) is not None and layer not in seen:  # type: ignore[union-attr]
            return f"layer {layer} does not rotate"
    return ""


def row(name: str) -> rows.Row:
    """The row of a model type."""
    try:
        subject, _ = small.prepare(name)
        restore_tables(subject.model)
        calls = calls_of(subject)
    except Exception as error:  # noqa: BLE001 - recorded as the reason; the run continues
        reason = rows.sentence(error).partition(". ")[0]
        return {"model": name, "status": "not tried", "reason": reason}
    if not calls:
        return {"model": name, "status": "not tried", "reason": "no call of the operator"}
    config = file_of(subject.model)
    try:
        found = provenance(config)
    except (ValueError, NotImplementedError) as error:
        return {"model": name, "status": "refused", "reason": _said(error)}
    # Of a model with several parts, one must agree.
    named = str(found.rows[0].source if found.rows else "")
    first = named.partition(".")[0]
    inner = config.get(first)
    nested = isinstance(inner, dict) and "model_type" in inner
    nested |= not any(key in config for key in SECTIONS)
    parts = defaultdict(list)
    for call in calls:
        parts[call.part if nested else ""].append(call)
    wrong = [compared(found.spec, each) for each in parts.values()]
    if all(wrong):
        return {"model": name, "status": "different", "reason": wrong[0]}
    out = {"model": name, "status": "equal"}
    if nested and "." in named:
        out["part"] = first
    try:
        given = type(subject.model.config).from_dict(config)
        return out if provenance(given).spec == found.spec else {**out, "object": "another spec"}
    except ValueError as error:
        return {**out, "object": _said(error)}


def _said(error: Exception) -> str:
    return str(error).removeprefix("[from_config] ")


@torch.no_grad()
def restore_tables(model: torch.nn.Module) -> None:
    """Set tables of sines and cosines that are parameters, which a small model gets at random, as their classes do."""
    for module in model.modules():
        if hasattr(module, "create_weight"):
            module.weight.copy_(module.create_weight())


def file_of(model: Any) -> dict[str, Any]:
    """The configuration of a small model as a file, with sections that fit its pairs."""
    found: dict[str, Any] = fitted(json.loads(json.dumps(model.config.to_dict(), default=str)))
    return found


def fitted(config: Any) -> Any:
    """The configuration with sections that fit its pairs: interleaved ones that do not are cut off by the models."""
    if not isinstance(config, dict):
        return config
    made = {key: fitted(value) for key, value in config.items()}
    family = families.FAMILIES.get(str(config.get("model_type")))
    rope = made.get("rope_parameters") or {}
    for section in (rope, *rope.values()):
        if not isinstance(section, dict) or not section.get("mrope_section"):
            continue
        if family is not None and family.axes == "interleaved sections":
            width = made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]
            pairs = int(width * section.get("partial_rotary_factor", 1)) // 2
            _, *others = section["mrope_section"]
            cut = [min(size, (pairs - axis + 2) // 3) for axis, size in enumerate(others, 1)]
            section["mrope_section"] = [pairs - sum(cut), *cut]
    return made
