"""Every place at which a leaf stands, not only the first: shared layers, repeated arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tied._path import Step
from tied._walk import Walk


def places(
    walk: Walk, limit: int | None = None, *, derived: bool = False
) -> Iterator[tuple[tuple[Step, ...], int]]:
    """Gives (steps, leaf item) for each way from the root to a leaf; a cycle is gone round once.

    Args:
        walk: The walk.
        limit: Give at most so many; shared parts inside shared parts multiply.
        derived: Also give the ways through what is computed of leaves.
    """
    if walk.root < 0:
        return
    if walk.records[walk.root] is None:
        yield (), walk.root
        return
    count = 0
    steps: list[Step] = []
    inside: set[int] = {walk.root}
    stack = [(walk.root, iter(_shown(walk, walk.root, derived)))]
    while stack:
        item, holes = stack[-1]
        for position, child in holes:
            if child in inside:
                continue
            step = walk.step(item, position)
            if walk.records[child] is None:
                yield (*steps, step), child
                count += 1
                if limit is not None and count >= limit:
                    return
                continue
            steps.append(step)
            inside.add(child)
            stack.append((child, iter(_shown(walk, child, derived))))
            break
        else:
            stack.pop()
            inside.discard(item)
            if steps:
                steps.pop()


def _shown(walk: Walk, item: int, derived: bool) -> list[tuple[int, int]]:
    record = walk.records[item]
    hides = record is not None and record.node.derived and not derived
    return [] if hides else sorted(_holes(walk, item))


def _holes(walk: Walk, item: int) -> list[tuple[int, int]]:
    record = walk.records[item]
    assert record is not None
    return [] if record.node.back else record.holes


def uses(walk: Walk) -> Counter[int]:
    """Returns for each leaf item how many ways lead to it (a cycle is gone round once)."""
    ways: Counter[int] = Counter()
    if walk.root < 0:
        return ways
    ways[walk.root] = 1
    for item in reversed(walk.finished):
        for _, child in _holes(walk, item):
            if walk.records[child] is None or child > item or not walk.cyclic:
                ways[child] += ways[item]
    return ways
