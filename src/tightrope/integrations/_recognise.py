"""Recognise what a rotary function computes, by calling it on random tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, cast

import torch

from ..forms import (
    HALF,
    INTERLEAVED,
    Arrangement,
    Rotation,
    calls_of,
    signature,
    unwrapped,
)
from . import _known
from ._bits import alike_bits, all_bits, bits_of
from ._candidate import Candidate
from ._code import global_names
from ._find import own_methods, passes_on
from ._probe import (
    AMBIGUOUS,
    BATCH,
    CHANNELS,
    CLASS,
    CLOSE,
    COARSE,
    COMPILED,
    CONTAINER,
    DTYPES,
    GRADIENTS,
    KEEPS,
    NO_CALL,
    NO_MATCH,
    RAISES,
    RANDOM,
    RANK,
    READS,
    REFUSES,
    TOKENS,
    UNEVEN,
    VALUES,
    WRITES,
    Caller,
    Make,
    Probe,
    Unknown,
    Unlike,
    agrees,
    equal,
    key_of,
    permuted,
)
from ._state import State, undisturbed

#: What functions are compared with, for the report.
TRIED = (
    "functions were compared with the operator in eager code on the CPU, forward and backward, with up to 300 tokens, 24 "
    "heads and 128 channels, and bit by bit with 67 tokens and 64 channels, in the dtypes that their lines do not exclude"
)


@dataclass(frozen=True)
class Recognition:
    """The result of :func:`recognise`: a candidate, or None and the reason."""

    candidate: Candidate | None
    reason: str

    def __bool__(self) -> bool:
        return self.candidate is not None


def recognise(
    function: Any, owner: object = None, constants: Sequence[tuple[str, Any]] = ()
) -> Recognition:
    """Recognise which rotation a function computes, by calling it on random tensors.

    The function is compared with every pairing, output order, slice, sign and reading of cos/sin, at
    several shapes, widths and dtypes, in values and gradients. The two halves of the random cos/sin
    are unrelated. Parameter names only decide which argument is tried in which role.

    Args:
        function: a rotary function or method, or a module whose forward is one.
        owner: the object to pass as self to a method; or the class of the method, for an object of which the
            method reads nothing but methods of that class that read nothing of it either.
        constants: keyword arguments that every call passes, as (name, value), if the function computes
            several rotations: it is then recognised only with these.

    Returns:
        The one candidate that matches everywhere, or None and the reason.

    >>> def turn(x, cos, sin):
    ...     u, v = x.chunk(2, -1)
    ...     return x * cos + torch.cat((-v, u), -1) * sin
    >>> print(recognise(turn).candidate.rotation)
    rotate_half on all channels, cos/sin of full width
    >>> recognise(lambda x, cos, sin: x * cos + x * sin).reason
    'it matches no known rotation'
    """
    seen = signature(function)
    if seen is None:
        return Recognition(None, "its signature cannot be read")
    given = dict(constants)
    ways: list[dict[str, Any]] = []
    for call in calls_of(function, method=owner is not None):
        if given.keys() & {each.name for each in call.arguments}:
            continue
        if call.form.takes_tables:
            ways += [{"call": call, "channels_first": first} for first in (False, True)]
        elif call.makes_its_tables:
            ways += [{"call": call, "inside": pairs} for pairs in (HALF, INTERLEAVED)]
    if not ways:
        names = ", ".join(seen.parameters)
        return Recognition(
            None, f"its arguments ({names}) are not those of a rotation by given cos/sin"
        )
    found: list[Candidate] = []
    reasons: list[str] = []
    own: dict[str, Any] = {}
    if isinstance(owner, type):
        own = own_methods(cast(FunctionType, unwrapped(function)), owner)
    states = [State(each) for each in (function, *own.values())]
    if any(state.compiled for state in states):
        return Recognition(None, COMPILED)
    functions = [each for state in states for each in state.functions]
    key = _known.key_of(functions, constants, owner is not None) if functions else None
    known = _known.lookup(key)
    with undisturbed():
        if known is not None and known.call in [way["call"] for way in ways]:
            mine = Unknown(own) if isinstance(owner, type) else owner
            if _is_confirmed(function, mine, known) and not getattr(mine, "is_read", False):
                found, ways = [known], []
        for way in ways:
            mine = Unknown(own) if isinstance(owner, type) else owner
            try:
                explained = _explain(Caller(function, owner=mine, constants=given, **way))
            except Unlike as unlike:
                explained = []
                reasons.append(str(unlike))
            except Exception:  # noqa: BLE001  # third-party code can raise anything
                explained = []
                reasons.append(RAISES)
            if type(mine) is Unknown and mine.is_read:
                explained = []
                reasons.append(READS)
            found += [replace(each, calls=tuple(sorted(own))) for each in explained]
    changed = [state.restore() for state in states]
    if any(changed) and found:
        return Recognition(None, KEEPS)
    if len(found) == 1:
        _known.keep(key, found[0])
        return Recognition(found[0], "matches exactly one known rotation")
    if found:
        return Recognition(
            None, f"matches {len(found)} known rotations: {'; '.join(map(str, found))}"
        )
    # Report the reason of the call that passed the most checks.
    return Recognition(None, max(reasons, key=RANK.index) if reasons else RANK[0])


def to_the_bit(recognition: Recognition) -> Recognition:
    """Refuse a function whose bits the operator cannot equal for any dtype."""
    candidate = recognition.candidate
    if candidate is None or candidate.bits:
        return recognition
    return Recognition(
        None, f"it computes {candidate}, but not to the bit; rounding='once' replaces it"
    )


def recognise_member(
    value: Any, owner: type | None, constants: Sequence[tuple[str, Any]] = ()
) -> Recognition:
    """Recognise what `patch` finds in a module or a class: a function, a static method or a method of ``owner``.

    All objects of a class and of its subclasses share one replacement, so a method that reads attributes
    of its object is not recognised. It may call methods of its class that do not either, and that no subclass
    defines again, and read the number and the size of heads if x is (batch, seq, heads * dim).
    """
    if isinstance(value, classmethod):
        return Recognition(None, CLASS)
    if owner is None:
        plain = value.__func__ if isinstance(value, staticmethod) else value
        return recognise(plain, constants=constants)
    function: Any = unwrapped(value)
    tried = recognise(function, owner, constants)
    if tried.candidate is None:
        return tried
    called = (inspect.getattr_static(owner, name) for name in tried.candidate.calls)
    readers: list[FunctionType] = []
    for each in [function, *map(unwrapped, called)]:
        readers += State(each).functions if passes_on(each) else [each]
    if any(_READERS & global_names(each.__code__) for each in readers):
        return Recognition(None, READS)
    return tried


# Builtins by which a function can read its object without asking it for an attribute.
_READERS = {"type", "super", "vars", "id", "hash", "repr", "str", "getattr", "hasattr"}


def _explain(caller: Caller) -> list[Candidate]:
    """The candidates that match a function, called in one way."""
    alive: list[Rotation] | None = None
    verified: list[Arrangement] = []
    # Layouts at which the function runs but matches nothing, except those with ``broadcasts``: their
    # tables have one row and do not show how rows are used.
    refused: set[tuple[int, int, int | None, int | None]] = set()
    partial = ran = False
    for shape in caller.arrangements():
        known = {key_of(each)[:3] for each in verified if not each.broadcasts}
        if shape.broadcasts and len(shape.table) == 3 and key_of(shape)[:3] in known:
            continue
        matches = _at(caller, shape, alive)
        ran |= bool(matches)
        if not any(matches.values()):
            if matches and not shape.broadcasts:
                refused.add(key_of(shape))
            continue
        if not all(matches.values()):
            raise Unlike(UNEVEN)
        for width, rotations in matches.items():
            alive = rotations if alive is None else [r for r in alive if r in rotations]
            partial |= any(not replace(r, slice="whole").fits(CHANNELS, width) for r in rotations)
        verified.append(shape)
    if alive is None:
        raise Unlike(NO_MATCH if ran else NO_CALL)
    if not partial:
        alive = list(dict.fromkeys(replace(r, slice="whole") for r in alive))
    keys = frozenset(key_of(shape) for shape in verified if not shape.broadcasts)
    if not alive or (keys and keys <= refused):
        raise Unlike(UNEVEN)
    # Calls with ranks of which some layouts match nothing run the original.
    keys -= refused
    verified = [shape for shape in verified if shape.broadcasts or key_of(shape) in keys]
    if len({key[:3] for key in keys}) != len(keys):
        raise Unlike(AMBIGUOUS)
    seen = frozenset(shape.table for shape in verified if shape.broadcasts)
    made = [Candidate(caller.call, rotation, keys, seen) for rotation in alive]
    return [_confirm(caller, candidate, verified) for candidate in made]


def _at(
    caller: Caller, shape: Arrangement, alive: list[Rotation] | None
) -> dict[int, list[Rotation]]:
    """For each width of tables that the function accepts: the rotations that match it."""
    matches: dict[int, list[Rotation]] = {}
    for width in (CHANNELS,) if caller.inside else (CHANNELS, CHANNELS // 2, CHANNELS // 4):
        try:
            probe = Probe(caller, shape, width)
        except Unlike:  # a function that makes its tables gives none
            continue
        if (ys := probe.copied().tried()) is not None:
            fitting = caller.fitting(width) if alive is None else alive
            matches[width] = [
                rotation
                for rotation in (fitting if probe.could_be(ys) else ())
                if rotation.fits(CHANNELS, width) and probe.agrees(ys, rotation)
            ]
        if matches.get(width):
            # A function can take a layout for another one, and slice the heads as if they were tokens.
            single = Probe(caller, shape, width, tokens=1)
            ys = single.copied().tried() or []
            matches[width] = [each for each in matches[width] if single.agrees(ys, each)]
    return matches


def _is_confirmed(function: Any, owner: object, candidate: Candidate) -> bool:
    """Return whether a function computes what one with its source was found to compute, by calls of one shape."""
    call, rotation = candidate.call, candidate.rotation
    caller = Caller(
        *(function, call, owner, dict(candidate.constants), candidate.channels_first),
        inside=rotation.pairs if call.makes_its_tables else None,
    )
    seen = candidate.shapes or candidate.ones
    shapes = (s for s in caller.arrangements() if key_of(s) in seen or s.table in seen)
    shape = next(shapes, None)
    if shape is None:
        return False
    width = 32 if rotation.reading == "half" else 64
    try:
        probe = Probe(caller, shape, width, tokens=67, channels=64)
        if not probe.agrees(probe.copied().tried() or [], rotation):
            return False
        for dtype, table_dtype, bits in candidate.bits:
            if dtype == table_dtype and dtype in (torch.float32, torch.bfloat16):
                sizes: dict[str, Any] = {"tokens": 67, "channels": 64}
                sizes |= {"dtype": dtype, "table_dtype": table_dtype}
                probe = Probe(caller, shape, width, **sizes)
                now = bits_of(probe, rotation, bits.cast, bits.by_batch, (bits.rounding,))
                if now is None or now._replace(tables=bits.tables and now.tables) != bits:
                    return False
    except Exception:  # noqa: BLE001  # third-party code can raise anything
        return False
    return True


def _confirm(caller: Caller, candidate: Candidate, shapes: list[Arrangement]) -> Candidate:
    """Check a candidate at further sizes, dtypes, strides and gradients; fill in its options."""
    rotation = candidate.rotation
    width = CHANNELS // 2 if rotation.reading == "half" else CHANNELS
    several: tuple[dict[str, Any], ...] = (
        {"tokens": 1, "channels": 16},
        {"tokens": 5, "channels": 8, "scale": 100.0},
        {"tokens": 67, "channels": 64},
        {"tokens": 12, "channels": 16, "rows": 1, "scale": 5000.0},
        {"tokens": 300, "channels": 128, "rows": 1, "heads": 24},
        {"tokens": 0, "channels": 16},
    )
    for sizes in several:
        tokens, channels = sizes["tokens"], sizes["channels"]
        for shape in shapes if tokens == 1 else shapes[:1]:
            try:
                probe = Probe(caller, shape, channels * width // CHANNELS, **sizes)
            except Unlike:
                if tokens == 0:
                    continue
                raise
            before = [t.clone() for t in probe.tensors()]
            ys, again = probe.tried(), probe.tried()
            if tokens == 0 and (ys is None or again is None):
                continue
            if ys is not None and not all(map(torch.equal, probe.tensors(), before)):
                raise Unlike(WRITES)
            if ys is None or again is None or not probe.agrees(ys, rotation):
                raise Unlike(VALUES)
            if not equal(ys, again):
                raise Unlike(RANDOM)
    make = functools.partial(Probe, caller, shapes[0], width)
    _check_strides(make(), rotation)
    _check_container(make())
    _check_gradients(make(), rotation)
    _check_nan(make(), rotation)
    dtype = _dtype(make, rotation)
    bits = all_bits(caller, shapes[0], rotation, dtype)
    ones = set(candidate.ones)
    for shape in shapes:
        # Gradients of tables sum in another order, so calls that need them run the original.
        if shape.table == "s11d" and not alike_bits(all_bits(caller, shape, rotation, dtype), bits):
            ones.discard(shape.table)
    return replace(
        candidate,
        ones=frozenset(ones),
        ignored=_ignored(make),
        dtype=dtype,
        tokens=_uneven_tokens(make, rotation),
        excluded=_excluded(make, rotation),
        repeats=_repeats(make, rotation),
        alone=_alone(make(), rotation),
        trailing=_trailing(make(), rotation),
        bits=bits,
        channels_first=caller.channels_first,
        constants=tuple(caller.constants.items()),
    )


def _check_strides(probe: Probe, rotation: Rotation) -> None:
    strided = {name: permuted(x) for name, x in probe.xs.items()}
    if not probe.agrees(probe.run(strided), rotation):
        raise Unlike(VALUES)


def _check_nan(probe: Probe, rotation: Rotation) -> None:
    """Refuse a function that replaces numbers that are not finite, which hides faults of a model."""
    for x in probe.xs.values():
        x[..., 0], x[..., 1] = torch.nan, torch.inf
    ys = probe.tried() or [None] * len(probe.xs)
    for y, x in zip(ys, probe.xs.values()):
        if y is None or not torch.equal(y.isnan(), probe.expected(x, rotation).isnan()):
            raise Unlike(VALUES)


def _check_container(probe: Probe) -> None:
    """Refuse other containers than those that the replacement returns."""
    probe.run()
    if probe.container is not (tuple if len(probe.xs) > 1 else torch.Tensor):
        raise Unlike(CONTAINER)


def _check_gradients(probe: Probe, rotation: Rotation) -> None:
    leaves = [x.requires_grad_() for x in probe.xs.values()]
    with torch.enable_grad():
        ys = [y for y in probe.run() if y is not None]
        wanted = [probe.expected(x, rotation) for x in leaves]
        weights = [torch.randn(y.shape, device="cpu").to(y.dtype) for y in ys]
        try:
            got = torch.autograd.grad(ys, leaves, weights, allow_unused=True)
        except RuntimeError as error:
            raise Unlike(GRADIENTS) from error
        right = torch.autograd.grad(wanted, leaves, [w.double() for w in weights])
    if not all(agrees(g, r.double()) for g, r in zip(got, right)):
        raise Unlike(GRADIENTS)


def _dtype(make: Make, rotation: Rotation) -> str | torch.dtype:
    """``Candidate.dtype``: how the dtype of results follows from those of the arguments."""
    f32, f64, b16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    found: list[dict[str | torch.dtype, torch.dtype]] = []
    for dtype, table_dtype in (
        *((b16, b16), (b16, f32), (f32, b16), (f16, f32), (f16, f16), (f64, f32), (f32, f64)),
        (f32, f32),
    ):
        probe = make(dtype=dtype, table_dtype=table_dtype)
        if not probe.caller.call.form.narrow and table_dtype not in (f32, f64):
            continue
        ys = probe.tried()
        if ys is None:
            raise Unlike(REFUSES)
        kinds = {y.dtype for y in ys if y is not None}
        promoted = torch.promote_types(dtype, table_dtype)
        rules: dict[str | torch.dtype, torch.dtype] = {"x": dtype, "promoted": promoted}
        rules |= {each: each for each in (b16, f16, f32)}
        found.append({rule: kind for rule, kind in rules.items() if kinds == {kind}})
        bound = max(COARSE.get(each, CLOSE) for each in (dtype, table_dtype))
        if not probe.agrees(ys, rotation, bound):
            raise Unlike(VALUES)
    rules_left = [rule for rule in found[0] if all(rule in each for each in found)]
    if len(rules_left) != 1:
        raise Unlike(DTYPES)
    return rules_left[0]


def _ignored(make: Make) -> frozenset[str]:
    """Parameters with "position" in their names that change no result, such as unused position_ids."""
    caller = make().caller
    seen = signature(caller.function)
    known = {each.name for each in caller.call.arguments}
    ignored = set()
    for name in () if seen is None else seen.parameters:
        if name in known or "position" not in name:
            continue
        probe, ids = make(), torch.randint(0, TOKENS, (BATCH, TOKENS), device="cpu")
        with_ids = probe.tried({name: ids})
        if with_ids is not None and equal(probe.run(), with_ids):
            ignored.add(name)
    return frozenset(ignored)


def _uneven_tokens(make: Make, rotation: Rotation) -> str:
    """``Candidate.tokens``: how x with more or fewer tokens than the tables is handled."""
    probe = make()
    if probe.shape.x[-2] != "s":
        return "same"
    for kind, tokens in (("prefix", TOKENS + 2), ("suffix", TOKENS - 2)):
        xs = make(tokens=tokens).xs
        if kind == "suffix":
            xs |= {name: x for i, (name, x) in enumerate(probe.xs.items()) if i}
        ys = probe.tried(xs) or []
        if len(ys) == len(xs) and all(
            agrees(y, _unevenly(probe, x, rotation)) for y, x in zip(ys, xs.values())
        ):
            return kind
    return "same"


def _excluded(make: Make, rotation: Rotation) -> str | None:
    """``Candidate.excluded``: the parameter that is the number of keys at the end that pass through."""
    seen = signature(make().caller.function)
    for name, parameter in ({} if seen is None else seen.parameters).items():
        if "exclude" not in name or type(parameter.default) is not int:
            continue
        for probe, key, y in _longer_key(make, TOKENS + 2, {name: 2}):
            turned = probe.expected(key[..., :TOKENS, :], rotation)
            if agrees(y, torch.cat((turned, key[..., TOKENS:, :].double()), dim=-2)):
                return name
    return None


def _repeats(make: Make, rotation: Rotation) -> bool:
    """``Candidate.repeats``: whether a longer k takes the tables several times."""
    for probe, key, y in _longer_key(make, 3 * TOKENS):
        turned = [probe.expected(each, rotation) for each in key.split(TOKENS, dim=-2)]
        return agrees(y, torch.cat(turned, dim=-2))
    return False


def _longer_key(
    make: Make, tokens: int, given: Mapping[str, Any] | None = None
) -> Iterator[tuple[Probe, torch.Tensor, torch.Tensor | None]]:
    """Yield a probe, k with another number of tokens and what becomes of it, if the call succeeds."""
    probe = make()
    if len(probe.xs) == 2 and probe.shape.x[-2] == "s":
        name = list(probe.xs)[1]
        key = make(tokens=tokens).xs[name]
        ys = probe.tried({name: key, **(given or {})}) or []
        if len(ys) == 2:
            yield probe, key, ys[1]


def _unevenly(probe: Probe, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    more = x.shape[-2] - TOKENS
    if more <= 0:
        return probe.expected(x, rotation, x.shape[-2])
    front, back = x[..., :more, :], x[..., more:, :]
    return torch.cat((front.double(), probe.expected(back, rotation)), dim=-2)


def _alone(probe: Probe, rotation: Rotation) -> str | None:
    """``Candidate.alone``: the result if the second tensor is None."""
    if len(probe.xs) != 2:
        return None
    second = list(probe.xs)[1]
    ys = probe.tried({second: None}) or []
    if not probe.agrees(ys[:1], rotation, count=1):
        return None
    if len(ys) == 1:
        return "one"
    return "pair" if len(ys) == 2 and ys[1] is None else None


def _trailing(probe: Probe, rotation: Rotation) -> bool:
    """Return True if the function takes None for the tensors after the second."""
    if len(probe.xs) < 3:
        return False
    ys = probe.tried(dict.fromkeys(list(probe.xs)[2:])) or []
    return probe.agrees(ys, rotation, count=2)
