"""Models as recipes: plain data that prints, shrinks and builds a fresh model each time.

A recipe says which arrays share which bytes, so it knows the right answer to every question that
`tied` is asked; nothing here reads an address.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import attrs
import jax.numpy as jnp
import numpy as np
import torch

import tied

LIBRARIES = ("numpy", "torch", "jax")
STRUCTURED = np.dtype([("x", "f4"), ("n", "i4"), ("v", "f4", (2,))])
Op = tuple[Any, ...]


class Triple(NamedTuple):
    a: Any
    b: Any
    c: Any


@dataclass(eq=False)
class Record:
    a: Any
    b: Any
    c: Any


@dataclass(frozen=True, eq=False)
class Frozen:
    a: Any
    b: Any
    c: Any


@dataclass(slots=True, eq=False)
class Slotted:
    a: Any
    b: Any
    c: Any


@attrs.define(eq=False)
class Attrs:
    a: Any
    b: Any
    c: Any


class Plain:
    """An object without a schema; __init__ must never run again."""

    def __init__(self, *, built_by_hand: bool) -> None:
        assert built_by_hand


class Module(torch.nn.Module):
    """A torch module whose children arrive as parameters, buffers or plain attributes."""


CLASSES: dict[str, Callable[..., Any]] = {
    "namedtuple": Triple,
    "dataclass": Record,
    "frozen": Frozen,
    "slots": Slotted,
    "attrs": Attrs,
}
DICTS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": lambda items: collections.defaultdict(list, items),
}
SEQUENCES: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": collections.deque,
}
MUTABLE = ("dict", "OrderedDict", "defaultdict", "list", "deque", "plain")


@dataclass(frozen=True)
class Buffer:
    """Memory of its own: `shape` elements that count up from `start`."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    def numpy(self) -> np.ndarray:
        count = int(np.prod(self.shape))
        values = np.arange(self.start, self.start + count)
        if self.dtype == "structured":
            array = np.zeros(count, STRUCTURED)
            array["x"], array["n"] = values, -values
            array["v"] = values[:, None] + np.arange(2) / 2
            return array.reshape(self.shape)
        if self.dtype.startswith("complex"):
            return (values + 1j * (values + 0.5)).astype(self.dtype).reshape(self.shape)
        return values.astype("float32" if self.dtype == "bfloat16" else self.dtype).reshape(
            self.shape
        )

    def build(self, library: str) -> Any:
        if library == "numpy":
            return self.numpy()
        if library == "torch":
            return torch.from_numpy(self.numpy()).to(getattr(torch, self.dtype))
        return jnp.array(self.numpy(), dtype=self.dtype)


@dataclass(frozen=True)
class Reading:
    """One array object: a buffer, read through a chain of view operations."""

    buffer: int
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Leaf:
    """A place that holds the array `reading`; in a torch module as `role`."""

    reading: int
    role: str = "plain"


@dataclass(frozen=True)
class Const:
    value: Any


@dataclass(frozen=True)
class Node:
    kind: str
    children: tuple[Any, ...]


@dataclass
class Built:
    """A model, and for each array in it (by id) the bytes that the plan says it reads."""

    model: Any
    truth: dict[int, tuple[np.ndarray, int]] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """Buffers, arrays over them, and the containers that hold those.

    `links` are (from, to) numbers of nodes: the first, a mutable one, gets the second as one more
    child, which makes shared containers and cycles.
    """

    library: str
    buffers: tuple[Buffer, ...]
    readings: tuple[Reading, ...]
    root: Node
    links: tuple[tuple[int, int], ...] = ()

    @property
    def reinterprets(self) -> bool:
        """True if some array reads the bits of its buffer as another dtype."""
        return any(op[0] in REINTERPRET for reading in self.readings for op in reading.ops)

    @property
    def casts(self) -> bool:
        """True if every buffer is of real floating dtype and no array reinterprets bits."""
        return not self.reinterprets and all("float" in b.dtype for b in self.buffers)

    def positions(self, number: int) -> tuple[np.ndarray, int]:
        """The place of each element's first byte, over all buffers, and the element's bytes."""
        reading = self.readings[number]
        buffer = self.buffers[reading.buffer]
        itemsize = ITEMSIZE[buffer.dtype]
        places = np.arange(int(np.prod(buffer.shape))).reshape(buffer.shape) * itemsize
        for op in reading.ops:
            places, itemsize = follow(places, itemsize, op)
        return places + 1_000_000 * reading.buffer, itemsize

    def build(self, fill: Callable[[int, Any], Any] | None = None) -> Built:
        """A fresh model; `fill` may put something else than the array at each leaf."""
        bases = [buffer.build(self.library) for buffer in self.buffers]
        arrays = [look(bases[r.buffer], r.ops, self.library) for r in self.readings]
        built = Built(None, keep=[*bases, *arrays])
        made: dict[Leaf, Any] = {}

        def leaf(spec: Leaf) -> Any:
            if fill is not None:
                return fill(spec.reading, arrays[spec.reading])
            if spec not in made:
                made[spec] = wrap(arrays[spec.reading], spec.role)
                built.truth[id(made[spec])] = self.positions(spec.reading)
            return made[spec]

        def part(spec: Any) -> Any:
            if isinstance(spec, Leaf):
                return leaf(spec)
            if isinstance(spec, Const):
                return spec.value
            number = len(built.nodes)
            built.nodes.append(None)
            children = [part(child) for child in spec.children]
            built.nodes[number] = node = contain(spec, children)
            return node

        built.model = part(self.root)
        for index, (source, target) in enumerate(self.links):
            link(built.nodes[source], f"link{index}", built.nodes[target])
        return built


def wrap(array: Any, role: str) -> Any:
    if role != "parameter":
        return array
    grows = array.is_floating_point() or array.is_complex()
    return torch.nn.Parameter(array, requires_grad=grows)


def contain(spec: Node, children: list[Any]) -> Any:
    if spec.kind in SEQUENCES:
        return SEQUENCES[spec.kind](children)
    if spec.kind in CLASSES:
        return CLASSES[spec.kind](*children, *[None] * (3 - len(children)))
    named = [(f"n{index}", child) for index, child in enumerate(children)]
    if spec.kind in DICTS:
        return DICTS[spec.kind](named)
    node = Module() if spec.kind == "module" else Plain(built_by_hand=True)
    for (name, child), part in zip(named, spec.children, strict=True):
        if spec.kind == "module" and getattr(part, "role", "") == "buffer":
            node.register_buffer(name, child)
        else:
            setattr(node, name, child)
    return node


def link(source: Any, name: str, target: Any) -> None:
    if isinstance(source, dict):
        source[name] = target
    elif isinstance(source, list | collections.deque):
        source.append(target)
    else:
        setattr(source, name, target)


# ---------------------------------------------------------------------------- view operations

ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "complex64": 8,
    "structured": STRUCTURED.itemsize,
}
REINTERPRET = ("real", "imag", "bytes", "field")


def selection(op: Op) -> tuple[Any, ...]:
    """The index that the operation stands for, or nothing."""
    match op:
        case ("slice", axis, start, stop, step):
            return (*[slice(None)] * axis, slice(start, stop, step))
        case ("flip", axis):
            return (*[slice(None)] * axis, slice(None, None, -1))
        case ("int", axis, index):
            return (*[slice(None)] * axis, index, ...)
        case ("newaxis", axis):
            return (*[slice(None)] * axis, None)
        case ("again",):
            return (...,)
    return ()


def view(array: np.ndarray, op: Op) -> np.ndarray:
    """The operation in NumPy, where it does not depend on the dtype."""
    if index := selection(op):
        return array[index]
    match op:
        case ("transpose",):
            return array.T
        case ("permute", axes):
            return array.transpose(axes)
        case ("reshape", shape):
            return array.reshape(shape)
        case ("diagonal", offset):
            return array.diagonal(offset)
        case ("broadcast", shape):
            return np.broadcast_to(array, shape)
        case ("window", width):
            return np.lib.stride_tricks.sliding_window_view(array, width, axis=0, writeable=True)
    raise AssertionError(op)


def follow(places: np.ndarray, itemsize: int, op: Op) -> tuple[np.ndarray, int]:
    """The operation on the places of the elements, instead of on the elements."""
    match op:
        case ("conj",):
            return places, itemsize
        case ("adjoint",):
            return places.T, itemsize
        case ("real",):
            return places, itemsize // 2
        case ("imag",):
            return places + itemsize // 2, itemsize // 2
        case ("bytes",):
            each = places[..., None] + np.arange(itemsize)
            return each.reshape(*places.shape[:-1], places.shape[-1] * itemsize), 1
        case ("field", "v"):
            start = STRUCTURED.fields["v"][1]
            return places[..., None] + start + 4 * np.arange(2), 4
        case ("field", name):
            dtype, start = STRUCTURED.fields[name][:2]
            return places + start, dtype.itemsize
    return view(places, op), itemsize


def look(base: Any, ops: tuple[Op, ...], library: str) -> Any:
    for op in ops:
        base = LOOK[library](base, op)
    return base


def look_numpy(array: np.ndarray, op: Op) -> np.ndarray:
    match op:
        case ("real",):
            return array.real
        case ("imag",):
            return array.imag
        case ("bytes",):
            return array.view(np.uint8)
        case ("field", name):
            return array[name]
    return view(array, op)


def look_torch(array: torch.Tensor, op: Op) -> torch.Tensor:
    if index := selection(op):
        return array[index]
    match op:
        case ("transpose",):
            return array.permute(*reversed(range(array.ndim)))
        case ("permute", axes):
            return array.permute(axes)
        case ("reshape", shape):
            return array.view(shape)
        case ("diagonal", offset):
            return array.diagonal(offset)
        case ("broadcast", shape):
            return array.expand(shape)
        case ("window", width):
            return array.unfold(0, width, 1)
        case ("conj",):
            return array.conj()
        case ("real",):
            return array.real
        case ("imag",):
            return array.imag
        case ("bytes",):
            return array.view(torch.uint8)
    raise AssertionError(op)


def look_jax(array: Any, op: Op) -> Any:
    if index := selection(op):
        return tied.view(array, lambda a: a[index])
    match op:
        case ("transpose",):
            return tied.transpose(array)
        case ("permute", axes):
            return tied.permute(array, axes)
        case ("reshape", shape):
            return tied.view(array, lambda a: a.reshape(shape))
        case ("diagonal", offset):
            return tied.diagonal(array, offset)
        case ("adjoint",):
            return tied.adjoint(array)
    raise AssertionError(op)


LOOK = {"numpy": look_numpy, "torch": look_torch, "jax": look_jax}
