"""Where arrays live, and whether two of them meet."""

from __future__ import annotations

from typing import Any

from tied import arrays
from tied._errors import TiedError
from tied._overlap import clusters
from tied._walk import walk
from tied.arrays import Library, Span


def span(array: Any) -> Span:
    """Says where an array lives: its device, its allocation, and its byte range.

    Args:
        array: An array of NumPy, PyTorch or JAX, or a `tied.View`; of subclasses, sharded
            (DTensor: the local part), fake, `meta` and traced arrays too. It is not read.

    Returns:
        The `Span`. Addresses of one device are one space, whichever library an array is of.
        Arrays without an address are placed in their storage object, by its identity, which is
        good as long as that object lives.

    Raises:
        TiedError: It is no array.

    >>> import numpy as np, tied
    >>> a = np.zeros(10, "float32")
    >>> tied.span(a[2:4]).start - tied.span(a).start
    8
    """
    return _library(array).span(array)


def shares(a: Any, b: Any) -> bool:
    """Says whether two arrays share an element.

    Args:
        a: An array, or a model: then any of its arrays.
        b: The same.

    Returns:
        True if an element of memory belongs to both (for JAX arrays: if they are one object, or
        views of one). Arrays that interleave, touch, or lie in one buffer, share nothing.

    >>> import numpy as np, tied
    >>> a = np.zeros((4, 4))
    >>> tied.shares(a, a.T), tied.shares(a[:, 0], a[:, 1])
    (True, False)
    """
    one, other = walk(a), walk(b)
    ids = {id(one.objects[item]) for item in one.leaves if _counts(one.objects[item])}
    if any(id(other.objects[item]) in ids for item in other.leaves):
        return True
    both = walk([a, b])
    first = {id(one.objects[item]) for item in one.leaves}
    for cluster in clusters(both):
        if not isinstance(cluster, int):
            sides = {id(both.objects[both.leaves[m]]) in first for m in cluster.members}
            if len(sides) == 2:
                return True
    return False


def _counts(array: Any) -> bool:
    return 0 not in _library(array).shape(array)


def _library(array: Any) -> Library:
    library = arrays.library_for(type(array))
    if library is None:
        found = walk(array)
        if found.leaves:
            raise TiedError(
                f"a {type(array).__name__} is made of several arrays",
                facts=[("parts", ", ".join(found.name(item) for item in found.leaves[:8]))],
                hint="Ask for the place of one of them",
                paths=[found.name(item) for item in found.leaves],
            )
        raise TiedError(
            f"{type(array).__name__} is no array that tied knows",
            hint="Give an array of NumPy, PyTorch or JAX, or a tied.View",
        )
    return library
