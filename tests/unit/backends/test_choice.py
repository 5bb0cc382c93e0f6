"""The choice of a backend, and the reasons why a faster backend does not run."""

import contextlib

import pytest
import torch

import tightrope
from tests.support.command import python
from tests.support.helpers import in_threads, on
from tests.support.matrix import every_backend, needs_kernel
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_, rotate_qk

HAS_CPU = tightrope.backends.why_not()["cpu"] is None


def test_which() -> None:
    """The dispatcher has a CPU kernel if and only if `which` returns "cpu"."""
    assert list(tightrope.backends.why_not())[-1] == "reference"
    assert tightrope.backends.why_not()["reference"] is None
    name, reason = tightrope.which(torch.zeros(1, device="meta"))
    assert (name, str(reason)[:5]) == ("reference", "cpu: ")
    name, reason = tightrope.which(torch.zeros(1))
    assert (name, reason is None) == (("cpu", True) if HAS_CPU else ("reference", False))
    for operator in ("tightrope::rotate", "tightrope::rotate_"):
        assert HAS_CPU == torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")
    with pytest.raises(TypeError, match=r"^\[which\] x must be a tensor but got 5\.$"):
        tightrope.which(5)  # type: ignore[arg-type]


@every_backend
def test_a_forced_backend_runs(backend: str) -> None:
    spec, x, k = RopeSpec(8), torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    y = on(backend, rotate, x, spec, 3)
    torch.testing.assert_close(y, rotate(x, spec, 3))
    assert_same_bits(on(backend, rotate_qk, x, k, spec, 3)[0], y)
    assert_same_bits(on(backend, rotate_, x, spec, 3), y)


def test_a_backend_is_forced_in_all_threads() -> None:
    """Inside the block; after it, also after an error or a block within it, none is."""
    x, caught = torch.zeros(1, 1, 2, 8, device="meta"), []

    def call() -> None:
        try:
            rotate(x, RopeSpec(8))
        except NotImplementedError as error:
            caught.append(str(error))

    with contextlib.suppress(NotImplementedError), tightrope.backends.use("cpu"):
        with tightrope.backends.use("reference"):
            rotate(x, RopeSpec(8))
        in_threads(call, call)
        rotate(x, RopeSpec(8))
    assert [text[:26] for text in caught] == ["[rotate] backend 'cpu' can"] * 2
    in_threads(call, call)
    assert len(caught) == 2


def test_blocks_that_overlap_leave_no_backend_forced() -> None:
    """As those of two threads may; the block that began last and is still open decides."""
    x, blocks = (
        torch.zeros(1, 1, 2, 8, device="meta"),
        map(tightrope.backends.use, ("cpu", "reference")),
    )
    with contextlib.ExitStack() as second:
        with contextlib.ExitStack() as first:
            for stack, block in zip((first, second), blocks):
                stack.enter_context(block)
            rotate(x, RopeSpec(8))
        rotate(x, RopeSpec(8))
    with tightrope.backends.use("cpu"), pytest.raises(NotImplementedError):
        rotate(x, RopeSpec(8))
    rotate(x, RopeSpec(8))


WITHOUT = """
import pathlib, warnings
exists = pathlib.Path.exists
pathlib.Path.exists = lambda p, **k: '_native' not in p.name and exists(p, **k)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import tightrope, torch
    for _ in range(3):
        tightrope.rotate(torch.randn(1, 2, 3, 4), tightrope.RopeSpec(4))
print(*[w.message for w in caught if 'tightrope' in str(w.message)], *tightrope.which(torch.zeros(1)), sep="@")
"""


def test_without_the_native_library_the_definition_runs_and_warns_once() -> None:
    done = python("-c", WITHOUT)
    assert done.returncode == 0, done.stderr
    warning, name, reason = done.stdout.split("@")
    assert "pip install --no-build-isolation" in warning
    assert name == "reference"
    assert "is not built" in reason
    code = "import tightrope, torch; print(*tightrope.which(torch.zeros(1)))"
    done = python("-W", "error", "-c", code, TIGHTROPE_NATIVE="0")
    assert "the native library is switched off by TIGHTROPE_NATIVE=0" in done.stdout, done.stderr


@needs_kernel
def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = cpu.instruction_sets()
    assert cpu.instruction_set() in sets
    for name in sets:
        cpu.use_instruction_set(name)
        assert cpu.instruction_set() == name
    with pytest.raises(ValueError, match=f"name must be one of {', '.join(sets)} on this"):
        cpu.use_instruction_set("mmx")
    assert cpu.instruction_set() == sets[-1]
    for name in ("_library", "_missing"):
        monkeypatch.setattr(cpu, name, getattr(cpu, name))
    monkeypatch.setattr(cpu, "instruction_sets", list)
    with pytest.warns(UserWarning, match="slower: the kernel needs a processor with AVX2"):
        cpu.register()
    assert not cpu.is_ready()
