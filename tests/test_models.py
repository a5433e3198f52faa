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
    "object_with_a_lock",
    "torch_parametrized",
}
# NumPy's own pickle turns it native.
NOT_THE_SAME_PICKLED = {"big_endian"}


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


@pytest.mark.parametrize(
    "name", [name for name in ODD if name not in UNPICKLABLE | NOT_THE_SAME_PICKLED]
)
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


@pytest.mark.parametrize("operation", ["map", "copy", "f64"])
def test_a_gradient_goes_with_its_parameter(operation: str) -> None:
    """As a part of the model: its own tie to a buffer is kept too; it is no storage of `split`."""
    module = torch.nn.Linear(4, 3)
    module.weight.grad = torch.arange(12.0).reshape(3, 4)
    module.register_buffer("row", module.weight.grad[1])
    after = {**OPERATIONS, "f64": tied.f64}[operation](module)
    assert after.weight.grad.tolist() == module.weight.grad.tolist()
    assert after.weight.grad is not module.weight.grad
    assert after.weight.grad.dtype == after.weight.dtype
    after.weight.grad[1, 2] = -1
    assert after.row[2] == -1
    assert module.row[2] == 6
    assert sorted(tied.split(module)[1]) == ["bias", "row", "weight"]


# ----------------------------------------------------------------------- sharded over a mesh


@pytest.fixture(scope="module")
def mesh() -> Any:
    """A mesh of two processes, of which only the first is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


SHARDED = {**OPERATIONS, "f64": tied.f64}


@pytest.mark.parametrize("operation", SHARDED)
def test_sharded_tensors_stay_tied(operation: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    w = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    other = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    model = {"w": w, "again": w, "t": w.t(), "other": other}
    assert tied.ties(model).groups == (("w", "again", "t"),)
    after = SHARDED[operation](model)
    assert after["w"] is after["again"]
    assert tied.ties(after).groups == (("w", "again", "t"),)
    for name, placement in (("w", Shard(0)), ("t", Shard(1)), ("other", Shard(0))):
        assert isinstance(after[name], DTensor)
        assert after[name].placements == (placement,)
        assert after[name].to_local().tolist() == model[name].to_local().tolist()
    assert after["w"].dtype == (torch.float64 if operation == "f64" else torch.float32)
