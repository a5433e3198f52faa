"""The bytes of a safetensors file, written one storage after the other.

The safetensors library takes all tensors at once, can't be broken off or watched, and writes
under a name of its own beside the file. A model's storages come one by one here (from a device,
or computed for an alias), so that no more than one is in memory besides the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tied._errors import FileError, TiedError
from tied._files.contents import Stored
from tied._files.dtypes import BITS
from tied._files.header import MOST

Progress = Callable[[int], None]
"""Called with the number of bytes that were just written."""

_CHUNK = 1 << 24
_ALIGNED = 8


def write_container(
    path: Path, pieces: Iterable[Stored], metadata: Mapping[str, str], progress: Progress | None
) -> None:
    """Writes a file.

    The header and the order of the tensors, wide dtypes first, are as the library has them.

    Raises:
        FileError: The header would be longer than safetensors reads.
    """
    ordered = sorted(pieces, key=lambda x: (-BITS[x.dtype], x.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for x in ordered:
        header[x.name] = {"dtype": x.dtype, "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    if len(text) > MOST:
        raise FileError(
            f"the header of {path.name} would have {len(text):,} bytes; at most {MOST:,} are read",
            hint="Write several files: max_shard_bytes=...",
        )
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for x in ordered:
            memory = _memory(x)
            if memory.nbytes != x.nbytes:
                raise FileError(f"{x.name} has {memory.nbytes:,} bytes, not {x.nbytes:,}",
                                paths=[x.name])  # fmt: skip
            for start in range(0, x.nbytes, _CHUNK):
                part = memory[start : start + _CHUNK]
                file.write(part)
                if progress is not None:
                    progress(part.nbytes)


def _memory(stored: Stored) -> Any:
    """Returns the bytes of a storage; what can't be read says which it is."""
    try:
        return stored.memory()
    except TiedError as error:
        if error.paths:
            raise
        facts = [("array", stored.name), *error.facts]
        hint, paths = error.hint, [stored.name]
        raise type(error)(error.message, facts=facts, hint=hint, paths=paths) from error
