"""Rotations of ComfyUI on the CPU by this library's operator; see docs/plugs.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.nn.functional import rms_norm

from .._errors import sentence
from ..channels import join_pairs
from ..functional import apply_rotary_pos_emb, apply_rotary_pos_emb_
from ..ops.registry import BACKENDS

__all__ = ["register"]

_NAME = "tightrope"
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_INPUTS = "x", "xq", "xk", "q", "k"


def _heads_dim(x: torch.Tensor, matrices: torch.Tensor, width: int) -> int | None:
    """Return the heads dimension of x, along which the matrices do not change: 1 or 2; None for other shapes."""
    if x.dim() != 4 or matrices.dim() != 6 or 2 * matrices.shape[3] != width:
        return None
    rows, first, second = matrices.shape[:3]
    if rows not in {1, x.shape[0]}:
        return None
    # comfy-kitchen ignores what the matrices have beyond the entries of x in dimension 2.
    if first == 1 and (second == x.shape[2] or 1 < x.shape[2] < second):
        return 1
    return 2 if second == 1 and first == x.shape[1] else None


def _mismatch(given: Mapping[str, Any]) -> str | None:
    """Return the name of the first argument of a call whose shape this library does not rotate."""
    matrices, xs = given["freqs_cis"], {name: given[name] for name in _INPUTS if name in given}
    rows_and_tokens = set()
    for name, x in xs.items():
        heads = _heads_dim(x, matrices, given.get("rot_dim") or x.shape[-1])
        if heads is None:
            return name
        rows_and_tokens.add((heads, x.shape[0], x.shape[3 - heads]))
        if len(rows_and_tokens) > 1:
            return name
    return None


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor | None,
    matrices: torch.Tensor,
    interleaved: bool,
    in_place: bool,
) -> Any:
    """Multiply each pair of channels by its 2x2 matrix; the registry has called :func:`_mismatch`."""
    heads = cast(int, _heads_dim(q, matrices, q.shape[-1]))
    tables = matrices[:, :, : q.shape[2]].select(heads, 0)
    (a, b), (c, d) = (row.unbind(-1) for row in tables.unbind(-2))
    cos, sin = join_pairs(a, d, interleaved), join_pairs(-b, c, interleaved)
    rotate = apply_rotary_pos_emb_ if in_place else apply_rotary_pos_emb
    return rotate(q, k, cos, sin, heads, interleaved=interleaved, tables="full")


def _functions() -> dict[str, Callable[..., Any]]:
    """Return this library's versions of the functions of comfy-kitchen that rotate, by name."""
    functions: dict[str, Callable[..., Any]] = {}

    def add(pairs: str, interleaved: bool) -> None:
        def rotation(in_place: bool) -> None:
            def one(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
                return _rotate(x, None, freqs_cis, interleaved, in_place)[0]  # type: ignore[no-any-return]

            def both(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> Any:
                return _rotate(xq, xk, freqs_cis, interleaved, in_place)

            end = "_" if in_place else ""
            functions.update({f"apply_rope{pairs}1{end}": one, f"apply_rope{pairs}{end}": both})

        def norm(
            q: torch.Tensor,
            k: torch.Tensor | None,
            freqs_cis: torch.Tensor,
            q_scale: torch.Tensor,
            k_scale: torch.Tensor | None = None,
            epsilon: float = 1e-6,
            rot_dim: int = 0,
        ) -> Any:
            width = q.shape[-1:]
            q = rms_norm(q, width, q_scale, epsilon)
            if k is not None:
                k = rms_norm(k, width, q_scale if k_scale is None else k_scale, epsilon)
            some = slice(rot_dim or None)
            _rotate(q[..., some], None if k is None else k[..., some], freqs_cis, interleaved, True)
            return q, k

        def norm_one(
            x: torch.Tensor, freqs_cis: torch.Tensor, scale: torch.Tensor, epsilon: float = 1e-6
        ) -> torch.Tensor:
            return norm(x, None, freqs_cis, scale, None, epsilon)[0]  # type: ignore[no-any-return]

        rotation(False)
        rotation(True)
        functions.update({f"rms_rope{pairs}1": norm_one, f"rms_rope{pairs}": norm})

    add("", True)
    add("_split_half", False)
    return functions


def register() -> None:
    """Make ComfyUI rotate by this library's operator where it computes on the CPU.

    It adds a backend to the registry of comfy-kitchen, before all others, for the twelve functions that rotate, or
    normalise and rotate, and do so for float32 matrices and float32, bfloat16 and float16 inputs on the CPU. Other
    calls, those on GPUs among them, stay comfy-kitchen's. A second call changes nothing.

    Raises:
        ImportError: comfy-kitchen is not installed.
        NotImplementedError: the kernel for CPUs cannot run here; the message gives the reason.

    >>> register()  # doctest: +SKIP
    """
    try:
        registry: Any = importlib.import_module("comfy_kitchen.registry").registry
        rules: Any = importlib.import_module("comfy_kitchen.constraints")
    except ImportError as error:
        needs = "needs comfy-kitchen, which ComfyUI installs"
        raise ImportError(sentence("register", needs)) from error
    reason = BACKENDS["cpu"].why_not()
    if reason is not None:
        raise NotImplementedError(sentence("register", f"the kernel for CPUs cannot run: {reason}"))

    def check(given: Mapping[str, Any]) -> Any:
        name = _mismatch(given)
        if name is None:
            return rules.ValidationResult.ok()
        return rules.ValidationResult.fail(name, "shape")

    anything = rules.ParamConstraint(dtypes=_DTYPES)
    matrices = rules.ParamConstraint(dtypes=frozenset({torch.float32}))
    constraints = rules.FunctionConstraints(
        params={**dict.fromkeys(_INPUTS, anything), "freqs_cis": matrices},
        default_devices=frozenset({"cpu"}),
        call_rules=(check,),
    )
    functions = _functions()
    registry.register(_NAME, SimpleNamespace(**functions), dict.fromkeys(functions, constraints))
    # The registry has no public way to read its order.
    registry.set_priority([_NAME, *(name for name in registry._priority if name != _NAME)])
