"""Facts about RoPE that only the modeling code of a family contains, not its configurations.

A table, ``model_type`` -> :class:`Family`; each entry names the code that it was read from. Many
configurations do not give the pairing of channels, the rotated slice or the layers without RoPE.
`tests/unit/config/test_families.py` runs the named functions of the installed transformers and compares their
pairing with this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """Facts about one ``model_type``.

    Attributes:
        interleaved: the pairing, as in :class:`tightrope.RopeSpec`.
        source: the code that shows the pairing: ``folder: function`` of transformers 5.23, or a
            description.
        pairing_key: the key by which this family's code lets a configuration choose the pairing.
        base: a constant of the code, for families whose configurations have no key for it.
        bases: the keys outside a rope section by which the code takes a base; None if it may be any.
        parts: the same keys of the part of the channels that rotates.
        fixed: what the code takes from no key: "base", "scaling" or both.
        fraction: ``"optional"``: without a key all channels rotate. ``"required"``: the family
            rotates a part by default, so a configuration must give the part. ``"none"``: all
            channels rotate; the code ignores a key for a part, or fails with one. ``"factor"``: the
            code reads a factor, without one all channels rotate; it ignores ``rotary_dim``.
            ``"half"``: half the channels rotate unless the rope section has a factor. ``"sixths"``:
            as many channels rotate as three coordinates with equal numbers of pairs can share.
        head_dim: ``"derived"``: without a key it is hidden size / heads. ``"required"``: the family
            has another default, so a configuration must give head_dim. ``"computed"``: the code
            ignores a key for it.
        width: the keys of the width and of the numbers that divide it into heads, if not the usual
            ones; the code ignores ``kv_channels``.
        start: ``"first"``, ``"nope"`` (after the channels of ``qk_nope_head_dim``) or ``"last"``.
        axes: the name of the rule that assigns coordinates to pairs; see ``axes_of`` in heads.py.
        sections: the number of pairs of each coordinate if no key gives it: a constant of the code.
        layers: the name of the rule by which layers differ; see layers.py.
        position_type: the key that must select RoPE, as the model has none otherwise.
        switch: a key that must be true, as the model has no RoPE otherwise.
        null_base: whether a model whose base is null has no RoPE.
        scaling: ``"turns"``: coordinates count turns, so frequencies are multiplied by 2π.
        scaled: whether the class scales by default, so that a configuration must name its rule.
        scales_softmax: whether its attention multiplies its softmax scale by the square of YaRN's magnitude at
            ``mscale_all_dim`` (`yarn_apply_mscale` in transformers).
        learned: the tensor in the weights by which the rotary module computes or replaces its frequencies; see
            learned.py.
        refused: why no spec can express this family; None for all others.
    """

    interleaved: bool
    source: str
    pairing_key: str | None = None
    base: float | None = None
    bases: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    fixed: tuple[str, ...] = ()
    fraction: str = "optional"
    head_dim: str = "derived"
    width: tuple[str, ...] = ()
    start: str = "first"
    axes: str | None = None
    sections: tuple[int, ...] | None = None
    layers: str | None = None
    position_type: str | None = None
    switch: str | None = None
    null_base: bool = False
    scaling: str | None = None
    scaled: bool = False
    scales_softmax: bool = False
    learned: str | None = None
    refused: str | None = None


# What most code of transformers has in common.
_USUAL: dict[str, Any] = {
    "fraction": "none",
    "bases": ("rope_theta",),
    "parts": ("partial_rotary_factor",),
}


def _half(folder: str, function: str = "apply_rotary_pos_emb", **facts: object) -> Family:
    return Family(False, f"{folder}: {function}", **(_USUAL | facts))


def _pairs(folder: str, function: str = "apply_rotary_pos_emb", **facts: object) -> Family:
    return Family(True, f"{folder}: {function}", **(_USUAL | facts))


def _each(names: str, function: str = "apply_rotary_pos_emb", **facts: object) -> dict[str, Family]:
    """Families with half pairing and one set of facts; ``type:folder`` if the folder has another name."""
    pairs = [name.partition(":") for name in names.split()]
    return {name: _half(folder or name, function, **facts) for name, _, folder in pairs}


def _conformer(folder: str, stem: str, **facts: object) -> Family:
    function = f"{stem}SelfAttention._apply_rotary_embedding"
    own: dict[str, Any] = {"position_type": "position_embeddings_type", "fixed": ("scaling",)}
    return _half(folder, function, bases=("rotary_embedding_base",), **own, **facts)


def _hub(file: str, interleaved: bool = False, **facts: object) -> Family:
    """A family whose code is in its repositories."""
    name = "apply_rotary_pos_emb" if interleaved else "rotate_half"
    source = f"modeling_{file}.py in the hub repository: {name}"
    return Family(interleaved, source, **facts)  # type: ignore[arg-type]


def _none(why: str) -> Family:
    return Family(False, "", refused=why)


def _own(why: str) -> Family:
    return _none(f"{why}; tightrope.patch(model) rotates as the model's own code does")


# For families that rotate a part of the channels if a key says so, or by default; or whose default
# head_dim is not hidden size / heads.
_ANY_PART = {"fraction": "optional"}
_PART = {"fraction": "required"}
_HEAD = {"head_dim": "required"}
_FIXED: dict[str, Any] = {"base": 10000.0, "fixed": ("base", "scaling")}

_MLA: dict[str, Any] = {"start": "nope", "scales_softmax": True}
_MLA_CHOICE = {**_MLA, "pairing_key": "rope_interleave"}
_DEEPSEEK_V3 = _pairs("deepseek_v3", "apply_rotary_pos_emb_interleave", **_MLA_CHOICE)

# Vision towers of the Qwen line and its relatives: half the pairs rotate by the row, half by the
# column. Older configurations have no key for the base; the code uses 10000.
_VISION = {"axes": "blocks", "base": 10000.0}

# The attention of videos to their earlier frames.
_MEMORY: dict[str, Any] = {
    "axes": "columns, rows",
    "bases": ("memory_attention_rope_theta",),
    "width": tuple(
        f"memory_attention_{name}"
        for name in ("hidden_size", "downsample_rate", "num_attention_heads")
    ),
}

_QWEN2_VL: dict[str, Any] = {"axes": "sections", "sections": (16, 24, 24)}
_QWEN3_VL: dict[str, Any] = {"axes": "interleaved sections", "sections": (24, 20, 20)}
_QWEN3_5: dict[str, Any] = {"axes": "interleaved sections", "sections": (11, 11, 10)}
_GLM4V: dict[str, Any] = {"axes": "sections", "sections": (8, 12, 12)}

FAMILIES: dict[str, Family] = {
    # --- all channels, half pairing ---
    # (MiniMax-Text-01 gives rotary_dim = 64 of 128: its own code rotates 64, transformers' all, so its file is
    # refused.)
    **_each(
        """arcee aria_text:aria bitnet chameleon csm csm_depth_decoder_model:csm dbrx
        deepseek_ocr2_encoder:deepseek_ocr2 diffllama doge dots1
        emu3_text_model:emu3 esmc eurobert EvollaModel:evolla evolla falcon falcon_h1 flex_olmo
        gradium_phonon_tts granite granite4_vision_text:granite4_vision granite_docling_text:granite_docling
        granitemoe granitemoeshared gte hunyuan_v1_dense
        hunyuan_v1_moe hyperclovax idefics jais2 jina_embeddings_v3
        kyutai_speech_to_text lasr_encoder:lasr lfm2 lfm2_moe llama mimi mimi_decoder:mimi mimi_encoder:mimi
        minimax ministral mistral mixtral moshi
        olmo olmo2 olmoe phimoe pocket_tts
        pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder:pocket_tts_audio_tokenizer
        pocket_tts_audio_tokenizer_encoder:pocket_tts_audio_tokenizer qwen2 qwen2_moe
        qwen3_moe qwen3_omni_moe_talker_text:qwen3_omni_moe starcoder2
        voxtral_realtime_text:voxtral_realtime"""
    ),
    **_each(
        """dia_decoder:dia dia_encoder:dia hrm_text hy_v3 jetmoe muse_glimmer_assistant
        qwen3_omni_moe_talker_code_predictor:qwen3_omni_moe t5_gemma_module:t5gemma
        timesfm2_5 vaultgemma voxtral_realtime_encoder:voxtral_realtime""",
        **_HEAD,
    ),
    # Scaled by default.
    **_each("apertus", scaled=True),
    **_each("cwm higgs_audio_v2 ministral3", scaled=True, **_HEAD),
    **_each("solar_open", **_HEAD, **_ANY_PART),
    "minimax_m3_vl_text": _half("minimax_m3_vl", fraction="factor", **_HEAD),
    "gemma": _half("gemma", **_HEAD),
    "gemma2": _half("gemma2", **_HEAD),
    "gpt_oss": _half("gpt_oss", scaled=True, **_HEAD),
    **_each(
        "deepseek_ocr2_text:deepseek_ocr2 unlimited_ocr_text:unlimited_ocr", head_dim="computed"
    ),
    "granitemoehybrid": _half("granitemoehybrid", position_type="position_embedding_type"),
    "internlm2": _hub("internlm2", fraction="none"),
    "minicpm": _hub("minicpm", fraction="none"),
    "mllama_text_model": _half("mllama"),
    "olmo_hybrid": _half("olmo_hybrid", null_base=True),
    # The code in its repositories reads rotary_emb_base.
    "nomic_bert": _half("nomic_bert", bases=("rope_theta", "rotary_emb_base")),
    "nemotron-nas": _hub("decilm", fraction="none"),
    "phi3": _half("phi3", **_ANY_PART),
    "phi4_multimodal": _half("phi4_multimodal", **_ANY_PART),
    "qwen3": _half("qwen3", **_HEAD),
    "seed_oss": _half("seed_oss", **_HEAD),
    "solar": _hub("solar"),
    # --- some channels, half pairing ---
    **_each(
        """glm4_moe glmasr_encoder:glmasr nemotron nemotron3_5_transcribe_asr_audio:nemotron3_5_transcribe
        nemotron3_5_transcribe_word_timestamp:nemotron3_5_transcribe
        nemotron3_diarization_audio:nemotron3_diarization persimmon phi recurrent_gemma stablelm""",
        **_PART,
    ),
    **_each("minimax_m2 qwen3_next", **_PART, **_HEAD),
    "bamba": _half("bamba", fraction="half"),
    "dots3_note_audio_encoder": _half("dots3_note", head_dim="computed", **_PART),
    **_each(
        "gpt_neox gpt_neox_japanese",
        bases=("rope_theta", "rotary_emb_base"),
        parts=("rotary_pct",),
        **_PART,
    ),
    # --- interleaved pairing ---
    "codegen": _pairs("codegen", **_FIXED, **_PART),
    "cohere": _pairs("cohere"),
    "ernie4_5": _pairs("ernie4_5", **_HEAD),
    "ernie4_5_moe": _pairs("ernie4_5_moe"),
    "glm": _pairs("glm", **_PART),
    "glm4": _pairs("glm4", **_PART, **_HEAD),
    "gptj": _pairs("gptj", **_FIXED, **_PART),
    "helium": _pairs("helium", **_HEAD),
    "moonshine": _pairs("moonshine", **_PART),
    "moonshine_streaming": _pairs("moonshine_streaming", parts=(), **_PART),
    "blt_global_transformer": _pairs("blt"),
    "blt_local_decoder": _pairs("blt"),
    "blt_local_encoder": _pairs("blt"),
    "blt_patcher": _pairs("blt"),
    "openai_privacy_filter": _pairs("openai_privacy_filter", scaled=True, **_HEAD),
    "pe_audio_encoder": _pairs("pe_audio", **_HEAD),
    "pe_audio_video_encoder": _pairs("pe_audio_video", **_HEAD),
    "pe_video_encoder": _pairs("pe_video", **_HEAD),
    "roformer": Family(
        True,
        "roformer: RoFormerSelfAttention.apply_rotary_position_embeddings",
        fraction="none",
        **_FIXED,
        learned="embed_positions.weight",
    ),
    # --- latent attention: the rotated slice comes after channels without RoPE ---
    "axk1": _pairs("axk1", "apply_rotary_pos_emb_interleave", **_MLA_CHOICE),
    "axk2": _pairs("axk2", "apply_rotary_pos_emb_interleave", **_MLA),
    "bailing_hybrid": _pairs("bailing_hybrid", "apply_rotary_pos_emb_interleave", **_MLA),
    "deepseek_v2": _pairs("deepseek_v2", "apply_rotary_emb", **_MLA),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _pairs("deepseek_v32", "apply_rotary_pos_emb_interleave", **_MLA),
    "kimi_k2": _hub("deepseek", True, **_MLA),
    "longcat_flash": _pairs("longcat_flash", "apply_rotary_pos_emb_interleave", **_MLA),
    "glm4_moe_lite": _pairs("glm4_moe_lite", "apply_rotary_pos_emb_interleave", **_MLA_CHOICE),
    "glm_moe_dsa": _pairs("glm_moe_dsa", "apply_rotary_pos_emb_interleave", **_MLA),
    "hy_v4": _half("hy_v4", **_MLA),
    "minicpm3": _half("minicpm3", **_MLA),
    "mistral4": _pairs("mistral4", "apply_rotary_pos_emb_interleave", scaled=True, **_MLA_CHOICE),
    "youtu": _pairs("youtu", "apply_rotary_pos_emb_interleave", **_MLA_CHOICE),
    "deepseek_v4": _pairs(
        "deepseek_v4", start="last", layers="main and compress", **_PART, **_HEAD
    ),
    # --- layers that differ ---
    # A rope section for each type of layer; a base beside them is ignored.
    **_each("modernbert-decoder:modernbert_decoder ultrabert", layers="nested"),
    **_each("beam lfm3 t5gemma2_decoder:t5gemma2 t5gemma2_text:t5gemma2", layers="nested", **_HEAD),
    **_each("mellum", layers="nested", **_HEAD, **_ANY_PART),
    **_each("mimo_v2_flash zaya", layers="nested", **_HEAD, **_PART),
    "afmoe": _half("afmoe", layers="sliding only", **_HEAD),
    "cohere2": _pairs("cohere2", layers="sliding only"),
    "cohere2_moe": _pairs("cohere2_moe", layers="sliding or dense", **_HEAD),
    "diffusion_gemma_text": _half("diffusion_gemma", layers="wide where full", **_HEAD),
    "embedding_gemma2_text": _half("embedding_gemma2", layers="wide where full", **_HEAD),
    "exaone4": _half("exaone4", layers="sliding only, if windows"),
    "exaone_moe": _half("exaone_moe", layers="sliding only, if windows"),
    "flint": _half("flint", layers="sliding only", **_HEAD),
    "gemma3_text": _half("gemma3", layers="local base", **_HEAD),
    "gemma3n_text": _half("gemma3n", layers="local base", **_HEAD),
    "gemma4_text": _half("gemma4", layers="wide where full", **_HEAD),
    "gemma4_unified_text": _half("gemma4_unified", layers="wide where full", **_HEAD),
    "kolibri1": _half("kolibri1", layers="sliding only, if windows", **_HEAD),
    "laguna": _half("laguna", parts=(), layers="nested or flat", **_PART, **_HEAD),
    "llama4_text": _pairs("llama4", "apply_rotary_emb", layers="no_rope_layers", **_HEAD),
    "mistral_large4_text": _pairs(
        "mistral_large4",
        "apply_rotary_pos_emb_interleave",
        layers="no_rope_layers",
        scaled=True,
        **_MLA,
        learned="alpha",
    ),
    "step3p5": _half("step3p7", layers="lists", parts=(), **_ANY_PART, **_HEAD),
    **_each("granite_swa granitemoe_swa", layers="layer_rope_theta"),
    "muse_spark_text": _half("muse_spark", layers="layer_rope_theta", **_HEAD),
    "muse_glimmer_text": _half("muse_glimmer", layers="layer_rope_theta", **_HEAD),
    "molmo2_text": _half("molmo2", layers="scaled layers", **_HEAD),
    "modernbert": _half("modernbert", layers="global and local base"),
    "olmo3": _half("olmo3", layers="scaled where full"),
    "smollm3": _half("smollm3", layers="no_rope_layers"),
    # --- several axes: text with images ---
    "qwen2_vl": _half("qwen2_vl", **_QWEN2_VL),
    "qwen2_vl_text": _half("qwen2_vl", **_QWEN2_VL),
    "qwen2_5_vl": _half("qwen2_5_vl", **_QWEN2_VL),
    "qwen2_5_vl_text": _half("qwen2_5_vl", **_QWEN2_VL),
    "qwen2_5_omni_talker": _half("qwen2_5_omni", **_QWEN2_VL),
    "qwen2_5_omni_text": _half("qwen2_5_omni", **_QWEN2_VL),
    "paddleocr_vl_text": _half("paddleocr_vl", **_QWEN2_VL, **_HEAD),
    "cohere_compass_text": _half("cohere_compass", layers="nested", **_QWEN3_VL),
    "cosmos3_edge_text": _half("cosmos3_edge", bases=(), fixed=("scaling",), **_QWEN3_VL),
    "qwen3_omni_moe_text": _half("qwen3_omni_moe", **_QWEN3_VL),
    "qwen3_vl_text": _half("qwen3_vl", **_QWEN3_VL, **_HEAD),
    "qwen3_vl_moe_text": _half("qwen3_vl_moe", **_QWEN3_VL, **_HEAD),
    "qwen3_5_text": _half("qwen3_5", **_QWEN3_5, **_PART, **_HEAD),
    "qwen3_5_moe_text": _half("qwen3_5_moe", **_QWEN3_5, **_PART, **_HEAD),
    "qwen4_exp_text": _half("qwen4_exp", **_QWEN3_5, **_ANY_PART, **_HEAD),
    "glm4v": _pairs("glm4v", **_GLM4V, **_PART),
    "glm4v_moe_text": _half("glm4v_moe", **_GLM4V, **_PART),
    "glm4v_text": _pairs("glm4v", **_GLM4V, **_PART),
    "glm_image_text": _half("glm_image", **_GLM4V, **_ANY_PART),
    "glm_ocr_text": _pairs("glm_ocr", **_GLM4V, **_ANY_PART),
    "dots3_note_text": _pairs(
        "dots3_note", "apply_rotary_pos_emb_interleave", start="nope", layers="nested"
    ),
    "ernie4_5_vl_moe_text": _pairs(
        "ernie4_5_vl_moe", axes="rows and columns, then time", sections=(22, 22, 20)
    ),
    # --- several axes: images ---
    "dinov3_vit": _half("dinov3_vit", axes="blocks", scaling="turns"),
    "eomt_dinov3": _half("eomt_dinov3", axes="blocks", scaling="turns"),
    "inkling2_vision": _pairs(
        "inkling2", "apply_rotary_pos_emb_vision", axes="columns, rows", base=10000.0
    ),
    "kimi_k25_vision": _half(
        "kimi_k25", "apply_rotary_pos_emb_vision", axes="alternating", base=10000.0
    ),
    "lfm3_vl_vision": _half("lfm3_vl", "apply_rotary_pos_emb_vision", axes="blocks"),
    "llama4_vision_model": _pairs("llama4", "vision_apply_rotary_emb", axes="columns, rows"),
    "pixtral": _half("pixtral", axes="strided"),
    "qwen2_vl_vision": _half(
        "qwen2_vl", "apply_rotary_pos_emb_vision", width=("embed_dim", "num_heads"), **_VISION
    ),
    **_each(
        "muse_glimmer_vision:muse_glimmer muse_spark_vision:muse_spark",
        function="apply_rotary_pos_emb_vision",
        axes="columns, rows",
        base=10000.0,
    ),
    "sapiens2": _half("sapiens2", axes="blocks", scaling="turns"),
    "sam3_vit_model": _pairs("sam3", "apply_rotary_pos_emb_2d", axes="columns, rows"),
    "minimax_m3_vl_vision": _half(
        "minimax_m3_vl", "apply_rotary_pos_emb_vision", axes="thirds", fraction="sixths"
    ),
    "sam2_video": _pairs("sam2_video", "apply_rotary_pos_emb_2d", **_MEMORY),
    "edgetam_video": _pairs("edgetam_video", "apply_rotary_pos_emb_2d_self_attn", **_MEMORY),
    "step3p5_vision": _half(
        "step3p7", "apply_rotary_pos_emb_vision", axes="columns, rows", base=10000.0
    ),
    **_each(
        """cohere_compass_vision:cohere_compass dots3_note_vision_encoder:dots3_note
        ernie4_5_vl_moe_vision:ernie4_5_vl_moe exaone4_5_vision:exaone4_5 glm4v_moe_vision:glm4v_moe
        glm4v_vision:glm4v glm5_next_vision:glm5_next glm_ocr_vision:glm_ocr mlcd mlcd_vision_model:mlcd
        paddleocr_vl_vision:paddleocr_vl
        qwen2_5_omni_vision_encoder:qwen2_5_omni qwen2_5_vl_vision:qwen2_5_vl qwen3_5_moe_vision:qwen3_5_moe
        qwen3_5_vision:qwen3_5 qwen3_omni_moe_vision_encoder:qwen3_omni_moe qwen3_vl_moe_vision:qwen3_vl_moe
        qwen3_vl_vision:qwen3_vl qwen4_exp_vision:qwen4_exp video_llama_3_vision:video_llama_3""",
        function="apply_rotary_pos_emb_vision",
        **_VISION,
    ),
    # --- RoPE is optional ---
    "esm": _half(
        "esm",
        base=10000.0,
        fixed=("scaling",),
        position_type="position_embedding_type",
        learned="inv_freq",
    ),
    "seamless_m4t": _conformer(
        "seamless_m4t",
        "SeamlessM4TConformer",
        width=("hidden_size", "speech_encoder_attention_heads"),
        learned="inv_freq",
    ),
    "wav2vec2-bert": _conformer("wav2vec2_bert", "Wav2Vec2Bert"),
    "wav2vec2-conformer": _conformer("wav2vec2_conformer", "Wav2Vec2Conformer", learned="inv_freq"),
    "zamba2": _half("zamba2", width=("attention_head_dim",), switch="use_mem_rope"),
    # --- no RoPE, or none that a spec can express ---
    "baichuan": _none(
        "the base of its 7B is only in its code, and its 13B, of the same model_type, uses ALiBi"
    ),
    "bert": _none("it adds learned positions"),
    "bloom": _none("it uses ALiBi"),
    "gpt2": _none("it adds learned positions"),
    "gpt_neo": _none("it adds learned positions"),
    "gemma4_vision": _own("it pairs channels by halves within each of two blocks of a head"),
    "hunyuan_vl_text": _own("the two channels of a pair may rotate by different coordinates"),
    "jamba": _none("its attention layers use no positions"),
    "kimi_linear": _none("its attention layers use no positions"),
    "mamba": _none("it has no attention"),
    "mllama_vision_model": _none("it adds learned positions"),
    "mpt": _none("it uses ALiBi"),
    "musicflamingo": _none("its outer level rotates the features of sounds by their times"),
    "nanochat": _none(
        "it rotates by negative angles; make a RopeSpec as for Llama, rope, and rotate with "
        "RopeSpec(rope.head_dim, scaling=Given.of(-rope.frequencies().inv_freq))"
    ),
    "nemotron_h": _none("its attention layers use no positions"),
    "neomme": _own("its positions have two coordinates, woven in an order of its own"),
    "neucodec": _own("it rotates by the number of the head, not by that of the token"),
    "opt": _none("it adds learned positions"),
    "qwen2_5_omni_dit": _own("it rotates the first head only"),
    "qwen": _none("its scaling by logarithms of the length is not one of the rules here"),
    "sam3_tracker_video": _none(
        "it has two rotations, of the images and of the memory; for the images: "
        "RopeSpec.from_config(config, section='vision_config.backbone_config'); the memory has that of 'sam2_video'"
    ),
    "t5": _none("it adds a bias that depends on the distance"),
    "vjepa2": _none("its tables repeat frequencies by halves, but its code pairs neighbours"),
    "xcodec2": _own("it rotates by the number of the head, not by that of the token"),
}

# (model_type, section without its own model_type) -> the family of the section.
SECTIONS: dict[tuple[str, str], str] = {
    ("llama4", "text_config"): "llama4_text",
    ("llama4", "vision_config"): "llama4_vision_model",
    ("gemma3", "text_config"): "gemma3_text",
    ("mllama", "text_config"): "mllama_text_model",
    ("mllama", "vision_config"): "mllama_vision_model",
    ("muse_glimmer", "text_config"): "muse_glimmer_text",
} | {
    (name, f"{part}_config"): f"{name}_{part}"
    for name in ("glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    for part in ("text", "vision")
}

# GGUF: llama.cpp chooses the pairing by architecture (`llama_model_rope_type`). It differs from
# transformers where the converter permutes weights. These tables and those of formats.py were compared with
# its src/llama-model.cpp and src/models of October 2026. (The graph of deepseek2-ocr pairs halves, whatever that
# function says.)
GGUF_NEIGHBOURS = frozenset(
    """llama llama4 deci baichuan internlm2 minicpm xverse command-r cohere2 cohere2moe olmo arctic deepseek
    deepseek2 deepseek32 deepseek4 dots3note plm chatglm glm4 glm-dsa granite granitemoe granitehybrid
    graniteswitch granite_swa chameleon bailingmoe bailingmoe3 neo-bert smollm3 arcee ernie4_5 ernie4_5-moe
    mistral3 mistral4 muse-glimmer llada llama-embed maincoder nanbeige pockettts eagle3 hy_v4""".split()
)
GGUF_HALVES = frozenset(
    """falcon falcon-h1 grok dbrx jina-bert-v3 modern-bert nomic-bert nomic-bert-moe stablelm bitnet qwen
    qwen2 dream qwen2moe qwen3 qwen3moe olmo2 olmoe phi2 phi3 phimoe plamo plamo2 plamo3 gemma gemma2
    gemma3 gemma3n gemma-embedding gemma-embedding2 starcoder2 openelm gptneox codeshell orion nemotron
    exaone exaone4 exaone-moe minicpm3 bailingmoe2 dots1 hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 gpt-oss
    lfm2 lfm2moe smallthinker seed_oss apertus minimax-01 minimax-m2 minimax-m3 qwen3next glm4moe afmoe
    gemma4 gemma4-assistant laguna mellum maple mimo2 spark2_5 step35 llada-moe grovemoe rnd1 eurobert
    jais2 talkie hrm_text cogvlm deepseek2-ocr pangu-embedded dflash""".split()
)
GGUF_SECTIONS = frozenset({"qwen2vl", "paddleocr"})
GGUF_INTERLEAVED_SECTIONS = frozenset(
    "qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp qwen3tts clef".split()
)
# Files of these may have sections, and then pair halves; without, positions have one coordinate. In HunyuanVL positions
# have four, the last of which llama.cpp sets to 0 for text.
GGUF_MAYBE_SECTIONS = frozenset({"bailingmoe3", "dflash", "glm4", "glm4moe", "hunyuan_vl"})
# llama.cpp rotates nothing in these, even if their files have keys about RoPE.
GGUF_WITHOUT_ROPE = frozenset(
    """clip bert gpt2 gptj mpt refact bloom mamba mamba2 jamba jina-bert-v2 starcoder t5 t5encoder jais rwkv6
    rwkv6qwen2 rwkv7 arwkv7 wavtokenizer-dec nemotron_h nemotron_h_moe kimi-linear kimi-k3 glm5-next""".split()
)
