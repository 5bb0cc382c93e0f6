"""What constructors of values and modules refuse, as rows of refused_calls.jsonl; and what activations and gates refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.refused_calls import refused_calls
from tightrope import RopeSpec, frequencies, nn, stacks
from tightrope._errors import public
from tightrope.activations import RMSNorm
from tightrope.axes import Axes
from tightrope.frequencies import Given, Rule
from tightrope.functional import build_freqs_cis, rotate
from tightrope.gates import Channels, Scalar, XPos, pair
from tightrope.ops.gating import Stages, lower
from tightrope.ops.layouts import BY_NAME

CALLS: dict[str, Callable[..., object]] = {
    **{kind.__name__: kind for kind in frequencies.RULES.values()},
    **{kind.__name__: kind for kind in (RopeSpec, Axes, RMSNorm, Scalar, XPos)},
    **{name: getattr(nn, name) for name in nn.__all__},
    **{f"Axes.{name}": getattr(Axes, name) for name in ("sections", "blocks", "strided")},
    "RopeSpec.from_dict": RopeSpec.from_dict,
    "Rule.from_dict": Rule.from_dict,
    "Given.of": Given.of,
    "build_freqs_cis": build_freqs_cis,
    "stacks.get": stacks.get,
}
X, HEADS = torch.zeros(1, 2, 3, 8), torch.zeros(2, 3, 5, 8)
LONG, MODULE = torch.ones(8).long(), torch.nn.RMSNorm(8)
CHANNELS = Channels(8, 0, 8, True)
FAR = torch.tensor([[0, 100_000]])


def turn(**options: Any) -> Callable[[], object]:
    return lambda: rotate(X, RopeSpec(8), **options)


def fit(name: str, gate: Any) -> Callable[[], object]:
    stages = Stages((None, None), ([gate], []))
    given = stages, (name,), [HEADS], BY_NAME["bhsd"], RopeSpec(8).at(), False
    return lambda: public("rotate")(lower)(*given)


paired = public("rotate")(pair)
test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), CALLS, globals())
