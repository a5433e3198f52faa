"""Files of NumPy, `.npz` and `.npy`: no pickle, and no copy of what is not compressed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from tied._files.contents import Checkpoint, Stored
from tied._files.dtypes import CODES
from tied._files.header import bad, ints
from tied._files.outside import BROKEN, add_once
from tied._files.read import Mapped
from tied._files.zipped import Archive

_MOST = 10_000  # bytes of a header, as NumPy itself has it


class _Header(NamedTuple):
    dtype: Any
    shape: tuple[int, ...]
    fortran: bool
    start: int


def open_npz(path: Path) -> Checkpoint:
    """Returns the contents of an `.npz` file: its arrays by name.

    Raises:
        FileError: The file is not sound, or holds what is no array of numbers.
    """
    archive = Archive(path)
    contents = Checkpoint(path, "npz", {}, files=(path,))
    for member, length in archive.members.items():
        name = member.removesuffix(".npy")
        if name == member:
            raise bad(path, "a member that is no array", member)
        add_once(contents, path, name)
        with archive.open(member) as file:
            header = _header(path, name, file)
        start = archive.start(member)
        contents.storages[name] = _stored(
            path, name, header, length, partial(archive.part, member), start
        )
    archive.close()
    return contents


def open_npy(path: Path) -> Checkpoint:
    """Returns the contents of an `.npy` file: one array, under the name of the file.

    Raises:
        FileError: The file is not sound, or holds what is no array of numbers.
    """
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        header = _header(path, path.stem, file)
    part = Mapped(path).part
    stored = _stored(path, path.stem, header, length, part, 0)
    return Checkpoint(path, "npy", {path.stem: stored}, files=(path,))


def _header(path: Path, name: str, file: IO[bytes]) -> _Header:
    """Reads and checks what stands before the elements of an array."""
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file, max_header_size=_MOST)
        start = file.tell()
    except BROKEN as error:
        raise bad(path, f"no array of NumPy ({error})", name) from error
    if dtype.hasobject:
        raise bad(path, "objects of Python, which are pickles", name)
    if dtype.name not in CODES:
        raise bad(path, f"the dtype {dtype}", name)
    return _Header(dtype, ints(path, name, list(shape), "a shape", 64), bool(fortran), start)


def _stored(
    path: Path, name: str, header: _Header, length: int, part: Callable[[int, int], Any],
    start: int | None,
) -> Stored:  # fmt: skip
    nbytes = math.prod(header.shape) * header.dtype.itemsize
    if header.start + nbytes != length:
        there = length - header.start
        raise bad(path, f"{header.dtype} of shape {list(header.shape)} in {there:,} bytes", name)
    plain = not header.fortran and header.dtype.byteorder != ">"
    return Stored(
        name, CODES[header.dtype.name], header.shape, nbytes,
        partial(_memory, header, nbytes, part),
        path if plain and start is not None else None,
        start + header.start if plain and start is not None else 0,
    )  # fmt: skip


def _memory(header: _Header, nbytes: int, part: Callable[[int, int], Any]) -> Any:
    """Returns the bytes of an array in C order; they are mapped if they are so in the file."""
    raw = part(header.start, nbytes)
    if not header.fortran and header.dtype.byteorder != ">":
        return raw
    x = raw.view(header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
    x = np.ascontiguousarray(x, header.dtype.newbyteorder("<"))
    return x.reshape(-1).view(np.uint8)
