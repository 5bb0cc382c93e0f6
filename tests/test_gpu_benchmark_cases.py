"""What the benchmark of GPUs measures: that contenders are right, who is not, and how a device is asked."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import cases, contenders, device, expected, inputs, peers, timing, variants
from benchmarks.gpu.voice import AbsentError, Voice

from triton_cases import needs_triton

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


class Idle(device.Dry):
    """A dry run that leaves the operators of this process as they are."""

    def __init__(self) -> None:
        pass


def test_contenders_are_those_that_have_names() -> None:
    """The command knows them without torch."""
    assert tuple(contenders.CONTENDERS) == cases.CONTENDERS
    assert set(cases.RIVALS) | set(cases.TUNED) <= set(cases.CONTENDERS)
    assert tuple(timing.MEASURE) == cases.WAYS


def test_cases_are_those_of_the_design() -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert not any(" | " in name for name in names)
    budget = [c for c in cases.CASES if c.budget]
    assert {(c.rows, c.tokens, c.q_heads, c.k_heads, c.work) for c in budget} == {
        (12, 32768, 12, 0, "out"),
        (12, 32768, 12, 0, "backward"),
        (1, 32768, 32, 8, "out"),
        (1, 32768, 32, 8, "backward"),
    }
    long = cases.CASES[0]
    assert long.moved == 2 * 2 * 12 * 32768 * 12 * 128 == long.copied
    silu = next(c for c in cases.CASES if c.name == "silu 32k, training")
    assert silu.moved * 4 == silu.copied * 5
    assert inputs.count_of(long, 60 << 20, 130 << 30) == 2
    assert inputs.count_of(long, 60 << 20, 1 << 30) == 1
    decode = next(c for c in cases.CASES if c.rows == 256)
    sets = inputs.count_of(decode, 60 << 20, 130 << 30)
    assert sets * decode.one_pass > 2 * (60 << 20)


SMALL = [cases.small(case) for case in cases.CASES if not case.neighbours]


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_ours_and_others_give_what_a_case_must(case: cases.Case) -> None:
    """Of two formulas that share nothing."""
    case = replace(case, against="all", tokens=min(case.tokens, 9))
    (given,) = inputs.sets(case, CPU, 1)
    for name in ("tightrope", "definition", "eager", "transformers"):
        mine = given.clone()
        may_be_absent = name not in ("tightrope", "definition")
        with contextlib.suppress(*[AbsentError] * may_be_absent):
            found = contenders.results(contenders.CONTENDERS[name](case, CPU)(mine), mine)
            assert expected.error(case, found, given) <= expected.bound(case), name


def test_wrong_results_are_told_from_right_ones() -> None:
    case = replace(cases.small(cases.CASES[1]), tokens=9)
    (given,) = inputs.sets(case, CPU, 1)
    right = inputs.our_call(case, CPU)(given)
    spoilt = right[0].clone()
    spoilt[0, 1, 4, 3] += 1.0
    wrong = {
        "as they were": given.xs,
        "the other pairing": inputs.our_call(replace(case, interleaved=True), CPU)(given),
        "one position on": inputs.ours(replace(case, positions="packed", tokens=9), CPU)(*given.xs),
        "one of two": given.xs[:1],
        "no number": (given.q * float("nan"), given.k),
        "one element": (spoilt, right[1]),
    }
    for name, found in wrong.items():
        assert not expected.error(case, inputs.tensors(found), given) <= expected.bound(case), name


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_no_case_is_the_same_without_a_rotation(case: cases.Case) -> None:
    """Who left it out would be found out: a token at position 0 alone would not tell."""
    if case.work == "frequencies":
        return
    (given,) = inputs.sets(case, CPU, 1)
    for name, value in (("positions", "0..n-1"), ("interleaved", not case.interleaved)):
        other = inputs.our_call(replace(case, **{name: value, "work": case.work}), CPU)
        mine = given.clone()
        found = contenders.results(other(mine), mine)
        same = name == "positions" and case.positions == value
        assert (expected.error(case, found, given) <= expected.bound(case)) is same, name


def test_each_token_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.CASES[0]
    parts = list(expected.chunks(case, CPU))
    assert torch.equal(torch.cat(parts), torch.arange(case.tokens))
    assert max(len(part) for part in parts) * case.elements // case.tokens <= expected.AT_A_TIME
    small = replace(cases.small(cases.CASES[1]), tokens=9)
    (given,) = inputs.sets(small, CPU, 1)
    found = inputs.our_call(small, CPU)(given)
    whole = expected.error(small, found, given)
    monkeypatch.setattr(expected, "AT_A_TIME", 1)
    assert expected.error(small, found, given) == whole <= expected.bound(small)


def test_cases_are_cut_to_memory() -> None:
    """Rows first, then tokens; what is smaller than memory is left as it is."""
    long, decode = cases.CASES[0], next(c for c in cases.CASES if c.rows == 256)
    assert timing.sized(long, device_of(80 << 30)) == long
    assert timing.sized(long, device_of(16 << 30)).rows == 6
    tiny = timing.sized(long, device_of(1 << 30))
    assert (tiny.rows, tiny.tokens) == (1, 16384)
    for memory in (1 << 24, 1 << 30, 8 << 30, 40 << 30):
        for case in cases.CASES:
            found = timing.sized(case, device_of(memory))
            assert found.one_pass <= memory / timing.PART or (found.rows, found.tokens) <= (1, 16)
            assert found == case or case.one_pass > memory / timing.PART
    assert timing.sized(decode, device_of(8 << 30)) == decode


def device_of(memory: int) -> Any:
    """Something that has so much memory, and is no dry run."""
    return type("Something", (), {"dry": False, "total_bytes": lambda _: memory})()


class Shape(NamedTuple):
    """As the table of a backend has them, with a number that only some have."""

    pairs: int = 1024
    warps: int = 4
    together: int = 2
    registers: int = 64


@pytest.mark.parametrize("given", [variants.blocks.PLAIN[2], Shape()], ids=["ours", "registers"])
def test_shapes_that_are_tried_differ(given: Any) -> None:
    found = variants.shapes_of(given)
    assert next(iter(found.items())) == (cases.TABLE, given)
    assert len(set(found.values())) == len(found) > 20
    assert {shape.warps for shape in found.values()} == {2, 4, 8}
    if "registers" in given._fields:
        assert found["registers 0"] == given._replace(registers=0)
    names = [case.name for case in cases.CASES]
    for name, table in variants.VARIED.items():
        assert name in names
        assert cases.TABLE in variants.of_table(table)


@needs_triton
@pytest.mark.parametrize("table, value", [("PLAIN", Shape()), ("PROGRAMS", 7)])
def test_another_shape_is_in_use_only_as_long_as_it_is_timed(table: str, value: Any) -> None:
    from tightrope.backends.triton import rotation

    blocks, plans = variants.blocks, rotation._plans
    before = dict(blocks.PLAIN), blocks.PROGRAMS

    def use_it_and_fail() -> None:
        with variants._instead(table, value):
            assert value in (blocks.PLAIN[2], blocks.PROGRAMS)
            plans["of this shape"] = None
            raise ValueError("other bits")

    with pytest.raises(ValueError, match="other bits"):
        use_it_and_fail()
    assert (blocks.PLAIN, blocks.PROGRAMS) == before
    assert not plans


@pytest.mark.parametrize("lacks", range(timing.TRIES + 1))
def test_memory_that_others_have_is_waited_for(lacks: int) -> None:
    tries = []

    def work() -> str:
        tries.append(None)
        if len(tries) <= lacks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    if lacks < timing.TRIES:
        assert timing.patiently(work, Idle()) == "done"
        assert len(tries) == lacks + 1
    else:
        with pytest.raises(torch.OutOfMemoryError):
            timing.patiently(work, Idle())


@needs_triton
def test_the_device_is_used_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Gpu, over stand-ins whose calls must fit the signatures of torch and Triton."""
    import triton.testing

    names: list[str] = []
    stream_of = contextlib.nullcontext

    class Stream:
        def wait_stream(self, _: Any) -> None:
            names.append("wait_stream")

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            names.append("record")

        def synchronize(self) -> None:
            names.append("wait")

        def elapsed_time(self, _: Any) -> float:
            return 0.25

    class Graph:
        def replay(self) -> None:
            names.append("replay")

    captured = inspect.signature(torch.cuda.graph.__init__)

    @contextlib.contextmanager
    def graph(*given: Any, **named: Any) -> Any:
        captured.bind(None, *given, **named)
        names.append("begin")
        yield
        names.append("end")

    timed = inspect.signature(triton.testing.do_bench)

    def do_bench(*given: Any, **named: Any) -> list[float]:
        assert timed.bind(*given, **named).arguments["return_mode"] == "all"
        given[0]()
        return [0.5]

    cuda = {
        "current_device": lambda: 0, "Stream": Stream, "Event": Event, "CUDAGraph": Graph,
        "graph": graph, "synchronize": lambda: names.append("synchronize"),
        "current_stream": lambda: None, "stream": lambda _: stream_of(),
        "memory_reserved": lambda: 5, "memory_allocated": lambda: 3,
        "mem_get_info": lambda: (7, 9), "empty_cache": lambda: names.append("release"),
    }  # fmt: skip
    for name, value in cuda.items():
        assert hasattr(torch.cuda, name), name
        monkeypatch.setattr(torch.cuda, name, value)
    properties = type("Properties", (), {"L2_cache_size": 60 << 20})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    gpu = device.Gpu()
    assert (gpu.cache_bytes(), gpu.free_bytes(), gpu.total_bytes()) == (60 << 20, 9, 9)
    with gpu.aside():
        replay = gpu.capture(lambda: names.append("work"))
    replay()
    assert gpu.time(lambda: names.append("work"))() == 0.25
    assert gpu.each(lambda: names.append("work"), 40.0) == [0.5]
    gpu.release()
    assert names == [
        "wait_stream", "begin", "work", "end", "replay", "record", "work", "record", "wait", "work",
        "release",
    ]  # fmt: skip
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    assert not gpu.broken()

    def raises(error: BaseException) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise error

        return call

    monkeypatch.setattr(torch, "zeros", raises(torch.OutOfMemoryError("full")))
    assert not gpu.broken()
    monkeypatch.setattr(
        torch, "zeros", raises(RuntimeError("CUDA error: an illegal memory access"))
    )
    assert gpu.broken()


def test_peers_are_loaded_out_of_loose_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module whose package cannot be imported, in a repository of the package's name, with einops."""
    root = tmp_path / "loose_peer"
    for name, text in {
        "loose_peer/__init__.py": "raise RuntimeError('the whole package')",
        "loose_peer/utils/__init__.py": "raise RuntimeError('more of it')",
        "loose_peer/utils/few.py": "def given(): return 5",
        "loose_peer/ops.py": "from einops import rearrange\nfrom loose_peer.utils import given, left_out",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    peer = peers.Peer(
        "someone/loose_peer", "loose_peer.ops", "given", "()", (), ("loose_peer", "loose_peer.utils"),
        {"loose_peer.utils": {"loose_peer.utils.few": ("given",), "": ("left_out",)}},
    )  # fmt: skip
    monkeypatch.setitem(peers.PEERS, "loose", peer)
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    for module in [m for m in sys.modules if m.startswith("loose_peer")]:
        monkeypatch.delitem(sys.modules, module)
    found = peers.load("loose")
    assert found.given() == 5
    with pytest.raises(AbsentError, match="left out"):
        found.left_out()
    assert peers.load("loose") is found
    assert peers.function("loose")() == 5
    assert "einops" not in sys.modules or sys.modules["einops"].__spec__ is not None


LIGER = """
class LigerRopeFunction:
    @staticmethod
    def forward({arguments}): ...
    @staticmethod
    def apply(q, k, cos, sin): return {result}
"""
AS_IT_WAS = "ctx, q: 'Tensor', k, cos, sin, position_ids=None, unsqueeze_dim: int = 1"


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a peer, to be written, in a folder of peers."""
    for module in [m for m in sys.modules if m.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    path = tmp_path / "Liger-Kernel" / "src" / "liger_kernel" / "ops" / "rope.py"
    path.parent.mkdir(parents=True)
    yield path
    for module in [m for m in sys.modules if m.startswith("liger_kernel")]:
        del sys.modules[module]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (AS_IT_WAS.replace("q: 'Tensor', k", "k, q"), "(ctx, k, q, cos, sin"),
        (AS_IT_WAS.replace("=None", "=0"), "position_ids=0"),
        (AS_IT_WAS + ", more=5", "more=5"),
        (AS_IT_WAS.replace("cos,", "*, cos,"), "*, cos"),
    ],
)
def test_peers_that_are_called_otherwise_are_absent(liger: Path, arguments: str, text: str) -> None:
    liger.write_text(LIGER.format(arguments=arguments, result="(q, k)"))
    with pytest.raises(AbsentError) as caught:
        peers.function("Liger")
    assert "it is called otherwise: LigerRopeFunction(ctx, " in str(caught.value)
    assert text in str(caught.value).partition(", not (ctx, q, k, cos")[0]


def test_peers_that_were_renamed_are_absent(liger: Path) -> None:
    liger.write_text("def other(): ...")
    with pytest.raises(
        AbsentError, match=r"liger_kernel\.ops\.rope has no LigerRopeFunction any more"
    ):
        peers.function("Liger")


@pytest.mark.parametrize("result", ["(q, k)", "(k, q)", "(q * cos, k * cos)", "1 / 0"])
def test_peers_that_rotate_wrongly_are_not_timed(liger: Path, tmp_path: Path, result: str) -> None:
    """What they give is compared, and said to be wrong, before anything is measured of them."""
    result = result.replace("* cos", "* cos[:, None]")
    liger.write_text(LIGER.format(arguments=AS_IT_WAS, result=result))
    case = replace(cases.small(cases.CASES[4]), tokens=9)
    voice = Voice(tmp_path / "lines")
    assert case.work == "in place"
    assert not timing.compare(case, Idle(), "Liger", voice)
    voice.close()
    line = json.loads((tmp_path / "lines").read_text().splitlines()[-1])
    wanted = "ZeroDivisionError" if "0" in result else "DifferentError: off by"
    assert wanted in line["failed"]


def test_peers_that_are_not_there_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    for name, peer in peers.PEERS.items():
        if peer.files and find_spec(peer.module.split(".")[0]) is None:
            with pytest.raises(AbsentError, match="neither installed nor in"):
                peers.load(name)
    broken = tmp_path / "Liger" / "src" / "liger_kernel" / "ops" / "rope.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise RuntimeError('no driver')")
    with pytest.raises(AbsentError, match="RuntimeError: no driver"):
        peers.load("Liger")
    assert "liger_kernel" not in sys.modules


def test_the_files_of_peers_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    for peer in peers.PEERS.values():
        assert peer.repository in text
        assert f"`{peer.name}`" in text
        assert peer.signature in text
        for path in peer.files:
            assert path.rsplit("/", 1)[1].removesuffix(".py") in text, path
