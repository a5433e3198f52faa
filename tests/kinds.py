"""The survival matrix's kinds of tie, each built fresh in NumPy, PyTorch and JAX from one table.

A kind is some memory and how its members read it, so what every member has to be after an
operation is known: what it reads of the memory after the operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

import oracle
import tied
from recipes import STRUCTURED, look

Ops = tuple[tuple[Any, ...], ...]
NAMES = ("first", "second")
ALL = ("numpy", "torch", "jax")


class Layer:
    """A layer of the user's own."""

    def __init__(self, w: Any) -> None:
        self.w = w


class Module(torch.nn.Module):
    """Members are parameters, buffers or plain attributes."""


@dataclass(frozen=True)
class Kind:
    """Memory of a shape and dtype, and the two members that read it.

    `bases` says for each member which of two pieces of memory it reads; `holds` how a torch module
    holds each: "p" parameter, "b" buffer, "a" plain attribute; `one` that they are one object.
    """

    first: Ops
    second: Ops
    shape: tuple[int, ...] = (8, 4)
    dtype: str = "float32"
    libraries: tuple[str, ...] = ALL
    tied: bool = True
    one: bool = False
    layer: bool = False
    meta: bool = False
    bases: tuple[int, int] = (0, 0)
    holds: str = "pp"

    @property
    def reads(self) -> tuple[Ops, Ops]:
        return self.first, self.second

    @property
    def paths(self) -> tuple[str, str]:
        return ("first.w", "second.w") if self.layer else NAMES

    def memory(self) -> np.ndarray:
        size = int(np.prod(self.shape))
        values = (np.arange(size, dtype=np.float32) + 1) / 8
        if self.dtype == "structured":
            memory = np.zeros(size, STRUCTURED)
            memory["x"], memory["n"] = values, np.arange(size)
            return memory.reshape(self.shape)
        if self.dtype == "complex64":
            return (values + 1j * (values + 0.5)).astype(np.complex64).reshape(self.shape)
        return values.astype(self.dtype).reshape(self.shape)

    def read(self, memory: np.ndarray) -> list[np.ndarray]:
        """What the members read, in NumPy; two pieces of memory hold the same."""
        return [np.asarray(see(memory, ops, "numpy")) for ops in self.reads]

    def gradients(self, model: Any) -> list[Any]:
        """For each member of a NumPy model a gradient of ones; None where there can be none."""
        members = self.members(model)
        ones = [np.ones(m.shape, m.dtype) if m.dtype.kind in "fc" else None for m in members]
        return [Layer(one) for one in ones] if self.layer else ones

    def arrays(self, library: str) -> list[Any]:
        """The two members, over fresh memory."""
        bases = [base_of(self.memory(), library) for _ in range(max(self.bases) + 1)]
        if self.meta:
            bases = [base.to("meta") for base in bases]
        members = [see(bases[i], ops, library)
                   for i, ops in zip(self.bases, self.reads, strict=True)]  # fmt: skip
        if self.one:
            members[1] = members[0]
        return members

    def model(self, library: str) -> Any:
        members = self.arrays(library)
        if self.layer:
            layer = Layer(members[0])
            return {"first": layer, "second": layer}
        return (
            module(members, self.holds)
            if library == "torch"
            else dict(zip(NAMES, members, strict=True))
        )

    def members(self, model: Any) -> list[Any]:
        return [oracle.resolve(model, path) if not self.layer else
                model[path.partition(".")[0]].w for path in self.paths]  # fmt: skip


def module(members: list[torch.Tensor], holds: str, cls: type[torch.nn.Module] = Module) -> Any:
    model = cls()
    made: dict[int, Any] = {}
    for name, tensor, role in zip(NAMES, members, holds, strict=True):
        if role == "p" and (tensor.is_floating_point() or tensor.is_complex()):
            made.setdefault(id(tensor), torch.nn.Parameter(tensor))
            setattr(model, name, made[id(tensor)])
        elif role == "b":
            model.register_buffer(name, tensor)
        else:
            setattr(model, name, tensor)
    return model


def base_of(memory: np.ndarray, library: str) -> Any:
    if library == "torch":
        return torch.from_numpy(memory)
    return jnp.array(memory) if library == "jax" else memory


def see(base: Any, ops: Ops, library: str) -> Any:
    if ops and ops[0][0] == "broadcast" and library == "jax":
        return tied.view(base, lambda a: np.broadcast_to(a, ops[0][1]))
    if ops == ADJOINT and library != "torch":
        return tied.adjoint(base)
    return look(base, ops, library) if ops else base


WHOLE: Ops = ()
ADJOINT: Ops = (("transpose",), ("conj",))


def rows(start: int, stop: int, step: int = 1) -> Ops:
    return (("slice", 0, start, stop, step),)


def columns(start: int, stop: int, step: int = 1) -> Ops:
    return (("slice", 1, start, stop, step),)


STRIDED = ("numpy", "torch")
KINDS = {
    "same_object": Kind(WHOLE, WHOLE, one=True),
    "same_layer_twice": Kind(WHOLE, WHOLE, layer=True),
    "second_array_over_the_same_data": Kind(WHOLE, (("again",),)),
    "transpose": Kind(WHOLE, (("transpose",),)),
    "permutation": Kind(WHOLE, (("permute", (2, 0, 1)),), shape=(4, 2, 3)),
    "row_slice": Kind(WHOLE, rows(1, 3)),
    "column_slice": Kind(WHOLE, columns(1, 3)),
    "strided_slice": Kind(WHOLE, rows(0, 8, 3)),
    "reshape": Kind(WHOLE, (("reshape", (2, 16)),)),
    "diagonal": Kind(WHOLE, (("diagonal", 0),)),
    "flip": Kind(WHOLE, (("flip", 1),), libraries=("numpy", "jax")),
    "broadcast": Kind(WHOLE, (("broadcast", (2, 8, 4)),)),
    "partial_overlap": Kind(rows(0, 5), rows(3, 8)),
    "buffer_not_in_the_model": Kind(rows(1, 4), (*rows(1, 4), ("transpose",)), shape=(80, 4)),
    "same_buffer_twice": Kind(WHOLE, WHOLE, one=True, holds="bb", libraries=("torch",)),
    "buffer_views_a_parameter": Kind(WHOLE, rows(2, 5), holds="pb", libraries=("torch",)),
    "real_part": Kind(WHOLE, (("real",),), dtype="complex64", libraries=STRIDED),
    "imaginary_part": Kind(WHOLE, (("imag",),), dtype="complex64", libraries=STRIDED),
    "conjugate_transpose": Kind(WHOLE, ADJOINT, dtype="complex64"),
    "field": Kind(WHOLE, (("field", "x"),), dtype="structured", libraries=("numpy",)),
    "byte_view": Kind(WHOLE, (("bytes",),), libraries=STRIDED, holds="pa"),
    "no_tie_disjoint_slices": Kind(rows(0, 4), rows(4, 8), tied=False),
    "no_tie_interleaved_columns": Kind(columns(0, 4, 2), columns(1, 4, 2), tied=False),
    "no_tie_empty_arrays": Kind(rows(2, 2), rows(2, 2), tied=False),
    "no_tie_equal_values": Kind(WHOLE, WHOLE, tied=False, bases=(0, 1)),
    "no_tie_meta": Kind(WHOLE, WHOLE, tied=False, bases=(0, 1), meta=True, libraries=("torch",)),
    "no_tie_one_after_the_other": Kind(
        (*rows(0, 12), ("reshape", (4, 3))), rows(12, 24), shape=(24,), tied=False
    ),
}
REINTERPRETED = {"real_part", "imaginary_part", "field", "byte_view"}


def gradient(kind: Kind, name: str) -> np.ndarray:
    """The gradient, by the memory, of the sum of the real parts of all floating members.

    The two members with equal values have each their own memory, and so each their own gradient.
    """
    memory = kind.memory()
    if name == "imaginary_part":
        return np.full(memory.shape, 1 + 1j, np.complex64)
    places = np.arange(memory.size).reshape(memory.shape)
    total = np.zeros(memory.size, memory.dtype)
    for ops in kind.reads[: 1 if name in ("byte_view", "no_tie_equal_values") else 2]:
        kept = tuple(op for op in ops if op[0] not in ("conj", "real"))
        np.add.at(total, look(places, kept, "numpy").reshape(-1), 1)
    return total.reshape(memory.shape)


def pattern(members: list[Any], unit: str) -> list[list[int]]:
    """Which elements (or bytes) of the members are one; `meta` by storage object and offset."""
    return oracle.pattern([place(x) for x in members], unit)


def place(x: Any) -> oracle.Positions:
    if isinstance(x, torch.Tensor) and x.is_meta:
        each = x.element_size()
        number = x.untyped_storage()._cdata % (1 << 40)
        start = (number << 20) + x.storage_offset() * each
        return start + oracle.grid(tuple(x.shape), tuple(each * s for s in x.stride())), each
    if isinstance(x, tied.View) and isinstance(x.base, torch.Tensor | np.ndarray):
        places, each = oracle.positions(x.base)
        return places.reshape(-1)[x.layout.index()], each
    return oracle.positions(x)


def value(x: Any) -> np.ndarray:
    """The elements in NumPy, lazy conjugates and `View`s read out."""
    if isinstance(x, tied.View):
        return value(x.read())
    if isinstance(x, torch.Tensor):
        x = x.detach().resolve_conj().resolve_neg()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if x.dtype == torch.complex32:
            return torch.view_as_real(x).numpy()
        return x.numpy()
    return np.asarray(x)
