"""Flax NNX, linen, Equinox and optax: modules, variables, states and settings around ties."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tied


def doubled(x: Any) -> Any:
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 2


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "copy": tied.copy,
    "map": lambda m: tied.map(doubled, m),
    "f16": tied.f16,
    "to_second_device": lambda m: tied.to(m, "cpu:1"),
    "split_and_merge": lambda m: tied.merge(*tied.split(m)),
    "pickle_of_split": lambda m: tied.merge(*pickle.loads(pickle.dumps(tied.split(m)))),
}


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return OPERATIONS[request.param]


# ------------------------------------------------------------------------------------ Flax NNX


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


class Network(nnx.Module):
    """A shared Param, a shared layer, a list of layers, generators and a Param with metadata."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(4, 4, rngs=rngs)
        self.head = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding
        self.first = Block(rngs)
        self.blocks = nnx.List([self.first, Block(rngs), self.first])
        self.table = nnx.Dict(again=self.blocks[1])
        self.marked = nnx.Param(jnp.ones(2), role="kept")
        self.name = "network"

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def network() -> Network:
    return Network(nnx.Rngs(0))


def test_nnx_modules_keep_shared_params_layers_lists_and_settings(operation: Any) -> None:
    model = network()
    after = operation(model)
    assert type(after) is Network
    assert after.head.kernel is after.embed.embedding
    assert after.blocks[0] is after.blocks[2] is after.first
    assert after.table["again"] is after.blocks[1]
    assert type(after.blocks) is nnx.List
    assert type(after.first.norm.mean) is nnx.BatchStat
    assert after.marked.role == "kept"
    assert after.name == "network"
    assert after is not model
    assert after.embed.embedding is not model.embed.embedding
    assert tied.ties(after).groups == tied.ties(model).groups
    assert jax.tree.structure(nnx.state(after)) == jax.tree.structure(nnx.state(model))
    assert nnx.graphdef(after) == nnx.graphdef(model)


@pytest.mark.parametrize("name", ["copy", "split_and_merge", "pickle_of_split"])
def test_nnx_modules_compute_what_they_computed(name: str) -> None:
    model = network()
    after = OPERATIONS[name](model)
    tokens = jnp.array([[0, 1, 2]])
    np.testing.assert_array_equal(after(tokens), model(tokens))
    np.testing.assert_array_equal(after(tokens), model(tokens))  # the generators went on alike


def test_nnx_generators_of_a_copy_are_its_own() -> None:
    rngs = nnx.Rngs(0)
    again = tied.copy({"rngs": rngs, "same": rngs})
    assert again["rngs"] is again["same"]
    one = again["rngs"].params()
    assert jnp.array_equal(jax.random.key_data(one), jax.random.key_data(rngs.params()))
    assert not jnp.array_equal(jax.random.key_data(one), jax.random.key_data(rngs.params()))


def test_nnx_keys_and_counts_are_never_cast() -> None:
    after = tied.f16(network())
    stream = after.first.dropout.rngs
    dtypes = {str(x.dtype) for x in jax.tree.leaves(nnx.state(stream))}
    assert "float16" not in dtypes
    assert after.first.linear.kernel.dtype == jnp.float16


def nnx_step(model: Any, optimizer: Any) -> None:
    tokens = jnp.array([[0, 1, 2]])
    grads = nnx.grad(lambda m: (m(tokens) ** 2).mean())(model)
    optimizer.update(model, grads)


def test_an_nnx_optimizer_moves_with_its_model() -> None:
    model = network()
    model.eval()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    nnx_step(model, optimizer)
    before = model.embed.embedding.get_value()
    after, moved = tied.copy((model, optimizer))
    assert int(moved.step.get_value()) == 1
    nnx_step(after, moved)
    assert after.head.kernel is after.embed.embedding
    assert model.embed.embedding.get_value() is before
    assert not jnp.array_equal(after.embed.embedding.get_value(), before)
    nnx_step(model, optimizer)
    np.testing.assert_array_equal(
        model.embed.embedding.get_value(), after.embed.embedding.get_value()
    )
    assert int(optimizer.step.get_value()) == int(moved.step.get_value()) == 2


def test_an_nnx_module_can_be_split_by_the_kind_of_variable() -> None:
    skeleton, params, stats, rest = tied.split(network(), nnx.Param, nnx.BatchStat)
    assert "embed.embedding" in params
    assert all("norm.mean" in name or "norm.var" in name for name in stats)
    assert len(stats) == 4
    assert all("rngs" in name for name in rest)
    assert skeleton.merge(params, stats, rest).head.kernel.get_value() is params["embed.embedding"]


def test_a_trained_step_on_the_storages_of_an_nnx_module_keeps_its_ties() -> None:
    model = network()
    model.eval()
    skeleton, params, rest = tied.split(model, nnx.Param)
    tokens = jnp.array([[0, 1, 2]])

    @jax.jit
    def loss(params: Any) -> Any:
        return (skeleton.merge(params, rest)(tokens) ** 2).mean()

    grads = jax.grad(loss)(params)
    after = skeleton.merge(jax.tree.map(lambda w, g: w - 0.01 * g, params, grads), rest)
    assert after.head.kernel is after.embed.embedding
    assert (after(tokens) ** 2).mean() < loss(params)
    both = nnx.grad(lambda m: (m(tokens) ** 2).mean())(model)
    np.testing.assert_allclose(
        grads["embed.embedding"], both["embed"]["embedding"].get_value(), rtol=1e-5
    )


# -------------------------------------------------------------------------------------- Equinox


def twice(x: Any) -> Any:
    return 2 * x


def squashed(x: Any) -> Any:
    return jnp.tanh(x)


class Cell(eqx.Module):
    weight: Any
    transposed: Any
    bias: Any = None
    size: int = eqx.field(static=True, default=3)
    activation: Any = eqx.field(static=True, default=squashed)
    function: Callable[..., Any] = twice

    def __call__(self, x: Any) -> Any:
        return self.function(self.activation(self.weight @ x))


def cell() -> Cell:
    w = jnp.arange(6.0).reshape(2, 3) / 8
    return Cell(w, tied.transpose(w), w[0] * 1)


def test_equinox_modules_keep_static_fields_and_ties(operation: Any) -> None:
    model = cell()
    after = operation(model)
    assert type(after) is Cell
    assert tied.ties(after).groups == (("weight", "transposed"),)
    assert (after.size, after.activation, after.function) == (3, squashed, twice)
    with pytest.raises(AttributeError):
        after.size = 4


def test_an_equinox_module_of_no_arrays_is_the_same_object() -> None:
    model = {"act": eqx.nn.Lambda(jax.nn.relu), "w": jnp.ones(2)}
    assert tied.map(doubled, model)["act"] is model["act"]


class Holder(eqx.Module):
    """A method stored as an attribute (J18, equinox#536)."""

    weight: Any
    run: Any


def test_a_method_stored_as_an_attribute_is_bound_to_the_new_module(operation: Any) -> None:
    inner = cell()
    after = operation({"inner": inner, "holder": Holder(inner.weight, inner.__call__)})
    assert after["holder"].run.__self__ is after["inner"]
    assert after["holder"].weight is after["inner"].weight


def test_equinox_layers_shared_in_a_sequential_stay_shared(operation: Any) -> None:
    layer = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    model = eqx.nn.Sequential([layer, eqx.nn.Lambda(twice), layer])
    after = operation(model)
    assert after.layers[0] is after.layers[2]
    assert type(after.layers) is tuple
    assert tied.ties(after).groups == tied.ties(model).groups


def test_equinox_state_and_its_indices_stay_together() -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    after, moved = tied.copy((norm, state))
    x = jnp.arange(6.0).reshape(2, 3)
    out, _ = jax.vmap(after, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, moved)
    assert out.shape == (2, 3)


def test_a_bundle_of_an_equinox_module_is_called_like_it() -> None:
    model = cell()
    bundle = tied.Bundle(model)
    x = jnp.ones(3)
    np.testing.assert_array_equal(jax.jit(lambda b, x: b(x))(bundle, x), model(x))
    grads = eqx.filter_grad(lambda b: b(x).sum())(bundle)
    assert list(grads.storages) == ["weight", "bias"]
    assert bundle.size == 3
    assert bundle.transposed.shape == (3, 2)
    with pytest.raises(AttributeError):
        bundle.weight = x


BUNDLED: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"weight": (w := jnp.ones((2, 3))), "transposed": tied.transpose(w)},
    "equinox": cell,
    "nnx": network,
}


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundle_reports_the_ties_of_its_model(name: str) -> None:
    model = BUNDLED[name]()
    bundle = tied.Bundle(model)
    assert tied.ties(bundle).groups == tied.ties(model).groups
    tied.check(bundle, model)
    after = tied.f16(bundle)
    assert type(after) is tied.Bundle
    tied.check(after, model)
    assert list(after.storages) == list(bundle.storages)


def test_a_bundle_of_a_container_is_one() -> None:
    bundle = tied.Bundle(BUNDLED["dict"]())
    assert len(bundle) == 2
    assert list(bundle) == ["weight", "transposed"]
    assert "weight" in bundle
    assert "head" not in bundle
    w = jnp.ones(2)
    assert [x.shape for x in tied.Bundle([w, w])] == [(2,), (2,)]


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda b: jax.jit(lambda b: b)(b),
    "eval_shape": lambda b: jax.eval_shape(lambda b: b, b),
    "while_loop": lambda b: jax.lax.while_loop(lambda c: False, lambda c: c, b),
    "cond": lambda b: jax.lax.cond(True, lambda b: b, lambda b: b, b),
    "device_put": lambda b: jax.device_put(b, jax.devices()[2]),
    "filter_jit": lambda b: eqx.filter_jit(lambda b: b)(b),
    "partition": lambda b: eqx.combine(*eqx.partition(b, eqx.is_array)),
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
    "optax": lambda b: optax.apply_updates(
        b, optax.adam(0.1).update(b, optax.adam(0.1).init(b), b)[0]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_bundle_comes_back_from_jax_as_a_bundle(transform: str) -> None:
    bundle = tied.Bundle(cell())
    after = TRANSFORMS[transform](bundle)
    assert type(after) is tied.Bundle
    assert after.skeleton == bundle.skeleton
    assert list(after.storages) == ["weight", "bias"]
    assert after.transposed.shape == (3, 2)


# ------------------------------------------------------------------------------ linen and optax


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(3)(flax.linen.BatchNorm(use_running_average=True)(x))


def test_linen_variables_are_dicts_and_apply_takes_them(operation: Any) -> None:
    variables = Linen().init(jax.random.key(0), jnp.ones((1, 3)))
    variables["params"]["again"] = variables["params"]["Dense_0"]["kernel"]
    after = operation(variables)
    assert after["params"]["again"] is after["params"]["Dense_0"]["kernel"]
    assert list(after) == list(variables)
    after["params"].pop("again")
    assert Linen().apply(after, jnp.ones((1, 3), after["params"]["Dense_0"]["bias"].dtype)).shape


OPTIMIZERS: dict[str, Any] = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.0, 10)),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "t": False}),
    "hyperparameters": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "apply_every": optax.apply_every(2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_states_move_along_with_the_parameters(name: str) -> None:
    params = {"w": jnp.ones((2, 3)), "t": jnp.zeros(3)}
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(params)
    _, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    moved_params, moved = tied.to((params, state), "cpu:1")
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    devices = {d for x in jax.tree.leaves(moved) for d in x.devices()}
    assert devices == {jax.devices()[1]}
    grads = jax.tree.map(jnp.ones_like, moved_params)
    one, _ = optimizer.update(grads, moved, moved_params)
    other, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_state_that_starts_as_the_parameters_themselves_is_tied_to_them() -> None:
    """Averages and look-ahead start as the parameters; after a cast they still do."""
    params = {"w": jnp.ones((2, 3))}
    state = optax.lookahead(optax.sgd(0.1), 5, 0.5).init(
        optax.LookaheadParams(fast=params, slow=params)
    )
    model = {"params": params, "slow": params["w"], "state": state}
    after = tied.f16(model)
    assert after["params"]["w"] is after["slow"]
    assert tied.ties(after).groups == tied.ties(model).groups


def test_a_state_over_storages_has_one_moment_for_each() -> None:
    skeleton, storages = tied.split(cell())
    state = optax.adam(0.1).init(storages)
    assert set(state[0].mu) == set(skeleton.names) == {"weight", "bias"}


# --------------------------------------------------------------------------- shardings, abstract


def test_a_sharded_model_keeps_its_shardings_through_a_cast() -> None:
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=axes)
    target = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    w = jax.device_put(jnp.ones((8, 4)), target)
    after = tied.bf16({"w": w, "t": tied.transpose(w), "row": tied.view(w, lambda a: a[2])})
    assert after["w"].sharding == target
    assert after["t"].base is after["row"].base is after["w"]
    assert after["t"].read().shape == (4, 8)


def test_an_abstract_model_is_cast_and_made_real_with_its_ties() -> None:
    skeleton, storages = tied.split(cell())
    abstract = skeleton.merge(jax.eval_shape(lambda s: s, storages))
    assert tied.ties(abstract).groups == (("weight", "transposed"),)
    after = tied.empty(tied.f16(abstract))
    assert isinstance(after.weight, jax.Array)
    assert after.weight.dtype == jnp.float16
    assert after.transposed.base is after.weight
