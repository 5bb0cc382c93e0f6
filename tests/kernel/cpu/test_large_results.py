"""Large results: huge pages, when they are asked for, and streaming stores; neither changes a bit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tightrope
from tests.support.command import python
from tests.support.helpers import ROOT
from tests.support.matrix import needs_kernel

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
on_request = pytest.mark.skipif(
    not ENABLED.exists() or "[madvise]" not in ENABLED.read_text(),
    reason="this system does not grant huge pages where a program asks for them",
)
# Prints how many areas of memory have the advice to use huge pages: after a small result, while a large result and a
# gradient live, and after them. Then a checksum.
PROGRAM = """
import json, torch
from tightrope import RopeSpec
from tightrope.functional import rotate

def advised():
    lines = open("/proc/self/smaps").read().splitlines()
    return sum(line.startswith("VmFlags") and "hg" in line.split() for line in lines)

x, grad = (torch.ones(1, 4, 50_000, 64) for _ in range(2))
small, seen = rotate(x[:, :, :1000], RopeSpec(64)), []
other = torch.ones(4, 4, 50_000, 64)
del other  # its memory may stay in the heap
seen.append(advised())
y = rotate(x.requires_grad_(), RopeSpec(64))
seen.append(advised())
(found,) = torch.autograd.grad(y, x, grad)
seen.append(advised())
total = float((y.double() + found.double()).abs().sum())
del y, found
seen.append(advised())
print(json.dumps([seen, total]))
"""


def run(program: str, *arguments: str, **environment: str) -> Any:
    done = python("-c", program, *arguments, cwd=ROOT, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_kernel
@on_request
def test_only_large_results_ask_for_huge_pages_and_no_longer_than_they_live() -> None:
    """The advice is given for blocks that glibc returns with the result, and not for memory of a heap."""
    seen, total = run(PROGRAM)
    assert seen == [0, 1, 2, 0]
    heap = {"MALLOC_MMAP_THRESHOLD_": str(2**33), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
    for environment in ({"TIGHTROPE_HUGE_PAGES": "0"}, heap):
        assert run(PROGRAM, **environment) == [[0] * 4, total]


# Prints hashes of results, also in slots of a cache, and of gradients, with and without gaps between heads, channels or
# tokens, for slices that begin on a line of the cache and off it.
STREAMED = """
import hashlib, json, sys, torch
from tests.support import caches, calls
from tightrope.backends import cpu
from tightrope.functional import write_kv

WHOLE, SLICES = ((128, 0), (96, 32), (80, 0)), ((64, 32), (64, 20), (96, 3))
calls.WIDTH, sums = 128, {}
for name in cpu.instruction_sets():
    cpu.use_instruction_set(name)
    for number in range(0, len(calls.CASES), int(sys.argv[1])):
        calls.CHANNELS = {"whole": WHOLE[number % 3], "slice": SLICES[number % 3]}
        case = {**calls.CASES[number], "backend": None}
        made, own = calls.Call(case).derivatives(), caches.Cached(case, number, "cpu", number)
        cache, _ = own.cache_of(own.xs[-1])
        del own.options["inverse"]
        given = [None, *own.xs][-2:], {"slots": own.given, **own.options}
        own.on(write_kv, *given[0], None, *own.rope, cache=(cache, None), **given[1])
        seen = hashlib.sha256()
        for x in (*made.results, *made.first.values(), caches.base_of(cache)):
            seen.update(x.detach().flatten().view(torch.uint8).numpy().tobytes())
        sums[f"{name}, {number}"] = seen.hexdigest()
print(json.dumps(sums))
"""


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
@needs_kernel
def test_streamed_results_have_the_same_bits(every: int) -> None:
    """Streaming every result that can be streamed equals streaming none, with each instruction set."""
    streamed, plain = (
        run(STREAMED, str(every), TIGHTROPE_STREAM_BYTES=least) for least in ("1", "0")
    )
    assert {case for case in plain if streamed[case] != plain[case]} == set()


OBJDUMP = shutil.which("objdump")


@needs_kernel
@pytest.mark.skipif(OBJDUMP is None, reason="no objdump")
def test_streaming_code_ends_with_a_fence() -> None:
    """Other threads see streamed results before anything that the thread stores later.

    Results do not show it, because the end of a parallel loop is a fence too.
    """
    (library,) = Path(tightrope.__file__).parent.glob("_native*.so")
    command = [str(OBJDUMP), "-d", "-C", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {"streams": set(), "fences": set()}  # instruction sets
    isa = ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            isa = (re.search(r"tightrope::(avx\w+|neon)::", line) or "  ")[1]
        elif "movnt" in line:
            found["streams"].add(isa)
        elif "sfence" in line:
            found["fences"].add(isa)
    assert found["fences"] == found["streams"]
