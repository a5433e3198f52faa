"""Safetensors files, one or several with an index, opened without reading their tensors."""

from __future__ import annotations

import dataclasses
import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tied._errors import FileError
from tied._files.contents import INDEX, ONE, Alias, Checkpoint, Stored
from tied._files.header import bad, is_text, opened, parse, read_header, small_file
from tied._files.table import read_table
from tied._layout import Layout


def open_safetensors(path: Path) -> Checkpoint:
    """Returns the contents of a file, or of the files that an index names.

    Raises:
        FileError: A file, the index or the tie table is not sound.
    """
    indexed = path.name.endswith(".index.json")
    files = files_of(path) if indexed else {path: None}
    headers = {file: read_header(file) for file in files}
    contents = Checkpoint(path, "safetensors", {}, files=tuple(files))
    for file, header in headers.items():
        wanted = files[file]
        if wanted is not None and not wanted <= header.entries.keys():
            raise bad(
                file, "the index has it here, the file has not", min(wanted - {*header.entries})
            )
        maps = Mapped(file)
        for name, entry in header.entries.items():
            if name in contents.storages:
                raise bad(file, "another file of the checkpoint has it too", name)
            contents.storages[name] = Stored(
                name, entry.dtype, entry.shape, entry.nbytes,
                partial(maps.part, entry.start, entry.nbytes), file, entry.start,
            )  # fmt: skip
    _tie(contents, headers)
    if indexed:
        tie_by_index(contents, path)
    return contents


def _tie(contents: Checkpoint, headers: dict[Path, Any]) -> None:
    """Adds the ties that the files tell."""
    for file, header in headers.items():
        table = read_table(file, header, contents.storages)
        contents.aliases |= table["aliases"]
        contents.computed |= table["computed"]
        for name in table["unnamed"]:
            contents.storages[name] = dataclasses.replace(contents.storages[name], named=False)
        for name, impl in table["keys"].items():
            contents.storages[name] = dataclasses.replace(contents.storages[name], key=impl)
        if table["expanded"]:
            for name in table["aliases"].keys() & contents.storages.keys():
                contents.copies[name] = contents.storages.pop(name)
        own = {*table["aliases"], "tied"}
        contents.metadata |= {k: v for k, v in header.metadata.items() if k not in own}


def tie_by_index(contents: Checkpoint, path: Path) -> None:
    """Adds the aliases in the metadata of an index, as transformers and accelerate write them."""
    told = parse(path, small_file(path)).get("metadata", {})
    for name, kept in told.items() if isinstance(told, dict) else ():
        if isinstance(kept, str) and kept in contents.storages and name not in contents.storages:
            layout = Layout.whole(contents.storages[kept].shape)
            contents.aliases.setdefault(name, Alias(name, kept, layout))


def files_of(path: Path) -> dict[Path, set[str] | None]:
    """Returns the files of an index, and the tensors that it says each has."""
    told = parse(path, small_file(path)).get("weight_map")
    if not isinstance(told, dict) or not all(isinstance(x, str) for x in told.values()):
        raise bad(path, "an index without a weight_map of strings")
    files: dict[Path, set[str] | None] = {}
    for name, file in told.items():
        if file in ("", ".", "..") or set(file) & {"/", "\\", "\0"}:
            raise bad(path, f"the index leads out of its folder: {file!r}", name)
        if not is_text(file) or len(file) > 255:
            raise bad(path, "the index names a file that can't be", name)
        there = path.parent / file
        names = files.setdefault(there, set())
        assert names is not None
        names.add(name)
    if not files:
        raise bad(path, "an index of no files")
    for there in files:
        if not os.path.isfile(there):
            raise FileError("a file of the checkpoint is not there", facts=[("file", str(there))])
    return files


class Mapped:
    """A file in memory, mapped when it is first read; what is written to it stays in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: Any = None

    def part(self, start: int, nbytes: int) -> Any:
        """Returns some bytes, as a 1-D uint8 array over the file."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        if self._map is None:
            with opened(self.path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if start + nbytes > len(self._map):
            raise bad(self.path, "a file that has become shorter")
        return np.frombuffer(self._map, np.uint8, nbytes, start)


def open_folder(path: Path) -> Path:
    """Returns the file of a folder that leads to its checkpoint: the index, or the one file."""
    indices = [path / INDEX] if (path / INDEX).is_file() else sorted(path.glob("*.index.json"))
    single = [path / ONE] if (path / ONE).is_file() else sorted(path.glob("*.safetensors"))
    single = [file for file in single if "-of-" not in file.name]  # a part is no checkpoint
    for found in (indices, single):
        if len(found) == 1:
            return found[0]
    raise FileError(
        "this folder has no checkpoint, or more than one",
        facts=[("folder", str(path)), ("found", ", ".join(x.name for x in (*indices, *single)))],
        hint="Name the file",
    )
