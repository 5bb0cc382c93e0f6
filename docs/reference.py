"""Prepare docstrings for the API reference: a griffe extension, which mkdocs.yml names.

Docstrings are written for the source and for ``help``. In the pages their roles become links, their
doctests code that can be copied, and the files of docs/ that they name links.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|meth|class|mod|data|attr):`(~?)([\w.]+)`")
PAGE = re.compile(r"docs/([\w-]+)\.md")
DOCTEST = re.compile(r"^ *>>> .*(?:\n *\S.*)*\n?", re.MULTILINE)
PROMPT = re.compile(r"(?:>>>|\.\.\.) ?")
# Several attributes with one description, as "q, k: ...".
NAMES = re.compile(r"^ +\w+(?:, \w+)+(?=: )", re.MULTILINE)
# "Args: see ..." in a sentence, which is no section.
INLINE = re.compile(r"^(Args|Source|Sources): (?=\S)", re.MULTILINE)

# The module that a heading of a page is about -> the page and the heading.
HEADINGS = {
    found[1]: f"{page.name}#{found[1]}"
    for page in Path(__file__).with_name("api").glob("*.md")
    for found in re.finditer(r"\{#([\w.]+)\}", page.read_text(encoding="utf-8"))
}


class Docstrings(griffe.Extension):
    """Rewrite the docstrings of the public names, which are those in an ``__all__``."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        loader.resolve_aliases(implicit=True, external=False)
        # Where an object is defined -> the object, and the shortest path by which users import it.
        public: dict[str, tuple[Any, str]] = {}
        # The docstrings of the tools link to the library too, which is loaded first.
        loaded = [
            module for module in loader.modules_collection.members.values() if module is not pkg
        ]
        for item, path in [pair for package in (*loaded, pkg) for pair in _public(package)]:
            known = public.get(item.path, (item, path))[1]
            public[item.path] = item, min(path, known, key=len)
            for name, member in item.members.items():
                if item.is_class and name[0] != "_" and member.docstring:
                    public[member.path] = member, f"{public[item.path][1]}.{name}"
        for item, _ in public.values():
            if item.package is not pkg:
                continue
            if item.docstring is None and item.is_attribute:
                item.docstring = _comment(item)
            if item.docstring is not None:
                item.docstring.value = _rewritten(item.docstring.value, item, public)


def _public(module: griffe.Module) -> Iterator[tuple[Any, str]]:
    """Yield the public objects of a module and of those below it, with the paths of their imports."""
    for member in list(module.modules.values()):
        if not member.is_alias:
            yield from _public(member)
    for name in map(str, module.exports or ()):
        found = module.members[name]
        if found.is_module and name in found.members and found.exports is None:
            # A function that its file is named after.
            found = module.members[name] = griffe.Alias(name, found.members[name], parent=module)
        if not found.is_module:
            yield (found.final_target if found.is_alias else found), f"{module.path}.{name}"


def _comment(item: Any) -> griffe.Docstring | None:
    """Return the comment "#: ..." above a variable as its docstring."""
    lines = item.lines_collection[item.filepath][: item.lineno - 1]
    found: list[str] = []
    while lines and lines[-1].startswith("#: "):
        found.insert(0, lines.pop()[3:])
    return griffe.Docstring("\n".join(found), parent=item) if found else None


def _rewritten(text: str, item: Any, public: dict[str, tuple[Any, str]]) -> str:
    text = DOCTEST.sub(_block, text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = NAMES.sub(lambda found: found[0][:4] + found[0][4:].replace(" ", "\u00a0"), text)
    text = INLINE.sub(r"**\1:** ", text)
    text = PAGE.sub(lambda found: f"[{found[1]}](../{found[1]}.md)", text)
    return ROLE.sub(lambda found: _link(found[1], found[2], item, public), text)


def _block(found: re.Match[str]) -> str:
    """Return a doctest as a block of code, in which the results are comments."""
    lines = found[0].rstrip().splitlines()
    indent = lines[0][: lines[0].index(">")]
    code = []
    for line in (each[len(indent) :] for each in lines):
        prompt = PROMPT.match(line)
        code.append(line[prompt.end() :] if prompt else f"# {line}")
    return "\n".join(indent + each for each in ["```python", *code, "```"]) + "\n"


def _link(short: str, name: str, item: Any, public: dict[str, tuple[Any, str]]) -> str:
    """Return the link to a public name, or the name as code if it is not public."""
    shown = f"`{name.rpartition('.')[2] if short else name}`"
    if name in HEADINGS:
        return f"[{shown}]({HEADINGS[name]})"
    paths = {path: path for _, path in public.values()}
    paths |= {defined: path for defined, (_, path) in public.items()}
    scope = item
    while scope is not None:
        found = scope.members.get(name.partition(".")[0])
        if found is not None and found.is_alias:
            found = found.final_target if found.resolved else None
        if found is not None:
            defined = ".".join([found.path, *name.split(".")[1:]])
            if defined in paths:
                return f"[{shown}][{paths[defined]}]"
        scope = scope.parent
    return f"[{shown}][{paths[name]}]" if name in paths else shown
