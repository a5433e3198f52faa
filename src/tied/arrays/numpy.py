"""NumPy arrays."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tied._errors import DtypeError
from tied._layout import Layout
from tied._steps import Step, apply_steps
from tied.arrays.library import NO_HALVES, Geometry, Library, Place, Span
from tied.arrays.view import View

COMPLEX = {"float32": "complex64", "float64": "complex128", "longdouble": "clongdouble"}


def claims(cls: type) -> bool:
    """Returns whether the instances of `cls` are leaves; masked arrays come apart instead."""
    return issubclass(cls, np.ndarray) and not issubclass(cls, np.ma.MaskedArray)


class Window:
    """A stretch of memory as NumPy takes it from other libraries; keeps `owner` alive."""

    def __init__(self, owner: Any, address: int, nbytes: int, *, writeable: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, not writeable),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def parse_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name; `bfloat16` and its kind come from `ml_dtypes`.

    Raises:
        DtypeError: There is no such dtype.
    """
    try:
        found: np.dtype[Any] = np.dtype(ast.literal_eval(name) if name[:1] in "[{(" else name)
        return found
    except TypeError:
        pass
    try:
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, name))
        return found
    except (ImportError, AttributeError) as error:
        raise DtypeError(
            f"NumPy has no dtype {name!r}", hint="Type: pip install ml_dtypes, for bfloat16"
        ) from error


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Returns whether a dtype is real floating, those of `ml_dtypes` included."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


class NumPy(Library):
    """See `Library`."""

    name = "numpy"
    may_hold_objects = True

    def holds_objects(self, x: Any) -> bool:
        return bool(x.dtype.hasobject)

    def place(self, x: Any) -> Place:
        start = x.__array_interface__["data"][0]
        if x.size == 0:
            return ("empty", id(x)), start, start, True
        if x.flags.c_contiguous:
            return "cpu", start, start + x.nbytes, True
        return "cpu", *np.lib.array_utils.byte_bounds(x), False

    def geometry(self, x: Any) -> Geometry:
        return Geometry(
            x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize, self.dtype(x)
        )

    def span(self, x: Any) -> Span:
        low, high = np.lib.array_utils.byte_bounds(x)
        high = high if x.size else low
        return Span("cpu", "memory", low, high)

    def device(self, x: Any) -> str:
        return "cpu"

    def any_part(self, arrays: Sequence[Any]) -> bool:
        return any(x.base is not None for x in arrays)

    def buffer(self, x: Any) -> Any:
        if x.size == 0:
            return None
        while isinstance(x.base, np.ndarray):
            x = x.base
        return ("numpy", id(x if x.base is None else x.base))

    def twin(self, x: Any) -> Any:
        return self.dress(x.view(), self.meta(x))

    def meta(self, x: Any) -> Any:
        if type(x) is np.ndarray and x.flags.writeable:
            return None
        return type(x), x.flags.writeable

    def extras(self, x: Any, *, grads: bool) -> dict[str, Any] | None:
        return None if isinstance(x, np.memmap) else getattr(x, "__dict__", None) or None

    def attach(self, x: Any, extras: dict[str, Any]) -> None:
        x.__dict__.update(extras)

    def owner(self, members: Sequence[Any]) -> Any:
        return next((x for x in members if x.flags.writeable), members[0])

    def window(self, x: Any, start: int, units: int) -> Any:
        memory = np.asarray(Window(x, start, units, writeable=x.flags.writeable))
        return memory.view(x.dtype) if units % x.itemsize == 0 else memory

    def flat(self, x: Any, order: Sequence[int]) -> tuple[Any, bool]:
        plain = x if isinstance(x, np.memmap) else x.view(np.ndarray)
        flat = plain.transpose(order).reshape(-1)
        return flat, flat.base is not None and np.may_share_memory(flat, x)

    def read(
        self,
        flat: Any,
        base_shape: tuple[int, ...],
        layout: Layout,
        meta: Any,
        tracked: bool = False,
    ) -> Any:
        if layout.conj or layout.neg:
            return View(flat.reshape(base_shape), layout)
        dtype, unit = flat.dtype, flat.itemsize
        if layout.dtype is not None:
            dtype, unit = parse_dtype(layout.dtype), 1
        x: Any = np.ndarray(
            layout.shape,
            dtype,
            flat.view(np.ndarray).view(np.uint8),
            layout.offset * unit,
            tuple(stride * unit for stride in layout.strides),
        )
        if meta is not None and issubclass(meta[0], np.memmap) and isinstance(flat, np.memmap):
            x = x.view(np.memmap)
            x.__dict__.update(flat.__dict__)
        return self.dress(x, meta)

    def dress(self, x: Any, meta: Any) -> Any:
        cls, writeable = (np.ndarray, True) if meta is None else meta
        if not isinstance(x, cls) and not issubclass(cls, np.memmap):
            x = x.view(cls)
        if x.flags.writeable and not writeable:
            x = x.view()
            x.flags.writeable = False
        return x

    def apply(self, x: Any, steps: Sequence[Step]) -> Any:
        return apply_steps(x, steps)

    def agrees(self, a: Any, b: Any) -> bool:
        a, b = np.asarray(a), np.asarray(b)
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        return same_kind and (a is b or a.tobytes() == b.tobytes())

    def is_floating(self, x: Any) -> bool:
        return is_floating(x.dtype) or x.dtype.kind == "c"

    def cast(self, x: Any, dtype: str) -> Any:
        if not self.is_floating(x):
            return x
        if x.dtype.kind == "c":
            if dtype not in COMPLEX:
                raise DtypeError(f"NumPy has no complex dtype of {dtype} parts", hint=NO_HALVES)
            dtype = COMPLEX[dtype]
        wanted = parse_dtype(dtype)
        return x if x.dtype == wanted else x.astype(wanted)

    def settled(self, before: Any, after: Any, kind: Any) -> Any:
        if kind is None and isinstance(after, np.generic) and not before.shape:
            # NumPy's functions make scalars of 0-d arrays
            return self.dress(np.asarray(after), self.meta(before))
        return super().settled(before, after, kind)

    def copy(self, x: Any) -> Any:
        return np.array(x, order="K")

    def empty(self, x: Any, device: Any) -> Any:
        return np.empty_like(x, subok=False)

    def zeros(self, x: Any) -> Any:
        return np.zeros_like(x, subok=False)

    def scatter(self, shape: tuple[int, ...], layout: Layout, values: Any) -> Any:
        flat = np.zeros(math.prod(shape), values.dtype)
        np.add.at(flat, layout.index().reshape(-1), values.reshape(-1))
        return flat.reshape(shape)

    def put(self, x: Any, layout: Layout, values: Any) -> Any:
        flat = np.array(x).reshape(-1)
        flat[layout.index().reshape(-1)] = values.reshape(-1)
        return flat.reshape(x.shape)

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        return np.concatenate([np.asarray(x).reshape(-1) for x in arrays] or [np.zeros(0)])

    def as_dtype(self, x: Any, dtype: str) -> Any:
        wanted = parse_dtype(dtype)
        real = x.dtype.kind == "c" and wanted.kind != "c"
        return (x.real if real else x).astype(wanted, copy=False)

    def target(self, device: Any) -> Any:
        return "cpu" if isinstance(device, str) and device == "cpu" else None

    def move(self, x: Any, target: Any) -> Any:
        return x

    def to_numpy(self, x: Any) -> Any:
        return x

    def from_numpy(self, x: Any) -> Any:
        return np.array(x, order="K")

    def alias(self, x: Any) -> Any:
        return x


LIBRARY = NumPy()
