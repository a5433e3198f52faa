"""What tie promises of itself: one Parameter remains, the target reads it, and writes reach it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tied
from tying import KINDS, PURE, Autoencoder, LanguageModel, Pair, bent, get, low_rank, put, unbent

SOURCE = (6, 4)
VIEWS: dict[str, Callable[[Any], Any]] = {
    "tied.transpose": tied.transpose,
    "torch.t": torch.t,
    "T": lambda w: w.T,
    "rows": lambda w: w[1:3],
    "one_row": lambda w: w[-1],
    "columns": lambda w: w[:, ::2],
    "element": lambda w: w[2, 3],
    "new_axis": lambda w: w[..., None, 1:],
    "reshape": lambda w: w.reshape(2, 12),
    "view": lambda w: w.view(-1),
    "unflatten": lambda w: w.unflatten(0, (2, 3)),
    "permute": lambda w: w.view(2, 3, 4).permute(2, 0, 1),
    "tied.permute": lambda w: tied.permute(w.view(2, 3, 4), (2, 0, 1)),
    "movedim_of_part": lambda w: w[2:].view(2, 2, 4).movedim(0, 2),
    "diagonal": torch.diagonal,
    "tied.diagonal": tied.diagonal,
    "narrow": lambda w: w.narrow(0, 1, 4),
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split([1, 2, 3])[2],
    "unbind": lambda w: w.unbind(1)[3],
    "as_strided": lambda w: torch.as_strided(w, (3, 2), (4, 1), 5),
    "squeeze": lambda w: w[:1].squeeze(0),
}
REPEATING: dict[str, Callable[[Any], Any]] = {
    "expand": lambda w: w.expand(2, 6, 4),
    "unfold": lambda w: w.unfold(0, 4, 1),
}
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "triu": torch.triu,
    "tril_of_square": lambda w: torch.tril(w[:4]),
    "diag": lambda w: torch.diag(w[0]),
    "negative": torch.neg,
    "flip": lambda w: w.flip(0),
    "rows_by_index": lambda w: w[[0, 2, 2]],
    "masked": lambda w: w * (torch.arange(4) > 1),
    "product": lambda w: w.T @ w,
    "reshape_of_transpose": lambda w: w.T.reshape(3, 8),
}
ALL = {**VIEWS, **REPEATING, **COMPUTED}


def pair(view: Callable[[Any], Any]) -> Any:
    """A Pair whose target has the shape that the view of its source has."""
    torch.manual_seed(0)
    return Pair(SOURCE, view(torch.zeros(SOURCE)).shape)


# ------------------------------------------------------------------- one Parameter, read on access


@pytest.mark.parametrize("name", ALL)
def test_one_parameter_remains_and_the_target_reads_it(name: str) -> None:
    model = pair(ALL[name])
    source = model.source
    adoption = tied.tie(model, "target", "source", ALL[name])
    assert model.source is source
    assert [n for n, _ in model.named_parameters()] == ["source"]
    assert list(model.state_dict()) == ["source"]
    assert torch.equal(model.target, ALL[name](source.detach()))
    assert model.target.requires_grad
    assert [(m.first, m.second) for m in adoption.made] == [("source", "target")]
    assert adoption.left == ()


@pytest.mark.parametrize("name", ALL)
def test_a_change_of_the_source_is_seen_through_the_target(name: str) -> None:
    model = pair(ALL[name])
    tied.tie(model, "target", "source", ALL[name])
    with torch.no_grad():
        model.source.mul_(-3).add_(1)
    assert torch.equal(model.target, ALL[name](model.source.detach()))


@pytest.mark.parametrize("name", {**VIEWS, **REPEATING})
def test_the_target_of_a_view_is_the_sources_own_memory(name: str) -> None:
    model = pair(ALL[name])
    tied.tie(model, "target", "source", ALL[name])
    assert tied.shares(model.target, model.source)
    assert model.target.stride() == ALL[name](model.source).stride()


def test_without_a_view_the_target_is_the_very_parameter() -> None:
    model = LanguageModel()
    weight = model.wte.weight
    adoption = tied.tie(model, "lm_head.weight", "wte.weight")
    assert model.lm_head.weight is model.wte.weight is weight
    assert isinstance(model.lm_head.weight, nn.Parameter)
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == ["wte.weight"]
    assert [(m.first, m.second) for m in adoption.made] == [("wte.weight", "lm_head.weight")]


# ----------------------------------------------------------------------------- writing to a target


@pytest.mark.parametrize("wrap", [lambda x: x, nn.Parameter, lambda x: x.clone().requires_grad_()])
@pytest.mark.parametrize("name", VIEWS)
def test_assigning_to_a_view_writes_to_its_elements_of_the_source(name: str, wrap: Any) -> None:
    model = pair(VIEWS[name])
    tied.tie(model, "target", "source", VIEWS[name])
    source, before = model.source, model.source.detach().clone()
    given = torch.randn(model.target.shape)
    model.target = wrap(given)
    assert model.source is source
    assert [n for n, _ in model.named_parameters()] == ["source"]
    assert torch.equal(model.target, given)
    VIEWS[name](before)[...] = given
    assert torch.equal(model.source, before)
    given.zero_()
    assert torch.equal(model.source, before)


def test_assigning_what_overlaps_the_source() -> None:
    """The value is that of before the assignment, as if the two sides had memory of their own."""
    model = Pair((3, 3), (3, 3))
    tied.tie(model, "target", "source", tied.transpose)
    before = model.source.detach().clone()
    model.target = model.source
    assert torch.equal(model.source, before.T)
    model = Pair(8, 5)
    tied.tie(model, "target", "source", lambda v: v[:5])
    before = model.source.detach().clone()
    model.target = nn.Parameter(model.source[3:])
    assert torch.equal(model.source, torch.cat([before[3:], before[5:]]))


def test_assigning_without_a_view_writes_to_the_source() -> None:
    model = LanguageModel()
    tied.tie(model, "lm_head.weight", "wte.weight")
    weight, given = model.wte.weight, torch.randn(7, 4)
    model.lm_head.weight = nn.Parameter(given)
    assert torch.equal(model.wte.weight, given)
    assert model.lm_head.weight is model.wte.weight is weight


@pytest.mark.parametrize("name", VIEWS)
def test_writing_in_place_to_a_view_writes_to_the_source(name: str) -> None:
    model = pair(VIEWS[name])
    tied.tie(model, "target", "source", VIEWS[name])
    wanted = model.source.detach().clone()
    VIEWS[name](wanted).fill_(0.5)
    nn.init.constant_(model.target, 0.5)
    assert torch.equal(model.source, wanted)
    with torch.no_grad():
        model.target.copy_(torch.full_like(model.target, 2.0))
    VIEWS[name](wanted).fill_(2.0)
    assert torch.equal(model.source, wanted)


@pytest.mark.parametrize("name", {**REPEATING, **COMPUTED})
def test_assigning_to_what_has_no_inverse_is_refused(name: str) -> None:
    model = pair(ALL[name])
    tied.tie(model, "target", "source", ALL[name])
    before = model.source.detach().clone()
    with pytest.raises(tied.TieError) as caught:
        model.target = torch.ones(model.target.shape)
    assert caught.value.paths == ("source", "target")
    assert torch.equal(model.source, before)
    assert torch.equal(model.target, ALL[name](before))


def test_with_an_inverse_a_computed_target_is_written_through() -> None:
    model = Pair((3, 2), (3, 2))
    tied.tie(model, "target", "source", bent, inverse=unbent)
    model.target = torch.full((3, 2), 0.25)
    torch.testing.assert_close(model.source.detach(), torch.full((3, 2), 0.25).atanh())
    torch.testing.assert_close(model.target.detach(), torch.full((3, 2), 0.25))


def test_an_inverse_of_several_sources_gives_a_value_for_each() -> None:
    model = Pair(3, 5, other=2)
    tied.tie(
        model, "target", ["source", "other"], lambda a, b: torch.cat([a, b]),
        inverse=lambda x: (x[:3], x[3:]),
    )  # fmt: skip
    model.target = torch.arange(5.0)
    assert model.source.tolist() == [0, 1, 2]
    assert model.other.tolist() == [3, 4]


def test_an_inverse_may_use_the_sources_present_value_through_the_view() -> None:
    """Which triangle is kept: the part that triu doesn't read is free, so an inverse has to say."""
    model = Pair((2, 2), (2, 2))
    tied.tie(model, "target", "source", torch.triu, inverse=torch.triu)
    model.target = torch.ones(2, 2)
    assert model.source.tolist() == [[1, 1], [0, 1]]


def test_a_target_read_through_a_chain_is_written_through_all_of_it() -> None:
    model = KINDS["chain"].model()
    model.last = torch.full((2, 4), 5.0)
    assert (model.target[1:] == 5).all()
    assert (model.source[:, 1:] == 5).all()
    assert not (model.source[:, 0] == 5).any()


# -------------------------------------------------------------------------------- several sources


def test_a_target_of_several_sources_is_computed_from_all_of_them() -> None:
    model = KINDS["several"].model()
    assert torch.equal(model.target, low_rank(model.source, model.b))
    assert [n for n, _ in model.named_parameters()] == ["source", "b"]
    (model.target * 2).sum().backward()
    assert torch.equal(model.source.grad, torch.full((4, 5), 2.0) @ model.b.detach().T)
    assert torch.equal(model.b.grad, model.source.detach().T @ torch.full((4, 5), 2.0))


# ------------------------------------------------------------------------------ gradients (law 7)


@pytest.mark.parametrize("name", {**VIEWS, **REPEATING})
def test_the_gradient_is_the_sum_over_the_uses(name: str) -> None:
    """Scatter-add by hand: each element of the target adds to the source's element it reads."""
    model = pair(ALL[name])
    tied.tie(model, "target", "source", ALL[name])
    here, there = torch.randn(SOURCE), torch.randn(model.target.shape)
    ((here * model.source).sum() + (there * model.target).sum()).backward()
    places = ALL[name](torch.arange(24).view(SOURCE)).reshape(-1)
    wanted = here.reshape(-1).index_add(0, places, there.reshape(-1)).view(SOURCE)
    torch.testing.assert_close(model.source.grad, wanted)


@pytest.mark.parametrize("name", COMPUTED)
def test_the_gradient_of_a_computed_target_is_pulled_back(name: str) -> None:
    model = pair(COMPUTED[name])
    tied.tie(model, "target", "source", COMPUTED[name])
    there = torch.randn(model.target.shape)
    (there * model.target).sum().backward()
    free = model.source.detach().clone().requires_grad_()
    (there * COMPUTED[name](free)).sum().backward()
    assert torch.equal(model.source.grad, free.grad)


@pytest.mark.parametrize("name", KINDS)
def test_a_training_step_is_that_of_the_summed_gradients(name: str) -> None:
    """An untied twin's separate gradients, summed by autograd through the views, give the same."""
    kind = KINDS[name]
    model, twin = kind.model(), kind.plain()
    leaves = {n: get(twin, n).detach().clone().requires_grad_() for n in kind.names()}
    values = dict(leaves)
    for target, source, view in kind.ties:
        sources = [values[n] for n in ([source] if isinstance(source, str) else source)]
        values[target] = sources[0] if view is None else view(*sources)
    torch.func.functional_call(twin, values, kind.inputs).square().sum().backward()
    model(kind.inputs).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, leaves[n].grad)
        torch.testing.assert_close(p.detach(), leaves[n].detach() - 0.01 * leaves[n].grad)
    assert kind.holds(model)


def test_what_is_frozen_gets_no_gradient_through_its_target() -> None:
    model = Autoencoder()
    for layer in (model.encoder, model.decoder):
        layer.weight.requires_grad_(False)
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    assert not model.decoder.weight.requires_grad
    model(torch.ones(2, 4)).sum().backward()
    assert model.encoder.weight.grad is None
    assert model.decoder.bias.grad is not None


def test_freezing_the_source_freezes_the_target_and_back() -> None:
    model = KINDS["transpose"].model()
    model.encoder.weight.requires_grad_(False)
    assert not model.decoder.weight.requires_grad
    model.requires_grad_(True)
    assert model.decoder.weight.requires_grad


# ------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", KINDS)
def test_the_names_that_are_left_are_those_of_the_sources(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    wanted = kind.names()
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == wanted
    assert list(model.state_dict()) == wanted
    assert kind.holds(model)
    for target in kind.targets:
        module, _, leaf = target.rpartition(".")
        owner = model.get_submodule(module)
        assert leaf not in owner._parameters
        assert isinstance(owner, type(kind.plain().get_submodule(module)))


@pytest.mark.parametrize("name", PURE)
def test_writing_through_any_target_reaches_every_reader(name: str) -> None:
    kind = KINDS[name]
    for target in kind.targets:
        model = kind.model()
        put(model, target, torch.full_like(get(model, target), 9.0))
        assert (get(model, target) == 9).all()
        assert kind.holds(model)


# ----------------------------------------------------------------------------------- nothing leaks


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_kept_alive(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    model(kind.inputs).sum().backward()
    ordinary = tuple({type(m) for m in kind.plain().modules()})
    own = {type(m) for m in model.modules() if isinstance(m, ordinary)} - set(ordinary)
    dead = [weakref.ref(x) for x in (model, *model.parameters(), *own)]
    assert len(own) > 0
    del model, own
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)


def test_what_a_target_held_before_is_let_go() -> None:
    model = Autoencoder()
    old = weakref.ref(model.decoder.weight)
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    gc.collect()
    assert old() is None


def test_an_adoption_keeps_no_tensor_alive() -> None:
    model = Autoencoder()
    adoption = tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    weight = weakref.ref(model.encoder.weight)
    del model
    gc.collect()
    assert weight() is None
    assert "decoder.weight" in str(adoption)


# ------------------------------------------------------------------- what is replaced is followed


def test_a_replaced_source_module_is_followed() -> None:
    model = KINDS["transpose"].model()
    model.encoder = nn.Linear(4, 3)
    assert torch.equal(model.decoder.weight, model.encoder.weight.T)
    model.encoder = nn.Linear(4, 5)
    assert model.decoder.weight.shape == (4, 5)


def test_a_replaced_source_parameter_is_followed() -> None:
    model = KINDS["same"].model()
    model.wte.weight = nn.Parameter(torch.ones(9, 4))
    assert model.lm_head.weight is model.wte.weight
    assert model(torch.tensor([[8]])).shape == (1, 1, 9)


def test_a_source_that_is_gone_is_named() -> None:
    model = KINDS["transpose"].model()
    model.encoder = nn.Identity()
    with pytest.raises(tied.TiedError) as caught:
        model.decoder(torch.ones(1, 3))
    assert "decoder.weight" in caught.value.paths
    assert "encoder.weight" in str(caught.value)


def test_a_replaced_target_module_is_an_ordinary_one() -> None:
    model = KINDS["transpose"].model()
    model.decoder = nn.Linear(3, 4)
    assert [n for n, _ in model.named_parameters()] == [
        "encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias",
    ]  # fmt: skip
    assert tied.ties(model).groups == ()
