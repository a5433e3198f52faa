"""The cells of JAX's survival matrix: what each framework does by itself, and after `tied`."""

from __future__ import annotations

import contextlib
import functools
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from flax import errors

import equinox_operations
import jax_judge
import jax_operations
import linen_operations
import nnx_operations
import tied
from jax_hosts import HOSTS
from jax_kinds import KINDS
from jax_operations import Op

NEVER = "-"  # the operation can't be done to such a model
APART = "never tied"  # the framework has no tie of that kind: it held copies before

# What JAX and the tools around it raise where they can't do what they are asked.
PROBLEMS = (
    RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError,
    pickle.PicklingError, errors.FlaxError, Warning,
)  # fmt: skip

GROUPS: dict[str, dict[str, dict[str, Op]]] = {
    "jax": jax_operations.GROUPS,
    "equinox": equinox_operations.GROUPS,
    "nnx_graph": nnx_operations.GROUPS,
    "nnx_tree": nnx_operations.GROUPS,
    "linen": linen_operations.GROUPS,
}
OPS = {(host, key): op for host, groups in GROUPS.items()
       for ops in groups.values() for key, op in ops.items()}  # fmt: skip
Cell = tuple[str, str, str]  # host, kind, operation


@dataclass(frozen=True)
class Outcome:
    """What came of an operation: a word of the page, and the error, if any."""

    verdict: str
    error: Exception | None = None


@dataclass(frozen=True)
class Exempt:
    """Cells that are not *kept* after `tied`: which, how they end, and why that is right."""

    hosts: str
    kinds: str
    ops: str
    verdict: str
    error: type[Exception]
    text: str
    why: str

    def cells(self) -> list[Cell]:
        return [(host, name, op) for host in self.hosts.split()
                for op in self.ops.split() for name in self.kinds.split()]  # fmt: skip


VIEWS = """\
transpose permutation row_slice column_slice strided_slice reshape diagonal flip broadcast
conjugate_transpose partial_overlap array_not_in_the_model view_of_a_view one_source_to_many
computed computed_of_two real_part imaginary_part"""
EXEMPT = [
    Exempt(
        "jax", "no_tie_one_buffer", "donation", "error", jax.errors.JaxRuntimeError,
        "donate the same buffer twice",
        "Two arrays over one buffer are no tie, but JAX can't donate the buffer twice; "
        "`tied.check_donation` names them, and copies one with `dedup=True`.",
    ),
    Exempt(
        "equinox", VIEWS, "tree_at tree_at_second", "error", AttributeError,
        "other values are put in by bundle.set(",
        "`tree_at` looks for the place in a model that is computed of the storages. The error says "
        "what to type: `bundle.set`.",
    ),
    Exempt(
        "jax", "broadcast", "set_second", "refused", tied.TieError,
        "second.w can't be written through",
        "It reads each element twice, which need not agree.",
    ),
    Exempt(
        "jax", "computed real_part imaginary_part", "set_second", "refused", tied.TieError,
        "second.w is computed from first.w and can't be written to",
        "What is computed is written to through what it is computed of.",
    ),
    Exempt(
        "nnx_graph nnx_tree", "broadcast", "assign_second", "refused", tied.TieError,
        "second.w can't be assigned: it reads elements more than once from first.w",
        "As in a bundle.",
    ),
    Exempt(
        "nnx_graph nnx_tree", "computed real_part imaginary_part", "assign_second", "refused",
        tied.TieError, "second.w can't be assigned: it is computed from first.w",
        "As in a bundle; or the tie is given an `inverse`.",
    ),
]  # fmt: skip


def exempt(cell: Cell) -> Exempt | None:
    return next((e for e in EXEMPT if cell in e.cells()), None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings are errors; programs are compiled quickly, as each runs once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def apart(host: str, name: str) -> bool:
    """Whether the framework has no such tie: what it holds is no one object."""
    kind, there = KINDS[name], HOSTS[host]
    return kind.tied and not jax_judge.is_one(there, there.plain(name), kind)


def outcome(host: str, name: str, op: str, adopt: bool) -> Outcome:
    """Runs one cell."""
    kind, told = KINDS[name], OPS[host, op]
    if not told.on(name):
        return Outcome(NEVER)
    there = HOSTS[host]
    with quiet(), there.setting():
        if not adopt and apart(host, name):
            return Outcome(APART)
        try:
            model = there.tied_once(name) if adopt else there.plain(name)
            result = told.run(model, there, name)
            now = told.memory(name)(kind.memory())
            if adopt:
                return Outcome(jax_judge.judge_tied(there, result, name, now))
            return Outcome(jax_judge.judge_plain(there, result, kind, now))
        except tied.TiedError as error:
            return Outcome("refused", error.with_traceback(None))
        except PROBLEMS as error:
            return Outcome("error", error.with_traceback(None))


def pair(host: str, name: str, op: str) -> tuple[Outcome, Outcome]:
    """What the framework does by itself, and after `tied`."""
    return outcome(host, name, op, False), outcome(host, name, op, True)


def all_cells() -> dict[Cell, tuple[str, str]]:
    """Runs the matrix; takes a minute or two."""
    found = {}
    for host, op in OPS:
        for name in KINDS:
            alone, after = pair(host, name, op)
            found[host, name, op] = alone.verdict, after.verdict
    return found
