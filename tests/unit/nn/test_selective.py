"""SelectiveRotary and SelectiveAttention: formulas, gradients, decoding, packed sequences, saving."""

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support import helpers
from tests.support.helpers import refused
from tests.support.matrix import INDUCTOR
from tests.support.tolerances import assert_near, assert_same_bits
from tightrope import RopeSpec, phases
from tightrope.frequencies import DynamicNTK
from tightrope.functional import rotate
from tightrope.nn import SelectiveAttention, SelectiveCache, SelectiveRotary, _invariant

F64, D, HEADS, HEAD = torch.float64, 16, 3, 6
noise = partial(helpers.noise, dtype=F64)
OPTIONS: dict[str, dict[str, Any]] = {
    "selective": {},
    "gated": {"gate": True, "conv": 2},
    "low rank": {"rank": 5, "gate": True},
    "unbounded": {"bound": None, "conv": 0},
    "mamba": {"bound": "tanh", "conv": 0},
    "all": {"bound": "tanh", "rank": 4, "gate": True, "conv": 3},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_form = pytest.mark.parametrize("form", ["scan", "softmax"])


def rotary(dtype: torch.dtype = F64, **options: Any) -> SelectiveRotary:
    """Return a module with random parameters that rounding to about 20 bits leaves as they are."""
    module = SelectiveRotary(D, HEADS, HEAD // 2, dtype=dtype, **options)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_((noise(*parameter.shape, seed=i) * 64).round() / 64)
    return module


def attention(dtype: torch.dtype = F64, seed: int = 0, **options: Any) -> SelectiveAttention:
    torch.manual_seed(seed)
    own = rotary(dtype, **options.pop("rotary", {}))
    return SelectiveAttention(D, HEADS, HEAD, rotary=own, dtype=dtype, **options)


def tokens_of(rows: int = 2, tokens: int = 13, dtype: torch.dtype = F64) -> torch.Tensor:
    return ((noise(rows, tokens, D, seed=50) * 64).round() / 64).to(dtype)


def plain_increments(module: SelectiveRotary, x: torch.Tensor) -> torch.Tensor:
    """The formulas of the docstring, in float64."""
    p = {name: value.double() for name, value in module.named_parameters()}
    seen = x.double()
    if module.bound != "tanh":
        seen = seen / (seen.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    z = seen @ p["down"].T if "down" in p else seen
    z = z @ p["weight"].T
    if "kernel" in p:
        lags = [
            F.pad(z, (0, 0, i, 0))[:, : z.shape[1]] * p["kernel"][i] for i in range(module.conv)
        ]
        z = torch.stack(lags).sum(0)
    z = z.unflatten(-1, (-1, module.pairs)).transpose(1, 2)
    if module.bound == "tanh":
        dt = F.softplus(seen @ p["step_weight"].T + p["step_bias"], threshold=100)
        z = math.pi * z.tanh() * dt.mT[..., None]
    if module.bound == "temperature":
        z = z * p["temperature"]
    if "gate_weight" in p:
        z = z * (seen @ p["gate_weight"].T + p["gate_bias"]).sigmoid().mT[..., None]
    return z


def plain_attention(module: SelectiveAttention, x: torch.Tensor) -> torch.Tensor:
    """Attend by the definition: cumsum, cos, sin, and a matrix of scores."""
    q, k, v = (
        (x @ own.weight.T).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        for own in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.q_norm is not None and module.k_norm is not None:
        q, k = (
            F.rms_norm(t, (HEAD,), n.weight) for t, n in ((q, module.q_norm), (k, module.k_norm))
        )
    angle = plain_increments(module.rotary, x).cumsum(2)
    at = torch.arange(x.shape[1], dtype=F64)[:, None]
    angle = angle + at * module.spec.frequencies().inv_freq
    cos, sin = angle.cos(), angle.sin()
    halves = [t.chunk(2, -1) for t in (q, k)]
    q, k = (torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in halves)
    scores = q @ k.mT / math.sqrt(HEAD)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    if module.form == "softmax":
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    else:
        since = torch.zeros(1, 1, x.shape[1], dtype=F64)
        if module.decay is not None:
            since = F.logsigmoid(module.decay(x)).mT.cumsum(-1) / 16
        weights = scores * (since[..., :, None] - since[..., None, :]).exp().masked_fill(later, 0)
    y = (weights @ v).transpose(1, 2).flatten(2)
    if module.output_gate is not None:
        y = y * F.silu(module.output_gate(x))
    return y @ module.out.weight.T


# --- formulas -------------------------------------------------------------------------------------


@every_option
def test_increments_against_the_formula(options: dict[str, Any]) -> None:
    module, x = rotary(**options), tokens_of()
    got, want = module.increments(x)[0], plain_increments(module, x)
    # Low rank: the numbers between the two matrices are rounded to 25 bits.
    bound = 1e-6 if "rank" in options else 1e-13
    torch.testing.assert_close(got, want.expand_as(got), rtol=bound, atol=bound)
    assert module.increments(x.float())[0].dtype == torch.float32
    made, _ = module(x)
    angle = made.words(True).double() * (2 * math.pi * 2.0**-64)
    torch.testing.assert_close(
        angle.cos(), want.cumsum(2).cos().expand_as(angle), rtol=0, atol=20 * bound
    )


@every_option
@every_form
def test_attention_and_all_gradients_against_the_formula(
    form: str, options: dict[str, Any]
) -> None:
    extras = {"output_gate": True, "qk_norm": True, "decay": form == "scan"}
    spec = RopeSpec(HEAD) if options.get("gate") else None
    module = attention(form=form, rotary=options, spec=spec, **extras)
    inputs = (tokens_of().requires_grad_(), *module.parameters())
    cotangent = noise(2, 13, D, seed=9)
    got, want = module(inputs[0]), plain_attention(module, inputs[0])
    bound = 1e-5 if "rank" in options else 1e-11
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    grads = [torch.autograd.grad(y, inputs, cotangent) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * bound, atol=10 * bound * float(b.abs().max()))


def test_the_first_parameters() -> None:
    module = SelectiveRotary(64, 2, 4, base=16.0)
    assert module.temperature is not None
    assert module.temperature.tolist() == [1.0, 0.5, 0.25, 0.125]
    assert 0.9 < module.weight.std() < 1.1
    x = torch.randn(1, 9, 64)
    # The convolution starts as the identity.
    one, other = SelectiveRotary(64, 2, 4), SelectiveRotary(64, 2, 4, conv=0)
    other.load_state_dict({k: v for k, v in one.state_dict().items() if k != "kernel"})
    assert_same_bits(one.increments(x)[0], other.increments(x)[0])
    assert "bound='temperature'" in repr(module)
    assert "form='scan'" in repr(SelectiveAttention(8, 1, 4))


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 64, 300, 4096])
def test_products_have_the_same_bits_for_any_number_of_tokens(channels: int) -> None:
    x, weight = noise(67, channels, dtype=torch.float32), noise(33, channels, seed=1)
    x[0], x[1, 0] = 1e-3, 1e30
    seen = _invariant.rounded(x)
    every = _invariant.linear(seen, weight)
    for sizes in ([1] * 67, [5, 60, 2]):
        parts = [_invariant.linear(_invariant.rounded(part), weight) for part in x.split(sizes)]
        assert_same_bits(torch.cat(parts), every)
    exact = torch.stack(
        [(seen * row).flip(-1).cumsum(-1)[:, -1] for row in _invariant.rounded(weight)], -1
    )
    assert_same_bits(every, exact)
    size = x.double().norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
    assert ((every - x.double() @ weight.T).abs() <= 2.0**-20 * size).all()


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softplus"])
def test_functions(name: str) -> None:
    ours = getattr(_invariant, name)
    like = partial(F.softplus, threshold=100) if name == "softplus" else getattr(torch, name)
    x = torch.cat(
        (torch.linspace(-40, 40, 1003, dtype=F64), torch.tensor([1e6, -1e6, 0.0], dtype=F64))
    )
    x.requires_grad_()
    torch.testing.assert_close(ours(x), like(x), rtol=4e-15, atol=2e-15)
    for part in (x[:1], x[-1:], x[500:507]):
        assert_same_bits(ours(part), ours(x)[(x[:, None] == part).any(1)])
    (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (ours, like))
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    assert ours(torch.tensor([math.nan], dtype=F64)).isnan().all()


def test_a_channel_that_is_no_number_makes_later_phases_nan() -> None:
    module, x = rotary(conv=2), tokens_of()
    x[1, 4, 3] = math.nan
    lost = module(x)[0].words(True) == -(2**63)
    assert not lost[0].any()
    assert not lost[1, :, :4].any()
    assert lost[1, :, 4:].all()
    again = torch.arange(13) == 5  # the convolution does not read the sequence before, either
    assert not (module(x, reset=again)[0].words(True) == -(2**63))[1, :, 5:].any()


# --- decoding and packed sequences ----------------------------------------------------------------

SPLITS = ([1] * 13, [5, 1, 0, 7], [13])


@every_option
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_chunks_have_the_bits_of_a_prefill(dtype: torch.dtype, options: dict[str, Any]) -> None:
    module, x = rotary(dtype, **options), noise(2, 13, D).to(dtype)
    reset = torch.arange(13).eq(7)[None] & torch.tensor([[True], [False]])
    for given in (None, reset):
        whole, last = module(x, reset=given)
        assert (whole.words(False) != whole.words(False)[:, :, :1]).any()
        for sizes in SPLITS:
            state, words = None, []
            starts = [None] * len(sizes) if given is None else given.split(sizes, 1)
            for part, start in zip(x.split(sizes, 1), starts, strict=True):
                made, state = module(part, state, start)
                words.append(made.words(False))
            assert_same_bits(torch.cat(words, 2), whole.words(False))
            assert state is not None
            assert_same_bits(state.phases.words, last.phases.words)
            assert_same_bits(state.recent, last.recent)


@every_form
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [None, RopeSpec(HEAD, interleaved=True)])
def test_decoding(spec: RopeSpec | None, dtype: torch.dtype, form: str) -> None:
    module, x = attention(dtype, form=form, spec=spec, decay=form == "scan"), tokens_of(dtype=dtype)
    whole = module(x)
    assert whole.dtype == dtype
    bound = {F64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for sizes in SPLITS[:2]:
        cache = SelectiveCache()
        parts = torch.cat([module(part, cache=cache) for part in x.split(sizes, 1)], 1)
        torch.testing.assert_close(parts, whole, rtol=bound, atol=bound)
        assert cache.rotary is not None
        assert_same_bits(cache.rotary.phases.words, module.rotary(x)[1].phases.words)
        assert cache.kv.tokens == (13 if form == "softmax" else 0)
        assert (cache.memory is None) == (form == "softmax")


@every_form
@every_option
def test_packed_sequences_equal_separate_ones(options: dict[str, Any], form: str) -> None:
    module = attention(form=form, rotary=options, decay=form == "scan")
    x, sizes = tokens_of(1), [4, 1, 8]
    ends = torch.tensor([0, 4, 5, 13])
    starts = torch.zeros(13, dtype=torch.bool).index_fill(0, ends[:-1], True)
    separate = torch.cat([module(part) for part in x.split(sizes, 1)], 1)
    words = [module.rotary(part)[0].words(True) for part in x.split(sizes, 1)]
    for reset in (ends, starts, starts[None]):
        torch.testing.assert_close(module(x, reset=reset), separate, rtol=1e-12, atol=1e-12)
        assert_same_bits(module.rotary(x, reset=reset)[0].words(True), torch.cat(words, 2))


def test_gradients_flow_through_states() -> None:
    module, x = attention(rotary={"gate": True}, decay=True), tokens_of().requires_grad_()
    inputs = (x, *module.parameters())
    cotangent = noise(2, 13, D, seed=9)
    cache = SelectiveCache()
    parts = torch.cat([module(part, cache=cache) for part in x.split(5, 1)], 1)
    for a, b in zip(
        *(torch.autograd.grad(y, inputs, cotangent) for y in (parts, module(x))), strict=True
    ):
        assert_near(a, b, "float64 ways, higher order")
    assert cache.rotary is not None
    assert cache.rotary.recent.requires_grad
    detached = cache.rotary.detached()
    assert not detached.recent.requires_grad
    assert detached.phases.drift is None


def test_the_phases_rotate_like_any_others() -> None:
    module, x = rotary(), tokens_of()
    made, _ = module(x)
    q = noise(2, HEADS, 13, HEAD)
    same = phases.running(module.increments(x)[0])
    assert_same_bits(rotate(q, RopeSpec(HEAD), phases=made), rotate(q, RopeSpec(HEAD), phases=same))


def test_a_call_that_raises_leaves_the_cache_as_it_is() -> None:
    module, cache = attention(), SelectiveCache()
    module(tokens_of(), cache=cache)
    before = dict(vars(cache))
    with pytest.raises(ValueError, match="recent inputs"):
        module(tokens_of(3), cache=cache)
    assert vars(cache) == before


# --- as a module ----------------------------------------------------------------------------------


@every_form
def test_saving_copying_casting(form: str) -> None:
    options = {"rotary": {"rank": 3, "gate": True}, "qk_norm": True, "output_gate": True}
    module, x = attention(torch.float32, form=form, **options), tokens_of(dtype=torch.float32)
    assert not list(module.buffers())
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()}
    want = module(x)
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(same(x), want)
    other = attention(torch.float32, seed=1, form=form, **options)
    other.load_state_dict(module.state_dict())
    assert_same_bits(other(x), want)
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@every_form
def test_autocast(form: str) -> None:
    module = attention(torch.float32, form=form, qk_norm=True, decay=form == "scan")
    x = noise(2, 13, D, dtype=torch.float32)
    want, last = module(x), module.rotary(x)[1]
    with torch.autocast("cpu", torch.bfloat16):
        got, same = module(x), module.rotary(x)[1]
        got.sum().backward()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.1)
    assert_same_bits(same.phases.words, last.phases.words)


def test_meta_device() -> None:
    for options in OPTIONS.values():
        own = SelectiveRotary(D, HEADS, HEAD // 2, device="meta", **options)
        module = SelectiveAttention(D, HEADS, HEAD, rotary=own, device="meta")
        assert module(torch.empty(2, 5, D, device="meta")).shape == (2, 5, D)
        real = own.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in real.parameters():
                parameter.fill_(math.nan)
        real.reset_parameters()
        assert real.increments(torch.randn(2, 5, D))[0].isfinite().all()


@every_form
@pytest.mark.one_in(2)
def test_compiled(form: str) -> None:
    torch._dynamo.reset()
    options = {"bound": "tanh", "gate": True, "conv": 2}
    module, x = attention(torch.float32, form=form, rotary=options), tokens_of(dtype=torch.float32)
    # Not by inductor: it takes minutes for the scan.
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(f(x).sum(), list(module.parameters())) for f in (compiled, module)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(INDUCTOR is None, reason="no C++ compiler")
def test_compiled_phases_have_the_bits_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    module = rotary(torch.float32, gate=True, conv=2)
    compiled = torch.compile(module, fullgraph=True)
    x = noise(2, 67, D, dtype=torch.float32)
    with torch.no_grad():
        for part in (x, x[:, :1]):
            assert_same_bits(compiled(part)[1].phases.words, module(part)[1].phases.words)


# --- errors ---------------------------------------------------------------------------------------


def test_errors_of_options() -> None:
    for options, kind, text in (
        ({"conv": -1}, ValueError, "conv must be at least 0 but got -1."),
        ({"rank": 0}, ValueError, "rank must be positive but got 0."),
        ({"bound": "x"}, ValueError, "bound must be 'temperature', 'tanh' or None but got 'x'."),
        ({"gate": 1}, TypeError, "gate must be a bool but got 1."),
        ({"base": 0}, ValueError, "base must be a positive number but got 0."),
        ({"dtype": torch.int32}, TypeError, "dtype must be floating but got torch.int32."),
    ):
        with refused(kind, f"[SelectiveRotary] {text}"):
            SelectiveRotary(8, 2, 2, **options)
    for options, kind, text in (
        ({"d_head": 7}, ValueError, "d_head must be even but got 7."),
        ({"form": "x"}, ValueError, "form must be 'scan' or 'softmax' but got 'x'."),
        ({"form": "softmax", "decay": True}, ValueError, "decay must be False for form 'softmax'."),
        (
            {"spec": RopeSpec(6)},
            ValueError,
            "spec must be a RopeSpec with head_dim=4 but got RopeSpec(head_dim=6).",
        ),
        ({"rotary": 3}, TypeError, "rotary must be a SelectiveRotary but got 3."),
        ({"qk_norm": None}, TypeError, "qk_norm must be a bool but got None."),
    ):
        with refused(kind, f"[SelectiveAttention] {text}"):
            SelectiveAttention(**{"d_model": 8, "num_heads": 2, "d_head": 4, **options})
    with pytest.raises(ValueError, match="rotary must have d_model=8, num_heads=2 and pairs=2 "):
        SelectiveAttention(8, 2, 4, rotary=SelectiveRotary(8, 2, 3))
    by_length = RopeSpec(4, scaling=DynamicNTK(2.0, 64))
    with pytest.raises(ValueError, match="frequencies that do not depend on the length"):
        SelectiveAttention(8, 2, 4, spec=by_length)


def test_errors_of_calls() -> None:
    module, x = SelectiveAttention(8, 2, 4), torch.zeros(2, 5, 8)
    own = module.rotary
    with refused(
        ValueError,
        "[SelectiveAttention] x must have shape (batch, tokens, 8) (x: float32[2, 5, 7]).",
    ):
        module(x[..., 1:])
    with refused(TypeError, "[SelectiveRotary] x must be a tensor but got 3."):
        own(3)
    with refused(TypeError, "[SelectiveAttention] cache must be a SelectiveCache but got 3."):
        module(x, cache=3)
    with refused(TypeError, "[SelectiveRotary] state must be None or a SelectiveState but got 3."):
        own(x, 3)
    with refused(
        ValueError,
        "[SelectiveRotary] reset must have 1 or 2 rows (reset: bool[3, 5]).",
    ):
        own(x, reset=torch.zeros(3, 5, dtype=torch.bool))
    state = own(x)[1]
    with refused(
        ValueError,
        "[SelectiveRotary] state must hold recent inputs float32[1, 3, 4] for this x (recent: "
        "float32[2, 3, 4]).",
    ):
        own(x[:1], state)
    with refused(
        ValueError,
        "[SelectiveAttention] reset must be None with a cache if form is 'softmax': start each sequence "
        "with a new cache.",
    ):
        SelectiveAttention(8, 2, 4, form="softmax")(
            x, cache=SelectiveCache(), reset=torch.zeros(5, dtype=torch.bool)
        )


# --- the example ----------------------------------------------------------------------------------
