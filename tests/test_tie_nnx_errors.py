"""What can't be tied in an NNX module: said before anything is changed, with the paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tied
from nnx_tied import Net, Part, close, numbers


class Model(nnx.Module):
    def __init__(self) -> None:
        self.a = Part(numbers(3, 2))
        self.b = Part(numbers(2, 3))
        self.half = nnx.Param(jnp.ones((3, 2), "bfloat16"))
        self.stats = nnx.BatchStat(numbers(3, 2))
        self.there = nnx.Param(jax.device_put(numbers(3, 2), jax.devices()[1]))
        self.lists = nnx.data([nnx.Param(numbers(3, 2))])
        self.twice = self.c = Part(numbers(3, 2))
        self.read = nnx.Param(tied.transpose(self.a.w[...]))
        self.hi = nnx.Param(numbers(3, 2), hijax=True)
        self.number = 3


captured = jnp.ones(2)


def refusals() -> dict[str, tuple[Callable[[Model], Any], str]]:
    inner = numbers(3, 2)
    return {
        "unknown source": (
            lambda m: tied.tie(m, "b.w", "a.x", tied.transpose),
            "no such variable: a.x\n  reached  a\n  it has   w, b",
        ),
        "unknown target": (
            lambda m: tied.tie(m, "d.w", "a.w"),
            "no such variable: d.w\n  reached  the model\n  it has   a, b, half, stats, there, "
            "lists, twice, c, read, hi, number",
        ),
        "a module": (
            lambda m: tied.tie(m, "b", "a"),
            "b is no variable but a Part",
        ),
        "a number": (
            lambda m: tied.tie(m, "number", "a.w"),
            "number is no variable but a int",
        ),
        "shape": (
            lambda m: tied.tie(m, "b.w", "a.w"),
            "b.w can't be tied to a.w\n  shape  b.w has (2, 3), a.w gives (3, 2)\n"
            "  Is it the transpose? tied.tie(model, target, source, tied.transpose)",
        ),
        "shape through a view": (
            lambda m: tied.tie(m, "half", "a.w", tied.transpose),
            "half can't be tied to a.w\n  shape  half has (3, 2), a.w gives (2, 3)\n"
            "  dtype  half has bfloat16, a.w gives float32\n"
            "  Is it the same array? tied.tie(model, target, source)",
        ),
        "dtype": (
            lambda m: tied.tie(m, "half", "a.w"),
            "half can't be tied to a.w\n  dtype  half has bfloat16, a.w gives float32\n"
            "  Cast the model first, so that both have one dtype",
        ),
        "device": (
            lambda m: tied.tie(m, "there", "a.w"),
            "there can't be tied to a.w\n  device  there has cpu:1, a.w gives cpu:0\n"
            "  Move the model first, so that both are on the same devices",
        ),
        "type": (
            lambda m: tied.tie(m, "stats", "a.w"),
            "stats and a.w are variables of different types\n  stats  BatchStat\n  a.w    Param\n"
            '  Say which counts: tied.tie(..., on_conflict="source") or "target"',
        ),
        "itself": (
            lambda m: tied.tie(m, "a.w", "a.w"),
            "a.w can't be tied to itself",
        ),
        "several sources": (
            lambda m: tied.tie(m, "b.w", ["a.w", "c.w"]),
            "b.w needs a view to read 2 sources\n"
            "  Give a function of so many arrays: view=lambda a, b: a @ b",
        ),
        "a view that fails": (
            lambda m: tied.tie(m, "b.w", "a.w", lambda w: w.reshape(5)),
            "the view of b.w fails on a.w\n  error  cannot reshape array of size 6 into shape (5,)",
        ),
        "a view out of range": (
            lambda m: tied.tie(m, "b.w", "a.w", lambda w: w[7]),
            "the view of b.w fails on a.w\n"
            "  error  index 7 is out of bounds for axis 0 with size 3",
        ),
        "a view that gives no array": (
            lambda m: tied.tie(m, "b.w", "a.w", lambda w: (w, w)),
            "the view of b.w returns tuple, not an array",
        ),
        "a view that holds an array": (
            lambda m: tied.tie(m, "b.w", "a.w", lambda w: (w + inner).T),
            "the view of b.w holds an array of its own\n"
            "  array  in its closure or defaults, where nothing moves or saves it\n"
            "  Make it a variable of the model, and a further source",
        ),
        "an inverse that does not fit": (
            lambda m: tied.tie(m, "b.w", "a.w", lambda w: jnp.exp(w).T, inverse=jnp.log),
            "the inverse does not make a.w of b.w\n  wanted  (3, 2)\n  made    (2, 3)",
        ),
        "a plain list": (
            lambda m: tied.tie(m, "lists.0", "a.w"),
            "lists.0 stands in a list, where nothing can be tied\n"
            "  Use nnx.List or nnx.Dict in its place",
        ),
        "a module at two places": (
            lambda m: tied.tie(m, "c.w", "a.w"),
            "c.w belongs to a module that stands at several places\n  places  twice, c\n"
            "  Tie them to one another first: tied.tie(model)",
        ),
        "a source that is a view": (
            lambda m: tied.tie(m, "b.w", "read"),
            "read holds no array of its own but a View\n"
            "  Make what is tied last first: tied.tie(model)",
        ),
        "a hijax variable": (
            lambda m: tied.tie(m, "a.w", "hi"),
            "hi is a hijax variable, which can't be tied\n  Make it with hijax=False",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_refusal_names_both_and_changes_nothing(name: str) -> None:
    model = Model()
    parts = {key: (type(part), id(part)) for key, part in vars(model).items()}
    act, text = refusals()[name]
    with pytest.raises((tied.TieError, tied.PathError)) as caught:
        act(model)
    assert str(caught.value) == text
    assert caught.value.paths
    assert type(model) is Model
    assert parts == {key: (type(part), id(part)) for key, part in vars(model).items()}
    assert type(model.b) is Part
    assert sorted(vars(model.b)) == ["_pytree__nodes", "_pytree__state", "b", "w"]


def test_what_is_tied_already_is_said() -> None:
    model = Net(numbers(3, 2), numbers(3, 2))
    model.third = nnx.Param(numbers(3, 2))
    tied.tie(model, "deep.1.second.w", "first.w")
    with pytest.raises(tied.TieError) as caught:
        tied.tie(model, "deep.1.second.w", "third")
    assert str(caught.value) == (
        'deep.1.second.w is tied already\n  Untie it first: tied.untie(model, "deep.1.second.w")'
    )
    with pytest.raises(tied.TieError) as caught:
        tied.tie(model, "first.w", "deep.1.second.w")
    assert str(caught.value) == (
        "first.w can't be tied to deep.1.second.w, which is computed from it\n"
        '  Untie it first: tied.untie(model, "deep.1.second.w")'
    )
    model.fourth = model.third
    with pytest.raises(tied.TieError) as caught:
        tied.tie(model, "third", "first.w")
    assert str(caught.value) == (
        "third is tied already\n  tie  third is fourth\n"
        '  Untie it first: tied.untie(model, "third")'
    )
    model.fifth = nnx.Param(model.third[...])
    with pytest.raises(tied.TieError) as caught:
        tied.tie(model, "fifth", "first.w")
    assert str(caught.value) == (
        "fifth is tied already\n  tie  fifth has the array of third\n"
        '  Untie it first: tied.untie(model, "fifth")'
    )
    tied.tie(model, "fourth", "third")
    close(model.fourth[...], model.third[...])


def test_on_conflict_says_which_type_counts() -> None:
    for which, kind in (("source", nnx.Param), ("target", nnx.BatchStat)):
        model = Model()
        tied.tie(model, "stats", "a.w", on_conflict=which)
        assert type(model.a.w) is kind
        tied.untie(model, "stats")
        assert type(model.stats) is nnx.BatchStat


def test_a_part_that_is_reached_through_a_tie_is_not_tied_itself() -> None:
    model = Net(numbers(3, 2), numbers(3, 2))
    tied.tie(model, "deep.1.second.w", "first.w")
    for act in (lambda: tied.tie(model.deep, "0.b", "1.second.b"),
                lambda: tied.untie(model.second, "w"),
                lambda: tied.tie(model.deep)):  # fmt: skip
        with pytest.raises(tied.TieError) as caught:
            act()
        assert str(caught.value) == (
            "a part that is reached through a tie can't be tied or untied itself\n"
            "  tie  deep.1.second.w = first.w\n  Give the whole model"
        )


# ------------------------------------------------------------------------------------ shardings


def annotated(first: Any, second: Any) -> nnx.Module:
    with jax.set_mesh(jax.make_mesh((4, 2), ("model", "data"))):
        return nnx.Dict(
            first=nnx.Param(numbers(8, 4), out_sharding=first),
            second=nnx.Param(numbers(4, 8), out_sharding=second),
        )


def test_annotations_that_agree_through_the_view_are_kept() -> None:
    model = annotated(("model", None), (None, "model"))
    tied.tie(model, "second", "first", tied.transpose)
    assert model["second"].get_metadata("out_sharding") == (None, "model")
    assert model["second"][...].sharding.spec == PartitionSpec(None, "model")
    one = annotated(("model", "data"), None)
    tied.tie(one, "second", "first", tied.transpose)
    assert one["second"].get_metadata("out_sharding") == ("data", "model")


def test_annotations_that_contradict_each_other_name_both() -> None:
    model = annotated(("model", None), ("model", None))
    with pytest.raises(tied.TieError) as caught:
        tied.tie(model, "second", "first", tied.transpose)
    assert str(caught.value) == (
        "second and first ask for different shardings\n"
        "  second  out_sharding ('model', None)\n"
        "  first   out_sharding ('model', None), which is (None, 'model') there\n"
        "  Annotate both alike, or one of them only"
    )
    assert caught.value.paths == ("first", "second")


def test_arrays_that_lie_differently_on_a_mesh_name_both() -> None:
    mesh = jax.make_mesh((4, 2), ("model", "data"))
    rows = NamedSharding(mesh, PartitionSpec("model", None))
    model = nnx.Dict(
        first=nnx.Param(jax.device_put(numbers(8, 4), rows)),
        second=nnx.Param(jax.device_put(numbers(4, 8), rows)),
    )
    with pytest.raises(tied.TieError, match="ask for different shardings"):
        tied.tie(model, "second", "first", tied.transpose)
    model["second"] = nnx.Param(
        jax.device_put(numbers(4, 8), NamedSharding(mesh, PartitionSpec(None, "model")))
    )
    tied.tie(model, "second", "first", tied.transpose)
    np.testing.assert_array_equal(model["second"][...], model["first"][...].T)
    moved = jax.device_put(model, NamedSharding(mesh, PartitionSpec("model")))
    assert len(jax.tree.leaves(moved)) == 1
    assert moved["second"][...].sharding.spec == PartitionSpec(None, "model")


def test_inside_of_shard_map_a_transpose_is_that_of_the_shard_and_a_slice_is_refused() -> None:
    mesh = jax.make_mesh((4,), ("x",))
    over = {"mesh": mesh, "in_specs": PartitionSpec("x")}
    model = nnx.Dict(first=nnx.Param(numbers(8, 4)), second=nnx.Param(numbers(4, 8)))
    tied.tie(model, "second", "first", tied.transpose)
    graphdef, state = nnx.split(model)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec("x")))
    read = jax.shard_map(lambda state: nnx.merge(graphdef, state)["second"][...],
                         out_specs=PartitionSpec(None, "x"), **over)  # fmt: skip
    close(read(state), model["second"][...])
    model = nnx.Dict(first=nnx.Param(numbers(8, 4)), second=nnx.Param(numbers(2, 4)))
    tied.tie(model, "second", "first", lambda w: w[2:4])
    graphdef, _ = nnx.split(model)
    read = jax.shard_map(lambda state: nnx.merge(graphdef, state)["second"][...],
                         out_specs=PartitionSpec("x"), **over)  # fmt: skip
    with pytest.raises(tied.TieError, match="it is not certain what second reads of first here"):
        read(state)
