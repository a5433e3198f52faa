"""A small transformer language model in Equinox and in NNX, and the text that it reads.

Each model is written in two ways: with a head of its own, which is tied to the embedding by
`tied.tie` from outside, and by hand with one parameter, whose transpose is taken where it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

LETTERS, WIDTH, HEADS, LAYERS, CONTEXT, BATCH, STEPS = 128, 32, 2, 2, 32, 8, 20
FILES = ("this.py", "textwrap.py", "heapq.py", "json/decoder.py")


def text() -> np.ndarray:
    """The bytes of a few modules of Python's standard library, what is no ASCII left out."""
    library = Path(os.__file__).parent
    found = np.concatenate([np.frombuffer((library / f).read_bytes(), np.uint8) for f in FILES])
    return found[found < LETTERS].astype(np.int32)


def batches() -> list[jax.Array]:
    """The same batches of (BATCH, CONTEXT + 1) letters for every model."""
    letters, random = text(), np.random.default_rng(0)
    starts = random.integers(0, len(letters) - CONTEXT - 1, (STEPS, BATCH, 1))
    return [jnp.asarray(letters[start + np.arange(CONTEXT + 1)]) for start in starts]


def cross_entropy(model: Any, letters: Any) -> Any:
    """The mean negative log likelihood of each next letter, in nats."""
    logits = jax.nn.log_softmax(model(letters[:, :-1]))
    return -jnp.take_along_axis(logits, letters[:, 1:, None], -1).mean()


def attention(mixed: Any) -> Any:
    """Causal attention of (batch, time, 3 * WIDTH): queries, keys and values."""
    q, k, v = jnp.split(mixed.reshape(*mixed.shape[:2], HEADS, -1), 3, -1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*mixed.shape[:2], WIDTH)


# ------------------------------------------------------------------------------------ Equinox


class Dense(eqx.Module):
    kernel: Any

    def __init__(self, n: int, m: int, key: Any) -> None:
        self.kernel = jax.random.normal(key, (n, m)) / jnp.sqrt(n)

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel


class Norm(eqx.Module):
    scale: Any

    def __call__(self, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * self.scale / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


class Block(eqx.Module):
    mix: Dense
    out: Dense
    up: Dense
    down: Dense
    norms: tuple[Norm, Norm]

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.mix, self.out = Dense(WIDTH, 3 * WIDTH, keys[0]), Dense(WIDTH, WIDTH, keys[1])
        self.up, self.down = Dense(WIDTH, 4 * WIDTH, keys[2]), Dense(4 * WIDTH, WIDTH, keys[3])
        self.norms = Norm(jnp.ones(WIDTH)), Norm(jnp.ones(WIDTH))

    def __call__(self, x: Any) -> Any:
        x = x + self.out(attention(self.mix(self.norms[0](x))))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Embedding(eqx.Module):
    weight: Any

    def __init__(self, key: Any) -> None:
        self.weight = jax.random.normal(key, (LETTERS, WIDTH)) / jnp.sqrt(WIDTH)

    def __call__(self, letters: Any) -> Any:
        return self.weight[letters]


class EquinoxModel(eqx.Module):
    """With a head of its own."""

    embed: Embedding
    places: Any
    blocks: list[Block]
    norm: Norm
    head: Dense | None

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, LAYERS + 3)
        self.embed = Embedding(keys[0])
        self.places = jax.random.normal(keys[1], (CONTEXT, WIDTH)) / jnp.sqrt(WIDTH)
        self.blocks = [Block(key) for key in keys[3:]]
        self.norm = Norm(jnp.ones(WIDTH))
        self.head = self.made_head(keys[2])

    def made_head(self, key: Any) -> Dense | None:
        return Dense(WIDTH, LETTERS, key)

    def logits(self, x: Any) -> Any:
        assert self.head is not None
        return self.head(x)

    def __call__(self, letters: Any) -> Any:
        x = self.embed(letters) + self.places[: letters.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


class EquinoxByHand(EquinoxModel):
    """With one parameter."""

    def made_head(self, key: Any) -> None:
        return None

    def logits(self, x: Any) -> Any:
        return x @ self.embed.weight.T


# ---------------------------------------------------------------------------------------- NNX


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        x = x + self.out(attention(self.mix(self.norms[0](x))))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class NnxModel(nnx.Module):
    """With a head of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(LETTERS, WIDTH, rngs=rngs)
        self.places = nnx.Param(jax.random.normal(rngs.params(), (CONTEXT, WIDTH)) / 8)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.make_head(rngs)

    def make_head(self, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(WIDTH, LETTERS, use_bias=False, rngs=rngs)

    def logits(self, x: Any) -> Any:
        return self.head(x)

    def __call__(self, letters: Any) -> Any:
        x = self.embed(letters) + self.places[: letters.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


class NnxByHand(NnxModel):
    """With one parameter, in NNX's own way."""

    def make_head(self, rngs: nnx.Rngs) -> None:
        pass

    def logits(self, x: Any) -> Any:
        return self.embed.attend(x)
