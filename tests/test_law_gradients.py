"""Law 7: a storage's gradient is the sum of its leaves' gradients, each pulled back.

Which element of which storage a leaf reads is found by merging storages that hold the numbers of
their own elements; so nothing here trusts a layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import oracle
import tied
from recipes import LIBRARIES
from strategies import LAW, recipes

FROM_NUMPY = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}


def value(array: Any) -> Any:
    return array.__jax_array__() if isinstance(array, tied.View) else array


def coefficients(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers, so that every sum of this file is exact in float32."""
    return (np.arange(int(np.prod(shape)), dtype="float32") % 5 + number).reshape(shape)


def labels(skeleton: Any, storages: dict[str, Any], library: str) -> list[np.ndarray]:
    """For each leaf, the numbers of the elements that it reads, over all storages."""
    start, made = 0, {}
    for name, storage in storages.items():
        count = int(np.prod(storage.shape))
        numbers = np.arange(start, start + count, dtype="float32").reshape(tuple(storage.shape))
        made[name] = FROM_NUMPY[library](numbers)
        start += count
    return [oracle.numpy(leaf).astype(int) for leaf in oracle.arrays(tied.merge(skeleton, made))]


def summed(storages: dict[str, Any], reads: list[np.ndarray], each: list[np.ndarray]) -> Any:
    """The separate gradients, scattered one by one into the storages' elements."""
    total = np.zeros(sum(int(np.prod(s.shape)) for s in storages.values()), "float32")
    for read, gradient in zip(reads, each, strict=True):
        np.add.at(total, read, gradient)
    found, start = {}, 0
    for name, storage in storages.items():
        count = int(np.prod(storage.shape))
        found[name] = total[start : start + count].reshape(tuple(storage.shape))
        start += count
    return found


def loss(model: Any, library: str) -> Any:
    total: Any = 0.0
    for number, leaf in enumerate(oracle.arrays(model)):
        array = value(leaf)
        total = total + (FROM_NUMPY[library](coefficients(number, array.shape)) * array).sum()
        total = total + (array * array).sum()
    return total


def separate(model: Any) -> list[np.ndarray]:
    """The gradient of `loss` at each leaf, written out."""
    return [
        coefficients(number, leaf.shape) + 2 * oracle.numpy(leaf)
        for number, leaf in enumerate(oracle.arrays(model))
    ]


def assert_gradients(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert oracle.numpy(found[name]).tolist() == expected[name].tolist(), name


@settings(LAW, max_examples=20)
@given(recipe=recipes("jax", dtypes=("float32",)))
def test_law_7_jax_grad_on_the_storages(recipe: Any) -> None:
    model = recipe.build().model
    skeleton, storages = tied.split(model)
    found = jax.grad(lambda s: loss(tied.merge(skeleton, s), "jax") + 0.0)(storages)
    reads = labels(skeleton, storages, "jax")
    assert_gradients(dict(found), summed(storages, reads, separate(model)))


@LAW
@given(recipe=recipes("torch", dtypes=("float32",), reinterpret=False, modules=False))
def test_law_7_torch_autograd_on_the_storages(recipe: Any) -> None:
    model = recipe.build().model
    skeleton, storages = tied.split(model)
    variables = {name: s.detach().clone().requires_grad_() for name, s in storages.items()}
    total = loss(tied.merge(skeleton, variables), "torch")
    if storages and total.requires_grad:
        total.backward()
    found = {
        name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in variables.items()
    }
    reads = labels(skeleton, storages, "torch")
    assert_gradients(found, summed(storages, reads, separate(model)))


@LAW
@given(recipe=recipes("torch", dtypes=("float32",), reinterpret=False, modules=True))
def test_law_7_torch_func_grad_through_modules(recipe: Any) -> None:
    model = recipe.build().model
    skeleton, storages = tied.split(model)
    if not storages:
        return
    plain = {name: storage.detach() for name, storage in storages.items()}
    found = torch.func.grad(lambda s: loss(tied.merge(skeleton, s), "torch"))(plain)
    reads = labels(skeleton, storages, "torch")
    assert_gradients(found, summed(storages, reads, separate(model)))


@pytest.mark.parametrize("library", LIBRARIES)
@LAW
@given(data=st.data())
def test_law_7_accumulate_partial_gradients(library: str, data: Any) -> None:
    recipe = data.draw(
        recipes(library, dtypes=("float32",), reinterpret=False, linked=False, modules=False)
    )
    model = recipe.build().model
    each: list[np.ndarray] = []

    def fill(reading: int, array: Any) -> Any:
        each.append(coefficients(len(each), tuple(array.shape)))
        return FROM_NUMPY[library](each[-1])

    grads = recipe.build(fill).model
    skeleton, storages = tied.split(model)
    expected = summed(storages, labels(skeleton, storages, library), each)
    assert_gradients(tied.accumulate(model, grads, convention="partial"), expected)


@pytest.mark.parametrize("library", LIBRARIES)
@LAW
@given(data=st.data())
def test_law_7_accumulate_total_gradients(library: str, data: Any) -> None:
    """Every use holds the whole gradient of what it reads: nothing is summed.

    What a total is where one use reads an element twice, the convention does not say.
    """
    recipe = data.draw(
        recipes(library, dtypes=("float32",), reinterpret=False, linked=False, modules=False)
    )
    model = recipe.build().model
    skeleton, storages = tied.split(model)
    reads = labels(skeleton, storages, library)
    assume(all(read.size == np.unique(read).size for read in reads))
    each = [read.astype("float32") + 1 for read in reads]
    waiting = iter(each)
    grads = recipe.build(lambda reading, array: FROM_NUMPY[library](next(waiting))).model
    once = np.unique(np.concatenate([np.zeros(0, int), *(read.reshape(-1) for read in reads)]))
    expected = summed(storages, [once], [once.astype("float32") + 1])
    assert_gradients(tied.accumulate(model, grads, convention="total"), expected)


def test_law_7_overlapping_views_scatter_add() -> None:
    """H14: two windows over one vector, neither contains the other."""
    w = np.arange(5.0)
    model = {"low": w[:3], "high": w[2:]}
    grads = {"low": np.ones(3), "high": np.full(3, 10.0)}
    (total,) = tied.accumulate(model, grads, convention="partial").values()
    assert total.tolist() == [1, 1, 11, 10, 10]


def test_law_7_the_convention_has_to_be_told() -> None:
    """O12: one library gives the gradient of each use, the other that of the array."""
    w = np.ones((2, 2))
    model = {"a": w, "b": w.T}
    each = {"a": np.full((2, 2), 3.0), "b": np.full((2, 2), 7.0)}
    with pytest.raises(TypeError):
        tied.accumulate(model, each)
    with pytest.raises(tied.ConventionError) as caught:
        tied.accumulate(model, each, convention="total")
    assert set(caught.value.paths) >= {"a", "b"}
    with pytest.raises(tied.ConventionError):
        tied.accumulate(model, each, convention="sum")
