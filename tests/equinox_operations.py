"""Equinox's own operations on a model, for JAX's survival matrix; see jax_operations.py."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import linen_operations
from jax_hosts import Host
from jax_judge import RATE
from jax_operations import (
    Op,
    doubled,
    down,
    is_tied,
    jitted,
    step_of,
    stepped,
    to_twice,
    written,
)

filter_jitted = eqx.filter_jit(doubled)


def filter_graded(model: Any, host: Host, name: str) -> Any:
    return down(model, eqx.filter_grad(host.losses[name])(model))


def filter_value_and_graded(model: Any, host: Host, name: str) -> Any:
    """Trains the arrays of a model that was taken apart with `eqx.partition`."""
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    loss = host.losses[name]
    _, grads = eqx.filter_value_and_grad(lambda arrays: loss(eqx.combine(arrays, rest)))(arrays)
    return eqx.combine(down(arrays, grads), rest)


def filter_vmapped(model: Any, host: Host, name: str) -> Any:
    """A step of each of two models in one batch; the second is twice the first."""
    batch = jax.tree.map(lambda x: jnp.stack([x, x * 2]), model)
    after = eqx.filter_vmap(step_of(host, name))(batch)
    return jax.tree.map(lambda x: x[1], after)


def ensemble(model: Any, host: Host, name: str) -> Any:
    """Models made within `filter_vmap`, each scaled by its number; the second of them."""
    after = eqx.filter_vmap(lambda i: jax.tree.map(lambda x: (x * i).astype(x.dtype), model))(
        jnp.arange(1, 3)
    )
    return jax.tree.map(lambda x: x[1], after)


def through_file(model: Any, host: Host, name: str) -> Any:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, jax.tree.map(jnp.zeros_like, model))


def from_shapes(model: Any, host: Host, name: str) -> Any:
    shapes = eqx.filter_eval_shape(lambda m: m, model)
    values = iter(jax.tree.leaves(doubled(model)))
    return jax.tree.map(lambda x: jnp.array(next(values), x.dtype), shapes)


def replaced(member: str) -> Any:
    """Writes twice a member's values to its place."""

    def run(model: Any, host: Host, name: str) -> Any:
        new = host.get(model, member) * 2
        return eqx.tree_at(lambda m: host.get(m, member), model, new)

    return run


def updated(model: Any, host: Host, name: str) -> Any:
    """A step of `eqx.apply_updates`, that adds where the updates are arrays."""
    grads = eqx.filter_grad(host.losses[name])(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -RATE * jnp.conj(g), grads))


def moved_by_optax(model: Any, host: Host, name: str) -> Any:
    """An optimizer as Equinox's documentation has it."""
    optimizer = optax.sgd(RATE, momentum=0.9)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    grads = jax.tree.map(jnp.conj, eqx.filter_grad(host.losses[name])(model))
    updates, _ = optimizer.update(grads, state, model)
    return eqx.apply_updates(model, updates)


TRANSFORMS = {
    "tree_map": Op("`jax.tree.map`", lambda m, host, name: doubled(m), to_twice),
    "jit_step": Op("a step in `jax.jit`", lambda m, host, name: jitted(host, name)(m), stepped),
    "filter_jit": Op("`filter_jit`", lambda m, host, name: filter_jitted(m), to_twice),
    "filter_grad": Op("`filter_grad`", filter_graded, stepped),
    "filter_value_and_grad": Op("`partition`, `filter_value_and_grad`, `combine`",
                                filter_value_and_graded, stepped),
    "filter_vmap": Op("`filter_vmap`", filter_vmapped, lambda name: stepped(name, 2)),
    "ensemble": Op("made in `filter_vmap`", ensemble, to_twice),
    "filter_eval_shape": Op("`filter_eval_shape`, filled", from_shapes, to_twice),
}  # fmt: skip
EDITS = {
    "partition": Op(
        "`partition`, `combine`",
        lambda m, host, name: eqx.combine(*eqx.partition(m, eqx.is_inexact_array)),
    ),
    "serialise": Op("`tree_serialise_leaves`", through_file),
    "tree_at": Op("`tree_at` of the first", replaced("first"), written(0), is_tied),
    "tree_at_second": Op("`tree_at` of the second", replaced("second"), written(1), is_tied),
    "deepcopy": Op("`deepcopy`", lambda m, host, name: copy.deepcopy(m)),
    "pickle": Op("`pickle`", lambda m, host, name: pickle.loads(pickle.dumps(m))),
    "apply_updates": Op("`apply_updates`", updated, stepped),
    "optax": Op("optax", moved_by_optax, stepped),
}  # fmt: skip
GROUPS = {
    "Transformations": TRANSFORMS,
    "Copies, files, training": EDITS,
    "tied's own": linen_operations.OURS,
}
