"""The choice of a backend, and the reasons why a faster backend does not run."""

import pytest
import torch

import tightrope
from tests.support.command import python
from tests.support.helpers import assert_form
from tests.support.matrix import every_backend, needs_kernel
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_

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
    with pytest.raises(TypeError, match="x must be a tensor but got 5") as caught:
        tightrope.which(5)  # type: ignore[arg-type]
    assert_form(caught.value, TypeError, "which")


@every_backend
def test_a_forced_backend_runs(backend: str) -> None:
    spec, x, k = RopeSpec(8), torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    y = rotate(x, spec, 3, backend=backend)
    torch.testing.assert_close(y, rotate(x, spec, 3))
    assert_same_bits(rotate_qk(x, k, spec, 3, backend=backend)[0], y)
    assert_same_bits(rotate_(x.clone(), spec, 3, backend=backend), y)
    rotate_qk_(x, k, spec, 3, backend=backend)
    assert_same_bits(x, y)


def test_without_the_native_library_the_definition_runs_and_warns_once() -> None:
    code = (
        "import pathlib, warnings\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda p, **k: False if '_native' in p.name else exists(p, **k)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import tightrope, torch\n"
        "    for _ in range(3):\n"
        "        tightrope.rotate(torch.randn(1, 2, 3, 4), tightrope.RopeSpec(4))\n"
        "ours = [str(w.message) for w in caught if 'tightrope' in str(w.message)]\n"
        "assert len(ours) == 1, ours\n"
        "assert 'pip install --no-build-isolation' in ours[0], ours\n"
        "name, reason = tightrope.which(torch.zeros(1))\n"
        "assert name == 'reference' and 'is not built' in reason\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_native_library_can_be_switched_off() -> None:
    code = "import tightrope, torch; print(*tightrope.which(torch.zeros(1)))"
    done = python("-W", "error", "-c", code, TIGHTROPE_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert "the native library is switched off by TIGHTROPE_NATIVE=0" in done.stdout


@needs_kernel
def test_a_processor_without_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_library", "_missing"):
        monkeypatch.setattr(cpu, name, getattr(cpu, name))
    monkeypatch.setattr(cpu, "instruction_sets", list)
    with pytest.warns(UserWarning, match="slower: the kernel needs a processor with AVX2"):
        cpu.register()
    assert not cpu.is_ready()


def test_instruction_sets() -> None:
    sets = cpu.instruction_sets()
    assert cpu.instruction_set() in (sets or [None])
    for name in sets:
        cpu.use_instruction_set(name)
        assert cpu.instruction_set() == name
    if HAS_CPU:
        with pytest.raises(ValueError, match=f"name must be one of {', '.join(sets)} on this"):
            cpu.use_instruction_set("mmx")
        assert cpu.instruction_set() == sets[-1]
