"""Law 7 through training: weights of tied layers move by the sum of the gradients of their uses.

The other side is NumPy alone: the forward and backward pass of each layer written out, the layers'
gradients scatter-added to the memory by explicit arrays of indices, and the optimizer's rule. No
derivative and no view of any library takes part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tied
from bundles import CASES, KINDS, Case, Kind, X

STEPS = 25
TARGET = np.asarray(X)[:, ::-1] ** 2


def uses(kind: Kind, w: np.ndarray, bias: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """The loss, and the gradient of each use as if it were an array of its own."""
    x = np.asarray(X, np.float64)
    a, b = kind.first(w).copy(), kind.second(w).copy()
    h = np.tanh(x @ a + bias)
    error = kind.use(h, b) - TARGET
    dh, db = kind.used_back(h, b, 2 * error / error.size)
    dz = dh * (1 - h**2)
    return float((error**2).mean()), [x.T @ dz, dz.sum(0), db]


def summed(kind: Kind, parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The uses' gradients, added where each use has read, index by index."""
    da, dbias, db = parts
    places = np.arange(np.prod(kind.shape)).reshape(kind.shape)
    total = np.zeros(places.size)
    for gradient, read in ((da, kind.first), (db, kind.second)):
        for place, value in zip(read(places).reshape(-1), gradient.reshape(-1), strict=True):
            total[place] += value
    return total.reshape(kind.shape), dbias


class Sgd:
    """Momentum 0.9."""

    optax = optax.sgd(0.1, momentum=0.9)

    def __init__(self, params: Any) -> None:
        self.velocity = [np.zeros(p.shape) for p in params]

    def update(self, params: Any, grads: Any) -> Any:
        self.velocity = [0.9 * v + g for v, g in zip(self.velocity, grads, strict=True)]
        return [p - 0.1 * v for p, v in zip(params, self.velocity, strict=True)]


class AdamW:
    """Weight decay 0.01, which a storage gets once."""

    optax = optax.adamw(0.05, weight_decay=0.01)

    def __init__(self, params: Any) -> None:
        self.m = [np.zeros(p.shape) for p in params]
        self.v = [np.zeros(p.shape) for p in params]
        self.t = 0

    def update(self, params: Any, grads: Any) -> Any:
        self.t += 1
        self.m = [0.9 * m + 0.1 * g for m, g in zip(self.m, grads, strict=True)]
        self.v = [0.999 * v + 0.001 * g**2 for v, g in zip(self.v, grads, strict=True)]
        means = [m / (1 - 0.9**self.t) for m in self.m]
        scales = [np.sqrt(v / (1 - 0.999**self.t)) + 1e-8 for v in self.v]
        rows = zip(params, means, scales, strict=True)
        return [p - 0.05 * (m / scale + 0.01 * p) for p, m, scale in rows]


class Clipped(Sgd):
    """The norm that is clipped is that of the summed gradients (O5)."""

    optax = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5))

    def update(self, params: Any, grads: Any) -> Any:
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        scale = min(1.0, 0.05 / norm)
        return [p - 0.5 * scale * g for p, g in zip(params, grads, strict=True)]


RULES: dict[str, Callable[[Any], Any]] = {"sgd": Sgd, "adamw": AdamW, "clipped": Clipped}


def expected(kind: Kind, start: Any, rule: Any) -> tuple[Any, list[float]]:
    params = [np.asarray(p, np.float64) for p in start]
    optimizer, losses = rule(params), []
    for _ in range(STEPS):
        loss, parts = uses(kind, *params)
        losses.append(loss)
        params = optimizer.update(params, summed(kind, parts))
    return params, losses


def step_of(case: Case, merged: Callable[[Any], Any], optimizer: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean((case.call(merged(params), X) - TARGET) ** 2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def trained(step: Any, params: Any, optimizer: Any) -> tuple[Any, list[float]]:
    state, losses = optimizer.init(params), []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(float(value))
    return params, losses


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_training_is_training_with_hand_summed_gradients(name: str, rule: str) -> None:
    case, made = CASES[name], RULES[rule]
    bundle = case.bundle()
    w, bias = bundle.storages.values()
    (w, bias), losses = expected(case.kind, (w, bias), made)
    after, ours = trained(step_of(case, lambda b: b, made.optax), bundle, made.optax)
    moved, moved_bias = after.storages.values()
    np.testing.assert_allclose(moved, w, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(moved_bias, bias, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(ours, losses, rtol=2e-4)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", CASES)
def test_training_the_storages_is_training_the_bundle_bit_for_bit(name: str) -> None:
    case, optimizer = CASES[name], AdamW.optax
    after, losses = trained(step_of(case, lambda b: b, optimizer), case.bundle(), optimizer)
    skeleton, weights = tied.split(case.model())
    merged = lambda weights: skeleton.merge(weights, plain=True)  # noqa: E731
    again, same = trained(step_of(case, merged, optimizer), weights, optimizer)
    assert same == losses
    for key in weights:
        np.testing.assert_array_equal(again[key], after.storages[key])


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_tie_training_ends_elsewhere(kind: str) -> None:
    """So that the test above could fail: the same start with arrays of their own moves apart."""
    case = CASES[f"dict-{kind}"]
    untied = jax.tree.map(jnp.copy, case.bundle().model)
    assert tied.ties(untied).groups == ()
    optimizer = Sgd.optax
    after, _ = trained(step_of(case, lambda m: m, optimizer), untied, optimizer)
    w, bias = case.bundle().storages.values()
    (w, _), _ = expected(case.kind, (w, bias), Sgd)
    assert not np.allclose(after["first"]["w"], case.kind.first(w), atol=1e-2)
    assert not np.allclose(after["second"], case.kind.second(w), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_come_one_for_each_path_are_summed_by_accumulate(kind: str) -> None:
    case = CASES[f"dict-{kind}"]
    model = case.model()
    plain = case.bundle().model
    partial = jax.grad(lambda m: jnp.mean((case.call(m, X) - TARGET) ** 2))(plain)
    w, bias = (np.asarray(x, np.float64) for x in case.bundle().storages.values())
    _, parts = uses(case.kind, w, bias)
    total, dbias = summed(case.kind, parts)
    ours = list(tied.accumulate(model, partial, convention="partial").values())
    np.testing.assert_allclose(ours[0], total, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours[1], dbias, rtol=1e-4, atol=1e-6)
