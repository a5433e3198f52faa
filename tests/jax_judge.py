"""Whether a tie of JAX's survival matrix is still one after an operation.

By itself a framework has a tie where one object stands at two places; JAX knows no other. After
`tied` the model's arrays cross each once, and every member is what the oracle of jax_kinds.py reads
of the memory: now, for other contents of the memory, and after a step down a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oracle
from jax_hosts import Host, sum_of
from jax_kinds import KINDS, Kind

RATE = 0.1
Change = Callable[[np.ndarray], np.ndarray]


def is_one(host: Host, model: Any, kind: Kind) -> bool:
    """Whether the framework holds one object at all places of the members."""
    first, *others = host.held(model, kind)
    return all(other is first for other in others)


def judge_plain(host: Host, model: Any, kind: Kind, now: np.ndarray) -> str:
    """Returns what became of a model that does not know of `tied`."""
    if is_one(host, model, kind) is not kind.tied:
        return "lost" if kind.tied else "made"
    return "kept" if holds(host, model, kind, now) else "wrong"


def judge_tied(host: Host, model: Any, name: str, now: np.ndarray) -> str:
    """Returns what became of a model after `tied.tie`."""
    kind = KINDS[name]
    static, leaves = host.split(model)
    if len(leaves) != kind.pieces:
        return "lost" if len(leaves) > kind.pieces else "made"
    # Read where all other models are: JAX compiles each reading for each device.
    leaves = [jnp.array(np.asarray(leaf)) for leaf in leaves]
    if not holds(host, host.merge(static, leaves), kind, now):
        return "wrong"
    # What a model does with other arrays is said by its static part alone, so ask each once.
    known = _known.setdefault((host.title, name), [])
    if static not in known:
        found = judge_static(host, static, leaves, kind, now)
        if found != "kept":
            return found
        known.append(static)
    return "kept"


_known: dict[tuple[str, str], list[Any]] = {}


def judge_static(host: Host, static: Any, leaves: list[Any], kind: Kind, now: np.ndarray) -> str:
    """Returns whether other contents of the storages are seen wherever they are read."""
    if kind.computes:
        other = (now[::-1] * 3).astype(now.dtype)
        new = [jnp.array(x) for x in kind.storages(other)]
        if not holds(host, host.merge(static, new), kind, other):
            return "lost"
    elif seen(host, static, leaves, kind) != kind.pattern():
        return "lost" if kind.tied else "made"
    gradient, after = descend(host, static, leaves, kind, now)
    stepped = (now - RATE * gradient).astype(now.dtype)
    return "kept" if holds(host, host.merge(static, after), kind, stepped) else "wrong"


def seen(host: Host, static: Any, leaves: list[Any], kind: Kind) -> list[list[int]]:
    """Fills the storages with numbers; returns which of them are one in the members."""
    numbers, start = [], 1
    for leaf in leaves:
        numbers.append(jnp.array(np.arange(start, start + leaf.size).reshape(leaf.shape),
                                 leaf.dtype))  # fmt: skip
        start += leaf.size
    members = host.members(host.merge(static, numbers), kind)
    return oracle.pattern([(value(x).real.astype(int), 1) for x in members], "elements")


def descend(
    host: Host, static: Any, leaves: list[Any], kind: Kind, now: np.ndarray
) -> tuple[np.ndarray, list[Any]]:
    """One step of gradient descent on the storages, with a weight for each element of a member.

    Returns the gradient by the memory, summed by hand, and the storages after the step.
    """
    random = np.random.default_rng(0)
    shapes = [x.shape for x in kind.read(now)]
    if kind.apart:
        every = random.integers(1, 9, now.shape)
        weights = [read(every) for read in kind.reads]
    else:
        weights = [random.integers(1, 9, shape) for shape in shapes]
    given = [jnp.array(weight, jnp.float32) for weight in weights]

    def loss(leaves: list[Any]) -> Any:
        members = host.members(host.merge(static, leaves), kind)
        return sum_of([x * y for x, y in zip(members, given, strict=True)])

    grads = jax.grad(loss)(leaves)
    after = [x - RATE * jnp.conj(g) for x, g in zip(leaves, grads, strict=True)]
    return kind.pull([w.astype(np.float64) for w in weights], now), after


def value(x: Any) -> np.ndarray:
    return np.asarray(x)


def holds(host: Host, model: Any, kind: Kind, memory: np.ndarray) -> bool:
    """Whether the members' values are what they are to read of the memory."""
    found = [value(x) for x in host.members(model, kind)]
    return all(
        x.dtype == y.dtype and close(x, y) for x, y in zip(found, kind.read(memory), strict=True)
    )


def close(x: np.ndarray, y: np.ndarray) -> bool:
    bound = 1e-2 if x.dtype.itemsize == 2 else 1e-5
    x, y = x.astype(np.complex128), y.astype(np.complex128)
    return x.shape == y.shape and np.allclose(x, y, rtol=bound, atol=bound)
