"""Tolerances of the tests, each with its unit and reason, and the assertions that apply them.

Most tests refer to an entry by name; a few state a bound of their own. No entry depends on the
machine, the backend, the instruction set or the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tests.support import oracle


class Tolerance(NamedTuple):
    value: float
    unit: str
    reason: str


TABLE = {
    # --- models of transformers, patched ---
    "patched outputs": Tolerance(
        2e-5,
        "of the largest output",
        "float32: the rotation differs in the last bit, and layers amplify the difference",
    ),
    "angles read back": Tolerance(
        5e-7,
        "absolute, of a cosine or sine in float32",
        "an angle up to pi is off by half a unit, 1.2e-7, and atan2, cosine and sine by a unit each",
    ),
    "patched bfloat16 outputs": Tolerance(
        1.05,
        "of the error of the unpatched model against float64, root mean square",
        "fewer roundings than the original; the rest is the model's own rounding, which is noise",
    ),
    "patched outputs in bfloat16": Tolerance(
        2e-2,
        "of the largest output",
        "the rotation differs in the last bit of bfloat16, 2^-8, and layers amplify the difference",
    ),
    "complex products": Tolerance(
        2.0,
        "steps of the dtype at the largest result",
        "torch fuses one product of each complex number in vectors, and none at their ends",
    ),
    "exact angles outputs": Tolerance(
        1e-4,
        "of the largest output, at positions below 2^7",
        "float32 angles of the original are off by 2^-24 of an angle of up to 128",
    ),
    "published image angles": Tolerance(
        1e-4,
        "absolute and relative, of a rotated channel, at positions below 2^8",
        "angles in float32 are off by 2^-23 of up to 256 radians, 3e-5, times a pair of up to 3",
    ),
    # --- DTensors ---
    "gradient added up over ranks": Tolerance(
        1e-12,
        "of the largest gradient, float64",
        "up to 4 ranks add their sums of up to 624 terms in another order; each rounds by 1e-16",
    ),
    # --- conformance vectors ---
    "conformance": Tolerance(
        2.5,
        "units in the last place of the longer channel of a pair",
        "half a unit for the store; for float32, cosine and sine off by 1.2e-7, one unit of 1, add up to 2",
    ),
    "conformance, differing": Tolerance(
        0.02,
        "of results in 16 bits",
        "an error of 1e-7 crosses the midpoint of two bfloat16 numbers in 2^-14, of float16 in 2^-11 of cases",
    ),
    # --- angles ---
    "float32 angle": Tolerance(
        1.2e-7,
        "absolute, of a cosine or sine",
        "half an ulp of float32 at 1 is 6.0e-8; rounding the remainder adds at most as much",
    ),
    "float64 angle": Tolerance(
        1e-12,
        "absolute, of a cosine or sine, for |position| <= 2^20",
        "a phase word is off by 2^-65 turn, and an angle at 2^20 by 2^-45 turn = 1.8e-13 rad",
    ),
    "channels reordered": Tolerance(
        2e-3,
        "of the difference that the other pairing makes to hidden states or logits",
        "float32 products summed in another order, through two layers: at most 4e-5 in 80 families",
    ),
    "other pairing": Tolerance(
        3e-5,
        "of the largest hidden state, score or logit; a lower bound",
        "attention changes little in a small random model: ModernBERT's states by 9e-5, others' by 4e-4 to 0.8",
    ),
    "word": Tolerance(
        2 * math.pi * 2.0**-65,
        "radians per unit of position, summed over the axes",
        "a phase word is the nearest multiple of 2^-64 turn",
    ),
    "fraction": Tolerance(
        2 * math.pi * 2.0**-62,
        "radians per axis with fractional positions, times (1 + turns per position)",
        "the upper half of fraction times phase word, from 32-bit parts, is too low by at most 4 units "
        "of 2^-64 turn; and the fraction itself is truncated at 2^-63",
    ),
    "float64 rounding": Tolerance(
        6e-16,
        "absolute, of a cosine or sine",
        "five roundings to float64 (1.1e-16 at 1): remainder, 2π, their product, polynomial, oracle",
    ),
    # --- f and P ---
    "f and P, float64": Tolerance(
        1e-12,
        "of the largest number of a head vector",
        "angles from phase words may be off by 1e-12 (above), far more than the roundings add",
    ),
    "f and P, float32": Tolerance(
        4e-6,
        "of the largest number of a head vector",
        "about twenty roundings of 6e-8 by exponential, division, sum, gate and rotation; terms that "
        "cancel in f'; sums over 20 tokens",
    ),
    "f and P, bfloat16": Tolerance(
        2.0**-7,
        "of the largest number of a head vector",
        "one rounding is up to 2^-8; gradients of gates sum results that were rounded",
    ),
    "f and P, float16": Tolerance(
        2.0**-10,
        "of the largest number of a head vector",
        "one rounding is up to 2^-11; gradients of gates sum results that were rounded",
    ),
    "P of slopes, float32": Tolerance(
        2.0**-22,
        "relative, of each factor",
        "3 ulp and a rounding: a product truncated to float would lose 40 ulp at e^80",
    ),
    "f, float32": Tolerance(
        3e-6,
        "relative, of each number",
        "2 ulp, and as much again for the error of the argument of an exponential near e^±88",
    ),
    "compiled sine": Tolerance(
        2.0**-22,
        "relative, also where the sine is next to zero",
        "2 ulp: the reduced argument is off by half an ulp of itself for |x| up to 8192, and the "
        "polynomial and its rounding add one; the largest observed: 1.3e-7 with FMA, 1.8e-7 without",
    ),
    "compiled exp": Tolerance(
        1.5 * 2.0**-23,
        "relative",
        "reduction, polynomial and scaling round once each, the first two by half an ulp",
    ),
    "compiled sigmoid": Tolerance(
        3 * 2.0**-23,
        "relative",
        "as 'compiled exp', then a sum and a quotient",
    ),
    "reported number": Tolerance(
        1e-15,
        "relative, of a wavelength, a number of turns, a ratio or an angle that a report gives",
        "60 digits rounded to float64 (1.1e-16) after one quotient; the oracle also rounds π",
    ),
    "f and P, rounded once": Tolerance(
        0.999,
        "share of results, at least",
        "the error before the one rounding is at most 2^-19 for bfloat16, 2^-22 for float16",
    ),
    "every bfloat16": Tolerance(
        4,
        "of all numbers between 2^-60 and 88, at most this many whose f is not the nearest bfloat16",
        "this many results are so near a tie that the arithmetic's error of 2^-19 decides",
    ),
    # --- frequencies ---
    "frequency digits": Tolerance(
        1e-54,
        "relative, of an exact frequency",
        "60 digits minus those that 2,048 products lose; float64 would need 1e-16, and the phase word of "
        "the fastest pair has 38 digits before its modulo",
    ),
    "frequency of transformers": Tolerance(
        1e-6,
        "relative, of a float32 frequency",
        "transformers computes in float32, with a dozen roundings of 6e-8",
    ),
    "ramp of transformers": Tolerance(
        6e-8,
        "for YaRN, times the frequency before scaling",
        "transformers computes 1 − ramp, the weight of the frequency before scaling, from a float32 "
        "ramp, so a weight near 0 is off by 6e-8 too",
    ),
    "dynamic float64": Tolerance(
        1e-15,
        "relative, of a frequency, times 4 + 2 ln(scale)",
        "float64 has 1.1e-16: scale, logarithm, quotient, exponential and product round, and the "
        "exponential turns the error of its argument, up to ln(scale), into a relative one",
    ),
    "word of a float64": Tolerance(
        2.0**-76,
        "relative, of a phase word before its modulo, in addition to half a unit",
        "the rounding error of the product with 1 / 2π is recovered as a sum of exact products, each at "
        "most 2^-26 of it; that sum rounds by 2^-53",
    ),
    # --- rotation ---
    "float32 rotation": Tolerance(
        4e-7,
        "times |pair|, of a rotated channel",
        "two cosines off by 1.2e-7 and three roundings of 6e-8",
    ),
    "float64 rotation": Tolerance(
        1.5e-15,
        "times |pair|, of a rotated channel, in addition to the error of the angle",
        "two cosines off by 'float64 rounding', two products and a sum, here and in the oracle",
    ),
    "float32 rounding": Tolerance(2.0**-24, "relative", "a value is stored as the nearest float32"),
    "float32 subnormal": Tolerance(
        2.0**-149,
        "absolute, of a rotated channel",
        "below 2^-126 float32 has absolute precision only: product and sum round by 2^-150 each",
    ),
    "float64 subnormal": Tolerance(
        3 * 2.0**-1074,
        "absolute, of a rotated channel",
        "as for float32: two roundings by 2^-1075 in the kernel and three in the oracle",
    ),
    "16-bit share": Tolerance(
        0.999,
        "share of elements that equal the correctly rounded exact value",
        "float32 inside and one rounding; an element misses only within 1e-7 of a tie",
    ),
    "16-bit ulp": Tolerance(
        1,
        "representable numbers, of the elements that miss",
        "a miss lies next to a tie. Where a pair cancels to less than 2^-10 of its length, the inner "
        "float32 has the coarser step, and the bound is 'float32 rotation' as for float32",
    ),
    "16-bit ways": Tolerance(
        1.75,
        "steps of the type at |pair|, of a channel",
        "one way rounds at the end, by half a step; the other also once before, where the rotation "
        "turns errors of half a step in both channels into one of √2 / 2: 1.71",
    ),
    "activation": Tolerance(
        1e-6,
        "for a channel of the rotated f(x), times |pair| of |f(x)| + |x · f'(x)|; for a gradient, times "
        "|pair| of the incoming gradient and max(|f'(x)|, 1)",
        "'float32 rotation', and as much again for f in float32: its argument and its value round by "
        "6e-8 each, and so do the few steps between",
    ),
    "activation, float64": Tolerance(
        6e-15,
        "as for 'activation'",
        "'float64 rotation' and twice as much for f: e^x, 1 + e^x and a quotient round after one another",
    ),
    # --- gradients ---
    "angle gradient, torch.float32": Tolerance(
        2e-6,
        "times Σ |ω| · |pair| · |gradient pair| over the terms; for ω, |position| in place of |ω|",
        "the output is off by 'float32 rotation', products of 8 heads round 16 times by 6e-8 before "
        "they are widened to float64, and a float32 gradient once more",
    ),
    "angle gradient, torch.float64": Tolerance(
        1e-12,
        "as for torch.float32",
        "the output is off by 'float64 rotation' and the error of an angle of 1000 rad; up to 3000 sums "
        "round by 1.1e-16 each",
    ),
    "angle gradient, torch.bfloat16": Tolerance(
        2.0**-8 + 2e-6,
        "as for torch.float32",
        "each channel of the output is stored with an error of 2^-8 of itself at most (half a unit of "
        "the last of 8 bits, for a number just above a power of two), so y·dz − z·dy is off by "
        "2^-8 · |pair| · |gradient pair| at most (Cauchy-Schwarz); the rest is as in float32",
    ),
    "angle gradient, torch.float16": Tolerance(
        2.0**-11 + 2e-6, "as for torch.float32", "as for bfloat16, with 11 bits"
    ),
    "angle sums, float32": Tolerance(
        1.1e-6,
        "times the sum of the moduli of the products",
        "outputs and gradients are given; their products round 16 times by 6e-8, or twice with a "
        "difference, before they are widened to float64",
    ),
    "angle sums, float64": Tolerance(
        1e-12,
        "times the sum of the moduli of the products",
        "up to 6000 products of float64 in another order, 1.1e-16 each",
    ),
    "narrow position gradient": Tolerance(
        32,
        "machine epsilons of x, times the largest gradient",
        "output and its gradient are rounded to x's type, and 192 products of them are added",
    ),
    # --- Triton kernels ---
    "triton, float32": Tolerance(
        4e-6,
        "times the largest channel of the head, of a result or of the gradient before f'",
        "rotation 4e-7, f and P of three roundings each and sums over up to 128 channels; float16 and "
        "bfloat16 are rounded once more, which is half a step of their own",
    ),
    "triton, float64": Tolerance(
        2e-9,
        "as for float32",
        "fractional positions up to 3000 are truncated at 2^-63 turn and slopes times positions up to 10^6 "
        "round by 1e-10; rotations alone are held to 'float64 rotation'",
    ),
    "triton on a device, torch.float32": Tolerance(
        1e-5,
        "of the largest element",
        "float32 arithmetic; sums over tokens cancel to about a thousandth of their terms",
    ),
    "triton on a device, torch.bfloat16": Tolerance(
        2.0**-8, "of the largest element", "one rounding of the result to 8 bits"
    ),
    "triton act": Tolerance(
        1e-6,
        "relative, of f or f' of one channel, anywhere in the domain",
        "up to 8 roundings of 6e-8 and a polynomial off by 1.5e-8; compared with torch's float64",
    ),
    "triton slope": Tolerance(
        2e-7,
        "absolute, of f' of silu and gelu",
        "where f' is 0, two terms of about 1/2 cancel, each with a few roundings of 3e-8",
    ),
    "float32 tiny": Tolerance(
        1.2e-38, "absolute", "GPUs may flush numbers below the smallest normal float32 to zero"
    ),
    # --- two correct computations of one result ---
    "float64 ways": Tolerance(
        1e-12,
        "relative and absolute",
        "the same few products in another order: 2.2e-16 each, values below 100, sums below 100 terms",
    ),
    "float64 ways, higher order": Tolerance(
        1e-10,
        "relative and absolute",
        "as 'float64 ways', through cubes and second derivatives of values up to 100",
    ),
    "float64 formula": Tolerance(
        1e-13,
        "absolute",
        "a plain float64 formula rounds its angle: 64 rad by 7e-15, times values below 6",
    ),
    "axes one by one": Tolerance(
        1e-9,
        "relative and absolute",
        "fractional positions up to 1000 lose 'fraction' on each axis, and the phase words are random",
    ),
    "float32 ways": Tolerance(
        1e-5,
        "relative and absolute",
        "float32 sums in another order, or a float32 formula at positions below 64: 6e-8 times 64",
    ),
    "float32 ways, through attention": Tolerance(
        1e-4,
        "relative and absolute",
        "softmax and two products of 48 terms on top of 'float32 ways', in a compiler's order",
    ),
    # --- scan ---
    "scan": Tolerance(
        2e-6,
        "times Σ |score terms| · |v| of each output",
        "rotations, exponentials and products round by 6e-8 each, and sums of a few hundred terms by as "
        "much per level",
    ),
    # --- given tables ---
    "table rotation, torch.float64": Tolerance(
        1e-14, "relative and absolute", "three roundings of 1.1e-16, values up to 16"
    ),
    "table rotation, torch.float32": Tolerance(
        2e-6, "relative and absolute", "three roundings of 6e-8, values up to 16"
    ),
    "table rotation, torch.bfloat16": Tolerance(
        4e-2, "relative and absolute", "one rounding by up to 2^-8 of values up to 16"
    ),
    "table rotation, torch.float16": Tolerance(
        5e-3, "relative and absolute", "one rounding by up to 2^-11 of values up to 16"
    ),
}

# Number of elements for which a share of 99.9 % is meaningful: 10 misses are allowed, and the rate is
# about 2 in 10,000 (float16), so that chance does not decide.
ENOUGH = 10_000


def value(name: str) -> float:
    return TABLE[name].value


def assert_near(got: Any, want: Any, name: str) -> None:
    """Assert equal shapes and dtypes, and values within the entry `name`, which is rtol and atol.

    Of two tensors, or of each pair of two sequences.
    """
    bound = value(name)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def angle_bound(
    dtype: torch.dtype, reach: float, fractional_axes: int = 0, turns: float = 0.0
) -> float:
    """Return the largest allowed error of a cosine or sine in `dtype`.

    Args:
        reach: Σ |position| over the axes. In float32 the bound includes the error of phase words for
            all positions that it covers, |position| < 2^31.
        fractional_axes: number of axes with fractional positions.
        turns: the largest ω / 2π, if positions are fractional.
    """
    if dtype == torch.float32:
        return value("float32 angle")
    return (
        reach * value("word")
        + fractional_axes * (1 + turns) * value("fraction")
        + value("float64 rounding")
    )


def assert_angles(
    got: torch.Tensor,
    exact: torch.Tensor,
    reach: float,
    fractional_axes: int = 0,
    turns: float = 0.0,
) -> None:
    """Assert that float32 or float64 cosines or sines are near exact ones; see :func:`angle_bound`."""
    assert got.dtype in (torch.float32, torch.float64)
    assert got.shape == exact.shape
    bound = angle_bound(got.dtype, reach, fractional_axes, turns)
    error = (got.double() - exact).abs()
    # Written so that NaN fails.
    assert bool((error <= bound).all()), f"off by {error.max().item():.3g}, bound {bound:.3g}"


def rotation_bound(dtype: torch.dtype, reach: float, rotations: int = 1) -> float:
    """Return the largest allowed error of a channel after some rotations, in units of |pair|.

    Args:
        reach: the largest |position|, which matters only in float64.
    """
    if dtype == torch.float64:
        angle = reach * value("word") + value("fraction")
        once = math.sqrt(2) * angle + value("float64 rotation")
    else:
        once = value("float32 rotation")
    # Both channels of a pair may be off, and the next rotation mixes them.
    return once if rotations == 1 else rotations * math.sqrt(2) * once


class Result(NamedTuple):
    """A result and its exact value, for :func:`assert_rotated`."""

    got: torch.Tensor
    exact: torch.Tensor
    # Length of the pair of each element; 0 for an element that does not rotate.
    lengths: torch.Tensor
    reach: float = 0.0  # the largest |position|
    drift: float = 0.0  # the relative error of the frequencies


def dynamic_drift(factor: float, trained: int, length: int) -> float:
    """Return the relative error that the frequencies of dynamic NTK may have at a length."""
    scale = 1 + factor * max(length - trained, 0) / trained
    return value("dynamic float64") * (4 + 2 * math.log(scale)) if length > trained else 0.0


def assert_rotated(cases: Iterable[Result]) -> None:
    """Assert that finite results of one dtype are within the bounds of rotations.

    Pass many 16-bit cases together, :data:`ENOUGH` elements or more: the share of correctly rounded
    elements is taken over all of them, all other bounds over each case.
    """
    total = missed = 0
    for got, exact, lengths, reach, drift in cases:
        assert got.shape == exact.shape
        if got.dtype in (torch.float32, torch.float64):
            _assert_close(got, exact, lengths, reach, drift=drift)
            continue
        apart = oracle.steps_apart(got, oracle.rounded(exact, got.dtype))
        total += apart.numel()
        missed += int((apart != 0).sum())
        far = apart > value("16-bit ulp")
        if far.any():
            _assert_close(got[far], exact[far], lengths[far], reach)
    if total:
        assert total >= ENOUGH, f"{total} elements are too few: the share needs {ENOUGH}"
        allowed = total * (1 - value("16-bit share"))
        assert missed <= allowed, f"{missed} of {total} elements are not correctly rounded"


def assert_rotations(
    got: torch.Tensor, wanted: torch.Tensor, lengths: torch.Tensor, rotations: int, reach: float
) -> None:
    """Assert that two float32 or float64 results agree after ``rotations`` rotations in total."""
    assert got.dtype in (torch.float32, torch.float64)
    assert got.shape == wanted.shape
    _assert_close(got, wanted.double(), lengths, reach, rotations)


def assert_same_bits(
    got: torch.Tensor | Sequence[torch.Tensor], wanted: torch.Tensor | Sequence[torch.Tensor]
) -> None:
    """Assert the same dtype, shape and bits, including signs of zeros and NaN payloads.

    Of two tensors, or of each pair of two sequences.
    """
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        for one, other in zip(got, wanted, strict=True):
            assert_same_bits(one, other)
        return
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    a, b = (x.detach().contiguous().view(integers) for x in (got, wanted))
    differ = a != b
    assert not differ.any(), (
        f"{int(differ.sum())} of {differ.numel()} elements differ in their bits"
    )


def assert_each(
    check: Callable[..., object], got: Iterable[Any], wanted: Iterable[Any], *others: Any
) -> None:
    """Check each of several results, such as with `assert_same_bits` or `torch.equal`; none may lack."""
    for one, other in zip(got, wanted, strict=True):
        found = check(one, other, *others)
        assert found is None or found


def assert_angle_gradient(
    got: torch.Tensor | None, exact: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> None:
    """Assert that a gradient of positions or frequencies is within its bound.

    Args:
        scale: Σ |ω| · |pair| · |gradient pair| of each position; for a frequency, |position| in place
            of |ω|.
        dtype: dtype of the rotated tensor.
    """
    assert got is not None
    assert got.shape == exact.shape == scale.shape
    bound = value(f"angle gradient, {dtype}") * scale
    if got.dtype == torch.float32:
        bound = bound + value("float32 rounding") * exact.abs()
    error = (got.double() - exact).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.3g} times the bound"


def assert_angle_sums(
    got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> None:
    """Assert that angle sums of the raw operator match a plain formula, with NaN in the same places.

    Args:
        scale: the same sums over the moduli of the products.
        dtype: dtype of the outputs.
    """
    assert got.dtype == torch.float64
    assert got.shape == exact.shape == scale.shape
    bound = value("angle sums, float64" if dtype == torch.float64 else "angle sums, float32")
    assert torch.equal(got.isnan(), exact.isnan())
    error = (got - exact).abs()
    fits = (error <= bound * scale) | exact.isnan()
    assert bool(fits.all()), (
        f"the error is {(error / scale).nan_to_num().max().item():.3g} × the moduli, bound {bound:.3g}"
    )


def _assert_close(
    got: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    reach: float,
    rotations: int = 1,
    drift: float = 0.0,
) -> None:
    width = "float64" if got.dtype == torch.float64 else "float32"
    floor = rotations * value(f"{width} subnormal")
    # Add half a step of a 16-bit dtype: the bound is for the value before it is stored.
    stored = (
        0.0
        if got.dtype in (torch.float32, torch.float64)
        else oracle.step_sizes(exact, got.dtype) / 2
    )
    # No frequency is above 1 radian per position.
    bound = (rotation_bound(got.dtype, reach, rotations) + drift * reach) * lengths + floor + stored
    error = (got.double() - exact).abs()
    worst = (error - bound).max().item() if error.numel() else 0.0
    # Written so that NaN fails.
    assert bool((error <= bound).all()), f"off by {worst:.3g} more than the bound"
