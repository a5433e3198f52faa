"""How to put a model together from its leaves, and whether two models are put together alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tied._node import kinds
from tied._walk import EXTRAS, STATIC, Record, Walk, walk
from tied.arrays import Library


class Plan:
    """How to put a model together from its leaves.

    Attributes:
        records: The nodes that are built anew, children first.
        count: The number of items.
        root: The root's item; -1 for a model that holds no array.
        model: That model.
        cyclic: Whether a part contains itself.
        hung: (extras item, leaf item) pairs.
    """

    __slots__ = ("count", "cyclic", "hung", "model", "records", "root")

    def __init__(self, found: Walk, model: Any, *, everything: bool = False) -> None:
        self.count = len(found.objects)
        self.cyclic = found.cyclic
        self.hung = {extras: leaf for leaf, extras in found.extras}
        keeps: Any = b"\1" * self.count if everything else found.holders()
        if not everything:
            for record in found.records:
                if record is not None and record.node.stands_in:
                    keeps[record.item] = 1
        self.records = self._records(found, keeps)
        self.root = found.root if found.root != STATIC and keeps[found.root] else STATIC
        self.model = model if self.root == STATIC else None

    @staticmethod
    def _records(found: Walk, keeps: Any) -> list[Record]:
        records = []
        for item in found.finished:
            if not keeps[item]:
                continue
            record = found.records[item]
            assert record is not None
            left = False
            for position, child in record.holes:
                if not keeps[child]:
                    record.values[position] = found.objects[child]
                    left = True
            if left:
                record.holes = [hole for hole in record.holes if keeps[hole[1]]]
            if record.node.lazy:
                record.static = record.node.settle(record.keys, record.static)
            records.append(record)
        return records

    def build(
        self,
        items: list[Any],
        attach: Callable[[int, dict[str, Any]], None],
        *,
        plain: bool = False,
    ) -> Any:
        """Returns the model; `items` holds the new leaves and gets the new nodes.

        Args:
            items: For each item that is a leaf, the leaf; any other value for the rest.
            attach: Hangs on a new leaf (by its item) what hung on the old one.
            plain: Put arrays where arrays are computed.
        """
        if self.root == STATIC:
            return self.model
        begun = self._shells(items) if self.cyclic else frozenset()
        waiting = {r.item for r in self.records if r.item not in begun} if self.cyclic else set()
        late = []
        for record in self.records:
            item = record.item
            if waiting:
                waiting.discard(item)
                if record.node.early and any(child in waiting for _, child in record.holes):
                    if item not in begun:
                        items[item] = record.node.shell(record.cls, record.static)
                    late.append(record)
                    continue
            values = record.values.copy()
            for position, child in record.holes:
                values[position] = items[child]
            if item in begun:
                record.node.fill(items[item], record.keys, values, record.static)
                continue
            made = record.node.build(record.cls, record.keys, values, record.static)
            items[item] = made.read() if plain and record.node.derived else made
            if record.node is EXTRAS:
                attach(self.hung[item], made)
        for record in late:
            values = record.values.copy()
            for position, child in record.holes:
                values[position] = items[child]
            record.node.fill(items[record.item], record.keys, values, record.static)
        return items[self.root]

    def _shells(self, items: list[Any]) -> frozenset[int]:
        """Makes those nodes without their children that others need before their turn comes.

        All others are made with their children, which may be asked for what they hold at once;
        unless a child comes later and can't be made without its own (a tuple in a cycle): then
        they are filled last.
        """
        late = {record.item: record for record in self.records}
        needed: set[int] = set()
        for record in self.records:
            needed.update(child for _, child in record.holes if child in late)
            late.pop(record.item)
        made = [record for record in self.records if record.item in needed and record.node.early]
        for record in made:
            items[record.item] = record.node.shell(record.cls, record.static)
        return frozenset(record.item for record in made)


def attach_to(items: list[Any], leaf: int, extras: dict[str, Any]) -> None:
    """Hangs attributes, hooks and the gradient on a new leaf of the same library."""
    kind = kinds[type(items[leaf])]
    if isinstance(kind, Library):
        kind.attach(items[leaf], extras)


def same_plan(a: Plan, b: Plan) -> bool:
    if (a.count, a.root, a.hung, len(a.records)) != (b.count, b.root, b.hung, len(b.records)):
        return False
    if not same(a.model, b.model):
        return False
    return all(map(_same_record, a.records, b.records))


def _same_record(a: Record, b: Record) -> bool:
    return (
        a.item == b.item
        and (a.cls is b.cls or a.node.portable(a.cls) == b.node.portable(b.cls))
        and a.holes == b.holes
        and list(a.keys) == list(b.keys)
        and all(map(same, a.values, b.values))
        and same(a.static, b.static)
    )


def same(a: Any, b: Any) -> bool:
    """Returns whether two parts that hold no array are the same, part by part."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if kinds[type(a)] is None:
        return bool(a == b) or (a != a and b != b)
    if not _is_tree(a) and _compares(type(a)):
        return bool(a == b)
    one, other = walk(a), walk(b)
    if one.leaves or other.leaves or one.root == STATIC or other.root == STATIC:
        return False
    plans = Plan(one, a, everything=True), Plan(other, b, everything=True)
    if len(plans[0].records) != len(plans[1].records):
        return False
    return all(map(_same_record, plans[0].records, plans[1].records))


def _compares(cls: type) -> bool:
    """Returns whether a class says what equal instances are."""
    return any("__eq__" in base.__dict__ for base in cls.__mro__[:-1])


def _is_tree(x: Any) -> bool:
    return isinstance(x, (dict, list, tuple, deque))
