"""Finding the ties of many tensors, every tenth of them a tie."""

from collections.abc import Iterator

import torch
from accelerate.utils import find_tied_parameters
from safetensors.torch import _find_shared_tensors

import tied
from benchmarks.measure import Row, race

TENSORS = 10_000


def state_dict(tensors: int) -> dict[str, torch.Tensor]:
    """Every tenth tensor reads the one before it, flat (the peer fails on a transpose)."""
    state: dict[str, torch.Tensor] = {}
    last = torch.zeros(2, 2)
    for i in range(tensors):
        last = last.view(-1) if i % 10 == 9 else torch.zeros(2, 2)
        state[f"layers.{i}.weight"] = last
    return state


def module(parameters: int) -> torch.nn.Module:
    """Layers of two parameters. Ten share a weight: the peer's time grows with each."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(parameters // 2)))
    for i in range(10):
        model[i * 100 + 1].weight = model[i * 100].weight
    return model


def rows() -> Iterator[Row]:
    state, large, model = state_dict(TENSORS), state_dict(10 * TENSORS), module(TENSORS)
    yield race(
        "ties, state dict of 10,000 / safetensors _find_shared_tensors",
        lambda: tied.ties(state).groups,
        lambda: _find_shared_tensors(state),
        target=1.0,
        repeats=15,
    )
    yield race(
        "ties, module of 10,000 / accelerate find_tied_parameters",
        lambda: tied.ties(model).groups,
        lambda: find_tied_parameters(model),
        target=1.0,
        repeats=15,
    )
    yield race(
        "ties, 100,000 tensors / 10,000",
        lambda: tied.ties(large).groups,
        lambda: tied.ties(state).groups,
        target=12.0,
        repeats=7,
    )
