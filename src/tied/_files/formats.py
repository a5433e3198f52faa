"""The formats of checkpoints, and how each is opened. To add one, add it to `_BY_SUFFIX`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tied._errors import FileError
from tied._files.contents import Checkpoint
from tied._files.read import open_folder, open_safetensors

Opener = Callable[[Path], Checkpoint]


def _of_folder(path: Path) -> Checkpoint:
    return open_safetensors(open_folder(path))


_BY_SUFFIX: dict[str, Opener] = {
    ".safetensors": open_safetensors,
    ".json": open_safetensors,
}


def opener(path: Path) -> Opener:
    """Returns what opens a file or folder.

    Raises:
        FileError: Its format is not known.
    """
    if path.is_dir():
        return _of_folder
    found = _BY_SUFFIX.get(path.suffix)
    if found is None:
        raise FileError(
            f"the format {path.suffix!r} is not known",
            facts=[("file", str(path)), ("known", ", ".join(sorted(_BY_SUFFIX)))],
        )
    return found
