"""A copy of a model of 1 GiB in which every second array is a tie."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import tied
from benchmarks.measure import Row, race

MIB = 2**20
UNIQUE = 64
SIDE = 2048  # 64 float32 matrices of 2048 x 2048: 1 GiB


def tied_model(unique: list[Any]) -> dict[str, Any]:
    """Each array, and beside it the array transposed."""
    model: dict[str, Any] = {}
    for i, array in enumerate(unique):
        model[f"encoder.{i}"] = array
        model[f"decoder.{i}"] = tied.transpose(array)
    return model


def allocated(model: dict[str, Any]) -> int:
    """The most bytes that NumPy had allocated at once during one copy."""
    tracemalloc.start()
    try:
        copied = tied.copy(model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tied.ties(copied) == tied.ties(model)
    return peak


def on_numpy() -> Iterator[Row]:
    arrays = [np.ones((SIDE, SIDE), np.float32) for _ in range(UNIQUE)]
    model = tied_model(arrays)
    yield Row(
        "bytes touched by copy, 1 GiB in NumPy / unique bytes",
        allocated(model) / MIB,
        sum(array.nbytes for array in arrays) / MIB,
        1.001,  # the model's own dict and the walk are a few KiB
        unit="MiB",
    )
    yield race(
        "copy, 1 GiB in NumPy, every second a tie / plain copy of the unique",
        lambda: tied.copy(model),
        lambda: [array.copy() for array in arrays],
        target=1.1,
        repeats=7,
    )


def on_torch() -> Iterator[Row]:
    tensors = [torch.ones(SIDE, SIDE) for _ in range(UNIQUE)]
    model = tied_model(tensors)
    yield race(
        "copy, 1 GiB in torch, every second a tie / plain clone of the unique",
        lambda: tied.copy(model),
        lambda: [tensor.clone() for tensor in tensors],
        target=1.1,
        repeats=7,
    )


def rows() -> Iterator[Row]:
    yield from on_numpy()
    yield from on_torch()
