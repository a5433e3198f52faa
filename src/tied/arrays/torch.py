"""PyTorch tensors: parameters, buffers, `meta`, fake, sharded and traced tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from tied._errors import DeviceError, DtypeError, TieError
from tied._layout import Layout
from tied._steps import Step
from tied.arrays.library import KEEP_OUT, NO_HALVES, Geometry, Library, Place, Span
from tied.arrays.numpy import Window
from tied.arrays.tensors import (
    PLAIN,
    STEPS,
    address,
    data_ptr,
    flows,
    is_only_python,
    is_sharded,
    is_wrapped,
    recorded,
    reinterpret,
    sparse_parts,
    wants_all,
)
from tied.arrays.view import View

_COMPLEX = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}
_CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # quicker than `to`
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    "float32": torch.Tensor.float,
    "float64": torch.Tensor.double,
}
_spaces: dict[torch.device, str] = {torch.device("cpu"): "cpu"}


def claims(cls: type) -> bool:
    """Returns whether the instances of `cls` are leaves.

    Subclasses that wrap other tensors (`__tensor_flatten__`) come apart; a DTensor is one leaf.
    """
    if not issubclass(cls, torch.Tensor):
        return False
    if any(base.__name__ == "UninitializedTensorMixin" for base in cls.__mro__):
        return False
    return not hasattr(cls, "__tensor_flatten__") or is_sharded(cls)


class Torch(Library):
    """See `Library`."""

    name = "torch"

    def places(self, arrays: Sequence[torch.Tensor]) -> list[Place]:
        found: list[Place] = []
        append, spaces, plain = found.append, _spaces, PLAIN
        for x in arrays:
            try:
                if type(x) in plain and x.is_contiguous():
                    start, space = x.data_ptr(), spaces.get(x.device)
                    if start and space is not None:
                        append((space, start, start + x.nbytes, True))
                        continue
            except RuntimeError:  # sparse, or traced
                pass
            append(self.place(x))
        return found

    def place(self, x: torch.Tensor) -> Place:
        geometry = self.geometry(x)
        if geometry is None:
            return ("object", id(x)), 0, 1, True
        if x.numel() == 0:
            return ("empty", id(x)), 0, 0, True
        return self._space_of(x), *geometry.extent, x.is_contiguous()

    def _space_of(self, x: torch.Tensor) -> Any:
        if is_sharded(type(x)):
            return ("sharded", x._local_tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
        if address(x):
            return _spaces.setdefault(x.device, str(x.device))
        return ("storage", x.untyped_storage()._cdata)

    def geometry(self, x: torch.Tensor) -> Geometry | None:
        if x.layout is not torch.strided or x.is_quantized:
            return None
        itemsize = x.element_size()
        if type(x) in PLAIN and (start := data_ptr(x)):
            shape, strides = tuple(x.shape), tuple([stride * itemsize for stride in x.stride()])
            if x.is_complex() or x.is_neg():
                flags = x.is_conj(), x.is_neg()
                return Geometry(start, shape, strides, itemsize, self.dtype(x), *flags)
            return Geometry(start, shape, strides, itemsize, self.dtype(x))
        part = x._local_tensor if is_sharded(type(x)) else x  # type: ignore[attr-defined]
        try:
            strides = tuple(stride * itemsize for stride in x.stride())
            part.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        offset = int(part.storage_offset()) * itemsize
        return Geometry(
            offset if part is not x else address(x) or offset,
            tuple(x.shape),
            strides,
            itemsize,
            self.dtype(x),
            x.is_conj(),
            x.is_neg(),
        )

    def span(self, x: torch.Tensor) -> Span:
        if is_sharded(type(x)):
            return self.span(x._local_tensor)  # type: ignore[attr-defined]
        geometry = self.geometry(x)
        device = self.device(x)
        if geometry is None:
            return Span(device, id(x), 0, self.nbytes(x))
        start, stop = geometry.extent
        allocation = "memory" if address(x) else x.untyped_storage()._cdata
        return Span(device, allocation, start, stop if x.numel() else start)

    def nbytes(self, x: torch.Tensor) -> int:
        if x.layout is torch.strided:
            return int(x.numel() * x.element_size())
        return sum(part.nbytes for part in sparse_parts(x))

    def device(self, x: torch.Tensor) -> str:
        return str(x.device)

    def facts(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        strided, nbytes = torch.strided, self.nbytes
        return (
            [tuple(x.shape) for x in arrays],
            [x.dtype for x in arrays],
            [None if x.layout is strided else nbytes(x) for x in arrays],
            [x.device for x in arrays],
        )

    def told(
        self, shape: Any, dtype: Any, nbytes: Any, device: Any
    ) -> tuple[tuple[int, ...], str, int, str]:
        if nbytes is None:
            nbytes = math.prod(shape) * dtype.itemsize
        return shape, str(dtype).removeprefix("torch."), nbytes, str(device)

    def any_part(self, arrays: Sequence[torch.Tensor]) -> bool:
        strided = torch.strided
        try:
            return any(x.storage_offset() for x in arrays if x.layout is strided)
        except (RuntimeError, NotImplementedError):
            return True

    def buffer(self, x: torch.Tensor) -> Any:
        if x.layout is not torch.strided or x.numel() == 0:
            return None
        try:
            storage = x.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        return ("torch", storage._cdata)

    def twin(self, x: torch.Tensor) -> torch.Tensor:
        return self.dress(x.detach(), self.meta(x))

    def meta(self, x: torch.Tensor) -> Any:
        cls = type(x)
        if cls is torch.Tensor and not x.requires_grad:
            return None
        return cls, x.requires_grad, not x.is_leaf

    def extras(self, x: torch.Tensor, *, grads: bool) -> dict[str, Any] | None:
        hooks, after = x._backward_hooks, x._post_accumulate_grad_hooks
        own = x.__dict__
        has_grad = grads and x.is_leaf and x.grad is not None
        if not (has_grad or own or hooks or after):
            return None
        found: dict[str, Any] = {"grad": x.grad} if has_grad else {}
        found.update(own)
        if hooks:
            found["_backward_hooks"] = hooks.copy()
        if after:
            found["_post_accumulate_grad_hooks"] = after.copy()
        return found

    def compact(self, x: torch.Tensor) -> torch.Tensor:
        if x.layout is not torch.strided or x.is_meta or type(x) not in PLAIN:
            return x
        if x.untyped_storage().nbytes() <= x.nbytes:
            return x
        return self.dress(x.detach().clone(), self.meta(x))

    def attach(self, x: torch.Tensor, extras: dict[str, Any]) -> None:
        for name, value in extras.items():
            setattr(x, name, value)

    def widened(self, x: torch.Tensor, low: int, high: int, unit: int) -> tuple[int, int]:
        if is_sharded(type(x)):
            return low, high
        offset = int(x.storage_offset()) * x.element_size()
        first = address(x) - offset if address(x) else 0
        last = first + x.untyped_storage().nbytes()
        start, stop = low - (low - first) % unit, high + (first - high) % unit
        return start, stop if stop <= last else high

    def window(self, x: torch.Tensor, start: int, units: int) -> torch.Tensor:
        x = x.detach()
        x = x.conj() if x.is_conj() else x
        x = torch._neg_view(x) if x.is_neg() else x
        itemsize = x.element_size()
        first = address(x) - x.storage_offset() * itemsize if address(x) else 0
        inside = start >= first and start + units <= first + x.untyped_storage().nbytes()
        if units % itemsize or not inside or is_sharded(type(x)):
            return self._foreign_window(x, start, units)
        return x.as_strided((units // itemsize,), (1,), (start - first) // itemsize)

    def _foreign_window(self, x: torch.Tensor, start: int, units: int) -> torch.Tensor:
        if x.device.type != "cpu" or is_sharded(type(x)) or not address(x):
            raise TieError("leaves over separate allocations of a device can't be read as one")
        memory = torch.from_numpy(np.asarray(Window(x, start, units, writeable=True)))
        return memory.view(x.dtype) if units % x.element_size() == 0 else memory

    def tracked(self, x: torch.Tensor, metas: Sequence[Any]) -> bool:
        return wants_all(x) or (x.requires_grad and not any(map(_is_leaf, metas)))

    def follows(self, meta: Any) -> bool:
        return meta is not None and bool(meta[2])

    @torch.enable_grad()
    def flat(self, x: torch.Tensor, order: Sequence[int]) -> tuple[torch.Tensor, bool]:
        if x.is_conj() or x.is_neg():
            return x.resolve_conj().resolve_neg().permute(tuple(order)).reshape(-1), False
        if len(order) == 1 and x.is_contiguous():
            return x, True
        if is_sharded(type(x)):
            return x.permute(tuple(order)), True  # flattened, its shards would be gathered
        y = x.permute(tuple(order)).reshape(-1)
        return y, y._is_view() or y is x

    @torch.enable_grad()
    def read(
        self,
        flat: Any,
        base_shape: tuple[int, ...],
        layout: Layout,
        meta: Any,
        tracked: bool = False,
    ) -> Any:
        connected = (flat.requires_grad and (tracked or self.follows(meta))) or is_wrapped(flat)
        if not connected:
            flat = flat.detach()
        if min(layout.strides, default=0) < 0:
            return View(flat.reshape(base_shape), layout)
        if layout.dtype is not None:
            x = reinterpret(flat, layout)
        elif connected or type(flat) not in PLAIN:
            steps = Layout(layout.shape, layout.strides, layout.offset).steps(base_shape)
            x = self.apply(flat.reshape(base_shape), steps)
        else:
            start = flat.storage_offset() + layout.offset
            x = flat.detach().as_strided(layout.shape, layout.strides, start)
        x = x.conj() if layout.conj else x
        x = torch._neg_view(x) if layout.neg else x
        if meta is None and type(x) is not torch.Tensor and is_only_python(type(x)):
            x = x.as_subclass(torch.Tensor)
        return x if connected else self.dress(x, meta)

    def dress(self, x: torch.Tensor, meta: Any) -> torch.Tensor:
        if meta is None:
            return x
        cls, requires_grad, _ = meta
        if cls is torch.nn.Parameter and not x.requires_grad and not is_wrapped(x):
            grows = requires_grad and (x.is_floating_point() or x.is_complex())
            if type(x) is torch.Tensor:
                made: torch.Tensor = torch.Tensor._make_subclass(cls, x, grows)
                return made
        if wants_all(x) or (type(x) is cls and x.requires_grad == requires_grad):
            return x
        requires_grad = requires_grad and (x.is_floating_point() or x.is_complex())
        if not is_sharded(cls) and cls is not torch.Tensor:
            made = torch.Tensor._make_subclass(cls, x.detach(), requires_grad)
            return made
        return x.detach().requires_grad_(requires_grad)

    def apply(self, x: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
        for step in steps:
            x = STEPS[step.op](x, step)
        return x

    def quiet(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def call(self, function: Any, x: torch.Tensor) -> Any:
        """Calls `function` on a storage; an autograd leaf is given to it outside of autograd."""
        if not x.requires_grad or flows(x):
            return function(x)
        with torch.no_grad():
            return function(x)

    def agrees(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        if a is b:
            return True
        if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
            return False
        return bool(self.to_numpy(a).tobytes() == self.to_numpy(b).tobytes())

    def is_floating(self, x: torch.Tensor) -> bool:
        return x.is_floating_point() or x.is_complex()

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        convert = _CASTS.get(dtype)
        if convert is not None and x.is_floating_point():
            return recorded(lambda: convert(x)) if flows(x) else convert(x)
        if x.is_complex():
            if dtype not in _COMPLEX:
                raise DtypeError(f"PyTorch has no complex dtype of {dtype} parts", hint=NO_HALVES)
            dtype = _COMPLEX[dtype]
        elif not x.is_floating_point():
            return x
        wanted = getattr(torch, dtype, None)
        if not isinstance(wanted, torch.dtype):
            raise DtypeError(f"PyTorch has no dtype {dtype!r}")
        if x.dtype == wanted:
            return x
        return recorded(lambda: x.to(wanted)) if flows(x) else x.to(wanted)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone()

    def empty(self, x: torch.Tensor, device: Any) -> torch.Tensor:
        return torch.empty_like(x.detach(), device=device)

    def zeros(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x.detach())

    def scatter(self, shape: tuple[int, ...], layout: Layout, values: Any) -> torch.Tensor:
        index = torch.from_numpy(layout.index().reshape(-1)).to(values.device)
        flat = torch.zeros(int(np.prod(shape)), dtype=values.dtype, device=values.device)
        return flat.index_add(0, index, values.reshape(-1)).reshape(shape)

    def concatenate(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        if not arrays:
            return torch.zeros(0)
        dtype = arrays[0].dtype
        for x in arrays:
            dtype = torch.promote_types(dtype, x.dtype)
        flat = [x if flows(x) else x.detach() for x in arrays]
        return torch.cat([x.reshape(-1).to(dtype) for x in flat])

    def as_dtype(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        wanted = getattr(torch, dtype)
        return (x.real if x.is_complex() and not wanted.is_complex else x).to(wanted)

    def target(self, device: Any) -> torch.device | None:
        if not isinstance(device, (str, torch.device)):
            return None
        try:
            target = torch.device(device)
        except RuntimeError:
            return None
        if target.type not in ("cpu", "meta"):
            try:
                torch.empty(0, device=target)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                raise DeviceError(
                    f"PyTorch can't use the device {str(device)!r}",
                    facts=[("PyTorch says", str(error).splitlines()[0])],
                    hint='Type "cpu" or "meta", or install a PyTorch with that device',
                ) from error
        return target

    def move(self, x: torch.Tensor, target: torch.device) -> torch.Tensor:
        if x.is_meta and target.type != "meta":
            raise _no_elements(str(target))
        return recorded(lambda: x.to(target)) if flows(x) else x.to(target)

    def accelerator(self) -> torch.device | None:
        return torch.accelerator.current_accelerator(check_available=True)

    def host(self) -> torch.device:
        return torch.device("cpu")

    def to_numpy(self, x: torch.Tensor) -> Any:
        x = x.detach().resolve_conj().resolve_neg()
        if x.is_meta:
            raise _no_elements("cpu")
        if x.layout is not torch.strided or x.is_quantized:
            raise DtypeError("a sparse or quantised tensor is no NumPy array", hint=KEEP_OUT)
        x = x.cpu()
        name = self.dtype(x)
        if name.startswith(("bfloat", "float8")):
            from tied.arrays.numpy import parse_dtype

            bits = torch.int16 if x.element_size() == 2 else torch.uint8
            return x.view(bits).numpy().view(parse_dtype(name))
        return x.numpy()

    def from_numpy(self, x: Any) -> torch.Tensor:
        x = np.array(x, order="K")
        if x.dtype.name.startswith(("bfloat", "float8")):
            bits = np.int16 if x.itemsize == 2 else np.uint8
            return torch.from_numpy(x.view(bits)).view(getattr(torch, x.dtype.name))
        try:
            return torch.from_numpy(x)
        except TypeError as error:
            raise DtypeError(f"PyTorch has no dtype {x.dtype}", hint=KEEP_OUT) from error

    def alias(self, x: Any) -> torch.Tensor | None:
        return torch.from_numpy(x) if x.flags.writeable else None


def _no_elements(target: str) -> DeviceError:
    return DeviceError(
        "a meta tensor has no elements to move",
        hint=f'Type: tied.empty(model, "{target}"), then fill or load it',
    )


def _is_leaf(meta: Any) -> bool:
    """Returns whether a leaf of the model was a leaf of autograd that wants a gradient."""
    return meta is not None and bool(meta[1]) and not meta[2]


LIBRARY = Torch()
