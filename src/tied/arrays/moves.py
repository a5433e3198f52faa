"""A function of JAX arrays that only moves elements, as the same function of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tied.arrays.computed import plain

Function = Callable[[Any], Any]


def of_numpy(function: Function, x: Any) -> Function:
    """Returns what reads of a NumPy array what `function` reads of a JAX array like `x`.

    `lambda W: jnp.swapaxes(W, 0, 1)` gives a JAX array of whatever it is given: its strides can't
    be looked at, but its jaxpr can. A function that JAX can't trace is written for NumPy, and
    returned as it is.
    """
    abstract: Any = jax.ShapeDtypeStruct
    like = abstract(x.shape, x.dtype)
    try:
        program = jax.make_jaxpr(lambda a: plain(function(a)))(like).jaxpr
    except _PROBLEMS:
        return function
    if _moves_only(program):
        return lambda a: _run(program, a)
    return lambda a: _tried(function, a)


_PROBLEMS = (jax.errors.JAXTypeError, TypeError, ValueError, AttributeError, IndexError)


def _tried(function: Function, a: Any) -> Any:
    """Returns what a function of JAX arrays gives of a NumPy array, or None (`a.diagonal()`)."""
    try:
        return function(a)
    except _PROBLEMS:
        return None


def _moves_only(program: Any) -> bool:
    """Returns whether a jaxpr of one argument gives it back with its elements moved."""
    if len(program.invars) != 1 or len(program.outvars) != 1:
        return False
    known = {id(program.invars[0])}
    for equation in program.eqns:
        inner = _inner(equation)
        if equation.primitive.name not in _MOVES and inner is None:
            return False
        if len(equation.invars) != 1 or id(equation.invars[0]) not in known:
            return False
        if inner is not None and not _moves_only(inner):
            return False
        known.update(map(id, equation.outvars))
    return id(program.outvars[0]) in known


def _inner(equation: Any) -> Any:
    """Returns the jaxpr that a `jit` inside of a jaxpr calls."""
    return equation.params["jaxpr"].jaxpr if equation.primitive.name in ("jit", "pjit") else None


def _run(program: Any, x: Any) -> Any:
    values = {id(program.invars[0]): x}
    for equation in program.eqns:
        inner, value = _inner(equation), values[id(equation.invars[0])]
        if inner is not None:
            made = _run(inner, value)
        else:
            made = _MOVES[equation.primitive.name](value, **equation.params)
        values[id(equation.outvars[0])] = made
    return values[id(program.outvars[0])]


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    ones = [1] * len(shape)
    for axis, length in zip(broadcast_dimensions, x.shape, strict=True):
        ones[axis] = length
    return np.broadcast_to(x.reshape(ones), shape)


_MOVES: dict[str, Callable[..., Any]] = {
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "slice": _slice,
    "broadcast_in_dim": _broadcast,
    "conj": lambda x, **_: x.conj(),
    "neg": lambda x, **_: -x,
}
