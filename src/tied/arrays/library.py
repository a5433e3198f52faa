"""What an array library must tell us. One subclass a library, in a file of its own name.

The rest of the package knows arrays only through this class. To add a library, write its subclass
and name it in `tied.arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from tied._layout import Layout
from tied._steps import Step


@dataclass(frozen=True, slots=True)
class Span:
    """Where an array lives.

    Attributes:
        device: The device, as its library writes it ("cpu", "cuda:0", "TFRT_CPU_0").
        allocation: What the byte range counts in: "memory" for addresses of the device, else the
            identity of the storage object (arrays without an address: `meta`, fake, traced).
        start: The first byte.
        stop: One past the last byte; equal to `start` for an empty array.
    """

    device: str
    allocation: str | int
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        """Returns whether the byte ranges meet (a hint: strided arrays may interleave)."""
        here = (self.device, self.allocation) == (other.device, other.allocation)
        return here and self.start < other.stop and other.start < self.stop


class Geometry:
    """Which elements of memory an array reads.

    Attributes:
        address: Where element 0 lies, in bytes.
        shape: The shape.
        strides: The strides, in bytes.
        itemsize: The bytes that an element takes.
        dtype: The dtype's name, to tell members that read the same bits differently.
        conj: Whether the elements are read conjugated.
        neg: Whether the elements are read negated.
    """

    __slots__ = ("_extent", "address", "conj", "dtype", "itemsize", "neg", "shape", "strides")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
        dtype: str,
        conj: bool = False,
        neg: bool = False,
    ) -> None:
        self.address = address
        self.shape = shape
        self.strides = strides
        self.itemsize = itemsize
        self.dtype = dtype
        self.conj = conj
        self.neg = neg
        self._extent: tuple[int, int] | None = None

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte that is read and one past the last (equal for an empty array)."""
        if self._extent is None:
            low = high = self.address
            for length, stride in zip(self.shape, self.strides, strict=True):
                if stride > 0:
                    high += stride * (length - 1)
                else:
                    low += stride * (length - 1)
            empty = 0 in self.shape
            self._extent = (self.address,) * 2 if empty else (low, high + self.itemsize)
        return self._extent


NO_HALVES = "Complex arrays can be float32 or float64 throughout: tied.f32, tied.f64"
KEEP_OUT = "Take it out of the model before the move, and give it to the model afterwards"

_dtype_names: dict[Any, str] = {}  # str(dtype) is slow


Place = tuple[Hashable, int, int, bool]
"""Space, first unit, one past the last, and whether the range is filled, in C order."""


class Library:
    """One array library. The methods take and give arrays of that library only.

    Attributes:
        leaf: That the instances are leaves, which those of a `Node` are not.
        name: The name by which it is loaded.
        strided: Whether one array can be a view of another.
        may_hold_objects: Whether `holds_objects` has to be asked.
        may_hang: Whether `extras` has to be asked.
    """

    leaf: ClassVar[bool] = True
    name: ClassVar[str]
    strided: ClassVar[bool] = True
    may_hold_objects: ClassVar[bool] = False
    may_hang: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.may_hang = cls.extras is not Library.extras

    def holds_objects(self, x: Any) -> bool:
        """Returns whether `x` is really a container (an array of Python objects)."""
        return False

    # -- where an array is, and what it is ------------------------------------------------------

    def place(self, x: Any) -> Place:
        """Returns the space that `x` lives in and the range that it spans there."""
        raise NotImplementedError

    def places(self, arrays: Sequence[Any]) -> list[Place]:
        """Returns `place` of each of many arrays."""
        return [self.place(x) for x in arrays]

    def geometry(self, x: Any) -> Geometry | None:
        """Returns what exactly `x` reads; `None` if it has no strides (sparse, quantised)."""
        raise NotImplementedError

    def span(self, x: Any) -> Span:
        """Returns where `x` lives, in bytes."""
        raise NotImplementedError

    def shape(self, x: Any) -> tuple[int, ...]:
        """Returns the shape."""
        return tuple(x.shape)

    def dtype(self, x: Any) -> str:
        """Returns the dtype's name in NumPy's spelling ("float32", "bfloat16")."""
        dtype = x.dtype
        name = _dtype_names.get(dtype)
        if name is None:
            name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
        return name

    def nbytes(self, x: Any) -> int:
        """Returns the bytes that the elements take."""
        return int(x.nbytes)

    def device(self, x: Any) -> str:
        """Returns the device, as the library writes it."""
        raise NotImplementedError

    def facts(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Returns the shapes, dtypes, bytes and devices, in the library's own terms.

        Four lists and not one of tuples: very many small objects cost the garbage collector time.
        """
        return (
            [self.shape(x) for x in arrays],
            [self.dtype(x) for x in arrays],
            [self.nbytes(x) for x in arrays],
            [self.device(x) for x in arrays],
        )

    def told(
        self, shape: Any, dtype: Any, nbytes: Any, device: Any
    ) -> tuple[tuple[int, ...], str, int, str]:
        """Returns the facts of one array in words."""
        return shape, dtype, nbytes, device

    def any_part(self, arrays: Sequence[Any]) -> bool:
        """Returns False if each array certainly begins its buffer, or has one of its own."""
        return False

    def buffer(self, x: Any) -> Hashable | None:
        """Returns which buffer `x` lies in; two arrays of one buffer need not share an element."""
        return None

    def meta(self, x: Any) -> Any:
        """Returns what a leaf has besides its elements (class, flags); `None` if it is plain."""
        return None

    def extras(self, x: Any, *, grads: bool) -> dict[str, Any] | None:
        """Returns what hangs on a leaf and may hold arrays: attributes, hooks, its gradient."""
        return None

    def compact(self, x: Any) -> Any:
        """Returns `x`, or a copy of it if pickling `x` would write more than its elements."""
        return x

    def twin(self, x: Any) -> Any:
        """Returns another object over the memory of a leaf, with all that its `meta` says."""
        raise NotImplementedError

    def attach(self, x: Any, extras: dict[str, Any]) -> None:
        """Hangs `extras` on a new leaf."""
        raise NotImplementedError

    # -- from storages to leaves ----------------------------------------------------------------

    def owner(self, members: Sequence[Any]) -> Any:
        """Returns the member of a tie through which the memory of all is reached."""
        return members[0]

    def widened(self, x: Any, low: int, high: int, unit: int) -> tuple[int, int]:
        """Returns a byte range that holds another and begins where elements of `unit` bytes may.

        It stays inside the allocation of `x`.
        """
        return low, high

    def window(self, x: Any, start: int, units: int) -> Any:
        """Returns the 1-D array of the `units` bytes from `start`, in the space of `x`."""
        raise NotImplementedError

    def tracked(self, x: Any, metas: Sequence[Any]) -> bool:
        """Returns whether all leaves over a storage `x` must pass gradients on to it."""
        return False

    def follows(self, meta: Any) -> bool:
        """Returns whether a leaf passes gradients on to the storage's own leaf."""
        return False

    def flat(self, x: Any, order: Sequence[int]) -> tuple[Any, bool]:
        """Returns `x` as a 1-D array, its axes taken in `order`, and whether that shares memory.

        A library without strides gives the array in `order`, not flattened.
        """
        raise NotImplementedError

    def read(
        self,
        flat: Any,
        base_shape: tuple[int, ...],
        layout: Layout,
        meta: Any,
        tracked: bool = False,
    ) -> Any:
        """Returns the leaf that reads `flat` through `layout`; `tracked` is as `tracked` says."""
        raise NotImplementedError

    def settled(self, before: Any, after: Any, kind: Any) -> Any:
        """Returns what stands in the place of a leaf that shares nothing, once `after` is made."""
        return self.dress(after, self.meta(before)) if kind is self else after

    def dress(self, x: Any, meta: Any) -> Any:
        """Returns `x` with what `meta` says: class, flags, attributes."""
        return x

    def apply(self, x: Any, steps: Sequence[Step]) -> Any:
        """Returns `x` after the steps of a layout, as ordinary operations of the library."""
        raise NotImplementedError

    def quiet(self) -> AbstractContextManager[Any]:
        """Returns a context in which operations on leaves of autograd are not recorded."""
        return nullcontext()

    def call(self, function: Any, x: Any) -> Any:
        """Calls `function` on a storage."""
        return function(x)

    def agrees(self, a: Any, b: Any) -> bool:
        """Returns whether two arrays hold the same bits (for traced arrays: are the same)."""
        raise NotImplementedError

    # -- operations ------------------------------------------------------------------------------

    def is_floating(self, x: Any) -> bool:
        """Returns whether the elements are floating, real or complex."""
        return False

    def cast(self, x: Any, dtype: str) -> Any:
        """Returns `x` in the floating dtype `dtype` (complex follows); `x` itself if not floating.

        Raises:
            DtypeError: The library has no such dtype.
        """
        raise NotImplementedError

    def copy(self, x: Any) -> Any:
        """Returns a copy with memory of its own."""
        raise NotImplementedError

    def empty(self, x: Any, device: Any) -> Any:
        """Returns an array of the same shape and dtype with unset elements."""
        raise NotImplementedError

    def zeros(self, x: Any) -> Any:
        """Returns an array of the same shape, dtype and device whose elements are 0."""
        raise NotImplementedError

    def scatter(self, shape: tuple[int, ...], layout: Layout, values: Any) -> Any:
        """Returns an array of `shape`, 0 but for `values`, each added where `layout` reads it."""
        raise NotImplementedError

    def of_numpy(self, function: Callable[[Any], Any], x: Any) -> Callable[[Any], Any]:
        """Returns what reads of a NumPy array what `function` reads of `x`, if it only reads."""
        return function

    def put(self, x: Any, layout: Layout, values: Any) -> Any:
        """Returns a copy of `x` (its elements in C order) with `values` where `layout` reads it."""
        raise NotImplementedError

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        """Returns the elements of all arrays, each in C order, as a new 1-D array."""
        raise NotImplementedError

    def as_dtype(self, x: Any, dtype: str) -> Any:
        """Returns `x` in a dtype; `x` itself if it has it. Complex to real drops the imaginary."""
        raise NotImplementedError

    def target(self, device: Any) -> Any:
        """Returns `device` as this library's own object; `None` if it means nothing here."""
        raise NotImplementedError

    def through(self, target: Any, layout: Layout | None, shape: tuple[int, ...]) -> Any:
        """Returns where a storage of `shape` is to be, if what reads it so is to be on `target`."""
        return target

    def move(self, x: Any, target: Any) -> Any:
        """Returns `x` on `target`; `x` itself if it is there."""
        raise NotImplementedError

    def accelerator(self) -> Any:
        """Returns the target of `gpu`; `None` if there is none."""
        return None

    def host(self) -> Any:
        """Returns the target of `cpu`; `None` if arrays are always there."""
        return None

    def to_numpy(self, x: Any) -> Any:
        """Returns a NumPy array that may share memory with `x`."""
        raise NotImplementedError

    def from_numpy(self, x: Any) -> Any:
        """Returns an array of this library with memory of its own."""
        raise NotImplementedError

    def alias(self, x: Any) -> Any:
        """Returns an array of this library over the memory of a NumPy array; `None` if it can't."""
        return None
