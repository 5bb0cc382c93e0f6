"""Every Python block of README.md and docs/*.md runs, and the API reference has every public name.

The ```python blocks of one page run in order and in one namespace, so that a later block may use
names of an earlier one. Those of README.md run one by one, as people paste them. Blocks that must
not run are fenced as ```text or ```console. What a block prints is in the ```text that follows it, if one
does; there … stands for anything, and line breaks do not count.
"""

import ast
import io
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.helpers import ROOT
from tightrope import unpatch
from tightrope.frequencies import RULES

FENCE = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```text[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the Python blocks of a page, each with the number of its first line."""
    return [(text.count("\n", 0, hit.start(1)) + 1, hit.group(1)) for hit in FENCE.finditer(text)]


def run(text: str, name: str) -> int:
    """Run a page and return its number of blocks; a traceback shows the line of the page."""
    script = ModuleType("__main__")
    found = blocks(text)
    after = FENCE.split(text)[2::2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", script)
        for (line, source), rest in zip(found, after, strict=True):
            code = compile("\n" * (line - 1) + source, name, "exec")
            with redirect_stdout(io.StringIO()) as printed:
                exec(code, vars(script))
            shown = SHOWN.search(rest)
            if shown and (real := " ".join(printed.getvalue().split())):
                parts = " ".join(shown[1].split()).split("…")
                assert re.fullmatch(".*".join(map(re.escape, parts)), real), real
    for value in vars(script).values():
        if isinstance(value, torch.nn.Module):
            unpatch(value)  # other pages must not see the end of this one
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
    assert len(README.split()) <= 900
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


def test_a_wrong_block_fails_at_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run("one\n\n```python\na = 1\na / 0\n```\n", "page")
    assert caught.traceback[-1].lineno + 1 == 5


# --- the API reference ---


def public_names() -> Iterator[str]:
    """Yield the paths of the names in every ``__all__``, without those of modules."""
    source = ROOT / "src"
    found: dict[str, list[str]] = {}
    for file in sorted(source.rglob("*.py")):
        module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[module] = ast.literal_eval(node.value)
    for module, names in found.items():
        for name in names:
            path = f"{module}.{name}"
            if path not in found and name != "__version__":
                yield path


def test_the_reference_has_every_public_name(folder: Path) -> None:
    # Four lines, then "name domain:role priority uri title" for each, compressed.
    inventory = (folder / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.partition(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    names = set(public_names())
    assert {"tightrope.RopeSpec", "tightrope.nn.KVCache", "tightrope_tools.audit.audit"} < names
    assert names - known == set()


def test_the_reference_shows_no_markup_of_docstrings(folder: Path) -> None:
    for page in (folder / "api").rglob("*.html"):
        text = re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8"))
        assert (
            re.findall(r".*(?::(?:func|class|meth|mod|data|attr):|&gt;&gt;&gt;|``).*", text) == []
        )
