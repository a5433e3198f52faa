"""Models of Hugging Face transformers: what they name, save and resize themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tied._torch.dressed import register
from tied._torch.places import Place, locate, must_not_turn_back
from tied._torch.reads import Reads, Tie, reads_of, ties_below
from tied._torch.state import watch_repeats
from tied._torch.ways import Back


def declared(module: nn.Module) -> set[str]:
    """Returns the names that models of transformers keep of what they tie themselves."""
    found = set()
    for prefix, part in module.named_modules():
        ties = getattr(part, "all_tied_weights_keys", None)
        if isinstance(ties, dict):
            found |= {f"{prefix}.{source}".removeprefix(".") for source in ties.values()}
    return found


def _declared_targets(model: nn.Module) -> set[str]:
    ties = getattr(model, "all_tied_weights_keys", None)
    return set(ties) if isinstance(ties, dict) else set()


def keep_ways(module: nn.Module) -> None:
    """Makes the models of transformers in a module save and resize with their lasting ties."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for part in module.modules():
        if isinstance(part, transformers.PreTrainedModel):
            for method in (SavePretrained, ResizeTokenEmbeddings, ExpandedTies):
                part.__dict__.setdefault(method.name, method(Back(part)))
            for tie in ties_below(part):
                tie.reads.keep_marks()


class Method:
    """A method of one model, in the place of the one of its class."""

    name = ""

    __slots__ = ("back",)

    def __init__(self, back: Back) -> None:
        self.back = back

    def __getstate__(self) -> Any:
        return self.back

    def __setstate__(self, back: Back) -> None:
        self.back = back


class SavePretrained(Method):
    """Saves a model, with the value of each tie that its config does not declare.

    A reader that knows nothing of the tie would draw a missing tensor anew at random.
    """

    name = "save_pretrained"

    __slots__ = ()

    def __call__(self, save_directory: Any, *args: Any, **settings: Any) -> Any:
        """Does what the model's own method does."""
        model: Any = self.back()
        state = settings.pop("state_dict", None)
        whole = model.state_dict() if state is None else dict(state)
        expand(model, whole)
        return type(model).save_pretrained(
            model, save_directory, *args, state_dict=whole, **settings
        )


class ExpandedTies(Method):
    """Expands what the config of a model ties, which looks for the names among its parameters."""

    name = "get_expanded_tied_weights_keys"

    __slots__ = ()

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Does what the model's own method does."""
        model: Any = self.back()

        def named(*args: Any, **settings: Any) -> Iterator[tuple[str, torch.Tensor]]:
            yield from type(model).named_parameters(model, *args, **settings)
            yield from ((tie.name, tie.reads.read()) for tie in ties_below(model))

        model.__dict__["named_parameters"] = named
        try:
            return type(model).get_expanded_tied_weights_keys(model, *args, **settings)
        finally:
            model.__dict__.pop("named_parameters", None)  # the method calls itself


class ResizeTokenEmbeddings(Method):
    """Resizes the vocabulary of a model, and ties anew what has got another module meanwhile."""

    name = "resize_token_embeddings"

    __slots__ = ()

    def __call__(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        **settings: Any,
    ) -> Any:
        """Does what the model's own method does.

        Raises:
            TieError: A tied embedding or head could not follow; the model is as it was.
        """
        model: Any = self.back()
        before = list(ties_below(model))
        tokens = new_num_tokens or model.get_input_embeddings().weight.shape[0]
        if pad_to_multiple_of:
            tokens = -(-tokens // pad_to_multiple_of) * pad_to_multiple_of
        _must_follow(model, tokens)
        made = type(model).resize_token_embeddings(
            model, new_num_tokens, pad_to_multiple_of, **settings
        )
        for tie in before:
            place = locate(model, tie.name)
            if place.owner is not tie.owner and place.reads is None:
                _tie_again(model, place, tie)
        return made


def _must_follow(model: Any, tokens: int) -> None:
    """Raises if an embedding or head reads what would not be resized, or only a part of it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = embedding.weight
    if table.shape[0] == tokens:
        return
    for module in (embedding, head):
        reads = reads_of(module).get("weight") if isinstance(module, nn.Module) else None
        if reads is None or reads.view is None:
            continue
        if module is head and len(reads.sources) == 1 and reads.sources[0].fetch() is table:
            seen = reads.view(torch.empty(tokens, *table.shape[1:], device="meta"))
            if seen.shape == (tokens, *reads.read().shape[1:]):
                continue
        raise reads.refused(
            f"{reads.target} can't be resized, since it is computed",
            facts=[("tokens", f"{table.shape[0]} to {tokens}")],
        )


def _tie_again(model: nn.Module, place: Place, tie: Tie) -> None:
    reads = tie.reads
    sources = [locate(model, source) for source in tie.sources or ()]
    if any((s.owner, s.leaf) == (place.owner, place.leaf) for s in sources):
        watch_repeats(model)  # one module stands at both places now
        return
    must_not_turn_back(place, sources)
    reads.armed = False
    register(place.owner, place.leaf, reads)


@torch.no_grad()
def expand(model: nn.Module, state: dict[str, Any]) -> None:
    """Adds to a state dict the tied tensors that the config of a model does not tie.

    They are computed from what is in the state dict, which may be an average or gathered. Where the
    source is not in it (an adapter is a part of a model) nothing is added.
    """
    known = _declared_targets(model)
    values = dict(state)
    waiting = list(ties_below(model))
    while waiting:
        ready = [tie for tie in waiting if all(name in values for name in tie.sources or ())]
        for name, _, reads, sources in ready:
            seen = _value(reads, sources, values)
            values.setdefault(name, seen)
            if name not in known and name not in state and reads.persistent:
                state[name] = seen.detach().clone(memory_format=torch.contiguous_format)
        if not ready:
            return
        waiting = [tie for tie in waiting if tie not in ready]


def _value(reads: Reads, sources: tuple[str, ...] | None, values: dict[str, Any]) -> torch.Tensor:
    """Returns a tied tensor of these values; that of now if it reads what is outside."""
    if sources is None:
        return reads.read()
    read = [values[source] for source in sources]
    return read[0] if reads.view is None else reads.view(*read)
