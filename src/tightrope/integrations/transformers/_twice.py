"""Check that both channels of a pair have the same cos and sin, as the operator requires."""

from __future__ import annotations

import torch

from ..._memo import TensorMemo
from ...forms import entries

_verdicts = TensorMemo(trusts_inference=False)


def twice(table: torch.Tensor, reading: str) -> bool:
    """Return True if the two entries that a reading takes for each pair are equal in a whole table.

    A function that reads one entry per channel is a rotation only then; otherwise the original
    function runs. The verdict is memoised per table, as the layers of a model share it.
    """
    verdict: bool = _verdicts.find(table, reading, _look, table, reading)
    return verdict


def _look(table: torch.Tensor, reading: str) -> bool:
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # reading values would end the capture
    with torch.no_grad():
        return torch.equal(*entries(table, reading))
