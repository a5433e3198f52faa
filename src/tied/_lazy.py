"""Tied readings of an array: `transpose`, `view`, `diagonal` and their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tied import arrays
from tied._errors import TiedError
from tied._layout import Layout
from tied._structured import Derived
from tied.arrays.computed import Computed
from tied.arrays.library import Library
from tied.arrays.view import View


def view(a: Any, fn: Callable[[Any], Any]) -> Any:
    """Reads an array in another way and stays tied to it.

    Args:
        a: An array of NumPy, PyTorch or JAX, or a `View`.
        fn: Takes an array and returns a view of it: `lambda W: W[1:3]`, `jnp.flip`. If it computes
            instead, the result is a `Derived`; in JAX that is so for `W.real` too.

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
        owner = arrays.library_for(type(a.base))
        assert owner is not None
        layout = a.layout.then(owner.of_numpy(fn, a), dtype=_dtype(a))
        if layout is None or _rereads(owner, layout):
            return Derived(a, fn)
        return View(a.base, layout, a.base_shape)
    library = arrays.library_for(type(a))
    if library is None:
        if isinstance(a, Computed):
            return Derived(a, fn)
        raise TiedError(f"{type(a).__name__} is no array", hint="Give an array or a tied.View")
    if library.name == "torch":
        return _torch_view(a, fn)
    layout = Layout.of(library.of_numpy(fn, a), tuple(a.shape), dtype=_dtype(a))
    if layout is None or _rereads(library, layout):
        return Derived(a, fn)
    if library.strided and not (layout.conj or layout.neg):
        return fn(a)
    return View(a, layout)


def _rereads(library: Library, layout: Layout) -> bool:
    """Returns whether a layout reads bits as another dtype where the library has no such view."""
    return layout.dtype is not None and not library.strided


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
