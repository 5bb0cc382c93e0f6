"""Check that a refactoring leaves every result the same, bit by bit.

    python -m ci.same_bits store before
    python -m ci.same_bits store after        # on the changed code
    python -m ci.same_bits compare before after

store    draws random calls of the public functions and writes the outcome of each: digests of results
         and gradients, the inputs that changed, or the error. A call depends only on the seed and its
         number. There is one file per instruction set: before-avx512.jsonl, and so on.
compare  lists the calls that differ.
show     runs single calls and prints their arguments and outcomes.

Only public names are used, so this folder also runs with an older or a newer package.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

from tightrope.backends import cpu

from .run import outcome


def store(stem: str, calls: int, seed: int, sets: list[str]) -> None:
    """Run all calls with each instruction set, and write their outcomes."""
    for name in sets:
        cpu.use_instruction_set(name)
        head = {"calls": calls, "seed": seed, "set": name, "torch": torch.__version__}
        every = []
        path = Path(f"{stem}-{name}.jsonl")
        with path.open("w") as file:
            print(json.dumps(head), file=file)
            for number in range(calls):
                every.append(outcome(seed, number))
                print(json.dumps({"number": number, **every[-1]}), file=file)
        print(f"{path}\n{summary(every)}", flush=True)


def summary(every: list[dict[str, dict[str, str]]]) -> str:
    """Count the calls of each function ("verb") and mode, with the share that raised no error."""
    lines = []
    for axis in ("verb", "mode"):
        drawn = Counter(one["call"][axis] for one in every)
        valid = Counter(one["call"][axis] for one in every if "error" not in one["result"])
        for name, count in sorted(drawn.items()):
            lines.append(f"  {axis:5} {name:26} {count:5} calls, {valid[name] / count:4.0%} valid")
    valid_ones = sum("error" not in one["result"] for one in every)
    lines.append(f"  {len(every)} calls, {valid_ones / max(len(every), 1):.1%} valid")
    return "\n".join(lines)


def compare(before: str, after: str) -> int:
    """Print the calls that differ; return 1 if there are any, 2 if files are missing or incomparable."""
    paths = sorted(Path(before).parent.glob(f"{Path(before).name}-*.jsonl"))
    differ = 0
    for path in paths:
        other = Path(f"{after}{path.name.removeprefix(Path(before).name)}")
        if not other.exists():
            print(f"{other} is missing")
            return 2
        old, new = (
            [json.loads(line) for line in each.read_text().splitlines()] for each in (path, other)
        )
        if old[0] != new[0] or len(old) != len(new) or len(old) != old[0]["calls"] + 1:
            print(
                f"{path} {old[0]} and {other} {new[0]} are not two complete runs of the same calls"
            )
            return 2
        count = 0
        for one, two in zip(old[1:], new[1:]):
            if one != two:
                count += 1
                both = [{"call": x["call"], **x["result"]} for x in (one, two)]
                print(f"call {one['number']} of {path.name}: {json.dumps(one['call'])}")
                for name in sorted({*both[0], *both[1]}):
                    if both[0].get(name) != both[1].get(name):
                        print(f"    {name}: {both[0].get(name)} -> {both[1].get(name)}")
        print(f"{path.name}: {count} of {old[0]['calls']} calls differ")
        differ += count
    return 1 if differ else 0 if paths else 2


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.same_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("store", "compare", "show"))
    parser.add_argument(
        "what",
        nargs="+",
        help="store: a file prefix; compare: two file prefixes; show: call numbers",
    )
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", nargs="+", default=cpu.instruction_sets(), metavar="SET")
    options = parser.parse_args(arguments)
    if options.command == "compare":
        return compare(*options.what)
    threads = torch.get_num_threads()
    with warnings.catch_warnings(), torch.compiler.config.patch(force_disable_caches=True):
        warnings.simplefilter("ignore")
        if options.command == "store":
            store(options.what[0], options.calls, options.seed, options.sets)
        for number in options.what if options.command == "show" else ():
            print(json.dumps(outcome(options.seed, int(number)), indent=1))
    torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
