"""Masked arrays and random generators of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tied._node import Kind, Node, Opened
from tied.nodes.whole import WHOLE

_RANDOM = (np.random.Generator, np.random.BitGenerator, np.random.SeedSequence)


class MaskedNode(Node):
    """Masked arrays: the data and the mask are children."""

    def open(self, x: Any) -> Opened:
        filled = x.fill_value if x._fill_value is not None else None
        return ("data", "mask"), [x.view(np.ndarray), x.mask], (filled, x.hardmask)

    def build(self, cls: Any, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        data, mask = values
        fill_value, hard_mask = static
        x = np.asarray(data).view(cls)
        x._mask = mask
        x._sharedmask = False
        x._hardmask = hard_mask
        if fill_value is not None:
            x.fill_value = fill_value
        return x


_MASKED = MaskedNode()


def find(cls: type) -> tuple[bool, Kind]:
    """Returns whether `cls` is NumPy's and no ordinary object, and its kind."""
    if issubclass(cls, np.ma.MaskedArray):
        return True, _MASKED
    if issubclass(cls, (*_RANDOM, np.random.RandomState)):
        return True, WHOLE
    if issubclass(cls, (np.generic, np.dtype, np.ufunc)):
        return True, None
    return False, None
