"""docs/format.md is enough to read what `tied.save` writes, and says what is in the files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import format_reader
import kinds
import oracle
import tied
from kinds import KINDS, Kind
from tied._files import dtypes, header

PAGE = Path(__file__).parents[1] / "docs" / "format.md"
CODES = {"float32": "F32", "complex64": "C64", "uint8": "U8"}
CASES = [
    pytest.param(name, library, id=f"{name}-{library}")
    for name, kind in KINDS.items()
    if not kind.meta and kind.dtype != "structured"
    for library in kind.libraries
]
# No array holds what the others read, so an expanded file can't tell that they overlap.
SPANS = [
    *(("partial_overlap", library) for library in kinds.ALL),
    ("buffer_not_in_the_model", "jax"),
]
WAYS: dict[str, dict[str, Any]] = {
    "one_file": {},
    "shards": {"max_shard_bytes": 1},
    "expanded": {"expand": True},
    "expanded_shards": {"expand": True, "max_shard_bytes": 1},
}


def write(kind: Kind, library: str, folder: Path, **how: Any) -> tuple[Any, Path]:
    """The kind's model with one more array, so that there is more than one tensor."""
    model = {"model": kind.model(library), "more": np.arange(5.0)}
    return model["model"], tied.save(model, folder / "checkpoint.safetensors", **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "library"), CASES)
def test_a_reader_made_from_the_page_reads_every_kind(
    name: str, library: str, way: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    untied = bool((name, library) in SPANS and WAYS[way].get("expand"))
    with pytest.warns(tied.UntiedWarning, match="apart") if untied else nullcontext():
        model, path = write(kind, library, tmp_path, **WAYS[way])
    read = format_reader.read(path)
    members = kind.members(model)
    assert read.keys() == {"more", *(f"model.{path}" for path in kind.paths)}
    found = [read[f"model.{path}"] for path in kind.paths]
    for array, member in zip(found, members, strict=True):
        value = kinds.value(member)
        assert (array.dtype, array.shape) == (CODES[str(value.dtype)], value.shape)
        assert array.data == value.tobytes()
    if not untied:
        assert pattern(found) == kinds.pattern(members, "bytes")


def pattern(arrays: list[format_reader.Array]) -> list[list[int]]:
    """Which bytes of the arrays are one, as the page says."""
    starts = {name: n << 20 for n, name in enumerate(sorted({a.storage for a in arrays}))}
    return oracle.pattern(
        [(a.places + starts[a.storage], format_reader.BITS[a.dtype] // 8) for a in arrays]
    )


def test_an_expanded_file_does_not_tell_of_arrays_that_only_overlap(tmp_path: Path) -> None:
    kind = KINDS["partial_overlap"]
    with pytest.warns(tied.UntiedWarning, match=r"writes model.first, model.second apart"):
        _, path = write(kind, "numpy", tmp_path, expand=True)
    read = format_reader.read(path)
    assert sorted({array.storage for array in read.values()}) == sorted(read)


def test_whole_aliases_are_in_the_form_of_hugging_face_too(tmp_path: Path) -> None:
    w = np.ones((2, 3), np.float32)
    path = tied.save({"a": w, "b": w, "c": w.T, "format": w}, tmp_path / "x.safetensors")
    metadata = format_reader.read_file(path).metadata
    assert {k: v for k, v in metadata.items() if k != "tied"} == {"format": "pt", "b": "a"}
    del metadata["tied"]
    every = format_reader.read_file(path)
    assert format_reader.by_hugging_face(every, metadata).keys() == {"b"}


def test_conjugates_and_negatives(tmp_path: Path) -> None:
    """The sign bit of NaN is turned too, in both parts; integers are turned in two's complement."""
    bits = np.array([0x7FC00001, 0xFFC00002, 0x3F800000, 0x80000000], np.uint32)
    w = torch.from_numpy(bits.view(np.complex64).copy())
    model = {"w": w, "conj": w.conj(), "minus_imag": w.conj().imag}
    read = format_reader.read(tied.save(model, tmp_path / "x.safetensors"))
    flip = np.array([0, 1 << 31] * 2, np.uint32)
    assert read["conj"].data == (bits ^ flip).tobytes()
    assert read["minus_imag"].dtype == "F32"
    assert read["minus_imag"].data == (bits ^ flip)[1::2].tobytes()
    assert read["conj"].storage == read["minus_imag"].storage == "w"


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        ("I8", [1, 0x80, 0], [0xFF, 0x80, 0]),
        ("U16", [1, 0, 0, 0x80], [0xFF, 0xFF, 0, 0x80]),
        ("BF16", [1, 0x7F], [1, 0xFF]),
        ("F8_E4M3", [0x01, 0xFF], [0x81, 0x7F]),
        ("C64", [0, 0, 0x80, 0x3F, 0, 0, 0, 0x80], [0, 0, 0x80, 0xBF, 0, 0, 0, 0]),
    ],
)
def test_the_reader_and_tied_agree_on_negatives(
    dtype: str, before: list[int], after: list[int], tmp_path: Path
) -> None:
    size = len(before) * 8 // format_reader.BITS[dtype]
    row = {"of": "w", "shape": [size], "strides": [1], "offset": 0, "neg": True}
    table = {"version": 1, "aliases": {"v": row}}
    path = tmp_path / "x.safetensors"
    told = {"dtype": dtype, "shape": [size], "data_offsets": [0, len(before)]}
    text = json.dumps({"__metadata__": {"tied": json.dumps(table)}, "w": told}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(before))
    assert format_reader.read(path)["v"].data == bytes(after)
    assert kinds.value(tied.load(path)["v"]).tobytes() == bytes(after)


def test_the_page_lists_every_code(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert format_reader.BITS == dtypes.BITS
    assert [code for code in dtypes.BITS if f"`{code}`" not in page] == []
    assert f"{header.MOST:,}" in page


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    w = np.ones((2, 3), np.float32)
    model = {name: w if name != "d" else w[1] for name in "dabcefgh"}
    first = tied.save(model, tmp_path / "x.safetensors", metadata={"z": "1", "y": "2"})
    before = first.read_bytes()
    for _ in range(5):
        assert tied.save(model, first, metadata={"z": "1", "y": "2"}).read_bytes() == before


def test_the_reader_is_no_part_of_tied() -> None:
    source = Path(format_reader.__file__).read_text(encoding="utf-8")
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert [line.split()[1].split(".")[0] for line in imports] == (
        ["__future__", "json", "struct", "dataclasses", "pathlib", "typing", "numpy"]
    )


def test_every_dtype_of_whole_bytes(tmp_path: Path) -> None:
    codes = [code for code, bits in dtypes.BITS.items() if bits % 8 == 0]
    model = {}
    for code in codes:
        memory = np.arange(8 * 8, dtype=np.uint8) % (2 if code == "BOOL" else 200)
        name = dtypes.NAMES[code]
        dtype = getattr(ml_dtypes, name, None) or np.dtype(name)
        model[code] = memory.view(dtype)
        model[f"{code} of"] = model[code][1::2]
    read = format_reader.read(tied.save(model, tmp_path / "x.safetensors"))
    for code in codes:
        assert (read[code].dtype, read[f"{code} of"].dtype) == (code, code)
        assert read[code].data == model[code].tobytes()
        assert read[f"{code} of"].data == model[f"{code} of"].tobytes()
        assert read[f"{code} of"].storage == code
