"""A reading of a source that transforms have sliced or stacked: never the wrong axis in silence.

`nnx.vmap` and `nnx.scan` give a model the slices of its arrays, and a constructor that is mapped
leaves a model whose arrays are stacks of those that were tied. The reading that is right there
follows from the one that was tied, if it maps the elements of each slice alike; else there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import jax

from tied._layout import Layout
from tied._steps import Ints, apply_steps, c_strides
from tied.arrays.computed import plain


@lru_cache(maxsize=4096)
def moved(layout: Layout, made: Ints, found: Ints) -> Layout | None:
    """Returns how a source is to be read that has another shape than the one that was tied.

    Args:
        layout: How a source of shape `made` is read.
        made: The shape of the source when it was tied.
        found: The shape that it has now: one axis less (a slice), one more (a stack), or other
            lengths (resized, or a shard).

    Returns:
        The layout over the source of now; None if it is not certain what is to be read.
    """
    if found == made:
        return layout
    if len(found) == len(made):
        return _resized(layout, made, found)
    if len(found) < len(made):
        choices = [_sliced(layout, made, axis) for axis in lost_axes(made, found)]
    else:
        choices = [_stacked(layout, found, axis) for axis in lost_axes(found, made)]
    if not choices or None in choices or any(choice != choices[0] for choice in choices):
        return None
    return choices[0]


def lost_axes(large: Ints, small: Ints) -> list[int]:
    """Returns the axes of which one is to be taken away from a shape to get another."""
    return [n for n in range(len(large)) if large[:n] + large[n + 1 :] == small]


def _resized(layout: Layout, made: Ints, found: Ints) -> Layout | None:
    """Returns the reading of a source of other lengths: only a permutation of axes has one."""
    steps = layout.steps(made) if layout.dtype is None else ()
    if layout.dtype is not None or any(step.op not in ("permute", "conj", "neg") for step in steps):
        return None
    seen = Layout.of(lambda w: apply_steps(w, [s for s in steps if s.op == "permute"]), found)
    assert seen is not None
    return Layout(seen.shape, seen.strides, seen.offset, layout.conj, layout.neg)


def _sliced(layout: Layout, made: Ints, axis: int) -> Layout | None:
    """Returns the reading of one slice along `axis`, if the axis is the same one in what is read.

    It is worked out from the strides, then tried: the reading of the first and of the last slice
    has to be the first and the last slice of the reading.
    """
    step = c_strides(made)[axis]
    if layout.dtype is not None or layout.shape[axis : axis + 1] != made[axis : axis + 1]:
        return None

    def narrowed(stride: int) -> int:
        far, near = divmod(abs(stride), step * made[axis])
        return (far * step + near) * (-1 if stride < 0 else 1)

    keep = [n for n in range(len(layout.shape)) if n != axis]
    shape = tuple(layout.shape[n] for n in keep)
    strides = tuple(narrowed(layout.strides[n]) for n in keep)
    offset = narrowed(layout.offset)
    slim = Layout(shape, strides, offset, layout.conj, layout.neg).canonical()
    for index in {0, made[axis] - 1}:
        at = partial(_at, key=(slice(None),) * axis + (index,))
        one, wanted = Layout.of(at, made), layout.then(at)
        if one is None or wanted is None or _composed(one, slim) != wanted.canonical():
            return None
    return slim


def _at(array: Any, key: Any) -> Any:
    return array[key]


def _composed(outer: Layout, inner: Layout) -> Layout | None:
    try:
        return outer.then(inner)
    except ValueError:  # it would reach outside of the slice
        return None


def _stacked(layout: Layout, found: Ints, axis: int) -> Layout | None:
    """Returns the reading of a stack along `axis`, each part of which is read through `layout`."""
    if layout.dtype is not None or axis > len(layout.shape):
        return None
    step = c_strides(found)[axis]

    def widened(stride: int) -> int:
        far, near = divmod(abs(stride), step)
        return (far * step * found[axis] + near) * (-1 if stride < 0 else 1)

    shape = (*layout.shape[:axis], found[axis], *layout.shape[axis:])
    strides = [widened(stride) for stride in layout.strides]
    strides.insert(axis, step)
    offset = widened(layout.offset)
    wide = Layout(shape, tuple(strides), offset, layout.conj, layout.neg).canonical()
    return wide if _sliced(wide, found, axis) == layout.canonical() else None


def struct(shape: Ints, dtype: Any) -> Any:
    """Returns what stands for an array without values."""
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


Computes = Callable[..., Any]
Types = tuple[tuple[Ints, Any], ...]


def computed(function: Computes, made: tuple[Ints, ...], values: list[Any]) -> Any:
    """Returns what a function computes of its sources, sliced or stacked as they may be.

    Args:
        function: The function of arrays that was tied; hashable.
        made: The shapes of the sources when they were tied.
        values: The sources.

    Returns:
        The array; None if it is not certain what is to be computed.
    """
    found = tuple(tuple(value.shape) for value in values)
    run = function
    if found != made:
        types = tuple(zip(made, [str(value.dtype) for value in values], strict=True))
        made_for = _mapped(function, types, found)
        if made_for is None:
            return None
        run = made_for
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        return jax.eval_shape(lambda *parts: plain(run(*parts)), *values)
    return plain(run(*values))


@lru_cache(maxsize=1024)
def _mapped(function: Computes, types: Types, found: tuple[Ints, ...]) -> Computes | None:
    """Returns the function of slices or of stacks that follows from a function of the whole."""
    made = tuple(shape for shape, _ in types)
    choices = list(_choices(made, found))
    if not choices:
        return None
    if sum(map(len, found)) < sum(map(len, made)):
        return function if all(_commutes(function, types, axes) for axes in choices) else None
    if len(choices) > 1:
        return None
    (axes,) = choices
    out = next(axis for axis in axes if axis is not None)
    return jax.vmap(lambda *parts: plain(function(*parts)), axes, out)


def _choices(made: tuple[Ints, ...], found: tuple[Ints, ...]) -> Iterator[tuple[int | None, ...]]:
    """Gives for each source the axis that it has lost or won; the same one, where it has."""
    each: list[list[int | None]] = []
    for was, now in zip(made, found, strict=True):
        if was == now:
            each.append([None])
        else:
            large, small = (was, now) if len(was) > len(now) else (now, was)
            each.append(list(lost_axes(large, small)))
    for axes in itertools.product(*each):
        if len({axis for axis in axes if axis is not None}) == 1:
            yield axes


def _commutes(function: Computes, types: Types, axes: tuple[int | None, ...]) -> bool:
    """Returns whether a function does to each slice what it does to the whole.

    The proof is that JAX traces the very same program for the function of the whole as for the
    function of a slice that is mapped over the axis.
    """
    out = next(axis for axis in axes if axis is not None)
    args = [struct(shape, dtype) for shape, dtype in types]
    try:
        whole = jax.make_jaxpr(lambda *parts: plain(function(*parts)))(*args)
        slices = jax.make_jaxpr(jax.vmap(lambda *parts: plain(function(*parts)), axes, out))(*args)
    except (TypeError, ValueError, IndexError):  # the function takes no slices
        return False
    same = zip(whole.consts, slices.consts, strict=False)
    return str(whole) == str(slices) and all(a is b for a, b in same)


def padded(names: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Returns one name, or None, for each axis."""
    return (*names, *[None] * (ndim - len(names)))


def through(how: Any, source: Any, names: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns the names of the axes of what is read, given those of the source.

    Returns:
        None where an axis that is read is none of the source's.
    """
    names = padded(names, source.ndim)
    if how is None:
        return names
    if not isinstance(how, Layout):
        return None
    strides = c_strides(tuple(source.shape))
    found = []
    for size, stride in zip(how.shape, how.strides, strict=True):
        axes = [n for n, step in enumerate(strides) if abs(stride) == step and source.shape[n] > 1]
        if len(axes) != 1 and size > 1:
            return None
        found.append(names[axes[0]] if size > 1 else None)
    return tuple(found)
