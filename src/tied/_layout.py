"""Which elements of a storage a leaf reads, and in which order: integers only.

NumPy is the algebra of views here. A ghost is an array that has an address, a shape and strides
and is never read; what indexing does to a ghost is what it does to any array.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

Ints = tuple[int, ...]
Dims = list[tuple[int, int]]  # a size and a stride for each dimension

_FULL = (None, None, None)
_ORIGIN = 1 << 20  # where the ghosts that are only measured are said to live


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
        return Layout(tuple(shape), _c_strides(tuple(shape)))

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
        lo = hi = self.offset
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 0:
                return self.offset, self.offset
            if stride < 0:
                lo += stride * (size - 1)
            else:
                hi += stride * (size - 1)
        return lo, hi + self._unit

    @property
    def _unit(self) -> int:
        """What a dense leaf's last stride is: one element, or the bytes of one."""
        return 1 if self.dtype is None else _itemsize(self.dtype)

    def is_whole(self, base_shape: Ints) -> bool:
        """Whether the leaf reads a storage of `base_shape` exactly as it is."""
        if self.shape != base_shape or self.conj or self.neg or self.dtype is not None:
            return False
        dense = _c_strides(base_shape)
        if self.strides == dense and self.offset == 0:
            return True
        return 0 in base_shape or (self.offset == 0 and self._plain() == dense)

    def _plain(self) -> Ints:
        """The strides, with those that mean nothing set to those of a dense array."""
        dense = _c_strides(self.shape)
        if 0 in self.shape:
            return tuple(stride * self._unit for stride in dense)
        unit = self._unit
        return tuple(
            plain * unit if size == 1 else stride
            for size, stride, plain in zip(self.shape, self.strides, dense, strict=True)
        )

    def canonical(self) -> Layout:
        """The same reading, with strides (and the offset of an empty leaf) that compare equal."""
        strides, offset = self._plain(), 0 if 0 in self.shape else self.offset
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
            return _text(name, self.steps(base_shape))
        how, layout, shape = _reinterpreted(self.canonical(), base_shape, base_dtype)
        return name + how if layout is None else _text(name + how, layout.steps(shape))


@dataclass(frozen=True, slots=True)
class Step:
    """One ordinary operation on an array; `str` writes it as a person does.

    Attributes:
        op: reshape, permute, index, flip, diagonal, broadcast, conj, neg or take.
        args: reshape and broadcast: the shape. permute and flip: the axes. index: an int or a
            (start, stop, step) for each leading dimension. diagonal: offset, axis1, axis2.
            take: the layout whose `index()` is gathered from the flat array.
    """

    op: str
    args: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[int | slice, ...]:
        """What to index with, for index and flip."""
        if self.op == "flip":
            last = max(self.args, default=-1) + 1
            return tuple(slice(None, None, -1 if a in self.args else None) for a in range(last))
        return tuple(part if isinstance(part, int) else slice(*part) for part in self.args)

    def __str__(self) -> str:
        if self.op in ("index", "flip"):
            return f"[{', '.join(map(_slice_text, self.key))}]"
        if self.op == "permute":
            return ".T" if self.args == (1, 0) else f".transpose({_commas(self.args)})"
        if self.op == "diagonal":
            shown = self.args if self.args[1:] != (0, 1) else self.args[: self.args[0] != 0]
            return f".diagonal({_commas(shown)})"
        if self.op == "broadcast":
            return f".broadcast_to({_commas(self.args)})"
        if self.op == "reshape":
            return f".reshape({_commas(self.args) or '()'})"
        return {"take": ".take(...)", "conj": ".conj()", "neg": "-"}[self.op]


def apply_steps(array: Any, steps: Iterable[Step]) -> Any:
    """Apply steps to a NumPy or JAX array (a tracer too).

    Returns:
        The reading: for NumPy a view of `array`, unless it is gathered, conjugated or negated.

    >>> apply_steps(np.arange(6).reshape(2, 3), [Step("permute", (1, 0))]).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    for step in steps:
        array = _APPLY[step.op](array, step)
    return array


_APPLY: dict[str, Callable[[Any, Step], Any]] = {
    "reshape": lambda a, step: a.reshape(step.args),
    "permute": lambda a, step: a.transpose(step.args),
    # The ellipsis keeps NumPy from reading a single element out as a scalar.
    "index": lambda a, step: a[(*step.key, ...)],
    "flip": lambda a, step: a[(*step.key, ...)],
    "diagonal": lambda a, step: a.diagonal(*step.args),
    "broadcast": lambda a, step: a.__array_namespace__().broadcast_to(a, step.args),
    "conj": lambda a, step: a.conj(),
    "neg": lambda a, step: -a,
    "take": lambda a, step: a.reshape(-1)[step.args[0].index()],
}


class _Holder:
    """Says where a ghost lives, in NumPy's own protocol."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def ghost(
    address: int, shape: Ints, byte_strides: Ints, itemsize: int
) -> np.ndarray[Any, np.dtype[np.void]]:
    """An array that has an address, a shape and strides, and must never be read.

    Args:
        address: Any positive number.
        shape: The array's shape.
        byte_strides: The array's strides, in bytes.
        itemsize: The bytes of one element.

    Returns:
        A read-only array of void elements; nothing is allocated. Indexing it and asking
        `numpy.shares_memory` are safe, reading an element crashes.

    >>> ghost(4096, (2, 3), (12, 4), 4).T.strides
    (4, 12)
    """
    interface = {
        "version": 3,
        "data": (address, True),
        "shape": shape,
        "strides": byte_strides,
        "typestr": f"|V{itemsize}",
    }
    return np.asarray(_Holder(interface))


# ---- layouts from functions ----------------------------------------------------------------


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
        at, block = _address(self) - _address(self.memory), self.memory.size // 4
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
    lazy, start = divmod(_address(made) - _address(memory), block)
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
    if outer.canonical().strides == tuple(unit * s for s in _c_strides(outer.shape)):
        strides = tuple(unit * stride for stride in inner.strides)
        offset = outer.offset + unit * inner.offset
        return Layout(inner.shape, strides, offset, conj, neg, outer.dtype).canonical()
    ran = _run(ghost(_ORIGIN, outer.shape, outer.strides, unit), inner.steps(outer.shape))
    if ran is None:
        return None
    offset = outer.offset + _address(ran[1]) - _ORIGIN
    return Layout(ran[1].shape, ran[1].strides, offset, conj, neg, outer.dtype).canonical()


# ---- steps from layouts --------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _steps(layout: Layout, base_shape: Ints) -> tuple[Step, ...]:
    if layout.dtype is not None:
        raise TypeError(f"reading bits as {layout.dtype} is not made of array operations")
    if layout.is_whole(base_shape):
        return ()
    layout = layout.canonical()
    lo, hi = layout.extent
    if lo < 0 or hi > math.prod(base_shape):
        raise ValueError(f"a layout of elements {lo} to {hi} is outside of the shape {base_shape}")
    steps = _plan(replace(layout, conj=False, neg=False), base_shape)
    lazy = [Step(op) for op in ("conj", "neg") if getattr(layout, op)]
    cut = len(steps)
    while cut and steps[cut - 1].op in ("permute", "broadcast"):  # W.conj().T reads best
        cut -= 1
    return (*steps[:cut], *lazy, *steps[cut:])


def _plan(layout: Layout, base_shape: Ints) -> list[Step]:
    """The best of the candidates that, tried on a ghost, read what `layout` reads."""
    base = ghost(_ORIGIN, base_shape, _c_strides(base_shape), 1)
    found: list[list[Step]] = []
    for candidates in _candidates(layout, base_shape):
        tried = [_run(base, candidate) for candidate in candidates]
        found += [ran[0] for ran in tried if ran is not None and _same(ran[1], layout)]
        best = min(found, key=_cost, default=None)
        ops = {step.op for step in best or []}
        if best is not None and "diagonal" not in ops and (len(best) < 3 or "reshape" not in ops):
            break
    return min(found, key=_cost, default=[Step("take", (layout,))])


def _cost(steps: list[Step]) -> tuple[int, int, int]:
    reshapes = sum(step.op == "reshape" for step in steps)
    return len(steps) + reshapes, reshapes, len(_text("", steps))


def _run(base: Any, steps: Iterable[Step]) -> tuple[list[Step], Any] | None:
    """Try steps on a ghost: those that change it, and the result; None if one has to copy."""
    kept: list[Step] = []
    arrays = [base]
    for step in steps:
        if step.op in ("conj", "neg"):
            continue
        if step.op == "take":
            return None
        if step.op == "reshape" and kept and kept[-1].op == "reshape":
            kept.pop()
            arrays.pop()
        try:
            after = _apply_to_ghost(arrays[-1], step)
        except ValueError:
            return None
        if not _same(after, _seen(arrays[-1])):
            kept.append(step)
            arrays.append(after)
    return kept, arrays[-1]


def _apply_to_ghost(array: Any, step: Step) -> Any:
    if step.op == "reshape":  # one that copies would read
        return array.reshape(step.args, copy=False)
    return apply_steps(array, [step])


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _seen(array: Any) -> Layout:
    return Layout(array.shape, array.strides, _address(array) - _ORIGIN).canonical()


def _same(array: Any, layout: Layout) -> bool:
    return array.shape == layout.shape and _seen(array) == layout


def _candidates(layout: Layout, base_shape: Ints) -> Iterator[list[list[Step]]]:
    """Ways to read `layout` that are worth a try, in batches, the plainest first."""
    if 0 in layout.shape:
        ends = [_cut(0, size, 1, n) for size, n in zip(layout.shape, base_shape, strict=False)]
        reshape = Step("reshape", layout.shape)
        yield [[], [reshape]]
        yield [[_index(ends)], [Step("reshape", (-1,)), _index([(None, 0, None)]), reshape]]
        return
    forms = list(_forms(layout, base_shape))
    dims, start, after = forms[0]
    yield [[*middle, *after] for middle in [_solve(base_shape, dims, start)] if middle is not None]
    for before, grid, shift in _grids(layout, base_shape):
        solved = [(_solve(grid, dims, start - shift), after) for dims, start, after in forms]
        yield [[*before, *middle, *after] for middle, after in solved if middle is not None]


def _forms(layout: Layout, base_shape: Ints) -> Iterator[tuple[Dims, int, list[Step]]]:
    """What to look for in the storage: dimensions, a first element, and the steps that follow."""
    dims = list(zip(layout.shape, layout.strides, strict=True))
    thin = [(size if stride else 1, stride) for size, stride in dims]
    spread: list[Step] = []
    if any(size > 1 and not stride for size, stride in dims):
        spread = [Step("broadcast", layout.shape)]
        while thin and thin[0][0] == 1:  # broadcasting puts these back
            thin.pop(0)
    core = [dim for dim in thin if dim[0] > 1]
    end = [Step("reshape", tuple(size for size, _ in thin)), *spread]
    yield thin, layout.offset, spread
    yield core, layout.offset, end
    order = sorted(range(len(core)), key=lambda axis: -abs(core[axis][1]))
    ordered = [(core[axis][0], abs(core[axis][1])) for axis in order]
    flips = tuple(axis for axis, (_, stride) in enumerate(core) if stride < 0)
    back = [
        Step("reshape", tuple(size for size, _ in ordered)),
        Step("permute", tuple(int(axis) for axis in np.argsort(order))),
        Step("flip", flips),
        *end,
    ]
    for merged in _merged(ordered):
        yield merged, layout.extent[0], back
        split = list(_split(merged, _c_strides(base_shape)))
        if split != merged:
            yield split, layout.extent[0], back


def _merged(dims: Dims) -> Iterator[Dims]:
    """`dims`, and every way to join neighbours of them that lie densely in one another."""
    joints = [i for i, (a, b) in enumerate(itertools.pairwise(dims)) if a[1] == b[0] * b[1]]
    count = len(joints)
    masks = itertools.product((False, True), repeat=count) if count < 5 else [(True,) * count]
    for mask in masks:
        joined = set(itertools.compress(joints, mask))
        out: Dims = []
        for i, (size, stride) in enumerate(dims):
            before = out.pop()[0] if i - 1 in joined else 1
            out.append((before * size, stride))
        yield out


def _split(dims: Dims, base_strides: Ints) -> Iterator[tuple[int, int]]:
    """`dims`, cut where the storage's own dimensions begin."""
    for size, stride in dims:
        for base in base_strides:
            if (
                base
                and stride < base < size * stride
                and not (base % stride or size * stride % base)
            ):
                yield size * stride // base, base
                size = base // stride
        yield size, stride


def _grids(layout: Layout, base_shape: Ints) -> Iterator[tuple[list[Step], Ints, int]]:
    """Shapes to see the storage in: the steps to get there, the shape, and its first element."""
    total = math.prod(base_shape)
    flat = Step("reshape", (-1,))
    dims = [(n, abs(s)) for n, s in zip(layout.shape, layout.strides, strict=True) if n > 1 and s]
    strides = {stride for _, stride in dims}
    yield [], base_shape, 0
    yield [flat], (total,), 0
    for marks in (strides, strides | {1}, strides | set(_c_strides(base_shape))):
        shape = _radix(total, marks)
        yield [Step("reshape", shape)], shape, 0
    lo, _ = layout.extent
    size, stride = max(dims, key=lambda dim: dim[1], default=(1, 1))
    for start in {lo, total - size * stride}:
        if 0 <= start <= lo and start + size * stride <= total:
            shape = _radix(size * stride, strides | {1})
            window = _index([_cut(start, size * stride, 1, total)])
            yield [flat, window, Step("reshape", shape)], shape, start


def _radix(total: int, strides: Iterable[int]) -> Ints:
    """A shape of `total` elements that has as many of these strides as divide one another."""
    shape, last = [], total
    for stride in sorted(strides, reverse=True):
        if 0 < stride < last and last % stride == 0:
            shape.append(last // stride)
            last = stride
    return (*shape, last) if last > 1 or not shape else tuple(shape)


def _solve(grid: Ints, dims: Dims, start: int) -> list[Step] | None:
    """Steps from a C-ordered array of shape `grid` to `dims`, or None.

    Each dimension walks a straight line through the grid: along one axis it is a slice, along
    several it is a diagonal. No two may share an axis.
    """
    at = _digits(start, grid)
    moves: list[dict[int, int]] = []
    taken: set[int] = set()
    for size, stride in dims:
        if at is None:
            return None
        to = at if size == 1 else _digits(start + stride, grid)
        if to is None:
            return None
        move = {axis: b - a for axis, (a, b) in enumerate(zip(at, to, strict=True)) if a != b}
        ends = {axis: at[axis] + step * (size - 1) for axis, step in move.items()}
        if any(axis in taken or not 0 <= end < grid[axis] for axis, end in ends.items()):
            return None
        taken.update(move)
        moves.append(move)
    if at is None or not _seat_ones(moves, len(grid)):
        return None
    return _emit(grid, at, [size for size, _ in dims], moves)


def _seat_ones(moves: list[dict[int, int]], ndim: int) -> bool:
    """Give each dimension of size 1 an axis of the grid that nothing else uses, in order."""
    free = [axis for axis in range(ndim) if not any(axis in move for move in moves)]
    last = -1
    for move in moves:
        if not move:
            if not free:
                return False
            axis = next((axis for axis in free if axis > last), free[0])
            free.remove(axis)
            move[axis] = 0
        last = min(move)
    return True


def _emit(grid: Ints, at: Ints, sizes: list[int], moves: list[dict[int, int]]) -> list[Step]:
    """The slices, flips, diagonals and the permutation that follow these moves."""
    reverse = [name for name, move in enumerate(moves) if len(move) > 1 and move[min(move)] < 0]
    key: list[Any] = list(at)
    walkers: dict[int, int] = {}  # for each axis that is left, the dimension that walks along it
    flips: set[int] = set()
    offsets: list[int] = []
    for name, (size, move) in enumerate(zip(sizes, moves, strict=True)):
        back = {
            axis for axis, step in move.items() if (step < 0) != (name in reverse and step != 0)
        }
        low = {a: min(at[a], at[a] + step * (size - 1)) for a, step in move.items()}
        offset = _whole_diagonal(grid, size, low, back) if _is_plain(move) else None
        for axis, step in move.items():
            cut = _cut(low[axis], size, abs(step) or 1, grid[axis])
            key[axis] = cut if offset is None else _FULL
            walkers[axis] = name
        flips |= back
        offsets.append(offset or 0)
    axes = sorted(walkers)
    left = [walkers[axis] for axis in axes]
    steps = [_index(key), Step("flip", tuple(i for i, axis in enumerate(axes) if axis in flips))]
    for name, offset in enumerate(offsets):
        while left.count(name) > 1:
            first = left.index(name)
            second = left.index(name, first + 1)
            steps.append(Step("diagonal", (offset, first, second)))
            left = [*left[:first], *left[first + 1 : second], *left[second + 1 :], name]
    order = tuple(left.index(name) for name in range(len(moves)))
    return [*steps, Step("permute", order), Step("flip", tuple(reverse))]


def _is_plain(move: dict[int, int]) -> bool:
    return len(move) == 2 and all(abs(step) == 1 for step in move.values())


def _whole_diagonal(grid: Ints, size: int, low: dict[int, int], flips: set[int]) -> int | None:
    """The offset of the diagonal that is walked from end to end, None if it is only a part."""
    (first, a), (second, b) = (
        (axis, grid[axis] - start - size if axis in flips else start) for axis, start in low.items()
    )
    whole = min(a, b) == 0 and size == min(grid[first] - a, grid[second] - b)
    return b - a if whole else None


def _digits(position: int, grid: Ints) -> Ints | None:
    """The index in `grid` of a position in its flat form; None outside of it."""
    out = []
    for length in reversed(grid):
        position, digit = divmod(position, length)
        out.append(digit)
    return tuple(reversed(out)) if position == 0 else None


def _cut(low: int, size: int, step: int, length: int) -> tuple[int | None, int | None, int | None]:
    """The slice of `size` elements from `low`, with what a person leaves out left out."""
    open_ended = len(range(low, length, step)) == size
    stop = None if open_ended else low + (size - 1) * step + 1
    return low or None, max(stop, 0) if stop is not None else None, None if step == 1 else step


def _index(key: Sequence[Any]) -> Step:
    parts = list(key)
    while parts and parts[-1] == _FULL:
        parts.pop()
    return Step("index", tuple(parts))


@lru_cache(maxsize=4096)
def _c_strides(shape: Ints) -> Ints:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


# ---- text ----------------------------------------------------------------------------------


def _commas(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _slice_text(part: int | slice) -> str:
    if isinstance(part, int):
        return str(part)
    start, stop, step = ("" if n is None else str(n) for n in (part.start, part.stop, part.step))
    return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"


def _text(name: str, steps: Iterable[Step]) -> str:
    minus = "".join("-" for step in steps if step.op == "neg")
    return minus + name + "".join(str(step) for step in steps if step.op != "neg")


def _itemsize(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # a name that NumPy does not have, such as bfloat16
        bits = re.search(r"\d+", dtype)
        return max(1, int(bits[0]) // 8) if bits else 1


def _reinterpreted(
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
