"""Make inputs for a model of transformers from the parameter names of its forward."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import torch

from .building import made
from .comparing import part_of

WIDTH = 64
# First id of special tokens; ordinary tokens have smaller ids.
SPECIAL = 160

BATCH = 2
TOKENS = 14
FRAMES = 64
# Six frames of codecs with 1,920 samples per frame.
SAMPLES = 11_520


# The patches of the two images of a batch, as (time, rows, columns); rows and columns differ.
GRIDS = ((1, 4, 6), (1, 6, 4))


class Maker:
    """Make the inputs of one model, with one method per kind of input.

    Args:
        entry: the exceptions for the model's type; see `building`.
    """

    def __init__(self, model: Any, config: Any, entry: dict[str, Any]) -> None:
        self.whole = model
        self.model = part_of(model, entry.get("part", ""))
        self.config = config
        self.given = entry.get("inputs", {})
        self.without = entry.get("without", ())
        self.grids = entry.get("grids", GRIDS)
        self.patches = entry.get("patches", "flat")
        parameters = inspect.signature(getattr(self.model, "forward", self.model)).parameters
        self.names = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
        self.required = [
            n
            for n, p in parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        self.generator = torch.Generator().manual_seed(3)
        self.made: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the inputs.

        Raises:
            ValueError: a required input cannot be made.
        """
        if isinstance(self.given, str):
            given = SPECIAL_INPUTS[self.given](self)
        else:
            given = made(self.given, self.generator, self.ids)
        self.made.update(given)
        for names, make in (
            (("pixel_values", "grid_thw", "image_grid_thw"), self.images),
            (("input_features", "input_values"), self.audio),
        ):
            if any(n in self.names and n not in self.without for n in names):
                make()
        if "pixel_values_videos" in self.required:
            self.videos()
        if "input_ids" in self.names and "input_ids" not in self.without:
            self.text()
        elif "inputs_embeds" in self.names and not self.made:
            self.embeddings()
        if "decoder_input_ids" in self.names:
            self.put("decoder_input_ids", self.ids(TOKENS))
        missing = [n for n in self.required if n not in self.made]
        if missing:
            raise ValueError(f"no input for {', '.join(missing)}")
        return {
            n: v
            for n, v in self.made.items()
            if n in given or (n in self.names and n not in self.without)
        }

    def put(self, name: str, value: Any) -> None:
        """Set an input, unless it was made before."""
        self.made.setdefault(name, value)

    def normal(self, *shape: int) -> torch.Tensor:
        """Random normal values with a fixed seed."""
        return torch.randn(*shape, generator=self.generator)

    def ids(self, tokens: int, low: int = 4) -> torch.Tensor:
        """Random ids of ordinary tokens."""
        vocabulary = min(SPECIAL, setting(self.config, "vocab_size") or SPECIAL)
        return torch.randint(low, vocabulary, (BATCH, tokens), generator=self.generator)

    def text(self) -> None:
        """Make `input_ids` with one placeholder token per image or audio feature."""
        if "input_ids" in self.made:
            return
        ids = self.ids(TOKENS)
        kinds = torch.zeros_like(ids)
        for kind, names, getter, given in PLACEHOLDERS:
            token = next((t for n in names if (t := setting(self.config, n)) is not None), None)
            # The method may be on the inner model.
            inner = getattr(self.model, "model", None)
            find = getattr(inner, getter, None) or getattr(self.model, getter, None)
            if token is None or find is None or not any(n in self.made for n in given):
                continue
            count = self.features(find)
            start = setting(self.config, "vision_start_token_id")
            end = setting(self.config, "vision_end_token_id")
            row = (
                [start] * (start is not None)
                + [token] * (count // BATCH)
                + [end] * (end is not None)
            )
            part = torch.tensor(row).expand(BATCH, -1)
            ids = torch.cat([ids[:, :4], part, ids[:, 4:]], 1)
            mark = (part == token).long() * kind
            kinds = torch.cat([kinds[:, :4], mark, kinds[:, 4:]], 1)
        self.put("input_ids", ids)
        if "attention_mask" in self.names:
            self.put("attention_mask", torch.ones_like(ids))
        if "mm_token_type_ids" in self.names:
            self.put("mm_token_type_ids", kinds)
        if "token_type_ids" in self.names and "pixel_values" in self.made:
            self.put("token_type_ids", kinds)

    def features(self, find: Callable[..., Any]) -> int:
        """The number of feature rows that `find`, a method of the model, makes from the inputs."""
        wanted = inspect.signature(find).parameters
        given = {n: v for n, v in self.made.items() if n in wanted}
        with torch.no_grad():
            out = find(**given)
        value = getattr(out, "pooler_output", None)
        if value is None:
            value = out if isinstance(out, (torch.Tensor, list, tuple)) else out.last_hidden_state
        if isinstance(value, (list, tuple)):
            if value and isinstance(value[0], (list, tuple)):
                value = value[0]
            return sum(v.numel() // v.shape[-1] for v in value)
        return int(value.numel() // value.shape[-1])

    def embeddings(self) -> None:
        """Make `inputs_embeds` for a model without tokens."""
        width = setting(self.config, "hidden_size") or WIDTH
        self.put("inputs_embeds", self.normal(BATCH, TOKENS, width))

    def images(self) -> None:
        """Make pixels: rows of patches with their grids, or whole images."""
        vision = part(self.config, "vision_config")
        channels = setting(vision, "num_channels", "in_channels", "in_chans", "in_channel") or 3
        patch = square(setting(vision, "patch_size", "spatial_patch_size") or 8)
        grid = next(
            (n for n in ("image_grid_thw", "grid_thw", "image_grid_hws") if n in self.names), None
        )
        if grid:
            step = setting(vision, "temporal_patch_size", "patch_temporal") or 1
            step = step if isinstance(step, int) else step[0]
            rows = sum(math.prod(g) for g in self.grids)
            width = channels * step * patch * patch
            shape = {
                "flat": (rows, width),
                "square": (rows, channels, patch, patch),
                "batch": (1, rows, channels, patch, patch),
                "folded": (rows, 2 * patch, 2 * patch, channels),
            }[self.patches]
            pixels = self.normal(*shape)
            self.put(grid, torch.tensor(self.grids))
            for name in ("pixel_values", "hidden_states"):
                self.put(name, pixels)
            return
        size = setting(vision, "image_size", "img_size") or 32
        height, width = (size, size) if isinstance(size, int) else size
        self.put("pixel_values", self.normal(BATCH, channels, height, width))
        if "image_sizes" in self.names:
            self.put("image_sizes", torch.tensor([[height, width]] * BATCH))

    def videos(self) -> None:
        """Make videos of four frames."""
        vision = part(self.config, "vision_config")
        size = setting(vision, "image_size", "crop_size") or 32
        self.put("pixel_values_videos", self.normal(BATCH, 4, 3, size, size))

    def audio(self) -> None:
        """Make audio: features of frames, or samples."""
        audio = part(self.config, "audio_config", "encoder_config")
        bins = setting(audio, "num_mel_bins", "n_mels", "input_feat_size", "feature_size") or 16
        order = (BATCH, FRAMES, bins) if self.frames_first() else (BATCH, bins, FRAMES)
        if "input_features" in self.names:
            self.put("input_features", self.normal(*order))
            for mask in ("input_features_mask", "feature_attention_mask"):
                self.put(mask, torch.ones(BATCH, FRAMES, dtype=torch.long))
        if "input_values" in self.names:
            channels = setting(audio, "audio_channels")
            shape = (BATCH, SAMPLES) if channels is None else (BATCH, channels, SAMPLES)
            self.put("input_values", self.normal(*shape))

    def frames_first(self) -> bool:
        """Return True if features are (frames, bins)."""
        return bool(FRAMES_FIRST.search(self.config.model_type))


def matched(maker: Maker) -> dict[str, Any]:
    """Features of two pairs of images and their cos/sin, as the whole model makes them."""
    features = maker.normal(2, 2, WIDTH, 16, 24)
    cos, sin = (
        t.expand(4, -1, -1, -1).reshape(4, -1, WIDTH) for t in maker.whole.rotary_emb(features)
    )
    return {"hidden_states": features, "position_embeddings": (cos, sin)}


def music(maker: Maker) -> dict[str, Any]:
    """Token ids with a placeholder per four audio frames: the encoder halves their number twice."""
    ids = maker.ids(30)
    ids[:, 4:20] = maker.config.audio_token_id
    return {"input_ids": ids}


def molecules(maker: Maker) -> dict[str, Any]:
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


def wide_images(maker: Maker) -> dict[str, Any]:
    """Images of two tiles and a preview, and token ids with the 14 placeholders of each image."""
    ids = maker.ids(24)
    ids[:, 4:18] = maker.config.image_token_id
    sizes = torch.tensor([[32, 64]] * 2)
    return {"input_ids": ids, "pixel_values": maker.normal(2, 3, 3, 32, 32), "image_sizes": sizes}


#: Inputs that a table cannot describe, by the name that it has for them.
SPECIAL_INPUTS: dict[str, Callable[[Maker], dict[str, Any]]] = {
    each.__name__: each for each in (matched, music, molecules, wide_images)
}

FRAMES_FIRST = re.compile("lasr|parakeet|nemotron|nemo_|wav2vec2|seamless|gemma|phi4|fastspeech")

# (value in `mm_token_type_ids`, settings with the token id, method that makes features, its inputs).
PLACEHOLDERS = (
    (
        1,
        ("image_token_id", "image_token_index", "media_placeholder_token_id"),
        "get_image_features",
        ("pixel_values", "image_pixel_values"),
    ),
    (
        3,
        ("audio_token_id", "audio_token_index"),
        "get_audio_features",
        ("input_features", "input_values", "audio_input_features"),
    ),
)


def part(config: Any, *names: str) -> Any:
    """The named part of a configuration, at any depth; the configuration itself if there is none."""
    found = setting(config, *names)
    return config if found is None else found


def setting(config: Any, *names: str) -> Any:
    """The first setting that is not None, in the configuration or in its parts."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for inner in vars(config).values():
        if hasattr(inner, "to_dict"):
            value = setting(inner, *names)
            if value is not None:
                return value
    return None


def square(value: Any) -> int:
    """The side length of a patch."""
    return int(value if isinstance(value, int) else value[-1])
