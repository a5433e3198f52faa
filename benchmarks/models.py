"""Models of many small layers: what is timed is the bookkeeping, not the arithmetic."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

Pairs = list[tuple[jax.Array, jax.Array]]

LAYERS = 500
WIDTH = 8


class NNXStack(nnx.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class EquinoxStack(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, layers: int = LAYERS) -> None:
        keys = jax.random.split(jax.random.key(0), layers)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(x @ layer.weight.T + layer.bias)
        return x


def nested(layers: int = LAYERS) -> dict[str, Any]:
    """The same as a nested dict: a pytree that needs no library."""
    keys = jax.random.split(jax.random.key(0), layers)
    kernel = jax.nn.initializers.glorot_uniform()
    return {
        "layers": [
            {"kernel": kernel(key, (WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)} for key in keys
        ]
    }


def apply(model: dict[str, Any], x: jax.Array) -> jax.Array:
    for layer in model["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def call(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return model(x)


def nested_pairs(model: dict[str, Any]) -> Pairs:
    return [(layer["kernel"], layer["bias"]) for layer in model["layers"]]


def equinox_pairs(model: EquinoxStack) -> Pairs:
    return [(layer.weight, layer.bias) for layer in model.layers]


def nnx_pairs(model: NNXStack) -> Pairs:
    return [(layer.kernel, layer.bias) for layer in model.layers]
