"""Which elements of a storage a leaf reads, and in which order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tied._steps import (
    Ints,
    Reading,
    Step,
    address,
    apply_steps,
    c_strides,
    canonical,
    extent,
    ghost,
    plan,
    replay,
    text,
)

__all__ = ["Layout", "Step", "apply_steps", "ghost"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The elements of a flat, dense, C-ordered storage that a leaf reads, in its order.

    Attributes:
        shape: The leaf's shape.
        strides: For each dimension, the elements of the storage between neighbours.
        offset: The element of the storage that the leaf reads first.
        conj: The leaf reads complex conjugates.
        neg: The leaf reads negatives.
        dtype: If set, the leaf reads the storage's bits as this dtype, and `strides` and `offset`
            count bytes.
    """

    shape: Ints
    strides: Ints
    offset: int = 0
    conj: bool = False
    neg: bool = False
    dtype: str | None = None

    @staticmethod
    def whole(shape: Ints) -> Layout:
        """The layout that reads a storage of `shape` as it is.

        >>> Layout.whole((2, 3)).strides
        (3, 1)
        """
        return Layout(tuple(shape), c_strides(tuple(shape)))

    @staticmethod
    def of(fn: Callable[[Any], Any], shape: Ints, *, dtype: str | None = None) -> Layout | None:
        """The layout that `fn` reads from an array of `shape`.

        Args:
            fn: A function of one array. It is called once, on zeros.
            shape: The shape of the C-ordered array that `fn` is given.
            dtype: The array's dtype; needed only by a function that looks at it (`W.real`).

        Returns:
            The layout, or None if `fn` computes its result. What `fn` raises is passed on.

        >>> Layout.of(lambda W: W.T[1:], (4, 6))
        Layout(shape=(5, 4), strides=(1, 6), offset=1, conj=False, neg=False, dtype=None)
        """
        return _trace(fn, Layout.whole(shape), dtype)

    def then(
        self, view: Callable[[Any], Any] | Layout, *, dtype: str | None = None
    ) -> Layout | None:
        """The layout of a view of this reading.

        Args:
            view: A function of the leaf, or a layout over the leaf's elements in C order.
            dtype: The leaf's dtype, as for `of`.

        Returns:
            The layout over the storage, or None if there is none (the function computes, or a
            reshape would have to copy).

        >>> Layout.of(lambda W: W[1:3], (4, 6)).then(lambda W: W.T).describe((4, 6), "W")
        'W[1:3].T'
        """
        if isinstance(view, Layout):
            return _compose(self, view)
        return _trace(view, self, dtype)

    @property
    def size(self) -> int:
        """The number of elements that the leaf has."""
        return math.prod(self.shape)

    @property
    def extent(self) -> tuple[int, int]:
        """The half-open range of the storage that the leaf reads in (bytes if `dtype` is set)."""
        return extent(self._reading, self._unit)

    @property
    def _reading(self) -> Reading:
        return self.shape, self.strides, self.offset

    @property
    def _unit(self) -> int:
        """What a dense leaf's last stride is: one element, or the bytes of one."""
        return 1 if self.dtype is None else _itemsize(self.dtype)

    def is_whole(self, base_shape: Ints) -> bool:
        """Whether the leaf reads a storage of `base_shape` exactly as it is."""
        if self.shape != base_shape or self.conj or self.neg or self.dtype is not None:
            return False
        dense = c_strides(base_shape)
        if self.strides == dense and self.offset == 0:
            return True
        return self.canonical()._reading == (base_shape, dense, 0)

    def canonical(self) -> Layout:
        """The same reading, with strides (and the offset of an empty leaf) that compare equal."""
        _, strides, offset = canonical(self._reading, self._unit)
        if strides == self.strides and offset == self.offset:
            return self
        return replace(self, strides=strides, offset=offset)

    def index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The position in the flat storage of each element, as int64 of the leaf's shape.

        >>> Layout.of(lambda W: W.T, (2, 3)).index().tolist()
        [[0, 3], [1, 4], [2, 5]]
        """
        if self.dtype is not None:
            raise TypeError(f"a layout that reads bits as {self.dtype} has no element positions")
        out = np.full(self.shape, self.offset, np.int64)
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = np.arange(size, dtype=np.int64) * stride
            out += steps.reshape(-1, *[1] * (len(self.shape) - axis - 1))
        return out

    def steps(self, base_shape: Ints) -> tuple[Step, ...]:
        """Ordinary operations that take an array of `base_shape` to this reading.

        Args:
            base_shape: The shape of the C-ordered storage.

        Returns:
            The steps, for `apply_steps`; the few that a person would write where there are such,
            a gather where there are none.

        Raises:
            ValueError: The layout reaches outside of such a storage.
            TypeError: The layout reads the storage's bits as another dtype.

        >>> [str(step) for step in Layout.of(lambda W: W[1:3].T, (4, 6)).steps((4, 6))]
        ['[1:3]', '.T']
        """
        return _steps(self, tuple(base_shape))

    def describe(self, base_shape: Ints, name: str, *, base_dtype: str | None = None) -> str:
        """The reading as a person writes it.

        Args:
            base_shape: The shape of the storage.
            name: What to call the storage.
            base_dtype: The storage's dtype, for a leaf that reads its bits as another one.

        >>> Layout.of(lambda W: W.T, (4, 6)).describe((4, 6), "encoder.weight")
        'encoder.weight.T'
        """
        if self.dtype is None:
            return text(name, self.steps(base_shape))
        how, layout, shape = reinterpreted(self.canonical(), base_shape, base_dtype)
        return name + how if layout is None else text(name + how, layout.steps(shape))


@lru_cache(maxsize=4096)
def _steps(layout: Layout, base_shape: Ints) -> tuple[Step, ...]:
    if layout.dtype is not None:
        raise TypeError(f"reading bits as {layout.dtype} is not made of array operations")
    steps = plan(layout._reading, base_shape)
    if steps is None:
        steps = [Step("take", (replace(layout.canonical(), conj=False, neg=False),))]
    lazy = [Step(op) for op in ("conj", "neg") if getattr(layout, op)]
    cut = len(steps)
    while cut and steps[cut - 1].op in ("permute", "broadcast"):  # W.conj().T reads best
        cut -= 1
    return (*steps[:cut], *lazy, *steps[cut:])


class _ComputesError(Exception):
    """A traced function does arithmetic: its result is not a view."""


class _Traced(np.ndarray[Any, np.dtype[Any]]):
    """Zeros that notice arithmetic, and move instead of being conjugated or negated.

    The memory is four equal blocks: plain, conjugated, negated, both. Where the result of a
    function lies says which it is, also where NumPy has dropped the subclass.
    """

    memory: np.ndarray[Any, np.dtype[np.uint8]]

    def __array_finalize__(self, parent: Any) -> None:
        if isinstance(parent, _Traced):
            self.memory = parent.memory

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and len(inputs) == 1 and not options:
            if ufunc is np.conjugate:
                return self.conj()
            if ufunc is np.negative:
                return self.moved(2)
        raise _ComputesError

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in (np.broadcast_to, np.lib.stride_tricks.sliding_window_view):
            kwargs = {**kwargs, "subok": True}
        return super().__array_function__(func, types, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        out = super().__getitem__(key)
        if isinstance(out, np.ndarray):
            return out
        return super().__getitem__((*key, ...) if isinstance(key, tuple) else (key, ...))

    def conj(self) -> Any:
        return self.moved(1) if self.dtype.kind == "c" else self

    conjugate = conj

    def moved(self, bit: int) -> _Traced:
        if self.size == 0:
            return self
        at, block = address(self) - address(self.memory), self.memory.size // 4
        at += -bit * block if at // block & bit else bit * block
        out = _Traced(self.shape, self.dtype, self.memory.data, at, self.strides)
        out.memory = self.memory
        return out


def _trace(fn: Callable[[Any], Any], layout: Layout, dtype: str | None) -> Layout | None:
    """The layout of `fn` of the leaf that `layout` reads, or None if it computes."""
    told = np.dtype(layout.dtype or dtype or "complex64")
    unit = 1 if layout.dtype else told.itemsize
    lo, hi = layout.extent
    block = -(-(hi - lo) * unit // 16) * 16
    memory = np.zeros(4 * block, np.uint8)
    strides = tuple(stride * unit for stride in layout.strides)
    seen = _Traced(layout.shape, told, memory.data, (layout.offset - lo) * unit, strides)
    seen.memory = memory
    try:
        made = fn(seen)
    except (_ComputesError, np.linalg.LinAlgError):
        return None
    if not isinstance(made, np.ndarray):
        return None
    if made.size == 0:
        return Layout.whole(made.shape)
    if not np.may_share_memory(made, memory):
        return None
    lazy, start = divmod(address(made) - address(memory), block)
    conj, neg = layout.conj ^ bool(lazy & 1), layout.neg ^ bool(lazy & 2)
    counts = (lo * unit + start, *made.strides)
    if made.dtype == told:
        offset, *steps = (count // unit for count in counts)
        return Layout(made.shape, tuple(steps), offset, conj, neg, layout.dtype).canonical()
    if not (dtype or layout.dtype) or conj or neg:
        return None
    return Layout(made.shape, counts[1:], counts[0], dtype=made.dtype.name).canonical()


def _compose(outer: Layout, inner: Layout) -> Layout | None:
    """The layout of `inner`, over the elements that `outer` reads in C order."""
    if inner.dtype is not None:
        return None
    conj, neg = outer.conj ^ inner.conj, outer.neg ^ inner.neg
    unit = outer._unit
    if outer.canonical().strides == tuple(unit * s for s in c_strides(outer.shape)):
        strides = tuple(unit * stride for stride in inner.strides)
        offset = outer.offset + unit * inner.offset
        return Layout(inner.shape, strides, offset, conj, neg, outer.dtype).canonical()
    steps = replace(inner, conj=False, neg=False).steps(outer.shape)
    ran = replay(outer._reading, steps, unit)
    return None if ran is None else Layout(*ran[1], conj, neg, outer.dtype).canonical()


def _itemsize(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # a name that NumPy does not have, such as bfloat16
        bits = re.search(r"\d+", dtype)
        return max(1, int(bits[0]) // 8) if bits else 1


def reinterpreted(
    layout: Layout, shape: Ints, base_dtype: str | None
) -> tuple[str, Layout | None, Ints]:
    """How to reach the dtype of `layout`, then the layout in elements and the shape to read."""
    assert layout.dtype is not None
    plain = f".view({layout.dtype})"
    if base_dtype is None:
        return plain, None, shape
    wide, narrow = _itemsize(base_dtype), _itemsize(layout.dtype)
    half, rest = divmod(layout.offset, wide)
    half_of = base_dtype.startswith("complex") and layout.dtype == f"float{wide * 4}"
    if half_of and rest in (0, narrow) and not any(stride % wide for stride in layout.strides):
        strides = tuple(stride // wide for stride in layout.strides)
        return ".imag" if rest else ".real", Layout(layout.shape, strides, half), shape
    counts = (layout.offset, *layout.strides)
    if not shape or shape[-1] * wide % narrow or any(count % narrow for count in counts):
        return plain, None, shape
    offset, *strides_ = (count // narrow for count in counts)
    last = shape[-1] * wide // narrow
    return plain, Layout(layout.shape, tuple(strides_), offset), (*shape[:-1], last)
