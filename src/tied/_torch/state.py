"""Checkpoints of modules with lasting ties: each storage once, and any names accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tied._errors import TieError
from tied._overlap import repeats_elements
from tied._torch.reads import Reads, ties_below
from tied._torch.views import TORCH

State = dict[str, Any]

_wins: ContextVar[str | None] = ContextVar("wins", default=None)


@contextmanager
def conflict(on_conflict: str | None) -> Iterator[None]:
    """Says for a block whose value counts where a checkpoint holds both sides and they differ."""
    token = _wins.set(on_conflict)
    try:
        yield
    finally:
        _wins.reset(token)


def watch_loading(*modules: nn.Module) -> None:
    """Makes modules accept checkpoints that hold the names of tied tensors."""
    for module in modules:
        if not _has(module._load_state_dict_pre_hooks, accept):
            register: Any = module.register_load_state_dict_pre_hook
            register(accept)


def watch_repeats(module: nn.Module) -> None:
    """Makes a module give and take a submodule that it holds twice under its first name."""
    watch_loading(module)
    if not _has(module._state_dict_hooks, drop_repeats):
        register: Any = module.register_state_dict_post_hook
        register(drop_repeats)


def _has(hooks: Mapping[int, Any], wanted: Callable[..., Any]) -> bool:
    return any(getattr(hook, "hook", hook) is wanted for hook in hooks.values())


def repeats(module: nn.Module) -> list[tuple[str, str]]:
    """Returns (first name, further name) of each submodule that stands at several places."""
    first: dict[int, str] = {}
    again: set[str] = set()
    found: list[tuple[str, str]] = []
    for name, part in module.named_modules(remove_duplicate=False):
        if first.setdefault(id(part), name) != name:
            if name.rpartition(".")[0] not in again:  # else it is part of one that is told
                found.append((first[id(part)], name))
            again.add(name)
    return found


def drop_repeats(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    """Takes out of a state dict what it holds under the further name of a submodule."""
    for _, further in repeats(module):
        start = f"{prefix}{further}."
        for key in [key for key in state if key.startswith(start)]:
            del state[key]


def accept(
    module: nn.Module,
    state: State,
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Brings a checkpoint to the names that a module has: a hook of `load_state_dict`.

    Raises:
        TieError: Both sides of a tie are there, differ, and nobody has said which counts.
    """
    twice = repeats(module) if _has(module._state_dict_hooks, drop_repeats) else []
    for first, further in twice:
        _join(state, f"{prefix}{first}.", f"{prefix}{further}.")
    ties = []
    for name, _, reads, sources in ties_below(module):
        if sources is not None:
            ties.append((name, reads, sources))
        elif isinstance(state.get(prefix + name), torch.Tensor):
            # Only a part is loaded, and the source is outside of it.
            reads.write(state.pop(prefix + name))
    known = {name: sources for name, _, sources in ties}
    groups: dict[tuple[str, ...], list[tuple[str, Reads]]] = {}
    for name, reads, sources in sorted(ties, key=lambda tie: -_depth(tie[0], known)):
        groups.setdefault(sources, []).append((name, reads))
    for sources, readers in groups.items():
        present = [
            (prefix + name, reads)
            for name, reads in readers
            if isinstance(state.get(prefix + name), torch.Tensor)
        ]
        if present:
            _Group(state, [prefix + source for source in sources], present).settle()
    for first, further in twice:  # PyTorch loads the module once for each name
        start = f"{prefix}{first}."
        for key in [key for key in state if key.startswith(start)]:
            state[f"{prefix}{further}.{key[len(start) :]}"] = state[key]


def _depth(name: str, known: Mapping[str, tuple[str, ...]]) -> int:
    """Returns how many ties lie between a tensor and the one that is stored."""
    if name not in known:
        return 0
    return 1 + max(_depth(source, known) for source in known[name])


def _join(state: State, first: str, further: str) -> None:
    """Brings what a checkpoint holds under the further name of a module under its first name."""
    for key in [key for key in state if key.startswith(further)]:
        twin = first + key[len(further) :]
        value = state.pop(key)
        if twin not in state:
            state[twin] = value
        elif not same_bits(state[twin], value):
            wins = _wins.get() or "raise"
            if wins == "raise":
                raise _disagree([twin], key, state[twin], value)
            if wins == "target":
                state[twin] = value


class _Group:
    """The tied names in a checkpoint that read one source (or the same several)."""

    def __init__(self, state: State, sources: list[str], present: list[tuple[str, Reads]]) -> None:
        self.state = state
        self.sources = sources
        self.present = present

    @torch.no_grad()
    def settle(self) -> None:
        """Takes the tied names out of the checkpoint; their values go to the source if it lacks."""
        state, sources = self.state, self.sources
        if all(source in state for source in sources):
            for alias, reads in self.present:
                self.compare(alias, reads)
                del state[alias]
            return
        alias, reads = self.present[0]
        if reads.inverse is not None:
            self.invert(alias, reads)
            self.settle()
        elif len(sources) == 1 and all(reads.is_view for _, reads in self.present):
            self.gather()

    def invert(self, alias: str, reads: Reads) -> None:
        """Makes sources of a tied name; those that are there have to agree with it."""
        state = self.state
        for source, made in zip(self.sources, reads.inverted(state[alias]), strict=True):
            wins = _wins.get() or reads.on_conflict
            if source not in state or (wins == "target" and not _close(state[source], made)):
                state[source] = made
            elif not _close(state[source], made) and wins == "raise":
                raise _disagree([source], alias, state[source], made)

    def compare(self, alias: str, reads: Reads, *, made: bool = False) -> None:
        """Makes sure that a tied name agrees with its source.

        Args:
            alias: The name.
            reads: Its tie.
            made: Whether the source has been made of all tied names.
        """
        state = self.state
        others = [other for other, _ in self.present if other != alias] if made else self.sources
        values = [state[source] for source in self.sources]
        given = state[alias]
        if any(not isinstance(x, torch.Tensor) or x.is_meta for x in (*values, given)):
            return
        seen = values[0] if reads.view is None else reads.view(*values)
        alike = same_bits if reads.is_view else _close
        if alike(seen, given):
            return
        wins = _wins.get() or reads.on_conflict
        if wins == "raise":
            raise _disagree(others, alias, seen, given)
        if wins == "source":
            return
        if reads.inverse is not None:
            state.update(zip(self.sources, reads.inverted(given), strict=True))
            return
        if not reads.is_view or seen.shape != given.shape:
            raise _disagree(others, alias, seen, given)
        base = reads.room(values[0].dtype, values[0].device).copy_(values[0])
        (base if reads.view is None else reads.view(base)).copy_(given)
        state[self.sources[0]] = base

    def gather(self) -> None:
        """Makes the source of its aliases, if together they hold all of it."""
        state, source = self.state, self.sources[0]
        alias, reads = self.present[0]
        now = reads.roots()[0]
        given = state[alias].detach()
        if reads.view is None:
            base = given
        else:
            dtype = given.dtype if reads.read().dtype == now.dtype else now.dtype
            base = reads.room(dtype, given.device).zero_()
            if not self.fill(base):
                self.write_parts()
                return
        state[source] = base
        for alias, reads in self.present:
            self.compare(alias, reads, made=True)
        for alias, _ in self.present:
            del state[alias]

    def write_parts(self) -> None:
        """Writes values that are a part of the source into the model's own; it stays missing."""
        for alias, reads in self.present:
            try:
                reads.write(self.state[alias])
            except TieError:
                continue  # PyTorch will say that the name is unexpected
            del self.state[alias]

    def fill(self, base: torch.Tensor) -> bool:
        """Writes every alias into a source; returns whether they hold all of it."""
        held = torch.zeros_like(base, device="cpu")
        for alias, reads in self.present:
            part, mark = (x if reads.view is None else reads.view(x) for x in (base, held))
            given = self.state[alias]
            geometry = TORCH.geometry(mark)
            if part.shape != given.shape or geometry is None or repeats_elements(geometry):
                return False
            part.copy_(given)
            mark.fill_(1 + 1j if mark.is_complex() else 1)
            if mark.dtype != held.dtype and mark.nbytes == held.nbytes:
                return True
        parts = torch.view_as_real(held) if held.is_complex() else held
        return bool((parts != 0).all())


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether two values of a checkpoint are the same, NaNs and all."""
    if a is b or not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return a is b or bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta or b.is_meta:
        return True
    if a.layout is not torch.strided or a.is_quantized:
        return torch.equal(a, b)
    return torch.equal(*(_bytes(x) for x in (a, b)))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    dense = x.detach().cpu().resolve_conj().resolve_neg()
    return dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether a computed value is the one in a checkpoint, up to rounding."""
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and torch.allclose(a, b.to(a.device), equal_nan=True)


def _disagree(sources: list[str], alias: str, seen: Any, given: Any) -> TieError:
    facts = [("source", _told(", ".join(sources), seen)), ("target", _told(alias, given))]
    if isinstance(seen, torch.Tensor) and seen.shape == given.shape and seen.dtype == given.dtype:
        different = int((seen.cpu() != given.cpu()).sum())
        facts.append(("differ in", f"{different} of {given.numel()} elements"))
    return TieError(
        "a checkpoint holds two values for one tied tensor",
        facts=facts,
        hint='Say which counts: tied.torch.load_state_dict(..., on_conflict="source") or "target"',
        paths=[*sources, alias],
    )


def _told(name: str, x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return name
    return f"{name}, {tuple(x.shape)} {TORCH.dtype(x)}"
