"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to; when the block ends, that file takes its place.

    The bytes are on the disk before the name is, and the name before this returns. If the block
    raises, nothing is left of it and `path` is what it was.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        yield beside
        settle(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    settle(path.parent)


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
