"""One call of a jitted training step: storages in, storages out, against the model in, model out.

Both sides compute the same (a forward and a backward pass of 500 small layers, one step of gradient
descent); what differs is how the arrays reach the compiled program and come back.
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


def descend(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
    return parameter - 0.01 * gradient


def on_storages(model: Any, apply: Callable[[Any, jax.Array], jax.Array], x: jax.Array) -> Call:
    skeleton, storages = tied.split(model)

    @jax.jit
    def step(storages: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(storages: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean(apply(skeleton.merge(storages), x) ** 2)

        return jax.tree.map(descend, storages, jax.grad(loss)(storages))

    return lambda: step(storages, x)


def on_pytree(model: Any, x: jax.Array) -> Call:
    @jax.jit
    def step(model: Any, x: jax.Array) -> Any:
        gradient = jax.grad(lambda model: jnp.mean(models.apply(model, x) ** 2))(model)
        return jax.tree.map(descend, model, gradient)

    return lambda: step(model, x)


def on_equinox(model: models.EquinoxStack, x: jax.Array) -> Call:
    @eqx.filter_jit
    def step(model: models.EquinoxStack, x: jax.Array) -> models.EquinoxStack:
        gradient = eqx.filter_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradient))

    return lambda: step(model, x)


def on_nnx(model: models.NNXStack, x: jax.Array) -> Call:
    @nnx.jit
    def step(model: models.NNXStack, x: jax.Array) -> None:
        gradient = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(descend, nnx.state(model, nnx.Param), gradient))

    def call() -> jax.Array:
        step(model, x)
        return model.layers[0].kernel.get_value()

    return call


def rows() -> Iterator[Row]:
    x = jnp.ones((4, models.WIDTH))
    plain, equinox, flax = models.nested(), models.EquinoxStack(), models.NNXStack()
    yield race(
        "jitted step on the storages / jax.jit on the nested dict",
        on_storages(plain, models.apply, x),
        on_pytree(plain, x),
        target=1.0,
        repeats=101,
        ready=jax.block_until_ready,
    )
    yield race(
        "jitted step on the storages / eqx.filter_jit",
        on_storages(equinox, lambda model, x: model(x), x),
        on_equinox(equinox, x),
        target=0.3,
        repeats=51,
        ready=jax.block_until_ready,
    )
    yield race(
        "jitted step on the storages / nnx.jit",
        on_storages(flax, lambda model, x: model(x), x),
        on_nnx(flax, x),
        target=0.05,
        repeats=51,
        ready=jax.block_until_ready,
    )
