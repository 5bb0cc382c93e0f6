"""The check of wording finds planted phrases and ignores code."""

import pytest

from ci import prose

PLANTED = {
    '"""Whether it fits."""\n': (1, "Whether"),
    'def f():\n    """Return x.\n\n    Args:\n        x: as of\n            `g`.\n    """\n': (
        5,
        "as of",
    ),
    "x = 1  # for whoever wants\n": (1, "whoever"),
    "# what\n# stands around it\n": (1, "what stands around"),
    "raise ValueError(f'{x} was not said here')\n": (1, "said"),
}


@pytest.mark.parametrize("source", PLANTED)
def test_a_planted_phrase_is_found(source: str) -> None:
    assert [found[:2] for found in prose.problems("a.py", source)] == [PLANTED[source]]


def test_pages_and_sources_are_checked() -> None:
    assert [found[:2] for found in prose.problems("a.md", "x\n\nIt is carried.\n")] == [
        (3, "carried")
    ]
    assert [found[:2] for found in prose.problems("a.h", "int said;\n// told\n")] == [(2, "told")]


def test_code_is_not_prose() -> None:
    for source in (
        'told = said["told"]\n',
        "# see `carried`\n",
        '"""Add.\n\n    >>> ramp + 1\n    2\n"""\n',
    ):
        assert list(prose.problems("a.py", source)) == []


def test_exceptions_have_reasons() -> None:
    assert all(prose.EXCEPTIONS.values())
