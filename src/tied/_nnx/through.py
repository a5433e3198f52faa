"""Writing into what a layout reads: the source in which the elements that are read are new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tied._layout import Layout
from tied._overlap import repeats_elements
from tied._steps import Step, apply_steps
from tied.arrays.library import Geometry


def writable(layout: Layout) -> bool:
    """Returns whether a layout reads no element twice, so that what it reads can be written."""
    return layout.dtype is None and not repeats_elements(
        Geometry(0, layout.shape, layout.strides, 1, "")
    )


def put(source: Any, steps: Sequence[Step], value: Any) -> Any:
    """Returns a source whose reading is `value`; elements that are not read stay what they are.

    Args:
        source: The source, an array of JAX.
        steps: How it is read; no element twice.
        value: The new reading.
    """
    if not steps:
        return value
    step, *rest = steps
    new = put(apply_steps(source, [step]), rest, value)
    if step.op == "reshape":
        return new.reshape(source.shape)
    if step.op == "permute":
        return new.transpose(tuple(np.argsort(step.args)))
    if step.op == "conj":
        return new.conj()
    if step.op == "neg":
        return -new
    source = jnp.asarray(source)
    if step.op == "take":
        index = step.args[0].index().reshape(-1)
        return source.reshape(-1).at[index].set(new.reshape(-1)).reshape(source.shape)
    if step.op == "diagonal":
        return _put_diagonal(source, step.args, new)
    assert step.op in ("index", "flip"), step
    return source.at[(*step.key, ...)].set(new)


def _put_diagonal(source: Any, args: tuple[Any, ...], new: Any) -> Any:
    offset, first, second = args
    last = jnp.moveaxis(source, (first, second), (-2, -1))
    along = np.arange(new.shape[-1])
    last = last.at[..., along - min(offset, 0), along + max(offset, 0)].set(new)
    return jnp.moveaxis(last, (-2, -1), (first, second))
