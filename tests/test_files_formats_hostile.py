"""Archives and pickles that a stranger has written: an error with a name in it, and no more."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foreign import refused, untrusted, written

RAN: list[str] = []


def run(text: str) -> None:
    RAN.append(text)


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return run, ("ran",)


def zipped(path: Path, members: dict[str, bytes], compress: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def unzipped(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# ----------------------------------------------------------------------------------------- pickles


def test_pickles_are_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Bomb()}, tmp_path / "m.pt")
    torch.save({"x": Bomb()}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.bin").write_bytes(pickle.dumps(Bomb(), protocol=2))
    for name in ("m.pt", "old.bin", "raw.bin"):
        assert refused(tmp_path / name) == holds_more(tmp_path / name, f"{__name__}.run")
    np.savez(tmp_path / "m.npz", w=np.ones(2), x=np.array([Bomb()], object))
    path = tmp_path / "m.npz"
    assert refused(path) == untrusted(path, "objects of Python, which are pickles", "x")
    assert RAN == []


def holds_more(path: Path, found: str) -> str:
    return (
        "this file holds more than tensors, and nothing is unpickled\n"
        f"  file   {path}\n"
        f"  found  {found}\n"
        "  Save what it holds as a state dict: torch.save(model.state_dict(), ...)"
    )


def test_a_whole_module(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(nn.Linear(2, 3), path)
    assert refused(path) == holds_more(path, "torch.nn.modules.linear.Linear")


def test_a_torchscript_archive(tmp_path: Path) -> None:
    members = {"m/data.pkl": b"", "m/constants.pkl": b"", "m/code/__torch__.py": b""}
    assert refused(zipped(tmp_path / "m.pt", members)) == (
        "this is a TorchScript archive, a program and not a checkpoint\n"
        f"  file  {tmp_path / 'm.pt'}\n"
        "  Save its tensors: torch.save(torch.jit.load(...).state_dict(), ...)"
    )


# ---------------------------------------------------------------------------------------- PyTorch


def test_sparse_and_quantised_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(2), "s": torch.eye(3).to_sparse()}, path)
    assert refused(path) == untrusted(path, "a sparse tensor", "s")
    torch.save({"a": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}, path)
    assert refused(path) == untrusted(path, "a file has no dtype complex128", "c")


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        # Bytes of the storage (24 float32): 64, which PyTorch maps beyond the member.
        (b"K\x18", b"K\x40", "256 bytes where the archive has fewer"),
        (b"K\x06K\x04", b"K\x06K\x40", "PyTorch can't read it"),  # the shape (6, 4)
        (b"K\x00K\x06", b"J\xff\xff\xff\xffK\x06", "PyTorch can't read it"),  # the offset 0
        (b"K\x04K\x01", b"K\x40K\x01", "PyTorch can't read it"),  # the strides (4, 1)
    ],
)
def test_pytorch_tensors_outside_of_their_storage(
    old: bytes, new: bytes, what: str, tmp_path: Path
) -> None:
    torch.save({"w": torch.arange(24.0).reshape(6, 4)}, tmp_path / "m.pt")
    members = unzipped(tmp_path / "m.pt")
    assert old in members["m/data.pkl"]
    members["m/data.pkl"] = members["m/data.pkl"].replace(old, new, 1)
    assert what in refused(zipped(tmp_path / "m.pt", members))


@pytest.mark.parametrize("where", ["../m.bin", "/etc/passwd", "a/m.bin", "..", ""])
def test_an_index_of_bins_that_leaves_its_folder(where: str, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": {"w": where}}))
    assert refused(path) == untrusted(path, f"the index leads out of its folder: {where!r}", "w")


def test_an_index_of_bins_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    for name in ("a.bin", "b.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    path.write_text(json.dumps({"weight_map": {"w": "a.bin", "v": "a.bin"}}))
    what = "the index has it here, the file has not"
    assert refused(path) == untrusted(tmp_path / "a.bin", what, "v")
    path.write_text('{"weight_map": {"w": "a.bin", "w": "b.bin"}}')
    assert refused(path) == untrusted(path, "a key that is there twice", "w")
    torch.save({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "b.bin")
    path.write_text(json.dumps({"weight_map": {"w": "a.bin", "v": "b.bin"}}))
    what = "another file of the checkpoint has it too"
    assert refused(path) == untrusted(tmp_path / "b.bin", what, "w")


# -------------------------------------------------------------------------------------------- zips


@pytest.mark.parametrize("name", ["m.npz", "m.pt", "m.pt2"])
def test_a_zip_bomb(name: str, tmp_path: Path) -> None:
    # Its directory says what it would become; 42 KB that become 2 GiB are not read.
    path = tmp_path / name
    data = bytearray(zipped(path, {"m/x.npy": bytes(1 << 20)}, zipfile.ZIP_DEFLATED).read_bytes())
    at = data.index(b"PK\1\2") + 24
    data[at : at + 4] = struct.pack("<I", 1 << 31)
    path.write_bytes(data)
    what = f"{len(data):,} bytes that would become 2,147,483,648"
    assert refused(path) == untrusted(path, what)


@pytest.mark.parametrize("kind", ["pt", "pt2"])
def test_members_that_are_compressed(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    zipped(path, members := unzipped(path), zipfile.ZIP_DEFLATED)
    assert refused(path) == untrusted(path, "a member that is compressed", next(iter(members)))


def test_members_that_are_there_twice(tmp_path: Path) -> None:
    path = written("npz", tmp_path)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("n.npy", b"")
    assert refused(path) == untrusted(path, "a member that is there twice", "n.npy")


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(100) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}",
         "float32 of shape [2, 3] in 8 bytes"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -1)}",
         "a shape [-2, -1] of what can't be that"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}",
         "float32 of shape [4611686018427387904, 4] in 8 bytes"),
        ("{'descr': '<U1', 'fortran_order': False, 'shape': (2,)}", "the dtype <U1"),
        ("{'descr': '<f16', 'fortran_order': False, 'shape': ()}", "the dtype float128"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["w.npy", "w.npz"])
def test_headers_of_numpy(header: str, what: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    data = npy(header, bytes(8))
    path.write_bytes(data) if name == "w.npy" else zipped(path, {"w.npy": data})
    assert refused(path) == untrusted(path, what, "w")


def test_a_zip_of_what_is_no_array(tmp_path: Path) -> None:
    path = zipped(tmp_path / "m.npz", {"readme.txt": b"text"})
    assert refused(path) == untrusted(path, "a member that is no array", "readme.txt")


# ------------------------------------------------------------------------------------ torch.export


def meta(**changes: Any) -> dict[str, Any]:
    def number(n: int) -> dict[str, int]:
        return {"as_int": n}

    told = {"dtype": 7, "layout": 7, "sizes": [number(2), number(3)],
            "strides": [number(3), number(1)], "storage_offset": number(0)}  # fmt: skip
    told |= {k: [number(n) for n in v] if isinstance(v, list) else v for k, v in changes.items()}
    return {"path_name": "weight_0", "use_pickle": False, "tensor_meta": told}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (meta(sizes=[3, 3]), "it reads outside of weight_0"),
        (meta(strides=[1 << 62, 1]), "it reads outside of weight_0"),
        (meta(strides=[-3, 1]), "strides [-3, 1] of what can't be that"),
        (meta(storage_offset={"as_int": 1}), "it reads outside of weight_0"),
        (meta(sizes=[2]), "a layout whose parts do not fit"),
        (meta(sizes=None), "a shape that is no list of at most 64 integers"),
        (meta(dtype=11), "dtype 11, layout 7"),
        (meta(layout=1), "dtype 7, layout 1"),
        (meta() | {"path_name": "../weight_1"}, "'../weight_1' is not in the archive"),
        (meta() | {"use_pickle": True}, "a tensor that is stored as a pickle"),
        (meta() | {"tensor_meta": None}, "an entry that describes no tensor"),
        ([], "an entry that describes no tensor"),
    ],
)
def test_weights_of_exported_programs(row: Any, what: str, tmp_path: Path) -> None:
    config = json.dumps({"config": {"w": row}}).encode()
    members = {"m/data/weights/weight_0": bytes(24), "m/data/weights/weight_1": bytes(24),
               "m/data/weights/model_weights_config.json": config}  # fmt: skip
    path = zipped(tmp_path / "m.pt2", members)
    assert refused(path) == untrusted(path, what, "w")


def test_an_archive_that_is_older(tmp_path: Path) -> None:
    path = zipped(tmp_path / "m.pt2", {"serialized_state_dict.pt": b""})
    what = "no archive of torch.export, or one of a PyTorch older than 2.8"
    assert refused(path) == untrusted(path, what)
