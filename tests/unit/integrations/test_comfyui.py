"""The backend for ComfyUI, in the registry of comfy-kitchen itself, which chooses it by its own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from tests.support.helpers import noise
from tests.support.tolerances import assert_near
from tightrope.backends import cpu
from tightrope.integrations import comfyui

kitchen: Any = pytest.importorskip("comfy_kitchen.registry")
PAIRS, TOKENS = 8, 5


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry that ComfyUI asks, after `register`; as before after the test."""
    found = kitchen.registry
    for name in ("_backends", "_capabilities", "_constraints", "_priority"):
        monkeypatch.setattr(found, name, vars(found)[name].copy())
    before = list(found._priority)
    for _ in range(2):
        comfyui.register()
    assert found._priority == ["tightrope", *before]
    return found


def matrices(tokens: int = TOKENS, rows: int = 1, heads_dim: int = 1) -> torch.Tensor:
    """Any 2x2 matrices, not only rotations: comfy-kitchen takes all."""
    made = noise(rows, 1, tokens, PAIRS, 2, 2, seed=3, dtype=torch.float32)
    return made if heads_dim == 1 else made.transpose(1, 2)


def expected(x: torch.Tensor, by: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair times its matrix, in float64."""
    dim = -1 if interleaved else -2
    pairs = x.double().unflatten(-1, (PAIRS, 2) if interleaved else (2, PAIRS))
    first, second = pairs.unbind(dim)
    by = by[:, :, : x.shape[2]].double()
    y = [by[..., i, 0] * first + by[..., i, 1] * second for i in (0, 1)]
    return torch.stack(y, dim).flatten(-2)


def run(registry: Any, function: str, **arguments: Any) -> Any:
    assert registry.validate_backend_for_call("tightrope", function, arguments).success
    return registry.get_implementation(function, "tightrope")(**arguments)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rows, heads_dim, longer", [(1, 1, 0), (2, 1, 3), (2, 2, 0)], ids=["shared", "longer", "bshd"]
)
def test_each_pair_is_multiplied_by_its_matrix(
    registry: Any, interleaved: bool, dtype: torch.dtype, rows: int, heads_dim: int, longer: int
) -> None:
    q, k = noise(2, 3, TOKENS, 16, dtype=dtype), noise(2, 4, TOKENS, 16, seed=1, dtype=dtype)
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    by, name = matrices(TOKENS + longer, rows, heads_dim), "" if interleaved else "_split_half"
    bound = f"table rotation, {dtype}"
    found = run(registry, f"apply_rope{name}", xq=q, xk=k, freqs_cis=by)
    for x, y in zip((q, k), found, strict=True):
        assert y.dtype == dtype
        assert_near(y, expected(x, by, interleaved).to(dtype), bound)
        assert torch.equal(run(registry, f"apply_rope{name}1", x=x, freqs_cis=by), y)
        written = x.clone()
        assert run(registry, f"apply_rope{name}1_", x=written, freqs_cis=by) is written
        assert torch.equal(written, y)
    run(registry, f"apply_rope{name}_", xq=q, xk=k, freqs_cis=by)
    assert torch.equal(q, found[0])
    assert torch.equal(k, found[1])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("turned", [0, 16])
@pytest.mark.parametrize("own", [False, True], ids=["one scale", "two scales"])
def test_norms(registry: Any, interleaved: bool, turned: int, own: bool) -> None:
    width = 20 if turned else 16
    q, k = (noise(2, n, TOKENS, width, seed=n, dtype=torch.float32) for n in (3, 4))
    scales = [noise(width, seed=n, dtype=torch.float32) for n in (5, 6)]
    by, name = matrices(), "" if interleaved else "_split_half"
    more = {"k_scale": scales[1]} if own else {}
    if turned:
        more["rot_dim"] = turned
    found = run(registry, f"rms_rope{name}", q=q, k=k, freqs_cis=by, q_scale=scales[0], **more)
    for x, y, scale in zip((q, k), found, (scales[0], scales[own]), strict=True):
        normed = rms_norm(x, (width,), scale, 1e-6)
        wanted = expected(normed[..., :16], by, interleaved).float()
        assert_near(y[..., :16], wanted, "float32 ways")
        assert torch.equal(y[..., 16:], normed[..., 16:])
    if not turned:
        one = run(registry, f"rms_rope{name}1", x=q, freqs_cis=by, scale=scales[0])
        assert torch.equal(one, found[0])


X, BY = torch.zeros(2, 3, TOKENS, 16), matrices()
OTHERS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "float64": (X.double(), BY),
    "matrices in 16 bits": (X, BY.bfloat16()),
    "three dimensions": (X[0], BY),
    "fewer pairs": (torch.zeros(2, 3, TOKENS, 20), BY),
    "other rows": (X, matrices(rows=3)),
    "too few matrices": (X, matrices(TOKENS - 1)),
    "another device": (X.to("meta"), BY.to("meta")),
}


def test_other_calls_stay_comfy_kitchens(registry: Any) -> None:
    taken = [
        name
        for name, (x, by) in OTHERS.items()
        if registry.validate_backend_for_call(
            "tightrope", "apply_rope1", {"x": x, "freqs_cis": by}
        ).success
    ]
    both = {"xq": X, "xk": X[:, :, :3], "freqs_cis": BY}
    assert not registry.validate_backend_for_call("tightrope", "apply_rope", both).success
    assert taken == []


def test_what_comfyui_calls_rotates(registry: Any) -> None:
    """comfy-kitchen's own function, which asks its registry for a backend."""
    import comfy_kitchen

    q, k, by = noise(1, 3, TOKENS, 16).float(), noise(1, 3, TOKENS, 16, seed=1).float(), matrices()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = comfy_kitchen.apply_rope(q, k, by)
    assert any(event.key.startswith("tightrope::") for event in profile.key_averages())
    for x, y in zip((q, k), found, strict=True):
        assert_near(y, expected(x, by, True).float(), "table rotation, torch.float32")


def test_refusals(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q = noise(2, 3, TOKENS, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"apply_rotary_pos_emb_. q and k must not"):
        run(registry, "apply_rope_", xq=q, xk=q, freqs_cis=matrices())
    monkeypatch.setattr(cpu, "why_not", lambda *_: "it was not built")
    with pytest.raises(NotImplementedError, match="for CPUs cannot run: it was not built"):
        comfyui.register()
