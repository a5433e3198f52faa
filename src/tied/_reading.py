"""How a leaf reads its storage, in words: `decoder.weight = encoder.weight.T`."""

from __future__ import annotations

import ast

import numpy as np

from tied._errors import TiedError
from tied._layout import Layout
from tied._storage import Reader, Storage


def located(error: TiedError, storage: Storage) -> TiedError:
    """Returns an error that names the leaves of the storage at which it happened."""
    if error.paths:
        return error
    facts = [("storage", storage.name or "the model"), *error.facts]
    facts += [("leaf", reading(r.path, how(storage, r))) for r in _viewers(storage)]
    paths = [storage.name, *(r.path for r in _viewers(storage))]
    return type(error)(error.message, facts=facts, hint=error.hint, paths=paths)


def _viewers(storage: Storage) -> list[Reader]:
    """Returns the readers that are not the storage itself."""
    return [r for i, r in enumerate(storage.readers) if i != storage.whole and r.layout is not None]


def how(storage: Storage, reader: Reader) -> str:
    """Returns how a leaf reads its storage, as a person writes it: `encoder.weight.T`."""
    if reader.layout is None:
        return storage.name
    name, shape = storage.name, storage.base_shape
    if storage.whole < 0:
        if len(shape) == 1 and _is_run(reader.layout):
            low, high = reader.layout.extent
            return f"elements {low} to {high - 1}"
        name = "span" if len(shape) == 1 else "base"
    elif storage.order != tuple(range(len(storage.order))):
        own = storage.readers[storage.whole].layout
        if reader.layout == own:
            return name
        if len(storage.order) == 2:
            name += ".T"
        else:
            name += f".transpose{storage.order}"
        if reader.layout.is_whole(shape):
            return name
    layout = reader.layout
    rows = _rows(layout, shape)
    if rows is not None:
        return f"{name}[{rows}]"
    if layout.dtype is not None and storage.dtype[:1] in "[{":
        return _field(storage, layout, name)
    return layout.describe(shape, name, base_dtype=storage.dtype)


def reading(path: str, text: str) -> str:
    """Returns a leaf and how it reads: `dec = enc.T`, `a reads elements 0 to 59`."""
    if text.startswith("computed "):
        return f"{path} is {text}"
    return f"{path} {'reads' if text.startswith(_SPANS) else '='} {text}"


_SPANS = ("elements ", "span", "base")


def _is_run(layout: Layout) -> bool:
    """Returns whether a leaf reads neighbouring elements in their order, as they are."""
    plain = layout.dtype is None and not (layout.conj or layout.neg) and 0 not in layout.shape
    return plain and layout.strides == Layout.whole(layout.shape).strides


def _rows(layout: Layout, shape: tuple[int, ...]) -> str | None:
    """Returns the index of a leaf that reads whole rows, found without a search for steps."""
    if layout.dtype is not None or layout.conj or layout.neg or len(shape) < 1 or 0 in shape:
        return None
    strides = Layout.whole(shape).strides
    row, inside = divmod(layout.offset, strides[0])
    if inside or (layout.shape, layout.strides) == (shape, strides):
        return None
    if (layout.shape, layout.strides) == (shape[1:], strides[1:]):
        return str(row)
    same_rows = len(layout.shape) == len(shape) and layout.shape[1:] == shape[1:]
    if same_rows and layout.strides == strides and layout.shape[0] > 1:
        stop = row + layout.shape[0]
        return f"{row or ''}:{stop if stop < shape[0] else ''}"
    return None


def _field(storage: Storage, layout: Layout, name: str) -> str:
    """Returns how a leaf reads a field of structured elements: `records['x']`."""
    record = np.dtype(ast.literal_eval(storage.dtype))
    for field, (dtype, offset, *_) in (record.fields or {}).items():
        start, inside = divmod(layout.offset, record.itemsize)
        whole = all(stride % record.itemsize == 0 for stride in layout.strides)
        if whole and (str(dtype), offset) == (layout.dtype, inside):
            strides = tuple(stride // record.itemsize for stride in layout.strides)
            inner = Layout(layout.shape, strides, start).canonical()
            return inner.describe(storage.base_shape, f"{name}[{field!r}]")
    return f"{name}, bits as {layout.dtype}"
