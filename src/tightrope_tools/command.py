"""Rotary position embedding for PyTorch: exact angles, fused forward and backward.

Commands; each has --help with its options and examples:

  inspect   show a model's rotary embedding and its pitfalls
  audit     identify a rotary function and find its errors
  convert   rewrite a checkpoint for the other pairing
  detect    infer the pairing from a checkpoint's weights
  info      show versions, usable backends and hardware

Examples:

  tightrope inspect config.json
  tightrope audit mymodel:apply_rope
  tightrope convert CHECKPOINT OUT --to half
"""

# The docstring above is the help. A command is a module of `cli`: its docstring is its help, `add_arguments` adds its
# options, and `run` returns its exit code. It is imported when it is called, and torch after its arguments are read.

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NoReturn

from .cli._output import CLOSED, FINDING, MISTAKE, Mistake

#: The packages of the extra `tools`.
NEEDS = ("matplotlib", "safetensors")

COMMANDS = ("inspect", "audit", "convert", "detect", "info")


class _Parser(argparse.ArgumentParser):
    def __init__(self, name: str, text: str | None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(name, description=text, formatter_class=as_written, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise Mistake(message)

    def print_help(self, file: Any = None) -> None:
        # The method of argparse ignores a closed pipe and a full disk.
        (file or sys.stdout).write(self.format_help())


def main() -> int:
    """Run the command line and return its exit code."""
    _prepare_streams()
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except Mistake as mistake:
        sys.stderr.write(f"Error: {mistake}\n")
        return mistake.code
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130
    except BrokenPipeError:
        os._exit(CLOSED)  # an exit that flushes the output would fail again
    except OSError as error:  # for example a full disk behind `>`
        sys.stderr.write(f"Error: the output could not be written: {error.strerror or error}.\n")
        sys.stderr.flush()
        os._exit(FINDING)
    return code


def _run(words: list[str]) -> int:
    name = words[0] if words else "--help"
    try:
        if name not in COMMANDS:
            parser = _Parser("tightrope", __doc__)
            parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", nargs="?")
            parser.add_argument("--version", action="store_true", help="print the version and exit")
            parser.parse_args([name, *words[1:]])
            sys.stdout.write(f"tightrope {_version()}\n")
            return 0
        command = importlib.import_module(f".cli.{name}", __package__)
        parser = _Parser(f"tightrope {name}", command.__doc__)
        command.add_arguments(parser)
        options = parser.parse_intermixed_args(words[1:])
    except SystemExit:  # after --help; a wrong option is a Mistake
        return 0
    return _begin() or int(command.run(options))


def _begin() -> int:
    """Import torch, which takes seconds; return an exit code other than 0 if packages are missing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The tightrope command needs {', '.join(missing)}. Install with `python -m pip install "
            '"tightrope[tools]"`, or in a clone of the repository with '
            "`pip install --no-build-isolation '.[tools]'`.\n"
        )
        return MISTAKE
    # No work has begun: Ctrl-C ends the process, as C code may swallow an exception. If ignored, it stays ignored.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import tightrope  # noqa: F401

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return 0


def _version() -> str:
    try:
        return version("tightrope")
    except PackageNotFoundError:  # source that is on the path but not installed
        return "0+uninstalled"


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show must not abort a long run.
            stream.reconfigure(errors="replace")
