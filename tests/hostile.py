"""Small safetensors files and indices, sound or not, made byte by byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = bytes(range(24))
W: dict[str, Any] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
ROW: dict[str, Any] = {"of": "w", "shape": [3, 2], "strides": [1, 3], "offset": 0}


def file(header: Any, data: bytes = DATA, *, length: int | None = None) -> bytes:
    """A file: its header as JSON, or as it is given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(data: bytes = DATA, **changes: Any) -> bytes:
    """A file with one tensor, `w`."""
    return file({"w": {**W, **changes}}, data)


def metadata(w: dict[str, Any] = W, data: bytes = DATA, **members: Any) -> bytes:
    """A file with one tensor, and metadata."""
    return file({"__metadata__": members, "w": w}, data)


def table(told: Any, w: dict[str, Any] = W, data: bytes = DATA) -> bytes:
    """A file with one tensor, and a tie table as JSON, or as it is given."""
    return metadata(w, data, tied=told if isinstance(told, str) else json.dumps(told))


def row(w: dict[str, Any] = W, data: bytes = DATA, **changes: Any) -> bytes:
    """A file whose tie table has one alias, `v`; a change to None leaves a member out."""
    told = {name: value for name, value in {**ROW, **changes}.items() if value is not None}
    return table({"version": 1, "aliases": {"v": told}}, w, data)


def more(**members: Any) -> bytes:
    """A file whose tie table has one alias, and further members."""
    return table({"version": 1, "aliases": {"v": ROW}, **members})


def of(dtype: str, shape: list[int], nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}


def two(first: list[int], second: list[int], nbytes: int) -> bytes:
    """A file with two tensors of bytes, at offsets."""
    entries = {
        name: {"dtype": "U8", "shape": [max(0, at[1] - at[0])], "data_offsets": at}
        for name, at in (("a", first), ("b", second))
    }
    return file(entries, bytes(nbytes))


def index(folder: Path, told: Any, **files: bytes) -> Path:
    """An index in a folder, and files beside it."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    path = folder / "model.safetensors.index.json"
    path.write_bytes(told if isinstance(told, bytes) else json.dumps(told).encode())
    return path
