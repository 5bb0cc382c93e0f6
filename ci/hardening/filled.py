"""A plugin of pytest that fills memory with NaN where torch would leave it as it was."""

from __future__ import annotations

import torch

torch.use_deterministic_algorithms(mode=True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
