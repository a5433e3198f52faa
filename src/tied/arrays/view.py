"""A tied reading of an array where the library has no view for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tied import arrays
from tied._errors import TieError
from tied._layout import Layout
from tied.arrays.computed import Computed


class View(Computed):
    """A reading of another array that stays tied to it: a base and a layout.

    JAX arrays are never views of one another, NumPy has no lazy conjugate and PyTorch no negative
    stride; there a tie is a `View`. It computes like an array (operators, indexing, `.at`,
    `.astype`, `np.asarray`, every `jnp` function) and reads its base anew each time, so gradients
    reach the base. What it computes is a plain array; `.array()` is the plain array itself, and
    only `.T`, `.mT` and tied's own functions give another `View`.

    In JAX it is a pytree with the base as its one child. `jax.lax`, and `vmap` and `scan` over a
    bare `View`, refuse it, as they would take the base for it: give them `.array()`, map over the
    base, or give the whole model to `tied.Bundle`.

    Attributes:
        base: The array that is read; no copy of it is held.
        layout: Which elements of the base (flat, in C order) are read, and in which order.
        base_shape: The shape of the base that the layout counts in. Transforms of JAX may give a
            `View` another base (stacked, or none yet): such a one is passed on, but not read.

    >>> import jax.numpy as jnp, tied
    >>> v = tied.view(jnp.arange(12.0).reshape(4, 3), lambda W: W[1:3].T)
    >>> v
    View(base[1:3].T, shape=(3, 2), dtype=float32)
    >>> v.array().tolist()
    [[3.0, 6.0], [4.0, 7.0], [5.0, 8.0]]
    """

    __slots__ = ("base", "base_shape", "layout")

    def __init__(
        self, base: Any, layout: Layout, base_shape: tuple[int, ...] | None = None
    ) -> None:
        self.base = base
        self.layout = layout
        self.base_shape = tuple(base.shape) if base_shape is None else base_shape

    def read(self) -> Any:
        """Returns the elements as an ordinary array of the base's library (a copy, or a view)."""
        self.check()
        library = arrays.library_for(type(self.base))
        assert library is not None
        return library.apply(self.base, self.layout.steps(self.base_shape))

    def array(self) -> Any:
        """Returns the elements as a plain array of the base's library.

        In JAX it is a new array, as every array is; in NumPy and PyTorch it may share memory with
        the base. Gradients by the base flow through it.

        Raises:
            TieError: The base has not the shape that the `View` was made for.
        """
        return self.read()

    def check(self) -> None:
        """Raises `TieError` if the base has not the shape that the layout counts in."""
        shape = shape_of(self.base)
        if shape == self.base_shape:
            return
        if shape is None:
            raise TieError(
                f"the base of a View is no array: {type(self.base).__name__}",
                hint="A View that jax.tree.map gave other leaves is passed on, but not read",
            )
        if len(shape) + 1 == len(self.base_shape):
            raise mapped_over(self.base_shape, shape)
        raise TieError(
            "a View's base has another shape than the View was made for",
            facts=[("made for", str(self.base_shape)), ("found", str(shape))],
            hint="If bases are stacked, vmap over them and read inside; else take the view anew, or"
            " use v.array() before, or tied.Bundle(model)",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        self.check()
        return self.layout.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the base."""
        return self.base.dtype

    @property
    def T(self) -> View:
        """The transpose, tied to the same base."""
        return self.then(lambda x: x.T)

    @property
    def mT(self) -> View:
        """The transpose of the last two axes, tied to the same base."""
        return self.then(lambda x: np.swapaxes(x, -1, -2))

    def then(self, function: Callable[[Any], Any]) -> View:
        """Returns the `View` that `function` (a NumPy view of its argument) takes of this one."""
        layout = self.layout.then(function)
        if layout is None:
            raise TieError("this function computes; only a view of an array can be tied")
        return View(self.base, layout, self.base_shape)

    def __repr__(self) -> str:
        reads = self.layout.describe(self.base_shape, "base")
        shape = shape_of(self.base)
        if shape is None:
            return f"View({reads}, base={self.base!r})"
        if shape != self.base_shape:
            return f"View({reads}, base of shape {shape} instead of {self.base_shape})"
        return f"View({reads}, shape={self.layout.shape}, dtype={self.base.dtype})"

    def __reduce__(self) -> Any:
        return View, (self.base, self.layout, self.base_shape)


def shape_of(base: Any) -> tuple[int, ...] | None:
    """Returns the shape of a base; None for what JAX may put in the place of an array."""
    if isinstance(base, Computed):  # `jax.hessian` makes trees of trees
        return None
    shape = getattr(base, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) else None


def mapped_over(made_for: tuple[int, ...], found: tuple[int, ...]) -> TieError:
    """Returns the error for a base that has lost an axis, as `vmap` and `scan` take one."""
    return TieError(
        "vmap and scan can't map over a bare View: they would map an axis of its base",
        facts=[("base", str(made_for)), ("would be", str(found))],
        hint="Map over the base and take the view inside, or use tied.Bundle(model)",
    )
