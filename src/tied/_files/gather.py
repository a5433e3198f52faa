"""A model, or a dict of arrays, as the contents of a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path as File
from typing import Any, NamedTuple

import numpy as np

from tied import _unreached
from tied._errors import DtypeError
from tied._files.contents import Alias, Checkpoint, Stored
from tied._files.dtypes import BITS, CODES
from tied._layout import Layout
from tied._node import kinds
from tied._path import Path
from tied._places import places
from tied._skeleton import named
from tied._storage import Storage, storages
from tied._walk import Walk, walk
from tied.arrays import Library

SPAN = "tied_span"
"""The last part of a storage's name where no array reads it whole."""


class Gathered(NamedTuple):
    """The contents that a model makes.

    Attributes:
        contents: They.
        arrays: For each storage of them, by name, the array of the model; in the order of memory
            if the storage is a span that nothing reads whole.
    """

    contents: Checkpoint
    arrays: dict[str, tuple[Storage, Any]]


def gather(model: Any, hidden: str = "warn") -> Gathered:
    """Returns what is to be written of a model: each storage once, and every name.

    Args:
        model: Any object. It is not changed; the contents share its memory.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Raises:
        DtypeError: An array has a dtype that safetensors has not, or no elements (`meta`).
    """
    found = walk(model, extras=True, readings=True)
    _unreached.check(found, hidden)
    contents = Checkpoint(File(), "model", {})
    names = _names(found)
    arrays = {
        _add(contents, storage, array, names): (storage, array)
        for storage, array in named(storages(found))
        if not all(_passes(found, reader.item) for reader in storage.readers)
    }
    contents.computed = _computed(found)
    return Gathered(contents, arrays)


def _passes(found: Walk, item: int) -> bool:
    """Returns whether a leaf is a buffer that PyTorch keeps out of checkpoints, and no more."""
    parent = found.parents[item]
    buffers = getattr(found.objects[parent], "_non_persistent_buffers_set", ())
    if not buffers or found.step(parent, found.positions[item]).key not in buffers:
        return False
    return all(again != item for again, _, _ in found.repeats)


def _names(found: Walk) -> dict[int, list[str]]:
    """Returns every name of each leaf, the first one first."""
    names: dict[int, list[str]] = {item: [found.name(item)] for item in found.leaves}
    for steps, item in places(found):
        name = str(Path(steps))
        if name not in names[item]:
            names[item].append(name)
    return names


def _computed(found: Walk) -> dict[str, tuple[str, ...]]:
    """Returns what the model computes of its storages, and of which."""
    computed: dict[str, list[str]] = {}
    for node, position, _, source in found.computed:
        if source >= 0:
            computed.setdefault(str(found.place(node, position)), []).append(found.name(source))
    for item, node, _ in found.repeats:
        record = found.records[node] if node >= 0 else None
        if record is not None and record.node.derived:
            computed.setdefault(found.name(node), []).append(found.name(item))
    return {name: tuple(sources) for name, sources in computed.items()}


def _add(contents: Checkpoint, storage: Storage, array: Any, names: dict[int, list[str]]) -> str:
    """Puts a storage and the names that read it into the contents; returns its name there."""
    code = _code(storage.dtype)
    if code is None:
        raise DtypeError(
            f"a file has no dtype {storage.dtype}",
            facts=[("array", storage.name or "the model")],
            hint="Leave it out, or give it another dtype, before you save",
            paths=[storage.name],
        )
    if not storage.plain and (storage.dtype.startswith("key<") or BITS[code] % 8):
        raise DtypeError(
            f"a file has no views of {storage.dtype}",
            facts=[("array", reader.path) for reader in storage.readers],
            paths=[reader.path for reader in storage.readers],
        )
    layouts = _layouts(storage)
    whole = storage.whole if layouts is not None else -1
    base = array if layouts is not None else None
    name = storage.name if whole >= 0 else f"{storage.name}.{SPAN}".lstrip(".")
    shape = storage.shape if base is not None else (math.prod(storage.shape),)
    memory = _memory(array, storage if base is None else None)
    key = ""
    if storage.dtype.startswith("key<"):
        key, shape, memory = _key_data(array)
    elif code == "F4":  # two elements in a byte, which is what PyTorch counts
        shape = (*shape[:-1], 2 * shape[-1])
    nbytes = math.prod(shape) * BITS[code] // 8
    contents.storages[name] = Stored(name, code, shape, nbytes, memory, named=whole >= 0, key=key)
    for number, reader in enumerate(storage.readers):
        layout = reader.layout if layouts is None else layouts[number]
        if layout is None:
            layout = Layout.whole(shape)
        if layout.dtype is not None:
            layout = dataclasses.replace(layout, dtype=_code(layout.dtype))
        further = names.get(reader.item, [reader.path])
        for place in further:
            if place != name:
                contents.aliases[place] = Alias(place, name, layout)
    return name


def _layouts(storage: Storage) -> list[Layout | None] | None:
    """Returns what the readers read of the storage in its own shape; None if that can't be said.

    Layouts count in the order of memory, and a file has arrays in C order.
    """
    if storage.order == tuple(range(len(storage.order))):
        return [reader.layout for reader in storage.readers]
    in_memory = Layout.of(lambda x: x.transpose(storage.order), storage.shape)
    assert in_memory is not None
    layouts: list[Layout | None] = []
    for reader in storage.readers:
        assert reader.layout is not None
        seen = in_memory.then(reader.layout)
        if seen is None:
            return None
        layouts.append(seen)
    return layouts


def _code(dtype: str) -> str | None:
    """Returns the code of a dtype; None if safetensors has none."""
    if dtype.startswith("key<"):
        return "U32"
    if dtype.startswith(">"):
        dtype = np.dtype(dtype).newbyteorder("<").name
    return CODES.get(dtype)


def _key_data(array: Any) -> tuple[str, tuple[int, ...], Callable[[], Any]]:
    """Returns the implementation of random keys of JAX, and their data."""
    import jax

    data = jax.random.key_data(array)
    return str(jax.random.key_impl(array)), tuple(data.shape), _memory(data, None)


def _memory(array: Any, in_memory_order: Storage | None) -> Callable[[], Any]:
    """Returns what gives the bytes of an array, in C order, or in that of its memory."""
    kind = kinds[type(array)]
    assert isinstance(kind, Library)
    order = in_memory_order.order if in_memory_order is not None else ()
    half_bytes = kind.name == "torch" and kind.dtype(array).startswith("float4")

    def memory() -> Any:
        x = kind.to_numpy(_in_whole_bytes(array) if half_bytes else array)
        x = x.transpose(order) if order else x
        if x.dtype.byteorder == ">":
            x = x.astype(x.dtype.newbyteorder("<"))
        return np.ascontiguousarray(x).reshape(-1).view(np.uint8)

    return memory


def _in_whole_bytes(tensor: Any) -> Any:
    """Returns a tensor of half bytes as one of bytes; NumPy has no such elements."""
    import torch

    return tensor.view(torch.uint8)
