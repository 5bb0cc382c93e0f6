"""Pairwise test cases: few cases that together contain every pair of values of any two options."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Allowed: TypeAlias = Callable[[Mapping[str, Any]], bool]


def covering(
    axes: Mapping[str, Sequence[Any]], allowed: Allowed, seed: int = 0
) -> list[dict[str, Any]]:
    """Return cases that together contain every allowed pair of values of any two options.

    Args:
        axes: the values of each option, by name.
        allowed: returns whether a case, which may have only some of the options, is valid.
        seed: seed of the random choices; equal seeds give equal cases.
    """
    names = list(axes)
    rng = random.Random(seed)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
        if allowed({a: axes[a][i], b: axes[b][j]})
    }
    cases = []
    while left:
        best: dict[str, int] = {}
        gain, pairs = -1, sorted(left)
        for _ in range(12):
            chosen = dict(rng.choice(pairs))
            for name in rng.sample(names, len(names)):
                if name in chosen:
                    continue
                fits = []
                for i in range(len(axes[name])):
                    whole = {n: axes[n][at] for n, at in {**chosen, name: i}.items()}
                    if allowed(whole):
                        own = name, i
                        new = sum((own, o) in left or (o, own) in left for o in chosen.items())
                        fits.append((new, rng.random(), i))
                if not fits:
                    break
                chosen[name] = max(fits)[2]
            else:
                found = len(left & set(_pairs(names, chosen)))
                if found > gain:
                    best, gain = chosen, found
        if gain <= 0:
            raise AssertionError(f"no allowed case contains {pairs[0]}")
        left -= set(_pairs(names, best))
        cases.append({name: axes[name][best[name]] for name in names})
    return cases


def _pairs(names: Sequence[str], chosen: Mapping[str, int]) -> Iterator[Any]:
    return itertools.combinations([(name, chosen[name]) for name in names], 2)
