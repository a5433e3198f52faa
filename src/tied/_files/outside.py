"""What the readers of other formats share: their libraries, what these raise, and limits."""

from __future__ import annotations

import importlib
import json
import pickle
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

from tied._errors import FileError, LibraryError
from tied._files.contents import Checkpoint

BROKEN = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError,
    MemoryError, NotImplementedError, OSError, RecursionError, RuntimeError, SyntaxError,
    TypeError, ValueError, pickle.UnpicklingError, struct.error, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What a library may raise over a file that is broken, or made to break it."""

_FREE = 1 << 30
_RATIO = 64
TYPES = "tied.types"
"""The metadata that says what the bytes of an array are, where safetensors has no such dtype."""


def needed(library: str, extra: str, what: str) -> Any:
    """Returns a library.

    Args:
        library: Its name.
        extra: The extra of this package that brings it.
        what: What it is needed for.

    Raises:
        LibraryError: It is not installed.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library.partition(".")[0]:
            raise
        raise LibraryError(
            f"{what} needs the library {library}, which is not installed",
            hint=f'Type: pip install "tied[{extra}]"',
        ) from error


def too_much(nbytes: int, stored: int) -> bool:
    """Returns whether compressed bytes become more than a file should be let to take of memory.

    Args:
        nbytes: The bytes that they become.
        stored: The bytes that they are.
    """
    return nbytes > max(_FREE, _RATIO * stored)


def tell_types(contents: Checkpoint, types: dict[str, str]) -> None:
    """Notes what those arrays are whose bytes alone are there."""
    if types:
        contents.metadata[TYPES] = json.dumps(types)


def add_once(contents: Checkpoint, path: Path, name: str) -> None:
    """Raises if a name is there already.

    Raises:
        FileError: It is.
    """
    if name in contents.storages or name in contents.aliases:
        raise FileError("two arrays have one name", facts=[("file", str(path)), ("tensor", name)],
                        paths=[name])  # fmt: skip
