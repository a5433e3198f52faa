"""The search for arrays that are readings of others: by samples, then sums, then bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from tied._files.contents import Stored
from tied._files.samples import Order, Run, lead, level, orders, runs, turned_back
from tied._files.values import alike, constant, elements, same, seen, total
from tied._layout import Layout
from tied._steps import Ints, c_strides


class Item:
    """An array that may be a reading of another one, or the other way round.

    Attributes:
        stored: Where it is.
        shape: Its shape; of elements that are no whole bytes, the number of bytes.
        size: Its number of elements.
        of: The item that it is a reading of; itself, as long as it is of none.
        layout: How it reads that.
        kept: Whether another one is a reading of it.
        total: The sum of its elements; None until it is asked for.
        sums: Those of the starts of its runs, by their lengths.
    """

    __slots__ = ("kept", "layout", "of", "shape", "size", "stored", "sums", "total")

    def __init__(self, stored: Stored, shape: Ints) -> None:
        self.stored, self.shape, self.size = stored, shape, math.prod(shape)
        self.of, self.layout, self.kept = self, Layout.whole(shape), False
        self.total: int | None = None
        self.sums: dict[Run, dict[int, int]] = {}

    def may_be(self, other: Item) -> bool:
        """Returns whether the sums of two items, as far as they are known, are the same."""
        return self.total is None or other.total is None or self.total == other.total


class _Match(NamedTuple):
    """A reading of an item that another one may be.

    Attributes:
        of: The item.
        layout: The reading; None if strides can't say it.
        back: How the item would read the other one, if it may be that way round.
        run: The run of the item whose start is read; None if all of it is.
        length: How much of the run.
    """

    of: Item
    layout: Layout
    swaps: bool = False
    run: Run | None = None
    length: int = 0


class Search:
    """The search among arrays of one dtype, which are given from the largest to the smallest."""

    def __init__(self, items: list[Item]) -> None:
        self.sizes = Counter(item.size for item in items)
        self.lengths: dict[Ints, set[int]] = {}
        for item in items:
            for run in runs(item.shape):
                self.lengths.setdefault(run.rest, set()).add(run.length)
        # For each level its shortest length: says which starts can be those of a shorter array.
        self.levels = {
            rest: {level(n): n for n in sorted(lengths, reverse=True)}
            for rest, lengths in self.lengths.items()
        }
        self.longest = {rest: max(lengths) for rest, lengths in self.lengths.items()}
        self.flat: dict[tuple[int, bytes], list[Item]] = {}
        self.turned: dict[tuple[int, bytes], list[tuple[Item, Order]]] = {}
        self.starts: dict[tuple[Ints, int, bytes], list[tuple[Item, Run]]] = {}

    def take(self, item: Item) -> None:
        """Finds what an item is a reading of, and remembers it for those that come after it."""
        ways = orders(item.shape) if self.sizes[item.size] > 1 else ()
        whole, heads = self._whole(item), self._heads(item)
        if not ways and not whole and not heads:
            return
        x = elements(item.stored)
        samples = [(way, (item.size, x[way.positions].tobytes())) for way in ways]
        starts = {
            (run, some): (run.rest, some, x[lead(run, some)].tobytes())
            for run, some in (*whole, *heads)
        }
        if constant(x):
            return
        self._find(item, x, chain(self._alike(item, samples), self._longer(item, whole, starts)))
        for n, (way, key) in enumerate(samples):
            if n == 0:
                self.flat.setdefault(key, []).append(item)
            else:
                self.turned.setdefault(key, []).append((item, way))
        for head in heads:
            self.starts.setdefault(starts[head], []).append((item, head[0]))

    def _whole(self, item: Item) -> list[tuple[Run, int]]:
        """Returns the runs of an item that may be the start of a longer one, and their levels."""
        return [
            (run, level(run.length))
            for run in runs(item.shape)
            if self.longest[run.rest] > run.length
        ]

    def _heads(self, item: Item) -> list[tuple[Run, int]]:
        """Returns the runs of an item that may start with a shorter one, at each level of those."""
        return [
            (run, some)
            for run in runs(item.shape)
            for some, shortest in self.levels[run.rest].items()
            if shortest < run.length
        ]

    def _alike(self, item: Item, samples: list[tuple[Order, Any]]) -> Iterator[_Match]:
        """Gives the items of the same size that an item may be a reading of."""
        for way, key in samples:
            for other in filter(item.may_be, self.flat.get(key, ())):
                yield _Match(other, turned_back(item.shape, way.axes))
        # A transpose that is flat is no view; but what it is the transpose of is one of it.
        for _, key in samples[:1]:
            for other, way in self.turned.get(key, ()):
                if item.may_be(other):
                    yield _Match(other, turned_back(other.shape, way.axes), swaps=True)

    def _longer(self, item: Item, whole: list[Any], starts: dict[Any, Any]) -> Iterator[_Match]:
        """Gives the items whose start an item may be."""
        for run, some in whole:
            for other, longer in self.starts.get(starts[run, some], ()):
                if longer.length > run.length:
                    strides = c_strides(other.shape)
                    strides = strides if longer.axis == run.axis else strides[::-1]
                    layout = Layout(item.shape, strides).canonical()
                    yield _Match(other, layout, False, longer, run.length)

    def _find(self, item: Item, x: Any, matches: Iterable[_Match]) -> None:
        """Makes an item a reading of the first match that holds."""
        failed = False
        for match in matches:
            other = match.of
            # A second comparison of whole arrays has to be worth it: where many samples are
            # alike, as in sparse arrays, the sums are different.
            if failed and _total(item, x) != self._sum(match):
                continue
            layout = match.layout if match.swaps else other.layout.then(match.layout)
            if layout is None or (match.swaps and not _is_free(other)):
                continue
            failed = not _holds(x, match)
            if failed:
                continue
            if match.swaps:
                other.of, other.layout, item.kept = item, layout, True
            else:
                item.of, item.layout, other.of.kept = other.of, layout, True
            return

    def _sum(self, match: _Match) -> int:
        """Returns the sum of the elements that a match reads; makes those of all starts at once."""
        item, run = match.of, match.run
        if run is None:
            return _total(item)
        if run not in item.sums:
            x = elements(item.stored).reshape(item.shape).swapaxes(0, run.axis)
            sums, at, so_far = item.sums.setdefault(run, {}), 0, 0
            for stop in sorted(n for n in self.lengths[run.rest] if n < run.length):
                so_far = (so_far + total(x[at:stop])) % (1 << 64)
                sums[stop], at = so_far, stop
        return item.sums[run][match.length]


def _total(item: Item, x: Any = None) -> int:
    if item.total is None:
        item.total = total(elements(item.stored) if x is None else x)
    return item.total


def _is_free(item: Item) -> bool:
    """Returns whether an item may still become a reading of another one."""
    return item.of is item and not item.kept


def _holds(x: Any, match: _Match) -> bool:
    """Returns whether the elements of a match are those of an array, bit for bit."""
    y, layout = elements(match.of.stored), match.layout
    if match.swaps:
        return same(y.reshape(match.of.shape), seen(x, layout))
    if layout.strides == Layout.whole(layout.shape).canonical().strides:
        return alike(x, y[: x.size])
    return same(x.reshape(layout.shape), seen(y, layout))
