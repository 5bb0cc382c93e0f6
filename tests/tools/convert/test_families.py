"""Test the table of names and packings with the models of transformers.

A small random model of a family is saved, and its checkpoint converted. The converted weights run
in the same model with its rotary function switched to the other pairing, and must give the same
hidden states. The switch only reorders channels before and after the family's own function, so a
row that was forgotten, or taken from the wrong head, is detected.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tolerances import TABLE
from tightrope import RopeSpec
from tightrope.config.families import FAMILIES
from tightrope_tools.convert import convert
from tightrope_tools.convert.naming import FAMILY_NAMING, KEY_HEADS_OPTIONAL

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

# What the configuration of a small model needs; null removes a size.
SMALL = [
    json.loads(line)
    for line in Path(__file__).with_name("families.jsonl").read_text("utf-8").splitlines()
]


def small(family: str, **own: Any) -> Any:
    """Return a configuration for a small model of a family, with these keys besides; None removes one."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    sizes: dict[str, Any] = {}
    for row in SMALL:
        if family in row["families"].split() or row["families"] == "*":
            sizes |= row["config"]
    return kind(**{key: value for key, value in (sizes | own).items() if value is not None})


def reordered(spec: RopeSpec, neighbours: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that reorders the rotated channels of a tensor to the other pairing.

    If `neighbours`, it reorders from half to interleaved pairing, else from interleaved to half.
    """

    def back(x: torch.Tensor) -> torch.Tensor:
        width = spec.rotary_dim
        first = spec.start if x.shape[-1] > width else 0
        rotated = x[..., first : first + width]
        if neighbours:
            own = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
        else:
            own = torch.cat((rotated[..., ::2], rotated[..., 1::2]), -1)
        return torch.cat((x[..., :first], own, x[..., first + width :]), -1)

    return back


@contextmanager
def switched(family: str, spec: RopeSpec) -> Iterator[None]:
    """Make a family's rotary function use the other pairing inside a `with` block."""
    folder, _, name = FAMILIES[family].source.partition(": ")
    owner: Any = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    own = getattr(owner, last)
    first = 1 if path else 0  # RoFormer's function takes the angles first

    def change(x: Any, to: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        head = isinstance(x, torch.Tensor) and x.dim() == 4 and x.is_floating_point()
        return to(x) if head else x

    def function(*args: Any, **kwargs: Any) -> Any:
        order = reordered(spec, spec.interleaved)
        args = tuple(
            change(x, order) if first <= index < first + 2 else x for index, x in enumerate(args)
        )
        kwargs = {key: change(x, order) if key in ("q", "k") else x for key, x in kwargs.items()}
        made = own(*args, **kwargs)
        order = reordered(spec, not spec.interleaved)
        if isinstance(made, tuple):
            return tuple(change(x, order) for x in made)
        return change(made, order)

    setattr(owner, last, staticmethod(function) if path else function)
    try:
        yield
    finally:
        setattr(owner, last, staticmethod(own) if path else own)


def check(before: torch.Tensor, after: torch.Tensor, forgotten: torch.Tensor) -> None:
    """Check that `before` equals `after` (pairing switched) but not `forgotten` (not switched)."""
    wrong = (before - forgotten).abs().max()
    assert wrong > TABLE["other pairing"].value * before.abs().max()
    assert (before - after).abs().max() <= TABLE["channels reordered"].value * wrong


# Families without a (small) model in transformers; the layouts among them are rows of layouts.jsonl.
ELSEWHERE = {"meta", "megatron", "internlm2", "kimi_k2", "minicpm", "solar", "mllama_text_model"}
ELSEWHERE |= {"qwen2_vl", "qwen2_5_vl"}  # their text models are tested


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", sorted(FAMILY_NAMING.keys() - ELSEWHERE))
def test_a_converted_model_computes_the_same(family: str, tmp_path: Path) -> None:
    check_conversion(family, tmp_path)


@pytest.mark.parametrize("own", [{"multi_query": True}, {"multi_query": False}], ids=str)
def test_the_older_falcons(own: dict[str, Any], tmp_path: Path) -> None:
    """One key head for all queries, or one for each, and no number of them in the configuration."""
    check_conversion("falcon", tmp_path, new_decoder_architecture=False, num_kv_heads=None, **own)


def check_conversion(family: str, tmp_path: Path, **own: Any) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(small(family, **own)).eval()
    for name, parameter in model.named_parameters():
        # Fresh norms are ones and fresh biases zeros, which would hide a wrong order.
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.config.save_pretrained(tmp_path)
    source, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    safetensors.save_model(model, str(source))
    found = RopeSpec.from_config(tmp_path, strict=False)
    spec = found if isinstance(found, RopeSpec) else next(each for each in found.values() if each)
    ids = torch.randint(4, 37, (1, 11), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids}
    if family == "moonshine":
        inputs = {"input_values": torch.randn(1, 16000), "decoder_input_ids": ids}

    done = convert(source, out, to="half" if spec.interleaved else "interleaved", verify=True)

    assert done.verified is not None
    assert done.verified.unswitched > TABLE["other pairing"].value
    with torch.no_grad():
        before = model(**inputs)[0]
        safetensors.load_model(model, str(out), strict=False)
        forgotten = model(**inputs)[0]
        with switched(family, spec):
            after = model(**inputs)[0]
    check(before, after, forgotten)


def test_a_family_with_a_key_for_it_needs_no_switch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(small("deepseek_v3")).eval()
    model.save_pretrained(tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "out", to="half")
    assert (done.marked, done.notes) == ("rope_interleave", ())
    converted = type(model).from_pretrained(tmp_path / "out").eval()
    assert converted.config.rope_interleave is False
    ids = torch.randint(4, 37, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = model(ids).logits, converted(ids).logits
        converted.load_state_dict(model.state_dict())
        forgotten = converted(ids).logits
    check(before, after, forgotten)
    convert(tmp_path / "out", tmp_path / "back", to="interleaved")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_families_whose_key_heads_are_optional() -> None:
    assert KEY_HEADS_OPTIONAL <= FAMILY_NAMING.keys()
    for family in sorted(KEY_HEADS_OPTIONAL - ELSEWHERE):
        config = small(family, num_key_value_heads=None, num_attention_heads=8)
        assert getattr(config, "num_key_value_heads", 8) == 8, family
