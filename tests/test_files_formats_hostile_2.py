"""ONNX, GGUF, Flax and orbax from a stranger's hand, and all formats with a byte changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import onnx
import pytest
from flax import serialization

import tied
from foreign import WRITERS, model, refused, untrusted, written
from tied._checkpoint import open_checkpoint

# -------------------------------------------------------------------------------------------- ONNX


def external(folder: Path, **told: str) -> Path:
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[2, 3], data_location=1)
    for key, value in told.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(model([tensor]).SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize(
    "location", ["../w.data", "/etc/passwd", "a/../../w.data", "..", "", "a\\w.data", "c:/w.data",
                 "link.data", "folder/w.data"],
)  # fmt: skip
def test_external_data_outside_of_the_folder(location: str, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "w.data").write_bytes(bytes(24))
    (inside / "link.data").symlink_to(tmp_path / "w.data")
    (inside / "folder").symlink_to(tmp_path)
    path = external(inside, location=location)
    what = f"a tensor outside of its folder: {location!r}"
    assert refused(path) == untrusted(path, what, "w")


def test_the_links_of_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1").write_bytes(external(tmp_path, location="w.data").read_bytes())
    (blobs / "2").write_bytes(np.arange(6, dtype="float32").tobytes())
    for name, blob in (("m.onnx", "1"), ("w.data", "2")):
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", blob))
    assert tied.load(snapshot / "m.onnx")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ({"offset": "4"}, "24 bytes at 4 of w.data"),
        ({"offset": "-4"}, "offset '-4'"),
        ({"offset": "9" * 30}, f"offset '{'9' * 30}'"),
        ({"length": "20"}, "24 bytes at 0 of w.data"),
        ({"length": "x"}, "length 'x'"),
    ],
)
def test_external_data_that_is_not_there(told: dict[str, str], what: str, tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(bytes(24))
    path = external(tmp_path, location="w.data", **told)
    assert refused(path) == untrusted(path, what, "w")


def test_a_file_of_external_data_that_is_not_there(tmp_path: Path) -> None:
    path = external(tmp_path, location="w.data")
    assert refused(path) == (
        f"a file of the checkpoint is not there\n  file    {tmp_path / 'w.data'}\n  tensor  w"
    )


def test_initializers_that_are_not_sound(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for tensor, what in (
        (onnx.TensorProto(data_type=1, dims=[2, 3], raw_data=bytes(20)),
         "F32 of shape [2, 3] takes 24 bytes, not 20"),
        (onnx.TensorProto(data_type=1, dims=[1 << 62, 1 << 62], raw_data=bytes(20)),
         f"F32 of shape [{1 << 62}, {1 << 62}] takes {1 << 126:,} bytes, not 20"),
        (onnx.TensorProto(data_type=1, dims=[-1], raw_data=bytes(4)),
         "a shape [-1] of what can't be that"),
        (onnx.TensorProto(data_type=15, dims=[1], raw_data=bytes(16)), "the dtype complex128"),
    ):  # fmt: skip
        tensor.name = "w"
        path.write_bytes(model([tensor]).SerializeToString())
        assert refused(path) == untrusted(path, what, "w")


# -------------------------------------------------------------------------------------------- GGUF


def text(x: str) -> bytes:
    return struct.pack("<Q", len(x)) + x.encode()


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def ggml(*infos: bytes, fields: bytes = b"", count: int = 0, data: int = 64) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), count) + fields + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


GGUF: dict[str, tuple[bytes, str, str | None]] = {
    "another file": (b"GGML", "no GGUF file", None),
    "only a name": (b"GGUF", "a file that ends too soon", None),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF of version 1", None),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian file", None),
    "counts": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "a file that ends too soon", None),
    "array": (ggml(fields=text("a") + struct.pack("<IIQ", 9, 4, 1 << 60), count=1),
              "a file that ends too soon", None),
    "texts": (ggml(fields=text("a") + struct.pack("<IIQ", 9, 8, 1 << 60), count=1),
              "a file that ends too soon", None),
    "nested": (ggml(fields=text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20,
                    count=1, data=400), "a field of type 9", None),
    "kind": (ggml(fields=text("a") + struct.pack("<I", 99), count=1), "a field of type 99", None),
    "twice": (ggml(fields=(text("a") + struct.pack("<II", 4, 1)) * 2, count=2),
              "a field that is there twice", "a"),
    "alignment": (ggml(fields=text("general.alignment") + struct.pack("<II", 4, 3), count=1),
                  "an alignment that is no power of two", None),
    "outside": (ggml(tensor_info("w", (4, 4), 0, 32)), "bytes that lie outside of the file", "w"),
    "product": (ggml(tensor_info("w", (1 << 62, 1 << 62), 0, 0)),
                "bytes that lie outside of the file", "w"),
    "overlap": (ggml(tensor_info("v", (8,), 0, 0), tensor_info("w", (4,), 0, 16)),
                "bytes that overlap others", "w"),
    "rank": (ggml(tensor_info("w", (1,) * 9, 0, 0)), "9 dimensions", "w"),
    "blocks": (ggml(tensor_info("w", (2, 16), 2, 0)), "rows that are no whole blocks of Q4_0", "w"),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF)
def test_gguf_that_is_not_sound(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data, what, name = GGUF[case]
    path.write_bytes(data)
    assert refused(path) == untrusted(path, what, name)


def test_gguf_tensors_at_one_place_are_tied_and_new_types_are_bytes(tmp_path: Path) -> None:
    infos = [tensor_info(name, (4, 4), 0, 0) for name in ("v", "w")]
    (tmp_path / "m.gguf").write_bytes(ggml(*infos, tensor_info("x", (9,), 99, 64), data=96))
    contents = open_checkpoint(tmp_path / "m.gguf")
    assert contents.describe("w") == "v"
    assert (contents.dtype("x"), contents.shape("x")) == ("U8", (32,))
    assert contents.metadata["tied.types"] == '{"x": "type 99 (9,)"}'


# ---------------------------------------------------------------------------------- flax and orbax


def test_msgpack_that_is_not_sound(tmp_path: Path) -> None:
    path = tmp_path / "m.msgpack"

    def array(shape: Any, dtype: bytes, data: bytes) -> bytes:
        told = msgpack.packb((shape, dtype, data))
        return msgpack.packb({"a": {"w": msgpack.ExtType(1, told)}})

    for told, what in (
        (array((2, 3), b"float32", bytes(20)), "F32 of shape [2, 3] takes 24 bytes, not 20"),
        (array((2,), b"object", bytes(8)), "the dtype 'object'"),
        (array((-1,), b"float32", bytes(4)), "a shape [-1] of what can't be that"),
    ):
        path.write_bytes(told)
        assert refused(path) == untrusted(path, what, "a.w")
    path.write_bytes(b"\x81" * 200)
    assert "can't be trusted" in refused(path)
    path.write_bytes(b"\x81\xa1a" * 200 + b"\xc0")
    assert "can't be trusted" in refused(path)


def test_an_array_that_flax_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 16)
    w = np.arange(12, dtype="float32").reshape(3, 4)
    (tmp_path / "m.msgpack").write_bytes(serialization.to_bytes({"w": w}))
    assert np.array_equal(tied.load(tmp_path / "m.msgpack")["w"], w)


def test_orbax_that_is_not_sound(tmp_path: Path) -> None:
    path = written("orbax, files", tmp_path)
    told = json.loads((path / "_METADATA").read_text())
    keys = [{"key": "..", "key_type": 2}, {"key": "/x", "key_type": 2}]
    entry = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
    (path / "_METADATA").write_text(json.dumps(told | {"tree_metadata": {"x": entry}}))
    what = "an array outside of the folder: '.../x'"
    assert refused(path) == untrusted(path, what, ".../x")
    (path / "_METADATA").write_text(json.dumps(told))
    shutil.rmtree(path / "layer.w")
    text = refused(path)
    assert text.startswith("this checkpoint can't be trusted: an array that can't be read (")
    assert text.endswith("tensor  layer.w")


def test_orbax_that_would_become_far_more(tmp_path: Path) -> None:
    path = written("orbax, files", tmp_path)
    told = json.loads((path / "layer.w" / ".zarray").read_text())
    (path / "layer.w" / ".zarray").write_text(json.dumps(told | {"shape": [1 << 20, 1 << 20]}))
    assert "files that would become 4,398,046,511,1" in refused(path)


# -------------------------------------------------------------------------------------------- fuzz


def broken(data: bytes, chance: random.Random) -> bytes:
    """A file with something in it that should not be."""
    made, at = bytearray(data), chance.randrange(len(data))
    ways: list[Callable[[], Any]] = [
        lambda: made.__delitem__(slice(at, None)),
        lambda: made.__delitem__(slice(at, at + chance.randint(1, 20))),
        lambda: made.__setitem__(at, chance.randrange(256)),
        lambda: made.__setitem__(slice(at, at + 8), chance.choice([b"\xff" * 8, bytes(8)])),
    ]
    chance.choice(ways)()
    return bytes(made)


FUZZED = [kind for kind in WRITERS if not kind.startswith("orbax")]


@pytest.mark.parametrize("kind", FUZZED)
def test_broken_files_give_values_or_our_errors(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    path = written(kind, tmp_path)
    data = path.read_bytes()
    told = set()
    for _ in range(60):
        path.unlink()  # never written to: what is mapped has to stay
        path.write_bytes(broken(data, chance))
        try:
            for x in tied.load(path).values():
                x.tobytes()
            told.add("read")
        except tied.FileError:
            told.add("refused")
    assert told == {"read", "refused"}
