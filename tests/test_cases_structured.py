"""A1, A2, A4: arrays with structure are the same wrapper over moved storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import oracle
import tied

MAKE = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}
each_library = pytest.mark.parametrize("library", MAKE)
Whole = Callable[[np.ndarray], np.ndarray]


def mirrored(w: np.ndarray, *, upper: bool, conjugate: bool) -> np.ndarray:
    """Element by element: the other triangle is read from the one that is kept."""
    whole = np.zeros_like(w)
    for i in range(len(w)):
        for j in range(len(w)):
            kept = i <= j if upper else i >= j
            value = w[i, j] if kept else w[j, i]
            whole[i, j] = np.conj(value) if conjugate and not kept else value
        if conjugate:
            whole[i, i] = whole[i, i].real
    return whole


def triangle(w: np.ndarray, *, upper: bool, unit: bool = False) -> np.ndarray:
    whole = np.zeros_like(w)
    for i in range(len(w)):
        for j in range(len(w)):
            if i < j if upper else i > j:
                whole[i, j] = w[i, j]
        whole[i, i] = 1 if unit else w[i, i]
    return whole


def from_factor(w: np.ndarray, *, lower: bool) -> np.ndarray:
    factor = triangle(w, upper=not lower)
    return factor @ factor.conj().T if lower else factor.conj().T @ factor


# From the two-dimensional `w` of the model: the wrapper, and what it stands for.
STRUCTURED: dict[str, tuple[Callable[[Any], Any], Whole]] = {
    "symmetric": (tied.Symmetric, lambda w: mirrored(w, upper=True, conjugate=False)),
    "symmetric_lower": (
        lambda w: tied.Symmetric(w, upper=False),
        lambda w: mirrored(w, upper=False, conjugate=False),
    ),
    "hermitian": (tied.Hermitian, lambda w: mirrored(w, upper=True, conjugate=True)),
    "hermitian_lower": (
        lambda w: tied.Hermitian(w, upper=False),
        lambda w: mirrored(w, upper=False, conjugate=True),
    ),
    "upper": (tied.UpperTriangular, lambda w: triangle(w, upper=True)),
    "unit_upper": (
        lambda w: tied.UpperTriangular(w, unit=True),
        lambda w: triangle(w, upper=True, unit=True),
    ),
    "lower": (tied.LowerTriangular, lambda w: triangle(w, upper=False)),
    "unit_lower": (
        lambda w: tied.LowerTriangular(w, unit=True),
        lambda w: triangle(w, upper=False, unit=True),
    ),
    "cholesky": (tied.Cholesky, lambda w: from_factor(w, lower=True)),
    "cholesky_upper": (
        lambda w: tied.Cholesky(w, lower=False),
        lambda w: from_factor(w, lower=False),
    ),
    "diagonal": (
        lambda w: tied.Diagonal(tied.diagonal(w)),
        lambda w: np.diag(np.diag(w)),
    ),
    "bidiagonal": (
        lambda w: tied.Bidiagonal(tied.diagonal(w), tied.diagonal(w, 1)),
        lambda w: np.diag(np.diag(w)) + np.diag(np.diag(w, 1), 1),
    ),
    "bidiagonal_lower": (
        lambda w: tied.Bidiagonal(tied.diagonal(w), tied.diagonal(w, 1), upper=False),
        lambda w: np.diag(np.diag(w)) + np.diag(np.diag(w, 1), -1),
    ),
    "tridiagonal": (
        lambda w: tied.Tridiagonal(tied.diagonal(w), tied.diagonal(w, -1), tied.diagonal(w, 1)),
        lambda w: np.diag(np.diag(w)) + np.diag(np.diag(w, -1), -1) + np.diag(np.diag(w, 1), 1),
    ),
    "symmetric_of_a_transpose": (
        lambda w: tied.Symmetric(tied.transpose(w)),
        lambda w: mirrored(w.T, upper=True, conjugate=False),
    ),
    "hermitian_of_an_adjoint_of_a_part": (
        lambda w: tied.Hermitian(tied.adjoint(tied.view(w, lambda a: a[1:, 1:]))),
        lambda w: mirrored(w.conj().T[1:, 1:], upper=True, conjugate=True),
    ),
    "transpose_of_a_triangle": (
        lambda w: tied.UpperTriangular(w).T,
        lambda w: triangle(w, upper=True).T,
    ),
}
each_wrapper = pytest.mark.parametrize("wrapper", STRUCTURED)


def make(library: str) -> Any:
    """Other numbers in either triangle, so that the wrong one shows; whole, so sums are exact."""
    values = np.arange(1, 10).reshape(3, 3)
    return MAKE[library]((values + 1j * (values.T + 2)).astype("complex64"))


def model_of(library: str, wrapper: str) -> dict[str, Any]:
    w = make(library)
    return {"w": w, "s": STRUCTURED[wrapper][0](w)}


def assert_whole(model: dict[str, Any], wrapper: str) -> None:
    expected = STRUCTURED[wrapper][1](oracle.numpy(model["w"]))
    assert np.asarray(model["s"]).tolist() == expected.tolist()
    assert tuple(model["s"].shape) == expected.shape


def settings(wrapped: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(wrapped).items() if k in ("upper", "unit", "lower", "fn")}


@each_wrapper
@each_library
def test_A1_the_wrapper_stays_over_a_mapped_storage(library: str, wrapper: str) -> None:
    model = model_of(library, wrapper)
    assert_whole(model, wrapper)
    mapped = tied.map(lambda a: a * 2, model)
    assert type(mapped["s"]) is type(model["s"])
    assert settings(mapped["s"]) == settings(model["s"])
    assert oracle.numpy(mapped["w"]).tolist() == (2 * oracle.numpy(model["w"])).tolist()
    assert_whole(mapped, wrapper)
    assert_whole(model, wrapper)


@each_wrapper
@each_library
def test_A1_what_is_stored_is_one_storage(library: str, wrapper: str) -> None:
    skeleton, storages = tied.split(model_of(library, wrapper))
    assert list(storages) == ["w"]
    assert_whole(tied.merge(skeleton, {"w": storages["w"] * 3}), wrapper)


@each_wrapper
@pytest.mark.parametrize(("start", "device"), [("numpy", "jax"), ("jax", "torch")])
def test_A1_the_wrapper_moves(start: str, device: str, wrapper: str) -> None:
    moved = tied.to(model_of(start, wrapper), device)
    assert_whole(moved, wrapper)
    assert list(tied.split(moved)[1]) == ["w"]


@pytest.mark.parametrize("wrapper", ["symmetric", "symmetric_lower", "upper", "unit_lower"])
@each_library
def test_A4_a_cast_keeps_the_triangle(library: str, wrapper: str) -> None:
    w = MAKE[library](np.arange(1, 10).reshape(3, 3).astype("float32"))
    found = tied.f16({"w": w, "s": STRUCTURED[wrapper][0](w)})
    assert str(found["s"].dtype).endswith("float16")
    assert settings(found["s"]) == settings(STRUCTURED[wrapper][0](w))
    assert_whole(found, wrapper)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_A4_the_other_triangle_is_never_read(library: str) -> None:
    w = MAKE[library](np.arange(1, 10).reshape(3, 3).astype("float32"))
    model = tied.copy({"w": w, "s": tied.Symmetric(w, upper=False)})
    before = np.asarray(model["s"]).tolist()
    model["w"][0, 2] = -100
    assert np.asarray(model["s"]).tolist() == before
    model["w"][2, 0] = -100
    assert np.asarray(model["s"])[0, 2] == np.asarray(model["s"])[2, 0] == -100


def test_A1_a_gradient_goes_to_the_elements_that_are_stored() -> None:
    """An element that stands in both triangles gets the sum of both."""
    skeleton, storages = tied.split({"s": tied.Symmetric(jnp.ones((2, 2)))})
    weights = jnp.array([[1.0, 10.0], [100.0, 1000.0]])
    gradient = jax.grad(lambda s: jnp.sum(skeleton.merge(s)["s"] @ jnp.eye(2) * weights))(storages)
    (found,) = gradient.values()
    assert found.tolist() == [[1, 110], [0, 1000]]
