"""The audit names every planted fault: alone, in other forms of calls, and beside another fault.

Any implementation must name these; the rows say by which code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import planted_faults as planted
from tests.support.audits import QUICK, Case, case, cases_of, declared, holds
from tests.support.planted_faults import FAULTS, PLAIN, Fn, ordinal
from tightrope import Axes, RopeSpec, functional
from tightrope.frequencies import DynamicNTK, Given, Llama3, LongRoPE, YaRN
from tightrope.positions import multi_axis
from tightrope_tools.audit import audit

SPEC, AXES = RopeSpec(64), RopeSpec(32, axes=Axes.sections((8, 8)))


# --- planted faults -------------------------------------------------------------------------------


def audited(fault: dict[str, Any], which: str = "bad", form: Any = None, **options: Any) -> Any:
    function = planted.made(fault.get(which, {}))
    function = function if form is None else form(function)
    return audit(function, spec=declared(fault.get("spec")), **options | fault.get("options", {}))


def assert_named(report: Any, fault: dict[str, Any]) -> None:
    assert report.codes[:1] == (fault["code"],), str(report)
    assert {*report.codes} <= {fault["code"], *fault.get("also", ())}, str(report)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named(fault: dict[str, Any]) -> None:
    report = audited(fault)
    assert_named(report, fault)
    assert report.findings[0].severity == fault.get("severity", "error")
    for finding in report.findings:
        assert finding.sentence.endswith(".")
        assert finding.mend
        assert "{" not in finding.mend


# Most faults are of the same function: it is audited once for each declaration.
GOOD = {
    str([each.get(key) for key in ("good", "spec", "options")]): each for each in FAULTS.values()
}


@pytest.mark.parametrize("fault", GOOD.values(), ids=lambda fault: str(fault["of"]))
def test_without_its_fault_nothing_is_found(fault: dict[str, Any]) -> None:
    report = audited(fault, "good")
    assert report.ok, str(report)


def in_bshd(function: Fn) -> Fn:
    return lambda x, positions: function(x.transpose(1, 2), positions).transpose(1, 2)


def of_both(function: Fn) -> Fn:
    return planted.on_both(function, function)


def by_ids(function: Fn) -> Fn:
    return lambda hidden, position_ids: function(hidden, position_ids)


WRAPPED = {"bshd": in_bshd, "q, k, positions": of_both, "other names": by_ids}
CROSSED = [fault for fault in FAULTS.values() if "good" not in fault]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("fault", CROSSED, ids=lambda fault: str(fault["of"]))
def test_a_fault_is_found_and_named_alone_in_every_form(fault: dict[str, Any]) -> None:
    """Of each fault in one form."""
    forms = [*WRAPPED]
    if fault["code"].startswith(("strides", "shape")):
        # Within a function that transposes, a fault about memory breaks every call, and the audit does not try as many
        # heads as tokens.
        forms.remove("bshd")
    form = WRAPPED[forms[CROSSED.index(fault) % len(forms)]]
    assert_named(audited(fault, form=form, head_dim=planted.DIM), fault)


# What a function makes of ids, by its name -> the code of the fault.
MAPS = {
    "first id": "first-id",
    "largest id": "last-id",
    "largest so far": "restarts",
    "sorted": "position-order",
    "from 0": "offset-ignored",
    "from the last restart": "offset-ignored",
    "ordinal": "positions-ignored",
}
OTHERS: dict[str, dict[str, Any]] = {
    "sign": {"sign": -1.0},
    "base": {"base": 500_000.0},
    "pairing": {"interleaved": True},
    "angle-dtype": {"types": {"a_type": torch.bfloat16}},
    "mutates": {"in_place": True},
    "gradient-wrong": {"detach": "sin"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", MAPS)
def test_two_faults_have_two_names(name: str, other: str) -> None:
    code, where = MAPS[name], planted.NAMED[name]
    report = audit(planted.rope(where=where, **OTHERS[other]), spec=SPEC, **QUICK)
    assert code in report.codes, str(report)
    # A function that writes to x is called with a copy if its tokens must be put in order first.
    assert {*report.codes} - {code} <= {other, "strides"}, str(report)
    assert other == "mutates" or other in report.codes, str(report)


@pytest.mark.parametrize("name", MAPS)
def test_the_positions_that_tokens_got_are_the_evidence(name: str) -> None:
    code, where = MAPS[name], planted.NAMED[name]
    evidence = holds(audit, case(planted.rope(where=where), code)).findings[0].evidence
    words = evidence.removeprefix("tokens at ").split(" come out as if at ")
    given, got = (torch.tensor([[*map(int, each.split(", "))]]) for each in words)
    assert torch.equal(where(given), got)


# --- other functions ------------------------------------------------------------------------------


def rotate(spec: RopeSpec, where: Any = lambda positions: positions, **more: Any) -> Fn:
    return lambda x, positions: functional.rotate(x, spec, where(positions), **more)


def folded(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Add both products, as for sines of which the first half is negated."""
    return x * cos[:, None] + x.roll(x.shape[-1] // 2, -1) * sin[:, None]


def starts(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Take the first position of each row."""
    return PLAIN(x, offsets[:, None] + torch.arange(x.shape[2]))  # type: ignore[no-any-return]


def writing(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Any:
    return PLAIN(q, positions), k.copy_(PLAIN(k, positions))


def blocks(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    one = planted.rope(rotary_dim=32)
    return torch.cat((one(x[..., :32], positions), one(x[..., 32:], positions)), -1)


def raising(error: BaseException) -> Fn:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise error

    return fn


def returning(result: object) -> Fn:
    return lambda x, positions: (x, positions, result)[2]


def raising_backward(error: Exception) -> Fn:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, *__: Any) -> Any:
            raise error

    return lambda x, positions: Raises.apply(PLAIN(x, positions))


def rounded_tables(spec: RopeSpec, dtype: torch.dtype, before: bool) -> Fn:
    """Return a rotation by tables in 16 bits, with the factor of the scaling before or after rounding."""
    rates, scale = spec.frequencies().inv_freq.float(), spec.attention_scaling()
    first, last = (scale, 1.0) if before else (1.0, scale)

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = planted.angles(positions, rates)[:, None]
        cos, sin = ((t * first).to(dtype).float() * last for t in (angle.cos(), angle.sin()))
        return planted.turn(x.float(), cos, sin).to(x.dtype)

    return fn


def packed_by_tables(x: Any, cos: Any, sin: Any, cu_seqlens: Any) -> Any:
    """Number the rows through."""
    return planted.turn(x, *(t[: len(x), None, : x.shape[-1] // 2] for t in (cos, sin)))


def equal_rows(x: Any, cu_seqlens: Any) -> Any:
    """Take all packed rows to have the length of the first; others are refused."""
    rows = torch.arange(int(cu_seqlens[1])).repeat(len(cu_seqlens) - 1)
    return planted.packed(lambda _: rows)(x, cu_seqlens)


# What calls are wrong by a position -> the code.
WHERE: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], bool]]] = {
    "there is one token": ("shape-dependent…", lambda x, _: x.shape[2] == 1),
    "there is one head": ("shape-dependent", lambda x, _: x.shape[1] == 1 < len(x)),
    "rows are as many as tokens": ("shape-dependent…", lambda x, _: 1 < len(x) == x.shape[2]),
    "there are many tokens": ("shape-dependent…", lambda x, _: x.shape[2] > 64),
    "heads share memory": ("strides", lambda x, _: x.stride(1) == 0 < x.shape[2]),
    "channels are apart": ("strides", lambda x, _: x.stride(-1) == 2),
    "positions are float32": ("position-type", lambda _, p: p.dtype == torch.float32),
    "positions are float64": ("position-type", lambda _, p: p.dtype == torch.float64),
}


def ahead_where(at: Callable[[torch.Tensor, torch.Tensor], bool]) -> Fn:
    return lambda x, positions: PLAIN(x, positions + int(at(x, positions)))


LLAMA3 = RopeSpec(64, base=500_000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192))
NTK = RopeSpec(64, scaling=DynamicNTK(2.0, 2048))
LONG = LongRoPE((1.0,) * 32, tuple(1.0 + i for i in range(32)), 512, attention_factor=1.0)
SHORT = LongRoPE(tuple(1.0 + i / 64 for i in range(32)), (8.0,) * 32, 512, attention_factor=1.0)
ALMOST = RopeSpec(64, base=500_100.0)
BACK = RopeSpec(64, scaling=Given.of(-SPEC.frequencies().inv_freq))
SIXTEEN = (torch.bfloat16, torch.float16)
BOTH = (torch.float32, torch.bfloat16)
FAR: dict[str, Any] = {"longest": 2**20}
NOT_LONG = "The frequencies of long calls are not those of the declared scaling."

CASES: dict[str, Case] = {
    # positions
    "offsets ignored": case(
        lambda x, offsets: PLAIN(x, ordinal(offsets[:, None].expand(-1, x.shape[2]))),
        "offset-ignored",
    ),
    "offsets of row 0": case(
        lambda x, offsets: starts(x, offsets[:1].expand_as(offsets)), "row-positions"
    ),
    # packed rows
    "packed rows with tables, numbered through": case(packed_by_tables, "numbered-through"),
    "packed rows of equal lengths": case(
        equal_rows, "shapes", "An x with packed rows of different lengths is refused."
    ),
    # pairs and directions
    "blocks": case(
        blocks, "pairing", "paired i with i + 16; i with i + 32 was declared.", spec=SPEC
    ),
    "signs folded into the sines": case(
        folded, "sign-missing", "torch.cat((-sin, sin), -1)", head_dim=64
    ),
    "backwards": case(
        rotate(BACK), "sign", "All pairs turn in the opposite direction to RoPE: ", spec=SPEC
    ),
    "forwards, where backwards was declared": case(
        rotate(SPEC),
        "sign",
        "All pairs turn in the opposite direction to the declared one: ",
        spec=BACK,
    ),
    **{
        f"along the heads, declared {spec is not None}": case(
            lambda x: functional.rotate(x, SPEC, layout="bshd"),
            "heads",
            "It rotates along the heads",
            'layout="bhsd"',
            spec=spec,
            layout="bhsd",
            head_dim=64,
        )
        for spec in (None, SPEC)
    },
    # frequencies and lengths
    "almost the base": case(
        rotate(ALMOST),
        "base",
        "The base is 500100; 500000 was declared.",
        spec=RopeSpec(64, base=5e5),
    ),
    "another factor": case(
        rotate(NTK), "scaling", NOT_LONG, spec=RopeSpec(64, scaling=DynamicNTK(4.0, 2048)), **FAR
    ),
    "another rule": case(rotate(NTK), "scaling", NOT_LONG, spec=RopeSpec(64, scaling=LONG), **FAR),
    "long factors never used": case(
        planted.rope(rates=RopeSpec(64, scaling=SHORT).frequencies(1).inv_freq.float()),
        "scaling",
        "do not depend on the length",
        spec=RopeSpec(64, scaling=SHORT),
        **FAR,
    ),
    "one position ahead, declared by length": case(
        rotate(NTK, lambda p: p + (p == 1000)), "far-angles", spec=NTK, **FAR
    ),
    # roundings
    **{
        f"angles of scaled frequencies in {dtype}, {spec}": case(
            planted.rope(rates=LLAMA3.frequencies().inv_freq.float(), types={"a_type": dtype}),
            "angle-dtype",
            spec=spec,
            longest=4096,
            dtypes=[torch.float32, *SIXTEEN],
        )
        for dtype in SIXTEEN
        for spec in (None, LLAMA3)
    },
    **{
        f"tables in {dtype}, YaRN by {spec.scaling.factor}, {before}, {meant is None}": case(
            rounded_tables(spec, dtype, before),
            "table-dtype",
            spec=meant,
            longest=2**17,
            facts={"frequencies": f"YaRN scaling by {spec.scaling.factor:g}"},
        )
        for dtype in SIXTEEN
        for spec in (RopeSpec(64, scaling=YaRN(factor, 4096)) for factor in (8.0, 32.0))
        for before in (True, False)
        for meant in (None, spec)
    },
    **{
        f"a position ahead where {name}": case(ahead_where(at), code, spec=SPEC)
        for name, (code, at) in WHERE.items()
    },
    # keys
    **{
        f"k, {name}": case(planted.on_both(PLAIN, wrong), "q-k…", spec=SPEC, dtypes=BOTH)
        for name, wrong in {
            "NaN in bfloat16": lambda k, p: (
                PLAIN(k, p) * (1 if k.dtype != SIXTEEN[0] else torch.nan)
            ),
            "unrotated in bfloat16": lambda k, p: k if k.dtype == SIXTEEN[0] else PLAIN(k, p),
            "head 0 only": lambda k, p: torch.cat((PLAIN(k[:, :1], p), k[:, 1:]), 1),
        }.items()
    },
    "k with its coordinates exchanged": case(
        lambda q, k, position_ids: (
            functional.rotate(q, AXES, multi_axis(position_ids)),
            functional.rotate(k, AXES, multi_axis(position_ids.flip(0))),
        ),
        "q-k",
        spec=AXES,
    ),
    "k is overwritten": case(
        writing, "mutates", "x is overwritten if it is passed as k.", spec=SPEC, dtypes=BOTH
    ),
    # what is raised and returned
    **{
        f"raises {type(error).__name__}": case(raising(error), "cannot-call", type(error).__name__)
        for error in (
            *(RuntimeError("no [luck]"), SystemExit(3)),
            *(KeyError("x"), MemoryError(), AssertionError()),
        )
    },
    **{
        f"returns {type(result).__name__}": case(returning(result), "cannot-call")
        for result in (None, 3, "x", torch.zeros(3), (torch.zeros(1),) * 3)
    },
    "NaN": case(lambda x, positions: x * torch.nan + positions.sum(), "not-finite…"),
    "a sum that overflows": case(
        lambda x, positions: PLAIN(x, positions) * (x.abs().sum() / x.abs().sum()),
        "not-finite…",
        spec=SPEC,
        dtypes=BOTH,
    ),
    **{
        f"backward raises {type(error).__name__}": case(raising_backward(error), "gradient-raises")
        for error in (ValueError("no"), NotImplementedError())
    },
}


CASES |= cases_of(Path(__file__).with_name("faults.jsonl"))


@pytest.mark.parametrize("name", CASES)
def test_a_fault_has_its_name(name: str) -> None:
    holds(audit, CASES[name])


def test_a_function_that_raises_now_and_then() -> None:
    count = [0]

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] % 5 == 0:
            raise RuntimeError("out of luck")
        return PLAIN(x, positions)  # type: ignore[no-any-return]

    report = audit(fn)
    assert not report.ok or any("out of luck" in check.outcome for check in report.checks)
