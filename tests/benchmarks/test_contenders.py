"""Benchmarks time only contenders with right results, on the case that they name."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contenders, peers
from benchmarks.calls import EVERY, KINDS, build
from benchmarks.cases import RIVALS, SUITES, Case, fitted, tiny
from benchmarks.contenders import Made, Rotate, Rotation, WrongError, checked
from benchmarks.measure import OURS, Child, settings

SMALL: dict[str, Any] = {"tokens": 9, "q_heads": 4, "k_heads": 2, "head_dim": 16}
_SAME = {**SMALL, "k_heads": 4}
CASES = (
    Case("plain", **SMALL),
    Case("bf16", **SMALL, dtype="bfloat16"),
    Case("fp16", **SMALL, dtype="float16"),
    Case("fp64", **SMALL, dtype="float64"),
    Case("q alone", **{**SMALL, "k_heads": 0}, positions="17", best=True),
    Case("contiguous", **SMALL, rows=2, memory="bhsd"),
    Case("bshd", **SMALL, rows=2, memory="bshd", work="out of place", best=True),
    Case("qkv", **_SAME, memory="qkv", work="out of place", best=True),
    Case("apart", **SMALL, memory="apart", best=True),
    Case("interleaved", **SMALL, interleaved=True),
    Case("interleaved, best", **SMALL, interleaved=True, best=True, work="training"),
    Case("partial", **SMALL, rotary_dim=8, best=True),
    Case("offsets", **SMALL, rows=3, positions="offset per row", best=True),
    Case("ids", **SMALL, rows=3, positions="ids per row"),
    Case("ids per head", **_SAME, rows=2, positions="ids per head"),
    Case("packed", **SMALL, positions="packed"),
    Case("M-RoPE", **SMALL, positions="M-RoPE"),
    Case("phases", **SMALL, phases="given", rows=2),
    Case("phases learned", **SMALL, phases="given", work="training"),
    Case("phases per head", **_SAME, phases="given"),
    Case("running", **_SAME, phases="running", rows=2),
    Case("running learned", **SMALL, phases="running", work="training"),
    Case("tables", **SMALL, tables="cat"),
    Case("full tables", **SMALL, tables="full", interleaved=True),
    Case("out of place", **SMALL, work="out of place"),
    Case("training", **SMALL, work="training"),
    Case("backward", **SMALL, work="backward"),
    Case("neighbours", **SMALL, neighbours=True, work="training"),
    Case("relu", **SMALL, act="relu", dtype="bfloat16"),
    Case("gelu", **SMALL, act="gelu", work="training"),
    Case("softmax", **SMALL, act="softmax"),
    Case("norm", **SMALL, act="rms_norm", work="training"),
    Case("norm and gate", **SMALL, act="rms_norm", gate="exp"),
    Case("slope", **SMALL, gate="slope", rows=3, positions="ids per row"),
    Case("slopes learned", **SMALL, gate="slope", work="training"),
)
VARIANTS = {case.name: case for case in CASES}
PLAIN = VARIANTS["plain"]


def named(name: str) -> contenders.Contender:
    return next(one for one in EVERY if one.name == name)


def grad(case: Case) -> Any:
    return torch.set_grad_enabled(case.work == "training")


@pytest.mark.parametrize("case", CASES, ids=VARIANTS)
def test_every_contender_passes_the_check(case: Case, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with grad(case):
        built = contenders.build(replace(case, compiled=True), EVERY, re.compile(""))
        reasons = {name: why for name, why in built.absent.items() if why.startswith("it")}
        assert not [why for why in reasons.values() if "off by" in why or "it failed" in why]
        for call in built.calls.values():
            call()
    backward = case.work == "backward"
    eager = "complex eager" if case.best and case.interleaved else "eager"
    assert {OURS, eager} - {eager if backward else ""} <= built.calls.keys()
    if case.best:
        assert {"tightrope, a spec", "tightrope, tables", "compiled halves"} <= built.calls.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["neighbours", "running learned", "norm and gate", "slopes learned"]
)
def test_compiled_contenders_pass_too(name: str) -> None:
    case = replace(VARIANTS[name], compiled=True)
    with settings(case):
        built = contenders.build(case, EVERY, re.compile("compiled"))
    assert {"tightrope, compiled", "definition, compiled", "compiled eager"} <= built.calls.keys()


def results(case: Case, of: Case | None = None, shift: int = 0) -> tuple[torch.Tensor, ...]:
    rotation = Rotation(of or case)
    rotation.ids = rotation.ids + shift
    return tuple(torch.cat(parts, 2) for parts in zip(*(part for _, part in rotation.expected())))


@pytest.mark.parametrize("name", ["relu", "gelu", "softmax", "norm and gate", "slope"])
def test_the_check_sees_a_missing_factor(name: str) -> None:
    case = VARIANTS[name]
    with grad(case):
        for lacking in {replace(case, act=None), replace(case, gate=None)} - {case}:
            assert Rotation(case).mismatch(results(case, lacking), 2e-3) is not None


def test_the_check_refuses_wrong_results() -> None:
    wrong = {
        "unrotated": Rotation(PLAIN).xs,
        "pairing": results(PLAIN, VARIANTS["interleaved"]),
        "positions": results(PLAIN, shift=1),
    }
    for name, result in wrong.items():
        assert "off by" in str(Rotation(PLAIN).mismatch(result, 1e-3)), name


@pytest.mark.parametrize("planted", [1.0, float("nan")])
def test_the_check_finds_and_locates_single_elements(planted: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(contenders, "AT_A_TIME", 200)  # one or two tokens at a time
    with torch.enable_grad():
        rotation = Rotation(replace(VARIANTS["training"], rows=2))
        assert len(list(rotation.expected())) > 3
        right = contenders.prepared(rotation, named(OURS).make(rotation)).results
        assert rotation.mismatch(right, 1e-5) is None
        for which, name in enumerate(("q", "k", "the gradient of q", "the gradient of k")):
            result = [x.clone() for x in right]
            result[which][1, 0, 7, 5] += planted
            result[which][1, 1, 8, 0] += planted
            reason = str(rotation.mismatch(tuple(result), 1e-5))
            assert ": 2 of 3,456 elements are wrong" in reason
            assert f"the first is {name}[1, 0, 7, 5]: " in reason
        longer = tuple(torch.cat((x, x), 2) for x in right)
        for shapes in (right[:2], tuple(x[:, :, :-1] for x in right), longer):
            assert "shapes" in str(rotation.mismatch(shapes, 1e-5))


def test_this_library_is_held_to_more_than_others() -> None:
    def make(rotation: Rotation) -> Made:
        call, right = contenders.prepared(rotation, named(OURS).make(rotation))
        return Made(call, tuple(x * (1 + 1e-4) for x in right))

    for name, outcome in ((OURS, pytest.raises(WrongError)), ("other", nullcontext())):
        with outcome:
            checked(replace(named(OURS), name=name, make=make), Rotation(PLAIN))


def test_a_wrong_or_failing_contender_is_absent_and_ours_an_error() -> None:
    def unrotated(rotation: Rotation) -> Rotate:
        return Rotate(lambda *xs: xs)

    def failing(_: Rotation) -> Rotate:
        raise ImportError("no compiler\nand more")

    ours, every = named(OURS), re.compile("")
    others = (replace(ours, name="bad", make=unrotated), replace(ours, name="no", make=failing))
    built = contenders.build(PLAIN, (ours, *others), every)
    assert set(built.calls) == {OURS}
    assert "elements are wrong; the first is q[0, 0, 1, 0]" in built.absent["bad"]
    assert built.absent["no"] == "it failed: ImportError: no compiler"
    for make, about in ((unrotated, "must be right in plain but its result"), (failing, "no comp")):
        with pytest.raises(RuntimeError, match=about):
            contenders.build(PLAIN, (replace(ours, make=make),), every)


@pytest.mark.parametrize(
    "name, case, reason",
    [
        ("transformers", PLAIN, "transformers is not installed"),
        ("transformers", VARIANTS["relu"], "it has neither f nor P"),
        ("rotary-embedding-torch", VARIANTS["interleaved"], "rotary_embedding_torch is not"),
        ("onnxruntime", PLAIN, "onnxruntime is not installed"),
        ("onnxruntime", VARIANTS["bf16"], "does not take bfloat16"),
        ("onnxruntime", VARIANTS["training"], "no backward"),
        ("jax jit", PLAIN, "jax is not installed"),
        ("jax jit", replace(PLAIN, threads=1), "fixed when it starts: here 2"),
        ("rotation", PLAIN, "the case is the plain rotation"),
        ("Liger", VARIANTS["bf16"], "liger_kernel is neither installed nor in the folder"),
        ("FLA", PLAIN, "its autotuning takes long"),
    ],
)
def test_an_absent_contender_gives_a_reason(
    name: str, case: Case, reason: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(peers, "cores", lambda: 2)
    there = "fixed when it starts" in reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if there else None)
    assert reason in str(named(name).why_not(case))


def test_cases_have_names_of_their_own_and_fit_into_memory() -> None:
    for suite in SUITES.values():
        assert len({case.name for case in suite.cases}) == len(suite.cases)
        assert {case.device for case in suite.cases} == {suite.device}
        assert {case.kind for case in suite.cases} <= {"rotation", *KINDS}
    assert len({one.name for one in EVERY}) == len(EVERY)
    assert {*RIVALS} <= {one.name for one in EVERY}
    whole = SUITES["gpu"].cases[0]
    assert fitted(whole, 10**10) is whole
    assert [fitted(whole, room).rows for room in (1_300_000_000, 10**9)] == [6, 3]
    assert fitted(whole, 10**8).tokens == 8192


@pytest.mark.parametrize("suite", ["small", "sharded", "gpu", "model"])
def test_other_cases_make_calls(suite: str) -> None:
    seen = set()
    for case in SUITES[suite].cases:
        if case.kind != "rotation" and (case.kind != "kernels"):
            case = tiny(case)
            with grad(case):
                built = build(case, re.compile(""))
                if case.what != "compiled":
                    for name, call in built.calls.items():
                        built.renew.get(name, lambda: None)()
                        call()
            assert OURS in built.calls, built.absent
            seen.add(case.kind)
    assert seen


@pytest.mark.slow
def test_streams_are_read_in_two_processes() -> None:
    built = build(replace(tiny(SUITES["streams"].cases[0]), head_dim=128), re.compile(""))
    assert set(built.calls) == {OURS, "ordinary stores"}
    for call in built.calls.values():
        assert isinstance(call, Child)
        assert call.seconds(2, cold=False) > 0


# ---- kernels of other libraries, from files -------------------------------------------------------

LOOSE = {
    # Python functions with the signatures of the libraries' kernels.
    "Liger-Kernel/src/liger_kernel/ops/rope.py": """
import torch

class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turned(q, cos[:, None], sin[:, None]), turned(k, cos[:, None], sin[:, None])

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = (x[:, None] for x in ctx.saved_tensors)
        return turned(dq, cos, -sin), turned(dk, cos, -sin), None, None

def turned(x, cos, sin):
    u, v = x.detach().clone().chunk(2, -1)
    return x.detach().copy_(torch.cat((u, v), -1) * cos + torch.cat((-v, u), -1) * sin)
""",
    "flash-attention/flash_attn/layers/rotary.py": """
import torch

def apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets=0, cu_seqlens=None, max_seqlen=0):
    at = torch.arange(x.shape[-3])
    if cu_seqlens is not None:
        assert x.dim() == 3 and max_seqlen <= len(cos)
        at = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    elif not isinstance(seqlen_offsets, int):
        at = at + seqlen_offsets[:, None]
    cos, sin = (table[at][..., None, :] for table in (cos, sin))
    u, v = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    y = u * cos - v * sin, u * sin + v * cos
    y = torch.stack(y, -1).flatten(-2) if interleaved else torch.cat(y, -1)
    return x.copy_(y) if inplace else y
""",
    "xopes/xopes/ops/lrpe/rotate/_1d/lrpe_rotate_1d_sp_triton.py": """
import torch
from xopes.utils import contiguous

def lrpe_rotate_1d_sp_triton(x, theta, offset, act, dim):
    angle = torch.arange(x.shape[1])[:, None, None] * theta
    u, v = x.chunk(2, -1)
    return torch.cat((u * angle.cos() - v * angle.sin(), u * angle.sin() + v * angle.cos()), -1)
""",
    "xopes/xopes/utils/utils.py": "contiguous = generate_configs = next_power_of_two = None",
    "xopes/xopes/__init__.py": "raise RuntimeError('the whole package')",
}


@pytest.fixture
def loose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with stand-ins for the peers' files."""
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    names = ("liger_kernel", "flash_attn", "xopes", "fla")

    def forget() -> None:
        for module in [m for m in sys.modules if m.split(".")[0] in names]:
            del sys.modules[module]

    forget()
    for name, text in LOOSE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    forget()


def of_gpu(name: str) -> Case:
    (case,) = (case for case in SUITES["gpu"].cases if case.name == name)
    return replace(tiny(case, 9), dtype="float32")


@pytest.mark.parametrize(
    "name, at",
    [
        ("Liger", "prefill 32k, training"),
        ("Liger", "decode 32"),
        ("flash-attention", "prefill 2k"),
        ("flash-attention", "prefill 2k, in place"),
        ("flash-attention", "prefill 32k, interleaved"),
        ("flash-attention", "packed 32k"),
        ("flash-attention", "decode 32"),
        ("xopes", "prefill 32k"),
    ],
)
def test_peers_get_the_arguments_that_they_expect(name: str, at: str, loose: Path) -> None:
    case = of_gpu(at)
    with grad(case):
        assert named(name).why_not(case) is None
        checked(named(name), Rotation(case))()


def test_a_peer_that_is_wrong_or_missing_is_not_timed(loose: Path) -> None:
    path = loose / "flash-attention" / "flash_attn" / "layers" / "rotary.py"
    path.write_text(LOOSE["flash-attention/flash_attn/layers/rotary.py"].replace("+ v", "- v"))
    (loose / "Liger-Kernel/src/liger_kernel/ops/rope.py").unlink()
    with pytest.raises(WrongError, match=r"elements are wrong; the first is q\[0, 0, 0, 8\]"):
        checked(named("flash-attention"), Rotation(of_gpu("prefill 2k")))
    reason = named("Liger").why_not(of_gpu("decode 32"))
    assert reason == "liger_kernel is neither installed nor in the folder of peers"
    with pytest.raises(ImportError):
        peers.function_of("FLA")
