"""Files of real layouts: models of transformers, saved by others and by us, ties bit for bit."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from torch import nn

import architectures
import commands
import tied
from small_configs import small
from tied._checkpoint import open_checkpoint
from tied._files.dtypes import BITS, NAMES

NAMED = {
    "GPT-2": "GPT2LMHeadModel",
    "T5": "T5ForConditionalGeneration",
    "BERT": "BertForPreTraining",
    "ALBERT": "AlbertForMaskedLM",
    "Whisper": "WhisperForConditionalGeneration",
    "transposed": "GPT2LMHeadModel",
}
MODELS = [*NAMED]
SHARD = 8192
PAYLOADS = torch.tensor([0x7FC12345, 0x7F812345, -0x3EDCBB, -0x7E5432], dtype=torch.int32)


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


@functools.cache
def _built(name: str) -> Any:
    if name == "Whisper":
        torch.manual_seed(0)
        cls = transformers.WhisperForConditionalGeneration
        made = cls(small(cls.config_class, {"num_mel_bins": 8})).eval()
    else:
        made = architectures.build(NAMED[name])
    if name == "transposed":
        for block in made.transformer.h:  # Conv1D: (16, 64) and (64, 16)
            block.mlp.c_proj.weight = nn.Parameter(block.mlp.c_fc.weight.detach().t())
    with torch.no_grad():
        for parameter in made.parameters():
            bits = parameter.view(torch.int32) if parameter.is_contiguous() else None
            if bits is not None and bits.numel() >= 4:
                bits.view(-1)[:4] = PAYLOADS  # NaNs, quiet and signalling, that carry bits
    return made


def build(name: str) -> Any:
    """A model; its transposed tie is made anew, since a deep copy gives each side its own."""
    made = copy.deepcopy(_built(name))
    if name == "transposed":
        for block in made.transformer.h:
            block.mlp.c_proj.weight = nn.Parameter(block.mlp.c_fc.weight.detach().t())
    return made


def blank(name: str) -> Any:
    """The same model with zeros."""
    made = build(name)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made


def bits(x: Any) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def holds(loaded: dict[str, Any], model: Any, names: set[str]) -> bool:
    """Whether these names, and no other, are there, with the bits of the model."""
    state = model.state_dict()
    return loaded.keys() == names and all(
        bits(x) == bits(state[name]) and x.shape == state[name].shape for name, x in loaded.items()
    )


def groups(model: Any) -> list[list[str]]:
    return sorted(sorted(group) for group in tied.ties(model).groups)


def names(model: Any) -> set[str]:
    return set(model.state_dict())


def shards(sharded: bool) -> dict[str, Any]:
    return {"max_shard_bytes": SHARD} if sharded else {}


# -------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_shown_compared_and_unpacked(name: str, sharded: bool, tmp_path: Path) -> None:
    """From a file in which every tie is lost, and back to one that names everything."""
    model = build(name)
    lost = {key: x.detach().clone().contiguous() for key, x in model.state_dict().items()}
    safetensors.torch.save_file(lost, tmp_path / "lost.safetensors")
    into = [f"--max-shard-bytes={SHARD}"] if sharded else []
    packed = tmp_path / ("packed" if sharded else "packed.safetensors")
    lossy = tmp_path / "lost.safetensors"
    assert commands.run("pack", "--discover", lossy, packed, *into).code == 0
    found = {frozenset(x) for x in groups(tied.load(packed))}
    for group in groups(model.state_dict()):
        assert any(found_one >= {*group} for found_one in found), group
    shown = commands.run("show", "--json", packed).json
    assert shown["nbytes"] == open_checkpoint(packed).nbytes < sum(x.nbytes for x in lost.values())
    told = commands.run("diff", "--bits", "--json", lossy, packed).json
    assert told["ties_made"]
    for what in (
        "only_in_a",
        "only_in_b",
        "ties_lost",
        "ties_changed",
        "shapes",
        "dtypes",
        "values",
    ):
        assert told[what] == [], what
    assert commands.run("diff", "--bits", packed, packed).code == 0
    assert commands.run("verify", packed).code == 0
    assert commands.run("unpack", packed, tmp_path / "all.safetensors").code == 0
    read = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert holds(read, model, names(model))


# ------------------------------------------------------------------------------------ written by us


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_saved_by_us(name: str, sharded: bool, tmp_path: Path) -> None:
    model = build(name)
    path = tied.save(model, tmp_path, **shards(sharded))
    assert path.name == ("model.safetensors.index.json" if sharded else "model.safetensors")
    contents = open_checkpoint(tmp_path)
    assert (len(contents.files) > 1) == sharded
    assert contents.nbytes == tied.ties(model.state_dict()).nbytes
    loaded = tied.load(tmp_path, framework="torch")
    assert holds(loaded, model, names(model))
    assert groups(loaded) == groups(model)
    other = blank(name)
    ties = groups(other)
    told = tied.load_into(other, tmp_path)
    assert (told.missing, told.unexpected) == ((), ())
    assert holds(other.state_dict(), model, names(model))
    assert groups(other) == ties


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_any_reader_reads_what_we_saved(name: str, sharded: bool, tmp_path: Path) -> None:
    model = build(name)
    tied.save(model.state_dict(), tmp_path, **shards(sharded), expand=True)
    seen = {}
    for file in tmp_path.glob("*.safetensors"):
        seen |= safetensors.torch.load_file(file)
    assert holds(seen, model, names(model))
    assert groups(seen) == []
    assert groups(tied.load(tmp_path, framework="torch")) == groups(model)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("name", "expand"), [*((name, False) for name in MODELS if name != "transposed"),
                         *((name, True) for name in MODELS)],
)  # fmt: skip
def test_transformers_reads_what_we_saved(
    name: str, expand: bool, sharded: bool, tmp_path: Path
) -> None:
    # Declared ties it makes by itself; of a tie that it does not know it needs every name.
    model = build(name)
    model.config.save_pretrained(tmp_path)
    tied.save(model.state_dict(), tmp_path, **shards(sharded), expand=expand)
    read, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert holds(read.state_dict(), model, names(model))


# -------------------------------------------------------------------------------- written by others


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "transposed"])
def test_saved_by_transformers(name: str, sharded: bool, tmp_path: Path) -> None:
    # Ties that are declared are left out, and nothing of the file tells them (T51, T53).
    model = build(name)
    most = SHARD if sharded else "1GB"
    model.save_pretrained(tmp_path, max_shard_size=most)
    contents = open_checkpoint(tmp_path)
    assert (len(contents.files) > 1) == sharded
    assert contents.aliases == {}
    kept = set(contents.names())
    assert {name for group in groups(model) for name in group} - kept
    assert holds(tied.load(tmp_path, framework="torch"), model, kept)
    other = blank(name)
    told = tied.load_into(other, tmp_path)
    assert (told.missing, told.unexpected) == ((), ())
    assert holds(other.state_dict(), model, names(model))
    assert groups(other) == groups(model)


@pytest.mark.parametrize("name", MODELS)
def test_saved_by_torch(name: str, tmp_path: Path) -> None:
    model = build(name)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = tied.load(tmp_path, framework="torch")
    assert holds(loaded, model, names(model))
    assert groups(loaded) == groups(model)
    other = blank(name)
    told = tied.load_into(other, tmp_path)
    assert (told.missing, told.unexpected) == ((), ())
    assert holds(other.state_dict(), model, names(model))


@pytest.mark.parametrize("name", MODELS)
def test_sharded_bins(name: str, tmp_path: Path) -> None:
    # One file has all names of a storage: of what is apart, PyTorch writes two.
    model = build(name)
    state, group_of = model.state_dict(), {n: g[0] for g in groups(model) for n in g}
    heads = sorted({group_of.get(n, n) for n in state})
    half = set(heads[: len(heads) // 2])
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for number, wanted in ((1, True), (2, False)):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        part = {n: x for n, x in state.items() if (group_of.get(n, n) in half) == wanted}
        torch.save(part, tmp_path / file)
        index["weight_map"] |= dict.fromkeys(part, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    loaded = tied.load(tmp_path, framework="torch")
    assert holds(loaded, model, names(model))
    assert groups(loaded) == groups(model)


@pytest.mark.parametrize("form", ["metadata", "index"])
@pytest.mark.parametrize("name", MODELS[:-1])
def test_aliases_as_hugging_face_writes_them(name: str, form: str, tmp_path: Path) -> None:
    # {alias: kept}: in the metadata of a file (transformers 4, safetensors), or of an index.
    model = build(name)
    aliases = {other: group[0] for group in groups(model) for other in group[1:]}
    tensors = {k: v for k, v in model.state_dict().items() if k not in aliases}
    one = "model.safetensors" if form == "metadata" else "model-00001-of-00001.safetensors"
    file = tmp_path / one
    told = aliases if form == "metadata" else {}
    safetensors.torch.save_file(tensors, file, {"format": "pt", **told})
    if form == "index":
        index = {"metadata": {"total_size": 1, **aliases},
                 "weight_map": dict.fromkeys(tensors, file.name)}  # fmt: skip
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    contents = open_checkpoint(tmp_path)
    assert {alias.name: alias.of for alias in contents.aliases.values()} == aliases
    assert contents.metadata == {"format": "pt"}
    loaded = tied.load(tmp_path, framework="torch")
    assert holds(loaded, model, names(model))
    assert groups(loaded) == groups(model)
    assert all(loaded[alias] is loaded[kept] for alias, kept in aliases.items())


# ------------------------------------------------------------------------------------------- dtypes

OURS = [code for code in NAMES if code != "F4"]


@pytest.mark.parametrize("code", OURS)
def test_every_dtype_bit_for_bit(code: str, tmp_path: Path) -> None:
    dtype, wide = getattr(torch, NAMES[code]), BITS[code] // 8
    raw = np.random.default_rng(0).integers(0, 256, 24 * wide, dtype=np.uint8)
    raw[:8] = 0xFF  # NaN in every dtype that has one
    if code == "BOOL":
        raw &= 1
    w = torch.from_numpy(raw.copy()).view(dtype).reshape(4, 6)
    state = {"w": w, "t": w.t(), "rows": w[1:3], "same": w}
    for number, write in enumerate((_save, _save_expanded, _save_bin)):
        path = tmp_path / str(number)
        path.mkdir()
        write(state, path)
        contents = open_checkpoint(path)
        assert {contents.dtype(name) for name in state} == {code}
        assert contents.nbytes == raw.nbytes
        loaded = tied.load(path, framework="torch")
        assert all(x.dtype == dtype and bits(x) == bits(state[k]) for k, x in loaded.items())
        assert loaded["same"] is loaded["w"]
        arrays = tied.load(path)
        assert all(arrays[k].tobytes() == bits(x) for k, x in state.items())
        assert np.shares_memory(arrays["t"].view(f"u{wide}"), arrays["w"].view(f"u{wide}"))
    seen = safetensors.torch.load_file(tmp_path / "1" / "model.safetensors")
    assert all(bits(x) == bits(state[k]) for k, x in seen.items())


def _save(state: dict[str, Any], path: Path) -> None:
    tied.save(state, path)


def _save_expanded(state: dict[str, Any], path: Path) -> None:
    tied.save(state, path, expand=True)


def _save_bin(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path / "pytorch_model.bin")


def test_float4_is_two_elements_in_a_byte(tmp_path: Path) -> None:
    x = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({"x": x}, theirs)
    tied.save({"x": x}, ours)
    for path in (ours, theirs):
        for loaded in (tied.load(path, framework="torch"), safetensors.torch.load_file(path)):
            assert loaded["x"].dtype == x.dtype
            assert bits(loaded["x"].view(torch.uint8)) == bytes(range(8))
        assert open_checkpoint(path).shape("x") == (2, 8)


def test_the_dtypes_are_those_of_safetensors() -> None:
    with pytest.raises(safetensors.SafetensorError, match="unknown variant") as caught:
        safetensors.deserialize(_one("F7"))
    known = set(str(caught.value).split("`")[3::2])
    assert known == {*BITS}


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2"])
def test_dtypes_that_no_library_has(code: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(_one(code))
    assert open_checkpoint(tmp_path / "m.safetensors").nbytes == 6
    with pytest.raises(tied.FileError) as caught:
        tied.load(tmp_path / "m.safetensors")
    assert str(caught.value) == f"{code} can't be read\n  tensor  w"


def _one(code: str) -> bytes:
    text = json.dumps({"w": {"dtype": code, "shape": [8], "data_offsets": [0, 6]}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(6)
