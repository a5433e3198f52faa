"""The cases and reports that concern files, by name, and what holds arrays in each framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.torch
import torch
from flax import nnx

import format_reader
import kinds
import tied


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def data_bytes(path: Path) -> int:
    """The bytes behind the header."""
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


# --------------------------------------------------------------------------------- the cases


def test_h10_what_is_saved_is_a_snapshot(file: Path) -> None:
    """H10, X7: a later step of the model is no change of the file."""
    w = np.zeros((2, 3), np.float32)
    tied.save({"w": w, "t": w.T}, file)
    before = file.read_bytes()
    w += 1
    assert file.read_bytes() == before
    assert tied.load(file)["t"].tolist() == np.zeros((3, 2)).tolist()


def test_h11_nan_weights_come_back_and_agree(file: Path) -> None:
    w = torch.full((2, 3), float("nan"))
    tied.save({"w": w, "t": w.T}, file)
    model = {"w": torch.zeros(2, 3), "t": None}
    model["t"] = model["w"].T
    tied.load_into(model, file)
    assert model["t"].isnan().all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_h15_a_slice_of_ten_floats_of_a_large_buffer_is_40_bytes(library: str, file: Path) -> None:
    """H15, T28: elsewhere the whole buffer is written."""
    buffer = np.zeros(1_000_000, np.float32)
    buffer = torch.from_numpy(buffer) if library == "torch" else buffer
    path = tied.save({"w": buffer[500:510], "again": buffer[500:510]}, file)
    assert data_bytes(path) == 40
    assert path.stat().st_size < 400


def test_h15_in_jax(file: Path) -> None:
    buffer = jnp.zeros(1_000_000, jnp.float32)
    view = tied.view(buffer, lambda a: a[500:510])
    assert data_bytes(tied.save({"w": view, "again": view}, file)) == 40


def test_j1_one_object_in_two_places(file: Path) -> None:
    """J1: `t3.t1 is t3.t2.t1` after a round trip."""
    w = np.ones(3)
    model = {"t3": {"t1": w, "t2": {"t1": w}}}
    loaded = tied.load(tied.save(model, file))
    assert loaded["t3.t1"] is loaded["t3.t2.t1"]
    fresh = {"t3": {"t1": (v := np.zeros(3)), "t2": {"t1": v}}}
    tied.load_into(fresh, file)
    assert fresh["t3"]["t1"] is fresh["t3"]["t2"]["t1"]
    assert v.tolist() == [1, 1, 1]


def test_j1_a_list_that_holds_itself(file: Path) -> None:
    w = np.ones(3)
    model: list[Any] = [w, w[1:]]
    model.append(model)
    loaded = tied.load(tied.save(model, file))
    assert [name for name in loaded if name in ("0", "1")] == ["0", "1"]
    assert tied.shares(loaded["0"], loaded["1"])


def test_j1_one_layer_twice(file: Path) -> None:
    """J50, M15: every name of a shared layer is in the file, its arrays once."""
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    path = tied.save(model, file)
    loaded = tied.load(path, framework="torch")
    assert sorted(loaded) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert loaded["0.weight"] is loaded["2.weight"]
    assert data_bytes(path) == 48
    model.load_state_dict(loaded, strict=True)


# -------------------------------------------------------------------------- failures of others


def test_disjoint_slices_are_all_in_the_file(file: Path, tmp_path: Path) -> None:
    """T43, T46: accelerate writes one of them, safetensors' `save_model` refuses."""
    flat = torch.arange(12.0)
    model = torch.nn.Module()
    for n in range(3):
        model.register_parameter(f"w{n}", torch.nn.Parameter(flat[4 * n : 4 * n + 4]))
    loaded = tied.load(tied.save(model, file), framework="torch")
    assert [loaded[f"w{n}"].tolist() for n in range(3)] == flat.reshape(3, 4).tolist()
    assert not tied.ties(loaded).tied
    assert data_bytes(file) == 48

    class Theirs(torch.nn.Module):
        """The module that accelerate is given."""

    theirs = Theirs()
    theirs.__dict__.update(model.__dict__)
    accelerate.Accelerator(cpu=True).save_model(theirs, tmp_path / "theirs")
    written = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    assert list(written) == ["w0"]
    with pytest.raises(RuntimeError, match="Error while trying to find names"):
        safetensors.torch.save_model(model, str(tmp_path / "theirs.safetensors"))


def test_a_transposed_tie(file: Path, tmp_path: Path) -> None:
    """The thread's own, T44: `save_file` refuses it, and everyone adds `.contiguous()`."""
    model = torch.nn.ModuleDict({"enc": torch.nn.Linear(3, 2), "dec": torch.nn.Linear(2, 3)})
    model["dec"].weight = torch.nn.Parameter(model["enc"].weight.detach().T)
    loaded = tied.load(tied.save(model, file), framework="torch")
    assert torch.equal(loaded["dec.weight"], loaded["enc.weight"].T)
    assert not tied.compare(model, loaded)
    with pytest.raises(RuntimeError):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "theirs.safetensors")


def test_views_within_a_view(file: Path) -> None:
    """T42: neighbours are compared there, and the overlap of the first with the third is missed."""
    a = torch.arange(100.0)
    model = {"a": a, "b": a[10:20], "c": a[30:40]}
    found = safetensors.torch._find_shared_tensors(model)
    assert sorted(map(sorted, found)) == [["a", "b"], ["c"]]
    loaded = tied.load(tied.save(model, file), framework="torch")
    assert not tied.compare(model, loaded)
    assert data_bytes(file) == 400


def test_empty_tensors_are_no_tie(file: Path) -> None:
    """T41: pointer 0 of every empty tensor."""
    model = {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.ones(1)}
    loaded = tied.load(tied.save(model, file), framework="torch")
    assert [tuple(x.shape) for x in loaded.values()] == [(0,), (0, 3), (1,)]
    assert "tied" not in format_reader.read_file(file).metadata


def test_equal_values_are_no_tie(file: Path) -> None:
    """T54 the other way round: only what shares memory is tied."""
    loaded = tied.load(tied.save({"a": np.ones(3), "b": np.ones(3)}, file))
    assert not tied.shares(loaded["a"], loaded["b"])


def test_other_readers_find_the_alias(file: Path) -> None:
    """T51, T52, T53: a tied head is told in the form that Hugging Face's readers know."""
    w = torch.ones(3, 2)
    tied.save({"model.embed_tokens.weight": w, "lm_head.weight": w}, file)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["lm_head.weight"] == "model.embed_tokens.weight"
        assert list(opened.keys()) == ["model.embed_tokens.weight"]


def test_a_file_of_safetensors_own_save_model(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_model(model, str(path))
    loaded = tied.load(path, framework="torch")
    assert sorted(loaded) == sorted(model.state_dict())
    assert loaded["a.weight"] is loaded["b.weight"]


# ------------------------------------------------------------------------------------- shards


def test_ties_across_shards(tmp_path: Path) -> None:
    """T50: the alias is in the file of its storage, wherever its neighbours are."""
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    model = {"first": w, "between": np.ones(40, "f4"), "t": w.T, "after": np.zeros(40, "f4"),
             "row": w[1], "same": w}  # fmt: skip
    index = tied.save(model, tmp_path / "model", max_shard_bytes=160)
    told = json.loads(index.read_text())
    assert sorted(told["weight_map"]) == ["after", "between", "first"]
    assert len({*told["weight_map"].values()}) == 3
    assert told["metadata"]["total_size"] == 128 + 160 + 160
    for path in (index, index.parent):
        loaded = tied.load(path)
        assert sorted(loaded) == sorted(model)
        assert loaded["same"] is loaded["first"]
        assert not tied.compare(model, loaded)
    assert not tied.compare(model, tied.load_into(tied.map(lambda a: a * 0, model), index).model)


def test_shards_are_no_larger_than_asked(tmp_path: Path) -> None:
    model = {f"n{n}": np.ones(n + 1, np.float32) for n in range(30)}
    index = tied.save(model, tmp_path, max_shard_bytes=100)
    assert all(data_bytes(file) <= 100 or len(format_reader.read(file)) == 1
               for file in tmp_path.glob("*.safetensors"))  # fmt: skip
    loaded = tied.load(index)
    assert {name: x.shape for name, x in loaded.items()} == {k: v.shape for k, v in model.items()}


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    path = tied.save({"w": np.ones(3)}, tmp_path / "new", max_shard_bytes=1000)
    assert path == tmp_path / "new" / "model.safetensors"
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


# ---------------------------------------------------------------------- what holds the arrays


def test_an_optimizer_and_its_state(file: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tied.save({"module": module, "optimizer": optimizer}, file)
    loaded = tied.load(file, framework="torch")
    assert not tied.compare({"module": module, "optimizer": optimizer}, loaded)
    other = torch.nn.Linear(3, 2)
    again = torch.optim.Adam(other.parameters(), lr=0.1)
    other(torch.zeros(3)).sum().backward()
    again.step()
    again.zero_grad()
    tied.load_into({"module": other, "optimizer": again}, file)
    assert torch.equal(other.weight, module.weight)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        state, fresh = optimizer.state[p], again.state[q]
        assert all(torch.equal(fresh[key], state[key]) for key in state)


def test_optax_states_are_read_back_by_name(file: Path) -> None:
    """M6: some states share their arrays from the start."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}
    state = optax.lbfgs().init(params)
    tied.save({"params": params, "state": state}, file)
    model = {"params": params, "state": state}
    loaded = tied.load_into(tied.map(lambda a: a + 1, model), file).model
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True):
        assert (x == y).all()
    assert not tied.compare(model, loaded)


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(5, 3, rngs=rngs)
        self.head = nnx.Linear(3, 5, rngs=rngs)
        self.head.kernel = nnx.Param(jnp.zeros((3, 5)))
        self.again = self.embed


def test_nnx_modules(file: Path) -> None:
    """M8: one module in two places."""
    model, other = Tied(nnx.Rngs(0)), Tied(nnx.Rngs(1))
    tied.save(model, file)
    loaded = tied.load_into(other, file).model
    assert loaded.again is loaded.embed
    assert (loaded.embed.embedding[...] == model.embed.embedding[...]).all()
    read = tied.load(file, framework="jax")
    assert any(np.array_equal(x, model.embed.embedding[...]) for x in read.values())


def test_equinox_modules(file: Path) -> None:
    """M7: an array that is tied by reference is saved once, and loaded tied."""
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    twin = eqx.tree_at(lambda m: m.weight, linear, linear.weight)
    model = {"a": linear, "b": twin}
    path = tied.save(model, file)
    assert data_bytes(path) == 9 * 4 + len({id(linear.bias), id(twin.bias)}) * 3 * 4
    loaded = tied.load_into(tied.map(lambda a: a * 0, model), file).model
    assert loaded["a"].weight is loaded["b"].weight
    assert eqx.tree_equal(loaded, model)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_of_jax(impl: str, file: Path) -> None:
    """Their numbers are in the file, and of which kind they are in the table."""
    key = jax.random.key(3, impl=impl)
    model = {"one": key, "again": key, "many": jax.random.split(key, (2, 3)), "w": jnp.ones(2)}
    tied.save(model, file)
    loaded = tied.load(file, framework="jax")
    assert loaded["one"] is loaded["again"]
    assert loaded["many"].shape == (2, 3)
    assert loaded["many"].dtype == model["many"].dtype
    assert (jax.random.normal(loaded["one"], 4) == jax.random.normal(key, 4)).all()
    assert not tied.compare(model, loaded)
    numbers = tied.load(file)
    assert numbers["many"].tolist() == jax.random.key_data(model["many"]).tolist()
    other = {"one": (zero := jax.random.key(0, impl=impl)), "again": zero,
             "many": jax.random.split(zero, (2, 3)), "w": jnp.zeros(2)}  # fmt: skip
    into = tied.load_into(other, file).model
    assert (jax.random.key_data(into["many"]) == jax.random.key_data(model["many"])).all()
    assert into["one"] is into["again"]


def test_keys_of_another_kind_do_not_fit(file: Path) -> None:
    tied.save({"k": jax.random.key(3)}, file)
    with pytest.raises(tied.FileError) as caught:
        tied.load_into({"k": jax.random.key(3, impl="rbg")}, file)
    assert caught.value.paths == ("k",)


def test_a_masked_array_is_its_parts(file: Path) -> None:
    x = np.ma.masked_array(np.arange(3.0), [False, True, False])
    loaded = tied.load(tied.save({"x": x, "data": x.data}, file))
    assert sorted(loaded) == ["data", "x.data", "x.mask"]
    assert loaded["data"] is loaded["x.data"]


def test_what_holds_an_array_and_is_not_opened(file: Path) -> None:
    class Closed:
        __slots__ = ("inner",)

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("no")

    closed = Closed()
    closed.inner = np.ones(3)
    model = {"closed": closed, "w": np.ones(2)}
    with pytest.warns(tied.HiddenArrayWarning):
        tied.save(model, file)
    assert list(tied.load(file)) == ["w"]
    with pytest.raises(tied.HiddenArrayError):
        tied.save(model, file, hidden="raise")
    tied.save(model, file, hidden="keep")


def test_meta_tensors_have_nothing_to_save(file: Path) -> None:
    model = {"w": torch.ones(2), "inner": {"m": torch.empty(2, device="meta")}}
    with pytest.raises(tied.TiedError) as caught:
        tied.save(model, file)
    assert caught.value.paths == ("inner.m",)
    assert not file.exists()


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_the_model_is_not_changed(name: str, file: Path) -> None:
    model = kinds.KINDS["transpose"].model(name)
    before = [kinds.value(x).tobytes() for x in kinds.KINDS["transpose"].members(model)]
    tied.save(model, file)
    tied.save(model, file, expand=True)
    assert before == [kinds.value(x).tobytes() for x in kinds.KINDS["transpose"].members(model)]
