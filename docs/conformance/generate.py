"""Write the conformance vectors: `python docs/conformance/generate.py`.

Two files of tensors and one of descriptions, beside this program; docs/conformance.md describes them. Exact
rotations are computed with mpmath at 60 digits and rounded once, so they do not depend on this library's
kernels. Results of stacks are computed in float32 arithmetic from cosines and sines that are stored too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import torch
from safetensors.torch import save_file

from tightrope import Axes, RopeSpec, stacks
from tightrope.frequencies import (
    NTK,
    DynamicNTK,
    Given,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rule,
    YaRN,
)
from tightrope.functional import apply_rotary_pos_emb

FOLDER = Path(__file__).resolve().parent
DIM = 32
# Significant bits and exponent of the smallest number of each dtype.
FORMATS = {"float32": (24, -149), "bfloat16": (8, -133), "float16": (11, -24)}
NEAR = (0, 1, 2, 3, 17, 100, 255, 257, 1003, 4095, 9999, 32767)
FAR = (0, 1, 2, 257, 65535, 10**6 + 1, 2**24 + 1, 2**30 + 7, 2**31 - 1, 2**31, -1, -70001)

RULES: dict[str, tuple[Rule | None, int | None]] = {
    "default": (None, None),
    "linear": (Linear(3.0), None),
    "ntk": (NTK(4.0), None),
    "dynamic": (DynamicNTK(2.5, 4096), 32768),
    "dynamic, short": (DynamicNTK(2.5, 4096), 4096),
    "yarn": (YaRN(4.0, 8192), None),
    "yarn, mscales": (YaRN(40.0, 4096, mscale=0.7, mscale_all_dim=1.1), None),
    "yarn, untruncated": (YaRN(32.0, 4096, truncate=False), None),
    "llama3": (Llama3(8.0, 1.0, 4.0, 8192), None),
    "longrope": (
        LongRoPE(
            tuple(1 + k / 16 for k in range(16)),
            tuple(2 + k / 3 for k in range(16)),
            4096,
            factor=8.0,
        ),
        32768,
    ),
    "proportional": (Proportional(0.5, 2.0), None),
    "given": (Given(tuple(-0.3 + 0.17 * k for k in range(16))), None),
}


def exact_cases() -> Iterator[tuple[str, RopeSpec, int | None, tuple[int, ...], bool]]:
    """Yield name, spec, length, positions and whether the rotation is inverted."""
    for name, (rule, length) in RULES.items():
        where = FAR if length is None else tuple(min(p, length - 1) for p in NEAR)
        yield f"rule: {name}", RopeSpec(DIM, scaling=rule), length, where, False
    yield "interleaved", RopeSpec(DIM, interleaved=True), None, FAR, False
    yield "inverse", RopeSpec(DIM), None, FAR, True
    yield "inverse, yarn", RopeSpec(DIM, scaling=YaRN(4.0, 8192)), None, FAR, True
    yield "first channels", RopeSpec(DIM, rotary_dim=16), None, FAR, False
    yield "last channels", RopeSpec(DIM, start=16, interleaved=True), None, FAR, False
    yield "base 5e5", RopeSpec(DIM, base=5e5), None, FAR, False
    for name, axes in {
        "sections": Axes.sections((4, 6, 6)),
        "interleaved sections": Axes.sections((6, 5, 5), interleaved=True),
        "blocks": Axes.blocks((8, 8)),
    }.items():
        yield f"axes: {name}", RopeSpec(DIM, axes=axes), None, FAR, False


def nearest(value: Fraction, dtype: str) -> float:
    """Return the number of a dtype that is nearest to an exact value; ties go to the even one."""
    digits, least = FORMATS[dtype]
    if not value:
        return 0.0
    # The exponent of the last bit, from a first estimate that may be one too large.
    last = value.numerator.bit_length() - value.denominator.bit_length() - digits + 1
    if abs(value) < Fraction(2) ** (last + digits - 1):
        last -= 1
    unit = Fraction(2) ** max(last, least)
    return float(round(value / unit) * unit)


def draw(seed: int) -> torch.Tensor:
    """Return numbers (tokens, channels) that bfloat16 and float16 hold exactly, as float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-255, 256, (len(FAR), DIM), generator=generator).float() / 64


def exactly(
    spec: RopeSpec, positions: torch.Tensor, length: int | None, x: torch.Tensor, sign: int
) -> list[list[Fraction]]:
    """Rotate x exactly.

    Args:
        positions: int64 ``(axes, tokens)``.
        sign: -1 to rotate by the negative angles.
    """
    found = spec.frequencies(length)
    axes = [0] * len(found.exact) if spec.axes is None else [pair[0] for pair in spec.axes.pairs]
    amplitude = Fraction(found.attention_scaling)
    half, start = spec.rotary_dim // 2, spec.start
    rows = []
    with mpmath.workdps(60):
        omegas = [mpmath.mpf(str(omega)) for omega in found.exact]
        for t in range(x.shape[0]):
            row = [Fraction(value) for value in x[t].tolist()]
            for k, (axis, omega) in enumerate(zip(axes, omegas, strict=True)):
                angle = sign * int(positions[axis, t]) * omega
                cos, sin = (_fraction(f(angle)) * amplitude for f in (mpmath.cos, mpmath.sin))
                if spec.interleaved:
                    i, j = start + 2 * k, start + 2 * k + 1
                else:
                    i, j = start + k, start + half + k
                row[i], row[j] = row[i] * cos - row[j] * sin, row[j] * cos + row[i] * sin
            rows.append(row)
    return rows


def phase_words(spec: RopeSpec, length: int | None) -> torch.Tensor:
    """Return the nearest multiples of 2^-64 turn to the frequencies, modulo 1 turn, int64 (axes, pairs)."""
    words = torch.zeros(spec.axis_count, spec.rotary_dim // 2, dtype=torch.int64)
    with mpmath.workdps(60):
        for k, omega in enumerate(spec.frequencies(length).exact):
            word = int(mpmath.nint(mpmath.mpf(str(omega)) / (2 * mpmath.pi) * 2**64))
            axis = 0 if spec.axes is None else spec.axes.pairs[k][0]
            words[axis, k] = (word + 2**63) % 2**64 - 2**63
    return words


def _fraction(value: Any) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    return (-1) ** sign * Fraction(int(mantissa)) * Fraction(2) ** exponent


def rounded(rows: list[list[Fraction]], dtype: str) -> torch.Tensor:
    """Round an exact result to a dtype, once."""
    values = [[nearest(value, dtype) for value in row] for row in rows]
    return torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))


def exact_vectors(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Add the tensors of all exact rotations; yield their descriptions."""
    tensors["x"], tensors["grad_y"] = draw(1), draw(2)
    for name, spec, length, where, inverse in exact_cases():
        axes = spec.axis_count
        positions = torch.tensor(
            [[(p * (a + 1)) // (3 * a + 1) for p in where] for a in range(axes)]
        )
        sign = -1 if inverse else 1
        result = exactly(spec, positions, length, tensors["x"], sign)
        by_x = exactly(spec, positions, length, tensors["grad_y"], -sign)
        if inverse:
            scale = Fraction(spec.attention_scaling()) ** 2
            result, by_x = ([[v / scale for v in row] for row in rows] for rows in (result, by_x))
        tensors |= {
            f"{name}/positions": positions,
            f"{name}/phase_words": phase_words(spec, length),
            f"{name}/inv_freq": spec.frequencies(length).inv_freq,
        }
        for dtype in FORMATS:
            tensors[f"{name}/y/{dtype}"] = rounded(result, dtype)
            tensors[f"{name}/grad_x/{dtype}"] = rounded(by_x, dtype)
        yield {
            "name": name,
            "spec": spec.to_dict(),
            "seq_len": length,
            "inverse": inverse,
            "attention_scaling": spec.frequencies(length).attention_scaling,
        }


def stack_vectors(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Add the tensors of all stacks, with each of their rules; yield their descriptions."""
    tensors["x"], tensors["grad_y"] = draw(1), draw(2)
    tensors["positions"] = torch.tensor([NEAR])
    for stack in map(stacks.get, stacks.names()):
        for rule, (scaling, length) in RULES.items():
            spec = RopeSpec(DIM, scaling=scaling, interleaved=stack.name in ("meta", "torchtune"))
            try:
                inv_freq, attention_scaling = stack.frequencies(spec, length)
            except NotImplementedError:
                continue
            name = f"{stack.name}/{rule}"
            cos, sin = stack.tables(spec, tensors["positions"][0], torch.float32, seq_len=length)
            tensors |= {
                f"{name}/inv_freq": inv_freq,
                f"{name}/cos": cos[0, 0].contiguous(),
                f"{name}/sin": sin[0, 0].contiguous(),
            }
            for dtype in FORMATS:
                y, by_x = by_tables(stack, spec, cos, sin, tensors, getattr(torch, dtype))
                tensors |= {f"{name}/y/{dtype}": y, f"{name}/grad_x/{dtype}": by_x}
            yield {
                "name": name,
                "spec": spec.to_dict(),
                "seq_len": length,
                "attention_scaling": attention_scaling,
                "source": stack.source,
                "verified": stack.verified,
                "rounding": list(stack.rounding),
                "tables": "dtype of x" if stack.table_dtype is None else "float32",
            }


def by_tables(
    stack: stacks.Stack,
    spec: RopeSpec,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate x by the tables of a stack; return the result and the gradient of x."""
    kept = stack.table_dtype or dtype
    x = tensors["x"].to(dtype)[None].requires_grad_()
    y, _ = apply_rotary_pos_emb(
        x,
        None,
        cos[:, 0].to(kept),
        sin[:, 0].to(kept),
        unsqueeze_dim=0,
        tables="half",
        interleaved=spec.interleaved,
        rounding=stack.rounding,
    )
    (by_x,) = torch.autograd.grad(y, x, tensors["grad_y"].to(dtype)[None])
    return y[0].detach(), by_x[0]


def write(folder: Path) -> None:
    """Write all vectors."""
    folder.mkdir(exist_ok=True)
    described: dict[str, Any] = {"version": 1}
    for kind, vectors in (("exact", exact_vectors), ("stacks", stack_vectors)):
        tensors: dict[str, torch.Tensor] = {}
        described[kind] = list(vectors(tensors))
        file = folder / f"{kind}.safetensors"
        save_file(tensors, file)
        file.chmod(0o644)  # safetensors leaves it to the owner
    (folder / "vectors.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write")
    write(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
