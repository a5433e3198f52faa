"""A tiny model, with random weights, of every text architecture of transformers.

The classes are those that transformers itself names for causal, masked and sequence-to-sequence
language models, and for the pretraining and the encoding of text. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from small_configs import small

TOKENS = torch.tensor([[3, 5, 2, 9, 7, 4]])

_MAPPINGS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
# Of the models for pretraining and for encoding, those of text that tie in their own way.
_FURTHER = """
    AlbertForPreTraining BertForPreTraining BigBirdForPreTraining ElectraForPreTraining
    ErnieForPreTraining FNetForPreTraining FunnelForPreTraining MegatronBertForPreTraining
    MobileBertForPreTraining RoCBertForPreTraining SplinterForPreTraining MT5EncoderModel
    T5EncoderModel T5GemmaEncoderModel UMT5EncoderModel
""".split()

BUILT = """
    AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM AlbertForMaskedLM AlbertForPreTraining
    Apertus1p5TextForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
    AudioFlamingo3ForConditionalGeneration BailingHybridForCausalLM BambaForCausalLM
    BartForCausalLM BartForConditionalGeneration BeamForCausalLM BertForMaskedLM
    BertForPreTraining BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM
    BigBirdForMaskedLM BigBirdForPreTraining BigBirdPegasusForCausalLM
    BigBirdPegasusForConditionalGeneration BioGptForCausalLM BitNetForCausalLM
    BlenderbotForCausalLM BlenderbotForConditionalGeneration BlenderbotSmallForCausalLM
    BlenderbotSmallForConditionalGeneration BloomForCausalLM BltForCausalLM CTRLLMHeadModel
    CamembertForCausalLM CamembertForMaskedLM CodeGenForCausalLM Cohere2ForCausalLM
    Cohere2MoeForCausalLM CohereCompassForCausalLM CohereForCausalLM ConvBertForMaskedLM
    CpmAntForCausalLM CwmForCausalLM Data2VecTextForCausalLM Data2VecTextForMaskedLM
    DbrxForCausalLM DebertaForMaskedLM DebertaV2ForMaskedLM DeepseekV2ForCausalLM
    DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM DiffLlamaForCausalLM
    DistilBertForMaskedLM DogeForCausalLM DoryForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM
    ElectraForCausalLM ElectraForMaskedLM ElectraForPreTraining Emu3ForCausalLM
    EncoderDecoderModel Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM ErnieForCausalLM
    ErnieForMaskedLM ErnieForPreTraining EsmForMaskedLM EsmcForMaskedLM EuroBertForMaskedLM
    Exaone4ForCausalLM ExaoneMoeForCausalLM FNetForMaskedLM FNetForPreTraining
    FSMTForConditionalGeneration FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
    FlaubertWithLMHeadModel FlexOlmoForCausalLM FlintForCausalLM FunnelForMaskedLM
    FunnelForPreTraining FuyuForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
    GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM Gemma2ForCausalLM
    Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForCausalLM
    Gemma4UnifiedForConditionalGeneration GemmaForCausalLM GitForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmAsrForConditionalGeneration GlmForCausalLM
    GlmMoeDsaForCausalLM GotOcr2ForConditionalGeneration GptOssForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM
    GraniteMoeSharedForCausalLM GraniteSWAForCausalLM GraniteSpeechForConditionalGeneration
    GraniteSpeechPlusForConditionalGeneration GteForMaskedLM HYV3ForCausalLM HYV4ForCausalLM
    HeliumForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
    HyperCLOVAXForCausalLM IBertForMaskedLM Inkling2ForCausalLM Inkling2LoopForCausalLM
    InklingForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM
    JinaEmbeddingsV3ForMaskedLM KimiLinearForCausalLM Kolibri1ForCausalLM
    LEDForConditionalGeneration LagunaForCausalLM LaraMiniForCausalLM LayoutLMForMaskedLM
    Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM Llama4ForCausalLM LlamaForCausalLM
    LongT5ForConditionalGeneration LongcatFlashForCausalLM LongformerForMaskedLM LukeForMaskedLM
    M2M100ForConditionalGeneration MBartForCausalLM MBartForConditionalGeneration
    MPNetForMaskedLM MT5EncoderModel MT5ForConditionalGeneration Mamba2ForCausalLM
    MambaForCausalLM MarianForCausalLM MarianMTModel MegatronBertForCausalLM
    MegatronBertForMaskedLM MegatronBertForPreTraining MellumForCausalLM MiMoV2FlashForCausalLM
    MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
    Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM
    MllamaForCausalLM MobileBertForMaskedLM MobileBertForPreTraining
    ModernBertDecoderForCausalLM ModernBertForMaskedLM ModernVBertForMaskedLM MoshiForCausalLM
    MossTranscribeDiarizeForConditionalGeneration MptForCausalLM MraForMaskedLM
    MusicFlamingoForConditionalGeneration MusicgenForCausalLM MusicgenMelodyForCausalLM
    MvpForCausalLM MvpForConditionalGeneration NanoChatForCausalLM
    Nemotron3_5TranscribeForConditionalGeneration NemotronForCausalLM NemotronHForCausalLM
    NeoMMEForMaskedLM NllbMoeForConditionalGeneration NomicBertForMaskedLM
    NystromformerForMaskedLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM
    OlmoHybridForCausalLM OlmoeForCausalLM OmniASRForConditionalGeneration OpenAIGPTLMHeadModel
    PLBartForCausalLM PLBartForConditionalGeneration PegasusForCausalLM
    PegasusForConditionalGeneration PegasusXForConditionalGeneration PerceiverForMaskedLM
    PersimmonForCausalLM Phi3ForCausalLM Phi4MultimodalForCausalLM PhiForCausalLM
    PhimoeForCausalLM ProphetNetForCausalLM ProphetNetForConditionalGeneration
    Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen3ASRForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM RecurrentGemmaForCausalLM
    ReformerForMaskedLM ReformerModelWithLMHead RemBertForCausalLM RemBertForMaskedLM
    RoCBertForCausalLM RoCBertForMaskedLM RoCBertForPreTraining RoFormerForCausalLM
    RoFormerForMaskedLM RobertaForCausalLM RobertaForMaskedLM RobertaPreLayerNormForCausalLM
    RobertaPreLayerNormForMaskedLM RwkvForCausalLM SeamlessM4TForTextToText
    SeamlessM4Tv2ForTextToText SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM
    SplinterForPreTraining SqueezeBertForMaskedLM StableLmForCausalLM Starcoder2ForCausalLM
    SwitchTransformersForConditionalGeneration T5EncoderModel T5ForConditionalGeneration
    T5Gemma2ForConditionalGeneration T5GemmaEncoderModel T5GemmaForConditionalGeneration
    TapasForMaskedLM TrOCRForCausalLM UMT5EncoderModel UMT5ForConditionalGeneration
    UltraVBertForMaskedLM UltrabertForMaskedLM VaultGemmaForCausalLM
    VoxtralForConditionalGeneration WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM
    XLMRobertaForMaskedLM XLMRobertaXLForCausalLM XLMRobertaXLForMaskedLM XLMWithLMHeadModel
    XLNetLMHeadModel XmodForCausalLM XmodForMaskedLM YosoForMaskedLM YoutuForCausalLM
    Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM xLSTMForCausalLM
""".split()

NOT_BUILT = {
    "Gemma3nForConditionalGeneration": "its vision tower needs the timm library",
    "Gemma4AssistantForCausalLM": "reads another model's states, not tokens",
    "Gemma4UnifiedAssistantForCausalLM": "reads another model's states, not tokens",
    "VibeVoiceAsrForConditionalGeneration": "its audio tokenizers stay at 680 million parameters",
    "VoxtralRealtimeForConditionalGeneration": "reads sound, not tokens alone",
}

# They declare what they tie, and their configurations refuse it.
_NEVER_TIED = {"DbrxForCausalLM"}

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}

# Reformer draws it from a generator of its own.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}

# What the rules of small_configs do not find out.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"num_expert_group": 1},
    "BambaForCausalLM": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "attn_layer_indices": [1],
    },
    "BltForCausalLM": {"use_cache": False},
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "d_model": 16,
        "n_heads": 2,
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 1},
    "DoryForCausalLM": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "Dots1ForCausalLM": {"num_experts_per_tok": 1, "n_routed_experts": 2, "n_shared_experts": 1},
    "Dots3NoteForCausalLM": {"layer_types": ["indexed_attention", "indexed_attention"]},
    "Ernie4_5_MoeForCausalLM": {"moe_k": 1},
    "EsmForMaskedLM": {"vocab_size": 32, "pad_token_id": 1, "mask_token_id": 30},
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "GotOcr2ForConditionalGeneration": {"vision_config": {"output_channels": 16}},
    "GraniteMoeHybridForCausalLM": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "HrmTextForCausalLM": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 8},
    "MiMoV2FlashForCausalLM": {
        "num_key_value_heads": 4,
        "num_attention_heads": 8,
        "rope_parameters": _ROPES,
    },
    "MinistralForCausalLM": {"head_dim": 8},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NeoMMEForMaskedLM": {"rope_parameters": _ROPES},
    "OmniASRForConditionalGeneration": {"audio_config": {"conv_dim": [8, 8, 8, 8, 8, 8, 8]}},
    "Phi4MultimodalForCausalLM": {
        "audio_config": {"nemo_conv_channels": 16, "ext_pw_out_channel": 16}
    },
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "ReformerForMaskedLM": {
        "axial_pos_embds_dim": (8, 8),
        "axial_pos_shape": (2, 3),
        "attn_layers": ["local", "local"],
        **_NO_DROPOUT,
    },
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        **_NO_DROPOUT,
    },
    "SplinterForPreTraining": {"question_token_id": 5},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "mamba_headdim": 16,
    },
    "ZambaForCausalLM": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
    "xLSTMForCausalLM": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
}


def candidates() -> set[str]:
    """The names of all text architectures that transformers knows."""
    names = set(_FURTHER)
    for mapping in _MAPPINGS:
        for found in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            names.update((found,) if isinstance(found, str) else found)
    return names


def config(name: str) -> Any:
    """A small configuration, tied wherever the class declares what it ties."""
    made = small(getattr(transformers, name).config_class, _OVERRIDES.get(name))
    if getattr(transformers, name)._tied_weights_keys and name not in _NEVER_TIED:
        made.tie_word_embeddings = True
    # Not the kernels that know no float64.
    made._attn_implementation = "eager"
    made._experts_implementation = "eager"
    return made


def tied_by_default(name: str) -> bool:
    """Whether the class ties without being asked, by its configuration's default."""
    cls = getattr(transformers, name)
    default = small(cls.config_class, _OVERRIDES.get(name))
    return bool(cls._tied_weights_keys) and bool(getattr(default, "tie_word_embeddings", False))


def build(name: str) -> Any:
    """A model, equal at every call. No two of its parameters have equal values."""
    return copy.deepcopy(_built(name))


@functools.cache
def _built(name: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # the others are constants that no file holds
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def inputs(model: Any) -> dict[str, Any]:
    name = type(model).__name__
    given = {"input_ids": TOKENS.repeat(4, 1) if "Musicgen" in name else TOKENS}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        given["decoder_input_ids"] = TOKENS
    return given


def logits(model: Any) -> torch.Tensor:
    """What the model says about six tokens, with gradients."""
    out = model(**inputs(model))
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        if name in out:
            return out[name]
    raise KeyError(f"{type(model).__name__} gives {list(out)}")
