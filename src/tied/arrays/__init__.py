"""The array libraries: which there are, and which one a type belongs to.

A library's file is loaded when its arrays appear, or when it is named; nothing here imports one.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tied._errors import LibraryError
from tied.arrays.library import Geometry, Library, Place, Span

__all__ = ["Geometry", "Library", "Place", "Span", "library_for", "load", "names"]

_REQUIRES = {"numpy": "numpy", "torch": "torch", "jax": "jax"}
names = tuple(_REQUIRES)

_loaded: dict[str, Library] = {}


def load(name: str) -> Library:
    """Returns the library of that name, importing it if need be.

    Raises:
        LibraryError: It is not installed.
    """
    if name not in _loaded:
        try:
            module = importlib.import_module(f"tied.arrays.{name}")
        except ModuleNotFoundError as error:
            if error.name != _REQUIRES.get(name):
                raise
            raise LibraryError(
                f"the array library {name} is not installed",
                hint=f'Type: pip install "tied[{name}]"',
            ) from error
        _loaded[name] = module.LIBRARY
    return _loaded[name]


def library_for(cls: type) -> Library | None:
    """Returns the library whose arrays the instances of `cls` are; `None` if they are no arrays."""
    for name in ("lazy", *names):
        if name == "lazy" or _REQUIRES[name] in sys.modules:
            found: Library | None = _claim(name, cls)
            if found is not None:
                return found
    return None


def _claim(name: str, cls: type) -> Any:
    if name in ("torch", "jax") and not _may_be(name, cls):
        return None
    load(name)
    module = sys.modules[f"tied.arrays.{name}"]
    return _loaded[name] if module.claims(cls) else None


def _may_be(name: str, cls: type) -> bool:
    """Returns whether a base of `cls` comes from the library, so that its file need be loaded."""
    roots = {str(base.__module__).partition(".")[0] for base in cls.__mro__}
    return bool(roots & {name, f"{name}lib"})
