"""Compare the spec of each model type of transformers, read from its configuration as a file, with what a model does.

    python -m benchmarks.coverage.configs

A small model of each type runs once, patched, and its calls of the operator are recorded: the pairing, the channels,
the layer and the angles of each token. The status of a row is:

- equal: every layer rotates by its spec and no other layer rotates; of a model with several parts, the layers of the
  part that a plain call reads;
- refused: `from_config` reads no spec, for the given reason;
- different: a call has another pairing, other channels or other angles;
- not tried: no small model shows the rotation, for the given reason.

Beside them are the published configurations whose specs the tests hold. It writes `results/coverage/configs.json` and
docs/config-coverage.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import class_files
from tightrope import RopeSpec, patch, unpatch
from tightrope.config import LayerSpecs, families, provenance
from tightrope.ops import schema

from ..pages import between_marks, table, with_marks, written
from . import models, transformers
from .catalogue import TRANSFORMERS
from .comparing import Subject, mapped, part_of

RESULTS = Path(__file__).resolve().parents[1] / "results" / "coverage" / "configs.json"
MODELS = RESULTS.parent / "transformers.json"
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "config-coverage.md"
PUBLISHED = ROOT / "tests" / "support" / "data" / "model_configs.json"
MARK = "config-coverage"
# Tables of float32 at small positions.
CLOSE = 2e-4
BACK = "the direction"


class Call(NamedTuple):
    """One call of the operator, and what it did.

    Attributes:
        path: the module that called it.
        width: the number of channels of the rotated tensor.
        angles: of the first row: `[tokens][pairs]`.
    """

    path: str
    width: int
    start: int
    interleaved: bool
    angles: list[list[float]]

    @property
    def layer(self) -> int:
        """The last number in the path."""
        return int((re.findall(r"\d+", self.path) or ["0"])[-1])

    @property
    def part(self) -> str:
        """The path without the numbers of layers."""
        return re.sub(r"\d+", "#", self.path)


class _Recorder(TorchDispatchMode):
    """Record the calls of the operator by tables."""

    def __init__(self, model: torch.nn.Module, stack: ExitStack) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._inside = [""]
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(self._enter(path)).remove)
            stack.callback(module.register_forward_hook(self._leave).remove)

    def _enter(self, path: str) -> Any:
        return lambda *_: self._inside.append(path)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tightrope" and func.__name__.startswith("rotate"):
            x, _, cos, sin, _, _, packed, *_ = args
            options = schema.options_of(packed)
            source = schema.SOURCES[options.source]
            apart = source == "repeat" or (source == "full" and options.interleaved)
            pairs = cos.shape[-1] // (1 if source == "half" else 2)
            some = slice(None, None, 2) if apart else slice(pairs)
            angles = torch.atan2(sin.double(), cos.double())[0, 0, :, some]
            self.calls.append(
                Call(
                    self._inside[-1],
                    x.shape[-1],
                    options.start,
                    options.interleaved,
                    angles.tolist(),
                )
            )
        return func(*args, **(kwargs or {}))


def calls_of(subject: Subject) -> list[Call]:
    """Run a small model, patched, and return its calls of the operator, without those of indexers."""
    with ExitStack() as stack, torch.no_grad():
        patch(subject.model, rounding="once", all_models=True)
        stack.callback(unpatch, subject.model)
        recorder = _Recorder(subject.model, stack)
        with recorder:
            part_of(subject.model, subject.part)(**mapped(torch.clone, subject.inputs))
    return [call for call in recorder.calls if "indexer" not in call.path]


def differs(call: Call, spec: RopeSpec) -> str:
    """Return how a call differs from a spec; empty if it does not."""
    if call.interleaved != spec.interleaved:
        return f"the pairing of {call.part}"
    pairs = len(call.angles[0]) if call.angles else 0
    # Some models cut the rotated channels out of a head first.
    whole = call.width == spec.head_dim and call.start == spec.start
    if 2 * pairs != spec.rotary_dim or not (whole or call.width == spec.rotary_dim):
        return f"the channels of {call.part}"
    owners = [0] * pairs if spec.axes is None else [axis for axis, _, _ in spec.axes.pairs]
    omega = [float(one) for one in spec.frequencies(1).exact]
    # The first token may be one of a class, with angles of its own.
    found = []
    for token, angles in enumerate(call.angles[1:14], 1):
        for axis in sorted(set(owners)):
            own = [(omega[k], angles[k]) for k, owner in enumerate(owners) if owner == axis]
            found.append(_coordinate(own))
            if found[-1] is None:
                return f"the angles of token {token} in {call.part}"
    # The column, the last coordinate, is the one that changes from patch to patch of a row.
    width = len(set(owners))
    for at in range(0, len(found) - width, width) if width > 1 else ():
        steps = zip(found[at : at + width], found[at + width : at + 2 * width], strict=True)
        changed = [n for n, (one, later) in enumerate(steps) if abs(one - later) > 1e-3]
        if len(changed) == 1 and changed != [width - 1]:
            return f"the order of the coordinates of {call.part}"
    # Positions in a text do not decrease. One step back is that of a model whose positions start again.
    back = sum(later < one for one, later in pairwise(found))  # type: ignore[operator]
    if len(set(owners)) == 1 and pairs > 1 and back > 1:  # one pair alone has no order of turns
        return f"{BACK} of {call.part}"
    return ""


def _coordinate(pairs: list[tuple[float, float]]) -> float | None:
    """Return the coordinate that rotates every pair (frequency, angle), the nearest to 0; None if there is none."""
    first, angle = max(pairs)
    for turns in sorted(range(-200, 201), key=abs):
        at = (angle + math.tau * turns) / (first or 1.0)
        if all(abs(math.remainder(at * omega - other, math.tau)) < CLOSE for omega, other in pairs):
            return at
    return None


def compared(specs: RopeSpec | LayerSpecs | None, calls: list[Call]) -> str:
    """Return how the calls of one part of a model differ from its specs; empty if they do not."""
    seen, back = set(), {}
    for call in calls:
        spec = specs.of(call.layer) if isinstance(specs, LayerSpecs) else specs
        if spec is None:
            return f"layer {call.layer} of {call.part} rotates"
        why = differs(call, spec)
        if why and not why.startswith(BACK):
            return why
        if why:
            back[call.layer] = why
        else:
            seen.add(call.layer)
    for layer, why in back.items():
        if layer not in seen:  # others also rotate what attention returns, backwards
            return why
    if isinstance(specs, LayerSpecs) and specs.layers is not None:
        for layer in range(len(specs.layers)):
            if specs.of(layer) is not None and layer not in seen:
                return f"layer {layer} does not rotate"
    return ""


def row(name: str) -> dict[str, Any]:
    """The row of a model type."""
    try:
        subject, _ = transformers.prepare(name)
        restore_tables(subject.model)
        config = json.loads(json.dumps(subject.model.config.to_dict(), default=str))
        calls = calls_of(subject)
    except Exception as error:  # noqa: BLE001 - recorded as the reason; the run continues
        return {
            "model": name,
            "status": "not tried",
            "reason": models.sentence(error).partition(". ")[0],
        }
    if not calls:
        return {"model": name, "status": "not tried", "reason": "no call of the operator"}
    try:
        found = provenance(fitted(config))
        named = str(found.rows[0].source if found.rows else "")
        # Of a model with several parts, one must agree.
        inner = config.get(named.partition(".")[0])
        nested = isinstance(inner, dict) and "model_type" in inner
        nested |= not any(
            key in config for key in ("rope_parameters", "rope_theta", "rope_scaling")
        )
        parts = defaultdict(list)
        for call in calls:
            parts[call.part if nested else ""].append(call)
        wrong = [compared(found.spec, each) for each in parts.values()]
    except (ValueError, NotImplementedError) as error:
        reason = str(error).removeprefix("[from_config] ")
        return {"model": name, "status": "refused", "reason": reason}
    if all(wrong):
        return {"model": name, "status": "different", "reason": wrong[0]}
    part = {"part": named.partition(".")[0]} if nested and "." in named else {}
    try:
        given = type(subject.model.config).from_dict(fitted(config))
        also = {} if provenance(given).spec == found.spec else {"object": "another spec"}
    except ValueError as error:
        also = {"object": str(error).removeprefix("[from_config] ")}
    return {"model": name, "status": "equal", **part, **also}


@torch.no_grad()
def restore_tables(model: torch.nn.Module) -> None:
    """Set tables of sines and cosines that are parameters, which a small model gets at random, as their classes do."""
    for module in model.modules():
        if hasattr(module, "create_weight"):
            module.weight.copy_(module.create_weight())


def fitted(config: Any) -> Any:
    """The configuration with sections that fit its pairs: interleaved ones that do not are cut off by the models."""
    if not isinstance(config, dict):
        return config
    made = {key: fitted(value) for key, value in config.items()}
    family = families.FAMILIES.get(str(config.get("model_type")))
    for section in _sections_of(made):
        if family is not None and family.axes == "interleaved sections":
            width = made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]
            pairs = int(width * section.get("partial_rotary_factor", 1)) // 2
            _, *others = section["mrope_section"]
            cut = [min(size, (pairs - axis + 2) // 3) for axis, size in enumerate(others, 1)]
            section["mrope_section"] = [pairs - sum(cut), *cut]
    return made


def _sections_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rope = config.get("rope_parameters") or {}
    for one in (rope, *rope.values()):
        if isinstance(one, dict) and one.get("mrope_section"):
            yield one


def published() -> dict[str, list[Any]]:
    """Read the published configurations that the tests hold: names and formats, or the reasons of refusals, by status."""
    found: dict[str, list[Any]] = {"equal": [], "different": [], "refused": []}
    files = json.loads(PUBLISHED.read_text("utf-8"))
    for each in files["refused"]:
        found["refused"].append([each["origin"], each["why"].removeprefix("[from_config] ")])
    for each in files["models"]:
        options = each.get("options", {})
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # that a length is not the published one, for example
            made = RopeSpec.from_config(each["config"], **options)
        wanted = each["wanted"]
        if "version" in wanted:
            equal = made == RopeSpec.from_dict(wanted)
        else:
            specs = {name: spec and RopeSpec.from_dict(spec) for name, spec in wanted.items()}
            equal = isinstance(made, LayerSpecs) and dict(made) == specs
        given = each["form"] + "".join(f", {name}={value!r}" for name, value in options.items())
        found["equal" if equal else "different"].append(f"{each['origin']} ({given})")
    return found


def styles() -> dict[str, dict[str, int]]:
    """Count the files of each style: read as their classes read them, read otherwise, or refused."""
    found = {}
    for style, (names, _) in class_files.STYLES.items():
        counts = {"equal": 0, "different": 0, "refused": 0, "only the object refused": 0}
        for name in names:
            for _, made, wanted in class_files.compared(name, style):
                if made is None:
                    counts["refused"] += 1
                elif wanted is None:
                    counts["only the object refused"] += 1
                else:
                    counts["equal" if made == wanted else "different"] += 1
        found[style] = counts
    return found


def page(data: dict[str, Any]) -> str:
    """The lists and tables of docs/config-coverage.md."""
    rows = data["models"]
    by_status = defaultdict(list)
    for each in rows:
        by_status[each["status"]].append(each)
    equal = by_status["equal"]
    lines = [
        f"transformers {data['version']}, torch {data['torch']}: {len(equal)} of {len(rows)} types that rotate are "
        f"read from their configuration as a file and equal the model; {len(by_status['refused'])} are refused, "
        f"{len(by_status['different'])} differ, {len(by_status['not tried'])} were not tried. "
        f"{sum('object' not in each for each in equal)} give the same spec from a configuration object.",
        "",
        "## Equal",
        "",
        ", ".join(
            f"`{each['model']}`" + (f" ({each['part']})" if "part" in each else "")
            for each in equal
        ),
    ]
    for status in ("different", "refused", "not tried"):
        if by_status[status]:
            cells = [[f"`{each['model']}`", each["reason"]] for each in by_status[status]]
            lines += ["", f"## {status.capitalize()}", "", *table(["model type", "reason"], cells)]
    files = data["published"]
    lines += [
        "",
        "## Published files",
        "",
        f"{len(files['equal'])} of {sum(map(len, files.values()))} configurations of published models give the spec that "
        "papers, model cards and modeling code state. In parentheses: the format (v4 and v5 of transformers, code of "
        "the repository, another program) and what is stated beside the file.",
        "",
        "; ".join(files["equal"]) + ".",
    ]
    if files["different"]:
        lines += ["", f"Different: {'; '.join(files['different'])}."]
    lines += ["", "Refused:", "", *table(["model", "reason"], files["refused"])]
    rows_ = [[style, *map(str, counts.values())] for style, counts in data["styles"].items()]
    lines += [
        "",
        "## Files of each style",
        "",
        "What a class of transformers makes of the same keys is the other side. *Saved* files have every key, and some one or "
        "two more, which other programs write; *older* ones have no rope section; *short* ones have the widths of a head and "
        "at most a few keys; *composite* ones have a text that says little more than its type. A refusal names the key that "
        "the class ignores, or what is missing.",
        "",
        *table(["style", "equal", "different", "refused", "only the object refused"], rows_),
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coverage.configs", description=__doc__
    )
    parser.add_argument("--only", default="", help="regular expression for model types")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument(
        "--page", type=with_marks(MARK), default=PAGE, help="the Markdown page to update"
    )
    options = parser.parse_args(arguments)
    for path in (options.results.parent, MODELS):
        if not path.exists():
            parser.error(f"{path} must exist.")
    import transformers as library
    from tqdm import tqdm

    models.quiet(TRANSFORMERS)
    old = (
        json.loads(options.results.read_text("utf-8"))["models"] if options.results.exists() else []
    )
    rotating = [
        each["model"]
        for each in json.loads(MODELS.read_text("utf-8"))["models"]
        if each.get("calls")
    ]
    chosen = [name for name in rotating if re.search(options.only, name)]
    kept = {each["model"]: each for each in old if each["model"] in rotating}
    kept |= {name: row(name) for name in tqdm(chosen, mininterval=5, unit="model")}
    data = {
        "version": library.__version__,
        "torch": torch.__version__,
        "models": [kept[name] for name in sorted(kept)],
        "published": published(),
        "styles": styles(),
    }
    options.results.write_text(written(data), encoding="utf-8")
    between_marks(options.page, MARK, page(data))
    print(page(data).partition("\n")[0])


if __name__ == "__main__":
    main()
