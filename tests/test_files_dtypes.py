"""`save` and `load`: every dtype bit for bit, shapes, orders in memory, and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

import kinds
import tied
from files import ALL, array, assert_members
from tied._files.dtypes import BITS, NAMES

each_library = pytest.mark.parametrize("library", ALL)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


WHOLE = [code for code, bits in BITS.items() if bits % 8 == 0]


@pytest.mark.parametrize("code", WHOLE)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_every_dtype_and_every_bit(code: str, framework: str, file: Path) -> None:
    """All patterns of the bits, NaN payloads among them."""
    memory = np.arange(256 * 8, dtype=np.uint32).astype(np.uint8)
    memory = memory.reshape(8, 256).T.reshape(-1) if code != "BOOL" else memory % 2
    dtype = np.dtype(getattr(ml_dtypes, NAMES[code], None) or NAMES[code])
    x = memory.view(dtype)
    tied.save({"x": x, "view": x.reshape(2, -1).T}, file)
    loaded = tied.load(file, framework=framework)
    as_told = [str(y.dtype).removeprefix("torch.") for y in loaded.values()]
    assert as_told == [NAMES[code]] * 2
    bits = loaded["x"].view(torch.uint8).numpy() if framework == "torch" else loaded["x"]
    assert bits.tobytes() == memory.tobytes()
    assert not tied.compare({"x": x, "view": x.reshape(2, -1).T}, loaded)


@pytest.mark.parametrize("code", [code for code in WHOLE if code not in ("I64", "U64", "F64")])
def test_every_dtype_of_jax(code: str, file: Path) -> None:
    x = jnp.arange(6).astype(NAMES[code])
    tied.save({"x": x, "again": x, "t": tied.view(x, lambda a: a.reshape(2, 3))}, file)
    loaded = tied.load(file, framework="jax")
    assert loaded["x"] is loaded["again"]
    assert loaded["x"].dtype == x.dtype
    assert np.asarray(loaded["x"]).tobytes() == np.asarray(x).tobytes()


def test_every_dtype_of_torch(file: Path) -> None:
    for code in WHOLE:
        x = torch.arange(16, dtype=torch.uint8).view(getattr(torch, NAMES[code])) \
            if code != "BOOL" else torch.tensor([True, False])  # fmt: skip
        tied.save({"x": x, "half": x[1:]}, file)
        loaded = tied.load(file, framework="torch")
        assert loaded["x"].dtype == x.dtype
        assert torch.equal(loaded["x"].view(torch.uint8), x.view(torch.uint8))
        assert tied.shares(loaded["x"], loaded["half"])


@each_library
def test_nan_payloads(library: str, file: Path) -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x3F800000], np.uint32)
    x = array(library, bits.view(np.float32), "float32")
    tied.save({"x": x, "again": x}, file)
    loaded = tied.load(file, framework=library)
    assert kinds.value(loaded["x"]).view(np.uint32).tolist() == bits.tolist()
    assert loaded["x"] is loaded["again"]


def test_big_endian_arrays_are_stored_as_little_endian_ones(file: Path) -> None:
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    tied.save({"x": x, "t": x.T, "n": np.arange(3, dtype=">i2")}, file)
    loaded = tied.load(file)
    assert loaded["x"].tolist() == x.tolist()
    assert loaded["t"].tolist() == x.T.tolist()
    assert loaded["n"].tolist() == [0, 1, 2]
    assert {a.dtype.byteorder for a in loaded.values()} == {"="}


REFUSED = {
    "structured": np.zeros(2, [("x", "f4"), ("n", "i4")]),
    "complex128": np.ones(2, "complex128"),
    "text": np.array(["a"]),
    "datetime": np.array(["2020-01-01"], "datetime64[D]"),
    "int4": np.ones(2, ml_dtypes.int4),
    "longdouble": np.ones(2, np.longdouble),
    "complex128_torch": torch.ones(2, dtype=torch.complex128),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_no_file_has(name: str, file: Path) -> None:
    x = REFUSED[name]
    told = str(x.dtype).removeprefix("torch.")
    with pytest.raises(tied.DtypeError) as caught:
        tied.save({"fine": np.ones(2), "inner": {"w": x}}, file)
    assert caught.value.paths == ("inner.w",)
    assert str(caught.value) == (
        f"a file has no dtype {told}\n  array  inner.w\n"
        "  Leave it out, or give it another dtype, before you save"
    )
    assert not file.exists()


@pytest.mark.parametrize("code", ["F4", "F6_E2M3"])
def test_elements_of_less_than_a_byte_are_refused_by_name(code: str, file: Path) -> None:
    size = {"F4": 2, "F6_E2M3": 3}[code]
    told = f'{{"w":{{"dtype":"{code}","shape":[4],"data_offsets":[0,{size}]}}}}'.encode()
    file.write_bytes(len(told).to_bytes(8, "little") + told + bytes(size))
    with pytest.raises(tied.TiedError) as caught:
        tied.load(file)
    assert caught.value.paths == ("w",)


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint64"])
def test_jax_without_64_bits_says_so(dtype: str, file: Path) -> None:
    tied.save({"layer": {"w": np.ones(3, dtype)}}, file)
    with pytest.raises(tied.DtypeError) as caught:
        tied.load(file, framework="jax")
    assert caught.value.paths == ("layer.w",)
    with jax.enable_x64(True):
        assert tied.load(file, framework="jax")["layer.w"].dtype == dtype


# -------------------------------------------------------------------- shapes, orders and names


@each_library
def test_zero_dimensions_and_no_elements(library: str, file: Path) -> None:
    shapes = {"scalar": (), "none": (0, 3), "nil": (2, 0), "one": (1,)}
    model = {name: array(library, np.full(shape, 3), "float32") for name, shape in shapes.items()}
    tied.save(model, file)
    for mapped in (True, False):
        loaded = tied.load(file, framework=library, mapped=mapped)
        assert {name: tuple(x.shape) for name, x in loaded.items()} == shapes
        assert [str(x.dtype).removeprefix("torch.") for x in loaded.values()] == ["float32"] * 4
        assert float(loaded["scalar"]) == 3
        assert not tied.ties(loaded).tied


ORDERS = {
    "fortran": lambda a: np.asfortranarray(a),
    "transposed": lambda a: a.T,
    "columns": lambda a: a[:, 1:3],
    "every_second": lambda a: a[::2],
    "diagonal": np.diagonal,
    "flipped": lambda a: a[::-1],
    "permuted": lambda a: a.reshape(4, 2, 2).transpose(2, 0, 1),
    "repeated": lambda a: np.broadcast_to(a[0], (3, 4)),
    "windows": lambda a: np.lib.stride_tricks.sliding_window_view(a.reshape(-1), 3),
}


@pytest.mark.parametrize("order", ORDERS)
def test_arrays_that_are_not_dense_have_the_right_values(order: str, file: Path) -> None:
    """J74, M12: safetensors.numpy writes the memory of such arrays under their shape."""
    x = ORDERS[order](np.arange(16, dtype=np.float32).reshape(4, 4))
    model = {"alone": x.copy(order="K"), "x": x, "part": x[1:], "t": x.T}
    tied.save(model, file)
    for framework in ("numpy", "torch"):
        loaded = tied.load(file, framework=framework)
        assert_members(list(model.values()), [loaded[name] for name in model])


def test_safetensors_writes_them_wrong(file: Path) -> None:
    """J74: the trap beside ours; when this fails, the report is repaired."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3).T
    safetensors.numpy.save_file({"x": x}, file)
    assert safetensors.numpy.load_file(file)["x"].tolist() != x.tolist()


ODD_NAMES = ("a.b", "a['b']", "ü ñ 漢字", 'quote"s', "new\nline", "back\\slash", " ", "tied",
             "format", "aliases", "x.tied_span", "\x00", "__metadata", "\U0001f600")  # fmt: skip


def test_names_of_all_sorts(file: Path) -> None:
    w = np.ones((2, 3), np.float32)
    model = {**{name: np.full(2, n) for n, name in enumerate(ODD_NAMES)},
             **{f"alias of {name}": w for name in ODD_NAMES}}  # fmt: skip
    tied.save(model, file)
    loaded = tied.load(file)
    assert sorted(loaded) == sorted(model)
    assert [loaded[name].tolist() for name in ODD_NAMES] == [[n, n] for n in range(len(ODD_NAMES))]
    assert len({id(x) for name, x in loaded.items() if name.startswith("alias of")}) == 1


@pytest.mark.parametrize("name", ["tied", "format", "", "__metadata", "naïve\n"])
def test_aliases_of_any_name(name: str, file: Path) -> None:
    w = np.ones((2, 3), np.float32)
    tied.save({"a": w, name: w}, file)
    loaded = tied.load(file)
    assert list(loaded) == ["a", name]
    assert loaded["a"] is loaded[name]


@pytest.mark.parametrize(
    ("model", "paths", "text"),
    [
        ({"a.b": 0, "a": {"b": 1}}, ("a.b",), "a.b"),
        ({"__metadata__": 0}, ("__metadata__",), "__metadata__"),
        ({"\ud800": 0}, ("'\\ud800'",), "no array can be named '\\ud800'"),
        ({1: 0, "1": 1}, ("1",), "1"),
    ],
    ids=["twice", "reserved", "no text", "number and text"],
)
def test_names_that_no_file_can_hold(
    model: Any, paths: tuple[str, ...], text: str, file: Path
) -> None:
    arrays = tied.copy(model)
    arrays = fill(arrays)
    file.write_bytes(b"old")
    with pytest.raises(tied.FileError) as caught:
        tied.save(arrays, file)
    assert caught.value.paths == paths
    assert text in str(caught.value)
    assert file.read_bytes() == b"old"


def fill(model: Any) -> Any:
    if isinstance(model, dict):
        return {name: fill(inner) for name, inner in model.items()}
    return np.full(2, float(model))


@each_library
def test_a_bare_array(library: str, file: Path) -> None:
    x = array(library, np.arange(6).reshape(2, 3), "float32")
    tied.save(x, file)
    loaded = tied.load(file, framework=library)
    assert list(loaded) == [""]
    assert kinds.value(loaded[""]).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_model_without_arrays(file: Path) -> None:
    tied.save({"rate": 0.1, "name": "model"}, file)
    assert tied.load(file) == {}


def test_metadata_of_the_users_own(file: Path) -> None:
    w = np.ones(3, np.float32)
    tied.save({"a": w, "b": w}, file, metadata={"step": "12", "note": "ü"})
    with safetensors.safe_open(file, "numpy") as opened:
        told = opened.metadata()
    assert {key: told[key] for key in ("step", "note", "format")} == (
        {"step": "12", "note": "ü", "format": "pt"}
    )
    loaded = tied.load(file)
    assert loaded["a"] is loaded["b"]
