"""Load the keys of a configuration from a file or folder; anything else raises one clear error."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .._errors import public
from ..spec import RopeSpec
from . import gguf_file
from .source import fail

NAMES = ("config.json", "params.json")
#: The file in which `tightrope convert` records its conversions of a folder.
RECORD = "tightrope_convert.json"

# The commands leave this out of their messages.
ELSEWHERE = (
    "; for a model that is not on this machine, pass its config object: "
    "transformers.AutoConfig.from_pretrained(name)"
)

# The largest known configurations list every layer of a model and take a few hundred kB.
_LARGEST = 64 * 2**20


@public("from_config")
def load(path: Path) -> Mapping[str, Any]:
    """Return the keys of a JSON file, a GGUF file, or the one configuration in a folder.

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: the file is not a configuration.
    """
    if path.is_dir():
        path = _inside(path)
    elif path.exists() and not path.is_file():
        fail(f"a configuration must be a file or a folder but {path} is a device or a pipe")
    elif not path.exists():
        url = url_in(path)
        if url is not None:
            fail(f"a configuration {url}")
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}{ELSEWHERE}", str(path))
    with path.open("rb") as file:
        if file.read(len(gguf_file.MAGIC)) == gguf_file.MAGIC:
            return gguf_file.read(path)
    if path.suffix.lower() == ".gguf":
        fail(f"{path} must be a GGUF file, as its name says, but does not begin with 'GGUF'")
    if path.stat().st_size > _LARGEST:
        fail(
            f"a configuration must be GGUF, or JSON of at most {_LARGEST:,} bytes, but {path} is not GGUF "
            f"and has {path.stat().st_size:,} bytes"
        )
    return _json(path)


@dataclass(frozen=True)
class Record:
    """A conversion that `tightrope convert` did: it states the pairing of the tensors that it names, and of no others.

    Attributes:
        where: the name of the file that has the record.
        section: the section of the configuration that describes the tensors; ``""`` is the outer level, None unknown.
        model: the kind of that section, such as ``model_type 'llama'``.
        interleaved: the pairing of the tensors.
        tensors: their names.
        left: tensors that the same section describes and that have the other pairing.
        values: the record as it is stored.
        file: the name of the file that has the record of a folder.
        key, old_key: the key of a record in the metadata of a safetensors file, and the one of versions before 0.4.
    """

    where: str
    section: str | None
    model: str
    interleaved: bool
    tensors: frozenset[str]
    left: frozenset[str]
    values: Mapping[str, Any]

    file: ClassVar[str] = RECORD
    key: ClassVar[str] = "tightrope.convert"
    old_key: ClassVar[str] = "tightrope.pairing"

    @property
    def source(self) -> str:
        """The record as the source of a pairing."""
        return f"the conversion record {'' if self.where == RECORD else 'in '}{self.where}"

    @staticmethod
    def slice_of(spec: RopeSpec) -> str:
        """Name the slice of a head that a spec rotates, as records do."""
        return f"{spec.rotary_dim} of {spec.head_dim} channels from {spec.start} on"

    @property
    def slices(self) -> set[str]:
        """The slices of a head that were converted."""
        return {rows["slice"] for rows in self.values["rows"] if "slice" in rows}

    @classmethod
    def listed(cls, listed: object, where: str) -> list[Record]:
        """Return the conversions that a file lists.

        Raises:
            ValueError: the list is not one of conversions.
        """
        pairings = {"half": False, "interleaved": True}
        try:
            return [
                cls(
                    where,
                    one["section"],
                    one["model"],
                    pairings[one["pairing"]],
                    frozenset(name for rows in one["rows"] for name in {**rows["tensors"]}),
                    frozenset(one["left"]),
                    one,
                )
                for one in listed  # type: ignore[attr-defined]
            ]
        except (KeyError, TypeError):
            fail(
                f"{where} must list conversions, each with its section, pairing and tensors, but does not: remove the "
                "record and pass the pairing"
            )

    @classmethod
    def in_metadata(cls, metadata: Mapping[str, Any], where: str) -> list[Record]:
        """Return the conversions in the metadata of a safetensors file."""
        listed: object = [] if cls.old_key not in metadata else None
        if cls.key in metadata:
            try:
                listed = json.loads(metadata[cls.key])
            except ValueError:
                listed = None
        return cls.listed(listed, where)


@public("from_config")
def records_beside(config: object) -> list[Record]:
    """Return the conversions that are recorded in a folder, or beside its configuration, also in its files of weights.

    Args:
        config: the folder or the configuration, as a path; or a configuration of transformers, which names the
            folder that it was loaded from.

    Raises:
        ValueError: the record is not one, or only some shards were converted.
    """
    where = (
        config if isinstance(config, str | os.PathLike) else getattr(config, "name_or_path", None)
    )
    if not isinstance(where, str | os.PathLike) or not os.fspath(where):
        return []
    path = Path(where)
    folder = path if path.is_dir() else path.parent
    if not (path.is_dir() or path.name in NAMES):
        return []
    shards = {file: _in_weights(file) for file in sorted(folder.glob("*.safetensors"))}
    _check_shards(shards)
    found = [one for records in shards.values() for one in records]
    if (folder / RECORD).is_file():
        found += Record.listed(_json(folder / RECORD).get("conversions"), RECORD)
    return found


def _check_shards(shards: Mapping[Path, list[Record]]) -> None:
    """Refuse files of which only some were converted, as one pairing would be read for all of them."""
    records = [record for each in shards.values() for record in each]
    left = {name for record in records for name in record.left}
    alike = {_numbered(name) for record in records for name in record.tensors | record.left}
    for path in [path for path, each in shards.items() if records and not each]:
        names = sorted(_parsed(_header_of(path)).keys() - left)
        if rest := [name for name in names if _numbered(name) in alike]:
            fail(
                f"all shards must have one pairing but {records[0].where} was converted and {path.name} was not "
                f"({rest[0]}): convert the whole folder, or pass interleaved="
            )


def _numbered(name: str) -> str:
    """Return the name of a tensor with * in place of each number."""
    return re.sub(r"\d+", "*", name)


def _header_of(path: Path) -> bytes:
    """Return the header of a file of weights, or nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(min(int.from_bytes(file.read(8), "little"), _LARGEST))
    except OSError:
        return b""


def _parsed(header: bytes) -> dict[str, Any]:
    """Return what a header holds; nothing for a file that is damaged, or a stand-in for one."""
    try:
        values = json.loads(header)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return {}
    return values if isinstance(values, dict) else {}


def _in_weights(path: Path) -> list[Record]:
    """Return the conversions in the metadata of a file."""
    header = _header_of(path)
    if b"tightrope." not in header:
        return []
    return Record.in_metadata(_parsed(header).get("__metadata__") or {}, path.name)


def url_in(path: Path) -> str | None:
    """The end of the error message for a path that is in fact a URL; None for other paths."""
    # pathlib collapses the two slashes of a URL into one.
    found = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)", str(path))
    if found is None:
        return None
    return f"must be on this machine but got a URL ({found[0]}//…); download it first"


def _inside(folder: Path) -> Path:
    there = [folder / name for name in NAMES if (folder / name).is_file()]
    if len(there) != 1:
        has = " and ".join(file.name for file in there) or "neither"
        fail(f"a folder must have exactly one of {' and '.join(NAMES)} but {folder} has {has}")
    return there[0]


class TwoValues(ValueError):
    """A key of a JSON object has two values, of which Python would keep the last."""


def single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the pairs of a JSON object; an error if a key has two values."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        # json has a single NaN object, which does not equal itself.
        if key in values and values[key] is not value and values[key] != value:
            raise TwoValues(
                f"each key must have one value but {key} is {values[key]!r} and {value!r}"
            )
        values[key] = value
    return values


def _json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=single)
    except TwoValues as error:
        fail(f"in {path} {error}")
    except UnicodeDecodeError:
        fail(f"{path} must hold JSON but is not UTF-8 text")
    except json.JSONDecodeError as error:
        fail(
            f"{path} must hold JSON but is invalid at line {error.lineno}, column {error.colno}: {error.msg}"
        )
    except RecursionError:
        fail(f"{path} must hold a configuration but is nested too deeply for one")
    except ValueError:  # Python refuses to parse numbers of thousands of digits
        fail(f"{path} must hold JSON but has a number of thousands of digits")
    if not isinstance(values, dict):
        fail(f"{path} must hold a JSON object but holds {type(values).__name__}")
    return values
