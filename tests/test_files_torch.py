"""`tied.torch.save_model` and `load_model` beside those of safetensors, and what fails there.

The numbers are those of public reports. Each failure of another library is run here too, so that
the day on which it is mended is seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from accelerate import PartialState
from accelerate.utils.other import clean_state_dict_for_safetensors
from torch import nn

import tied
import tied.torch
from tied._checkpoint import open_checkpoint


class Net(nn.Module):
    """Parameters, whatever memory they have."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        made: dict[int, nn.Parameter] = {}
        for name, x in tensors.items():
            made.setdefault(id(x), nn.Parameter(x))
            self.register_parameter(name, made[id(x)])


def identity() -> dict[str, torch.Tensor]:
    w = torch.randn(4, 3)
    return {"wte": w, "lm_head": w, "other": torch.randn(3)}


def same_memory() -> dict[str, torch.Tensor]:
    w = torch.randn(4, 3)
    return {"wte": w, "lm_head": w.view(4, 3), "other": torch.randn(3)}


def transposed() -> dict[str, torch.Tensor]:
    w = torch.randn(4, 3)
    return {"enc": w, "dec": w.t()}


def disjoint() -> dict[str, torch.Tensor]:
    qkv = torch.randn(6, 2)
    return {"q": qkv[:2], "k": qkv[2:4], "v": qkv[4:]}


def one_slice() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(100)[10:20]}


def nested() -> dict[str, torch.Tensor]:
    a = torch.randn(100)
    return {"a": a, "b": a[10:20], "c": a[30:40]}


def overlapping() -> dict[str, torch.Tensor]:
    a = torch.randn(10)
    return {"a": a[:6], "b": a[4:]}


def strided() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(4, 3).t(), "conv": torch.randn(2, 3, 4, 4).to(
        memory_format=torch.channels_last)}  # fmt: skip


def empty() -> dict[str, torch.Tensor]:
    return {"a": torch.empty(0), "b": torch.empty(0, 3)}


def diagonal() -> dict[str, torch.Tensor]:
    w = torch.randn(4, 4)
    return {"w": w, "d": w.diagonal()}


MODELS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    make.__name__: make
    for make in (identity, same_memory, transposed, disjoint, one_slice, nested, overlapping,
                 strided, empty, diagonal)
}  # fmt: skip

# What safetensors 0.8.0 says when it is to save them; the others it saves.
REFUSED = {
    "transposed": "view size is not compatible",  # crashes as it looks for the end of memory
    "disjoint": "None is covering the entire storage",  # T43, text-generation-inference#49
    "one_slice": "None is covering the entire storage",  # T43
    "nested": "None is covering the entire storage",  # T42: only neighbours are compared
    "overlapping": "None is covering the entire storage",
}


def models(name: str) -> tuple[Net, Net]:
    """Two modules with the same ties and different values."""
    torch.manual_seed(0)
    return Net(MODELS[name]()), Net(MODELS[name]())


def values(model: nn.Module) -> dict[str, Any]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def equal(model: nn.Module, expected: dict[str, Any]) -> bool:
    state = model.state_dict()
    return state.keys() == expected.keys() and all(
        torch.equal(state[k], v) for k, v in expected.items()
    )


def groups(model: Any) -> list[list[str]]:
    return sorted(sorted(group) for group in tied.ties(model).groups)


@pytest.mark.parametrize("name", MODELS)
def test_every_tie_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, other = models(name)
    before, ties = values(model), groups(other)
    tied.torch.save_model(model, tmp_path / "m.safetensors")
    assert tied.torch.load_model(other, str(tmp_path / "m.safetensors")) == (set(), [])
    assert equal(other, before)
    assert equal(model, before)
    assert groups(other) == ties
    loaded = tied.load(tmp_path / "m.safetensors", framework="torch")
    assert all(torch.equal(loaded[k], v) for k, v in before.items())
    assert groups(loaded) == ties


@pytest.mark.parametrize("name", REFUSED)
def test_what_safetensors_refuses_to_save(name: str, tmp_path: Path) -> None:
    model, _ = models(name)
    with pytest.raises(RuntimeError, match=REFUSED[name]):
        safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_each_reads_what_the_other_saved(name: str, tmp_path: Path) -> None:
    model, other = models(name)
    before = values(model)
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    tied.torch.save_model(model, ours, {"note": "x"})
    safetensors.torch.save_model(model, str(theirs), {"note": "x"})
    mine, its = (safetensors.safe_open(file, "pt") for file in (ours, theirs))
    assert sorted(mine.keys()) == sorted(its.keys())
    notes = {k: v for k, v in mine.metadata().items() if k not in ("tied", "format")}
    whole = {
        k: v for k, v in its.metadata().items() if k != "d"
    }  # it says {"d": "w"} of a diagonal
    assert notes == whole
    assert safetensors.torch.load_model(other, str(ours)) == (set(), [])
    assert equal(other, before)
    other = models(name)[1]
    assert tied.torch.load_model(other, theirs) == (set(), [])
    assert equal(other, before)


@pytest.mark.parametrize(
    ("in_file", "in_model", "missing", "unexpected"),
    [
        (("a", "b"), ("a", "b", "c"), {"c"}, []),
        (("a", "b", "c"), ("a", "b"), set(), ["c"]),
        (("a", "c"), ("a", "b"), {"b"}, ["c"]),
    ],
)
def test_missing_and_unexpected_names_as_safetensors_tells_them(
    in_file: tuple[str, ...], in_model: tuple[str, ...], missing: set[str], unexpected: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    file = tmp_path / "m.safetensors"
    tied.torch.save_model(Net({name: torch.ones(2) for name in in_file}), file)

    def fresh() -> Net:
        return Net({name: torch.zeros(2) for name in in_model})

    assert tied.torch.load_model(fresh(), file, strict=False) == (missing, unexpected)
    assert safetensors.torch.load_model(fresh(), file, strict=False) == (missing, unexpected)
    texts = []
    for load in (tied.torch.load_model, safetensors.torch.load_model):
        with pytest.raises(RuntimeError) as caught:
            load(fresh(), file)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    with pytest.raises(tied.FileError) as told:
        tied.torch.load_model(fresh(), file)
    assert told.value.paths == (*sorted(missing), *unexpected)


def test_a_file_with_another_of_the_tied_names(tmp_path: Path) -> None:
    # Which name is kept depends on who wrote the file (T51): any of them is enough.
    file = tmp_path / "m.safetensors"
    w, other = torch.randn(4, 3), torch.randn(3)
    for name in ("wte", "lm_head"):
        safetensors.torch.save_file({name: w, "other": other}, file)
        model, _ = models("identity")
        assert tied.torch.load_model(model, file) == (set(), [])
        assert torch.equal(model.wte, w)
        assert model.lm_head is model.wte


def test_parts_that_together_are_the_whole(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    rows = torch.randn(6, 2)
    safetensors.torch.save_file({name: rows[n : n + 2].clone() for n, name in
                                 ((0, "q"), (2, "k"), (4, "v"))}, file)  # fmt: skip
    w = torch.zeros(6, 2)
    model = Net({"qkv": w, "q": w[:2], "k": w[2:4], "v": w[4:]})
    assert tied.torch.load_model(model, file) == (set(), [])
    assert torch.equal(model.qkv, rows)


@pytest.mark.parametrize("strict", [True, False])
def test_tied_names_with_different_values(strict: bool, tmp_path: Path) -> None:
    # T35: elsewhere the last name wins, or "unexpected" is all that is said.
    file = tmp_path / "m.safetensors"
    tensors = {"wte": torch.ones(4, 3), "lm_head": torch.zeros(4, 3), "other": torch.ones(3)}
    safetensors.torch.save_file(tensors, file)
    model, _ = models("identity")
    before = values(model)
    with pytest.raises(tied.FileError) as caught:
        tied.torch.load_model(model, file, strict=strict)
    assert str(caught.value) == (
        "the checkpoint does not fit the model\n"
        f"  file      {file}\n"
        "  disagree  lm_head and wte, which are one array here\n"
        "  Nothing was loaded; strict=False leaves what is missing, cast=True casts"
    )
    assert equal(model, before)
    assert safetensors.torch.load_model(model, file, strict=False)[1] == ["wte"]
    assert not equal(model, before)


def test_tied_names_with_equal_values_are_read(tmp_path: Path) -> None:
    # A file in which the tie was lost (T54); safetensors calls the second name unexpected.
    file = tmp_path / "m.safetensors"
    w = torch.randn(4, 3)
    w[0, 0] = float("nan")
    safetensors.torch.save_file({"wte": w, "lm_head": w.clone(), "other": torch.ones(3)}, file)
    model, _ = models("identity")
    assert tied.torch.load_model(model, file) == (set(), [])
    assert model.lm_head is model.wte
    with pytest.raises(RuntimeError, match="Unexpected"):
        safetensors.torch.load_model(model, file)


def test_shapes_that_differ_are_told_as_pytorch_tells_them(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    tied.torch.save_model(Net({"a": torch.ones(2)}), file)
    for load in (tied.torch.load_model, safetensors.torch.load_model):
        with pytest.raises(RuntimeError, match=r"size mismatch for a: .*\[2\].*\[3\]"):
            load(Net({"a": torch.ones(3)}), file)


def test_a_model_of_another_dtype_is_cast_to(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    model, other = models("transposed")
    tied.torch.save_model(model, file)
    before = values(model)
    other = tied.bf16(other)
    assert tied.torch.load_model(other, file, device=torch.device("cpu")) == (set(), [])
    assert equal(other, {k: v.bfloat16() for k, v in before.items()})
    assert tied.shares(other.enc, other.dec)


def test_not_contiguous_and_not_to_be_written_as_if(tmp_path: Path) -> None:
    # safetensors#469: refused there by `save_file`, and here if that is what is asked for.
    file = tmp_path / "m.safetensors"
    model, other = models("strided")
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.torch.save_file(model.state_dict(), file)
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.torch.save_model(model, str(file), force_contiguous=False)
    with pytest.raises(tied.FileError) as caught:
        tied.torch.save_model(model, file, force_contiguous=False)
    assert str(caught.value) == (
        "conv is not contiguous\n"
        "  strides  (48, 1, 12, 3)\n"
        "  shape    (2, 3, 4, 4)\n"
        "  Type: save_model(..., force_contiguous=True)"
    )
    assert not file.exists()
    tied.torch.save_model(models("transposed")[0], file, force_contiguous=False)
    strides = other.conv.stride()
    tied.torch.save_model(model, file)
    tied.torch.load_model(other, file, backend="pread")
    assert equal(other, values(model))
    assert other.conv.stride() == strides


def test_a_state_dict_with_what_is_no_tensor(tmp_path: Path) -> None:
    class Extra(Net):
        def get_extra_state(self) -> Any:
            return {"step": 3}

    with pytest.raises(tied.FileError) as caught:
        tied.torch.save_model(Extra({"a": torch.ones(2)}), tmp_path / "m.safetensors")
    assert str(caught.value) == "_extra_state is no tensor but dict, which a file can't hold"
    assert list(tmp_path.iterdir()) == []


def test_a_tie_that_lasts(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"

    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False))
        tied.tie(net, "1.weight", "0.weight", lambda w: w.t())
        return net

    first, second = model(), model()
    tied.torch.save_model(first, file)
    assert tied.torch.load_model(second, file) == (set(), [])
    assert torch.equal(second[1].weight, first[0].weight.t())
    assert sum(x.nbytes for x in open_checkpoint(file).storages.values()) == 48


def test_any_checkpoint_is_read(tmp_path: Path) -> None:
    model, other = models("transposed")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert tied.torch.load_model(other, tmp_path / "m.pt") == (set(), [])
    assert equal(other, values(model))


# ------------------------------------------------------------------- the failures of others, alone


def test_shared_tensors_are_refused_by_save_file(tmp_path: Path) -> None:
    # T40: safetensors#98, #202, #304.
    state = identity()
    with pytest.raises(RuntimeError, match="Some tensors share memory"):
        safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    tied.save(state, tmp_path / "ours.safetensors")
    loaded = tied.load(tmp_path / "ours.safetensors", framework="torch")
    assert loaded["wte"] is loaded["lm_head"]
    assert torch.equal(loaded["wte"], state["wte"])


def test_disjoint_slices_are_not_shared(tmp_path: Path) -> None:
    # safetensors#309, and what is left of it: a group is cut where neighbours alone don't touch.
    found = safetensors.torch._find_shared_tensors(nested())
    assert sorted(map(sorted, found)) == [["a", "b"], ["c"]]
    assert groups(nested()) == [["a", "b", "c"]]
    assert groups(disjoint()) == []


@pytest.fixture
def accelerated() -> Iterator[None]:
    PartialState(cpu=True)  # accelerate warns through it
    yield
    PartialState._reset_state()


@pytest.mark.usefixtures("accelerated")
def test_of_disjoint_slices_accelerate_writes_one(tmp_path: Path) -> None:
    # T46
    state = disjoint()
    assert list(clean_state_dict_for_safetensors(dict(state))) == ["q"]
    tied.save(state, tmp_path / "m.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert sorted(loaded) == ["k", "q", "v"]
    assert all(torch.equal(loaded[k], v) for k, v in state.items())


@pytest.mark.usefixtures("accelerated")
def test_empty_tensors_are_not_shared(tmp_path: Path) -> None:
    # T41: safetensors#280
    state = empty()
    assert list(clean_state_dict_for_safetensors(dict(state))) == ["a"]
    tied.save(state, tmp_path / "m.safetensors")
    assert sorted(safetensors.torch.load_file(tmp_path / "m.safetensors")) == ["a", "b"]


NOT_CONTIGUOUS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda a: a.T,
    "columns": lambda a: a[:, 1:3],
    "diagonal": np.diagonal,
    "fortran": np.asfortranarray,
    "backwards": lambda a: a[::-1],
}


@pytest.mark.parametrize("way", NOT_CONTIGUOUS)
def test_arrays_that_are_not_contiguous(way: str, tmp_path: Path) -> None:
    # J74, M12: safetensors#825 writes them wrong, and says nothing.
    x = NOT_CONTIGUOUS[way](np.arange(12, dtype="float32").reshape(3, 4))
    safetensors.numpy.save_file({"x": x}, tmp_path / "theirs.safetensors")
    theirs = safetensors.numpy.load_file(tmp_path / "theirs.safetensors")["x"]
    assert not np.array_equal(theirs, x)
    tied.save({"x": x}, tmp_path / "ours.safetensors")
    ours = safetensors.numpy.load_file(tmp_path / "ours.safetensors")["x"]
    assert np.array_equal(ours, x)
    assert np.array_equal(tied.load(tmp_path / "ours.safetensors")["x"], x)


def test_a_slice_of_a_large_buffer_is_as_small_as_it_is(tmp_path: Path) -> None:
    # T28: nine reports on `torch.save`, which writes the buffer (M13: so does pickle in part).
    x = torch.randn(1_000_000)[:10]
    torch.save({"x": x}, tmp_path / "m.pt")
    assert (tmp_path / "m.pt").stat().st_size > 4_000_000
    tied.save({"x": x}, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size < 200
    contents = open_checkpoint(tmp_path / "m.pt")
    assert contents.nbytes == 40


def test_the_table_says_what_safetensors_can_not(tmp_path: Path) -> None:
    model, _ = models("transposed")
    tied.torch.save_model(model, tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert list(file.keys()) == ["enc"]
        table = json.loads(file.metadata()["tied"])
    assert table == {
        "version": 1,
        "aliases": {"dec": {"of": "enc", "shape": [3, 4], "strides": [1, 3], "offset": 0}},
    }
