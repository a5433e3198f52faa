"""JAX arrays, tracers, and `ShapeDtypeStruct`s."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import hijax

from tied._errors import DeviceError, DtypeError, TieError
from tied._layout import Layout
from tied._steps import Step, apply_steps
from tied.arrays import moves, sharding
from tied.arrays.library import KEEP_OUT, NO_HALVES, Geometry, Library, Place, Span
from tied.arrays.view import View, mapped_over

_config: Any = jax.config
_WIDE = ("float64", "complex128", "int64", "uint64")
_COMPLEX = {"float32": "complex64", "float64": "complex128"}


def claims(cls: type) -> bool:
    """Returns whether the instances of `cls` are leaves."""
    return issubclass(cls, (jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct))


def _needs_x64(dtype: str) -> None:
    if dtype in _WIDE and not _config.jax_enable_x64:
        raise DtypeError(
            f"JAX makes 32-bit arrays of {dtype} unless 64 bits are enabled",
            hint='Type: jax.config.update("jax_enable_x64", True)',
        )


class Jax(Library):
    """See `Library`. Arrays are never views of one another, so identity places them."""

    name = "jax"
    strided = False

    def place(self, x: Any) -> Place:
        return ("jax", id(x)), 0, 1 << 62, True

    def geometry(self, x: Any) -> Geometry:
        itemsize = x.dtype.itemsize
        strides = [itemsize]
        for length in reversed(x.shape[1:]):
            strides.insert(0, strides[0] * length)
        return Geometry(0, x.shape, tuple(strides[: x.ndim]), itemsize, str(x.dtype))

    def shape(self, x: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = x.shape
        return shape

    def span(self, x: Any) -> Span:
        nbytes = int(x.size * x.dtype.itemsize)
        try:
            address = x.unsafe_buffer_pointer()
        except (AttributeError, ValueError, RuntimeError, jax.errors.JAXTypeError):
            return Span(self.device(x), id(x), 0, nbytes)
        return Span(self.device(x), "memory", address, address + nbytes)

    def nbytes(self, x: Any) -> int:
        return int(x.size * x.dtype.itemsize)

    def device(self, x: Any) -> str:
        sharding = getattr(x, "sharding", None)
        if sharding is None or isinstance(x, jax.core.Tracer):
            return "traced" if isinstance(x, jax.core.Tracer) else "abstract"
        names = sorted(_device_name(device) for device in sharding.device_set)
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"

    def any_part(self, arrays: Sequence[Any]) -> bool:
        return True  # two arrays may be over the same buffer

    def buffer(self, x: Any) -> Any:
        try:
            return ("jax", x.unsafe_buffer_pointer()) if x.size else None
        except (AttributeError, ValueError, RuntimeError, jax.errors.JAXTypeError):
            return None

    def window(self, x: Any, start: int, units: int) -> Any:
        itemsize = x.dtype.itemsize
        if units == x.size * itemsize:
            return x
        return x.reshape(-1)[start // itemsize : (start + units) // itemsize]

    def flat(self, x: Any, order: Sequence[int]) -> tuple[Any, bool]:
        if list(order) == sorted(order):
            return x, True
        return x.transpose(order), False

    def read(
        self,
        flat: Any,
        base_shape: tuple[int, ...],
        layout: Layout,
        meta: Any,
        tracked: bool = False,
    ) -> Any:
        if layout.dtype is not None:
            raise TieError(
                f"JAX can't read the bits of an array as {layout.dtype}",
                hint="Give that leaf memory of its own (a copy) before the move",
            )
        return View(flat, layout)

    def apply(self, x: Any, steps: Sequence[Step]) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda x: apply_steps(x, steps), x)
        return apply_steps(x, steps)

    def agrees(self, a: Any, b: Any) -> bool:
        if a is b:
            return True
        if a.shape != b.shape or a.dtype != b.dtype or isinstance(a, jax.core.Tracer):
            return False
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        return bool(np.asarray(a).tobytes() == np.asarray(b).tobytes())

    def is_floating(self, x: Any) -> bool:
        return bool(jnp.issubdtype(x.dtype, jnp.inexact))

    def cast(self, x: Any, dtype: str) -> Any:
        if not self.is_floating(x):
            return x
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            if dtype not in _COMPLEX:
                raise DtypeError(f"JAX has no complex dtype of {dtype} parts", hint=NO_HALVES)
            dtype = _COMPLEX[dtype]
        if str(x.dtype) == dtype:
            return x
        _needs_x64(dtype)
        if isinstance(x, jax.ShapeDtypeStruct):
            return _updated(x, dtype=jnp.dtype(dtype))
        try:
            return x.astype(dtype)
        except TypeError as error:
            raise DtypeError(f"JAX has no dtype {dtype!r}") from error

    def copy(self, x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.array(jax.random.key_data(x), copy=True)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jnp.array(x, copy=True)

    def empty(self, x: Any, device: Any) -> Any:
        sharding = device if device is not None else getattr(x, "sharding", None)
        return jnp.empty(x.shape, x.dtype, device=sharding)

    def zeros(self, x: Any) -> Any:
        return jnp.zeros_like(x)

    def scatter(self, shape: tuple[int, ...], layout: Layout, values: Any) -> Any:
        flat = jnp.zeros(math.prod(shape), values.dtype)
        return flat.at[layout.index().reshape(-1)].add(values.reshape(-1)).reshape(shape)

    def of_numpy(self, function: Callable[[Any], Any], x: Any) -> Callable[[Any], Any]:
        return moves.of_numpy(function, x)

    def put(self, x: Any, layout: Layout, values: Any) -> Any:
        index = layout.index().reshape(-1)
        return x.reshape(-1).at[index].set(values.reshape(-1)).reshape(x.shape)

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        return jnp.concatenate([x.reshape(-1) for x in arrays] or [jnp.zeros(0)])

    def as_dtype(self, x: Any, dtype: str) -> Any:
        wanted = jnp.dtype(dtype)
        real = jnp.iscomplexobj(x) and not jnp.issubdtype(wanted, jnp.complexfloating)
        return (x.real if real else x).astype(wanted)

    def target(self, device: Any) -> Any:
        if isinstance(device, jax.sharding.PartitionSpec):
            return sharding.named(device)
        if isinstance(device, (jax.Device, jax.sharding.Sharding)):
            return device
        if not isinstance(device, str):
            return None
        platform, _, index = device.partition(":")
        if not platform or (index and not index.isdigit()):
            return None
        try:
            return jax.devices(platform)[int(index or 0)]
        except (RuntimeError, IndexError):
            return None

    def through(self, target: Any, layout: Layout | None, shape: tuple[int, ...]) -> Any:
        return sharding.of_storage(target, layout, shape)

    def move(self, x: Any, target: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return _updated(x, sharding=_as_sharding(target))
        if isinstance(x, jax.core.Tracer):
            return jax.device_put(x, target)
        if x.sharding == _as_sharding(target):
            return x
        sharding.must_fit(target, x.ndim)
        try:
            return jax.device_put(x, target)
        except ValueError as error:
            raise DeviceError(str(error)) from error

    def accelerator(self) -> Any:
        for platform in ("gpu", "tpu"):
            found = self.target(platform)
            if found is not None:
                return found
        return None

    def host(self) -> Any:
        return jax.devices("cpu")[0]

    def to_numpy(self, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise DtypeError("a JAX random key is no NumPy array", hint="See jax.random.key_data")
        return np.asarray(x)

    def from_numpy(self, x: Any) -> Any:
        _needs_x64(x.dtype.name)
        try:
            return jnp.asarray(np.array(x))  # JAX copies later than it returns (jax#37830)
        except TypeError as error:
            raise DtypeError(f"JAX has no dtype {x.dtype}", hint=KEEP_OUT) from error


def _updated(x: Any, **changes: Any) -> Any:
    return x.update(**changes)


def _as_sharding(target: Any) -> jax.sharding.Sharding:
    if isinstance(target, jax.sharding.Sharding):
        return target
    return jax.sharding.SingleDeviceSharding(target)


def _device_name(device: Any) -> str:
    return f"{device.platform}:{device.id}"


class Reading:
    """The static part of a `View`: what it reads, quick to hash and to compare.

    Its repr is what JAX's errors about structures print, so it says what to type.
    """

    __slots__ = ("_hash", "base_shape", "layout")

    def __init__(self, layout: Layout, base_shape: tuple[int, ...]) -> None:
        self.layout = layout
        self.base_shape = base_shape
        self._hash = hash((layout, base_shape))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Reading):
            return NotImplemented
        return (self.layout, self.base_shape) == (other.layout, other.base_shape)

    def __reduce__(self) -> Any:
        return Reading, (self.layout, self.base_shape)

    def __repr__(self) -> str:
        reads = self.layout.describe(self.base_shape, "base")
        return f"{reads}; v.array() is a plain array, tied.Bundle(model) a pytree of plain arrays"


_reading = lru_cache(maxsize=4096)(Reading)


def _flatten_view(x: View) -> tuple[tuple[Any, ...], Reading]:
    return (x.base,), _reading(x.layout, x.base_shape)


def _flatten_view_with_keys(x: View) -> Any:
    return ((_BASE, x.base),), _reading(x.layout, x.base_shape)


_BASE = jax.tree_util.GetAttrKey("base")


def _unflatten_view(reading: Reading, children: Any) -> View:
    """Puts a `View` together over whatever JAX gives it, which `View.check` looks at later.

    A tracer that has lost an axis is what `vmap` and `scan` give: refused at once, as a function
    that does not read it would be mapped over the wrong axis just the same.
    """
    (base,) = children
    made_for = reading.base_shape
    if isinstance(base, jax.core.Tracer):
        shape = base.shape
        if any(shape == made_for[:i] + made_for[i + 1 :] for i in range(len(made_for))):
            raise mapped_over(made_for, shape)
    return View(base, reading.layout, made_for)


def _refuse_view(x: View) -> Any:
    raise TieError(
        "JAX takes plain arrays only in this place, and this is a View",
        facts=[("view", repr(x))],
        hint="Give it v.array(), or use tied.Bundle(model), whose model has plain arrays",
    )


jax.tree_util.register_pytree_with_keys(
    View, _flatten_view_with_keys, _unflatten_view, _flatten_view
)
# JAX asks a type for its aval before it computes; its own refusal does not say what to type.
hijax.register_hitype(View, _refuse_view)

LIBRARY = Jax()
