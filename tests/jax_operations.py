"""Operations of JAX and optax on a model, each with what it makes of the memory under the members.

None of them knows of `tied`, but for those of the group of that name: this is what a user types.
They are run on a model as the framework has it and on one that went through `tied.tie`.
"""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint
import safetensors.flax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tied
from jax_hosts import Host
from jax_judge import RATE, Change
from jax_kinds import KINDS, NAMES

Run = Callable[[Any, Host, str], Any]
MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
PAIR = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def same(a: np.ndarray) -> np.ndarray:
    return a


def real_only(name: str) -> bool:
    return KINDS[name].dtype != "complex64"


@dataclass(frozen=True)
class Op:
    """An operation: its words in the table, how it runs, and what it makes of a kind's memory.

    `on` says which kinds it can be done to at all.
    """

    title: str
    run: Run
    memory: Callable[[str], Change] = lambda name: same
    on: Callable[[str], bool] = lambda name: True


def twice(a: np.ndarray) -> np.ndarray:
    return a * 2


def to_twice(name: str) -> Change:
    return twice


def doubled(model: Any) -> Any:
    return jax.tree.map(lambda x: x * 2, model)


def down(model: Any, grads: Any) -> Any:
    return jax.tree.map(lambda x, g: x - RATE * jnp.conj(g), model, grads)


def stepped(name: str, first: float = 1) -> Change:
    """One step down the gradient of the sum of all members, from memory times `first`."""
    kind = KINDS[name]
    return lambda a: (first * a - RATE * kind.gradient(first * a)).astype(a.dtype)


# ------------------------------------------------------------------------------ transformations


def step_of(host: Host, name: str) -> Callable[[Any], Any]:
    return step_down(host.losses[name])


def jitted(host: Host, name: str) -> Any:
    return jitted_down(host.losses[name])


@functools.cache
def step_down(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: down(model, jax.grad(loss)(model))


@functools.cache
def jitted_down(loss: Callable[[Any], Any]) -> Any:
    return jax.jit(step_down(loss))


jitted_double = jax.jit(doubled)
donating = jax.jit(doubled, donate_argnums=0)


def value_and_grad(model: Any, host: Host, name: str) -> Any:
    value, grads = jax.value_and_grad(host.losses[name])(model)
    read = KINDS[name].read(KINDS[name].memory())
    np.testing.assert_allclose(value, sum(x.sum().real for x in read), rtol=1e-5)
    return down(model, grads)


def by_hessian(model: Any, host: Host, name: str) -> Any:
    """A step of the hessian of half the sum of squares, applied to ones.

    The members are linear in the memory, so that is a step down the gradient of their sum.
    """
    kind = KINDS[name]

    @jax.jit
    def hessian(model: Any) -> Any:
        return jax.hessian(lambda m: sum((x**2).sum() / 2 for x in host.members(m, kind)))(model)

    leaves, tree = jax.tree.flatten(model)
    rows = np.array(range(len(leaves) ** 2)).reshape(len(leaves), -1)
    blocks = jax.tree.leaves(hessian(model))
    sums = [sum(np.asarray(blocks[i]).sum(tuple(range(x.ndim, 2 * x.ndim))) for i in row)
            for x, row in zip(leaves, rows, strict=True)]  # fmt: skip
    return jax.tree.unflatten(tree, [x - RATE * g for x, g in zip(leaves, sums, strict=True)])


def vmapped(model: Any, host: Host, name: str) -> Any:
    """A step of each of two models in one batch; the second is twice the first."""
    batch = jax.tree.map(lambda x: jnp.stack([x, x * 2]), model)
    after = jax.vmap(step_of(host, name))(batch)
    return jax.tree.map(lambda x: x[1], after)


def scanned(model: Any, host: Host, name: str) -> Any:
    step = step_of(host, name)
    after, _ = jax.lax.scan(lambda m, _: (step(m), None), model, length=1)
    return after


def scanned_over(model: Any, host: Host, name: str) -> Any:
    """The second of two stacked models that a scan goes over."""
    stacked = jax.tree.map(lambda x: jnp.stack([x * 0, x]), model)
    step = step_of(host, name)
    _, after = jax.lax.scan(lambda c, m: (c + host.losses[name](m), step(m)), 0.0, stacked)
    return jax.tree.map(lambda x: x[1], after)


def rematerialized(model: Any, host: Host, name: str) -> Any:
    return down(model, jax.grad(jax.checkpoint(host.losses[name]))(model))


def from_shapes(model: Any, host: Host, name: str) -> Any:
    """Fills what `eval_shape` gives, leaf by leaf."""
    values = iter(jax.tree.leaves(doubled(model)))
    return jax.tree.map(lambda x: jnp.array(next(values), x.dtype), jax.eval_shape(same, model))


def in_parallel(model: Any, host: Host, name: str) -> Any:
    """A step of data parallelism: the data is split over two devices, the model is on each."""

    def step(model: Any, x: Any) -> Any:
        grads = jax.grad(lambda m: host.losses[name](m) * x.sum())(model)
        return down(model, jax.lax.psum(grads, "x"))

    run = jax.shard_map(step, mesh=PAIR, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    return jax.jit(run)(jax.device_put(model, NamedSharding(PAIR, P())), jnp.full(2, 0.5))


def ahead_of_time(model: Any, host: Host, name: str) -> Any:
    return jitted(host, name).lower(model).compile()(model)


def donated(model: Any, host: Host, name: str) -> Any:
    if isinstance(model, tied.Bundle):
        model = host.tied(name)  # not the one that other cells take
    after = donating(model)
    assert all(x.is_deleted() for x in jax.tree.leaves(model) if x.size)
    return after


TRANSFORMS = {
    "tree_map": Op("`jax.tree.map`", lambda m, host, name: doubled(m), to_twice),
    "jit": Op("`jit`", lambda m, host, name: jitted_double(m), to_twice),
    "jit_step": Op("a step in `jit`", lambda m, host, name: jitted(host, name)(m), stepped),
    "grad": Op("`grad`", lambda m, host, name: step_of(host, name)(m), stepped),
    "value_and_grad": Op("`value_and_grad`", value_and_grad, stepped),
    "hessian": Op(
        "`hessian`", by_hessian, stepped, lambda name: not KINDS[name].computes and real_only(name)
    ),
    "remat": Op("`checkpoint`", rematerialized, stepped),
}
PROGRAMS = {
    "vmap": Op("`vmap` of an ensemble", vmapped, lambda name: stepped(name, 2)),
    "scan": Op("`scan`, carried", scanned, stepped),
    "scan_over": Op("`scan`, over layers", scanned_over, stepped),
    "eval_shape": Op("`eval_shape`, filled", from_shapes, to_twice),
    "shard_map": Op("`shard_map`", in_parallel, stepped),
    "aot": Op("`lower`, `compile`", ahead_of_time, stepped),
    "donation": Op("`donate_argnums`", donated, to_twice),
}

# ------------------------------------------------------------------------- devices, copies, files

SHARDING = NamedSharding(MESH, P("x"))


def put(target: Any) -> Run:
    def run(model: Any, host: Host, name: str) -> Any:
        after = jax.device_put(model, target)
        assert all(x.sharding.device_set == SHARDING.device_set if target is SHARDING
                   else x.devices() == {target} for x in jax.tree.leaves(after))  # fmt: skip
        return after

    return run


def flat(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A flat dict of a dict's arrays, and the way back; of a bundle the storages."""
    if isinstance(model, tied.Bundle):
        tree = jax.tree.structure(model)
        return model.storages, lambda new: tree.unflatten([new[name] for name in model.storages])
    return flatten_dict(model, sep="."), lambda new: unflatten_dict(new, sep=".")


def through_msgpack(model: Any, host: Host, name: str) -> Any:
    weights, back = flat(model)
    text = flax.serialization.to_bytes(weights)
    return back(jax.tree.map(jnp.array, flax.serialization.from_bytes(weights, text)))


def through_safetensors(model: Any, host: Host, name: str) -> Any:
    weights, back = flat(model)
    return back(safetensors.flax.load(safetensors.flax.save(weights)))


def not_empty(name: str) -> bool:
    """Orbax saves no empty arrays."""
    return name != "no_tie_empty_arrays"


@functools.cache
def checkpointer() -> orbax.checkpoint.StandardCheckpointer:
    return orbax.checkpoint.StandardCheckpointer()


def through_orbax(model: Any, host: Host, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model"
        checkpointer().save(file, model)
        checkpointer().wait_until_finished()
        return checkpointer().restore(file, jax.eval_shape(same, model))


COPIES = {
    "device_put": Op("`device_put`", put(jax.devices()[1])),
    "sharded": Op(
        "`device_put` to a `NamedSharding`", put(SHARDING),
    ),
    "deepcopy": Op("`deepcopy`", lambda m, host, name: copy.deepcopy(m)),
    "pickle": Op("`pickle`", lambda m, host, name: pickle.loads(pickle.dumps(m))),
    "orbax": Op("orbax", through_orbax, on=not_empty),
    "msgpack": Op("flax `to_bytes`", through_msgpack),
    "safetensors": Op("safetensors", through_safetensors),
}  # fmt: skip

# ----------------------------------------------------------------------------------------- optax


def signs(a: np.ndarray) -> np.ndarray:
    return np.sign(a.real) + 1j * np.sign(a.imag) if a.dtype.kind == "c" else np.sign(a)


def length(g: np.ndarray, name: str) -> float:
    """The norm of all gradients; pieces of memory have the same each."""
    kind = KINDS[name]
    if kind.apart:
        g = np.concatenate([read(g).reshape(-1) for read in kind.reads])
    return np.sqrt((np.abs(g) ** 2).sum()) or 1.0


def optimized(optimizer: optax.GradientTransformation) -> Run:
    def run(model: Any, host: Host, name: str) -> Any:
        grads = jax.tree.map(jnp.conj, jax.grad(host.losses[name])(model))
        updates, _ = optimizer.update(grads, optimizer.init(model), model)
        return optax.apply_updates(model, updates)

    return run


def moved(by: Callable[[np.ndarray, np.ndarray, str], Any]) -> Callable[[str], Change]:
    def memory(name: str) -> Change:
        return lambda a: (a - RATE * by(a, KINDS[name].gradient(a), name)).astype(a.dtype)

    return memory


def adam(a: np.ndarray, g: np.ndarray, name: str) -> Any:
    """The first step of Adam: what is left of the gradient's length is its direction."""
    return g / np.where(g == 0, 1, np.abs(g))


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE))
TRAINING = {
    "sgd": Op("SGD", optimized(optax.sgd(RATE)), stepped),
    "adam": Op("Adam", optimized(optax.adam(RATE)), moved(adam)),
    "adamw": Op(
        "AdamW", optimized(optax.adamw(RATE, weight_decay=0.1)),
        moved(lambda a, g, name: adam(a, g, name) + 0.1 * a),
    ),
    "clipping": Op(
        "`clip_by_global_norm`", optimized(CLIPPED),
        moved(lambda a, g, name: g / length(g, name)),
    ),
}  # fmt: skip

# ------------------------------------------------------------------------------------------ tied


def raveled(model: Any, host: Host, name: str) -> Any:
    vector, unravel = tied.ravel(model)
    return unravel(vector * 2)


def rounded(name: str) -> Change:
    return lambda a: a.astype(ml_dtypes.bfloat16).astype(a.dtype)


def assigned(number: int) -> Run:
    """Writes twice a member's values to its place."""

    def run(model: Any, host: Host, name: str) -> Any:
        member = NAMES[number]
        new = jnp.asarray(host.get(model, member)) * 2
        if isinstance(model, tied.Bundle):
            return model.set(host.path(member), new)
        model[member]["w"] = new
        return model

    return run


def written(number: int) -> Callable[[str], Change]:
    """Memory after a member's values became twice what they were."""

    def memory(name: str) -> Change:
        def change(a: np.ndarray) -> np.ndarray:
            a = a.copy()
            places = KINDS[name].reads[number](np.arange(a.size).reshape(a.shape))
            a.reshape(-1)[places] *= 2
            return a

        return change

    return memory


def is_tied(name: str) -> bool:
    return KINDS[name].tied


OURS = {
    "map": Op("`map`", lambda m, host, name: tied.map(lambda x: x * 2, m), to_twice),
    "cast": Op("`bf16`, `f32`", lambda m, host, name: tied.f32(tied.bf16(m)), rounded, real_only),
    "to": Op("`to` a device", lambda m, host, name: tied.to(m, "cpu:1")),
    "to_sharding": Op("`to` a sharding", lambda m, host, name: tied.to(m, SHARDING)),
    "copy": Op("`copy`", lambda m, host, name: tied.copy(m)),
    "split": Op("`split`, `merge`", lambda m, host, name: tied.merge(*tied.split(m))),
    "ravel": Op("`ravel`", raveled, to_twice),
    "set": Op("`set` of the first", assigned(0), written(0), is_tied),
    "set_second": Op("`set` of the second", assigned(1), written(1), is_tied),
}  # fmt: skip
GROUPS = {
    "Transformations": TRANSFORMS,
    "Batches, loops, programs": PROGRAMS,
    "Devices, copies, files": COPIES,
    "optax": TRAINING,
    "tied's own": OURS,
}
