"""Files of `flax.serialization` (`.msgpack`), read without Flax."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tied._files.contents import Checkpoint, Stored
from tied._files.dtypes import BITS, CODES
from tied._files.header import bad, ints
from tied._files.outside import BROKEN, add_once, needed

_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # flax.serialization._MsgpackExtType
_CHUNKED = "__msgpack_chunked_array__"
_DEPTH = 100


class _Array(NamedTuple):
    shape: Any
    dtype: Any
    data: Any


def open_msgpack(path: Path) -> Checkpoint:
    """Returns the arrays of a file, named by the keys that lead to them.

    Raises:
        FileError: The file is not sound.
        LibraryError: msgpack is not installed.
    """
    msgpack = needed("msgpack", "msgpack", f"reading {path.name}")

    def extension(code: int, data: bytes) -> Any:
        if code not in (_NDARRAY, _SCALAR):
            return None
        shape, dtype, elements = msgpack.unpackb(data, raw=True)
        return _Array(shape, dtype.decode(), elements)

    try:
        told = msgpack.unpackb(path.read_bytes(), ext_hook=extension, raw=False)
    except (*BROKEN, msgpack.UnpackException) as error:
        raise bad(path, f"no msgpack ({error})") from error
    contents = Checkpoint(path, "msgpack", {}, files=(path,))
    _add(contents, (), told)
    return contents


def _add(contents: Checkpoint, keys: tuple[str, ...], told: Any) -> None:
    name = ".".join(keys)
    if len(keys) > _DEPTH:
        raise bad(contents.path, "keys that are nested too deep", name)
    if isinstance(told, dict) and _CHUNKED in told:
        told = _joined(contents.path, name, told)
    if isinstance(told, _Array):
        name = name or contents.path.stem
        add_once(contents, contents.path, name)
        contents.storages[name] = _stored(contents.path, name, told)
    elif isinstance(told, dict):
        for key, value in told.items():
            _add(contents, (*keys, str(key)), value)


def _stored(path: Path, name: str, told: _Array) -> Stored:
    shape = ints(path, name, told.shape, "a shape", 64)
    code = CODES.get(told.dtype) if isinstance(told.dtype, str) else None
    if code is None or not isinstance(told.data, bytes):
        raise bad(path, f"the dtype {told.dtype!r}", name)
    nbytes = math.prod(shape) * BITS[code] // 8
    if nbytes != len(told.data):
        raise bad(path, f"{code} of shape {list(shape)} takes {nbytes:,} bytes, not "
                  f"{len(told.data):,}", name)  # fmt: skip
    memory = np.frombuffer(told.data, np.uint8)
    return Stored(name, code, shape, nbytes, lambda: memory)


def _joined(path: Path, name: str, told: dict[str, Any]) -> _Array:
    """Returns an array that Flax has cut into pieces, since msgpack has at most 4 GiB in one."""
    pieces = told.get("chunks")
    shape = told.get("shape")
    if not isinstance(pieces, dict) or not isinstance(shape, dict) or not pieces:
        raise bad(path, "an array in pieces that are none", name)
    ordered = [pieces.get(str(number)) for number in range(len(pieces))]
    sizes = [shape.get(str(number)) for number in range(len(shape))]
    first = ordered[0]
    if not all(isinstance(x, _Array) and isinstance(x.data, bytes) for x in ordered):
        raise bad(path, "an array in pieces that are none", name)
    return _Array(sizes, first.dtype, b"".join(x.data for x in ordered))  # type: ignore[union-attr]
