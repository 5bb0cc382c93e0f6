"""Results in 8 bits: keys, and values, divided by a scale, saturated, and rounded to a float8 format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch

from .._errors import as_real, bad_type, bad_value, check_local, describe, unsupported
from .._tracing import have_tangents, is_readable, is_repeated, is_transformed, needs_plain
from . import memory
from .build import Request, build
from .call import KEYS, VALUES, Call, Slots, pack, tensors_of
from .checks import check_floating, check_outs
from .eight import FORMATS, encoded, encoded_keys
from .layouts import Layout
from .route import KERNEL, TRACED, any_requires_grad, route
from .run import run, with_extras
from .schema import SLOTS, pair, present
from .slots import check_range, check_slots, write_all

#: A positive number, or a tensor of one element or of one for each head.
Scale: TypeAlias = float | torch.Tensor
#: One scale for all, or one for keys and one for values.
ScaleLike: TypeAlias = Scale | tuple[Scale, Scale] | None


#: Types of devices whose kernels take no scales: there torch's own functions encode.
WITHOUT_SCALES = {"cpu"}


def run_scaled(request: Request, scale: ScaleLike) -> Sequence[torch.Tensor]:
    """Rotate, and write the last result to its float8 cache, and values to theirs.

    Args:
        request: with the verb "out" and slots.
        scale: see :func:`tightrope.functional.write_kv`.

    Returns:
        The outs.
    """
    outs, slots = request.outs, cast(Slots, request.slots)
    scales = _scales(scale, slots)
    calls = build(request._replace(verb="new", outs=(), slots=None))
    xs, last = present(request.q, request.k), calls[-1].only([len(calls[-1].xs()) - 1])
    names, layout = request.names[: len(xs)], last.layout()
    check_outs(names, xs, outs, cache=True)
    caches = [outs[-1], *slots.written()]
    _check_caches(caches, slots)
    _check_mode(calls, caches, slots)
    check_slots(slots, names[-1], xs[-1], outs[-1], layout, eight=True)
    _check_heads(scales, (xs[-1], *slots.read()), layout)
    if not torch.compiler.is_compiling():
        memory.check_out(xs, outs, slots)
        check_range(slots, outs[-1], layout)
    way = route(calls[-1])
    encodes = last.q.device.type not in WITHOUT_SCALES
    if encodes and way.route in (KERNEL, TRACED) and not is_repeated():
        _run_kernel(calls, outs, slots, scales, way.route == TRACED)
        return outs
    keys = encoded_keys(last, scales[0], outs[-1].dtype, lambda call: run([call]))
    slot, values, cache = slots
    if values is not None:
        values = encoded(values, scales[1], outs[-1].dtype, layout)
    if len(xs) == 2:
        run([calls[0].only([0])._replace(verb="out", outs=outs[:1])])
    # As bytes, because not every device can index float8.
    rest = [None if one is None else one.view(torch.uint8) for one in (values, cache)]
    write_all([keys.view(torch.uint8)], [outs[-1].view(torch.uint8)], Slots(slot, *rest), layout)
    return outs


def _run_kernel(
    calls: Sequence[Call],
    outs: Sequence[torch.Tensor],
    slots: Slots,
    scales: tuple[Scale, Scale],
    traced: bool,
) -> None:
    """Write everything by the operator: in one launch, and one more for values or for q with another f or P."""
    *others, call = calls
    if others:
        run([others[0]._replace(verb="out", outs=outs[:1])])
    (slot, values, cache), outs = slots, outs[len(others) :]
    of_keys, of_values = _on(scales[0], call.q.device), None
    if values is not None:
        of_values = of_keys if scales[1] is scales[0] else _on(scales[1], call.q.device)
    into = *pair(outs), cache, slot, of_keys, of_values
    arguments = call.q, call.k, values, *into, *with_extras(pack(call))
    if traced:
        SLOTS.carrying(*arguments)
        return
    with torch._C._AutoDispatchBelowAutograd():
        SLOTS.carrying(*arguments)
    torch._C._increment_version([*outs, *slots.written()])


def _on(scale: Scale, device: torch.device) -> torch.Tensor:
    """Return a scale as the operator takes it."""
    if isinstance(scale, torch.Tensor):
        return scale.to(device, torch.float32).reshape(-1).contiguous()
    return torch.full((1,), scale, dtype=torch.float32, device=device)


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
        if given.dim() > 1 or not given.numel() or not given.is_floating_point():
            raise bad_value(
                f"{name} must be a number, or a floating tensor of one element or of one for each head",
                cache_scale=given,
            )
        if is_readable(given):  # to read one on another device would be to wait for it
            for number in given.reshape(-1).tolist():
                _check_number(name, number)
        return given
    number = as_real(given)
    if number is None:
        raise bad_type(f"{name} must be a number or a tensor but got {describe(given)}")
    _check_number(name, number)
    return number


def _check_number(name: str, number: float) -> None:
    if not (number > 0 and math.isfinite(number)):
        raise bad_value(f"{name} must be positive and finite but got {number}")


def _check_heads(scales: Sequence[Scale], xs: Sequence[torch.Tensor], layout: Layout) -> None:
    """Refuse a scale of another number of heads than that of its tensor, k or v."""
    for name, scale, x in zip(("keys", "values"), scales, xs):
        heads = 1 if layout.head is None else x.shape[layout.head]
        if isinstance(scale, torch.Tensor) and scale.numel() not in (1, heads):
            raise bad_value(
                f"cache_scale must have one element or {heads}, one for each head of the {name}, but got "
                f"{scale.numel()}",
                cache_scale=scale,
            )


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
