"""Test cases of the Triton backend: options, which of their values are compatible, and calls made from them.

With a GPU the kernels are compiled and run there; otherwise Triton's interpreter runs them on the CPU.
Triton chooses between the two when the kernels are first imported, which happens here. With the environment
variable TIGHTROPE_EMULATE, such as "sm_90", they are compiled for that GPU and executed on the CPU by
tests/support/triton/ptx; with "sm_90:7" in a random order of warps, whose seed is 7.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tightrope.activations import ACTS, RMS_NORM
from tightrope.angles import words_from
from tightrope.ops.schema import LOG, PHASES, SLOPE, SOURCES, TRANSPOSE, Options

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

EMULATED = "" if HAS_GPU else os.environ.get("TIGHTROPE_EMULATE", "")
INTERPRETED = HAS_TRITON and not HAS_GPU and not EMULATED

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

COMPILERS = os.environ.get("CC"), "gcc", "clang"
COMPILES = (
    any(map(shutil.which, filter(None, COMPILERS)))
    and Path(sysconfig.get_paths()["include"], "Python.h").exists()
)
# Marks of tests that need the stub of the driver.
needs_stub = (
    pytest.mark.skipif(HAS_GPU, reason="the driver of the GPU is loaded"),
    pytest.mark.skipif(
        not COMPILES, reason="Triton's launcher needs a C compiler and Python's headers"
    ),
)

if HAS_TRITON:
    # Import Triton before TRITON_INTERPRET is set: its own functions must all be compiled, or all
    # interpreted.
    import triton.language  # noqa: F401

    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import tightrope.backends.triton.kernels  # noqa: F401
    finally:
        if INTERPRETED:
            del os.environ["TRITON_INTERPRET"]
    if EMULATED:
        from tests.support.triton.ptx.launch import attach

        target, _, seed = EMULATED.removeprefix("sm_").partition(":")
        emulator = attach((int(target) // 10, int(target) % 10), int(seed) if seed else None)


@contextlib.contextmanager
def kernels_in_place() -> Iterator[None]:
    """Register the kernels for tensors on `DEVICE`, which is the CPU if there is no GPU."""
    if HAS_GPU:
        yield
        return
    from tightrope.backends.triton import blocks, operators, phases, registration, rotation, slots

    library, programs = torch.library.Library("tightrope", "IMPL"), blocks.PROGRAMS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in registration.OPERATORS.items():
            library.impl(name, getattr(operators, function), "CPU", allow_override=True)
    # The interpreter runs programs sequentially, so use one program per tile.
    blocks.PROGRAMS = 1
    modules = rotation, phases, slots
    for module in modules:
        module._plans.clear()
    try:
        yield
    finally:
        blocks.PROGRAMS = programs
        for module in modules:
            module._plans.clear()
        library._destroy()


@pytest.fixture
def on_this_device() -> Iterator[None]:
    """Run a test within `kernels_in_place`."""
    with kernels_in_place():
        yield


AXES: dict[str, Sequence[Any]] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "interleaved": (False, True),
    "channels": ((16, 0, 16), (24, 4, 12), (20, 6, 14), (128, 32, 64)),  # head_dim, start, rotated
    "layout": ("bhsd", "bshd", "sbhd", "thd", "bsd", "sd"),
    "strides": ("contiguous", "transposed", "gaps", "channel step"),
    "positions": (
        "none",
        "offset",
        "ids",
        "ids per row",
        "per row",
        "fractional",
        "axes",
        "tables",
        "phases",
        "phases alone",
    ),
    "angles": ("shared", "per row", "per head"),
    "act": ACTS,
    "gate": (0, LOG, SLOPE),
    "gate shape": ("full", "heads", "channels", "tokens"),
    "direction": (0, 1, 2),
    "where": ("new", "in place", "out"),
    "k": ("none", "fewer heads"),
    "amplitude": (1.0, 1.37),
}


def allowed(case: Mapping[str, Any]) -> bool:
    """Return whether the values chosen so far are compatible."""
    layout = case.get("layout")
    no_rows, no_heads = layout in ("thd", "sd"), layout in ("bsd", "sd")
    if case.get("direction") == 2 and case.get("act", "none") != "none":
        return False
    if case.get("gate") == SLOPE and case.get("positions") in ("axes", "tables", "phases alone"):
        return False
    if no_rows and (
        case.get("angles") == "per row" or case.get("positions") in ("ids per row", "per row")
    ):
        return False
    if no_heads and (case.get("angles") == "per head" or case.get("k") == "fewer heads"):
        return False
    return not (
        case.get("where") == "in place"
        and case.get("act") == "rms_norm"
        and case.get("direction") == 1
    )


class Made(NamedTuple):
    """A call of the operator: q, k, the arguments after them in the schema, and the output mode."""

    q: torch.Tensor
    k: torch.Tensor | None
    arguments: tuple[Any, ...]
    where: str

    @property
    def xs(self) -> list[torch.Tensor]:
        return [self.q] if self.k is None else [self.q, self.k]

    def wide(self) -> Made:
        """Return the same call in float64 on the CPU."""

        def to(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                x = x.detach().cpu()
                return x.double() if x.is_floating_point() else x
            return [to(y) for y in x] if isinstance(x, list) else x

        primary, secondary, positions, *rest = self.arguments
        # Positions keep their exact values in float64.
        return Made(
            to(self.q),
            to(self.k),
            (to(primary), to(secondary), to(positions), *map(to, rest)),
            self.where,
        )


ROWS, HEADS, TOKENS = 2, 3, 7


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def words(axes: int, rows: int, heads: int, pairs: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    omegas = torch.rand(axes, rows, heads, pairs, generator=generator, dtype=torch.float64)
    return words_from(omegas)[0].to(DEVICE)


def phases(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    """Return random phases, none of which stands for NaN."""
    generator, most = torch.Generator().manual_seed(seed), torch.iinfo(dtype).max
    return torch.randint(-most, most, shape, generator=generator, dtype=dtype).to(DEVICE)


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the same values with other strides."""
    empty = float("nan") if x.is_floating_point() else -1
    if kind == "transposed" and x.dim() > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "gaps":
        wider = x.new_full((*x.shape[:-1], x.shape[-1] + 3), empty)
        wider[..., 1:-2] = x
        return wider[..., 1:-2]
    if kind == "channel step":
        wider = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), empty)
        wider[..., ::2] = x
        return wider[..., ::2]
    return x.contiguous()


def shape_in(layout: str, rows: int, heads: int, tokens: int, channels: int) -> tuple[int, ...]:
    sizes = {"b": rows, "h": heads, "s": tokens, "t": tokens, "d": channels}
    return tuple(sizes[letter] for letter in layout)


def make(case: Mapping[str, Any]) -> Made:
    """Make the call of a case; "tokens" may be fewer than TOKENS."""
    layout, dtype, tokens = case["layout"], case["dtype"], case.get("tokens", TOKENS)
    rows = 1 if layout in ("thd", "sd") else ROWS
    heads = 1 if layout in ("bsd", "sd") else HEADS
    # With per-head angles, k has as many heads as q.
    k_heads = heads if case["angles"] == "per head" else 1
    head_dim, start, width = case["channels"]
    counts = [heads] if case["k"] == "none" else [heads, k_heads]

    def tensors(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
        return [
            strided(
                noise(*shape_in(layout, rows, n, tokens, head_dim), seed=seed + i, scale=scale)
                .to(dtype)
                .to(DEVICE),
                case["strides"],
            )
            for i, n in enumerate(counts)
        ]

    at = case["positions"]
    axes = 3 if at == "axes" else 1
    angle_rows = rows if case["angles"] == "per row" else 1
    angle_heads = heads if case["angles"] == "per head" else 1
    ids: torch.Tensor | None = None
    add_index, offset, source = True, 0, 0
    primary = words(axes, angle_rows, angle_heads, width // 2)
    secondary = None
    if at == "offset":
        offset = 1_000_003
    elif at in ("ids", "ids per row"):
        shape = (1, rows if at == "ids per row" else 1, tokens)
        ids, add_index = (
            torch.randint(0, 1 << 20, shape, generator=torch.Generator().manual_seed(3)),
            False,
        )
        ids = ids.to(torch.int32) if at == "ids" else ids
    elif at == "per row":
        ids = torch.tensor([5, 70_000]).reshape(1, rows, 1)
    elif at == "fractional":
        ids, add_index = 1000 * noise(1, rows, tokens, seed=4), False
        ids = ids if case["interleaved"] else ids.float()
    elif at == "axes":
        ids, add_index = (
            torch.randint(0, 4096, (3, 1, tokens), generator=torch.Generator().manual_seed(3)),
            False,
        )
    elif at == "tables":
        source = 1 + (head_dim // 4) % 3
        length = tokens + 9
        angle = 100 * noise(angle_rows, angle_heads, length, width // 2, seed=6)
        if SOURCES[source] == "cat":
            angle = torch.cat((angle, angle), -1)
        elif SOURCES[source] == "repeat":
            angle = angle.repeat_interleave(2, -1)
        table_dtype = torch.float32 if case["amplitude"] == 1.0 else dtype
        primary, secondary = (t.to(table_dtype).to(DEVICE) for t in (angle.cos(), angle.sin()))
        ids, add_index = torch.tensor([3, 0, 15, 15, 2, 1, 4][:tokens]).view(1, 1, -1), False
    elif at in ("phases", "phases alone"):
        source, offset = PHASES, 1000 if at == "phases" else 0
        # Phases and phase words may have rows and heads independently.
        secondary = words(1, 1, 1, width // 2) if case["amplitude"] == 1.0 else primary
        secondary = secondary if at == "phases" else None
        shape = (angle_rows, angle_heads, tokens, width // 2)
        kind = torch.int64 if dtype == torch.float64 or case["interleaved"] else torch.int32
        primary = strided(phases(shape, kind), case["strides"])
        add_index = at == "phases"
        if at == "phases" and case["interleaved"]:
            ids, add_index = 100 * noise(1, rows, tokens, seed=4).float(), False
    act = ACTS.index(case["act"])
    options = Options(
        layout=("bhsd", "bshd", "sbhd", "thd", "bsd", "sd").index(layout),
        start=start,
        interleaved=case["interleaved"],
        direction=case["direction"],
        add_index=add_index,
        source=source,
        act=act,
        gate=case["gate"],
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    extras: list[torch.Tensor] = []
    if act == RMS_NORM:
        sizes = [1 if i else heads for i in range(len(counts))]
        extras += [noise(n, head_dim, seed=20 + i).to(wide) for i, n in enumerate(sizes)]
    if case["gate"] == LOG:
        for i, n in enumerate(counts):
            full = (rows, n, tokens, head_dim)
            kept = {"full": (0, 1, 2, 3), "heads": (1,), "channels": (1, 3), "tokens": (0, 2)}
            shape = [size if d in kept[case["gate shape"]] else 1 for d, size in enumerate(full)]
            extras.append(noise(*shape, seed=30 + i, scale=0.5).to(wide))
    elif case["gate"] == SLOPE:
        # Slopes so small that e^(slope · position) never overflows.
        small = 1e-6 if at in ("offset", "ids", "ids per row", "per row") else 1e-3
        for i, n in enumerate(counts):
            shape = [n, head_dim] if case["gate shape"] in ("full", "channels") else [1, head_dim]
            extras.append(noise(*shape, seed=40 + i, scale=small).to(wide))
    extras = [x.to(DEVICE) for x in extras]
    if act and case["direction"] == TRANSPOSE:
        extras += tensors(50, 2.0)
    q, k = (*tensors(1), None)[:2]
    ids = None if ids is None else ids.to(DEVICE)
    return Made(
        q,
        k,
        (
            primary,
            secondary,
            ids,
            offset,
            options.pack(),
            case["amplitude"],
            extras,
            1e-6 if act == RMS_NORM else 0.0,
        ),
        case["where"],
    )
