"""The parametrization without tensors of its own: it reads the tensors of other modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tied._errors import TieError
from tied._overlap import repeats_elements
from tied._torch import adapters
from tied._torch.views import View, portable
from tied._torch.ways import Back, Way, offloaded, remade, step, way
from tied.arrays import load
from tied.arrays.tensors import PLAIN


class Reads(nn.Module):
    """Computes a tied tensor of the tensors that it is tied to, each time it is asked.

    It has no parameters. Sources are found by their names, below a module that holds both sides, so
    that a replaced submodule is followed.

    Attributes:
        target: The name of the tied tensor, below that module.
        sources: The names of what it reads.
        view: What it computes of them; None for the source itself.
        inverse: Computes the sources of a value; None where writing through `view` does it.
        detached: Whether it passes no gradients on (buffers).
        is_view: Whether the result shares the memory of the source.
        persistent: Whether it was a buffer that `state_dict` holds.
        on_conflict: Whose value a checkpoint counts by where both sides are in it and differ.
        position: Its place among the parameters (or buffers) of its module.
        simple: Whether it is one source and a view, and nothing else is to be seen to.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Reads:
        """Makes a tie that other tools are asked about, also when it is copied or unpickled."""
        made = super().__new__(cls)
        adapters.watch(made)
        return made

    def __init__(
        self,
        root: nn.Module,
        target: str,
        sources: tuple[str, ...],
        view: View | None,
        *,
        inverse: Callable[[torch.Tensor], Any] | None = None,
        detached: bool = False,
        is_view: bool = True,
        persistent: bool = True,
        on_conflict: str = "raise",
    ) -> None:
        super().__init__()
        self.back = Back(root)
        self.target = target
        self.sources = sources
        self.view = view
        self.inverse = inverse
        self.detached = detached
        self.is_view = is_view
        self.persistent = persistent
        self.on_conflict = on_conflict
        self.ways = tuple(way(name) for name in sources)
        self.armed = False
        self.simple = len(sources) == 1 and not detached
        self.position = 0

    def forward(self) -> torch.Tensor:
        """Returns the tied tensor."""
        return self.read()

    def read(self) -> torch.Tensor:
        """Returns the tied tensor; for a tie without a view, the source itself."""
        root = self.back.module
        if root is None:
            root = self.back()
        if not self.simple:
            return self.read_all(root)
        seen = self.fetch(root, self.ways[0])
        if self.view is None:
            return seen
        try:
            return self.view(seen)
        except NotImplementedError as error:
            raise self.unreadable(self.fetch(root, self.ways[0]), error) from error

    def read_all(self, root: nn.Module) -> torch.Tensor:
        """Returns the tied tensor where there is more to it than one source and a view."""
        sources = [self.fetch(root, one) for one in self.ways]
        seen = sources[0]
        if self.view is not None:
            try:
                seen = self.view(*sources)
            except NotImplementedError as error:
                raise self.unreadable(sources[0], error) from error
            if all(getattr(x, "_is_hf_initialized", False) for x in sources):
                seen._is_hf_initialized = True  # type: ignore[attr-defined]
        return seen.detach() if self.detached and seen.requires_grad else seen

    def keep_marks(self) -> None:
        """Passes on the mark by which transformers knows that a tensor has its values.

        It would draw a tensor without it anew at random, through the view.
        """
        self.simple = False

    def unreadable(self, source: torch.Tensor, error: Exception) -> TieError:
        """Returns the error that the view does not work on what the source is now."""
        return self.refused(
            f"{self.target} can't be computed from what {self.sources[0]} is now",
            facts=[
                ("now", f"{type(source).__name__}, {source.dtype}"),
                ("error", str(error).partition("\n")[0]),
            ],
        )

    def fetch(self, module: nn.Module, one: Way) -> torch.Tensor:
        """Returns a source, found below `module`."""
        modules, leaf = one
        for name in modules:
            below = module._modules.get(name)
            if below is None:
                return self.search(module, one)
            module = below
        found = module._parameters.get(leaf)
        if found is None:
            return self.search(module, one)
        if found.is_meta and "_hf_hook" in module.__dict__:
            return offloaded(module, leaf, found)
        return found

    def search(self, module: nn.Module, one: Way) -> torch.Tensor:
        """Returns a source that is a buffer, is computed, or lies behind a wrapper's attributes."""
        module, found = self.back(), None
        modules, leaf = one
        try:
            for name in modules:
                module = step(module, name)
            found = getattr(module, leaf)
        except AttributeError:
            pass
        if leaf in module.__dict__:
            found = remade(module, leaf, found)
        if not isinstance(found, torch.Tensor):
            name = ".".join((*modules, leaf))
            raise TieError(
                f"{self.target} is tied to {name}, which is no tensor any more",
                facts=[("found", "nothing" if found is None else type(found).__name__)],
                hint=f'Untie it before {name} is replaced: tied.untie(model, "{self.target}")',
                paths=[name, self.target],
            )
        if found.is_meta and "_hf_hook" in module.__dict__:
            return offloaded(module, leaf, found)
        return found

    def roots(self) -> list[torch.Tensor]:
        """Returns the tensors at the end of a chain of ties that this one reads."""
        found: list[torch.Tensor] = []
        for one in self.ways:
            inner = reads_at(self.back(), one)
            found += inner.roots() if inner is not None else [self.fetch(self.back(), one)]
        return found

    def right_inverse(self, value: torch.Tensor) -> tuple[()]:
        """Writes a value through to the sources; this parametrization has no tensors itself."""
        if self.armed:
            self.write(value)
        return ()

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Writes a value into the sources.

        Raises:
            TieError: It does not fit, or what is computed can't be inverted.
        """
        now = self.read()
        if value is now:
            return
        self.admit(value, now)
        if self.inverse is not None:
            for one, new in zip(self.ways, self.inverted(value), strict=True):
                self.store(one, new)
            return
        if not self.is_view and torch.equal(value, now):
            return
        self.must_be_invertible(now)
        source = self.fetch(self.back(), self.ways[0])
        if self.view is None:
            self.store(self.ways[0], value)
            return
        seen = self.view(source.detach())
        if self.is_stored(self.ways[0]) and shares_storage(seen, source):
            seen.copy_(value)
            return
        new = source.detach().clone(memory_format=torch.contiguous_format)
        self.view(new).copy_(value)
        self.store(self.ways[0], new)

    def inverted(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the values of the sources that `inverse` makes of a value."""
        assert self.inverse is not None
        made = self.inverse(value)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    def store(self, one: Way, value: torch.Tensor) -> None:
        """Puts the value of a source in its place."""
        if self.is_stored(one):
            self.fetch(self.back(), one).copy_(value)
            return
        owner, leaf = self.holder(one), one[1]
        if leaf in owner.__dict__:
            raise self.refused(f"{self.target} can't be assigned: a hook computes what it reads")
        setattr(owner, leaf, value)  # another parametrization writes it through, or raises

    def holder(self, one: Way) -> nn.Module:
        """Returns the module that has a source."""
        owner = self.back()
        for name in one[0]:
            owner = step(owner, name)
        return owner

    def is_stored(self, one: Way) -> bool:
        """Returns whether a source is a parameter or buffer, not computed itself."""
        owner, leaf = self.holder(one), one[1]
        return owner._parameters.get(leaf) is not None or owner._buffers.get(leaf) is not None

    def must_be_invertible(self, now: torch.Tensor) -> None:
        """Raises unless writing into what is read would write into the source."""
        geometry = load("torch").geometry(now)
        if self.is_view and geometry is not None and not repeats_elements(geometry):
            return
        how = "reads elements more than once" if self.is_view else "is computed"
        raise self.refused(
            f"{self.target} can't be assigned: it {how} from {', '.join(self.sources)}",
            hint=f"Assign to {self.sources[0]}, tie with inverse=..., or untie first: "
            f'tied.untie(model, "{self.target}")',
        )

    def admit(self, value: Any, now: torch.Tensor) -> None:
        """Raises unless a value can stand in the place of the tied tensor."""
        if not isinstance(value, torch.Tensor):
            kind = "None" if value is None else type(value).__name__
            raise self.refused(f"{self.target} is tied and can't be set to {kind}")
        if type(value) not in (*PLAIN, type(now)):
            raise self.refused(
                f"{self.target} is tied and can't become a {type(value).__name__} of its own"
            )
        facts = [
            (label, f"{given} where {own} is")
            for label, given, own in (
                ("shape", tuple(value.shape), tuple(now.shape)),
                ("dtype", value.dtype, now.dtype),
            )
            if given != own
        ]
        if value.is_meta and not now.is_meta:
            facts.append(("device", f"meta where {now.device} is"))
        elif now.is_meta and not value.is_meta:
            facts.append(("device", f"{value.device} where meta is"))
        if facts:
            raise self.refused(f"a value does not fit {self.target}, which is tied", facts=facts)

    def refused(
        self, message: str, *, facts: Sequence[tuple[str, str]] = (), hint: str = ""
    ) -> TieError:
        """Returns the error that something can't be done to a tied tensor."""
        names = ", ".join(self.sources)
        return TieError(
            message,
            facts=[("tie", f"{self.target} reads {names}"), *facts],
            hint=hint or f'Untie it first: tied.untie(model, "{self.target}")',
            paths=[*self.sources, self.target],
        )

    def extra_repr(self) -> str:
        """Returns what is read, for the module's print."""
        return ", ".join(self.sources)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["view"] = portable(self.view, self.target)
        state["inverse"] = portable(self.inverse, self.target)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Reads:
        made = memo[id(self)] = Reads.__new__(Reads)
        made.__dict__.update(self.__dict__)
        for name, value in self.__dict__.items():
            if isinstance(value, (dict, Back)):  # its hooks, and the way back
                made.__dict__[name] = copy.deepcopy(value, memo)
        return made


def parametrized(module: nn.Module) -> dict[str, Any]:
    """Returns the lists of parametrizations of a module, by the name of the tensor."""
    found = module.__dict__.get("_modules", {}).get("parametrizations")
    return found._modules if isinstance(found, nn.ModuleDict) else {}


def reads_of(module: nn.Module) -> dict[str, Reads]:
    """Returns the lasting ties of a module's own tensors, by name."""
    found = {}
    for name, parts in parametrized(module).items():
        first = parts._modules.get("0")
        if isinstance(first, Reads):
            found[name] = first
    return found


def reads_at(root: nn.Module, one: Way) -> Reads | None:
    """Returns the tie that computes the tensor at a way below `root`; None if it is no such."""
    module: Any = root
    try:
        for name in one[0]:
            module = step(module, name)
    except AttributeError:
        return None
    return reads_of(module).get(one[1]) if isinstance(module, nn.Module) else None


class Tie(NamedTuple):
    """A lasting tie, seen from a module.

    Attributes:
        name: The name of the tied tensor, below that module.
        owner: The module that has it.
        reads: What computes it.
        sources: The names of what it reads; None if it reads what is outside of that module.
    """

    name: str
    owner: nn.Module
    reads: Reads
    sources: tuple[str, ...] | None


def ties_below(module: nn.Module) -> Iterator[Tie]:
    """Gives the lasting ties of a module and those below it."""
    parts = list(module.named_modules())
    names = {id(part): name for name, part in parts}
    for prefix, part in parts:
        for leaf, reads in reads_of(part).items():
            root = names.get(id(reads.back()))
            sources = None
            if root is not None:
                sources = tuple(f"{root}.{name}".removeprefix(".") for name in reads.sources)
            yield Tie(f"{prefix}.{leaf}".removeprefix("."), part, reads, sources)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors lie in one storage."""
    try:
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return a is b
