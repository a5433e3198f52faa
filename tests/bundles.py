"""Small tied networks, each beside the same network written by hand over its storages.

The hand-written side takes a tuple of plain arrays (one for each storage) and reads them with
ordinary `jnp` indexing, so it knows nothing of `tied`. Whatever a transform makes of a bundle has
to be what it makes of that tuple: same arrays, same tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import tied

Read = Callable[[Any], Any]


def whole(w: Any) -> Any:
    return w


@dataclass(frozen=True)
class Kind:
    """Memory of a shape, and the readings of it by the two layers of a network.

    Each reading is a function that both NumPy and `jnp` arrays take; `use` is what the second layer
    does with the activations, and `used_back` its gradient by both, in NumPy.
    """

    shape: tuple[int, ...]
    first: Read
    second: Read
    use: Callable[[Any, Any], Any]
    used_back: Callable[[Any, Any, Any], tuple[Any, Any]]


def _times(h: Any, b: Any) -> Any:
    return h @ b


def _times_back(h: Any, b: Any, dy: Any) -> tuple[Any, Any]:
    return dy @ b.T, h.T @ dy


KINDS = {
    "same_object": Kind((4, 4), whole, whole, _times, _times_back),
    "transpose": Kind((4, 3), whole, lambda w: w.T, _times, _times_back),
    "overlapping_slices": Kind(
        (5, 3),
        lambda w: w[:4],
        lambda w: w[1:],
        lambda h, b: h @ b.T,
        lambda h, b, dy: (dy @ b, dy.T @ h),
    ),
    "diagonal": Kind(
        (4, 4),
        whole,
        lambda w: w.diagonal(),
        lambda h, b: h * b,
        lambda h, b, dy: (dy * b, (dy * h).sum(0)),
    ),
}


def forward(kind: Kind, a: Any, bias: Any, b: Any, x: Any) -> Any:
    return kind.use(jnp.tanh(x @ a + bias), b)


def tie(w: Any, read: Read) -> Any:
    return w if read is whole else tied.view(w, read)


def memory(kind: Kind, key: Any) -> tuple[Any, Any]:
    """The arrays that a network of this kind has: its memory and the bias of the first layer."""
    w = jax.random.normal(key, kind.shape) / 2
    return w, jnp.full(kind.shape[-1], 0.1)


def as_dict(kind: Kind, key: Any) -> Any:
    w, bias = memory(kind, key)
    return {"first": {"w": tie(w, kind.first), "bias": bias}, "second": tie(w, kind.second)}


class First(eqx.Module):
    w: Any
    bias: Any


class Network(eqx.Module):
    """The same network as an Equinox module."""

    first: First
    second: Any
    kind: str = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return forward(KINDS[self.kind], self.first.w, self.first.bias, self.second, x)


def as_equinox(kind: Kind, key: Any) -> Any:
    w, bias = memory(kind, key)
    (name,) = [name for name, other in KINDS.items() if other is kind]
    return Network(First(tie(w, kind.first), bias), tie(w, kind.second), name)


CONTAINERS: dict[str, Callable[[Kind, Any], Any]] = {"dict": as_dict, "equinox": as_equinox}


@dataclass(frozen=True)
class Case:
    """A kind of tie in a kind of container."""

    kind: Kind
    container: str

    def model(self, key: Any = None) -> Any:
        return CONTAINERS[self.container](self.kind, jax.random.key(0) if key is None else key)

    def bundle(self, key: Any = None) -> tied.Bundle:
        return tied.Bundle(self.model(key))

    def call(self, bundle: Any, x: Any) -> Any:
        """The network's output; of a bundle, of a model, and of a merged model."""
        if self.container == "equinox":
            return bundle(x)
        return forward(self.kind, bundle["first"]["w"], bundle["first"]["bias"],
                       bundle["second"], x)  # fmt: skip

    def by_hand(self, storages: tuple[Any, ...], x: Any) -> Any:
        """The same, written by hand over the storages in walk order."""
        w, bias = storages
        return forward(self.kind, self.kind.first(w), bias, self.kind.second(w), x)


CASES = {
    f"{container}-{name}": Case(kind, container)
    for name, kind in KINDS.items()
    for container in CONTAINERS
}
X = jnp.linspace(-1, 1, 32).reshape(8, 4)


def opened(tree: Any) -> Any:
    """The tree with every bundle in it as the tuple of its storages, for comparisons with hand."""
    if isinstance(tree, tied.Bundle):
        return tuple(opened(x) for x in tree.storages.values())
    return jax.tree.map(
        lambda x: opened(x) if isinstance(x, tied.Bundle) else x,
        tree,
        is_leaf=lambda x: isinstance(x, tied.Bundle),
    )


def assert_same(ours: Any, hand: Any, rtol: float = 2e-6) -> None:
    """Same tree, same dtypes, same arrays to the rounding of float32."""
    ours = opened(ours)
    assert jax.tree.structure(ours) == jax.tree.structure(hand)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(hand), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not isinstance(a, jax.ShapeDtypeStruct):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)
