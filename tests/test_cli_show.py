"""`tied show`: the tree of ties, bytes, what a loader misses, patterns, long listings, JSON."""

from __future__ import annotations

import itertools
import json
import time
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import tied
from commands import autoencoder, run, text
from tied._checkpoint import open_checkpoint
from tied._ties import said_bytes

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def nbytes(*files: str) -> str:
    return said_bytes(sum(Path(file).stat().st_size for file in files))


def shown(*arguments: object) -> str:
    ran = run("show", *arguments)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def test_the_tree_of_ties() -> None:
    path = autoencoder(Path())
    assert shown(path) == text(f"""
        bias       (3,)    float32  12 B
        encoder    (3, 2)  float32  24 B
          decoder = encoder.T
        9 parameters, 36 B (counting every name: 15 parameters, 60 B)

        file     model.safetensors (safetensors, {nbytes("model.safetensors")})
        tensors  36 B unique
        missed   by a loader that knows no ties: decoder (`tied unpack` writes every name)
        """)


READINGS: dict[str, Any] = {
    "transpose": lambda w: w.T,
    "rows": lambda w: w[1:3],
    "column": lambda w: w[:, 1],
    "reshape": lambda w: w.reshape(3, 4),
    "flip": lambda w: w[::-1],
    "diagonal": lambda w: w.diagonal(),
    "real": lambda w: w.real,
    "bytes": lambda w: w.view("uint8"),
}


@pytest.mark.parametrize(
    ("reading", "dtype"),
    [(r, d) for r, d in itertools.product(READINGS, ["float32", "complex64"])
     if (r, d) != ("real", "float32")],
)  # fmt: skip
def test_a_tie_reads_as_in_the_model(reading: str, dtype: str) -> None:
    w = np.arange(12).reshape(4, 3).astype(dtype)
    model = {"w": w, "x": READINGS[reading](w)}
    path = tied.save(model, "model.safetensors")
    lines = str(tied.ties(model)).splitlines()
    lines[2] = lines[2].replace("every leaf", "every name")
    assert shown(path).splitlines()[:3] == lines[:3]


def test_names_that_read_parts_of_a_span() -> None:
    buffer = np.arange(20, dtype="float32")
    path = tied.save({"a": buffer[:12], "b": buffer[8:]}, "model.safetensors")
    assert shown(path) == text(f"""
        a.tied_span    (20,)  float32  80 B
          a reads elements 0 to 11
          b reads elements 8 to 19
        20 parameters, 80 B (counting every name: 24 parameters, 96 B)

        file     model.safetensors (safetensors, {nbytes("model.safetensors")})
        tensors  80 B unique
        missed   by a loader that knows no ties: a, b (`tied unpack` writes every name)
        """)


def test_a_file_without_ties_and_an_empty_one() -> None:
    save_file({"w": np.ones((2, 2), "float32")}, "plain.safetensors")
    assert shown("plain.safetensors") == text(f"""
        w    (2, 2)  float32  16 B
        4 parameters, 16 B

        file     plain.safetensors (safetensors, {nbytes("plain.safetensors")})
        tensors  16 B unique
        ties     none recorded; --discover looks for those that were lost
        """)
    tied.save({}, "empty.safetensors")
    assert shown("empty.safetensors").splitlines()[0] == "0 parameters, 0 B"


def test_an_expanded_file_misses_nothing_and_stores_more() -> None:
    w = np.ones(4, "float32")
    path = tied.save({"e": w, "d": w}, "model.safetensors", expand=True)
    assert shown(path) == text(f"""
        e    (4,)  float32  16 B
          d = e
        4 parameters, 16 B (counting every name: 8 parameters, 32 B)

        file     model.safetensors (safetensors, {nbytes("model.safetensors")})
        tensors  32 B stored, 16 B unique
        """)


def test_hugging_faces_alias_record() -> None:
    """T40: what `save_model` of safetensors writes beside the one tensor."""
    save_file({"wte": np.ones((2, 3), "float32")}, "model.safetensors", {"lm_head": "wte"})
    assert "  lm_head = wte\n" in shown("model.safetensors")
    assert "ties: lm_head (`tied" in shown("model.safetensors")


def test_a_folder_of_shards() -> None:
    w = np.ones((4, 2), "float32")
    model = {"h.10.w": w, "h.2.w": w + 1, "head": w.T}
    tied.save(model, "shards", max_shard_bytes=40)
    size = nbytes(*glob("shards/*.safetensors"))
    assert shown("shards") == text(f"""
        h.2.w     (4, 2)  float32  32 B
        h.10.w    (4, 2)  float32  32 B
          head = h.10.w.T
        16 parameters, 64 B (counting every name: 24 parameters, 96 B)

        file     shards/model.safetensors.index.json (safetensors, 2 files, {size})
        tensors  64 B unique
        missed   by a loader that knows no ties: head (`tied unpack` writes every name)
        """)


def test_a_pickle_of_torch() -> None:
    e = torch.ones(4, 3)
    torch.save({"e": e, "d": e, "t": e.T, "b": torch.zeros(3)}, "model.pt")
    lines = shown("model.pt").splitlines()
    assert lines[:5] == [
        "e    (4, 3)  float32  48 B",
        "  d = e",
        "  t = e.T",
        "b    (3,)    float32  12 B",
        "15 parameters, 60 B (counting every name: 39 parameters, 156 B)",
    ]
    assert lines[-1] == "tensors  60 B unique"  # a reader of such files misses nothing


def test_computed_storages() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    tied.tie(model, "1.weight", "0.weight", lambda w: w * 2)
    path = tied.save(model, "model.safetensors")
    assert shown(path).splitlines()[-1] == "computed  1.weight of 0.weight"
    assert run("show", path, "--json").json["computed"] == {"1.weight": ["0.weight"]}


def test_patterns_choose_storages_by_any_of_their_names() -> None:
    path = autoencoder(Path())
    assert shown(path, "dec*").splitlines()[:5] == [
        "encoder    (3, 2)  float32  24 B",
        "  decoder = encoder.T",
        "6 parameters, 24 B (counting every name: 12 parameters, 48 B)",
        "",
        "1 of 2 storages shown",
    ]
    assert "2 of 2 storages shown" in shown(path, "dec*", "b?as")
    ran = run("show", path, "dec*", "head*", "[x]")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == text("""
        tied: no name matches 'head*' or '[x]'
          file  model.safetensors
          Patterns are those of a shell, and speak of whole names: '*.weight'
        """)


def test_a_long_listing_is_cut_and_ties_are_not_what_is_left_out() -> None:
    last = np.full(3, 69, "float32")
    model = {f"w{i}": np.full(3, i, "float32") for i in range(69)} | {"w69": last, "z": last}
    path = tied.save(model, "model.safetensors")
    lines = shown(path).splitlines()
    assert lines[:49] == [*(f"w{i:<3}   (3,)  float32  12 B" for i in range(48)),
                          "w69    (3,)  float32  12 B"]  # fmt: skip
    assert lines[49:52] == [
        "  z = w69",
        "... and 21 more storages (252 B), none of them is tied; --all lists all",
        "210 parameters, 840 B (counting every name: 213 parameters, 852 B)",
    ]
    assert len(shown(path, "--all").splitlines()) == len(lines) + 20


def test_many_names_of_one_storage_are_cut() -> None:
    w = np.ones(4, "float32")
    path = tied.save({f"n{i}": w for i in range(30)}, "model.safetensors")
    lines = shown(path).splitlines()
    assert lines[20:22] == ["  n20 = n0", "  and 9 more names"]
    assert lines[-1].endswith("n1, n2, n3, n4, n5, n6, n7, n8 and 21 more (`tied unpack` writes "
                              "every name)")  # fmt: skip
    assert "  n29 = n0" in shown(path, "--all").splitlines()


def test_ties_that_are_left_out_are_counted() -> None:
    arrays = [np.full(2, i, "float32") for i in range(40)]
    model = {f"{kind}{i}": w for i, w in enumerate(arrays) for kind in "ab"}
    path = tied.save(model, "model.safetensors")
    assert "... and 15 more storages (120 B), 15 of them are tied; --all lists all\n" in shown(path)


def test_discover_says_what_was_tied_once() -> None:
    w = np.arange(12, dtype="float32").reshape(4, 3)
    save_file({"wte": w, "head": np.ascontiguousarray(w[:2])}, "model.safetensors")
    assert shown("model.safetensors", "--discover").splitlines()[4:] == [
        f"file     model.safetensors (safetensors, {nbytes('model.safetensors')})",
        "tensors  72 B unique",
        "found    head = wte[:2]  (block, 24 B twice)",
        "twice    24 B",
    ]
    assert run("show", "model.safetensors", "--discover", "--json").json["discovered"] == [
        {"name": "head", "of": "wte", "reads": "wte[:2]", "kind": "block", "shape": [2, 3],
         "strides": [3, 1], "offset": 0, "nbytes": 24},
    ]  # fmt: skip
    save_file({"w": w}, "model.safetensors")
    assert shown("model.safetensors", "--discover").splitlines()[-1] == (
        "found    no array has the values of another one"
    )


def test_json() -> None:
    path = autoencoder(Path())
    storage = {"named": True, "file": "model.safetensors", "dtype": "F32"}
    alias = {"name": "decoder", "reads": "encoder.T", "shape": [2, 3], "strides": [1, 2],
             "offset": 0, "conj": False, "neg": False, "dtype": None}  # fmt: skip
    assert run("show", path, "--json").json == {
        "command": "show",
        "path": "model.safetensors",
        "format": "safetensors",
        "files": ["model.safetensors"],
        "file_nbytes": path.stat().st_size,
        "stored_nbytes": 36,
        "unique_nbytes": 36,
        "parameters": 9,
        "nbytes": 36,
        "naive_parameters": 15,
        "naive_nbytes": 60,
        "missed": ["decoder"],
        "metadata": {"format": "pt"},
        "computed": {},
        "storages": [
            {"name": "bias", "shape": [3], "nbytes": 12, "aliases": [], **storage},
            {"name": "encoder", "shape": [3, 2], "nbytes": 24, "aliases": [alias], **storage},
        ],
        "discovered": None,
    }
    told = run("show", path, "bias", "--json").json
    assert (told["nbytes"], told["unique_nbytes"], len(told["storages"])) == (12, 36, 1)


def test_a_name_cannot_speak_to_the_terminal() -> None:
    hostile = "a\x1b[31m\n\r\u202e"
    save_file({hostile: np.ones(4, "float32")}, "model.safetensors")
    assert shown("model.safetensors").splitlines()[0] == (
        r"a\x1b[31m\n\r\u202e    (4,)  float32  16 B"
    )
    assert json.loads(shown("model.safetensors", "--json"))["storages"][0]["name"] == hostile
    assert "\\x1b[31m'" in run("show", "model.safetensors", "\x1b[31m").err


def test_100_000_tensors_in_reasonable_time() -> None:
    # On an idle core it takes about 2 seconds; other processes only make it slower.
    model = {f"layers.{i // 10}.w{i}": np.zeros(1, "float32") for i in range(100_000)}
    save_file(model, "model.safetensors", {"head": "layers.0.w0"})
    start = time.process_time()
    out = shown("model.safetensors")
    assert time.process_time() - start < 20
    assert "... and 99,951 more storages (390.43 KiB), none of them is tied" in out
    assert len(open_checkpoint(Path("model.safetensors")).storages) == 100_000
