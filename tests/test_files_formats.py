"""The readers of other formats: what each gives, what is tied in it, and what is not copied."""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

import tied
from foreign import WRITERS, Holder, model, values, written
from tied._checkpoint import open_checkpoint

MISSING: dict[str, set[str]] = {
    "pt2": {"none"},
    "gguf": {"none", "n", "flags"},
    **{kind: {"none"} for kind in WRITERS if kind.startswith("orbax")},
}
FORMATS = {"pt": "pytorch", "pth": "pytorch", "bin": "pytorch"}
LIBRARIES = {
    "pt": ("torch", "torch"),
    "bin": ("torch", "torch"),
    "msgpack": ("msgpack", "msgpack"),
    "onnx": ("onnx", "onnx"),
    "orbax": ("tensorstore", "orbax"),
}


def same(x: Any, y: Any) -> bool:
    """Whether two arrays are the same, bit by bit, NaNs too."""
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def is_mapped(x: Any) -> bool:
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return isinstance(x, mmap.mmap) or (isinstance(x, memoryview) and isinstance(x.obj, mmap.mmap))


@pytest.mark.parametrize("kind", WRITERS)
def test_values_bit_for_bit(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    expected = {k: v for k, v in values().items() if k not in MISSING.get(kind, set())}
    contents = open_checkpoint(path)
    word = kind.partition(",")[0]
    assert contents.format == FORMATS.get(word, word)
    assert set(contents.names()) == set(expected)
    assert {name: contents.shape(name) for name in expected} == {
        k: v.shape for k, v in expected.items()
    }
    assert contents.nbytes == sum(x.nbytes for x in expected.values())
    loaded = tied.load(path)
    assert all(same(loaded[name], x) for name, x in expected.items())
    tensors = tied.load(path, framework="torch", mapped=False)
    assert all(same(tensors[name].numpy(), x) for name, x in expected.items())


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_loaded_can_be_written_to_and_the_file_stays(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    first = tied.load(path)
    first["layer.w"][...] = 3
    assert same(tied.load(path)["layer.w"], values()["layer.w"])


@pytest.mark.parametrize("kind", ["npz", "gguf", "onnx, data beside"])
def test_what_is_not_compressed_is_mapped(kind: str, tmp_path: Path) -> None:
    contents = open_checkpoint(written(kind, tmp_path))
    stored = contents.storages["layer.w"]
    assert is_mapped(stored.memory())
    assert stored.file is not None
    data = stored.file.read_bytes()[stored.start : stored.start + stored.nbytes]
    assert data == values()["layer.w"].tobytes()


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_library_that_is_not_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(kind, tmp_path)
    library, extra = LIBRARIES[kind]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(tied.LibraryError) as caught:
        open_checkpoint(path)
    assert str(caught.value) == (
        f"reading {path.name} needs the library {library}, which is not installed\n"
        f'  Type: pip install "tied[{extra}]"'
    )


@pytest.mark.parametrize("kind", ["npz", "npz, compressed", "pt2", "gguf"])
def test_formats_that_need_no_library(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(kind, tmp_path)
    for library in ("torch", "jax", "gguf", "onnx", "msgpack", "tensorstore", "safetensors"):
        monkeypatch.setitem(sys.modules, library, None)
    assert same(tied.load(path)["layer.w"], values()["layer.w"])


def test_a_format_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "m.h5").write_bytes(b"")
    with pytest.raises(tied.FileError) as caught:
        open_checkpoint(tmp_path / "m.h5")
    assert str(caught.value) == (
        "the format '.h5' is not known\n"
        f"  file   {tmp_path / 'm.h5'}\n"
        "  known  .bin, .bin.index.json, .ckpt, .gguf, .json, .msgpack, .npy, .npz, .onnx, .pt, "
        ".pt2, .pth, .safetensors"
    )


# ------------------------------------------------------------------------------------------- NumPy


def test_npz_in_other_orders(tmp_path: Path) -> None:
    w = np.arange(12, dtype="float32").reshape(3, 4)
    arrays = {"f": np.asfortranarray(w), "t": w.T, "big": w.astype(">f4"), "strided": w[:, ::2]}
    arrays["both"] = np.asfortranarray(w.astype(">i2"))
    np.savez(tmp_path / "m.npz", **arrays)
    loaded = tied.load(tmp_path / "m.npz")
    assert all(np.array_equal(loaded[name], x) for name, x in arrays.items())


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3).T])
def test_npy_has_the_name_of_its_file(array: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", array)
    loaded = tied.load(tmp_path / "table.npy")
    assert list(loaded) == ["table"]
    assert np.array_equal(loaded["table"], array)


def test_numpy_keeps_no_ties(tmp_path: Path) -> None:
    # M13: what is tied is written twice, and `discover` alone can tell.
    w = np.random.default_rng(0).random((3, 4), "float32")
    np.savez(tmp_path / "m.npz", w=w, t=w.T)
    assert open_checkpoint(tmp_path / "m.npz").aliases == {}
    assert tied.ties(tied.load(tmp_path / "m.npz")).groups == ()


# ----------------------------------------------------------------------------------------- PyTorch


def test_views_of_one_storage_are_tied(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    state = {"w": w, "same": w, "t": w.t(), "rows": w[1:]}
    torch.save({"model": state, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
                "epoch": 3, "args": ["a"]}, tmp_path / "m.pt")  # fmt: skip
    contents = open_checkpoint(tmp_path / "m.pt")
    assert list(contents.storages) == ["model.w", "optimizer.state.0.step"]
    assert {name: contents.describe(name) for name in contents.aliases} == {
        "model.same": "model.w",
        "model.t": "model.w.T",
        "model.rows": "model.w[1:]",
    }
    loaded = tied.load(tmp_path / "m.pt", framework="torch")
    assert torch.equal(loaded["model.t"], w.t())
    loaded["model.w"].zero_()
    assert all(not loaded[f"model.{name}"].any() for name in state)
    assert torch.equal(torch.load(tmp_path / "m.pt")["model"]["w"], w)


def test_a_tensor_and_a_list_of_tensors(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "one.pt")
    torch.save([torch.ones(2), {"a": torch.zeros(3)}], tmp_path / "list.pt")
    assert list(tied.load(tmp_path / "one.pt")) == ["one"]
    assert list(tied.load(tmp_path / "list.pt")) == ["0", "1.a"]


def test_parameters_and_dtypes_of_pytorch(tmp_path: Path) -> None:
    state = {
        "p": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "f8": torch.ones(3).to(torch.float8_e5m2),
        "c": torch.ones(2, dtype=torch.complex64),
        "conj": torch.tensor([1 + 2j]).conj(),
        "u": torch.ones(2, dtype=torch.uint32),
    }
    torch.save(state, tmp_path / "m.pt")
    contents = open_checkpoint(tmp_path / "m.pt")
    assert [contents.dtype(name) for name in state] == ["BF16", "F8_E5M2", "C64", "C64", "U32"]
    loaded = tied.load(tmp_path / "m.pt", framework="torch")
    assert loaded["conj"].item() == 1 - 2j
    assert torch.equal(loaded["f8"].float(), torch.ones(3))


def test_a_sharded_bin(tmp_path: Path) -> None:
    w, v = torch.ones(2, 3), torch.zeros(4)
    torch.save({"w": w, "t": w.t()}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"v": v}, tmp_path / "pytorch_model-00002-of-00002.bin")
    files = {"w": 1, "t": 1, "v": 2}
    index = {"metadata": {"total_size": 40, "head": "v"}, "weight_map": {
        name: f"pytorch_model-0000{n}-of-00002.bin" for name, n in files.items()}}  # fmt: skip
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps(index))
    for place in (path, tmp_path):
        contents = open_checkpoint(place)
        assert (list(contents.storages), list(contents.aliases)) == (["w", "v"], ["t", "head"])
        assert [file.name for file in contents.files] == sorted(set(index["weight_map"].values()))
    loaded = tied.load(tmp_path, framework="torch")
    assert loaded["head"] is loaded["v"]
    assert tied.shares(loaded["w"], loaded["t"])


# ------------------------------------------------------------------------------------- torch.export


def test_an_exported_program_keeps_its_ties(tmp_path: Path) -> None:
    w = torch.randn(6, 4)
    module = Holder({"w": w, "head": w, "t": w.t(), "rows": w[2:4], "alone": torch.randn(3, 5).t()})
    module.constant = torch.ones(3)
    module.register_buffer("f8", torch.ones(3).to(torch.float8_e4m3fn))
    program = torch.export.export(module, (torch.ones(1),))
    with pytest.warns(UserWarning, match="No complete tensor found"):  # of `alone`
        torch.export.save(program, tmp_path / "m.pt2")
    contents = open_checkpoint(tmp_path / "m.pt2")
    described = {name: contents.describe(name) for name in contents.aliases}
    assert described == {"head": "w", "t": "w.T", "rows": "w[2:4]"}
    assert contents.dtype("f8") == "F8_E4M3"
    loaded = tied.load(tmp_path / "m.pt2", framework="torch")
    state = module.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[k].float(), v.float()) for k, v in state.items())


# -------------------------------------------------------------------------------------------- ONNX


def test_every_dtype_of_onnx(tmp_path: Path) -> None:
    make = onnx.helper.make_tensor
    typed = {
        "FLOAT": "F32", "UINT8": "U8", "INT8": "I8", "UINT16": "U16", "INT16": "I16",
        "INT32": "I32", "INT64": "I64", "BOOL": "BOOL", "FLOAT16": "F16", "DOUBLE": "F64",
        "UINT32": "U32", "UINT64": "U64", "COMPLEX64": "C64", "BFLOAT16": "BF16",
        "FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E4M3FNUZ": "F8_E4M3FNUZ", "FLOAT8E5M2": "F8_E5M2",
        "FLOAT8E5M2FNUZ": "F8_E5M2FNUZ", "FLOAT8E8M0": "F8_E8M0",
    }  # fmt: skip
    tensors = [make(name, getattr(TensorProto, name), [2], [1, 0.5]) for name in typed
               if name.startswith(("F", "B", "D", "C"))]  # fmt: skip
    tensors += [make(name, getattr(TensorProto, name), [2], [1, 0]) for name in typed
                if name.startswith(("U", "I"))]  # fmt: skip
    tensors.append(make("INT4", TensorProto.INT4, [3], [1, -2, 3]))
    tensors.append(make("STRING", TensorProto.STRING, [1], [b"text"]))
    onnx.save(model(tensors), tmp_path / "m.onnx")
    contents = open_checkpoint(tmp_path / "m.onnx")
    assert {name: contents.dtype(name) for name in contents.names()} == {**typed, "INT4": "U8"}
    assert json.loads(contents.metadata["tied.types"]) == {
        "INT4": "int4 (3,)",
        "STRING": "texts (1,)",
    }
    loaded = tied.load(tmp_path / "m.onnx")
    for tensor in tensors[:-2]:
        expected = onnx.numpy_helper.to_array(tensor)
        assert same(loaded[tensor.name], np.array(expected).view(loaded[tensor.name].dtype))
    assert loaded["INT4"].tolist() == [0xE1, 0x03]


def test_two_initializers_at_one_place_are_tied(tmp_path: Path) -> None:
    w = onnx.numpy_helper.from_array(np.arange(6, dtype="float32").reshape(2, 3), "w")
    onnx.save(model([w]), tmp_path / "m.onnx", save_as_external_data=True, location="w.data",
              size_threshold=0)  # fmt: skip
    made = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for name, dims, dtype in (("same", [2, 3], 1), ("flat", [6], 1), ("bits", [12], 5)):
        twin = made.graph.initializer.add()
        twin.CopyFrom(made.graph.initializer[0])
        twin.name, twin.data_type = name, dtype
        twin.dims[:] = dims
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    contents = open_checkpoint(tmp_path / "m.onnx")
    assert {name: contents.describe(name) for name in contents.aliases} == {
        "same": "w", "flat": "w.reshape(6)", "bits": "w, bits as int16",
    }  # fmt: skip
    loaded = tied.load(tmp_path / "m.onnx")
    assert loaded["bits"].tobytes() == loaded["w"].tobytes()
    assert tied.shares(loaded["bits"], loaded["w"])


# -------------------------------------------------------------------------------------------- GGUF


def test_quantised_tensors_of_gguf_are_bytes(tmp_path: Path) -> None:
    kinds = gguf.GGMLQuantizationType
    w = np.random.default_rng(0).random((2, 256), "float32")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for kind in (kinds.Q4_0, kinds.Q8_0, kinds.Q6_K, kinds.BF16):
        if kind == kinds.Q6_K:
            data = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), "uint8")
        else:
            data = gguf.quants.quantize(w, kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.add_name("tiny")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    contents = open_checkpoint(tmp_path / "m.gguf")
    assert contents.metadata["general.name"] == "tiny"
    assert json.loads(contents.metadata["tied.types"]) == {
        "Q4_0": "Q4_0 (2, 256)", "Q8_0": "Q8_0 (2, 256)", "Q6_K": "Q6_K (2, 256)",
    }  # fmt: skip
    assert contents.dtype("BF16") == "BF16"
    loaded = tied.load(tmp_path / "m.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        assert contents.storages[tensor.name].start == tensor.data_offset
        assert loaded[tensor.name].tobytes() == tensor.data.tobytes()


def test_the_blocks_of_gguf_are_those_of_its_library() -> None:
    from tied._files.gguf import _BLOCKS, _CODES

    theirs = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {k: v for k, v in theirs.items() if k not in _CODES} == _BLOCKS
    assert {k: v[0] for k, v in theirs.items() if k in _CODES} == _CODES
