"""PyTorch's neighbours: which tensors share an element, counting, and what people can't tell.

The numbers are those of the project's list of field reports, as in test_field_torch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tied
from test_field_torch import MODELS, MOVES, VIEWS, Autoencoder, LanguageModel, build

# ---------------------------------------------------------- views of one weight; detecting overlap


class Attention(nn.Module):
    """GPT-2's combined projection, with q, k and v as Parameters that view it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(4, 12)
        for name, weight, bias in zip(
            "qkv", self.c_attn.weight.detach().split(4), self.c_attn.bias.detach().split(4),
            strict=True,
        ):  # fmt: skip
            part = nn.Linear(4, 4)
            part.weight, part.bias = nn.Parameter(weight), nn.Parameter(bias)
            setattr(self, name, part)


PARTS = tuple(("c_attn." + kind, *(f"{n}.{kind}" for n in "qkv")) for kind in ("weight", "bias"))


@pytest.mark.parametrize("operation", [tied.copy, tied.f64, tied.bf16, MOVES["meta_and_empty"]])
def test_T34_q_k_and_v_stay_views_of_the_combined_weight(operation: Any) -> None:
    """TransformerLens#1637: the views broke and the combined weight went stale."""
    model = operation(Attention())
    assert tied.ties(model).groups == PARTS
    with torch.no_grad():
        model.k.weight.fill_(7)
    assert (model.c_attn.weight[4:8] == 7).all()
    assert list(tied.split(model)[1]) == ["c_attn.weight", "c_attn.bias"]


def test_T34_the_report_says_which_rows_each_part_reads() -> None:
    storage = tied.ties(Attention()).storages[0]
    assert [leaf.how for leaf in storage.leaves] == [
        "", "c_attn.weight[:4]", "c_attn.weight[4:8]", "c_attn.weight[8:]",
    ]  # fmt: skip


def test_T34_parts_without_the_whole_are_no_tie() -> None:
    model = Attention()
    del model.c_attn
    assert tied.ties(model).groups == ()


def test_T41_empty_tensors_share_nothing() -> None:
    """safetensors#280: two empty tensors have the pointer 0."""
    model = {
        "a": torch.empty(0),
        "b": torch.empty(0),
        "c": torch.empty(0, 3),
        "d": torch.ones(2)[:0],
    }
    assert tied.ties(model).groups == ()
    assert tied.ties(tied.f64(model)).groups == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_T42_nested_intervals_are_all_found(order: tuple[int, ...]) -> None:
    """safetensors#309, #379, #264: only neighbours are compared, so A ⊃ B, A ⊃ C loses C."""
    buffer = torch.arange(100.0)
    pieces = [buffer, buffer[10:20], buffer[30:40]]
    model = {"abc"[i]: pieces[i] for i in order}
    assert tied.ties(model).groups == (tuple("abc"[i] for i in order),)
    assert tied.ties(tied.copy(model)).groups == tied.ties(model).groups


def test_T42_disjoint_views_of_one_storage_are_no_tie() -> None:
    buffer = torch.arange(100.0)
    model = {"a": buffer[:10], "b": buffer[10:20], "c": buffer[50:60]}
    assert tied.ties(model).groups == ()
    columns = torch.zeros(4, 4)
    assert tied.ties({"even": columns[:, ::2], "odd": columns[:, 1::2]}).groups == ()


def test_T43_disjoint_slices_are_each_stored_whole() -> None:
    """safetensors `_is_complete`: a single slice of a buffer was refused as incomplete."""
    buffer = torch.arange(8.0)
    skeleton, storages = tied.split({"a": buffer[:3], "b": buffer[5:]})
    assert {name: x.tolist() for name, x in storages.items()} == {"a": [0, 1, 2], "b": [5, 6, 7]}
    assert skeleton.merge(storages)["b"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("view", ["transpose", "column_slice", "diagonal"])
def test_T44_a_non_contiguous_tensor_needs_no_contiguous(view: str) -> None:
    """safetensors#17 and many: `.contiguous()` is exactly what unties a transpose."""
    w = torch.arange(12.0).reshape(4, 3)
    model = {"w": w, "v": VIEWS[view](w)}
    storages = tied.split(model)[1]
    assert list(storages) == ["w"]
    assert storages["w"].is_contiguous()
    assert tied.compare(model, {"w": w, "v": VIEWS[view](w).contiguous()}).paths == ("w", "v")


def test_T49_meta_tensors_and_wrapper_subclasses_are_told_apart() -> None:
    """huggingface_hub#2591, #2440: ids of meta tensors collide; wrappers have no storage."""
    from torch.testing._internal.two_tensor import TwoTensor

    metas = {f"p{i}": nn.Parameter(torch.empty(2, 2, device="meta")) for i in range(50)}
    assert tied.ties(metas).groups == ()
    assert len(tied.split(metas)[1]) == 50
    a, b = torch.ones(2, 2), torch.zeros(2, 2)
    model = {"wrapped": TwoTensor(a, b), "other": TwoTensor(b.t(), a.clone().t()), "a": a}
    assert tied.ties(model).groups == (("wrapped.a", "a"), ("wrapped.b", "other.a"))
    after = tied.f64(model)
    assert tied.ties(after).groups == tied.ties(model).groups
    assert type(after["wrapped"]) is TwoTensor


def test_T82_equal_ids_and_pointers_after_death_are_no_tie() -> None:
    """DeepSpeed#3033, pytorch#176257: a pointer of 0, and an id() that is used again."""
    reports = []
    for _ in range(20):
        model = {"a": torch.ones(3), "b": torch.ones(3)}
        reports.append(tied.ties(model))
        del model
    assert all(report.groups == () for report in reports)
    assert not tied.compare(reports[0], reports[-1])


# ------------------------------------------------------------------ G, H. counting and optimizers


def test_T65_a_bias_that_is_resized_on_one_side_is_named() -> None:
    """transformers#1730, #851, #17580, #8880: one side is resized, the other is not."""
    model = LanguageModel()
    before = tied.ties(model)
    model.wte = nn.Embedding(9, 4)
    found = tied.compare(before, model)
    assert [(c.first, c.second) for c in found.lost] == [("wte.weight", "lm_head.weight")]


def test_T67_freezing_one_name_freezes_the_other() -> None:
    """transformers#11903, #31467, #14035: one Parameter, two names, one requires_grad."""
    model = LanguageModel()
    model.lm_head.weight.requires_grad_(False)
    after = tied.f64(model)
    assert after.lm_head.weight is after.wte.weight
    assert not after.wte.weight.requires_grad
    report = tied.ties(after)
    assert [leaf.path for leaf in report.storages[0].leaves] == ["wte.weight", "lm_head.weight"]


def test_T67_two_parameters_over_one_storage_may_be_frozen_apart_and_split_says_so() -> None:
    model = Autoencoder()
    model.decoder.weight.requires_grad_(False)
    after = tied.bf16(model)
    assert after.encoder.weight.requires_grad
    assert not after.decoder.weight.requires_grad
    with pytest.raises(tied.TieError) as caught:
        tied.split(model, lambda path, array: array.requires_grad)
    assert caught.value.paths == ("encoder.weight", "decoder.weight")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("maker", [torch.optim.SGD, torch.optim.Adam])
def test_T68_T69_T70_each_storage_is_updated_once(maker: Any, name: str) -> None:
    """pytorch#40967, #48518, entrenar#314: twice in a group is updated twice."""
    model, x = build(name), MODELS[name][2]
    skeleton, storages = tied.split(model)
    optimizer = maker(list(storages.values()), lr=0.1)
    skeleton.merge(storages)(x).sum().backward()
    before = {key: p.detach().clone() for key, p in storages.items()}
    optimizer.step()
    group = MODELS[name][1][0]
    moved = (storages[group[0]] - before[group[0]]).abs()
    grad = storages[group[0]].grad
    wanted = 0.1 * grad.abs() if maker is torch.optim.SGD else 0.1 * (grad != 0)
    torch.testing.assert_close(moved, wanted, atol=1e-6, rtol=1e-5)
    after = skeleton.merge(storages)
    assert tied.ties(after).groups == MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_T74_shared_weights_are_counted_once(name: str) -> None:
    """torchinfo#322, #377, pytorch-summary#37, torchtitan#3225, nanoGPT#209."""
    report = tied.ties(build(name))
    shared, rest = {"transpose": (12, 7), "same_parameter": (28, 0)}[name]
    assert (report.parameters, report.naive_parameters) == (shared + rest, 2 * shared + rest)
    assert (report.nbytes, report.naive_nbytes) == (4 * (shared + rest), 4 * (2 * shared + rest))


def test_T88_T92_an_inverted_tie_is_a_tie() -> None:
    """llama.cpp CodeShell, sglang#2935: the head comes first, the embedding is its alias."""
    model = nn.Module()
    model.head = nn.Linear(4, 7, bias=False)
    model.embed = nn.Embedding(7, 4)
    model.embed.weight = model.head.weight
    assert list(tied.split(tied.f64(model))[1]) == ["head.weight"]


# ------------------------------------------------------------------------ L. what people can't tell

ATTEMPTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "Parameter(w.t())": (lambda w: nn.Parameter(w.t()), True),
    "Parameter(w.detach().t())": (lambda w: nn.Parameter(w.detach().t()), True),
    "Parameter(w.data.T)": (lambda w: nn.Parameter(w.data.T), True),
    "Parameter(w.t().contiguous())": (lambda w: nn.Parameter(w.t().contiguous()), False),
    "Parameter(w.t().clone())": (lambda w: nn.Parameter(w.t().clone()), False),
    "Parameter(tensor(w.t()))": (lambda w: nn.Parameter(w.detach().t().clone()), False),
    "Parameter(w.t().double())": (lambda w: nn.Parameter(w.t().double()), False),
    "Parameter(w.t().float())": (lambda w: nn.Parameter(w.t().float()), True),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_T97_ties_says_whether_the_attempt_tied_the_weights(attempt: str) -> None:
    """discuss.pytorch.org/t/2585 and its mirrors: nobody can tell whether this is tied."""
    make, is_tied = ATTEMPTS[attempt]
    model = nn.Module()
    model.enc, model.dec = nn.Linear(4, 3), nn.Linear(3, 4)
    model.dec.weight = make(model.enc.weight)
    report = tied.ties(model)
    assert report.groups == ((("enc.weight", "dec.weight"),) if is_tied else ())
    assert ("  dec.weight = enc.weight.T" in str(report).splitlines()) is is_tied


def test_T97_names_that_are_prefixes_of_others_are_told_apart() -> None:
    """accelerate#2324: `layer.1` and `layer.10`."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(12)))
    model[10].weight = model[1].weight
    assert tied.ties(model).groups == (("1.weight", "10.weight"),)
