"""JAX and Equinox: the kinds of report of the field, each as tied handles it.

`J3` and the like are the numbers of the project's list of field reports; where the sentence names
a repository, the report is public there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tied


def matrix() -> jax.Array:
    return jnp.arange(6.0).reshape(2, 3)


def once(x: Any) -> Any:
    return x * 2


def same_array() -> Any:
    w = matrix()
    return {"a": w, "b": {"c": w}}


def transposed() -> Any:
    w = matrix()
    return {"a": w, "b": {"c": tied.transpose(w)}}


MODELS: dict[str, Callable[[], Any]] = {"same_array": same_array, "transpose": transposed}
GROUPS = (("a", "b.c"),)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


# ------------------------------------------------------------------------------------- JAX core


def test_J1_identity_inside_jit_is_what_it_was_outside() -> None:
    """jax#1503: tracing never preserves identity; a Bundle does."""
    x = matrix()
    inside = []
    jax.jit(lambda b: inside.append(b.model["a"] is b.model["b"]["c"]))(tied.Bundle(same_array()))
    jax.jit(lambda a, b: inside.append(a is b))(x, x)
    assert inside == [True, False]


class Parent(eqx.Module):
    left: Any
    right: Any


def test_J2_a_module_held_twice_comes_back_from_jit_as_one() -> None:
    """jax#7919: `jit(lambda p: p)(p).left is .right` was False."""
    child = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    bundle = jax.jit(lambda b: b)(tied.Bundle(Parent(child, child)))
    assert bundle.model.left is bundle.model.right
    assert len(jax.tree.leaves(bundle)) == 2


def donating() -> Any:
    return jax.jit(lambda m: jax.tree.map(once, m), donate_argnums=0)


def test_J3_a_tied_model_can_be_donated(model: Any) -> None:
    """jax#9635, liesel#272: the same array donated twice hung, and is an error now."""
    with pytest.raises((ValueError, RuntimeError), match="donate the same buffer twice"):
        donating()(same_array())
    bundle = tied.Bundle(model)
    after = donating()(bundle)
    assert all(x.is_deleted() for x in bundle.storages.values())
    np.testing.assert_array_equal(after["a"], 2 * np.arange(6.0).reshape(2, 3))


def test_J4_J22_what_shares_memory_with_a_donated_model_can_be_found_before() -> None:
    """jax#12627, equinox#1061: a donated and a kept input are one array somewhere in a tree."""
    model = {"layers": [matrix(), jnp.ones(2)]}
    inference = {"layers": [model["layers"][0], jnp.zeros(2)]}
    assert tied.shares(model, inference)
    report = tied.ties({"donated": model, "kept": inference})
    assert report.groups == (("donated.layers.0", "kept.layers.0"),)
    safe = tied.copy(inference)
    assert not tied.shares(model, safe)
    donating()(model)
    assert safe["layers"][0].sum() == 15


@pytest.mark.parametrize("size", [3, 100, 100_000])
def test_J6_a_move_from_numpy_never_aliases(size: int) -> None:
    """jax#37830: device_put aliases a writable NumPy array above some size.

    JAX's own copy is asynchronous too, so that a write soon after it can be seen.
    """
    for _ in range(20):
        w = np.ones(size, np.float32)
        model = tied.to({"w": w, "v": w[::2]}, "jax")
        w[:] = 7
        assert float(model["w"].max()) == float(jnp.max(model["v"].read())) == 1
    back = tied.to(model, "numpy")
    back["w"][:] = 5
    assert float(model["w"].max()) == 1
    assert back["v"].max() == 5


def test_J7_a_view_or_a_copy_is_a_question_with_an_answer() -> None:
    """jax#11585: no `.base`; a JAX array is never a view of another, a `View` is one."""
    w = matrix()
    assert not tied.shares(w, w.T)
    assert not tied.shares(w, w[::-1])
    assert tied.shares(w, tied.transpose(w))
    assert tied.shares(w, tied.view(w, lambda a: a[::-1]))
    assert tied.transpose(w).base is w


def test_J9_vmap_over_one_storage_with_two_axes_is_refused() -> None:
    """jax#29433: one thing mapped with axes 0 and 1 gave an answer that depended on order."""
    w = jnp.ones((2, 2))
    with pytest.raises(tied.TieError, match="vmap and scan can't map over a bare View"):
        jax.vmap(lambda a, b: a.sum() + b.sum(), in_axes=(0, 0))(w.T, tied.transpose(w))


def test_J10_a_tied_array_is_one_argument_of_the_compiled_function(model: Any) -> None:
    """jax#30180, #873, #5308: one constant at several places was copied for each use."""
    bundle = tied.Bundle(model)
    jaxpr = jax.make_jaxpr(lambda b: b["a"].sum() + b["b"]["c"].sum())(bundle)
    assert len(jaxpr.jaxpr.invars) == 1
    compiled = jax.jit(lambda b: jax.tree.map(once, b)).lower(bundle).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 24


def test_J11_a_copy_of_a_jax_array_is_a_jax_array(model: Any) -> None:
    """jax#2632: deepcopy produced a NumPy array."""
    after = tied.copy(model)
    assert isinstance(after["a"], jax.Array)
    assert type(after["b"]["c"]) is type(model["b"]["c"])
    assert tied.ties(after).groups == GROUPS
    assert isinstance(tied.copy(matrix()), jax.Array)


def test_J13_what_comes_back_from_a_pickle_can_be_donated(model: Any) -> None:
    """spd#932: restored arrays were silently not donatable."""
    skeleton, storages = pickle.loads(pickle.dumps(tied.split(model)))
    donating()(storages)
    assert all(x.is_deleted() for x in storages.values())
    assert tied.ties(skeleton.merge(tied.split(model)[1])).groups == GROUPS


def test_M1_what_jax_itself_loses_is_kept(model: Any) -> None:
    """jax.tree.map, jit and device_put make two buffers of a tie."""
    lost = jax.tree.map(once, same_array())
    assert tied.ties(lost).groups == ()
    assert tied.ties(jax.device_put(same_array(), jax.devices()[1])).groups == ()
    assert tied.ties(tied.map(once, model)).groups == GROUPS
    assert tied.ties(tied.to(model, "cpu:1")).groups == GROUPS


# ------------------------------------------------------------------------------------- Equinox


class Half(eqx.Module):
    weight: Any
    scale: float = eqx.field(static=True, default=2.0)

    def __call__(self, x: Any) -> Any:
        return self.scale * (self.weight @ x)


class Mother(eqx.Module):
    one: Half
    other: Half

    def __call__(self, x: Any) -> Any:
        return self.other(self.one(x))


def mother() -> Mother:
    w = jnp.ones((2, 2))
    return Mother(Half(w), Half(w))


def trained(model: Any, steps: int = 3) -> Any:
    skeleton, storages = tied.split(model)
    optimizer = optax.adam(0.1)
    state = optimizer.init(storages)

    @jax.jit
    def step(storages: Any, state: Any) -> Any:
        grads = jax.grad(lambda s: (skeleton.merge(s)(jnp.ones(2)) ** 2).sum())(storages)
        updates, state = optimizer.update(grads, state, storages)
        return optax.apply_updates(storages, updates), state

    for _ in range(steps):
        storages, state = step(storages, state)
    return skeleton.merge(storages), state


def test_J14_J44_one_parameter_in_two_modules_stays_one_when_it_is_trained() -> None:
    """equinox#258, jaxnet#8: it diverges as soon as it is optimised."""
    after, state = trained(mother())
    assert after.one.weight is after.other.weight
    assert not jnp.array_equal(after.one.weight, jnp.ones((2, 2)))
    assert len(jax.tree.leaves(state[0].mu)) == 1


def test_J15_a_module_passed_to_another_is_no_copy_even_through_a_function() -> None:
    """equinox#433: the captured module was a copy."""
    half = Half(matrix())
    model = {"half": half, "apply": lambda x: half(x)}
    after = tied.map(once, model)
    captured = after["apply"].__closure__[0].cell_contents
    assert captured is after["half"]
    np.testing.assert_array_equal(after["apply"](jnp.ones(3)), 2 * model["apply"](jnp.ones(3)))


def test_J16_one_gradient_and_one_memory_for_encoder_and_decoder() -> None:
    """equinox#469: copying values and summing gradients works and saves no memory."""
    bundle = tied.Bundle(mother())
    assert len(jax.tree.leaves(bundle)) == 1
    grads = jax.grad(lambda b: b(jnp.ones(2)).sum())(bundle)
    untied = jax.grad(lambda m: m(jnp.ones(2)).sum())(mother())
    total = untied.one.weight + untied.other.weight
    np.testing.assert_allclose(grads.storages["one.weight"], total)


class Stored(eqx.Module):
    weight: Any
    run: Any


def test_J18_a_method_that_is_stored_holds_no_second_copy_of_the_model() -> None:
    """equinox#536: `self.foo = self.bar` stored the model again in `foo.__self__`."""
    half = Half(matrix())
    model = Stored(half.weight, half.__call__)
    assert tied.ties(model).parameters == 6
    (group,) = tied.ties(model).groups
    assert len(group) == 2
    after = tied.map(once, model)
    assert tied.ties(after).groups == (group,)
    np.testing.assert_array_equal(after.run(jnp.ones(3)), 2 * half(jnp.ones(3)))


def test_J19_each_storage_crosses_into_jit_once() -> None:
    """equinox#598: the shared array crossed again and again."""
    w = jnp.ones((2, 2))
    model = Parent(tuple(Half(w) for _ in range(20)), Half(tied.transpose(w)))
    bundle = tied.Bundle(model)
    traced = jax.jit(lambda b: sum(h(jnp.ones(2)) for h in (*b.left, b.right))).trace(bundle)
    assert len(traced.jaxpr.in_avals) == 1


def test_J21_two_places_of_one_container_are_no_tie_of_leaves() -> None:
    """equinox#877: tree_check had false positives on [x, x] of containers."""
    settings = {"size": 3}
    assert tied.ties([settings, settings, []]).groups == ()
    box = [matrix()]
    assert tied.ties([box, box]).groups == (("0.0", "1.0"),)
    after = tied.map(once, [box, box, settings])
    assert after[0] is after[1]
    assert after[2] is settings


class Weighted:
    """A user's wrapper that promises to read as an array."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight


def test_J23_J24_J25_a_conv_takes_a_view_as_its_weight() -> None:
    """equinox#488, #1014, flowjax#238: convs stopped accepting wrapped weights."""
    conv = eqx.nn.Conv1d(2, 3, 2, use_bias=False, key=jax.random.key(0))
    bank = jnp.ones((4, 2, 2))
    view = tied.view(bank, lambda a: a[:3])
    model = {"bank": bank, "conv": eqx.tree_at(lambda c: c.weight, conv, view)}
    plain = eqx.tree_at(lambda c: c.weight, conv, bank[:3])
    bundle = tied.Bundle(model)
    x = jnp.arange(10.0).reshape(2, 5)
    np.testing.assert_array_equal(bundle["conv"](x), plain(x))
    assert len(jax.tree.leaves(bundle)) == 1


def test_M7_tree_at_on_one_path_is_named_by_compare() -> None:
    """A change at one place unties silently; `check` names both."""
    before = mother()
    after = eqx.tree_at(lambda m: m.one.weight, before, jnp.zeros((2, 2)))
    with pytest.raises(tied.UntiedError) as caught:
        tied.check(after, before)
    assert caught.value.paths == ("one.weight", "other.weight")
