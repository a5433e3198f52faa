"""Stacks of tied NNX models under vmap and scan: never the wrong axis in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tied
from nnx_tied import (
    KINDS,
    MODES,
    SOURCE,
    TARGET,
    Kind,
    Net,
    by_hand,
    close,
    mode,
    numbers,
    state_of,
)
from tied import Layout
from tied._nnx.mapped import moved

N = 5


@pytest.fixture(params=MODES, autouse=True)
def each_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with mode(request.param):
        yield


def stack(make: Callable[[Any], Net]) -> Any:
    return nnx.vmap(make, in_axes=0, out_axes=0)(jnp.arange(1.0, N + 1))


def scaled(kind: Kind, tie: bool) -> Callable[[Any], Net]:
    def make(factor: Any) -> Net:
        model = kind.apart()
        model.first.w[...] = model.first.w[...] * factor
        if tie:
            tied.tie(model, TARGET, SOURCE, kind.view)
        return model

    return make


LAST_AXES = {
    "same": Kind((3, 2), None, ""),
    "transpose": Kind((3, 2), lambda w: w.mT, ""),
    "columns": Kind((3, 4), lambda w: w[..., 1:3], ""),
    "flip": Kind((3, 2), lambda w: w[..., ::-1], ""),
    "computed": Kind((3, 2), lambda w: jnp.tanh(w).mT * 2, ""),
}


def holds_in_slices(model: Any, kind: Kind) -> None:
    """Inside of vmap and scan each slice is tied; gradients are those of each by itself."""
    ws = model.first.w[...]
    wanted = jnp.stack([kind.read(w) for w in ws])
    close(model.second.w[...], wanted)
    assert len(jax.tree.leaves(nnx.state(model))) == 6
    close(nnx.jit(nnx.vmap(lambda m: m.second.w[...], in_axes=0))(model), wanted)

    def step(count: Any, m: Any) -> Any:
        return count + 1, m.second.w[...]

    over = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    _, found = nnx.jit(nnx.scan(step, **over))(jnp.zeros(()), model)
    close(found, wanted)
    grads = state_of(
        nnx.jit(nnx.grad(lambda m: nnx.vmap(lambda m: m(1.0), in_axes=0)(m).sum()))(model)
    )
    close(grads["first"]["w"][...], jax.jit(jax.vmap(jax.grad(lambda w: by_hand(kind, w))))(ws))


@pytest.mark.parametrize("name", ["same", "transpose", "rows", "diagonal", "computed"])
def test_ties_that_are_made_in_a_mapped_constructor(name: str) -> None:
    holds_in_slices(stack(scaled(KINDS[name], tie=True)), KINDS[name])


@pytest.mark.parametrize("name", LAST_AXES)
def test_ties_of_stacks_with_views_of_the_last_axes(name: str) -> None:
    kind = LAST_AXES[name]
    model = stack(scaled(kind, tie=False))
    model.deep[1]["second"].w = nnx.Param(jnp.zeros((N, *kind.read(numbers(*kind.shape)).shape)))
    tied.tie(model, TARGET, SOURCE, kind.view)
    holds_in_slices(model, kind)


def test_a_view_of_all_axes_of_a_stack_is_refused_in_slices() -> None:
    model = stack(scaled(Kind((3, 2), None, ""), tie=False))
    model.deep[1]["second"].w = nnx.Param(jnp.zeros((2, 3, N)))
    tied.tie(model, TARGET, SOURCE, tied.transpose)
    close(model.second.w[...], model.first.w[...].T)
    with pytest.raises(tied.TieError) as caught:
        nnx.vmap(lambda m: m.second.w[...], in_axes=0)(model)
    assert str(caught.value) == (
        f"it is not certain what {TARGET} reads of {SOURCE} here\n"
        f"  tie      {TARGET} = {SOURCE}.transpose(2, 1, 0)\n"
        "  tied as  (5, 3, 2)\n"
        "  found    (3, 2)\n"
        "  Under nnx.vmap and nnx.scan, tie inside of the mapped constructor, or with a view of the"
        " last axes: lambda W: W.mT"
    )


def test_a_function_that_mixes_slices_is_refused_in_slices() -> None:
    model = stack(scaled(Kind((3, 2), None, ""), tie=False))
    tied.tie(model, TARGET, SOURCE, lambda w: w - w.mean(0))
    with pytest.raises(tied.TieError, match="it is not certain what"):
        nnx.vmap(lambda m: m.second.w[...], in_axes=0)(model)


def test_a_stack_that_could_be_along_several_axes_is_refused() -> None:
    """(3, 3) tied, (3, 3, 3) found: the transpose of which of them?"""
    model = Net(numbers(3, 3), numbers(3, 3))
    tied.tie(model, TARGET, SOURCE, tied.transpose)
    model.first.w = nnx.Param(numbers(3, 3, 3))
    with pytest.raises(tied.TieError, match="it is not certain what"):
        _ = model.second.w[...]
    assert tied.ties(model).groups == ((SOURCE, TARGET),)
    assert f"  {TARGET} is computed from {SOURCE}" in str(tied.ties(model)).splitlines()


def test_a_part_of_a_stack_takes_its_stack_along() -> None:
    model = stack(scaled(KINDS["transpose"], tie=True))
    outs = nnx.vmap(lambda part, x: part(x), in_axes=(0, None))(model.second, 2.0)
    wanted = jnp.stack([nnx.vmap(lambda m: m.second(2.0), in_axes=0)(model)[n] for n in range(N)])
    close(outs, wanted)


def test_a_stack_is_untied_copied_and_reported() -> None:
    model = stack(scaled(KINDS["transpose"], tie=True))
    report = str(tied.ties(model)).splitlines()
    assert f"  {TARGET} = first.w.transpose(0, 2, 1)" in report
    half = tied.bf16(model)
    assert half.second.w[...].dtype == jnp.bfloat16
    tied.untie(model, TARGET)
    close(model.second.w[...], model.first.w[...].mT)
    assert tied.ties(model).groups == ()


def test_ties_over_a_stack_and_what_is_not_stacked() -> None:
    """One table for the layers of a scan: each slice of the stack of readings is the table."""

    class Deep(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Param(numbers(2, 3))
            self.layers = stack(scaled(Kind((3, 2), None, ""), tie=False))

        def __call__(self, x: Any) -> Any:
            step = nnx.scan(lambda x, layer: x + layer.first.w[...].sum(),
                            in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)  # fmt: skip
            return step(x, self.layers)

    model = Deep()
    tied.tie(model, "layers.first.w", "table", lambda t: jnp.broadcast_to(t.T, (N, 3, 2)))
    grads = state_of(nnx.grad(lambda m: m(jnp.zeros(())))(model))
    close(grads["table"][...], N)
    close(model(jnp.zeros(())), N * numbers(2, 3).sum())


# ------------------------------------------------------------------------------------ by hand

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda w: w,
    "mT": lambda w: w.swapaxes(-1, -2),
    "T": lambda w: w.T,
    "last axis": lambda w: w[..., 1:3],
    "first axis": lambda w: w[1:3],
    "second axis": lambda w: w[:, 1:],
    "flip last": lambda w: w[..., ::-1],
    "flip all": lambda w: w[::-1, ::-1, ::-1],
    "reshape last": lambda w: w.reshape(*w.shape[:-2], -1),
    "ravel": lambda w: w.reshape(-1),
    "diagonal last": lambda w: w.diagonal(0, -2, -1) if w.ndim > 1 else w,
    "new axis": lambda w: w[..., None],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(4, 3, 5), (3, 4, 4), (2, 2, 2), (1, 3, 4), (4, 1, 3)])
def test_a_layout_of_slices_is_right_or_refused(shape: tuple[int, ...], view: str) -> None:
    """Against NumPy: each slice of the reading is the reading of the slice, on the same axis."""
    layout = Layout.of(VIEWS[view], shape)
    assert layout is not None
    w = np.arange(np.prod(shape)).reshape(shape)
    whole = w.reshape(-1)[layout.index()]
    for axis in range(3):
        found = shape[:axis] + shape[axis + 1 :]
        slim = moved(layout, shape, found)
        if slim is None:
            continue
        for index in range(shape[axis]):
            part = np.take(w, index, axis).reshape(-1)[slim.index()]
            np.testing.assert_array_equal(part, np.take(whole, index, axis))
    certain = {"whole", "mT", "last axis", "flip last", "reshape last", "diagonal last", "new axis"}
    if view in certain and len(set(shape)) == 3:
        assert moved(layout, shape, shape[1:]) is not None
    if view in ("T", "ravel", "flip all", "first axis") and shape == (4, 3, 5):
        assert moved(layout, shape, shape[1:]) is None


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_layout_of_stacks_is_right_or_refused(axis: int, view: str) -> None:
    layout = Layout.of(VIEWS[view], (4, 3, 5))
    assert layout is not None
    found = [4, 3, 5]
    found.insert(axis, 7)
    wide = moved(layout, (4, 3, 5), tuple(found))
    w = np.arange(np.prod(found)).reshape(found)
    if wide is None:
        assert axis >= len(layout.shape)
        return
    whole = w.reshape(-1)[wide.index()]
    for index in range(7):
        part = np.take(w, index, axis).reshape(-1)[layout.index()]
        np.testing.assert_array_equal(np.take(whole, index, axis), part)
