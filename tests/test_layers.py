"""Dense and Chain compute the same on every array library, and share what they are given."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tied
from tied.layers import Chain, Dense

LIBRARIES = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jax.Array}
TANH = {"numpy": np.tanh, "torch": torch.tanh, "jax": jnp.tanh}


def on(library, array):
    return tied.to(np.asarray(array, "f4"), library)


@pytest.mark.parametrize("library", LIBRARIES)
def test_dense_makes_arrays_of_the_library(library):
    layer = Dense(2, 3, library=library)
    for array, shape in ((layer.W, (3, 2)), (layer.b, (3,))):
        assert isinstance(array, LIBRARIES[library])
        assert tuple(array.shape) == shape
        assert np.asarray(array).dtype == np.float32


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_starts_from_the_same_weights(library):
    expected = Dense(5, 4, seed=3).W
    np.testing.assert_array_equal(np.asarray(Dense(5, 4, library=library, seed=3).W), expected)


def test_weights_are_uniform_within_glorots_limit():
    W = Dense(60, 40).W
    limit = math.sqrt(6 / 100)
    assert 0.99 * limit < np.abs(W).max() <= limit
    assert abs(W.mean()) < 0.05 * limit
    assert W.std() == pytest.approx(limit / math.sqrt(3), rel=0.05)


def test_seeds_differ():
    assert not np.array_equal(Dense(2, 3, seed=0).W, Dense(2, 3, seed=1).W)


@pytest.mark.parametrize("library", LIBRARIES)
def test_dense_computes(library):
    layer = Dense(on(library, [[1, 2], [3, 4], [5, 6]]), on(library, [0, 1, -1]))
    x = on(library, [[1, 0], [1, 1]])
    np.testing.assert_array_equal(np.asarray(layer(x)), [[1, 4, 4], [3, 8, 10]])
    bent = Dense(layer.W, layer.b, TANH[library])
    np.testing.assert_allclose(np.asarray(bent(x)), np.tanh([[1, 4, 4], [3, 8, 10]]), rtol=1e-5)


@pytest.mark.parametrize("library", LIBRARIES)
def test_tied_chain_computes(library):
    encoder = Dense(2, 3, TANH[library], library=library)
    decoder = Dense(tied.transpose(encoder.W), on(library, np.zeros(2)))
    x = on(library, [[0.5, -2.0]])
    W = np.asarray(encoder.W)
    expected = np.tanh(np.asarray(x) @ W.T) @ W
    np.testing.assert_allclose(np.asarray(Chain(encoder, decoder)(x)), expected, rtol=1e-5)
    assert tied.shares(encoder.W, decoder.W)
    assert len(tied.ties(Chain(encoder, decoder)).tied) == 1


def test_arrays_are_taken_as_they_are():
    W, b = np.ones((3, 2)), np.zeros(3)
    layer = Dense(W, b)
    assert layer.W is W
    assert layer.b is b


@pytest.mark.parametrize(("W", "b"), [((3, 2), (2,)), ((3, 2), (3, 1)), ((3,), (3,))])
def test_shapes_that_do_not_fit(W, b):
    with pytest.raises(ValueError, match="W is \\(outputs, inputs\\), b is \\(outputs,\\)"):
        Dense(np.ones(W), np.ones(b))


def test_unknown_library():
    with pytest.raises(tied.TiedError, match="cupyx"):
        Dense(2, 3, library="cupyx")


def test_chain_is_a_sequence():
    first, second, third = Dense(2, 3), Dense(3, 4), Dense(4, 1)
    chain = Chain(first, second, third)
    assert len(chain) == 3
    assert list(chain) == [first, second, third]
    assert chain[1] is second
    assert chain[-1] is third
    assert chain[1:].layers == (second, third)
    assert Chain()(5) == 5


def test_repr():
    chain = Chain(Dense(2, 3, np.tanh), Dense(3, 2))
    assert repr(chain) == "Chain(Dense(2, 3, tanh), Dense(3, 2))"
