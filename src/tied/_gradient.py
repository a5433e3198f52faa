"""Separate gradients, one for each use of a storage, made one for each storage."""

from __future__ import annotations

from typing import Any

from tied._errors import ConventionError, MatchError
from tied._node import kinds
from tied._path import Path, Step, take
from tied._places import places
from tied._storage import Reader, Storage, storages
from tied._walk import walk
from tied.arrays import Library

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
    for steps, item in places(found):
        value = _at(grads, steps)
        if value is not None:
            given.setdefault(item, []).append((str(Path(steps)), value))
    total = {}
    for storage, array in storages(found):
        before = array()
        library = kinds[type(before)]
        if not isinstance(library, Library) or not library.is_floating(before):
            continue
        uses = [(path, r, g) for r in storage.readers for path, g in given.get(r.item, ())]
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
    whole = [use for use in pulled if use[1].item == storage.readers[max(storage.whole, 0)].item]
    first = (whole or pulled)[0]
    for path, reader, gradient in pulled:
        if not _same_total(storage, first, reader, gradient):
            raise ConventionError(
                "these gradients are not totals: they differ",
                facts=[("one", first[0]), ("other", path)],
                hint='If each is the gradient by its use alone, type convention="partial"',
                paths=[first[0], path],
            )
    return first[2]


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
    """Returns a use's gradient in the storage's shape: scattered to where its elements came from."""
    library = kinds[type(gradient)]
    assert isinstance(library, Library)
    shape = library.shape(gradient)
    layout = reader.layout
    if layout is None or (layout.is_whole(storage.shape) and not layout.dtype):
        if shape == storage.shape:
            return gradient
        raise _misshaped(storage, path, shape)
    if shape == layout.shape and layout.dtype is None:
        values = gradient.conj() if layout.conj else gradient
        values = -values if layout.neg else values
        flat = library.scatter(storage.base_shape, layout, values)
        back = sorted(range(len(storage.order)), key=storage.order.__getitem__)
        moved = library.apply(flat, [_permute(back)]) if back != sorted(back) else flat
        return moved
    if shape == storage.shape:
        return gradient
    raise _misshaped(storage, path, shape)


def _permute(axes: list[int]) -> Any:
    from tied._steps import Step as Move

    return Move("permute", tuple(axes))


def _misshaped(storage: Storage, path: str, shape: tuple[int, ...]) -> MatchError:
    return MatchError(
        "a gradient fits neither its leaf nor its storage",
        facts=[("gradient", f"{path}   {shape}"), ("storage", f"{storage.name}   {storage.shape}")],
        paths=[path, storage.name],
    )


def _same_total(storage: Storage, first: Any, reader: Reader, gradient: Any) -> bool:
    """Returns whether two totals agree where both have something to say, to rounding."""
    import numpy as np

    if first[2] is gradient:
        return True
    library = kinds[type(gradient)]
    assert isinstance(library, Library)
    a, b = library.to_numpy(first[2]), library.to_numpy(gradient)
    told = np.ones(storage.base_shape, bool)
    if reader.layout is not None and reader.layout.dtype is None:
        told = np.zeros(storage.base_shape, bool)
        told.reshape(-1)[reader.layout.index().reshape(-1)] = True
    told = told.transpose(sorted(range(len(storage.order)), key=storage.order.__getitem__))
    return bool(np.allclose(np.where(told, a, 0), np.where(told, b, 0), rtol=1e-5, atol=1e-7))
