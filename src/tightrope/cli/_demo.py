"""The output of `tightrope demo`."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ..examples.train_bytes import Size
from ..workbench.demo import Results
from ..workbench.demo.polar import PEAK_RATE, TIMES_LONGER, Contest
from ..workbench.demo.race import Race
from ..workbench.demo.rotations import RUNS, Timing, is_steady, seconds
from ..workbench.text import duration
from ._tables import facts, titled

_METHOD = (
    f"Medians over {RUNS} runs; calls alternate in random order. q and k are transposed views, as in "
    "models. For 1024 tokens and more, caches are flushed before each call. Eager writes new tensors "
    "and has tables in the dtype of x. The floor reads and writes each byte once per pass: neg_ in "
    "place, otherwise clone."
)


def print_setting(console: Console, results: Results) -> None:
    """Print what is compared, and on which machine, before anything runs."""
    here, size, corpus = results.environment, results.size, results.corpus
    backend = f"backend {here.runs}"
    if here.instruction_set is not None:
        backend += f" ({here.instruction_set})"
    lines = {
        "compared": "one transformer trained twice, step by step side by side: q and k rotated by "
        "tightrope, and by the usual eager expression (rotate_half, float32 tables)",
        "same": f"weights (seed {results.seed}), batches and rates; only the rotation differs",
        "model": f"{results.parameters / 1e6:.2f} M parameters, {size.layers} layers, width "
        f"{size.width}, {size.heads} heads x {size.head_dim}, causal, bytes in and out",
        "rotation": f"all {size.head_dim} channels, base {results.spec.base:g}, float32",
        "batch": f"{size.batch} x {size.context} bytes",
        "text": f"the standard library of Python {here.python}: {corpus.files} files, "
        f"{corpus.train.numel() / 1e6:.2f} MB to train, "
        f"{corpus.validation.numel() / 1e6:.2f} MB from other files to validate",
        "here": f"tightrope {here.tightrope}, torch {here.torch}, {here.system}, {_threads(here.threads)}, "
        f"{backend}",
    }
    if here.why_not_faster is not None:
        lines["not faster"] = here.why_not_faster
    console.print(facts(lines.items()))
    console.print()


def print_training(console: Console, results: Results) -> None:
    """Print the two training runs side by side."""
    race = results.race
    if race.steps == 0:
        return
    table = titled(f"After {race.steps} steps")
    table.add_column("rotation", no_wrap=True)
    for column in ("first loss", "last loss", "validation", "bits per byte", "median step"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in race.runs:
        table.add_row(
            run.name,
            f"{run.losses[0]:.5f}",
            f"{run.losses[-1]:.5f}",
            _or_dash(run.validation, ".5f"),
            _or_dash(run.bits_per_byte, ".3f"),
            "-" if run.median_step is None else duration(run.median_step),
        )
    console.print(table)
    first, second = (run.median_step for run in race.runs)
    lines = {
        "curves": f"differ by at most {max(race.differences):.1e} nats per byte over all steps, "
        f"{race.differences[0]:.1e} at step 1",
        "gradients": f"of all parameters at step 1 differ by {race.first_gradient_difference:.1e} "
        f"of their norm; with a base 1 % too low, by {results.wrong_gradient_difference:.1e}",
        "for scale": f"prediction from byte frequencies alone has a loss of {results.entropy:.3f} nats",
    }
    if first is not None and second is not None:
        lines["step time"] = f"eager / tightrope = {second / first:.3f}"
    shares = results.rotation_shares
    if shares is not None and results.in_model is not None:
        ours, eager = (seconds(results.in_model, name) for name in ("tightrope", "eager"))
        lines["rotation"] = (
            f"takes about {shares[0]:.1%} of a tightrope step and {shares[1]:.1%} of an eager one "
            f"(forward and backward alone on a layer's q and k, {duration(ours)} and "
            f"{duration(eager)}, times {results.size.layers} layers)"
        )
    elif results.in_model is not None:
        lines["rotation"] = (
            "its share of a step could not be measured: other processes used the cores"
        )
    console.print(facts(lines.items()))
    console.print()


def print_sample(console: Console, results: Results) -> None:
    """Print text that the trained model generated."""
    sample = results.sample
    if sample is None:
        return
    text = "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in sample.text)
    title = f"The tightrope model continues {sample.prompt!r}, temperature {sample.temperature:g}"
    console.print(Panel(Text(text), title=Text(title), title_align="left"))
    console.print(
        "Decoded token by token at integer offsets with cached keys; these logits and those of one "
        f"pass over the whole text differ by at most {sample.logit_difference:.1e}.\n"
    )


def print_timings(console: Console, timings: list[Timing]) -> None:
    """Print the times of rotations alone."""
    if not timings:
        return
    case = timings[0]["case"]
    table = titled(
        f"Rotating q ({case['q_heads']} heads) and k ({case['k_heads']} heads) x {case['head_dim']}"
    )
    for column in ("tokens", "what", "type"):
        table.add_column(column, no_wrap=True)
    for column in ("eager", "tightrope", "floor", "faster", "/ floor"):
        table.add_column(column, justify="right", no_wrap=True)
    for timing in timings:
        case = timing["case"]
        ours, eager, floor = (seconds(timing, name) for name in ("tightrope", "eager", "floor"))
        table.add_row(
            str(case["tokens"]),
            case["work"],
            case["dtype"].replace("bfloat", "bf").replace("float", "fp"),
            duration(eager),
            duration(ours),
            duration(floor),
            Text(f"{eager / ours:.1f}x", style="bold"),
            f"{ours / floor:.2f}x",
        )
    console.print(table)
    console.print(_METHOD)
    unsteady = sum(not is_steady(timing) for timing in timings)
    if unsteady:
        console.print(
            f"Other processes were using the cores: in {unsteady} of {len(timings)} rows the runs "
            "disagree. Do not quote these times; run again on a quiet machine.",
            style="bold yellow",
        )
    console.print()


def print_contest(console: Console, contest: Contest) -> None:
    """Print polar attention and plain RoPE attention side by side."""
    race, size = contest.race, contest.size
    if race.steps == 0:
        return
    context = size.context
    console.print("Polar attention and plain RoPE attention", style="bold")
    console.print(
        facts(
            {
                "compared": "tightrope.nn.PolarRoPEAttention with its gates, and without them, which is "
                "plain RoPE attention; the same text, weights, batches and rates",
                "gates": "each pair of channels has a constant gate, and one that depends on the "
                "position p: exp(-rate p) on queries, exp(rate p) on keys. The pair's contribution to "
                "a score shrinks with the distance; both gates are learned",
                "model": f"{contest.parameters / 1e6:.2f} M parameters, {size.layers} layers, width "
                f"{size.width}, {size.heads} heads x {size.head_dim}, batch {size.batch} x "
                f"{context} bytes, highest rate {PEAK_RATE:g}",
            }.items()
        )
    )
    console.print()
    table = titled(f"After {race.steps} steps: nats per byte, by the byte's position in the window")
    table.add_column("attention", no_wrap=True)
    for column in ("training", *_stretches(context), "median step"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in race.runs:
        stretches = contest.stretches(run.name)
        table.add_row(
            run.name,
            f"{contest.last_loss(run):.3f}",
            *([f"{loss:.3f}" for loss in stretches] or ["-"] * TIMES_LONGER),
            "-" if run.median_step is None else duration(run.median_step),
        )
    console.print(table)
    ours, plain = race.runs
    lines = {}
    past = {run.name: contest.past_length(run.name) for run in race.runs}
    if past[ours.name] is not None and past[plain.name] is not None:
        lines["past training"] = (
            f"windows are {TIMES_LONGER} times as long as in training; from their first {context} "
            f"bytes to the others, the loss per byte changes by {past[plain.name]:+.3f} nats "
            f"({plain.name}) and {past[ours.name]:+.3f} ({ours.name})"
        )
    halves = sorted(distance for pair in contest.half_distances for distance in pair)
    lines["learned gates"] = (
        f"a pair's contribution to a score halves over {halves[0]:.0f} to {halves[-1]:.0f} bytes of "
        f"distance (median {median(halves):.0f}; {contest.first_half_distance:.0f} before training)"
    )
    console.print(facts(lines.items()))
    console.print()


def _stretches(context: int) -> list[str]:
    return [f"{i * context + 1}-{(i + 1) * context}" for i in range(TIMES_LONGER)]


def caption(results: Results) -> str:
    """Return the lines below the picture: models, versions, number of threads."""
    here, race, contest = results.environment, results.race, results.contest
    first = [_of(results.size, race), f"seed {results.seed}"]
    if race.steps:
        first.append(f"curves differ by at most {max(race.differences):.1e}")
    first.append(
        f"tightrope {here.tightrope} (backend {here.runs}), torch {here.torch}, "
        f"Python {here.python}, {_threads(here.threads)}"
    )
    if not all(map(is_steady, results.timings)):
        first.append("times unreliable: the machine was busy")
    if results.interrupted:
        first.append("stopped early")
    lines = ["   |   ".join(first)]
    if contest.race.steps:
        lines.append(f"second row: {_of(contest.size, contest.race)}")
    return "\n".join(lines)


def _of(size: Size, race: Race) -> str:
    return (
        f"{size.layers} layers, width {size.width}, {size.heads} heads x {size.head_dim}, "
        f"context {size.context}, batch {size.batch}, {race.steps} steps"
    )


def _threads(count: int) -> str:
    return f"{count} thread" + ("s" if count != 1 else "")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
