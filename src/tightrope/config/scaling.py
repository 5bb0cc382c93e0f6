"""Read the scaling rule of a rope section, by the names and keys that the rules declare."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .._errors import bad_type
from ..frequencies import NTK, RULES, Given, Linear, LongRoPE, Rule, YaRN
from ..spec import RopeSpec
from . import keys
from .source import Found, Part, Source, agreed, fail, ignored, settle

Fact = tuple[str, object, str]


def claimed_by(rule: type[Rule] | None) -> set[str]:
    """The keys of a rope section that belong to a rule."""
    return {key for spelled in rule.spellings().values() for key in spelled} if rule else set()


def kind_of_rule(part: Part) -> type[Rule] | None:
    """The class of the rule that a rope section names; None for no scaling."""
    given = part.inner(keys.TYPE)
    for path, name in given:
        if name == "ntk":
            return settle(  # type: ignore[no-any-return]
                f"{path} must name one rule but 'ntk' names two: if it multiplies the base by factor ** (d / (d - "
                f"2)), with d = rotary_dim, make a RopeSpec with scaling=NTK(factor); if, as in vLLM, it "
                f"divides frequency k by factor ** (2 * (k + 1) / d), one with scaling=Given(frequencies)",
                ("if it multiplies the base", NTK),
            )
        if not isinstance(name, str) or name not in keys.TYPES_WITHOUT_RULE | RULES.keys():
            known = ", ".join(sorted({*keys.TYPES_WITHOUT_RULE, *RULES} - {"ntk"}))
            fail(f"{path} must be one of {known} but got {name!r}")
    kinds = {RULES.get(name) for _, name in given}
    if len(kinds) > 1:
        given = [found for found in [agreed("the kind of scaling", given)] if found]
        kinds = {RULES.get(name) for _, name in given}
    kind = kinds.pop() if kinds else None
    if kind is RULES["dynamic"] and part.value("alpha") is not None:
        return NTK  # HunYuan's and vLLM's "dynamic" with alpha does not depend on the length
    if not given:
        orphans = part.inner(key for key in part.entries if _is_of_a_rule(key))
        if orphans:
            has = ", ".join(sorted(path for path, _ in orphans))
            fail(f"a rope section must name its rope_type but has only {has}")
    return kind


def _is_of_a_rule(key: str) -> bool:
    own = {key for rule in RULES.values() for key in claimed_by(rule)}
    return key in own - {*keys.FRACTION, *keys.INERT}


def scaling_of(
    source: Source, part: Part, kind: type[Rule] | None
) -> tuple[Rule | None, list[Fact]]:
    """The rule with its parameters, and the key that gave each."""
    turns = source.family is not None and source.family.scaling == "turns"
    given = " and ".join(f"{path} = {name!r}" for path, name in part.inner(keys.TYPE))
    if kind is None:
        if turns:
            why = f"{source.name} counts coordinates in turns"
            return Linear(1 / (2 * math.pi)), [("scaling", "Linear", why)]
        if (
            not given
            and source.family is not None
            and source.family.scaled
            and source.config is None
        ):
            settle(
                f"{source.name} is scaled by default, so the config must have a rope section that names its "
                "rope_type; 'default' is unscaled",
                ("if it is unscaled", None),
            )
        return None, [("scaling", None, given or "no key gives one")]
    if turns:
        fail(f"{source.name} counts coordinates in turns, so it must not have a scaling rule")
    if source.family is not None and "scaling" in source.family.fixed:
        path, name = part.inner(keys.TYPE)[0]
        ignored(source, "scaling", "'default'", (path, name))
    facts: list[Fact] = [("scaling", kind.__name__, given)]
    values: dict[str, Any] = {}
    missing: list[str] = []
    spellings = kind.spellings()
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        spelled = spellings[one.name]
        if kind is NTK and "alpha" in part.entries:
            spelled = ("alpha",)
        got = _value_of(source, part, kind, one.name, part.inner(spelled))
        if got is None and one.name == "factor" and _wants_ratio(part, one, spelled):
            got = _ratio(source, part)
        if got is not None:
            values[one.name] = got[1]
            facts.append((f"scaling.{one.name}", got[1], got[0]))
        elif one.default is dataclasses.MISSING:
            missing.append("/".join(spelled))
    factor = values.get("factor")
    if kind.names[0] in keys.ONLY_LONGER and isinstance(factor, float | int) and 0 < factor < 1:
        path = next(where for field, _, where in facts if field == "scaling.factor")
        values["factor"] = settle(
            f"{path} must be at least 1, the ratio of the new to the old length, but got {factor}; "
            f"its inverse is {1 / factor:g}",
            ("if it is the ratio of the old to the new", float(f"{1 / factor:.12g}")),
        )
    if missing:
        has = ", ".join(sorted(key for key in part.entries if part.value(key) is not None))
        fail(f"scaling by {kind.names[0]!r} must have {', '.join(missing)} but has only {has}")
    paths = {name: where for name, _, where in facts}
    for high, low in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
        _ordered(values, paths, high, low)
    if kind is YaRN:
        values.update(_mscales(values, paths))
        if values.get("mscale_all_dim"):
            values["scales_softmax"] = source.family and source.family.scales_softmax
            why = "not in the table of families" if source.family is None else source.name
            facts.append(("scaling.scales_softmax", values["scales_softmax"], why))
    if kind is LongRoPE:
        values.update(_longrope_scales(source, values))
    multiplier = part.value("attn_factor")
    switch = part.value("apply_yarn_scaling")
    if not isinstance(switch, bool | None):
        raise bad_type(f"{part.entries['apply_yarn_scaling'][0]} must be a bool but got {switch!r}")
    if kind is YaRN and switch is False:  # vLLM then scales by attn_factor alone
        path = part.entries["apply_yarn_scaling"][0]
        alone = 1.0 if multiplier is None else multiplier
        found = [*part.inner(["attention_factor"]), (path, alone)]
        path, alone = agreed("attention_factor", found) or (path, alone)
        values["attention_factor"] = alone
        facts.append(("scaling.attention_factor", alone, path))
    elif kind is YaRN and multiplier is not None and multiplier != 1:
        path = part.entries["attn_factor"][0]
        values["attention_factor"] = _times(values, path, multiplier)
        facts.append(("scaling.attention_factor", values["attention_factor"], path))
    return kind(**values), facts


def _mscales(values: dict[str, Any], paths: dict[str, str]) -> dict[str, Any]:
    """Raise an error if just one of YaRN's two mscales is given; return the values that are tried."""
    both = {name: values.get(name) for name in ("mscale", "mscale_all_dim")}
    given = [name for name, value in both.items() if value is not None]
    if values.get("attention_factor") is not None or not given or all(both.values()):
        return {}
    unused = dict.fromkeys(both)
    one, other = (
        YaRN(**{**values, **more}).frequencies(2, 10000.0).attention_scaling
        for more in ({}, unused)
    )
    if one == other:
        return {}
    chosen: dict[str, Any] = settle(
        f"mscale and mscale_all_dim must both be given and not 0 but the config has only "
        f"{paths['scaling.' + given[0]]} = {both[given[0]]!r}: DeepSeek's code scales attention by {one:g}, "
        f"transformers ignores the key and scales by {other:g}",
        ("as DeepSeek's code", {}),
        ("as transformers", unused),
    )
    return chosen


def _longrope_scales(source: Source, values: dict[str, Any]) -> dict[str, Any]:
    """Raise an error for the mscales of LongRoPE where the class of transformers ignores them; see :func:`_mscales`."""
    unused = dict.fromkeys(("short_mscale", "long_mscale"))
    name = source.values.get("model_type")
    ignored_by_class = source.family is not None and name not in (None, "phimoe")
    has_factor = any(values.get(name) is not None for name in ("factor", "attention_factor"))
    if not (ignored_by_class and has_factor and "short_mscale" in values):
        return {}

    def scales(**more: Any) -> list[float]:
        rule = LongRoPE(**{**values, **more})
        channels, beyond = 2 * len(rule.short_factor), rule.original_max_position + 1
        return [rule.frequencies(channels, 10000.0, n).attention_scaling for n in (None, beyond)]

    one, other = scales(), scales(**unused)
    if one == other:
        return {}
    chosen: dict[str, Any] = settle(
        f"short_mscale and long_mscale must not be given for {source.name}: vLLM scales attention by {one[0]:g} and "
        f"{one[1]:g}, transformers ignores the keys and scales by {other[0]:g}",
        ("as vLLM", {}),
        ("as transformers", unused),
    )
    return chosen


def _ordered(values: dict[str, Any], paths: dict[str, str], high: str, low: str) -> None:
    """Raise an error if two parameters of a rule are swapped."""
    both = [values.get(name) for name in (high, low)]
    if all(isinstance(one, int | float) and one > 0 for one in both) and both[0] < both[1]:  # type: ignore[operator]
        one, other = (paths[f"scaling.{name}"] for name in (high, low))
        values[high], values[low] = settle(
            f"{one} must be at least {other} but got {both[0]} and {both[1]}; they are probably swapped",
            ("if they are", both[::-1]),
        )


def _value_of(
    source: Source, part: Part, kind: type[Rule], name: str, found: list[Found]
) -> Found | None:
    """The value of a rule's field; the length where scaling begins may be at the outer level."""
    if name != "original_max_position":
        return agreed(name, found)
    got = _original(source, part, found)
    if kind.names[0] not in keys.SCALED_FROM_MAX_POSITION:
        return got
    if got is None:
        context = _context(source)
        return context and (f"{context[0]}, as no key gives the original length", context[1])
    # Nomic's code begins at its own key.
    dynamic = kind.names[0] == "dynamic" and got[0].endswith(keys.ORIGINAL_MAX_POSITION[0])
    if dynamic and (context := _context(source)) and context[1] != got[1]:
        one, other = (f"{path} = {value!r}" for path, value in (got, context))
        got = settle(
            f"'dynamic' scaling must begin at one length but the config has {one} and {other}, which "
            "transformers takes",
            (f"if it begins at {one}", got),
            (f"if it begins at {other}", context),
        )
    return got


def _original(source: Source, part: Part, found: list[Found]) -> Found | None:
    """The length at which scaling begins; Phi-3 has it at the outer level."""
    inside = found or part.inner(keys.ORIGINAL_MAX_POSITION)
    return agreed("original_max_position", inside + source.outer(keys.ORIGINAL_MAX_POSITION))


def _wants_ratio(part: Part, one: dataclasses.Field[Any], spelled: tuple[str, ...]) -> bool:
    """Return True if a missing factor must be computed: it is null, or optional in the rule."""
    null = any(key in part.entries and part.value(key) is None for key in spelled)
    return null or one.default is None


def _ratio(source: Source, part: Part) -> Found | None:
    """The longest length / the original length, as transformers computes a missing factor."""
    original, longest = _original(source, part, []), _context(source)
    if original is None or longest is None:
        return None
    if not isinstance(original[1], int) or not isinstance(longest[1], int):
        return None
    if original[1] < 1:
        return None  # the rule raises the error
    return f"{longest[0]} / {original[0]}", longest[1] / original[1]


def _context(source: Source) -> Found | None:
    return agreed("the context length", source.outer(keys.MAX_POSITION))


def _times(values: dict[str, Any], path: str, multiplier: object) -> float:
    """Multiply YaRN's own attention factor by the ``attn_factor`` of vLLM and llama.cpp."""
    if values.get("attention_factor") is not None:
        fail(
            f"attention_factor must have one value but got attention_factor = "
            f"{values['attention_factor']!r} and {path} = {multiplier!r}"
        )
    if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
        fail(f"{path} must be a number but got {multiplier!r}")
    return multiplier * YaRN(**values).frequencies(2, 10000.0).attention_scaling


def given_by_factors(rotary_dim: int, base: float, factors: list[float]) -> Given:
    """The frequencies of a base, each divided by the factor of its pair."""
    exact = RopeSpec(rotary_dim, base=base).frequencies().exact
    return Given(tuple(float(omega) / factor for omega, factor in zip(exact, factors, strict=True)))
