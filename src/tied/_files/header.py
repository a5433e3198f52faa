"""The header of a safetensors file, read as something that a stranger may have written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from tied._errors import FileError
from tied._files.dtypes import BITS

MOST = 100_000_000  # bytes of a header, as safetensors itself has it
_RANK = 64


class Entry(NamedTuple):
    """A tensor of a file.

    Attributes:
        dtype: Its code in safetensors: `"F32"`.
        shape: Its shape.
        start: Where its bytes start, counted from the start of the file.
        nbytes: How many they are.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Header(NamedTuple):
    """What a safetensors file says of itself.

    Attributes:
        entries: Its tensors, in the order of their bytes.
        metadata: Its metadata.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Reads and checks the header of a file.

    Raises:
        FileError: It is no safetensors file, or one whose lengths, offsets, shapes or names are
            wrong; no memory for tensors is touched before all are checked.
    """
    with opened(path) as file:
        length = os.fstat(file.fileno()).st_size
        if length < 8:
            raise bad(path, f"a safetensors file has at least 8 bytes, this one has {length}")
        size = int.from_bytes(file.read(8), "little")
        if size > MOST:
            raise bad(path, f"a header of {size:,} bytes; at most {MOST:,} are read")
        if 8 + size > length:
            raise bad(path, f"a header of {size:,} bytes in a file of {length:,}")
        text = file.read(size)
    told = parse(path, text)
    metadata = _metadata(path, told.pop("__metadata__", {}))
    entries = {name: _entry(path, name, x, 8 + size, length) for name, x in told.items()}
    return Header(_in_order(path, entries, 8 + size, length), metadata)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Gives a file to read; not what is no file, which might never end, nor begin.

    Raises:
        FileError: It is none, or can't be read.
    """
    try:
        if not os.path.isfile(path):
            raise FileError("this is no file", facts=[("file", str(path))])
        with path.open("rb") as file:
            yield file
    except OSError as error:
        facts = [("file", str(path)), ("why", error.strerror or str(error))]
        raise FileError("this file can't be read", facts=facts) from error


def small_file(path: Path) -> bytes:
    """Returns the bytes of a file that is to be read whole, such as an index."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST:
            raise bad(path, f"JSON of more than {MOST:,} bytes")
        return file.read(size)


def bad(path: Path, what: str, name: str | None = None) -> FileError:
    """Returns the error about a file, and a tensor in it."""
    facts = [("file", str(path))] if name is None else [("file", str(path)), ("tensor", name)]
    return FileError(f"this checkpoint can't be trusted: {what}", facts=facts,
                     paths=[] if name is None else [name])  # fmt: skip


def parse(path: Path, text: bytes) -> dict[str, Any]:
    """Returns a JSON object all of whose keys are there once."""
    try:
        told = json.loads(text.decode(), object_pairs_hook=lambda pairs: _once(path, pairs),
                          parse_constant=lambda x: _no_number(path, x))  # fmt: skip
    except RecursionError:
        raise bad(path, "JSON that is nested too deep") from None
    except FileError:
        raise
    except ValueError as error:  # no UTF-8, no JSON, or an integer of thousands of digits
        raise bad(path, f"no JSON ({error})") from error
    if not isinstance(told, dict):
        raise bad(path, "JSON that is no object")
    return told


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for key, value in pairs:
        if key in told:
            raise bad(path, "a key that is there twice", key)
        if not is_text(key):
            raise bad(path, "a name that is no text", ascii(key))
        told[key] = value
    return told


def is_text(name: str) -> bool:
    """Returns whether a string can be written as UTF-8 (half of a surrogate pair can't)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_number(path: Path, text: str) -> Any:
    raise bad(path, f"{text} in JSON")


def _metadata(path: Path, told: Any) -> dict[str, str]:
    texts = isinstance(told, dict) and all(isinstance(x, str) and is_text(x) for x in told.values())
    if not texts:
        raise bad(path, "metadata that is no object of strings")
    return dict(told)


def _entry(path: Path, name: str, told: Any, first: int, length: int) -> Entry:
    if not isinstance(told, dict) or told.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad(path, "a tensor needs dtype, shape and data_offsets, and no more", name)
    dtype, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise bad(path, f"the dtype {dtype!r}", name)
    shape = ints(path, name, shape, "a shape", _RANK)
    offsets = ints(path, name, offsets, "offsets", 2)
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= length - first:
        raise bad(path, f"offsets {list(offsets)} in {length - first:,} bytes of data", name)
    bits = math.prod(shape) * BITS[dtype]
    if too_large(shape, dtype) or bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        takes = f"{bits // 8:,}" if not too_large(shape, dtype) else "more than 2**63"
        raise bad(path, f"{dtype} of shape {list(shape)} takes {takes} bytes, not "
                  f"{offsets[1] - offsets[0]:,}", name)  # fmt: skip
    return Entry(dtype, shape, first + offsets[0], offsets[1] - offsets[0])


def too_large(shape: tuple[int, ...], dtype: str) -> bool:
    """Returns whether no array can have a shape, even if one of its dimensions is 0."""
    return math.prod(max(1, n) for n in shape) * BITS[dtype] >> 66 > 0


def ints(path: Path, name: str, told: Any, what: str, most: int, low: int = 0) -> tuple[int, ...]:
    """Returns a list of JSON as a tuple of integers, none of them below `low`."""
    if not isinstance(told, list) or len(told) > most:
        raise bad(path, f"{what} that is no list of at most {most} integers", name)
    if not all(type(x) is int and low <= x < 1 << 63 for x in told):
        raise bad(path, f"{what} {told} of what can't be that", name)
    return tuple(told)


def _in_order(path: Path, entries: dict[str, Entry], first: int, length: int) -> dict[str, Entry]:
    """Returns the entries in the order of their bytes; those cover the file, each once."""
    ordered = sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].nbytes))
    at = first
    for name, entry in ordered:
        if entry.start != at:
            what = "overlap others" if entry.start < at else "leave a hole before them"
            raise bad(path, f"bytes that {what}", name)
        at += entry.nbytes
    if at != length:
        raise bad(path, f"{length - at:,} bytes behind the last tensor")
    return dict(ordered)
