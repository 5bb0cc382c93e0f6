"""The adapter: source code that wraps a function in one common signature.

The audit runs this code and shows the same code in its snippets. It defines ``rotate(x, positions)``
with x ``(rows, heads, tokens, channels)`` and positions ``(rows, tokens)``, and
``rotate_qk(q, k, positions)`` if the function takes q and k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightrope.forms import TABLE_SHAPES, WIDTHS, Call

_INTO = {
    "bhsd": "{}",
    "bshd": "{}.transpose(1, 2)",
    "sbhd": "{}.permute(2, 0, 1, 3)",
    "thd": "{}[0].transpose(0, 1)",
    "bsd": "{}[:, 0]",
    "sd": "{}[0, 0]",
}
_BACK = {
    "bhsd": "{}",
    "bshd": "{}.transpose(1, 2)",
    "sbhd": "{}.permute(1, 2, 0, 3)",
    "thd": "{}.transpose(0, 1)[None]",
    "bsd": "{}[:, None]",
    "sd": "{}[None, None]",
}
# Row indices into tables that hold one entry for each token of all rows.
_ROW_IDS = "torch.arange(positions.numel(), device=positions.device).reshape(positions.shape)"
# Roles of arguments that the audit leaves at their defaults.
_LEFT_OUT = ("more", "unsqueeze_dim")


def rates(rotary_dim: int, base: float) -> str:
    """Return the expression for the frequencies of the tables that the audit makes."""
    return f"{base!r} ** (-torch.arange(0, {rotary_dim}, 2, dtype=torch.float64) / {rotary_dim})"


@dataclass(frozen=True)
class Adapter(Call):
    """One way to call a function, including layouts and shapes of the arguments.

    Attributes:
        layout: the layout of x, q and k.
        shared_positions: whether positions are ``(tokens,)`` and not ``(rows, tokens)``.
        width: the format of the function's tables, a key of WIDTHS.
        table_shape: the dimensions of these tables, a key of TABLE_SHAPES.
        axes: the number of coordinates of a position. With several, the adapter expands positions
            ``(rows, tokens)`` to equal coordinates, as in text, and passes ``(axes, rows, tokens)`` on.
    """

    layout: str = "bhsd"
    shared_positions: bool = False
    width: str = "cat"
    table_shape: str = "bsd"
    axes: int = 1

    @classmethod
    def of(cls, call: Call, axes: int = 1) -> Adapter | None:
        """Return the adapter of a call, or None if the call needs an argument that the audit leaves out."""
        if any(each.role in _LEFT_OUT and not each.keyword for each in call.arguments):
            return None
        passed = tuple(each for each in call.arguments if each.role not in _LEFT_OUT)
        adapter = cls(call.form, passed)
        return replace(adapter, axes=axes if adapter.takes_positions else 1)

    @property
    def takes_positions(self) -> bool:
        """True if the function computes angles from positions."""
        return "positions" in self.form.roles

    @property
    def takes_rows(self) -> bool:
        """True if the function takes tables and the indices of their rows."""
        return self.form.takes_tables and "positions" in self.roles

    @property
    def takes_ids(self) -> bool:
        """True if tokens may have arbitrary positions."""
        return self.takes_positions or self.form.takes_tables

    @property
    def takes_keys(self) -> bool:
        """True if the function takes q and k in one call."""
        return "k" in self.roles

    @property
    def rows_differ(self) -> bool:
        """True if rows may have different positions in one call."""
        if "b" not in self.layout:
            return False
        if self.form.takes_tables:
            return self.takes_rows or self.table_shape != "sd"
        return self.takes_positions and not self.shared_positions

    def source(self, *, inv_freq: str) -> str:
        """Return the source of the adapter; it needs ``torch`` and ``fn``.

        Args:
            inv_freq: an expression for the frequencies, for functions that take tables.
        """
        parts = []
        if self.form.takes_tables:
            parts.append(self._tables_source(inv_freq))
        body = self._gives_tables_source() if self.form.gives_tables else self._rotates_source()
        return "\n\n".join([*parts, body])

    def _tables_source(self, inv_freq: str) -> str:
        to = "to(x)" if self.form.narrow else "float().to(x.device)"
        lines = [
            "def tables(x, positions):",
            f"    inv_freq = {inv_freq}",
            "    angle = positions[..., None].double().cpu() * inv_freq",
        ]
        if self.width != "half":
            lines.append(f"    angle = {WIDTHS[self.width].replace('table', 'angle')}")
        lines.append(f"    cos, sin = angle.cos().{to}, angle.sin().{to}")
        if shape := TABLE_SHAPES[self.table_shape]:
            lines.append(f"    cos, sin = cos{shape}, sin{shape}")
        return "\n".join([*lines, f"    return {', '.join(self.form.build)}"])

    def _positions(self) -> str:
        if self.axes == 1:
            return "positions[0]" if self.shared_positions else "positions"
        every = f"positions.expand({self.axes}, -1, -1)"
        return f"{every}[:, 0]" if self.shared_positions else every

    def _expression(self, names: dict[str, str]) -> str:
        return ", ".join(
            (f"{each.name}=" if each.keyword else "") + names[each.role] for each in self.arguments
        )

    def _gives_tables_source(self) -> str:
        names = {"x": _INTO[self.layout].format("x"), "positions": self._positions()}
        call = self._expression(names)
        shape = "[None, None]" if self.shared_positions else "[:, None]"
        widen = ""
        if self.width == "half":
            wide = (WIDTHS["cat"].replace("table", name) for name in ("cos", "sin"))
            widen = f"\n    cos, sin = {', '.join(wide)}"
        turned = "torch.cat((-y[..., n // 2 :], y[..., : n // 2]), -1)"
        if self.width == "repeat":
            turned = "torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)"
        return (
            f"def tables(x, positions):\n    return fn({call})\n\n\n"
            "def rotate(x, positions):\n"
            f"    cos, sin = (table{shape} for table in tables(x, positions)){widen}\n"
            "    n = cos.shape[-1]\n"
            "    y = x[..., :n]\n"
            f"    y = y * cos + {turned} * sin\n"
            "    return torch.cat((y, x[..., n:]), -1)"
        )

    def _rotates_source(self) -> str:
        into, back = _INTO[self.layout], _BACK[self.layout]
        first = "q" if self.takes_keys else "x"
        lines = []
        if self.form.takes_tables:
            where = "positions.reshape(1, -1)" if self.takes_rows else "positions"
            lines.append(f"    {', '.join(self.form.roles)} = tables({first}, {where})")
        values = {role: role for role in self.form.roles} | {
            "x": into.format(first),
            "q": into.format("q"),
            "k": into.format("k"),
            "positions": _ROW_IDS if self.takes_rows else self._positions(),
            "offset": "int(positions.min())",
            "seq_dim": str(self.layout.replace("t", "s").index("s")),
        }
        call = f"fn({self._expression(values)})"
        if self.takes_keys:
            lines += [
                f"    q, k = {call}",
                f"    return {back.format('q')}, {back.format('k')}",
            ]
            return (
                "def rotate_qk(q, k, positions):\n"
                + "\n".join(lines)
                + "\n\n\ndef rotate(x, positions):\n"
                + "    return rotate_qk(x, x.clone(), positions)[0]"
            )
        if not self.takes_ids:
            return self._placed_source(call)
        lines.append(f"    return {back.format(call)}")
        return "def rotate(x, positions):\n" + "\n".join(lines)

    def _placed_source(self, call: str) -> str:
        """Return the source for a function that numbers tokens itself: scatter x, call, gather."""
        back = _BACK[self.layout]
        start = "int(positions.min())" if "offset" in self.roles else "0"
        plain = call.replace("int(positions.min())", "start")
        return (
            "def rotate(x, positions):\n"
            f"    start = {start}\n"
            "    size = int(positions.max()) + 1 - start\n"
            "    if size == x.shape[2]:\n"
            f"        return {back.format(plain)}\n"
            "    where = (positions - start)[:, None, :, None].expand_as(x)\n"
            "    whole = x.new_zeros(x.shape[0], x.shape[1], size, x.shape[3])\n"
            "    x = whole.scatter(2, where, x)\n"
            f"    return {back.format(plain)}.gather(2, where)"
        )
