"""The pairing in a configuration, where the code of its family reads a key for it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from ...config import keys


def marked(text: str, at: tuple[str, ...], key: str, interleaved: bool) -> str:
    """A configuration that says the pairing, with as few of its bytes changed as can be.

    Args:
        text: a JSON object.
        at: the keys that lead to the section.
        key: a key of :data:`tightrope.config.keys.PAIRING`.
        interleaved: the pairing to say.

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
    said = "true" if value else "false"
    attempts = [
        re.sub(rf'("{key}"\s*:\s*)(?:true|false|null)', rf"\g<1>{said}", text),
        re.sub(r"\A(\s*\{)(\s*)", rf'\g<1>\g<2>"{key}": {said},\g<2>', text) if not at else text,
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
