"""`discover` and `retied` on checkpoints: real layouts, ties that are there, memory."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

import tied
from test_discover import C, W, changed, found, own
from tied._checkpoint import open_checkpoint
from tied._discover import discover, retied
from tied._errors import FileError
from tied._files import twins
from tied._files.contents import Checkpoint
from tied._files.gather import gather
from tied._files.write import write

RNG = np.random.default_rng(1)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=4, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def untied(model: Any) -> dict[str, Any]:
    """A state dict in which each name has memory of its own."""
    return {name: x.clone() for name, x in model.state_dict().items()}


def test_gpt2_whose_head_was_cloned(tmp_path: Path) -> None:
    model = gpt2()
    assert found(model) == []
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    expected = [("equal", "lm_head.weight = transformer.wte.weight")]
    assert found(model) == expected
    torch.save(untied(model), tmp_path / "model.pt")
    assert found(tmp_path / "model.pt") == expected
    # A file has its tensors in the order of their names.
    file = tied.save(model, tmp_path / "model.safetensors")
    assert found(file) == [("equal", "transformer.wte.weight = lm_head.weight")]


def test_t5_whose_embeddings_were_cloned() -> None:
    config = transformers.T5Config(
        vocab_size=13, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    told = discover(untied(model)).findings
    names = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    names |= {"lm_head.weight"} & {*tied.compare(model, untied(model)).lost}
    assert names <= {finding.name for finding in told}
    assert {finding.of for finding in told} == {"shared.weight"}
    assert {finding.kind for finding in told} == {"equal"}


def test_a_vocabulary_that_is_padded_in_one_of_the_two() -> None:
    embed = RNG.normal(size=(50, 6)).astype("float32")
    padded = np.concatenate([embed, np.zeros((14, 6), "float32")])
    assert found({"embed": embed, "head": padded}) == [("block", "embed = head[:50]")]
    assert found({"embed": embed, "head": own(padded.T)}) == [("block", "embed = head[:, :50].T")]
    assert found({"embed": padded, "head": own(embed.T)}) == [("block", "head = embed[:50].T")]
    assert found({"embed": padded, "head": own(embed.T), "also": changed(embed)}) == [
        ("block", "head = embed[:50].T")
    ]


def test_a_copy_of_a_whole_model(tmp_path: Path) -> None:
    """A target network, an average of the weights at its start: all is there twice."""
    online = {name: x for name, x in gpt2().state_dict().items() if name != "lm_head.weight"}
    both = {"online": online, "target": copy.deepcopy(online)}
    told = discover(tied.save(both, tmp_path / "both.safetensors"))
    varied = [name for name, x in online.items() if x.unique().numel() > 1]
    assert [x.name for x in told.findings] == [f"target.{name}" for name in sorted(varied)]
    assert all(x.of == x.name.replace("target", "online") for x in told.findings)
    assert told.nbytes == sum(online[name].nbytes for name in varied)


def test_what_is_tied_is_not_found(tmp_path: Path) -> None:
    arrays = {"w": W, "t": W.T, "again": W, "rows": W[:3]}
    assert found(arrays) == []
    assert found(tied.save(arrays, tmp_path / "a.safetensors")) == []
    assert found(tied.save(arrays, tmp_path / "b.safetensors", expand=True)) == []
    assert found(tied.save(arrays, tmp_path / "c", max_shard_bytes=1)) == []
    shards = tied.save({"w": W, "t": own(W.T), "c": C}, tmp_path / "d", max_shard_bytes=4000)
    assert len(open_checkpoint(shards).files) == 3
    assert found(tmp_path / "d") == [("transposed", "t = w.T")]


def test_the_source_is_not_changed() -> None:
    arrays = {"w": own(W), "t": own(W.T), "s": own(W)[::2]}
    before = {name: (id(x), x.tobytes()) for name, x in arrays.items()}
    discover(arrays)
    assert before == {name: (id(x), x.tobytes()) for name, x in arrays.items()}


def test_progress_reaches_all() -> None:
    calls: list[tuple[int, int]] = []
    discover({"w": W, "t": own(W.T), "c": C}, progress=lambda *told: calls.append(told))
    everything = 2 * W.nbytes + C.nbytes
    assert calls == [(W.nbytes, everything), (2 * W.nbytes, everything), (everything, everything)]


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    path = tied.save({"w": W, "t": own(W.T)}, tmp_path / "x.safetensors")
    contents = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FileError, match="this checkpoint can't be trusted: a file that has become"):
        discover(contents)


# ---------------------------------------------------------------------- tied again


def again(source: Any, path: Path) -> dict[str, Any]:
    """What is read of a checkpoint that was written with its ties found."""
    contents = source if isinstance(source, Checkpoint) else gather(source).contents
    return tied.load(write(retied(contents, discover(contents)), path))


def test_what_was_lost_is_tied_again(tmp_path: Path) -> None:
    arrays = {"a": W, "b": own(W.T), "c": C, "d": own(C.transpose(2, 0, 1, 3)), "e": own(W[:7]),
              "f": own(W[:, :5].T), "g": own(W).reshape(-1), "h": changed(W)}  # fmt: skip
    loaded = again(arrays, tmp_path / "x.safetensors")
    assert {*loaded} == {*arrays}
    for name, x in arrays.items():
        assert (loaded[name].shape, loaded[name].tobytes()) == (x.shape, x.tobytes())
    assert all(tied.shares(loaded["a"], loaded[name]) for name in "befg")
    assert tied.shares(loaded["c"], loaded["d"])
    stored = open_checkpoint(tmp_path / "x.safetensors")
    assert {*stored.storages} == {"a", "c", "h"}
    assert stored.nbytes == 2 * W.nbytes + C.nbytes


def test_names_that_read_what_is_tied_again_move_with_it(tmp_path: Path) -> None:
    copied = own(W.T)
    arrays = {"w": W, "t": copied, "view": copied.T, "part": copied[3:9], "same": copied}
    loaded = again(arrays, tmp_path / "x.safetensors")
    assert {*open_checkpoint(tmp_path / "x.safetensors").storages} == {"w"}
    for name, x in arrays.items():
        assert loaded[name].tobytes() == x.tobytes()
        assert tied.shares(loaded["w"], loaded[name])


def test_bits_of_another_dtype_move_where_positions_stay(tmp_path: Path) -> None:
    copied = own(W)
    arrays = {"w": W, "again": copied, "bits": copied.view("uint32")}
    loaded = again(arrays, tmp_path / "x.safetensors")
    assert {*open_checkpoint(tmp_path / "x.safetensors").storages} == {"w"}
    assert (loaded["bits"] == W.view("uint32")).all()


def test_what_is_read_in_a_way_that_would_be_lost_stays(tmp_path: Path) -> None:
    copied = own(W.T)
    arrays = {"w": W, "t": copied, "flat": copied.reshape(-1)}
    assert found(arrays) == [("transposed", "t = w.T")]
    loaded = again(arrays, tmp_path / "x.safetensors")
    assert {*open_checkpoint(tmp_path / "x.safetensors").storages} == {"w", "t"}
    assert all(loaded[name].tobytes() == x.tobytes() for name, x in arrays.items())


def test_what_is_computed_is_computed_of_what_is_kept() -> None:
    contents = gather({"w": W, "a": own(W), "b": own(W)}).contents
    contents.computed["made"] = ("w", "a", "b")
    told = retied(contents, discover(contents))
    assert (told.computed, [*told.storages]) == ({"made": ("w",)}, ["w"])
    assert [*contents.storages] == ["w", "a", "b"]


def test_findings_of_another_checkpoint() -> None:
    told = discover({"w": W, "b": own(W)})
    with pytest.raises(FileError) as raised:
        retied(gather({"w": W}).contents, told)
    assert str(raised.value) == (
        "this was not discovered in this checkpoint\n"
        "  file   .\n"
        "  found  b = w  (was tied? 3.75 KiB twice)"
    )
    assert raised.value.paths == ("b", "w")


# ---------------------------------------------------------------------- what is read


def compared(arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often two whole arrays are compared."""
    count = itertools.count()
    holds = twins._holds
    monkeypatch.setattr(twins, "_holds", lambda *args: (next(count), holds(*args))[1])
    assert discover(arrays).findings == ()
    return next(count)


def sparse(shape: tuple[int, ...], number: int) -> np.ndarray:
    """An array of zeros but for a late element that no sample has."""
    x = np.zeros(shape, "float32")
    x.reshape(-1)[x.size - 2] = number + 1
    return x


def test_arrays_that_differ_little_are_not_compared_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alike = {f"{n}": sparse((50, 20), n) for n in range(40)}
    assert compared(alike, monkeypatch) == 39
    starts = {f"{n}": sparse((50 + n, 20), n) for n in range(12)}
    assert compared(starts, monkeypatch) == 11


def test_arrays_that_differ_are_told_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"{n}": RNG.normal(size=(30, 20 + n % 3)) for n in range(40)}
    assert compared(arrays, monkeypatch) == 0


def test_an_array_that_nothing_can_match_is_not_read() -> None:
    def never() -> Any:
        raise AssertionError("it was read")

    contents = gather({"a": np.ones(7), "b": np.ones((3, 4)), "c": np.ones(7, "float32")}).contents
    contents.storages = {
        name: dataclasses.replace(stored, memory=never)
        for name, stored in contents.storages.items()
    }
    assert discover(contents).findings == ()


MANY = 40  # arrays of a MiB each


def many(path: Path) -> Path:
    """A file of many arrays, a third of them readings of others, and one that is twice as large."""
    arrays: dict[str, np.ndarray] = {"large": RNG.integers(0, 255, (1024, 2048), np.uint8)}
    for n in range(MANY):
        before = arrays.get(f"{n - 1:02}", arrays["large"][:, :1024])
        arrays[f"{n:02}"] = own(before.T) if n % 3 == 2 else (
            RNG.integers(0, 255, (1024, 1024), np.uint8))  # fmt: skip
    save_file(arrays, path)
    return path


def test_nothing_as_large_as_a_tensor_is_allocated(tmp_path: Path) -> None:
    path = many(tmp_path / "x.safetensors")
    discover(path)  # loads what is loaded once
    tracemalloc.start()
    try:
        assert len(discover(path).findings) == MANY // 3
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


# Not ru_maxrss: a process has that of its parent to start with.
RESIDENT = """
import re, sys, numpy
from tied._discover import discover
def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s*(\\d+) kB", status.read())[1]) * 1024
discover({"a": numpy.arange(64), "b": numpy.arange(64)})
before = peak()
findings = discover(sys.argv[1]).findings
print(len(findings), peak() - before)
"""


def test_two_arrays_at_most_are_in_memory(tmp_path: Path) -> None:
    path = many(tmp_path / "x.safetensors")
    command = [sys.executable, "-c", RESIDENT, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    count, grown = map(int, done.stdout.split())
    assert count == MANY // 3
    # Of 42 MiB: the mapped pages of two arrays, and the pieces that are compared.
    assert grown < 8 * 2**20


def test_of_a_model_one_copy_at_most_of_two_arrays_is_made() -> None:
    """Arrays that are not in C order are copied, one or two at a time."""
    arrays = {f"{n}": RNG.normal(size=(256, 2 * 256)).astype("float32")[:, ::2] for n in range(12)}
    arrays["t"] = own(arrays["3"].T)
    tracemalloc.start()
    try:
        assert found(arrays) == [("transposed", "t = 3.T")]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * arrays["t"].nbytes
