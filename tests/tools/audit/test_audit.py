"""The audit names every planted fault, and finds no error or warning in correct functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.support import planted_faults as planted, tolerances
from tests.support.planted_faults import PLAIN, Fn, named
from tightrope import Axes, RopeSpec, functional
from tightrope.frequencies import DynamicNTK, Linear, Llama3, YaRN
from tightrope.nn import RotaryPositionalEmbedding
from tightrope_tools.audit import Report, audit
from tightrope_tools.audit._identify import identify

ONLY_FLOAT32 = {"dtypes": [torch.float32]}
QUICK: dict[str, Any] = {"dtypes": [torch.float32], "longest": 4096}


def declared(fields: dict[str, Any] | None) -> RopeSpec | None:
    if fields is None:
        return None
    values = dict(fields)
    factor = values.pop("linear", None)
    return RopeSpec(**values, scaling=None if factor is None else Linear(factor))


def notes_of(report: Report) -> dict[str, Any]:
    """Return the notes of a report by their codes."""
    return {each.code: each for each in report.findings if each.severity == "note"}


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_declared", [False, True])
def test_rounded_angles_of_scaled_frequencies(dtype: torch.dtype, is_declared: bool) -> None:
    """Rounded angles show each frequency to few digits; those of many positions together show the rule."""
    spec = RopeSpec(64, base=500_000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192))
    rope = planted.by_rates(spec.frequencies().inv_freq.float(), a_type=dtype)
    report = named(audit(rope, spec=spec if is_declared else None, longest=4096), "angle-dtype")
    assert "Llama 3 scaling by 8" in report.facts["frequencies"]


SLOW = 1 / (1 + torch.arange(32.0)) ** 2  # no known rule
# A function, and from where on it is off, in the words of the finding.
JUMPS: dict[str, tuple[Callable[[], Fn], str, str]] = {
    "decoding": (lambda: planted.decoding(1, -1), "offset 1", "-1"),
    "decoding ahead": (lambda: planted.decoding(300, 2), "offset 300", "+2"),
    "from 7": (lambda: planted.jumping(7, -1), "position 7", "-1"),
    "from 2": (lambda: planted.jumping(2, 1), "position 2", "+1"),
    "far": (lambda: planted.jumping(300_000, 1), "position 300,000", "+1"),
    "by many": (lambda: planted.jumping(1, -90), "position 1", "-90"),
    "unknown frequencies": (
        lambda: planted.by_rates(SLOW, where=lambda p: p - (p > 6).int()),
        "position 7",
        "-1",
    ),
    "unknown frequencies, far": (
        lambda: planted.by_rates(SLOW, where=lambda p: p - (p > 30_000).int()),
        "position 30,001",
        "-1",
    ),
}


@pytest.mark.parametrize("name", JUMPS)
def test_positions_that_are_off_from_some_position_on(name: str) -> None:
    """Position 0 is right, so this is no offset of all positions, and no table that ends."""
    make, where, shift = JUMPS[name]
    report = named(audit(make()), "position-jump")
    assert report.findings[0].sentence == f"From {where} on, positions are off by {shift}."


@pytest.mark.parametrize("shift", [1, -1, 100])
def test_an_offset_of_all_positions(shift: int) -> None:
    report = named(audit(planted.rope(shift=shift)), "position-offset")
    (finding,) = (each for each in report.findings if each.code == "position-offset")
    assert finding.severity == "warning"
    assert finding.sentence.startswith(f"Positions are off by {shift:+d}: ")
    assert finding.evidence.endswith(
        "harmless if q and all keys go through this function, wrong with keys that other code cached"
    )


# --- this library ---------------------------------------------------------------------------------


def half_rotary(base: float, scaling: Any = None) -> Fn:
    spec = RopeSpec(64, base=base, scaling=scaling)

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # The audit calls it with late tokens alone; each is taken as the last one of its sequence.
        lengths = positions.amax(-1).long() + 1 if positions.numel() else None
        return functional.rotate(x, spec.at(positions, seq_len=lengths))

    return rotate


NTK = RopeSpec(64, scaling=DynamicNTK(2.0, 2048))
# A function, and what the audit says of its frequencies, beside their rule.
OURS: dict[str, tuple[Fn, str]] = {
    "rotate": (half_rotary(5e5), "base 500000"),
    "YaRN": (
        half_rotary(1e4, YaRN(4.0, 4096)),
        "base 10000, YaRN scaling by 4 from 4096 positions",
    ),
    "Llama 3": (
        half_rotary(5e5, Llama3(8.0, 1.0, 4.0, 8192)),
        "base 500000, Llama 3 scaling by 8 from 8192 positions",
    ),
    "linear": (half_rotary(1e4, Linear(4.0)), "base 10000, linear scaling by 4"),
    "module": (RotaryPositionalEmbedding(64), "base 10000"),
    "functional": (functional.rotary_pos_embedding, "base 10000"),
    "dynamic NTK": (half_rotary(1e4, NTK.scaling), "base 10000"),
}


@pytest.mark.parametrize("name", OURS)
def test_no_false_alarm_on_tightrope(name: str) -> None:
    fn, frequencies = OURS[name]
    report = named(audit(fn, spec=NTK if name == "dynamic NTK" else None))
    assert report.facts["frequencies"] == f"geometric, {frequencies}"
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


def identified(omegas: list[float], head_dim: int = 64) -> Any:
    sizes = {"head_dim": head_dim, "rotary_dim": head_dim, "start": 0}
    return identify(omegas, 1.0, **sizes, interleaved=False)


@pytest.mark.parametrize(
    "spec",
    [RopeSpec(64, base=1e4, scaling=Linear(3.0)), RopeSpec(128, base=5e5), RopeSpec(32, base=1e6)],
)
def test_frequencies_name_their_rule(spec: RopeSpec) -> None:
    found = identified(spec.frequencies().inv_freq.float().tolist(), spec.head_dim)
    assert (found.spec, found.loose) == (spec, False)


def test_arbitrary_frequencies_have_no_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    found = identified(torch.rand(32, generator=generator).sort(descending=True).values.tolist())
    assert (found.spec, found.text) == (None, "no rule that the audit knows")


def test_pairs_that_never_turn() -> None:
    found = identified([1e4 ** (-2 * k / 64) if k < 8 else 0.0 for k in range(32)])
    assert found.text == "8 of 32 pairs turn; these are geometric, base 10000 over 64 channels"


# --- forms of calls ---------------------------------------------------------------------------------


def bshd(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return PLAIN(x.transpose(1, 2), positions).transpose(1, 2)  # type: ignore[no-any-return]


def sbhd(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return PLAIN(x.permute(1, 2, 0, 3), positions[None]).permute(2, 0, 1, 3)  # type: ignore[no-any-return]


def bsd(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    (_, _, _) = x.shape
    return PLAIN(x[:, None], position_ids)[:, 0]  # type: ignore[no-any-return]


def sd(x: torch.Tensor) -> torch.Tensor:
    (_, _) = x.shape
    return PLAIN(x[None, None], torch.arange(len(x))[None])[0, 0]  # type: ignore[no-any-return]


def thd(x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    (_, _, _), (_,) = x.shape, pos.shape
    return PLAIN(x.transpose(0, 1)[None], pos[None])[0].transpose(0, 1)  # type: ignore[no-any-return]


def shared(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    (_,) = positions.shape
    return PLAIN(x, positions[None])  # type: ignore[no-any-return]


def offset(x: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    return PLAIN(x, torch.arange(x.shape[2])[None] + offset)  # type: ignore[no-any-return]


def starts(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Take the first position of each row."""
    return PLAIN(x, offsets[:, None] + torch.arange(x.shape[2]))  # type: ignore[no-any-return]


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
    "bshd": (bshd, "x, positions", "bshd"),
    "sbhd": (sbhd, "x, positions", "sbhd"),
    "bsd": (bsd, "x, positions", "bsd"),
    "sd": (sd, "x", "sd"),
    "thd": (thd, "x, positions", "thd"),
    "shared positions": (shared, "x, positions", "bhsd"),
    "offset": (offset, "x, offset", "bhsd"),
    "an offset for each row": (starts, "x, offset", "bhsd"),
    "seq_dim": (planted.GrowingCache(False), "x, seq_dim", "bhsd"),
    "cis": (meta, "q, k, cis", "bshd"),
    "q, k, positions": (planted.on_both(PLAIN, PLAIN), "q, k, positions", "bhsd"),
    **{
        width: (Tables(width), "x, positions -> cos, sin", "bhsd")
        for width in ("cat", "repeat", "half")
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_the_call_is_found(name: str) -> None:
    fn, form, layout = FORMS[name]
    report = named(audit(fn, longest=8192))
    assert (report.facts["called as"], report.facts["layout"]) == (f"fn({form})", layout)
    assert report.facts["frequencies"] in (
        "geometric, base 10000",
        "provided by the caller, as cosines and sines",
    )
    pairing = "interleaved" if name in ("cis", "repeat") else "half"
    assert report.facts["pairing"].startswith(pairing)


def test_arguments_without_telling_names() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return PLAIN(a, b)  # type: ignore[no-any-return]

    assert audit(fn, **QUICK).facts["called as"] == "fn(x, positions)"
    named(audit(fn, form="x, positions", layout="bhsd", head_dim=64, **QUICK))


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


def test_a_table_that_ends_is_a_note() -> None:
    note = notes_of(named(audit(planted.table_of(5000, "refuse"), longest=131_072)))[
        "table-end-refused"
    ]
    assert note.sentence == "Positions from 5,000 on are refused."
    assert "IndexError: position outside the table" in note.evidence


# --- tables of the caller ---------------------------------------------------------------------------


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
    report = audit(cut(16), spec=RopeSpec(32, base=5e5, rotary_dim=16, **fields), **ONLY_FLOAT32)
    note = notes_of(named(report))["frequencies-unchecked"]
    wanted = "The caller provides cosines and sines, so the audit did not check the declared "
    assert note.sentence == f"{wanted}{what}."
    assert note.mend == "audit it together with the function that makes them: partner=, or --with"
    outcomes = {check.name: check.outcome for check in report.checks}
    assert outcomes["frequencies are as declared"] == "skipped: the caller provides them"


def test_a_factor_in_the_function_is_that_of_the_declared_scaling() -> None:
    spec = RopeSpec(32, scaling=YaRN(4.0, 4096))

    def fn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return cut(32)(x, cos, sin) * spec.attention_scaling()  # type: ignore[no-any-return]

    named(audit(fn, form="x, cos, sin", spec=spec, **ONLY_FLOAT32))


def test_without_a_declaration_nothing_is_left_unchecked() -> None:
    report = audit(cut(32), head_dim=32, **ONLY_FLOAT32)
    assert [each.code for each in report.findings] == ["partner-unseen"]


def test_frequencies_that_were_checked_have_no_note() -> None:
    report = audit(planted.rope(), spec=RopeSpec(64), longest=4096)
    assert "frequencies-unchecked" not in notes_of(report)


@pytest.mark.parametrize(("rotated", "meant"), [(16, 32), (32, 16), (24, 32), (6, 12)])
def test_another_slice_than_the_declared_one_with_tables_of_the_caller(
    rotated: int, meant: int
) -> None:
    """Tables for the declared slice do not fit this function, so the audit makes others."""
    spec = RopeSpec(32, rotary_dim=meant)
    report = named(audit(cut(rotated), spec=spec, **ONLY_FLOAT32), "slice")
    text = f"Channels 0 to {rotated - 1} rotate; 0 to {meant - 1} were declared."
    assert report.findings[0].sentence == text


def test_a_slice_is_found_without_a_spec() -> None:
    report = named(audit(cut(16), head_dim=32, **ONLY_FLOAT32))
    assert report.facts["channels"] == "0 to 15 of 32"


def test_a_wrong_sign_with_tables_of_the_caller() -> None:
    """No other slice conceals it."""
    fn = planted.with_tables(both_plus=True)
    named(audit(fn, spec=RopeSpec(64), **ONLY_FLOAT32), "sign-missing")


# --- no tokens, other dtypes, writes, and rows -------------------------------------------------------


def by_index(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return planted.turn(x, *(table[positions][:, None].to(x) for table in TABLES))


ANGLES = torch.arange(8192.0)[:, None] * planted.inv_freq()
TABLES = ANGLES.cos(), ANGLES.sin()


def test_no_tokens_have_positions_of_an_integer_type() -> None:
    """Tables that are indexed by positions accept an x with no tokens."""
    assert "shapes" not in notes_of(named(audit(by_index, longest=4096)))


def test_a_function_that_refuses_no_tokens_has_a_note() -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return by_index(x, positions.clamp(max=int(positions.max())))

    note = notes_of(named(audit(fn, longest=4096)))["shapes"]
    assert note.sentence == "An x with no tokens is refused."
    assert note.evidence.startswith("RuntimeError: max(): ")


def test_float16_is_an_option() -> None:
    fn = planted.rope(by_x="p_type")
    report = audit(fn, dtypes=[torch.float32, torch.float16])
    assert "for float16 x" in report.findings[0].sentence


def test_a_function_with_a_trailing_underscore_may_write() -> None:
    in_place = planted.rope(in_place=True)

    def rotate_(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return in_place(x, positions)  # type: ignore[no-any-return]

    assert "mutates" in notes_of(named(audit(rotate_)))


def test_offsets_of_the_wrong_row_are_found() -> None:
    wrong = audit(lambda x, offsets: starts(x, offsets[:1].expand_as(offsets)))
    named(wrong, "row-positions")
    assert audit(starts).facts["positions"] == "its own, from an offset for each row"


# --- mends ------------------------------------------------------------------------------------------


def of_the_mend(text: str) -> planted.Fn:
    """Return the call of this library that a mend states, as a function of x and positions."""
    (call,) = re.findall(r"tightrope\.functional\.(rotate\(x, .*positions.*?\))", text)
    names = {"rotate": functional.rotate, "RopeSpec": RopeSpec}
    return eval(f"lambda x, positions: {call}", names)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name", [name for name, fault in planted.FAULTS.items() if fault.code == "denominator"]
)
def test_the_mend_of_a_denominator_rotates_as_meant(name: str) -> None:
    fault = planted.FAULTS[name]
    mend = audit(fault.bad(), spec=declared(fault.spec)).findings[0].mend
    named(audit(of_the_mend(mend), spec=RopeSpec(64, rotary_dim=32), **ONLY_FLOAT32))


@pytest.mark.parametrize("layout, function", [("bshd", bshd), ("sbhd", sbhd)])
def test_a_mend_has_the_layout_of_the_function(layout: str, function: Fn) -> None:
    spec = RopeSpec(64, base=5e5)
    report = named(audit(function, spec=spec, **QUICK), "base")
    named(audit(of_the_mend(report.findings[0].mend), spec=spec, layout=layout, **QUICK))


def test_the_mend_of_swapped_tables() -> None:
    bad = planted.with_tables(swap=True)
    mend = audit(bad).findings[0].mend
    assert "pass the sines as cosines and the cosines as sines" in mend

    def mended(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return bad(q, k, sin, cos)

    named(audit(mended))


@pytest.mark.parametrize("quarter", [1.0, -1.0])
def test_a_quarter_turn_is_no_swap(quarter: float) -> None:
    """Exchanging cosines and sines would not mend it."""
    fn = planted.by_rates(planted.inv_freq(), phase=quarter * torch.pi / 2)
    named(audit(fn), "phase")


# --- functions that raise or print -----------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no [luck]"), SystemExit(3), KeyError("x"), MemoryError(), AssertionError()],
)
def test_a_function_that_raises(error: BaseException) -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise error

    report = named(audit(fn), "cannot-call")
    assert type(error).__name__ in report.findings[0].evidence


def test_a_function_that_raises_now_and_then() -> None:
    count = [0]

    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] % 5 == 0:
            raise RuntimeError("out of luck")
        return PLAIN(x, positions)  # type: ignore[no-any-return]

    report = audit(fn)
    assert not report.ok or any("out of luck" in check.outcome for check in report.checks)


@pytest.mark.parametrize("result", [None, 3, "x", torch.zeros(3), (torch.zeros(1),) * 3])
def test_a_function_that_returns_something_else(result: object) -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> object:
        return result

    named(audit(fn), "cannot-call")


def test_not_a_number() -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x * float("nan")

    report = audit(fn)
    assert "not-finite" in report.codes, str(report)


def test_nothing_is_printed_and_no_seed_is_moved(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        print("called")
        torch.rand(1)
        return PLAIN(x, positions)  # type: ignore[no-any-return]

    before = torch.get_rng_state()
    named(audit(fn, **QUICK))
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr() == ("", "")


def test_the_function_itself_is_not_called() -> None:
    module = planted.GrowingCache(False)
    audit(module, longest=4096)
    assert len(module.table) == 0


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
