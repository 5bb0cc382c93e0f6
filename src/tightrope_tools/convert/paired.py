"""The conversion record inside a single file, which states its pairing.

A folder has a record file (:data:`.checkpoint.RECORD`). A single file holds its record itself:
safetensors in its metadata, a torch zip in its comment, which torch does not read. Adding a record changes
no tensor. The inserted text can be found and removed, so converting back restores the file.
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
# Headers of safetensors files are padded to a multiple of this many bytes; a record keeps that.
_ALIGNED = 8
_PAIRINGS = ("half", "interleaved")
_ENTRIES = rf'"{PAIRING}":"(?:half|interleaved)", *"{WAS}":"(?:half|interleaved)"'
_ALONE = re.compile(rf'"{_METADATA}":\{{{_ENTRIES}\}},')
_AMONG = re.compile(rf"{_ENTRIES},?")
_COMMENT = re.compile(rb"\n?tightrope pairing=(half|interleaved) was=(half|interleaved)\Z")


@dataclass(frozen=True)
class Paired:
    """A record: the pairing of a file, and its pairing before the conversion."""

    pairing: str
    was: str


def of_metadata(values: object, path: Path) -> Paired | None:
    """Return the record in the metadata of a safetensors file, if any."""
    if not isinstance(values, dict) or PAIRING not in values:
        return None
    found = {key: values.get(key) for key in (PAIRING, WAS)}
    for key, name in found.items():
        if name not in _PAIRINGS:
            fail(f"{path.name} must state a pairing in its metadata ({key}) but states {name!r}")
    return Paired(str(found[PAIRING]), str(found[WAS]))


def of_comment(comment: bytes) -> Paired | None:
    """Return the record in the comment of a zip, if any."""
    found = _COMMENT.search(comment)
    return Paired(found[1].decode(), found[2].decode()) if found else None


def comment_with(comment: bytes, record: Paired | None) -> bytes:
    """Return the comment of a zip with ``record`` as its only record, or with none.

    >>> comment_with(comment_with(b"mine", Paired("half", "interleaved")), None)
    b'mine'
    """
    kept = _COMMENT.sub(b"", comment)
    if record is None:
        return kept
    text = f"tightrope pairing={record.pairing} was={record.was}".encode()
    return kept + (b"\n" if kept else b"") + text


def header_with(header: bytes, record: Paired | None) -> bytes:
    """Return a safetensors header with ``record`` as its only record, or with none; padded to 8 bytes.

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
    full = {_METADATA: {**metadata, PAIRING: record.pairing, WAS: record.was}, **wanted}
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
    """Return the first text that parses to ``wanted``; if there is none, serialise ``wanted``."""
    for attempt in attempts:
        try:
            if _plain(json.loads(attempt)) == wanted:
                return attempt
        except ValueError:
            continue
    text = json.dumps(wanted, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNED)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the header without empty metadata."""
    return {key: value for key, value in values.items() if key != _METADATA or value}
