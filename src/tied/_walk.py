"""The one traversal: a model taken apart into nodes and leaves, each object once.

The walk is iterative, so depth does not matter, and remembers objects by identity, so shared parts
are met once and cycles end. Nodes and leaves are *items*, numbered in walk order; paths are worked
out from an item's parent when somebody asks.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tied import arrays
from tied._node import Closed, Lasting, Node, kinds
from tied._path import Path, Step
from tied.arrays import Library
from tied.nodes.containers import OBJECT_ARRAY

STATIC = -1
_INSIDE = Step("inside", "")
_RECURSE = 50  # nodes less deep are gone through by recursion, which is quicker
_SHORT = 200  # the names of a chain 100,000 deep would take gigabytes


class Extras:
    """What hangs on a leaf, as a part of the model: attributes of a parameter, its gradient."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


class ExtrasNode(Node):
    """See `Extras`; put back as a dict, which the leaf's library hangs on the new leaf."""

    stands_in = True

    def open(self, x: Any) -> Any:
        return tuple(x.values), list(x.values.values()), None

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return dict(zip(keys, values, strict=True))


EXTRAS = ExtrasNode()
OPAQUE = arrays.load("opaque")


class Record:
    """A node of the walk.

    Attributes:
        item: Its number.
        node: How it comes apart.
        cls: Its type.
        keys: The keys of its children.
        values: Its children; those that are items are blanked.
        holes: Which positions of `values` are items, and which.
        static: What else it needs to be put back.
    """

    __slots__ = ("cls", "holes", "item", "keys", "node", "static", "values")

    def __init__(
        self, item: int, node: Node, cls: type, keys: Any, values: list[Any], static: Any
    ) -> None:
        self.item = item
        self.node = node
        self.cls = cls
        self.keys = keys
        self.values = values
        self.holes: list[tuple[int, int]] = []
        self.static = static


class Walk:
    """A model taken apart. Holds every object it met, so that no `id` is reused.

    Attributes:
        objects: The items: for a leaf its array, for a node the object.
        parents: For each item the node that it was first met in; -1 for the root.
        positions: For each item the position in that node.
        records: For each item its `Record`; None for leaves.
        finished: The nodes, children before parents (back to front only in cycles).
        leaves: The items that are leaves, in walk order.
        libraries: The library of each leaf.
        repeats: (item, node, position) for each further place of an item.
        closed: (node, position, object) for each thing that nothing opened.
        extras: (leaf, extras item) for each leaf that something hangs on.
        computed: (node, position, reading, item of its source) for each lasting tie that computes.
        cyclic: Whether a part contains itself.
        root: The root's item, or -1 if there is nothing to see in the model.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.parents: list[int] = []
        self.positions: list[int] = []
        self.records: list[Record | None] = []
        self.finished: list[int] = []
        self.leaves: list[int] = []
        self.libraries: list[Library] = []
        self.repeats: list[tuple[int, int, int]] = []
        self.closed: list[tuple[int, int, Any]] = []
        self.extras: list[tuple[int, int]] = []
        self.computed: list[tuple[int, int, Lasting, int]] = []
        self.cyclic = False
        self.root = STATIC
        self._names: dict[int, str | None] = {-1: None}

    def forget(self) -> None:
        """Lets go of the model; names and places can still be told."""
        self.objects, self.closed, self.computed = [], [], []
        for record in self.records:
            if record is not None:
                record.values, record.static = [], None

    def step(self, node: int, position: int) -> Step:
        """Returns the step from a node to the child at `position`."""
        record = self.records[node] if node >= 0 else None
        if record is None:  # the root, or the extras of a leaf
            return _INSIDE
        key = record.keys[position]
        return key if type(key) is Step else Step(record.node.step, key)

    def path(self, item: int) -> Path:
        """Returns the path at which an item was first met."""
        steps = []
        while item != self.root:
            node = self.parents[item]
            steps.append(self.step(node, self.positions[item]))
            item = node
        return Path(tuple(reversed(steps)))

    def place(self, node: int, position: int) -> Path:
        """Returns the path of a child of a node."""
        if node < 0:
            return Path()
        return Path((*self.path(node).steps, self.step(node, position)))

    def name(self, item: int) -> str:
        """Returns `str(path(item))`; short names of nodes are remembered."""
        names, node = self._names, self.parents[item]
        record = self.records[node] if node in names and node >= 0 else None
        if record is not None:
            key = record.keys[self.positions[item]]
            if type(key) is str or type(key) is int:  # what nearly all keys are
                above = names[node]
                found = f"{key}" if above is None else f"{above}.{key}"
                if self.records[item] is not None and len(found) < _SHORT:
                    names[item] = found
                return found
        return self._name(item)

    def _name(self, item: int) -> str:
        names, parents = self._names, self.parents
        below: list[int] = []
        while item not in names:
            below.append(item)
            item = parents[item]
        found = names[item]
        for item in reversed(below):
            step = self.step(parents[item], self.positions[item])
            if step.named:
                name = step.name()
                found = name if found is None else f"{found}.{name}"
            if self.records[item] is not None and len(found or "") < _SHORT:
                names[item] = found
        return found or ""

    def holders(self) -> bytearray:
        """Returns for each item whether it is a leaf or holds one."""
        holds = bytearray(len(self.objects))
        for item in self.leaves:
            holds[item] = 1
        if not self.cyclic:
            for item in self.finished:
                record = self.records[item]
                assert record is not None
                for _, child in record.holes:
                    if holds[child]:
                        holds[item] = 1
                        break
            return holds
        return self._spread(holds)

    def _spread(self, holds: bytearray) -> bytearray:
        above: list[list[int]] = [[] for _ in self.objects]
        for item in self.finished:
            record = self.records[item]
            assert record is not None
            for _, child in record.holes:
                above[child].append(item)
        queue = list(self.leaves)
        while queue:
            for item in above[queue.pop()]:
                if not holds[item]:
                    holds[item] = 1
                    queue.append(item)
        return holds


@contextmanager
def steady() -> Iterator[None]:
    """Pauses the cyclic garbage collector.

    A walk makes very many small objects that all stay alive; the collector would go through them,
    and through the whole model, again and again.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def walk(
    model: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    extras: bool = False,
    grads: bool = False,
    readings: bool = False,
) -> Walk:
    """Takes a model apart.

    Args:
        model: Any object.
        is_leaf: Says of a part that it is a leaf though it is no array.
        extras: Also walk what hangs on leaves (attributes of parameters, hooks).
        grads: With `extras`, also the gradients that PyTorch keeps on tensors.
        readings: Also give as leaves what lasting ties compute; such a walk is only looked at.

    Returns:
        The walk. The model is not changed, and the walk shares its arrays.
    """
    with steady():
        walker = _Walker(is_leaf, extras=extras, grads=grads)
        found = walker.run(model)
        if readings:
            walker.follow_readings()
        return found


class _Walker:
    """The loop of `walk`, with its memo."""

    def __init__(self, is_leaf: Callable[[Any], bool] | None, *, extras: bool, grads: bool) -> None:
        self.out = Walk()
        self.memo: dict[int, int] = {}
        self.is_leaf = is_leaf
        self.extras = extras
        self.grads = grads
        self.stack: list[tuple[Record, Iterator[tuple[int, Any]]]] = []
        self.entered: set[int] = set()
        self.back: list[Record] = []
        self.derived: list[Record] = []
        out = self.out
        self.lists = (
            out.objects.append,
            out.parents.append,
            out.positions.append,
            out.records.append,
            out.leaves.append,
            out.libraries.append,
        )

    def run(self, model: Any) -> Walk:
        out = self.out
        top = Record(-1, EXTRAS, tuple, (0,), [model], None)
        self.stack.append((top, enumerate(top.values)))
        self.go_down(0)
        out.finished.pop()  # the one above the root
        out.root = top.holes[0][1] if top.holes else STATIC
        self.follow_derived()
        self.follow_back()
        return out

    def go_down(self, depth: int) -> None:
        """Goes through the nodes that have been entered, until only `depth` are left."""
        stack = self.stack
        while len(stack) > depth:
            record, children = stack[-1]
            if self.expand(record, children):
                stack.pop()
                self.entered.discard(record.item)
                self.out.finished.append(record.item)

    def follow_derived(self) -> None:
        """Goes into what is computed, which was left for the end."""
        if not self.derived:
            return
        for record in self.derived:  # grows as it is gone through
            self.entered.add(record.item)
            self.stack.append((record, enumerate(record.values)))
            self.go_down(0)
        self.out.finished = _children_first(self.out)

    def follow_back(self) -> None:
        """Ties references to the items that they refer to, if the walk has met those."""
        for record in self.back:
            seen = [self.memo.get(id(x), STATIC) for x in record.node.referents(record.static)]
            if any(item != STATIC for item in seen):
                record.values = [None] * len(seen)
                record.holes = [(n, item) for n, item in enumerate(seen) if item != STATIC]
                record.static = record.node.unbound(record.static)
                self.out.cyclic = True
        self.out.finished[:0] = [record.item for record in self.back]

    def follow_readings(self) -> None:
        """Adds what lasting ties compute, behind all other leaves, so that no name changes."""
        out = self.out
        for record in [r for r in out.records if r is not None and r.node.lasting]:
            keys, start = list(record.keys), len(record.values)
            for reading in record.node.readings(out.objects[record.item]):
                if reading.how:
                    source = self.memo.get(id(reading.source), STATIC)
                    out.computed.append((record.item, len(keys), reading, source))
                keys.append(reading.key)
                record.values.append(None if reading.how else reading.array)
            if len(keys) > start:
                record.keys = keys
                self.expand(record, itertools.islice(enumerate(record.values), start, None))

    def expand(self, record: Record, children: Iterator[tuple[int, Any]]) -> bool:
        """Goes through the children of a node; False if one must be gone into first (deep down)."""
        memo, table, is_leaf, stack = self.memo, kinds, self.is_leaf, self.stack
        item, values, holes, objects = record.item, record.values, record.holes, self.out.objects
        to_objects, to_parents, to_positions, to_records, to_leaves, to_libraries = self.lists
        depth = len(stack)
        for position, value in children:
            kind = table[type(value)]
            if is_leaf is not None and is_leaf(value):
                kind = kind if isinstance(kind, Library) else OPAQUE
            if kind is None:
                continue
            seen = memo.get(id(value))
            if seen is None:
                if kind.leaf and not (kind.may_hold_objects and kind.holds_objects(value)):  # type: ignore[union-attr]
                    seen = memo[id(value)] = len(objects)
                    to_objects(value)
                    to_parents(item)
                    to_positions(position)
                    to_records(None)
                    to_leaves(seen)
                    to_libraries(kind)  # type: ignore[arg-type]
                    if self.extras and kind.may_hang:  # type: ignore[union-attr]
                        self.hang(value, kind, seen)
                else:
                    seen = self.node(value, kind, item, position)
            elif seen != STATIC:
                self.out.repeats.append((seen, item, position))
                self.out.cyclic = self.out.cyclic or seen in self.entered
            if seen != STATIC:
                values[position] = None
                holes.append((position, seen))
            if len(stack) != depth:
                if depth > _RECURSE:
                    return False
                self.go_down(depth)
        return True

    def node(self, value: Any, kind: Any, parent: int, position: int) -> int:
        """Makes an item of a node and goes into it; -1 if there is nothing to see in it."""
        node: Node = OBJECT_ARRAY if kind.leaf else kind
        try:
            opened = node.open(value)
        except Closed:
            self.out.closed.append((parent, position, value))
            opened = None
        if opened is None:
            self.memo[id(value)] = STATIC
            return STATIC
        item = self.memo[id(value)] = self.enter(value, node, opened, parent, position)
        return item

    def enter(self, value: Any, node: Node, opened: Any, parent: int, position: int) -> int:
        to_objects, to_parents, to_positions, to_records, _, _ = self.lists
        item = len(self.out.objects)
        keys, values, static = opened
        record = Record(item, node, type(value), keys, values, static)
        to_objects(value)
        to_parents(parent)
        to_positions(position)
        to_records(record)
        if node.back or node.derived:
            (self.back if node.back else self.derived).append(record)
            return item
        self.entered.add(item)
        self.stack.append((record, enumerate(values)))
        return item

    def hang(self, value: Any, library: Any, leaf: int) -> None:
        """Goes into what hangs on a leaf."""
        found = library.extras(value, grads=self.grads)
        if found is not None:
            opened = tuple(found), list(found.values()), None
            self.out.extras.append((leaf, self.enter(Extras(found), EXTRAS, opened, leaf, 0)))


def _children_first(found: Walk) -> list[int]:
    """Returns the nodes of a walk, each behind its children."""
    below = {
        item: [child for _, child in record.holes if found.records[child] is not None]
        for item in found.finished
        if (record := found.records[item]) is not None
    }
    ordered: list[int] = []
    seen: set[int] = set()
    for first in found.finished:
        stack = [(first, iter(below[first]))] if first not in seen else []
        seen.add(first)
        while stack:
            item, children = stack[-1]
            child = next((c for c in children if c not in seen and c in below), None)
            if child is None:
                ordered.append(item)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(below[child])))
    return ordered
