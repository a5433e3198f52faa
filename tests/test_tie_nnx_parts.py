"""Parts of a tied NNX model: what is read, written, handed over to a transform, or taken out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tied
from nnx_tied import (
    KINDS,
    MODES,
    SOURCE,
    TARGET,
    Kind,
    Net,
    by_hand,
    close,
    holds,
    mode,
    numbers,
    state_of,
)

WRITABLE = [name for name, kind in KINDS.items() if kind.writable]
READ_ONLY = [name for name in KINDS if name not in WRITABLE]


@pytest.fixture(params=MODES, autouse=True)
def each_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with mode(request.param):
        yield


class Calls(Net):
    """A net whose `__call__` hands its second part to a transform."""

    run: Callable[..., Any] = staticmethod(lambda part, x: part(x))

    def __call__(self, x: Any) -> Any:
        return self.first(x) + self.run(self.second, 2 * x) ** 2


def call(part: Any, x: Any) -> Any:
    return part(x)


def deeper(parts: Any, x: Any) -> Any:
    return parts["second"](x)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "remat": lambda part, x: nnx.remat(call)(part, x),
    "jit": lambda part, x: nnx.jit(call)(part, x),
    "jit in jit": lambda part, x: nnx.jit(lambda part, x: nnx.jit(call)(part, x))(part, x),
    "vmap": lambda part, x: nnx.vmap(call, in_axes=(None, 0))(part, x[None])[0],
    "cond": lambda part, x: nnx.cond(True, call, lambda part, x: 0.0 * x, part, x),
    "jax.checkpoint": lambda part, x: jax.checkpoint(call)(part, x),
    "jax.jit": lambda part, x: jax.jit(call)(part, x),
    "clone": lambda part, x: nnx.clone(part)(x),
    "split and merge": lambda part, x: nnx.merge(*nnx.split(part))(x),
    "tree.map": lambda part, x: jax.tree.map(lambda leaf: leaf, part)(x),
}


def calling(kind: Kind, run: Callable[..., Any]) -> Calls:
    w = numbers(*kind.shape)
    model = Calls(w, jnp.array(kind.read(w), copy=True))
    tied.tie(model, TARGET, SOURCE, kind.view)
    object.__setattr__(model, "run", None)
    del model.__dict__["run"]
    type(model).run = staticmethod(run)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", ["same", "transpose", "computed"])
def test_gradients_of_a_part_that_is_handed_over_reach_the_source(kind: str, name: str) -> None:
    k = KINDS[kind]
    model = calling(k, TRANSFORMS[name])
    w = model.first.w[...]
    value, wanted = jax.jit(jax.value_and_grad(lambda w: by_hand(k, w)))(w)
    close(model(jnp.ones(())), value)
    found = state_of(nnx.jit(nnx.grad(lambda m: m(jnp.ones(()))))(model), nnx.Param)
    close(found["first"]["w"][...], wanted)
    assert "w" not in found["deep"][1]["second"]
    holds(model, k)


@pytest.mark.parametrize("kind", ["transpose", "computed"])
def test_a_part_takes_what_it_reads_along_as_a_variable_that_is_no_parameter(kind: str) -> None:
    model = KINDS[kind].tied()
    part = model.second
    state = nnx.state(part)
    assert type(state["w"]) is tied.nnx.Tied
    assert not isinstance(part.w, nnx.Param)
    assert list(nnx.state(part, nnx.Param)) == ["b"]
    close(state["w"][...], KINDS[kind].read(model.first.w[...]))
    for parts in (model.deep, nnx.clone(model.deep), jax.tree.map(lambda x: x, model.deep)):
        found = nnx.to_flat_state(nnx.state(parts, tied.nnx.Tied))
        assert [path for path, _ in found] == [(1, "second", "w")]
    grads = state_of(nnx.grad(lambda part: part(1.0))(part))
    assert list(nnx.filter_state(grads, nnx.Param)) == ["b"]


@pytest.mark.parametrize("kind", ["transpose", "computed"])
def test_what_a_part_changes_of_its_own_is_changed_in_the_model(kind: str) -> None:
    def grow(part: Any) -> None:
        part.b[...] = part.b[...] + 1

    model = KINDS[kind].tied()
    nnx.jit(grow)(model.second)
    nnx.jit(lambda parts: grow(parts[1]["second"]))(model.deep)
    close(model.second.b[...], 3)
    model.second.extra = nnx.BatchStat(jnp.ones(()))
    assert list(nnx.state(model, nnx.BatchStat)["deep"][1]["second"]) == ["extra"]
    del model.second.extra
    holds(model, KINDS[kind])


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_write_into_a_tied_variable_is_a_write_into_its_source(kind: str) -> None:
    k = KINDS[kind]
    model = k.tied()
    old = model.first.w[...]
    new = 10 + numbers(*model.second.w.shape)
    ways: list[Callable[[], Any]] = [
        lambda: model.second.w.set_value(new),
        lambda: model.second.w.__setitem__(..., new),
        lambda: setattr(model.second, "w", nnx.Param(new)),
        lambda: setattr(model.second, "w", new),
        lambda: nnx.update(model.second, {"w": new}),
        lambda: nnx.update(model.deep, {1: {"second": {"w": nnx.Param(new)}}}),
        lambda: nnx.jit(lambda m: m.second.w.set_value(new))(model),
    ]
    for write in ways:
        model.first.w[...] = old
        write()
        close(model.second.w[...], new)
        changed = jnp.zeros(k.shape, bool).at[...].set(model.first.w[...] != old)
        assert int(changed.sum()) == new.size
        holds(model, k)
    model.first.w[...] = old
    model.second.w[0] = 5 * new[0]
    close(model.second.w[0], 5 * new[0])
    close(model.second.w[1:], k.read(old)[1:])


@pytest.mark.parametrize("kind", READ_ONLY)
def test_what_can_not_be_written_says_so(kind: str) -> None:
    model = KINDS[kind].tied()
    value = model.second.w[...] + 1
    how = "reads elements more than once" if kind == "broadcast" else "is computed"
    before = model.first.w[...]
    for write in (
        lambda: model.second.w.set_value(value),
        lambda: setattr(model.second, "w", nnx.Param(value)),
        lambda: nnx.update(model.second, {"w": value}),
    ):
        with pytest.raises(tied.TieError) as caught:
            write()
        assert str(caught.value).splitlines()[0] == (
            f"{TARGET} can't be assigned: it {how} from first.w"
        )
        assert caught.value.paths == (SOURCE, TARGET)
    close(model.first.w[...], before)


def test_an_inverse_makes_a_computed_tie_writable() -> None:
    model = KINDS["computed"].apart()
    tied.tie(model, TARGET, SOURCE, lambda w: jnp.tanh(w).T, inverse=lambda v: jnp.arctanh(v.T))
    model.second.w[...] = jnp.full((2, 3), 0.5)
    close(model.first.w[...], jnp.full((3, 2), float(jnp.arctanh(0.5))))
    holds(nnx.clone(model), KINDS["computed"])


def test_a_function_of_several_sources() -> None:
    model = Net(numbers(3, 2), numbers(3, 2))
    model.scale = nnx.Param(jnp.full(2, 3.0))
    made = tied.tie(model, TARGET, [SOURCE, "scale"], lambda w, s: w * s)
    assert str(made) == f"tied   {TARGET} is computed from first.w, scale"
    grads = state_of(nnx.grad(lambda m: m.second.w[...].sum())(model))
    close(grads["first"]["w"][...], 3)
    close(grads["scale"][...], model.first.w[...].sum(0))
    with pytest.raises(tied.TieError, match="can't be assigned"):
        model.second.w = nnx.Param(numbers(3, 2))


def test_values_that_do_not_fit_are_refused() -> None:
    model = KINDS["transpose"].tied()
    for value, text in (
        (jnp.ones(4), "shape  (4,) where (2, 3) is"),
        ("text", "shape  str where (2, 3) is"),
    ):
        with pytest.raises(tied.TieError) as caught:
            model.second.w = value
        assert text in str(caught.value)
    with pytest.raises(tied.TieError) as caught:
        model.second.w = nnx.BatchStat(jnp.ones((2, 3)))
    assert str(caught.value).splitlines()[0] == (
        f"{TARGET} was a Param and can't become a BatchStat"
    )
    part = KINDS["rows"].tied()
    with pytest.raises(tied.TieError, match="a value does not fit"):
        nnx.update(part.second, {"w": jnp.ones((2, 2), "bfloat16")})


@pytest.mark.parametrize("change", [
    lambda part: nnx.update(part, {"w": jnp.ones((2, 3))}),
    lambda part: part.w.set_raw_value(jnp.ones((2, 3))),
    lambda part: part.w.set_value(jnp.ones((2, 3))),
    lambda part: part.w.__setitem__(0, 1.0),
    lambda part: setattr(part, "w", nnx.Param(jnp.ones((2, 3)))),
])  # fmt: skip
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_a_change_that_would_be_lost_is_refused(transform: Any, change: Any) -> None:
    model = KINDS["transpose"].tied()
    with pytest.raises(tied.TieError, match="in a part of a model that was handed over alone"):
        transform(change)(model.second)
    holds(model, KINDS["transpose"])


def test_the_part_itself_says_that_it_can_not_be_read_alone() -> None:
    model = KINDS["transpose"].apart()
    held = model.second
    tied.tie(model, TARGET, SOURCE, tied.transpose)
    with pytest.raises(tied.TieError) as caught:
        _ = held.w
    assert str(caught.value) == (
        "w of this Part is tied, and can't be read from it alone\n"
        f"  tie  {TARGET} = {SOURCE}.T\n"
        "  Reach it through the model, or hand over the whole model. Untie it first: "
        f'tied.untie(model, "{TARGET}")'
    )
    for use in (lambda: held(1.0), lambda: setattr(held, "w", 1), lambda: nnx.clone(held)(1.0)):
        with pytest.raises(tied.TieError, match="can't be read from it alone"):
            use()
    held.b[...] = jnp.zeros(2)
    close(model.second.b[...], 0)


@pytest.mark.parametrize("taken", [
    nnx.clone, copy.deepcopy, tied.copy, lambda part: pickle.loads(pickle.dumps(part)),
])  # fmt: skip
def test_a_part_that_is_copied_has_a_copy_of_what_it_read(taken: Any) -> None:
    model = KINDS["transpose"].tied()
    part = taken(model.second)
    close(part.w[...], model.first.w[...].T)
    wanted = part(1.0)
    model.first.w[...] = model.first.w[...] * 0
    close(part(1.0), wanted)
    assert list(nnx.state(part, nnx.Param)) == ["b"]
    holds(model, KINDS["transpose"])


def test_a_module_on_the_way_can_not_be_replaced_or_deleted() -> None:
    model = KINDS["transpose"].tied()
    before = tied.ties(model)
    for change in (
        lambda: setattr(model, "deep", nnx.List([])),
        lambda: model.deep.pop(),
        lambda: model.deep[1].__setitem__("second", nnx.Dict()),
        lambda: delattr(model, "deep"),
        lambda: delattr(model.second, "w"),
    ):
        with pytest.raises(tied.TieError, match=r"can't be (replaced|deleted)") as caught:
            change()
        assert TARGET in caught.value.paths
        tied.check(model, before)
        holds(model, KINDS["transpose"])
    model.deep = model.deep
    model.deep[1]["second"] = model.second
    holds(model, KINDS["transpose"])


def test_the_source_is_followed_by_its_name() -> None:
    model = KINDS["transpose"].tied()
    model.first = type(model.first)(5 * numbers(3, 2))
    close(model.second.w[...], 5 * numbers(3, 2).T)
    model.first.w = nnx.Param(7 * numbers(3, 2))
    holds(model, KINDS["transpose"])
    del model.first.w
    with pytest.raises(tied.TieError) as caught:
        _ = model.second.w[...]
    assert str(caught.value) == (
        f"{TARGET} is tied to {SOURCE}, which is no longer there\n"
        f"  tie  {TARGET} = {SOURCE}.T\n"
        f'  Untie it first: tied.untie(model, "{TARGET}")'
    )


def test_a_larger_source_is_followed_through_a_transpose_only() -> None:
    model = KINDS["transpose"].tied()
    model.first.w = nnx.Param(numbers(5, 2))
    close(model.second.w[...], numbers(5, 2).T)
    other = KINDS["rows"].tied()
    other.first.w = nnx.Param(numbers(6, 2))
    with pytest.raises(tied.TieError, match="it is not certain what"):
        _ = other.second.w[...]


def test_keys_of_a_dict_have_what_is_tied() -> None:
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)), parts=nnx.Dict(b=nnx.Param(jnp.ones(2)), c=1))
    tied.tie(model, "parts.b", "a")
    assert sorted(model["parts"]) == ["b", "c"]
    assert len(model["parts"]) == 2
    close(dict(model["parts"].items())["b"][...], model["a"][...])
    assert list(model) == ["a", "parts"]
    other = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)))
    tied.tie(other, "b", "a")
    assert sorted(other) == ["a", "b"]
    assert sorted(nnx.clone(other)) == ["a", "b"]


def test_a_state_with_a_value_for_what_is_tied_is_refused() -> None:
    model = KINDS["transpose"].tied()
    old = nnx.state(KINDS["transpose"].apart())
    with pytest.raises(tied.TieError) as caught:
        nnx.update(model, old)
    assert str(caught.value) == (
        f"a state holds {TARGET}, which is tied\n"
        f"  tie  {TARGET} = {SOURCE}.T\n"
        "  Leave it out of the state: the model computes it"
    )


def test_ties_within_a_part_stay_alive_in_it() -> None:
    """A part that knows ties of its own, and is led through by one of the whole model."""
    model = nnx.Dict(scale=nnx.Param(jnp.full(2, 2.0)), net=Net(numbers(3, 2), numbers(2, 3)))
    tied.tie(model, f"net.{TARGET}", f"net.{SOURCE}", tied.transpose)
    tied.tie(model, "net.deep.1.second.b", "scale")
    net = model["net"]
    close(net.second.b[...], 2)

    def both(net: Any) -> Any:
        return (net.first.w[...] + 2 * net.second.w[...].T).sum() + (3 * net.second.b[...]).sum()

    for run in (both, nnx.jit(both), nnx.remat(both), jax.jit(both)):
        grads = state_of(nnx.grad(lambda m, run=run: run(m["net"]))(model))
        close(grads["net"]["first"]["w"][...], 3)
        close(grads["scale"][...], 3)
    own = state_of(nnx.grad(both)(net))
    close(own["first"]["w"][...], 3)
    for copied in (nnx.clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied["net"].first.w[...] = jnp.ones((3, 2))
        close(copied["net"].second.w[...], 1)
        copied["scale"][...] = jnp.zeros(2)
        close(copied["net"].second.b[...], 0)
    pickled = pickle.loads(pickle.dumps(model["net"]))
    pickled.first.w[...] = jnp.zeros((3, 2))
    close(pickled.second.w[...], 0)
    close(pickled.second.b[...], 2)


def test_chains_are_read_to_their_end() -> None:
    model = nnx.Dict(
        parts=nnx.List([nnx.Param(numbers(3, 2)), nnx.Param(numbers(2, 3))]),
        table=nnx.Param(numbers(6, start=3)),
    )
    tied.tie(model, "parts.1", "parts.0", tied.transpose)
    tied.tie(model, "parts.0", "table", lambda w: w.reshape(3, 2))
    close(model["parts"][1][...], model["table"][...].reshape(3, 2).T)
    assert tied.ties(model).groups == (("table", "parts.0", "parts.1"),)
    model["parts"][1] = jnp.ones((2, 3))
    close(model["table"][...], 1)
    assert len(jax.tree.leaves(nnx.state(model))) == 1
    tied.untie(model, "parts.0")
    assert tied.ties(model).groups == (("parts.0", "parts.1"),)


@pytest.mark.parametrize("transform", [
    lambda f: nnx.jit(f), lambda f: lambda *args: nnx.cond(True, f, f, *args),
])  # fmt: skip
def test_what_went_into_a_transform_does_not_come_back_over_a_newer_source(transform: Any) -> None:
    """The source and the part that reads it are handed over apart; only the source is changed."""

    def change(first: Any, part: Any) -> None:
        first.w[...] = first.w[...] + part.w[...].sum()

    for kind in ("transpose", "computed"):
        model = KINDS[kind].tied()
        wanted = model.first.w[...] + model.second.w[...].sum()
        transform(change)(model.first, model.second)
        close(model.first.w[...], wanted)
        holds(model, KINDS[kind])


@pytest.mark.parametrize("kind", ["transpose", "computed"])
def test_loops_carry_a_part(kind: str) -> None:
    model = KINDS[kind].tied()
    total = 3 * model.second.w[...].sum()

    def add(_: Any, carry: Any) -> Any:
        part, x = carry
        return part, x + part.w[...].sum()

    close(nnx.fori_loop(0, 3, add, (model.second, jnp.zeros(())))[1], total)
    carry = nnx.while_loop(lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1), (model.second, 0))
    assert int(carry[1]) == 3
    holds(model, KINDS[kind])
