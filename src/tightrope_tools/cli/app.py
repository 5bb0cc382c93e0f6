"""The typer application: its commands, its help, and one-line errors with exit codes."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, cast

import typer

from ..command import begin
from ._console import make_console, settle_terminal
from ._mistakes import CLOSED, FINDING, MISTAKE
from .audit import audit
from .convert import convert
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


def _after_torch(command: Callable[..., None]) -> Callable[..., None]:
    """Import torch first, which takes seconds; help is printed without it."""

    @functools.wraps(command)
    def call(*arguments: Any, **options: Any) -> None:
        import tightrope  # noqa: F401

        begin()
        command(*arguments, **options)

    return call


for _command in (inspect, audit, convert, detect, info):
    app.command()(_after_torch(_command))

# UsageError is in click or in typer's own copy of it, depending on typer's version.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def _show_version(wanted: bool) -> None:
    if wanted:
        from tightrope import __version__

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

    `tightrope inspect config.json`   show a model's rotary embedding and its pitfalls

    `tightrope audit mymodel:apply_rope`   identify a rotary function and find its errors

    `tightrope convert CHECKPOINT OUT --to half`   rewrite a checkpoint for the other pairing

    `tightrope detect CHECKPOINT`   infer the pairing from a checkpoint's weights

    `tightrope info`   show versions, usable backends and hardware
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> int:
    """Run the command line on `sys.argv` and return its exit code; a wrong option prints one line."""
    settle_terminal()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show must not abort a long run.
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
        # rich and typer exit with 1 on a closed pipe; here 1 means a finding.
        if isinstance(left.__context__, BrokenPipeError):
            return _closed()
        raise
    except OSError as error:  # for example a full disk behind `>`
        sys.stderr.write(f"Error: the output could not be written: {error.strerror or error}.\n")
        _drop_output()
        return FINDING
    return code if isinstance(code, int) else 0


def _closed() -> int:
    _drop_output()
    return CLOSED


def _drop_output() -> None:
    """Discard buffered output, so that Python does not fail to flush it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a stream without a file descriptor
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
