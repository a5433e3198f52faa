"""Tied NNX models for tests: a table of views, and what each is by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tied

MODES = ("graph", "graph without updates", "tree")


@contextmanager
def mode(name: str) -> Iterator[None]:
    """NNX as it was (graph mode), and as it will be (tree mode)."""
    with ExitStack() as stack:
        stack.enter_context(nnx.set_graph_mode(name != "tree"))
        stack.enter_context(nnx.set_graph_updates(name == "graph"))
        yield


def numbers(*shape: int, start: int = 0) -> jax.Array:
    size = int(np.prod(shape))
    return jnp.sin(jnp.arange(start, start + size, dtype="float32")).reshape(shape)


class Part(nnx.Module):
    """Some numbers, and a bias of its own."""

    def __init__(self, w: jax.Array) -> None:
        self.w = nnx.Param(w)
        self.b = nnx.Param(jnp.ones(2))

    def __call__(self, x: Any) -> Any:
        w = self.w[...]
        return jnp.sum(x * jnp.sin(w * (1 + numbers(*w.shape, start=7)))) + jnp.sum(self.b[...]) * x


class Net(nnx.Module):
    """A first part, and a second one further down that is tied to it."""

    def __init__(self, first: jax.Array, second: jax.Array) -> None:
        self.first = Part(first)
        self.deep = nnx.List([Part(jnp.ones(1)), nnx.Dict(second=Part(second))])
        self.calls = nnx.BatchStat(jnp.zeros(()))

    @property
    def second(self) -> Any:
        return self.deep[1]["second"]

    def __call__(self, x: Any) -> Any:
        self.calls[...] = self.calls[...] + 1
        return self.first(x) + self.second(2 * x) ** 2


SOURCE, TARGET = "first.w", "deep.1.second.w"


@dataclass(frozen=True)
class Kind:
    """A view of `SOURCE`; `same` is no view at all."""

    shape: tuple[int, ...]
    view: Callable[[Any], Any] | None
    words: str
    writable: bool = True

    def read(self, w: Any) -> Any:
        return w if self.view is None else self.view(w)

    def apart(self) -> Net:
        w = numbers(*self.shape)
        return Net(w, jnp.array(self.read(w), copy=True))

    def tied(self) -> Net:
        model = self.apart()
        tied.tie(model, TARGET, SOURCE, self.view)
        return model


KINDS = {
    "same": Kind((3, 2), None, "first.w"),
    "transpose": Kind((3, 2), tied.transpose, "first.w.T"),
    "rows": Kind((4, 2), lambda w: w[1:3], "first.w[1:3]"),
    "columns": Kind((3, 4), lambda w: w[:, ::2], "first.w[:, ::2]"),
    "reshape": Kind((3, 4), lambda w: w.reshape(2, 6), "first.w.reshape(2, 6)"),
    "flip": Kind((3, 2), lambda w: w[::-1], "first.w[::-1]"),
    "diagonal": Kind((3, 3), lambda w: w.diagonal(), "first.w.diagonal()"),
    "broadcast": Kind((3,), lambda w: np.broadcast_to(w, (2, 3)) if isinstance(w, np.ndarray)
                      else jnp.broadcast_to(w, (2, 3)), "first.w.broadcast_to(2, 3)", False),
    "matrix of a diagonal": Kind((3,), lambda v: jnp.diag(v), "computed from first.w", False),
    "computed": Kind((3, 2), lambda w: jnp.tanh(w).T, "computed from first.w", False),
}  # fmt: skip


def by_hand(kind: Kind, w: Any, x: Any = 1.0, bias: Any = 2.0) -> Any:
    """The loss of a tied net as a function of its one array."""

    def part(w: Any, x: Any) -> Any:
        return jnp.sum(x * jnp.sin(w * (1 + numbers(*w.shape, start=7)))) + bias * x

    return part(w, x) + part(kind.read(w), 2 * x) ** 2


def loss(model: Any, x: Any = 1.0) -> Any:
    return model(x)


def close(a: Any, b: Any, *, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=atol)


def state_of(x: Any, *filters: Any) -> Any:
    """Gradients are a state in graph mode, a module in tree mode."""
    found = x if isinstance(x, nnx.State) else nnx.state(x)
    return nnx.filter_state(found, *filters) if filters else found


def holds(model: Any, kind: Kind) -> None:
    """The tie is there: values, leaves, report, and a write into the source is seen."""
    w = model.first.w[...]
    close(model.second.w[...], kind.read(w))
    names = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert names == [("calls",), ("deep", 0, "b"), ("deep", 0, "w"), ("deep", 1, "second", "b"),
                     ("first", "b"), ("first", "w")]  # fmt: skip
    assert (SOURCE, TARGET) in tied.ties(model).groups
    model.first.w[...] = w + 1
    close(model.second.w[...], kind.read(w + 1))
    model.first.w[...] = w
