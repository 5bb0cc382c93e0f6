"""What a function was recognised as, as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...forms import Call, Rotation


@dataclass(frozen=True)
class Candidate:
    """What a function was recognised as.

    Attributes:
        call: how it is called.
        rotation: what it computes.
        shapes: what was tried and found right: (dimensions of x, dimensions of the tables, the value
            of unsqueeze_dim or None, where the tables get a dimension, from the end, or None).
        ones: which tables of three dimensions were found to broadcast against x of four as they are:
            "1sd" with heads before tokens, or "s1d" with heads behind them.
            Of these nothing is known but the shapes themselves.
        tokens: how x with another number of tokens than the tables is met: "same", it is not;
            "prefix", the last tokens rotate and the others pass; "suffix", by the last rows.
        keeps_dtype: whether results have the dtype of x, or the wider of x's and the tables'.
        alone: what comes back where the second tensor is None: "pair", (y, None); "one", y; None where
            that is an error.
        ignored: parameters that change nothing, whatever they are.
        trailing: whether tensors after the second may be None, and then nothing comes back for them.
    """

    call: Call
    rotation: Rotation
    shapes: frozenset[tuple[int, int, int | None, int | None]]
    ones: frozenset[str] = frozenset()
    tokens: str = "same"
    keeps_dtype: bool = False
    alone: str | None = None
    ignored: frozenset[str] = frozenset()
    trailing: bool = False

    def place(self, x: torch.Size, table: torch.Size, given: int | None) -> int | None:
        """Where tables get a dimension in a call, from the end; None where they get none.

        LookupError for shapes that were not tried.
        """
        for dims, table_dims, value, place in self.shapes:
            if (len(x), len(table), given) == (dims, table_dims, value):
                return place
        if len(x) == 4 and len(table) == 3 and given is None:
            if "1sd" in self.ones and table[:2] == (1, x[2]):
                return None
            if "s1d" in self.ones and table[:2] == (x[1], 1):
                return None
        raise LookupError("shapes that were not tried")

    def __str__(self) -> str:
        words = [str(self.rotation)]
        if len(self.call.form.roles) == 1:
            words.append(self.call.form.name)
        rotated = self.call.rotated
        words.append(f"of {', '.join(rotated)}" if len(rotated) > 1 else "of one tensor")
        places = sorted({place for *_, place in self.shapes if place is not None})
        if unsqueeze_dim := self.call.parameter("unsqueeze_dim"):
            words.append(f"heads where {unsqueeze_dim} says")
        elif places == [-3]:
            words.append("heads before tokens")
        elif places == [-2]:
            words.append("tokens before heads")
        else:
            words.append("tables broadcast as they are")
        if positions := self.call.parameter("positions"):
            words.append(f"rows by {positions}")
        if self.tokens != "same":
            words.append(
                "tokens in front pass" if self.tokens == "prefix" else "last rows of the tables"
            )
        words.append("in the dtype of x" if self.keeps_dtype else "in the wider dtype")
        return ", ".join(words)
