"""The faults that an audit names: the rows of faults.txt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_ROTATE = "call tightrope.functional.rotate(x, {spec}, positions{layout})"


class Fault(NamedTuple):
    """A kind of finding.

    Attributes:
        severity: the usual one: "error", "warning" or "note".
        sentence: the fault in one sentence, with words in braces that are filled in where a finding is added.
        mend: what to call or to change.
    """

    severity: str
    sentence: str
    mend: str

    def mended(self, spec: str, layout: str, words: Mapping[str, object]) -> str:
        """Return what mends a finding.

        Args:
            spec: the rotation to call, as Python code.
            layout: the layout of x.
            words: what the sentence is filled in with.
        """
        option = "" if layout == "bhsd" else f', layout="{layout}"'
        text = self.mend
        for name, word in {**words, "spec": spec, "layout": option}.items():
            text = text.replace(f"{{{name}}}", str(word))
        return text


def _read(text: str) -> Iterator[tuple[str, Fault]]:
    """Yield the kinds under the headings of severities; three lines each."""
    for part in text.split("\n# ")[1:]:
        severity, *rows = part.strip().split("\n\n")
        for row in rows:
            kind, sentence, mend = row.splitlines()
            yield kind, Fault(severity, sentence, mend.replace("ROTATE", _ROTATE))


#: By their kinds; the code of a finding is its kind up to a slash.
FAULTS = dict(_read(Path(__file__).with_name("faults.txt").read_text(encoding="utf-8")))
