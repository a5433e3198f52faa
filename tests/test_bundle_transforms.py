"""A Bundle goes as it is through every transform of JAX.

Each transform is one function of (loss or network, parameters), run twice: over the bundle, and
over the tuple of its storages with the network written by hand. Both have to give the same tree
with the same arrays, so a transform that untied, copied or reordered anything would be seen.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tied
from bundles import CASES, KINDS, Case, X, assert_same, opened

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

Net = Callable[[Any, Any], Any]


def loss_of(net: Net) -> Net:
    return lambda p, x: jnp.mean(net(p, x) ** 2)


def stepped(p: Any, grads: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)


def scan_carry(net: Net, p: Any) -> Any:
    def step(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of(net))(p, x)
        return stepped(p, grads), value

    return jax.lax.scan(step, p, X.reshape(4, 2, 4))


def fori_loop(net: Net, p: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, p: stepped(p, jax.grad(loss_of(net))(p, X)), p)


def while_loop(net: Net, p: Any) -> Any:
    def body(carry: Any) -> Any:
        i, p = carry
        return i + 1, stepped(p, jax.grad(loss_of(net))(p, X))

    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, p))


def sharded(net: Net, p: Any) -> Any:
    """Data parallel: the parameters everywhere, a row of the batch on each device."""

    @functools.partial(
        jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    def step(p: Any, x: Any) -> Any:
        return jax.lax.pmean(jax.grad(loss_of(net))(p, x), "data")

    return jax.jit(step)(p, X)


def custom(net: Net, p: Any) -> Any:
    @jax.custom_vjp
    def clipped(p: Any) -> Any:
        return loss_of(net)(p, X)

    def backward(residual: Any, g: Any) -> Any:
        return (jax.tree.map(lambda w: jnp.clip(g * w, -0.1, 0.1), residual),)

    clipped.defvjp(lambda p: (clipped(p), p), backward)
    return jax.value_and_grad(clipped)(p)


def linearized(net: Net, p: Any) -> Any:
    out, forward = jax.linearize(lambda p: net(p, X), p)
    transposed = jax.linear_transpose(forward, p)
    return out, forward(p), transposed(out)


def exported(net: Net, p: Any) -> Any:
    """Through bytes, as it would be served by another process."""
    written = jax.export.export(jax.jit(jax.grad(loss_of(net))))(p, X).serialize()
    return jax.export.deserialize(written).call(p, X)


def donated(net: Net, p: Any) -> Any:
    step = jax.jit(lambda p: stepped(p, jax.grad(loss_of(net))(p, X)), donate_argnums=0)
    mine = jax.tree.map(jnp.copy, p)
    after = step(mine)
    assert all(x.is_deleted() for x in jax.tree.leaves(mine))
    return after


def pulled(net: Net, p: Any) -> Any:
    out, back = jax.vjp(lambda p: net(p, X), p)
    return out, back(out)


def cond(net: Net, p: Any) -> Any:
    def branches(flag: Any, p: Any) -> Any:
        return jax.lax.cond(flag, lambda p: jax.grad(loss_of(net))(p, X), lambda p: p, p)

    both = jax.jit(branches)
    return both(True, p), both(False, p)


def remat(net: Net, p: Any) -> Any:
    policy = jax.checkpoint_policies.nothing_saveable
    return jax.jit(jax.grad(jax.checkpoint(loss_of(net), policy=policy)))(p, X)


TRANSFORMS: dict[str, Callable[[Net, Any], Any]] = {
    "jit": lambda net, p: jax.jit(net)(p, X),
    "jit_gives_it_back": lambda net, p: jax.jit(lambda p: (p, p))(p),
    "grad": lambda net, p: jax.jit(jax.grad(loss_of(net)))(p, X),
    "value_and_grad": lambda net, p: jax.jit(jax.value_and_grad(loss_of(net)))(p, X),
    "hessian": lambda net, p: jax.jit(jax.hessian(loss_of(net)))(p, X),
    "jacfwd": lambda net, p: jax.jit(jax.jacfwd(net))(p, X[:2]),
    "jacrev": lambda net, p: jax.jit(jax.jacrev(net))(p, X[:2]),
    "jvp": lambda net, p: jax.jvp(lambda p: net(p, X), (p,), (p,)),
    "vjp": pulled,
    "linearize_and_transpose": linearized,
    "vmap_over_the_data": lambda net, p: jax.vmap(net, in_axes=(None, 0))(p, X),
    "grad_for_each_example": lambda net, p: jax.vmap(jax.grad(loss_of(net)), (None, 0))(
        p, X[:, None]
    ),
    "scan_carry": scan_carry,
    "fori_loop": fori_loop,
    "while_loop": while_loop,
    "cond": cond,
    "remat": remat,
    "eval_shape": lambda net, p: jax.eval_shape(jax.grad(loss_of(net)), p, X),
    "shard_map": sharded,
    "lowered_and_compiled": lambda net, p: (
        jax.jit(jax.grad(loss_of(net))).lower(p, X).compile()(p, X)
    ),
    "lowered_from_shapes": lambda net, p: (
        jax.jit(net).lower(*jax.eval_shape(lambda p: (p, X), p)).compile()(p, X)
    ),
    "export": exported,
    "custom_vjp": custom,
    "donation": donated,
    "device_put": lambda net, p: jax.device_put(p, jax.devices()[3]),
    "device_put_sharded": lambda net, p: jax.device_put(p, jax.NamedSharding(MESH, P())),
    "tree_map": lambda net, p: jax.tree.map(lambda a, b: a + 2 * b, p, p),
    "ravel_pytree": lambda net, p: jax.flatten_util.ravel_pytree(p)[0],
    "pickle": lambda net, p: pickle.loads(pickle.dumps(p)),
    "deepcopy": lambda net, p: copy.deepcopy(p),
    "pure_callback": lambda net, p: jax.jit(
        lambda p: jax.pure_callback(lambda p: jax.tree.map(np.negative, p), p, p)
    )(p),
}
# Every transform meets every kind of tie; the containers take turns, and these meet both.
BOTH = {"jit", "value_and_grad", "vmap_over_the_data", "scan_carry", "donation", "pickle"}
ONE_EACH = [f"{container}-{kind}" for kind, container in zip(
    KINDS, ["dict", "equinox", "dict", "equinox"], strict=True)]  # fmt: skip
OTHERS = [name for name in CASES if name not in ONE_EACH]
GRID = [
    (transform, name)
    for turn, transform in enumerate(TRANSFORMS)
    for name in (CASES if transform in BOTH else (ONE_EACH, OTHERS)[turn % 2])
]


@pytest.mark.parametrize(("transform", "name"), GRID)
def test_a_bundle_is_to_a_transform_what_its_storages_are(transform: str, name: str) -> None:
    case, run = CASES[name], TRANSFORMS[transform]
    bundle = case.bundle()
    storages = opened(bundle)
    assert len(storages) == 2
    assert_same(run(case.call, bundle), run(case.by_hand, storages))


# ------------------------------------------------------------- ensembles, layers in a scan


def stacked(case: Case, count: int = 3) -> tuple[tied.Bundle, Any]:
    """Networks made by vmap, and the same arrays stacked by hand."""
    keys = jax.random.split(jax.random.key(1), count)
    made = jax.vmap(case.bundle)(keys)
    singles = [opened(case.bundle(key)) for key in keys]
    return made, jax.tree.map(lambda *xs: jnp.stack(xs), *singles)


def scanned(net: Net, p: Any) -> Any:
    def loss(p: Any) -> Any:
        h, norms = jax.lax.scan(lambda h, layer: (h + net(layer, h), jnp.sum(h**2)), X, p)
        return jnp.mean(h**2) + jnp.sum(norms)

    return jax.jit(jax.value_and_grad(loss))(p)


def scanned_with_remat(net: Net, p: Any) -> Any:
    def loss(p: Any) -> Any:
        body = jax.checkpoint(lambda h, layer: (h + net(layer, h), None))
        return jnp.mean(jax.lax.scan(body, X, p)[0] ** 2)

    return jax.grad(loss)(p)


ENSEMBLES: dict[str, Callable[[Net, Any], Any]] = {
    "outputs": lambda net, p: jax.vmap(net, in_axes=(0, None))(p, X),
    "outputs_of_own_data": lambda net, p: jax.vmap(net)(p, jnp.stack([X, -X, 2 * X])),
    "steps": lambda net, p: jax.jit(
        jax.vmap(lambda p: stepped(p, jax.grad(loss_of(net))(p, X)), out_axes=0)
    )(p),
    "sum_of_losses": lambda net, p: jax.grad(
        lambda p: jax.vmap(loss_of(net), in_axes=(0, None))(p, X).sum()
    )(p),
    "moved_axis": lambda net, p: jax.vmap(lambda p: p, out_axes=1)(p),
    "scan_over_layers": scanned,
    "scan_over_layers_with_remat": scanned_with_remat,
    "map": lambda net, p: jax.lax.map(lambda p: net(p, X), p),
    "one_of_them": lambda net, p: net(jax.tree.map(lambda a: a[1], p), X),
    "vmap_in_vmap": lambda net, p: jax.vmap(
        jax.vmap(net, in_axes=(None, 0)), in_axes=(0, None)
    )(p, X),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("transform", ENSEMBLES)
def test_bundles_that_vmap_made_are_one_bundle_of_stacked_storages(
    transform: str, name: str
) -> None:
    case, run = CASES[name], ENSEMBLES[transform]
    bundle, storages = stacked(case)
    assert_same(bundle, storages)
    assert_same(run(case.call, bundle), run(case.by_hand, storages))


@pytest.mark.parametrize("name", ["dict-transpose", "equinox-overlapping_slices"])
def test_a_bundle_of_axes_or_specs_is_a_prefix_like_any_tree(name: str) -> None:
    case = CASES[name]
    bundle, storages = stacked(case, count=8)
    axes = jax.tree.map(lambda _: 0, bundle)
    ours = jax.vmap(case.call, in_axes=(axes, None))(bundle, X)
    assert_same(ours, jax.vmap(case.by_hand, in_axes=(0, None))(storages, X))
    specs = jax.tree.map(lambda _: P("data"), bundle)
    one = jax.shard_map(
        lambda b: case.call(jax.tree.map(lambda a: a[0], b), X)[None],
        mesh=MESH, in_specs=(specs,), out_specs=P("data"),
    )  # fmt: skip
    np.testing.assert_allclose(one(bundle), ours, rtol=1e-6)


# --------------------------------------------------------------- equal models, static skeletons


def traced(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """The function, and a list that grows each time it is traced."""
    traces: list[int] = []

    def run(*args: Any) -> Any:
        traces.append(1)
        return function(*args)

    return run, traces


@pytest.mark.parametrize("name", CASES)
def test_equal_models_do_not_compile_again(name: str) -> None:
    """Made anew, trained, unpickled, copied, merged and split again: one trace for all."""
    case = CASES[name]
    run, traces = traced(loss_of(case.call))
    step = jax.jit(run)
    bundle = case.bundle()
    others = [
        case.bundle(jax.random.key(7)),
        jax.tree.map(lambda a: a + 1, bundle),
        pickle.loads(pickle.dumps(bundle)),
        copy.deepcopy(bundle),
        tied.copy(bundle),
        tied.Bundle(bundle.skeleton.merge(bundle.storages)),
    ]
    values = {float(step(b, X)) for b in (bundle, *others)}
    assert len(traces) == 1
    assert len(values) == 3


@pytest.mark.parametrize("name", CASES)
def test_a_skeleton_is_a_static_argument(name: str) -> None:
    case = CASES[name]

    def loss(skeleton: tied.Skeleton, weights: Any, x: Any) -> Any:
        return loss_of(case.call)(skeleton.merge(weights, plain=True), x)

    run, traces = traced(loss)
    step = jax.jit(jax.value_and_grad(run, argnums=1), static_argnums=0)
    for key in range(3):
        skeleton, weights = tied.split(case.model(jax.random.key(key)))
        value, grads = step(skeleton, weights, X)
        expected, by_hand = jax.value_and_grad(loss_of(case.by_hand))(tuple(weights.values()), X)
        assert list(grads) == sorted(weights)  # JAX sorts the keys of a dict
        assert_same((value, tuple(grads[k] for k in weights)), (expected, by_hand))
    assert len(traces) == 1


def test_another_tie_is_another_program() -> None:
    """Same storages, other readings: the compiled program of one is never used for the other."""
    w = jnp.arange(9.0).reshape(3, 3)
    readings = [lambda w: w.T, lambda w: w[::-1], lambda w: w[:, ::-1]]
    models = [{"a": w, "b": w}, *({"a": w, "b": tied.view(w, read)} for read in readings)]
    run, traces = traced(lambda bundle: bundle["b"] @ jnp.arange(3.0))
    step = jax.jit(run)
    for model, read in zip(models, [lambda w: w, *readings], strict=True):
        np.testing.assert_array_equal(step(tied.Bundle(model)), read(w) @ jnp.arange(3.0))
    assert len(traces) == 4
