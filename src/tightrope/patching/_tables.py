"""Exchange the cosines and sines that modules of a model make: by exact ones, or by those of a server.

A module's tables are exchanged if they are those of a spec, up to the error of float32, at all positions tried. The
module keeps the spec, and the ``forward`` of its class makes tables from it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import positions as positions_, stacks
from .._errors import sentence
from .._tracing import undisturbed
from ..config import LayerSpecs
from ..frequencies import Given
from ..spec import RopeSpec
from ._kinds import WIDTHS

#: The attributes in which modules of a patched model keep what their tables are made from, and their patch.
KEPT, MARK = "_tightrope_tables", "_tightrope_patch"
# Positions that are compared, as rows, and ends of longer ones, at which a module may raise an error.
_IDS = ([[3, 1, 7, 2, 12, 40], [28, 10, 64, 19, 109, 361]], [[3], [28]], [[*range(300)]])
_FAR = (2**13, 2**15, 2**17)
# The float32 error that a module's tables may have: relative to the angle, and absolute.
_ANGLE, _VALUE = 6e-7, 4e-6
# Relative and absolute error of a cast of frequencies to bfloat16 or float16.
_CAST, _CAST_TINY = 2**-8, 2**-24
_INTEGERS = torch.int64, torch.int32
# The calls of a module whose ids are looked at.
_LOOKED = 100


class Unlike(ValueError):
    """The tables of a module cannot be exchanged; the message is the reason."""


class Made:
    """The tables that a module of a patched model makes instead of its own.

    Attributes:
        owner: the patch that made it.
        specs: a spec and a further factor for each type of layers.
        width: the format of the tables, a key of WIDTHS.
        stack: the name of the stack whose arithmetic is used; None for exact angles.
        seen: what the module's own tables follow from; see :func:`_state`.
    """

    def __init__(
        self, owner: Any, specs: Any = None, width: str = "", stack: str | None = None
    ) -> None:
        self.owner, self.specs, self.width, self.stack = owner, specs, width, stack
        self.seen: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Made:
        made = Made(self.owner, self.specs, self.width, self.stack)
        made.seen = copy.deepcopy(self.seen, memo)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ()  # a pickled model is not patched where it is loaded

    def tables(
        self, ids: torch.Tensor, layer_type: str | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (rows, tokens, width) at position ids, for tensors of a dtype."""
        spec, factor = self.specs[layer_type]
        where: Any = ids
        if spec.axes is not None:
            where = positions_.multi_axis(
                ids if ids.dim() == 3 else ids.expand(spec.axis_count, *ids.shape)
            )
        if self.stack is not None:
            both = [t[:, 0] for t in stacks.get(self.stack).tables(spec, where, dtype)]
        else:
            wide = torch.promote_types(dtype, torch.float32)
            # The longest row decides for all, as in the module, which fills its cache again when it has grown.
            length = ids.amax() + 1 if spec.by_length and ids.numel() else None
            both = [*spec.cos_sin(where, dtype=wide, tables="half", seq_len=length)]
            both = [t * factor for t in both] if factor != 1.0 else both
        cos, sin = (WIDTHS[self.width](t) for t in both)
        return cos, sin


def parameters(cls: Any) -> list[str]:
    """The names of the parameters of a class's forward, without self."""
    try:
        return list(inspect.signature(cls.forward).parameters)[1:]
    except (AttributeError, TypeError, ValueError):
        return []


def is_maker(module: torch.nn.Module) -> bool:
    """Return whether forward takes (x, position_ids) or (x, position_ids, layer_type), as modules that make tables do."""
    return parameters(type(module))[1:] in (["position_ids"], ["position_ids", "layer_type"])


def is_bound(module: Any, value: Any) -> bool:
    """Return whether a value is the forward of a module, bound to it, as hooks of accelerate keep it."""
    return getattr(value, "__self__", None) is module and value.__name__ == "forward"


def read(module: Any, owner: Any, stack: str | None) -> Made:
    """Recognise the tables of a module by calling it.

    Raises:
        Unlike: they cannot be exchanged; the message is the reason.
    """
    own = vars(module)
    if "forward" in own and not any(
        name != "forward" and is_bound(module, own[name]) for name in own
    ):
        raise Unlike("a wrapper hides its forward; call patch before you replace it")
    if any(True for _ in module.parameters()) or any(t.requires_grad for t in module.buffers()):
        raise Unlike("it has learned tensors, to which exact angles would give no gradients")
    if names := nans(module):
        raise Unlike(f"{names[0]} holds NaN")
    with undisturbed(), torch.no_grad():
        fresh = _fresh(module)
        types: list[str | None] = [None]
        if "layer_type" in parameters(type(module)):
            names = [n for n, _ in fresh.named_buffers() if n.endswith("_inv_freq")]
            types = [
                n.removesuffix("_inv_freq") for n in names if not n.endswith("original_inv_freq")
            ]
        declared = _declared(module, types)
        found = _matching(fresh, declared, owner)
        if not found and stack is None:
            found = _matching(fresh, _held(fresh, types), owner)
        if len(found) != 1:
            raise Unlike(
                "its cosines and sines are those of neither its configuration nor its inv_freq"
            )
    made = found[0]
    if stack is not None:
        made.stack = stack
        for spec, _ in made.specs.values():
            if spec.by_length:
                raise Unlike(f"its frequencies depend on the length, which stack {stack!r} fixes")
            try:
                stacks.get(stack).frequencies(spec)
            except NotImplementedError as error:
                raise Unlike(str(error)) from error
    made.seen = _state(module)
    return made


def _fresh(module: Any) -> Any:
    """A module with the same tables in float32 on the CPU: built from the configuration if that gives its buffers."""
    built = _built(module)
    if isinstance(built, torch.nn.Module) and _same(module, built):
        return built
    if any(t.is_meta or t.dtype != torch.float32 for t in module.buffers()):
        raise Unlike(
            "its frequencies are on the meta device or not float32, and its configuration does not give them"
        )
    copied = copy.deepcopy(module).cpu()
    for name in (
        KEPT,
        "forward",
        "_old_forward",
        "_hf_hook",
    ):  # of a wrapper, which may call the original module
        vars(copied).pop(name, None)
    return copied


def _built(module: Any) -> Any:
    """A module of the same class, built from the configuration that the module has now; the error if that fails."""
    try:
        return type(module)(module.config)
    except Exception as error:  # noqa: BLE001  # third-party code can raise anything
        return error.with_traceback(None)  # whose frames would hold the patch


def _same(module: Any, fresh: torch.nn.Module) -> bool:
    """Return whether a module has the buffers of another, up to the rounding of a cast, and its factor.

    If frequencies depend on the length, the buffer holds those of the last call, and ``original_inv_freq`` the first.
    """
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    by_length = any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)
    for name, began in fresh.named_buffers():
        now = getattr(module, name, None)
        if (
            not isinstance(now, torch.Tensor)
            or now.is_meta
            or (by_length and not name.endswith("original_inv_freq"))
        ):
            continue
        now, began = now.detach().cpu().float(), began.float()
        if now.shape != began.shape or not torch.allclose(now, began, _CAST, _CAST_TINY):
            return False
    names = [name for name in vars(module) if name.endswith(("rope_type", "attention_scaling"))]
    return all(getattr(module, name) == getattr(fresh, name, None) for name in names)


def _state(module: Any) -> Any:
    """The state from which a module makes tables: its configuration, factors, and buffers with their versions."""
    config, own = getattr(module, "config", None), vars(module)
    names = "rope_parameters", "max_position_embeddings", "original_max_position_embeddings"
    values = [copy.deepcopy(getattr(config, name, None)) for name in names]
    factors = {name: own[name] for name in own if name.endswith(("rope_type", "attention_scaling"))}
    buffers = [(t, None if t.is_inference() else t._version) for t in module.buffers()]
    return values, copy.deepcopy(factors), buffers


def _changed(before: Any, after: Any) -> bool:
    return bool(
        before[:2] != after[:2]
        or len(before[2]) != len(after[2])
        or any(a is not b or n != m for (a, n), (b, m) in zip(before[2], after[2]))
    )


def nans(module: torch.nn.Module) -> list[str]:
    """The names of the buffers of frequencies that hold NaN, in a module and in those in it."""
    held = [(name, t) for name, t in module.named_buffers() if name.endswith("inv_freq")]
    return [
        name
        for name, t in held
        if type(t) is torch.Tensor and not t.is_meta and bool(t.isnan().any())
    ]


def _declared(module: Any, types: list[str | None]) -> dict[str | None, Any]:
    """The spec of each type of layers by the configuration; empty if it cannot be read."""
    config = getattr(module, "config", None)
    try:
        spec: Any = RopeSpec.from_config(config.to_dict(), strict=False)  # type: ignore[union-attr]
        return {
            t: (spec.get(t or "") if isinstance(spec, LayerSpecs) else spec, 1.0) for t in types
        }
    except (AttributeError, LookupError, TypeError, ValueError, NotImplementedError):
        return {}


def _held(fresh: Any, types: list[str | None]) -> dict[str | None, Any]:
    """The spec of each type of layers by the frequencies that a module holds; empty if it holds none."""
    found: dict[str | None, Any] = {}
    for layer_type in types:
        prefix = f"{layer_type}_" if layer_type else ""
        held = getattr(fresh, f"{prefix}inv_freq", None)
        if type(held) is not torch.Tensor or held.dim() != 1:
            return {}
        values = tuple(held.double().tolist())
        factor = float(getattr(fresh, f"{prefix}attention_scaling", 1.0))
        found[layer_type] = RopeSpec(2 * len(values), scaling=Given(values)), factor
    return found


def _matching(fresh: Any, specs: dict[str | None, Any], owner: Any) -> list[Made]:
    """Specs with each width with which they have the tables of a module, at all positions tried."""
    if not specs or not all(isinstance(spec, RopeSpec) for spec, _ in specs.values()):
        return []
    tried = [Made(owner, specs, width) for width in WIDTHS]
    return [made for made in tried if all(_alike(fresh, made, t) for t in specs)]


def _alike(fresh: Any, made: Made, layer_type: str | None) -> bool:
    """Return whether a module's tables are exact ones, up to the errors of angles in float32."""
    given = {} if layer_type is None else {"layer_type": layer_type}
    spec, forward = made.specs[layer_type][0], type(fresh).forward
    own = getattr(forward, "_tightrope_original", forward)
    for ids, needed in _positions(fresh, spec):
        module = copy.deepcopy(fresh)  # some modules store the longest length seen
        try:
            theirs = own(module, torch.zeros(1, 1, 1, 1), ids, **given)
            mine = made.tables(ids, layer_type, torch.float64)
        except Exception:  # noqa: BLE001  # third-party code can raise anything
            if needed:
                return False
            continue
        if not isinstance(theirs, tuple) or [t.shape for t in theirs] != [t.shape for t in mine]:
            return False
        longest = int(ids.max()) + 1
        rates = spec.frequencies(longest if spec.by_length else None).inv_freq.double().abs()
        bound = (rates.max() * longest * _ANGLE + _VALUE) * max(1.0, float(mine[0].abs().max()))
        if not all(bool(((a - b.double()).abs() <= bound).all()) for a, b in zip(mine, theirs)):
            return False
    return True


def _positions(fresh: Any, spec: RopeSpec) -> Iterator[tuple[torch.Tensor, bool]]:
    """Positions to try, and whether a module must take them."""
    config = getattr(fresh, "config", None)
    held = [
        getattr(config, n, None)
        for n in ("max_position_embeddings", "original_max_position_embeddings")
    ]
    ends = sorted({*_FAR, *(n for n in held if isinstance(n, int) and 8 < n < 2**21)})
    rows = [(each, True) for each in _IDS] + [
        ([[n, n + 1]], False) for m in ends for n in (m - 2, m)
    ]
    for values, needed in rows:
        ids = torch.tensor(values)
        yield ids, needed
        if spec.axes is not None:
            yield torch.stack([ids // (axis + 1) + axis for axis in range(spec.axis_count)]), needed


def note(module: Any) -> str | None:
    """A line of the report for a module that holds other frequencies than its configuration states, else None."""
    with undisturbed(), torch.no_grad():
        built = _built(module)
    config, name = getattr(module, "config", None), type(module).__name__
    if config is None or (isinstance(built, torch.nn.Module) and _same(module, built)):
        return None
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(built, Exception):
        return f"note: {name} cannot be built again from its configuration, which states {stated}: {built}"
    return (
        f"note: the configuration states {stated}; {name} holds other frequencies or another factor, which are "
        "used. Build the model from the configuration to use its own."
    )


def forward_of(cls: Any, exchanged: bool, counts: list[int]) -> Any:
    """A forward that makes the tables that a module keeps, and looks at the ids of the first calls.

    Args:
        exchanged: whether modules may keep some.
        counts: the calls that are served by what a module keeps and by the original, those with doubtful ids, and
            those that were looked at; see :class:`Calls`.
    """
    original, names = cls.forward, parameters(cls)
    known_names = {*names, "layer_type"}

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = {"layer_type": None, **dict(zip(names, args)), **kwargs}
        x: Any = values.get(names[0])
        ids: Any = values.get("position_ids")
        layer_type = values["layer_type"]
        eager = not torch.compiler.is_compiling()
        if eager and counts[3] < _LOOKED:
            counts[3] += 1
            counts[2] += _restarts(ids)
        made: Any = getattr(self, KEPT, None) if exchanged else None
        if not made:
            return original(self, *args, **kwargs)
        specs = made.specs
        taken = (
            layer_type in specs and isinstance(x, torch.Tensor) and isinstance(ids, torch.Tensor)
        )
        ranks = (2, 3) if taken and specs[layer_type][0].axes is not None else (2,)
        taken = taken and ids.dtype in _INTEGERS and x.is_floating_point() and ids.dim() in ranks
        if not taken or len(values) != len(known_names):
            counts[1] += eager
            return original(self, *args, **kwargs)
        if eager:
            counts[0] += 1
            made = _current(self, made)
        dtype, kind = x.dtype, x.device.type
        if made.stack is not None and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)  # the server's model has this dtype throughout
        with torch.no_grad():
            return made.tables(ids.to(x.device), layer_type, dtype)

    forward._tightrope_original = original  # type: ignore[attr-defined]
    return forward


def _current(module: Any, made: Made) -> Made:
    """The tables that a module makes now; it is read again if its weights or configuration have changed."""
    state = _state(module)
    if not _changed(made.seen, state):
        return made
    try:
        now = read(module, made.owner, made.stack)
    except Unlike as unlike:
        text = (
            f"{type(module).__name__} must have frequencies that can be exchanged, but its weights or configuration "
            f"have changed since patch(model, {made.owner}), and {unlike}; call unpatch(model)"
        )
        raise ValueError(sentence("patch", text)) from None
    vars(module)[KEPT] = now
    return now


def _restarts(ids: Any) -> bool:
    """Return whether ids on the CPU have several equal axes and restart within a row."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 3 or ids.device.type != "cpu":
        return False
    return bool((ids == ids[:1]).all() and (ids[0, :, 1:] < ids[0, :, :-1]).any())


def check_of(cls: Any, options: Any, first: str, is_alive: Callable[[], bool]) -> Any:
    """A ``_call_impl`` that refuses to run a module of a model that is not patched, whose bits would change.

    Args:
        options: those of the patches.
        first: the name of the class of the first model.
        is_alive: whether a patched model exists; what is replaced is restored if not.
    """
    original = cls._call_impl
    text = (
        f"{cls.__name__} must belong to a patched model, because patch({first}, {options}) serves all models of its file "
        f"in this process, but belongs to another; call patch(other_model, {options}), or unpatch(model) before you run "
        f"it, or patch(model, {options}, all_models=True), with which it keeps its own cosines and sines"
    )

    @functools.wraps(original)
    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, MARK, None) and is_alive():
            raise ValueError(sentence("patch", text))
        return original(self, *args, **kwargs)

    return _call_impl
