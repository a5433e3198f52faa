"""NumPy and its serializers: the kinds of report of the field, each as tied handles it.

`J66` and the like are the numbers of the project's list of field reports.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tied

VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "itself": lambda a: a[:],
    "transpose": lambda a: a.T,
    "rows": lambda a: a[1:3],
    "columns": lambda a: a[:, 1:3],
    "strided": lambda a: a[::2, ::2],
    "flipped": lambda a: a[::-1, ::-1],
    "reshaped": lambda a: a.reshape(-1),
    "diagonal": np.diagonal,
    "fortran": lambda a: a.reshape((2, 8), order="A"),
    "broadcast": lambda a: np.broadcast_to(a, (3, 4, 4)),
    "windows": lambda a: np.lib.stride_tricks.sliding_window_view(a, 2, axis=1),
}


def square() -> np.ndarray:
    return np.arange(16.0).reshape(4, 4)


@pytest.fixture(params=VIEWS)
def model(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    a = square()
    return {"a": a, "v": VIEWS[request.param](a)}


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "copy": tied.copy,
    "f32_and_back": lambda m: tied.f64(tied.f32(m)),
    "pickle_of_split": lambda m: tied.merge(*pickle.loads(pickle.dumps(tied.split(m)))),
    "map": lambda m: tied.map(np.copy, m),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_M13_what_deepcopy_pickle_and_astype_break_is_kept(operation: str, model: Any) -> None:
    after = OPERATIONS[operation](model)
    assert np.shares_memory(after["a"], after["v"])
    assert tied.ties(after).groups == (("a", "v"),)
    np.testing.assert_array_equal(after["v"], model["v"])
    assert not np.shares_memory(after["a"], model["a"])
    after["a"][:] = -1
    assert (after["v"] == -1).all()
    broken = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert all(tied.compare(model, other).lost for other in broken)


def test_M13_a_pickle_of_split_holds_each_element_once() -> None:
    big = np.zeros(10_000)
    models = [(big, big), (big, big[:]), (big, big[::-1]), (big.reshape(100, 100).T, big)]
    models.append((big, np.broadcast_to(big, (1_000, 10_000))))
    for model in models:
        assert len(pickle.dumps(tied.split(model))) < big.nbytes + 4_000
    piece = {"a": big[:10], "b": big[5:15]}
    assert len(pickle.dumps(tied.split(piece))) < 15 * 8 + 4_000


# --------------------------------------------------- J66: which aliases are there, as a cache's key


def key(model: Any) -> str:
    """What joblib's cache lacks: contents and which of them are one."""
    report = tied.ties(model).to_dict()
    digest = hashlib.sha256(repr(report).encode())
    for storage in tied.split(model)[1].values():
        digest.update(np.ascontiguousarray(storage).tobytes())
    return digest.hexdigest()


def test_J66_aliased_and_equal_arguments_are_told_apart(model: Any) -> None:
    """joblib#121: a cache keyed by contents answers foo(a, a[:]) with foo(a, copy)."""
    untied = {"a": model["a"], "v": model["v"].copy()}
    assert key(model) != key(untied)
    assert key(model) == key(tied.copy(model))
    assert key(untied) == key(tied.copy(untied))
    assert hash(tied.split(model)[0]) != hash(tied.split(untied)[0])
    assert tied.split(model)[0] == tied.split(tied.copy(model))[0]


# ------------------------------------------------------------------ J68: arrays on foreign memory


def test_J68_an_array_on_shared_memory_comes_back_with_its_values() -> None:
    """numpy#25561: it is unpickled without the link to the shared memory; views are kept."""
    block = shared_memory.SharedMemory(create=True, size=128)
    try:
        a = np.ndarray((4, 4), buffer=block.buf)
        a[:] = square()
        model = {"a": a, "t": a.T}
        after = tied.merge(*pickle.loads(pickle.dumps(tied.split(model))))
        assert tied.ties(after).groups == (("a", "t"),)
        a[:] = 0
        np.testing.assert_array_equal(after["t"], square().T)
        del a, model
    finally:
        block.close()
        block.unlink()


def test_J68_two_arrays_over_one_shared_memory_are_a_tie() -> None:
    block = shared_memory.SharedMemory(create=True, size=128)
    try:
        model = {"a": np.ndarray(16, buffer=block.buf), "b": np.ndarray(8, buffer=block.buf)}
        assert tied.ties(model).groups == (("a", "b"),)
        del model
    finally:
        block.close()
        block.unlink()


MAKERS: dict[str, Callable[[bytearray], np.ndarray]] = {
    "frombuffer": lambda b: np.frombuffer(b, np.uint8),
    "memoryview": lambda b: np.asarray(memoryview(b)),
    "ndarray": lambda b: np.ndarray(16, np.uint8, buffer=b),
}


@pytest.mark.parametrize("one", MAKERS)
@pytest.mark.parametrize("other", MAKERS)
def test_J70_memory_decides_and_not_base(one: str, other: str) -> None:
    """numpy#10043, #21940: `.base` is not what the view was taken of, or is no base at all."""
    memory = bytearray(16)
    model = {"a": MAKERS[one](memory), "b": MAKERS[other](memory)[4:]}
    assert tied.ties(model).groups == (("a", "b"),)
    after = tied.copy(model)
    after["b"][0] = 7
    assert after["a"][4] == 7
    assert memory[4] == 0


def test_J70_collapsed_bases_and_copies_with_a_base() -> None:
    a = np.arange(12)
    model = {"one": a.reshape(3, 4).view(), "other": a.reshape(3, 4).T.view()[1:]}
    assert model["one"].base is model["other"].base is a
    assert tied.ties(model).groups == (("one", "other"),)
    fresh = np.arange(12).reshape(3, 4).repeat(2, axis=0)[:, ::2]
    assert fresh.base is not None
    assert tied.ties({"a": a, "fresh": fresh}).groups == ()


def test_J69_is_it_a_view_or_a_copy() -> None:
    """numpy#8534: asks for isview and iscopy."""
    a = square()
    for view in VIEWS.values():
        assert tied.shares(a, view(a))
        assert not tied.shares(a, view(a).copy())
    assert not tied.shares(a, a[[0, 1]])
    assert not tied.shares(a[:, 0], a[:, 1])
    assert not tied.shares(a[:0], a[:0])
    assert tied.shares({"deep": [a]}, {"row": a[2]})


def test_J71_object_arrays_over_one_memory_keep_their_arrays_tied() -> None:
    """numpy#24478: an object array that is another object over the same memory."""
    a = square()
    boxes = np.empty(2, dtype=object)
    boxes[0], boxes[1] = a, a.T
    after = tied.copy({"boxes": boxes, "row": a[0]})
    assert after["boxes"].dtype == object
    assert after["boxes"] is not boxes
    assert tied.ties(after).groups == (("boxes.0", "boxes.1", "row"),)


def test_J73_views_of_a_base_that_is_not_there() -> None:
    """jsonpickle#612: the table of ids came out of step for views with a shared base."""
    a = np.arange(100.0)
    model = [a[10:20], a[15:25], a[10:20], [a[40:], a[90:]]]
    after = tied.merge(*pickle.loads(pickle.dumps(tied.split(model))))
    assert tied.ties(after).groups == (("0", "1", "2"), ("3.0", "3.1"))
    for x, y in zip([*after[:3], *after[3]], [*model[:3], *model[3]], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("view", ["transpose", "columns", "diagonal", "fortran", "strided"])
def test_J74_M12_an_array_alone_in_any_order_of_memory_keeps_its_values(view: str) -> None:
    """safetensors#825: strided arrays were written as raw memory: silent garbage."""
    x = VIEWS[view](np.asfortranarray(square()))
    skeleton, storages = tied.split({"x": x})
    assert list(storages) == ["x"]
    np.testing.assert_array_equal(storages["x"], x)
    after = tied.merge(*pickle.loads(pickle.dumps((skeleton, storages))))
    np.testing.assert_array_equal(after["x"], x)
    np.testing.assert_array_equal(tied.f32({"x": x})["x"], x)
    moved = tied.to(tied.to({"x": x}, "torch"), "numpy")
    np.testing.assert_array_equal(moved["x"], x)


def test_J75_shared_arrays_are_not_refused_and_stored_once(model: Any) -> None:
    """safetensors#98, #304, #493: shared tensors refused."""
    assert list(tied.split(model)[1]) == ["a"]
    assert tied.ties(model).parameters == 16


# ------------------------------------------------------------------------------- mapped files


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_file_is_read_and_never_written(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    square().tofile(path)
    mapped = np.memmap(path, np.float64, mode, shape=(4, 4))
    model = {"w": mapped, "t": mapped.T, "row": np.asarray(mapped)[1]}
    assert tied.ties(model).groups == (("w", "t", "row"),)
    after = tied.map(lambda x: x * 2, model)
    assert tied.ties(after).groups == (("w", "t", "row"),)
    np.testing.assert_array_equal(after["t"], 2 * square().T)
    assert tied.f64(model)["w"] is mapped
    np.testing.assert_array_equal(np.fromfile(path), square().ravel())
