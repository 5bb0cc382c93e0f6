"""The phases of a call, made from angles or from increments, and the state between two calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import _tracing
from .._errors import bad_type, bad_value, check_place, check_tensor, describe, public
from .._namespace import operators
from .._tracing import broadcasts
from ..positions._line import check_cu_seqlens
from . import _definition


class PhaseState(NamedTuple):
    """The phases after the last token, from which the next tokens continue.

    Attributes:
        words: int64 ``(rows, heads, pairs)``, in units of 2^-64 turn; the smallest integer stands
            for NaN.
        drift: zeros ``(rows, heads, pairs)``, float64 for float64 increments, otherwise float32.
            Through them gradients flow to the increments of earlier calls. None without gradients.
    """

    words: torch.Tensor
    drift: torch.Tensor | None = None

    def detached(self) -> PhaseState:
        """Return the state without gradients to earlier calls, for truncated backpropagation."""
        return PhaseState(self.words)


@dataclass(frozen=True, eq=False, repr=False)
class Phases:
    """Phases of tokens, immutable. Made by :func:`given` and :func:`running`.

    Attributes:
        drift: zeros of the shape of the phases, float64 for float64 angles, otherwise float32. Added
            to angles in radians, they carry gradients. They need memory only if gradients other
            than those of ``backward`` may be taken, such as inside a functorch transform. None
            without gradients.
        state: the state after the last token; None for given angles.
    """

    drift: torch.Tensor | None
    state: PhaseState | None
    _arguments: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, bool]
    _versions: list[int] | None
    _words: dict[bool, torch.Tensor]

    @property
    def shape(self) -> torch.Size:
        """The sizes ``(rows, heads, tokens, pairs)``."""
        return self._words[self._arguments[0].dtype == torch.float64].shape

    @property
    def device(self) -> torch.device:
        """The device of the phases."""
        return self._arguments[0].device

    @public()
    def words(self, wide: bool) -> torch.Tensor:
        """Return phase words; the smallest integer of the dtype stands for NaN.

        Args:
            wide: whether to return int64, in units of 2^-64 turn, rather than int32, their upper
                halves rounded to nearest, in units of 2^-32 turn.

        Raises:
            ValueError: phase words of this width must be computed, but the angles, the
                state or the reset have changed.
        """
        if wide in self._words:
            return self._words[wide]
        if self._has_changed():
            rule = "angles, state and reset must not change in place while their phases are in use"
            raise bad_value(rule)
        words, _ = _phase_words(*self._arguments, wide)
        if _tracing.may_keep(words.device):
            # Autograd cannot save inference tensors, so those made by another call are not kept.
            if not words.is_inference() or self._words[not wide].is_inference():
                self._words[wide] = words
        return words

    def _has_changed(self) -> bool:
        """Return whether a tensor that further phase words would be computed from has changed."""
        versions = None if self._versions is None else _versions_of(self._arguments)
        return versions is not None and versions != self._versions

    # The tensors of a copy have version counters of their own.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_versions": [] if self._has_changed() else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_versions"] is None:
            self.__dict__["_versions"] = _versions_of(self._arguments)


@public("phases.given")
def given(angles: torch.Tensor) -> Phases:
    """Return the phases of given angles.

    Args:
        angles: radians, float16, bfloat16, float32 or float64, ``(rows|1, heads|1, tokens,
            pairs|1)`` with any strides. Each is taken as the exact number that it is, and becomes a
            phase word as in :func:`tightrope.angles.words_from`; one that is NaN, infinite or at
            least 2^62 turns makes its phase NaN.

    Returns:
        Phases of the shape of ``angles``, differentiable with respect to them.

    Raises:
        TypeError: angles that are not floating, or not a dense local tensor.
        ValueError: angles of another shape.

    >>> quarter = torch.tensor(torch.pi / 2, dtype=torch.float64).expand(1, 1, 3, 1)
    >>> (given(quarter).words(wide=False) * 2.0**-32).flatten().tolist()
    [0.25, 0.25, 0.25]
    """
    _check_angles("angles", angles)
    return _made(angles, None, None, False)


@public("phases.running")
def running(
    increments: torch.Tensor, state: PhaseState | None = None, reset: torch.Tensor | None = None
) -> Phases:
    """Return the phases of tokens as running sums of increments, each token's own included.

    The phase of token t is the sum of increments 0 … t, modulo one turn. Each increment becomes a phase
    word as in :func:`given`, off by at most one unit of 2^-64 turn below 2^32 turns, and by at most
    2^-96 of itself from there to 2^50 turns; integers add up exactly. So for increments below 2^32
    turns a phase is off by at most t + 1 units. It has the same bits for every way to divide the
    tokens between calls. (If a state is exactly half a turn, it moves up by one unit.)

    Args:
        increments: radians, like ``angles`` of :func:`given`. One that is NaN, infinite or too large
            makes this phase and all later ones NaN, up to a reset.
        state: the ``state`` of the phases of the preceding tokens, ``(rows|1, heads, pairs)``; None
            to start from zero.
        reset: where a new sum starts, before the token's own increment is added: bool ``(tokens,)``
            or ``(rows|1, tokens)``; or, for sequences packed in one row, their ``cu_seqlens``,
            int32 or int64 ``(sequences + 1,)``, as for :func:`tightrope.positions.packed`, so that
            nothing continues from ``state``.

    Returns:
        Phases with the rows of ``increments``, ``state`` and ``reset``, each of which has 1 row or the
        number of the others. They are differentiable with respect to ``increments`` and, through
        ``state``, with respect to the increments of earlier calls; :meth:`PhaseState.detached` stops
        that. Gradients add up in float64.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, or on another device; invalid ``cu_seqlens``.

    Sources: Mamba-3 (arXiv 2603.15569); Selective RoPE (arXiv 2511.17388).

    >>> turns = torch.tensor([0.25, 0.5, 0.5], dtype=torch.float64)
    >>> phases = running((turns * 2 * torch.pi).reshape(1, 1, 3, 1))
    >>> (phases.words(wide=False) * 2.0**-32).flatten().tolist()
    [0.25, -0.25, 0.25]
    >>> later = running(torch.zeros(1, 1, 1, 1), phases.state)
    >>> (later.words(wide=False) * 2.0**-32).item()
    0.25
    """
    _check_angles("increments", increments)
    starts = None if reset is None else starts_of(increments, reset)
    if state is not None:
        _check_state(increments, state)
    rows = _definition.rows_of(increments, state and state.words, starts)
    for name, x in (("state", state and state.words), ("reset", starts)):
        if x is not None and not broadcasts(x.shape[0], rows):
            raise bad_value(f"{name} must have 1 or {rows} rows", **{name: x})
    return _made(increments, state, starts, True)


def _made(
    increments: torch.Tensor, state: PhaseState | None, reset: torch.Tensor | None, running: bool
) -> Phases:
    before, drifts = (None, None) if state is None else state
    wide = increments.dtype == torch.float64
    arguments = (increments.detach(), before, reset, running)
    versions = _versions_of(arguments)
    words, last = _phase_words(*arguments, wide)
    drift = drift_last = None
    make = _drift_of([increments] if drifts is None else [increments, drifts])
    if make is not None:
        if before is not None and drifts is None:
            drifts = increments.new_zeros(()).expand(before.shape)
        drift, drift_last = make(increments, drifts, reset, running)
    after = PhaseState(last, drift_last) if running else None
    if versions is None:
        # A later change could not be noticed. A compiler removes copies that nothing reads.
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        arguments = tuple(copies)  # type: ignore[assignment]
    return Phases(drift, after, arguments, versions, {wide: words})


def _drift_of(sources: Sequence[torch.Tensor]) -> Any:
    """Return the function that makes the zeros for gradients; None if there are no gradients."""
    if _tracing.is_transformed() or _tracing.have_tangents(sources, transformed=False):
        return _definition.differentiable_drift
    if _tracing.needs_plain():
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in sources):
        # By name, because ops imports this package.
        return operators.phase_drift.default
    return None


def _phase_words(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if _tracing.needs_plain():
        return _definition.phase_words(*arguments)
    return operators.phase_words.default(*arguments)  # type: ignore[no-any-return]


def _versions_of(arguments: tuple[object, ...]) -> list[int] | None:
    """Return the version counters of tensors; None if they cannot be read."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if _tracing.is_tracing() or any(x.is_inference() for x in tensors):
        return None
    return [x._version for x in tensors]


def _check_angles(name: str, x: torch.Tensor) -> None:
    check_tensor(name, x, "float32, float64, bfloat16 or float16")
    if x.dim() != 4:
        raise bad_value(f"{name} must have shape (rows|1, heads|1, tokens, pairs|1)", **{name: x})


def starts_of(increments: torch.Tensor, reset: torch.Tensor) -> torch.Tensor:
    """Return the tokens that start a sum as bool ``[rows|1, tokens]``."""
    check_tensor("reset", reset)
    check_place("reset", reset, "increments are", increments.device)
    tokens = increments.shape[2]
    if reset.dtype in (torch.int32, torch.int64):
        check_cu_seqlens(reset, tokens)
        # The sequences after the last token are empty.
        starts = torch.zeros(1, tokens + 1, dtype=torch.bool, device=reset.device)
        return starts.index_fill(1, reset.to(torch.int64).clamp(0, tokens), True)[:, :tokens]
    if reset.dtype != torch.bool:
        raise bad_type("reset must be bool, or int32 or int64 cu_seqlens", reset=reset)
    if reset.dim() == 1:
        reset = reset[None]
    if reset.dim() != 2 or reset.shape[1] != tokens:
        raise bad_value(
            f"reset must have shape ({tokens},) or (rows|1, {tokens}), for the tokens of increments",
            reset=reset,
        )
    return reset


def _check_state(increments: torch.Tensor, state: object) -> None:
    if not isinstance(state, PhaseState):
        raise bad_type(f"state must be None or the state of phases but got {describe(state)}")
    held: tuple[Any, ...] = state if state.drift is not None else state[:1]
    for name, x in zip(("words", "drift"), held):
        check_tensor(f"{name} of state", x, "int64" if name == "words" else "a floating tensor")
        check_place("state", x, "increments are", increments.device)
        _, heads, _, pairs = increments.shape
        if x.dim() != 3 or x.shape[1] != heads or x.shape[2] != pairs:
            raise bad_value(
                f"{name} of state must have shape (rows|1, {heads}, {pairs})", **{name: x}
            )
    if state.drift is not None and state.words.shape != state.drift.shape:
        raise bad_value("words and drift of state must share a shape", **state._asdict())
