"""Operations of Flax NNX on a module, for JAX's survival matrix; see jax_operations.py.

They run in graph mode and in tree mode: what is typed is the same, the mode is a setting.
"""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import safetensors.flax
from flax import nnx

import tied
from jax_hosts import Host, Pair
from jax_judge import RATE
from jax_kinds import KINDS, NAMES
from jax_operations import (
    SHARDING,
    Op,
    Run,
    adam,
    checkpointer,
    doubled,
    down,
    is_tied,
    jitted,
    jitted_double,
    moved,
    not_empty,
    put,
    raveled,
    real_only,
    rounded,
    step_of,
    stepped,
    to_twice,
    written,
)


def state_of(x: Any) -> Any:
    """Gradients are a state in graph mode, a module in tree mode."""
    return x if isinstance(x, nnx.State) else nnx.state(x)


def descend(model: Any, loss: Any) -> None:
    """One step down the gradient, in place."""
    grads = state_of(nnx.grad(loss)(model))
    nnx.update(model, down(nnx.state(model), grads))


@functools.cache
def step_in_place(host: Host, name: str) -> Any:
    return lambda model: descend(model, host.losses[name])


@functools.cache
def jitted_in_place(host: Host, name: str) -> Any:
    return nnx.jit(step_in_place(host, name))


def in_place(make: Any) -> Run:
    """An operation that changes the module that it is given."""

    def run(model: Any, host: Host, name: str) -> Any:
        make(host, name)(model)
        return model

    return run


def graded(model: Any, host: Host, name: str) -> Any:
    descend(model, host.losses[name])
    return model


def rematerialized(model: Any, host: Host, name: str) -> Any:
    descend(model, nnx.remat(host.losses[name]))
    return model


def stacked(model: Any, *factors: float) -> Any:
    """Models in one module, each so many times the given one."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.stack([x * f for f in factors]), state))


def second(model: Any) -> Any:
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[1], state))


def vmapped(model: Any, host: Host, name: str) -> Any:
    """A step of each of two models in one batch; the second is twice the first."""
    both = stacked(model, 1, 2)
    nnx.vmap(step_in_place(host, name))(both)
    return second(both)


def ensemble(model: Any, host: Host, name: str) -> Any:
    """Models made within `nnx.vmap`, each scaled by its number; the second of them."""
    graphdef, state = nnx.split(model)

    def make(i: Any) -> Any:
        return nnx.merge(graphdef, jax.tree.map(lambda x: (x * i).astype(x.dtype), state))

    return second(nnx.vmap(make)(jnp.arange(1, 3)))


def scanned(model: Any, host: Host, name: str) -> Any:
    """A step within the body of a scan that carries the module."""

    def body(model: Any, x: Any) -> Any:
        descend(model, host.losses[name])
        return model, x

    after, _ = nnx.scan(body)(model, jnp.ones(1))
    return after


def scanned_over(model: Any, host: Host, name: str) -> Any:
    """The second of two stacked models that a scan goes over, after a step of each."""
    both = stacked(model, 0, 1)

    def body(total: Any, model: Any) -> Any:
        descend(model, host.losses[name])
        return total + host.losses[name](model)

    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(jnp.zeros(()), both)
    return second(both)


def from_shapes(model: Any, host: Host, name: str) -> Any:
    """Fills the module of shapes that `nnx.eval_shape` gives."""
    graphdef, state = nnx.split(model)
    shapes = nnx.eval_shape(lambda: nnx.merge(graphdef, state))
    nnx.update(shapes, doubled(state))
    return shapes


NNX = {
    "split": Op("`nnx.split`, `merge`", lambda m, host, name: nnx.merge(*nnx.split(m))),
    "clone": Op("`nnx.clone`", lambda m, host, name: nnx.clone(m)),
    "jit": Op("`nnx.jit`", in_place(jitted_in_place), stepped),
    "grad": Op("`nnx.grad`", graded, stepped),
    "vmap": Op("`nnx.vmap` of an ensemble", vmapped, lambda name: stepped(name, 2)),
    "ensemble": Op("made in `nnx.vmap`", ensemble, to_twice),
    "scan": Op("`nnx.scan`, carried", scanned, stepped),
    "scan_over": Op("`nnx.scan`, over layers", scanned_over, stepped),
    "remat": Op("`nnx.remat`", rematerialized, stepped),
    "eval_shape": Op("`nnx.eval_shape`, filled", from_shapes, to_twice),
}

# ----------------------------------------------------------- JAX's own transformations, optimizers


def state_put(target: Any) -> Run:
    """Moves the state to a device, and puts it back."""
    move = put(target)

    def run(model: Any, host: Host, name: str) -> Any:
        nnx.update(model, move(nnx.state(model), host, name))
        return model

    return run


def optimized(optimizer: optax.GradientTransformation) -> Run:
    def run(model: Any, host: Host, name: str) -> Any:
        trained = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        trained.update(model, jax.tree.map(jnp.conj, nnx.grad(host.losses[name])(model)))
        return model

    return run


JAX = {
    "tree_map": Op("`jax.tree.map`", lambda m, host, name: doubled(m), to_twice),
    "jax_jit": Op("`jax.jit`", lambda m, host, name: jitted_double(m), to_twice),
    "jax_step": Op("a step in `jax.jit`", lambda m, host, name: jitted(host, name)(m), stepped),
    "jax_grad": Op("`jax.grad`", lambda m, host, name: step_of(host, name)(m), stepped),
    "sgd": Op("`nnx.Optimizer`, SGD", optimized(optax.sgd(RATE)), stepped),
    "adam": Op("`nnx.Optimizer`, Adam", optimized(optax.adam(RATE)), moved(adam)),
    "adamw": Op(
        "`nnx.Optimizer`, AdamW", optimized(optax.adamw(RATE, weight_decay=0.1)),
        moved(lambda a, g, name: adam(a, g, name) + 0.1 * a),
    ),
}  # fmt: skip

# --------------------------------------------------------------------------- copies, states, files


def update(model: Any, host: Host, name: str) -> Any:
    nnx.update(model, doubled(nnx.state(model)))
    return model


def pure(model: Any, host: Host, name: str) -> Any:
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, doubled(nnx.to_pure_dict(state)))
    nnx.update(model, state)
    return model


def by_last_name(model: Any, host: Host, name: str) -> Any:
    """Doubles what `nnx.state` gives for the name of the last member."""
    wanted: Any = nnx.PathContains(KINDS[name].names[-1])
    if type(model) is not Pair:  # it was tied
        wanted = tied.nnx.alias(model, wanted)
    nnx.update(model, doubled(nnx.state(model, wanted)))
    return model


def assigned(number: int) -> Run:
    """Writes twice a member's values to its place."""

    def run(model: Any, host: Host, name: str) -> Any:
        variable = host.get(model, NAMES[number])
        variable[...] = variable[...] * 2
        return model

    return run


def like(model: Any) -> tuple[Any, Any]:
    """The module with zeros, and its state: what a checkpoint is read into."""
    fresh = copy.deepcopy(model)
    nnx.update(fresh, jax.tree.map(jnp.zeros_like, nnx.state(fresh)))
    return fresh, nnx.state(fresh)


def through_orbax(model: Any, host: Host, name: str) -> Any:
    fresh, state = like(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model"
        checkpointer().save(file, nnx.state(model))
        checkpointer().wait_until_finished()
        nnx.update(fresh, checkpointer().restore(file, jax.eval_shape(lambda s: s, state)))
    return fresh


def through_safetensors(model: Any, host: Host, name: str) -> Any:
    fresh, _ = like(model)
    weights = {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(nnx.state(model))}
    found = safetensors.flax.load(safetensors.flax.save(weights))
    nested = {tuple(path.split(".")): x for path, x in found.items()}
    state = nnx.state(fresh)
    nnx.replace_by_pure_dict(state, nnx.traversals.unflatten_mapping(nested))
    nnx.update(fresh, state)
    return fresh


COPIES = {
    "deepcopy": Op("`deepcopy`", lambda m, host, name: copy.deepcopy(m)),
    "pickle": Op("`pickle`", lambda m, host, name: pickle.loads(pickle.dumps(m))),
    "update": Op("`nnx.state`, `update`", update, to_twice),
    "by_name": Op("`nnx.state` by the last name", by_last_name, to_twice, is_tied),
    "assign": Op("written to the first", assigned(0), written(0), is_tied),
    "assign_second": Op("written to the second", assigned(1), written(1), is_tied),
    "pure": Op("`nnx.to_pure_dict`", pure, to_twice),
    "device_put": Op("`device_put` of the state", state_put(jax.devices()[1])),
    "sharded": Op("`device_put` to a `NamedSharding`", state_put(SHARDING)),
    "orbax": Op("orbax", through_orbax, on=not_empty),
    "safetensors": Op("safetensors", through_safetensors),
}
OURS = {
    "map": Op("`map`", lambda m, host, name: tied.map(lambda x: x * 2, m), to_twice),
    "cast": Op("`bf16`, `f32`", lambda m, host, name: tied.f32(tied.bf16(m)), rounded, real_only),
    "to": Op("`to` a device", lambda m, host, name: tied.to(m, "cpu:1")),
    "to_sharding": Op("`to` a sharding", lambda m, host, name: tied.to(m, SHARDING)),
    "copy": Op("`copy`", lambda m, host, name: tied.copy(m)),
    "tied_split": Op("`split`, `merge`", lambda m, host, name: tied.merge(*tied.split(m))),
    "ravel": Op("`ravel`", raveled, to_twice),
}  # fmt: skip
GROUPS = {
    "NNX's transformations": NNX,
    "JAX's transformations, optimizers": JAX,
    "Copies, states, files": COPIES,
    "tied's own": OURS,
}
