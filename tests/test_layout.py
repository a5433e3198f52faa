"""Layouts against brute force: an array of positions, put through the same NumPy operations."""

import math
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from tied._layout import Layout, Step, apply_steps, ghost

QUICK = settings(max_examples=25, deadline=None)
THOROUGH = settings(max_examples=400, deadline=None)


# ---- chains of NumPy's view operations -------------------------------------------------------


def positions(shape):
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def slicing(draw, array):
    def part(size):
        if draw(st.integers(0, 3)) == 0 and size:
            return draw(st.integers(-size, size - 1))
        ends = st.none() | st.integers(-size - 1, size + 1)
        return slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, 3, -1, -2])))

    key = tuple(part(size) for size in array.shape)
    return lambda a: a[(*key, ...)]


@st.composite
def permuting(draw, array):
    axes = draw(st.permutations(range(array.ndim)))
    return lambda a: a.transpose(axes)


@st.composite
def flipping(draw, array):
    axes = tuple(draw(st.sets(st.sampled_from(range(array.ndim))))) if array.ndim else ()
    return lambda a: np.flip(a, axes)


@st.composite
def diagonal(draw, array):
    assume(array.ndim >= 2)
    first, second = draw(st.permutations(range(array.ndim)))[:2]
    offset = draw(st.integers(-2, 2))
    return lambda a: a.diagonal(offset, first, second)


@st.composite
def new_axis(draw, array):
    at = draw(st.integers(0, array.ndim))
    return lambda a: np.expand_dims(a, at)


@st.composite
def reshaping(draw, array):
    assume(array.size)
    rest, shape = array.size, []
    while rest > 1 and len(shape) < 3:
        shape.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= shape[-1]
    shape.append(rest)
    assume(np.may_share_memory(array.reshape(shape), array))
    return lambda a: a.reshape(shape)


@st.composite
def broadcasting(draw, array):
    assume(array.size < 300)
    front = draw(st.lists(st.integers(1, 3), max_size=1))
    shape = [draw(st.integers(1, 3)) if size == 1 else size for size in array.shape]
    return lambda a: np.broadcast_to(a, (*front, *shape))


@st.composite
def windows(draw, array):
    assume(array.ndim and 2 <= array.shape[-1] and array.size < 200)
    size = draw(st.integers(1, array.shape[-1]))
    return lambda a: as_strided(
        a,
        (*a.shape[:-1], a.shape[-1] - size + 1, size),
        (*a.strides, a.strides[-1]),
    )


STRAIGHT = [slicing, permuting, flipping, diagonal]
ALL = [*STRAIGHT, new_axis, reshaping, broadcasting, windows]
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7])


SHAPES = st.lists(SIZES, max_size=4).map(tuple)


@st.composite
def readings(draw, operations=ALL, shapes=SHAPES, most=4):
    """A base shape, a function that views, and the positions that it reads."""
    shape = draw(shapes)
    assume(math.prod(shape) <= 600)
    want, chain = positions(shape), []
    for _ in range(draw(st.integers(0, most))):
        fn = draw(draw(st.sampled_from(operations))(want))
        after = fn(want)
        assume(after.ndim <= 6 and after.size <= 2000)
        want = after
        chain.append(fn)

    def view(a):
        for fn in chain:
            a = fn(a)
        return a

    return shape, view, want


# ---- readings --------------------------------------------------------------------------------


@THOROUGH
@given(readings())
def test_index_is_what_numpy_reads(reading):
    shape, view, want = reading
    layout = Layout.of(view, shape)
    np.testing.assert_array_equal(layout.index(), want, strict=True)
    assert layout.shape == want.shape
    assert layout.size == want.size
    lo, hi = layout.extent
    assert (lo, hi) == ((want.min(), want.max() + 1) if want.size else (lo, lo))


@THOROUGH
@given(readings())
def test_steps_read_what_the_layout_reads(reading):
    shape, view, want = reading
    base = positions(shape)
    steps = Layout.of(view, shape).steps(shape)
    got = apply_steps(base, steps)
    np.testing.assert_array_equal(got, want, strict=True)
    assert hash(steps) == hash(pickle.loads(pickle.dumps(steps)))
    if want.size and not any(step.op == "take" for step in steps):
        assert np.shares_memory(got, base)


@THOROUGH
@given(readings(STRAIGHT, st.permutations([2, 3, 5, 7, 11]).map(tuple).map(lambda s: s[:3])))
def test_straight_views_of_three_dimensions_are_never_gathered(reading):
    shape, view, _ = reading
    ops = {step.op for step in Layout.of(view, shape).steps(shape)}
    assert ops <= {"index", "flip", "permute", "diagonal", "reshape"}


@THOROUGH
@given(readings(STRAIGHT, st.lists(SIZES, min_size=2, max_size=2).map(tuple)))
def test_straight_views_of_matrices_are_never_gathered(reading):
    shape, view, _ = reading
    assert all(step.op != "take" for step in Layout.of(view, shape).steps(shape))


@THOROUGH
@given(readings(), st.booleans(), st.booleans())
def test_the_text_evaluates_to_the_reading(reading, conj, neg):
    shape, view, want = reading
    base = positions(shape) * (1 + 2j)
    layout = Layout.of(lambda W: view(W.conj() if conj else W), shape)
    if neg:
        layout = layout.then(lambda W: -W)
    text = layout.describe(shape, "W")
    assume("take" not in text)
    head, spread, target = text.partition(".broadcast_to")
    got = eval(head, {"W": base})
    if spread:
        got = np.broadcast_to(got, eval(target))
    expected = want * (1 - 2j if conj and want.size else 1 + 2j) * (-1 if neg and want.size else 1)
    np.testing.assert_array_equal(got, expected)


@THOROUGH
@given(st.data())
def test_then_composes(data):
    shape, first, between = data.draw(readings(most=2))
    operation = data.draw(data.draw(st.sampled_from(ALL))(between))
    layout = Layout.of(first, shape)
    want = operation(between)
    np.testing.assert_array_equal(layout.then(operation).index(), want, strict=True)
    inner = Layout.of(operation, between.shape) if between.size else None
    composed = inner and layout.then(inner)
    if inner and composed is None:
        assert {"reshape", "take"} & {step.op for step in inner.steps(between.shape)}
    elif inner:
        np.testing.assert_array_equal(composed.index(), want, strict=True)


@THOROUGH
@given(readings(), readings())
def test_equal_readings_are_equal_layouts(one, other):
    layouts = [Layout.of(view, shape).canonical() for shape, view, _ in (one, other)]
    same = one[2].shape == other[2].shape and np.array_equal(one[2], other[2])
    assert (layouts[0] == layouts[1]) == same
    assert layouts[0].canonical() == layouts[0]


@THOROUGH
@given(readings())
def test_is_whole_is_c_order(reading):
    shape, view, want = reading
    whole = want.shape == shape and np.array_equal(want, positions(shape))
    layout = Layout.of(view, shape)
    assert layout.is_whole(shape) == whole
    assert (layout.steps(shape) == ()) == whole
    assert not Layout(layout.shape, layout.strides, layout.offset, conj=True).is_whole(shape)


def test_strides_of_size_one_mean_nothing():
    assert Layout((1, 4), (99, 1)).is_whole((1, 4))
    assert Layout((1, 4), (99, 1)).canonical() == Layout.whole((1, 4))
    assert Layout((0, 4), (99, 7), 5).canonical() == Layout.whole((0, 4)).canonical()
    assert not Layout((2, 4), (99, 1)).is_whole((2, 4))


# ---- JAX -------------------------------------------------------------------------------------


@QUICK
@given(readings())
def test_jax_reads_the_same_and_the_gradient_comes_back(reading):
    shape, view, want = reading
    steps = Layout.of(view, shape).steps(shape)
    base = jnp.asarray(positions(shape), jnp.float32)
    np.testing.assert_array_equal(apply_steps(base, steps), want)
    weight = jnp.asarray(1.0 + np.arange(want.size).reshape(want.shape), jnp.float32)
    gradient = jax.grad(lambda a: (apply_steps(a, steps) * weight).sum())(base)
    expected = np.zeros(math.prod(shape), np.float32)
    np.add.at(expected, want, weight)
    np.testing.assert_array_equal(gradient, expected.reshape(shape))


def test_steps_run_under_jit():
    layout = Layout.of(lambda W: np.broadcast_to(-W.conj()[1:3, ::-1].T, (2, 6, 2)), (4, 6))
    steps = layout.steps((4, 6))
    base = positions((4, 6)) * np.complex64(1 + 2j)
    want = np.broadcast_to(-base.conj()[1:3, ::-1].T, (2, 6, 2))
    np.testing.assert_array_equal(jax.jit(lambda a: apply_steps(a, steps))(base), want)
    np.testing.assert_array_equal(apply_steps(base, steps), want)


# ---- how it prints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((4, 6), "W"),
        ((4, 6), "W.T"),
        ((4, 6), "W[1:3]"),
        ((4, 6), "W[:, 1:3]"),
        ((4, 6), "W[::2, 1:3]"),
        ((4, 6), "W[:, ::2]"),
        ((4, 6), "W[:, 0]"),
        ((4, 6), "W[1]"),
        ((4, 6), "W[3, 5]"),
        ((4, 6), "W[:, :1]"),
        ((4, 6), "W.reshape(2, 12)"),
        ((4, 6), "W.reshape(2, 2, 6)"),
        ((4, 6), "W.reshape(24)"),
        ((4, 6), "W.reshape(1, 4, 6)"),
        ((4, 6), "W[1:3].T"),
        ((4, 6), "W[1:3].reshape(2, 2, 3)"),
        ((4, 6), "W[::-1]"),
        ((4, 6), "W[:, ::-1]"),
        ((4, 6), "W[:, ::-1].T"),
        ((4, 6), "W.diagonal()"),
        ((4, 6), "W.diagonal(1)"),
        ((4, 6), "W.diagonal(-2)"),
        ((4, 6), "W.diagonal()[::-1]"),
        ((4, 6), "W[:, ::-1].diagonal()"),
        ((4, 6), "W[1:3, 1:3].diagonal()"),
        ((4, 6), "W.conj()"),
        ((4, 6), "W.conj().T"),
        ((4, 6), "W[1:3].conj().T"),
        ((4, 6), "-W.T"),
        ((4, 6), "W[:0]"),
        ((2, 3, 5), "W.transpose(0, 2, 1)"),
        ((2, 3, 5), "W.transpose(2, 1, 0)"),
        ((2, 3, 5), "W.transpose(1, 2, 0)"),
        ((2, 3, 5), "W[0]"),
        ((2, 3, 5), "W[0].T"),
        ((2, 3, 5), "W[:, 1]"),
        ((2, 3, 5), "W[:, :, 4]"),
        ((5, 5, 5), "W.diagonal(0, 1, 2)"),
        ((5, 5, 5), "W.diagonal().diagonal()"),
        ((4, 6, 5), "W[1].reshape(3, 10)"),
        ((24,), "W[3:7]"),
        ((24,), "W[::5]"),
        ((24,), "W.reshape(4, 6)"),
        ((24,), "W.reshape(4, 6).T"),
        ((40,), "W[8:32].reshape(4, 6)"),
        ((40,), "W[8:32].reshape(4, 6).T"),
        ((40,), "W[8:32].reshape(4, 6)[:, :2]"),
        ((1, 6), "W.T"),
    ],
)
def test_prints_as_it_is_written(shape, text):
    layout = Layout.of(lambda W: eval(text), shape)
    assert layout.describe(shape, "W") == text


@pytest.mark.parametrize(
    ("fn", "shape", "text"),
    [
        (lambda b: np.broadcast_to(b, (4, 3)), (3,), "b.broadcast_to(4, 3)"),
        (lambda b: np.broadcast_to(b[:, None], (4, 3)), (4,), "b.reshape(4, 1).broadcast_to(4, 3)"),
        (lambda b: np.broadcast_to(b[:, 1:2], (4, 5)), (4, 6), "b[:, 1:2].broadcast_to(4, 5)"),
        (lambda b: np.broadcast_to(b, (4, 3)), (), "b.broadcast_to(4, 3)"),
        (lambda b: np.lib.stride_tricks.sliding_window_view(b, 3), (9,), "b.take(...)"),
    ],
)
def test_prints_what_numpy_has_no_method_for(fn, shape, text):
    assert Layout.of(fn, shape).describe(shape, "b") == text


@pytest.mark.parametrize(
    ("fn", "dtype", "text"),
    [
        (lambda W: W.real, "complex64", "W.real"),
        (lambda W: W.imag, "complex128", "W.imag"),
        (lambda W: W.T.imag[1:3], "complex64", "W.imag[:, 1:3].T"),
        (lambda W: W.view("uint8"), "float32", "W.view(uint8)"),
        (lambda W: W.view("uint8")[:, 4:8], "float32", "W.view(uint8)[:, 4:8]"),
        (lambda W: W.view("int32").T, "float32", "W.view(int32).T"),
        (lambda W: W.view("float64"), "float32", "W.view(float64)"),
        (lambda W: W.view("uint8")[:, 1:5].view("uint16"), "float32", "W.view(uint16)"),
    ],
)
def test_prints_other_readings_of_the_bits(fn, dtype, text):
    layout = Layout.of(fn, (4, 6), dtype=dtype)
    assert layout.describe((4, 6), "W", base_dtype=dtype) == text
    assert layout.describe((4, 6), "W") == f"W.view({layout.dtype})"
    assert not layout.is_whole((4, 6))
    with pytest.raises(TypeError, match="reading bits as"):
        layout.steps((4, 6))
    with pytest.raises(TypeError, match="no element positions"):
        layout.index()


def test_bits_are_counted_in_bytes():
    imag = Layout.of(lambda W: W.imag, (4, 6), dtype="complex64")
    assert imag == Layout((4, 6), (48, 8), 4, dtype="float32")
    assert imag.extent == (4, 192)
    assert imag.then(lambda W: W[1]) == Layout((6,), (8,), 52, dtype="float32")
    assert imag.then(Layout.of(lambda W: W.T[1:], (4, 6))).extent == (12, 192)
    assert Layout((3,), (4,), dtype="bfloat16").extent == (0, 10)


# ---- functions that compute ------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda W: W + 1,
        lambda W: 2 * W.T,
        lambda W: W @ W.T,
        lambda W: W.sum(0),
        lambda W: W.copy(),
        lambda W: W.T.reshape(-1),
        lambda W: W[[0, 1]],
        lambda W: W[W > 0],
        lambda W: np.concatenate([W, W]),
        lambda W: np.linalg.inv(W[:, :4]),
        lambda W: np.broadcast_to(W, (2, 4, 6)).conj() + 0,
        lambda W: np.asarray(W).conj(),
        lambda W: jnp.transpose(W),
        lambda W: W.real,
        lambda W: "something else",
    ],
)
def test_a_function_that_computes_is_no_layout(fn):
    assert Layout.of(fn, (4, 6)) is None


def test_an_error_of_the_function_is_passed_on():
    with pytest.raises(IndexError):
        Layout.of(lambda W: W[9], (4, 6))


def test_conjugation_survives_losing_the_subclass():
    layout = Layout.of(lambda W: as_strided(np.conj(W), (2,), (8,)), (4, 6))
    assert layout == Layout((2,), (1,), conj=True)
    assert Layout.of(lambda W: W.conj().T.conj(), (4, 6)).conj is False
    assert Layout.of(lambda W: W.conj(), (4, 6), dtype="float32") == Layout.whole((4, 6))
    assert Layout.of(lambda W: -np.negative(W.conj()), (4, 6)) == Layout((4, 6), (6, 1), conj=True)


def test_a_layout_outside_of_the_storage_is_refused():
    with pytest.raises(ValueError, match="elements 1 to 25"):
        Layout((24,), (1,), 1).steps((4, 6))
    with pytest.raises(ValueError, match="elements -5 to 1"):
        Layout((6,), (-1,), 0).steps((4, 6))


# ---- ghosts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [1, 4096, 0x7F00_0000_0000, sys.maxsize])
def test_a_ghost_is_only_where_it_is(address):
    a = ghost(address, (3, 4), (16, -4), 4)
    assert a.__array_interface__["data"] == (address, True)
    assert (a.shape, a.strides, a.itemsize) == ((3, 4), (16, -4), 4)
    assert not a.flags.writeable
    assert a.base is not None


def test_ghosts_answer_whether_they_share_an_element():
    columns = [ghost(4096 + 4 * i, (5,), (12,), 4) for i in range(3)]
    assert np.may_share_memory(columns[0], columns[1])
    assert not np.shares_memory(columns[0], columns[1])
    assert np.shares_memory(columns[0], ghost(4096, (5, 3), (12, 4), 4))


def test_steps_are_values():
    step = Step("index", ((1, 3, None), 0))
    assert step.key == (slice(1, 3), 0)
    assert step == Step("index", ((1, 3, None), 0))
    assert len({step, Step("flip", (1,)), Step("take", (Layout.whole((3,)),))}) == 3
    assert Step("flip", (1,)).key == (slice(None), slice(None, None, -1))
