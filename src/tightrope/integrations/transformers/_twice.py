"""Whether tables hold their entries twice, as the operator takes for granted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ._rotation import entries

# owner of the memory -> its version and {how a table reads it: verdict}.
_verdicts: WeakIdKeyDictionary = WeakIdKeyDictionary()


def twice(table: torch.Tensor, reading: str) -> bool:
    """Whether both entries that a reading takes for a pair are one value, throughout a table.

    A function that reads an entry for each channel is a rotation only then; with other tables the
    original is asked. The layers of a model share their tables, so each is looked at once.
    """
    owner = table if table._base is None else table._base
    try:
        version = owner._version
    except RuntimeError:  # inference mode counts no versions
        return _look(table, reading)
    known = _verdicts.get(owner)
    if known is None or known[0] != version:
        known = version, {}
        _verdicts[owner] = known
    verdicts: dict[Any, bool] = known[1]
    key = reading, table.shape, table.stride(), table.storage_offset()
    if key not in verdicts:
        verdicts[key] = _look(table, reading)
    return verdicts[key]


def _look(table: torch.Tensor, reading: str) -> bool:
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # a look would end the capture
    with torch.no_grad():
        return torch.equal(*entries(table, reading))
