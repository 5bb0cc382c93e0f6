"""Tables of cosines and sines, made by a rotation of pairs (1, 0)."""

from __future__ import annotations

import torch

from .._errors import KINDS, bad_type, bad_value, describe, integer, public
from ..channels import join_pairs, split_pairs
from ..frequencies import length
from ..ops import schema
from ..positions import PositionsLike, as_positions
from ..spec import RopeSpec, SeqLen, prepared
from ._rotate import rotate


@public("build_freqs_cis")
def build_freqs_cis(
    seq_len: int,
    d: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables of the cosines and sines of positions 0..seq_len-1, one entry per pair.

    For :func:`rotary_apply`, which then has the bits of :func:`rotate`, and for inspection; functions that
    take a spec need no tables. :meth:`tightrope.RopeSpec.cos_sin` makes the tables of any spec.

    Args:
        seq_len: number of positions.
        d: channels of a head; even.
        base: base of the frequencies.
        dtype: float32, with errors of at most 1.2e-7 below position 2^31; or float64, 1e-12 up to
            position 2^20.
        device: the device of the tables; torch's default device if None.

    Returns:
        Cosines and sines, ``(seq_len, d / 2)``.

    Raises:
        TypeError, ValueError: an invalid length, width or dtype.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    >>> cos, sin = build_freqs_cis(16, 64)
    >>> cos.shape
    torch.Size([16, 32])
    """
    seq_len, d = integer("seq_len", seq_len), integer("d", d)
    for name, size in (("seq_len", seq_len), ("d", d)):
        if size < 0:
            raise bad_value(f"{name} must not be negative but got {size}")
    if isinstance(d, int) and d % 2:
        raise bad_value(f"d must be even but got {d}")
    if dtype not in (torch.float32, torch.float64):
        raise bad_type(f"dtype must be float32 or float64 but got {dtype}")
    cos, sin = cos_sin(RopeSpec(d, base=base), None, dtype, device, "half", seq_len)
    return cos[0], sin[0]


def cos_sin(
    spec: RopeSpec,
    positions: PositionsLike,
    dtype: torch.dtype,
    device: torch.device | str | None,
    tables: str,
    seq_len: SeqLen,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables of cosines and sines; see :meth:`tightrope.RopeSpec.cos_sin`.

    They are what the rotation makes of pairs (1, 0).
    """
    if tables not in schema.TABLES:
        raise bad_value(f"tables must be one of {', '.join(schema.TABLES)} but got {tables!r}")
    kind = "float32, float64, bfloat16 or float16"
    if not isinstance(dtype, torch.dtype) or dtype not in KINDS[kind]:
        raise bad_type(f"dtype must be {kind} but got {describe(dtype)}")
    rule = "positions must hold the position of every token but"
    if positions is None:
        if seq_len is None:
            raise bad_value(f"{rule} is None; for positions 0 to n - 1 pass seq_len=n")
        rows = "; pass positions for rows of different lengths"
        positions = torch.arange(length(integer("seq_len", seq_len, rows)), device=device)
    where = as_positions(positions)
    if where.ids is None or where.add_index:
        raise bad_value(
            f"{rule} got {describe(positions)}; pass ids or "
            "tightrope.positions.explicit(positions, tokens)"
        )
    ids, heads = where.ids, where.heads or spec.words_for()[0].shape[2]
    x = torch.zeros(
        (ids.shape[1], heads, ids.shape[2], spec.head_dim),
        dtype=dtype,
        device=ids.device if device is None else device,
    )
    turning = slice(spec.start, spec.start + spec.rotary_dim)
    split_pairs(x[..., turning], spec.interleaved)[0].fill_(1.0)
    rotation = prepared(spec, where, x.device, seq_len)
    rotation.check_passed(ids.shape[2])
    rotation.for_tokens(ids.shape[2])
    y = rotate(x, rotation)[..., turning]
    cos, sin = split_pairs(y[:, 0] if heads == 1 else y, spec.interleaved)
    if tables == "half":
        return cos.contiguous(), sin.contiguous()
    repeat = tables == "repeat" or (tables == "full" and spec.interleaved)
    return join_pairs(cos, cos, repeat), join_pairs(sin, sin, repeat)
