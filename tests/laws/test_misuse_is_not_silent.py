"""Process-wide defaults, mislabelled tables and stale values never give a silently wrong rotation."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.refused_calls import refused_calls
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, gates, positions
from tightrope.activations import RMSNorm
from tightrope.frequencies import DynamicNTK, LongRoPE
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    polar_scan,
    rerotate,
    rotary_pos_embedding,
    rotate,
    rotate_,
    rotate_qk,
)
from tightrope.nn import RotaryPositionalEmbedding

SPEC, DYNAMIC = RopeSpec(8), RopeSpec(8, scaling=DynamicNTK(2.0, 4))
LONG = RopeSpec(8, scaling=LongRoPE((1.0,) * 4, (3.0,) * 4, 8, factor=4.0))
X = torch.linspace(-1, 1, 2 * 3 * 5 * 8).reshape(2, 3, 5, 8)
IDS = torch.tensor([3, 1, 4, 1, 5])
RANDOM = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: rotate(X, SPEC),
    "a new spec": lambda: rotate(X, RopeSpec(8, base=4242.0)),
    "ids": lambda: rotate(X, SPEC, IDS),
    "fractions": lambda: rotate(X, SPEC, IDS.to(torch.float32) / 8),
    "learned": lambda: rotate(X, SPEC.at(9, inv_freq=RANDOM[0, :4])),
    "learned, wide and fast": lambda: rotate(X, SPEC.at(9, inv_freq=RANDOM[0, :4].double() * 40)),
    "dynamic": lambda: rotate(X, DYNAMIC.at(seq_len=[5, 77])),
    "scalar gate": lambda: rotate(X, SPEC, gate=gates.Scalar(1.5)),
    "xPos": lambda: rotate(X, SPEC, 7, gate=gates.XPos(centre=3.5)),
    "rerotated": lambda: rerotate(X, SPEC, RopeSpec(8, base=99.0), IDS, 7),
    "the whole dimension": lambda: rotary_pos_embedding(X),
    "the module": lambda: RotaryPositionalEmbedding(8, base=55.0)(X),
    "scan": lambda: polar_scan(X, X, X, SPEC, -0.1)[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_defaults_of_the_process_do_not_matter(name: str) -> None:
    wanted = CALLS[name]()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        assert_same_bits(CALLS[name](), wanted)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("meta")
    assert_same_bits(CALLS[name](), wanted)


# --- values that change ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [DYNAMIC, LONG, SPEC], ids=["dynamic", "long", "plain"])
@pytest.mark.parametrize("stack", [None, "transformers"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", ["in place", "numpy", "numpy, inference tensor"])
@pytest.mark.parametrize("kind", [torch.Tensor.clone, positions.per_row])
def test_ids_that_change_are_read_again(
    spec: RopeSpec, stack: str | None, used: bool, kind: Callable[[torch.Tensor], Any], how: str
) -> None:
    own = kind is positions.per_row
    with torch.inference_mode("inference" in how):
        ids = torch.tensor([0, 3]) if own else torch.arange(5)
    x = X[:, :, :1] if own else X
    rope = spec.at(kind(ids) if own else ids, stack=stack)
    if used:
        rotate(x, rope)
    if how == "in place":
        ids[1:] += 500
    else:
        ids.numpy()[1:] += 500  # no version counter counts this
    wanted = rotate(x, spec.at(kind(ids.clone()), stack=stack))
    for _ in range(2):
        assert_same_bits(rotate(x, rope), wanted)
    assert_same_bits(rotate_(x.clone(), rope), wanted)


EXTRAS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "weight": lambda t: {"act": RMSNorm(t)},
    "exp": lambda t: {"gate": gates.Exp(t)},
    "factor": lambda t: {"gate": gates.Factor(t)},
    "slope": lambda t: {"gate": gates.Slope(0.1 * t)},
    "given": lambda t: {"gate": gates.Given(t.view(1, 1, 8))},
    "xPos": lambda _: {"gate": gates.XPos(centre=100.0)},
}


@pytest.mark.parametrize("kind", EXTRAS)
def test_weights_and_gates_that_change_are_read_again(kind: str) -> None:
    """Also without a version counter; and one prepared rotation serves any layout and number of tokens."""
    tensor, ids = RANDOM[1] + 0.5, torch.tensor([100, 7, 90, 3, 5])
    rope, offset, options = SPEC.at(ids), SPEC.at(96), EXTRAS[kind](tensor)
    for change in (lambda: None, lambda: tensor.mul_(0.5), lambda: ids.data.add_(11)):
        change()
        tensor.data.add_(0.1)
        for x, own, where, layout in (
            (X, rope, ids, "bhsd"),
            *((X.transpose(1, 2)[:, :tokens], offset, 96, "bshd") for tokens in (1, 5, 2)),
        ):
            if kind == "given" and layout == "bshd" and x.shape[1] != 5:
                continue
            wanted = rotate(x, SPEC, where, layout=layout, **options)
            for _ in range(2):
                assert_same_bits(rotate(x, own, layout=layout, **options), wanted)


# --- tables ---------------------------------------------------------------------------------------


def tables(form: str, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(1.0, tokens + 1)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    if form == "cat":
        angle = torch.cat((angle, angle), -1)
    elif form == "repeat":
        angle = angle.repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


TWICE = "cos must hold every number twice, as equal"


@pytest.mark.parametrize("function", [apply_rotary_pos_emb, apply_rotary_pos_emb_])
@pytest.mark.parametrize(
    ("form", "wrong", "held"),
    [
        ("half", "cat", "halves"),
        ("half", "repeat", "neighbours"),
        ("cat", "repeat", "neighbours"),
        ("repeat", "cat", "halves"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_tables_of_another_format_than_is_said_are_refused(
    function: Any, form: str, wrong: str, held: str, tokens: int
) -> None:
    x = X[:, :, :tokens].clone()
    with pytest.raises(ValueError, match=f"{TWICE} {held}, for tables={wrong!r}, but its last row"):
        function(x, None, *tables(form, tokens), tables=wrong)
    assert_same_bits(x, X[:, :, :tokens])


def test_correctly_labelled_tables_pass() -> None:
    wanted, _ = apply_rotary_pos_emb(X, None, *tables("half"), tables="half")
    for form in ("cat", "repeat"):
        turn, (cos, sin) = partial(apply_rotary_pos_emb, X, None, tables=form), tables(form)
        assert_same_bits(turn(cos, sin)[0], wanted)
        lost = cos.clone()
        lost[-1] = torch.nan
        assert turn(lost, sin)[0][:, :, -1].isnan().all()
        for dtype in (torch.bfloat16, torch.float16):
            turn(cos.to(dtype), sin.to(dtype))
        # Vectorised and scalar loops may differ in the last bit.
        near = torch.nextafter(cos, torch.ones(()))
        near[:, :1] = cos[:, :1]
        assert not torch.equal(near, cos)
        turn(near, sin)


def test_tables_that_change_are_looked_at_again_unless_they_learn() -> None:
    cos, sin = tables("cat")
    learned = [table.clone().requires_grad_() for table in (cos, sin)]
    for _ in range(2):
        apply_rotary_pos_emb(X, None, cos, sin)
    with pytest.raises(ValueError, match=TWICE):
        apply_rotary_pos_emb(X, None, cos, sin, tables="repeat")
    cos[-1, :4] += 1
    with pytest.raises(ValueError, match=TWICE):
        apply_rotary_pos_emb(X, None, cos, sin)
    apply_rotary_pos_emb(X, None, *learned)[0].sum().backward()
    with torch.no_grad():
        for table in learned:
            table -= table.grad
    apply_rotary_pos_emb(X, None, *learned)


# --- errors ---------------------------------------------------------------------------------------

RAGGED = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged)
NARROWED = torch.nested.narrow(X[0], 1, IDS[:3], IDS[:3], layout=torch.jagged)
COS = tables("cat")
test_calls = refused_calls(Path(__file__).with_name("refused_calls.jsonl"), {}, globals())


@pytest.mark.parametrize("shape, transposed", [((8,), False), ((2, 8), False), ((2, 8), True)])
def test_the_advice_for_ragged_tensors_works(shape: tuple[int, ...], transposed: bool) -> None:
    rows = [torch.randn(3, *shape), torch.randn(5, *shape)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    if transposed:
        ragged = ragged.transpose(1, 2)
    with pytest.raises(TypeError) as caught:
        rotate(ragged, SPEC)
    call = r".*; call tightrope.functional.rotate on (x.*) with (.*) and layout='(\w+)'\."
    values, where, layout = re.fullmatch(call, str(caught.value)).groups()  # type: ignore[union-attr]
    here = {"x": ragged, "positions": positions}
    turned = rotate(eval(values, here), SPEC, eval(where, here), layout=layout)
    assert_same_bits(turned, torch.cat([rotate(row, SPEC, layout=layout) for row in rows]))


def test_a_name_of_the_hub_is_no_path(tmp_path: Path) -> None:
    name = tmp_path / "some" / "model"
    with pytest.raises(
        FileNotFoundError, match="for a model that is not on this machine, pass its"
    ):
        RopeSpec.from_config(name)
    name.mkdir(parents=True)
    config = {"model_type": "llama", "head_dim": 8, "hidden_size": 64, "num_attention_heads": 8}
    (name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    assert RopeSpec.from_config(name).head_dim == 8


GATES = {
    "log_factor": [
        gates.Scalar(1.5),
        gates.Exp(torch.full((8,), 0.5)),
        gates.Slope(torch.full((8,), 0.5)),
        gates.Given(torch.full((1, 5, 1, 8), 0.5)),
        gates.XPos(centre=0.0),
    ],
    "factor": [gates.Factor(torch.full((8,), -0.5))],
}


@pytest.mark.parametrize("method, gate", [(name, one) for name in GATES for one in GATES[name]])
@pytest.mark.parametrize("act", ["none", "silu"])
def test_a_method_that_a_gate_overrides_is_called(method: str, gate: Any, act: str) -> None:
    """Also that of a gate whose class derives from one of the library: every factor is 1 here."""

    def none(self: Any, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), float(method == "factor"))

    own = type("Own", (type(gate),), {method: none})
    without = own(**{field.name: getattr(gate, field.name) for field in dataclasses.fields(gate)})
    plain, gated, kept = (
        rotate(X[:1, :3], SPEC, 5, act=act, gate=each) for each in (None, gate, without)
    )
    assert_near(kept, plain, "float32 ways")
    assert not torch.equal(gated, plain)


def test_gates_of_q_and_k_whose_class_compares_tensors() -> None:
    """A dataclass compares its fields by ==, which has no truth value for tensors of several numbers."""
    own = dataclasses.dataclass(frozen=True)(type("Own", (gates.Exp,), {}))
    pair = own(torch.full((8,), 0.5)), own(torch.linspace(0, 1, 8))
    for y, gate in zip(rotate_qk(X, X, SPEC, gate=pair), pair, strict=True):
        assert_same_bits(y, rotate(X, SPEC, gate=gate))
