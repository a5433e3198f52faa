"""Which ties of one checkpoint another one has: by what names read, not by what is stored."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tied._files.contents import Checkpoint
from tied._files.dtypes import BITS
from tied._layout import Layout


class Changes(NamedTuple):
    """What became of ties: names, each with how it reads its storage.

    Attributes:
        lost: Names that read a storage in the first checkpoint, and one of their own in the second.
        made: The other way round.
        changed: Names that read the same storage in both, in different ways; both ways.
    """

    lost: list[str]
    made: list[str]
    changed: list[str]


def changes(a: Checkpoint, b: Checkpoint, common: list[str]) -> Changes:
    """Returns what became of the ties between names that both checkpoints have."""
    here, there = _groups(a, common), _groups(b, common)
    return Changes(
        [name for group in here.values() for name in _apart(a, b, group)],
        [name for group in there.values() for name in _apart(b, a, group)],
        [name for group in here.values() for name in _changed(a, b, group)],
    )


def _groups(contents: Checkpoint, common: list[str]) -> dict[str, list[str]]:
    """Returns the names that read each storage, where there are several; its own name first."""
    groups: dict[str, list[str]] = {}
    for name in common:
        source = contents.source(name)
        group = groups.setdefault(source, [])
        group.insert(0 if name == source else len(group), name)
    return {source: group for source, group in groups.items() if len(group) > 1}


def _apart(a: Checkpoint, b: Checkpoint, group: list[str]) -> list[str]:
    """Returns the names of a tie of `a` that `b` has away from the first one of them."""
    sources = [b.source(name) for name in group]
    lost = [n for n, s in zip(group, sources, strict=True) if s != sources[0]]
    if not lost or a.source(group[0]) == group[0]:
        return lost
    # Not every two names that read parts of a storage have an element in common.
    return [n for n in lost if any(
        b.source(n) != b.source(other) and _meet(a, n, other) for other in group)]  # fmt: skip


def _meet(contents: Checkpoint, one: str, other: str) -> bool:
    """Returns whether two names of a storage read a common element."""
    layouts = [layout(contents, one), layout(contents, other)]
    (low, high), (start, stop) = layouts[0].extent, layouts[1].extent
    if low >= stop or start >= high:
        return False
    return bool(np.intersect1d(*(places(contents, name) for name in (one, other))).size)


def _changed(a: Checkpoint, b: Checkpoint, group: list[str]) -> list[str]:
    """Returns the names of a tie that `b` has too, but that are read in another way there."""
    first = group[0]
    kept = [name for name in group[1:] if b.source(name) == b.source(first)]
    return [name for name in kept if not _alike(a, b, first, name)]


def _alike(a: Checkpoint, b: Checkpoint, first: str, name: str) -> bool:
    """Returns whether two names are to one another in `b` what they are in `a`."""
    ours, theirs = layout(a, name), layout(b, name)
    base, base_there = layout(a, first), layout(b, first)
    if base == base_there and ours == theirs:
        return True
    if (ours.shape, base.shape) != (theirs.shape, base_there.shape):
        return True  # told as a difference of shapes
    if a.source(first) == first:
        there_too = base_there.then(ours)
        if there_too is not None:
            return there_too.canonical() == theirs.canonical()
    flags = [(x.conj, x.neg) for x in (ours, theirs, base, base_there)]
    turned = [(p[0] ^ q[0], p[1] ^ q[1]) for p, q in ((flags[0], flags[2]), (flags[1], flags[3]))]
    if turned[0] != turned[1]:
        return False
    here = np.concatenate([places(a, first), places(a, name)])
    there = np.concatenate([places(b, first), places(b, name)])
    if here.size != there.size:
        return False
    pairs = len(np.unique(np.stack([here, there]), axis=1)[0])
    return pairs == len(np.unique(here)) == len(np.unique(there))


def layout(contents: Checkpoint, name: str) -> Layout:
    """Returns what a name reads of its storage."""
    alias = contents.aliases.get(name)
    return Layout.whole(contents.shape(name)) if alias is None else alias.layout


def places(contents: Checkpoint, name: str) -> Any:
    """Returns the bytes of its storage that a name reads, in order, as a 1-D int64 array."""
    read = layout(contents, name)
    size = BITS[contents.dtype(name)] // 8
    index = dataclasses.replace(read, dtype=None).index().reshape(-1, 1)
    return (index * (1 if read.dtype is not None else size) + np.arange(size)).reshape(-1)
