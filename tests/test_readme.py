"""Each cell of the README's table "What is kept" is measured, by other means than `tied`'s own."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tied

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
CELLS = [
    (name, column, cell)
    for line in README.splitlines()
    if line.endswith(("| kept |", "| lost |", "makes one |"))
    for name, *cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    for column, cell in enumerate(cells)
    if cell in ("kept", "lost")
]


class Pair(nn.Module):
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = self.a if b is a else nn.Parameter(b)

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, name)


def model(library: str, column: int) -> Any:
    """Column 0: one array, used twice. Column 1: an array and a view of it."""
    a = tied.to(np.ones((3, 2), "float32"), library)
    pair = {"a": a, "b": [a, a.T][column]}
    return Pair(**pair) if library == "torch" else pair


def same_memory(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return a is b if isinstance(a, jax.Array) else np.shares_memory(a, b)


def by_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def tied_for_good(pair: Pair) -> Pair:
    tied.tie(pair)
    return pair


def bundled(pair: Any) -> tied.Bundle:
    """The pair as a bundle; `b` is one of two arrays before."""
    view = tied.transpose if pair["a"].shape != pair["b"].shape else None
    return tied.tie({"a": pair["a"], "b": pair["b"] * 1}, "b", "a", view)


def leaves(tree: Any) -> dict[str, Any]:
    """The first and the last array of a tree of JAX: the same one if there is one."""
    found = jax.tree.leaves(tree)
    return {"a": found[0], "b": found[-1]}


def norm(pair: Any) -> Any:
    return sum(jax.numpy.sum(pair[name] ** 2) for name in "ab")


OURS = [
    lambda pair: tied.map(lambda array: array * 2, pair),
    *(tied.f16, tied.f32, tied.f64, tied.copy),
    lambda pair: tied.merge(*tied.split(pair)),
]
JAX: list[Callable[[Any], Any]] = [
    lambda pair: jax.tree.map(lambda array: array * 2, pair),
    jax.jit(lambda pair: pair),
    jax.grad(norm),
    lambda pair: jax.device_put(pair, jax.devices()[1]),
]
ROWS: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
    "`tied.map`, `to`, `f16`, `bf16`, `f32`, `f64`, `copy`, `split` and `merge`": [
        *(("numpy", operation) for operation in OURS),
        *(("torch", operation) for operation in [*OURS, tied.bf16]),
        ("numpy", lambda pair: tied.to(pair, "torch")),
        ("numpy", lambda pair: tied.to(tied.to(pair, "jax"), "numpy")),
    ],
    "NumPy `copy.deepcopy`, `pickle`": [("numpy", copy.deepcopy), ("numpy", by_pickle)],
    "PyTorch `Module.double`": [("torch", lambda pair: pair.double())],
    'PyTorch `Module.to("meta")`, then `to_empty`': [
        ("torch", lambda pair: pair.to("meta").to_empty(device="cpu")),
    ],
    "PyTorch `copy.deepcopy`, `pickle`": [("torch", copy.deepcopy), ("torch", by_pickle)],
    "PyTorch after `tied.tie`: all of these, and what the [matrix](docs/matrix.md) lists": [
        ("torch", lambda pair: tied_for_good(pair).double()),
        ("torch", lambda pair: tied_for_good(pair).to("meta").to_empty(device="cpu")),
        ("torch", lambda pair: copy.deepcopy(tied_for_good(pair))),
        ("torch", lambda pair: by_pickle(tied_for_good(pair))),
    ],
    "JAX `tree.map`, `jit`, `grad`, `device_put`": [("jax", operation) for operation in JAX],
    "JAX after `tied.tie`: all of these, and what the [matrix](docs/matrix-jax.md) lists": [
        ("jax", lambda pair, of=operation: leaves(of(bundled(pair)))) for operation in JAX
    ],
}


def test_every_row_is_measured() -> None:
    assert {name for name, _, _ in CELLS} == set(ROWS)


@pytest.mark.parametrize(("name", "column", "cell"), CELLS)
def test_cell(name: str, column: int, cell: str) -> None:
    for library, operation in ROWS[name]:
        after = operation(model(library, column))
        assert ["lost", "kept"][same_memory(after["a"], after["b"])] == cell
