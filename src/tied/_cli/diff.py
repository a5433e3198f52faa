"""`tied diff`: what two checkpoints disagree on: ties, names, shapes, dtypes, values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tied._checkpoint import open_checkpoint
from tied._cli import relations
from tied._cli.printing import Console, clean, counted, number_said, paint
from tied._cli.progress import Progress
from tied._cli.tree import MOST, dtype_said, reading, reads
from tied._cli.values import Difference, difference
from tied._cli.writers import bytes_of, nbytes_of
from tied._files.contents import Checkpoint
from tied._files.dtypes import BITS
from tied._ties import said_bytes


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("a", metavar="A", help="a checkpoint")
    parser.add_argument("b", metavar="B", help="another one, of the same format or not")
    parser.add_argument("--bits", action="store_true",
                        help="compare bits: NaN payloads and -0 count")  # fmt: skip
    parser.add_argument("--no-values", dest="values", action="store_false",
                        help="compare no values, and read no tensor")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="do not cut a long listing")


@dataclass(slots=True)
class Differences:
    """What two checkpoints disagree on."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    ties: relations.Changes = field(default_factory=lambda: relations.Changes([], [], []))
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    values: dict[str, Difference] = field(default_factory=dict)
    names: int = 0
    nbytes: int = 0

    def __bool__(self) -> bool:
        return any((self.only_in_a, self.only_in_b, *self.ties, self.shapes, self.dtypes,
                    self.values))  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    a, b = open_checkpoint(options.a), open_checkpoint(options.b)
    found = compare(a, b, values=options.values, bits=options.bits)
    if console.json:
        console.document(_document(a, b, found, options))
    else:
        told = list(_lines(a, b, found))
        room = len(told) if options.all else MOST
        width = max((len(label) for label, _ in told[:room]), default=0)
        for label, text in told[:room]:
            shown = paint(_STYLES.get(label, "note"), label.ljust(width), console.colour)
            console.say(f"{shown}  {clean(text)}")
        if len(told) > room:
            rest = counted(len(told) - room, "more difference")
            console.say(f"... and {rest}; --all lists all")
        console.say(_summary(found, options, console))
    return 1 if found else 0


def compare(a: Checkpoint, b: Checkpoint, *, values: bool, bits: bool) -> Differences:
    """Returns what two checkpoints disagree on.

    Args:
        a: A checkpoint.
        b: Another one.
        values: Whether to read and compare values.
        bits: Whether values with other bits are others.
    """
    here, there = dict.fromkeys(a.names()), dict.fromkeys(b.names())
    common = [name for name in here if name in there]
    found = Differences(
        [name for name in here if name not in there],
        [name for name in there if name not in here],
        relations.changes(a, b, common),
        [name for name in common if a.shape(name) != b.shape(name)],
        [name for name in common if a.dtype(name) != b.dtype(name)],
        names=len(common),
    )
    wanted = list(_to_compare(a, b, common, {*found.shapes})) if values else []
    found.nbytes = sum(nbytes_of(a, name) + nbytes_of(b, name) for name in wanted)
    with Progress("comparing", found.nbytes) as progress:
        for name in wanted:
            one = _compare(a, b, name, bits, progress)
            if one.differing:
                found.values[name] = one
    return found


def _to_compare(
    a: Checkpoint, b: Checkpoint, common: list[str], unlike: set[str]
) -> Iterator[str]:  # fmt: skip
    """Gives the names whose values are compared: not one that is read alike of a compared one."""
    there = {*common} - unlike
    for name in common:
        if name in unlike:
            continue
        one, other = a.aliases.get(name), b.aliases.get(name)
        if one is None or one != other or one.of not in there:
            yield name


def _compare(
    a: Checkpoint, b: Checkpoint, name: str, bits: bool, progress: Callable[[int], object]
) -> Difference:
    codes = (a.dtype(name), b.dtype(name))
    elements = math.prod(a.shape(name))
    if codes[0] != codes[1] and any(BITS[code] % 8 for code in codes):
        return Difference(elements)  # the dtypes differ, and that is told
    return difference(bytes_of(a, name), bytes_of(b, name), codes, elements, bits, progress)


_STYLES = {"only in A": "bad", "only in B": "good", "tie lost": "bad", "tie made": "good"}


def _lines(a: Checkpoint, b: Checkpoint, found: Differences) -> Iterator[tuple[str, str]]:
    """Gives a label and a text for each difference."""
    for label, contents, names in (("only in A", a, found.only_in_a),
                                   ("only in B", b, found.only_in_b)):  # fmt: skip
        for name in names:
            what = reading(contents, name)
            yield label, f"{what}  {contents.shape(name)}  {dtype_said(contents.dtype(name))}"
    yield from (("tie lost", reading(a, name)) for name in found.ties.lost)
    yield from (("tie made", reading(b, name)) for name in found.ties.made)
    for name in found.ties.changed:
        yield "tie changed", f"{reading(a, name)}; in B {reading(b, name)}"
    for name in found.shapes:
        yield "shape", f"{name}: {a.shape(name)}; in B {b.shape(name)}"
    for name in found.dtypes:
        yield "dtype", f"{name}: {dtype_said(a.dtype(name))}; in B {dtype_said(b.dtype(name))}"
    for name, one in found.values.items():
        yield "values", f"{name}: {_said(one, a.shape(name))}"


def _said(one: Difference, shape: tuple[int, ...]) -> str:
    said = f"{one.differing:,} of {counted(one.elements, 'element')} differ"
    said += "s" if one.elements == 1 else ""
    if one.largest:
        where = list(map(int, np.unravel_index(one.at, shape)))
        said += f", by at most {number_said(one.largest)}" + (f" at {where}" if where else "")
    elif one.largest == 0 and one.differing > one.nans:
        said += " in their bits only"
    if one.nans:
        said += f", {one.nans:,} NaN on one side only"
    return said


def _summary(found: Differences, options: argparse.Namespace, console: Console) -> str:
    names = counted(found.names, "common name")
    if found:
        return paint("bad", f"A and B differ ({names})", console.colour)
    how = "bit by bit" if options.bits else "in names, ties, shapes, dtypes and values"
    how = how if options.values else "in names, ties, shapes and dtypes; values were not compared"
    read = f", {said_bytes(found.nbytes)} compared" if options.values else ""
    return paint("good", f"the same {how} ({names}{read})", console.colour)


def _document(
    a: Checkpoint, b: Checkpoint, found: Differences, options: argparse.Namespace
) -> dict[str, Any]:
    both = (("a", a), ("b", b))
    return {
        "a": str(a.path),
        "b": str(b.path),
        "same": not found,
        "values_compared": options.values,
        "bits": options.bits,
        "names": found.names,
        "compared_nbytes": found.nbytes,
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "ties_lost": [{"name": n, "reads": reads(a, n)} for n in found.ties.lost],
        "ties_made": [{"name": n, "reads": reads(b, n)} for n in found.ties.made],
        "ties_changed": [
            {"name": n, **{k: reads(c, n) for k, c in both}} for n in found.ties.changed
        ],
        "shapes": [{"name": n, **{k: list(c.shape(n)) for k, c in both}} for n in found.shapes],
        "dtypes": [{"name": n, **{k: c.dtype(n) for k, c in both}} for n in found.dtypes],
        "values": [_value_dict(name, one, a.shape(name)) for name, one in found.values.items()],
    }


def _value_dict(name: str, one: Difference, shape: tuple[int, ...]) -> dict[str, Any]:
    largest = one.largest
    return {
        "name": name,
        "elements": one.elements,
        "differing": one.differing,
        "nans": one.nans,
        "largest": "inf" if largest is not None and math.isinf(largest) else largest,
        "at": None if one.at < 0 else [int(x) for x in np.unravel_index(one.at, shape)],
    }
