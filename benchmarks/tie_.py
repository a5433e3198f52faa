"""A module with a lasting tie, against the same written by hand.

A decoder that reads the transpose of its encoder's weight. The time of a small layer is that of
finding the weight, of a large one that of multiplying with it. Compiled, a tie should cost nothing:
there the peer is a pair of layers that are not tied at all. All on one thread, in its CPU time, as
the calls take microseconds and other programs milliseconds.
"""

import time
from collections.abc import Callable, Iterator
from types import FunctionType

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import tied
from benchmarks import measure
from benchmarks.measure import Row

BATCH = 8
Call = Callable[[], object]


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(x)))


class Transposed(nn.Module):
    """What one writes by hand: a parametrization that reads the weight of another layer."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.source = [source]  # in a list, so that it is no submodule

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        return self.source[0].weight.t()


class Written(nn.Module):
    """What one writes by hand without a decoder: a matrix product with the transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, 2 * width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.relu(self.encoder(x)), self.encoder.weight.t(), self.bias)


def tied_pair(width: int) -> Pair:
    model = Pair(width)
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    return model


def parametrized_pair(width: int) -> Pair:
    model = Pair(width)
    parametrize.register_parametrization(model.decoder, "weight", Transposed(model.encoder))
    return model


def forward(layer: nn.Module, width: int) -> Call:
    x = torch.ones(BATCH, width)
    return lambda: layer(x)


def step(model: nn.Module, width: int) -> Call:
    x = torch.ones(BATCH, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def call() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return call


def compiled(model: nn.Module, width: int) -> Call:
    """A compiled call without gradients, of a model whose code is no other's.

    Dynamo keeps the programs of one piece of code in one list, and looks for the right one there.
    """
    code = Pair.forward.__code__.replace(co_name="forward_of_its_own")
    own = FunctionType(code, Pair.forward.__globals__)
    model.__class__ = type("Pair", (Pair,), {"forward": own})
    call = forward(torch.compile(model, fullgraph=True, dynamic=False), width)

    def without_gradient() -> object:
        with torch.no_grad():
            return call()

    without_gradient()  # compiles
    return without_gradient


def compiled_pairs(width: int) -> tuple[Call, Call]:
    """Two of ours and two of theirs: a program that was compiled earlier runs a little slower."""
    torch._dynamo.reset()
    first, second, third, fourth = (
        compiled(build(width), width) for build in (tied_pair, Pair, Pair, tied_pair)
    )
    return lambda: (first(), fourth()), lambda: (second(), third())


def race(name: str, ours: Call, theirs: Call, target: float | None = None) -> Row:
    return measure.race(name, ours, theirs, target=target, repeats=41, timer=time.thread_time)


def rows() -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for width in (16, 128, 512):
            ours, theirs = tied_pair(width), parametrized_pair(width)
            theirs.load_state_dict(ours.state_dict(), strict=False, assign=True)  # the same memory
            yield race(
                f"forward, tied Linear({2 * width}, {width}) / parametrized by hand",
                forward(ours.decoder, 2 * width),
                forward(theirs.decoder, 2 * width),
                target=1.0,
            )
        for width in (16, 128, 512):
            yield race(
                f"training step, tied pair of {width} / F.linear(x, W.t())",
                step(tied_pair(width), width),
                step(Written(width), width),
            )
        for width in (16, 128, 512):
            yield race(
                f"two compiled forwards, tied pairs of {width} / untied pairs",
                *compiled_pairs(width),
                target=1.02,
            )
    finally:
        torch.set_num_threads(threads)
