"""The laws of tied, as properties of random models with planned sharing.

`strategies.recipes` draws the model and the plan of what is shared; `oracle` checks by brute force.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
import tied
from recipes import LIBRARIES, Built
from strategies import LAW, recipes

each_library = pytest.mark.parametrize("library", LIBRARIES)

CLONE: dict[str, Callable[[Any], Any]] = {
    "numpy": np.copy,
    "torch": lambda a: a.detach().clone(),
    "jax": jnp.copy,
}


def law(test: Callable[..., None]) -> Any:
    """A property, checked for each array library."""
    return each_library(LAW(given(data=st.data())(test)))


def clone(library: str) -> Callable[[Any], Any]:
    """A copy that keeps the order in memory: the one elementwise `f` that fits every dtype."""
    return CLONE[library]


def double(a: Any) -> Any:
    """An elementwise `f` that commutes with conjugation."""
    return a * 2


def truth(built: Built) -> list[oracle.Positions]:
    return [built.truth[id(array)] for array in oracle.arrays(built.model)]


def found(model: Any) -> list[oracle.Positions]:
    return [oracle.positions(array) for array in oracle.arrays(model)]


def assert_ties_of_plan(built: Built, model: Any, unit: str = "bytes") -> None:
    assert oracle.pattern(found(model), unit) == oracle.pattern(truth(built), unit)


def reported(model: Any) -> set[frozenset[int]]:
    """The storages as `ties` reports them: sets of the ids of the arrays that read each."""
    return {
        frozenset(id(oracle.resolve(model, leaf.path)) for leaf in storage.leaves)
        for storage in tied.ties(model).storages
    }


def planned(built: Built) -> set[frozenset[int]]:
    every = oracle.arrays(built.model)
    return {
        frozenset(id(every[number]) for number in members)
        for members in oracle.groups(truth(built))
    }


# --------------------------------------------------------------------------------------- laws


@law
def test_law_0_the_plan_and_the_addresses_agree(library: str, data: Any) -> None:
    """The oracle itself: what the recipe says is shared is what is shared in memory."""
    built = data.draw(recipes(library)).build()
    assert_ties_of_plan(built, built.model)


@law
def test_law_1_merge_of_split_is_the_model(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    again = tied.merge(*tied.split(built.model))
    oracle.assert_same(built.model, again)
    assert_ties_of_plan(built, again)


@law
def test_law_1_holds_for_storages_of_its_own(library: str, data: Any) -> None:
    """The merged model shares no memory with the first if the storages do not."""
    built = data.draw(recipes(library)).build()
    skeleton, storages = tied.split(built.model)
    copies = {name: clone(library)(storage) for name, storage in storages.items()}
    again = tied.merge(skeleton, copies)
    oracle.assert_same(built.model, again)
    assert_ties_of_plan(built, again)
    ours = set().union(*map(oracle.byte_set, found(again)), set())
    assert ours.isdisjoint(set().union(*map(oracle.byte_set, found(built.model)), set()))


@law
def test_law_1_the_skeleton_is_the_same_each_time(library: str, data: Any) -> None:
    recipe = data.draw(recipes(library))
    first, storages = tied.split(recipe.build().model)
    second, _ = tied.split(recipe.build().model)
    assert first == second
    assert hash(first) == hash(second)
    assert first.names == tuple(storages) == second.names


@law
def test_law_2_map_keeps_ties(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    mapped = tied.map(clone(library), built.model)
    assert_ties_of_plan(built, mapped)
    oracle.assert_same(built.model, mapped)
    assert tied.ties(mapped).storages == tied.ties(built.model).storages
    assert not tied.compare(built.model, mapped)


@law
def test_law_2_casts_keep_ties(library: str, data: Any) -> None:
    recipe = data.draw(
        recipes(
            library,
            reinterpret=False,
            dtypes=("float32", "float64", "int32")[:: 1 + (library == "jax")],
        )
    )
    built = recipe.build()
    half = tied.f16(built.model)
    assert_ties_of_plan(built, half, "elements")
    for before, after in zip(oracle.arrays(built.model), oracle.arrays(half), strict=True):
        if "float" in str(before.dtype):
            assert str(after.dtype).endswith("float16")
            assert (oracle.numpy(after) == oracle.numpy(before).astype("float16")).all()
        else:
            assert oracle.bits(before) == oracle.bits(after)


@law
def test_law_2_copies_keep_ties(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    copied = tied.copy(built.model)
    oracle.assert_same(built.model, copied)
    assert_ties_of_plan(built, copied)
    ours = set().union(*map(oracle.byte_set, found(copied)), set())
    assert ours.isdisjoint(set().union(*map(oracle.byte_set, found(built.model)), set()))


@law
def test_law_3_f_is_called_once_per_storage(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    calls: list[Any] = []

    def f(path: Any, storage: Any) -> Any:
        calls.append((str(path), storage.nbytes))
        return clone(library)(storage)

    tied.map(f, built.model, with_path=True)
    _, storages = tied.split(built.model)
    assert calls == [(name, storage.nbytes) for name, storage in storages.items()]

    places = truth(built)
    joined = [members for members in oracle.groups(places) if places[min(members)][0].size]
    sizes = [
        (
            len(set().union(*(oracle.byte_set(places[number]) for number in members))),
            # PyTorch reads no element at an odd byte, so its spans are of whole elements
            oracle.span_bytes([places[number] for number in members], whole=library == "torch"),
        )
        for members in joined
    ]
    given_bytes = sorted(count for _, count in calls if count)
    assert len(given_bytes) == len(joined)
    assert sum(low for low, _ in sizes) <= sum(given_bytes) <= sum(high for _, high in sizes)


@law
def test_law_3_an_array_that_is_alone_is_given_as_it_is(library: str, data: Any) -> None:
    """Untied, without an element read twice: `f` sees the array's own elements and shape."""
    recipe = data.draw(recipes(library, reinterpret=False, linked=False, modules=False))
    built = recipe.build()
    every, places = oracle.arrays(built.model), truth(built)
    lone = [
        min(members)
        for members in oracle.groups(places)
        if len(members) == 1
        and places[min(members)][0].size
        and is_plain(*places[min(members)])
        and not isinstance(every[min(members)], tied.View)
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    tied.map(
        lambda path, a: shapes.update({str(path): tuple(a.shape)}) or clone(library)(a),
        built.model,
        with_path=True,
    )
    paths = [path for path, _ in oracle.leaves(built.model)]
    for number in lone:
        assert shapes[paths[number]] == tuple(every[number].shape)


def is_plain(starts: np.ndarray, each: int) -> bool:
    """No byte is read twice."""
    return len(oracle.byte_set((starts, each))) == starts.size * each


@law
def test_law_4_each_leaf_is_f_of_that_leaf(library: str, data: Any) -> None:
    recipe = data.draw(recipes(library, reinterpret=False))
    f = double if "structured" not in {b.dtype for b in recipe.buffers} else clone(library)
    model = recipe.build().model
    oracle.assert_same(model, tied.map(f, model), no_grad(f))


def no_grad(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @torch.no_grad()
    def inner(a: Any) -> Any:
        return f(jnp.asarray(oracle.numpy(a)) if isinstance(a, tied.View) else a)

    return inner


@pytest.mark.parametrize("library", ["numpy", "torch"])
@LAW
@given(data=st.data())
def test_law_5_a_write_is_seen_through_every_member(library: str, data: Any) -> None:
    recipe = data.draw(recipes(library, reinterpret=False, dtypes=("float32",)))
    built = recipe.build()
    mapped = tied.map(double, built.model)
    before, after, places = oracle.arrays(built.model), oracle.arrays(mapped), truth(built)
    number = data.draw(st.integers(0, len(after) - 1)) if after else None
    if number is None:
        return
    if library == "numpy":
        assert [a.flags.writeable for a in before] == [a.flags.writeable for a in after]
        if not after[number].flags.writeable:
            return
        after[number].fill(-5)
    elif is_plain(*places[number]):  # torch refuses to fill where one element is read twice
        with torch.no_grad():
            after[number].fill_(-5)
    else:
        return
    written = oracle.byte_set(places[number])
    for old, new, (starts, _) in zip(before, after, places, strict=True):
        hit = np.vectorize(lambda place: int(place) in written, otypes=[bool])(starts)
        expected = np.where(hit, np.float32(-5), 2 * oracle.numpy(old))
        assert (oracle.numpy(new) == expected).all()


OPERATIONS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "map": lambda m, f: tied.map(f, m),
    "split": lambda m, f: tied.split(m),
    "merge": lambda m, f: tied.merge(*tied.split(m)),
    "copy": lambda m, f: tied.copy(m),
    "f32": lambda m, f: tied.f32(m),
    "ties": lambda m, f: str(tied.ties(m)),
    "compare": lambda m, f: str(tied.compare(m, m)),
    "cpu": lambda m, f: tied.cpu(m),
}


@law
def test_law_6_the_argument_is_never_changed(library: str, data: Any) -> None:
    recipe = data.draw(recipes(library, reinterpret=False))
    built = recipe.build()
    before = oracle.snapshot(built.model)
    for operation in OPERATIONS.values():
        operation(built.model, clone(library))
        assert oracle.snapshot(built.model) == before


@law
def test_law_6_holds_when_f_fails(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    before = oracle.snapshot(built.model)
    count = 0

    def fail(a: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyError("no")
        return clone(library)(a)

    if len(tied.split(built.model)[1]) >= 2:
        with pytest.raises(KeyError):
            tied.map(fail, built.model)
    assert oracle.snapshot(built.model) == before


def test_law_6_holds_when_an_error_is_raised() -> None:
    w = np.ones((2, 3))
    model = {"a": w, "b": w.T, "c": [w[0]]}
    before = oracle.snapshot(model)
    with pytest.raises(tied.TieError):
        tied.map(lambda a: a.reshape(-1)[:3], model)
    with pytest.raises(tied.MatchError):
        tied.map(lambda a, b: a, model, {"a": w})
    with pytest.raises(tied.DeviceError):
        tied.to(model, "nowhere")
    assert oracle.snapshot(model) == before


# Law 7, the gradient, is in test_law_gradients.py.


@law
def test_law_8_pickle_of_split_keeps_bits_and_ties(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    again = tied.merge(*oracle.through_pickle(tied.split(built.model)))
    oracle.assert_same(built.model, again)
    assert_ties_of_plan(built, again)


@each_library
def test_law_8_nan_payloads_pass(library: str) -> None:
    payload = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x3F800000], "uint32").view("float32")
    w = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}[library](payload)
    model = {"w": w, "again": w}
    again = tied.merge(*oracle.through_pickle(tied.split(model)))
    assert oracle.numpy(again["w"]).view("uint32").tolist() == payload.view("uint32").tolist()
    assert again["w"] is again["again"]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_law_8_a_pickle_is_no_larger_than_the_unique_bytes(library: str) -> None:
    """T28: ten rows of a large buffer are ten rows in the file."""
    big = np.zeros((10_000, 10), "float32")
    big = torch.from_numpy(big) if library == "torch" else big
    rows = big[:10]
    stream = pickle.dumps(tied.split({"rows": rows, "first": rows[0], "columns": rows.T}))
    assert 400 <= len(stream) < 3000


@law
def test_law_9_parts_without_arrays_are_the_very_same(library: str, data: Any) -> None:
    model = data.draw(recipes(library)).build().model
    mapped = tied.map(clone(library), model)
    for path, before, after in oracle.paired(model, mapped):
        if oracle.is_array(before):
            assert before is not after, path
        else:
            assert (before is after) == (not oracle.holds_array(before)), path


@law
def test_law_10_no_tie_is_invented_and_none_is_missed(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    every = oracle.arrays(built.model)
    for place, array in zip(truth(built), every, strict=True):
        assert place[0].shape == tuple(array.shape)
    assert reported(built.model) == planned(built)


@law
def test_law_10_shares_is_the_byte_sets(library: str, data: Any) -> None:
    built = data.draw(recipes(library)).build()
    every, places = oracle.arrays(built.model), truth(built)
    for a, first in zip(every, places, strict=True):
        for b, second in zip(every, places, strict=True):
            assert tied.shares(a, b) == oracle.overlap(first, second)


@each_library
def test_law_10_equal_values_are_no_tie(library: str) -> None:
    make = {"numpy": np.zeros, "torch": torch.zeros, "jax": jnp.zeros}[library]
    model = {"a": make(3), "b": make(3), "c": make(0), "d": make(0)}
    assert tied.ties(model).tied == ()
    assert len(tied.split(model)[1]) == 4


def test_law_10_meta_tensors_are_no_tie() -> None:
    """T20: all of them say pointer 0."""
    a, b = torch.empty(4, 2, device="meta"), torch.empty(4, 2, device="meta")
    report = tied.ties({"a": a, "b": b, "a.T": a.T, "row": a[1], "other": a[2]})
    assert [len(storage.leaves) for storage in report.storages] == [4, 1]
    assert not tied.shares(a[1], a[2])


def test_law_10_a_reused_id_is_no_tie() -> None:
    class Fresh:
        """Makes its array anew at each look, at the place of the last one."""

        __slots__ = ("seed",)

        def __init__(self, seed: int) -> None:
            self.seed = seed

        def __reduce__(self) -> Any:
            return make_fresh, (np.full(3, float(self.seed)),)

    model = [Fresh(seed) for seed in range(50)]
    gc.collect()
    assert len(tied.ties(model).storages) == 50
    assert tied.ties(model).tied == ()


def make_fresh(array: np.ndarray) -> Any:
    return array
