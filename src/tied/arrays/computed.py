"""Objects that compute like an array: the operators, by way of the array that they stand for."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np


class Computed:
    """The base of what is no array and reads as one.

    A subclass has `read()`, `shape` and `dtype`. Operators, indexing, `np.asarray` and `jnp`
    functions work on what `read()` gives, anew each time.
    """

    __slots__ = ("__weakref__",)
    __array_priority__ = 1000

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """The dtype of what is read."""
        raise NotImplementedError

    def read(self) -> Any:
        """Returns the elements as an ordinary array."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements that are read."""
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.read(), dtype=dtype, copy=copy)

    def __jax_array__(self) -> Any:
        return self.read()

    def __getitem__(self, index: Any) -> Any:
        return self.read()[index]

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*(plain(x) for x in args), **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _OWN:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.read(), name)


_OWN = frozenset({"base", "layout", "base_shape", "read"})


def plain(x: Any) -> Any:
    """Returns the array that an object stands for; an array as it is."""
    return x.read() if isinstance(x, Computed) else x


def _operator(function: Callable[..., Any], *, swap: bool = False) -> Callable[..., Any]:
    def apply(self: Computed, *others: Any) -> Any:
        operands = [self.read(), *map(plain, others)]
        return function(*(reversed(operands) if swap else operands))

    return apply


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_OTHER = "eq ne lt le gt ge neg pos abs invert".split()
for _name in _BINARY:
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Computed, f"__{_name}__", _operator(_function))
    setattr(Computed, f"__r{_name}__", _operator(_function, swap=True))
for _name in _OTHER:
    setattr(Computed, f"__{_name}__", _operator(getattr(operator, _name)))
Computed.__hash__ = object.__hash__  # type: ignore[method-assign]
