"""Tied readings of an array (`transpose`, `view`, ...), and arrays with structure."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tied import arrays
from tied._errors import TiedError
from tied._layout import Layout
from tied.arrays.computed import Computed
from tied.arrays.view import View

__all__ = [
    "Bidiagonal",
    "Cholesky",
    "Derived",
    "Diagonal",
    "Hermitian",
    "LowerTriangular",
    "Structured",
    "Symmetric",
    "Tridiagonal",
    "UpperTriangular",
    "View",
    "adjoint",
    "diagonal",
    "permute",
    "transpose",
    "view",
]


def view(a: Any, fn: Callable[[Any], Any]) -> Any:
    """Reads an array in another way and stays tied to it.

    Args:
        a: An array of NumPy, PyTorch or JAX, or a `View`.
        fn: Takes an array and returns a view of it: `lambda W: W[1:3]`. It is tried on a NumPy
            stand-in for JAX. If it computes instead, the result is a `Derived`.

    Returns:
        NumPy and PyTorch: the view itself, which shares the memory of `a` (in PyTorch it also
        passes gradients on to `a`). JAX, and a conjugate in NumPy: a `View`. Where `fn` computes:
        a `Derived`, which computes it anew each time it is used.

    >>> import numpy as np, tied
    >>> W = np.zeros((4, 3))
    >>> np.shares_memory(W, tied.view(W, lambda W: W[1:3]))
    True
    """
    if isinstance(a, View):
        layout = a.layout.then(fn, dtype=_dtype(a))
        return Derived(a, fn) if layout is None else View(a.base, layout, a.base_shape)
    library = arrays.library_for(type(a))
    if library is None:
        if isinstance(a, Computed):
            return Derived(a, fn)
        raise TiedError(f"{type(a).__name__} is no array", hint="Give an array or a tied.View")
    if library.name == "torch":
        return _torch_view(a, fn)
    layout = Layout.of(fn, tuple(a.shape), dtype=_dtype(a))
    if layout is None:
        return Derived(a, fn)
    if library.strided and not (layout.conj or layout.neg):
        return fn(a)
    return View(a, layout)


def _dtype(a: Any) -> str | None:
    name = str(a.dtype)
    return name if name.startswith(("float", "complex", "int", "uint", "bool")) else None


def _torch_view(a: Any, fn: Callable[[Any], Any]) -> Any:
    seen = fn(a)
    shared = getattr(seen, "_base", None)
    if shared is not None and (shared is a or shared is a._base):
        return seen
    return Derived(a, fn)


def transpose(a: Any) -> Any:
    """Reverses the axes of an array, tied to it; `W.T.copy()` is a transpose that is not tied.

    Args:
        a: An array of shape (n, m) (or any number of axes), or a `View`.

    Returns:
        The tied reading, of shape (m, n): see `view` for what it is in each library.

    >>> import numpy as np, tied
    >>> W = np.ones((2, 3))
    >>> tied.transpose(W).shape, np.shares_memory(W, tied.transpose(W))
    ((3, 2), True)
    """
    return permute(a, tuple(range(a.ndim))[::-1])


def adjoint(a: Any) -> Any:
    """Conjugates an array and reverses its axes, tied to it.

    Args:
        a: An array of shape (n, m), real or complex, or a `View`.

    Returns:
        The tied reading, of shape (m, n). Conjugation is lazy: PyTorch does it itself, in NumPy
        and JAX the result is a `View`. Of a real array it is the transpose.
    """
    axes = tuple(range(a.ndim))[::-1]
    if "complex" not in str(a.dtype):
        return permute(a, axes)
    return view(permute(a, axes), lambda x: x.conj())


def permute(a: Any, axes: Sequence[int]) -> Any:
    """Permutes the axes of an array, tied to it.

    Args:
        a: An array, or a `View`.
        axes: For each axis of the result, the axis of `a` that it is.

    Returns:
        The tied reading: see `view`.
    """
    axes = tuple(axes)
    if hasattr(a, "permute") and not isinstance(a, Computed):
        return view(a, lambda x: x.permute(axes))
    return view(a, lambda x: x.transpose(axes))


def diagonal(a: Any, offset: int = 0) -> Any:
    """Reads a diagonal of a matrix, tied to it.

    Args:
        a: An array of shape (n, m), or a `View`.
        offset: Which diagonal; positive ones lie above the main one.

    Returns:
        The tied reading, 1-D: see `view`. In NumPy it can be written through if `a` can.
    """
    seen = view(a, lambda x: x.diagonal(offset))
    if hasattr(seen, "flags") and a.flags.writeable:
        seen.flags.writeable = True
    return seen


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


def _plain(x: Any) -> Any:
    return x.read() if isinstance(x, Computed) else x


@dataclasses.dataclass(eq=False)
class Derived(Structured):
    """What a function computes of an array, anew each time; the array stays the one that is stored.

    Attributes:
        base: The array (or `View`, or array with structure).
        fn: The function.
    """

    base: Any
    fn: Callable[[Any], Any]

    def read(self) -> Any:
        return self.fn(_plain(self.base))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is computed."""
        return tuple(self.read().shape)


@dataclasses.dataclass(eq=False)
class Diagonal(Structured):
    """The n x n matrix with `diagonal`, of shape (n,), on its diagonal; n stored numbers."""

    diagonal: Any

    def read(self) -> Any:
        x = _plain(self.diagonal)
        return _namespace(x).diag(x)


@dataclasses.dataclass(eq=False)
class Symmetric(Structured):
    """The symmetric matrix of one triangle of `data`, of shape (n, n): the upper, or the lower."""

    data: Any
    upper: bool = True

    def read(self) -> Any:
        return _mirrored(_plain(self.data), self.upper, conjugate=False)


@dataclasses.dataclass(eq=False)
class Hermitian(Structured):
    """The Hermitian matrix of one triangle of `data`, of shape (n, n): the upper, or the lower."""

    data: Any
    upper: bool = True

    def read(self) -> Any:
        return _mirrored(_plain(self.data), self.upper, conjugate=True)


@dataclasses.dataclass(eq=False)
class UpperTriangular(Structured):
    """The upper triangle of `data`, of shape (n, n); with `unit`, ones on the diagonal."""

    data: Any
    unit: bool = False

    def read(self) -> Any:
        return _triangle(_plain(self.data), upper=True, unit=self.unit)


@dataclasses.dataclass(eq=False)
class LowerTriangular(Structured):
    """The lower triangle of `data`, of shape (n, n); with `unit`, ones on the diagonal."""

    data: Any
    unit: bool = False

    def read(self) -> Any:
        return _triangle(_plain(self.data), upper=False, unit=self.unit)


@dataclasses.dataclass(eq=False)
class Bidiagonal(Structured):
    """The matrix of a diagonal, of shape (n,), and the one above it (or below), of (n - 1,)."""

    diagonal: Any
    beside: Any
    upper: bool = True

    def read(self) -> Any:
        main, beside = _plain(self.diagonal), _plain(self.beside)
        diag = _namespace(main).diag
        return diag(main) + diag(beside, 1 if self.upper else -1)


@dataclasses.dataclass(eq=False)
class Tridiagonal(Structured):
    """The matrix of a diagonal, of shape (n,), and those below and above it, of shape (n - 1,)."""

    diagonal: Any
    below: Any
    above: Any

    def read(self) -> Any:
        main, below, above = map(_plain, (self.diagonal, self.below, self.above))
        diag = _namespace(main).diag
        return diag(main) + diag(below, -1) + diag(above, 1)


@dataclasses.dataclass(eq=False)
class Cholesky(Structured):
    """The matrix of its factor, of shape (n, n): L L^H of the lower triangle, or U^H U."""

    factor: Any
    lower: bool = True

    def read(self) -> Any:
        x = _triangle(_plain(self.factor), upper=not self.lower, unit=False)
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
