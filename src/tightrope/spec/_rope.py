"""RopeSpec: the public description of a rotary embedding, its checks and its dictionaries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import torch

from .. import phase_words, positions as positions_
from .._errors import bad_type, bad_value, describe, integer, public, real
from .._rounding import RoundingLike, rounding_pair
from .._value import Value, checked_calls, dictionary, field_names, from_fields
from ..axes import Axes
from ..channels import Channels
from ..frequencies import Frequencies, Given, Rule, length as checked_length
from ..phase_words import PhaseWords
from ..phases import Phases
from ..positions import PositionsLike
from ..stacks import Stack, named
from ._lengths import SeqLen
from ._prepared import PhasesLike, PreparedRotation, prepared
from ._words import Words

# Version of the format of to_dict; from_dict will also read older ones.
VERSION = 1


@checked_calls
@dataclass(frozen=True)
class RopeSpec(Value):
    """A rotary position embedding: channels, their pairing (half by default), frequencies and axes.

    Two specs are equal when all their fields are, after the constructor has normalised them
    (``rotary_dim=None`` is resolved, numbers are floats or ints). Equal specs give bitwise equal
    results. Unequal specs may do so too: ``scaling=Linear(1.0)`` rotates like None, and
    :class:`tightrope.frequencies.Given` ignores ``base``.

    A spec holds no tensor that a module could cast, move or save. It hashes in constant time and can
    be shared by any number of layers, threads and processes. ``dataclasses.replace`` copies the
    resolved ``rotary_dim``, so if you replace ``head_dim`` or ``start``, also pass
    ``rotary_dim=None`` to compute it anew.

    Args:
        head_dim: number of channels of one head. All other arguments are given by name.
        base: base of the geometric row of frequencies, a positive number.
        rotary_dim: number of channels that rotate, even; by default all from ``start`` on.
        start: first channel that rotates.
        interleaved: pair channels (0, 1), (2, 3), … if true, as GPT-J and the original paper do; pair
            channel i with i + rotary_dim / 2 if false, as GPT-NeoX and Llama in transformers do.
        scaling: a rule of :mod:`tightrope.frequencies`; None for the unscaled geometric row.
        axes: the coordinate that rotates each pair, for positions that have several.

    Raises:
        ValueError: values out of range, or that do not fit each other.
        TypeError: values of the wrong type.

    Source: Su et al., RoFormer (arXiv 2104.09864); partial rotation: Black et al., GPT-NeoX-20B
    (arXiv 2204.06745), section 2.1; rules and axes name their own sources.

    >>> spec = RopeSpec(head_dim=64, base=500_000.0)
    >>> spec.frequencies().inv_freq.shape
    torch.Size([32])
    >>> spec
    RopeSpec(head_dim=64, base=500000.0)
    """

    head_dim: int
    _: KW_ONLY
    base: float = 10000.0
    rotary_dim: int = None  # type: ignore[assignment]  # resolved to head_dim - start
    start: int = 0
    interleaved: bool = False
    scaling: Rule | None = None
    axes: Axes | None = None

    @public("RopeSpec")
    def __post_init__(self) -> None:
        channels = Channels.checked(self.head_dim, self.rotary_dim, self.start, self.interleaved)
        base = _base(self.base)
        if self.scaling is not None and not isinstance(self.scaling, Rule):
            read = "; RopeSpec.from_config reads configurations" * isinstance(self.scaling, Mapping)
            raise bad_type(
                "scaling must be a rule of tightrope.frequencies, such as YaRN(4.0, 8192), but got "
                f"{describe(self.scaling)}{read}"
            )
        _check_axes(self.axes, self.scaling, channels.rotary_dim)
        self._set(head_dim=channels.head_dim, start=channels.start, rotary_dim=channels.rotary_dim)
        words = Words(self.scaling, channels.rotary_dim, base, self.axes)
        self._set(base=base, _channels=channels, _ready={}, _words=words)

    def _defaults(self) -> dict[str, Any]:
        return super()._defaults() | {"rotary_dim": self.head_dim - self.start}

    def to_dict(self) -> dict[str, Any]:
        """Return the spec in JSON types, with exact floats and the version of the format.

        >>> RopeSpec(4).to_dict()["version"]
        1
        >>> RopeSpec.from_dict(RopeSpec(4).to_dict())
        RopeSpec(head_dim=4)
        """
        made: dict[str, Any] = {"version": VERSION}
        made |= zip(field_names(RopeSpec), self._values(), strict=True)
        if self.scaling is not None:
            made["scaling"] = self.scaling.to_dict()
        if self.axes is not None:
            pairs = [list(pair) for pair in self.axes.pairs]
            made["axes"] = {"count": self.axes.count, "pairs": pairs}
        return made

    @classmethod
    @public("from_dict")
    def from_dict(cls, saved: Mapping[str, Any]) -> RopeSpec:
        """Make a spec from the result of :meth:`to_dict`. For model configurations use :meth:`from_config`.

        Raises:
            ValueError: an unsupported version, no ``head_dim``, unknown keys, a rule whose module is not imported, or
                values out of range. A missing key has the constructor's default.
            TypeError: values of the wrong type.
        """
        values = dictionary("a spec", saved)
        version = values.pop("version", None)
        if type(version) is not int or version != VERSION:
            hint = "; pass the result of to_dict" if version is None else ""
            raise bad_value(f"version must be {VERSION} but got {version!r}{hint}")
        if values.get("scaling") is not None:
            values["scaling"] = Rule.from_dict(dictionary("scaling", values["scaling"]))
        if values.get("axes") is not None:
            values["axes"] = from_fields("axes", Axes, dictionary("axes", values["axes"]))
        return from_fields("a spec", cls, values)

    @classmethod
    @public("from_config")
    def from_config(  # noqa: PLR0913  (one argument for each option)
        cls,
        config: object,
        *,
        layer_type: str | None = None,
        section: str | None = None,
        strict: bool = True,
        base: float | None = None,
        interleaved: bool | None = None,
        rotary_dim: int | None = None,
        start: int | None = None,
        rope_layers: str | Collection[str] | None = None,
        inv_freq: torch.Tensor | None = None,
    ) -> Any:
        """Read the spec from a model configuration, as the model's code reads it.

        Reads transformers (v4 and v5, files and objects), Meta's ``params.json``, GGUF metadata,
        transformers of diffusers, models of timm, and the key names of vLLM and Megatron.
        :func:`tightrope.config.provenance` shows which key gave which field.

        A key that a file leaves out has the value that its class of transformers fills in; provenance names that class.
        Widths of the outer level are not filled in, as a misspelt key would become another model. Null is not absent.
        The pairing, the channels that rotate and the layers without RoPE are often only in a model's code: for a family
        that is not in the table of families, one error asks for all that is missing, with the argument that answers.

        Args:
            config: a mapping, a config object, a model with a ``config``, or the path of a JSON file, of
                a GGUF file, or of a folder with a ``config.json`` or ``params.json``. If
                `tightrope convert` wrote that folder, or the folder from which transformers loaded a
                config object, the pairing of a section that was converted is that of the conversion record.
            layer_type: the type of layer to read, if layers differ; by default all types. A type without
                attention is an error.
            section: the part of a nested configuration to read, such as ``"vision_config"``; by default the
                only one with RoPE, or the text; ``""`` is the outer level.
            strict: if true, an unknown key whose name has a word of the rotation is an error; if false, a
                warning, unless the key may say which layers rotate, or give a base, a width or the pairing.
            base: the base of the frequencies, if neither the config nor its family determines it; must agree with both.
            interleaved: the pairing, if neither the config nor its family determines it; overrides
                both, and a conversion record.
            rotary_dim, start: the number of channels that rotate, and the first of them, 0 by default, if
                neither the config nor its family determines them; must agree with both.
            rope_layers: ``"all"`` if all layers with attention rotate, or the types of those that do, if
                neither the config nor its family determines it; must agree with both.
            inv_freq: the frequencies of the pairs in radians per position, a floating tensor, of a family whose
                weights hold them or a factor on them (Mistral Large 4), or that is not in the table of families.
                Of a model given as ``config`` they are read from its tensors.

        Returns:
            The spec. If layers differ, a :class:`tightrope.config.LayerSpecs`: a mapping from layer type
            to spec, or to None for layers whose attention does not rotate. With ``layer_type``, the spec
            of that type, or None if its attention does not rotate.

        Raises:
            OSError: the file is missing or cannot be read.
            ValueError: a field of the spec cannot be determined, keys conflict or are unknown, the
                family has no RoPE or none that a spec can express, or the file is invalid.
            TypeError: not a configuration, a module without one, or values of the wrong type.

        >>> llama = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
        >>> RopeSpec.from_config(llama | {"rope_theta": 500000.0})
        RopeSpec(head_dim=128, base=500000.0)
        """
        from .. import config as reader  # config imports spec, and few programs need it

        return reader.from_config(
            config,
            layer_type=layer_type,
            section=section,
            strict=strict,
            base=base,
            interleaved=interleaved,
            rotary_dim=rotary_dim,
            start=start,
            rope_layers=rope_layers,
            inv_freq=inv_freq,
        )

    @property
    def channels(self) -> Channels:
        """The slice of a head that rotates, and its pairing."""
        return self._channels  # type: ignore[attr-defined, no-any-return]

    @property
    def axis_count(self) -> int:
        """Number of coordinates of a position."""
        return self.words.axis_count

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the length of the sequence."""
        return self.words.by_length

    @property
    def words(self) -> Words:
        """The phase words. Internal to the library."""
        return self._words  # type: ignore[attr-defined, no-any-return]

    @property
    def softmax_scaling(self) -> float:
        """The factor on the model's softmax scale, 1.0 for most models; this library does not apply it.

        See :attr:`tightrope.frequencies.YaRN.softmax_scaling`.
        """
        return 1.0 if self.scaling is None else self.scaling.softmax_scaling

    @public("frequencies")
    def frequencies(self, seq_len: int | None = None) -> Frequencies:
        """Return the frequencies of the pairs and the factor on the rotated channels.

        Args:
            seq_len: length of the sequence, for rules that depend on it; None for any length up
                to ``original_max_position``.

        Returns:
            One frequency per pair, in radians per position, whichever axis the pair belongs to; for
            a :class:`tightrope.frequencies.Given` with frequencies per head, or per axis and head,
            one for each pair of each head, or of each axis and head.

        >>> RopeSpec(8, axes=Axes.blocks((2, 2))).frequencies().inv_freq.tolist()
        [1.0, 0.01, 1.0, 0.01]
        """
        length = None if seq_len is None else checked_length(seq_len)
        regime = None if self.scaling is None else self.scaling.regime(length)
        return phase_words.assigned(self.scaling, self.axes, self.rotary_dim, self.base, regime)

    @public("cos_sin")
    def cos_sin(
        self,
        positions: PositionsLike = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        tables: str = "cat",
        seq_len: SeqLen = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tables of cosines and sines, for code that wants tables.

        By default in the layout that rotary modules of transformers return. The functions of this library
        that take a spec need no tables.

        Args:
            positions: ids ``(tokens,)`` or ``(rows, tokens)`` of int32, int64, float32 or float64, or
                :class:`tightrope.positions.Positions` with an id for every token; None for positions 0
                to seq_len - 1.
            dtype: float32, float64, bfloat16 or float16. Results are rounded once; errors are below
                1.2e-7 in float32.
            device: device of the tables; by default that of the ids, else torch's default device.
            tables: the format of the last dimension: "cat", one entry per pair, and then all again;
                "repeat", each entry twice in a row; "half", one entry per pair; "full", one entry per
                channel, "repeat" for an interleaved spec and "cat" for any other.
            seq_len: without positions, their number. With them the length of each sequence, for rules
                that depend on it, see :meth:`at`.

        Returns:
            Cosines and sines, ``(rows, tokens, rotary_dim)``, with half as many entries in the last
            dimension for "half"; with one row for ids ``(tokens,)``. For frequencies per head,
            ``(rows, heads, tokens, rotary_dim)``. The attention scaling of the spec is included. Positions
            on several axes give one angle per pair, as in :func:`tightrope.functional.rotate`. NaN for
            positions that are not finite. Differentiable with respect to floating positions.

        Raises:
            ValueError: an unknown format; positions without an id for every token; positions or lengths
                that do not fit the spec.
            TypeError: a dtype, positions or lengths of the wrong type.
            NotImplementedError: see :meth:`at`.

        Source: Su et al., RoFormer (arXiv 2104.09864), section 3.4.2.

        >>> cos, sin = RopeSpec(64).cos_sin(torch.arange(5, 9))
        >>> cos.shape
        torch.Size([1, 4, 64])
        """
        from ..functional._cos_sin import cos_sin  # functional imports spec

        return cos_sin(self, positions, dtype, device, tables, seq_len)

    @public("attention_scaling")
    def attention_scaling(self, seq_len: SeqLen = None) -> float:
        """Return the factor on the rotated channels, for one length or for rows of different lengths.

        Args:
            seq_len: see :meth:`at`.

        Raises:
            NotImplementedError: the factors of the rows differ, or may differ because the lengths
                cannot be read. Of the rules here, only a :class:`tightrope.frequencies.LongRoPE` with
                unequal mscales raises this.
        """
        lengths = self.words.read(seq_len, torch.device("cpu"))
        return float.fromhex(self.words.amplitude(lengths))

    def words_for(self, seq_len: SeqLen = None, device: torch.device | str = "cpu") -> PhaseWords:
        """Return the phase words for sequences of given lengths, as a prepared rotation holds them.

        Internal to the library. Each row gets the phase words that it would get alone: they depend
        only on this spec and the row's own length.

        Args:
            seq_len: None or an int for all rows; one int per row; or a tensor ``(rows,)`` or ``()``
                of int32, int64 or float64, with fractions rounded up. A tensor that is not on the
                CPU, or is being traced, is not read, so nothing synchronises. While compiling, an int
                is not read either, so that one graph serves all lengths, unless the attention
                scaling depends on it. If the rule ignores the length, ``seq_len`` is only checked.
            device: device of the result.

        Returns:
            Phase words and turns, int64 ``[axes, rows|1, heads|1, pairs]``, with zeros for the axes
            that a pair does not belong to, and one row if all rows are equal. Turns are None if all
            are zero. Phase words are the nearest integers, except for
            :class:`tightrope.frequencies.DynamicNTK` beyond its original length: those are computed in
            float64, off by at most 5e-14 · ω radians per position for scales up to 1e7.
        """
        device = torch.device(device)
        return self.words.of(self.words.read(seq_len, device), device)

    @public("RopeSpec.of")
    def of(self, layer: int) -> RopeSpec:
        """Return this spec, which every layer has.

        So code that needs the spec of each layer asks the result of :meth:`from_config`, whether that is one spec or
        :class:`tightrope.config.LayerSpecs`.

        Args:
            layer: the number of a layer, from 0 on. The spec does not know how many there are.

        Raises:
            ValueError: a negative number.
            TypeError: the number is not an int.

        >>> RopeSpec(64).of(2)
        RopeSpec(head_dim=64)
        """
        if integer("layer", layer) < 0:
            raise bad_value(f"layer must not be negative but got {layer}")
        return self

    @public("at")
    def at(
        self,
        positions: PositionsLike = None,
        *,
        device: torch.device | str | None = None,
        seq_len: SeqLen = None,
        stack: str | Stack | None = None,
        rounding: RoundingLike | None = None,
        inv_freq: torch.Tensor | None = None,
        phases: PhasesLike = None,
    ) -> PreparedRotation:
        """State the whole rotation and validate it once, for all layers of a forward pass.

        What differs between layers is replaced by :meth:`PreparedRotation.having`.

        Args:
            positions: None for 0..n-1, an int offset, ids ``(tokens,)`` or ``(rows, tokens)``, or a
                :class:`tightrope.positions.Positions`. Ids on ``device`` are not copied: every call reads
                their values, so ids that changed give the results of new ones.
                Whether the numbers are the right ones cannot be checked: an attention mask of integers is
                taken as positions 0 and 1. Pass :func:`tightrope.positions.left_padded` of it.
            device: device of the rotated tensors; by default that of the ids, of ``inv_freq`` or of the phases,
                else the CPU.
            seq_len: the length of each sequence, for rules that depend on it (DynamicNTK, LongRoPE):
                an int, one int per row, or a tensor; one on the CPU is read once, here. The default is
                each row's largest position on any axis, plus 1. Several tokens at an offset above 0 need
                ``seq_len``, as they may be a part of a longer sequence; so do ids of a row that begin
                after 0 and end beyond the original length, where they are read. A rank that holds a part of a sequence
                must give the length of the whole, and so must a call with ids of tokens in a layout without
                rows ("thd", "sd"), beyond the original length or where ids are not read: they may be of several
                sequences. Re-rotate keys that were cached under another length
                with :func:`tightrope.functional.rerotate` before queries of this length attend to them;
                see docs/rerotate.md. ``seq_len`` must be at least the row's length. This is not checked
                if positions or lengths are on a GPU or traced, as that would synchronise, or if
                positions are a tensor subclass that wraps other tensors: such rows get the frequencies
                of the given length. To use the frequencies of a shorter sequence on purpose, make them
                a rule: ``Given.of(spec.frequencies(seq_len).inv_freq)``.
            stack: the library whose bits the rotation must equal, by its name in
                :func:`tightrope.stacks.names` or as a :class:`tightrope.stacks.Stack`. Frequencies
                and tables are computed in that library's arithmetic, and results are rounded where
                the library rounds. ``seq_len`` is then one int, by default the largest position of
                all rows, plus 1; needed where the library goes by a server's length
                (:attr:`tightrope.stacks.Stack.length`). Such a rotation takes no act, gate, ``inv_freq`` or
                ``phases``, and its positions must not require a gradient. None for exact angles.
            rounding: where 16-bit and float32 results round, to equal another implementation bit for bit; only
                "once" with an act or a gate. "once", the most exact: fused multiply-adds in float32, rounded when
                stored. "wide": products and their sum, each rounded to float32. "each": cosines, sines,
                products and sums, each rounded to the dtype of x. A tuple is (forward, backward). None: where
                the stack rounds, without one "once". See docs/numerics.md.
            inv_freq: frequencies that replace the spec's, in radians per position: floating ``(pairs,)`` or
                ``(heads, pairs)``, or for a spec of several axes ``(axes, heads or 1, pairs)``; fixed or learned.
                Each call converts them to phase words on the device; see docs/numerics.md. Outside of compiled
                code, 16-bit frequencies raise a warning, once per line.
            phases: angles for each token, head and pair, added to those of the positions, made by
                :func:`tightrope.phases.given` or :func:`tightrope.phases.running`; or a pair, one for q and one
                for k, which takes two launches. To rotate by these angles alone, give the spec frequencies of
                zero: ``RopeSpec(64, scaling=tightrope.frequencies.Proportional(0.0))``.

        Raises:
            ValueError: positions that do not fit the spec; positions beyond ``seq_len``; a negative
                length. For a rule that depends on the length, without ``seq_len``: a part of a sequence, see
                above; positions that start again within a row longer than the original length, as no single length is right for
                that row, and all packed sequences whose ids cannot be read (on a GPU, while
                compiling).
            TypeError: positions or lengths of the wrong type, lengths also if the rule ignores them.
            NotImplementedError: the attention scaling of the rows differs, or may differ because the
                lengths cannot be read. Of the rules here, only a
                :class:`tightrope.frequencies.LongRoPE` with unequal mscales raises this. With
                ``stack``, also a frequency rule or a parameter that the stack does not have.

        Returns:
            A prepared rotation. All functions that take a spec and positions take it in their place.
            It is differentiable with respect to floating positions, ``inv_freq`` and the angles of phases.

        >>> rope = RopeSpec(64).at(5)
        """
        where = positions_.as_positions(positions, sharded=True)
        if device is None:
            target = _CPU
            of_phases = phases if isinstance(phases, (tuple, list)) else [phases]
            for one in (*reversed(of_phases), inv_freq, where.ids):
                if isinstance(one, (torch.Tensor, Phases)):
                    target = one.device
        else:
            target = torch.device(device)
            if target.type == "cpu":
                target = _CPU
            elif target.index is None:
                # Resolve the index of the current device by creating a tensor there.
                target = torch.empty(0, device=target).device
        chosen = None
        if stack is not None:
            seq_len = None if seq_len is None else checked_length(seq_len)
            chosen = named(stack)
            chosen.check(self, seq_len)
        own = None if rounding is None else rounding_pair(rounding)
        rotation = prepared(self, where, target, seq_len, chosen, own, inv_freq, phases)
        if rotation.ids is not None and not rotation.where.add_index:
            # The number of tokens is known, so errors about lengths are raised now.
            tokens = rotation.ids.shape[2]
            rotation.check_passed(tokens)
            rotation.for_tokens(tokens)
        return rotation


_CPU = torch.device("cpu")

#: The rotation of a call: a spec, or a spec at positions.
Rope: TypeAlias = RopeSpec | PreparedRotation


def _base(value: object) -> float:
    base = real("base", value)
    # A float64 holds bases up to 1e308. Bases below 1e-18 can give frequencies above 1e18 radians per
    # position, the limit of frequency rules.
    if not 1e-18 < base < 1e300:
        raise bad_value(
            f"base must be positive and finite, above 1e-18 and below 1e300, but got {value}"
        )
    # Under dynamic=True the compiler turns the default into a symbol; frequencies need a number.
    return 10000.0 if base == 10000.0 else base


def _check_axes(axes: object, scaling: Rule | None, rotary_dim: int) -> None:
    if axes is None:
        return
    if not isinstance(axes, Axes):
        raise bad_type(
            f"axes must be an Axes, such as Axes.blocks((16, 16)), but got {describe(axes)}"
        )
    if axes.rotary_dim != rotary_dim:
        pairs, half = len(axes.pairs), len(axes.pairs) == rotary_dim
        raise bad_value(
            f"axes must have one entry for each of the {rotary_dim // 2} pairs that rotate but got {pairs}; "
            + ("count pairs, not channels" if half else f"rotary_dim={axes.rotary_dim} would fit")
        )
    if isinstance(scaling, Given) and len(scaling.shape) == 3:
        raise bad_value(
            f"axes must be None if the given frequencies have axes of their own but got {axes!r}"
        )
