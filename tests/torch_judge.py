"""Two tensors over one memory as a PyTorch module, and whether they still are that afterwards.

What came out of an operation is a module, or a program that PyTorch made of one. Both are judged by
what can be done with them: a write is seen by whoever reads the same memory and by nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import kinds
from kinds import KINDS

X = torch.tensor(1.0)
RATE = 0.1
Tensors = dict[str, torch.Tensor]
Change = Callable[[np.ndarray], np.ndarray]


class Pair(torch.nn.Module):
    """Gives both members times `x`; the parts of complex ones, as programs are of real numbers."""

    adopted = False  # whether `tied.tie` was called on it

    def both(self) -> list[torch.Tensor]:
        return [self.first, self.second]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [member * x for member in self.both()]
        return tuple(torch.view_as_real(y) if y.is_complex() else y for y in found)


class Holder(torch.nn.Module):
    """A layer that can stand in two places."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)


class Twice(Pair):
    def both(self) -> list[torch.Tensor]:
        return [self.first.w, self.second.w]


@dataclass
class Program:
    """What became of a module: its weights, and its outputs for other values of some of them."""

    weights: Tensors
    call: Callable[[Tensors], Sequence[torch.Tensor]]


def build(name: str) -> Pair:
    kind = KINDS[name]
    members = kind.arrays("torch")
    if not kind.layer:
        return kinds.module(members, kind.holds, Pair)
    model = Twice()
    model.first = model.second = Holder(members[0])
    return model


def expanded(x: torch.Tensor) -> bool:
    """Whether elements repeat, so that nothing can be written to them in place."""
    return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def fill(model: Pair, name: str, change: Change) -> None:
    """Changes the memory in place, through the members."""
    wanted = KINDS[name].read(change(KINDS[name].memory()))
    with torch.no_grad():
        for member, values in zip(model.both(), wanted, strict=True):
            if not expanded(member):
                member.copy_(torch.from_numpy(values.copy()))


def loss(outputs: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """The sum of the real parts of all outputs that hang on a parameter."""
    shapes = [x.shape for x in KINDS[name].read(KINDS[name].memory())]
    reals = [y if y.shape == n else y[..., 0] for y, n in zip(outputs, shapes, strict=True)]
    return torch.stack([y.sum() for y in reals if y.requires_grad]).sum()


def trains(name: str) -> bool:
    return "p" in KINDS[name].holds and not KINDS[name].meta


def gradient(name: str) -> np.ndarray:
    """The gradient of the memory: the sum over the members, buffers left out."""
    if name == "buffer_views_a_parameter":
        return np.ones_like(KINDS[name].memory())
    return kinds.gradient(KINDS[name], name)


def descended(name: str) -> Change:
    return lambda a: (a - RATE * gradient(name)).astype(a.dtype)


# ---------------------------------------------------------------------------------- a module


def unit(name: str) -> str:
    return "bytes" if name in kinds.REINTERPRETED else "elements"


def judge_module(model: Pair, name: str, memory: Change | None) -> str:
    """Returns "kept", or what is no longer true of the members."""
    kind = KINDS[name]
    found = model.both()
    if kinds.pattern(found, unit(name)) != kinds.pattern(build(name).both(), unit(name)):
        return "lost" if kind.tied else "made"
    if kind.one and found[0] is not found[1]:
        return "lost"
    if memory is None or kind.meta:
        return "kept"
    now = memory(kind.memory())
    if not holds(model, name, [now, now]):
        return "wrong"
    if trains(name) and not any(expanded(x) for x in model.parameters()):
        descend(model, name)
        now = (now - RATE * gradient(name)).astype(now.dtype)
        if not holds(model, name, [now, now]):
            return "wrong"
    return "kept" if writes(model, name, now) else "lost"


def descend(model: Pair, name: str) -> None:
    """One step by hand on every parameter that PyTorch lists."""
    model.zero_grad()
    loss(model(X), name).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad


def holds(model: Pair, name: str, memories: list[np.ndarray]) -> bool:
    """Whether the members' values are what they are to read of the two pieces of memory."""
    kind = KINDS[name]
    found = [kinds.value(member) for member in model.both()]
    wanted = [kind.read(memories[base])[i] for i, base in enumerate(kind.bases)]
    if name == "byte_view":
        # Bytes of what rounding may have moved.
        wanted[1] = np.ascontiguousarray(found[0]).view(np.uint8)
    return all(x.dtype == y.dtype and close(x, y) for x, y in zip(found, wanted, strict=True))


def close(x: np.ndarray, y: np.ndarray) -> bool:
    bound = 1e-2 if x.dtype.itemsize == 2 else 1e-5
    x, y = x.astype(np.complex128), y.astype(np.complex128)
    return x.shape == y.shape and np.allclose(x, y, rtol=bound, atol=bound)


def writes(model: Pair, name: str, now: np.ndarray) -> bool:
    """Whether a write through each member is seen where the other reads the same elements."""
    kind = KINDS[name]
    memories = [now.copy(), now.copy()]
    for i, member in enumerate(model.both()):
        if not expanded(member) and (member.is_floating_point() or member.is_complex()):
            with torch.no_grad():
                member.mul_(2)
            double(memories[kind.bases[i]], kind.reads[i])
            if not holds(model, name, memories):
                return False
    return True


def double(memory: np.ndarray, ops: kinds.Ops) -> None:
    """Doubles the elements, or the parts of complex ones, that the reading has."""
    part = memory.imag if ("imag",) in ops else memory.real if ("real",) in ops else memory
    places = np.arange(memory.size).reshape(memory.shape)
    steps = tuple(op for op in ops if op[0] not in ("conj", "real", "imag"))
    part.reshape(-1)[kinds.look(places, steps, "numpy")] *= 2


# --------------------------------------------------------------------------------- a program


def judge_program(program: Program, name: str, memory: Change) -> str:
    """Doubles one weight after the other: bytes of one memory have to change together."""
    kind = KINDS[name]
    numbers = [np.array(x) for x in kinds.pattern(build(name).both(), "bytes")]
    before = program.call({})
    if any(y.is_meta for y in before):  # some weight was not where the program looks for it
        return "lost"
    seen = [np.zeros(len(x), bool) for x in numbers]
    for weight, values in program.weights.items():
        if expanded(values):
            continue
        after = program.call({weight: values.detach() * 2})
        moved = [changed(*xy, len(n)) for *xy, n in zip(before, after, numbers, strict=True)]
        if not together(numbers, moved):
            return "lost"
        if not kind.tied and all(x.any() for x in moved):
            return "made"
        seen = [x | y for x, y in zip(seen, moved, strict=True)]
    wanted = [parts(x) for x in kind.read(memory(kind.memory()))]
    found = [kinds.value(y) for y in before]
    if name == "byte_view":
        wanted[1] = found[0].view(np.uint8).astype(np.float32)
    right = all(close(x, y) for x, y in zip(found, wanted, strict=True))
    return "kept" if right and all(x.all() for x in seen) else "wrong"


def parts(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag], axis=-1) if x.dtype.kind == "c" else x


def changed(before: torch.Tensor, after: torch.Tensor, size: int) -> np.ndarray:
    """For each of `size` bytes whether the number that it belongs to changed."""
    x, y = kinds.value(before).reshape(-1), kinds.value(after).reshape(-1)
    moved = x != y
    if len(x) == size:  # bytes, of numbers of four
        moved = np.repeat(moved.reshape(-1, 4).any(axis=1), 4)
    return np.repeat(moved, size // max(len(x), 1))


def together(numbers: list[np.ndarray], moved: list[np.ndarray]) -> bool:
    known: dict[int, bool] = {}
    return all(
        known.setdefault(int(number), bool(flag)) == bool(flag)
        for pair in zip(numbers, moved, strict=True)
        for number, flag in zip(*pair, strict=True)
    )
