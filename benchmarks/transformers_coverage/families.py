"""Exceptions for single model families: settings, inputs, and the class to build."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .building import WIDTH
from .catalogue import ModelType

# The patches of the two images of a batch, as (time, rows, columns); rows and columns differ.
GRIDS = ((1, 4, 6), (1, 6, 4))


@dataclass(frozen=True)
class Family:
    """The exceptions for a model type.

    Attributes:
        config: settings, nested for the parts of a configuration; a part with a `model_type` replaces
            the whole part.
        inputs: makes some of the inputs; its argument is the `Maker` of the others.
        without: inputs to leave out.
        model: the name of the class to build; for a configuration that no model class states, the class
            whose constructor takes it.
        patches: the layout of pixels that come with a grid, see `Maker.images`.
        part: the part or method of the model to call, if the whole has no forward, is badly conditioned or
            not differentiable.
        whole: the type of the model that `part` is taken from, for a configuration that no class takes alone;
            the settings are those of this model.
        attention: the attention implementation.
        gain: a factor on the random weights.
        grids: the patches of each image, as (time, rows, columns).
    """

    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] | None = None
    without: tuple[str, ...] = ()
    model: str = ""
    patches: str = "flat"
    part: str = ""
    whole: str = ""
    attention: str = "eager"
    gain: float = 1.0
    grids: tuple[tuple[int, int, int], ...] = GRIDS


def tiles(maker: Any) -> dict[str, Any]:
    """Two images of 2 × 2 tiles each; all four are present."""
    return {
        "pixel_values": maker.normal(2, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.full((2, 1), 6),
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
    }


def places() -> torch.Tensor:
    """The column and row of each patch of two images with 6 columns and 3 rows."""
    at = [(x, y) for y in range(3) for x in range(6)]
    return torch.tensor([at, at])


def patches_with_places(maker: Any) -> dict[str, Any]:
    """Batched patches with their positions."""
    return {"pixel_values": maker.normal(2, 18, 3 * 8 * 8), "pixel_position_ids": places()}


def memory(maker: Any) -> dict[str, Any]:
    """The features of one frame, and a memory of two frames and four object pointers."""
    frame = math.prod(maker.config.memory_attention_rope_feat_sizes)
    return {
        "current_vision_features": maker.normal(frame, 1, 64),
        "memory": maker.normal(2 * frame + 4, 1, 64),
        "memory_posision_embeddings": maker.normal(2 * frame + 4, 1, 64),
        "num_object_pointer_tokens": 4,
    }


def pooled_memory(maker: Any) -> dict[str, Any]:
    """Like `memory`, with 8 latents and 4 × 4 positions for each remembered frame."""
    past = {
        n: maker.normal(2 * (8 + 16) + 4, 1, 64) for n in ("memory", "memory_posision_embeddings")
    }
    return {**memory(maker), **past, "num_spatial_memory_tokens": 2}


def one_channel(maker: Any) -> dict[str, Any]:
    """Audio with an axis for its one channel."""
    return {"input_values": maker.normal(2, 1, 240)}


def matched(maker: Any) -> dict[str, Any]:
    """Features of two pairs of images and their cos/sin, as the whole model makes them."""
    features = maker.normal(2, 2, WIDTH, 16, 24)
    cos, sin = (
        t.expand(4, -1, -1, -1).reshape(4, -1, WIDTH) for t in maker.whole.rotary_emb(features)
    )
    return {"hidden_states": features, "position_embeddings": (cos, sin)}


def music(maker: Any) -> dict[str, Any]:
    """Token ids with a placeholder per four audio frames: the encoder halves their number twice."""
    ids = maker.ids(30)
    ids[:, 4:20] = maker.config.audio_token_id
    return {"input_ids": ids}


def molecules(maker: Any) -> dict[str, Any]:
    """Two chains of six residues, with 64 atoms each."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    index = torch.arange(6).expand(2, -1)
    one = torch.zeros_like(index)
    residue = index.repeat_interleave(64, dim=1)
    return {
        "input_ids": maker.ids(6),
        "token_index": index,
        "residue_index": index,
        **dict.fromkeys(("asym_id", "sym_id", "entity_id", "mol_type"), one),
        "res_type": index + 2,
        "token_bonds": maker.normal(2, 6, 6, 1),
        "attention_mask": one == 0,
        "num_loops": 1,
        "atom_inputs": EsmFold2AtomInputs(
            ref_pos=maker.normal(2, 384, 3),
            ref_charge=maker.normal(2, 384),
            atom_attention_mask=residue >= 0,
            ref_element=residue + 6,
            ref_atom_name_chars=torch.arange(4).expand(2, 384, 4),
            ref_space_uid=residue,
            atom_to_token=residue,
        ),
    }


def one_image(maker: Any) -> dict[str, Any]:
    """A batch of one image: in training, larger batches of a model that learns its table run the original.

    The gradient of the table would be summed over the images in another order.
    """
    return {"pixel_values": maker.normal(1, 3, 184, 184)}


def wide_images(maker: Any) -> dict[str, Any]:
    """Images of two tiles and a preview, and token ids with the 14 placeholders of each image."""
    ids = maker.ids(24)
    ids[:, 4:18] = maker.config.image_token_id
    sizes = torch.tensor([[32, 64]] * 2)
    return {"input_ids": ids, "pixel_values": maker.normal(2, 3, 3, 32, 32), "image_sizes": sizes}


def pixel_videos(maker: Any) -> dict[str, Any]:
    """Two videos of six frames."""
    return {"pixel_values_videos": maker.normal(2, 6, 3, 32, 32)}


def codec_rows(maker: Any) -> dict[str, Any]:
    """Audio samples, and frame features for the semantic part."""
    width = maker.config.semantic_model_config.feature_projection_input_dim
    return {"input_values": maker.normal(2, 1, 1920), "input_features": maker.normal(2, 6, width)}


def speech_rows(maker: Any) -> dict[str, Any]:
    """Speech frames with the width that the model projects."""
    return {"input_features": maker.normal(2, 24, maker.config.feature_projection_input_dim)}


def audio_rows(maker: Any) -> dict[str, Any]:
    """Features of two clips of 64 and 40 frames, one after the other."""
    bins = maker.config.num_mel_bins
    return {"input_features": maker.normal(bins, 104), "feature_lens": torch.tensor([64, 40])}


def speech(maker: Any) -> dict[str, Any]:
    """Codes, and the voice and mel spectrogram to imitate."""
    return {
        "code": maker.ids(10, 60)[:1] % 60,
        "conditioning": maker.normal(1, 16),
        "reference_mel": maker.normal(1, 20, 16),
        "num_steps": 3,
    }


def points(maker: Any) -> dict[str, Any]:
    """Two marked points of one object."""
    return {
        "input_points": maker.normal(1, 1, 2, 2),
        "input_labels": torch.tensor([[[1, 0]]]),
        "input_boxes": None,
        "input_masks": None,
    }


def masks(maker: Any) -> dict[str, Any]:
    """Features of one image, in three sizes, and the embedded prompts of one object."""
    return {
        "image_embeddings": maker.normal(1, WIDTH, 4, 4),
        "image_positional_embeddings": maker.normal(1, WIDTH, 4, 4),
        "sparse_prompt_embeddings": maker.normal(1, 1, 2, WIDTH),
        "dense_prompt_embeddings": maker.normal(1, WIDTH, 4, 4),
        "multimask_output": True,
        "high_resolution_features": [maker.normal(1, 8, 16, 16), maker.normal(1, 16, 8, 8)],
    }


def boxes(maker: Any) -> dict[str, Any]:
    """Three boxes on the features of each of two images."""
    return {
        "box_embeddings": maker.normal(2, 3, 4).sigmoid(),
        "box_mask": torch.ones(2, 3, dtype=torch.bool),
        "box_labels": torch.ones(2, 3, dtype=torch.long),
        "img_feats": [maker.normal(2, WIDTH, 4, 4)],
    }


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
TEXT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": {**TEXT_ROPE, "mrope_section": [2, 3, 3]}}
ERNIE = {"rope_parameters": {**TEXT_ROPE, "mrope_section": [22, 22, 20]}}
COMPASS = {"rope_parameters": {"full_attention": {**TEXT_ROPE, "mrope_section": [2, 3, 3]}}}
VQ = {"base_channels": 32, "channel_multiplier": (1, 1), "num_res_blocks": 1, "resolution": 32}
CODES = {f"IMGIMG{chr(65 + i)}Z": 100 + i for i in range(8)} | {"<image>": 120}
VISUAL = {f"<|visual token {i:06d}|>": 100 + i for i in range(8)}
VISUAL |= {"<image>": 120, "<|extra_200|>": 121}
CLVP = {"hidden_size": 128, "projection_dim": 128, "intermediate_size": 96}
DOTS = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    "rope_parameters": None, "index_topk": 4,
}  # fmt: skip
GRANITE_TILES = {
    "downsample_rate": "1/2",
    "deepstack_layer_map": [(-1, 0)],
    "image_grid_pinpoints": [[32, 64]],
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"}
KEYPOINTS = {"keypoint_decoder_dim": 65, "encoder_hidden_sizes": [8, 8, 8, 64]}
STAGES = {
    "stage_num_blocks": [1, 1, 1, 1],
    "out_features": [16, 16, 32, 64],
    "hidden_size": 64,
    "num_attention_heads": 8,
}
OMNI_START = {"vision_start_token_id": 230, "vision_end_token_id": 231}
PROJECTED = {"out_hidden_size": 256, "projector_hidden_size": 64}
T5GEMMA = {"dropout_rate": 0.0}
SAM = {"image_size": 32, "patch_size": 8, "downsample_channels": [32, 64], "mlp_dim": 64}
OCR = {"sam_config": SAM, "encoder_config": {"hidden_size": 64}}

AUDIO = ("input_features", "feature_attention_mask")
MUSE_AUDIO = {"num_hidden_layers": 4, "hidden_sizes": (16, 32, 32, 64)}
DAC = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "hidden_size": 32, "hop_length": 8}
VIT = {
    "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 32, "patch_size": 8, "num_labels": 32,
}  # fmt: skip
MEMORY = {"memory_attention_rope_feat_sizes": [24, 22]}
PE_ENCODER = {
    "audio_config": {"dac_config": DAC},
    "video_config": {"vision_config": VIT},
}
CODEC = {"encoder_hidden_size": 4, "quantization_dim": 128}
BIGVGAN = {
    "mel_dim": 16,
    "upsample_initial_channel": 16,
    "upsample_rates": (5, 3),
    "upsample_kernel_sizes": (11, 7),
}
DIT = {
    "enc_channels": (16, 16, 16, 16, 48), "enc_dim": 16, "enc_emb_dim": 16, "emb_dim": 16, "mel_dim": 16,
    "num_embeds": 64, "block_size": 8,
}  # fmt: skip
TOKEN2WAV = {"bigvgan_config": BIGVGAN, "dit_config": DIT}
TALKER = {"shared_expert_intermediate_size": 48}
ATOMS = {"num_uid_rope_pairs": 2}
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "jamba": Family({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}),
    "bamba": Family({**MAMBA, "attn_layer_indices": [1]}),
    "recurrent_gemma": Family({"num_hidden_layers": 3}),
    "falcon_h1": Family({**MAMBA, "mamba_d_ssm": 128}),
    "granitemoehybrid": Family({**MAMBA, **HYBRID}),
    "chameleon": Family({"vocabulary_map": CODES, "vq_config": VQ}, without=("pixel_values",)),
    "emu3": Family(
        {"vocabulary_map": VISUAL, "vq_config": VQ}, without=("pixel_values", "image_sizes")
    ),
    "clvp": Family({"text_config": CLVP, "speech_config": CLVP}),
    "clvp_encoder": Family(CLVP),
    "cohere_compass": Family({"text_config": COMPASS}),
    "cohere_compass_text": Family(COMPASS),
    "deepseek_ocr2": Family({"text_config": {"mlp_layer_types": ["dense", "sparse"]}, "vision_config": OCR}),
    "deepseek_ocr2_vision": Family(OCR),
    "deepseek_ocr2_encoder": Family(
        inputs=lambda m: {"inputs_embeds": m.normal(2, 14, 64), "num_patches": 7}
    ),
    "deepseek_ocr2_text": Family({"mlp_layer_types": ["dense", "sparse"]}),
    "ernie4_5_vl_moe": Family({"text_config": ERNIE}),
    "ernie4_5_vl_moe_text": Family(ERNIE),
    "esm": Family({"vocab_size": 128, "position_embedding_type": "rotary", "pad_token_id": 1}),
    "dbrx": Family({"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}}),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "kimi_k25": Family(patches="square"),
    "kimi_k25_vision": Family(patches="square"),
    "aria": Family({"projector_patch_to_query_dict": {16: 4}}),
    "paddleocr_vl_text": Family(MROPE),
    "paddleocr_vl": Family({"text_config": MROPE}, patches="square"),
    "paddleocr_vl_vision": Family(patches="batch"),
    "wav2vec2-conformer": Family({"position_embeddings_type": "rotary", "vocab_size": 64}),
    "wav2vec2-bert": Family(
        {"position_embeddings_type": "rotary", "vocab_size": 64}, inputs=speech_rows
    ),
    "seamless_m4t": Family(
        {"position_embeddings_type": "rotary", "pad_token_id": 0}, speech_rows,
        model="SeamlessM4TForSpeechToText",
    ),
    "dots3_note_text": Family(DOTS),
    "dots3_note": Family({"text_config": DOTS}, without=AUDIO),
    "hunyuan_vl": Family(grids=((1, 4, 6), (1, 4, 6))),
    # Many channels, as the model's gradients of many rows are not deterministic on several threads.
    "bailing_hybrid": Family({"qk_rope_head_dim": 80}, lambda m: {"input_ids": m.ids(60)}),
    "muse_glimmer": Family(PROJECTED),
    "muse_spark": Family({**PROJECTED, "audio_config": MUSE_AUDIO}),
    "mllama": Family({"vision_config": {"vision_output_dim": 128}}, inputs=tiles),
    "mllama_vision_model": Family(inputs=tiles),
    "lightglue": Family(
        {"keypoint_detector_config": KEYPOINTS},
        inputs=lambda m: {"pixel_values": m.normal(2, 2, 3, 64, 64)},
    ),
    "qwen2_5_omni_thinker": Family(OMNI_START),
    "qwen3_omni_moe_thinker": Family(OMNI_START, without=AUDIO),
    "qwen3_omni_moe_talker_text": Family(
        TALKER, without=("input_ids",)
    ),
    "qwen4_exp_text": Family(
        INDEXER
    ),
    "llama4_vision_model": Family({"intermediate_size": 256, "hidden_size": 64}),
    "llama4": Family({"vision_config": {"intermediate_size": 256}}),
    "gemma4_vision": Family(inputs=patches_with_places),
    "neomme": Family(inputs=lambda m: {"pixel_values": m.normal(8, 192)}),
    "idefics": Family(
        inputs=lambda m: {
            "pixel_values": m.normal(2, 1, 3, 32, 32),
            "image_attention_mask": torch.ones(2, 14, 1, dtype=torch.long),
        }
    ),
    "video_llama_3": Family(inputs=lambda _: {"image_merge_sizes": torch.tensor([2, 2])}),
    "video_llama_3_vision": Family(inputs=lambda _: {"merge_sizes": torch.tensor([2, 2])}),
    "sapiens2": Family({"num_key_value_heads_per_layer": [4, 2]}),
    "inkling2": Family(patches="folded"),
    "inkling2_vision": Family(patches="folded"),
    "muse_spark_audio": Family(MUSE_AUDIO),
    "granite_docling": Family(
        inputs=lambda m: {
            "pixel_values": m.normal(2, 1, 3, 32, 32),
            "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
        }
    ),
    "granite4_vision": Family(GRANITE_TILES, wide_images),
    "csm": Family(without=("input_values",)),
    "molmo2": Family(without=("pixel_values",)),
    "molmo2_vision": Family(
        {"num_position_embeddings": 16}, inputs=lambda m: {"pixel_values": m.normal(2, 16, 192)}
    ),
    "gemma4": Family(without=("pixel_values", "input_features")),
    "gemma4_unified": Family(without=("pixel_values", "input_features")),
    "embedding_gemma2": Family(without=("pixel_values", "input_features")),
    "glm_image": Family(without=("pixel_values", "image_grid_thw")),
    "timesfm2_5": Family(
        inputs=lambda m: {"past_values": [m.normal(64), m.normal(64)]},
        model="TimesFm2_5ModelForPrediction",
    ),
    "dia": Family(inputs=lambda m: {"decoder_input_ids": m.ids(14)[..., None].repeat(1, 1, 9)}),
    "dia_decoder": Family(
        inputs=lambda m: {
            "input_ids": m.ids(14)[..., None].repeat(1, 1, 9),
            "encoder_hidden_states": m.normal(2, 14, 64),
        }
    ),
    "blt": Family({"encoder_hash_byte_group_vocab": 64}, inputs=lambda _: {"use_cache": False}),
    "zamba2": Family(
        {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2,
         "use_mem_rope": True, "n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 8}
    ),
    "beam": Family({"rope_parameters": {"full_attention": TEXT_ROPE, "sliding_attention": TEXT_ROPE}}),
    "efficientloftr": Family(STAGES, matched, part="local_feature_transformer"),
    "vjepa2": Family({"crop_size": 32, "frames_per_clip": 4}),
    "pe_audio_video": Family(
        {"audio_video_config": PE_ENCODER}, lambda m: {**one_channel(m), **pixel_videos(m)}
    ),
    "musicflamingo": Family({"audio_config": {"max_source_positions": 32}}, music),
    "glmasr": Family({"audio_config": {"intermediate_size": 256}}),
    "moonshine_streaming": Family({"num_key_value_heads": 4}),
    "t5gemma2_text": Family(T5GEMMA),
    "t5gemma2_encoder": Family({"text_config": T5GEMMA}),
    "t5gemma2_decoder": Family(
        T5GEMMA, lambda m: {"encoder_hidden_states": m.normal(2, 14, 64)}
    ),
    "voxtral_realtime_text": Family(inputs=lambda m: {"t_cond": m.normal(1, 1, 64)}),
    "voxtral_realtime": Family(inputs=lambda m: {"input_features": m.normal(2, 16, 112)}),
    "csm_depth_decoder_model": Family({"num_codebooks": 16}),
    "moshi_depth": Family(
        {"num_codebooks": 14, "input_size": 64}, inputs=lambda m: {"last_hidden_state": m.normal(2, 1, 64)}
    ),
    "kyutai_speech_to_text": Family(inputs=lambda m: {"input_ids": m.ids(14)[..., None].repeat(1, 1, 3)}),
    "mimi_decoder": Family(inputs=lambda m: {"latents": m.normal(2, 64, 8)}),
    "pocket_tts_audio_tokenizer_decoder": Family(inputs=lambda m: {"latents": m.normal(2, 64, 8)}),
    "pe_audio": Family({"audio_config": {"dac_config": DAC}}, one_channel),
    "pe_audio_encoder": Family({"dac_config": DAC}, one_channel),
    "pe_video": Family({"video_config": {"vision_config": VIT}}, pixel_videos),
    "pe_video_encoder": Family({"vision_config": VIT}, pixel_videos),
    "pe_audio_video_encoder": Family(PE_ENCODER, lambda m: {**one_channel(m), **pixel_videos(m)}),
    "neucodec": Family(CODEC, codec_rows, without=("input_features_mask", "padding_mask")),
    "xcodec2": Family(CODEC, codec_rows, without=("input_features_mask", "padding_mask")),
    "sam2_video": Family(MEMORY, memory, part="memory_attention"),
    "sam3_tracker_video": Family({**MEMORY, "image_size": 184}, memory, part="memory_attention"),
    "edgetam_video": Family(
        {**MEMORY, "memory_attention_rope_k_sizes": [4, 4]}, pooled_memory, part="memory_attention"
    ),
    "qwen2_5_omni_dit": Family(
        DIT,
        inputs=lambda m: {
            "hidden_states": m.normal(1, 20, 16),
            "condition_vector": m.normal(1, 20, 16),
            "speaker_embedding": m.normal(1, 20, 16),
            "quantized_code": m.ids(10, 60)[:1] % 60,
            "time_step": torch.tensor([0.3]),
        },
        attention="sdpa",
    ),
    "muse_glimmer_assistant": Family(
        inputs=lambda m: {
            "noise_embeds": m.normal(2, 4, 64),
            "context_hidden_states": m.normal(2, 10, 64 * len(m.config.target_layer_ids)),
        }
    ),
    "qwen4_exp": Family({"text_config": INDEXER}),
    "qwen3_omni_moe_talker_code_predictor": Family(
        model="Qwen3OmniMoeTalkerCodePredictorModel", without=("input_ids",)
    ),
    "unlimited_ocr": Family({"vision_config": OCR}),
    "unlimited_ocr_vision": Family(OCR),
    "unlimited_ocr_vision_encoder": Family(inputs=lambda m: {"patch_embeds": m.normal(2, 64, 4, 4)}),
    "blt_local_encoder": Family(
        inputs=lambda m: {
            "input_ids": m.ids(14), "num_patches": 5, "patch_ids": (torch.arange(14) // 3).expand(2, -1),
        }
    ),
    "blt_local_decoder": Family(
        inputs=lambda m: {"inputs_embeds": m.normal(2, 14, 64), "patch_embeds": m.normal(2, 5, 64)},
        without=("input_ids",),
    ),
    "chameleon_vqgan": Family(VQ, part="encode"),
    "emu3_vqgan": Family({**VQ, "hidden_size": 32}, part="encode"),
    "glm_image_vqmodel": Family(
        inputs=lambda m: {"hidden_states": m.normal(2, m.config.latent_channels, 4, 4)}, part="encode"
    ),
    "dots3_note_audio_encoder": Family(
        inputs=lambda _: {"chunk_sample_lengths": torch.tensor([64 * 160, 48 * 160])}
    ),
    "gemma3n_audio": Family(
        inputs=lambda m: {
            "audio_mel": m.normal(2, 64, m.config.input_feat_size),
            "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
        }
    ),
    "gemma4_audio": Family(
        inputs=lambda m: {
            "input_features": m.normal(2, 64, 128), "attention_mask": torch.ones(2, 64, dtype=torch.bool),
        }
    ),
    "idefics_vision": Family(model="IdeficsVisionTransformer"),
    "molmo2_adapter": Family(
        inputs=lambda m: {
            "image_features": m.normal(2, 16, 64 * len(m.config.vision_feature_layer)),
            "pooled_patches_idx": torch.arange(32).view(8, 4),
        }
    ),
    "phi4_multimodal_audio": Family(
        {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64},
        inputs=lambda m: {
            "hidden_states": m.normal(2, 64, m.config.input_size),
            "mask": torch.ones(2, 64, dtype=torch.bool),
        }
    ),
    "qwen2_5_omni": Family(
        {"thinker_config": OMNI_START, "token2wav_config": TOKEN2WAV}, part="thinker"
    ),
    "qwen2_5_omni_audio_encoder": Family(inputs=audio_rows),
    "qwen2_5_omni_bigvgan": Family(
        BIGVGAN, lambda m: {"mel_spectrogram": m.normal(1, 16, 20)}
    ),
    "qwen2_5_omni_token2wav": Family(TOKEN2WAV, speech),
    "qwen3_omni_moe": Family(
        {"thinker_config": OMNI_START, "talker_config": {"text_config": TALKER, "spatial_merge_size": 2}},
        without=AUDIO, part="thinker",
    ),
    "qwen3_omni_moe_audio_encoder": Family(inputs=audio_rows),
    "edgetam_video_mask_decoder": Family(inputs=masks, model="EdgeTamVideoMaskDecoder"),
    "edgetam_video_prompt_encoder": Family(inputs=points, model="EdgeTamVideoPromptEncoder"),
    "sam2_video_mask_decoder": Family(inputs=masks, model="Sam2VideoMaskDecoder"),
    "sam2_video_prompt_encoder": Family(inputs=points, model="Sam2VideoPromptEncoder"),
    "sam3_tracker_video_mask_decoder": Family(inputs=masks, model="Sam3TrackerVideoMaskDecoder"),
    "sam3_tracker_video_prompt_encoder": Family(inputs=points, model="Sam3TrackerVideoPromptEncoder"),
    "sam3_geometry_encoder": Family(inputs=boxes, model="Sam3GeometryEncoder"),
    "sam3_detr_encoder": Family(
        inputs=lambda m: {
            "vision_features": [m.normal(2, 64, 4, 4)], "text_features": m.normal(2, 5, 64),
            "vision_pos_embeds": [m.normal(2, 64, 4, 4)],
        }
    ),
    "sam3_detr_decoder": Family(
        inputs=lambda m: {
            "vision_features": m.normal(2, 16, 64), "text_features": m.normal(2, 5, 64),
            "vision_pos_encoding": m.normal(2, 16, 64), "spatial_shapes": torch.tensor([[4, 4]]),
        }
    ),
    "sam3_mask_decoder": Family(
        inputs=lambda m: {
            "decoder_queries": m.normal(2, 5, 64),
            "backbone_features": [m.normal(2, 64, n, n) for n in (16, 8, 4)],
            "encoder_hidden_states": m.normal(2, 16, 64),
        }
    ),
    "esmfold2": Family(
        {
            "single_inputs_size": 131, "atom_encoder": ATOMS,
            "structure_head": {"diffusion_module": {"atom_encoder": ATOMS}},
            "esmc_config": {"vocab_size": 256},
        },
        molecules,
    ),
    "gemma4_unified_audio": Family(
        {"audio_config": {"output_proj_dims": 64}},
        inputs=lambda m: {"inputs_embeds": m.normal(2, 6, m.config.audio_config.output_proj_dims)},
        part="model.embed_audio", whole="gemma4_unified",
    ),
    "gemma4_unified_vision": Family(
        {"vision_config": {"patch_size": 4, "mm_embed_dim": 64, "output_proj_dims": 64}},
        inputs=lambda m: {
            "pixel_values": m.normal(2, 18, 3 * m.config.vision_config.model_patch_size**2),
            "image_position_ids": places(),
        },
        part="model.embed_vision", whole="gemma4_unified",
    ),
    "idefics_perciever": Family(
        {"use_resampler": True}, lambda m: {"context": m.normal(2, 16, 64)},
        part="perceiver_resampler", whole="idefics",
    ),
    "sapiens2_head": Family(
        {
            "num_key_value_heads_per_layer": [4, 2],
            "head_config": {
                "upsample_out_channels": [32], "upsample_kernel_sizes": [4], "conv_out_channels": [],
                "conv_kernel_sizes": [],
            },
        },
        lambda m: {"hidden_states": m.normal(2, 64, 4, 4)},
        model="Sapiens2ForSemanticSegmentation", part="decode_head", whole="sapiens2",
    ),
    "mlcd": Family({"image_size": 184}, one_image),
    "mlcd_vision_model": Family({"image_size": 184}, one_image),
    "t5_gemma_module": Family(T5GEMMA, model="T5GemmaEncoder"),
    "gemma3n_text": Family({"intermediate_size": 48}),
}  # fmt: skip


def of(model_type: ModelType) -> Family:
    """The exceptions for a model type, empty if there are none."""
    return FAMILIES.get(model_type.name, Family())
