"""Test `inspect` and `compare` against 40- or 60-digit arithmetic and a search of all positions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpmath import mp

from tests.support import checkpoints, gguf, oracle, oracle_frequencies as papers
from tests.support.helpers import refused
from tests.support.model_configs import (
    GEMMA3_LAYERS,
    LLAMA4_SCOUT,
    MODELS,
    QWEN3_VL,
    Model,
    llama3,
    v4,
)
from tests.support.tolerances import value
from tightrope import Axes, RopeSpec, frequencies as rules
from tightrope.frequencies import DynamicNTK, Given, Linear, Llama3, LongRoPE, Proportional, YaRN
from tightrope_tools.convert import convert
from tightrope_tools.inspect import Inspection, PartReport, compare, exactness, inspect
from tightrope_tools.inspect.exactness import FLOAT32, WORDS, errors_at, exactness_of, sample
from tightrope_tools.inspect.pairs import pairs_of

LLAMA31 = v4("llama", 4096, 32, 500000.0, max_position_embeddings=131072, rope_scaling=llama3(8.0))
RULES: dict[str, tuple[rules.Rule | None, Any]] = {
    "none": (None, lambda: papers.plain(64, 1e4)),
    "linear": (Linear(4), lambda: papers.linear(64, 1e4, 4)),
    "ntk": (rules.NTK(8), lambda: papers.ntk(64, 1e4, 8)),
    "dynamic": (DynamicNTK(2, 2048), lambda: papers.dynamic_ntk(64, 1e4, 2, 2048, 8192)),
    "llama3": (Llama3(8, 1, 4, 2048), lambda: papers.llama3(64, 1e4, 8, 1, 4, 2048)),
    "proportional": (Proportional(0.5), lambda: papers.proportional(64, 1e4, 0.5)),
}


def only(config: object, **options: Any) -> PartReport:
    """Inspect a configuration with one part; return that part."""
    (part,) = inspect(config, **options).parts
    return part


def near(got: float, wanted: Any) -> bool:
    return abs(mp.mpf(got) - wanted) <= value("reported number") * abs(wanted)


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_pairs_are_those_of_the_papers(name: str) -> None:
    rule, wanted = RULES[name]
    pairs = pairs_of(RopeSpec(64, scaling=rule), 8192, 2048)
    with mp.workdps(40):
        omegas, plain = wanted(), papers.plain(64, 1e4)
        assert len(pairs) == len(omegas) == 32
        for pair, omega, unscaled in zip(pairs, omegas, plain, strict=True):
            assert near(pair.unscaled, 2 * mp.pi / unscaled)
            assert near(pair.turns_trained, 2048 * unscaled / (2 * mp.pi))
            assert near(pair.turns, 8192 * omega / (2 * mp.pi))
            if omega == 0:
                assert math.isinf(pair.wavelength)
                assert pair.effect == "stopped"
                continue
            assert near(pair.wavelength, 2 * mp.pi / omega)
            assert near(pair.slower, unscaled / omega)
            if omega == unscaled:
                assert pair.effect == "kept"


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_are_those_that_turn_together(interleaved: bool) -> None:
    spec = RopeSpec(20, rotary_dim=12, start=4, interleaved=interleaved)
    firsts, seconds = oracle.channels(12, 4, interleaved)
    pairs = pairs_of(spec, None, None)
    assert [pair.channels for pair in pairs] == list(zip(firsts, seconds, strict=True))
    assert all(pair.turns is None and pair.turns_trained is None for pair in pairs)


def test_effects_in_words() -> None:
    rule = LongRoPE((1.0, 2.0, 0.8), (1.0, 2.0, 3.25), 64, factor=4.0)
    short = pairs_of(RopeSpec(6, scaling=rule), 64, 64)
    long = pairs_of(RopeSpec(6, scaling=rule), 65, 64)
    assert [pair.effect for pair in short] == ["kept", "÷ 2", "× 1.25"]
    assert [pair.effect for pair in long] == ["kept", "÷ 2", "÷ 3.25"]


def test_a_ratio_that_only_rounds_to_one_is_not_kept() -> None:
    nearly = tuple(math.nextafter(float(omega), 0.0) for omega in RopeSpec(4).frequencies().exact)
    pairs = pairs_of(RopeSpec(4, scaling=Given(nearly)), 8, 8)
    assert [pair.effect for pair in pairs] == ["÷ 1", "÷ 1"]


def test_axes_and_heads_of_pairs() -> None:
    axial = pairs_of(RopeSpec(8, axes=Axes.blocks((2, 2))), 4, 4)
    assert [pair.axis for pair in axial] == [0, 0, 1, 1]
    assert [pair.head for pair in axial] == [None] * 4
    mixed = RopeSpec(4, scaling=Given((((1.0, 2.0),) * 3, ((3.0, 4.0),) * 3)))
    pairs = pairs_of(mixed, 4, 4)
    assert [pair.axis for pair in pairs] == [0] * 6 + [1] * 6
    assert [pair.head for pair in pairs] == [0, 0, 1, 1, 2, 2] * 2
    assert {pair.channels for pair in pairs} == {(0, 2), (1, 3)}


# --- exactness ------------------------------------------------------------------------------------

POSITIONS_SEEN = (1, 2, 3, 100, 4095, 131071, 1048575)


Tables = tuple[torch.Tensor, torch.Tensor]


def exact_tables(omegas: list[Any], position: int) -> Tables:
    cosines, sines = (
        torch.tensor([float(f(omega * position)) for omega in omegas], dtype=torch.float64)
        for f in (mp.cos, mp.sin)
    )
    return cosines, sines


def largest_error(tables: Tables, exact: Tables) -> float:
    return max(
        float((got.double() - right).abs().max()) for got, right in zip(tables, exact, strict=True)
    )


def test_errors_are_those_of_the_way_itself() -> None:
    # Implement each method other than phase words again and compare it with 60 digits at a few
    # positions.
    where = torch.tensor(POSITIONS_SEEN)
    got = errors_at(RopeSpec(64), where, None)
    with mp.workdps(60):
        omegas = papers.plain(64, 1e4)
        inv_freq = torch.tensor([float(omega) for omega in omegas], dtype=torch.float64)
        for index, position in enumerate(POSITIONS_SEEN):
            exact = exact_tables(omegas, position)
            single = inv_freq.float() * torch.tensor(float(position))
            cast = inv_freq.bfloat16().float() * torch.tensor(float(position))
            coarse = inv_freq.float() * torch.tensor(float(position)).bfloat16().float()
            ways = {
                FLOAT32: (single.cos(), single.sin()),
                exactness.TABLE: (single.cos().bfloat16(), single.sin().bfloat16()),
                exactness.FREQUENCIES: (cast.cos(), cast.sin()),
                exactness.POSITIONS: (coarse.cos(), coarse.sin()),
            }
            for name, tables in ways.items():
                wanted = largest_error(tables, exact)
                assert abs(float(got[name][index]) - wanted) <= value("float64 angle"), name
            assert float(got[WORDS][index]) <= value("float32 angle")


def test_the_largest_exact_context() -> None:
    found = exactness_of(RopeSpec(128), (4096, 131072), None)
    assert found.lengths == (4096, 131072)
    assert list(found.errors) == list(exactness.MEANING)
    assert found.reach[WORDS] == dict.fromkeys(exactness.ROUNDINGS, exactness.EXACT)
    assert exactness.TABLE not in found.reach
    # bfloat16 has 8 significant bits: 257 is the first integer that it cannot represent, and becomes 256.
    assert found.reach[exactness.POSITIONS]["bfloat16"] == 257
    for kind, limit in exactness.ROUNDINGS.items():
        reach = found.reach[FLOAT32][kind]
        all_of_them = errors_at(RopeSpec(128), torch.arange(reach + 1), None)[FLOAT32]
        assert float(all_of_them[reach]) > limit
        # Only some positions are sampled, so the first one beyond the limit may lie before `reach`.
        assert float(all_of_them[: reach // 2].max()) <= limit
    for errors in found.errors.values():
        assert list(errors) == sorted(errors)


def test_more_pairs_than_are_looked_at_together_count() -> None:
    where = torch.tensor([131071])
    both = errors_at(RopeSpec(600), where, None)
    with mp.workdps(60):
        last = papers.plain(600, 1e4)[256:]
        angle = torch.tensor([float(omega) for omega in last]) * 131071.0
        worst = largest_error((angle.cos(), angle.sin()), exact_tables(last, 131071))
    assert float(both[FLOAT32]) >= worst - value("float64 angle")


def test_samples_include_every_requested_length() -> None:
    positions = sample(5000, {4999, 4096})
    assert positions[0] == 0
    assert {4096, 4999} <= set(positions.tolist())
    assert bool((positions.diff() > 0).all())
    assert sample(1).tolist() == [0]


def test_axes_are_walked_together() -> None:
    # If all coordinates of each token are equal, M-RoPE equals RoPE with one axis.
    where = torch.tensor([17, 65537])
    plain = errors_at(RopeSpec(128), where, None)
    axes = errors_at(RopeSpec(128, axes=Axes.sections((16, 24, 24))), where, None)
    for name, wanted in plain.items():
        assert torch.equal(axes[name], wanted), name


# --- reading --------------------------------------------------------------------------------------


def test_fields_and_their_sources() -> None:
    part = only(LLAMA31)
    fields = {each.name: each for each in part.part.fields}
    assert fields["base"][1:] == (500000.0, "rope_theta")
    assert fields["scaling.factor"][1:] == (8.0, "rope_scaling.factor")
    assert part.part.context == ("max_position_embeddings", 131072)
    assert (part.context, part.trained) == (131072, 8192)
    assert part.fields[-1] == ("context", 131072, "max_position_embeddings")
    assert only(LLAMA31, context=4096).context == 4096
    assert only(LLAMA31, context=4096).fields[-1] == ("context", 4096, "as requested")


def test_a_saved_spec(tmp_path: Path) -> None:
    spec = RopeSpec(128, base=5e5, scaling=Llama3(8, 1, 4, 8192))
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.to_dict()))
    for given in (path, str(path), spec.to_dict()):
        found = inspect(given)
        assert found.form == "RopeSpec JSON"
        assert found.parts[0].spec == spec
    assert only(spec).spec == spec
    names = {each.name for each in only(spec).part.fields}
    assert names >= {"head_dim", "scaling", "scaling.factor"}
    with refused(ValueError, "[from_dict] version must be 1 but got 7."):
        inspect({**spec.to_dict(), "version": 7})


def test_every_section_that_rotates_is_read() -> None:
    found = inspect(QWEN3_VL)
    assert [part.name for part in found.parts] == ["text_config", "vision_config"]
    assert [part.spec.axis_count for part in found.parts] == [3, 2]
    assert inspect(QWEN3_VL, section="text_config").parts == found.parts[:1]


def test_layers_without_rotation_are_named() -> None:
    found = inspect(LLAMA4_SCOUT, section="text_config")
    assert [part.name for part in found.parts] == ["text_config: rope"]
    assert [part.name for part in found.without] == ["text_config: no_rope"]
    assert found.parts[0].part.layers == 36
    assert found.without[0].why_not == "these layers do not rotate"


def test_a_section_that_cannot_be_read_leaves_the_others() -> None:
    broken = {**QWEN3_VL, "vision_config": {**QWEN3_VL["vision_config"], "num_heads": "many"}}
    found = inspect(broken)
    assert [part.name for part in found.parts] == ["text_config"]
    assert "num_heads must be an int" in str(found.without[0].why_not)


@pytest.mark.parametrize(
    "length, error, about",
    [
        (0, ValueError, r"context must lie in \[1, 2147483648\] but got 0"),
        (2**31 + 1, ValueError, "but got 2147483649"),
        (1.5, TypeError, r"context must be an int but got 1\.5"),
    ],
)
def test_a_length_that_is_none(length: Any, error: type[Exception], about: str) -> None:
    with pytest.raises(error, match=rf"^\[inspect\] .*{about}\.$"):
        inspect(LLAMA31, context=length)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.origin} {model.form}")
def test_every_published_model_is_reported_whole(model: Model) -> None:
    found = inspect(model.config)
    assert found.parts
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    for part, written in zip(found.parts, document["parts"], strict=True):
        assert RopeSpec.from_dict(written["spec"]) == part.spec
        assert len(written["pairs"]) == len(part.spec.frequencies().exact)
    # No published model gets a warning, with one exception. If a configuration states no context,
    # tests/support/model_configs.py adds 8192, which may be shorter than the rule's original
    # length or equal to it.
    for part in found.parts:
        codes = {note.code for note in part.notes if note.warning}
        untold = part.part.context is not None and part.part.context[1] == 8192
        assert codes <= ({"original-length"} if untold else set())


# --- notes ----------------------------------------------------------------------------------------


def codes(spec: RopeSpec, context: int | None = 4096, *, warning: bool | None = None) -> set[str]:
    part = only(spec, context=context)
    return {note.code for note in part.notes if warning is None or note.warning == warning}


PLAIN = v4("llama", 4096, 32, 10000.0)
WINDOWS = v4("gemma3_text", 1152, 4, 1000000, head_dim=256, layer_types=GEMMA3_LAYERS)
WINDOWS |= {"rope_local_base_freq": 10000, "max_position_embeddings": 131072}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "config, wanted",
    [
        ({**PLAIN, "max_position_embeddings": 131072}, {"usual-base"}),
        ({**PLAIN, "rope_theta": 1.0}, {"base"}),
        ({**PLAIN, "rope_theta": 0.5}, {"base"}),
        ({**LLAMA31, "max_position_embeddings": 4096}, {"original-length"}),
        ({**LLAMA31, "max_position_embeddings": 8192}, {"original-length"}),
        ({**PLAIN, "rope_scaling": {"type": "linear", "factor": 1.0}}, {"no-effect"}),
        ({**PLAIN, "max_position_embeddings": 131072, "rope_scaling": YARN}, {"factor"}),
        (RopeSpec(128, scaling=YaRN(4.0, 4096, mscale_all_dim=1.0)), {"stacks-differ"}),
        (LLAMA31, set()),
        (WINDOWS, set()),  # windows may have the usual base
        ({**PLAIN, "max_position_embeddings": 4096}, set()),
    ],
)
def test_warnings(config: dict[str, Any], wanted: set[str]) -> None:
    assert {note.code for note in inspect(config).warnings} == wanted


@pytest.mark.parametrize(
    "spec, wanted",
    [
        # A configuration with such a factor is refused.
        (RopeSpec(128, scaling=Linear(0.5)), {"factor"}),
        (RopeSpec(128, scaling=DynamicNTK(0.5, 4096)), {"factor"}),
        (RopeSpec(4, scaling=LongRoPE((1.0, 1.0), (1.0, 2.0), 64, factor=0.5)), {"factor"}),
        # A rule by length has an effect.
        (RopeSpec(128, scaling=DynamicNTK(2, 4096)), set()),
        (RopeSpec(4, scaling=LongRoPE((1.0, 0.9), (1.0, 2.0), 64, factor=4.0)), {"divisors"}),
    ],
)
def test_warnings_about_a_spec(spec: RopeSpec, wanted: set[str]) -> None:
    assert codes(spec, warning=True) == wanted


@pytest.mark.parametrize(
    "spec, context, code, about",
    [
        (
            RopeSpec(128),
            4096,
            "never-turn",
            "18 of 64 pairs never complete a turn within the 4,096",
        ),
        (RopeSpec(128, base=1000.0), 8192, "wraps", "the slowest in 5,640 of 8,192 positions"),
        (RopeSpec(8, scaling=Proportional(0.5)), 64, "no-rotation", "2 of 4 pairs do not turn"),
        (RopeSpec(128), 300, "16-bit", "Up to position 299 cosines are wrong by up to"),
        (RopeSpec(128), 131072, "float32", "times the rounding of a bfloat16"),
        (RopeSpec(128, scaling=DynamicNTK(2, 2048)), 4096, "by-length", "Beyond 2,048 positions"),
        (
            RopeSpec(64, scaling=YaRN(40, 4096, mscale=1.0, mscale_all_dim=1.0)),
            163840,
            "softmax",
            "softmax scale by 1.87385",
        ),
    ],
)
def test_notes(spec: RopeSpec, context: int, code: str, about: str) -> None:
    (note,) = [note for note in only(spec, context=context).notes if note.code == code]
    assert not note.warning
    assert about in note.text


def test_angles_that_training_has_not_shown() -> None:
    # Llama 3.1 divides its lowest frequencies by 8 and extends the context 16 times. YaRN(4)
    # reaches no new angles in a context 4 times as long, but does in one 8 times as long.
    (note,) = [note for note in only(LLAMA31).notes if note.code == "unseen-angles"]
    assert "up to 2 times as far" in note.text
    yarn = RopeSpec(128, scaling=YaRN(4, 4096))
    assert "unseen-angles" not in codes(yarn, 16384)
    assert "unseen-angles" in codes(yarn, 32768)


def test_short_contexts_are_fine_in_float32() -> None:
    assert "float32" not in codes(RopeSpec(128), 4096)
    assert codes(RopeSpec(128), 1) == {"never-turn"}


# --- two configurations ---------------------------------------------------------------------------


def both(one: RopeSpec, other: RopeSpec, context: int = 500) -> Any:
    made = compare(inspect(one, context=context), inspect(other, context=context))
    (part,) = made.parts
    return part


@pytest.mark.parametrize(
    "other",
    [
        RopeSpec(16, base=5e5),
        RopeSpec(16, scaling=Linear(4)),
        RopeSpec(16, scaling=YaRN(4, 64)),
        RopeSpec(16, scaling=Given((0.5, 9.0, -1.0, 7.0, 0.0, 2.0, 3.0, 4.0))),
        RopeSpec(16, scaling=Linear(1.001)),
    ],
)
def test_the_largest_disagreement_is_that_of_counting(other: RopeSpec) -> None:
    apart = both(RopeSpec(16), other).disagreement
    with mp.workdps(40):
        mine, theirs = (
            [mp.mpf(str(omega)) for omega in spec.frequencies(500).exact]
            for spec in (RopeSpec(16), other)
        )

        def distance(position: int, pair: int) -> Any:
            angle = mp.fmod(abs(mine[pair] - theirs[pair]) * position, 2 * mp.pi)
            return min(angle, 2 * mp.pi - angle)

        everywhere = [
            (distance(position, pair), position) for position in range(500) for pair in range(8)
        ]
        largest = max(angle for angle, _ in everywhere)
        assert near(apart.largest, distance(apart.position, apart.pair))
        # If the angles of a pair come to differ by half a turn, `largest` is taken where they first
        # do, but a later position may be slightly nearer to half a turn.
        assert apart.largest >= min(largest * (1 - value("reported number")), mp.pi * 0.9)
        for limit, first in ((0.01, apart.noticed), (1.0, apart.lost)):
            wanted = min((p for angle, p in everywhere if angle >= limit), default=None)
            assert first == wanted


def test_equal_rotations_are_alike_under_any_name() -> None:
    part = both(RopeSpec(16), RopeSpec(16, scaling=Linear(1.0)))
    assert part.alike
    assert [each.field for each in part.differences] == ["scaling", "scaling.factor"]
    assert (part.disagreement.largest, part.disagreement.noticed) == (0.0, None)
    assert both(RopeSpec(16), RopeSpec(16)).differences == ()


@pytest.mark.parametrize(
    "other, why",
    [
        (RopeSpec(16, interleaved=True), "the pairings differ: half and interleaved"),
        (RopeSpec(16, rotary_dim=8), "16 channels rotate in one and 8 in the other"),
        (RopeSpec(18, rotary_dim=16, start=2), "different channels rotate"),
        (RopeSpec(16, base=5e5), "7 of 8 pairs have different frequencies"),
        (
            RopeSpec(16, axes=Axes.sections((4, 4))),
            "the coordinates of positions, or the pairs that they turn, differ",
        ),
        (
            RopeSpec(16, scaling=YaRN(1, 64, attention_factor=2.0)),
            "scaled by 1 in one and 2 in the other",
        ),
        (
            RopeSpec(16, scaling=YaRN(40, 64, mscale=1.0, mscale_all_dim=1.0)),
            "the factors on the softmax scale are 1 in one and 1.87385 in the other",
        ),
    ],
)
def test_why_two_are_unlike(other: RopeSpec, why: str) -> None:
    part = both(RopeSpec(16), other)
    assert not part.alike
    assert any(why in reason for reason in part.why), part.why
    # Other numbers of pairs are not compared.
    assert (part.disagreement is None) == (other.rotary_dim == 8)


def test_parts_belong_together_by_name() -> None:
    one, other = inspect(QWEN3_VL), inspect(QWEN3_VL)
    assert compare(one, other).alike
    assert len(compare(one, other).parts) == 2
    text = inspect(QWEN3_VL, section="text_config")
    assert [part.alike for part in compare(text, other).parts] == [True, False]
    renamed = [
        replace(part, part=replace(part.part, name=f"new {part.name}")) for part in one.parts
    ]
    apart = compare(replace(one, parts=(one.parts[0], renamed[1])), other)
    assert apart.unmatched == ("new vision_config", "vision_config")
    assert not apart.alike


def test_nothing_to_compare() -> None:
    one = inspect(PLAIN)
    empty = Inspection("other.json", "nothing", (), ())
    with refused(ValueError, "[compare] both models must have RoPE but other.json has none."):
        compare(one, empty)


# --- configurations beside converted weights ------------------------------------------------------


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("asked", ["folder", "file"])
def test_the_record_of_a_conversion_states_the_pairing(
    tmp_path: Path, asked: str, single: bool
) -> None:
    """The conversion record decides the pairing; without it, the pairing of Llama is half."""
    source = checkpoints.write(tmp_path / "a", checkpoints.llama_tensors())
    there = tmp_path / "b"
    if single:
        there.mkdir()
        convert(source / "model.safetensors", there / "model.safetensors", to="interleaved")
        (there / "config.json").write_bytes((source / "config.json").read_bytes())
        who = "the conversion record in model.safetensors"
    else:
        convert(source, there, to="interleaved")
        who = "the conversion record tightrope_convert.json"
    target = there if asked == "folder" else there / "config.json"
    (part,) = inspect(target).parts
    assert part.spec.interleaved
    assert {row.name: row.source for row in part.part.fields}["interleaved"] == who
    # The user's choice has priority; without a record, the family decides.
    assert not inspect(target, interleaved=False).parts[0].spec.interleaved
    (there / "model.safetensors").unlink()
    (there / "tightrope_convert.json").unlink(missing_ok=True)
    assert not inspect(target).parts[0].spec.interleaved
    assert not inspect(source).parts[0].spec.interleaved


def test_a_record_beside_another_configuration(tmp_path: Path) -> None:
    source = checkpoints.write(tmp_path / "a", checkpoints.llama_tensors())
    convert(source, tmp_path / "b", to="interleaved")
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    sections = {
        "model_type": "qwen2_5_vl",
        "text_config": {"hidden_size": 32, "num_attention_heads": 4, **rope},
        "vision_config": {"hidden_size": 32, "num_heads": 4},
    }
    there = tmp_path / "b/config.json"
    there.write_text(json.dumps(sections), encoding="utf-8")
    # The record is about the outer level of a Llama, which this is not.
    text = (
        "states the pairing of .* and others but not which section of this configuration describes"
    )
    for section in (None, "text_config", "vision_config"):
        with pytest.raises(ValueError, match=text):
            inspect(there, section=section)
    assert inspect(there, section="text_config", interleaved=True).parts[0].spec.interleaved


FLUX = {"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128}


@pytest.mark.parametrize(
    "config",
    [{**FLUX, "axes_dims_rope": [16, 56, 56]}, {"architecture": "vit_base_patch16_rope_224"}],
    ids=["diffusers", "timm"],
)
def test_configurations_of_other_libraries_are_read(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (part,) = inspect(tmp_path).parts
    assert part.spec == RopeSpec.from_config(tmp_path)


def test_a_gguf_file_is_read(tmp_path: Path) -> None:
    (part,) = inspect(gguf.write(tmp_path / "model.gguf")).parts
    assert part.spec == RopeSpec(128, base=5e5, interleaved=True)
    assert part.part.context == ("llama.context_length", 131072)
    assert {each.source for each in part.part.fields} >= {"llama.rope.freq_base"}


def test_a_warning_points_at_the_line_of_the_caller() -> None:
    config = {**MODELS[0].config, "rope_unknown": 1}
    with pytest.warns(UserWarning, match="rope_unknown") as caught:
        inspect(config, strict=False)
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
