"""Floating dtypes: `cast` and its short names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tied._errors import DtypeError
from tied._map import counters, first, quiet, rebuild, storage_of, taken_apart
from tied._overlap import Cluster
from tied._requests import Requests
from tied._walk import Walk, steady
from tied.arrays import Library


@steady()
def cast(model: Any, dtype: Any, *, hidden: str = "warn") -> Any:
    """Casts the floating arrays of a model; complex ones get the complex dtype of that precision.

    Integers, booleans, random keys and the step counters of optimizers stay.

    Args:
        model: Any object. It is not changed.
        dtype: A floating dtype: a name ("bfloat16"), or a dtype of NumPy, PyTorch or JAX. A dict
            gives dtypes by globs on names, `{"*.norm.*": "float32", "*": "bfloat16"}`; any name of
            an array counts, and the first glob that fits it is taken. The rest stays.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model, tied as the old one; arrays that had the dtype already are the same objects.

    Raises:
        DtypeError: The dtype is not floating, or an array's library does not have it.
        PathError: A glob fits no name.
        TieError: The bits of a storage are read as another dtype, or two names of one storage ask
            for different dtypes.

    >>> import numpy as np, tied
    >>> tied.cast({"w": np.zeros(2), "n": np.arange(2)}, "float32")["w"].dtype
    dtype('float32')
    """
    wanted = dtype if isinstance(dtype, Mapping) else {"*": dtype}
    names = {pattern: dtype_name(x) for pattern, x in wanted.items()}
    found = taken_apart(model, hidden)
    counting = counters(found)
    asked = Requests(found, names, "dtypes") if wanted is dtype else None

    def change(found: Walk, one: int | Cluster, array: Any, library: Library) -> Any:
        if counting and first(one) in counting:
            return array
        name = names["*"] if asked is None else asked.of(storage_of(found, one), None)
        return array if name is None else library.cast(array, name)

    with quiet(found):
        return rebuild(found, model, change)


_FLOATING = ("float16", "float32", "float64", "bfloat16", "longdouble")


def dtype_name(dtype: Any) -> str:
    """Returns the name of a floating dtype of any library.

    Raises:
        DtypeError: It is none.
    """
    name: str
    if isinstance(dtype, str):
        name = dtype
    elif str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
    else:
        name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype))
    if name not in _FLOATING and not name.startswith("float8"):
        raise DtypeError(
            f"{dtype!r} is not a floating dtype",
            hint=f"Type one of {', '.join(_FLOATING[:4])}; integers and booleans are never cast",
        )
    return name


def f16(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to 16 bits: `cast(model, "float16")`."""
    return cast(model, "float16", hidden=hidden)


def bf16(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to bfloat16: `cast(model, "bfloat16")`."""
    return cast(model, "bfloat16", hidden=hidden)


def f32(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to 32 bits: `cast(model, "float32")`."""
    return cast(model, "float32", hidden=hidden)


def f64(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to 64 bits: `cast(model, "float64")`; JAX needs 64 bits enabled."""
    return cast(model, "float64", hidden=hidden)
