"""`tied.tie` on models of JAX: dicts, Equinox modules, variables of linen, optimizer states."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.core import FrozenDict, freeze
from jax.sharding import NamedSharding, PartitionSpec

import tied

W = jnp.arange(6.0).reshape(2, 3)


def params() -> dict[str, Any]:
    return {"head": {"kernel": jnp.zeros((3, 2)), "bias": jnp.ones(2)}, "embed": W}


class Pair(NamedTuple):
    first: Any
    second: Any


class Net(eqx.Module):
    embed: jax.Array
    layers: list[eqx.nn.Linear]
    scale: float = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale * self.layers[1](jax.nn.tanh(self.layers[0](x @ self.embed)))


def net() -> Net:
    keys = jax.random.split(jax.random.key(0), 2)
    return Net(W, [eqx.nn.Linear(3, 3, key=keys[0]), eqx.nn.Linear(3, 2, key=keys[1])], 2.0)


MODELS: dict[str, tuple[Any, str, str, Any]] = {
    "dict": (params, "head.kernel", "embed", tied.transpose),
    "list": (lambda: [W, [jnp.zeros((3, 2))]], "1.0", "0", tied.transpose),
    "namedtuple": (lambda: Pair(W, jnp.zeros((3, 2))), "second", "first", lambda w: w.T),
    "FrozenDict": (lambda: freeze(params()), "head.kernel", "embed", jnp.transpose),
    "equinox": (net, "layers.1.weight", "embed", None),
    "a bundle": (lambda: tied.Bundle(params()), "head.kernel", "embed", tied.transpose),
    "a bundle in a dict": (
        lambda: {"net": tied.Bundle(params())}, "net.head.kernel", "net.embed", tied.transpose
    ),
    "numpy": (
        lambda: jax.tree.map(np.asarray, params()), "head.kernel", "embed", tied.transpose
    ),
    "a state of optax": (
        lambda: optax.adam(0.1).init(params()), "0.mu.head.kernel", "0.mu.embed", tied.transpose
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_tie_by_path_is_in_the_bundle(name: str) -> None:
    make, target, source, view = MODELS[name]
    model = make()
    before = [np.asarray(x).copy() for x in jax.tree.leaves(model)]
    bundle = tied.tie(model, target, source, view)
    assert type(bundle) is tied.Bundle
    assert len(bundle.storages) == len(before) - 1
    assert [target in group and source in group for group in tied.ties(bundle).groups] == [True]
    moved = jax.tree.map(lambda x: x + 1, bundle)
    assert not tied.compare(bundle, moved)
    for x, y in zip(before, jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_merged_model_has_the_types_that_it_had() -> None:
    bundle = tied.tie(net(), "layers.1.weight", "embed")
    assert type(bundle.model) is Net
    assert bundle.scale == 2.0
    x = jnp.ones(2)
    by_hand = eqx.tree_at(lambda n: n.layers[1].weight, net(), W)
    assert jnp.array_equal(bundle(x), by_hand(x))
    frozen = tied.tie(freeze(params()), "head.kernel", "embed", tied.transpose)
    assert type(frozen.model) is FrozenDict


class Decoder(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = flax.linen.Embed(5, 4, name="embed")(x)
        return flax.linen.Dense(5, use_bias=False, name="head")(x)


def test_variables_of_linen_go_into_apply() -> None:
    model, x = Decoder(), jnp.arange(3)
    variables = model.init(jax.random.key(0), x)
    bundle = tied.tie(variables, "params.head.kernel", "params.embed.embedding", tied.transpose)
    assert list(bundle.storages) == ["params.embed.embedding"]
    table = variables["params"]["embed"]["embedding"]
    logits = jax.jit(lambda b: model.apply(b.model, x))(bundle)
    np.testing.assert_allclose(logits, table[x] @ table.T, rtol=1e-6)


def test_one_source_of_many_targets_in_layers_that_are_stacked() -> None:
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, use_bias=False, key=key))(
        jax.random.split(jax.random.key(0), 4)
    )
    model = {"shared": jnp.eye(3) * 2, "blocks": layers, "last": jnp.zeros((3, 3))}
    bundle = tied.tie(
        tied.tie(model, "blocks.weight", "shared", lambda w: jnp.broadcast_to(w, (4, 3, 3))),
        "last", "shared", tied.transpose,
    )  # fmt: skip
    assert list(bundle.storages) == ["shared"]

    def run(bundle: Any, x: jax.Array) -> jax.Array:
        dynamic, static = eqx.partition(bundle["blocks"], eqx.is_array)
        step = lambda x, layer: (eqx.combine(layer, static)(x), None)  # noqa: E731
        return jnp.sum(bundle["last"] @ jax.lax.scan(step, x, dynamic)[0])

    gradient = jax.grad(run)(bundle, jnp.ones(3))
    wanted = jax.grad(lambda w: jnp.sum(w.T @ (w @ w @ w @ w @ jnp.ones(3))))(jnp.eye(3) * 2)
    np.testing.assert_allclose(gradient.storages["shared"], wanted, rtol=1e-5)


def test_a_stack_of_layers_each_with_a_tie_of_its_own() -> None:
    def layer(key: jax.Array) -> tied.Bundle:
        model = {"up": jax.random.normal(key, (3, 2)), "down": jnp.zeros((2, 3))}
        return tied.tie(model, "down", "up", tied.transpose)

    stack = jax.vmap(layer)(jax.random.split(jax.random.key(0), 4))
    assert {name: x.shape for name, x in stack.storages.items()} == {"up": (4, 3, 2)}

    def run(stack: Any) -> jax.Array:
        step = lambda x, one: (x + jnp.tanh(x @ one["up"]) @ one["down"], None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, jnp.ones(3), stack)[0])

    def by_hand(up: jax.Array) -> jax.Array:
        x = jnp.ones(3)
        for w in up:
            x = x + jnp.tanh(x @ w) @ w.T
        return jnp.sum(x)

    np.testing.assert_allclose(
        jax.grad(run)(stack).storages["up"], jax.grad(by_hand)(stack.storages["up"]), rtol=1e-4
    )


def test_several_targets_and_several_sources() -> None:
    model = {name: jnp.full((2, 2), n * 1.0) for n, name in enumerate("abcd", 1)} | {"n": 3}
    same = tied.tie(model, ["b", "c"], "a")
    assert list(same.storages) == ["a", "d"]
    assert same["b"] is same["a"]
    product = tied.tie(model, ["b", "c"], ["a", "d"], lambda a, d: a @ d)
    assert list(product.storages) == ["a", "d"]
    assert jnp.array_equal(product["c"], model["a"] @ model["d"])
    assert str(tied.ties(product)) == (
        "a    (2, 2)  float32  16 B\n"
        "  b is computed from a\n"
        "  c is computed from a\n"
        "d    (2, 2)  float32  16 B\n"
        "  b is computed from d\n"
        "  c is computed from d\n"
        "8 parameters, 32 B (counting every leaf: 24 parameters, 96 B)"
    )


def test_a_chain_of_ties_reads_one_storage() -> None:
    model = {"c": jnp.zeros(2), "b": jnp.zeros((3, 2)), "a": W}
    bundle = tied.tie(tied.tie(model, "b", "a", tied.transpose), "c", "b", lambda w: w[1])
    assert str(tied.ties(bundle)).splitlines()[:3] == [
        "a    (2, 3)  float32  24 B",
        "  c = a[:, 1]",
        "  b = a.T",
    ]


def norm(w: Any) -> Any:
    return w / jnp.linalg.norm(w)


def test_what_is_computed_is_computed_of_the_storage_as_it_is_now() -> None:
    bundle = tied.tie({"b": jnp.zeros((2, 3)), "a": W}, "b", "a", norm)
    assert list(bundle.storages) == ["a"]
    changed = bundle.set("a", W + 1)
    np.testing.assert_allclose(changed["b"], norm(W + 1), rtol=1e-6)
    again = pickle.loads(pickle.dumps(changed))
    assert again.skeleton == bundle.skeleton
    assert jnp.array_equal(copy.deepcopy(again)["b"], changed["b"])
    assert not tied.compare(bundle, tied.bf16(bundle))


def test_without_a_target_all_ties_of_now_are_kept() -> None:
    model = {"a": W, "b": W, "c": tied.transpose(W)}
    bundle = tied.tie(model)
    assert list(bundle.storages) == ["a"]
    assert tied.tie(bundle) is bundle


def test_a_tie_that_is_there_already_is_left_as_it_is() -> None:
    for view in (tied.transpose, norm, None):
        like = W.T if view is tied.transpose else W
        bundle = tied.tie({"a": W, "b": jnp.zeros(like.shape)}, "b", "a", view)
        assert tied.tie(bundle, "b", "a", view) is bundle


def refusal(model: Any, *arguments: Any, **named: Any) -> tied.TiedError:
    with pytest.raises(tied.TiedError) as caught:
        tied.tie(model, *arguments, **named)
    return caught.value


ERRORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "unknown": (
        ("head.weight", "embed"),
        "no such array: head.weight\n  reached  head\n  it has   kernel, bias",
    ),
    "no array": (
        ("head", "embed"), "no such array: head\n  reached  head\n  it has   kernel, bias"
    ),
    "itself": (
        ("embed", "embed", tied.transpose),
        "embed can't be tied to itself\n  Name another array as the source",
    ),
    "shape": (
        ("head.kernel", "embed"),
        "head.kernel can't be tied to embed\n"
        "  shape  head.kernel has (3, 2), embed gives (2, 3)\n"
        "  Give a view that makes the one of the other: view=lambda W: ...",
    ),
    "dtype": (
        ("head.kernel", "embed", lambda w: w.T.astype("bfloat16")),
        "head.kernel can't be tied to embed\n"
        "  dtype  head.kernel has float32, embed gives bfloat16\n"
        "  Give a view that makes the one of the other: view=lambda W: ...",
    ),
    "no source": (
        ("head.kernel",),
        'head.kernel needs a source\n  tied.tie(model, "decoder.weight", "encoder.weight")',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_can_not_be_tied_is_refused(name: str) -> None:
    arguments, text = ERRORS[name]
    assert str(refusal(params(), *arguments)) == text


def test_a_second_tie_of_a_target_is_refused() -> None:
    bundle = tied.tie(params(), "head.kernel", "embed", tied.transpose)
    error = refusal(bundle, "head.kernel", "head.bias", lambda b: jnp.stack([b] * 3))
    assert str(error) == (
        "head.kernel is tied already\n"
        "  tied to  embed\n"
        '  Untie it first: tied.untie(model, "head.kernel")'
    )
    assert set(error.paths) == {"head.kernel", "head.bias", "embed"}
    turned = refusal(bundle, "embed", "head.kernel", tied.transpose)
    assert "embed is tied already" in str(turned)
    computed = tied.tie({"a": W, "b": W * 0}, "b", "a", norm)
    assert "a is tied already" in str(refusal(computed, "a", "b"))


def test_several_sources_need_a_view() -> None:
    assert str(refusal(params(), "head.kernel", ["embed", "head.bias"])) == (
        "head.kernel needs a view to read 2 sources\n"
        "  Give a function of so many arrays: view=lambda a, b: a @ b"
    )


def test_a_bundle_takes_no_inverse_and_has_no_conflicts() -> None:
    for named in ({"inverse": norm}, {"on_conflict": "source"}):
        text = str(refusal(params(), "head.kernel", "embed", tied.transpose, **named))
        assert text.startswith("inverse and on_conflict are for modules that are tied in place")


def test_a_model_of_torch_tensors_is_no_bundle() -> None:
    error = refusal({"a": torch.zeros(2), "b": torch.zeros(2)}, "b", "a")
    assert str(error) == (
        "tie makes a Bundle of JAX arrays, and a is one of torch\n"
        '  Move the model first: tied.to(model, "jax"), or tie its torch modules'
    )


def test_two_sides_that_are_split_in_different_ways_are_refused() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    source = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, PartitionSpec("x")))
    place = lambda *spec: jax.device_put(  # noqa: E731
        jnp.zeros((4, 8)), NamedSharding(mesh, PartitionSpec(*spec))
    )
    follows = tied.tie({"a": source, "b": place(None, "x")}, "b", "a", tied.transpose)
    assert list(follows.storages) == ["a"]
    error = refusal({"a": source, "b": place("x")}, "b", "a", tied.transpose)
    assert str(error).splitlines()[1] == ("  sharding  b has P(None, 'x'), a gives P('x',)")
    elsewhere = jax.device_put(jnp.zeros((4, 8)), jax.devices()[3])
    error = refusal({"a": source, "b": elsewhere}, "b", "a", tied.transpose)
    assert str(error).splitlines()[1] == "  device  b has cpu:3, a gives cpu:0..cpu:7"


def test_untie_makes_an_array_of_its_own() -> None:
    model = params()
    bundle = tied.tie(model, "head.kernel", "embed", tied.transpose)
    apart = tied.untie(bundle, "head.kernel")
    assert list(apart.storages) == ["head.kernel", "head.bias", "embed"]
    assert jnp.array_equal(apart["head"]["kernel"], W.T)
    assert list(bundle.storages) == ["embed", "head.bias"]
    either = tied.Bundle({"a": W, "b": W, "c": W})
    for name in "abc":
        alone = tied.untie(either, name)
        assert [name in group for group in tied.ties(alone).groups] == [False]
        assert len(alone.storages) == 2
    computed = tied.tie({"a": W, "b": W * 0}, "b", "a", norm)
    assert jnp.array_equal(tied.untie(computed, "b").storages["b"], norm(W))


def test_a_source_can_not_be_untied_from_what_reads_it() -> None:
    for view in (tied.transpose, norm):
        like = view(W)
        bundle = tied.tie({"b": jnp.zeros(like.shape), "a": W}, "b", "a", view)
        with pytest.raises(tied.TieError) as caught:
            tied.untie(bundle, "a")
        assert str(caught.value) == (
            "a is the source of other arrays and can't be untied from them\n"
            "  computed  b\n"
            '  Untie those: tied.untie(model, "b")'
        )
    with pytest.raises(tied.TieError, match=r"head.bias is not tied"):
        tied.untie(params(), "head.bias")
