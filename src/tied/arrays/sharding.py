"""What a sharding that is asked of a view asks of the array that is read."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, get_mesh

from tied._errors import DeviceError
from tied._layout import Layout


def named(spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of a spec over the mesh that `jax.set_mesh` has set.

    Raises:
        DeviceError: None is set.
    """
    mesh = get_mesh()
    if mesh.empty:
        raise DeviceError(
            f"{spec} names axes of a mesh, and no mesh is set",
            hint="Give jax.sharding.NamedSharding(mesh, spec), or set one: jax.set_mesh(mesh)",
        )
    return NamedSharding(mesh, spec)


def must_fit(sharding: Any, axes: int) -> None:
    """Raises if a sharding splits axes that an array has not (JAX may only assert it)."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > axes:
        raise DeviceError(
            f"{sharding.spec} splits more axes than an array has: {axes}",
            hint='Give shardings by name: tied.to(model, {"*.kernel": sharding})',
        )


def of_storage(sharding: Any, layout: Layout | None, shape: tuple[int, ...]) -> Any:
    """Returns the sharding of a storage whose view has another one.

    An axis of a view is split as the axis of the storage that it runs along.

    Args:
        sharding: What the view is to have.
        layout: What the view reads; None if it is the storage itself.
        shape: The storage's shape.

    Raises:
        DeviceError: An axis that is split runs along no one axis of the storage.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = tuple(sharding.spec)
    axes = _axes(layout, shape) if layout is not None else tuple(range(len(shape)))
    must_fit(sharding, len(axes))
    entries: list[Any] = [None] * len(shape)
    for axis, entry in zip(axes, spec, strict=False):
        if entry is not None and axis is None:
            raise DeviceError(
                f"{sharding.spec} splits an axis of a view that is no axis of its storage",
                hint="Ask it of the storage: give its own name a sharding",
            )
        if entry is not None and axis is not None:
            entries[axis] = entry
    while entries and entries[-1] is None:
        entries.pop()
    spec_of: Any = PartitionSpec
    return NamedSharding(sharding.mesh, spec_of(*entries), memory_kind=sharding.memory_kind)


def _axes(layout: Layout, shape: tuple[int, ...]) -> tuple[int | None, ...]:
    """Returns for each axis of a view the axis of the storage that it runs along."""
    strides = Layout.whole(shape).strides
    taken: set[int] = set()
    axes: list[int | None] = []
    for length, stride in zip(layout.shape, layout.strides, strict=True):
        fits = (
            axis
            for axis, own in enumerate(strides)
            if abs(stride) == own and 1 < length <= shape[axis] and axis not in taken
        )
        axis = next(fits, None)
        axes.append(axis)
        if axis is not None:
            taken.add(axis)
    return tuple(axes)
