"""The audit condemns no correct function, and describes what it sees: forms of calls, libraries, rules, roundings."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import correct_functions, planted_faults as planted, tolerances, zoo
from tests.support.audits import ONLY_FLOAT32, QUICK, Case, case, cases_of, holds
from tests.support.models.forms import NEW, along, by_rows
from tests.support.planted_faults import PLAIN, Fn, named
from tightrope import Axes, RopeSpec, functional
from tightrope.frequencies import DynamicNTK, Given, Linear, Llama3, YaRN
from tightrope.nn import RotaryPositionalEmbedding
from tightrope.positions import multi_axis
from tightrope_tools.audit import assert_rope, audit
from tightrope_tools.forms import FORMS

SPEC = RopeSpec(64)
ALL = list(correct_functions.cases())
SOME = random.Random(7).sample(ALL, 100)
# Few of all crossings take tables: one more of each form, so that none is left out.
CHOSEN = [*dict.fromkeys([*SOME, *{case.form: case for case in ALL}.values()])]
assert len(CHOSEN) >= 100


# Forms that are called as others are.
CALLED = {"module": "x", "held table": "x, positions", "x, offsets": "x, offset"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "correct, declared", [(case, n % 2 == 0) for n, case in enumerate(CHOSEN)], ids=str
)
def test_a_correct_function_is_not_condemned(
    correct: correct_functions.Case, declared: bool
) -> None:
    """Its layout is found, or declared, as that of three dimensions must be. Tables end at 5,000."""
    spec = correct.spec if declared else None
    options: dict[str, Any] = {"head_dim": correct_functions.DIM, "longest": 2**14}
    options |= {"layout": correct.layout} if declared or len(correct.layout) == 3 else {}
    report = named(audit(correct.make(), spec=spec, **options))
    form = CALLED.get(correct.form, correct.form)
    assert (report.facts["called as"], report.facts["layout"]) == (f"fn({form})", correct.layout)
    if declared:
        assert_rope(correct.make(), spec, **options)


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
    sizes: dict[str, Any] = {"rotary_dim": 2 * pairs, "start": start, "interleaved": interleaved}
    report = audit(planted.rope(base=base, sign=sign, **sizes), **ONLY_FLOAT32, longest=8192)
    assert report.facts["channels"] == f"{start} to {start + 2 * pairs - 1} of 64"
    assert report.facts["pairing"].startswith("interleaved" if interleaved else "half")
    assert report.facts["frequencies"] == f"geometric, base {base:g}"
    assert ("sign" in report.codes) == (sign < 0)


# --- functions of many forms ----------------------------------------------------------------------


PACKED = planted.packed()


def of_one_row(x: Any, cu_seqlens: Any) -> Any:
    return PACKED(x[0], cu_seqlens)[None]


def with_default(x: Any, cu_seqlens: Any = None) -> Any:
    return PACKED(x, cu_seqlens)


def by_tables(x: Any, cos: Any, sin: Any, cu_seqlens: Any) -> Any:
    rows = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    return planted.turn(x, *(t[rows, None, : x.shape[-1] // 2] for t in (cos, sin)))


def by_angles(t: Any, cu_seqlens: Any, freqs: Any) -> Any:
    """Take angles (positions, 1, 1, channels), as Megatron does."""
    angle = torch.cat([freqs[:n, 0] for n in cu_seqlens.diff().tolist()])
    u, v = t.chunk(2, -1)
    return t * angle.cos().to(t) + torch.cat((-v, u), -1) * angle.sin().to(t)


# A function, the call that is found, and the layout of x.
CALLS: dict[str, tuple[Fn, str, str]] = {
    "shared positions": (lambda x, positions: PLAIN(x, positions[None]), "x, positions", "bhsd"),
    "arguments without telling names": (lambda a, b: PLAIN(a, b), "x, positions", "bhsd"),
    "seq_dim": (planted.GrowingCache(False), "x, seq_dim", "bhsd"),
    "rows of tables": (by_rows, "q, k, cos, sin, positions", "bhsd"),
    "stacked": (lambda x, freqs: zoo.turn(x, *freqs.unbind(0)), "x, stacked", "bhsd"),
    "sines in front": (lambda x, freqs: zoo.turn(x, *freqs[::-1]), "x, reversed_pair", "bhsd"),
    "packed": (PACKED, "x, cu_seqlens", "thd"),
    "packed in one row": (of_one_row, "x, cu_seqlens", "bshd"),
    "packed, a default": (with_default, "x, cu_seqlens", "thd"),
    "packed, tables": (by_tables, "x, cos, sin, cu_seqlens", "thd"),
    "packed, angles": (by_angles, "x, cu_seqlens, angles", "thd"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_is_found(name: str) -> None:
    fn, form, layout = CALLS[name]
    report = named(audit(fn, longest=8192))
    assert (report.facts["called as"], report.facts["layout"]) == (f"fn({form})", layout)
    assert report.facts["frequencies"] in (
        "geometric, base 10000",
        "provided by the caller, as cosines and sines",
    )
    assert report.facts["pairing"].startswith("half")
    assert all(check.outcome == "passed" or "skipped" in check.outcome for check in report.checks)
    if name.startswith("packed"):
        outcomes = {check.name: check.outcome for check in report.checks}
        assert outcomes["each packed row begins at position 0"] == "passed"
        named(audit(fn, spec=RopeSpec(64, interleaved=False), **QUICK))


ZOO = [name for name, row in zoo.ROWS.items() if not row.method and row.tensors < 3]


@pytest.mark.parametrize("name", ZOO)
def test_a_function_of_the_zoo_is_recognised(name: str) -> None:
    row = zoo.ROWS[name]
    report = named(
        audit(partial(row.function, **row.options), **QUICK), *["sign"] * (name == "nanochat")
    )
    assert report.facts["pairing"].startswith("interleaved" if "adjacent" in row.words else "half")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NEW)
def test_a_new_form_is_audited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, function, pairing = NEW[name]
    holds(audit, case(function, "cannot-call", longest=2048))
    monkeypatch.setitem(FORMS, name, form)
    facts = {"called as": f"fn(x, {form.roles[0]})", "pairing": pairing}
    holds(audit, case(function, longest=2048, facts=facts))


# --- rows: correct functions, with what is said of them -------------------------------------------


def rotate(spec: RopeSpec) -> Fn:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # The audit calls it with late tokens alone; each is taken as the last one of its sequence.
        lengths = positions.amax(-1).long() + 1 if positions.numel() else None
        return functional.rotate(x, spec.at(positions, seq_len=lengths))

    return fn


def of_axes(spec: RopeSpec) -> Fn:
    def fn(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        assert position_ids.shape[0] == spec.axis_count
        assert position_ids.dim() == 3
        return functional.rotate(x, spec, multi_axis(position_ids))

    return fn


def half_turns(rates: torch.Tensor, interleaved: bool, dtype: torch.dtype) -> Fn:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions.to(dtype)[:, None, :, None] * rates.to(dtype)
        cos, sin = angle.cos().float(), angle.sin().float()
        return planted.turn(x.float(), cos, sin, interleaved=interleaved).to(x.dtype)

    return fn


def blocks(rates: torch.Tensor) -> Fn:
    """Rotate two blocks of half pairs, one after the other, by the same frequencies."""
    one = planted.rope(rates=rates)
    return lambda x, positions: torch.cat([one(y, positions) for y in x.chunk(2, -1)], -1)


TABLE_ANGLES = torch.arange(8192.0)[:, None] * planted.inv_freq()
TABLES = TABLE_ANGLES.cos(), TABLE_ANGLES.sin()


def by_index(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return planted.turn(x, *(table[positions][:, None].to(x) for table in TABLES))


def refusing_none(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return by_index(x, positions.clamp(max=int(positions.max())))


def rotate_(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return planted.rope(in_place=True)(x, positions)  # type: ignore[no-any-return]


def apart(rates: torch.Tensor) -> RopeSpec:
    return RopeSpec(64, scaling=Given.of(rates))


PI = torch.pi
TURNS = {
    "half turns": torch.full((32,), PI, dtype=torch.float64),
    "half turns first": torch.linspace(PI, 0.1, 32, dtype=torch.float64),
    "half turns last": torch.linspace(0.1, PI, 32, dtype=torch.float64),
    "whole turns": torch.full((32,), 2 * PI, dtype=torch.float64),
}
GIVEN = RopeSpec(64, scaling=Given.of(torch.linspace(3.0, 0.1, 16)), axes=Axes.blocks((16, 16)))
NTK = RopeSpec(64, scaling=DynamicNTK(2.0, 2048))
BACK = RopeSpec(64, scaling=Given.of(-SPEC.frequencies().inv_freq))
SECTIONS = RopeSpec(32, base=1e6, axes=Axes.sections((6, 5, 5)))
IN_TURN = RopeSpec(32, base=1e6, axes=Axes.sections((6, 5, 5), interleaved=True))
YARN = YaRN(4.0, 4096)
SCALED = {
    "base 500000": RopeSpec(64, base=5e5),
    "base 10000, YaRN scaling by 4 from 4096 positions": RopeSpec(64, scaling=YARN),
    "base 500000, Llama 3 scaling by 8 from 8192 positions": RopeSpec(
        64, base=5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192)
    ),
    "base 10000, linear scaling by 4": RopeSpec(64, scaling=Linear(4.0)),
}
OF_AXES = (
    *(SECTIONS, IN_TURN, RopeSpec(32, axes=Axes.blocks((8, 8)))),
    RopeSpec(32, interleaved=True, axes=Axes.sections((8, 8))),
    RopeSpec(32, scaling=YARN, axes=Axes.blocks((8, 8))),
    RopeSpec(32, scaling=YARN, axes=Axes.sections((6, 5, 5))),
)
UNCHECKED: dict[str, dict[str, Any]] = {
    "base.": {},
    "base and scaling.": {"scaling": YARN},
    "base and axes.": {"axes": Axes.sections((4, 4))},
    "base, scaling and axes.": {"scaling": Linear(4.0), "axes": Axes.sections((4, 4))},
}
NOT_CHECKED = "The caller provides cosines and sines, so the audit did not check the declared "

CASES: dict[str, Case] = {
    # this library
    "q, k": case(lambda q, k: functional.rotate_qk(q, k, SPEC), spec=SPEC),
    "q, k, offset": case(
        lambda q, k, offset=0: functional.rotate_qk(q, k, SPEC, offset), spec=SPEC
    ),
    "in place": case(
        lambda q, k, positions: functional.rotate_qk_(q, k, SPEC, positions), "mutates…"
    ),
    "a layout": case(
        lambda x, positions: functional.rotate(x, SPEC, positions, layout="bshd"),
        spec=SPEC,
        layout="bshd",
    ),
    "two axes": case(
        lambda x, where: functional.rotate(x, GIVEN, multi_axis(where)), spec=GIVEN, layout="bhsd"
    ),
    "apply_rotary_pos_emb": case(functional.apply_rotary_pos_emb),
    "module": case(RotaryPositionalEmbedding(64), facts={"frequencies": "base 10000"}),
    "dynamic NTK": case(rotate(NTK), spec=NTK, facts={"frequencies": "geometric, base 10000"}),
    "backwards as declared": case(rotate(BACK), spec=BACK),
    **{
        f"axes, {spec}": case(
            of_axes(spec),
            spec=spec,
            longest=2**16,
            facts={
                "declared": repr(spec),
                "positions": f"({spec.axis_count}, rows, tokens)",
            },
        )
        for spec in OF_AXES
    },
    "coordinates that are exchanged": case(
        of_axes(IN_TURN),
        "axes",
        "coordinate 0 does not turn pair 1 (channels 1 and 17), which is declared for coordinate 0",
        spec=SECTIONS,
    ),
    "frequencies of text are found before axes": case(
        of_axes(RopeSpec(32, axes=Axes.sections((6, 5, 5)))), "base…", spec=SECTIONS
    ),
    # sizes, factors and tables
    "the call as stated": case(
        lambda a, b: PLAIN(a, b), form="x, positions", layout="bhsd", head_dim=64
    ),
    "another axis of tokens than was tried": case(along, longest=2048),
    "the factor of the declared scaling": case(
        planted.cut(32, RopeSpec(32, scaling=YARN).attention_scaling()),
        form="x, cos, sin",
        spec=RopeSpec(32, scaling=YARN),
    ),
    "two blocks of half pairs": case(blocks(torch.linspace(1.0, 0.01, 16)), notes={"blocks": "2"}),
    **{
        f"unchecked, {what}": case(
            planted.cut(16),
            spec=RopeSpec(32, base=5e5, rotary_dim=16, **fields),
            notes={"frequencies-unchecked": f"{NOT_CHECKED}{what}"},
        )
        for what, fields in UNCHECKED.items()
    },
    **{
        f"{name}, {dtype}, {declared}": case(
            half_turns(rates, interleaved, dtype),
            **{"spec": RopeSpec(64, interleaved=interleaved, scaling=Given.of(rates))}
            if declared
            else {"head_dim": 64},
        )
        for name, rates in TURNS.items()
        for interleaved, dtype in ((True, torch.float32), (False, torch.float64))
        for declared in (True, False)
        if declared or name != "whole turns"
    },
    # no tokens, and writes
    "tables by index": case(by_index, longest=4096),
    "no tokens refused": case(
        refusing_none, longest=4096, notes={"shapes": "An x with no tokens is refused. Runtime"}
    ),
    "a function that ends in an underscore": case(rotate_, notes={"mutates": ""}),
}

CASES |= cases_of(Path(__file__).with_name("correct.jsonl"))


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_a_function(name: str) -> None:
    holds(audit, CASES[name])


@pytest.mark.parametrize("rule", SCALED)
def test_the_rule_of_frequencies_is_named_and_our_angles_are_exact(rule: str) -> None:
    report = holds(audit, case(rotate(SCALED[rule]), longest=2**20))
    assert report.facts["frequencies"] == f"geometric, {rule}"
    for each in report.angle_errors:
        assert each.float32 is not None
        assert each.float32 <= 2 * tolerances.TABLE["float32 angle"].value


# --- other libraries ------------------------------------------------------------------------------


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


# --- mends, reports, and what an audit leaves alone -----------------------------------------------


def of_the_mend(text: str) -> Fn:
    """Return the call of this library that a mend states, as a function of x and positions."""
    (call,) = re.findall(r"tightrope\.functional\.(rotate\(x, .*positions.*?\))", text)
    names = {"rotate": functional.rotate, "RopeSpec": RopeSpec}
    return eval(f"lambda x, positions: {call}", names)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "function, spec, layout",
    [
        (planted.rope(rotary_dim=32, over=64), RopeSpec(64, rotary_dim=32), "bhsd"),
        *(
            (
                correct_functions.Case(
                    "x, positions", False, "whole", "plain", layout, False
                ).make(),
                RopeSpec(32, base=5e5),
                layout,
            )
            for layout in ("bshd", "sbhd")
        ),
    ],
)
def test_a_mend_rotates_as_meant(function: Fn, spec: RopeSpec, layout: str) -> None:
    for declared in (spec, None) if spec.rotary_dim < spec.head_dim else (spec,):
        mend = audit(function, spec=declared, **QUICK).findings[0].mend
        named(audit(of_the_mend(mend), spec=spec, layout=layout, **QUICK))


def test_the_mend_of_swapped_tables() -> None:
    bad = planted.with_tables(swap=True)
    assert "pass the sines as cosines and the cosines as sines" in audit(bad).findings[0].mend
    named(audit(lambda q, k, cos, sin: bad(q, k, sin, cos)))


def test_the_most_severe_findings_come_first() -> None:
    report = audit(planted.rope(sign=-1.0, shift=1))
    written = json.loads(json.dumps(report.to_dict()))
    assert [each["code"] for each in written["findings"]] == [each.code for each in report.findings]
    assert "\nwarning sign\n  All pairs turn in the opposite direction" in str(report)
    assert str(report).splitlines()[1].endswith("checks passed.")
    order = [("error", "warning", "note").index(finding.severity) for finding in report.findings]
    assert order == sorted(order)


def test_every_check_of_a_right_function_passes() -> None:
    report = audit(PLAIN, spec=SPEC, longest=4096)
    assert all(check.outcome == "passed" for check in report.checks), report.checks
    assert "frequencies-unchecked" not in {each.code for each in report.findings}


def test_nothing_is_printed_no_seed_is_moved_and_a_module_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        print("called")
        torch.rand(1)
        return PLAIN(x, positions)  # type: ignore[no-any-return]

    before, module = torch.get_rng_state(), planted.GrowingCache(False)
    holds(audit, case(fn))
    audit(module, longest=4096)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr() == ("", "")
    assert len(module.table) == 0  # a copy of it is called


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_audit_without_gradients(mode: Callable[[], Any]) -> None:
    with mode():
        assert audit(PLAIN).ok
