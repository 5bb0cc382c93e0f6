"""The audit condemns no correct function: forms crossed with pairings, slices, layouts, rules and dtypes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import correct_functions, planted_faults as planted
from tests.support.correct_functions import Case
from tests.support.planted_faults import named
from tightrope import Axes, RopeSpec, functional
from tightrope.frequencies import Given, YaRN
from tightrope.positions import multi_axis
from tightrope_tools.audit import assert_rope, audit, compare

ALL = list(correct_functions.cases())
SOME = random.Random(7).sample(ALL, 100)
# Few of all crossings take tables: one more of each form, so that none is left out.
CHOSEN = [*dict.fromkeys([*SOME, *{case.form: case for case in ALL}.values()])]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.parametrize("declared", [True, False])
def test_a_correct_function_is_not_condemned(case: Case, declared: bool) -> None:
    # Positions are (tokens,) for packed sequences, and tables end at 5,000.
    spec = case.spec if declared else None
    options = {"head_dim": correct_functions.DIM, "layout": case.layout, "longest": 2**14}
    named(audit(case.make(), spec=spec, **options))


def test_the_functions_are_many() -> None:
    assert len(CHOSEN) >= 100
    for name in ("form", "where", "rule", "layout"):
        assert {getattr(case, name) for case in CHOSEN} == {getattr(case, name) for case in ALL}


# --- this library and others ------------------------------------------------------------------------

SPEC = RopeSpec(64)
GIVEN = RopeSpec(64, scaling=Given.of(torch.linspace(3.0, 0.1, 16)), axes=Axes.blocks((16, 16)))
OURS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "q, k": (lambda q, k: functional.rotate_qk(q, k, SPEC), {"spec": SPEC}),
    "q, k, offset": (
        lambda q, k, offset=0: functional.rotate_qk(q, k, SPEC, offset),
        {"spec": SPEC},
    ),
    "in place": (lambda q, k, positions: functional.rotate_qk_(q, k, SPEC, positions), {}),
    "bshd": (
        lambda x, positions: functional.rotate(x, SPEC, positions, layout="bshd"),
        {"spec": SPEC, "layout": "bshd"},
    ),
    "two axes": (
        lambda x, where: functional.rotate(x, GIVEN, multi_axis(where)),
        {"spec": GIVEN, "layout": "bhsd"},
    ),
    "apply_rotary_pos_emb": (functional.apply_rotary_pos_emb, {}),
}


@pytest.mark.parametrize("name", OURS)
def test_a_call_of_this_library_is_not_condemned(name: str) -> None:
    function, options = OURS[name]
    report = audit(function, **options)
    mutating = ("mutates", "strides") if name == "in place" else ()
    assert set(report.codes) <= set(mutating), str(report)


def functions_of(package: str) -> dict[str, Any]:
    """The rotary functions of a library, one for each source, by module and name."""
    found: dict[str, tuple[str, Any]] = {}
    parent = pytest.importorskip(package)
    for info in pkgutil.walk_packages(parent.__path__, f"{package}."):
        last = info.name.rpartition(".")[2]
        if package.startswith("transformers") and not last.startswith("modeling_"):
            continue
        try:
            module = importlib.import_module(info.name)
        except Exception:  # noqa: BLE001  # what a file needs may be absent
            continue
        for name, value in vars(module).items():
            plain = inspect.unwrap(getattr(value, "forward", value))
            if re.match(r"_?apply.*(rot|rope)", name) and inspect.isfunction(plain):
                text = re.sub(r'""".*?"""', "", inspect.getsource(plain), flags=re.DOTALL)
                found.setdefault(text, (f"{last}.{name}", value))
    return dict(found.values())


# Functions that take more tables, tensors or sizes than the audit passes: it says that it cannot call them.
UNCALLED = {
    "modeling_clvp.apply_rotary_pos_emb",
    "modeling_edgetam_video.apply_rotary_pos_emb_2d_cross_attn",
    "modeling_gemma4.apply_multidimensional_rope",
    "embeddings.apply_rotary_emb_allegro",
    "transformer_sana_wm._apply_rotary_emb",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("package", "least"), [("transformers.models", 35), ("diffusers.models", 15)]
)
def test_no_function_of_other_libraries_is_condemned(package: str, least: int) -> None:
    every = functions_of(package)
    assert len(every) >= least
    for name, function in every.items():
        report = audit(function)
        wanted = ("cannot-call",) if name in UNCALLED else ()
        assert report.codes == wanted, f"{name}: {report}"


# --- faults crossed with forms ------------------------------------------------------------------------


def in_bshd(function: planted.Fn) -> planted.Fn:
    return lambda x, positions: function(x.transpose(1, 2), positions).transpose(1, 2)


def of_both(function: planted.Fn) -> planted.Fn:
    return planted.on_both(function, function)


def by_ids(function: planted.Fn) -> planted.Fn:
    return lambda hidden, position_ids: function(hidden, position_ids)


WRAPPED = {"bshd": in_bshd, "q, k, positions": of_both, "other names": by_ids}
CROSSED = [
    (form, name)
    for form in WRAPPED
    for name, fault in planted.FAULTS.items()
    # Within a function that transposes, a fault about memory breaks every call, and the audit does
    # not try as many heads as tokens.
    if fault.good is planted.rope
    and (form != "bshd" or not fault.code.startswith(("strides", "shape")))
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("form", "name"), CROSSED)
def test_a_fault_is_found_and_named_first_in_every_form(form: str, name: str) -> None:
    fault = planted.FAULTS[name]
    options = {"head_dim": planted.DIM, **fault.options}
    spec = None if fault.spec is None else RopeSpec(**fault.spec)
    report = audit(WRAPPED[form](fault.bad()), spec=spec, **options)
    assert report.codes[:1] == (fault.code,), str(report)


@pytest.mark.parametrize("spec", [None, SPEC])
def test_a_rotation_along_the_wrong_dimension(spec: RopeSpec | None) -> None:
    def heads_as_tokens(x: torch.Tensor) -> torch.Tensor:
        return functional.rotate(x, SPEC, layout="bshd")

    report = named(audit(heads_as_tokens, spec=spec, layout="bhsd", head_dim=64), "heads")
    assert report.findings[0].sentence.startswith("It rotates along the heads")
    assert 'layout="bhsd"' in report.findings[0].mend


def test_signs_folded_into_the_sines() -> None:
    """A function that adds both products needs sines of which the first half is negated."""

    def folded(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos[:, None] + x.roll(x.shape[-1] // 2, -1) * sin[:, None]

    report = named(audit(folded, head_dim=64), "sign-missing")
    assert "torch.cat((-sin, sin), -1)" in report.findings[0].mend


def test_assert_rope() -> None:
    def ours(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.rotate(x, SPEC, positions)

    assert_rope(ours, SPEC)
    with pytest.raises(AssertionError, match=r"ERROR base: The base is 10000; 500000 was declared"):
        assert_rope(ours, RopeSpec(64, base=5e5))


# --- what a review found ------------------------------------------------------------------------------

ROTATE = planted.rope()


def off_from_100(positions: torch.Tensor) -> torch.Tensor:
    return torch.where(positions >= 100, positions + 1, positions)


WRONG_KEYS: dict[str, planted.Fn] = {
    "row 0": lambda k, p: ROTATE(k, p[:1].expand_as(p)),
    "off from 100": lambda k, p: ROTATE(k, off_from_100(p)),
    "positions in the dtype of x": planted.rope(by_x="p_type"),
    "NaN in bfloat16": lambda k, p: ROTATE(k, p) * (1 if k.dtype != torch.bfloat16 else torch.nan),
    "unrotated in bfloat16": lambda k, p: k if k.dtype == torch.bfloat16 else ROTATE(k, p),
    "strides": planted.rope(touch=planted.by_storage),
    "position 1000 ahead": lambda k, p: ROTATE(k, p + (p == 1000)),
    "head 0 only": lambda k, p: torch.cat((ROTATE(k[:, :1], p), k[:, 1:]), 1),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_k_is_checked_like_q(name: str) -> None:
    report = audit(planted.on_both(ROTATE, WRONG_KEYS[name]), spec=SPEC)
    assert report.codes[:1] == ("q-k",), str(report)


def test_keys_are_compared() -> None:
    found = compare(planted.on_both(ROTATE, ROTATE), planted.on_both(ROTATE, None), head_dim=64)
    named(found, "k-not-rotated")


def test_a_correct_function_that_writes_k_overwrites_it() -> None:
    def writing(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Any:
        return ROTATE(q, positions), k.copy_(ROTATE(k, positions))

    report = named(audit(writing, spec=SPEC), "mutates")
    assert report.findings[0].sentence == "x is overwritten if it is passed as k."


def test_a_base_that_is_almost_the_declared_one_is_no_scaling() -> None:
    other = RopeSpec(64, base=500_100.0)
    report = audit(lambda x, p: functional.rotate(x, other, p), spec=RopeSpec(64, base=500_000.0))
    sentence = named(report, "base").findings[0].sentence
    assert sentence == "The base is 500100; 500000 was declared."


def test_a_row_that_is_off_is_the_only_finding() -> None:
    """Each further check gives the function one row, so that none has a wrong name for the fault."""

    def second_row_off(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ahead = torch.zeros_like(positions)
        ahead[1:2] = 1
        return ROTATE(x, positions + ahead)

    named(audit(second_row_off, spec=SPEC), "batch")


@pytest.mark.parametrize("declared", [True, False])
def test_the_direction_is_that_of_the_declared_frequencies(declared: bool) -> None:
    plain = RopeSpec(64)
    back = RopeSpec(64, scaling=Given.of(-plain.frequencies().inv_freq))
    own, other = (back, plain) if declared else (plain, back)
    named(audit(lambda x, p: functional.rotate(x, own, p), spec=own))
    report = named(audit(lambda x, p: functional.rotate(x, own, p), spec=other), "sign")
    whose = "RoPE" if declared else "the declared one"
    assert report.findings[0].sentence.startswith(
        f"All pairs turn in the opposite direction to {whose}: "
    )


@pytest.mark.parametrize(
    "kind, what", [("not-linear", "x or the result were rounded"), ("not-finite", "")]
)
def test_rounded_and_infinite_results_are_no_norm(kind: str, what: str) -> None:
    def rounded(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ROTATE(x.bfloat16().to(x.dtype), positions)

    def divided(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ROTATE(x, positions) * (x.abs().sum() / x.abs().sum())

    report = audit(rounded if what else divided, spec=SPEC)
    assert report.codes[0] == kind, str(report)
    assert what in report.findings[0].sentence


def test_a_token_alone() -> None:
    def decoding(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return ROTATE(x, positions * 0 if positions.shape[1] == 1 else positions)

    report = audit(decoding, spec=SPEC)
    assert not report.ok, str(report)


def test_a_function_of_few_positions_is_no_success() -> None:
    def short(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if int(positions.max()) >= 20:
            raise IndexError("past the table")
        return ROTATE(x, -positions)

    assert audit(short, spec=SPEC).codes[:1] == ("raises",)


@pytest.mark.parametrize("factor", [10 / 3, 5 / 3, 32 / 3])
def test_a_factor_that_is_not_round(factor: float) -> None:
    assert audit(planted.rope(divide=factor)).ok


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("before", [True, False])
def test_a_factor_with_tables_of_16_bits(factor: float, dtype: torch.dtype, before: bool) -> None:
    """The rounding of the tables is a finding of its own; the factor of YaRN is none."""
    spec = RopeSpec(64, scaling=YaRN(factor, 4096))
    rates, scale = spec.frequencies().inv_freq.float(), spec.attention_scaling()
    first, last = (scale, 1.0) if before else (1.0, scale)

    def yarn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = planted.angles(positions, rates)[:, None]
        cos, sin = ((t * first).to(dtype).float() * last for t in (angle.cos(), angle.sin()))
        return planted.turn(x.float(), cos, sin).to(x.dtype)

    for declared in (None, spec):
        report = named(audit(yarn, spec=declared, longest=2**17), "table-dtype")
        assert f"YaRN scaling by {factor:g}" in report.facts["frequencies"]


def test_a_factor_beside_frequencies_of_no_known_rule_is_a_note() -> None:
    report = named(audit(planted.by_rates(torch.linspace(1.0, 0.01, 32), factor=1.2)))
    assert "amplitude" in {each.code for each in report.findings}


TURNS = {
    "half turns": torch.full((32,), torch.pi, dtype=torch.float64),
    "half turns first": torch.linspace(torch.pi, 0.1, 32, dtype=torch.float64),
    "half turns last": torch.linspace(0.1, torch.pi, 32, dtype=torch.float64),
    "whole turns": torch.full((32,), 2 * torch.pi, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("interleaved, dtype", [(True, torch.float32), (False, torch.float64)])
def test_frequencies_that_are_multiples_of_half_a_turn(
    name: str, interleaved: bool, dtype: torch.dtype
) -> None:
    """At whole positions, such a pair only changes its sign, or does not change at all."""
    spec = RopeSpec(64, interleaved=interleaved, scaling=Given.of(TURNS[name]))
    rates = TURNS[name].to(dtype)

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions.to(dtype)[:, None, :, None] * rates
        cos, sin = angle.cos().float(), angle.sin().float()
        return planted.turn(x.float(), cos, sin, interleaved=interleaved).to(x.dtype)

    named(audit(fn, spec=spec))
    if name != "whole turns":
        named(audit(fn, head_dim=64))


def test_two_blocks_of_half_pairs() -> None:
    one = planted.rope(rotary_dim=32)

    def blocks(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.cat((one(x[..., :32], positions), one(x[..., 32:], positions)), -1)

    report = named(audit(blocks, head_dim=64))
    assert report.findings[0].code == "blocks"


@pytest.mark.parametrize("error", [ValueError("no"), NotImplementedError()])
def test_a_backward_pass_that_raises(error: Exception) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, *__: Any) -> Any:
            raise error

    def fn(x: torch.Tensor, positions: torch.Tensor) -> Any:
        return Raises.apply(ROTATE(x, positions))  # type: ignore[no-untyped-call]

    named(audit(fn), "gradient-raises")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_audit_without_gradients(mode: Any) -> None:
    with mode():
        assert audit(ROTATE).ok
