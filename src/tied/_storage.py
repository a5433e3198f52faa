"""From leaves to storages: which leaves share an element, and what each of them reads.

The method is a sweep over address intervals that keeps every open one, with the exact question
(do two strided arrays meet?) left to `numpy.shares_memory`.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tied._errors import TiedError, TieError
from tied._layout import Layout
from tied._node import kinds
from tied._steps import ghost
from tied._walk import Walk
from tied.arrays import Geometry, Library, load

_END = (1 << 64, 1 << 64, -1, True)  # after every interval
MAX_WORK = 100_000  # of numpy.shares_memory; past it two arrays are taken to meet


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
    def plain(self) -> bool:
        """Whether one leaf reads it, as it is."""
        return len(self.readers) == 1 and self.whole == 0


class Cluster(NamedTuple):
    """Leaves that are tied, by their positions in `walk.leaves`, and what each reads."""

    members: list[int]
    geometries: list[Geometry]

    @property
    def extent(self) -> tuple[int, int]:
        """The first unit that is read, and one past the last."""
        extents = [g.extent for g in self.geometries]
        return min(low for low, _ in extents), max(high for _, high in extents)


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
    objects = walk.objects
    arrays = [objects[item] for item in walk.leaves]
    found: list[int | Cluster] = []
    libraries = set(walk.libraries)
    has_views = any(library.name == "lazy" for library in libraries)
    for library in libraries:
        if len(libraries) == 1:
            positions: Sequence[int] = range(len(arrays))
            own = arrays
        else:
            positions = [i for i, one in enumerate(walk.libraries) if one is library]
            own = [arrays[i] for i in positions]
        if not (library.strided or has_views):
            found.extend(positions)  # no array of such a library is a view of another
            continue
        places = library.places(own)
        for position, (space, low, high, dense) in zip(positions, places, strict=True):
            known = spaces.get(space)
            if known is None:
                known = spaces[space] = []
            known.append((low, high, position, dense))
    for known in spaces.values():
        known.sort()
        _sweep(walk, known, found, has_views)
    found.sort(key=lambda one: one if isinstance(one, int) else one.members[0])
    return found


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
    return Cluster([position], [geometry])


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
        pairs = zip([place[2] for place in run], geometries, strict=True)
        known_pairs = sorted((i, g) for i, g in pairs if g is not None)
        yield Cluster([i for i, _ in known_pairs], [g for _, g in known_pairs])
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
            group.sort(key=lambda i: run[i][2])
            known = [geometry for i in group if (geometry := geometries[i]) is not None]
            yield Cluster([run[i][2] for i in group], known)


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


def storages(walk: Walk) -> list[tuple[Storage, Any]]:
    """Returns each storage of a walk and its array (shared, not copied)."""
    return [
        single(walk, one) if isinstance(one, int) else shared(walk, one) for one in clusters(walk)
    ]


def single(walk: Walk, position: int) -> tuple[Storage, Any]:
    """Returns the storage of a leaf that stands alone, and its array."""
    item, library = walk.leaves[position], walk.libraries[position]
    array = walk.objects[item]
    name = walk.name(item)
    reader = Reader(item, name, None, library.name, library.meta(array))
    shape, dtype = library.shape(array), library.dtype(array)
    return Storage(name, library.name, shape, dtype, (), 0, (reader,)), array


def shared(walk: Walk, cluster: Cluster) -> tuple[Storage, Any]:
    """Returns the storage of a cluster, and its array."""
    whole = representative(walk, cluster)
    objects, leaves = walk.objects, walk.leaves
    metas = [walk.libraries[i].meta(objects[leaves[i]]) for i in cluster.members]
    if whole >= 0:
        return covered(walk, cluster, whole, metas), objects[leaves[cluster.members[whole]]]
    low, high = cluster.extent
    base, library = _window(walk, cluster.members, low, high)
    seen = library.geometry(base)
    assert seen is not None
    order = tuple(range(len(seen.shape)))
    return _outline(walk, cluster, whole, seen, library.name, order, metas), base


def covered(
    walk: Walk, cluster: Cluster, whole: int, metas: Sequence[Any] | None = None
) -> Storage:
    """Returns the storage of a cluster whose member `whole` covers it; looks at no array."""
    seen, library = cluster.geometries[whole], walk.libraries[cluster.members[whole]]
    return _outline(walk, cluster, whole, seen, library.name, _order(seen), metas)


def _outline(
    walk: Walk,
    cluster: Cluster,
    whole: int,
    seen: Geometry,
    library: str,
    order: tuple[int, ...],
    metas: Sequence[Any] | None,
) -> Storage:
    low = cluster.extent[0]
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


def _window(walk: Walk, members: list[int], low: int, high: int) -> tuple[Any, Library]:
    """Returns the span of a tie that no member covers, as an array, and its library."""
    name = walk.libraries[members[0]].name
    arrays = [walk.objects[walk.leaves[i]] for i in members if walk.libraries[i].name == name]
    library = load(name)
    base = library.window(library.owner(arrays), low, high - low)
    kind = kinds[type(base)]
    assert isinstance(kind, Library)
    return base, kind


def representative(walk: Walk, cluster: Cluster) -> int:
    """Returns which member covers the span densely; C-ordered first, then in walk order."""
    low, high = cluster.extent
    best, chosen = None, -1
    for i, (position, g) in enumerate(zip(cluster.members, cluster.geometries, strict=True)):
        if math.prod(g.shape) * g.itemsize != high - low or g.conj or g.neg:
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


def spread(storage: Storage, result: Any) -> list[tuple[int, Any]]:
    """Returns (item, new leaf) for each reader of a storage, given what became of the storage.

    Raises:
        TieError: The result can't be read as the storage was; the error names both paths.
    """
    if isinstance(result, np.generic) and storage.library == "numpy":
        result = np.asarray(result)  # NumPy's functions make scalars of 0-d arrays
    library = kinds[type(result)]
    if storage.plain:
        reader = storage.readers[0]
        if isinstance(library, Library) and library.name == reader.library:
            return [(reader.item, library.dress(result, reader.meta))]
        return [(reader.item, result)]
    _fits(storage, result, library)
    assert isinstance(library, Library)
    flat, shared = library.flat(result, storage.order)
    leaves = []
    own = None
    tracked = library.tracked(
        result, [r.meta for r in storage.readers if r.library == library.name]
    )
    order = sorted(range(len(storage.readers)), key=lambda i: i != storage.whole)
    for i in order:  # the storage's own leaf first
        reader = storage.readers[i]
        assert reader.layout is not None
        meta = reader.meta if reader.library == library.name else None
        if i == storage.whole and shared:
            leaf = library.dress(result, meta)
        else:
            source = flat
            if own is not None and meta is not None and library.follows(meta):
                source, _ = library.flat(own, storage.order)
            leaf = library.read(source, storage.base_shape, reader.layout, meta, tracked)
        own = leaf if i == storage.whole else own
        if reader.library not in (library.name, "lazy") and library.name == storage.library:
            leaf = _translated(leaf, library, reader)
        leaves.append((reader.item, leaf))
    return leaves


def _fits(storage: Storage, result: Any, library: Any) -> None:
    """Raises unless a result can be read as its storage was."""
    if not isinstance(library, Library) or library.name in ("opaque", "lazy"):
        kind = "None" if result is None else type(result).__name__
        what = f"{kind}, not an array"
        raise _unfit(storage, "replace a storage that is read as a view", what, "an array")
    shape = library.shape(result)
    if shape != storage.shape:
        change = f"{storage.shape} -> {shape}"
        raise _unfit(
            storage,
            "change the shape of a storage that is read as a view",
            change,
            f"an array of shape {storage.shape}",
        )
    dtype = library.dtype(result)
    bits = [r for r in storage.readers if r.layout is not None and r.layout.dtype is not None]
    if bits and dtype != storage.dtype:
        change = f"{storage.dtype} -> {dtype}"
        raise _unfit(
            storage,
            "change the dtype of a storage whose bits are read as another dtype",
            change,
            f"an array of dtype {storage.dtype}",
            bits[0],
        )


def _unfit(
    storage: Storage, what: str, change: str, wanted: str, reader: Reader | None = None
) -> TieError:
    others = [r for i, r in enumerate(storage.readers) if i != storage.whole]
    reader = reader or others[0]
    shown = [reader] if storage.whole >= 0 else others[:8]
    return TieError(
        f"map cannot {what}",
        facts=[
            ("storage", f"{storage.name or 'the model'}   {change}"),
            *(("view", reading(r.path, how(storage, r))) for r in shown),
        ],
        hint=f"Return {wanted}, or give {reader.path} memory of its own first (a copy)",
        paths=[storage.name, *(r.path for r in storage.readers if r.path != storage.name)],
    )


def located(error: TiedError, storage: Storage) -> TiedError:
    """Returns an error that names the leaves of the storage at which it happened."""
    if error.paths:
        return error
    facts = [("storage", storage.name or "the model"), *error.facts]
    facts += [("leaf", reading(r.path, how(storage, r))) for r in _viewers(storage)]
    paths = [storage.name, *(r.path for r in _viewers(storage))]
    return type(error)(error.message, facts=facts, hint=error.hint, paths=paths)


def _viewers(storage: Storage) -> list[Reader]:
    """Returns the readers that are not the storage itself."""
    return [r for i, r in enumerate(storage.readers) if i != storage.whole and r.layout is not None]


def how(storage: Storage, reader: Reader) -> str:
    """Returns how a leaf reads its storage, as a person writes it: `encoder.weight.T`."""
    if reader.layout is None:
        return storage.name
    name, shape = storage.name, storage.base_shape
    if storage.whole < 0:
        if len(shape) == 1 and _is_run(reader.layout):
            low, high = reader.layout.extent
            return f"elements {low} to {high - 1}"
        name = "span" if len(shape) == 1 else "base"
    elif storage.order != tuple(range(len(storage.order))):
        own = storage.readers[storage.whole].layout
        if reader.layout == own:
            return name
        if len(storage.order) == 2:
            name += ".T"
        else:
            name += f".transpose{storage.order}"
        if reader.layout.is_whole(shape):
            return name
    layout = reader.layout
    if layout.dtype is not None and storage.dtype[:1] in "[{":
        return _field(storage, layout, name)
    return layout.describe(shape, name, base_dtype=storage.dtype)


def reading(path: str, text: str) -> str:
    """Returns a leaf and how it reads: `dec = enc.T`, `a reads elements 0 to 59`."""
    return f"{path} {'reads' if text.startswith(_SPANS) else '='} {text}"


_SPANS = ("elements ", "span", "base")


def _is_run(layout: Layout) -> bool:
    """Returns whether a leaf reads neighbouring elements in their order, as they are."""
    plain = layout.dtype is None and not (layout.conj or layout.neg) and 0 not in layout.shape
    return plain and layout.strides == Layout.whole(layout.shape).strides


def _field(storage: Storage, layout: Layout, name: str) -> str:
    """Returns how a leaf reads a field of structured elements: `records['x']`."""
    record = np.dtype(ast.literal_eval(storage.dtype))
    for field, (dtype, offset, *_) in (record.fields or {}).items():
        start, inside = divmod(layout.offset, record.itemsize)
        whole = all(stride % record.itemsize == 0 for stride in layout.strides)
        if whole and (str(dtype), offset) == (layout.dtype, inside):
            strides = tuple(stride // record.itemsize for stride in layout.strides)
            inner = Layout(layout.shape, strides, start).canonical()
            return inner.describe(storage.base_shape, f"{name}[{field!r}]")
    return f"{name}, bits as {layout.dtype}"


def _translated(leaf: Any, library: Library, reader: Reader) -> Any:
    """Returns a leaf of one library as an array of another over the same memory."""
    other = load(reader.library)
    made = other.alias(library.to_numpy(leaf)) if library.device(leaf) == "cpu" else None
    if made is None:
        raise TieError(
            f"a tie across {library.name} and {reader.library} can't be kept here",
            hint=f'Move the model into one library first: tied.to(model, "{library.name}")',
        )
    return other.dress(made, reader.meta)
