"""Run the main function of a command in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch


def call(
    main: Callable[[], int], *arguments: object, width: int | str = 80
) -> tuple[int, str, str]:
    """Run a command with some arguments; return its exit code, output and error stream."""
    output, error = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["command", *map(str, arguments)]),
        patch.dict("os.environ", COLUMNS=str(width)),
        redirect_stdout(output),
        redirect_stderr(error),
    ):
        code = main()
    return code, output.getvalue(), error.getvalue()
