"""What is tied: the report of a model's storages, the leaves that read them, and how."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tied import _unreached
from tied._layout import Layout
from tied._node import kinds
from tied._overlap import Cluster, by_library, clusters
from tied._path import Path
from tied._places import places, uses
from tied._reading import how, reading
from tied._storage import Storage, covered, representative, shared
from tied._walk import Walk, steady, walk
from tied.arrays import Library

_EXTRA_PLACES = 100_000  # listed beyond one for each leaf


@dataclass(frozen=True, slots=True)
class LeafReport:
    """A leaf that reads a storage.

    Attributes:
        path: Where it is.
        how: How it reads the storage, as a person writes it; empty for the storage's own leaf.
        layout: Which elements it reads.
    """

    path: str
    how: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class StorageReport:
    """A run of elements that one or more leaves read.

    Attributes:
        name: The path of its representative.
        shape: Its shape.
        dtype: Its dtype.
        nbytes: The bytes of the elements that are read, each once.
        device: Where it is.
        leaves: The leaves that read it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str
    leaves: tuple[LeafReport, ...]


class _Computed(NamedTuple):
    """A leaf that a lasting tie computes of a storage: where, how, and what counting it adds."""

    path: str
    how: str
    shape: tuple[int, ...]
    nbytes: int


class Ties:
    """What is tied in a model. Made by `tied.ties`; holds no array of the model.

    Attributes:
        storages: A `StorageReport` for each storage, in walk order.
        parameters: The number of elements, each storage's counted once.
        nbytes: Their bytes.
        naive_parameters: What counting every leaf says.
        naive_nbytes: Their bytes.
        hidden: The paths of objects that hide an array from the walk.
        near: Near misses: leaves of one buffer that share no element.
    """

    def __init__(self, found: Walk) -> None:
        self._groups = [
            one if isinstance(one, int) else _Tie(found, one) for one in clusters(found)
        ]
        objects = found.objects
        self._facts: list[list[Any]] = [[None] * len(found.leaves) for _ in range(4)]
        for library, positions in by_library(found).items():
            own = library.facts([objects[found.leaves[i]] for i in positions])
            for column, facts in zip(self._facts, own, strict=True):
                for position, fact in zip(positions, facts, strict=True):
                    column[position] = fact
        self.hidden = tuple(
            f"{path or 'the model'} ({type(x).__name__}) hides an array of shape "
            f"{tuple(getattr(array, 'shape', ()))}"
            for path, x, array in _unreached.arrays(found)
        )
        self.near = tuple(_near_misses(found, self._groups))
        self._computed: dict[int, list[_Computed]] = {}
        for node, position, what, source in found.computed:
            path, kind = str(found.place(node, position)), kinds[type(what.array)]
            assert isinstance(kind, Library)
            shape, nbytes = kind.shape(what.array), kind.nbytes(what.array)
            text = what.how.format(found.name(source) if source >= 0 else "outside of the model")
            self._computed.setdefault(source, []).append(_Computed(path, text, shape, nbytes))
        self._derived: dict[int, list[_Computed]] = {}
        for item, made in _derived(found):
            self._derived.setdefault(item, []).append(made)
        found.forget()
        self._walk = found

    @cached_property
    def storages(self) -> tuple[StorageReport, ...]:
        return tuple(_report(self, one) for one in self._groups)

    def _paths(self, item: int) -> list[str]:
        """Returns the paths of a leaf, the first one first."""
        first = self._walk.name(item)
        return [first, *(path for path in self._further.get(item, ()) if path != first)]

    @cached_property
    def _further(self) -> dict[int, dict[str, None]]:
        """The further places of each leaf that stands at several."""
        found = self._walk
        further: dict[int, dict[str, None]] = {}
        in_shared_part = False
        for item, node, position in found.repeats:
            if _is_derived(found, node):
                continue
            if found.records[item] is None:
                further.setdefault(item, {})[str(found.place(node, position))] = None
            else:
                in_shared_part = True
        if in_shared_part:
            for steps, item in places(found, len(found.leaves) + _EXTRA_PLACES):
                further.setdefault(item, {})[str(Path(steps))] = None
        return further

    def _made_of(self, item: int) -> list[LeafReport]:
        """Returns the leaves that lasting ties compute of a leaf."""
        computed = [*self._computed.get(item, ()), *self._derived.get(item, ())]
        return [LeafReport(c.path, c.how, Layout.whole(c.shape)) for c in computed]

    def _told(self, position: int) -> tuple[tuple[int, ...], str, int, str]:
        """Returns shape, dtype, bytes and device of a leaf."""
        return self._walk.libraries[position].told(*(column[position] for column in self._facts))

    @property
    def tied(self) -> tuple[StorageReport, ...]:
        """The storages that more than one leaf reads."""
        return tuple(storage for storage in self.storages if len(storage.leaves) > 1)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The paths of the leaves of each tie."""
        groups = []
        for one in self._groups:
            members = [one] if isinstance(one, int) else one.cluster.members
            items = [self._walk.leaves[member] for member in members]
            further = (self._further, self._computed, self._derived)
            if len(items) > 1 or any(items[0] in places for places in further):
                paths = [path for item in items for path in self._paths(item)]
                group = (*paths, *(leaf.path for item in items for leaf in self._made_of(item)))
                if len(group) > 1:
                    groups.append(group)
        return tuple(groups)

    @cached_property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

    @cached_property
    def parameters(self) -> int:
        return sum(_elements(self, one) for one in self._groups)

    @cached_property
    def _naive(self) -> tuple[int, int]:
        ways = uses(self._walk)
        elements = nbytes = 0
        for position, item in enumerate(self._walk.leaves):
            shape, _, size, _ = self._told(position)
            elements += ways[item] * math.prod(shape)
            nbytes += ways[item] * size
        for computed in itertools.chain.from_iterable(self._computed.values()):
            elements += math.prod(computed.shape)
            nbytes += computed.nbytes
        return elements, nbytes

    @property
    def naive_parameters(self) -> int:
        """The number of elements if every leaf is counted."""
        return self._naive[0]

    @property
    def naive_nbytes(self) -> int:
        """The bytes if every leaf is counted."""
        return self._naive[1]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data: strings, integers, lists and dicts, fit for JSON."""
        return {
            "version": 1,
            "storages": [_storage_dict(storage) for storage in self.storages],
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "naive_parameters": self.naive_parameters,
            "naive_nbytes": self.naive_nbytes,
            "hidden": list(self.hidden),
            "near": list(self.near),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ties) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return f"<Ties: {len(self._groups)} storages, {len(self.groups)} of them tied>"

    def _repr_html_(self) -> str:
        return _html(self)


def _is_derived(found: Walk, node: int) -> bool:
    record = found.records[node] if node >= 0 else None
    return record is not None and record.node.derived


def _derived(found: Walk) -> Iterator[tuple[int, _Computed]]:
    """Gives for each leaf that stands elsewhere what the model itself computes of it."""
    for item, node, _ in found.repeats:
        kind = kinds[type(found.objects[item])]
        if _is_derived(found, node) and isinstance(kind, Library):
            text = f"computed from {found.name(item)}"
            array = found.objects[item]
            yield item, _Computed(found.name(node), text, kind.shape(array), kind.nbytes(array))


@steady()
def ties(model: Any) -> Ties:
    """Says what is tied in a model.

    Args:
        model: Any object. It is not changed.

    Returns:
        The report: prints as a tree, compares with `==`, renders in a notebook. It is taken at
        once and holds no array, so it can be kept while the model changes.

    >>> import numpy as np, tied
    >>> W = np.ones((3, 2), "float32")
    >>> print(tied.ties({"encoder": W, "decoder": W.T}))
    encoder    (3, 2)  float32  24 B
      decoder = encoder.T
    6 parameters, 24 B (counting every leaf: 12 parameters, 48 B)
    """
    return Ties(walk(model, readings=True))


class _Tie:
    """A cluster whose storage is worked out when somebody asks, if that needs no array."""

    def __init__(self, found: Walk, cluster: Cluster) -> None:
        self.cluster = cluster
        self.found = found
        self.whole = representative(found, cluster)
        if self.whole < 0:
            self.storage = shared(found, cluster)[0]

    @cached_property
    def storage(self) -> Storage:
        return covered(self.found, self.cluster, self.whole)


def _near_misses(found: Walk, groups: Iterable[Any]) -> Iterator[str]:
    """Gives a line for each buffer that several storages lie in."""
    seen: dict[Any, list[int]] = {}
    leaves, objects = found.leaves, found.objects
    if not any(
        library.any_part([objects[leaves[i]] for i in positions])
        for library, positions in by_library(found).items()
    ):
        return
    for one in groups:
        position = one if isinstance(one, int) else one.cluster.members[0]
        item = found.leaves[position]
        buffer = found.libraries[position].buffer(found.objects[item])
        if buffer is not None:
            seen.setdefault(buffer, []).append(item)
    for items in seen.values():
        if len(items) > 1:
            names = [found.name(item) for item in items]
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            yield f"{listed}: one buffer, no shared element"


def _report(report: Ties, one: Any) -> StorageReport:
    if isinstance(one, int):
        shape, dtype, nbytes, device = report._told(one)
        first, *rest = report._paths(report._walk.leaves[one])
        whole = Layout.whole(shape)
        leaves = [LeafReport(first, "", whole), *(LeafReport(p, first, whole) for p in rest)]
        leaves += report._made_of(report._walk.leaves[one])
        return StorageReport(first, shape, dtype, nbytes, device, tuple(leaves))
    cluster, storage = one.cluster, one.storage
    device = report._told(cluster.members[max(storage.whole, 0)])[3]
    leaves = []
    for number, reader in enumerate(storage.readers):
        text = "" if number == storage.whole else how(storage, reader)
        if storage.whole < 0:
            text += _overlap(storage, number)
        first, *rest = report._paths(reader.item)
        if text and _is_derived(report._walk, report._walk.parents[reader.item]):
            text = f"computed from {text}"
        leaves.append(LeafReport(first, text, reader.layout))
        alias = text or storage.name
        leaves += [LeafReport(path, alias, reader.layout) for path in rest]
        leaves += report._made_of(reader.item)
    elements = _elements(report, one)
    nbytes = elements * (cluster.geometries[0].itemsize if storage.whole < 0 else
                         cluster.geometries[storage.whole].itemsize)  # fmt: skip
    return StorageReport(storage.name, storage.shape, storage.dtype, nbytes, device, tuple(leaves))


def _overlap(storage: Storage, number: int) -> str:
    """Returns which elements a leaf has in common with leaves before it."""
    layout = storage.readers[number].layout
    assert layout is not None
    low, high = layout.extent
    common = []
    for reader in storage.readers[:number]:
        assert reader.layout is not None
        other = reader.layout.extent
        if max(low, other[0]) < min(high, other[1]):
            common += [max(low, other[0]), min(high, other[1]) - 1]
    return f", overlaps elements {min(common)} to {max(common)}" if common else ""


def _elements(report: Ties, one: Any) -> int:
    """Returns how many elements of a storage are read, each counted once."""
    if isinstance(one, int):
        return math.prod(report._told(one)[0])
    storage: Storage = one.storage
    if storage.whole >= 0:
        return math.prod(storage.shape)
    read = np.zeros(math.prod(storage.shape), bool)
    for reader in storage.readers:
        assert reader.layout is not None
        if reader.layout.dtype is not None:
            return read.size
        read[reader.layout.index()] = True
    return int(read.sum())


def _storage_dict(storage: StorageReport) -> dict[str, Any]:
    return {
        "name": storage.name,
        "shape": list(storage.shape),
        "dtype": storage.dtype,
        "nbytes": storage.nbytes,
        "device": storage.device,
        "leaves": [
            {
                "path": leaf.path,
                "how": leaf.how,
                "shape": list(leaf.layout.shape),
                "strides": list(leaf.layout.strides),
                "offset": leaf.layout.offset,
            }
            for leaf in storage.leaves
        ],
    }


def said_bytes(nbytes: int) -> str:
    """Returns a number of bytes as a person reads it: "24 B", "1.50 MiB"."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{nbytes} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    raise AssertionError


def _row(storage: StorageReport) -> tuple[str, str, str, str]:
    shape = str(storage.shape)
    return storage.name or "(the model)", shape, storage.dtype, said_bytes(storage.nbytes)


def _lines(report: Ties) -> Iterator[str]:
    rows = [_row(storage) for storage in report.storages]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    places = {storage.device for storage in report.storages}
    for storage, row in zip(report.storages, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
        device = f"  {storage.device}" if len(places) > 1 else ""
        yield f"{cells[0]}    {cells[1]}  {cells[2]}  {row[3]}{device}".rstrip()
        yield from (f"  {reading(leaf.path, leaf.how)}" for leaf in storage.leaves if leaf.how)
    yield _total(report)
    yield from (f"hidden: {text}" for text in report.hidden)
    yield from (f"not tied: {text}" for text in report.near)


def _total(report: Ties) -> str:
    total = f"{report.parameters:,} parameters, {said_bytes(report.nbytes)}"
    if report.naive_parameters == report.parameters:
        return total
    naive = f"{report.naive_parameters:,} parameters, {said_bytes(report.naive_nbytes)}"
    return f"{total} (counting every leaf: {naive})"


def _html(report: Ties) -> str:
    import html  # a large table of entities

    body = []
    for storage in report.storages:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(storage))
        body.append(f"<tr>{cells}</tr>")
        for leaf in storage.leaves:
            if leaf.how:
                text = html.escape(reading(leaf.path, leaf.how))
                body.append(
                    f'<tr><td colspan="4" style="text-align:left;padding-left:2em">{text}</td></tr>'
                )
    head = "<tr><th>storage</th><th>shape</th><th>dtype</th><th>bytes</th></tr>"
    notes = [_total(report)]
    notes += [f"hidden: {text}" for text in report.hidden]
    notes += [f"not tied: {text}" for text in report.near]
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>{said}"
