"""Every Python block of README.md and docs/*.md runs.

The ```python blocks of one page run in order and in one namespace, so that a later block may use
names of an earlier one. Those of README.md run one by one, as people paste them. Blocks that must
not run are fenced as ```text or ```console.
"""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tightrope.frequencies import RULES

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the Python blocks of a page, each with the number of its first line."""
    return [(text.count("\n", 0, hit.start(1)) + 1, hit.group(1)) for hit in FENCE.finditer(text)]


def run(text: str, name: str) -> int:
    """Run a page and return its number of blocks; a traceback shows the line of the page."""
    script = ModuleType("__main__")
    found = blocks(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", script)
        for line, source in found:
            code = compile("\n" * (line - 1) + source, name, "exec")
            exec(code, vars(script))
    return len(found)


README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write files
    before = dict(RULES)
    run(page.read_text(encoding="utf-8"), str(page))
    RULES.clear()  # a block may define a rule
    RULES.update(before)


@pytest.mark.parametrize("source", [source for _, source in blocks(README)])
def test_a_block_of_the_readme_runs_alone(source: str) -> None:
    assert run(f"```python\n{source}```\n", "README.md") == 1


def test_the_first_pages_show_code() -> None:
    assert blocks(README)
    assert blocks((ROOT / "docs/index.md").read_text(encoding="utf-8"))


def test_the_readme_stays_short_and_starts_with_what_a_visitor_does() -> None:
    assert len(README.split()) <= 1300
    first_screen = "\n".join(README.splitlines()[:60])
    for command in ("make demo", "make test", "pip install", "```python"):
        assert command in first_screen


def test_links_of_the_readme_lead_to_files_and_headings() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", README)
    assert len(links) > 20
    for file, anchor in links:
        assert (ROOT / file).is_file(), file
        if anchor:
            headings = re.findall(r"^#+ (.*)", (ROOT / file).read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]
            assert anchor in slugs, (file, anchor)


def test_blocks_share_a_namespace() -> None:
    assert run("```python\na = 1\n```\ntext\n```python\nassert a == 1\n```\n", "page") == 2


def test_a_wrong_block_fails_at_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run("one\n\n```python\na = 1\na / 0\n```\n", "page")
    assert caught.traceback[-1].lineno + 1 == 5


def test_other_fences_do_not_run() -> None:
    assert blocks("```text\nnot python\n```\n```console\n$ make\n```\n") == []
