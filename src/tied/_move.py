"""Devices, shardings and array libraries: `to` and its kind."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from tied import arrays
from tied._errors import DeviceError, DeviceWarning, callers_level
from tied._map import counters, first, quiet, rebuild, storage_of, taken_apart, transform
from tied._node import kinds
from tied._overlap import Cluster
from tied._requests import Requests
from tied._storage import Reader, Storage
from tied._walk import Walk, steady
from tied.arrays import Library


@steady()
def to(model: Any, device: Any, *, hidden: str = "warn") -> Any:
    """Moves a model to a device, a sharding, or an array library.

    Args:
        model: Any object. It is not changed.
        device: A device of PyTorch or JAX, by name or as an object; a JAX sharding (or a
            `PartitionSpec`, over the mesh of `jax.set_mesh`); or the name of a library ("numpy",
            "torch", "jax"). Arrays of a library that does not know the device stay. A dict gives
            devices or shardings by globs on names, `{"embed.*": NamedSharding(mesh, P("x"))}`; any
            name of an array counts, and the first glob that fits it is taken. What is asked of a
            view is asked of its storage: the second axis of a transpose is the first of that.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        A new model, tied as the old one. Arrays that are there already are the same objects. A
        move between libraries copies, and gives plain arrays: what has strides in NumPy and
        PyTorch is a `View` in JAX, and an ordinary view again on the way back.

    Raises:
        DeviceError: No library of the model knows the device, or it can't be used.
        PathError: A glob fits no name.
        TieError: Two names of one storage ask for different places.
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
    if isinstance(device, Mapping):
        return _moved_apart(found, model, device)
    return _moved(found, model, _targets(found, device))


def _moved_apart(found: Walk, model: Any, wanted: Mapping[str, Any]) -> Any:
    """Returns a model each of whose storages is where its names ask for."""
    counting = counters(found)
    asked = Requests(found, wanted, "places")

    def change(found: Walk, one: int | Cluster, array: Any, library: Library) -> Any:
        if first(one) in counting:
            return array
        target = asked.of(storage_of(found, one), None, _asks_of_storage)
        return array if target is None else library.move(array, target)

    with quiet(found):
        return rebuild(found, model, change)


def _asks_of_storage(device: Any, storage: Storage, reader: Reader) -> Any:
    """Returns where a storage is to be whose reader is to be on a device."""
    if device is None:
        return None
    library = arrays.load(storage.library)
    target = library.target(device)
    if target is None:
        raise DeviceError(
            f"{library.name} does not know the device {device!r}",
            facts=[("array", reader.path or "the model")],
            hint='Type "cpu", "cuda", "meta", "cpu:1", a device object, or a sharding of JAX',
            paths=[reader.path],
        )
    return library.through(target, reader.layout, storage.base_shape or storage.shape)


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
