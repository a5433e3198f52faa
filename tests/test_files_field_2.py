"""Public reports on files of JAX, MLX, Keras, NumPy and serializers, and of flat buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from torch import nn

import tied
from commands import run, text
from files import ALL, array
from tied._checkpoint import open_checkpoint

W = np.arange(12, dtype="float32").reshape(4, 3)
each_library = pytest.mark.parametrize("library", ALL)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def groups(model: Any) -> tuple[tuple[str, ...], ...]:
    return tied.ties(model).groups


def stored(path: Path) -> set[str]:
    """The tensors that other readers see in a file."""
    with safetensors.safe_open(path, "np") as opened:
        return set(opened.keys())


# ---------------------------------------------------------------- JAX: keys that are not in a file


def tied_params(library: str, start: float = 0) -> dict[str, Any]:
    """GPT-2 as Flax has it: the head is the transpose of the embedding."""
    w = array(library, W + start, "float32")
    return {"wte": w, "lm_head": tied.transpose(w), "bias": array(library, [start] * 3, "float32")}


@each_library
def test_j36_j46_alias_keys_are_told_apart_from_missing_ones(library: str, file: Path) -> None:
    """J36, J46: what reads a storage that is there needs no value of its own."""
    safetensors.numpy.save_file({"wte": W + 1}, file)
    told = tied.load_into(tied_params(library), file, strict=False)
    assert (told.loaded, told.aliases, told.missing) == (("wte",), ("lm_head",), ("bias",))
    assert str(told) == "loaded 1 storages\nalias      lm_head\nmissing    bias"
    assert np.asarray(told.model["lm_head"]).tolist() == (W + 1).T.tolist()
    assert str(tied.ties(told.model)).splitlines()[1] == "  lm_head = wte.T"


@each_library
def test_j39_a_key_that_is_lacking_is_named(library: str, file: Path) -> None:
    """J39: elsewhere it stays zero, or a shape without a value, and nobody is told."""
    safetensors.numpy.save_file({"wte": W}, file)
    with pytest.raises(tied.FileError) as caught:
        tied.load_into(tied_params(library), file)
    assert caught.value.paths == ("bias",)
    assert str(caught.value) == (
        f"the checkpoint does not fit the model\n  file     {file}\n  missing  bias\n"
        "  Nothing was loaded; strict=False leaves what is missing, cast=True casts"
    )


def test_j45_tied_in_the_file_and_tied_after_a_step(file: Path) -> None:
    """J45: the same after a step of training, whoever made the model."""
    tied.save(tied_params("numpy"), file)
    for params in (tied.load(file, framework="jax"),
                   tied.load_into(tied_params("jax", 5), file).model):  # fmt: skip
        skeleton, leaves = tied.split(params)
        assert len(leaves) == 2

        def loss(x: Any, skeleton: Any = skeleton) -> Any:
            model = tied.merge(skeleton, x)
            return jnp.sum(model["wte"][1]) + 10 * jnp.sum(jnp.asarray(model["lm_head"])[:, 1])

        gradient = jax.grad(loss)(leaves)
        stepped = tied.merge(skeleton, jax.tree.map(jnp.subtract, leaves, gradient))
        assert np.asarray(stepped["wte"])[1].tolist() == (W[1] - 11).tolist()
        assert np.asarray(stepped["lm_head"])[:, 1].tolist() == (W[1] - 11).tolist()
        assert groups(stepped) == (("wte", "lm_head"),)


# --------------------------------------------------------------------------------------------- MLX


class Listed(nn.Module):
    """A layer that is an attribute, and again in a list."""

    def __init__(self, start: float = 0) -> None:
        super().__init__()
        self.input = nn.Linear(3, 4)
        self.layers = nn.Sequential(self.input, nn.Linear(4, 3))
        nn.init.constant_(self.input.weight, start)


def test_j50_j52_a_layer_under_two_names_is_written_once(file: Path) -> None:
    """J50, J52: elsewhere `parameters()` has it twice."""
    tied.save(Listed(5), file)
    assert stored(file) == {"input.weight", "input.bias", "layers.1.weight", "layers.1.bias"}
    assert open_checkpoint(file).nbytes == 4 * (12 + 4 + 12 + 3)
    loaded, model = tied.load(file), Listed()
    assert loaded["layers.0.weight"] is loaded["input.weight"]
    told = tied.load_into(model, file)
    assert told.aliases == ("layers.0.weight", "layers.0.bias")
    assert model.layers[0] is model.input
    assert model.layers[0].weight.tolist() == [[5] * 3] * 4


@each_library
def test_j53_both_keys_in_the_file_and_one_in_the_model(library: str, file: Path) -> None:
    """J53: the other one is named; a model that has both takes it."""
    safetensors.numpy.save_file({"wte": W, "lm_head": W.copy()}, file)
    w = array(library, W + 1, "float32")
    told = tied.load_into({"wte": w, "lm_head": w}, file)
    assert (told.aliases, told.unexpected) == (("lm_head",), ())
    assert told.model["wte"] is told.model["lm_head"]
    with pytest.raises(tied.FileError) as caught:
        tied.load_into({"wte": array(library, W, "float32")}, file)
    assert caught.value.facts[1:] == (("unexpected", "lm_head"),)
    assert tied.load_into({"wte": w}, file, strict=False).unexpected == ("lm_head",)


# --------------------------------------------------------------------------------------- Keras / TF


@each_library
def test_j55_j56_one_variable_in_two_layers(library: str, file: Path) -> None:
    """J55, J56: one copy on disk, and one array again."""
    kernel = array(library, W, "float32")
    model = {"layers": [{"kernel": kernel, "bias": array(library, [n], "float32")}
                        for n in range(2)]}  # fmt: skip
    tied.save(model, file)
    assert stored(file) == {"layers.0.kernel", "layers.0.bias", "layers.1.bias"}
    loaded = tied.load(file, framework=library)
    assert loaded["layers.0.kernel"] is loaded["layers.1.kernel"]
    assert np.asarray(loaded["layers.1.kernel"]).tolist() == W.tolist()
    assert np.asarray(loaded["layers.1.bias"]).tolist() == [1]


def test_j58_j60_a_shared_sub_model_is_saved_and_reloaded(file: Path) -> None:
    """J58, J60: A siamese net: an encoder on both sides, inside of which a weight is shared too."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)
            self.down.weight = self.up.weight

    def siamese() -> nn.ModuleDict:
        encoder = Encoder()
        return nn.ModuleDict({"left": encoder, "right": encoder, "top": nn.Linear(3, 1)})

    model, other = siamese(), siamese()
    tied.save(model, file)
    assert open_checkpoint(file).nbytes == 4 * (9 + 3 + 3 + 3 + 1)
    told = tied.load_into(other, file)
    assert (told.missing, told.unexpected) == ((), ())
    for name, x in model.state_dict().items():
        assert torch.equal(x, other.state_dict()[name])
    both = [tuple(f"{side}.{name}" for side in ("left", "right") for name in names)
            for names in (("up.weight", "down.weight"), ("up.bias",), ("down.bias",))]  # fmt: skip
    assert sorted(groups(other)) == sorted(groups(dict(model.state_dict()))) == sorted(both)
    assert {frozenset(x) for x in groups(tied.load(file))} == {frozenset(x) for x in both}


@each_library
def test_j61_a_transposed_layer_can_be_reloaded(library: str, file: Path) -> None:
    """J61: the head reads the transpose."""
    tied.save(tied_params(library), file)
    assert stored(file) == {"wte", "bias"}
    model = tied.load_into(tied_params(library, 3), file).model
    assert np.asarray(model["lm_head"]).tolist() == W.T.tolist()
    assert not tied.compare(tied_params(library), model)


def test_j62_a_tied_file_into_a_model_without_the_tie(file: Path) -> None:
    """J62: both get the values, and stay apart."""
    tied.save({"wte": W, "lm_head": W.T}, file)
    model = {"wte": np.zeros((4, 3), "f4"), "lm_head": np.zeros((3, 4), "f4")}
    told = tied.load_into(model, file)
    assert (told.loaded, told.missing) == (("wte", "lm_head"), ())
    assert model["lm_head"].tolist() == W.T.tolist()
    assert groups(model) == ()


def test_j64_ties_that_differ_between_two_checkpoints(tmp_path: Path) -> None:
    """J64: a diff of ties."""
    train = tied.save({"a": W, "b": W, "c": W.copy()}, tmp_path / "train.safetensors")
    test = tied.save({"a": W, "b": W.copy(), "c": (c := W.copy())} | {"d": c.T},
                     tmp_path / "test.safetensors")  # fmt: skip
    ran = run("diff", train, test)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out == text("""
        only in B  d = c.T  (3, 4)  float32
        tie lost   b = a
        A and B differ (3 common names)
        """)
    assert run("diff", train, train).code == 0


# -------------------------------------------------------------------------- NumPy and serializers


@each_library
def test_t56_views_into_a_flat_buffer(library: str, file: Path) -> None:
    """T56: each part is saved with its own bytes, and neighbours are no tie."""
    flat = np.arange(100, dtype="float32")
    state = {"a": flat[:12].reshape(3, 4), "b": flat[12:18], "c": flat[50:54].reshape(2, 2)}
    if library == "torch":
        buffer = torch.from_numpy(flat)
        state = {"a": buffer[:12].view(3, 4), "b": buffer[12:18], "c": buffer[50:54].view(2, 2)}
    elif library == "jax":
        made = jnp.asarray(flat)
        state = {"a": tied.view(made, lambda x: x[:12].reshape(3, 4)),
                 "b": tied.view(made, lambda x: x[12:18]),
                 "c": tied.view(made, lambda x: x[50:54].reshape(2, 2))}  # fmt: skip
    tied.save(state, file)
    contents, loaded = open_checkpoint(file), tied.load(file)
    assert contents.nbytes == 88
    assert len({contents.source(name) for name in "abc"}) == 3
    if library != "jax":  # there a part of an array is a computed view, and its memory has no name
        assert stored(file) == {"a", "b", "c"}
    assert groups(loaded) == ()
    assert loaded["a"].tolist() == flat[:12].reshape(3, 4).tolist()
    assert loaded["b"].tolist() == flat[12:18].tolist()
    assert loaded["c"].tolist() == [[50, 51], [52, 53]]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_j66_a_cache_key_that_knows_aliasing(library: str) -> None:
    """J66: `foo(a, a[:])` and `foo(a, copy)` have equal contents and may have other results."""

    def key(*arguments: Any) -> str:
        return str(tied.ties(arguments).to_dict()["storages"])

    a, b = (array(library, W.copy(), "float32") for _ in range(2))
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert key(a, a[:]) == key(b, b[:])
    assert len({key(a, a[:]), key(a, b), key(a, a[1:]), key(a, a.T), key(a, a[::2])}) == 5
    assert key(a[:2], a[2:]) == key(a[:2], b[2:])  # apart, whatever the buffer


MODELS: dict[str, Any] = {
    "no base": lambda x: {"x": x[:12], "y": x[8:], "z": x[9:11]},
    "the base between": lambda x: {"x": x[2:5], "base": x, "y": x[10:], "x2": x[2:5]},
    "the base last": lambda x: {"x": x[:4], "y": x[16:], "other": x[:1] + 0, "base": x},
}


@pytest.mark.parametrize("shared", MODELS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_j73_views_with_a_shared_base(library: str, shared: str, file: Path) -> None:
    """J73: also where the base is not saved, or behind its views."""
    model = MODELS[shared](array(library, np.arange(20), "float32"))
    tied.save(model, file)
    loaded = tied.load(file, framework=library)
    assert not tied.compare(model, loaded)
    for name in model:  # what is written to one is seen by the same others
        for arrays in (model, loaded):
            arrays[name][:2] += 100
        assert {k: x.tolist() for k, x in loaded.items()} == {
            k: x.tolist() for k, x in model.items()
        }


ORDERS: dict[str, Any] = {
    "fortran": lambda a: np.asfortranarray(a),
    "transpose": lambda a: a.T,
    "columns": lambda a: a[:, 1:],
    "steps": lambda a: a[::2, ::2],
    "backwards": lambda a: a[::-1, ::-1],
    "diagonal": np.diagonal,
    "broadcast": lambda a: np.broadcast_to(a[0], (5, 3)),
    "swapped": lambda a: a.astype(">f4"),
}


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_j74_arrays_of_any_order_have_the_right_values(
    order: str, expand: bool, file: Path
) -> None:
    """J74: elsewhere raw memory is written under the logical shape."""
    x = ORDERS[order](W.copy())
    tied.save({"x": x, "n": np.arange(3, dtype="i4")}, file, expand=expand)
    for library in ("numpy", "torch", "jax"):
        found = tied.load(file, framework=library)
        assert np.asarray(found["x"]).tolist() == x.tolist()
        assert np.asarray(found["n"]).tolist() == [0, 1, 2]
    theirs = safetensors.numpy.load_file(file)
    if order == "broadcast" and not expand:  # one row, which no name reads whole
        assert theirs["x.tied_span"].tolist() == x[0].tolist()
    else:
        assert theirs["x"].tolist() == x.tolist()
