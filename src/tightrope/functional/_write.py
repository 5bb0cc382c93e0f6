"""Rotate keys into a cache, with their values beside them."""

from __future__ import annotations

from typing import TypeVar

import torch

from .._errors import bad_type, bad_value, check_type, describe, public
from ..activations import ActLike
from ..ops.build import stages_of
from ..ops.call import KEYS, VALUES, Slots
from ..ops.scaled import ScaleLike, scales_of
from ..positions import PositionsLike
from ..spec import Rope
from ._rotate import GateLike, rotate_with

# The type of q: a tensor or None; the function returns the same type.
_Q = TypeVar("_Q", bound=torch.Tensor | None)

_QK, _K = ("q", "k"), ("k",)


@public("write_kv")
def write_kv(  # noqa: PLR0913  (one argument for each tensor)
    q: _Q,
    k: torch.Tensor,
    v: torch.Tensor | None,
    rope: Rope,
    positions: PositionsLike = None,
    *,
    cache: tuple[torch.Tensor, torch.Tensor | None],
    slots: torch.Tensor | None = None,
    layout: str = "bhsd",
    act: ActLike = None,
    gate: GateLike = None,
    out: torch.Tensor | None = None,
    cache_scale: ScaleLike = None,
) -> _Q:
    """Rotate queries and keys, and write the keys and their values to a cache, in one call.

    Nothing that is written has a gradient: call it under ``torch.no_grad()`` if a tensor requires one.

    Args:
        q: like q of :func:`rotate_qk`; it is rotated for every token. None to write the cache alone.
        k: like k of :func:`rotate_qk`; it goes rotated to the cache.
        v: the values of the tokens of k, with their layout, rows, tokens and dtype, and heads and channels of their
            own; they are copied. None for no values, and then None for their cache.
        rope, positions, layout: see :func:`rotate`.
        cache: the caches of keys and of values. Without ``slots``, each has the shape of what goes there: a slice
            of a contiguous cache, where k and v may be already. With ``slots``, each is laid out like the keys, any strides, with blocks in place
            of rows and entries in place of tokens: ``(blocks, heads, entries, channels)`` for "bhsd". For "thd" it
            is ``(slots, heads, channels)`` or ``(blocks, entries, heads, channels)``, for "sd" ``(slots,
            channels)`` or ``(blocks, entries, channels)``.
        slots: the entry of the cache that each token goes to, int32 or int64 ``(rows, tokens)``, or ``(tokens,)``
            for one row. Slot s is entry ``s % entries`` of block ``s // entries``; -1 skips the token. Of several
            tokens with one slot, any may win. A slot outside the cache is an IndexError on the CPU, before anything
            is written (in compiled code a RuntimeError of the kernel; where the definition runs, its token is
            skipped there); on a GPU its token is skipped.
        act, gate: see :func:`rotate_qk`.
        out: the tensor to write rotated q to; q itself rotates it in place. None for a new tensor.
        cache_scale: for caches of float8_e4m3fn or float8_e5m2: a positive number, or a floating tensor ``(1,)`` or
            ``(heads,)``, that keys and values are divided by, in float32, before they are limited to the range of
            the format and rounded. Reading multiplies by it. A pair: one for keys, one for values. With the
            rounding "once" keys are rounded only to float8; otherwise first to the dtype of k.

    Returns:
        Rotated q, ``out`` if given; None if q is None.

    Raises:
        TypeError, ValueError, IndexError: invalid arguments; the message names the argument.
        NotImplementedError: see :func:`rotate`; also in a transform of torch.func and in an export to ONNX.

    >>> from tightrope import RopeSpec
    >>> q, (k, v) = torch.randn(1, 8, 1, 64), torch.randn(2, 1, 2, 1, 64)
    >>> keys, values = torch.zeros(2, 1, 2, 100, 64)
    >>> here = slice(7, 8)  # the eighth token
    >>> q = write_kv(q, k, v, RopeSpec(64), 7, cache=(keys[:, :, here], values[:, :, here]))

    A paged cache, of 10 blocks of 16 entries:

    >>> keys, values = torch.zeros(2, 10, 2, 16, 64)
    >>> q = write_kv(q, k, v, RopeSpec(64), 7, cache=(keys, values), slots=torch.tensor([39]))
    """
    to = _destination(k, v, cache, slots)
    if cache_scale is not None:
        to = to._replace(scales=scales_of(cache_scale, v))
    stages = stages_of(act, gate)
    outs = [cache[0]]
    if q is not None:
        if isinstance(q, torch.Tensor):
            outs.insert(0, torch.empty_like(q) if out is None else out)
        call = rope, positions, layout, False, stages, outs, to
        return rotate_with(_QK, "out", q, k, *call)[0]  # type: ignore[return-value]
    if out is not None:
        raise bad_value("out must be None without q, which would go there")
    stages = None if stages is None else stages.of_keys()
    # Of keys alone, the first tensor is k.
    rotate_with(_K, "out", k, None, rope, positions, layout, False, stages, outs, to)
    return None  # type: ignore[return-value]


def _destination(k: object, v: object, cache: object, slots: object) -> Slots:
    """Check the types of the arguments that name the destination."""
    check_type("k", k)
    if not isinstance(cache, (tuple, list)) or len(cache) != 2:
        raise bad_type(
            f"cache must be a pair, the caches of keys and of values, but got {describe(cache)}"
        )
    keys, values = cache
    check_type(KEYS, keys)
    for name, one in (("v", v), (VALUES, values)):
        if one is not None and not isinstance(one, torch.Tensor):
            raise bad_type(f"{name} must be a tensor or None but got {describe(one)}")
    if (v is None) != (values is None):
        lacks = "v" if v is None else VALUES
        raise bad_value(f"v and {VALUES} must both be given, or both be None, but {lacks} is None")
    if slots is not None:
        check_type("slots", slots)
    return Slots(slots, v, values)  # type: ignore[arg-type]
