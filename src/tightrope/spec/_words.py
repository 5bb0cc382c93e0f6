"""The phase words of a spec on any device, for sequences of any length."""

from __future__ import annotations

import operator
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from .. import phase_words
from .._errors import bad_value, public, unsupported
from .._namespace import operators
from .._tracing import (
    Constant,
    as_constant,
    is_tracing,
    may_keep,
    needs_plain,
    outside_modes,
    outside_transforms,
    value_of,
)
from ..angles import words_from
from ..axes import Axes
from ..frequencies import Rule
from ..phase_words import PhaseWords
from ..positions import Positions
from . import _lengths
from ._lengths import Lengths, SeqLen

#: The rule, the axes, ``rotary_dim`` and the base of a spec.
Constants: TypeAlias = "tuple[Constant[Rule | None], Constant[Axes | None], int, float]"


class OnDevice:
    """The tensors of a spec on one device; equal specs share them. None for a tensor that is not needed.

    Attributes:
        words, turns: phase words up to the original length, see :class:`tightrope.phase_words.PhaseWords`.
        beyond, beyond_turns: those of all longer sequences, if they are the same for all.
        inv_freq: where they are not, the frequencies up to the original length, float64 ``[axes, 1, 1, pairs]``.
        exponents: and the negated exponents of their scale, float64 ``[pairs]``; see
            :meth:`tightrope.frequencies.Rule.scale_beyond`.
    """

    beyond = beyond_turns = inv_freq = exponents = None

    def __init__(
        self,
        rule: Rule | None,
        axes: Axes | None,
        rotary_dim: int,
        base: float,
        device: torch.device,
    ) -> None:
        host = phase_words.host_words(rule, axes, rotary_dim, base, None)
        self.words, self.turns = phase_words.as_tensors(host, device)
        if rule is None or not rule.by_length:
            return
        if (first := _fixed(rule)) is not None:
            host = phase_words.host_words(rule, axes, rotary_dim, base, first)
            self.beyond, self.beyond_turns = phase_words.as_tensors(host, device)
            return
        exact = phase_words.assigned(rule, axes, rotary_dim, base, None).exact
        inv_freq = phase_words.by_axis(axes, [float(omega) for omega in exact])
        widths = [rotary_dim] if axes is None else [dim for _, _, dim in axes.pairs]
        exponents = {dim: rule.scale_exponents(dim // 2) for dim in widths}
        own = (
            exponents[rotary_dim]
            if axes is None
            else [exponents[dim][k] for _, k, dim in axes.pairs]
        )
        tensor = partial(torch.tensor, dtype=torch.float64, device=device)
        self.inv_freq = tensor(inv_freq).reshape(self.words.shape)
        self.exponents = -tensor(own)


# The tensors of the specs that are alive, by their fields and the device.
_shared: weakref.WeakValueDictionary[Any, OnDevice] = weakref.WeakValueDictionary()


def _on_device(
    rule: Rule | None, axes: Axes | None, rotary_dim: int, base: float, device: torch.device
) -> OnDevice:
    """Return the tensors that all equal specs share, or make them."""
    key = rule, axes, rotary_dim, base, device
    found = _shared.get(key)
    if found is None:
        with outside_modes():
            found = OnDevice(*key)
        if may_keep(device):
            found = _shared.setdefault(key, found)
    return found


# --- constants of compiled code ---------------------------------------------------------------------

# The compiler runs functions that are marked, and takes their results for constants: one for all equal specs. It
# would otherwise copy phase words from the host in each call. It names a constant after its function, and two
# constants of one name are an error, so each has a function of its own.
_makers = SimpleNamespace()
_names: dict[Any, str] = {}


def _maker_of(rule: Any, axes: Any, rotary_dim: int, base: float, device: Any, name: str) -> str:
    """Return the name in ``_makers`` of the function that returns an attribute of :class:`OnDevice`; "" for None."""
    fields = value_of(rule), value_of(axes), rotary_dim, base, device
    with outside_transforms():  # Dynamo may be inside one
        tensor = getattr(_on_device(*fields), name)
    if tensor is None:
        return ""
    key = fields, name
    maker = _names.get(key)
    if maker is None:

        def make() -> Any:
            return tensor  # the same one as long as this process lives

        maker = f"{name}_{len(_names)}"
        make.__code__ = make.__code__.replace(co_name=maker)
        make._dynamo_marked_constant = True  # type: ignore[attr-defined]
        setattr(_makers, maker, make)
        _names[key] = maker
    return maker


# torch.compiler.assume_constant_result sets the same attribute, but imports Dynamo.
_maker_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fixed(rule: Rule) -> int | None:
    """Return a length whose frequencies all sequences beyond the original length have; None if they differ."""
    first = rule.regime(rule.original_max_position + 1)
    return first if first == rule.regime(_lengths.LONGEST) else None


class Words:
    """The phase words of one spec.

    Attributes:
        rule: its frequency rule, or None.
        by_length: whether phase words depend on the length of the sequence.
        axis_count: number of coordinates of a position.
        amplitude_hex: the attention scaling within the original length, as a hexadecimal string,
            since the compiler would turn a float into a symbol.
        one_amplitude: whether longer sequences have the same attention scaling.
    """

    def __init__(self, rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None) -> None:
        self.rule = rule
        self.by_length = rule is not None and rule.by_length
        self._rotary_dim = rotary_dim
        self._base_hex = base.hex()
        self._axes = axes
        self._constants: tuple[Constant[Rule | None], Constant[Axes | None]]
        if torch.compiler.is_dynamo_compiling():
            self._constants = (
                None if rule is None else (type(rule), rule._values()),
                None if axes is None else (Axes, axes._values()),
            )
        else:
            self._constants = as_constant(rule), as_constant(axes)
        within = beyond = phase_words.host_words(*self.constants, None)
        self._is_fixed = True
        if rule is not None and rule.by_length:
            first = _fixed(rule)
            self._is_fixed = first is not None
            if first is not None:
                beyond = phase_words.host_words(*self.constants, first)
        self.axis_count = within.shape[0]
        self.amplitude_hex = within.amplitude_hex
        self._beyond_hex = beyond.amplitude_hex
        self.one_amplitude = self._beyond_hex == self.amplitude_hex
        # A captured CUDA graph reads these tensors, so they live as long as the spec.
        self._on: dict[torch.device, OnDevice] = {}
        # The words of the last lengths beyond the original one, with lengths and device: all layers of a step
        # share them.
        self._last: tuple[Any, PhaseWords] | None = None
        if not is_tracing():
            self.on(torch.device("cpu"))  # now: an export reads their values under fake tensors

    def __reduce__(self) -> tuple[Any, ...]:
        # Phase words are derived; a copy computes its own.
        return Words, (self.rule, self._rotary_dim, float.fromhex(self._base_hex), self._axes)

    @property
    def constants(self) -> Constants:
        """The fields of the spec, for functions that Dynamo runs while compiling."""
        # With dynamic shapes, Dynamo takes int attributes for symbols.
        return *self._constants, operator.index(self._rotary_dim), float.fromhex(self._base_hex)

    def _get(self, device: torch.device, *names: str) -> list[Any]:
        """Return attributes of :class:`OnDevice`."""
        if torch.compiler.is_dynamo_compiling():
            makers = [_maker_of(*self.constants, device, name) for name in names]
            # detach, because Dynamo does not know the attributes of a constant, such as requires_grad.
            return [getattr(_makers, maker)().detach() if maker else None for maker in makers]
        found = self.on(device)
        return [getattr(found, name) for name in names]

    def on(self, device: torch.device) -> OnDevice:
        """Return the tensors on a device; not while compiling.

        Fake tensors and functorch transforms get new ones in each call. An export for a runtime that lacks
        the operators gets those that are kept, because it needs their values.
        """
        is_shared = not is_tracing() or needs_plain()
        found = self._on.get(device) if is_shared else None
        if found is None:
            own = self.rule, self._axes, self._rotary_dim, float.fromhex(self._base_hex), device
            found = _on_device(*own) if is_shared else OnDevice(*own)
            if is_shared and may_keep(device):
                self._on[device] = found
        return found

    def read(self, seq_len: SeqLen, device: torch.device) -> Lengths | None:
        """Normalise ``seq_len``; None if the rule ignores it.

        While compiling, an int would become a constant, and each length would compile another graph. So
        it becomes a tensor, unless the attention scaling, which must be a constant, depends on it.

        Raises:
            ValueError, TypeError: an invalid length, also where the rule ignores it.
        """
        if seq_len is None:
            return None
        # Export passes torch.SymInt, which Dynamo presents as int.
        if torch.compiler.is_compiling() and isinstance(seq_len, (int, torch.SymInt)):
            if not self.by_length and not isinstance(seq_len, bool):
                return None  # checking its value would add a guard to the graph
            if self.one_amplitude:
                seq_len = torch.full((1,), seq_len, dtype=torch.int64, device=device)
        if not self.by_length and isinstance(seq_len, torch.Tensor):
            _lengths.check_tensor(seq_len)  # without reading it
            return None
        lengths = _lengths.read(seq_len)
        return lengths if self.by_length else None

    def lengths(
        self, where: Positions, tokens: int, device: torch.device, with_rows: str | None
    ) -> Lengths | None:
        """Return the length of each row: its largest position plus 1; None without tokens.

        Args:
            where: the positions of one call.
            tokens: number of tokens per row.
            with_rows: see :meth:`PreparedRotation.for_tokens`.

        Raises:
            ValueError: positions that do not tell the length, see :meth:`tightrope.RopeSpec.at`.
        """
        ids = where.ids
        if ids is not None and ids.shape[2] == 0:
            return None
        if where.add_index:
            _lengths.refuse_parts(where, tokens, self.rule)  # type: ignore[arg-type]
        if ids is None:
            return self.read(max(0, where.offset + tokens), device)
        if where.add_index:
            return _lengths.ends(ids, where.offset + tokens)
        return _lengths.of_ids(where, ids, self.rule, with_rows)  # type: ignore[arg-type]

    def of(self, lengths: Lengths | None, device: torch.device) -> PhaseWords:
        """Return the phase words of rows of given lengths; one row if all rows share them."""
        if lengths is None or self.rule is None:
            return self._within(device)
        return self._of_rows(self.rule, lengths, device)

    def _within(self, device: torch.device) -> PhaseWords:
        return PhaseWords(*self._get(device, "words", "turns"))

    def _beyond(self, device: torch.device) -> PhaseWords:
        return PhaseWords(*self._get(device, "beyond", "beyond_turns"))

    @public("seq_len")
    def _of_rows(self, rule: Rule, lengths: Lengths, device: torch.device) -> PhaseWords:
        limit = rule.original_max_position
        if isinstance(lengths, torch.Tensor):
            if lengths.is_meta and device.type != "meta":
                raise bad_value(
                    "lengths must have data but are on the meta device while the rotated tensors are on "
                    f"{device}"
                )
            return self._selected(rule, lengths.to(device), False, device)
        if not lengths or max(lengths) <= limit:
            return self._within(device)
        all_are_long = min(lengths) > limit
        if all_are_long and self._is_fixed:
            return self._beyond(device)
        lengths = lengths[:1] if all(n == lengths[0] for n in lengths) else lengths
        if not may_keep(device):
            return self._selected(rule, lengths, all_are_long, device)
        key, last = (lengths, device), self._last
        if last is None or last[0] != key:
            with outside_modes():
                last = self._last = key, self._selected(rule, lengths, all_are_long, device)
        return last[1]

    def _selected(
        self, rule: Rule, lengths: Lengths, all_are_long: bool, device: torch.device
    ) -> PhaseWords:
        """Select between the phase words within the original length and those beyond it, for each row."""
        if self._is_fixed:
            long = self._beyond(device)
            if isinstance(lengths, torch.Tensor):
                longer = lengths > rule.original_max_position
            else:
                flags = [length > rule.original_max_position for length in lengths]
                longer = torch.tensor(flags, device=device)
            longer = longer[:, None, None]
        else:
            scale = self._scale(rule, lengths, device)
            long = self._stretched(scale, device)
            if all_are_long:
                return long
            longer = scale > 1.0
        short = self._within(device)
        words = torch.where(longer, long.words, short.words)
        if short.turns is None and long.turns is None:
            return PhaseWords(words, None)
        zero = torch.zeros_like(short.words)
        turns, short_turns = (zero if t is None else t for t in (long.turns, short.turns))
        return PhaseWords(words, torch.where(longer, turns, short_turns))

    def _scale(self, rule: Rule, lengths: Lengths, device: torch.device) -> torch.Tensor:
        """Return the scales of rows, float64 ``[rows, 1, 1]``; 1 up to the original length."""
        if device.type == "mps":
            raise unsupported(
                f"the tensors must be on a device with float64 for {type(rule).__name__}, which computes its "
                f"frequencies in it, but are on {device}"
            )
        limit = rule.original_max_position
        if isinstance(lengths, torch.Tensor):
            return rule.scale_beyond(lengths.clamp(min=limit))[:, None, None]
        scale = rule.scale_beyond
        scales = [scale(float(length if length > limit else limit)) for length in lengths]
        if len(scales) == 1:
            # Filled, because a copy from the host would wait for the device.
            return torch.full((1, 1, 1), scales[0], dtype=torch.float64, device=device)
        return torch.tensor(scales, dtype=torch.float64, device=device).view(-1, 1, 1)

    def _stretched(self, scale: torch.Tensor, device: torch.device) -> PhaseWords:
        """Compute phase words in float64 for the scales of rows."""
        inv_freq, exponents, turns = self._get(device, "inv_freq", "exponents", "turns")
        # Not pow: its results for the same row depend on the place in the tensor.
        omega = (scale.log() * exponents).exp_() * inv_freq
        if needs_plain() or turns is not None:
            return PhaseWords(*words_from(omega))
        # No frequency is above those within, so it needs no whole turns.
        return PhaseWords(operators.phase_words.default(omega, None, None, False, True)[0], None)

    @public("RopeSpec")
    def amplitude(self, lengths: Lengths | None) -> str:
        """Return the attention scaling for rows of given lengths, as a hexadecimal string.

        Raises:
            NotImplementedError: rows whose factors differ, or may differ.
        """
        rule, within, beyond = self.rule, self.amplitude_hex, self._beyond_hex
        if lengths is None or rule is None or self.one_amplitude:
            return within
        known = not isinstance(lengths, torch.Tensor)
        limit = rule.original_max_position
        longer = {length > limit for length in lengths} if known else {False, True}
        if len(longer) < 2:
            return beyond if True in longer else within
        factors = ", ".join(str(factor) for factor in sorted(map(float.fromhex, (within, beyond))))
        advice = (
            "rotate short and long rows separately"
            if known
            else "a length that is traced or on a device may have either, so give seq_len as an int"
        )
        raise unsupported(
            f"all rows of one call must have one attention scaling but got {factors}; {advice}"
        )
