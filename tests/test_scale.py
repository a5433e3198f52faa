"""Large models and deep ones: no recursion, and time that grows with the model.

Deep models are taken apart link by link here too; comparing or printing one would recurse.
"""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import tied

DEPTH = 100_000


@dataclass(eq=False)
class Cell:
    w: Any
    rest: Any = None


class Link:
    """A plain object in a doubly linked list: a cycle at every step."""

    def __init__(self, w: Any) -> None:
        self.w = w
        self.before: Any = None
        self.rest: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Slim:
    w: Any
    rest: Any = None


def nested_lists(w: Any) -> Any:
    model: Any = [w, None]
    for _ in range(DEPTH - 1):
        model = [w, model]
    return model


def nested_tuples(w: Any) -> Any:
    model: Any = (w, None)
    for _ in range(DEPTH - 1):
        model = (w, model)
    return model


def nested_dicts(w: Any) -> Any:
    model: Any = {0: w, 1: None}
    for _ in range(DEPTH - 1):
        model = {0: w, 1: model}
    return model


def chained(cls: type) -> Callable[[Any], Any]:
    def build(w: Any) -> Any:
        model = cls(w)
        for _ in range(DEPTH - 1):
            model = cls(w, model)
        return model

    return build


def doubly_linked(w: Any) -> Any:
    first = link = Link(w)
    for _ in range(DEPTH - 1):
        link.rest = Link(w)
        link.rest.before = link
        link = link.rest
    return first


DEEP: dict[str, Callable[[Any], Any]] = {
    "lists": nested_lists,
    "tuples": nested_tuples,
    "dicts": nested_dicts,
    "dataclasses": chained(Cell),
    "frozen_slots": chained(Slim),
    "doubly_linked_list": doubly_linked,
}


def links(model: Any) -> Iterator[Any]:
    while model is not None:
        yield model
        model = model[1] if isinstance(model, list | tuple | dict) else model.rest


def weight(link: Any) -> Any:
    return link[0] if isinstance(link, list | tuple | dict) else link.w


def assert_deep(model: Any, kind: type, value: float) -> Any:
    """All links are there, of their type, around one array."""
    w = weight(model)
    assert w.tolist() == [value] * 3
    count, last = 0, None
    for link in links(model):
        assert type(link) is kind
        assert weight(link) is w
        if kind is Link:
            assert link.before is last
        count, last = count + 1, link
    assert count == DEPTH
    return w


@pytest.mark.parametrize("kind", DEEP)
def test_a_deep_model_splits_and_merges(kind: str) -> None:
    w = np.ones(3)
    model = DEEP[kind](w)
    skeleton, storages = tied.split(model)
    assert len(storages) == len(skeleton.names) == 1
    merged = tied.merge(skeleton, {name: storage + 1 for name, storage in storages.items()})
    assert_deep(merged, type(model), 2)
    assert assert_deep(model, type(model), 1) is w


@pytest.mark.parametrize("kind", DEEP)
def test_a_deep_model_maps(kind: str) -> None:
    model = DEEP[kind](np.ones(3))
    calls = []
    mapped = tied.map(lambda a: calls.append(a) or a * 3, model)
    assert len(calls) == 1
    assert_deep(mapped, type(model), 3)


@pytest.mark.parametrize("kind", DEEP)
def test_a_deep_model_copies(kind: str) -> None:
    w = np.ones(3)
    model = DEEP[kind](w)
    copied = tied.copy(model)
    assert assert_deep(copied, type(model), 1) is not w
    assert copied is not model


@pytest.mark.parametrize("kind", ["lists", "tuples", "dataclasses", "doubly_linked_list"])
def test_the_split_of_a_deep_model_pickles(kind: str) -> None:
    model = DEEP[kind](np.ones(3))
    split = tied.split(model)
    again = pickle.loads(pickle.dumps(split))
    assert hash(again[0]) == hash(split[0])
    same = again[0] == split[0]
    assert same
    assert_deep(tied.merge(*again), type(model), 1)


@pytest.mark.parametrize("kind", ["lists", "dicts", "doubly_linked_list"])
def test_the_ties_of_a_deep_model_are_found(kind: str) -> None:
    """An array at the top, its first element at the bottom, nothing between."""
    model = DEEP[kind](None)
    w = np.ones(3)
    *_, last = links(model)
    for link, array in ((model, w), (last, w[:1])):
        if isinstance(link, Link):
            link.w = array
        else:
            link[0] = array
    (storage,) = tied.ties(model).tied
    assert [leaf.path.count(".") for leaf in storage.leaves] == [0, DEPTH - 1]
    mapped = tied.map(lambda a: a * 2, model)
    *_, last = links(mapped)
    assert np.shares_memory(weight(mapped), weight(last))


@pytest.mark.parametrize("kind", ["lists", "doubly_linked_list"])
def test_two_deep_models_are_mapped_together(kind: str) -> None:
    model, other = DEEP[kind](np.ones(3)), DEEP[kind](np.ones(3))
    assert_deep(tied.map(lambda a, b: a + b, model, other), type(model), 2)


def test_a_deep_model_of_torch_modules() -> None:
    """Depth that PyTorch's own recursion could not follow."""
    depth = 5_000
    root = module = torch.nn.Module()
    shared = torch.nn.Parameter(torch.ones(3))
    for _ in range(depth):
        module.weight = shared
        module.next = torch.nn.Module()
        module = module.next
    module.weight = shared
    mapped = tied.f64(root)
    count, part = 0, mapped
    while part is not None:
        assert part.weight is mapped.weight
        count, part = count + 1, part._modules.get("next")
    assert count == depth + 1
    assert mapped.weight.dtype == torch.float64
    for link in (root, mapped):  # PyTorch frees modules by recursion
        while link is not None:
            link = link._modules.pop("next", None)


# --------------------------------------------------------------------------- a million leaves


def million() -> list[list[Any]]:
    """A thousand rows of a thousand arrays; every second one is tied to the one before.

    Ten of them in each row as a view, the others as the same object.
    """
    model = []
    for _ in range(1000):
        row: list[Any] = []
        for pair in range(500):
            w = np.zeros(2, "float32")
            row += [w, w[:1] if pair < 10 else w]
        model.append(row)
    return model


@pytest.fixture(scope="module")
def large() -> list[list[Any]]:
    return million()


def assert_large(model: list[list[Any]], value: float) -> None:
    assert [len(row) for row in model] == [1000] * 1000
    for row in model[::97]:
        for whole, part in zip(row[::2], row[1::2], strict=True):
            assert whole[0] == part[0] == value
            assert np.shares_memory(whole, part)
    assert not np.shares_memory(model[0][0], model[0][2])


def test_a_million_leaves_split_and_merge(large: Any) -> None:
    skeleton, storages = tied.split(large)
    assert len(storages) == 500_000
    assert list(storages)[-1] == "999.998"
    assert_large(tied.merge(skeleton, storages), 0)


def test_a_million_leaves_map(large: Any) -> None:
    calls = 0

    def f(a: Any) -> Any:
        nonlocal calls
        calls += 1
        return a + 1

    assert_large(tied.map(f, large), 1)
    assert calls == 500_000
    assert_large(large, 0)


def test_a_million_leaves_copy(large: Any) -> None:
    copied = tied.copy(large)
    copied[0][0][0] = 5
    assert copied[0][1][0] == 5
    assert large[0][0][0] == 0
    copied[0][0][0] = 0
    assert_large(copied, 0)


def test_a_million_leaves_are_counted_once(large: Any) -> None:
    report = tied.ties(large)
    assert report.parameters == 1_000_000
    assert report.naive_parameters == 10_000 * 3 + 490_000 * 4
    assert report.naive_nbytes == 4 * report.naive_parameters


def test_every_tie_of_many_is_in_the_report(large: Any) -> None:
    report = tied.ties(large[:250])
    assert report.nbytes == 1_000_000
    assert len(report.tied) == 125_000
    assert report.tied[-1].leaves[1].path == "249.999"


def test_the_split_of_a_million_leaves_pickles(large: Any) -> None:
    again = pickle.loads(pickle.dumps(tied.split(large)))
    assert_large(tied.merge(*again), 0)


def test_one_storage_may_have_very_many_leaves() -> None:
    """One buffer, read row by row and by itself."""
    w = np.zeros((20_000, 2))
    model = {"all": w, "rows": list(w)}
    (storage,) = tied.ties(model).storages
    assert len(storage.leaves) == 20_001
    mapped = tied.map(lambda a: a + 1, model)
    mapped["all"][19_999, 1] = 7
    assert mapped["rows"][19_999].tolist() == [1, 7]


def test_many_readings_of_one_array_do_not_cost_the_square() -> None:
    """Every interval is open while every other one is looked at."""
    w = np.zeros(3)
    model = [w[...] for _ in range(50_000)]
    (storage,) = tied.ties(model).storages
    assert len(storage.leaves) == 50_000
    mapped = tied.map(lambda a: a + 1, model)
    mapped[0][0] = 7
    assert mapped[-1].tolist() == [7, 1, 1]


def test_disjoint_rows_of_one_buffer_are_a_hundred_thousand_storages() -> None:
    """Every interval touches its neighbours; none is joined."""
    w = np.zeros((100_000, 2))
    assert len(tied.split(list(w))[1]) == 100_000


def test_nested_intervals_do_not_cost_the_square() -> None:
    """One open interval under very many short ones, column by column: none shares an element."""
    w = np.zeros((20_000, 4))
    model = [w[:, 0], *(row[1:] for row in w)]
    assert len(tied.split(model)[1]) == 20_001


def test_only_what_the_model_reads_is_copied() -> None:
    """H15: a row and a column of a 32 MB buffer."""
    huge = np.zeros((1000, 4096))
    for model, unique in (
        ({"row": huge[7], "again": huge[7], "part": huge[7, 10:20]}, 4096 * 8),
        ({"column": huge[:, 3]}, 1000 * 8),
    ):
        tracemalloc.start()
        copied = tied.copy(model)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < unique + 20_000
        assert list(copied) == list(model)
