"""What is asked of a bundle or a model by the names of its arrays: values, axes, dtypes, places."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import tied

W = jnp.arange(6.0).reshape(2, 3)


def model() -> dict[str, Any]:
    return {"embed": W, "head": {"kernel": tied.transpose(W), "bias": jnp.zeros(2)}}


def tree() -> dict[str, Any]:
    """Every way of reading that can be written through."""
    return {
        "w": W,
        "t": tied.transpose(W),
        "row": tied.view(W, lambda w: w[1]),
        "flip": tied.view(W, jnp.flip),
        "minus": tied.view(W, lambda w: -w[:, :1]),
        "same": W,
        "apart": jnp.zeros(3),
    }


@pytest.mark.parametrize("name", tree())
def test_a_write_through_any_name(name: str) -> None:
    bundle = tied.Bundle(tree())
    value = -10.0 - np.arange(bundle[name].size, dtype="float32").reshape(bundle[name].shape)
    changed = bundle.set(name, value)
    np.testing.assert_array_equal(changed[name], value)
    assert changed.skeleton is bundle.skeleton
    assert jnp.array_equal(bundle["w"], W)
    wanted = np.asarray(W).copy()
    {"w": wanted, "t": wanted.T, "row": wanted[1], "flip": np.flip(wanted), "same": wanted,
     "minus": wanted[:, :1], "apart": np.zeros(3)}[name][...] = (
        -value if name == "minus" else value
    )  # fmt: skip
    np.testing.assert_array_equal(changed["w"], wanted)
    np.testing.assert_array_equal(changed["t"], wanted.T)


def test_a_write_inside_jit_and_of_a_complex_array() -> None:
    c = jnp.arange(3.0) + 1j
    bundle = tied.Bundle({"c": c, "h": tied.adjoint(c)})
    changed = jax.jit(lambda b, x: b.set("h", x))(bundle, jnp.array([1j, 2j, 3.0]))
    np.testing.assert_array_equal(changed["c"], np.conj([1j, 2j, 3.0]))


SET_ERRORS = {
    "unknown": ("head.weight", W, "no such array: head.weight\n  reached  head\n"
                "  it has   kernel, bias"),
    "shape": ("head.kernel", W, "head.kernel can't be set to that\n"
              "  shape  head.kernel has (3, 2), not (2, 3)"),
    "dtype": ("embed", W.astype("bfloat16"), "embed can't be set to that\n"
              "  dtype  embed has float32, not bfloat16"),
    "computed": ("norm", W, "norm is computed from embed and can't be written to\n"
                 '  Write to what it is computed from: bundle.set("embed", value)'),
    "repeats": ("wide", jnp.zeros((2, 2, 3)), "wide can't be written through\n"
                "  reads  wide = embed.broadcast_to(2, 2, 3)\n"
                "  It reads an element twice, or bits as another dtype: write to the storage"),
}  # fmt: skip


@pytest.mark.parametrize("name", SET_ERRORS)
def test_what_can_not_be_written_through_is_refused(name: str) -> None:
    path, value, text = SET_ERRORS[name]
    more = {
        "norm": tied.view(W, lambda w: w / jnp.sum(w)),
        "wide": tied.view(W, lambda w: jnp.broadcast_to(w, (2, 2, 3))),
    }
    with pytest.raises(tied.TiedError) as caught:
        tied.Bundle(model() | more).set(path, value)
    assert str(caught.value) == text
    assert path in caught.value.paths


def test_a_bundle_can_not_be_changed_in_place() -> None:
    bundle = tied.Bundle(model())
    with pytest.raises(AttributeError, match=r"bundle\.set\(name, value\)"):
        bundle.embed = W


def test_axes_by_any_name() -> None:
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), tied.Bundle(model()))
    axes = stack.axes({"*.kernel": 0, "*.bias": None}, default=1)
    assert axes.storages == {"embed": 0, "head.bias": None}
    assert stack.axes({"*.bias": 0}, default=1).storages == {"embed": 1, "head.bias": 0}
    ensemble = tied.Bundle(model())
    ensemble = tied.Bundle.set(ensemble, "head.bias", jnp.ones(2))
    stacked = jax.vmap(lambda n, b: b.set("embed", n * b["embed"]), in_axes=(0, None),
                       out_axes=axes)(jnp.arange(1.0, 4.0), ensemble)  # fmt: skip
    assert stacked.storages["embed"].shape == (3, 2, 3)
    assert stacked.storages["head.bias"].shape == (2,)
    seen = jax.vmap(lambda b: b["embed"] @ b["head"]["kernel"] + b["head"]["bias"],
                    in_axes=(axes,))(stacked)  # fmt: skip
    np.testing.assert_allclose(seen[1], 4 * W @ W.T + 1)


def test_names_that_ask_for_different_axes_are_both_named() -> None:
    with pytest.raises(tied.TieError) as caught:
        tied.Bundle(model()).axes({"head.*": 1, "embed": 0})
    assert str(caught.value) == (
        "two names of one storage ask for different axes\n"
        "  embed        0\n"
        "  head.kernel  1\n"
        "  They are one array: ask the same of both, or only of one"
    )
    assert caught.value.paths == ("embed", "head.kernel")


def test_a_name_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(tied.PathError) as caught:
        tied.Bundle(model()).axes({"heads.*": 1, "embed": 0})
    assert str(caught.value).splitlines()[:2] == [
        "no array has such a name: heads.*",
        "  the model has  embed, head.kernel, head.bias",
    ]


def test_a_stack_has_no_model_outside_of_vmap() -> None:
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), tied.Bundle(model()))
    with pytest.raises(tied.MergeError) as caught:
        stack.model  # noqa: B018
    assert str(caught.value) == (
        "a storage has another shape than the skeleton's: embed\n"
        "  skeleton  (2, 3)\n"
        "  given     (2, 2, 3)\n"
        "  Read stacked storages inside jax.vmap or jax.lax.scan, split ones (shard_map) after"
        ' jax.lax.all_gather; other values are put in by bundle.set("embed", value)'
    )
    assert not hasattr(stack, "embed")


def test_dtypes_by_any_name() -> None:
    mixed = tied.cast(tied.Bundle(model()), {"*.bias": "float16", "*.kernel": "bfloat16"})
    assert {name: str(x.dtype) for name, x in mixed.storages.items()} == {
        "embed": "bfloat16",
        "head.bias": "float16",
    }
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    half = tied.cast(module, {"1.weight": "float16"})
    assert half[0].weight.dtype is half[1].weight.dtype is torch.float16
    assert half[0].bias is not None
    assert half[0].bias.dtype is torch.float32
    with pytest.raises(tied.TieError, match="ask for different dtypes") as caught:
        tied.cast(module, {"0.*": "float16", "1.*": "bfloat16"})
    assert caught.value.paths == ("0.weight", "1.weight")
    assert module[0].weight.dtype is torch.float32


def test_places_by_any_name() -> None:
    first, last = jax.devices()[0], jax.devices()[-1]
    moved = tied.to(tied.Bundle(model()), {"head.kernel": last, "head.bias": None})
    assert moved.storages["embed"].devices() == {last}
    assert moved.storages["head.bias"].devices() == {first}
    with pytest.raises(tied.TieError, match="ask for different places") as caught:
        tied.to(model(), {"head.kernel": last, "embed": first})
    assert caught.value.paths == ("embed", "head.kernel")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    meta = tied.to(module, {"1.*": "meta"})
    assert [p.device.type for p in meta.parameters()] == ["cpu", "cpu", "meta", "meta"]


FOLLOWS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "same": (lambda w: w, ("x", None), ("x",)),
    "transpose": (lambda w: w.T, (None, "x"), ("x",)),
    "permuted": (lambda w: w.reshape(2, 4, 8).transpose(2, 0, 1), ("y",), (None, "y")),
    "flip": (jnp.flip, ("x", "y"), ("x", "y")),
    "slice": (lambda w: w[2:6], (None, "y"), (None, "y")),
    "row": (lambda w: w[3], ("x",), (None, "x")),
    "new axis": (lambda w: w[None], (None, "x"), ("x",)),
    "broadcast": (lambda w: jnp.broadcast_to(w, (3, 8, 8)), (None, None, "x"), (None, "x")),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_is_asked_of_a_view_is_asked_of_its_storage(name: str) -> None:
    view, asked, given = FOLLOWS[name]
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    w = jnp.arange(64.0).reshape(8, 8)
    both = {"w": w, "v": tied.view(w, view)}
    moved = tied.to(both, {"v": NamedSharding(mesh, PartitionSpec(*asked))})
    assert moved["w"].sharding == NamedSharding(mesh, PartitionSpec(*given))
    np.testing.assert_array_equal(tied.Bundle(moved)["v"], view(w))
    with jax.set_mesh(mesh):
        again = tied.to(both, {"v": PartitionSpec(*asked)})
    assert again["w"].sharding == moved["w"].sharding


def sharding_error(wanted: Any) -> tied.TiedError:
    w = jnp.zeros((8, 8))
    both = {"w": w, "v": tied.transpose(w), "d": tied.diagonal(w), "b": jnp.zeros(8)}
    with pytest.raises(tied.TiedError) as caught:
        tied.to(both, wanted)
    return caught.value


def test_what_can_not_be_placed_is_refused_by_name() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    split = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    error = sharding_error({"w": split("x"), "v": split("x")})
    assert str(error) == (
        "two names of one storage ask for different places\n"
        "  w  P('x',)\n"
        "  v  P('x',), so P(None, 'x') of the storage\n"
        "  They are one array: ask the same of both, or only of one"
    )
    error = sharding_error({"d": split("x")})
    assert str(error).startswith("P('x',) splits an axis of a view that is no axis of its storage")
    assert "d" in error.paths
    for wanted in ({"b": split("x", "y")}, split("x", "y")):
        error = sharding_error(wanted)
        assert str(error).startswith("P('x', 'y') splits more axes than an array has: 1")
        assert "b" in error.paths
    assert "no mesh is set" in str(sharding_error({"b": PartitionSpec("x")}))
    assert str(sharding_error({"b": "nowhere"})).startswith("jax does not know the device")
