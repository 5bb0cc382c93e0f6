"""Translate the metadata of a GGUF file to the key names of transformers.

gguf.json has the names of the keys, and a row of facts for each architecture, which llama.cpp decides in its code
and no file gives: the pairing (``llama_model_rope_type``) and the rest (src/models), as of October 2026. The pairing
differs from that of transformers where the converter permutes weights. What is a rule is code here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from .._errors import as_real, bad_type, describe
from . import keys
from .families import LAST_OF_EACH, Family
from .scaling import given_by_factors
from .source import Found, Source, fail, whole

_KEY = re.compile(r"^([A-Za-z0-9_-]+)\.(rope|attention|embedding_length|context_length)(\.|$)")
_MOST_LAYERS = 65536
_FULL, _SLIDING = "full_attention", "sliding_attention"
_RATIOS, _COMPRESSED_BASE = "attention.compress_ratios", "attention.compress_rope_freq_base"
_WINDOW_BASE, _PATTERN = "rope.freq_base_swa", "attention.sliding_window_pattern"
_FACTORS = "rope_freqs.weight"
# Type of layers -> the keys of its rope section.
_Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Architecture(Family):
    """Facts of llama.cpp's code about one architecture.

    Those that :class:`tightrope.config.families.Family` has too mean the same here. With axes, the pairing is always by
    halves; axes may be ``"sections or none"``: by sections if the file has them, for two coordinates at least.

    Attributes:
        needs: the keys without one meaning if they are missing: of the part of each head that rotates, or of the width of
            heads other than hidden size / heads. Its files always have them.
        whole: whether all channels rotate, whatever the key for a part says.
        unscaled: whether the code does not read the scaling of its files.
        factors: ``"needed"``: the tensor ``rope_freqs.weight`` scales its layers with full attention.
            ``"unused"``: the code loads no factors, or does not use them.
        switched: whether ``rope.scaling.finetuned`` is its switch for RoPE.
        alpha: whether ``rope.scaling.alpha`` changes the base.
        beta_fast: YaRN's, if no key gives it.
        yarn_multiplier: by how much to multiply ``yarn_log_multiplier`` for YaRN's mscale_all_dim; with 10, the
            attention multiplies its softmax scale too. None where the code does not read the key.
        equal_mscales: whether YaRN's mscale is mscale_all_dim, as in DeepSeek V2; otherwise it is 1.
        compress_ratios: ``"zero"``: no layer has compressed entries. ``"unused"``: ``attention.compress_ratios`` is about blocks
            of keys, not the rotation.
        layers: how layers differ otherwise. ``"every fourth still"``: it does not rotate. ``"some still"``: the
            same for others, if some have a window. ``"compressed"``: those with compressed entries of the cache have
            their own base, and they alone are scaled.
        more_keys: more keys that its files may have -> their names in transformers.
        windows: the period of layers without a window, if a file has neither a list nor a period; or ``"listed"``.
        full_first: whether the first layer of a period has no window, and not the last.
        windows_if_layers: the number of layers of the models that have windows.
        windows_needed: whether without windows the number of layers decides which rotate.
        windows_optional: whether some models have no windows, so that all layers are alike.
        window_base: the base of layers with a window if no key gives it, a constant or ``"common"``, that of the others;
            such layers are not scaled. ``"always common"``: whatever the key says. ``"ignored"``: they are like the
            others, whatever it says. ``"own"``: no other layers rotate. None: they are like the others without the key.
        window_widths: whether the heads of layers with a window may have their own widths.
        window_scaled: whether layers with a window are scaled all the same.
        full_half: whether layers with full attention rotate half of what the key says.
        only_layers: the number of layers of the one model that is not refused.
    """

    needs: Sequence[str] = ()
    whole: bool = False
    unscaled: bool = False
    factors: str | None = None
    switched: bool = False
    alpha: bool = False
    beta_fast: float | None = None
    yarn_multiplier: int | None = None
    equal_mscales: bool = False
    compress_ratios: str | None = None
    layers: str | None = None
    more_keys: Mapping[str, str] = field(default_factory=dict)
    windows: int | str | None = None
    full_first: bool = False
    windows_if_layers: int | None = None
    windows_needed: bool = False
    windows_optional: bool = False
    window_base: float | str | None = None
    window_widths: bool = False
    window_scaled: bool = False
    full_half: bool = False
    only_layers: int | None = None


_TABLE = keys.table("gguf")
ARCHITECTURES = {name: Architecture(**facts) for name, facts in _TABLE["architectures"].items()}
_UNKNOWN = Architecture()


def is_gguf(values: Mapping[str, Any]) -> bool:
    """Return True if a mapping is the metadata of a GGUF file."""
    if "general.architecture" in values:
        return True
    return any(isinstance(key, str) and ".rope." in key for key in values)


def gguf(values: Mapping[str, Any]) -> Source:
    """Read GGUF metadata: keys of the architecture, and factor tensors, if any.

    The keys are ``<arch>.rope.*``, ``<arch>.attention.*`` and sizes (``<arch>.context_length``, …).
    """
    found = _Metadata(values)
    facts = found.facts
    exempt = facts.only_layers is not None and found.given("block_count") == facts.only_layers
    if facts.refused is not None and not exempt:
        return Source({}, facts, found.name, seen=tuple(values))
    found.take_all()
    found.take_scaling()
    found.take_factors()
    found.list_windows()
    family = found.family()
    found.split()
    unread = {key: value for key, value in values.items() if key not in found.read}
    return Source(found.outer, family, found.name, found.spelled, seen=tuple(values), unread=unread)


def _architecture(values: Mapping[str, Any]) -> str:
    given = values.get("general.architecture")
    if given is not None:
        return str(given)
    found = {match[1] for key in values if (match := _KEY.match(str(key)))}
    if len(found) != 1:
        fail(
            f"GGUF metadata must be of one architecture but got {', '.join(sorted(found)) or 'none'}"
        )
    return found.pop()


class _Metadata:
    """The metadata of one architecture while it is translated.

    Attributes:
        outer: name in transformers -> value.
        section: the same for the keys of the rope section.
        spelled: path -> key of the file.
        read: the keys that were read.
        constant: the source of what only llama.cpp's code states.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.arch = values, _architecture(values)
        self.name = f"GGUF architecture {self.arch!r}"
        self.outer: dict[str, Any] = {}
        self.section: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}
        self.read = {*_TABLE["tensors"], _FACTORS}
        # A drafter of DeepSeek V4 is one of its layers without compressed entries.
        drafter = self.arch == "dflash" and bool(self.given("hyper_connection.count"))
        row = "dflash of deepseek4" if drafter else self.arch
        self.facts = ARCHITECTURES.get(row, _UNKNOWN)
        self.constant = f"constant of llama.cpp for {self.arch}"

    def key(self, suffix: str) -> str:
        """A key of the file."""
        return f"{self.arch}.{suffix}"

    def given(self, suffix: str) -> Any:
        """The value of a key; None if it is missing."""
        return self.values.get(self.key(suffix))

    def take(self, suffix: str, into: dict[str, Any], path: str) -> Any:
        """Read a key under its name in transformers; an error if another key gave another value."""
        key, value, name = self.key(suffix), self.given(suffix), path.rpartition(".")[2]
        self.read.add(key)
        if value is not None:
            if name in into and into[name] != value:
                one, other = f"{self.spelled[path]} = {into[name]!r}", f"{key} = {value!r}"
                fail(f"{name} must have one value but got {one} and {other}")
            into[name], self.spelled[path] = value, key
        return value

    def put(self, name: str, value: object, source: str) -> None:
        """Set a key of the rope section."""
        self.section[name], self.spelled[f"rope_scaling.{name}"] = value, source

    def number(self, suffix: str) -> float | None:
        """Read a number; None if it is missing."""
        value = self.given(suffix)
        self.read.add(self.key(suffix))
        if value is not None and as_real(value) is None:
            fail(f"{self.key(suffix)} must be a number but got {value!r}")
        return as_real(value)

    def tensor(self, name: str) -> list[float] | None:
        """A tensor of factors; None if it is missing."""
        given = self.values.get(name)
        factors = [as_real(one) for one in given or ()] if isinstance(given, list | tuple) else []
        if given is not None and (not factors or not all(factors)):
            raise bad_type(
                f"{name} must be a list of numbers other than 0 but got {describe(given)}"
            )
        return [one for one in factors if one] or None

    def take_all(self) -> None:
        """Read the keys that all architectures share, and what some have besides."""
        facts, outer, section = self.facts, self.outer, self.section
        for suffix, name in {**_TABLE["keys"], **facts.more_keys}.items():
            # With latent attention, key_length is the width of the cache, which all heads share, and
            # key_length_mla that of a head.
            latent = self.key(f"{suffix}_mla") in self.values
            self.take(f"{suffix}_mla" if latent else suffix, outer, name)
        for suffix, name in _TABLE["scaling"].items():
            self.take(suffix, section, f"rope_scaling.{name}")
        if isinstance(outer.get("num_attention_heads"), list | tuple):
            # One number per layer, so head_dim cannot be derived and must be given.
            del outer["num_attention_heads"]
        if section.get("factor") == 0:
            del section["factor"]  # llama.cpp writes 0 for "no scaling"
        if facts.switched and section.get("finetuned") is False:
            fail(f"the config has no RoPE: {self.spelled['rope_scaling.finetuned']} is False")
        if facts.whole:
            outer.pop("rotary_dim", None)  # its files have 0
        self.take_sections()
        outer |= {key: self.values[key] for key in keys.LAYER_TYPES if key in self.values}
        ratios = self.given(_RATIOS)
        if facts.compress_ratios is not None or facts.layers == "compressed":
            self.read |= {self.key(_RATIOS), self.key(_COMPRESSED_BASE)}
        if facts.compress_ratios == "zero" and isinstance(ratios, list | tuple) and any(ratios):
            fail(f"{self.key(_RATIOS)} must hold 0 only but got {ratios}")
        for suffix in facts.needs:
            if _TABLE["keys"][suffix] not in outer:
                fail(f"{self.name} must come with {self.key(suffix)}, as all its files do")

    def take_sections(self) -> None:
        """Read the number of pairs of each coordinate."""
        sizes = self.take("rope.dimension_sections", self.outer, "mrope_section")
        if not isinstance(sizes, list | tuple):
            return
        if self.facts.axes == "sections or none" and 0 in sizes[:2]:
            # llama.cpp does not use sections without a second coordinate.
            del self.outer["mrope_section"]
        elif len(sizes) == 4 and sizes[3] == 0:
            # llama.cpp writes four entries; the last is 0 but in HunyuanVL.
            self.outer["mrope_section"] = sizes[:3]

    def take_scaling(self) -> None:
        """Translate scaling that GGUF stores differently: an implied type, YaRN's mscale, factor tensors."""
        facts, section = self.facts, self.section
        for tensor, name in _TABLE["tensors"].items():
            factors = self.tensor(tensor)
            if factors is not None:
                self.put(name, factors, tensor)
                if "rope_type" not in section:
                    self.put("rope_type", "longrope", tensor)
        alpha = self.number("rope.scaling.alpha") if facts.alpha else None
        if alpha:
            key, kind = self.key("rope.scaling.alpha"), section.get("rope_type", "none")
            if kind != "none":
                fail(f"{key} must not come with scaling by {kind!r}")
            self.put("alpha", alpha, key)
            self.put("rope_type", "dynamic", key)  # with alpha, a fixed change of the base
        if "rope_type" not in section and section.get("factor") is not None:
            self.put("rope_type", "linear", f"{self.key('rope.scaling.type')} (absent)")
        kind = section.get("rope_type", "none")
        if kind == "longrope" and "attn_factor" in section:
            key = self.key("rope.scaling.attn_factor")
            self.put("attention_factor", section.pop("attn_factor"), key)
        self.take_yarn(kind == "yarn")
        if facts.unscaled:
            section.clear()

    def take_yarn(self, on: bool) -> None:
        """Read YaRN's parameters that have no name of their own in transformers."""
        facts, section, factor = self.facts, self.section, self.section.get("factor")
        if on and facts.beta_fast is not None and "beta_fast" not in section:
            self.put("beta_fast", facts.beta_fast, self.constant)
        multiplier, ext, attn = (
            f"rope.scaling.yarn_{name}" for name in ("log_multiplier", "ext_factor", "attn_factor")
        )
        share = self.number(multiplier)
        if share is not None and on and facts.yarn_multiplier is not None:
            # DeepSeek's mscale equals mscale_all_dim, so they cancel on the rotated channels; elsewhere mscale is 1.
            all_dim = facts.yarn_multiplier * share
            self.put("mscale_all_dim", all_dim, self.key(multiplier))
            self.put("mscale", all_dim if facts.equal_mscales else 1.0, self.key(multiplier))
        weight = self.number(ext)  # negative: not set
        if weight is not None and not weight < 0 and weight != on:
            fail(
                f"{self.key(ext)}, YaRN's weight, must be {on:d}, as no rule has another one, but got "
                f"{weight!r}"
            )
        # llama.cpp puts YaRN's own factor in the place of this one, which in files is 1 or a copy of that.
        scaled, given = as_real(factor), self.number(attn)
        own = 1 + 0.1 * math.log(scaled) if on and scaled is not None and scaled > 1 else 1.0
        if given not in (None, 1) and not math.isclose(given, own, rel_tol=1e-5):
            fail(
                f"{self.key(attn)} must be 1 or {own:.7g}, which llama.cpp takes in its place, but got {given!r}"
            )

    def take_factors(self) -> None:
        """Read the tensor of factors, which is the whole scaling of its files."""
        facts, factors, rotary = self.facts, self.tensor(_FACTORS), self.outer.get("rotary_dim")
        unused = [name for name in (*_TABLE["tensors"], _FACTORS) if self.values.get(name)]
        if unused and facts.factors == "unused":
            fail(
                f"{self.arch} must not come with {unused[0]}, which llama.cpp does not use; to rotate as it does, pass "
                f"the metadata without it"
            )
        if factors is None:
            if facts.factors == "needed":
                fail(
                    f"{self.arch} must come with {_FACTORS}, which scales its layers with full attention; pass the path of "
                    f"the .gguf file, or add the tensor to the metadata"
                )
            return
        if self.section.get("rope_type", "none") != "none":
            fail(f"{_FACTORS} must not come with rope.scaling but the metadata has both")
        base = self.outer.get("rope_theta")
        if base is None:
            fail(
                f"{_FACTORS} must come with {self.key('rope.freq_base')} but the metadata has none"
            )
        if facts.full_half and isinstance(rotary, int):
            factors = factors[: rotary // 4]
        divided = given_by_factors(2 * len(factors), base, factors)
        self.section = {}
        self.put("rope_type", "given", _FACTORS)
        self.put("inv_freq", list(divided.inv_freq), _FACTORS)

    # --- layers that differ -----------------------------------------------------------------------

    def list_windows(self) -> None:
        """Add the type of each layer, by a list or a period in the file or in llama.cpp's code."""
        facts, outer = self.facts, self.outer
        key, count = self.key(_PATTERN), outer.get("num_hidden_layers")
        pattern = self.given(_PATTERN)
        if pattern is None and facts.windows != "listed":
            pattern = facts.windows
        windows = outer.get("sliding_window", facts.windows_if_layers in (None, count))
        stated = any(name in outer for name in keys.LAYER_TYPES)
        if facts.windows is None or not windows or stated or not isinstance(count, int):
            return
        period = type(pattern) is int and facts.windows != "listed"
        if not period and not isinstance(pattern, list | tuple):
            return
        self.read.add(key)
        whole([Found(count, self.spelled["num_hidden_layers"])], _MOST_LAYERS)
        main = self.without_predicting(count)
        if period:
            full = 0 if facts.full_first else max(pattern, 1) - 1
            pattern = [not pattern or layer % pattern != full for layer in range(main)]
            pattern += [False] * (count - main)
        if len(pattern) < main:
            fail(f"{key} must have an entry for each of {main} layers but has {len(pattern)}")
        outer["num_hidden_layers"] = min(count, len(pattern))
        outer["layer_types"] = [_SLIDING if one else _FULL for one in pattern[:count]]
        self.spelled["layer_types"] = key

    def without_predicting(self, count: int) -> int:
        """The number of layers but the last ones, which only predict."""
        more = self.given("nextn_predict_layers")
        return max(count - more, 0) if isinstance(more, int) and more > 0 else count

    def family(self) -> Family | None:
        """The facts in the form of the reader; None for an architecture that is not known."""
        facts, outer = self.facts, self.outer
        if facts is _UNKNOWN or (facts.windows_needed and outer.get("sliding_window") == 0):
            return None
        axes = facts.axes
        if axes == "sections or none":
            axes = "sections" if "mrope_section" in outer else None
        if facts.layers == "every fourth still":
            outer["no_rope_layer_interval"] = 4
            self.spelled["no_rope_layer_interval"] = self.constant
        still = facts.layers == "some still" and bool(outer.get("sliding_window"))
        flagged = still or not outer.keys().isdisjoint(("no_rope_layers", "no_rope_layer_interval"))
        return replace(
            facts,
            **(_TABLE["compressed"] if facts.layers == "compressed" else {}),
            interleaved=facts.interleaved and axes is None,
            source="llama.cpp: llama_model_rope_type",
            refused=None,
            axes=axes,
            rotates=tuple(self.rotating()),
            flags="no_rope_layers" if flagged else None,
            lists=LAST_OF_EACH,
            scales_softmax=facts.yarn_multiplier == 10,
        )

    def split(self) -> None:
        """Give each type of layers its own rope section, if layers differ; otherwise one to all."""
        outer, spelled, sections = self.outer, self.spelled, self.sections()
        if sections is None and self.section:
            outer["rope_scaling"] = self.section
        if sections is None:
            return
        outer["rope_parameters"] = sections
        for kind, section in sections.items():
            for key in section:
                common = spelled.get(f"rope_scaling.{key}", spelled.get(key, key))
                spelled.setdefault(f"rope_parameters.{kind}.{key}", common)
        outer.pop("rope_theta", None)

    def sections(self) -> _Sections | None:
        """The rope section of each type of layers; None if they do not differ, or only by a list of flags."""
        facts, outer = self.facts, self.outer
        if facts.window_base is not None or not (facts.layers or facts.rotates):
            self.read.add(self.key(_WINDOW_BASE))
        plain = {"rope_theta": outer.get("rope_theta")}
        if facts.layers == "compressed":
            return self.compressed(plain)
        base = self.window_base() if facts.layers is None and not facts.rotates else None
        if base is None:
            return None
        full = {**self.section, **plain}
        sliding = {**(self.section if facts.window_scaled else {}), "rope_theta": base}
        path = f"rope_parameters.{_SLIDING}"
        if facts.window_widths:
            latent = self.key("attention.key_length_mla_swa") in self.values
            width = f"attention.key_length_{'mla_' if latent else ''}swa"
            self.read.add(self.key("attention.key_length_swa"))
            self.take(width, sliding, f"{path}.{keys.OWN_HEAD_DIM}")
            self.take("rope.dimension_count_swa", sliding, f"{path}.{keys.OWN_ROTARY_DIM}")
        if facts.full_half and isinstance(outer.get("rotary_dim"), int):
            full[keys.OWN_ROTARY_DIM] = outer["rotary_dim"] // 2
            half = f"half of {self.spelled['rotary_dim']}"
            self.spelled[f"rope_parameters.{_FULL}.{keys.OWN_ROTARY_DIM}"] = half
        return {_FULL: full, _SLIDING: sliding}

    def window_base(self) -> Any:
        """The base of layers with a window; None if all layers share one base and scaling."""
        facts, key = self.facts, self.key(_WINDOW_BASE)
        base, common = self.values.get(key), self.outer.get("rope_theta")
        window, constant = self.outer.get("sliding_window"), facts.window_base
        if constant == "ignored" or (facts.windows_optional and not window):
            return None
        if constant == "always common" or (base is None and constant == "common"):
            base, key = common, self.spelled.get("rope_theta", "")
        elif base is None and constant is not None and common is not None and window != 0:
            base, key = constant, self.constant
        self.spelled[f"rope_parameters.{_SLIDING}.rope_theta"] = key
        return base

    def rotating(self) -> Sequence[str]:
        """The types of layers that rotate, for an architecture where some do not; () if all do."""
        facts, outer = self.facts, self.outer
        if facts.windows_if_layers is not None and outer.get("sliding_window") is None:
            if outer.get("num_hidden_layers") in (None, facts.windows_if_layers):
                self.need("attention.sliding_window")
            return ()
        if facts.window_base == "own" and self.given(_WINDOW_BASE) is not None:
            self.spelled["rope_theta"] = self.key(_WINDOW_BASE)
            outer["rope_theta"] = self.given(_WINDOW_BASE)
        if "dense" in facts.rotates:
            # The first layers have no experts; the last, which only predict, rotate like them.
            dense, count = self.given("leading_dense_block_count"), self.given("block_count")
            types = outer.get("layer_types")
            if not isinstance(dense, int):
                self.need("leading_dense_block_count")
            if not isinstance(count, int) or not isinstance(types, list | tuple):
                self.need(_PATTERN)
            experts = range(dense, self.without_predicting(count))
            outer["mlp_layer_types"] = [
                "sparse" if layer in experts else "dense" for layer in range(len(types))
            ]
        return facts.rotates

    def compressed(self, plain: dict[str, Any]) -> _Sections:
        """The sections of DeepSeek V4: layers with compressed entries have their own base, and scaling."""
        base = self.given(_COMPRESSED_BASE)
        if base is None:
            self.need(_COMPRESSED_BASE)
        self.take(_RATIOS, self.outer, "compress_ratios")
        if self.section.get("rope_type") == "yarn" and "attention_factor" not in self.section:
            self.put("attention_factor", 1.0, self.constant)
        self.spelled["rope_parameters.compress.rope_theta"] = self.key(_COMPRESSED_BASE)
        return {"main": plain, "compress": {**self.section, "rope_theta": base}}

    def need(self, suffix: str) -> NoReturn:
        """Raise the error for a missing key that tells layers apart."""
        fail(f"{self.name} has layers that differ, so it must come with {self.key(suffix)}")
