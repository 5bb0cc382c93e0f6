"""RopeSpec: a rotary embedding as one frozen value, and what it prepares for a forward pass."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from . import frequencies, positions as positions_, words as words_
from ._errors import sentence
from .angles import words_from
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
        within = words_.made(rule, rotary_dim, base, self.axes, None)
        put(self, "_within", within)
        put(self, "_amplitude", within.attention_scaling.hex())
        put(self, "_tables", {})
        if not torch.compiler.is_compiling():
            self._table(torch.device("cpu"))
        put(self, "_beyond", self._make_beyond() if self.by_length else None)

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
        return float.fromhex(self._amplitude)  # type: ignore[attr-defined]

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
        return words_.assigned(
            self.scaling, self.rotary_dim, self.base, self.axes, self._regime(seq_len)
        )

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
            if self._beyond.amplitude == self._amplitude:  # type: ignore[attr-defined]
                return self.amplitude
            found = {self.amplitude, float.fromhex(self._beyond.amplitude)}  # type: ignore[attr-defined]
        else:
            found = {self._made(regime).attention_scaling for regime in self._regimes(seq_len)}
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
            return words_.joined(tables)
        with torch.inference_mode(False):
            return words_.joined(tables)

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

    def _made(self, regime: int | None) -> words_.Made:
        if regime is None:
            return self._within  # type: ignore[attr-defined, no-any-return]
        return words_.made(self.scaling, self.rotary_dim, self.base, self.axes, regime)

    def at(
        self,
        positions: PositionsLike = None,
        device: torch.device | str | None = None,
        *,
        seq_len: SeqLen = None,
    ) -> PreparedRotation:
        """Validate positions once, for all layers of a forward pass.

        Args:
            positions: None for 0..n-1, an int offset, ids ``(tokens,)`` or ``(rows, tokens)``, or a
                :class:`tightrope.positions.Positions`. Ids are not copied: do not change them.
            device: where the rotated tensors live; by default where the ids are, else the CPU.
            seq_len: the length of each sequence, for rules that depend on it: an int, one per row,
                or a tensor of them. By default it is the row's own: its last position + 1.

        Raises:
            ValueError: positions that do not fit the spec; or positions that start again within a
                row beyond the original length of such a rule, where no one length fits the row.

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
        return self.on(where, target, "at", seq_len)

    def on(
        self,
        where: positions_.Positions,
        device: torch.device,
        operation: str,
        seq_len: SeqLen = None,
    ) -> PreparedRotation:
        """As :meth:`at`, from canonical positions, with the operation that errors shall name."""
        positions_.check_axes(operation, where, self.axis_count)
        ids = where.ids
        if ids is not None and ids.device != device:
            ids = ids.to(device)
        awaits = self.by_length and seq_len is None
        if awaits and ids is not None and not where.ramp:
            seq_len, awaits = self._own_lengths(ids + where.offset, operation), False
        words, turns = self.words_for(seq_len, device)
        return PreparedRotation(
            self, words, turns, ids, where.offset, where.ramp, device,
            self.attention_scaling(seq_len).hex(), awaits,
        )  # fmt: skip

    def _own_lengths(self, ids: torch.Tensor, operation: str) -> torch.Tensor | None:
        """The length of each row: its last position + 1."""
        if ids.shape[2] == 0:
            return None
        lengths = ids.amax((0, 2)) + 1
        if not _is_known(ids):
            return lengths.to(torch.float64)
        beyond = lengths > self.scaling.original_max_position  # type: ignore[union-attr]
        # Padding may be at 1 before a row starts at 0, as some code has it.
        again = (ids[..., 1:] < ids[..., :-1]) & (ids[..., :-1] > 1)
        if bool((again.any(2).any(0) & beyond).any()):
            raise ValueError(
                sentence(
                    operation,
                    f"positions must not start again within a row (packed sequences?) where "
                    f"{type(self.scaling).__name__} gives each length its own frequencies; say "
                    "seq_len for all of them, or rotate them apart",
                    positions=ids,
                )
            )
        return lengths.to(torch.float64)

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
        long_turns: torch.Tensor | None
        short, short_turns = self._table(device)
        made = self._inv_freq_beyond(lengths.clamp(min=limit))
        if made is not None:
            long, long_turns = words_from(made)
        else:
            beyond = self._ready()
            long = beyond.words.to(device)
            long_turns = None if beyond.turns is None else beyond.turns.to(device)
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

    def _dims(self) -> list[int]:
        """The rotary dimensions that the rule makes frequencies for."""
        if self.axes is None:
            return [self.rotary_dim]
        return sorted({dim for _, _, dim in self.axes.pairs})

    def _ready(self) -> _Beyond:
        """What is ready for unknown lengths; as of :meth:`_table`, a fake program has its own."""
        if _is_tracing() and not torch.compiler.is_dynamo_compiling():
            return self._make_beyond()
        return self._beyond  # type: ignore[attr-defined, no-any-return]

    def _make_beyond(self) -> _Beyond:
        with torch.inference_mode(False):
            regime = self._regime(self.scaling.original_max_position + 1)  # type: ignore[union-attr]
            rows = {
                dim: torch.tensor(
                    words_.inv_freq(self.scaling, dim, self.base),
                    dtype=torch.float64,
                    device="cpu",
                )
                for dim in self._dims()
            }
            table = self._make_table(torch.device("cpu"), regime)
            return _Beyond(rows, *table, self._made(regime).attention_scaling.hex())

    def _inv_freq_beyond(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """As :meth:`Rule.inv_freq_beyond`, but ``[axes, rows, 1, pairs]``."""
        rule = self.scaling

        def row(dim: int) -> torch.Tensor | None:
            within = self._ready().rows[dim].to(lengths.device)
            return rule.inv_freq_beyond(within, lengths)  # type: ignore[union-attr]

        if self.axes is None:
            made = row(self.rotary_dim)
            return None if made is None else made[None, :, None]
        rows = {dim: row(dim) for dim in self._dims()}
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
        words: phase words, int64 ``[axes, rows|1, heads|1, pairs]``.
        turns: None, or shaped as words: whole turns per position, where some |ω| >= π.
        ids, offset, ramp: as in :class:`tightrope.positions.Positions`.
        device: where the rotated tensors must live.
        amplitude_hex: :attr:`amplitude`, in digits: a float would be a symbol to the compiler.
        awaits: whether the words depend on how many tokens there will be; see :meth:`for_tokens`.
        calls: what the operator is called with, by layout and direction, once it was.
        by_tokens: what :meth:`for_tokens` returned.
    """

    spec: RopeSpec
    words: torch.Tensor
    turns: torch.Tensor | None
    ids: torch.Tensor | None
    offset: int
    ramp: bool
    device: torch.device
    amplitude_hex: str = "0x1p+0"
    awaits: bool = False
    calls: dict[Any, tuple[Any, ...]] = field(default_factory=dict, repr=False)
    by_tokens: dict[int, PreparedRotation] = field(default_factory=dict, repr=False)

    @property
    def amplitude(self) -> float:
        """The factor on the rotated channels."""
        return float.fromhex(self.amplitude_hex)

    def for_tokens(self, tokens: int) -> PreparedRotation:
        """The rotation of rows of that many tokens: itself, unless the words depend on their number.

        Args:
            tokens: how many tokens each row has.
        """
        if not self.awaits:
            return self
        tracing = _is_tracing()
        made = None if tracing else self.by_tokens.get(tokens)
        if made is None:
            seq_len: SeqLen
            if self.ids is not None:
                seq_len = (self.ids[:, :, 0] + (self.offset + tokens)).amax(0).to(torch.float64)
            elif torch.compiler.is_compiling():
                # As a number it would be a constant, and each length another graph.
                seq_len = torch.full((1,), self.offset + tokens, device=self.device)
            else:
                seq_len = max(0, self.offset + tokens)
            words, turns = self.spec.words_for(seq_len, self.device)
            amplitude = self.spec.attention_scaling(seq_len).hex()
            made = replace(
                self, words=words, turns=turns, amplitude_hex=amplitude, awaits=False, calls={}
            )
            if not tracing:
                self.by_tokens.clear()
                self.by_tokens[tokens] = made
        return made


class _Beyond(NamedTuple):
    """What a rule that depends on the length has ready for lengths that nobody may read.

    Attributes:
        rows: for each rotary dimension, its frequencies within the original length.
        words, turns: those just above the original length.
        amplitude: the attention scaling there, in digits.
    """

    rows: dict[int, torch.Tensor]
    words: torch.Tensor
    turns: torch.Tensor | None
    amplitude: str


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
