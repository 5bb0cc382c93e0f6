"""Set the pairing in a configuration, if its family's code reads a key for it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from tightrope.config import keys


def marked(text: str, at: tuple[str, ...], key: str, interleaved: bool) -> str:
    """Return a configuration that states the pairing. If possible, only the bytes of the key change.

    Args:
        text: a JSON object.
        at: the keys that lead to the section.
        key: a key of :data:`tightrope.config.keys.PAIRING`.
        interleaved: the pairing to state.

    >>> marked('{"rope_interleave": true}', (), "rope_interleave", False)
    '{"rope_interleave": false}'
    """
    value = interleaved == keys.PAIRING[key]
    wanted = copy.deepcopy(json.loads(text))
    section = wanted
    for name in at:
        section = section[name]
    if section.get(key) == value and isinstance(section.get(key), bool):
        return text
    section[key] = value
    literal = "true" if value else "false"
    attempts = [
        re.sub(rf'("{key}"\s*:\s*)(?:true|false|null)', rf"\g<1>{literal}", text),
        re.sub(r"\A(\s*\{)(\s*)", rf'\g<1>\g<2>"{key}": {literal},\g<2>', text) if not at else text,
    ]
    for attempt in attempts:
        if _same(attempt, wanted):
            return attempt
    return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"


def _same(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(text) == wanted)
    except ValueError:
        return False
