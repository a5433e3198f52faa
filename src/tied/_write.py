"""A write through one leaf of a storage: what the storage is then."""

from __future__ import annotations

from typing import Any

import numpy as np

from tied._errors import TieError
from tied._graft import find
from tied._layout import Step as Move
from tied._map import library_of
from tied._node import kinds
from tied._reading import how, reading
from tied._storage import Reader, Storage, storages
from tied._walk import Walk
from tied.arrays import Library
from tied.arrays.computed import plain


def written(found: Walk, name: str, value: Any) -> tuple[int, Any]:
    """Returns which storage an array reads, by number, and what it is after a write.

    Args:
        found: The walk of a model of JAX.
        name: The dotted name of the array.
        value: What the array is to be.

    Raises:
        PathError: There is no array of that name.
        TieError: It has another shape or dtype, or can't be written through.
    """
    item = find(found, name).item
    own = found.objects[item]
    for number, (storage, array) in enumerate(storages(found)):
        for reader in storage.readers:
            if reader.item == item:
                library = library_of(array)
                value = _fitted(library, own, value, name)
                if reader.layout is None:
                    return number, value
                return number, _through(storage, reader, library, array, value)
    record = found.records[item]
    sources = [] if record is None else [found.name(child) for _, child in record.holes]
    raise TieError(
        f"{name} is computed from {', '.join(sources)} and can't be written to",
        hint=f'Write to what it is computed from: bundle.set("{sources[0]}", value)',
        paths=[name, *sources],
    )


def _fitted(library: Library, own: Any, value: Any, name: str) -> Any:
    """Returns a value as an array that can stand for another one."""
    value = plain(value)
    if kinds[type(value)] is not library:
        value = np.asarray(value)
        if np.can_cast(value.dtype, own.dtype, "same_kind"):
            value = library.from_numpy(value.astype(own.dtype))
    facts = [
        (label, f"{name} has {mine}, not {its}")
        for label, mine, its in (
            ("shape", tuple(own.shape), tuple(value.shape)),
            ("dtype", str(own.dtype), str(value.dtype)),
        )
        if mine != its
    ]
    if facts:
        raise TieError(f"{name} can't be set to that", facts=facts, paths=[name])
    return value


def _through(storage: Storage, reader: Reader, library: Library, array: Any, value: Any) -> Any:
    """Returns a storage in which the elements that one of its leaves reads are others."""
    layout = reader.layout
    assert layout is not None
    if layout.dtype is not None or np.unique(layout.index()).size < layout.size:
        raise TieError(
            f"{reader.path} can't be written through",
            facts=[("reads", reading(reader.path, how(storage, reader)))],
            hint="It reads an element twice, or bits as another dtype: write to the storage",
            paths=dict.fromkeys([storage.name, reader.path]),
        )
    value = value.conj() if layout.conj else value
    value = -value if layout.neg else value
    flat = library.apply(array, [Move("permute", storage.order)])
    flat = library.put(flat, layout, value)
    return library.apply(flat, [Move("permute", storage.back)])
