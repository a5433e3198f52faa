"""PEFT's adapters on a model of transformers, whose config declares the tie.

T90 and T91 are numbers of the project's list of field reports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tied
from adapting import TOKENS, close, lora, refused, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=13, intermediate_size=8, tie_word_embeddings=True, use_cache=False,
        attn_implementation="eager", **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x).logits


LLAMA: dict[str, tuple[list[str], dict[str, Any]]] = {
    "head": (["lm_head"], {}),
    "embedding": (["embed_tokens"], {}),
    "both": (["lm_head", "embed_tokens"], {}),
    "both_tied": (["lm_head", "embed_tokens"], {"ensure_weight_tying": True}),
    "copies": (["q_proj"], {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "copies_tied": (
        ["q_proj"],
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tokens": (["q_proj"], {"trainable_token_indices": [1, 2]}),
}


@pytest.mark.parametrize("name", LLAMA)
def test_a_model_of_transformers(name: str, tmp_path: Path) -> None:
    """T90, T91: what is trained is what is loaded, and merging is right or refused."""
    sides, options = LLAMA[name]
    model = llama()
    tied.tie(model)
    adapted = lora(model, sides, **options)
    train(Logits(adapted), TOKENS)
    result = adapted(TOKENS).logits
    adapted.save_pretrained(tmp_path)
    base = llama()
    tied.tie(base)
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(loaded(TOKENS).logits, result)
    assert torch.equal(base.get_output_embeddings().weight, base.get_input_embeddings().weight)
    if sides != ["q_proj"]:
        text = """
            merging an adapter into one side of a tie would change the other side
              tie  lm_head.weight reads model.embed_tokens.weight
              Untie it first: tied.untie(model, "lm_head.weight")
            """
        refused(text, loaded.merge_and_unload)
        return
    merged = loaded.merge_and_unload()
    close(merged(TOKENS).logits, result)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
