"""Calls with all their options in one place, also those that a rotation states: for tests that vary one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.helpers import on

STATED = ("seq_len", "stack", "rounding", "inv_freq", "phases")


def call(
    verb: Callable[..., Any], *arguments: Any, backend: str | None = None, **options: Any
) -> Any:
    """Call rotate, rotate_qk or an in-place form; what `RopeSpec.at` takes is stated there.

    Args:
        arguments: x, or q and k; the spec; and positions, if there are any.
        backend: the backend to force, or None.
        options: those of the function and those of :meth:`tightrope.RopeSpec.at`; None is left out of the latter.
    """
    stated = {name: options.pop(name, None) for name in STATED}
    stated = {name: value for name, value in stated.items() if value is not None}
    if stated:
        at = next(
            i for i, one in enumerate(arguments) if not isinstance(one, (torch.Tensor, type(None)))
        )
        xs, spec, where = arguments[:at], arguments[at], arguments[at + 1 :]
        device = next(x.device for x in xs if x is not None)
        arguments = *xs, spec.at(*where, device=device, **stated)
    return on(backend, verb, *arguments, **options)
