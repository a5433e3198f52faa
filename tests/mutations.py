"""Small files that were sound, changed at random: what the tests and `make fuzz` give the reader.

A file is changed byte by byte, or as what it means: a value of its header or of its tie table is
replaced by one that is likely to hurt, and the lengths are made to fit again.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tied
from tied._checkpoint import open_checkpoint
from tied._files.contents import Checkpoint
from tied._files.dtypes import BITS

SIDES = (0, 1, 2, 3, 4, 6, 8, 24, 63, 64, 255, 256)
POWERS = (31, 32, 53, 59, 60, 61, 62, 63, 64, 65, 100)
HURTING: tuple[Any, ...] = (
    *SIDES, *(-n for n in SIDES), *(1 << n for n in POWERS), *((1 << n) - 1 for n in POWERS),
    *(-(1 << n) for n in POWERS), None, True, False, "", "w", "v", "tied", "F32", "F4", "F6_E2M3",
    "C64", "BOOL", "U8", "\ud800", "\x00", "../w", 0.5, 1.0, 1e400, float("nan"), [], {}, [[]], [0],
    [1 << 62], [1 << 32, 1 << 32], [0, 1 << 62, 1 << 62], [-1], [1, 2, 3], [0] * 65, {"a": 1},
    {"of": "w", "shape": [2], "strides": [1], "offset": 0},
)  # fmt: skip
TOKENS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"9" * 30, b"1e999", b"\\u0000",
          b"\\ud800", b"null", b"NaN", b"\xff", b"\x00", b" " * 9, b"[" * 2000)  # fmt: skip


def seeds() -> list[bytes]:
    """Files with everything that the format has, some hundred bytes each."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    c = np.arange(3).astype(np.complex64)
    b = np.arange(8, dtype=np.int16)
    models: list[Any] = [
        {"w": w, "t": w.T, "same": w, "row": w[1], "flip": w[::-1], "bits": w.view(np.uint8)},
        {"c": c, "real": c.real, "star": tied.adjoint(c), "none": np.empty((0, 3), np.int8)},
        {"a": b[:5], "b": b[3:], "ones": np.broadcast_to(b[0], (2, 2)), "u": np.ones(3, bool)},
        {"x": np.ones(2), "y": np.ones(3, np.uint8)},
    ]
    made = [written(model) for model in models]
    return [*made, written(models[0], expand=True)]


def written(model: Any, **how: Any) -> bytes:
    """The bytes of a file."""
    with tempfile.TemporaryDirectory() as folder:
        return tied.save(model, Path(folder) / "x.safetensors", **how).read_bytes()


def mutated(content: bytes, numbers: random.Random) -> bytes:
    """A changed file."""
    for _ in range(numbers.choice((1, 1, 1, 2, 3))):
        change = numbers.choice((meant, meant, meant, flipped, spliced, cut))
        content = change(content, numbers)
    return content


def parts(content: bytes) -> tuple[Any, bytes] | None:
    """The header, with the tie table in it as JSON too, and the data; None if there are none."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length].decode("utf-8", "surrogatepass"))
        told = header["__metadata__"]["tied"]
        header["__metadata__"]["tied"] = json.loads(told)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return header, content[8 + length :]


def meant(content: bytes, numbers: random.Random) -> bytes:
    """A value is replaced, removed or doubled, somewhere in the header or the table."""
    found = parts(content)
    if found is None:
        return flipped(content, numbers)
    header, data = found
    inner = numbers.choice(list(places(header)))
    key = numbers.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    what = numbers.random()
    if what < 0.7:
        inner[key] = numbers.choice(HURTING)
    elif what < 0.8:
        del inner[key]
    elif what < 0.9 and isinstance(inner, dict):
        inner[numbers.choice(("w", "v", "a", "tied", "__metadata__", "dtype", "more"))] = inner[key]
    else:
        other = numbers.choice(list(places(header)))
        inner[key] = json.loads(json.dumps(other))
    table = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(table, dict) and "tied" in table:
        table["tied"] = json.dumps(table["tied"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def places(told: Any) -> Any:
    """Every object and list that is not empty, in JSON."""
    if isinstance(told, dict | list) and told:
        yield told
        for inner in list(told.values() if isinstance(told, dict) else told):
            yield from places(inner)


def flipped(content: bytes, numbers: random.Random) -> bytes:
    """Some bytes are others."""
    changed = bytearray(content)
    for _ in range(numbers.randint(1, 4)):
        if changed:
            at = numbers.randrange(len(changed))
            changed[at] = numbers.choice((changed[at] ^ (1 << numbers.randrange(8)), 0, 0xFF))
    return bytes(changed)


def spliced(content: bytes, numbers: random.Random) -> bytes:
    """Something is put in, and the length of the header fits, or does not."""
    at, token = numbers.randint(8, max(8, len(content))), numbers.choice(TOKENS)
    length = int.from_bytes(content[:8], "little") + numbers.choice((0, len(token)))
    rest = content[8:at] + token + content[at + numbers.choice((0, 0, len(token))) :]
    return min(length, (1 << 64) - 1).to_bytes(8, "little") + rest


def cut(content: bytes, numbers: random.Random) -> bytes:
    """It ends too early, or too late."""
    end = numbers.randint(0, len(content) + 9)
    return content[:end].ljust(end, b"\0")


# -------------------------------------------------------------------------------- the judgement


def judge(path: Path) -> bool:
    """Opens and loads a file; True if it was taken.

    Raises:
        AssertionError: It was taken, and something in it reaches outside of the file.
        Exception: It was refused by an error that is not one of tied's.
    """
    error: tied.TiedError
    try:
        contents = open_checkpoint(path)
    except tied.FileError as caught:
        error = caught
    else:
        inside(contents, path.stat().st_size)
        return is_loaded(contents, path)
    assert error.message.startswith("this checkpoint can't be trusted: "), error
    return False


def is_loaded(contents: Checkpoint, path: Path) -> bool:
    try:
        loaded = tied.load(path)
    except (tied.FileError, tied.DtypeError) as error:
        named = bool(error.paths)
    else:
        read(contents, loaded)
        return True
    assert named
    return False


def read(contents: Checkpoint, loaded: dict[str, Any]) -> None:
    """Reads every element of what is small."""
    assert loaded.keys() == {*contents.names()}
    for name, array in loaded.items():
        assert tuple(array.shape) == contents.shape(name)
        if 0 < array.size <= 4096:
            np.asarray(array).tobytes()


def inside(contents: Checkpoint, length: int) -> None:
    """No storage reaches out of the file, no alias out of its storage; by arithmetic alone."""
    for stored in contents.storages.values():
        assert 0 <= stored.start <= stored.start + stored.nbytes <= length
    for alias in contents.aliases.values():
        stored, layout = contents.storages[alias.of], alias.layout
        if 0 in layout.shape or stored.nbytes == 0:
            continue
        each = stored.nbytes // max(1, int(np.prod(stored.shape)))
        unit, last = (1, BITS[layout.dtype] // 8) if layout.dtype else (each, each)
        ends = [(n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True)]
        low = (layout.offset + sum(x for x in ends if x < 0)) * unit
        high = (layout.offset + sum(x for x in ends if x > 0)) * unit + last
        assert low >= 0, alias
        assert high <= stored.nbytes, alias
