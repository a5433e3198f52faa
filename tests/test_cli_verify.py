"""`tied verify`: what is checked, and that what is not as it should be is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import tied
from commands import autoencoder, run, text
from tied._cli import checksums, verify

W = np.arange(6, dtype="float32").reshape(3, 2)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(path: object, code: int = 0) -> dict[str, Any]:
    """What each check says, by its name, in their order."""
    ran = run("verify", path, "--json")
    assert ran.code == code
    told = ran.json
    assert told["sound"] == (code == 0)
    return {row.pop("what"): row for row in told["checks"]}


def packed() -> Path:
    printed = run("pack", autoencoder(Path()), "packed.safetensors", "--checksum")
    assert printed.code == 0
    return Path("packed.safetensors")


def test_a_sound_file() -> None:
    assert run("verify", packed())[:2] == (0, text("""
        header     ok   1 file, 2 tensors; dtypes, shapes and lengths agree
        offsets    ok   36 B, each byte in one tensor
        ties       ok   1 name tied; each reads inside of its storage
        records    -    no tie in Hugging Face's form {alias: kept}
        expanded   -    no tied name has a tensor of its own
        checksums  ok   2 storages, blake2b-128
        sound
        """))  # fmt: skip


def test_a_plain_file() -> None:
    save_file({"w": W}, "model.safetensors")
    assert run("verify", "model.safetensors").out == text("""
        header     ok   1 file, 1 tensor; dtypes, shapes and lengths agree
        offsets    ok   24 B, each byte in one tensor
        ties       -    none recorded
        records    -    no tie in Hugging Face's form {alias: kept}
        expanded   -    no tied name has a tensor of its own
        checksums  -    none recorded; `tied pack --checksum` does
        sound
        """)


def test_json() -> None:
    save_file({"w": W}, "model.safetensors", {"head": "w"})
    told = run("verify", "model.safetensors", "--json").json
    assert {key: told[key] for key in told if key != "checks"} == {
        "command": "verify", "path": "model.safetensors", "format": "safetensors", "sound": True,
    }  # fmt: skip
    assert told["checks"][3] == {
        "what": "records", "sound": True, "text": "1 tie in Hugging Face's form agree", "names": [],
    }  # fmt: skip
    assert {row["sound"] for row in told["checks"]} == {True, None}


def test_each_flipped_bit_of_the_tensors_is_found() -> None:
    path = packed()
    data = path.read_bytes()
    for at in range(len(data) - 36, len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << at % 8
        Path("spoilt.safetensors").write_bytes(spoilt)
        check = checked("spoilt.safetensors", 1)["checksums"]
        name = "bias" if at < len(data) - 24 else "encoder"
        assert check == {
            "sound": False, "text": "bytes that are not what was written", "names": [name],
        }  # fmt: skip


def test_a_file_that_is_not_sound() -> None:
    path = packed()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ran = run("verify", path)
    assert (ran.code, ran.err) == (1, "")
    assert ran.out.splitlines()[-2:] == [
        "checksums  BAD  bytes that are not what was written: encoder",
        "not sound",
    ]


def test_checksums_are_blake2b_of_16_bytes_of_each_storage() -> None:
    """`docs/format.md` says so; here the same is made by hand."""
    import hashlib

    told = json.loads(run("show", packed(), "--json").json["metadata"]["tied.checksums"])
    arrays = {"bias": np.zeros(3, "float32"), "encoder": W}
    assert told == {
        "version": 1,
        "algorithm": "blake2b-128",
        "storages": {name: hashlib.blake2b(x.tobytes(), digest_size=16).hexdigest()
                     for name, x in arrays.items()},
    }  # fmt: skip


def test_checksums_of_shards_are_read_in_pieces() -> None:
    tied.save({"w": W, "v": W + 1, "t": W.T}, "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_PIECE", 5)
        ran = run("pack", "model.safetensors", "out", "--checksum", "--max-shard-bytes=30")
    assert ran.code == 0
    assert checked("out")["checksums"]["text"] == "2 storages, blake2b-128"


def with_checksums(told: object) -> Path:
    save_file({"w": W}, "model.safetensors", {"tied.checksums": json.dumps(told)})
    return Path("model.safetensors")


def test_checksums_of_other_storages() -> None:
    sums = {"version": 1, "algorithm": "blake2b-128", "storages": {"x": "00"}}
    assert checked(with_checksums(sums), 1)["checksums"] == {
        "sound": False, "text": "not of the storages that are there", "names": ["w", "x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"version": 2, "algorithm": "crc32", "storages": {}}, """
            tied: checksums of version 2 by 'crc32' are not known
              file   model.safetensors
              known  version 1 by 'blake2b-128'
            """),
        ({"version": 1, "algorithm": "blake2b-128", "storages": {"w": 3}}, """
            tied: this checkpoint can't be trusted: checksums that are no object of strings
              file  model.safetensors
            """),
        ([], """
            tied: this checkpoint can't be trusted: JSON that is no object
              file  model.safetensors
            """),
    ],
)  # fmt: skip
def test_checksums_that_can_not_be_read(told: object, message: str) -> None:
    assert run("verify", with_checksums(told)) == (2, "", text(message))


def test_expanded_aliases_agree_with_their_storage() -> None:
    autoencoder(Path())
    assert run("unpack", "model.safetensors", "all.safetensors").code == 0
    assert checked("all.safetensors")["expanded"] == {
        "sound": True, "text": "1 tied name with a tensor of its own agree bit by bit", "names": [],
    }  # fmt: skip
    with Path("all.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = {name: x.copy() for name, x in load_file("all.safetensors").items()}
    tensors["decoder"][0, 0] += 1
    save_file(tensors, "all.safetensors", header["__metadata__"])
    assert checked("all.safetensors", 1)["expanded"] == {
        "sound": False, "text": "tensors that are not what they are tied to", "names": ["decoder"],
    }  # fmt: skip


def test_expanded_aliases_of_every_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_PIECE", 7)
    c = np.arange(6, dtype="complex64").reshape(2, 3)
    model = {"w": W, "same": W, "rows": W[1:], "c": c, "im": c.imag, "flip": W[::-1]}
    tied.save(model, "model.safetensors", expand=True)
    assert checked("model.safetensors")["expanded"]["text"] == (
        "4 tied names with a tensor of its own agree bit by bit"
    )


def test_records_that_disagree_with_the_table() -> None:
    tied.save({"w": W, "v": W + 1, "same": W}, "model.safetensors")
    with Path("model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata = header["__metadata__"] | {"same": "v"}
    save_file(load_file("model.safetensors"), "model.safetensors", metadata)
    assert checked("model.safetensors", 1)["records"] == {
        "sound": False, "text": "the tie table and Hugging Face's form disagree", "names": ["same"],
    }  # fmt: skip


def test_other_formats_have_checksums_of_their_own() -> None:
    e = torch.arange(6.0)
    torch.save({"e": e, "d": e}, "model.pt")
    told = checked("model.pt")
    assert list(told) == ["structure", "crc-32", "ties"]
    assert told["structure"]["text"] == "pytorch, 1 storage, 24 B"
    data = Path("model.pt").read_bytes()
    at = data.index(e.numpy().tobytes())
    Path("model.pt").write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    told = checked("model.pt", 1)["crc-32"]
    assert told["text"] == "of a member of model.pt"
    assert len(told["names"]) == 1


def test_what_can_not_be_used_is_neither_sound_nor_not() -> None:
    path = packed()
    path.write_bytes(path.read_bytes()[:-1])
    ran = run("verify", path, "--json")
    assert ran.code == 2
    assert "__metadata__" not in ran.err
    told = json.loads(ran.out)
    assert told["error"]["message"].startswith("this checkpoint can't be trusted: ")
    assert told["error"]["paths"] == ["encoder"]
    assert ran.err.startswith("tied: this checkpoint can't be trusted: ")


def test_an_index_that_does_not_name_a_tensor() -> None:
    tied.save({"w": W, "v": W + 1, "u": W + 2}, "shards", max_shard_bytes=24)
    assert checked("shards")["index"] == {
        "sound": True, "text": "names 3 tensors, each in its file", "names": [],
    }  # fmt: skip
    index = Path("shards/model.safetensors.index.json")
    told = json.loads(index.read_text(encoding="utf-8"))
    # Another name of the file of `v` stays, so that the file is still one of the checkpoint.
    told["weight_map"]["w"] = told["weight_map"]["v"]
    index.write_text(json.dumps(told), encoding="utf-8")
    assert run("verify", "shards").code == 2
    tied.save({"w": W, "v": W + 1, "u": W + 2}, "two", max_shard_bytes=48)
    index = Path("two/model.safetensors.index.json")
    told = json.loads(index.read_text(encoding="utf-8"))
    del told["weight_map"]["w"]
    index.write_text(json.dumps(told), encoding="utf-8")
    assert checked("two", 1)["index"] == {
        "sound": False, "text": "tensors of the files that it does not name", "names": ["w"],
    }  # fmt: skip
