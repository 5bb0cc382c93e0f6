"""How contenders are made, compared with what they must give, and timed."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from .cases import FLOOR, ROUNDS, TUNED, WAYS, Case, cut, small
from .contenders import CONTENDERS, results
from .device import Device
from .expected import bound, error
from .inputs import Call, Inputs, count_of, poison, sets, tensors
from .voice import Voice

#: Seconds that a contender may take to be compiled and called, and to be timed once.
MAKE, TIME = 75.0, 30.0

#: The same for those that tune themselves.
LONGER = 150.0

#: Milliseconds of single calls, and of replays of a graph, in a round.
CALLS, REPLAYS = 40.0, 40.0

#: A case's q and k take a sixteenth of the device's memory at most: there are results, gradients,
#: float64, and other processes beside them.
PART = 16

#: Tries where memory is short, and seconds between them: processes beside this one give some back.
TRIES, REST = 4, 4.0

T = TypeVar("T")


class DifferentError(Exception):
    """A contender that computes something else, and is not timed."""


def sized(case: Case, device: Device) -> Case:
    """A case at the size that the device takes."""
    return small(case) if device.dry else cut(case, device.total_bytes() // PART)


def size_of(case: Case) -> dict[str, Any]:
    """What is taken down of a case that may have been cut."""
    return {"rows": case.rows, "tokens": case.tokens}


def forget() -> None:
    """What was compiled for one case is not kept for the next."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def patiently(work: Callable[[], T], device: Device) -> T:
    """Do work again while memory is too short for it."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(torch.OutOfMemoryError):
            return work()
        device.release()
        time.sleep(0.0 if device.dry else REST)
    return work()


def limit(name: str) -> float:
    """Seconds that a contender may take to be compiled and called."""
    return LONGER if name in TUNED else MAKE


def made(name: str, case: Case, device: Device, inputs: Inputs) -> Call:
    """A contender, compiled by a first call.

    Args:
        inputs: may be written to.
    """
    call = CONTENDERS[name](case, device.at)
    call(inputs)
    device.synchronize()
    return call


def compare(case: Case, device: Device, name: str, voice: Voice) -> bool:
    """Whether a contender gives what it must, as a unit; False too where it cannot take part."""

    def work() -> dict[str, Any]:
        (given,) = sets(case, device.at, 1)
        start = time.perf_counter()
        call = CONTENDERS[name](case, device.at)
        mine = given.clone()
        poison(given)
        found = results(call(mine), mine)
        device.synchronize()
        took = time.perf_counter() - start
        if name == FLOOR:
            return {"first call, s": took, **size_of(case)}
        off = error(case, found, given)
        if not off <= bound(case):
            raise DifferentError(
                f"off by {off:.3g} of a head's largest channel, not {bound(case):.3g}"
            )
        return {"off by": off, "bound": bound(case), "first call, s": took, **size_of(case)}

    unit = f"{case.name} | {name}"
    found = voice.unit(unit, limit(name), lambda: patiently(work, device))
    forget()
    device.release()
    return found is not None or unit in voice.skip - voice.lost


def quantiles(values: list[float]) -> dict[str, Any]:
    """The least, quarters and the most of times in milliseconds, and how many they are."""
    ordered = sorted(values)

    def at(part: float) -> float:
        place = part * (len(ordered) - 1)
        low = ordered[int(place)]
        return low + (place - int(place)) * (ordered[min(int(place) + 1, len(ordered) - 1)] - low)

    return {"count": len(ordered), "ms": [float(f"{at(q / 4):.5g}") for q in range(5)]}


def single_calls(call: Call, inputs: list[Inputs], device: Device) -> dict[str, Any]:
    """Calls as a program makes them, by `triton.testing.do_bench`: where the host is slow, its time too."""
    turn = itertools.cycle(inputs)
    return quantiles(device.each(lambda: call(next(turn)), CALLS))


def replays(call: Call, inputs: list[Inputs], device: Device) -> dict[str, Any]:
    """What the device takes for a call: a graph with one call on each set of inputs, replayed.

    The results of all sets are kept in memory of their own, so that none is overwritten while it is
    in the cache.
    """

    def once() -> list[Any]:
        return [tensors(call(x)) for x in inputs]

    with device.aside():
        for x in inputs[:3]:
            call(x)
        device.synchronize()
        replay = device.capture(once)
        device.time(replay)()
        first = device.time(replay)()
        count = 1 if device.dry else max(5, min(200, int(REPLAYS / max(first, 1e-3))))
        took = [device.time(replay) for _ in range(count)]
        times = [one() / len(inputs) for one in took]
    del replay
    device.release()
    return quantiles(times)


def host(call: Call, inputs: list[Inputs], device: Device) -> dict[str, Any]:
    """Microseconds until a call returns, while the device has not caught up."""
    turn = itertools.cycle(inputs)
    batches = []
    for _ in range(2 if device.dry else 7):
        device.synchronize()
        count = 1 if device.dry else 10
        start = time.perf_counter()
        for _ in range(count):
            call(next(turn))
        batches.append(1e3 * (time.perf_counter() - start) / count)
    device.synchronize()
    return quantiles(batches)


MEASURE = dict(zip(WAYS, (replays, host, single_calls), strict=True))


def time_case(case: Case, device: Device, names: list[str], voice: Voice, seed: int) -> None:
    """All contenders of a case, in rounds; a unit for each and each way of timing.

    Args:
        names: who was found to be right.
        seed: of the orders of the rounds.
    """
    if case.name in voice.skip or not voice.in_time(case.name):
        return

    def make() -> tuple[list[Inputs], Inputs]:
        found = sets(case, device.at, count_of(case, device.cache_bytes(), device.free_bytes()))
        return found, found[0].clone()

    def of_inputs(found: tuple[list[Inputs], Inputs]) -> dict[str, Any]:
        beyond = len(found[0]) * case.one_pass > 2 * device.cache_bytes()
        return {"sets": len(found[0]), "beyond the cache": beyond, **size_of(case)}

    made_inputs = voice.unit(f"{case.name} | inputs", MAKE, make, of_inputs, again=True)
    if made_inputs is None:
        voice.say(end=case.name, **{"not run": "there were no inputs"})
        return
    inputs, spare = made_inputs
    calls: dict[str, Call] = {}
    for name in names:
        unit = f"{case.name} | {name} | "
        if any(other.startswith(unit) for other in voice.lost):
            continue
        call = voice.unit(
            unit + "make",
            limit(name),
            partial(made, name, case, device, spare),
            _nothing,
            again=True,
        )
        if call is not None:
            calls[name] = call
    rng = random.Random(seed)
    for turn in range(1, 1 + (ROUNDS if not device.dry else 2)):
        for name in rng.sample(sorted(calls), len(calls)):
            for way, measure in MEASURE.items():
                unit = f"{case.name} | {name} | {turn} | {way}"
                voice.unit(unit, TIME, partial(measure, calls[name], inputs, device))
    if voice.in_time(case.name):
        voice.say(end=case.name, result=size_of(case))
    forget()


def _nothing(_: Any) -> dict[str, Any]:
    return {}
