"""Law 8 for files: `load(save(m))` gives back values, dtypes and ties, of random models."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import format_reader
import kinds
import oracle
import tied
from recipes import LIBRARIES
from strategies import DTYPES, LAW, recipes
from test_laws import law

STORED = {
    library: tuple(name for name in names if name != "structured")
    for library, names in DTYPES.items()
}


@pytest.fixture(autouse=True, scope="module")
def _no_waiting() -> Iterator[None]:
    """That saves are durable is tested elsewhere; here it would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def draw(data: Any, library: str, **more: Any) -> Any:
    return data.draw(recipes(library, dtypes=STORED[library], **more))


def named(model: Any) -> list[tuple[str, Any]]:
    """The arrays of a model under the names that files have for them; None where names meet."""
    found = [(leaf.path, leaf) for storage in tied.ties(model).storages for leaf in storage.leaves]
    return [(path, oracle.resolve(model, path)) for path, _ in found]


def saved(model: Any, folder: str, **how: Any) -> Path:
    with warnings.catch_warnings():
        if how.get("expand"):
            warnings.simplefilter("ignore", tied.UntiedWarning)
        return tied.save(model, Path(folder) / "model.safetensors", **how)


def assert_same(model: Any, loaded: dict[str, Any], *, ties: bool = True) -> None:
    """Each name has the value, the dtype and the shape of the array, and shares what it shares."""
    members = named(model)
    assert {name for name, _ in members} <= loaded.keys()
    found = [(name, array, loaded[name]) for name, array in members]
    for name, before, after in found:
        x, y = kinds.value(before), kinds.value(after)
        assert (str(x.dtype), x.shape, x.tobytes()) == (str(y.dtype), y.shape, y.tobytes()), name
    if ties:
        assert kinds.pattern([x for _, x, _ in found], "bytes") == kinds.pattern(
            [y for _, _, y in found], "bytes"
        )


@law
def test_law_8_load_of_save(library: str, data: Any) -> None:
    recipe = draw(data, library)
    model = recipe.build().model
    how = data.draw(st.sampled_from([{}, {"max_shard_bytes": 1}, {"max_shard_bytes": 60}]))
    mapped = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        path = saved(model, folder, **how)
        assert_same(model, tied.load(path, framework=library, mapped=mapped))


@law
def test_law_8_across_libraries(library: str, data: Any) -> None:
    """What one library wrote the others read, with the ties of the one that wrote."""
    dtypes = tuple(d for d in STORED[library] if d not in ("float64", "int64"))
    recipe = data.draw(recipes(library, dtypes=dtypes, reinterpret=False))
    model = recipe.build().model
    with tempfile.TemporaryDirectory() as folder:
        path = saved(model, folder)
        for framework in LIBRARIES:
            assert_same(model, tied.load(path, framework=framework))


@law
def test_law_8_expanded(library: str, data: Any) -> None:
    """Every name is a tensor with its values; those that some tensor holds are tied as well."""
    model = draw(data, library).build().model
    with tempfile.TemporaryDirectory() as folder:
        path = saved(model, folder, expand=True)
        assert_same(model, tied.load(path, framework=library), ties=False)
        read = format_reader.read_file(path)
        for name, array in named(model):
            assert read.data[name] == kinds.value(array).tobytes()


@law
def test_law_8_the_page_reads_what_was_written(library: str, data: Any) -> None:
    model = draw(data, library).build().model
    with tempfile.TemporaryDirectory() as folder:
        read = format_reader.read(saved(model, folder))
    for name, array in named(model):
        value = kinds.value(array)
        assert (read[name].shape, read[name].data) == (value.shape, value.tobytes())


@law
def test_law_8_load_into(library: str, data: Any) -> None:
    """Into a model of the same plan that has other values: it becomes the one that was saved."""
    recipe = draw(data, library, reinterpret=False)
    model, other = recipe.build().model, recipe.build()
    with tempfile.TemporaryDirectory() as folder:
        path = saved(model, folder)
        target = tied.map(lambda a: a * 0, other.model)
        if not writable(target):
            return
        loaded = tied.load_into(target, path)
    oracle.assert_same(model, loaded.model)
    assert not tied.compare(model, loaded.model)
    assert not loaded.missing
    assert not loaded.unexpected


def writable(model: Any) -> bool:
    return all(getattr(getattr(x, "flags", None), "writeable", True) for x in oracle.arrays(model))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@LAW
@given(data=st.data())
def test_law_5_holds_for_what_was_loaded(library: str, data: Any) -> None:
    """A write through one name is seen through all, and not in the file."""
    built = data.draw(recipes(library, reinterpret=False, dtypes=("float32",))).build()
    with tempfile.TemporaryDirectory() as folder:
        path = saved(built.model, folder)
        content = path.read_bytes()
        members = [(name, x) for name, x in named(built.model) if 0 not in x.shape]
        if not members:
            return
        loaded = tied.load(path, framework=library)
        chosen, array = data.draw(st.sampled_from(members))
        places = {id(x): oracle.positions(x) for x in oracle.arrays(built.model)}
        written = oracle.byte_set(places[id(array)])
        if len(written) < 4 * places[id(array)][0].size:
            return  # torch refuses to fill where one element is read twice
        loaded[chosen].fill(-5) if library == "numpy" else loaded[chosen].fill_(-5)
        for name, before in members:
            starts, _ = places[id(before)]
            hit = np.vectorize(lambda place: int(place) in written, otypes=[bool])(starts)
            expected = np.where(hit, np.float32(-5), oracle.numpy(before))
            assert (oracle.numpy(loaded[name]) == expected).all()
        assert path.read_bytes() == content
