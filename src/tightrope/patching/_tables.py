"""Exchange the cosines and sines that modules of a model make: by exact ones, or by those of a server.

A module's tables are exchanged if they are those of a spec, up to the error of float32, at all positions tried. The
module keeps the spec, and the ``forward`` of its class makes tables from it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import positions as positions_, stacks
from .._errors import sentence
from .._tracing import is_readable, undisturbed
from ..config import LayerSpecs
from ..frequencies import Given
from ..spec import RopeSpec
from ._kinds import WIDTHS

#: The attribute in which modules of a patched model keep what their tables are made from.
KEPT = "_tightrope_tables"
#: The attribute in which a patched model, and so every deep copy of it, holds its patch. With options that change bits, so
#: do its modules that call what is replaced.
MARK = "_tightrope_patch"
# Positions that are compared, as rows, and ends of longer ones, at which a module may raise an error.
_IDS = ([[3, 1, 7, 2, 12, 40], [28, 10, 64, 19, 109, 361]], [[3], [28]], [[*range(300)]])
_FAR = (2**13, 2**15, 2**17)
# The float32 error that a module's tables may have: relative to the angle, and absolute.
_ANGLE, _VALUE = 6e-7, 4e-6
# Relative and absolute error of a cast of frequencies to bfloat16 or float16.
_CAST, _CAST_TINY = 2**-8, 2**-24
_INTEGERS = torch.int64, torch.int32
# The endings of attributes that decide tables, besides buffers.
_FACTORS = "rope_type", "attention_scaling"
# The calls of a module whose ids are looked at.
_LOOKED = 100


class Unlike(ValueError):
    """The tables of a module cannot be exchanged; the message is the reason."""


class Kept:
    """The state that modules of a patched model hold: deep copies share it, and a pickled model has none where it is loaded."""

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ()


@dataclass(eq=False)
class Made(Kept):
    """The tables that a module of a patched model makes instead of its own.

    Attributes:
        owner: the patch that made it.
        specs: a spec and a further factor for each type of layers.
        width: the format of the tables, a key of WIDTHS.
        stack: the name of the stack whose arithmetic is used; None for exact angles.
        seen: what the module's own tables follow from; see :func:`_state`.
    """

    owner: Any
    specs: dict[str | None, Any]
    width: str
    stack: str | None = None
    seen: Any = None

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


def kept_forwards(module: Any) -> list[str]:
    """The names under which hooks of a module, such as those of accelerate, keep its forward."""
    return [
        name
        for name, held in vars(module).items()
        if getattr(held, "__self__", None) is module and held.__name__ == "forward"
    ]


def read(module: Any, owner: Any, stack: str | None) -> Made:
    """Recognise the tables of a module by calling it.

    Raises:
        Unlike: they cannot be exchanged; the message is the reason.
    """
    if "forward" in vars(module) and not kept_forwards(module):
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
            types = [n[: -len("_inv_freq")] for n in names if "original_inv_freq" not in n]
        found = _matching(fresh, _declared(module, types), owner)
        if not found and stack is None:
            found = _matching(fresh, {each: _held(fresh, each) for each in types}, owner)
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
    decides, held = _state(module)
    made.seen = copy.deepcopy(decides), held
    return made


def _fresh(module: Any) -> Any:
    """A module with the same tables in float32 on the CPU: built from the configuration if that gives its buffers."""
    built, doubt = by_configuration(module)
    if not doubt:
        return built
    if any(t.is_meta or t.dtype != torch.float32 for t in module.buffers()):
        raise Unlike(
            "its frequencies are on the meta device or not float32, and its configuration does not give them"
        )
    copied = copy.deepcopy(module).cpu()
    # Of a wrapper, which may call the original module.
    for name in (KEPT, "forward", "_old_forward", "_hf_hook"):
        vars(copied).pop(name, None)
    return copied


def by_configuration(module: Any) -> tuple[Any, str]:
    """A module of the same class, built from the configuration that it has now, and how it differs: "" if it does not."""
    config, name = getattr(module, "config", None), type(module).__name__
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    with undisturbed(), torch.no_grad():
        try:
            built = type(module)(module.config)
        except Exception as error:  # noqa: BLE001  # third-party code can raise anything
            words = f"cannot be built again from its configuration, which states {stated}: {error}"
            return None, f"{name} {words}"
        if _same(module, built):
            return built, ""
    return built, (
        f"the configuration states {stated}; {name} holds other frequencies or another factor, which are used. "
        "Build the model from the configuration to use its own."
    )


def _same(module: Any, built: torch.nn.Module) -> bool:
    """Return whether a module has the buffers of another, up to the rounding of a cast, and its factor.

    If frequencies depend on the length, the buffer holds those of the last call, and ``original_inv_freq`` the first.
    """
    rules = str(getattr(module, "rope_type", ""))
    kept = "original_inv_freq" if "dynamic" in rules or "longrope" in rules else ""
    for name, began in built.named_buffers():
        now = getattr(module, name, None)
        if not isinstance(now, torch.Tensor) or now.is_meta or not name.endswith(kept):
            continue
        now, began = now.detach().cpu().float(), began.float()
        if now.shape != began.shape or not torch.allclose(now, began, _CAST, _CAST_TINY):
            return False
    names = [name for name in vars(module) if name.endswith(_FACTORS)]
    return all(getattr(module, name) == getattr(built, name, None) for name in names)


def _state(module: Any) -> tuple[Any, list[torch.Tensor]]:
    """The state from which a module makes tables: its configuration, factors, and buffers with their versions; no copy.

    The buffers themselves come second: while they are held, no other tensor has their identities.
    """
    config, own, held = getattr(module, "config", None), vars(module), [*module.buffers()]
    names = "rope_parameters", "max_position_embeddings", "original_max_position_embeddings"
    values = [getattr(config, name, None) for name in names]
    factors = {name: own[name] for name in own if name.endswith(_FACTORS)}
    return (values, factors, [(id(t), t.is_inference() or t._version) for t in held]), held


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


def _held(fresh: Any, layer_type: str | None) -> tuple[RopeSpec | None, float]:
    """The spec of a type of layers by the frequencies that a module holds, and its factor; None if it holds none."""
    prefix = f"{layer_type}_" if layer_type else ""
    held = getattr(fresh, f"{prefix}inv_freq", None)
    if type(held) is not torch.Tensor or held.dim() != 1:
        return None, 1.0
    spec = RopeSpec(2 * len(held), scaling=Given(tuple(held.double().tolist())))
    return spec, float(getattr(fresh, f"{prefix}attention_scaling", 1.0))


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
    names = "max_position_embeddings", "original_max_position_embeddings"
    stated = [getattr(config, name, None) for name in names]
    ends = {*_FAR, *(n for n in stated if isinstance(n, int) and 8 < n < 2**21)}
    rows = [(each, True) for each in _IDS]
    rows += [([[n, n + 1]], False) for end in ends for n in (end - 2, end)]
    for values, needed in rows:
        ids = torch.tensor(values)
        yield ids, needed
        if spec.axes is not None:
            yield torch.stack([ids // (axis + 1) + axis for axis in range(spec.axis_count)]), needed


def forward_of(cls: Any, exchanged: bool, counts: list[int]) -> Any:
    """A forward that makes the tables that a module keeps, and looks at the ids of the first calls.

    Args:
        exchanged: whether modules may keep some.
        counts: the calls that are served by what a module keeps and by the original, those whose ids restart and
            those whose rows share ids in spite of padding, see :class:`Calls`; and how many were looked at.
    """
    original, names = cls.forward, parameters(cls)
    known_names = {*names, "layer_type"}

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = {"layer_type": None, **dict(zip(names, args)), **kwargs}
        x: Any = values.get(names[0])
        ids: Any = values.get("position_ids")
        layer_type, eager = values["layer_type"], not torch.compiler.is_compiling()
        if eager and counts[4] < _LOOKED:
            counts[4] += 1
            counts[2] += _restarts(ids)
            counts[3] += _shared(x, ids)
        made: Any = getattr(self, KEPT, None) if exchanged else None
        if not made:
            return original(self, *args, **kwargs)
        spec, _ = made.specs.get(layer_type, (None, 1.0))
        taken = spec is not None and len(values) == len(known_names)
        taken = taken and isinstance(x, torch.Tensor) and isinstance(ids, torch.Tensor)
        taken = taken and ids.dtype in _INTEGERS and x.is_floating_point()
        if not taken or ids.dim() not in (2, 2 if spec.axes is None else 3):
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
    if made.seen[0] == _state(module)[0]:
        return made
    try:
        now = read(module, made.owner, made.stack)
    except Unlike as unlike:
        text = (
            f"{type(module).__name__} must have frequencies that can be exchanged, but its weights or configuration "
            f"have changed since patch(model, {made.owner.options}), and {unlike}; call unpatch(model)"
        )
        raise ValueError(sentence("patch", text)) from None
    vars(module)[KEPT] = now
    return now


def _restarts(ids: Any) -> bool:
    """Return whether ids on the CPU have several equal axes and restart within a row."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 3 or not is_readable(ids):
        return False
    return bool((ids == ids[:1]).all() and (ids[0, :, 1:] < ids[0, :, :-1]).any())


def _shared(x: Any, ids: Any) -> bool:
    """Return whether rows on the CPU share ids, although some begin with padding.

    A mask is not seen here. A row is padded on the left if its first two tokens are equal: those of another row are not.
    A row of text that begins with a repeated token looks the same.
    """
    if not isinstance(x, torch.Tensor) or not isinstance(ids, torch.Tensor) or x.dim() != 3:
        return False
    if x.shape[0] < 2 or x.shape[1] < 2 or ids.dim() not in (2, 3):
        return False
    if not is_readable(x) or not is_readable(ids):
        return False
    equal = (x[:, 0] == x[:, 1]).all(-1)
    if not bool(equal.any()) or bool(equal.all()):
        return False
    return bool((ids == ids[..., :1, :]).all())


def check_of(cls: Any, options: Any, first: str, is_checked: Callable[[type], bool]) -> Any:
    """A ``_call_impl`` that refuses to run a module of a model that is not patched, whose bits would change.

    Args:
        options: those of the patches.
        first: the name of the class of the first model.
        is_checked: whether a patched model of the class exists; what is replaced is restored if not.
    """
    original = cls._call_impl
    text = (
        f"{cls.__name__} must belong to a patched model, because patch({first}, {options}) serves all models of its file "
        f"in this process, but belongs to another; call patch(other_model, {options}), or unpatch(model) before you run "
        f"it, or patch(model, {options}, all_models=True), with which it keeps its own cosines and sines"
    )

    @functools.wraps(original)
    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, MARK, None) and is_checked(cls):
            raise ValueError(sentence("patch", text))
        return original(self, *args, **kwargs)

    return _call_impl
