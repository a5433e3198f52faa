"""Public reports on files of PyTorch and Hugging Face, each with its number in the name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

import tied
import tied.torch
from commands import run
from tied._checkpoint import open_checkpoint
from tied._discover import discover, retied
from tied._files.write import write

W = np.arange(12, dtype="float32").reshape(4, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


class Tied(nn.Module):
    """A language model of two layers: the head is the embedding."""

    def __init__(self, *, ties: bool = True, start: float = 0) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if ties:
            self.lm_head.weight = self.wte.weight
        with torch.no_grad():
            for x in self.parameters():
                x.copy_(start + torch.arange(12.0).reshape(4, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.wte(ids))  # type: ignore[no-any-return]


WTE, HEAD = "wte.weight", "lm_head.weight"


def groups(model: Any) -> tuple[tuple[str, ...], ...]:
    return tied.ties(model).groups


def plain(path: Path, **arrays: Any) -> Path:
    """What a tool that knows of no ties writes; `__` is a dot."""
    named = {name.replace("__", "."): np.ascontiguousarray(x) for name, x in arrays.items()}
    safetensors.numpy.save_file(named, path)
    return path


def misfit(model: Any, path: Path, *facts: str) -> None:
    """Loading says exactly this, and changes nothing."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(tied.FileError) as caught:
        tied.load_into(model, path)
    lines = [x.split("  ") for x in (f"file  {path}", *facts)]
    wide = max(len(kind) for kind, _ in lines)
    body = [f"  {kind:<{wide}}  {what}" for kind, what in lines]
    hint = "  Nothing was loaded; strict=False leaves what is missing, cast=True casts"
    assert str(caught.value).splitlines() == ["the checkpoint does not fit the model", *body, hint]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def stored(path: Path) -> set[str]:
    """The tensors that other readers see in a file."""
    with safetensors.safe_open(path, "np") as opened:
        return set(opened.keys())


# ------------------------------------------------------------------ C. bytes, and ties without any


@pytest.mark.parametrize("mapped", [True, False])
def test_t29_a_shard_does_not_hold_the_whole(mapped: bool, file: Path) -> None:
    """T29: a slice in memory is no more than the slice."""
    full = torch.arange(1000.0)
    state = {"exp_avg": full[10:20], "again": full[10:20]}
    assert state["exp_avg"].untyped_storage().nbytes() == 4000
    tied.save(state, file)
    for shard in (tied.copy(state), tied.load(file, framework="torch", mapped=mapped)):
        assert shard["exp_avg"].tolist() == list(range(10, 20))
        assert shard["exp_avg"].untyped_storage().nbytes() == 40
        assert groups(shard) == (("exp_avg", "again"),)


def test_t31_ties_without_memory(tmp_path: Path) -> None:
    """T31: `map_location="meta"` drops the sharing; a move of ours does not."""
    t = torch.arange(6.0)
    state = {"t": t, "start": t[:3], "matrix": t.reshape(2, 3).t(), "other": torch.ones(6)}
    torch.save(state, tmp_path / "m.pt")
    meta = torch.load(tmp_path / "m.pt", map_location="meta")
    assert groups(meta) == ()  # so it is elsewhere
    moved = tied.to(tied.load(tmp_path / "m.pt", framework="torch"), "meta")
    assert {x.device.type for x in moved.values()} == {"meta"}
    assert groups(moved) == groups(state) == (("t", "start", "matrix"),)
    assert set(open_checkpoint(tmp_path / "m.pt").aliases) == {"start", "matrix"}
    with pytest.raises(tied.DeviceError) as caught:
        tied.save(moved, tmp_path / "m.safetensors")
    assert str(caught.value) == (
        "a meta tensor has no elements to move\n  array  other\n"
        '  Type: tied.empty(model, "cpu"), then fill or load it'
    )
    filled = tied.load_into(tied.empty(moved, "cpu"), tmp_path / "m.pt").model
    assert groups(filled) == groups(state)
    assert filled["matrix"].tolist() == [[0, 3], [1, 4], [2, 5]]


# ------------------------------------------------------------------------- D. loading a state dict


@pytest.mark.parametrize("lasting", [True, False])
def test_t32_assign_unties(lasting: bool, file: Path) -> None:
    """T32: elsewhere two Parameters get one memory, and an optimizer steps it twice."""
    tied.save(Tied(start=3), file)
    model, state = Tied(), tied.load(file, framework="torch", mapped=False)
    if lasting:
        tied.tie(model)
        tied.torch.load_state_dict(model, state, assign=True)
    else:
        model.load_state_dict(state, assign=True)
    parameters = list(model.parameters())
    assert len(parameters) == (1 if lasting else 2)
    for x in parameters:
        x.grad = torch.ones(4, 3)
    torch.optim.SGD(parameters, lr=1).step()
    assert model.lm_head.weight.tolist() == (W + (2 if lasting else 1)).tolist()
    assert model.wte.weight.tolist() == model.lm_head.weight.tolist()


@pytest.mark.parametrize("names", [[WTE], [HEAD], [WTE, HEAD]])
def test_t33_either_tied_key_or_both(names: list[str], file: Path) -> None:
    """T33: elsewhere the other key is left stale."""
    safetensors.numpy.save_file(dict.fromkeys(names, W + 5), file)
    model, ids = Tied(), torch.tensor([2])
    weight = model.wte.weight
    told = tied.load_into(model, file)
    assert (told.loaded, told.aliases, told.missing) == ((WTE,), (HEAD,), ())
    assert model.lm_head.weight is model.wte.weight is weight
    expected = torch.from_numpy(W[2] + 5) @ torch.from_numpy(W + 5).T
    assert torch.equal(model(ids)[0], expected)


class Fused(nn.Module):
    """Attention: q, k and v are views of one fused matrix, as TransformerLens has them."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.c_attn = nn.Parameter(start + torch.arange(18.0).reshape(3, 6))
        for n, name in enumerate("qkv"):
            part = self.c_attn.detach()[:, 2 * n : 2 * n + 2]
            self.register_parameter(name, nn.Parameter(part))


@pytest.mark.parametrize("ours", [True, False])
def test_t34_views_of_a_fused_matrix(ours: bool, file: Path) -> None:
    """T34: q, k and v are saved once, and loaded as views again."""
    model = Fused(100)
    with torch.no_grad():
        model.k += 0.5  # the fused matrix sees it, and the file has to
    tied.torch.save_model(model, file) if ours else tied.save(model, file)
    assert stored(file) == {"c_attn"}
    assert open_checkpoint(file).nbytes == 18 * 4
    loaded, other = tied.load(file, framework="torch"), Fused(0)
    assert loaded["k"].tolist() == model.c_attn[:, 2:4].tolist()
    loaded["q"][:] = -1
    assert loaded["c_attn"][:, :2].tolist() == [[-1, -1]] * 3
    if ours:
        assert tied.torch.load_model(other, file) == (set(), [])
    else:
        tied.load_into(other, file)
    assert torch.equal(other.c_attn, model.c_attn)
    assert torch.equal(other.k, model.k)
    assert groups(other) == (("c_attn", "q", "k", "v"),)


def test_t37_writing_and_loading_are_a_matched_pair(file: Path) -> None:
    """T37: what is left out by one is known to the other, by name, in each of the pairs."""
    tied.save(Tied(start=7), file)
    assert stored(file) == {WTE}
    assert set(tied.load(file)) == {WTE, HEAD}
    model = Tied()
    model.load_state_dict(tied.load(file, framework="torch"))
    assert model.wte.weight[0, 0] == 7
    tied.torch.save_model(Tied(start=8), file)
    assert tied.torch.load_model(model, file) == (set(), [])
    assert model.lm_head.weight.tolist() == (W + 8).tolist()


def test_t38_a_state_dict_that_was_processed(tmp_path: Path) -> None:
    """T38: a cast and shards leave the tie of a state dict as it was."""
    state = Tied().state_dict() | {f"layer.{n}": torch.full((4,), float(n)) for n in range(3)}
    half = tied.map(lambda x: x.half() / 2, state)
    tied.save(half, tmp_path / "m", max_shard_bytes=24)
    loaded = tied.load(tmp_path / "m", framework="torch")
    assert loaded[HEAD] is loaded[WTE]
    assert loaded[HEAD].tolist() == (W / 2).tolist()
    assert len(open_checkpoint(tmp_path / "m").files) > 1


@pytest.mark.parametrize("save", [tied.save, tied.torch.save_model])
def test_t39_j37_a_tied_model_of_torch_is_one_array_in_jax(save: Any, file: Path) -> None:
    """T39, J37: elsewhere they are two, and both are trained."""
    save(Tied(), file)
    params = tied.load(file, framework="jax")
    assert params[WTE] is params[HEAD]
    stepped = tied.map(lambda x: x - 1, params)
    assert stepped[WTE] is stepped[HEAD]
    assert stepped[HEAD].tolist() == (W - 1).tolist()
    assert tied.ties(stepped).parameters == 12


# ------------------------------------------------------------------------- E. files and their names


def test_t47_an_alias_that_was_dropped_is_not_demanded(file: Path) -> None:
    """T47: what `save_model` of safetensors leaves out."""
    safetensors.torch.save_model(Tied(start=3), str(file))
    (kept,) = stored(file)
    with pytest.raises(RuntimeError, match="Missing key"):
        Tied().load_state_dict(safetensors.torch.load_file(file))
    model = Tied()
    told = tied.load_into(model, file)
    assert (told.missing, told.unexpected) == ((), ())
    assert model.wte.weight.tolist() == (W + 3).tolist()
    assert {WTE, HEAD} == {kept, *open_checkpoint(file).aliases}


def test_t49_entries_of_one_pointer_make_no_giant_shard(tmp_path: Path) -> None:
    """T49: tensors without elements all have pointer 0; grouped by it they are one huge tie."""
    state = {f"empty.{n}": torch.empty(0, n) for n in range(40)}
    state |= {f"w.{n}": torch.full((10,), float(n)) for n in range(6)}
    assert {x.data_ptr() for name, x in state.items() if name[0] == "e"} == {0}
    tied.save(state, tmp_path / "m", max_shard_bytes=80)
    contents = open_checkpoint(tmp_path / "m")
    assert contents.aliases == {}
    sizes: dict[Any, int] = {}
    for x in contents.storages.values():
        sizes[x.file] = sizes.get(x.file, 0) + x.nbytes
    assert sorted(size for size in sizes.values() if size) == [80, 80, 80]
    loaded = tied.load(tmp_path / "m", framework="torch")
    assert all(torch.equal(loaded[name], x) for name, x in state.items())
    assert loaded.keys() == state.keys()


def test_t54_equal_but_cloned(file: Path) -> None:
    """T54: both are written, as nothing says that they are one; who knows it says so."""
    state = {name: x.clone() for name, x in Tied().state_dict().items()}
    tied.save(state, file)
    contents = open_checkpoint(file)
    assert (contents.nbytes, contents.aliases) == (96, {})
    told = discover(file)
    assert [str(x) for x in told.findings] == [
        "wte.weight = lm_head.weight  (was tied? 48 B twice)"  # files are sorted by name
    ]
    write(retied(contents, told), packed := file.with_name("packed.safetensors"))
    assert stored(packed) == {HEAD}
    loaded = tied.load(packed, framework="torch")
    assert loaded[HEAD] is loaded[WTE]
    assert loaded[HEAD].tolist() == W.tolist()


def test_t55_a_merged_checkpoint_that_has_both_names(tmp_path: Path) -> None:
    """T55: `zero_to_fp32` merges shards to a flat dict, both names of a tie on one tensor."""
    merged = torch.arange(12.0).reshape(4, 3)
    state = {WTE: merged, HEAD: merged, "norm": torch.ones(3)}
    with pytest.raises(RuntimeError, match="Some tensors share memory"):
        safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    torch.save(state, tmp_path / "pytorch_model.bin")
    ours = tmp_path / "ours.safetensors"
    assert run("convert", tmp_path / "pytorch_model.bin", ours).code == 0
    assert stored(ours) == {WTE, "norm"}
    loaded = tied.load(ours, framework="torch")
    assert loaded[HEAD] is loaded[WTE]
    assert torch.equal(loaded[HEAD], merged)


# ----------------------------------------------------------- F. the config and the file disagree


def test_t58_t63_tied_by_the_config_and_not_in_the_file(file: Path) -> None:
    """T58: the embedding is silently taken from the head; T63: gibberish."""
    untied = Tied(ties=False, start=1)
    with torch.no_grad():
        untied.lm_head.weight += 1
    tied.save(untied, file)
    misfit(Tied(), file, f"disagree  {WTE} and {HEAD}, which are one array here")
    other = Tied(ties=False)
    tied.load_into(other, file)
    assert (other.wte.weight[0, 0], other.lm_head.weight[0, 0]) == (1, 2)


def test_t63_no_tie_in_the_config_and_no_head_in_the_file(file: Path) -> None:
    """T63: a head that the file lacks is missing, unless the file says what it is."""
    plain(file, wte__weight=W)
    misfit(Tied(ties=False), file, f"missing  {HEAD}")
    # A file that says what the head is has it.
    tied.save(Tied(start=2), file)
    model = Tied(ties=False)
    told = tied.load_into(model, file)
    assert (told.loaded, told.missing) == ((WTE, HEAD), ())
    assert model.lm_head.weight.tolist() == (W + 2).tolist()
    assert groups(model) == ()


def test_t64_the_arrays_say_what_is_tied_and_not_the_config(file: Path) -> None:
    """T64: a tie is never made of equal values."""
    model = Tied(ties=False)
    model.config = {"tie_word_embeddings": True}  # type: ignore[assignment]
    assert torch.equal(model.wte.weight, model.lm_head.weight)  # equal by chance, as yet
    tied.save(model, file)
    assert stored(file) == {WTE, HEAD}
    for library in ("numpy", "torch", "jax"):
        assert groups(tied.load(file, framework=library)) == ()
    resumed = Tied(ties=False, start=9)
    tied.load_into(resumed, file)
    with torch.no_grad():
        resumed.lm_head.weight += 1
    assert resumed.wte.weight.tolist() == W.tolist()


@pytest.mark.parametrize("mapped", [True, False])
def test_t61_ties_do_not_depend_on_how_a_file_is_read(mapped: bool, tmp_path: Path) -> None:
    """T61: neither on dtype, nor library, nor mapping."""
    for number, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        tied.save(Tied().to(dtype), path := tmp_path / f"{number}.safetensors")
        for library in ("torch", "jax"):
            loaded = tied.load(path, framework=library, mapped=mapped)
            assert loaded[WTE] is loaded[HEAD]


def test_t62_missing_tied_keys_are_aliases(file: Path) -> None:
    """T62: encoder, decoder and head of T5 read one matrix, and the file has it once."""

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.encoder, self.decoder = (nn.Embedding(4, 3) for _ in range(3))
            self.lm_head = nn.Linear(3, 4, bias=False)
            for layer in (self.encoder, self.decoder, self.lm_head):
                layer.weight = self.shared.weight

    names = ("shared.weight", "encoder.weight", "decoder.weight", "lm_head.weight")
    for name in names:
        safetensors.numpy.save_file({name: W}, file)
        model = T5()
        told = tied.load_into(model, file)
        assert (told.loaded, told.missing) == (names[:1], ())
        assert told.aliases == names[1:]
        assert groups(model) == (names,)
        assert model.lm_head.weight.tolist() == W.tolist()


def test_t59_an_encoder_alone_has_its_embedding(file: Path) -> None:
    """T59: the file of the whole model calls it by the names of another part."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Embedding(4, 3)

    tied.save({"shared.weight": W + 1, "bias": W[0].copy()}, file)
    facts = ("missing  encoder.weight", "unexpected  bias", "unexpected  shared.weight")
    misfit(Encoder(), file, *facts)
    shared = W + 1
    tied.save({"shared.weight": shared, "encoder.weight": shared}, file)
    model = Encoder()
    told = tied.load_into(model, file, strict=False)
    assert (told.missing, told.unexpected) == ((), ("shared.weight",))
    assert model.encoder.weight.tolist() == shared.tolist()
