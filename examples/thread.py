"""The example that `tied` comes from, run on NumPy, PyTorch and JAX arrays alike.

Flux.jl issue 1504: a decoder reads the transpose of its encoder's weight. After a cast to f64 or a
move to the GPU there were two weights, and nobody was told. Here each model goes through f64, f32,
f16, a move to another device (or library) and back, and a copy. After each of them the two must
still be one weight, and the model must compute what it computed.

    python examples/thread.py
"""

import os

# Two JAX devices on the CPU, to have one to move to; and f64, which JAX has only when told so.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ["JAX_ENABLE_X64"] = "1"

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tied
from tied.layers import Chain, Dense

Array = Any
Model = Callable[[Array], Array]


def check(condition: object, what: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {what}")


# -- the models -----------------------------------------------------------------------------------


class Pair:
    """A layer of one's own that holds W once and uses it twice: nothing can come untied."""

    def __init__(self, W: Array) -> None:
        self.W = W

    def __call__(self, x: Array) -> Array:
        return (x @ self.W.T) @ self.W


@dataclass
class TwoReadings:
    """A layer of one's own that holds W and a reading of it; a batch of matrices works too."""

    W: Array
    V: Array

    def __call__(self, x: Array) -> Array:
        return (x @ self.V) @ self.W


class TorchPair(torch.nn.Module):
    """The same as a torch module, with two Parameters over one memory."""

    def __init__(self, W: Array) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(W)
        self.V = torch.nn.Parameter(tied.transpose(W))

    def forward(self, x: Array) -> Array:
        return (x @ self.V) @ self.W


@dataclass(frozen=True)
class Case:
    """A model, an input for it, and which of its arrays reads which other one, and how."""

    name: str
    model: Model
    x: Array
    base: Callable[[Any], Array]
    view: Callable[[Any], Array]
    reading: Callable[[np.ndarray], np.ndarray]


def chain(name: str, library: str, view: Callable[[Array], Array], reading: Any) -> Case:
    """`Chain(encoder, decoder)`, whose decoder's weight is a view of the encoder's."""
    encoder = Dense(6, 4, library=library)
    W = view(encoder.W)
    decoder = Dense(W, zeros(library, W.shape[0]))
    model = Chain(encoder, decoder)
    return Case(name, model, zeros(library, 5, 6) + 1, base, lambda m: m[1].W, reading)


def base(model: Any) -> Array:
    return model[0].W


def zeros(library: str, *shape: int) -> Array:
    return tied.to(np.zeros(shape, np.float32), library)


def cases(library: str) -> Iterator[Case]:
    """What is tied to what, in the models of the thread."""

    def sliced(W: Array) -> Array:
        return W[1:3, :4]

    def reshaped(W: Array) -> Array:
        return W.reshape(6, 4)

    yield chain("decoder.W = transpose", library, tied.transpose, np.transpose)
    yield chain("decoder.W = slice", library, lambda W: tied.view(W, sliced), sliced)
    yield chain("decoder.W = reshape", library, lambda W: tied.view(W, reshaped), reshaped)

    encoder = Dense(4, 4, library=library)
    last = Dense(Dense(4, 4, library=library, seed=1).W, tied.diagonal(encoder.W))
    x = zeros(library, 5, 4) + 1
    yield Case("last.b = diagonal", Chain(encoder, last), x, base, lambda m: m[1].b, np.diagonal)

    W = Dense(6, 4, library=library).W
    stack = tied.to(np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 4, 3), library)
    swapped = tied.permute(stack, (0, 2, 1))
    own = (lambda m: m.W), (lambda m: m.V)
    transposed = TwoReadings(W, tied.transpose(W))
    x3 = zeros(library, 2, 5, 3) + 1
    x = zeros(library, 5, 6) + 1
    yield Case("V = permute", TwoReadings(stack, swapped), x3, *own, lambda W: W.transpose(0, 2, 1))
    yield Case("a dataclass, V = transpose", transposed, x, *own, np.transpose)
    if library == "torch":
        yield Case("a torch module, V = transpose", TorchPair(W), x, *own, np.transpose)
    yield Case("a class that uses W twice", Pair(W), x, own[0], own[0], lambda W: W)


# -- what is done to them -------------------------------------------------------------------------


def another_place(library: str) -> str:
    """A GPU where there is one; else JAX's second CPU device, or another array library."""
    if library == "torch" and torch.cuda.is_available():
        return "cuda"
    return {"numpy": "torch", "torch": "jax", "jax": "cpu:1"}[library]


def operations(library: str) -> dict[str, Callable[[Any], Any]]:
    away = another_place(library)
    back = {"cuda": "cpu", "cpu:1": "cpu:0"}.get(away, library)
    return {
        "f64": tied.f64,
        "f32": tied.f32,
        "f16": tied.f16,
        away: lambda model: tied.to(model, away),
        f"{away} to {back}": lambda model: tied.to(model, back),
        "copy": tied.copy,
    }


def values(a: Array) -> np.ndarray:
    if isinstance(a, torch.Tensor):
        return a.detach().cpu().numpy()
    return np.asarray(a)


def check_tied(case: Case, model: Any, when: str) -> None:
    """The view reads the base, in memory and in values, as it did at the start."""
    when = f"{case.name}, after {when}"
    one, two = case.base(model), case.view(model)
    check(np.array_equal(values(two), case.reading(values(one))), f"{when}: other values")
    check(tied.shares(one, two), f"{when}: the memory is no longer shared")
    changes = tied.compare(case.model, model)
    check(not changes, f"{when}: {changes}")


def check_written(case: Case, model: Any, when: str) -> None:
    """What is written to the base is read through the view (JAX's arrays can't be written to)."""
    one, two = case.base(model), case.view(model)
    if isinstance(one, np.ndarray):
        one += 1
    elif isinstance(one, torch.Tensor):
        one.data += 1
    seen = np.array_equal(values(two), case.reading(values(one)))
    check(seen, f"{case.name}, after {when}: a write to the base was not seen through the view")


def run(case: Case, library: str) -> list[str]:
    """Puts one case through all operations, one after another; returns their names."""
    check_tied(case, case.model, "nothing")
    expected = values(case.model(case.x))
    model, x = case.model, case.x
    done = []
    for name, operation in operations(library).items():
        model, x = operation((model, x))
        check_tied(case, model, name)
        tolerance = 1e-2 if "f16" in [*done, name] else 1e-6
        close = np.allclose(values(model(x)), expected, rtol=tolerance, atol=tolerance)
        check(close, f"{case.name}, after {name}: the model computes something else")
        done.append(name)
    check_written(case, model, name)
    check(np.array_equal(values(case.model(case.x)), expected), f"{case.name}: argument changed")
    return done


# -- the other wish of the thread -----------------------------------------------------------------


def untied(library: str) -> None:
    """A transpose that is not tied is a copy; and it stays one."""
    encoder = Dense(6, 4, library=library)
    copied = {
        "numpy": lambda W: W.T.copy(),
        "torch": lambda W: W.T.clone(),
        "jax": lambda W: jnp.array(W.T),
    }[library](encoder.W)
    model = Chain(encoder, Dense(copied, zeros(library, 6)))
    for operation in (tied.f64, tied.f32, tied.copy):
        model = operation(model)
        check(not tied.shares(model[0].W, model[1].W), "a copy was tied")
        check(not tied.ties(model).tied, "a tie was invented")


def main() -> None:
    check(len(jax.devices("cpu")) >= 2, "two JAX CPU devices")
    for library in ("numpy", "torch", "jax"):
        print(library)
        for case in cases(library):
            done = run(case, library)
            print(f"  {case.name:<30} tied, same output after {', '.join(done)}")
        untied(library)
        print(f"  {'decoder.W = a copy':<30} not tied, and stays so")
    encoder = Dense(2, 3)
    print(tied.ties(Chain(encoder, Dense(tied.transpose(encoder.W), np.zeros(2, np.float32)))))
    print("all as it should be")


if __name__ == "__main__":
    main()
