"""`View`s as leaves: a reading of an array of any library."""

from __future__ import annotations

from typing import Any

from tied import arrays
from tied._steps import ghost
from tied.arrays.library import Geometry, Library, Place, Span
from tied.arrays.view import View

_SHIFT = 1 << 20  # ghosts need an address; JAX counts from 0


def claims(cls: type) -> bool:
    """Returns whether the instances of `cls` are leaves."""
    return issubclass(cls, View)


def _library(x: View) -> Library:
    library = arrays.library_for(type(x.base))
    assert library is not None
    return library


class Lazy(Library):
    """See `Library`; what a `View` can't say itself, its base's library says of the base."""

    name = "lazy"

    def place(self, x: View) -> Place:
        x.check()  # a base that jax.vmap has stacked is not what the layout counts in
        space, low, high, _dense = _library(x).place(x.base)
        return space, low, high, False

    def geometry(self, x: View) -> Geometry | None:
        base = _library(x).geometry(x.base)
        if base is None:
            return None
        layout = x.layout
        memory = ghost(base.address + _SHIFT, base.shape, base.strides, base.itemsize)
        if memory.flags.c_contiguous:
            address = base.address + layout.offset * base.itemsize
            strides = tuple(stride * base.itemsize for stride in layout.strides)
        else:
            seen = _library_numpy().apply(memory, _views_only(layout, x.base_shape))
            address, strides = seen.__array_interface__["data"][0] - _SHIFT, seen.strides
        return Geometry(
            address,
            layout.shape,
            strides,
            base.itemsize,
            base.dtype,
            base.conj ^ layout.conj,
            base.neg ^ layout.neg,
        )

    def span(self, x: View) -> Span:
        outer = _library(x).span(x.base)
        geometry = self.geometry(x)
        base = _library(x).geometry(x.base)
        if geometry is None or base is None or not x.size:
            return Span(outer.device, outer.allocation, outer.start, outer.start)
        start, stop = geometry.extent
        shift = outer.start - base.extent[0]
        return Span(outer.device, outer.allocation, start + shift, stop + shift)

    def dtype(self, x: View) -> str:
        return _library(x).dtype(x.base)

    def nbytes(self, x: View) -> int:
        base = _library(x).geometry(x.base)
        return x.size * (base.itemsize if base is not None else 1)

    def device(self, x: View) -> str:
        return _library(x).device(x.base)

    def window(self, x: View, start: int, units: int) -> Any:
        return _library(x).window(x.base, start, units)

    def buffer(self, x: View) -> Any:
        return _library(x).buffer(x.base)

    def agrees(self, a: View, b: Any) -> bool:
        return _library(a).agrees(a.read(), b.read() if isinstance(b, View) else b)

    def to_numpy(self, x: View) -> Any:
        return _library(x).to_numpy(x.read())


def _library_numpy() -> Library:
    return arrays.load("numpy")


def _views_only(layout: Any, base_shape: tuple[int, ...]) -> list[Any]:
    """Returns the steps that move no element (conjugation does not change where one lies)."""
    return [step for step in layout.steps(base_shape) if step.op not in ("conj", "neg")]


LIBRARY = Lazy()
