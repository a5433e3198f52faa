"""Runs a command: its exit code, whatever happens."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from tied._cli.parser import COMMANDS, make_parser
from tied._cli.printing import Console, coloured, complain
from tied._errors import TiedError

DIFFERS, UNUSABLE, INTERRUPTED, NOBODY_READS = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit code: 0 the same, sound or done, 1 differs or not sound, 2 unusable input, 130
        interrupted, 141 if nobody reads what is printed.
    """
    options = make_parser().parse_args(argv)
    console = Console(options.command, options.json, coloured(sys.stdout))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warned
            code = COMMANDS[options.command].run(options, console)
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer would be an error again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except (TiedError, OSError) as error:
        console.failed(error)
        return UNUSABLE
    return code


def _warned(message: Warning | str, *of: object, **more: object) -> None:
    complain(f"warning: {message}")
