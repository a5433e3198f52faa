"""Where the tensors of a module are: names to places, and the module that holds several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tied._errors import PathError, TieError
from tied._torch.reads import Reads, parametrized, reads_of
from tied._torch.ways import remade


@dataclass(frozen=True, eq=False)
class Place:
    """A place for a tensor in a module.

    Attributes:
        name: Its dotted name.
        owner: The module that has it.
        leaf: Its name there.
    """

    name: str
    owner: nn.Module
    leaf: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        found: torch.Tensor = getattr(self.owner, self.leaf)
        return found

    @property
    def reads(self) -> Reads | None:
        """The tie that computes it; None if it is stored here."""
        return reads_of(self.owner).get(self.leaf)

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, or computed in the place of one."""
        return self.owner._parameters.get(self.leaf) is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain attribute, which PyTorch neither moves nor saves."""
        return self.leaf in self.owner.__dict__

    @property
    def persistent(self) -> bool:
        """Whether `state_dict` holds it."""
        return not self.is_plain and self.leaf not in self.owner._non_persistent_buffers_set


def locate(module: nn.Module, name: str) -> Place:
    """Returns the place of a tensor, by its dotted name.

    Raises:
        PathError: There is none of that name.
    """
    *way, leaf = name.split(".")
    part: nn.Module = module
    for depth, step in enumerate(way):
        below = part._modules.get(step, getattr(part, step, None))  # wrappers pass attributes on
        if not isinstance(below, nn.Module):
            raise _lost(name, ".".join(way[:depth]), step, part)
        part = below
    part = _inside_of_adapters(name, part, leaf)
    if leaf.startswith("__") or not isinstance(getattr(part, leaf, None), torch.Tensor):
        raise _lost(name, ".".join(way), leaf, part)
    return Place(name, part, leaf)


def _inside_of_adapters(name: str, part: nn.Module, leaf: str) -> nn.Module:
    """Returns the module that has a tensor, where PEFT has wrapped it.

    Raises:
        TieError: PEFT trains a copy of that module, so there are two such tensors.
    """
    while not _has(part, leaf):
        if isinstance(part._modules.get("original_module"), nn.Module):
            raise TieError(
                f"{name} is trained in a copy of its module",
                facts=[("wrapper", type(part).__name__)],
                hint="Unload the adapter first: model.unload()",
                paths=[name],
            )
        base = part._modules.get("base_layer")
        if not isinstance(base, nn.Module):
            break
        part = base
    return part


def _has(part: nn.Module, leaf: str) -> bool:
    """Returns whether a module has a tensor itself, stored or computed."""
    own = (part._parameters, part._buffers, part.__dict__, parametrized(part))
    return any(leaf in table for table in own)


def must_be_registered(place: Place) -> None:
    """Raises for a source that is a plain attribute, unless a hook makes it (pruning does).

    Raises:
        PathError: It is one.
    """
    if place.is_plain and remade(place.owner, place.leaf, None) is None:
        raise PathError(
            f"{place.name} is a plain attribute, which PyTorch neither moves nor saves",
            hint=f'Register it first: register_buffer("{place.leaf}", ...)',
            paths=[place.name],
        )


def _lost(name: str, reached: str, step: str, part: nn.Module) -> PathError:
    tensors = [n for n, _ in (*part.named_parameters(recurse=False),
                              *part.named_buffers(recurse=False))]  # fmt: skip
    inside = [*tensors, *reads_of(part), *(n for n, _ in part.named_children())]
    inside = [n for n in inside if n != "parametrizations"]
    return PathError(
        f"no such tensor: {name}",
        facts=[
            ("reached", reached or "the module"),
            ("step", f".{step} of a {type(part).__name__}"),
            ("it has", ", ".join(inside[:12]) or "nothing"),
        ],
        paths=[name],
    )


def common(names: Iterable[str]) -> str:
    """Returns the name of the smallest module that holds all of these tensors."""
    ways = [name.split(".")[:-1] for name in names]
    shared = []
    for steps in zip(*ways, strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return ".".join(shared)


def below(name: str, above: str) -> str:
    """Returns the name of a tensor, seen from the module of the name `above`."""
    return name[len(above) + 1 :] if above else name


def must_not_turn_back(target: Place, sources: Iterable[Place]) -> None:
    """Raises if a source is computed from the target.

    Raises:
        TieError: The tie would be a circle.
    """
    for source in sources:
        seen: list[Place] = [source]
        while seen:
            place = seen.pop()
            if (place.owner, place.leaf) == (target.owner, target.leaf):
                raise _circle(target, source, itself=place is source)
            reads = place.reads
            if reads is not None:
                seen += [Place(s.name, s.settle(), s.leaf) for s in reads.sources]


def _circle(target: Place, source: Place, *, itself: bool) -> TieError:
    if itself:
        return TieError(
            f"{target.name} can't be tied to itself",
            hint="Name another tensor as the source",
            paths=dict.fromkeys([source.name, target.name]),
        )
    return TieError(
        f"{target.name} can't be tied to {source.name}, which is computed from it",
        hint=f'Untie that one first: tied.untie(model, "{source.name}")',
        paths=[source.name, target.name],
    )
