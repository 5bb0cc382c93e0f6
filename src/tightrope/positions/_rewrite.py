"""Operations on positions: write out explicit ids, concatenate, and take the shard of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._errors import bad_type, bad_value, describe, integer, public
from .._tracing import is_readable
from ._canonical import Positions, PositionsLike, as_positions, count, widened
from ._line import check_cu_seqlens, sequences


@public("explicit")
def explicit(
    positions: PositionsLike,
    tokens: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> Positions:
    """Return the same positions with one explicit id per token.

    Args:
        positions: positions of any kind.
        tokens: number of tokens; optional if there is an id per token already.
        device: device of the ids if ``positions`` is None or an int.

    Returns:
        Positions with int64 or float64 ids, ``offset=0`` and ``add_index=False``.

    >>> explicit(5, 3).ids.tolist()
    [[[5, 6, 7]]]
    """
    where = as_positions(positions)
    ids = written_out(where, tokens_of(where, tokens), device)
    packed = False if where.add_index else where.packed
    return Positions(ids, add_index=False, packed=packed, part=where.part)


def written_out(
    where: Positions, tokens: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return one id for each token, int64 or float64 ``[axes, rows|1, tokens]`` or with heads."""
    ids = where.ids
    if ids is None:
        ids = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    ids = widened(ids) + where.offset
    return ids + torch.arange(tokens, device=ids.device) if where.add_index else ids


@public("concatenate")
def concatenate(parts: Iterable[PositionsLike], *, along: str = "tokens") -> Positions:
    """Concatenate positions along tokens or along rows.

    Use it for images of several sizes in one row, class tokens before an image, or a batch of
    M-RoPE rows.

    Args:
        parts: positions with an id per token (:func:`explicit` makes them), all with the same number
            of axes, and all or none with heads. Along tokens, all parts with more than one row have the same
            number of rows. Along rows, all have the same number of tokens.
        along: "tokens" or "rows".

    Raises:
        ValueError: no parts, parts that do not fit, or one without an id for each token.
        TypeError: parts that are no sequence.

    >>> concatenate([torch.tensor([0]), torch.tensor([7, 8])]).ids.tolist()
    [[[0, 7, 8]]]
    """
    if along not in ("tokens", "rows"):
        raise bad_value(f"along must be 'tokens' or 'rows' but got {along!r}")
    if isinstance(parts, torch.Tensor) or not isinstance(parts, Iterable):
        raise bad_type(f"parts must be a sequence of positions but got {describe(parts)}")
    converted = [as_positions(part) for part in parts]
    if not converted:
        raise bad_value("parts must have at least one element but got none")
    tensors = [written_out(where, tokens_of(where, None)) for where in converted]
    if along == "tokens":
        rows = max(ids.shape[1] for ids in tensors)
        tensors = [
            ids.expand(-1, rows, *ids.shape[2:]) if ids.shape[1] == 1 else ids for ids in tensors
        ]
    first, fixed = tensors[0], (0, 1, 3) if along == "tokens" else (0, 2, 3)
    for ids in tensors:
        if any(ids.shape[dim : dim + 1] != first.shape[dim : dim + 1] for dim in fixed):
            axes, hint = max(len(first), len(ids)), ""
            if len(first) != len(ids) and 1 in (len(first), len(ids)):
                hint = f"; positions.text(part, axes={axes}) gives a part equal coordinates on all axes"
            raise bad_value(
                f"parts must have the same numbers of axes, heads and {'rows' if along == 'tokens' else 'tokens'}{hint}",
                one=first,
                other=ids,
            )
    part = converted[0].part if along == "rows" else None
    if along == "rows" and any(where.part != part for where in converted):
        raise bad_value(
            "parts must all be positions of the tokens of one rank, or all of whole rows"
        )
    ids = torch.cat(tensors, 2 if along == "tokens" else 1)
    packed = any(where.packed for where in converted) or None
    return Positions(ids, add_index=False, packed=packed, part=part)


@public("shard")
def shard(
    positions: PositionsLike,
    rank: int,
    size: int,
    *,
    kind: str = "contiguous",
    tokens: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> Positions:
    """Return the positions of the tokens of one rank of a context-parallel group.

    Args:
        positions: positions of the whole sequence, of any kind.
        rank, size: rank of this process, and number of ranks.
        kind: "contiguous": rank ``r`` holds the ``r``-th of ``size`` equal chunks. "zigzag": there
            are ``2 · size`` equal chunks, and rank ``r`` holds chunk ``r`` followed by chunk
            ``2 · size − 1 − r``, which balances the work of causal attention.
        tokens: number of tokens of the whole sequence; optional if there is an id per token.
        cu_seqlens: for packed sequences with "zigzag": each sequence is split on its own, so its
            length must be a multiple of ``2 · size``.
        device: with "zigzag", device of the ids if ``positions`` is None or an int.

    Returns:
        Positions of ``tokens / size`` tokens. A contiguous shard of 0..n-1, of an offset or of
        offsets per row only changes the offset, and allocates nothing. Rules that depend on the length
        then need ``seq_len``. A rotation of DTensors checks that the rank is that of the process.

    Raises:
        ValueError: a rank outside the group, tokens that do not split evenly, an unknown ``kind``, or no ``tokens``
            where they are needed.
        TypeError: arguments of other types.

    Source: Llama 3 (arXiv 2407.21783), section 3.3.2; packed sequences: TransformerEngine's context
    parallelism.

    >>> shard(None, 1, 4, tokens=16)
    Positions(ids=None, offset=4, add_index=True)
    >>> shard(None, 1, 2, kind="zigzag", tokens=8).ids.tolist()
    [[[2, 3, 4, 5]]]
    """
    where = as_positions(positions)
    size, rank = count("size", size, least=1), integer("rank", rank)
    if not 0 <= rank < size:
        raise bad_value(f"rank must lie in [0, {size}) for size {size} but got {rank}")
    if kind not in ("contiguous", "zigzag"):
        raise bad_value(f"kind must be 'contiguous' or 'zigzag' but got {kind!r}")
    tokens = tokens_of(where, tokens)
    outer_rank, outer_size, whole = where.part or (0, 1, tokens)
    if tokens * outer_size != whole:
        raise bad_value(
            f"tokens must be {whole // outer_size}, the number of tokens of the rank, but got {tokens}"
        )
    part = (outer_rank * size + rank, outer_size * size, whole) if outer_size * size != 1 else None
    if cu_seqlens is not None:
        if kind != "zigzag":
            raise bad_value(
                "cu_seqlens must be None for kind 'contiguous', which cuts the whole row",
                cu_seqlens=cu_seqlens,
            )
        return _taken(where, _packed_zigzag(cu_seqlens, tokens, rank, size), part)
    chunks = size if kind == "contiguous" else 2 * size
    if tokens % chunks:
        raise bad_value(
            f"tokens must be a multiple of {chunks} for {size} {kind} shards but got {tokens}"
        )
    length = tokens // chunks
    starts = [rank * length, (chunks - 1 - rank) * length][: chunks // size]
    if kind == "contiguous" and where.add_index:
        return Positions(where.ids, where.offset + starts[0], part=part)
    own = device if where.ids is None else where.ids.device
    index = torch.cat([torch.arange(start, start + length, device=own) for start in starts])
    return _taken(where, index, part)


def _taken(where: Positions, index: torch.Tensor, part: tuple[int, int, int] | None) -> Positions:
    """Return the positions of the tokens at the given indices, those of one part."""
    if where.ids is None:
        ids = index[None, None]
    elif where.add_index:
        ids = widened(where.ids) + index
    else:
        ids = where.ids.index_select(2, index)
    packed = False if where.add_index else where.packed
    return Positions(ids, where.offset, add_index=False, packed=packed, part=part)


def _packed_zigzag(cu_seqlens: torch.Tensor, tokens: int, rank: int, size: int) -> torch.Tensor:
    check_cu_seqlens(cu_seqlens, tokens)
    if is_readable(cu_seqlens) and bool((cu_seqlens % (2 * size) != 0).any()):
        raise bad_value(
            f"every sequence must have a multiple of {2 * size} tokens for {size} zigzag shards "
            f"but got cu_seqlens {cu_seqlens.tolist()}"
        )
    # This rank has a part of each sequence; these parts are the sequences of its own packed row.
    own = cu_seqlens // size
    place, sequence = sequences(own, tokens // size)
    begin = own.index_select(0, sequence)
    half = (own.index_select(0, sequence + 1) - begin) // 2
    place = place - begin
    # The first half of the part is chunk `rank` of the sequence; the second is chunk
    # 2·size − 1 − rank. The second starts one chunk into the part, so it moves by one chunk less.
    moved = torch.where(place < half, rank * half, (2 * size - 2 - rank) * half)
    return (cu_seqlens.index_select(0, sequence) + place + moved).to(torch.int64)


def tokens_of(where: Positions, tokens: int | None) -> int:
    if tokens is not None:
        tokens = count("tokens", tokens)
    if where.ids is None or where.add_index:
        if tokens is None:
            raise bad_value(
                "tokens must be given for positions without an id for each token; positions.explicit(…, tokens) "
                "writes them out"
            )
        return tokens
    if tokens is not None and tokens != where.ids.shape[2]:
        raise bad_value(
            f"positions must hold one position for each of {tokens} tokens but got "
            f"{where.ids.shape[2]}",
            positions=where.ids,
        )
    return where.ids.shape[2]
