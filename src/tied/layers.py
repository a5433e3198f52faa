"""Dense and Chain: enough of a network for examples and tests, on any array library.

They are plain classes, as a user would write them; nothing in the library knows of them. Real
networks come from PyTorch, Flax and Equinox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tied._move import to

Array = Any
"""An array of NumPy, PyTorch or JAX, or a `tied.View` of one."""

Function = Callable[[Array], Array]


class Dense:
    """A dense layer: `activation(x @ W.T + b)`.

    `Dense(W, b)` takes arrays as they are and shares their memory; so `W` may be
    `tied.transpose(encoder.W)`. `Dense(2, 3)` makes arrays of its own for two inputs and three
    outputs: float32, `W` by Glorot and Bengio (AISTATS 2010; uniform), `b` zeros.

    Args:
        W: The weights, of shape `(outputs, inputs)`; or the number of inputs.
        b: The bias, of shape `(outputs,)`; or the number of outputs.
        activation: A function of an array; none by default.
        library: "numpy", "torch" or "jax"; used where arrays are made.
        seed: For `numpy.random.default_rng`, so that every library starts from the same weights.

    Raises:
        ValueError: `W` and `b` do not fit each other.
        LibraryError: The array library is not installed.

    >>> import tied
    >>> encoder = Dense(2, 3)
    >>> decoder = Dense(tied.transpose(encoder.W), np.zeros(2, "f4"))
    >>> Chain(encoder, decoder)
    Chain(Dense(2, 3), Dense(3, 2))
    >>> tied.shares(encoder.W, decoder.W)
    True
    """

    def __init__(
        self,
        W: Array | int,
        b: Array | int,
        activation: Function | None = None,
        *,
        library: str = "numpy",
        seed: int | None = 0,
    ) -> None:
        if isinstance(W, int) and isinstance(b, int):
            W, b = to(_glorot(W, b, seed), library)
        assert not isinstance(W, int)
        assert not isinstance(b, int)
        if len(W.shape) != 2 or tuple(b.shape) != (W.shape[0],):
            raise ValueError(
                f"W {tuple(W.shape)} and b {tuple(b.shape)} do not fit: "
                "W is (outputs, inputs), b is (outputs,)"
            )
        self.W = W
        self.b = b
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """Returns the outputs, `(..., outputs)`, for `x` of shape `(..., inputs)`."""
        y = x @ self.W.T + self.b
        return y if self.activation is None else self.activation(y)

    def __repr__(self) -> str:
        outputs, inputs = self.W.shape
        name = getattr(self.activation, "__name__", repr(self.activation))
        return f"Dense({inputs}, {outputs}{'' if self.activation is None else f', {name}'})"


def _glorot(inputs: int, outputs: int, seed: int | None) -> tuple[Array, Array]:
    limit = np.sqrt(6 / (inputs + outputs))
    weights = np.random.default_rng(seed).uniform(-limit, limit, (outputs, inputs))
    return weights.astype(np.float32), np.zeros(outputs, np.float32)


class Chain:
    """Layers, one after another; `chain[0]` is the first, `chain[1:]` a chain of the others.

    Args:
        layers: Functions of one array, most often `Dense`.
    """

    def __init__(self, *layers: Function) -> None:
        self.layers = layers

    def __call__(self, x: Array) -> Array:
        """Returns what the last layer makes of what the one before it makes of ... `x`."""
        for layer in self.layers:
            x = layer(x)
        return x

    def __getitem__(self, index: int | slice) -> Any:
        return Chain(*self.layers[index]) if isinstance(index, slice) else self.layers[index]

    def __iter__(self) -> Iterator[Function]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.layers))})"
