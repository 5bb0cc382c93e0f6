"""RoPE as a module: of queries and keys, or of one tensor with the usual attributes (``inv_freq``, …)."""

from __future__ import annotations

import threading
from typing import Any

import torch

from .. import functional
from .._errors import (
    bad_value,
    check_flag,
    check_type,
    class_of,
    integer,
    public,
    sentence,
)
from .._rounding import RoundingLike, rounding_pair
from ..ops.checks import layout_named
from ..positions import PositionsLike, as_positions
from ..spec import PreparedRotation, Rope, RopeSpec, SeqLen, prepared

# Guards updates of `max_seq_len_cached`, each a read and a write. All modules share one lock, because a
# module with a lock of its own could not be copied or pickled.
_GROWING = threading.Lock()

# Keys under which other implementations save frequencies and tables; a spec already defines both.
_LEGACY_FREQUENCIES = ("inv_freq", "freqs")
_LEGACY_TABLES = ("cos_cached", "sin_cached")


def prepared_by(spec: RopeSpec, rope: PreparedRotation) -> PreparedRotation:
    """Refuse a rotation that another spec prepared."""
    if rope.spec != spec:
        raise bad_value(
            f"positions must be prepared by {spec!r} but were prepared by {rope.spec!r}"
        )
    return rope


class _Rotary(torch.nn.Module):
    """A module with a spec, which loads checkpoints of modules with buffers."""

    spec: RopeSpec

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        error_messages: list[str] = args[-1]
        learned = self._parameters.get("inv_freq") is not None
        for key in () if learned else _LEGACY_FREQUENCIES:
            if prefix + key not in state_dict:
                continue
            saved = state_dict.pop(prefix + key)
            if not self._agrees(saved):
                error_messages.append(
                    sentence(
                        class_of(self),
                        f"{prefix}{key} in the state_dict must agree with {self.spec} but does not; build "
                        "the module with the frequencies of the checkpoint",
                        **{key: saved},
                    )
                )
        for key in _LEGACY_TABLES:
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _agrees(self, saved: object) -> bool:
        """Return whether saved frequencies equal the spec's, rounded to their dtype."""
        if not isinstance(saved, torch.Tensor):
            return False
        exact = self.spec.frequencies()
        if saved.device.type == "meta":  # it has no data to compare
            return saved.is_floating_point() and saved.shape == exact.inv_freq.shape
        return exact.are(saved)


class RotaryEmbedding(_Rotary):
    """Rotary position embedding of queries and keys, in half pairs by default, as a part of an attention module.

    The module has no buffer. ``.to(torch.bfloat16)``, construction on the meta device, copying and saving
    do not change the rotation, and the module adds no key to a ``state_dict`` unless frequencies are
    learned. Checkpoints of other modules that hold tables or the same frequencies are loaded without them.

    Args:
        spec: a :class:`tightrope.RopeSpec`, or the number of channels of a head, for a spec with the
            other options. All other arguments are given by name.
        layout: the layout of q and k, see :func:`tightrope.rotate_qk`.
        learnable: whether the frequencies are a parameter, in float32, that starts at those of the spec.
            Not for frequencies that depend on the length or on several axes. A cast of the module to 16
            bits rounds it, and calls warn of that.
        device: device of the parameter.
        options: base, rotary_dim, start, interleaved, scaling and axes of :class:`tightrope.RopeSpec`;
            left out if ``spec`` is one.

    Attributes:
        spec: the :class:`tightrope.RopeSpec`.
        inv_freq: the parameter, radians per position ``(pairs,)`` or ``(heads, pairs)``; None if not
            learnable.

    Raises:
        TypeError, ValueError: invalid options; the message names the option.

    Source: Su et al., RoFormer (arXiv 2104.09864).

    >>> rope = RotaryEmbedding(64, base=500_000.0, layout="bshd")
    >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)  # batch, tokens, heads, channels
    >>> q, k = rope(q, k)  # positions 0 to 15
    >>> q, k = rope(q, k, 100)  # positions 100 to 115
    """

    @public()
    def __init__(
        self,
        spec: RopeSpec | int,
        *,
        layout: str = "bhsd",
        learnable: bool = False,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(spec, RopeSpec):
            spec = RopeSpec(spec, **options)
        elif options:
            raise bad_value(
                f"{', '.join(options)} must be left out with a RopeSpec, which has its own, but got {spec} too"
            )
        layout_named(layout)
        check_flag("learnable", learnable)
        self.spec, self.layout = spec, layout
        self.register_parameter("inv_freq", None)
        if learnable:
            if spec.by_length or spec.axes is not None:
                raise bad_value(
                    "learnable must be False for frequencies that depend on the length or on several "
                    "axes; pass spec.at(positions, inv_freq=…) to tightrope.rotate_qk instead"
                )
            shape = spec.frequencies().inv_freq.shape
            self.inv_freq = torch.nn.Parameter(
                torch.empty(shape, dtype=torch.float32, device=device)
            )
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set learned frequencies to those of the spec, for example after ``to_empty``."""
        if self.inv_freq is not None:
            with torch.no_grad():
                self.inv_freq.copy_(self.spec.frequencies().inv_freq)

    @public()
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        positions: PositionsLike | PreparedRotation = None,
        *,
        seq_len: SeqLen = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys. For more options, call :func:`tightrope.rotate_qk` with ``spec``.

        Args:
            q, k: see :func:`tightrope.rotate_qk`, in the layout of the module.
            positions: see :meth:`tightrope.RopeSpec.at`; or a rotation that it prepared for all layers.
            seq_len: see :meth:`tightrope.RopeSpec.at`; stated there with a prepared rotation.

        Returns:
            New tensors for q and k; for q alone if k is None.

        Raises:
            TypeError, ValueError, NotImplementedError: see :func:`tightrope.rotate`.
        """
        rope: Rope = self.spec
        if isinstance(positions, PreparedRotation):
            rope = prepared_by(self.spec, positions)
            if seq_len is not None:
                raise bad_value("seq_len must be None with a prepared rotation, which has its own")
            rope = rope if self.inv_freq is None else rope.having(inv_freq=self.inv_freq)
            positions = None
        elif self.inv_freq is not None or seq_len is not None:
            where = as_positions(positions, sharded=True)
            device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
            rope = prepared(self.spec, where, device, seq_len, inv_freq=self.inv_freq)
            positions = None
        y, z = functional.rotate_qk(q, k, rope, positions, layout=self.layout)
        return y if z is None else (y, z)

    def extra_repr(self) -> str:
        """Return the arguments shown in the repr."""
        learned = "" if self.inv_freq is None else ", learnable=True"
        return f"{self.spec}, layout={self.layout!r}{learned}"


class RotaryPositionalEmbedding(_Rotary):
    """Rotary position embedding of the first ``dim`` channels, in half pairs by default; the others are copied.

    The module has no table that a sequence could outgrow and no buffer that a cast could round.
    ``.to(torch.bfloat16)``, construction on the meta device, copying and saving do not change the
    rotation, and the module adds no key to a ``state_dict``.

    Args:
        dim: number of channels that rotate; even.
        max_seq_len: only for code that was written for a module with tables, and passes or reads this
            length. It changes no result and limits nothing: sequences of any length work.
        base: base of the frequencies.
        interleaved: pair channels (0, 1), (2, 3), … instead of i with i + dim / 2.
        rounding: see :meth:`tightrope.RopeSpec.at`.

    Attributes:
        dim, max_seq_len, base, rounding: as given.
        spec: the :class:`tightrope.RopeSpec` of the ``dim`` rotated channels.

    Raises:
        ValueError, TypeError: invalid arguments; the message names the argument.

    Source: Su et al., RoFormer (arXiv 2104.09864).

    >>> rope = RotaryPositionalEmbedding(dim=64)
    >>> x = torch.randn(2, 16, 8, 64)  # (batch, seq, heads, dim)
    >>> rope(x, seq_dim=1).shape
    torch.Size([2, 16, 8, 64])
    """

    @public()
    def __init__(
        self,
        dim: int,
        max_seq_len: int = 8192,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        rounding: RoundingLike = "once",
    ) -> None:
        super().__init__()
        self.spec = RopeSpec(dim, base=base, interleaved=interleaved)
        self.dim = self.spec.head_dim
        self.max_seq_len = max_seq_len
        self.base = base
        rounding_pair(rounding)
        self.rounding = rounding
        self._seen = 0
        self._seen_on = torch.device("cpu")

    @public()
    def forward(
        self,
        x: torch.Tensor,
        seq_dim: int = -2,
        *,
        positions: PositionsLike = None,
        inverse: bool = False,
    ) -> torch.Tensor:
        """Rotate a tensor.

        Args:
            x: floating, at least 2-D, channels last, at least ``dim`` of them.
            seq_dim: the sequence dimension, for any rank of x: -2 or 2 for (batch, heads, seq, dim),
                1 for (batch, seq, heads, dim), 0 for (seq, batch, heads, dim).
            positions: None for 0..n-1, an int offset, ids ``(seq,)``, or ids ``(rows, seq)``, where
                the rows are the first dimension of x other than ``seq_dim``.
            inverse: undo the rotation instead.

        Returns:
            A new tensor of the same shape and dtype.

        Raises:
            ValueError: an invalid ``seq_dim``, too few channels, or ids that do not fit.
            TypeError: a tensor or ids of an unsupported dtype, or a ``seq_dim`` that is not an int.
        """
        check_type("x", x)
        dims, seq_dim = x.dim(), integer("seq_dim", seq_dim)
        if not -dims <= seq_dim < dims or seq_dim % dims == dims - 1:
            raise bad_value(
                f"seq_dim must name a dimension of x other than the last but got {seq_dim}", x=x
            )
        if x.shape[-1] < self.dim:
            raise bad_value(
                f"x must have at least {self.dim} channels in its last dimension but got "
                f"{x.shape[-1]}",
                x=x,
            )
        seq = seq_dim % dims
        self._note(x.shape[seq], x.device)
        layout = {(2, 0): "sd", (3, 1): "bsd", (4, 0): "sbhd", (4, 1): "bshd", (4, 2): "bhsd"}
        known = layout.get((dims, seq))
        if known is not None:
            return self._rotate(x, positions, known, inverse)
        # Any other layout: the first of the other dimensions becomes rows, the remaining ones heads.
        view = x.movedim(seq, -2)
        lead = view.shape[1:-2]
        view = view.flatten(1, -3) if lead else view
        y = self._rotate(view, positions, "bhsd" if lead else "bsd", inverse)
        return (y.unflatten(1, lead) if lead else y).movedim(-2, seq)

    def _rotate(
        self, x: torch.Tensor, positions: PositionsLike, layout: str, inverse: bool
    ) -> torch.Tensor:
        rope, where = functional.with_rounding(self.spec, self.rounding, x, positions)
        (y,) = functional.rotate_with(
            ("x",), "new", x, None, rope, where, layout, inverse, wider=True
        )
        return y

    def _note(self, length: int, device: torch.device) -> None:
        # Tensors without data and symbolic lengths do not count as sequences seen.
        if torch.compiler.is_compiling() or device.type == "meta" or type(length) is not int:
            return
        if length > self._seen:
            with _GROWING:
                if length > self._seen:
                    self._seen, self._seen_on = length, device

    @property
    def inv_freq(self) -> torch.Tensor:
        """Frequencies in radians per position, float32 ``(dim / 2,)``, made on each read.

        The rotation uses more exact frequencies: see :meth:`tightrope.RopeSpec.frequencies`.
        """
        return self.spec.frequencies().inv_freq.to(torch.float32)

    @property
    def max_seq_len_cached(self) -> int:
        """Length of the longest sequence seen so far, outside compiled code; 0 before the first."""
        return self._seen

    @property
    def cos_cached(self) -> torch.Tensor | None:
        """Cosines as float32 ``(1, 1, max_seq_len_cached, dim)``, made on each read; None before
        first use. For inspection: the rotation does not use them."""
        return self._cached(0)

    @property
    def sin_cached(self) -> torch.Tensor | None:
        """Sines, like :attr:`cos_cached`."""
        return self._cached(1)

    def _cached(self, which: int) -> torch.Tensor | None:
        if self._seen == 0:
            return None
        found = self.spec.cos_sin(seq_len=self._seen, device=self._seen_on, tables="full")
        return found[which][None]

    def extra_repr(self) -> str:
        """Return the arguments shown in the repr."""
        return (
            f"dim={self.dim}, max_seq_len={self.max_seq_len}, base={self.base}, "
            f"interleaved={self.spec.interleaved}"
            + ("" if self.rounding == "once" else f", rounding={self.rounding!r}")
        )
