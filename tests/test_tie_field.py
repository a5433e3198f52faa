"""The field's reports on PyTorch, A to D: what PyTorch's own operations do after tie.

`T7` and the like are the numbers of the project's list of field reports; where the sentence names
a repository, the report is public there. test_field_torch*.py has the functional half.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tied
from test_field_torch import Aliased
from test_field_torch import Autoencoder as TiedAutoencoder
from test_field_torch import LanguageModel as TiedLanguageModel
from test_field_torch_ties import Attention
from tying import KINDS, PURE, get, put

# ------------------------------------------------------- A. moves, casts, meta, materialisation

MOVES: dict[str, Callable[[Any], Any]] = {
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "type": lambda m: m.type(torch.float64),
    "to_dtype": lambda m: m.to(torch.float16),
    "to_device": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "to_memory_format": lambda m: m.to(memory_format=torch.contiguous_format),
    "share_memory": lambda m: m.share_memory(),
    "to_meta": lambda m: m.to("meta"),
    "meta_and_empty": lambda m: m.to("meta").to_empty(device="cpu"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "apply": lambda m: m._apply(lambda t: t.clone()),
}


@pytest.fixture(params=[False, True], ids=["in_place", "swap"])
def swap(request: pytest.FixtureRequest) -> Any:
    """PyTorch has two ways to convert a module; both are in use."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", KINDS)
def test_T1_T3_T4_T5_T8_T18_PyTorchs_own_moves_keep_the_tie(
    name: str, move: str, swap: bool
) -> None:
    """torch/nn#187, pytorch/xla#1247, #2719, #7042, accelerate#138, InfiniTrain#236."""
    kind = KINDS[name]
    model = kind.model()
    report = tied.ties(model)
    after = MOVES[move](model)
    assert after is model
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == kind.names()
    assert tied.ties(model).groups == report.groups
    assert len({p.dtype for p in model.parameters()}) == 1
    for target in kind.targets:
        found, source = get(model, target), next(model.parameters())
        assert (found.dtype, found.device) == (source.dtype, source.device)
    if next(model.parameters()).is_meta:
        return
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    assert kind.holds(model)
    for target in kind.targets if kind.pure else ():
        put(model, target, torch.full_like(get(model, target), 42.0))
        assert kind.holds(model)


def test_T3_the_same_moves_untie_a_view_that_was_not_made_to_last() -> None:
    """So that the test above can fail."""
    model = TiedAutoencoder().double()
    assert tied.ties(model).groups == ()


def test_T7_there_is_nothing_to_tie_again_after_a_move() -> None:
    """Lightning#8555, #9525, #5441: shared names are looked for before a move, and set after it."""
    for name, kind in KINDS.items():
        model = kind.model()
        names: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for n, p in module._parameters.items():
                names.setdefault(id(p), []).append(f"{path}.{n}")
        assert all(len(found) == 1 for found in names.values()), name


def test_T9_values_that_disagree_are_not_loaded_into_one_weight() -> None:
    """pytorch#62264: Embedding(_weight=linear.weight); which value won depended on the move."""
    linear = nn.Linear(4, 7, bias=False)
    model = nn.ModuleDict({"head": linear, "embed": nn.Embedding(7, 4, _weight=linear.weight)})
    assert len(tied.tie(model).made) == 1
    model.double()
    zeros, ones = (f(7, 4, dtype=torch.float64) for f in (torch.zeros, torch.ones))
    before = model["head"].weight.detach().clone()
    with pytest.raises(tied.TieError) as caught:
        model.load_state_dict({"head.weight": zeros, "embed.weight": ones})
    assert caught.value.paths == ("head.weight", "embed.weight")
    assert torch.equal(model["embed"].weight, before)
    model.load_state_dict({"head.weight": ones, "embed.weight": ones.clone()})
    assert (model["embed"].weight == 1).all()


def test_T10_T11_tensors_in_dicts_and_lists_are_named_as_left() -> None:
    """pytorch#43815, #80490, #29807: PyTorch leaves them behind in a move; tie says so."""
    model = Aliased()
    with pytest.warns(tied.TiedWarning) as caught:
        adoption = tied.tie(model)
    assert len(caught) == 1
    text = "\n".join(adoption.left)
    assert adoption.made == ()
    assert all(name in text for name in ("data.a", "data.row", "listed.0"))
    assert "listed.1" not in text
    assert all(name in str(caught[0].message) for name in ("data.a", "data.row", "listed.0"))


def test_T10_a_tensor_that_is_registered_twice_follows_the_move() -> None:
    model = nn.Module()
    data = torch.arange(6.0)
    model.register_buffer("one", data)
    model.register_buffer("other", data)
    model.register_buffer("part", data[2:4])
    made = tied.tie(model).made
    assert [(m.first, m.second) for m in made] == [("one", "other"), ("one", "part")]
    model.double()
    model.one[2] = 42
    assert (model.other[2], model.part[0]) == (42, 42)
    assert model.part.dtype == torch.float64


@pytest.mark.parametrize("name", KINDS)
def test_T13_T17_a_model_tied_on_meta_is_materialised_tied(name: str) -> None:
    """Modalities#357, hyper-parallel#606."""
    kind = KINDS[name]
    with torch.device("meta"):
        model = kind.model()
    assert all(p.is_meta for p in model.parameters())
    assert all(get(model, t).is_meta for t in kind.targets)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    assert kind.holds(model)
    assert len(list(model.parameters())) == len(kind.names())


@pytest.mark.parametrize("name", KINDS)
def test_T15_materialising_each_module_by_itself_keeps_the_tie(name: str) -> None:
    """accelerate#3154: FSDP's param_init_fn is to_empty(recurse=False), module by module."""
    kind = KINDS[name]
    with torch.device("meta"):
        model = kind.model()
    for module in reversed(list(model.modules())):
        module.to_empty(device="cpu", recurse=False)
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)
    assert not any(t.is_meta for t in model.parameters())
    assert kind.holds(model)


@pytest.mark.parametrize("name", ["same", "transpose"])
def test_T16_after_to_empty_the_embedding_gets_both_sides_of_its_gradient(name: str) -> None:
    """verl#7834: the output side was missing."""
    kind = KINDS[name]
    model, twin = kind.model(), kind.model(1)
    model.to_empty(device="cpu")
    model.load_state_dict(twin.state_dict())
    for m in (model, twin):
        m(kind.inputs).square().sum().backward()
    source = kind.ties[0][1]
    assert torch.equal(get(model, source).grad, get(twin, source).grad)
    target = get(twin, kind.targets[0])
    part = torch.autograd.grad((target * torch.ones_like(target)).sum(), get(twin, source))[0]
    assert part.abs().sum() > 0


def test_T17_a_parameter_that_was_replaced_is_not_read_any_more() -> None:
    """hyper-parallel#382, #497: the synchronisation read the Parameter of before to_empty."""
    model = KINDS["same"].model()
    old = model.wte.weight
    model.wte.to("meta").to_empty(device="cpu")
    assert model.lm_head.weight is model.wte.weight
    model.wte.weight = nn.Parameter(torch.ones(7, 4))
    assert model.lm_head.weight is model.wte.weight
    assert not tied.shares(model.lm_head.weight, old)


def test_T18_a_cast_that_changes_nothing_gives_the_same_parameter() -> None:
    for kind in KINDS.values():
        model = kind.model()
        before = list(model.parameters())
        model.float()
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_T20_meta_pointers_of_zero_are_no_tie_and_hide_none() -> None:
    """unsloth#7215: all meta tensors have one pointer; without them real ties are missed."""
    with torch.device("meta"):
        model = nn.ModuleList([TiedAutoencoder(), TiedLanguageModel(), nn.Linear(3, 3)])
    made = [(m.first, m.second) for m in tied.tie(model).made]
    assert made == [
        ("0.encoder.weight", "0.decoder.weight"), ("1.wte.weight", "1.lm_head.weight"),
    ]  # fmt: skip
    model.to_empty(device="cpu")
    assert tied.ties(model).groups == tuple(made)


# ------------------------------------------------------------------ B. deepcopy, pickle, clone


@pytest.mark.parametrize("name", ["transpose", "row_slice", "column_slice", "reshape", "diagonal"])
def test_T21_deepcopy_keeps_two_parameters_over_one_tensor(name: str) -> None:
    """pytorch#79788: Parameter.__deepcopy__ loses views, unless tie has made them last."""
    from test_field_torch import VIEWS

    w = torch.arange(12.0).reshape(4, 3)
    model = nn.ParameterDict({"a": nn.Parameter(w), "b": nn.Parameter(VIEWS[name](w))})
    assert tied.ties(copy.deepcopy(model)).groups == ()
    tied.tie(model)
    after = copy.deepcopy(model)
    assert tied.ties(after).groups == (("a", "b"),)
    with torch.no_grad():
        after["a"].add_(100)
    assert torch.equal(after["b"], VIEWS[name](w) + 100)


def test_T23_a_tie_beside_another_parametrization() -> None:
    """pytorch#80811: deepcopy of parametrized modules."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(model[0])
    tied.tie(model, "1.weight", "0.parametrizations.weight.original", tied.transpose)
    for after in (model, copy.deepcopy(model), copy.deepcopy(model).double()):
        assert torch.equal(after[1].weight, after[0].parametrizations.weight.original.T)
        assert "1.weight" not in after.state_dict()


def test_T23_a_source_that_is_parametrized_later_is_followed() -> None:
    model = KINDS["transpose"].model()
    nn.utils.parametrizations.orthogonal(model.encoder)
    assert torch.equal(model.decoder.weight, model.encoder.weight.T)
    after = copy.deepcopy(model)
    assert torch.equal(after.decoder.weight, after.encoder.weight.T)
    assert not tied.shares(after, model)
    after(torch.ones(2, 4)).sum().backward()
    assert after.encoder.parametrizations.weight.original.grad is not None


def test_T24_T28_a_file_has_the_storage_of_slices_once() -> None:
    """pytorch#46 and #1995 with eight more: slices are saved apart, or the whole buffer is."""
    model = Attention()
    model.c_attn = nn.Linear(64, 192)
    for i, name in enumerate("qkv"):
        part = nn.Linear(64, 64)
        part.weight = nn.Parameter(model.c_attn.weight.detach()[64 * i :][:64])
        part.bias = nn.Parameter(model.c_attn.bias.detach()[64 * i :][:64])
        setattr(model, name, part)
    assert len(tied.tie(model).made) == 6
    for saved in (model, model.state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        assert 4 * (64 * 192 + 192) < file.tell() < 4 * (64 * 192 + 192) + 12_000


def test_T29_what_is_untied_does_not_hold_the_large_storage() -> None:
    """pytorch#116553: a slice kept the whole unsharded tensor alive."""
    model = nn.ParameterDict({"all": torch.zeros(1000, 8), "some": torch.zeros(10, 8)})
    tied.tie(model, "some", "all", lambda w: w[:10])
    tied.untie(model, "some")
    assert model["some"].untyped_storage().nbytes() == 320


# --------------------------------------------------------------------------- D. load_state_dict


@pytest.mark.parametrize("name", PURE)
def test_T32_T33_after_assign_an_optimizer_steps_once(name: str) -> None:
    """pytorch#188346, TransformerLens#1725: assign=True unties, or leaves one of two keys stale."""
    kind = KINDS[name]
    model = kind.model()
    full = {**kind.model(1).state_dict(), **kind.expected(kind.model(1))}
    model.load_state_dict({n: t.clone() for n, t in full.items()}, assign=True)
    assert kind.holds(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.Adam(model.parameters(), lr=0.1).step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[n] - 0.1)
    assert kind.holds(model)


def test_T34_an_assigned_part_is_written_to_the_combined_weight() -> None:
    """TransformerLens#1637: assign broke the views; the combined weight was exported stale."""
    model = KINDS["slices"].model()
    state = {f"{n}.{k}": torch.randn(4, 4) if k == "weight" else torch.randn(4)
             for n in "qkv" for k in ("weight", "bias")}  # fmt: skip
    model.load_state_dict(state, assign=True)
    exported = model.state_dict()
    assert torch.equal(exported["c_attn.weight"], torch.cat([state[f"{n}.weight"] for n in "qkv"]))
    assert torch.equal(exported["c_attn.bias"], torch.cat([state[f"{n}.bias"] for n in "qkv"]))


@pytest.mark.parametrize("name", KINDS)
def test_T37_what_state_dict_gives_load_state_dict_takes(name: str) -> None:
    """alf#554: the two have to be a matched pair."""
    kind = KINDS[name]
    one, other = kind.model(), kind.model(1)
    result = other.load_state_dict(one.state_dict(), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(one(kind.inputs), other(kind.inputs))
    outer = nn.Sequential(nn.Identity(), kind.model(2))
    outer.load_state_dict({f"1.{n}": t for n, t in one.state_dict().items()})
    assert torch.equal(one(kind.inputs), outer(kind.inputs))


def test_T38_a_state_dict_that_is_cut_and_joined_again_loads() -> None:
    """tensor_parallel#73: processing of the state dict, name by name, broke ties."""
    for kind in KINDS.values():
        full = {**kind.model(1).state_dict(), **kind.expected(kind.model(1))}
        halves = {n: (t[: len(t) // 2], t[len(t) // 2 :]) for n, t in full.items()}
        model = kind.model()
        model.load_state_dict({n: torch.cat(parts) for n, parts in halves.items()})
        assert kind.holds(model)


@pytest.mark.parametrize("name", ["same", "transpose", "slices"])
def test_T39_a_safetensors_file_with_both_names_gives_one_weight(name: str, tmp_path: Path) -> None:
    """torchax#68: loading safetensors gave two weights for a tied model."""
    kind = KINDS[name]
    full = {**kind.model(1).state_dict(), **kind.expected(kind.model(1))}
    save_file({n: t.contiguous().clone() for n, t in full.items()}, tmp_path / "m.safetensors")
    model = kind.model()
    model.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert len(list(model.parameters())) == len(kind.names())
    assert kind.holds(model)
    save_file(model.state_dict(), tmp_path / "tied.safetensors")
    assert list(load_file(tmp_path / "tied.safetensors")) == sorted(kind.names())
