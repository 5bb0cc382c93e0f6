"""RopeSpec: a rotary embedding as one frozen value, and what it prepares for a forward pass."""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any

import torch

from . import frequencies, positions as positions_
from ._errors import sentence
from .angles import Words, words_of
from .frequencies import Frequencies
from .positions import PositionsLike


@dataclass(frozen=True)
class RopeSpec:
    """A rotary position embedding: which channels rotate, and how fast.

    Two specs are equal when they rotate equally. A spec holds no tensor that a module could cast,
    move or save; it hashes in constant time and can be shared by any number of layers, threads and
    processes.

    Args:
        head_dim: channels of one head.
        base: base of the geometric row of frequencies, a positive number.
        rotary_dim: how many channels rotate; even; all of them by default.
        start: first channel that rotates.
        interleaved: pair channels (0, 1), (2, 3), … if true, as GPT-J and the first paper do; pair
            channel i with i + rotary_dim / 2 if false, as GPT-NeoX and Llama in transformers do.

    Raises:
        ValueError: values that describe no rotation.
        TypeError: values of the wrong type.

    Source: Su et al., RoFormer (arXiv 2104.09864); partial rotation: Black et al., GPT-NeoX-20B
    (arXiv 2204.06745), section 2.1.

    >>> spec = RopeSpec(head_dim=64, base=500_000.0)
    >>> spec.frequencies().inv_freq.shape
    torch.Size([32])
    """

    head_dim: int
    base: float = 10000.0
    rotary_dim: int = None  # type: ignore[assignment]  # resolved to head_dim - start
    start: int = 0
    interleaved: bool = False

    def __post_init__(self) -> None:
        head_dim = _size("head_dim", self.head_dim)
        start = _size("start", self.start)
        rotary_dim = (
            head_dim - start if self.rotary_dim is None else _size("rotary_dim", self.rotary_dim)
        )
        if rotary_dim % 2:
            raise ValueError(sentence("RopeSpec", f"rotary_dim must be even but got {rotary_dim}"))
        if start < 0 or rotary_dim < 0 or start + rotary_dim > head_dim:
            raise ValueError(
                sentence(
                    "RopeSpec",
                    f"channels [start, start + rotary_dim) must lie in [0, {head_dim}) but got "
                    f"[{start}, {start + rotary_dim})",
                )
            )
        if isinstance(self.base, bool) or not isinstance(self.base, numbers.Real):
            raise TypeError(sentence("RopeSpec", f"base must be a number but got {self.base!r}"))
        try:
            base = float(self.base)
        except OverflowError:
            base = math.inf
        # A float64 holds bases up to 1e308; below 1e-18 a pair would turn 2^57 times per position.
        if not 1e-18 < base < 1e300:
            raise ValueError(
                sentence(
                    "RopeSpec",
                    f"base must be positive and finite, above 1e-18 and below 1e300, but got "
                    f"{self.base}",
                )
            )
        if not isinstance(self.interleaved, bool):
            raise TypeError(
                sentence("RopeSpec", f"interleaved must be a bool but got {self.interleaved!r}")
            )
        put = object.__setattr__
        put(self, "head_dim", head_dim)
        put(self, "start", start)
        put(self, "rotary_dim", rotary_dim)
        put(self, "base", base)
        put(self, "_hash", hash((head_dim, base, rotary_dim, start, self.interleaved)))
        put(self, "_words", _words(rotary_dim, base))
        put(self, "_tables", {})
        if not torch.compiler.is_compiling():
            self._table(torch.device("cpu"))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        # Words and device tables are derived; a copy derives its own.
        return RopeSpec, (
            self.head_dim, self.base, self.rotary_dim, self.start, self.interleaved,
        )  # fmt: skip

    @property
    def axes(self) -> int:
        """How many coordinates a position has."""
        return 1

    def frequencies(self, seq_len: int | None = None) -> Frequencies:  # noqa: ARG002 - for rules to come
        """The frequencies of the pairs and the factor on the rotated channels.

        Args:
            seq_len: length of the sequence, for rules that depend on it; the rule here does not.
        """
        return frequencies.default(self.rotary_dim, self.base)

    def at(
        self, positions: PositionsLike = None, device: torch.device | str | None = None
    ) -> PreparedRotation:
        """Validate positions once, for all layers of a forward pass.

        Args:
            positions: None for 0..n-1, an int offset, ids ``(tokens,)`` or ``(rows, tokens)``, or a
                :class:`tightrope.positions.Positions`. Ids are not copied: do not change them.
            device: where the rotated tensors live; by default where the ids are, else the CPU.

        Returns:
            An object that every function takes in place of a spec and positions.

        >>> rope = RopeSpec(64).at(5)
        """
        where = positions_.canonical(positions, "at")
        if device is None:
            target = torch.device("cpu") if where.ids is None else where.ids.device
        else:
            target = torch.device(device)
            if target.type == "cpu":
                target = torch.device("cpu")
            elif target.index is None:
                # Tensors say which of several devices they are on; only the device knows.
                target = torch.empty(0, device=target).device
        return self.on(where, target, "at")

    def on(
        self, where: positions_.Positions, device: torch.device, operation: str
    ) -> PreparedRotation:
        """As :meth:`at`, from canonical positions, with the operation that errors shall name."""
        positions_.check_axes(operation, where, self.axes)
        ids = where.ids
        if ids is not None and ids.device != device:
            ids = ids.to(device)
        words, turns = self._table(device)
        return PreparedRotation(self, words, turns, ids, where.offset, where.ramp, device)

    def _table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Words and turns on a device, ``[1, 1, 1, pairs]``.

        Kept per device, but never while something traces or transforms: a cache must not hold a fake
        or wrapped tensor, nor may the words of a fake program be real ones.
        """
        tracing = (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.peek_interpreter_stack() is not None
        )
        if tracing and not torch.compiler.is_dynamo_compiling():
            return self._make_table(device)
        table = self._tables.get(device)  # type: ignore[attr-defined]
        if table is None:
            if tracing:
                return self._make_table(device)
            with torch.inference_mode(False):
                table = self._make_table(device)
            self._tables[device] = table  # type: ignore[attr-defined]
        return table  # type: ignore[no-any-return]

    def _make_table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = self._words  # type: ignore[attr-defined]
        words = torch.tensor(made.words, dtype=torch.int64, device=device).reshape(1, 1, 1, -1)
        if not any(made.turns):
            return words, None
        return words, torch.tensor(made.turns, dtype=torch.int64, device=device).reshape(
            words.shape
        )


@dataclass(frozen=True, eq=False)
class PreparedRotation:
    """A spec at given positions on a device: what :meth:`RopeSpec.at` returns.

    Attributes:
        spec: what it was made from.
        words: phase words, int64 ``[1, 1, 1, pairs]``.
        turns: None, or int64 ``[1, 1, 1, pairs]``: whole turns per position, where some ω >= π.
        ids, offset, ramp: as in :class:`tightrope.positions.Positions`.
        device: where the rotated tensors must live.
    """

    spec: RopeSpec
    words: torch.Tensor
    turns: torch.Tensor | None
    ids: torch.Tensor | None
    offset: int
    ramp: bool
    device: torch.device


def _words(rotary_dim: int, base: float) -> Words:
    return words_of(frequencies.default(rotary_dim, base))


# A spec may be made inside a compiled function; its words are constants there, since dynamo cannot
# trace decimals. This is what torch.compiler.assume_constant_result does, which would import dynamo.
_words._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _size(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(sentence("RopeSpec", f"{name} must be an int but got {value}"))
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(sentence("RopeSpec", f"{name} must be an int but got {value!r}")) from None
