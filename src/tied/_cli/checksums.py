"""Checksums of storages, in the metadata of the file that has them; `docs/format.md` says how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from tied._errors import FileError
from tied._files.contents import Checkpoint, Stored
from tied._files.header import bad, parse

KEY = "tied.checksums"
ALGORITHM = "blake2b-128"
_PIECE = 16 << 20


def checksum(stored: Stored, progress: Callable[[int], object]) -> str:
    """Returns the checksum of the bytes of a storage: BLAKE2b of 16 bytes, in hexadecimal."""
    told = hashlib.blake2b(digest_size=16)
    memory = stored.memory()
    for start in range(0, memory.size, _PIECE):
        piece = memory[start : start + _PIECE]
        told.update(piece.data)
        progress(piece.size)
    return told.hexdigest()


def write_checksums(contents: Checkpoint, progress: Callable[[int], object]) -> dict[str, str]:
    """Returns the metadata that holds the checksums of all storages."""
    sums = {name: checksum(stored, progress) for name, stored in contents.storages.items()}
    told = {"version": 1, "algorithm": ALGORITHM, "storages": sums}
    return {KEY: json.dumps(told, separators=(",", ":"))}


def read_checksums(contents: Checkpoint) -> dict[str, str] | None:
    """Returns the checksums that a checkpoint records, by storage; None if it records none.

    Raises:
        FileError: They are not what `docs/format.md` says.
    """
    text = contents.metadata.get(KEY)
    if text is None:
        return None
    told = parse(contents.path, text.encode())
    if told.get("version") != 1 or told.get("algorithm") != ALGORITHM:
        raise _unknown(contents, told)
    sums = told.get("storages")
    if not isinstance(sums, dict) or not all(isinstance(x, str) for x in sums.values()):
        raise bad(contents.path, "checksums that are no object of strings")
    return sums


def _unknown(contents: Checkpoint, told: dict[str, Any]) -> FileError:
    return FileError(
        f"checksums of version {told.get('version')!r} by {told.get('algorithm')!r} are not known",
        facts=[("file", str(contents.path)), ("known", f"version 1 by {ALGORITHM!r}")],
    )
