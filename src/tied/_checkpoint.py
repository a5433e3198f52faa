"""`save`, `load` and `load_into`: checkpoints in which ties are kept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tied import arrays
from tied._errors import DtypeError, FileError, TiedError, TieError
from tied._files.contents import Checkpoint, Stored
from tied._files.dtypes import BITS, NAMES
from tied._files.formats import opener
from tied._files.gather import gather
from tied._files.header import bad, opened
from tied._files.write import write
from tied.arrays.numpy import parse_dtype

Place = str | os.PathLike[str]


def save(
    model: Any,
    path: Place,
    *,
    expand: bool = False,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    hidden: str = "warn",
) -> Path:
    """Writes the arrays of a model to a safetensors file: each storage once, with its ties.

    Any reader of safetensors reads the storages; `tied.load` gives the ties back. The file is
    written beside `path` and takes its place when it is whole and on the disk.

    Args:
        model: Any object, a dict of arrays among them. It is not changed.
        path: The file; a folder, for `model.safetensors` in it.
        expand: Write a tensor for every name, for readers that know no ties. What overlaps without
            an array that reads all of it is not tied any more in such a file.
        max_shard_bytes: Write several files of at most so many bytes of tensors (one tensor may
            have more), and an index beside, into the folder `path`.
        metadata: Texts for the file's metadata.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        The file that leads to the checkpoint: the one file, or the index.

    Raises:
        DtypeError: safetensors has no such dtype.
        DeviceError: An array has no elements (on `meta`).
        FileError: The file can't be written, or a name can't be in one.

    >>> import numpy as np, pathlib, tempfile, tied
    >>> W = np.ones((2, 3), "float32")
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = tied.save({"enc": W, "dec": W.T}, folder / "model.safetensors")
    >>> loaded = tied.load(folder / "model.safetensors")
    >>> tied.shares(loaded["enc"], loaded["dec"])
    True
    """
    contents = gather(model, hidden).contents
    return write(
        contents, Path(path), expand=expand, max_shard_bytes=max_shard_bytes, metadata=metadata
    )


def open_checkpoint(path: Place) -> Checkpoint:
    """Returns what a checkpoint holds; reads no tensor.

    Raises:
        FileError: There is none, or it is not sound.
    """
    path = Path(path)
    if not path.exists():
        raise FileError("there is no such file", facts=[("file", str(path))])
    return opener(path)(path)


def load(path: Place, *, framework: str = "numpy", mapped: bool = True) -> dict[str, Any]:
    """Reads a checkpoint, with its ties.

    Args:
        path: A safetensors file, the index of several, a folder with either, or a file of another
            format (see `docs/files.md`).
        framework: The library of the arrays: "numpy", "torch" or "jax".
        mapped: Give NumPy and PyTorch arrays over the file itself, which is read where they are
            (what is written to them stays in memory); else over memory of their own.

    Returns:
        A dict from every name to its array. Names that were tied are views of one memory, or one
        object; in JAX, a `View`. Arrays can be written to.

    Raises:
        FileError: The file is not sound; nothing is read of it.
        LibraryError: The library is not installed.
    """
    library = _library(framework)
    contents = open_checkpoint(path)
    return _Arrays(contents, library, mapped).all()


def _library(framework: str) -> arrays.Library:
    if framework not in arrays.names:
        raise TiedError(
            f"framework={framework!r} is unknown", hint='Type "numpy", "torch" or "jax"'
        )
    return arrays.load(framework)


class _Arrays:
    """The arrays of a checkpoint, made when they are asked for; each storage once."""

    def __init__(self, contents: Checkpoint, library: arrays.Library, mapped: bool) -> None:
        self.contents = contents
        self.library = library
        self.mapped = mapped
        self._made: dict[str, Any] = {}

    def all(self) -> dict[str, Any]:
        return {name: self.array(name) for name in self.contents.names()}

    def array(self, name: str) -> Any:
        alias = self.contents.aliases.get(name)
        if alias is None:
            return self.storage(self.contents.storages[name])
        base, layout = self.contents.storages[alias.of], alias.layout
        if base.named and layout.is_whole(base.shape):
            return self.storage(base)
        if layout.dtype is not None:
            layout = dataclasses.replace(layout, dtype=NAMES[layout.dtype])
        flat, _ = self.library.flat(self.storage(base), tuple(range(len(base.shape))))
        try:
            return self.library.read(flat, base.shape, layout, None)
        except TiedError as error:
            if name in self.contents.copies:
                return self.storage(self.contents.copies[name])
            raise TieError(
                f"{self.library.name} has no such view: {name} reads the bits of {base.name}",
                hint='Read it as framework="numpy", or save it with expand=True',
                paths=[name, base.name],
            ) from error

    def _memory(self, stored: Stored) -> Any:
        """Returns the bytes that an array is to be over; PyTorch wants them aligned."""
        if not self.mapped and stored.file is not None:
            return _read(stored)
        memory = stored.memory()
        itemsize = max(1, BITS[stored.dtype] // 8)
        apart = self.library.name == "torch" and memory.ctypes.data % itemsize
        return memory if self.mapped and memory.flags.writeable and not apart else memory.copy()

    def storage(self, stored: Stored) -> Any:
        if stored.name not in self._made:
            memory = self._memory(stored)
            try:
                self._made[stored.name] = array_over(self.library, memory, stored)
            except DtypeError as error:
                facts = [("tensor", stored.name), ("dtype", stored.dtype)]
                raise DtypeError(error.message, facts=facts, hint=error.hint,
                                 paths=[stored.name]) from error  # fmt: skip
        return self._made[stored.name]


def _read(stored: Stored) -> Any:
    """Returns the bytes of a storage, read into memory of their own."""
    assert stored.file is not None
    memory = np.empty(stored.nbytes, np.uint8)
    with opened(stored.file) as file:
        file.seek(stored.start)
        if file.readinto(memory) != stored.nbytes:  # type: ignore[attr-defined]
            raise bad(stored.file, "a file that has become shorter", stored.name)
    return memory


def array_over(library: arrays.Library, memory: Any, stored: Stored) -> Any:
    """Returns an array over bytes."""
    if BITS[stored.dtype] % 8 and not (stored.dtype == "F4" and library.name == "torch"):
        raise FileError(f"{stored.dtype} can't be read", facts=[("tensor", stored.name)],
                        paths=[stored.name])  # fmt: skip
    if library.name == "torch":
        return _tensor(memory, stored)
    x = memory.view(parse_dtype(NAMES[stored.dtype])).reshape(stored.shape)
    if library.name == "numpy":
        return x
    made = library.from_numpy(x)
    return _random_key(made, stored) if stored.key else made


def _random_key(data: Any, stored: Stored) -> Any:
    """Returns the random keys of JAX that some data is of."""
    import jax

    try:
        return jax.random.wrap_key_data(data, impl=stored.key)
    except (TypeError, ValueError) as error:
        facts = [("tensor", stored.name), ("implementation", stored.key)]
        raise FileError("JAX has no such random keys", facts=facts, paths=[stored.name]) from error


def _tensor(memory: Any, stored: Stored) -> Any:
    """Returns a tensor over bytes."""
    import torch

    dtype = getattr(torch, NAMES[stored.dtype])
    shape = stored.shape
    if stored.dtype == "F4":  # two elements in a byte, which is what PyTorch counts
        shape = (*shape[:-1], shape[-1] // 2)
    if not stored.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(memory).view(dtype).reshape(shape)
