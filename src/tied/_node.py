"""How each type comes apart and is put back: the protocol, the table of kinds, registration.

A *kind* is what the walk knows of a type. It is `None` (nothing to see: numbers, strings, types),
a `Library` of `tied.arrays` (the instances are leaves), or a `Node` (they have children). The table
is filled at the first sight of a type, in the order that `resolve` gives.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

from tied import arrays
from tied.arrays.library import Library

Opened = tuple[Sequence[Any], list[Any], Any]
"""What a node gives: the keys of its children, the children, and what it needs to be put back."""

C = TypeVar("C", bound=type)


class Node:
    """How the instances of a type come apart.

    Attributes:
        step: What a key is, for paths: "attr", "key" or "index". A key that is a `Step` says so
            itself.
        early: Whether an instance can be made before its children are there (cycles need it).
        stands_in: Whether the instances are made by another node's `open`, and are no part of the
            model themselves; they are put back even where they hold nothing.
        is_counter: Whether its child counts the steps of an optimizer: neither cast nor moved.
        lazy: Whether `static` is the instance until `settle` takes from it what is needed.
        lasting: Whether an instance may compute leaves of others: see `readings`.
        back: Whether the instances only refer to parts that the model holds elsewhere: see
            `referents`.
        derived: Whether an instance computes an array of its children. It is walked after all
            else, so that they are named after their own places, and where plain arrays are wanted
            its `read()` stands for it.
    """

    leaf = False
    step = "attr"
    early = False
    lazy = False
    is_counter = False
    stands_in = False
    lasting = False
    back = False
    derived = False

    def open(self, x: Any) -> Opened | None:
        """Returns keys, children (a new list) and the rest; `None` if `x` holds nothing.

        Raises:
            Closed: `x` can't be taken apart.
        """
        raise NotImplementedError

    def settle(self, keys: Sequence[Any], static: Any) -> Any:
        """Returns what is kept of a node that is to be put back (only where `lazy`)."""
        raise NotImplementedError

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        """Returns a new instance; `values` is the builder's own list."""
        x = self.shell(cls, static)
        self.fill(x, keys, values, static)
        return x

    def shell(self, cls: type, static: Any) -> Any:
        """Returns an instance without its children (only where `early`)."""
        raise NotImplementedError

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        """Gives a shell its children (only where `early`)."""
        raise NotImplementedError

    def referents(self, static: Any) -> tuple[Any, ...]:
        """Returns the parts that an instance refers to (only where `back`).

        `build` is given the new ones, None for each that is no part of the model.
        """
        raise NotImplementedError

    def unbound(self, static: Any) -> Any:
        """Returns what is kept of a reference whose parts are in the model (only where `back`)."""
        return None

    def readings(self, x: Any) -> Iterable[Lasting]:
        """Returns what `x` computes of arrays that other parts hold: ties that last."""
        return ()

    def portable(self, cls: type) -> Any:
        """Returns what pickles in the place of a type that pickle does not find by its name.

        It is a tuple of a function and its arguments, or the type itself.
        """
        return cls


class Lasting(NamedTuple):
    """A leaf that is computed anew on each access, by a tie that lasts.

    Attributes:
        key: The key of the leaf in its node.
        array: What it reads now.
        source: The array that it reads, or the first of them.
        how: How it is computed, with `{}` for the source's name; empty if `array` shares memory
            with `source`.
    """

    key: Any
    array: Any
    source: Any
    how: str


class Closed(Exception):
    """An object can't be taken apart; it is kept as it is and searched for hidden arrays."""


_STATIC: tuple[type, ...] = (
    type,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    type(None),
    type(...),
    type(NotImplemented),
    range,
    slice,
    enum.Enum,
    types.ModuleType,
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    type(dataclasses.MISSING),
)

Kind = Library | Node | None

_registered: dict[type, Kind] = {}

_FINDERS = ("tied.nodes.containers", "tied.nodes.frameworks", "tied.nodes.objects")


class Kinds(dict[type, Kind]):
    """The table from a type to its kind, filled as types are met."""

    def __missing__(self, cls: type) -> Kind:
        kind = self[cls] = resolve(cls)
        return kind


def resolve(cls: type) -> Kind:
    """Returns the kind of a type: what was registered, arrays, containers, frameworks, objects."""
    for base in cls.__mro__:
        if base in _registered:
            return _registered[base]
    if issubclass(cls, _STATIC):
        return None
    library = arrays.library_for(cls)
    if library is not None:
        return library
    for name in _FINDERS:
        found, kind = importlib.import_module(name).find(cls)
        if found:
            return kind  # type: ignore[no-any-return]
    raise AssertionError(f"no finder knows {cls}")


kinds = Kinds()


class Fields(Node):
    """A type whose children were named when it was registered: `@tied.node(fields=...)`."""

    early = True

    def __init__(self, fields: tuple[str, ...] | None) -> None:
        self.fields = fields

    def open(self, x: Any) -> Opened:
        state = attributes(x)
        names = tuple(state) if self.fields is None else self.fields
        try:
            values = [state.pop(name) for name in names]
        except KeyError as error:
            raise Closed(f"{type(x).__name__} has no field {error}") from error
        return names, values, state

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(cls)

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        set_attributes(x, static.keys(), static.values())
        set_attributes(x, keys, values)


class Registered(Node):
    """A type with the user's own two functions."""

    step = "attr"

    def __init__(
        self,
        flatten: Callable[[Any], tuple[Mapping[str, Any], Any]],
        unflatten: Callable[[Any, dict[str, Any]], Any],
    ) -> None:
        self.flatten = flatten
        self.unflatten = unflatten

    def open(self, x: Any) -> Opened:
        children, static = self.flatten(x)
        return tuple(children), list(children.values()), static

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return self.unflatten(static, dict(zip(keys, values, strict=True)))


def attributes(x: Any) -> dict[str, Any]:
    """Returns the attributes that an instance holds, in `__dict__` and in slots, in a new dict."""
    state = dict(getattr(x, "__dict__", ()))
    for name in slots(type(x)):
        if hasattr(x, name):
            state[name] = getattr(x, name)
    return state


def slots(cls: type) -> tuple[str, ...]:
    """Returns the names of the slots of a class and its bases, as attributes, bases first."""
    names: list[str] = []
    for base in reversed(cls.__mro__):
        own = base.__dict__.get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(names)


def set_attributes(x: Any, names: Iterable[str], values: Iterable[Any]) -> None:
    """Sets attributes as unpickling does: past `__setattr__`, so that frozen classes work."""
    own = getattr(x, "__dict__", None)
    kept = frozenset(slots(type(x)))
    for name, value in zip(names, values, strict=True):
        if own is None or name in kept:
            object.__setattr__(x, name, value)
        else:
            own[name] = value


def declare(cls: type, kind: Kind) -> None:
    """Puts a type into the table, before everything that `resolve` would find."""
    _registered[cls] = kind
    kinds.clear()


@overload
def node(cls: C, /) -> C: ...
@overload
def node(*, fields: Sequence[str] | None = None) -> Callable[[C], C]: ...
def node(cls: C | None = None, /, *, fields: Sequence[str] | None = None) -> Any:
    """Declares a class whose instances come apart by their attributes.

    Rebuilding never runs `__init__`; what a copy shares with the original is what is not an array.

    Args:
        cls: The class; its subclasses follow it.
        fields: The names of the attributes that are children. The others are kept as they are.
            Without it, every attribute is a child.

    Returns:
        The class itself, so that it works as a decorator.

    >>> import numpy as np, tied
    >>> @tied.node(fields=("W",))
    ... class Layer:
    ...     def __init__(self, W, name):
    ...         self.W, self.name = W, name
    >>> tied.f32(Layer(np.zeros(2), "first")).W.dtype
    dtype('float32')
    """

    def decorate(cls: C) -> C:
        declare(cls, Fields(None if fields is None else tuple(fields)))
        return cls

    return decorate if cls is None else decorate(cls)


def leaf(cls: C) -> C:
    """Declares a class whose instances are leaves: never opened, given whole to `map`'s function.

    Two places that hold one instance are tied; casts and moves leave instances as they are.

    Args:
        cls: The class; its subclasses follow it.

    Returns:
        The class itself, so that it works as a decorator.
    """
    declare(cls, arrays.load("opaque"))
    return cls


def register(
    cls: type,
    flatten: Callable[[Any], tuple[Mapping[str, Any], Any]],
    unflatten: Callable[[Any, dict[str, Any]], Any],
) -> None:
    """Declares how a type that you can't decorate comes apart.

    Args:
        cls: The type; its subclasses follow it.
        flatten: Takes an instance; returns its children by name, and whatever else it needs.
        unflatten: Takes that rest and the (new) children by name; returns a new instance.

    >>> import tied
    >>> class Box:
    ...     def __init__(self, item):
    ...         self.item = item
    >>> tied.register(Box, lambda b: ({"item": b.item}, None), lambda _, kids: Box(**kids))
    """
    declare(cls, Registered(flatten, unflatten))


def framework(cls: type) -> Iterable[str]:
    """Returns the top-level packages, already imported, that a type or its bases come from."""
    roots = dict.fromkeys(str(base.__module__).partition(".")[0] for base in cls.__mro__)
    return [root for root in roots if root in sys.modules]
