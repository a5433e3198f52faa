"""A model as one vector, each element once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from tied._errors import DtypeError, MergeError
from tied._node import kinds
from tied._skeleton import split
from tied.arrays import Library, load


def ravel(model: Any, *, hidden: str = "warn") -> tuple[Any, Callable[[Any], Any]]:
    """Lays the floating storages of a model end to end in one vector.

    Args:
        model: Any object whose floating arrays are of one library. It is not changed.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        (vector, unravel). The vector is 1-D, a copy, each element once, in the dtype that all
        the storages promote to. `unravel(vector)` gives a new model, tied as this one, in the
        dtypes of this one; where a dtype is the vector's own the leaves share its memory. What is
        not floating (integers, booleans, keys) is not in the vector and comes back as it is.
        Both ways can be differentiated: the gradient is the sum over all uses.

    Raises:
        DtypeError: The arrays are of several libraries.
        MergeError: (by `unravel`) The vector has the wrong length.

    >>> import numpy as np, tied
    >>> W = np.ones((2, 3))
    >>> vector, unravel = tied.ravel({"enc": W, "dec": W.T, "b": np.zeros(2)})
    >>> vector.shape, unravel(vector)["dec"].shape
    ((8,), (3, 2))
    """
    skeleton, storages = split(model, hidden=hidden)
    floating = {name: x for name, x in storages.items() if _library(x).is_floating(x)}
    rest = {name: x for name, x in storages.items() if name not in floating}
    libraries = {_library(x).name for x in floating.values()}
    if len(libraries) > 1:
        raise DtypeError(
            f"one vector can't hold arrays of {' and '.join(sorted(libraries))}",
            hint='Move the model into one library first: tied.to(model, "torch")',
            paths=list(floating),
        )
    library = load(next(iter(libraries), "numpy"))
    shapes = {name: library.shape(x) for name, x in floating.items()}
    ends = list(itertools.accumulate((math.prod(s) for s in shapes.values()), initial=0))
    dtypes = {name: library.dtype(x) for name, x in floating.items()}

    def unravel(vector: Any) -> Any:
        kind = _library(vector)
        if kind.shape(vector) != (ends[-1],):
            raise MergeError(
                "the vector has another length than the model",
                facts=[("model", str((ends[-1],))), ("vector", str(kind.shape(vector)))],
                hint=f"Give a vector of shape {(ends[-1],)}",
                paths=list(floating),
            )
        parts = {
            name: kind.as_dtype(vector[start:stop].reshape(shapes[name]), dtypes[name])
            for name, start, stop in zip(shapes, ends, ends[1:], strict=False)
        }
        return skeleton.merge(parts, rest)

    return library.concatenate(list(floating.values())), unravel


def _library(x: Any) -> Library:
    kind = kinds[type(x)]
    if not isinstance(kind, Library):
        raise MergeError(f"a {type(x).__name__} is no array")
    return kind
