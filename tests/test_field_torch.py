"""PyTorch and its neighbours: the kinds of report of the field, each as tied handles it.

`T7` and the like are the numbers of the project's list of field reports; where the sentence names
a repository, the report is public there.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tied


class Autoencoder(nn.Module):
    """The most common attempt at a tied decoder: a Parameter over the encoder's transpose."""

    def __init__(self, view: Callable[[Any], Any] = torch.t) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.decoder = nn.Linear(3, 4)
        self.decoder.weight = nn.Parameter(view(self.encoder.weight.detach()))

    def forward(self, x: Any) -> Any:
        return self.decoder(torch.relu(self.encoder(x)))


class LanguageModel(nn.Module):
    """A head that is the embedding's own Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Any) -> Any:
        return self.lm_head(self.wte(x))


TRANSPOSED = (("encoder.weight", "decoder.weight"),)
SAME = (("wte.weight", "lm_head.weight"),)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "transpose": (Autoencoder, TRANSPOSED, torch.ones(2, 4)),
    "same_parameter": (LanguageModel, SAME, torch.tensor([[1, 2, 6]])),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


# ------------------------------------------------------- A. moves, casts, meta, materialisation


MOVES: dict[str, Callable[[Any], Any]] = {
    "f64": tied.f64,
    "f16": tied.f16,
    "bf16": tied.bf16,
    "f32_of_f64": lambda m: tied.f32(tied.f64(m)),
    "cpu": tied.cpu,
    "meta": lambda m: tied.to(m, "meta"),
    "meta_and_empty": lambda m: tied.empty(tied.to(m, "meta"), "cpu"),
    "meta_on_meta": lambda m: tied.f64(tied.to(m, "meta")),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", MODELS)
def test_T1_T3_T4_T5_T18_no_move_or_cast_unties(name: str, move: str) -> None:
    """torch/nn#187, pytorch/xla#1247, #2719, #7042, InfiniTrain#236."""
    model = build(name)
    after = MOVES[move](model)
    assert tied.ties(after).groups == MODELS[name][1]
    assert tied.ties(model).groups == MODELS[name][1]
    assert [n for n, _ in after.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in after.parameters())
    assert len(list(after.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_T4_after_a_move_writing_one_side_changes_the_other(name: str) -> None:
    """pytorch/xla#2719: the write went to one of two copies."""
    model = tied.f64(build(name))
    one, other = tied.ties(model).groups[0]
    with torch.no_grad():
        model.get_parameter(one)[1, 2] = 42.0
    seen = model.get_parameter(other)
    assert 42.0 in (seen[1, 2], seen.mT[1, 2] if name == "transpose" else None)


@pytest.mark.parametrize("name", MODELS)
def test_T1_the_model_computes_what_it_computed(name: str) -> None:
    model, x = build(name), MODELS[name][2]
    before = model(x)
    assert torch.equal(tied.f32(tied.f64(model))(x), before)
    assert torch.equal(tied.cpu(model)(x), before)
    assert torch.equal(tied.copy(model)(x), before)


def test_T9_a_value_loaded_after_a_move_reaches_both_sides() -> None:
    """pytorch#62264: Embedding(_weight=linear.weight), moved, then loaded."""
    linear = nn.Linear(4, 7, bias=False)
    model = nn.ModuleDict({"head": linear, "embed": nn.Embedding(7, 4, _weight=linear.weight)})
    model = tied.f64(model)
    model.load_state_dict({"head.weight": torch.zeros(7, 4, dtype=torch.float64),
                           "embed.weight": torch.ones(7, 4, dtype=torch.float64)})  # fmt: skip
    assert torch.equal(model["head"].weight, model["embed"].weight)
    assert tied.ties(model).groups == (("head.weight", "embed.weight"),)


class Aliased(nn.Module):
    """One tensor as a registered buffer, in a dict and in a list of plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        data = torch.arange(6.0).reshape(2, 3)
        self.register_buffer("buffer", data)
        self.data = {"a": data, "row": data[1]}
        self.listed = [data, torch.zeros(2)]


@pytest.mark.parametrize("move", MOVES)
def test_T10_T11_plain_attributes_follow_the_buffers(move: str) -> None:
    """pytorch#43815, #80490, #29807: PyTorch leaves dicts and lists of tensors behind."""
    model = Aliased()
    after = MOVES[move](model)
    assert after.data["a"] is after.buffer
    assert after.listed[0] is after.buffer
    tensors = [after.buffer, after.data["row"], after.listed[1]]
    assert len({(str(t.device), t.dtype) for t in tensors}) == 1
    (group,) = tied.ties(after).groups
    assert sorted(group) == ["buffer", "data.a", "data.row", "listed.0"]
    assert model.listed[1].dtype == torch.float32
    assert model.listed[1].device.type == "cpu"


@pytest.mark.parametrize("name", MODELS)
def test_T13_T15_T16_T17_a_model_built_on_meta_is_materialised_tied(name: str) -> None:
    """Modalities#357, accelerate#3154, verl#7834, hyper-parallel#606."""
    with torch.device("meta"):
        model = MODELS[name][0]()
    assert all(p.is_meta for p in model.parameters())
    assert tied.ties(model).groups == MODELS[name][1]
    after = tied.empty(model, "cpu")
    assert tied.ties(after).groups == MODELS[name][1]
    assert not any(p.is_meta for p in after.parameters())
    for p in after.parameters():
        nn.init.ones_(p)
    assert after(MODELS[name][2]).shape == build(name)(MODELS[name][2]).shape


def test_T14_the_tie_that_accelerate_makes_on_meta_survives_materialisation() -> None:
    """accelerate#3668: inside init_empty_weights each side becomes a Parameter of its own.

    Both still lie over one meta storage, which is what `ties` looks at.
    """
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = LanguageModel()
    assert model.wte.weight is not model.lm_head.weight
    assert tied.ties(model).groups == SAME
    assert tied.ties(tied.empty(model, "cpu")).groups == SAME
    assert tied.ties(model.to_empty(device="cpu")).groups == ()


def test_T18_a_cast_that_changes_nothing_gives_the_same_parameters() -> None:
    """InfiniTrain#236: float32 to float32 gave new objects."""
    for name in MODELS:
        model = build(name)
        after = tied.f32(model)
        pairs = zip(model.parameters(), after.parameters(), strict=True)
        assert all(a is b for a, b in pairs)


def test_T20_meta_pointers_of_zero_are_no_tie_and_hide_none() -> None:
    """unsloth#7215: all meta tensors have one pointer; without them real ties are missed."""
    a, b = torch.empty(4, 3, device="meta"), torch.empty(4, 3, device="meta")
    assert a.data_ptr() == b.data_ptr() == 0
    model = {"a": a, "b": b, "again": a, "t": a.t(), "row": a[1], "other_row": a[2], "b_row": b[1]}
    assert tied.ties(model).groups == (("a", "again", "t", "row", "other_row"), ("b", "b_row"))
    assert tied.ties({"one": a[1], "two": a[2]}).groups == ()
    for after in (tied.copy(model), tied.f64(model), tied.empty(model, "cpu")):
        assert tied.ties(after).groups == tied.ties(model).groups


def test_T83_nested_and_several_attributes_can_be_tied_at_once() -> None:
    """DeepSpeed#684, #2035, #4216, #7208: one attribute only, at the top only."""
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight, b.bias = a.weight, a.bias
    model = nn.ModuleList([nn.Sequential(a), nn.ModuleDict({"deep": nn.Sequential(b)})])
    wanted = (("0.0.weight", "1.deep.0.weight"), ("0.0.bias", "1.deep.0.bias"))
    assert tied.ties(tied.bf16(model)).groups == wanted


# ------------------------------------------------------------------ B. deepcopy, pickle, clone

VIEWS: dict[str, Callable[[Any], Any]] = {
    "same_data": lambda w: w,
    "transpose": torch.t,
    "row_slice": lambda w: w[1:3],
    "column_slice": lambda w: w[:, ::2],
    "reshape": lambda w: w.view(-1),
    "diagonal": torch.diagonal,
}


@pytest.mark.parametrize("view", VIEWS)
def test_T21_two_parameters_over_one_tensor_are_copied_as_such(view: str) -> None:
    """pytorch#79788: Parameter.__deepcopy__ loses views; tied.copy does not."""
    w = torch.arange(12.0).reshape(4, 3)
    model = nn.ParameterDict({"w": nn.Parameter(w), "v": nn.Parameter(VIEWS[view](w))})
    assert sorted(tied.compare(model, copy.deepcopy(model)).paths) == ["v", "w"]
    after = tied.copy(model)
    assert not tied.compare(model, after)
    assert isinstance(after["v"], nn.Parameter)
    assert not tied.shares(model, after)
    with torch.no_grad():
        after["w"].add_(100)
    assert torch.equal(after["v"], VIEWS[view](w) + 100)
    assert torch.equal(model["w"], w)


def test_T23_a_parametrized_module_is_copied_with_its_ties() -> None:
    """pytorch#80811: deepcopy of parametrized modules."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(module[0])
    module[1].weight = module[0].parametrizations.weight.original
    after = tied.copy(module)
    assert type(after[0]) is type(module[0])
    assert after[1].weight is after[0].parametrizations.weight.original
    assert torch.equal(after(torch.ones(3)), module(torch.ones(3)))


@pytest.mark.parametrize("view", VIEWS)
def test_T24_a_pickle_of_split_keeps_every_view(view: str) -> None:
    """pytorch#46: sharing of slices was lost on the way to another process."""
    w = torch.arange(12.0).reshape(4, 3)
    model = nn.ParameterDict({"w": nn.Parameter(w), "v": nn.Parameter(VIEWS[view](w))})
    after = tied.merge(*pickle.loads(pickle.dumps(tied.split(model))))
    assert type(after) is nn.ParameterDict
    assert isinstance(after["v"], nn.Parameter)
    assert not tied.compare(model, after)
    assert torch.equal(after["v"], model["v"])
    with torch.no_grad():
        after["w"].zero_()
    assert not after["v"].any()


@pytest.mark.parametrize("name", MODELS)
def test_T26_T27_deep_copies_keep_ties_and_share_nothing(name: str) -> None:
    """mlx#558, mlverse/torch#986: one memo for all arrays."""
    model = build(name)
    after = tied.copy(model)
    assert tied.ties(after).groups == MODELS[name][1]
    assert not tied.shares(model, after)
    assert pickle.loads(pickle.dumps(tied.ties(after).to_dict())) == tied.ties(model).to_dict()


# --------------------------------------------------------------- C. whole buffers, slices of them

SLICES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda big: {"x": big[:10]},
    "parameter": lambda big: {"x": nn.Parameter(big[10:20])},
    "rows_and_their_transpose": lambda big: {"x": big[:10], "t": big[:10].t()},
    "overlapping_rows": lambda big: {"x": big[:6], "y": big[4:10]},
    "rows_far_apart": lambda big: {"x": big[:5], "y": big[-5:]},
    "column_piece": lambda big: {"x": big[3, 2:8], "y": big[3, 4:6]},
}


@pytest.mark.parametrize("cut", SLICES)
def test_T28_a_pickle_of_split_holds_only_what_is_read(cut: str) -> None:
    """Nine PyTorch reports, 2017 to 2023: saving a slice of ten rows writes the whole buffer."""
    big = torch.arange(80_000.0).reshape(10_000, 8)
    model = SLICES[cut](big)
    size = len(pickle.dumps(tied.split(model)))
    assert size < 320 + 4_000 < big.nbytes
    after = tied.merge(*pickle.loads(pickle.dumps(tied.split(model))))
    for name, tensor in model.items():
        assert torch.equal(after[name], tensor)
    assert tied.ties(after).groups == tied.ties(model).groups


@pytest.mark.parametrize("cut", SLICES)
def test_T29_copies_and_casts_let_go_of_the_large_buffer(cut: str) -> None:
    """pytorch#116553: a slice kept the whole unsharded tensor alive."""
    model = SLICES[cut](torch.arange(80_000.0).reshape(10_000, 8))
    for operation in (tied.copy, tied.f64, lambda m: tied.map(torch.neg, m)):
        after = operation(model)
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in after.values()}
        assert sum(held.values()) <= 2 * 4 * 10 * 8


def test_T31_a_move_to_meta_keeps_slices_tied() -> None:
    """pytorch#82412: torch.load([t, t[:3]], map_location="meta") makes two storages."""
    t = torch.arange(12.0).reshape(4, 3)
    after = tied.to([t, t[:3], t[1:, 1:]], "meta")
    assert tied.ties(after).groups == (("0", "1", "2"),)
