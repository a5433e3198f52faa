"""Ties that were lost: arrays whose values say that they were one array."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tied._checkpoint import open_checkpoint
from tied._errors import FileError
from tied._files.contents import Alias, Checkpoint, Stored
from tied._files.dtypes import BITS
from tied._files.gather import gather
from tied._files.twins import Item, Search
from tied._layout import Layout
from tied._steps import Ints, c_strides
from tied._ties import said_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """An array that has the values of another one.

    Attributes:
        name: The array.
        of: The array whose values it has; that one is kept.
        how: How it would read that one, as a person writes it: `embed.weight.T`.
        layout: Which elements of that one it would read, in C order.
        kind: "equal"; "transposed"; "permuted", with more than two axes; "reshaped", also of a
            transpose; "block", the first rows or columns of it, also transposed.
        shape: Its shape.
        nbytes: Its bytes, which are there twice.
    """

    name: str
    of: str
    how: str
    layout: Layout
    kind: str
    shape: Ints
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} = {self.how}  (was tied? {said_bytes(self.nbytes)} twice)"


@dataclass(frozen=True, slots=True)
class Discovered:
    """What `discover` found; prints a line for each finding.

    Attributes:
        findings: The arrays that have the values of others, in the order of the checkpoint.
    """

    findings: tuple[Finding, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that are there twice."""
        return sum(finding.nbytes for finding in self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return "no array has the values of another one"
        count = len(self.findings)
        what = "array has" if count == 1 else "arrays have"
        total = f"{count} {what} the values of another one, {said_bytes(self.nbytes)} twice"
        return "\n".join([*map(str, self.findings), total])


def discover(
    source: Any,
    *,
    least: int = 16,
    hidden: str = "warn",
    progress: Callable[[int, int], object] | None = None,
) -> Discovered:
    """Finds ties that were lost, and that only the values remember.

    Found are arrays of one dtype all of whose bits are those of another array: as it is,
    transposed, with its axes in another order (up to four axes longer than 1), in another shape,
    or the first rows or columns of it, as a padded vocabulary has them. An array in which all
    elements are one value is no evidence; neither is an array that is tied already.

    Equal values are not a tie: nothing is changed, and nothing says that the two should stay equal
    when they are trained.

    Some elements of each array say which may be equal, and those are compared bit for bit. Of a
    file, two arrays at most are in memory at a time.

    Args:
        source: A checkpoint, as for `load`; or a model, or a dict of arrays.
        least: The fewest bytes of an array that is worth a finding.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".
        progress: Is called after each array with the bytes that are done, and with all.

    Returns:
        The findings. Of several arrays with the same values the largest is kept, and the first one
        of that size. Where the second can't be a view of the first, but the first of the second,
        the second is kept: `W.T.ravel()` is no view of `W`.

    Raises:
        FileError: The checkpoint is not sound.

    >>> import numpy as np, tied
    >>> embed = np.arange(12, dtype="float32").reshape(4, 3)
    >>> print(tied.discover({"embed": embed, "head": embed.T.copy(), "rows": embed[:2].copy()}))
    head = embed.T  (was tied? 48 B twice)
    rows = embed[:2]  (was tied? 24 B twice)
    2 arrays have the values of another one, 72 B twice
    """
    contents = _contents(source, hidden)
    items = [
        item
        for item in map(_item, contents.storages.values())
        if item.stored.nbytes >= least and item.size > 1
    ]
    groups: dict[Any, list[Item]] = {}
    for item in items:
        dtype = item.stored.dtype
        parts = BITS[dtype] % 8  # such elements are compared as they are, or not at all
        groups.setdefault((dtype, item.stored.shape if parts else None), []).append(item)
    done, everything = 0, sum(item.stored.nbytes for item in items)
    for group in groups.values():
        group.sort(key=lambda item: -item.size)
        search = Search(group)
        for item in group:
            search.take(item)
            done += item.stored.nbytes
            if progress is not None:
                progress(done, everything)
    return Discovered(tuple(_finding(item) for item in items if item.of is not item))


def _item(stored: Stored) -> Item:
    """Returns an array for the search; of elements that are no whole bytes, the bytes."""
    return Item(stored, (stored.nbytes,) if BITS[stored.dtype] % 8 else stored.shape)


def _contents(source: Any, hidden: str) -> Checkpoint:
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, str | os.PathLike):
        return open_checkpoint(source)
    return gather(source, hidden).contents


def _finding(item: Item) -> Finding:
    stored, base, layout = item.stored, item.of.stored, item.layout
    if layout.shape != stored.shape:
        layout = Layout.whole(stored.shape)  # elements that are no whole bytes
    how = layout.describe(base.shape, base.name)
    kind = _kind(layout, base.shape)
    return Finding(stored.name, base.name, how, layout, kind, stored.shape, stored.nbytes)


def _kind(layout: Layout, base: Ints) -> str:
    if layout.size < math.prod(base):
        return "block"
    if layout.is_whole(base):
        return "equal"
    # The axes of the array, from the outermost one in the memory of the other to the innermost.
    pairs = zip(layout.strides, layout.shape, strict=True)
    axes = sorted(((step, n) for step, n in pairs if n > 1), reverse=True)
    own = [(step, n) for step, n in zip(c_strides(base), base, strict=True) if n > 1]
    in_order = layout == Layout.whole(layout.shape).canonical()
    if in_order or axes != own or sorted(layout.shape) != sorted(base):
        return "reshaped"
    return "transposed" if len(base) == 2 else "permuted"


def retied(contents: Checkpoint, discovered: Discovered) -> Checkpoint:
    """Returns a checkpoint in which what was discovered is tied again.

    An array stays as it is where a name reads it in a way in which the array that is kept can't be
    read.

    Args:
        contents: The checkpoint in which it was discovered. It is not changed.
        discovered: What `discover` found in it.

    Raises:
        FileError: The findings are not of this checkpoint.
    """
    found = {finding.name: finding for finding in discovered.findings}
    for finding in discovered.findings:
        fits = finding.name in contents.storages and finding.of in contents.storages
        if not fits or contents.storages[finding.name].shape != finding.shape:
            raise FileError(
                "this was not discovered in this checkpoint",
                facts=[("file", str(contents.path)), ("found", str(finding))],
                paths=[finding.name, finding.of],
            )
    moved: dict[str, Alias] = {}
    for alias in contents.aliases.values():
        if alias.of in found:
            layout = _moved(alias.layout, found[alias.of].layout)
            if layout is not None:
                moved[alias.name] = Alias(alias.name, found[alias.of].of, layout)
    stuck = {alias.of for alias in contents.aliases.values() if alias.name not in moved}
    found = {name: finding for name, finding in found.items() if name not in stuck}
    again = {
        name: Alias(name, finding.of, finding.layout)
        for name, finding in found.items()
        if contents.storages[name].named
    }
    kept = {
        alias.name: moved[alias.name] if alias.of in found else alias
        for alias in contents.aliases.values()
    }
    storages: dict[str, Stored] = {
        name: stored for name, stored in contents.storages.items() if name not in found
    }
    computed = {
        name: tuple(dict.fromkeys(found[x].of if x in found else x for x in sources))
        for name, sources in contents.computed.items()
    }
    return dataclasses.replace(
        contents, storages=storages, aliases={**kept, **again}, computed=computed
    )


def _moved(layout: Layout, outer: Layout) -> Layout | None:
    """Returns what a layout over an array reads of the storage that the array reads."""
    if outer == Layout.whole(outer.shape).canonical():
        return layout  # the array is the start of the storage: positions stay, and those of bytes
    return None if layout.dtype is not None else outer.then(layout)
