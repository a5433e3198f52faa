"""The writers of formats that are not our own: .npz, pickles of PyTorch, orbax folders."""

from __future__ import annotations

import importlib
import math
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from tied._checkpoint import load
from tied._errors import DtypeError, LibraryError, TiedError
from tied._files.atomic import replacing
from tied._files.contents import Checkpoint
from tied._files.dtypes import BITS, NAMES
from tied._files.elements import read_bytes

_NPZ = {"BOOL", "C64", *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)),
        "F16", "F32", "F64"}  # fmt: skip
_PIECE = 16 << 20

Progress = Callable[[int], object]


def nbytes_of(contents: Checkpoint, name: str) -> int:
    """Returns the bytes of an array."""
    return math.prod(contents.shape(name)) * BITS[contents.dtype(name)] // 8


def bytes_of(contents: Checkpoint, name: str) -> Any:
    """Returns the bytes of an array, in C order, as a 1-D uint8 array."""
    alias = contents.aliases.get(name)
    if alias is None:
        return contents.storages[name].memory()
    return read_bytes(contents.storages[alias.of], alias)


def write_npz(contents: Checkpoint, path: Path, expand: bool, progress: Progress) -> None:
    """Writes an `.npz` file: an array for every name."""
    for name in contents.names():
        if contents.dtype(name) not in _NPZ:
            raise DtypeError(
                f"a .npz file has no dtype {NAMES.get(contents.dtype(name), 'of that kind')}",
                facts=[("array", name)], hint="Write safetensors or .pt", paths=[name],
            )  # fmt: skip
    with replacing(path) as beside, zipfile.ZipFile(beside, "w", allowZip64=True) as archive:
        for name in contents.names():
            dtype = np.dtype(NAMES[contents.dtype(name)]).newbyteorder("<")
            head = {"descr": dtype.str, "fortran_order": False, "shape": contents.shape(name)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, head)
                memory = bytes_of(contents, name)
                for start in range(0, memory.size, _PIECE):
                    piece = memory[start : start + _PIECE]
                    member.write(piece.data)
                    progress(piece.size)


class _Watched:
    """A file that tells how much was written to it."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file = file
        self._progress = progress

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self._progress(written)
        return written

    def flush(self) -> None:
        self._file.flush()


def write_pytorch(contents: Checkpoint, path: Path, expand: bool, progress: Progress) -> None:
    """Writes a pickle of PyTorch: a dict of tensors, with their ties unless it is expanded."""
    try:
        import torch
    except ImportError as error:
        raise LibraryError("torch is not installed", hint="Type: pip install torch") from error
    arrays = load(contents.path, framework="torch")
    if expand:
        arrays |= {
            name: arrays[name].clone(memory_format=torch.contiguous_format)
            for name in contents.aliases
        }
    with replacing(path) as beside, beside.open("wb") as file:
        try:
            torch.save(arrays, cast(BinaryIO, _Watched(file, progress)))
        except RuntimeError as error:
            # It ends its archive even when it is broken off, and fails at that again.
            if isinstance(error.__context__, KeyboardInterrupt | OSError):
                raise error.__context__ from None
            raise


def write_orbax(contents: Checkpoint, path: Path, expand: bool, progress: Progress) -> None:
    """Writes an orbax folder: an array for every name. It is never put in the place of another."""
    try:
        orbax: Any = importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise LibraryError(
            "orbax is not installed", hint="Type: pip install orbax-checkpoint"
        ) from error
    if path.exists():
        raise TiedError(
            "an orbax folder can't be replaced", facts=[("folder", str(path))],
            hint="Remove it first, or write to another one",
        )  # fmt: skip
    beside = path.absolute().with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(beside, load(contents.path))
        progress(sum(nbytes_of(contents, name) for name in contents.names()))
        os.rename(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
