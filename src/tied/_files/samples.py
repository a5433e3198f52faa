"""Which few elements of an array say that it may be another one, read in another way.

If an array is a reading of another one, then the elements at corresponding places are the same.
Those places follow from the shapes alone: a sample of some elements, taken in the order that the
reading would have, is looked up in a dict. Nothing that is equal is missed so, and what is not
equal is seldom taken for it; nothing but the samples has to be read.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tied._layout import Layout
from tied._steps import Ints, c_strides

COUNT = 16  # elements of a sample
AXES = 4  # arrays of more axes, those of length 1 not counted, are read in their own order only
_GOLDEN = (math.sqrt(5) - 1) / 2


class Order(NamedTuple):
    """An order of an array's axes, and the positions of a sample of the array in it.

    Attributes:
        axes: The axes that are longer than 1, in this order.
        positions: Positions in the flat array.
    """

    axes: Ints
    positions: Any


class Run(NamedTuple):
    """A way in which an array may start with another one, or be the start of one.

    Attributes:
        axis: The axis along which it would be cut.
        length: Its length.
        rest: The lengths of the others.
    """

    axis: int
    length: int
    rest: Ints


def _spread(size: int) -> Any:
    """Returns positions all over an array of `size` elements, the same ones for every such size."""
    if size <= COUNT:
        return np.arange(size)
    return np.array([int(size * (i * _GOLDEN % 1)) for i in range(1, COUNT + 1)])


@lru_cache(maxsize=512)
def orders(shape: Ints) -> tuple[Order, ...]:
    """Returns the orders in which an array may be read, its own one first.

    The sample of an order is that of the flat array which the transpose would be.

    >>> [order.axes for order in orders((2, 1, 3))]
    [(0, 2), (2, 0)]
    """
    axes = [axis for axis, length in enumerate(shape) if length > 1]
    strides = c_strides(shape)
    spread = _spread(math.prod(shape))
    found = []
    for order in itertools.permutations(axes) if len(axes) <= AXES else [tuple(axes)]:
        places = np.unravel_index(spread, [shape[axis] for axis in order])
        steps = (place * strides[axis] for place, axis in zip(places, order, strict=True))
        found.append(Order(order, sum(steps)))
    return tuple(found)


def runs(shape: Ints) -> list[Run]:
    """Returns the axes along which an array may start with another one: the first, or both."""
    found = [Run(0, shape[0], shape[1:])] if shape else []
    return found + ([Run(1, shape[1], shape[:1])] if len(shape) == 2 else [])


def level(length: int) -> int:
    """Returns how much of a run is sampled: a power of 16, so that few of them serve all lengths.

    >>> [level(n) for n in (1, 15, 16, 1000)]
    [1, 1, 16, 256]
    """
    return int(1 << ((length.bit_length() - 1) // 4 * 4))


@lru_cache(maxsize=512)
def lead(run: Run, some: int) -> Any:
    """Returns the positions of a sample of the first `some` of a run, in the order of the run."""
    size = math.prod(run.rest)
    places = _spread(some * size)
    if run.axis == 0:
        return places
    along, across = np.divmod(places, size)
    return across * run.length + along


@lru_cache(maxsize=512)
def turned_back(shape: Ints, axes: Ints) -> Layout:
    """Returns how an array of a shape reads the flat array that an order of its axes makes.

    >>> turned_back((2, 3), (1, 0)).describe((3, 2), "flat")
    'flat.T'
    """
    axes += tuple(axis for axis in range(len(shape)) if axis not in axes)
    steps = dict(zip(axes, c_strides(tuple(shape[axis] for axis in axes)), strict=True))
    return Layout(shape, tuple(steps[axis] for axis in range(len(shape)))).canonical()
