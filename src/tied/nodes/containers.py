"""Python's containers."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tied._node import Kind, Node, Opened, kinds
from tied._path import Step


class ListNode(Node):
    """Lists."""

    step = "index"
    early = True

    def open(self, x: Any) -> Opened:
        return range(len(x)), list(x), None

    def shell(self, cls: type, static: Any) -> Any:
        return []

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        x.extend(values)


class DequeNode(ListNode):
    """Deques; the greatest length is kept."""

    def open(self, x: Any) -> Opened:
        return range(len(x)), list(x), x.maxlen

    def shell(self, cls: type, static: Any) -> Any:
        return deque(maxlen=static)


class TupleNode(Node):
    """Tuples."""

    step = "index"

    def open(self, x: Any) -> Opened | None:
        return (range(len(x)), list(x), None) if x else None

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return tuple(values)


class NamedTupleNode(Node):
    """Named tuples, those of C types too (`torch.return_types`, `time.struct_time`)."""

    def open(self, x: Any) -> Opened | None:
        return x._fields, list(x), None

    def build(self, cls: Any, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return tuple.__new__(cls, values)


class DictNode(Node):
    """Dicts whose keys hold no array."""

    step = "key"
    early = True

    def open(self, x: Any) -> Opened:
        for key in x:
            if type(key) is not str and not is_plain_key(key):
                return ANY_KEYS.open(x)
        return tuple(x), list(x.values()), getattr(x, "default_factory", None)

    def shell(self, cls: Any, static: Any) -> Any:
        return cls(static) if cls is defaultdict else cls()

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        if keys and type(keys[0]) is Step:
            pairs = zip(values[::2], values[1::2], strict=True)
        else:
            pairs = zip(keys, values, strict=True)
        x.update(pairs)


class AnyKeysNode(Node):
    """Dicts some keys of which are arrays or hold some: the keys are children too."""

    def open(self, x: Any) -> Opened:
        keys: list[Step] = []
        values: list[Any] = []
        for position, (key, value) in enumerate(x.items()):
            named = is_plain_key(key)
            keys += [
                Step("nth key", position),
                Step("key", key) if named else Step("nth value", position),
            ]
            values += [key, value]
        return tuple(keys), values, getattr(x, "default_factory", None)


ANY_KEYS = AnyKeysNode()


def is_plain_key(key: Any) -> bool:
    """Returns whether a key of a dict holds no array: a number, a string, a tuple of such."""
    if type(key) is tuple:
        return all(is_plain_key(part) for part in key)
    return kinds[type(key)] is None


class MappingProxyNode(Node):
    """Read-only views of dicts."""

    step = "key"

    def open(self, x: Any) -> Opened:
        return DICT.open(dict(x))

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        inner: dict[Any, Any] = {}
        DICT.fill(inner, keys, values, static)
        return types.MappingProxyType(inner)


class SetNode(Node):
    """Sets that hold more than numbers and strings."""

    def open(self, x: Any) -> Opened | None:
        if all(map(is_plain_key, x)):
            return None
        return [Step("nth key", i) for i in range(len(x))], list(x), None

    def build(self, cls: Any, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return cls(values)


class PartialNode(Node):
    """`functools.partial`."""

    def open(self, x: Any) -> Opened:
        return ("func", "args", "keywords"), [x.func, x.args, x.keywords], dict(x.__dict__)

    def build(self, cls: Any, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        func, args, keywords = values
        x = cls(func, *args, **keywords)
        x.__dict__.update(static)
        return x


class ObjectArrayNode(Node):
    """NumPy arrays of Python objects."""

    step = "index"
    early = True

    def open(self, x: Any) -> Opened | None:
        if x.dtype != object:
            return None
        keys = range(len(x)) if x.ndim == 1 else list(np.ndindex(x.shape))
        return keys, x.ravel().tolist(), x.shape

    def shell(self, cls: type, static: Any) -> Any:
        return np.empty(static, dtype=object)

    def fill(self, x: Any, keys: Sequence[Any], values: list[Any], static: Any) -> None:
        for key, value in zip(keys, values, strict=True):
            x[key] = value


DICT = DictNode()
OBJECT_ARRAY = ObjectArrayNode()

_EXACT: dict[type, Node] = {
    list: ListNode(),
    tuple: TupleNode(),
    dict: DICT,
    OrderedDict: DICT,
    defaultdict: DICT,
    deque: DequeNode(),
    set: SetNode(),
    frozenset: SetNode(),
    partial: PartialNode(),
    types.MappingProxyType: MappingProxyNode(),
}
_NAMED_TUPLE = NamedTupleNode()


def find(cls: type) -> tuple[bool, Kind]:
    """Returns whether `cls` is a container of Python's, and its kind."""
    if cls in _EXACT:
        return True, _EXACT[cls]
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and not hasattr(cls, "__dict__"):
        return True, _NAMED_TUPLE
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return True, _NAMED_TUPLE
    return False, None
