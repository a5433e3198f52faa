"""`map`, and the operations that are built on it: moves, casts, copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tied import _unreached, arrays
from tied._errors import DeviceError, DeviceWarning, DtypeError, TiedError, callers_level
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
def cast(model: Any, dtype: Any, *, hidden: str = "warn") -> Any:
    """Casts the floating arrays of a model; complex ones get the complex dtype of that precision.

    Integers, booleans, random keys and the step counters of optimizers stay.

    Args:
        model: Any object. It is not changed.
        dtype: A floating dtype: a name ("bfloat16"), or a dtype of NumPy, PyTorch or JAX.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model, tied as the old one; arrays that had the dtype already are the same objects.

    Raises:
        DtypeError: The dtype is not floating, or an array's library does not have it.
        TieError: The bits of a storage are read as another dtype.

    >>> import numpy as np, tied
    >>> tied.cast({"w": np.zeros(2), "n": np.arange(2)}, "float32")["w"].dtype
    dtype('float32')
    """
    name = dtype_name(dtype)
    found = taken_apart(model, hidden)

    counting = counters(found)

    def change(found: Walk, one: int | Cluster, array: Any, library: Library) -> Any:
        return array if counting and first(one) in counting else library.cast(array, name)

    with quiet(found):
        return rebuild(found, model, change)


_FLOATING = ("float16", "float32", "float64", "bfloat16", "longdouble")


def dtype_name(dtype: Any) -> str:
    """Returns the name of a floating dtype of any library.

    Raises:
        DtypeError: It is none.
    """
    name: str
    if isinstance(dtype, str):
        name = dtype
    elif str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
    else:
        name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype))
    if name not in _FLOATING and not name.startswith("float8"):
        raise DtypeError(
            f"{dtype!r} is not a floating dtype",
            hint=f"Type one of {', '.join(_FLOATING[:4])}; integers and booleans are never cast",
        )
    return name


def f16(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to 16 bits: `cast(model, "float16")`."""
    return cast(model, "float16", hidden=hidden)


def bf16(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to bfloat16: `cast(model, "bfloat16")`."""
    return cast(model, "bfloat16", hidden=hidden)


def f32(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to 32 bits: `cast(model, "float32")`."""
    return cast(model, "float32", hidden=hidden)


def f64(model: Any, *, hidden: str = "warn") -> Any:
    """Casts floating arrays to 64 bits: `cast(model, "float64")`; JAX needs 64 bits enabled."""
    return cast(model, "float64", hidden=hidden)


@steady()
def to(model: Any, device: Any, *, hidden: str = "warn") -> Any:
    """Moves a model to a device, a sharding, or an array library.

    Args:
        model: Any object. It is not changed.
        device: A device of PyTorch or JAX, by name or as an object; a JAX sharding; or the name
            of a library ("numpy", "torch", "jax"). Arrays of a library that does not know the
            device stay.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model, tied as the old one. Arrays that are there already are the same objects. A
        move between libraries copies, and gives plain arrays: what has strides in NumPy and
        PyTorch is a `View` in JAX, and an ordinary view again on the way back.

    Raises:
        DeviceError: No library of the model knows the device, or it can't be used.
        DtypeError: The other library does not have an array's dtype.
        LibraryError: The other library is not installed.

    >>> import numpy as np, tied
    >>> W = np.ones((2, 3))
    >>> tied.to({"enc": W, "dec": W.T}, "cpu")["enc"] is W
    True
    """
    if isinstance(device, str) and device in arrays.names:
        return _to_library(model, arrays.load(device), hidden)
    found = taken_apart(model, hidden)
    return _moved(found, model, _targets(found, device))


def _targets(found: Walk, device: Any) -> dict[str, Any]:
    """Returns for each library of a model what a device is to it; None where it is nothing.

    Raises:
        DeviceError: No library knows the device, or it can't be used.
    """
    if not found.leaves:
        return {}
    libraries = _libraries(found)
    first = found.name(found.leaves[0])
    try:
        targets = {library.name: library.target(device) for library in libraries}
    except DeviceError as error:
        facts = [*error.facts, ("first array", first or "the model")]
        raise DeviceError(error.message, facts=facts, hint=error.hint, paths=[first]) from error
    if all(target is None for target in targets.values()):
        raise DeviceError(
            f"unknown device {str(device)!r}",
            facts=[("libraries", ", ".join(targets)), ("first array", first or "the model")],
            hint='Type "cpu", "cuda", "meta", "cpu:1", a device object, or a library: "jax"',
            paths=[first],
        )
    return targets


def _libraries(found: Walk) -> list[Library]:
    """Returns the libraries of a model's arrays; a `View` counts as its base's."""
    libraries: dict[str, Library] = {}
    for item, library in zip(found.leaves, found.libraries, strict=True):
        if library.name == "lazy":
            base = kinds[type(found.objects[item].base)]
            assert isinstance(base, Library)
            library = base
        libraries[library.name] = library
    return list(libraries.values())


def _moved(found: Walk, model: Any, targets: dict[str, Any]) -> Any:
    counting = counters(found)

    def change(found: Walk, one: int | Cluster, array: Any, library: Library) -> Any:
        target = targets.get(library.name)
        if target is None or (first(one) in counting and str(target) != "meta"):
            return array
        return library.move(array, target)

    with quiet(found):
        return rebuild(found, model, change)


def _to_library(model: Any, wanted: Library, hidden: str) -> Any:
    def change(found: Walk, one: int | Cluster, array: Any, library: Library) -> Any:
        if library is wanted or library.name == "opaque":
            return array
        return wanted.from_numpy(library.to_numpy(array))

    return transform(model, change, hidden=hidden)


@steady()
def cpu(model: Any, *, hidden: str = "warn") -> Any:
    """Moves a model to the CPU: `to(model, "cpu")`; arrays that are there are the same objects."""
    found = taken_apart(model, hidden)
    return _moved(found, model, {lib.name: lib.host() for lib in _libraries(found)})


@steady()
def gpu(model: Any, *, hidden: str = "warn") -> Any:
    """Moves a model to the accelerator that its libraries find first.

    Args:
        model: Any object. It is not changed.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model, tied as the old one; without an accelerator `model` itself, with one warning
        in the life of the process.
    """
    found = taken_apart(model, hidden)
    targets = {library.name: library.accelerator() for library in _libraries(found)}
    if all(target is None for target in targets.values()):
        _warn_no_accelerator()
        return model
    return _moved(found, model, targets)


_warned: list[bool] = []


def _warn_no_accelerator() -> None:
    if not _warned:
        _warned.append(True)
        warnings.warn(
            "no accelerator was found; the model stays", DeviceWarning, stacklevel=callers_level()
        )


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


@steady()
def empty(model: Any, device: Any = None, *, hidden: str = "warn") -> Any:
    """Gives a model unset memory: materialises PyTorch's `meta` and JAX's abstract models, tied.

    Args:
        model: Any object. It is not changed.
        device: Where the memory is to be, as for `to`; None: where each array is now (on the
            default device for arrays without one).
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model of the same shapes, dtypes and ties; what its arrays hold is not defined.

    Raises:
        DeviceError: No library of the model knows the device.
    """
    found = taken_apart(model, hidden)
    targets = {} if device is None else _targets(found, device)

    def change(found: Walk, one: int | Cluster, array: Any, library: Library) -> Any:
        return library.empty(array, targets.get(library.name))

    return rebuild(found, model, change)
