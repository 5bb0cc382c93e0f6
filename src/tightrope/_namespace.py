"""The namespace of the operators in ``torch.ops``."""

from __future__ import annotations

import torch

NAMESPACE = "tightrope"

#: The operators, which ``ops.schema`` defines.
operators = getattr(torch.ops, NAMESPACE)
