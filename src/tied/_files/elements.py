"""The elements that a name reads, as bytes: any dtype, also those that NumPy has not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tied._files.contents import Alias, Stored
from tied._files.dtypes import BITS, NAMES
from tied._layout import Layout

_MAX_WORK: Any = 100_000


def read_bytes(base: Stored, alias: Alias) -> Any:
    """Returns the bytes of what an alias reads, in C order, as a 1-D uint8 array of its own."""
    dtype = alias.layout.dtype or base.dtype
    memory = base.memory()
    out = np.array(_records(memory, dtype, alias.layout), order="C").reshape(-1).view(np.uint8)
    return _signed(out, dtype, alias.layout)


def write_bytes(memory: Any, dtype: str, alias: Alias, given: Any) -> None:
    """Writes the bytes of an array to where an alias reads it.

    Args:
        memory: The bytes of the storage; they are changed.
        dtype: The dtype of the storage.
        alias: The alias.
        given: The bytes of the array, in C order.
    """
    told = alias.layout.dtype or dtype
    records = _records(memory, told, alias.layout)
    records[...] = (
        _signed(given.copy(), told, alias.layout).view(records.dtype).reshape(records.shape)
    )


def overlapping(base: Stored, readers: Sequence[Alias]) -> bool:
    """Returns whether any two of the readers of a storage read a common element."""
    memory = np.empty(base.nbytes, np.uint8)  # only addresses are looked at
    seen = [_records(memory, x.layout.dtype or base.dtype, x.layout) for x in readers]
    return any(_meet(a, b) for a, b in itertools.combinations(seen, 2))


def _meet(a: Any, b: Any) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=_MAX_WORK))
    except np.exceptions.TooHardError:
        return True


def unsigned(layout: Layout) -> Layout:
    """Returns a layout that reads the same elements as they are stored."""
    return dataclasses.replace(layout, conj=False, neg=False)


def _records(memory: Any, dtype: str, layout: Layout) -> Any:
    """Returns the elements that a layout reads, as records without a meaning, over the memory."""
    size = BITS[dtype] // 8
    unit = 1 if layout.dtype is not None else size
    if 0 in layout.shape:
        return np.empty(layout.shape, f"V{size}")
    strides = tuple(stride * unit for stride in layout.strides)
    return np.ndarray(layout.shape, f"V{size}", memory, layout.offset * unit, strides)


def _signed(out: Any, dtype: str, layout: Layout) -> Any:
    """Conjugates and negates elements as a layout says, in place."""
    if dtype == "C64":
        numbers = out.view(np.complex64)
        if layout.conj:
            np.conj(numbers, out=numbers)
        if layout.neg:
            np.negative(numbers, out=numbers)
    elif layout.neg and dtype[0] in "IU":
        numbers = out.view(NAMES[dtype])
        np.negative(numbers, out=numbers)
    elif layout.neg:
        top = out.reshape(-1, BITS[dtype] // 8)[:, -1]
        np.bitwise_xor(top, 0x80, out=top)
    return out
