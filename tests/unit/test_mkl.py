"""Functions of MKL are called once, in one thread, before threads share their first call: see tightrope/_mkl.py.

Whether two threads disturb each other is chance, so no test shows it: without the guard, 14 of 103 new processes had wrong
cosines on one Xeon, and with it none of 73.
"""

import re
from pathlib import Path

import pytest
import torch

import tightrope
from tests.support.command import python
from tightrope import _mkl

#: torch's functions that call MKL, and may be called where a tensor is large.
OF_MKL = (
    "acos asin atan cos erf erfc erfinv exp expm1 log log10 log1p log2 sin sqrt tan tanh".split()
)
PROGRAM = """
import sys, torch
called = []
for name in sys.argv[1:]:
    def noted(x, name=name, function=getattr(torch, name)):
        called.append((name, str(x.dtype), x.numel() <= 2048))
        return function(x)
    setattr(torch, name, noted)
import tightrope
print(*called, sep="\\n")
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")
def test_the_import_calls_every_function_that_the_library_uses_in_one_thread() -> None:
    call = re.compile(rf"(?<!\bmath)\.({'|'.join(OF_MKL)})_?\(")
    folder = Path(tightrope.__file__).parent
    used = {
        name
        for path in [*folder.rglob("*.py"), *folder.with_name("tightrope_tools").rglob("*.py")]
        if path.name != "_mkl.py" and "triton" not in path.parts
        for name in call.findall(path.read_text(encoding="utf-8"))
    }
    assert {"cos", "sin", "exp", "log", "sqrt"} <= used
    done = python("-c", PROGRAM, *used, *_mkl.FUNCTIONS)
    assert done.returncode == 0, done.stderr
    for name in used:
        for dtype in ("torch.float32", "torch.float64"):
            assert str((name, dtype, True)) in done.stdout
    assert "False" not in done.stdout
