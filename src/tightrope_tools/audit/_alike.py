"""The calls in which two functions are compared, smaller ones first, and what a function makes of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._call import CallFailed, Subject, counted_rows, describe_error
from ._profile import NARROW, SHORT


class Call(NamedTuple):
    """A call of both functions.

    Attributes:
        what: the call in words.
        ids: the positions of the tokens of each row.
        heads, keys: the heads of x or q, and of k if they are fewer.
        dtype: of x.
        mode: "" for values; "gradient" for those too; "no gradient" for values without autograd.
    """

    what: str
    ids: tuple[tuple[int, ...], ...]
    heads: int = 1
    keys: int = 0
    dtype: torch.dtype = torch.float32
    mode: str = ""

    def fits(self, subject: Subject) -> bool:
        """True if a function takes the rows of this call, and the numbers of heads, in one call.

        One that numbers tokens itself takes no position twice, unless packed rows begin there.
        """
        way, alike = subject.way, len({*self.ids}) == 1
        rows = len(self.ids) == 1 or (subject.most_rows is None and (alike or way.rows_differ))
        once = all(len({*row}) == len(row) for row in self.ids)
        counted = way.packed and bool(counted_rows(torch.tensor(self.ids)))
        return rows and (way.takes_ids or once or counted) and (way.takes_keys or not self.keys)

    def random(self, subject: Subject, count: int, seed: int) -> list[torch.Tensor]:
        """Return a random x, or a q and a k, as ``count`` is 1 or 2."""
        heads = [self.heads, self.keys or self.heads][:count]
        shapes = [(len(self.ids), n, len(self.ids[0])) for n in heads]
        return [
            subject.random(*shape, dtype=self.dtype, seed=seed + i)
            for i, shape in enumerate(shapes)
        ]


#: Positions in no order, in rows that differ.
ROWS = ((3, 1, 4, 2, 5), (9, 2, 6, 5, 3))
#: The calls; those that a function or its reference does not take are left out.
CALLS = (
    Call("a token at position 0", ((0,),)),
    Call("a token at position 1", ((1,),)),
    Call("two tokens", ((0, 1),)),
    Call("two heads", ((0, 1),), 2),
    Call("tokens after a cache", ((5, 6),)),
    Call("positions that fall", ((3, 1),)),
    Call("positions that start again", ((0, 1, 0),)),
    Call("two rows", ((0, 1), (0, 1)), 3),
    Call("rows at positions of their own", ((0, 1), (5, 6))),
    Call("k with fewer heads", ((0, 1),), 4, 2),
    Call("many heads", ROWS, 40),
    Call("many heads without gradients", ROWS, 40, mode="no gradient"),
    *(
        Call(f"the gradient of {SHORT[t]}", ((0, 1),), 1, 0, t, "gradient")
        for t in (torch.float32, *NARROW)
    ),
    Call("gradients of many heads", ROWS, 9, mode="gradient"),
    *(Call(f"position {p:,}", ((p,),)) for p in (4095, 4097, 100_003)),
    Call("a long cache", (tuple(range(70_000, 70_016)),)),
    *(Call(f"x in {SHORT[t]}", ((p,),), dtype=t) for t in NARROW for p in (1, 257, 4097)),
    Call(
        "positions near powers of two", (tuple(2**n + d for n in range(2, 17) for d in (-1, 0, 1)),)
    ),
    Call("5,000 tokens", (tuple(range(5000)),)),
)
#: What is in x after a call, by its name among the results.
AFTER = "x, afterwards"


def results(
    subject: Subject, call: Call, xs: list[torch.Tensor], outs: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what a function makes of x, or of q and k, and of gradients, if it has any; else what is in x afterwards.

    Raises:
        CallFailed: it refuses the call, or the backward pass raises an error.
    """
    names = ["q", "k"] if len(xs) > 1 else ["x"]
    leaves = given = [subject.laid_out(x.clone()) for x in xs]
    if call.mode == "gradient":
        leaves = [x.requires_grad_() for x in given]
        given = [x * 1.0 for x in leaves]  # an in-place function may not write to a leaf
    with torch.set_grad_enabled(call.mode != "no gradient"):
        if subject.way.takes_keys and len(given) > 1:
            ys = subject.rotate_all(given, call.ids)
        else:
            ys = [subject.rotate(x, call.ids) for x in given]
    made = dict(zip(names, ys))
    if call.mode != "gradient":
        return made | {AFTER: torch.cat([x.flatten() for x in given])}
    having = [(y, out.to(y)) for y, out in zip(ys, outs) if y.requires_grad]
    if not having:
        return made
    turned, incoming = zip(*having)
    try:
        found = torch.autograd.grad(turned, leaves, incoming, allow_unused=True)
    except Exception as error:  # foreign code
        raise CallFailed(describe_error(error)) from error
    back = ((f"the gradient of {name}", each) for name, each in zip(names, found))
    return made | {name: each for name, each in back if each is not None}
