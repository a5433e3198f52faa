"""Recipes that broke a law once, held for good (the random draws may not meet them again)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import oracle
import tied
from recipes import Buffer, Leaf, Node, Op, Reading, Recipe
from test_laws import CLONE, assert_ties_of_plan

OPERATIONS: dict[str, Callable[[Any, str], Any]] = {
    "merge_of_split": lambda m, library: tied.merge(*tied.split(m)),
    "map": lambda m, library: tied.map(CLONE[library], m),
    "copy": lambda m, library: tied.copy(m),
    "pickle_of_split": lambda m, library: tied.merge(*oracle.through_pickle(tied.split(m))),
}


def recipe(library: str, dtype: str, shape: tuple[int, ...], *chains: tuple[Op, ...]) -> Recipe:
    """One buffer, read through each of the chains of operations."""
    readings = tuple(Reading(0, chain) for chain in chains)
    root = Node("plain", tuple(Leaf(number) for number in range(len(chains))))
    return Recipe(library, (Buffer(dtype, shape, 1),), readings, root)


FOUND: dict[str, Recipe] = {
    "an_empty_view_alone": recipe("jax", "float32", (6,), (("slice", 0, 3, 3, 1),)),
    "an_empty_view_of_nothing": recipe("jax", "float32", (0, 3), (("newaxis", 0),)),
    "no_axis_and_a_view_of_it": recipe("numpy", "float32", (), (), (("newaxis", 0),)),
    "no_axis_read_only": recipe("numpy", "float32", (4, 3), (("diagonal", 0), ("int", 0, -1))),
    "conjugate_and_imaginary_part": recipe("torch", "complex64", (3,), (("conj",),), (("imag",),)),
    "conjugate_and_real_part": recipe("torch", "complex64", (1,), (("conj",),), (("real",),)),
    "real_part_and_first_row": recipe(
        "torch", "complex64", (4, 3), (("slice", 0, 0, 1, 1),), (("real",),)
    ),
    "bytes_and_one_element_with_a_step": recipe(
        "torch", "float32", (1,), (("bytes",),), (("slice", 0, 0, 1, 2),)
    ),
    "part_of_the_bytes_and_a_row": recipe(
        "torch",
        "float32",
        (4, 3),
        (("bytes",), ("slice", 1, 1, 10, 1)),
        (("slice", 0, 1, 3, 1),),
    ),
    "bytes_that_end_in_an_element": recipe(
        "numpy", "float32", (6,), (("bytes",), ("slice", 0, 1, 10, 1)), (("slice", 0, 1, 5, 2),)
    ),
    "fields_that_interleave": recipe(
        "numpy", "structured", (4,), (("field", "x"),), (("field", "n"),), (("field", "v"),)
    ),
    "windows_and_a_flip": recipe(
        "numpy", "float32", (12,), (("window", 3),), (("flip", 0), ("slice", 0, 2, 9, 2))
    ),
}
# Not by a draw of several arrays: a container without arrays that holds itself.
FOUND["a_deque_that_holds_itself"] = Recipe(
    "torch",
    (Buffer("float32", (6,), 1),),
    (Reading(0),),
    Node("namedtuple", (Leaf(0), Node("deque", ()))),
    ((1, 1),),
)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, operation: str) -> None:
    built = FOUND[name].build()
    assert_ties_of_plan(built, built.model)
    after = OPERATIONS[operation](built.model, FOUND[name].library)
    oracle.assert_same(built.model, after)
    assert_ties_of_plan(built, after)
    assert [oracle.flags(a)[:1] for a in oracle.arrays(after)] == [
        oracle.flags(a)[:1] for a in oracle.arrays(built.model)
    ]


@pytest.mark.parametrize("name", FOUND)
def test_found_skeletons_compare(name: str) -> None:
    first, second = (tied.split(FOUND[name].build().model)[0] for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
