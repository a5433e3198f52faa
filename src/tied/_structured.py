"""Arrays with structure: a few stored arrays, and a rule that makes the whole of them.

To add one, write a dataclass whose fields are the stored arrays first, then settings.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tied._node import Node, Opened, declare
from tied._path import Step
from tied.arrays.computed import Computed, plain
from tied.arrays.view import View


class Structured(Computed):
    """The base of arrays with structure: a few stored arrays and a rule that makes the whole.

    Instances are nodes: `map` changes the stored arrays and keeps the type. A subclass is a
    dataclass whose fields are the stored arrays first, then settings, and has `read`.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        if "jax" in sys.modules:
            _register_with_jax(type(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        n = int(self._first().shape[0])
        return n, n

    def _first(self) -> Any:
        """Returns the first of the stored arrays."""
        return next(iter(vars(self).values()))

    @property
    def dtype(self) -> Any:
        """The dtype of the stored arrays."""
        return self._first().dtype

    @property
    def T(self) -> Any:
        """The transpose, tied to the stored arrays."""
        return Derived(self, _transposed)


def _transposed(x: Any) -> Any:
    return x.T


def _namespace(x: Any) -> Any:
    while isinstance(x, View):
        x = x.base
    name = "jax.numpy" if type(x).__module__.startswith("jax") else type(x).__module__
    return sys.modules[name.partition(".")[0] if name != "jax.numpy" else name]


@dataclasses.dataclass(eq=False)
class Derived(Structured):
    """What a function computes of an array, anew each time; the array stays the one that is stored.

    Attributes:
        base: The array (or `View`, or array with structure), or a tuple of several.
        fn: The function, of so many arrays.
    """

    base: Any
    fn: Callable[..., Any]

    def read(self) -> Any:
        parts = self.base if isinstance(self.base, tuple) else (self.base,)
        jax = sys.modules.get("jax")
        if jax is not None and any(isinstance(x, jax.ShapeDtypeStruct) for x in parts):
            return jax.eval_shape(lambda *parts: plain(self.fn(*parts)), *parts)
        return plain(self.fn(*map(plain, parts)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is computed."""
        return tuple(self._seen().shape)

    @property
    def dtype(self) -> Any:
        """The dtype of what is computed."""
        return self._seen().dtype

    def _seen(self) -> Any:
        """Returns what has the shape and the dtype; JAX works them out without computing."""
        jax = sys.modules.get("jax")
        if jax is None or not all(isinstance(x, jax.Array) for x in jax.tree.leaves(self.base)):
            return self.read()
        return jax.eval_shape(Derived.read, self)


class DerivedNode(Node):
    """See `Derived`."""

    derived = True

    def open(self, x: Derived) -> Opened:
        if not isinstance(x.base, tuple):
            return (Step("of", None),), [x.base], (x.fn, False)
        keys = tuple(Step("of", n) for n in range(len(x.base)))
        return keys, list(x.base), (x.fn, True)

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        function, several = static
        return cls(tuple(values) if several else values[0], function)


declare(Derived, DerivedNode())


@dataclasses.dataclass(eq=False)
class Diagonal(Structured):
    """The n x n matrix with `diagonal`, of shape (n,), on its diagonal; n stored numbers."""

    diagonal: Any

    def read(self) -> Any:
        x = plain(self.diagonal)
        return _namespace(x).diag(x)


@dataclasses.dataclass(eq=False)
class Symmetric(Structured):
    """The symmetric matrix of one triangle of `data`, of shape (n, n): the upper, or the lower."""

    data: Any
    upper: bool = True

    def read(self) -> Any:
        return _mirrored(plain(self.data), self.upper, conjugate=False)


@dataclasses.dataclass(eq=False)
class Hermitian(Structured):
    """The Hermitian matrix of one triangle of `data`, of shape (n, n): the upper, or the lower."""

    data: Any
    upper: bool = True

    def read(self) -> Any:
        return _mirrored(plain(self.data), self.upper, conjugate=True)


@dataclasses.dataclass(eq=False)
class UpperTriangular(Structured):
    """The upper triangle of `data`, of shape (n, n); with `unit`, ones on the diagonal."""

    data: Any
    unit: bool = False

    def read(self) -> Any:
        return _triangle(plain(self.data), upper=True, unit=self.unit)


@dataclasses.dataclass(eq=False)
class LowerTriangular(Structured):
    """The lower triangle of `data`, of shape (n, n); with `unit`, ones on the diagonal."""

    data: Any
    unit: bool = False

    def read(self) -> Any:
        return _triangle(plain(self.data), upper=False, unit=self.unit)


@dataclasses.dataclass(eq=False)
class Bidiagonal(Structured):
    """The matrix of a diagonal, of shape (n,), and the one above it (or below), of (n - 1,)."""

    diagonal: Any
    beside: Any
    upper: bool = True

    def read(self) -> Any:
        main, beside = plain(self.diagonal), plain(self.beside)
        diag = _namespace(main).diag
        return diag(main) + diag(beside, 1 if self.upper else -1)


@dataclasses.dataclass(eq=False)
class Tridiagonal(Structured):
    """The matrix of a diagonal, of shape (n,), and those below and above it, of shape (n - 1,)."""

    diagonal: Any
    below: Any
    above: Any

    def read(self) -> Any:
        main, below, above = map(plain, (self.diagonal, self.below, self.above))
        diag = _namespace(main).diag
        return diag(main) + diag(below, -1) + diag(above, 1)


@dataclasses.dataclass(eq=False)
class Cholesky(Structured):
    """The matrix of its factor, of shape (n, n): L L^H of the lower triangle, or U^H U."""

    factor: Any
    lower: bool = True

    def read(self) -> Any:
        x = _triangle(plain(self.factor), upper=not self.lower, unit=False)
        adjoint = x.conj().T
        return x @ adjoint if self.lower else adjoint @ x


def _triangle(x: Any, *, upper: bool, unit: bool) -> Any:
    xp = _namespace(x)
    cut = xp.triu if upper else xp.tril
    if not unit:
        return cut(x)
    return cut(x, 1 if upper else -1) + xp.diag(xp.ones_like(xp.diag(x)))


def _mirrored(x: Any, upper: bool, *, conjugate: bool) -> Any:
    xp = _namespace(x)
    half = (xp.triu(x, 1) if upper else xp.tril(x, -1)) + 0
    main = xp.diag(x)
    if conjugate and "complex" in str(x.dtype):
        return half + half.conj().T + xp.diag(main.real + 0 * main)
    return half + half.T + xp.diag(main)


_registered: set[type] = set()


def _register_with_jax(cls: type) -> None:
    """Makes a class a pytree whose children are its stored arrays."""
    if cls in _registered:
        return
    _registered.add(cls)
    import jax

    names = [field.name for field in dataclasses.fields(cls)]
    stored = [name for name in names if name not in ("upper", "unit", "lower", "fn")]
    settings = [name for name in names if name not in stored]
    jax.tree_util.register_dataclass(cls, data_fields=stored, meta_fields=settings)
