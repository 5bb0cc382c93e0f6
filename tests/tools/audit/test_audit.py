"""The audit names every planted fault, and finds no error or warning in correct functions."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.support import planted_faults as planted, tolerances
from tightrope import Axes, RopeSpec, functional
from tightrope.frequencies import DynamicNTK, Linear, Llama3, YaRN
from tightrope.nn import RotaryPositionalEmbedding
from tightrope_tools.audit import Report, audit
from tightrope_tools.audit._identify import identify
from tightrope_tools.audit._targets import from_model

ONLY_FLOAT32 = {"dtypes": [torch.float32]}


def declared(fields: dict[str, Any] | None) -> RopeSpec | None:
    if fields is None:
        return None
    values = dict(fields)
    factor = values.pop("linear", None)
    return RopeSpec(**values, scaling=None if factor is None else Linear(factor))


# --- planted faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", planted.FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    fault = planted.FAULTS[name]
    report = audit(fault.bad(), spec=declared(fault.spec), **fault.options)
    assert report.codes[:1] == (fault.code,), str(report)
    assert set(report.codes) <= {fault.code, *fault.also}, str(report)
    for finding in report.findings:
        assert finding.sentence.endswith(".")
        assert finding.mend
        assert "{" not in finding.mend


# Most faults are of the same function: it is audited once for each declaration.
GOOD = {
    (fault.good, repr(fault.spec), repr(fault.options)): name
    for name, fault in planted.FAULTS.items()
}


@pytest.mark.parametrize("name", GOOD.values())
def test_without_its_fault_nothing_is_found(name: str) -> None:
    fault = planted.FAULTS[name]
    report = audit(fault.good(), spec=declared(fault.spec), **fault.options)
    assert report.ok, str(report)


def test_the_faults_are_many_and_have_many_names() -> None:
    assert len(planted.FAULTS) >= 60
    assert len({fault.code for fault in planted.FAULTS.values()}) >= 35


def unusual(positions: Callable[[torch.Tensor], torch.Tensor]) -> planted.Fn:
    """Return a rotation whose frequencies follow no known rule."""
    omega = 1 / (1 + torch.arange(32.0)) ** 2

    def fn(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        angle = planted.angles(positions(where), omega)[:, None]
        return planted.turn(x.float(), angle.cos(), angle.sin()).to(x.dtype)

    return fn


JUMPS: dict[str, tuple[Callable[[], planted.Fn], str]] = {
    "decoding": (lambda: planted.decoding(1, -1), "From offset 1 on, positions are off by -1."),
    "decoding ahead": (
        lambda: planted.decoding(300, 2),
        "From offset 300 on, positions are off by +2.",
    ),
    "from 1": (lambda: planted.jumping(1, -1), "From position 1 on, positions are off by -1."),
    "from 2": (lambda: planted.jumping(2, 1), "From position 2 on, positions are off by +1."),
    "far": (
        lambda: planted.jumping(300_000, 1),
        "From position 300,000 on, positions are off by +1.",
    ),
    "by many": (lambda: planted.jumping(1, -90), "From position 1 on, positions are off by -90."),
    "unknown frequencies": (
        lambda: unusual(lambda p: torch.where(p > 0, p - 1, p)),
        "From position 1 on, positions are off by -1.",
    ),
    "unknown frequencies, far": (
        lambda: unusual(lambda p: torch.where(p > 30_000, p - 1, p)),
        "From position 30,001 on, positions are off by -1.",
    ),
}


@pytest.mark.parametrize("name", JUMPS)
def test_positions_that_are_off_from_some_position_on(name: str) -> None:
    """Position 0 is right, so this is no offset of all positions, and no table that ends."""
    make, sentence = JUMPS[name]
    report = audit(make())
    assert report.codes == ("position-jump",), str(report)
    assert report.findings[0].sentence == sentence


@pytest.mark.parametrize("shift", [1, -1, 100])
def test_an_offset_of_all_positions(shift: int) -> None:
    report = audit(planted.rope(shift=shift))
    assert report.codes == ("position-offset",), str(report)
    (finding,) = (each for each in report.findings if each.code == "position-offset")
    assert finding.severity == "warning"
    assert finding.sentence.startswith(f"Positions are off by {shift:+d}: ")
    assert finding.evidence.endswith(
        "harmless if q and all keys go through this function, wrong with keys that other code cached"
    )


# --- real packages ----------------------------------------------------------------------------------


def test_dynamic_ntk_of_transformers_remembers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        max_position_embeddings=2048,
    )
    report = audit(config)
    assert report.codes == ("history", "batch"), str(report)
    assert "longer one" in report.findings[0].sentence
    # Without a spec, the audit also reports that frequencies depend on the length.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    blind = audit(LlamaRotaryEmbedding(config))
    assert set(blind.codes) == {"history", "batch", "length"}, str(blind)


def test_bfloat16_positions_of_rotary_embedding_torch() -> None:
    package = pytest.importorskip("rotary_embedding_torch")
    rope = package.RotaryEmbedding(64)
    report = audit(rope.rotate_queries_or_keys)
    assert set(report.codes) == {"position-dtype", "history"}, str(report)
    positions, history = report.findings[:2]
    assert positions.sentence == "Positions are rounded to bfloat16, for bfloat16 x."
    assert "float32 results are coarser after a call in bfloat16" in history.sentence
    # With float32 alone there is nothing to find.
    assert audit(rope.rotate_queries_or_keys, **ONLY_FLOAT32).ok


def gptj(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from transformers.models.gptj import modeling_gptj as module

    table = module.create_sinusoidal_positions(int(positions.max()) + 1, 64)[positions]
    sin, cos = table.to(x.dtype).chunk(2, -1)
    return module.apply_rotary_pos_emb(x, sin, cos)  # type: ignore[no-any-return]


MODELS = {
    "llama": "half (i, i + rotary_dim / 2), 0 to 127 of 128",
    "cohere": "interleaved (2i, 2i + 1), 0 to 127 of 128",
    "gpt_neox": "half (i, i + rotary_dim / 2), 0 to 23 of 96",
    "glm": "interleaved (2i, 2i + 1), 0 to 63 of 128",
    # The model cuts the slice out before the call.
    "phi": "half (i, i + rotary_dim / 2), 0 to 31 of 32",
    "deepseek_v3": "interleaved (2i, 2i + 1), 0 to 63 of 64",
    "gpt_oss": "half (i, i + rotary_dim / 2), 0 to 63 of 64",
}


@pytest.mark.parametrize("model", MODELS)
def test_no_false_alarm_on_a_model_of_transformers(model: str) -> None:
    pytest.importorskip("transformers")
    report = audit(model)
    assert report.codes == (), str(report)
    assert f"{report.facts['pairing']}, {report.facts['channels']}" == MODELS[model]
    # float32 angles give a note with the size of the error.
    (note,) = (each for each in report.findings if each.code == "angle-error")
    assert note.severity == "note"
    last = report.angle_errors[-1]
    assert last.position == 1_048_576
    assert last.float32 is not None
    assert 1e-3 < last.float32 < last.float32_angle


def apply_functions() -> dict[str, Callable[..., Any]]:
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_apply
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    return {"cohere": cohere, "gptj": gptj_apply, "llama": llama}


@pytest.mark.parametrize(
    "name, form, tables, pairing",
    [
        ("llama", "q, k, cos, sin", "cat", "half"),
        ("cohere", "q, k, cos, sin", "repeat", "interleaved"),
        ("gptj", "x, sin, cos", "half", "interleaved"),
    ],
)
def test_an_apply_function_alone(name: str, form: str, tables: str, pairing: str) -> None:
    pytest.importorskip("transformers")
    report = audit(apply_functions()[name])
    assert report.ok, str(report)
    assert report.facts["called as"] == f"fn({form})"
    assert report.facts["tables"].startswith(tables)
    assert report.facts["pairing"].startswith(pairing)


def test_a_model_whose_tables_are_made_by_a_function() -> None:
    pytest.importorskip("transformers")
    report = audit(gptj, longest=8192)
    assert report.ok, str(report)
    assert report.facts["layout"] == "bshd"
    assert report.facts["pairing"].startswith("interleaved")


def half_rotary(base: float, scaling: Any = None) -> planted.Fn:
    spec = RopeSpec(64, base, scaling=scaling)
    return lambda x, positions: functional.rotate(x, spec, positions)


OURS: dict[str, Callable[[], tuple[planted.Fn, dict[str, Any], str]]] = {
    "rotate": lambda: (half_rotary(5e5), {}, "geometric, base 500000"),
    "YaRN": lambda: (
        half_rotary(1e4, YaRN(4.0, 4096)),
        {},
        "geometric, base 10000, YaRN scaling by 4 from 4096 positions",
    ),
    "Llama 3": lambda: (
        half_rotary(5e5, Llama3(8.0, 1.0, 4.0, 8192)),
        {},
        "geometric, base 500000, Llama 3 scaling by 8 from 8192 positions",
    ),
    "linear": lambda: (
        half_rotary(1e4, Linear(4.0)),
        {},
        "geometric, base 10000, linear scaling by 4",
    ),
    "module": lambda: (RotaryPositionalEmbedding(64), {}, "geometric, base 10000"),
    "functional": lambda: (functional.rotary_pos_embedding, {}, "geometric, base 10000"),
    "dynamic NTK": lambda: (
        half_rotary(1e4, DynamicNTK(2.0, 2048)),
        {"spec": RopeSpec(64, scaling=DynamicNTK(2.0, 2048))},
        "geometric, base 10000",
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_no_false_alarm_on_tightrope(name: str) -> None:
    fn, options, frequencies = OURS[name]()
    report = audit(fn, **options)
    assert report.codes == (), str(report)
    assert report.facts["frequencies"] == frequencies
    for each in report.angle_errors:
        assert each.float32 is not None
        assert each.float32 <= 2 * tolerances.TABLE["float32 angle"].value


# --- identification ---------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    base=st.sampled_from([500.0, 10_000.0, 26_000.0, 500_000.0, 1e6, 1e7]),
    pairs=st.integers(4, 24),
    start=st.integers(0, 8).map(lambda half: 2 * half),
    interleaved=st.booleans(),
    sign=st.sampled_from([1.0, -1.0]),
)
def test_a_rotation_is_described(
    base: float, pairs: int, start: int, interleaved: bool, sign: float
) -> None:
    fn = planted.rope(
        base=base, rotary_dim=2 * pairs, start=start, interleaved=interleaved, sign=sign
    )
    report = audit(fn, **ONLY_FLOAT32, longest=8192)
    assert report.facts["channels"] == f"{start} to {start + 2 * pairs - 1} of 64"
    assert report.facts["pairing"].startswith("interleaved" if interleaved else "half")
    assert report.facts["frequencies"] == f"geometric, base {base:g}"
    assert ("sign" in report.codes) == (sign < 0)


@pytest.mark.parametrize(
    "spec", [RopeSpec(64, 1e4, scaling=Linear(3.0)), RopeSpec(128, 5e5), RopeSpec(32, 1e6)]
)
def test_frequencies_name_their_rule(spec: RopeSpec) -> None:
    found = identify(
        spec.frequencies().inv_freq.float().tolist(),
        1.0,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary_dim,
        start=0,
        interleaved=False,
    )
    assert found.spec == spec
    assert not found.loose


def test_arbitrary_frequencies_have_no_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    omegas = torch.rand(32, generator=generator).sort(descending=True).values.tolist()
    found = identify(omegas, 1.0, head_dim=64, rotary_dim=64, start=0, interleaved=False)
    assert found.spec is None
    assert found.text == "no rule that the audit knows"


def test_pairs_that_never_turn() -> None:
    omegas = [1e4 ** (-2 * k / 64) if k < 8 else 0.0 for k in range(32)]
    found = identify(omegas, 1.0, head_dim=64, rotary_dim=64, start=0, interleaved=False)
    assert found.text == "8 of 32 pairs turn; these are geometric, base 10000 over 64 channels"


# --- forms of calls ---------------------------------------------------------------------------------


def bshd(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return planted.PLAIN(x.transpose(1, 2), positions).transpose(1, 2)  # type: ignore[no-any-return]


def sbhd(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    y = planted.PLAIN(x.permute(1, 2, 0, 3), positions[None])
    return y.permute(2, 0, 1, 3)  # type: ignore[no-any-return]


def bsd(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    if x.ndim != 3:
        raise ValueError("three dimensions")
    return planted.PLAIN(x[:, None], position_ids)[:, 0]  # type: ignore[no-any-return]


def sd(x: torch.Tensor) -> torch.Tensor:
    if x.ndim != 2:
        raise ValueError("two dimensions")
    return planted.PLAIN(x[None, None], torch.arange(len(x))[None])[0, 0]  # type: ignore[no-any-return]


def thd(x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    if x.ndim != 3 or pos.ndim != 1:
        raise ValueError("x (tokens, heads, channels), pos (tokens,)")
    return planted.PLAIN(x.transpose(0, 1)[None], pos[None])[0].transpose(0, 1)  # type: ignore[no-any-return]


def shared(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if positions.ndim != 1:
        raise ValueError("one dimension")
    return planted.PLAIN(x, positions[None])  # type: ignore[no-any-return]


def offset(x: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    return planted.PLAIN(x, torch.arange(x.shape[2])[None] + offset)  # type: ignore[no-any-return]


def starts(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Take the first position of each row."""
    return planted.PLAIN(x, offsets[:, None] + torch.arange(x.shape[2]))  # type: ignore[no-any-return]


def meta(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def turn(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(z * freqs_cis[None, :, None]).flatten(3).type_as(x)

    return turn(xq), turn(xk)


class Tables(nn.Module):
    """A rotary module that returns cosines and sines, like that of a model."""

    def __init__(self, width: str) -> None:
        super().__init__()
        self.width = width

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angle = planted.angles(position_ids, planted.inv_freq())
        if self.width == "cat":
            angle = torch.cat((angle, angle), -1)
        elif self.width == "repeat":
            angle = angle.repeat_interleave(2, -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


FORMS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "bshd": (bshd, "fn(x, positions)", "bshd"),
    "sbhd": (sbhd, "fn(x, positions)", "sbhd"),
    "bsd": (bsd, "fn(x, positions)", "bsd"),
    "sd": (sd, "fn(x)", "sd"),
    "thd": (thd, "fn(x, positions)", "thd"),
    "shared positions": (shared, "fn(x, positions)", "bhsd"),
    "offset": (offset, "fn(x, offset)", "bhsd"),
    "an offset for each row": (starts, "fn(x, offset)", "bhsd"),
    "seq_dim": (planted.GrowingCache(False), "fn(x, seq_dim)", "bhsd"),
    "cis": (meta, "fn(q, k, cis)", "bshd"),
    "q, k, positions": (
        planted.on_both(planted.PLAIN, planted.PLAIN),
        "fn(q, k, positions)",
        "bhsd",
    ),
    "cat": (Tables("cat"), "fn(x, positions -> cos, sin)", "bhsd"),
    "repeat": (Tables("repeat"), "fn(x, positions -> cos, sin)", "bhsd"),
    "half": (Tables("half"), "fn(x, positions -> cos, sin)", "bhsd"),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_call_is_found(name: str) -> None:
    fn, form, layout = FORMS[name]
    report = audit(fn, longest=8192)
    assert report.ok, str(report)
    assert report.facts["called as"] == form
    assert report.facts["layout"] == layout
    assert report.facts["frequencies"] in (
        "geometric, base 10000",
        "provided by the caller, as cosines and sines",
    )


def test_arguments_without_telling_names() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return planted.PLAIN(a, b)  # type: ignore[no-any-return]

    assert audit(fn, **ONLY_FLOAT32, longest=4096).facts["called as"] == "fn(x, positions)"
    report = audit(
        fn, form="x, positions", layout="bhsd", head_dim=64, **ONLY_FLOAT32, longest=4096
    )
    assert report.ok, str(report)


def test_another_width_of_heads_is_found() -> None:
    assert audit(planted.rope(rotary_dim=128), longest=4096).facts["head_dim"] == "128"


def test_a_slice_of_wider_heads() -> None:
    report = audit(planted.rope(rotary_dim=32), head_dim=80, longest=4096)
    assert report.facts["channels"] == "0 to 31 of 80"


def test_every_check_is_reported() -> None:
    seen: list[str] = []
    report = audit(planted.rope(), progress=seen.append, longest=4096)
    assert {check.name for check in report.checks} >= set(seen)
    assert all(check.outcome == "passed" for check in report.checks), report.checks


def test_skipped_checks_have_reasons() -> None:
    report = audit(planted.with_tables())
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["angles"] == "skipped: the caller provides them"


def test_a_table_that_ends_is_a_note() -> None:
    report = audit(planted.table_of(5000, "refuse"), longest=131_072)
    assert report.ok
    (note,) = (each for each in report.findings if each.code == "table-end-refused")
    assert note.sentence == "Positions from 5,000 on are refused."
    assert "IndexError: position outside the table" in note.evidence


def cut(dim: int) -> planted.Fn:
    """Return a rotation of the first channels by tables of the caller, with each value twice."""

    def fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        u, v = x[..., :dim].chunk(2, -1)
        y = x[..., :dim] * cos + torch.cat((-v, u), -1) * sin
        return torch.cat((y, x[..., dim:]), -1)

    return fn


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, "base"),
        ({"scaling": YaRN(4.0, 4096)}, "base and scaling"),
        ({"axes": Axes.sections((4, 4))}, "base and axes"),
        ({"scaling": Linear(4.0), "axes": Axes.sections((4, 4))}, "base, scaling and axes"),
    ],
)
def test_what_tables_of_the_caller_leave_unchecked_is_a_note(
    fields: dict[str, Any], what: str
) -> None:
    report = audit(cut(16), spec=RopeSpec(32, 5e5, rotary_dim=16, **fields), **ONLY_FLOAT32)
    assert report.ok, str(report)
    (note,) = report.findings
    assert (note.code, note.severity) == ("frequencies-unchecked", "note")
    wanted = "The caller provides cosines and sines, so the audit did not check the declared "
    assert note.sentence == f"{wanted}{what}."
    assert note.mend == "audit a function of (x, positions) that makes them"
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["frequencies are as declared"] == "skipped: the caller provides them"


def test_a_factor_in_the_function_is_that_of_the_declared_scaling() -> None:
    spec = RopeSpec(32, scaling=YaRN(4.0, 4096))

    def fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return cut(32)(x, cos, sin) * spec.attention_scaling()  # type: ignore[no-any-return]

    assert audit(fn, form="x, cos, sin", spec=spec, **ONLY_FLOAT32).ok


def test_without_a_declaration_nothing_is_left_unchecked() -> None:
    assert audit(cut(32), head_dim=32, **ONLY_FLOAT32).findings == ()


def test_frequencies_that_were_checked_have_no_note() -> None:
    report = audit(planted.rope(), spec=RopeSpec(64), longest=4096)
    assert not any(each.code == "frequencies-unchecked" for each in report.findings)


@pytest.mark.parametrize(("rotated", "meant"), [(16, 32), (32, 16), (24, 32), (6, 12)])
def test_another_slice_than_the_declared_one_with_tables_of_the_caller(
    rotated: int, meant: int
) -> None:
    """Tables for the declared slice do not fit this function, so the audit makes others."""
    report = audit(cut(rotated), spec=RopeSpec(32, rotary_dim=meant), **ONLY_FLOAT32)
    assert report.codes == ("slice",), str(report)
    finding = report.findings[0]
    assert (
        finding.sentence == f"Channels 0 to {rotated - 1} rotate; 0 to {meant - 1} were declared."
    )


def test_a_slice_is_found_without_a_spec() -> None:
    report = audit(cut(16), head_dim=32, **ONLY_FLOAT32)
    assert report.codes == (), str(report)
    assert report.facts["channels"] == "0 to 15 of 32"


def test_a_wrong_sign_with_tables_of_the_caller() -> None:
    """No other slice conceals it."""
    report = audit(planted.with_tables(both_plus=True), spec=RopeSpec(64), **ONLY_FLOAT32)
    assert report.codes == ("sign-missing",), str(report)


def by_index(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return planted.turn(x, *(table[positions][:, None].to(x) for table in TABLES))


ANGLES = torch.arange(8192.0)[:, None] * planted.inv_freq()
TABLES = ANGLES.cos(), ANGLES.sin()


def test_no_tokens_have_positions_of_an_integer_type() -> None:
    """Tables that are indexed by positions accept an x with no tokens."""
    report = audit(by_index, longest=4096)
    assert report.ok, str(report)
    assert not any(each.code == "shapes" for each in report.findings), str(report)


def test_a_function_that_refuses_no_tokens_has_a_note() -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return by_index(x, positions.clamp(max=int(positions.max())))

    report = audit(fn, longest=4096)
    assert report.ok, str(report)
    (note,) = (each for each in report.findings if each.code == "shapes")
    assert note.severity == "note"
    assert note.sentence == "An x with no tokens is refused."
    assert note.evidence.startswith("RuntimeError: max(): ")


def test_float16_is_an_option() -> None:
    fn = planted.rope(by_x="p_type")
    report = audit(fn, dtypes=[torch.float32, torch.float16])
    assert "for float16 x" in report.findings[0].sentence


def test_a_function_with_a_trailing_underscore_may_write() -> None:
    def rotate_(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return IN_PLACE(x, positions)  # type: ignore[no-any-return]

    report = audit(rotate_)
    assert report.ok, str(report)
    assert any(each.code == "mutates" and each.severity == "note" for each in report.findings)


IN_PLACE = planted.rope(in_place=True)


def test_offsets_of_the_wrong_row_are_found() -> None:
    report = audit(lambda x, offsets: starts(x, offsets[:1].expand_as(offsets)))
    assert report.codes == ("row-positions",), str(report)
    assert audit(starts).facts["positions"] == "its own, from an offset for each row"


def of_the_mend(text: str) -> planted.Fn:
    """Return the call of this library that a mend states, as a function of x and positions."""
    (call,) = re.findall(r"tightrope\.functional\.(rotate\(x, .*positions.*?\))", text)
    names = {"rotate": functional.rotate, "RopeSpec": RopeSpec}
    return eval(f"lambda x, positions: {call}", names)  # type: ignore[no-any-return]


def test_the_mend_of_a_denominator_rotates_as_meant() -> None:
    for name in planted.FAULTS:
        fault = planted.FAULTS[name]
        if fault.code != "denominator":
            continue
        mend = audit(fault.bad(), spec=declared(fault.spec)).findings[0].mend
        spec = RopeSpec(64, rotary_dim=32)
        report = audit(of_the_mend(mend), spec=spec, **ONLY_FLOAT32)
        assert report.ok, str(report)


@pytest.mark.parametrize("layout, function", [("bshd", bshd), ("sbhd", sbhd)])
def test_a_mend_has_the_layout_of_the_function(layout: str, function: planted.Fn) -> None:
    spec = RopeSpec(64, 5e5)
    report = audit(function, spec=spec, **ONLY_FLOAT32, longest=4096)
    assert report.codes == ("base",), str(report)
    mended = of_the_mend(report.findings[0].mend)
    again = audit(mended, spec=spec, layout=layout, **ONLY_FLOAT32, longest=4096)
    assert again.ok, str(again)


def test_the_mend_of_swapped_tables() -> None:
    bad = planted.with_tables(swap=True)
    mend = audit(bad).findings[0].mend
    assert "pass the sines as cosines and the cosines as sines" in mend

    def mended(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return bad(q, k, sin, cos)

    assert audit(mended).ok


@pytest.mark.parametrize("quarter", [1.0, -1.0])
def test_a_quarter_turn_is_no_swap(quarter: float) -> None:
    """Exchanging cosines and sines would not mend it."""

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = planted.angles(positions, planted.inv_freq())[:, None] + quarter * torch.pi / 2
        return planted.turn(x.float(), angle.cos(), angle.sin()).to(x.dtype)

    assert audit(fn).codes == ("phase",)


# --- functions that raise or print -----------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no [luck]"), SystemExit(3), KeyError("x"), MemoryError(), AssertionError()],
)
def test_a_function_that_raises(error: BaseException) -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise error

    report = audit(fn)
    assert report.codes == ("cannot-call",)
    assert type(error).__name__ in report.findings[0].evidence


def test_a_function_that_raises_now_and_then() -> None:
    count = [0]

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] % 5 == 0:
            raise RuntimeError("out of luck")
        return planted.PLAIN(x, positions)  # type: ignore[no-any-return]

    report = audit(fn)
    assert not report.ok or any("out of luck" in check.outcome for check in report.checks)


@pytest.mark.parametrize("result", [None, 3, "x", torch.zeros(3), (torch.zeros(1),) * 3])
def test_a_function_that_returns_something_else(result: object) -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> object:
        return result

    report = audit(fn)
    assert report.codes == ("cannot-call",)


def test_not_a_number() -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x * float("nan")

    report = audit(fn)
    assert "not-finite" in report.codes, str(report)


def test_nothing_is_printed_and_no_seed_is_moved(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        print("called")
        torch.rand(1)
        return planted.PLAIN(x, positions)  # type: ignore[no-any-return]

    before = torch.get_rng_state()
    assert audit(fn, **ONLY_FLOAT32, longest=4096).ok
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr() == ("", "")


def test_the_function_itself_is_not_called() -> None:
    module = planted.GrowingCache(False)
    audit(module, longest=4096)
    assert len(module.table) == 0


# --- targets ----------------------------------------------------------------------------------------


def test_a_function_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_rope.py").write_text(
        "import torch\nfrom tests.support.planted_faults import rope\n\nbad = rope(sign=-1.0)\nnumber = 3\n\n\n"
        "class Rope:\n    pass\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = audit("some_rope:bad")
    assert report.target == "some_rope:bad"
    assert report.codes == ("sign",)
    made = audit("tests.support.planted_faults:rope", make=True, **ONLY_FLOAT32, longest=4096)
    assert made.ok
    assert made.target == "tests.support.planted_faults:rope()"
    with pytest.raises(
        TypeError, match=r"^\[audit\] some_rope:number must be callable but is int\.$"
    ):
        audit("some_rope:number")
    with pytest.raises(
        ValueError, match=r"^\[audit\] module 'some_rope' must define 'x' but does not\.$"
    ):
        audit("some_rope:x")
    with pytest.raises(TypeError, match=r"but is a class: pass a function without arguments"):
        audit("some_rope:Rope")


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rope.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(
        ValueError, match=r"must be importable from .* but raised ZeroDivisionError: division"
    ):
        audit("broken_rope:x")


def test_a_config_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values = {"model_type": "llama", "rope_theta": 500000.0, "head_dim": 64, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    for target in (str(tmp_path), tmp_path / "config.json"):
        report = audit(target)
        assert report.ok, str(report)
        assert report.facts["frequencies"] == "geometric, base 500000"
        assert report.facts["declared"] == "RopeSpec(head_dim=64, base=500000.0)"


@pytest.mark.parametrize("one", [False, True])
def test_an_apply_function_that_is_a_module(one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit calls a function that transformers wraps in a module for the kernels package."""
    pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    both = inspect.unwrap(
        getattr(modeling_llama.apply_rotary_pos_emb, "forward", modeling_llama.apply_rotary_pos_emb)
    )
    call: Callable[..., Any] = (lambda x, cos, sin: both(x, x, cos, sin)[0]) if one else both

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

    signature = inspect.signature(call)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Func.forward.__signature__ = signature.replace(
        parameters=[itself, *signature.parameters.values()]
    )  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", Func())
    report = audit("llama", dtypes=[torch.float32])
    assert report.ok, str(report)
    assert "apply_rotary_pos_emb" in report.target


def test_a_config_that_the_library_reads_otherwise() -> None:
    # The config has base 10000: the intended rotation is the spec, not the config.
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    report = audit(LlamaConfig(), spec=RopeSpec(128, 500_000.0))
    assert report.codes == ("base",)
    assert report.findings[0].sentence == "The base is 10000; 500000 was declared."


WRONG_USE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "target": ({"target": 3}, TypeError, r"target must be a function, a module, .* but got int"),
    "name": (
        {"target": "no such thing"},
        ValueError,
        r"target must be MODULE:FUNCTION, .*'no such thing'",
    ),
    "form": ({"form": "x, y"}, ValueError, r"form must list the arguments, .* but got 'x, y'"),
    "layout": ({"layout": "hbsd"}, ValueError, r"layout must be one of bhsd, .* but got 'hbsd'"),
    "tables": (
        {"tables": "both"},
        ValueError,
        r"tables must be one of cat, repeat, half but got 'both'",
    ),
    "head_dim": ({"head_dim": 7}, ValueError, r"head_dim must be even and positive but got 7"),
    "dtypes": (
        {"dtypes": [torch.int32]},
        ValueError,
        r"dtypes must be among float32, bfloat16, float16",
    ),
    "no float32": ({"dtypes": [torch.bfloat16]}, ValueError, r"dtypes must include float32"),
    "longest": ({"longest": 3}, ValueError, r"longest must be at least 128 but got 3"),
    "spec": ({"spec": 3}, TypeError, r"spec must be a RopeSpec or None but got 3"),
    "spec and head_dim": (
        {"spec": RopeSpec(64), "head_dim": 32},
        ValueError,
        r"head_dim must be that of the spec, 64, or None but got 32",
    ),
}


@pytest.mark.parametrize("name", WRONG_USE)
def test_wrong_use_is_one_sentence(name: str) -> None:
    options, kind, sentence = WRONG_USE[name]
    with pytest.raises(kind, match=rf"^\[audit\] {sentence}"):
        audit(**({"target": planted.PLAIN} | options))


def test_layers_that_differ_must_be_chosen() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"^\[audit\] layer_type must be one of "):
        audit("gemma3_text")
    report = audit("gemma3_text", layer_type="full_attention")
    assert report.ok, str(report)
    assert report.facts["frequencies"] == "geometric, base 1e+06"


def test_a_model_without_rope() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="learned positions"):
        audit("bert")


# --- the report -------------------------------------------------------------------------------------


def test_a_report_survives_json() -> None:
    report = audit(planted.rope(sign=-1.0, shift=1))
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    text = str(report)
    assert "WARNING sign: All pairs turn in the opposite direction" in text
    assert text.endswith("checks passed.")
    # The most severe findings come first.
    assert [finding.severity for finding in report.findings] == sorted(
        (finding.severity for finding in report.findings), key=["error", "warning", "note"].index
    )


def test_the_text_of_a_model_of_defaults_is_audited_with_its_spec() -> None:
    config = transformers.CONFIG_MAPPING["qwen2_vl"]()
    target = from_model(config, None)
    assert not target.unread
    assert target.spec == RopeSpec.from_config(config, section="text_config")
    assert target.spec.axes == Axes.sections((16, 24, 24))
