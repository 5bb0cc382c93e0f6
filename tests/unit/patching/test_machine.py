"""Sequences of patch, unpatch, foreign patches, copies and deletions of models of one file, against a model of the contract."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from torch import nn

from tests.support import zoo
from tests.support.zoo import turn
from tightrope import patch, unpatch

X, COS, SIN = (
    torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
    for size in ((1, 2, 5, 16), (1, 5, 16), (1, 5, 16))
)


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    return turn(x, cos[:, None], sin[:, None])


def plus(x: Any, cos: Any, sin: Any) -> Any:
    """The function that another library puts under the name."""
    return rotary(x, cos, sin) + 1


FILE: Any = zoo.file_of(rotary)
PLAIN: dict[str, Any] = {}
ONCE: dict[str, Any] = {"rounding": "once"}
ALL: dict[str, Any] = {"rounding": "once", "all_models": True}


def once() -> Any:
    model = FILE.Model()
    with patch(model, **ONCE):
        return model(X, COS, SIN)


def said(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no option"


class Patched(RuleBasedStateMachine):
    """Models of one file. ``self.by`` has the options of the patched ones, by the index of a model."""

    models = Bundle("models")

    @initialize(target=models)
    def start(self) -> Any:
        self.alive: list[nn.Module] = [FILE.Model(), FILE.Model()]
        self.by: dict[int, dict[str, Any]] = {}
        self.foreign, self.disturbed = False, False
        self.once = once()
        return multiple(0, 1)

    def options(self) -> dict[str, Any] | None:
        """The options of the patched models; None if there is none."""
        return next(iter(self.by.values()), None)

    @rule(at=models, options=st.sampled_from([PLAIN, ONCE, ALL]))
    def patch(self, at: int, options: dict[str, Any]) -> None:
        """Options other than those of the file are refused, and change nothing."""
        model, held = self.alive[at], self.options()
        if self.foreign and held is None:
            return  # the other function is of no kind
        if held is None or held == options:
            report = patch(model, **options)
            assert report.replaced
            assert patch(model, **options) is report
            self.by[at] = options
            return
        try:
            patch(model, **options)
        except ValueError as error:
            assert said(held) in str(error)  # noqa: PT017
            assert "unpatch" in str(error)  # noqa: PT017
        else:
            raise AssertionError("two options in one file")

    @precondition(lambda self: self.by)
    @rule(at=models)
    def unpatch(self, at: int) -> None:
        unpatch(self.alive[at])
        self.by.pop(at, None)
        if not self.by and not self.disturbed:
            assert FILE.apply_rope is rotary
            assert "_call_impl" not in vars(FILE.Model)

    def added(self, model: nn.Module) -> int:
        self.alive.append(model)
        return len(self.alive) - 1

    @precondition(lambda self: self.by and len(self.alive) < 4)
    @rule(target=models, at=models)
    def copy(self, at: int) -> int:
        """A copy of a patched model counts as patched."""
        made = self.added(copy.deepcopy(self.alive[at]))
        self.by |= {made: self.by[at]} if at in self.by else {}
        return made

    @precondition(lambda self: self.by and len(self.alive) < 4)
    @rule(target=models, at=models)
    def pickle(self, at: int) -> int:
        """A pickled model is loaded unpatched."""
        return self.added(pickle.loads(pickle.dumps(self.alive[at])))

    @precondition(lambda self: sum(type(model) is not nn.Identity for model in self.alive) > 1)
    @rule(at=consumes(models))
    def delete(self, at: int) -> None:
        """What a model that is gone used is restored."""
        self.alive[at] = nn.Identity()
        self.by.pop(at, None)

    @precondition(lambda self: self.by and not self.foreign)
    @rule()
    def put_another_function_there(self) -> None:
        self.below, FILE.apply_rope = FILE.apply_rope, plus
        self.foreign = self.disturbed = True

    @precondition(lambda self: self.foreign)
    @rule()
    def take_it_away_again(self) -> None:
        """The other library restores what it found, as monkeypatches do: perhaps a replacement that is undone."""
        FILE.apply_rope = self.below
        self.foreign = False

    @invariant()
    def each_model_has_the_bits_of_the_contract(self) -> None:
        options = self.options()
        own = self.once if options in (ONCE, ALL) else rotary(X, COS, SIN)
        want = plus(X, COS, SIN) if self.foreign else own
        for at, model in enumerate(self.alive):
            if isinstance(model, nn.Identity):
                continue
            refused = options == ONCE and at not in self.by
            try:
                found = model(X, COS, SIN)
            except ValueError as error:
                assert refused, error  # noqa: PT017
                continue
            assert not refused
            assert torch.equal(found, want), (at, options)

    def teardown(self) -> None:
        for model in getattr(self, "alive", ()):
            unpatch(model)
        FILE.apply_rope = rotary


Patched.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_sequences = Patched.TestCase
