"""Casts and copies of 500 torch layers.

`Module.double` works in place: `Module.float` puts the model back, outside the clock. Ours makes a
new model and leaves the old one alone, so it has both in memory; the other has not.
"""

import copy
from collections.abc import Iterator

import torch

import tied
from benchmarks.measure import Row, race

LAYERS = 500


def stack(width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))


def rows() -> Iterator[Row]:
    for width, repeats in ((64, 15), (256, 5)):
        model, theirs = stack(width), stack(width)
        yield race(
            f"f64, 500 torch Linear({width}, {width}) / Module.double",
            lambda model=model: tied.f64(model),  # type: ignore[misc]
            theirs.double,
            target=1.0,
            repeats=repeats,
            after=theirs.float,
        )
        yield race(
            f"copy, 500 torch Linear({width}, {width}) / copy.deepcopy",
            lambda model=model: tied.copy(model),  # type: ignore[misc]
            lambda model=model: copy.deepcopy(model),  # type: ignore[misc]
            target=0.7,
            repeats=repeats,
        )
