"""`tied.check_donation`: buffers, not objects, that stand at several places among arguments.

What it lets pass is then donated for real, and what it refuses is shown to fail in JAX, whose error
names no path (jax#9635, jax#12627, liesel#272).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tied

MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def matrix() -> jax.Array:
    return jnp.arange(6.0).reshape(2, 3)


def again(x: jax.Array) -> jax.Array:
    """Another object over the same buffer: a move to where it is."""
    other = jax.device_put(x, jax.devices()[0])
    assert other is not x
    assert other.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    return other


def donated(args: tuple[Any, ...], donate: tuple[int, ...]) -> Any:
    """Donates for real; every array that is donated is gone, the others are not."""
    step = jax.jit(lambda *args: jax.tree.map(lambda a: a + 1, args), donate_argnums=donate)
    out = jax.block_until_ready(step(*args))
    for number, arg in enumerate(args):
        for array in jax.tree.leaves(arg):
            assert array.is_deleted() == (number in donate)
    return out


def one_object() -> Any:
    w = matrix()
    return {"a": w, "b": {"c": w}}


def one_buffer() -> Any:
    w = matrix()
    return {"a": w, "b": {"c": again(w)}}


def one_sharded_buffer() -> Any:
    """Two arrays over the same eight buffers."""
    w = jax.device_put(jnp.arange(16.0), NamedSharding(MESH, P("x")))
    same = jax.make_array_from_single_device_arrays(
        w.shape, w.sharding, [shard.data for shard in w.addressable_shards]
    )
    return {"a": w, "b": {"c": same}}


def one_of_eight_buffers() -> Any:
    """A replicated array, and one that is its copy on a single device."""
    w = jax.device_put(jnp.arange(16.0), NamedSharding(MESH, P()))
    return {"a": w, "b": {"c": w.addressable_shards[3].data}}


MODELS: dict[str, Callable[[], Any]] = {
    "one_object": one_object,
    "one_buffer": one_buffer,
    "one_sharded_buffer": one_sharded_buffer,
    "one_of_eight_buffers": one_of_eight_buffers,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_buffer_at_two_places_is_refused_by_its_paths(name: str) -> None:
    model = MODELS[name]()
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation((model,))
    assert str(caught.value) == (
        "a donated buffer stands at several places\n"
        f"  {model['a'].nbytes} B  0.a, 0.b.c\n"
        "  Donate a tied.Bundle, which holds it once, or copy the repeats: "
        "tied.check_donation(args, dedup=True)"
    )
    assert caught.value.paths == ("0.a", "0.b.c")


@pytest.mark.parametrize("name", ["one_object", "one_buffer"])
def test_jax_refuses_the_same_without_a_path(name: str) -> None:
    """Of the sharded buffer the process dies: a segmentation fault in jaxlib 0.10.2."""
    step = jax.jit(lambda m: jax.tree.map(lambda a: a + 1, m), donate_argnums=0)
    with pytest.raises((ValueError, RuntimeError), match=r"donate the same buffer twice") as caught:
        step(MODELS[name]())
    assert "b.c" not in str(caught.value)
    assert "['c']" not in str(caught.value)


@pytest.mark.parametrize("name", ["one_object", "one_buffer", "one_sharded_buffer"])
def test_dedup_copies_the_repeats_and_nothing_else(name: str) -> None:
    model = MODELS[name]() | {"own": jnp.ones(2)}
    (after,) = tied.check_donation((model,), dedup=True)
    assert after["a"] is model["a"]
    assert after["own"] is model["own"]
    assert after["b"]["c"] is not model["b"]["c"]
    assert after["b"]["c"].sharding == model["b"]["c"].sharding
    assert (
        model["b"]["c"].unsafe_buffer_pointer() == model["a"].unsafe_buffer_pointer()
        if (name != "one_sharded_buffer")
        else True
    )
    expected = jax.tree.map(lambda a: np.asarray(a) + 1, model)
    jax.tree.map(np.testing.assert_array_equal, donated((after,), (0,))[0], expected)


# ------------------------------------------------------------------- which arguments are donated


def test_only_a_buffer_that_is_donated_matters() -> None:
    w = matrix()
    args = ({"w": w}, {"v": w}, {"u": again(w), "own": jnp.ones(3)})
    for donate in ((0,), (1, 2), None):
        with pytest.raises(tied.TieError) as caught:
            tied.check_donation(args, donate=donate)
        assert caught.value.paths == ("0.w", "1.v", "2.u")
    same = tied.check_donation(args, donate=())
    assert same[0]["w"] is same[1]["v"] is w
    twice_kept = ({"w": matrix()}, {"v": w}, {"u": w})
    assert tied.check_donation(twice_kept, donate=(0,))[2]["u"] is w


def test_what_is_kept_and_what_is_donated_part_by_a_copy() -> None:
    """jax#12627: `update(batch, batch)` with the first of them donated."""
    batch = {"x": matrix(), "y": jnp.ones(2)}
    args = tied.check_donation((batch, batch), donate=(0,), dedup=True)
    assert args[0]["x"] is batch["x"]
    assert args[1]["x"] is not batch["x"]
    out = donated(args, (0,))
    np.testing.assert_array_equal(out[1]["x"], matrix() + 1)


def test_several_groups_are_all_named() -> None:
    w, v = matrix(), jnp.ones(4)
    args = ([w, v, w], {"w": again(w), "v": v})
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation(args)
    assert str(caught.value).splitlines()[1:3] == [
        "  24 B  0.0, 0.2, 1.w",
        "  16 B  0.1, 1.v",
    ]
    after = tied.check_donation(args, dedup=True)
    arrays = jax.tree.leaves(after)
    assert len({a.unsafe_buffer_pointer() for a in arrays}) == 5
    assert sum(a is b for a, b in zip(arrays, jax.tree.leaves(args), strict=True)) == 2
    donated(after, (0, 1))


def test_what_was_donated_before_is_named() -> None:
    model = {"layer": {"w": matrix()}}
    donated((model,), (0,))
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation((jnp.ones(2), model))
    assert str(caught.value) == (
        "1.layer.w was donated or deleted before\n  Use what the call that donated it returned"
    )
    assert caught.value.paths == ("1.layer.w",)


# ------------------------------------------------------------------------- what is no such thing


def test_equal_values_empty_arrays_numbers_and_numpy_are_no_repeats() -> None:
    empty, array, key = jnp.ones((0, 3)), np.ones(3), jax.random.key(0)
    args = ([matrix(), matrix()], [empty, empty], [array, array, 1, 1], [key])
    after = tied.check_donation(args)
    for a, b in zip(jax.tree.leaves(args), jax.tree.leaves(after), strict=True):
        assert a is b
    jax.jit(lambda m: tied.check_donation((m, m)))(matrix())  # tracers have no buffer


def test_a_random_key_at_two_places_is_one_buffer() -> None:
    key = jax.random.key(0)
    with pytest.raises(tied.TieError, match=r"0\.a, 0\.b"):
        tied.check_donation(({"a": key, "b": key},))
    (after,) = tied.check_donation(({"a": key, "b": key},), dedup=True)
    assert after["b"] == key
    jax.block_until_ready(jax.jit(lambda m: m, donate_argnums=0)(after))


def test_arguments_are_a_tuple() -> None:
    with pytest.raises(tied.TiedError) as caught:
        tied.check_donation([matrix()])
    assert str(caught.value) == (
        "args is a tuple of arguments, not list\n"
        "  For one argument type: tied.check_donation((model,))"
    )


# ----------------------------------------------------------------------- models, states, bundles


def test_a_bundle_holds_each_buffer_once_so_it_passes() -> None:
    w = matrix()
    model = {"a": w, "b": w, "t": tied.transpose(w)}
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation((model,))
    assert caught.value.paths == ("0.a", "0.b", "0.t.base")
    bundle = tied.Bundle(model)
    assert tied.check_donation((bundle, jnp.ones(2)))[0].storages["a"] is w
    (out,) = donated((bundle,), (0,))
    np.testing.assert_array_equal(out["t"], out["a"].T)


def test_two_bundles_over_one_array_are_named_by_storage() -> None:
    w = matrix()
    ours, kept = tied.Bundle({"a": w, "t": tied.transpose(w)}), tied.Bundle({"ema": w})
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation((ours, kept))
    assert caught.value.paths == ("0.a", "1.ema")
    ours, kept = tied.check_donation((ours, kept), dedup=True)
    assert type(kept) is tied.Bundle
    donated((ours, kept), (0, 1))


STATES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "lbfgs": (
        lambda: optax.lbfgs(memory_size=2),
        ("1.0.diff_params_memory.w", "1.0.diff_updates_memory.w"),
    ),
    "adam": (lambda: optax.adam(0.1), ()),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("as_bundle", [False, True])
def test_fresh_optimizer_states(name: str, as_bundle: bool) -> None:
    """M6, liesel#272: `optax.lbfgs().init` gives one buffer at two places."""
    make, paths = STATES[name]
    params = (
        tied.Bundle({"w": (w := matrix()), "t": tied.transpose(w)})
        if as_bundle
        else {"w": matrix()}
    )
    state = make().init(params)
    if paths:
        with pytest.raises(tied.TieError) as caught:
            tied.check_donation((params, state))
        assert caught.value.paths == paths
    after = tied.check_donation((params, state), dedup=True)
    assert jax.tree.structure(after) == jax.tree.structure((params, state))
    before = jax.tree.leaves((params, state))
    copies = [a for a, b in zip(jax.tree.leaves(after), before, strict=True) if a is not b]
    assert len(copies) == len(paths) // 2
    donated(after, (0, 1))


def test_an_average_that_starts_as_the_weights_is_found() -> None:
    params = {"w": matrix()}
    synced = optax.LookaheadParams.init_synced(params)
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation((synced,))
    assert caught.value.paths == ("0.fast.w", "0.slow.w")


def test_a_tied_nnx_state_passes_and_two_params_around_one_array_are_named() -> None:
    model = nnx.Dict(a=nnx.Param(matrix()), b=nnx.Param(matrix().T))
    tied.tie(model, "b", "a", tied.transpose)
    tied.check_donation((nnx.state(model),))
    w = matrix()
    lost = nnx.state(nnx.Dict(a=nnx.Param(w), b=nnx.Param(w)))
    with pytest.raises(tied.TieError) as caught:
        tied.check_donation((lost,))
    assert [path.split(".")[:2] for path in caught.value.paths] == [["0", "a"], ["0", "b"]]
