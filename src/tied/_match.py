"""Several models walked together: what another model has where the first has a storage."""

from __future__ import annotations

from typing import Any

from tied._errors import MatchError
from tied._node import Closed, Node, kinds
from tied._path import take
from tied._storage import Reader, Storage
from tied._walk import Walk
from tied.arrays import Library

_MISSING = object()


class Partners:
    """The parts of another model, by the items of the first one's walk.

    Types come from the first model; the other may be of other types, as long as each step of a
    path leads somewhere in it, and containers of one type have the same keys.
    """

    def __init__(self, found: Walk, other: Any, number: int) -> None:
        self.found = found
        self.number = number
        self.parts: dict[int, Any] = {}
        if found.root >= 0:
            self.parts[found.root] = other
        for item in range(len(found.objects)):
            self._open(item)

    def _open(self, item: int) -> None:
        record = self.found.records[item]
        part = self.parts.get(item, _MISSING)
        if record is None or part is _MISSING:
            return
        children = self._children(item, part)
        for position, child in record.holes:
            if child in self.parts:
                continue
            if children is None:
                step = self.found.step(item, position)
                try:
                    self.parts[child] = take(part, step)
                except (AttributeError, LookupError, TypeError) as error:
                    raise self._differs(child, "has no such part") from error
            else:
                self.parts[child] = children[position]

    def _children(self, item: int, part: Any) -> list[Any] | None:
        """Returns the children of a part that is of the first model's type; None for others."""
        record = self.found.records[item]
        assert record is not None
        if (
            isinstance(part, (list, tuple))
            and len(part) != len(record.keys)
            and (record.node.step == "index")
        ):
            raise self._differs(item, f"has {len(part)} parts, not {len(record.keys)}")
        if type(part) is not record.cls:
            return None
        kind = kinds[type(part)]
        if not isinstance(kind, Node):
            return None
        try:
            opened = kind.open(part)
        except Closed:
            opened = None
        if opened is None or list(opened[0]) != list(record.keys):
            raise self._differs(item, "has other parts")
        return opened[1]

    def value(self, storage: Storage, array: Any) -> Any:
        """Returns the other model's value for a storage, in the storage's shape.

        Raises:
            MatchError: The other model's values at the leaves of the storage disagree.
        """
        chosen = storage.readers[max(storage.whole, 0)]
        if storage.whole < 0:
            return self._spanned(storage)
        value = self.parts.get(chosen.item, _MISSING)
        if value is _MISSING:
            raise self._differs(chosen.item, "has no such part")
        if len(storage.readers) > 1:
            self._agree(storage, value)
        return value

    def _agree(self, storage: Storage, value: Any) -> None:
        library = kinds[type(value)]
        for i, reader in enumerate(storage.readers):
            other = self.parts.get(reader.item, _MISSING)
            if i == storage.whole or other is value or reader.layout is None:
                continue
            if other is _MISSING or other is None or not isinstance(library, Library):
                continue
            if not _reads_alike(library, storage, reader, value, other):
                name = storage.readers[storage.whole].path
                raise MatchError(
                    f"model {self.number} has two values for one storage",
                    facts=[("one", name), ("other", reader.path)],
                    hint="Give both leaves the same values, or sum them: tied.accumulate",
                    paths=[name, reader.path],
                )

    def _spanned(self, storage: Storage) -> Any:
        """Returns the span that a matching tie of the other model reads."""
        values = [self.parts.get(reader.item, _MISSING) for reader in storage.readers]
        shaped = [v for v in values if tuple(getattr(v, "shape", ())) == storage.shape]
        if shaped:
            return shaped[0]
        raise MatchError(
            f"model {self.number} has separate values for leaves that only overlap",
            facts=[("leaf", reader.path) for reader in storage.readers],
            hint=f"Give each of them the storage's own shape, {storage.shape}",
            paths=[reader.path for reader in storage.readers],
        )

    def _differs(self, item: int, what: str) -> MatchError:
        path = self.found.name(item)
        return MatchError(
            f"model {self.number} {what}: {path or 'the model'}",
            hint="Every model must have the parts of the first",
            paths=[path],
        )


def _reads_alike(
    library: Library, storage: Storage, reader: Reader, value: Any, other: Any
) -> bool:
    if kinds[type(other)] is not library:
        return False
    if library.shape(other) == storage.shape and library.agrees(value, other):
        return True
    assert reader.layout is not None
    flat, _ = library.flat(value, storage.order)
    seen = library.read(flat, storage.base_shape, reader.layout, None)
    kind = kinds[type(seen)]
    assert isinstance(kind, Library)
    return library.shape(other) == kind.shape(seen) and kind.agrees(seen, other)
