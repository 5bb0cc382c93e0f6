"""The base class of frequency rules, their result type, and the registry of their names."""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch

from .._errors import (
    bad_type,
    bad_value,
    describe,
    integer,
    plain_integer,
    positive,
    public,
    unsupported,
)
from .._value import Value, dictionary, field_names, from_fields

#: The decimal arithmetic of rules, with 60 digits: 20 for the 64 bits of a phase word, and 40 as a
#: margin for the rounding of up to thousands of products.
CONTEXT = decimal.Context(prec=60)
#: The turn in radians, 2π, to 80 digits.
TWO_PI = Decimal(
    "6.28318530717958647692528676655900576839433879875021164194988918461563281257241799"
)

#: The longest context that rules and configurations may state; docs/numerics.md states an error
#: bound for positions below it.
LONGEST = 2**31

# Every frequency is below this, in radians per position. So its whole turns fit in int64, and
# CONTEXT also has digits for the 64-bit fraction.
_FASTEST = 1e18

Keys: TypeAlias = Mapping[str, tuple[str, ...]]

#: A length of a sequence, or one for each row.
Length = TypeVar("Length", float, torch.Tensor)


@dataclass(frozen=True)
class Frequencies:
    """The result of a frequency rule.

    Attributes:
        exact: angular frequency of each pair in radians per position, to 60 digits; flattened.
        attention_scaling: factor on the rotated channels (YaRN, LongRoPE); 1.0 for most rules.
        shape: the shape that ``exact`` flattens: None for ``(pairs,)``, else ``(heads, pairs)`` or
            ``(axes, heads, pairs)``.
    """

    exact: tuple[Decimal, ...]
    attention_scaling: float = 1.0
    shape: tuple[int, ...] | None = None

    @property
    def inv_freq(self) -> torch.Tensor:
        """The frequencies as a float64 CPU tensor of shape ``shape``, in radians per position."""
        flat = torch.tensor(
            [float(omega) for omega in self.exact], dtype=torch.float64, device="cpu"
        )
        return flat if self.shape is None else flat.reshape(self.shape)

    def are(self, stored: torch.Tensor) -> bool:
        """Return whether stored frequencies are these, rounded to the dtype that stores them.

        The relative error may be 1e-6 or, for dtypes narrower than float32, 4 eps of the dtype.
        """
        exact = self.inv_freq
        if not stored.is_floating_point() or stored.shape != exact.shape:
            return False
        limits = torch.finfo(stored.dtype)
        # Allow two roundings to the saved dtype, one of the power of the base and one of the cast, and
        # underflow below its smallest number.
        relative, absolute = max(4 * limits.eps, 1e-6), limits.smallest_normal * limits.eps
        read = stored.detach().to("cpu", torch.float64)
        return torch.allclose(read, exact, rtol=relative, atol=absolute)

    def __repr__(self) -> str:
        # Without the 60 digits of each pair.
        ends = [repr(float(omega)) for omega in self.exact]
        shown = ", ".join(ends if len(ends) < 3 else (ends[0], "…", ends[-1]))
        shape = self.shape or (len(ends),)
        return f"Frequencies(inv_freq=[{shown}], shape={shape}, attention_scaling={self.attention_scaling})"


RULES: dict[str, type[Rule]] = {}
"""The class of each rule, by all its names."""


@public("seq_len")
def length(value: object) -> int:
    """Check the length of a sequence and return it as an int.

    Raises:
        ValueError, TypeError: an invalid length.

    >>> length(5)
    5
    """
    number = integer("a length", value, kind="an int, or one per row,", tensors=True)
    if number < 0:
        raise bad_value(f"a length must not be negative but got {number}")
    return number


class Rule(Value):
    """A frequency rule with its parameters; rules are frozen dataclasses that derive from this class.

    A subclass declares its fields, checks them in ``__post_init__`` and defines :meth:`make`. Specs,
    their dictionaries and the configuration reader then support it.

    Attributes:
        names: its names in configurations (``rope_type``); the first is its name in dictionaries. A rule without
            names cannot be saved.
        keys: the names of fields in the rope section of a configuration, where they differ; see :meth:`spellings`.
        by_length: whether the frequencies depend on the length of the sequence. Such a rule has a
            field ``original_max_position``, up to which the frequencies are the same.
    """

    names: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[Keys] = {}
    by_length: ClassVar[bool] = False
    original_max_position: int  # for rules with by_length

    @public()
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in cls.__dict__.get("names", ()):
            other = RULES.get(name, cls)
            # Reloading a module defines its classes again.
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise bad_value(
                    f"names must be new but got {name!r}, which belongs to {other.__name__}"
                )
            RULES[name] = cls
        # A scale that is inherited from behind other frequencies is not theirs.
        owners = {
            name: next(at for at, each in enumerate(cls.__mro__) if name in each.__dict__)
            for name in ("make", "regime", "frequencies", "scale_beyond")
        }
        if owners.pop("scale_beyond") > min(owners.values()):
            cls.scale_beyond = Rule.scale_beyond  # type: ignore[method-assign]

    @classmethod
    def spellings(cls) -> dict[str, tuple[str, ...]]:
        """Return the names of each field in the rope section of a configuration.

        >>> from tightrope.frequencies import NTK
        >>> NTK.spellings()
        {'factor': ('factor', 'alpha')}
        """
        _check_class(cls)
        usual = {"original_max_position": ("original_max_position_embeddings",)}
        keys = usual | dict(cls.keys)
        return {name: keys.get(name, (name,)) for name in field_names(cls)}

    @public()
    def frequencies(self, rotary_dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        """Return the frequencies of the pairs and the factor on the rotated channels.

        A pure function with a cache: no result depends on an earlier call.

        Args:
            rotary_dim: number of channels that rotate; even.
            base: base of the geometric row of frequencies.
            seq_len: length of the sequence, for a rule with ``by_length``; None for any length up
                to ``original_max_position``.

        Raises:
            ValueError: parameters that do not fit the number of pairs or the base; a frequency of
                1e18 radians per position or more; a negative length.
            TypeError: a length that is not an int, whether or not the rule depends on it.
        """
        regime = None if seq_len is None else self.regime(length(seq_len))
        rotary_dim = integer("rotary_dim", rotary_dim)
        if rotary_dim < 0 or rotary_dim % 2:
            raise bad_value(f"rotary_dim must be even and not negative but got {rotary_dim}")
        return _made(self, rotary_dim, positive("base", base), regime)

    def regime(self, seq_len: int | None) -> int | None:
        """Map a length to a representative one: lengths with equal results have equal frequencies.

        Returns:
            None up to the original length and for rules that ignore the length; else a length.
        """
        if not self.by_length or seq_len is None or seq_len <= self.original_max_position:
            return None
        return seq_len

    def make(self, rotary_dim: int, base: float, seq_len: int | None) -> Frequencies:
        """Compute the frequencies; every subclass defines this.

        It runs under :data:`CONTEXT`, so plain decimal arithmetic has 60 digits.

        Args:
            rotary_dim: even; 0 if no channel rotates.
            base: positive.
            seq_len: None, or a length above ``original_max_position``.
        """
        raise NotImplementedError

    def scale_beyond(self, length: Length) -> Length:  # noqa: ARG002
        """Return the scale s of a sequence beyond the original length, at least 1.

        Its frequencies are those within the original length, each multiplied by s^(−exponent), see
        :meth:`scale_exponents`. They are computed in float64 on the device, also for lengths that the host
        does not read. The attention scaling is that of shorter sequences. Used unless :meth:`regime` maps all
        these lengths to one.

        Args:
            length: a float, or a float64 tensor ``(rows,)``, which may be traced; at least
                ``original_max_position``.

        Raises:
            NotImplementedError: the rule does not define this method.
        """
        raise self._by_length_only()

    def scale_exponents(self, pairs: int) -> list[float]:  # noqa: ARG002
        """Return the exponent of each pair for :meth:`scale_beyond`, none negative.

        Args:
            pairs: number of pairs.
        """
        raise self._by_length_only()

    def _by_length_only(self) -> Exception:
        name = type(self).__name__
        return unsupported(
            f"{name} must define scale_beyond and scale_exponents for sequences beyond its original length, or "
            "a regime that maps all of them to one length"
        )

    @property
    def softmax_scaling(self) -> float:
        """The factor on the model's softmax scale; 1.0 for all rules but YaRN in DeepSeek's attention.

        It belongs to attention, so this library does not apply it.
        """
        return 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the name and fields in JSON types.

        Raises:
            ValueError: a rule without a name, or whose name belongs to another class since: :meth:`from_dict` would
                make another rule.

        >>> from tightrope.frequencies import Linear
        >>> Linear(4.0).to_dict()
        {'rule': 'linear', 'factor': 4.0}
        """
        kind = type(self)
        if not self.names or RULES[self.names[0]] is not kind:
            raise bad_value(
                f"{kind.__name__} must have names of its own to be saved, such as names = ('mine',), and must not be "
                "defined anew before"
            )
        values = map(_listed, self._values())
        return {"rule": self.names[0]} | dict(zip(field_names(type(self)), values, strict=True))

    @staticmethod
    @public("from_dict")
    def from_dict(fields: Mapping[str, Any]) -> Rule:
        """Make a rule from the result of :meth:`to_dict`.

        Raises:
            ValueError: an unknown rule, an unknown or missing field, or a value out of range.
            TypeError: a value of the wrong type.

        >>> Rule.from_dict({"rule": "linear", "factor": 4.0})
        Linear(factor=4.0)
        """
        values = dictionary("a rule", fields)
        name = values.pop("rule", None)
        kind = RULES.get(name) if isinstance(name, str) else None
        if kind is None:
            raise bad_value(
                f"rule must be one of {', '.join(sorted(RULES))} but got {name!r}; a rule of your own is known once "
                "the module of its class is imported"
            )
        return from_fields(f"rule {name!r}", kind, values)

    # Each method below checks fields and stores their values in the normal type, or raises an error.

    @public()
    def _positive(self, *fields: str, zero: bool = False, optional: bool = False) -> None:
        for field in fields:
            value = getattr(self, field)
            if value is not None or not optional:
                self._set(**{field: positive(field, value, zero)})

    @public()
    def _length(self, least: int = 1) -> None:
        field = "original_max_position"
        length = plain_integer(field, getattr(self, field))
        if not least <= length <= LONGEST:
            raise bad_value(
                f"{field} must be at least {least}, at most {LONGEST}, but got {length}"
            )
        self._set(**{field: length})


@lru_cache(maxsize=512)
def _made(rule: Rule, rotary_dim: int, base: float, regime: int | None) -> Frequencies:
    _check_class(type(rule))
    with decimal.localcontext(CONTEXT):
        made = rule.make(rotary_dim, base, regime)
        if not isinstance(made, Frequencies):
            raise bad_type(f"make must return Frequencies but returned {describe(made)}")
        made = replace(made, exact=tuple(map(Decimal, made.exact)))  # floats too, exactly
        fastest = float(max(map(abs, made.exact), default=0))
    shape = made.shape or (len(made.exact),)
    if shape[-1] != rotary_dim // 2 or math.prod(shape) != len(made.exact):
        raise bad_value(
            f"make must return one frequency per pair, {rotary_dim // 2}, but returned {len(made.exact)} of shape {shape}"
        )
    if fastest >= _FASTEST:
        raise bad_value(
            f"every frequency must stay below {_FASTEST:g} radians per position but got {fastest:g}"
        )
    return made


def _check_class(kind: type[Rule]) -> None:
    """Refuse a rule whose values could change: its phase words are kept."""
    params = getattr(kind, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise bad_type(f"{kind.__name__} must be decorated with @dataclass(frozen=True)")


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
