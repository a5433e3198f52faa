"""One call of a jitted step on the storages, against the same step on the model.

Two steps: a training step (forward, backward, gradient descent; a thousand arrays in and out) and
the loss alone (a thousand arrays in, one out). Both sides compute the same; what differs is how the
arrays reach the compiled program and come back. What JAX takes to make a thousand arrays out of the
training step is in both sides, and bounds the ratio from below.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

import tied
from benchmarks import models
from benchmarks.measure import Row, race

Call = Callable[[], Any]
Apply = Callable[[Any, jax.Array], jax.Array]
X = (4, models.WIDTH)


def descend(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
    return parameter - 0.01 * gradient


def on_storages(model: Any, apply: Apply, *, train: bool) -> Call:
    skeleton, storages = tied.split(model)
    x = jnp.ones(X)

    def loss(storages: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(apply(skeleton.merge(storages), x) ** 2)

    def training(storages: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(descend, storages, jax.grad(loss)(storages))

    step = jax.jit(training if train else loss)
    return lambda: step(storages)


def on_pytree(model: Any, *, train: bool) -> Call:
    x = jnp.ones(X)

    def loss(model: Any) -> jax.Array:
        return jnp.mean(models.apply(model, x) ** 2)

    def training(model: Any) -> Any:
        return jax.tree.map(descend, model, jax.grad(loss)(model))

    step = jax.jit(training if train else loss)
    return lambda: step(model)


def on_equinox(model: models.EquinoxStack, *, train: bool) -> Call:
    x = jnp.ones(X)

    def loss(model: models.EquinoxStack) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    def training(model: models.EquinoxStack) -> models.EquinoxStack:
        gradient = eqx.filter_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradient))

    step = eqx.filter_jit(training if train else loss)
    return lambda: step(model)


def on_nnx(model: models.NNXStack, *, train: bool) -> Call:
    x = jnp.ones(X)

    def loss(model: models.NNXStack) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    def training(model: models.NNXStack) -> None:
        gradient = nnx.grad(loss)(model)
        nnx.update(model, jax.tree.map(descend, nnx.state(model, nnx.Param), gradient))

    step = nnx.jit(training if train else loss)

    def call() -> Any:
        result = step(model)
        return model.layers[0].kernel.get_value() if train else result

    return call


def called(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return model(x)


def rows() -> Iterator[Row]:
    plain, equinox, flax = models.nested(), models.EquinoxStack(), models.NNXStack()
    for train in (True, False):
        pairs = {
            "jax.jit on a nested dict": (
                on_storages(plain, models.apply, train=train),
                on_pytree(plain, train=train),
                1.0,
            ),
            "eqx.filter_jit": (
                on_storages(equinox, called, train=train),
                on_equinox(equinox, train=train),
                0.3,
            ),
            "nnx.jit": (on_storages(flax, called, train=train), on_nnx(flax, train=train), 0.05),
        }
        for peer, (ours, theirs, target) in pairs.items():
            name = f"{'training step' if train else 'loss'} on the storages / {peer}"
            yield race(name, ours, theirs, target=target, repeats=51, ready=jax.block_until_ready)
