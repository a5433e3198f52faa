"""Separate gradients, one for each use of a storage, made one for each storage."""

from __future__ import annotations

from typing import Any

import numpy as np

from tied._errors import ConventionError, MatchError
from tied._layout import Layout
from tied._node import kinds
from tied._path import Path, Step, take
from tied._places import places
from tied._steps import Step as Move
from tied._storage import Reader, Storage, storages
from tied._walk import walk
from tied.arrays import Library
from tied.arrays.computed import plain

Uses = list[tuple[str, Reader, Any]]


def accumulate(model: Any, grads: Any, *, convention: str) -> dict[str, Any]:
    """Makes one gradient for each storage out of one for each use.

    Args:
        model: Any object. It is not changed.
        grads: A tree with the model's parts, whose leaves are gradients. A use without a gradient
            has None there, or no part. Where the model has a view, the gradient may have the
            view's shape or that of its storage.
        convention: What a gradient at one use means. "partial": the gradient by that use alone
            (`jax.grad` of a pytree, Zygote); they are summed. "total": the gradient by all uses
            (`.grad` of one PyTorch parameter met under two names); they are not.

    Returns:
        A dict from storage name to gradient, in the storage's shape, for each floating storage;
        zeros where no use has a gradient.

    Raises:
        ConventionError: The convention is unknown; "partial" is claimed of one array that stands
            at two uses, or "total" of gradients that differ. The error names both paths.
        MatchError: A gradient has neither the view's nor the storage's shape.

    >>> import numpy as np, tied
    >>> W = np.ones((2, 2))
    >>> grads = {"a": np.full((2, 2), 3.0), "b": np.full((2, 2), 7.0)}
    >>> float(tied.accumulate({"a": W, "b": W}, grads, convention="partial")["a"][0, 0])
    10.0
    """
    if convention not in ("partial", "total"):
        raise ConventionError(
            f"the convention {convention!r} is unknown",
            hint='Type convention="partial" to sum the gradients of the uses,'
            ' or "total" if each is the whole gradient already',
        )
    found = walk(model)
    given: dict[int, list[tuple[str, Any]]] = {}
    for steps, item in places(found, derived=True):
        value = _at(grads, steps)
        if value is not None:
            given.setdefault(item, []).append((str(Path(steps)), value))
    total = {}
    for storage, before in storages(found):
        library = kinds[type(before)]
        uses = [(path, r, g) for r in storage.readers for path, g in given.get(r.item, ())]
        if not isinstance(library, Library) or not library.is_floating(before):
            if any(r.layout is not None and r.layout.dtype is not None for _, r, _ in uses):
                raise _misshaped(storage, uses[-1][0], f"of a storage of {storage.dtype}")
            continue
        total[storage.name] = _one(storage, before, uses, convention)
    return total


def _at(grads: Any, steps: tuple[Step, ...]) -> Any:
    part = grads
    for step in steps:
        try:
            part = take(part, step)
        except (AttributeError, LookupError, TypeError):
            return None
        if part is None:
            return None
    return part


def _one(storage: Storage, array: Any, uses: Uses, convention: str) -> Any:
    library = kinds[type(array)]
    assert isinstance(library, Library)
    if not uses:
        return library.zeros(array)
    _refuse_one_array_twice(uses, convention)
    pulled = [(path, reader, _pulled(storage, path, reader, g)) for path, reader, g in uses]
    if convention == "partial":
        result = pulled[0][2]
        for _, _, gradient in pulled[1:]:
            result = result + gradient
        return result
    return _total(storage, pulled, library)


def _total(storage: Storage, uses: Uses, library: Library) -> Any:
    """Returns the one total that all uses tell a part of.

    Raises:
        ConventionError: Two uses tell different totals for an element.
    """
    uses = sorted(uses, key=lambda use: not _told(storage, use[1]).all())
    path, reader, result = uses[0]
    told = _told(storage, reader)
    for other, reader, gradient in uses[1:]:
        here = _told(storage, reader)
        a, b = (library.to_numpy(x) for x in (result, gradient))
        both = here & told
        if result is not gradient and not np.allclose(a[both], b[both], rtol=1e-5, atol=1e-7):
            raise ConventionError(
                "these gradients are not totals: they differ",
                facts=[("one", path), ("other", other)],
                hint='If each is the gradient by its use alone, type convention="partial"',
                paths=[path, other],
            )
        new = here & ~told
        if new.any():
            result = library.from_numpy(np.where(new, b, a))
            told |= here
    return result


def _told(storage: Storage, reader: Reader) -> Any:
    """Returns which elements of a storage, in its own shape, a leaf reads."""
    if reader.layout is None or reader.layout.dtype is not None:
        return np.ones(storage.shape, bool)
    told = np.zeros(storage.base_shape, bool)
    told.reshape(-1)[reader.layout.index().reshape(-1)] = True
    return told.transpose(storage.back)


def _refuse_one_array_twice(uses: Uses, convention: str) -> None:
    met: dict[int, str] = {}
    for path, _, gradient in uses:
        if id(gradient) in met and convention == "partial":
            raise ConventionError(
                "one gradient array stands at two uses, so it is their total",
                facts=[("one", met[id(gradient)]), ("other", path)],
                hint='Type convention="total"',
                paths=[met[id(gradient)], path],
            )
        met[id(gradient)] = path


def _pulled(storage: Storage, path: str, reader: Reader, gradient: Any) -> Any:
    """Returns a use's gradient in the storage's shape, scattered to where it was read."""
    gradient = plain(gradient)
    library = kinds[type(gradient)]
    if not isinstance(library, Library):
        raise _misshaped(storage, path, f"a {type(gradient).__name__}")
    shape, layout = library.shape(gradient), reader.layout
    if layout is not None and layout.dtype is not None:
        return _of_parts(storage, path, layout, gradient, library)
    if layout is None or layout.is_whole(storage.shape):
        if shape == storage.shape:
            return gradient
    elif shape == layout.shape:
        values = gradient.conj() if layout.conj else gradient
        values = -values if layout.neg else values
        return _ordered(storage, library, library.scatter(storage.base_shape, layout, values))
    elif shape == storage.shape:
        return gradient
    raise _misshaped(storage, path, str(shape))


def _ordered(storage: Storage, library: Library, x: Any) -> Any:
    """Returns an array whose axes are in the order of memory with the storage's own order."""
    turned = storage.back != tuple(range(len(storage.order)))
    return library.apply(x, [Move("permute", storage.back)]) if turned else x


def _of_parts(storage: Storage, path: str, layout: Layout, gradient: Any, library: Library) -> Any:
    """Returns the gradient by the real or imaginary parts of a storage as one by the storage."""
    part = {"complex64": "float32", "complex128": "float64"}.get(storage.dtype)
    if part != layout.dtype or library.shape(gradient) != layout.shape:
        raise _misshaped(storage, path, f"of bits read as {layout.dtype}")
    size = np.dtype(part).itemsize
    strides = tuple(stride // size for stride in layout.strides)
    inner = Layout(layout.shape, strides, layout.offset // size)
    pairs = library.scatter((*storage.base_shape, 2), inner, gradient)
    return _ordered(storage, library, pairs[..., 0] + 1j * pairs[..., 1])


def _misshaped(storage: Storage, path: str, shape: str) -> MatchError:
    return MatchError(
        "a gradient fits neither its leaf nor its storage",
        facts=[("gradient", f"{path}   {shape}"), ("storage", f"{storage.name}   {storage.shape}")],
        hint="Give the gradient the shape of either",
        paths=[path, storage.name],
    )
