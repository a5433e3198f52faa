"""A checkpoint read into a model that is there: what fits, what is missing, what disagrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tied._checkpoint import Place, array_over, open_checkpoint
from tied._errors import FileError, TieError
from tied._files.contents import Alias, Checkpoint, Stored
from tied._files.dtypes import BITS, NAMES
from tied._files.elements import read_bytes, unsigned, write_bytes
from tied._files.gather import Gathered, gather
from tied._map import storage_of, transform
from tied._node import kinds
from tied._storage import Storage
from tied.arrays import Library, load


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_into` did.

    Attributes:
        model: The model with the values of the checkpoint: the very same object where its arrays
            can be written to (NumPy, PyTorch), a new one otherwise (JAX).
        loaded: The storages that were written, by name.
        aliases: Names that needed no array of their own: they read a storage, here or in the file.
        missing: Storages of the model of which the checkpoint has nothing, or a part only.
        unexpected: Names of the checkpoint that the model has not.
    """

    model: Any
    loaded: tuple[str, ...]
    aliases: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} storages"]
        for what in ("aliases", "missing", "unexpected"):
            lines += [f"{what.removesuffix('es'):<11}{name}" for name in getattr(self, what)]
        return "\n".join(lines)


def load_into(
    model: Any, path: Place, *, strict: bool = True, cast: bool = False, hidden: str = "warn"
) -> Loaded:
    """Reads a checkpoint into a model, each storage once; the ties are those of the model.

    A storage takes its value from any of its names that the checkpoint has: its own, or that of a
    view, through which it is written. Names that are tied in the model and not in the checkpoint
    must agree there, bit by bit.

    Args:
        model: Any object. Arrays of NumPy and PyTorch are written to, in place, once everything is
            known to fit; a model of JAX arrays is not changed.
        path: A checkpoint, as for `load`.
        strict: Raise if something is missing or unexpected.
        cast: Let the file have other dtypes than the model.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        What was done; `.model` is the model.

    Raises:
        FileError: The file is not sound, values of tied names disagree, shapes or dtypes differ,
            or (`strict`) names are missing or unexpected. All of it is in the one error, each kind
            apart, and nothing was written.
    """
    mine = gather(model, hidden)
    theirs = open_checkpoint(path)
    fit = Fit(mine.contents, theirs, cast)
    fit.refuse(strict)
    made = _written(model, mine, fit.values, hidden)
    return Loaded(
        made, tuple(fit.values), tuple(fit.aliases), tuple(fit.missing), tuple(fit.unexpected)
    )


class Conflict(NamedTuple):
    """Why a storage can't be loaded: its kind, what is to be said, and of which names."""

    kind: str
    text: str
    names: tuple[str, ...]


class Fit:
    """What a checkpoint has for the storages of a model."""

    def __init__(self, mine: Checkpoint, theirs: Checkpoint, cast: bool) -> None:
        self.mine = mine
        self.theirs = theirs
        self.values: dict[str, Stored] = {}
        self.missing: dict[str, str] = {}  # by name, with what else is to be said
        self.conflicts: list[Conflict] = []
        there = set(theirs.names())
        names: dict[str, list[str]] = {
            name: [name] if stored.named else [] for name, stored in mine.storages.items()
        }
        for alias in mine.aliases.values():
            names[alias.of].append(alias.name)
        known = {*mine.computed, *(name for group in names.values() for name in group)}
        self.unexpected = [name for name in theirs.names() if name not in known]
        for storage, group in names.items():
            offered = [name for name in group if name in there and not self._misled(name, there)]
            if not offered:
                self.missing[storage if mine.storages[storage].named else group[0]] = ""
            else:
                self._take(mine.storages[storage], offered, cast)
        self.aliases = [*mine.aliases, *(n for n in theirs.aliases if n in mine.storages)]

    def _misled(self, name: str, there: set[str]) -> bool:
        """Returns whether a name is told to be another one, whole, and reads a part of it here.

        The files of safetensors' `save_model` say of a dropped name which one is kept, not how it
        reads it.
        """
        told, own = self.theirs.aliases.get(name), self.mine.aliases.get(name)
        if told is None or own is None or told.of not in there or told.of != own.of:
            return False
        whole = told.layout.is_whole(self.theirs.storages[told.of].shape)
        return whole and told.layout.shape != own.layout.shape

    def _take(self, storage: Stored, offered: list[str], cast: bool) -> None:
        """Takes the value of a storage from the names that the checkpoint has for it."""
        for name in offered:
            shape, dtype = self.theirs.shape(name), self.theirs.dtype(name)
            own = self.mine.shape(name), self.mine.dtype(name)
            if shape != own[0]:
                text = f"{name}: {shape} in the file, not {own[0]}"
                self.conflicts.append(Conflict("shape", text, (name,)))
                return
            if dtype != own[1] and (not cast or self._rereads(name)):
                told = f"{NAMES[dtype]} in the file, not {NAMES[own[1]]}"
                self.conflicts.append(Conflict("dtype", f"{name}: {told}", (name,)))
                return
        keys = {x.key for name in offered if (x := self.theirs.storages.get(name)) is not None}
        if keys - {storage.key}:
            told = f"{storage.name}: random keys of {keys.pop() or 'none'} in the file"
            self.conflicts.append(Conflict("dtype", told, (storage.name,)))
            return
        dtypes = {self.theirs.dtype(name) for name in offered if not self._rereads(name)}
        if len(dtypes) > 1:
            text = f"{', '.join(offered)}: {', '.join(sorted(dtypes))}"
            self.conflicts.append(Conflict("dtype", text, tuple(offered)))
            return
        value = self._value(storage, offered, dtypes.pop() if dtypes else storage.dtype)
        if value is not None:
            self.values[storage.name] = value

    def _rereads(self, name: str) -> bool:
        alias = self.mine.aliases.get(name)
        return alias is not None and alias.layout.dtype is not None

    def _value(self, storage: Stored, offered: list[str], dtype: str) -> Stored | None:
        nbytes = int(np.prod(storage.shape)) * BITS[dtype] // 8
        whole = storage.name if storage.name in offered else None
        memory = self._bytes(whole) if whole else self._present(storage, dtype, nbytes)
        value = Stored(storage.name, dtype, storage.shape, nbytes, lambda: memory, key=storage.key)
        covered = np.full(nbytes, whole is not None)
        flags = Stored(storage.name, dtype, storage.shape, nbytes, lambda: covered.view("u1"))
        for name in offered:
            if name == whole or self._tied_alike(name, whole):
                continue
            alias, given = self.mine.aliases[name], self._bytes(name)
            plain = Alias(name, alias.of, unsigned(alias.layout))
            seen = read_bytes(flags, plain).view(bool)
            if not np.array_equal(read_bytes(value, alias)[seen], given[seen]):
                first = whole or next(n for n in offered if n != name)
                text = f"{first} and {name}, which are one array here"
                self.conflicts.append(Conflict("disagree", text, (first, name)))
                return None
            if not seen.all():
                write_bytes(memory, dtype, alias, given)
                write_bytes(covered.view("u1"), dtype, plain, np.ones_like(given))
        if whole is None and not self._covers(storage, flags):
            first = next(x.name for x in self.mine.aliases.values() if x.of == storage.name)
            self.missing[storage.name if storage.named else first] = " (a part of it)"
            return None
        return value

    def _present(self, storage: Stored, dtype: str, nbytes: int) -> Any:
        """Returns the bytes of a storage now: nothing in the model may read some of them."""
        if dtype == storage.dtype:
            return storage.memory().copy()
        return np.zeros(nbytes, np.uint8)

    def _covers(self, storage: Stored, flags: Stored) -> bool:
        """Returns whether every element that some name of the model reads has got a value."""
        if storage.named:
            return bool(flags.memory().all())
        readers = [alias for alias in self.mine.aliases.values() if alias.of == storage.name]
        return all(
            read_bytes(flags, Alias(x.name, x.of, unsigned(x.layout))).all() for x in readers
        )

    def _bytes(self, name: str) -> Any:
        alias = self.theirs.aliases.get(name)
        if alias is None:
            return self.theirs.storages[name].memory()
        return read_bytes(self.theirs.storages[alias.of], alias)

    def _tied_alike(self, name: str, whole: str | None) -> bool:
        """Returns whether the checkpoint has the same tie, so that there is nothing to compare."""
        here, there = self.mine.aliases.get(name), self.theirs.aliases.get(name)
        return here == there and there is not None and there.of == whole

    def refuse(self, strict: bool) -> None:
        """Raises if something does not fit."""
        facts = [(x.kind, x.text) for x in self.conflicts]
        names = [name for x in self.conflicts for name in x.names]
        if strict:
            facts += [("missing", name + text) for name, text in self.missing.items()]
            facts += [("unexpected", name) for name in self.unexpected]
            names += [*self.missing, *self.unexpected]
        if facts:
            more = [("and", f"{len(facts) - 20} more")] if len(facts) > 20 else []
            raise FileError(
                "the checkpoint does not fit the model",
                facts=[("file", str(self.theirs.path)), *facts[:20], *more],
                hint="Nothing was loaded; strict=False leaves what is missing, cast=True casts",
                paths=names,
            )


def _written(model: Any, mine: Gathered, values: dict[str, Stored], hidden: str) -> Any:
    """Returns the model with the values: written to, if its arrays can be."""
    libraries = {storage.library for storage, _ in mine.arrays.values()}
    _must_be_writeable(mine, values)
    if libraries <= {"numpy", "torch"}:
        for name, value in values.items():
            _write_in_place(*mine.arrays[name], value)
        return model
    by_name = {mine.arrays[name][0].name: (mine.arrays[name][0], value)
               for name, value in values.items()}  # fmt: skip

    def change(found: Any, one: Any, array: Any, library: Library) -> Any:
        given = by_name.get(storage_of(found, one).name)
        return array if given is None else _like(array, library, *given)

    return transform(model, change, hidden=hidden)


def _must_be_writeable(mine: Gathered, values: dict[str, Stored]) -> None:
    """Raises if an array of NumPy can't be written to, before any is."""
    for name in values:
        flags = getattr(mine.arrays[name][1], "flags", None)
        if flags is not None and not getattr(flags, "writeable", True):
            raise TieError(
                f"{name} is read-only and can't be loaded into",
                hint="Give the model a copy of it: x.copy()",
                paths=[name],
            )


def _in_order(x: Any, storage: Storage, shape: tuple[int, ...]) -> Any:
    """Returns an array of C order, or of a span in the order of memory, as the model has it."""
    if x.shape == shape:
        return x
    return x.reshape(storage.base_shape).transpose(storage.back)


def _write_in_place(storage: Storage, array: Any, value: Stored) -> None:
    kind = kinds[type(array)]
    assert isinstance(kind, Library)
    x = _in_order(_numpy(value), storage, tuple(array.shape))
    if kind.name == "torch":
        import torch

        with torch.no_grad():
            array.copy_(array_over(kind, np.ascontiguousarray(x).reshape(-1).view("u1").copy(),
                                   value).reshape(x.shape))  # fmt: skip
        return
    array[...] = x


def _numpy(value: Stored) -> Any:
    return array_over(load("numpy"), value.memory(), value)


def _like(array: Any, library: Library, storage: Storage, value: Stored) -> Any:
    """Returns a value as an array like another one: its dtype, and where it is."""
    if value.key:
        return array_over(library, value.memory(), value)
    cast = load("numpy").as_dtype(_numpy(value), library.dtype(array))
    made = library.from_numpy(_in_order(cast, storage, tuple(array.shape)))
    sharding = getattr(array, "sharding", None)
    committed = getattr(array, "committed", False)
    return library.move(made, sharding) if sharding is not None and committed else made
