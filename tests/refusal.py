"""Runs a call that must fail, and the small tied models that errors are tested on."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from torch import nn

import oracle
import tied


def matrix() -> np.ndarray:
    return np.arange(6, dtype=np.float32).reshape(3, 2)


def autoencoder() -> Any:
    w = matrix()
    return {"encoder": {"weight": w}, "decoder": {"weight": w.T}}


class TorchAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 3), nn.Linear(3, 2)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().T)


def jax_autoencoder() -> Any:
    w = jnp.ones((3, 2))
    return {"encoder": {"weight": w}, "decoder": {"weight": tied.transpose(w)}}


MODELS: dict[str, Callable[[], Any]] = {
    "numpy": autoencoder, "torch": TorchAutoencoder, "jax": jax_autoencoder,
}  # fmt: skip
BOTH = ("encoder.weight", "decoder.weight")


def refuse(
    error: type[tied.TiedError], paths: tuple[str, ...], text: str, call: Callable[..., Any],
    *arguments: Any,
) -> tied.TiedError:  # fmt: skip
    """Runs a call that must fail: its class, paths and text, and that its arguments are intact."""
    before = [oracle.snapshot(argument) for argument in arguments]
    groups = [tied.ties(argument).groups for argument in arguments]
    with pytest.raises(tied.TiedError) as caught:
        call(*arguments)
    assert str(caught.value) == textwrap.dedent(text).strip("\n")
    assert type(caught.value) is error
    assert caught.value.paths == paths
    assert [oracle.snapshot(argument) for argument in arguments] == before
    assert [tied.ties(argument).groups for argument in arguments] == groups
    return caught.value
