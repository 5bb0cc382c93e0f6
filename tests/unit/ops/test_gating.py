"""Gates with prepared rotations, whose fast path gives the same results as the slow path.

It never uses stale values of a gate.
"""

import re
import sys

import pytest
import torch

from tests.support.matrix import needs_kernel
from tests.support.tolerances import assert_same_bits
from tightrope import RopeSpec, gates
from tightrope.activations import RMSNorm
from tightrope.backends import cpu
from tightrope.functional import rotate, rotate_qk, rotate_qk_

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 12, 3
SPECS = {
    "halves": RopeSpec(WIDTH),
    "neighbours": RopeSpec(WIDTH, interleaved=True),
    "slice": RopeSpec(WIDTH, start=2, rotary_dim=6),
}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qk(rows: int = 1, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys."""
    return tuple(
        noise(rows, heads, TOKENS, WIDTH, seed=heads).to(dtype) for heads in (HEADS, KV_HEADS)
    )


def gates_of(kind: str, pairs: int):
    """Return a gate, or a pair for q and k, and the list of its tensors."""
    if kind == "xpos":
        return gates.XPos(centre=90.0), []
    if kind == "number":
        return gates.Scalar(0.3), []
    per_head = [noise(HEADS, WIDTH), noise(KV_HEADS, WIDTH, seed=1)]
    tensors = {
        "scalar": [torch.tensor(0.3)],
        "exp": [noise(WIDTH)],
        "exp per head": per_head,
        "exp float64": [per_head[0].double(), per_head[1].double()],
        "exp bfloat16": [per_head[0].bfloat16(), per_head[1].bfloat16()],
        "exp transposed": [noise(WIDTH, HEADS).T, noise(WIDTH, KV_HEADS, seed=1).T],
        "exp of one": [noise(1)],
        "exp tied": [noise(pairs)],
        "slope": [noise(WIDTH)],
        "slope per head": per_head,
        "slope tied": [noise(pairs)],
        "given": [noise(TOKENS, HEADS, 1), noise(TOKENS, KV_HEADS, 1, seed=1)],
        "given by row": [noise(2, TOKENS, 1, WIDTH)],
    }[kind]
    name = kind.split()[0]
    make = {"scalar": gates.Scalar, "exp": gates.Exp, "slope": gates.Slope, "given": gates.Given}[
        name
    ]
    tied = {"tied": "pair"} if kind.endswith("tied") else {}
    made = tuple(make(t, **tied) for t in tensors)
    return made if len(made) == 2 else made[0], tensors


KINDS = (
    *("number", "scalar", "exp", "exp per head", "exp float64", "exp bfloat16", "exp transposed"),
    *("exp of one", "exp tied", "slope", "slope per head", "slope tied", "given", "given by row"),
    "xpos",
)


@pytest.fixture
def only_the_fast_path(monkeypatch):
    """Return a function that makes the slow path raise an error from then on."""

    def refused(*_, **__):
        raise AssertionError("the slow path")

    def switch() -> None:
        # From sys.modules, as a function of the same name hides the module.
        monkeypatch.setattr(sys.modules["tightrope.functional._rotate"], "perform", refused)

    return switch


@pytest.mark.one_in(3)
@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_path_gives_the_bits_of_the_slow_one(
    kind, name, dtype, only_the_fast_path
) -> None:
    spec, ids = SPECS[name], torch.tensor([100, 7, 90])
    gate, _ = gates_of(kind, spec.rotary_dim // 2)
    q, k = qk(2, dtype)
    wanted = rotate_qk(q, k, spec, ids, gate=gate)
    undone = rotate_qk(q, k, spec, ids, gate=gate, inverse=True)
    normed = rotate_qk(q, k, spec, ids, gate=gate, act=RMSNorm(torch.ones(WIDTH)))
    rope = spec.at(ids)
    for inverse in (False, True):
        rotate_qk(q, k, rope, inverse=inverse)  # fills the cache of the prepared rotation
    only_the_fast_path()
    for _ in range(2):
        found = (
            (wanted, rotate_qk(q, k, rope, gate=gate)),
            (wanted, rotate_qk_(q.clone(), k.clone(), rope, gate=gate)),
            (undone, rotate_qk(q, k, rope, gate=gate, inverse=True)),
            (normed, rotate_qk(q, k, rope, gate=gate, act=RMSNorm(torch.ones(WIDTH)))),
        )
        for want, got in found:
            assert_same_bits(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_call_sees_every_change_of_a_gate(kind) -> None:
    spec = SPECS["halves"]
    gate, tensors = gates_of(kind, WIDTH // 2)
    q, k = qk(2)
    ids = torch.tensor([100, 7, 90])
    rope = spec.at(ids)
    for change in range(3):
        if change == 1:
            for t in tensors:
                t.mul_(0.5)
        elif change == 2:
            # Without bumping the version counter, like a write through shared memory.
            ids.data.add_(11)
            for t in tensors:
                t.data.add_(0.1)
        wanted = rotate_qk(q, k, spec, ids, gate=gate)
        for got in (rotate_qk(q, k, rope, gate=gate), rotate_qk(q, k, rope, gate=gate)):
            assert_same_bits(got, wanted)


def test_one_prepared_rotation_for_any_number_of_tokens_and_any_layout() -> None:
    spec, gate = SPECS["halves"], gates.XPos(centre=100.0)
    rope = spec.at(96)
    for tokens in (1, 5, 2):
        x = noise(2, tokens, HEADS, WIDTH)
        for _ in range(2):
            got = rotate(x, rope, layout="bshd", gate=gate)
            assert_same_bits(got, rotate(x, spec, 96, layout="bshd", gate=gate))


def test_calls_that_take_the_slow_path() -> None:
    """Results are right for gates that differ for q and k; gates and positions get gradients."""
    spec, ids = SPECS["halves"], torch.tensor([1.5, 2.0, 7.25])
    q, k = qk()
    rope = spec.at(ids)
    rotate_qk(q, k, rope)
    exp, slope = gates.Exp(noise(WIDTH)), gates.Slope(noise(WIDTH, seed=1))
    for gate in ((exp, slope), (exp, None), (None, slope)):
        assert_same_bits(rotate_qk(q, k, rope, gate=gate), rotate_qk(q, k, spec, ids, gate=gate))
    gamma = torch.nn.Parameter(noise(WIDTH))
    y, _ = rotate_qk(q, k, rope, gate=gates.Exp(gamma))
    (by_gamma,) = torch.autograd.grad(y.square().sum(), gamma)
    assert by_gamma.abs().sum() > 0
    moving = ids.clone().requires_grad_()
    prepared = spec.at(moving)
    for _ in range(2):
        y, _ = rotate_qk(q, k, prepared, gate=gates.XPos(centre=3.0))
        (by_ids,) = torch.autograd.grad(y.square().sum(), moving)
        assert by_ids.abs().sum() > 0


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 20])
@pytest.mark.parametrize("slope", [50.0, -50.0, 1e30, -1e30])
def test_a_factor_beyond_float32_is_infinite_and_one_below_it_zero(slope, heads, dtype) -> None:
    x = torch.ones(1, heads, 4, 64, dtype=dtype)
    gate = gates.Slope(torch.full((heads, 64), slope))
    for name in cpu.instruction_sets():
        cpu.use_instruction_set(name)
        got = rotate(x, RopeSpec(64), gate=gate)
        want = rotate(x, RopeSpec(64), gate=gate, backend="reference")
        assert not torch.isfinite(want[:, :, 2:]).any() if slope > 0 else not want[:, :, 3:].any()
        assert torch.equal(got[:, :, 2:], want[:, :, 2:]), name


def test_a_gate_of_positions_compiles_without_a_warning() -> None:
    spec, q = SPECS["halves"], noise(1, HEADS, TOKENS, WIDTH)
    gate = gates.XPos(centre=3.0)
    compiled = torch.compile(
        lambda q, k: rotate_qk(q, k, spec, gate=gate), backend="eager", fullgraph=True
    )
    assert_same_bits(compiled(q, q), rotate_qk(q, q, spec, gate=gate))


def test_errors_are_those_of_the_slow_path() -> None:
    spec = SPECS["halves"]
    q, k = qk()
    rope = spec.at(10**6)
    rotate_qk(q, k, rope)
    for gate, words in (
        (gates.Exp(noise(7)), "gamma must have 1 or 12 channels but got 7"),
        (gates.Exp(noise(3, WIDTH)), "the gate Exp must have 1 or 4 heads for q but got 3"),
        (gates.Slope(noise(3, WIDTH)), "the gate Slope must have 1 or 4 heads for q but got 3"),
        (gates.Given(noise(7, 1, 1)), "the gate Given must have 1 or 3 tokens for q but got 7"),
        (gates.XPos(centre=0.0), "positions must lie within"),
    ):
        with pytest.raises(ValueError, match=words):
            rotate_qk(q, k, rope, gate=gate)


# --- without data ------------------------------------------------------------------------------

WITH_TENSORS = [kind for kind in KINDS if kind not in ("number", "xpos")]


def learnable_gates(kind: str, device: str):
    """Return gates with learnable tensors on a device, and these tensors."""
    made, tensors = gates_of(kind, WIDTH // 2)
    moved = [t.to(device).requires_grad_() for t in tensors]
    each = list(made) if isinstance(made, tuple) else [made]
    for gate, tensor in zip(each, moved):
        name = next(iter(vars(gate)))
        object.__setattr__(gate, name, tensor)
    return (tuple(each) if isinstance(made, tuple) else each[0]), moved


@pytest.mark.parametrize("kind", WITH_TENSORS)
def test_a_meta_gate_on_real_tensors_is_refused(kind):
    gate, _ = learnable_gates(kind, "meta")
    q, k = qk(2)
    kept, spec = q.clone(), SPECS["halves"]
    ids = torch.arange(TOKENS).float().requires_grad_()
    which = {"scalar": "value", "exp": "gamma", "slope": "slope", "given": "log"}[kind.split()[0]]
    text = f"{which} of the gate {kind.split()[0].title()} is on meta but q is on cpu; put both on one device."
    for name, call in {
        "rotate_qk": lambda: rotate_qk(q, k, spec, gate=gate),
        "rotate_qk of ids": lambda: rotate_qk(q, k, spec, ids, gate=gate),
        "rotate_qk_": lambda: rotate_qk_(q, k, spec, gate=gate),
        "rotate_qk_ prepared": lambda: prepared_once(q, k, spec, gate),
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(f'[{name.split()[0]}] {text}')}$"):
            call()
    assert_same_bits(q, kept)


def prepared_once(q, k, spec, gate):
    """Rotate in place with a prepared rotation that was used before, like a second layer."""
    rotation = spec.at(3)
    rotate_qk_(q.clone(), k.clone(), rotation)
    with torch.no_grad():
        return rotate_qk_(q, k, rotation, gate=gate)


@pytest.mark.parametrize("kind", WITH_TENSORS)
def test_a_real_gate_on_meta_tensors_gets_no_gradient(kind):
    gate, tensors = learnable_gates(kind, "cpu")
    q = torch.empty(2, HEADS, TOKENS, WIDTH, device="meta")
    k = torch.empty(2, KV_HEADS, TOKENS, WIDTH, device="meta")
    with pytest.raises(ValueError, match=r"is on cpu but q is on meta; put both on one device\.$"):
        rotate_qk(q, k, SPECS["halves"], gate=gate)
    for tensor in tensors:
        tensor.requires_grad_(False)
    ids = torch.rand(TOKENS, device="meta").requires_grad_()
    for where in (None, ids):
        made = rotate_qk(q, k, SPECS["halves"], where, gate=gate)
        assert all(y.is_meta for y in made)
