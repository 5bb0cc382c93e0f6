"""Whether tables hold their entries twice, as the operator takes for granted."""

from __future__ import annotations

import torch

from ..._memo import TensorMemo
from ...forms import entries

_verdicts = TensorMemo(trusts_inference=False)


def twice(table: torch.Tensor, reading: str) -> bool:
    """Whether both entries that a reading takes for a pair are one value, throughout a table.

    A function that reads an entry for each channel is a rotation only then; with other tables the
    original is asked. The layers of a model share their tables, so each is looked at once.
    """
    verdict: bool = _verdicts.find(table, reading, _look, table, reading)
    return verdict


def _look(table: torch.Tensor, reading: str) -> bool:
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # a look would end the capture
    with torch.no_grad():
        return torch.equal(*entries(table, reading))
