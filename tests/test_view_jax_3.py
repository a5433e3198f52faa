"""A `View` in the transforms of JAX: a pytree whose leaf is its base, never mapped by mistake."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import tied

MAPPED = (
    "vmap and scan can't map over a bare View: they would map an axis of its base\n"
    "  base      (4, 3)\n  would be  ({},)\n"
    "  Map over the base and take the view inside, or use tied.Bundle(model)"
)
OTHER_SHAPE = (
    "a View's base has another shape than the View was made for\n"
    "  made for  (4, 3)\n  found     {}\n"
    "  If bases are stacked, vmap over them and read inside; else take the view anew, or use"
    " v.array() before, or tied.Bundle(model)"
)


@pytest.fixture
def base() -> Any:
    return jnp.arange(12.0).reshape(4, 3)


@pytest.fixture
def view(base: Any) -> tied.View:
    return tied.transpose(base)


def same(ours: Any, theirs: Any) -> None:
    assert isinstance(ours, jax.Array)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    np.testing.assert_array_equal(ours, theirs)


# ----------------------------------------------------------------------------- vmap and scan


def vmapped(in_axes: Any) -> Callable[[Any], Any]:
    return lambda v: jax.vmap(lambda v: v.sum(), in_axes=in_axes)(v)


MAPS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "vmap": (vmapped(0), 3),
    "the last axis": (vmapped(-1), 4),
    "axes as a tree": (lambda v: vmapped((jax.tree.map(lambda _: 0, v),))(v), 3),
    "in a tree": (lambda v: jax.vmap(lambda d: d["v"].sum(), in_axes=({"v": 0},))({"v": v}), 3),
    "without reading": (lambda v: jax.vmap(lambda _: 1.0)(v), 3),
    "untouched": (lambda v: jax.vmap(lambda v: v)(v), 3),
    "in jit": (jax.jit(vmapped(0)), 3),
    "scan": (lambda v: lax.scan(lambda n, row: (n + 1, None), 0, v), 3),
    "map": (lambda v: lax.map(lambda row: row.sum(), v), 3),
}


@pytest.mark.parametrize("how", MAPS)
def test_mapping_over_a_view_is_refused(view: tied.View, how: str) -> None:
    function, left = MAPS[how]
    with pytest.raises(tied.TieError) as caught:
        function(view)
    assert str(caught.value) == MAPPED.format(left)


def test_mapping_over_a_view_is_refused_where_both_axes_are_equal() -> None:
    square = tied.transpose(jnp.arange(9.0).reshape(3, 3))
    with pytest.raises(tied.TieError, match="vmap and scan can't map over a bare View"):
        jax.vmap(lambda row: row.sum())(square)
    cube = tied.permute(jnp.zeros((3, 3, 3)), (2, 0, 1))
    with pytest.raises(tied.TieError, match="vmap and scan can't map over a bare View"):
        jax.vmap(lambda part: jnp.trace(part), in_axes=1)(cube)


def test_associative_scan_is_refused(view: tied.View) -> None:
    with pytest.raises(tied.TieError) as caught:
        lax.associative_scan(jnp.add, view)
    assert str(caught.value) == OTHER_SHAPE.format("(2, 3)")


def test_what_to_type_instead(view: tied.View, base: Any) -> None:
    same(jax.vmap(jnp.sum)(view.array()), base.sum(0))
    same(lax.map(jnp.sum, view.array()), base.sum(0))
    same(jax.vmap(lambda row: row.sum(), in_axes=1)(view.base), base.sum(0))


def test_a_view_that_is_not_mapped_goes_through_vmap(view: tied.View, base: Any) -> None:
    x = jnp.arange(8.0).reshape(2, 4)
    wanted = x @ base
    same(jax.vmap(lambda v, x: v @ x, in_axes=(None, 0))(view, x), wanted)
    same(jax.vmap(lambda d, x: d["v"] @ x, in_axes=({"v": None}, 0))({"v": view}, x), wanted)
    same(jax.vmap(lambda x: view @ x, out_axes=1)(x), wanted.T)
    same(lax.scan(lambda n, x: (n, view @ x), 0, x)[1], wanted)


def test_stacked_views_are_mapped_as_stacked_arrays(view: tied.View, base: Any) -> None:
    """As for an ensemble: `vmap` over functions that make models, then over the models."""
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), view)
    made = jax.vmap(tied.transpose)(stacked.base)
    wanted = jnp.stack([base.T, 2 * base.T])
    for many in (stacked, made):
        same(jax.vmap(lambda v: v.array())(many), wanted)
        same(lax.scan(lambda n, v: (n, v.array()), 0, many)[1], wanted)
    last = jax.vmap(tied.transpose, out_axes=-1)(stacked.base)
    same(jax.vmap(lambda v: v.array(), in_axes=-1)(last), wanted)
    for use in (jnp.sum, np.asarray, lambda v: v.shape, lambda v: v[0], tied.transpose, tied.ties):
        with pytest.raises(tied.TieError) as caught:
            use(stacked)
        assert str(caught.value) == OTHER_SHAPE.format("(2, 4, 3)")


# ----------------------------------------------------------------------- lax and its carries


LAX: dict[str, Callable[[Any], Any]] = {
    "sin": lax.sin,
    "add": lambda v: lax.add(v, v),
    "dot": lambda v: lax.dot(v, v.T),
    "transpose": lambda v: lax.transpose(v, (1, 0)),
    "slice": lambda v: lax.slice(v, (0, 0), (1, 1)),
    "concatenate": lambda v: lax.concatenate([v, v], 0),
    "reshape": lambda v: lax.reshape(v, (12,)),
    "dynamic_slice": lambda v: lax.dynamic_slice(v, (0, 0), (1, 1)),
    "select": lambda v: lax.select(v > 1, v, v),
    "sort": lax.sort,
    "cumsum": lax.cumsum,
    "top_k": lambda v: lax.top_k(v, 1),
    "pad": lambda v: lax.pad(v, 0.0, ((0, 0, 0), (0, 0, 0))),
    "expand_dims": lambda v: lax.expand_dims(v, (0,)),
    "cholesky": lax.linalg.cholesky,
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", LAX)
def test_lax_says_what_to_type(view: tied.View, name: str, jit: bool) -> None:
    function = jax.jit(LAX[name]) if jit else LAX[name]
    with pytest.raises(tied.TieError) as caught:
        function(view)
    assert str(caught.value) == (
        "JAX takes plain arrays only in this place, and this is a View\n"
        "  view  View(base.T, shape=(3, 4), dtype=float32)\n"
        "  Give it v.array(), or use tied.Bundle(model), whose model has plain arrays"
    )


def test_lax_that_converts_by_itself_is_right(view: tied.View, base: Any) -> None:
    same(lax.convert_element_type(view, jnp.int32), base.T.astype(jnp.int32))
    same(lax.full_like(view, 1), jnp.ones((3, 4)))


def test_branches_and_carries(view: tied.View, base: Any) -> None:
    same(lax.cond(True, lambda v: v * 2, lambda v: v.array(), view), base.T * 2)
    same(lax.switch(1, [lambda v: v[0, 1], lambda v: v[1, 0]], view), base.T[1, 0])
    same(lax.fori_loop(0, 2, lambda _, x: x + view, view.array()), 3 * base.T)
    kept = lax.while_loop(lambda v: v.sum() < 0, lambda v: v, view)
    same(kept.array(), base.T)
    doubled = lax.fori_loop(0, 2, lambda _, v: jax.tree.map(lambda x: 2 * x, v), view)
    same(doubled.array(), 4 * base.T)


@pytest.mark.parametrize(
    "loop",
    [
        lambda v: lax.fori_loop(0, 2, lambda _, v: v * 2, v),
        lambda v: lax.while_loop(lambda v: v.sum() < 9, lambda v: v * 2, v),
        lambda v: lax.scan(lambda v, _: (v * 2, None), v, length=2),
        lambda v: lax.cond(True, lambda v: v, lambda v: v * 2, v),
    ],
)
def test_a_carry_that_becomes_a_plain_array_is_refused_by_jax(
    view: tied.View, loop: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=r"is a <class 'tied\.arrays\.view\.View'>"):
        loop(view)
    start = view.array()
    assert isinstance(jax.tree.leaves(loop(start))[0], jax.Array)


def test_structures_in_errors_say_what_to_type(view: tied.View) -> None:
    with pytest.raises(TypeError, match=r"v\.array\(\) is a plain array, tied\.Bundle\(model\)"):
        jax.jvp(lambda v: v * 2, (view,), (view.array(),))


# -------------------------------------------------------------------------------- tree.map


def test_tree_map_works_on_the_base(view: tied.View, base: Any) -> None:
    half = jax.tree.map(lambda x: (x + 1).astype(jnp.bfloat16), view)
    assert isinstance(half, tied.View)
    assert half.dtype == jnp.bfloat16
    same(half.array(), (base.T + 1).astype(jnp.bfloat16))
    same(jax.tree.map(jnp.add, view, half).array(), 2 * base.T + 1)


@pytest.mark.parametrize(
    ("function", "shape"),
    [(jnp.transpose, "(3, 4)"), (jnp.sum, "()"), (lambda x: x[None], "(1, 4, 3)")],
)
def test_a_base_of_another_shape_is_passed_on_and_not_read(
    view: tied.View, function: Callable[[Any], Any], shape: str
) -> None:
    """As of `tree.map(jnp.linalg.norm, gradients)`, or an optimizer's state of stacked arrays."""
    after = jax.jit(lambda v: jax.tree.map(function, v))(view)
    same(jax.tree.leaves(after)[0], function(view.base))
    for use in (jnp.sin, lambda v: v.array(), lambda v: v.ndim, lambda v: v + 1):
        with pytest.raises(tied.TieError) as caught:
            use(after)
        assert str(caught.value) == OTHER_SHAPE.format(shape)


def test_a_base_that_is_no_array(view: tied.View) -> None:
    for other in (None, 0, "batch", PartitionSpec("i")):
        mapped = jax.tree.unflatten(jax.tree.structure(view), [other])
        with pytest.raises(tied.TieError) as caught:
            mapped.array()
        assert str(caught.value) == (
            f"the base of a View is no array: {type(other).__name__}\n"
            "  A View that jax.tree.map gave other leaves is passed on, but not read"
        )


# ------------------------------------------------------------------------- other transforms


def test_gradients_are_views_over_the_gradient_of_the_base(view: tied.View, base: Any) -> None:
    def loss(v: Any) -> Any:
        return jnp.sum(v[0] ** 3)

    gradient = jax.grad(loss)(view)
    assert isinstance(gradient, tied.View)
    same(gradient.base, jax.grad(lambda W: loss(W.T))(base))
    same(gradient.array(), jax.grad(loss)(view.array()))
    value, gradient = jax.jit(jax.value_and_grad(loss))(view)
    same(value, loss(base.T))
    small = tied.transpose(jnp.ones((2, 1)))
    hessian = jax.hessian(lambda v: (v**3).sum())(small)
    same(jax.tree.leaves(hessian)[0], 6 * jnp.eye(2).reshape(2, 1, 2, 1))
    assert repr(hessian).startswith("View(base.T, base=View(base.T, base of shape (2, 1, 2, 1)")


def test_a_gradient_of_overlapping_views_adds_up_in_the_base(base: Any) -> None:
    def loss(W: Any) -> Any:
        first, second = tied.view(W, lambda W: W[:3]), tied.view(W, lambda W: W[1:].T)
        return jnp.sum(2 * first) + jnp.sum(3 * second)

    same(jax.grad(loss)(base)[:, 0], jnp.asarray([2.0, 5.0, 5.0, 3.0]))


def test_jit_returns_views_and_compiles_once(view: tied.View) -> None:
    traced = []

    @jax.jit
    def double(v: Any) -> Any:
        traced.append(v)
        return jax.tree.map(lambda x: 2 * x, v)

    for _ in range(2):
        view = double(view)
        view = tied.transpose(view.base)  # another View, with an equal layout
    assert len(traced) == 1
    double(tied.view(view.base, lambda W: W[1:]))
    assert len(traced) == 2


def test_the_rest_of_jax(view: tied.View, base: Any) -> None:
    assert jax.tree.leaves(view) == [view.base]
    ((path, _),) = jax.tree_util.tree_flatten_with_path({"w": view})[0]
    assert jax.tree_util.keystr(path) == "['w'].base"
    abstract = jax.eval_shape(lambda v: v, view)
    assert isinstance(abstract, tied.View)
    assert abstract.shape == (3, 4)
    jaxpr = jax.make_jaxpr(lambda v: v @ v.T)(view)
    assert jaxpr.in_avals == [jax.typeof(base)]
    assert jax.block_until_ready(view).base is base
    moved = jax.device_put(view, jax.devices()[1])
    assert isinstance(moved, tied.View)
    assert moved.base.devices() == {jax.devices()[1]}
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(view, NamedSharding(mesh, PartitionSpec("i", None)))
    same(jax.jit(lambda v: v @ v.T)(spread), base.T @ base)
    compiled = jax.jit(lambda v: v * 2).lower(view).compile()
    same(compiled(view), 2 * base.T)
    same(jax.checkpoint(lambda v: v * 2)(view), 2 * base.T)
    same(jax.linear_transpose(lambda v: v * 2, view)(base.T)[0].base, 2 * base)
    donated = tied.transpose(base + 0)
    jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v), donate_argnums=0)(donated)
    assert donated.base.is_deleted()
