"""The overrides for torchtitan, against a stand-in of its classes and, if installed, against torchtitan.

The stand-in has the parts of torchtitan that an override of a rotary module uses: configs that build
their modules, `derive`, `override`, and the two modules with their caches.
"""

import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.tolerances import assert_each, assert_near, assert_same_bits
from tightrope import RopeSpec
from tightrope.frequencies import Llama3
from tightrope.functional import rotate_qk

OURS = "tightrope.integrations.torchtitan"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- the stand-in ---------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True, slots=True)
class Settings:
    """The fields of a rotary config of torchtitan."""

    owner: ClassVar[type]
    dim: int
    max_seq_len: int
    theta: float = 10000.0
    scaling: str = "none"
    scaling_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rope_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_seq_len: int = 4096
    truncate: bool = True

    def build(self) -> torch.nn.Module:
        return self.owner(dataclasses.replace(self))


class Rope(torch.nn.Module):
    Config: Any = Settings

    def __init_subclass__(cls) -> None:
        assert "Config" in vars(cls), "torchtitan wants a Config in each class"
        cls.Config.owner = cls

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        inv_freq = config.theta ** -(torch.arange(0, config.dim, 2) / config.dim)
        angles = torch.arange(config.max_seq_len)[:, None] * inv_freq
        self.register_buffer("cache", self.tables(angles), persistent=False)

    def forward(self, query: Any, key: Any, positions: Any = None) -> Any:
        rows = self.cache[: query.shape[1]][None] if positions is None else self.cache[positions]
        return self.by(query, rows[:, :, None]), self.by(key, rows[:, :, None])


class Complex(Rope):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Settings):
        pass

    def tables(self, angles: torch.Tensor) -> torch.Tensor:
        return torch.polar(torch.ones_like(angles), angles)

    def by(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)


class CosSin(Rope):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Settings):
        pass

    def tables(self, angles: torch.Tensor) -> torch.Tensor:
        return torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], -1)

    def by(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cos, sin = table.chunk(2, -1)
        wide = x.float()
        first, second = wide.chunk(2, -1)
        return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def derive(source: Any, target: Any, **changes: Any) -> Any:
    names = {field.name for field in dataclasses.fields(target)}
    kept = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.name in names}
    return target(**{**kept, **changes})


def override(*, target: type, exact: bool, description: str) -> Callable[[Any], Any]:
    def mark(factory: Any) -> Any:
        factory.claims = (target, exact, bool(description))
        return factory

    return mark


def wrap(positions: Any, x: Any) -> Any:
    """Place this process's positions like the first two dimensions of x."""
    if positions is None or not isinstance(x, DTensor):
        return positions
    places = [Replicate() if place.is_shard(2) else place for place in x.placements]
    return DTensor.from_local(positions, x.device_mesh, places, run_check=False)


def check(positions: torch.Tensor, *, max_valid_pos: int) -> None:
    local = positions.to_local() if isinstance(positions, DTensor) else positions
    torch._assert_async((local <= max_valid_pos).all(), "beyond the cache")


@pytest.fixture(params=["stand-in", "torchtitan"])
def ours(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    if request.param == "torchtitan":
        pytest.importorskip("torchtitan")
        yield importlib.import_module(OURS)
        return
    rope = SimpleNamespace(
        ComplexRoPE=Complex,
        CosSinRoPE=CosSin,
        _maybe_wrap_positions=wrap,
        _maybe_check_max_pos=check,
    )
    modules = {
        "torchtitan": ModuleType("torchtitan"),
        "torchtitan.config": SimpleNamespace(derive=derive, override=override),
        "torchtitan.models": ModuleType("torchtitan.models"),
        "torchtitan.models.common": ModuleType("torchtitan.models.common"),
        "torchtitan.models.common.rope": rope,
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        real = sys.modules.pop(OURS, None)
        yield importlib.import_module(OURS)
        del sys.modules[OURS]
        if real is not None:
            sys.modules[OURS] = real


def pair(ours: ModuleType, kind: str, exact: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return the original's module and the override's."""
    original = getattr(ours, {"complex_rope": "ComplexRoPE", "cos_sin_rope": "CosSinRoPE"}[kind])
    config = original.Config(**{"dim": 64, "max_seq_len": 64, **options})
    replaced = getattr(ours, kind)(config, exact=exact)
    assert isinstance(replaced, type(config))
    assert replaced.exact == exact
    assert all(getattr(replaced, name) == value for name, value in options.items())
    return config.build(), replaced.build()


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 33, heads, 64, dtype=dtype, requires_grad=True) for heads in (4, 2)]


KINDS = pytest.mark.parametrize("kind", ["complex_rope", "cos_sin_rope"])


# --- the tests ------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_the_bits_of_the_original(ours: Any, kind: str, dtype: torch.dtype, rows: int) -> None:
    """The module has its class and its cache."""
    theirs, module = pair(ours, kind, theta=500.0)
    positions = torch.randint(64, (rows, 33)) if rows else None
    qk = inputs(dtype)
    grads = [torch.randn_like(x) for x in qk]

    def run(module: Any) -> list[torch.Tensor]:
        results = module(*qk, positions)
        return [*results, *torch.autograd.grad(results, qk, grads)]

    assert_each(assert_same_bits, run(module), run(theirs))
    assert isinstance(module, type(theirs))
    assert torch.equal(module.cache, theirs.cache)
    assert not module.state_dict()
    with pytest.raises(RuntimeError, match=r"exceed|beyond the cache"):
        module(*qk, torch.full((1, 33), 64))


@KINDS
@pytest.mark.parametrize("exact", [False, True])
def test_tokens_without_a_batch(ours: Any, kind: str, exact: bool) -> None:
    """torchtitan after 0.3 packs its sequences: (tokens, heads, dim), and positions (tokens,)."""
    _, module = pair(ours, kind, exact)
    qk = [x[0].detach() for x in inputs(torch.bfloat16)]
    for positions in (None, torch.randint(64, (33,))):
        rows = None if positions is None else positions[None]
        wanted = module(*(x[None] for x in qk), rows)
        assert_each(assert_same_bits, module(*qk, positions), [x[0] for x in wanted])


@KINDS
def test_exact_angles_need_no_cache(ours: Any, kind: str) -> None:
    rules = ["none"] if ours.ComplexRoPE is Complex else ["none", "llama", "yarn"]
    for scaling in rules:  # the stand-in has none
        theirs, module = pair(ours, kind, True, scaling=scaling, rope_factor=40.0, theta=5e5)
        qk = [x.detach() for x in inputs(torch.float32)]
        near = torch.arange(33).expand(2, -1)
        assert_each(assert_near, module(*qk, near), theirs(*qk, near), "exact angles outputs")
        far = near + 10_000_000  # the cache has 64 rows
        assert_each(torch.equal, module(*qk, far), rotate_qk(*qk, module.spec, far, layout="bshd"))


def test_the_rules_of_a_config(ours: Any) -> None:
    llama = pair(ours, "complex_rope", True, scaling="llama", theta=500000.0)[1].spec
    assert llama == RopeSpec(64, base=5e5, interleaved=True, scaling=Llama3(8.0, 1.0, 4.0, 8192))
    sizes = {"scaling": "yarn", "rope_factor": 32.0, "truncate": False}
    yarn = pair(ours, "cos_sin_rope", True, **sizes)[1].spec
    assert yarn.scaling.truncate is False
    assert yarn.attention_scaling() == 1.0
    # A factor of 1 scales nothing.
    assert pair(ours, "cos_sin_rope", True, scaling="yarn")[1].spec.scaling is None


@pytest.mark.usefixtures("one_process")
@KINDS
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dim", [0, 2])
def test_dtensors(ours: Any, kind: str, exact: bool, dim: int) -> None:
    _, module = pair(ours, kind, exact)
    mesh = init_device_mesh("cpu", (1,))
    qk = [x.detach() for x in inputs(torch.float32)]
    sharded = [distribute_tensor(x, mesh, [Shard(dim)]) for x in qk]
    shared = copy.copy(module)  # as in torchtitan, where caches are DTensors as well
    shared._buffers = {"cache": distribute_tensor(module.cache, mesh, [Replicate()])}
    for positions in (None, torch.randint(64, (2, 33))):
        wanted = module(*qk, positions)
        for one, other in zip(shared(*sharded, positions), wanted):
            assert one.placements == (Shard(dim),)
            assert torch.equal(one.to_local(), other)
