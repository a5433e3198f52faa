"""From leaves to storages: what each leaf reads of the elements that it shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tied._layout import Layout
from tied._node import kinds
from tied._overlap import Cluster, clusters, repeats_elements
from tied._walk import Walk
from tied.arrays import Geometry, Library, load


class Reader(NamedTuple):
    """A leaf that reads a storage.

    Attributes:
        item: The leaf's number in the walk.
        path: Where it was first met, as a dotted name.
        layout: What it reads; None for a storage that only this leaf reads, as it is.
        library: The name of its array library.
        meta: What its library says it has besides elements.
    """

    item: int
    path: str
    layout: Layout | None
    library: str
    meta: Any


class Storage(NamedTuple):
    """A run of elements that one or more leaves read; holds no array.

    Attributes:
        name: The path of its representative.
        library: The array library that `map`'s function meets.
        shape: The shape that it is given in.
        dtype: Its dtype's name.
        order: Its axes in the order of memory; empty for a storage that is read only as it is.
        whole: Which reader is the storage itself; -1 if none is.
        readers: The leaves, in walk order.
    """

    name: str
    library: str
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]
    whole: int
    readers: tuple[Reader, ...]

    @property
    def base_shape(self) -> tuple[int, ...]:
        """The shape with its axes in the order of memory; layouts count in it."""
        return tuple(self.shape[axis] for axis in self.order)

    @property
    def back(self) -> tuple[int, ...]:
        """For each axis of `shape`, where it stands in the order of memory: undoes `order`."""
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))

    @property
    def plain(self) -> bool:
        """Whether one leaf reads it, as it is."""
        return len(self.readers) == 1 and self.whole == 0


def storages(walk: Walk) -> list[tuple[Storage, Any]]:
    """Returns each storage of a walk and its array (shared, not copied)."""
    return [
        single(walk, one) if isinstance(one, int) else shared(walk, one) for one in clusters(walk)
    ]


def single(walk: Walk, position: int) -> tuple[Storage, Any]:
    """Returns the storage of a leaf that stands alone, and its array."""
    item, library = walk.leaves[position], walk.libraries[position]
    array, name, owner = walk.objects[item], walk.name(item), library.name
    reader = _new(Reader, (item, name, None, owner, library.meta(array)))
    shape, dtype = library.shape(array), library.dtype(array)
    return _new(Storage, (name, owner, shape, dtype, (), 0, (reader,))), array


_new: Any = tuple.__new__  # for named tuples by the thousand: their own takes twice as long


def shared(walk: Walk, cluster: Cluster) -> tuple[Storage, Any]:
    """Returns the storage of a cluster, and its array."""
    whole = representative(walk, cluster)
    objects, leaves = walk.objects, walk.leaves
    metas = [walk.libraries[i].meta(objects[leaves[i]]) for i in cluster.members]
    if whole >= 0:
        return covered(walk, cluster, whole, metas), objects[leaves[cluster.members[whole]]]
    base, library, low = _window(walk, cluster)
    seen = library.geometry(base)
    assert seen is not None
    order = tuple(range(len(seen.shape)))
    return _outline(walk, cluster, whole, seen, library.name, order, metas, low), base


def covered(
    walk: Walk, cluster: Cluster, whole: int, metas: Sequence[Any] | None = None
) -> Storage:
    """Returns the storage of a cluster whose member `whole` covers it; looks at no array."""
    seen, library = cluster.geometries[whole], walk.libraries[cluster.members[whole]]
    low = cluster.extent[0]
    return _outline(walk, cluster, whole, seen, library.name, _order(seen), metas, low)


def _outline(
    walk: Walk,
    cluster: Cluster,
    whole: int,
    seen: Geometry,
    library: str,
    order: tuple[int, ...],
    metas: Sequence[Any] | None,
    low: int,
) -> Storage:
    readers = []
    for number, (position, geometry) in enumerate(
        zip(cluster.members, cluster.geometries, strict=True)
    ):
        item = walk.leaves[position]
        layout = _layout(geometry, low, seen.itemsize, seen.dtype)
        meta = None if metas is None else metas[number]
        owner = walk.libraries[position].name
        readers.append(Reader(item, walk.name(item), layout, owner, meta))
    name = readers[max(whole, 0)].path
    return Storage(name, library, seen.shape, seen.dtype, order, whole, tuple(readers))


def _window(walk: Walk, cluster: Cluster) -> tuple[Any, Library, int]:
    """Returns the span of a tie that no member covers, as an array, its library and its start."""
    members, (low, high) = cluster.members, cluster.extent
    name = walk.libraries[members[0]].name
    arrays = [walk.objects[walk.leaves[i]] for i in members if walk.libraries[i].name == name]
    library = load(name)
    owner = library.owner(arrays)
    units = {g.itemsize for g in cluster.geometries}
    if len(units) > 1:
        low, high = library.widened(owner, low, high, max(units))
    base = library.window(owner, low, high - low)
    kind = kinds[type(base)]
    assert isinstance(kind, Library)
    return base, kind, low


def representative(walk: Walk, cluster: Cluster) -> int:
    """Returns which member covers the span densely; C-ordered first, then in walk order."""
    low, high = cluster.extent
    best: tuple[bool, int, int] | None = None
    chosen = -1
    for i, (position, g) in enumerate(zip(cluster.members, cluster.geometries, strict=True)):
        if math.prod(g.shape) * g.itemsize != high - low or g.conj or g.neg:
            continue
        if cluster.dense[i]:
            key = (False, -g.itemsize, i)
            if best is None or key < best:
                best, chosen = key, i
            continue
        upward = all(s > 0 for s, n in zip(g.strides, g.shape, strict=True) if n > 1)
        if not upward or walk.libraries[position].name == "lazy" or repeats_elements(g):
            continue
        ordered = _order(g) == tuple(range(len(g.shape)))
        key = (not ordered, -g.itemsize, i)
        if best is None or key < best:
            best, chosen = key, i
    return chosen


def _order(g: Geometry) -> tuple[int, ...]:
    """Returns the axes from the largest stride to the smallest; axes of length 1 stay in place."""
    axes = [axis for axis, length in enumerate(g.shape) if length > 1]
    placed = iter(sorted(axes, key=lambda axis: -g.strides[axis]))
    return tuple(next(placed) if n > 1 else axis for axis, n in enumerate(g.shape))


def _layout(g: Geometry, low: int, unit: int, dtype: str) -> Layout:
    """Returns what an array reads of a storage that starts at `low`."""
    offset = g.address - low
    strides = tuple(s if n > 1 else 0 for s, n in zip(g.strides, g.shape, strict=True))
    flags = (g.conj, g.neg)
    if g.dtype != dtype or offset % unit or any(stride % unit for stride in strides):
        return Layout(g.shape, strides, offset, *flags, g.dtype)
    counted = tuple(stride // unit for stride in strides)
    return Layout(g.shape, counted, offset // unit, *flags).canonical()
