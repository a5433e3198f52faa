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
    stride; there a tie is a `View`. It computes like an array (operators, `.T`, indexing,
    `np.asarray`, `jnp` functions) and reads its base anew each time, so gradients reach the base.

    In JAX it is a pytree with the base as its one child. `vmap` and `scan` over a bare `View` would
    map an axis of the base, and are refused; map over the base, or give the whole model to
    `tied.Bundle`.

    Attributes:
        base: The array that is read; no copy of it is held.
        layout: Which elements of the base (flat, in C order) are read, and in which order.
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
        shape = tuple(self.base.shape)
        if shape != self.base_shape:
            raise TieError(
                "a View's base has another shape than the View was made for",
                facts=[("made for", str(self.base_shape)), ("found", str(shape))],
                hint="vmap and scan can't map over a bare View: map over its base, or use"
                " tied.Bundle(model)",
            )
        library = arrays.library_for(type(self.base))
        assert library is not None
        return library.apply(self.base, self.layout.steps(self.base_shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
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
        return f"View({self.layout.describe(self.base_shape, 'base')}, shape={self.shape})"

    def __reduce__(self) -> Any:
        return View, (self.base, self.layout, self.base_shape)
