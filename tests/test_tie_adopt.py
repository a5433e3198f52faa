"""tie(module) makes what is tied now last, and says what it did; untie is the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tied
from test_field_torch import Autoencoder as Aliased
from test_field_torch import LanguageModel as Shared
from test_field_torch_ties import Attention
from tying import KINDS, Autoencoder, LanguageModel, Pair, get, put


class Buffers(nn.Module):
    """A parameter, and two buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("kept", torch.randn(4, 3))
        self.register_buffer("passing", torch.randn(4, 3), persistent=False)


def pairs(adoption: Any) -> list[tuple[str, str]]:
    return [(change.first, change.second) for change in adoption.made]


# ------------------------------------------------------------------------------- adopting by memory


def test_one_parameter_under_two_names_is_adopted() -> None:
    model = Shared()
    weight = model.wte.weight
    adoption = tied.tie(model)
    assert pairs(adoption) == [("wte.weight", "lm_head.weight")]
    assert adoption.left == ()
    assert model.lm_head.weight is model.wte.weight is weight
    assert list(model.state_dict()) == ["wte.weight"]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": torch.t,
    "same_data": lambda w: w,
    "row": lambda w: w[1],
    "columns": lambda w: w[:, ::2],
    "reshape": lambda w: w.view(-1),
    "diagonal": torch.diagonal,
    "permuted_part": lambda w: w[:2].view(2, 2, 2).permute(2, 0, 1),
    "expand": lambda w: w.expand(2, 6, 4),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_parameter_over_anothers_memory_is_adopted(name: str) -> None:
    base = torch.randn(6, 4)
    model = nn.ParameterDict({"a": nn.Parameter(base), "b": nn.Parameter(VIEWS[name](base))})
    weight, x = model["a"], torch.randn(VIEWS[name](base).shape)
    before = model["b"].detach().clone()
    adoption = tied.tie(model)
    assert pairs(adoption) == [("a", "b")]
    assert model["a"] is weight
    assert torch.equal(model["b"], before)
    assert [n for n, _ in model.named_parameters()] == ["a"]
    (x * model["b"]).sum().backward()
    wanted = torch.zeros(6, 4)
    places = VIEWS[name](torch.arange(24).view(6, 4)).reshape(-1)
    wanted.view(-1).index_add_(0, places, x.reshape(-1))
    torch.testing.assert_close(weight.grad, wanted)
    model.double()
    assert torch.equal(model["b"], before.double())


def test_the_whole_is_the_source_even_if_a_part_comes_first() -> None:
    base = torch.randn(4, 3)
    model = nn.ParameterDict({"part": nn.Parameter(base[1:]), "whole": nn.Parameter(base)})
    assert pairs(tied.tie(model)) == [("whole", "part")]
    assert list(model.state_dict()) == ["whole"]


def test_q_k_and_v_over_one_projection_are_adopted() -> None:
    model = Attention()
    adoption = tied.tie(model)
    assert sorted(pairs(adoption)) == sorted(
        (f"c_attn.{kind}", f"{n}.{kind}") for kind in ("weight", "bias") for n in "qkv"
    )
    assert list(model.state_dict()) == ["c_attn.weight", "c_attn.bias"]
    copied = copy.deepcopy(model).double()
    copied.k.weight = torch.full((4, 4), 7.0, dtype=torch.float64)
    assert (copied.c_attn.weight[4:8] == 7).all()


@pytest.mark.parametrize("cut", [(8, 0), (4, 4)])
def test_pieces_of_a_buffer_that_is_not_in_the_model(cut: tuple[int, int]) -> None:
    """The two are the whole, or lie one after the other, which is no tie."""
    stop, start = cut
    base = torch.randn(80)[8:16]
    model = nn.ParameterDict({"a": nn.Parameter(base[:stop]), "b": nn.Parameter(base[start:])})
    values = [model["a"].detach().clone(), model["b"].detach().clone()]
    adoption = tied.tie(model)
    assert pairs(adoption) == ([("a", "b")] if cut == (8, 0) else [])
    assert adoption.left == ()
    assert [torch.equal(model[n], v) for n, v in zip("ab", values, strict=True)] == [True, True]


def test_pieces_that_overlap_get_a_parameter_of_which_both_are_parts() -> None:
    base = torch.randn(80)[8:16]
    before = base.clone()
    model = nn.ParameterDict({"a": nn.Parameter(base[:5]), "b": nn.Parameter(base[3:])})
    adoption = tied.tie(model)
    assert pairs(adoption) == [("tied_span", "a"), ("tied_span", "b")]
    assert str(adoption).splitlines() == [
        "tied   a = a part of tied_span", "tied   b = a part of tied_span",
    ]  # fmt: skip
    assert [n for n, _ in model.named_parameters()] == ["tied_span"]
    assert torch.equal(model.get_parameter("tied_span"), before)
    (2 * model["a"].sum() + 3 * model["b"].sum()).backward()
    assert model.get_parameter("tied_span").grad.tolist() == [2, 2, 2, 5, 5, 3, 3, 3]
    twin = copy.deepcopy(model).double()
    twin["b"] = torch.ones(5, dtype=torch.float64)
    assert twin["a"][3:].tolist() == [1, 1]
    assert list(twin) == ["a", "b"]
    assert torch.equal(model["a"], before[:5])
    model.load_state_dict({"a": torch.arange(5.0), "b": torch.arange(3.0, 8.0)})
    assert model.get_parameter("tied_span").tolist() == list(range(8))


NOT_TIED: dict[str, Callable[[], nn.Module]] = {
    "equal_values": lambda: nn.ParameterList([torch.ones(3), torch.ones(3)]),
    "empty": lambda: nn.ParameterList([torch.ones(0), torch.ones(0)]),
    "interleaved": lambda: nn.ParameterList(
        [nn.Parameter(x) for x in torch.zeros(4, 4).view(4, 2, 2).unbind(2)]
    ),
    "meta": lambda: nn.ParameterList([torch.ones(3, device="meta") for _ in range(2)]),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4),
    "batch_norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
}


@pytest.mark.parametrize("name", NOT_TIED)
def test_what_is_no_tie_is_left_alone(name: str) -> None:
    model = NOT_TIED[name]()
    types = [type(m) for m in model.modules()]
    parameters = list(model.parameters())
    adoption = tied.tie(model)
    assert (adoption.made, adoption.left) == ((), ())
    assert [type(m) for m in model.modules()] == types
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_adopting_again_changes_nothing() -> None:
    for kind in KINDS.values():
        model = kind.model()
        names, types = list(model.state_dict()), [type(m) for m in model.modules()]
        adoption = tied.tie(model)
        assert (adoption.made, adoption.left) == ((), ())
        assert list(model.state_dict()) == names
        assert [type(m) for m in model.modules()] == types


def test_adopting_finds_what_is_new_beside_what_lasts() -> None:
    model = nn.ModuleList([KINDS["same"].model(), Shared()])
    assert pairs(tied.tie(model)) == [("1.wte.weight", "1.lm_head.weight")]
    assert list(model.state_dict()) == ["0.wte.weight", "1.wte.weight"]


def test_a_tensor_in_a_list_can_not_be_made_to_last_and_is_named() -> None:
    model = nn.Linear(3, 3)
    model.listed = [model.weight.detach(), 1]
    with pytest.warns(tied.TiedWarning, match=r"listed\.0") as caught:
        adoption = tied.tie(model)
    assert len(caught) == 1
    assert adoption.made == ()
    (left,) = adoption.left
    assert "listed.0" in left
    assert "weight" in left
    assert left in str(adoption)


def test_the_adoption_prints_what_was_done() -> None:
    text = str(tied.tie(Aliased()))
    assert "decoder.weight = encoder.weight.T" in text


def test_what_is_frozen_here_and_trainable_there_is_refused_unless_told_which_wins() -> None:
    for wins, trainable in (("source", True), ("target", False)):
        model = Aliased()
        model.decoder.weight.requires_grad_(False)
        with pytest.raises(tied.TieError) as caught:
            tied.tie(model)
        assert caught.value.paths == ("encoder.weight", "decoder.weight")
        assert isinstance(model.decoder.weight, nn.Parameter)
        tied.tie(model, on_conflict=wins)
        assert model.encoder.weight.requires_grad is trainable
        assert model.decoder.weight.requires_grad is trainable


# ---------------------------------------------------------------------- modules registered twice


def test_one_module_at_two_places_stays_one_module() -> None:
    inner = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": inner, "b": nn.Sequential(inner, nn.Linear(3, 3))})
    tied.tie(model)
    assert model["a"] is model["b"][0]
    assert list(model.state_dict()) == ["a.weight", "a.bias", "b.1.weight", "b.1.bias"]
    twin = copy.deepcopy(model).double()
    assert twin["a"] is twin["b"][0]


@pytest.mark.parametrize("target", ["a.weight", "b.weight"])
def test_a_tie_to_a_module_that_is_registered_twice_holds_under_both_names(target: str) -> None:
    inner = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": inner, "b": inner, "c": nn.Linear(3, 3)})
    tied.tie(model, target, "c.weight", tied.transpose)
    assert torch.equal(model["a"].weight, model["c"].weight.T)
    assert model["a"] is model["b"]
    assert list(model.state_dict()) == ["a.bias", "c.weight", "c.bias"]


@pytest.mark.parametrize("source", ["a.weight", "b.weight"])
def test_a_tie_from_a_module_that_is_registered_twice(source: str) -> None:
    inner = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": inner, "b": inner, "c": nn.Linear(3, 3)})
    tied.tie(model, "c.weight", source, tied.transpose)
    assert list(model.state_dict()) == ["a.weight", "a.bias", "c.bias"]
    twin = copy.deepcopy(model)
    twin["c"].weight = torch.ones(3, 3)
    assert (twin["b"].weight == 1).all()
    assert not (model["a"].weight == 1).any()


# ----------------------------------------------------------------------- lists and dicts---------


def test_entries_of_a_parameter_list() -> None:
    model = nn.ParameterList([torch.randn(3, 2), torch.randn(2, 3), torch.randn(1)])
    tied.tie(model, "1", "0", tied.transpose)
    assert len(model) == 3
    assert torch.equal(model[1], model[0].T)
    assert [n for n, _ in model.named_parameters()] == ["0", "2"]
    assert [tuple(p.shape) for p in model] == [(3, 2), (2, 3), (1,)]
    model[1] = torch.ones(2, 3)
    assert (model[0] == 1).all()
    model.append(torch.zeros(2))
    assert [tuple(p.shape) for p in model[1:]] == [(2, 3), (1,), (2,)]
    assert torch.equal(model[:2][1], model[0].T)


def test_entries_of_a_parameter_dict() -> None:
    model = nn.ParameterDict({"w": torch.randn(3, 2), "z_row": torch.randn(2)})
    tied.tie(model, "z_row", "w", lambda w: w[2])
    assert list(model) == ["w", "z_row"]
    assert torch.equal(model["z_row"], model["w"][2])
    assert [n for n, _ in model.named_parameters()] == ["w"]
    model["z_row"] = torch.zeros(2)
    assert not model["w"][2].any()
    assert [n for n, _ in model.items()] == ["w", "z_row"]
    assert torch.equal(model.copy()["z_row"], model["w"][2])
    with pytest.raises(tied.TieError) as caught:
        model.pop("z_row")
    assert caught.value.paths == ("w", "z_row")


# ------------------------------------------------------------------------------------------ buffers


def test_a_buffer_reads_a_parameter_without_its_gradient() -> None:
    model = Buffers()
    tied.tie(model, "kept", "w")
    assert not model.kept.requires_grad
    assert tied.shares(model.kept, model.w)
    assert list(model.state_dict()) == ["w"]
    ((model.kept * 2).sum() + model.w.sum()).backward()
    assert torch.equal(model.w.grad, torch.ones(4, 3))
    model.kept = torch.zeros(4, 3)
    assert not model.w.any()


def test_a_buffer_reads_another() -> None:
    model = Buffers()
    tied.tie(model, "passing", "kept", lambda b: b[:4])
    assert list(dict(model.named_buffers())) == ["kept"]
    assert list(model.state_dict()) == ["w", "kept"]
    model.double()
    assert model.passing.dtype == torch.float64
    model.kept += 1
    assert torch.equal(model.passing, model.kept)


def test_a_saved_buffer_that_reads_one_that_is_not_saved_is_not_lost() -> None:
    """The source had no place in a checkpoint, the target had one: now the source has it."""
    model = Buffers()
    tied.tie(model, "kept", "passing")
    assert list(model.state_dict()) == ["w", "passing"]
    state = {"w": torch.zeros(4, 3), "passing": torch.ones(4, 3)}
    model.load_state_dict(state)
    assert (model.kept == 1).all()
    model.load_state_dict({"w": torch.zeros(4, 3), "kept": torch.full((4, 3), 2.0)})
    assert (model.passing == 2).all()


def test_a_buffer_that_views_a_parameter_is_adopted() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("row", model.weight.detach()[1])
    assert pairs(tied.tie(model)) == [("weight", "row")]
    model.double()
    with torch.no_grad():
        model.weight.fill_(3)
    assert (model.row == 3).all()


# -------------------------------------------------------------------------------------------- untie


@pytest.mark.parametrize("name", KINDS)
def test_untie_gives_back_an_ordinary_parameter(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    before = {n: get(model, n).detach().clone() for n in kind.targets}
    for target in reversed(kind.targets):
        tied.untie(model, target)
        assert isinstance(get(model, target), nn.Parameter)
        assert get(model, target).requires_grad
    assert tied.ties(model).groups == ()
    assert {type(m) for m in model.modules()} == {type(m) for m in kind.plain().modules()}
    assert set(model.state_dict()) == set(kind.plain().state_dict())
    for n in kind.targets:
        assert torch.equal(get(model, n), before[n])
        put(model, n, nn.Parameter(get(model, n).detach() + 1))
        assert torch.equal(get(model, n), before[n] + 1)


def test_after_untie_the_two_train_apart() -> None:
    model = KINDS["transpose"].model()
    tied.untie(model, "decoder.weight")
    (model.decoder.weight.sum() + model.encoder.weight.sum()).backward()
    assert (model.encoder.weight.grad == 1).all()
    with torch.no_grad():
        model.decoder.weight.fill_(2)
    assert not (model.encoder.weight == 2).any()


def test_an_untied_buffer_is_a_buffer_again() -> None:
    for name in ("kept", "passing"):
        model = Buffers()
        tied.tie(model, name, "w")
        tied.untie(model, name)
        assert sorted(dict(model.named_buffers())) == ["kept", "passing"]
        assert list(model.state_dict()) == ["w", "kept"]
        assert not tied.shares(model.w, get(model, name))


def test_what_was_untied_can_be_tied_again() -> None:
    model = Autoencoder()
    for _ in range(3):
        tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
        assert tied.shares(model.decoder.weight, model.encoder.weight)
        tied.untie(model, "decoder.weight")
        assert not tied.shares(model.decoder.weight, model.encoder.weight)
    tied.tie(model, "encoder.weight", "decoder.weight", tied.transpose)
    assert list(model.state_dict()) == ["encoder.bias", "decoder.weight", "decoder.bias"]


def test_untying_one_target_leaves_the_others_of_its_module() -> None:
    model = KINDS["slices"].model()
    tied.untie(model, "k.weight")
    assert "k.bias" not in model.state_dict()
    assert "k.weight" in model.state_dict()
    model.c_attn = nn.Linear(4, 12)
    assert torch.equal(model.k.bias, model.c_attn.bias[4:8])
    assert torch.equal(model.v.weight, model.c_attn.weight[8:])


def test_untying_the_middle_of_a_chain_keeps_the_last_tied_to_it() -> None:
    model = KINDS["chain"].model()
    tied.untie(model, "target")
    assert [n for n, _ in model.named_parameters()] == ["source", "target"]
    put(model, "target", nn.Parameter(torch.ones(3, 4)))
    assert (model.last == 1).all()
    assert not (model.source == 1).any()


def test_a_tie_made_below_is_known_to_the_model_above() -> None:
    inner = KINDS["same"].model()
    model = nn.ModuleDict({"inner": inner, "other": LanguageModel()})
    tied.untie(model, "inner.lm_head.weight")
    assert isinstance(inner.lm_head.weight, nn.Parameter)
    assert inner.lm_head.weight is not inner.wte.weight


def test_a_pair_can_be_tied_in_a_module_that_is_not_the_root() -> None:
    model = nn.Sequential(Pair((3, 2), (2, 3)))
    tied.tie(model, "0.target", "0.source", tied.transpose)
    assert torch.equal(model[0].target, model[0].source.T)
    assert list(model.state_dict()) == ["0.source"]
