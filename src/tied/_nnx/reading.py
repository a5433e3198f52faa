"""Readings: what stands for a part of a tied model when users go down to it.

The lowest module above both sides of a tie knows it, by its class; the module that had the target
has lost it. What users get on their way down from the one to the other are readings: instances of a
subclass of the part's class that share the `__dict__` of the part, so that what is assigned to one
is assigned to the other, and that know the modules they were reached from, in a slot. No module
holds another one than those it is made of. NNX, which goes down through `__dict__`, meets the parts
themselves: a tree with one variable for each storage.

Handed over alone to a transform, a reading takes along what it reads, as `Tied` variables. What the
transform makes of it is a *detached* reading, which has them in its `__dict__` like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from flax import nnx
from flax.nnx import graphlib
from flax.typing import HashableMapping

from tied._errors import TieError
from tied._nnx.facts import Keys, Tie
from tied._nnx.marks import (
    Dressed,
    Lost,
    Reading,
    Ways,
    all_ways,
    lost_error,
    lost_of,
    state_error,
    subclass,
    undressed,
    ways_to,
)
from tied._nnx.reads import write
from tied._nnx.variable import Tied, derive, guarded

_alive: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_dressed: dict[Any, type[Any]] = {}
_readings: dict[Any, type[Any]] = {}


def dressed(base: type[Any], ties: tuple[Tie, ...], lost: Lost) -> type[Any]:
    """Returns the class of a module that knows ties, or has lost variables to them.

    It is the same one for equal ties, so that models that are tied alike are equal to NNX.
    """
    if not ties and not lost:
        return base
    key = (base, ties, lost)
    if key not in _dressed:
        names = [tie.target[0] for tie in ties] + [name for name, _ in lost]
        told = {"_tied_base": base, "_tied_ties": ties, "_tied_lost": lost}
        _dressed[key] = subclass(base, (base, Dressed), {**_body(base, names), **told})
    return _dressed[key]


def redress(module: Any, ties: tuple[Tie, ...], lost: dict[str, str]) -> None:
    """Gives a module, in place, the class that goes with its ties."""
    cls = dressed(undressed(type(module)), ties, tuple(lost.items()))
    if type(module) is not cls:
        object.__setattr__(module, "__class__", cls)


def reading_class(base: type[Any], names: frozenset[str]) -> type[Any]:
    """Returns the class of the readings of parts of a class, with these names computed."""
    key = (base, names)
    if key not in _readings:
        bases = (base,) if issubclass(base, Reading) else (Reading, base)
        told = {"__slots__": (), "_tied_base": undressed(base), "_tied_reads": key}
        _readings[key] = subclass(base, bases, {**_body(base, names), **told})
    return _readings[key]


def _body(base: type[Any], names: Iterable[str]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if issubclass(base, nnx.Dict):
        more = {"__iter__": _iter}
    elif issubclass(base, nnx.List):  # its own one goes through all elements, tied ones too
        more = {"__nnx_repr__": nnx.Module.__nnx_repr__}
    return {**METHODS, **more, **{name: Way(name) for name in names}}


def read_part(part: Any, ways: Ways) -> Any:
    """Returns the reading of a part; while it is held, the same one again."""
    own = vars(part)
    key = (id(own), type(part), *((id(owner), id(tie), keys) for owner, tie, keys in ways))
    found = _alive.get(key)
    if found is None:
        names = frozenset(keys[0] for _, _, keys in ways)
        found = object.__new__(reading_class(type(part), names))
        object.__setattr__(found, "__dict__", own)
        object.__setattr__(found, "_tied_ways", ways)
        _alive[key] = found
    return found


class Way:
    """The attribute of a module that is tied, or leads to what is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _ways(self, part: Any) -> Ways:
        return tuple(way for way in all_ways(part) if way[2][0] == self.name)

    def __get__(self, part: Any, cls: type[Any] | None = None) -> Any:
        if part is None:
            return self
        ways = self._ways(part)
        for owner, tie, keys in ways:
            if len(keys) == 1:
                return derive(owner, tie)
        own = vars(part)
        if self.name in own:
            part = own[self.name]
            return read_part(part, _further(ways)) if ways else part
        if self.name in lost_of(part):
            raise lost_error(part, self.name)
        raise AttributeError(f"{type(part).__name__!r} object has no attribute {self.name!r}")

    def __set__(self, part: Any, value: Any) -> None:
        ways = self._ways(part)
        for owner, tie, keys in ways:
            if len(keys) == 1:
                assign(owner, tie, value)
                return
        own = vars(part)
        lost = self.name in lost_of(part) and not isinstance(part, Reading)
        if self.name not in own and not lost:
            own[self.name] = value  # NNX fills a new module
        elif lost:
            raise lost_error(part, self.name)
        elif value is own[self.name] or _stands_for(value, own[self.name]):
            return
        elif not ways:
            raise TieError(
                "a tied variable can't be replaced in a part of a model that was handed over alone",
                hint="Hand over the whole model, or change the variable that it is computed from",
            )
        elif all(_has_lost(value, keys[1:]) for _, _, keys in ways):
            own[self.name] = value  # NNX puts a copy into the place of a part
        else:
            tie = ways[0][1]
            raise tie.error(f"{self.name} can't be replaced: it holds {tie.name}, which is tied")

    def __delete__(self, part: Any) -> None:
        for _, tie, _ in self._ways(part):
            raise tie.error(f"{self.name} can't be deleted: {tie.name} is tied")
        if self.name not in vars(part):
            raise lost_error(part, self.name)
        del vars(part)[self.name]


def _stands_for(reading: Any, part: Any) -> bool:
    own = getattr(part, "__dict__", None)
    return own is not None and getattr(reading, "__dict__", None) is own


def _further(ways: Ways) -> Ways:
    return tuple((owner, tie, keys[1:]) for owner, tie, keys in ways)


def _has_lost(part: Any, keys: Keys) -> bool:
    """Returns whether a part leads to a place that a target has been taken from."""
    for key in keys[:-1]:
        part = vars(part).get(key) if isinstance(part, nnx.Pytree) else None
    if not isinstance(part, nnx.Pytree) or isinstance(part, Reading):
        return False
    return keys[-1] in lost_of(part) and keys[-1] not in vars(part)


def assign(owner: Any, tie: Tie, value: Any) -> None:
    """Writes through to the source what is assigned to a target: a variable, or its value.

    Raises:
        TieError: It is of another kind, or can't be written.
    """
    if tie.kind is None:
        raise tie.error(f"{tie.name} can't be replaced: it is tied")
    if isinstance(value, nnx.Variable):
        if not isinstance(value, (tie.kind, Tied)):
            raise tie.error(
                f"{tie.name} was a {tie.kind.__name__} and can't become a {type(value).__name__}"
            )
        value = value.get_value()
    write(owner, tie, value)


def attached(part: Any, *, sent: bool = True) -> Any:
    """Returns a detached reading like this one, which has what it reads in its `__dict__`.

    Args:
        part: The reading.
        sent: Whether NNX takes it into a transform, whose result is no news: see `Tied`.
    """
    made = object.__new__(type(part))
    own = dict(vars(part))
    nodes = dict(own.get("_pytree__nodes", ()))
    for name in dict.fromkeys(keys[0] for _, _, keys in ways_to(part)):
        ways = tuple(way for way in ways_to(part) if way[2][0] == name)
        ends = [derive(owner, tie, sent=sent) for owner, tie, keys in ways if len(keys) == 1]
        own[name] = ends[0] if ends else read_part(own[name], _further(ways))
        nodes[name] = True
    if "_pytree__nodes" in own:
        own["_pytree__nodes"] = HashableMapping(nodes)
    object.__setattr__(made, "__dict__", own)
    return made


def whole(part: Any) -> Any:
    """Returns a part as NNX is to see it."""
    return attached(part) if ways_to(part) else part


def _setattr(self: Any, name: str, value: Any) -> None:
    if isinstance(getattr(type(self), name, None), Way):
        self._check_valid_context(lambda: f"{type(self).__name__} is of another trace level")
        object.__setattr__(self, name, value)
    else:
        undressed(type(self))._setattr(self, name, value)


def _delattr(self: Any, name: str) -> None:
    way = getattr(type(self), name, None)
    if isinstance(way, Way):
        way.__delete__(self)
    else:
        base: Any = undressed(type(self))
        base.__delattr__(self, name)


_NODE_DICT = graphlib.NodeImplBase.node_dict.__code__


def _graph_flatten(self: Any) -> Any:
    """Takes a module apart; `nnx.update` asks by `node_dict`, and writes into what it gets."""
    part, is_update = self, sys._getframe(1).f_code is _NODE_DICT
    if ways_to(self):
        part = attached(self, sent=not is_update)
    elif is_update and isinstance(self, Reading):
        part = object.__new__(type(self))
        own = {key: guarded(value) for key, value in vars(self).items()}
        object.__setattr__(part, "__dict__", own)
    return undressed(type(self))._graph_node_flatten(part)


def _flatten(self: Any) -> Any:
    return undressed(type(self))._pytree__flatten(whole(self))


def _flatten_with_paths(self: Any) -> Any:
    return undressed(type(self))._pytree__flatten_with_paths(whole(self))


def _clear(self: Any) -> None:
    """Empties a module that NNX is about to fill anew; parts that readings stand for stay."""
    own = vars(self)
    kept = {keys[0]: own[keys[0]] for _, _, keys in ways_to(self) if len(keys) > 1}
    undressed(type(self))._graph_node_clear(self)
    own.update(kept)


def _init(self: Any, items: Iterable[tuple[Any, Any]]) -> None:
    """Fills a module, as NNX does when it merges and after each transform.

    What a reading took along into a transform comes back here, and is no part of the module.
    """
    ends = {keys[0] for _, _, keys in ways_to(self) if len(keys) == 1}
    kept = []
    for key, value in items:
        if str(key) in ends:
            continue
        if key == "_pytree__nodes" and ends:
            value = HashableMapping({k: v for k, v in value.items() if k not in ends})
        kept.append((key, value))
    undressed(type(self))._graph_node_init(self, kept)


def _set_key(self: Any, key: Any, value: Any) -> None:
    name = str(key)
    if name not in vars(self) and isinstance(getattr(type(self), name, None), Way):
        raise state_error(self, name)
    undressed(type(self))._graph_node_set_key(self, key, value)


def _new(cls: Any, *args: Any, **settings: Any) -> Any:
    """Makes an ordinary module where a module makes another of its own class."""
    base: Any = undressed(cls)
    if base.__new__ is object.__new__:
        return object.__new__(base)
    return base.__new__(base, *args, **settings)


def _iter(self: Any) -> Iterator[str]:
    """Gives the keys of an `nnx.Dict`, with those that are computed."""
    yield from undressed(type(self)).__iter__(self)
    for _, _, keys in all_ways(self):
        if len(keys) == 1:
            yield keys[0]


METHODS: dict[str, Any] = {
    "__new__": _new,
    "__delattr__": _delattr,
    "_setattr": _setattr,
    "_graph_node_flatten": _graph_flatten,
    "_graph_node_clear": _clear,
    "_graph_node_init": _init,
    "_graph_node_set_key": _set_key,
    "_pytree__flatten": _flatten,
    "_pytree__flatten_with_paths": _flatten_with_paths,
}
"""What every class that is made here does otherwise than the class that the module had before."""
