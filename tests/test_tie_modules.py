"""Ties in modules that are odd: recurrent, normalising, parametrized, wrapped, of one's own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import tied
from test_field_torch import LanguageModel as SharedLanguageModel
from tying import KINDS, Autoencoder, LanguageModel, get

# --------------------------------------------------------------------------------- recurrent layers


class Tagger(nn.Module):
    """Two LSTM layers, whose recurrent weights may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.rnn(x)[0]


def test_an_lstm_with_tied_weights_computes_with_them() -> None:
    model, x = Tagger(), torch.randn(2, 5, 4)
    tied.tie(model, "rnn.weight_hh_l1", "rnn.weight_hh_l0")
    twin = nn.LSTM(4, 4, num_layers=2, batch_first=True)
    twin.load_state_dict({n: get(model, f"rnn.{n}").detach() for n, _ in twin.named_parameters()})
    assert torch.equal(model(x), twin(x)[0])
    model(x).sum().backward()
    twin(x)[0].sum().backward()
    wanted = twin.weight_hh_l0.grad + twin.weight_hh_l1.grad
    torch.testing.assert_close(model.rnn.weight_hh_l0.grad, wanted)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_an_lstm_with_tied_weights_trains_and_is_copied(way: Any) -> None:
    x, model = torch.randn(2, 5, 4), Tagger()
    tied.tie(model, "rnn.weight_hh_l1", "rnn.weight_hh_l0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        before = model(x)
        before.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model(x), before)
    twin = way(model)
    assert torch.equal(twin(x), model(x))
    twin.rnn.weight_hh_l1 = torch.zeros(16, 4)
    assert not torch.equal(twin(x), model(x))
    assert not twin.rnn.weight_hh_l0.any()
    assert model.rnn.weight_hh_l0.any()
    assert twin.double()(x.double()).dtype == torch.float64


def test_an_untied_lstm_computes_with_its_own_weights() -> None:
    model, x = Tagger(), torch.randn(2, 5, 4)
    tied.tie(model, "rnn.weight_hh_l1", "rnn.weight_hh_l0")
    before = model(x)
    tied.untie(model, "rnn.weight_hh_l1")
    assert torch.equal(model(x), before)
    with torch.no_grad():
        model.rnn.weight_hh_l1.zero_()
    assert not torch.equal(model(x), before)


# ----------------------------------------------------------------- whole layers, running statistics


@pytest.mark.parametrize("training", [True, False])
def test_two_layers_of_a_transformer_share_all_of_their_parameters(training: bool) -> None:
    """In evaluation the layers take PyTorch's fast path, which asks for the tensors itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2)
    twin = copy.deepcopy(model)
    twin.layers[1] = twin.layers[0]
    names = [n for n, _ in model.layers[0].named_parameters()]
    for n in names:
        tied.tie(model, f"layers.1.{n}", f"layers.0.{n}")
    assert len(list(model.parameters())) == len(names)
    x = torch.randn(2, 3, 8)
    with torch.set_grad_enabled(training):
        assert torch.equal(model.train(training)(x), twin.train(training)(x))
    if training:
        model(x).square().sum().backward()
        twin(x).square().sum().backward()
        for n, p in model.layers[0].named_parameters():
            torch.testing.assert_close(p.grad, twin.layers[0].get_parameter(n).grad)


def test_running_statistics_are_one() -> None:
    names = ("running_mean", "running_var", "num_batches_tracked")
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    twin = copy.deepcopy(model)
    for n in names:
        tied.tie(model, f"1.{n}", f"0.{n}")
        twin[1]._buffers[n] = twin[0]._buffers[n]
    x = torch.randn(5, 3)
    assert torch.equal(model(x), twin(x))
    assert model[0].num_batches_tracked == 2
    for n in names:
        assert torch.equal(getattr(model[0], n), getattr(twin[0], n))
    model.double().eval()
    assert model(x.double()).dtype == torch.float64
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_an_embedding_that_renormalises_its_rows_changes_the_source() -> None:
    model = nn.ModuleList([nn.Linear(4, 7, bias=False), nn.Embedding(7, 4, max_norm=0.5)])
    tied.tie(model, "1.weight", "0.weight")
    with torch.no_grad():
        model[0].weight.fill_(1)
    model[1](torch.tensor([2]))
    assert model[0].weight[2].norm() <= 0.5 + 1e-6
    assert model[0].weight[3].norm() == 2


def test_a_sparse_gradient_and_a_dense_one_are_summed() -> None:
    model = LanguageModel()
    model.wte = nn.Embedding(7, 4, sparse=True)
    tied.tie(model, "wte.weight", "lm_head.weight")
    twin = SharedLanguageModel()
    twin.load_state_dict(dict.fromkeys(twin.state_dict(), model.lm_head.weight.detach()))
    x = torch.tensor([[1, 2, 6]])
    for m in (model, twin):
        m(x).square().sum().backward()
    torch.testing.assert_close(model.lm_head.weight.grad.to_dense(), twin.wte.weight.grad)


def test_under_autocast_the_tie_is_computed_as_the_transpose_by_hand() -> None:
    model, x = KINDS["transpose"].model(), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = torch.relu(model.encoder(x))
        wanted = nn.functional.linear(hidden, model.encoder.weight.T, model.decoder.bias)
        assert torch.equal(model(x), wanted)
        model(x).sum().backward()
    assert model.encoder.weight.grad.dtype == torch.float32


# -------------------------------------------------------------------------- layouts, empty, scalars


def test_a_source_in_another_memory_format_is_read_by_its_meaning() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 2), "linear": nn.Linear(12, 4)})
    tied.tie(model, "linear.weight", "conv.weight", lambda w: w.flatten(1))
    model.to(memory_format=torch.channels_last)
    assert not model["conv"].weight.is_contiguous()
    assert torch.equal(model["linear"].weight, model["conv"].weight.flatten(1))
    model["linear"].weight = torch.arange(48.0).view(4, 12)
    assert torch.equal(model["conv"].weight, torch.arange(48.0).view(4, 3, 2, 2))


def test_empty_and_scalar_parameters() -> None:
    model = nn.ParameterDict({"empty": torch.zeros(0, 3), "none": torch.zeros(3, 0),
                              "one": torch.tensor(2.0), "two": torch.tensor(3.0)})  # fmt: skip
    tied.tie(model, "none", "empty", tied.transpose)
    tied.tie(model, "two", "one")
    model.double()
    assert list(model.state_dict()) == ["empty", "one"]
    assert model["none"].dtype == torch.float64
    assert model["two"] is model["one"]


# ------------------------------------------------------------------- sources that are parametrized


def orthogonal() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(model[0])
    return model


@pytest.mark.parametrize("view", [None, tied.transpose])
def test_a_source_that_is_computed_is_read_and_written_through_its_own_inverse(view: Any) -> None:
    model = orthogonal()
    tied.tie(model, "1.weight", "0.weight", view)
    turned = view or (lambda w: w)
    assert torch.equal(model[1].weight, turned(model[0].weight))
    assert "1.weight" not in model.state_dict()
    wanted = torch.linalg.qr(torch.randn(3, 3)).Q
    model[1].weight = wanted
    torch.testing.assert_close(model[1].weight, wanted)
    torch.testing.assert_close(model[0].weight, turned(wanted))
    twin = copy.deepcopy(model)
    twin[1](torch.ones(1, 3)).sum().backward()
    assert twin[0].parametrizations.weight.original.grad is not None
    assert model[0].parametrizations.weight.original.grad is None


def test_a_parametrization_may_be_put_on_a_target_if_it_has_no_tensors() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Any) -> Any:
            return 2 * x

    model = KINDS["transpose"].model()
    nn.utils.parametrize.register_parametrization(model.decoder, "weight", Doubled())
    assert torch.equal(model.decoder.weight, 2 * model.encoder.weight.T)
    assert torch.equal(copy.deepcopy(model).double().decoder.weight,
                       2 * model.encoder.weight.double().T)  # fmt: skip


# ------------------------------------------------------------ classes of one's own, wrapped modules


class Noted(nn.Linear):
    """Has a say in how it is pickled."""

    def __getstate__(self) -> Any:
        return {**self.__dict__, "note": "saved"}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.loaded = True

    def __getattr__(self, name: str) -> Any:
        return 3 if name == "extra" else super().__getattr__(name)


def test_a_class_that_pickles_in_its_own_way_still_does() -> None:
    model = nn.Sequential(Noted(3, 2), Noted(2, 3))
    tied.tie(model, "1.weight", "0.weight", tied.transpose)
    for way in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        twin = way(model)
        assert (twin[1].note, twin[1].loaded, twin[1].extra) == ("saved", True, 3)
        assert torch.equal(twin[1].weight, twin[0].weight.T)
        assert isinstance(twin[1], Noted)
        assert type(twin[1]).__name__ == "Noted"


def test_a_module_that_is_wrapped_after_tie_keeps_it() -> None:
    model = nn.ModuleDict({"inner": Autoencoder()})
    tied.tie(model, "inner.decoder.weight", "inner.encoder.weight", tied.transpose)
    old = model.state_dict()
    model["inner"].decoder = nn.Sequential(model["inner"].decoder, nn.Identity())
    assert list(model.state_dict()) == [n.replace("decoder", "decoder.0") for n in old]
    w = torch.randn(3, 4)
    for names in (["encoder.weight", "decoder.0.weight"], ["decoder.0.weight"]):
        state = {**model.state_dict(), "inner.encoder.weight": w, "inner.decoder.0.weight": w.T}
        state = {n: t for n, t in state.items() if n[6:] in names or n.endswith("bias")}
        model.load_state_dict(state)
        assert torch.equal(model["inner"].encoder.weight, w)
        w = torch.randn(3, 4)
    assert torch.equal(model["inner"].decoder[0].weight, model["inner"].encoder.weight.T)


def layers(*, tie: tuple[str, str]) -> Any:
    model = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(5)])
    tied.tie(model, f"{tie[0]}.weight", f"{tie[1]}.weight")
    return model


def delete(model: Any, *places: int) -> None:
    for place in sorted(places, reverse=True):
        del model[place]


def swap(model: Any, a: int, b: int) -> None:
    model[a], model[b] = model[b], model[a]


CHANGES: dict[str, Any] = {
    "inserted_before": lambda m: m.insert(0, nn.Linear(3, 3, bias=False)),
    "inserted_between": lambda m: m.insert(3, nn.Linear(3, 3, bias=False)),
    "deleted_before": lambda m: delete(m, 0),
    "deleted_between": lambda m: delete(m, 3),
    "only_the_two_are_left": lambda m: delete(m, 0, 1, 3),
    "swapped": lambda m: swap(m, 2, 4),
    "swapped_with_another": lambda m: swap(m, 0, 2),
    "moved_up": lambda m: (m.insert(0, m[4]), delete(m, 5)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_moved_keep_their_ties(change: str) -> None:
    """The tie goes with its layers, whatever their numbers are."""
    model = layers(tie=("4", "2"))
    source, target = model[2], model[4]
    weight = source.weight
    CHANGES[change](model)
    for m in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        where, there = (list(model).index(layer) for layer in (source, target))
        assert m[there].weight is m[where].weight
        assert [n for n, _ in m.named_parameters()] == [
            f"{i}.weight" for i in range(len(m)) if i != there
        ]
    assert target.weight is weight
    new = {n: torch.randn(3, 3) for n in model.state_dict()}
    model.load_state_dict({**new, f"{there}.weight": new[f"{where}.weight"].clone()})
    assert torch.equal(target.weight, new[f"{where}.weight"])


def test_a_layer_that_is_replaced_is_followed_by_its_name() -> None:
    model = layers(tie=("4", "2"))
    model[2] = nn.Linear(3, 3, bias=False)
    assert model[4].weight is model[2].weight
    model.insert(0, nn.Linear(3, 3, bias=False))
    assert model[5].weight is model[3].weight


class Regrouped(nn.Module):
    """The same two modules in another container."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = model.encoder, model.decoder


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), tied.copy, tied.f64]
)
def test_both_sides_in_another_container_stay_tied_in_its_copies(way: Any) -> None:
    model = KINDS["transpose"].model()
    twin = way(Regrouped(model))
    assert not tied.shares(twin, model)
    twin.encoder.weight = nn.Parameter(torch.ones_like(twin.encoder.weight))
    assert (twin.decoder.weight == 1).all()
    assert not (model.decoder.weight == 1).any()
    twin.decoder.weight = torch.zeros_like(twin.decoder.weight)
    assert not twin.encoder.weight.any()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_both_sides_in_a_list_stay_tied_in_its_copies(way: Any) -> None:
    model = KINDS["transpose"].model()
    for decoder, encoder in (way([model.decoder, model.encoder]),
                             way((model.encoder, model.decoder))[::-1]):  # fmt: skip
        assert tied.shares(decoder.weight, encoder.weight)
        assert torch.equal(decoder.weight, encoder.weight.T)
        assert not tied.shares(decoder.weight, model.encoder.weight)


def test_a_replaced_module_is_let_go() -> None:
    model = KINDS["transpose"].model()
    old = weakref.ref(model.encoder)
    model.encoder = nn.Linear(4, 3)
    model(torch.ones(1, 4))
    gc.collect()
    assert old() is None


def test_a_part_alone_hides_nothing() -> None:
    model = KINDS["transpose"].model()
    assert tied.ties(model.decoder).hidden == ()
    part = tied.copy(model.decoder)
    assert torch.equal(part.weight, model.decoder.weight)
    assert tied.ties(Regrouped(model)).hidden == ()


def test_a_parent_that_is_wrapped_keeps_its_ties() -> None:
    for name, kind in KINDS.items():
        model = nn.Sequential(nn.Identity(), kind.model())
        assert kind.holds(copy.deepcopy(model)[1]), name
        assert kind.holds(pickle.loads(pickle.dumps(model))[1]), name
        assert [n for n, _ in model.named_parameters()] == [f"1.{n}" for n in kind.names()]


def test_gradients_that_are_there_at_adoption_are_summed() -> None:
    """Two Parameters over one memory, tied between backward and step."""
    model = LanguageModel()
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach())
    model(torch.tensor([[1, 2]])).sum().backward()
    wanted = model.wte.weight.grad + model.lm_head.weight.grad
    tied.tie(model)
    assert torch.equal(model.wte.weight.grad, wanted)
