"""Every odd model of the table keeps its types, values, settings and ties."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import models_jax
import oracle
import tied
from models import ODD

assert models_jax.views.__name__ in ODD


def clone(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.detach().clone()
    return a.copy() if isinstance(a, np.ndarray) else jnp.copy(a)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "merge_of_split": lambda m: tied.merge(*tied.split(m)),
    "map": lambda m: tied.map(clone, m),
    "copy": tied.copy,
}
# Their functions, locks and dynamic classes cannot be pickled, with tied or without.
UNPICKLABLE = {
    "closure",
    "function_with_array_defaults",
    "weak_reference",
    "object_with_a_lock",
    "torch_parametrized",
}


def record(name: str, model: Any) -> Any:
    """All that has to be the same before and after."""
    arrays = ODD[name].arrays(model)
    return (
        type(model),
        [type(array) for array in arrays],
        [oracle.bits(array) for array in arrays],
        oracle.pattern([oracle.positions(array) for array in arrays]),
        ODD[name].settings(model),
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ODD)
def test_odd_models(name: str, operation: str) -> None:
    model = ODD[name].build()
    before = record(name, model)
    after = OPERATIONS[operation](model)
    assert record(name, after) == before
    assert record(name, model) == before


@pytest.mark.parametrize("name", [name for name in ODD if name not in UNPICKLABLE])
def test_odd_models_pickle_as_their_split(name: str) -> None:
    model = ODD[name].build()
    before = record(name, model)
    assert record(name, tied.merge(*oracle.through_pickle(tied.split(model)))) == before


@pytest.mark.parametrize("name", sorted(UNPICKLABLE))
def test_what_cannot_be_pickled_says_so(name: str) -> None:
    with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
        pickle.dumps(tied.split(ODD[name].build()))


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("operation", ["map", "copy"])
def test_odd_models_share_nothing_with_their_copies(name: str, operation: str) -> None:
    model = ODD[name].build()
    after = OPERATIONS[operation](model)
    bytes_of = [
        set().union(*(oracle.byte_set(oracle.positions(a)) for a in ODD[name].arrays(m)))
        for m in (model, after)
    ]
    assert bytes_of[0].isdisjoint(bytes_of[1])


@pytest.mark.parametrize("name", ODD)
def test_odd_models_hide_nothing(name: str) -> None:
    assert tied.ties(ODD[name].build()).hidden == ()
