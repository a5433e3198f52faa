"""A Bundle goes as it is through Equinox's transforms, optax and orbax.

As in test_bundle_transforms.py, each is one function run over the bundle and over the tuple of its
storages, with the network written by hand.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import tied
from bundles import CASES, KINDS, X, assert_same, opened
from test_bundle_transforms import ONE_EACH, Net, loss_of, stacked

# ------------------------------------------------------------------------------------- Equinox


def serialised(net: Net, p: Any) -> Any:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, p)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, jax.tree.map(jnp.zeros_like, p))


def partitioned(net: Net, p: Any) -> Any:
    """Only the matrices are trained: the partition is by storage."""
    trained, frozen = eqx.partition(p, lambda a: a.ndim == 2)

    def loss(trained: Any) -> Any:
        return loss_of(net)(eqx.combine(trained, frozen), X)

    grads = eqx.filter_grad(loss)(trained)
    return grads, eqx.apply_updates(p, grads)


def custom_vjp(net: Net, p: Any) -> Any:
    @eqx.filter_custom_vjp
    def function(p: Any) -> Any:
        return loss_of(net)(p, X)

    @function.def_fwd
    def forward(perturbed: Any, p: Any) -> Any:
        return function(p), None

    @function.def_bwd
    def backward(residual: Any, g: Any, perturbed: Any, p: Any) -> Any:
        return jax.tree.map(lambda w: g * w, p)

    return eqx.filter_grad(function)(p)


EQUINOX: dict[str, Callable[[Net, Any], Any]] = {
    "filter_jit": lambda net, p: eqx.filter_jit(net)(p, X),
    "filter_grad": lambda net, p: eqx.filter_jit(eqx.filter_grad(loss_of(net)))(p, X),
    "filter_value_and_grad": lambda net, p: eqx.filter_value_and_grad(loss_of(net))(p, X),
    "filter_eval_shape": lambda net, p: eqx.filter_eval_shape(net, p, X),
    "filter_jacrev": lambda net, p: eqx.filter_jacrev(net)(p, X[:1]),
    "filter_jvp": lambda net, p: eqx.filter_jvp(lambda p: net(p, X), (p,), (p,)),
    "filter_checkpoint": lambda net, p: jax.grad(eqx.filter_checkpoint(loss_of(net)))(p, X),
    "filter_closure_convert": lambda net, p: (
        eqx.filter_closure_convert(lambda x: net(p, x), X)(X)
    ),
    "filter_custom_vjp": custom_vjp,
    "filter_pure_callback": lambda net, p: eqx.filter_pure_callback(
        lambda p: jax.tree.map(np.negative, p), p, result_shape_dtypes=eqx.filter_eval_shape(
            lambda p: p, p)
    ),
    "filter": lambda net, p: eqx.filter(p, lambda a: a.ndim == 1, inverse=True),
    "partition_and_combine": partitioned,
    "serialise_leaves": serialised,
    "filter_shard": lambda net, p: eqx.filter_shard(p, jax.devices()[2]),
    "donate_all": lambda net, p: eqx.filter_jit(
        lambda p: jax.tree.map(lambda a: a * 2, p), donate="all"
    )(jax.tree.map(jnp.copy, p)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("transform", EQUINOX)
def test_equinox_takes_a_bundle_as_it_takes_its_storages(transform: str, name: str) -> None:
    case, run = CASES[name], EQUINOX[transform]
    bundle = case.bundle()
    assert_same(run(case.call, bundle), run(case.by_hand, opened(bundle)))


@pytest.mark.parametrize("name", ONE_EACH)
def test_filter_vmap_makes_and_calls_ensembles(name: str) -> None:
    case = CASES[name]
    keys = jax.random.split(jax.random.key(1), 3)
    bundle = eqx.filter_vmap(case.bundle)(keys)
    _, storages = stacked(case)
    assert_same(bundle, storages)
    ours = eqx.filter_vmap(case.call, in_axes=(eqx.if_array(0), None))(bundle, X)
    assert_same(ours, jax.vmap(case.by_hand, (0, None))(storages, X))


def test_tree_at_on_a_bundle_writes_into_the_storage() -> None:
    """Where a storage is replaced, every reading of it follows."""
    bundle = CASES["equinox-transpose"].bundle()
    new = jnp.arange(12.0).reshape(4, 3)
    after = eqx.tree_at(lambda b: b.storages["first.w"], bundle, new)
    np.testing.assert_array_equal(after.first.w, new)
    np.testing.assert_array_equal(after.second, new.T)


def test_two_bundles_are_equal_to_equinox_when_their_storages_are() -> None:
    case = CASES["equinox-diagonal"]
    assert bool(eqx.tree_equal(case.bundle(), case.bundle()))
    assert not bool(eqx.tree_equal(case.bundle(), case.bundle(jax.random.key(3))))
    assert eqx.tree_equal(case.bundle(), CASES["equinox-same_object"].bundle()) is False


# --------------------------------------------------------------------------------------- optax


def by_name(p: Any) -> Any:
    """The matrices are labelled "slow", the biases "fast"; by name in a bundle."""
    if isinstance(p, tied.Bundle):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "fast" if "bias" in jax.tree_util.keystr(path) else "slow", p
        )
    return "slow", "fast"


def is_slow(p: Any) -> Any:
    return jax.tree.map(lambda label: label == "slow", by_name(p))


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformationExtraArgs]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.1, mask=is_slow),
    "adam_clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.05)),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), is_slow),
                                  optax.sgd(0.1)),
    "multi_transform": lambda: optax.multi_transform(
        {"slow": optax.sgd(0.01), "fast": optax.adam(0.1)}, by_name),
    "lbfgs": lambda: optax.lbfgs(
        memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.05), 2),
    "lookahead_free_schedule": lambda: optax.contrib.schedule_free_sgd(0.1, warmup_steps=2),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
    "freeze": lambda: optax.multi_transform(
        {"slow": optax.set_to_zero(), "fast": optax.sgd(0.1)}, by_name),
}  # fmt: skip


def trained(net: Net, p: Any, optimizer: Any, steps: int = 4) -> Any:
    def loss(p: Any) -> Any:
        return loss_of(net)(p, X)

    @jax.jit
    def step(p: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p)
        updates, state = optimizer.update(grads, state, p, **(
            {"value": value, "grad": grads, "value_fn": loss} if "lbfgs" in optimizer.name else {}
        ))  # fmt: skip
        return optax.apply_updates(p, updates), state

    state = jax.jit(optimizer.init)(p)
    for _ in range(steps):
        p, state = step(p, state)
    return p, state


class Named:
    """An optimizer with a name, as L-BFGS has to be given the function."""

    def __init__(self, name: str) -> None:
        made = OPTIMIZERS[name]()
        self.name, self.init, self.update = name, made.init, made.update


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optax_trains_a_bundle_as_it_trains_its_storages(optimizer: str) -> None:
    case = CASES[ONE_EACH[list(OPTIMIZERS).index(optimizer) % len(KINDS)]]
    bundle = case.bundle()
    ours, state = trained(case.call, bundle, Named(optimizer))
    hand, expected = trained(case.by_hand, opened(bundle), Named(optimizer))
    assert_same(ours, hand, rtol=2e-5)
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_an_average_of_the_weights_is_a_bundle_and_is_used_as_one() -> None:
    case = CASES["dict-transpose"]
    bundle = case.bundle()
    average = optax.ema(0.5, debias=False)
    mean, _ = average.update(bundle, average.init(bundle))
    assert_same(mean, jax.tree.map(lambda a: a / 2, opened(bundle)))
    again = optax.incremental_update(bundle, mean, 0.25)
    assert type(again) is tied.Bundle
    np.testing.assert_array_equal(again["second"], again["first"]["w"].T)


@pytest.mark.parametrize("name", CASES)
def test_norms_and_counts_have_each_storage_once(name: str) -> None:
    bundle = CASES[name].bundle()
    square = sum(np.sum(np.square(a)) for a in opened(bundle))
    np.testing.assert_allclose(optax.tree.norm(bundle), np.sqrt(square), rtol=1e-6)
    assert optax.tree.size(bundle) == sum(a.size for a in opened(bundle))


# --------------------------------------------------------------------------------------- orbax


def bytes_under(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def noise(size: int) -> jax.Array:
    """Values that no compression makes smaller: any bits but those of NaN and infinity."""
    return jax.random.uniform(jax.random.key(0), (size, size), minval=-1.0)


def saved(folder: Path, tree: Any) -> int:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
        checkpointer.wait_until_finished()
    return bytes_under(folder)


def restored(folder: Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, jax.eval_shape(lambda x: x, like))


READS = {name: kind.second for name, kind in KINDS.items()}


@pytest.mark.parametrize("kind", ["same_object", "transpose", "diagonal"])
def test_orbax_writes_each_storage_once_and_gives_the_ties_back(kind: str, tmp_path: Path) -> None:
    """M16: a tied 4 MB array takes 7.76 MB on disk without a bundle."""
    w = noise(512)
    tie = w if kind == "same_object" else tied.view(w, READS[kind])
    bundle = tied.Bundle({"a": w, "b": tie})
    twice = saved(tmp_path / "plain", bundle.model)
    alone = saved(tmp_path / "alone", {"a": w})
    ours = saved(tmp_path / "bundle", bundle)
    split = saved(tmp_path / "split", tied.split({"a": w, "b": tie})[1])
    assert ours < alone + 2_000
    assert split < alone + 2_000
    if kind != "diagonal":
        assert twice > 1.9 * ours
    after = restored(tmp_path / "bundle", bundle)
    assert type(after) is tied.Bundle
    assert after.skeleton == bundle.skeleton
    np.testing.assert_array_equal(after["a"], w)
    np.testing.assert_array_equal(after["b"], READS[kind](np.asarray(w)))
    tied.check(after.skeleton.merge(after.storages), {"a": w, "b": tie})


def test_a_restored_bundle_can_be_donated(tmp_path: Path) -> None:
    """J13: what orbax gave back held its memory in the first step after a restart."""
    case = CASES["equinox-transpose"]
    bundle = case.bundle()
    state = optax.adam(0.1).init(bundle)
    saved(tmp_path / "step", {"model": bundle, "state": state})
    after = restored(tmp_path / "step", {"model": bundle, "state": state})
    arrays = jax.tree.leaves(after)
    step = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
    out = step(after)
    assert all(array.is_deleted() for array in arrays)
    assert_same(out["model"], jax.tree.map(lambda a: a + 1, opened(bundle)))


def test_training_goes_on_after_a_restart_as_if_nothing_had_been(tmp_path: Path) -> None:
    case, optimizer = CASES["dict-overlapping_slices"], optax.adam(0.05)

    @jax.jit
    def step(bundle: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss_of(case.call))(bundle, X), state)
        return optax.apply_updates(bundle, updates), state

    bundle = case.bundle()
    now = bundle, optimizer.init(bundle)
    for count in range(6):
        if count == 3:
            saved(tmp_path / "half", now)
        now = step(*now)
    again = restored(tmp_path / "half", now)
    for _ in range(3):
        again = step(*again)
    jax.tree.map(np.testing.assert_array_equal, again, now)
