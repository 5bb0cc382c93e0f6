"""Process-wide defaults, mislabelled tables and stale ids never give a silently wrong rotation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import refusals, refused
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, gates, positions
from tightrope.frequencies import DynamicNTK, LongRoPE
from tightrope.functional import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_,
    lrpe_rotate_1d,
    polar_scan,
    rerotate,
    rotary_pos_embedding,
    rotate,
    rotate_,
)
from tightrope.nn import RotaryPositionalEmbedding

SPEC = RopeSpec(8)
DYNAMIC = RopeSpec(8, scaling=DynamicNTK(2.0, 4))
X = torch.linspace(-1, 1, 2 * 3 * 5 * 8).reshape(2, 3, 5, 8)
IDS = torch.tensor([3, 1, 4, 1, 5])
HALVES = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: rotate(X, SPEC),
    "a new spec": lambda: rotate(X, RopeSpec(8, base=4242.0)),
    "ids": lambda: rotate(X, SPEC, IDS),
    "fractions": lambda: rotate(X, SPEC, IDS.to(torch.float32) / 8),
    "learned": lambda: rotate(X, SPEC, 9, inv_freq=HALVES[0, :4]),
    "learned, wide and fast": lambda: rotate(X, SPEC, 9, inv_freq=HALVES[0, :4].double() * 40),
    "dynamic": lambda: rotate(X, DYNAMIC, seq_len=[5, 77]),
    "scalar gate": lambda: rotate(X, SPEC, gate=gates.Scalar(1.5)),
    "xPos": lambda: rotate(X, SPEC, 7, gate=gates.XPos(centre=3.5)),
    "rerotated": lambda: rerotate(X, SPEC, RopeSpec(8, base=99.0), IDS, 7),
    "the whole dimension": lambda: rotary_pos_embedding(X),
    "the module": lambda: RotaryPositionalEmbedding(8, base=55.0)(X),
    "scan": lambda: polar_scan(X, X, X, SPEC, -0.1)[0],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_the_default_dtype_does_not_matter(name: str, dtype: torch.dtype) -> None:
    wanted = CALLS[name]()
    torch.set_default_dtype(dtype)
    assert_same_bits(CALLS[name](), wanted)


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_does_not_matter(name: str) -> None:
    wanted = CALLS[name]()
    torch.set_default_device("meta")
    assert_same_bits(CALLS[name](), wanted)


# --- ids that change -------------------------------------------------------------------------------

LONG = RopeSpec(8, scaling=LongRoPE((1.0,) * 4, (3.0,) * 4, 8, factor=4.0))


every_rule = pytest.mark.parametrize(
    "spec", [DYNAMIC, LONG, SPEC], ids=["dynamic", "long", "plain"]
)


@every_rule
@pytest.mark.parametrize("stack", [None, "transformers"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", ["in place", "numpy", "numpy, inference tensor"])
@pytest.mark.parametrize("kind", [torch.Tensor.clone, positions.per_row])
def test_ids_that_change_are_read_again(
    spec: RopeSpec, stack: str | None, used: bool, kind: Callable[[torch.Tensor], Any], how: str
) -> None:
    with torch.inference_mode("inference" in how):
        ids = torch.arange(5) if kind is torch.Tensor.clone else torch.tensor([0, 3])
    where: Any = ids if kind is torch.Tensor.clone else kind(ids)
    x = X if kind is torch.Tensor.clone else X[:, :, :1]
    rope = spec.at(where, stack=stack)
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


# --- tables ---------------------------------------------------------------------------------------


def _tables(form: str, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(1.0, tokens + 1)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    if form == "cat":
        angle = torch.cat((angle, angle), -1)
    elif form == "repeat":
        angle = angle.repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


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
    cos, sin = _tables(form, tokens)
    text = (
        f"cos must hold every number twice, as equal {held}, for tables={wrong!r}, but its last row"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        function(x, None, cos, sin, tables=wrong)
    assert_same_bits(x, X[:, :, :tokens])


def test_correctly_labelled_tables_pass() -> None:
    wanted, _ = apply_rotary_pos_emb(X, None, *_tables("half"), tables="half")
    for form in ("cat", "repeat"):
        cos, sin = _tables(form)
        assert_same_bits(apply_rotary_pos_emb(X, None, cos, sin, tables=form)[0], wanted)
        lost = cos.clone()
        lost[-1] = torch.nan
        assert apply_rotary_pos_emb(X, None, lost, sin, tables=form)[0][:, :, -1].isnan().all()
        for dtype in (torch.bfloat16, torch.float16):
            apply_rotary_pos_emb(X, None, cos.to(dtype), sin.to(dtype), tables=form)
        # Vectorised and scalar loops may differ in the last bit.
        near = torch.nextafter(cos, torch.ones(()))
        near[:, :1] = cos[:, :1]
        assert not torch.equal(near, cos)
        apply_rotary_pos_emb(X, None, near, sin, tables=form)


def test_tables_that_change_are_looked_at_again() -> None:
    cos, sin = _tables("cat")
    for _ in range(2):
        apply_rotary_pos_emb(X, None, cos, sin)
    with pytest.raises(ValueError, match="cos must hold every number twice"):
        apply_rotary_pos_emb(X, None, cos, sin, tables="repeat")
    cos[-1, :4] += 1
    with pytest.raises(ValueError, match="cos must hold every number twice"):
        apply_rotary_pos_emb(X, None, cos, sin)


def test_learned_tables_may_drift_apart() -> None:
    cos, sin = (table.requires_grad_() for table in _tables("cat"))
    apply_rotary_pos_emb(X, None, cos, sin)[0].sum().backward()
    with torch.no_grad():
        cos -= cos.grad
        sin -= sin.grad
    apply_rotary_pos_emb(X, None, cos, sin)


# --- errors ---------------------------------------------------------------------------------------

RAGGED = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged)
COS = _tables("cat")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
NESTED = "must be a dense tensor but got one that is nested"
SPARSE = "must be a dense tensor but got one that is sparse_coo."
ADVICE = (
    "call tightrope.functional.rotate on x.values() with positions.packed(x.offsets()) and "
    "layout='sd'."
)
NO_INT = "[apply_rotary_pos_emb] unsqueeze_dim must be an int but got"
TYPES = {
    "[rotate] inverse must be a bool but got 'no'.": lambda: rotate(X, SPEC, inverse="no"),
    "[RotaryPositionalEmbedding] inverse must be a bool but got 'false'.": (
        lambda: RotaryPositionalEmbedding(8)(X, inverse="false")
    ),
    **{
        f"[apply_rotary_pos_emb] {name} must be a bool but got 'no'.": partial(
            apply_rotary_pos_emb, X, None, *COS, **{name: "no"}
        )
        for name in ("interleaved", "inverse")
    },
    f"{NO_INT} int64[5]; pass ids as position_ids=.": (
        lambda: apply_rotary_pos_emb(X, None, *COS, IDS)
    ),
    f"{NO_INT} None; pass ids as position_ids=.": (
        lambda: apply_rotary_pos_emb(X, None, *COS, None)
    ),
    f"[rotate] x {SPARSE}": lambda: rotate(X.to_sparse(), SPEC),
    f"[rotate] positions {SPARSE}": lambda: rotate(X, SPEC, IDS.to_sparse()),
    f"[rotate] x {NESTED}; {ADVICE}": lambda: rotate(RAGGED, SPEC, layout="bsd"),
    f"[rotate_] x {NESTED}; {ADVICE}": lambda: rotate_(RAGGED, SPEC, layout="bsd"),
    f"[apply_rotary_pos_emb] q {NESTED}; call tightrope.functional.rotate on q.values()."
    "transpose(0, 1) with positions.packed(q.offsets()) and layout='thd'.": (
        lambda: apply_rotary_pos_emb(RAGGED.unsqueeze(2).transpose(1, 2), None, *COS)
    ),
    f"[lrpe_rotate_1d] x {NESTED}.": lambda: lrpe_rotate_1d(RAGGED, torch.ones(4)),
    f"[rotate] x {NESTED}.": [
        lambda: rotate(RAGGED.transpose(1, 2), SPEC, layout="bsd"),
        lambda: rotate(
            torch.nested.narrow(X[0], 1, IDS[:3], IDS[:3], layout=torch.jagged), SPEC, layout="bsd"
        ),
    ],
    "[rotate] x must be a tensor but got a list.": lambda: rotate([[0.0] * 99] * 9, SPEC),
}
VALUES = {
    "[rotate] positions must have data but are on the meta device while the rotated tensors are "
    "on cpu; create them with device='cpu' (positions: int64[5]).": (
        lambda: rotate(X, SPEC, IDS.to("meta"))
    ),
    "[rotate] positions that require a gradient must be on the meta device when the rotated "
    "tensors are, as no gradient can leave it (positions: float32[5]).": (
        lambda: rotate(X.to("meta"), SPEC, IDS.float().requires_grad_())
    ),
    **{
        f"[from_config] rope_scaling.factor must be at least 1, the ratio of the new to the old length, "
        f"but got {factor}; its inverse is {meant}.": partial(
            RopeSpec.from_config, LLAMA | {"rope_scaling": {"type": kind, "factor": factor}}
        )
        for kind, factor, meant in (("linear", 0.25, "4"), ("yarn", 0.125, "8"))
    },
}
test_sentence = refusals(TypeError=TYPES, ValueError=VALUES)


@pytest.mark.parametrize("shape, transposed", [((8,), False), ((2, 8), False), ((2, 8), True)])
def test_the_advice_for_ragged_tensors_works(shape: tuple[int, ...], transposed: bool) -> None:
    rows = [torch.randn(3, *shape), torch.randn(5, *shape)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    if transposed:
        ragged = ragged.transpose(1, 2)
    with pytest.raises(TypeError) as caught:
        rotate(ragged, SPEC)
    call = r".*; call tightrope.functional.rotate on (x.*) with (.*) and layout='(\w+)'\."
    advice = re.fullmatch(call, str(caught.value))
    values, where, layout = advice.groups()  # type: ignore[union-attr]
    here = {"x": ragged, "positions": positions}
    turned = rotate(eval(values, here), SPEC, eval(where, here), layout=layout)
    assert_same_bits(turned, torch.cat([rotate(row, SPEC, layout=layout) for row in rows]))


def test_a_name_of_the_hub_is_no_path(tmp_path: Path) -> None:
    name = tmp_path / "some" / "model"
    text = (
        "[Errno 2] No such file or directory; for a model that is not on this machine, pass its config "
        f"object: transformers.AutoConfig.from_pretrained(name): '{name}'"
    )
    with refused(FileNotFoundError, text):
        RopeSpec.from_config(name)
    name.mkdir(parents=True)
    (name / "config.json").write_text(json.dumps(LLAMA))
    assert RopeSpec.from_config(name) == SPEC
