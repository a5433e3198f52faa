"""A model as a JAX pytree that holds each storage once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tied import arrays
from tied._errors import MergeError, TiedError
from tied._node import Node, Opened, declare
from tied._path import Step
from tied._requests import Requests
from tied._skeleton import Skeleton, split
from tied._storage import storages
from tied._walk import walk
from tied._write import written


class Bundle:
    """A JAX pytree whose children are a model's storages and whose static part is its skeleton.

    Whatever JAX does to it (`jit`, `grad`, `vmap`, `device_put`, `jax.tree.map`, an optax
    optimizer, donation) crosses each storage once, so nothing comes untied, and the gradient by a
    storage is the sum over its uses. Calling a bundle, or reading an attribute or an item, first
    merges the model; inside, leaves are plain arrays, so any JAX code takes them.

    Args:
        model: Any object whose arrays JAX takes. Its storages are shared, not copied.

    Attributes:
        storages: A dict from name to array, a new one each time.
        skeleton: The `Skeleton`.
        model: The merged model.

    >>> import jax, jax.numpy as jnp, tied
    >>> W = jnp.ones((2, 3))
    >>> bundle = tied.Bundle({"enc": W, "dec": tied.transpose(W)})
    >>> grads = jax.grad(lambda b: (2 * b["enc"]).sum() + (3 * b["dec"]).sum())(bundle)
    >>> len(jax.tree.leaves(bundle)), float(grads.storages["enc"][0, 0])
    (1, 5.0)
    """

    __slots__ = ("__weakref__", "_model", "_storages", "skeleton")

    skeleton: Skeleton
    _storages: dict[str, Any]

    def __init__(self, model: Any) -> None:
        arrays.load("jax")
        _register()
        skeleton, storages = split(model)
        _set(self, skeleton, storages)

    @property
    def storages(self) -> dict[str, Any]:
        """The storages by name: a dict of its own, as some savers write into theirs."""
        return dict(self._storages)

    @property
    def model(self) -> Any:
        """The model over these storages, with plain arrays as leaves.

        Raises:
            MergeError: The storages are no arrays of the skeleton's shapes: they are stacked (then
                `jax.vmap` and `jax.lax.scan` give a bundle that has a model), or placeholders.
        """
        if self._model is None:
            object.__setattr__(self, "_model", self._merged())
        return self._model

    def _merged(self) -> Any:
        try:
            return self.skeleton.merge(self._storages, plain=True)
        except MergeError as error:
            hint = (
                "Read stacked storages inside jax.vmap or jax.lax.scan, split ones (shard_map)"
                " after jax.lax.all_gather; other values are put in by"
                f' bundle.set("{self.skeleton.names[0]}", value)'
            )
            facts, paths = error.facts, error.paths
            raise MergeError(error.message, facts=facts, hint=hint, paths=paths) from error

    def set(self, path: str, value: Any) -> Bundle:
        """Returns a bundle in which an array has other values, and all that is tied to it too.

        Args:
            path: Any name of the array, as in the model: `"decoder.kernel"`, also where that reads
                an encoder's kernel.
            value: An array of that array's shape and dtype.

        Raises:
            PathError: There is no array of that name.
            TieError: The shape or dtype is another one, or the array is computed from others or
                reads an element twice, so that it can't be written through.

        >>> import jax.numpy as jnp, tied
        >>> W = jnp.ones((2, 3))
        >>> bundle = tied.Bundle({"enc": W, "dec": tied.transpose(W)})
        >>> bundle.set("dec", jnp.arange(6.0).reshape(3, 2))["enc"].tolist()
        [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
        """
        found = walk(self.skeleton.merge(self._storages), extras=True)
        number, array = written(found, path, value)
        return _revive(self.skeleton, {**self._storages, self.skeleton.names[number]: array})

    def axes(self, wanted: Mapping[str, int | None], default: int | None = None) -> Bundle:
        """Returns a bundle of axes, for `in_axes` and `out_axes` of `jax.vmap` over stacked ones.

        Args:
            wanted: The axis, or None, for each glob on names of arrays; any name of an array
                counts. The first glob that fits a name is taken for it.
            default: The axis of storages for which nothing is asked.

        Raises:
            PathError: A glob fits no name.
            TieError: Two names of one storage ask for different axes.

        >>> import jax.numpy as jnp, tied
        >>> W = jnp.ones((2, 3))
        >>> bundle = tied.Bundle({"enc": W, "dec": tied.transpose(W), "bias": jnp.ones(3)})
        >>> bundle.axes({"dec": 0}).storages
        {'enc': 0, 'bias': None}
        """
        import jax

        abstract: Any = jax.ShapeDtypeStruct
        shapes = {s.name: abstract(s.shape, "float32") for s in self.skeleton.storages}
        found = walk(self.skeleton.merge(shapes), extras=True)
        asked = Requests(found, wanted, "axes")
        axes = [asked.of(storage, default) for storage, _ in storages(found)]
        return _revive(self.skeleton, dict(zip(self.skeleton.names, axes, strict=True)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in (*Bundle.__slots__, "model"):
            raise AttributeError(name)
        try:
            model = self.model
        except TiedError as error:
            raise AttributeError(f"this bundle has no {name}: {error}", name=name) from error
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a Bundle can't be changed in place ({name}); make a new one: bundle.set(name, value)"
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
        return f"Bundle({', '.join(self._storages)})"

    def __reduce__(self) -> Any:
        return _revive, (self.skeleton, self._storages)


def _set(bundle: Bundle, skeleton: Skeleton, storages: dict[str, Any]) -> None:
    object.__setattr__(bundle, "skeleton", skeleton)
    object.__setattr__(bundle, "_storages", storages)
    object.__setattr__(bundle, "_model", None)


def _revive(skeleton: Skeleton, storages: dict[str, Any]) -> Bundle:
    _register()
    bundle = Bundle.__new__(Bundle)
    _set(bundle, skeleton, storages)
    return bundle


class BundleNode(Node):
    """A bundle is its model to a walk, so that it is reported, cast and moved as that."""

    def open(self, x: Bundle) -> Opened:
        return (Step("inside", "model"),), [x.skeleton.merge(x._storages)], None

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return Bundle(values[0])


declare(Bundle, BundleNode())

_done: list[bool] = []


def _register() -> None:
    if _done:
        return
    _done.append(True)
    import jax
    import jax.export

    def flatten(bundle: Bundle) -> tuple[tuple[Any, ...], Skeleton]:
        return tuple(bundle._storages.values()), bundle.skeleton

    def flatten_with_keys(bundle: Bundle) -> Any:
        pairs = [(jax.tree_util.DictKey(name), x) for name, x in bundle._storages.items()]
        return pairs, bundle.skeleton

    def unflatten(skeleton: Skeleton, children: Any) -> Bundle:
        return _revive(skeleton, dict(zip(skeleton.names, children, strict=True)))

    jax.tree_util.register_pytree_with_keys(Bundle, flatten_with_keys, unflatten, flatten)
    jax.export.register_pytree_node_serialization(
        Bundle,
        serialized_name="tied.Bundle",
        serialize_auxdata=pickle.dumps,
        deserialize_auxdata=pickle.loads,
    )
