"""The typer application: options shared by all commands, and how errors are worded."""

import io
import os
import sys
from contextlib import suppress
from typing import Annotated, cast

import typer

from .. import __version__
from ._console import make_console, settle_terminal
from ._mistakes import CLOSED, FINDING, MISTAKE
from .audit import audit
from .bench import bench
from .convert import convert
from .demo import demo
from .detect import detect
from .info import info
from .inspect import inspect

app = typer.Typer(
    name="tightrope",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(inspect)
app.command()(audit)
app.command()(convert)
app.command()(detect)
app.command()(bench)
app.command()(info)

# UsageError, whichever way this version of typer spells its module (click, or its own copy).
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def _show_version(wanted: bool) -> None:
    if wanted:
        make_console().print(f"tightrope {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Rotary position embedding for PyTorch: exact angles, fused forward and backward.

    Examples:

    `tightrope demo`   train a small transformer beside eager rotation, in two minutes

    `tightrope inspect config.json`   what a model's rotary embedding is, and what to mind about it

    `tightrope audit mymodel:apply_rope`   what somebody's rotary function is, and what is wrong with it

    `tightrope convert CHECKPOINT OUT --to half`   a checkpoint for the other pairing of channels

    `tightrope detect CHECKPOINT`   which pairing a checkpoint's weights speak for

    `tightrope bench`   how long a rotation takes here, beside what else is installed

    `tightrope info`   what is installed here, and which backend would run
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> int:
    """Run the command line on `sys.argv`; a wrong option is one line and exit code 2."""
    settle_terminal()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end a two-minute run.
            stream.reconfigure(errors="replace")
    try:
        code = app(prog_name="tightrope", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        text = str(getattr(error, "format_message", error.__str__)())
        make_console(stderr=True).print(f"Error: {text}", markup=False, soft_wrap=True)
        return MISTAKE
    except BrokenPipeError:
        return _closed()
    except SystemExit as left:
        # rich and typer leave with 1 where a pipe is closed, which here would mean a finding.
        if isinstance(left.__context__, BrokenPipeError):
            return _closed()
        raise
    except OSError as error:  # what was to be printed could not be written: a full disk behind `>`
        sys.stderr.write(f"Error: the output could not be written: {error.strerror or error}.\n")
        _drop_output()
        return FINDING
    return code if isinstance(code, int) else 0


def _closed() -> int:
    _drop_output()
    return CLOSED


def _drop_output() -> None:
    """Let what is still buffered go nowhere, so that Python does not fail on it while it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a stream that is no file
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
