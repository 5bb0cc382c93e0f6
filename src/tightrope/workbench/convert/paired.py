"""What a single file says of its own pairing: beside its tensors, whose bytes stay as they are.

A folder gets a record of its own (:data:`.checkpoint.RECORD`). A file has none beside it, so it carries
one: safetensors in its metadata, a zip that torch wrote in its comment, which torch does not read. What
was inserted is whole and can be found again, so that converting back gives the file that there was.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._fail import fail

PAIRING, WAS = "tightrope.pairing", "tightrope.was"
_METADATA = "__metadata__"
# Headers of safetensors files are padded to this many bytes; what goes in keeps them so.
_ALIGNED = 8
_PAIRINGS = ("half", "interleaved")
_ENTRIES = rf'"{PAIRING}":"(?:half|interleaved)", *"{WAS}":"(?:half|interleaved)"'
_ALONE = re.compile(rf'"{_METADATA}":\{{{_ENTRIES}\}},')
_AMONG = re.compile(rf"{_ENTRIES},?")
_COMMENT = re.compile(rb"\n?tightrope pairing=(half|interleaved) was=(half|interleaved)\Z")


@dataclass(frozen=True)
class Paired:
    """A record: how a file is paired, and how it was before."""

    pairing: str
    was: str


def of_metadata(values: object, path: Path) -> Paired | None:
    """The record in the metadata of a safetensors file."""
    if not isinstance(values, dict) or PAIRING not in values:
        return None
    found = {key: values.get(key) for key in (PAIRING, WAS)}
    for key, name in found.items():
        if name not in _PAIRINGS:
            fail(f"{path.name} must say a pairing in its metadata ({key}) but says {name!r}")
    return Paired(str(found[PAIRING]), str(found[WAS]))


def of_comment(comment: bytes) -> Paired | None:
    """The record in the comment of a zip."""
    found = _COMMENT.search(comment)
    return Paired(found[1].decode(), found[2].decode()) if found else None


def comment_with(comment: bytes, record: Paired | None) -> bytes:
    """The comment of a zip with this record and no other.

    >>> comment_with(comment_with(b"mine", Paired("half", "interleaved")), None)
    b'mine'
    """
    kept = _COMMENT.sub(b"", comment)
    if record is None:
        return kept
    told = f"tightrope pairing={record.pairing} was={record.was}".encode()
    return kept + (b"\n" if kept else b"") + told


def header_with(header: bytes, record: Paired | None) -> bytes:
    """The header of a safetensors file with this record and no other; of a length as well aligned.

    >>> before = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  '
    >>> after = header_with(before, Paired("half", "interleaved"))
    >>> len(after) % 8, header_with(after, None) == before
    (0, True)
    """
    text = header.decode("utf-8")
    wanted = json.loads(text)
    metadata: dict[str, Any] = wanted.pop(_METADATA, None) or {}
    metadata = {key: value for key, value in metadata.items() if key not in (PAIRING, WAS)}
    bare = {**({_METADATA: metadata} if metadata else {}), **wanted}
    without = _first(bare, *(each.sub("", text, count=1) for each in (_ALONE, _AMONG)), text)
    if record is None:
        return without.encode()
    told = {PAIRING: record.pairing, WAS: record.was}
    full = {_METADATA: {**metadata, **told}, **wanted}
    inner = f'"{PAIRING}":"{record.pairing}",{{}}"{WAS}":"{record.was}"'
    attempts = []
    among = rf'"{_METADATA}"\s*:\s*\{{'
    for place, before, after in (
        (among, "", ","),
        (among, "", ""),
        (r"\A\s*\{", f'"{_METADATA}":{{', "},"),
    ):
        size = len(before + inner.format("") + after)
        chunk = before + inner.format(" " * (-size % _ALIGNED)) + after
        at = re.search(place, without)
        if at is not None:
            attempts.append(without[: at.end()] + chunk + without[at.end() :])
    return _first(full, *attempts).encode()


def _first(wanted: dict[str, Any], *attempts: str) -> str:
    """The first text that says what is wanted; if none does, one that is written anew."""
    for attempt in attempts:
        try:
            if _plain(json.loads(attempt)) == wanted:
                return attempt
        except ValueError:
            continue
    text = json.dumps(wanted, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNED)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """A header in which no metadata and empty metadata are one."""
    return {key: value for key, value in values.items() if key != _METADATA or value}
