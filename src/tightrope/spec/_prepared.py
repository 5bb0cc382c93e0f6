"""Prepared rotation: a spec at given positions, validated once and shared by all layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import positions as positions_
from .._errors import (
    as_passed,
    bad_type,
    bad_value,
    check_place,
    check_tensor,
    describe,
    is_dtensor,
    outside,
    public,
    sentence,
)
from .._parts import Span, Take
from .._rounding import ONCE
from .._tracing import is_readable, is_tracing, may_keep, outside_modes
from ..channels import Channels
from ..phases import Phases
from ..positions import Positions
from ..stacks import Row, Stack, length_of
from . import _lengths
from ._lengths import Lengths, SeqLen
from ._words import Words


class Kept:
    """Values that all calls of one prepared rotation share. Rotated tensors are never among them.

    The key of a value names everything that it depends on but the ids, which it is compared with in each
    call. A value that depends on ids on a device is never kept: a comparison would wait for the device, and
    version counters miss what numpy and CUDA graphs write. When there are 16 values, all are dropped.

    Attributes:
        launches: what each launch of a kernel takes, by layout and direction; see :mod:`tightrope.ops.route`.
    """

    _MOST = 16

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[torch.Tensor | None, Any]] = {}
        self.launches: dict[tuple[str, bool], Any] = {}

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()  # copies of a rotation keep their own

    def known(self, key: Hashable) -> Any:
        """Return a value that depends on no ids; None if it is not kept."""
        seen, value = self._values.get(key, (None, None))
        return value if seen is None else None

    def find(
        self,
        key: Hashable,
        ids: torch.Tensor | None,
        device: torch.device,
        make: Callable[[], Any],
    ) -> Any:
        """Return a value, or make it.

        Args:
            ids: the ids that the value depends on, or None.
            device: the device of the value.
            make: called without arguments to make it.
        """
        if is_tracing():
            return make()
        found = self._values.get(key)
        if found is not None and ids is None:
            return found[1]
        with outside_modes():
            bits = None if ids is None else _bits(ids)
            if found and bits is not None and found[0] is not None and torch.equal(bits, found[0]):
                return found[1]
            seen = None if bits is None else bits.clone()
        if ids is not None and seen is None:
            return make()
        with outside_modes():
            made = make()
        if may_keep(device):
            if len(self._values) >= self._MOST:
                self._values.clear()
            self._values[key] = seen, made
        return made


_OF_WIDTH = {torch.float32: torch.int32, torch.float64: torch.int64}


def _bits(ids: torch.Tensor) -> torch.Tensor | None:
    """View ids as integers, so that NaN equals NaN; None if they cannot be read."""
    if is_dtensor(ids):
        ids = ids._local_tensor  # type: ignore[attr-defined]
    if not is_readable(ids):
        return None
    bits = ids.detach().resolve_neg()
    return bits.view(_OF_WIDTH[bits.dtype]) if bits.dtype in _OF_WIDTH else bits


#: Phases for queries and keys, or one for each.
PhasesLike: TypeAlias = Phases | tuple[Phases | None, Phases | None] | None


class Angles(NamedTuple):
    """The source of the angles of a rotation.

    Attributes:
        words, turns: see :class:`tightrope.phase_words.PhaseWords`.
        amplitude_hex: the factor on the rotated channels as a hexadecimal string, since the compiler would
            turn a float into a symbol.
        rows: number of rows that have lengths of their own; 1 if all rows share one length.
    """

    words: torch.Tensor
    turns: torch.Tensor | None
    amplitude_hex: str = "0x1p+0"
    rows: int = 1


class Stated(NamedTuple):
    """The lengths that a caller stated.

    Attributes:
        lengths: ints; or the tensor that the caller gave, if it cannot be read.
        compared: the positions of which none may pass the lengths; None if no comparison is possible, because
            one of both cannot be read.
    """

    lengths: tuple[int, ...] | torch.Tensor
    compared: Positions | None


@dataclass(frozen=True, eq=False)
class PreparedRotation:
    """A spec at given positions on a device, as returned by :meth:`tightrope.RopeSpec.at`.

    Attributes:
        channels: the slice that rotates, and its pairing.
        angles: phase words and amplitude; those of short sequences if they depend on the length, see
            :meth:`for_tokens`.
        where: the positions, on the device.
        device: the device that rotated tensors must be on.
        spec: the spec, or None if there is not exactly one.
        source: the phase words of each length, for a call to choose from; None if ``angles`` has those of all calls.
        stated: the lengths that the caller stated, if phase words or tables depend on them.
        stack: the library whose arithmetic makes the tables of this rotation, which it uses instead of
            phase words; None for exact angles.
        rounding: where results round, forward and backward; see :data:`tightrope._rounding.ROUNDINGS`.
        inv_freq: frequencies that replace the spec's, or None; see :meth:`tightrope.RopeSpec.at`.
        phases: angles for each token, added to those of the positions, or None.
        kept: see :class:`Kept`.
    """

    channels: Channels
    angles: Angles = field(repr=False)
    where: Positions
    device: torch.device
    spec: Any = None
    source: Words | None = field(default=None, repr=False)
    stated: Stated | None = field(default=None, repr=False)
    stack: Stack | None = None
    rounding: tuple[str, str] = ONCE
    inv_freq: torch.Tensor | None = field(default=None, repr=False)
    phases: PhasesLike = None
    kept: Kept = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        # Always its own: dataclasses.replace would pass on that of another value.
        object.__setattr__(self, "kept", Kept())

    @property
    def ids(self) -> torch.Tensor | None:
        """The ids of the positions, see :class:`tightrope.positions.Positions`."""
        return self.where.ids

    @property
    def amplitude(self) -> float:
        """The factor on the rotated channels."""
        return float.fromhex(self.angles.amplitude_hex)

    def for_tokens(self, tokens: int, with_rows: str | None = None) -> PreparedRotation:
        """Return the rotation for rows of this many tokens: self, unless its words depend on the length.

        Args:
            tokens: number of tokens per row.
            with_rows: for tensors without a dimension for rows, the layout that has one: their tokens may be of
                several sequences, and an error is raised if their lengths matter.
        """
        source = self.source
        if source is None:
            return self
        if self.stated is None:
            lengths = source.lengths(self.where, tokens, self.device, with_rows)
        elif isinstance(lengths := self.stated.lengths, torch.Tensor):
            lengths = source.read(lengths, self.device)
        rows = 1 if lengths is None else len(lengths)
        angles = Angles(*source.of(lengths, self.device), source.amplitude(lengths), rows)
        return PreparedRotation(
            *(self.channels, angles, self.where, self.device, self.spec, None, self.stated, None),
            *(self.rounding, self.inv_freq, self.phases),
        )

    @public("having")
    def having(
        self, *, inv_freq: torch.Tensor | None = None, phases: PhasesLike = None
    ) -> PreparedRotation:
        """Return this rotation with the frequencies or phases of one layer, without checking positions again.

        Args:
            inv_freq, phases: see :meth:`tightrope.RopeSpec.at`; None for those of this rotation.

        Raises:
            TypeError, ValueError: see :meth:`tightrope.RopeSpec.at`.

        >>> from tightrope import RopeSpec
        >>> rope = RopeSpec(8).at(5)
        >>> layers = [rope.having(inv_freq=torch.rand(4)) for _ in range(2)]
        """
        if inv_freq is not None:
            check_inv_freq(inv_freq, self.angles.words, self.device, self.stack)
        if phases is not None:
            check_phases(phases, self.stack)
        return self.replaced(
            self.inv_freq if inv_freq is None else inv_freq,
            self.phases if phases is None else phases,
        )

    def replaced(self, inv_freq: torch.Tensor | None, phases: PhasesLike) -> PreparedRotation:
        """Return this rotation with other frequencies and phases, which are known to fit."""
        return PreparedRotation(
            *(self.channels, self.angles, self.where, self.device, self.spec, self.source),
            *(self.stated, self.stack, self.rounding, inv_freq, phases),
        )

    def cut(self, spans: Mapping[str, Span], take: Take) -> PreparedRotation:
        """Return the rotation for a part of the rows, heads and tokens.

        Args:
            spans: the part of the axes "row", "head" and "token", in this order, of tensors that this
                rotation fits (see :func:`tightrope.ops.checks.prepare`).
            take: see :data:`tightrope._parts.Take`.
        """

        def make() -> PreparedRotation:
            return self._cut(spans["row"], spans["token"], take)

        ids = self.ids
        if ids is not None and ids.requires_grad:
            return make()
        # A part holds a view of the ids. Only with a stack, a length may depend on their values.
        values = ids if self.stack is not None else None
        return self.kept.find(tuple(spans.values()), values, self.device, make)  # type: ignore[no-any-return]

    def _cut(self, rows: Span, tokens: Span, take: Take) -> PreparedRotation:
        where, ids, stated = self.where, self.ids, self.stated
        if (
            self.stack is not None
            and stated is None
            and self.spec.by_length
            and not is_dtensor(ids)
        ):
            longest = length_of(where, tokens.whole)
            stated = None if longest is None else Stated((longest,), None)
        if ids is not None:
            whole = where.part is None and not where.add_index
            ids = take(
                "positions", ids, (None, "row", "token" if whole else None, "head")[: ids.dim()]
            )
        shifted = where.add_index and where.part is None
        axes = (None, "row", "head", None)
        words, turns, amplitude_hex, own_rows = self.angles
        return PreparedRotation(
            self.channels,
            Angles(
                take("rope", words, axes),
                None if turns is None else take("rope", turns, axes),
                amplitude_hex,
                own_rows if own_rows == 1 else rows.size,
            ),
            Positions(ids, where.offset + (tokens.start if shifted else 0), where.add_index),
            self.device,
            self.spec,
            None,
            stated,
            self.stack,
            self.rounding,
        )

    def kept_angles(
        self, key: Hashable, make: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the cosines and sines that calls share from the second on; None for the first.

        Args:
            key: what they depend on but the positions.
            make: makes them.
        """
        asked: list[bool] = self.kept.find(("asked", key), None, self.device, list)
        if asked:
            return self.kept.find(("angles", key), self.ids, self.device, make)  # type: ignore[no-any-return]
        asked.append(True)
        return None

    def tables(self, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of :attr:`stack`, ``(rows|1, 1, tokens, pairs)``.

        Args:
            tokens: number of tokens per row.
            dtype: the dtype of the rotated tensors.
        """
        stack: Stack = self.stack  # type: ignore[assignment]

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            row = self._row(stack, tokens)
            return stack.tables_of(row, self.spec.axes, self.where, tokens, dtype)

        return self.kept.find((tokens, dtype), self.ids, self.device, make)  # type: ignore[no-any-return]

    def _row(self, stack: Stack, tokens: int) -> Row:
        """Return the frequencies of the stack; only those of a length that may change are not kept."""
        length: Any = None if self.stated is None else self.stated.lengths[0]
        if length is None and self.spec.by_length:
            return stack.row(self.spec, length_of(self.where, tokens), self.device)
        return self.kept.find(  # type: ignore[no-any-return]
            "row", None, self.device, lambda: stack.row(self.spec, length, self.device)
        )

    def check_passed(self, tokens: int, name: str = "seq_len") -> None:
        """Raise an error for a row longer than stated: it would get the frequencies of a shorter one.

        Args:
            tokens: number of tokens per row.
            name: name of the lengths in the error.
        """
        if self.stated is None or self.stated.compared is None or is_tracing():
            return
        lengths, compared = self.stated
        _lengths.refuse_longer(lengths, compared, tokens, name)  # type: ignore[arg-type]


def prepared(
    spec: Any,
    given: Positions,
    device: torch.device,
    seq_len: SeqLen = None,
    stack: Stack | None = None,
    rounding: tuple[str, str] | None = None,
    inv_freq: torch.Tensor | None = None,
    phases: PhasesLike = None,
) -> PreparedRotation:
    """Prepare a rotation like :meth:`tightrope.RopeSpec.at`; errors name the function that the user called.

    Args:
        spec: a :class:`tightrope.RopeSpec`.
        given: canonical positions.
        device: device of the rotated tensors.
        seq_len: see :meth:`tightrope.RopeSpec.at`.
        stack: the stack whose bits the rotation must equal, or None.
        rounding: where results round; None for the rounding of the stack, or "once".
        inv_freq, phases: see :meth:`tightrope.RopeSpec.at`.
    """
    words: Words = spec.words
    where = _on(given, words.axis_count, device)
    ids = where.ids
    if stack is not None and ids is not None:
        if ids.requires_grad:
            raise bad_value(
                "positions must not require a gradient with a stack", positions=as_passed(ids)
            )
        if where.heads is not None:
            raise bad_value(
                "positions must be those of all heads with a stack, whose tables have no heads",
                positions=as_passed(ids),
            )
    lengths: Lengths | None
    if stack is None:
        lengths = words.read(seq_len, device)
    else:
        lengths = None if seq_len is None else (seq_len,)  # type: ignore[assignment]
    stated = None
    if lengths is None and words.by_length:
        _check_whole(where)
        if stack is not None and ids is not None and not is_readable(ids) and not is_tracing():
            raise bad_value(
                "seq_len must be given with positions on a device, as the frequencies of this stack depend "
                "on the largest position",
                positions=as_passed(ids),
            )
    elif lengths is not None:
        # The rotation uses a copy of ids that are elsewhere, so their later changes do not count.
        if given.ids is not None and given.ids is not where.ids:
            given = _with_ids(given, given.ids.clone())
        if isinstance(lengths, torch.Tensor):
            stated = Stated(seq_len if isinstance(seq_len, torch.Tensor) else lengths, None)
        else:
            can_compare = not is_tracing() and (given.ids is None or is_readable(given.ids))
            stated = Stated(lengths, given if can_compare else None)
    angles = Angles(*words.of(None, device), words.amplitude_hex)
    source = words if words.by_length and stack is None else None
    if inv_freq is not None:
        check_inv_freq(inv_freq, angles.words, device, stack)
    if phases is not None:
        check_phases(phases, stack)
    if rounding is None:
        rounding = ONCE if stack is None else stack.rounding
    return PreparedRotation(
        *(spec.channels, angles, where, device, spec, source, stated, stack),
        *(rounding, inv_freq, phases),
    )


def check_inv_freq(
    inv_freq: torch.Tensor, words: torch.Tensor, device: torch.device, stack: Stack | None
) -> None:
    """Refuse frequencies that cannot replace phase words ``[axes, rows, heads, pairs]`` on a device."""
    _check_exact("inv_freq", stack)
    check_tensor("inv_freq", inv_freq, "float32, float64, bfloat16 or float16", sharded=True)
    axes, pairs, dims = words.shape[0], words.shape[-1], inv_freq.dim()
    fits = dims in (1, 2) if axes == 1 else dims == 3 and inv_freq.shape[0] == axes
    if not fits or inv_freq.shape[-1] != pairs:
        shapes = f"(axes, heads or 1, pairs), here ({axes}, heads or 1, {pairs}),"
        if axes == 1:
            shapes = f"(pairs,) or (heads, pairs), here ({pairs},) or (heads, {pairs}),"
        raise bad_value(
            f"inv_freq must have shape {shapes} but got {tuple(inv_freq.shape)}", inv_freq=inv_freq
        )
    check_place("inv_freq", inv_freq, "the rotation is", device)
    warn_of_rounding("inv_freq", inv_freq)


def check_phases(phases: object, stack: Stack | None) -> None:
    """Refuse what is neither phases nor a pair of them."""
    _check_exact("phases", stack)
    both = phases if isinstance(phases, (tuple, list)) else (phases, phases)
    if len(both) != 2:
        raise bad_type(f"phases must be one value or a pair, for q and k, but got {len(both)}")
    for one in both:
        if one is not None and not isinstance(one, Phases):
            raise bad_type(
                f"phases must be made by phases.given or phases.running but got {describe(one)}"
            )


def _check_exact(name: str, stack: Stack | None) -> None:
    """Refuse what a rotation by the tables of another library cannot have."""
    if stack is not None:
        raise bad_value(f"{name} must be None with a rotation made for stack {stack.name!r}")


_NARROW = torch.bfloat16, torch.float16


def warn_of_rounding(name: str, frequencies: torch.Tensor) -> None:
    """Warn of 16-bit frequencies: usually a cast of the whole model rounded the parameter."""
    dtype = frequencies.dtype
    if dtype not in _NARROW or torch.compiler.is_compiling():
        return
    least = torch.finfo(dtype).smallest_normal
    more = f" (more below {least:.0e})" if dtype == torch.float16 else ""
    rule = (
        f"frequencies should be float32 but are {str(dtype).removeprefix('torch.')}, which rounds "
        f"them by up to {50 * torch.finfo(dtype).eps:.1g} %{more}, an error that the position "
        f"multiplies; keep the parameter in float32 when you cast the model, or pass {name}.float() if "
        "these values are right"
    )
    warnings.warn(sentence(name, rule), UserWarning, stacklevel=outside())


def _check_whole(where: Positions) -> None:
    """Refuse positions that do not tell the length of the whole sequence."""
    if where.part is not None or is_dtensor(where.ids):
        raise bad_value(
            "seq_len must be given with the positions of one rank's tokens, as the frequencies depend on "
            "the length of the whole sequence",
            **({} if where.ids is None else {"positions": as_passed(where.ids)}),
        )


def _on(where: Positions, axes: int, device: torch.device) -> Positions:
    """Check the coordinates of positions and return them with their ids on the device of the rotated tensors."""
    positions_.check_axes(where, axes)
    ids = where.ids
    if ids is None or ids.device == device:
        return where
    if ids.device.type == "meta":
        raise bad_value(
            "positions must have data but are on the meta device while the rotated tensors are on "
            f"{device}; create them with device={str(device)!r}",
            positions=as_passed(ids),
        )
    with outside_modes():  # so that autograd can save the copy
        return _with_ids(where, ids.to(device))


def _with_ids(where: Positions, ids: torch.Tensor) -> Positions:
    return Positions(ids, where.offset, where.add_index, where.packed, where.part)
