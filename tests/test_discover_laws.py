"""The laws of `discover`, on random arrays: what is planted is found, what is found is equal."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tied
from strategies import LAW
from test_discover import changed, own
from tied._discover import discover
from tied._layout import Layout


def strided(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        return np.reshape(x, shape, copy=False)
    except ValueError:
        return None


def readings(x: np.ndarray, shape: tuple[int, ...]) -> Any:
    """Every reading of an array that `discover` promises to find, of a shape; by brute force."""
    if x.size == np.prod(shape):
        axes = range(x.ndim)
        turned = (strided(x.transpose(p), shape) for p in itertools.permutations(axes))
        yield from (view for view in turned if view is not None)
        for p in itertools.permutations(range(len(shape))):
            split = x.reshape([shape[axis] for axis in p])
            yield split.transpose(np.argsort(p))
    for view in (x, x.T) if x.ndim == 2 else (x,):
        if view.ndim == len(shape) and view.shape[1:] == shape[1:] and view.shape[0] > shape[0]:
            yield view[: shape[0]]
        if x.ndim == len(shape) == 2 and view.shape[1:] == shape[:1] and view.shape[0] > shape[1]:
            yield view[: shape[1]].T


def expected(arrays: dict[str, np.ndarray], found: set[str]) -> set[str]:
    """The arrays that are readings of one before them that is kept."""
    kept: list[np.ndarray] = []
    names = set()
    for name, x in sorted(arrays.items(), key=lambda pair: -pair[1].size):
        bits = x.view(f"u{x.itemsize}")
        if (bits == bits.flat[0]).all():
            continue
        if any((view == bits).all() for other in kept for view in readings(other, x.shape)):
            names.add(name)
        if name not in found:
            kept.append(bits)
    return names


def assert_sound(arrays: dict[str, np.ndarray], told: tied.Discovered) -> None:
    """Every finding has all the bits of what it is said to read, which is no finding itself."""
    names = {finding.name for finding in told.findings}
    assert len(names) == len(told.findings)
    for finding in told.findings:
        x, base = arrays[finding.name], arrays[finding.of]
        assert finding.of not in names
        assert finding.layout.shape == finding.shape == x.shape
        assert base.reshape(-1)[finding.layout.index()].tobytes() == x.tobytes()
        assert not (x == x.flat[0]).all()
        smaller = finding.layout.size < base.size
        assert (finding.kind == "block") == smaller
        if finding.kind == "equal":
            assert finding.layout == Layout.whole(base.shape).canonical()
        if finding.kind in ("transposed", "permuted"):
            assert (finding.kind == "transposed") == (base.ndim == 2)
            turned = [base.transpose(p) for p in itertools.permutations(range(base.ndim))]
            assert any(view.tobytes() == x.tobytes() for view in turned if view.shape == x.shape)


@st.composite
def planted(draw: Any) -> dict[str, np.ndarray]:
    """Arrays, readings of them, and readings with one bit changed."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    dtype = draw(st.sampled_from(["uint8", "float16", "float32", "float64"]))
    size = np.dtype(dtype).itemsize
    arrays = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from([(12,), (4, 6), (6, 4), (12, 2), (5, 5), (2, 3, 4),
                                      (3, 3, 3), (2, 3, 2, 4), (2, 1, 6)]))  # fmt: skip
        base = rng.integers(0, 256, (*shape, size), np.uint8).view(dtype).reshape(shape)
        arrays[f"{number}"] = base
        for copy in range(draw(st.integers(0, 4))):
            x = base
            for _ in range(draw(st.integers(0, 2))):
                x = draw(st.sampled_from(STEPS))(draw, x)
            x = own(x)
            if draw(st.booleans()):
                x = changed(x, draw(st.integers(0, x.nbytes - 1)))
            arrays[f"{number}.{copy}"] = x
    order = draw(st.permutations(list(arrays)))
    return {name: arrays[name] for name in order}


def permuted(draw: Any, x: np.ndarray) -> np.ndarray:
    return x.transpose(draw(st.permutations(range(x.ndim))))


def reshaped(draw: Any, x: np.ndarray) -> np.ndarray:
    first = draw(st.sampled_from([n for n in range(1, x.size + 1) if x.size % n == 0]))
    return own(x).reshape(first, -1)


def block(draw: Any, x: np.ndarray) -> np.ndarray:
    return x[: draw(st.integers(1, len(x)))]


STEPS = (permuted, reshaped, block)


@LAW
@given(planted())
def test_all_that_is_planted_is_found_and_nothing_else(arrays: dict[str, np.ndarray]) -> None:
    told = discover(arrays, least=1)
    assert_sound(arrays, told)
    names = {finding.name for finding in told.findings}
    swapped = [x for x in told.findings if _order(arrays, x.name) < _order(arrays, x.of)]
    if not swapped:  # else another one was kept, of which the rest may be no views
        assert expected(arrays, names) <= names


def _order(arrays: dict[str, np.ndarray], name: str) -> tuple[int, int]:
    return -arrays[name].size, list(arrays).index(name)


@LAW
@given(st.data())
def test_arrays_of_few_values_where_much_is_alike(data: st.DataObject) -> None:
    """Here much is equal by chance, and samples are alike that arrays are not."""
    shapes = st.sampled_from(
        [(2, 2), (2, 3), (3, 2), (4,), (3,), (2, 2, 2), (8,), (40, 2), (2, 40)]
    )
    arrays = {}
    for number in range(data.draw(st.integers(2, 12))):
        shape = data.draw(shapes)
        x = np.zeros(shape, np.uint8)
        for _ in range(data.draw(st.integers(1, 3))):
            x[tuple(data.draw(st.integers(0, n - 1)) for n in shape)] = 1
        arrays[f"{number}"] = x
    told = discover(arrays, least=1)
    assert_sound(arrays, told)
    if all(_order(arrays, x.of) < _order(arrays, x.name) for x in told.findings):
        names = {finding.name for finding in told.findings}
        assert expected(arrays, names) <= names
