"""What Functors.jl asserts of sharing, in Python's terms; each test has its case's number."""

from __future__ import annotations

import collections
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tied

MAKE = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}
each_library = pytest.mark.parametrize("library", MAKE)


def copy_of(a: Any) -> Any:
    return a.clone() if isinstance(a, torch.Tensor) else a.copy()


@dataclass(eq=False)
class Box:
    """A mutable box around anything."""

    item: Any


@dataclass(eq=False)
class Crate:
    """Another type with the same field."""

    item: Any


@dataclass(eq=False)
class Chainlink:
    """A type whose field is of its own type."""

    rest: Any
    w: Any


@each_library
def test_F1_the_same_array_stays_one_and_a_copy_stays_apart(library: str) -> None:
    a = MAKE[library]([1.0, 2.0])
    b = copy_of(a)
    mapped = tied.f16({"x": a, "y": {"x": b, "y": {"x": a, "y": b}}})
    assert mapped["x"] is mapped["y"]["y"]["x"]
    assert mapped["y"]["x"] is mapped["y"]["y"]["y"]
    assert mapped["x"] is not mapped["y"]["x"]
    assert not tied.shares(mapped["x"], mapped["y"]["x"])


@each_library
def test_F3_two_calls_come_apart_and_one_call_does_not(library: str) -> None:
    """There is no memo to pass: what is to stay tied goes into one call."""
    a = MAKE[library]([1.0, 2.0])
    first, second = tied.copy({"a": a}), tied.copy({"a": a})
    assert not tied.shares(first["a"], second["a"])
    first, second = tied.copy(({"a": a}, {"a": a}))
    assert first["a"] is second["a"]


@each_library
def test_F4_only_the_array_of_two_tuples_is_shared(library: str) -> None:
    a = MAKE[library]([1.0, 2.0])
    calls = []
    mapped = tied.map(lambda x: calls.append(x) or x * 2, [(a, 4), (a, 4)])
    assert len(calls) == 1
    assert mapped[0][0] is mapped[1][0]
    assert mapped[0] is not mapped[1]
    assert [pair[1] for pair in mapped] == [4, 4]


@pytest.mark.parametrize("with_array", [True, False])
def test_F7_one_box_stays_one_and_an_equal_box_stays_apart(with_array: bool) -> None:
    item = np.ones(2) if with_array else 3.5
    box, equal = Box(item), Box(item)
    model = {"a": box, "b": box, "c": equal, "w": np.ones(1)}
    mapped = tied.map(lambda a: a * 2, model)
    assert mapped["a"] is mapped["b"]
    assert mapped["a"] is not mapped["c"]
    assert (mapped["a"] is box) is (not with_array)


def test_F9_a_field_of_its_own_type_does_not_recurse_for_ever() -> None:
    w = np.arange(3.0)
    model = Chainlink(Chainlink(Chainlink(None, w), w[1:]), w)
    mapped = tied.map(lambda a: a + 1, model)
    assert mapped.rest.rest.w is mapped.w
    assert mapped.rest.w.tolist() == [2, 3]
    assert mapped.rest.rest.rest is None


def test_H17_cycles_work() -> None:
    w = np.arange(3.0)
    outer, inner = Box(None), [w, w[:2]]
    outer.item = (inner, outer)
    inner.append(outer)
    mapped = tied.map(lambda a: a + 1, outer)
    assert mapped.item[1] is mapped
    assert mapped.item[0][2] is mapped
    assert np.shares_memory(mapped.item[0][0], mapped.item[0][1])
    assert mapped is not outer


@each_library
def test_F13_types_come_from_the_first_of_several_models(library: str) -> None:
    a = MAKE[library]([1.0, 2.0])
    model = collections.OrderedDict(x=a, y=Box((a, 7)))
    other = {"y": Crate([a * 10, 8]), "x": a * 10}
    mapped = tied.map(lambda p, q: p + q, model, other)
    assert type(mapped) is collections.OrderedDict
    assert type(mapped["y"]) is Box
    assert mapped["y"].item[0] is mapped["x"]
    assert mapped["x"].tolist() == [11, 22]
    assert mapped["y"].item[1] == 7


@pytest.mark.parametrize(
    ("other", "path"),
    [
        ({"x": 1.0, "y": [1.0]}, "y.1"),
        ({"x": 1.0}, "y"),
        ({"y": [1.0, 1.0]}, "x"),
        ({"x": 1.0, "y": {"0": 1.0, "1": 1.0}}, "y"),
    ],
)
def test_F13_a_part_that_is_missing_raises_with_its_path(other: Any, path: str) -> None:
    model = {"x": np.ones(2), "y": [np.ones(2), np.ones(2)]}

    def filled(part: Any) -> Any:
        if isinstance(part, float):
            return np.full(2, part)
        if isinstance(part, dict):
            return {key: filled(value) for key, value in part.items()}
        return [filled(value) for value in part] if isinstance(part, list) else part

    with pytest.raises(tied.MatchError, match=re.escape(path)) as caught:
        tied.map(lambda a, b: a + b, model, filled(other))
    assert any(found.startswith(path) for found in caught.value.paths)


@pytest.mark.parametrize("reading", [lambda w: w, tied.transpose], ids=["same", "transposed"])
@each_library
def test_H16_a_second_model_that_differs_at_a_tie_raises(library: str, reading: Any) -> None:
    w = MAKE[library]([[1.0, 2.0], [2.0, 4.0]])
    model = {"a": w, "b": reading(w)}
    good, bad = w * 1, w * 2
    mapped = tied.map(lambda p, q: p + q, model, {"a": good, "b": copy_of(good)})
    assert tied.shares(mapped["a"], mapped["b"])
    with pytest.raises((tied.TieError, tied.MatchError)) as caught:
        tied.map(lambda p, q: p + q, model, {"a": good, "b": bad})
    assert set(caught.value.paths) >= {"a", "b"}


@each_library
def test_F21_f_runs_once_for_an_array_and_its_transposes(library: str) -> None:
    v = MAKE[library]([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    model = {"a": v, "b": tied.transpose(v), "c": tied.permute(v, (1, 0)), "d": copy_of(v).T}
    calls = []
    mapped = tied.map(lambda a: calls.append(a) or a * 2, model)
    assert len(calls) == 2
    for name in "bc":
        assert tied.shares(mapped["a"], mapped[name])
        assert np.asarray(mapped[name]).tolist() == np.asarray(mapped["a"]).T.tolist()
    assert not tied.shares(mapped["a"], mapped["d"])
    assert np.asarray(mapped["d"]).tolist() == np.asarray(mapped["a"]).T.tolist()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_F21_holds_for_the_library_s_own_transpose(library: str) -> None:
    v = MAKE[library]([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    model = {"a": v, "b": v.T, "c": tied.transpose(v)}
    mapped = tied.map(lambda a: a * 2, model)
    mapped["b"][2, 0] = -1
    assert mapped["a"][0, 2] == mapped["c"][2, 0] == -1


@pytest.mark.parametrize("reading", ["view", "base"])
@each_library
def test_F22_another_model_may_hold_the_views_shape_or_the_base_s(
    library: str, reading: str
) -> None:
    v = MAKE[library]([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    model = {"a": v, "b": tied.transpose(v)}
    g = v * 10
    mapped = tied.map(lambda p, q: p + q, model, {"a": g, "b": g.T if reading == "view" else g})
    assert mapped["a"].tolist() == [[11, 22, 33], [44, 55, 66]]
    assert np.asarray(mapped["b"]).tolist() == np.asarray(mapped["a"]).T.tolist()


# -------------------------------------------------------------------------- F30 to F36, leaves


def test_F30_numbers_strings_patterns_and_types_stay() -> None:
    settings = [1, 2.5, 1j, "text", b"raw", re.compile("a+"), int, np.float32, None, ..., range(3)]
    mapped = tied.map(lambda a: a * 2, {"w": np.ones(2), "settings": settings})
    assert mapped["settings"] is settings


def test_F31_leaves_come_in_order() -> None:
    one = np.array
    model = (one(1), (one(2), one(3)), {"a": one(4), "b": (one(5), one(6)), "c": one(7)})
    seen = []
    tied.map(lambda path, a: seen.append((str(path), int(a))) or a, model, with_path=True)
    assert seen == [
        ("0", 1),
        ("1.0", 2),
        ("1.1", 3),
        ("2.a", 4),
        ("2.b.0", 5),
        ("2.b.1", 6),
        ("2.c", 7),
    ]
    assert list(tied.split(model)[1]) == [path for path, _ in seen]


@pytest.mark.parametrize(
    "cls", [dict, collections.OrderedDict, functools.partial(collections.defaultdict, list)]
)
def test_F32_dicts_keep_their_kind_and_order(cls: Any) -> None:
    model = cls({"z": np.ones(1), "a": np.zeros(1)})
    mapped = tied.map(lambda a: a * 2, model)
    assert type(mapped) is type(model)
    assert list(mapped) == ["z", "a"]
    assert mapped["z"].tolist() == [2]


def test_F33_closures_capture_mapped_arrays() -> None:
    w = np.arange(4.0).reshape(2, 2)

    def layer(x: Any) -> Any:
        return w @ x

    mapped = tied.map(lambda a: a * 2, {"w": w, "layer": layer})
    assert mapped["layer"](np.ones(2)).tolist() == [2, 10]
    mapped["w"][0, 0] = 100
    assert mapped["layer"](np.ones(2)).tolist() == [102, 10]
    assert layer(np.ones(2)).tolist() == [1, 5]


def test_F34_partials_hold_mapped_arrays() -> None:
    w = np.arange(4.0).reshape(2, 2)
    mapped = tied.map(lambda a: a * 2, {"w": w, "layer": functools.partial(np.matmul, w)})
    assert type(mapped["layer"]) is functools.partial
    assert mapped["layer"].args[0] is mapped["w"]
    assert mapped["layer"](np.ones(2)).tolist() == [2, 10]


def test_F35_a_function_without_arrays_stays() -> None:
    def relu(x: Any) -> Any:
        return np.maximum(x, 0)

    model = {"w": np.ones(2), "f": relu, "g": np.tanh, "h": len}
    mapped = tied.map(lambda a: a * 2, model)
    assert [mapped[key] is model[key] for key in "fgh"] == [True] * 3


def test_F36_is_leaf_gives_a_part_whole() -> None:
    model = {"pair": (np.ones(2), np.zeros(2)), "w": np.ones(2)}
    mapped = tied.map(
        lambda part: "pair" if isinstance(part, tuple) else part * 2,
        model,
        is_leaf=lambda part: isinstance(part, tuple),
    )
    assert mapped["pair"] == "pair"
    assert mapped["w"].tolist() == [2, 2]


def test_F36_node_leaf_and_register_say_how_a_type_comes_apart() -> None:
    @tied.leaf
    class Whole:
        def __init__(self, w: Any) -> None:
            self.w = w

    @tied.node(fields=("w",))
    class Part:
        def __init__(self, w: Any, cache: Any) -> None:
            self.w, self.cache = w, cache

    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.both = (first, second)

    tied.register(
        Pair,
        lambda pair: ({"first": pair.both[0], "second": pair.both[1]}, None),
        lambda _, children: Pair(**children),
    )
    w = np.ones(2)
    whole = Whole(w)
    model = {"whole": whole, "part": Part(w, w), "pair": Pair(w, w[:1])}
    seen = []

    def f(path: Any, x: Any) -> Any:
        seen.append(str(path))
        return x if x is whole else x * 2

    mapped = tied.map(f, model, with_path=True)
    assert seen == ["whole", "part.w"]
    assert mapped["whole"] is whole
    assert mapped["part"].cache is w
    assert mapped["pair"].both[0] is mapped["part"].w
    assert np.shares_memory(*mapped["pair"].both)


# ------------------------------------------------------------------------------------ F40 paths


def paths_of(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tied.map(lambda path, a: found.update({str(path): path}) or a, model, with_path=True)
    return found


def nested() -> Any:
    w = np.arange(3.0)
    return {"layers": [Box(w), Box({"k": (w * 2,)})], "text": "t"}


def test_F40_a_path_gets_its_part_through_every_kind_of_step() -> None:
    model = nested()
    found = paths_of(model)
    assert list(found) == ["layers.0.item", "layers.1.item.k.0"]
    assert found["layers.0.item"].get(model) is model["layers"][0].item
    assert found["layers.1.item.k.0"].get(model) is model["layers"][1].item["k"][0]


def test_F40_a_path_knows_whether_a_model_has_it() -> None:
    path = paths_of(nested())["layers.1.item.k.0"]
    assert path.has(nested())
    assert not path.has({"layers": [1]})
    assert not path.has({"layers": [1, Box({"k": ()})]})


def test_F40_a_path_sets_its_part() -> None:
    model = nested()
    found = paths_of(model)
    found["layers.0.item"].set(model, "new")
    assert model["layers"][0].item == "new"


@pytest.mark.parametrize(
    ("broken", "reached"),
    [
        ({}, "layers"),
        ({"layers": [0]}, "1"),
        ({"layers": [0, 1]}, "item"),
        ({"layers": [0, Box({})]}, "k"),
        ({"layers": [0, Box({"k": ()})]}, "0"),
    ],
)
def test_F40_a_bad_step_says_which_one_failed(broken: Any, reached: str) -> None:
    path = paths_of(nested())["layers.1.item.k.0"]
    with pytest.raises(tied.TiedError, match=rf"step +\S*\b{reached}\b") as caught:
        path.get(broken)
    assert caught.value.paths == ("layers.1.item.k.0",)
