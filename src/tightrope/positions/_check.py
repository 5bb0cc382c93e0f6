"""What looks wrong about position ids: a report for the test of a data collator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._errors import bad_type, bad_value, check_dense, describe, public
from .._tracing import is_readable
from ._batch import parts, whole
from ._canonical import Positions, count
from ._rewrite import tokens_of, written_out

#: What can be wrong, each with a sentence. `tightrope audit` gives functions that make these faults the same codes.
FAULTS = {
    "position-dtype": "{dtype} does not hold all whole numbers above {limit:,}, and ids reach {reach:,}.",
    "attention-mask": "All ids are 0 or 1, so they may be an attention mask.",
    "axes": "{what}.",
    "row-positions": "All rows have the ids of row 0, but they begin at different tokens.",
    "padding-counted": "The first id is {first}, the number of padding tokens before it.",
    "numbered-through": "Ids go on from the sequence before, and do not restart at 0.",
    "position-offset": "The first id is {first}, not 0.",
    "restarts-inside": "Ids restart at 0 inside a sequence.",
    "position-order": "Ids fall inside a sequence, from {before} to {after}.",
    "beyond-length": "Ids reach {reach:,}, but there are only {length:,} positions.",
}


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    Attributes:
        code: a key of the table of docs/positions.md, such as ``"numbered-through"``.
        text: one sentence.
        places: where, each ``(row, token)``.
    """

    code: str
    text: str
    places: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        (row, token), *others = self.places
        more = f" and {len(others)} more" if others else ""
        return f"{self.code}, row {row}, token {token}{more}: {self.text}"


@dataclass(frozen=True)
class Report:
    """The result of :func:`check`: ``print`` shows it.

    Attributes:
        findings: what looks wrong; empty if nothing does.
        unknown: what could not be checked, and the argument that tells it.
    """

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing looks wrong."""
        return not self.findings

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings] or ["Nothing looks wrong."]
        return "\n".join(lines + [f"Not known: {each}." for each in self.unknown])


@public("check")
def check(
    ids: torch.Tensor | Positions,
    *,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    token_types: torch.Tensor | None = None,
    length: int | None = None,
) -> Report:
    """Report what looks wrong about position ids of whole sequences, and where.

    For the test of a data collator, not for each step: it reads values, so tensors must be on the CPU. It knows what
    text and M-RoPE ids look like. Ids that are unusual on purpose, such as those of a chunk, are reported too. Ids that
    repeat or leave numbers out are not: those of images do.

    Args:
        ids: of any dtype, ``(tokens,)``, ``(rows, tokens)`` or ``(axes, rows, tokens)``; of four axes the first is that
            of the text, as in transformers. Or :class:`Positions` that have an id for each token.
        attention_mask: ``(rows, tokens)``: 0 or false for padding. Packed rows number their sequences: 1, 2, ….
        cu_seqlens: int32 or int64 ``(sequences + 1,)``, instead of a mask: the packed sequences of a single row.
        token_types: integers like ids of one axis: 0 for text, other numbers for images and videos.
        length: number of positions that the model was trained for, or that its tables have.

    Returns:
        The findings, and what could not be known.

    Raises:
        ValueError: shapes that do not fit each other, or tensors whose values cannot be read.
        TypeError: arguments of another type.

    >>> packed = torch.tensor([0, 1, 2, 3, 4])
    >>> print(check(packed, cu_seqlens=torch.tensor([0, 3, 5]), length=4096))
    numbered-through, row 0, token 3: Ids go on from the sequence before, and do not restart at 0.
    """
    given = _of_axes(ids)
    log = _Log()
    length = None if length is None else count("length", length, least=1)
    types = None if token_types is None else whole("token_types", token_types)
    if attention_mask is not None and given.shape[1] == 1:
        given = given.expand(-1, len(whole("attention_mask", attention_mask)), -1)
    if types is not None and types.shape != given.shape[1:]:
        raise bad_value(
            "token_types must have one entry for each token", token_types=types, ids=given
        )
    sequences = parts(given, attention_mask, cu_seqlens)
    starts = {int(row[0][0]) for row in sequences if row and len(row[0])}
    if len(starts) > 1 and bool((given == given[:, :1]).all()):
        log.add("row-positions", 1, 0)
    values = given.double() if given.is_floating_point() else given.long()
    _check_values(log, values, given.dtype, sequences, length)
    known = attention_mask is not None or cu_seqlens is not None
    if not known:
        sequences = [[_without_padding(values[:, row])] for row in range(values.shape[1])]
    if "attention-mask" not in log.found:
        for each in (values,) if len(values) != 4 else (values[:1], values[1:]):
            _check_rows(log, each, sequences, types, known)
    unknown = []
    if not known:
        unknown.append("where sequences begin; pass attention_mask or cu_seqlens")
    if length is None:
        unknown.append("how many positions the model has; pass length")
    if len(given) > 1 and types is None:
        unknown.append("which tokens are images; pass token_types")
    if len(given) == 1 and types is not None and types.any():
        unknown.append("whether images have axes of their own in this model")
    return Report(log.findings(), tuple(unknown))


class _Log:
    """Findings by code, each with the sentence of its first place."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, dict[tuple[int, int], None]]] = {}

    def add(self, code: str, row: int, token: int, **facts: object) -> None:
        text = FAULTS[code].format(**facts)
        self.found.setdefault(code, (text, {}))[1][row, token] = None

    def findings(self) -> tuple[Finding, ...]:
        return tuple(Finding(code, text, tuple(at)) for code, (text, at) in self.found.items())


def _of_axes(ids: object) -> torch.Tensor:
    """Return ids ``[axes, rows, tokens]``, in their own dtype."""
    if isinstance(ids, Positions):
        ids = written_out(ids, tokens_of(ids, None))
    if not isinstance(ids, torch.Tensor) or ids.is_complex():
        raise bad_type(f"ids must be a real tensor or positions but got {describe(ids)}")
    if not is_readable(ids):
        raise bad_value("ids must be on the CPU, outside of compiled code", ids=ids)
    check_dense("ids", ids)
    if ids.dim() not in (1, 2, 3) or (ids.dim() == 3 and not len(ids)):
        raise bad_value(
            "ids must have shape (tokens,), (rows, tokens) or (axes, rows, tokens)", ids=ids
        )
    return ids[(None,) * (3 - ids.dim())]


def _without_padding(ids: torch.Tensor) -> torch.Tensor:
    """Return the indices of the tokens of a row ``[axes, tokens]`` without ones before a 0: padding in transformers."""
    tokens = torch.arange(ids.shape[1], device=ids.device)
    others = (ids != 1).any(0).nonzero()[:1, 0].tolist()
    return tokens[others[0] :] if others and not ids[:, others[0]].any() else tokens


def _check_rows(
    log: _Log,
    ids: torch.Tensor,
    sequences: list[list[torch.Tensor]],
    types: torch.Tensor | None,
    known: bool,
) -> None:
    """Check the order of ids ``[axes, rows, tokens]``, sequence by sequence; ``known`` where these are given."""
    last: float = -1
    for row, of_row in enumerate(sequences):
        for number, tokens in enumerate(of_row):
            if not len(tokens):
                continue
            part = ids[:, row, tokens]
            _check_start(log, row, int(tokens[0]), part[:, 0], last, is_first=number == 0)
            # Text rises by the same steps on all axes. Tokens of an image that have equal ids do not fall either.
            text = (part == part[0]).all(0)
            if types is not None and len(ids) > 1:
                _check_axes(log, row, tokens, part, types[row, tokens])
            values, index = part[0, text], tokens[text]
            for at in (values.diff() < 0).nonzero()[:, 0].tolist():
                before, after = values[at].item(), values[at + 1].item()
                if after != 0:
                    facts = {"before": f"{before:,}", "after": f"{after:,}"}
                    log.add("position-order", row, int(index[at + 1]), **facts)
                elif known:
                    log.add("restarts-inside", row, int(index[at + 1]))
            last = part.max().item()


def _check_start(
    log: _Log, row: int, token: int, first: torch.Tensor, last: float, *, is_first: bool
) -> None:
    """Check the ids ``[axes]`` of the first token of a sequence, after one that ended with ``last``."""
    value = first[0].item()
    if not first.any():
        return
    if is_first and token > 0 and value == token:
        if "row-positions" not in log.found:
            log.add("padding-counted", row, token, first=f"{value:,}")
    elif value == last + 1:
        log.add("numbered-through", row, token)
    else:
        log.add("position-offset", row, token, first=f"{value:,}")


def _check_axes(
    log: _Log, row: int, tokens: torch.Tensor, ids: torch.Tensor, types: torch.Tensor
) -> None:
    """Check that the axes of ids ``[axes, tokens]`` differ in images, which are not numbered like text, and only there."""
    kinds, counts = torch.unique_consecutive(types, return_counts=True)
    begin = 0
    for kind, size in zip(kinds.tolist(), counts.tolist(), strict=True):
        part = ids[:, begin : begin + size]
        same = (part == part[0]).all(0)
        if kind == 0 and not same.all():
            at = begin + int((~same).nonzero()[0])
            log.add("axes", row, int(tokens[at]), what="Text has different ids on its axes")
        elif kind != 0 and size > 1 and same.all() and (part[0].diff() == 1).all():
            what = "Tokens of an image have the same ids on all axes"
            log.add("axes", row, int(tokens[begin]), what=what)
        begin += size


def _check_values(
    log: _Log,
    ids: torch.Tensor,
    dtype: torch.dtype,
    sequences: list[list[torch.Tensor]],
    length: int | None,
) -> None:
    """Check ids that are not those of padding: the dtype they had, whether they are a mask, and the largest."""
    longest = max((len(tokens) for row in sequences for tokens in row), default=0)
    real = torch.zeros(ids.shape[1:], dtype=torch.bool, device=ids.device)
    for row, of_row in enumerate(sequences):
        for tokens in of_row:
            real[row, tokens] = True
    values = ids[:, real]
    if not values.numel():
        return
    if not values.isfinite().all():
        raise bad_value("ids must be finite", ids=ids)
    mask = bool(((values == 0) | (values == 1)).all() and (values == values[0]).all())
    if dtype == torch.bool or (longest > 2 and mask):
        log.add("attention-mask", 0, 0)
        return
    reach = int(values.max())
    needed = max(reach, longest - 1)
    limit = round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    # The limit itself may be a larger id that was rounded, if there are not as many tokens.
    if needed > limit or (dtype.is_floating_point and reach == limit > longest - 1):
        name = str(dtype).removeprefix("torch.")
        log.add("position-dtype", 0, 0, dtype=name, limit=limit, reach=needed)
    if length is not None and reach >= length:
        at = ids.amax(0).masked_fill(~real, -1).argmax()
        log.add("beyond-length", *divmod(int(at), ids.shape[2]), reach=reach, length=length)
