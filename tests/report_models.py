"""The small checkpoints that the page of `tied report` is tried on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tied

RANDOM = np.random.default_rng(0)

HOSTILE = (
    "</script><script>document.title='broken'</script>",
    "</SCRIPT ><!--<script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "quotes \" ' ` & &lt; {{script}} ${1}",
    "a\u202egnp.exe",
    "\u05d0\u05d1.weight",
    "x" * 5000,
    "..",
    "deep." * 400 + "w",
    "a",
    "a.b",
    "line\nbreak\t\x1b[31m",
    "\u2028\u2029",
    "__proto__.constructor",
    "\U0001f642",
)
"""Names that would break a page that believes them."""


def random(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype("float32")


def gpt2(layers: int = 12, width: int = 48, words: int = 1571) -> dict[str, Any]:
    """The names and shapes of GPT-2, made small; the head is the embedding."""
    model = {
        "transformer.wte.weight": random(words, width),
        "transformer.wpe.weight": random(64, width),
    }
    for layer in range(layers):
        for name, shape in {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }.items():  # fmt: skip
            model[f"transformer.h.{layer}.{name}"] = random(*shape)
    model |= {"transformer.ln_f.weight": random(width), "transformer.ln_f.bias": random(width)}
    return model | {"lm_head.weight": model["transformer.wte.weight"]}


def autoencoder() -> dict[str, Any]:
    """Three matrices, each read again, transposed."""
    weights = [random(64, 32), random(32, 16), random(16, 8)]
    model = {}
    for at, weight in enumerate(weights):
        model |= {f"encoder.{at}.weight": weight, f"encoder.{at}.bias": random(weight.shape[1])}
        model[f"decoder.{2 - at}.weight"] = weight.T
        model[f"decoder.{2 - at}.bias"] = random(weight.shape[0])
    return model


def lost() -> dict[str, Any]:
    """One tie, and two of which only the values are left."""
    embed = random(40, 8)
    return {
        "embed.weight": embed, "head.weight": embed.T, "old.weight": embed.T.copy(),
        "rows": embed[:20].copy(), "norm": random(8),
    }  # fmt: skip


def many(layers: int, experts: int) -> dict[str, Any]:
    """The names of a mixture of experts: 3 for each; the head is the embedding."""
    embed, block = random(40, 8), random(2, 4)
    model = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": block.copy()
        for layer in range(layers)
        for expert in range(experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    return {"model.embed_tokens.weight": embed, "lm_head.weight": embed, **model}


def saved(model: dict[str, Any], folder: Path, name: str = "model.safetensors") -> Path:
    return tied.save(model, folder / name)
