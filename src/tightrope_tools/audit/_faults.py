"""The words of the audit: the faults that it names, and the differences that a comparison names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_ROTATE = "call tightrope.functional.rotate(x, {spec}, positions{layout})"


class Fault(NamedTuple):
    """A kind of finding; its words have names in braces that are filled in where a finding is added.

    Attributes:
        severity: the usual one: "error", "warning" or "note".
        sentence: the fault in one sentence.
        mend: what to call or to change.
        evidence: the numbers that show it; "" if they are given where a finding is added.
    """

    severity: str
    sentence: str
    mend: str
    evidence: str = ""

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


def _rows(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of each row of a file, with the heading above it."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for part in text.split("\n# ")[1:]:
        heading, *rows = part.strip().split("\n\n")
        yield from ((heading, row.splitlines()) for row in rows)


#: By their kinds; the code of a finding is its kind up to a slash.
FAULTS = {
    kind: Fault(severity, sentence, mend.replace("ROTATE", _ROTATE), *evidence)
    for severity, (kind, sentence, mend, *evidence) in _rows("faults.txt")
}
#: Sentence and evidence of each kind of difference.
DIFFERENCES = {
    kind: (sentence, evidence) for _, (kind, sentence, evidence) in _rows("differences.txt")
}
