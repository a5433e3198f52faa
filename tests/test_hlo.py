"""Nothing of a tie is left in the compiled program.

Each network is written twice: tied (a second weight that reads the first), and by hand with one
parameter, whose transpose (or slice, flip, diagonal) is taken where it is used. For the forward
pass and for a whole training step we compare, of both,

- the lowered program (StableHLO) and the compiled one (optimised HLO, on CPU): the shapes of the
  entry's parameters, which are one for each storage, and one for the data;
- the histogram of operations over all computations of the optimised HLO, the bodies of fusions
  included: equal, so there is no copy, transpose, broadcast or gather that is not in the other;
- the histogram of operations of the lowered program: equal too;
- the bytes of arguments, outputs and temporaries that XLA plans: equal.

A program in which the tie was lost is shown to differ in each of these.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tied

Read = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Net:
    """Memory, how the second layer reads it, and the network over the two weights."""

    shape: tuple[int, ...]
    data: tuple[int, ...]
    read: Read
    apply: Callable[[Any, Any, Any], Any]
    first: Read = lambda w: w


def matmuls(a: Any, b: Any, x: Any) -> Any:
    return jax.nn.relu(x @ a) @ b


def banks(a: Any, b: Any, x: Any) -> Any:
    return jax.nn.relu(x @ a.T) @ b


def scaled(a: Any, d: Any, x: Any) -> Any:
    return jax.nn.relu(x @ a) * d


def conv(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def convolutions(a: Any, b: Any, x: Any) -> Any:
    return conv(jax.nn.relu(conv(x, a)), b)


def mirrored(w: Any) -> Any:
    """What makes a convolution its own transpose: flipped in space, channels exchanged."""
    return w[::-1, ::-1].swapaxes(2, 3)


NETS = {
    "matmul_transpose": Net((512, 1024), (16, 512), lambda w: w.T, matmuls),
    "matmul_overlapping_rows": Net((640, 512), (16, 512), lambda w: w[128:], banks,
                                   lambda w: w[:512]),
    "matmul_diagonal": Net((512, 512), (16, 512), lambda w: w.diagonal(), scaled),
    "matmul_same": Net((512, 512), (16, 512), lambda w: w, matmuls),
    "conv_transpose": Net((3, 3, 16, 32), (2, 12, 12, 16), lambda w: w.swapaxes(2, 3),
                          convolutions),
    "conv_flip_transpose": Net((3, 3, 16, 32), (2, 12, 12, 16), mirrored, convolutions),
}  # fmt: skip


# --------------------------------------------------------------- the ways to write it with tied


class Pair(eqx.Module):
    a: Any
    b: Any
    apply: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.apply(self.a, self.b, x)


def tie(w: Any, read: Read) -> Any:
    return w if read(w) is w else tied.view(w, read)


def as_dict(net: Net, w: Any) -> Any:
    return {"a": tie(w, net.first), "b": tie(w, net.read)}


def as_equinox(net: Net, w: Any) -> Any:
    return Pair(tie(w, net.first), tie(w, net.read), net.apply)


Apply = Callable[[Any, Any], Any]
Written = tuple[Any, Apply]  # parameters, and the network over them


def bundle_of_dict(net: Net, w: Any) -> Written:
    return tied.Bundle(as_dict(net, w)), lambda b, x: net.apply(b["a"], b["b"], x)


def bundle_of_equinox(net: Net, w: Any) -> Written:
    return tied.Bundle(as_equinox(net, w)), lambda b, x: b(x)


def closed_over(net: Net, w: Any) -> Written:
    skeleton, weights = tied.split(as_equinox(net, w))
    return weights, lambda weights, x: skeleton.merge(weights, plain=True)(x)


def views_in_the_model(net: Net, w: Any) -> Written:
    """Merged without `plain`: the weights are `View`s, which `jnp` functions take."""
    skeleton, weights = tied.split(as_dict(net, w))

    def apply(weights: Any, x: Any) -> Any:
        model = skeleton.merge(weights)
        return net.apply(jnp.asarray(model["a"]), jnp.asarray(model["b"]), x)

    return weights, apply


def by_path(net: Net, w: Any) -> Written:
    """A finished model with weights of its own, tied afterwards."""
    if net.first(w) is not w:
        model = {"bank": w, "net": Pair(jnp.copy(net.first(w)), jnp.copy(net.read(w)), net.apply)}
        bundle = tied.tie(tied.tie(model, "net.a", "bank", net.first), "net.b", "bank", net.read)
        return bundle, lambda b, x: b["net"](x)
    view = None if net.read(w) is w else net.read
    bundle = tied.tie(Pair(w, jnp.copy(net.read(w)), net.apply), "b", "a", view)
    return bundle, lambda b, x: b(x)


class NnxBank(nnx.Module):
    """A module of NNX that also holds memory that neither weight is the whole of."""

    def __init__(self, net: Net, w: Any) -> None:
        self.bank = nnx.Param(w)
        self.net = NnxPair(net, net.first(w), jnp.copy(net.read(w)))

    def __call__(self, x: Any) -> Any:
        return self.net(x)


class NnxPair(nnx.Module):
    def __init__(self, net: Net, a: Any, b: Any) -> None:
        self.a, self.b, self.apply = nnx.Param(a), nnx.Param(b), net.apply

    def __call__(self, x: Any) -> Any:
        return self.apply(self.a[...], self.b[...], x)


def nnx_by_path(net: Net, w: Any) -> Written:
    """A module of NNX, tied in place, and its state."""
    if net.first(w) is w:
        model: Any = NnxPair(net, w, jnp.copy(net.read(w)))
        tied.tie(model, "b", "a", None if net.read(w) is w else net.read)
    else:
        model = NnxBank(net, w)
        tied.tie(model, "net.a", "bank", net.first)
        tied.tie(model, "net.b", "bank", net.read)
    graphdef, state = nnx.split(model)
    return state, lambda state, x: nnx.merge(graphdef, state)(x)


def by_hand(net: Net, w: Any) -> Written:
    return w, lambda w, x: net.apply(net.first(w), net.read(w), x)


def untied(net: Net, w: Any) -> Written:
    params = {"a": net.first(w), "b": jnp.copy(net.read(w))}
    return params, lambda p, x: net.apply(p["a"], p["b"], x)


STYLES: dict[str, Callable[[Net, Any], Written]] = {
    "bundle_of_dict": bundle_of_dict,
    "bundle_of_equinox": bundle_of_equinox,
    "skeleton_closed_over": closed_over,
    "views_in_the_model": views_in_the_model,
    "tied_by_path": by_path,
    "nnx_tied_by_path": nnx_by_path,
    "by_hand": by_hand,
    "untied": untied,
}


def forward(apply: Apply) -> Apply:
    return apply


def step(apply: Apply) -> Apply:
    def run(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean(apply(p, x) ** 2))(params)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    return run


PROGRAMS = {"forward": forward, "step": step}


# -------------------------------------------------------------------- what is read of a program


@dataclasses.dataclass(frozen=True)
class Program:
    parameters: list[str]
    entry: int
    lowered: dict[str, int]
    compiled: dict[str, int]
    bytes: tuple[int, int, int]


_HLO = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \S.*? ([a-z][a-z0-9\-]*)\(", re.MULTILINE)
_STABLE = re.compile(r"(?:stablehlo|chlo|func|mhlo)\.([a-z_]+)")


def program(function: Callable[..., Any], *args: Any, **settings: Any) -> Program:
    lowered = jax.jit(function, **settings).lower(*args)
    compiled = lowered.compile()
    text = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    memory = compiled.memory_analysis()
    return Program(
        re.findall(r"%arg\d+: (tensor<\w+>)", lowered.as_text().partition("->")[0]),
        len(re.findall(r" parameter\(\d+\)", entry)),
        dict(collections.Counter(_STABLE.findall(lowered.as_text()))),
        dict(collections.Counter(_HLO.findall(text))),
        (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes),
    )


_made: dict[tuple[str, str, str], Program] = {}


def made(name: str, what: str, style: str) -> Program:
    """The program of a network, compiled once for all tests."""
    key = name, what, style
    if key not in _made:
        net = NETS[name]
        params, apply = STYLES[style](net, jnp.ones(net.shape))
        _made[key] = program(PROGRAMS[what](apply), params, jnp.ones(net.data))
    return _made[key]


def tensor(shape: tuple[int, ...]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


TIED = [style for style in STYLES if style not in ("by_hand", "untied")]


@pytest.mark.parametrize("style", TIED)
@pytest.mark.parametrize("what", PROGRAMS)
@pytest.mark.parametrize("name", NETS)
def test_a_tied_program_is_the_program_written_by_hand(name: str, what: str, style: str) -> None:
    ours, net = made(name, what, style), NETS[name]
    assert ours.parameters == [tensor(net.shape), tensor(net.data)]
    assert ours.entry == 2
    assert ours == made(name, what, "by_hand")


@pytest.mark.parametrize("name", NETS)
def test_an_untied_program_is_another_one(name: str) -> None:
    """So that the test above could fail."""
    ours, lost = made(name, "step", "bundle_of_dict"), made(name, "step", "untied")
    assert len(lost.parameters) == lost.entry == 3
    assert lost.bytes[:2] > ours.bytes[:2]
    assert lost.lowered != ours.lowered
    assert lost.compiled != ours.compiled


def test_a_skeleton_as_static_argument_leaves_the_same_program() -> None:
    net = NETS["matmul_transpose"]

    def run(skeleton: tied.Skeleton, weights: Any, x: Any) -> Any:
        return step(lambda weights, x: skeleton.merge(weights, plain=True)(x))(weights, x)

    skeleton, weights = tied.split(as_equinox(net, jnp.ones(net.shape)))
    ours = program(run, skeleton, weights, jnp.ones(net.data), static_argnums=0)
    assert ours == made("matmul_transpose", "step", "by_hand")


@pytest.mark.parametrize("name", ["matmul_transpose", "conv_flip_transpose"])
def test_a_donated_step_writes_over_the_one_storage(name: str) -> None:
    """The new weights are in the memory of the old: XLA plans no second buffer for them."""
    net = NETS[name]
    found = []
    for style in ("bundle_of_equinox", "by_hand"):
        params, apply = STYLES[style](net, jnp.ones(net.shape))
        run = jax.jit(step(apply), donate_argnums=0).lower(params, jnp.ones(net.data)).compile()
        found.append(run.memory_analysis())
    ours, hand = found
    assert ours.alias_size_in_bytes == hand.alias_size_in_bytes == 4 * math.prod(net.shape)
    assert ours.temp_size_in_bytes == hand.temp_size_in_bytes


@pytest.mark.parametrize("name", NETS)
def test_the_programs_compute_the_same_bits(name: str) -> None:
    net = NETS[name]
    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], net.shape) / 10, jax.random.normal(keys[1], net.data)
    found = []
    for style in ("bundle_of_equinox", "by_hand"):
        params, apply = STYLES[style](net, w)
        value, after = jax.jit(step(apply))(params, x)
        found.append([value, *jax.tree.leaves(after)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
