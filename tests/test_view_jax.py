"""A `View` over JAX arrays: what it has, what it computes, and what JAX's transforms make of it."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tied


def base() -> Any:
    return jnp.arange(12.0).reshape(4, 3)


READINGS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda W: W.T,
    "sliced": lambda W: W[1:3],
    "both": lambda W: W[1:3].T,
    "diagonal": lambda W: W.diagonal(),
    "flipped": lambda W: W[::-1],
    "reshaped": lambda W: W.reshape(2, 6),
    "broadcast": lambda W: np.broadcast_to(W[:, :1], (4, 5)),
    "one": lambda W: W[1, 2],
    "none": lambda W: W[:0],
}


def pair(reading: str) -> tuple[tied.View, Any]:
    """A view, and the array that it reads, by JAX's own operations."""
    function = READINGS[reading]
    index = function(np.arange(12).reshape(4, 3))
    view = tied.view(base(), function)
    assert isinstance(view, tied.View)
    return view, base().reshape(-1)[jnp.asarray(index)]


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, jax.Array | np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours, theirs)
    else:
        assert ours == theirs


# ----------------------------------------------------------------------------- what it has


@pytest.mark.parametrize("reading", READINGS)
def test_what_an_array_tells(reading: str) -> None:
    view, array = pair(reading)
    for name in "shape dtype ndim size nbytes itemsize".split():
        same(getattr(view, name), getattr(array, name))
    same(view.array(), array)
    same(view.read(), array)
    same(view.__jax_array__(), array)
    same(jnp.asarray(view), array)
    same(view.tolist(), array.tolist())
    same(view.T.array(), array.T)
    assert isinstance(view.T, tied.View)
    assert view.T.base is view.base


def test_length_and_iteration() -> None:
    view, array = pair("both")
    assert len(view) == 3
    for ours, theirs in zip(view, array, strict=True):
        same(ours, theirs)
    for ours, theirs in zip(reversed(view), reversed(array), strict=True):
        same(ours, theirs)
    row = tied.view(base(), lambda W: W[1])
    assert 4.0 in row
    assert 99.0 not in row
    one, _ = pair("one")
    with pytest.raises(TypeError, match=r"len\(\) of unsized object"):
        len(one)
    with pytest.raises(TypeError, match="iteration over a 0-d array"):
        iter(one)


INDICES: dict[str, Any] = {
    "one": 1,
    "negative": -1,
    "tuple": (1, 0),
    "slice": slice(0, 2),
    "step": slice(None, None, -1),
    "ellipsis": (..., 0),
    "new axis": (None, 1),
    "array": jnp.asarray([2, 0]),
    "numpy": np.asarray([2, 0]),
    "list of booleans": np.asarray([True, False, True]),
    "boolean": jnp.asarray([[True, False], [False, True], [True, True]]),
    "empty": (),
}


@pytest.mark.parametrize("index", INDICES)
def test_indexing_gives_plain_arrays(index: str) -> None:
    view, array = pair("both")
    same(view[INDICES[index]], array[INDICES[index]])


def test_indexing_in_jit_by_a_traced_index_and_by_a_view() -> None:
    view, array = pair("both")
    same(jax.jit(lambda v, i: v[i, 1])(view, 2), array[2, 1])
    order = tied.view(jnp.arange(3), lambda x: x[::-1])
    same(view[order], array[::-1])
    with pytest.raises(tied.TieError) as caught:
        array[order]
    assert str(caught.value) == (
        "JAX takes plain arrays only in this place, and this is a View\n"
        "  view  View(base[::-1], shape=(3,), dtype=int32)\n"
        "  Give it v.array(), or use tied.Bundle(model), whose model has plain arrays"
    )


def test_at_and_astype_give_plain_arrays() -> None:
    view, array = pair("both")
    same(view.at[0, 1].set(9.0), array.at[0, 1].set(9.0))
    same(view.at[0].add(view[1]), array.at[0].add(array[1]))
    same(view.astype(jnp.bfloat16), array.astype(jnp.bfloat16))
    same(view.base, base())  # nothing wrote through


def test_transposes_are_views() -> None:
    cube = jnp.arange(24.0).reshape(2, 3, 4)
    view = tied.view(cube, lambda x: x[:, 1:])
    same(view.mT.array(), cube[:, 1:].mT)
    same(view.T.array(), cube[:, 1:].T)
    assert tied.shares(view.mT, cube)


def test_writing_is_refused() -> None:
    view, _ = pair("both")
    with pytest.raises(tied.TieError) as caught:
        view[0, 1] = 9.0
    assert str(caught.value) == (
        "a View can't be written through\n"
        "  Write to what it reads, or to a plain array of your own: x.array()"
    )
    with pytest.raises(AttributeError):
        view.shape = (6,)


# ------------------------------------------------------------------------------ operators

BINARY = "add sub mul truediv floordiv mod pow matmul eq ne lt le gt ge".split()
BITS = "and_ or_ xor lshift rshift".split()


@pytest.mark.parametrize("name", [*BINARY, *BITS, "divmod"])
def test_operators_from_both_sides(name: str) -> None:
    function = divmod if name == "divmod" else getattr(operator, name)
    weights = jnp.arange(1, 10).reshape(3, 3)
    weights = weights if name in BITS else weights.astype(jnp.float32)
    view, array = tied.transpose(weights), weights.T
    others = [weights] if name == "matmul" else [weights, np.asarray(weights), 2]
    for other in others:
        for ours, theirs in (
            (function(view, other), function(array, other)),
            (function(other, view), function(other, array)),
            (function(view, view), function(array, array)),
        ):
            jax.tree.map(same, ours, theirs)


@pytest.mark.parametrize("name", "neg pos abs invert".split())
def test_operators_of_one(name: str) -> None:
    weights = jnp.arange(-4, 5).reshape(3, 3)
    function = getattr(operator, name)
    same(function(tied.transpose(weights)), function(weights.T))


@pytest.mark.parametrize("name", [*(n for n in BINARY[:8]), *BITS])
def test_in_place_operators_give_plain_arrays_and_write_nothing(name: str) -> None:
    weights = jnp.arange(1, 10).reshape(3, 3)
    weights = weights if name in BITS else weights.astype(jnp.float32)
    view = kept = tied.transpose(weights)
    in_place = getattr(operator, "i" + name.rstrip("_"), None) or getattr(operator, "i" + name)
    view = in_place(view, weights)
    same(view, getattr(operator, name)(weights.T, weights))
    same(kept.array(), weights.T)


def test_round_and_the_methods_of_ufuncs() -> None:
    view, array = pair("both")
    same(round(view, 1), round(array, 1))
    same(jnp.add.reduce(view), jnp.add.reduce(array))
    same(jnp.add.accumulate(view), jnp.add.accumulate(array))


# ------------------------------------------------------------------------------ conversion


@pytest.mark.parametrize("reading", READINGS)
def test_numpy_takes_it(reading: str) -> None:
    view, array = pair(reading)
    there = np.asarray(array)
    for ours, theirs in (
        (np.asarray(view), there),
        (np.array(view), there),
        (np.asarray(view, dtype="int16"), there.astype("int16")),
        (np.array(view, copy=True), there),
        (np.sqrt(view), np.sqrt(there)),
        (np.concatenate([view, view], axis=None), np.concatenate([there, there], axis=None)),
        (np.from_dlpack(view), there),
        (view.__array__(np.float64), there.astype("float64")),
    ):
        same(np.asarray(ours), np.asarray(theirs))


def test_python_takes_one_number() -> None:
    one = tied.view(base(), lambda W: W[1, 2])
    assert float(one) == one.item() == 5.0
    assert type(float(one)) is type(one.item()) is float
    assert int(one) == 5
    assert complex(one) == 5 + 0j
    assert f"{one:.2f}" == "5.00"
    assert bool(one)
    zero = tied.view(base(), lambda W: W[0, 0])
    assert not zero
    index = tied.view(jnp.arange(4), lambda W: W[2])
    assert operator.index(index) == 2
    assert [7, 8, 9][index] == 9
    view, array = pair("both")
    for convert in (bool, float, int, complex, operator.index):
        with pytest.raises((TypeError, ValueError)) as theirs:
            convert(array)
        with pytest.raises(theirs.type):
            convert(view)


def test_the_repr_says_what_it_reads() -> None:
    view = tied.view(base(), lambda W: W[1:3].T)
    assert repr(view) == str(view) == f"{view}"
    assert repr(view) == "View(base[1:3].T, shape=(3, 2), dtype=float32)"
    assert repr(tied.transpose(view)) == "View(base[1:3], shape=(2, 3), dtype=float32)"
    z = jnp.ones((2, 3), jnp.complex64)
    assert repr(tied.adjoint(z)) == "View(base.conj().T, shape=(3, 2), dtype=complex64)"
    # It reads nothing, so that it is the same for tracers and abstract arrays, and never fails.
    seen = []
    jax.jit(lambda v: seen.append(repr(v)))(view)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), view)
    assert {*seen, repr(abstract)} == {repr(view)}
    assert repr(jax.tree.map(lambda x: 0, view)) == "View(base[1:3].T, base=0)"
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), view)
    assert repr(stacked) == "View(base[1:3].T, base of shape (2, 4, 3) instead of (4, 3))"
    assert str({"w": view}) == "{'w': View(base[1:3].T, shape=(3, 2), dtype=float32)}"


def test_copies_pickles_hash_and_equality() -> None:
    view, array = pair("both")
    for other in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view), copy.copy(view)):
        assert isinstance(other, tied.View)
        assert repr(other) == repr(view)
        same(other.array(), array)
    both = copy.deepcopy({"a": view.base, "b": view})
    assert both["b"].base is both["a"]  # the tie is kept
    assert both["a"] is not view.base
    same(view == array, jnp.ones((3, 2), bool))
    assert hash(view) == hash(view)  # by identity, as that of a torch tensor
    assert {view: 1}[view] == 1


# ------------------------------------------------------------------------------ other views


def test_a_complex_adjoint() -> None:
    z = jnp.arange(6.0).reshape(2, 3) * (1 + 2j)
    view = tied.adjoint(z)
    same(view.array(), z.conj().T)
    same(view.T.array(), z.conj())
    same(tied.adjoint(view).array(), z)
    same(view @ z, z.conj().T @ z)
    same(jnp.abs(view.real), jnp.abs(z.real.T))
    gradient = jax.grad(lambda v: jnp.sum(jnp.abs(v.array()) ** 2))(view)
    same(gradient.base, jax.grad(lambda z: jnp.sum(jnp.abs(z.conj().T) ** 2))(z))


def test_a_view_of_a_view_reads_the_same_base() -> None:
    W = base()
    view = tied.diagonal(tied.transpose(tied.view(W, lambda W: W[1:])))
    assert view.base is W
    same(view.array(), W[1:].T.diagonal())
    same(tied.permute(tied.transpose(W), (1, 0)).array(), W)


def test_a_view_of_an_abstract_array() -> None:
    view = tied.transpose(jax.ShapeDtypeStruct((4, 3), jnp.bfloat16))
    assert (view.shape, view.dtype, view.nbytes) == ((3, 4), jnp.bfloat16, 24)
    assert view.array() == jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
    assert jax.eval_shape(jnp.sin, view) == jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)


def test_a_view_of_random_keys() -> None:
    keys = jax.random.split(jax.random.key(0), (4, 3))
    view = tied.transpose(keys)
    assert view.shape == (3, 4)
    same(jax.random.key_data(view.array()), jax.random.key_data(keys.T))
