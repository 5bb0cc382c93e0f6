"""Results in 8 bits: keys, and values, divided by a scale, saturated, and rounded to a float8 format."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch

from .._errors import as_real, bad_type, bad_value, check_local, describe
from .._tracing import is_readable
from .call import KEYS, VALUES, Call, Slots
from .checks import check_floating
from .eight import FORMATS, encoded, encoded_keys
from .layouts import Layout

#: A positive number, or a tensor of one element or of one for each head.
Scale: TypeAlias = float | torch.Tensor
#: One scale for all, or one for keys and one for values.
ScaleLike: TypeAlias = Scale | tuple[Scale, Scale] | None

#: Types of devices whose kernels take no scales: there torch's own functions encode.
WITHOUT_SCALES = {"cpu"}


def scales_of(given: object, values: object) -> tuple[Scale, Scale]:
    """Return the scales of keys and of values."""
    if not isinstance(given, tuple):
        one = _scale("cache_scale", given)
        return one, one
    if values is None:
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


def check_formats(slots: Slots, out: torch.Tensor) -> None:
    """Refuse caches that are not in one format of 8 bits."""
    for what, cache in ((KEYS, out), (VALUES, slots.cache)):
        if cache is not None and (cache.dtype not in FORMATS or cache.dtype != out.dtype):
            raise bad_type(
                f"{what} must be float8_e4m3fn or float8_e5m2 with cache_scale, and caches of keys and values alike",
                **{what: cache},
            )
    if slots.values is not None:
        check_floating("v", slots.values)


def check_heads(slots: Slots, x: torch.Tensor, layout: Layout) -> None:
    """Refuse a scale of another number of heads than that of its tensor, k or v."""
    for name, scale, one in zip(("keys", "values"), slots.scales or (), (x, *slots.read())):
        heads = 1 if layout.head is None else one.shape[layout.head]
        if isinstance(scale, torch.Tensor) and scale.numel() not in (1, heads):
            raise bad_value(
                f"cache_scale must have one element or {heads}, one for each head of the {name}, but got "
                f"{scale.numel()}",
                cache_scale=scale,
            )


def on(slots: Slots, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scales of keys and of values as the operator takes them."""
    of_keys, of_values = cast("tuple[Scale, Scale]", slots.scales)
    keys = _on(of_keys, device)
    if slots.values is None:
        return keys, None
    return keys, keys if of_values is of_keys else _on(of_values, device)


def _on(scale: Scale, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.to(device, torch.float32).reshape(-1).contiguous()
    return torch.full((1,), scale, dtype=torch.float32, device=device)


def in_bytes(
    call: Call, rotate: Callable[[Call], Sequence[torch.Tensor]]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Slots]:
    """Return what a call writes to caches in 8 bits: results, destinations and slots, for :func:`.slots.write_all`.

    Caches, and what goes there, are bytes, because not every device can index float8.

    Args:
        rotate: rotates a call into new tensors.
    """
    slots, cache, last = cast(Slots, call.slots), call.outs[-1], len(call.outs) - 1
    of_keys, of_values = cast("tuple[Scale, Scale]", slots.scales)
    keys = encoded_keys(call.only([last]), of_keys, cache.dtype, rotate)
    values = slots.values
    if values is not None:
        values = encoded(values, of_values, cache.dtype, call.layout())
    first = rotate(call.only([0])) if last else []
    rest = [None if one is None else one.view(torch.uint8) for one in (values, slots.cache)]
    ys, outs = [*first, keys.view(torch.uint8)], [*call.outs[:-1], cache.view(torch.uint8)]
    return ys, outs, Slots(slots.slot, rest[0], rest[1])
