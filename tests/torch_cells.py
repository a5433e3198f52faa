"""The cells of PyTorch's survival matrix: what it does by itself, and after `tied.tie(model)`."""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import tied
import torch_judge
from kinds import KINDS
from torch_judge import Program
from torch_operations import OPS, Child, prepared, process_group, spawned

NAMES = [name for name, kind in KINDS.items() if "torch" in kind.libraries]
SPAWN, DDP = "spawn", "ddp"  # these need processes
NEVER = "-"  # the operation can't be done to such a model

# What PyTorch, safetensors and ONNX raise where they can't do what they are asked.
PROBLEMS = (
    RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError,
    pickle.PicklingError, Warning,
)  # fmt: skip
# Warnings of PyTorch about itself.
KNOWN = (
    "`torch.jit.trace` is deprecated",
    "`torch.jit.trace_method` is deprecated",
    "`torch.jit.script_method` is deprecated",
    "`isinstance(treespec, LeafSpec)` is deprecated",
    "No complete tensor found in the group!",
    "Casting complex values to real discards the imaginary part",
)


@dataclass(frozen=True)
class Outcome:
    """What came of an operation: a word of the table in docs/matrix.md; and the error, if any."""

    verdict: str
    error: Exception | None = None
    stored: int | None = None  # the bytes of a program's weights


@dataclass(frozen=True)
class Exempt:
    """Cells that are not *kept* after `tied.tie`: which, how they end, and why that is right."""

    kinds: str
    ops: str
    verdict: str
    error: type[Exception]
    text: str
    why: str

    def cells(self) -> list[tuple[str, str]]:
        return [(name, op) for name in self.kinds.split() for op in self.ops.split()]


DTYPES = {"to_dtype": "float64", "double": "float64", "half": "float16", "bfloat16": "bfloat16"}
CAST = """\
second can't be computed from what first is now
  tie    second reads first
  now    Parameter, {dtype}
  error  %s
  Untie it first: tied.untie(model, "second")"""
MISSING = """\
Error(s) in loading state_dict for Pair:
\tMissing key(s) in state_dict: "%s".\x20"""
REPEATED = (
    MISSING % "first"
    + """
\tUnexpected key(s) in state_dict: "second".\x20"""
)
PARTS_ONLY = """\
row_slice column_slice strided_slice diagonal buffer_views_a_parameter real_part imaginary_part"""
EXEMPT = [
    Exempt(
        "byte_view", " ".join(DTYPES), "refused", tied.TieError,
        CAST % "it reads the bits of float32, not of {dtype}",
        "The bytes of the old numbers mean nothing after a cast; reading them says so.",
    ),
    Exempt(
        "real_part", "to_dtype", "refused", tied.TieError, CAST % "{dtype} has no real part",
        "`.to(float64)` makes real numbers of complex ones.",
    ),
    Exempt(
        "imaginary_part", "to_dtype", "refused", tied.TieError,
        CAST % "{dtype} has no imag part",
        "`.to(float64)` throws the imaginary part away.",
    ),
    Exempt(
        PARTS_ONLY, "load_second", "error", RuntimeError, MISSING % "first",
        "The second name holds a part of the memory, so PyTorch misses the first; "
        "`strict=False` loads that part, into both.",
    ),
    Exempt(
        "broadcast", "load_second", "error", RuntimeError, REPEATED,
        "The second name holds every element twice, which need not agree; "
        "PyTorch's error names both sides.",
    ),
    Exempt(
        "partial_overlap", "load_second", "error", RuntimeError, MISSING % "tied_span",
        "As before; what both are parts of is kept under a name of its own, `tied_span`.",
    ),
    Exempt(
        "byte_view", "onnx", "error", torch.onnx.errors.OnnxExporterError,
        "Failed to convert the exported program to an ONNX model.",
        "PyTorch can't write a view under another dtype to ONNX.",
    ),
    Exempt(
        "byte_view", "trace", "error", RuntimeError, "We don't have an op for aten::view",
        "`jit.trace` has no view under another dtype.",
    ),
    Exempt(
        "no_tie_interleaved_columns", "safetensors", "error", RuntimeError,
        "Some tensors share memory",
        "safetensors takes interleaved columns for a tie, as it does without `tied`; "
        "`tied.copy(model)` gives each memory of its own.",
    ),
    Exempt(
        "no_tie_empty_arrays", "pt2", "error", RuntimeError,
        "numel: integer multiplication overflow",
        "PyTorch can't save an empty tensor in a `.pt2` file, as it can't without `tied`.",
    ),
]  # fmt: skip


def exempt(name: str, op: str) -> Exempt | None:
    return next((e for e in EXEMPT if (name, op) in e.cells()), None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings are errors, but for those that PyTorch gives about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in KNOWN:
            warnings.filterwarnings("ignore", re.escape(message))
        yield


def outcome(name: str, op: str, adopt: bool, child: Child | None = None) -> Outcome:
    """Runs one cell; `child` is the process that models are sent to by the operation "spawn"."""
    if op != SPAWN and not OPS[op].on(name):
        return Outcome(NEVER)
    with quiet():
        try:
            model = prepared(name, adopt)
            if child is not None:
                return Outcome(child.judge(model, name))
            result, memory = OPS[op].run(model, name), OPS[op].memory(name)
            if isinstance(result, Program):
                verdict = torch_judge.judge_program(result, name, memory)
                return Outcome(verdict, stored=stored(result))
            return Outcome(torch_judge.judge_module(result, name, memory))
        except tied.TiedError as error:
            return Outcome("refused", error.with_traceback(None))
        except PROBLEMS as error:
            return Outcome("error", error.with_traceback(None))


def stored(program: Program) -> int:
    """The bytes of a program's weights, without the integers that say which elements are read."""
    weights = [x for x in program.weights.values() if x.dtype != torch.int64]
    return sum({x.data_ptr(): x.nbytes for x in weights}.values())


def pair(name: str, op: str, child: Child | None = None) -> tuple[Outcome, Outcome]:
    """What PyTorch does by itself, and after `tied.tie`."""
    return outcome(name, op, False, child), outcome(name, op, True, child)


def all_cells() -> dict[tuple[str, str], tuple[str, str]]:
    """Runs the matrix; takes a minute or two."""
    with spawned() as child:
        found = {(name, SPAWN): pair(name, SPAWN, child) for name in NAMES}
    with process_group():
        found |= {(name, DDP): pair(name, DDP) for name in NAMES}
    found |= {(name, op): pair(name, op) for op in OPS if op != DDP for name in NAMES}
    return {cell: (alone.verdict, after.verdict) for cell, (alone, after) in found.items()}
