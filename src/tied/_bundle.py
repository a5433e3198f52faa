"""A model as a JAX pytree that holds each storage once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tied import arrays
from tied._node import Node, Opened, declare
from tied._path import Step
from tied._skeleton import Skeleton, split


class Bundle:
    """A JAX pytree whose children are a model's storages and whose static part is its skeleton.

    Whatever JAX does to it (`jit`, `grad`, `vmap`, `device_put`, `jax.tree.map`, an optax
    optimizer, donation) crosses each storage once, so nothing comes untied, and the gradient by a
    storage is the sum over its uses. Calling a bundle, or reading an attribute or an item, first
    merges the model; inside, leaves are plain arrays, so any JAX code takes them.

    Args:
        model: Any object whose arrays JAX takes. Its storages are shared, not copied.

    Attributes:
        storages: The dict from name to array.
        skeleton: The `Skeleton`.
        model: The merged model.

    >>> import jax, jax.numpy as jnp, tied
    >>> W = jnp.ones((2, 3))
    >>> bundle = tied.Bundle({"enc": W, "dec": tied.transpose(W)})
    >>> grads = jax.grad(lambda b: (2 * b["enc"]).sum() + (3 * b["dec"]).sum())(bundle)
    >>> len(jax.tree.leaves(bundle)), float(grads.storages["enc"][0, 0])
    (1, 5.0)
    """

    __slots__ = ("__weakref__", "_model", "skeleton", "storages")

    skeleton: Skeleton
    storages: dict[str, Any]

    def __init__(self, model: Any) -> None:
        arrays.load("jax")
        _register()
        skeleton, storages = split(model)
        _set(self, skeleton, storages)

    @property
    def model(self) -> Any:
        """The model over these storages, with plain arrays as leaves."""
        if self._model is None:
            object.__setattr__(self, "_model", self.skeleton.merge(self.storages, plain=True))
        return self._model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in (*Bundle.__slots__, "model"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a Bundle can't be changed in place ({name}); make a new one: tied.Bundle(model)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.model[key]

    def __len__(self) -> int:
        return len(self.model)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)

    def __contains__(self, item: Any) -> bool:
        return item in self.model

    def __repr__(self) -> str:
        return f"Bundle({', '.join(self.storages)})"

    def __reduce__(self) -> Any:
        return _revive, (self.skeleton, self.storages)


def _set(bundle: Bundle, skeleton: Skeleton, storages: dict[str, Any]) -> None:
    object.__setattr__(bundle, "skeleton", skeleton)
    object.__setattr__(bundle, "storages", storages)
    object.__setattr__(bundle, "_model", None)


def _revive(skeleton: Skeleton, storages: dict[str, Any]) -> Bundle:
    _register()
    bundle = Bundle.__new__(Bundle)
    _set(bundle, skeleton, storages)
    return bundle


class BundleNode(Node):
    """A bundle is its model to a walk, so that it is reported, cast and moved as that."""

    def open(self, x: Bundle) -> Opened:
        return (Step("inside", "model"),), [x.skeleton.merge(x.storages)], None

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return Bundle(values[0])


declare(Bundle, BundleNode())

_done: list[bool] = []


def _register() -> None:
    if _done:
        return
    _done.append(True)
    import jax

    def flatten(bundle: Bundle) -> tuple[tuple[Any, ...], Skeleton]:
        return tuple(bundle.storages.values()), bundle.skeleton

    def flatten_with_keys(bundle: Bundle) -> Any:
        pairs = [(jax.tree_util.DictKey(name), x) for name, x in bundle.storages.items()]
        return pairs, bundle.skeleton

    def unflatten(skeleton: Skeleton, children: Any) -> Bundle:
        return _revive(skeleton, dict(zip(skeleton.names, children, strict=True)))

    jax.tree_util.register_pytree_with_keys(Bundle, flatten_with_keys, unflatten, flatten)
