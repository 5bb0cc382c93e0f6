"""Read the scaling rule of a rope section, by the names and keys that the rules declare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import as_real
from ..frequencies import NTK, RULES, Given, Linear, LongRoPE, Rule, YaRN
from ..spec import RopeSpec
from . import keys
from .rope_section import rule_name
from .source import Found, Section, Source, agreed, boolean, fail, whole

# Facts of a rule: "scaling" and "scaling.factor" and so on.
Facts = dict[str, Found]


def claimed_by(rule: type[Rule] | None) -> set[str]:
    """The keys of a rope section that belong to a rule."""
    return {key for spelled in rule.spellings().values() for key in spelled} if rule else set()


def kind_of_rule(section: Section) -> type[Rule] | None:
    """The class of the rule that a rope section names; None for no scaling."""
    name = rule_name(section)
    if name is None:
        own = {key for rule in RULES.values() for key in claimed_by(rule)}
        orphans = section.keys() & own - {*keys.FRACTION, *keys.INERT}
        if orphans:
            has = ", ".join(sorted(section[key].source for key in orphans))
            fail(f"a rope section must name its rope_type but has only {has}")
        return None
    named = [section[key] for key in keys.TYPE if key in section]
    path = next(each.source for each in named if each.value == name)
    if name == "ntk":
        fail(
            f"{path} must name one rule but 'ntk' names two: if it multiplies the base by factor ** (d / (d - 2)), with "
            f"d = rotary_dim, make a RopeSpec with scaling=NTK(factor); if, as in vLLM, it divides frequency k by "
            f"factor ** (2 * (k + 1) / d), one with scaling=Given(frequencies)"
        )
    if name not in keys.TYPES_WITHOUT_RULE | RULES.keys():
        known = ", ".join(sorted({*keys.TYPES_WITHOUT_RULE, *RULES} - {"ntk"}))
        fail(f"{path} must be one of {known} but got {name!r}")
    kind = RULES.get(name)
    # HunYuan's and vLLM's "dynamic" with alpha does not depend on the length.
    return NTK if kind is RULES["dynamic"] and "alpha" in section else kind


def scaling_of(source: Source, section: Section) -> tuple[Rule | None, Facts]:
    """The rule with its parameters, and the key that gave each."""
    kind, facts = kind_of_rule(section), source.facts
    named = [section[key] for key in keys.TYPE if key in section]
    given = " and ".join(
        f"{each.source} = {each.value!r}" if each.given else each.source for each in named
    )
    if kind is None:
        if facts.turns:
            why = f"{source.name} counts coordinates in turns"
            return Linear(1 / (2 * math.pi)), {"scaling": Found("Linear", why)}
        return None, {"scaling": Found(None, given or "no key gives one")}
    if facts.turns:
        fail(f"{source.name} counts coordinates in turns, so it must not have a scaling rule")
    if "scaling" in facts.fixed:
        fail(
            f"scaling must be 'default', as the code of {source.name} reads no key for it, but got {named[0].value!r} "
            f"from {named[0].source}"
        )
    _refuse_elsewhere(source, section)
    found = {"scaling": Found(kind.__name__, given)}
    missing = []
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        spelled = ("alpha",) if kind is NTK and "alpha" in section else kind.spellings()[one.name]
        got = _parameter(source, section, kind, one, spelled)
        if got is not None:
            found[f"scaling.{one.name}"] = got
        elif one.default is dataclasses.MISSING:
            missing.append("/".join(spelled))
    if missing:
        has = ", ".join(sorted(section.keys() - {"rope_theta", "partial_rotary_factor"}))
        fail(f"scaling by {kind.names[0]!r} must have {', '.join(missing)} but has only {has}")
    _check(kind, found)
    values = {name.partition(".")[2]: each.value for name, each in found.items() if "." in name}
    _check_mscales(source, kind, values, found)
    if kind is YaRN:
        if values.get("mscale_all_dim"):
            why = source.name if source.family is not None else "not in the table of families"
            values["scales_softmax"] = source.family and facts.scales_softmax
            found["scaling.scales_softmax"] = Found(values["scales_softmax"], why)
        factor = _attention_factor(section, values)
        if factor is not None:
            values["attention_factor"] = factor.value
            found["scaling.attention_factor"] = factor
    return kind(**values), found


# Keys that other programs read and most classes of transformers do not -> the value that changes nothing. Those with
# a section for each type of layers do not read truncate, either.
_ELSEWHERE = {"alpha": None, "attn_factor": 1, "apply_yarn_scaling": True}


def _refuse_elsewhere(source: Source, section: Section) -> None:
    """Raise an error for a key of a rule that vLLM would read and the class of the family does not."""
    facts = source.facts
    ignored = _ELSEWHERE | ({"truncate": True} if facts.nested else {})
    for key, same in ignored.items() if facts.made_by else ():
        found = section.get(key)
        if found is not None and found.value != same and not (key == "alpha" and facts.alpha):
            fail(
                f"{found.source} must not be given for {source.name}, as {facts.made_by} does not read it, but got "
                f"{found.value!r}"
            )


def _parameter(
    source: Source,
    section: Section,
    kind: type[Rule],
    one: dataclasses.Field[Any],
    spelled: Sequence[str],
) -> Found | None:
    """The value of a field of a rule; None if no key gives it."""
    if one.name == "original_max_position":
        return _original(source, section, kind.names[0])
    got = agreed(one.name, [section[key] for key in spelled if key in section])
    if got is not None or one.name != "factor":
        return got
    # A factor that is null, or that a rule may lack, is the ratio of the lengths, as transformers computes it.
    sections = [source.values.get(each) for each in keys.SECTION]
    held = [each for each in sections if isinstance(each, Mapping)]
    null = any(key in each and each[key] is None for each in held for key in spelled)
    if not null and one.default is not None:
        return None
    longest, original = _context(source), _stated_original(source, section)
    if longest is None or original is None:
        return None
    whole([longest, original])
    return Found(longest.value / original.value, f"{longest.source} / {original.source}")


def _context(source: Source) -> Found | None:
    found, others = _of_class(source, keys.MAX_POSITION)
    return agreed("the context length", [*found, *others])


def _of_class(source: Source, names: tuple[str, ...]) -> tuple[list[Found], list[Found]]:
    """A length by the keys that the class reads, and by those of other programs, which must agree."""
    facts = source.facts
    own = {names[0], *facts.keys, *facts.known, *facts.also, *facts.also.values()}
    mine = [name for name in names if not facts.made_by or name in own]
    got = source.given(*mine)
    if not got and (default := source.get(*mine)):
        got = [default]
    return got, source.given(*(name for name in names if name not in mine))


def _stated_original(source: Source, section: Section) -> Found | None:
    """The length at which scaling begins; Phi-3 has it at the outer level."""
    names, facts = keys.ORIGINAL_MAX_POSITION, source.facts
    inside = [section[key] for key in names if key in section]
    outside, others = _of_class(source, names)
    if outside and not inside and facts.nested and facts.made_by:
        fail(
            f"{outside[0].source} must stand in the rope section of each type of layers, as {facts.made_by} does not read "
            "it beside them"
        )
    # A class that has the key at the outer level takes its default, too, in place of that of a section.
    found = [each for each in inside if each.given] + outside or inside
    if others and not found:
        fail(
            f"{others[0].source} must not be given for {source.name}, as {facts.made_by} does not read it"
        )
    return agreed("original_max_position", found + others)


def _original(source: Source, section: Section, rule: str) -> Found | None:
    """The length at which a rule begins to scale; for some rules the context length if no key gives it."""
    got = _stated_original(source, section)
    if rule not in keys.SCALED_FROM_MAX_POSITION:
        return got
    context = _context(source)
    if context is None:
        return got
    if got is None:
        return context._replace(source=f"{context.source}, as no key gives the original length")
    # Nomic's code begins at its own key.
    own = got.source.endswith(keys.ORIGINAL_MAX_POSITION[0])
    if rule == "dynamic" and own and context.value != got.value:
        fail(
            f"'dynamic' scaling must begin at one length but the config has {got.source} = {got.value!r} and "
            f"{context.source} = {context.value!r}, which transformers takes; drop the one that does not count"
        )
    return got


def _check(kind: type[Rule], found: Facts) -> None:
    """Raise an error for parameters that are probably inverse or swapped."""
    numbers = {
        name.partition(".")[2]: each
        for name, each in found.items()
        if isinstance(each.value, int | float)
    }
    factor = numbers.get("factor")
    if factor is not None and kind.names[0] in keys.ONLY_LONGER and 0 < factor.value < 1:
        fail(
            f"{factor.source} must be at least 1, the ratio of the new to the old length, but got {factor.value}; its "
            f"inverse is {1 / factor.value:g}"
        )
    for high, low in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
        one, other = numbers.get(high), numbers.get(low)
        if one is not None and other is not None and one.value < other.value:
            fail(
                f"{one.source} must be at least {other.source} but got {one.value} and {other.value}; they are probably "
                "swapped"
            )


# Rule -> its parameters for factors on the rotated channels that not all programs read alike.
_MSCALES: dict[type[Rule], tuple[str, str]] = {
    YaRN: ("mscale", "mscale_all_dim"),
    LongRoPE: ("short_mscale", "long_mscale"),
}


def _check_mscales(source: Source, kind: type[Rule], values: dict[str, Any], found: Facts) -> None:
    """Raise an error for such parameters if they count in one program and not in another."""
    names = _MSCALES.get(kind, ())
    given = [name for name in names if values.get(name) is not None]
    stated = values.get("attention_factor") is not None
    if kind is YaRN:
        alike = stated or all(values.get(name) for name in names)
    else:  # classes of transformers do not read those of LongRoPE, but one
        own = source.family is None or source.values.get("model_type") in (None, "phimoe")
        alike = own or not (stated or values.get("factor") is not None)
    if alike or not given:
        return
    one, other = (_scales(kind, each) for each in (values, values | dict.fromkeys(names)))
    if one == other:
        return
    if kind is YaRN:
        fail(
            f"mscale and mscale_all_dim must both be given and not 0 but the config has only "
            f"{found['scaling.' + given[0]].source} = {values[given[0]]!r}: DeepSeek's code scales attention by "
            f"{one[0]:g}, transformers ignores the key and scales by {other[0]:g}"
        )
    fail(
        f"short_mscale and long_mscale must not be given for {source.name}: vLLM scales attention by {one[0]:g} and "
        f"{one[1]:g}, transformers ignores the keys and scales by {other[0]:g}"
    )


def _scales(kind: type[Rule], values: dict[str, Any]) -> list[float]:
    """The factors of a rule on the rotated channels: for short sequences and for long ones."""
    rule, pairs = kind(**values), len(values.get("short_factor") or [1])
    lengths = (None, values["original_max_position"] + 1)
    return [rule.frequencies(2 * pairs, 10000.0, each).attention_scaling for each in lengths]


def _attention_factor(section: Section, values: dict[str, Any]) -> Found | None:
    """YaRN's factor on the rotated channels with vLLM's and llama.cpp's keys for it; None without them."""
    times, switch = section.get("attn_factor"), section.get("apply_yarn_scaling")
    stated = section.get("attention_factor")
    if switch is not None and not boolean(switch):  # vLLM then scales by attn_factor alone
        alone = Found(1.0 if times is None else times.value, switch.source)
        return agreed("attention_factor", [alone] if stated is None else [stated, alone])
    if times is None or times.value == 1:
        return None
    if stated is not None:
        fail(
            f"attention_factor must have one value but got attention_factor = {stated.value!r} and {times.source} = "
            f"{times.value!r}"
        )
    if as_real(times.value) is None:
        fail(f"{times.source} must be a number but got {times.value!r}")
    return Found(times.value * _scales(YaRN, values)[0], times.source)


def given_by_factors(rotary_dim: int, base: float, factors: list[float]) -> Given:
    """The frequencies of a base, each divided by the factor of its pair."""
    exact = RopeSpec(rotary_dim, base=base).frequencies().exact
    return Given(tuple(float(omega) / factor for omega, factor in zip(exact, factors, strict=True)))
