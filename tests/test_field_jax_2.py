"""JAX and Equinox: where another project's behaviour is the trap, ours is shown beside it.

The numbers are those of the project's list of field reports, as in test_field_jax.py; `M` numbers
are measurements of that list. In each test what others do comes first, then what `tied` does.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
import torch

import tied
from test_field_jax import MODELS, Half, Mother, donating, matrix, mother, once, same_array

# ------------------------------------------------------------------------------------- donation

TWICE = """\
a donated buffer stands at several places
  24 B  0.model.a, 0.model.b.c
  Donate a tied.Bundle, which holds it once, or copy the repeats: tied.check_donation(args, \
dedup=True)"""


def test_J3_J4_J41_M3_donation_names_paths_where_jax_counts_arguments() -> None:
    """jax#9635, liesel#272: "flattened argument 49 vs 30"."""
    args = ({"count": jnp.zeros(()), "model": same_array()},)
    with pytest.raises(Exception, match=r"flattened argument 2") as theirs:
        donating()(*args)
    assert "model" not in str(theirs.value)
    args = ({"count": jnp.zeros(()), "model": same_array()},)
    with pytest.raises(tied.TieError) as ours:
        tied.check_donation(args)
    assert str(ours.value) == TWICE
    assert ours.value.paths == ("0.model.a", "0.model.b.c")
    (safe,) = tied.check_donation(args, dedup=True)
    donating()(safe)


def test_J4_an_input_that_is_kept_and_one_that_is_donated_are_named() -> None:
    """jax#12627: it hung; today it is an error without a path."""
    update = jax.jit(lambda state, batch: state["x"] + batch["x"], donate_argnums=0)
    batch = {"x": matrix()}
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        update(batch, batch)
    assert "x" not in str(theirs.value).split()
    batch = {"x": matrix()}
    with pytest.raises(tied.TieError, match=r"0\.x, 1\.x"):
        tied.check_donation((batch, batch), donate=(0,))
    state, same = tied.check_donation((batch, batch), donate=(0,), dedup=True)
    assert same["x"] is not state["x"]
    assert float(update(state, same)[1, 2]) == 10


def test_J22_an_inference_copy_shares_its_arrays_with_what_is_donated() -> None:
    """equinox#1061: after `filter_jit(donate="all")` the copy is dead."""
    step = eqx.filter_jit(lambda m: jax.tree.map(once, m), donate="all")
    model = eqx.nn.Dropout(0.5), mother().one
    inference = eqx.nn.inference_mode(model)
    step(model)
    assert inference[1].weight.is_deleted()
    model = eqx.nn.Dropout(0.5), mother().one
    inference = eqx.nn.inference_mode(model)
    with pytest.raises(tied.TieError, match=r"0\.1\.weight, 1\.1\.weight"):
        tied.check_donation((model, inference), donate=(0,))
    model, inference = tied.check_donation((model, inference), donate=(0,), dedup=True)
    step(model)
    assert float(inference[1].weight.sum()) == 4


def restored(model: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "x", model)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "x", jax.eval_shape(lambda m: m, model))


BACK: dict[str, Callable[[tied.Bundle, Path], Any]] = {
    "orbax": restored,
    "pickle": lambda bundle, _: pickle.loads(pickle.dumps(bundle)),
    "numpy": lambda bundle, _: tied.to(tied.to(bundle, "numpy"), "jax"),
    "deepcopy": lambda bundle, _: copy.deepcopy(bundle),
    "copy": lambda bundle, _: tied.copy(bundle),
    "device": lambda bundle, _: tied.to(bundle, "cpu:3"),
}


@pytest.mark.parametrize("way", BACK)
@pytest.mark.parametrize("name", MODELS)
def test_J13_what_comes_back_is_donated_like_what_is_fresh(
    name: str, way: str, tmp_path: Path
) -> None:
    """spd#932, jax#18617: restored arrays silently kept their memory in the first step."""
    bundle = tied.Bundle(MODELS[name]())
    after = BACK[way](bundle, tmp_path)
    arrays = jax.tree.leaves(after)
    assert len(arrays) == 1
    out = donating()(after)
    assert arrays[0].is_deleted()
    assert out.storages["a"].unsafe_buffer_pointer()
    np.testing.assert_array_equal(out["a"], 2 * matrix())
    assert not bundle.storages["a"].is_deleted()


# ------------------------------------------------------------------------------------- JAX core


def test_J8_one_ref_at_two_places_goes_into_jit_once() -> None:
    """jax#25449: a Ref that is passed twice is refused; in a bundle it is one leaf."""
    ref = jax.new_ref(jnp.ones(3))
    with pytest.raises(ValueError, match="only one reference to a mutable array may be passed"):
        jax.jit(lambda m: m["a"][...] + m["b"][...])({"a": ref, "b": ref})

    def double(bundle: Any) -> None:
        bundle["a"][...] += bundle["b"][...]

    bundle = tied.Bundle({"a": ref, "b": ref})
    jax.jit(double)(bundle)
    assert ref[...].tolist() == [2.0, 2.0, 2.0]
    assert tied.ties(bundle).groups == (("a", "b"),)


def test_J9_M8_two_names_that_ask_for_two_axes_are_named() -> None:
    """jax#29433: the answer depended on the order."""
    bundle = jax.vmap(lambda a: tied.Bundle({"a": a, "b": {"c": tied.transpose(a)}}))(
        jnp.arange(24.0).reshape(4, 2, 3)
    )
    with pytest.raises(tied.TieError) as caught:
        bundle.axes({"a": 0, "b.*": None})
    assert str(caught.value) == (
        "two names of one storage ask for different axes\n  a    0\n  b.c  None\n"
        "  They are one array: ask the same of both, or only of one"
    )
    for wanted in ({"a": 0}, {"b.c": 0}, {"*": 0}):
        mapped = jax.vmap(lambda b: b["a"] @ b["b"]["c"], in_axes=(bundle.axes(wanted),))(bundle)
        w = bundle.storages["a"]
        np.testing.assert_array_equal(mapped, w @ w.swapaxes(1, 2))


def test_J10_a_model_that_is_closed_over_is_one_constant() -> None:
    """jax#30180: 64 MB times 160 uses; a tie that was lost is a second constant."""
    lost = jax.tree.map(lambda a: a + 0, same_array())
    bundle = tied.Bundle(MODELS["transpose"]())
    x, y = jnp.ones((4, 2)), jnp.ones((3, 4))
    theirs = jax.make_jaxpr(lambda: (x @ lost["a"], lost["b"]["c"] @ y))()
    ours = jax.make_jaxpr(lambda: (x @ bundle["a"], y.T @ bundle["b"]["c"]))()
    shapes = [[c.shape for c in jaxpr.consts].count((2, 3)) for jaxpr in (theirs, ours)]
    assert shapes == [2, 1]


def test_M4_a_tie_is_one_argument_and_one_result() -> None:
    model = same_array()
    compiled = [
        jax.jit(lambda m: jax.tree.map(once, m)).lower(m).compile().memory_analysis()
        for m in (model, tied.Bundle(model))
    ]
    assert [m.argument_size_in_bytes for m in compiled] == [48, 24]
    theirs, ours = (m.output_size_in_bytes for m in compiled)
    assert ours == 24 < theirs


@pytest.mark.parametrize("name", MODELS)
def test_M5_deepcopy_and_pickle_keep_what_a_view_reads(name: str) -> None:
    """They keep one array at two places; `W.T` is a new array at once, a `View` is not."""
    lost = copy.deepcopy({"a": (w := matrix()), "b": {"c": w.T}})
    assert tied.ties(lost).groups == ()
    for after in (copy.deepcopy(MODELS[name]()), pickle.loads(pickle.dumps(MODELS[name]()))):
        assert tied.ties(after).groups == (("a", "b.c"),)


SAME: dict[str, Callable[[Any], Any]] = {
    "all of it": lambda w: w[:],
    "same dtype": lambda w: w.astype(w.dtype),
    "asarray": jnp.asarray,
}
OTHER: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(3, 2),
    "copy": jnp.copy,
}


def test_M5_what_is_the_same_object_is_a_tie_and_what_looks_like_a_view_is_none() -> None:
    w = matrix()
    for same in SAME.values():
        assert tied.ties({"a": w, "b": same(w)}).groups == (("a", "b"),)
    for other in OTHER.values():
        assert tied.ties({"a": w, "b": other(w)}).groups == ()


def parts(model: Any) -> Any:
    return (model["a"] ** 2).sum() + 3 * model["b"]["c"].sum()


def test_M2_the_gradient_of_a_tie_is_the_sum_and_adam_has_its_moments_once() -> None:
    model, w = same_array(), matrix()
    grads = jax.grad(parts)(model)
    np.testing.assert_array_equal(grads["a"], 2 * w)
    np.testing.assert_array_equal(grads["b"]["c"], jnp.full((2, 3), 3))
    optimizer = optax.adam(0.1)
    assert len(jax.tree.leaves(optimizer.init(model))) == 5
    after = optax.apply_updates(model, optimizer.update(grads, optimizer.init(model))[0])
    assert not np.allclose(after["a"], after["b"]["c"])
    for name in MODELS:
        bundle = tied.Bundle(MODELS[name]())
        total = jax.grad(parts)(bundle)
        np.testing.assert_array_equal(total.storages["a"], 2 * w + 3)
        state = optimizer.init(bundle)
        assert len(jax.tree.leaves(state)) == 3
        after = optax.apply_updates(bundle, optimizer.update(total, state)[0])
        np.testing.assert_allclose(after["a"], w - 0.1, rtol=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Parameterize:
    """As in paramax: a function of an array, applied when the model is unwrapped."""

    fn: Any = dataclasses.field(metadata={"static": True})
    array: Any


def unwrap(tree: Any) -> Any:
    wrapped = lambda x: isinstance(x, Parameterize)  # noqa: E731
    return jax.tree.map(lambda x: x.fn(x.array) if wrapped(x) else x, tree, is_leaf=wrapped)


def test_M10_a_wrapper_that_holds_its_own_copy_is_the_bug_of_the_thread() -> None:
    """Flux.jl#1504 in JAX: encoder and decoder get a gradient each, and part."""

    def loss(model: Any) -> Any:
        return 2 * model["enc"].sum() + 3 * model["dec"].sum()

    w = matrix()
    wrapped = {"enc": w, "dec": Parameterize(jnp.transpose, w)}
    assert len(jax.tree.leaves(wrapped)) == 2
    grads = jax.grad(lambda m: loss(unwrap(m)))(wrapped)
    assert [float(g[0, 0]) for g in jax.tree.leaves(grads)] == [3, 2]
    after = unwrap(jax.tree.map(lambda a, g: a - 0.1 * g, wrapped, grads))
    assert not np.allclose(after["enc"].T, after["dec"])

    bundle = tied.Bundle({"enc": w, "dec": tied.transpose(w)})
    grads = jax.grad(loss)(bundle)
    assert [float(g[0, 0]) for g in jax.tree.leaves(grads)] == [5]
    after = jax.tree.map(lambda a, g: a - 0.1 * g, bundle, grads)
    np.testing.assert_array_equal(after["enc"].T, after["dec"])
    np.testing.assert_allclose(after["enc"], w - 0.5)


def test_J49_a_transposed_tie_is_one_after_a_move_of_device() -> None:
    """pytorch/xla#2719: `decoder.weight.data = encoder.weight.data.t()`, then `.to(device)`."""
    coder = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    coder[1].weight.data = coder[0].weight.data.t()
    model = {"encoder": coder[0].weight.detach(), "decoder": coder[1].weight.detach()}
    there = tied.to(model, "jax")
    moved = jax.device_put(tied.Bundle(there), jax.devices()[4])
    assert tied.ties(moved).groups == (("encoder", "decoder"),)
    after = jax.tree.map(lambda a: a * 2, moved)
    np.testing.assert_array_equal(after["decoder"], 2 * coder[1].weight.detach().numpy())
    np.testing.assert_array_equal(after["encoder"].T, after["decoder"])


# ------------------------------------------------------------------------------------- Equinox


def train(model: Any, steps: int = 3) -> Any:
    optimizer = optax.adam(0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(steps):
        grads = eqx.filter_grad(lambda m: (m(jnp.arange(2.0)) ** 2).sum())(model)
        updates, state = optimizer.update(grads, state, model)
        model = eqx.apply_updates(model, updates)
    return model


def test_J14_J16_a_finished_module_is_tied_afterwards_and_stays_so() -> None:
    """equinox#258, #469: one parameter given to two layers parts at the first step."""
    lost = train(Mother(*(eqx.tree_at(lambda h: h.weight, half, half.weight * 1)
                          for half in (mother().one, mother().other))))  # fmt: skip
    assert not np.allclose(lost.one.weight, lost.other.weight)
    assert not np.allclose(*(getattr(train(mother()), n).weight for n in ("one", "other")))
    finished = Mother(Half(jnp.ones((2, 2))), Half(jnp.zeros((2, 2))))
    after = train(tied.tie(finished, "other.weight", "one.weight"))
    np.testing.assert_array_equal(after.one.weight, after.other.weight)
    assert len(jax.tree.leaves(after)) == 1
    assert float(finished.other.weight.sum()) == 0  # the argument is never changed


def test_J15_a_function_that_captured_a_module_sees_the_trained_one() -> None:
    """equinox#433: for JAX the function is no array, so it keeps the module of before."""
    half = Half(matrix())
    model = {"half": half, "apply": lambda x: half(x)}
    x = jnp.ones(3)
    lost = jax.tree.map(lambda a: a * 2 if eqx.is_array(a) else a, model)
    np.testing.assert_array_equal(lost["apply"](x), model["apply"](x))
    after = jax.tree.map(once, tied.Bundle(model))
    np.testing.assert_array_equal(after["apply"](x), 2 * model["apply"](x))
    np.testing.assert_array_equal(after["apply"](x), after["half"](x))


def shared() -> Any:
    model = mother()
    return eqx.nn.Shared(model, lambda m: m.other.weight, lambda m: m.one.weight)


def test_J17_M7_a_write_to_the_tied_place_is_no_longer_discarded() -> None:
    """`eqx.nn.Shared` takes the write and forgets it at the call."""
    new = jnp.arange(4.0).reshape(2, 2)
    discarded = eqx.tree_at(lambda s: s.pytree.other.weight, shared(), new)()
    assert float(discarded.other.weight.sum()) == 4
    one_only = eqx.tree_at(lambda m: m.other.weight, mother(), new)
    assert float(one_only.one.weight.sum()) == 4

    untied = Mother(Half(jnp.ones((2, 2))), Half(jnp.ones((2, 2))))
    bundle = tied.tie(untied, "other.weight", "one.weight", tied.transpose)
    after = bundle.set("other.weight", new)
    np.testing.assert_array_equal(after.other.weight, new)
    np.testing.assert_array_equal(after.one.weight, new.T)
    with pytest.raises(AttributeError, match=r'bundle\.set\("one\.weight", value\)'):
        eqx.tree_at(lambda m: m.other.weight, bundle, new)


def test_J17_M7_what_shared_cannot_do_a_bundle_can() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(shared())
    with pytest.raises(TypeError, match="SharedNode"):
        jax.jit(lambda s: s)(shared())
    bundle = tied.Bundle(mother())
    again = jax.jit(lambda b: b)(pickle.loads(pickle.dumps(bundle)))
    np.testing.assert_array_equal(again.one.weight, again.other.weight)
    assert again.other.weight.shape == (2, 2)


def serialised(tree: Any) -> int:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree)
    return len(file.getvalue())


def test_M7_a_module_tied_by_reference_is_written_twice_and_read_untied() -> None:
    size = serialised(jnp.ones((2, 2)))
    assert serialised(mother()) == 2 * size
    assert serialised(tied.Bundle(mother())) == size
    assert eqx.tree_check(mother()) is None  # it looks at modules, and never at arrays


def test_J18_a_stored_method_is_trained_with_its_module() -> None:
    """equinox#536: the module is stored again in `run.__self__`, and only there it is trained."""
    half = Half(jnp.ones((2, 2)))
    model = {"weight": half.weight, "run": half.__call__}
    assert len(jax.tree.leaves(model)) == 2
    bundle = tied.Bundle(model)
    grads = jax.grad(lambda b: b["run"](jnp.ones(2)).sum())(bundle)
    after = jax.tree.map(lambda a, g: a - 0.1 * g, bundle, grads)
    assert len(jax.tree.leaves(after)) == 1
    np.testing.assert_array_equal(after["weight"], after["run"].__self__.weight)


# ---------------------------------------------------------------------------------------- files


def test_M12_M16_each_storage_is_written_once() -> None:
    """safetensors.flax stores one array twice, gives two back, and writes into its argument."""
    w = matrix()
    model = {"a": w, "b": w}
    twice = safetensors.flax.save(dict(model))
    assert len(safetensors.flax.load(twice)) == 2
    bundle = tied.Bundle(model)
    written = safetensors.flax.save(bundle.storages)
    assert list(safetensors.flax.load(written)) == ["a"]
    assert len(written) < len(twice)
    back = bundle.skeleton.merge(safetensors.flax.load(written))
    assert back["a"] is back["b"]
    np.testing.assert_array_equal(back["b"], w)
    assert bundle.storages["a"] is w
