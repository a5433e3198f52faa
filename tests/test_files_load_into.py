"""`load_into`: alias, missing, unexpected, conflict, dtype and shape apart, and all or nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import kinds
import oracle
import tied
from files import ALL, array

each_library = pytest.mark.parametrize("library", ALL)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def coder(library: str, value: float = 0.0) -> dict[str, Any]:
    """A matrix, its transpose and a bias."""
    w = array(library, np.full((2, 3), value), "float32")
    return {"enc": w, "dec": tied.transpose(w) if library == "jax" else w.T,
            "bias": array(library, np.full(2, value), "float32")}  # fmt: skip


def values(model: Any) -> dict[str, Any]:
    return {name: kinds.value(x).tolist() for name, x in model.items()}


@each_library
def test_ties_of_the_model_and_of_the_file_alike(library: str, file: Path) -> None:
    tied.save(coder(library, 5), file)
    model = coder(library)
    loaded = tied.load_into(model, file)
    assert (loaded.model is model) == (library != "jax")
    assert values(loaded.model) == values(coder(library, 5))
    assert not tied.compare(coder(library), loaded.model)
    assert (loaded.loaded, loaded.aliases) == (("enc", "bias"), ("dec",))
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert str(loaded) == "loaded 2 storages\nalias      dec"


@each_library
def test_a_file_without_ties_that_agrees(library: str, file: Path) -> None:
    """X6: equal sources are fine, and the model is still tied."""
    tied.save({name: np.array(kinds.value(x)) for name, x in coder("numpy", 5).items()}, file)
    model = tied.load_into(coder(library), file).model
    assert values(model) == values(coder(library, 5))
    assert not tied.compare(coder(library), model)


DISAGREE = """
    the checkpoint does not fit the model
      file      {file}
      disagree  enc and dec, which are one array here
      Nothing was loaded; strict=False leaves what is missing, cast=True casts
"""


@each_library
def test_a_file_without_ties_that_disagrees(library: str, file: Path) -> None:
    """X6, T35: sources that disagree raise with both names; elsewhere the last one wins."""
    tied.save({"enc": np.ones((2, 3), "f4"), "dec": np.full((3, 2), 2, "f4"),
               "bias": np.ones(2, "f4")}, file)  # fmt: skip
    refuse(coder(library), file, DISAGREE, ("enc", "dec"))


def refuse(model: Any, file: Path, text: str, paths: tuple[str, ...], **how: Any) -> None:
    """The whole text, and that nothing was written."""
    before = oracle.snapshot(model)
    with pytest.raises(tied.FileError) as caught:
        tied.load_into(model, file, **how)
    assert str(caught.value) == textwrap.dedent(text).strip("\n").format(file=file)
    assert caught.value.paths == paths
    assert oracle.snapshot(model) == before


@each_library
def test_the_comparison_is_bitwise(library: str, file: Path) -> None:
    """X6, H11: weights of NaN agree with themselves; 0.0 and -0.0 do not."""
    bits = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)
    model = {"a": (w := array(library, [0, 0], "float32")), "b": w}
    tied.save({"a": bits, "b": bits.copy()}, file)
    loaded = tied.load_into(model, file).model
    assert kinds.value(loaded["a"]).tobytes() == bits.tobytes()
    assert loaded["a"] is loaded["b"]
    zero = np.zeros(2, np.float32)
    tied.save({"a": zero, "b": -zero}, file)
    with pytest.raises(tied.FileError) as caught:
        tied.load_into(model, file)
    assert caught.value.paths == ("a", "b")


@each_library
def test_every_kind_of_mistake_is_told_apart(library: str, file: Path) -> None:
    told = {"enc": np.ones((2, 3), "f4"), "dec": np.ones((2, 3), "f4"), "old": np.ones(1)}
    told |= {"scale": np.ones(2, "f8"), "a": np.ones(2, "f4"), "b": np.zeros(2, "f4")}
    tied.save(told, file)
    w, v, scale = (array(library, np.zeros(shape), "float32") for shape in ((2, 3), (2,), (2,)))
    model = {"enc": w, "dec": tied.transpose(w) if library == "jax" else w.T, "a": v, "b": v}
    model |= {"scale": scale, "new": array(library, [0], "int32")}
    refuse(model, file, """
        the checkpoint does not fit the model
          file        {file}
          shape       dec: (2, 3) in the file, not (3, 2)
          disagree    a and b, which are one array here
          dtype       scale: float64 in the file, not float32
          missing     new
          unexpected  old
          Nothing was loaded; strict=False leaves what is missing, cast=True casts
    """, ("dec", "a", "b", "scale", "new", "old"))  # fmt: skip


@each_library
def test_missing_and_unexpected_without_strict(library: str, file: Path) -> None:
    tied.save({"enc": np.ones((2, 3), "f4"), "more": np.ones(1)}, file)
    loaded = tied.load_into(coder(library, 7), file, strict=False)
    assert (loaded.loaded, loaded.aliases) == (("enc",), ("dec",))
    assert (loaded.missing, loaded.unexpected) == (("bias",), ("more",))
    found = values(loaded.model)
    assert (found["bias"], found["dec"]) == ([7, 7], [[1, 1]] * 3)
    assert str(loaded) == ("loaded 1 storages\nalias      dec\nmissing    bias\nunexpected more")


@each_library
def test_conflicts_raise_without_strict_too(library: str, file: Path) -> None:
    tied.save({"enc": np.ones((2, 4), "f4")}, file)
    refuse(coder(library), file, """
        the checkpoint does not fit the model
          file   {file}
          shape  enc: (2, 4) in the file, not (2, 3)
          Nothing was loaded; strict=False leaves what is missing, cast=True casts
    """, ("enc",), strict=False)  # fmt: skip


@each_library
def test_cast(library: str, file: Path) -> None:
    tied.save({name: kinds.value(x).astype("f8") for name, x in coder("numpy", 1 / 3).items()},
              file)  # fmt: skip
    loaded = tied.load_into(coder(library), file, cast=True).model
    assert kinds.value(loaded["dec"]).tolist() == np.full((3, 2), 1 / 3, "f4").tolist()
    assert {str(kinds.value(x).dtype) for x in loaded.values()} == {"float32"}
    assert not tied.compare(coder(library), loaded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_cast_is_that_of_the_library(dtype: str, file: Path) -> None:
    x = torch.tensor([1 / 3, -2.5, 7.0]).to(getattr(torch, dtype))
    tied.save({"x": x}, file)
    module = torch.nn.Module()
    module.register_parameter("x", torch.nn.Parameter(torch.zeros(3)))
    assert tied.load_into(module, file, cast=True).model is module
    assert torch.equal(module.x.detach(), x.to(torch.float32))


@each_library
def test_the_file_has_only_the_alias(library: str, file: Path) -> None:
    """The value of a storage comes through the view that the file has."""
    tied.save({"dec": np.arange(6, dtype="f4").reshape(3, 2), "bias": np.ones(2, "f4")}, file)
    loaded = tied.load_into(coder(library), file)
    assert values(loaded.model)["enc"] == [[0, 2, 4], [1, 3, 5]]
    assert loaded.loaded == ("enc", "bias")


@each_library
def test_the_file_has_only_a_part(library: str, file: Path) -> None:
    w = array(library, np.zeros((2, 3)), "float32")
    row = tied.view(w, lambda a: a[0]) if library == "jax" else w[0]
    model = {"row": row, "w": w}
    tied.save({"row": np.ones(3, "f4")}, file)
    refuse(model, file, """
        the checkpoint does not fit the model
          file     {file}
          missing  w (a part of it)
          Nothing was loaded; strict=False leaves what is missing, cast=True casts
    """, ("w",))  # fmt: skip


def test_parts_that_cover_a_storage(file: Path) -> None:
    w = np.zeros((4, 3), np.float32)
    model = {"w": w, "top": w[:3], "bottom": w[2:], "minus": w[::-1]}
    tied.save({"top": np.arange(9, dtype="f4").reshape(3, 3),
               "bottom": np.arange(6, 12, dtype="f4").reshape(2, 3)}, file)  # fmt: skip
    loaded = tied.load_into(model, file)
    assert w.tolist() == np.arange(12).reshape(4, 3).tolist()
    assert loaded.loaded == ("w",)
    tied.save({"top": np.zeros((3, 3), "f4"), "bottom": np.ones((2, 3), "f4")}, file)
    with pytest.raises(tied.FileError) as caught:
        tied.load_into(model, file)
    assert caught.value.facts[1][0] == "disagree"
    assert {*caught.value.paths} == {"top", "bottom"}


def test_what_lies_between_the_elements_of_a_span_is_left_alone(file: Path) -> None:
    base = np.arange(16, dtype=np.float32).reshape(4, 4)
    model = {"a": base[:, 0], "b": base[1:, 0]}
    tied.save({"a": -base[:, 0], "b": -base[1:, 0]}, file)
    tied.load_into(model, file)
    assert base[:, 0].tolist() == [0, -4, -8, -12]
    assert base[:, 1:].tolist() == np.arange(16).reshape(4, 4)[:, 1:].tolist()


def test_a_tied_file_into_a_model_without_ties(file: Path) -> None:
    tied.save(coder("numpy", 3), file)
    model = {name: np.zeros(x.shape, x.dtype) for name, x in coder("numpy").items()}
    loaded = tied.load_into(model, file)
    assert values(model) == values(coder("numpy", 3))
    assert not tied.ties(model).tied
    assert loaded.loaded == ("enc", "dec", "bias")


def test_what_is_read_only_is_told_before_anything_is_written(file: Path) -> None:
    tied.save({"a": np.ones(2), "b": np.ones(2)}, file)
    model = {"a": np.zeros(2), "b": np.zeros(2)}
    model["b"].flags.writeable = False
    with pytest.raises(tied.TiedError) as caught:
        tied.load_into(model, file)
    assert caught.value.paths == ("b",)
    assert model["a"].tolist() == [0, 0]


def test_a_torch_module_is_written_in_place(file: Path) -> None:
    module, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.bias.requires_grad_(False)
    tied.save(module, file)
    pointers = [p.data_ptr() for p in other.parameters()]
    tied.load_into(other, file)
    assert [p.data_ptr() for p in other.parameters()] == pointers
    assert [p.requires_grad for p in other.parameters()] == [True, False]
    assert torch.equal(module.weight, other.weight)
    assert torch.equal(module.bias, other.bias)
    assert other.weight.is_leaf


def test_the_model_does_not_hold_the_file(file: Path) -> None:
    """What is mapped is copied: a later change of the file is no change of the model."""
    tied.save({"w": np.ones(1000)}, file)
    model = {"w": np.zeros(1000)}
    tied.load_into(model, file)
    jax_model = tied.load_into({"w": jnp.zeros(3, "int32")}, tied.save(
        {"w": np.arange(3, dtype="i4")}, file.with_name("j.safetensors"))).model  # fmt: skip
    for path in (file, file.with_name("j.safetensors")):
        with path.open("r+b") as opened:
            opened.seek(-12, 2)
            opened.write(b"\xff" * 12)
    assert model["w"].tolist() == [1] * 1000
    assert jax_model["w"].tolist() == [0, 1, 2]


def test_many_mistakes_are_counted(file: Path) -> None:
    tied.save({f"n{n:02}": np.ones(1) for n in range(30)}, file)
    with pytest.raises(tied.FileError) as caught:
        tied.load_into({}, file)
    assert len(caught.value.paths) == 30
    assert caught.value.facts[-1] == ("and", "10 more")
    assert len(str(caught.value).splitlines()) == 24
