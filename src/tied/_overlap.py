"""Which leaves share an element.

The method is a sweep over address intervals that keeps every open one, with the exact question
(do two strided arrays meet?) left to `numpy.shares_memory`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tied._steps import ghost
from tied._walk import Walk
from tied.arrays import Geometry, Library

_END = (1 << 64, 1 << 64, -1, True)  # after every interval
MAX_WORK = 100_000  # of numpy.shares_memory; past it two arrays are taken to meet


class Cluster(NamedTuple):
    """Leaves that are tied.

    Attributes:
        members: Their positions in `walk.leaves`, in walk order.
        geometries: What each reads.
        dense: Whether each fills its range, in C order.
    """

    members: list[int]
    geometries: list[Geometry]
    dense: list[bool]

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte that is read, and one past the last."""
        extents = [g.extent for g in self.geometries]
        return min(extents)[0], max([high for _, high in extents])


def overlap(a: Geometry, b: Geometry) -> bool:
    """Returns whether two arrays of one space share an element."""
    low, high = max(a.extent[0], b.extent[0]), min(a.extent[1], b.extent[1])
    if low >= high or 0 in a.shape or 0 in b.shape:
        return False
    step = math.gcd(*a.strides, *b.strides)
    apart = (b.address - a.address) % step if step else 0
    if step and apart >= a.itemsize and apart + b.itemsize <= step:
        return False  # they interleave: columns of one matrix
    one, other = (ghost(g.address + (1 << 20), g.shape, g.strides, g.itemsize) for g in (a, b))
    try:
        meet: Any = np.shares_memory
        return bool(meet(one, other, max_work=MAX_WORK))
    except np.exceptions.TooHardError:
        return True


def repeats_elements(g: Geometry) -> bool:
    """Returns whether an array may read an element twice (broadcast, sliding windows)."""
    reach = g.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(g.strides, g.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach = stride * (length - 1) + reach
    return False


def clusters(walk: Walk) -> list[int | Cluster]:
    """Returns the storages of a walk: the position of a leaf that stands alone, or a `Cluster`."""
    spaces: dict[Hashable, list[tuple[int, int, int, bool]]] = {}
    objects, leaves = walk.objects, walk.leaves
    found: list[int | Cluster] = []
    libraries = by_library(walk)
    has_views = any(library.name == "lazy" for library in libraries)
    for library, positions in libraries.items():
        if not (library.strided or has_views):
            found.extend(positions)  # no array of such a library is a view of another
            continue
        places = library.places([objects[leaves[i]] for i in positions])
        last, known = None, []
        for position, (space, low, high, dense) in zip(positions, places, strict=True):
            if space != last:
                last, known = space, spaces.setdefault(space, [])
            known.append((low, high, position, dense))
    for known in spaces.values():
        known.sort()
        _sweep(walk, known, found, has_views)
    if any(type(one) is Cluster for one in found):
        found.sort(key=lambda one: one if isinstance(one, int) else one.members[0])
    else:
        found.sort()
    return found


def by_library(walk: Walk) -> dict[Library, Sequence[int]]:
    """Returns for each array library the positions of its leaves."""
    libraries = set(walk.libraries)
    if len(libraries) == 1:
        return {library: range(len(walk.leaves)) for library in libraries}
    return {
        library: [i for i, own in enumerate(walk.libraries) if own is library]
        for library in libraries
    }


def _geometry(walk: Walk, position: int) -> Geometry | None:
    return walk.libraries[position].geometry(walk.objects[walk.leaves[position]])


def _alone(walk: Walk, place: tuple[int, int, int, bool]) -> int | Cluster:
    low, high, position, dense = place
    lazy = walk.libraries[position].name == "lazy"
    if not lazy and (dense or low == high):
        return position
    geometry = _geometry(walk, position)
    if geometry is None or not (lazy or repeats_elements(geometry)):
        return position
    return Cluster([position], [geometry], [dense])


def _sweep(
    walk: Walk,
    places: list[tuple[int, int, int, bool]],
    found: list[int | Cluster],
    lazy: bool,
) -> None:
    """Cuts sorted intervals into runs that touch, and each run into groups that meet."""
    start, end = 0, places[0][1]
    for i, (low, high, _, _) in enumerate(itertools.chain(places[1:], [_END]), start=1):
        if low < end:
            end = max(end, high)
            continue
        if i - start > 1:
            found.extend(_groups(walk, places[start:i]))
        elif places[start][3] and not lazy:
            found.append(places[start][2])
        else:
            found.append(_alone(walk, places[start]))
        start, end = i, high


def _groups(walk: Walk, run: list[tuple[int, int, int, bool]]) -> Iterable[int | Cluster]:
    """Joins the leaves of a run that share an element."""
    geometries = [_geometry(walk, place[2]) for place in run]
    if all(place[3] for place in run):  # each fills its interval, and the intervals overlap
        yield _cluster(run, geometries, list(range(len(run))))
        return
    parent = list(range(len(run)))
    for apart in _interleaved(_distinct(geometries, parent), geometries):
        _join(run, geometries, apart, parent)
    groups: dict[int, list[int]] = {}
    for i in range(len(run)):
        groups.setdefault(_root(parent, i), []).append(i)
    for group in groups.values():
        if len(group) == 1:
            yield _alone(walk, run[group[0]])
        else:
            yield _cluster(run, geometries, group)


def _cluster(
    run: list[tuple[int, int, int, bool]], geometries: list[Geometry | None], group: list[int]
) -> Cluster:
    group.sort(key=lambda i: run[i][2])
    known = [geometry for i in group if (geometry := geometries[i]) is not None]
    return Cluster([run[i][2] for i in group], known, [run[i][3] for i in group])


def _root(parent: list[int], i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def _distinct(geometries: list[Geometry | None], parent: list[int]) -> list[int]:
    """Joins leaves that read the very same elements; returns one of each."""
    first: dict[Any, int] = {}
    for i, g in enumerate(geometries):
        key = i if g is None or 0 in g.shape else (g.address, g.shape, g.strides, g.itemsize)
        parent[i] = first.setdefault(key, i)
    return [i for i in range(len(geometries)) if parent[i] == i]


def _interleaved(chosen: list[int], geometries: list[Geometry | None]) -> Iterable[list[int]]:
    """Cuts leaves whose strides have a common divisor by where in its period they lie.

    The columns of one matrix all overlap as intervals and share nothing; asking each pair would
    take quadratic time.
    """
    known = [(i, g) for i in chosen if (g := geometries[i]) is not None]
    period = math.gcd(*(s for _, g in known for s, n in zip(g.strides, g.shape) if n > 1))  # noqa: B905
    inside = [(g.address % period, i, g.itemsize) for i, g in known] if period else []
    if len(known) < len(chosen) or any(at + size > period for at, _, size in inside) or not inside:
        yield chosen
        return
    part: list[int] = []
    end = 0
    for at, i, size in sorted(inside):
        if part and at >= end:
            yield sorted(part)
            part = []
        part.append(i)
        end = max(end, at + size)
    yield sorted(part)


def _join(
    run: list[tuple[int, int, int, bool]],
    geometries: list[Geometry | None],
    chosen: list[int],
    parent: list[int],
) -> None:
    """Sweeps over intervals in the order of their beginning and joins those that meet.

    Every open interval is kept (safetensors#309 keeps the last), but of two dense ones, which
    are joined by then, only the one that ends later: what meets the other meets it too.
    """
    opened: list[int] = []
    for i in chosen:
        low, high, _, dense = run[i]
        still = []
        absorbed = False
        for j in opened:
            if run[j][1] <= low:
                continue
            both_dense = dense and run[j][3]
            a, b = _root(parent, i), _root(parent, j)
            if a != b and _meet(geometries[i], geometries[j], both_dense):
                parent[a] = b
            longer = run[j][1] > high
            absorbed = absorbed or (both_dense and longer)
            if longer or not both_dense:
                still.append(j)
        opened = still if absorbed else [*still, i]


def _meet(a: Geometry | None, b: Geometry | None, both_dense: bool) -> bool:
    return both_dense or (a is not None and b is not None and overlap(a, b))
