"""One call of a jitted step on the storages, against the same step on the model.

A training step (forward, backward, gradient descent: a thousand arrays in and out), and the call
alone: a thousand arrays go in, one is read. Both sides compute the same; what differs is how the
arrays reach the compiled program and come back. The arithmetic of the training step, and what JAX
takes to make a thousand arrays of its results, are in both sides.
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
STEPS = ("training step", "call alone")


def descend(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
    return parameter - 0.01 * gradient


def objective(
    kind: str, apply: Apply, pairs: Callable[[Any], models.Pairs]
) -> Callable[[Any], Any]:
    """A function from a model to one number."""
    x = jnp.ones((4, models.WIDTH))

    def loss(model: Any) -> jax.Array:
        return jnp.mean(apply(model, x) ** 2)

    def touch(model: Any) -> jax.Array:
        return pairs(model)[0][1][0]

    return touch if kind == "call alone" else loss


def on_storages(kind: str, model: Any, apply: Apply, pairs: Callable[[Any], models.Pairs]) -> Call:
    skeleton, storages = tied.split(model)
    of_model = objective(kind, apply, pairs)

    def value(storages: dict[str, jax.Array]) -> jax.Array:
        return of_model(skeleton.merge(storages))

    def training(storages: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(descend, storages, jax.grad(value)(storages))

    # Without keep_unused the arrays that the call does not read would stay outside.
    step = jax.jit(training if kind == "training step" else value, keep_unused=True)
    return lambda: step(storages)


def on_pytree(kind: str, model: Any) -> Call:
    value = objective(kind, models.apply, models.nested_pairs)

    def training(model: Any) -> Any:
        return jax.tree.map(descend, model, jax.grad(value)(model))

    step = jax.jit(training if kind == "training step" else value, keep_unused=True)
    return lambda: step(model)


def on_bundle(model: Any) -> Call:
    step = jax.jit(lambda bundle: bundle["layers"][0]["bias"][0], keep_unused=True)
    bundle = tied.Bundle(model)
    return lambda: step(bundle)


def on_equinox(kind: str, model: models.EquinoxStack) -> Call:
    value = objective(kind, models.call, models.equinox_pairs)

    def training(model: models.EquinoxStack) -> models.EquinoxStack:
        gradient = eqx.filter_grad(value)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradient))

    # filter_jit has no keep_unused: it may leave the unread arrays outside.
    step = eqx.filter_jit(training if kind == "training step" else value)
    return lambda: step(model)


def on_nnx(kind: str, model: models.NNXStack) -> Call:
    value = objective(kind, models.call, models.nnx_pairs)

    def training(model: models.NNXStack) -> None:
        gradient = nnx.grad(value)(model)
        nnx.update(model, jax.tree.map(descend, nnx.state(model, nnx.Param), gradient))

    step = nnx.jit(training if kind == "training step" else value, keep_unused=True)

    def call() -> Any:
        result = step(model)
        return model.layers[0].kernel.get_value() if result is None else result

    return call


def rows() -> Iterator[Row]:
    plain, equinox, flax = models.nested(), models.EquinoxStack(), models.NNXStack()
    yield race(
        "call alone on a Bundle / jax.jit on a nested dict",
        on_bundle(plain),
        on_pytree("call alone", plain),
        repeats=41,
        ready=jax.block_until_ready,
    )
    for kind in STEPS:
        sides = {
            "jax.jit on a nested dict": (
                on_storages(kind, plain, models.apply, models.nested_pairs),
                on_pytree(kind, plain),
                1.0,
            ),
            "eqx.filter_jit": (
                on_storages(kind, equinox, models.call, models.equinox_pairs),
                on_equinox(kind, equinox),
                0.3,
            ),
            "nnx.jit": (
                on_storages(kind, flax, models.call, models.nnx_pairs),
                on_nnx(kind, flax),
                0.05,
            ),
        }
        for peer, (ours, theirs, target) in sides.items():
            yield race(
                f"{kind} on the storages / {peer}",
                ours,
                theirs,
                target=target,
                repeats=21 if kind == "training step" else 41,
                ready=jax.block_until_ready,
            )
