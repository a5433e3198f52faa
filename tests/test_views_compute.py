"""A `View` computes like the array that it reads, from either side of an operator."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tied

NAMESPACES = {"numpy": np, "torch": torch, "jax": jnp}


def view_and_array(library: str) -> tuple[Any, Any]:
    """What each library has no view for: a lazy conjugate, a negative stride, any reading."""
    if library == "numpy":
        z = (np.arange(6.0) + 1j).reshape(2, 3)
        return tied.adjoint(z), z.conj().T
    if library == "torch":
        a = np.arange(6.0).reshape(3, 2)
        moved = tied.to({"a": a, "flipped": a[::-1]}, "torch")
        return moved["flipped"], moved["a"].flip(0)
    j = jnp.arange(6.0).reshape(2, 3)
    return tied.transpose(j), j.T


@pytest.mark.parametrize("library", NAMESPACES)
def test_a_view_computes_like_its_array(library: str) -> None:
    xp = NAMESPACES[library]
    view, array = view_and_array(library)
    assert isinstance(view, tied.View)
    ones = xp.ones_like(array)
    for ours, theirs in (
        (view + ones, array + ones),
        (ones - view, ones - array),
        (view @ ones.T, array @ ones.T),
        (ones.T @ view, ones.T @ array),
        (xp.exp(view), xp.exp(array)),
        (xp.add(ones, view), array + ones),
        (-view, -array),
        (view.sum(), array.sum()),
        (view[1:], array[1:]),
    ):
        assert not isinstance(ours, tied.View)
        assert bool(xp.all(xp.isclose(ours, theirs)))
    assert view.shape == tuple(array.shape)
    assert len(view) == 3
