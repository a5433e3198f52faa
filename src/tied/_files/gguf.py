"""Files of GGML (`.gguf`), read without a library: tensors, mapped; quantised ones as bytes.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tied._files.contents import Alias, Checkpoint, Stored
from tied._files.dtypes import BITS
from tied._files.header import bad
from tied._files.outside import add_once, tell_types
from tied._files.read import Mapped
from tied._layout import Layout

_CODES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
# Name, elements of a block, bytes of a block: ggml.c, `type_traits`.
_BLOCKS = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DEPTH, _RANK = 8, 8
_ALIGNMENT = 32


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def open_gguf(path: Path) -> Checkpoint:
    """Returns the contents of a file.

    A tensor of a quantised type is an array of bytes, the blocks of a row in its last dimension;
    what it is stands in the metadata `tied.types`. Two tensors at one place are tied.

    Raises:
        FileError: The file is not sound.
    """
    contents = Checkpoint(path, "gguf", {}, files=(path,))
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise bad(path, "no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(path, data)
            tensors = _head(reader, contents)
            length = len(data)
    try:
        align = int(contents.metadata.get("general.alignment", _ALIGNMENT))
    except ValueError:
        align = 0
    if align <= 0 or align & (align - 1):
        raise bad(path, "an alignment that is no power of two")
    start = -(-reader.at // align) * align
    _add(contents, sorted(tensors, key=lambda x: x.offset), start, length)
    return contents


def _head(reader: _Reader, contents: Checkpoint) -> list[_Tensor]:
    """Reads what stands before the tensors; texts and numbers become metadata."""
    version = reader.number("I")
    if version not in (2, 3):
        big = version & 0xFFFF == 0
        raise bad(reader.path, "a big-endian file" if big else f"GGUF of version {version}")
    count, fields = reader.number("Q"), reader.number("Q")
    reader.expect(count * 24 + fields * 13)  # the least that they take
    for _ in range(fields):
        name = reader.text()
        value = reader.value(reader.number("I"))
        if name in contents.metadata:
            raise bad(reader.path, "a field that is there twice", name)
        if value is not None:
            contents.metadata[name] = str(value)
    return [_tensor(reader) for _ in range(count)]


def _tensor(reader: _Reader) -> _Tensor:
    name, rank = reader.text(), reader.number("I")
    if rank > _RANK:
        raise bad(reader.path, f"{rank} dimensions", name)
    shape = tuple(reversed([reader.number("Q") for _ in range(rank)]))
    return _Tensor(name, shape, reader.number("I"), reader.number("Q"))


def _add(contents: Checkpoint, tensors: list[_Tensor], start: int, length: int) -> None:
    """Adds the tensors, in the order of their bytes; no two of them may overlap."""
    path = contents.path
    maps = Mapped(path)
    types: dict[str, str] = {}
    end, last = start, None
    for number, x in enumerate(tensors):
        add_once(contents, path, x.name)
        if last is not None and (x.offset, x.shape, x.kind) == (last.offset, last.shape, last.kind):
            whole = Layout.whole(contents.storages[last.name].shape)
            contents.aliases[x.name] = Alias(x.name, last.name, whole)
            continue
        first = start + x.offset
        behind = start + tensors[number + 1].offset if number + 1 < len(tensors) else length
        code, shape = _elements(path, x, behind - first, types)
        nbytes = math.prod(shape) * BITS[code] // 8
        if first < end or first + nbytes > length:
            what = "overlap others" if first < end else "lie outside of the file"
            raise bad(path, f"bytes that {what}", x.name)
        contents.storages[x.name] = Stored(
            x.name, code, shape, nbytes, partial(maps.part, first, nbytes), path, first
        )
        end, last = first + nbytes, x
    tell_types(contents, types)


def _elements(
    path: Path, x: _Tensor, room: int, types: dict[str, str]
) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape of a tensor; those of its bytes, if its type is quantised.

    What it is then goes to `types`.
    """
    if x.kind in _CODES:
        return _CODES[x.kind], x.shape
    if x.kind not in _BLOCKS:
        types[x.name] = f"type {x.kind} {x.shape}"
        return "U8", (max(room, 0),)
    name, elements, nbytes = _BLOCKS[x.kind]
    if not x.shape or x.shape[-1] % elements:
        raise bad(path, f"rows that are no whole blocks of {name}", x.name)
    types[x.name] = f"{name} {x.shape}"
    return "U8", (*x.shape[:-1], x.shape[-1] // elements * nbytes)


class _Reader:
    """Reads numbers and texts from a file, and never beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 4

    def expect(self, nbytes: int) -> None:
        if nbytes > len(self.data) - self.at:
            raise bad(self.path, "a file that ends too soon")

    def take(self, nbytes: int) -> bytes:
        self.expect(nbytes)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise bad(self.path, f"a name that is no text ({error})") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """Returns a text or number; None for an array, which is passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.take(self.number("Q")).decode(errors="replace")
        if kind != _ARRAY or depth >= _DEPTH:
            raise bad(self.path, f"a field of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            nbytes = count * struct.calcsize(f"<{_SCALARS[inner]}")
            self.expect(nbytes)
            self.at += nbytes
            return None
        self.expect(count * 8)
        for _ in range(count):
            self.value(inner, depth + 1)
        return None
