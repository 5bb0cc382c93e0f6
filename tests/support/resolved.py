"""Positions written out number by number, by a loop that shares nothing with the library."""

from typing import Any

from tightrope.positions import Positions


def resolve(where: Positions, rows: int, tokens: int) -> list[list[list[float]]]:
    """Expand a canonical form to positions [axes, rows, tokens], number by number."""
    axes = 1 if where.ids is None else where.ids.shape[0]
    result = []
    for axis in range(axes):
        result.append([])
        for row in range(rows):
            line = []
            for token in range(tokens):
                position = where.offset + (token if where.add_index else 0)
                if where.ids is not None:
                    own_row = row if where.ids.shape[1] > 1 else 0
                    position += where.ids[axis, own_row, 0 if where.add_index else token].item()
                line.append(position)
            result[axis].append(line)
    return result


def flat(where: Positions) -> list[list[float]]:
    """Return positions of one row as [axes, tokens]."""
    return [axis[0] for axis in resolve(where, 1, 0 if where.ids is None else where.ids.shape[2])]


def columns(tokens: list[tuple[Any, ...]], axes: int) -> list[list[Any]]:
    return [[token[axis] for token in tokens] for axis in range(axes)]
