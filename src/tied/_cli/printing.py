"""What the command prints: text for people, one JSON document for machines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from tied._errors import TiedError

VERSION = 1
"""The version of the JSON documents; a key may be added under it, none is taken away or changed."""

_MOST_NAMES = 8
_STYLES = {"name": "1", "alias": "36", "good": "32", "bad": "31", "note": "33", "dim": "2"}


def coloured(stream: TextIO) -> bool:
    """Returns whether to write colours to a stream: a terminal, or as the environment says."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that understands escapes."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def clean(text: str) -> str:
    """Returns a text from a file without characters that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def paint(style: str, text: str, colour: bool) -> str:
    """Returns a text in a style."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour and text else text


@dataclass(frozen=True, slots=True)
class Console:
    """Where a command prints to.

    Attributes:
        command: Its name.
        json: Whether it prints JSON, and no text.
        colour: Whether the text is coloured.
    """

    command: str
    json: bool = False
    colour: bool = False

    def say(self, *lines: str) -> None:
        """Prints lines of text, unless JSON is asked for."""
        if not self.json:
            sys.stdout.write("".join(f"{line}\n" for line in lines))

    def paint(self, style: str, text: str) -> str:
        """Returns a text of a file, in a style."""
        return paint(style, clean(text), self.colour)

    def facts(self, facts: list[tuple[str, str]], style: str = "dim") -> None:
        """Prints labelled facts; a label that is there twice is printed once."""
        width = max((len(label) for label, _ in facts), default=0)
        before = ""
        for label, text in facts:
            shown = paint(style, (label if label != before else "").ljust(width), self.colour)
            self.say(f"{shown}  {clean(text)}")
            before = label

    def document(self, facts: dict[str, Any]) -> None:
        """Prints the JSON document of a command, if that is asked for."""
        if self.json:
            told = {"version": VERSION, "command": self.command, **facts}
            sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")

    def failed(self, error: TiedError | OSError) -> None:
        """Prints what made the input unusable: to stderr, and as JSON if that is asked for."""
        if isinstance(error, TiedError):
            text, facts, hint, paths = error.render(), error.facts, error.hint, error.paths
            message = error.message
        else:
            message = str(error.strerror or error).lower()
            named = [f"{x}" for x in (error.filename, error.filename2) if x]
            text = ": ".join([message, ", ".join(named)] if named else [message])
            facts, hint, paths = (), "", ()
        complain(text)
        told = {"message": message, "facts": [list(fact) for fact in facts], "hint": hint,
                "paths": list(paths)}  # fmt: skip
        self.document({"error": told})


def complain(text: str) -> None:
    """Prints an error to stderr."""
    lines = [clean(line) for line in text.splitlines()]
    head = paint("bad", "tied:", coloured(sys.stderr))
    sys.stderr.write("\n".join([f"{head} {lines[0]}", *lines[1:]]) + "\n")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number and what is counted: "1 tie", "1,200 ties"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def number_said(value: float) -> str:
    """Returns a number as short as it can be told apart: "3e-05", "12"."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
