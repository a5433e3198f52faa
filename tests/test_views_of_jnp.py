"""Functions of JAX arrays as views: what only moves elements is a `View`, all else a `Derived`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tied

W = jnp.arange(24.0).reshape(4, 6)
C = W + 1j * W[::-1]

MOVES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "base.T": (W, jnp.transpose),
    "base.T ": (W, lambda w: jnp.swapaxes(w, 0, 1)),
    "base.T  ": (W, lambda w: jnp.moveaxis(w, 0, 1)),
    "base.T   ": (W, jax.jit(lambda w: w.T)),
    "base.T    ": (W, tied.transpose),
    "base[::-1, ::-1]": (W, jnp.flip),
    "base[::-1, ::-1] ": (W, np.flip),
    "base[1:3, 1::2][:, ::-1]": (W, lambda w: jnp.flip(w, 1)[1:3, ::2]),
    "base[1]": (W, lambda w: w[1]),
    "base[1:].T": (W, lambda w: tied.transpose(w[1:])),
    "base.reshape(24)": (W, jnp.ravel),
    "base.reshape(2, 2, 6).transpose(0, 2, 1)": (W, lambda w: w.reshape(2, 2, 6).mT),
    "base.broadcast_to(3, 4, 6)": (W, lambda w: jnp.broadcast_to(w, (3, 4, 6))),
    "base.diagonal()": (W, lambda w: w.diagonal()),
    "-base": (W, jnp.negative),
    "base.conj().T": (C, lambda c: jnp.conj(c).T),
}
COMPUTES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "times one": (W, lambda w: w * 1),
    "a write": (W, lambda w: w.at[0].set(0)),
    "other rows": (W, lambda w: w[np.array([0, 2])]),
    "rolled": (W, lambda w: jnp.roll(w, 1)),
    "a copy by reshape": (W, lambda w: jnp.swapaxes(w, 0, 1).ravel()),
    "nothing of it": (W, lambda w: jnp.zeros((4, 6))),
    "another dtype": (W, lambda w: w.astype("bfloat16")),
    "the real part": (C, lambda c: c.real),
    "the imaginary part": (C, jnp.imag),
    "two moves, added": (W, lambda w: w + jnp.flip(w)),
}


@pytest.mark.parametrize("text", MOVES)
def test_what_only_moves_elements_is_a_view(text: str) -> None:
    array, function = MOVES[text]
    seen = tied.view(array, function)
    assert type(seen) is tied.View
    assert seen.layout.describe(array.shape, "base") == text.strip()
    wanted = function(array)
    np.testing.assert_array_equal(seen, getattr(wanted, "array", lambda: wanted)())
    assert tied.shares(seen, array)


@pytest.mark.parametrize("name", COMPUTES)
def test_what_computes_is_derived(name: str) -> None:
    array, function = COMPUTES[name]
    seen = tied.view(array, function)
    assert type(seen) is tied.Derived
    wanted = function(array)
    assert (seen.shape, seen.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(seen, wanted)


def test_a_view_of_a_view_by_jnp() -> None:
    seen = tied.view(tied.transpose(W), lambda w: jnp.flip(w, 0))
    assert type(seen) is tied.View
    np.testing.assert_array_equal(seen, W.T[::-1])
    assert type(tied.view(tied.adjoint(C), jnp.real)) is tied.Derived


def test_what_a_function_itself_raises_is_raised() -> None:
    def refuses(w: Any) -> Any:
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError, match="no"):
        tied.view(W, refuses)
    with pytest.raises(IndexError):
        tied.view(W, lambda w: w[:, :, 0])


def test_what_is_derived_is_named_after_the_places_of_its_arrays() -> None:
    model = {"head": tied.view(W, jnp.tanh), "embed": W, "both": (tied.view(W, jnp.sin), W)}
    assert list(tied.split(model)[1]) == ["embed"]
    assert str(tied.ties(model)) == (
        "embed    (4, 6)  float32  96 B\n"
        "  both.1 = embed\n"
        "  head is computed from embed\n"
        "  both.0 is computed from embed\n"
        "24 parameters, 96 B (counting every leaf: 96 parameters, 384 B)"
    )
    merged = tied.Bundle(model).model
    np.testing.assert_array_equal(merged["head"], jnp.tanh(W))
    assert isinstance(merged["both"][0], jax.Array)


def test_gradients_of_what_is_derived_are_summed_from_where_they_are() -> None:
    model = {"head": tied.view(W, jnp.tanh), "embed": W}
    grads = jax.grad(lambda m: jnp.sum(2 * m["embed"]) + jnp.sum(jnp.asarray(m["head"])))(model)
    total = tied.accumulate(model, grads, convention="partial")
    np.testing.assert_allclose(total["embed"], 2 + 1 - jnp.tanh(W) ** 2, rtol=1e-6)
