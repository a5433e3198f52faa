"""`discover`: what is found, what is not, bit for bit, on random arrays with planted ties."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tied
from tied._discover import discover
from tied._files.dtypes import BITS

RNG = np.random.default_rng(0)
W = RNG.normal(size=(40, 24)).astype("float32")
C = RNG.normal(size=(4, 6, 3, 5)).astype("float16")


def own(x: np.ndarray) -> np.ndarray:
    """A copy in C order."""
    return x.copy(order="C")


def changed(x: np.ndarray, at: int = -3) -> np.ndarray:
    """A copy of which one bit is another one."""
    x = own(x)
    x.reshape(-1).view(np.uint8)[at] ^= 1
    return x


def found(source: Any, **options: Any) -> list[tuple[str, str]]:
    return [(x.kind, f"{x.name} = {x.how}") for x in discover(source, **options).findings]


Case = tuple[np.ndarray, Callable[[Any], Any], str, str]
CASES: dict[str, Case] = {
    "equal": (W, lambda w: w, "equal", "b = a"),
    "transposed": (W, lambda w: w.T, "transposed", "b = a.T"),
    "three axes": (C[0], lambda w: w.transpose(2, 0, 1), "permuted", "b = a.transpose(2, 0, 1)"),
    "a square axis": (
        W[:9, :9].reshape(3, 9, 3), lambda w: w.transpose(2, 1, 0), "permuted",
        "b = a.transpose(2, 1, 0)",
    ),
    "four axes": (C, lambda w: w.transpose(2, 3, 1, 0), "permuted", "b = a.transpose(2, 3, 1, 0)"),
    "an axis of 1": (C[:, :1], lambda w: w.transpose(1, 3, 2, 0), "permuted",
                     "b = a.transpose(1, 3, 2, 0)"),
    "reshaped": (W, lambda w: w.reshape(20, 48), "reshaped", "b = a.reshape(20, 48)"),
    "flat": (C, lambda w: w.reshape(-1), "reshaped", "b = a.reshape(360)"),
    "an axis added": (W, lambda w: w[:, None], "reshaped", "b = a.reshape(40, 1, 24)"),
    "six axes": (W, lambda w: w.reshape(2, 2, 10, 2, 4, 3), "reshaped",
                 "b = a.reshape(2, 2, 10, 2, 4, 3)"),
    "heads": (W, lambda w: w.reshape(8, 5, 24).transpose(2, 0, 1), "reshaped",
              "b = a.reshape(8, 5, 24).transpose(2, 0, 1)"),
    "a kernel, flat": (C, lambda w: w.reshape(24, 15).T, "reshaped", "b = a.reshape(24, 15).T"),
    "rows": (W, lambda w: w[:17], "block", "b = a[:17]"),
    "one row": (W, lambda w: w[:1], "block", "b = a[:1]"),
    "rows, transposed": (W, lambda w: w[:17].T, "block", "b = a[:17].T"),
    "columns": (W, lambda w: w[:, :7], "block", "b = a[:, :7]"),
    "columns, transposed": (W, lambda w: w[:, :7].T, "block", "b = a[:, :7].T"),
    "all but one": (W, lambda w: w[:39], "block", "b = a[:39]"),
    "of a vector": (W[0], lambda w: w[:5], "block", "b = a[:5]"),
    "of four axes": (C, lambda w: w[:3], "block", "b = a[:3]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "file"])
def test_each_kind(case: str, library: str, tmp_path: Path) -> None:
    w, read, kind, text = CASES[case]
    arrays: Any = {"a": own(w), "b": own(read(w)), "c": changed(read(w)), "d": -w - 1}
    if library == "torch":
        arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    elif library == "jax":
        arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    (one,) = discover(
        tied.save(arrays, tmp_path / "x.safetensors") if library == "file" else arrays
    ).findings
    assert (one.kind, f"{one.name} = {one.how}") == (kind, text)
    assert (one.of, one.shape, one.nbytes) == ("a", read(w).shape, read(w).nbytes)
    assert (own(w).reshape(-1)[one.layout.index()] == read(w)).all()


def test_it_prints_as_a_person_reads_it() -> None:
    embed = RNG.normal(size=(1024, 1024)).astype("float32")
    model = {"embed": {"weight": embed}, "head": {"weight": own(embed.T)}}
    model["rows"] = {"weight": own(embed[:2])}
    told = discover(model)
    assert str(told) == (
        "head.weight = embed.weight.T  (was tied? 4.00 MiB twice)\n"
        "rows.weight = embed.weight[:2]  (was tied? 8.00 KiB twice)\n"
        "2 arrays have the values of another one, 4.01 MiB twice"
    )
    assert told.nbytes == embed.nbytes + 8192
    one = discover({"a": W, "b": own(W)})
    assert str(one).splitlines()[1] == "1 array has the values of another one, 3.75 KiB twice"
    assert str(discover({"a": W})) == "no array has the values of another one"


def test_the_largest_is_kept_and_of_those_the_first() -> None:
    arrays = {"b": own(W[:9]), "t": own(W.T), "a": own(W), "r": own(W.T).reshape(-1)}
    assert found(arrays) == [("block", "b = t[:, :9].T"), ("transposed", "a = t.T"),
                             ("reshaped", "r = t.reshape(960)")]  # fmt: skip


def test_the_one_that_the_other_is_a_view_of_is_kept() -> None:
    """A transpose, flat, is no view; what it is the transpose of is a view of it."""
    assert found({"w": W, "flat": own(W.T).reshape(-1)}) == [
        ("reshaped", "w = flat.reshape(24, 40).T")
    ]
    # Once another array reads the first one, that one has to stay.
    arrays = {"w": W, "again": own(W), "flat": own(W.T).reshape(-1)}
    assert found(arrays) == [("equal", "again = w")]
    arrays = {"w": W, "flat": own(W.T).reshape(-1), "again": own(W)}
    assert found(arrays) == [("reshaped", "w = flat.reshape(24, 40).T"),
                             ("reshaped", "again = flat.reshape(24, 40).T")]  # fmt: skip


def test_readings_of_readings_read_what_is_kept() -> None:
    kernel, turned = C, own(C.transpose(2, 3, 1, 0))
    arrays = {"c": kernel, "t": turned, "start": own(turned[:2]), "r": own(C.reshape(12, 30)[:5])}
    arrays["flat"] = own(C.reshape(12, 30))
    for finding in discover(arrays).findings:
        assert finding.of == "c"
        read = kernel.reshape(-1)[finding.layout.index()]
        assert read.tobytes() == arrays[finding.name].tobytes()
    assert [x.name for x in discover(arrays).findings] == ["t", "start", "r", "flat"]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, np.nan])
@pytest.mark.parametrize("shape", [(8, 8), (100_000,), ()])
def test_one_value_is_no_evidence(value: float, shape: tuple[int, ...]) -> None:
    a = np.full(shape, value)
    assert found({"a": a, "b": own(a), "part": own(a[:4] if shape else a)}, least=1) == []
    if shape:
        other = own(a)
        other.reshape(-1)[-1] = 2
        assert found({"a": other, "b": own(other)}) == [("equal", "b = a")]


def test_nothing_and_little_are_no_evidence() -> None:
    empty = np.zeros((0, 5))
    few = np.array([1, 2, 3], "int32")
    arrays = {"a": empty, "b": own(empty), "x": few, "y": own(few), "z": few[:1].copy()}
    assert found(arrays) == []
    assert found(arrays, least=12) == [("equal", "y = x")]
    assert found({"x": W, "y": own(W)}, least=W.nbytes + 1) == []


def test_bits_are_compared() -> None:
    nan = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 1], "uint32").view("float32")
    other = np.array([0x7FC00000, 0x7FC00002, 0xFFC00000, 1], "uint32").view("float32")
    zero = np.array([0.0, 1, 2, 3], "float32")
    arrays = {"nan": nan, "again": own(nan), "payload": other, "zero": zero,
              "minus": zero * np.array([-1, 1, 1, 1], "float32")}  # fmt: skip
    assert found(arrays) == [("equal", "again = nan")]


def test_other_dtypes_never_match() -> None:
    kinds = ["float32", "int32", "uint32"]
    assert found({kind: own(W).view(kind) for kind in kinds}) == []
    assert found({"a": own(W), "wide": own(W).view("float64"), "bits": own(W).view("uint8")}) == []
    half = torch.from_numpy(own(C))
    arrays = {
        "a": half,
        "b": half.clone().view(torch.int16),
        "c": half.clone().view(torch.bfloat16),
    }
    assert found(arrays) == []
    assert found(arrays | {"d": arrays["c"].clone()}) == [("equal", "d = c")]


def raw(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], pad: int = 0) -> Path:
    """A safetensors file of bytes, `pad` spaces behind its header so that nothing is aligned."""
    header: dict[str, Any] = {}
    at = 0
    for name, (code, shape, data) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values())
    )
    return path


@pytest.mark.parametrize("pad", [0, 1, 2, 3])
@pytest.mark.parametrize("code", BITS)
def test_every_dtype_of_safetensors(code: str, pad: int, tmp_path: Path) -> None:
    size = max(1, BITS[code] // 8)
    bits = RNG.integers(0, 2 if code == "BOOL" else 256, (12, 8, size), np.uint8)
    data, turned, start = bits.tobytes(), bits.transpose(1, 0, 2).tobytes(), bits[:5].tobytes()
    near = data[:-1] + bytes([data[-1] ^ 1])
    count = 96 * 8 // BITS[code] if BITS[code] < 8 else 96
    shape = (12, 8) if count == 96 else (count // 8, 8)
    tensors = {"a": (code, shape, data), "b": (code, shape, data), "near": (code, shape, near)}
    expected = [("equal", "b = a")]
    if count == 96:
        tensors |= {"t": (code, (8, 12), turned), "start": (code, (5, 8), start)}
        expected += [("transposed", "t = a.T"), ("block", "start = a[:5]")]
    else:  # elements that are no whole bytes have no other order
        tensors["flat"] = (code, (count,), data)
    assert found(raw(tmp_path / "x.safetensors", tensors, pad)) == expected
