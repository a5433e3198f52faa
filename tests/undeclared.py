"""Models of GPT-2 with ties that no configuration of transformers declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import tied

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TOKENS = torch.tensor([[1, 5, 2, 9]])
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
IN, OUT = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight"
SIZES: dict[str, Any] = {
    "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 13,
    "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip


def gpt2(cls: type[GPT2LMHeadModel] = GPT2LMHeadModel, *, declared: bool = False) -> Any:
    torch.manual_seed(0)
    model = cls(GPT2Config(**SIZES, tie_word_embeddings=declared)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@dataclass(frozen=True)
class Undeclared:
    """A tie that no configuration declares: the arguments of `tied.tie`."""

    target: str
    sources: tuple[str, ...]
    view: Callable[..., Any] | None = None

    def tie(self, model: Any) -> Any:
        tied.tie(model, self.target, self.sources, self.view)
        return model

    def value(self, model: Any) -> torch.Tensor:
        """What the target has to be, worked out by hand."""
        values = [model.get_parameter(source) for source in self.sources]
        return values[0] if self.view is None else self.view(*values)


def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


UNDECLARED = {
    "the head, tied late": Undeclared(HEAD, (WTE,)),
    "the embedding, tied late": Undeclared(WTE, (HEAD,)),
    "a transposed one": Undeclared(OUT, (IN,), tied.transpose),
    "a slice": Undeclared("transformer.wpe.weight", (WTE,), lambda w: w[2:10]),
    "computed": Undeclared("transformer.h.1.mlp.c_fc.weight", (IN,), torch.tanh),
    "computed of two": Undeclared(
        "transformer.ln_f.weight",
        ("transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight"),
        total,
    ),
}


def said(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def assert_alike(a: Any, b: Any) -> None:
    """Both say the same, but for the last bit: a view is not contiguous, its copy in a file is."""
    torch.testing.assert_close(said(a), said(b), rtol=1e-5, atol=1e-6)


def train(model: Any, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


def read(cls: Any, folder: Path) -> Any:
    """Loads a model, and holds that no name was missing, too much, or of another shape."""
    model, info = cls.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


def written(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    assert sum(map(len, tensors)) == len({name for found in tensors for name in found})
    return {name: tensor for found in tensors for name, tensor in found.items()}


def tensor(model: Any, name: str) -> torch.Tensor:
    module, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(module), leaf)
