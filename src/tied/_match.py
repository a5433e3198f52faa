"""Several models walked together: what another model has where the first has a storage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tied._errors import MatchError
from tied._node import Closed, Node, kinds
from tied._path import Path, take
from tied._storage import Reader, Storage, storages
from tied._walk import Walk, walk
from tied.arrays import Library
from tied.arrays.computed import plain


class Partners:
    """The parts of another model, by the items of the first one's walk.

    Types come from the first model; the other may be of other types, as long as each step of a
    path leads somewhere in it, and containers of one type have the same keys. An item that stands
    at several places of the first model may have several partners.
    """

    def __init__(self, found: Walk, other: Any, number: int) -> None:
        self.found = found
        self.other = other
        self.number = number
        self.parts: dict[int, list[tuple[Any, tuple[int, int]]]] = {}
        self._readings: dict[int, tuple[Storage, Reader, Any]] | None = None
        self._follow(other)

    def _follow(self, other: Any) -> None:
        """Pairs items with parts of the other model, along every way that leads to an item."""
        queue = [(self.found.root, other, (-1, 0))] if self.found.root >= 0 else []
        while queue:
            item, part, place = queue.pop()
            known = self.parts.setdefault(item, [])
            if any(part is one for one, _ in known):
                continue
            known.append((part, place))
            record = self.found.records[item]
            if record is None:
                continue
            children = self._children(item, part)
            for position, child in reversed(record.holes):
                if children is not None:
                    queue.append((child, children[position], (item, position)))
                    continue
                try:
                    below = take(part, self.found.step(item, position))
                    queue.append((child, below, (item, position)))
                except (AttributeError, LookupError, TypeError) as error:
                    raise self._missing(item, position) from error

    def _children(self, item: int, part: Any) -> list[Any] | None:
        """Returns the children of a part that is of the first model's type; None for others."""
        record = self.found.records[item]
        assert record is not None
        keys = list(record.keys)
        if record.node.step == "index" and isinstance(part, (list, tuple)):
            self._same_keys(item, keys, list(range(len(part))))
        kind = kinds[type(part)]
        if type(part) is not record.cls or not isinstance(kind, Node):
            return None
        try:
            opened = kind.open(part)
        except Closed:
            opened = None
        self._same_keys(item, keys, [] if opened is None else list(opened[0]))
        return None if opened is None else opened[1]

    def _same_keys(self, item: int, keys: list[Any], others: list[Any]) -> None:
        if keys == others:
            return
        for position, key in enumerate(keys):
            if key not in others:
                raise self._missing(item, position)
        more = [key for key in others if key not in keys]
        name = self.found.name(item) or "the model"
        raise MatchError(
            f"model {self.number} has other parts than the first",
            facts=[
                ("at", name),
                ("more", ", ".join(map(str, more)) or "the same in another order"),
            ],
            hint="Every model must have the parts of the first",
            paths=[self.found.name(item)],
        )

    def _missing(self, item: int, position: int) -> MatchError:
        path = str(Path((*self.found.path(item).steps, self.found.step(item, position))))
        return MatchError(
            f"model {self.number} lacks a part of the first: {path}",
            hint="Every model must have the parts of the first",
            paths=[path],
        )

    def value(self, storage: Storage, array: Any) -> Any:
        """Returns the other model's value for a storage, in the storage's shape.

        Raises:
            MatchError: The other model's values at the leaves of the storage disagree.
        """
        found = [(r, part, place) for r in storage.readers for part, place in self.parts[r.item]]
        values = [(reader, part) for reader, part, _ in found]
        if len(values) == 1 and storage.plain:
            return values[0][1]
        tied_alike = self._tied_alike(storage, values)
        if tied_alike is not None:
            return tied_alike
        values = [(reader, plain(part)) for reader, part in values]
        whole = storage.readers[max(storage.whole, 0)]
        first = next(part for reader, part in values if reader.item == whole.item)
        if not isinstance(kinds[type(first)], Library):
            return first
        if storage.whole < 0:
            first = self._assembled(storage, values)
        for (reader, part), (_, _, place) in zip(values, found, strict=True):
            if part is not None and part is not first and not _agree(storage, reader, first, part):
                raise self._disagree(whole.path, str(self.found.place(*place)))
        return first

    def _tied_alike(self, storage: Storage, values: list[tuple[Reader, Any]]) -> Any:
        """Returns the other model's storage, if its leaves are tied as the first model's are."""
        if self._readings is None:
            self._readings = {}
            there = walk(self.other)
            for one, array in storages(there):
                for reader in one.readers:
                    self._readings[id(there.objects[reader.item])] = (one, reader, array)
        seen = [self._readings.get(id(part)) for _, part in values]
        if any(one is None for one in seen) or not seen:
            return None
        one, _, array = seen[0]  # type: ignore[misc]
        for (reader, _), entry in zip(values, seen, strict=True):
            assert entry is not None
            if entry[0] is not one or entry[1].layout != reader.layout:
                return None
        return array if (one.shape, one.order) == (storage.shape, storage.order) else None

    def _assembled(self, storage: Storage, values: list[tuple[Reader, Any]]) -> Any:
        """Returns the span that leaves read which only overlap, from their separate values."""
        for _, part in values:
            if tuple(getattr(part, "shape", ())) == storage.shape:
                return part
        library = kinds[type(values[0][1])]
        assert isinstance(library, Library)
        source = np.full(math.prod(storage.shape), -1)
        taken = 0
        for reader, part in values:
            if reader.layout is None or reader.layout.dtype or part.shape != reader.layout.shape:
                raise self._disagree(storage.readers[0].path, reader.path)
            index = reader.layout.index().reshape(-1)
            source[index] = np.arange(taken, taken + index.size)
            taken += index.size
        pieces = library.concatenate([part for _, part in values])
        assembled = pieces[np.maximum(source, 0)].reshape(storage.shape)
        return assembled

    def _disagree(self, one: str, other: str) -> MatchError:
        return MatchError(
            f"model {self.number} has two values for one storage",
            facts=[("one", one), ("other", other)],
            hint="Give both leaves the same values; sum separate gradients with tied.accumulate",
            paths=[one, other],
        )


def _agree(storage: Storage, reader: Reader, value: Any, other: Any) -> bool:
    """Returns whether a leaf's own value is what it would read of the storage's value."""
    library = kinds[type(value)]
    if not isinstance(library, Library) or kinds[type(other)] is not library:
        return False
    if library.shape(other) == storage.shape and library.agrees(value, other):
        return True
    if reader.layout is None or library.shape(value) != storage.shape:
        return False
    flat, _ = library.flat(value, storage.order)
    seen = plain(library.read(flat, storage.base_shape, reader.layout, None))
    return library.shape(other) == library.shape(seen) and library.agrees(seen, other)
