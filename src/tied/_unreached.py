"""The arrays of a model that a walk could not reach: reported, warned of, or refused."""

from __future__ import annotations

import warnings
from typing import Any

from tied import _hidden
from tied._errors import HiddenArrayError, HiddenArrayWarning, TiedError, callers_level
from tied._path import Path
from tied._walk import Walk


def arrays(walk: Walk) -> list[tuple[Path, Any, Any]]:
    """Returns (path, object, array) for each closed object of a walk that hides an array."""
    if not walk.closed:
        return []
    found = []
    for node, position, x in walk.closed:
        array = _hidden.find(x)
        if array is not None:
            found.append((walk.place(node, position), x, array))
    return found


def check(walk: Walk, mode: str) -> None:
    """Warns of, or refuses, arrays that a walk could not reach.

    Args:
        walk: The walk.
        mode: "warn", "raise" or "keep" (say nothing).

    Raises:
        HiddenArrayError: There is one, and the mode is "raise".
        ValueError: The mode is another.
    """
    if mode not in ("warn", "raise", "keep"):
        raise TiedError(f"hidden={mode!r} is unknown", hint='Type "warn", "raise" or "keep"')
    if mode == "keep":
        return
    for path, x, array in arrays(walk):
        where = str(path) or "the model"
        shape = tuple(getattr(array, "shape", ()))
        facts = [("object", f"{where}, a {type(x).__name__}"), ("array", f"shape {shape}")]
        hint = 'Say how it comes apart with tied.register, or that it may stay: hidden="keep"'
        message = "an array hides in an object that can't be taken apart"
        if mode == "raise":
            raise HiddenArrayError(message, facts=facts, hint=hint, paths=[where])
        text = TiedError(f"{message}; it stays as it is", facts=facts, hint=hint).render()
        warnings.warn(text, HiddenArrayWarning, stacklevel=callers_level())
