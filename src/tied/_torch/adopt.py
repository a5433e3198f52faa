"""`tie(module)`: the ties that a module has now, made to last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tied._compare import TieChange
from tied._errors import TieError
from tied._overlap import Cluster, clusters, repeats_elements
from tied._reading import how, reading
from tied._storage import Reader, Storage, covered, shared, single
from tied._torch.dressed import register
from tied._torch.hugging import declared
from tied._torch.places import Place, below, common
from tied._torch.reads import Reads
from tied._torch.state import repeats, watch_loading, watch_repeats
from tied._torch.views import TORCH, View, of_layout
from tied._walk import Walk, walk


@dataclass
class Group:
    """A storage that stands at several places, and the one that is kept.

    Attributes:
        storage: What each leaf reads.
        places: The places that can be tied, each with the leaf that is there.
        left: The paths of places that can't, each with its leaf.
        kept: The place of the source; None where a new tensor for the whole span is needed.
        span: That tensor.
    """

    storage: Storage
    places: list[tuple[Place, Reader]]
    left: list[tuple[str, Reader]]
    kept: Place | None = None
    span: torch.Tensor | None = None
    trainable: bool = False


def adopt(module: nn.Module, on_conflict: str) -> tuple[list[TieChange], list[str]]:
    """Makes every tie of a module last.

    Returns:
        The ties that now last, and lines for those that can't.

    Raises:
        TieError: A trainable and a frozen parameter are tied, and nobody has said which counts.
    """
    found = walk(module)
    names = {id(part): name for name, part in module.named_modules()}
    again: dict[int, list[tuple[int, int]]] = {}
    for leaf, node, position in found.repeats:
        again.setdefault(leaf, []).append((node, position))
    preferred = declared(module)
    groups = []
    for one in clusters(found):
        if isinstance(one, int) and found.leaves[one] not in again:
            continue
        members = [one] if isinstance(one, int) else list(one.members)
        at = {}
        for i in members:
            item = found.leaves[i]
            ends = [(found.parents[item], found.positions[item]), *again.get(item, ())]
            at[i] = _places(found, ends, names, tensor=found.libraries[i].name == "torch")
        group = _group(found, one, at, preferred)
        if group is not None:
            group.trainable = _trainable(group, on_conflict)
            groups.append(group)
    made: list[TieChange] = []
    left: list[str] = []
    for group in groups:
        made += _apply(module, group, on_conflict)
        left += [
            f"{reading(path, how(group.storage, reader))}, which stands where PyTorch does not look"
            for path, reader in group.left
        ]
    twice = repeats(module)
    if twice:
        watch_repeats(module)
    made += [TieChange(first, further, first) for first, further in twice]
    return made, left


def _group(
    found: Walk,
    one: int | Cluster,
    at: dict[int, tuple[list[Place], list[str]]],
    preferred: set[str],
) -> Group | None:
    """Returns the places of a storage, if it has several and a tensor of PyTorch holds it."""
    members = list(at)
    if sum(len(places) + len(left) for places, left in at.values()) < 2:
        return None
    stored = {i: [place for place in at[i][0] if not place.is_plain] for i in members}
    if not any(stored.values()):
        return None
    kept, storage = _kept(found, one, members, stored, preferred)
    span = None
    if storage is None:
        assert isinstance(one, Cluster)
        storage, window = shared(found, one)
        span = window.detach().clone()
    readers = dict(zip(members, storage.readers, strict=True))
    places = [(place, readers[i]) for i in members for place in at[i][0] if place is not kept]
    left = [(path, readers[i]) for i in members for path in at[i][1]]
    return Group(storage, places, left, kept, span)


def _places(
    found: Walk, ends: list[tuple[int, int]], names: dict[int, str], *, tensor: bool
) -> tuple[list[Place], list[str]]:
    """Returns the places of a leaf that are in modules, and the paths of all others.

    A leaf that is no tensor (a NumPy array over the same memory) has only others.
    """
    places, left = [], []
    for node, position in ends:
        owner = found.objects[node] if node >= 0 else None
        path = found.place(node, position)
        if tensor and isinstance(owner, nn.Module) and id(owner) in names:
            leaf = path.steps[-1].key
            name = f"{names[id(owner)]}.{leaf}".removeprefix(".")
            if not isinstance(owner, nn.utils.parametrize.ParametrizationList):
                places.append(Place(name, owner, leaf))
                continue
        left.append(str(path))
    return places, left


def _kept(
    found: Walk,
    one: int | Cluster,
    members: list[int],
    stored: dict[int, list[Place]],
    preferred: set[str],
) -> tuple[Place | None, Storage | None]:
    """Returns the place that is kept and what all leaves read of it; None if none holds all."""
    choices = []
    for number, i in enumerate(members):
        if isinstance(one, int):
            ordered = True
        else:
            g = one.geometries[number]
            low, high = one.extent
            if math.prod(g.shape) * g.itemsize != high - low or repeats_elements(g):
                continue
            if g.conj or g.neg or any(stride < 0 for stride in g.strides):
                continue
            ordered = one.dense[number]
        choices += [
            (place.name not in preferred, not place.is_parameter, not ordered, number, rank, place)
            for rank, place in enumerate(stored[i])
        ]
    if not choices:
        return None, None
    *_, number, _, place = min(choices, key=lambda choice: choice[:5])
    if isinstance(one, int):
        return place, single(found, one)[0]
    return place, covered(found, one, number)


def _trainable(group: Group, on_conflict: str) -> bool:
    """Returns whether a storage is trained.

    Raises:
        TieError: Its parameters do not agree.
    """
    parameters = [place for place, _ in group.places if place.is_parameter]
    if group.kept is not None:
        parameters.insert(0, group.kept)
    wants = [place.tensor.requires_grad for place in parameters]
    if not any(wants):
        return False
    trainable = True
    if not all(wants):
        other = wants.index(not wants[0])
        if on_conflict == "raise":
            raise disagree(parameters[0], parameters[other])
        trainable = wants[0] if on_conflict == "source" else wants[other]
    source = group.span if group.kept is None else group.kept.tensor
    assert source is not None
    if trainable and not (source.is_floating_point() or source.is_complex()):
        raise _only_bits(group)
    return trainable


def _only_bits(group: Group) -> TieError:
    """Returns the error that a parameter reads the bits of what is no number to train."""
    places = [place for place, _ in group.places]
    places += [] if group.kept is None else [group.kept]
    trained = [place.name for place in places if place.tensor.requires_grad]
    others = [place.name for place in places if place.name not in trained]
    return TieError(
        "no gradient passes through a reading of bits",
        facts=[("trainable", ", ".join(trained)), ("same memory", ", ".join(others) or "these")],
        hint="Freeze it first, or give each memory of its own",
        paths=[*others, *trained],
    )


def disagree(source: Place, target: Place) -> TieError:
    """Returns the error that one side of a tie is trained and the other is not."""
    facts = [(_trained(source), source.name), (_trained(target), target.name)]
    return TieError(
        "one side of a tie is trainable and the other is frozen",
        facts=facts,
        hint='Say which counts: tied.tie(..., on_conflict="source") or "target"',
        paths=[source.name, target.name],
    )


def _trained(place: Place) -> str:
    if place.tensor.requires_grad:
        return "trainable"
    return "frozen" if place.is_parameter else "a buffer"


def _apply(module: nn.Module, group: Group, on_conflict: str) -> Iterator[TieChange]:
    """Makes the ties of a storage."""
    if group.kept is None:
        kept = _with_span(module, group)
    else:
        kept = group.kept
        _train(kept, group.trainable)
    source = group.storage if group.kept is not None else None
    shape = tuple(kept.tensor.shape)
    order = group.storage.order or tuple(range(len(shape)))
    dtype = TORCH.dtype(kept.tensor)
    for place, reader in group.places:
        root = common([kept.name, place.name])
        view = None if reader.layout is None else of_layout(reader.layout, shape, order, dtype)
        text = how(group.storage, reader) if source is not None else f"a part of {kept.name}"
        reads = Reads(
            module.get_submodule(root),
            below(place.name, root),
            (below(kept.name, root),),
            view,
            detached=not place.is_parameter,
            persistent=place.persistent,
            on_conflict=on_conflict,
        )
        _add_gradient(kept.tensor, place.tensor, view)
        replace(place, reads, [kept])
        watch_loading(module, module.get_submodule(root), place.owner)
        yield TieChange(kept.name, place.name, text)


def _add_gradient(kept: torch.Tensor, tied: torch.Tensor, view: View | None) -> None:
    """Adds the gradient that a tied tensor has to that of the one that is kept."""
    given = tied.grad
    if tied is kept or given is None or not kept.requires_grad:
        return
    if view is not None:
        with torch.enable_grad():
            source = kept.detach().requires_grad_()
            (given,) = torch.autograd.grad(view(source), source, given)
    kept.grad = given.clone() if kept.grad is None else kept.grad + given


def replace(place: Place, reads: Reads, sources: Iterable[Place]) -> None:
    """Puts a tie in the place of a tensor; what `state_dict` held of it, it holds of the source."""
    if place.persistent:
        for source in sources:
            if not source.is_plain:
                source.owner._non_persistent_buffers_set.discard(source.leaf)
    if place.is_plain:
        tensor = place.owner.__dict__.pop(place.leaf)
        place.owner.register_buffer(place.leaf, tensor, persistent=False)
    register(place.owner, place.leaf, reads)


def _train(place: Place, trainable: bool) -> None:
    """Makes a kept tensor trainable or not, as its storage is."""
    tensor = place.tensor
    if tensor.requires_grad == trainable:
        return
    if not place.is_parameter:
        del place.owner._buffers[place.leaf]
        place.owner.register_parameter(place.leaf, nn.Parameter(tensor))
        return
    tensor.requires_grad_(trainable)


def _with_span(module: nn.Module, group: Group) -> Place:
    """Registers the tensor that several leaves read parts of, where none of them holds it all."""
    root = common([place.name for place, _ in group.places])
    owner = module.get_submodule(root)
    number, name = 0, "tied_span"
    while hasattr(owner, name):
        number += 1
        name = f"tied_span{number}"
    assert group.span is not None
    value: Any = group.span
    if any(place.is_parameter for place, _ in group.places):
        owner.register_parameter(name, nn.Parameter(value, group.trainable))
    else:
        persistent = any(place.persistent for place, _ in group.places)
        owner.register_buffer(name, value, persistent=persistent)
    return Place(f"{root}.{name}".removeprefix("."), owner, name)
