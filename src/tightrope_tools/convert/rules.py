"""What convert makes of a tensor by its name, and of a key of the configuration: one table.

The plan of a conversion reads it, and `tightrope convert --rules` prints it. Every refusal of a tensor or a key is a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from .files import fail

MOVES, STAYS, REFUSED = "moves", "stays", "refused"
SCALE = "a scale of rows"
GATED = "about gates among the rows of queries, and no tensor holds them alone"
# Where a rule looks.
PART = "a part of a projection"
BESIDE = "beside projections"
LAYER = "a layer without projections"
KEY = "a key of the configuration"


class Rule(NamedTuple):
    """A row.

    Attributes:
        result: "moves", "stays" or "refused".
        where: a part of a projection that the naming lists; a tensor beside such projections; one of a layer that has
            none; or a key of the configuration.
        names: a regular expression of a whole name between dots, of all after the projection, or of the key.
        what: what such a tensor is, or what the key states.
        why: the reason; for what is refused, what to do.
        whole: whether the size must be that of whole heads.
        packings: for keys about the order of fused rows, the packings that they contradict.
        usual: values of the key that are not refused.
    """

    result: str
    where: str
    names: str
    what: str
    why: str
    whole: bool = False
    packings: str = ""
    usual: tuple[object, ...] = (None, False, "", "none")

    def refuse(self, name: str, *words: str) -> NoReturn:
        """Refuse a tensor or a key.

        Args:
            words: what fills the braces of the row.

        Raises:
            ValueError: always.
        """
        fail(f"{name} is {self.what.format(*words)}: {self.why.format(*words)}")

    def cells(self) -> tuple[str, ...]:
        """Return the row as text: the result, where the rule looks, the names, and the reason."""
        order = " or ".join(self.packings.split())
        why = f"{self.what}: {self.why}".format(order)
        return self.result, self.where, self.names, why


_SIDE = r"(?:q|k|qk|kv|qkv|qgkv|qkvg|query|queries|keys?)"
_KIND = r"(?:(?:layer|rms)?_?norm|rms|ln)"
_OF_ADAPTERS = r"(?:\.\w+)?(?:\.weight)?"
_OF_HEADS, _NO_HEADS = "its rows are those of heads", "it has no rows of heads"
_LIST = "list it (--naming), merge, rename or remove it"
_ORDER = "about another order of fused rows than --packing {0}"
_CODEGEN = "pass --packing {0} if the model's code has mp_num 4"
_PARALLEL = "(?:tensor_model_parallel|tensor_parallel|model_parallel|tp|mp)_size"
_GATE_KEYS = (
    "attention_output_gate|attn_output_gate|elementwise_attn_output_gate|headwise_attn_output_gate|use_output_gate|"
    "use_gated_attention|linear_qgkv|gating"
)

#: The first row that fits decides.
RULES = (
    Rule(MOVES, PART, r"(?:base_layer\.)?(?:weight|bias)", "a weight or a bias", _OF_HEADS),
    Rule(
        *(MOVES, PART, rf"(?:lora_B|lora_magnitude_vector){_OF_ADAPTERS}"),
        *("the output side of an adapter", _OF_HEADS),
    ),
    Rule(
        *(MOVES, PART, "weight_scale(?:_inv)?", SCALE),
        "one for blocks stays if the rotated rows of each head share a block, and is refused if not",
    ),
    Rule(STAYS, PART, rf"lora_A{_OF_ADAPTERS}", "the input side of an adapter", _NO_HEADS),
    Rule(STAYS, PART, "input_scale|activation_scale", "a scale of x", _NO_HEADS),
    Rule(
        *(STAYS, PART, "layer_norm_(?:weight|bias)|_extra_state"),
        *("Transformer Engine's norm before the projection, or its state", _NO_HEADS),
    ),
    Rule(
        *(REFUSED, PART, "(?s:.*)", "an unknown part of a projection"),
        "convert before quantising, merge it into the weight, or remove it",
    ),
    Rule(
        *(STAYS, BESIDE, r"indexer\.", "a part of an indexer"),
        "its channels are its own, and stay unless the naming lists them",
    ),
    Rule(
        *(REFUSED, BESIDE, rf"{_SIDE}_?{_KIND}|{_KIND}_?{_SIDE}"),
        *("named like a norm of queries or keys, and the naming does not list it", _LIST),
    ),
    # Those of a latent (q_a_layernorm, k_b_proj, wkv_b) have channels that do not rotate.
    Rule(
        *(REFUSED, BESIDE),
        rf"(?:.*_|w)?(?:{_SIDE}(?:(?:bias|conv|gain|gamma|scale|proj|lin).*|_(?![ab](?:_|\b)).*)?|qgkv|qkvg)|c_attn|in_proj_weight",
        *("named like channels of queries or keys, and the naming does not list it", _LIST),
        whole=True,
    ),
    Rule(
        *(STAYS, LAYER, ".*(?:cross|linear_?att|mamba|ssm|conv).*"),
        *("of a module of another kind", "it has no RoPE"),
    ),
    Rule(
        *(REFUSED, KEY, _GATE_KEYS, GATED),
        "only attn_output_gate is supported, with --naming qwen3_next",
    ),
    Rule(
        REFUSED,
        KEY,
        "attention_k_eq_v",
        "about keys that are values too",
        "values must stay in order",
    ),
    Rule(
        REFUSED, KEY, "rotary_value", "about values that rotate", "conversion does not support that"
    ),
    *(
        Rule(REFUSED, KEY, names, _ORDER, why, False, packings, (None, *usual))
        for names, packings, usual, why in (
            ("megatron_legacy", "grouped", (False,), "pass --packing blocks"),
            ("multi_query_attention", "blocks", (True,), "pass --packing grouped"),
            ("mp_num", "quarters", (4,), _CODEGEN),
            ("head_dim", "quarters", (), _CODEGEN),
            (_PARALLEL, "blocks quarters", (0, 1), "pass --packing {0} if the parts were merged"),
        )
    ),
)
#: Modules that hold gates alone, so that those keys are not about the rows of queries.
GATES = re.compile(r"(?:\w+_)?gates?(?:_\w+)?|g_proj")


def rule_of(where: str, names: Iterable[str], *, whole: bool = False) -> Rule | None:
    """Return the first rule that one of the names of a tensor fits; None if there is none.

    Args:
        names: the names between the dots of its own, in order.
        whole: whether it has as many elements as whole heads.

    >>> rule_of(PART, ["lora_A.default.weight"]).result
    'stays'
    """
    given = list(names)
    for rule in RULES:
        fits = rule.where == where and whole >= rule.whole
        if fits and any(re.fullmatch(rule.names, name) for name in given):
            return rule
    return None
