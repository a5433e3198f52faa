"""`tied.tie` on modules of Flax NNX: what NNX and JAX do to one keeps its ties, in every mode."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
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
    loss,
    mode,
    numbers,
    state_of,
)

OPERATIONS: dict[str, Callable[[Net], Any]] = {}


@pytest.fixture(params=MODES, autouse=True)
def each_mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with mode(request.param):
        yield request.param


@pytest.fixture(params=range(4))
def kind_in_turn(request: pytest.FixtureRequest, each_mode: str) -> str:
    """Each kind in one mode at least, for time."""
    return list(KINDS)[(3 * request.param + MODES.index(each_mode)) % len(KINDS)]


def operation(f: Callable[[Net], Any]) -> Callable[[Net], Any]:
    OPERATIONS[f.__name__] = f
    return f


@pytest.mark.parametrize("name", KINDS)
def test_a_tie_says_what_it_did_and_leaves_one_variable(name: str) -> None:
    kind = KINDS[name]
    model = kind.apart()
    made = tied.tie(model, TARGET, SOURCE, kind.view)
    text = f"is {kind.words}" if "computed" in kind.words else f"= {kind.words}"
    assert str(made) == f"tied   {TARGET} {text}"
    holds(model, kind)
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert model.second is model.second


@operation
def split_and_merge(m: Net) -> Any:
    return nnx.merge(*nnx.split(m))


@operation
def split_by_type(m: Net) -> Any:
    return nnx.merge(*nnx.split(m, nnx.Param, ...))


@operation
def clone(m: Net) -> Any:
    return nnx.clone(m)


@operation
def deepcopy(m: Net) -> Any:
    return copy.deepcopy(m)


@operation
def shallow_copy(m: Net) -> Any:
    return copy.copy(m)


@operation
def update(m: Net) -> None:
    nnx.update(m, jax.tree.map(lambda x: x * 2, nnx.state(m)))


@operation
def jit_in_place(m: Net) -> None:
    def grow(m: Any) -> None:
        m.first.w[...] = m.first.w[...] * 2

    nnx.jit(grow)(m)
    close(m.first.w[...] / 2, numbers(*m.first.w.shape))


@operation
def jit_that_returns_another(m: Net) -> Any:
    return nnx.jit(lambda: nnx.clone(m))()


@operation
def jax_jit(m: Net) -> Any:
    return jax.jit(lambda m: jax.tree.map(lambda x: x * 2, m))(m)


@operation
def tree_map(m: Net) -> Any:
    return jax.tree.map(lambda x: x + 1, m)


@operation
def device_put(m: Net) -> Any:
    return jax.device_put(m, jax.devices()[1])


@operation
def remat(m: Net) -> None:
    close(nnx.remat(loss)(m), nnx.clone(m)(1.0))


@operation
def cond(m: Net) -> None:
    close(nnx.cond(True, lambda m: m(1.0), lambda m: jnp.zeros(()), m), nnx.clone(m)(1.0))


@operation
def scan_over_data(m: Net) -> None:
    def step(m: Any, x: Any) -> Any:
        return m, m(x)

    xs = jnp.arange(3.0)
    wanted = [nnx.clone(m)(x) for x in xs]
    if nnx.set_graph_updates.current_value():
        _, found = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(m, xs)
    else:
        found = nnx.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0)(m, xs)
    close(found, jnp.stack(wanted))


@operation
def train_and_eval(m: Net) -> Any:
    m.train()
    m.eval()
    return m


@operation
def cast(m: Net) -> Any:
    return tied.f32(tied.bf16(m))


@operation
def tied_copy(m: Net) -> Any:
    return tied.copy(m)


@operation
def tied_map(m: Net) -> Any:
    return tied.map(lambda x: x + 1, m)


@operation
def tied_split(m: Net) -> Any:
    skeleton, storages = tied.split(m)
    assert list(storages) == ["first.w", "first.b", "deep.0.w", "deep.0.b", "deep.1.second.b",
                              "calls"]  # fmt: skip
    again, _ = tied.split(copy.copy(m))
    assert skeleton == again
    assert hash(skeleton) == hash(again)
    return skeleton.merge(storages)


@operation
def bundle(m: Net) -> Any:
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: 2 * x, b))(tied.Bundle(m))
    return doubled.model


@operation
def device(m: Net) -> Any:
    return tied.to(m, "cpu:1")


TURNS = [(name, kind) for n, name in enumerate(OPERATIONS) for k, kind in enumerate(KINDS)
         if (n + k) % 3 == 0]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), TURNS)  # kinds take turns, for time
def test_an_operation_keeps_the_tie(name: str, kind: str) -> None:
    model = KINDS[kind].tied()
    before = tied.ties(model)
    after = OPERATIONS[name](model)
    holds(model if after is None else after, KINDS[kind])
    tied.check(model if after is None else after, before)
    holds(model, KINDS[kind])


@pytest.mark.parametrize("kind", [name for name, k in KINDS.items() if "computed" not in k.words])
def test_a_layout_pickles_whatever_function_it_was_given_as(kind: str) -> None:
    model = pickle.loads(pickle.dumps(KINDS[kind].tied()))
    holds(model, KINDS[kind])


def softened(w: Any) -> Any:
    return jnp.tanh(w)


def test_a_function_pickles_by_its_name_or_says_that_it_can_not() -> None:
    kind = Kind((3, 2), softened, "computed from first.w")
    holds(pickle.loads(pickle.dumps(kind.tied())), kind)
    with pytest.raises(tied.TieError) as caught:
        pickle.dumps(KINDS["computed"].tied())
    assert str(caught.value) == (
        "a model with a tie that computes can't be pickled, as its function can't\n"
        "  function  <lambda>\n"
        "  Define it in a module, by name, in place of a lambda or a local function"
    )


def test_gradients_are_those_of_the_hand_written_function(kind_in_turn: str) -> None:
    kind, k = kind_in_turn, KINDS[kind_in_turn]
    model = k.tied()
    w = model.first.w[...]
    value, wanted = jax.jit(jax.value_and_grad(lambda w: by_hand(k, w)))(w)
    seen, found = nnx.jit(nnx.value_and_grad(nnx.remat(loss)))(model)
    found = state_of(found, nnx.Param)
    close(seen, value)
    close(found["first"]["w"][...], wanted)
    assert "w" not in found["deep"][1]["second"]
    close(jax.jit(jax.grad(loss))(model).first.w[...], wanted)
    if kind == "transpose":
        close(state_of(nnx.grad(loss)(model))["first"]["w"][...], wanted)


OPTIMIZERS = {"sgd": optax.sgd(0.01), "adam": optax.adam(0.01), "adamw": optax.adamw(0.01)}


def test_five_steps_are_those_of_a_network_with_one_array(kind_in_turn: str) -> None:
    kind = kind_in_turn
    k, tx = KINDS[kind], list(OPTIMIZERS.values())[list(KINDS).index(kind) % 3]
    model = k.tied()
    twin = {"w": model.first.w[...], "b": jnp.ones(2), "c": jnp.ones(2)}

    def of_twin(twin: Any) -> Any:
        def part(w: Any, b: Any, x: Any) -> Any:
            return jnp.sum(x * jnp.sin(w * (1 + numbers(*w.shape, start=7)))) + jnp.sum(b) * x

        return part(twin["w"], twin["b"], 1.0) + part(k.read(twin["w"]), twin["c"], 2.0) ** 2

    state = tx.init(twin)
    trained = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(lambda model, trained: trained.update(model, nnx.grad(loss)(model)))
    by_itself = jax.jit(lambda twin, state: tx.update(jax.grad(of_twin)(twin), state, twin))
    for _ in range(5):
        updates, state = by_itself(twin, state)
        twin = optax.apply_updates(twin, updates)
        step(model, trained)
    close(model.first.w[...], twin["w"])
    close(model.second.b[...], twin["c"])
    assert float(jnp.abs(twin["w"] - numbers(*k.shape)).max()) > 0.01
    holds(model, k)


@pytest.mark.parametrize("kind", ["transpose", "computed"])
def test_orbax_saves_each_storage_once(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind].tied()
    model.first.w[...] = model.first.w[...] * 3
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.state(model))
        checkpointer.wait_until_finished()
        other = KINDS[kind].tied()
        nnx.update(other, checkpointer.restore(tmp_path / "saved", nnx.state(other)))
    close(other.first.w[...], model.first.w[...])
    holds(other, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_values_is_tied(kind: str) -> None:
    made = nnx.eval_shape(KINDS[kind].tied)
    seen = made.second.w.get_value()
    assert isinstance(seen, jax.ShapeDtypeStruct)
    assert seen.shape == KINDS[kind].read(numbers(*KINDS[kind].shape)).shape
    graphdef, state = nnx.split(made)
    values = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)
    holds(nnx.merge(graphdef, values), KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_are_tied_alike_are_equal_and_compile_once(kind: str) -> None:
    one, other = KINDS[kind].tied(), KINDS[kind].tied()
    assert nnx.graphdef(one) == nnx.graphdef(other)
    assert hash(nnx.graphdef(one)) == hash(nnx.graphdef(other))
    traced: list[None] = []

    @nnx.jit
    def run(m: Any) -> Any:
        traced.append(None)
        return m(1.0)

    assert float(run(one)) == float(run(other))
    assert len(traced) == 1


def test_lambdas_made_anew_in_a_constructor_are_one_view() -> None:
    def make(scale: float) -> Any:
        model = Kind((3,), None, "").apart()
        tied.tie(model, TARGET, SOURCE, lambda v: v * scale)
        return nnx.graphdef(model)

    assert make(2.0) == make(2.0)
    assert make(2.0) != make(3.0)


def test_a_tie_is_made_in_a_constructor() -> None:
    class Ours(Net):
        def __init__(self) -> None:
            super().__init__(numbers(3, 2), numbers(2, 3))
            tied.tie(self, TARGET, SOURCE, tied.transpose)

    model = Ours()
    holds(model, KINDS["transpose"])
    holds(nnx.clone(model), KINDS["transpose"])
    again = type(model)()
    assert isinstance(again, Ours)
    holds(again, KINDS["transpose"])


def test_watch_and_compare_see_ties_of_nnx() -> None:
    model = KINDS["transpose"].tied()
    with tied.watch(model, strict=True):
        model(1.0)
    free = KINDS["transpose"].apart()
    assert str(tied.compare(model, free)) == f"lost   {TARGET} = {SOURCE}.T"
    with pytest.raises(tied.UntiedError), tied.watch(model, strict=True):
        tied.untie(model, TARGET)
