"""A tied autoencoder on real digits, interrupted half-way: the job of `make demo`.

The decoder reads the transposes of the encoder's weights. Three trainings start from the same
weights and see the same batches:

  uninterrupted   nothing happens;
  interrupted     half-way, weights and optimizer state are cast to f64 and back, moved to a second
                  device and copied, by `tied`;
  tie lost        half-way, the same by `jax.tree.map`, which sees two arrays where there is one.

The second must equal the first bit for bit: f32 -> f64 -> f32 loses nothing. The third has become
another model, with nearly twice the parameters.

    python examples/digits.py [--epochs 100] [--out build/digits.png]
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# A second device to move to, and f64: both have to be asked for before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ["JAX_ENABLE_X64"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import tied

mpl.use("Agg")
import matplotlib.pyplot as plt

HIDDEN = (64, 128, 16)
BATCH = 100
TRAINED_ON = 1500

Storages = dict[str, jax.Array]


# -- the model ------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    W: Any
    b: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.W.T + self.b


@jax.tree_util.register_dataclass
@dataclass
class Autoencoder:
    encoder: list[Layer]
    decoder: list[Layer]

    def __call__(self, x: jax.Array) -> jax.Array:
        layers = [*self.encoder, *self.decoder]
        for layer in layers[:-1]:
            x = jnp.tanh(layer(x))
        return jax.nn.sigmoid(layers[-1](x))


def autoencoder() -> Autoencoder:
    """An encoder, and a decoder whose weights are the encoder's, transposed."""
    keys = jax.random.split(jax.random.key(0), len(HIDDEN) - 1)
    glorot = jax.nn.initializers.glorot_uniform()
    encoder = [
        Layer(glorot(key, (outputs, inputs), jnp.float32), jnp.zeros(outputs, jnp.float32))
        for key, inputs, outputs in zip(keys, HIDDEN, HIDDEN[1:], strict=False)
    ]
    decoder = [
        Layer(tied.transpose(layer.W), jnp.zeros(layer.W.shape[1], jnp.float32))
        for layer in reversed(encoder)
    ]
    return Autoencoder(encoder, decoder)


def loss(skeleton: tied.Skeleton, storages: Storages, images: jax.Array) -> jax.Array:
    return jnp.mean((skeleton.merge(storages)(images) - images) ** 2)


# -- training -------------------------------------------------------------------------------------


@dataclass
class Training:
    """What a training is at one moment: a model (taken apart), an optimizer state, its past."""

    skeleton: tied.Skeleton
    storages: Storages
    state: optax.OptState
    losses: list[jax.Array] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)

    @property
    def model(self) -> Autoencoder:
        return self.skeleton.merge(self.storages)

    def curve(self, epochs: int) -> np.ndarray:
        """The mean loss of each epoch."""
        return np.array(self.losses, np.float32).reshape(epochs, -1).mean(axis=1)


def optimizer(epochs: int) -> optax.GradientTransformation:
    steps = epochs * (TRAINED_ON // BATCH)
    return optax.adam(optax.cosine_decay_schedule(3e-3, steps))


@partial(jax.jit, static_argnums=(0, 1))
def step(
    skeleton: tied.Skeleton,
    update: Callable[..., Any],
    storages: Storages,
    state: optax.OptState,
    images: jax.Array,
) -> tuple[Storages, optax.OptState, jax.Array]:
    """One step on the storages: the gradient of W is the sum over both of its uses."""
    value, gradient = jax.value_and_grad(loss, argnums=1)(skeleton, storages, images)
    change, state = update(gradient, state)
    return optax.apply_updates(storages, change), state, value


def batches(images: np.ndarray, epoch: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng(epoch).permutation(len(images))
    for start in range(0, len(images), BATCH):
        yield images[order[start : start + BATCH]]


def distance(model: Autoencoder) -> float:
    """How far the decoder's weights are from the encoder's, relative to the encoder's."""
    pairs = zip(model.encoder, reversed(model.decoder), strict=True)
    weights = [(np.asarray(e.W), np.asarray(d.W).T) for e, d in pairs]
    apart = sum(np.sum((e - d) ** 2) for e, d in weights)
    return float(np.sqrt(apart / sum(np.sum(e**2) for e, _ in weights)))


def train(
    images: np.ndarray, epochs: int, half_way: Callable[[Training], Training] | None, bar: tqdm
) -> Training:
    adam = optimizer(epochs)
    skeleton, storages = tied.split(autoencoder())
    now = Training(skeleton, storages, adam.init(storages))
    for epoch in range(epochs):
        if half_way is not None and epoch == epochs // 2:
            now = half_way(now)
        for batch in batches(images, epoch):
            now.storages, now.state, value = step(
                now.skeleton, adam.update, now.storages, now.state, batch
            )
            now.losses.append(value)
        now.distances.append(distance(now.model))
        bar.set_postfix(loss=f"{float(value):.4f}")
        bar.update()
    return now


# -- half-way -------------------------------------------------------------------------------------


def by_tied(now: Training) -> Training:
    """To f64 and back, to another device, copied: model and optimizer state in one call each."""
    everything = (now.model, now.state)
    everything = tied.f32(tied.f64(everything))
    everything = tied.to(everything, jax.devices("cpu")[1])
    model, state = tied.copy(everything)
    return Training(*tied.split(model), state, now.losses, now.distances)


def by_tree_map(now: Training) -> Training:
    """The same by `jax.tree.map`: the tie is lost, and nobody is told."""
    device = jax.devices("cpu")[1]

    def through(array: Any) -> jax.Array:
        back = jnp.asarray(jnp.asarray(array, jnp.float64), np.asarray(array).dtype)
        return jnp.array(jax.device_put(back, device))

    def come_apart(storages: Storages) -> tuple[tied.Skeleton, Storages]:
        return tied.split(jax.tree.map(through, now.skeleton.merge(storages)))

    def follow(part: Any) -> Any:  # Adam's moments are named as the weights are
        return come_apart(part)[1] if isinstance(part, dict) else jax.device_put(part, device)

    state = jax.tree.map(follow, now.state, is_leaf=lambda part: isinstance(part, dict))
    return Training(*come_apart(now.storages), state, now.losses, now.distances)


# -- what is shown --------------------------------------------------------------------------------


BLUE, PALE, ORANGE, GREY = "#1f5fa8", "#a9c8ea", "#d9661f", "#777777"


LOOKS = {
    "uninterrupted": {"color": PALE, "lw": 6, "zorder": 2, "label": "uninterrupted"},
    "interrupted": {"color": BLUE, "lw": 1.6, "zorder": 4, "label": "interrupted, moved by tied"},
    "tie lost": {
        "color": ORANGE,
        "lw": 1.6,
        "zorder": 3,
        "label": "interrupted, moved by jax.tree.map",
    },
}


def draw_curves(axes: Any, below: Any, runs: dict[str, Training], epochs: int) -> None:
    """The losses, their second half enlarged, and how far the tied weights are apart."""
    half = epochs // 2
    zoom = axes.inset_axes((0.53, 0.2, 0.45, 0.33))
    at = np.arange(1, epochs + 1)
    for name, run in runs.items():
        curve = run.curve(epochs)
        axes.plot(at, curve, **LOOKS[name])
        zoom.plot(at[half - 1 :], curve[half - 1 :], **LOOKS[name])
        below.plot(at, run.distances, **LOOKS[name])
    axes.set(yscale="log", ylabel="mean squared error, training")
    axes.set_title("With tied, the interruption changes nothing", loc="left")
    below.set(xlabel="epoch", ylabel="relative distance")
    below.set_title("How far the decoder is from the encoder, transposed", loc="left")
    for each in (axes, below, zoom):
        each.axvline(half + 0.5, color=GREY, linewidth=0.8, linestyle=":")
        each.spines[["top", "right"]].set_visible(False)
    zoom.tick_params(labelsize=8)
    axes.legend(loc="upper right", framealpha=1, edgecolor="none")
    axes.annotate(
        "f64, f32, second device, copy",
        (half + 0.5, 0.6),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=GREY,
        fontsize=9,
    )


def draw_digits(area: Any, rows: dict[str, np.ndarray]) -> None:
    """Blocks of two rows of digits, each with its name above."""
    blocks = area.subfigures(len(rows), 1, hspace=0.02)
    for block, (name, images) in zip(blocks, rows.items(), strict=True):
        block.suptitle(name, x=0.01, ha="left", fontsize=11)
        grid = block.subplots(2, len(images) // 2)
        for axes, image in zip(grid.flat, images, strict=True):
            axes.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("#cccccc")


def draw(path: Path, runs: dict[str, Training], held_out: np.ndarray, epochs: int) -> None:
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11})
    figure = plt.figure(figsize=(13, 6.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.02), wspace=0.03)
    draw_curves(*left.subplots(2, 1, sharex=True, height_ratios=(2.2, 1)), runs, epochs)
    shown = held_out[:20]
    rows = {
        "Digits that no training saw": shown,
        "Tied: 16 numbers a digit, one set of weights": runs["interrupted"].model(shown),
        "Tie lost half-way: two sets of weights": runs["tie lost"].model(shown),
    }
    draw_digits(right, {name: np.asarray(images) for name, images in rows.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def report(runs: dict[str, Training], held_out: np.ndarray, epochs: int) -> None:
    print(tied.ties(runs["interrupted"].model))
    print(tied.compare(runs["interrupted"].model, runs["tie lost"].model))
    print(f"\n{'training':<15}{'parameters':>12}{'bytes':>10}{'loss':>11}{'held out':>11}")
    for name, run in runs.items():
        counted = tied.ties(run.model)
        unseen = float(loss(run.skeleton, run.storages, held_out))
        print(
            f"{name:<15}{counted.parameters:>12,}{counted.nbytes:>10,}"
            f"{run.curve(epochs)[-1]:>11.6f}{unseen:>11.6f}"
        )


def check(runs: dict[str, Training], steps: int) -> None:
    """The interrupted training equals the uninterrupted one, bit for bit; the lost one does not."""
    plain, kept, lost = (np.array(run.losses, np.float32) for run in runs.values())
    half = steps // 2
    assert np.array_equal(kept, plain), "the interruption changed the training"
    assert np.array_equal(lost[:half], plain[:half])
    assert not np.array_equal(lost[half:], plain[half:]), "the tie was not lost"
    for name, storage in runs["uninterrupted"].storages.items():
        other = runs["interrupted"].storages[name]
        assert np.asarray(storage).tobytes() == np.asarray(other).tobytes(), name
        assert other.devices() == {jax.devices("cpu")[1]}, name
    print(f"\ninterrupted = uninterrupted, bit for bit, in all {steps:,} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="a tied autoencoder on real digits")
    parser.add_argument("--epochs", type=int, default=100, help="an even number (default 100)")
    parser.add_argument("--out", type=Path, default=Path("build/digits.png"))
    options = parser.parse_args()
    epochs = options.epochs
    if epochs < 2 or epochs % 2:
        parser.error("--epochs has to be even, to have a half-way")

    start = time.perf_counter()
    digits = (load_digits().data / 16).astype(np.float32)
    digits = digits[np.random.default_rng(0).permutation(len(digits))]
    images, held_out = digits[:TRAINED_ON], digits[TRAINED_ON:]
    half_ways = {"uninterrupted": None, "interrupted": by_tied, "tie lost": by_tree_map}
    runs = {}
    with tqdm(total=3 * epochs, unit="epoch") as bar:
        for name, half_way in half_ways.items():
            bar.set_description(f"{name:<13}")
            runs[name] = train(images, epochs, half_way, bar)
    report(runs, held_out, epochs)
    check(runs, epochs * TRAINED_ON // BATCH)
    draw(options.out, runs, held_out, epochs)
    print(f"{options.out} shows it; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
