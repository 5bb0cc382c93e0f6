"""What constructors of values and modules refuse, as rows of refusals.jsonl; and what activations and gates refuse."""

import builtins
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import assert_form, refusals
from tightrope import RopeSpec, frequencies, nn, stacks
from tightrope._errors import public
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.frequencies import Given as GivenFrequencies, Rule
from tightrope.functional import build_freqs_cis, rotate, rotate_qk
from tightrope.gates import Channels, Exp, Given, Scalar, Slope, XPos, pair, total

CALLS: dict[str, Callable[..., object]] = {
    **{kind.__name__: kind for kind in frequencies.RULES.values()},
    **{kind.__name__: kind for kind in (RopeSpec, Axes, RMSNorm, Scalar, XPos)},
    **{name: getattr(nn, name) for name in nn.__all__},
    **{f"Axes.{name}": getattr(Axes, name) for name in ("sections", "blocks", "strided")},
    "RopeSpec.from_dict": RopeSpec.from_dict,
    "Rule.from_dict": Rule.from_dict,
    "Given.of": GivenFrequencies.of,
    "build_freqs_cis": build_freqs_cis,
    "stacks.get": stacks.get,
}
ROWS = Path(__file__).with_name("refusals.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("text", ROWS)
def test_refused_arguments(text: str) -> None:
    """`call` with the arguments `given` raises this `error` with the `phrase`, and names itself, or `of`."""
    row = json.loads(text)
    kind = getattr(builtins, row["error"])
    with pytest.raises(kind, match=re.escape(row["phrase"])) as caught:
        CALLS[row["call"]](**row["given"])
    assert_form(caught.value, kind, row.get("of", row["call"]))


X, HEADS = torch.zeros(1, 2, 3, 8), torch.zeros(2, 3, 5, 8)
LONG, MODULE = torch.ones(8).long(), torch.nn.RMSNorm(8)
CHANNELS = Channels(8, 0, 8, True)
FAR = torch.tensor([[0, 100_000]])


def turn(**options: Any) -> Callable[[], object]:
    return lambda: rotate(X, RopeSpec(8), **options)


def fit(name: str, gate: Any) -> Callable[[], object]:
    return lambda: public("rotate")(total)(name, HEADS, [gate], CHANNELS)


test_activations = refusals(
    ValueError={
        "[rotate] act must be one of none, relu": turn(act="swish"),
        "[rotate] act must be given as RMSNorm(weight), or": turn(act="rmsnorm"),
        "or RMSNorm() without a weight, but got 'rms_norm'": turn(act="rms_norm"),
        "[rotate_qk] act must be one activation, or a pair for q and k, but got 3": (
            lambda: rotate_qk(X, X, RopeSpec(8), act=("silu",) * 3)
        ),
        "[rotate] inverse must be False with an act": turn(act="exp", inverse=True),
        "[rotate] the weight of RMSNorm for x must have shape (8,) or (2, 8)": [
            turn(act=RMSNorm(torch.ones(7))),
            turn(act=RMSNorm(torch.ones(3, 8))),
        ],
        "[rotate] the weight of RMSNorm is on meta but x is on cpu": (
            turn(act=RMSNorm(torch.ones(8, device="meta")))
        ),
        "[RMSNorm] weight must have shape": lambda: RMSNorm(X[0]),
        "[rotate] a result written to out has no gradient, but act or gate require one": (
            turn(gate=Exp(torch.zeros(8, requires_grad=True)), out=torch.empty_like(X))
        ),
    },
    TypeError={
        "[rotate] act must be a single value for one tensor": turn(act=("silu", None)),
        "[rotate] gate must be a single value for one tensor": turn(gate=(None, None)),
        "[rotate] act must be None, one of none": turn(act=3),
        "RMSNorm(module.weight, eps=...)": [turn(act=MODULE), lambda: RMSNorm(MODULE)],
        "[rotate] gate must be None, a gate": turn(gate=2.0),
        "[RMSNorm] weight must be a floating tensor": lambda: RMSNorm(LONG),
    },
)
test_gates = refusals(
    ValueError={
        "[Scalar] value must be finite": lambda: Scalar(-(10**400)),
        "[Scalar] value must have shape ()": lambda: Scalar(torch.zeros(2)),
        "[Exp] gamma must have shape (channels,)": lambda: Exp(X[0]),
        "[Exp] gamma must have 1 or 8 channels": lambda: Exp(torch.zeros(7)).factor(CHANNELS),
        "[Exp] gamma must have 1 or 4 pairs": lambda: Exp(LONG.float(), "pair").factor(CHANNELS),
        "[Slope] tied must be None or 'pair'": lambda: Slope(torch.zeros(8), tied="head"),
        "[Slope] positions must be given": lambda: Slope(torch.zeros(8)).factor(CHANNELS),
        "[Given] log must have shape (tokens, heads, channels) or": lambda: Given(X[0, 0]),
        "[XPos] positions must lie within 36260 of the centre 0, or the factor overflows float32": (
            lambda: XPos(centre=0).factor(CHANNELS, FAR)
        ),
        "within 4532 of the centre 0, or the factor overflows float16": (
            lambda: XPos(centre=0).factor(CHANNELS, FAR // 10, torch.float16)
        ),
        "[rotate] the gate Exp must have 1 or 3 heads for q": fit("q", Exp(X[0, 0, :2])),
        "the gate Given must have 1 or 5 tokens for k": fit("k", Given(torch.zeros(4, 1, 1))),
        "the gate Given must have 1 or 2 rows": fit("k", Given(torch.zeros(3, 1, 1, 1))),
        "[rotate] gamma of the gate Exp is on meta but q is on cpu": (
            fit("q", Exp(torch.zeros(8, device="meta")))
        ),
    },
    TypeError={
        "[Exp] gamma must be a floating tensor": lambda: Exp(LONG),
        "[rotate] gate must be None, a gate of tightrope.gates, or a pair": (
            lambda: public("rotate")(pair)("silu")
        ),
    },
)
