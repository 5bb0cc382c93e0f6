"""The choice of a backend, and the reasons why a faster backend does not run."""

import pytest
import torch

import tightrope
from tests.support.command import python
from tests.support.helpers import refused
from tightrope import RopeSpec
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_, rotate_qk, rotate_qk_
from tightrope.ops.registry import BACKENDS

HAS_CPU = tightrope.backends.why_not()["cpu"] is None


def test_every_backend_offers_the_contract_and_no_more() -> None:
    for name, backend in BACKENDS.items():
        assert callable(backend.register), name
        assert callable(backend.why_not), name
    assert list(BACKENDS) == list(tightrope.backends.why_not())
    assert list(BACKENDS)[-1] == "reference"
    assert tightrope.backends.why_not()["reference"] is None


def test_which() -> None:
    name, reason = tightrope.which(torch.zeros(1, device="meta"))
    assert name == "reference"
    assert reason is not None
    assert reason.startswith("cpu: ")
    name, reason = tightrope.which(torch.zeros(1))
    assert (name, reason is None) == (("cpu", True) if HAS_CPU else ("reference", False))
    with pytest.raises(TypeError, match=r"^\[which\] x must be a tensor but got 5\.$"):
        tightrope.which(5)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_a_forced_backend_runs(backend: str | None) -> None:
    if backend == "cpu" and not HAS_CPU:
        pytest.skip(f"cpu: {tightrope.backends.why_not()['cpu']}")
    spec = RopeSpec(8)
    x, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    y = rotate(x, spec, 3, backend=backend)
    torch.testing.assert_close(y, rotate(x, spec, 3, backend="reference"))
    assert torch.equal(rotate_qk(x, k, spec, 3, backend=backend)[0], y)
    assert torch.equal(rotate_(x.clone(), spec, 3, backend=backend), y)
    rotate_qk_(x, k, spec, 3, backend=backend)
    assert torch.equal(x, y)


def test_the_choice_is_real() -> None:
    """The dispatcher has a CPU kernel if and only if `which` returns "cpu"."""
    x = torch.randn(2, 3, 5, 8)
    own = torch._C._dispatch_has_kernel_for_dispatch_key("tightrope::rotate", "CPU")
    assert own == (tightrope.which(x)[0] == "cpu")
    own = torch._C._dispatch_has_kernel_for_dispatch_key("tightrope::rotate_", "CPU")
    assert own == (tightrope.which(x)[0] == "cpu")


def test_without_the_native_library_the_definition_runs_and_warns_once() -> None:
    code = (
        "import pathlib, warnings\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda p, **k: False if '_native' in p.name else exists(p, **k)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import tightrope, torch\n"
        "    from tightrope.functional import rotate\n"
        "    for _ in range(3):\n"
        "        rotate(torch.randn(1, 2, 3, 4), tightrope.RopeSpec(4))\n"
        "ours = [str(w.message) for w in caught if 'tightrope' in str(w.message)]\n"
        "assert len(ours) == 1, ours\n"
        "assert 'pip install --no-build-isolation' in ours[0], ours\n"
        "name, reason = tightrope.which(torch.zeros(1))\n"
        "assert name == 'reference' and 'is not built' in reason\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_native_library_can_be_switched_off() -> None:
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import tightrope, torch\n"
        "print(*tightrope.which(torch.zeros(1)))\n"
    )
    done = python("-c", code, TIGHTROPE_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "reference cpu: the native library is switched off by TIGHTROPE_NATIVE=0"
    )


def test_a_processor_without_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CPU:
        pytest.skip("no native library")
    for name in ("_library", "_missing"):
        monkeypatch.setattr(cpu, name, getattr(cpu, name))
    monkeypatch.setattr(cpu, "instruction_sets", list)
    with pytest.warns(UserWarning, match="slower: the kernel needs a processor with AVX2"):
        cpu.register()
    assert not cpu.is_ready()


def test_instruction_sets() -> None:
    if not HAS_CPU:
        assert cpu.instruction_set() is None
        assert cpu.instruction_sets() == []
        return
    assert cpu.instruction_set() in cpu.instruction_sets()
    assert len(set(cpu.instruction_sets())) == len(cpu.instruction_sets())
    for name in cpu.instruction_sets():
        cpu.use_instruction_set(name)
        assert cpu.instruction_set() == name
    sets, last = ", ".join(cpu.instruction_sets()), cpu.instruction_set()
    text = f"[use_instruction_set] name must be one of {sets} on this processor but got 'mmx'."
    with refused(ValueError, text):
        cpu.use_instruction_set("mmx")
    assert cpu.instruction_set() == last
