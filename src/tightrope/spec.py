"""RopeSpec: a rotary embedding as one frozen value, and what it prepares for a forward pass."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from . import frequencies, positions as positions_
from ._errors import sentence
from .angles import words_from, words_of
from .axes import Axes
from .frequencies import Frequencies, Rule
from .positions import PositionsLike

# How to_dict writes; from_dict reads this and whatever older ones there will be.
VERSION = 1

# Tables that a spec keeps, over devices and lengths. Decoding under a rule that depends on the length
# meets a new one with every token, so there is an end to what is kept.
_KEPT = 64

SeqLen: TypeAlias = "int | Sequence[int] | torch.Tensor | None"


@dataclass(frozen=True, repr=False)
class RopeSpec:
    """A rotary position embedding: which channels rotate, by which coordinate, and how fast.

    Two specs are equal when all their fields are, in the normal form that the constructor gives them
    (``rotary_dim=None`` is resolved, numbers are floats or ints). Equal specs rotate equally, to the
    last bit. Unequal ones may do so too: ``scaling=Linear(1.0)`` is None by another name, and a
    :class:`tightrope.frequencies.Given` does not look at ``base``.

    A spec holds no tensor that a module could cast, move or save; it hashes in constant time and can
    be shared by any number of layers, threads and processes. ``dataclasses.replace`` works; it hands
    over the resolved ``rotary_dim``, so with another ``head_dim`` or ``start`` say
    ``rotary_dim=None`` as well to have it follow.

    Args:
        head_dim: channels of one head.
        base: base of the geometric row of frequencies, a positive number.
        rotary_dim: how many channels rotate; even; all from ``start`` on by default.
        start: first channel that rotates.
        interleaved: pair channels (0, 1), (2, 3), … if true, as GPT-J and the first paper do; pair
            channel i with i + rotary_dim / 2 if false, as GPT-NeoX and Llama in transformers do.
        scaling: a rule of :mod:`tightrope.frequencies`; None for the geometric row as it is.
        axes: which coordinate of a position turns each pair, for positions that have several.

    Raises:
        ValueError: values that describe no rotation.
        TypeError: values of the wrong type.

    Source: Su et al., RoFormer (arXiv 2104.09864); partial rotation: Black et al., GPT-NeoX-20B
    (arXiv 2204.06745), section 2.1; the rules and axes name theirs.

    >>> spec = RopeSpec(head_dim=64, base=500_000.0)
    >>> spec.frequencies().inv_freq.shape
    torch.Size([32])
    >>> spec
    RopeSpec(head_dim=64, base=500000.0)
    """

    head_dim: int
    base: float = 10000.0
    rotary_dim: int = None  # type: ignore[assignment]  # resolved to head_dim - start
    start: int = 0
    interleaved: bool = False
    scaling: Rule | None = None
    axes: Axes | None = None

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
        if self.scaling is not None and not isinstance(self.scaling, Rule):
            raise TypeError(
                sentence(
                    "RopeSpec",
                    f"scaling must be a rule of tightrope.frequencies but got {self.scaling!r}",
                )
            )
        self._check_axes(rotary_dim)
        put = object.__setattr__
        put(self, "head_dim", head_dim)
        put(self, "start", start)
        put(self, "rotary_dim", rotary_dim)
        put(self, "base", base)
        put(self, "_hash", hash(self._values()))
        rule: Any = self.scaling
        if rule is not None and torch.compiler.is_dynamo_compiling():
            # A rule made inside a compiled function is none yet that could be handed to a constant.
            rule = type(rule), rule._values()
        put(self, "_within", _made(rule, rotary_dim, base, self.axes, None))
        put(self, "_tables", {})
        if not torch.compiler.is_compiling():
            self._table(torch.device("cpu"))

    def _check_axes(self, rotary_dim: int) -> None:
        if self.axes is None:
            return
        if not isinstance(self.axes, Axes):
            raise TypeError(sentence("RopeSpec", f"axes must be an Axes but got {self.axes!r}"))
        if self.axes.rotary_dim != rotary_dim:
            raise ValueError(
                sentence(
                    "RopeSpec",
                    f"axes must assign the {rotary_dim // 2} pairs that rotate but got "
                    f"{len(self.axes.pairs)}; rotary_dim={self.axes.rotary_dim} would fit",
                )
            )
        if isinstance(self.scaling, frequencies.Given) and len(self.scaling.shape) == 3:
            raise ValueError(
                sentence(
                    "RopeSpec",
                    "axes must be None where the given frequencies have axes of their own but got "
                    f"{self.axes!r}",
                )
            )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        # Words and device tables are derived; a copy derives its own.
        return RopeSpec, self._values()

    def __repr__(self) -> str:
        usual = {each.name: each.default for each in fields(self)}
        usual["rotary_dim"] = self.head_dim - self.start
        shown = [
            f"{name}={value!r}"
            for name, value in zip(usual, self._values(), strict=True)
            if value != usual[name]
        ]
        return f"RopeSpec({', '.join(shown)})"

    def _values(self) -> tuple[Any, ...]:
        return (
            self.head_dim, self.base, self.rotary_dim, self.start, self.interleaved, self.scaling,
            self.axes,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The spec in types that JSON has, floats exact, with the version of this form.

        >>> RopeSpec(4).to_dict()["version"]
        1
        >>> RopeSpec.from_dict(RopeSpec(4).to_dict())
        RopeSpec(head_dim=4)
        """
        made: dict[str, Any] = {"version": VERSION}
        made |= zip((each.name for each in fields(self)), self._values(), strict=True)
        if self.scaling is not None:
            made["scaling"] = self.scaling.to_dict()
        if self.axes is not None:
            pairs = [list(pair) for pair in self.axes.pairs]
            made["axes"] = {"count": self.axes.count, "pairs": pairs}
        return made

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RopeSpec:
        """The inverse of :meth:`to_dict`. For other people's configurations: :meth:`from_config`.

        Raises:
            ValueError: another version, unknown or missing keys, values that describe no rotation.
            TypeError: values of the wrong type.
        """
        values = _dictionary("a spec", saved)
        version = values.pop("version", None)
        if version != VERSION or isinstance(version, bool):
            raise ValueError(
                sentence("from_dict", f"version must be {VERSION} but got {version!r}")
            )
        _check_keys("a spec", values, [each.name for each in fields(cls)], ["head_dim"])
        if values.get("scaling") is not None:
            values["scaling"] = Rule.from_dict(_dictionary("scaling", values["scaling"]))
        if values.get("axes") is not None:
            axes = _dictionary("axes", values["axes"])
            _check_keys("axes", axes, ["count", "pairs"], ["count", "pairs"])
            values["axes"] = Axes(**axes)
        return cls(**values)

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        layer_type: str | None = None,
        section: str | None = None,
        strict: bool = True,
        interleaved: bool | None = None,
    ) -> Any:
        """The spec that somebody else's configuration describes; never a guess, never a default.

        Reads transformers (v4 and v5, files and objects), Meta's ``params.json``, GGUF metadata, and
        the names of vLLM and Megatron. :func:`tightrope.config.provenance` tells which key gave which
        field.

        Args:
            config: a mapping, a config object, or the path of a JSON file or of its folder.
            layer_type: which layers, where they differ; the specs of all types without it.
            section: which part of a nested configuration, such as ``"text_config"``, where several
                have RoPE; ``""`` is the outer level.
            strict: whether an unknown key about RoPE is an error; else it is a warning.
            interleaved: how channels are paired, where neither the config nor its family says it; it
                overrules both.

        Returns:
            The spec. Where layers differ, a :class:`tightrope.config.LayerSpecs`: a mapping from the
            type of a layer to its spec, or to None for layers without RoPE.

        Raises:
            ValueError: no frequencies are said, keys disagree or are unknown, the family is unknown or
                has no RoPE.
            TypeError: something other than a configuration, values of the wrong type.

        >>> llama = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
        >>> RopeSpec.from_config(llama | {"rope_theta": 500000.0})
        RopeSpec(head_dim=128, base=500000.0)
        """
        from . import config as reader  # config stands above spec, and few programs need it

        return reader.from_config(
            config, layer_type=layer_type, section=section, strict=strict, interleaved=interleaved
        )

    @property
    def axis_count(self) -> int:
        """How many coordinates a position has."""
        return self._within.shape[0]  # type: ignore[attr-defined, no-any-return]

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.scaling is not None and self.scaling.by_length

    @property
    def amplitude(self) -> float:
        """The factor on the rotated channels within the original length."""
        return self._within.attention_scaling  # type: ignore[attr-defined, no-any-return]

    @property
    def softmax_scaling(self) -> float:
        """What the model multiplies its softmax scale by, and nothing here does; 1.0 for most.

        See :attr:`tightrope.frequencies.YaRN.softmax_scaling`.
        """
        return 1.0 if self.scaling is None else self.scaling.softmax_scaling

    def frequencies(self, seq_len: int | None = None) -> Frequencies:
        """The frequencies of the pairs and the factor on the rotated channels.

        Args:
            seq_len: length of the sequence, for rules that depend on it; None for any length that
                the model was trained with.

        Returns:
            One frequency per pair, whichever axis it belongs to; per head, and per axis and head,
            where the given frequencies are. Radians per position.

        >>> RopeSpec(8, axes=Axes.blocks((2, 2))).frequencies().inv_freq.tolist()
        [1.0, 0.01, 1.0, 0.01]
        """
        return _assigned(self.scaling, self.rotary_dim, self.base, self.axes, self._regime(seq_len))

    def attention_scaling(self, seq_len: SeqLen = None) -> float:
        """The factor on the rotated channels, for a length or for rows of these lengths.

        Args:
            seq_len: as of :meth:`words_for`.

        Raises:
            NotImplementedError: rows of one call whose factors differ, which only a
                :class:`tightrope.frequencies.LongRoPE` with unequal mscales can give.
        """
        if not self.by_length or seq_len is None:
            return self.amplitude
        if isinstance(seq_len, torch.Tensor) and not _is_known(seq_len):
            # Any length may be in it. Rules with more than two regimes have one factor for all.
            beyond = self.scaling.original_max_position + 1  # type: ignore[union-attr]
            regimes: set[int | None] = {None, self._regime(beyond)}
        else:
            regimes = set(self._regimes(seq_len))
        found = {self._made(regime).attention_scaling for regime in regimes}
        if len(found) > 1:
            raise NotImplementedError(
                sentence(
                    "RopeSpec",
                    "all rows of one call must have one attention scaling but got "
                    f"{', '.join(map(str, sorted(found)))}; rotate short and long rows apart",
                )
            )
        return found.pop() if found else self.amplitude

    def words_for(
        self, seq_len: SeqLen = None, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Phase words for sequences of given lengths: what a prepared rotation holds.

        Internal to the library. Each row gets what it would get alone: words depend on this spec and
        the row's own length, and are kept by everything that they depend on.

        Args:
            seq_len: None or an int for all rows; one int per row; or a tensor ``(rows,)`` or ``()``
                of int32, int64 or float64. A tensor on another device than the CPU, or one that is
                being traced, is not read: nothing synchronises. Ignored by rules that do not depend
                on it.
            device: where the words shall be.

        Returns:
            Words and turns, int64 ``[axes, rows|1, heads|1, pairs]``, zeros where an axis does not
            turn a pair; one row where all have the same words. Turns are None where all are zero.
            Words are the nearest integers, except those of :class:`tightrope.frequencies.DynamicNTK`
            for a tensor that is not read: they come from float64, off by at most 5e-14 · ω
            radians per position for scales up to 1e7.
        """
        device = torch.device(device)
        if not self.by_length or seq_len is None:
            return self._table(device)
        if isinstance(seq_len, torch.Tensor) and not _is_known(seq_len):
            return self._unread_table(seq_len.reshape(-1).to(device), device)
        regimes = self._regimes(seq_len)
        if len(set(regimes)) <= 1:
            return self._table(device, regimes[0] if regimes else None)
        tables = [self._table(device, regime) for regime in regimes]
        if _is_tracing():
            return _joined(tables)
        with torch.inference_mode(False):
            return _joined(tables)

    def _regime(self, seq_len: int | None) -> int | None:
        if self.scaling is None or not self.scaling.by_length or seq_len is None:
            return None
        return self.scaling.regime(_length(seq_len))

    def _regimes(self, seq_len: SeqLen) -> list[int | None]:
        if isinstance(seq_len, torch.Tensor):
            _check_lengths(seq_len)
            # Rows before position 0 are short, too.
            lengths = seq_len.reshape(-1).to(torch.float64).nan_to_num(0.0).clamp(0, 2**62)
            seq_len = lengths.ceil().to(torch.int64).tolist()
        if isinstance(seq_len, Iterable):
            return [self._regime(length) for length in seq_len]
        return [self._regime(seq_len)]

    def _made(self, regime: int | None) -> _Made:
        if regime is None:
            return self._within  # type: ignore[attr-defined, no-any-return]
        return _made(self.scaling, self.rotary_dim, self.base, self.axes, regime)

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
        positions_.check_axes(operation, where, self.axis_count)
        ids = where.ids
        if ids is not None and ids.device != device:
            ids = ids.to(device)
        words, turns = self._table(device)
        return PreparedRotation(self, words, turns, ids, where.offset, where.ramp, device)

    def _table(
        self, device: torch.device, regime: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Words and turns on a device, ``[axes, 1, heads|1, pairs]``.

        Kept per device and regime, but never while something traces or transforms: a cache must not
        hold a fake or wrapped tensor, nor may the words of a fake program be real ones.
        """
        tracing = _is_tracing()
        if tracing and not torch.compiler.is_dynamo_compiling():
            return self._make_table(device, regime)
        tables = self._tables  # type: ignore[attr-defined]
        key = device if regime is None else (device, regime)
        table = tables.get(key)
        if table is None:
            if tracing:
                return self._make_table(device, regime)
            with torch.inference_mode(False):
                table = self._make_table(device, regime)
            if len(tables) >= _KEPT:
                tables.clear()
            tables[key] = table
        return table  # type: ignore[no-any-return]

    def _make_table(
        self, device: torch.device, regime: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = self._made(regime)
        axes, heads, pairs = made.shape
        words = torch.tensor(made.words, dtype=torch.int64, device=device)
        words = words.reshape(axes, 1, heads, pairs)
        if not any(made.turns):
            return words, None
        turns = torch.tensor(made.turns, dtype=torch.int64, device=device)
        return words, turns.reshape(words.shape)

    def _unread_table(
        self, lengths: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Words and turns of rows whose lengths only the device knows, or nobody yet."""
        _check_lengths(lengths)
        lengths = lengths.to(torch.float64).ceil()
        rule = self.scaling
        limit = rule.original_max_position  # type: ignore[union-attr]
        longer = (lengths > limit)[None, :, None, None]
        short, short_turns = self._table(device)
        made = self._inv_freq_beyond(lengths.clamp(min=limit))
        long, long_turns = (
            self._table(device, self._regime(limit + 1)) if made is None else words_from(made)
        )
        words = torch.where(longer, long, short)
        if short_turns is None and (long_turns is None or made is not None):
            # What a rule makes of lengths turns no faster than what it starts from.
            return words, None
        zero = torch.zeros_like(short)
        return words, torch.where(
            longer,
            zero if long_turns is None else long_turns,
            zero if short_turns is None else short_turns,
        )

    def _inv_freq_beyond(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """As :meth:`Rule.inv_freq_beyond`, but ``[axes, rows, 1, pairs]``."""
        rule = self.scaling

        def row(dim: int) -> torch.Tensor | None:
            within = torch.tensor(
                _inv_freq(rule, dim, self.base), dtype=torch.float64, device=lengths.device
            )
            return rule.inv_freq_beyond(within, lengths)  # type: ignore[union-attr]

        if self.axes is None:
            made = row(self.rotary_dim)
            return None if made is None else made[None, :, None]
        rows = {dim: row(dim) for dim in sorted({dim for _, _, dim in self.axes.pairs})}
        columns = []
        for axis, index, dim in self.axes.pairs:
            made = rows[dim]
            if made is None:
                return None
            omega = made[:, index]
            zero = torch.zeros_like(omega)
            columns.append(
                torch.stack([omega if a == axis else zero for a in range(self.axis_count)])
            )
        return torch.stack(columns, -1)[:, :, None] if columns else None


@dataclass(frozen=True, eq=False)
class PreparedRotation:
    """A spec at given positions on a device: what :meth:`RopeSpec.at` returns.

    Attributes:
        spec: what it was made from.
        words: phase words, int64 ``[1, 1, 1, pairs]``.
        turns: None, or int64 ``[1, 1, 1, pairs]``: whole turns per position, where some ω >= π.
        ids, offset, ramp: as in :class:`tightrope.positions.Positions`.
        device: where the rotated tensors must live.
        calls: what the operator is called with, by layout and direction, once it was.
    """

    spec: RopeSpec
    words: torch.Tensor
    turns: torch.Tensor | None
    ids: torch.Tensor | None
    offset: int
    ramp: bool
    device: torch.device
    calls: dict[Any, tuple[Any, ...]] = field(default_factory=dict, repr=False)


class _Made(NamedTuple):
    """Words and turns as plain ints, flat, with their shape ``(axes, heads, pairs)``."""

    words: tuple[int, ...]
    turns: tuple[int, ...]
    shape: tuple[int, int, int]
    attention_scaling: float


def _made(
    rule: Rule | tuple[type[Rule], tuple[Any, ...]] | None,
    rotary_dim: int,
    base: float,
    axes: Axes | None,
    regime: int | None,
) -> _Made:
    if isinstance(rule, tuple):
        kind, values = rule
        rule = kind(*values)
    return _cached(rule, rotary_dim, base, axes, regime)


def _inv_freq(rule: Rule | None, dim: int, base: float) -> list[float]:
    made = frequencies.default(dim, base) if rule is None else rule.frequencies(dim, base)
    return [float(omega) for omega in made.exact]


# A spec may be made inside a compiled function; its words are constants there, since dynamo cannot
# trace decimals. This is what torch.compiler.assume_constant_result does, which would import dynamo.
_made._dynamo_marked_constant = True  # type: ignore[attr-defined]
_inv_freq._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=512)
def _cached(
    rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None, regime: int | None
) -> _Made:
    made = _assigned(rule, rotary_dim, base, axes, regime)
    flat = words_of(made)
    shape = made.shape or (len(made.exact),)
    pairs = shape[-1]
    heads = shape[-2] if len(shape) > 1 else 1
    if axes is None:
        count = shape[0] if len(shape) == 3 else 1
        return _Made(flat.words, flat.turns, (count, heads, pairs), made.attention_scaling)
    owners = [owner for owner, _, _ in axes.pairs] * heads
    words, turns = (
        tuple(
            value if axis == owner else 0
            for axis in range(axes.count)
            for owner, value in zip(owners, values, strict=True)
        )
        for values in (flat.words, flat.turns)
    )
    return _Made(words, turns, (axes.count, heads, pairs), made.attention_scaling)


@lru_cache(maxsize=512)
def _assigned(
    rule: Rule | None, rotary_dim: int, base: float, axes: Axes | None, regime: int | None
) -> Frequencies:
    """The frequencies of a rule, one per pair, as axes assign them."""

    def row(dim: int) -> Frequencies:
        if rule is None:
            return frequencies.default(dim, base)
        return rule.frequencies(dim, base, regime)

    if axes is None:
        return row(rotary_dim)
    rows = {dim: row(dim) for dim in {dim for _, _, dim in axes.pairs} or {rotary_dim}}
    whole = next(iter(rows.values()))
    heads = 1 if whole.shape is None else whole.shape[-2]
    exact = tuple(
        rows[dim].exact[head * (dim // 2) + index]
        for head in range(heads)
        for _, index, dim in axes.pairs
    )
    shape = None if whole.shape is None else (heads, len(axes.pairs))
    return Frequencies(exact, whole.attention_scaling, shape)


def _joined(
    tables: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tables of single rows as one table."""
    words = torch.cat([words for words, _ in tables], 1)
    if all(turns is None for _, turns in tables):
        return words, None
    every = [torch.zeros_like(words) if turns is None else turns for words, turns in tables]
    return words, torch.cat(every, 1)


def _is_tracing() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _is_known(lengths: torch.Tensor) -> bool:
    """Whether the numbers in a tensor can be read without waiting for a device."""
    return lengths.device.type == "cpu" and not _is_tracing()


def _check_lengths(lengths: torch.Tensor) -> None:
    if lengths.dtype not in (torch.int32, torch.int64, torch.float64):
        raise TypeError(
            sentence("seq_len", "lengths must be int32, int64 or float64", seq_len=lengths)
        )
    if lengths.dim() > 1:
        raise ValueError(sentence("seq_len", "lengths must have shape (rows,)", seq_len=lengths))


def _length(value: object) -> int:
    try:
        length = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        length = None
    if length is None:
        raise TypeError(
            sentence("seq_len", f"a length must be an int, or one per row, but got {value!r}")
        )
    if length < 0:
        raise ValueError(sentence("seq_len", f"a length must not be negative but got {length}"))
    return length


def _dictionary(what: str, values: object) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(sentence("from_dict", f"{what} must be a dictionary but got {values!r}"))
    return dict(values)


def _check_keys(what: str, values: Mapping[str, Any], known: list[str], needed: list[str]) -> None:
    unknown, missing = values.keys() - set(known), set(needed) - values.keys()
    if unknown:
        raise ValueError(
            sentence(
                "from_dict",
                f"{what} must have no keys but {', '.join(known)} but got "
                f"{', '.join(sorted(map(str, unknown)))}",
            )
        )
    if missing:
        raise ValueError(
            sentence("from_dict", f"{what} must have the keys {', '.join(sorted(missing))}")
        )


def _size(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(sentence("RopeSpec", f"{name} must be an int but got {value}"))
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(sentence("RopeSpec", f"{name} must be an int but got {value!r}")) from None
