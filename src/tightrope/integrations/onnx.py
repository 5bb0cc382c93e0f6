"""Export to ONNX with nodes of its operator ``RotaryEmbedding``.

Without this module, ``torch.onnx.export(model, args, dynamo=True)`` exports the definition, which is plain
torch. See docs/deploy.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .._errors import bad_value, integer, public, unsupported
from .._tracing import is_transformed, lowerings
from ..ops.call import Call
from ..ops.definition import Turn, cos_sin, turn_by
from ..ops.schema import FORWARD, FULL, ONCE, WORDS, Options

__all__ = ["export", "plain_torch", "rotary_nodes"]

# The first version of ONNX's operators that has RotaryEmbedding.
_OPSET = 23


@public("onnx.export")
def export(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    f: Any = None,
    *,
    length: int | None = None,
    opset_version: int = _OPSET,
    **options: Any,
) -> Any:
    """Export a model by ``torch.onnx.export``, inside of :func:`rotary_nodes`.

    Args:
        model, args, f, options: see ``torch.onnx.export``; ``dynamo=True`` is set.
        length: see :func:`rotary_nodes`.
        opset_version: the version of ONNX's operators, 23 or later.

    Returns:
        The ``torch.onnx.ONNXProgram``.

    Raises:
        ValueError: a version before 23; see also :func:`rotary_nodes`.
        NotImplementedError: onnxscript, which torch needs, is not installed.

    >>> export(torch.nn.Identity(), opset_version=20)
    Traceback (most recent call last):
    ValueError: [onnx.export] opset_version must be at least 23, the first with RotaryEmbedding, but got 20.
    """
    if integer("opset_version", opset_version) < _OPSET:
        raise bad_value(
            f"opset_version must be at least {_OPSET}, the first with RotaryEmbedding, but got "
            f"{opset_version}"
        )
    if importlib.util.find_spec("onnxscript") is None:
        raise unsupported("onnxscript must be installed, as by pip install 'tightrope[onnx]'")
    with rotary_nodes(length):
        return torch.onnx.export(
            model, args, f, dynamo=True, opset_version=opset_version, **options
        )


@public("onnx.rotary_nodes")
def rotary_nodes(length: int | None = None) -> AbstractContextManager[None]:
    """Return a block in which ``torch.onnx.export`` and ``torch.export.export`` rotate by ``RotaryEmbedding``.

    Each rotated tensor becomes one node, which computes in float32. Angles that are known at the
    export become exact tables of cosines and sines, as do those of ids if ``length`` is given; the graph
    computes all others. Calls that the node cannot express become plain torch: float64, angles of each
    head, "full" tables, and roundings other than "once".

    Args:
        length: an upper limit of positions that are integers. Their angles are then looked up in tables of
            this length; a token whose position is negative or not below ``length`` becomes NaN. None to
            compute the angles of any position in the graph.

    Raises:
        ValueError, TypeError: a length that is not an int, or is negative.

    >>> from tightrope import RopeSpec, rotate
    >>> class Model(torch.nn.Module):
    ...     def forward(self, q):
    ...         return rotate(q, RopeSpec(64))
    >>> with rotary_nodes(length=4096):
    ...     program = torch.export.export(Model(), (torch.randn(1, 8, 16, 64),))
    >>> sum("RotaryEmbedding" in str(node.target) for node in program.graph.nodes)
    1
    """
    if length is not None and integer("length", length) < 0:
        raise bad_value(f"length must not be negative but got {length}")
    return _lowered(_Nodes(length))


def plain_torch() -> AbstractContextManager[None]:
    """Return a block in which ``torch.export.export`` traces the definition, which is plain torch.

    For programs that ``torch.onnx.export`` or another converter takes; a model that is given to
    ``torch.onnx.export`` needs no block.

    >>> from tightrope import RopeSpec, rotate
    >>> class Model(torch.nn.Module):
    ...     def forward(self, q):
    ...         return rotate(q, RopeSpec(64))
    >>> with plain_torch():
    ...     program = torch.export.export(Model(), (torch.randn(1, 8, 16, 64),))
    >>> any("tightrope" in str(node.target) for node in program.graph.nodes)
    False
    """
    return _lowered(None)


@contextmanager
def _lowered(how: _Nodes | None) -> Iterator[None]:
    lowerings.append(how)
    try:
        yield
    finally:
        lowerings.pop()


class _Caches(NamedTuple):
    """Cosines and sines as the node reads them: ``[length, pairs]`` with ids, else ``[rows|1, tokens, pairs]``.

    Attributes:
        cos, sin: float32; times the amplitude, and of the negative angles if the call inverts.
        ids: the row of the tables for each token, ``[rows|1, tokens]``, or None.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    ids: torch.Tensor | None = None


class _Nodes:
    """Makes the functions that rotate by a node; see :func:`rotary_nodes`."""

    def __init__(self, length: int | None) -> None:
        self._length = length
        # Layers share their tables, so that a file holds each once.
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, call: Call, tokens: int, dtype: torch.dtype) -> Turn:
        options = call.options
        plain = dtype == torch.float64 or options.source == FULL or is_transformed()
        if plain or options.rounding != ONCE or options.narrow:
            return turn_by(call, tokens, dtype)
        caches = self._looked_up(call, tokens)
        if caches is None:
            cos, sin = _signed(cos_sin(call, tokens, dtype), options)
            if cos.shape[1] != 1 or cos.shape[3] == 0:
                return turn_by(call, tokens, dtype)
            caches = _Caches(cos[:, 0], sin[:, 0])
        return lambda x: _turned(x, caches, options)

    def _looked_up(self, call: Call, tokens: int) -> _Caches | None:
        """Return tables for the angles of a call; None if the graph must compute them."""
        words, positions, options = call.primary, call.positions, call.options
        if (
            options.source != WORDS
            or call.extras.frequencies
            or not _is_known(words, call.secondary)
            or words.shape[1:3] != (1, 1)
            or words.shape[3] == 0
        ):
            return None
        known = isinstance(tokens, int) and isinstance(call.offset, int) and _is_known(positions)
        if known and (positions is None or positions.shape[1] == 1):
            ids = torch.arange(tokens, device=words.device)[None]
            return _Caches(*self._table(call, tokens), ids)
        if self._length is None or (positions is not None and positions.is_floating_point()):
            return None
        at = torch.zeros(1, 1, 1, dtype=torch.int64, device=words.device)
        at = (at if positions is None else positions.to(torch.int64)) + call.offset
        if options.add_index:
            at = at + torch.arange(tokens, device=words.device)
        # Positions outside of the tables read a last row, of NaN.
        at = torch.where((at >= 0) & (at < self._length), at, self._length)
        options = options._replace(add_index=True)
        alone = call._replace(positions=None, secondary=None, offset=0, options=options)
        cos, sin = self._table(alone, self._length)
        if at.shape[0] == 1:
            # Not as the ids of the node: ONNX Runtime refuses tables with fewer rows than tokens.
            rows = at[0].flatten()
            return _Caches(
                *[t.index_select(0, rows).unflatten(0, at.shape[1:]) for t in (cos, sin)]
            )
        with _disable_current_modes():
            axes = words[:, 0, 0] != 0
            if (axes.sum(0) > 1).any():
                return None
            axis = axes.to(torch.int64).argmax(0)
        # Each pair reads the row for the position on its own axis.
        at = at.index_select(0, axis).movedim(0, -1)
        flat = at.flatten(0, 1)
        return _Caches(*[table.gather(0, flat).reshape(at.shape) for table in (cos, sin)])

    def _table(self, call: Call, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the exact cosines and sines of each token, ``[tokens + 1, pairs]``; the last row is NaN."""
        with _disable_current_modes():
            options, tensors = call.options, (call.primary, call.secondary, call.positions)
            values = [None if t is None else t.tolist() for t in tensors]
            numbers = call.offset, options.add_index, options.direction, call.amplitude, tokens
            key = repr((values, numbers))
            if key not in self._tables:
                found = _signed(cos_sin(call, tokens, torch.float64), options)
                # Without token indices all tokens may have one position.
                cos, sin = (t[0, 0].expand(tokens, -1).to(torch.float32) for t in found)
                lost = cos.new_full((1, cos.shape[1]), torch.nan)
                self._tables[key] = torch.cat((cos, lost)), torch.cat((sin, lost))
        return self._tables[key]


def _is_known(*tensors: torch.Tensor | None) -> bool:
    """Return whether the values of all tensors are constants, other than parameters and buffers."""
    return all(t is None or type(t) is torch.Tensor for t in tensors)


def _signed(
    tables: tuple[torch.Tensor, torch.Tensor], options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negate the sines if the call rotates back."""
    cos, sin = tables
    return cos, sin if options.direction == FORWARD else -sin


def _turned(x: torch.Tensor, caches: _Caches, options: Options) -> torch.Tensor:
    """Rotate ``[rows, heads, tokens, channels]`` by a node; the result has the dtype of x."""
    cos, sin, ids = caches
    (rows, heads, tokens, channels), width = x.shape, 2 * cos.shape[-1]
    if ids is None:
        cos, sin = (t.expand(rows, tokens, -1) for t in (cos, sin))
    else:
        ids = ids.expand(rows, tokens)
    # The node copies channels behind those that it rotates, if the number of all is even.
    start, last = options.start, channels
    if (last - start) % 2:
        last = start + width
    part = last - start != width
    y = torch.onnx.ops.rotary_embedding(
        x[..., start:last].to(torch.float32),
        cos,
        sin,
        ids,
        interleaved=options.interleaved,
        # ONNX Runtime before 1.24 wants both numbers with a part of the channels.
        num_heads=heads if part and type(heads) is int else 0,
        rotary_embedding_dim=width if part else 0,
    ).to(x.dtype)
    if (start, last) == (0, channels):
        return y
    return torch.cat((x[..., :start], y, x[..., last:]), -1)
