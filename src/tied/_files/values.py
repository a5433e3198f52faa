"""The elements of a storage, as the integers that their bits are, and what is asked of them.

Everything is done in pieces that fit into a cache, so that nothing as large as a tensor is
allocated. A file is mapped for one storage at a time, and let go with the array.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from tied._files.contents import Stored
from tied._files.dtypes import BITS
from tied._files.header import bad
from tied._layout import Layout

# A disk gives so many bytes, read from start to end, sooner than the samples from all over them.
AT_ONCE = 1 << 26
PIECE = 1 << 16  # elements that are looked at together
SQUARE = 1 << 18  # and where they are in different orders: rows of a page or so


def elements(stored: Stored) -> Any:
    """Returns the elements of a storage as a flat array of unsigned integers; not to be written to.

    Elements that are no whole bytes come as the bytes that they are in.
    """
    memory = stored.memory() if stored.file is None else _mapped(stored)
    bits = BITS[stored.dtype]
    return memory if bits % 8 else memory.view(f"u{bits // 8}")


def _mapped(stored: Stored) -> Any:
    """Returns the bytes of a storage over a mapping of its own, which goes with them."""
    assert stored.file is not None
    start = stored.start - stored.start % mmap.ALLOCATIONGRANULARITY
    length = stored.start + stored.nbytes - start
    try:
        with stored.file.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
    except ValueError as error:
        raise bad(stored.file, "a file that has become shorter", stored.name) from error
    memory = np.frombuffer(mapped, np.uint8, stored.nbytes, stored.start - start)
    if memory.size <= AT_ONCE:
        memory[:: mmap.PAGESIZE].max()
    return memory


def seen(flat: Any, layout: Layout) -> Any:
    """Returns the array that a layout reads of flat elements; a view."""
    size = flat.itemsize
    strides = tuple(stride * size for stride in layout.strides)
    return np.ndarray(layout.shape, flat.dtype, flat, layout.offset * size, strides)


def alike(a: Any, b: Any) -> bool:
    """Returns whether two flat arrays have the same elements; in words of 8 bytes."""
    a, b = a.view(np.uint8), b.view(np.uint8)
    cut = a.size // 8 * 8
    words = zip(_pieces(a[:cut].view(np.uint64)), _pieces(b[:cut].view(np.uint64)), strict=True)
    return bool((a[cut:] == b[cut:]).all()) and all((x == y).all() for x, y in words)


def same(a: Any, b: Any) -> bool:
    """Returns whether two arrays of one shape have the same elements.

    The longest axis is halved until a piece is small: of an array and a transpose, that leaves
    squares, so that both are read by whole lines of the cache.
    """
    if a.size > SQUARE:
        return all(same(*halves) for halves in zip(_halves(a), _halves(b), strict=True))
    return bool((a == (b if b.flags.c_contiguous else _near(b))).all())


def _near(x: Any) -> Any:
    """Returns a copy of a small array, in the order of its memory.

    Its rows are not as long as a power of two, as those of models are: walking down a column would
    use a few lines of the cache only.
    """
    order = sorted(range(x.ndim), key=x.strides.__getitem__, reverse=True)
    x = x.transpose(order)
    copied = np.empty((*x.shape[:-1], x.shape[-1] + 64 // x.itemsize), x.dtype)[..., : x.shape[-1]]
    copied[...] = x
    return copied.transpose(sorted(range(x.ndim), key=order.__getitem__))


def constant(x: Any) -> bool:
    """Returns whether all elements of a flat array are one value."""
    first, few = x[:1], 256  # few elements of most arrays tell
    if not (x[:few] == first).all():
        return False
    return all((piece == first).all() for piece in _pieces(x))


def total(x: Any) -> int:
    """Returns the sum of the elements modulo 2**64: the same in whatever order they are."""
    if x.size <= PIECE:
        return int(np.add.reduce(x, axis=None, dtype=np.uint64))
    return sum(total(half) for half in _halves(x)) % (1 << 64)


def _pieces(x: Any) -> Iterator[Any]:
    return (x[i : i + PIECE] for i in range(0, x.size, PIECE))


def _halves(x: Any) -> tuple[Any, Any]:
    axis = max(range(x.ndim), key=x.shape.__getitem__)
    before, middle = (slice(None),) * axis, x.shape[axis] // 2
    return x[(*before, slice(middle))], x[(*before, slice(middle, None))]
