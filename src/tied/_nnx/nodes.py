"""How modules with ties come apart for the rest of this library, and for pickle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flax import nnx

from tied._errors import TieError
from tied._nnx.facts import Keys, Tie
from tied._nnx.marks import Dressed, Reading
from tied._nnx.places import all_ties, stored
from tied._nnx.reading import METHODS, dressed, reading_class, whole
from tied._nnx.reads import follow, origin, read, sources, value_of
from tied._nnx.variable import derive
from tied._node import Lasting, Opened, declare
from tied.arrays.view import View
from tied.nodes.flax import ModuleNode


class DressedNode(ModuleNode):
    """A module that knows ties: it keeps its class, and says what is computed."""

    lasting = True

    def readings(self, x: Any) -> Iterable[Lasting]:
        for _, above, tie in all_ties(x):
            if _is_lowest(x, above, tie):
                yield from _lasting(follow(x, above), above, tie)

    def portable(self, cls: Any) -> Any:
        return class_of, recipe(cls)


def _is_lowest(x: Any, above: Keys, tie: Tie) -> bool:
    """Returns whether a module is the lowest one from which a tie below it can be read.

    Mostly that is the module that knows the tie; where its source is tied further up, that one is.
    """
    for depth in range(len(above), -1, -1):
        start = stored(x, above[:depth])
        if isinstance(start, Dressed):
            try:
                sources(follow(start, above[depth:]), tie)
            except TieError:
                continue
            return depth == 0
    return False


def _lasting(owner: Any, above: Keys, tie: Tie) -> Iterator[Lasting]:
    name = ".".join((*above, tie.name))
    if tie.kind is None:
        for keys, part in nnx.iter_graph(derive(owner, tie), graph=True):
            if isinstance(part, nnx.Variable):
                value = part.get_raw_value()
                yield Lasting(".".join((name, *map(str, keys))), value, value, "")
        return
    try:
        found = origin(owner, tie)
    except TieError:  # a stack of which it is not certain how it is read: the tie is there
        stack = value_of(sources(owner, tie)[0])
        yield Lasting(name, stack, stack, "computed from {}")
        return
    if found.same:
        yield Lasting(name, found.value, found.value, "")
    elif found.layout is not None:
        yield Lasting(name, View(found.value, found.layout), found.value, "")
    else:
        yield Lasting(name, read(owner, tie), found.value, "computed from {}")


class ReadingNode(ModuleNode):
    """A reading: taken apart, it is a part of its own, with a copy of what it reads."""

    def open(self, x: Any) -> Opened:
        return super().open(whole(x))

    def portable(self, cls: Any) -> Any:
        return class_of, recipe(cls)


def recipe(cls: Any) -> Any:
    """Returns how a class is made that pickle does not find by its name."""
    if issubclass(cls, Reading):
        base, names = cls._tied_reads
        return reading_class, recipe(base), tuple(sorted(names))
    if issubclass(cls, Dressed):
        return dressed, cls._tied_base, cls._tied_ties, cls._tied_lost
    return cls


def class_of(made: Any) -> Any:
    """Returns the class that a recipe makes."""
    if not isinstance(made, tuple):
        return made
    make, base, *rest = made
    return make(class_of(base), *(map(frozenset, rest) if make is reading_class else rest))


def _reduce(self: Any, protocol: Any) -> Any:
    return _revive, (recipe(type(self)),), whole(self).__getstate__()


def _revive(made: Any) -> Any:
    return object.__new__(class_of(made))


METHODS["__reduce_ex__"] = _reduce
declare(Dressed, DressedNode())
declare(Reading, ReadingNode())
