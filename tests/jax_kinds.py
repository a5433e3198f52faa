"""The kinds of tie that JAX's survival matrix knows: some memory, and how the members read it.

Those of kinds.py that JAX can have, and those that need more than two members or a function that
computes. A reading is a function that NumPy and JAX arrays take; over NumPy's it is the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kinds
import oracle
import tied
from recipes import look

Read = Callable[[Any], Any]
NAMES = ("first", "second", "third")


def whole(a: Any) -> Any:
    return a


def normed(a: Any) -> Any:
    return a / (a**2).sum() ** 0.5


def real(a: Any) -> Any:
    return a.real


def imag(a: Any) -> Any:
    return a.imag


def product(a: Any) -> Any:
    """Computed of both halves of the memory, which are storages of their own."""
    return a[:8] * a[8:]


def adjoint(a: Any) -> Any:
    return a.T.conj()


@dataclass(frozen=True)
class Kind:
    """Memory of a shape and dtype, and the members that read it.

    `made` says how a user ties the members after the first by path: for each the source and what
    it reads of that; without it they are tied where the arrays are made. `one` says that members
    are one array, `layer` that they stand in one layer, `apart` that each has memory of its own.
    """

    reads: tuple[Read, ...]
    made: tuple[tuple[Any, Read], ...] = ()
    shape: tuple[int, ...] = (8, 4)
    dtype: str = "float32"
    tied: bool = True
    one: bool = False
    layer: bool = False
    apart: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.reads)]

    @property
    def computes(self) -> bool:
        return any(read in (normed, real, imag, product) for read in self.reads)

    @property
    def pieces(self) -> int:
        """How many storages there are."""
        return 2 if product in self.reads or not self.tied else 1

    def storages(self, memory: np.ndarray) -> list[np.ndarray]:
        """The storages' contents, where the first members are what is stored."""
        return self.read(memory)[: self.pieces]

    def memory(self) -> np.ndarray:
        values = (np.arange(int(np.prod(self.shape)), dtype=np.float32) + 1) / 8
        if self.dtype == "complex64":
            values = (values + 1j * (values + 0.5)).astype(np.complex64)
        return values.reshape(self.shape)

    def read(self, memory: np.ndarray) -> list[np.ndarray]:
        """What the members read; members with memory of their own hold the same."""
        # What is computed of halves, JAX computes more exactly than NumPy.
        wide = memory.astype(np.float64) if normed in self.reads else memory
        found = [np.asarray(read(wide)) for read in self.reads]
        return [x if x.dtype != np.float64 else x.astype(memory.dtype) for x in found]

    def pull(self, weights: list[np.ndarray], memory: np.ndarray) -> np.ndarray:
        """The gradient, by the memory, of the sum of the real parts of weights times members.

        By hand, as steps along it go down: for a complex number d/dx + i d/dy. Members that have
        memory of their own must have the same weights, and each counts alone.
        """
        places = np.arange(memory.size).reshape(memory.shape)
        total = np.zeros(memory.size, np.complex128)
        for read, weight in zip(self.reads, weights, strict=True):
            if read is normed:
                length = np.sqrt((memory**2).sum())
                along = (weight * memory).sum() / length**3
                total += (weight / length - memory * along).reshape(-1)
            elif read is product:
                total += np.concatenate([weight * memory[8:], weight * memory[:8]]).reshape(-1)
            else:
                where = (places if read in (real, imag) else read(places)).reshape(-1)
                add = np.put if self.apart else np.add.at
                add(total, where, (1j if read is imag else 1) * weight.reshape(-1))
        return (total if memory.dtype.kind == "c" else total.real).reshape(memory.shape)

    def gradient(self, memory: np.ndarray | None = None) -> np.ndarray:
        """The gradient of the sum of the real parts of all members."""
        memory = self.memory() if memory is None else memory
        return self.pull([np.ones(x.shape) for x in self.read(memory)], memory)

    def pattern(self) -> list[list[int]]:
        """Which elements of the members are one, by number."""
        places = np.arange(int(np.prod(self.shape))).reshape(self.shape)
        far = 1 << 20 if self.apart else 0
        return oracle.pattern([(read(places) + i * far, 1) for i, read in enumerate(self.reads)],
                              "elements")  # fmt: skip


def of_table(name: str, by_path: bool = True) -> Kind:
    """A kind of kinds.py; the second member is tied to the first by path where that is whole."""
    kind = kinds.KINDS[name]
    reads = tuple(functools.partial(look, ops=ops, library="numpy") if ops else whole
                  for ops in kind.reads)  # fmt: skip
    if kind.reads[1] == kinds.ADJOINT:
        reads = whole, adjoint
    made = (("first", reads[1]),) if by_path and reads[0] is whole and kind.tied else ()
    return Kind(reads, made, kind.shape, kind.dtype, kind.tied, kind.one, kind.layer, not kind.tied)


def times(a: Any, b: Any) -> Any:
    return a * b


LAYOUTS = """\
permutation row_slice column_slice strided_slice reshape diagonal flip broadcast
conjugate_transpose"""


def turned(a: Any) -> Any:
    return a.T


def two_rows(a: Any) -> Any:
    return a[1:3]


def rows_of_the_transpose(a: Any) -> Any:
    return a.T[1:3]


KINDS = {
    "same_array": of_table("same_object", by_path=False),
    "same_layer": of_table("same_layer_twice", by_path=False),
    "transpose": Kind((whole, turned), (("first", tied.transpose),)),
    **{name: of_table(name) for name in LAYOUTS.split()},
    "partial_overlap": of_table("partial_overlap"),
    "array_not_in_the_model": of_table("buffer_not_in_the_model"),
    "view_of_a_view": Kind(
        (whole, turned, rows_of_the_transpose), (("first", tied.transpose), ("second", two_rows))
    ),
    "one_source_to_many": Kind(
        (whole, turned, turned), (("first", tied.transpose), ("first", tied.transpose))
    ),
    "computed": Kind((whole, normed), (("first", normed),)),
    "computed_of_two": Kind(
        (lambda a: a[:8], lambda a: a[8:], product),
        ((), (("first", "second"), times)),
        shape=(16, 4),
    ),
    "real_part": Kind((whole, real), (("first", real),), dtype="complex64"),
    "imaginary_part": Kind((whole, imag), (("first", imag),), dtype="complex64"),
    "no_tie_equal_values": of_table("no_tie_equal_values"),
    "no_tie_one_buffer": Kind((whole, whole), tied=False, apart=True),
    "no_tie_slices": of_table("no_tie_disjoint_slices"),
    "no_tie_empty_arrays": of_table("no_tie_empty_arrays"),
    "no_tie_parts_of_one_split": Kind((lambda a: a[:4], lambda a: a[4:]), tied=False, apart=True),
}
