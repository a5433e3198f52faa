"""What the tests of files have in common."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import kinds
from kinds import ALL

__all__ = ["ALL", "array", "assert_members"]


def array(library: str, values: Any, dtype: str) -> Any:
    """An array of a library, of bits that are given or of values."""
    made = np.asarray(values)
    made = made if str(made.dtype) == dtype else made.astype(dtype)
    return {"numpy": np.array, "torch": torch.from_numpy, "jax": jnp.asarray}[library](made)


def assert_members(before: list[Any], after: list[Any]) -> None:
    """Equal bit for bit, of one dtype and shape, and one where they were one."""
    for x, y in zip(map(kinds.value, before), map(kinds.value, after), strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    assert kinds.pattern(before, "bytes") == kinds.pattern(after, "bytes")
