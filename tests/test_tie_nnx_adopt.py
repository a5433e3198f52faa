"""`tied.tie(model)`, `tied.untie` and the filters of `tied.nnx`, beside what NNX does itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tied
from nnx_tied import KINDS, MODES, SOURCE, TARGET, Part, close, holds, mode, numbers, state_of


@pytest.fixture(params=MODES, autouse=True)
def each_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with mode(request.param):
        yield


class Shared(nnx.Module):
    """Every way in which a module of NNX is tied by itself."""

    def __init__(self) -> None:
        self.a = Part(numbers(2, 2))
        self.again = self.a
        self.b = Part(numbers(2, 2, start=4))
        self.b.b = self.a.b
        self.c = Part(numbers(2, 2, start=8))
        self.c.w = nnx.Param(self.b.w[...])
        self.d = nnx.List([Part(numbers(2, 2)), self.c])
        self.d[0].w = nnx.Param(tied.transpose(self.a.w[...]))
        self.e = Part(numbers(2, 2))
        self.e.w = nnx.Param(tied.view(self.a.w[...], lambda w: jnp.exp(w)))

    def __call__(self, x: Any) -> Any:
        parts = [self.a, self.again, self.b, self.c, *self.d, self.e]
        return sum(part(x + n) for n, part in enumerate(parts))


MADE = """\
tied   again = a
tied   d.1 = c
tied   b.b = a.b
tied   c.w = b.w
tied   d.0.w = a.w.T
tied   e.w is computed from a.w"""


def test_tie_makes_last_what_is_tied_now() -> None:
    model = Shared()
    with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
        before, value = tied.ties(model), model(1.0)
        wanted = nnx.grad(lambda m: m(1.0))(unshared(model))
    made = tied.tie(model)
    assert str(made) == MADE
    close(model(1.0), value)
    assert model.again is model.a
    names = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert names == [("a", "b"), ("a", "w"), ("b", "w"), ("c", "b"), ("d", 0, "b"), ("e", "b")]
    assert "Part" in repr(model)
    tied.check(model, before)
    grads = state_of(nnx.grad(lambda m: m(1.0))(model))
    close(grads["a"]["b"][...], wanted["a"]["b"][...] + wanted["b"]["b"][...]
          + wanted["again"]["b"][...])  # fmt: skip
    close(grads["b"]["w"][...], wanted["b"]["w"][...] + wanted["c"]["w"][...]
          + wanted["d"][1]["w"][...])  # fmt: skip
    copies = [nnx.clone(model), copy.deepcopy(model), nnx.merge(*nnx.split(model))]
    for one in (*copies, jax.tree.map(lambda x: x + 0, model)):
        close(one(1.0), value)
        one.a.b[...] = jnp.zeros(2)
        close(one.again.b[...], 0)
        close(one.b.b[...], 0)


def unshared(model: Any) -> Any:
    """The same numbers, every variable on its own."""
    parts = {name: getattr(model, name) for name in ("a", "again", "b", "c", "e")}
    alone = Shared()
    for name, part in parts.items():
        setattr(alone, name, own(part))
    alone.d = nnx.List([own(part) for part in model.d])
    return alone


def own(part: Any) -> Part:
    made = Part(jnp.asarray(part.w.get_value()) + 0)
    made.b = nnx.Param(part.b[...] + 0)
    return made


def test_what_can_not_last_is_left_and_said() -> None:
    model = nnx.Dict(a=nnx.Param(tied.transpose(numbers(2, 3))), b=nnx.data([Part(numbers(2, 2))]))
    model.c = model.b[0]
    model.b.append(model.c)
    with pytest.warns(tied.TiedWarning, match="some ties can't be made to last"):
        made = tied.tie(model)
    assert str(made) == (
        "tied   c = b.0\n"
        "left   b.1: it stands in a list; use nnx.List or nnx.Dict\n"
        "left   a: no variable holds what it is a reading of"
    )


def test_overlapping_parts_of_an_array_that_nothing_holds_become_parts_of_a_new_variable() -> None:
    flat = numbers(10)
    model = nnx.Dict(
        a=nnx.Param(tied.view(flat, lambda v: v[:6].reshape(3, 2))),
        b=nnx.Dict(c=nnx.Param(tied.view(flat, lambda v: v[4:8]))),
    )
    assert str(tied.tie(model)) == (
        "tied   a = tied_span[:6].reshape(3, 2)\ntied   b.c = tied_span[4:8]"
    )
    assert [path for path, _ in nnx.to_flat_state(nnx.state(model))] == [("tied_span",)]
    grads = state_of(nnx.grad(lambda m: m["a"][...].sum() + 2 * m["b"]["c"][...].sum())(model))
    close(grads["tied_span"][...], [1, 1, 1, 1, 3, 3, 2, 2, 0, 0])


def test_disjoint_parts_of_an_array_are_no_tie() -> None:
    flat = numbers(10)
    model = nnx.Dict(a=nnx.Param(tied.view(flat, lambda v: v[:4])),
                     b=nnx.Param(tied.view(flat, lambda v: v[4:])))  # fmt: skip
    with pytest.warns(tied.TiedWarning):
        assert tied.tie(model).made == ()
    assert sorted(model) == ["a", "b"]


def test_random_streams_are_never_tied_by_their_arrays() -> None:
    rngs = nnx.Rngs(params=0, dropout=0)
    rngs.dropout.key = nnx.RngKey(rngs.params.key.get_value(), tag="dropout")
    assert tied.tie(nnx.Dict(rngs=rngs)).made == ()


def test_untie_gives_back_what_was_there() -> None:
    for kind in KINDS.values():
        model = kind.tied()
        plain = kind.apart()
        value = model.second.w[...]
        tied.untie(model, TARGET)
        assert type(model) is type(plain)
        assert type(model.second) is Part
        assert type(model.deep) is nnx.List
        assert type(model.second.w) is nnx.Param
        assert model.second.w.get_metadata() == plain.second.w.get_metadata()
        close(model.second.w[...], value)
        assert tied.ties(model).groups == ()
        assert nnx.graphdef(nnx.clone(model)) == nnx.graphdef(nnx.clone(plain))
        model.first.w[...] = model.first.w[...] + 1
        close(model.second.w[...], value)


def test_untie_of_one_leaves_the_others() -> None:
    model = KINDS["transpose"].tied()
    tied.tie(model, "deep.1.second.b", "first.b")
    tied.untie(model, TARGET)
    model.first.b[...] = jnp.full(2, 9.0)
    close(model.second.b[...], 9)
    tied.tie(model, TARGET, SOURCE, tied.transpose)
    tied.untie(model, "deep.1.second.b")
    holds(model, KINDS["transpose"])


def test_untie_of_ties_that_do_not_last() -> None:
    model = Shared()
    for name in ("b.b", "b.w", "d.0.w"):
        tied.untie(model, name)
    with pytest.raises(tied.TieError) as caught:
        tied.untie(model, "b.w")
    assert str(caught.value) == "b.w is not tied"
    with pytest.raises(tied.TieError) as caught:
        tied.untie(model, "a.w")
    assert str(caught.value) == (
        "a.w belongs to a module that stands at several places\n  places  a, again\n"
        "  Put a copy in one of them: nnx.clone of a"
    )
    with pytest.raises(tied.TieError) as caught:
        tied.untie(model, "b")
    assert str(caught.value) == "b is no variable but a Part"
    close(model.d[0].w[...], model.a.w[...].T)
    tied_model = KINDS["transpose"].tied()
    with pytest.raises(tied.TieError) as caught:
        tied.untie(tied_model, SOURCE)
    assert str(caught.value) == (
        "first.w is the source of other variables and can't be untied from them\n"
        f"  computed  {TARGET}\n"
        f'  Untie those: tied.untie(model, "{TARGET}")'
    )


def test_untie_of_a_whole_module() -> None:
    model = nnx.Dict(a=Part(numbers(2, 2)))
    model.b = model.a
    tied.tie(model)
    assert model.b is model.a
    with pytest.raises(tied.TieError, match="several places"):
        tied.untie(model, "b.w")
    tied.untie(model, "b")
    assert type(model) is nnx.Dict
    assert model.b is not model.a
    model.a.w[...] = model.a.w[...] * 0
    close(model.b.w[...], numbers(2, 2))


# ------------------------------------------------------------------------------------- filters


def test_nnx_by_itself_knows_a_variable_by_its_first_name() -> None:
    """M8: `nnx.state(m, PathContains("head"))` is empty where the head shares its only variable."""
    model = nnx.Dict(embed=Part(numbers(2, 2)), head=Part(numbers(2, 2)))
    model.head.w = model.embed.w
    with nnx.set_graph_mode(True):
        found = nnx.state(model, nnx.PathContains("head"))
        assert [path for path, _ in nnx.to_flat_state(found)] == [("head", "b")]
        by_any = nnx.state(model, tied.nnx.alias(model, nnx.PathContains("head")))
    assert [path for path, _ in nnx.to_flat_state(by_any)] == [("embed", "w"), ("head", "b")]


@pytest.mark.parametrize("kind", KINDS)
def test_alias_takes_a_source_by_the_name_of_its_target(kind: str) -> None:
    model = KINDS[kind].tied()
    for filter in (nnx.PathContains("second"), nnx.Any(nnx.PathContains("second")),
                   lambda path, value: path[:3] == ("deep", 1, "second")):  # fmt: skip
        found = nnx.state(model, tied.nnx.alias(model, filter))
        names = [path for path, _ in nnx.to_flat_state(found)]
        assert names == [("deep", 1, "second", "b"), ("first", "w")]
    one, other = (tied.nnx.alias(model, nnx.PathContains("second")) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    everything = tied.nnx.alias(model, nnx.Param)
    assert len(jax.tree.leaves(nnx.state(model, everything))) == 5
    graphdef, head, rest = nnx.split(model, one, ...)
    holds(nnx.merge(graphdef, head, rest), KINDS[kind])


def test_alias_says_what_an_optimizer_and_a_gradient_are_of() -> None:
    model = KINDS["transpose"].tied()
    wrt = tied.nnx.alias(model, nnx.PathContains("second"))
    before = nnx.clone(model)
    if nnx.set_graph_updates.current_value():
        grads = nnx.grad(lambda m: m(1.0), argnums=nnx.DiffState(0, wrt))(model)
    else:
        grads = nnx.filter_state(state_of(nnx.grad(lambda m: m(1.0))(model)), wrt)
    assert [path for path, _ in nnx.to_flat_state(grads)] == [
        ("deep", 1, "second", "b"), ("first", "w")]  # fmt: skip
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)
    optimizer.update(model, grads)
    close(model.first.b[...], before.first.b[...])
    assert float(jnp.abs(model.first.w[...] - before.first.w[...]).max()) > 0.01
    holds(model, KINDS["transpose"])


def stacked() -> Any:
    model = nnx.Dict(
        embed=nnx.Param(numbers(4, 3, 2)),
        head=nnx.Param(numbers(4, 3, 2)),
        bias=nnx.Param(numbers(2)),
    )
    tied.tie(model, "head", "embed")
    return model


def test_nnx_by_itself_takes_the_axis_of_the_first_name() -> None:
    """M8: an axis that is asked for by another name is ignored, and nobody is told."""
    model = nnx.Dict(embed=nnx.Param(numbers(4, 3)), bias=nnx.Param(numbers(4)))
    model.head = model.embed
    axes = nnx.StateAxes({nnx.PathContains("embed"): None, nnx.PathContains("head"): 0, ...: 0})
    with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
        shape = nnx.vmap(lambda m: m.head[...] + m.bias[...], in_axes=(axes,))(model).shape
    assert shape != nnx.vmap(lambda h, b: h + b)(model.head[...], model.bias[...]).shape
    with pytest.raises(tied.TieError):
        tied.nnx.state_axes(model, {
            nnx.PathContains("embed"): None, nnx.PathContains("head"): 0, ...: 0})  # fmt: skip


def test_state_axes_asks_by_any_name() -> None:
    model = stacked()
    axes = tied.nnx.state_axes(model, {nnx.PathContains("head"): 0, ...: None})
    assert dict(axes.items()) == {
        nnx.filterlib.PathIn(("embed",), ("head",)): 0,
        nnx.filterlib.PathIn(("bias",)): None,
    }
    if nnx.set_graph_updates.current_value():
        found = nnx.vmap(lambda m: m.head[...] @ m.bias[...], in_axes=(axes,))(model)
        close(found, model.embed[...] @ model.bias[...])


def test_names_that_ask_for_different_axes_are_named() -> None:
    model = stacked()
    with pytest.raises(tied.TieError) as caught:
        tied.nnx.state_axes(model, {nnx.PathContains("head"): 0, nnx.Param: None})
    assert str(caught.value) == (
        "embed and head are one array and ask for different axes\n"
        "  embed  axis None\n"
        "  head   axis 0\n"
        "  Ask for the same axis by both names, or by one of them only"
    )
    assert caught.value.paths == ("embed", "head")
    axes = tied.nnx.state_axes(model, {nnx.PathContains("head"): -3, nnx.PathContains("embed"): 0})
    assert [axis for _, axis in axes.items()] == [0]
