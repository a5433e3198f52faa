"""The field's reports on PyTorch, H and J to L: training, counting and conversion after tie.

The numbers are those of the project's list of field reports, as in test_tie_field.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tied
from test_field_torch import LanguageModel as TiedLanguageModel
from test_field_torch_ties import ATTEMPTS
from tying import KINDS, Autoencoder, LanguageModel, get

# ----------------------------------------------------------- H. optimizers, gradients and counts


@pytest.mark.parametrize("maker", [torch.optim.SGD, torch.optim.Adam])
def test_T68_T69_T70_no_group_has_a_parameter_twice(maker: Any) -> None:
    """pytorch#40967, #48518, entrenar#314: in one group it is updated twice, in two an error."""
    for kind in KINDS.values():
        model = kind.model()
        groups = [{"params": list(m.parameters(recurse=False))} for m in model.modules()]
        optimizer = maker(groups, lr=0.1)
        model(kind.inputs).sum().backward()
        optimizer.step()
        assert kind.holds(model)
        named = [p for n, p in model.named_parameters(remove_duplicate=False)]
        assert len(maker(named, lr=0.1).param_groups[0]["params"]) == len(kind.names())
        if maker is torch.optim.Adam:
            assert len(optimizer.state) == len([p for p in named if p.grad is not None])


@pytest.mark.parametrize("name", ["same", "transpose", "slices", "triu"])
def test_T72_gradients_per_sample(name: str) -> None:
    """opacus#413, #417, pytorch#80951: they were stacked or failed on tied parameters."""
    from torch.func import functional_call, grad, vmap

    kind = KINDS[name]
    model = kind.model()
    values = {n: p.detach() for n, p in model.named_parameters()}
    samples = torch.cat([kind.inputs, kind.inputs + 1])[:, None] % 7

    def loss(params: Any, x: Any) -> Any:
        return functional_call(model, params, x).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(values, samples)
    for i, x in enumerate(samples):
        model.zero_grad()
        model(x).square().sum().backward()
        for n, p in model.named_parameters():
            torch.testing.assert_close(found[n][i], p.grad)


def test_T74_every_way_to_count_gives_the_storage_once() -> None:
    """torchinfo#322, #377, pytorch-summary#37, torchtitan#3225, nanoGPT#209."""
    for name, kind in KINDS.items():
        model, free = kind.model(), kind.plain()
        wanted = sum(get(free, n).numel() for n in kind.names())
        assert sum(p.numel() for p in model.parameters()) == wanted
        assert sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)) == wanted
        own = [p for m in model.modules() for p in m._parameters.values() if p is not None]
        assert sum(p.numel() for p in own) == wanted
        assert sum(t.numel() for t in model.state_dict().values()) == wanted
        assert tied.ties(model).parameters == wanted, name


def test_T75_whoever_initialises_last_initialises_both() -> None:
    """Caffe#1211: who initialises a shared weight, whose momentum, how often is it saved."""
    model = KINDS["transpose"].model()
    order = []

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            order.append(module.out_features)
            nn.init.constant_(module.weight, len(order))

    model.apply(init)
    assert order == [3, 4]
    assert (model.encoder.weight == 2).all()
    assert KINDS["transpose"].holds(model)
    model.encoder.reset_parameters()
    model.decoder.reset_parameters()
    assert KINDS["transpose"].holds(model)


# --------------------------------------------------------------- J, L. names, merges, attempts


def test_T88_T92_an_inverted_tie_keeps_the_head_and_reads_both_forms() -> None:
    """llama.cpp CodeShell, sglang#2935: the file has only the head, or both, or the other name."""
    model = LanguageModel()
    tied.tie(model, "wte.weight", "lm_head.weight")
    assert list(model.state_dict()) == ["lm_head.weight"]
    for names in (["lm_head.weight"], ["wte.weight"], ["wte.weight", "lm_head.weight"]):
        w = torch.randn(7, 4)
        model.load_state_dict({n: w.clone() for n in names})
        assert torch.equal(model.lm_head.weight, w)
        assert model.wte.weight is model.lm_head.weight


def test_T91_models_are_merged_name_by_name() -> None:
    """mergekit#350, #447, #615, #97, tinker-cookbook#593: KeyError: lm_head.weight."""
    one, other = KINDS["same"].model(), TiedLanguageModel()
    old = other.state_dict()
    merged = {n: (t + old[n]) / 2 for n, t in one.state_dict().items()}
    model = KINDS["same"].model(2)
    model.load_state_dict(merged)
    assert torch.equal(model.lm_head.weight, (one.wte.weight + other.wte.weight) / 2)
    assert model.get_parameter("lm_head.weight") is model.wte.weight


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_T97_tie_makes_the_attempt_last_if_it_is_one(attempt: str) -> None:
    """discuss.pytorch.org/t/2585 and its mirrors: nobody can tell whether this is tied."""
    make, is_tied = ATTEMPTS[attempt]
    model = Autoencoder()
    model.decoder.weight = make(model.encoder.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = tied.tie(model).made
    assert len(made) == is_tied
    model.float().double()
    assert tied.shares(model.encoder.weight, model.decoder.weight) is is_tied


def test_T96_T97_a_weight_of_two_layers_is_written_once_and_names_with_prefixes_are_apart() -> None:
    """keras#18419, #7116, #8312; accelerate#2324: `1` and `10`."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(12)))
    tied.tie(model, "10.weight", "1.weight")
    names = list(model.state_dict())
    assert names == [f"{i}.weight" for i in range(12) if i != 10]
    old = {f"{i}.weight": torch.full((2, 2), float(i)) for i in range(12)}
    with pytest.raises(tied.TieError) as caught:
        model.load_state_dict(old)
    assert caught.value.paths == ("1.weight", "10.weight")
    old["10.weight"] = old["1.weight"].clone()
    model.load_state_dict(old)
    assert (model[10].weight == 1).all()
    assert (model[11].weight == 11).all()
