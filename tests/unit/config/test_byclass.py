"""The facts in families.json are those of the installed classes, and files are read as these classes read them.

The model types are dealt to twelve groups, of which `make test` runs one.
"""

import zlib
from typing import Any

import pytest
import transformers

from ci.families import quiet, refreshed_rows
from tests.support.class_files import FILE, NAMES, ROWS, STYLES, class_of, compared, short, widths
from tightrope import RopeSpec
from tightrope.config import LayerSpecs, provenance

GROUPS = range(12)
pytestmark = pytest.mark.skipif(
    transformers.__version__ != FILE["transformers"],
    reason="the facts are those of another version of transformers, which has other classes",
)


def of_group(names: Any, group: int) -> list[str]:
    """The model types of one group; a new row moves no other."""
    return [name for name in names if zlib.crc32(name.encode()) % len(GROUPS) == group]


# --- the data -------------------------------------------------------------------------------------


@pytest.mark.one_in(12)
@pytest.mark.parametrize("group", GROUPS)
def test_the_facts_are_those_of_the_installed_classes(group: int) -> None:
    """Otherwise run `python -m ci.families`, and review what has changed."""
    names = of_group(ROWS, group)
    with quiet():
        made = refreshed_rows(FILE, names)
    assert made == {name: ROWS[name] for name in names}


def test_rows_come_from_classes_or_from_hand() -> None:
    assert len(NAMES) >= 230
    for name, row in ROWS.items():
        facts = {*row} - {"code", "parts", "flat", "defaults", "outer", "more", "as"}
        assert "as" in row or "parts" in row or "code" in row, name
        assert not facts or "code" in row, name
        assert "as" not in row or ROWS[row["as"]], name
        assert {*row.get("code", {})} == {"refused"} or row.get("code", {"source": "x"})["source"]


# --- files ----------------------------------------------------------------------------------------

# Objects of these types state a number of channels that their code ignores, beside the factor that it reads.
ONLY_FILES = {"minimax_m3_vl_text", "minimax_m3_vl"}
# Style -> the least share of its files that are read, in any group; most others have a key that the class ignores.
READ = {"saved": 0.18, "older": 0.35, "short": 0.6, "composite": 0.4}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_file_is_read_as_its_class_reads_it(group: int, style: str) -> None:
    files, read, wrong, only = 0, 0, [], set()
    for name in of_group(STYLES[style][0], group):
        for keys, found, wanted in compared(name, style):
            files += 1
            read += found is not None
            if found is not None and wanted is None:
                only.add(name)
            elif found is not None and found != wanted:
                wrong.append((name, keys, found, wanted))
    assert not wrong
    assert only <= ONLY_FILES
    assert read >= READ[style] * files


@pytest.mark.one_in(12)
@pytest.mark.parametrize("group", GROUPS)
def test_a_default_names_the_class_that_gives_it(group: int) -> None:
    named = 0
    for name in of_group(NAMES, group):
        row, file = ROWS[name], {"model_type": name, **next(iter(short(name)))}
        try:
            rows = provenance(file).rows if "base" not in row["code"] else ()
        except ValueError:
            continue
        version = FILE["transformers"].rpartition(".")[0]
        sources = [each.source for each in rows if each.field == "base"]
        wanted = f"default of {row['class']}, transformers {version}"
        assert all(wanted in source for source in sources), (name, sources)
        named += len(sources)
    assert named >= 5


def test_layers_of_a_short_file_are_those_that_the_class_lists() -> None:
    file = {"model_type": "gemma3_text", **widths("gemma3_text"), "num_hidden_layers": 8}
    specs = RopeSpec.from_config(file)
    assert isinstance(specs, LayerSpecs)
    assert specs.layers == tuple(class_of("gemma3_text")(num_hidden_layers=8).layer_types)
