"""Every Python block of README.md and docs/*.md runs, links lead somewhere, and the API reference has every public name.

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
from unittest import mock

import pytest
import torch

from tests.support.helpers import ROOT
from tightrope import unpatch
from tightrope.frequencies import RULES

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(python|text)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the Python blocks of a page: the line before, the code, and what it should print, or nothing."""
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    for hit, after in zip(found, [*found[1:], None]):
        if hit[1] == "python":
            shown = after[2] if after and after[1] == "text" else ""
            yield text.count("\n", 0, hit.start(2)), hit[2], shown


def run(page: Path, *parts: tuple[int, str, str]) -> None:
    """Run blocks of a page in one namespace; a traceback shows the line of the page."""
    script = ModuleType("__main__")
    # A block may define a rule.
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(RULES):
        patch.setitem(sys.modules, "__main__", script)
        for line, source, shown in parts:
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile("\n" * line + source, str(page), "exec"), vars(script))
            if shown and (real := " ".join(printed.getvalue().split())):
                wanted = map(re.escape, " ".join(shown.split()).split("…"))
                assert re.fullmatch(".*".join(wanted), real), real
    for value in vars(script).values():
        if isinstance(value, torch.nn.Module):
            unpatch(value)  # other pages must not see the end of this one


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write files
    run(page, *blocks(page))


@pytest.mark.parametrize("block", [*blocks(README)])
def test_a_block_of_the_readme_runs_alone(block: tuple[int, str, str]) -> None:
    run(README, block)


def test_links_of_the_readme_lead_to_files_and_headings() -> None:
    """Links in docs/ are checked when the site is built."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", README.read_text("utf-8"))
    assert len(links) > 20
    for file, anchor in links:
        headings = re.findall(r"^#+ (.*)", (ROOT / file).read_text("utf-8"), re.M)
        slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]
        assert not anchor or anchor in slugs, (file, anchor)


def public_names() -> Iterator[str]:
    """Yield the paths of the names in every ``__all__``, without those of modules."""
    source = ROOT / "src"
    found: dict[str, list[str]] = {}
    for file in sorted(source.rglob("*.py")):
        module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[module] = ast.literal_eval(node.value)
    every = {f"{module}.{name}" for module, names in found.items() for name in names}
    yield from every - found.keys() - {"tightrope.__version__"}


def test_the_reference_has_every_public_name(folder: Path) -> None:
    # Four lines, then "name domain:role priority uri title" for each, compressed.
    inventory = (folder / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.partition(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    names = set(public_names())
    assert {"tightrope.RopeSpec", "tightrope.nn.KVCache", "tightrope_tools.audit.audit"} < names
    assert names - known == set()


def test_the_reference_shows_no_markup_of_docstrings(folder: Path) -> None:
    markup = re.compile(r".*(?::(?:func|class|meth|mod|data|attr):|&gt;&gt;&gt;|``).*")
    for page in (folder / "api").rglob("*.html"):
        assert markup.findall(re.sub(r"<[^>]*>", "", page.read_text("utf-8"))) == []
