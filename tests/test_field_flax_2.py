"""Flax, optax and other libraries over JAX: the trap first, then ours, in the same test.

The numbers are those of the project's list of field reports, as in test_field_jax.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx, serialization

import tied
from test_field_jax import matrix, same_array

LETTERS = jnp.array([0, 3, 1, 6])

# ---------------------------------------------------------------------------------- flax.linen


class Coder(flax.linen.Module):
    """An embedding, and a head that is an ordinary layer."""

    @flax.linen.compact
    def __call__(self, letters: Any) -> Any:
        h = flax.linen.Embed(7, 4, name="embed")(letters)
        return flax.linen.Dense(7, use_bias=False, name="head")(h)


def cross_entropy(variables: Any) -> Any:
    logits = Coder().apply(variables, LETTERS[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, LETTERS[1:]).mean()


def linen_trained(params: Any, loss: Callable[[Any], Any], steps: int = 3) -> Any:
    optimizer = optax.adam(0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


def by_hand(embedding: Any) -> Any:
    """The same network with one parameter."""
    logits = embedding[LETTERS[:-1]] @ embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, LETTERS[1:]).mean()


def test_J26_J27_J35_linen_variables_are_tied_by_path_and_declared_once() -> None:
    """flax#1263, #2240, transformers#11364: an assigned transpose trains apart."""
    variables = Coder().init(jax.random.key(0), LETTERS)
    embedding = variables["params"]["embed"]["embedding"]
    lost = jax.tree.map(lambda a: a, variables)
    lost["params"]["head"]["kernel"] = embedding.T
    lost = linen_trained(lost, cross_entropy)["params"]
    assert not np.allclose(lost["head"]["kernel"], lost["embed"]["embedding"].T, atol=1e-2)

    bundle = tied.tie(variables, "params.head.kernel", "params.embed.embedding", tied.transpose)
    assert list(bundle.storages) == ["params.embed.embedding"]
    after = linen_trained(bundle, lambda bundle: cross_entropy(bundle.model))
    expected = linen_trained(embedding, by_hand)
    params = after["params"]
    np.testing.assert_array_equal(params["head"]["kernel"], params["embed"]["embedding"].T)
    np.testing.assert_allclose(params["embed"]["embedding"], expected, rtol=1e-5)


def test_J36_J39_J46_a_name_that_is_absent_by_design_is_told_from_a_lost_one() -> None:
    """transformers#13086, maxtext#4341, marin#6518: what a checkpoint lacks was filled with 0."""
    bundle = tied.tie({"wte": matrix(), "ln": jnp.ones(2), "lm_head": matrix().T}, "lm_head", "wte",
                      tied.transpose)  # fmt: skip
    checkpoint = {name: np.asarray(a) + 1 for name, a in bundle.storages.items()}
    assert list(checkpoint) == ["wte", "ln"]
    model = bundle.skeleton.merge(checkpoint, plain=True)
    np.testing.assert_array_equal(model["lm_head"], checkpoint["wte"].T)
    del checkpoint["ln"]
    with pytest.raises(tied.MergeError) as caught:
        bundle.skeleton.merge(checkpoint)
    assert caught.value.paths == ("ln",)
    assert str(caught.value).splitlines()[:2] == [
        "these storages are not those of the skeleton",
        "  missing  ln",
    ]


def test_M16_msgpack_holds_each_storage_once() -> None:
    """flax.serialization: 8.39 MB for 4.19, and two arrays afterwards."""
    w = jax.random.normal(jax.random.key(0), (64, 64))
    model = {"a": w, "b": w}
    twice = serialization.msgpack_serialize(model)
    back = serialization.msgpack_restore(twice)
    assert len(twice) > 2 * w.nbytes
    assert back["a"] is not back["b"]
    skeleton, storages = tied.split(model)
    once = serialization.msgpack_serialize(storages)
    assert len(once) < w.nbytes + 200
    again = skeleton.merge(serialization.msgpack_restore(once))
    assert again["a"] is again["b"]


# ----------------------------------------------------------------------------------------- NNX


class Tied(nnx.Module):
    """Tied in NNX's own way: one Param at two places."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(7, 4, rngs=nnx.Rngs(0))
        self.head = nnx.Embed(7, 4, rngs=nnx.Rngs(1))

    def __call__(self, letters: Any) -> Any:
        return self.head.attend(self.embed(letters))


def by_reference() -> Tied:
    model = Tied()
    model.head.embedding = model.embed.embedding
    return model


def by_tie() -> Tied:
    model = Tied()
    tied.tie(model, "head.embedding", "embed.embedding")
    return model


def embeddings(model: Any) -> Any:
    return model.embed.embedding[...], model.head.embedding[...]


def doubled(model: Any) -> Any:
    return jax.tree.map(lambda a: a * 2, model)


def stepped(model: Any) -> Any:
    grads = jax.grad(lambda m: m(LETTERS).sum())(model)
    return jax.tree.map(lambda a, g: a - 0.1 * g, model, grads)


THROUGH_JAX: dict[str, Callable[[Any], Any]] = {
    "tree_map": doubled,
    "jit": jax.jit(doubled),
    "grad": stepped,
    "jit_of_grad": jax.jit(stepped),
    "device_put": lambda m: jax.device_put(m, jax.devices()[1]),
    "scan": lambda m: jax.lax.scan(lambda m, _: (stepped(m), None), m, None, length=2)[0],
}


@pytest.mark.parametrize("way", THROUGH_JAX)
@pytest.mark.parametrize("tree_mode", [False, True])
def test_J28_J29_M8_M9_jax_itself_takes_a_tied_module(way: str, tree_mode: bool) -> None:
    """flax#4030: NNX keeps a shared Param through its own transforms, not through JAX's."""
    run = THROUGH_JAX[way]
    with nnx.set_graph_mode(not tree_mode), nnx.set_graph_updates(not tree_mode):
        assert len(jax.tree.leaves(by_reference())) == 2
        lost = run(by_reference())
        assert lost.embed.embedding is not lost.head.embedding
        model = by_tie()
        assert len(jax.tree.leaves(model)) == 1
        after = run(model)
        one, other = embeddings(after)
        np.testing.assert_array_equal(one, other)
        again = embeddings(stepped(after))
        np.testing.assert_array_equal(*again)
        if "grad" in way or way == "scan":
            assert not np.array_equal(*embeddings(lost))


TREE_MODE: dict[str, Callable[[Any], Any]] = {
    "split": nnx.split,
    "state": nnx.state,
    "clone": nnx.clone,
    "grad": lambda m: nnx.grad(lambda m: m(LETTERS).sum())(m),
    "jit": lambda m: nnx.jit(lambda m: m(LETTERS))(m),
    "optimizer": lambda m: nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param),
}


@pytest.mark.parametrize("way", TREE_MODE)
def test_J33_M9_what_tree_mode_refuses_it_takes_of_a_tied_module(way: str) -> None:
    """flax FLIP 5310: `Duplicate Param`. The planned default has no other way to share."""
    run = TREE_MODE[way]
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        with pytest.raises(ValueError, match="Duplicate Param"):
            run(by_reference())
        result = run(by_tie())
        arrays = [a for a in jax.tree.leaves(result) if a.shape == (7, 4)]
        assert len(arrays) == {"jit": 0, "optimizer": 2}.get(way, 1)


def test_J9_M8_nnx_takes_the_axis_of_the_first_path_ours_names_both() -> None:
    """The head is mapped because the embedding is; what is asked of the head is ignored."""

    def shapes(model: Any, axes: Any) -> Any:
        seen = []

        @nnx.vmap(in_axes=(axes,), axis_size=7)
        def run(model: Any) -> Any:
            seen.extend(a.shape for a in embeddings(model))
            return jnp.zeros(())

        run(model)
        return seen

    head, embed = nnx.PathContains("head"), nnx.PathContains("embed")
    assert shapes(by_reference(), nnx.StateAxes({embed: 0, ...: None})) == [(4,), (4,)]
    assert shapes(by_reference(), nnx.StateAxes({head: 0, ...: None})) == [(7, 4), (7, 4)]
    for make in (by_reference, by_tie):
        model = make()
        for asked in (embed, head):
            assert shapes(model, tied.nnx.state_axes(model, {asked: 0, ...: None})) == [(4,), (4,)]
        with pytest.raises(tied.TieError) as caught:
            tied.nnx.state_axes(model, {embed: 0, head: 1})
        assert str(caught.value).splitlines()[0] == (
            "embed.embedding and head.embedding are one array and ask for different axes"
        )


def test_M8_a_filter_knows_a_variable_by_its_first_path_only() -> None:
    head = nnx.PathContains("head")
    assert not nnx.to_flat_state(nnx.state(by_reference(), head))
    for make in (by_reference, by_tie):
        model = make()
        (variable,) = jax.tree.leaves(nnx.state(model, tied.nnx.alias(model, head)))
        np.testing.assert_array_equal(variable, embeddings(model)[0])


def test_M8_two_params_around_one_array_become_one() -> None:
    """NNX sees two leaves and no duplicate; one step of an optimizer and they part."""
    model = Tied()
    model.head.embedding = nnx.Param(model.embed.embedding[...])
    assert len(jax.tree.leaves(nnx.state(model))) == 2
    adopted = tied.tie(model)
    assert str(adopted) == "tied   head.embedding = embed.embedding"
    assert len(jax.tree.leaves(nnx.state(model))) == 1
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: m(LETTERS).sum())(model))
    np.testing.assert_array_equal(*embeddings(model))


def test_J34_arrays_that_are_no_params_are_seen_and_tied() -> None:
    """flax#5577: `nnx.WeightNorm` keeps its scales as bare arrays, which no Param filter gives."""
    linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    norm = nnx.WeightNorm(linear, rngs=nnx.Rngs(0))
    assert "scales" not in nnx.state(norm, nnx.Param)
    shared = {"norm": norm, "scales": norm.scales[("kernel",)]}
    assert len(tied.ties(shared).groups) == 1
    assert len(tied.ties(shared).storages) == 3
    tied.check(tied.copy(shared), shared)


@pytest.mark.parametrize("make", [by_reference, by_tie])
def test_J32_merge_copies_variables_when_it_is_told_to_and_ties_in_both_cases(make: Any) -> None:
    """flax#4912: whether `merge(split(m))` holds the Variables of `m` is for `copy` to say."""
    for copied in (False, True):
        model = make()
        after = nnx.merge(*nnx.split(model), copy=copied)
        assert (after.embed.embedding is model.embed.embedding) == (not copied)
        after.embed.embedding[...] = after.embed.embedding[...] + 1
        np.testing.assert_array_equal(*embeddings(after))
        assert np.array_equal(embeddings(after)[0], embeddings(model)[0]) == (not copied)


# ------------------------------------------------------------------------------ optax and others


def test_J37_J45_a_tied_model_from_torch_stays_tied_when_it_is_trained() -> None:
    """torchax#68, levanter#587: two weights in JAX, which drift apart in fine-tuning."""
    embed = torch.nn.Embedding(7, 4)
    head = torch.nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    tensors = {"embed": embed.weight, "head": head.weight}
    lost = jax.tree.map(lambda t: jnp.asarray(t.detach().numpy()), tensors)

    def loss(model: Any) -> Any:
        logits = model["embed"][LETTERS[:-1]] @ model["head"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, LETTERS[1:]).mean()

    lost = linen_trained(lost, loss)
    assert not np.allclose(lost["embed"], lost["head"], atol=1e-2)
    after = linen_trained(tied.Bundle(tied.to(tensors, "jax")), loss)
    np.testing.assert_array_equal(after["embed"], after["head"])


def test_J41_M6_the_fresh_state_of_lbfgs_is_named_before_it_is_donated() -> None:
    """liesel#272: model and state donated together, "flattened argument 49 vs 30"."""
    params = {"w": matrix()}
    optimizer = optax.lbfgs(memory_size=2)
    state = optimizer.init(params)
    arrays = jax.tree.leaves(state)
    assert len(arrays) > len({a.unsafe_buffer_pointer() for a in arrays})
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation((params, state))
    assert caught.value.paths == ("1.0.diff_params_memory.w", "1.0.diff_updates_memory.w")
    params, state = tied.check_donation((params, state), dedup=True)
    step = jax.jit(lambda p, s: jax.tree.map(lambda a: a + 1, (p, s)), donate_argnums=(0, 1))
    jax.block_until_ready(step(params, state))


def test_J42_a_copy_is_of_storages_and_the_settings_stay() -> None:
    """numpyro#2222: deepcopy copied each weight, and all else, on each trace."""
    settings = {"names": ["a", "b"]}
    model = {"w": same_array(), "settings": settings}
    assert copy.deepcopy(model)["settings"] is not settings
    bundle = tied.Bundle(model)
    traced = jax.jit(lambda b: b.model["settings"]["names"] == ["a", "b"])
    assert traced(bundle)
    assert jax.tree.map(lambda a: a, bundle).skeleton is bundle.skeleton


def test_J13_J46_orbax_gives_back_a_tied_nnx_model(tmp_path: Path) -> None:
    """The checkpoint holds one array, and the head is there again when it is merged."""
    graphdef, state = nnx.split(by_tie())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "x", jax.eval_shape(lambda s: s, state))
    assert len(jax.tree.leaves(back)) == 1
    model = nnx.merge(graphdef, back)
    np.testing.assert_array_equal(*embeddings(model))
    donated = jax.jit(lambda s: jax.tree.map(lambda a: a * 2, s), donate_argnums=0)(back)
    assert all(a.is_deleted() for a in jax.tree.leaves(back))
    assert len(jax.tree.leaves(donated)) == 1
