"""A checkpoint as a tree of ties, as `tied.ties` prints a model, cut where it is long."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from tied._cli.printing import Console, clean, counted
from tied._errors import FileError
from tied._files.contents import Alias, Checkpoint, Stored
from tied._files.dtypes import BITS, NAMES
from tied._layout import Layout
from tied._reading import reading as said
from tied._ties import said_bytes

MOST = 50
"""The lines that a listing has at most, unless all are asked for."""

_NUMBERS = re.compile(r"[0-9]+")
_MOST_NAMES = 20  # of one storage


@dataclass(frozen=True, slots=True)
class Branch:
    """A storage and the further names that read it."""

    stored: Stored
    aliases: tuple[Alias, ...]


def branches(contents: Checkpoint, patterns: Sequence[str] = ()) -> list[Branch]:
    """Returns the storages of a checkpoint with their names, those of which a name matches.

    Raises:
        FileError: A pattern matches no name.
    """
    names = list(contents.storages)
    if contents.format == "safetensors":  # other formats have an order of their own
        names.sort(key=_by_number)
    readers: dict[str, list[Alias]] = {name: [] for name in names}
    for alias in contents.aliases.values():
        readers[alias.of].append(alias)
    found = [Branch(contents.storages[name], tuple(readers[name])) for name in readers]
    if not patterns:
        return found
    unused = set(patterns)
    kept = []
    for branch in found:
        own = (branch.stored.name, *(alias.name for alias in branch.aliases))
        matched = {p for p in patterns if any(fnmatchcase(name, p) for name in own)}
        unused -= matched
        if matched:
            kept.append(branch)
    if unused:
        raise FileError(
            "no name matches " + " or ".join(repr(p) for p in patterns if p in unused),
            facts=[("file", str(contents.path))],
            hint="Patterns are those of a shell, and speak of whole names: '*.weight'",
        )
    return kept


def _by_number(name: str) -> str:
    """Returns what sorts `h.2.w` before `h.10.w`."""
    return _NUMBERS.sub(lambda found: found[0].zfill(12), name)


def reads(contents: Checkpoint, name: str) -> str:
    """Returns how a name reads its storage: `enc.T`, `elements 0 to 11`; itself if it is one."""
    alias = contents.aliases.get(name)
    if alias and not contents.storages[alias.of].named and _is_run(alias.layout):
        low, high = alias.layout.extent
        return f"elements {low} to {high - 1}"
    if alias and alias.layout.dtype:
        base = contents.storages[alias.of]
        layout = replace(alias.layout, dtype=dtype_said(alias.layout.dtype))
        return layout.describe(base.shape, alias.of, base_dtype=dtype_said(base.dtype))
    return contents.describe(name)


def reading(contents: Checkpoint, name: str) -> str:
    """Returns the same with the name: `dec = enc.T`, `a reads elements 0 to 11`."""
    return name if name in contents.storages else said(name, reads(contents, name))


def _is_run(layout: Layout) -> bool:
    plain = layout.dtype is None and not (layout.conj or layout.neg) and 0 not in layout.shape
    return plain and layout.strides == Layout.whole(layout.shape).strides


def dtype_said(code: str) -> str:
    """Returns the name of a dtype as a person writes it."""
    return NAMES.get(code, code)


def lines(
    contents: Checkpoint, shown: Sequence[Branch], console: Console, everything: bool
) -> Iterator[str]:
    """Gives the lines of the tree, and one that says what was left out."""
    kept = shown if everything else _cut(shown)
    rows = [(b.stored.name, str(b.stored.shape), dtype_said(b.stored.dtype)) for b in kept]
    widths = [max((len(clean(row[i])) for row in rows), default=0) for i in range(3)]
    for branch, (name, shape, dtype) in zip(kept, rows, strict=True):
        pad = " " * (widths[0] - len(clean(name)))
        facts = f"{shape:<{widths[1]}}  {dtype:<{widths[2]}}  {said_bytes(branch.stored.nbytes)}"
        yield f"{console.paint('name', name)}{pad}    {facts}"
        aliases = branch.aliases if everything else branch.aliases[:_MOST_NAMES]
        for alias in aliases:
            yield "  " + console.paint("alias", reading(contents, alias.name))
        if len(aliases) < len(branch.aliases):
            yield f"  and {counted(len(branch.aliases) - len(aliases), 'more name')}"
    if len(kept) < len(shown):
        yield _left_out(shown, kept)


def _cut(shown: Sequence[Branch]) -> list[Branch]:
    """Returns the storages that a short listing has: those that are tied before those that aren't.

    They stay in the order of the file.
    """
    room = MOST
    chosen: set[int] = set()
    for tied in (True, False):
        for number, branch in enumerate(shown):
            height = 1 + min(len(branch.aliases), _MOST_NAMES + 1)
            if bool(branch.aliases) == tied and height <= room:
                chosen.add(number)
                room -= height
    return [shown[number] for number in sorted(chosen)]


def _left_out(shown: Sequence[Branch], kept: Sequence[Branch]) -> str:
    names = {branch.stored.name for branch in kept}
    rest = [branch for branch in shown if branch.stored.name not in names]
    tied = sum(bool(branch.aliases) for branch in rest)
    nbytes = said_bytes(sum(branch.stored.nbytes for branch in rest))
    said = counted(tied, "is", "are").split()[1]
    what = f"{tied:,} of them {said} tied" if tied else "none of them is tied"
    return f"... and {counted(len(rest), 'more storage')} ({nbytes}), {what}; --all lists all"


@dataclass(frozen=True, slots=True)
class Total:
    """What storages hold, and what counting every name says."""

    parameters: int
    nbytes: int
    naive_parameters: int
    naive_nbytes: int

    def __str__(self) -> str:
        text = f"{self.parameters:,} parameters, {said_bytes(self.nbytes)}"
        if (self.parameters, self.nbytes) == (self.naive_parameters, self.naive_nbytes):
            return text
        naive = f"{self.naive_parameters:,} parameters, {said_bytes(self.naive_nbytes)}"
        return f"{text} (counting every name: {naive})"


def total(shown: Sequence[Branch]) -> Total:
    """Returns the sums over storages."""
    parameters = nbytes = naive_parameters = naive_nbytes = 0
    for branch in shown:
        stored = branch.stored
        elements = math.prod(stored.shape)
        parameters += elements
        nbytes += stored.nbytes
        if stored.named:
            naive_parameters += elements
            naive_nbytes += stored.nbytes
        for alias in branch.aliases:
            size = alias.layout.size
            naive_parameters += size
            naive_nbytes += size * BITS[alias.layout.dtype or stored.dtype] // 8
    return Total(parameters, nbytes, naive_parameters, naive_nbytes)
