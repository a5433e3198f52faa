"""A small language model whose head is its embedding, transposed, in Equinox.

It learns to write the source of Python's standard library, letter by letter. The model is an
ordinary Equinox module with an embedding and a head of its own; one line ties them afterwards:

    model = tied.tie(model, "head.kernel", "embed.weight", tied.transpose)

From there on `jax.jit`, `jax.value_and_grad`, optax and donation see one array. The same model
without that line is trained beside it.

    python examples/language_model.py [--steps 300]
"""

import argparse
import functools
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tied

LETTERS, WIDTH, CONTEXT, BATCH = 128, 64, 64, 16
FILES = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "pathlib.py", "typing.py")

Model = Any


# -- the model ------------------------------------------------------------------------------------


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key: jax.Array) -> None:
        one, other = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=one)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=other)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]

    def __call__(self, x: jax.Array) -> jax.Array:
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=causal)
        return x + jax.vmap(lambda x: self.mlp(self.norms[1](x)))(x)


class Head(eqx.Module):
    kernel: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


class LanguageModel(eqx.Module):
    embed: eqx.nn.Embedding
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: Head

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(LETTERS, WIDTH, key=keys[0])
        self.places = jax.random.normal(keys[1], (CONTEXT, WIDTH))
        self.blocks = [Block(keys[2]), Block(keys[3])]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = Head(jax.random.normal(keys[4], (WIDTH, LETTERS)))

    def __call__(self, letters: jax.Array) -> jax.Array:
        """The logits of the next letter, after each letter of one text."""
        x = (jax.vmap(self.embed)(letters) + self.places[: len(letters)]) / WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x) / WIDTH**0.5)


# -- training -------------------------------------------------------------------------------------


def source() -> np.ndarray:
    """The text, as numbers below 128."""
    library = Path(os.__file__).parent
    text = np.frombuffer(b"".join((library / name).read_bytes() for name in FILES), np.uint8)
    return text[text < LETTERS].astype(np.int32)


def loss(model: Model, texts: jax.Array) -> jax.Array:
    """How surprising the next letter is, in bits."""
    logits = jax.nn.log_softmax(jax.vmap(model)(texts[:, :-1]))
    return -jnp.take_along_axis(logits, texts[:, 1:, None], -1).mean() / jnp.log(2)


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(model: Model, state: Any, texts: jax.Array) -> tuple[Model, Any, jax.Array]:
    value, grads = jax.value_and_grad(loss)(model, texts)
    updates, state = optimizer.update(grads, state, model)
    return optax.apply_updates(model, updates), state, value


def train(name: str, model: Model, text: np.ndarray, steps: int) -> Model:
    state = optimizer.init(model)
    random = np.random.default_rng(0)
    for count in range(1, steps + 1):
        starts = random.integers(0, len(text) - CONTEXT - 1, (BATCH, 1))
        model, state, value = step(model, state, text[starts + np.arange(CONTEXT + 1)])
        if count % max(1, steps // 5) == 0:
            print(f"{name:<6} step {count:>4}   {value:.3f} bits a letter")
    return model


def write(model: Model, start: str, count: int) -> str:
    """Lets the model go on after `start`."""
    pick = jax.jit(lambda model, text, at, key: jax.random.categorical(key, 2 * model(text)[at]))
    letters = list(start.encode())
    for key in jax.random.split(jax.random.key(0), count):
        text = letters[-CONTEXT:]
        padded = np.array(text + [0] * (CONTEXT - len(text)), np.int32)
        letters.append(int(pick(model, padded, len(text) - 1, key)))
    return bytes(letters).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="a tied language model")
    parser.add_argument("--steps", type=int, default=300, help="of training (default 300)")
    steps = parser.parse_args().steps
    begun = time.perf_counter()
    text = source()
    train_on, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    unseen = held_out[: len(held_out) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)

    model = LanguageModel(jax.random.key(0))
    models = {
        "tied": tied.tie(model, "head.kernel", "embed.weight", tied.transpose),
        "untied": tied.copy(tied.Bundle(model)),  # a step donates its arrays, so it needs its own
    }
    print(*str(tied.ties(models["tied"])).splitlines()[:2], "...", sep="\n")
    for name, model in models.items():
        models[name] = train(name, model, train_on, steps)

    print(f"\n{'':<7}{'parameters':>12}{'bits a letter, held out':>26}")
    for name, model in models.items():
        counted = tied.ties(model).parameters
        print(f"{name:<7}{counted:>12,}{float(jax.jit(loss)(model, unseen)):>26.3f}")
    bundle = models["tied"]
    assert (bundle.head.kernel == bundle.embed.weight.T).all(), "the tie was lost"
    print(f"\nthe tied one goes on after 'def ':\n\n{write(bundle, 'def ', 200)}\n")
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
