"""Tiny random configurations of every supported family: 4 layers, width 64, vocabulary 160, both kinds of layers where a family has them.

`FAMILIES[name]()` gives a fresh transformers configuration; nothing is shared between calls.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

VOCAB_SIZE = 160
SLIDING_WINDOW = 8
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
    "use_cache": False,
    **_TOKENS,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _llama(**overrides: Any) -> LlamaConfig:
    return LlamaConfig(**{**_SIZES, "tie_word_embeddings": False, **overrides})


def _llama_untied() -> LlamaConfig:
    """With projection biases, and another rotary scaling than the default."""
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _llama(attention_bias=True, mlp_bias=True, rope_parameters={**rope, "original_max_position_embeddings": 64})


def _gpt2() -> GPT2Config:
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_positions": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 96}
    return GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **_TOKENS)


def _deepseek_v3() -> DeepseekV3Config:
    """Layer 0 is dense, the others route to 4 experts of which 2 are hit, plus a shared one."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    sizes = {**_SIZES, "num_key_value_heads": 4, **latent, **experts}
    return DeepseekV3Config(**sizes, n_group=2, topk_group=1, first_k_dense_replace=1)


def _qwen3_moe() -> Qwen3MoeConfig:
    """Layer 1 is dense, the others route."""
    sizes = {**_SIZES, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeConfig(**sizes, mlp_only_layers=[1], norm_topk_prob=True)


def _gpt_oss() -> GptOssConfig:
    sizes = {**_SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": SLIDING_WINDOW}
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return GptOssConfig(**sizes, layer_types=_ALTERNATING, rope_parameters={**rope, "original_max_position_embeddings": 128})


def _granite() -> GraniteConfig:
    multipliers = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
    return GraniteConfig(**_SIZES, **multipliers, attention_bias=True, mlp_bias=True)


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "llama_untied": _llama_untied,
    "mistral": lambda: MistralConfig(**_SIZES, head_dim=16, sliding_window=SLIDING_WINDOW),
    "qwen2": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=2, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32, attention_bias=True),
    "phi3": lambda: Phi3Config(**_SIZES, sliding_window=SLIDING_WINDOW, resid_pdrop=0.0, embd_pdrop=0.0, partial_rotary_factor=0.5),
    "gemma2": lambda: Gemma2Config(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=SLIDING_WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=SLIDING_WINDOW, layer_types=_ALTERNATING
    ),
    "gpt2": _gpt2,
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "granite": _granite,
    "smollm3": lambda: SmolLM3Config(**_SIZES, no_rope_layers=[1, 1, 1, 0]),
    "cohere2": lambda: Cohere2Config(**_SIZES, sliding_window=SLIDING_WINDOW, layer_types=_ALTERNATING, logit_scale=0.25),
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=16, partial_rotary_factor=0.5, attention_bias=True),
    "exaone4": lambda: Exaone4Config(**_SIZES, sliding_window=SLIDING_WINDOW, layer_types=_ALTERNATING),
    "starcoder2": lambda: Starcoder2Config(
        **_SIZES, sliding_window=SLIDING_WINDOW, residual_dropout=0.0, embedding_dropout=0.0, use_bias=True
    ),
    "qwen3_moe": _qwen3_moe,
    "mixtral": lambda: MixtralConfig(**_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0),
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
}
