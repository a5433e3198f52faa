"""Split and merge of 500 layers, in the CPU time of the calling thread."""

import time
from collections.abc import Iterator

import equinox as eqx
import jax
from flax import nnx

import tied
from benchmarks import models
from benchmarks.measure import Row, race


def rows() -> Iterator[Row]:
    flax, equinox, plain = models.NNXStack(), models.EquinoxStack(), models.nested()

    yield race(
        "split, 500 Equinox layers / jax.tree.flatten",
        lambda: tied.split(equinox),
        lambda: jax.tree.flatten(equinox),
        target=2.0,
        timer=time.thread_time,
    )
    yield race(
        "split + merge, 500 NNX layers / nnx.split + nnx.merge",
        lambda: tied.merge(*tied.split(flax)),
        lambda: nnx.merge(*nnx.split(flax)),
        target=0.25,
        timer=time.thread_time,
    )
    yield race(
        "split + merge, 500 Equinox layers / eqx.partition + eqx.combine",
        lambda: tied.merge(*tied.split(equinox)),
        lambda: eqx.combine(*eqx.partition(equinox, eqx.is_array)),
        target=1.0,
        timer=time.thread_time,
    )

    def flatten_unflatten() -> object:
        leaves, structure = jax.tree.flatten(plain)
        return jax.tree.unflatten(structure, leaves)

    yield race(
        "split + merge, nested dict / jax.tree.flatten + unflatten",
        lambda: tied.merge(*tied.split(plain)),
        flatten_unflatten,
        timer=time.thread_time,
    )
