"""The frameworks of JAX's survival matrix: how each holds a kind's members, by itself and tied.

Members stand in layers, as weights do: `first.w`, `second.w`, `third.w`. By itself a model holds
ordinary arrays; where the framework has no tie of that kind they are copies, as a user writes them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx

import tied
from jax_kinds import KINDS, NAMES, Kind, whole


def ordinary(kind: Kind, name: str) -> list[Any]:
    """Arrays of JAX with the members' values; one object where members are one array."""
    memory = jnp.array(kind.memory())
    if name == "no_tie_parts_of_one_split":
        return list(jnp.split(memory, 2))
    if name == "no_tie_one_buffer":
        return [memory, jax.device_put(memory, jax.devices()[0])]
    if kind.one or kind.layer:
        return [memory, memory]
    return [jnp.array(x) for x in kind.read(kind.memory())]


class Host:
    """Plain dicts of JAX; other frameworks say what differs."""

    title = "JAX"
    prefix = ""

    def layer(self, w: Any) -> Any:
        return {"w": w}

    def model(self, layers: list[Any]) -> Any:
        return dict(zip(NAMES, layers, strict=False))

    def get(self, model: Any, name: str) -> Any:
        """What stands at a member's place: of a bundle, of the merged model."""
        return model[name]["w"]

    def held(self, model: Any, kind: Kind) -> list[Any]:
        return [self.get(model, name) for name in kind.names]

    def members(self, model: Any, kind: Kind) -> list[Any]:
        """The members as ordinary arrays."""
        return self.held(model, kind)

    def path(self, name: str) -> str:
        return f"{self.prefix}{name}.w"

    def of(self, arrays: list[Any], kind: Kind) -> Any:
        layers = [self.layer(array) for array in arrays]
        return self.model([layers[0]] * len(layers) if kind.layer else layers)

    def plain(self, name: str) -> Any:
        """The model as the framework has it."""
        return self.of(ordinary(KINDS[name], name), KINDS[name])

    def before(self, name: str) -> list[Any]:
        """The arrays of a model that is to be tied."""
        kind = KINDS[name]
        if not kind.made:
            return shared(kind, name)
        arrays = ordinary(kind, name)
        kept = arrays[: kind.pieces]
        return [*kept, *(jnp.zeros_like(x) for x in arrays[len(kept) :])]  # values of targets go

    def tied(self, name: str) -> Any:
        """The model after `tied.tie`."""
        return self.tie_up(self.of(self.before(name), KINDS[name]), name)

    @functools.cache  # noqa: B019 - the few hosts live as long as their models
    def tied_once(self, name: str) -> Any:
        """The same; one for all, as nothing can be written to a bundle."""
        return self.tied(name)

    def tie_up(self, model: Any, name: str) -> Any:
        """Ties by path where a user would say it so, else makes the ties last that are there."""
        kind = KINDS[name]
        if not kind.made:
            return self.adopt(model)
        if name == "one_source_to_many":
            targets = tuple(self.path(target) for target in kind.names[1:])
            return self.tie(model, targets, self.path("first"), kind.made[0][1])
        for target, made in zip(kind.names[1:], kind.made, strict=True):
            if made:
                source, view = made
                sources = (
                    self.path(source) if isinstance(source, str) else [*map(self.path, source)]
                )
                model = self.tie(model, self.path(target), sources, view)
        return model

    def adopt(self, model: Any) -> Any:
        return tied.tie(model)

    def tie(self, model: Any, target: Any, source: Any, view: Any) -> Any:
        return tied.tie(model, target, source, view)

    def setting(self) -> contextlib.AbstractContextManager[Any]:
        """The framework's settings that operations run in."""
        return contextlib.nullcontext()

    def split(self, model: Any) -> tuple[Any, list[Any]]:
        """The static part of a model, hashable, and its arrays, each once."""
        leaves, tree = jax.tree.flatten(model)
        return tree, leaves

    def merge(self, static: Any, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(static, leaves)

    def loss(self, model: Any, kind: Kind) -> Any:
        """The sum of the real parts of all members."""
        return sum_of(self.members(model, kind))

    @functools.cached_property
    def losses(self) -> dict[str, Any]:
        """One function for each kind, so that JAX compiles what it is given once."""
        return {name: self.loss_of(kind) for name, kind in KINDS.items()}

    def loss_of(self, kind: Kind) -> Any:
        return lambda model: self.loss(model, kind)


def sum_of(members: list[Any]) -> Any:
    return functools.reduce(lambda x, y: x + y, [x.sum().real for x in members])


def shared(kind: Kind, name: str) -> list[Any]:
    """Arrays as a user of `tied` makes them: readings of one memory."""
    if not kind.tied or kind.one or kind.layer:
        return ordinary(kind, name)
    memory = jnp.array(kind.memory())
    return [memory if read is whole else tied.view(memory, read) for read in kind.reads]


# -------------------------------------------------------------------------------------- Equinox


class Layer(eqx.Module):
    w: Any


class Model(eqx.Module):
    first: Any
    second: Any
    third: Any = None


class Equinox(Host):
    title = "Equinox"

    def layer(self, w: Any) -> Any:
        return Layer(w)

    def model(self, layers: list[Any]) -> Any:
        return Model(*layers)

    def get(self, model: Any, name: str) -> Any:
        return getattr(model, name).w


# ---------------------------------------------------------------------------------------- linen


class Reader(flax.linen.Module):
    """A layer of one weight, and what it gives."""

    shape: tuple[int, ...]
    dtype: Any

    @flax.linen.compact
    def __call__(self) -> Any:
        return self.param("w", flax.linen.initializers.zeros, self.shape, self.dtype)


class Network(flax.linen.Module):
    """The layers of a kind, in linen: gives what each gives."""

    kind: str

    def setup(self) -> None:
        kind = KINDS[self.kind]
        layers = [Reader(x.shape, x.dtype) for x in kind.read(kind.memory())]
        self.first, self.second = layers[0], layers[0] if kind.layer else layers[1]
        if len(layers) > 2:
            self.third = layers[2]

    def __call__(self) -> Any:
        return [getattr(self, name)() for name in KINDS[self.kind].names]


class Linen(Host):
    """Variables of linen; a layer that is used twice stands in them once."""

    title = "flax.linen"
    prefix = "params."

    def of(self, arrays: list[Any], kind: Kind) -> Any:
        return super().of(arrays[:1] if kind.layer else arrays, kind)

    def model(self, layers: list[Any]) -> Any:
        return {"params": super().model(layers)}

    def get(self, model: Any, name: str) -> Any:
        params = model["params"]
        return params.get(name, params["first"])["w"]


# ------------------------------------------------------------------------------------------ NNX


class Weight(nnx.Module):
    def __init__(self, w: Any) -> None:
        self.w = w if isinstance(w, nnx.Param) else nnx.Param(w)


class Pair(nnx.Module):
    def __init__(self, layers: list[Any]) -> None:
        for name, layer in zip(NAMES, layers, strict=False):
            setattr(self, name, layer)


class NNX(Host):
    """NNX in graph mode, or in tree mode."""

    def __init__(self, graph: bool) -> None:
        self.graph = graph
        self.title = f"NNX, {'graph' if graph else 'tree'} mode"

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        with nnx.set_graph_mode(self.graph), nnx.set_graph_updates(self.graph):
            yield

    def layer(self, w: Any) -> Any:
        return Weight(w)

    def model(self, layers: list[Any]) -> Any:
        return Pair(layers)

    def of(self, arrays: list[Any], kind: Kind) -> Any:
        if kind.one:
            arrays = [nnx.Param(arrays[0])] * len(arrays)
        return super().of(arrays, kind)

    def get(self, model: Any, name: str) -> Any:
        return getattr(model, name).w

    def members(self, model: Any, kind: Kind) -> list[Any]:
        return [x[...] for x in self.held(model, kind)]

    def tied_once(self, name: str) -> Any:
        return self.tied(name)

    def adopt(self, model: Any) -> Any:
        tied.tie(model)
        return model

    def tie(self, model: Any, target: Any, source: Any, view: Any) -> Any:
        tied.tie(model, target, source, view)
        return model

    def split(self, model: Any) -> tuple[Any, list[Any]]:
        graphdef, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        return (graphdef, tree), leaves

    def merge(self, static: Any, leaves: list[Any]) -> Any:
        graphdef, tree = static
        return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


HOSTS: dict[str, Host] = {
    "jax": Host(),
    "equinox": Equinox(),
    "nnx_graph": NNX(graph=True),
    "nnx_tree": NNX(graph=False),
    "linen": Linen(),
}
# JAX's own transformations know no modes: what they compile serves both.
HOSTS["nnx_tree"].losses = HOSTS["nnx_graph"].losses
