"""A reader written from docs/format.md alone: no code of `tied` or safetensors is used here."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
VERSION = 1


@dataclass(frozen=True)
class Array:
    """One name of a checkpoint.

    `data` are its elements in C order; `places` the byte of the storage at which each starts.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: str
    data: bytes
    places: np.ndarray


@dataclass
class File:
    metadata: dict[str, str]
    dtype: dict[str, str] = field(default_factory=dict)
    shape: dict[str, tuple[int, ...]] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)


def read(path: Path) -> dict[str, Array]:
    """Every array of a checkpoint: of a file, or of an index and its files."""
    if path.name.endswith(".index.json"):
        index = json.loads(path.read_text("utf-8"))
        files = [read_file(path.parent / name) for name in sorted({*index["weight_map"].values()})]
        further = index.get("metadata", {})
    else:
        files, further = [read_file(path)], {}
    every = File({})
    for file in files:
        every.dtype |= file.dtype
        every.shape |= file.shape
        every.data |= file.data
    arrays: dict[str, Array] = {}
    silent: set[str] = set()
    for file in files:
        arrays |= by_hugging_face(every, file.metadata)
        table = json.loads(file.metadata.get("tied", "{}"))
        if table and table["version"] != VERSION:
            raise ValueError(f"version {table['version']}")
        arrays |= {name: alias(every, row) for name, row in table.get("aliases", {}).items()}
        silent |= {*table.get("unnamed", ())}
    arrays |= {k: v for k, v in by_hugging_face(every, further).items() if k not in arrays}
    for name in every.data:
        if name not in arrays and name not in silent:
            arrays[name] = whole(every, name)
    return arrays


def read_file(path: Path) -> File:
    """The tensors of one safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length].decode("utf-8"))
    file = File(header.pop("__metadata__", {}))
    for name, told in header.items():
        start, stop = (8 + length + offset for offset in told["data_offsets"])
        file.dtype[name], file.shape[name] = told["dtype"], tuple(told["shape"])
        file.data[name] = content[start:stop]
    return file


def by_hugging_face(file: File, metadata: dict[str, Any]) -> dict[str, Array]:
    """The names of whole storages, as metadata of Hugging Face has them."""
    return {
        name: whole(file, kept)
        for name, kept in metadata.items()
        if isinstance(kept, str)
        and kept in file.data
        and name not in file.data
        and name not in ("tied", "format")
    }


def whole(file: File, name: str) -> Array:
    """A storage as an array."""
    dtype, shape = file.dtype[name], file.shape[name]
    places = np.arange(int(np.prod(shape))).reshape(shape) * BITS[dtype] // 8
    return Array(dtype, shape, name, file.data[name], places)


def alias(file: File, row: dict[str, Any]) -> Array:
    """What a row of the tie table reads."""
    of = row["of"]
    dtype = row.get("dtype", file.dtype[of])
    each = BITS[dtype] // 8
    unit = 1 if "dtype" in row else each
    shape = tuple(row["shape"])
    places = np.full(shape, row["offset"] * unit, np.int64)
    for axis, stride in enumerate(row["strides"]):
        places += np.indices(shape)[axis] * stride * unit
    memory = np.frombuffer(file.data[of], np.uint8)
    data = memory[places[..., None] + np.arange(each)].reshape(-1, each).copy()
    if row.get("conj"):
        data[:, each - 1] ^= 0x80  # the sign of the imaginary part, which comes last
    if row.get("neg"):
        data = negative(data, dtype)
    return Array(dtype, shape, of, data.tobytes(), places)


def negative(data: np.ndarray, dtype: str) -> np.ndarray:
    each = data.shape[1]
    if dtype[0] in "IU":
        return (-data.view(f"<u{each}")).view(np.uint8)
    ends = (each // 2 - 1, each - 1) if dtype == "C64" else (each - 1,)
    for end in ends:
        data[:, end] ^= 0x80
    return data
