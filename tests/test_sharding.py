"""Shardings of tied models on one host of eight devices: placed once, and the views follow.

What a sharding of one name is to the others is looked at in three places: `.sharding` of the
storage and of what reads it, the text of errors, and the collectives of the compiled HLO, which are
those of the network written by hand with one parameter.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tied

MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LETTERS, WIDTH = 64, 16


def over(*spec: Any, mesh: Any = MESH) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def embedding() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (LETTERS, WIDTH))


def model(read: Callable[[Any], Any] = lambda w: w.T, w: Any = None) -> Any:
    w = embedding() if w is None else w
    return {"embed": w, "head": tied.view(w, read)}


def spec_of(array: Any) -> Any:
    """The spec without what says nothing at its end."""
    spec = tuple(array.sharding.spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return spec


# --------------------------------------------------------- what is asked of one name of several

READS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...], tuple[Any, ...]]] = {
    # how the second name reads, what is asked of it, what the storage gets
    "transpose": (lambda w: w.T, (None, "x"), ("x",)),
    "transpose, the other axis": (lambda w: w.T, ("x",), (None, "x")),
    "rows": (lambda w: w[:32], ("x",), ("x",)),
    "flip": (lambda w: w[::-1], ("x",), ("x",)),
    "flip and transpose": (lambda w: w[:, ::-1].T, ("x",), (None, "x")),
    "a column": (lambda w: w[:, 3], ("x",), ("x",)),
    "a new axis": (lambda w: w[None], (None, "x"), ("x",)),
    "heads": (lambda w: w.reshape(64, 8, 2), ("x",), ("x",)),
    "both axes": (lambda w: w.T, ("model", "data"), ("data", "model")),
    "two axes on one": (lambda w: w.T, (None, ("data", "model")), (("data", "model"),)),
    "nothing": (lambda w: w.T, (), ()),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("as_bundle", [False, True])
def test_a_sharding_of_a_view_is_translated_to_its_storage(name: str, as_bundle: bool) -> None:
    read, asked, expected = READS[name]
    mesh = GRID if "axes" in name else MESH
    before: Any = model(read)
    given = tied.Bundle(before) if as_bundle else before
    after = tied.to(given, {"head": over(*asked, mesh=mesh)})
    storage = after.storages["embed"] if as_bundle else after["embed"]
    assert spec_of(storage) == expected
    assert storage.sharding.device_set == mesh._flat_devices_set
    tied.check(after, before)
    seen = jnp.asarray(after["head"])
    np.testing.assert_array_equal(seen, read(embedding()))
    if name.startswith(("transpose", "flip", "both", "two", "nothing")):
        assert seen.sharding.is_equivalent_to(over(*asked, mesh=mesh), seen.ndim)
    assert "embed" in str(tied.ties(after))


@pytest.mark.parametrize("name", ["diagonal", "reshape", "broadcast"])
def test_an_axis_that_is_none_of_the_storage_is_refused_by_name(name: str) -> None:
    reads: dict[str, Callable[[Any], Any]] = {
        "diagonal": lambda w: w.diagonal(),
        "reshape": lambda w: w.reshape(-1),
        "broadcast": lambda w: np.broadcast_to(w, (8, *w.shape)),
    }
    words = {"diagonal": "diagonal()", "reshape": "reshape(1024)",
             "broadcast": "broadcast_to(8, 64, 16)"}  # fmt: skip
    with pytest.raises(tied.DeviceError) as caught:
        tied.to(model(reads[name]), {"head": over("x")})
    assert str(caught.value) == (
        "P('x',) splits an axis of a view that is no axis of its storage\n  storage  embed\n"
        f"  leaf     head = embed.{words[name]}\n"
        "  Ask it of the storage: give its own name a sharding"
    )


def test_names_that_ask_for_different_places_are_both_named() -> None:
    with pytest.raises(tied.TieError) as caught:
        tied.to(model(), {"embed": over("x"), "head": over("x")})
    assert str(caught.value) == (
        "two names of one storage ask for different places\n  embed  P('x',)\n"
        "  head   P('x',), so P(None, 'x') of the storage\n"
        "  They are one array: ask the same of both, or only of one"
    )
    assert caught.value.paths == ("embed", "head")
    agreed = tied.to(model(), {"embed": over("x"), "head": over(None, "x")})
    assert spec_of(agreed["embed"]) == ("x",)
    with pytest.raises(tied.TieError, match="two names of one storage"):
        tied.to(tied.Bundle(model()), {"embed": jax.devices()[1], "head": jax.devices()[2]})


def test_the_first_glob_that_fits_a_name_is_taken_and_a_glob_has_to_fit() -> None:
    layers = {"a": model(), "b": model(), "bias": jnp.ones(8)}
    after = tied.to(layers, {"a.embed": over("x"), "*.embed": over(None, "x"), "bias": "cpu:3"})
    assert spec_of(after["a"]["embed"]) == ("x",)
    assert spec_of(after["b"]["embed"]) == (None, "x")
    assert after["bias"].devices() == {jax.devices()[3]}
    with pytest.raises(tied.PathError, match="no array has such a name: embedding"):
        tied.to(model(), {"embedding": over("x")})


def test_a_spec_is_over_the_mesh_that_is_set() -> None:
    with pytest.raises(tied.DeviceError, match="no mesh is set"):
        tied.to(model(), {"head": P(None, "x")})
    with jax.set_mesh(MESH):
        after = tied.to(model(), {"head": P(None, "x")})
        everywhere = tied.to(model(), P("x"))
    assert after["embed"].sharding == everywhere["embed"].sharding == over("x")


def test_one_sharding_for_a_whole_model_is_that_of_its_storages() -> None:
    after = tied.to(tied.Bundle(model()), over("x"))
    assert after.storages["embed"].sharding == over("x")
    assert spec_of(after["head"]) == (None, "x")
    again = tied.to(after, over("x"))
    assert again.storages["embed"] is after.storages["embed"]


class Coder(eqx.Module):
    embed: Any
    head: Any


class NnxCoder(nnx.Module):
    def __init__(self) -> None:
        self.embed, self.head = nnx.Param(embedding()), nnx.Param(embedding().T)


def test_modules_are_placed_by_name_as_dicts_are() -> None:
    bundle = tied.tie(Coder(embedding(), embedding().T), "head", "embed", tied.transpose)
    after = tied.to(bundle, {"head": over(None, "x")})
    assert spec_of(after.embed) == ("x",)
    module = NnxCoder()
    tied.tie(module, "head", "embed", tied.transpose)
    moved = tied.to(module, {"embed": over("x")})
    assert spec_of(moved.embed[...]) == ("x",)
    assert spec_of(moved.head[...]) == (None, "x")


EXPLICIT = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))


@pytest.mark.parametrize("name", ["transpose", "rows", "flip", "heads"])
def test_where_shardings_are_types_a_view_has_the_type_of_the_hand_written_one(name: str) -> None:
    read = READS[name][0]
    bundle = tied.to(tied.Bundle(model(read)), {"embed": over("x", mesh=EXPLICIT)})

    def ours(bundle: Any) -> Any:
        seen.append(jax.typeof(bundle["head"]))
        return (bundle["head"] ** 2).sum()

    def hand(w: Any) -> Any:
        seen.append(jax.typeof(read(w)))
        return (read(w) ** 2).sum()

    seen: list[Any] = []
    grads = jax.jit(jax.grad(ours))(bundle)
    expected = jax.jit(jax.grad(hand))(bundle.storages["embed"])
    assert seen[0] == seen[1]
    assert grads.storages["embed"].sharding == expected.sharding
    np.testing.assert_array_equal(grads.storages["embed"], expected)


# -------------------------------------------------------------------- what the program sends

COLLECTIVES = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def logits(embed: Any, head: Any, letters: Any) -> Any:
    return jnp.tanh(embed[letters]) @ head


def entropy(embed: Any, head: Any, letters: Any) -> Any:
    scores = jax.nn.log_softmax(logits(embed, head, letters[:, :-1]))
    return -jnp.take_along_axis(scores, letters[:, 1:, None], -1).mean()


def step_of(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def step(params: Any, letters: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, letters)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    return step


TEXT = jnp.arange(8 * 9).reshape(8, 9) * 7 % LETTERS
PLACES = {"vocabulary": ("x",), "width": (None, "x"), "everywhere": ()}
PROGRAMS: dict[str, tuple[Any, Any]] = {
    # over the bundle, and over the one parameter
    "logits": (lambda b, t: logits(b["embed"], b["head"], t), lambda w, t: logits(w, w.T, t)),
    "step": (
        step_of(lambda b, t: entropy(b["embed"], b["head"], t)),
        step_of(lambda w, t: entropy(w, w.T, t)),
    ),
}


def compiled(function: Any, params: Any) -> Any:
    text = jax.device_put(TEXT, over())
    return jax.jit(function).lower(params, text).compile()


def sent(program: Any) -> dict[str, int]:
    return dict(collections.Counter(COLLECTIVES.findall(program.as_text())))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tied_program_sends_what_the_hand_written_one_sends(name: str, place: str) -> None:
    ours, hand = PROGRAMS[name]
    bundle = tied.to(tied.Bundle(model()), {"embed": over(*PLACES[place])})
    w = jax.device_put(embedding(), over(*PLACES[place]))
    programs = compiled(ours, bundle), compiled(hand, w)
    counts = [sent(program) for program in programs]
    assert counts[0] == counts[1]
    assert "all-gather" not in counts[0]
    assert bool(counts[0]) == (place != "everywhere")
    results = [program(p, TEXT) for program, p in zip(programs, (bundle, w), strict=True)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)
    if name == "step" and place == "vocabulary":
        assert spec_of(results[0][1].storages["embed"]) == ("x",)
        assert spec_of(results[0][1]["head"]) == (None, "x")


def test_a_head_of_its_own_sharding_would_have_to_send_the_embedding() -> None:
    """So that the test above could fail: the same head, split along the other axis on the way."""

    def resharded(w: Any, letters: Any) -> Any:
        head = jax.lax.with_sharding_constraint(w.T, over("x"))
        return jax.lax.with_sharding_constraint(logits(w, head, letters), over(None, None, "x"))

    program = compiled(resharded, jax.device_put(embedding(), over("x")))
    assert sent(program) != sent(compiled(PROGRAMS["logits"][1], embedding()))
    assert {"all-gather", "all-to-all", "collective-permute"} & {*sent(program)}


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_an_optimizer_keeps_its_moments_where_the_storage_is(optimizer: str) -> None:
    made = {"adam": optax.adam(0.1), "adafactor": optax.adafactor(0.1, momentum=0.9)}[optimizer]
    bundle = tied.to(tied.Bundle(model()), {"head": over(None, "x")})
    state = jax.jit(made.init)(bundle)
    loss = lambda b: entropy(b["embed"], b["head"], TEXT)  # noqa: E731

    @jax.jit
    def step(bundle: Any, state: Any) -> Any:
        updates, state = made.update(jax.grad(loss)(bundle), state, bundle)
        return optax.apply_updates(bundle, updates), state

    for _ in range(2):
        bundle, state = step(bundle, state)
    moments = [a for a in jax.tree.leaves(state) if a.shape == (LETTERS, WIDTH)]
    assert moments
    for array in (bundle.storages["embed"], *moments):
        assert spec_of(array) == ("x",)


def test_in_shard_map_a_split_storage_is_gathered_first() -> None:
    """FSDP by hand: what is split is gathered as a storage, so the gradient is scattered back."""
    bundle = tied.to(tied.Bundle(model()), over("x"))

    def loss(bundle: Any, letters: Any) -> Any:
        whole = jax.tree.map(lambda a: jax.lax.all_gather(a, "x", tiled=True), bundle)
        mine = entropy(whole["embed"], whole["head"], letters)
        return jax.lax.pmean(mine, "x")

    mapped = jax.shard_map(
        loss, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P(), check_vma=False
    )
    grads = jax.jit(jax.grad(lambda b: mapped(b, TEXT)))(bundle)
    expected = jax.grad(lambda w: entropy(w, w.T, TEXT))(embedding())
    assert spec_of(grads.storages["embed"]) == ("x",)
    np.testing.assert_allclose(grads.storages["embed"], expected, rtol=2e-5, atol=1e-7)
    with pytest.raises(tied.MergeError, match=r"another shape than the skeleton's: embed"):
        jax.shard_map(lambda b: b["head"], mesh=MESH, in_specs=P("x"), out_specs=P(None, "x"))(
            bundle
        )


# ----------------------------------------------------------------------------------------- orbax


def bytes_under(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_orbax_saves_a_sharded_bundle_once_and_restores_it_into_another_mesh(
    tmp_path: Path,
) -> None:
    w = jax.random.uniform(jax.random.key(0), (512, 256), minval=-1.0)
    bundle = tied.to(tied.Bundle(model(w=w)), {"embed": over("x")})
    lost = {"embed": bundle.storages["embed"], "head": bundle["head"]}
    there = tied.to(jax.eval_shape(lambda b: b, bundle), {"head": over("model", "data", mesh=GRID)})
    with ocp.StandardCheckpointer() as checkpointer:
        for name, tree in {"bundle": bundle, "lost": lost}.items():
            checkpointer.save(tmp_path / name, tree)
            checkpointer.wait_until_finished()
        after = checkpointer.restore(tmp_path / "bundle", there)
    assert bytes_under(tmp_path / "bundle") < w.nbytes + 10_000
    assert bytes_under(tmp_path / "lost") > 1.8 * bytes_under(tmp_path / "bundle")
    assert after.storages["embed"].sharding == over("data", "model", mesh=GRID)
    assert spec_of(after["head"]) == ("model", "data")
    np.testing.assert_array_equal(after["embed"], w)
    np.testing.assert_array_equal(after["head"], w.T)
    donated = jax.jit(lambda b: jax.tree.map(lambda a: a + 1, b), donate_argnums=0)(after)
    assert after.storages["embed"].is_deleted()
    assert donated.storages["embed"].sharding == over("data", "model", mesh=GRID)
