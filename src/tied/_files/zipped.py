"""Zip archives, read as something that a stranger may have written; nothing is unpacked to disk."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from tied._files.header import bad
from tied._files.outside import BROKEN, too_much
from tied._files.read import Mapped

_LOCAL = 30  # bytes of a member's own header, before its name


class Archive:
    """The members of a zip archive.

    Attributes:
        path: The file.
        members: The bytes of each member, by name, once it is read.
    """

    def __init__(self, path: Path) -> None:
        """Reads the directory of an archive.

        Raises:
            FileError: It is none, has a name twice, or would become far more than it is.
        """
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except BROKEN as error:
            raise bad(path, f"no zip archive ({error})") from error
        found = [info for info in self._zip.infolist() if info.filename[-1:] != "/"]
        self._infos = {info.filename: info for info in found}
        self._mapped = Mapped(path)
        self._length = os.stat(path).st_size
        self.members = {name: info.file_size for name, info in self._infos.items()}
        for info in found:
            if self._infos[info.filename] is not info:
                raise bad(path, "a member that is there twice", info.filename)
            if info.flag_bits & 1:
                raise bad(path, "a member that is encrypted", info.filename)
            if not 0 <= info.header_offset < self._length:
                raise bad(path, "a member that is not where the archive says", info.filename)
        packed = [info for info in found if info.compress_type != zipfile.ZIP_STORED]
        nbytes = sum(info.file_size for info in packed)
        if too_much(nbytes, self._length):
            raise bad(path, f"{self._length:,} bytes that would become {nbytes:,}")

    def close(self) -> None:
        """Closes the file; what is mapped stays."""
        self._zip.close()

    def packed(self) -> list[str]:
        """Returns the members that are compressed."""
        return [n for n, info in self._infos.items() if info.compress_type != zipfile.ZIP_STORED]

    def open(self, name: str) -> IO[bytes]:
        """Opens a member to read from its start."""
        try:
            return self._zip.open(self._infos[name])
        except BROKEN as error:
            raise bad(self.path, f"a member that can't be read ({error})", name) from error

    def read(self, name: str, most: int) -> bytes:
        """Returns a member that has at most so many bytes."""
        if self.members[name] > most:
            raise bad(self.path, f"{self.members[name]:,} bytes; at most {most:,} are read", name)
        try:
            return self._zip.read(name)
        except BROKEN as error:
            raise bad(self.path, f"a member that can't be read ({error})", name) from error

    def start(self, name: str) -> int | None:
        """Returns where the bytes of a member are in the file; None if they are compressed."""
        info = self._infos[name]
        if info.compress_type != zipfile.ZIP_STORED:
            return None
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            local = file.read(_LOCAL)
        if len(local) < _LOCAL or local[:4] != b"PK\3\4":
            raise bad(self.path, "a member that is not where the archive says", name)
        name_length = int.from_bytes(local[26:28], "little")
        extra_length = int.from_bytes(local[28:30], "little")
        start = info.header_offset + _LOCAL + name_length + extra_length
        if info.compress_size != info.file_size or start + info.file_size > self._length:
            raise bad(self.path, "a member that does not end in the file", name)
        return start

    def part(self, name: str, skip: int, nbytes: int) -> Any:
        """Returns bytes of a member as a 1-D uint8 array: mapped, if it is not compressed."""
        start = self.start(name)
        if start is not None:
            return self._mapped.part(start + skip, nbytes)

        return _unpacked(self.path, name, skip, nbytes)


def _unpacked(path: Path, name: str, skip: int, nbytes: int) -> Any:
    out = np.empty(nbytes, np.uint8)
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            file.seek(skip)
            done = 0
            while done < nbytes and (piece := file.read(min(1 << 24, nbytes - done))):
                out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                done += len(piece)
    except BROKEN as error:
        raise bad(path, f"a member that can't be read ({error})", name) from error
    if done < nbytes:
        raise bad(path, "a member that ends too soon", name)
    return out
