"""`map`, and what casts, moves and copies are built on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tied import _unreached, arrays
from tied._errors import TiedError
from tied._match import Partners
from tied._node import kinds
from tied._overlap import Cluster, clusters
from tied._plan import Plan, attach_to
from tied._reading import located
from tied._spread import spread
from tied._storage import Storage, shared, single
from tied._walk import Walk, steady, walk
from tied.arrays import Library

Change = Callable[[Walk, "int | Cluster", Any, Library], Any]
"""Given a walk, one of its storages, the storage's array and library, returns the new array."""


def transform(
    model: Any,
    change: Change,
    *,
    hidden: str = "warn",
    everything: bool = False,
) -> Any:
    """Returns the model with each storage replaced; the one way in which anything is changed.

    Args:
        model: Any object; it is not changed.
        change: What becomes of a storage.
        hidden: What to do about arrays in objects that nothing opens.
        everything: Build parts anew that hold no array (`copy`).
    """
    found = taken_apart(model, hidden)
    with quiet(found):
        return rebuild(found, model, change, everything=everything)


def taken_apart(model: Any, hidden: str, is_leaf: Callable[[Any], bool] | None = None) -> Walk:
    """Returns the walk of a model that is to be changed: with what hangs on leaves, and checked."""
    found = walk(model, is_leaf=is_leaf, extras=True, grads=True)
    _unreached.check(found, hidden)
    return found


def rebuild(found: Walk, model: Any, change: Change, *, everything: bool = False) -> Any:
    """Does what `transform` does, for a walk that is there already."""
    objects, leaves, libraries = found.objects, found.leaves, found.libraries
    items: list[Any] = [None] * len(objects)
    for one in clusters(found):
        if isinstance(one, Cluster):
            _change_shared(found, one, items, change)
            continue
        item, library = leaves[one], libraries[one]
        before = objects[item]
        try:
            after = change(found, one, before, library)
            if after is not before:
                after = library.settled(before, after, kinds[type(after)])
        except TiedError as error:
            raise located(error, single(found, one)[0]) from error
        items[item] = after
    with steady():
        plan = Plan(found, model, everything=everything)
        return plan.build(items, lambda leaf, extras: _attach(found, items, leaf, extras))


def _change_shared(found: Walk, cluster: Cluster, items: list[Any], change: Change) -> None:
    """Puts into `items` what becomes of the leaves of a tie."""
    storage, before = shared(found, cluster)
    try:
        after = change(found, cluster, before, library_of(before))
        leaves = [] if after is before else spread(storage, after)
    except TiedError as error:
        raise located(error, storage) from error
    for reader in storage.readers:
        items[reader.item] = found.objects[reader.item]
    for item, leaf in leaves:
        items[item] = leaf


def library_of(array: Any) -> Library:
    """Returns the library of an array."""
    kind = kinds[type(array)]
    return kind if isinstance(kind, Library) else arrays.load("opaque")


def storage_of(found: Walk, one: int | Cluster) -> Storage:
    """Returns what a change is made to, with its name."""
    return single(found, one)[0] if isinstance(one, int) else shared(found, one)[0]


def _attach(found: Walk, items: list[Any], leaf: int, extras: dict[str, Any]) -> None:
    """Hangs extras on a leaf; a leaf that is still the model's own is not touched."""
    own = found.objects[leaf]
    if items[leaf] is own:
        library = found.libraries[found.leaves.index(leaf)]
        before = library.extras(own, grads=True) or {}
        if all(before.get(name) is value for name, value in extras.items()):
            return
        items[leaf] = library.twin(own)
    attach_to(items, leaf, extras)


def map(
    f: Callable[..., Any],
    model: Any,
    *others: Any,
    with_path: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
    hidden: str = "warn",
) -> Any:
    """Applies a function to each storage of a model, once, and keeps every tie.

    Args:
        f: Takes an array, and one array of each of `others`; returns the new array. A storage
            that several leaves read is given in the shape of the leaf that covers it (else as the
            1-D span that they read), and `f` must keep its shape. A storage that one leaf reads
            may change its shape, or become something else than an array. PyTorch tensors are
            given without autograd, unless gradients flow through them to something before.
        model: Any object. It is not changed.
        *others: Models of the same parts; they may hold, where `model` has a view, the view's own
            shape or that of its storage.
        with_path: Call `f(path, array, ...)`; `str(path)` is the storage's name.
        is_leaf: Says of a part that it is a leaf though it is no array.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model. Parts that hold no array are the very same objects; where `f` returns its
        argument, the leaves are too. Gradients that PyTorch keeps in `.grad` are mapped as well.

    Raises:
        TieError: `f` changes the shape of a storage that is read as a view, or the dtype of one
            whose bits are read as another dtype.
        MatchError: A part of `others` is missing, or its values differ at a tie.
        HiddenArrayError: An array is hidden and `hidden` is "raise".

    >>> import numpy as np, tied
    >>> W = np.ones((2, 3))
    >>> model = tied.map(lambda x: x * 2, {"enc": W, "dec": W.T})
    >>> np.shares_memory(model["enc"], model["dec"])
    True
    """
    found = taken_apart(model, hidden, is_leaf)
    partners = [Partners(found, other, number) for number, other in enumerate(others, start=1)]

    def change(found: Walk, one: int | Cluster, array: Any, library: Library) -> Any:
        if not partners and not with_path:
            return library.call(f, array)
        storage = storage_of(found, one)
        rest = [partner.value(storage, array) for partner in partners]
        if with_path:
            item = storage.readers[max(storage.whole, 0)].item
            path = found.path(item)
            return library.call(lambda x: f(path, x, *rest), array)
        return library.call(lambda x: f(x, *rest), array)

    return rebuild(found, model, change)


def counters(found: Walk) -> frozenset[int]:
    """Returns the leaves, by position, that count an optimizer's steps; they are never cast."""
    counting = {r.item for r in found.records if r is not None and r.node.is_counter}
    if not counting:
        return frozenset()
    return frozenset(
        position for position, item in enumerate(found.leaves) if found.parents[item] in counting
    )


def first(one: int | Cluster) -> int:
    """Returns the position of a storage's first leaf."""
    return one if isinstance(one, int) else one.members[0]


def quiet(found: Walk) -> ExitStack:
    """Returns the context in which the libraries of a model change arrays, not recording it."""
    stack = ExitStack()
    for library in set(found.libraries):
        stack.enter_context(library.quiet())
    return stack


@steady()
def copy(model: Any, *, hidden: str = "warn") -> Any:
    """Copies a model with all its ties: `copy.deepcopy` that knows views.

    Args:
        model: Any object. It is not changed.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model that shares no memory with the old one: containers and settings are copied
        too. Functions, and objects that nothing opens, are the same objects.
    """
    return transform(model, lambda _found, _one, array, library: library.copy(array), hidden=hidden,
                     everything=True)  # fmt: skip
