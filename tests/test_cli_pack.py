"""`tied pack`, `unpack` and `convert`: what is written, what is kept, what is never overwritten."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import tied
from commands import Ran, autoencoder, run, text
from tied._cli.outputs import parse_bytes

W = np.arange(12, dtype="float32").reshape(4, 3)
WRITERS = ("pack", "unpack", "convert")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(*arguments: object) -> str:
    ran = run(*arguments)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def files() -> dict[str, bytes]:
    """Every file below the folder, hidden ones too, and what is in it."""
    return {str(p): p.read_bytes() for p in sorted(Path().rglob("*")) if p.is_file()}


def lost() -> str:
    """A file that has a matrix three times, once transposed, and no word of it."""
    save_file({"wte": W, "head": np.ascontiguousarray(W.T), "lm": W.copy(), "b": np.zeros(4)},
              "lost.safetensors")  # fmt: skip
    return "lost.safetensors"


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


# ---------------------------------------------------------------------- what comes out


def test_pack_stores_each_storage_once() -> None:
    e = torch.arange(6.0).reshape(3, 2)
    torch.save({"e": e, "d": e, "t": e.T}, "model.pt")
    assert printed("pack", "model.pt", "model.safetensors") == text("""
        written   model.safetensors
        storages  1 storage, 24 B, 2 names tied to them
        """)
    assert list(load_file("model.safetensors")) == ["e"]
    loaded = tied.load("model.safetensors")
    assert tied.shares(loaded["e"], loaded["t"])
    assert run("diff", "model.pt", "model.safetensors", "--bits").code == 0


def test_pack_ties_what_is_discovered() -> None:
    assert printed("pack", lost(), "packed.safetensors", "--discover") == text("""
        written   packed.safetensors
        storages  2 storages, 80 B, 2 names tied to them
        found     lm = head.T  (transposed, 48 B twice)
                  wte = head.T  (transposed, 48 B twice)
        twice     96 B
        """)
    assert run("diff", "lost.safetensors", "packed.safetensors", "--json").json["values"] == []
    assert sorted(load_file("packed.safetensors")) == ["b", "head"]
    assert "found " not in printed("pack", lost(), "plain.safetensors")
    assert len(load_file("plain.safetensors")) == 4
    printed("pack", "packed.safetensors", "again.safetensors", "--discover")
    assert run("diff", "packed.safetensors", "again.safetensors").code == 0


def test_unpack_writes_every_name() -> None:
    path = autoencoder(Path())
    assert printed("unpack", path, "all.safetensors") == text("""
        written  all.safetensors
        names    3 arrays, 60 B
        """)
    plain = load_file("all.safetensors")
    assert {name: x.tolist() for name, x in plain.items()} == {
        name: x.tolist() for name, x in tied.load(path).items()
    }
    assert run("diff", path, "all.safetensors", "--bits").code == 0


def test_unpack_tells_which_names_it_writes_apart() -> None:
    """No tensor of an expanded file holds all that these names read, so no tie can be recorded."""
    buffer = np.arange(20, dtype="float32")
    tied.save({"a": buffer[:12], "b": buffer[8:], "c": W, "t": W.T}, "model.safetensors")
    assert printed("unpack", "model.safetensors", "all.safetensors") == text("""
        written  all.safetensors
        names    4 arrays, 192 B
        untied   a, b
        """)
    ties = run("diff", "model.safetensors", "all.safetensors", "--json").json["ties_lost"]
    assert [tie["name"] for tie in ties] == ["b"]


@pytest.mark.parametrize("out", ["all.safetensors", "all.npz", "all.pt", "all", "all.orbax"])
def test_unpack_writes_other_formats(out: str) -> None:
    path = autoencoder(Path())
    told = run("unpack", path, out, "--json").json
    written = "all/model.safetensors" if out == "all" else out
    forms = {".npz": "npz", ".pt": "pytorch", ".orbax": "orbax"}
    form = forms.get(Path(out).suffix, "safetensors")
    assert told == {
        "command": "unpack", "path": str(path), "written": written,
        "format": form,
        "names": 3, "nbytes": 60, "unique_nbytes": 36,
        "untied": [] if written.endswith("safetensors") else ["decoder"],
    }  # fmt: skip
    found = run("diff", path, out, "--json").json
    assert (found["values"], found["only_in_a"], found["shapes"]) == ([], [], [])
    if out.endswith("pt"):
        tensors = torch.load(out)
        assert len({x.untyped_storage().data_ptr() for x in tensors.values()}) == 3


@pytest.mark.parametrize(
    "steps", list(itertools.permutations([".pt", ".safetensors", "", ".bin"], 3))
)
def test_convert_keeps_ties(steps: tuple[str, ...]) -> None:
    w = np.arange(12, dtype="complex64").reshape(4, 3)
    model = {"w": w, "t": w.T, "rows": w[1:3], "same": w, "other": np.ones(3, "float16")}
    last = tied.save(model, "first.safetensors")
    for n, ending in enumerate(steps):
        out = Path(f"step{n}{ending}")
        printed("convert", last, out)
        last = out
    assert run("diff", "first.safetensors", last, "--bits").code == 0
    assert len(tied.ties(tied.load(last)).groups) == 1


def test_convert_to_a_format_without_ties_says_so() -> None:
    path = autoencoder(Path())
    assert printed("convert", path, "model.npz") == text("""
        written   model.npz
        storages  2 storages, 36 B
        untied    decoder: npz holds no ties
        """)
    with np.load("model.npz") as arrays:
        assert arrays["decoder"].tolist() == arrays["encoder"].T.tolist()
    assert run("convert", path, "again.npz", "--json").json["untied"] == ["decoder"]


def test_convert_to_orbax_as_orbax_reads_it() -> None:
    path = autoencoder(Path())
    assert printed("convert", path, "model.orbax").splitlines()[-1] == (
        "untied    decoder: orbax holds no ties"
    )
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(Path("model.orbax").absolute())
    assert {name: np.asarray(x).tolist() for name, x in restored.items()} == {
        name: x.tolist() for name, x in tied.load(path).items()
    }
    before = files()
    refused(run("convert", path, "model.orbax", "--force"), """
        tied: an orbax folder can't be replaced
          folder  model.orbax
          Remove it first, or write to another one
        """, before)  # fmt: skip


def test_npz_as_numpy_writes_it() -> None:
    arrays: dict[str, Any] = {
        code: np.arange(6).reshape(2, 3).astype(code)
        for code in ["bool", "i1", "u2", "i8", "f2", "f4", "f8", "c8"]
    }
    arrays |= {"empty": np.zeros((0, 2)), "scalar": np.array(3.0), "a/b.c": np.ones(1)}
    tied.save(arrays, "model.safetensors")
    printed("convert", "model.safetensors", "model.npz")
    with np.load("model.npz") as loaded:
        assert {k: (x.dtype, x.shape, x.tobytes()) for k, x in loaded.items()} == {
            k: (x.dtype, x.shape, x.tobytes()) for k, x in arrays.items()
        }


def test_npz_has_no_bfloat16() -> None:
    tied.save({"w": np.ones(2, ml_dtypes.bfloat16)}, "model.safetensors")
    ran = run("convert", "model.safetensors", "model.npz")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == text("""
        tied: a .npz file has no dtype bfloat16
          array  w
          Write safetensors or .pt
        """)
    assert list(files()) == ["model.safetensors"]
    printed("convert", "model.safetensors", "model.pt")
    assert torch.load("model.pt")["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("command", WRITERS)
def test_shards(command: str) -> None:
    model = {f"w{i}": W + i for i in range(4)}
    tied.save({**model, "t": model["w2"].T}, "model.safetensors")
    assert f"written{'' if command == 'unpack' else ' '}  out/model.safetensors.index.json" in (
        printed(command, "model.safetensors", "out", "--max-shard-bytes", "100B")
    )
    # 48 bytes each, and 48 more for the name that `unpack` writes again.
    assert len(list(Path("out").glob("*.safetensors"))) == (3 if command == "unpack" else 2)
    assert run("diff", "model.safetensors", "out", "--bits").code == 0


def test_a_folder_without_shards_has_one_file() -> None:
    autoencoder(Path())
    printed("convert", "model.safetensors", "out")
    assert [str(p) for p in Path("out").iterdir()] == ["out/model.safetensors"]
    printed("convert", "out", "again")
    assert run("diff", "out", "again").code == 0


def test_a_folder_whose_name_has_a_dot() -> None:
    autoencoder(Path())
    printed("convert", "model.safetensors", "gpt-3.1/")
    printed("convert", "model.safetensors", "gpt-3.2", "--max-shard-bytes", "24")
    printed("convert", "gpt-3.1", "gpt-3.2", "--force")
    assert run("diff", "gpt-3.1", "gpt-3.2").code == 0
    assert [p.name for p in Path("gpt-3.2").iterdir()] == ["model.safetensors"]


def test_metadata_goes_along_and_checksums_do_not() -> None:
    tied.save({"w": W}, "model.safetensors", metadata={"author": "me"})
    printed("pack", "model.safetensors", "sums.safetensors", "--checksum")
    assert run("show", "sums.safetensors", "--json").json["metadata"].keys() == {
        "author", "format", "tied.checksums",
    }  # fmt: skip
    for command in WRITERS:
        printed(command, "sums.safetensors", f"{command}.safetensors")
        told = run("show", f"{command}.safetensors", "--json").json["metadata"]
        assert told == {"author": "me", "format": "pt"}


def test_pack_as_json() -> None:
    assert run("pack", lost(), "out.safetensors", "--discover", "--checksum", "--json").json == {
        "command": "pack",
        "path": "lost.safetensors",
        "written": "out.safetensors",
        "format": "safetensors",
        "storages": 2,
        "unique_nbytes": 80,
        "aliases": 2,
        "checksums": True,
        "discovered": [
            {"name": name, "of": "head", "reads": "head.T", "kind": "transposed", "shape": [4, 3],
             "strides": [1, 4], "offset": 0, "nbytes": 48}
            for name in ("lm", "wte")
        ],
    }  # fmt: skip


# ---------------------------------------------------------------------- real models


@pytest.mark.parametrize("shards", [(), ("--max-shard-bytes", "500")])
def test_gpt2_packed_and_unpacked(shards: tuple[str, ...]) -> None:
    """T40, T50: the tied head of GPT-2, through pickles, shards and back into the model."""
    model = gpt2()
    torch.save(model.state_dict(), "pytorch_model.bin")
    out = "packed" if shards else "packed.safetensors"
    printed("pack", "pytorch_model.bin", out, *shards)
    shown = run("show", out, "--all").out
    assert "\n  lm_head.weight = transformer.wte.weight\n" in shown
    assert "missed   by a loader that knows no ties: lm_head.weight" in shown
    assert run("diff", "pytorch_model.bin", out, "--bits").code == 0
    printed("unpack", out, "all.safetensors")
    assert load_file("all.safetensors").keys() == model.state_dict().keys()
    other = gpt2()
    other.load_state_dict(tied.load("all.safetensors", framework="torch"))
    for name, x in model.state_dict().items():
        assert torch.equal(x, other.state_dict()[name])
    assert run("verify", out).code == 0


def test_gpt2_that_lost_its_tie() -> None:
    """T54: values are equal, memory is not; both are written."""
    cloned = {name: x.clone() for name, x in gpt2().state_dict().items()}
    torch.save(cloned, "pytorch_model.bin")
    printed("pack", "pytorch_model.bin", "packed.safetensors", "--discover")
    ties = run("diff", "pytorch_model.bin", "packed.safetensors", "--json").json["ties_made"]
    assert [tie["name"] for tie in ties] == ["lm_head.weight"]
    gpt2().save_pretrained("saved")
    assert "lm_head" not in str(load_file("saved/model.safetensors").keys())


@pytest.mark.parametrize("model", ["disjoint", "order", "nested"])
def test_what_others_write_wrong_or_refuse(model: str) -> None:
    """T42, T43, T46, J74: disjoint slices, arrays out of order, nested overlaps."""
    buffer = torch.arange(100.0)
    models = {
        "disjoint": {"a": buffer[:40], "b": buffer[60:]},
        "order": {"a": buffer.reshape(10, 10).T, "b": buffer.reshape(10, 10)[:, 1:3]},
        "nested": {"a": buffer, "b": buffer[10:20], "c": buffer[30:40]},
    }
    tensors = models[model]
    torch.save(tensors, "model.pt")
    printed("pack", "model.pt", "model.safetensors")
    printed("unpack", "model.safetensors", "all.safetensors")
    for name, x in load_file("all.safetensors").items():
        assert x.tolist() == tensors[name].tolist()
    loaded = tied.load("model.safetensors")
    assert tied.ties(loaded).groups == tied.ties(tensors).groups


# ---------------------------------------------------------------------- what is refused


def refused(ran: Ran, message: str, before: dict[str, bytes]) -> None:
    assert (ran.code, ran.out, ran.err) == (2, "", text(message))
    assert files() == before


@pytest.mark.parametrize("command", WRITERS)
def test_the_input_is_never_overwritten(command: str) -> None:
    autoencoder(Path())
    Path("linked.safetensors").symlink_to("model.safetensors")
    os.link("model.safetensors", "hard.safetensors")
    tied.save({"w": W, "v": W + 1}, "shards", max_shard_bytes=48)
    before = files()
    for source, out in [
        ("model.safetensors", "model.safetensors"),
        ("model.safetensors", "linked.safetensors"),
        ("linked.safetensors", "model.safetensors"),
        ("model.safetensors", "./hard.safetensors"),
        ("shards", "shards/model-00002-of-00002.safetensors"),
        ("shards", "shards"),
        ("shards/model.safetensors.index.json", "shards"),
        ("model.safetensors", "."),
    ]:
        refused(run(command, source, out, "--force"), f"""
            tied: this would overwrite the input
              file  {Path(out)}
              Write to another place, and move it when you have looked at it
            """, before)  # fmt: skip


@pytest.mark.parametrize("command", WRITERS)
def test_nothing_is_overwritten_unasked(command: str) -> None:
    autoencoder(Path())
    Path("out.safetensors").write_bytes(b"mine")
    tied.save({"w": W, "v": W + 1}, "shards", max_shard_bytes=48)
    before = files()
    refused(run(command, "model.safetensors", "out.safetensors"), """
        tied: there is a file already
          file  out.safetensors
          --force replaces it
        """, before)  # fmt: skip
    refused(run(command, "model.safetensors", "shards"), """
        tied: there is a checkpoint already
          file  shards/model-00001-of-00002.safetensors
          --force replaces it
        """, before)  # fmt: skip
    printed(command, "model.safetensors", "out.safetensors", "--force")
    printed(command, "model.safetensors", "shards", "--force")
    assert run("diff", "model.safetensors", "out.safetensors").code == 0
    assert run("diff", "model.safetensors", "shards").code == 0
    assert [p.name for p in Path("shards").iterdir()] == ["model.safetensors"]


def test_places_that_can_not_be_written() -> None:
    autoencoder(Path())
    before = files()
    refused(run("pack", "model.safetensors", "no/model.safetensors"), """
        tied: there is no such folder
          folder  no
        """, before)  # fmt: skip
    refused(run("convert", "model.safetensors", "model.h5"), """
        tied: no checkpoint is written to a file that ends in '.h5'
          file   model.h5
          known  .safetensors, .npz, .pt, .pth, .bin, .orbax
          Give it one of these endings; for a folder of safetensors files, type a / behind
        """, before)  # fmt: skip
    refused(run("pack", "model.safetensors", "model.npz"), """
        tied: no checkpoint is written to a file that ends in '.npz'
          file   model.npz
          known  .safetensors
          Give it one of these endings; for a folder of safetensors files, type a / behind
        """, before)  # fmt: skip
    refused(run("pack", "model.safetensors", "out.safetensors", "--max-shard-bytes", "1"), """
        tied: several files need a folder
          given  out.safetensors
          With --max-shard-bytes, OUT is the name of a folder
        """, before)  # fmt: skip


def test_a_writer_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    autoencoder(Path())
    before = files()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for out in ("out.safetensors", "out.npz", "out.pt", "out"):
        refused(run("convert", "model.safetensors", out), f"""
            tied: the file can't be written
              file  {out}
              why   No space left on device
            """, before)  # fmt: skip
        assert not Path(out).exists()


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [("1", 1), ("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("10kb", 10_000), ("2 TiB", 2 << 40),
     ("7B", 7), ("0.5KB", 500), ("2g", 2 * 10**9)],
)  # fmt: skip
def test_numbers_of_bytes(said: str, nbytes: int) -> None:
    assert parse_bytes(said) == nbytes


@pytest.mark.parametrize("said", ["", "0", "-1", "5 X", "GB", "1e9", "5XB", "0.1B", "5Gb5"])
def test_what_is_no_number_of_bytes(said: str) -> None:
    with pytest.raises(ValueError, match=r"^" + said.replace(".", r"\.") + "$"):
        parse_bytes(said)
    ran = run("pack", "a", "b", f"--max-shard-bytes={said}")
    assert ran.code == 2
    assert f"{said!r} is no number of bytes; type 5GB or 512MiB\n" in ran.err
