"""Commands write their files atomically: complete or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.command import call
from tests.support.helpers import full_disk, left_as_it_was
from tightrope import RopeSpec
from tightrope_tools.command import main
from tightrope_tools.place import placed, write_whole


@pytest.mark.parametrize("name, older", [("picture.png", False), ("picture.svg", True)])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, name: str, older: bool) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(RopeSpec(64).to_dict()), encoding="utf-8")
    out = tmp_path / "out" / name
    out.parent.mkdir()
    if older:
        out.write_text("older", encoding="utf-8")
    with full_disk(500):
        code, output, error = call(main, "inspect", spec, "--plot", out)
    assert code == 1, output
    assert error.splitlines()[-1] == f"Error: {out}: File too large."
    left_as_it_was(out.parent, name, older)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("below/real.json")
    for text in (b"first", b"second"):
        write_whole(link, text)
        assert link.is_symlink()
        assert (tmp_path / "below" / "real.json").read_bytes() == text
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["real.json"]


@pytest.mark.slow
def test_devices_and_pipes_are_written_as_they_are(tmp_path: Path) -> None:
    write_whole(Path(os.devnull), b"x")
    assert not Path(os.devnull).is_file()
    script = (
        "import sys; from pathlib import Path; from tightrope_tools.place import write_whole\n"
        "write_whole(Path('/dev/stdout'), b'x')"
    )
    with open(tmp_path / "words", "wb") as words:
        subprocess.run([sys.executable, "-c", script], stdout=words, check=True)
        assert (tmp_path / "words").stat().st_ino == os.fstat(words.fileno()).st_ino
    assert (tmp_path / "words").read_bytes() == b"x"
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        write_whole(tmp_path, b"x")


@pytest.mark.parametrize("fails", [False, True])
def test_two_writers_of_one_place(tmp_path: Path, fails: bool) -> None:
    """The second takes the place of the first, which fails, so that no result is a mixture."""
    out = tmp_path / "x"
    first = placed(out)
    (made := first.__enter__()).mkdir()
    (made / "shard").write_bytes(b"first")
    with pytest.raises(OSError, match="Too little") if fails else nullcontext(), placed(out) as two:
        two.write_bytes(b"second")
        if fails:
            raise OSError("Too little of something")
    with pytest.raises(FileNotFoundError):
        first.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["x"] * (not fails)
    assert fails or out.read_bytes() == b"second"
