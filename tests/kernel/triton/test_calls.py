"""The Triton kernels make the calls of tests/support/calls.py as the definition in float64 does.

Where they run is explained in tests/support/triton/cases.py. Where a dispatch mode watches, calls with tensors of the
CPU take the way of those on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.support import calls, oracle, table_calls
from tests.support.caches import check_entries, check_keys_and_values
from tests.support.calls import CASES, Call
from tests.support.helpers import Watcher, noise
from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_each, assert_same_bits, value
from tests.support.triton.cases import (
    DEVICE,
    kernels_in_place,
    needs_fma,
    needs_triton,
    on_this_device,
    use_programs,
)

__all__ = ["on_this_device"]

pytestmark = needs_triton
in_place = pytest.mark.usefixtures("on_this_device")

# Channels of a head, rotated ones, and the first of these: with units of 16 bytes and without, with padding.
SHAPES = ((16, 16, 0), (24, 12, 4), (20, 14, 6), (128, 64, 32))
Results = dict[str, torch.Tensor]


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """A case, its number and that of programs, in sizes that leave lanes of a tile, and the second of two heads, without work.

    One in eight cases has a program for each of its fewer tokens, which takes the interpreter long.
    """
    width, rotated, start = SHAPES[request.param % len(SHAPES)]
    programs, count = (512, 2) if request.param // len(SHAPES) % 8 == 7 else (1, 3)
    for name, size in (("ROWS", count), ("HEADS", count), ("WIDTH", width)):
        monkeypatch.setattr(calls, name, size)
    monkeypatch.setattr(calls, "CHANNELS", dict.fromkeys(calls.CHANNELS, (rotated, start)))
    return {**CASES[request.param], "programs": programs, "number": request.param}


def every_case(n: int, step: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each case, or one in so many; in the fast run for one in n of these.

    `make emulate` runs every other case of each shape, which the slow tests leave out.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        numbers = range(0, len(CASES), step)
        left_out = [(i // 4 + i // 32) % 2 * [pytest.mark.emulated] for i in numbers]
        cases = [pytest.param(i, marks=marks) for i, marks in zip(numbers, left_out, strict=True)]
        return pytest.mark.one_in(n)(pytest.mark.parametrize("case", cases, indirect=True)(test))

    return decorate


def results_of(case: Mapping[str, Any], leaves: Results, **changes: Any) -> Results:
    """Return the results of a call, and the gradients of its leaves, by name."""
    call = Call({**case, **changes})
    given, learned = call.new_leaves(leaves)
    with torch.device(next(iter(leaves.values())).device):
        ys = call(**given)
    seeds = [noise(*y.shape, seed=9 + i).to(case["dtype"]).to(y) for i, y in enumerate(ys)]
    grads = torch.autograd.grad(ys, list(learned.values()), seeds)
    found = {f"result {i}": y.detach() for i, y in enumerate(ys)}
    return found | dict(zip(learned, grads, strict=True))


@in_place
@every_case(8)
def test_results_and_gradients_are_those_of_the_definition(
    case: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In programs of a tile each, or of a token each; then sums by weights take several launches.

    With the rounding "each", 16 bits also hold cosine, sine and both products, of which each rounds by half an eps.
    """
    from tightrope.backends.triton import blocks

    use_programs(case["programs"])
    if case["programs"] > 1:
        monkeypatch.setattr(blocks, "MOST_SUMS", 1)
        for name in ("BACK", "APART"):
            few = {size: of._replace(pairs=16) for size, of in getattr(blocks, name).items()}
            monkeypatch.setattr(blocks, name, few)  # so that there are several tiles
    kind, call = case["dtype"], Call(case)
    leaves, spec = call.leaves, call.spec
    found = results_of(case, {n: x.clone().to(DEVICE) for n, x in leaves.items()}, backend=None)
    wide = {"dtype": torch.float64, "backend": "reference"}
    wanted = results_of(case, {name: x.double() for name, x in leaves.items()}, **wide)
    own = "triton, float64" if kind == torch.float64 else "triton, float32"
    sums = own if kind == torch.float64 else f"triton on a device, {torch.float32}"
    sums = f"f and P, {str(kind)[6:]}" if kind.itemsize == 2 else sums
    for name, want in wanted.items():
        got = found[name].cpu().double()
        assert got.shape == want.shape
        bound = value(sums) * want.abs().amax()
        if name == "gate" and case["gate"] == "scalar" and kind.itemsize == 2:
            # One sum over all elements, of which each has a rounded result: terms may cancel, their errors do not.
            ys = [y for key, y in wanted.items() if key.startswith("result")]
            terms = [y * noise(*y.shape, seed=9 + i) for i, y in enumerate(ys)]
            bound = torch.finfo(kind).eps / 2 * sum(t.abs().sum() for t in terms) / leaves["gate"]
        if name.startswith("result"):
            bound = value(own) * want.abs().amax(-1, keepdim=True)
            if kind in oracle.FORMATS:
                bound = bound + oracle.step_sizes(want, kind) / 2
            if kind.itemsize == 2 and case["rounding"] == "each":
                lengths = oracle.pair_lengths(
                    want, spec.rotary_dim, start=spec.start, interleaved=spec.interleaved
                )
                bound = bound + torch.finfo(kind).eps * lengths
        assert bool(((got - want).abs() <= bound).all()), (name, (got - want).abs().max())


@in_place
@every_case(6, step=3)
def test_bits_depend_on_neither_programs_nor_strides_nor_place(case: Mapping[str, Any]) -> None:
    """Heads that rotate whole have no activation and no gate here: then two are loaded together."""
    if case["number"] % len(SHAPES) == 0:
        case = {**case, "act": "none", "gate": "none"}
    if case["dtype"] == torch.float64:  # with an activation the definition runs
        case = {**case, "dtype": torch.float32}
    call = Call(case)
    leaves = {name: x.to(DEVICE) for name, x in call.leaves.items()}
    verb = "rotate_qk" if "qk" in case["verb"] else "rotate"

    def made(own: Results | None = None, **changes: Any) -> tuple[torch.Tensor, ...]:
        with Watcher(), torch.device(DEVICE):
            return Call({**case, "backend": None, **changes})(**leaves | (own or {}))

    want = made(verb=verb)
    xs = {name: x for name, x in leaves.items() if name in "qk"}
    gaps = {name: torch.cat((x, x * torch.nan), -1)[..., : x.shape[-1]] for name, x in xs.items()}
    apart = {name: torch.stack((x, x * torch.nan), -1)[..., 0] for name, x in xs.items()}
    turned = {name: x.transpose(-1, 0).contiguous().transpose(-1, 0) for name, x in xs.items()}
    for programs, own, place in (
        (1, gaps, f"{verb} into"),
        (3, apart, verb),
        (case["programs"], turned, f"{verb}_"),
    ):
        use_programs(programs)
        assert_each(assert_same_bits, made(own, verb=place), want)


@needs_kernel
@needs_fma
@every_case(4, step=3)
def test_plain_rotations_have_the_bits_of_the_cpu_kernel(case: Mapping[str, Any]) -> None:
    kind = torch.float32 if case["dtype"] == torch.float64 else case["dtype"]
    call = Call({**case, "act": "none", "gate": "none", "dtype": kind, "backend": None})
    want = call()
    with kernels_in_place(), Watcher(), torch.device(DEVICE):
        found = call(**{name: x.to(DEVICE) for name, x in call.leaves.items()})
    assert_each(assert_same_bits, [y.cpu() for y in found], want)


@in_place
@every_case(5, step=5)
def test_keys_and_values_go_to_a_cache(case: Mapping[str, Any]) -> None:
    use_programs(case["programs"])
    with Watcher():
        check_keys_and_values({**case, "backend": None}, case["number"], False, DEVICE)


@in_place
@every_case(3, step=5)
def test_entries_rotate_in_place(case: Mapping[str, Any]) -> None:
    use_programs(case["programs"])
    with Watcher():
        check_entries({**case, "backend": None}, case["number"], case["number"] % 2 > 0, DEVICE)


@in_place
@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", table_calls.CASES[::3], ids=range(len(table_calls.CASES[::3])))
def test_tables(case: Mapping[str, Any]) -> None:
    with Watcher():
        table_calls.check_tables({**case, "backend": None}, DEVICE)
