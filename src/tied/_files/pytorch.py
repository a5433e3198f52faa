"""Checkpoints of `torch.save`: tensors alone, mapped; views of one storage are ties."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from tied._errors import DtypeError, FileError
from tied._files.contents import Checkpoint
from tied._files.gather import gather
from tied._files.header import bad
from tied._files.outside import BROKEN, needed
from tied._files.read import files_of, tie_by_index
from tied._files.zipped import Archive


def open_pytorch(path: Path) -> Checkpoint:
    """Returns the contents of a file: a tensor, or dicts and lists of them, however nested.

    Nothing of it is run: PyTorch reads tensors alone (`weights_only=True`).

    Raises:
        FileError: The file is not sound, or holds more than tensors.
        LibraryError: PyTorch is not installed.
    """
    torch = needed("torch", "torch", f"reading {path.name}")
    lengths = _lengths(path)
    state = _load(path, torch, lengths is not None)
    if not isinstance(state, (dict, list, tuple)):
        state = {path.stem: state}
    try:
        gathered = gather(state, hidden="raise")
    except DtypeError as error:
        raise bad(path, error.message, *error.paths[:1]) from error
    except BROKEN as error:
        raise bad(path, f"it holds what is no tensor ({error})") from error
    contents = gathered.contents
    for name, (_, array) in gathered.arrays.items():
        if str(getattr(array, "layout", "torch.strided")) != "torch.strided":
            raise bad(path, "a sparse tensor", name)
        nbytes = array.untyped_storage().nbytes()
        # PyTorch maps as many bytes as the pickle says, also beyond the member that has them.
        if lengths is not None and nbytes not in lengths:
            raise bad(path, f"{nbytes:,} bytes where the archive has fewer", name)
    contents.path, contents.format, contents.files = path, "pytorch", (path,)
    return contents


def open_pytorch_index(path: Path) -> Checkpoint:
    """Returns the contents of the files that a `pytorch_model.bin.index.json` names.

    Raises:
        FileError: The index or a file is not sound.
        LibraryError: PyTorch is not installed.
    """
    files = files_of(path)
    contents = Checkpoint(path, "pytorch", {}, files=tuple(files))
    for file, wanted in files.items():
        one = open_pytorch(file)
        names = set(one.names())
        if wanted is not None and not wanted <= names:
            raise bad(file, "the index has it here, the file has not", min(wanted - names))
        twice = names & set(contents.names())
        if twice:
            raise bad(file, "another file of the checkpoint has it too", min(twice))
        contents.storages |= one.storages
        contents.aliases |= one.aliases
    tie_by_index(contents, path)
    return contents


def _load(path: Path, torch: Any, is_zip: bool) -> Any:
    """Returns the tensors of a file, over the file where that can be mapped."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except BROKEN as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is None:
            reason = str(error).strip().partition("\n")[0]
            raise bad(path, f"PyTorch can't read it ({reason})") from error
        raise FileError(
            "this file holds more than tensors, and nothing is unpickled",
            facts=[("file", str(path)), ("found", found[1])],
            hint="Save what it holds as a state dict: torch.save(model.state_dict(), ...)",
        ) from error


def _lengths(path: Path) -> set[int] | None:
    """Returns the bytes that storages in an archive have; None if the file is older than those.

    Raises:
        FileError: The archive is a program, or has members that grow when they are read.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # as PyTorch decides it
            return None
    archive = Archive(path)
    archive.close()
    if any(name.partition("/")[2] == "constants.pkl" for name in archive.members):
        raise FileError(
            "this is a TorchScript archive, a program and not a checkpoint",
            facts=[("file", str(path))],
            hint="Save its tensors: torch.save(torch.jit.load(...).state_dict(), ...)",
        )
    for name in archive.packed():
        raise bad(path, "a member that is compressed", name)
    return {0, *(n for name, n in archive.members.items() if "/data/" in name)}
