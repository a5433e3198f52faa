"""Odd models of the JAX world, for the table in models.py."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from flax.core import FrozenDict, freeze
from transformers.modeling_outputs import BaseModelOutput

import tied
from models import odd


def matrix() -> jax.Array:
    return jnp.arange(12.0).reshape(3, 4)


@odd(lambda m: [m["a"], m["b"]["c"]], lambda m: type(m) is FrozenDict)
def frozen_dict() -> Any:
    w = matrix()
    return freeze({"a": w, "b": {"c": w}})


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(3)(flax.linen.Dense(4)(x))


@odd(lambda m: jax.tree.leaves(m), lambda m: sorted(m["params"]))
def linen_parameters() -> Any:
    params = Linen().init(jax.random.key(0), jnp.ones((1, 3)))
    params["params"]["Dense_1"]["bias"] = params["params"]["Dense_1"]["kernel"][0]
    params["params"]["again"] = params["params"]["Dense_0"]["kernel"]
    return params


class Nnx(nnx.Module):
    def __init__(self) -> None:
        self.embed = nnx.Param(matrix())
        self.head = self.embed
        self.other = nnx.Param(self.embed.get_value())
        self.count = nnx.BatchStat(jnp.zeros(3))
        self.name = "kept"


@odd(
    lambda m: [v.get_value() for v in (m.embed, m.head, m.other, m.count)],
    lambda m: (m.embed is m.head, m.embed is m.other, type(m.count), m.name),
)
def nnx_module() -> Any:
    return Nnx()


@odd(
    lambda m: [m.kernel.get_value(), m.bias.get_value()],
    lambda m: (type(m.kernel), m(jnp.ones(3)).tolist()),
)
def nnx_linear() -> Any:
    return nnx.Linear(3, 4, rngs=nnx.Rngs(0))


class Coder(eqx.Module):
    encoder: eqx.nn.Linear
    weight: Any
    transposed: Any
    name: str = eqx.field(static=True)


@odd(
    lambda m: [m.encoder.weight, m.weight, m.transposed, m.encoder.bias],
    lambda m: (m.name, m.encoder.use_bias),
)
def equinox_module() -> Any:
    encoder = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    return Coder(encoder, encoder.weight, tied.transpose(encoder.weight), "kept")


@odd(lambda m: jax.tree.leaves(m), lambda m: [type(part) for part in m[1]])
def optax_state() -> Any:
    params = {"w": matrix(), "b": jnp.zeros(3)}
    return params, optax.chain(optax.clip(1.0), optax.adam(0.1)).init(params)


@odd(
    lambda m: [m.last_hidden_state, *m.hidden_states],
    lambda m: (type(m), list(m.keys()), m["last_hidden_state"] is m.last_hidden_state),
)
def model_output() -> Any:
    h = torch.arange(6.0)
    return BaseModelOutput(last_hidden_state=h, hidden_states=(h[:3], h))


@odd(lambda m: [jax.random.key_data(m["key"]), m["w"]], lambda m: m["key"] is m["again"])
def random_keys() -> Any:
    key = jax.random.key(3)
    return {"key": key, "again": key, "w": jnp.ones(2)}


@odd(lambda m: [m["base"], m["t"], m["row"]], lambda m: type(m["t"]))
def views() -> Any:
    w = matrix()
    return {"base": w, "t": tied.transpose(w), "row": tied.view(w, lambda a: a[0])}
