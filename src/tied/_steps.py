"""The ordinary array operations that make a reading of a storage: integers only.

NumPy is the algebra of views here. A ghost is an array that has an address, a shape and strides
and is never read; what indexing does to a ghost is what it does to any array. So the planner may
guess: a guess counts only when a ghost, put through it, arrives at the reading that is wanted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Ints = tuple[int, ...]
Reading = tuple[Ints, Ints, int]  # shape, strides and offset over a flat storage
Dims = list[tuple[int, int]]  # a size and a stride for each dimension

_FULL = (None, None, None)
_ORIGIN = 1 << 62  # where ghosts that are only measured live: nothing reaches below 0 from here


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
        if self.op in ("reshape", "broadcast"):
            name = "reshape" if self.op == "reshape" else "broadcast_to"
            return f".{name}({_commas(self.args) or '()'})"
        return {"take": ".take(...)", "conj": ".conj()", "neg": "-"}[self.op]


def _commas(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _slice_text(part: int | slice) -> str:
    if isinstance(part, int):
        return str(part)
    start, stop, step = ("" if n is None else str(n) for n in (part.start, part.stop, part.step))
    return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"


def text(name: str, steps: Iterable[Step]) -> str:
    """The steps as a person writes them, from the storage's name on."""
    minus = "".join("-" for step in steps if step.op == "neg")
    return minus + name + "".join(str(step) for step in steps if step.op != "neg")


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
    place = {"version": 3, "data": (address, True), "typestr": f"|V{itemsize}"}
    return np.asarray(_Holder({**place, "shape": shape, "strides": byte_strides}))


def address(array: Any) -> int:
    """Where the array's first element lives."""
    return int(array.__array_interface__["data"][0])


@lru_cache(maxsize=4096)
def c_strides(shape: Ints) -> Ints:
    """The strides of a C-ordered array, in elements."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def extent(reading: Reading, unit: int = 1) -> tuple[int, int]:
    """The half-open range that is read in; `unit` is what one element counts."""
    shape, strides, offset = reading
    if 0 in shape:
        return offset, offset
    ends = [stride * (size - 1) for size, stride in zip(shape, strides, strict=True)]
    lo = offset + sum(end for end in ends if end < 0)
    return lo, lo + sum(map(abs, ends)) + unit


def canonical(reading: Reading, unit: int = 1) -> Reading:
    """The same reading, with what means nothing set to what a dense array has."""
    shape, strides, offset = reading
    if 0 in shape:
        return shape, tuple(unit * dense for dense in c_strides(shape)), 0
    sizes = zip(shape, strides, c_strides(shape), strict=True)
    return shape, tuple(unit * dense if n == 1 else stride for n, stride, dense in sizes), offset


def plan(reading: Reading, base_shape: Ints) -> list[Step] | None:
    """The best of the candidates that, tried on a ghost, make `reading`.

    Args:
        reading: What to read.
        base_shape: The shape of the C-ordered storage.

    Returns:
        The steps; None if no candidate makes the reading.

    Raises:
        ValueError: The reading reaches outside of such a storage.

    >>> text("W", plan(((6, 2), (1, 6), 6), (4, 6)) or [])
    'W[1:3].T'
    """
    reading = canonical(reading)
    lo, hi = extent(reading)
    if lo < 0 or hi > math.prod(base_shape):
        raise ValueError(f"a layout of elements {lo} to {hi} is outside of the shape {base_shape}")
    base = (base_shape, c_strides(base_shape), 0)
    found: list[list[Step]] = []
    for candidates in _candidates(reading, base_shape):
        tried = [replay(base, candidate) for candidate in candidates]
        found += [ran[0] for ran in tried if ran is not None and ran[1] == reading]
        best = min(found, key=_cost, default=None)
        ops = {step.op for step in best or []}
        if best is not None and "diagonal" not in ops and (len(best) < 3 or "reshape" not in ops):
            break
    return min(found, key=_cost, default=None)


def _cost(steps: list[Step]) -> tuple[int, int, int]:
    reshapes = sum(step.op == "reshape" for step in steps)
    return len(steps) + reshapes, reshapes, len(text("", steps))


def replay(
    reading: Reading, steps: Iterable[Step], unit: int = 1
) -> tuple[list[Step], Reading] | None:
    """Try steps on a ghost that reads `reading`, `unit` bytes an element.

    Returns:
        The steps that change something and what is read after them; None if one has to copy.
    """
    shape, strides, offset = reading
    kept: list[Step] = []
    arrays: list[Any] = [ghost(_ORIGIN, shape, strides, unit)]
    for step in steps:
        reshape = step.op == "reshape"
        if step.op == "take":
            return None
        if reshape and kept and kept[-1].op == "reshape":
            kept.pop()
            arrays.pop()
        last = arrays[-1]
        try:  # a reshape that copies would read
            after = last.reshape(step.args, copy=False) if reshape else apply_steps(last, [step])
        except ValueError:
            return None
        if _seen(after) != _seen(last):
            kept.append(step)
            arrays.append(after)
    shape, strides, moved = _seen(arrays[-1])
    return kept, (shape, strides, offset + moved)


def _seen(array: Any) -> Reading:
    return canonical((array.shape, array.strides, address(array) - _ORIGIN))


def _candidates(reading: Reading, base_shape: Ints) -> Iterator[list[list[Step]]]:
    """Ways to read `reading` that are worth a try, in batches, the plainest first."""
    shape = reading[0]
    if 0 in shape:
        ends = [_cut(0, size, 1, n) for size, n in zip(shape, base_shape, strict=False)]
        reshape = Step("reshape", shape)
        flat = [Step("reshape", (-1,)), _index([(None, 0, None)]), reshape]
        yield [[], [reshape], [_index(ends)], flat]
        return
    forms = list(_forms(reading, base_shape))
    dims, start, after = forms[0]
    yield [[*middle, *after] for middle in [_solve(base_shape, dims, start)] if middle is not None]
    for before, grid, shift in _grids(reading, base_shape):
        solved = [(_solve(grid, dims, start - shift), after) for dims, start, after in forms]
        yield [[*before, *middle, *after] for middle, after in solved if middle is not None]


def _forms(reading: Reading, base_shape: Ints) -> Iterator[tuple[Dims, int, list[Step]]]:
    """What to look for in the storage: dimensions, a first element, and the steps that follow."""
    shape, strides, offset = reading
    dims = list(zip(shape, strides, strict=True))
    thin = [(size if stride else 1, stride) for size, stride in dims]
    spread: list[Step] = []
    if any(size > 1 and not stride for size, stride in dims):
        spread = [Step("broadcast", shape)]
        while thin and thin[0][0] == 1:  # broadcasting puts these back
            thin.pop(0)
    core = [dim for dim in thin if dim[0] > 1]
    end = [Step("reshape", tuple(size for size, _ in thin)), *spread]
    yield thin, offset, spread
    yield core, offset, end
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
        yield merged, extent(reading)[0], back
        split = list(_split(merged, c_strides(base_shape)))
        if split != merged:
            yield split, extent(reading)[0], back


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
            if stride < base < size * stride and not (base % stride or size * stride % base):
                yield size * stride // base, base
                size = base // stride
        yield size, stride


def _grids(reading: Reading, base_shape: Ints) -> Iterator[tuple[list[Step], Ints, int]]:
    """Shapes to see the storage in: the steps to get there, the shape, and its first element."""
    total = math.prod(base_shape)
    flat = Step("reshape", (-1,))
    dims = [(n, abs(s)) for n, s in zip(*reading[:2], strict=True) if n > 1 and s]
    strides = {stride for _, stride in dims}
    yield [], base_shape, 0
    yield [flat], (total,), 0
    for marks in (strides, strides | {1}, strides | set(c_strides(base_shape))):
        shape = _radix(total, marks)
        yield [Step("reshape", shape)], shape, 0
    lo, _ = extent(reading)
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
    if at is None:
        return None
    moves: list[dict[int, int]] = []
    taken: set[int] = set()
    for size, stride in dims:
        to = at if size == 1 else _digits(start + stride, grid)
        if to is None:
            return None
        move = {axis: b - a for axis, (a, b) in enumerate(zip(at, to, strict=True)) if a != b}
        ends = {axis: at[axis] + step * (size - 1) for axis, step in move.items()}
        if any(axis in taken or not 0 <= end < grid[axis] for axis, end in ends.items()):
            return None
        taken.update(move)
        moves.append(move)
    seated = _seat_ones(moves, len(grid))
    return _emit(grid, at, [size for size, _ in dims], moves) if seated else None


def _seat_ones(moves: list[dict[int, int]], ndim: int) -> bool:
    """Give each dimension of size 1 an axis of the grid that nothing else uses, in order."""
    free = [axis for axis in range(ndim) if not any(axis in move for move in moves)]
    last = -1
    for move in moves:
        if not move and not free:
            return False
        if not move:
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
        turned = name in reverse
        back = {axis for axis, step in move.items() if step and (step < 0) != turned}
        low = {a: min(at[a], at[a] + step * (size - 1)) for a, step in move.items()}
        offset = _whole_diagonal(grid, size, move, low, back)
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
            first, second, *_ = (axis for axis, walker in enumerate(left) if walker == name)
            steps.append(Step("diagonal", (offset, first, second)))
            left = [*left[:first], *left[first + 1 : second], *left[second + 1 :], name]
    order = tuple(left.index(name) for name in range(len(moves)))
    return [*steps, Step("permute", order), Step("flip", tuple(reverse))]


def _whole_diagonal(
    grid: Ints, size: int, move: dict[int, int], low: dict[int, int], flips: set[int]
) -> int | None:
    """The offset of the diagonal that is walked from end to end, None if it is only a part."""
    if len(move) != 2 or any(abs(step) != 1 for step in move.values()):
        return None
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
