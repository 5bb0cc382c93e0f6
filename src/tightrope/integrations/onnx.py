"""Exported programs in plain torch, for ONNX; ``torch.onnx.export(model, args, dynamo=True)`` needs no plug.

See docs/deploy.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._tracing import plain_blocks

__all__ = ["plain_torch"]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Return a block in which ``torch.export.export`` traces the definition, which is plain torch.

    For programs that ``torch.onnx.export`` or another converter takes; a model that is given to
    ``torch.onnx.export`` needs no block.

    >>> import torch
    >>> from tightrope import RopeSpec, rotate
    >>> class Model(torch.nn.Module):
    ...     def forward(self, q):
    ...         return rotate(q, RopeSpec(64))
    >>> with plain_torch():
    ...     program = torch.export.export(Model(), (torch.randn(1, 8, 16, 64),))
    >>> any("tightrope" in str(node.target) for node in program.graph.nodes)
    False
    """
    plain_blocks.append(None)
    try:
        yield
    finally:
        plain_blocks.pop()
