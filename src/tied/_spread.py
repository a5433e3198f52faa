"""From a storage back to the leaves that read it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tied._errors import TieError
from tied._node import kinds
from tied._reading import how, reading
from tied._storage import Reader, Storage
from tied.arrays import Library, load


def spread(storage: Storage, result: Any) -> list[tuple[int, Any]]:
    """Returns (item, new leaf) for each reader of a storage, given what became of the storage.

    Raises:
        TieError: The result can't be read as the storage was; the error names both paths.
    """
    if isinstance(result, np.generic) and storage.library == "numpy":
        result = np.asarray(result)  # NumPy's functions make scalars of 0-d arrays
    library = kinds[type(result)]
    if storage.plain:
        reader = storage.readers[0]
        if isinstance(library, Library) and library.name == reader.library:
            return [(reader.item, library.dress(result, reader.meta))]
        return [(reader.item, result)]
    _fits(storage, result, library)
    assert isinstance(library, Library)
    flat, shared = library.flat(result, storage.order)
    leaves = []
    own = None
    tracked = library.tracked(
        result, [r.meta for r in storage.readers if r.library == library.name]
    )
    order = sorted(range(len(storage.readers)), key=lambda i: i != storage.whole)
    for i in order:  # the storage's own leaf first
        reader = storage.readers[i]
        assert reader.layout is not None
        meta = reader.meta if reader.library == library.name else None
        if i == storage.whole and shared:
            leaf = library.dress(result, meta)
        else:
            source = flat
            if own is not None and meta is not None and library.follows(meta):
                source, _ = library.flat(own, storage.order)
            leaf = library.read(source, storage.base_shape, reader.layout, meta, tracked)
        own = leaf if i == storage.whole else own
        if reader.library not in (library.name, "lazy") and library.name == storage.library:
            leaf = _translated(leaf, library, reader)
        leaves.append((reader.item, leaf))
    return leaves


def _fits(storage: Storage, result: Any, library: Any) -> None:
    """Raises unless a result can be read as its storage was."""
    if not isinstance(library, Library) or library.name in ("opaque", "lazy"):
        kind = "None" if result is None else type(result).__name__
        what = f"{kind}, not an array"
        raise _unfit(storage, "replace a storage that is read as a view", what, "an array")
    shape = library.shape(result)
    if shape != storage.shape:
        change = f"{storage.shape} -> {shape}"
        raise _unfit(
            storage,
            "change the shape of a storage that is read as a view",
            change,
            f"an array of shape {storage.shape}",
        )
    dtype = library.dtype(result)
    bits = [r for r in storage.readers if r.layout is not None and r.layout.dtype is not None]
    if bits and dtype != storage.dtype:
        change = f"{storage.dtype} -> {dtype}"
        raise _unfit(
            storage,
            "change the dtype of a storage whose bits are read as another dtype",
            change,
            f"an array of dtype {storage.dtype}",
            bits[0],
        )


def _unfit(
    storage: Storage, what: str, change: str, wanted: str, reader: Reader | None = None
) -> TieError:
    others = [r for i, r in enumerate(storage.readers) if i != storage.whole]
    reader = reader or others[0]
    shown = [reader] if storage.whole >= 0 else others[:8]
    return TieError(
        f"map cannot {what}",
        facts=[
            ("storage", f"{storage.name or 'the model'}   {change}"),
            *(("view", reading(r.path, how(storage, r))) for r in shown),
        ],
        hint=f"Return {wanted}, or give {reader.path} memory of its own first (a copy)",
        paths=[storage.name, *(r.path for r in storage.readers if r.path != storage.name)],
    )


def _translated(leaf: Any, library: Library, reader: Reader) -> Any:
    """Returns a leaf of one library as an array of another over the same memory."""
    other = load(reader.library)
    made = other.alias(library.to_numpy(leaf)) if library.device(leaf) == "cpu" else None
    if made is None:
        raise TieError(
            f"a tie across {library.name} and {reader.library} can't be kept here",
            hint=f'Move the model into one library first: tied.to(model, "{library.name}")',
        )
    return other.dress(made, reader.meta)
