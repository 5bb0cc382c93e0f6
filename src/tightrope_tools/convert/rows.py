"""The rows of a projection that rotate, once the number of its rows is that of the stated heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tightrope.spec import RopeSpec

from ._fail import fail
from .model import Model
from .naming import PACKINGS
from .tensors import Entry


@dataclass(frozen=True)
class Part:
    """A tensor of a projection, in one layer.

    Attributes:
        entry: the tensor.
        spec: the spec of its layer.
        model: the model.
        layer: the layer's number.
        rows: the number of its rows; of a norm, its elements; of scales by block, the rows that they scale.
        ranks: the number of files over which the projection is split.
    """

    entry: Entry
    spec: RopeSpec
    model: Model
    layer: int
    rows: int
    ranks: int

    @property
    def width(self) -> int:
        """The number of rows of a head."""
        return self.spec.head_dim

    def queries(self) -> int:
        """Return the number of query heads, which must be known."""
        heads = self.model.heads_of(self.layer)
        if heads is None:
            fail(f"the number of query heads in {self.entry.name} must be known: pass --heads")
        return self.share(heads)

    def keys(self) -> int | None:
        """Return the number of key heads; None if nothing states it."""
        heads = self.model.kv_heads_of(self.layer)
        return None if heads is None else self.share(heads)

    def share(self, heads: int) -> int:
        """Return how many of a layer's heads are in this file; several files may have the same key head."""
        if heads % self.ranks and self.ranks % max(heads, 1):
            fail(
                f"{self.entry.name} must have a share of {heads} heads in each of {self.ranks} files"
            )
        return -(-heads // self.ranks)

    def expect(self, heads: Sequence[int], width: int, role: str) -> None:
        """Raise an error unless the tensor has the rows of this many heads.

        Args:
            heads: the numbers of heads that follow one another.
            width: the number of rows of a head.
            role: the tensor's role, as in :class:`tightrope_tools.convert.naming.Naming`.
        """
        if self.rows == sum(heads) * width:
            return
        ways = list(_explanations(self.rows, heads, width, role))
        why = f": {_either(ways)} would explain it" if ways else ""
        fail(f"{self.entry.name} must have {_spelled(heads, width)} rows but has {self.rows}{why}")

    def starts(self, heads: int, width: int) -> tuple[int, ...]:
        """Return the first rotated row of each of ``heads`` heads of ``width`` rows."""
        return tuple(head * width + self.spec.start for head in range(heads))


def _spelled(heads: Sequence[int], width: int) -> str:
    """Spell a number of rows.

    >>> _spelled([32, 8, 8], 128)
    '32 + 8 + 8 heads of 128 = 6144'
    """
    return f"{' + '.join(map(str, heads))} {_noun(heads)} of {width} = {sum(heads) * width}"


def _noun(heads: Sequence[int]) -> str:
    return "head" if list(heads) == [1] else "heads"


def _either(ways: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def _explanations(rows: int, heads: Sequence[int], width: int, role: str) -> Iterator[str]:
    """Yield the layouts that have this number of rows, instead of that of the stated heads."""
    total, first = sum(heads) * width, heads[0]
    if not all(heads):
        return
    queries = role in ("q", "qkv")
    if queries and rows == total + first * width:
        yield "a gate for each query head" + (" (--naming qwen3_next)" if role == "q" else "")
    if queries and rows == total + first:
        yield "a gate of one row for each query head"
    if role == "q gate" and rows == first * width:
        yield "queries without gates (--naming llama)"
    if role == "qkv":
        key_heads, rest = divmod(rows - first * width, 2 * width)
        if not rest and key_heads > 0 and first % key_heads == 0:
            yield f"{key_heads} key {_noun([key_heads])}"
        values, rest = divmod(rows - (first + heads[1]) * width, heads[1])
        if not rest and 0 < values <= 2 * width:
            yield f"values of {values} rows"
    elif role != "q gate" and rows % width == 0:
        yield f"{rows // width} {_noun([rows // width])}"
    if rows % (2 * sum(heads)) == 0:  # only an even number of channels can rotate
        yield f"heads of {rows // sum(heads)} rows"
    if total % rows == 0:
        yield f"one of {total // rows} shards of a tensor-parallel checkpoint"


def _query(part: Part) -> tuple[int, ...]:
    heads = part.queries()
    part.expect([heads], part.width, "q")
    return part.starts(heads, part.width)


def _gated(part: Part) -> tuple[int, ...]:
    heads = part.queries()
    part.expect([heads, heads], part.width, "q gate")
    return part.starts(heads, 2 * part.width)


def _key(part: Part) -> tuple[int, ...]:
    heads = _key_heads(part)
    part.expect([heads], part.width, "k")
    return part.starts(heads, part.width)


def _key_heads(part: Part) -> int:
    """Return the number of key heads as stated, or else by the rows: it does not matter which rows move."""
    stated = part.keys()
    if stated is not None:
        return stated
    heads, rest = divmod(part.rows, part.width)
    queries = part.model.heads_of(part.layer)
    if rest or not heads or (queries is not None and part.share(queries) % heads):
        of = "" if queries is None else f", in a number that divides the {queries} query heads,"
        fail(
            f"{part.entry.name} must have whole heads of {part.width} rows{of} but has {part.rows} rows"
        )
    return heads


def _fused(part: Part) -> tuple[int, ...]:
    name, packing = part.entry.name, part.model.naming.packing
    if part.ranks > 1:
        fail(f"{name} must be whole but is split over {part.ranks} files: merge them")
    heads, kv_heads = part.queries(), part.keys()
    if kv_heads is None:
        fail(f"the number of key heads in {name} must be known: pass --kv-heads")
    if packing is None:
        fail(f"the packing of {name} must be known: pass --packing")
    if not kv_heads or heads % kv_heads:
        fail(f"the {heads} query heads in {name} must be a multiple of its {kv_heads} key heads")
    if packing == "quarters" and (heads % 4 or kv_heads != heads):
        fail(
            f"to be packed in quarters, {name} must hold as many key as query heads, a multiple of 4, but "
            f"holds {heads} query and {kv_heads} key heads"
        )
    part.expect([heads, kv_heads, kv_heads], part.width, "qkv")
    q, k = PACKINGS[packing].rows(heads, kv_heads)
    return tuple(head * part.width + part.spec.start for head in sorted([*q, *k]))


def _latent(part: Part) -> tuple[int, ...]:
    rotated, latent = part.spec.rotary_dim, part.model.latent
    if latent is not None and part.rows != latent + rotated:
        fail(
            f"{part.entry.name} must have {latent} + {rotated} = {latent + rotated} rows, the latent "
            f"(kv_lora_rank) and the rotated ones, but has {part.rows}"
        )
    if part.rows < rotated:
        fail(f"{part.entry.name} must end in {rotated} rotated rows but has {part.rows} rows")
    return (part.rows - rotated,)


def _norm(part: Part, heads: Callable[[Part], int]) -> tuple[int, ...]:
    # One weight for all heads, or one per head: OLMo 2 and Cohere have the latter.
    if part.rows == part.width:
        return (part.spec.start,)
    count = heads(part)
    if part.rows != count * part.width:
        fail(
            f"{part.entry.name} must have {part.width} elements, or {_spelled([count], part.width)}, but has "
            f"{part.rows}"
        )
    return part.starts(count, part.width)


def _query_norm(part: Part) -> tuple[int, ...]:
    return _norm(part, Part.queries)


def _key_norm(part: Part) -> tuple[int, ...]:
    return _norm(part, _key_heads)


def _index_dim(part: Part) -> int:
    width, name = part.model.index_dim, part.entry.name
    if width is None:
        fail(f"index_head_dim must be known for {name}: pass a configuration with it as --config")
    if width < part.spec.rotary_dim:
        fail(
            f"the heads of {name} must have {part.spec.rotary_dim} rotated rows but have {width} "
            f"(index_head_dim)"
        )
    return width


def _index_query(part: Part) -> tuple[int, ...]:
    width, heads = _index_dim(part), part.model.index_heads
    if heads is None:
        fail(
            f"index_n_heads must be known for {part.entry.name}: pass a configuration with it as --config"
        )
    heads = part.share(heads)
    part.expect([heads], width, "index q")
    return tuple(head * width for head in range(heads))


def _index_key(part: Part) -> tuple[int, ...]:
    part.expect([1], _index_dim(part), "index k")  # every rank has the single key head
    return (0,)


ROLES: dict[str, Callable[[Part], tuple[int, ...]]] = {
    "q": _query,
    "q gate": _gated,
    "k": _key,
    "qkv": _fused,
    "kv a": _latent,
    "q norm": _query_norm,
    "k norm": _key_norm,
    "index q": _index_query,
    "index k": _index_key,
    "index k norm": _index_key,
}
