"""Objects of Python classes, functions, and whatever the pickle protocol takes apart."""

from __future__ import annotations

import copyreg
import dataclasses
import io
import types
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from tied import _hidden
from tied._node import Closed, Kind, Node, Opened, attributes, set_attributes, slots
from tied._path import Step


class ObjectNode(Node):
    """Instances that are their attributes, in `__dict__`."""

    early = True

    def open(self, x: Any) -> Opened:
        state = x.__dict__
        return tuple(state), list(state.values()), None

    def shell(self, cls: type, static: Any) -> Any:
        return object.__new__(cls)

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        x.__dict__.update(zip(keys, values, strict=True))


class SlotsNode(ObjectNode):
    """Instances with slots."""

    def open(self, x: Any) -> Opened:
        state = attributes(x)
        return tuple(state), list(state.values()), None

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        set_attributes(x, keys, values)


class MethodNode(Node):
    """Bound methods: the object they are bound to is a child (equinox#536)."""

    def open(self, x: Any) -> Opened:
        return ("__self__",), [x.__self__], x.__func__

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return types.MethodType(static, values[0])


class FunctionNode(Node):
    """Functions that capture an array: their closure's cells and their defaults are children."""

    def open(self, x: Any) -> Opened | None:
        if not (x.__closure__ or x.__defaults__ or x.__kwdefaults__ or x.__dict__):
            return None
        if not _hidden.captures(x):
            return None
        cells = x.__closure__ or ()
        names = [Step("attr", name) for name in x.__code__.co_freevars]
        rest = ("__defaults__", "__kwdefaults__", "__dict__")
        keys = (*names, *(Step("attr", name) for name in rest))
        values = [*cells, x.__defaults__, x.__kwdefaults__, dict(x.__dict__)]
        static = (x.__code__, x.__globals__, x.__name__, x.__qualname__, x.__annotations__)
        return keys, values, (*static, len(cells))

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        code, scope, name, qualname, annotations, captured = static
        cells, (defaults, keywords, state) = tuple(values[:captured]), values[captured:]
        function = types.FunctionType(code, scope, name, defaults, cells or None)
        function.__kwdefaults__ = keywords
        function.__qualname__ = qualname
        function.__annotations__ = annotations
        function.__dict__.update(state)
        return function


class CellNode(Node):
    """The cells of closures; functions that share one go on sharing it."""

    early = True

    def open(self, x: Any) -> Opened | None:
        try:
            return (Step("inside", "cell_contents"),), [x.cell_contents], None
        except ValueError:  # a variable that was never set
            return None

    def shell(self, cls: type, static: Any) -> Any:
        return types.CellType()

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        x.cell_contents = values[0]


class ReduceNode(Node):
    """What `copy.deepcopy` takes apart: `__reduce_ex__`, `__getstate__` and their kind."""

    def open(self, x: Any) -> Opened | None:
        try:
            reduced = x.__reduce_ex__(4)
        except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise Closed(str(error)) from error
        if isinstance(reduced, str):
            raise Closed("pickled by its name")
        function, args, state, items, pairs = (*reduced, None, None, None)[:5]
        if function is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
            cls, inner, options = args
            args = (*inner, options)
            function = partial(_new_with_options, cls)
        elif args and isinstance(args[0], type) and function is copyreg.__newobj__:  # type: ignore[attr-defined]
            function, args = partial(function, args[0]), args[1:]
        keys = [Step("index", i) for i in range(len(args))]
        values = list(args)
        names, states = _state(state)
        listed, paired = list(items or ()), list(pairs or ())
        keys += names
        keys += [Step("index", i) for i in range(len(listed))]
        keys += [step for key, _ in paired for step in _pair(key)]
        values += [*states, *listed, *(part for pair in paired for part in pair)]
        static = (function, len(args), len(names), len(listed), type(state) is dict)
        return keys, values, static

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        function, args, named, listed, is_dict = static
        x = function(*values[:args])
        at = args + named
        for value in values[at : at + listed]:
            x.append(value)
        rest = values[at + listed :]
        for key, value in zip(rest[::2], rest[1::2], strict=True):
            x[key] = value
        if named:
            state = values[args:at]
            names = [step.key for step in keys[args:at]]
            _restore(x, dict(zip(names, state, strict=True)) if is_dict else state[0])
        return x


def _new_with_options(cls: Any, *args: Any) -> Any:
    return cls.__new__(cls, *args[:-1], **args[-1])


def _pair(key: Any) -> tuple[Step, Step]:
    hashable = isinstance(key, (str, int, tuple))
    return Step("inside", "key"), Step("key", key) if hashable else Step("inside", "value")


def _state(state: Any) -> tuple[list[Step], list[Any]]:
    if state is None:
        return [], []
    if type(state) is dict and all(isinstance(name, str) for name in state):
        return [Step("attr", name) for name in state], list(state.values())
    return [Step("inside", "state")], [state]


def _restore(x: Any, state: Any) -> None:
    """Gives an object its state, as unpickling does."""
    if hasattr(x, "__setstate__"):
        x.__setstate__(state)
        return
    own, slotted = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    x.__dict__.update(own or {})
    for name, value in (slotted or {}).items():
        object.__setattr__(x, name, value)


class WeakNode(Node):
    """Weak references to parts that the model also holds: to the new part in the new model."""

    back = True

    def open(self, x: Any) -> Opened:
        return (Step("inside", "()"),), [], x

    def referents(self, static: Any) -> tuple[Any, ...]:
        return (static(),)

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return weakref.ref(values[0]) if values else static


class ClosedNode(Node):
    """Types that nothing opens."""

    def open(self, x: Any) -> Opened | None:
        raise Closed(f"{type(x).__name__} can't be taken apart")


OBJECT = ObjectNode()
_SLOTS = SlotsNode()
_REDUCE = ReduceNode()
CLOSED = ClosedNode()
WEAK = WeakNode()

_BY_TYPE: dict[type, Kind] = {
    types.FunctionType: FunctionNode(),
    types.MethodType: MethodNode(),
    types.CellType: CellNode(),
    types.BuiltinFunctionType: ReduceNode(),
    types.GeneratorType: CLOSED,
    weakref.ref: WEAK,
}


def find(cls: type) -> tuple[bool, Kind]:
    """Returns True and the kind of any type; the last of the finders."""
    if cls in _BY_TYPE:
        return True, _BY_TYPE[cls]
    if issubclass(cls, (io.IOBase, weakref.ref, staticmethod, classmethod, property)):
        return True, CLOSED
    if _is_made_of_attributes(cls):
        has_slots = bool(slots(cls)) or not hasattr(cls, "__dict__")
        return True, _SLOTS if has_slots else OBJECT
    return True, _REDUCE


def _is_made_of_attributes(cls: type) -> bool:
    """Returns whether an instance is its attributes and nothing else, as far as pickle knows."""
    if not all(_is_python_class(base) for base in cls.__mro__[:-1]):
        return False
    if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return True
    own = ("__setstate__", "__getnewargs__", "__getnewargs_ex__", "__copy__", "__deepcopy__")
    if any(hasattr(cls, name) for name in own[:3]):
        return False
    defaults = ("__reduce__", "__reduce_ex__", "__getstate__")
    return all(getattr(cls, name) is getattr(object, name) for name in defaults)


def _is_python_class(cls: type) -> bool:
    """Returns whether a class was made by a `class` statement (C types hold what we can't see)."""
    own = cls.__dict__
    return (
        "__dict__" in own
        or "__slots__" in own
        or (bool(cls.__flags__ & (1 << 9)) and ("__weakref__" in own or _has_python_parent(cls)))
    )


def _has_python_parent(cls: type) -> bool:
    return any(base is not object and _is_python_class(base) for base in cls.__bases__)
