"""Runs a function on mutated inputs: by atheris with coverage, or by seeded mutations without it.

    python -m ci.hardening.fuzz_files --seconds 60 --corpus FOLDER

The last line of the output is a JSON object with the number of executions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--corpus", type=Path, required=True, help="kept inputs, and findings")
    parser.add_argument("--guided", action="store_true", help="use atheris")
    parser.add_argument("inputs", nargs="*", type=Path, help="run only these inputs")
    return parser.parse_args()


@contextlib.contextmanager
def instrumented(guided: bool, *modules: str) -> Iterator[None]:
    """Instrument these modules for coverage while they are imported.

    Raises:
        RuntimeError: if one of them was not imported. A fuzzer would run blindly.
    """
    with contextlib.ExitStack() as stack:
        if guided:
            import atheris

            stack.enter_context(atheris.instrument_imports(include=list(modules)))
        yield
    missing = set(modules) - set(sys.modules)
    if missing:
        raise RuntimeError(f"not imported, so not instrumented: {', '.join(sorted(missing))}")


class Bytes(random.Random):
    """Random numbers read from bytes; zeros after their end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self.rest = data

    def getrandbits(self, bits: int) -> int:
        size = (bits + 7) // 8
        part, self.rest = self.rest[:size], self.rest[size:]
        return int.from_bytes(part, "little") & ((1 << bits) - 1)

    def random(self) -> float:
        return self.getrandbits(8) / 256


def mutated(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """Return the bytes with one to four parts removed, doubled, replaced or overwritten."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = (
            draw.randrange(len(made) + 1)
            if draw.random() < 0.5
            else draw.randrange(min(len(made), 600) + 1)
        )
        size = draw.choice((1, 1, 2, 4, 8, draw.randint(1, 64)))
        other = draw.choice(others)
        where = draw.randrange(len(other) + 1)
        made[at : at + draw.choice((0, size))] = draw.choice(
            (
                b"",
                draw.randbytes(size),
                draw.choice((b"\0", b"\xff")) * size,
                made[at : at + size],
                other[where : where + size],
            )
        )
    return bytes(made)


def fuzz(chosen: argparse.Namespace, test: Callable[[bytes], None], seeds: list[bytes]) -> None:
    """Call `test` on mutated inputs until the time is over; an exception ends the process."""
    if chosen.inputs:
        for path in chosen.inputs:
            test(path.read_bytes())
        return
    kept: Path = chosen.corpus
    kept.mkdir(parents=True, exist_ok=True)
    if chosen.guided:
        import atheris

        for number, seed in enumerate(seeds):
            (kept / f"seed-{number}").write_bytes(seed)
        flags = [
            *(
                f"-max_total_time={chosen.seconds}",
                "-max_len=20000",
                "-len_control=0",
                "-timeout=20",
            ),
            *(
                "-rss_limit_mb=0",
                f"-artifact_prefix={kept.parent}/{kept.name}-",
                "-print_final_stats=1",
            ),
        ]
        atheris.Setup([sys.argv[0], *flags, str(kept)], test)
        atheris.Fuzz()
    draw, count = random.Random(0), 0
    end = time.monotonic() + chosen.seconds
    data = b""
    try:
        while time.monotonic() < end:
            data = seeds[count] if count < len(seeds) else mutated(draw.choice(seeds), seeds, draw)
            test(data)
            count += 1
    except BaseException:
        (kept.parent / f"{kept.name}-finding").write_bytes(data)
        raise
    print(json.dumps({"executions": count}))
