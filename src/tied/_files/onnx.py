"""Models of ONNX: their initializers; tensors in files beside are mapped."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tied._errors import FileError
from tied._files.contents import Alias, Checkpoint, Stored
from tied._files.dtypes import BITS
from tied._files.header import bad, ints
from tied._files.outside import BROKEN, add_once, needed, tell_types
from tied._files.read import Mapped
from tied._layout import Layout

# TensorProto.DataType of onnx.proto.
_CODES = {
    1: "F32", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "I32", 7: "I64", 9: "BOOL", 10: "F16",
    11: "F64", 12: "U32", 13: "U64", 14: "C64", 16: "BF16", 17: "F8_E4M3", 18: "F8_E4M3FNUZ",
    19: "F8_E5M2", 20: "F8_E5M2FNUZ", 24: "F8_E8M0",
}  # fmt: skip
_PACKED = {21: ("uint4", 4), 22: ("int4", 4), 23: ("float4e2m1", 4), 25: ("uint2", 2),
           26: ("int2", 2)}  # fmt: skip
_STRING, _COMPLEX128 = 8, 15
_EXTERNAL = 1


def open_onnx(path: Path) -> Checkpoint:
    """Returns the initializers of a model; two at one place of a file beside it are tied.

    Those of less than a byte for an element are arrays of bytes, and what they are stands in the
    metadata `tied.types`, where texts are named too.

    Raises:
        FileError: The file is not sound, or a tensor is in a file outside of its folder.
        LibraryError: onnx is not installed.
    """
    onnx = needed("onnx", "onnx", f"reading {path.name}")
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (*BROKEN, _decode_error()) as error:
        raise bad(path, "no model of ONNX") from error
    for sparse in graph.sparse_initializer:
        raise bad(path, "a sparse tensor", sparse.values.name)
    contents = Checkpoint(path, "onnx", {}, files=(path,))
    beside = _Beside(path)
    types: dict[str, str] = {}
    for tensor in graph.initializer:
        add_once(contents, path, tensor.name)
        shape = ints(path, tensor.name, list(tensor.dims), "a shape", 64)
        if tensor.data_type == _STRING:
            types[tensor.name] = f"texts {shape}"
        elif tensor.data_location == _EXTERNAL:
            beside.add(contents, tensor, *_elements(path, tensor, shape, types))
        else:
            _add(contents, onnx, tensor, *_elements(path, tensor, shape, types))
    tell_types(contents, types)
    contents.files = (path, *beside.maps)
    return contents


def _decode_error() -> type[Exception]:
    error: type[Exception] = needed("google.protobuf.message", "onnx", "onnx").DecodeError
    return error


def _elements(
    path: Path, tensor: Any, shape: tuple[int, ...], types: dict[str, str]
) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape of a tensor; those of its bytes, if it packs its elements."""
    code = _CODES.get(tensor.data_type)
    if code is not None:
        return code, shape
    if tensor.data_type not in _PACKED:
        kind = "complex128" if tensor.data_type == _COMPLEX128 else tensor.data_type
        raise bad(path, f"the dtype {kind}", tensor.name)
    name, bits = _PACKED[tensor.data_type]
    types[tensor.name] = f"{name} {shape}"
    return "U8", (-(-math.prod(shape) * bits // 8),)


def _add(contents: Checkpoint, onnx: Any, tensor: Any, code: str, shape: tuple[int, ...]) -> None:
    """Adds a tensor that is in the model itself."""
    name, nbytes = tensor.name, math.prod(shape) * BITS[code] // 8
    if tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8)
    elif tensor.data_type in _PACKED:
        data = np.array(tensor.int32_data, np.int64).astype(np.uint8)
    else:
        data = _from_numbers(contents.path, onnx, tensor)
    if data.nbytes != nbytes:
        raise bad(contents.path, f"{code} of shape {list(shape)} takes {nbytes:,} bytes, not "
                  f"{data.nbytes:,}", name)  # fmt: skip
    contents.storages[name] = Stored(name, code, shape, nbytes, lambda: data)


def _from_numbers(path: Path, onnx: Any, tensor: Any) -> Any:
    """Returns the bytes of a tensor that a model has as a list of numbers."""
    try:
        x = onnx.numpy_helper.to_array(tensor)
    except BROKEN as error:
        raise bad(path, f"a tensor that can't be read ({error})", tensor.name) from error
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


class _Beside:
    """The files beside a model, and what was found in them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.maps: dict[Path, Any] = {}
        self._found: dict[tuple[Path, int, int], str] = {}

    def add(self, contents: Checkpoint, tensor: Any, code: str, shape: tuple[int, ...]) -> None:
        """Adds a tensor: a storage, or an alias of what was at the same place."""
        name, nbytes = tensor.name, math.prod(shape) * BITS[code] // 8
        told = {entry.key: entry.value for entry in tensor.external_data}
        file = self._file(name, told.get("location", ""))
        start, length = (self._number(name, told, key) for key in ("offset", "length"))
        if length not in (0, nbytes) or start + nbytes > os.stat(file).st_size:
            raise bad(self.path, f"{nbytes:,} bytes at {start:,} of {file.name}", name)
        maps = self.maps.setdefault(file, Mapped(file))
        kept = self._found.setdefault((file, start, nbytes), name)
        if kept == name or nbytes == 0:
            contents.storages[name] = Stored(
                name, code, shape, nbytes, partial(maps.part, start, nbytes), file, start
            )
            return
        layout = Layout.whole(shape)
        if code != contents.storages[kept].dtype:
            unit = BITS[code] // 8
            strides = tuple(s * unit for s in layout.strides)
            layout = Layout(shape, strides, 0, dtype=code)
        contents.aliases[name] = Alias(name, kept, layout)

    def _file(self, name: str, location: str) -> Path:
        """Returns the file of a tensor, which is in the folder of the model."""
        parts = location.split("/")
        if {"", ".", ".."} & {*parts} or "\\" in location or "\0" in location or ":" in parts[0]:
            raise bad(self.path, f"a tensor outside of its folder: {location!r}", name)
        file = self.path.parent / location
        if not file.is_file():
            facts = [("file", str(file)), ("tensor", name)]
            raise FileError("a file of the checkpoint is not there", facts=facts, paths=[name])
        # The cache of the Hugging Face hub has links, of the model too, into one other folder.
        folders = (self.path.parent.resolve(), self.path.resolve().parent)
        if not any(file.resolve().is_relative_to(folder) for folder in folders):
            raise bad(self.path, f"a tensor outside of its folder: {location!r}", name)
        return file

    def _number(self, name: str, told: dict[str, str], key: str) -> int:
        text = told.get(key, "0")
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise bad(self.path, f"{key} {text!r}", name)
        return int(text)
