"""`save` and `load` of every kind of tie in every library; files that are mapped, or expanded."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
import safetensors.torch

import kinds
import tied
from files import ALL, array, assert_members
from kinds import KINDS, REINTERPRETED

STORED = [name for name, kind in KINDS.items() if not kind.meta and kind.dtype != "structured"]
CASES = [pytest.param(name, library, id=f"{name}-{library}")
         for name in STORED for library in KINDS[name].libraries]  # fmt: skip
ONE_OBJECT = ("same_object", "same_layer_twice", "same_buffer_twice",
              "second_array_over_the_same_data")  # fmt: skip
each_library = pytest.mark.parametrize("library", ALL)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# -------------------------------------------------------------------------------- every kind


@pytest.mark.parametrize("sharded", [False, True], ids=["one", "shards"])
@pytest.mark.parametrize(("name", "library"), CASES)
def test_every_kind_in_every_library(
    name: str, library: str, sharded: bool, tmp_path: Path
) -> None:
    """Written by one library, read by each, mapped and not."""
    kind = KINDS[name]
    model = kind.model(library)
    how = {"max_shard_bytes": 1} if sharded else {}
    path = tied.save(model, tmp_path / "model.safetensors", **how)
    for framework in ALL:
        if framework == "jax" and name in REINTERPRETED:
            continue
        for mapped in (True, False):
            loaded = tied.load(path, framework=framework, mapped=mapped)
            assert list(loaded) == list(kind.paths)
            found = [loaded[name] for name in kind.paths]
            assert_members(kind.members(model), found)
            assert (found[0] is found[1]) == (name in ONE_OBJECT)
            if framework == library or library != "jax":  # a View is told by its base
                assert not tied.compare(model, loaded), str(tied.compare(model, loaded))


@pytest.mark.parametrize("name", sorted(REINTERPRETED - {"field"}))
def test_jax_reads_no_bits_as_another_dtype(name: str, file: Path) -> None:
    tied.save(KINDS[name].model("numpy"), file)
    with pytest.raises(tied.TieError) as caught:
        tied.load(file, framework="jax")
    assert caught.value.paths == ("second", "first")
    assert "expand=True" in str(caught.value)


def test_jax_reads_such_views_where_they_are_written_out(file: Path) -> None:
    tied.save(KINDS["real_part"].model("numpy"), file, expand=True)
    loaded = tied.load(file, framework="jax")
    assert np.asarray(loaded["second"]).tolist() == np.asarray(loaded["first"]).real.tolist()


@pytest.mark.parametrize("name", STORED)
def test_load_into_every_kind(name: str, file: Path) -> None:
    kind = KINDS[name]
    for library in kind.libraries:
        model, empty = kind.model(library), tied.map(lambda a: a * 0, kind.model(library))
        tied.save(model, file)
        loaded = tied.load_into(empty, file)
        assert (loaded.model is empty) == (library != "jax")
        assert (loaded.missing, loaded.unexpected) == ((), ())
        assert_members(kind.members(model), kind.members(loaded.model))
        assert not tied.compare(model, loaded.model)


# ----------------------------------------------------------------------------- expanded files


@pytest.mark.parametrize("name", STORED)
def test_an_expanded_file_is_read_by_safetensors_itself(name: str, file: Path) -> None:
    kind = KINDS[name]
    memory = kind.memory()
    model = kind.model("numpy" if "numpy" in kind.libraries else "torch")
    if name == "partial_overlap":
        with pytest.warns(tied.UntiedWarning) as caught:
            tied.save(model, file, expand=True)
        assert [str(warning.message) for warning in caught] == [
            "expand=True writes first, second apart: no tensor holds them all"
        ]
        assert caught[0].filename == __file__
    else:
        tied.save(model, file, expand=True)
    for load in (safetensors.numpy.load_file, safetensors.torch.load_file,
                 safetensors.flax.load_file):  # fmt: skip
        loaded = load(file)
        assert sorted(loaded) == sorted(kind.paths)
        for path, value in zip(kind.paths, kind.read(memory), strict=True):
            found = kinds.value(loaded[path])
            assert (found.shape, found.tobytes()) == (value.shape, value.tobytes())


@pytest.mark.parametrize("name", STORED)
def test_the_storages_are_read_by_safetensors_itself(name: str, file: Path) -> None:
    kind = KINDS[name]
    model = kind.model("torch") if "torch" in kind.libraries else kind.model("numpy")
    tied.save(model, file)
    loaded = safetensors.numpy.load_file(file)
    storages = tied.split(model)[1]
    assert len(loaded) == len(storages)
    for key, value in storages.items():
        if name != "partial_overlap":
            assert loaded[key].tobytes() == kinds.value(value).tobytes()
    stored = sum(x.nbytes for x in loaded.values())
    assert stored == sum(kinds.value(x).nbytes for x in storages.values())


# ------------------------------------------------------------------------------------- mapped


def test_a_write_to_a_mapped_array_stays_in_memory(file: Path) -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    tied.save({"w": w, "t": w.T}, file)
    before = file.read_bytes()
    for framework in ("numpy", "torch"):
        loaded = tied.load(file, framework=framework)
        loaded["t"][0, 1] = -1
        assert float(loaded["w"][1, 0]) == -1
        assert file.read_bytes() == before
        assert float(tied.load(file)["w"][1, 0]) == 3


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_what_is_not_mapped_does_not_need_the_file(framework: str, file: Path) -> None:
    w = np.arange(6, dtype=np.float32)
    tied.save({"w": w, "half": w[3:]}, file)
    loaded = tied.load(file, framework=framework, mapped=False)
    with file.open("r+b") as opened:
        opened.seek(-24, 2)
        opened.write(bytes(24))
    assert loaded["half"].tolist() == [3, 4, 5]
    loaded["w"][3] = 9
    assert float(loaded["half"][0]) == 9


def test_mapped_arrays_outlive_a_save_to_their_own_file(file: Path) -> None:
    tied.save({"w": np.arange(6, dtype=np.float32)}, file)
    loaded = tied.load(file)
    loaded["w"][0] = 5
    tied.save({"w": loaded["w"], "again": loaded["w"]}, file)
    assert loaded["w"].tolist() == [5, 1, 2, 3, 4, 5]
    assert tied.load(file)["again"].tolist() == [5, 1, 2, 3, 4, 5]
    shutil.rmtree(file.parent)
    assert loaded["w"].tolist() == [5, 1, 2, 3, 4, 5]


def test_arrays_are_writable_and_aligned_by_their_dtype(file: Path) -> None:
    tied.save({"b": np.ones(3, bool), "w": np.ones(3, "float64"), "h": np.ones(3, "f2")}, file)
    for x in tied.load(file).values():
        assert x.flags.writeable
        assert x.flags.aligned


@each_library
def test_a_file_of_each_library_is_the_same_file(library: str, tmp_path: Path) -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    tied.save({"w": w, "again": w}, tmp_path / "a.safetensors")
    same = array(library, w, "float32")
    tied.save({"w": same, "again": same}, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
