"""The shapes that are measured, and what is to be reached with them on one NVIDIA H200."""

from dataclasses import dataclass
from typing import Any

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "initializer_range": 0.02, "dtype": "bfloat16",
}  # fmt: skip
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "initializer_range": 0.02, "dtype": "bfloat16",
}  # fmt: skip


def _shape(base: dict[str, Any], layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool) -> dict[str, Any]:
    return base | {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": mlp, "vocab_size": vocab, "tie_word_embeddings": tied,
    }  # fmt: skip


SHAPES = {
    "qwen2.5-0.5b": _shape(_QWEN, 24, 896, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": _shape(_QWEN, 28, 1536, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": _shape(_QWEN, 36, 2048, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": _shape(_QWEN, 28, 3584, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": _shape(_QWEN, 48, 5120, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": _shape(_QWEN, 64, 5120, 40, 8, 27648, 152064, False),
    "llama-3-8b": _shape(_LLAMA, 32, 4096, 32, 8, 14336, 128256, False),
    "tiny": _shape(_QWEN, 4, 64, 4, 2, 128, 512, True),
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """What a measurement is held to: tokens per second, and step time over pure-compute time; 0 where nothing is set."""

    tokens_per_s: float
    stretch: float = 0.0
    ratio: float = 0.0
    ratio_stretch: float = 0.0


BAR_SEQUENCE_LENGTH = 1024
BARS: dict[tuple[str, str, int, float | None], Bar] = {  # (shape, precision, tokens per step, VRAM limit in GiB)
    ("qwen2.5-7b", "bf16", 65536, 36): Bar(10_300, 11_500, 1.06, 1.02),
    ("qwen2.5-7b", "bf16", 65536, 16): Bar(10_000, 11_000, 1.12, 1.06),
    ("qwen2.5-7b", "bf16", 65536, 10): Bar(9_000, 0, 1.15, 1.08),
    ("qwen2.5-7b", "bf16", 16384, 36): Bar(6_500, 7_500, 1.7, 1.5),
    ("qwen2.5-7b", "bf16", 65536, None): Bar(13_000, 13_800),
    ("qwen2.5-3b", "bf16", 32768, 16): Bar(20_000, 22_000),
}
ACCEPTED_MEMORY = (0.97, 1.1)  # predicted over measured peaks: hardly ever too little
ACCEPTED_STEP_TIME = (0.85, 1.15)
