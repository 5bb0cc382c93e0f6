"""A file that a person wrote or changed gives what transformers' class makes of it, or an error.

Each class is given its own defaults, as a file of the present style, and of the older one without a rope section.
Then keys are added, most of which any program but this class may have written.
"""

import copy
import json
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.reading import without
from tightrope import RopeSpec
from tightrope.config.families import FAMILIES

# The code in the repositories of nomic_bert reads more keys than the class of transformers.
NAMES = [
    name
    for name, family in FAMILIES.items()
    if name in CONFIG_MAPPING and not family.refused and name != "nomic_bert"
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ADDED: dict[str, dict[str, Any]] = {
    "base": {"rope_theta": 54321.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 8192},
    "llama3": {"rope_scaling": LLAMA3, "max_position_embeddings": 16384},
    "section": {"rope_parameters": {"rope_type": "default", "rope_theta": 54321.0}},
    "scaled section": {
        "rope_parameters": {**YARN, "rope_theta": 54321.0},
        "max_position_embeddings": 8192,
    },
    "a part, in a section": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 54321.0,
            "partial_rotary_factor": 0.25,
        }
    },
    "a base beside a section": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 54321.0},
        "rope_theta": 999.0,
    },
    "two sections": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 54321.0},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "a part": {"partial_rotary_factor": 0.5},
    "a part, as in GPT-NeoX": {"rotary_pct": 0.5},
    "a base, as in GPT-NeoX": {"rotary_emb_base": 77777},
    "a base, as in torchtune": {"rope_base": 77777},
    "a base, as in Conformers": {"rotary_embedding_base": 77777},
    "head_dim": {"head_dim": 32},
}


def outcome(config: Any) -> Any:
    """Return the specs of a configuration; the error if it is refused."""
    try:
        made = RopeSpec.from_config(config)
    except (ValueError, NotImplementedError) as error:
        return error
    return made if isinstance(made, RopeSpec) else (dict(made), made.layers)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_read_as_its_class_reads_it(name: str) -> None:
    kind = CONFIG_MAPPING[name]
    present = json.loads(json.dumps(kind().to_dict(), default=str)) | {"model_type": name}
    older = {**without(present, "rope_parameters"), "rope_theta": 10000.0}
    wrong = {}
    for style, file in (("present", present), ("older", older)):
        for what, added in ADDED.items():
            changed = file | added
            if "base," in what:
                changed = without(changed, "rope_theta", "rope_parameters") | added
            try:
                made = kind.from_dict(copy.deepcopy(changed))
            except Exception:  # noqa: BLE001  # each class refuses in its own way
                continue
            got = outcome(changed)
            if not isinstance(got, Exception) and got != outcome(made):
                wrong[style, what] = got, outcome(made)
    assert not wrong


def test_most_files_are_read() -> None:
    """Otherwise the test above would compare nothing."""
    read = 0
    for name in NAMES:
        made = transformers.AutoConfig.for_model(name)
        read += not isinstance(outcome(made), Exception)
    assert read > 0.9 * len(NAMES)
