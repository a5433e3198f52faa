"""What a tied tensor reads of its source, as a function that also pickles."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.proxy import TraceError

from tied._errors import TieError
from tied._layout import Layout
from tied._lazy import adjoint, transpose
from tied.arrays.tensors import STEPS, reinterpret

View = Callable[..., torch.Tensor]


def transposed(w: torch.Tensor) -> torch.Tensor:
    """Returns `w` with its axes reversed."""
    return w.t() if w.dim() == 2 else w.permute(tuple(range(w.dim()))[::-1])


def adjoined(w: torch.Tensor) -> torch.Tensor:
    """Returns `w` conjugated, with its axes reversed."""
    return transposed(w).conj()


def native(view: View) -> View:
    """Returns a quick twin of one of this library's own readings; any other function as it is."""
    return {transpose: transposed, adjoint: adjoined}.get(view, view)


class Reading:
    """Reads a tensor through a layout, with ordinary operations of PyTorch.

    Args:
        layout: What is read of the source's elements in the order of memory.
        shape: The source's shape.
        order: The source's axes in the order of memory.
    """

    __slots__ = ("base_shape", "layout", "order", "steps")

    def __init__(self, layout: Layout, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
        plain = order == tuple(range(len(order)))
        self.layout = layout
        self.order = None if plain else order
        self.base_shape = shape if plain else tuple(shape[axis] for axis in order)
        self.steps = layout.steps(self.base_shape) if layout.dtype is None else None

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        """Returns the reading, which shares the memory of `w` unless it gathers elements."""
        if self.order is not None:
            w = w.permute(self.order)
        if self.steps is None:
            w = reinterpret(w.reshape(-1), self.layout)
        else:
            for step in self.steps:
                w = STEPS[step.op](w, step)
        return w

    def __getstate__(self) -> Any:
        return self.layout, self.base_shape, self.order, self.steps

    def __setstate__(self, state: Any) -> None:
        self.layout, self.base_shape, self.order, self.steps = state


def of_layout(layout: Layout, shape: tuple[int, ...], order: tuple[int, ...]) -> View | None:
    """Returns the function that reads a source through a layout; None if it reads it as it is."""
    made = Reading(layout, shape, order)
    if made.steps is not None and len(shape) == 2 and all(s.op == "permute" for s in made.steps):
        turns = len(made.steps) + (made.order is not None)
        return transposed if turns % 2 else None
    return None if made.order is None and made.steps == () else made


class Traced:
    """The operations of a function that pickle can't find by its name, as `torch.fx` saw them."""

    __slots__ = ("program",)

    def __init__(self, program: Any) -> None:
        self.program = program

    def __call__(self, *sources: torch.Tensor) -> Any:
        """Runs the operations."""
        return self.program(*sources)

    def __getstate__(self) -> Any:
        return self.program

    def __setstate__(self, program: Any) -> None:
        self.program = program


def portable(function: Any, target: str) -> Any:
    """Returns a function, or what pickles in its place.

    Args:
        function: A view, its inverse, or None.
        target: The tied tensor, for errors.

    Raises:
        TieError: The function is a lambda or local, and does what can't be written down.
    """
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        pass
    else:
        return function
    try:
        return Traced(torch.fx.symbolic_trace(function))
    except (TraceError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise TieError(
            f"the view of {target} can't be pickled",
            facts=[("function", getattr(function, "__qualname__", repr(function)))],
            hint="Define it in a module, by name, in place of a lambda or a local function",
            paths=[target],
        ) from error
