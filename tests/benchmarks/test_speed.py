"""Benchmarks time only contenders with correct results, and write correct tables."""

import importlib.util
import json
import random
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import pages
from benchmarks.speed import (
    CONTENDERS,
    SUITES,
    Case,
    Made,
    __main__ as command,
    measure,
    method,
    picture,
    report,
    runtimes,
)
from benchmarks.speed._measure import (
    Expected,
    WrongError,
    check,
    expected,
    inputs,
    mismatch,
)

SMALL = {"tokens": 9, "q_heads": 4, "k_heads": 2, "head_dim": 16}
VARIANTS = {
    "plain": Case("plain", **SMALL),
    "bf16": Case("bf16", **SMALL, dtype="bfloat16"),
    "fp16": Case("fp16", **SMALL, dtype="float16"),
    "fp64": Case("fp64", **SMALL, dtype="float64"),
    "contiguous": Case("contiguous", **SMALL, rows=2, strided=False),
    "interleaved": Case("interleaved", **SMALL, interleaved=True),
    "partial": Case("partial", **SMALL, rotary_dim=8),
    "ids": Case("ids", **SMALL, rows=3, positions="ids per row"),
    "ids per head": Case(
        "ids per head", **{**SMALL, "k_heads": 4}, rows=2, positions="ids per head"
    ),
    "packed": Case("packed", **SMALL, positions="packed"),
    "M-RoPE": Case("M-RoPE", **SMALL, positions="M-RoPE"),
    "phases": Case("phases", **SMALL, phases="given", rows=2),
    "phases learned": Case("phases learned", **SMALL, phases="given", work="training"),
    "phases per head": Case("phases per head", **{**SMALL, "k_heads": 4}, phases="given"),
    "tables": Case("tables", **SMALL, tables="cat"),
    "full tables": Case("full tables", **SMALL, tables="full", interleaved=True),
    "running": Case("running", **{**SMALL, "k_heads": 4}, phases="running", rows=2),
    "running learned": Case("running learned", **SMALL, phases="running", work="training"),
    "out of place": Case("out of place", **SMALL, work="out of place"),
    "training": Case("training", **SMALL, work="training"),
    "backward": Case("backward", **SMALL, work="backward"),
    "relu": Case("relu", **SMALL, act="relu", dtype="bfloat16"),
    "silu": Case("silu", **SMALL, act="silu", rows=2),
    "gelu": Case("gelu", **SMALL, act="gelu", work="training"),
    "softmax": Case("softmax", **SMALL, act="softmax"),
    "norm": Case("norm", **SMALL, act="rms_norm", work="training"),
    "norm and gate": Case("norm and gate", **SMALL, act="rms_norm", gate="exp"),
    "slope": Case("slope", **SMALL, gate="slope", rows=3, positions="ids per row"),
    "slopes learned": Case("slopes learned", **SMALL, gate="slope", work="training"),
}


@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
def test_every_contender_passes_the_check(case: Case) -> None:
    q, k, ids = inputs(case)
    right = Expected(case, q, k, ids)
    ran = []
    for contender in CONTENDERS:
        if contender.why_not(case) is None and "compiled" not in contender.name:
            made = contender.make(case, q.clone(), k.clone(), ids)
            assert mismatch(case, made, right) is None, contender.name
            made.call()
            ran.append(contender.name)
    assert {"tightrope", "eager"} - {"eager" if case.work == "backward" else ""} <= set(ran)


@pytest.mark.parametrize(
    "name", ["relu", "silu", "gelu", "softmax", "norm", "norm and gate", "slope"]
)
def test_the_check_sees_a_missing_factor(name: str) -> None:
    case = VARIANTS[name]
    q, k, ids = inputs(case)
    right = Expected(case, q, k, ids)
    for lacking in {replace(case, act=None), replace(case, gate=None)} - {case}:
        assert mismatch(case, Made(lambda: None, expected(lacking, q, k, ids)), right) is not None


def test_cases_with_factors_are_against_the_rotation_alone() -> None:
    asked = re.compile("^rotation$|^neg_$|transformers|onnx|jax|rotary")
    for case in (VARIANTS["silu"], VARIANTS["norm"]):
        result = measure(case, CONTENDERS, runs=1, rounds=2, wanted=asked)
        assert set(result["ratios"]) - {"neg_"} == {"rotation"}
        assert result["absent"]["transformers"] == "it has neither f nor P"
    alone = measure(VARIANTS["plain"], CONTENDERS, runs=1, rounds=1, wanted=re.compile("^rotation"))
    assert alone["absent"]["rotation"] == "the case is the plain rotation"
    unusual = replace(VARIANTS["plain"], act="sin")
    absent = measure(unusual, CONTENDERS, runs=1, rounds=1, wanted=re.compile("eager"))["absent"]
    assert absent["eager"] == "eager code has no sin before a rotation"


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_numbers_are_made_new_before_each_turn(cold: bool) -> None:
    """Inputs are restored before each turn of a contender.

    Otherwise repeated halving would end in subnormal numbers, which are slower.
    """
    x = torch.ones(4)
    seen = []

    def call() -> None:
        seen.append(x[0].item())
        x.mul_(0.5)

    made_new = {"a": lambda: x.fill_(1.0)}
    method.medians({"a": call}, cold=cold, rounds=5, rng=random.Random(0), renew=made_new)
    assert seen.count(1.0) == 6
    assert min(seen) >= 0.5 ** (method.BATCH_RENEWED + 1)


def test_the_check_refuses_wrong_results() -> None:
    case = VARIANTS["plain"]
    q, k, ids = inputs(case)
    right = Expected(case, q, k, ids)
    wrong = {
        "unrotated": (q, k),
        "pairing": expected(VARIANTS["interleaved"], q, k, ids),
        "positions": expected(case, q, k, ids + 1),
    }
    for name, result in wrong.items():
        reason = mismatch(case, Made(lambda: None, result), right)
        assert reason is not None, name
        assert "off by" in reason


@pytest.mark.parametrize("planted", [1.0, float("nan")])
def test_the_check_finds_and_locates_single_elements(planted: float, monkeypatch) -> None:
    case = replace(VARIANTS["training"], rows=2)
    q, k, ids = inputs(case)
    monkeypatch.setattr(
        sys.modules[Expected.__module__], "AT_A_TIME", 200
    )  # one or two tokens at a time
    right = Expected(case, q, k, ids)
    assert len(list(right)) > 3
    made = CONTENDERS[0].make(case, q, k, ids)
    assert mismatch(case, made, right) is None
    for which, name in enumerate(("q", "k", "the gradient of q", "the gradient of k")):
        result = [x.clone() for x in made.result]
        result[which][1, 0, 7, 5] += planted
        result[which][1, 1, 8, 0] += planted
        reason = str(mismatch(case, Made(lambda: None, tuple(result)), right))
        assert ": 2 of 3,456 elements are wrong" in reason
        assert f"the first is {name}[1, 0, 7, 5]: " in reason
    for result in (made.result[:2], tuple(x[:, :, :-1] for x in made.result)):
        assert "shapes" in str(mismatch(case, Made(lambda: None, result), right))
    longer = tuple(torch.cat((x, x), 2) for x in made.result)
    assert "shapes" in str(mismatch(case, Made(lambda: None, longer), right))


def test_this_library_is_held_to_more_than_others() -> None:
    case = VARIANTS["plain"]
    ours = CONTENDERS[0]

    def make(*given) -> Made:
        made = ours.make(*given)
        return Made(made.call, tuple(x * (1 + 1e-4) for x in made.result))

    for name, outcome in (("tightrope", pytest.raises(WrongError)), ("other", nullcontext())):
        with outcome:
            given = inputs(case)
            check(replace(ours, name=name, make=make), case, *given, Expected(case, *given))


@pytest.mark.parametrize(
    "name, case, reason",
    [
        ("transformers", VARIANTS["plain"], "transformers is not installed"),
        ("rotary-embedding-torch", VARIANTS["interleaved"], "rotary_embedding_torch is not"),
        ("onnxruntime", VARIANTS["plain"], "onnxruntime is not installed"),
        ("onnxruntime", VARIANTS["bf16"], "does not take bfloat16"),
        ("onnxruntime", VARIANTS["fp64"], "does not take float64"),
        ("onnxruntime", VARIANTS["training"], "no backward"),
        ("jax jit", VARIANTS["plain"], "jax is not installed"),
        ("jax jit", replace(VARIANTS["plain"], threads=1), "fixed when it starts: here 2"),
    ],
)
def test_an_absent_contender_gives_a_reason(
    name: str, case: Case, reason: str, monkeypatch
) -> None:
    monkeypatch.setattr(runtimes, "cores", lambda: 2)
    there = "fixed when it starts" in reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if there else None)
    (contender,) = (contender for contender in CONTENDERS if contender.name == name)
    assert reason in str(contender.why_not(case))


def test_a_wrong_result_of_ours_is_an_error() -> None:
    wrong = replace(CONTENDERS[0], make=lambda _, q, k, __: Made(lambda: None, (q, k)))
    with pytest.raises(
        RuntimeError, match=r"^\[measure\] tightrope must be right in plain but its"
    ):
        measure(VARIANTS["plain"], (wrong,), runs=1, rounds=1, wanted=re.compile(""))


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, TypeError, AttributeError])
def test_a_failing_contender_is_absent(error: type[Exception]) -> None:
    def make(*_: object) -> Made:
        raise error("no compiler\nand more")

    failing = replace(CONTENDERS[0], name="other", make=make)
    threads = torch.get_num_threads()
    case = replace(VARIANTS["plain"], threads=threads + 1)
    ours = CONTENDERS[0]
    result = measure(case, (ours, failing), runs=1, rounds=1, wanted=re.compile(""))
    assert result["absent"] == {"other": f"it failed: {error.__name__}: no compiler"}
    assert set(result["seconds"]) == {"tightrope"}
    assert torch.get_num_threads() == threads


def test_names_are_unique() -> None:
    for cases in SUITES.values():
        assert len({case.name for case in cases}) == len(cases)
    assert len({contender.name for contender in CONTENDERS}) == len(CONTENDERS)


def test_medians_take_every_contender_equally_often() -> None:
    counts = {"a": 0, "b": 0}

    def caller(name: str) -> method.Call:
        def call() -> None:
            counts[name] += 1

        return call

    calls = {name: caller(name) for name in counts}
    medians = method.medians(calls, cold=True, rounds=3, rng=random.Random(0))
    assert counts == {"a": 4, "b": 4}
    assert set(medians) == {"a", "b"}
    assert all(value > 0 for value in medians.values())


class FakeEvent:
    """A stand-in for a CUDA event that reports 3 ms between any two events."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: object) -> float:
        return 3.0


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_events_of_a_gpu_are_the_clock_there(cold: bool, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(method, "flush", lambda device: calls.append(device))
    monkeypatch.setattr(method, "TURN_SECONDS", {"cuda": 0.0305})
    found = method.medians(
        {"a": lambda: calls.append("a")},
        cold=cold,
        rounds=2,
        rng=random.Random(0),
        device="cuda",
        each=4,
    )
    # A cold turn is a flush and one call; a warm turn is a warm-up call and ten calls. With each=4,
    # every call counts as 4.
    assert found == {"a": pytest.approx(3e-3 / (1 if cold else 10) / 4)}
    assert calls == (["a"] + ["cuda", "a"] * 2 if cold else ["a"] * (2 + 2 * 11))


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("own_threads", [True, False])
def test_turns_wait_only_where_threads_differ(cold: bool, own_threads: bool, monkeypatch) -> None:
    rests: list[None] = []
    monkeypatch.setattr(method, "_rest", lambda: rests.append(None))
    ours = CONTENDERS[0]
    other = replace(ours, name="other", own_threads=own_threads)
    case = replace(VARIANTS["plain"], cold=cold)
    result = measure(case, (ours, other), runs=1, rounds=3, wanted=re.compile(""))
    assert set(result["seconds"]) == {"tightrope", "other"}
    # Both contenders rest once before they warm up, and in each of three rounds.
    assert len(rests) == (8 if own_threads else 0)


def test_from_run_to_table(tmp_path: Path, capsys) -> None:
    out = tmp_path / "results.json"
    arguments = ["--tokens", "3", "--only", "prefill 3.*fp32", "--rounds", "2", "--runs", "2"]
    arguments += ["--against", "^eager", "--out", str(out)]
    assert command.main(arguments) == 0
    data = json.loads(out.read_text())
    capsys.readouterr()
    assert {"processor", "torch", "commit", "date"} <= set(data["machine"])
    page = tmp_path / "page.md"
    marks = f"<!-- {report.MARK} -->", f"<!-- end of {report.MARK} -->"
    page.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    drawn = tmp_path / "picture.png"
    assert report.main([str(out), "--page", str(page), "--png", str(drawn)]) == 0
    text = page.read_text()
    assert "| prefill 3, in place, fp32 |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert drawn.read_bytes().startswith(b"\x89PNG")
    page.write_text("no marks")
    assert report.main([str(out), "--page", str(page)]) == 2
    assert report.main([str(out), "--only", "interleaved"]) == 0
    output = capsys.readouterr().out
    assert "interleaved" in output
    assert "in place" not in output


def test_two_results_side_by_side() -> None:
    def result(*ratios: float) -> dict[str, object]:
        return {"results": [{"case": "case", "ratios": {"neg_": list(ratios)}}]}

    for after, word in (((3.0, 4.0), "slower"), ((0.5, 0.9), "faster"), ((1.5, 4.0), "")):
        row = report.changes(result(1.0, 2.0), result(*after)).splitlines()[-1]
        assert row.startswith("| case / neg_ | 1.00–2.00 |")
        assert row.endswith(f"| {word} |")


def test_the_times_of_a_picture_are_relative_to_a_copy() -> None:
    result = {"ratios": {"clone": [1.0, 2.0, 4.0], "eager": [0.25, 0.5, 0.5]}}
    assert picture.copies(result, "tightrope") == 2.0
    assert picture.copies(result, "eager") == 4.0
    assert picture.copies(result, "absent") is None
    assert picture.copies({"ratios": {"eager": [1.0]}}, "eager") is None


def test_tables_escape_markdown() -> None:
    assert pages.table(["a", "b"], [["x|y", "<z> `<z>`\n"]]) == [
        "| a | b |",
        "|---|---|",
        "| x\\|y | &lt;z> `<z>`  |",
    ]
