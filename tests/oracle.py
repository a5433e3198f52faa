"""Brute force: what the laws are checked against. Nothing here uses the library's own machinery.

Sharing is decided by the set of all bytes of all elements; order of elements by explicit index
arrays; models are walked by a small walker that knows the test models only.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import jax
import numpy as np
import torch

import tied

Positions = tuple[np.ndarray, int]
LIBRARY_ARRAYS = (np.ndarray, torch.Tensor, jax.Array, tied.View)


def is_array(x: Any) -> bool:
    return isinstance(x, LIBRARY_ARRAYS) and not getattr(x.dtype, "hasobject", False)


# ------------------------------------------------------------------------------------- memory


def grid(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The offset of every element: the sum of index times stride, written out."""
    offsets = np.zeros(shape, np.int64)
    for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(length, dtype=np.int64) * stride
        offsets += steps.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return offsets


def positions(array: Any) -> Positions:
    """The place of each element's first byte, and the bytes of an element.

    JAX arrays have no place of their own, so each base gets one from its identity, far from all
    others (the arrays of these tests are smaller than 4096 bytes).
    """
    if isinstance(array, np.ndarray):
        start = array.__array_interface__["data"][0]
        return start + grid(array.shape, array.strides), array.itemsize
    if isinstance(array, torch.Tensor):
        each = array.element_size()
        strides = tuple(each * stride for stride in array.stride())
        return array.data_ptr() + grid(tuple(array.shape), strides), each
    if isinstance(array, tied.View):
        places, each = positions(array.base)
        return places.reshape(-1)[array.layout.index()], each
    assert array.nbytes < 4096
    return (id(array) << 12) + np.arange(array.size).reshape(array.shape) * array.itemsize, (
        array.itemsize
    )


def byte_set(place: Positions) -> set[int]:
    starts, each = place
    return {int(start) + k for start in starts.reshape(-1) for k in range(each)}


def overlap(a: Positions, b: Positions) -> bool:
    return not byte_set(a).isdisjoint(byte_set(b))


def pattern(places: list[Positions], unit: str = "bytes") -> list[list[int]]:
    """Which bytes (or elements) of the arrays are one: each numbered by its first appearance."""
    numbers: dict[int, int] = {}
    found = []
    for starts, each in places:
        flat = starts.reshape(-1)
        if unit == "bytes":
            flat = (flat[:, None] + np.arange(each)).reshape(-1)
        found.append([numbers.setdefault(int(place), len(numbers)) for place in flat])
    return found


def groups(places: list[Positions]) -> list[set[int]]:
    """The arrays by number, joined where two have a byte in common; in order of appearance."""
    found: list[tuple[set[int], set[int]]] = []
    for number, place in enumerate(places):
        members, covered = {number}, byte_set(place)
        rest = []
        for other, owned in found:
            if owned.isdisjoint(covered):
                rest.append((other, owned))
            else:
                members, covered = members | other, covered | owned
        found = [*rest, (members, covered)]
    return sorted((members for members, _ in found), key=min)


def span_bytes(places: list[Positions], *, whole: bool = False) -> int:
    """From the first byte to the last; with `whole`, widened to whole elements of the largest."""
    covered = set().union(*(byte_set(place) for place in places))
    if not covered:
        return 0
    unit = max(each for _, each in places) if whole else 1
    return -(-(max(covered) + 1) // unit) * unit - min(covered) // unit * unit


# ------------------------------------------------------------------------------------- values


def numpy(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().resolve_conj().resolve_neg()
        return array.view(torch.int16).numpy() if array.dtype == torch.bfloat16 else array.numpy()
    return np.asarray(array)


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and the value's bytes: equal only if equal bit for bit."""
    return str(array.dtype), tuple(array.shape), numpy(array).tobytes()


# ------------------------------------------------------------------------------------ walking

Children = list[tuple[Any, Any]]


def children(x: Any) -> Children | None:
    """Steps and children of a container of the test models; None for anything else."""
    if is_array(x) or isinstance(x, type):
        return None
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return [(name, getattr(x, name)) for name in x._fields]
    if isinstance(x, list | tuple | collections.deque):
        return list(enumerate(x))
    if isinstance(x, np.ndarray):
        return list(enumerate(x.reshape(-1).tolist()))
    if isinstance(x, torch.nn.Module):
        plain = {k: v for k, v in vars(x).items() if not k.startswith("_")}
        return list({**x._parameters, **x._buffers, **plain, **x._modules}.items())
    if isinstance(x, functools.partial):
        return [("func", x.func), ("args", x.args), ("keywords", x.keywords)]
    if dataclasses.is_dataclass(x):
        return [(f.name, getattr(x, f.name)) for f in dataclasses.fields(x)]
    if attrs.has(type(x)):
        return [(f.name, getattr(x, f.name)) for f in attrs.fields(type(x))]
    if type(x).__module__ in ("recipes", "models", "models_jax") and hasattr(x, "__dict__"):
        return list(vars(x).items())
    return None


def walk(model: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every container (once) and every array (at each place), with its path, in order."""
    seen: set[int] = set()
    stack: list[tuple[tuple[Any, ...], Any]] = [((), model)]
    while stack:
        path, x = stack.pop()
        inner = children(x)
        if inner is None:
            if is_array(x):
                yield path, x
            continue
        if id(x) in seen and not (isinstance(x, tuple) and not x):
            continue
        seen.add(id(x))
        yield path, x
        stack.extend(((*path, step), child) for step, child in reversed(inner))


def leaves(model: Any) -> list[tuple[str, Any]]:
    """The arrays by dotted path, in order."""
    return [(".".join(map(str, path)), x) for path, x in walk(model) if is_array(x)]


def arrays(model: Any) -> list[Any]:
    return [array for _, array in leaves(model)]


def resolve(model: Any, path: str) -> Any:
    """What stands at a dotted path."""
    for step in path.split(".") if path else []:
        inner = children(model)
        assert inner is not None, f"nothing below {model!r} on the way to {path}"
        model = {str(key): child for key, child in inner}[step]
    return model


def paired(a: Any, b: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Walk two models side by side; types, steps and shared objects have to agree."""
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    stack = [((), a, b)]
    while stack:
        path, x, y = stack.pop()
        assert type(x) is type(y), f"{path}: {type(x)} became {type(y)}"
        inner = children(x)
        if inner is None and not is_array(x):
            yield path, x, y
            continue
        known = id(x) in there
        if not (isinstance(x, tuple) and not x):
            assert there.setdefault(id(x), id(y)) == id(y), f"{path}: one object became two"
            assert back.setdefault(id(y), id(x)) == id(x), f"{path}: two objects became one"
        if known and inner is not None:
            continue
        yield path, x, y
        if inner is not None:
            others = children(y)
            assert others is not None
            assert [step for step, _ in inner] == [step for step, _ in others], path
            stack += [
                ((*path, step), child, other)
                for (step, child), (_, other) in reversed(list(zip(inner, others, strict=True)))
            ]


def assert_same(a: Any, b: Any, f: Callable[[Any], Any] | None = None) -> None:
    """Same types, settings, shared objects; values of `b` are those of `a`, or of `f(a)`."""
    for path, x, y in paired(a, b):
        if is_array(x):
            assert bits(f(x) if f else x) == bits(y), path
        elif isinstance(x, collections.defaultdict):
            assert x.default_factory is y.default_factory, path
        elif isinstance(x, collections.deque):
            assert x.maxlen == y.maxlen, path
        elif children(x) is None:
            assert x is y or x == y, path


def holds_array(model: Any) -> bool:
    return bool(arrays(model))


def snapshot(model: Any) -> list[Any]:
    """Objects by identity, and the bytes of the arrays: equal only if nothing was changed."""
    found: list[Any] = []
    for path, x in walk(model):
        inner = children(x)
        if inner is None:
            found.append((path, id(x), bits(x), flags(x)))
        else:
            found.append((path, id(x), [(step, id(child)) for step, child in inner]))
    return found


def flags(array: Any) -> tuple[Any, ...]:
    if isinstance(array, np.ndarray):
        return (array.flags.writeable, array.strides)
    if isinstance(array, torch.Tensor):
        return (array.requires_grad, array.stride(), array.data_ptr(), array.grad_fn)
    return ()


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))
