"""A tied language model trains as the same network that was written by hand with one parameter.

Two layers of a transformer, 20 steps of Adam, on the source of Python's standard library.
Embedding and head are tied by transposition, from outside, on the finished model. The losses are
equal bit for bit: the compiled step is the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import tied
from language_models import (
    LETTERS,
    WIDTH,
    EquinoxByHand,
    EquinoxModel,
    NnxByHand,
    NnxModel,
    batches,
    cross_entropy,
)

ADAM = optax.adam(3e-3)


def trained(params: Any, loss: Callable[[Any, Any], Any]) -> tuple[Any, list[float]]:
    """The weights after training, and the loss of each step."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, letters: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, letters)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(jax.numpy.copy, params)
    state, losses = ADAM.init(params), []
    for letters in batches():
        params, state, value = step(params, state, letters)
        losses.append(float(value))
    return params, losses


# ------------------------------------------------------------------------------------ Equinox


@functools.cache
def model() -> EquinoxModel:
    return EquinoxModel(jax.random.key(0))


def as_bundle() -> Any:
    bundle = tied.tie(model(), "head.kernel", "embed.weight", tied.transpose)
    return trained(bundle, cross_entropy)


def as_written_with_a_view() -> Any:
    """The user who writes the tie into the model itself."""
    inner = model()
    head = eqx.tree_at(lambda h: h.kernel, inner.head, tied.transpose(inner.embed.weight))
    return trained(tied.Bundle(eqx.tree_at(lambda m: m.head, inner, head)), cross_entropy)


def as_storages() -> Any:
    bundle = tied.tie(model(), "head.kernel", "embed.weight", tied.transpose)
    skeleton, weights = tied.split(bundle)
    after, losses = trained(
        weights, lambda weights, x: cross_entropy(skeleton.merge(weights, plain=True), x)
    )
    return tied.Bundle(skeleton.merge(after)), losses


def with_filters() -> Any:
    """Equinox's own transforms."""
    bundle = tied.tie(model(), "head.kernel", "embed.weight", tied.transpose)
    state, losses = ADAM.init(eqx.filter(bundle, eqx.is_inexact_array)), []

    @eqx.filter_jit
    def step(bundle: Any, state: Any, letters: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(cross_entropy)(bundle, letters)
        updates, state = ADAM.update(grads, state, bundle)
        return eqx.apply_updates(bundle, updates), state, value

    for letters in batches():
        bundle, state, value = step(bundle, state, letters)
        losses.append(float(value))
    return bundle, losses


EQUINOX = {
    "tied_by_path": as_bundle,
    "written_with_a_view": as_written_with_a_view,
    "storages": as_storages,
    "filters": with_filters,
}


@pytest.fixture(scope="module")
def by_hand() -> tuple[Any, list[float]]:
    return trained(EquinoxByHand(jax.random.key(0)), cross_entropy)


@pytest.mark.parametrize("way", EQUINOX)
def test_an_equinox_language_model_has_the_losses_of_the_one_by_hand(
    way: str, by_hand: tuple[Any, list[float]]
) -> None:
    bundle, losses = EQUINOX[way]()
    hand, expected = by_hand
    assert losses == expected
    assert losses[-1] < losses[0] - 0.5
    np.testing.assert_array_equal(bundle.head.kernel, bundle.embed.weight.T)
    ours, theirs = jax.tree.leaves(bundle), jax.tree.leaves(hand)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_untied_equinox_twin_trains_otherwise(by_hand: tuple[Any, list[float]]) -> None:
    """From the same start, the head a copy of the transpose: the first loss alone is the same."""
    start = model()
    start = eqx.tree_at(lambda m: m.head.kernel, start, start.embed.weight.T)
    after, losses = trained(start, cross_entropy)
    assert losses[0] == by_hand[1][0]
    assert min(abs(a - b) for a, b in zip(losses[1:], by_hand[1][1:], strict=True)) > 1e-3
    assert not np.allclose(after.head.kernel, after.embed.weight.T, atol=1e-2)
    assert tied.ravel(after)[0].size == tied.ravel(by_hand[0])[0].size + LETTERS * WIDTH


# ---------------------------------------------------------------------------------------- NNX

MODES = {"graph": True, "tree": False}


def nnx_trained(model: Any) -> list[float]:
    """As NNX's own guide trains: the optimizer writes into the model."""
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, letters: Any) -> Any:
        value, grads = nnx.value_and_grad(cross_entropy)(model, letters)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, letters)) for letters in batches()]


def nnx_tied() -> Any:
    model = NnxModel(nnx.Rngs(0))
    tied.tie(model, "head.kernel", "embed.embedding", tied.transpose)
    return model


@pytest.fixture(scope="module")
def nnx_by_hand() -> tuple[Any, list[float]]:
    model = NnxByHand(nnx.Rngs(0))
    return model, nnx_trained(model)


def same_params(model: Any, hand: Any) -> None:
    ours, theirs = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, hand))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_an_nnx_language_model_has_the_losses_of_the_one_by_hand(
    mode: str, nnx_by_hand: tuple[Any, list[float]]
) -> None:
    hand, expected = nnx_by_hand
    with nnx.set_graph_mode(MODES[mode]), nnx.set_graph_updates(MODES[mode]):
        model = nnx_tied()
        losses = nnx_trained(model)
        assert losses == expected
        assert losses[-1] < losses[0] - 0.5
        np.testing.assert_array_equal(model.head.kernel[...], model.embed.embedding[...].T)
        same_params(model, hand)


def test_an_nnx_model_in_a_bundle_has_them_too(nnx_by_hand: tuple[Any, list[float]]) -> None:
    model = NnxModel(nnx.Rngs(0))
    model.head.kernel = nnx.Param(tied.transpose(model.embed.embedding[...]))
    after, losses = trained(tied.Bundle(model), cross_entropy)
    assert losses == nnx_by_hand[1]
    same = after.embed.embedding[...].T
    np.testing.assert_array_equal(after.head.kernel[...], same)


def test_the_untied_nnx_twin_trains_otherwise(nnx_by_hand: tuple[Any, list[float]]) -> None:
    model = NnxModel(nnx.Rngs(0))
    model.head.kernel[...] = model.embed.embedding[...].T
    losses = nnx_trained(model)
    assert losses[0] == nnx_by_hand[1][0]
    pairs = zip(losses[1:], nnx_by_hand[1][1:], strict=True)
    assert min(abs(a - b) for a, b in pairs) > 1e-3


def test_tree_mode_has_no_other_way_to_share() -> None:
    """J33: one Param at two places is refused there, and a transpose was never a tie."""
    model = NnxModel(nnx.Rngs(0))
    model.head.kernel = model.embed.embedding
    with nnx.set_graph_mode(False), pytest.raises(ValueError, match="Duplicate Param"):
        nnx.split(model)
