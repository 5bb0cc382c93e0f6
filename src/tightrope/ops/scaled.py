"""Results in 8 bits: keys, and values, divided by a scale, saturated, and rounded to a float8 format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch

from .._errors import as_real, bad_type, bad_value, check_local, describe, unsupported
from .._tracing import have_tangents, is_readable, is_transformed, needs_plain
from . import memory
from .build import Request, build
from .call import KEYS, VALUES, Call, Slots, tensors_of
from .checks import check_floating, check_outs
from .route import any_requires_grad
from .run import run
from .schema import ONCE, present
from .slots import check_range, check_slots, write_all

#: A positive number, or a tensor of one element.
Scale: TypeAlias = float | torch.Tensor
#: One scale for all, or one for keys and one for values.
ScaleLike: TypeAlias = Scale | tuple[Scale, Scale] | None

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def run_scaled(request: Request, scale: ScaleLike) -> Sequence[torch.Tensor]:
    """Rotate, and write the last result to its float8 cache, and values to theirs.

    Args:
        request: with the verb "out" and slots.
        scale: see :func:`tightrope.functional.write_kv`.

    Returns:
        The outs.
    """
    outs, slots = request.outs, cast(Slots, request.slots)
    of_keys, of_values = _scales(scale, slots)
    calls = build(request._replace(verb="new", outs=(), slots=None))
    xs, last = present(request.q, request.k), calls[-1].only([len(calls[-1].xs()) - 1])
    names, layout = request.names[: len(xs)], last.layout()
    check_outs(names, xs, outs, cache=True)
    caches = [outs[-1], *slots.written()]
    _check_caches(caches, slots)
    _check_mode(calls, caches, slots)
    x = last.q
    if last.options.rounding == ONCE and x.dtype != torch.float64:
        x = x.float()
    keys = encoded(run([last.on([x])])[0], of_keys, outs[-1].dtype)
    values = slots.values
    if values is not None:
        values = encoded(values, of_values, outs[-1].dtype)
    to = slots._replace(values=values)
    check_slots(to, names[-1], keys, outs[-1], layout)
    if not torch.compiler.is_compiling():
        memory.check_out(xs, outs, slots)
        check_range(to, outs[-1], layout)
    if len(xs) == 2:
        run([calls[0].only([0])._replace(verb="out", outs=outs[:1])])
    # As bytes, because not every device can index float8.
    slot, values, cache = to
    rest = [None if one is None else one.view(torch.uint8) for one in (values, cache)]
    write_all([keys.view(torch.uint8)], [outs[-1].view(torch.uint8)], Slots(slot, *rest), layout)
    return outs


def encoded(y: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    """Return y / scale in a float8 format: divided in float32, then limited to its range and rounded once.

    NaN stays NaN.
    """
    most = torch.finfo(dtype).max
    scale = scale.to(torch.float32) if isinstance(scale, torch.Tensor) else scale
    return (y.to(torch.float32) / scale).clamp(-most, most).to(dtype)


def _scales(given: object, slots: Slots) -> tuple[Scale, Scale]:
    """Return the scales of keys and of values."""
    if not isinstance(given, tuple):
        one = _scale("cache_scale", given)
        return one, one
    if slots.values is None:
        raise bad_value("cache_scale must be one scale without v but got a pair")
    if len(given) != 2:
        raise bad_value(
            f"cache_scale must be one scale or a pair, for keys and values, but got {len(given)}"
        )
    return _scale("cache_scale[0]", given[0]), _scale("cache_scale[1]", given[1])


def _scale(name: str, given: object) -> Scale:
    if isinstance(given, torch.Tensor):
        check_local(name, given)
        if given.numel() != 1 or given.dim() > 1 or not given.is_floating_point():
            raise bad_value(
                f"{name} must be a number, or a floating tensor of one element", cache_scale=given
            )
        if is_readable(given):  # to read one on another device would be to wait for it
            _check_number(name, given.item())
        return given.reshape(())
    number = as_real(given)
    if number is None:
        raise bad_type(f"{name} must be a number or a tensor but got {describe(given)}")
    _check_number(name, number)
    return number


def _check_number(name: str, number: float) -> None:
    if not (number > 0 and math.isfinite(number)):
        raise bad_value(f"{name} must be positive and finite but got {number}")


def _check_caches(caches: Sequence[torch.Tensor], slots: Slots) -> None:
    for name, cache in zip((KEYS, VALUES), caches):
        if cache.dtype not in FORMATS or cache.dtype != caches[0].dtype:
            raise bad_type(
                f"{name} must be float8_e4m3fn or float8_e5m2 with cache_scale, and caches of keys and values alike",
                **{name: cache},
            )
    if slots.values is not None:
        check_floating("v", slots.values)


def _check_mode(calls: Sequence[Call], caches: Sequence[torch.Tensor], slots: Slots) -> None:
    """Refuse a call whose 8-bit results something would have to follow."""
    read = [one for call in calls for one in tensors_of(call.tensors())] + slots.read()
    if needs_plain() or is_transformed() or have_tangents((*read, *caches), False):
        raise unsupported(
            "cache_scale cannot be used in a transform of torch.func, with forward-mode tangents or in an export to ONNX"
        )
    if torch.is_grad_enabled() and any_requires_grad((*read, *caches)):
        raise bad_value(
            "a result in 8 bits has no gradient, but a tensor requires one; use torch.no_grad()"
        )
