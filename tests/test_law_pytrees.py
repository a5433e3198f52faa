"""The laws of `tied.tie` on pytrees: random models, random views, tied one after the other.

What each array has to read is known by brute force, as positions in a NumPy array of its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tied
from strategies import LAW

View = Callable[[Any], Any]
SHAPES = ((6,), (4, 3), (3, 3), (2, 3, 4), (1, 5), (12,))


class Part(eqx.Module):
    a: Any
    b: Any
    name: str = eqx.field(static=True, default="part")


@dataclass
class Member:
    """An array of a model: where it is, and what it has to read."""

    place: str
    root: int  # the number of the source that it comes to
    index: np.ndarray  # the positions that it reads there

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.shape


@st.composite
def views(draw: Any, shape: tuple[int, ...]) -> View:
    """A view of an array of `shape`, as a user writes it: for NumPy's or for JAX's arrays."""
    xp: Any = draw(st.sampled_from([np, jnp]))
    axes = draw(st.permutations(range(len(shape))))
    axis = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[axis] - 1))
    cut = tuple(slice(None) if i != axis else slice(start, None) for i in range(len(shape)))
    choices: list[View] = [
        lambda w: w.transpose(axes),
        lambda w: w[cut],
        lambda w: w[(slice(None),) * axis + (start,)],
        lambda w: xp.flip(w, axis),
        lambda w: w.reshape(-1),
        lambda w: xp.broadcast_to(w, (2, *shape)),
        lambda w: w[None],
        tied.transpose,
    ]
    if len(shape) > 1:
        choices += [lambda w: w.diagonal(), lambda w: xp.swapaxes(w, 0, -1)]
    return draw(st.sampled_from(choices))


def plan(draw: Any) -> tuple[list[np.ndarray], list[Member], list[tuple[str, str, View | None]]]:
    """Sources, all arrays of the model, and the ties to make."""
    sources = [
        np.arange(np.prod(shape), dtype="float32").reshape(shape) + 100 * n
        for n, shape in enumerate(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=2)))
    ]
    count = draw(st.integers(len(sources) + 1, len(sources) + 4))
    places = draw(st.permutations([f"{'pq'[i % 2]}.{'abcdef'[i // 2]}" for i in range(count)]))
    members = [
        Member(places[n], n, np.arange(w.size).reshape(w.shape)) for n, w in enumerate(sources)
    ]
    ties = []
    for place in places[len(sources) :]:
        of = draw(st.sampled_from([m for m in members if m.shape]))  # may be tied itself
        view = draw(st.none() | views(of.shape))
        index = of.index if view is None else np.asarray(tied_plain(view, of.index))
        if 0 in index.shape:
            continue
        members.append(Member(place, of.root, index))
        ties.append((place, of.place, view))
    return sources, members, ties


def tied_plain(view: View, index: np.ndarray) -> Any:
    seen = view(index)
    return seen.array() if isinstance(seen, tied.View) else seen


def build(draw: Any, sources: list[np.ndarray], members: list[Member]) -> Any:
    """A model with an array of its own at each place."""
    values: dict[str, Any] = {
        m.place: jnp.asarray(sources[n]) if n < len(sources) else jnp.zeros(m.shape)
        for n, m in enumerate(members)
    }
    parts: dict[str, dict[str, Any]] = {}
    for place, value in values.items():
        part, name = place.split(".")
        parts.setdefault(part, {})[name] = value
    model: dict[str, Any] = {"none": None, "n": 3}
    for part, arrays in parts.items():
        fits = set(arrays) == {"a", "b"} and draw(st.booleans())
        model[part] = Part(**arrays) if fits else arrays
    return model


def at(model: Any, place: str) -> Any:
    part, name = place.split(".")
    found = model[part]
    return found[name] if isinstance(found, dict) else getattr(found, name)


@st.composite
def models(draw: Any) -> Any:
    sources, members, ties = plan(draw)
    return build(draw, sources, members), sources, members, ties


def tie(model: Any, ties: list[tuple[str, str, View | None]]) -> tied.Bundle:
    bundle = tied.Bundle(model)
    for target, source, view in ties:
        bundle = tied.tie(bundle, target, source, view)
    return bundle


@given(models())
@LAW
def test_every_array_reads_what_it_was_tied_to(case: Any) -> None:
    model, sources, members, ties = case
    before = [np.asarray(x) for x in jax.tree.leaves(model)]
    bundle = tie(model, ties)
    assert len(bundle.storages) == len(sources)
    for member in members:
        seen = at(bundle.model, member.place)
        np.testing.assert_array_equal(seen, sources[member.root].reshape(-1)[member.index])
        assert type(seen) is type(jnp.zeros(0))
    for x, y in zip(before, jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)


@given(models())
@LAW
def test_the_gradient_of_a_storage_is_the_sum_over_all_that_read_it(case: Any) -> None:
    model, sources, members, ties = case
    bundle = tie(model, ties)
    weights = [np.linspace(1, 2, m.index.size, dtype="float32").reshape(m.shape) for m in members]

    def loss(bundle: Any) -> Any:
        read = [at(bundle.model, m.place) for m in members]
        return sum(jnp.sum(w * x) for w, x in zip(weights, read, strict=True))

    gradient = jax.grad(loss)(bundle)
    for n, source in enumerate(sources):
        wanted = np.zeros(source.size, "float32")
        for member, w in zip(members, weights, strict=True):
            if member.root == n:
                np.add.at(wanted, member.index.reshape(-1), w.reshape(-1))
        name = next(x for x in bundle.storages if places_of(bundle, x) & {members[n].place})
        np.testing.assert_allclose(gradient.storages[name].reshape(-1), wanted, rtol=1e-5)


def places_of(bundle: tied.Bundle, name: str) -> set[str]:
    """The names of all arrays that read a storage."""
    found = next(s for s in tied.ties(bundle).storages if s.name == name)
    return {leaf.path for leaf in found.leaves}


@given(models(), st.data())
@LAW
def test_a_write_through_any_name_is_seen_through_all(case: Any, data: Any) -> None:
    model, sources, members, ties = case
    bundle = tie(model, ties)
    member = data.draw(st.sampled_from(members))
    value = -1.0 - np.arange(member.index.size, dtype="float32").reshape(member.shape)
    lazy = at(bundle.skeleton.merge(bundle.storages), member.place)
    if isinstance(lazy, tied.Derived) or len(np.unique(member.index)) < member.index.size:
        with pytest.raises(tied.TieError, match=r"can't be written (to|through)"):
            bundle.set(member.place, value)
        return
    changed = bundle.set(member.place, value)
    now = sources[member.root].copy().reshape(-1)
    now[member.index.reshape(-1)] = value.reshape(-1)
    for other in members:
        wanted = now if other.root == member.root else sources[other.root].reshape(-1)
        np.testing.assert_array_equal(at(changed.model, other.place), wanted[other.index])
    assert changed.skeleton == bundle.skeleton


@given(models(), st.data())
@LAW
def test_an_array_that_is_untied_keeps_its_values_and_leaves_the_others(
    case: Any, data: Any
) -> None:
    model, sources, members, ties = case
    if not ties:
        return
    bundle = tie(model, ties)
    place = data.draw(st.sampled_from([target for target, _, _ in ties]))
    if any(
        source == place for _, source, _ in ties
    ):  # others are computed from it, or it is theirs
        return
    apart = tied.untie(bundle, place)
    assert len(apart.storages) == len(sources) + 1
    for member in members:
        wanted = sources[member.root].reshape(-1)[member.index]
        np.testing.assert_array_equal(at(apart.model, member.place), wanted)
    changed = jax.tree.map(lambda x: x + 1, apart)
    assert not any(place in group and len(group) > 1 for group in tied.ties(changed).groups)


@given(models())
@LAW
def test_a_bundle_is_a_fixed_point(case: Any) -> None:
    """Splitting what a bundle merges to gives its skeleton and its names again."""
    model, _, _, ties = case
    bundle = tie(model, ties)
    again = tied.Bundle(bundle.skeleton.merge(bundle.storages))
    assert again.skeleton == bundle.skeleton
    assert hash(again.skeleton) == hash(bundle.skeleton)
    assert again.skeleton.names == bundle.skeleton.names
    mapped = tied.map(lambda x: x * 2, bundle)
    assert mapped.skeleton == bundle.skeleton
    assert not tied.compare(bundle, mapped)
