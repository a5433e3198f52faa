"""PyTorch's tools on one side of a tie: pruning, normalisation, quantization.

What a tool does to the source is seen by the target. What would give the target a tensor of its own
is refused, by name, before anything is changed.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import tied
from tying import KINDS, Kind, get

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

Tool = Callable[[nn.Module], Any]

PRUNE: dict[str, Tool] = {
    "identity": lambda m: prune.identity(m, "weight"),
    "random_unstructured": lambda m: prune.random_unstructured(m, "weight", 0.5),
    "l1_unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "random_structured": lambda m: prune.random_structured(m, "weight", 1, dim=0),
    "ln_structured": lambda m: prune.ln_structured(m, "weight", 1, n=2, dim=1),
    "custom_from_mask": lambda m: prune.custom_from_mask(m, "weight", checkers(m.weight)),
}
NORMS: dict[str, Tool] = {
    "old_weight_norm": nn.utils.weight_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
TOOLS = PRUNE | NORMS
every_tool = pytest.mark.parametrize("tool", TOOLS)

# Which module has the source and which the (first) target.
SIDES = {
    "transpose": ("encoder", "decoder"),
    "slices": ("c_attn", "q"),
    "same": ("wte", "lm_head"),
}
every_side = pytest.mark.parametrize("name", SIDES)


def checkers(x: Any) -> Any:
    return torch.arange(x.numel()).reshape(x.shape) % 2


def by_hand(kind: Kind, model: Any) -> torch.Tensor:
    """What an ordinary model gives that has the present values of all tensors."""
    twin = kind.plain()
    twin.load_state_dict({name: get(model, name).detach() for name in twin.state_dict()})
    result: torch.Tensor = twin(kind.inputs)
    return result.detach()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.detach(), b.detach())


def train(model: Any, kind: Kind) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(kind.inputs).square().mean().backward()
    optimizer.step()


def refused(text: str, model: Any, kind: Kind, call: Callable[[], Any]) -> None:
    """Runs a call that must fail and leave the model as it is."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(tied.TieError) as caught:
        call()
    assert str(caught.value) == textwrap.dedent(text).strip("\n")
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert kind.holds(model)
    close(model(kind.inputs), by_hand(kind, model))


# On the source


@every_side
@every_tool
def test_a_tool_on_the_source_is_seen_by_the_target(tool: str, name: str) -> None:
    kind, (source, _) = KINDS[name], SIDES[name]
    # In evaluation: in training spectral normalisation changes its estimate at every look.
    model = kind.model().eval()
    TOOLS[tool](model.get_submodule(source))
    for _ in range(2):
        close(model(kind.inputs), by_hand(kind, model))
        assert kind.holds(model)
        train(model, kind)
    assert not any(target in dict(model.named_parameters()) for target in kind.targets)


@every_side
@every_tool
def test_a_target_is_up_to_date_before_its_source_has_run(tool: str, name: str) -> None:
    """Pruning and the older normalisations make the weight anew only when the source is called."""
    kind, (source, target) = KINDS[name], SIDES[name]
    model = kind.model().eval()
    TOOLS[tool](model.get_submodule(source))
    train(model, kind)
    seen = get(model, f"{target}.weight").detach().clone()
    model.get_submodule(source)(kind.inputs)
    close(seen, kind.expected(model)[f"{target}.weight"])
    train(model, kind)
    get(model, f"{target}.weight").sum().backward()  # its graph is not one that is used up


@every_side
@pytest.mark.parametrize("tool", PRUNE)
def test_pruning_of_the_source_is_made_permanent(tool: str, name: str) -> None:
    kind, (source, _) = KINDS[name], SIDES[name]
    model = kind.model()
    PRUNE[tool](model.get_submodule(source))
    value = get(model, f"{source}.weight").detach().clone()
    prune.remove(model.get_submodule(source), "weight")
    assert sorted(dict(model.named_parameters())) == sorted(kind.names())
    close(get(model, f"{source}.weight"), value)
    assert kind.holds(model)
    train(model, kind)
    assert kind.holds(model)


def test_global_pruning_of_the_source() -> None:
    kind = KINDS["transpose"]
    model = nn.ModuleDict({"tied": kind.model(), "other": nn.Linear(4, 3)})
    parameters = [(model["tied"].encoder, "weight"), (model["other"], "weight")]
    prune.global_unstructured(parameters, pruning_method=prune.L1Unstructured, amount=8)
    assert sum(int((part.weight == 0).sum()) for part, _ in parameters) == 8
    assert kind.holds(model["tied"])
    close(model["tied"](kind.inputs), by_hand(kind, model["tied"]))


def test_spectral_norm_in_training_needs_the_cache() -> None:
    """As everywhere: its estimate is better at the second look, unless one look is kept."""
    kind = KINDS["transpose"]
    model = kind.model()
    parametrizations.spectral_norm(model.encoder)
    with parametrize.cached():
        assert torch.equal(model.decoder.weight, model.encoder.weight.t())


# On the target


@every_side
@pytest.mark.parametrize("tool", PRUNE)
def test_pruning_a_target_is_refused(tool: str, name: str) -> None:
    kind, (source, target) = KINDS[name], SIDES[name]
    model = kind.model()
    text = f"""
        weight_orig can't be put in the place of weight, which is tied
          tie  {target}.weight reads {source}.weight
          Untie it first: tied.untie(model, "{target}.weight")
        """
    refused(text, model, kind, lambda: PRUNE[tool](model.get_submodule(target)))


@every_side
@pytest.mark.parametrize(
    ("tool", "called"),
    [
        ("old_weight_norm", "WeightNorm"),
        ("old_spectral_norm", "SpectralNorm"),
        ("weight_norm", "_WeightNorm"),
        ("orthogonal", "_Orthogonal"),
    ],
)
def test_normalising_a_target_is_refused(tool: str, called: str, name: str) -> None:
    """What needs other tensors than the one that is there."""
    kind, (source, target) = KINDS[name], SIDES[name]
    model = kind.model()
    text = f"""
        {called} can't be put on {target}.weight, which is tied
          tie  {target}.weight reads {source}.weight
          Untie it first: tied.untie(model, "{target}.weight")
        """
    refused(text, model, kind, lambda: NORMS[tool](model.get_submodule(target)))


@every_side
@every_tool
def test_after_untie_every_tool_works(tool: str, name: str) -> None:
    kind, (source, target) = KINDS[name], SIDES[name]
    model = kind.model().eval()
    tied.untie(model, f"{target}.weight")
    before = get(model, f"{source}.weight").detach().clone()
    TOOLS[tool](model.get_submodule(target))
    close(get(model, f"{source}.weight"), before)
    close(model(kind.inputs), by_hand(kind, model))


def test_global_pruning_of_both_sides() -> None:
    """PyTorch looks at all weights in one vector, for which a transpose is no good."""
    kind = KINDS["transpose"]
    model = kind.model()
    both = [(model.encoder, "weight"), (model.decoder, "weight")]
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        prune.global_unstructured(both, pruning_method=prune.L1Unstructured, amount=8)
    assert list(model.state_dict()) == ["encoder.weight", "encoder.bias", "decoder.bias"]
    assert kind.holds(model)


# A parametrization on top of a tie


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def doubled(kind: Kind, target: str) -> Any:
    model = kind.model()
    parametrize.register_parametrization(model.get_submodule(target), "weight", Doubled())
    return model


@every_side
def test_a_parametrization_on_top_of_a_tie(name: str) -> None:
    kind, (source, target) = KINDS[name], SIDES[name]
    model = doubled(kind, target)
    names = list(model.state_dict())
    assert sorted(names) == sorted(kind.names())
    for one in (model, copy.deepcopy(model)):
        train(one, kind)
        close(get(one, f"{target}.weight"), 2 * kind.expected(one)[f"{target}.weight"])
        close(one(kind.inputs), by_hand(kind, one))
    assert not torch.equal(get(model, f"{source}.weight"), get(kind.model(), f"{source}.weight"))


@every_side
def test_assigning_goes_through_both(name: str) -> None:
    kind, (_, target) = KINDS[name], SIDES[name]
    model = doubled(kind, target)
    value = torch.randn_like(get(model, f"{target}.weight"))
    model.get_submodule(target).weight = nn.Parameter(value)
    close(kind.expected(model)[f"{target}.weight"], value / 2)
    close(get(model, f"{target}.weight"), value)


@every_side
def test_spectral_norm_on_a_target(name: str) -> None:
    kind, (_, target) = KINDS[name], SIDES[name]
    model = kind.model()
    parametrizations.spectral_norm(model.get_submodule(target), n_power_iterations=100)
    model.eval()
    expected = kind.expected(model)[f"{target}.weight"]
    close(get(model, f"{target}.weight"), expected / torch.linalg.matrix_norm(expected, 2))
    close(model(kind.inputs), by_hand(kind, model))


@every_side
def test_removing_the_parametrization_unties(name: str) -> None:
    kind, (source, target) = KINDS[name], SIDES[name]
    model = kind.model()
    value = get(model, f"{target}.weight").detach().clone()
    parametrize.remove_parametrizations(model.get_submodule(target), "weight")
    assert type(get(model, f"{target}.weight")) is nn.Parameter
    close(get(model, f"{target}.weight"), value)
    assert not tied.shares(get(model, f"{target}.weight"), get(model, f"{source}.weight"))
    assert f"{target}.weight" in model.state_dict()
    close(model(kind.inputs), by_hand(kind, model))


def test_removing_the_parametrization_of_a_buffer_unties() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.arange(3.0))
    model.register_buffer("b", torch.arange(2.0))
    tied.tie(model, "b", "a", lambda a: a[1:])
    parametrize.remove_parametrizations(model, "b")
    assert list(model.state_dict()) == ["a", "b"]
    assert model.b.tolist() == [1, 2]
    assert not tied.shares(model.a, model.b)


def test_another_module_takes_over_a_tie() -> None:
    """What quantization-aware training does with parametrizations."""
    kind = KINDS["transpose"]
    model = kind.model()
    other = nn.Linear(3, 4)
    parametrize.transfer_parametrizations_and_params(model.decoder, other)
    assert list(other.state_dict()) == ["bias"]
    with torch.no_grad():
        model.encoder.weight.mul_(2)
    assert torch.equal(other.weight, model.encoder.weight.t())


# torch.ao.quantization


def dynamic(model: nn.Module, spec: Any = None) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, spec)


def test_dynamic_quantization_of_a_target_is_refused() -> None:
    kind = KINDS["transpose"]
    model = kind.model()
    text = """
        quantization would give a tied tensor an array of its own
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """
    for spec in (None, {"decoder"}, {nn.Linear}, {"encoder", "decoder"}):
        refused(text, model, kind, lambda spec=spec: dynamic(model, spec))  # type: ignore[misc]


def test_dynamic_quantization_of_a_source_is_refused_when_it_is_read() -> None:
    kind = KINDS["transpose"]
    model = kind.model()
    quantized = dynamic(model, {"encoder"})
    with pytest.raises(tied.TieError) as caught:
        quantized(kind.inputs)
    text = """
        decoder.weight is tied to encoder.weight, which is no tensor any more
          found  method
          Untie it before encoder.weight is replaced: tied.untie(model, "decoder.weight")
        """
    assert str(caught.value) == textwrap.dedent(text).strip("\n")
    assert caught.value.paths == ("encoder.weight", "decoder.weight")
    assert kind.holds(model)


def test_dynamic_quantization_of_other_layers() -> None:
    kind = KINDS["transpose"]
    model = nn.Sequential(kind.model(), nn.Linear(4, 4))
    quantized = dynamic(model, {"1"})
    assert type(quantized[1]) is torch.ao.nn.quantized.dynamic.Linear
    assert kind.holds(quantized[0])
    close(quantized[0](kind.inputs), model[0](kind.inputs))
    torch.testing.assert_close(quantized(kind.inputs), model(kind.inputs), atol=0.05, rtol=0.05)


def test_dynamic_quantization_after_untie() -> None:
    kind = KINDS["transpose"]
    model = kind.model()
    before = model(kind.inputs)
    tied.untie(model, "decoder.weight")
    quantized = dynamic(model)
    assert type(quantized.decoder) is torch.ao.nn.quantized.dynamic.Linear
    torch.testing.assert_close(quantized(kind.inputs), before, atol=0.05, rtol=0.05)


def test_dynamic_quantization_of_tied_recurrent_layers_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.LSTM(3, 2), "b": nn.LSTM(3, 2)})
    tied.tie(model, "b.weight_hh_l0", "a.weight_hh_l0")
    with pytest.raises(tied.TieError) as caught:
        dynamic(model)
    assert caught.value.paths == ("a.weight_hh_l0", "b.weight_hh_l0")
    assert model["b"].weight_hh_l0 is model["a"].weight_hh_l0


# torchao


@pytest.fixture(name="int8")
def _int8() -> Callable[..., None]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def int8(model: nn.Module, *names: str) -> None:
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name in names)

    return int8


def kinds_of(model: nn.Module) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in model.named_parameters()}


@pytest.mark.parametrize("names", [["encoder"], ["encoder", "decoder"]])
def test_torchao_on_a_source_that_is_read_transposed(int8: Any, names: list[str]) -> None:
    kind = KINDS["transpose"]
    model = kind.model()
    text = """
        encoder.weight can't become a Int8Tensor: decoder.weight can't be read from that
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """
    refused(text, model, kind, lambda: int8(model, *names))


@every_side
def test_torchao_on_a_target(int8: Any, name: str) -> None:
    kind, (source, target) = KINDS[name], SIDES[name]
    model = kind.model()
    text = f"""
        {target}.weight is tied and can't become a Int8Tensor of its own
          tie  {target}.weight reads {source}.weight
          Untie it first: tied.untie(model, "{target}.weight")
        """
    refused(text, model, kind, lambda: int8(model, target))


def test_torchao_on_the_source_of_one_array(int8: Any) -> None:
    """T87: one quantized tensor for both, not two."""
    kind = KINDS["same"]
    model = kind.model()
    before = model(kind.inputs)
    int8(model, "wte")
    assert kinds_of(model) == {"wte.weight": "Int8Tensor"}
    assert model.lm_head.weight is model.wte.weight
    torch.testing.assert_close(model(kind.inputs), before, atol=0.05, rtol=0.05)
    # The other side is quantized by that, and torchao can't quantize what is.
    with pytest.raises(NotImplementedError, match="Int8Tensor dispatch"):
        int8(model, "lm_head")
    torch.testing.assert_close(model(kind.inputs), before, atol=0.05, rtol=0.05)


@every_side
def test_torchao_after_untie(int8: Any, name: str) -> None:
    kind, (source, target) = KINDS[name], SIDES[name]
    model = kind.model()
    before = model(kind.inputs)
    for path in kind.targets:
        tied.untie(model, path)
    int8(model, source, target)
    assert list(kinds_of(model).values()).count("Int8Tensor") == 2
    torch.testing.assert_close(model(kind.inputs), before, atol=0.1, rtol=0.1)
