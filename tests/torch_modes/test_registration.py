"""Compiled transforms of the tensors that a call takes beside q and k."""

import itertools
from functools import partial

import pytest
import torch

from tests.support import helpers
from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.functional import rotate, rotate_

noise = partial(helpers.noise, dtype=torch.float32)
pytestmark = pytest.mark.usefixtures("fresh_compiler")

# Functions of x and of a row of eight numbers; the transforms apply to the row.
EXTRAS = {
    "a norm": lambda x, w: rotate(x, RopeSpec(8), 3, act=RMSNorm(w)),
    "a gate": lambda x, w: rotate(x, RopeSpec(8), 3, gate=gates.Exp(w)),
    "a slope": lambda x, w: rotate(x, RopeSpec(8), 3, gate=gates.Slope(w / 8)),
    "frequencies": lambda x, w: rotate(x, RopeSpec(8).at(3, inv_freq=w[:4])),
    "x": lambda x, w: rotate(x * w, RopeSpec(8), 3, act="silu"),
    "x in place": lambda x, w: rotate_(x * w, RopeSpec(8), 3, act="silu"),
    "x into": lambda x, w: rotate(x * w, RopeSpec(8), 3, out=torch.empty_like(x * w)),
}


TRANSFORMS = {
    "vmap": torch.vmap,
    "vmap of grad": lambda one: torch.vmap(torch.func.grad(lambda row: one(row).pow(3).sum())),
    "grad of vmap": lambda one: torch.func.grad(lambda rows: torch.vmap(one)(rows).pow(3).sum()),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "what, transform",
    [
        ("x into", "vmap"),  # out= allows no tensor that requires grad
        *itertools.product([*EXTRAS][:-1], [*TRANSFORMS][1:]),
    ],
)
def test_compiled_transforms_of_extra_tensors(what: str, transform: str) -> None:
    """While compiling, torch ignores gradient formulas registered from Python.

    tests/laws/test_calls.py has the same transforms in eager code.
    """
    x, rows = noise(2, 3, 5, 8, dtype=torch.float64), noise(4, 8, dtype=torch.float64)
    run = TRANSFORMS[transform](lambda row: EXTRAS[what](x, row))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows), run(rows), rtol=1e-9, atol=1e-9)
