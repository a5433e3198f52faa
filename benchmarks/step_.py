"""One call of a jitted step on the storages, against the same step on the model.

Three steps, of 200 and (but for the last, which takes minutes to compile) of 1,000 arrays:

- *in*: the arrays go into the compiled program, and one number comes back. What is timed is how
  arrays are found in their container and reach the program.
- *in and out*: the arrays go in, and as many new ones come back, each one more than it was.
- *training*: forward, backward, gradient descent; its arithmetic, and what JAX takes to make an
  array of each result, are in both sides.

Both sides run the same program. The flat list is the quickest that JAX itself can do; the dict of
the same names says what JAX takes for names (it sorts them on each call), whoever gives them. All
in the CPU time of the calling thread, as other programs take milliseconds and a call less.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

import tied
from benchmarks import measure, models
from benchmarks.measure import Row

Call = Callable[[], Any]
LAYERS = (100, 500)  # of two arrays each
FLAT, BUNDLE, FILTER_JIT, NNX_JIT = 1.1, 1.3, 0.3, 0.05


def first(arrays: Any) -> jax.Array:
    return jax.tree.leaves(arrays)[0].reshape(-1)[0]


def more(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, arrays)


def descend(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
    return parameter - 0.01 * gradient


def loss(apply: Callable[[Any, jax.Array], jax.Array], model: Any) -> jax.Array:
    return jnp.mean(apply(model, jnp.ones((4, models.WIDTH))) ** 2)


def jitted(
    kind: str, apply: Any = models.apply, model_of: Any = lambda x: x, *, keep: bool = True
) -> Any:
    """The step on any pytree of arrays; `model_of` makes the model of it inside.

    With `keep`, arrays that the step does not read are given to the program, too.
    """

    def training(arrays: Any) -> Any:
        gradient = jax.grad(lambda arrays: loss(apply, model_of(arrays)))(arrays)
        return jax.tree.map(descend, arrays, gradient)

    return jax.jit({"in": first, "in and out": more, "training": training}[kind], keep_unused=keep)


def on_storages(kind: str, model: Any, apply: Any, *, keep: bool = True) -> Call:
    skeleton, storages = tied.split(model)
    step = jitted(kind, apply, skeleton.merge, keep=keep)
    return lambda: step(storages)


def on_bundle(kind: str, model: Any, apply: Any) -> Call:
    bundle, step = tied.Bundle(model), jitted(kind, apply, lambda bundle: bundle.model)
    return lambda: step(bundle)


def on_pytree(kind: str, model: Any) -> Call:
    step = jitted(kind)
    return lambda: step(model)


def on_list(kind: str, model: dict[str, Any]) -> Call:
    arrays, structure = jax.tree.flatten(model)
    step = jitted(kind, models.apply, lambda arrays: jax.tree.unflatten(structure, arrays))
    return lambda: step(arrays)


def on_equinox(kind: str, model: models.EquinoxStack) -> Call:
    def training(model: models.EquinoxStack) -> models.EquinoxStack:
        gradient = eqx.filter_grad(lambda model: loss(models.call, model))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradient))

    steps = {"in": first, "in and out": more, "training": training}
    step = eqx.filter_jit(steps[kind])
    return lambda: step(model)


def on_nnx(kind: str, model: models.NNXStack) -> Call:
    def reading(model: models.NNXStack) -> jax.Array:
        return first(nnx.state(model, nnx.Param))

    def adding(model: models.NNXStack) -> None:
        nnx.update(model, more(nnx.state(model, nnx.Param)))

    def training(model: models.NNXStack) -> None:
        gradient = nnx.grad(lambda model: loss(models.call, model))(model)
        nnx.update(model, jax.tree.map(descend, nnx.state(model, nnx.Param), gradient))

    steps = {"in": reading, "in and out": adding, "training": training}
    step = nnx.jit(steps[kind], keep_unused=True)

    def call() -> Any:
        result = step(model)
        return model.layers[0].kernel.get_value() if result is None else result

    return call


def race(name: str, ours: Call, theirs: Call, target: float | None = None, n: int = 21) -> Row:
    return measure.race(
        name,
        ours,
        theirs,
        target=target,
        repeats=n,
        ready=jax.block_until_ready,
        timer=time.thread_time,
    )


def rows_of(kind: str, layers: int) -> Iterator[Row]:
    plain, size = models.nested(layers), 2 * layers
    named = dict(tied.split(plain)[1])
    few = 9 if kind == "training" else 21
    storages, flat = on_storages(kind, plain, models.apply), on_list(kind, plain)
    yield race(f"{kind}, {size} storages / jit of a flat list", storages, flat, FLAT, few)
    bundle = on_bundle(kind, plain, models.apply)
    yield race(f"{kind}, a Bundle of {size} / jit of a flat list", bundle, flat, BUNDLE, few)
    if kind == "in":
        yield race(f"{kind}, {size} storages / jit of a dict", storages, on_pytree(kind, named))
        yield race(f"{kind}, a Bundle of {size} / jit of the model", bundle, on_pytree(kind, plain))
    equinox = models.EquinoxStack(layers)
    ours = on_storages(kind, equinox, models.call, keep=False)  # filter_jit has no keep_unused
    theirs = on_equinox(kind, equinox)
    yield race(f"{kind}, {size} storages / eqx.filter_jit", ours, theirs, FILTER_JIT, few)
    flax = models.NNXStack(layers)
    ours = on_storages(kind, flax, models.call)
    yield race(f"{kind}, {size} storages / nnx.jit", ours, on_nnx(kind, flax), NNX_JIT, few)


def rows() -> Iterator[Row]:
    for kind in ("in", "in and out"):
        for layers in LAYERS:
            yield from rows_of(kind, layers)
    yield from rows_of("training", LAYERS[0])
