"""Selective checkpointing: what a policy saves, by the name of the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

#: A part of the names of the operators whose results are saved.
POLICIES = {"everything": "", "rotations": "tightrope", "the rest": "aten"}


def saving(name: str) -> Callable[[], Any]:
    """Return a function that makes the contexts of a checkpoint, which saves these results."""

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        return (
            CheckpointPolicy.MUST_SAVE if name in str(func) else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return lambda: create_selective_checkpoint_contexts(policy)
