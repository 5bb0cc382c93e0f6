"""The calls that a refusal of `from_config` advises, and what they return."""

from __future__ import annotations

import re
from typing import Any

from tightrope import Axes, RopeSpec, frequencies

_NAMES = {**vars(frequencies), "Axes": Axes, "RopeSpec": RopeSpec}


def calls_in(sentence: str) -> list[str]:
    """Return the calls in a sentence, whole up to their closing parenthesis."""
    calls = []
    for found in re.finditer(r"RopeSpec(?:\.from_config)?\(", sentence):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(sentence[end], 0)
            end += 1
        calls.append(sentence[found.start() : end])
    return calls


def made_by(call: str, config: object) -> Any:
    """Run an advised call for the configuration that was refused."""
    return eval(call, {**_NAMES, "config": config})
