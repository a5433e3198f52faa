"""Where a command writes to: not over its input, not over other things unasked."""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from tied._checkpoint import load
from tied._cli.progress import Progress
from tied._errors import DtypeError, FileError, LibraryError, TiedError, UntiedWarning
from tied._files.atomic import replacing
from tied._files.contents import Checkpoint
from tied._files.dtypes import BITS, NAMES
from tied._files.elements import read_bytes
from tied._files.write import write

FORMATS = {
    ".safetensors": "safetensors", ".npz": "npz", ".pt": "pytorch", ".pth": "pytorch",
    ".bin": "pytorch",
    "": "safetensors",
}  # fmt: skip
"""What is written to a name, by how it ends; no ending is a folder."""

_NPZ = {"BOOL", "C64", *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)),
        "F16", "F32", "F64"}  # fmt: skip
_PIECE = 16 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What to write, and how.

    Attributes:
        doing: What the command does, for its progress bar: "packing".
        expand: Write an array for every name.
        max_shard_bytes: The most bytes of tensors in one file.
        force: Replace what is there.
    """

    doing: str
    expand: bool = False
    max_shard_bytes: int | None = None
    force: bool = False


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Returns the bytes that a person writes as "5GB" or "512 MiB".

    Raises:
        ValueError: It is none.

    >>> parse_bytes("5GB"), parse_bytes("1.5 MiB")
    (5000000000, 1572864)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = match and match[2].upper().removesuffix("B") + "B" * (match[2] not in ("", "b", "B"))
    if match is None or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[unit])


def kind(path: Path, only: str | None = None) -> str:
    """Returns the format in which a file of this name is written.

    Args:
        path: The file, or a folder.
        only: The one format that the command writes.

    Raises:
        TiedError: There is none.
    """
    found = "safetensors" if path.is_dir() else FORMATS.get(path.suffix)
    if found is None or only not in (None, found):
        known = [s for s, name in FORMATS.items() if s and only in (None, name)]
        raise TiedError(
            f"no checkpoint is written to a file that ends in {path.suffix!r}",
            facts=[("file", str(path)), ("known", ", ".join(known))],
            hint="Give it one of these endings, or none for a folder of safetensors files",
        )
    return found


def write_to(contents: Checkpoint, out: Path, request: Request) -> Path:
    """Writes a checkpoint to a file or folder, in the format that its name says.

    Returns:
        The file that leads to it.

    Raises:
        TiedError: It would overwrite something, or can't be written in this format.
    """
    form = kind(out)
    check(contents, out, request)
    total = contents.nbytes
    if request.expand or form == "npz":
        total = sum(nbytes_of(contents, name) for name in contents.names())
    with Progress(request.doing, total) as progress:
        if form == "safetensors":
            return _write_safetensors(contents, out, request, progress)
        writer = _write_npz if form == "npz" else _write_pt
        try:
            with replacing(out) as beside, beside.open("wb") as file:
                writer(contents, file, request, progress)
        except OSError as error:
            facts = [("file", str(out)), ("why", error.strerror or str(error))]
            raise FileError("the file can't be written", facts=facts) from error
    return out


def check(contents: Checkpoint, out: Path, request: Request) -> None:
    """Checks that a checkpoint may be written to a place.

    Raises:
        TiedError: It may not: that is the input, or something else that is there.
    """
    inputs = [contents.path, *contents.files]
    folder = out.is_dir() or not out.suffix
    if request.max_shard_bytes is not None and not folder:
        raise TiedError(
            "several files need a folder", facts=[("given", str(out))],
            hint="With --max-shard-bytes, OUT is the name of a folder",
        )  # fmt: skip
    same = any(out.exists() and x.exists() and out.samefile(x) for x in inputs)
    if same or (folder and any(x.resolve().parent == out.resolve() for x in inputs)):
        raise TiedError(
            "this would overwrite the input", facts=[("file", str(out))],
            hint="Write to another place, and move it when you have looked at it",
        )  # fmt: skip
    if not out.absolute().parent.is_dir():
        raise FileError("there is no such folder", facts=[("folder", str(out.parent))])
    there = sorted(out.glob("model*.safetensors*")) if out.is_dir() else [out]
    if not request.force and any(x.exists() for x in there):
        raise TiedError(
            "there is a checkpoint already" if out.is_dir() else "there is a file already",
            facts=[("file", str(there[0]))], hint="--force replaces it",
        )  # fmt: skip


def _write_safetensors(
    contents: Checkpoint, out: Path, request: Request, progress: Callable[[int], None]
) -> Path:
    made = not out.suffix and not out.exists()
    if made:
        out.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntiedWarning)  # `untied` says it
            return write(
                contents, out, expand=request.expand, max_shard_bytes=request.max_shard_bytes,
                progress=progress,
            )  # fmt: skip
    except BaseException:
        if made and not any(out.iterdir()):
            out.rmdir()
        raise


def nbytes_of(contents: Checkpoint, name: str) -> int:
    """Returns the bytes of an array."""
    return math.prod(contents.shape(name)) * BITS[contents.dtype(name)] // 8


def untied(contents: Checkpoint, form: str, expand: bool) -> list[str]:
    """Returns the names that come untied when a checkpoint is written.

    Args:
        contents: The checkpoint.
        form: The format: one of the values of `FORMATS`.
        expand: Whether every name is written.
    """
    if form == "safetensors" and not expand:
        return []
    if form == "safetensors":  # where a tensor holds all of them, the tie table has them
        return [x.name for x in contents.aliases.values() if not contents.storages[x.of].named]
    return list(contents.aliases) if form == "npz" or expand else []


def bytes_of(contents: Checkpoint, name: str) -> Any:
    """Returns the bytes of an array, in C order, as a 1-D uint8 array."""
    alias = contents.aliases.get(name)
    if alias is None:
        return contents.storages[name].memory()
    return read_bytes(contents.storages[alias.of], alias)


def _write_npz(
    contents: Checkpoint, file: BinaryIO, request: Request, progress: Callable[[int], object]
) -> None:
    for name in contents.names():
        if contents.dtype(name) not in _NPZ:
            raise DtypeError(
                f"a .npz file has no dtype {NAMES.get(contents.dtype(name), 'of that kind')}",
                facts=[("array", name)], hint="Write safetensors or .pt", paths=[name],
            )  # fmt: skip
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
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

    def __init__(self, file: BinaryIO, progress: Callable[[int], object]) -> None:
        self._file = file
        self._progress = progress

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self._progress(written)
        return written

    def flush(self) -> None:
        self._file.flush()


def _write_pt(
    contents: Checkpoint, file: BinaryIO, request: Request, progress: Callable[[int], object]
) -> None:
    try:
        import torch
    except ImportError as error:
        raise LibraryError("torch is not installed", hint="Type: pip install torch") from error
    arrays = load(contents.path, framework="torch")
    if request.expand:
        arrays |= {
            name: arrays[name].clone(memory_format=torch.contiguous_format)
            for name in contents.aliases
        }
    try:
        torch.save(arrays, cast(BinaryIO, _Watched(file, progress)))
    except RuntimeError as error:
        # It ends its archive even when it is broken off, and fails at that again.
        if isinstance(error.__context__, KeyboardInterrupt | OSError):
            raise error.__context__ from None
        raise
