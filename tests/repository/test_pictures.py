"""The drawings in docs/images are those that docs/pictures.py draws."""

import runpy
from pathlib import Path

from tests.support.helpers import ROOT

DOCS = ROOT / "docs"


def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "pictures.py"))
    script["main"](tmp_path)
    names = [path.name for path in (DOCS / "images").glob("*.svg")]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        drawn, committed = (folder / name for folder in (tmp_path, DOCS / "images"))
        assert drawn.read_bytes() == committed.read_bytes(), (
            f"run `python docs/pictures.py`: {name}"
        )
