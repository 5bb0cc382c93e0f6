"""The results of one demo, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import method

from ...examples.train_bytes import Size, Text
from ...spec import RopeSpec
from ..environment import Environment
from ..place import write_whole
from .polar import PEAK_RATE as POLAR_RATE, Contest
from .race import PEAK_RATE, Race, Run
from .rotations import Timing, is_steady, seconds
from .sample import Sample


@dataclasses.dataclass
class Results:
    """The settings and results of a demo; parts that were not reached stay empty.

    Attributes:
        wrong_gradient_difference: relative difference of the first gradients with a base 1 % too low.
        in_model: times of the rotation of one layer of the trained model, forward and backward.
    """

    seed: int
    environment: Environment
    spec: RopeSpec
    size: Size
    corpus: Text
    race: Race
    contest: Contest
    wrong_gradient_difference: float
    sample: Sample | None = None
    in_model: Timing | None = None
    timings: list[Timing] = dataclasses.field(default_factory=list)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.entropy = byte_entropy(self.corpus.train)

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.race.runs[0].model.parameters())

    @property
    def rotation_shares(self) -> tuple[float, float] | None:
        """Rotation's share of a step, with tightrope and with eager; None if times are missing or unsteady."""
        steps = [run.median_step for run in self.race.runs]
        if self.in_model is None or not is_steady(self.in_model) or None in steps:
            return None
        names = ("tightrope", "eager")
        ours, eager = (
            self.size.layers * seconds(self.in_model, name) / step
            for name, step in zip(names, steps, strict=True)
            if step is not None
        )
        return ours, eager

    def write_json(self, path: Path) -> None:
        """Write all numbers to `path` as JSON."""
        shares = self.rotation_shares
        document = {
            "interrupted": self.interrupted,
            "seed": self.seed,
            "environment": dataclasses.asdict(self.environment),
            "spec": {
                "head_dim": self.spec.head_dim,
                "base": self.spec.base,
                "wavelengths": _wavelengths(self.spec),
            },
            "text": {
                "source": "the standard library of this Python",
                "files": self.corpus.files,
                "train_bytes": self.corpus.train.numel(),
                "validation_bytes": self.corpus.validation.numel(),
                "sha256": self.corpus.sha256,
                "byte_entropy_nats": self.entropy,
            },
            "model": dataclasses.asdict(self.size) | {"parameters": self.parameters},
            "training": {
                "steps": self.race.steps,
                "peak_learning_rate": PEAK_RATE,
                "learning_rates": self.race.rates,
                "first_gradient_relative_difference": self.race.first_gradient_difference,
                "wrong_base_gradient_relative_difference": self.wrong_gradient_difference,
                "max_loss_difference": max(self.race.differences, default=None),
                "rotation_shares": shares and {"tightrope": shares[0], "eager": shares[1]},
                "runs": {run.name: _run(run) for run in self.race.runs},
            },
            "sample": self.sample and dataclasses.asdict(self.sample),
            "timings": {
                "method": method.__doc__,
                "in_model": self.in_model,
                "cases": self.timings,
            },
            "polar": _contest(self.contest),
        }
        write_whole(path, (json.dumps(document, indent=2) + "\n").encode())


def _wavelengths(spec: RopeSpec) -> list[float]:
    inv_freq = spec.frequencies().inv_freq
    wavelengths: list[float] = (2 * torch.pi / inv_freq).tolist()
    return wavelengths


def _run(run: Run) -> dict[str, Any]:
    return {
        "losses": run.losses,
        "step_seconds": run.seconds,
        "median_step_seconds": run.median_step,
        "validation_nats_per_byte": run.validation,
        "validation_bits_per_byte": run.bits_per_byte,
    }


def _contest(contest: Contest) -> dict[str, Any]:
    race, size = contest.race, contest.size
    return {
        "model": dataclasses.asdict(size) | {"parameters": contest.parameters},
        "steps": race.steps,
        "peak_learning_rate": POLAR_RATE,
        "learning_rates": race.rates,
        "half_distances": contest.half_distances,
        "runs": {
            run.name: {
                "losses": run.losses,
                "step_seconds": run.seconds,
                "median_step_seconds": run.median_step,
                "nats_per_byte_by_position": contest.by_position.get(run.name, []),
                "nats_per_byte_by_stretch": contest.stretches(run.name),
            }
            for run in race.runs
        },
    }


def byte_entropy(text: torch.Tensor) -> float:
    """Return the loss in nats per byte of a model that knows only byte frequencies."""
    shares = torch.bincount(text.long(), minlength=256).double() / text.numel()
    return float(torch.special.entr(shares).sum())
