"""Questions about a single PyTorch tensor, and operations that PyTorch has no one word for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tied._errors import TieError
from tied._layout import Layout
from tied._steps import Step

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of ordinary tensors, whose place is read off quickly."""


def is_sharded(cls: type) -> bool:
    """Returns whether instances are DTensors: the local part of a tensor on many devices."""
    return any(base.__name__ == "DTensor" for base in cls.__mro__)


def is_wrapped(x: torch.Tensor) -> bool:
    """Returns whether a transform of `torch.func` is at work on `x`."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def flows(x: torch.Tensor) -> bool:
    """Returns whether gradients flow through `x` to something before it."""
    if type(x) is torch.nn.Parameter:  # always a leaf
        return False
    return is_wrapped(x) or (x.requires_grad and not x.is_leaf)


def wants_all(x: torch.Tensor) -> bool:
    """Returns whether a storage is to get the gradients of all leaves that are put over it.

    A `Parameter` is put back as the leaf of autograd that it was.
    """
    return flows(x) or (x.requires_grad and not isinstance(x, torch.nn.Parameter))


def data_ptr(x: torch.Tensor) -> int:
    """Returns the address of an ordinary tensor; 0 for all that have none."""
    try:
        return 0 if x.is_meta else x.data_ptr()
    except RuntimeError:
        return 0


def address(x: torch.Tensor) -> int:
    """Returns the address of any tensor; 0 for those without one (`meta`, fake, traced)."""
    try:
        if x.untyped_storage().device.type == "meta":  # of fake tensors too
            return 0  # there a pointer is the offset, if it is anything (unsloth#7215)
        return x.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def recorded(operation: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Does an operation on a tensor that gradients flow through, so that they go on flowing."""
    with torch.enable_grad():
        return operation()


def is_only_python(cls: type) -> bool:
    """Returns whether a subclass only adds Python, and stores its elements as a tensor does."""
    own: Any = cls
    return own.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def sparse_parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the strided tensors that a sparse tensor is made of."""
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return []


def reinterpret(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns what reads the bits of a storage as another dtype."""
    dtype = getattr(torch, str(layout.dtype))
    unit = dtype.itemsize
    start = flat.storage_offset() * flat.element_size() + layout.offset
    if start % unit or any(stride % unit for stride in layout.strides):
        raise TieError(f"PyTorch can't read {dtype} elements at unaligned bytes")
    strides = tuple(stride // unit for stride in layout.strides)
    if flat.is_complex() and dtype == flat.dtype.to_real():
        pairs = torch.view_as_real(flat).reshape(-1)  # gradients pass through this one
        return pairs.as_strided(layout.shape, strides, start // unit)
    made = torch.empty(0, dtype=dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), start // unit, layout.shape, strides)


def _take(x: torch.Tensor, step: Step) -> torch.Tensor:
    (layout,) = step.args
    return x.reshape(-1)[torch.from_numpy(layout.index()).to(x.device)]


STEPS: dict[str, Any] = {
    "reshape": lambda x, step: x.reshape(step.args),
    "permute": lambda x, step: x.permute(step.args),
    "index": lambda x, step: x[step.key],
    "flip": lambda x, step: x.flip(step.args),
    "diagonal": lambda x, step: x.diagonal(*step.args),
    "broadcast": lambda x, step: x.expand(step.args),
    "conj": lambda x, step: x.conj(),
    "neg": lambda x, step: torch._neg_view(x),
    "take": _take,
}
