"""Exact angles for the modules that make cosines and sines (``patch(angles="exact")``)."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import angles as exact_angles, positions as positions_
from ..config import LayerSpecs
from ..forms import WIDTHS, signature, widen
from ..frequencies import Given
from ..spec import RopeSpec
from ._classes import base_of
from ._summary import Entry

# Probe positions, and the float32 error that the original may have: relative to the angle, and absolute.
_SMALL = (3, 1, 7, 2, 12, 40)
_ANGLE, _VALUE = 6e-7, 4e-6
# Lengths at which modules may raise an error: some have a table with a row per position. The first are
# those of whole rows, the others those of sequences of which a row has a few positions.
_LONG = 300, 2**13 + 1
_FARTHER = 2**13, 2**15, 2**17, 2**20
# A module that holds so many numbers more after a call has made such a table, and is tried no farther.
_TABLE = 2**20
# The number of values of a buffer by which a change is noticed.
_SAMPLE = 2**12
# Relative and absolute error of a cast of frequencies to bfloat16 or float16.
_CAST, _CAST_TINY = 2**-8, 2**-24

# Names of classes that the report lists even if their forward does not take positions.
_NAME = re.compile(r"(Rotary|Rope|RoPE)\w*Emb")

# Attributes that the original forward reads at every call: those of the module, and those of its
# config if frequencies depend on the length.
_OF_MODULE = re.compile(r"rope_type$|attention_scaling$")
_OF_CONFIG = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")

# The dtypes of position_ids for which exact angles are served.
_IDS = torch.int64, torch.int32

# The reason in the report if a model or file has no module that makes angles.
NO_ANGLES = "takes (x, position_ids), as modules of transformers that make angles do, so angles stay as they are"


@dataclass(frozen=True)
class _Buffer:
    """The name, the shape and some values of a buffer."""

    name: str
    shape: torch.Size
    values: torch.Tensor

    @classmethod
    def of(cls, name: str, buffer: torch.Tensor) -> _Buffer:
        return cls(name, buffer.shape, _some_of(buffer).clone())

    def has_values_of(self, other: torch.Tensor) -> bool:
        """Return True if a buffer has these values, or their roundings to 16 bits."""
        if hasattr(other, "to_local"):  # a DTensor; that of a part has another shape
            other = other.to_local()
        try:
            found = _some_of(other).to(self.values)
            if other.shape != self.shape or not found.is_floating_point():
                return other.shape == self.shape and torch.equal(found, self.values)
            return torch.allclose(found, self.values, _ANGLE, 0.0) or any(
                torch.equal(found, self.values.to(dtype).to(found.dtype))
                for dtype in (torch.bfloat16, torch.float16)
            )
        except Exception:  # noqa: BLE001
            return False  # of another kind, or without values


def _some_of(buffer: torch.Tensor) -> torch.Tensor:
    """About _SAMPLE of the values of a buffer, in all of its columns."""
    return buffer.detach().reshape(-1)[:: buffer.numel() // _SAMPLE | 1]


@dataclass(frozen=True)
class Angles:
    """The cosines and sines that a module makes, as plain data that pickles with the model.

    Attributes:
        specs: the spec of each layer type; the type is None if the module has no layer types.
        width: the format of the tables, a key of WIDTHS.
        factors: the factor on the tables of each layer type, beyond the amplitude of its spec.
        ranks: the ranks of position_ids that agreed in the probes: 2, or 3 with coordinates first.
        wide: whether tables for a 16-bit x are float32 too, instead of having the dtype of x.
        buffers: the buffers from which the module made these angles.
    """

    specs: tuple[tuple[str | None, RopeSpec], ...]
    width: str
    factors: tuple[tuple[str | None, float], ...]
    ranks: frozenset[int]
    wide: bool = False
    buffers: tuple[_Buffer, ...] = field(default=(), compare=False, repr=False)

    def are_of(self, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Return True if all of these buffers have the values that they had when the angles were read."""
        known = {each.name: each for each in self.buffers}
        for name, now in buffers.items():
            # Where frequencies depend on the length, inv_freq holds those of the last call.
            last = name.endswith("inv_freq") and f"original_{name}" in known
            if last and any(spec.by_length for _, spec in self.specs):
                continue
            if not now.is_meta and not (name in known and known[name].has_values_of(now)):
                return False
        return True

    def tables(
        self, position_ids: torch.Tensor, layer_type: str | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (batch, seq, width)."""
        spec = dict(self.specs)[layer_type]
        factor = dict(self.factors)[layer_type]
        # Each row has its own length; sequences packed into one row share one length.
        lengths = (
            position_ids.amax((0, 2) if position_ids.dim() == 3 else 1) + 1
            if (spec.by_length and position_ids.numel())
            else None
        )
        prepared = spec.at(
            _positions(spec, position_ids), device=position_ids.device, seq_len=lengths
        )
        phase = exact_angles.phase_at(
            prepared.words,
            prepared.turns,
            prepared.ids,
            prepared.offset,
            prepared.add_index,
            position_ids.shape[-1],
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = prepared.amplitude * factor
        cos, sin = (
            widen(t[:, 0] * scale if scale != 1.0 else t[:, 0], self.width)
            for t in exact_angles.cos_sin(phase, wide)
        )
        target = wide if self.wide else dtype
        return cos.to(target), sin.to(target)


def _positions(spec: RopeSpec, position_ids: torch.Tensor) -> Any:
    if spec.axes is None:
        return position_ids
    if position_ids.dim() == 2:
        position_ids = position_ids.expand(spec.axis_count, *position_ids.shape)
    return positions_.multi_axis(position_ids)


# --- the angles stored in a module ----------------------------------------------------------------

# The attribute in which a module stores its angles.
KEPT = "_tightrope_angles"


class _Library:
    """State of ``patch()``.

    Attributes:
        serves: whether ``patch(None, angles="exact")`` is active.
    """

    serves = False


library = _Library()


@dataclass(frozen=True)
class Kept:
    """The exact angles of one module, and the attribute values for which they are valid.

    Modules of one class can have different configs, so each module stores its own angles. They are
    valid until an attribute that the original forward reads changes.

    Attributes:
        angles: the cosines and sines that the module makes.
        config: the config of the module, or None.
        of_module, of_config: attribute values of the module and of its config; see _OF_MODULE and
            _OF_CONFIG.
        by_library: whether ``patch()`` made them; ``unpatch()`` then ends them.
    """

    angles: Angles
    config: Any
    of_module: tuple[tuple[str, Any], ...]
    of_config: tuple[tuple[str, Any], ...]
    by_library: bool

    def hold(self, module: Any) -> bool:
        """Return True if the module still has the attribute values for which these angles are valid."""
        return (
            (library.serves or not self.by_library)
            and getattr(module, "config", None) is self.config
            and all(getattr(module, name, None) == value for name, value in self.of_module)
            and all(getattr(self.config, name, None) == value for name, value in self.of_config)
        )


def keep(module: torch.nn.Module, angles: Angles, by_library: bool) -> None:
    """Store angles in a module, from which the forward of its subclass reads them."""
    config = getattr(module, "config", None)
    by_length = any(spec.by_length for _, spec in angles.specs)
    read = [name for name in _OF_CONFIG if by_length and hasattr(config, name)]
    vars(module)[KEPT] = Kept(
        angles,
        config,
        tuple(copy.deepcopy(_read_at_calls(module)).items()),
        tuple((name, copy.deepcopy(getattr(config, name))) for name in read),
        by_library,
    )


def forget(module: torch.nn.Module) -> None:
    """Remove the angles of a module, so that its original forward runs."""
    vars(module).pop(KEPT, None)


def _read_at_calls(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _OF_MODULE.search(name)}


# --- recognising the angles of a module -----------------------------------------------------------


def makes_angles(cls: type) -> bool:
    """Return True if the name of a class or the parameters of its forward suggest cosines and sines."""
    return _names(cls) is not None or bool(_NAME.search(cls.__name__))


def _names(cls: type) -> list[str] | None:
    """The parameters of forward: (x, position_ids) or (x, position_ids, layer_type); else None."""
    names = _parameters(cls)
    fits = len(names) in (2, 3) and names[1] == "position_ids"
    return names if fits and names[2:] in ([], ["layer_type"]) else None


def _parameters(cls: type) -> list[str]:
    seen = signature(getattr(cls, "forward", None))
    return [] if seen is None else list(seen.parameters)[1:]


class _Unserved(Exception):
    """The module cannot use exact angles; the message is the reason."""


def read(module: torch.nn.Module) -> tuple[Angles | None, str]:
    """Recognise the angles of a module by calling it, patched or not; (None, reason) if that fails."""
    try:
        with _as_for_probes():
            return _read(module), "equal to those of the module at all positions tried"
    except _Unserved as unserved:
        return None, str(unserved)


@contextmanager
def _as_for_probes() -> Iterator[None]:
    """Make tensors on the CPU, without gradients, in float32: inside from_pretrained it is the model's dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def _read(module: torch.nn.Module) -> Angles:
    cls = base_of(type(module))
    if _names(cls) is None:
        raise _Unserved(f"its forward takes ({', '.join(_parameters(cls))}), not (x, position_ids)")
    if _learns(module):
        raise _Unserved("it has learned tensors, to which exact angles would give no gradients")
    probe = _fresh(module)
    types = _layer_types(module)
    found: list[tuple[str | None, RopeSpec, float]] = []
    kept: tuple[str, frozenset[int]] | None = None
    for layer_type in types:
        reasons = []
        for spec, factor, source in _specs(module, probe, layer_type):
            try:
                width, ranks = _width(probe, spec, factor, layer_type)
            except _Unserved as unserved:
                reasons.append(f"{source}: {unserved}")
                continue
            if kept is None:
                kept = width, ranks
            if kept[0] == width:
                kept = width, kept[1] & ranks
                found.append((layer_type, spec, factor))
                break
        else:
            raise _Unserved(
                "; ".join(reasons) or "neither its config nor a buffer gives frequencies"
            )
    if kept is None:
        raise _Unserved("it has no layer types")
    return Angles(
        tuple((t, spec) for t, spec, _ in found),
        kept[0],
        tuple((t, factor) for t, _, factor in found),
        kept[1],
        buffers=tuple(_Buffer.of(name, each) for name, each in probe.named_buffers()),
    )


def _learns(module: torch.nn.Module) -> bool:
    """Return True if a module has parameters, or holds tensors that need gradients."""
    parameters = any(True for _ in module.parameters())
    return parameters or any(each.requires_grad for each in _tensors(module))


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers of a module, and the tensors in its attributes."""
    others = [*module.buffers(), *vars(module).values()]
    return [each for each in others if isinstance(each, torch.Tensor)]


_busy = threading.local()


def is_probing() -> bool:
    """Return True while this thread makes a module for probing."""
    return getattr(_busy, "now", False)


def _fresh(module: torch.nn.Module) -> torch.nn.Module:
    """A float32 equivalent of a module: made from its config if that gives its buffers, else a copy."""
    made = _rebuilt(module)
    if made is not None and _unchanged(module, made):
        return made
    if any(t.device.type == "meta" or t.dtype != torch.float32 for t in module.buffers()):
        raise _Unserved(
            "its frequencies are on the meta device or not float32, and no config gives them"
        )
    made = copy.deepcopy(module).cpu()
    forget(made)
    vars(made).pop("forward", None)  # a wrapper, which may call the original module
    return made


def _rebuilt(module: torch.nn.Module) -> torch.nn.Module | None:
    """A module of the same class made from the config that the module has now; None if that fails."""
    config = getattr(module, "config", None)
    if config is None:
        return None
    _busy.now = True
    try:
        made: torch.nn.Module = base_of(type(module))(config)
        return made
    except Exception:  # noqa: BLE001
        return None
    finally:
        _busy.now = False


def note(module: torch.nn.Module) -> str | None:
    """A line of the report for a module that holds other frequencies than its config states, else None."""
    with _as_for_probes():
        fresh = _rebuilt(module)
        if fresh is None or (
            _has_buffers_of(module, fresh)
            and getattr(module, "rope_type", None) == getattr(fresh, "rope_type", None)
        ):
            return None
    name, stated = base_of(type(module)).__name__, _stated(getattr(module, "config", None))
    return (
        f"note: the configuration states {stated}; {name} holds other frequencies, which are used. Build "
        "the model from the configuration to use those."
    )


def _stated(config: Any) -> str:
    """The rule of a configuration in words: "yarn, factor 4"."""
    whole = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    whole = whole if isinstance(whole, dict) else {}
    parts = [each for each in whole.values() if isinstance(each, dict)] or [whole]
    words = []
    for part in parts:
        name = part.get("rope_type", part.get("type", "default"))
        numbers = [
            f"{key} {part[key]:g}"
            for key in ("factor", "rope_theta")
            if isinstance(part.get(key), (int, float))
        ]
        words.append(", ".join([str(name), *numbers[:1]]))
    return " and ".join(dict.fromkeys(words))


def _unchanged(module: torch.nn.Module, fresh: torch.nn.Module) -> bool:
    """Return True if a module's buffers and attributes are those that its config gives."""
    return _has_buffers_of(module, fresh) and _read_at_calls(module) == _read_at_calls(fresh)


def _has_buffers_of(module: torch.nn.Module, fresh: torch.nn.Module) -> bool:
    """Return True if a module's buffers are those of another, up to the rounding of a cast.

    Users may scale frequencies after construction. If frequencies depend on the length, the buffer
    holds those of the last call, and ``original_inv_freq`` the initial ones.
    """
    for name, began in fresh.named_buffers():
        now = getattr(module, name, None)
        if not isinstance(now, torch.Tensor) or now.device.type == "meta":
            continue
        by_length = getattr(module, "rope_type", None) in ("dynamic", "longrope")
        if by_length and not name.endswith("original_inv_freq"):
            continue
        if now.shape != began.shape or not torch.allclose(
            now.detach().cpu().float(), began.cpu().float(), rtol=_CAST, atol=_CAST_TINY
        ):
            return False
    return True


def _layer_types(module: torch.nn.Module) -> list[str | None]:
    """The layer types that forward accepts; [None] if it takes none."""
    if "layer_type" not in inspect.signature(type(module).forward).parameters:
        return [None]
    kinds = [
        name.removesuffix("_inv_freq")
        for name, _ in module.named_buffers()
        if name.endswith("_inv_freq") and not name.endswith("original_inv_freq")
    ]
    return list(kinds)


def _specs(
    module: torch.nn.Module, probe: torch.nn.Module, layer_type: str | None
) -> list[tuple[RopeSpec, float, str]]:
    """Possible (spec, factor, source) of a module: from its config, then from its inv_freq."""
    found: list[tuple[RopeSpec, float, str]] = []
    config = getattr(module, "config", None)
    if config is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # the probes decide, so other config keys do not matter
                spec: Any = RopeSpec.from_config(config, strict=False)
            if isinstance(spec, LayerSpecs):
                spec = spec.get(layer_type) if layer_type else None
            if isinstance(spec, RopeSpec):
                found.append((spec, 1.0, "by its config"))
        except (TypeError, ValueError, NotImplementedError):
            pass
    prefix = f"{layer_type}_" if layer_type else ""
    inv_freq = getattr(probe, f"{prefix}inv_freq", None)
    factor = getattr(probe, f"{prefix}attention_scaling", 1.0)
    if (
        isinstance(inv_freq, torch.Tensor)
        and inv_freq.dim() == 1
        and isinstance(factor, (int, float))
    ):
        values = tuple(float(v) for v in inv_freq.double().tolist())
        spec = RopeSpec(2 * len(values), scaling=Given(values))
        found.append((spec, float(factor), "by its inv_freq"))
    return found


def _width(
    probe: torch.nn.Module, spec: RopeSpec, factor: float, layer_type: str | None
) -> tuple[str, frozenset[int]]:
    """Call a module to find the width of its tables and the ranks of position_ids that it takes."""
    ranks, widths = set(), set(WIDTHS)
    for rank in (2, 3) if spec.axes is not None else (2,):
        tried = _tables_of(probe, spec, layer_type, rank)
        if tried is None:
            continue
        good = {
            width
            for width in WIDTHS
            if all(
                _same(
                    theirs,
                    ids,
                    Angles(((layer_type, spec),), width, ((layer_type, factor),), frozenset()),
                    layer_type,
                )
                for ids, theirs in tried
            )
        }
        if not good:
            raise _Unserved("the cosines and sines differ from those of the module")
        ranks.add(rank)
        widths &= good
    if not ranks:
        raise _Unserved("the module raises an error for the positions tried")
    if len(widths) != 1:
        raise _Unserved("the width of the module's tables is ambiguous")
    return widths.pop(), frozenset(ranks)


def _tables_of(
    probe: torch.nn.Module, spec: RopeSpec, layer_type: str | None, rank: int
) -> list[tuple[torch.Tensor, Any]] | None:
    """Pairs of positions and what a module returns for them; None if it raises an error for near ones."""
    rows = torch.tensor([_SMALL, [p * 9 + 1 for p in _SMALL]])
    one = torch.zeros(1, 1, 1, 1)
    near = [rows, rows[:, :1], torch.stack((rows[0], rows[0])), *_around(_far(probe))]
    calls = [(ids, [one]) for ids in near]
    for n in _LONG:  # x counts its tokens in one of these dimensions
        calls.append((torch.arange(n)[None], [one.expand(1, n, 1, 1), one.expand(1, 1, n, 1)]))
    calls += [(ids, [one]) for n in _FARTHER for ids in _around([n])]
    tried: list[tuple[torch.Tensor, Any]] = []
    for i, (ids, xs) in enumerate(calls):
        # If frequencies depend on the length, all rows must have the same length: the module uses
        # the longest for all rows, this library the length of each row.
        ids = ids if spec.by_length is False else ids[:1].expand(2, -1)
        if rank == 3:
            ids = torch.stack([ids // (axis + 1) + axis for axis in range(spec.axis_count)])
        held = 0
        found: list[Any] = []
        for x, training in itertools.product(xs, (False, True)):
            fresh = copy.deepcopy(probe)  # some modules store the longest length seen
            fresh.train(training)
            try:
                theirs = fresh(x, ids, **({} if layer_type is None else {"layer_type": layer_type}))
            except Exception:  # noqa: BLE001
                if i < len(near):
                    return None
                continue
            if not any(_are_equal(theirs, each) for each in found):
                found.append(theirs)
            held = sum(t.numel() for t in _tensors(fresh)) - sum(t.numel() for t in _tensors(probe))
        tried += [(ids, each) for each in found]
        if i >= len(near) and held > _TABLE:
            break
    return tried


def _are_equal(one: Any, other: Any) -> bool:
    """Return True if two results are tuples of equal tensors."""
    if not isinstance(one, tuple) or not isinstance(other, tuple) or len(one) != len(other):
        return False
    return all(map(torch.is_tensor, one + other)) and all(map(torch.equal, one, other))


def _around(lengths: Iterable[int]) -> list[torch.Tensor]:
    """Positions at which sequences of these lengths end and go on."""
    ends = [torch.tensor([[n - 2, n - 1], [n - 1, n - 1]]) for n in lengths]
    return ends + [torch.tensor([[n, n + 5], [n + 5, 3]])[:, :1] for n in lengths]


def _far(probe: torch.nn.Module) -> list[int]:
    """Sequence lengths around which a scaling rule may change its frequencies."""
    config = getattr(probe, "config", None)
    lengths = {1024, 5000}
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, dict)]
    for values in (parameters, *nested, getattr(config, "__dict__", {})):
        for key in ("original_max_position_embeddings", "max_position_embeddings"):
            if isinstance(values.get(key), int):
                lengths |= {values[key], 2 * values[key]}
    return sorted(n for n in lengths if 8 < n < 2**21)


def _same(theirs: Any, ids: torch.Tensor, ours: Angles, layer_type: str | None) -> bool:
    """Return True if tables are equal up to the error of float32 angles."""
    try:
        cos, sin = theirs
        exact = ours.tables(ids, layer_type, torch.float64)
    except (TypeError, ValueError, NotImplementedError):
        return False
    spec = ours.specs[0][1]
    if cos.shape != exact[0].shape or cos.dtype != torch.float32:
        return False
    longest = int(ids.max()) + 1
    rates = spec.frequencies(longest if spec.by_length else None).inv_freq.double().reshape(-1)
    if spec.axes is not None:
        rates = rates.abs().max().expand(rates.shape)
    amplitude = max(1.0, float(exact[0].abs().max()))
    bound = widen(rates * longest * _ANGLE, ours.width) + _VALUE
    if bound.shape[-1] != cos.shape[-1]:
        bound = bound.max()
    return all(
        bool(((mine - other.double()).abs() <= bound * amplitude).all())
        for mine, other in zip(exact, (cos, sin))
    )


# --- members of the generated subclass ------------------------------------------------------------


def members_of(base: Any) -> dict[str, Any]:
    """Members of the subclass whose forward returns the angles stored in the object."""
    return {
        "forward": _forward_of(base.forward),
        "__init__": _initialiser_of(base),
        "_load_from_state_dict": _loader_of(base),
        KEPT: None,
    }


def _initialiser_of(base: Any) -> Callable[..., None]:
    """The ``__init__`` of a base class; it first removes angles stored for an earlier config."""

    @functools.wraps(base.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        forget(self)
        base.__init__(self, *args, **kwargs)

    return __init__


def _loader_of(base: Any) -> Callable[..., None]:
    """Load a state as a base class does; if it has or makes other frequencies, angles are removed."""

    @functools.wraps(base._load_from_state_dict)
    def _load_from_state_dict(
        self: Any, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        before = {name: (each, each.clone()) for name, each in self.named_buffers()}
        base._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)
        kept: Kept | None = vars(self).get(KEPT)
        if kept is None:
            return
        loaded: dict[str, Any] = {}
        for name, now in self.named_buffers():
            given = state_dict.get(prefix + name)
            if "." in name:  # a child loads its state later
                if given is not None:
                    loaded[name] = given
            # If loading does not change a buffer, it may have been loaded in place before, or be empty memory.
            elif given is not None or name not in before or not _is_as_before(now, *before[name]):
                loaded[name] = now
        if not kept.angles.are_of(loaded):
            forget(self)

    return _load_from_state_dict


def _is_as_before(now: torch.Tensor, old: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if a buffer is the same tensor with the same values, NaN included."""
    try:
        return now is old and (now.is_meta or torch.allclose(now, values, 0.0, 0.0, equal_nan=True))
    except Exception:  # noqa: BLE001
        return False  # it has no values, as in FakeTensorMode


def _forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that returns the exact angles stored in the object.

    The original runs if the object has no valid angles, and for calls that were not tried.
    """
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept: Kept | None = getattr(self, KEPT, None)  # a wrapper may call it after unpatch
        if kept is None or not kept.hold(self):
            return original(self, *args, **kwargs)
        made = kept.angles
        values = {"layer_type": None, **dict(zip(names, args)), **kwargs}
        x, ids = values.get(names[0]), values.get("position_ids")
        if (
            len(args) > len(names)
            or not set(values) <= {*names, "layer_type"}
            or not isinstance(x, torch.Tensor)
            or not isinstance(ids, torch.Tensor)
            or ids.dtype not in _IDS
            or ids.dim() not in made.ranks
            or values["layer_type"] not in dict(made.specs)
            or not x.is_floating_point()
        ):
            return original(self, *args, **kwargs)
        with torch.no_grad():
            return made.tables(ids.to(x.device), values["layer_type"], x.dtype)

    return forward


_WIDTH = {"cat": "full width", "repeat": "full width interleaved", "half": "half width"}


def entry(module: torch.nn.Module, made: Angles | None, reason: str) -> Entry:
    """The report entry of a module after :func:`read`."""
    cls = base_of(type(module))
    recognised: str | None = None
    runs: tuple[str, ...] = ()
    if made is not None:
        specs = "; ".join(str(spec) if t is None else f"{t}: {spec}" for t, spec in made.specs)
        dtype = "float32" if made.wide else "in dtype of x"
        recognised = f"cos/sin of {specs}, {_WIDTH[made.width]}, {dtype}"
        ranks = " or ".join(map(str, sorted(made.ranks)))
        dtypes = " nor ".join(str(each)[6:] for each in _IDS)
        runs = (
            f"position_ids of a rank other than {ranks}, or that are neither {dtypes}",
            "x that is no floating-point tensor, and other arguments",
            "calls after load_state_dict gave a buffer other values, or config, rope_type or "
            "attention_scaling changed",
        )
    return Entry(cls.__module__, cls.__qualname__, recognised, made is not None, reason, runs)
