"""Test every verb (new, in place, out) on every route: what runs, its result or error.

What runs must be in the cell of the table in docs/design.md. Results are compared with the definition in
float64, which other files compare with the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.helpers import ROOT, noise
from tests.support.tolerances import assert_near
from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_
from tightrope.integrations import onnx
from tightrope.ops import run as running
from tightrope.ops.call import VERBS
from tightrope.ops.route import AUTOGRAD, DEFINITION, KERNEL, ROUTES, TRACED, wants_grad

DESIGN = ROOT / "docs" / "design.md"
SPEC = RopeSpec(8, rotary_dim=6, start=1, base=50.0)

Call = Callable[[torch.Tensor], torch.Tensor]


# --- the table ------------------------------------------------------------------------------------


def written_table() -> dict[tuple[str, str], str]:
    """Return the cells of the table in docs/design.md, by (verb, route)."""
    lines = DESIGN.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| | kernel |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:]]
    routes = rows[0][1:]
    verbs = itertools.takewhile(lambda row: row[0] in VERBS, rows[2:])
    return {(row[0], route): cell for row in verbs for route, cell in zip(routes, row[1:])}


def test_the_documented_table_has_every_verb_and_route() -> None:
    assert written_table().keys() == set(itertools.product(VERBS, ROUTES))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the pairs (verb, route) of the calls that run, in order.

    A call of the fast path counts as "quick".
    """
    cells: list[tuple[str, str]] = []
    run, launch_quick = running._run, running.launch_quick

    def noted(call: Any, way: Any) -> Any:
        cells.append((call.verb, way.route))
        return run(call, way)

    def quick(names: Any, verb: str, q: Any, k: Any, *rest: Any) -> Any:
        cells.append(("quick", AUTOGRAD if wants_grad(q, k) else KERNEL))
        return launch_quick(names, verb, q, k, *rest)

    monkeypatch.setattr(running, "launch_quick", quick)
    monkeypatch.setattr(running, "_run", noted)
    return cells


class Noted:
    """A stand-in for an operator or an autograd function that notes each use under a name."""

    def __init__(self, real: Any, name: str, names: list[str]) -> None:
        self.real, self.name, self.names = real, name, names

    def for_(self, packed: Any) -> Any:
        self.names.append(self.name)
        return self.real.for_(packed)

    def apply(self, *arguments: Any) -> Any:
        self.names.append(self.name)
        return self.real.apply(*arguments)

    def __call__(self, call: Any) -> Any:
        self.names.append(self.name)
        return self.real(call)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what calls use to rotate, in the words of docs/design.md."""
    names: list[str] = []
    for where, name in (
        ("NEW", "operator"),
        ("IN_PLACE", "operator in place"),
        ("OUT", "operator into `out`"),
        ("OutOfPlace", "`OutOfPlace.apply`"),
        ("Rotation", "`Rotation.apply`"),
        ("InPlace", "`InPlace.apply`"),
        ("define", "`define`"),
    ):
        monkeypatch.setattr(running, where, Noted(getattr(running, where), name, names))
    return names


# --- calls and modes ------------------------------------------------------------------------------


def by(verb: str, **options: Any) -> Call:
    """Return a function that rotates by one of ``VERBS`` and leaves its argument unchanged."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if verb == "new":
            return rotate(x, SPEC, 3, **options)
        if verb == "in place":
            return rotate_(x.clone(), SPEC, 3, **options)
        return rotate(x, SPEC, 3, out=torch.empty_like(x), **options)

    return call


def forward_mode(call: Call, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x))))
        assert tangent is not None
        return y


def compiled(call: Call, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)(x)


def exported(call: Call, x: torch.Tensor) -> torch.Tensor:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x)

    return torch.export.export(Module(), (x,)).module()(x)


def exported_to_onnx(call: Call, x: torch.Tensor) -> torch.Tensor:
    with onnx.plain_torch():
        return exported(call, x)


def mapped(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(call)(x[None])[0]


def differentiated(call: Call, x: torch.Tensor) -> torch.Tensor:
    y = call(x.requires_grad_())
    assert y.requires_grad
    return y.detach()


MODES: dict[str, tuple[str, Callable[[Call, torch.Tensor], torch.Tensor]]] = {
    "eager": (KERNEL, lambda call, x: call(x)),
    "no_grad": (KERNEL, lambda call, x: torch.no_grad()(call)(x.requires_grad_())),
    "requires grad": (AUTOGRAD, differentiated),
    "vmap": (AUTOGRAD, mapped),
    "func.grad": (AUTOGRAD, lambda call, x: torch.func.vjp(call, x)[0]),
    "forward mode": (DEFINITION, forward_mode),
    "func.jvp": (DEFINITION, lambda call, x: torch.func.jvp(call, (x,), (x,))[0]),
    "compiled vmap": (DEFINITION, lambda call, x: compiled(torch.vmap(call), x[None])[0]),
    "compiled": (TRACED, compiled),
    "compiled with grad": (TRACED, lambda call, x: compiled(call, x.requires_grad_()).detach()),
    "exported": (TRACED, exported),
    "exported to ONNX": (DEFINITION, exported_to_onnx),
    "functionalize": (TRACED, lambda call, x: torch.func.functionalize(call)(x)),
}
# Modes in which `out` is refused, because a gradient would be lost.
WITH_GRADIENT = ("requires grad", "func.grad", "compiled with grad")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_rotation(verb: str, mode: str, taken: list[tuple[str, str]], used: list[str]) -> None:
    route, under = MODES[mode]
    x = noise(1, 2, 5, 8)
    want = rotate(x, SPEC, 3, backend="reference")
    taken.clear()
    used.clear()
    if verb == "out" and mode in WITH_GRADIENT:
        error = torch._dynamo.exc.Unsupported if "compiled" in mode else ValueError
        with pytest.raises(error, match="out has no gradient" if error is ValueError else None):
            under(by(verb), x.clone())
        return
    got = under(by(verb), x.clone())
    quick = mode in ("eager", "no_grad") or (verb == "new" and mode == "requires grad")
    assert set(taken) == {("quick" if quick else verb, route)}
    cell = written_table()[verb, route]
    assert used
    assert all(name in cell for name in used)
    assert_near(got, want, "float64 ways")


ANSWERED = [
    (verb, mode)
    for verb in VERBS
    for mode in MODES
    if not (verb == "out" and mode in WITH_GRADIENT)
]


F_AND_P = {"act": RMSNorm(noise(8, seed=1)), "gate": gates.Exp(0.1 * noise(8, seed=2))}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("verb, mode", ANSWERED)
@pytest.mark.parametrize("options", [F_AND_P, {"backend": "reference"}], ids=["f and P", "forced"])
def test_the_definition_runs_if_forced_and_with_f_and_p_under_transforms(
    options: dict[str, Any], verb: str, mode: str, taken: list[tuple[str, str]]
) -> None:
    route, under = MODES[mode]
    if "backend" in options or mode in ("vmap", "func.grad"):
        route = DEFINITION
    x = noise(1, 2, 5, 8)
    want = rotate(x, SPEC, 3, **options | {"backend": "reference"})
    taken.clear()
    got = under(by(verb, **options), x.clone())
    quick = {("quick", KERNEL)} if route == KERNEL else set()
    assert set(taken) - quick <= {(verb, route)}
    assert taken[0][1] == route
    assert_near(got, want, "float64 ways")


# --- two kinds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["vmap", "func.grad"])
def test_f_and_p_under_transforms_run_as_the_definition(
    mode: str, taken: list[tuple[str, str]]
) -> None:
    _, under = MODES[mode]
    under(by("new", **F_AND_P), noise(1, 2, 5, 8))
    assert taken == [("new", DEFINITION)]


def test_a_call_of_two_kinds_runs_as_two(taken: list[tuple[str, str]]) -> None:
    from tightrope.functional import rotate_qk, rotate_qk_

    q, k = noise(1, 4, 5, 8), noise(1, 2, 5, 8, seed=1)
    wanted = rotate(q, SPEC, act="silu"), rotate(k, SPEC)
    taken.clear()
    for found in (
        rotate_qk(q, k, SPEC, act=("silu", None)),
        rotate_qk_(q.clone(), k.clone(), SPEC, act=("silu", None)),
    ):
        for one, other in zip(found, wanted):
            assert torch.equal(one, other)
    assert taken == [("new", KERNEL)] * 2 + [("in place", KERNEL)] * 2


@pytest.mark.parametrize("mode", ["vmap", "functionalize", "compiled"])
def test_two_kinds_go_into_given_tensors_under_transforms(mode: str) -> None:
    from tightrope.functional import rotate_qk

    q = noise(1, 4, 5, 8)

    def call(q: torch.Tensor) -> torch.Tensor:
        k = 2 * q[:, :2]
        outs = torch.empty_like(q), torch.empty_like(k)
        return rotate_qk(q, k, SPEC, act=("silu", "relu"), out=outs)[0]

    _, under = MODES[mode]
    assert_near(under(call, q), rotate(q, SPEC, act="silu"), "float64 ways")


def test_one_tensor_is_not_written_twice_where_there_are_no_addresses() -> None:
    from tightrope.functional import rotate_qk_

    def call(x: torch.Tensor) -> torch.Tensor:
        return rotate_qk_(x, x, SPEC, act=("silu", "relu"))[0]

    with pytest.raises(ValueError, match="the results of q and k must not share memory"):
        torch.vmap(call)(noise(2, 1, 4, 5, 8))
