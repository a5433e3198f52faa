"""Small tied models for PEFT, and what its tests do with them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import tied
from tying import get

X = torch.tensor([[2.0, -1.0, 3.0, 1.0], [-2.0, 1.0, -3.0, -1.0]])
TOKENS = torch.tensor([[1, 5, 2, 6]])
MERGE = """
    merging an adapter into one side of a tie would change the other side
      tie  decoder.weight reads encoder.weight
      Untie it first: tied.untie(model, "decoder.weight")
    """


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mid, self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x: Any) -> Any:
        return self.decoder(torch.tanh(self.mid(self.encoder(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.mid = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)

    def forward(self, x: Any) -> Any:
        return self.lm_head(torch.tanh(self.mid(self.wte(x))))


def autoencoder() -> Any:
    torch.manual_seed(0)
    model = Autoencoder()
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    return model


def language_model() -> Any:
    torch.manual_seed(0)
    model = LanguageModel()
    tied.tie(model, "lm_head.weight", "wte.weight")
    return model


def alike(model: nn.Module, plain: nn.Module) -> Any:
    """A model that is not tied, with the values of one that is."""
    plain.load_state_dict({name: get(model, name).detach() for name in plain.state_dict()})
    return plain


def lora(model: nn.Module, sides: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=sides, **{"init_lora_weights": False, **options})
    return get_peft_model(model, config)


def train(model: Any, x: torch.Tensor) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-5)


def refused(text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(tied.TieError) as caught:
        call()
    assert str(caught.value) == textwrap.dedent(text).strip("\n")
