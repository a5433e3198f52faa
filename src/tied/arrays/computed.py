"""Objects that compute like an array: the operators, by way of the array that they stand for."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from tied._errors import TieError


class Computed:
    """The base of what is no array and reads as one.

    A subclass has `read()`, `shape` and `dtype`. Operators, indexing, `np.asarray` and `jnp`
    functions work on what `read()` gives, anew each time, and give plain arrays: `v += 1` binds
    `v` to a plain array, and nothing writes through.
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
        """Returns the elements as an ordinary array: what `array()` is made of."""
        raise NotImplementedError

    def array(self) -> Any:
        """Returns the elements as a plain array of the library that stores them."""
        return self.read()

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements that are read."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """The bytes that a plain array of these elements takes."""
        return self.size * self.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.read(), dtype=dtype, copy=copy)

    def __jax_array__(self) -> Any:
        return self.read()

    def __dlpack__(self, **options: Any) -> Any:
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.read().__dlpack_device__()

    def __getitem__(self, index: Any) -> Any:
        return self.read()[plain(index)]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TieError(
            f"a {type(self).__name__} can't be written through",
            hint="Write to what it reads, or to a plain array of your own: x.array()",
        )

    def __len__(self) -> int:
        return len(self.read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())  # without it, Python would ask for the length

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __complex__(self) -> complex:
        return complex(self.read())

    def __index__(self) -> int:
        return operator.index(self.read())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.read(), digits)

    def __format__(self, how: str) -> str:
        return format(self.read(), how) if how else str(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*(plain(x) for x in args), **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _OWN:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.read(), name)


_OWN = frozenset({"base", "layout", "base_shape", "read"})  # else half-made ones would recurse


def plain(x: Any) -> Any:
    """Returns the array that an object stands for; an array as it is."""
    return x.read() if isinstance(x, Computed) else x


def _operator(function: Callable[..., Any], *, swap: bool = False) -> Callable[..., Any]:
    def apply(self: Computed, *others: Any) -> Any:
        operands = [self.read(), *map(plain, others)]
        return function(*(reversed(operands) if swap else operands))

    return apply


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_OTHER = "eq ne lt le gt ge neg pos abs invert".split()
_BUILT_IN = {"and": operator.and_, "or": operator.or_, "divmod": divmod, "pow": pow}
for _name in _BINARY:
    _function: Any = _BUILT_IN.get(_name) or getattr(operator, _name)
    setattr(Computed, f"__{_name}__", _operator(_function))
    setattr(Computed, f"__r{_name}__", _operator(_function, swap=True))
for _name in _OTHER:
    setattr(Computed, f"__{_name}__", _operator(getattr(operator, _name)))
Computed.__hash__ = object.__hash__  # type: ignore[method-assign]
