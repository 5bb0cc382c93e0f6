"""Exchange the modules that make a model's cosines and sines (``angles="exact"`` and ``stack=``).

A module is exchanged if its tables are those of a spec, up to the error of float32, at all positions tried. The
spec is then stored in the module as plain data, and the ``forward`` of its subclass makes tables from it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .. import angles as exact_angles, positions as positions_, stacks
from ..config import LayerSpecs
from ..forms import WIDTHS, signature, widen
from ..frequencies import Given
from ..spec import RopeSpec
from ._classes import base_of
from ._report import Entry
from ._state import undisturbed

# Probe positions, and the float32 error that the original may have: relative to the angle, and absolute.
_NEAR = (3, 1, 7, 2, 12, 40)
_ANGLE, _VALUE = 6e-7, 4e-6
# Lengths of whole rows, and of rows of which a few positions are tried; a module may raise an error there.
_ROWS, _FAR = (300, 2**13 + 1), (2**13, 2**15, 2**17, 2**20)
# A module that keeps so many more numbers after a call has a row per position, and is tried no farther.
_TABLE = 2**20
# The ends of the names of attributes that a module's forward reads.
_FOLLOWED = "rope_type", "attention_scaling"
# What transformers reads in the configuration at every call, if frequencies depend on the length.
_OF_CONFIG = tuple(
    f"config.{name}"
    for name in ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
)
# Relative and absolute error of a cast of frequencies to bfloat16 or float16.
_CAST, _CAST_TINY = 2**-8, 2**-24
# The dtypes of position_ids for which tables are made.
_IDS = torch.int64, torch.int32

# Names of classes that the report lists even if their forward does not take positions.
_NAME = re.compile(r"(Rotary|Rope|RoPE)\w*Emb")
#: The attribute in which a module stores what its tables are made from, a :class:`Made`.
KEPT = "_tightrope_tables"
#: The reason in the report if a model has no module that can be exchanged.
NO_ANGLES = "takes (x, position_ids), as modules of transformers that make angles do, so angles stay as they are"


class Made(NamedTuple):
    """The tables that a module makes.

    Attributes:
        specs: (layer type, spec, factor on its tables beyond the amplitude of the spec) of each layer type;
            the type is None if the module has no layer types.
        width: the format of the tables, a key of WIDTHS.
        ranks: the ranks of position_ids that agreed: 2, or 3 with coordinates first.
        stack: the name of the stack whose arithmetic is used; None for exact angles.
        held: (name, value) of the attributes of the module that its own tables follow from.
    """

    specs: tuple[tuple[str | None, RopeSpec, float], ...]
    width: str
    ranks: tuple[int, ...]
    stack: str | None = None
    held: tuple[tuple[str, Any], ...] = ()

    def is_of(self, module: torch.nn.Module) -> bool:
        """Return whether a module still has the configuration and the factors that it had."""
        return all(
            (now := _get(module, name)) is value or (name != "config" and now == value)
            for name, value in self.held
        )

    def to_plain(self) -> tuple[Any, ...]:
        """The values in types of Python, for pickles."""
        return tuple((t, spec.to_dict(), f) for t, spec, f in self.specs), *self[1:]

    @classmethod
    def of_plain(cls, specs: tuple[tuple[Any, ...], ...], *others: Any) -> Made:
        """Make it from :meth:`to_plain`."""
        return cls(tuple((t, RopeSpec.from_dict(spec), f) for t, spec, f in specs), *others)

    def tables(
        self, ids: torch.Tensor, layer_type: str | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (batch, seq, width) at position ids, for tensors of a dtype."""
        spec, factor = next(each[1:] for each in self.specs if each[0] == layer_type)
        where: Any = ids
        if spec.axes is not None:
            rows = ids if ids.dim() == 3 else ids.expand(spec.axis_count, *ids.shape)
            where = positions_.multi_axis(rows)
        if self.stack is not None:
            both = stacks.get(self.stack).tables(spec, where, dtype)
            cos, sin = (widen(t[:, 0], self.width) for t in both)
            return cos, sin
        lengths = None
        if spec.by_length and ids.numel():  # of each row; sequences packed into one row share one
            lengths = ids.amax((0, 2) if ids.dim() == 3 else 1) + 1
        tokens = ids.shape[-1]
        at = spec.at(where, device=ids.device, seq_len=lengths).for_tokens(tokens)
        own = at.where
        phase = exact_angles.phase_at(*at.angles[:2], own.ids, own.offset, own.add_index, tokens)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = at.amplitude * factor
        cos, sin = exact_angles.cos_sin(phase, wide)
        scaled = (t[:, 0] * scale if scale != 1.0 else t[:, 0] for t in (cos, sin))
        cos, sin = (widen(t, self.width) for t in scaled)
        return cos, sin


def makes_angles(cls: type) -> bool:
    """Return whether the name of a class or the parameters of its forward suggest cosines and sines."""
    return is_usual(cls) or bool(_NAME.search(cls.__name__))


def is_usual(cls: type) -> bool:
    """Return whether forward takes (x, position_ids) or (x, position_ids, layer_type)."""
    names = _parameters(cls)
    return len(names) in (2, 3) and names[1] == "position_ids" and names[2:] in ([], ["layer_type"])


def _parameters(cls: type) -> list[str]:
    seen = signature(getattr(cls, "forward", None))
    return [] if seen is None else list(seen.parameters)[1:]


# --- what a module makes --------------------------------------------------------------------------


class _Unlike(Exception):
    """The module cannot be exchanged; the message is the reason."""


def read(module: torch.nn.Module, stack: str | None = None) -> tuple[Made | None, str]:
    """Recognise the tables of a module by calling it, patched or not; (None, reason) if that fails."""
    try:
        with undisturbed():
            return _read(module, stack), "equal to those of the module at all positions tried"
    except _Unlike as unlike:
        return None, str(unlike)


def _read(module: torch.nn.Module, stack: str | None) -> Made:
    cls = base_of(type(module))
    if not is_usual(cls):
        raise _Unlike(f"its forward takes ({', '.join(_parameters(cls))}), not (x, position_ids)")
    if any(True for _ in module.parameters()) or any(t.requires_grad for t in _held(module)):
        raise _Unlike("it has learned tensors, to which exact angles would give no gradients")
    if names := nans(module):
        raise _Unlike(f"{names[0]} holds NaN")
    probe = _fresh(module)
    found, kept = [], None
    for layer_type in _layer_types(module):
        reasons = []
        for spec, factor, source in _specs(module, probe, layer_type, stack):
            try:
                here = _matching(probe, Made(((layer_type, spec, factor),), "", ()))
            except _Unlike as unlike:
                reasons.append(f"{source}: {unlike}")
                continue
            kept = kept or here
            if kept[0] == here[0]:
                kept = here[0], tuple(rank for rank in kept[1] if rank in here[1])
                found.append((layer_type, spec, factor))
                break
        else:
            raise _Unlike("; ".join(reasons) or "neither its config nor a buffer gives frequencies")
    if kept is None:
        raise _Unlike("it has no layer types")
    names = [name for name in vars(module) if name.endswith(_FOLLOWED)]
    if any(spec.by_length for _, spec, _ in found):
        names += [name for name in _OF_CONFIG if _get(module, name) is not None]
    held = [(name, copy.deepcopy(_get(module, name))) for name in names]
    return Made(tuple(found), *kept, stack, (("config", _get(module, "config")), *held))


def _get(module: Any, name: str) -> Any:
    """An attribute of a module, or of its configuration; None if there is none."""
    owner, _, last = name.rpartition(".")
    return getattr(getattr(module, owner, None) if owner else module, last, None)


def _held(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers of a module, and the tensors in its attributes."""
    return [t for t in (*module.buffers(), *vars(module).values()) if isinstance(t, torch.Tensor)]


def nans(module: torch.nn.Module) -> list[str]:
    """The names of the buffers of frequencies that hold NaN, in a module and in those in it."""
    return [
        name
        for name, each in module.named_buffers()
        if name.endswith("inv_freq")
        and type(each) is torch.Tensor
        and not each.is_meta
        and bool(each.isnan().any())
    ]


def _fresh(module: torch.nn.Module) -> torch.nn.Module:
    """A float32 equivalent of a module: made from its config if that gives its buffers, else a copy."""
    made = _rebuilt(module)
    if made is not None and _has_state_of(module, made):
        return made
    if any(t.device.type == "meta" or t.dtype != torch.float32 for t in module.buffers()):
        raise _Unlike(
            "its frequencies are on the meta device or not float32, and no config gives them"
        )
    made = copy.deepcopy(module).cpu()
    vars(made).pop(KEPT, None)
    vars(made).pop("forward", None)  # a wrapper, which may call the original module
    return made


def _rebuilt(module: torch.nn.Module) -> torch.nn.Module | None:
    """A module of the same class made from the config that the module has now; None if that fails."""
    config = getattr(module, "config", None)
    try:
        return None if config is None else base_of(type(module))(config)
    except Exception:  # noqa: BLE001  # third-party code can raise anything
        return None


def _has_state_of(
    module: torch.nn.Module, fresh: torch.nn.Module, names: Iterable[str] | None = None
) -> bool:
    """Return True if a module has the buffers of another, up to the rounding of a cast, and its factors.

    Other buffers than those of these names do not count, if names are given.

    Users may scale frequencies after construction. If frequencies depend on the length, the buffer
    holds those of the last call, and ``original_inv_freq`` the initial ones.
    """
    by_length = getattr(module, "rope_type", None) in ("dynamic", "longrope")
    for name, began in fresh.named_buffers():
        now = getattr(module, name, None)
        if not isinstance(now, torch.Tensor) or now.is_meta or (names and name not in names):
            continue
        if by_length and not name.endswith("original_inv_freq"):
            continue
        now, began = now.detach().cpu().float(), began.cpu().float()
        if now.shape != began.shape or not torch.allclose(now, began, rtol=_CAST, atol=_CAST_TINY):
            return False
    followed = [name for name in vars(module) if name.endswith(_FOLLOWED)]
    return all(getattr(module, name) == getattr(fresh, name, None) for name in followed)


def note(module: torch.nn.Module) -> str | None:
    """A line of the report for a module that holds other frequencies than its config states, else None."""
    with undisturbed():
        fresh = _rebuilt(module)
        if fresh is None or _has_state_of(module, fresh):
            return None
    config, name = getattr(module, "config", None), base_of(type(module)).__name__
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return (
        f"note: the configuration states {stated}; {name} holds other frequencies or another factor, which are "
        "used. Build the model from the configuration to use its own."
    )


def _layer_types(module: torch.nn.Module) -> list[str | None]:
    """The layer types that forward accepts; [None] if it takes none."""
    if "layer_type" not in _parameters(base_of(type(module))):
        return [None]
    names = [name for name, _ in module.named_buffers() if name.endswith("_inv_freq")]
    return [
        name.removesuffix("_inv_freq") for name in names if not name.endswith("original_inv_freq")
    ]


def _specs(
    module: torch.nn.Module, probe: torch.nn.Module, layer_type: str | None, stack: str | None
) -> list[tuple[RopeSpec, float, str]]:
    """Possible (spec, factor, source) of a module: from its config, then from its inv_freq."""
    found: list[tuple[RopeSpec, float, str]] = []
    config = getattr(module, "config", None)
    if config is not None:
        try:
            values = config.to_dict() if hasattr(config, "to_dict") else config
            spec: Any = RopeSpec.from_config(values, strict=False)  # the probes decide
            if isinstance(spec, LayerSpecs):
                spec = spec.get(layer_type) if layer_type else None
            if isinstance(spec, RopeSpec):
                found.append((spec, 1.0, "by its config"))
        except (TypeError, ValueError, NotImplementedError):
            pass
    if stack is not None:
        for spec, _, _ in found:
            if spec.by_length:
                raise _Unlike(f"its frequencies depend on the length, which stack {stack!r} fixes")
            try:
                stacks.get(stack).frequencies(spec)
            except NotImplementedError as error:
                raise _Unlike(str(error)) from error
        return found  # a stack computes frequencies from the config, not from a buffer
    prefix = f"{layer_type}_" if layer_type else ""
    inv_freq = getattr(probe, f"{prefix}inv_freq", None)
    factor = getattr(probe, f"{prefix}attention_scaling", 1.0)
    if isinstance(inv_freq, torch.Tensor) and inv_freq.dim() == 1:
        values = tuple(float(v) for v in inv_freq.double().tolist())
        spec = RopeSpec(2 * len(values), scaling=Given(values))
        found.append((spec, float(factor), "by its inv_freq"))
    return found


def _matching(probe: torch.nn.Module, made: Made) -> tuple[str, tuple[int, ...]]:
    """Call a module to find the width of its tables and the ranks of position_ids that it takes."""
    ((layer_type, spec, _),) = made.specs
    given = {} if layer_type is None else {"layer_type": layer_type}
    widths, ranks = set(WIDTHS), []
    for rank in (2, 3) if spec.axes is not None else (2,):
        held = 0
        for i, ids in enumerate(_ids(probe, spec)):
            if rank == 3:
                ids = torch.stack([ids // (axis + 1) + axis for axis in range(spec.axis_count)])
            for x, training in itertools.product(_likes(ids), (False, True)):
                fresh = copy.deepcopy(probe)  # some modules store the longest length seen
                fresh.train(training)
                try:
                    theirs = fresh(x, ids, **given)
                except Exception:  # noqa: BLE001  # third-party code can raise anything
                    if i >= _MUST:
                        continue
                    raise _Unlike("the module raises an error for the positions tried") from None
                widths = {w for w in widths if _alike(theirs, ids, made._replace(width=w))}
                if not widths and _leads(theirs) != ids.shape[-2:]:
                    raise _Unlike("its position_ids do not have shape (rows, tokens)")
                if not widths:
                    raise _Unlike("the cosines and sines differ from those of the module")
                held = sum(t.numel() for t in _held(fresh)) - sum(t.numel() for t in _held(probe))
            if i >= _MUST and held > _TABLE:
                break
        ranks.append(rank)
    if len(widths) != 1:
        raise _Unlike("the width of the module's tables is ambiguous")
    return widths.pop(), tuple(ranks)


def _leads(tables: Any) -> torch.Size | None:
    """The shape of cosines and sines without their width; None for other results."""
    first = tables[0] if isinstance(tables, tuple) and tables else None
    return first.shape[:-1] if isinstance(first, torch.Tensor) else None


# The number of the first positions that a module must take.
_MUST = 3


def _likes(ids: torch.Tensor) -> list[torch.Tensor]:
    """The x to call a module with: for whole rows, it counts its tokens in one of two dimensions."""
    tokens = ids.shape[-1]
    if tokens < _ROWS[0]:
        return [torch.zeros(1, 1, 1, 1)]
    return [torch.zeros(1, tokens, 1, 1), torch.zeros(1, 1, tokens, 1)]


def _ids(probe: torch.nn.Module, spec: RopeSpec) -> Iterator[torch.Tensor]:
    """Positions to try: near ones, whole rows, and the ends of longer rows."""
    rows = torch.tensor([_NEAR, [p * 9 + 1 for p in _NEAR]])
    near = [rows, rows[:, :1], torch.stack((rows[0], rows[0]))]
    near += [torch.arange(tokens)[None] for tokens in _ROWS]
    far = [torch.tensor([[n, n + 1]]) for m in (*_lengths(probe), *_FAR) for n in (m - 2, m)]
    for ids in (*near, *far):
        # If frequencies depend on the length, all rows must have the same length: the module uses
        # the longest for all rows, this library the length of each row.
        yield ids if spec.by_length is False else ids[:1].expand(2, -1)


def _lengths(probe: torch.nn.Module) -> list[int]:
    """Sequence lengths around which a scaling rule may change its frequencies."""
    config, lengths = getattr(probe, "config", None), {1024, 5000}
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, dict)]
    for values in (parameters, *nested, getattr(config, "__dict__", {})):
        for key in ("original_max_position_embeddings", "max_position_embeddings"):
            if isinstance(values.get(key), int):
                lengths |= {values[key], 2 * values[key]}
    return sorted(n for n in lengths if 8 < n < 2**21)


def _alike(theirs: Any, ids: torch.Tensor, made: Made) -> bool:
    """Return True if tables are equal to exact ones up to the error of float32 angles."""
    ((layer_type, spec, _),) = made.specs
    try:
        cos, sin = theirs
        exact = made.tables(ids, layer_type, torch.float64)
    except (TypeError, ValueError, NotImplementedError):
        return False
    if cos.shape != exact[0].shape or cos.dtype != torch.float32:
        return False
    longest = int(ids.max()) + 1
    rates = spec.frequencies(longest if spec.by_length else None).inv_freq.double().reshape(-1)
    if spec.axes is not None:
        rates = rates.abs().max().expand(rates.shape)
    amplitude = max(1.0, float(exact[0].abs().max()))
    bound = widen(rates * longest * _ANGLE, made.width) + _VALUE
    if bound.shape[-1] != cos.shape[-1]:
        bound = bound.max()
    return all(
        bool(((mine - other.double()).abs() <= bound * amplitude).all())
        for mine, other in zip(exact, (cos, sin))
    )


# --- members of the generated subclass ------------------------------------------------------------


def members_of(base: Any) -> dict[str, Any]:
    """Members of the subclass: a forward that returns the tables that the object makes, and a loader."""
    return {
        "forward": _forward_of(base.forward),
        "_load_from_state_dict": _loader_of(base),
        "__setstate__": _setter_of(base),
        KEPT: None,
    }


def _setter_of(base: Any) -> Callable[..., None]:
    """Take the state of a pickle as a base class does."""

    @functools.wraps(base.__setstate__)
    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        kept = {KEPT: Made.of_plain(*state[KEPT])} if KEPT in state else {}
        base.__setstate__(self, {**state, **kept})

    return __setstate__


def _loader_of(base: Any) -> Callable[..., None]:
    """Load a state as a base class does; tables are made from the frequencies that it brings, if they are recognised."""

    @functools.wraps(base._load_from_state_dict)
    def load(self: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        base._load_from_state_dict(self, state_dict, prefix, *others)
        made = vars(self).get(KEPT)
        names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if made is None or not names:
            return
        now = None
        if not any("." in name for name in names):  # children load their state later
            with contextlib.suppress(Exception), undisturbed():  # as of distributed tensors
                fresh = _rebuilt(self)
                # After to_empty, other buffers have no values yet.
                same = fresh is not None and _has_state_of(self, fresh, names)
                now = made if same else read(self, made.stack)[0]
        if now is not None:
            vars(self)[KEPT] = now
            return
        del vars(self)[KEPT]
        warnings.warn(
            f"{base.__qualname__} makes its own cosines and sines again, as a state was loaded whose frequencies are "
            "not recognised; call tightrope.integrations.patch(model)",
            stacklevel=2,
        )

    return load


def _forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that makes tables from what the object stores; the original runs for calls that were not tried."""
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made: Made | None = getattr(self, KEPT, None)
        values = {"layer_type": None, **dict(zip(names, args)), **kwargs}
        x, ids = values.get(names[0]), values.get("position_ids")
        if (
            made is None
            or len(args) > len(names)
            or not set(values) <= {*names, "layer_type"}
            or not isinstance(x, torch.Tensor)
            or not isinstance(ids, torch.Tensor)
            or ids.dtype not in _IDS
            or not x.is_floating_point()
            or ids.dim() not in made.ranks
            or all(values["layer_type"] != layer_type for layer_type, *_ in made.specs)
            or not made.is_of(self)
        ):
            return original(self, *args, **kwargs)
        dtype, kind = x.dtype, x.device.type
        if made.stack is not None and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)  # the server's model has this dtype throughout
        with torch.no_grad():
            return made.tables(ids.to(x.device), values["layer_type"], dtype)

    return forward


_WIDTH = {"cat": "full width", "repeat": "full width interleaved", "half": "half width"}


def entry(module: torch.nn.Module, made: Made | None, reason: str) -> Entry:
    """The report entry of a module after :func:`read`."""
    cls = base_of(type(module))
    if made is None:
        return Entry(cls.__module__, cls.__qualname__, None, False, reason)
    specs = "; ".join(str(spec) if t is None else f"{t}: {spec}" for t, spec, _ in made.specs)
    stack = None if made.stack is None else stacks.get(made.stack)
    narrow = stack is not None and stack.table_dtype is None
    dtype = "in dtype of x" if narrow else "float32"
    by = "" if stack is None else f", by the arithmetic of {stack.name}"
    ranks, dtypes = " or ".join(map(str, made.ranks)), " nor ".join(str(t)[6:] for t in _IDS)
    runs = (
        f"position_ids of a rank other than {ranks}, or that are neither {dtypes}",
        "x that is no floating-point tensor, and other arguments",
        "calls after config, rope_type or attention_scaling was assigned",
    )
    recognised = f"cos/sin of {specs}, {_WIDTH[made.width]}, {dtype}{by}"
    return Entry(cls.__module__, cls.__qualname__, recognised, True, reason, runs)
