"""Translate configurations of diffusers' transformers to the key names of transformers.

The class that a configuration names, ``_class_name``, determines the pairing, how pairs are divided
among coordinates, and any constant of its code. A table, class -> :class:`Transformer`; each entry
names the code that it was read from. `tests/unit/config/test_diffusers.py` runs that code and compares
its rotation with the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._errors import bad_type
from .families import Family
from .source import Source, fail, whole

CLASS = "_class_name"
_WIDEST = 65536  # channels of a head


@dataclass(frozen=True)
class Transformer:
    """Facts about one class of diffusers 0.42.

    Attributes:
        interleaved: the pairing, as in :class:`tightrope.RopeSpec`.
        source: the code that makes the angles: ``file: class or function``.
        head: the key of head_dim, or those of the width and of the heads that share it.
        base: the key of the base, or a constant of the code.
        widths: the key of the number of channels of each coordinate.
        default: these numbers if the key is missing or null; a constant of the code.
        split: the rule by which the code divides a head among coordinates, if no key does.
        rotary: the key of rotary_dim; or a fraction of the head; or ``"widths"``, their sum.
        keys: other keys with the meaning that they have in transformers.
        inert: keys that could be about the rotation but do not affect it: a table's length, the choice of
            coordinates, the time step of the diffusion, what the class does not use.
        switch: a key that must be True, as the model has no RoPE otherwise.
        refused: why no spec can express this class; None for all others.
    """

    interleaved: bool
    source: str
    head: tuple[str, ...] = ("attention_head_dim",)
    base: str | float = 10000.0
    widths: str | None = None
    default: tuple[int, ...] | None = None
    split: str | None = None
    rotary: str | float | None = None
    keys: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    switch: str | None = None
    refused: str | None = None


def _pairs(source: str, **facts: Any) -> Transformer:
    return Transformer(True, source, **facts)


def _half(source: str, **facts: Any) -> Transformer:
    return Transformer(False, source, **facts)


def _none(why: str) -> Transformer:
    return Transformer(False, "", refused=why)


_HIDDEN = ("hidden_size", "num_attention_heads")
_DIMS: dict[str, Any] = {"widths": "axes_dims_rope"}
_AXES: dict[str, Any] = {"widths": "rope_axes_dim", "base": "rope_theta"}
_JOY: dict[str, Any] = {
    "head": _HIDDEN,
    "widths": "rope_dim_list",
    "base": "theta",
    "inert": ("rope_type",),
}
_BRIA: dict[str, Any] = {**_DIMS, "base": "rope_theta", "inert": ("time_theta",)}
_WAN: dict[str, Any] = {"split": "thirds", "inert": ("rope_max_seq_len",)}
_LUMINA: dict[str, Any] = {"head": ("dim", "n_heads"), "widths": "axes_dims", "base": "rope_theta"}
_COGVIDEO: dict[str, Any] = {
    "split": "quarter for time",
    "switch": "use_rotary_positional_embeddings",
    "inert": ("freq_shift",),
}
_BY_HEAD = "its heads differ in their frequencies"
_BY_BLOCK = "it pairs channels by halves within each of three blocks of a head"
_TWO = "its text and its images differ in their rotations"
_AVERAGED = "it averages the cosines and sines of earlier frames"
_SINES = "it adds sinusoidal positions"

TRANSFORMERS: dict[str, Transformer] = {
    # --- a key gives the channels of each coordinate ---
    "BriaFibo2Transformer2DModel": _pairs("transformer_bria_fibo2: RopeEmbedder", **_LUMINA),
    "BriaFiboTransformer2DModel": _pairs("transformer_bria_fibo: BriaFiboEmbedND", **_BRIA),
    "BriaTransformer2DModel": _pairs("transformer_bria: BriaEmbedND", **_BRIA),
    "ChromaTransformer2DModel": _pairs("transformer_chroma: FluxPosEmbed", **_DIMS),
    "Flux2Transformer2DModel": _pairs(
        "transformer_flux2: Flux2PosEmbed", **_DIMS, base="rope_theta"
    ),
    "Flux3Transformer2DModel": _pairs(
        "transformer_flux3: Flux3PosEmbed", **_DIMS, base="rope_theta"
    ),
    # Files older than the key lack it.
    "FluxTransformer2DModel": _pairs(
        "transformer_flux: FluxPosEmbed", **_DIMS, default=(16, 56, 56)
    ),
    # Rotates all channels or the first half.
    "HiDreamImageTransformer2DModel": _pairs(
        "transformer_hidream_image: HiDreamImageEmbedND", **_DIMS, rotary="widths"
    ),
    "HunyuanImageTransformer2DModel": _pairs(
        "transformer_hunyuanimage: HunyuanImageRotaryPosEmbed", **_AXES
    ),
    "HunyuanVideo15Transformer3DModel": _pairs(
        "transformer_hunyuan_video15: HunyuanVideo15RotaryPosEmbed", **_AXES
    ),
    "HunyuanVideoTransformer3DModel": _pairs(
        "transformer_hunyuan_video: HunyuanVideoRotaryPosEmbed", **_AXES
    ),
    "JoyImageEditTransformer3DModel": _pairs(
        "transformer_joyimage: JoyImageEditTransformer3DModel.get_rotary_pos_embed", **_JOY
    ),
    "Krea2Transformer2DModel": _pairs(
        "transformer_krea2: Krea2RotaryPosEmbed", **_DIMS, base="rope_theta"
    ),
    "LongCatImageTransformer2DModel": _pairs(
        "transformer_longcat_image: LongCatImagePosEmbed", **_DIMS
    ),
    "Lumina2Transformer2DModel": _pairs(
        "transformer_lumina2: Lumina2RotaryPosEmbed",
        head=_HIDDEN,
        widths="axes_dim_rope",
        inert=("scaling_factor",),
    ),
    "MotifVideoTransformer3DModel": _pairs(
        "transformer_motif_video: MotifVideoRotaryPosEmbed", **_AXES
    ),
    "NucleusMoEImageTransformer2DModel": _pairs(
        "transformer_nucleusmoe_image: NucleusMoEEmbedRope", **_DIMS
    ),
    "OvisImageTransformer2DModel": _pairs("transformer_ovis_image: OvisImagePosEmbed", **_DIMS),
    "PRXTransformer2DModel": _pairs(
        "transformer_prx: PRXEmbedND",
        head=("hidden_size", "num_heads"),
        widths="axes_dim",
        default=(32, 32),
        base="theta",
    ),
    "QwenImage21Transformer2DModel": _pairs("transformer_qwenimage21: QwenImage21Rope", **_DIMS),
    "QwenImageTransformer2DModel": _pairs(
        "transformer_qwenimage: QwenEmbedRope", **_DIMS, inert=("use_layer3d_rope",)
    ),
    "ZImageTransformer2DModel": _pairs("transformer_z_image: RopeEmbedder", **_LUMINA),
    # --- the code divides a head among coordinates ---
    "CogVideoXTransformer3DModel": _pairs("embeddings: get_3d_rotary_pos_embed", **_COGVIDEO),
    "CogView4Transformer2DModel": _half(
        "transformer_cogview4: CogView4RotaryPosEmbed", split="halves", inert=("rope_axes_dim",)
    ),
    "ConsisIDTransformer3DModel": _pairs("embeddings: get_3d_rotary_pos_embed", **_COGVIDEO),
    "CosmosTransformer3DModel": _half(
        "transformer_cosmos: CosmosRotaryPosEmbed",
        split="thirds",
        keys=("rope_scale",),
        inert=("extra_pos_embed_type",),
    ),
    "EasyAnimateTransformer3DModel": _pairs(
        "transformer_easyanimate: EasyAnimateRotaryPosEmbed",
        split="quarter for time",
        inert=("freq_shift", "time_position_encoding_type"),
    ),
    "GlmImageTransformer2DModel": _half(
        "transformer_glm_image: GlmImageRotaryPosEmbed", split="halves"
    ),
    "HunyuanDiT2DModel": _pairs("embeddings: get_2d_rotary_pos_embed", split="halves"),
    "SanaVideoTransformer3DModel": _pairs("transformer_sana_video: WanRotaryPosEmbed", **_WAN),
    "SkyReelsV2Transformer3DModel": _pairs(
        "transformer_skyreels_v2: SkyReelsV2RotaryPosEmbed", **_WAN
    ),
    "WanAnimateTransformer3DModel": _pairs("transformer_wan_animate: WanRotaryPosEmbed", **_WAN),
    "WanTransformer3DModel": _pairs("transformer_wan: WanRotaryPosEmbed", **_WAN),
    "WanVACETransformer3DModel": _pairs("transformer_wan_vace: WanRotaryPosEmbed", **_WAN),
    # --- one coordinate ---
    "AceStepTransformer1DModel": _half(
        "ace_step_transformer: _ace_step_rotary_freqs", head=("head_dim",), base="rope_theta"
    ),
    "MiniMaxMusic3Transformer1DModel": _half(
        "transformer_minimax_music3: MiniMaxMusic3RotaryEmbedding", rotary="rotary_dim"
    ),
    "OmniGenTransformer2DModel": _half(
        "transformer_omnigen: OmniGenSuScaledRotaryEmbedding",
        head=_HIDDEN,
        base="rope_base",
        keys=("rope_scaling", "max_position_embeddings", "original_max_position_embeddings"),
        inert=("downscale_freq_shift",),
    ),
    "StableAudioDiTModel": _half("embeddings: get_1d_rotary_pos_embed", rotary=0.5),
    # --- no RoPE, or none that a spec can express ---
    "AllegroTransformer3DModel": _none(_BY_BLOCK),
    "AuraFlowTransformer2DModel": _none("it adds learned positions"),
    "CogView3PlusTransformer2DModel": _none(_SINES),
    "DiTTransformer2DModel": _none(_SINES),
    "ErnieImageTransformer2DModel": _none(
        "its tables repeat angles for neighbours, but its code pairs halves"
    ),
    "HeliosTransformer3DModel": _none(_AVERAGED),
    "HunyuanVideoFramepackTransformer3DModel": _none(_AVERAGED),
    "Kandinsky5Transformer3DModel": _none(_TWO),
    "LTX2VideoTransformer3DModel": _none(_BY_HEAD),
    "LTXVideoTransformer3DModel": _none(_BY_HEAD),
    "LatteTransformer3DModel": _none(_SINES),
    "LuminaNextDiT2DModel": _none("its pipeline changes the frequencies with the time step"),
    "MochiTransformer3DModel": _none("its frequencies are learned: they are in the weights"),
    "PixArtTransformer2DModel": _none(_SINES),
    "SD3Transformer2DModel": _none(_SINES),
    "SanaTransformer2DModel": _none("its attention uses no rotation"),
}


def _thirds(head_dim: int) -> tuple[int, ...]:
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def _quarter(head_dim: int) -> tuple[int, ...]:
    return head_dim // 8, head_dim // 8 * 3 // 2, head_dim // 8 * 3 // 2


# The number of pairs of each coordinate, by the name of the rule.
_SPLITS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "halves": lambda head_dim: (head_dim // 4, head_dim // 4),
    "thirds": _thirds,
    "quarter for time": _quarter,
}


def recognised(values: Mapping[str, Any]) -> bool:
    """Return True if a mapping is the configuration of a class of diffusers."""
    return CLASS in values and "model_type" not in values


def translated(values: Mapping[str, Any]) -> Source:
    """Read the configuration of a transformer of diffusers, by the table of classes."""
    given = values[CLASS]
    name = f"{CLASS} {given!r}"
    missing = _none("the table of diffusers' transformers does not contain it")
    facts = TRANSFORMERS.get(given, missing) if isinstance(given, str) else missing
    if facts.refused is not None:
        return Source({}, Family(False, "", refused=facts.refused), name, seen=tuple(values))
    names = dict(zip(("head_dim",) if len(facts.head) == 1 else _HIDDEN, facts.head, strict=True))
    names |= {key: key for key in facts.keys}
    if isinstance(facts.base, str):
        names["rope_theta"] = facts.base
    if facts.rotary == "rotary_dim":
        names["rotary_dim"] = facts.rotary
    read = {*names.values(), *filter(None, (facts.widths, facts.switch))}
    absent = {key for key in read if values.get(key) is None}
    if facts.default is not None:
        absent.discard(str(facts.widths))
    if absent:
        fail(
            f"{name} must come with {', '.join(sorted(absent))} but has only the keys "
            f"{', '.join(sorted(map(str, values)))}"
        )
    if facts.switch is not None and values[facts.switch] is not True:
        fail(f"the config has no RoPE: {facts.switch} is {values[facts.switch]!r}")
    outer = {name: values[key] for name, key in names.items()}
    spelled = dict(names)
    origin = f"{name} ({facts.source})"
    sizes = None
    if facts.widths is not None:
        sizes, spelled["mrope_section"] = _sizes(facts, values, origin)
    elif facts.split is not None:
        whole([(facts.head[0], values[facts.head[0]])], _WIDEST)
        sizes = _SPLITS[facts.split](values[facts.head[0]])
        spelled["mrope_section"] = origin
    if sizes is not None:
        outer["mrope_section"] = list(sizes)
    if facts.rotary == "widths" and sizes is not None:
        outer["rotary_dim"], spelled["rotary_dim"] = 2 * sum(sizes), f"the sum of {facts.widths}"
    elif isinstance(facts.rotary, float):
        outer["partial_rotary_factor"], spelled["partial_rotary_factor"] = facts.rotary, origin
    scale = outer.pop("rope_scale", None)
    if scale is not None and sizes is not None:
        outer["rope_scaling"] = {"rope_type": "given", "inv_freq": _scaled(sizes, scale)}
        spelled |= dict.fromkeys(("rope_scaling.rope_type", "rope_scaling.inv_freq"), "rope_scale")
    family = Family(
        facts.interleaved,
        facts.source,
        base=None if isinstance(facts.base, str) else facts.base,
        axes=None if sizes is None else "sections" if scale is not None else "unequal blocks",
    )
    unread = {
        key: value for key, value in values.items() if key not in read and key not in facts.inert
    }
    return Source(outer, family, name, spelled, seen=tuple(values), unread=unread)


def _sizes(
    facts: Transformer, values: Mapping[str, Any], origin: str
) -> tuple[tuple[int, ...], str]:
    """The number of pairs of each coordinate, and its source."""
    key = str(facts.widths)
    widths = values.get(key)
    if widths is None and facts.default is not None:
        widths, source = facts.default, origin
    else:
        source = f"half of {key}"
    if not isinstance(widths, list | tuple):
        raise bad_type(f"{key} must be a list but got {widths!r}")
    whole([(key, width) for width in widths])
    whole([(f"the sum of {key}", sum(widths))], _WIDEST)
    if any(width % 2 for width in widths):
        fail(f"{key} must hold even numbers but got {list(widths)}")
    return tuple(width // 2 for width in widths), source


def _scaled(sizes: tuple[int, ...], scale: object) -> list[float]:
    """The frequencies of Cosmos: NTK-aware scaling, with a factor for each coordinate."""
    rule = "rope_scale must be a list of numbers from 1e-9 to 1e9, one per coordinate, but got"
    if not isinstance(scale, list | tuple) or len(scale) != len(sizes):
        raise bad_type(f"{rule} {scale!r}")
    for one in scale:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 1e-9 <= one <= 1e9:
            fail(f"{rule} {scale!r}")
    if min(sizes) < 2:
        fail(f"each coordinate must have at least two pairs but got {list(sizes)}")
    return [
        (10000.0 * factor ** (size / (size - 1))) ** (-pair / size)
        for factor, size in zip(scale, sizes, strict=True)
        for pair in range(size)
    ]
