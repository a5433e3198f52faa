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
from tied._torch.views import TORCH, View, portable
from tied._torch.ways import Source
from tied.arrays.tensors import PLAIN


class Reads(nn.Module):
    """Computes a tied tensor of the tensors that it is tied to, each time it is asked.

    It has no parameters. How it finds its sources, in a model whose parts are moved, replaced and
    copied, is `Source`'s to know.

    Attributes:
        target: The name of the tied tensor, below that module.
        sources: Where it finds what it reads.
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
        self.target = target
        self.sources = tuple(Source(root, name, target) for name in sources)
        self.view = view
        self.inverse = inverse
        self.detached = detached
        self.is_view = is_view
        self.persistent = persistent
        self.on_conflict = on_conflict
        self.armed = False
        self.simple = len(sources) == 1 and not detached
        self.position = 0

    def forward(self) -> torch.Tensor:
        """Returns the tied tensor."""
        return self.read()

    def read(self) -> torch.Tensor:
        """Returns the tied tensor; for a tie without a view, the source itself."""
        if not self.simple:
            return self.read_all()
        seen = self.sources[0].fetch()
        if self.view is None:
            return seen
        try:
            return self.view(seen)
        except NotImplementedError as error:
            raise self.unreadable(seen, error) from error

    def read_all(self) -> torch.Tensor:
        """Returns the tied tensor where there is more to it than one source and a view."""
        sources = [source.fetch() for source in self.sources]
        seen = sources[0]
        if self.view is not None:
            try:
                seen = self.view(*sources)
            except NotImplementedError as error:
                raise self.unreadable(sources[0], error) from error
            if all(getattr(x, "_is_hf_initialized", False) for x in sources):
                seen._is_hf_initialized = True  # type: ignore[attr-defined]
        return seen.detach() if self.detached and seen.requires_grad else seen

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources, as they were last found."""
        return tuple(source.name for source in self.sources)

    def keep_marks(self) -> None:
        """Passes on the mark by which transformers knows that a tensor has its values.

        It would draw a tensor without it anew at random, through the view.
        """
        self.simple = False

    def unreadable(self, source: torch.Tensor, error: Exception) -> TieError:
        """Returns the error that the view does not work on what the source is now."""
        return self.refused(
            f"{self.target} can't be computed from what {self.names[0]} is now",
            facts=[
                ("now", f"{type(source).__name__}, {TORCH.dtype(source)}"),
                ("error", str(error).partition("\n")[0]),
            ],
        )

    def roots(self) -> list[torch.Tensor]:
        """Returns the tensors at the end of a chain of ties that this one reads."""
        found: list[torch.Tensor] = []
        for source in self.sources:
            inner = reads_of(source.settle()).get(source.leaf)
            found += [source.fetch()] if inner is None else inner.roots()
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
            for one, new in zip(self.sources, self.inverted(value), strict=True):
                self.store(one, new)
            return
        if not self.is_view and torch.equal(value, now):
            return
        self.must_be_invertible(now)
        (one,) = self.sources
        if self.view is None:
            self.store(one, value)
            return
        source = one.fetch().detach()
        seen = self.view(source)
        value = value.clone() if shares_storage(value, source) else value
        if is_stored(one) and shares_storage(seen, source):
            seen.copy_(value)
            return
        new = self.room(source.dtype, source.device).copy_(source)
        self.view(new).copy_(value)
        self.store(one, new)

    def room(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a new tensor like the source, through whose view it can be written.

        A function of C-ordered tensors needs one; a reading by memory one in the source's order.
        """
        source = self.sources[0].fetch().detach()
        for order in (torch.contiguous_format, torch.preserve_format):
            made = torch.empty_like(source, dtype=dtype, device=device, memory_format=order)
            if self.view is None or shares_storage(self.view(made), made):
                break
        return made

    def inverted(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the values of the sources that `inverse` makes of a value."""
        assert self.inverse is not None
        made = self.inverse(value)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    def store(self, one: Source, value: torch.Tensor) -> None:
        """Puts the value of a source in its place."""
        if is_stored(one):
            one.fetch().copy_(value)
            return
        owner = one.settle()
        if one.leaf in owner.__dict__:
            raise self.refused(f"{self.target} can't be assigned: a hook computes what it reads")
        setattr(owner, one.leaf, value)  # another parametrization writes it through, or raises

    def must_be_invertible(self, now: torch.Tensor) -> None:
        """Raises unless writing into what is read would write into the source."""
        geometry = TORCH.geometry(now)
        if self.is_view and geometry is not None and not repeats_elements(geometry):
            return
        how = "reads elements more than once" if self.is_view else "is computed"
        raise self.refused(
            f"{self.target} can't be assigned: it {how} from {', '.join(self.names)}",
            hint=f"Assign to {self.names[0]}, tie with inverse=..., or untie first: "
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
                ("dtype", TORCH.dtype(value), TORCH.dtype(now)),
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
        names = ", ".join(self.names)
        return TieError(
            message,
            facts=[("tie", f"{self.target} reads {names}"), *facts],
            hint=hint or f'Untie it first: tied.untie(model, "{self.target}")',
            paths=[*self.names, self.target],
        )

    def extra_repr(self) -> str:
        """Returns what is read, for the module's print."""
        return ", ".join(self.names)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["view"] = portable(self.view, self.target)
        state["inverse"] = portable(self.inverse, self.target)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Reads:
        made = memo[id(self)] = Reads.__new__(Reads)
        made.__dict__.update(self.__dict__)
        for name, value in self.__dict__.items():
            if isinstance(value, dict) or name == "sources":  # its hooks are dicts
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


def is_stored(source: Source) -> bool:
    """Returns whether a source is a parameter or buffer, not computed itself."""
    owner, leaf = source.settle(), source.leaf
    return owner._parameters.get(leaf) is not None or owner._buffers.get(leaf) is not None


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
            owners = [names.get(id(source.settle())) for source in reads.sources]
            sources = tuple(
                f"{owner}.{source.leaf}".removeprefix(".")
                for owner, source in zip(owners, reads.sources, strict=True)
            )
            inside = None not in owners
            name = f"{prefix}.{leaf}".removeprefix(".")
            yield Tie(name, part, reads, sources if inside else None)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors lie in one storage."""
    try:
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return a is b
