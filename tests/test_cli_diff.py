"""`tied diff`: ties lost or made, names, shapes, dtypes, values; exit code 1 if any differs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kinds
import tied
from commands import Ran, autoencoder, run, text
from tied._cli import relations, values
from tied._files.dtypes import BITS, NAMES


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(name: str, **arrays: Any) -> Path:
    return tied.save(arrays, f"{name}.safetensors")


def diff(*options: str) -> Ran:
    ran = run("diff", "a.safetensors", "b.safetensors", *options)
    assert ran.err == ""
    return ran


def differs(block: str, *options: str) -> None:
    ran = diff(*options)
    assert (ran.out, ran.code) == (text(block), 1)


W = np.arange(6, dtype="float32").reshape(3, 2)


def test_the_same() -> None:
    path = autoencoder(Path())
    assert run("diff", path, path)[:2] == (
        0,
        "the same in names, ties, shapes, dtypes and values (3 common names, 72 B compared)\n",
    )
    assert run("diff", path, path, "--bits").out == (
        "the same bit by bit (3 common names, 72 B compared)\n"
    )
    assert run("diff", path, path, "--no-values").out == (
        "the same in names, ties, shapes and dtypes; values were not compared (3 common names)\n"
    )


def test_everything_that_can_differ() -> None:
    save("a", w=W, t=W.T, r=W, gone=W.copy(), s=W.copy(), d=W.copy(), v=W.copy())
    v = W.copy()
    v[2, 1] += 0.5
    save("b", w=W, t=W.T.copy(), r=W, new=W.copy(), s=W.T.copy(), d=W.astype("float64"), v=v,
         alias=v[1:])  # fmt: skip
    differs("""
        only in A  gone  (3, 2)  float32
        only in B  new  (3, 2)  float32
        only in B  alias = v[1:]  (2, 2)  float32
        tie lost   t = w.T
        shape      s: (3, 2); in B (2, 3)
        dtype      d: float32; in B float64
        values     v: 1 of 6 elements differ, by at most 0.5 at [2, 1]
        A and B differ (6 common names)
        """)


def test_a_tie_that_was_made() -> None:
    save("a", w=W, t=W.T.copy())
    save("b", w=W, t=W.T)
    differs("""
        tie made  t = w.T
        A and B differ (2 common names)
        """)


def test_a_tie_is_the_same_whichever_of_its_names_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Lists of positions would take many times the memory of a large tensor.
    monkeypatch.delattr(relations, "places")
    wide = np.ascontiguousarray(W.T)
    save("a", w=W, t=W.T, u=W[1:])
    tied.save({"t": wide, "w": wide.T, "u": wide.T[1:]}, "b.safetensors")
    assert diff().code == 0
    tied.save({"t": wide, "w": wide.T, "u": wide.T[:2]}, "b.safetensors")
    differs("""
        tie changed  u = w[1:]; in B u = t[:, :2].T
        values       u: 4 of 4 elements differ, by at most 2 at [0, 0]
        A and B differ (3 common names)
        """)


def test_a_tie_of_a_span_is_the_same_if_the_span_is_another() -> None:
    buffer = np.arange(20, dtype="float32")
    save("a", x=buffer[:12], y=buffer[8:16])
    save("b", x=buffer[:12], y=buffer[8:16], z=buffer)
    assert diff("--json").json["ties_changed"] == []
    save("b", x=buffer[:12], y=buffer[7:15])
    assert diff("--json").json["ties_changed"] == [
        {"name": "y", "a": "elements 8 to 15", "b": "elements 7 to 14"}
    ]
    c = np.arange(4, dtype="complex64")
    save("a", c=c, x=c.view("u1")[4:8])
    save("b", c=c, x=c.view("u1")[4:8], d=c[::-1])
    assert diff("--json").json["ties_changed"] == []
    save("b", c=c, x=c.view("u1")[5:9])
    assert [tie["name"] for tie in diff("--json").json["ties_changed"]] == ["x"]


# A file has no records, and arrays on `meta` have no values.
@pytest.mark.parametrize("name", [n for n in kinds.KINDS if n not in ("field", "no_tie_meta")])
def test_each_kind_of_tie_is_seen_to_be_lost(name: str) -> None:
    kind = kinds.KINDS[name]
    model = kind.model("numpy" if "numpy" in kind.libraries else "torch")
    path = tied.save(model, "a.safetensors")
    assert run("diff", path, path).code == 0
    arrays = {name: np.array(x) for name, x in tied.load(path).items()}
    tied.save(arrays, "b.safetensors")
    lost, made = diff("--json").json, run("diff", "b.safetensors", "a.safetensors", "--json").json
    is_tied = bool(tied.ties(tied.load(path)).groups)
    assert (lost["same"], made["same"]) == (not is_tied, not is_tied)
    assert lost["ties_lost"] == made["ties_made"]
    assert bool(lost["ties_lost"]) == is_tied
    assert (lost["values"], lost["shapes"], lost["ties_made"]) == ([], [], [])


def test_names_of_one_buffer_that_share_no_element_are_no_tie() -> None:
    """T42: a pickle of torch has such names in one storage."""
    buffer = torch.arange(10.0)
    torch.save({"a": buffer[:6], "b": buffer[4:8], "c": buffer[8:]}, "a.pt")
    torch.save({"a": buffer[:6], "b": buffer[4:8], "c": buffer[8:].clone()}, "b.pt")
    assert run("diff", "a.pt", "b.pt").code == 0
    torch.save({"a": buffer[:6], "b": buffer[4:8].clone(), "c": buffer[8:]}, "b.pt")
    assert len(run("diff", "a.pt", "b.pt", "--json").json["ties_lost"]) == 1


def test_a_tie_between_names_whose_storage_is_gone() -> None:
    save("a", w=W, x=W[:2], y=W[1:], z=W[2:])
    save("b", x=W[:2], y=W[1:], z=W[2:].copy())
    assert [tie["name"] for tie in diff("--json").json["ties_lost"]] == ["z"]
    save("b", x=W[:2].copy(), y=W[1:].copy(), z=W[2:].copy())
    assert [tie["name"] for tie in diff("--json").json["ties_lost"]] == ["y", "z"]


def test_formats_may_differ() -> None:
    e = torch.arange(6.0).reshape(3, 2)
    torch.save({"e": e, "t": e.T}, "model.pt")
    tied.save({"e": e, "t": e.T}, "shards", max_shard_bytes=1)
    np.savez("model.npz", e=e.numpy(), t=e.T.numpy())
    assert run("diff", "model.pt", "shards").code == 0
    assert run("diff", "model.npz", "shards").out == text("""
        tie made  t = e.T
        A and B differ (2 common names)
        """)


def test_nan_and_zero_are_the_same_unless_bits_count() -> None:
    a = np.array([np.nan, 0.0, 1.0, np.inf], "float32")
    b = np.array([np.nan, -0.0, 1.0, np.inf], "float32")
    b.view("u4")[0] ^= 1  # another NaN
    save("a", x=a)
    save("b", x=b)
    assert diff().code == 0
    differs("""
        values  x: 2 of 4 elements differ in their bits only
        A and B differ (1 common name)
        """, "--bits")  # fmt: skip
    b[2] = np.nan
    b[3] = -np.inf
    save("b", x=b)
    differs("""
        values  x: 2 of 4 elements differ, by at most inf at [3], 1 NaN on one side only
        A and B differ (1 common name)
        """)
    (told,) = diff("--json").json["values"]
    assert told == {"name": "x", "elements": 4, "differing": 2, "nans": 1, "largest": "inf",
                    "at": [3]}  # fmt: skip


def test_values_of_dtypes_that_differ_are_compared_too() -> None:
    save("a", x=np.array([1, 1.001], "float32"))
    save("b", x=np.array([1, 1.001], ml_dtypes.bfloat16))
    differs("""
        dtype   x: float32; in B bfloat16
        values  x: 1 of 2 elements differ, by at most 0.001 at [1]
        A and B differ (1 common name)
        """)
    assert "dtype " in diff("--no-values").out
    assert "values" not in diff("--no-values").out


def test_a_scalar_and_an_empty_array() -> None:
    save("a", x=np.array(1.0), e=np.zeros((0, 3), "float32"))
    save("b", x=np.array(1.5), e=np.zeros((0, 3), "float32"))
    differs("""
        values  x: 1 of 1 element differs, by at most 0.5
        A and B differ (2 common names)
        """)


def test_integers_are_told_exactly() -> None:
    save("a", i=np.array([-(2**63), 5]), u=np.array([2**64 - 1], "uint64"), b=np.array([True]))
    save("b", i=np.array([2**63 - 1, 5]), u=np.array([0], "uint64"), b=np.array([False]))
    differs("""
        values  i: 1 of 2 elements differ, by at most 18,446,744,073,709,551,615 at [0]
        values  u: 1 of 1 element differs, by at most 18,446,744,073,709,551,615 at [0]
        values  b: 1 of 1 element differs, by at most 1 at [0]
        A and B differ (3 common names)
        """)


def test_a_long_listing_is_cut() -> None:
    save("a", **{f"w{i}": np.zeros(1) for i in range(60)})
    save("b", x=np.zeros(1))
    lines = diff().out.splitlines()
    assert lines[50:] == ["... and 11 more differences; --all lists all",
                          "A and B differ (0 common names)"]  # fmt: skip
    assert len(diff("--all").out.splitlines()) == 62


def test_json() -> None:
    save("a", w=W, t=W.T, u=W[1:], s=np.zeros(2, "float32"), d=np.zeros(1, "float32"), x=W)
    save("b", w=W, t=W.T + 1, u=W[:2], s=np.zeros(3, "float32"), d=np.zeros(1, "float64"), y=W)
    assert diff("--json").json == {
        "command": "diff",
        "a": "a.safetensors",
        "b": "b.safetensors",
        "same": False,
        "values_compared": True,
        "bits": False,
        "names": 5,
        "compared_nbytes": 24 + 24 + 24 + 24 + 16 + 16 + 4 + 8,
        "only_in_a": ["x"],
        "only_in_b": ["y"],
        "ties_lost": [{"name": "t", "reads": "w.T"}],
        "ties_made": [],
        "ties_changed": [{"name": "u", "a": "w[1:]", "b": "w[:2]"}],
        "shapes": [{"name": "s", "a": [2], "b": [3]}],
        "dtypes": [{"name": "d", "a": "F32", "b": "F64"}],
        "values": [
            {"name": "t", "elements": 6, "differing": 6, "nans": 0, "largest": 1, "at": [0, 0]},
            {"name": "u", "elements": 4, "differing": 4, "nans": 0, "largest": 2, "at": [0, 0]},
        ],
    }


def test_values_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(1000, dtype="int16")
    y = x.copy()
    y[[3, 500, 999]] -= [1, 7, 2]
    monkeypatch.setattr(values, "PIECE", 16)
    save("a", x=x)
    save("b", x=y)
    assert "3 of 1,000 elements differ, by at most 7 at [500]" in diff().out


NUMBERS = [code for code in BITS if BITS[code] % 8 == 0]


@pytest.mark.parametrize("code", NUMBERS)
def test_numbers_of_each_dtype(code: str) -> None:
    raw = np.arange(256, dtype="uint8")
    if BITS[code] > 8:
        raw = np.random.default_rng(0).integers(0, 256, 512, dtype="uint8")
    if code == "BOOL":
        raw = raw % 2
    name = NAMES[code]
    expected = raw.view(getattr(ml_dtypes, name, name))
    told = values.numbers(raw, code)
    # fnuz floats and e8m0 have no infinities; ml_dtypes knows each value as a float64.
    wide = {"c": "complex128", "V": "float64", "f": "float64"}.get(expected.dtype.kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # signalling NaNs
        np.testing.assert_array_equal(
            told.astype(wide or told.dtype), expected.astype(wide or told.dtype)
        )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["F32", "F16", "F64", "I8", "I64", "U16", "C64", "F8_E5M2", "BF16"]),
    st.binary(min_size=48, max_size=48), st.binary(min_size=48, max_size=48), st.booleans(),
)  # fmt: skip
def test_difference_is_that_of_numpy(code: str, a: bytes, b: bytes, half: bool) -> None:
    one, other = np.frombuffer(a, "u1"), np.frombuffer(b, "u1").copy()
    if half:
        other[24:] = one[24:]
    x, y = (values.numbers(raw, code) for raw in (one, other))
    told = values.difference(one, other, (code, code), x.size, False, lambda n: None)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    assert told.differing == int((~same).sum())
    assert told.nans == int((np.isnan(x) ^ np.isnan(y)).sum())
    exact = values.difference(one, other, (code, code), x.size, True, lambda n: None)
    size = BITS[code] // 8
    assert exact.differing == int((one != other).reshape(-1, size).any(axis=1).sum())
    numbers = [(int(p) - int(q)) if x.dtype.kind in "iu" else complex(p) - complex(q)
               for p, q in zip(x.tolist(), y.tolist(), strict=True)
               if p != q and p == p and q == q]  # fmt: skip
    if numbers and told.largest != np.inf:
        assert told.largest == pytest.approx(max(map(abs, numbers)))


def test_elements_that_are_no_whole_bytes() -> None:
    one = np.array([0x21, 0x43], "u1")  # four elements of four bits
    other = np.array([0x20, 0x43], "u1")
    told = values.difference(one, other, ("F4", "F4"), 4, False, lambda n: None)
    assert (told.differing, told.elements, told.largest) == (1, 4, None)
