"""How far the elements of two arrays are apart, whatever their dtypes; a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tied._files.dtypes import BITS, NAMES

PIECE = 3 << 18
"""Elements that are compared at a time; eight of them are whole bytes in every dtype."""

_F8 = {
    "F8_E4M3": (4, 7), "F8_E5M2": (5, 15), "F8_E4M3FNUZ": (4, 8), "F8_E5M2FNUZ": (5, 16),
    "F8_E8M0": (8, 127),
}  # fmt: skip


@dataclass(slots=True)
class Difference:
    """What two arrays of one shape disagree on.

    Attributes:
        elements: The elements of each.
        differing: How many differ. Two NaNs are the same, and so are 0 and -0, unless bits count.
        nans: How many of those are NaN in one array only.
        largest: The largest absolute difference of the others; None if there are none, or if the
            dtype has no numbers that are known here.
        at: The position of that, in C order.
    """

    elements: int
    differing: int = 0
    nans: int = 0
    largest: float | int | None = None
    at: int = -1


def difference(
    a: Any, b: Any, codes: tuple[str, str], elements: int, bits: bool,
    progress: Callable[[int], object],
) -> Difference:  # fmt: skip
    """Compares two arrays.

    Args:
        a: The bytes of one, in C order, as a 1-D uint8 array.
        b: The bytes of the other.
        codes: Their dtypes, as in safetensors.
        elements: How many elements each has.
        bits: Count elements whose bits differ, so that NaN payloads and signs of zeros count.
        progress: Is told how many bytes of both were compared.
    """
    found = Difference(elements)
    for start in range(0, elements, PIECE):
        stop = min(start + PIECE, elements)
        one, other = (x[start * BITS[c] // 8 : -(-stop * BITS[c] // 8)]
                      for x, c in zip((a, b), codes, strict=True))  # fmt: skip
        if codes[0] != codes[1] or not np.array_equal(one, other):
            _compare(found, one, other, codes, start, bits)
        progress(one.size + other.size)
    return found


def _compare(
    found: Difference, a: Any, b: Any, codes: tuple[str, str], start: int, bits: bool
) -> None:
    x, y = numbers(a, codes[0]), numbers(b, codes[1])
    if x is None or y is None:
        found.differing += int(_bitwise(a, b, BITS[codes[0]]).sum())
        return
    if codes[0] != codes[1]:
        x, y = _alike(x, y)
    apart, nan = _apart(x, y)
    differs = _bitwise(a, b, BITS[codes[0]]) if bits and codes[0] == codes[1] else nan | (apart > 0)
    found.differing += int(differs.sum())
    found.nans += int(nan.sum())
    if not nan.all():
        where = int(np.argmax(np.where(nan, 0, apart)))
        largest = apart[where].item()
        if found.largest is None or largest > found.largest:
            found.largest, found.at = largest, start + where


def _apart(x: Any, y: Any) -> tuple[Any, Any]:
    """Returns the distances of elements, and which are NaN on one side only."""
    if x.dtype.kind in "bu":
        return np.where(x > y, x - y, y - x) if x.dtype.kind == "u" else (x ^ y).view("u1"), (
            np.zeros(x.shape, bool)
        )
    if x.dtype.kind == "i":
        wide = f"u{x.dtype.itemsize}"
        low, high = np.minimum(x, y).view(wide), np.maximum(x, y).view(wide)
        return high - low, np.zeros(x.shape, bool)
    nan = np.isnan(x) ^ np.isnan(y)
    wide = "complex128" if x.dtype.kind == "c" else "float64"
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x.astype(wide) - y.astype(wide))
    apart[np.isnan(apart) & (x == y)] = 0  # infinities of one sign
    apart[np.isnan(x) & np.isnan(y)] = 0
    apart[np.isnan(apart) & ~nan] = np.inf  # complex infinities that differ
    return apart, nan


def _alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Returns numbers of two dtypes in one that both can be compared in."""
    wide = "complex128" if "c" in (x.dtype.kind, y.dtype.kind) else "float64"
    return x.astype(wide), y.astype(wide)


def _bitwise(a: Any, b: Any, bits: int) -> Any:
    """Returns which elements have other bits."""
    if bits % 8:
        return (np.unpackbits(a ^ b, bitorder="little").reshape(-1, bits)).any(axis=1)
    return (a != b).reshape(-1, bits // 8).any(axis=1)


def numbers(raw: Any, code: str) -> Any:
    """Returns bytes as numbers of NumPy, those of 8 and 16 bits that it has not as float32.

    None if the dtype has none that are known here.
    """
    if code in _F8:
        return _table(code)[raw]
    if code == "BF16":
        return (_aligned(raw, "<u2").astype("<u4") << 16).view("<f4")
    if BITS[code] % 8:
        return None
    return _aligned(raw, NAMES[code])


def _aligned(raw: Any, dtype: str) -> Any:
    x = raw if raw.ctypes.data % 8 == 0 else raw.copy()
    return x.view(np.dtype(dtype).newbyteorder("<"))


@cache
def _table(code: str) -> Any:
    """Returns the numbers of the 256 elements of a float of 8 bits."""
    exponents, bias = _F8[code]
    raw = np.arange(256)
    if code == "F8_E8M0":
        table = np.ldexp(1.0, raw - bias)
        table[255] = np.nan
        return table
    mantissas = 7 - exponents
    exponent, mantissa = (raw & 127) >> mantissas, raw & ((1 << mantissas) - 1)
    size = np.where(
        exponent == 0,
        np.ldexp(mantissa, 1 - bias - mantissas),
        np.ldexp(mantissa + (1 << mantissas), exponent - bias - mantissas),
    )
    table = np.where(raw < 128, size, -size)
    for special, value in _specials(code):
        table[special] = value
    return table.astype("float32")


def _specials(code: str) -> Iterator[tuple[Any, float]]:
    if code.endswith("FNUZ"):
        yield 128, np.nan
    elif code == "F8_E4M3":
        yield [127, 255], np.nan
    else:
        yield [124, 252], np.inf
        yield 252, -np.inf
        yield [125, 126, 127, 253, 254, 255], np.nan
