"""What a checkpoint holds, whatever its format: storages, and the names that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tied._files.dtypes import NAMES
from tied._layout import Layout

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"

Memory = Callable[[], Any]
"""Gives the bytes of a storage, in C order, as a 1-D uint8 array of NumPy; not a copy if it can."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A storage of a checkpoint.

    Attributes:
        name: Its name.
        dtype: The code of its dtype in safetensors: "F32".
        shape: Its shape.
        nbytes: Its bytes.
        memory: Gives them.
        file: The file that they are in, if they are in one of their own right.
        start: Where, counted from its start.
        named: Whether its name is that of an array; else it only is what others read.
        key: For the data of a random key of JAX, its implementation: "threefry2x32".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    memory: Memory = field(compare=False)
    file: Path | None = None
    start: int = 0
    named: bool = True
    key: str = ""


@dataclass(frozen=True, slots=True)
class Alias:
    """A further name of a checkpoint: an array that reads a storage.

    Attributes:
        name: The name.
        of: The storage.
        layout: What it reads of that, its elements in C order; bits, and then bytes, if
            `layout.dtype` is set, as a code of safetensors.
    """

    name: str
    of: str
    layout: Layout


@dataclass(slots=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        path: Where it is.
        format: What it is: "safetensors", "pt", ...
        storages: By name, in the order of the file.
        aliases: By name.
        copies: The tensors that an expanded file has for its aliases.
        computed: What is computed from storages by the model itself: names, and of what.
        metadata: What else the file says of itself.
        files: The files that it is made of.
    """

    path: Path
    format: str
    storages: dict[str, Stored]
    aliases: dict[str, Alias] = field(default_factory=dict)
    copies: dict[str, Stored] = field(default_factory=dict)
    computed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def names(self) -> Iterator[str]:
        """Gives the names of all arrays, those of storages first."""
        yield from (s.name for s in self.storages.values() if s.named)
        yield from self.aliases

    @property
    def nbytes(self) -> int:
        """The bytes of all storages."""
        return sum(stored.nbytes for stored in self.storages.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array."""
        alias = self.aliases.get(name)
        return self.storages[name].shape if alias is None else alias.layout.shape

    def dtype(self, name: str) -> str:
        """Returns the code of the dtype of an array."""
        alias = self.aliases.get(name)
        if alias is None:
            return self.storages[name].dtype
        return alias.layout.dtype or self.storages[alias.of].dtype

    def source(self, name: str) -> str:
        """Returns the storage that an array reads."""
        alias = self.aliases.get(name)
        return name if alias is None else alias.of

    def describe(self, name: str) -> str:
        """Returns how an array reads its storage, as a person writes it: `embed.T`."""
        alias = self.aliases.get(name)
        if alias is None:
            return name
        stored, layout = self.storages[alias.of], alias.layout
        if layout.dtype is not None:
            return f"{alias.of}, bits as {NAMES.get(layout.dtype, layout.dtype)}"
        return layout.describe(stored.shape, alias.of)
