"""Hypothesis strategies for recipes: random models whose sharing is planned.

One real NumPy array goes along with each chain of views, so that only operations that give a view
are drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from recipes import (
    CLASSES,
    DICTS,
    MUTABLE,
    SEQUENCES,
    STRUCTURED,
    Buffer,
    Const,
    Leaf,
    Node,
    Op,
    Reading,
    Recipe,
    look_numpy,
)

LAW = settings(
    max_examples=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

DTYPES = {
    "numpy": ("float32", "float64", "float16", "int32", "complex64", "structured"),
    "torch": ("float32", "float64", "bfloat16", "int32", "complex64"),
    "jax": ("float32", "float16", "int32", "complex64"),
}
USUAL = ((6,), (4, 3), (3, 4), (5, 5), (2, 3, 4), (12,), (2, 2, 3))
ODD = ((1,), (), (0, 3), (2, 1, 3))
SHAPES = USUAL * 4 + ODD
KINDS = ("plain", *CLASSES, *DICTS, *SEQUENCES)
ROLES = ("plain", "parameter", "buffer")
CONSTS = (None, 4, 2.5, "relu", True, (), "4", 1j)


@st.composite
def slices(draw: Any, array: np.ndarray) -> Op:
    axis = draw(st.integers(0, array.ndim - 1))
    start = draw(st.integers(0, array.shape[axis]))
    stop = draw(st.integers(start, array.shape[axis]))
    return ("slice", axis, start, stop, draw(st.integers(1, 3)))


def halves(shape: tuple[int, ...]) -> list[Op]:
    """Parts that touch and interleave without a common element: what is easily taken for a tie."""
    found: list[Op] = []
    for axis, length in enumerate(shape):
        found += [("slice", axis, 0, length // 2, 1), ("slice", axis, length // 2, length, 1)]
        found += [("slice", axis, 0, length, 2), ("slice", axis, 1, length, 2)]
    return found


@st.composite
def reshapes(draw: Any, array: np.ndarray) -> Op:
    """Any factorisation of the element count that NumPy can express as a view."""
    count = array.size
    first = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0] or [1]))
    shapes = [(first, count // first), (count,), (count // first, 1, first)] if count else [(0, 2)]
    fitting = [shape for shape in shapes if is_view(array, shape)]
    return ("reshape", draw(st.sampled_from(fitting))) if fitting else ("again",)


def is_view(array: np.ndarray, shape: tuple[int, ...]) -> bool:
    try:
        np.reshape(array, shape, copy=False)
    except ValueError:
        return False
    return True


def possible(array: np.ndarray, library: str, reinterpret: bool) -> list[Any]:
    """The operations that give a view of this array: each an Op, or a strategy for one."""
    ndim = array.ndim
    found: list[Any] = [("newaxis", 0)]
    if library != "jax":
        found.append(("again",))
        found.append(("broadcast", (2, *array.shape)))
    if ndim:
        found += [slices(array), reshapes(array)]
        axes = st.integers(0, ndim - 1)
        if library != "torch":
            found.append(axes.map(lambda axis: ("flip", axis)))
        found += [st.sampled_from(halves(array.shape)), st.sampled_from(halves(array.shape))]
        lengths = [axis for axis in range(ndim) if array.shape[axis]]
        if lengths:
            found.append(st.sampled_from(lengths).map(lambda axis: ("int", axis, -1)))
    if ndim == 1 and array.size >= 3 and library != "jax":
        found.append(("window", 3))
    if ndim >= 2:
        found += [("transpose",), ("transpose",)]
        found.append(st.permutations(range(ndim)).map(lambda axes: ("permute", tuple(axes))))
    if ndim == 2:
        found.append(st.integers(-1, 1).map(lambda offset: ("diagonal", offset)))
    return found + bits(array, library, reinterpret)


def bits(array: np.ndarray, library: str, reinterpret: bool) -> list[Any]:
    """The operations that depend on the dtype."""
    found: list[Any] = []
    if array.dtype.kind == "c":
        if library == "torch":
            found.append(("conj",))
        if library == "jax" and array.ndim == 2:
            found.append(("adjoint",))
        if reinterpret:
            found += [("real",), ("imag",)]
    if reinterpret and array.dtype == STRUCTURED:
        found += [("field", name) for name in "xnv"]
    dense = array.ndim and array.size and array.strides[-1] == array.itemsize
    if reinterpret and array.dtype.kind in "fi" and dense:
        found.append(("bytes",))
    return found


@st.composite
def chains(
    draw: Any, buffer: Buffer, library: str, reinterpret: bool, apart: bool
) -> tuple[Op, ...]:
    array = buffer.numpy()
    if buffer.dtype == "bfloat16":
        array = array.astype("float16")
    ops: list[Op] = []
    if apart and array.ndim:
        ops.append(draw(st.sampled_from(halves(array.shape))))
        array = look_numpy(array, ops[0])
    for _ in range(draw(st.sampled_from([1, 0, 1, 2, 2, 3]))):
        op = draw(st.sampled_from(possible(array, library, reinterpret)))
        op = op if isinstance(op, tuple) else draw(op)
        array = array if op[0] == "conj" else look_numpy(array, twin(op))
        ops.append(op)
    return tuple(ops)


def twin(op: Op) -> Op:
    return ("transpose",) if op[0] == "adjoint" else op


@st.composite
def buffers(draw: Any, dtypes: tuple[str, ...]) -> Buffer:
    shape = draw(st.sampled_from(SHAPES))
    return Buffer(draw(st.sampled_from(dtypes)), shape, draw(st.sampled_from([1, 1, 7])))


@st.composite
def places(draw: Any, count: int, roles: tuple[str, ...]) -> list[Leaf]:
    """Every reading at least once, some twice, in any order."""
    readings = list(range(count))
    if count:
        readings += draw(st.lists(st.sampled_from(readings), max_size=2))
    order = draw(st.permutations(readings))
    return [Leaf(reading, draw(st.sampled_from(roles))) for reading in order]


@st.composite
def nodes(draw: Any, items: list[Any], kinds: tuple[str, ...]) -> Node:
    """All the items, in nested containers of at most three parts."""
    items = list(items)
    for _ in range(draw(st.integers(0, 2))):
        items.insert(draw(st.integers(0, len(items))), Const(draw(st.sampled_from(CONSTS))))
    more = draw(st.integers(0, 3))
    while len(items) > 3 or more > 0:
        more -= len(items) <= 3
        start = draw(st.integers(0, max(len(items) - 2, 0)))
        chunk = items[start : start + draw(st.integers(len(items) > 3, 2)) + 1]
        items[start : start + len(chunk)] = [Node(draw(st.sampled_from(kinds)), tuple(chunk))]
    return Node(draw(st.sampled_from(kinds)), tuple(items))


def numbered(node: Node) -> list[Node]:
    """The nodes in the order in which a build makes them."""
    found = [node]
    for child in node.children:
        if isinstance(child, Node):
            found += numbered(child)
    return found


@st.composite
def links(draw: Any, root: Node) -> tuple[tuple[int, int], ...]:
    """Up to two more edges, from a mutable container to any container: sharing or a cycle."""
    found = numbered(root)
    sources = [number for number, node in enumerate(found) if node.kind in MUTABLE]
    if not sources:
        return ()
    pair = st.tuples(st.sampled_from(sources), st.integers(0, len(found) - 1))
    return tuple(draw(st.lists(pair, max_size=2)))


@st.composite
def recipes(
    draw: Any,
    library: str,
    *,
    reinterpret: bool = True,
    linked: bool = True,
    modules: bool = True,
    dtypes: tuple[str, ...] = (),
) -> Recipe:
    """A random model of one array library, and the plan of what is shared in it.

    Args:
        library: "numpy", "torch" or "jax".
        reinterpret: Allow byte views, structured fields, real and imaginary parts.
        linked: Allow shared containers and cycles.
        modules: Allow torch modules and parameters.
        dtypes: Of the buffers, if not all that the library has.
    """
    made = draw(st.lists(buffers(dtypes or DTYPES[library]), min_size=1, max_size=2))
    bits_too = reinterpret and library != "jax"
    apart = draw(st.sampled_from([False, True]))
    reads: list[Reading] = []
    for _ in range(draw(st.sampled_from([2, 3, 4, 5, 6, 1, 0]))):
        index = draw(st.sampled_from([0, 0, len(made) - 1]))
        ops = draw(chains(made[index], library, bits_too, apart))
        reads.append(Reading(index, ops))
    torch = library == "torch" and modules
    leaves = draw(places(len(reads), ROLES if torch else ROLES[:1]))
    root = draw(nodes(leaves, (*KINDS, *["module"] * 4) if torch else KINDS))
    return Recipe(library, tuple(made), tuple(reads), root, draw(links(root)) if linked else ())
