"""Operations of flax.linen on a model's variables; see jax_operations.py.

`apply` takes a dict, so a bundle is given to it as what it merges to.
"""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import flax.core
import flax.serialization
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, path_aware_map, unflatten_dict

import tied
from jax_hosts import Host, Network, sum_of
from jax_judge import RATE
from jax_kinds import KINDS
from jax_operations import Op, Run, doubled, down, raveled, real_only, rounded, stepped, to_twice


def variables(model: Any) -> Any:
    return model.model if isinstance(model, tied.Bundle) else model


@functools.cache
def applied(name: str) -> Any:
    """The loss of what the network gives."""
    network = Network(name)
    return lambda model: sum_of(network.apply(variables(model)))


@functools.cache
def apply_step(name: str) -> Any:
    return jax.jit(lambda model: down(model, jax.grad(applied(name))(model)))


def shapes(model: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), model)


def init_and_tie(model: Any, host: Host, name: str) -> Any:
    """Variables as `init` gives them, filled, then tied if the model is; a step of them."""
    fresh = jax.eval_shape(Network(name).init, jax.random.key(0))
    assert shapes(fresh) == shapes(variables(model))
    if isinstance(model, tied.Bundle):
        filled = host.tie_up(host.of(host.before(name), KINDS[name]), name)
    else:
        filled = host.plain(name)
    return down(filled, jax.grad(applied(name))(filled))


def train_state(model: Any, host: Host, name: str) -> Any:
    """One step of flax's TrainState with SGD."""
    state = TrainState.create(apply_fn=Network(name).apply, params=model, tx=optax.sgd(RATE))
    grads = jax.tree.map(jnp.conj, jax.grad(applied(name))(state.params))
    return state.apply_gradients(grads=grads).params


def on_dict(run: Any) -> Run:
    """What is done to a dict of variables: of a bundle, to its flat dict of storages."""

    def done(model: Any, host: Host, name: str) -> Any:
        if not isinstance(model, tied.Bundle):
            return run(model)
        weights = run(model.storages)
        return jax.tree.unflatten(jax.tree.structure(model), [weights[x] for x in model.storages])

    return done


def through_bytes(weights: Any) -> Any:
    text = flax.serialization.to_bytes(weights)
    return jax.tree.map(jnp.array, flax.serialization.from_bytes(weights, text))


def through_state_dict(weights: Any) -> Any:
    state = flax.serialization.to_state_dict(weights)
    return flax.serialization.from_state_dict(weights, doubled(state))


LINEN = {
    "tree_map": Op("`jax.tree.map`", lambda m, host, name: doubled(m), to_twice),
    "apply": Op("`apply` in `jit`, `grad`", lambda m, host, name: apply_step(name)(m), stepped),
    "init": Op("`init`, then a step", init_and_tie, stepped),
    "train_state": Op("`TrainState`", train_state, stepped),
    "freeze": Op(
        "`freeze`, `unfreeze`", on_dict(lambda d: flax.core.unfreeze(flax.core.freeze(d)))
    ),
    "flatten": Op("`flatten_dict`", on_dict(lambda d: unflatten_dict(flatten_dict(d)))),
    "path_aware_map": Op(
        "`path_aware_map`", on_dict(lambda d: path_aware_map(lambda path, x: x * 2, d)), to_twice
    ),
    "to_bytes": Op("`to_bytes`, `from_bytes`", on_dict(through_bytes)),
    "state_dict": Op("`to_state_dict`", on_dict(through_state_dict), to_twice),
    "deepcopy": Op("`deepcopy`", lambda m, host, name: copy.deepcopy(m)),
    "pickle": Op("`pickle`", lambda m, host, name: pickle.loads(pickle.dumps(m))),
}
OURS = {
    "map": Op("`map`", lambda m, host, name: tied.map(lambda x: x * 2, m), to_twice),
    "copy": Op("`copy`", lambda m, host, name: tied.copy(m)),
    "tied_split": Op("`split`, `merge`", lambda m, host, name: tied.merge(*tied.split(m))),
    "to": Op("`to` a device", lambda m, host, name: tied.to(m, "cpu:1")),
    "cast": Op("`bf16`, `f32`", lambda m, host, name: tied.f32(tied.bf16(m)), rounded, real_only),
    "ravel": Op("`ravel`", raveled, to_twice),
}
GROUPS = {"Variables": LINEN, "tied's own": OURS}
