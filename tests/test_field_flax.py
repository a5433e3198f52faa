"""Flax, optax and other libraries over JAX: the kinds of report of the field.

The numbers are those of the project's list of field reports, as in test_field_jax.py.
"""

from __future__ import annotations

import copy
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import tied
from test_field_jax import MODELS, donating, matrix, once, same_array

# ------------------------------------------------------------------------------ Flax, optax, others


class Decoder(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(5, use_bias=False, name="decoder")(
            flax.linen.Dense(3, use_bias=False, name="encoder")(x)
        )


def linen(tie: bool) -> Any:
    params = Decoder().init(jax.random.key(0), jnp.ones((1, 5)))["params"]
    if tie:
        params["decoder"]["kernel"] = tied.transpose(params["encoder"]["kernel"])
    else:
        params["decoder"]["kernel"] = params["encoder"]["kernel"].T
    return {"params": params}


def test_J26_a_kernel_assigned_by_transposition_trains_as_one() -> None:
    """flax#1263: `state[out][kernel] = state[in][embedding].T` trains apart, and `ties` says so."""
    assert tied.ties(linen(tie=False)).groups == ()
    variables = linen(tie=True)
    assert tied.ties(variables).groups == (("params.encoder.kernel", "params.decoder.kernel"),)
    skeleton, storages = tied.split(variables)
    x = jnp.ones((1, 5))

    def loss(storages: Any) -> Any:
        return (Decoder().apply(skeleton.merge(storages, plain=True), x) ** 2).sum()

    after = jax.tree.map(lambda w, g: w - 0.001 * g, storages, jax.grad(loss)(storages))
    params = skeleton.merge(after)["params"]
    np.testing.assert_array_equal(params["decoder"]["kernel"].read(), params["encoder"]["kernel"].T)
    assert loss(after) < loss(storages)


def test_J27_J35_J36_a_raw_parameter_is_shared_between_linen_modules_by_its_place() -> None:
    """flax#2240, transformers#11364, #13086: declare once; the report names the alias."""
    table = jnp.ones((7, 4))
    params = {"wte": {"embedding": table}, "lm_head": {"kernel": tied.transpose(table)}}
    assert "  lm_head.kernel = wte.embedding.T" in str(tied.ties(params)).splitlines()
    assert list(tied.split(params)[1]) == ["wte.embedding"]


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.head = nnx.Linear(7, 4, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding


def test_J28_J29_J34_nnx_variables_that_are_shared_stay_one() -> None:
    """flax#3516, #4030: jax.tree.map broke `m.shared is m.shared`."""
    model = Tied(nnx.Rngs(0))
    after = tied.map(once, model)
    assert after.head.kernel is after.embed.embedding
    assert type(after.head.kernel) is nnx.Param
    assert len(jax.tree.leaves(nnx.state(after))) == len(jax.tree.leaves(nnx.state(model)))


def test_J28_two_params_around_one_array_are_a_tie() -> None:
    """nnx sees two leaves there, and no duplicate."""
    w = matrix()
    model = nnx.Dict(a=nnx.Param(w), b=nnx.Param(w))
    assert len(jax.tree.leaves(nnx.state(model))) == 2
    assert tied.ties(model).groups == (("a", "b"),)
    after = tied.f16(model)
    assert after["a"] is not after["b"]
    assert after["a"].get_value() is after["b"].get_value()


def test_J30_two_attributes_that_hold_one_list_hold_one_list_after() -> None:
    """flax#3768, #4547: containers stopped being references, then became them again."""
    shared = nnx.List([nnx.Param(matrix())])
    model = nnx.Dict(one=shared, other=shared)
    after = tied.map(once, model)
    assert after["one"] is after["other"]
    plain = {"one": [matrix()]}
    plain["other"] = plain["one"]
    assert tied.copy(plain)["one"] is not plain["one"]
    after = tied.copy(plain)
    assert after["one"] is after["other"]


def test_J32_merge_makes_new_variables_and_copies_no_array() -> None:
    """flax#4912: whether merge(split(m)) holds the same Variables must be plain."""
    model = Tied(nnx.Rngs(0))
    after = tied.merge(*tied.split(model))
    assert after.embed.embedding is not model.embed.embedding
    assert after.embed.embedding.get_value() is model.embed.embedding.get_value()


def test_J33_tree_mode_bans_sharing_and_tied_does_not() -> None:
    """flax FLIP 5310, #5307: `Duplicate Param` in tree mode."""
    model = Tied(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"[Dd]uplicate"):
        nnx.split(model, graph=False)
    skeleton, storages = tied.split(model)
    assert [name for name in storages if "rngs" not in name] == ["embed.embedding"]
    assert skeleton.merge(storages).head.kernel.get_value() is storages["embed.embedding"]


def test_J37_J45_a_model_from_torch_is_tied_in_jax() -> None:
    """torchax#68, levanter#587: two weights in JAX, both change."""
    head = torch.nn.Linear(4, 7, bias=False)
    model = {"embed": head.weight, "head": head, "rows": head.weight.detach()[:2]}
    after = tied.to(model, "jax")
    assert tied.ties(after).groups == tied.ties(model).groups
    assert isinstance(after["embed"], jax.Array)


def test_J41_a_fresh_optax_state_can_be_donated() -> None:
    """M6: optax.lbfgs starts with state whose leaves are aliased."""
    params = {"w": matrix()}
    state = optax.lbfgs().init(params)
    both = {"params": params, "state": state}
    assert tied.ties(both).groups
    bundle = tied.Bundle(both)
    assert len(jax.tree.leaves(bundle)) < len(jax.tree.leaves(both))
    after = donating()(bundle)
    assert float(after["params"]["w"].sum()) == 30


def test_J42_a_copy_shares_the_settings_that_hold_no_array() -> None:
    """numpyro#2222: deepcopy duplicated every weight on each trace."""
    model = same_array()
    skeleton, storages = tied.split(model)
    again = skeleton.merge(storages)
    assert again["a"] is model["a"]
    assert copy.deepcopy(skeleton) == skeleton


@pytest.mark.parametrize("name", MODELS)
def test_J47_every_question_counts_a_shared_state_once(name: str) -> None:
    """brainstate#218: states() counted twice what flatten() counted once."""
    model = MODELS[name]()
    report = tied.ties(model)
    skeleton, storages = tied.split(model)
    vector, _ = tied.ravel(model)
    leaves = jax.tree.leaves(tied.Bundle(model))
    assert len(report.storages) == len(skeleton.names) == len(storages) == len(leaves) == 1
    assert report.parameters == vector.size == 6


class Network:
    """mlx#197: a sub-module that is also in a list."""

    def __init__(self) -> None:
        self.input = {"w": matrix()}
        self.layers = [self.input, {"w": jnp.ones(2)}]


def test_J50_a_layer_in_an_attribute_and_in_a_list_is_one_storage_with_two_names() -> None:
    """mlx#197: `parameters()` gives the same array under two names."""
    model = Network()
    assert tied.ties(model).groups == (("input.w", "layers.0.w"),)
    assert list(tied.split(model)[1]) == ["input.w", "layers.1.w"]
    after = tied.map(once, model)
    assert after.input is after.layers[0]


def test_J76_J79_a_tie_is_a_path_and_a_transform() -> None:
    """axon#169, #625, chainer#34: alias = path and optional transform."""
    w = jnp.arange(12.0).reshape(3, 4)
    transforms: dict[str, Any] = {
        "enc.T": lambda a: a.T, "enc[1:]": lambda a: a[1:], "enc.reshape(2, 6)":
        lambda a: a.reshape(2, 6), "enc[:, ::-1]": lambda a: a[:, ::-1],
        "enc.diagonal()": lambda a: a.diagonal(),
    }  # fmt: skip
    for text, transform in transforms.items():
        report = tied.ties({"enc": w, "dec": tied.view(w, transform)})
        assert [leaf.how for leaf in report.storages[0].leaves] == ["", text]
