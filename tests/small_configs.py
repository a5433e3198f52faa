"""Shrinks a configuration of transformers until its model is built within milliseconds.

The rules go by the names of the settings, since those are much the same in all architectures.
"""

from __future__ import annotations

import re
from typing import Any

LAYERS, HEADS, WIDTH, HEAD, STATE, VOCABULARY, LENGTH = 2, 2, 16, 8, 8, 32, 64

# The first pattern that a name fits decides; None leaves the setting alone.
_RULES: list[tuple[str, int | None]] = [
    (
        r"qk_head_dim|hash_code_len|seed|.*_steps?|.*_base|.*rope_theta|num_labels|num_buckets"
        r"|.*_chunk_length|.*_token_index",
        None,
    ),
    (r".*vocab_size.*|.*_hash_byte_group_vocab", VOCABULARY),
    (r".*_experts_per_tok(en)?|.*top_?k(_experts?)?|expert_capacity|topk_group|n_group", 1),
    (r"(n|num|moe_num)_.*experts|.*num_experts", 2),
    (
        r"(swa_|index_|linear_)?(num|n)_(.*_)?(heads?|groups)|num_kv_heads"
        r"|(.*(encoder|decoder)_)?attention_heads",
        HEADS,
    ),
    (r"(num|n)_(.*_)?layers?(_per_stack)?|(.*_)?(encoder|decoder)_layers|num_blocks", LAYERS),
    (
        r".*(head_dim|head_size|d_head|dim_head|d_kv|headdim|kv_channels|rotary_dim|lowrank|_rank)",
        HEAD,
    ),
    (r".*d_state|(ssm_)?state_size", STATE),
    (r"(mamba_)?chunk_size", WIDTH),
    (
        r".*(position_embeddings|_positions|max_seq_len|seq_length|model_max_length|context_length"
        r"|n_ctx|max_length|sliding_window|window_size|attention_window|window_len)",
        LENGTH,
    ),
    (
        r".*(intermediate_size|ffn_dim|dim_ff|d_ff|dff|feed_forward_size|ffn_hidden_size|hidden_dim"
        r"|inner_dim|d_inner|intermediate_size_mlp|ffn_size)",
        WIDTH,
    ),
    (
        r".*(hidden_size(_global|_per_layer_input)?|d_model|n_embd|embed_dim|emb_dim|emb_size|^dim"
        r"|embedding_size|embedding_dim|lru_width|proj_dim|bottleneck_size|prediction_head_size"
        r"|d_latents)",
        WIDTH,
    ),
]
_PATTERNS = [(re.compile(pattern), value) for pattern, value in _RULES]
_TOKEN = re.compile(r".*_token_(id|index)")


def _limit(name: str) -> int | None:
    for pattern, value in _PATTERNS:
        if pattern.fullmatch(name):
            return value
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _per_layer(values: Any, limit: int | None) -> Any:
    """The setting of two layers: of kinds of layers the first one and the next other one."""
    if isinstance(values[0], str):
        kinds = [values[0], *(kind for kind in values if kind != values[0])]
        return type(values)([*kinds, values[0]][:LAYERS])
    if limit is not None and _is_count(values[0]):
        return type(values)([limit] * LAYERS)
    return type(values)(values[:LAYERS])


def _changed(config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that have to become smaller."""
    changed: dict[str, Any] = {}
    parts = getattr(type(config), "sub_configs", {}) or {}
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layers = max(
        (
            value
            for name, value in settings.items()
            if _is_count(value) and "layer" in name and _limit(name) == LAYERS
        ),
        default=0,
    )
    tokens = 0
    for name, value in settings.items():
        limit = _limit(name)
        if name in parts:
            if value is not None:
                changed[name] = small(type(value), overrides.get(name))
        elif _TOKEN.fullmatch(name):
            # Each token of its own, from the end of the vocabulary.
            if isinstance(value, (list, tuple)):
                changed[name] = type(value)([VOCABULARY - 1])
            elif _is_count(value) and value >= VOCABULARY:
                tokens += 1
                changed[name] = VOCABULARY - tokens
        elif _is_count(value):
            if limit is not None and value > limit:
                changed[name] = limit
        elif isinstance(value, (list, tuple)) and value and len(value) == layers:
            changed[name] = _per_layer(value, limit)
    return changed


def small(config_class: Any, overrides: dict[str, Any] | None = None) -> Any:
    """Returns a small configuration.

    Args:
        config_class: The configuration's class; one that can be made without arguments.
        overrides: What the rules don't find out. Under the name of a nested configuration
            either its overrides, as a dict, or none.
    """
    overrides = overrides or {}
    changed = _changed(config_class(), overrides)
    parts = getattr(config_class, "sub_configs", {}) or {}
    own = {name: value for name, value in overrides.items() if name not in parts}
    return config_class(**{**changed, **own})
