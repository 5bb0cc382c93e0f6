"""The comparison of bits before and after a change notices one that differs."""

import json
from pathlib import Path

import pytest

from ci.same_bits import __main__ as same_bits
from tests.support.matrix import needs_kernel
from tightrope.backends import cpu


@pytest.mark.slow
@needs_kernel
def test_the_bits_of_drawn_calls(tmp_path: Path, capsys) -> None:
    """Random calls are reproducible, and a call whose bits differ is found."""
    name = cpu.instruction_set()
    stems = [str(tmp_path / stem) for stem in ("before", "after")]
    for stem in stems:
        assert same_bits.main(["store", stem, "--calls", "60", "--sets", name]) == 0
    assert same_bits.main(["show", "3"]) == 0
    assert same_bits.main(["compare", *stems]) == 0
    assert capsys.readouterr().out.endswith("0 of 60 calls differ\n")
    after = Path(f"{stems[1]}-{name}.jsonl")
    lines = after.read_text().splitlines()
    last = json.loads(lines[-1])
    last["result"]["y0"] = "other bits"
    after.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    assert same_bits.main(["compare", *stems]) == 1
    assert "call 59 of before" in capsys.readouterr().out
    after.write_text(lines[0])
    assert same_bits.main(["compare", *stems]) == 2
    after.unlink()
    assert same_bits.main(["compare", *stems]) == 2
    assert same_bits.main(["compare", str(tmp_path / "nothing"), stems[1]]) == 2
