"""What a tied tensor reads of its source, as a function that also pickles."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.proxy import TraceError

from tied._errors import TieError
from tied._layout import Layout, reinterpreted
from tied._lazy import adjoint, transpose
from tied.arrays import load
from tied.arrays.tensors import STEPS, reinterpret

View = Callable[..., torch.Tensor]
TORCH = load("torch")
"""What tensors say of themselves."""


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
        dtype: The source's dtype, as NumPy and PyTorch name it.
    """

    __slots__ = ("bits", "dtype", "layout", "order", "steps")

    def __init__(
        self, layout: Layout, shape: tuple[int, ...], order: tuple[int, ...], dtype: str
    ) -> None:
        plain = order == tuple(range(len(order)))
        self.order = None if plain else order
        shape = shape if plain else tuple(shape[axis] for axis in order)
        self.dtype, self.layout, self.bits = dtype, layout, ""
        inner: Layout | None = layout
        if layout.dtype is not None:
            self.bits, inner, shape = reinterpreted(layout.canonical(), shape, dtype)
        self.steps = None if inner is None else inner.steps(shape)

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        """Returns the reading, which shares the memory of `w` unless it gathers elements.

        Raises:
            NotImplementedError: It reads bits, and `w` has another dtype.
        """
        if self.order is not None:
            w = w.permute(self.order)
        if self.bits:
            w = self.reread(w)
        for step in self.steps or ():
            w = self.strided(w, step.args[0]) if step.op == "take" else STEPS[step.op](w, step)
        if self.bits and self.layout.conj:
            w = w.conj()
        return torch._neg_view(w) if self.bits and self.layout.neg else w

    def strided(self, w: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Returns a view of `w` that no row of ordinary operations makes (sliding windows)."""
        flat = flattened(w)[layout.offset :]
        (unit,) = flat.stride()
        return flat.as_strided(layout.shape, [step * unit for step in layout.strides])

    def reread(self, w: torch.Tensor) -> torch.Tensor:
        """Returns the bits of `w` as what the layout reads them as."""
        if self.bits in (".real", ".imag"):
            if not w.is_complex():
                raise NotImplementedError(f"{TORCH.dtype(w)} has no {self.bits[1:]} part")
            return w.real if self.bits == ".real" else w.imag
        if w.dtype is not getattr(torch, self.dtype):
            raise NotImplementedError(f"it reads the bits of {self.dtype}, not of {TORCH.dtype(w)}")
        if self.steps is None:
            return reinterpret(flattened(w), self.layout)
        bits = flattened(w).view(getattr(torch, str(self.layout.dtype)))
        return bits.view(*w.shape[:-1], w.shape[-1] * w.element_size() // bits.element_size())

    def __getstate__(self) -> Any:
        return [getattr(self, name) for name in self.__slots__]

    def __setstate__(self, state: Any) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)


def flattened(w: torch.Tensor) -> torch.Tensor:
    """Returns the elements of `w` in one row, as a view if they lie evenly.

    PyTorch gives a lone element any stride, with which it does not reread bits.
    """
    if w.is_contiguous():
        return w.as_strided((w.numel(),), (1,))
    return w.reshape(-1)


def of_layout(
    layout: Layout, shape: tuple[int, ...], order: tuple[int, ...], dtype: str
) -> View | None:
    """Returns the function that reads a source through a layout; None if it reads it as it is."""
    made = Reading(layout, shape, order, dtype)
    if made.bits:
        return made
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
