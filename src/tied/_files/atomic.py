"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

fcntl: Any
try:
    import fcntl
except ImportError:  # not there on Windows, where nothing is swept up
    fcntl = None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to; when the block ends, that file takes its place.

    The bytes are on the disk before the name is, and the name before this returns. If the block
    raises, nothing is left of it and `path` is what it was.
    """
    sweep(path.parent, path.name)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_PART}")
    try:
        with beside.open("wb") as held:
            _lock(held)
            yield beside
            settle(beside)
            os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    settle(path.parent)


_PART = ".part"


def _lock(file: IO[bytes]) -> bool:
    """Takes a file for this process, as long as it lives; False if another one has it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep(folder: Path, name: str = "") -> None:
    """Removes what writers have left that were killed.

    Args:
        folder: Where.
        name: What the name of the file that they wrote begins with.
    """
    for left in folder.glob(f".{glob.escape(name)}*{_PART}"):
        with suppress(OSError), left.open("rb") as file:
            if _lock(file):
                left.unlink()


def settle(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes a text file in that way."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")
